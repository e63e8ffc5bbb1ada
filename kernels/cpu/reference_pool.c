/* kernels/cpu/reference_pool.c: the largest and the mean of windows, and their gradients. */
#include "kernels/cpu/reference.h"

#include <math.h>

/* One window along one dim: begin, begin + step, ..., before end; divide: how many positions it
 * counts for. */
typedef struct span {
    int64_t begin, end, step, divide;
} span;

static span span_of(const kn_window *w, int d, const kn_array *x, const kn_array *y, int64_t p)
{
    const int64_t H = x->shape[2 + d], P = y->shape[2 + d];
    span s = { .step = 1 };
    if (w->adaptive) {
        s.begin = p * H / P, s.end = ((p + 1) * H + P - 1) / P;
        s.divide = s.end - s.begin;
        return s;
    }
    s.step = w->dilation[d];
    s.begin = p * w->stride[d] - w->pad[d];
    s.end = s.begin + (w->kernel[d] - 1) * s.step + 1;
    s.divide = (s.end < H + w->pad[d] ? s.end : H + w->pad[d]) - s.begin;
    if (s.begin < 0)
        s.begin += (-s.begin + s.step - 1) / s.step * s.step;
    s.end = s.end < H ? s.end : H;
    if (!w->count_include_pad)
        s.divide = s.end > s.begin ? s.end - s.begin : 0;
    return s;
}

static int64_t plane_of(const kn_array *a, const kn_ref_walk *at)
{
    return at->at[0] * a->stride[0] + at->at[1] * a->stride[1];
}

static double largest(const kn_array *x, int64_t plane, span rows, span columns, int32_t *index)
{
    double best = -INFINITY;
    *index = -1;
    for (int64_t h = rows.begin; h < rows.end; h += rows.step) {
        for (int64_t w = columns.begin; w < columns.end; w += columns.step) {
            double v = kn_ref_get(x, plane + h * x->stride[2] + w * x->stride[3]);
            if (*index < 0 || v > best || (isnan(v) && !isnan(best))) {
                best = v;
                *index = (int32_t)(h * x->shape[3] + w);
            }
        }
    }
    return best;
}

static double average(const kn_array *x, int64_t plane, span rows, span columns)
{
    double sum = 0;
    for (int64_t h = rows.begin; h < rows.end; h++)
        for (int64_t w = columns.begin; w < columns.end; w++)
            sum += kn_ref_get(x, plane + h * x->stride[2] + w * x->stride[3]);
    bool some = rows.begin < rows.end && columns.begin < columns.end;
    return some ? sum / (double)(rows.divide * columns.divide) : 0;
}

kn_status kn_ref_pool(const void *args)
{
    const kn_pool_args *a = args;
    const kn_array *index = a->index.data ? &a->index : &a->y;
    for (kn_ref_walk i = kn_ref_walk_over(&a->y, index, NULL); i.more; kn_ref_walk_next(&i)) {
        span rows = span_of(&a->window, 0, &a->x, &a->y, i.at[2]);
        span columns = span_of(&a->window, 1, &a->x, &a->y, i.at[3]);
        int64_t plane = plane_of(&a->x, &i);
        int32_t at = -1;
        double v = a->kind == KN_POOL_MAX ? largest(&a->x, plane, rows, columns, &at)
                                          : average(&a->x, plane, rows, columns);
        kn_ref_set_computed(&a->y, i.off[0], v);
        if (a->index.data && a->kind == KN_POOL_MAX)
            kn_ref_set_int(&a->index, i.off[1], at);
    }
    return KN_DONE;
}

/* The share of window (p, q) in the element at (h, w). */
static double share(const kn_pool_grad_args *a, const kn_ref_walk *i, int64_t p, int64_t q,
                    int64_t h, int64_t w)
{
    const kn_array *dy = &a->dy, *index = &a->index;
    double g = kn_ref_get(dy, plane_of(dy, i) + p * dy->stride[2] + q * dy->stride[3]);
    if (a->kind == KN_POOL_MAX)
        return kn_ref_get_int(index, plane_of(index, i) + p * index->stride[2] +
                                         q * index->stride[3]) == h * a->dx.shape[3] + w
                   ? g
                   : 0;
    span rows = span_of(&a->window, 0, &a->dx, dy, p),
         columns = span_of(&a->window, 1, &a->dx, dy, q);
    bool in = h >= rows.begin && h < rows.end && w >= columns.begin && w < columns.end;
    return in ? g / (double)(rows.divide * columns.divide) : 0;
}

/* The windows along dim d that may reach h: from, up to and not including, to. */
static void windows_of(const kn_window *w, int d, const kn_array *x, const kn_array *y, int64_t h,
                       int64_t *from, int64_t *to)
{
    const int64_t H = x->shape[2 + d], P = y->shape[2 + d];
    if (w->adaptive) {
        *from = h * P / H, *to = ((h + 1) * P + H - 1) / H;
        return;
    }
    const int64_t reach = (w->kernel[d] - 1) * w->dilation[d], t = h + w->pad[d];
    *from = t > reach ? (t - reach + w->stride[d] - 1) / w->stride[d] : 0;
    *to = t / w->stride[d] + 1;
    *to = *to < P ? *to : P;
}

kn_status kn_ref_pool_grad(const void *args)
{
    const kn_pool_grad_args *a = args;
    for (kn_ref_walk i = kn_ref_walk_over(&a->dx, NULL); i.more; kn_ref_walk_next(&i)) {
        int64_t h = i.at[2], w = i.at[3], p0, p1, q0, q1;
        windows_of(&a->window, 0, &a->dx, &a->dy, h, &p0, &p1);
        windows_of(&a->window, 1, &a->dx, &a->dy, w, &q0, &q1);
        double sum = 0;
        for (int64_t p = p0; p < p1; p++)
            for (int64_t q = q0; q < q1; q++)
                sum += share(a, &i, p, q, h, w);
        kn_ref_set_computed(&a->dx, i.off[0], sum);
    }
    return KN_DONE;
}
