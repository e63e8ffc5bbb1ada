/* kernels/cuda/cudnn/cudnn_attention_parts.c: the backward of attention where bits must repeat
 * (kn_cuda_deterministic): then dQ is a product of its own, which stores T * S elements a head. So
 * that these fit, the batch is computed in parts; Knap's kernel takes T * S so large that one group
 * of heads doesn't fit, and, with dropout, what needs parts: a part would draw other elements. */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

uint64_t kn_dnn_attention_most = (uint64_t)1 << 30;

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

int64_t kn_dnn_attention_parts(const void *args)
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

void kn_dnn_attention_part(const void *args, int64_t i, kn_dnn_args *to)
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
