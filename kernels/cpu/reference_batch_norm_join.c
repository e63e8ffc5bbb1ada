/* kernels/cpu/reference_batch_norm_join.c: joins the sums, or the moments, of the parts of a batch,
 * in pairs (Chan, Golub and LeVeque, 1979). */
#include "kernels/cpu/reference.h"

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

static void move_running(const kn_array *running, int64_t c, double momentum, double value)
{
    if (running->data)
        kn_ref_set_computed(running, c * running->stride[0],
                            (1 - momentum) * kn_ref_get(running, c * running->stride[0]) +
                                momentum * value);
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
