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
    if (!kn_dims("squeeze", x, n, dims, &chosen))
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
    if (kn_is_number(x) && start >= -1 && start <= 0 && end >= -1 && end <= 0)
        return kn_view(x, 1, &size);
    const int a = kn_dim("flatten", x, start), b = kn_dim("flatten", x, end);
    if (b < 0)
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

kn_tensor *kn_unflatten(kn_tensor *x, int dim, int n, const int64_t *sizes)
{
    int64_t shape[KN_MAX_DIMS];
    const int at = kn_dim("unflatten", x, dim);
    if (at < 0)
        return NULL;
    if (n < 1 || x->ndim - 1 > KN_MAX_DIMS - n)
        return kn_fail_null(
            "unflatten: dim %d of %s as %d dims; it becomes at least 1, and the result "
            "has at most %d dims",
            dim, KN_SHOWN(x), n, KN_MAX_DIMS);
    if (!kn_given(sizes, "unflatten", "the sizes"))
        return NULL;
    if (!kn_sizes_of("unflatten", "of part", x->shape[at], n, sizes, shape + at))
        return kn_fail_null(
            "unflatten: the sizes don't multiply to the %lld elements of dim %d of %s",
            (long long)x->shape[at], at, KN_SHOWN(x));
    memcpy(shape, x->shape, (size_t)at * sizeof *shape);
    memcpy(shape + at + n, x->shape + at + 1, (size_t)(x->ndim - at - 1) * sizeof *shape);
    return kn_view(x, x->ndim - 1 + n, shape);
}

kn_tensor *kn_movedim(kn_tensor *x, int from, int to)
{
    int64_t order[KN_MAX_DIMS];
    const int a = kn_dim("movedim", x, from), b = kn_dim("movedim", x, to);
    if (b < 0)
        return NULL;
    for (int d = 0, next = 0; d < x->ndim; d++) {
        next += next == a;
        order[d] = d == b ? a : next++;
    }
    return kn_permute(x, x->ndim, order);
}

/* ---- the gradient of a view that shows no element twice: dy in the same view of zeros -------- */

static bool view_backward(kn_op_grad *g)
{
    const kn_op *op = g->node->op;
    kn_tensor *dx = kn_grad_zeros(g, 0);
    kn_op_call c = { .op = op, .nin = 1, .nout = 1, .in = { dx }, .attr = g->node->attr };
    if (!dx || !op->shape(&c))
        return false;
    const kn_spec *s = &c.spec[0];
    const kn_tensor *part = kn_tensor_alias(dx, s->offset, s->ndim, s->shape, s->stride);
    return part && kn_array_copy(dx, kn_array_of(part), kn_array_of(g->dout[0]));
}

/* ---- diagonal -------------------------------------------------------------------------------- */

typedef struct diagonal_attr {
    int dim[2];
    int64_t offset;
} diagonal_attr;

static bool diagonal_shape(kn_op_call *c)
{
    const diagonal_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    kn_spec *s = &c->spec[0];
    const int i = a->dim[0], j = a->dim[1];
    const int64_t skip_i = a->offset < 0 ? -a->offset : 0, skip_j = a->offset > 0 ? a->offset : 0;
    const int64_t rows = x->shape[i] - skip_i, columns = x->shape[j] - skip_j;
    const int64_t size = rows < columns ? rows : columns;
    s->dtype = x->dtype;
    for (int d = 0; d < x->ndim; d++) {
        if (d == i || d == j)
            continue;
        s->shape[s->ndim] = x->shape[d];
        s->stride[s->ndim++] = x->stride[d];
    }
    s->shape[s->ndim] = size > 0 ? size : 0;
    s->stride[s->ndim++] = x->stride[i] + x->stride[j];
    s->offset = size > 0 ? skip_i * x->stride[i] + skip_j * x->stride[j] : 0;
    return true;
}

KN_OP(kn_op_diagonal, .name = "diagonal", .attr_size = sizeof(diagonal_attr), .view = true,
      .shape = diagonal_shape, .backward = view_backward, .on_tape = kn_linear_on_tape);

kn_tensor *kn_diagonal(kn_tensor *x, int64_t offset, int dim0, int dim1)
{
    const int i = kn_dim("diagonal", x, dim0), j = kn_dim("diagonal", x, dim1);
    if (j < 0)
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

static bool unfold_shape(kn_op_call *c)
{
    const unfold_attr *a = c->attr;
    const kn_tensor *x = c->in[0];
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(x);
    memcpy(s->stride, x->stride, sizeof s->stride);
    s->ndim = x->ndim + 1;
    s->shape[a->dim] = a->count;
    s->stride[a->dim] = x->stride[a->dim] * (a->count > 1 ? a->step : 1);
    s->shape[x->ndim] = a->size;
    s->stride[x->ndim] = x->stride[a->dim] * (a->size > 1 ? a->dilation : 1);
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
    return kn_array_fill(at, kn_array_of(first), 0, (double)a->step) &&
                   kn_array_fill(at, kn_array_of(next), 0, (double)a->dilation) &&
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
    const bool share = a->count > 1 && a->step <= (a->size - 1) * a->dilation;
    return share ? add_windows(g, a) : view_backward(g);
}

KN_OP(kn_op_unfold, .name = "unfold", .attr_size = sizeof(unfold_attr), .view = true,
      .shape = unfold_shape, .backward = unfold_backward, .on_tape = kn_linear_on_tape);

kn_tensor *kn_windows(const char *op, kn_tensor *x, int dim, int64_t size, int64_t step,
                      int64_t dilation)
{
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
