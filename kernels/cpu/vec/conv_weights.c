/* kernels/cpu/vec/conv_weights.c: KN_K_CONV_GRAD_W of channels-last images, as one product,
 *
 *   dw[O, (R,S,C)] = dy[O, positions] windows of x[positions, (R,S,C)]
 *
 * on the panels of gemm_blocks.h; gemm_windows.h packs the windows, bf16 in pairs where the CPU
 * multiplies these. Else, with windows of 3 x 3 and stride 1, it is 16 products of fewer operations
 * (winograd.h). Other layouts and groups are left to the next provider. If that is oneDNN, so are
 * dtypes for which it isn't known to be slower (onednn_is_slower) and results of few rows or
 * channels (docs/results.md). */
#include "kernels/cpu/cpu_internal.h"
#include "kernels/cpu/pieces.h"
#include "kernels/cpu/vec/gemm_batch.h"
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/winograd.h"

/* Whether channels lie side by side, and one step leads from each position to the next. */
static bool is_matrix(const kn_array *a, int64_t *step)
{
    static const int positions[] = { 0, 2, 3 };
    return (a->shape[1] == 1 || a->stride[1] == 1) && vec_joins(a, positions, 3, step);
}

/* Whether the windows are x's positions, one after the other, a step from each to the next. */
static bool is_each_position(const kn_conv_grad_w_args *a, int64_t *step)
{
    bool each = a->dw.shape[2] * a->dw.shape[3] == 1 && is_matrix(&a->x, step);
    for (int d = 0; d < 2; d++)
        each =
            each && a->pad[d] == 0 && a->stride[d] == 1 && a->x.shape[2 + d] == a->dy.shape[2 + d];
    return each;
}

/* Whether bf16 stays bf16 in the panels (gemm.h). */
static bool is_of_pairs(const kn_conv_grad_w_args *a)
{
    return a->x.dtype == KN_BF16 && kn_cpu_multiplies_pairs();
}

/* Whether the windows are 3 x 3 with stride 1, and there are enough of them, and channels; where
 * pairs are multiplied, direct sums are faster. */
static bool is_for_tiles(const kn_conv_grad_w_args *a)
{
    const int64_t *n = a->dw.shape, *p = a->dy.shape;
    bool three = n[0] >= 64 && n[1] >= 64 && p[0] * p[2] * p[3] >= 256 && !is_of_pairs(a);
    for (int d = 0; d < 2; d++)
        three = three && n[2 + d] == 3 && a->stride[d] == 1 && a->dilation[d] == 1;
    return three;
}

/* Whether oneDNN is slower: where few rows of dw share a packed window, or a window's channels
 * don't fill a panel, it isn't. On a Zen 4 it is in bf16, too, where pairs are multiplied, but for
 * larger windows with stride 1. */
static bool is_worth_it(const kn_conv_grad_w_args *a)
{
#ifdef KN_HAVE_ONEDNN
    const int64_t *w = a->dw.shape;
    const bool one = w[2] * w[3] == 1;
    if (is_of_pairs(a))
        return w[0] >= 32 && w[1] >= 32 && (one || a->stride[0] * a->stride[1] > 1) &&
               !kn_cpu_multiplies_matrices();
    return onednn_is_slower(a->x.dtype) &&
           (is_for_tiles(a) || (w[0] >= 64 && w[1] >= (one ? 64 : 16)) ||
            (w[0] >= 32 && w[1] == 1 && !one));
#else
    (void)a;
    return true;
#endif
}

static bool takes(const kn_conv_grad_w_args *a)
{
    const kn_dtype t = a->x.dtype, to = a->dw.dtype;
    return is_worth_it(a) && a->groups == 1 && vec_float(t) && a->dy.dtype == t &&
           (to == t || to == KN_F32) && (a->x.shape[1] == 1 || a->x.stride[1] == 1);
}

static windows windows_of(const kn_conv_grad_w_args *a)
{
    const int64_t *s = a->x.stride, C = a->dw.shape[1], S = a->dw.shape[3];
    const bool together = a->dilation[1] == 1 && (s[3] == C || a->x.shape[3] == 1);
    windows w = { .H = a->x.shape[2], .W = a->x.shape[3] };
    w.P = a->dy.shape[2], w.Q = a->dy.shape[3];
    w.image = s[0], w.row = s[2], w.column = together ? C : s[3];
    memcpy(w.stride, a->stride, sizeof w.stride);
    memcpy(w.pad, a->pad, sizeof w.pad);
    memcpy(w.dilation, a->dilation, sizeof w.dilation);
    w.channels = C;
    w.across = together ? S : 1;
    w.runs = S / w.across;
    return w;
}

/* ---- pieces: products of some images each, added in order ------------------------------------ */

enum { SMALL_RESULT = 160 * 1024, LONG = 512, PIECES = 16 };

/* By the shapes alone. A small result has too few panels for all threads, and so little work
 * between two meetings of theirs that these show. */
static int64_t pieces_of(const product *p, int64_t images)
{
    int64_t n = v_min_i64(images, PIECES);
    if (p->M * p->N > SMALL_RESULT)
        return 1;
    while (n > 1 && (images % n != 0 || p->K / n < LONG))
        n--;
    return v_max_i64(n, 1);
}

/* dw [C,O] of 1 x 1 weights, by the same sums: the right operand comes from memory in time. */
static void turn(batch *s)
{
    const product q = s->p;
    const int64_t a = s->a[0];
    product *p = &s->p;
    p->M = q.N, p->N = q.M, p->a = q.b, p->b = q.a;
    p->ak = q.bk, p->bk = q.ak;
    s->a[0] = s->b[0], s->b[0] = a;
}

/* dw = the sum of a batch's products, [O,R,S,C] each; of positions the longer side of dw last. */
static kn_status run_pieces(batch *s, const kn_array *dw, int threads)
{
    const int64_t *n = dw->shape;
    const bool turned = !s->p.windows && n[0] > n[1];
    if (turned)
        turn(s);
    const size_t bytes = (size_t)(s->count * s->p.M * s->p.N) * sizeof(float);
    float *sums = vec_scratch(bytes);
    if (!sums)
        return KN_FAILED;
    s->p.c = (char *)sums, s->p.ct = KN_F32, s->p.cm = s->p.N, s->p.cn = 1;
    const bool divided = threads > 1 && s->count >= threads;
    kn_status status = KN_FAILED;
    if (divided ? batch_divided(s, threads) : batch_shared(s, threads)) {
        kn_add_pieces(sums, s->p.M * s->p.N, s->count);
        kn_copy_args copy = { *dw, kn_array_make(sums, KN_F32, 4, n) };
        int64_t strides[4] = { n[1] * n[2] * n[3], 1, n[3] * n[1], n[1] };
        if (turned)
            strides[0] = 1, strides[1] = n[0];
        memcpy(copy.src.stride, strides, sizeof strides);
        status = VEC_FN(vec_copy)(&copy);
    }
    vec_scratch_end(sums, bytes);
    return status;
}

/* ---- windows of 3 x 3, stride 1 (winograd.h) ------------------------------------------------- */

enum { SEEN_FLOATS = 1 << 21 }; /* of a chunk of tiles: stay in the L3 cache */

typedef struct few_products {
    tiles x, dy;
    int64_t first, count, most;   /* tiles of the chunk; at most */
    float *seen, *changes, *sums; /* B' d B [16][most][C], A dy A' [16][most][O]; [16][O][C] */
    int64_t seen_apart, changes_apart, sums_apart;
    const kn_array *dw;
} few_products;

VEC_INLINE void widen(const few_products *s, int64_t begin, int64_t end, kn_dtype t)
{
    const int64_t C = tile_row(&s->x), O = tile_row(&s->dy);
    for (int64_t i = begin; i < end; i++) {
        tile_widen(winograd_bt, SEEN, &s->x, s->first + i, s->seen + i * C, s->seen_apart, t);
        tile_widen(winograd_a, TILE, &s->dy, s->first + i, s->changes + i * O, s->changes_apart, t);
    }
}

static void widen_some(const void *ctx, int64_t begin, int64_t end)
{
    const few_products *s = ctx;
    VEC_BY_DTYPE(s->x.t, widen, s, begin, end);
}

/* dw = G' sums G, of rows [begin, end) of KN_VW channels. */
static void narrow_some(const void *ctx, int64_t begin, int64_t end)
{
    const few_products *s = ctx;
    const kn_array *dw = s->dw;
    const int64_t C = dw->shape[1], blocks = ceil_div(C, KN_VW), *n = dw->stride;
    for (int64_t i = begin; i < end; i++) {
        const int64_t o = i / blocks, c = i % blocks * KN_VW, lanes = v_min_i64(KN_VW, C - c);
        vf u[ELEMENTS], g[9];
        for (int k = 0; k < ELEMENTS; k++)
            u[k] = v_get_n(KN_F32, s->sums, k * s->sums_apart + o * C + c, lanes);
        winograd_both(winograd_gt, 3, SEEN, g, u);
        for (int k = 0; k < 9; k++)
            for (int64_t j = 0; j < lanes; j++)
                v_put_n(dw->dtype, dw->data,
                        o * n[0] + (c + j) * n[1] + k / 3 * n[2] + k % 3 * n[3], v_set1(g[k][j]),
                        1);
    }
}

/* The sums of all chunks, in order. */
static bool add_chunks(few_products *s, int threads)
{
    const int64_t O = s->dy.C, C = s->x.C;
    batch b = { .p = { .M = O, .N = C, .t = KN_F32, .ct = KN_F32 }, .ndim = 1 };
    product *p = &b.p;
    p->c = (char *)s->sums, p->a = (const char *)s->changes, p->b = (const char *)s->seen;
    p->am = 1, p->ak = tile_row(&s->dy), p->bk = tile_row(&s->x), p->bn = 1;
    p->cm = C, p->cn = 1;
    b.count = b.shape[0] = ELEMENTS;
    b.a[0] = s->changes_apart, b.b[0] = s->seen_apart, b.c[0] = s->sums_apart;
    bool good = true;
    for (s->first = 0; good && s->first < s->x.count; s->first += s->count) {
        s->count = p->K = v_min_i64(s->most, s->x.count - s->first);
        p->add = s->first > 0;
        kn_each_range(threads, s->count, widen_some, s);
        good = threads > 1 && threads <= ELEMENTS ? batch_divided(&b, threads)
                                                  : batch_shared(&b, threads);
    }
    return good;
}

static kn_status run_few_products(const kn_conv_grad_w_args *a)
{
    few_products s = { .x = tiles_of(&a->x, &a->dy, a->pad[0], a->pad[1]),
                       .dy = tiles_of(&a->dy, &a->dy, 0, 0),
                       .dw = &a->dw };
    const int64_t O = a->dw.shape[0], C = a->dw.shape[1];
    const int64_t x = tile_row(&s.x), dy = tile_row(&s.dy);
    const int threads = gemm_threads(2.0 * ELEMENTS * (double)s.x.count * (double)O * (double)C);
    s.most = v_max_i64(SEEN_FLOATS / ELEMENTS / (x + dy) / DEPTH, 1) * DEPTH;
    s.most = v_min_i64(s.most, s.x.count);
    s.seen_apart = winograd_apart(s.most * x), s.changes_apart = winograd_apart(s.most * dy);
    s.sums_apart = winograd_apart(O * C);
    const int64_t all = s.seen_apart + s.changes_apart + s.sums_apart;
    const size_t bytes = (size_t)(ELEMENTS * all) * sizeof(float);
    s.seen = vec_scratch(bytes);
    if (!s.seen)
        return KN_FAILED;
    s.changes = s.seen + ELEMENTS * s.seen_apart;
    s.sums = s.changes + ELEMENTS * s.changes_apart;
    const bool good = add_chunks(&s, threads);
    if (good)
        kn_each_range(threads, O * ceil_div(C, KN_VW), narrow_some, &s);
    vec_scratch_end(s.seen, bytes);
    return good ? KN_DONE : KN_FAILED;
}

kn_status VEC_FN(vec_conv_grad_w)(const void *args)
{
    const kn_conv_grad_w_args *a = args;
    const int64_t *n = a->dw.shape, images = a->x.shape[0];
    int64_t step, x_step;
    if (!takes(a) || !is_matrix(&a->dy, &step))
        return KN_DECLINED;
    if (kn_array_numel(&a->dw) == 0)
        return KN_DONE;
    if (is_for_tiles(a))
        return run_few_products(a);
    const windows w = windows_of(a);
    batch s = { .p = { .M = n[0], .N = n[1] * n[2] * n[3], .t = a->x.dtype, .windows = &w } };
    product *p = &s.p;
    p->K = images * a->dy.shape[2] * a->dy.shape[3];
    p->a = a->dy.data, p->am = 1, p->ak = step;
    p->b = a->x.data;
    const bool one = n[2] * n[3] == 1;
    if (is_each_position(a, &x_step))
        p->windows = NULL, p->bk = x_step, p->bn = 1;
    p->pairs = is_of_pairs(a);
    const int threads = gemm_threads(2.0 * (double)p->M * (double)p->N * (double)p->K);
    s.ndim = 1, s.count = s.shape[0] = pieces_of(p, images);
    if (s.count == 1 && one) { /* dw is in the order of the windows */
        p->c = a->dw.data, p->ct = a->dw.dtype, p->cm = a->dw.stride[0], p->cn = a->dw.stride[1];
        return batch_shared(&s, threads) ? KN_DONE : KN_FAILED;
    }
    p->K /= s.count;
    s.a[0] = p->K * step;
    s.b[0] = images / s.count * a->x.stride[0];
    s.c[0] = p->M * p->N;
    return run_pieces(&s, &a->dw, threads);
}
