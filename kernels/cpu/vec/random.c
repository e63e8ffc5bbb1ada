/* kernels/cpu/vec/random.c: random draws and dropout, bit for bit those of kernels/philox.h, many
 * counters at a time. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/philox.h"
#include <string.h>

/* ---- Philox in vectors ---------------------------------------------------------------------- */

#define CHAINS 2               /* independent counters in flight hide the multiplier's latency */
#define WORDS  (2 * CHAINS)    /* vectors of words of one call */
#define GROUP  (WORDS * KN_VW) /* elements of one call */
#define CHUNK  16384           /* elements of a task, a multiple of GROUP */

/* Lane l computes the counter that stands at the place that interleaving gives lane l: even lanes
 * come first. */
VEC_INLINE vq vq_lane_blocks(void)
{
    vq v;
    for (uint64_t i = 0; i < KN_VW / 2; i++)
        v[i] = i % 2 * (KN_VW / 4) + i / 2;
    return v;
}

/* One round: multiply, swap, xor with the key. Words lie in the low halves of the lanes; the high
 * halves are rubbish. */
VEC_INLINE void v_philox_round(vq c[4], uint32_t key0, uint32_t key1)
{
    const vq a = vq_mul_low(c[0], vq_set1(0xD2511F53u));
    const vq b = vq_mul_low(c[2], vq_set1(0xCD9E8D57u));
    c[0] = (b >> 32) ^ c[1] ^ vq_set1(key0);
    c[1] = b;
    c[2] = (a >> 32) ^ c[3] ^ vq_set1(key1);
    c[3] = a;
}

/* The words of elements 4 block .. 4 block + GROUP - 1, in order. */
VEC_INLINE void v_philox(uint64_t seed, uint64_t stream, uint64_t block, vu w[WORDS])
{
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    vq c[CHAINS][4];
    for (uint64_t k = 0; k < CHAINS; k++) {
        c[k][0] = vq_set1(block + k * (KN_VW / 2)) + vq_lane_blocks();
        c[k][1] = c[k][0] >> 32;
        c[k][2] = vq_set1(stream);
        c[k][3] = vq_set1(stream >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int k = 0; k < CHAINS; k++)
            v_philox_round(c[k], key0, key1);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const vq low = vq_set1(0xffffffffu);
    for (int k = 0; k < CHAINS; k++) {
        const vq first = (c[k][0] & low) | c[k][1] << 32, second = (c[k][2] & low) | c[k][3] << 32;
#if KN_VW == 16
        w[2 * k] = (vu)_mm512_unpacklo_epi64((__m512i)first, (__m512i)second);
        w[2 * k + 1] = (vu)_mm512_unpackhi_epi64((__m512i)first, (__m512i)second);
#elif KN_VW == 8
        w[2 * k] = (vu)_mm256_unpacklo_epi64((__m256i)first, (__m256i)second);
        w[2 * k + 1] = (vu)_mm256_unpackhi_epi64((__m256i)first, (__m256i)second);
#else
        w[2 * k] = (vu)(vq){ first[0], second[0] };
        w[2 * k + 1] = (vu)(vq){ first[1], second[1] };
#endif
    }
}

void vec_words(uint64_t seed, uint64_t stream, uint64_t start, int64_t n, uint32_t *word)
{
    const uint64_t end = start + (uint64_t)n;
    for (uint64_t g = start / GROUP * GROUP; g < end; g += GROUP) {
        vu w[WORDS];
        v_philox(seed, stream, g / 4, w);
        const uint64_t from = g > start ? g : start, to = g + GROUP < end ? g + GROUP : end;
        memcpy(word + (from - start), (const uint32_t *)w + (from - g),
               (size_t)(to - from) * sizeof *word);
    }
}

VEC_INLINE vf v_uniform01(vu word)
{
    return v_to_float((vi)(word >> 8)) * v_set1(0x1p-24f);
}

/* ---- draws ---------------------------------------------------------------------------------- */

#if KN_VW > 4 || defined(__FP_FAST_FMAF)
#define HAVE_FMA 1 /* philox.h requires fmaf's single rounding */
#endif

#ifdef HAVE_FMA

typedef struct draw_call {
    kn_random kind;
    uint64_t seed, stream, start; /* start: of dst[0] */
    char *dst;
    kn_dtype t;
    int64_t n;
    float p0, p1;
} draw_call;

/* kn_log_poly */
VEC_INLINE vf v_log_poly(vf a)
{
    static const float c[] = { 0.0878726549f, -0.141596470f, 0.148347868f, -0.165884885f,
                               0.199720497f,  -0.250011477f, 0.333336706f, -0.499999971f };
    const vi base = v_set1_i(0x3f3504f3), shifted = (vi)a - base;
    const vf f = (vf)((shifted & v_set1_i(0x7fffff)) + base) - v_set1(1.0f);
    vf r = v_set1(c[0]);
    for (int i = 1; i < 8; i++)
        r = v_fma(r, f, v_set1(c[i]));
    return v_fma(v_to_float(shifted >> 23), v_set1(0.693147181f), v_fma(r, f * f, f));
}

/* kn_normal: both branches, then the choice */
VEC_INLINE vf v_normal(vu word)
{
    static const float near[] = { 4.94714431e-7f,  -2.78144695e-6f, -1.71877718e-5f, 2.77131779e-4f,
                                  -1.18397014e-3f, -8.11692086e-3f, 0.341717397f,    2.29603566f };
    static const float far[] = { -2.71971684e-4f, 7.86738042e-4f, -1.02580131e-3f, 1.43355507e-3f,
                                 -2.89203111e-3f, 4.65961074e-3f, 1.42463207f,     4.71708818f };
    const vf one = v_set1(1.0f);
    const vf p = v_fma(v_to_float((vi)(word >> 1)), v_set1(0x1p-32f), v_set1(0x1p-33f));
    const vf x = v_fma(v_set1(-2.0f), p, one);
    const vf w = -v_log_poly(v_set1(4.0f) * p * (one - p));
    const vm tail = v_ge(w, v_set1(6.0f));
    const vf t = v_sel(tail, v_sqrt(w) - v_set1(3.5f), w - v_set1(3.0f));
    vf r = v_sel(tail, v_set1(far[0]), v_set1(near[0]));
    for (int i = 1; i < 8; i++)
        r = v_fma(r, t, v_sel(tail, v_set1(far[i]), v_set1(near[i])));
    return (vf)((vi)(x * r) ^ (vi)(word << 31)); /* bit 0 is the sign */
}

VEC_INLINE vf draw(const draw_call *c, vu word)
{
    const vf p0 = v_set1(c->p0), p1 = v_set1(c->p1);
    if (c->kind == KN_NORMAL)
        return v_fma(p1, v_normal(word), p0);
    const vf x = v_fma(p1 - p0, v_uniform01(word), p0);
    return v_sel(v_lt(x, p1), x, p0);
}

/* Elements [begin, end) of the draw, in groups that start at multiples of GROUP; elements outside
 * are computed and dropped. */
VEC_INLINE void draw_range(const draw_call *c, uint64_t begin, uint64_t end, kn_dtype t)
{
    for (uint64_t g = begin / GROUP * GROUP; g < end; g += GROUP) {
        vu w[WORDS];
        v_philox(c->seed, c->stream, g / 4, w);
        for (uint64_t k = 0; k < WORDS; k++) {
            const uint64_t e = g + k * KN_VW;
            const vf x = draw(c, w[k]);
            if (e >= begin && e + KN_VW <= end) {
                v_put(t, c->dst, (int64_t)(e - c->start), x);
                continue;
            }
            for (uint64_t i = 0; i < KN_VW; i++)
                if (e + i >= begin && e + i < end)
                    v_put_n(t, c->dst, (int64_t)(e + i - c->start), v_set1(x[i]), 1);
        }
    }
}

static void draw_chunks(const void *ctx, int64_t first, int64_t last)
{
    const draw_call *c = ctx;
    const uint64_t begin = c->start + (uint64_t)(first * CHUNK);
    const uint64_t end = c->start + (uint64_t)v_min_i64(last * CHUNK, c->n);
    VEC_BY_DTYPE(c->t, draw_range, c, begin, end);
}

kn_status VEC_FN(vec_random)(const void *args)
{
    const kn_random_args *a = args;
    const int64_t n = kn_array_numel(&a->dst);
    const draw_call c = { a->kind,     kn_seed_of(a->seed, a->seed_at),
                          a->stream,   (uint64_t)a->start,
                          a->dst.data, a->dst.dtype,
                          n,           (float)a->p0,
                          (float)a->p1 };
    if (!vec_float(a->dst.dtype) || a->start < 0)
        return KN_DECLINED;
    kn_each_range(kn_threads_for(n * 16), (n + CHUNK - 1) / CHUNK, draw_chunks, &c);
    return KN_DONE;
}

#else

kn_status VEC_FN(vec_random)(const void *args)
{
    (void)args;
    return KN_DECLINED;
}

#endif

/* ---- dropout -------------------------------------------------------------------------------- */

typedef struct dropout_call {
    uint64_t seed, stream;
    char *y;
    const char *x;
    kn_dtype t;
    int64_t n;
    float threshold, scale; /* keep where word >> 8 >= threshold: exact in f32 */
} dropout_call;

/* Elements [begin, end); begin is a multiple of GROUP. */
VEC_INLINE void dropout_range(const dropout_call *c, int64_t begin, int64_t end, kn_dtype t)
{
    const vf threshold = v_set1(c->threshold), scale = v_set1(c->scale);
    for (int64_t g = begin; g < end; g += GROUP) {
        vu w[WORDS];
        v_philox(c->seed, c->stream, (uint64_t)g / 4, w);
        for (int k = 0; k < WORDS; k++) {
            const int64_t e = g + k * KN_VW, n = end - e;
            if (n <= 0)
                break;
            const vm keep = v_ge(v_to_float((vi)(w[k] >> 8)), threshold);
            v_put_n(t, c->y, e, v_sel(keep, v_get_n(t, c->x, e, n) * scale, v_zero()), n);
        }
    }
}

static void drop_chunks(const void *ctx, int64_t begin, int64_t end)
{
    const dropout_call *c = ctx;
    VEC_BY_DTYPE(c->t, dropout_range, c, begin * CHUNK, v_min_i64(end * CHUNK, c->n));
}

kn_status VEC_FN(vec_dropout)(const void *args)
{
    const kn_dropout_args *a = args;
    const int64_t n = kn_array_numel(&a->x);
    if (!vec_float(a->x.dtype) || a->y.dtype != a->x.dtype || !kn_array_contiguous(&a->x) ||
        !kn_array_contiguous(&a->y))
        return KN_DECLINED;
    const dropout_call c = { kn_seed_of(a->seed, a->seed_at),
                             a->stream,
                             a->y.data,
                             a->x.data,
                             a->x.dtype,
                             n,
                             (float)kn_dropout_threshold(a->p),
                             (float)kn_dropout_scale(a->p) };
    kn_each_range(kn_threads_for(n * 16), (n + CHUNK - 1) / CHUNK, drop_chunks, &c);
    return KN_DONE;
}
