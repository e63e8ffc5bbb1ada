/* autograd/ops_interpolate.c: images of another size: interpolation, and channels as pixels. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <math.h>

/* ---- interpolation --------------------------------------------------------------------------- */

typedef struct interpolate_attr {
    int64_t size[2]; /* of the result */
    kn_grid grid;
    bool linear;
} interpolate_attr;

static bool interpolate_shape(kn_op_call *c)
{
    const interpolate_attr *a = c->attr;
    c->spec[0] = kn_spec_like(c->in[0]);
    c->spec[0].order = kn_order_of(c->in[0]);
    for (int d = 0; d < 2; d++)
        c->spec[0].shape[2 + d] = a->size[d];
    return true;
}

static bool interpolate_forward(kn_op_call *c)
{
    const interpolate_attr *a = c->attr;
    return KN_RUN(c->out[0], KN_K_INTERPOLATE,
                  ((kn_interpolate_args){ kn_array_of(c->out[0]), kn_array_of(c->in[0]), a->grid,
                                          a->linear }));
}

static bool interpolate_backward(kn_op_grad *g)
{
    const interpolate_attr *a = g->attr;
    const kn_tensor *dy = g->dout[0];
    kn_tensor *dx = kn_tensor_new(dy->dtype, kn_device_of(dy), NULL, KN_MEM_ACTIVATION, 4,
                                  g->in_spec[0].shape, kn_order_of(dy), true);
    g->din[0] = dx;
    return dx && KN_RUN(dx, KN_K_INTERPOLATE_GRAD,
                        ((kn_interpolate_grad_args){ kn_array_of(dx), kn_array_of(dy), a->grid,
                                                     a->linear }));
}

KN_OP(kn_op_interpolate, .name = "interpolate", .attr_size = sizeof(interpolate_attr),
      .shape = interpolate_shape, .forward = interpolate_forward, .backward = interpolate_backward,
      .on_tape = kn_linear_on_tape);

static bool check_options(const kn_interpolate_options *o)
{
    const bool sized = o->size || o->sizes[0] || o->sizes[1];
    const bool scaled = o->scale != 0 || o->scales[0] != 0 || o->scales[1] != 0;
    if (sized == scaled)
        return kn_fail("interpolate: needs either a size or a scale, %s",
                       sized ? "both were given" : "neither was given");
    if (o->mode != KN_NEAREST && o->mode != KN_BILINEAR)
        return kn_fail("interpolate: there is no mode %d; KN_NEAREST and KN_BILINEAR are",
                       (int)o->mode);
    return o->mode == KN_BILINEAR || !o->align_corners ||
           kn_fail("interpolate: .align_corners does nothing with KN_NEAREST; leave it out or use "
                   "KN_BILINEAR");
}

/* The size of the result along dim d, and where its positions lie. */
static bool resolve(const kn_tensor *x, const kn_interpolate_options *o, int d, interpolate_attr *a)
{
    static const char *const dims[2] = { "rows", "columns" };
    const int64_t H = x->shape[2 + d];
    const double each = o->scales[0] != 0 || o->scales[1] != 0 ? o->scales[d] : o->scale;
    int64_t size[2];
    kn_by_dim(size, o->size, o->sizes, 0);
    if (each != 0 && !(each > 0 && (double)H * each < 9e15))
        return kn_fail("interpolate: a scale of %g makes no size of %lld %s; it should be above 0 "
                       "and not so large",
                       each, (long long)H, dims[d]);
    const int64_t P = each != 0 ? (int64_t)floor((double)H * each) : size[d];
    if (P < 1 || H < 1)
        return kn_fail("interpolate: %lld %s would become %lld; at least 1 are needed",
                       (long long)H, dims[d], (long long)P);
    const bool aligned = o->align_corners;
    a->size[d] = P;
    a->grid.mul[d] = (double)(aligned ? (P > 1 ? H - 1 : 0) : each != 0 ? 1 : H);
    a->grid.div[d] = aligned ? (P > 1 ? (double)(P - 1) : 1) : each != 0 ? each : (double)P;
    return true;
}

kn_tensor *kn_interpolate_(kn_tensor *x, kn_interpolate_options o)
{
    interpolate_attr a = { .linear = o.mode == KN_BILINEAR };
    a.grid.centre = a.linear && !o.align_corners ? 0.5 : 0;
    if (!kn_ok() || !kn_check(x, "interpolate") || !check_options(&o))
        return NULL;
    if (x->ndim != 4 || !kn_dtype_is_float(x->dtype))
        return kn_fail_null("interpolate: needs a float x[N,C,H,W], got %s", KN_SHOWN(x));
    if (!resolve(x, &o, 0, &a) || !resolve(x, &o, 1, &a))
        return NULL;
    return kn_apply1(&kn_op_interpolate, 1, &x, 0, &a);
}

/* ---- channels as pixels ---------------------------------------------------------------------- */

/* x as leading dims in one, and the last three. */
static bool check_pixels(const char *op, kn_tensor *x, int64_t r, int64_t *lead)
{
    if (!kn_ok() || !kn_check(x, op))
        return false;
    if (x->ndim < 3)
        return kn_fail("%s: needs x[...,C,H,W], got %s", op, KN_SHOWN(x));
    if (r < 1 || r > INT32_MAX)
        return kn_fail("%s: the factor is %lld, should be at least 1", op, (long long)r);
    *lead = 1;
    for (int d = 0; d < x->ndim - 3; d++)
        *lead *= x->shape[d];
    return true;
}

/* y in the shape of x but for the last three dims. */
static kn_tensor *with_sizes(kn_tensor *y, const kn_tensor *x, int64_t C, int64_t H, int64_t W)
{
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < x->ndim; d++)
        shape[d] = x->shape[d];
    shape[x->ndim - 3] = C, shape[x->ndim - 2] = H, shape[x->ndim - 1] = W;
    return kn_reshape(y, x->ndim, shape);
}

kn_tensor *kn_pixel_shuffle(kn_tensor *x, int64_t r)
{
    int64_t lead;
    if (!check_pixels("pixel_shuffle", x, r, &lead))
        return NULL;
    const int64_t *last = x->shape + x->ndim - 3, C = last[0] / (r * r), H = last[1], W = last[2];
    if (last[0] % (r * r))
        return kn_fail_null("pixel_shuffle: the channels of x %s don't divide by %lld x %lld",
                            KN_SHOWN(x), (long long)r, (long long)r);
    kn_tensor *y = kn_reshape(x, KN_SHAPE(lead, C, r, r, H, W));
    y = y ? kn_permute(y, 6, (int64_t[]){ 0, 1, 4, 2, 5, 3 }) : NULL;
    return y ? with_sizes(y, x, C, H * r, W * r) : NULL;
}

kn_tensor *kn_pixel_unshuffle(kn_tensor *x, int64_t r)
{
    int64_t lead;
    if (!check_pixels("pixel_unshuffle", x, r, &lead))
        return NULL;
    const int64_t *last = x->shape + x->ndim - 3, C = last[0], H = last[1] / r, W = last[2] / r;
    if (last[1] % r || last[2] % r)
        return kn_fail_null("pixel_unshuffle: rows and columns of x %s don't divide by %lld",
                            KN_SHOWN(x), (long long)r);
    kn_tensor *y = kn_reshape(x, KN_SHAPE(lead, C, H, r, W, r));
    y = y ? kn_permute(y, 6, (int64_t[]){ 0, 1, 3, 5, 2, 4 }) : NULL;
    return y ? with_sizes(y, x, C * r * r, H, W) : NULL;
}
