/* autograd/ops_view.c: views with other dims: squeezed, moved, diagonals, sliding windows. Their
 * backward copies into the same view of a gradient of zeros. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <string.h>

/* ---- other shapes of the same elements ------------------------------------------------------- */

kn_tensor *kn_squeeze(kn_tensor *x, int n, const int64_t *dims)
{
    uint32_t chosen;
    int64_t shape[KN_MAX_DIMS];
    int left = 0;
    if (!kn_ok() || !kn_check(x, "squeeze") || !kn_dims("squeeze", x, n, dims, &chosen))
        return NULL;
    for (int d = 0; d < x->ndim; d++)
        if (x->shape[d] != 1 || !(chosen >> d & 1))
            shape[left++] = x->shape[d];
    return kn_view(x, left, shape);
}

kn_tensor *kn_unsqueeze(kn_tensor *x, int dim)
{
    int64_t shape[KN_MAX_DIMS + 1];
    if (!kn_ok() || !kn_check(x, "unsqueeze"))
        return NULL;
    const int at = dim < 0 ? dim + x->ndim + 1 : dim;
    if (at < 0 || at > x->ndim)
        return kn_fail_null("unsqueeze: dim %d is out of range for %s (use %d to %d)", dim,
                            KN_SHOWN(x), -x->ndim - 1, x->ndim);
    if (x->ndim == KN_MAX_DIMS)
        return kn_fail_null("unsqueeze: %s has %d dims already, the most that there can be",
                            KN_SHOWN(x), x->ndim);
    for (int d = 0; d <= x->ndim; d++)
        shape[d] = d == at ? 1 : x->shape[d - (d > at)];
    return kn_view(x, x->ndim + 1, shape);
}

kn_tensor *kn_flatten(kn_tensor *x, int start, int end)
{
    int64_t shape[KN_MAX_DIMS], size = 1;
    if (!kn_ok() || !kn_check(x, "flatten"))
        return NULL;
    if (x->ndim == 0 && start >= -1 && start <= 0 && end >= -1 && end <= 0)
        return kn_view(x, 1, &size);
    const int a = kn_dim("flatten", x, start), b = a < 0 ? -1 : kn_dim("flatten", x, end);
    if (a < 0 || b < 0)
        return NULL;
    if (a > b)
        return kn_fail_null("flatten: dim %d comes after dim %d in %s; start is at most end", start,
                            end, KN_SHOWN(x));
    for (int d = a; d <= b; d++)
        size *= x->shape[d];
    for (int d = 0; d < x->ndim; d++)
        shape[d < a ? d : d <= b ? a : d - (b - a)] = d < a || d > b ? x->shape[d] : size;
    return kn_reshape(x, x->ndim - (b - a), shape);
}

/* Sizes of n dims that dim of x becomes; fills in a -1. */
static bool parts_of_dim(const kn_tensor *x, int dim, int n, const int64_t *given, int64_t *sizes)
{
    int64_t known = 1;
    int open = -1;
    for (int i = 0; i < n; i++) {
        sizes[i] = given[i];
        const bool first = sizes[i] == -1 && open < 0;
        if (first)
            open = i;
        else if (sizes[i] < 0 || __builtin_mul_overflow(known, sizes[i], &known))
            return kn_fail("unflatten: size %lld of part %d cannot be (one size may be -1)",
                           (long long)sizes[i], i);
    }
    if (open >= 0 && known > 0 && x->shape[dim] % known == 0) {
        sizes[open] = x->shape[dim] / known;
        known = x->shape[dim];
        open = -1;
    }
    return (open < 0 && known == x->shape[dim]) ||
           kn_fail("unflatten: the sizes don't multiply to the %lld elements of dim %d of %s",
                   (long long)x->shape[dim], dim, KN_SHOWN(x));
}

kn_tensor *kn_unflatten(kn_tensor *x, int dim, int n, const int64_t *sizes)
{
    int64_t shape[KN_MAX_DIMS];
    if (!kn_ok() || !kn_check(x, "unflatten"))
        return NULL;
    const int at = kn_dim("unflatten", x, dim);
    if (at < 0)
        return NULL;
    if (n < 1 || x->ndim - 1 > KN_MAX_DIMS - n)
        return kn_fail_null(
            "unflatten: dim %d of %s as %d dims; it becomes at least 1, and the result "
            "has at most %d dims",
            dim, KN_SHOWN(x), n, KN_MAX_DIMS);
    if (!kn_given(sizes, "unflatten", "the sizes") || !parts_of_dim(x, at, n, sizes, shape + at))
        return NULL;
    memcpy(shape, x->shape, (size_t)at * sizeof *shape);
    memcpy(shape + at + n, x->shape + at + 1, (size_t)(x->ndim - at - 1) * sizeof *shape);
    return kn_view(x, x->ndim - 1 + n, shape);
}

kn_tensor *kn_movedim(kn_tensor *x, int from, int to)
{
    int64_t order[KN_MAX_DIMS];
    if (!kn_ok() || !kn_check(x, "movedim"))
        return NULL;
    const int a = kn_dim("movedim", x, from), b = a < 0 ? -1 : kn_dim("movedim", x, to);
    if (a < 0 || b < 0)
        return NULL;
    for (int d = 0, next = 0; d < x->ndim; d++) {
        next += next == a;
        order[d] = d == b ? a : next++;
    }
    return kn_permute(x, x->ndim, order);
}

/* ---- diagonal -------------------------------------------------------------------------------- */

typedef struct diagonal_attr {
    int dim[2];
    int64_t offset;
} diagonal_attr;

/* Where the diagonal lies in elements of this shape and these strides. */
static void diagonal_place(kn_spec *s, int ndim, const int64_t *shape, const int64_t *stride,
                           const diagonal_attr *a)
{
    const int i = a->dim[0], j = a->dim[1];
    const int64_t skip_i = a->offset < 0 ? -a->offset : 0, skip_j = a->offset > 0 ? a->offset : 0;
    const int64_t rows = shape[i] - skip_i, columns = shape[j] - skip_j;
    const int64_t size = rows < columns ? rows : columns;
    s->ndim = 0;
    for (int d = 0; d < ndim; d++) {
        if (d == i || d == j)
            continue;
        s->shape[s->ndim] = shape[d];
        s->stride[s->ndim++] = stride[d];
    }
    s->shape[s->ndim] = size > 0 ? size : 0;
    s->stride[s->ndim++] = stride[i] + stride[j];
    s->offset = size > 0 ? skip_i * stride[i] + skip_j * stride[j] : 0;
}

static bool diagonal_shape(kn_op_call *c)
{
    const kn_tensor *x = c->in[0];
    c->spec[0].dtype = x->dtype;
    diagonal_place(&c->spec[0], x->ndim, x->shape, x->stride, c->attr);
    return true;
}

/* A part of dx, as the spec places it. */
static kn_array placed(const kn_tensor *dx, const kn_spec *s)
{
    kn_array a = kn_array_of(dx);
    if (a.data)
        a.data = (char *)a.data + (size_t)s->offset * kn_dtype_size(a.dtype);
    a.ndim = s->ndim;
    memcpy(a.shape, s->shape, sizeof a.shape);
    memcpy(a.stride, s->stride, sizeof a.stride);
    return a;
}

static bool diagonal_backward(kn_op_grad *g)
{
    kn_spec part;
    kn_tensor *dx = kn_grad_zeros(g, 0);
    if (!dx)
        return false;
    diagonal_place(&part, dx->ndim, dx->shape, dx->stride, g->attr);
    return kn_copied(dx, placed(dx, &part), kn_array_of(g->dout[0]));
}

KN_OP(kn_op_diagonal, .name = "diagonal", .attr_size = sizeof(diagonal_attr), .view = true,
      .shape = diagonal_shape, .backward = diagonal_backward, .on_tape = kn_linear_on_tape);

kn_tensor *kn_diagonal(kn_tensor *x, int64_t offset, int dim0, int dim1)
{
    if (!kn_ok() || !kn_check(x, "diagonal"))
        return NULL;
    const int i = kn_dim("diagonal", x, dim0), j = i < 0 ? -1 : kn_dim("diagonal", x, dim1);
    if (i < 0 || j < 0)
        return NULL;
    if (i == j)
        return kn_fail_null("diagonal: dims %d and %d of %s are the same; two are needed", dim0,
                            dim1, KN_SHOWN(x));
    /* beyond the corners the diagonal is empty, however far */
    const int64_t least = -x->shape[i], most = x->shape[j];
    diagonal_attr a = { { i, j }, offset < least ? least : offset > most ? most : offset };
    return kn_apply1(&kn_op_diagonal, 1, &x, 0, &a);
}

/* ---- sliding windows: y[.., p at dim, .., j] = x[.., p step + j dilation, ..] ---------------- */

typedef struct unfold_attr {
    int dim;
    int64_t count, size, step, dilation; /* count windows of size elements */
} unfold_attr;

/* Where the windows lie in elements of this shape and these strides. */
static void unfold_place(kn_spec *s, int ndim, const int64_t *shape, const int64_t *stride,
                         const unfold_attr *a)
{
    memcpy(s->shape, shape, (size_t)ndim * sizeof *shape);
    memcpy(s->stride, stride, (size_t)ndim * sizeof *stride);
    s->ndim = ndim + 1;
    s->offset = 0;
    s->shape[a->dim] = a->count;
    s->stride[a->dim] = a->count > 1 ? a->step * stride[a->dim] : stride[a->dim];
    s->shape[ndim] = a->size;
    s->stride[ndim] = a->size > 1 ? a->dilation * stride[a->dim] : stride[a->dim];
}

static bool unfold_shape(kn_op_call *c)
{
    const kn_tensor *x = c->in[0];
    c->spec[0].dtype = x->dtype;
    unfold_place(&c->spec[0], x->ndim, x->shape, x->stride, c->attr);
    return true;
}

/* p step + j dilation for all p and j, row-major. */
static kn_tensor *places_of_windows(const unfold_attr *a, kn_device device)
{
    const int64_t both[2] = { a->count, a->size };
    kn_tensor *at = kn_empty(KN_I64, device, 2, both);
    kn_tensor *first = kn_empty(KN_I64, device, 2, (int64_t[]){ a->count, 1 });
    kn_tensor *next = kn_empty(KN_I64, device, 2, (int64_t[]){ 1, a->size });
    if (!at || !first || !next)
        return NULL;
    kn_binary_args sum = { kn_array_of(at), kn_array_expand(kn_array_of(first), 2, both),
                           kn_array_expand(kn_array_of(next), 2, both), KN_ADD };
    return kn_filled(at, kn_array_of(first), 0, (double)a->step) &&
                   kn_filled(at, kn_array_of(next), 0, (double)a->dilation) &&
                   KN_RUN(at, KN_K_BINARY, sum)
               ? at
               : NULL;
}

/* Windows that share elements: dx += dy at their places, in ascending order. */
static bool add_windows(kn_op_grad *g, const unfold_attr *a)
{
    const kn_tensor *dy = g->dout[0];
    const int n = dy->ndim - 1; /* dims of x */
    int64_t order[KN_MAX_DIMS];
    for (int d = 0; d < n; d++)
        order[d + (d > a->dim)] = d;
    order[a->dim + 1] = n; /* the elements of a window beside the windows */
    kn_tensor *dx = kn_grad_sum(g, 0);
    kn_tensor *rows = kn_contiguous(kn_permute(g->dout[0], n + 1, order));
    kn_tensor *at = dx ? places_of_windows(a, kn_device_of(dx)) : NULL;
    if (!dx || !rows || !at)
        return false;
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < n; d++)
        shape[d] = dx->shape[d];
    shape[a->dim] = a->count * a->size;
    const kn_array src = kn_array_make(kn_array_of(rows).data, rows->dtype, n, shape);
    const kn_array index = kn_array_make(kn_array_of(at).data, KN_I64, 1, &shape[a->dim]);
    return KN_RUN(dx, KN_K_INDEX_ADD, ((kn_index_add_args){ kn_array_of(dx), src, index, a->dim }));
}

static bool unfold_backward(kn_op_grad *g)
{
    const unfold_attr *a = g->attr;
    if (a->count > 1 && a->step <= (a->size - 1) * a->dilation)
        return add_windows(g, a);
    kn_spec part;
    kn_tensor *dx = kn_grad_zeros(g, 0);
    if (!dx)
        return false;
    unfold_place(&part, dx->ndim, dx->shape, dx->stride, a);
    return kn_copied(dx, placed(dx, &part), kn_array_of(g->dout[0]));
}

KN_OP(kn_op_unfold, .name = "unfold", .attr_size = sizeof(unfold_attr), .view = true,
      .shape = unfold_shape, .backward = unfold_backward, .on_tape = kn_linear_on_tape);

kn_tensor *kn_windows(const char *op, kn_tensor *x, int dim, int64_t size, int64_t step,
                      int64_t dilation)
{
    if (!kn_ok() || !kn_check(x, op))
        return NULL;
    const int at = kn_dim(op, x, dim);
    if (at < 0)
        return NULL;
    const int64_t n = x->shape[at];
    if (size < 1 || step < 1 || dilation < 1 || size > n || size - 1 > (n - 1) / dilation ||
        x->ndim == KN_MAX_DIMS)
        return kn_fail_null(
            "%s: windows of size %lld, step %lld, dilation %lld over dim %d of %s; all "
            "are at least 1, a window doesn't reach beyond the dim, and the result has "
            "at most %d dims",
            op, (long long)size, (long long)step, (long long)dilation, dim, KN_SHOWN(x),
            KN_MAX_DIMS);
    const int64_t count = (n - 1 - (size - 1) * dilation) / step + 1;
    unfold_attr a = { at, count, size, step, dilation };
    return kn_apply1(&kn_op_unfold, 1, &x, 0, &a);
}

kn_tensor *kn_slice_step(kn_tensor *x, int dim, int64_t begin, int64_t end, int64_t step)
{
    if (kn_ok() && step < 1)
        return kn_fail_null("slice_step: the step is %lld, should be at least 1", (long long)step);
    kn_scope s = kn_scope_begin();
    kn_tensor *y = kn_slice(x, dim, begin, end);
    if (y && step > 1 && end > begin)
        y = kn_squeeze(kn_windows("slice_step", y, dim, 1, step, 1), 1, (int64_t[]){ -1 });
    return kn_scope_result(s, y);
}

kn_tensor *kn_select(kn_tensor *x, int dim, int64_t index)
{
    if (!kn_ok() || !kn_check(x, "select"))
        return NULL;
    const int d = kn_dim("select", x, dim);
    if (d < 0)
        return NULL;
    const int64_t n = x->shape[d], i = index < 0 ? index + n : index;
    if (i < 0 || i >= n)
        return kn_fail_null("select: index %lld is outside of dim %d of %s", (long long)index, dim,
                            KN_SHOWN(x));
    kn_scope s = kn_scope_begin();
    return kn_scope_result(s, kn_squeeze(kn_slice(x, d, i, i + 1), 1, (int64_t[]){ d }));
}

kn_tensor *kn_unfold(kn_tensor *x, int dim, int64_t size, int64_t step)
{
    return kn_windows("unfold", x, dim, size, step, 1);
}
