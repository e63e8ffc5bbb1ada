/* kernels/cuda/cudnn/cudnn_attention.c: attention of bf16 and f16 by cuDNN's fused kernels, forward
 * and backward, as graphs of simple operations that the library recognises as flash attention (Dao,
 * arXiv:2307.08691). f32, f64 and odd head sizes go to Knap's kernels; so do masks, windows, and
 * causal attention of T != S, whose mask starts elsewhere.
 *
 * Dropout is drawn by cuDNN's generator, in forward and again in backward, from a seed that is a
 * function of the draw's seed and stream, so of (seed, step, micro-batch, path, call), and from the
 * place of an element in the call: never of the rank. These aren't the numbers of kernels/philox.h,
 * so one call's forward and backward must both be computed here, or both by Knap's kernels. Which
 * it is depends on nothing but what both know: the forward's arrays. It is here if there are plans
 * for the forward and for the dense backward, which copies the arrays that the forward doesn't
 * know; a backward that has a plan for these as they lie uses it.
 *
 * The backward adds dQ with atomics, in an order that varies, unless bits must repeat
 * (cudnn_attention_parts.c). */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

#define LITTLE ((uint64_t)1 << 20) /* of a workspace, beside what group_bytes counts */

#define F32 CUDNN_DATA_FLOAT

/* Names of the tensors in the variant pack. */
enum {
    ID_Q = 1,
    ID_K,
    ID_V,
    ID_O,
    ID_LSE,
    ID_SCALE,
    ID_MINUS_INFINITY,
    ID_DO,
    ID_DQ,
    ID_DK,
    ID_DV,
    ID_DQ_SUM,
    ID_ROW_SUM,
    ID_KEEP,
    ID_KEPT_SCALE,
    ID_SEED,
    ID_OFFSET
};

typedef kn_dnn_attention problem;

/* ---- which cases ----------------------------------------------------------------------------- */

/* 16-byte rows; dims of 1 get the stride of a packed array. */
static bool strides_of(const kn_array *a, kn_dtype t, int64_t to[3])
{
    int64_t packed = a->shape[3];
    if (a->ndim != 4 || a->dtype != t || (a->stride[3] != 1 && a->shape[3] > 1))
        return false;
    if ((uintptr_t)a->data % 16)
        return false;
    for (int i = 2; i >= 0; i--) {
        to[i] = a->shape[i] == 1 ? packed : a->stride[i];
        if (to[i] % 8 || to[i] <= 0)
            return false;
        packed = to[i] * a->shape[i] > packed ? to[i] * a->shape[i] : packed;
    }
    return true;
}

static bool describe_common(problem *p, const kn_array *q, const kn_array *k, const kn_array *v,
                            const kn_array *lse, bool causal, double dropout)
{
    kn_dtype t = q->dtype;
    if ((t != KN_BF16 && t != KN_F16) || q->ndim != 4 || lse->dtype != KN_F32)
        return false;
    p->b = q->shape[0], p->h = q->shape[1], p->t = q->shape[2], p->d = q->shape[3];
    p->g = k->shape[1], p->s = k->shape[2];
    p->type = t == KN_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
    p->causal = causal;
    p->dropout = dropout;
    if (p->b < 1 || p->t < 1 || p->s < 1 || p->g < 1 || p->d % 8 || p->d > 256 ||
        (causal && p->t != p->s))
        return false;
    return strides_of(q, t, p->q) && strides_of(k, t, p->k) && strides_of(v, t, p->v);
}

static bool describe_forward(kn_dnn_problem *whole, const void *args)
{
    const kn_attention_args *a = args;
    problem *p = &whole->as.attention;
    return !a->mask.data && a->window == 0 &&
           describe_common(p, &a->q, &a->k, &a->v, &a->lse, a->causal, a->dropout_p) &&
           strides_of(&a->o, a->q.dtype, p->o);
}

/* All but the places of dout, dq, dk and dv. */
static bool describe_inputs(kn_dnn_problem *whole, const kn_attention_grad_args *a)
{
    problem *p = &whole->as.attention;
    if (a->mask.data || a->window ||
        !describe_common(p, &a->q, &a->k, &a->v, &a->lse, a->causal, a->dropout_p) ||
        (a->dropout_p > 0 && kn_dnn_attention_parts(a) > 1))
        return false;
    p->deterministic = kn_cuda_is_deterministic();
    whole->most = p->deterministic ? kn_dnn_attention_most + LITTLE : UINT64_MAX;
    return (p->d <= 128 || whole->arch == 90) && strides_of(&a->o, a->q.dtype, p->o);
}

static bool describe_outputs(problem *p, kn_dtype t, const kn_array *const array[4])
{
    return strides_of(array[0], t, p->dout) && strides_of(array[1], t, p->dq) &&
           strides_of(array[2], t, p->dk) && strides_of(array[3], t, p->dv);
}

static bool describe_backward(kn_dnn_problem *whole, const void *args)
{
    const kn_attention_grad_args *a = args;
    const kn_array *const array[4] = { &a->dout, &a->dq, &a->dk, &a->dv };
    return describe_inputs(whole, a) && describe_outputs(&whole->as.attention, a->q.dtype, array);
}

/* x's shape, row-major. */
static kn_array dense(const kn_array *x)
{
    return kn_array_make(NULL, x->dtype, 4, x->shape);
}

static bool describe_dense(kn_dnn_problem *whole, const void *args)
{
    const kn_attention_grad_args *a = args;
    if (a->dropout_p == 0 || !describe_inputs(whole, a))
        return false;
    const kn_array q = dense(&a->q), k = dense(&a->k);
    return describe_outputs(&whole->as.attention, a->q.dtype,
                            (const kn_array *const[4]){ &q, &q, &k, &k });
}

/* ---- tensors --------------------------------------------------------------------------------- */

static kn_dnn_shape shape(int64_t b, int64_t h, int64_t m, int64_t n)
{
    return (kn_dnn_shape){ { b, h, m, n }, { h * m * n, m * n, n, 1 } };
}

static kn_dnn_shape strided(int64_t b, int64_t h, int64_t m, int64_t n, const int64_t s[3])
{
    return (kn_dnn_shape){ { b, h, m, n }, { s[0], s[1], s[2], 1 } };
}

static kn_dnn_shape transposed(kn_dnn_shape s)
{
    return (kn_dnn_shape){ { s.dim[0], s.dim[1], s.dim[3], s.dim[2] },
                           { s.stride[0], s.stride[1], s.stride[3], s.stride[2] } };
}

static kn_dnn_desc virtual(kn_dnn_graph *g, cudnnDataType_t t, kn_dnn_shape s)
{
    return kn_dnn_tensor(g, 0, t, KN_DNN_VIRTUAL, s);
}

static kn_dnn_desc real(kn_dnn_graph *g, int64_t id, cudnnDataType_t t, kn_dnn_shape s)
{
    return kn_dnn_tensor(g, id, t, KN_DNN_REAL, s);
}

/* A virtual f32 result of a pointwise operation on [b, h, m, n]. */
static kn_dnn_desc point(kn_dnn_graph *g, cudnnPointwiseMode_t mode, kn_dnn_shape s, kn_dnn_desc x,
                         kn_dnn_desc b)
{
    kn_dnn_desc y = virtual(g, F32, s);
    kn_dnn_pointwise(g, mode, F32, 0, x, b, NULL, y);
    return y;
}

static kn_dnn_desc product(kn_dnn_graph *g, kn_dnn_shape s, kn_dnn_desc a, kn_dnn_desc b)
{
    kn_dnn_desc c = virtual(g, F32, s);
    kn_dnn_matmul(g, a, b, c);
    return c;
}

/* The mask of dropout, drawn: 1 is kept. */
static kn_dnn_desc drawn(kn_dnn_graph *g, const problem *p)
{
    const kn_dnn_shape one = { { 1, 1, 1, 1 }, { 1, 1, 1, 1 } };
    kn_dnn_desc y = virtual(g, F32, shape(p->b, p->h, p->t, p->s));
    kn_dnn_bernoulli(g, 1 - p->dropout, real(g, ID_SEED, CUDNN_DATA_INT64, one),
                     real(g, ID_OFFSET, CUDNN_DATA_INT64, one), y);
    return y;
}

static kn_dnn_desc rows(kn_dnn_graph *g, cudnnReduceTensorOp_t op, const problem *p, kn_dnn_desc x)
{
    kn_dnn_desc y = virtual(g, F32, shape(p->b, p->h, p->t, 1));
    kn_dnn_reduce(g, op, x, y);
    return y;
}

/* x where key <= query, else -infinity. */
static kn_dnn_desc masked(kn_dnn_graph *g, const problem *p, kn_dnn_desc x)
{
    kn_dnn_shape all = shape(p->b, p->h, p->t, p->s);
    kn_dnn_desc row = virtual(g, CUDNN_DATA_INT32, all), col = virtual(g, CUDNN_DATA_INT32, all);
    kn_dnn_desc seen = virtual(g, CUDNN_DATA_BOOLEAN, all), y = virtual(g, F32, all);
    kn_dnn_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, F32, 2, x, NULL, NULL, row);
    kn_dnn_pointwise(g, CUDNN_POINTWISE_GEN_INDEX, F32, 3, x, NULL, NULL, col);
    kn_dnn_pointwise(g, CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, 0, row, col, NULL, seen);
    kn_dnn_pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, F32, 0, x,
                     kn_dnn_scalar(g, ID_MINUS_INFINITY), seen, y);
    return y;
}

/* ---- the graphs ------------------------------------------------------------------------------ */

/* o = dropout(softmax(scale q k^T + mask)) v, lse = max + log(sum(exp(x - max))) */
static void draw_forward(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.attention;
    cudnnDataType_t t = (cudnnDataType_t)p->type;
    kn_dnn_shape all = shape(p->b, p->h, p->t, p->s), one = shape(p->b, p->h, p->t, 1);
    kn_dnn_desc q = real(g, ID_Q, t, strided(p->b, p->h, p->t, p->d, p->q));
    kn_dnn_desc kt = real(g, ID_K, t, transposed(strided(p->b, p->g, p->s, p->d, p->k)));
    kn_dnn_desc v = real(g, ID_V, t, strided(p->b, p->g, p->s, p->d, p->v));
    kn_dnn_desc o = real(g, ID_O, t, strided(p->b, p->h, p->t, p->d, p->o));
    kn_dnn_desc lse = real(g, ID_LSE, F32, one);

    kn_dnn_desc x = product(g, all, q, kt);
    x = point(g, CUDNN_POINTWISE_MUL, all, x, kn_dnn_scalar(g, ID_SCALE));
    if (p->causal)
        x = masked(g, p, x);
    kn_dnn_desc most = rows(g, CUDNN_REDUCE_TENSOR_MAX, p, x);
    kn_dnn_desc e =
        point(g, CUDNN_POINTWISE_EXP, all, point(g, CUDNN_POINTWISE_SUB, all, x, most), NULL);
    kn_dnn_desc sum = rows(g, CUDNN_REDUCE_TENSOR_ADD, p, e);
    kn_dnn_pointwise(g, CUDNN_POINTWISE_ADD, F32, 0, most,
                     point(g, CUDNN_POINTWISE_LOG, one, sum, NULL), NULL, lse);
    kn_dnn_desc y = virtual(g, t, all);
    if (p->dropout > 0) {
        kn_dnn_desc kept = point(g, CUDNN_POINTWISE_MUL, all,
                                 point(g, CUDNN_POINTWISE_DIV, all, e, sum), drawn(g, p));
        kn_dnn_pointwise(g, CUDNN_POINTWISE_MUL, F32, 0, kept, kn_dnn_scalar(g, ID_KEPT_SCALE),
                         NULL, y);
    } else {
        kn_dnn_pointwise(g, CUDNN_POINTWISE_DIV, F32, 0, e, sum, NULL, y);
    }
    kn_dnn_matmul(g, y, v, o);
}

/* to = x y, summed over the heads of a group where groups are shared. */
static void group_product(kn_dnn_graph *g, const problem *p, kn_dnn_desc x, kn_dnn_desc y,
                          kn_dnn_desc to)
{
    if (p->h == p->g) {
        kn_dnn_matmul(g, x, y, to);
        return;
    }
    kn_dnn_desc each = virtual(g, (cudnnDataType_t)p->type, shape(p->b, p->h, p->s, p->d));
    kn_dnn_matmul(g, x, y, each);
    kn_dnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, each, to);
}

/* p = exp(scale q k^T - lse);  dv = (f p)^T do;  ds = scale p (f do v^T - rowsum(do o));
 * dq = ds k;  dk = ds^T q,  with the factors f of dropout: the mask m / keep, which stands before
 * the sum in brackets, so that within it are m do v^T - keep rowsum(do o) */
static void draw_backward(kn_dnn_graph *g, const kn_dnn_problem *whole)
{
    const problem *p = &whole->as.attention;
    cudnnDataType_t t = (cudnnDataType_t)p->type;
    kn_dnn_shape all = shape(p->b, p->h, p->t, p->s), one = shape(p->b, p->h, p->t, 1);
    kn_dnn_shape head = shape(p->b, p->h, p->t, p->d),
                 k_shape = strided(p->b, p->g, p->s, p->d, p->k);
    kn_dnn_shape turned = { { p->b, p->h, p->s, p->t },
                            { p->h * p->t * p->s, p->t * p->s, 1, p->s } };
    kn_dnn_desc q = real(g, ID_Q, t, strided(p->b, p->h, p->t, p->d, p->q));
    kn_dnn_desc kt = real(g, ID_K, t, transposed(k_shape));
    kn_dnn_desc vt = real(g, ID_V, t, transposed(strided(p->b, p->g, p->s, p->d, p->v)));
    kn_dnn_desc o = real(g, ID_O, t, strided(p->b, p->h, p->t, p->d, p->o));
    kn_dnn_desc dout = real(g, ID_DO, t, strided(p->b, p->h, p->t, p->d, p->dout));
    kn_dnn_desc dq = real(g, ID_DQ, t, strided(p->b, p->h, p->t, p->d, p->dq));
    kn_dnn_desc dk = real(g, ID_DK, t, strided(p->b, p->g, p->s, p->d, p->dk));
    kn_dnn_desc dv = real(g, ID_DV, t, strided(p->b, p->g, p->s, p->d, p->dv));
    kn_dnn_desc lse = real(g, ID_LSE, F32, one), row_sum = real(g, ID_ROW_SUM, F32, one);
    kn_dnn_desc scale = kn_dnn_scalar(g, ID_SCALE);

    kn_dnn_desc both = point(g, CUDNN_POINTWISE_MUL, head, dout, o);
    kn_dnn_pointwise(g, CUDNN_POINTWISE_MUL, F32, 0, rows(g, CUDNN_REDUCE_TENSOR_ADD, p, both),
                     kn_dnn_scalar(g, ID_KEEP), NULL, row_sum);

    kn_dnn_desc x = point(g, CUDNN_POINTWISE_MUL, all, product(g, all, q, kt), scale);
    x = point(g, CUDNN_POINTWISE_SUB, all, x, lse);
    if (p->causal)
        x = masked(g, p, x);
    kn_dnn_desc e = point(g, CUDNN_POINTWISE_EXP, all, x, NULL);
    kn_dnn_desc et = virtual(g, t, turned), kept = e;
    kn_dnn_desc mask = p->dropout > 0 ? drawn(g, p) : NULL;
    kn_dnn_desc kept_scale = mask ? kn_dnn_scalar(g, ID_KEPT_SCALE) : NULL;
    if (mask)
        kept = point(g, CUDNN_POINTWISE_MUL, all, point(g, CUDNN_POINTWISE_MUL, all, e, mask),
                     kept_scale);
    kn_dnn_reshape(g, kept, et);
    group_product(g, p, et, dout, dv);

    kn_dnn_desc ds = product(g, all, dout, vt);
    if (mask)
        ds = point(g, CUDNN_POINTWISE_MUL, all, ds, mask);
    ds = point(g, CUDNN_POINTWISE_SUB, all, ds, row_sum);
    ds = point(g, CUDNN_POINTWISE_MUL, all, ds, e);
    if (mask)
        ds = point(g, CUDNN_POINTWISE_MUL, all, ds, kept_scale);
    ds = point(g, CUDNN_POINTWISE_MUL, all, ds, scale);
    kn_dnn_desc dst = virtual(g, t, turned);
    kn_dnn_reshape(g, ds, dst);
    group_product(g, p, dst, q, dk);

    kn_dnn_desc k = virtual(g, t, k_shape);
    kn_dnn_reshape(g, kt, k);
    if (p->deterministic) {
        kn_dnn_matmul(g, ds, k, dq);
    } else {
        kn_dnn_desc sum = real(g, ID_DQ_SUM, F32, head);
        kn_dnn_matmul(g, ds, k, sum);
        kn_dnn_pointwise(g, CUDNN_POINTWISE_IDENTITY, F32, 0, sum, NULL, NULL, dq);
    }
}

/* ---- where they lie -------------------------------------------------------------------------- */

static void bind_common(kn_dnn_pack *b, const problem *p, const kn_array *const real[5],
                        double scale)
{
    for (int i = 0; i < 5; i++)
        kn_dnn_bind(b, ID_Q + i, real[i]->data);
    kn_dnn_bind_scalar(b, ID_SCALE, (float)scale);
    if (p->causal)
        kn_dnn_bind_scalar(b, ID_MINUS_INFINITY, -__builtin_inff());
    if (p->dropout > 0)
        kn_dnn_bind_scalar(b, ID_KEPT_SCALE, (float)(1 / (1 - p->dropout)));
}

static void bind_forward(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_attention_args *a = args;
    const kn_array *const real[5] = { &a->q, &a->k, &a->v, &a->o, &a->lse };
    bind_common(b, &whole->as.attention, real, a->scale);
    if (a->dropout_p > 0)
        kn_dnn_bind_draw(b, ID_SEED, ID_OFFSET, a->seed, a->seed_at, a->stream);
}

static void bind_inputs(kn_dnn_pack *b, const kn_dnn_problem *whole,
                        const kn_attention_grad_args *a)
{
    const problem *p = &whole->as.attention;
    const kn_array *const real[5] = { &a->q, &a->k, &a->v, &a->o, &a->lse };
    size_t rows_bytes = (size_t)(p->b * p->h * p->t) * sizeof(float);
    bind_common(b, p, real, a->scale);
    kn_dnn_bind_room(b, ID_ROW_SUM, rows_bytes);
    kn_dnn_bind_scalar(b, ID_KEEP, (float)(1 - p->dropout));
    if (!p->deterministic)
        kn_dnn_bind_room(b, ID_DQ_SUM, rows_bytes * (size_t)p->d);
    if (p->dropout > 0)
        kn_dnn_bind_draw(b, ID_SEED, ID_OFFSET, a->seed, a->seed_at, a->stream);
}

static void bind_backward(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_attention_grad_args *a = args;
    bind_inputs(b, whole, a);
    kn_dnn_bind(b, ID_DO, a->dout.data);
    kn_dnn_bind(b, ID_DQ, a->dq.data);
    kn_dnn_bind(b, ID_DK, a->dk.data);
    kn_dnn_bind(b, ID_DV, a->dv.data);
}

static void bind_dense(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_attention_grad_args *a = args;
    bind_inputs(b, whole, a);
    kn_dnn_bind_copy(b, ID_DO, &a->dout, dense(&a->dout), false);
    kn_dnn_bind_copy(b, ID_DQ, &a->dq, dense(&a->dq), true);
    kn_dnn_bind_copy(b, ID_DK, &a->dk, dense(&a->dk), true);
    kn_dnn_bind_copy(b, ID_DV, &a->dv, dense(&a->dv), true);
}

/* ---- what dropout needs ---------------------------------------------------------------------- */

static const kn_dnn_kernel *forward_needs(const void *args, int i, kn_kernel *k, kn_dnn_args *to)
{
    const kn_attention_args *a = args;
    if (a->dropout_p == 0 || i > 0)
        return NULL;
    *k = KN_K_ATTENTION_GRAD;
    to->attention_grad = (kn_attention_grad_args){ .dout = a->o,
                                                   .dq = a->q,
                                                   .dk = a->k,
                                                   .dv = a->v,
                                                   .o = a->o,
                                                   .lse = a->lse,
                                                   .q = a->q,
                                                   .k = a->k,
                                                   .v = a->v,
                                                   .mask = a->mask,
                                                   .causal = a->causal,
                                                   .window = a->window,
                                                   .dropout_p = a->dropout_p };
    return &kn_dnn_attention_backward_dense;
}

/* What the forward asked, again: the forward itself, and what that needs. */
static const kn_dnn_kernel *backward_needs(const void *args, int i, kn_kernel *k, kn_dnn_args *to)
{
    const kn_attention_grad_args *a = args;
    const kn_attention_args forward = { .o = a->o,
                                        .lse = a->lse,
                                        .q = a->q,
                                        .k = a->k,
                                        .v = a->v,
                                        .mask = a->mask,
                                        .causal = a->causal,
                                        .window = a->window,
                                        .dropout_p = a->dropout_p };
    if (a->dropout_p == 0)
        return NULL;
    if (i > 0)
        return forward_needs(&forward, i - 1, k, to);
    *k = KN_K_ATTENTION;
    to->attention = forward;
    return &kn_dnn_attention_forward;
}

const kn_dnn_kernel kn_dnn_attention_forward = {
    .describe = describe_forward,
    .draw = draw_forward,
    .bind = bind_forward,
    .needs = forward_needs,
};
const kn_dnn_kernel kn_dnn_attention_backward = {
    .describe = describe_backward,
    .draw = draw_backward,
    .bind = bind_backward,
    .parts = kn_dnn_attention_parts,
    .part = kn_dnn_attention_part,
    .needs = backward_needs,
};
const kn_dnn_kernel kn_dnn_attention_backward_dense = {
    .describe = describe_dense,
    .draw = draw_backward,
    .bind = bind_dense,
    .needs = backward_needs,
};
