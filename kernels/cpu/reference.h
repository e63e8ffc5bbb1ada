/* kernels/cpu/reference.h (private): shared by the files of the reference provider. The reference
 * computes every kernel of kernels/kernels.h for every dtype and stride, in loops that follow the
 * formula; the fast providers are tested against it, and it runs cases that they decline.
 *
 * Elements travel as double: every f32, bf16, f16, i32, u8 and bool is one exactly, and + - * / and
 * sqrt of two floats computed in double and rounded to float equal float arithmetic. Integers,
 * which may not fit, have a second pair of functions. */
#ifndef KNAP_KERNELS_CPU_REFERENCE_H
#define KNAP_KERNELS_CPU_REFERENCE_H

#include "kernels/convert.h"
#include "kernels/kernels_internal.h"

/* ---- elements (reference.c) ---------------------------------------------------------------- */

/* The element at offset (in elements, relative to a->data). Arithmetic dtypes. */
double kn_ref_get(const kn_array *a, int64_t offset);
/* Stores x rounded once to a's dtype: floats to nearest even; integers truncate toward zero and
 * saturate, NaN becomes 0; bool is x != 0. */
void kn_ref_set(const kn_array *a, int64_t offset, double x);
/* As the kernels compute in T: f64 stores x itself, the narrower floats round it to f32 first. */
void kn_ref_set_computed(const kn_array *a, int64_t offset, double x);
int64_t kn_ref_get_int(const kn_array *a, int64_t offset);         /* integers and bool */
void kn_ref_set_int(const kn_array *a, int64_t offset, int64_t x); /* keeps the low bits */

/* ---- walking ------------------------------------------------------------------------------- */

#define KN_REF_WALK_ARRAYS 5

/* Visits every index of a shape in row-major order; off[k] is the offset of array k's element:
 *   for (kn_ref_walk w = kn_ref_walk_over(&dst, &a, &b, NULL); w.more; kn_ref_walk_next(&w)) */
typedef struct kn_ref_walk {
    bool more;
    int64_t i; /* row-major position */
    int64_t off[KN_REF_WALK_ARRAYS];
    int ndim, arrays;
    int64_t at[KN_MAX_DIMS], shape[KN_MAX_DIMS];
    const int64_t *stride[KN_REF_WALK_ARRAYS];
} kn_ref_walk;

/* Arrays of one shape, the list ended by NULL. They must outlive the walk. */
kn_ref_walk kn_ref_walk_over(const kn_array *first, ...) __attribute__((sentinel));
/* The same over the leading ndim dims of shape only. */
kn_ref_walk kn_ref_walk_shape(int ndim, const int64_t *shape, int n, const kn_array *const *arrays);
void kn_ref_walk_next(kn_ref_walk *w);

/* The offset of a[i,j,k,l]. */
static inline int64_t kn_ref_at(const kn_array *a, int64_t i, int64_t j, int64_t k, int64_t l)
{
    return i * a->stride[0] + j * a->stride[1] + k * a->stride[2] + l * a->stride[3];
}

/* False with an error if a value of index lies outside of full's dim. */
bool kn_ref_check_index(const char *op, const kn_array *index, const kn_array *full, int dim);

/* 1 where ndim is 0: a scalar is a row of one. */
static inline int64_t kn_ref_last_dim(const kn_array *a)
{
    return a->ndim > 0 ? a->shape[a->ndim - 1] : 1;
}

static inline int64_t kn_ref_last_stride(const kn_array *a)
{
    return a->ndim > 0 ? a->stride[a->ndim - 1] : 1;
}

static inline int kn_ref_leading(const kn_array *a)
{
    return a->ndim > 0 ? a->ndim - 1 : 0;
}

/* ---- the entries ---------------------------------------------------------------------------- */

/* The derivative of log |gamma(x)|, and its own. */
double kn_ref_digamma(double x);
double kn_ref_trigamma(double x);

#define KN_REF_ENTRY(entry, name, ...) kn_status kn_ref_##name(const void *args);
KN_KERNELS(KN_REF_ENTRY)

#endif
