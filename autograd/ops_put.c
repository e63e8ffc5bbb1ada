/* autograd/ops_put.c: elements put and found by indices of several dims, masks, or their order;
 * made of other operations. */
#include "autograd/losses.h"
#include "autograd/operands.h"
#include <math.h>

/* Indices into adjacent dims of x: for each element of the indices, which broadcast, the row-major
 * place `at` in those dims, which are one of size `all`. */
typedef struct indexed {
    kn_tensor *x; /* with all indexed dims in front, in order, where they aren't adjacent */
    int order[KN_MAX_DIMS];
    int dim, dims; /* the first of them, their number */
    kn_tensor *at;
    int64_t all;
} indexed;

/* Negative indices count from the end. Where one is outside, so is the place, as kernels say. */
static bool find_places(indexed *r, kn_tensor *const *index)
{
    kn_tensor *at = NULL, *inside = NULL;
    int64_t step = 1;
    for (int d = r->dims - 1; d >= 0; step *= r->x->shape[r->dim + d--]) {
        const int64_t size = r->x->shape[r->dim + d];
        kn_tensor *i = kn_cast(index[d], KN_I64), *zero = kn_number_like(i, 0);
        i = kn_where(kn_lt(i, zero), kn_add_scalar(i, (double)size), i);
        kn_tensor *holds =
            kn_logical_and(kn_ge(i, zero), kn_lt(i, kn_add_scalar(zero, (double)size)));
        i = kn_scale(i, (double)step);
        at = at ? kn_add(at, i) : i;
        inside = inside ? kn_logical_and(inside, holds) : holds;
    }
    r->all = step;
    r->at = kn_where(inside, at, kn_number_like(at, (double)step));
    return r->at != NULL;
}

/* The index of each dim of x, NULL for a whole one; a mask becomes those of its places. */
static bool by_dim(const char *op, const kn_tensor *x, int n, kn_tensor *const *index,
                   kn_tensor *out[KN_MAX_DIMS])
{
    int dim = 0;
    if (!index)
        return kn_fail("%s: the indices are NULL (x is %s)", op, KN_SHOWN(x));
    for (int i = 0; i < n; i++) {
        kn_tensor *t = index[i];
        if (t && !kn_check(t, op))
            return false;
        const bool mask = t && t->dtype == KN_BOOL;
        const int dims = mask ? t->ndim : 1;
        bool fits = dim + dims <= x->ndim && dims > 0;
        for (int d = 0; mask && fits && d < dims; d++)
            fits = t->shape[d] == x->shape[dim + d];
        if (!fits)
            return kn_fail(
                "%s: index %d is %s, for dim %d of x %s; needs at most an index for each "
                "dim of x, and masks of the sizes of their dims",
                op, i, t ? KN_SHOWN(t) : "NULL", dim, KN_SHOWN(x));
        if (t && !mask && !kn_indices_are_whole(op, t))
            return false;
        kn_tensor *places = mask ? kn_nonzero(t) : NULL;
        for (int d = 0; d < dims; d++)
            out[dim++] = mask ? kn_select(places, 1, d) : t;
    }
    return kn_ok();
}

static bool index_of(const char *op, kn_tensor *x, int n, kn_tensor *const *index, indexed *r)
{
    kn_tensor *of[KN_MAX_DIMS] = { NULL }, *given[KN_MAX_DIMS];
    int64_t order[KN_MAX_DIMS];
    int count = 0, first = -1, last = -1;
    if (!by_dim(op, x, n, index, of))
        return false;
    for (int pass = 0; pass < 2; pass++)
        for (int d = 0; d < x->ndim; d++) {
            if ((of[d] != NULL) == (pass == 1))
                continue;
            if (of[d]) {
                given[r->dims++] = of[d];
                first = first < 0 ? d : first;
                last = d;
            }
            r->order[d] = count;
            order[count++] = d;
        }
    if (first < 0)
        return kn_fail("%s: %d indices, none of a dim of x %s; needs one at least", op, n,
                       KN_SHOWN(x));
    const bool adjacent = last - first + 1 == r->dims;
    r->dim = adjacent ? first : 0;
    r->x = adjacent ? x : kn_permute(x, x->ndim, order);
    if (!r->x || !find_places(r, given))
        return false;
    return r->at->ndim + x->ndim - r->dims <= KN_MAX_DIMS ||
           kn_fail("%s: indices %s for x %s: the result of indexing has more than %d dims", op,
                   KN_SHOWN(r->at), KN_SHOWN(x), KN_MAX_DIMS);
}

/* r's x, or with places in its place such a tensor, where dims[n] stand for the indexed ones. */
static int with_dims(const indexed *r, int n, const int64_t *dims, int64_t shape[KN_MAX_DIMS])
{
    int ndim = 0;
    for (int d = 0; d < r->dim; d++)
        shape[ndim++] = r->x->shape[d];
    for (int d = 0; d < n; d++)
        shape[ndim++] = dims[d];
    for (int d = r->dim + r->dims; d < r->x->ndim; d++)
        shape[ndim++] = r->x->shape[d];
    return ndim;
}

/* r's x with the indexed dims as one. */
static kn_tensor *merged(const indexed *r)
{
    int64_t shape[KN_MAX_DIMS];
    const int ndim = with_dims(r, 1, &r->all, shape);
    return kn_reshape(r->x, ndim, shape);
}

/* index[count] as an index of src's shape, the same for whole slices along dim. */
static kn_tensor *for_slices(kn_tensor *index, int dim, const kn_tensor *src)
{
    return kn_expand(kn_along(index, src->ndim, dim), src->ndim, src->shape);
}

kn_tensor *kn_index(kn_tensor *x, int n, kn_tensor *const *index)
{
    if (!kn_ok() || !kn_check(x, "index"))
        return NULL;
    kn_scope s = kn_scope_begin();
    indexed r = { 0 };
    kn_tensor *y = NULL;
    if (index_of("index", x, n, index, &r)) {
        int64_t shape[KN_MAX_DIMS];
        const int ndim = with_dims(&r, r.at->ndim, r.at->shape, shape);
        y = kn_index_select(merged(&r), r.dim, kn_reshape(r.at, KN_SHAPE(kn_numel(r.at))));
        y = kn_reshape(y, ndim, shape);
    }
    return kn_scope_result(s, y);
}

/* r's x with values at its places, in the shape of x. */
static kn_tensor *put(const indexed *r, const kn_tensor *x, kn_tensor *values, bool accumulate)
{
    int64_t shape[KN_MAX_DIMS], back[KN_MAX_DIMS];
    int ndim = with_dims(r, r->at->ndim, r->at->shape, shape);
    values = kn_expand(values, ndim, shape);
    const int64_t count = kn_numel(r->at);
    ndim = with_dims(r, 1, &count, shape);
    kn_tensor *into = merged(r), *from = kn_reshape(values, ndim, shape);
    kn_tensor *at = kn_reshape(r->at, 1, &count);
    if (!into || !from || !at)
        return NULL;
    kn_tensor *y = accumulate ? kn_index_add(into, r->dim, at, from)
                              : kn_scatter(into, r->dim, for_slices(at, r->dim, from), from);
    y = kn_reshape(y, x->ndim, r->x->shape);
    for (int d = 0; d < x->ndim; d++)
        back[d] = r->order[d];
    return r->x == x || !y ? y : kn_permute(y, x->ndim, back);
}

kn_tensor *kn_index_put(kn_tensor *x, int n, kn_tensor *const *index, kn_tensor *values,
                        bool accumulate)
{
    indexed r = { 0 };
    if (!kn_ok() || !kn_check(x, "index_put") || !kn_check(values, "index_put"))
        return NULL;
    KN_OPERANDS(x, values);
    if (values->dtype != x->dtype)
        return kn_fail_null("index_put: values %s for x %s; needs values of x's dtype",
                            KN_SHOWN(values), KN_SHOWN(x));
    kn_scope s = kn_scope_begin();
    const bool good = index_of("index_put", x, n, index, &r);
    return kn_scope_result(s, good ? put(&r, x, values, accumulate) : NULL);
}

kn_tensor *kn_index_copy(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src)
{
    const char *op = "index_copy";
    if (!kn_ok() || !kn_check(x, op) || !kn_check(index, op) || !kn_check(src, op))
        return NULL;
    KN_OPERANDS(x, index, src);
    if ((dim = kn_dim(op, x, dim)) < 0 || !kn_slices_fit(op, x, dim, index, src))
        return NULL;
    kn_scope s = kn_scope_begin();
    return kn_scope_result(s, kn_scatter(x, dim, for_slices(index, dim, src), src));
}

kn_tensor *kn_masked_scatter(kn_tensor *x, kn_tensor *mask, kn_tensor *src)
{
    const char *op = "masked_scatter";
    if (!kn_ok() || !kn_check(x, op) || !kn_check(mask, op) || !kn_check(src, op))
        return NULL;
    KN_OPERANDS(x, mask, src);
    const int64_t all = -1;
    const bool empty = kn_numel(src) == 0; /* a mask that takes nothing fits: its places read a 0 */
    if (mask->dtype != KN_BOOL || src->dtype != x->dtype)
        return kn_fail_null(
            "%s: x is %s, the mask %s, src %s; the mask must be bool and src of x's "
            "dtype",
            op, KN_SHOWN(x), KN_SHOWN(mask), KN_SHOWN(src));
    kn_scope s = kn_scope_begin();
    mask = kn_expand(mask, x->ndim, x->shape);
    kn_tensor *flat = kn_reshape(mask, 1, &all), *at = kn_cumsum(flat, 0);
    at = kn_where(flat, kn_add_scalar(at, empty - 1), kn_number_like(at, 0));
    src = kn_reshape(src, 1, &all);
    src = empty ? kn_pad(src, KN_PAD_CONSTANT, 0, 2, (int64_t[]){ 0, 1 }) : src;
    kn_tensor *from = kn_index_select(src, 0, at);
    return kn_scope_result(s, kn_where(mask, kn_reshape(from, x->ndim, x->shape), x));
}

/* ---- among sorted values --------------------------------------------------------------------- */

/* Both are put in one order, stable: those of sorted before a value of x are its place. */
kn_tensor *kn_searchsorted(kn_tensor *sorted, kn_tensor *x, bool right)
{
    const char *op = "searchsorted";
    if (!kn_ok() || !kn_check(sorted, op) || !kn_check(x, op))
        return NULL;
    KN_OPERANDS(sorted, x);
    if (!kn_loss_same_device(op, sorted, x))
        return NULL;
    const int last = sorted->ndim - 1;
    bool fits = last == 0 || (last > 0 && kn_has_shape(x, last + 1, x->shape));
    for (int d = 0; fits && d < last; d++)
        fits = sorted->shape[d] == x->shape[d];
    if (!fits || sorted->dtype != x->dtype)
        return kn_fail_null("%s: sorted is %s, x %s; needs sorted[N], or sorted[..., N] and "
                            "x[..., M], of one dtype",
                            op, KN_SHOWN(sorted), KN_SHOWN(x));
    const int64_t N = sorted->shape[last], M = last ? x->shape[last] : kn_numel(x);
    int64_t lines = 1;
    for (int d = 0; d < last; d++)
        lines *= x->shape[d];
    kn_scope s = kn_scope_begin();
    kn_tensor *a = kn_reshape(kn_detach(sorted), KN_SHAPE(lines, N));
    kn_tensor *v = kn_reshape(kn_detach(x), KN_SHAPE(lines, M)), *y = NULL;
    kn_tensor *order =
        kn_argsort(kn_cat((kn_tensor *[]){ right ? a : v, right ? v : a }, 2, 1), 1, false);
    if (order) {
        kn_tensor *edge = kn_number_like(order, (double)(right ? N : M));
        kn_tensor *passed = kn_cumsum(right ? kn_lt(order, edge) : kn_ge(order, edge), 1);
        y = kn_scatter(kn_zeros_like(order), 1, order, passed);
        y = kn_slice(y, 1, right ? N : 0, right ? N + M : M);
        y = kn_reshape(y, x->ndim, x->shape);
    }
    return kn_scope_result(s, y);
}

kn_tensor *kn_bucketize(kn_tensor *x, kn_tensor *boundaries, bool right)
{
    if (kn_ok() && kn_check(boundaries, "bucketize") && boundaries->ndim != 1)
        return kn_fail_null("bucketize: boundaries are %s, should be 1-d (x is %s)",
                            KN_SHOWN(boundaries), x ? KN_SHOWN(x) : "none");
    return kn_searchsorted(boundaries, x, right);
}

kn_tensor *kn_isin(kn_tensor *x, kn_tensor *elements)
{
    const int64_t all = -1;
    if (!kn_ok() || !kn_check(x, "isin") || !kn_check(elements, "isin"))
        return NULL;
    const int64_t n = kn_numel(elements);
    if (n == 0)
        return kn_zeros(KN_BOOL, kn_device_of(x), x->ndim, x->shape);
    kn_scope s = kn_scope_begin();
    kn_tensor *sorted = kn_sort(kn_reshape(kn_detach(elements), 1, &all), 0);
    kn_tensor *flat = kn_reshape(kn_detach(x), 1, &all);
    kn_tensor *at = kn_clamp(kn_searchsorted(sorted, flat, false), 0, (double)(n - 1));
    kn_tensor *y = kn_eq(kn_index_select(sorted, 0, at), flat);
    return kn_scope_result(s, kn_reshape(y, x->ndim, x->shape));
}
