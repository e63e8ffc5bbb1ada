/* autograd/ops_matmul.c: matrix products. Transposes are strides; a gradient is written straight
 * into its leaf's place, in that place's dtype. */
#include "autograd/ops.h"
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

static bool product(kn_tensor *on, kn_array dst, kn_array a, kn_array b, const kn_array *bias)
{
    kn_matmul_args args = { .dst = dst, .a = stretched(a, &dst), .b = stretched(b, &dst) };
    if (bias)
        args.bias = *bias;
    return KN_RUN(on, KN_K_MATMUL, args);
}

/* ---- matmul ---------------------------------------------------------------------------------- */

static bool matmul_shape(kn_op_call *c)
{
    const kn_tensor *a = c->in[0], *b = c->in[1];
    kn_spec *s = &c->spec[0];
    char da[128], db[128];
    kn_describe(a, da, sizeof da);
    kn_describe(b, db, sizeof db);
    if (a->ndim < 2 || b->ndim < 2)
        return kn_fail("matmul: needs at least 2 dims on both sides: a is %s, b is %s", da, db);
    if (a->dtype != b->dtype || !kn_dtype_is_float(a->dtype))
        return kn_fail(
            "matmul: needs two float tensors of one dtype: a is %s, b is %s; kn_cast one", da, db);
    int64_t k = a->shape[a->ndim - 1], m = a->shape[a->ndim - 2], n = b->shape[b->ndim - 1];
    if (k != b->shape[b->ndim - 2])
        return kn_fail("matmul: inner dims differ: a is %s, b is %s (%lld != %lld)", da, db,
                       (long long)k, (long long)b->shape[b->ndim - 2]);
    s->dtype = a->dtype;
    if (!kn_broadcast_shape(a->ndim - 2, a->shape, b->ndim - 2, b->shape, &s->ndim, s->shape) ||
        s->ndim + 2 > KN_MAX_DIMS)
        return kn_fail("matmul: leading dims don't broadcast: a is %s, b is %s", da, db);
    s->shape[s->ndim++] = m;
    s->shape[s->ndim++] = n;
    return true;
}

static bool matmul_forward(kn_op_call *c)
{
    return product(c->out[0], kn_array_of(c->out[0]), kn_array_of(c->in[0]), kn_array_of(c->in[1]),
                   NULL);
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
    if (!dst || !product(dst, kn_array_of(dst), x, y, NULL))
        return false;
    g->din[i] = same ? dst : kn_grad_unbroadcast(g, i, dst);
    return g->din[i] != NULL;
}

static bool matmul_backward(kn_op_grad *g)
{
    kn_array dy = kn_array_of(g->dout[0]), a = kn_array_of(g->in[0]), b = kn_array_of(g->in[1]);
    return (!g->want[0] || matmul_grad(g, 0, dy, kn_transposed(b))) && /* dA = dY B^T */
           (!g->want[1] || matmul_grad(g, 1, kn_transposed(a), dy));   /* dB = A^T dY */
}

KN_OP(kn_op_matmul, .name = "matmul", .save_in = 3, .shape = matmul_shape,
      .forward = matmul_forward, .backward = matmul_backward);

kn_tensor *kn_matmul(kn_tensor *a, kn_tensor *b)
{
    return kn_apply1(&kn_op_matmul, 2, (kn_tensor *[]){ a, b }, 0, NULL);
}

/* ---- linear ---------------------------------------------------------------------------------- */

typedef struct linear_attr {
    bool in_out;
} linear_attr;

bool kn_linear_fits(const char *op, const kn_tensor *x, const kn_tensor *w, const kn_tensor *b,
                    bool in_out)
{
    char dx[128], dw[128], db[128];
    kn_describe(x, dx, sizeof dx);
    kn_describe(w, dw, sizeof dw);
    if (x->ndim < 1 || w->ndim != 2 || !kn_dtype_is_float(x->dtype) || x->dtype != w->dtype)
        return kn_fail("%s: needs x[..., in] and a 2-d weight of the same float dtype: x is %s, "
                       "weight is %s",
                       op, dx, dw);
    int64_t in = w->shape[in_out ? 0 : 1], out = w->shape[in_out ? 1 : 0];
    if (x->shape[x->ndim - 1] != in)
        return kn_fail("%s: x is %s, its last dim should be %lld for weight %s%s", op, dx,
                       (long long)in, dw, in_out ? " stored [in, out]" : " stored [out, in]");
    if (b && (b->ndim != 1 || b->shape[0] != out || (b->dtype != x->dtype && b->dtype != KN_F32)))
        return kn_fail("%s: bias is %s, should be [%lld] in x's dtype or f32", op,
                       kn_describe(b, db, sizeof db), (long long)out);
    return true;
}

static bool linear_shape(kn_op_call *c)
{
    const linear_attr *l = c->attr;
    const kn_tensor *x = c->in[0], *w = c->in[1];
    if (!kn_linear_fits(c->op->name, x, w, c->in[2], l->in_out))
        return false;
    c->spec[0] = kn_spec_like(x);
    c->spec[0].shape[x->ndim - 1] = w->shape[l->in_out ? 1 : 0];
    return true;
}

static bool linear_forward(kn_op_call *c)
{
    const linear_attr *l = c->attr;
    kn_array w = kn_array_of(c->in[1]), bias;
    if (c->in[2])
        bias = kn_array_of(c->in[2]);
    return product(c->out[0], kn_rows_of(c->out[0]), kn_rows_of(c->in[0]),
                   l->in_out ? w : kn_transposed(w), c->in[2] ? &bias : NULL);
}

/* dX = dY W^T, dW = X^T dY, db = sum of dY over rows (written for w[in, out]). */
static bool linear_backward(kn_op_grad *g)
{
    const linear_attr *l = g->attr;
    kn_tensor *dy_tensor = kn_contiguous(g->dout[0]);
    if (!dy_tensor)
        return false;
    kn_array dy = kn_rows_of(dy_tensor);
    if (g->want[0]) {
        kn_array w = kn_array_of(g->in[1]);
        kn_tensor *dx = kn_grad_out(g, 0);
        if (!dx || !product(dx, kn_rows_of(dx), dy, l->in_out ? kn_transposed(w) : w, NULL))
            return false;
        g->din[0] = dx;
    }
    if (g->want[1]) {
        kn_array x = kn_rows_of(g->in[0]);
        kn_tensor *dw = kn_grad_out(g, 1);
        if (!dw || !(l->in_out ? product(dw, kn_array_of(dw), kn_transposed(x), dy, NULL)
                               : product(dw, kn_array_of(dw), kn_transposed(dy), x, NULL)))
            return false;
        g->din[1] = dw;
    }
    if (g->want[2]) {
        kn_tensor *db = kn_grad_out(g, 2);
        if (!db)
            return false;
        kn_array d =
            kn_array_make(kn_array_of(db).data, db->dtype, 2, (int64_t[]){ 1, db->shape[0] });
        if (!KN_RUN(db, KN_K_REDUCE, ((kn_reduce_args){ d, dy, KN_SUM })))
            return false;
        g->din[2] = db;
    }
    return true;
}

KN_OP(kn_op_linear, .name = "linear", .attr_size = sizeof(linear_attr), .save_in = 3,
      .shape = linear_shape, .forward = linear_forward, .backward = linear_backward);

kn_tensor *kn_linear_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, bool in_out)
{
    linear_attr l = { in_out };
    if (!kn_ok() || !kn_check(x, "linear") || !(x = kn_contiguous(x)))
        return NULL;
    return kn_apply1(&kn_op_linear, 3, (kn_tensor *[]){ x, w, bias }, 4, &l);
}
