/* tests/fsdp/guarded.h: a registered device for tests: it computes by the CPU's kernels on memory
 * of its own, which is protected except while a kernel or a transfer runs. A kernel or a transfer
 * that is given other memory is an error. */
#ifndef KNAP_TESTS_GUARDED_H
#define KNAP_TESTS_GUARDED_H

#include "kernels/types.h"

/* It is registered as device GUARDED until the end. */
#define GUARDED KN_OTHER_DEVICE
void guarded_begin(void);
void guarded_end(void);

#endif
