/* kernels/cpu/reference_reduce.c: sums, means, extremes over dims; the fixed-point norm that does
 * not depend on how its values are divided among ranks. */
#include "kernels/cpu/reference.h"
#include "kernels/step_numbers.h"
#include <math.h>

/* ---- reductions over dims ------------------------------------------------------------------ */

/* The state of one output element. */
typedef struct fold {
    double sum, best;
    int64_t isum, ibest;
    int64_t count, where; /* where: the position of best among the reduced elements */
} fold;

/* NaN beats everything; of equals the first stays. */
static bool beats(double x, double best, bool smaller)
{
    if (isnan(best))
        return false;
    return isnan(x) || (smaller ? x < best : x > best);
}

static void fold_float(fold *f, kn_reduce_kind kind, double x)
{
    f->sum += x;
    if (f->count == 0 || beats(x, f->best, kind == KN_MIN)) {
        f->best = x;
        f->where = f->count;
    }
    f->count++;
}

static void fold_int(fold *f, kn_reduce_kind kind, int64_t x)
{
    f->sum += (double)x;
    f->isum = (int64_t)((uint64_t)f->isum + (uint64_t)x);
    if (f->count == 0 || (kind == KN_MIN ? x < f->ibest : x > f->ibest)) {
        f->ibest = x;
        f->where = f->count;
    }
    f->count++;
}

/* Over nothing: SUM 0, MEAN NaN (0 / 0), MAX -inf and MIN +inf (an integer's own extreme). */
static void fold_store(const fold *f, kn_reduce_kind kind, const kn_array *dst, int64_t at,
                       bool ints)
{
    bool into_int = kn_dtype_is_int(dst->dtype);
    switch (kind) {
    case KN_SUM:
        if (ints && into_int)
            kn_ref_set_int(dst, at, f->isum);
        else
            kn_ref_set_computed(dst, at, f->sum);
        break;
    case KN_MEAN:
        kn_ref_set_computed(dst, at, f->sum / (double)f->count);
        break;
    case KN_ARGMAX:
        kn_ref_set_int(dst, at, f->where);
        break;
    default: /* KN_MAX, KN_MIN */
        if (f->count == 0)
            kn_ref_set(dst, at, kind == KN_MAX ? -INFINITY : INFINITY);
        else if (ints)
            kn_ref_set_int(dst, at, f->ibest);
        else
            kn_ref_set(dst, at, f->best);
    }
}

/* For every element of dst, a second walk over the dims in which dst has only one. */
kn_status kn_ref_reduce(const void *args)
{
    const kn_reduce_args *a = args;
    const kn_array *dst = &a->dst, *src = &a->src;
    bool ints = kn_dtype_is_int(src->dtype);
    int64_t inner[KN_MAX_DIMS];
    for (int d = 0; d < src->ndim; d++)
        inner[d] = dst->shape[d] == src->shape[d] ? 1 : src->shape[d];
    for (kn_ref_walk w = kn_ref_walk_over(dst, src, NULL); w.more; kn_ref_walk_next(&w)) {
        fold f = { 0 };
        kn_ref_walk v = kn_ref_walk_shape(src->ndim, inner, 1, &src);
        for (; v.more; kn_ref_walk_next(&v)) {
            int64_t at = w.off[1] + v.off[0];
            if (ints)
                fold_int(&f, a->kind, kn_ref_get_int(src, at));
            else
                fold_float(&f, a->kind, kn_ref_get(src, at));
        }
        fold_store(&f, a->kind, dst, w.off[0], ints);
    }
    return KN_DONE;
}

/* ---- the norm: absmax, then squares in fixed point, then the clip factor --------------------- */

static kn_array run_array(const kn_run *r)
{
    return kn_array_make((void *)(uintptr_t)r->data, r->dtype, 1, &r->count);
}

kn_status kn_ref_absmax(const void *args)
{
    const kn_absmax_args *a = args;
    double max = 0;
    int64_t first = -1;
    for (int r = 0; r < a->runs; r++) {
        kn_array x = run_array(&a->run[r]);
        for (int64_t i = 0; i < a->run[r].count; i++) {
            double v = fabs(kn_ref_get(&x, i));
            if (beats(v, max, false))
                max = v;
            if (first < 0 && !isfinite((float)v))
                first = r;
        }
    }
    *a->out = (float)max;
    if (a->first)
        *a->first = first;
    return KN_DONE;
}

/* floor((x 2^-e)^2 2^60): below 2^60. The square of an f32 is exact in double, and so are the
 * multiplications by powers of two; |x| 2^-e < 2^-31 gives 0. */
static uint64_t fixed_square(double x, int e)
{
    double scaled = ldexp(x, -e);
    return (uint64_t)(scaled * scaled * 0x1p60);
}

/* Adds v 2^(40 k) for the k-th limb: v has up to 60 bits, so it touches the first two, and a carry
 * may run on. Limbs stay in [0, 2^40). */
static void limbs_add(int64_t limb[KN_SQSUM_LIMBS], uint64_t v)
{
    for (int k = 0; k < KN_SQSUM_LIMBS && v > 0; k++) {
        v += (uint64_t)limb[k];
        limb[k] = (int64_t)(v & ((1ULL << 40) - 1));
        v >>= 40;
    }
}

kn_status kn_ref_sqsum(const void *args)
{
    const kn_sqsum_args *a = args;
    for (int k = 0; k < KN_SQSUM_LIMBS; k++)
        a->out[k] = 0;
    if (*a->absmax == 0 || !isfinite(*a->absmax))
        return KN_DONE;
    int e;
    frexp(*a->absmax, &e); /* absmax = m 2^e with m in [1/2, 1) */
    for (int r = 0; r < a->runs; r++) {
        kn_array x = run_array(&a->run[r]);
        for (int64_t i = 0; i < a->run[r].count; i++)
            limbs_add(a->out, fixed_square(kn_ref_get(&x, i), e));
    }
    return KN_DONE;
}

kn_status kn_ref_powsum(const void *args)
{
    const kn_powsum_args *a = args;
    for (int k = 0; k < KN_SQSUM_LIMBS; k++)
        a->out[k] = 0;
    double max = *a->absmax;
    if (max == 0 || !isfinite(max))
        return KN_DONE;
    for (int r = 0; r < a->runs; r++) {
        kn_array x = run_array(&a->run[r]);
        for (int64_t i = 0; i < a->run[r].count; i++) {
            double share =
                fmin(1, fabs(kn_ref_get(&x, i)) / max); /* f64 values may pass f32's max */
            limbs_add(a->out, (uint64_t)(pow(share, a->p) * 0x1p60));
        }
    }
    return KN_DONE;
}

kn_status kn_ref_clip(const void *args)
{
    kn_clip_numbers(args);
    return KN_DONE;
}
