/* autograd/ops_channel_norm.c: norms of images by channel: batch norm, group norm, instance
 * norm. */
#include "autograd/operands.h"
#include "autograd/ops.h"
#include "autograd/second.h"

/* ---- batch norm: outputs y, mean, rstd ------------------------------------------------------- */

typedef struct batch_attr {
    double eps, momentum;
    bool training, relu;
} batch_attr;

bool kn_batch_norm_shape(kn_op_call *c, bool training)
{
    static const char *const names[] = { "x", "weight", "bias", "running_mean", "running_var" };
    const kn_tensor *x = c->in[0];

    if (x->ndim < 2 || !kn_dtype_is_float(x->dtype))
        return kn_fail("batch_norm: needs a float x[N,C,...], got %s", KN_SHOWN(x));
    const int64_t C = x->shape[1];
    for (int i = 1; i < 5; i++) {
        const kn_tensor *v = c->in[i];
        if (!v && i > 2 && !training)
            return kn_fail("batch_norm: without training %s is needed", names[i]);
        if (!kn_vector_fits("batch_norm", names[i], v, C, x) ||
            (v && i > 2 && training && !kn_tensor_before_write(c->in[i], "batch_norm")))
            return false;
    }
    const kn_tensor *r = c->in[5];
    if (r && !(r->dtype == x->dtype && kn_has_shape(r, x->ndim, x->shape)))
        return kn_fail("batch_norm: x is %s, .residual is %s; they should be alike", KN_SHOWN(x),
                       KN_SHOWN(r));
    c->spec[0] = kn_spec_like(x);
    c->spec[0].order = kn_order_of(x);
    c->spec[1] = c->spec[2] =
        (kn_spec){ .dtype = kn_wide_dtype(x->dtype), .ndim = 1, .shape = { C } };
    return true;
}

static bool batch_shape(kn_op_call *c)
{
    const batch_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    if (!kn_batch_norm_shape(c, a->training))
        return false;
    return !a->training || kn_numel(x) != x->shape[1] || x->shape[1] == 0 ||
           kn_fail("batch_norm: x is %s, one value a channel, which has no variance to train with; "
                   "give more samples, or switch to evaluation with kn_train(m, false)",
                   KN_SHOWN(x));
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
                                .training = a->training,
                                .relu = a->relu };
    kn_array *const at[] = { NULL,     &args.w, &args.b, &args.running_mean, &args.running_var,
                             &args.add };
    for (int i = 1; i < 6; i++) {
        if (!c->in[i])
            continue;
        *at[i] = kn_array_of(c->in[i]);
        if ((i == 3 || i == 4) && a->training)
            kn_written(c->in[i]);
    }
    return KN_RUN(c->out[0], KN_K_BATCH_NORM, args);
}

static bool batch_backward(kn_op_grad *g)
{
    const batch_attr *a = g->attr;
    kn_tensor *dy = g->dout[0];
    if (!dy)
        return true;                   /* the statistics have no gradient of their own */
    dy = kn_in_order_of(dy, g->in[0]); /* fast in x's order */
    if (!dy)
        return false;
    kn_batch_norm_grad_args args = { .dy = kn_array_of(dy),
                                     .x = kn_array_of(g->in[0]),
                                     .y = kn_array_or_none(g->out[0]),
                                     .w = kn_array_or_none(g->in[1]),
                                     .b = kn_array_or_none(g->in[2]),
                                     .mean = kn_array_of(g->out[1]),
                                     .rstd = kn_array_of(g->out[2]),
                                     .training = a->training,
                                     .relu = a->relu };
    kn_array *const at[6] = { &args.dx, &args.dw, &args.db, [5] = &args.dadd };
    for (int i = 0; i < 6; i++) {
        if (!g->want[i])
            continue;
        kn_tensor *d = i == 0 || i == 5 ? kn_grad_as(g, i, g->in[0]) : kn_grad_out(g, i);
        if (!d)
            return false;
        *at[i] = kn_array_of(d);
    }
    return KN_RUN(dy, KN_K_BATCH_NORM_GRAD, args);
}

/* h w + b by channel, in x's dtype; w and b may be NULL. */
static kn_tensor *affine_of(kn_tensor *h, kn_tensor *w, kn_tensor *b, const kn_tensor *x)
{
    const kn_tensor *like = h;
    h = w ? kn_mul(h, kn_along(kn_cast(w, like->dtype), x->ndim, 1)) : h;
    h = h && b ? kn_add(h, kn_along(kn_cast(b, like->dtype), x->ndim, 1)) : h;
    return kn_cast(h, x->dtype);
}

static bool batch_composed(kn_op_grad *g, kn_tensor **y)
{
    const batch_attr *a = g->attr;
    kn_tensor *x = g->in[0], *h;
    int64_t dims[KN_MAX_DIMS] = { 0 };
    for (int d = 2; d < x->ndim; d++)
        dims[d - 1] = d;
    if (a->training)
        h = kn_normed(x, x->ndim - 1, dims, a->eps, false);
    else
        h = kn_mul(kn_sub(kn_cast(x, g->out[1]->dtype), kn_along(kn_detach(g->out[1]), x->ndim, 1)),
                   kn_along(kn_detach(g->out[2]), x->ndim, 1));
    kn_tensor *z = h ? affine_of(h, g->in[1], g->in[2], x) : NULL;
    z = z && g->in[5] ? kn_add(z, g->in[5]) : z;
    if (z && a->relu) /* with a residual, which wasn't saved, seen from the result */
        z = g->out[0] ? kn_where(kn_gt(g->out[0], kn_number_like(z, 0)), z, kn_number_like(z, 0))
                      : kn_relu(z);
    y[0] = z;
    return z != NULL;
}

/* Where relu gave 0 is seen from x, w and b, or with a residual from y. */
#define BATCH_NORM_OP(id, text, in, out)                                                           \
    KN_OP(id, .name = (text), .attr_size = sizeof(batch_attr), .save_in = (in), .save_out = (out), \
          .const_in = 8 | 16, .shape = batch_shape, .forward = batch_forward,                      \
          .backward = batch_backward, .on_tape = kn_composed_on_tape, .composed = batch_composed)
BATCH_NORM_OP(kn_op_batch_norm, "batch_norm", 1 | 2, 2 | 4);
BATCH_NORM_OP(kn_op_batch_norm_relu, "batch_norm_relu", 1 | 2 | 4, 2 | 4);
BATCH_NORM_OP(kn_op_batch_norm_add_relu, "batch_norm_add_relu", 1 | 2, 1 | 2 | 4);

kn_tensor *kn_batch_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, kn_tensor *running_mean,
                          kn_tensor *running_var, kn_batch_norm_options o)
{
    batch_attr a = { .momentum = kn_value_or(o.momentum, 0.1),
                     .training = o.training,
                     .relu = o.relu };
    kn_tensor *in[6] = { x, w, b, running_mean, running_var, o.residual }, *out[3];
    const kn_op *op = !o.relu       ? &kn_op_batch_norm
                      : !o.residual ? &kn_op_batch_norm_relu
                                    : &kn_op_batch_norm_add_relu;
    if (!kn_eps_of("batch_norm", o.eps, &a.eps))
        return NULL;
    if (!(a.momentum >= 0 && a.momentum <= 1))
        return kn_fail_null("batch_norm: momentum is %g, should lie in [0, 1] (KN_ZERO for 0)",
                            o.momentum);
    if (o.residual && !o.relu)
        return kn_fail_null(
            "batch_norm: .residual is for .relu, before which it is added; without it use "
            "kn_add");
    if (!kn_ok() || !kn_check(x, "batch_norm") || !(in[0] = kn_order_of(x) ? x : kn_contiguous(x)))
        return NULL;
    if (o.residual && o.residual->ndim == x->ndim && !(in[5] = kn_in_order_of(o.residual, in[0])))
        return NULL;
    if (o.sync && o.training)
        return kn_sync_batch_norm_apply(in, a.eps, a.momentum, a.relu, o.sync);
    return kn_apply(op, 6, in, 2 | 4 | 8 | 16 | 32, &a, 3, out) ? out[0] : NULL;
}

/* ---- group norm and instance norm: outputs y, mean, rstd ------------------------------------- */

/* The groups of all samples are rows, which the kernel of layer norm normalises: h. The kernel of
 * batch norm, with mean 0 and variance 1, applies weight and bias of each channel to h. Backward
 * normalises again, so only x is kept. */
typedef struct group_attr {
    double eps;
    int64_t groups;
    bool instance; /* as many groups as channels, of more than one value */
} group_attr;

static bool group_shape(kn_op_call *c)
{
    const group_attr *a = c->attr;
    const kn_tensor *x = c->in[0];

    const int64_t C = x->shape[1], N = x->shape[0];
    if (a->groups < 1 || C % a->groups)
        return kn_fail("%s: %lld groups must divide the %lld channels of x %s", c->op->name,
                       (long long)a->groups, (long long)C, KN_SHOWN(x));
    if (a->instance && N * C > 0 && kn_numel(x) == N * C)
        return kn_fail("%s: x is %s, one value a channel, which has no variance; give more "
                       "positions",
                       c->op->name, KN_SHOWN(x));
    if (!kn_vector_fits(c->op->name, "weight", c->in[1], C, x) ||
        !kn_vector_fits(c->op->name, "bias", c->in[2], C, x))
        return false;
    c->spec[0] = kn_spec_like(x);
    c->spec[1] = c->spec[2] =
        (kn_spec){ .dtype = kn_wide_dtype(x->dtype), .ndim = 1, .shape = { N * a->groups } };
    return true;
}

/* t, which is row-major, as a row for each group of each sample. */
static kn_array rows_of(const kn_tensor *t, int64_t groups)
{
    const int64_t rows = t->shape[0] * groups;
    return kn_array_make(kn_array_of(t).data, t->dtype, 2,
                         (int64_t[]){ rows, rows ? kn_numel(t) / rows : 0 });
}

static bool normalise(kn_tensor *h, const kn_tensor *x, const kn_tensor *mean,
                      const kn_tensor *rstd, const group_attr *a)
{
    return KN_RUN(h, KN_K_NORM,
                  ((kn_norm_args){ .y = rows_of(h, a->groups),
                                   .x = rows_of(x, a->groups),
                                   .mean = kn_array_of(mean),
                                   .rstd = kn_array_of(rstd),
                                   .eps = a->eps }));
}

/* Row i of t[rows, C]. */
static kn_array row_of(const kn_tensor *t, int i)
{
    return kn_array_make(kn_storage_at(t->storage, i * t->shape[1], t->dtype), t->dtype, 1,
                         &t->shape[1]);
}

/* Rows of zeros and ones, and two for a kernel to write: the statistics of h. */
static kn_tensor *statistics_of_h(const kn_tensor *x)
{
    kn_tensor *t = kn_empty(kn_wide_dtype(x->dtype), kn_device_of(x), KN_SHAPE(4, x->shape[1]));
    return t && kn_array_fill(t, row_of(t, 0), 0, 0) && kn_array_fill(t, row_of(t, 1), 1, 0) ? t
                                                                                             : NULL;
}

static bool apply_affine(kn_op_call *c, const kn_tensor *h, const kn_tensor *stats)
{
    kn_batch_norm_args args = { .y = kn_array_of(c->out[0]),
                                .x = kn_array_of(h),
                                .mean = row_of(stats, 2),
                                .rstd = row_of(stats, 3),
                                .running_mean = row_of(stats, 0),
                                .running_var = row_of(stats, 1),
                                .w = kn_array_or_none(c->in[1]),
                                .b = kn_array_or_none(c->in[2]) };
    return KN_RUN(h, KN_K_BATCH_NORM, args);
}

static bool group_forward(kn_op_call *c)
{
    const kn_tensor *x = c->in[0];
    if (!c->in[1] && !c->in[2])
        return normalise(c->out[0], x, c->out[1], c->out[2], c->attr);
    kn_tensor *h = kn_empty_like(x), *stats = statistics_of_h(x);
    return h && stats && normalise(h, x, c->out[1], c->out[2], c->attr) &&
           apply_affine(c, h, stats);
}

/* The gradients of weight and bias, and dh, that of h. h may be unset where weight's isn't
 * wanted. */
static bool affine_backward(kn_op_grad *g, const kn_tensor *dy, const kn_tensor *h,
                            const kn_tensor *dh)
{
    kn_tensor *stats = statistics_of_h(dy);
    if (!stats)
        return false;
    kn_batch_norm_grad_args args = { .dy = kn_array_of(dy),
                                     .x = kn_array_of(h ? h : g->in[0]),
                                     .mean = row_of(stats, 0),
                                     .rstd = row_of(stats, 1),
                                     .w = kn_array_or_none(g->in[1]),
                                     .dx = kn_array_or_none(dh),
                                     .dw = kn_array_or_none(g->din[1]),
                                     .db = kn_array_or_none(g->din[2]) };
    return KN_RUN(dy, KN_K_BATCH_NORM_GRAD, args);
}

static bool rows_backward(kn_op_grad *g, const kn_tensor *dh)
{
    const group_attr *a = g->attr;
    return KN_RUN(dh, KN_K_NORM_GRAD,
                  ((kn_norm_grad_args){ .dx = rows_of(g->din[0], a->groups),
                                        .dy = rows_of(dh, a->groups),
                                        .x = rows_of(g->in[0], a->groups),
                                        .mean = kn_array_of(g->out[1]),
                                        .rstd = kn_array_of(g->out[2]) }));
}

/* h as forward had it. */
static kn_tensor *h_again(const kn_op_grad *g)
{
    kn_tensor *h = kn_empty_like(g->in[0]), *mean = kn_empty_like(g->out[1]),
              *rstd = kn_empty_like(g->out[1]);
    return h && mean && rstd && normalise(h, g->in[0], mean, rstd, g->attr) ? h : NULL;
}

static bool group_backward(kn_op_grad *g)
{
    kn_tensor *dy = g->dout[0] ? kn_contiguous(g->dout[0]) : NULL;
    if (!dy)
        return !g->dout[0]; /* the statistics have no gradient of their own */
    const kn_tensor *x = g->in[0];
    for (int i = 0; i < 3; i++)
        if (g->want[i] && !kn_grad_out(g, i))
            return false;
    const bool through = g->want[0] && g->in[1]; /* dh isn't dy */
    kn_tensor *h = g->want[1] ? h_again(g) : NULL;
    kn_tensor *dh = through ? kn_empty_like(x) : NULL;
    return kn_ok() && (!(dh || g->want[1] || g->want[2]) || affine_backward(g, dy, h, dh)) &&
           (!g->want[0] || rows_backward(g, dh ? dh : dy));
}

static bool group_composed(kn_op_grad *g, kn_tensor **y)
{
    const group_attr *a = g->attr;
    kn_tensor *x = g->in[0];
    int64_t size = a->groups > 0 ? x->shape[1] / a->groups : 0;
    for (int d = 2; d < x->ndim; d++)
        size *= x->shape[d];
    kn_tensor *rows = kn_reshape(x, KN_SHAPE(x->shape[0], a->groups, size));
    kn_tensor *h = rows ? kn_normed(rows, KN_SHAPE(-1), a->eps, false) : NULL;
    h = kn_reshape(h, x->ndim, x->shape);
    y[0] = h ? affine_of(h, g->in[1], g->in[2], x) : NULL;
    return y[0] != NULL;
}

KN_OP(kn_op_group_norm, .name = "group_norm", .makes = true, .attr_size = sizeof(group_attr),
      .save_in = 3, .save_out = 6, .shape = group_shape, .forward = group_forward,
      .backward = group_backward, .on_tape = kn_composed_on_tape, .composed = group_composed);
KN_OP(kn_op_instance_norm, .name = "instance_norm", .makes = true, .attr_size = sizeof(group_attr),
      .save_in = 3, .save_out = 6, .shape = group_shape, .forward = group_forward,
      .backward = group_backward, .on_tape = kn_composed_on_tape, .composed = group_composed);

static kn_tensor *norm_groups(const kn_op *op, kn_tensor *x, group_attr a, kn_tensor *w,
                              kn_tensor *b, double eps)
{
    kn_tensor *out[3];
    if (!kn_eps_of(op->name, eps, &a.eps) || !kn_ok() || !kn_check(x, op->name) ||
        (w && !kn_check(w, op->name)) || (b && !kn_check(b, op->name)))
        return NULL;
    const int least = a.instance ? 3 : 2;
    if (x->ndim < least || !kn_dtype_is_float(x->dtype)) {
        KN_OPERANDS(x, w, b);
        return kn_fail_null("%s: needs a float x[N,C,...] of at least %d dims, got %s", op->name,
                            least, KN_SHOWN(x));
    }
    if (a.instance)
        a.groups = x->shape[1] ? x->shape[1] : 1;
    const bool last = kn_order_of(x) != NULL;
    if (!(x = kn_contiguous(x)) || !kn_apply(op, 3, (kn_tensor *[]){ x, w, b }, 2 | 4, &a, 3, out))
        return NULL;
    return last ? kn_channels_last(out[0]) : out[0];
}

kn_tensor *kn_group_norm_(kn_tensor *x, int64_t groups, kn_tensor *w, kn_tensor *b, double eps)
{
    return norm_groups(&kn_op_group_norm, x, (group_attr){ .groups = groups }, w, b, eps);
}

/* running moves to what the channels of x's samples have, n[N,C], averaged. */
static bool move_to(kn_tensor *running, kn_tensor *n, double momentum)
{
    kn_tensor *now = running && n ? kn_cast(kn_mean(n, KN_SHAPE(0), false), running->dtype) : NULL;
    return !running || (now && kn_copy_(running, kn_lerp(running, now, momentum)));
}

static bool move_running(kn_tensor *x, const kn_instance_norm_options *o, double momentum)
{
    const bool mode = kn_set_grad_mode(false);
    kn_scope s = kn_scope_begin();
    int64_t places[KN_MAX_DIMS];
    for (int d = 2; d < x->ndim; d++)
        places[d - 2] = d;
    kn_tensor *wide = kn_cast(x, kn_wide_dtype(x->dtype));
    const bool ok = move_to(o->running_mean, kn_mean(wide, x->ndim - 2, places, false), momentum) &&
                    move_to(o->running_var, kn_var(wide, x->ndim - 2, places), momentum);
    kn_scope_end(s);
    kn_set_grad_mode(mode);
    return ok && kn_ok();
}

static bool running_fit(const kn_tensor *x, const kn_instance_norm_options *o, double momentum)
{
    const char *op = "instance_norm";
    const kn_tensor *mean = o->running_mean, *var = o->running_var;
    if ((mean && !kn_check(mean, op)) || (var && !kn_check(var, op)))
        return false;
    if (x->ndim > 1 && (!kn_vector_fits(op, ".running_mean", mean, x->shape[1], x) ||
                        !kn_vector_fits(op, ".running_var", var, x->shape[1], x)))
        return false;
    return (momentum >= 0 && momentum <= 1) ||
           kn_fail("instance_norm: .momentum is %g, should lie in [0, 1] (KN_ZERO for 0)",
                   o->momentum);
}

kn_tensor *kn_instance_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, double eps,
                             kn_instance_norm_options o)
{
    const double momentum = kn_value_or(o.momentum, 0.1);
    if (!kn_ok() || !kn_check(x, "instance_norm") || !running_fit(x, &o, momentum))
        return NULL;
    if (o.use_running)
        return kn_batch_norm(x, w, b, o.running_mean, o.running_var, .eps = eps);
    kn_tensor *y =
        norm_groups(&kn_op_instance_norm, x, (group_attr){ .instance = true }, w, b, eps);
    const bool moves = o.running_mean || o.running_var;
    return y && (!moves || move_running(x, &o, momentum)) ? y : NULL;
}
