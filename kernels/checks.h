/* kernels/checks.h (private): whether the arguments of a kernel fit together, once for all
 * providers: shapes, dtypes and kinds. kn_launch asks before it calls a provider. Kernels check the
 * values that they read (indices, targets), and what they alone can't do. All are false with an
 * error where something doesn't fit. */
#ifndef KNAP_KERNELS_CHECKS_H
#define KNAP_KERNELS_CHECKS_H

#include "kernels/kernels_internal.h"

#define KN_ARRAY_SHOWN(a) kn_array_describe((a), (char[128]){ 0 }, 128)

/* checks.c: the check of k, all of it. */
KN_API bool kn_kernel_fits(kn_kernel k, const void *args);

/* signature.c: the arrays have the dtypes and shapes of k's signature; each that must be there and
 * has elements has bytes. */
bool kn_kernel_arrays_fit(kn_kernel k, const void *args);
bool kn_kernel_has_bytes(kn_kernel k, const void *args);
size_t kn_kernel_size(kn_kernel k); /* of its arguments */
/* "dst f32[2,3], a f32[2,4], b f32[4,3]" */
char *kn_kernel_describe(kn_kernel k, const void *args, char *text, size_t size);
/* launch.c: an event of a kernel that ran. */
void kn_trace_kernel(const char *provider, kn_stream *s, kn_kernel k, const void *args,
                     kn_cost cost, double begin, double end);

#endif
