/* tests/fsdp/memory_walk.h: the memory of a step, from a formula independent of the schedule. */
#ifndef KNAP_TESTS_MEMORY_WALK_H
#define KNAP_TESTS_MEMORY_WALK_H

#include <stdint.h>

typedef struct memory_peaks {
    int64_t gathered, unreduced;
} memory_peaks;
/* For the tree of units below root, after its first step. */
memory_peaks memory_walk(void *root);

#endif
