/* kernels/cuda/cudnn/cudnn_attention.c: attention of bf16 and f16 by cuDNN's fused kernels, forward
 * and backward, as graphs of simple operations that the library recognises as flash attention (Dao,
 * arXiv:2307.08691). Its own kind of dropout isn't ours, so dropout, f32, f64 and odd head sizes go
 * to Knap's kernels; so do masks, windows, and causal attention of T != S, whose mask starts
 * elsewhere.
 *
 * The backward adds dQ with atomics, in an order that varies, unless bits must repeat
 * (kn_cuda_deterministic): then dQ is a product of its own, which stores T * S elements a head. So
 * that these fit, the batch is computed in parts; Knap's kernel takes T * S so large that one group
 * of heads doesn't fit. */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

uint64_t kn_dnn_attention_most = (uint64_t)1 << 30;
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
    ID_ONE
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
    if ((t != KN_BF16 && t != KN_F16) || dropout > 0 || q->ndim != 4 || lse->dtype != KN_F32)
        return false;
    p->b = q->shape[0], p->h = q->shape[1], p->t = q->shape[2], p->d = q->shape[3];
    p->g = k->shape[1], p->s = k->shape[2];
    p->type = t == KN_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
    p->causal = causal;
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

static bool describe_backward(kn_dnn_problem *whole, const void *args)
{
    const kn_attention_grad_args *a = args;
    problem *p = &whole->as.attention;
    kn_dtype t = a->q.dtype;
    if (a->mask.data || a->window ||
        !describe_common(p, &a->q, &a->k, &a->v, &a->lse, a->causal, a->dropout_p))
        return false;
    p->deterministic = kn_cuda_is_deterministic();
    whole->most = p->deterministic ? kn_dnn_attention_most + LITTLE : UINT64_MAX;
    return (p->d <= 128 || whole->arch == 90) && strides_of(&a->o, t, p->o) &&
           strides_of(&a->dout, t, p->dout) && strides_of(&a->dq, t, p->dq) &&
           strides_of(&a->dk, t, p->dk) && strides_of(&a->dv, t, p->dv);
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

/* o = softmax(scale q k^T + mask) v, lse = max + log(sum(exp(x - max))) */
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
    kn_dnn_pointwise(g, CUDNN_POINTWISE_DIV, F32, 0, e, sum, NULL, y);
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

/* p = exp(scale q k^T - lse);  dv = p^T do;  ds = scale p (do v^T - rowsum(do o));  dq = ds k;
 * dk = ds^T q */
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
                     kn_dnn_scalar(g, ID_ONE), NULL, row_sum);

    kn_dnn_desc x = point(g, CUDNN_POINTWISE_MUL, all, product(g, all, q, kt), scale);
    x = point(g, CUDNN_POINTWISE_SUB, all, x, lse);
    if (p->causal)
        x = masked(g, p, x);
    kn_dnn_desc e = point(g, CUDNN_POINTWISE_EXP, all, x, NULL);
    kn_dnn_desc et = virtual(g, t, turned);
    kn_dnn_reshape(g, e, et);
    group_product(g, p, et, dout, dv);

    kn_dnn_desc ds = point(g, CUDNN_POINTWISE_SUB, all, product(g, all, dout, vt), row_sum);
    ds = point(g, CUDNN_POINTWISE_MUL, all, ds, e);
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
}

static void bind_forward(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_attention_args *a = args;
    const kn_array *const real[5] = { &a->q, &a->k, &a->v, &a->o, &a->lse };
    bind_common(b, &whole->as.attention, real, a->scale);
}

static void bind_backward(kn_dnn_pack *b, const kn_dnn_problem *whole, const void *args)
{
    const kn_attention_grad_args *a = args;
    const problem *p = &whole->as.attention;
    const kn_array *const real[5] = { &a->q, &a->k, &a->v, &a->o, &a->lse };
    size_t rows_bytes = (size_t)(p->b * p->h * p->t) * sizeof(float);
    bind_common(b, p, real, a->scale);
    kn_dnn_bind(b, ID_DO, a->dout.data);
    kn_dnn_bind(b, ID_DQ, a->dq.data);
    kn_dnn_bind(b, ID_DK, a->dk.data);
    kn_dnn_bind(b, ID_DV, a->dv.data);
    kn_dnn_bind_room(b, ID_ROW_SUM, rows_bytes);
    kn_dnn_bind_scalar(b, ID_ONE, 1);
    if (!p->deterministic)
        kn_dnn_bind_room(b, ID_DQ_SUM, rows_bytes * (size_t)p->d);
}

/* ---- parts of a deterministic backward ------------------------------------------------------- */

/* Of a part: so many elements of the batch, and groups of heads of each. */
typedef struct cut {
    int64_t b, g;
} cut;

static int64_t rounded(int64_t n)
{
    return (n + 127) / 128 * 128;
}

/* What a group of heads takes of a plan's workspace: dS, and where heads share a group each one's
 * dK and dV. */
static int64_t group_bytes(const kn_attention_grad_args *a)
{
    int64_t heads = a->q.shape[1] / a->k.shape[1], s = rounded(a->k.shape[2]);
    int64_t head = rounded(a->q.shape[2]) * s + (heads > 1 ? 2 * s * rounded(a->q.shape[3]) : 0);
    return heads * head * 2;
}

static int64_t parts_of(int64_t n, int64_t each)
{
    return (n + each - 1) / each;
}

/* n in as few parts as fit, about equal. */
static int64_t even(int64_t n, int64_t fit)
{
    return parts_of(n, parts_of(n, fit < 1 ? 1 : fit));
}

static cut cut_of(const kn_attention_grad_args *a)
{
    int64_t b = a->q.shape[0], g = a->k.shape[1];
    int64_t fit = (int64_t)kn_dnn_attention_most / group_bytes(a); /* groups of heads */
    if (!kn_cuda_is_deterministic() || fit / g >= b)
        return (cut){ b, g };
    return fit >= g ? (cut){ even(b, fit / g), g } : (cut){ 1, even(g, fit) };
}

static int64_t parts(const void *args)
{
    const kn_attention_grad_args *a = args;
    cut c = cut_of(a);
    return parts_of(a->q.shape[0], c.b) * parts_of(a->k.shape[1], c.g);
}

/* x[b0 .. b0+b, h0 .. h0+h] */
static void narrow(kn_array *x, int64_t b0, int64_t b, int64_t h0, int64_t h)
{
    int64_t at = b0 * x->stride[0] + h0 * x->stride[1];
    x->data = (char *)x->data + at * (int64_t)kn_dtype_size(x->dtype);
    x->shape[0] = b, x->shape[1] = h;
}

static void part(const void *args, int64_t i, kn_dnn_args *to)
{
    const kn_attention_grad_args *a = args;
    kn_attention_grad_args *p = &to->attention_grad;
    kn_array *of_heads[] = { &p->q, &p->o, &p->lse, &p->dout, &p->dq };
    kn_array *of_groups[] = { &p->k, &p->v, &p->dk, &p->dv };
    int64_t b = a->q.shape[0], g = a->k.shape[1], heads = a->q.shape[1] / g;
    cut c = cut_of(a);
    int64_t across = parts_of(g, c.g), b0 = i / across * c.b, g0 = i % across * c.g;
    b = b - b0 < c.b ? b - b0 : c.b;
    g = g - g0 < c.g ? g - g0 : c.g;
    *p = *a;
    for (size_t k = 0; k < sizeof of_heads / sizeof *of_heads; k++)
        narrow(of_heads[k], b0, b, g0 * heads, g * heads);
    for (size_t k = 0; k < sizeof of_groups / sizeof *of_groups; k++)
        narrow(of_groups[k], b0, b, g0, g);
}

const kn_dnn_kernel kn_dnn_attention_forward = { describe_forward, draw_forward, bind_forward, NULL,
                                                 NULL };
const kn_dnn_kernel kn_dnn_attention_backward = { describe_backward, draw_backward, bind_backward,
                                                  parts, part };
