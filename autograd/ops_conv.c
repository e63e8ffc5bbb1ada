/* autograd/ops_conv.c: convolutions of images and sequences, and the transposed ones, which are
 * their gradients by x. A sequence [N,C,L] is an image of one row. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

static const char *const sides[2] = { "rows", "columns" };

/* ---- shapes ---------------------------------------------------------------------------------- */

static bool check_ranks(const kn_op_call *c)
{
    static const char *const x_dims[] = { "L", "H,W" }, *const w_dims[] = { "S", "R,S" };
    const kn_conv_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *w = c->in[1];
    return (x->ndim == a->dims + 2 && w->ndim == a->dims + 2 && kn_dtype_is_float(x->dtype) &&
            x->dtype == w->dtype) ||
           kn_fail("%s: needs x[N,C,%s] or x[C,%s] and weight[%s,%s] of the same float dtype: x is "
                   "%s, weight is %s",
                   c->op->name, x_dims[a->dims - 1], x_dims[a->dims - 1],
                   a->transposed ? "C,O/groups" : "O,C/groups", w_dims[a->dims - 1],
                   KN_SHOWN(a->shown), KN_SHOWN(w));
}

/* Finds the number of channels of the result. */
static bool check_channels(const kn_op_call *c, int64_t *out)
{
    const kn_conv_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    const char *taps = a->dims == 2 ? "R,S" : "S";
    const int64_t C = x->shape[1], each = a->groups > 0 ? C / a->groups : 0;
    if (a->groups < 1 || C % a->groups || w->shape[0] % a->groups)
        return kn_fail("%s: %lld groups must divide the channels of x %s and of weight %s",
                       c->op->name, (long long)a->groups, KN_SHOWN(a->shown), KN_SHOWN(w));
    if (a->transposed && w->shape[0] != C)
        return kn_fail("%s: x is %s, its %lld channels need a weight[%lld,O/groups,%s], got %s",
                       c->op->name, KN_SHOWN(a->shown), (long long)C, (long long)C, taps,
                       KN_SHOWN(w));
    if (!a->transposed && w->shape[1] != each)
        return kn_fail("%s: x is %s, its %lld channels in %lld groups need a weight[O,%lld,%s], "
                       "got %s",
                       c->op->name, KN_SHOWN(a->shown), (long long)C, (long long)a->groups,
                       (long long)each, taps, KN_SHOWN(w));
    *out = w->shape[0];
    if (a->transposed && __builtin_mul_overflow(w->shape[1], a->groups, out))
        return kn_fail("%s: %lld groups of weight %s make too many channels", c->op->name,
                       (long long)a->groups, KN_SHOWN(w));
    return kn_vector_fits(c->op->name, "bias", b, *out, x);
}

/* The number of positions along dim d, of H of x under R of weight. */
static bool count_positions(const kn_op_call *c, int d, int64_t H, int64_t R, int64_t *count)
{
    const kn_conv_attr *a = c->attr;
    const int64_t stride = a->stride[d], dilation = a->dilation[d], pad = a->pad[d];
    int64_t reach, room;
    if (stride < 1 || dilation < 1 || pad < 0)
        return kn_fail("%s: stride %lld, dilation %lld, pad %lld along %s; at least 1, 1, 0 are "
                       "needed",
                       c->op->name, (long long)stride, (long long)dilation, (long long)pad,
                       sides[d]);
    if (__builtin_mul_overflow(dilation, R - 1, &reach) || reach > INT64_MAX / 4 ||
        pad > INT64_MAX / 8 || H > INT64_MAX / 4)
        return kn_fail("%s: %lld %s with pad %lld under a kernel of %lld with dilation %lld are "
                       "too many to count",
                       c->op->name, (long long)H, sides[d], (long long)pad, (long long)R,
                       (long long)dilation);
    room = H + 2 * pad;
    if (R < 1 || ++reach > room)
        return kn_fail("%s: a kernel of %lld with dilation %lld reaches over %lld %s; x with pad "
                       "%lld has %lld",
                       c->op->name, (long long)R, (long long)dilation, (long long)reach, sides[d],
                       (long long)pad, (long long)room);
    *count = (room - reach) / stride + 1;
    return true;
}

/* The same for transposed ones: the size of an image that a convolution takes to H positions. */
static bool count_transposed(const kn_op_call *c, int d, int64_t H, int64_t R, int64_t *count)
{
    const kn_conv_attr *a = c->attr;
    const int64_t stride = a->stride[d], dilation = a->dilation[d], pad = a->pad[d];
    const int64_t more = a->output_pad[d];
    int64_t reach, from;
    if (stride < 1 || dilation < 1 || pad < 0 || more < 0 || (more >= stride && more >= dilation))
        return kn_fail("%s: stride %lld, dilation %lld, pad %lld, output_pad %lld along %s; at "
                       "least 1, 1, 0, 0 are needed, and an output_pad below stride or dilation",
                       c->op->name, (long long)stride, (long long)dilation, (long long)pad,
                       (long long)more, sides[d]);
    if (__builtin_mul_overflow(dilation, R - 1, &reach) ||
        __builtin_mul_overflow(stride, H - 1, &from) || reach > INT64_MAX / 8 ||
        from > INT64_MAX / 8 || pad > INT64_MAX / 8 || more > INT64_MAX / 8)
        return kn_fail("%s: %lld %s with stride %lld under a kernel of %lld with dilation %lld "
                       "are too many to count",
                       c->op->name, (long long)H, sides[d], (long long)stride, (long long)R,
                       (long long)dilation);
    *count = from - 2 * pad + reach + more + 1;
    return (R >= 1 && *count >= 1) ||
           kn_fail("%s: %lld %s with stride %lld, pad %lld, output_pad %lld under a kernel of "
                   "%lld with dilation %lld would give %lld; at least 1 is needed",
                   c->op->name, (long long)H, sides[d], (long long)stride, (long long)pad,
                   (long long)more, (long long)R, (long long)dilation, (long long)*count);
}

static bool conv_shape(kn_op_call *c)
{
    const kn_conv_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *w = c->in[1];
    kn_spec *s = &c->spec[0];
    if (!check_ranks(c))
        return false;
    *s = kn_spec_like(x);
    s->order = kn_order_of(x);
    if (!check_channels(c, &s->shape[1]))
        return false;
    for (int i = 2; i < x->ndim; i++) {
        const int d = i - a->dims;
        if (!(a->transposed ? count_transposed : count_positions)(c, d, x->shape[i], w->shape[i],
                                                                  &s->shape[i]))
            return false;
    }
    return true;
}

/* ---- convolution ----------------------------------------------------------------------------- */

/* Copies stride, pad, dilation and groups into any of the three structs of arguments. */
#define WITH_NUMBERS(args, a)                                                                      \
    do {                                                                                           \
        memcpy((args).stride, (a)->stride, sizeof(a)->stride);                                     \
        memcpy((args).pad, (a)->pad, sizeof(a)->pad);                                              \
        memcpy((args).dilation, (a)->dilation, sizeof(a)->dilation);                               \
        (args).groups = (a)->groups;                                                               \
    } while (0)

/* t as kernels see it: four dims. */
static kn_array image_of(const kn_tensor *t)
{
    kn_array a = kn_array_of(t);
    if (t->ndim == 3) {
        a.ndim = 4;
        a.shape[3] = t->shape[2], a.stride[3] = t->stride[2];
        a.shape[2] = 1, a.stride[2] = t->shape[2] * t->stride[2];
    }
    return a;
}

static bool make_positions(kn_tensor *y, const kn_tensor *x, const kn_tensor *w,
                           const kn_tensor *bias, const kn_conv_attr *a)
{
    kn_conv_args args = {
        .y = image_of(y), .x = image_of(x), .w = image_of(w), .bias = kn_array_or_none(bias)
    };
    WITH_NUMBERS(args, a);
    return KN_RUN(y, KN_K_CONV, args);
}

static bool make_image(kn_tensor *dx, const kn_tensor *dy, const kn_tensor *w,
                       const kn_conv_attr *a)
{
    kn_conv_grad_x_args args = { .dx = image_of(dx), .dy = image_of(dy), .w = image_of(w) };
    WITH_NUMBERS(args, a);
    return KN_RUN(dx, KN_K_CONV_GRAD_X, args);
}

static bool make_weight(kn_tensor *dw, const kn_tensor *dy, const kn_tensor *x,
                        const kn_conv_attr *a)
{
    kn_conv_grad_w_args args = { .dw = image_of(dw), .dy = image_of(dy), .x = image_of(x) };
    WITH_NUMBERS(args, a);
    return KN_RUN(dw, KN_K_CONV_GRAD_W, args);
}

/* y += bias, which is rounded to y's dtype. */
static bool add_bias(kn_tensor *y, kn_tensor *bias)
{
    bias = kn_cast(bias, y->dtype);
    if (!bias)
        return false;
    kn_array to = image_of(y), b = kn_array_of(bias);
    const int64_t step = b.stride[0];
    b.ndim = 4;
    memcpy(b.shape, to.shape, sizeof b.shape);
    memset(b.stride, 0, sizeof b.stride);
    b.stride[1] = step;
    return KN_RUN(y, KN_K_BINARY, ((kn_binary_args){ to, to, b, KN_ADD }));
}

static bool conv_forward(kn_op_call *c)
{
    const kn_conv_attr *a = c->attr;
    if (!a->transposed)
        return make_positions(c->out[0], c->in[0], c->in[1], c->in[2], a);
    return make_image(c->out[0], c->in[0], c->in[1], a) &&
           (!c->in[2] || add_bias(c->out[0], c->in[2]));
}

/* Libraries need dense images, so broadcast or sliced ones are copied. */
static kn_tensor *dense(kn_tensor *t)
{
    return t->ndim == 4 && kn_is_channels_last(t) ? t : kn_contiguous(t);
}

static bool conv_backward(kn_op_grad *g)
{
    const kn_conv_attr *a = g->attr;
    kn_tensor *dy = dense(g->dout[0]);
    if (!dy)
        return false;
    kn_tensor *x = g->in[0], *w = g->in[1];
    kn_tensor *dx = g->want[0] ? kn_grad_as(g, 0, x) : NULL;
    if (g->want[0] &&
        !(dx && (a->transposed ? make_positions(dx, dy, w, NULL, a) : make_image(dx, dy, w, a))))
        return false;
    kn_tensor *dw = g->want[1] ? kn_grad_out(g, 1) : NULL;
    if (g->want[1] &&
        !(dw && (a->transposed ? make_weight(dw, x, dy, a) : make_weight(dw, dy, x, a))))
        return false;
    return !g->want[2] || kn_grad_bias(g, 2, image_of(dy));
}

/* ---- the operations -------------------------------------------------------------------------- */

/* One operation for each; messages have its name. */
#define CONV_OP(kind)                                                                              \
    {                                                                                              \
        .name = kind, .makes = true, .attr_size = sizeof(kn_conv_attr), .save_in = 3,              \
        .shape = conv_shape, .forward = conv_forward, .backward = conv_backward,                   \
        .on_tape = kn_bilinear_on_tape                                                             \
    }
KN_OPS(conv_ops, CONV_OP("conv1d"), CONV_OP("conv2d"), CONV_OP("conv_transpose1d"),
       CONV_OP("conv_transpose2d"));

void kn_by_dim(int64_t *out, int n, int64_t all, const int64_t *each, int64_t otherwise)
{
    bool given = false;
    for (int d = 0; d < n; d++)
        given |= each[d] != 0;
    for (int d = 0; d < n; d++)
        out[d] = given ? each[d] : all != 0 ? all : otherwise;
}

void kn_conv_numbers(int64_t out[2], int dims, int64_t both, const int64_t each[2],
                     int64_t otherwise)
{
    kn_by_dim(out, 2, both, each, otherwise);
    out[0] = dims == 1 ? otherwise : out[0];
}

kn_tensor *kn_pad_same(const char *op, kn_tensor *x, const kn_tensor *w, int n,
                       const int64_t *stride, int64_t *pad, const int64_t *dilation)
{
    int64_t more[2 * KN_MAX_DIMS] = { 0 };
    bool some = false;
    for (int d = 0; d < n; d++) {
        if (stride[d] != 1 || pad[d] != 0)
            return kn_fail_null("%s: .same goes with stride 1, and without a pad; got %lld, %lld",
                                op, (long long)stride[d], (long long)pad[d]);
        const int64_t room = dilation[d] > 0 && dilation[d] < INT32_MAX
                                 ? dilation[d] * (w->shape[w->ndim - n + d] - 1)
                                 : 0;
        pad[d] = room / 2;
        more[2 * (n - 1 - d) + 1] = room % 2;
        some |= room % 2 != 0;
    }
    return some ? kn_pad(x, KN_PAD_CONSTANT, 0, 2 * n, more) : x;
}

kn_tensor *kn_convolve(kn_tensor *x, kn_tensor *w, kn_tensor *bias, const kn_conv_attr *a)
{
    const kn_op *op = &conv_ops[2 * a->transposed + a->dims - 1];
    if (!kn_ok() || !kn_check(x, op->name))
        return NULL;
    kn_scope s = kn_scope_begin();
    const bool alone = x->ndim == a->dims + 1;
    const kn_tensor *given = x;
    x = kn_as_batch(x, a->dims + 2);
    kn_conv_attr own = *a;
    own.shown = given;
    if (a->same && x && x->ndim == a->dims + 2 && kn_check(w, op->name) && w->ndim == x->ndim)
        x = kn_pad_same(op->name, x, w, a->dims, own.stride + 2 - a->dims, own.pad + 2 - a->dims,
                        own.dilation + 2 - a->dims);
    x = x && x->ndim == a->dims + 2 ? dense(x) : x;
    kn_tensor *y = x ? kn_apply1(op, 3, (kn_tensor *[]){ x, w, bias }, 4, &own) : NULL;
    y = kn_of_batch(y, alone);
    return kn_scope_result(s, y);
}

/* The numbers that options o of all four kinds have. */
#define CONV_NUMBERS(a, o, strides, pads, dilations)                                               \
    do {                                                                                           \
        (a).groups = (o).groups ? (o).groups : 1;                                                  \
        kn_conv_numbers((a).stride, (a).dims, (o).stride, strides, 1);                             \
        kn_conv_numbers((a).pad, (a).dims, (o).pad, pads, 0);                                      \
        kn_conv_numbers((a).dilation, (a).dims, (o).dilation, dilations, 1);                       \
    } while (0)

static const int64_t none[2];

kn_tensor *kn_conv2d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv2d_options o)
{
    kn_conv_attr a = { .dims = 2, .same = o.same };
    CONV_NUMBERS(a, o, o.strides, o.pads, o.dilations);
    return kn_convolve(x, w, bias, &a);
}

kn_tensor *kn_conv1d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv1d_options o)
{
    kn_conv_attr a = { .dims = 1, .same = o.same };
    CONV_NUMBERS(a, o, none, none, none);
    return kn_convolve(x, w, bias, &a);
}

kn_tensor *kn_conv_transpose2d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias,
                                kn_conv_transpose2d_options o)
{
    kn_conv_attr a = { .dims = 2, .transposed = true };
    CONV_NUMBERS(a, o, o.strides, o.pads, o.dilations);
    kn_conv_numbers(a.output_pad, 2, o.output_pad, o.output_pads, 0);
    return kn_convolve(x, w, bias, &a);
}

kn_tensor *kn_conv_transpose1d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias,
                                kn_conv_transpose1d_options o)
{
    kn_conv_attr a = { .dims = 1, .transposed = true };
    CONV_NUMBERS(a, o, none, none, none);
    kn_conv_numbers(a.output_pad, 1, o.output_pad, none, 0);
    return kn_convolve(x, w, bias, &a);
}
