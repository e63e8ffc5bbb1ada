/* autograd/ops.c: helpers that the files of operations share (ops.h). */
#include "autograd/ops.h"
#include <string.h>

/* ---- shapes and dims ------------------------------------------------------------------------- */

kn_spec kn_spec_like(const kn_tensor *t)
{
    kn_spec s = { .dtype = t->dtype, .ndim = t->ndim };
    memcpy(s.shape, t->shape, sizeof s.shape);
    return s;
}

kn_tensor *kn_as_batch(kn_tensor *x, int dims)
{
    return x && x->ndim == dims - 1 ? kn_unsqueeze(x, 0) : x;
}

kn_tensor *kn_of_batch(kn_tensor *y, bool alone)
{
    return y && alone ? kn_squeeze(y, 1, (int64_t[]){ 0 }) : y;
}

kn_tensor *kn_row_of(kn_tensor *x)
{
    return x && x->ndim == 0 ? kn_unsqueeze(x, 0) : x;
}

kn_tensor *kn_number_of(kn_tensor *row)
{
    return kn_squeeze(row, 1, (int64_t[]){ 0 });
}

bool kn_is_number(const kn_tensor *x)
{
    return kn_ok() && x && x->ndim == 0;
}

kn_tensor *kn_number_like(const kn_tensor *t, double value)
{
    return t ? kn_full(t->dtype, kn_device_of(t), value, KN_SCALAR) : NULL;
}

kn_array kn_array_or_none(const kn_tensor *t)
{
    return t ? kn_array_of(t) : (kn_array){ 0 };
}

kn_dtype kn_wide_dtype(kn_dtype t)
{
    return t == KN_F64 ? KN_F64 : KN_F32;
}

int kn_dim(const char *op, const kn_tensor *t, int dim)
{
    int d = dim < 0 ? dim + t->ndim : dim;
    if (d >= 0 && d < t->ndim)
        return d;
    kn_fail("%s: dim %d is out of range for %s (use %d to %d)", op, dim, KN_SHOWN(t), -t->ndim,
            t->ndim - 1);
    return -1;
}

bool kn_dims(const char *op, const kn_tensor *t, int n, const int64_t *list, uint32_t *dims)
{
    if (n < 0 || (n > 0 && !kn_given(list, op, "the list of dims")))
        return kn_fail("%s: %d dims are listed; 0 stands for all", op, n);
    const int most = t->ndim > 0 ? t->ndim : 1; /* a number has dims 0 and -1 */
    *dims = n > 0 ? 0 : (1u << t->ndim) - 1;
    for (int i = 0; i < n; i++) {
        if (list[i] < -most || list[i] >= most)
            return kn_fail("%s: dim %lld is out of range for %s (use %d to %d)", op,
                           (long long)list[i], KN_SHOWN(t), -most, most - 1);
        *dims |= t->ndim > 0 ? 1u << (list[i] < 0 ? list[i] + t->ndim : list[i]) : 0;
    }
    return true;
}

kn_array kn_rows_of(const kn_tensor *t)
{
    int64_t rows = 1; /* not numel / columns: there are rows without columns */
    for (int d = 0; d < t->ndim - 1; d++)
        rows *= t->shape[d];
    return kn_array_make(kn_array_of(t).data, t->dtype, 2,
                         (int64_t[]){ rows, t->ndim ? t->shape[t->ndim - 1] : 1 });
}

kn_array kn_part(const kn_tensor *t, int dim, int64_t begin, int64_t size)
{
    kn_array a = kn_array_of(t);
    if (a.data)
        a.data = (char *)a.data + (size_t)(begin * a.stride[dim]) * kn_dtype_size(a.dtype);
    a.shape[dim] = size;
    return a;
}

bool kn_indices_are_whole(const char *op, const kn_tensor *index)
{
    return index->dtype == KN_I64 || index->dtype == KN_I32 ||
           kn_fail("%s: indices must be i64 or i32, got %s", op, kn_dtype_name(index->dtype));
}

kn_array kn_flat(const kn_tensor *t)
{
    return kn_array_make(kn_array_of(t).data, t->dtype, 1, (int64_t[]){ kn_numel(t) });
}

/* ---- kernels --------------------------------------------------------------------------------- */

bool kn_copied(const kn_tensor *on, kn_array to, kn_array from)
{
    return KN_RUN(on, KN_K_COPY, ((kn_copy_args){ to, from }));
}

bool kn_filled(const kn_tensor *on, kn_array to, double value, double step)
{
    return KN_RUN(on, KN_K_FILL, ((kn_fill_args){ to, value, step }));
}

kn_tensor *kn_grad_sum(kn_op_grad *g, int i)
{
    bool fresh;
    kn_tensor *dx = kn_grad_into(g, i, &fresh);
    if (!dx || (fresh && !kn_filled(dx, kn_array_of(dx), 0, 0)))
        return NULL;
    return g->din[i] = dx;
}

kn_tensor *kn_grad_zeros(kn_op_grad *g, int i)
{
    kn_tensor *dx = kn_grad_out(g, i);
    if (!dx || !kn_filled(dx, kn_array_of(dx), 0, 0))
        return NULL;
    return g->din[i] = dx;
}
