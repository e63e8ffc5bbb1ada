/* autograd/ops_nn.c: softmax, cross-entropy, dropout. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <math.h>

static bool need_float(const kn_op_call *c, int i, int min_ndim)
{
    const kn_tensor *x = c->in[i];
    return (kn_dtype_is_float(x->dtype) && x->ndim >= min_ndim) ||
           kn_fail("%s: needs a float tensor with at least %d dim(s), got %s", c->op->name,
                   min_ndim, KN_SHOWN(x));
}

/* ---- softmax over the last dim --------------------------------------------------------------- */

static bool softmax_shape(kn_op_call *c)
{
    c->spec[0] = kn_spec_like(c->in[0]);
    return need_float(c, 0, 1);
}

static bool softmax_forward(kn_op_call *c)
{
    const bool log = *(const bool *)c->attr;
    return KN_RUN(c->out[0], KN_K_SOFTMAX,
                  ((kn_softmax_args){ kn_array_of(c->out[0]), kn_array_of(c->in[0]), log }));
}

static bool softmax_backward(kn_op_grad *g)
{
    const bool log = *(const bool *)g->attr;
    kn_tensor *dx = kn_empty_like(g->dout[0]), *dy = g->dout[0];
    if (dy->stride[dy->ndim - 1] > 1) /* rows are faster where their elements are neighbours */
        dy = kn_contiguous(dy);
    g->din[0] = dx;
    return dx && dy &&
           KN_RUN(dx, KN_K_SOFTMAX_GRAD,
                  ((kn_softmax_grad_args){ kn_array_of(dx), kn_array_of(dy), kn_array_of(g->out[0]),
                                           log }));
}

/* dx = y (dy - sum dy y), or of the logarithm dy - e^y sum dy */
static bool softmax_on_tape(kn_op_grad *g)
{
    const bool log = *(const bool *)g->attr;
    kn_tensor *dy = g->dout[0], *y = g->out[0];
    kn_tensor *all = kn_sum(log ? dy : kn_mul(dy, y), KN_SHAPE(-1), true);
    g->din[0] = log ? kn_sub(dy, kn_mul(kn_exp(y), all)) : kn_mul(y, kn_sub(dy, all));
    return g->din[0] != NULL;
}

#define SOFTMAX_OP(id, the_name)                                                                   \
    KN_OP(id, .name = the_name, .attr_size = sizeof(bool), .save_out = 1, .shape = softmax_shape,  \
          .forward = softmax_forward, .backward = softmax_backward, .on_tape = softmax_on_tape)
SOFTMAX_OP(kn_op_softmax, "softmax");
SOFTMAX_OP(kn_op_log_softmax, "log_softmax");

/* Along another dim: x's memory is brought in the order that has it last, y is a view. */
static kn_tensor *softmax(const kn_op *op, kn_tensor *x, int dim)
{
    const bool log = op == &kn_op_log_softmax;
    if (kn_is_number(x))
        return kn_number_of(softmax(op, kn_row_of(x), dim));
    dim = kn_dim(op->name, x, dim);
    if (dim < 0 || dim == x->ndim - 1)
        return dim < 0 ? NULL : kn_apply1(op, 1, &x, 0, &log);
    kn_scope s = kn_scope_begin();
    kn_tensor *last = kn_contiguous(kn_transpose(x, dim, -1));
    return kn_scope_result(s, kn_transpose(kn_apply1(op, 1, &last, 0, &log), dim, -1));
}

kn_tensor *kn_softmax_(kn_tensor *x, int dim)
{
    return softmax(&kn_op_softmax, x, dim);
}

kn_tensor *kn_log_softmax_(kn_tensor *x, int dim)
{
    return softmax(&kn_op_log_softmax, x, dim);
}

/* ---- cross-entropy: outputs loss, count, lse ------------------------------------------------- */

typedef struct ce_attr {
    int64_t ignore_index;
    double smoothing;
} ce_attr;

static bool ce_shape(kn_op_call *c)
{
    const ce_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *t = c->in[1];
    if (!need_float(c, 0, 1))
        return false;
    bool match = kn_has_shape(t, x->ndim - 1, x->shape);
    if (!match || (t->dtype != KN_I64 && t->dtype != KN_I32))
        return kn_fail("cross_entropy: logits %s need i64 or i32 targets of the same shape without "
                       "the last dim, "
                       "got %s",
                       KN_SHOWN(x), KN_SHOWN(t));
    if (x->shape[t->ndim] == 0 && kn_numel(t) > 0)
        return kn_fail("cross_entropy: logits %s have no classes in their last dim", KN_SHOWN(x));
    if (!(a->smoothing >= 0 && a->smoothing < 1))
        return kn_fail("cross_entropy: smoothing is %g, should lie in [0, 1)", a->smoothing);
    c->spec[0] = c->spec[1] = (kn_spec){ .dtype = kn_wide_dtype(x->dtype) };
    c->spec[2] = (kn_spec){ .dtype = kn_wide_dtype(x->dtype), .ndim = 1, .shape = { kn_numel(t) } };
    return true;
}

static bool ce_forward(kn_op_call *c)
{
    const ce_attr *a = c->attr;
    kn_cross_entropy_args args = { .loss = kn_array_of(c->out[0]),
                                   .count = kn_array_of(c->out[1]),
                                   .lse = kn_array_of(c->out[2]),
                                   .logits = kn_rows_of(c->in[0]),
                                   .targets = kn_flat(c->in[1]),
                                   .ignore_index = a->ignore_index,
                                   .smoothing = a->smoothing };
    return KN_RUN(c->out[0], KN_K_CROSS_ENTROPY, args);
}

static bool ce_backward(kn_op_grad *g)
{
    const ce_attr *a = g->attr;
    if (!g->dout[0])
        return true; /* only count or lse were used: they have no gradient */
    kn_tensor *dx = kn_empty_like(g->in[0]);
    if (!dx)
        return false;
    g->din[0] = dx;
    kn_cross_entropy_grad_args args = { kn_rows_of(dx),         kn_rows_of(g->in[0]),
                                        kn_flat(g->in[1]),      kn_array_of(g->out[2]),
                                        kn_array_of(g->out[1]), kn_array_of(g->dout[0]),
                                        a->ignore_index,        a->smoothing };
    return KN_RUN(dx, KN_K_CROSS_ENTROPY_GRAD, args);
}

/* The mean over counted rows of -(1 - s) log p of the target and -s times the mean log p. */
static bool ce_composed(kn_op_grad *g, kn_tensor **y)
{
    const ce_attr *a = g->attr;
    kn_tensor *x = g->in[0], *t = g->in[1];
    kn_tensor *log_p = kn_log_softmax(kn_wide(x));
    kn_tensor *counts = kn_ne(t, kn_number_like(t, (double)a->ignore_index));
    kn_tensor *target = kn_where(counts, t, kn_number_like(t, 0));
    kn_tensor *row = kn_squeeze(kn_gather(log_p, -1, kn_unsqueeze(target, -1)), KN_SHAPE(-1));
    if (a->smoothing > 0)
        row = kn_lerp(row, kn_mean(log_p, KN_SHAPE(-1), false), a->smoothing);
    kn_tensor *sum = kn_sum(kn_where(counts, row, kn_number_like(row, 0)), 0, NULL, false);
    y[0] = kn_neg(kn_div(sum, g->out[1]));
    return y[0] != NULL;
}

KN_OP(kn_op_cross_entropy, .name = "cross_entropy", .attr_size = sizeof(ce_attr), .save_in = 3,
      .save_out = 6, .const_in = 2, .shape = ce_shape, .forward = ce_forward,
      .backward = ce_backward, .on_tape = kn_composed_on_tape, .composed = ce_composed);

bool kn_fused_cross_entropy(kn_tensor *logits, kn_tensor *targets, int64_t ignore_index,
                            double smoothing, kn_tensor *out[3])
{
    ce_attr a = { ignore_index, smoothing };
    logits = kn_contiguous(logits);
    targets = kn_contiguous(targets);
    return kn_apply(&kn_op_cross_entropy, 2, (kn_tensor *[]){ logits, targets }, 0, &a, 3, out);
}

/* ---- dropout: the backward draws the same numbers again -------------------------------------- */

typedef struct dropout_attr {
    double p;
    uint64_t seed, stream;
} dropout_attr;

static bool dropout_shape(kn_op_call *c)
{
    return kn_shape_of_input(c) && need_float(c, 0, 0);
}

static bool drop(kn_tensor *y, kn_tensor *x, const void *attr, bool back)
{
    bool ok;
    const dropout_attr *a = attr;
    (void)back;
    const uint64_t *place = kn_seed_place(kn_device_of(y), a->seed, &ok);
    return ok && KN_RUN(y, KN_K_DROPOUT,
                        ((kn_dropout_args){ kn_array_of(y), kn_array_of(x), a->p, a->seed,
                                            a->stream, place }));
}

KN_OP(kn_op_dropout, .name = "dropout", .attr_size = sizeof(dropout_attr), .shape = dropout_shape,
      KN_MAP(drop), .on_tape = kn_linear_on_tape);

kn_tensor *kn_dropout_(kn_tensor *x, double p)
{
    if (!(p >= 0 && p <= 1))
        return kn_fail_null("dropout: p is %g, should lie in [0, 1]", p);
    if (p == 0)
        return x;
    if (p == 1)
        return kn_scale(x, 0);
    dropout_attr a = { p, kn_draw_seed(), kn_draw_stream() };
    return kn_apply1(&kn_op_dropout, 1, &x, 0, &a);
}
