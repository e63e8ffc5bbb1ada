/* kernels/cpu/vec/conv_weights.c: KN_K_CONV_GRAD_W of channels-last images, as one product,
 *
 *   dw[O, (R,S,C)] = dy[O, positions] windows of x[positions, (R,S,C)]
 *
 * on the panels of gemm_blocks.h; gemm_windows.h packs the windows. Other layouts and groups are
 * left to the next provider. If that is oneDNN, so are vectors that aren't AVX2's and results of
 * few rows or channels: this way was measured on AVX2 alone (docs/results.md). */
#include "kernels/cpu/pieces.h"
#include "kernels/cpu/vec/gemm_batch.h"
#include "kernels/cpu/vec/iter.h"

/* Whether channels lie side by side, and one step leads from each position to the next. */
static bool is_matrix(const kn_array *a, int64_t *step)
{
    static const int positions[] = { 0, 2, 3 };
    return (a->shape[1] == 1 || a->stride[1] == 1) && vec_joins(a, positions, 3, step);
}

/* Whether the windows of 1 x 1 are x's positions, one after the other. */
static bool is_each_position(const kn_conv_grad_w_args *a)
{
    bool each = true;
    for (int d = 0; d < 2; d++)
        each =
            each && a->pad[d] == 0 && a->stride[d] == 1 && a->x.shape[2 + d] == a->dy.shape[2 + d];
    return each;
}

/* Whether oneDNN is slower: where few rows of dw share a packed window, or a window's channels
 * don't fill a panel, it isn't. */
static bool is_worth_it(const int64_t *w)
{
#ifdef KN_HAVE_ONEDNN
    const bool one = w[2] * w[3] == 1;
    return KN_VW == 8 &&
           ((w[0] >= 64 && w[1] >= (one ? 64 : 16)) || (w[0] >= 32 && w[1] == 1 && !one));
#else
    (void)w;
    return true;
#endif
}

static bool takes(const kn_conv_grad_w_args *a)
{
    const kn_dtype t = a->x.dtype, to = a->dw.dtype;
    return is_worth_it(a->dw.shape) && a->groups == 1 && vec_float(t) && a->dy.dtype == t &&
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

/* dw = the sum of a batch's products, [O,R,S,C] each. */
static kn_status run_pieces(batch *s, const kn_array *dw, int threads)
{
    const int64_t *n = dw->shape;
    const size_t bytes = (size_t)(s->count * s->p.M * s->p.N) * sizeof(float);
    float *sums = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
    if (!sums)
        return KN_FAILED;
    s->p.c = (char *)sums, s->p.ct = KN_F32, s->p.cm = s->p.N, s->p.cn = 1;
    const bool divided = threads > 1 && s->count >= threads;
    kn_status status = KN_FAILED;
    if (divided ? batch_divided(s, threads) : batch_shared(s, threads)) {
        kn_add_pieces(sums, s->p.M * s->p.N, s->count);
        kn_copy_args copy = { *dw, kn_array_make(sums, KN_F32, 4, n) };
        const int64_t strides[4] = { n[1] * n[2] * n[3], 1, n[3] * n[1], n[1] };
        memcpy(copy.src.stride, strides, sizeof strides);
        status = VEC_FN(vec_copy)(&copy);
    }
    kn_give(kn_device_memory(KN_CPU), sums, bytes, KN_MEM_WORKSPACE);
    return status;
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
    const windows w = windows_of(a);
    batch s = { .p = { .M = n[0], .N = n[1] * n[2] * n[3], .t = a->x.dtype, .windows = &w } };
    product *p = &s.p;
    p->K = images * a->dy.shape[2] * a->dy.shape[3];
    p->a = a->dy.data, p->am = 1, p->ak = step;
    p->b = a->x.data;
    const bool one = n[2] * n[3] == 1;
    if (one && is_each_position(a) && is_matrix(&a->x, &x_step))
        p->windows = NULL, p->bk = x_step, p->bn = 1;
    const int threads = batch_threads(2.0 * (double)p->M * (double)p->N * (double)p->K);
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
