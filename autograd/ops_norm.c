/* autograd/ops_norm.c: layer_norm and rms_norm over the last dim, of a tensor or the sum of two. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <math.h>
#include <string.h>

typedef struct norm_attr {
    double eps;
    bool rms;
} norm_attr;

/* Inputs, and outputs; ADD and SUM of a sum only. */
enum { X, WEIGHT, BIAS, ADD };
enum { Y, MEAN, RSTD, SUM };

bool kn_vector_fits(const char *op, const char *what, const kn_tensor *v, int64_t n,
                    const kn_tensor *x)
{
    return !v ||
           (v->ndim == 1 && v->shape[0] == n && (v->dtype == x->dtype || v->dtype == KN_F32)) ||
           kn_fail("%s: x is %s, %s is %s; it should be [%lld] in x's dtype or f32", op,
                   KN_SHOWN(x), what, KN_SHOWN(v), (long long)n);
}

bool kn_eps_of(const char *op, double given, double *eps)
{
    *eps = kn_value_or(given, 1e-5);
    return (*eps >= 0 && isfinite(*eps)) ||
           kn_fail("%s: eps is %g, should be at least 0 (0: 1e-5; KN_ZERO: 0)", op, given);
}

static bool check_added(const kn_op_call *c)
{
    const kn_tensor *x = c->in[X], *add = c->in[ADD];
    if (add->dtype == x->dtype && kn_has_shape(add, x->ndim, x->shape))
        return true;
    return kn_fail("%s: x is %s, what is added to it is %s; both should have one shape and dtype",
                   c->op->name, KN_SHOWN(x), KN_SHOWN(add));
}

static bool norm_shape(kn_op_call *c)
{
    const kn_tensor *x = c->in[X];
    if (!kn_dtype_is_float(x->dtype) || x->ndim < 1)
        return kn_fail("%s: needs a float tensor with at least 1 dim(s), got %s", c->op->name,
                       KN_SHOWN(x));
    const int64_t n = x->shape[x->ndim - 1];
    if (!kn_vector_fits(c->op->name, "weight", c->in[WEIGHT], n, x) ||
        !kn_vector_fits(c->op->name, "bias", c->in[BIAS], n, x) ||
        (c->nin > ADD && !check_added(c)))
        return false;
    c->spec[Y] = c->spec[SUM] = kn_spec_like(x);
    c->spec[MEAN] = c->spec[RSTD] = (kn_spec){ .dtype = kn_wide_dtype(x->dtype),
                                               .ndim = 1,
                                               .shape = { kn_rows_of(x).shape[0] } };
    if (((const norm_attr *)c->attr)->rms)
        c->spec[MEAN].shape[0] = 0;
    return true;
}

static bool norm_forward(kn_op_call *c)
{
    const norm_attr *a = c->attr;
    kn_norm_args args = { .y = kn_array_of(c->out[Y]),
                          .x = kn_array_of(c->in[X]),
                          .w = kn_array_or_none(c->in[WEIGHT]),
                          .b = kn_array_or_none(c->in[BIAS]),
                          .mean = kn_array_of(c->out[MEAN]),
                          .rstd = kn_array_of(c->out[RSTD]),
                          .eps = a->eps,
                          .add = kn_array_or_none(c->in[ADD]),
                          .sum = kn_array_or_none(c->out[SUM]),
                          .rms = a->rms };
    return KN_RUN(c->out[Y], KN_K_NORM, args);
}

/* The gradients by what was normed (dx, or NULL: not wanted), weight and bias. */
static bool norm_grad(kn_op_grad *g, const kn_tensor *normed, kn_tensor *dx, const kn_tensor *more)
{
    const norm_attr *a = g->attr;
    for (int i = WEIGHT; i <= BIAS; i++)
        if (g->want[i] && !kn_grad_out(g, i))
            return false;
    kn_norm_grad_args args = { .dx = kn_array_or_none(dx),
                               .dw = kn_array_or_none(g->din[WEIGHT]),
                               .db = kn_array_or_none(g->din[BIAS]),
                               .dy = kn_array_of(g->dout[Y]),
                               .x = kn_array_of(normed),
                               .w = kn_array_or_none(g->in[WEIGHT]),
                               .mean = kn_array_of(g->out[MEAN]),
                               .rstd = kn_array_of(g->out[RSTD]),
                               .more = kn_array_or_none(more),
                               .rms = a->rms };
    return KN_RUN(g->dout[Y], KN_K_NORM_GRAD, args);
}

static bool norm_backward(kn_op_grad *g)
{
    if (!g->dout[Y])
        return true;
    kn_tensor *dx = g->want[X] ? kn_grad_out(g, X) : NULL;
    return kn_ok() && norm_grad(g, g->in[X], dx, NULL);
}

/* x and add have one gradient, that of the sum: what came to the sum and what comes by the norm. */
static bool add_norm_backward(kn_op_grad *g)
{
    kn_tensor *dsum = g->dout[SUM];
    if (g->dout[Y]) {
        const bool both = g->want[X] && g->want[ADD];
        kn_tensor *more = dsum ? kn_contiguous(dsum) : NULL, *dx = NULL;
        if (both)
            dx = kn_empty_like(g->out[SUM]);
        else if (g->want[X] || g->want[ADD])
            dx = kn_grad_out(g, g->want[X] ? X : ADD);
        if (!kn_ok() || !norm_grad(g, g->out[SUM], dx, more))
            return false;
        dsum = dx;
    }
    g->din[X] = g->want[X] ? dsum : NULL;
    g->din[ADD] = g->want[ADD] ? dsum : NULL;
    return true;
}

kn_tensor *kn_normed(kn_tensor *x, int n, const int64_t *dims, double eps, bool rms)
{
    x = kn_wide(x);
    x = rms ? x : kn_sub(x, kn_mean(x, n, dims, true));
    return kn_mul(x, kn_rsqrt(kn_add_scalar(kn_mean(kn_square(x), n, dims, true), eps)));
}

/* v in t's dtype; NULL for NULL. */
static kn_tensor *as(kn_tensor *v, const kn_tensor *t)
{
    return v && t ? kn_cast(v, t->dtype) : NULL;
}

static bool norm_composed(kn_op_grad *g, kn_tensor **y)
{
    const norm_attr *a = g->attr;
    kn_tensor *x = g->in[X], *h = kn_normed(x, KN_SHAPE(-1), a->eps, a->rms);
    kn_tensor *w = as(g->in[WEIGHT], h), *b = as(g->in[BIAS], h);
    h = w ? kn_mul(h, w) : h;
    y[Y] = as(b ? kn_add(h, b) : h, x);
    return y[Y] != NULL;
}

/* The sum stands in for x. */
static bool add_norm_on_tape(kn_op_grad *g)
{
    kn_op_grad of = *g;
    const bool wants = g->want[X] || g->want[ADD];
    of.in[X] = g->out[SUM];
    of.want[X] = wants;
    of.want[ADD] = false;
    if (g->dout[Y] && !kn_composed_on_tape(&of))
        return false;
    memcpy(g->din, of.din, sizeof g->din);
    kn_tensor *d = of.din[X], *dsum = g->dout[SUM];
    d = d && dsum ? kn_add(d, dsum) : d ? d : dsum;
    g->din[X] = g->want[X] ? d : NULL;
    g->din[ADD] = g->want[ADD] ? d : NULL;
    return kn_ok();
}

#define NORM_OP(id, the_name)                                                                      \
    KN_OP(id, .name = the_name, .attr_size = sizeof(norm_attr), .save_in = 1 << X | 1 << WEIGHT,   \
          .save_out = 1 << MEAN | 1 << RSTD, .shape = norm_shape, .forward = norm_forward,         \
          .backward = norm_backward, .on_tape = kn_composed_on_tape, .composed = norm_composed)
NORM_OP(kn_op_layer_norm, "layer_norm");
NORM_OP(kn_op_rms_norm, "rms_norm");

#define ADD_NORM_OP(id, the_name)                                                                  \
    KN_OP(id, .name = the_name, .attr_size = sizeof(norm_attr), .save_in = 1 << WEIGHT,            \
          .save_out = 1 << MEAN | 1 << RSTD | 1 << SUM, .shape = norm_shape,                       \
          .forward = norm_forward, .backward = add_norm_backward, .on_tape = add_norm_on_tape,     \
          .composed = norm_composed)
ADD_NORM_OP(kn_op_add_layer_norm, "add_layer_norm");
ADD_NORM_OP(kn_op_add_rms_norm, "add_rms_norm");

/* sum: NULL without an add. */
static kn_tensor *norm(const kn_op *op, kn_tensor *const in[4], double eps, bool rms,
                       kn_tensor **sum)
{
    norm_attr a = { .rms = rms };
    kn_tensor *out[4];
    const int n = sum ? 4 : 3;
    if (!kn_eps_of(op->name, eps, &a.eps) ||
        !kn_apply(op, n, in, 1 << WEIGHT | 1 << BIAS, &a, n, out))
        return NULL;
    if (sum)
        *sum = out[SUM];
    return out[Y];
}

kn_tensor *kn_layer_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, double eps)
{
    return norm(&kn_op_layer_norm, (kn_tensor *[]){ x, w, b, NULL }, eps, false, NULL);
}

kn_tensor *kn_rms_norm_(kn_tensor *x, kn_tensor *w, double eps)
{
    return norm(&kn_op_rms_norm, (kn_tensor *[]){ x, w, NULL, NULL }, eps, true, NULL);
}

/* Kernels take rows as they lie in memory, or the slow way: in two steps the sum would be dense. */
static kn_tensor *dense(kn_tensor *x)
{
    return x ? kn_contiguous(x) : NULL;
}

static kn_tensor *norm_of_sum(const kn_op *op, kn_tensor *const in[4], double eps, bool rms,
                              kn_tensor **sum)
{
    if (!sum)
        return kn_fail_null("%s: the place for the sum is NULL", op->name);
    *sum = NULL;
    if (!in[ADD] && kn_ok())
        return kn_fail_null("%s: argument 2 is NULL although no error stands", op->name);
    return norm(op, (kn_tensor *[]){ dense(in[X]), in[WEIGHT], in[BIAS], dense(in[ADD]) }, eps, rms,
                sum);
}

kn_tensor *kn_add_layer_norm(kn_tensor *x, kn_tensor *add, kn_tensor *w, kn_tensor *b, double eps,
                             kn_tensor **sum)
{
    return norm_of_sum(&kn_op_add_layer_norm, (kn_tensor *[]){ x, w, b, add }, eps, false, sum);
}

kn_tensor *kn_add_rms_norm(kn_tensor *x, kn_tensor *add, kn_tensor *w, double eps, kn_tensor **sum)
{
    return norm_of_sum(&kn_op_add_rms_norm, (kn_tensor *[]){ x, w, NULL, add }, eps, true, sum);
}
