/* kernels/cpu/vec/winograd.h (private): convolutions with windows of 3 x 3 and stride 1 by 16
 * products where they lie have 36 (Winograd's F(2x2, 3x3); Lavin and Gray, "Fast Algorithms for
 * Convolutional Neural Networks", arXiv:1509.09308). An image's positions are cut into tiles of
 * 2 x 2. Of a channel let d[4,4] be what a tile's windows see, g[3,3] the weights, y[2,2] the sums:
 *
 *   y = A' m A,   m = sum over channels of (G g G') o (B' d B)         o: element by element
 *
 * so each of the 16 elements of m is a product [tiles, channels] x [channels, results]. The
 * gradient of the weights is G' (sum over tiles of (A dy A') o (B' d B)) G.
 *
 * Of y each sum meets only the elements of d that its window sees, but also where their weight is
 * 0: errors are a few 2^-24 of (largest |d| in the window) x (sum of |g|), where direct sums have
 * them of the sum of |d g|. B' d B has sums of four elements: where one is infinite, or larger than
 * a quarter of f32's largest number, sums that see it may be NaN where they would be infinite or
 * finite. */
#ifndef KNAP_KERNELS_CPU_VEC_WINOGRAD_H
#define KNAP_KERNELS_CPU_VEC_WINOGRAD_H

#include "kernels/cpu/vec/gemm.h"

enum { TILE = 2, SEEN = 4, ELEMENTS = SEEN * SEEN };

/* Whether oneDNN was measured to be slower than this overlay's convolutions: on AVX2 (a Zen 3), and
 * on AVX-512 (a Zen 4) in f32, for which it has no faster instructions. */
static inline bool onednn_is_slower(kn_dtype t)
{
    return KN_VW == 8 || (KN_VW == 16 && t == KN_F32);
}

/* Floats from one of 16 matrices of so many to the next: an odd number of cache lines, so that
 * elements of one place don't meet in the same set of a cache. */
static inline int64_t winograd_apart(int64_t floats)
{
    return (ceil_div(floats, 16) | 1) * 16;
}

/* ---- the factors, by rows ------------------------------------------------------------------- */

/* to = factor * from, for one column; elements lie ts and fs vectors from each other. */
typedef void (*winograd_fn)(vf *to, int ts, const vf *from, int fs);

VEC_INLINE void winograd_bt(vf *to, int ts, const vf *from, int fs) /* B' d */
{
    to[0] = from[0] - from[2 * fs];
    to[ts] = from[fs] + from[2 * fs];
    to[2 * ts] = from[2 * fs] - from[fs];
    to[3 * ts] = from[fs] - from[3 * fs];
}

VEC_INLINE void winograd_g(vf *to, int ts, const vf *from, int fs) /* G g */
{
    const vf half = v_set1(0.5f), ends = (from[0] + from[2 * fs]) * half, mid = from[fs] * half;
    to[0] = from[0];
    to[ts] = ends + mid;
    to[2 * ts] = ends - mid;
    to[3 * ts] = from[2 * fs];
}

VEC_INLINE void winograd_gt(vf *to, int ts, const vf *from, int fs) /* G' u */
{
    const vf half = v_set1(0.5f), sum = (from[fs] + from[2 * fs]) * half;
    to[0] = from[0] + sum;
    to[ts] = (from[fs] - from[2 * fs]) * half;
    to[2 * ts] = sum + from[3 * fs];
}

VEC_INLINE void winograd_at(vf *to, int ts, const vf *from, int fs) /* A' m */
{
    to[0] = from[0] + from[fs] + from[2 * fs];
    to[ts] = from[fs] - from[2 * fs] - from[3 * fs];
}

VEC_INLINE void winograd_a(vf *to, int ts, const vf *from, int fs) /* A dy */
{
    to[0] = from[0];
    to[ts] = from[0] + from[fs];
    to[2 * ts] = from[0] - from[fs];
    to[3 * ts] = v_zero() - from[fs];
}

/* to[m,m] = factor * from[n,n] * factor'. All arguments but the arrays are constants. */
VEC_INLINE void winograd_both(winograd_fn factor, int m, int n, vf *to, const vf *from)
{
    vf half[ELEMENTS];
#pragma GCC unroll 4
    for (int j = 0; j < n; j++)
        factor(half + j, n, from + j, n);
#pragma GCC unroll 4
    for (int i = 0; i < m; i++)
        factor(to + i * m, 1, half + i * n, 1);
}

/* ---- images as tiles ------------------------------------------------------------------------ */

/* Images whose channels lie side by side. The square of tile (i, j) begins at row 2 i - pad[0] and
 * column 2 j - pad[1]. */
typedef struct tiles {
    char *p;
    kn_dtype t;
    int64_t C, H, W, image, row, column; /* steps in elements */
    int64_t down, across, count, pad[2];
} tiles;

/* By the positions of `cut`, which may be a itself. */
static inline tiles tiles_of(const kn_array *a, const kn_array *cut, int64_t down, int64_t right)
{
    const int64_t *n = a->shape, *s = a->stride;
    tiles t = { .p = a->data, .t = a->dtype, .C = n[1], .H = n[2], .W = n[3] };
    t.image = s[0], t.row = s[2], t.column = s[3];
    t.down = (cut->shape[2] + 1) / TILE, t.across = (cut->shape[3] + 1) / TILE;
    t.count = n[0] * t.down * t.across;
    t.pad[0] = down, t.pad[1] = right;
    return t;
}

/* Where the size x size elements of tile i lie; NULL: outside of the image. */
VEC_INLINE void tile_places(const tiles *s, int64_t i, int size, char **at)
{
    const int64_t h = i / s->across % s->down * TILE - s->pad[0];
    const int64_t w = i % s->across * TILE - s->pad[1];
    const int64_t first = i / s->across / s->down * s->image + h * s->row + w * s->column;
    for (int r = 0; r < size; r++)
        for (int c = 0; c < size; c++) {
            const bool inside = h + r >= 0 && h + r < s->H && w + c >= 0 && w + c < s->W;
            at[r * size + c] =
                inside ? gemm_at(s->p, s->t, first + r * s->row + c * s->column) : NULL;
        }
}

/* Row `row` of each of 16 matrices, `apart` floats from each other: tile i of size x size elements
 * by a factor and its transpose, for channels to a multiple of KN_VW. */
VEC_INLINE void tile_widen(winograd_fn factor, int size, const tiles *s, int64_t i, float *row,
                           int64_t apart, kn_dtype t)
{
    char *at[ELEMENTS];
    tile_places(s, i, size, at);
    for (int64_t c = 0; c < s->C; c += KN_VW) {
        vf d[ELEMENTS], v[ELEMENTS];
#pragma GCC unroll 16
        for (int k = 0; k < size * size; k++)
            d[k] = at[k] ? v_get_n(t, at[k], c, s->C - c) : v_zero();
        winograd_both(factor, SEEN, size, v, d);
#pragma GCC unroll 16
        for (int k = 0; k < ELEMENTS; k++)
            v_store(row + k * apart + c, v[k]);
    }
}

/* Channels of such a row. */
static inline int64_t tile_row(const tiles *s)
{
    return round_up(s->C, KN_VW);
}

#endif
