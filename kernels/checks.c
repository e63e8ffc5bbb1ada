/* kernels/checks.c: the checks (checks.h) of elementwise kernels, products, rows and indices. */
#include "kernels/checks.h"

/* ---- parts ----------------------------------------------------------------------------------- */

bool kn_check_float(kn_kernel k, const kn_array *a)
{
    return kn_dtype_is_float(a->dtype) ||
           kn_fail("%s: dtype %s is not supported; use f32, bf16, f16 or f64", kn_kernel_name(k),
                   kn_dtype_name(a->dtype));
}

static bool arithmetic(kn_kernel k, const kn_array *a)
{
    return kn_dtype_is_arithmetic(a->dtype) ||
           kn_fail("%s: dtype %s has no arithmetic; convert it to one of f32, bf16, f16, f64, i64, "
                   "i32, u8, bool",
                   kn_kernel_name(k), kn_dtype_name(a->dtype));
}

bool kn_check_same_shape(kn_kernel k, const kn_array *a, const kn_array *b)
{
    char one[128], two[128];
    bool same = a->ndim == b->ndim;
    for (int d = 0; same && d < a->ndim; d++)
        same = a->shape[d] == b->shape[d];
    return same || kn_fail("%s: shapes differ: %s and %s must be equal here (expand first)",
                           kn_kernel_name(k), kn_array_describe(a, one, sizeof one),
                           kn_array_describe(b, two, sizeof two));
}

bool kn_check_same_if_there(kn_kernel k, const kn_array *a, const kn_array *b)
{
    return !a->data || kn_check_same_shape(k, a, b);
}

bool kn_kernel_fits(kn_kernel k, const void *args)
{
#define FITS(entry, name, ...)                                                                     \
    case KN_K_##entry:                                                                             \
        return kn_fits_##name(args);
    switch (k) {
        KN_KERNELS(FITS)
    default:
        return false;
    }
}

static bool is_index(const kn_array *a)
{
    return a->dtype == KN_I64 || a->dtype == KN_I32;
}

/* ---- elementwise ----------------------------------------------------------------------------- */

bool kn_fits_copy(const kn_copy_args *a)
{
    const kn_dtype to = a->dst.dtype, from = a->src.dtype;
    return kn_check_same_shape(KN_K_COPY, &a->dst, &a->src) &&
           (to == from || (kn_dtype_is_arithmetic(to) && kn_dtype_is_arithmetic(from)) ||
            kn_fail("copy: %s to %s is not supported; storage-only dtypes copy to the same dtype "
                    "only",
                    kn_dtype_name(from), kn_dtype_name(to)));
}

bool kn_fits_fill(const kn_fill_args *a)
{
    return arithmetic(KN_K_FILL, &a->dst);
}

bool kn_fits_unary(const kn_unary_args *a)
{
    const kn_kind_row *row = kn_unary_row(a->kind);
    return kn_check_same_shape(KN_K_UNARY, &a->dst, &a->src) &&
           ((a->dst.dtype == a->src.dtype && kn_kind_takes(row, a->src.dtype)) ||
            kn_fail("unary: %s from %s to %s is not supported; kernels/kinds.h lists the dtypes of "
                    "each kind, and the result has the dtype of its input",
                    row->name, kn_dtype_name(a->src.dtype), kn_dtype_name(a->dst.dtype)));
}

bool kn_fits_unary_grad(const kn_unary_grad_args *a)
{
    const kn_kind_row *row = kn_unary_row(a->kind);
    if (!kn_kind_takes(row, KN_F32) || !kn_dtype_is_float(a->dx.dtype))
        return kn_fail("unary_grad: %s of %s has no derivative", row->name,
                       kn_dtype_name(a->dx.dtype));
    return kn_check_same_shape(KN_K_UNARY_GRAD, &a->dx, &a->dy) &&
           kn_check_same_shape(KN_K_UNARY_GRAD, &a->dx, kn_unary_grad_input(a));
}

bool kn_fits_binary(const kn_binary_args *a)
{
    const kn_dtype t = a->a.dtype, to = a->dst.dtype;
    return kn_check_same_shape(KN_K_BINARY, &a->dst, &a->a) &&
           kn_check_same_shape(KN_K_BINARY, &a->dst, &a->b) &&
           ((t == a->b.dtype && kn_binary_takes(a->kind, t, to)) ||
            kn_fail("binary: %s of %s and %s into %s is not supported; a and b have one dtype, "
                    "dst too or, for comparisons and logic, bool",
                    kn_binary_row(a->kind)->name, kn_dtype_name(t), kn_dtype_name(a->b.dtype),
                    kn_dtype_name(to)));
}

bool kn_fits_where(const kn_where_args *a)
{
    const kn_dtype t = a->dst.dtype;
    return kn_check_same_shape(KN_K_WHERE, &a->dst, &a->cond) &&
           kn_check_same_shape(KN_K_WHERE, &a->dst, &a->a) &&
           kn_check_same_shape(KN_K_WHERE, &a->dst, &a->b) &&
           ((a->cond.dtype == KN_BOOL && a->a.dtype == t && a->b.dtype == t) ||
            kn_fail(
                "where: cond is %s and must be bool; a is %s, b is %s, dst is %s and must agree",
                kn_dtype_name(a->cond.dtype), kn_dtype_name(a->a.dtype), kn_dtype_name(a->b.dtype),
                kn_dtype_name(t)));
}

bool kn_fits_random(const kn_random_args *a)
{
    char text[128];
    return kn_check_float(KN_K_RANDOM, &a->dst) &&
           ((kn_array_contiguous(&a->dst) && (unsigned)a->kind < KN_RANDOM_COUNT) ||
            kn_fail("random: kind %d into %s is not supported; uniform or normal into a contiguous "
                    "array",
                    (int)a->kind, kn_array_describe(&a->dst, text, sizeof text)));
}

bool kn_fits_dropout(const kn_dropout_args *a)
{
    return kn_check_float(KN_K_DROPOUT, &a->y) && kn_check_same_shape(KN_K_DROPOUT, &a->y, &a->x);
}

bool kn_fits_round(const kn_round_args *a)
{
    char dst[128], src[128];
    return ((a->dst.dtype == KN_BF16 || a->dst.dtype == KN_F16) &&
            kn_dtype_is_float(a->src.dtype) && a->dst.ndim == 2 && kn_array_contiguous(&a->dst) &&
            kn_array_contiguous(&a->src) && kn_check_same_shape(KN_K_ROUND, &a->dst, &a->src)) ||
           kn_fail("round: %s to %s is not supported; floats to bf16 or f16, both [rows, n] and "
                   "contiguous",
                   kn_array_describe(&a->src, src, sizeof src),
                   kn_array_describe(&a->dst, dst, sizeof dst));
}

/* ---- products, rows -------------------------------------------------------------------------- */

bool kn_fits_reduce(const kn_reduce_args *a)
{
    const kn_array *dst = &a->dst, *src = &a->src;
    char one[128], two[128];
    int reduced = 0;
    bool fits = dst->ndim == src->ndim;
    for (int d = 0; fits && d < src->ndim; d++) {
        fits = dst->shape[d] == src->shape[d] || dst->shape[d] == 1;
        reduced += dst->shape[d] != src->shape[d];
    }
    if (!fits)
        return kn_fail("reduce: %s does not reduce to %s; same number of dims, 1 where reduced",
                       kn_array_describe(src, one, sizeof one),
                       kn_array_describe(dst, two, sizeof two));
    if ((unsigned)a->kind >= KN_REDUCE_COUNT)
        return kn_fail("reduce: kind %d is not supported; SUM, MEAN, MAX, MIN and ARGMAX are",
                       (int)a->kind);
    if (a->kind == KN_ARGMAX && (dst->dtype != KN_I64 || reduced > 1))
        return kn_fail("reduce: argmax over %d dims into %s; it takes one dim, into i64", reduced,
                       kn_dtype_name(dst->dtype));
    return arithmetic(KN_K_REDUCE, src) && arithmetic(KN_K_REDUCE, dst);
}

bool kn_fits_matmul(const kn_matmul_args *m)
{
    const kn_array *dst = &m->dst, *a = &m->a, *b = &m->b, *bias = &m->bias;
    char one[128], two[128], three[128];
    int n = dst->ndim;
    bool fits = n >= 2 && a->ndim == n && b->ndim == n;
    if (fits)
        fits = a->shape[n - 2] == dst->shape[n - 2] && b->shape[n - 1] == dst->shape[n - 1] &&
               a->shape[n - 1] == b->shape[n - 2];
    for (int d = 0; fits && d < n - 2; d++)
        fits = a->shape[d] == dst->shape[d] && b->shape[d] == dst->shape[d];
    if (fits && bias->data)
        fits = bias->ndim == 1 && bias->shape[0] == dst->shape[n - 1];
    if (!fits)
        return kn_fail("matmul: %s @ %s into %s does not fit: [..., M, K] @ [..., K, N] into "
                       "[..., M, N], bias [N]",
                       kn_array_describe(a, one, sizeof one), kn_array_describe(b, two, sizeof two),
                       kn_array_describe(dst, three, sizeof three));
    return kn_check_float(KN_K_MATMUL, dst) && kn_check_float(KN_K_MATMUL, a) &&
           kn_check_float(KN_K_MATMUL, b);
}

bool kn_fits_softmax(const kn_softmax_args *a)
{
    return kn_check_same_shape(KN_K_SOFTMAX, &a->y, &a->x) && kn_check_float(KN_K_SOFTMAX, &a->x) &&
           kn_check_float(KN_K_SOFTMAX, &a->y);
}

bool kn_fits_softmax_grad(const kn_softmax_grad_args *a)
{
    return kn_check_same_shape(KN_K_SOFTMAX_GRAD, &a->dx, &a->dy) &&
           kn_check_same_shape(KN_K_SOFTMAX_GRAD, &a->dx, &a->y) &&
           kn_check_float(KN_K_SOFTMAX_GRAD, &a->dx);
}

static bool classes_fit(kn_kernel k, const kn_array *logits, const kn_array *targets,
                        const kn_array *lse, const kn_array *dlogits)
{
    char one[128], two[128], three[128];
    if (logits->ndim != 2 || targets->ndim != 1 || targets->shape[0] != logits->shape[0] ||
        kn_array_numel(lse) != logits->shape[0] || !is_index(targets))
        return kn_fail("%s: logits %s, targets %s, lse %s do not fit: [N, V], i64 or i32 [N], [N]",
                       kn_kernel_name(k), kn_array_describe(logits, one, sizeof one),
                       kn_array_describe(targets, two, sizeof two),
                       kn_array_describe(lse, three, sizeof three));
    return kn_check_float(k, logits) && kn_check_float(k, lse) &&
           kn_check_same_if_there(k, dlogits, logits);
}

bool kn_fits_cross_entropy(const kn_cross_entropy_args *a)
{
    return classes_fit(KN_K_CROSS_ENTROPY, &a->logits, &a->targets, &a->lse, &a->dlogits);
}

bool kn_fits_cross_entropy_grad(const kn_cross_entropy_grad_args *a)
{
    return classes_fit(KN_K_CROSS_ENTROPY_GRAD, &a->logits, &a->targets, &a->lse, &a->dlogits);
}

/* A weight, bias or gradient of one, or none. */
static bool fits_last_dim(kn_kernel k, const kn_array *x, const kn_array *vector)
{
    char one[128], two[128];
    const int64_t last = x->ndim > 0 ? x->shape[x->ndim - 1] : 1;
    if (!vector->data)
        return true;
    return (vector->ndim == 1 && vector->shape[0] == last && kn_check_float(k, vector)) ||
           kn_fail("%s: %s does not fit %s; weight and bias have one dim, the last of x",
                   kn_kernel_name(k), kn_array_describe(vector, one, sizeof one),
                   kn_array_describe(x, two, sizeof two));
}

/* Of x and something else that is added, or absent. */
static bool can_be_added(kn_kernel k, const kn_array *x, const kn_array *added)
{
    char one[128], two[128];
    return !added->data || (kn_check_same_shape(k, x, added) &&
                            (added->dtype == x->dtype ||
                             kn_fail("%s: %s and %s are added; their dtypes must be the same",
                                     kn_kernel_name(k), kn_array_describe(x, one, sizeof one),
                                     kn_array_describe(added, two, sizeof two))));
}

bool kn_fits_norm(const kn_norm_args *a)
{
    if (!a->add.data != !a->sum.data && kn_array_numel(&a->x) > 0)
        return kn_fail("norm: %s is given without %s", a->add.data ? "add" : "sum",
                       a->add.data ? "sum" : "add");
    return can_be_added(KN_K_NORM, &a->x, &a->add) && can_be_added(KN_K_NORM, &a->x, &a->sum) &&
           kn_check_same_shape(KN_K_NORM, &a->y, &a->x) && kn_check_float(KN_K_NORM, &a->x) &&
           fits_last_dim(KN_K_NORM, &a->x, &a->w) && fits_last_dim(KN_K_NORM, &a->x, &a->b);
}

bool kn_fits_norm_grad(const kn_norm_grad_args *a)
{
    const kn_kernel k = KN_K_NORM_GRAD;
    return kn_check_same_shape(k, &a->dy, &a->x) && kn_check_same_if_there(k, &a->dx, &a->x) &&
           kn_check_float(k, &a->x) && fits_last_dim(k, &a->x, &a->w) &&
           fits_last_dim(k, &a->x, &a->dw) && fits_last_dim(k, &a->x, &a->db) &&
           can_be_added(k, &a->x, &a->more);
}

/* ---- indices, order -------------------------------------------------------------------------- */

/* picked holds index's slices of full along dim. */
static bool slices_fit(kn_kernel k, const kn_array *full, const kn_array *picked,
                       const kn_array *index, int dim)
{
    char one[128], two[128], three[128];
    bool fits = full->ndim == picked->ndim && index->ndim == 1 && dim >= 0 && dim < full->ndim &&
                is_index(index);
    for (int d = 0; fits && d < full->ndim; d++)
        fits = picked->shape[d] == (d == dim ? index->shape[0] : full->shape[d]);
    return fits ||
           kn_fail("%s: %s along dim %d by %s does not fit %s; index is i64 or i32 with one "
                   "dim, the other dims agree",
                   kn_kernel_name(k), kn_array_describe(full, one, sizeof one), dim,
                   kn_array_describe(index, two, sizeof two),
                   kn_array_describe(picked, three, sizeof three));
}

/* picked holds an element of full along dim for each of index. */
static bool elements_fit(const char *op, const kn_array *full, const kn_array *picked,
                         const kn_array *index, int dim)
{
    char one[128], two[128], three[128];
    bool fits = full->ndim == picked->ndim && index->ndim == picked->ndim && dim >= 0 &&
                dim < full->ndim && is_index(index);
    for (int d = 0; fits && d < full->ndim; d++)
        fits =
            index->shape[d] == picked->shape[d] && (d == dim || index->shape[d] <= full->shape[d]);
    return fits || kn_fail("%s: %s along dim %d by %s does not fit %s; index is i64 or i32 of the "
                           "last one's shape, and no larger than the first but in that dim",
                           op, kn_array_describe(full, one, sizeof one), dim,
                           kn_array_describe(index, two, sizeof two),
                           kn_array_describe(picked, three, sizeof three));
}

static bool agree(kn_kernel k, const kn_array *dst, const kn_array *src)
{
    return dst->dtype == src->dtype ||
           kn_fail("%s: dst is %s, src is %s; they must agree", kn_kernel_name(k),
                   kn_dtype_name(dst->dtype), kn_dtype_name(src->dtype));
}

static bool adds(kn_kernel k, const kn_array *dst, const kn_array *src)
{
    const kn_dtype to = dst->dtype, from = src->dtype;
    return (kn_dtype_is_arithmetic(to) && kn_dtype_is_arithmetic(from) &&
            kn_dtype_is_float(to) == kn_dtype_is_float(from)) ||
           kn_fail("%s: %s into %s is not supported; float into float, integer into integer",
                   kn_kernel_name(k), kn_dtype_name(from), kn_dtype_name(to));
}

bool kn_fits_index_select(const kn_index_select_args *a)
{
    return agree(KN_K_INDEX_SELECT, &a->dst, &a->src) &&
           slices_fit(KN_K_INDEX_SELECT, &a->src, &a->dst, &a->index, a->dim);
}

bool kn_fits_index_add(const kn_index_add_args *a)
{
    return adds(KN_K_INDEX_ADD, &a->dst, &a->src) &&
           slices_fit(KN_K_INDEX_ADD, &a->dst, &a->src, &a->index, a->dim);
}

bool kn_fits_gather(const kn_gather_args *a)
{
    return agree(KN_K_GATHER, &a->dst, &a->src) &&
           elements_fit("gather", &a->src, &a->dst, &a->index, a->dim);
}

bool kn_fits_scatter(const kn_scatter_args *a)
{
    return (a->add ? adds : agree)(KN_K_SCATTER, &a->dst, &a->src) &&
           elements_fit(a->op ? a->op : "scatter", &a->dst, &a->src, &a->index, a->dim);
}

bool kn_fits_sort(const kn_sort_args *a)
{
    const kn_array *v = &a->values, *p = &a->indices, *x = &a->src;
    char one[128], two[128], three[128];
    bool fits = v->ndim == x->ndim && p->ndim == x->ndim && a->dim >= 0 && a->dim < x->ndim &&
                v->dtype == x->dtype && p->dtype == KN_I64;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = v->shape[d] == p->shape[d] &&
               (d == a->dim ? v->shape[d] <= x->shape[d] : v->shape[d] == x->shape[d]);
    return arithmetic(KN_K_SORT, x) &&
           (fits ||
            kn_fail("sort: %s along dim %d does not give %s and %s; both have its shape, or "
                    "less in that dim, and the second one is i64",
                    kn_array_describe(x, one, sizeof one), a->dim,
                    kn_array_describe(v, two, sizeof two),
                    kn_array_describe(p, three, sizeof three)));
}

bool kn_fits_cumsum(const kn_cumsum_args *a)
{
    const kn_dtype to = a->y.dtype, from = a->x.dtype;
    const bool sums =
        kn_dtype_is_int(from) ? to == KN_I64 : kn_dtype_is_float(to) && kn_dtype_is_float(from);
    return ((a->dim >= 0 && a->dim < a->x.ndim && sums) ||
            kn_fail("cumsum: %s into %s along dim %d of %d is not supported; float into float, "
                    "integers into i64",
                    kn_dtype_name(from), kn_dtype_name(to), a->dim, a->x.ndim)) &&
           kn_check_same_shape(KN_K_CUMSUM, &a->x, &a->y);
}
