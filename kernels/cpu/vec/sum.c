/* kernels/cpu/vec/sum.c: the sum of up to 64 arrays, added left to right, as a reduction over
 * ranks needs it: dst = (acc +) src[0] + ... + src[n-1]. */
#include "kernels/cpu/vec/iter.h"

#define BLOCK  1024               /* elements: buffers that stay in the first-level cache */
#define DIRECT 8                  /* arrays that one loop reads */
#define STREAM (16 * 1024 * 1024) /* bytes from which the output bypasses the cache */

/* dst[i] = src[0][i] + ... + src[n-1][i] with n a constant; stream: dst is aligned to a vector and
 * none of the sources. */
VEC_INLINE void add_loop(float *dst, const float *const src[], int64_t count, bool stream, int n)
{
    int64_t i = 0;
    for (; i + KN_VW <= count; i += KN_VW) {
        vf s = v_load(src[0] + i);
        for (int k = 1; k < n; k++)
            s += v_load(src[k] + i);
        if (stream)
            v_stream(dst + i, s);
        else
            v_store(dst + i, s);
    }
    if (i < count) {
        vf s = v_load_n(src[0] + i, count - i);
        for (int k = 1; k < n; k++)
            s += v_load_n(src[k] + i, count - i);
        v_store_n(dst + i, s, count - i);
    }
}

/* n from 1 to DIRECT arrays of f32 */
static void add_direct(float *dst, const float *const src[], int n, int64_t count, bool stream)
{
    switch (n) {
#define CASE(k)                                                                                    \
    case k:                                                                                        \
        if (stream)                                                                                \
            add_loop(dst, src, count, true, k);                                                    \
        else                                                                                       \
            add_loop(dst, src, count, false, k);                                                   \
        break
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
#undef CASE
    default:
        break;
    }
}

/* sum += x[0..w), through the buffer where x is not f32 */
static void add_block(float *sum, kn_dtype t, const void *x, int64_t w, float *buf)
{
    if (t != KN_F32) {
        vec_widen(t, x, buf, w);
        x = buf;
    }
    const float *const list[] = { sum, x };
    add_direct(sum, list, 2, w, false);
}

static void load_block(float *sum, kn_dtype t, const void *x, int64_t w)
{
    if (t == KN_F32)
        memcpy(sum, x, (size_t)w * sizeof *sum);
    else
        vec_widen(t, x, sum, w);
}

static const void *at(const void *p, kn_dtype t, int64_t i)
{
    return (const char *)p + i * (t == KN_F32 ? 4 : 2);
}

/* Elements [begin, end), any dtypes, any n >= 1: a block's sum is built in f32 and stored once. */
static void sum_blocks(const kn_sum_n_args *a, int64_t begin, int64_t end)
{
    float sum[BLOCK], buf[BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, end - i);
        if (a->acc)
            load_block(sum, a->dst_dtype, at(a->acc, a->dst_dtype, i), w);
        else
            load_block(sum, a->src_dtype, at(a->src[0], a->src_dtype, i), w);
        for (int k = a->acc ? 0 : 1; k < a->n; k++)
            add_block(sum, a->src_dtype, at(a->src[k], a->src_dtype, i), w, buf);
        if (a->dst_dtype == KN_F32)
            memcpy((float *)a->dst + i, sum, (size_t)w * sizeof *sum);
        else
            vec_narrow(a->dst_dtype, (uint16_t *)a->dst + i, sum, w);
    }
}

/* Elements [begin, end) of f32 arrays; the first few go by themselves so that the rest of dst is
 * aligned for streaming stores. */
static void sum_floats(float *dst, const float *const src[], int n, int64_t begin, int64_t end,
                       bool stream)
{
    while (begin < end) {
        int64_t stop = end;
        const int64_t off = (int64_t)((uintptr_t)(dst + begin) / 4 % KN_VW);
        const bool aligned = off == 0;
        if (stream && !aligned)
            stop = v_min_i64(begin + KN_VW - off, end);
        const float *p[DIRECT];
        for (int k = 0; k < n; k++)
            p[k] = src[k] + begin;
        add_direct(dst + begin, p, n, stop - begin, stream && aligned);
        begin = stop;
    }
    if (stream)
        v_fence();
}

typedef struct sum_call {
    const kn_sum_n_args *a;
    const float *const *list; /* terms that are added directly, or NULL */
    int n;
    bool stream;
} sum_call;

/* Blocks [begin, end). */
static void sum_range(const void *ctx, int64_t begin, int64_t end)
{
    const sum_call *s = ctx;
    const int64_t last = v_min_i64(end * BLOCK, s->a->count);
    if (s->list)
        sum_floats(s->a->dst, s->list, s->n, begin * BLOCK, last, s->stream);
    else
        sum_blocks(s->a, begin * BLOCK, last);
}

kn_status VEC_FN(vec_sum_n)(const void *args)
{
    const kn_sum_n_args *a = args;
    const int n = a->n + (a->acc != NULL);
    if (!vec_float(a->dst_dtype) || !vec_float(a->src_dtype) || a->n < 0 || a->n > KN_SUM_N_MAX ||
        n == 0)
        return KN_DECLINED;
    const float *list[DIRECT] = { 0 };
    const bool direct = a->dst_dtype == KN_F32 && a->src_dtype == KN_F32 && n <= DIRECT;
    bool stream = direct && a->count * 4 >= STREAM && (uintptr_t)a->dst % 4 == 0;
    for (int k = 0; direct && k < n; k++) {
        list[k] = a->acc ? (k == 0 ? a->acc : a->src[k - 1]) : a->src[k];
        stream = stream && list[k] != a->dst;
    }
    kn_each_range(kn_threads_for(a->count * 4 * (n + 1)), (a->count + BLOCK - 1) / BLOCK, sum_range,
                  &(sum_call){ a, direct ? list : NULL, n, stream });
    return KN_DONE;
}
