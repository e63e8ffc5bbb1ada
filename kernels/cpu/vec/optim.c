/* kernels/cpu/vec/optim.c: sums over ranks, the fused optimizers, and the two kernels of the norm.
 * All are bound by memory. Lists of pieces are cut into chunks of fixed size that threads share
 * evenly, however uneven the pieces are. Every operation rounds as in the reference, so the bits
 * are those of the reference on every instruction set. */
#include "kernels/cpu/vec/iter.h"

#include <math.h>

/* ---- chunks of a list ----------------------------------------------------------------------- */

#define CHUNK 65536 /* elements */

typedef int64_t (*count_fn)(const void *list, int i);
/* Elements [begin, end) of list[i]. */
typedef void (*chunk_fn)(const void *list, int i, int64_t begin, int64_t end, void *ctx);

static int64_t piece_count(const void *list, int i)
{
    return ((const kn_opt_piece *)list)[i].count;
}

static int64_t run_count(const void *list, int i)
{
    return ((const kn_run *)list)[i].count;
}

static int64_t chunks_of(int64_t count)
{
    return (count + CHUNK - 1) / CHUNK;
}

/* Chunks [first, last) of the list's chunks, counted through. */
static void some_chunks(const void *list, int n, count_fn count, int64_t first, int64_t last,
                        chunk_fn fn, void *ctx)
{
    int64_t base = 0;
    for (int i = 0; i < n && base < last; i++) {
        const int64_t size = count(list, i), chunks = chunks_of(size);
        for (int64_t c = v_max_i64(first - base, 0); c < chunks && base + c < last; c++)
            fn(list, i, c * CHUNK, v_min_i64((c + 1) * CHUNK, size), ctx);
        base += chunks;
    }
}

typedef struct chunk_call {
    const void *list;
    int n, threads;
    count_fn count;
    int64_t chunks;
    chunk_fn fn;
    char *ctx;
    size_t step;
} chunk_call;

static void chunk_share(const void *ctx, int64_t t)
{
    const chunk_call *c = ctx;
    some_chunks(c->list, c->n, c->count, t * c->chunks / c->threads,
                (t + 1) * c->chunks / c->threads, c->fn, c->ctx + (size_t)t * c->step);
}

/* Calls fn on every chunk; ctx + t * step is thread t's. bytes an element decides on threads.
 * Returns how many threads had a share. */
static int each_chunk(const void *list, int n, count_fn count, int64_t bytes, chunk_fn fn,
                      char *ctx, size_t step, int most)
{
    int64_t chunks = 0, elements = 0;
    for (int i = 0; i < n; i++) {
        chunks += chunks_of(count(list, i));
        elements += count(list, i);
    }
    int threads = kn_threads_for(elements * bytes);
    threads = threads < most ? threads : most;
    kn_each_part(threads, chunk_share,
                 &(chunk_call){ list, n, threads, count, chunks, fn, ctx, step });
    return threads;
}

/* The updated masters, and their rounded copy if there is one. */
VEC_INLINE void put_param(const kn_opt_piece *o, int64_t i, vf p, int64_t n)
{
    v_put_n(KN_F32, o->param, i, p, n);
    if (!o->out)
        return;
    if (o->out_dtype == KN_BF16)
        v_put_n(KN_BF16, o->out, i, p, n);
    else if (o->out_dtype == KN_F16)
        v_put_n(KN_F16, o->out, i, p, n);
    else
        v_put_n(KN_F32, o->out, i, p, n);
}

/* ---- AdamW ---------------------------------------------------------------------------------- */

typedef struct adamw_ctx {
    float lr, scale, b1, b2, eps, c1, c2; /* b: 1 - beta, c: 1 - beta^t */
} adamw_ctx;

/* m += b1 (g - m);  v += b2 (g^2 - v);  p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p) */
VEC_INLINE void adamw_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end,
                               const adamw_ctx *c, kn_dtype t)
{
    const float *param = o->param;
    float *first = o->m, *second = o->v;
    const vf lr = v_set1(c->lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay),
             eps = v_set1(c->eps);
    const vf b1 = v_set1(c->b1), b2 = v_set1(c->b2), c1 = v_set1(c->c1), c2 = v_set1(c->c2);
    const vf scale = v_set1(c->scale);
    const void *grad = o->grad;
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf g = v_get_n(t, grad, i, n) * scale, p = v_get_n(KN_F32, param, i, n);
        vf m = v_get_n(KN_F32, first, i, n), v = v_get_n(KN_F32, second, i, n);
        m = m + b1 * (g - m);
        v = v + b2 * (g * g - v);
        const vf step = (m / c1) / (v_sqrt(v / c2) + eps);
        v_put_n(KN_F32, first, i, m, n);
        v_put_n(KN_F32, second, i, v, n);
        put_param(o, i, p - lr * (step + wd * p), n);
    }
}

static void adamw_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    VEC_BY_DTYPE(o->grad_dtype, adamw_chunk_of, o, begin, end, (const adamw_ctx *)ctx);
}

static bool pieces_ok(const kn_opt_piece *piece, int pieces)
{
    for (int i = 0; i < pieces; i++)
        if (piece[i].param_dtype != KN_F32 || !vec_float(piece[i].grad_dtype) ||
            (piece[i].out && !vec_float(piece[i].out_dtype)))
            return false;
    return true;
}

kn_status vec_adamw(const void *args)
{
    const kn_adamw_args *a = args;
    if (!pieces_ok(a->s.piece, a->s.pieces))
        return KN_DECLINED;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    const double t = *a->s.step;
    adamw_ctx c = { .lr = (float)*a->s.lr,
                    .scale = (float)*a->s.grad_scale,
                    .b1 = (float)(1 - a->beta1),
                    .b2 = (float)(1 - a->beta2),
                    .eps = (float)a->eps,
                    .c1 = (float)(1 - pow(a->beta1, t)),
                    .c2 = (float)(1 - pow(a->beta2, t)) };
    each_chunk(a->s.piece, a->s.pieces, piece_count, 28, adamw_chunk, (char *)&c, 0, INT32_MAX);
    return KN_DONE;
}

/* ---- SGD ------------------------------------------------------------------------------------ */

typedef struct sgd_ctx {
    float lr, scale, momentum, fresh; /* fresh: 1 - dampening */
    bool first, nesterov;
} sgd_ctx;

VEC_INLINE void sgd_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end, const sgd_ctx *c,
                             kn_dtype t)
{
    const float *param = o->param;
    float *momentum = o->m;
    const vf lr = v_set1(c->lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay);
    const vf scale = v_set1(c->scale), mu = v_set1(c->momentum), fresh = v_set1(c->fresh);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf p = v_get_n(KN_F32, param, i, n);
        vf g = v_get_n(t, o->grad, i, n) * scale + wd * p;
        if (momentum) {
            const vf m = c->first ? g : mu * v_get_n(KN_F32, momentum, i, n) + fresh * g;
            v_put_n(KN_F32, momentum, i, m, n);
            g = c->nesterov ? g + mu * m : m;
        }
        put_param(o, i, p - lr * g, n);
    }
}

static void sgd_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    VEC_BY_DTYPE(o->grad_dtype, sgd_chunk_of, o, begin, end, (const sgd_ctx *)ctx);
}

kn_status vec_sgd(const void *args)
{
    const kn_sgd_args *a = args;
    if (!pieces_ok(a->s.piece, a->s.pieces))
        return KN_DECLINED;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    sgd_ctx c = { .lr = (float)*a->s.lr,
                  .scale = (float)*a->s.grad_scale,
                  .momentum = (float)a->momentum,
                  .fresh = (float)(1 - a->dampening),
                  .first = *a->s.step == 1,
                  .nesterov = a->nesterov };
    each_chunk(a->s.piece, a->s.pieces, piece_count, 20, sgd_chunk, (char *)&c, 0, INT32_MAX);
    return KN_DONE;
}

/* ---- Lion ----------------------------------------------------------------------------------- */

typedef struct lion_ctx {
    float lr, scale, b1, b2; /* b: 1 - beta */
} lion_ctx;

/* c = m + b1 (g - m);  m += b2 (g - m);  p -= lr (sign(c) + wd p); sign(0) and sign(NaN) are c */
VEC_INLINE void lion_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end, const lion_ctx *x,
                              kn_dtype t)
{
    const float *param = o->param;
    float *average = o->m;
    const vf lr = v_set1(x->lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay),
             one = v_set1(1);
    const vf b1 = v_set1(x->b1), b2 = v_set1(x->b2), scale = v_set1(x->scale);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf p = v_get_n(KN_F32, param, i, n), m = v_get_n(KN_F32, average, i, n);
        const vf apart = v_get_n(t, o->grad, i, n) * scale - m;
        const vf c = m + b1 * apart;
        const vf sign = v_sel(v_gt(v_abs(c), v_zero()), v_copysign(one, c), c);
        v_put_n(KN_F32, average, i, m + b2 * apart, n);
        put_param(o, i, p - lr * (sign + wd * p), n);
    }
}

static void lion_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    VEC_BY_DTYPE(o->grad_dtype, lion_chunk_of, o, begin, end, (const lion_ctx *)ctx);
}

kn_status vec_lion(const void *args)
{
    const kn_lion_args *a = args;
    if (!pieces_ok(a->s.piece, a->s.pieces))
        return KN_DECLINED;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    lion_ctx c = { .lr = (float)*a->s.lr,
                   .scale = (float)*a->s.grad_scale,
                   .b1 = (float)(1 - a->beta1),
                   .b2 = (float)(1 - a->beta2) };
    each_chunk(a->s.piece, a->s.pieces, piece_count, 20, lion_chunk, (char *)&c, 0, INT32_MAX);
    return KN_DONE;
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

kn_status vec_absmax(const void *args)
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

typedef uint64_t vq __attribute__((vector_size(KN_VW * 4)));

VEC_INLINE vq vq_set1(uint64_t x)
{
    vq v;
    for (int i = 0; i < KN_VW / 2; i++)
        v[i] = x;
    return v;
}

/* low 32 bits of m, squared */
VEC_INLINE vq vq_square_low(vq m)
{
#if KN_VW == 16
    return (vq)_mm512_mul_epu32((__m512i)m, (__m512i)m);
#elif KN_VW == 8
    return (vq)_mm256_mul_epu32((__m256i)m, (__m256i)m);
#else
    m &= vq_set1(0xffffffffu);
    return m * m;
#endif
}

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
    const vi m = ((bits & v_set1_i(0x7fffff)) | implicit) << 6;
    const vi gap = top - v_max_i(exponent, one);
    const vi shift = v_min_i(gap + gap, v_set1_i(62)); /* 62 leaves 0 */
    const vq even = vq_square_low((vq)m) >> ((vq)shift & vq_set1(0xffffffffu));
    const vq odd = vq_square_low((vq)m >> 32) >> ((vq)shift >> 32);
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

kn_status vec_sqsum(const void *args)
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
