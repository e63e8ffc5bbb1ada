/* autograd/ops_layout.c: the same values in another dtype, another order of memory, on another
 * device. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include "kernels/kernels_internal.h"

static const int channels_last[4] = { 0, 2, 3, 1 };

bool kn_is_channels_last(const kn_tensor *t)
{
    if (!kn_check(t, "is_channels_last") || t->ndim != 4)
        return false;
    kn_array a = { .dtype = t->dtype, .ndim = 4 };
    for (int d = 0; d < 4; d++) {
        a.shape[d] = t->shape[channels_last[d]];
        a.stride[d] = t->stride[channels_last[d]];
    }
    return kn_array_contiguous(&a);
}

/* An image of one channel or one position is in both orders, and counts as row-major. */
const int *kn_order_of(const kn_tensor *t)
{
    return t->ndim == 4 && kn_is_channels_last(t) && !kn_is_contiguous(t) ? channels_last : NULL;
}

kn_tensor *kn_empty_as(const kn_tensor *t)
{
    return kn_tensor_new(t->dtype, kn_device_of(t), NULL, KN_MEM_ACTIVATION, t->ndim, t->shape,
                         kn_order_of(t), true);
}

/* A leaf's place is row-major; a gradient in another order is copied or added to it later. */
static kn_tensor *grad_in(kn_op_grad *g, int i, kn_device device, const int *order)
{
    const kn_spec *s = &g->in_spec[i];
    if (g->node->edge[i].leaf && !order)
        return kn_grad_out(g, i);
    return g->din[i] = kn_tensor_new(s->dtype, device, NULL, KN_MEM_ACTIVATION, s->ndim, s->shape,
                                     order, true);
}

kn_tensor *kn_grad_as(kn_op_grad *g, int i, const kn_tensor *like)
{
    return grad_in(g, i, kn_device_of(like), kn_order_of(like));
}

kn_tensor *kn_grad_in_order(kn_op_grad *g, int i)
{
    return grad_in(g, i, g->in_spec[i].device, g->in_spec[i].order);
}

kn_tensor *kn_in_order_of(kn_tensor *t, const kn_tensor *like)
{
    return kn_order_of(like) ? kn_channels_last(t) : kn_contiguous(t);
}

/* ---- cast and copy: y = x in another dtype or order ------------------------------------------ */

typedef enum order { KEEP, ROW_MAJOR, CHANNELS_LAST } order;

typedef struct cast_attr {
    kn_dtype dtype;
    order order;
} cast_attr;

static bool cast_shape(kn_op_call *c)
{
    const cast_attr *a = c->attr;
    c->spec[0] = kn_spec_like(c->in[0]);
    c->spec[0].dtype = a->dtype;
    if (a->order != ROW_MAJOR)
        c->spec[0].order = a->order == KEEP ? kn_order_of(c->in[0]) : channels_last;
    if (kn_dtype_size(a->dtype) == 0)
        return kn_fail("cast: unknown dtype %d", (int)a->dtype);
    return true;
}

static bool cast_forward(kn_op_call *c)
{
    return kn_grad_copy(c->out[0], c->in[0]);
}

static bool cast_backward(kn_op_grad *g)
{
    kn_tensor *dx = kn_grad_as(g, 0, g->dout[0]);
    return dx && kn_grad_copy(dx, g->dout[0]);
}

KN_OP(kn_op_cast, .name = "cast", .attr_size = sizeof(cast_attr), .shape = cast_shape,
      .forward = cast_forward, .backward = cast_backward, .on_tape = kn_linear_on_tape);

static kn_tensor *cast(kn_tensor *x, kn_dtype dtype, order o)
{
    return kn_apply1(&kn_op_cast, 1, &x, 0, &(cast_attr){ dtype, o });
}

kn_tensor *kn_cast(kn_tensor *x, kn_dtype dtype)
{
    if (x && kn_ok() && kn_check(x, "cast") && x->dtype == dtype)
        return x;
    return cast(x, dtype, KEEP);
}

kn_tensor *kn_contiguous(kn_tensor *x)
{
    if (x && kn_ok() && kn_check(x, "contiguous") && kn_is_contiguous(x))
        return x;
    return cast(x, x ? x->dtype : KN_F32, ROW_MAJOR);
}

kn_tensor *kn_channels_last(kn_tensor *x)
{
    if (!kn_ok() || !kn_check(x, "channels_last"))
        return NULL;
    if (x->ndim != 4)
        return kn_fail_null("channels_last: needs an image [N,C,H,W], got %s", KN_SHOWN(x));
    return kn_is_channels_last(x) ? x : cast(x, x->dtype, CHANNELS_LAST);
}

/* ---- to device: y = x, there ----------------------------------------------------------------- */

static bool to_device_shape(kn_op_call *c)
{
    const kn_tensor *x = c->in[0];
    kn_device to = *(const kn_device *)c->attr, from = kn_device_of(x);
    c->spec[0] = kn_spec_like(x);
    c->spec[0].device = to;
    c->spec[0].order = kn_order_of(x);
    return (to != KN_META && from != KN_META) ||
           kn_fail(
               "to_device: %s is to go from %s to %s, but tensors on meta have no values; make it "
               "where it is needed",
               KN_SHOWN(x), kn_device_name(from), kn_device_name(to));
}

static bool to_device_forward(kn_op_call *c)
{
    return kn_copy_(c->out[0], c->in[0]);
}

static bool to_device_backward(kn_op_grad *g)
{
    kn_tensor *dx = kn_grad_out(g, 0);
    return dx && kn_copy_(dx, g->dout[0]);
}

KN_OP(kn_op_to_device, .name = "to_device", .attr_size = sizeof(kn_device),
      .shape = to_device_shape, .forward = to_device_forward, .backward = to_device_backward,
      .on_tape = kn_linear_on_tape);

kn_tensor *kn_to_device(kn_tensor *x, kn_device device)
{
    device = device ? device : kn_default_device;
    if (x && kn_ok() && kn_check(x, "to_device") && kn_device_of(x) == device)
        return x;
    return kn_apply1(&kn_op_to_device, 1, &x, 0, &device);
}
