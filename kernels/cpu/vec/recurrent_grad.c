/* kernels/cpu/vec/recurrent_grad.c: the steps of a recurrent layer the other way: the gradients of
 * a step's gates, then of the state before, by a product with the weight. */
#include "kernels/cpu/vec/recurrent.h"

typedef struct call {
    const kn_recurrent_grad_args *a;
    recurrent_size z;
    const float *panel; /* [block][G][GEMM_NR] */
    float *dq;          /* [rows of all tiles][G]: gradients of a step's sums, rounded */
    int64_t step;
} call;

/* Units [u, u + w) of row n at step s. */
VEC_INLINE void units(const call *c, int64_t n, int64_t s, int64_t length, int64_t u, int64_t w,
                      kn_dtype t)
{
    const kn_recurrent_grad_args *a = c->a;
    const recurrent_size *z = &c->z;
    const int64_t N = z->N, H = z->H, at = n * H + u;
    const int64_t row = kn_step_time(s, length, a->reverse) * N + n;
    const int64_t past = (kn_step_time(s - 1, length, a->reverse) * N + n) * H + u;
    const bool lstm = a->cell == KN_CELL_LSTM;
    vf p[RECURRENT_GATES], q[RECURRENT_GATES], before = v_zero(), kept = before, dc = before;
    for (int64_t g = 0; g < z->gates; g++) {
        p[g] = v_get_n(t, a->gates.data, row * z->G + g * H + u, w);
        q[g] = v_zero();
    }
    if (s > 0)
        before = lstm ? v_get_n(KN_F32, a->kept.data, past, w) : v_get_n(t, a->y.data, past, w);
    else if ((lstm ? a->c0 : a->h0).data)
        before = v_get_n(t, (lstm ? a->c0 : a->h0).data, at, w);
    if (a->kept.data)
        kept = v_get_n(KN_F32, a->kept.data, row * H + u, w);
    if (lstm)
        dc = v_get_n(KN_F32, a->dc.data, at, w);
    vf dh = v_get_n(KN_F32, a->dh.data, at, w);
    if (a->dy.data)
        dh = dh + v_get_n(t, a->dy.data, row * H + u, w);
    dh = v_cell_grad(a->cell, p, q, before, kept, dh, &dc);
    v_put_n(KN_F32, a->dh.data, at, dh, w);
    if (lstm)
        v_put_n(KN_F32, a->dc.data, at, dc, w);
    for (int64_t g = 0; g < z->gates; g++) {
        const int64_t to = row * z->G + g * H + u;
        void *of_q = a->dq.data ? a->dq.data : a->dgates.data;
        v_put_n(t, a->dgates.data, to, p[g], w);
        if (a->dq.data)
            v_put_n(t, a->dq.data, to, q[g], w);
        const vf rounded = v_get_n(t, of_q, to, w);
        v_put_n(KN_F32, c->dq, n * z->G + g * H + u, rounded, w);
        if (s == 0)
            v_put_n(t, a->work.data, n * z->G + g * H + u, rounded, w);
    }
}

/* The same past the row's end. */
VEC_INLINE void no_units(const call *c, int64_t n, int64_t s, int64_t u, int64_t w, kn_dtype t)
{
    const recurrent_size *z = &c->z;
    for (int64_t g = 0; g < z->gates; g++) {
        const int64_t to = (s * z->N + n) * z->G + g * z->H + u;
        v_put_n(t, c->a->dgates.data, to, v_zero(), w);
        if (c->a->dq.data)
            v_put_n(t, c->a->dq.data, to, v_zero(), w);
        v_put_n(KN_F32, c->dq, n * z->G + g * z->H + u, v_zero(), w);
    }
}

VEC_INLINE void gates(const call *c, int64_t m, int64_t b, int64_t s, kn_dtype t)
{
    const recurrent_size *z = &c->z;
    for (int64_t n = m * GEMM_MR; n < v_min_i64((m + 1) * GEMM_MR, z->N); n++) {
        const int64_t length = kn_row_length(c->a->lengths.data, n, z->T);
        for (int64_t u = b * GEMM_NR; u < v_min_i64((b + 1) * GEMM_NR, z->H); u += KN_VW) {
            const int64_t w = v_min_i64(KN_VW, z->H - u);
            if (s < length)
                units(c, n, s, length, u, w, t);
            else
                no_units(c, n, s, u, w, t);
        }
    }
}

static void all_gates(const call *c, const recurrent_range *r, int64_t s)
{
    for (int64_t m = r->tile; m < r->tiles; m++)
        for (int64_t b = r->block; b < r->blocks; b++)
            VEC_BY_DTYPE(c->a->y.dtype, gates, c, m, b, s);
}

/* dh += dq w */
static void product(const call *c, const recurrent_range *r)
{
    const recurrent_size *z = &c->z;
    float *dh = c->a->dh.data, sum[GEMM_MR * GEMM_NR] __attribute__((aligned(64)));
    for (int64_t b = r->block; b < r->blocks; b++)
        for (int64_t m = r->tile; m < r->tiles; m++) {
            const int64_t first = m * GEMM_MR, rows = v_min_i64(GEMM_MR, z->N - first);
            recurrent_tile(rows, z->G, c->dq + first * z->G, z->G, c->panel + b * z->G * GEMM_NR,
                           sum, NULL);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0, u = b * GEMM_NR; j < GEMM_NR && u < z->H;
                     j += KN_VW, u += KN_VW) {
                    const int64_t at = (first + i) * z->H + u, w = v_min_i64(KN_VW, z->H - u);
                    const vf d = v_get_n(KN_F32, dh, at, w);
                    v_put_n(KN_F32, dh, at, d + v_load(sum + i * GEMM_NR + j), w);
                }
        }
}

static void tiles_run(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    const recurrent_range r = { begin, end, 0, c->z.blocks };
    for (int64_t s = c->z.T - 1; s >= 0; s--) {
        all_gates(c, &r, s);
        product(c, &r);
    }
}

static void gates_run(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    all_gates(c, &(recurrent_range){ 0, c->z.tiles, begin, end }, c->step);
}

static void product_run(const void *ctx, int64_t begin, int64_t end)
{
    const call *c = ctx;
    product(c, &(recurrent_range){ 0, c->z.tiles, begin, end });
}

kn_status VEC_FN(vec_recurrent_grad)(const void *args)
{
    const kn_recurrent_grad_args *a = args;
    call c = { .a = a, .z = recurrent_size_of(&a->y, &a->w) };
    const recurrent_size *z = &c.z;
    if (!vec_float(a->y.dtype) || a->dh.dtype != KN_F32)
        return KN_DECLINED;
    if (z->T * z->N * z->H == 0)
        return KN_DONE;
    if (!kn_cpu_lengths_fit(&a->lengths, z->T))
        return KN_FAILED;
    const int64_t panels = z->blocks * z->G * GEMM_NR, rows = z->tiles * GEMM_MR;
    const size_t bytes = (size_t)(panels + rows * z->G) * sizeof(float);
    float *room = vec_scratch(bytes);
    if (!room)
        return KN_FAILED;
    c.panel = room;
    c.dq = room + panels;
    memset(c.dq, 0, (size_t)(rows * z->G) * sizeof *c.dq);
    for (int64_t b = 0; b < z->blocks; b++)
        gemm_pack_right(room + b * z->G * GEMM_NR, gemm_at(a->w.data, a->w.dtype, b * GEMM_NR),
                        a->w.dtype, 1, z->H, v_min_i64(GEMM_NR, z->H - b * GEMM_NR), z->G);
    const int threads = recurrent_threads(z);
    if (!recurrent_by_blocks(z, threads)) {
        kn_each_range(threads, z->tiles, tiles_run, &c);
    } else {
        for (c.step = z->T - 1; c.step >= 0; c.step--) {
            kn_each_range(threads, z->blocks, gates_run, &c);
            kn_each_range(threads, z->blocks, product_run, &c);
        }
    }
    vec_scratch_end(room, bytes);
    return KN_DONE;
}
