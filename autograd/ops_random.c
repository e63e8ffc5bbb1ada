/* autograd/ops_random.c: draws that are functions of a seed and a stream, or of the random key of
 * the running module call (autograd/autograd.h). None has a gradient.
 *
 * Integers and choices take 48 random bits a number: two draws of 24 bits in one f64, exactly. */
#include "autograd/ops.h"
#include "kernels/kernels_internal.h"
#include "kernels/philox.h"
#include <math.h>

/* The place of a draw: its seed, and for keyed ones, where kernels find it in a recorded step. */
typedef struct key {
    uint64_t seed, stream;
    bool keyed;
} key;

static key next_key(void)
{
    return (key){ kn_draw_seed(), kn_draw_stream(), true };
}

static kn_tensor *draw(key k, kn_random kind, double p1, kn_dtype dtype, kn_device device, int ndim,
                       const int64_t *shape)
{
    bool ok = true;
    kn_random_args how = { .kind = kind, .seed = k.seed, .stream = k.stream, .p1 = p1 };
    if (k.keyed)
        how.seed_at = kn_seed_place(device ? device : kn_default_device, k.seed, &ok);
    return ok ? kn_drawn(dtype, device, how, ndim, shape) : NULL;
}

/* f64 multiples of 2^-48 in [0, 1). */
static kn_tensor *fine_uniform(key k, kn_device device, int ndim, const int64_t *shape)
{
    kn_tensor *high = draw(k, KN_UNIFORM, 1, KN_F64, device, ndim, shape);
    k.stream = kn_hash64(k.stream, 0x6c6f77u);
    kn_tensor *low = draw(k, KN_UNIFORM, 0x1p-24, KN_F64, device, ndim, shape);
    return kn_add(high, low);
}

/* ---- uniform and normal, as x ---------------------------------------------------------------- */

static kn_tensor *draw_like(const char *op, const kn_tensor *x, kn_random kind)
{
    if (!kn_takes(op, x, true))
        return NULL;
    return draw(next_key(), kind, 1, x->dtype, kn_device_of(x), x->ndim, x->shape);
}

kn_tensor *kn_rand_like(const kn_tensor *x)
{
    return draw_like("rand_like", x, KN_UNIFORM);
}

kn_tensor *kn_randn_like(const kn_tensor *x)
{
    return draw_like("randn_like", x, KN_NORMAL);
}

/* ---- integers -------------------------------------------------------------------------------- */

/* The integers [0, largest] are exact in the dtype, in floats the negative ones too. */
static double largest_integer(kn_dtype t)
{
    switch (t) {
    case KN_BOOL:
        return 1;
    case KN_U8:
        return UINT8_MAX;
    case KN_I32:
        return INT32_MAX;
    case KN_BF16:
        return 0x1p8;
    case KN_F16:
        return 0x1p11;
    case KN_F32:
        return 0x1p24;
    default:
        return 0x1p53;
    }
}

/* Whether all integers of [low, high) are of the dtype. */
static bool range_fits(const char *op, kn_dtype t, int64_t low, int64_t high)
{
    if (!kn_dtype_is_arithmetic(t))
        return kn_fail("%s: %s has no arithmetic; floats, i64, i32, u8 and bool are supported", op,
                       kn_dtype_name(t));
    const int64_t most = (int64_t)largest_integer(t);
    const int64_t least = t == KN_BOOL || t == KN_U8 ? 0 : t == KN_I32 ? INT32_MIN : -most;
    if (low >= high)
        return kn_fail("%s: [%lld, %lld) is empty; low is less than high", op, (long long)low,
                       (long long)high);
    return (low >= least && high - 1 <= most && high - low <= (int64_t)1 << 48) ||
           kn_fail("%s: [%lld, %lld) as %s; numbers from %lld to %lld, at most 2^48 of them, are "
                   "supported",
                   op, (long long)low, (long long)high, kn_dtype_name(t), (long long)least,
                   (long long)most);
}

static kn_tensor *integers(key k, kn_dtype dtype, kn_device device, int64_t low, int64_t high,
                           int ndim, const int64_t *shape)
{
    kn_tensor *u = fine_uniform(k, device, ndim, shape);
    kn_tensor *count = kn_cast(kn_scale(u, (double)(high - low)), KN_I64);
    kn_tensor *first = count ? kn_full(KN_I64, kn_device_of(count), (double)low, KN_SCALAR) : NULL;
    return kn_cast(kn_add(count, first), dtype);
}

kn_tensor *kn_randint(kn_dtype dtype, kn_device device, int64_t low, int64_t high, uint64_t seed,
                      uint64_t stream, int ndim, const int64_t *shape)
{
    dtype = dtype == KN_DTYPE_DEFAULT ? KN_I64 : dtype;
    if (!kn_ok() || !range_fits("randint", dtype, low, high))
        return NULL;
    return integers((key){ seed, stream, false }, dtype, device, low, high, ndim, shape);
}

kn_tensor *kn_randint_like(const kn_tensor *x, int64_t low, int64_t high)
{
    if (!kn_ok() || !kn_check(x, "randint_like") ||
        !range_fits("randint_like", x->dtype, low, high))
        return NULL;
    return integers(next_key(), x->dtype, kn_device_of(x), low, high, x->ndim, x->shape);
}

/* Swaps each element with one at or before it, from the last on (Fisher and Yates). */
static void shuffle(int64_t *place, int64_t n, uint64_t seed, uint64_t stream)
{
    for (int64_t i = 0; i < n; i++)
        place[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        const uint64_t high = kn_philox_at(seed, stream, 2 * (uint64_t)i),
                       low = kn_philox_at(seed, stream, 2 * (uint64_t)i + 1);
        const double u = (double)(high << 16 | low >> 16) * 0x1p-48;
        const int64_t j = (int64_t)(u * (double)(i + 1)), was = place[i];
        place[i] = place[j];
        place[j] = was;
    }
}

kn_tensor *kn_randperm(kn_device device, int64_t n, uint64_t seed, uint64_t stream)
{
    if (!kn_ok())
        return NULL;
    if (n < 0 || n > (int64_t)1 << 48)
        return kn_fail_null("randperm: %lld elements; 0 to 2^48 are supported", (long long)n);
    if (device == KN_META)
        return kn_empty(KN_I64, device, 1, &n);
    int64_t *place = kn_host_alloc((size_t)(n + 1) * sizeof *place);
    if (place)
        shuffle(place, n, seed, stream);
    return kn_of_host(KN_I64, device, place, 1, &n);
}

/* ---- bernoulli ------------------------------------------------------------------------------- */

kn_tensor *kn_bernoulli(kn_tensor *p)
{
    if (!kn_takes("bernoulli", p, true))
        return NULL;
    const bool wide = p->dtype == KN_F64;
    const key k = next_key();
    const kn_device d = kn_device_of(p);
    kn_tensor *u = wide ? fine_uniform(k, d, p->ndim, p->shape)
                        : draw(k, KN_UNIFORM, 1, KN_F32, d, p->ndim, p->shape);
    kn_tensor *bound = u ? kn_cast(kn_detach(p), wide ? KN_F64 : KN_F32) : NULL;
    return kn_cast(kn_lt(u, bound), p->dtype);
}

/* ---- multinomial ----------------------------------------------------------------------------- */

/* Whether each row of w[M, K] can give so many choices without repeating one: bool [M, 1]. */
static kn_tensor *possible(kn_tensor *w, int64_t choices)
{
    const kn_device d = kn_device_of(w);
    kn_tensor *zero = kn_zeros(KN_F64, d, KN_SCALAR),
              *infinite = kn_full(KN_F64, d, INFINITY, KN_SCALAR),
              *least = kn_full(KN_I64, d, (double)choices, KN_SCALAR);
    kn_tensor *enough = kn_ge(kn_sum(kn_gt(w, zero), 1, (int64_t[]){ 1 }, true), least);
    kn_tensor *finite = kn_lt(kn_sum(w, 1, (int64_t[]){ 1 }, true), infinite);
    return kn_logical_and(kn_logical_and(enough, finite),
                          kn_ge(kn_amin(w, KN_SHAPE(1), true), zero));
}

/* On the CPU a row that can't is an error. */
static bool check_rows(const kn_tensor *p, kn_tensor *ok, int64_t choices)
{
    kn_tensor *bad = kn_logical_not(ok), *any = kn_sum(bad, 0, NULL, false);
    if (!any || kn_device_of(any) != KN_CPU || kn_item(any) == 0)
        return kn_ok();
    kn_tensor *first = kn_argmax(kn_cast(bad, KN_I32), 0);
    return kn_fail("multinomial: row %lld of p %s can't give %lld choices; weights are finite and "
                   "at least 0, and as many are above 0 as are drawn without replacement",
                   (long long)kn_item(first), KN_SHOWN(p), (long long)choices);
}

/* The largest of w / E with E exponential, in order: draws from those that are left (Efraimidis and
 * Spirakis, Weighted random sampling, 2006). Logarithms keep the smallest weights apart from 0.
 * u + 2^-49 lies inside of (0, 1). */
static kn_tensor *without_replacement(kn_tensor *w, int64_t n)
{
    kn_tensor *index = NULL;
    kn_tensor *u = fine_uniform(next_key(), kn_device_of(w), w->ndim, w->shape);
    kn_tensor *e = kn_neg(kn_log(kn_add_scalar(u, 0x1p-49)));
    kn_tensor *place = kn_sub(kn_log(w), kn_log(e));
    return place && kn_topk(place, n, 1, .indices = &index) ? index : NULL;
}

/* Rows of w whose sum is tiny, times a power of two: there u sum w, rounded, may be sum w. */
static kn_tensor *well_above_zero(kn_tensor *w)
{
    kn_tensor *sum = kn_sum(w, 1, (int64_t[]){ 1 }, true);
    kn_tensor *tiny = kn_lt(sum, kn_full(KN_F64, kn_device_of(w), 0x1p-900, KN_SCALAR));
    return kn_where(tiny, kn_scale(w, 0x1p600), w);
}

/* The first k with w_0 + ... + w_k > u sum w. */
static kn_tensor *with_replacement(kn_tensor *w, int64_t n)
{
    const int64_t rows = w->shape[0], K = w->shape[1];
    kn_tensor *u = fine_uniform(next_key(), kn_device_of(w), 2, (int64_t[]){ rows, n });
    kn_tensor *sums = u ? kn_cumsum(well_above_zero(w), 1) : NULL;
    return kn_searchsorted(sums, kn_mul(u, kn_slice(sums, 1, K - 1, K)), true);
}

kn_tensor *kn_multinomial(kn_tensor *p, int64_t n, bool replacement)
{
    int64_t shape[KN_MAX_DIMS], rows = 1;
    if (!kn_ok() || !kn_check(p, "multinomial"))
        return NULL;
    const int64_t K = p->ndim ? p->shape[p->ndim - 1] : 0;
    if (K < 1 || !kn_dtype_is_float(p->dtype) || n < 1 || (!replacement && n > K))
        return kn_fail_null(
            "multinomial: %lld choices from %s; needs a float p[..., K], at least 1 "
            "choice, and at most K of them without replacement",
            (long long)n, KN_SHOWN(p));
    for (int d = 0; d < p->ndim; d++) {
        shape[d] = d < p->ndim - 1 ? p->shape[d] : n;
        rows *= d < p->ndim - 1 ? p->shape[d] : 1;
    }
    kn_tensor *w = kn_reshape(kn_cast(kn_detach(p), KN_F64), KN_SHAPE(rows, K));
    kn_tensor *ok = w ? possible(w, replacement ? 1 : n) : NULL;
    if (!ok || !check_rows(p, ok, n))
        return NULL;
    kn_tensor *y = replacement ? with_replacement(w, n) : without_replacement(w, n);
    kn_tensor *none = kn_full(KN_I64, kn_device_of(p), -1, KN_SCALAR);
    return kn_reshape(kn_where(ok, y, none), p->ndim, shape);
}
