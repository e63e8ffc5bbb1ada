/* kernels/cpu/vec/gemm_blocks.h (private): one product of any size on packed panels, for f32, bf16
 * and f16 (packed as f32, or bf16, and f32 rounded to it, as pairs).
 *
 * The result is cut into tasks of rows x columns, which threads claim one by one; they never wait
 * for each other before the end. A task goes through K in blocks. It packs one panel of a block's
 * columns after the other, and multiplies it by all panels of its rows, which it packs beside the
 * first one; meanwhile it asks the memory for the source of the next panels. Packed rows and the
 * panel of columns stay in the L2 cache, from where they come in order, so in time. An element's
 * value is the sum over blocks of k, in order, of chains of v_fma: a function of K and the operands
 * alone, for every cut; the instruction set decides how deep a block is.
 *
 * Of a matrix by its own transpose (a Gram matrix) the tiles below the diagonal are left out, and
 * copied from above: their chains have the same factors. */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_BLOCKS_H
#define KNAP_KERNELS_CPU_VEC_GEMM_BLOCKS_H

#include "kernels/cpu/vec/gemm_windows.h"

enum {
    ROWS = 22 * 12, /* a multiple of every GEMM_MR: ROWS x DEPTH floats stay in the L2 cache */
    COLUMNS = 2048, /* a multiple of every GEMM_NR: results that the next block of k adds to */
    NARROW = 512,   /* so many where these lie in the workspace (keeps_sums) */
    FINER = 4,      /* threads that share a product try up to so many times as many tasks */
    PACK = 20,      /* packing an element takes as long as so many multiply-adds */
};

/* c[m, n] = a[m, k] b[k, n] + bias[n], or c += that, with strides in elements. */
typedef struct product {
    int64_t M, N, K;
    char *c;
    const char *a, *b;
    const void *bias; /* NULL: none */
    kn_dtype t, ct, bias_t;
    int64_t cm, cn, am, ak, bk, bn, bias_n;
    bool add, gram; /* gram: b is a transposed; its mirror is still to be made (gram_mirror) */
    bool pairs;     /* a float of a panel holds two terms (gemm.h) */
    const windows *windows; /* NULL, or b[k, n]: those of the images at b */
} product;

/* How a product is cut into down x across tasks; the last ones may be smaller. */
typedef struct tasks {
    int64_t rows, columns; /* of a task: multiples of GEMM_MR and GEMM_NR */
    int64_t down, across, depth;
} tasks;

/* A block of a task: rows [m, m + mb), columns [n, n + nb), the terms [k, k + kb) of their sums. */
typedef struct block {
    int64_t m, n, k, mb, nb, kb;
} block;

/* Whether tiles can write dst itself; else they go through the workspace. */
static bool writes_through(const product *p)
{
    return p->ct == KN_F32 && p->cn == 1;
}

/* The depth of the blocks: K in equal parts. */
static int64_t block_depth(const product *p)
{
    const int64_t K = p->K, most = p->pairs ? 2 * DEPTH : DEPTH;
    return K <= most ? K : round_up(ceil_div(K, ceil_div(K, most)), 4);
}

/* Whether the sums of a task lie in the workspace from block to block. */
static bool keeps_sums(const product *p)
{
    return !writes_through(p) && p->K > block_depth(p);
}

/* Floats that so many terms of a row are packed into. */
static int64_t packed(const product *p, int64_t terms)
{
    return p->pairs ? ceil_div(terms, 2) : terms;
}

/* ---- the cut -------------------------------------------------------------------------------- */

/* n in `parts` equal parts, or fewer: the size of one, a multiple of unit. */
static int64_t part_size(int64_t n, int64_t parts, int64_t unit)
{
    return v_max_i64(unit, round_up(ceil_div(n, parts), unit));
}

static tasks cut_into(const product *p, int64_t down, int64_t across)
{
    tasks x = { part_size(p->M, down, GEMM_MR), part_size(p->N, across, GEMM_NR) };
    x.down = ceil_div(p->M, x.rows);
    x.across = ceil_div(p->N, x.columns);
    x.depth = block_depth(p);
    return x;
}

/* The time of threads that share a product, in multiply-adds a term: each takes as many tasks as
 * the busiest one, and a part of one more where another program holds it up. Pairs take half the
 * time to multiply, but not to pack. */
static double cut_time(const product *p, const tasks *x, int threads)
{
    const double rows = (double)x->rows, columns = (double)x->columns;
    const double left = p->pairs ? 2 * PACK : PACK, right = p->windows ? 2 * left : left;
    const double task = rows * columns + left * rows + right * columns;
    return task * ((double)ceil_div(x->down * x->across, threads) + 0.125);
}

static tasks product_cut(const product *p, int threads)
{
    const int64_t down = ceil_div(p->M, ROWS);
    const int64_t across = ceil_div(p->N, keeps_sums(p) ? NARROW : COLUMNS);
    tasks best = cut_into(p, down, across);
    for (int64_t i = 1; i <= FINER && threads > 1; i++)
        for (int64_t j = 1; j <= v_max_i64(FINER, threads); j++) {
            const tasks x = cut_into(p, i * down, j * across);
            if (cut_time(p, &x, threads) < cut_time(p, &best, threads))
                best = x;
        }
    return best;
}

/* ---- workspace ------------------------------------------------------------------------------ */

/* A thread's place: a block's rows, a panel, and sums, of the task (keeps_sums) or of one tile. */
static int64_t left_floats(const product *p, const tasks *x)
{
    return round_up(x->rows * packed(p, x->depth), 16);
}

static int64_t place_floats(const product *p, const tasks *x)
{
    const int64_t c = keeps_sums(p) ? x->rows * x->columns : GEMM_MR * GEMM_NR;
    return round_up(left_floats(p, x) + GEMM_NR * packed(p, x->depth) + c, 16);
}

static int64_t workspace_floats(const product *p, int threads)
{
    const tasks x = product_cut(p, threads);
    return threads * place_floats(p, &x);
}

/* ---- one task ------------------------------------------------------------------------------- */

/* The panel of a block's rows from row i on; left: of the first. */
static void pack_left(const product *p, float *left, const block *b, int64_t i)
{
    const int64_t rows = v_min_i64(GEMM_MR, b->mb - i);
    const void *from = gemm_at(p->a, p->t, (b->m + i) * p->am + b->k * p->ak);
    float *to = left + i * packed(p, b->kb);
    if (p->pairs)
        VEC_BY_DTYPE(p->t, gemm_pack_pairs, to, from, p->am, p->ak, rows, b->kb, GEMM_MR);
    else
        gemm_pack_left(to, from, p->t, p->am, p->ak, rows, b->kb);
}

/* Of the lines that a tile of so many terms asks for: before every AHEAD of them. */
static int64_t each_time(const product *p, int64_t lines, int64_t terms)
{
    return ceil_div(lines, ceil_div(packed(p, terms), AHEAD));
}

/* The source of the rows of a block from i on, to be asked for by one tile; of rows that lie side
 * by side in columns, the line that is new. */
static gemm_ahead left_ahead(const product *p, const block *b, int64_t i)
{
    const int64_t bytes = v_size(p->t), rows = v_min_i64(GEMM_MR, b->mb - i);
    const bool along = p->ak == 1;
    if (rows <= 0 || b->kb == 0 || (!along && p->am != 1))
        return (gemm_ahead){ 0 };
    const int64_t row = b->m + i + (along ? 0 : rows - 1);
    const int64_t run = along ? ceil_div(b->kb * bytes, 64) : 1;
    const int64_t lines = along ? rows * run : b->kb;
    return (gemm_ahead){ .line = gemm_at(p->a, p->t, row * p->am + b->k * p->ak),
                         .run = run,
                         .left = run,
                         .skip = (along ? p->am : p->ak) * bytes - run * 64,
                         .lines = lines,
                         .each = each_time(p, lines, b->kb) };
}

/* The source of the panel of a block from column n on: `lines` runs of the memory, `apart` elements
 * from each other; windows lie in rows, which the first `begun` runs end. */
typedef struct panel {
    const char *at;
    int64_t width, lines, apart, run; /* run: elements of a line */
    int64_t row, begun, further;      /* runs of a row; elements from its end to the next */
} panel;

static panel panel_of(const product *p, const block *b, int64_t n)
{
    panel s = { .at = gemm_at(p->b, p->t, n * p->bn + b->k * p->bk),
                .width = v_min_i64(GEMM_NR, b->n + b->nb - n) };
    const bool rows = p->bn == 1;
    if (p->windows && b->kb > 0) {
        s.at = windows_first(p->b, p->windows, n, b->k, p->t);
        s.lines = b->kb, s.run = s.width, s.apart = windows_apart(p->windows);
        s.row = p->windows->Q, s.begun = s.row - b->k % s.row;
        s.further = p->windows->stride[0] * p->windows->row - s.row * s.apart;
        return s;
    }
    s.lines = rows ? b->kb : s.width;
    s.run = rows ? s.width : b->kb;
    s.apart = rows ? p->bk : p->bn;
    return s;
}

static void pack_right(const product *p, float *right, const panel *s, const block *b, int64_t n)
{
    if (p->windows)
        windows_pack(right, p->b, p->windows, n, s->width, b->k, b->kb, p->pairs, p->t);
    else if (p->pairs)
        VEC_BY_DTYPE(p->t, gemm_pack_pairs, right, s->at, p->bn, p->bk, s->width, b->kb, GEMM_NR);
    else
        gemm_pack_right(right, s->at, p->t, p->bn, p->bk, s->width, b->kb);
}

/* The lines of a panel's source, to be asked for by `tiles` tiles of so many terms. */
static gemm_ahead panel_ahead(const product *p, const panel *s, int64_t tiles, int64_t terms)
{
    const int64_t bytes = v_size(p->t), run = ceil_div(s->run * bytes, 64);
    return (gemm_ahead){ .line = s->at,
                         .run = run,
                         .left = run,
                         .skip = s->apart * bytes - run * 64,
                         .row = s->row,
                         .runs = s->begun,
                         .further = s->further * bytes,
                         .lines = s->lines * run,
                         .each = each_time(p, ceil_div(s->lines * run, tiles), terms) };
}

/* Rounds m x n finished sums of the workspace to dst. */
VEC_INLINE void store_corner(const product *p, const float *c, int64_t ldc, int64_t m0, int64_t n0,
                             int64_t m, int64_t n, kn_dtype ct)
{
    for (int64_t i = 0; i < m; i++) {
        void *row = gemm_at(p->c, ct, (m0 + i) * p->cm + n0 * p->cn);
        if (p->cn == 1) {
            for (int64_t j = 0; j < n; j += KN_VW)
                v_put_n(ct, row, j, v_load(c + i * ldc + j), n - j);
            continue;
        }
        for (int64_t j = 0; j < n; j++)
            v_put_n(ct, row, j * p->cn, v_set1(c[i * ldc + j]), 1);
    }
}

/* The micro tile at (m, n): the packed rows `left` by the packed panel `right`. c: the place of
 * sums where dst isn't written directly; those of the task have rows of ldc. */
static void tile_product(const product *p, const float *left, const float *right, float *c,
                         int64_t ldc, const float *bias, const block *b, int64_t m, int64_t n,
                         gemm_ahead *ahead)
{
    const int64_t rows = v_min_i64(GEMM_MR, b->m + b->mb - m);
    const int64_t columns = v_min_i64(GEMM_NR, b->n + b->nb - n);
    const bool through = writes_through(p);
    if (p->gram && m >= n + columns)
        return;
    if (through)
        c = (float *)p->c + m * p->cm + n, ldc = p->cm;
    else if (keeps_sums(p))
        c += (m - b->m) * ldc + n - b->n;
    else
        ldc = GEMM_NR;
    const int64_t kb = packed(p, b->kb);
    const bool store = !through && b->k + b->kb == p->K;
    for (int64_t i = 0; store && p->cn == 1 && i < rows; i++)
        __builtin_prefetch(gemm_at(p->c, p->ct, (m + i) * p->cm + n), 1);
    const bool add = b->k > 0 || p->add;
    if (p->pairs)
        gemm_micro(kb, left, right, c, ldc, rows, columns, add, bias, true, ahead);
    else
        gemm_micro(kb, left, right, c, ldc, rows, columns, add, bias, false, ahead);
    if (store)
        VEC_BY_DTYPE(p->ct, store_corner, p, c, ldc, m, n, rows, columns);
}

/* place: this thread's (place_floats). */
static void block_run(const product *p, const tasks *x, const block *b, float *place)
{
    float *right = place + left_floats(p, x), *c = right + GEMM_NR * packed(p, x->depth);
    float bias[GEMM_NR] = { 0 };
    const bool biased = p->bias && b->k + b->kb == p->K;
    const int64_t end = b->n + b->nb, tiles = ceil_div(b->mb, GEMM_MR);
    block next = *b;
    next.k += b->kb;
    next.kb = v_min_i64(x->depth, p->K - next.k);
    panel here = panel_of(p, b, b->n);
    for (int64_t n = b->n; n < end; n += GEMM_NR) {
        const bool more = n + GEMM_NR < end || next.kb > 0;
        panel there = { 0 };
        if (more)
            there = n + GEMM_NR < end ? panel_of(p, b, n + GEMM_NR) : panel_of(p, &next, b->n);
        pack_right(p, right, &here, b, n);
        for (int64_t i = 0; biased && i < here.width; i++)
            bias[i] = gemm_get(p->bias, p->bias_t, (n + i) * p->bias_n);
        gemm_ahead ahead[2] = { 0 };
        if (more && b->kb > 0)
            ahead[0] = panel_ahead(p, &there, tiles, b->kb);
        for (int64_t i = 0; i < b->mb; i += GEMM_MR) {
            if (n == b->n) {
                pack_left(p, place, b, i);
                ahead[1] = left_ahead(p, b, i + GEMM_MR);
            }
            tile_product(p, place + i * packed(p, b->kb), right, c, x->columns,
                         biased ? bias : NULL, b, b->m + i, n, ahead);
        }
        here = there;
    }
}

/* K == 0 has one empty block, so that bias or zeros are stored. */
static void task_run(const product *p, const tasks *x, int64_t task, float *place)
{
    block b = { .m = task / x->across * x->rows, .n = task % x->across * x->columns };
    b.mb = v_min_i64(x->rows, p->M - b.m);
    b.nb = v_min_i64(x->columns, p->N - b.n);
    if (p->gram && b.m >= b.n + b.nb)
        return;
    do {
        b.kb = v_min_i64(x->depth, p->K - b.k);
        block_run(p, x, &b, place);
        b.k += b.kb;
    } while (b.k < p->K);
}

/* Rows [begin, end) of 4 of c take what lies before their diagonal from its columns. */
static void gram_mirror(const void *ctx, int64_t begin, int64_t end)
{
    const product *p = ctx;
    float *c = (float *)(void *)p->c;
    for (int64_t i = begin * 4; i < v_min_i64(end * 4, p->M); i += 4) {
        int64_t j = 0;
        for (; j + 4 <= i && i + 4 <= p->M; j += 4)
            gemm_transpose4(c + i * p->cm + j, p->cm, c + j * p->cm + i, 4 * p->cm, false);
        for (int64_t r = i; r < v_min_i64(i + 4, p->M); r++)
            for (int64_t k = j; k < r; k++)
                c[r * p->cm + k] = c[k * p->cm + r];
    }
}

typedef struct sharing {
    const product *p;
    tasks cut;
    kn_claims *claims;
    float *base; /* a place for each thread */
} sharing;

static void product_part(const void *ctx, int64_t part)
{
    const sharing *s = ctx;
    float *place = s->base + part * place_floats(s->p, &s->cut);
    for (int64_t task; (task = kn_claim(s->claims, part)) >= 0;)
        task_run(s->p, &s->cut, task, place);
}

/* On so many threads, with workspace_floats of them at base. */
static void product_run(const product *p, int threads, float *base)
{
    const tasks x = product_cut(p, threads);
    kn_claims claims = { .n = x.down * x.across, .parts = threads };
    kn_each_part(threads, product_part, &(sharing){ p, x, &claims, base });
    if (p->gram)
        kn_each_range(threads, ceil_div(p->M, 4), gram_mirror, p);
}

#endif
