/* autograd/ops_recurrent.c: one direction of a recurrent layer, whole. The inputs of all steps go
 * through one product with w_ih, into the place of the gates; a kernel runs the steps; backward
 * runs them again the other way, and makes each weight's gradient by one product over all steps. */
#include "autograd/ops.h"
#include "autograd/sequences.h"
#include <stdio.h>

enum { X, W_IH, W_HH, B_IH, B_HH, H0, C0, LENGTHS, INPUTS };
enum { Y, HN, CN, GATES, KEPT, OUTPUTS };

typedef struct recurrent_attr {
    kn_cell cell;
    bool reverse;
} recurrent_attr;

static bool has_form(const kn_op_call *c, int i, const char *what, int ndim, int64_t a, int64_t b)
{
    const kn_tensor *t = c->in[i], *x = c->in[X];
    char size[32];
    snprintf(size, sizeof size, ndim > 1 ? ",%lld" : "", (long long)b);
    return !t || (t->dtype == x->dtype && kn_has_shape(t, ndim, (int64_t[]){ a, b })) ||
           kn_fail("%s: %s is %s; with x %s it should be %s[%lld%s]", c->op->name, what,
                   KN_SHOWN(t), KN_SHOWN(x), kn_dtype_name(x->dtype), (long long)a, size);
}

static bool recurrent_shape(kn_op_call *c)
{
    const recurrent_attr *r = c->attr;
    const kn_tensor *x = c->in[X], *w = c->in[W_HH], *lengths = c->in[LENGTHS];
    if (x->ndim != 3 || !kn_dtype_is_float(x->dtype) || x->shape[0] < 1 || w->ndim != 2)
        return kn_fail("%s: needs floats x[T,N,in] of at least one step and weight_hh[G,H], got %s "
                       "and %s",
                       c->op->name, KN_SHOWN(x), KN_SHOWN(w));
    const int64_t T = x->shape[0], N = x->shape[1], H = w->shape[1];
    const int64_t G = H * kn_cell_gates(r->cell);
    if (!has_form(c, W_IH, "weight_ih", 2, G, x->shape[2]) ||
        !has_form(c, W_HH, "weight_hh", 2, G, H) || !has_form(c, B_IH, "bias_ih", 1, G, 0) ||
        !has_form(c, B_HH, "bias_hh", 1, G, 0) || !has_form(c, H0, "h_0", 2, N, H) ||
        !has_form(c, C0, "c_0", 2, N, H))
        return false;
    if (lengths && (lengths->dtype != KN_I64 || !kn_has_shape(lengths, 1, &N)))
        return kn_fail("%s: lengths are %s; with x %s they should be i64[%lld]", c->op->name,
                       KN_SHOWN(lengths), KN_SHOWN(x), (long long)N);
    const bool lstm = r->cell == KN_CELL_LSTM, keeps = lstm || r->cell == KN_CELL_GRU;
    c->spec[Y] = (kn_spec){ .dtype = x->dtype, .ndim = 3, .shape = { T, N, H } };
    c->spec[HN] = (kn_spec){ .dtype = x->dtype, .ndim = 2, .shape = { N, H } };
    c->spec[CN] = (kn_spec){ .dtype = x->dtype, .ndim = 2, .shape = { lstm ? N : 0, H } };
    c->spec[GATES] = (kn_spec){ .dtype = x->dtype, .ndim = 3, .shape = { T, N, G } };
    c->spec[KEPT] =
        (kn_spec){ .dtype = kn_wide_dtype(x->dtype), .ndim = 3, .shape = { keeps ? T : 0, N, H } };
    return true;
}

/* t's array, or the absent one where the cell has no such array. */
static kn_array if_there(bool there, const kn_tensor *t)
{
    return kn_array_or_none(there ? t : NULL);
}

static bool recurrent_forward(kn_op_call *c)
{
    const recurrent_attr *r = c->attr;
    kn_tensor *gates = c->out[GATES], *h = c->out[HN];
    const bool lstm = r->cell == KN_CELL_LSTM, keeps = lstm || r->cell == KN_CELL_GRU;
    kn_tensor *work =
        kn_empty(kn_wide_dtype(gates->dtype), kn_device_of(gates), 2, gates->shape + 1);
    const kn_matmul_args inputs = { .dst = kn_rows_of(gates),
                                    .a = kn_rows_of(c->in[X]),
                                    .b = kn_transposed(kn_array_of(c->in[W_IH])),
                                    .bias = kn_array_or_none(c->in[B_IH]) };
    if (!work || !KN_RUN(gates, KN_K_MATMUL, inputs) ||
        !(c->in[H0] ? kn_array_copy(h, kn_array_of(h), kn_array_of(c->in[H0]))
                    : kn_array_fill(h, kn_array_of(h), 0, 0)))
        return false;
    return KN_RUN(h, KN_K_RECURRENT,
                  ((kn_recurrent_args){ .y = kn_array_of(c->out[Y]),
                                        .gates = kn_array_of(gates),
                                        .kept = if_there(keeps, c->out[KEPT]),
                                        .h = kn_array_of(h),
                                        .c0 = if_there(lstm, c->in[C0]),
                                        .cn = if_there(lstm, c->out[CN]),
                                        .w = kn_array_of(c->in[W_HH]),
                                        .bias = kn_array_or_none(c->in[B_HH]),
                                        .lengths = kn_array_or_none(c->in[LENGTHS]),
                                        .work = kn_array_of(work),
                                        .cell = r->cell,
                                        .reverse = r->reverse }));
}

/* ---- backward -------------------------------------------------------------------------------- */

/* A state's gradient, of the last one, in the wide dtype; zeros where none came. */
static kn_tensor *state_grad(const kn_op_grad *g, int i)
{
    const kn_spec *s = &g->out_spec[HN];
    kn_tensor *d = kn_empty(kn_wide_dtype(s->dtype), kn_device_of(g->in[W_HH]), 2, s->shape);
    if (!d)
        return NULL;
    const bool ok = g->dout[i] ? kn_array_copy(d, kn_array_of(d), kn_array_of(g->dout[i]))
                               : kn_array_fill(d, kn_array_of(d), 0, 0);
    return ok ? d : NULL;
}

/* din[i] = d, the gradient of the first state, in the inputs' dtype. */
static bool give_state(kn_op_grad *g, int i, kn_tensor *d)
{
    if (!g->want[i])
        return true;
    g->din[i] = d->dtype == g->in_spec[i].dtype ? d : kn_grad_out(g, i);
    return g->din[i] == d ||
           (g->din[i] && kn_array_copy(d, kn_array_of(g->din[i]), kn_array_of(d)));
}

/* Steps [first, first + n) of t[T,N,...] as rows. */
static kn_array steps_of(const kn_tensor *t, int64_t first, int64_t n)
{
    kn_array a = kn_part(t, 0, first, n);
    return kn_array_make(a.data, a.dtype, 2, (int64_t[]){ n * a.shape[1], a.shape[2] });
}

/* dW_hh = sum over steps of dq^T h before: y of the step before, and h_0 at the first. */
static bool hidden_weight_grad(kn_op_grad *g, const kn_tensor *dq, const kn_tensor *first)
{
    const recurrent_attr *r = g->attr;
    const int64_t T = g->out_spec[Y].shape[0];
    kn_tensor *dw = kn_grad_out(g, W_HH);
    if (!dw)
        return false;
    kn_matmul_args p = { .dst = kn_array_of(dw),
                         .a = kn_transposed(kn_array_of(first)),
                         .b = kn_array_or_none(g->in[H0]),
                         .add = true };
    return kn_product(dw, p.dst, kn_transposed(steps_of(dq, r->reverse ? 0 : 1, T - 1)),
                      steps_of(g->out[Y], r->reverse ? 1 : 0, T - 1)) &&
           (!g->in[H0] || KN_RUN(dw, KN_K_MATMUL, p));
}

static bool input_grads(kn_op_grad *g, kn_array d)
{
    kn_tensor *dx = g->want[X] ? kn_grad_out(g, X) : NULL;
    if (g->want[X] && !(dx && kn_product(dx, kn_rows_of(dx), d, kn_array_of(g->in[W_IH]))))
        return false;
    kn_tensor *dw = g->want[W_IH] ? kn_grad_out(g, W_IH) : NULL;
    return !g->want[W_IH] ||
           (dw && kn_product(dw, kn_array_of(dw), kn_transposed(d), kn_rows_of(g->in[X])));
}

static bool recurrent_backward(kn_op_grad *g)
{
    const recurrent_attr *r = g->attr;
    kn_tensor *gates = g->out[GATES];
    const bool lstm = r->cell == KN_CELL_LSTM, gru = r->cell == KN_CELL_GRU;
    kn_tensor *dy = g->dout[Y] ? kn_contiguous(g->dout[Y]) : NULL;
    kn_tensor *dp = kn_empty_like(gates), *dq = gru ? kn_empty_like(gates) : dp;
    kn_tensor *dh = state_grad(g, HN), *dc = lstm ? state_grad(g, CN) : NULL;
    kn_tensor *first = kn_empty(gates->dtype, kn_device_of(gates), 2, gates->shape + 1);
    if (!kn_ok() || !KN_RUN(dp, KN_K_RECURRENT_GRAD,
                            ((kn_recurrent_grad_args){ .dgates = kn_array_of(dp),
                                                       .dq = if_there(gru, dq),
                                                       .dh = kn_array_of(dh),
                                                       .dc = kn_array_or_none(dc),
                                                       .work = kn_array_of(first),
                                                       .dy = kn_array_or_none(dy),
                                                       .y = kn_array_of(g->out[Y]),
                                                       .gates = kn_array_of(gates),
                                                       .kept = if_there(lstm || gru, g->out[KEPT]),
                                                       .h0 = kn_array_or_none(g->in[H0]),
                                                       .c0 = if_there(lstm, g->in[C0]),
                                                       .w = kn_array_of(g->in[W_HH]),
                                                       .lengths = kn_array_or_none(g->in[LENGTHS]),
                                                       .cell = r->cell,
                                                       .reverse = r->reverse })))
        return false;
    return input_grads(g, kn_rows_of(dp)) && (!g->want[W_HH] || hidden_weight_grad(g, dq, first)) &&
           (!g->want[B_IH] || kn_grad_bias(g, B_IH, kn_rows_of(dp))) &&
           (!g->want[B_HH] || kn_grad_bias(g, B_HH, kn_rows_of(dq))) && give_state(g, H0, dh) &&
           (!lstm || give_state(g, C0, dc));
}

#define RECURRENT_OP(the_name)                                                                     \
    {                                                                                              \
        .name = the_name, .attr_size = sizeof(recurrent_attr),                                     \
        .save_in = 1 << X | 1 << W_IH | 1 << W_HH | 1 << H0 | 1 << C0 | 1 << LENGTHS,              \
        .save_out = 1 << Y | 1 << GATES | 1 << KEPT, .const_in = 1 << LENGTHS, .makes = true,      \
        .shape = recurrent_shape, .forward = recurrent_forward, .backward = recurrent_backward     \
    }
KN_OPS(kn_op_recurrent, RECURRENT_OP("lstm"), RECURRENT_OP("gru"), RECURRENT_OP("rnn"));

kn_tensor *kn_recurrent_(kn_tensor *x, kn_tensor *w_ih, kn_tensor *w_hh, kn_recurrent_options o)
{
    const recurrent_attr r = { o.cell, o.reverse };
    kn_tensor *in[INPUTS] = { x, w_ih, w_hh, o.b_ih, o.b_hh, o.h0, o.c0, o.lengths };
    kn_tensor *out[OUTPUTS] = { 0 };
    if (o.cell < KN_CELL_LSTM || o.cell > KN_CELL_RELU || (o.c0 && o.cell != KN_CELL_LSTM))
        return kn_fail_null("recurrent: .cell is %d%s; it is one of KN_CELL_LSTM, KN_CELL_GRU, "
                            "KN_CELL_TANH, KN_CELL_RELU, of which LSTM alone takes .c0",
                            (int)o.cell, o.c0 ? ", with .c0" : "");
    const kn_op *op = &kn_op_recurrent[o.cell < KN_CELL_TANH ? o.cell : KN_CELL_TANH];
    kn_scope s = kn_scope_begin(); /* the gates live as long as backward needs them */
    for (int i = 0; i < INPUTS && kn_ok(); i++)
        in[i] = in[i] && kn_check(in[i], op->name) ? kn_contiguous(in[i]) : NULL;
    kn_apply(op, INPUTS, in, ~(1u << X | 1u << W_IH | 1u << W_HH), &r, OUTPUTS, out);
    kn_scope_end_except(s, out, 3);
    for (int i = 0; o.last && i < (o.cell == KN_CELL_LSTM ? 2 : 1); i++)
        o.last[i] = kn_ok() ? out[HN + i] : NULL;
    return kn_ok() ? out[Y] : NULL;
}
