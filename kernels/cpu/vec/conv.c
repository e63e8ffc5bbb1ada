/* kernels/cpu/vec/conv.c: KN_K_CONV and KN_K_CONV_GRAD_X of channels-last images with windows of
 * 3 x 3 and stride 1 (winograd.h). The gradient of x is a convolution of dy with the weights turned
 * round. Everything else is left to the next provider, beside oneDNN also what that is no slower
 * for: by dtypes onednn_is_slower says so, by shapes docs/results.md.
 *
 * The weights are turned into G g G' first, in panels of the product's kernel (gemm.h). Then a
 * thread takes blocks of tiles: it makes their B' d B, multiplies, for a group of results after
 * another, and writes these. A sum is a chain in ascending channels, cut at DEPTH: no cut into
 * tasks changes a bit. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/winograd.h"

#include <stdatomic.h>

enum { TILES = 48, GROUP = 64 }; /* of a block; results whose sums are made at a time */

/* Weight (o, c, r, s) of sums over c lies at p + o * o_step + ...; the steps may be negative. */
typedef struct weights {
    const char *p;
    kn_dtype t;
    int64_t o, c, r, s;
} weights;

typedef struct call {
    tiles from, to;
    weights w;
    kn_array bias;
    int64_t panels, rows;          /* of results; tiles of a block */
    int64_t blocks, groups, parts; /* a task: a block by a part of the groups */
    float *u;                      /* [16][panels][channels][GEMM_NR] */
    float *room;                   /* of each thread: B' d B, [16][rows][channels], and sums */
    int64_t u_apart, seen_apart, sums_apart; /* of 16 matrices */
    _Atomic int64_t next;
} call;

static int64_t room_floats(const call *c)
{
    return ELEMENTS * (c->seen_apart + c->sums_apart);
}

/* ---- weights -------------------------------------------------------------------------------- */

/* G g G' of panel i / channels and channel i % channels. */
static void turn_weights(const void *ctx, int64_t begin, int64_t end)
{
    const call *s = ctx;
    const weights *w = &s->w;
    const int64_t C = s->from.C;
    for (int64_t i = begin; i < end; i++) {
        float g[9][GEMM_NR] = { { 0 } };
        const int64_t o = i / C * GEMM_NR, c = i % C;
        for (int64_t j = 0; j < v_min_i64(GEMM_NR, s->to.C - o); j++)
            for (int r = 0; r < 3; r++)
                for (int q = 0; q < 3; q++)
                    g[3 * r + q][j] =
                        gemm_get(w->p, w->t, (o + j) * w->o + c * w->c + r * w->r + q * w->s);
        for (int j = 0; j < GEMM_NR; j += KN_VW) {
            vf from[9], to[ELEMENTS];
            for (int k = 0; k < 9; k++)
                from[k] = v_load(g[k] + j);
            winograd_both(winograd_g, SEEN, 3, to, from);
            for (int k = 0; k < ELEMENTS; k++)
                v_store(s->u + k * s->u_apart + i * GEMM_NR + j, to[k]);
        }
    }
}

/* ---- tiles ---------------------------------------------------------------------------------- */

/* Rows past the last tile are 0. */
VEC_INLINE void see_block(const call *s, int64_t first, int64_t count, float *seen, kn_dtype t)
{
    const int64_t width = tile_row(&s->from);
    for (int64_t i = 0; i < count; i++)
        tile_widen(winograd_bt, SEEN, &s->from, first + i, seen + i * width, s->seen_apart, t);
    for (int64_t k = 0; k < ELEMENTS && count < s->rows; k++)
        memset(seen + k * s->seen_apart + count * width, 0,
               (size_t)((s->rows - count) * width) * sizeof *seen);
}

/* sums[16][rows][GROUP] of the panels [begin, end). */
static void multiply(const call *s, int64_t begin, int64_t end, int64_t rows, const float *seen,
                     float *sums)
{
    const int64_t C = s->from.C, width = tile_row(&s->from);
    for (int64_t k = 0; k < ELEMENTS; k++)
        for (int64_t c = 0; c < C; c += DEPTH)
            for (int64_t j = begin; j < end; j++) {
                const int64_t depth = v_min_i64(DEPTH, C - c);
                const float *from = seen + k * s->seen_apart + c;
                const float *u = s->u + k * s->u_apart + (j * C + c) * GEMM_NR;
                float *to = sums + k * s->sums_apart + (j - begin) * GEMM_NR;
                for (int64_t i = 0; i < rows; i += GEMM_MR)
                    gemm_tile(depth, from + i * width, width, 1, u, GEMM_NR, to + i * GROUP, GROUP,
                              c > 0, NULL);
            }
}

/* y = A' m A + bias of a tile's results [o, end). */
VEC_INLINE void put_tile(const call *s, int64_t i, const float *sums, int64_t o, int64_t end,
                         kn_dtype t)
{
    char *at[TILE * TILE];
    tile_places(&s->to, i, TILE, at);
    for (int64_t j = o; j < end; j += KN_VW) {
        vf m[ELEMENTS], y[TILE * TILE], bias = v_zero();
#pragma GCC unroll 16
        for (int k = 0; k < ELEMENTS; k++)
            m[k] = v_load(sums + k * s->sums_apart + j - o);
        winograd_both(winograd_at, TILE, SEEN, y, m);
        if (s->bias.data)
            bias = v_get_n(s->bias.dtype == KN_F32 ? KN_F32 : t, s->bias.data, j, end - j);
        for (int k = 0; k < TILE * TILE; k++)
            if (at[k])
                v_put_n(t, at[k], j, y[k] + bias, end - j);
    }
}

VEC_INLINE void task(const call *s, int64_t at, float *seen, kn_dtype t)
{
    const int64_t first = at / s->parts * s->rows, part = at % s->parts;
    const int64_t count = v_min_i64(s->rows, s->to.count - first);
    float *sums = seen + ELEMENTS * s->seen_apart;
    see_block(s, first, count, seen, t);
    for (int64_t g = s->groups * part / s->parts; g < s->groups * (part + 1) / s->parts; g++) {
        const int64_t o = g * GROUP, end = v_min_i64(o + GROUP, s->to.C);
        multiply(s, o / GEMM_NR, ceil_div(end, GEMM_NR), count, seen, sums);
        for (int64_t i = 0; i < count; i++)
            put_tile(s, first + i, sums + i * GROUP, o, end, t);
    }
}

static void tasks(const void *ctx, int64_t thread)
{
    call *s = (call *)(uintptr_t)ctx;
    float *room = s->room + thread * room_floats(s);
    for (;;) {
        const int64_t at = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        if (at >= s->blocks * s->parts)
            return;
        VEC_BY_DTYPE(s->from.t, task, s, at, room);
    }
}

/* ---- a call --------------------------------------------------------------------------------- */

/* Blocks of equal size; so many parts that all threads are busy. */
static void cut(call *s, int threads)
{
    s->panels = ceil_div(s->to.C, GEMM_NR);
    s->groups = ceil_div(s->to.C, GROUP);
    s->blocks = ceil_div(s->to.count, TILES);
    s->rows = round_up(ceil_div(s->to.count, s->blocks), GEMM_MR);
    s->blocks = ceil_div(s->to.count, s->rows);
    s->u_apart = winograd_apart(s->panels * s->from.C * GEMM_NR);
    s->seen_apart = winograd_apart(s->rows * tile_row(&s->from));
    s->sums_apart = winograd_apart(s->rows * GROUP);
    s->parts = 1;
    while (threads > 1 && s->blocks * s->parts < 4 * threads && 4 * s->parts <= s->groups)
        s->parts *= 2;
}

static kn_status run(call *s)
{
    const int threads =
        gemm_threads(2.0 * ELEMENTS * (double)s->to.count * (double)s->from.C * (double)s->to.C);
    cut(s, threads);
    const int64_t units = s->panels * s->from.C, u = ELEMENTS * s->u_apart;
    const size_t bytes = (size_t)(u + threads * room_floats(s)) * sizeof(float);
    s->u = vec_scratch(bytes);
    if (!s->u)
        return KN_FAILED;
    s->room = s->u + u;
    kn_each_range(threads, units, turn_weights, s);
    kn_each_part(threads, tasks, s);
    vec_scratch_end(s->u, bytes);
    return KN_DONE;
}

/* Whether oneDNN is slower, for all images or none: so that an image has the same bits in every
 * batch, alone too, the number of images is not asked. With few of them small ones are slower. */
static bool is_worth_it(const call *s)
{
#ifdef KN_HAVE_ONEDNN
    return onednn_is_slower(s->from.t) && s->from.C >= 32 && s->to.C >= 32 && s->to.down > 1 &&
           s->to.across > 1;
#else
    (void)s;
    return true;
#endif
}

static bool takes(const call *s, const kn_array *w, const kn_array *x, const kn_array *y,
                  const int64_t *stride, const int64_t *dilation, int64_t groups)
{
    const kn_array *b = &s->bias;
    bool fit = groups == 1 && s->from.C > 0 && vec_float(x->dtype) && y->dtype == x->dtype &&
               w->dtype == x->dtype &&
               (!b->data || ((b->dtype == x->dtype || b->dtype == KN_F32) && b->stride[0] == 1));
    for (int d = 0; d < 2; d++)
        fit = fit && w->shape[2 + d] == 3 && stride[d] == 1 && dilation[d] == 1;
    return fit && (x->shape[1] == 1 || x->stride[1] == 1) &&
           (y->shape[1] == 1 || y->stride[1] == 1) && is_worth_it(s);
}

kn_status VEC_FN(vec_conv)(const void *args)
{
    const kn_conv_args *a = args;
    const int64_t *n = a->w.stride;
    call s = { .from = tiles_of(&a->x, &a->y, a->pad[0], a->pad[1]),
               .to = tiles_of(&a->y, &a->y, 0, 0),
               .w = { a->w.data, a->w.dtype, n[0], n[1], n[2], n[3] },
               .bias = a->bias };
    if (!takes(&s, &a->w, &a->x, &a->y, a->stride, a->dilation, a->groups))
        return KN_DECLINED;
    return s.to.count * s.to.C == 0 ? KN_DONE : run(&s);
}

kn_status VEC_FN(vec_conv_grad_x)(const void *args)
{
    const kn_conv_grad_x_args *a = args;
    const int64_t *n = a->w.stride;
    call s = { .from = tiles_of(&a->dy, &a->dx, 2 - a->pad[0], 2 - a->pad[1]),
               .to = tiles_of(&a->dx, &a->dx, 0, 0),
               .w = { gemm_at(a->w.data, a->w.dtype, 2 * n[2] + 2 * n[3]), a->w.dtype, n[1], n[0],
                      -n[2], -n[3] } };
    if (!takes(&s, &a->w, &a->dy, &a->dx, a->stride, a->dilation, a->groups))
        return KN_DECLINED;
    return s.to.count * s.to.C == 0 ? KN_DONE : run(&s);
}
