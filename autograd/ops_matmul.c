/* autograd/ops_matmul.c: matrix products. Transposes are strides; a gradient is written straight
 * into its leaf's place, in that place's dtype. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

kn_array kn_transposed(kn_array a)
{
    int i = a.ndim - 2, j = a.ndim - 1;
    int64_t n = a.shape[i], s = a.stride[i];
    a.shape[i] = a.shape[j];
    a.stride[i] = a.stride[j];
    a.shape[j] = n;
    a.stride[j] = s;
    return a;
}

/* a with its leading dims stretched to those of out. */
static kn_array stretched(kn_array a, const kn_array *out)
{
    int64_t shape[KN_MAX_DIMS];
    memcpy(shape, out->shape, sizeof shape);
    shape[out->ndim - 2] = a.shape[a.ndim - 2];
    shape[out->ndim - 1] = a.shape[a.ndim - 1];
    return kn_array_expand(a, out->ndim, shape);
}

static bool product(kn_tensor *on, kn_array dst, kn_array a, kn_array b)
{
    return kn_product(on, dst, stretched(a, &dst), stretched(b, &dst));
}

/* Of matrices and vectors. */
static bool inner_fit(const kn_tensor *a, const kn_tensor *b)
{
    if (a->ndim < 1 || b->ndim < 1)
        return kn_fail("matmul: needs at least 1 dim on both sides: a is %s, b is %s", KN_SHOWN(a),
                       KN_SHOWN(b));
    const int64_t k = a->shape[a->ndim - 1], l = b->shape[b->ndim > 1 ? b->ndim - 2 : 0];
    return k == l || kn_fail("matmul: inner dims differ: a is %s, b is %s (%lld != %lld)",
                             KN_SHOWN(a), KN_SHOWN(b), (long long)k, (long long)l);
}

static bool matmul_shape(kn_op_call *c)
{
    const kn_tensor *a = c->in[0], *b = c->in[1];
    kn_spec *s = &c->spec[0];
    if (a->dtype != b->dtype || !kn_dtype_is_float(a->dtype))
        return kn_fail(
            "matmul: needs two float tensors of one dtype: a is %s, b is %s; kn_cast one",
            KN_SHOWN(a), KN_SHOWN(b));
    if (!inner_fit(a, b))
        return false;
    s->dtype = a->dtype;
    if (!kn_broadcast_shape(a->ndim - 2, a->shape, b->ndim - 2, b->shape, &s->ndim, s->shape) ||
        s->ndim + 2 > KN_MAX_DIMS)
        return kn_fail("matmul: leading dims don't broadcast: a is %s, b is %s", KN_SHOWN(a),
                       KN_SHOWN(b));
    s->shape[s->ndim++] = a->shape[a->ndim - 2];
    s->shape[s->ndim++] = b->shape[b->ndim - 1];
    return true;
}

static bool matmul_forward(kn_op_call *c)
{
    return product(c->out[0], kn_array_of(c->out[0]), kn_array_of(c->in[0]), kn_array_of(c->in[1]));
}

/* dst[..] = x @ y summed to input i's shape. */
static bool matmul_grad(kn_op_grad *g, int i, kn_array x, kn_array y)
{
    const kn_spec *s = &g->in_spec[i];
    kn_tensor *dy = g->dout[0];
    bool same = s->ndim == dy->ndim &&
                memcmp(s->shape, dy->shape, (size_t)(s->ndim - 2) * sizeof(int64_t)) == 0;
    kn_tensor *dst = same ? kn_grad_out(g, i) : NULL;
    if (!same) {
        int64_t shape[KN_MAX_DIMS];
        memcpy(shape, dy->shape, sizeof shape);
        shape[dy->ndim - 2] = s->shape[s->ndim - 2];
        shape[dy->ndim - 1] = s->shape[s->ndim - 1];
        dst = kn_empty(s->dtype, kn_device_of(dy), dy->ndim, shape);
    }
    if (!dst || !product(dst, kn_array_of(dst), x, y))
        return false;
    return same || (g->din[i] = kn_grad_unbroadcast(g, i, dst));
}

static bool matmul_backward(kn_op_grad *g)
{
    kn_array dy = kn_array_of(g->dout[0]), a = kn_array_of(g->in[0]), b = kn_array_of(g->in[1]);
    return (!g->want[0] || matmul_grad(g, 0, dy, kn_transposed(b))) && /* dA = dY B^T */
           (!g->want[1] || matmul_grad(g, 1, kn_transposed(a), dy));   /* dB = A^T dY */
}

KN_OP(kn_op_matmul, .name = "matmul", .save_in = 3, .shape = matmul_shape,
      .forward = matmul_forward, .backward = matmul_backward, .on_tape = kn_bilinear_on_tape);

/* A vector is a row on the left, a column on the right; the result lacks that dim. */
kn_tensor *kn_matmul(kn_tensor *a, kn_tensor *b)
{
    const bool good = kn_ok() && kn_check(a, "matmul") && kn_check(b, "matmul");
    const bool row = good && a->ndim < 2, column = good && b->ndim < 2;
    if (!good || ((row || column) && !inner_fit(a, b)))
        return NULL;
    kn_tensor *in[] = { row ? kn_unsqueeze(a, 0) : a, column ? kn_unsqueeze(b, 1) : b };
    kn_tensor *y = kn_apply1(&kn_op_matmul, 2, in, 0, NULL);
    if (y && column)
        y = kn_squeeze(y, KN_SHAPE(-1));
    return y && row ? kn_squeeze(y, KN_SHAPE(column ? -1 : -2)) : y;
}
