/* kernels/cost.c: the flops and bytes of one call, from its arguments alone: the meta device, which
 * has no bytes behind its arrays, asks too. */
#include "kernels/kernels_internal.h"

/* Bytes of the distinct elements of an array: broadcast dims count once, unset arrays nothing. */
static double bytes_of(const kn_array *a)
{
    double n = (double)kn_dtype_size(a->dtype);
    for (int d = 0; d < a->ndim; d++)
        n *= a->stride[d] == 0 && a->shape[d] > 0 ? 1 : (double)a->shape[d];
    return n;
}

static double size(kn_dtype t)
{
    return (double)kn_dtype_size(t);
}

static double elements(const kn_array *a)
{
    return (double)kn_array_numel(a);
}

static double dim(const kn_array *a, int from_last)
{
    return from_last < a->ndim ? (double)a->shape[a->ndim - 1 - from_last] : 1;
}

/* sum over t < T of max(0, first + t) */
static double sum_of_rising(double T, double first)
{
    double last = first + T - 1;
    if (first >= 0)
        return T * (first + last) / 2;
    return last > 0 ? last * (last + 1) / 2 : 0;
}

/* Pairs of query and key: all T S, or only the visible ones under the causal mask. */
static double pairs(const kn_array *q, const kn_array *k, bool causal, int64_t window)
{
    double T = dim(q, 1), S = dim(k, 1), all = T * S;
    if (causal) { /* row t sees max(0, t + 1 + S - T) keys, at most window of them */
        all = sum_of_rising(T, S - T + 1);
        if (window > 0)
            all -= sum_of_rising(T, S - T + 1 - (double)window);
    }
    return dim(q, 3) * dim(q, 2) * all;
}

/* Times out of its picks, each the size of one of array's elements, and the index. */
static double picked(const kn_array *array, double times, const kn_array *index)
{
    return times * elements(array) * size(array->dtype) + bytes_of(index);
}

/* Elements of an optimizer's pieces. */
static double in_pieces(const kn_opt_step *s)
{
    double n = 0;
    for (int i = 0; i < s->pieces; i++)
        n += (double)s->piece[i].count;
    return n;
}

/* state: reads and writes of arrays of the parameter's size, the gradient not counted. */
static double piece_bytes(const kn_opt_step *s, double state)
{
    double bytes = 0;
    for (int i = 0; i < s->pieces; i++) {
        const kn_opt_piece *p = &s->piece[i];
        bytes += (double)p->count * (size(p->param_dtype) * state + size(p->grad_dtype) +
                                     (p->out ? size(p->out_dtype) : 0));
    }
    return bytes;
}

static double in_runs(const kn_run *run, int runs)
{
    double n = 0;
    for (int i = 0; i < runs; i++)
        n += (double)run[i].count;
    return n;
}

static double run_bytes(const kn_run *run, int runs)
{
    double bytes = 0;
    for (int i = 0; i < runs; i++)
        bytes += (double)run[i].count * size(run[i].dtype);
    return bytes;
}

/* Of a convolution: as many sums as out has elements, each over the terms of one filter of w. */
static double products(const kn_array *out, const kn_array *w)
{
    return 2 * elements(out) * dim(w, 0) * dim(w, 1) * dim(w, 2);
}

/* An adaptive window has about as many elements as x to each of y. */
static double window_size(const kn_window *w, const kn_array *x, const kn_array *y)
{
    double each = elements(y) > 0 ? elements(x) / elements(y) : 0;
    return w->adaptive ? each : (double)w->kernel[0] * (double)w->kernel[1];
}

kn_cost kn_kernel_cost(kn_kernel k, const void *args)
{
    const int arrays = kn_kernel_arrays(k);
    double all = 0;
    for (int i = 0; i < arrays; i++)
        all += bytes_of((const kn_array *)args + i);
#define COST(entry, name, arrays, vectors, flops, bytes)                                           \
    case KN_K_##entry: {                                                                           \
        const kn_##name##_args *a = args;                                                          \
        (void)a;                                                                                   \
        return (kn_cost){ flops, bytes };                                                          \
    }
    switch (k) {
        KN_KERNELS(COST)
    default:
        return (kn_cost){ 0, all };
    }
}
