/* kernels/cpu/vec/rope.c: rotary embedding. The angles of a position are the same for all samples
 * and heads: their cosines and sines are computed once a call, in f64, and rounded to f32. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/rope.h"

typedef struct rope_call {
    const kn_rope_args *a;
    int64_t half;
    const double *speed;  /* [half] */
    float *cosine, *sine; /* [T, half] */
    vec_rows y, x;
} rope_call;

/* Positions [begin, end). */
static void angles(const void *ctx, int64_t begin, int64_t end)
{
    const rope_call *c = ctx;
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < c->half; i++) {
            const double angle = (double)(c->a->start + t) * c->speed[i];
            c->cosine[t * c->half + i] = (float)cos(angle);
            c->sine[t * c->half + i] = (float)(c->a->inverse ? -sin(angle) : sin(angle));
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
    const size_t bytes = (size_t)half * (sizeof(double) + 2 * (size_t)T * sizeof(float));
    double *speed = vec_scratch(bytes);
    if (!speed)
        return KN_FAILED;
    for (int64_t i = 0; i < half; i++)
        speed[i] = kn_rope_speed(a->base, a->scaling, i, half);
    c.speed = speed;
    c.cosine = (float *)(void *)(speed + half);
    c.sine = c.cosine + T * half;
    kn_each_range(kn_threads_for(T * half * 64), T, angles, &c);
    kn_each_range(kn_threads_for(n * 8), n / x->shape[3], rotate, &c);
    vec_scratch_end(speed, bytes);
    return KN_DONE;
}
