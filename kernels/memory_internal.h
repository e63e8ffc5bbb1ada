/* kernels/memory_internal.h (private): lists of host memory that grow. */
#ifndef KNAP_KERNELS_MEMORY_INTERNAL_H
#define KNAP_KERNELS_MEMORY_INTERNAL_H

#include "kernels/memory.h"

/* Makes room for count items of size bytes in the list whose address is passed: a pointer to *room
 * items from kn_host_alloc, or NULL with *room 0. The room at least doubles. False with an error
 * where memory runs out; the list stays as it was. */
bool kn_host_grow(void *list, int64_t *room, int64_t count, size_t size);

#endif
