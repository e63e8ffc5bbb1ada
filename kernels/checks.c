/* kernels/checks.c: what arguments of kernels must be besides what their signatures say
 * (kernels/kernels.h): kinds, numbers, dtypes that go together. */
#include "kernels/checks.h"

#include <math.h>

#define REFUSE(k, why, ...) kn_fail("%s: " why, kn_kernel_name(k), ##__VA_ARGS__)

/* ---- elementwise ----------------------------------------------------------------------------- */

static bool copy_fits(kn_kernel k, const void *args)
{
    const kn_copy_args *a = args;
    const kn_dtype to = a->dst.dtype, from = a->src.dtype;
    return to == from || (kn_dtype_is_arithmetic(to) && kn_dtype_is_arithmetic(from)) ||
           REFUSE(k,
                  "%s to %s is not supported; storage-only dtypes copy to the same dtype "
                  "only",
                  kn_dtype_name(from), kn_dtype_name(to));
}

static bool unary_fits(kn_kernel k, const void *args)
{
    const kn_unary_args *a = args;
    const kn_kind_row *row = kn_unary_row(a->kind);
    return (a->dst.dtype == a->src.dtype && kn_kind_takes(row, a->src.dtype)) ||
           REFUSE(k,
                  "%s from %s to %s is not supported; kernels/kinds.h lists the dtypes of "
                  "each kind, and the result has the dtype of its input",
                  row->name, kn_dtype_name(a->src.dtype), kn_dtype_name(a->dst.dtype));
}

static bool unary_grad_fits(kn_kernel k, const void *args)
{
    const kn_unary_grad_args *a = args;
    const kn_kind_row *row = kn_unary_row(a->kind);
    const kn_array *in = kn_unary_grad_input(a);
    if (!kn_kind_takes(row, KN_F32))
        return REFUSE(k, "%s of %s has no derivative", row->name, kn_dtype_name(a->dx.dtype));
    return in->ndim == a->dx.ndim || REFUSE(k, "the derivative of %s reads %s, which isn't given",
                                            row->name, in == &a->x ? "x" : "y");
}

static bool binary_fits(kn_kernel k, const void *args)
{
    const kn_binary_args *a = args;
    const kn_dtype t = a->a.dtype, to = a->dst.dtype;
    return (t == a->b.dtype && kn_binary_takes(a->kind, t, to)) ||
           REFUSE(k,
                  "%s of %s and %s into %s is not supported; a and b have one dtype, "
                  "dst too or, for comparisons and logic, bool",
                  kn_binary_row(a->kind)->name, kn_dtype_name(t), kn_dtype_name(a->b.dtype),
                  kn_dtype_name(to));
}

static bool random_fits(kn_kernel k, const void *args)
{
    const kn_random_args *a = args;
    return (kn_array_contiguous(&a->dst) && (unsigned)a->kind < KN_RANDOM_COUNT) ||
           REFUSE(k,
                  "kind %d into %s is not supported; uniform or normal into a contiguous "
                  "array",
                  (int)a->kind, KN_ARRAY_SHOWN(&a->dst));
}

static bool round_fits(kn_kernel k, const void *args)
{
    const kn_round_args *a = args;
    return ((a->dst.dtype == KN_BF16 || a->dst.dtype == KN_F16) && kn_array_contiguous(&a->dst) &&
            kn_array_contiguous(&a->src)) ||
           REFUSE(k, "%s to %s is not supported; floats to bf16 or f16, both contiguous",
                  KN_ARRAY_SHOWN(&a->src), KN_ARRAY_SHOWN(&a->dst));
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool reduce_fits(kn_kernel k, const void *args)
{
    const kn_reduce_args *a = args;
    const kn_array *dst = &a->dst, *src = &a->src;
    int reduced = 0;
    bool fits = dst->ndim == src->ndim;
    for (int d = 0; fits && d < src->ndim; d++) {
        fits = dst->shape[d] == src->shape[d] || dst->shape[d] == 1;
        reduced += dst->shape[d] != src->shape[d];
    }
    if (!fits)
        return REFUSE(k, "%s does not reduce to %s; same number of dims, 1 where reduced",
                      KN_ARRAY_SHOWN(src), KN_ARRAY_SHOWN(dst));
    if ((unsigned)a->kind >= KN_REDUCE_COUNT)
        return REFUSE(k, "kind %d is not supported; SUM, MEAN, MAX, MIN and ARGMAX are",
                      (int)a->kind);
    return a->kind != KN_ARGMAX || (dst->dtype == KN_I64 && reduced < 2) ||
           REFUSE(k, "argmax over %d dims into %s; it takes one dim, into i64", reduced,
                  kn_dtype_name(dst->dtype));
}

static bool norm_fits(kn_kernel k, const void *args)
{
    const kn_norm_args *a = args;
    return !a->add.data == !a->sum.data || kn_array_numel(&a->x) == 0 ||
           REFUSE(k, "%s is given without %s", a->add.data ? "add" : "sum",
                  a->add.data ? "sum" : "add");
}

static bool cumsum_fits(kn_kernel k, const void *args)
{
    const kn_cumsum_args *a = args;
    const kn_dtype to = a->y.dtype, from = a->x.dtype;
    const bool sums =
        kn_dtype_is_int(from) ? to == KN_I64 : kn_dtype_is_float(to) && kn_dtype_is_float(from);
    if ((unsigned)a->by >= (unsigned)(KN_JOIN_COUNT - kn_dtype_is_int(from)))
        return REFUSE(k, "%d is no way to join %s", (int)a->by, kn_dtype_name(from));
    return (a->dim >= 0 && a->dim < a->x.ndim && sums) ||
           REFUSE(k,
                  "%s into %s along dim %d of %d is not supported; float into float, "
                  "integers into i64",
                  kn_dtype_name(from), kn_dtype_name(to), a->dim, a->x.ndim);
}

/* ---- indices, order -------------------------------------------------------------------------- */

/* picked holds index's slices of full along dim. */
static bool slices_fit(kn_kernel k, const kn_array *full, const kn_array *picked,
                       const kn_array *index, int dim)
{
    bool fits = full->ndim == picked->ndim && dim >= 0 && dim < full->ndim;
    for (int d = 0; fits && d < full->ndim; d++)
        fits = picked->shape[d] == (d == dim ? index->shape[0] : full->shape[d]);
    return fits || REFUSE(k, "%s along dim %d by %s does not fit %s; the other dims agree",
                          KN_ARRAY_SHOWN(full), dim, KN_ARRAY_SHOWN(index), KN_ARRAY_SHOWN(picked));
}

/* picked holds an element of full along dim for each of index. */
static bool elements_fit(kn_kernel k, const kn_array *full, const kn_array *picked,
                         const kn_array *index, int dim)
{
    bool fits =
        full->ndim == picked->ndim && index->ndim == picked->ndim && dim >= 0 && dim < full->ndim;
    for (int d = 0; fits && d < full->ndim; d++)
        fits =
            index->shape[d] == picked->shape[d] && (d == dim || index->shape[d] <= full->shape[d]);
    return fits || REFUSE(k,
                          "%s along dim %d by %s does not fit %s; index is of the last one's "
                          "shape, and no larger than the first but in that dim",
                          KN_ARRAY_SHOWN(full), dim, KN_ARRAY_SHOWN(index), KN_ARRAY_SHOWN(picked));
}

static bool adds(kn_kernel k, const kn_array *dst, const kn_array *src)
{
    const kn_dtype to = dst->dtype, from = src->dtype;
    return kn_dtype_is_float(to) == kn_dtype_is_float(from) ||
           REFUSE(k, "%s into %s is not supported; float into float, integer into integer",
                  kn_dtype_name(from), kn_dtype_name(to));
}

static bool index_select_fits(kn_kernel k, const void *args)
{
    const kn_index_select_args *a = args;
    return slices_fit(k, &a->src, &a->dst, &a->index, a->dim);
}

static bool index_add_fits(kn_kernel k, const void *args)
{
    const kn_index_add_args *a = args;
    return adds(k, &a->dst, &a->src) && slices_fit(k, &a->dst, &a->src, &a->index, a->dim);
}

static bool gather_fits(kn_kernel k, const void *args)
{
    const kn_gather_args *a = args;
    return elements_fit(k, &a->src, &a->dst, &a->index, a->dim);
}

static bool scatter_fits(kn_kernel k, const void *args)
{
    const kn_scatter_args *a = args;
    if ((unsigned)a->by >= KN_JOIN_LOG_SUM)
        return REFUSE(k, "%d is no way to join", (int)a->by);
    const bool numbers =
        kn_dtype_is_arithmetic(a->dst.dtype) && kn_dtype_is_arithmetic(a->src.dtype);
    if (a->join ? !numbers : a->dst.dtype != a->src.dtype)
        return REFUSE(k, "dst is %s, src is %s; they must %s", kn_dtype_name(a->dst.dtype),
                      kn_dtype_name(a->src.dtype), a->join ? "have arithmetic" : "agree");
    return (!a->join || adds(k, &a->dst, &a->src)) &&
           elements_fit(k, &a->dst, &a->src, &a->index, a->dim);
}

static bool sort_fits(kn_kernel k, const void *args)
{
    const kn_sort_args *a = args;
    const kn_array *v = &a->values, *x = &a->src;
    bool fits = v->ndim == x->ndim && a->dim >= 0 && a->dim < x->ndim;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = d == a->dim ? v->shape[d] <= x->shape[d] : v->shape[d] == x->shape[d];
    return fits || REFUSE(k,
                          "%s along dim %d does not give %s; it has its shape, or less in "
                          "that dim",
                          KN_ARRAY_SHOWN(x), a->dim, KN_ARRAY_SHOWN(v));
}

/* ---- attention ------------------------------------------------------------------------------- */

static bool heads_fit(kn_kernel kernel, const kn_array *q, const kn_array *k, const kn_array *mask,
                      int64_t window, bool causal)
{
    if (k->shape[1] > 0 ? q->shape[1] % k->shape[1] != 0 : q->shape[1] != 0)
        return REFUSE(kernel, "the %lld heads of k %s don't divide the %lld of q %s",
                      (long long)k->shape[1], KN_ARRAY_SHOWN(k), (long long)q->shape[1],
                      KN_ARRAY_SHOWN(q));
    if (mask->data && mask->dtype != q->dtype && mask->dtype != KN_BOOL)
        return REFUSE(kernel, "mask %s does not fit: it has q's dtype or bool",
                      KN_ARRAY_SHOWN(mask));
    return window == 0 || (window > 0 && causal) ||
           REFUSE(kernel, "a window of %lld keys; it takes causal attention and at least 1",
                  (long long)window);
}

static bool attention_fits(kn_kernel k, const void *args)
{
    const kn_attention_args *a = args;
    return heads_fit(k, &a->q, &a->k, &a->mask, a->window, a->causal);
}

static bool attention_grad_fits(kn_kernel k, const void *args)
{
    const kn_attention_grad_args *a = args;
    return heads_fit(k, &a->q, &a->k, &a->mask, a->window, a->causal);
}

static bool rope_fits(kn_kernel k, const void *args)
{
    const kn_rope_args *a = args;
    return a->x.shape[3] % 2 == 0 ||
           REFUSE(k, "%s does not fit: [B, H, T, D] with even D", KN_ARRAY_SHOWN(&a->x));
}

/* ---- sequences ------------------------------------------------------------------------------- */

/* All arrays, which are the first of the arguments, lie dense. */
static bool dense(kn_kernel k, const kn_array *a, int n)
{
    for (int i = 0; i < n; i++)
        if (a[i].dtype && !kn_array_contiguous(&a[i]))
            return REFUSE(k, "%s isn't contiguous", KN_ARRAY_SHOWN(&a[i]));
    return true;
}

static bool cell_fits(kn_kernel k, kn_cell cell, const kn_array *y, const kn_array *w,
                      const kn_array *kept, const kn_array *c)
{
    const bool lstm = cell == KN_CELL_LSTM, keeps = lstm || cell == KN_CELL_GRU;
    const bool empty = kn_array_numel(y) == 0;
    return (cell >= KN_CELL_LSTM && cell <= KN_CELL_RELU &&
            w->shape[0] == kn_cell_gates(cell) * w->shape[1] &&
            (empty || (keeps == !!kept->data && lstm == !!c->data))) ||
           REFUSE(k,
                  "w %s of cell %d, with%s kept and with%s c; LSTM has 4 gates and both, GRU 3 "
                  "and kept, TANH and RELU 1 and neither",
                  KN_ARRAY_SHOWN(w), (int)cell, kept->data ? "" : "out", c->data ? "" : "out");
}

static bool recurrent_fits(kn_kernel k, const void *args)
{
    const kn_recurrent_args *a = args;
    return dense(k, &a->y, 10) && cell_fits(k, a->cell, &a->y, &a->w, &a->kept, &a->cn);
}

static bool recurrent_grad_fits(kn_kernel k, const void *args)
{
    const kn_recurrent_grad_args *a = args;
    return dense(k, &a->dgates, 13) && cell_fits(k, a->cell, &a->y, &a->w, &a->kept, &a->dc);
}

static bool ctc_fits(kn_kernel k, const void *args)
{
    const kn_ctc_args *a = args;
    const int64_t T = a->log_probs.shape[0], N = a->log_probs.shape[1], S = a->targets.shape[0];
    return dense(k, &a->loss, 7) &&
           ((a->blank >= 0 && a->blank < a->log_probs.shape[2] &&
             a->work.shape[0] >= (T + 1) * (2 * S + N) && (a->width < 0 || a->width * N <= S)) ||
            REFUSE(k, "blank %lld of log_probs %s, targets %s of width %lld, work %s do not fit",
                   (long long)a->blank, KN_ARRAY_SHOWN(&a->log_probs), KN_ARRAY_SHOWN(&a->targets),
                   (long long)a->width, KN_ARRAY_SHOWN(&a->work)));
}

/* ---- images ---------------------------------------------------------------------------------- */

/* y is made from x by w, whichever of them is the result. */
static bool filters_fit(kn_kernel k, const kn_array *y, const kn_array *x, const kn_array *w,
                        const int64_t *stride, const int64_t *dilation, int64_t G)
{
    return (G > 0 && w->shape[1] * G == x->shape[1] && w->shape[0] % G == 0 && stride[0] > 0 &&
            stride[1] > 0 && dilation[0] > 0 && dilation[1] > 0) ||
           REFUSE(k,
                  "x %s, w %s and y %s in %lld groups do not fit: [N,C,H,W], [O,C/G,R,S], "
                  "[N,O,P,Q], G dividing O, stride and dilation at least 1",
                  KN_ARRAY_SHOWN(x), KN_ARRAY_SHOWN(w), KN_ARRAY_SHOWN(y), (long long)G);
}

static bool conv_fits(kn_kernel k, const void *args)
{
    const kn_conv_args *a = args;
    return filters_fit(k, &a->y, &a->x, &a->w, a->stride, a->dilation, a->groups);
}

static bool conv_grad_x_fits(kn_kernel k, const void *args)
{
    const kn_conv_grad_x_args *a = args;
    return filters_fit(k, &a->dy, &a->dx, &a->w, a->stride, a->dilation, a->groups);
}

static bool conv_grad_w_fits(kn_kernel k, const void *args)
{
    const kn_conv_grad_w_args *a = args;
    return filters_fit(k, &a->dy, &a->x, &a->dw, a->stride, a->dilation, a->groups);
}

static bool batch_norm_fits(kn_kernel k, const void *args)
{
    const kn_batch_norm_args *a = args;
    return a->training || (a->running_mean.ndim == 1 && a->running_var.ndim == 1) ||
           REFUSE(k, "without training it needs running_mean and running_var");
}

static bool windows_fit(kn_kernel k, kn_pool kind, const kn_window *w)
{
    bool fits = true;
    for (int d = 0; d < 2 && !w->adaptive; d++)
        fits = fits && w->kernel[d] > 0 && w->stride[d] > 0 && w->dilation[d] > 0 && w->pad[d] >= 0;
    if ((unsigned)kind >= KN_POOL_COUNT)
        return REFUSE(k, "kind %d is not supported; MAX and AVG are", (int)kind);
    return fits || REFUSE(k, "kernel, stride and dilation must be at least 1, pad at least 0");
}

static bool pool_fits(kn_kernel k, const void *args)
{
    const kn_pool_args *a = args;
    return windows_fit(k, a->kind, &a->window);
}

static bool pool_grad_fits(kn_kernel k, const void *args)
{
    const kn_pool_grad_args *a = args;
    return windows_fit(k, a->kind, &a->window) &&
           (a->kind != KN_POOL_MAX || a->index.data || kn_array_numel(&a->dy) == 0 ||
            REFUSE(k, "the gradient of the largest needs the index that pool wrote"));
}

static bool grid_fits(kn_kernel k, const kn_array *x, const kn_array *y, const kn_grid *g)
{
    bool fits = isfinite(g->centre);
    for (int d = 0; d < 2; d++)
        fits = fits && (x->shape[2 + d] > 0 || y->shape[2 + d] == 0) && g->mul[d] >= 0 &&
               isfinite(g->mul[d]) && g->div[d] > 0 && isfinite(g->div[d]);
    return fits || REFUSE(k,
                          "x %s and y %s do not fit: H and W at least 1; mul at least 0, div "
                          "above 0, all finite",
                          KN_ARRAY_SHOWN(x), KN_ARRAY_SHOWN(y));
}

static bool interpolate_fits(kn_kernel k, const void *args)
{
    const kn_interpolate_args *a = args;
    return grid_fits(k, &a->x, &a->y, &a->grid);
}

static bool interpolate_grad_fits(kn_kernel k, const void *args)
{
    const kn_interpolate_grad_args *a = args;
    return grid_fits(k, &a->dx, &a->dy, &a->grid);
}

/* ---- optimizers and norms of gradients ------------------------------------------------------- */

static bool float_dtype(kn_kernel k, kn_dtype t)
{
    return kn_dtype_is_float(t) ||
           REFUSE(k, "dtype %s is not supported; use f32, bf16, f16 or f64", kn_dtype_name(t));
}

static bool sum_n_fits(kn_kernel k, const void *args)
{
    const kn_sum_n_args *a = args;
    if (a->n < 0 || a->n > KN_SUM_N_MAX)
        return REFUSE(k, "%d sources; 0 to %d are supported", a->n, KN_SUM_N_MAX);
    return float_dtype(k, a->dst_dtype) && float_dtype(k, a->src_dtype);
}

/* An optimizer's arguments begin with its step. */
static bool step_fits(kn_kernel k, const void *args)
{
    const kn_opt_step *s = args;
    bool fits = true;
    for (int i = 0; i < s->pieces && fits; i++) {
        const kn_opt_piece *p = &s->piece[i];
        fits = float_dtype(k, p->param_dtype) && float_dtype(k, p->grad_dtype) &&
               (!p->out || float_dtype(k, p->out_dtype));
    }
    return fits;
}

static bool runs_fit(kn_kernel k, const kn_run *run, int runs)
{
    bool fits = true;
    for (int i = 0; i < runs && fits; i++)
        fits = float_dtype(k, run[i].dtype);
    return fits;
}

static bool absmax_fits(kn_kernel k, const void *args)
{
    const kn_absmax_args *a = args;
    return runs_fit(k, a->run, a->runs);
}

static bool sqsum_fits(kn_kernel k, const void *args)
{
    const kn_sqsum_args *a = args;
    return runs_fit(k, a->run, a->runs);
}

static bool powsum_fits(kn_kernel k, const void *args)
{
    const kn_powsum_args *a = args;
    return ((a->p > 0 && isfinite(a->p)) ||
            REFUSE(k, "p is %g; it must be above 0 and finite", a->p)) &&
           runs_fit(k, a->run, a->runs);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static bool (*const more[KN_K_COUNT])(kn_kernel k, const void *args) = {
    [KN_K_COPY] = copy_fits,
    [KN_K_UNARY] = unary_fits,
    [KN_K_UNARY_GRAD] = unary_grad_fits,
    [KN_K_BINARY] = binary_fits,
    [KN_K_RANDOM] = random_fits,
    [KN_K_ROUND] = round_fits,
    [KN_K_REDUCE] = reduce_fits,
    [KN_K_NORM] = norm_fits,
    [KN_K_CUMSUM] = cumsum_fits,
    [KN_K_INDEX_SELECT] = index_select_fits,
    [KN_K_INDEX_ADD] = index_add_fits,
    [KN_K_GATHER] = gather_fits,
    [KN_K_SCATTER] = scatter_fits,
    [KN_K_SORT] = sort_fits,
    [KN_K_ATTENTION] = attention_fits,
    [KN_K_ATTENTION_GRAD] = attention_grad_fits,
    [KN_K_ROPE] = rope_fits,
    [KN_K_RECURRENT] = recurrent_fits,
    [KN_K_RECURRENT_GRAD] = recurrent_grad_fits,
    [KN_K_CTC] = ctc_fits,
    [KN_K_CONV] = conv_fits,
    [KN_K_CONV_GRAD_X] = conv_grad_x_fits,
    [KN_K_CONV_GRAD_W] = conv_grad_w_fits,
    [KN_K_BATCH_NORM] = batch_norm_fits,
    [KN_K_POOL] = pool_fits,
    [KN_K_POOL_GRAD] = pool_grad_fits,
    [KN_K_INTERPOLATE] = interpolate_fits,
    [KN_K_INTERPOLATE_GRAD] = interpolate_grad_fits,
    [KN_K_SUM_N] = sum_n_fits,
    [KN_K_ADAMW] = step_fits,
    [KN_K_SGD] = step_fits,
    [KN_K_LION] = step_fits,
    [KN_K_ABSMAX] = absmax_fits,
    [KN_K_SQSUM] = sqsum_fits,
    [KN_K_POWSUM] = powsum_fits,
};

bool kn_kernel_fits(kn_kernel k, const void *args)
{
    return kn_kernel_arrays_fit(k, args) && (!more[k] || more[k](k, args));
}
