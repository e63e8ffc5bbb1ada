/* tests/fsdp/memory_walk.h: bytes that come and go in a step, from a formula that knows no
 * schedule. */
#ifndef KNAP_TESTS_MEMORY_WALK_H
#define KNAP_TESTS_MEMORY_WALK_H

#include <stdint.h>

typedef struct memory_peaks {
    int64_t gathered, unreduced;
} memory_peaks;
/* Of the tree of units below root, which has had a step. */
memory_peaks memory_walk(void *root);

#endif
