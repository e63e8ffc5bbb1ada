/* kernels/checks.h (private): whether the arguments of a kernel fit together, once for all
 * providers. kn_launch asks before it calls a provider. The row of a kernel (KN_KERNELS) says the
 * dtypes and shapes of its arrays (checks.c); checks_more.c has the rest: kinds, dims, options.
 * Kernels check the values that they read (indices, targets), and what they alone can't do. All are
 * false with an error where something doesn't fit. */
#ifndef KNAP_KERNELS_CHECKS_H
#define KNAP_KERNELS_CHECKS_H

#include "kernels/kernels_internal.h"

/* The check of k. */
KN_API bool kn_kernel_fits(kn_kernel k, const void *args);
/* Its part that no row says. */
bool kn_kernel_fits_more(kn_kernel k, const void *args);
/* Every array that must be there and has elements has bytes. */
bool kn_kernel_has_bytes(kn_kernel k, const void *args);
/* "dst f32[2,3], a f32[2,4], b f32[4,3]"; returns text. */
char *kn_kernel_describe(kn_kernel k, const void *args, char *text, size_t size);
/* t is f32, bf16, f16 or f64. */
bool kn_check_float(kn_kernel k, kn_dtype t);

#endif
