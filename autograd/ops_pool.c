/* autograd/ops_pool.c: max and average pooling over windows of images and sequences. */
#include "autograd/ops.h"
#include "autograd/second.h"

typedef struct pool_attr {
    kn_pool kind;
    kn_window window;
    bool ceil_mode;
    int64_t size[2]; /* adaptive: number of windows in each dim */
} pool_attr;

/* Number of windows along a dim of size H. The last one begins inside the image or in the pad
 * before it. */
static bool count_windows(const kn_op_call *c, int d, int64_t H, int64_t *count)
{
    static const char *const dims[2] = { "rows", "columns" };
    const pool_attr *a = c->attr;
    const kn_window *w = &a->window;
    const int64_t k = w->kernel[d], s = w->stride[d], pad = w->pad[d];
    if (k < 1 || s < 1 || w->dilation[d] < 1 || pad < 0 || pad > k / 2 || k > INT32_MAX ||
        s > INT32_MAX || w->dilation[d] > INT32_MAX)
        return kn_fail(
            "%s: kernel %lld, stride %lld, dilation %lld, pad %lld along %s; kernel, "
            "stride and dilation must be at least 1, pad at most half of kernel, all below "
            "2^31",
            c->op->name, (long long)k, (long long)s, (long long)w->dilation[d], (long long)pad,
            dims[d]);
    const int64_t reach = w->dilation[d] * (k - 1) + 1, room = H + 2 * pad - reach;
    if (room < 0 || H < 1)
        return kn_fail("%s: a window reaches over %lld %s; x with pad %lld has %lld", c->op->name,
                       (long long)reach, dims[d], (long long)pad, (long long)(H + 2 * pad));
    *count = (room + (a->ceil_mode ? s - 1 : 0)) / s + 1;
    if ((*count - 1) * s >= H + pad)
        --*count;
    return true;
}

/* The largest of each window of integers: of windows as views, where the pad holds the least. */
static kn_tensor *largest_integers(const kn_op *op, kn_tensor *x, const pool_attr *a)
{
    pool_attr attr = *a;
    const kn_op_call call = { .op = op, .attr = &attr };
    const double least = x->dtype == KN_I64 ? -0x1p63 : x->dtype == KN_I32 ? -0x1p31 : 0;
    for (int d = 0; x && d < 2; d++) {
        const kn_window *w = &a->window;
        const int64_t H = x->shape[2 + d];
        int64_t count, sizes[4] = { 0 }, *pad = sizes + (d == 0 ? 2 : 0);
        if (!count_windows(&call, d, H, &count))
            return NULL;
        pad[0] = w->pad[d];
        pad[1] = (count - 1) * w->stride[d] + w->dilation[d] * (w->kernel[d] - 1) + 1 - H - pad[0];
        x = kn_pad(x, KN_PAD_CONSTANT, least, 4, sizes);
        x = kn_windows(op->name, x, 2 + d, w->kernel[d], w->stride[d], w->dilation[d]);
        x = kn_amax(x, KN_SHAPE(-1), false);
    }
    return x;
}

static bool pool_shape(kn_op_call *c)
{
    const pool_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    if (x->ndim != 4 || !kn_dtype_is_float(x->dtype))
        return kn_fail("%s: needs a float x[N,C,H,W] or x[C,H,W], got %s", c->op->name,
                       KN_SHOWN(x));
    c->spec[0] = kn_spec_like(x);
    c->spec[0].order = kn_order_of(x);
    for (int d = 0; d < 2; d++) {
        int64_t *count = &c->spec[0].shape[2 + d];
        if (!a->window.adaptive && !count_windows(c, d, x->shape[2 + d], count))
            return false;
        if (!a->window.adaptive)
            continue;
        *count = a->size[d];
        if (*count < 1 || x->shape[2 + d] < 1)
            return kn_fail("%s: %lld x %lld windows of x %s; sizes must be at least 1", c->op->name,
                           (long long)a->size[0], (long long)a->size[1], KN_SHOWN(x));
    }
    if (c->nout > 1) {
        c->spec[1] = c->spec[0];
        c->spec[1].dtype = KN_I32;
    }
    if (x->shape[2] * x->shape[3] > INT32_MAX)
        return kn_fail("%s: x is %s; planes have at most 2^31 - 1 elements", c->op->name,
                       KN_SHOWN(x));
    return true;
}

static bool pool_forward(kn_op_call *c)
{
    const pool_attr *a = c->attr;
    return KN_RUN(c->out[0], KN_K_POOL,
                  ((kn_pool_args){ kn_array_of(c->out[0]), kn_array_or_none(c->out[1]),
                                   kn_array_of(c->in[0]), a->kind, a->window }));
}

static bool pool_backward(kn_op_grad *g)
{
    const pool_attr *a = g->attr;
    if (!g->dout[0])
        return true;
    kn_tensor *dx = kn_grad_as(g, 0, g->dout[0]);
    return dx && KN_RUN(dx, KN_K_POOL_GRAD,
                        ((kn_pool_grad_args){ kn_array_of(dx), kn_array_of(g->dout[0]),
                                              kn_array_or_none(g->out[1]), a->kind, a->window }));
}

/* The elements at the positions that were found. */
static bool max_composed(kn_op_grad *g, kn_tensor **y)
{
    kn_tensor *x = g->in[0], *at = g->out[1];
    const int64_t N = x->shape[0], C = x->shape[1];
    kn_tensor *planes = kn_reshape(x, KN_SHAPE(N, C, x->shape[2] * x->shape[3]));
    at = kn_reshape(at, KN_SHAPE(N, C, at->shape[2] * at->shape[3]));
    kn_tensor *found = kn_gather(planes, 2, at);
    y[0] = kn_reshape(found, 4, g->out_spec[0].shape);
    return y[0] != NULL;
}

KN_OP(kn_op_max_pool2d, .name = "max_pool2d", .attr_size = sizeof(pool_attr), .save_out = 2,
      .shape = pool_shape, .forward = pool_forward, .backward = pool_backward,
      .on_tape = kn_composed_on_tape, .composed = max_composed);
KN_OP(kn_op_avg_pool2d, .name = "avg_pool2d", .attr_size = sizeof(pool_attr), .shape = pool_shape,
      .forward = pool_forward, .backward = pool_backward, .on_tape = kn_linear_on_tape);

static pool_attr attr_of(kn_pool kind, const kn_pool2d_options *o)
{
    pool_attr a = { .kind = kind,
                    .ceil_mode = o->ceil_mode,
                    .window.count_include_pad = !o->exclude_pad };
    kn_by_dim(a.window.kernel, 2, o->kernel, o->kernels, 0);
    kn_by_dim(a.window.stride, 2, o->stride, o->strides, 0);
    kn_by_dim(a.window.pad, 2, o->pad, o->pads, 0);
    kn_by_dim(a.window.dilation, 2, o->dilation, o->dilations, 1);
    for (int d = 0; d < 2; d++)
        if (a.window.stride[d] == 0)
            a.window.stride[d] = a.window.kernel[d];
    return a;
}

/* op of x[N,C,H,W] or x[C,H,W]; where there are two outputs the second one is for backward. */
static kn_tensor *pooled(const kn_op *op, kn_tensor *x, const pool_attr *a, int outputs)
{
    if (!kn_ok() || !kn_check(x, op->name))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *image = kn_as_batch(x, 4), *out[2] = { NULL };
    kn_tensor *y = NULL;
    if (image && image->ndim == 4 && a->kind == KN_POOL_MAX && kn_dtype_is_int(x->dtype) &&
        x->dtype != KN_BOOL)
        y = largest_integers(op, image, a);
    else if (image && kn_apply(op, 1, &image, 0, a, outputs, out))
        y = out[0];
    y = kn_of_batch(y, x->ndim == 3);
    return kn_scope_result(s, y);
}

/* The second output holds the positions of the maxima, for backward. */
static kn_tensor *maxima(kn_tensor *x, const pool_attr *a)
{
    const bool keep = kn_ok() && x && kn_requires_grad(x) && kn_grad_mode();
    return pooled(&kn_op_max_pool2d, x, a, keep ? 2 : 1);
}

kn_tensor *kn_max_pool2d_(kn_tensor *x, kn_pool2d_options o)
{
    const pool_attr a = attr_of(KN_POOL_MAX, &o);
    return maxima(x, &a);
}

kn_tensor *kn_adaptive_max_pool2d(kn_tensor *x, int64_t P, int64_t Q)
{
    return maxima(x, &(pool_attr){ KN_POOL_MAX, .window.adaptive = true, .size = { P, Q } });
}

kn_tensor *kn_avg_pool2d_(kn_tensor *x, kn_pool2d_options o)
{
    pool_attr a = attr_of(KN_POOL_AVG, &o);
    if (a.window.dilation[0] != 1 || a.window.dilation[1] != 1)
        return kn_fail_null("avg_pool2d: averages have no dilation");
    return pooled(&kn_op_avg_pool2d, x, &a, 1);
}

kn_tensor *kn_adaptive_avg_pool2d(kn_tensor *x, int64_t P, int64_t Q)
{
    pool_attr a = { .kind = KN_POOL_AVG, .window.adaptive = true, .size = { P, Q } };
    return pooled(&kn_op_avg_pool2d, x, &a, 1);
}

/* ---- sequences: images of one row ------------------------------------------------------------ */

static kn_tensor *as_image(const char *op, kn_tensor *x, bool max)
{
    if (!kn_ok() || !kn_check(x, op))
        return NULL;
    if ((x->ndim != 3 && x->ndim != 2) || x->dtype == KN_BOOL ||
        (!max && !kn_dtype_is_float(x->dtype)))
        return kn_fail_null("%s: needs a float x[N,C,L] or x[C,L], got %s", op, KN_SHOWN(x));
    return kn_unsqueeze(x, -2);
}

/* The numbers of o, in the order of its fields, in range; else an error in the words of op. */
static bool windows_fit(const char *op, const kn_pool1d_options *o, int64_t L)
{
    const int64_t k = o->kernel, dilation = o->dilation ? o->dilation : 1;
    if (k < 1 || k > INT64_MAX / 8 || o->stride < 0 || dilation < 1 || o->pad < 0 || o->pad > k / 2)
        return kn_fail("%s: kernel %lld, stride %lld, dilation %lld, pad %lld; kernel, stride and "
                       "dilation must be at least 1, pad at most half of kernel",
                       op, (long long)k, (long long)o->stride, (long long)dilation,
                       (long long)o->pad);
    return (L >= 1 && k - 1 <= (L + 2 * o->pad - 1) / dilation) ||
           kn_fail(
               "%s: a window reaches over %lld steps of %lld elements; x with pad %lld has %lld",
               op, (long long)k, (long long)dilation, (long long)o->pad,
               (long long)(L + 2 * o->pad));
}

static kn_tensor *pool_sequence(const char *op, kn_tensor *x, const kn_pool1d_options *o, bool max)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *image = as_image(op, x, max), *y = NULL;
    if (image && windows_fit(op, o, x->shape[x->ndim - 1])) {
        kn_pool2d_options two = { ._size = sizeof two,
                                  .kernels = { 1, o->kernel },
                                  .strides = { 1, o->stride ? o->stride : o->kernel },
                                  .pads = { 0, o->pad },
                                  .dilations = { 1, o->dilation ? o->dilation : 1 },
                                  .ceil_mode = o->ceil_mode,
                                  .exclude_pad = o->exclude_pad };
        y = kn_squeeze(max ? kn_max_pool2d_(image, two) : kn_avg_pool2d_(image, two), 1,
                       (int64_t[]){ -2 });
    }
    return kn_scope_result(s, y);
}

kn_tensor *kn_max_pool1d_(kn_tensor *x, kn_pool1d_options o)
{
    return pool_sequence("max_pool1d", x, &o, true);
}

kn_tensor *kn_avg_pool1d_(kn_tensor *x, kn_pool1d_options o)
{
    if (o.dilation != 0 && o.dilation != 1)
        return kn_fail_null("avg_pool1d: averages have no dilation");
    return pool_sequence("avg_pool1d", x, &o, false);
}

static kn_tensor *adaptive_sequence(const char *op, kn_tensor *x, int64_t P, bool max)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *image = as_image(op, x, false), *y = NULL;
    if (image && (P < 1 || x->shape[x->ndim - 1] < 1))
        kn_fail("%s: %lld windows of %lld elements; both must be at least 1", op, (long long)P,
                (long long)x->shape[x->ndim - 1]);
    else if (image)
        y = (max ? kn_adaptive_max_pool2d : kn_adaptive_avg_pool2d)(image, 1, P);
    return kn_scope_result(s, kn_squeeze(y, 1, (int64_t[]){ -2 }));
}

kn_tensor *kn_adaptive_avg_pool1d(kn_tensor *x, int64_t P)
{
    return adaptive_sequence("adaptive_avg_pool1d", x, P, false);
}

kn_tensor *kn_adaptive_max_pool1d(kn_tensor *x, int64_t P)
{
    return adaptive_sequence("adaptive_max_pool1d", x, P, true);
}
