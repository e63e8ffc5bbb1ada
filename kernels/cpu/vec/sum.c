/* kernels/cpu/vec/sum.c: the sum of up to 64 arrays, added left to right, as a reduction over
 * ranks needs it: dst = (acc +) src[0] + ... + src[n-1]. */
#include "kernels/cpu/vec/iter.h"

#define BLOCK  1024               /* elements: buffers that stay in the first-level cache */
#define DIRECT 8                  /* arrays that one loop reads */
#define STREAM (16 * 1024 * 1024) /* bytes from which the output bypasses the cache */

/* dst[i] = src[0][i] + ... + src[n-1][i]; stream: dst is aligned to a vector and none of the
 * sources. */
VEC_INLINE void add_loop(float *dst, const float *const src[], int n, int64_t count, bool stream)
{
    int64_t i = 0;
    for (; i + 4 * KN_VW <= count; i += 4 * KN_VW) {
        vf s[4];
        for (int j = 0; j < 4; j++)
            s[j] = v_load(src[0] + i + j * KN_VW);
        for (int k = 1; k < n; k++)
            for (int j = 0; j < 4; j++)
                s[j] += v_load(src[k] + i + j * KN_VW);
        for (int j = 0; j < 4 && stream; j++)
            v_stream(dst + i + j * KN_VW, s[j]);
        for (int j = 0; j < 4 && !stream; j++)
            v_store(dst + i + j * KN_VW, s[j]);
    }
    for (; i < count; i += KN_VW) {
        vf s = v_get_n(KN_F32, src[0], i, count - i);
        for (int k = 1; k < n; k++)
            s += v_get_n(KN_F32, src[k], i, count - i);
        v_put_n(KN_F32, dst, i, s, count - i);
    }
}

static void add_direct(float *dst, const float *const src[], int n, int64_t count, bool stream)
{
    if (n == 2)
        add_loop(dst, src, 2, count, stream);
    else
        add_loop(dst, src, n, count, stream);
}

static void *at(const void *p, kn_dtype t, int64_t i)
{
    return (char *)(uintptr_t)p + i * v_size(t);
}

/* Elements [begin, end), any dtypes, any n >= 1: a block's sum is built in f32 and stored once. */
static void sum_blocks(const kn_sum_n_args *a, int64_t begin, int64_t end)
{
    const kn_dtype t = a->acc ? a->dst_dtype : a->src_dtype;
    float sum[BLOCK], term[BLOCK];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, end - i);
        vec_convert(sum, KN_F32, at(a->acc ? a->acc : a->src[0], t, i), t, w);
        for (int k = a->acc ? 0 : 1; k < a->n; k++) {
            const void *x = at(a->src[k], a->src_dtype, i);
            if (a->src_dtype != KN_F32)
                vec_convert(term, KN_F32, x, a->src_dtype, w);
            add_direct(sum, (const float *const[]){ sum, a->src_dtype == KN_F32 ? x : term }, 2, w,
                       false);
        }
        vec_convert(at(a->dst, a->dst_dtype, i), a->dst_dtype, sum, KN_F32, w);
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
    if (!vec_float(a->dst_dtype) || !vec_float(a->src_dtype) || n == 0)
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
