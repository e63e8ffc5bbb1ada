/* tensor/shape.c: arithmetic on shapes and strides: row-major strides, the broadcast rule,
 * views. */
#include "tensor/tensor_internal.h"

bool kn_shape_count(int ndim, const int64_t *shape, int64_t each, int64_t *count)
{
    bool empty = false;
    for (int d = 0; d < ndim; d++) {
        empty |= shape[d] == 0;
        if (shape[d] < 0 || __builtin_mul_overflow(each, shape[d] > 0 ? shape[d] : 1, &each))
            return false;
    }
    *count = empty ? 0 : each;
    return true;
}

/* stride[d] = shape[d+1] * ... * shape[ndim-1]; sizes of 0 count as 1 so that strides stay
 * useful. */
void kn_row_major(int ndim, const int64_t *shape, int64_t *stride)
{
    int64_t step = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= shape[d] > 0 ? shape[d] : 1;
    }
}

/* Shapes are aligned at their ends; sizes agree if they are equal or one of them is 1. */
bool kn_broadcast_shape(int na, const int64_t *a, int nb, const int64_t *b, int *n, int64_t *out)
{
    int ndim = na > nb ? na : nb;
    for (int d = 1; d <= ndim; d++) {
        int64_t sa = d <= na ? a[na - d] : 1;
        int64_t sb = d <= nb ? b[nb - d] : 1;
        if (sa != sb && sa != 1 && sb != 1)
            return false;
        out[ndim - d] = sa == 1 ? sb : sa;
    }
    *n = ndim;
    return true;
}

/* New leading dims and dims of size 1 that grow get stride 0. */
kn_array kn_array_expand(kn_array a, int ndim, const int64_t *shape)
{
    kn_array out = { .data = a.data, .dtype = a.dtype, .ndim = ndim };
    for (int d = 0; d < ndim; d++) {
        int from = d - (ndim - a.ndim);
        bool same = from >= 0 && a.shape[from] == shape[d];
        out.shape[d] = shape[d];
        out.stride[d] = same ? a.stride[from] : 0;
    }
    return out;
}

/* Old dims fall into runs whose elements lie evenly: stride[d-1] == stride[d] * shape[d]. Each new
 * dim must lie inside one run; walking both shapes from the end, a run is used up exactly. */
bool kn_view_strides(const kn_tensor *t, int ndim, const int64_t *shape, int64_t *stride)
{
    int64_t old_count = kn_numel(t), count;
    if (!kn_shape_count(ndim, shape, 1, &count) || count != old_count)
        return false;
    kn_row_major(ndim, shape, stride);
    if (old_count == 0 || t->ndim == 0)
        return true;

    int nd = ndim - 1;
    int64_t run = 1;                       /* elements in the current run of old dims */
    int64_t step = t->stride[t->ndim - 1]; /* the run's innermost stride */
    for (int od = t->ndim - 1; od >= 0; od--) {
        run *= t->shape[od];
        bool ends = od == 0 || (t->shape[od - 1] != 1 && t->stride[od - 1] != run * step);
        if (!ends)
            continue;
        int64_t used = 1;
        while (nd >= 0 && (used < run || shape[nd] == 1)) {
            stride[nd] = used * step;
            used *= shape[nd--];
        }
        if (used != run)
            return false;
        run = 1;
        step = od > 0 ? t->stride[od - 1] : 1;
    }
    return nd < 0;
}
