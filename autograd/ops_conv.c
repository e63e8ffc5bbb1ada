/* autograd/ops_conv.c: convolution of images, and batch norm. */
#include "autograd/ops.h"
#include <math.h>
#include <string.h>

/* ---- convolution ----------------------------------------------------------------------------- */

typedef struct conv_attr {
    int64_t stride[2], pad[2], dilation[2], groups;
} conv_attr;

static bool conv_checks(const kn_op_call *c)
{
    const conv_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    char dx[128], dw[128], db[128];
    kn_describe(x, dx, sizeof dx);
    kn_describe(w, dw, sizeof dw);
    if (x->ndim != 4 || w->ndim != 4 || !kn_dtype_is_float(x->dtype) || x->dtype != w->dtype)
        return kn_fail("conv2d: needs x[N,C,H,W] and weight[O,C/groups,R,S] of the same float "
                       "dtype: x is %s, weight is %s",
                       dx, dw);
    if (a->groups < 1 || x->shape[1] % a->groups || w->shape[0] % a->groups)
        return kn_fail("conv2d: %lld groups must divide the channels of x %s and of weight %s",
                       (long long)a->groups, dx, dw);
    if (w->shape[1] * a->groups != x->shape[1])
        return kn_fail("conv2d: x is %s, its %lld channels in %lld groups need a weight[O,%lld,R,S]"
                       ", got %s",
                       dx, (long long)x->shape[1], (long long)a->groups,
                       (long long)(x->shape[1] / a->groups), dw);
    if (b && (b->ndim != 1 || b->shape[0] != w->shape[0] ||
              (b->dtype != x->dtype && b->dtype != KN_F32)))
        return kn_fail("conv2d: bias is %s, should be [%lld] in x's dtype or f32",
                       kn_describe(b, db, sizeof db), (long long)w->shape[0]);
    return true;
}

static bool conv_shape(kn_op_call *c)
{
    static const char *const dims[2] = { "rows", "columns" };
    const conv_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *w = c->in[1];
    if (!conv_checks(c))
        return false;
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(x);
    s->order = kn_order_of(x);
    s->shape[1] = w->shape[0];
    for (int d = 0; d < 2; d++) {
        const int64_t H = x->shape[2 + d], R = w->shape[2 + d];
        if (a->stride[d] < 1 || a->dilation[d] < 1 || a->pad[d] < 0)
            return kn_fail("conv2d: stride %lld, dilation %lld, pad %lld along %s; at least 1, 1, "
                           "0 are needed",
                           (long long)a->stride[d], (long long)a->dilation[d], (long long)a->pad[d],
                           dims[d]);
        const int64_t reach = a->dilation[d] * (R - 1) + 1, room = H + 2 * a->pad[d];
        if (R < 1 || reach > room)
            return kn_fail("conv2d: a kernel of %lld with dilation %lld reaches over %lld %s; x "
                           "with pad %lld has %lld",
                           (long long)R, (long long)a->dilation[d], (long long)reach, dims[d],
                           (long long)a->pad[d], (long long)room);
        s->shape[2 + d] = (room - reach) / a->stride[d] + 1;
    }
    return true;
}

/* Copies stride, pad, dilation and groups into any of the three structs of arguments. */
#define WITH_NUMBERS(args, a)                                                                      \
    do {                                                                                           \
        memcpy((args).stride, (a)->stride, sizeof(a)->stride);                                     \
        memcpy((args).pad, (a)->pad, sizeof(a)->pad);                                              \
        memcpy((args).dilation, (a)->dilation, sizeof(a)->dilation);                               \
        (args).groups = (a)->groups;                                                               \
    } while (0)

static bool conv_forward(kn_op_call *c)
{
    kn_conv_args args = { .y = kn_array_of(c->out[0]),
                          .x = kn_array_of(c->in[0]),
                          .w = kn_array_of(c->in[1]) };
    WITH_NUMBERS(args, (const conv_attr *)c->attr);
    if (c->in[2])
        args.bias = kn_array_of(c->in[2]);
    return KN_RUN(c->out[0], KN_K_CONV, args);
}

/* Libraries need dense images, so broadcast or sliced ones are copied. */
static kn_tensor *dense(kn_tensor *t)
{
    return kn_is_channels_last(t) ? t : kn_contiguous(t);
}

static bool conv_bias_backward(kn_op_grad *g, const kn_tensor *dy)
{
    kn_tensor *db = kn_grad_out(g, 2);
    if (!db)
        return false;
    kn_array d =
        kn_array_make(kn_array_of(db).data, db->dtype, 4, (int64_t[]){ 1, db->shape[0], 1, 1 });
    g->din[2] = db;
    return KN_RUN(db, KN_K_REDUCE, ((kn_reduce_args){ d, kn_array_of(dy), KN_SUM }));
}

static bool conv_backward(kn_op_grad *g)
{
    kn_tensor *dy = dense(g->dout[0]);
    if (!dy)
        return false;
    if (g->want[0]) {
        g->din[0] = kn_grad_as(g, 0, g->in[0]);
        if (!g->din[0])
            return false;
        kn_conv_grad_x_args args = { .dx = kn_array_of(g->din[0]),
                                     .dy = kn_array_of(dy),
                                     .w = kn_array_of(g->in[1]) };
        WITH_NUMBERS(args, (const conv_attr *)g->attr);
        if (!KN_RUN(dy, KN_K_CONV_GRAD_X, args))
            return false;
    }
    if (g->want[1]) {
        g->din[1] = kn_grad_out(g, 1);
        if (!g->din[1])
            return false;
        kn_conv_grad_w_args args = { .dw = kn_array_of(g->din[1]),
                                     .dy = kn_array_of(dy),
                                     .x = kn_array_of(g->in[0]) };
        WITH_NUMBERS(args, (const conv_attr *)g->attr);
        if (!KN_RUN(dy, KN_K_CONV_GRAD_W, args))
            return false;
    }
    return !g->want[2] || conv_bias_backward(g, dy);
}

KN_OP(kn_op_conv2d, .name = "conv2d", .attr_size = sizeof(conv_attr), .save_in = 3,
      .shape = conv_shape, .forward = conv_forward, .backward = conv_backward);

void kn_by_dim(int64_t out[2], int64_t both, const int64_t each[2], int64_t otherwise)
{
    const bool given = each[0] != 0 || each[1] != 0;
    for (int d = 0; d < 2; d++)
        out[d] = given ? each[d] : both != 0 ? both : otherwise;
}

kn_tensor *kn_conv2d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv2d_options o)
{
    conv_attr a = { .groups = o.groups ? o.groups : 1 };
    kn_by_dim(a.stride, o.stride, o.strides, 1);
    kn_by_dim(a.pad, o.pad, o.pads, 0);
    kn_by_dim(a.dilation, o.dilation, o.dilations, 1);
    if (!kn_ok() || !kn_check(x, "conv2d") || (x->ndim == 4 && !(x = dense(x))))
        return NULL;
    return kn_apply1(&kn_op_conv2d, 3, (kn_tensor *[]){ x, w, bias }, 4, &a);
}

/* ---- batch norm: outputs y, mean, rstd ------------------------------------------------------- */

typedef struct batch_attr {
    double eps, momentum;
    bool training;
} batch_attr;

static bool batch_shape(kn_op_call *c)
{
    static const char *const names[] = { "x", "weight", "bias", "running_mean", "running_var" };
    const batch_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    char dx[128], dv[128];
    kn_describe(x, dx, sizeof dx);
    if (x->ndim < 2 || !kn_dtype_is_float(x->dtype))
        return kn_fail("batch_norm: needs a float x[N,C,...], got %s", dx);
    const int64_t C = x->shape[1];
    for (int i = 1; i < 5; i++) {
        const kn_tensor *v = c->in[i];
        if (!v && i > 2 && !a->training)
            return kn_fail("batch_norm: without training %s is needed", names[i]);
        if (v && (v->ndim != 1 || v->shape[0] != C || (v->dtype != x->dtype && v->dtype != KN_F32)))
            return kn_fail("batch_norm: x is %s, %s is %s; it should be [%lld] in x's dtype or f32",
                           dx, names[i], kn_describe(v, dv, sizeof dv), (long long)C);
    }
    if (a->training && kn_numel(x) == C && C > 0)
        return kn_fail("batch_norm: x is %s, one value a channel, which has no variance to train "
                       "with; give more samples, or switch to evaluation with kn_train(m, false)",
                       dx);
    c->spec[0] = kn_spec_like(x);
    c->spec[0].order = kn_order_of(x);
    c->spec[1] = c->spec[2] =
        (kn_spec){ .dtype = x->dtype == KN_F64 ? KN_F64 : KN_F32, .ndim = 1, .shape = { C } };
    return true;
}

static bool batch_forward(kn_op_call *c)
{
    const batch_attr *a = c->attr;
    kn_batch_norm_args args = { .y = kn_array_of(c->out[0]),
                                .x = kn_array_of(c->in[0]),
                                .mean = kn_array_of(c->out[1]),
                                .rstd = kn_array_of(c->out[2]),
                                .eps = a->eps,
                                .momentum = a->momentum,
                                .training = a->training };
    kn_array *const at[] = { NULL, &args.w, &args.b, &args.running_mean, &args.running_var };
    for (int i = 1; i < 5; i++) {
        if (!c->in[i])
            continue;
        *at[i] = kn_array_of(c->in[i]);
        if (i > 2 && a->training) /* they are written */
            c->in[i]->storage->version++;
    }
    return KN_RUN(c->out[0], KN_K_BATCH_NORM, args);
}

static bool batch_backward(kn_op_grad *g)
{
    const batch_attr *a = g->attr;
    kn_tensor *dy = g->dout[0];
    if (!dy)
        return true; /* the statistics have no gradient of their own */
    dy = kn_order_of(g->in[0]) ? kn_channels_last(dy) : kn_contiguous(dy); /* fast in x's order */
    if (!dy)
        return false;
    kn_batch_norm_grad_args args = { .dy = kn_array_of(dy),
                                     .x = kn_array_of(g->in[0]),
                                     .mean = kn_array_of(g->out[1]),
                                     .rstd = kn_array_of(g->out[2]),
                                     .training = a->training };
    kn_array *const at[] = { &args.dx, &args.dw, &args.db };
    for (int i = 0; i < 3; i++) {
        if (!g->want[i])
            continue;
        g->din[i] = i == 0 ? kn_grad_as(g, 0, g->in[0]) : kn_grad_out(g, i);
        if (!g->din[i])
            return false;
        *at[i] = kn_array_of(g->din[i]);
    }
    if (g->in[1])
        args.w = kn_array_of(g->in[1]);
    return KN_RUN(dy, KN_K_BATCH_NORM_GRAD, args);
}

KN_OP(kn_op_batch_norm, .name = "batch_norm", .attr_size = sizeof(batch_attr), .save_in = 3,
      .save_out = 6, .const_in = 8 | 16, .shape = batch_shape, .forward = batch_forward,
      .backward = batch_backward);

kn_tensor *kn_batch_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, kn_tensor *running_mean,
                          kn_tensor *running_var, kn_batch_norm_options o)
{
    batch_attr a = { .eps = kn_value_or(o.eps, 1e-5),
                     .momentum = kn_value_or(o.momentum, 0.1),
                     .training = o.training };
    kn_tensor *in[] = { x, w, b, running_mean, running_var }, *out[3];
    if (!(a.eps >= 0 && a.eps < INFINITY)) {
        kn_fail("batch_norm: eps is %g, should be at least 0 (KN_ZERO for 0)", o.eps);
        return NULL;
    }
    if (!(a.momentum >= 0 && a.momentum <= 1)) {
        kn_fail("batch_norm: momentum is %g, should lie in [0, 1] (KN_ZERO for 0)", o.momentum);
        return NULL;
    }
    if (!kn_ok() || !kn_check(x, "batch_norm") ||
        !(in[0] = x->ndim == 4 ? dense(x) : kn_contiguous(x)))
        return NULL;
    return kn_apply(&kn_op_batch_norm, 5, in, 2 | 4 | 8 | 16, &a, 3, out) ? out[0] : NULL;
}
