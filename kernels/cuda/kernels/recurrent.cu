/* kernels/cuda/kernels/recurrent.cu: recurrent layers step by step: a product of the state with the
 * weight (cuBLASLt's where it takes it), then a thread an element of the state for the gates. A row
 * counts its own steps, which end where its length says.
 *
 * Floor: 2 T launches, which are most of the time of small layers. */
#include "kernels/cuda/kernels/formulas.cuh"
#include "kernels/cuda/kernels/index.cuh"

#include "kernels/cells.h"

namespace
{
enum { BLOCK = 256, GATES = 4 };

/* What both ways through the steps have. T stands for all floats that A computes. */
template <typename A> struct steps {
    kn_indices lengths; /* data NULL: T */
    int64_t T, N, H, G, s;
    int gates;
    kn_cell cell;
    bool reverse;
};

/* An array that may be absent. */
template <typename A> struct maybe {
    kn_any_at<A> at;

    static maybe of(const kn_array *a)
    {
        return { { (char *)a->data, a->dtype, (int)kn_dtype_size(a->dtype) } };
    }
    inline __device__ A get(int64_t i) const
    {
        return at.data ? kn_any_get(at + i) : 0;
    }
    inline __device__ void put(int64_t i, A x) const
    {
        if (at.data)
            kn_any_put(at + i, x);
    }
};

template <typename A>
steps<A> steps_of(const kn_array *y, const kn_array *w, const kn_array *lengths, kn_cell cell,
                  bool reverse)
{
    steps<A> p = { { lengths->data, 1, true, kn_cuda_flags() },
                   y->shape[0],
                   y->shape[1],
                   y->shape[2],
                   w->shape[0],
                   0,
                   (int)kn_cell_gates(cell),
                   cell,
                   reverse };
    return p;
}

/* Row n's steps; a length out of range is recorded, and another one taken. */
template <typename A> static inline __device__ int64_t length_of(const steps<A> &p, int64_t n)
{
    if (!p.lengths.data)
        return p.T;
    int64_t length = kn_index_at(p.lengths, n);
    if (length >= 1 && length <= p.T)
        return length;
    kn_index_flag(p.lengths, n, length);
    return length < 1 ? 1 : p.T;
}

static bool multiplied(bool (*product)(const kn_matmul_args *p), const kn_matmul_args *p)
{
    return product ? product(p) : kn_cuda_matmul(p) == KN_DONE;
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename A> struct forward_call {
    steps<A> p;
    maybe<A> y, gates, kept, h, c0, cn, work;
};

template <typename A> KN_KERNEL(BLOCK, recurrent_kernel, const forward_call<A> c)
{
    const steps<A> &p = c.p;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            more = (int64_t)gridDim.x * blockDim.x;
    for (; i < p.N * p.H; i += more) {
        int64_t n = i / p.H, u = i - n * p.H, length = length_of(p, n);
        if (p.s >= length) {
            c.y.put(p.s * p.N * p.H + i, 0);
            c.kept.put(p.s * p.N * p.H + i, 0);
            continue;
        }
        int64_t row = kn_step_time(p.s, length, p.reverse) * p.N + n;
        int64_t past = kn_step_time(p.s - 1, length, p.reverse) * p.N * p.H + i;
        A g[GATES], q[GATES];
#pragma unroll
        for (int k = 0; k < GATES; k++)
            if (k < p.gates) {
                g[k] = c.gates.get(row * p.G + k * p.H + u);
                q[k] = c.work.get(n * p.G + k * p.H + u);
            }
        A kept = p.s == 0 ? c.c0.get(i) : c.kept.get(past);
        A h = v_cell(p.cell, g, q, c.h.get(i), &kept);
#pragma unroll
        for (int k = 0; k < GATES; k++)
            if (k < p.gates)
                c.gates.put(row * p.G + k * p.H + u, g[k]);
        c.y.put(row * p.H + u, h);
        c.h.put(i, h);
        c.kept.put(row * p.H + u, kept);
        if (p.s == length - 1)
            c.cn.put(i, kept);
    }
}

template <typename A> kn_status forward(const kn_recurrent_args *a)
{
    forward_call<A> c = { steps_of<A>(&a->y, &a->w, &a->lengths, a->cell, a->reverse),
                          maybe<A>::of(&a->y),
                          maybe<A>::of(&a->gates),
                          maybe<A>::of(&a->kept),
                          maybe<A>::of(&a->h),
                          maybe<A>::of(&a->c0),
                          maybe<A>::of(&a->cn),
                          maybe<A>::of(&a->work) };
    kn_matmul_args q = {};
    q.dst = a->work;
    q.a = a->h;
    q.b = a->w;
    q.b.shape[0] = a->w.shape[1], q.b.shape[1] = a->w.shape[0];
    q.b.stride[0] = a->w.stride[1], q.b.stride[1] = a->w.stride[0];
    q.bias = a->bias;
    if (c.p.N * c.p.H == 0)
        return KN_DONE;
    for (; c.p.s < c.p.T; c.p.s++)
        if (!multiplied(a->product, &q) ||
            KN_RUN_FLAT(recurrent_kernel<A>, kn_blocks(c.p.N * c.p.H, BLOCK, 1), BLOCK, c) !=
                KN_DONE)
            return KN_FAILED;
    return KN_DONE;
}

/* ---- backward -------------------------------------------------------------------------------- */

template <typename A> struct backward_call {
    steps<A> p;
    maybe<A> dgates, dq, dh, dc, work, dy, y, gates, kept, h0, c0;
};

template <typename A> KN_KERNEL(BLOCK, recurrent_grad_kernel, const backward_call<A> c)
{
    const steps<A> &p = c.p;
    const bool lstm = p.cell == KN_CELL_LSTM, gru = p.cell == KN_CELL_GRU;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            more = (int64_t)gridDim.x * blockDim.x;
    for (; i < p.N * p.H; i += more) {
        int64_t n = i / p.H, u = i - n * p.H, length = length_of(p, n);
        const bool within = p.s < length;
        int64_t t = within ? kn_step_time(p.s, length, p.reverse) : p.s, row = t * p.N + n;
        A g[GATES] = {}, q[GATES] = {};
        if (within) {
            int64_t past = kn_step_time(p.s - 1, length, p.reverse) * p.N * p.H + i;
#pragma unroll
            for (int k = 0; k < GATES; k++)
                if (k < p.gates)
                    g[k] = c.gates.get(row * p.G + k * p.H + u);
            A before = p.s == 0 ? (lstm ? c.c0.get(i) : c.h0.get(i))
                                : (lstm ? c.kept.get(past) : c.y.get(past));
            A dc = c.dc.get(i), dh = c.dh.get(i) + c.dy.get(row * p.H + u);
            c.dh.put(i, v_cell_grad(p.cell, g, q, before, c.kept.get(row * p.H + u), dh, &dc));
            c.dc.put(i, dc);
        }
#pragma unroll
        for (int k = 0; k < GATES; k++)
            if (k < p.gates) {
                c.dgates.put(row * p.G + k * p.H + u, g[k]);
                c.dq.put(row * p.G + k * p.H + u, q[k]);
                c.work.put(n * p.G + k * p.H + u, gru ? q[k] : g[k]);
            }
    }
}

template <typename A> kn_status backward(const kn_recurrent_grad_args *a)
{
    backward_call<A> c = { steps_of<A>(&a->y, &a->w, &a->lengths, a->cell, a->reverse),
                           maybe<A>::of(&a->dgates),
                           maybe<A>::of(&a->dq),
                           maybe<A>::of(&a->dh),
                           maybe<A>::of(&a->dc),
                           maybe<A>::of(&a->work),
                           maybe<A>::of(&a->dy),
                           maybe<A>::of(&a->y),
                           maybe<A>::of(&a->gates),
                           maybe<A>::of(&a->kept),
                           maybe<A>::of(&a->h0),
                           maybe<A>::of(&a->c0) };
    kn_matmul_args d = {};
    d.dst = a->dh;
    d.a = a->work;
    d.b = a->w;
    d.add = true;
    if (c.p.N * c.p.H == 0)
        return KN_DONE;
    for (c.p.s = c.p.T - 1; c.p.s >= 0; c.p.s--)
        if (KN_RUN_FLAT(recurrent_grad_kernel<A>, kn_blocks(c.p.N * c.p.H, BLOCK, 1), BLOCK, c) !=
                KN_DONE ||
            !multiplied(a->product, &d))
            return KN_FAILED;
    return KN_DONE;
}
} // namespace

extern "C" kn_status kn_cuda_recurrent(const void *args)
{
    const kn_recurrent_args *a = (const kn_recurrent_args *)args;
    return a->y.dtype == KN_F64 ? forward<double>(a) : forward<float>(a);
}

extern "C" kn_status kn_cuda_recurrent_grad(const void *args)
{
    const kn_recurrent_grad_args *a = (const kn_recurrent_grad_args *)args;
    return a->y.dtype == KN_F64 ? backward<double>(a) : backward<float>(a);
}
