/* kernels/cpu/reference_pool.c: the largest and the mean of windows, and their gradients. */
#include "kernels/cpu/reference.h"
#include "kernels/windows.h"

#include <math.h>

static double largest(const kn_array *x, int64_t plane, kn_window_span rows, kn_window_span columns,
                      int32_t *index)
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

static double average(const kn_array *x, int64_t plane, kn_window_span rows, kn_window_span columns)
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
    const kn_window_dim down = kn_window_dim_of(&a->window, 0, &a->x, &a->y);
    const kn_window_dim across = kn_window_dim_of(&a->window, 1, &a->x, &a->y);
    for (kn_ref_walk i = kn_ref_walk_over(&a->y, index, NULL); i.more; kn_ref_walk_next(&i)) {
        kn_window_span rows = kn_window_span_of(&down, i.at[2]),
                       columns = kn_window_span_of(&across, i.at[3]);
        int64_t plane = kn_ref_at(&a->x, i.at[0], i.at[1], 0, 0);
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
static double share(const kn_pool_grad_args *a, const kn_window_dim d[2], const kn_ref_walk *i,
                    int64_t p, int64_t q, int64_t h, int64_t w)
{
    const kn_array *dy = &a->dy, *index = &a->index;
    double g = kn_ref_get(dy, kn_ref_at(dy, i->at[0], i->at[1], p, q));
    if (a->kind == KN_POOL_MAX) {
        int64_t largest = kn_ref_get_int(index, kn_ref_at(index, i->at[0], i->at[1], p, q));
        return largest == h * a->dx.shape[3] + w ? g : 0;
    }
    const int64_t divide = kn_window_share(&d[0], p, h) * kn_window_share(&d[1], q, w);
    return divide > 0 ? g / (double)divide : 0;
}

kn_status kn_ref_pool_grad(const void *args)
{
    const kn_pool_grad_args *a = args;
    const kn_window_dim d[2] = { kn_window_dim_of(&a->window, 0, &a->dx, &a->dy),
                                 kn_window_dim_of(&a->window, 1, &a->dx, &a->dy) };
    for (kn_ref_walk i = kn_ref_walk_over(&a->dx, NULL); i.more; kn_ref_walk_next(&i)) {
        int64_t h = i.at[2], w = i.at[3], p0, p1, q0, q1;
        kn_windows_of(&d[0], h, &p0, &p1);
        kn_windows_of(&d[1], w, &q0, &q1);
        double sum = 0;
        for (int64_t p = p0; p < p1; p++)
            for (int64_t q = q0; q < q1; q++)
                sum += share(a, d, &i, p, q, h, w);
        kn_ref_set_computed(&a->dx, i.off[0], sum);
    }
    return KN_DONE;
}
