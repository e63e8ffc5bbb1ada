/* kernels/cpu/vec/norms_of_grads.c: the largest magnitude of lists of runs, and their sum of
 * squares in fixed point; the bits are those of the reference. */
#include "kernels/cpu/vec/chunks.h"

#include <string.h>

static int64_t run_count(const void *list, int i)
{
    return ((const kn_run *)list)[i].count;
}

/* ---- the largest magnitude ------------------------------------------------------------------ */

/* Magnitudes of floats order as their bits do, NaN above infinity above the rest. */
VEC_INLINE void absmax_chunk_of(const void *x, int64_t begin, int64_t end, int32_t *max, kn_dtype t)
{
    const vi magnitude = v_set1_i(0x7fffffff);
    vi m0 = v_set1_i(*max), m1 = m0;
    int64_t i = begin;
    for (; i + 2 * KN_VW <= end; i += 2 * KN_VW) {
        m0 = v_max_i(m0, (vi)v_get(t, x, i) & magnitude);
        m1 = v_max_i(m1, (vi)v_get(t, x, i + KN_VW) & magnitude);
    }
    for (; i < end; i += KN_VW)
        m0 = v_max_i(m0, (vi)v_get_n(t, x, i, end - i) & magnitude);
    m0 = v_max_i(m0, m1);
    for (int k = 0; k < KN_VW; k++)
        *max = m0[k] > *max ? m0[k] : *max;
}

static void absmax_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_run *r = &((const kn_run *)list)[i];
    VEC_BY_DTYPE(r->dtype, absmax_chunk_of, r->data, begin, end, (int32_t *)ctx);
}

static bool runs_ok(const kn_run *run, int runs)
{
    for (int i = 0; i < runs; i++)
        if (!vec_float(run[i].dtype))
            return false;
    return true;
}

/* Not worth threads: it looks at runs again only where a value is not finite. */
static int64_t first_nonfinite(const kn_run *run, int runs)
{
    for (int i = 0; i < runs; i++) {
        int32_t max = 0;
        absmax_chunk(run, i, 0, run[i].count, &max);
        if (max >= 0x7f800000)
            return i;
    }
    return -1;
}

#define MAX_THREADS 256

kn_status VEC_FN(vec_absmax)(const void *args)
{
    const kn_absmax_args *a = args;
    if (!runs_ok(a->run, a->runs))
        return KN_DECLINED;
    int32_t part[MAX_THREADS] = { 0 }, max = 0;
    const int threads = each_chunk(a->run, a->runs, run_count, 4, absmax_chunk, (char *)part,
                                   sizeof part[0], MAX_THREADS);
    for (int t = 0; t < threads; t++)
        max = part[t] > max ? part[t] : max;
    *a->out = kn_f32_from_bits((uint32_t)max);
    if (a->first)
        *a->first = max >= 0x7f800000 ? first_nonfinite(a->run, a->runs) : -1;
    return KN_DONE;
}

/* ---- the sum of squares in fixed point ------------------------------------------------------ */

typedef struct sqsum_ctx {
    unsigned __int128 sum;
    int32_t top; /* e + 126: the biased exponent of absmax */
} sqsum_ctx;

#define LIMB_BITS 40
#define LIMB_MASK ((1ULL << LIMB_BITS) - 1)

/* x = M 2^(E - 150) with M < 2^24 and E its biased exponent (1 for subnormals), so that
 *   floor((x 2^-e)^2 2^60) = (M^2 2^12) >> 2 (top - E),   below 2^60. The sum of a lane pair. */
VEC_INLINE vq fixed_squares(vf x, vi top)
{
    const vi one = v_set1_i(1), bits = (vi)x & v_set1_i(0x7fffffff), exponent = bits >> 23;
    const vi implicit = v_min_i(exponent, one) << 23; /* 0 for subnormals */
    const vq m = (vq)(((bits & v_set1_i(0x7fffff)) | implicit) << 6), m2 = m >> 32;
    const vi gap = top - v_max_i(exponent, one);
    const vi shift = v_min_i(gap + gap, v_set1_i(62)); /* 62 leaves 0 */
    const vq even = vq_mul_low(m, m) >> ((vq)shift & vq_set1(0xffffffffu));
    const vq odd = vq_mul_low(m2, m2) >> ((vq)shift >> 32);
    return even + odd;
}

VEC_INLINE void sqsum_chunk_of(const void *x, int64_t begin, int64_t end, sqsum_ctx *c, kn_dtype t)
{
    const vq mask = vq_set1(LIMB_MASK);
    const vi top = v_set1_i(c->top);
    vq low = vq_set1(0), high = low; /* up to 2^16 values: no overflow */
    for (int64_t i = begin; i < end; i += 4 * KN_VW) {
        vq sum = vq_set1(0); /* up to 8 values: below 2^63 */
        for (int64_t k = i; k < i + 4 * KN_VW && k < end; k += KN_VW)
            sum += fixed_squares(v_get_n(t, x, k, end - k), top);
        low += sum & mask;
        high += sum >> LIMB_BITS;
    }
    for (int k = 0; k < KN_VW / 2; k++)
        c->sum += ((unsigned __int128)high[k] << LIMB_BITS) + low[k];
}

static void sqsum_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_run *r = &((const kn_run *)list)[i];
    VEC_BY_DTYPE(r->dtype, sqsum_chunk_of, r->data, begin, end, (sqsum_ctx *)ctx);
}

kn_status VEC_FN(vec_sqsum)(const void *args)
{
    const kn_sqsum_args *a = args;
    const float absmax = *a->absmax;
    if (!runs_ok(a->run, a->runs) || (absmax > 0 && absmax < 0x1p-126f))
        return KN_DECLINED; /* a subnormal maximum would shift to the left */
    memset(a->out, 0, KN_SQSUM_LIMBS * sizeof *a->out);
    if (!(absmax > 0) || absmax > 0x1.fffffep127f)
        return KN_DONE;
    sqsum_ctx part[MAX_THREADS];
    for (int t = 0; t < MAX_THREADS; t++)
        part[t] = (sqsum_ctx){ 0, (int32_t)(kn_f32_bits(absmax) >> 23) };
    const int threads = each_chunk(a->run, a->runs, run_count, 4, sqsum_chunk, (char *)part,
                                   sizeof part[0], MAX_THREADS);
    unsigned __int128 sum = 0;
    for (int t = 0; t < threads; t++)
        sum += part[t].sum;
    for (int k = 0; k < KN_SQSUM_LIMBS; k++, sum >>= LIMB_BITS)
        a->out[k] = (int64_t)(sum & LIMB_MASK);
    return KN_DONE;
}
