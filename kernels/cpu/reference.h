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

/* ---- checks: false with an error set ------------------------------------------------------- */

bool kn_ref_check_float(kn_kernel k, const kn_array *a);
bool kn_ref_check_arithmetic(kn_kernel k, const kn_array *a);
bool kn_ref_check_same_shape(kn_kernel k, const kn_array *a, const kn_array *b);

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

kn_status kn_ref_copy(const void *args); /* reference_elementwise.c */
kn_status kn_ref_fill(const void *args);
kn_status kn_ref_binary(const void *args);
kn_status kn_ref_where(const void *args);
kn_status kn_ref_unary(const void *args); /* reference_unary.c */
kn_status kn_ref_unary_grad(const void *args);
kn_status kn_ref_reduce(const void *args); /* reference_reduce.c */
kn_status kn_ref_absmax(const void *args);
kn_status kn_ref_loss_scale(const void *args);
kn_status kn_ref_sqsum(const void *args);
kn_status kn_ref_powsum(const void *args);
kn_status kn_ref_clip(const void *args);
kn_status kn_ref_matmul(const void *args);  /* reference_matmul.c */
kn_status kn_ref_softmax(const void *args); /* reference_rows.c */
kn_status kn_ref_softmax_grad(const void *args);
kn_status kn_ref_cross_entropy(const void *args);
kn_status kn_ref_cross_entropy_grad(const void *args);
kn_status kn_ref_norm(const void *args);
kn_status kn_ref_norm_grad(const void *args);
kn_status kn_ref_index_select(const void *args); /* reference_index.c */
kn_status kn_ref_index_add(const void *args);
kn_status kn_ref_gather(const void *args); /* reference_gather.c */
kn_status kn_ref_scatter(const void *args);
kn_status kn_ref_sort(const void *args); /* reference_sort.c */
kn_status kn_ref_cumsum(const void *args);
kn_status kn_ref_random(const void *args); /* reference_random.c */
kn_status kn_ref_round(const void *args);
kn_status kn_ref_dropout(const void *args);
kn_status kn_ref_attention(const void *args); /* reference_attention.c */
kn_status kn_ref_attention_grad(const void *args);
kn_status kn_ref_rope(const void *args);
kn_status kn_ref_sum_n(const void *args); /* reference_optim.c */
kn_status kn_ref_adamw(const void *args);
kn_status kn_ref_sgd(const void *args);
kn_status kn_ref_lion(const void *args);
kn_status kn_ref_conv(const void *args); /* reference_conv.c */
kn_status kn_ref_conv_grad_x(const void *args);
kn_status kn_ref_conv_grad_w(const void *args);
kn_status kn_ref_batch_norm(const void *args); /* reference_batch_norm.c */
kn_status kn_ref_batch_norm_grad(const void *args);
kn_status kn_ref_batch_norm_join(const void *args); /* reference_batch_norm_join.c */
kn_status kn_ref_pool(const void *args);            /* reference_pool.c */
kn_status kn_ref_pool_grad(const void *args);
kn_status kn_ref_interpolate(const void *args);
kn_status kn_ref_interpolate_grad(const void *args);

#endif
