/* autograd/ops_where.c: one of two elements by a condition. */
#include "autograd/ops.h"

static bool where_shape(kn_op_call *c)
{
    const kn_tensor *k = c->in[0], *a = c->in[1], *b = c->in[2];
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(a);
    if (k->dtype == KN_BOOL && a->dtype == b->dtype &&
        kn_broadcast_shape(a->ndim, a->shape, b->ndim, b->shape, &s->ndim, s->shape) &&
        kn_broadcast_shape(s->ndim, s->shape, k->ndim, k->shape, &s->ndim, s->shape)) {
        s->order = kn_order_of_both(s, a, b);
        return true;
    }
    return kn_fail(
        "where: needs a bool condition, two tensors of one dtype, and shapes that broadcast; got "
        "%s, %s, %s",
        KN_SHOWN(k), KN_SHOWN(a), KN_SHOWN(b));
}

static bool where_forward(kn_op_call *c)
{
    kn_array y = kn_array_of(c->out[0]), in[3];
    for (int i = 0; i < 3; i++)
        in[i] = kn_array_expand(kn_array_of(c->in[i]), y.ndim, y.shape);
    return KN_RUN(c->out[0], KN_K_WHERE, ((kn_where_args){ y, in[0], in[1], in[2] }));
}

static bool where_backward(kn_op_grad *g)
{
    kn_tensor *dy = g->dout[0], *zero = kn_number_like(dy, 0);
    for (int i = 1; i < 3; i++)
        if (g->want[i])
            g->din[i] = kn_grad_unbroadcast(
                g, i, kn_where(g->in[0], i == 1 ? dy : zero, i == 1 ? zero : dy));
    return kn_ok();
}

KN_OP(kn_op_where, .name = "where", .save_in = 1, .const_in = 1, .shape = where_shape,
      .forward = where_forward, .backward = where_backward, .on_tape = where_backward);

kn_tensor *kn_where(kn_tensor *cond, kn_tensor *a, kn_tensor *b)
{
    return kn_apply1(&kn_op_where, 3, (kn_tensor *[]){ cond, a, b }, 0, NULL);
}
