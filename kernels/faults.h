/* kernels/faults.h (private): faults on demand, for tests. */
#ifndef KNAP_KERNELS_FAULTS_H
#define KNAP_KERNELS_FAULTS_H

#include "kernels/types.h"

/* The n-th allocation from now on (metadata and tensor bytes alike, 1 = the next) in this thread's
 * context fails once; 0 switches it off. Returns how many were made since the last call. */
KN_API int64_t kn_fail_alloc(int64_t n);

#endif
