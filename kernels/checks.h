/* kernels/checks.h (private): whether the arguments of a kernel fit together, once for all
 * providers: shapes, dtypes and kinds. kn_launch asks before it calls a provider. Kernels check the
 * values that they read (indices, targets), and what they alone can't do. All are false with an
 * error where something doesn't fit. */
#ifndef KNAP_KERNELS_CHECKS_H
#define KNAP_KERNELS_CHECKS_H

#include "kernels/kernels_internal.h"

/* The check of k. */
KN_API bool kn_kernel_fits(kn_kernel k, const void *args);

/* kn_fits_<name> of every kernel: in checks.c, those of attention, images and optimizers in
 * checks_more.c. */
#define KN_KERNEL_FITS(entry, name, ...) bool kn_fits_##name(const kn_##name##_args *a);
KN_KERNELS(KN_KERNEL_FITS)
#undef KN_KERNEL_FITS

bool kn_check_float(kn_kernel k, const kn_array *a);
bool kn_check_same_shape(kn_kernel k, const kn_array *a, const kn_array *b);
bool kn_check_same_if_there(kn_kernel k, const kn_array *a, const kn_array *b); /* data NULL: no */

#endif
