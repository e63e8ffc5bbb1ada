/* kernels/checks_more.c: the checks that a kernel's row doesn't say (checks.h): of kinds, of dims
 * that an argument names, of options and lists of pieces. */
#include "kernels/checks.h"

#include <math.h>

/* ---- elementwise ----------------------------------------------------------------------------- */

static bool copy(const kn_copy_args *a)
{
    const kn_dtype to = a->dst.dtype, from = a->src.dtype;
    return to == from || (kn_dtype_is_arithmetic(to) && kn_dtype_is_arithmetic(from)) ||
           kn_fail("copy: %s to %s is not supported; storage-only dtypes copy to the same dtype "
                   "only",
                   kn_dtype_name(from), kn_dtype_name(to));
}

static bool unary(const kn_unary_args *a)
{
    const kn_kind_row *row = kn_unary_row(a->kind);
    return (a->dst.dtype == a->src.dtype && kn_kind_takes(row, a->src.dtype)) ||
           kn_fail("unary: %s from %s to %s is not supported; kernels/kinds.h lists the dtypes of "
                   "each kind, and the result has the dtype of its input",
                   row->name, kn_dtype_name(a->src.dtype), kn_dtype_name(a->dst.dtype));
}

static bool unary_grad(const kn_unary_grad_args *a)
{
    const kn_kind_row *row = kn_unary_row(a->kind);
    if (!kn_kind_takes(row, KN_F32))
        return kn_fail("unary_grad: %s has no derivative", row->name);
    return kn_unary_grad_input(a)->ndim == a->dx.ndim || /* else it is unset */
           kn_fail("unary_grad: %s needs %s, which isn't given", row->name,
                   kn_unary_grad_input(a) == &a->x ? "x" : "y");
}

static bool binary(const kn_binary_args *a)
{
    const kn_dtype t = a->a.dtype, to = a->dst.dtype;
    return (t == a->b.dtype && kn_binary_takes(a->kind, t, to)) ||
           kn_fail("binary: %s of %s and %s into %s is not supported; a and b have one dtype, "
                   "dst too or, for comparisons and logic, bool",
                   kn_binary_row(a->kind)->name, kn_dtype_name(t), kn_dtype_name(a->b.dtype),
                   kn_dtype_name(to));
}

static bool random_values(const kn_random_args *a)
{
    char text[128];
    return (kn_array_contiguous(&a->dst) && (unsigned)a->kind < KN_RANDOM_COUNT) ||
           kn_fail("random: kind %d into %s is not supported; uniform or normal into a contiguous "
                   "array",
                   (int)a->kind, kn_array_describe(&a->dst, text, sizeof text));
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool reduce(const kn_reduce_args *a)
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
    return a->kind != KN_ARGMAX || (dst->dtype == KN_I64 && reduced <= 1) ||
           kn_fail("reduce: argmax over %d dims into %s; it takes one dim, into i64", reduced,
                   kn_dtype_name(dst->dtype));
}

static bool norm(const kn_norm_args *a)
{
    return !a->add.data == !a->sum.data || kn_array_numel(&a->x) == 0 ||
           kn_fail("norm: %s is given without %s", a->add.data ? "add" : "sum",
                   a->add.data ? "sum" : "add");
}

/* ---- indices, order -------------------------------------------------------------------------- */

/* picked holds elements of full along dim: in the other dims all, or (some) no more than it has. */
static bool along(kn_kernel k, const char *op, const void *args, const kn_array *full,
                  const kn_array *picked, int dim, int64_t most, bool some)
{
    char text[512];
    bool fits = full->ndim == picked->ndim && dim >= 0 && dim < full->ndim;
    for (int d = 0; fits && d < full->ndim; d++)
        fits = d == dim ? picked->shape[d] <= most
               : some   ? picked->shape[d] <= full->shape[d]
                        : picked->shape[d] == full->shape[d];
    return fits || kn_fail("%s: along dim %d %s do not fit: that dim must be there, and the others "
                           "%s",
                           op, dim, kn_kernel_describe(k, args, text, sizeof text),
                           some ? "no larger than those that are picked from" : "agree");
}

static bool adds(kn_kernel k, const kn_array *dst, const kn_array *src)
{
    const kn_dtype to = dst->dtype, from = src->dtype;
    return (kn_dtype_is_arithmetic(to) && kn_dtype_is_arithmetic(from) &&
            kn_dtype_is_float(to) == kn_dtype_is_float(from)) ||
           kn_fail("%s: %s into %s is not supported; float into float, integer into integer",
                   kn_kernel_name(k), kn_dtype_name(from), kn_dtype_name(to));
}

/* One slice for each of index. */
static bool slices(kn_kernel k, const void *args, const kn_array *full, const kn_array *picked,
                   const kn_array *index, int dim)
{
    return along(k, kn_kernel_name(k), args, full, picked, dim, index->shape[0], false) &&
           (picked->shape[dim] == index->shape[0] ||
            kn_fail("%s: %lld slices along dim %d for an index of %lld", kn_kernel_name(k),
                    (long long)picked->shape[dim], dim, (long long)index->shape[0]));
}

static bool scatter(const kn_scatter_args *a)
{
    const char *op = a->op ? a->op : "scatter";
    return (a->add ? adds(KN_K_SCATTER, &a->dst, &a->src)
                   : a->dst.dtype == a->src.dtype ||
                         kn_fail("%s: dst is %s, src is %s; they must agree", op,
                                 kn_dtype_name(a->dst.dtype), kn_dtype_name(a->src.dtype))) &&
           along(KN_K_SCATTER, op, a, &a->dst, &a->src, a->dim, INT64_MAX, true);
}

static bool cumsum(const kn_cumsum_args *a)
{
    const kn_dtype to = a->y.dtype, from = a->x.dtype;
    const bool sums =
        kn_dtype_is_int(from) ? to == KN_I64 : kn_dtype_is_float(to) && kn_dtype_is_float(from);
    return (a->dim >= 0 && a->dim < a->x.ndim && sums) ||
           kn_fail("cumsum: %s into %s along dim %d of %d is not supported; float into float, "
                   "integers into i64",
                   kn_dtype_name(from), kn_dtype_name(to), a->dim, a->x.ndim);
}

/* ---- attention ------------------------------------------------------------------------------- */

static bool attention(kn_kernel k, const kn_array *q, const kn_array *key, const kn_array *mask,
                      int64_t window, bool causal)
{
    const int64_t H = q->shape[1], G = key->shape[1];
    if (G > 0 ? H % G != 0 : H != 0)
        return kn_fail("%s: %lld heads of q for %lld of k, which must divide them",
                       kn_kernel_name(k), (long long)H, (long long)G);
    if (mask->data && mask->dtype != q->dtype && mask->dtype != KN_BOOL)
        return kn_fail("%s: mask is %s; it must be bool or q's dtype, %s", kn_kernel_name(k),
                       kn_dtype_name(mask->dtype), kn_dtype_name(q->dtype));
    return window == 0 || (window > 0 && causal) ||
           kn_fail("%s: a window of %lld keys; it takes causal attention and at least 1",
                   kn_kernel_name(k), (long long)window);
}

static bool rope(const kn_rope_args *a)
{
    return a->x.shape[3] % 2 == 0 ||
           kn_fail("rope: %lld numbers a head; it takes [B, H, T, D] with even D",
                   (long long)a->x.shape[3]);
}

/* ---- images ---------------------------------------------------------------------------------- */

/* x is filtered by w, whichever of them is the result. */
static bool filters(kn_kernel k, const void *args, const kn_array *x, const kn_array *w,
                    const int64_t *stride, const int64_t *dilation, int64_t G)
{
    char text[400];
    return (G > 0 && w->shape[1] * G == x->shape[1] && w->shape[0] % G == 0 && stride[0] > 0 &&
            stride[1] > 0 && dilation[0] > 0 && dilation[1] > 0) ||
           kn_fail("%s: %s in %lld groups do not fit: x [N,C,H,W], w [O,C/G,R,S], G divides O, "
                   "stride and dilation are at least 1",
                   kn_kernel_name(k), kn_kernel_describe(k, args, text, sizeof text), (long long)G);
}

static bool pools(kn_kernel k, kn_pool kind, const kn_window *w)
{
    bool fits = true;
    for (int d = 0; d < 2 && !w->adaptive; d++)
        fits = fits && w->kernel[d] > 0 && w->stride[d] > 0 && w->dilation[d] > 0 && w->pad[d] >= 0;
    if ((unsigned)kind >= KN_POOL_COUNT)
        return kn_fail("%s: kind %d is not supported; MAX and AVG are", kn_kernel_name(k),
                       (int)kind);
    return fits || kn_fail("%s: kernel, stride and dilation must be at least 1, padding at least 0",
                           kn_kernel_name(k));
}

static bool pool_grad(const kn_pool_grad_args *a)
{
    return pools(KN_K_POOL_GRAD, a->kind, &a->window) &&
           (a->kind != KN_POOL_MAX || a->index.data || kn_array_numel(&a->dy) == 0 ||
            kn_fail("pool_grad: the gradient of the largest needs the index that pool wrote"));
}

static bool grid(kn_kernel k, const kn_array *x, const kn_array *y, const kn_grid *g)
{
    char one[128], two[128];
    bool fits = isfinite(g->centre);
    for (int d = 0; fits && d < 2; d++)
        fits = (x->shape[2 + d] > 0 || y->shape[2 + d] == 0) && g->mul[d] >= 0 &&
               isfinite(g->mul[d]) && g->div[d] > 0 && isfinite(g->div[d]);
    return fits || kn_fail("%s: x %s and y %s do not fit: H and W must be at least 1; mul at least "
                           "0, div above 0, all finite",
                           kn_kernel_name(k), kn_array_describe(x, one, sizeof one),
                           kn_array_describe(y, two, sizeof two));
}

/* ---- optimizers and norms of gradients ------------------------------------------------------- */

static bool sum_n(const kn_sum_n_args *a)
{
    if (a->n < 0 || a->n > KN_SUM_N_MAX)
        return kn_fail("sum_n: %d sources; 0 to %d are supported", a->n, KN_SUM_N_MAX);
    return kn_check_float(KN_K_SUM_N, a->dst_dtype) && kn_check_float(KN_K_SUM_N, a->src_dtype);
}

static bool pieces(kn_kernel k, const kn_opt_step *s)
{
    bool fits = true;
    for (int i = 0; i < s->pieces && fits; i++) {
        const kn_opt_piece *p = &s->piece[i];
        fits = kn_check_float(k, p->param_dtype) && kn_check_float(k, p->grad_dtype) &&
               (!p->out || kn_check_float(k, p->out_dtype));
    }
    return fits;
}

static bool runs(kn_kernel k, const kn_run *run, int n)
{
    bool fits = true;
    for (int i = 0; i < n && fits; i++)
        fits = kn_check_float(k, run[i].dtype);
    return fits;
}

static bool powsum(const kn_powsum_args *a)
{
    return ((a->p > 0 && isfinite(a->p)) ||
            kn_fail("powsum: p is %g; it must be above 0 and finite", a->p)) &&
           runs(KN_K_POWSUM, a->run, a->runs);
}

/* ---- all ------------------------------------------------------------------------------------- */

static bool round_at_random(const kn_round_args *a)
{
    return (kn_array_contiguous(&a->dst) && kn_array_contiguous(&a->src)) ||
           kn_fail("round: dst and src must be contiguous");
}

static bool batch_norm(const kn_batch_norm_args *a)
{
    return a->training || (a->running_mean.ndim == 1 && a->running_var.ndim == 1) ||
           kn_fail("batch_norm: running_mean and running_var must be given outside of training");
}

bool kn_kernel_fits_more(kn_kernel k, const void *args)
{
#define MORE(entry, name, fits)                                                                    \
    case KN_K_##entry: {                                                                           \
        const kn_##name##_args *a = args;                                                          \
        return fits;                                                                               \
    }
    switch (k) {
        MORE(COPY, copy, copy(a))
        MORE(UNARY, unary, unary(a))
        MORE(UNARY_GRAD, unary_grad, unary_grad(a))
        MORE(BINARY, binary, binary(a))
        MORE(RANDOM, random, random_values(a))
        MORE(ROUND, round, round_at_random(a))
        MORE(REDUCE, reduce, reduce(a))
        MORE(NORM, norm, norm(a))
        MORE(INDEX_SELECT, index_select, slices(k, a, &a->src, &a->dst, &a->index, a->dim))
        MORE(INDEX_ADD, index_add,
             adds(k, &a->dst, &a->src) && slices(k, a, &a->dst, &a->src, &a->index, a->dim))
        MORE(GATHER, gather, along(k, "gather", a, &a->src, &a->dst, a->dim, INT64_MAX, true))
        MORE(SCATTER, scatter, scatter(a))
        MORE(SORT, sort,
             along(k, "sort", a, &a->src, &a->values, a->dim,
                   a->dim >= 0 && a->dim < KN_MAX_DIMS ? a->src.shape[a->dim] : 0, false))
        MORE(CUMSUM, cumsum, cumsum(a))
        MORE(ATTENTION, attention, attention(k, &a->q, &a->k, &a->mask, a->window, a->causal))
        MORE(ATTENTION_GRAD, attention_grad,
             attention(k, &a->q, &a->k, &a->mask, a->window, a->causal))
        MORE(ROPE, rope, rope(a))
        MORE(CONV, conv, filters(k, a, &a->x, &a->w, a->stride, a->dilation, a->groups))
        MORE(CONV_GRAD_X, conv_grad_x,
             filters(k, a, &a->dx, &a->w, a->stride, a->dilation, a->groups))
        MORE(CONV_GRAD_W, conv_grad_w,
             filters(k, a, &a->x, &a->dw, a->stride, a->dilation, a->groups))
        MORE(BATCH_NORM, batch_norm, batch_norm(a))
        MORE(POOL, pool, pools(k, a->kind, &a->window))
        MORE(POOL_GRAD, pool_grad, pool_grad(a))
        MORE(INTERPOLATE, interpolate, grid(k, &a->x, &a->y, &a->grid))
        MORE(INTERPOLATE_GRAD, interpolate_grad, grid(k, &a->dx, &a->dy, &a->grid))
        MORE(SUM_N, sum_n, sum_n(a))
        MORE(ADAMW, adamw, pieces(k, &a->s))
        MORE(SGD, sgd, pieces(k, &a->s))
        MORE(LION, lion, pieces(k, &a->s))
        MORE(ABSMAX, absmax, runs(k, a->run, a->runs))
        MORE(SQSUM, sqsum, runs(k, a->run, a->runs))
        MORE(POWSUM, powsum, powsum(a))
    default:
        return true;
    }
#undef MORE
}
