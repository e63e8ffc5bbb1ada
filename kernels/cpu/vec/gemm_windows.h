/* kernels/cpu/vec/gemm_windows.h (private): the windows of a convolution as the right operand of a
 * product. Row k holds the window at position k of images whose channels lie side by side, [rows of
 * the kernel][columns][channels], zero outside of the image. That matrix is never in memory: each
 * panel is packed from the images, as f32 or, of bf16, as pairs of positions (gemm.h). */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_WINDOWS_H
#define KNAP_KERNELS_CPU_VEC_GEMM_WINDOWS_H

#include "kernels/cpu/vec/gemm.h"

typedef struct windows {
    int64_t H, W, P, Q;         /* sizes of an image; its positions */
    int64_t image, row, column; /* steps in elements */
    int64_t stride[2], pad[2], dilation[2];
    int64_t channels; /* elements of a column */
    int64_t across;   /* columns of a window that lie together: a run */
    int64_t runs;     /* of a row of the kernel */
} windows;

/* Where column n of window k would lie if the image had no end, and the step to window k + 1 in its
 * row: for asking the memory for it. */
static inline const char *windows_first(const char *x, const windows *s, int64_t n, int64_t k,
                                        kn_dtype t)
{
    const int64_t length = s->across * s->channels, run = n / length;
    const int64_t h = k / s->Q % s->P * s->stride[0] - s->pad[0] + run / s->runs * s->dilation[0];
    const int64_t w = k % s->Q * s->stride[1] - s->pad[1] + run % s->runs * s->dilation[1];
    const int64_t image = k / s->Q / s->P;
    return gemm_at(x, t, image * s->image + h * s->row + w * s->column + n % length);
}

static inline int64_t windows_apart(const windows *s)
{
    return s->stride[1] * s->column;
}

/* Elements [first, first + n) of a run that begins at column w of an image's row; row NULL: outside
 * of the image. */
VEC_INLINE void windows_pack_one(float *dst, const char *row, const windows *s, int64_t w,
                                 int64_t first, int64_t n, kn_dtype t)
{
    const int64_t from = w < 0 ? -w * s->channels : 0;
    const int64_t to = row ? v_min_i64(s->across, s->W - w) * s->channels : 0;
    const int64_t at = w * s->column + first;
    const bool inside = from <= first && first + n <= to;
    if (inside && n == GEMM_NR) {
        v_store(dst, v_get(t, gemm_at(row, t, at), 0));
        v_store(dst + KN_VW, v_get(t, gemm_at(row, t, at), KN_VW));
    } else if (inside && n >= 4 && t == KN_F32) {
        for (int64_t j = 0; j < n; j += 4) { /* the last four overlap those before */
            const int64_t i = v_min_i64(j, n - 4);
            memcpy(dst + i, (const float *)(const void *)row + at + i, 4 * sizeof *dst);
        }
    } else {
        for (int64_t j = 0; j < n; j++)
            dst[j] = from <= first + j && first + j < to ? gemm_get(row, t, at + j) : 0.0f;
    }
}

/* The same of windows [k, k + kc), GEMM_NR floats apart. */
VEC_INLINE void windows_pack_run(float *dst, const char *x, const windows *s, int64_t run,
                                 int64_t first, int64_t n, int64_t k, int64_t kc, kn_dtype t)
{
    const int64_t down = run / s->runs * s->dilation[0] - s->pad[0];
    const int64_t right = run % s->runs * s->dilation[1] - s->pad[1];
    int64_t q = k % s->Q, p = k / s->Q % s->P, image = k / s->Q / s->P;
    while (kc > 0) {
        const int64_t h = p * s->stride[0] + down, many = v_min_i64(kc, s->Q - q);
        const char *row = h >= 0 && h < s->H ? gemm_at(x, t, image * s->image + h * s->row) : NULL;
        for (int64_t i = 0; i < many; i++, dst += GEMM_NR)
            windows_pack_one(dst, row, s, (q + i) * s->stride[1] + right, first, n, t);
        kc -= many;
        q = 0;
        if (++p == s->P)
            p = 0, image++;
    }
}

/* ---- pairs of bf16 (gemm_pack_pairs) --------------------------------------------------------- */

/* Elements [first, first + n) of a run that begins at column w and isn't inside of the image: a
 * copy in `room`. */
VEC_INLINE const uint16_t *windows_edge(uint16_t *room, const char *row, const windows *s,
                                        int64_t w, int64_t first, int64_t n)
{
    const int64_t from = v_max_i64(0, -w * s->channels - first);
    const int64_t to = row ? v_min_i64(n, (s->W - w) * s->channels - first) : 0;
    memset(room, 0, (size_t)n * sizeof *room);
    if (from < to)
        memcpy(room + from, gemm_at(row, KN_BF16, w * s->column + first + from),
               (size_t)(to - from) * sizeof *room);
    return room;
}

VEC_INLINE void windows_put_pair(float *dst, const uint16_t *one, const uint16_t *two, int64_t n)
{
    for (int64_t i = 0; i < n; i += KN_VW) {
        const int64_t many = v_min_i64(KN_VW, n - i);
        const vf first = v_get_n(KN_BF16, one, i, many), second = v_get_n(KN_BF16, two, i, many);
        v_put_n(KN_F32, dst, i, gemm_pair(first, second, KN_BF16), many);
    }
}

/* windows_pack_run in pairs; of an odd kc with a zero. A pair may have windows of two rows. */
VEC_INLINE void windows_pair_run(float *dst, const char *x, const windows *s, int64_t run,
                                 int64_t first, int64_t n, int64_t k, int64_t kc)
{
    const int64_t down = run / s->runs * s->dilation[0] - s->pad[0];
    const int64_t right = run % s->runs * s->dilation[1] - s->pad[1];
    /* columns from which the elements are inside of the image */
    const int64_t least = -(first / s->channels);
    const int64_t most = s->W - ceil_div(first + n, s->channels);
    int64_t q = k % s->Q, p = k / s->Q % s->P, image = k / s->Q / s->P;
    uint16_t room[2][GEMM_NR];
    const uint16_t none[GEMM_NR] = { 0 }, *at[2];
    bool second = false;
    while (kc > 0) {
        const int64_t h = p * s->stride[0] + down, many = v_min_i64(kc, s->Q - q);
        const char *row =
            h >= 0 && h < s->H ? gemm_at(x, KN_BF16, image * s->image + h * s->row) : NULL;
        for (int64_t i = 0; i < many; i++, second = !second) {
            const int64_t w = (q + i) * s->stride[1] + right;
            at[second] = row && w >= least && w <= most
                             ? gemm_at(row, KN_BF16, w * s->column + first)
                             : windows_edge(room[second], row, s, w, first, n);
            if (second)
                windows_put_pair(dst, at[0], at[1], n), dst += GEMM_NR;
        }
        kc -= many;
        q = 0;
        if (++p == s->P)
            p = 0, image++;
    }
    if (second)
        windows_put_pair(dst, at[0], none, n);
}

/* ---- panels ---------------------------------------------------------------------------------- */

/* Columns [n, n + width) of windows [k, k + kc) of the images at x, as gemm_pack_panel. */
VEC_INLINE void windows_pack_panel(float *dst, const char *x, const windows *s, int64_t n,
                                   int64_t width, int64_t k, int64_t kc, bool pairs, kn_dtype t)
{
    const int64_t length = s->across * s->channels;
    if (width < GEMM_NR)
        memset(dst, 0, (size_t)((pairs ? ceil_div(kc, 2) : kc) * GEMM_NR) * sizeof *dst);
    for (int64_t j = 0, many; kc > 0 && j < width; j += many) {
        const int64_t run = (n + j) / length, first = (n + j) % length;
        many = v_min_i64(width - j, length - first);
        if (pairs && many == GEMM_NR) /* a constant */
            windows_pair_run(dst, x, s, run, first, GEMM_NR, k, kc);
        else if (pairs)
            windows_pair_run(dst + j, x, s, run, first, many, k, kc);
        else if (many == GEMM_NR)
            windows_pack_run(dst, x, s, run, first, GEMM_NR, k, kc, t);
        else
            windows_pack_run(dst + j, x, s, run, first, many, k, kc, t);
    }
}

static inline void windows_pack(float *dst, const char *x, const windows *s, int64_t n,
                                int64_t width, int64_t k, int64_t kc, bool pairs, kn_dtype t)
{
    if (pairs)
        windows_pack_panel(dst, x, s, n, width, k, kc, true, KN_BF16);
    else
        VEC_BY_DTYPE(t, windows_pack_panel, dst, x, s, n, width, k, kc, false);
}

#endif
