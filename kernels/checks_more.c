/* kernels/checks_more.c: the checks (checks.h) of attention, images, batch norm, optimizers and
 * norms of gradients. */
#include "kernels/checks.h"

#include <math.h>

/* ---- attention ------------------------------------------------------------------------------- */

static bool heads_fit(kn_kernel kernel, const kn_array *q, const kn_array *k, const kn_array *v,
                      const kn_array *o, const kn_array *lse)
{
    char one[128], two[128], three[128];
    bool fits = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && o->ndim == 4;
    if (fits)
        fits = k->shape[0] == q->shape[0] && k->shape[3] == q->shape[3] &&
               kn_array_numel(lse) == q->shape[0] * q->shape[1] * q->shape[2] &&
               (k->shape[1] > 0 ? q->shape[1] % k->shape[1] == 0 : q->shape[1] == 0);
    for (int d = 0; fits && d < 4; d++)
        fits = k->shape[d] == v->shape[d] && o->shape[d] == q->shape[d];
    if (!fits)
        return kn_fail("%s: q %s, k %s, v %s do not fit: [B, H, T, D], twice [B, G, S, D], G "
                       "divides H",
                       kn_kernel_name(kernel), kn_array_describe(q, one, sizeof one),
                       kn_array_describe(k, two, sizeof two),
                       kn_array_describe(v, three, sizeof three));
    return kn_check_float(kernel, q) && kn_check_float(kernel, k) && kn_check_float(kernel, v) &&
           kn_check_float(kernel, lse);
}

/* x is [B, H, T, S] of q's dtype, or of another that it may have. */
static bool scores_fit(kn_kernel kernel, const char *what, const kn_array *x, const kn_array *q,
                       const kn_array *k, kn_dtype other)
{
    char text[128];
    bool fits =
        x->ndim == 4 && (x->dtype == q->dtype || x->dtype == other) && x->shape[3] == k->shape[2];
    for (int d = 0; fits && d < 3; d++)
        fits = x->shape[d] == q->shape[d];
    return !x->data || fits ||
           kn_fail("%s: %s %s does not fit: [B, H, T, S] of q's dtype%s", kn_kernel_name(kernel),
                   what, kn_array_describe(x, text, sizeof text),
                   other == KN_BOOL ? " or bool" : "");
}

static bool window_fits(kn_kernel kernel, int64_t window, bool causal)
{
    return window == 0 || (window > 0 && causal) ||
           kn_fail("%s: a window of %lld keys; it takes causal attention and at least 1",
                   kn_kernel_name(kernel), (long long)window);
}

bool kn_fits_attention(const kn_attention_args *a)
{
    const kn_kernel k = KN_K_ATTENTION;
    return heads_fit(k, &a->q, &a->k, &a->v, &a->o, &a->lse) &&
           scores_fit(k, "mask", &a->mask, &a->q, &a->k, KN_BOOL) &&
           window_fits(k, a->window, a->causal);
}

bool kn_fits_attention_grad(const kn_attention_grad_args *a)
{
    const kn_kernel k = KN_K_ATTENTION_GRAD;
    return heads_fit(k, &a->q, &a->k, &a->v, &a->o, &a->lse) &&
           kn_check_same_shape(k, &a->dout, &a->q) && kn_check_same_shape(k, &a->dq, &a->q) &&
           kn_check_same_shape(k, &a->dk, &a->k) && kn_check_same_shape(k, &a->dv, &a->v) &&
           scores_fit(k, "mask", &a->mask, &a->q, &a->k, KN_BOOL) &&
           scores_fit(k, "dmask", &a->dmask, &a->q, &a->k, a->q.dtype) &&
           window_fits(k, a->window, a->causal);
}

bool kn_fits_rope(const kn_rope_args *a)
{
    char text[128];
    return kn_check_same_shape(KN_K_ROPE, &a->y, &a->x) && kn_check_float(KN_K_ROPE, &a->x) &&
           kn_check_float(KN_K_ROPE, &a->y) &&
           ((a->x.ndim == 4 && a->x.shape[3] % 2 == 0) ||
            kn_fail("rope: %s does not fit: [B, H, T, D] with even D",
                    kn_array_describe(&a->x, text, sizeof text)));
}

/* ---- images ---------------------------------------------------------------------------------- */

/* y is made from x by w, whichever of them is the result. */
static bool filters_fit(kn_kernel k, const kn_array *y, const kn_array *x, const kn_array *w,
                        const int64_t *stride, const int64_t *dilation, int64_t G)
{
    char one[128], two[128], three[128];
    bool fits = y->ndim == 4 && x->ndim == 4 && w->ndim == 4 && G > 0;
    fits = fits && y->shape[0] == x->shape[0] && y->shape[1] == w->shape[0] &&
           w->shape[1] * G == x->shape[1] && w->shape[0] % G == 0;
    for (int d = 0; fits && d < 2; d++)
        fits = stride[d] > 0 && dilation[d] > 0;
    if (!fits)
        return kn_fail("%s: x %s, w %s and y %s in %lld groups do not fit: [N,C,H,W], [O,C/G,R,S], "
                       "[N,O,P,Q], G dividing O, stride and dilation at least 1",
                       kn_kernel_name(k), kn_array_describe(x, one, sizeof one),
                       kn_array_describe(w, two, sizeof two),
                       kn_array_describe(y, three, sizeof three), (long long)G);
    return kn_check_float(k, y) && kn_check_float(k, x) && kn_check_float(k, w);
}

bool kn_fits_conv(const kn_conv_args *a)
{
    char text[128];
    return filters_fit(KN_K_CONV, &a->y, &a->x, &a->w, a->stride, a->dilation, a->groups) &&
           (!a->bias.data || (a->bias.ndim == 1 && a->bias.shape[0] == a->y.shape[1]) ||
            kn_fail("conv: bias %s for %lld channels",
                    kn_array_describe(&a->bias, text, sizeof text), (long long)a->y.shape[1]));
}

bool kn_fits_conv_grad_x(const kn_conv_grad_x_args *a)
{
    return filters_fit(KN_K_CONV_GRAD_X, &a->dy, &a->dx, &a->w, a->stride, a->dilation, a->groups);
}

bool kn_fits_conv_grad_w(const kn_conv_grad_w_args *a)
{
    return filters_fit(KN_K_CONV_GRAD_W, &a->dy, &a->x, &a->dw, a->stride, a->dilation, a->groups);
}

static bool channels_fit(kn_kernel k, const kn_array *x, const kn_array *vector, bool needed)
{
    char one[128], two[128];
    if (!needed && !vector->data)
        return true;
    if (x->ndim < 2 || vector->ndim != 1 || vector->shape[0] != x->shape[1])
        return kn_fail("%s: %s does not fit %s; what belongs to channels has one dim, x's second",
                       kn_kernel_name(k), kn_array_describe(vector, one, sizeof one),
                       kn_array_describe(x, two, sizeof two));
    return kn_check_float(k, vector);
}

bool kn_fits_batch_norm(const kn_batch_norm_args *a)
{
    const kn_kernel k = KN_K_BATCH_NORM;
    return kn_check_same_if_there(k, &a->y, &a->x) && kn_check_float(k, &a->x) &&
           kn_check_same_if_there(k, &a->add, &a->x) && channels_fit(k, &a->x, &a->mean, true) &&
           channels_fit(k, &a->x, &a->rstd, true) && channels_fit(k, &a->x, &a->w, false) &&
           channels_fit(k, &a->x, &a->b, false) &&
           channels_fit(k, &a->x, &a->running_mean, !a->training) &&
           channels_fit(k, &a->x, &a->running_var, !a->training);
}

bool kn_fits_batch_norm_grad(const kn_batch_norm_grad_args *a)
{
    const kn_kernel k = KN_K_BATCH_NORM_GRAD;
    return kn_check_same_shape(k, &a->dy, &a->x) && kn_check_float(k, &a->x) &&
           kn_check_same_if_there(k, &a->dx, &a->x) && kn_check_same_if_there(k, &a->y, &a->x) &&
           kn_check_same_if_there(k, &a->dadd, &a->x) && channels_fit(k, &a->x, &a->mean, true) &&
           channels_fit(k, &a->x, &a->rstd, true) && channels_fit(k, &a->x, &a->w, false) &&
           channels_fit(k, &a->x, &a->b, false) && channels_fit(k, &a->x, &a->dw, false) &&
           channels_fit(k, &a->x, &a->db, false) && channels_fit(k, &a->x, &a->mean_dw, false) &&
           channels_fit(k, &a->x, &a->mean_db, false);
}

bool kn_fits_batch_norm_join(const kn_batch_norm_join_args *a)
{
    const kn_kernel k = KN_K_BATCH_NORM_JOIN;
    const kn_array *const v[] = { &a->a, &a->b, &a->running_mean, &a->running_var };
    char one[128], two[128];
    bool fits = a->from_a.ndim == 2 && kn_check_same_shape(k, &a->from_b, &a->from_a) &&
                kn_check_float(k, &a->from_a) && kn_check_float(k, &a->from_b);
    for (int i = 0; i < 4 && fits; i++)
        fits = (i > 1 && !v[i]->data) ||
               (v[i]->ndim == 1 && v[i]->shape[0] == a->from_a.shape[1] && kn_check_float(k, v[i]));
    return fits || kn_fail("batch_norm_join: from_a %s and a %s don't fit; they are [n,C] and [C]",
                           kn_array_describe(&a->from_a, one, sizeof one),
                           kn_array_describe(&a->a, two, sizeof two));
}

/* The same images and channels. */
static bool maps_fit(const kn_array *x, const kn_array *y)
{
    return x->ndim == 4 && y->ndim == 4 && x->shape[0] == y->shape[0] && x->shape[1] == y->shape[1];
}

static bool pools_fit(kn_kernel k, kn_pool kind, const kn_array *x, const kn_array *y,
                      const kn_array *index, const kn_window *w)
{
    char one[128], two[128];
    bool fits = maps_fit(x, y);
    for (int d = 0; fits && d < 2 && !w->adaptive; d++)
        fits = w->kernel[d] > 0 && w->stride[d] > 0 && w->dilation[d] > 0 && w->pad[d] >= 0;
    if ((unsigned)kind >= KN_POOL_COUNT)
        return kn_fail("%s: kind %d is not supported; MAX and AVG are", kn_kernel_name(k),
                       (int)kind);
    if (!fits)
        return kn_fail("%s: %s and its pools %s do not fit: [N,C,H,W] and [N,C,P,Q]; kernel, "
                       "stride and dilation at least 1",
                       kn_kernel_name(k), kn_array_describe(x, one, sizeof one),
                       kn_array_describe(y, two, sizeof two));
    if (index->data && index->dtype != KN_I32)
        return kn_fail("%s: an index of %s; it is i32", kn_kernel_name(k),
                       kn_dtype_name(index->dtype));
    return kn_check_float(k, x) && kn_check_float(k, y) && kn_check_same_if_there(k, index, y);
}

bool kn_fits_pool(const kn_pool_args *a)
{
    return pools_fit(KN_K_POOL, a->kind, &a->x, &a->y, &a->index, &a->window);
}

bool kn_fits_pool_grad(const kn_pool_grad_args *a)
{
    return pools_fit(KN_K_POOL_GRAD, a->kind, &a->dx, &a->dy, &a->index, &a->window) &&
           (a->kind != KN_POOL_MAX || a->index.data || kn_array_numel(&a->dy) == 0 ||
            kn_fail("pool_grad: the gradient of the largest needs the index that pool wrote"));
}

static bool grid_fits(kn_kernel k, const kn_array *x, const kn_array *y, const kn_grid *g)
{
    char one[128], two[128];
    bool fits = maps_fit(x, y);
    for (int d = 0; fits && d < 2; d++)
        fits = (x->shape[2 + d] > 0 || y->shape[2 + d] == 0) && g->mul[d] >= 0 &&
               isfinite(g->mul[d]) && g->div[d] > 0 && isfinite(g->div[d]) && isfinite(g->centre);
    if (!fits)
        return kn_fail("%s: x %s and y %s do not fit: [N,C,H,W] and [N,C,P,Q], H and W at least 1; "
                       "mul at least 0, div above 0, all finite",
                       kn_kernel_name(k), kn_array_describe(x, one, sizeof one),
                       kn_array_describe(y, two, sizeof two));
    return kn_check_float(k, x) && kn_check_float(k, y);
}

bool kn_fits_interpolate(const kn_interpolate_args *a)
{
    return grid_fits(KN_K_INTERPOLATE, &a->x, &a->y, &a->grid);
}

bool kn_fits_interpolate_grad(const kn_interpolate_grad_args *a)
{
    return grid_fits(KN_K_INTERPOLATE_GRAD, &a->dx, &a->dy, &a->grid);
}

/* ---- optimizers and norms of gradients ------------------------------------------------------- */

static bool float_dtype(kn_kernel k, kn_dtype t)
{
    return kn_check_float(k, &(kn_array){ .dtype = t });
}

bool kn_fits_sum_n(const kn_sum_n_args *a)
{
    if (a->n < 0 || a->n > KN_SUM_N_MAX)
        return kn_fail("sum_n: %d sources; 0 to %d are supported", a->n, KN_SUM_N_MAX);
    return float_dtype(KN_K_SUM_N, a->dst_dtype) && float_dtype(KN_K_SUM_N, a->src_dtype);
}

static bool pieces_fit(kn_kernel k, const kn_opt_step *s)
{
    bool fits = true;
    for (int i = 0; i < s->pieces && fits; i++) {
        const kn_opt_piece *p = &s->piece[i];
        fits = float_dtype(k, p->param_dtype) && float_dtype(k, p->grad_dtype) &&
               (!p->out || float_dtype(k, p->out_dtype));
    }
    return fits;
}

bool kn_fits_adamw(const kn_adamw_args *a)
{
    return pieces_fit(KN_K_ADAMW, &a->s);
}

bool kn_fits_sgd(const kn_sgd_args *a)
{
    return pieces_fit(KN_K_SGD, &a->s);
}

bool kn_fits_lion(const kn_lion_args *a)
{
    return pieces_fit(KN_K_LION, &a->s);
}

static bool runs_fit(kn_kernel k, const kn_run *run, int runs)
{
    for (int i = 0; i < runs; i++)
        if (!float_dtype(k, run[i].dtype))
            return false;
    return true;
}

bool kn_fits_absmax(const kn_absmax_args *a)
{
    return runs_fit(KN_K_ABSMAX, a->run, a->runs);
}

bool kn_fits_sqsum(const kn_sqsum_args *a)
{
    return runs_fit(KN_K_SQSUM, a->run, a->runs);
}

bool kn_fits_powsum(const kn_powsum_args *a)
{
    return ((a->p > 0 && isfinite(a->p)) ||
            kn_fail("powsum: p is %g; it must be above 0 and finite", a->p)) &&
           runs_fit(KN_K_POWSUM, a->run, a->runs);
}

bool kn_fits_clip(const kn_clip_args *a)
{
    (void)a;
    return true;
}

bool kn_fits_loss_scale(const kn_loss_scale_args *a)
{
    (void)a;
    return true;
}
