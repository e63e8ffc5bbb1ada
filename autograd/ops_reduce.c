/* autograd/ops_reduce.c: sums, means, extrema over dims, and undoing a broadcast. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

typedef struct reduce_attr {
    kn_reduce_kind kind;
    uint32_t dims; /* bit d: dim d is reduced */
    bool keep;
} reduce_attr;

static bool reduce_shape(kn_op_call *c)
{
    const reduce_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    bool is_float = kn_dtype_is_float(x->dtype);
    if (!is_float && a->kind == KN_MEAN)
        return kn_fail("mean: needs a float tensor, got %s; kn_cast it first",
                       kn_dtype_name(x->dtype));
    kn_spec *s = &c->spec[0];
    s->dtype = a->kind == KN_ARGMAX || (!is_float && a->kind == KN_SUM) ? KN_I64 : x->dtype;
    s->ndim = 0;
    for (int d = 0; d < x->ndim; d++) {
        if (!(a->dims >> d & 1))
            s->shape[s->ndim++] = x->shape[d];
        else if (a->keep)
            s->shape[s->ndim++] = 1;
        if ((a->dims >> d & 1) && x->shape[d] == 0 && a->kind != KN_SUM && a->kind != KN_MEAN)
            return kn_fail("%s: dim %d has size 0, so it has no extremum", c->op->name, d);
    }
    return true;
}

/* t's array seen with x's rank: size 1, stride 0 in the reduced dims. */
static kn_array with_reduced_dims(const kn_tensor *t, const int64_t *shape, int ndim, uint32_t dims,
                                  bool keep)
{
    kn_array a = kn_array_of(t), r = a;
    r.ndim = ndim;
    for (int d = 0, k = 0; d < ndim; d++) {
        bool reduced = dims >> d & 1;
        r.shape[d] = reduced ? 1 : shape[d];
        r.stride[d] = reduced ? 0 : a.stride[k];
        k += !reduced || keep;
    }
    return r;
}

static bool reduce_forward(kn_op_call *c)
{
    const reduce_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    kn_array y = with_reduced_dims(c->out[0], x->shape, x->ndim, a->dims, a->keep);
    return KN_RUN(x, KN_K_REDUCE, ((kn_reduce_args){ y, kn_array_of(x), a->kind }));
}

static bool sum_backward(kn_op_grad *g)
{
    const reduce_attr *a = g->attr;
    const kn_spec *x = &g->in_spec[0];
    kn_tensor *dx = kn_grad_in_order(g, 0);
    if (!dx)
        return false;
    kn_array dy = with_reduced_dims(g->dout[0], x->shape, x->ndim, a->dims, a->keep);
    dy = kn_array_expand(dy, x->ndim, x->shape);
    double n = kn_count_of(x->ndim, x->shape, a->dims);
    if (a->kind == KN_SUM || n == 0 || kn_dtype_size(dx->dtype) != kn_dtype_size(g->dout[0]->dtype))
        return KN_RUN(dx, KN_K_COPY, ((kn_copy_args){ kn_array_of(dx), dy }));
    return KN_RUN(dx, KN_K_UNARY, ((kn_unary_args){ kn_array_of(dx), dy, KN_AFFINE, 1 / n, 0 }));
}

#define REDUCE_OP(id, SAVE_IN, SAVE_OUT, BACKWARD, ON_TAPE)                                        \
    KN_OP(kn_op_##id, .name = #id, .attr_size = sizeof(reduce_attr), .save_in = (SAVE_IN),         \
          .save_out = (SAVE_OUT), .shape = reduce_shape, .forward = reduce_forward,                \
          .backward = BACKWARD, .on_tape = ON_TAPE)
REDUCE_OP(sum, 0, 0, sum_backward, kn_linear_on_tape);
REDUCE_OP(mean, 0, 0, sum_backward, kn_linear_on_tape);

/* t, a result, with a dim of size 1 for each that was reduced. */
static kn_tensor *with_all_dims(const kn_op_grad *g, kn_tensor *t)
{
    const reduce_attr *a = g->attr;
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < g->in_spec[0].ndim; d++)
        shape[d] = a->dims >> d & 1 ? 1 : g->in_spec[0].shape[d];
    return kn_view(t, g->in_spec[0].ndim, shape);
}

/* Each of the k equal extrema of a row gets dy / k. */
static bool extremum_backward(kn_op_grad *g)
{
    const reduce_attr *a = g->attr, count = { KN_SUM, a->dims, true };
    kn_tensor *x = g->in[0], *won = kn_cast(kn_eq(x, with_all_dims(g, g->out[0])), x->dtype);
    kn_tensor *ties = kn_apply1(&kn_op_sum, 1, &won, 0, &count);
    g->din[0] = kn_mul(won, kn_div(with_all_dims(g, g->dout[0]), ties));
    return g->din[0] != NULL;
}

REDUCE_OP(max, 1, 1, extremum_backward, extremum_backward);
REDUCE_OP(min, 1, 1, extremum_backward, extremum_backward);
REDUCE_OP(argmax, 0, 0, NULL, NULL);

static kn_tensor *reduce(const kn_op *op, kn_tensor *x, kn_reduce_kind kind, int n,
                         const int64_t *dims, bool keep)
{
    reduce_attr a = { .kind = kind, .keep = keep };
    return kn_dims(op->name, x, n, dims, &a.dims) ? kn_apply1(op, 1, &x, 0, &a) : NULL;
}

kn_tensor *kn_sum(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    return reduce(&kn_op_sum, x, KN_SUM, n, dims, keep);
}

kn_tensor *kn_mean(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    return reduce(&kn_op_mean, x, KN_MEAN, n, dims, keep);
}

kn_tensor *kn_amax(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    return reduce(&kn_op_max, x, KN_MAX, n, dims, keep);
}

kn_tensor *kn_amin(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    return reduce(&kn_op_min, x, KN_MIN, n, dims, keep);
}

kn_tensor *kn_argmax(kn_tensor *x, int dim)
{
    return reduce(&kn_op_argmax, x, KN_ARGMAX, 1, (int64_t[]){ dim }, false);
}

/* t summed to the shape of x, by operations. */
static kn_tensor *unbroadcast(kn_tensor *t, const kn_spec *x)
{
    reduce_attr a = { .kind = KN_SUM, .keep = true };
    const int lead = t->ndim - x->ndim;
    for (int d = 0; d < t->ndim; d++)
        if (d < lead || x->shape[d - lead] != t->shape[d])
            a.dims |= 1u << d;
    return kn_reshape(kn_apply1(&kn_op_sum, 1, &t, 0, &a), x->ndim, x->shape);
}

/* The gradient of a broadcast input: summed over the dims that were stretched. */
kn_tensor *kn_grad_unbroadcast(kn_op_grad *g, int i, kn_tensor *t)
{
    if (!t)
        return NULL;
    const kn_spec *x = &g->in_spec[i];
    int lead = t->ndim - x->ndim;
    bool same = lead == 0 && memcmp(t->shape, x->shape, (size_t)t->ndim * sizeof(int64_t)) == 0;
    if (same)
        return t;
    if (kn_grad_mode())
        return unbroadcast(t, x);
    kn_tensor *dx = kn_grad_out(g, i);
    if (!dx)
        return NULL;
    kn_array y = kn_array_of(dx), r = y;
    r.ndim = t->ndim;
    for (int d = 0; d < t->ndim; d++) {
        r.shape[d] = d < lead ? 1 : x->shape[d - lead];
        r.stride[d] = d < lead ? 0 : y.stride[d - lead];
    }
    return KN_RUN(dx, KN_K_REDUCE, ((kn_reduce_args){ r, kn_array_of(t), KN_SUM })) ? dx : NULL;
}
