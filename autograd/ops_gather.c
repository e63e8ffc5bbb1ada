/* autograd/ops_gather.c: elements picked along a dim by an index of their own each, put there, or
 * added there; slices added by index. */
#include "autograd/operands.h"
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

/* index has x's number of dims and is no larger but in dim. */
static bool index_fits(const char *op, const kn_tensor *x, const kn_tensor *index, int dim)
{
    bool fits = index->ndim == x->ndim;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = d == dim || index->shape[d] <= x->shape[d];
    return kn_indices_are_whole(op, index) &&
           (fits || kn_fail("%s: the index is %s, x %s; it needs as many dims, none but dim %d "
                            "larger than x's",
                            op, KN_SHOWN(index), KN_SHOWN(x), dim));
}

/* ---- gather: y[i, j] = x[index[i, j], j] for dim 0 ------------------------------------------- */

static bool gather_shape(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    c->spec[0] = kn_spec_like(c->in[1]);
    c->spec[0].dtype = c->in[0]->dtype;
    return index_fits("gather", c->in[0], c->in[1], dim);
}

static bool gather_run(kn_tensor *y, kn_tensor *x, kn_tensor *index, int dim)
{
    return y &&
           KN_RUN(y, KN_K_GATHER,
                  ((kn_gather_args){ kn_array_of(y), kn_array_of(x), kn_array_of(index), dim }));
}

static bool gather_forward(kn_op_call *c)
{
    return gather_run(c->out[0], c->in[0], c->in[1], *(const int *)c->attr);
}

static bool gather_backward(kn_op_grad *g)
{
    const int dim = *(const int *)g->attr;
    kn_tensor *dx = kn_grad_sum(g, 0);
    return dx && KN_RUN(dx, KN_K_SCATTER,
                        ((kn_scatter_args){ kn_array_of(dx), kn_array_of(g->dout[0]),
                                            kn_array_of(g->in[1]), dim, true, NULL }));
}

KN_OP(kn_op_gather, .name = "gather", .attr_size = sizeof(int), .save_in = 2, .const_in = 2,
      .shape = gather_shape, .forward = gather_forward, .backward = gather_backward,
      .on_tape = kn_linear_on_tape);

kn_tensor *kn_gather(kn_tensor *x, int dim, kn_tensor *index)
{
    if (kn_is_number(x) && kn_is_number(index))
        return kn_number_of(kn_gather(kn_row_of(x), dim, kn_row_of(index)));
    int d = kn_dim("gather", x, dim);
    return d < 0 ? NULL : kn_apply1(&kn_op_gather, 2, (kn_tensor *[]){ x, index }, 0, &d);
}

kn_tensor *kn_take_along_dim(kn_tensor *x, kn_tensor *index, int dim)
{
    if (!kn_ok() || !kn_check(x, "take_along_dim") || !kn_check(index, "take_along_dim") ||
        !kn_indices_are_whole("take_along_dim", index))
        return NULL;
    const int d = kn_dim("take_along_dim", x, dim);
    if (d < 0)
        return NULL;
    int64_t to[KN_MAX_DIMS], of[KN_MAX_DIMS];
    bool fits = index->ndim == x->ndim;
    for (int i = 0; fits && i < x->ndim; i++) {
        const int64_t a = x->shape[i], b = index->shape[i];
        fits = i == d || a == b || a == 1 || b == 1;
        to[i] = i == d ? b : a == 1 ? b : a;
        of[i] = i == d ? a : to[i];
    }
    if (!fits)
        return kn_fail_null(
            "take_along_dim: x is %s, the index %s; they need as many dims, of equal sizes or 1 "
            "but in dim %d",
            KN_SHOWN(x), KN_SHOWN(index), d);
    kn_scope s = kn_scope_begin();
    kn_tensor *below = kn_lt(index, kn_number_like(index, 0)); /* those count from the end */
    index = kn_where(below, kn_add_scalar(index, (double)x->shape[d]), index);
    return kn_scope_result(s,
                           kn_gather(kn_expand(x, x->ndim, of), d, kn_expand(index, x->ndim, to)));
}

/* ---- scatter: y = x, then y[index[i, j], j] = src[i, j] (or +=) for dim 0 -------------------- */

typedef struct scatter_attr {
    int dim;
    bool add;
} scatter_attr;

static bool scatter_shape(kn_op_call *c)
{
    const scatter_attr *a = c->attr;
    const kn_tensor *x = c->in[0], *index = c->in[1], *src = c->in[2];
    if (!index_fits(c->op->name, x, index, a->dim))
        return false;
    c->spec[0] = kn_spec_like(x);
    return x->dtype == src->dtype ||
           kn_fail("%s: dtypes differ: x is %s, src %s; kn_cast one of them", c->op->name,
                   KN_SHOWN(x), KN_SHOWN(src));
}

static bool scatter_run(kn_tensor *y, kn_array src, kn_tensor *index, scatter_attr a)
{
    return KN_RUN(y, KN_K_SCATTER,
                  ((kn_scatter_args){ kn_array_of(y), src, kn_array_of(index), a.dim, a.add,
                                      a.add ? "scatter_add" : "scatter" }));
}

static bool scatter_forward(kn_op_call *c)
{
    return kn_grad_copy(c->out[0], c->in[0]) &&
           scatter_run(c->out[0], kn_array_of(c->in[2]), c->in[1], *(const scatter_attr *)c->attr);
}

/* Which elements of src stayed where several went to one place: each puts its position along dim
 * there, in the same order, and finds its own again. */
static kn_tensor *stayed(kn_tensor *index, const kn_tensor *y, int dim)
{
    kn_tensor *at = kn_arange(KN_I64, kn_device_of(index), index->shape[dim]);
    kn_tensor *position = kn_expand(kn_along(at, index->ndim, dim), index->ndim, index->shape);
    kn_tensor *last = kn_zeros(KN_I64, kn_device_of(index), y->ndim, y->shape);
    return position && last &&
                   scatter_run(last, kn_array_of(position), index, (scatter_attr){ dim, false })
               ? kn_eq(kn_gather(last, dim, index), position)
               : NULL;
}

/* dy without what came from src: 0 there. */
static bool scatter_grad_x(kn_op_grad *g, int dim)
{
    kn_tensor *dx = kn_empty_like(g->dout[0]),
              *zero = kn_zeros(g->dout[0]->dtype, kn_device_of(g->dout[0]), KN_SCALAR);
    if (!dx || !zero || !kn_grad_copy(dx, g->dout[0]))
        return false;
    g->din[0] = dx;
    kn_array none = kn_array_expand(kn_array_of(zero), g->in[1]->ndim, g->in[1]->shape);
    return scatter_run(dx, none, g->in[1], (scatter_attr){ dim, false });
}

static bool scatter_backward(kn_op_grad *g)
{
    const scatter_attr *a = g->attr;
    kn_tensor *dy = g->dout[0], *index = g->in[1];
    if (g->want[0] && a->add)
        g->din[0] = dy;
    else if (g->want[0] && !scatter_grad_x(g, a->dim))
        return false;
    if (!g->want[2])
        return true;
    kn_tensor *d = kn_empty(dy->dtype, kn_device_of(dy), index->ndim, index->shape);
    g->din[2] = d;
    if (!gather_run(d, dy, index, a->dim) || a->add)
        return kn_ok();
    g->din[2] = kn_where(stayed(index, dy, a->dim), d, kn_number_like(dy, 0));
    return g->din[2] != NULL;
}

KN_OP(kn_op_scatter, .name = "scatter", .attr_size = sizeof(scatter_attr), .save_in = 2,
      .const_in = 2, .shape = scatter_shape, .forward = scatter_forward,
      .backward = scatter_backward, .on_tape = kn_linear_on_tape);
KN_OP(kn_op_scatter_add, .name = "scatter_add", .attr_size = sizeof(scatter_attr), .save_in = 2,
      .const_in = 2, .shape = scatter_shape, .forward = scatter_forward,
      .backward = scatter_backward, .on_tape = kn_linear_on_tape);

/* The part of src in index's shape goes to x. */
static kn_tensor *scatter(const kn_op *op, kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src,
                          bool add)
{
    if (!kn_ok() || !kn_check(x, op->name) || !kn_check(index, op->name) ||
        !kn_check(src, op->name))
        return NULL;
    if (x->ndim == 0 && kn_is_number(index) && kn_is_number(src))
        return kn_number_of(scatter(op, kn_row_of(x), dim, kn_row_of(index), kn_row_of(src), add));
    scatter_attr a = { kn_dim(op->name, x, dim), add };
    if (a.dim < 0)
        return NULL;
    bool fits = src->ndim == index->ndim;
    for (int d = 0; fits && d < src->ndim; d++)
        fits = src->shape[d] >= index->shape[d];
    if (!fits)
        return kn_fail_null(
            "%s: src is %s, the index %s, for x %s; src needs as many dims as the index, none "
            "smaller",
            op->name, KN_SHOWN(src), KN_SHOWN(index), KN_SHOWN(x));
    for (int d = 0; src && d < index->ndim; d++)
        if (src->shape[d] > index->shape[d])
            src = kn_slice(src, d, 0, index->shape[d]);
    return kn_apply1(op, 3, (kn_tensor *[]){ x, index, src }, 0, &a);
}

kn_tensor *kn_scatter(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src)
{
    return scatter(&kn_op_scatter, x, dim, index, src, false);
}

kn_tensor *kn_scatter_add(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src)
{
    return scatter(&kn_op_scatter_add, x, dim, index, src, true);
}

kn_tensor *kn_one_hot(kn_tensor *index, int64_t classes)
{
    if (!kn_ok() || !kn_check(index, "one_hot") || !kn_indices_are_whole("one_hot", index))
        return NULL;
    if (classes == -1 && kn_numel(index) > 0) {
        kn_scope s = kn_scope_begin();
        classes = (int64_t)kn_item(kn_amax(index, 0, NULL, false)) + 1;
        kn_scope_end(s);
        if (!kn_ok())
            return NULL;
    }
    if (classes < 1 || index->ndim + 1 > KN_MAX_DIMS)
        return kn_fail_null(
            "one_hot: %lld classes for %s; at least 1 class and at most %d dims of the result",
            (long long)classes, KN_SHOWN(index), KN_MAX_DIMS);
    int64_t shape[KN_MAX_DIMS];
    const int n = index->ndim;
    const kn_device device = kn_device_of(index);
    memcpy(shape, index->shape, sizeof shape);
    shape[n] = classes;
    kn_scope s = kn_scope_begin();
    kn_tensor *y = kn_zeros(KN_I64, device, n + 1, shape), *at = kn_unsqueeze(index, -1);
    kn_tensor *ones = at ? kn_ones(KN_I64, device, n + 1, at->shape) : NULL;
    const bool ok = y && ones &&
                    KN_RUN(y, KN_K_SCATTER,
                           ((kn_scatter_args){ kn_array_of(y), kn_array_of(ones), kn_array_of(at),
                                               n, false, "one_hot" }));
    return kn_scope_result(s, ok ? y : NULL);
}

/* ---- index_add: y = x, then y[index[i], :] += src[i, :] for dim 0 ---------------------------- */

bool kn_slices_fit(const char *op, const kn_tensor *x, int dim, const kn_tensor *index,
                   const kn_tensor *src)
{
    bool fits = index->ndim == 1 && src->ndim == x->ndim && src->dtype == x->dtype;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = src->shape[d] == (d == dim ? index->shape[0] : x->shape[d]);
    return kn_indices_are_whole(op, index) &&
           (fits ||
            kn_fail("%s: x is %s, the index %s, src %s; the index has one dim, src a slice of x's "
                    "dtype along dim %d for each of its elements",
                    op, KN_SHOWN(x), KN_SHOWN(index), KN_SHOWN(src), dim));
}

static bool index_add_shape(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    c->spec[0] = kn_spec_like(c->in[0]);
    return kn_slices_fit("index_add", c->in[0], dim, c->in[1], c->in[2]);
}

static bool index_add_forward(kn_op_call *c)
{
    const int dim = *(const int *)c->attr;
    return kn_grad_copy(c->out[0], c->in[0]) &&
           KN_RUN(c->out[0], KN_K_INDEX_ADD,
                  ((kn_index_add_args){ kn_array_of(c->out[0]), kn_array_of(c->in[2]),
                                        kn_array_of(c->in[1]), dim }));
}

static bool index_add_backward(kn_op_grad *g)
{
    const int dim = *(const int *)g->attr;
    const kn_spec *src = &g->in_spec[2];
    if (g->want[0])
        g->din[0] = g->dout[0];
    if (!g->want[2])
        return true;
    kn_tensor *d = kn_empty(src->dtype, kn_device_of(g->dout[0]), src->ndim, src->shape);
    g->din[2] = d;
    return d && KN_RUN(d, KN_K_INDEX_SELECT,
                       ((kn_index_select_args){ kn_array_of(d), kn_array_of(g->dout[0]),
                                                kn_array_of(g->in[1]), dim }));
}

KN_OP(kn_op_index_add, .name = "index_add", .attr_size = sizeof(int), .save_in = 2, .const_in = 2,
      .shape = index_add_shape, .forward = index_add_forward, .backward = index_add_backward,
      .on_tape = kn_linear_on_tape);

kn_tensor *kn_index_add(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src)
{
    if (!kn_ok() || !kn_check(x, "index_add") || (index && !kn_check(index, "index_add")) ||
        (src && !kn_check(src, "index_add")))
        return NULL;
    if (x->ndim == 0)
        return kn_number_of(kn_index_add(kn_row_of(x), dim, kn_row_of(index), kn_row_of(src)));
    KN_OPERANDS(x, index, src);
    int d = kn_dim("index_add", x, dim);
    return d < 0 ? NULL : kn_apply1(&kn_op_index_add, 3, (kn_tensor *[]){ x, index, src }, 0, &d);
}
