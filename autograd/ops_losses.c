/* autograd/ops_losses.c: losses of elements: of differences and of probabilities. Losses are
 * compositions of other operations, but for the fused cross-entropy (ops_nn.c). Each checks its
 * arguments before it begins, so that messages name it. */
#include "autograd/function.h"
#include "autograd/losses.h"
#include <math.h>

/* ---- shared ---------------------------------------------------------------------------------- */

bool kn_loss_reduction_is_one(const char *op, kn_loss_reduction r)
{
    return (r >= KN_REDUCTION_DEFAULT && r <= KN_REDUCTION_NONE) ||
           kn_fail("%s: reduction %d is none of KN_REDUCTION_MEAN, KN_REDUCTION_SUM, "
                   "KN_REDUCTION_NONE, and of kn_kl_div KN_REDUCTION_BATCHMEAN",
                   op, (int)r);
}

kn_tensor *kn_loss_reduced(const char *op, kn_tensor *loss, kn_loss_reduction r)
{
    if (!kn_loss_reduction_is_one(op, r) || r == KN_REDUCTION_NONE)
        return kn_ok() ? loss : NULL;
    return r == KN_REDUCTION_SUM ? kn_sum(loss, 0, NULL, false) : kn_mean(loss, 0, NULL, false);
}

bool kn_loss_same_device(const char *op, const kn_tensor *a, const kn_tensor *b)
{
    return kn_device_of(a) == kn_device_of(b) ||
           kn_fail("%s: its tensors are on %s and on %s; move one of them", op,
                   kn_device_name(kn_device_of(a)), kn_device_name(kn_device_of(b)));
}

bool kn_loss_pair(const char *op, const kn_tensor *x, const kn_tensor *target)
{
    if (!kn_ok() || !kn_check(x, op) || !kn_check(target, op))
        return false;
    if (kn_dtype_is_float(x->dtype) && x->dtype == target->dtype &&
        kn_has_shape(x, target->ndim, target->shape))
        return kn_loss_same_device(op, x, target);
    return kn_fail("%s: x is %s and the target %s; it needs two of one shape and one float dtype "
                   "(kn_expand, kn_cast)",
                   op, KN_SHOWN(x), KN_SHOWN(target));
}

/* An optional weight broadcasts to x. */
static bool fits_weight(const char *op, const char *what, const kn_tensor *w, const kn_tensor *x)
{
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    if (!w)
        return true;
    if (!kn_check(w, op))
        return false;
    bool fits = w->dtype == x->dtype && w->ndim <= x->ndim &&
                kn_broadcast_shape(x->ndim, x->shape, w->ndim, w->shape, &ndim, shape) &&
                kn_has_shape(x, ndim, shape);
    if (fits)
        return kn_loss_same_device(op, x, w);
    return kn_fail("%s: .%s is %s; it should be of x's dtype and broadcast to x, %s", op, what,
                   KN_SHOWN(w), KN_SHOWN(x));
}

/* log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), exact on both sides; kn_softplus has a
 * threshold. */
static kn_tensor *softplus_of(kn_tensor *x)
{
    return kn_add(kn_clamp(x, 0, INFINITY), kn_log1p(kn_exp(kn_neg(kn_abs(x)))));
}

/* ---- of differences -------------------------------------------------------------------------- */

kn_tensor *kn_mse_loss_(kn_tensor *x, kn_tensor *target, kn_mse_loss_options o)
{
    if (!kn_loss_pair("mse_loss", x, target))
        return NULL;
    kn_tensor *d = kn_sub(x, target);
    return kn_loss_reduced("mse_loss", kn_mul(d, d), o.reduction);
}

kn_tensor *kn_l1_loss_(kn_tensor *x, kn_tensor *target, kn_l1_loss_options o)
{
    if (!kn_loss_pair("l1_loss", x, target))
        return NULL;
    return kn_loss_reduced("l1_loss", kn_abs(kn_sub(x, target)), o.reduction);
}

/* c (d - c / 2) with c = d between -delta and delta: d^2 / 2 inside, delta (|d| - delta / 2)
 * outside, and a derivative of c on both sides of the border. */
static kn_tensor *huber(kn_tensor *x, kn_tensor *target, double delta, double factor)
{
    kn_tensor *d = kn_sub(x, target), *c = kn_clamp(d, -delta, delta);
    kn_tensor *y = kn_mul(c, kn_sub(d, kn_scale(c, 0.5)));
    return factor == 1 ? y : kn_scale(y, factor);
}

kn_tensor *kn_huber_loss_(kn_tensor *x, kn_tensor *target, kn_huber_loss_options o)
{
    double delta = o.delta != 0 ? o.delta : 1;
    if (!kn_loss_pair("huber_loss", x, target))
        return NULL;
    if (!(delta > 0 && isfinite(delta)))
        return kn_fail_null("huber_loss: .delta is %g, should be above 0 (0: 1)", o.delta);
    return kn_loss_reduced("huber_loss", huber(x, target, delta, 1), o.reduction);
}

kn_tensor *kn_smooth_l1_loss_(kn_tensor *x, kn_tensor *target, kn_smooth_l1_loss_options o)
{
    double beta = kn_value_or(o.beta, 1);
    if (!kn_loss_pair("smooth_l1_loss", x, target) ||
        !kn_loss_number("smooth_l1_loss", "beta", beta, 0))
        return NULL;
    kn_tensor *loss = beta > 0 ? huber(x, target, beta, 1 / beta) : kn_abs(kn_sub(x, target));
    return kn_loss_reduced("smooth_l1_loss", loss, o.reduction);
}

bool kn_loss_number(const char *op, const char *name, double value, double least)
{
    return (isfinite(value) && value >= least) ||
           (kn_ok() && kn_fail(least > -INFINITY ? "%s: .%s is %g; should be finite and at least %g"
                                                 : "%s: .%s is %g; should be finite",
                               op, name, value, least));
}

kn_tensor *kn_margin_ranking_loss_(kn_tensor *a, kn_tensor *b, kn_tensor *sign,
                                   kn_margin_ranking_loss_options o)
{
    if (!kn_loss_pair("margin_ranking_loss", a, b) ||
        !kn_loss_pair("margin_ranking_loss", a, sign) ||
        !kn_loss_number("margin_ranking_loss", "margin", o.margin, -INFINITY))
        return NULL;
    kn_tensor *wrong = kn_mul(sign, kn_sub(b, a));
    return kn_loss_reduced("margin_ranking_loss", kn_relu(kn_add_scalar(wrong, o.margin)),
                           o.reduction);
}

kn_tensor *kn_hinge_embedding_loss_(kn_tensor *x, kn_tensor *sign,
                                    kn_hinge_embedding_loss_options o)
{
    if (!kn_loss_pair("hinge_embedding_loss", x, sign) ||
        !kn_loss_number("hinge_embedding_loss", "margin", o.margin, -INFINITY))
        return NULL;
    kn_tensor *zero = kn_number_like(x, 0), *one = kn_number_like(x, 1);
    kn_tensor *far = kn_relu(kn_add_scalar(kn_neg(x), kn_value_or(o.margin, 1)));
    kn_tensor *loss =
        kn_add(kn_where(kn_ne(sign, one), far, zero), kn_where(kn_ne(sign, kn_neg(one)), x, zero));
    return kn_loss_reduced("hinge_embedding_loss", loss, o.reduction);
}

kn_tensor *kn_triplet_margin_loss_(kn_tensor *anchor, kn_tensor *positive, kn_tensor *negative,
                                   kn_triplet_margin_loss_options o)
{
    const kn_pairwise_distance_options by = { .p = o.p, .eps = o.eps };
    if (!kn_loss_pair("triplet_margin_loss", anchor, positive) ||
        !kn_loss_pair("triplet_margin_loss", anchor, negative) ||
        !kn_loss_number("triplet_margin_loss", "margin", o.margin, -INFINITY))
        return NULL;
    kn_tensor *near = kn_pairwise_distance_(anchor, positive, by);
    kn_tensor *far = kn_pairwise_distance_(anchor, negative, by);
    if (o.swap)
        far = kn_minimum(far, kn_pairwise_distance_(positive, negative, by));
    kn_tensor *loss = kn_relu(kn_add_scalar(kn_sub(near, far), kn_value_or(o.margin, 1)));
    return kn_loss_reduced("triplet_margin_loss", loss, o.reduction);
}

/* ---- of probabilities ------------------------------------------------------------------------ */

/* dy in x's wide dtype times factor, in the dtype of input i. */
static kn_tensor *times(kn_function_run *run, int i, kn_tensor *dy, kn_tensor *factor)
{
    return run->needs[i] ? kn_cast(kn_mul(kn_wide(dy), factor), run->dtype[i]) : NULL;
}

static kn_tensor *one_minus(kn_tensor *x)
{
    return kn_add_scalar(kn_neg(x), 1);
}

static kn_tensor *bounded_log(kn_tensor *x)
{
    return kn_clamp(kn_log(x), -100, INFINITY);
}

static kn_tensor *bounded_log_rest(kn_tensor *x)
{
    return kn_clamp(kn_log1p(kn_neg(x)), -100, INFINITY);
}

/* -(t log x + (1 - t) log(1 - x)) */
static kn_values bce_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *x = kn_wide(in.v[0]), *t = kn_wide(in.v[1]);
    kn_tensor *y = kn_add(kn_mul(t, bounded_log(x)), kn_mul(one_minus(t), bounded_log_rest(x)));
    kn_save_for_backward(run, in.v[0], in.v[1]);
    return KN_VALUES(kn_cast(kn_neg(y), in.v[0]->dtype));
}

static kn_values bce_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = kn_wide(run->saved.v[0]), *t = kn_wide(run->saved.v[1]), *dy = dout.v[0];
    kn_tensor *slope = kn_clamp(kn_mul(x, one_minus(x)), 1e-12, INFINITY);
    return KN_VALUES(times(run, 0, dy, kn_div(kn_sub(x, t), slope)),
                     times(run, 1, dy, kn_sub(bounded_log_rest(x), bounded_log(x))));
}

kn_tensor *kn_binary_cross_entropy_(kn_tensor *x, kn_tensor *target,
                                    kn_binary_cross_entropy_options o)
{
    static const kn_function bce = { .name = "binary_cross_entropy",
                                     .forward = bce_forward,
                                     .backward = bce_backward,
                                     .second_order = true };
    if (!kn_loss_pair(bce.name, x, target) || !fits_weight(bce.name, "weight", o.weight, x))
        return NULL;
    kn_tensor *loss = kn_function_call(&bce, x, target);
    return kn_loss_reduced(bce.name, o.weight ? kn_mul(loss, o.weight) : loss, o.reduction);
}

/* p t softplus(-x) + (1 - t) softplus(x), with pos_weight p, 1 if there is none */
static kn_values logits_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *x = kn_wide(in.v[0]), *t = kn_wide(in.v[1]), *p = kn_wide(in.v[2]);
    kn_tensor *yes = kn_mul(p ? kn_mul(p, t) : t, softplus_of(kn_neg(x)));
    kn_tensor *y = kn_add(yes, kn_mul(one_minus(t), softplus_of(x)));
    kn_save_for_backward(run, in.v[0], in.v[1], in.v[2]);
    return KN_VALUES(kn_cast(y, in.v[0]->dtype));
}

/* dx = s - t, or (1 - t) s - p t (1 - s); dt = p softplus(-x) - softplus(x) */
static kn_values logits_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = kn_wide(run->saved.v[0]), *t = kn_wide(run->saved.v[1]),
              *p = kn_wide(run->saved.v[2]);
    kn_tensor *s = kn_sigmoid(x), *dx = kn_sub(s, t), *dt = kn_neg(x);
    if (p) {
        dx = kn_sub(kn_mul(one_minus(t), s), kn_mul(kn_mul(p, t), kn_sigmoid(kn_neg(x))));
        if (run->needs[1])
            dt = kn_sub(kn_mul(p, softplus_of(kn_neg(x))), softplus_of(x));
    }
    return KN_VALUES(times(run, 0, dout.v[0], dx), times(run, 1, dout.v[0], dt), NULL);
}

kn_tensor *kn_binary_cross_entropy_with_logits_(kn_tensor *x, kn_tensor *target,
                                                kn_binary_cross_entropy_with_logits_options o)
{
    static const kn_function bce = { .name = "binary_cross_entropy_with_logits",
                                     .forward = logits_forward,
                                     .backward = logits_backward,
                                     .optional = 4,
                                     .second_order = true };
    if (!kn_loss_pair(bce.name, x, target) || !fits_weight(bce.name, "weight", o.weight, x) ||
        !fits_weight(bce.name, "pos_weight", o.pos_weight, x))
        return NULL;
    kn_tensor *loss = kn_function_call(&bce, x, target, o.pos_weight);
    return kn_loss_reduced(bce.name, o.weight ? kn_mul(loss, o.weight) : loss, o.reduction);
}

kn_tensor *kn_kl_div_(kn_tensor *x, kn_tensor *target, kn_kl_div_options o)
{
    if (!kn_loss_pair("kl_div", x, target))
        return NULL;
    bool batch = o.reduction == KN_REDUCTION_BATCHMEAN;
    if (batch && (x->ndim < 1 || x->shape[0] < 1))
        return kn_fail_null(
            "kl_div: KN_REDUCTION_BATCHMEAN divides by the size of dim 0, but x is %s",
            KN_SHOWN(x));
    kn_tensor *t = target, *log_t = target;
    if (o.log_target)
        t = kn_exp(target);
    else /* t log t is 0 at 0 */
        log_t = kn_log(kn_where(kn_eq(t, kn_number_like(t, 0)), kn_number_like(t, 1), t));
    kn_tensor *loss = kn_mul(t, kn_sub(log_t, x));
    return batch ? kn_scale(kn_sum(loss, 0, NULL, false), 1 / (double)x->shape[0])
                 : kn_loss_reduced("kl_div", loss, o.reduction);
}

kn_tensor *kn_gaussian_nll_loss_(kn_tensor *x, kn_tensor *target, kn_tensor *var,
                                 kn_gaussian_nll_loss_options o)
{
    const char *op = "gaussian_nll_loss";
    const double eps = o.eps != 0 ? o.eps : 1e-6;
    if (!kn_loss_pair(op, x, target))
        return NULL;
    if (!var || !(eps > 0 && isfinite(eps)))
        return kn_fail_null("gaussian_nll_loss: needs a variance and an .eps above 0");
    if (kn_check(var, op) && x->ndim > 0 && kn_has_shape(var, x->ndim - 1, x->shape))
        var = kn_unsqueeze(var, -1); /* one a row, as in torch */
    if (!var || !fits_weight(op, "var", var, x))
        return NULL;
    /* the bound holds for the value; the gradient passes it */
    kn_tensor *least = kn_sub(kn_clamp(kn_detach(var), eps, INFINITY), kn_detach(var));
    kn_tensor *v = kn_add(var, least), *d = kn_sub(x, target);
    kn_tensor *loss = kn_scale(kn_add(kn_log(v), kn_div(kn_square(d), v)), 0.5);
    return kn_loss_reduced(op, o.full ? kn_add_scalar(loss, 0.91893853320467274178) : loss,
                           o.reduction);
}

kn_tensor *kn_poisson_nll_loss_(kn_tensor *x, kn_tensor *target, kn_poisson_nll_loss_options o)
{
    const double eps = kn_value_or(o.eps, 1e-8);
    if (!kn_loss_pair("poisson_nll_loss", x, target) ||
        !kn_loss_number("poisson_nll_loss", "eps", eps, 0))
        return NULL;
    kn_tensor *loss = o.no_log_input ? kn_sub(x, kn_mul(target, kn_log(kn_add_scalar(x, eps))))
                                     : kn_sub(kn_exp(x), kn_mul(target, x));
    if (o.full) { /* Stirling's log(target!), of targets above 1 */
        kn_tensor *one = kn_number_like(x, 1), *some = kn_gt(target, one);
        kn_tensor *t = kn_where(some, target, one), *log_t = kn_log(t);
        kn_tensor *all = kn_add(kn_sub(kn_mul(t, log_t), t), kn_scale(log_t, 0.5));
        all = kn_add_scalar(all, 0.91893853320467274178);
        loss = kn_add(loss, kn_where(some, all, kn_number_like(x, 0)));
    }
    return kn_loss_reduced("poisson_nll_loss", loss, o.reduction);
}
