/* tensor/tensor.h: tensors as their users see them: handles on reference-counted storages.
 *
 * Ownership: a function that returns a tensor gives it to the current scope, which lets go of it at
 * kn_scope_end(). kn_keep() takes a reference that outlives the scope, kn_tensor_free() drops it.
 * Functions borrow their arguments. While an error stands, functions return NULL and take NULL
 * quietly. */
#ifndef KNAP_TENSOR_TENSOR_H
#define KNAP_TENSOR_TENSOR_H

#include "kernels/types.h"
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_tensor kn_tensor;

/* A shape as an argument: KN_SHAPE(2, 3) stands for (int ndim, const int64_t *shape). */
#define KN_SHAPE(...)                                                                              \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[])                 \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
#define KN_SCALAR 0, NULL

/* ---- making -------------------------------------------------------------------------------- */

/* dtype KN_DTYPE_DEFAULT is f32, device KN_DEVICE_DEFAULT is the CPU. Sizes are >= 0, at most
 * KN_MAX_DIMS of them. */
KN_API kn_tensor *kn_empty(kn_dtype dtype, kn_device device, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_full(kn_dtype dtype, kn_device device, double value, int ndim,
                          const int64_t *shape);
KN_API kn_tensor *kn_zeros(kn_dtype dtype, kn_device device, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_ones(kn_dtype dtype, kn_device device, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_empty_like(const kn_tensor *t); /* same shape, dtype, device; row-major */
KN_API kn_tensor *kn_zeros_like(const kn_tensor *t);
KN_API kn_tensor *kn_ones_like(const kn_tensor *t);
KN_API kn_tensor *kn_full_like(const kn_tensor *t, double value);

typedef struct kn_arange_options {
    KN_BEGIN_OPTIONS;
    double start, step; /* 0: 0, 1 */
} kn_arange_options;
/* start, start + step, ... before end, ceil((end - start) / step) elements: kn_arange(dtype,
 * device, n) counts from 0 to n - 1. Element i is start + i step in f64, then of the dtype. An end
 * that the step leads away from is an error. */
KN_API kn_tensor *kn_arange_(kn_dtype dtype, kn_device device, double end, kn_arange_options o);
#define kn_arange(dtype, device, end, ...)                                                         \
    kn_arange_(dtype, device, (double)(end), KN_OPTIONS(kn_arange_options, __VA_ARGS__))
/* n elements from start to end, both included: start + i (end - start) / (n - 1) in f64, the last
 * one end itself. n >= 0; one element is start. */
KN_API kn_tensor *kn_linspace(kn_dtype dtype, kn_device device, double start, double end,
                              int64_t n);
/* [rows, columns] of zeros, with ones on the diagonal. */
KN_API kn_tensor *kn_eye(kn_dtype dtype, kn_device device, int64_t rows, int64_t columns);
/* Copies count elements of the dtype from host memory. */
KN_API kn_tensor *kn_from(kn_dtype dtype, kn_device device, const void *data, int ndim,
                          const int64_t *shape);
/* On memory of the caller: no copy. It must stay as long as the tensor, its views and graphs. Each
 * call begins versions of its own: where a backward has saved one tensor, it doesn't notice writes
 * through another one on the same memory; make views of one, or tell it (kn_bump_version). */
KN_API kn_tensor *kn_borrow(kn_dtype dtype, void *data, int ndim, const int64_t *shape);
/* Independent draws; element i is a function of (seed, stream, i) alone (Philox): an f32, which
 * bf16 and f16 round; uniform ones that round to 1 become the largest number below. */
KN_API kn_tensor *kn_rand(kn_dtype dtype, kn_device device, uint64_t seed, uint64_t stream,
                          int ndim, const int64_t *shape); /* uniform in [0, 1) */
KN_API kn_tensor *kn_randn(kn_dtype dtype, kn_device device, uint64_t seed, uint64_t stream,
                           int ndim, const int64_t *shape); /* normal, mean 0, deviation 1 */

/* ---- looking ------------------------------------------------------------------------------- */

KN_API int kn_ndim(const kn_tensor *t);
KN_API int64_t kn_size(const kn_tensor *t, int dim); /* dim < 0 counts from the end */
KN_API const int64_t *kn_shape(const kn_tensor *t);
KN_API int64_t kn_numel(const kn_tensor *t);
KN_API kn_dtype kn_dtype_of(const kn_tensor *t);
KN_API kn_device kn_device_of(const kn_tensor *t);
KN_API bool kn_is_contiguous(const kn_tensor *t);
/* The single element as a double; 0 and an error for other sizes, released bytes and meta. Waits
 * for the compute stream. */
KN_API double kn_item(const kn_tensor *t);
/* Copies all elements, row-major, to host memory of bytes = numel * element size. */
KN_API bool kn_to_host(const kn_tensor *t, void *host, size_t bytes);
/* Reading without waiting: begin copies t's elements, row-major, to the host behind all earlier
 * launches and returns at once; end copies them into host memory of as many bytes (NULL: nowhere)
 * and ends f; it waits only if they haven't arrived (ready returns false). So a loop can print the
 * loss of an earlier step while the GPU goes on. Every begin needs its end, also after an error. */
typedef struct kn_fetch kn_fetch;
KN_API kn_fetch *kn_fetch_begin(const kn_tensor *t);
KN_API bool kn_fetch_ready(const kn_fetch *f);
KN_API bool kn_fetch_end(kn_fetch *f, void *host, size_t bytes);
/* The bytes themselves (CPU tensors; contiguous; NULL and an error otherwise). Writing through it
 * is an in-place write that must be announced with kn_bump_version(). */
KN_API void *kn_data(const kn_tensor *t);
/* t's bytes were written. Inside a call that recomputes that is an error for tensors from outside,
 * whose old bytes nobody has any more: write those by kn_write_data or an operation. */
KN_API void kn_bump_version(kn_tensor *t);
/* "f32[2,3]"; prints values as nested rows, "..." in the middle of long dims. */
KN_API char *kn_describe(const kn_tensor *t, char *buf, size_t size);
KN_API bool kn_print(FILE *out, const kn_tensor *t);
/* A name for messages; copied. */
KN_API void kn_set_name(kn_tensor *t, const char *name);
KN_API const char *kn_name(const kn_tensor *t); /* "" without one */

/* ---- writing in place (never recorded on the tape) ------------------------------------------- */

KN_API bool kn_fill_(kn_tensor *t, double value);
/* src expands to dst; converts. Values alone: a later gradient of dst doesn't go on to src. */
KN_API bool kn_copy_(kn_tensor *dst, const kn_tensor *src);
/* Arithmetic, rounded once. x expands to t's shape on its device, and is converted to its dtype
 * (not a float to an integer). factor and weight are finite; where t holds integers, that of add_
 * is 1, that of scale_ whole. As all writes they are refused on a tensor that requires grad while
 * grad mode is on, and backward refuses where an operation had saved t. */
KN_API bool kn_add_(kn_tensor *t, const kn_tensor *x, double factor);  /* t += factor x */
KN_API bool kn_mul_(kn_tensor *t, const kn_tensor *x);                 /* t *= x */
KN_API bool kn_scale_(kn_tensor *t, double factor);                    /* t *= factor */
KN_API bool kn_lerp_(kn_tensor *t, const kn_tensor *x, double weight); /* t += weight (x - t) */

/* ---- scopes ---------------------------------------------------------------------------------- */

typedef struct kn_scope {
    int64_t mark;
    uint32_t serial;
} kn_scope;

KN_API kn_scope kn_scope_begin(void);
/* Lets go of every tensor made since begin that was not kept; ends inner scopes that are open.
 * Works while an error stands. Ending a scope twice does nothing. */
KN_API void kn_scope_end(kn_scope s);
KN_API kn_tensor *kn_keep(kn_tensor *t);  /* takes a reference, returns t */
KN_API void kn_tensor_free(kn_tensor *t); /* drops a reference; NULL is fine */
KN_API int64_t kn_live_tensors(void);     /* handles alive in this process: for leak tests */
/* Writes one line for each live handle of this process with the user's place that made it; only in
 * a debug build, others write their count. */
KN_API void kn_list_live(FILE *out);

#ifdef __cplusplus
}
#endif
#endif
