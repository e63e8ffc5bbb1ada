/* autograd/ops_sort.c: the order of elements along a dim, and their running sums. */
#include "autograd/ops.h"
#include "autograd/second.h"

/* ---- sort and topk: outputs values, indices -------------------------------------------------- */

typedef struct sort_attr {
    int dim;
    int64_t k;
    bool descending;
} sort_attr;

static bool sort_shape(kn_op_call *c)
{
    const sort_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    if (!kn_dtype_is_float(x->dtype) && !kn_dtype_is_int(x->dtype))
        return kn_fail("%s: dtype %s has no order here; kn_cast it first", c->op->name,
                       kn_dtype_name(x->dtype));
    if (a->k < 0 || a->k > x->shape[a->dim])
        return kn_fail("%s: k is %lld, should lie in [0, %lld], the size of dim %d", c->op->name,
                       (long long)a->k, (long long)x->shape[a->dim], a->dim);
    c->spec[0] = kn_spec_like(x);
    c->spec[0].shape[a->dim] = a->k;
    c->spec[1] = c->spec[0];
    c->spec[1].dtype = KN_I64;
    return true;
}

static bool sort_forward(kn_op_call *c)
{
    const sort_attr *a = c->attr;
    return KN_RUN(c->out[0], KN_K_SORT,
                  ((kn_sort_args){ kn_array_of(c->out[0]), kn_array_of(c->out[1]),
                                   kn_array_of(c->in[0]), a->dim, a->descending }));
}

/* No place takes two. */
static bool sort_backward(kn_op_grad *g)
{
    const sort_attr *a = g->attr;
    if (!g->dout[0])
        return true;
    kn_tensor *dx = kn_grad_zeros(g, 0);
    return dx && KN_RUN(dx, KN_K_SCATTER,
                        ((kn_scatter_args){ kn_array_of(dx), kn_array_of(g->dout[0]),
                                            kn_array_of(g->out[1]), a->dim, true }));
}

static bool sort_composed(kn_op_grad *g, kn_tensor **y)
{
    y[0] = kn_gather(g->in[0], ((const sort_attr *)g->attr)->dim, g->out[1]);
    return y[0] != NULL;
}

KN_OP(kn_op_sort, .name = "sort", .attr_size = sizeof(sort_attr), .save_out = 2,
      .shape = sort_shape, .forward = sort_forward, .backward = sort_backward,
      .on_tape = kn_composed_on_tape, .composed = sort_composed);
KN_OP(kn_op_topk, .name = "topk", .attr_size = sizeof(sort_attr), .save_out = 2,
      .shape = sort_shape, .forward = sort_forward, .backward = sort_backward,
      .on_tape = kn_composed_on_tape, .composed = sort_composed);

/* k NULL: all of dim. */
static kn_tensor *sort(const kn_op *op, kn_tensor *x, int dim, const int64_t *k, bool descending,
                       kn_tensor **indices)
{
    kn_tensor *out[2] = { NULL };
    if (indices)
        *indices = NULL;
    if (kn_is_number(x)) {
        kn_tensor *y = kn_number_of(sort(op, kn_row_of(x), dim, k, descending, indices));
        if (indices)
            *indices = kn_number_of(*indices);
        return y;
    }
    sort_attr a = { .dim = kn_dim(op->name, x, dim), .descending = descending };
    if (a.dim < 0)
        return NULL;
    a.k = k ? *k : x->shape[a.dim];
    if (!kn_apply(op, 1, &x, 0, &a, 2, out))
        return NULL;
    if (indices)
        *indices = out[1];
    return out[0];
}

kn_tensor *kn_sort_(kn_tensor *x, int dim, kn_sort_options o)
{
    return sort(&kn_op_sort, x, dim, NULL, o.descending, o.indices);
}

kn_tensor *kn_argsort(kn_tensor *x, int dim, bool descending)
{
    if (!kn_is_number(x) && kn_dim("argsort", x, dim) < 0)
        return NULL;
    kn_tensor *indices;
    kn_scope s = kn_scope_begin();
    sort(&kn_op_sort, kn_detach(x), dim, NULL, descending, &indices);
    return kn_scope_result(s, indices);
}

kn_tensor *kn_topk_(kn_tensor *x, int64_t k, int dim, kn_topk_options o)
{
    return sort(&kn_op_topk, x, dim, &k, !o.smallest, o.indices);
}

/* ---- cumsum: y[j] = sum over i <= j of x[i] -------------------------------------------------- */

static bool cumsum_shape(kn_op_call *c)
{
    const kn_tensor *x = c->in[0];
    const bool whole = kn_dtype_is_int(x->dtype);
    c->spec[0] = kn_spec_like(x);
    c->spec[0].dtype = whole ? KN_I64 : x->dtype;
    return whole || kn_dtype_is_float(x->dtype) ||
           kn_fail("cumsum: dtype %s has no sums; kn_cast it first", kn_dtype_name(x->dtype));
}

static bool cumsum(kn_tensor *y, kn_tensor *x, const void *attr, bool back)
{
    const int dim = *(const int *)attr;
    return KN_RUN(y, KN_K_CUMSUM, ((kn_cumsum_args){ kn_array_of(y), kn_array_of(x), dim, back }));
}

KN_OP(kn_op_cumsum, .name = "cumsum", .attr_size = sizeof(int), .shape = cumsum_shape,
      KN_MAP(cumsum), .on_tape = kn_linear_on_tape);

kn_tensor *kn_cumsum(kn_tensor *x, int dim)
{
    if (kn_is_number(x))
        return kn_number_of(kn_cumsum(kn_row_of(x), dim));
    int d = kn_dim("cumsum", x, dim);
    return d < 0 ? NULL : kn_apply1(&kn_op_cumsum, 1, &x, 0, &d);
}
