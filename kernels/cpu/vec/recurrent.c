/* kernels/cpu/vec/recurrent.c: the steps of a recurrent layer: a block's sums of the state before,
 * and at once, while they are in the first-level cache, its gates. */
#include "kernels/cpu/vec/recurrent.h"

typedef struct call {
    const kn_recurrent_args *a;
    recurrent_size z;
    const float *panel, *bias; /* [block][gate][H][GEMM_NR], [block][gate][GEMM_NR] */
    float *h[2]; /* [rows of all tiles][H]: before and after a step of odd, even number */
    int64_t step;
} call;

/* Units [u, u + w) of row n at step s, from the sums q[gate] of stride GEMM_MR GEMM_NR. */
VEC_INLINE void units(const call *c, int64_t n, int64_t s, int64_t length, int64_t u, int64_t w,
                      const float *q, kn_dtype t)
{
    const kn_recurrent_args *a = c->a;
    const recurrent_size *z = &c->z;
    const int64_t N = z->N, H = z->H;
    const int64_t row = kn_step_time(s, length, a->reverse) * N + n;
    const int64_t past = (kn_step_time(s - 1, length, a->reverse) * N + n) * H + u;
    vf p[RECURRENT_GATES], sum[RECURRENT_GATES], kept = v_zero();
    for (int64_t g = 0; g < z->gates; g++) {
        p[g] = v_get_n(t, a->gates.data, row * z->G + g * H + u, w);
        sum[g] = v_load(q + g * GEMM_MR * GEMM_NR);
    }
    if (a->cell == KN_CELL_LSTM && s > 0)
        kept = v_get_n(KN_F32, a->kept.data, past, w);
    else if (a->c0.data)
        kept = v_get_n(t, a->c0.data, n * H + u, w);
    const vf before = v_get_n(KN_F32, c->h[s % 2], n * H + u, w);
    const vf h = v_cell(a->cell, p, sum, before, &kept);
    for (int64_t g = 0; g < z->gates; g++)
        v_put_n(t, a->gates.data, row * z->G + g * H + u, p[g], w);
    v_put_n(t, a->y.data, row * H + u, h, w);
    v_put_n(KN_F32, c->h[(s + 1) % 2], n * H + u,
            t == KN_F32 ? h : v_get_n(t, a->y.data, row * H + u, w), w);
    if (a->kept.data)
        v_put_n(KN_F32, a->kept.data, row * H + u, kept, w);
    if (s < length - 1)
        return;
    v_put_n(t, a->h.data, n * H + u, h, w);
    if (a->cn.data)
        v_put_n(t, a->cn.data, n * H + u, kept, w);
}

/* The same past the row's end. */
VEC_INLINE void no_units(const call *c, int64_t n, int64_t s, int64_t u, int64_t w, kn_dtype t)
{
    const int64_t H = c->z.H, at = (s * c->z.N + n) * H + u;
    v_put_n(t, c->a->y.data, at, v_zero(), w);
    if (c->a->kept.data)
        v_put_n(KN_F32, c->a->kept.data, at, v_zero(), w);
    v_put_n(KN_F32, c->h[(s + 1) % 2], n * H + u, v_get_n(KN_F32, c->h[s % 2], n * H + u, w), w);
}

/* Block b of tile m at step s. */
VEC_INLINE void block(const call *c, int64_t m, int64_t b, int64_t s, kn_dtype t)
{
    const recurrent_size *z = &c->z;
    const int64_t first = m * GEMM_MR, rows = v_min_i64(GEMM_MR, z->N - first);
    float q[RECURRENT_GATES * GEMM_MR * GEMM_NR] __attribute__((aligned(64)));
    for (int64_t g = 0; g < z->gates; g++) {
        const int64_t at = b * z->gates + g;
        recurrent_tile(rows, z->H, c->h[s % 2] + first * z->H, z->H, c->panel + at * z->H * GEMM_NR,
                       q + g * GEMM_MR * GEMM_NR, c->bias + at * GEMM_NR);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t n = first + i, length = kn_row_length(c->a->lengths.data, n, z->T);
        for (int64_t j = 0, u = b * GEMM_NR; j < GEMM_NR && u < z->H; j += KN_VW, u += KN_VW) {
            const int64_t w = v_min_i64(KN_VW, z->H - u);
            if (s < length)
                units(c, n, s, length, u, w, q + i * GEMM_NR + j, t);
            else
                no_units(c, n, s, u, w, t);
        }
    }
}

static void step(const call *c, const recurrent_range *r, int64_t s)
{
    for (int64_t b = r->block; b < r->blocks; b++)
        for (int64_t m = r->tile; m < r->tiles; m++)
            VEC_BY_DTYPE(c->a->y.dtype, block, c, m, b, s);
}

/* All steps of some tiles. */
static void tiles_run(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    for (int64_t s = 0; s < c->z.T; s++)
        step(c, &(recurrent_range){ begin, end, 0, c->z.blocks }, s);
}

/* Some blocks of one step. */
static void blocks_run(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    step(c, &(recurrent_range){ 0, c->z.tiles, begin, end }, c->step);
}

/* Panels, biases and the first state, in room. */
static void prepare(call *c, float *room)
{
    const kn_recurrent_args *a = c->a;
    const recurrent_size *z = &c->z;
    const int64_t all = z->blocks * z->gates, rows = z->tiles * GEMM_MR;
    float *bias = room + all * z->H * GEMM_NR;
    c->panel = room;
    c->bias = bias;
    c->h[0] = bias + all * GEMM_NR;
    c->h[1] = c->h[0] + rows * z->H;
    memset(bias, 0, (size_t)(all * GEMM_NR + 2 * rows * z->H) * sizeof *bias);
    for (int64_t i = 0; i < all; i++) {
        const int64_t u = i / z->gates * GEMM_NR, first = i % z->gates * z->H + u;
        const int64_t n = v_min_i64(GEMM_NR, z->H - u);
        gemm_pack_right(room + i * z->H * GEMM_NR, gemm_at(a->w.data, a->w.dtype, first * z->H),
                        a->w.dtype, z->H, 1, n, z->H);
        for (int64_t j = 0; a->bias.data && j < n; j++)
            bias[i * GEMM_NR + j] = gemm_get(a->bias.data, a->bias.dtype, first + j);
    }
    for (int64_t i = 0; i < z->N * z->H; i++)
        c->h[0][i] = gemm_get(a->h.data, a->h.dtype, i);
}

kn_status VEC_FN(vec_recurrent)(const void *args)
{
    const kn_recurrent_args *a = args;
    const kn_dtype bias = a->bias.dtype;
    call c = { .a = a, .z = recurrent_size_of(&a->y, &a->w) };
    const recurrent_size *z = &c.z;
    if (!vec_float(a->y.dtype) || (a->kept.data && a->kept.dtype != KN_F32) ||
        (a->bias.data && !vec_float(bias)))
        return KN_DECLINED;
    if (z->T * z->N * z->H == 0)
        return KN_DONE;
    if (!kn_cpu_lengths_fit(&a->lengths, z->T))
        return KN_FAILED;
    const int64_t all = z->blocks * z->gates * GEMM_NR;
    const size_t bytes = (size_t)(all * z->H + all + 2 * z->tiles * GEMM_MR * z->H) * sizeof(float);
    float *room = vec_scratch(bytes);
    if (!room)
        return KN_FAILED;
    prepare(&c, room);
    const int threads = recurrent_threads(z);
    if (!recurrent_by_blocks(z, threads))
        kn_each_range(threads, z->tiles, tiles_run, &c);
    else
        for (c.step = 0; c.step < z->T; c.step++)
            kn_each_range(threads, z->blocks, blocks_run, &c);
    vec_scratch_end(room, bytes);
    return KN_DONE;
}
