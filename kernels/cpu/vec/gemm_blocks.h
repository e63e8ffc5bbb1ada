/* kernels/cpu/vec/gemm_blocks.h (private): one product of any size on packed panels, for f32, bf16
 * and f16 (packed as f32).
 *
 * The product is cut into blocks of rows(M) x COLUMNS x depth(K). All threads pack a block's left
 * operand into a shared workspace, where it stays in the L2 cache, and meet. Then each takes panels
 * of the right operand one by one: it packs a panel into a place of its own, where it stays in the
 * L1 cache, and multiplies it by all left panels; between these it asks the memory for the source
 * of the panel that it takes next. So the packed right operand never leaves the L1 cache, and its
 * reading is hidden. An element's value is the sum over blocks of k, in order, of chains of v_fma:
 * a function of K and the operands alone, for every provider.
 *
 * Of a matrix by its own transpose (a Gram matrix) the tiles below the diagonal are left out, and
 * copied from above: their chains have the same factors. */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_BLOCKS_H
#define KNAP_KERNELS_CPU_VEC_GEMM_BLOCKS_H

#include "kernels/cpu/vec/gemm_windows.h"

#include <stdatomic.h>

enum {
    ROWS = 22 * 12, /* a multiple of every GEMM_MR: ROWS x DEPTH floats stay in the L2 cache */
    COLUMNS = 2048, /* a multiple of every GEMM_NR: results that the next block of k adds to */
    FEWEST = 8,     /* left panels for which a thread packs a right panel */
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
    const windows *windows; /* NULL, or b[k, n]: those of the images at b */
} product;

/* Shared by the threads that work on one product. Blocks use the two places of left in turn. */
typedef struct workspace {
    int threads;
    int64_t rows, depth;    /* of a block */
    float *left[2], *right; /* packed: a block's left operand; a panel of each thread */
    float *c;               /* sums of a block whose dst is not written directly */
    _Atomic int64_t next;   /* the task to take */
} workspace;

/* A block: rows [m, m + mb), columns [n, n + nb), the terms [k, k + kb) of their sums. */
typedef struct block {
    int64_t m, n, k, mb, nb, kb;
    int64_t left, right; /* panels */
} block;

/* Whether tiles can write dst itself; else they go through the workspace. */
static bool writes_through(const product *p)
{
    return p->ct == KN_F32 && p->cn == 1;
}

/* The depth of the blocks: K in equal parts. */
static int64_t block_depth(int64_t K)
{
    return K <= DEPTH ? K : round_up(ceil_div(K, ceil_div(K, DEPTH)), 4);
}

/* The rows of the blocks: M in equal parts. */
static int64_t block_rows(int64_t M)
{
    return M <= ROWS ? M : round_up(ceil_div(M, ceil_div(M, ROWS)), GEMM_MR);
}

/* ---- workspace ------------------------------------------------------------------------------ */

static int64_t rows_padded(const product *p)
{
    return round_up(block_rows(p->M), GEMM_MR);
}

static int64_t columns_padded(const product *p)
{
    return round_up(v_min_i64(p->N, COLUMNS), GEMM_NR);
}

static int64_t left_floats(const product *p)
{
    return round_up(rows_padded(p) * block_depth(p->K), 16);
}

static int64_t right_floats(const product *p)
{
    return GEMM_NR * block_depth(p->K);
}

/* A product of one block needs one place. */
static int places(const product *p)
{
    return p->M <= ROWS && p->N <= COLUMNS && p->K <= DEPTH ? 1 : 2;
}

static int64_t workspace_floats(const product *p, int threads)
{
    const int64_t c = writes_through(p) ? 0 : round_up(rows_padded(p) * columns_padded(p), 16);
    return places(p) * left_floats(p) + threads * right_floats(p) + c;
}

/* Lays out the workspace from base on. */
static void workspace_place(workspace *w, const product *p, float *base)
{
    w->rows = block_rows(p->M);
    w->depth = block_depth(p->K);
    w->left[0] = base;
    w->left[1] = base + (places(p) - 1) * left_floats(p);
    w->right = w->left[1] + left_floats(p);
    w->c = w->right + w->threads * right_floats(p);
}

/* ---- one block ------------------------------------------------------------------------------ */

/* This thread's share of the left panels. */
static void pack_left(const product *p, float *left, const block *b, int thread, int threads)
{
    const int64_t end = b->left * (thread + 1) / threads;
    for (int64_t i = b->left * thread / threads; i < end; i++) {
        const int64_t m = b->m + i * GEMM_MR;
        gemm_pack_left(left + i * GEMM_MR * b->kb, gemm_at(p->a, p->t, m * p->am + b->k * p->ak),
                       p->t, p->am, p->ak, v_min_i64(GEMM_MR, b->m + b->mb - m), b->kb);
    }
}

/* The source of right panel j of a block: `lines` runs of the memory, `apart` elements from each
 * other, that hold `width` columns by `depth` terms. */
typedef struct panel {
    const char *at;
    int64_t width, lines, apart, run; /* run: elements of a line */
} panel;

static panel panel_of(const product *p, const block *b, int64_t j)
{
    const int64_t n = b->n + j * GEMM_NR;
    panel s = { .at = gemm_at(p->b, p->t, n * p->bn + b->k * p->bk),
                .width = v_min_i64(GEMM_NR, b->n + b->nb - n) };
    const bool rows = p->bn == 1;
    if (p->windows && b->kb > 0) {
        s.at = windows_first(p->b, p->windows, n, b->k, p->t);
        s.lines = b->kb, s.run = s.width, s.apart = windows_apart(p->windows);
        return s;
    }
    s.lines = rows ? b->kb : s.width;
    s.run = rows ? s.width : b->kb;
    s.apart = rows ? p->bk : p->bn;
    return s;
}

static void pack_right(const product *p, float *right, const panel *s, const block *b, int64_t j)
{
    if (p->windows)
        windows_pack(right, p->b, p->windows, b->n + j * GEMM_NR, s->width, b->k, b->kb, p->t);
    else
        gemm_pack_right(right, s->at, p->t, p->bn, p->bk, s->width, b->kb);
}

/* Asks for part i of n of a panel's source. */
VEC_INLINE void panel_prefetch(const product *p, const panel *s, int64_t i, int64_t n)
{
    const int64_t step = 64 / v_size(p->t), across = ceil_div(s->run, step);
    const int64_t end = s->lines * across * (i + 1) / n;
    int64_t at = s->lines * across * i / n, line = at / across, run = at % across;
    for (; at < end; at++) {
        __builtin_prefetch(gemm_at(s->at, p->t, line * s->apart + run * step));
        if (++run == across)
            run = 0, line++;
    }
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

/* The micro tile of left panel i and right panel j, which is packed at right. */
static void panel_product(const product *p, const workspace *w, const float *left,
                          const float *right, const float *bias, const block *b, int64_t i,
                          int64_t j)
{
    const int64_t m0 = b->m + i * GEMM_MR, n0 = b->n + j * GEMM_NR;
    const int64_t m = v_min_i64(GEMM_MR, b->m + b->mb - m0);
    const int64_t n = v_min_i64(GEMM_NR, b->n + b->nb - n0);
    const bool through = writes_through(p);
    const int64_t ldc = through ? p->cm : columns_padded(p);
    if (p->gram && m0 >= n0 + n)
        return;
    float *c = through ? (float *)p->c + m0 * ldc + n0 : w->c + i * GEMM_MR * ldc + j * GEMM_NR;
    gemm_micro(b->kb, left + i * GEMM_MR * b->kb, right, c, ldc, m, n, b->k > 0 || p->add, bias);
    if (!through && b->k + b->kb == p->K)
        VEC_BY_DTYPE(p->ct, store_corner, p, c, ldc, m0, n0, m, n);
}

/* Into how many groups the left panels of a block are cut so that its tasks, a right panel by a
 * group each, keep all threads busy. */
static int64_t groups(const workspace *w, const block *b)
{
    int64_t n = 1;
    while (w->threads > 1 && n * b->right < 4 * w->threads && b->left / (2 * n) >= FEWEST)
        n *= 2;
    return n;
}

/* The panel of task `at` of a block, or of the block after it. */
static panel panel_after(const product *p, const workspace *w, const block *b, int64_t at,
                         const block *next)
{
    const int64_t cut = groups(w, b), tasks = cut * b->right;
    if (at < tasks || !next)
        return panel_of(p, b, v_min_i64(at, tasks - 1) / cut);
    return panel_of(p, next, v_min_i64((at - tasks) / groups(w, next), next->right - 1));
}

/* Tasks, one after the other to free threads. next: the block after it, or NULL. */
static void multiply_block(const product *p, workspace *w, const float *left, const block *b,
                           const block *next, int thread)
{
    float *right = w->right + thread * GEMM_NR * w->depth;
    float bias[GEMM_NR] = { 0 };
    const int64_t cut = groups(w, b), tasks = cut * b->right;
    const bool biased = p->bias && b->k + b->kb == p->K;
    int64_t task = atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed);
    while (task < tasks) {
        const int64_t then = atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed);
        const int64_t j = task / cut, group = task % cut;
        const int64_t first = b->left * group / cut, end = b->left * (group + 1) / cut;
        const panel here = panel_of(p, b, j), there = panel_after(p, w, b, then, next);
        pack_right(p, right, &here, b, j);
        for (int64_t i = 0; biased && i < here.width; i++)
            bias[i] = gemm_get(p->bias, p->bias_t, (b->n + j * GEMM_NR + i) * p->bias_n);
        for (int64_t i = first; i < end; i++) {
            if (b->kb > 0 && (then < tasks || next))
                panel_prefetch(p, &there, i - first, end - first);
            panel_product(p, w, left, right, biased ? bias : NULL, b, i, j);
        }
        task = then;
    }
}

/* Block i of the product in the order n, m, k; false past the last one. K == 0 has empty blocks,
 * so that bias or zeros are stored. */
static bool block_at(const product *p, const workspace *w, int64_t i, block *b)
{
    const int64_t depths = v_max_i64(1, w->depth ? ceil_div(p->K, w->depth) : 1);
    const int64_t downs = ceil_div(p->M, v_max_i64(w->rows, 1));
    b->k = i % depths * w->depth;
    b->m = i / depths % downs * w->rows;
    b->n = i / depths / downs * COLUMNS;
    b->mb = v_min_i64(w->rows, p->M - b->m);
    b->nb = v_min_i64(COLUMNS, p->N - b->n);
    b->kb = v_min_i64(w->depth, p->K - b->k);
    b->left = ceil_div(b->mb, GEMM_MR);
    b->right = ceil_div(b->nb, GEMM_NR);
    return b->n < p->N;
}

/* Block i is multiplied while the left operand of block i + 1 is packed into the other place. */
typedef struct stage {
    const product *p;
    workspace *w;
    int64_t i; /* -1: nothing to multiply yet */
} stage;

/* Rows [begin, end) of 4 of c take what lies before their diagonal from its columns. */
static void gram_mirror(const void *ctx, int64_t begin, int64_t end)
{
    const product *p = ctx;
    float *c = (float *)(void *)p->c;
    for (int64_t i = begin * 4; i < v_min_i64(end * 4, p->M); i += 4) {
        int64_t j = 0;
        for (; j + 4 <= i && i + 4 <= p->M; j += 4)
            gemm_transpose4(c + i * p->cm + j, p->cm, c + j * p->cm + i, p->cm);
        for (int64_t r = i; r < v_min_i64(i + 4, p->M); r++)
            for (int64_t k = j; k < r; k++)
                c[r * p->cm + k] = c[k * p->cm + r];
    }
}

/* One thread's part of a stage. */
static void stage_part(const void *ctx, int64_t part)
{
    const stage *s = ctx;
    workspace *w = s->w;
    block b, next;
    const bool more = block_at(s->p, w, s->i + 1, &next);
    if (s->i >= 0 && block_at(s->p, w, s->i, &b))
        multiply_block(s->p, w, w->left[s->i % 2], &b, more ? &next : NULL, (int)part);
    if (more)
        pack_left(s->p, w->left[(s->i + 1) % 2], &next, (int)part, w->threads);
}

/* By all threads, stage by stage. */
static void product_run(const product *p, workspace *w)
{
    block b;
    stage s = { p, w, -1 };
    for (; block_at(p, w, s.i < 0 ? 0 : s.i, &b); s.i++) {
        atomic_store_explicit(&w->next, 0, memory_order_relaxed);
        kn_each_part(w->threads, stage_part, &s);
    }
    if (p->gram)
        kn_each_range(w->threads, ceil_div(p->M, 4), gram_mirror, p);
}

#endif
