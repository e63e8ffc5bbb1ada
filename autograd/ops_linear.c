/* autograd/ops_linear.c: y = x W + b. Transposes are strides; a gradient is written straight into
 * its leaf's place, in that place's dtype. */
#include "autograd/ops.h"
#include "autograd/second.h"

typedef struct linear_attr {
    bool in_out;
} linear_attr;

bool kn_linear_fits(const char *op, const kn_tensor *x, const kn_tensor *w, const kn_tensor *b,
                    bool in_out)
{
    if (x->ndim < 1 || w->ndim != 2 || !kn_dtype_is_float(x->dtype) || x->dtype != w->dtype)
        return kn_fail("%s: needs x[..., in] and a 2-d weight of the same float dtype: x is %s, "
                       "weight is %s",
                       op, KN_SHOWN(x), KN_SHOWN(w));
    int64_t in = w->shape[in_out ? 0 : 1], out = w->shape[in_out ? 1 : 0];
    if (x->shape[x->ndim - 1] != in)
        return kn_fail("%s: x is %s, its last dim should be %lld for weight %s%s", op, KN_SHOWN(x),
                       (long long)in, KN_SHOWN(w),
                       in_out ? " stored [in, out]" : " stored [out, in]");
    return kn_vector_fits(op, "bias", b, out, x);
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
    kn_array w = kn_array_of(c->in[1]);
    return KN_RUN(c->out[0], KN_K_MATMUL,
                  ((kn_matmul_args){ .dst = kn_rows_of(c->out[0]),
                                     .a = kn_rows_of(c->in[0]),
                                     .b = l->in_out ? w : kn_transposed(w),
                                     .bias = kn_array_or_none(c->in[2]) }));
}

/* dX = dY W^T; where x = f(z) and nothing else sees dX, dZ = dX f'(z). */
static bool linear_grad_x(kn_op_grad *g, kn_array dy)
{
    const linear_attr *l = g->attr;
    kn_array w = kn_array_of(g->in[1]);
    kn_tensor *dx = kn_grad_out(g, 0);
    if (!dx)
        return false;
    kn_matmul_args p = { .dst = kn_rows_of(dx), .a = dy, .b = l->in_out ? kn_transposed(w) : w };
    kn_tensor *z = kn_grad_through(g, 0, &p.grad_of);
    p.x = z ? kn_rows_of(z) : p.x;
    return KN_RUN(dx, KN_K_MATMUL, p);
}

/* dW = X^T dY, and db, if it is wanted: both read dY. */
static bool linear_grad_w(kn_op_grad *g, kn_array dy, kn_tensor *db)
{
    const linear_attr *l = g->attr;
    kn_array x = kn_rows_of(g->in[0]);
    kn_tensor *dw = kn_grad_out(g, 1);
    return dw && KN_RUN(dw, KN_K_MATMUL,
                        ((kn_matmul_args){ .dst = kn_array_of(dw),
                                           .a = kn_transposed(l->in_out ? x : dy),
                                           .b = l->in_out ? dy : x,
                                           .sum = kn_array_or_none(db),
                                           .sum_of_b = l->in_out }));
}

/* db = sum of dY over rows (written for w[in, out]). */
static bool linear_backward(kn_op_grad *g)
{
    kn_tensor *dy_tensor = kn_contiguous(g->dout[0]);
    if (!dy_tensor)
        return false;
    kn_array dy = kn_rows_of(dy_tensor);
    if (g->want[0] && !linear_grad_x(g, dy))
        return false;
    if (!g->want[1])
        return !g->want[2] || kn_grad_bias(g, 2, dy);
    kn_tensor *db = g->want[2] ? kn_grad_out(g, 2) : NULL;
    return kn_ok() && linear_grad_w(g, dy, db);
}

KN_OP(kn_op_linear, .name = "linear", .attr_size = sizeof(linear_attr), .save_in = 3,
      .shape = linear_shape, .forward = linear_forward, .backward = linear_backward,
      .on_tape = kn_bilinear_on_tape);

kn_tensor *kn_linear_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, bool in_out)
{
    linear_attr l = { in_out };
    if (!kn_ok() || !kn_check(x, "linear") || !(x = kn_contiguous(x)))
        return NULL;
    return kn_apply1(&kn_op_linear, 3, (kn_tensor *[]){ x, w, bias }, 4, &l);
}
