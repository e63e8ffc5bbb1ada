/* kernels/cpu/vec/rope.c: rotary embedding. The angles of a position are the same for all samples
 * and heads: their cosines and sines are computed once a call, in f64, and rounded to f32. Those of
 * a position are a function of it and of the head's width alone. */
#include "kernels/cpu/vec/rows.h"
#include "kernels/rope.h"

enum { NEAR = 32 }; /* an angle is that of a multiple of NEAR and one below NEAR */

typedef struct rope_call {
    const kn_rope_args *a;
    int64_t half;
    const double *speed;             /* [half], negative for the inverse */
    double *near_cosine, *near_sine; /* [NEAR, half] */
    float *cosine, *sine;            /* [T, half] */
    vec_rows y, x;
} rope_call;

/* Of the positions that the call has, modulo NEAR. */
static void near_angles(const rope_call *c)
{
    for (int64_t n = 0; n < v_min_i64(NEAR, c->a->x.shape[2]); n++)
        for (int64_t i = 0, j = (c->a->start + n) % NEAR; i < c->half; i++) {
            c->near_cosine[j * c->half + i] = cos((double)j * c->speed[i]);
            c->near_sine[j * c->half + i] = sin((double)j * c->speed[i]);
        }
}

/* Multiples [begin, end) of NEAR, counted from that at or before the first position: the cosine and
 * sine of the sum of two angles are products of theirs. */
static void angles(const void *ctx, int64_t begin, int64_t end)
{
    const rope_call *c = ctx;
    const int64_t start = c->a->start, half = c->half, T = c->a->x.shape[2];
    for (int64_t far = start / NEAR + begin; far < start / NEAR + end; far++)
        for (int64_t i = 0; i < half; i++) {
            const double angle = (double)(far * NEAR) * c->speed[i];
            const double cs = cos(angle), sn = sin(angle);
            const int64_t last = v_min_i64(far * NEAR + NEAR, start + T);
            for (int64_t t = v_max_i64(far * NEAR, start); t < last; t++) {
                const double near_cs = c->near_cosine[t % NEAR * half + i];
                const double near_sn = c->near_sine[t % NEAR * half + i];
                c->cosine[(t - start) * half + i] = (float)(cs * near_cs - sn * near_sn);
                c->sine[(t - start) * half + i] = (float)(sn * near_cs + cs * near_sn);
            }
        }
}

VEC_INLINE void rotate_row(const rope_call *c, int64_t t, void *y, const void *x, kn_dtype dtype)
{
    const float *cosine = c->cosine + t * c->half, *sine = c->sine + t * c->half;
    for (int64_t i = 0; i < c->half; i += KN_VW) {
        const int64_t w = v_min_i64(KN_VW, c->half - i);
        const vf cs = v_get_n(KN_F32, cosine, i, w), sn = v_get_n(KN_F32, sine, i, w);
        const vf u = v_get_n(dtype, x, i, w), v = v_get_n(dtype, x, i + c->half, w);
        v_put_n(dtype, y, i, v_fnma(v, sn, u * cs), w);
        v_put_n(dtype, y, i + c->half, v_fma(u, sn, v * cs), w);
    }
}

/* Rows [begin, end) of [B, H, T]. */
static void rotate(const void *ctx, int64_t begin, int64_t end)
{
    const rope_call *c = ctx;
    const kn_dtype dtype = c->a->x.dtype;
    const int64_t size = (int64_t)kn_dtype_size(dtype);
    for (int64_t r = begin; r < end; r++)
        VEC_BY_DTYPE(dtype, rotate_row, c, r % c->a->x.shape[2], vec_row(&c->y, r, size),
                     vec_row(&c->x, r, size));
}

kn_status VEC_FN(vec_rope)(const void *args)
{
    const kn_rope_args *a = args;
    const kn_array *x = &a->x;
    if (!vec_float(x->dtype) || a->y.dtype != x->dtype)
        return KN_DECLINED;
    const int64_t n = kn_array_numel(x), half = x->shape[3] / 2, T = x->shape[2];
    if (n == 0)
        return KN_DONE;
    rope_call c = { .a = a, .half = half };
    if (!vec_rows_of(x, &c.x) || !vec_rows_of(&a->y, &c.y))
        return KN_DECLINED;
    const size_t bytes =
        (size_t)half * ((1 + 2 * NEAR) * sizeof(double) + 2 * (size_t)T * sizeof(float));
    double *speed = vec_scratch(bytes);
    if (!speed)
        return KN_FAILED;
    for (int64_t i = 0; i < half; i++)
        speed[i] = kn_rope_speed(a->base, a->scaling, i, half) * (a->inverse ? -1 : 1);
    c.speed = speed;
    c.near_cosine = speed + half;
    c.near_sine = c.near_cosine + NEAR * half;
    c.cosine = (float *)(void *)(c.near_sine + NEAR * half);
    c.sine = c.cosine + T * half;
    near_angles(&c);
    const int64_t fars = (a->start + T - 1) / NEAR - a->start / NEAR + 1;
    kn_each_range(kn_threads_for(T * half * 8), fars, angles, &c);
    kn_each_range(kn_threads_for(n * 8), n / x->shape[3], rotate, &c);
    vec_scratch_end(speed, bytes);
    return KN_DONE;
}
