/* kernels/cpu/reference_batch_norm.c: batch normalisation (Ioffe and Szegedy, arXiv:1502.03167), a
 * channel at a time. */
#include "kernels/cpu/reference.h"

#include <math.h>

/* One channel of an array: the same with a first dim of 1 in place of dim 1. */
static kn_array channel_of(const kn_array *a, int64_t c)
{
    kn_array one = *a;
    if (!a->data)
        return one;
    one.data = (char *)a->data + c * a->stride[1] * (int64_t)kn_dtype_size(a->dtype);
    one.shape[1] = 1;
    return one;
}

/* Element c of a vector, or fallback if there is none. */
static double of_channel(const kn_array *v, int64_t c, double fallback)
{
    return v->data ? kn_ref_get(v, c * v->stride[0]) : fallback;
}

static void moments(const kn_array *x, double *mean, double *var)
{
    const double M = (double)kn_array_numel(x);
    *mean = *var = 0;
    for (kn_ref_walk w = kn_ref_walk_over(x, NULL); w.more; kn_ref_walk_next(&w))
        *mean += kn_ref_get(x, w.off[0]) / M;
    for (kn_ref_walk w = kn_ref_walk_over(x, NULL); w.more; kn_ref_walk_next(&w)) {
        double d = kn_ref_get(x, w.off[0]) - *mean;
        *var += d * d / M;
    }
}

static void move_running(const kn_array *running, int64_t c, double momentum, double value)
{
    if (running->data)
        kn_ref_set_computed(running, c * running->stride[0],
                            (1 - momentum) * of_channel(running, c, 0) + momentum * value);
}

static void norm_channel(const kn_batch_norm_args *a, int64_t c)
{
    kn_array x = channel_of(&a->x, c), y = channel_of(&a->y, c), add = channel_of(&a->add, c);
    double M = (double)kn_array_numel(&x), mean, var;
    if (a->training) {
        moments(&x, &mean, &var);
    } else {
        mean = of_channel(&a->running_mean, c, 0);
        var = of_channel(&a->running_var, c, 1);
    }
    double rstd = 1 / sqrt(var + a->eps);
    kn_ref_set(&a->mean, c, mean);
    kn_ref_set(&a->rstd, c, rstd);
    if (a->training && M > 1) {
        move_running(&a->running_mean, c, a->momentum, mean);
        move_running(&a->running_var, c, a->momentum, var * M / (M - 1));
    }
    if (!a->y.data)
        return;
    const kn_array *more = add.data ? &add : &x;
    for (kn_ref_walk w = kn_ref_walk_over(&y, &x, more, NULL); w.more; kn_ref_walk_next(&w)) {
        double h = (kn_ref_get(&x, w.off[1]) - mean) * rstd;
        double v = h * of_channel(&a->w, c, 1) + of_channel(&a->b, c, 0);
        v += add.data ? kn_ref_get(&add, w.off[2]) : 0;
        kn_ref_set_computed(&y, w.off[0], a->relu && v <= 0 ? 0 : v);
    }
}

kn_status kn_ref_batch_norm(const void *args)
{
    const kn_batch_norm_args *a = args;
    for (int64_t c = 0; c < a->x.shape[1]; c++)
        norm_channel(a, c);
    return KN_DONE;
}

/* dy at offset g, of x at offset i, or 0 where the result was. */
static double masked(const kn_batch_norm_grad_args *a, const kn_array *dy, int64_t g,
                     const kn_array *y, int64_t i, double h, int64_t c)
{
    const double d = kn_ref_get(dy, g);
    if (!a->relu)
        return d;
    const double v =
        y->data ? kn_ref_get(y, i) : h * of_channel(&a->w, c, 1) + of_channel(&a->b, c, 0);
    return v <= 0 ? 0 : d;
}

/* An array, or one that stands in where it isn't there. */
static const kn_array *or_else(const kn_array *a, const kn_array *otherwise)
{
    return a->data ? a : otherwise;
}

static void grad_channel(const kn_batch_norm_grad_args *a, int64_t c)
{
    kn_array x = channel_of(&a->x, c), dy = channel_of(&a->dy, c), dx = channel_of(&a->dx, c),
             y = channel_of(&a->y, c), dadd = channel_of(&a->dadd, c);
    double M = (double)kn_array_numel(&x);
    double mean = kn_ref_get(&a->mean, c), rstd = kn_ref_get(&a->rstd, c), dw = 0, db = 0;
    const kn_array *at_y = or_else(&y, &x), *at_dadd = or_else(&dadd, &x);
    for (kn_ref_walk w = kn_ref_walk_over(&dy, &x, at_y, at_dadd, NULL); w.more;
         kn_ref_walk_next(&w)) {
        double h = (kn_ref_get(&x, w.off[1]) - mean) * rstd;
        double g = masked(a, &dy, w.off[0], &y, w.off[2], h, c);
        if (dadd.data)
            kn_ref_set(&dadd, w.off[3], g);
        dw += g * h;
        db += g;
    }
    if (a->dw.data)
        kn_ref_set_computed(&a->dw, c * a->dw.stride[0], dw);
    if (a->db.data)
        kn_ref_set_computed(&a->db, c * a->db.stride[0], db);
    if (!a->dx.data)
        return;
    const double scale = rstd * of_channel(&a->w, c, 1);
    if (a->mean_dw.data)
        dw = of_channel(&a->mean_dw, c, 0), db = of_channel(&a->mean_db, c, 0), M = 1;
    for (kn_ref_walk w = kn_ref_walk_over(&dx, &dy, &x, at_y, NULL); w.more; kn_ref_walk_next(&w)) {
        double h = (kn_ref_get(&x, w.off[2]) - mean) * rstd;
        double g = masked(a, &dy, w.off[1], &y, w.off[3], h, c);
        double less = a->training ? (db + h * dw) / M : 0;
        kn_ref_set_computed(&dx, w.off[0], scale * (g - less));
    }
}

kn_status kn_ref_batch_norm_grad(const void *args)
{
    const kn_batch_norm_grad_args *a = args;
    for (int64_t c = 0; c < a->x.shape[1]; c++)
        grad_channel(a, c);
    return KN_DONE;
}

/* ---- parts of a batch, joined in pairs (Chan, Golub and LeVeque, 1979) ---------------------- */

/* The statistics of some rows of a channel. */
typedef struct part {
    double a, b, count;
} part;

enum { LEVELS = 64 }; /* of pairs: rows are fewer than 2^63 */

static part join(const kn_batch_norm_join_args *j, part x, part y)
{
    if (!j->moments)
        return (part){ x.a + y.a, x.b + y.b, 0 };
    const double M = x.count + y.count, d = y.a - x.a;
    if (M == 0)
        return x;
    return (part){ x.a + d * (y.count / M), x.b + y.b + d * d * (x.count * y.count / M), M };
}

static part row_of(const kn_batch_norm_join_args *j, int64_t i, int64_t c)
{
    part p = { kn_ref_get(&j->from_a, i * j->from_a.stride[0] + c * j->from_a.stride[1]),
               kn_ref_get(&j->from_b, i * j->from_b.stride[0] + c * j->from_b.stride[1]), 0 };
    if (j->moments) {
        p.b *= j->scale;
        p.count =
            j->from_count.data ? kn_ref_get(&j->from_count, i * j->from_count.stride[0]) : j->each;
    }
    return p;
}

/* waits[k] is of 2^k rows in front of those that are yet to come, and waits for as many more. */
static part join_rows(const kn_batch_norm_join_args *j, int64_t c)
{
    part waits[LEVELS], p = { 0 };
    const int64_t n = j->from_a.shape[0];
    for (int64_t i = 0; i < n; i++) {
        int level = 0;
        p = row_of(j, i, c);
        for (; i >> level & 1; level++)
            p = join(j, waits[level], p);
        waits[level] = p;
    }
    bool first = true;
    for (int level = 0; n >> level; level++)
        if (n >> level & 1) {
            p = first ? waits[level] : join(j, waits[level], p);
            first = false;
        }
    return p;
}

static void join_channel(const kn_batch_norm_join_args *j, int64_t c)
{
    part p = join_rows(j, c);
    if (j->finish && j->moments) {
        if (p.count > 1) {
            move_running(&j->running_mean, c, j->momentum, p.a);
            move_running(&j->running_var, c, j->momentum, p.b / (p.count - 1));
        }
        p.b = p.count > 0 ? p.b / p.count : 0;
    } else if (j->finish) {
        const double M = kn_ref_get(&j->from_count, 0);
        p.a = M > 0 ? p.a / M : 0;
        p.b = M > 0 ? p.b / M : 0;
    }
    kn_ref_set_computed(&j->a, c * j->a.stride[0], p.a);
    kn_ref_set_computed(&j->b, c * j->b.stride[0], p.b);
    if (c == 0 && j->count.data)
        kn_ref_set(&j->count, 0, p.count);
}

kn_status kn_ref_batch_norm_join(const void *args)
{
    const kn_batch_norm_join_args *j = args;
    for (int64_t c = 0; c < j->from_a.shape[1]; c++)
        join_channel(j, c);
    return KN_DONE;
}
