/* autograd/ops_losses_rows.c: losses and functions of rows: of classes, and of directions of two
 * vectors. */
#include "autograd/function.h"
#include "autograd/losses.h"
#include <float.h>
#include <math.h>
#include <string.h>

/* ---- of classes ------------------------------------------------------------------------------ */

int64_t kn_loss_ignored(int64_t given)
{
    return given == KN_ZERO ? 0 : given ? given : -100;
}

static bool fits_classes(const char *op, const kn_tensor *x, const kn_tensor *targets)
{
    bool match = x->ndim >= 1 && targets->ndim == x->ndim - 1 && kn_dtype_is_float(x->dtype) &&
                 (targets->dtype == KN_I64 || targets->dtype == KN_I32) &&
                 memcmp(x->shape, targets->shape, (size_t)targets->ndim * sizeof *x->shape) == 0;
    if (!match)
        return kn_fail("%s: a float x %s needs i64 or i32 targets of its shape without the last "
                       "dim, got %s",
                       op, KN_SHOWN(x), KN_SHOWN(targets));
    if (x->shape[x->ndim - 1] < 1)
        return kn_fail("%s: x %s has no classes in its last dim", op, KN_SHOWN(x));
    return kn_loss_same_device(op, x, targets);
}

static bool fits_class_weights(const char *op, const kn_tensor *w, const kn_tensor *x)
{
    if (!w)
        return true;
    if (!kn_check(w, op))
        return false;
    if (w->ndim == 1 && x->ndim >= 1 && w->dtype == x->dtype &&
        w->shape[0] == x->shape[x->ndim - 1])
        return kn_loss_same_device(op, x, w);
    return kn_fail("%s: .weight is %s; it should be one number of x's dtype for each class of x, "
                   "the last dim of %s",
                   op, KN_SHOWN(w), KN_SHOWN(x));
}

/* Rows of logarithms lp[..., V] and what their targets say. */
typedef struct picked {
    kn_tensor *counts; /* bool, of the targets' shape */
    kn_tensor *weight; /* of each row, 0 where it doesn't count */
    kn_tensor *loss;   /* -weight lp[target] */
} picked;

static picked pick(kn_tensor *lp, kn_tensor *targets, kn_tensor *class_weight, int64_t ignore)
{
    picked p = { 0 };
    int64_t column[KN_MAX_DIMS] = { 0 };
    kn_tensor *t = kn_cast(targets, KN_I64), *zero = kn_number_like(lp, 0);
    p.counts = kn_ne(t, kn_number_like(t, (double)ignore));
    t = kn_where(p.counts, t, kn_number_like(t, 0));
    memcpy(column, targets->shape, (size_t)targets->ndim * sizeof *column);
    column[targets->ndim] = 1;
    kn_tensor *x = kn_gather(lp, -1, kn_reshape(t, lp->ndim, column)); /* checks t */
    kn_tensor *w = kn_number_like(lp, 1);
    if (class_weight) {
        w = kn_reshape(kn_detach(class_weight), KN_SHAPE(class_weight->shape[0], 1));
        w = kn_reshape(kn_embedding(w, t), targets->ndim, targets->shape);
    }
    p.weight = kn_where(p.counts, w, zero);
    x = kn_mul(kn_neg(kn_reshape(x, targets->ndim, targets->shape)), p.weight);
    p.loss = kn_where(p.counts, x, zero);
    return p;
}

/* The mean divides by the weights; 0 where they are 0. */
static kn_tensor *weighted(const char *op, kn_tensor *loss, kn_tensor *weight, kn_loss_reduction r)
{
    if (r != KN_REDUCTION_DEFAULT && r != KN_REDUCTION_MEAN)
        return kn_loss_reduced(op, loss, r);
    kn_tensor *sum = kn_sum(weight, 0, NULL, false);
    sum = kn_where(kn_eq(sum, kn_number_like(sum, 0)), kn_number_like(sum, 1), sum);
    return kn_div(kn_sum(loss, 0, NULL, false), sum);
}

kn_tensor *kn_nll_loss_(kn_tensor *x, kn_tensor *targets, kn_nll_loss_options o)
{
    const char *op = "nll_loss";
    if (!kn_ok() || !kn_check(x, op) || !kn_check(targets, op) || !fits_classes(op, x, targets) ||
        !fits_class_weights(op, o.weight, x))
        return NULL;
    picked p = pick(x, targets, o.weight, kn_loss_ignored(o.ignore_index));
    return weighted(op, p.loss, p.weight, o.reduction);
}

/* sum over the last dim of class_weight lp, or of lp */
static kn_tensor *sum_of_classes(kn_tensor *lp, kn_tensor *class_weight)
{
    if (class_weight)
        lp = kn_mul(lp, kn_detach(class_weight));
    return kn_sum(lp, 1, (int64_t[]){ -1 }, false);
}

/* Targets are probabilities. */
static kn_tensor *soft_cross_entropy(kn_tensor *logits, kn_tensor *targets,
                                     const kn_cross_entropy_options *o)
{
    double V = (double)logits->shape[logits->ndim - 1];
    kn_tensor *lp = kn_log_softmax(kn_wide(logits)), *t = kn_wide(targets);
    if (o->smoothing > 0)
        t = kn_add_scalar(kn_scale(t, 1 - o->smoothing), o->smoothing / V);
    kn_tensor *loss = kn_neg(sum_of_classes(kn_mul(lp, t), kn_wide(o->weight)));
    return kn_loss_reduced("cross_entropy", loss, o->reduction);
}

/* By stored logarithms: with weights, or a value a row. */
static kn_tensor *cross_entropy_by_rows(kn_tensor *logits, kn_tensor *targets,
                                        const kn_cross_entropy_options *o)
{
    double s = o->smoothing, V = (double)logits->shape[logits->ndim - 1];
    kn_tensor *lp = kn_log_softmax(kn_wide(logits)), *w = kn_wide(o->weight);
    if (!lp)
        return NULL;
    picked p = pick(lp, targets, w, kn_loss_ignored(o->ignore_index));
    kn_tensor *loss = p.loss;
    if (s > 0 && loss) {
        kn_tensor *rest = kn_scale(sum_of_classes(lp, w), -s / V);
        rest = kn_where(p.counts, rest, kn_number_like(lp, 0));
        loss = kn_add(kn_scale(loss, 1 - s), rest);
    }
    return weighted("cross_entropy", loss, p.weight, o->reduction);
}

kn_tensor *kn_cross_entropy_(kn_tensor *logits, kn_tensor *targets, kn_cross_entropy_options o)
{
    const char *op = "cross_entropy";
    kn_tensor *out[3];
    if (!kn_ok() || !kn_check(logits, op) || !kn_check(targets, op) ||
        !kn_loss_reduction_is_one(op, o.reduction) || !fits_class_weights(op, o.weight, logits))
        return NULL;
    if (!(o.smoothing >= 0 && o.smoothing < 1))
        return kn_fail_null("%s: smoothing is %g, should lie in [0, 1)", op, o.smoothing);
    bool soft = kn_dtype_is_float(targets->dtype);
    if (soft)
        return logits->ndim >= 1 && kn_loss_pair(op, logits, targets)
                   ? soft_cross_entropy(logits, targets, &o)
                   : NULL;
    if (o.weight || o.reduction == KN_REDUCTION_NONE)
        return fits_classes(op, logits, targets) ? cross_entropy_by_rows(logits, targets, &o)
                                                 : NULL;
    if (!kn_fused_cross_entropy(logits, targets, kn_loss_ignored(o.ignore_index), o.smoothing, out))
        return NULL;
    return o.reduction == KN_REDUCTION_SUM ? kn_mul(out[0], out[1]) : out[0];
}

/* ---- of directions --------------------------------------------------------------------------- */

/* Dim of t: 1 where none is given. -1 with an error. */
static int dim_of(const char *op, const kn_tensor *t, int64_t given)
{
    int64_t dim = given == KN_ZERO ? 0 : given ? given : 1;
    if (dim < -t->ndim || dim >= t->ndim) {
        kn_fail("%s: .dim is %lld (0: 1; KN_ZERO: 0), which is out of range for %s", op,
                (long long)dim, KN_SHOWN(t));
        return -1;
    }
    return (int)(dim < 0 ? dim + t->ndim : dim);
}

/* Directions along dim, y = x / n with the norm n = sqrt(max(sum x^2, least) + more). */
typedef struct direction_arg {
    int64_t dim;
    double least, more;
} direction_arg;

static kn_values direction_forward(kn_function_run *run, kn_values in)
{
    const direction_arg *a = run->arg;
    kn_tensor *x = in.v[0];
    kn_tensor *sum = kn_sum(kn_mul(x, x), 1, &a->dim, true);
    kn_tensor *free = kn_ge(sum, kn_number_like(sum, a->least));
    kn_tensor *n = kn_sqrt(kn_add_scalar(kn_clamp(sum, a->least, INFINITY), a->more));
    kn_tensor *y = kn_div(x, n);
    kn_save_for_backward(run, y, n, free);
    return KN_VALUES(y, n);
}

/* dx = (dy - y sum dy y) / n, which is exact where the two cancel; dy / n where n is the least.
 * Gradients of n, which only this brings, add y dn. */
static kn_values direction_backward(kn_function_run *run, kn_values dout)
{
    const direction_arg *a = run->arg;
    kn_tensor *dy = dout.v[0], *y = run->saved.v[0], *n = run->saved.v[1];
    kn_tensor *along = kn_sum(kn_mul(dy, y), 1, &a->dim, true);
    kn_tensor *lost = kn_where(run->saved.v[2], along, kn_number_like(along, 0));
    kn_tensor *dx = kn_div(kn_sub(dy, kn_mul(y, lost)), n), *dn = dout.v[1];
    if (!dn)
        return KN_VALUES(dx);
    dn = kn_where(run->saved.v[2], dn, kn_number_like(dn, 0));
    return KN_VALUES(kn_add(dx, kn_mul(y, dn)));
}

static const kn_function direction = { .name = "direction",
                                       .forward = direction_forward,
                                       .backward = direction_backward,
                                       .no_grad = 2,
                                       .second_order = true };

/* x / max(|x|, eps) over dim. */
static kn_tensor *direction_of(kn_tensor *x, int64_t dim, double eps)
{
    const double least = x && x->dtype == KN_F64 ? DBL_MIN : FLT_MIN;
    const direction_arg a = { dim, fmax(eps * eps, least), 0 };
    return x ? kn_function_call_n(&direction, KN_VALUES(x), &a, sizeof a).v[0] : NULL;
}

kn_tensor *kn_normalize_(kn_tensor *x, kn_normalize_options o)
{
    const char *op = "normalize";
    double eps = kn_value_or(o.eps, 1e-12);
    if (!kn_takes(op, x, true) || !kn_loss_number(op, "eps", eps, 0))
        return NULL;
    int dim = dim_of(op, x, o.dim);
    if (dim < 0)
        return NULL;
    kn_tensor *y = direction_of(kn_wide(x), dim, eps);
    return kn_cast(y, x->dtype);
}

kn_tensor *kn_cosine_similarity_(kn_tensor *x, kn_tensor *y, kn_cosine_similarity_options o)
{
    const char *op = "cosine_similarity";
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    double eps = kn_value_or(o.eps, 1e-8);
    if (!kn_ok() || !kn_check(x, op) || !kn_check(y, op) || !kn_loss_number(op, "eps", eps, 0))
        return NULL;
    if (!kn_dtype_is_float(x->dtype) || x->dtype != y->dtype ||
        !kn_broadcast_shape(x->ndim, x->shape, y->ndim, y->shape, &ndim, shape))
        return kn_fail_null(
            "%s: needs two of one float dtype whose shapes broadcast, got %s and %s", op,
            KN_SHOWN(x), KN_SHOWN(y));
    if (!kn_loss_same_device(op, x, y))
        return NULL;
    kn_dtype dtype = x->dtype;
    x = kn_expand(kn_wide(x), ndim, shape);
    y = kn_expand(kn_wide(y), ndim, shape);
    int dim = x && y ? dim_of(op, x, o.dim) : -1;
    if (dim < 0)
        return NULL;
    int64_t over = dim;
    kn_tensor *both = kn_mul(direction_of(x, dim, eps), direction_of(y, dim, eps));
    return kn_cast(kn_sum(both, 1, &over, false), dtype);
}

/* Whether each element of sign is v, which every number dtype holds. */
static kn_tensor *is_value(kn_tensor *sign, double v)
{
    return kn_eq(sign, kn_number_like(sign, v));
}

kn_tensor *kn_cosine_embedding_loss_(kn_tensor *x, kn_tensor *y, kn_tensor *sign,
                                     kn_cosine_embedding_loss_options o)
{
    const char *op = "cosine_embedding_loss";
    if (!kn_loss_pair(op, x, y) || !kn_check(sign, op) || !kn_loss_same_device(op, x, sign))
        return NULL;
    if (!(fabs(o.margin) <= 1))
        return kn_fail_null("%s: .margin is %g, should lie in [-1, 1]", op, o.margin);
    if (x->ndim != sign->ndim + 1 || sign->dtype == KN_BOOL || sign->dtype == KN_U8 ||
        memcmp(x->shape, sign->shape, (size_t)sign->ndim * sizeof *x->shape) != 0)
        return kn_fail_null(
            "%s: x and y are %s, so sign must be a number, 1 or -1, for each row, but it is %s", op,
            KN_SHOWN(x), KN_SHOWN(sign));
    kn_dtype dtype = x->dtype;
    const int64_t last = x->ndim - 1;
    const direction_arg arg = { last, 0, 1e-12 };
    x = kn_function_call_n(&direction, KN_VALUES(kn_wide(x)), &arg, sizeof arg).v[0];
    y = kn_function_call_n(&direction, KN_VALUES(kn_wide(y)), &arg, sizeof arg).v[0];
    kn_tensor *c = kn_sum(kn_mul(x, y), 1, &last, false);
    if (!c)
        return NULL;
    kn_tensor *other =
        kn_where(is_value(sign, -1), kn_relu(kn_add_scalar(c, -o.margin)), kn_number_like(c, 0));
    c = kn_where(is_value(sign, 1), kn_add_scalar(kn_neg(c), 1), other);
    return kn_loss_reduced(op, kn_cast(c, dtype), o.reduction);
}
