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

bool kn_shape_of_input(kn_op_call *c)
{
    c->spec[0] = kn_spec_like(c->in[0]);
    c->spec[0].order = kn_order_of(c->in[0]);
    return true;
}

kn_tensor *kn_along(kn_tensor *v, int ndim, int dim)
{
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < ndim; d++)
        shape[d] = d == dim ? -1 : 1;
    return kn_reshape(v, ndim, shape);
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
    return kn_ok() && x && x->magic == KN_TENSOR_MAGIC && x->ndim == 0;
}

kn_tensor *kn_of_host(kn_dtype dtype, kn_device device, void *values, int ndim,
                      const int64_t *shape)
{
    kn_tensor *t = values ? kn_from(dtype, device, values, ndim, shape) : NULL;
    kn_host_free(values);
    return t;
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

kn_tensor *kn_wide(kn_tensor *x)
{
    return x ? kn_cast(x, kn_wide_dtype(x->dtype)) : NULL;
}

bool kn_takes(const char *op, const kn_tensor *x, bool floats)
{
    return kn_ok() && kn_check(x, op) &&
           ((floats ? kn_dtype_is_float : kn_dtype_is_arithmetic)(x->dtype) ||
            kn_fail("%s: needs a %s, got %s; kn_cast it first", op,
                    floats ? "float tensor" : "dtype with arithmetic", KN_SHOWN(x)));
}

int kn_dim(const char *op, const kn_tensor *t, int dim)
{
    if (!kn_ok() || !kn_check(t, op))
        return -1;
    int d = dim < 0 ? dim + t->ndim : dim;
    if (d >= 0 && d < t->ndim)
        return d;
    kn_fail("%s: dim %d is out of range for %s (use %d to %d)", op, dim, KN_SHOWN(t), -t->ndim,
            t->ndim - 1);
    return -1;
}

bool kn_dims(const char *op, const kn_tensor *t, int n, const int64_t *list, uint32_t *dims)
{
    if (!kn_ok() || !kn_check(t, op))
        return false;
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

bool kn_map_forward(kn_op_call *c)
{
    return c->op->map(c->out[0], c->in[0], c->attr, false);
}

bool kn_map_backward(kn_op_grad *g)
{
    const kn_spec *s = &g->in_spec[0];
    kn_tensor *dx = kn_tensor_new(s->dtype, s->device, NULL, KN_MEM_ACTIVATION, s->ndim, s->shape,
                                  kn_order_of(g->dout[0]), true);
    g->din[0] = dx;
    return dx && g->node->op->map(dx, g->dout[0], g->attr, true);
}

bool kn_product(const kn_tensor *on, kn_array dst, kn_array a, kn_array b)
{
    return KN_RUN(on, KN_K_MATMUL, ((kn_matmul_args){ .dst = dst, .a = a, .b = b }));
}

bool kn_grad_bias(kn_op_grad *g, int i, kn_array dy)
{
    int64_t shape[KN_MAX_DIMS] = { 1, dy.shape[1], 1, 1 };
    kn_tensor *db = kn_grad_out(g, i);
    if (!db)
        return false;
    const kn_array to = kn_array_make(kn_array_of(db).data, db->dtype, dy.ndim, shape);
    return KN_RUN(db, KN_K_REDUCE, ((kn_reduce_args){ to, dy, KN_SUM }));
}

kn_tensor *kn_grad_sum(kn_op_grad *g, int i)
{
    bool fresh;
    kn_tensor *dx = kn_grad_into(g, i, &fresh);
    if (!dx || (fresh && !kn_array_fill(dx, kn_array_of(dx), 0, 0)))
        return NULL;
    return g->din[i] = dx;
}

kn_tensor *kn_grad_zeros(kn_op_grad *g, int i)
{
    kn_tensor *dx = kn_grad_out(g, i);
    return dx && kn_array_fill(dx, kn_array_of(dx), 0, 0) ? dx : NULL;
}
