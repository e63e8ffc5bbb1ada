/* kernels/cuda/kernels/batch_norm_join.cu: joins the sums, or the moments, of the parts of a batch,
 * in pairs (Chan, Golub and LeVeque, 1979). A thread a channel: rows are samples or ranks, and the
 * joins of a channel follow each other. */
#include "kernels/cuda/kernels/batch_norm.cuh"

#define JOIN_LEVELS 48 /* of pairs: memory holds fewer than 2^48 rows */

/* What is known of some rows of a channel. */
struct join_part {
    double a, b, count;
};

/* Rows [n,C] of any float dtype. */
struct join_rows {
    channel_vector of; /* its stride is from channel to channel */
    int64_t stride;    /* from row to row */
};

struct join_call {
    channel_vector a, b, running_mean, running_var;
    join_rows from_a, from_b;
    double *count;
    const double *from_count;
    int64_t rows, channels, count_stride;
    double each, scale, momentum;
    bool moments, finish;
};

static __device__ inline join_part join_two(const join_call &j, const join_part &x,
                                            const join_part &y)
{
    join_part p = { x.a + y.a, x.b + y.b, 0 };
    if (!j.moments)
        return p;
    p.count = x.count + y.count;
    if (p.count == 0)
        return x;
    double d = y.a - x.a;
    p.a = kn_fma_rn(d, y.count / p.count, x.a);
    p.b = kn_fma_rn(d * d, x.count * y.count / p.count, p.b);
    return p;
}

static __device__ inline join_part join_row(const join_call &j, int64_t i, int64_t c)
{
    join_part p = { 0, 0, 0 };
    channel_vector a = j.from_a.of, b = j.from_b.of;
    int64_t size = a.dtype == KN_F64 ? 8 : a.dtype == KN_F32 ? 4 : 2;
    a.data = (char *)a.data + i * j.from_a.stride * size;
    size = b.dtype == KN_F64 ? 8 : b.dtype == KN_F32 ? 4 : 2;
    b.data = (char *)b.data + i * j.from_b.stride * size;
    p.a = channel_get(a, c, 0);
    p.b = channel_get(b, c, 0);
    if (j.moments) {
        p.b *= j.scale;
        p.count = j.from_count ? j.from_count[i * j.count_stride] : j.each;
    }
    return p;
}

/* waits[k] is of 2^k rows in front of those that are yet to come, and waits for as many more. */
static __device__ inline join_part join_all(const join_call &j, int64_t c)
{
    join_part waits[JOIN_LEVELS], p = { 0, 0, 0 };
    for (int64_t i = 0; i < j.rows; i++) {
        int level = 0;
        p = join_row(j, i, c);
        for (; i >> level & 1; level++)
            p = join_two(j, waits[level], p);
        waits[level] = p;
    }
    bool first = true;
    for (int level = 0; j.rows >> level; level++)
        if (j.rows >> level & 1) {
            p = first ? waits[level] : join_two(j, waits[level], p);
            first = false;
        }
    return p;
}

KN_KERNEL(CHANNEL_THREADS, batch_norm_join_kernel, const join_call j)
{
    int64_t c = (int64_t)blockIdx.x * CHANNEL_THREADS + threadIdx.x;
    if (c >= j.channels)
        return;
    join_part p = join_all(j, c);
    if (j.finish && j.moments) {
        if (p.count > 1) {
            double kept = 1 - j.momentum;
            channel_put(j.running_mean, c,
                        kept * channel_get(j.running_mean, c, 0) + j.momentum * p.a);
            channel_put(j.running_var, c,
                        kept * channel_get(j.running_var, c, 0) +
                            j.momentum * (p.b / (p.count - 1)));
        }
        p.b = p.count > 0 ? p.b / p.count : 0;
    } else if (j.finish) {
        double M = j.from_count[0];
        p.a = M > 0 ? p.a / M : 0;
        p.b = M > 0 ? p.b / M : 0;
    }
    channel_put(j.a, c, p.a);
    channel_put(j.b, c, p.b);
    if (c == 0 && j.count)
        j.count[0] = p.count;
}

/* The rows of [n,C]. */
static join_rows join_rows_of(const kn_array *v)
{
    return { { v->data, v->dtype, v->stride[1] }, v->stride[0] };
}

extern "C" kn_status kn_cuda_batch_norm_join(const void *args)
{
    const kn_batch_norm_join_args *a = (const kn_batch_norm_join_args *)args;
    join_call j = { channel_vector_of(&a->a),
                    channel_vector_of(&a->b),
                    channel_vector_of(&a->running_mean),
                    channel_vector_of(&a->running_var),
                    join_rows_of(&a->from_a),
                    join_rows_of(&a->from_b),
                    (double *)a->count.data,
                    (const double *)a->from_count.data,
                    a->from_a.shape[0],
                    a->from_a.shape[1],
                    a->from_count.data && a->from_count.ndim > 0 ? a->from_count.stride[0] : 0,
                    a->each,
                    a->scale,
                    a->momentum,
                    a->moments,
                    a->finish };
    if (j.channels == 0)
        return KN_DONE;
    return KN_RUN(batch_norm_join_kernel,
                  (unsigned)((j.channels + CHANNEL_THREADS - 1) / CHANNEL_THREADS), CHANNEL_THREADS,
                  0, j);
}
