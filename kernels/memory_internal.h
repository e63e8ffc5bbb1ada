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

#endif
