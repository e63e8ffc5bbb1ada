/* kernels/memory_internal.h (private): lists of host memory that grow. */
#ifndef KNAP_KERNELS_MEMORY_INTERNAL_H
#define KNAP_KERNELS_MEMORY_INTERNAL_H

#include "kernels/memory.h"

/* Makes room for count items of size bytes in the list whose address is passed: a pointer to *room
 * items from kn_host_alloc, or NULL with *room 0. The room at least doubles. False with an error
 * where memory runs out; the list stays as it was. */
bool kn_host_grow(void *list, int64_t *room, int64_t count, size_t size);

/* As kn_take and kn_give; owner: for the trace, whose bytes they are; NULL: the running call's. */
void *kn_take_for(kn_memory *m, size_t bytes, kn_mem_category category, const char *owner);
void kn_give_of(kn_memory *m, void *p, size_t bytes, kn_mem_category category, const char *owner);

/* Size classes of pools, eight a power of two (cpu/memory.c): the smallest of blocks that hold so
 * many bytes, above 0; and the bytes of its blocks. Class c < 8 holds (c + 1) * 64 bytes; then with
 * k = c / 8 - 1 and j = c % 8, class c holds (9 + j) * 64 * 2^k bytes. */
int kn_size_class(size_t bytes);
size_t kn_class_size(int c);

/* The least multiple of to that is at least n. */
static inline size_t kn_round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

#endif
