/* kernels/cuda/cudnn/cudnn_image.c: convolution, its gradients and batch norm in training, as cuDNN
 * computes them.
 *
 * Images and weights must lie packed, channels-last (the layout of tensor cores) or in the order of
 * their dims, which costs cuDNN a transposition in its workspace. Everything is added in f32;
 * engines that narrow their inputs or go through other domains (FFT, Winograd) are not taken, and
 * f32 is multiplied on tensor cores only where TF32 is allowed. Knap's kernels take the rest: f64,
 * strides with gaps, batch norm of f32 or of fewer than 8 channels, or without training, where
 * there is nothing to fuse.
 *
 * dw in f32 of bf16 or f16: cuDNN has engines that store the f32 sum (compiled at run time), for
 * channels-last images whose channels suit tensor cores. Else x and dy are widened: TF32 holds
 * their values exactly. */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/device.h"

#include <stdlib.h>

#define NOTE(n)   ((uint32_t)1 << CUDNN_NUMERICAL_NOTE_##n)
#define WIDE_MOST ((int64_t)1 << 29) /* elements of x and dy that are widened */
#define F32       CUDNN_DATA_FLOAT

/* Names of the tensors in the variant pack. */
enum {
    ID_X = 1,
    ID_W,
    ID_Y,
    ID_DX,
    ID_BIAS,
    ID_MEAN,
    ID_RSTD,
    ID_DW,
    ID_DB,
    ID_EPS,
    ID_MOMENTUM,
    ID_MEAN_IN,
    ID_VAR_IN,
    ID_MEAN_OUT,
    ID_VAR_OUT
};

typedef kn_dnn_image problem;

/* ---- which cases ----------------------------------------------------------------------------- */

/* Packed in the order of dims n, c, h, w, or n, h, w, c for last; dims of 1 lie anywhere. */
static bool packed(const kn_array *a, bool last)
{
    static const int orders[2][4] = { { 3, 2, 1, 0 }, { 1, 3, 2, 0 } };
    int64_t size = 1;
    for (int i = 0; i < 4; i++) {
        int d = orders[last][i];
        if (a->shape[d] != 1 && a->stride[d] != size)
            return false;
        size *= a->shape[d];
    }
    return true;
}

static bool usable(const kn_array *a, kn_dtype t)
{
    int64_t n = a->ndim == 4 ? kn_array_numel(a) : 0;
    return a->dtype == t && (uintptr_t)a->data % 16 == 0 && n > 0 && n <= INT32_MAX;
}

static int32_t type_of(kn_dtype t)
{
    return t == KN_BF16 ? CUDNN_DATA_BFLOAT16 : t == KN_F16 ? CUDNN_DATA_HALF : F32;
}

static bool is_half(kn_dtype t)
{
    return t == KN_BF16 || t == KN_F16;
}

/* Engines that won't do for values of dtype t. */
static uint32_t notes_to_avoid(kn_dtype t, bool exact_in_tf32)
{
    uint32_t avoid = NOTE(DOWN_CONVERT_INPUTS) | NOTE(REDUCED_PRECISION_REDUCTION) | NOTE(FFT) |
                     NOTE(WINOGRAD) | NOTE(WINOGRAD_TILE_4x4) | NOTE(WINOGRAD_TILE_6x6) |
                     NOTE(WINOGRAD_TILE_13x13);
    if (kn_cuda_is_deterministic())
        avoid |= NOTE(NONDETERMINISTIC);
    if (t == KN_F32 && !exact_in_tf32 && !kn_f32_products(KN_CUDA))
        avoid |= NOTE(TENSOR_CORE);
    return avoid;
}

/* A convolution whichever of its arrays is the result. */
typedef struct conv {
    const kn_array *y, *x, *w;
    const int64_t *stride, *pad, *dilation;
    int64_t groups;
} conv;

/* All but extra; w may be of another dtype. */
static bool describe_conv(kn_dnn_problem *whole, const conv *v, kn_dtype t)
{
    problem *p = &whole->as.image;
    if (!(is_half(t) || t == KN_F32) || !usable(v->x, t) || !usable(v->y, t) ||
        !usable(v->w, v->w->dtype) || v->groups < 1)
        return false;
    bool last = packed(v->x, true) && packed(v->y, true);
    if (!last && !(packed(v->x, false) && packed(v->y, false)))
        return false;
    bool w_last = packed(v->w, last) ? last : !last;
    if (!packed(v->w, w_last))
        return false;
    p->layouts = (last ? KN_DNN_X_LAST : 0) | (w_last ? KN_DNN_W_LAST : 0);
    p->n = v->x->shape[0], p->c = v->x->shape[1], p->h = v->x->shape[2], p->w = v->x->shape[3];
    p->o = v->y->shape[1], p->p = v->y->shape[2], p->q = v->y->shape[3];
    p->r = v->w->shape[2], p->s = v->w->shape[3], p->groups = v->groups;
    if (v->y->shape[0] != p->n || v->w->shape[0] != p->o || v->w->shape[1] * p->groups != p->c ||
        p->o % p->groups)
        return false;
    for (int d = 0; d < 2; d++) {
        int64_t stride = v->stride[d], dilation = v->dilation[d], pad = v->pad[d];
        int64_t room = v->x->shape[2 + d] + 2 * pad - (v->w->shape[2 + d] - 1) * dilation - 1;
        if (stride < 1 || dilation < 1 || pad < 0 || room < 0 ||
            room / stride + 1 != v->y->shape[2 + d])
            return false;
        p->window.stride[d] = stride;
        p->window.pad[d] = pad;
        p->window.dilation[d] = dilation;
    }
    p->type = type_of(t);
    p->extra = -1;
    whole->avoid = notes_to_avoid(t, false);
    return true;
}

static bool describe_y(kn_dnn_problem *whole, const void *args)
{
    const kn_conv_args *a = args;
    conv v = { &a->y, &a->x, &a->w, a->stride, a->pad, a->dilation, a->groups };
    kn_dtype t = a->x.dtype;
    if (a->w.dtype != t || !describe_conv(whole, &v, t))
        return false;
    if (!a->bias.data)
        return true;
    whole->as.image.extra = type_of(a->bias.dtype);
    return (a->bias.dtype == t || a->bias.dtype == KN_F32) && a->bias.ndim == 1 &&
           a->bias.shape[0] == a->y.shape[1] && (a->bias.stride[0] == 1 || a->bias.shape[0] == 1) &&
           (uintptr_t)a->bias.data % 16 == 0;
}

static bool describe_x(kn_dnn_problem *whole, const void *args)
{
    const kn_conv_grad_x_args *a = args;
    conv v = { &a->dy, &a->dx, &a->w, a->stride, a->pad, a->dilation, a->groups };
    return a->w.dtype == a->dy.dtype && describe_conv(whole, &v, a->dy.dtype);
}

static bool describe_w(kn_dnn_problem *whole, const void *args)
{
    const kn_conv_grad_w_args *a = args;
    conv v = { &a->dy, &a->x, &a->dw, a->stride, a->pad, a->dilation, a->groups };
    kn_dtype t = a->x.dtype;
    if (!describe_conv(whole, &v, t) || (a->dw.dtype != t && a->dw.dtype != KN_F32))
        return false;
    whole->as.image.extra = type_of(a->dw.dtype);
    /* the engines that store f32 have one layout */
    return a->dw.dtype == t || (whole->as.image.layouts & KN_DNN_X_LAST);
}

static bool describe_w_wide(kn_dnn_problem *whole, const void *args)
{
    const kn_conv_grad_w_args *a = args;
    conv v = { &a->dy, &a->x, &a->dw, a->stride, a->pad, a->dilation, a->groups };
    if (!is_half(a->x.dtype) || a->dw.dtype != KN_F32 || !describe_conv(whole, &v, a->x.dtype) ||
        kn_array_numel(&a->x) + kn_array_numel(&a->dy) > WIDE_MOST)
        return false;
    whole->as.image.type = whole->as.image.extra = F32;
    whole->avoid = notes_to_avoid(KN_F32, true);
    return true;
}

/* ---- graphs of convolutions ------------------------------------------------------------------ */

static kn_dnn_shape shape(int64_t n, int64_t c, int64_t h, int64_t w, bool last)
{
    if (last)
        return (kn_dnn_shape){ { n, c, h, w }, { h * w * c, 1, w * c, c } };
    return (kn_dnn_shape){ { n, c, h, w }, { c * h * w, h * w, w, 1 } };
}

static kn_dnn_shape shape_x(const problem *p)
{
    return shape(p->n, p->c, p->h, p->w, p->layouts & KN_DNN_X_LAST);
}

static kn_dnn_shape shape_y(const problem *p)
{
    return shape(p->n, p->o, p->p, p->q, p->layouts & KN_DNN_X_LAST);
}

static kn_dnn_shape shape_w(const problem *p, bool last)
{
    return shape(p->o, p->c / p->groups, p->r, p->s, last);
}

static kn_dnn_desc real(kn_dnn_graph *g, int64_t id, int32_t t, kn_dnn_shape s)
{
    return kn_dnn_tensor(g, id, (cudnnDataType_t)t, KN_DNN_REAL, s);
}

static kn_dnn_desc virtual(kn_dnn_graph *g, kn_dnn_shape s)
{
    return kn_dnn_tensor(g, 0, F32, KN_DNN_VIRTUAL, s);
}

static void draw_y(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.image;
    kn_dnn_desc x = real(g, ID_X, p->type, shape_x(p)),
                w = real(g, ID_W, p->type, shape_w(p, p->layouts & KN_DNN_W_LAST)),
                y = real(g, ID_Y, p->type, shape_y(p));
    kn_dnn_desc product = p->extra < 0 ? y : virtual(g, shape_y(p));
    kn_dnn_conv(g, CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, &p->window, x, w,
                product);
    if (p->extra >= 0) {
        kn_dnn_desc bias =
            real(g, ID_BIAS, p->extra, shape(1, p->o, 1, 1, p->layouts & KN_DNN_X_LAST));
        kn_dnn_pointwise(g, CUDNN_POINTWISE_ADD, F32, 0, product, bias, NULL, y);
    }
}

static void draw_x(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.image;
    kn_dnn_conv(g, CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, &p->window,
                real(g, ID_X, p->type, shape_x(p)),
                real(g, ID_W, p->type, shape_w(p, p->layouts & KN_DNN_W_LAST)),
                real(g, ID_Y, p->type, shape_y(p)));
}

/* dw as the graph sees it is channels-last where it is stored wider than x. */
static bool stored_last(const problem *p)
{
    return p->extra != p->type || (p->layouts & KN_DNN_W_LAST);
}

static void draw_w(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.image;
    kn_dnn_shape s = shape_w(p, stored_last(p));
    kn_dnn_desc dw = real(g, ID_W, p->extra, s);
    kn_dnn_desc sum = p->extra == p->type ? dw : virtual(g, s);
    kn_dnn_conv(g, CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR, &p->window,
                real(g, ID_X, p->type, shape_x(p)), sum, real(g, ID_Y, p->type, shape_y(p)));
    if (sum != dw)
        kn_dnn_pointwise(g, CUDNN_POINTWISE_IDENTITY, F32, 0, sum, NULL, NULL, dw);
}

/* ---- where they lie -------------------------------------------------------------------------- */

/* An array like a, packed, in scratch. */
static kn_array room_for(const kn_array *a, kn_dtype t, bool last)
{
    kn_dnn_shape s = shape(a->shape[0], a->shape[1], a->shape[2], a->shape[3], last);
    kn_array r = kn_array_make(NULL, t, 4, s.dim);
    for (int d = 0; d < 4; d++)
        r.stride[d] = s.stride[d];
    return r;
}

static void bind_y(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_conv_args *a = args;
    kn_dnn_bind(b, ID_X, a->x.data);
    kn_dnn_bind(b, ID_W, a->w.data);
    kn_dnn_bind(b, ID_Y, a->y.data);
    if (whole->as.image.extra >= 0)
        kn_dnn_bind(b, ID_BIAS, a->bias.data);
}

static void bind_x(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_conv_grad_x_args *a = args;
    (void)whole;
    kn_dnn_bind(b, ID_X, a->dx.data);
    kn_dnn_bind(b, ID_W, a->w.data);
    kn_dnn_bind(b, ID_Y, a->dy.data);
}

static void bind_w(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_conv_grad_w_args *a = args;
    const problem *p = &whole->as.image;
    kn_dnn_bind(b, ID_X, a->x.data);
    kn_dnn_bind(b, ID_Y, a->dy.data);
    if (stored_last(p) && !(p->layouts & KN_DNN_W_LAST))
        kn_dnn_bind_copy(b, ID_W, &a->dw, room_for(&a->dw, a->dw.dtype, true), true);
    else
        kn_dnn_bind(b, ID_W, a->dw.data);
}

static void bind_w_wide(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_conv_grad_w_args *a = args;
    bool last = whole->as.image.layouts & KN_DNN_X_LAST;
    kn_dnn_bind_copy(b, ID_X, &a->x, room_for(&a->x, KN_F32, last), false);
    kn_dnn_bind_copy(b, ID_Y, &a->dy, room_for(&a->dy, KN_F32, last), false);
    kn_dnn_bind(b, ID_W, a->dw.data);
}

const kn_dnn_kernel kn_dnn_conv_y = { describe_y, draw_y, bind_y };
const kn_dnn_kernel kn_dnn_conv_x = { describe_x, draw_x, bind_x };
const kn_dnn_kernel kn_dnn_conv_w = { describe_w, draw_w, bind_w };
const kn_dnn_kernel kn_dnn_conv_w_wide = { describe_w_wide, draw_w, bind_w_wide };

/* ---- batch norm ------------------------------------------------------------------------------ */

/* A vector of the channels of x that cuDNN reads or writes in place. */
static bool vector_fits(const kn_array *v, const kn_array *x)
{
    return v->data && v->dtype == KN_F32 && v->ndim == 1 && v->shape[0] == x->shape[1] &&
           v->stride[0] == 1 && (uintptr_t)v->data % 16 == 0;
}

/* images and vectors end with NULL. */
static bool describe_norm(kn_dnn_problem *whole, const kn_array *const *images,
                          const kn_array *const *vectors)
{
    const kn_array *x = images[0];
    problem *p = &whole->as.image;
    bool last = true, first = true;
    for (int i = 0; images[i]; i++) {
        if (!usable(images[i], x->dtype))
            return false;
        for (int d = 0; d < 4; d++)
            if (images[i]->shape[d] != x->shape[d])
                return false;
        last = last && packed(images[i], true);
        first = first && packed(images[i], false);
    }
    for (int i = 0; vectors[i]; i++)
        if (!vector_fits(vectors[i], x))
            return false;
    p->n = x->shape[0], p->c = x->shape[1], p->h = x->shape[2], p->w = x->shape[3];
    p->layouts = last ? KN_DNN_X_LAST : 0;
    p->type = type_of(x->dtype);
    whole->avoid = notes_to_avoid(x->dtype, false);
    return is_half(x->dtype) && (last || first) && p->c >= 8 && p->n * p->h * p->w > 1;
}

static bool describe_norm_y(kn_dnn_problem *whole, const void *args)
{
    const kn_batch_norm_args *a = args;
    const kn_array *images[] = { &a->x, &a->y, NULL };
    const kn_array *vectors[] = { &a->w, &a->b, &a->mean, &a->rstd, NULL, NULL, NULL };
    whole->as.image.running = a->running_mean.data != NULL;
    if (whole->as.image.running)
        vectors[4] = &a->running_mean, vectors[5] = &a->running_var;
    return a->training && a->y.data && !a->relu && !a->add.data &&
           !a->running_mean.data == !a->running_var.data && describe_norm(whole, images, vectors);
}

static bool describe_norm_x(kn_dnn_problem *whole, const void *args)
{
    const kn_batch_norm_grad_args *a = args;
    const kn_array *images[] = { &a->x, &a->dy, &a->dx, NULL };
    const kn_array *vectors[] = { &a->w, &a->mean, &a->rstd, &a->dw, &a->db, NULL };
    return a->training && a->dx.data && !a->relu && !a->dadd.data && !a->mean_dw.data &&
           describe_norm(whole, images, vectors);
}

static kn_dnn_desc vector(kn_dnn_graph *g, int64_t id, const problem *p)
{
    return real(g, id, F32, shape(1, p->c, 1, 1, true));
}

static void draw_norm_y(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.image;
    kn_dnn_norm n = { real(g, ID_X, p->type, shape_x(p)),
                      real(g, ID_Y, p->type, shape_x(p)),
                      vector(g, ID_MEAN, p),
                      vector(g, ID_RSTD, p),
                      vector(g, ID_W, p),
                      vector(g, ID_BIAS, p),
                      kn_dnn_scalar(g, ID_EPS),
                      NULL,
                      NULL,
                      NULL,
                      NULL,
                      NULL };
    if (p->running) {
        n.momentum = kn_dnn_scalar(g, ID_MOMENTUM);
        n.mean_in = vector(g, ID_MEAN_IN, p);
        n.var_in = vector(g, ID_VAR_IN, p);
        n.mean_out = vector(g, ID_MEAN_OUT, p);
        n.var_out = vector(g, ID_VAR_OUT, p);
    }
    kn_dnn_batch_norm(g, &n);
}

static void draw_norm_x(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.image;
    kn_dnn_norm_grad n = { real(g, ID_X, p->type, shape_x(p)),
                           real(g, ID_Y, p->type, shape_x(p)),
                           real(g, ID_DX, p->type, shape_x(p)),
                           vector(g, ID_MEAN, p),
                           vector(g, ID_RSTD, p),
                           vector(g, ID_W, p),
                           vector(g, ID_DW, p),
                           vector(g, ID_DB, p) };
    kn_dnn_batch_norm_grad(g, &n);
}

/* cuDNN reads the running ones from copies: its documents don't promise that they may be written in
 * place. */
static void bind_norm_y(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_batch_norm_args *a = args;
    kn_dnn_bind(b, ID_X, a->x.data);
    kn_dnn_bind(b, ID_Y, a->y.data);
    kn_dnn_bind(b, ID_MEAN, a->mean.data);
    kn_dnn_bind(b, ID_RSTD, a->rstd.data);
    kn_dnn_bind(b, ID_W, a->w.data);
    kn_dnn_bind(b, ID_BIAS, a->b.data);
    kn_dnn_bind_scalar(b, ID_EPS, (float)a->eps);
    if (!whole->as.image.running)
        return;
    kn_dnn_bind_scalar(b, ID_MOMENTUM, (float)a->momentum);
    kn_dnn_bind_copy(b, ID_MEAN_IN, &a->running_mean, a->running_mean, false);
    kn_dnn_bind_copy(b, ID_VAR_IN, &a->running_var, a->running_var, false);
    kn_dnn_bind(b, ID_MEAN_OUT, a->running_mean.data);
    kn_dnn_bind(b, ID_VAR_OUT, a->running_var.data);
}

static void bind_norm_x(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_batch_norm_grad_args *a = args;
    (void)whole;
    kn_dnn_bind(b, ID_X, a->x.data);
    kn_dnn_bind(b, ID_Y, a->dy.data);
    kn_dnn_bind(b, ID_DX, a->dx.data);
    kn_dnn_bind(b, ID_MEAN, a->mean.data);
    kn_dnn_bind(b, ID_RSTD, a->rstd.data);
    kn_dnn_bind(b, ID_W, a->w.data);
    kn_dnn_bind(b, ID_DW, a->dw.data);
    kn_dnn_bind(b, ID_DB, a->db.data);
}

const kn_dnn_kernel kn_dnn_batch_norm_y = { describe_norm_y, draw_norm_y, bind_norm_y };
const kn_dnn_kernel kn_dnn_batch_norm_x = { describe_norm_x, draw_norm_x, bind_norm_x };
