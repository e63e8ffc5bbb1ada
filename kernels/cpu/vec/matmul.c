/* kernels/cpu/vec/matmul.c: KN_K_MATMUL on packed panels, for f32, bf16 and f16 (packed as f32).
 *
 * The product is cut into blocks of ROWS x COLUMNS x depth(K). All threads pack a block's operands
 * into a shared workspace, meet, take tiles of TILE x TILE panels in any order, and meet again.
 * An element's value is the sum over blocks of k, in order, of chains of v_fma: a function of K and
 * the operands alone, whoever computes it.
 *
 * oneDNN's f32 product is no faster on AVX2 (docs/results.md), and there a different number of
 * threads cuts K differently; it gets what it has special instructions for: bf16. */
#include "kernels/cpu/vec/gemm.h"

#include <stdatomic.h>

#ifdef _OPENMP
#include <omp.h>
#endif

enum {
    ROWS = 88 * 12,                  /* a multiple of every GEMM_MR */
    COLUMNS = 2048,                  /* a multiple of every GEMM_NR */
    DEPTH = KN_VW == 16 ? 256 : 320, /* GEMM_NR x DEPTH floats stay in the L1 cache */
    TILE = 8,    /* panels a side: the tile's left panels stay in the L2 cache */
    ROOM = 4096, /* floats of workspace that a small product has on the stack */
};

/* c[m, n] = a[m, k] b[k, n] + bias[n] with strides in elements. */
typedef struct product {
    int64_t M, N, K;
    char *c;
    const char *a, *b;
    const void *bias; /* NULL: none */
    kn_dtype t, ct, bias_t;
    int64_t cm, cn, am, ak, bk, bn, bias_n;
} product;

/* What the threads that work on one product share. */
typedef struct team {
    int size;
    _Atomic int64_t next[2]; /* the tile to take, by the parity of the block */
    float *left, *right, *bias, *c;
    int64_t depth; /* of a block */
} team;

/* A block: rows [m, m + mb), columns [n, n + nb), the terms [k, k + kb) of their sums. */
typedef struct block {
    int64_t m, n, k, mb, nb, kb;
    int64_t left, right; /* panels */
} block;

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Whether tiles can write dst itself; else they go through the workspace. */
static bool writes_through(const product *p)
{
    return p->ct == KN_F32 && p->cn == 1;
}

/* The depth of the blocks: K in equal parts. */
static int64_t block_depth(int64_t K)
{
    return K <= DEPTH ? K : ceil_div(ceil_div(K, ceil_div(K, DEPTH)), 4) * 4;
}

/* ---- workspace ------------------------------------------------------------------------------ */

static int64_t left_floats(const product *p, int64_t depth)
{
    return ceil_div(v_min_i64(p->M, ROWS), GEMM_MR) * GEMM_MR * depth;
}

static int64_t columns_padded(const product *p)
{
    return ceil_div(v_min_i64(p->N, COLUMNS), GEMM_NR) * GEMM_NR;
}

static int64_t workspace_floats(const product *p)
{
    const int64_t depth = block_depth(p->K), nb = columns_padded(p);
    const int64_t c = writes_through(p) ? 0 : v_min_i64(p->M, ROWS) * nb;
    return ceil_div(left_floats(p, depth), 16) * 16 + nb * depth + nb + c;
}

static void team_place(team *t, const product *p, float *room)
{
    t->depth = block_depth(p->K);
    t->left = room;
    t->right = t->left + ceil_div(left_floats(p, t->depth), 16) * 16;
    t->bias = t->right + columns_padded(p) * t->depth;
    t->c = t->bias + columns_padded(p);
}

/* ---- one block ------------------------------------------------------------------------------ */

/* Whether the right operand is read where it lies: few rows, so that packing it would cost as much
 * as the product itself. */
static bool reads_right(const product *p)
{
    return p->M <= GEMM_MR && p->bn == 1 && p->t == KN_F32;
}

static void pack_right_panel(const product *p, const team *t, const block *b, int64_t j)
{
    const int64_t n = b->n + j * GEMM_NR, width = v_min_i64(GEMM_NR, b->n + b->nb - n);
    if (!reads_right(p) || width < GEMM_NR)
        gemm_pack_right(t->right + j * GEMM_NR * b->kb,
                        gemm_at(p->b, p->t, n * p->bn + b->k * p->bk), p->t, p->bn, p->bk, width,
                        b->kb);
    if (p->bias && b->k == 0)
        for (int64_t i = 0; i < GEMM_NR; i++)
            t->bias[j * GEMM_NR + i] =
                i < width ? gemm_get(p->bias, p->bias_t, (n + i) * p->bias_n) : 0.0f;
}

/* This thread's share of the panels. */
static void pack_block(const product *p, const team *t, const block *b, int thread)
{
    const int64_t panels = b->left + b->right;
    const int64_t end = panels * (thread + 1) / t->size;
    for (int64_t i = panels * thread / t->size; i < end; i++) {
        if (i >= b->left) {
            pack_right_panel(p, t, b, i - b->left);
            continue;
        }
        const int64_t m = b->m + i * GEMM_MR;
        gemm_pack_left(t->left + i * GEMM_MR * b->kb, gemm_at(p->a, p->t, m * p->am + b->k * p->ak),
                       p->t, p->am, p->ak, v_min_i64(GEMM_MR, b->m + b->mb - m), b->kb);
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

/* The micro tile of left panel i and right panel j. */
static void panel_product(const product *p, const team *t, const block *b, int64_t i, int64_t j)
{
    const int64_t m0 = b->m + i * GEMM_MR, n0 = b->n + j * GEMM_NR;
    const int64_t m = v_min_i64(GEMM_MR, b->m + b->mb - m0);
    const int64_t n = v_min_i64(GEMM_NR, b->n + b->nb - n0);
    const bool last = b->k + b->kb == p->K, through = writes_through(p);
    const bool direct = reads_right(p) && n == GEMM_NR;
    const int64_t ldc = through ? p->cm : columns_padded(p);
    float *c = through ? (float *)p->c + m0 * ldc + n0 : t->c + i * GEMM_MR * ldc + j * GEMM_NR;
    const float *right =
        direct ? (const float *)p->b + b->k * p->bk + n0 : t->right + j * GEMM_NR * b->kb;
    gemm_micro(b->kb, t->left + i * GEMM_MR * b->kb, right, direct ? p->bk : GEMM_NR, c, ldc, m, n,
               b->k > 0, last && p->bias ? t->bias + j * GEMM_NR : NULL);
    if (last && !through)
        VEC_BY_DTYPE(p->ct, store_corner, p, c, ldc, m0, n0, m, n);
}

/* Tiles of TILE x TILE panels, one after the other to whoever is free. */
static void multiply_block(const product *p, team *t, const block *b, _Atomic int64_t *next)
{
    const int64_t down = ceil_div(b->left, TILE), across = ceil_div(b->right, TILE);
    for (;;) {
        const int64_t tile = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
        if (tile >= down * across)
            return;
        const int64_t i0 = tile % down * TILE, j0 = tile / down * TILE;
        for (int64_t j = j0; j < v_min_i64(j0 + TILE, b->right); j++)
            for (int64_t i = i0; i < v_min_i64(i0 + TILE, b->left); i++)
                panel_product(p, t, b, i, j);
    }
}

static void team_meet(const team *t)
{
    if (t->size > 1) {
#ifdef _OPENMP
#pragma omp barrier
#endif
    }
}

/* One thread's part in a product; every thread of the team calls it. K == 0 has one empty block. */
static void product_run(const product *p, team *t, int thread)
{
    int parity = 0;
    for (int64_t n = 0; n < p->N; n += COLUMNS) {
        for (int64_t m = 0; m < p->M; m += ROWS) {
            int64_t k = 0;
            do {
                block b = { .m = m, .n = n, .k = k };
                b.mb = v_min_i64(ROWS, p->M - m);
                b.nb = v_min_i64(COLUMNS, p->N - n);
                b.kb = v_min_i64(t->depth, p->K - k);
                b.left = ceil_div(b.mb, GEMM_MR);
                b.right = ceil_div(b.nb, GEMM_NR);
                pack_block(p, t, &b, thread);
                team_meet(t);
                multiply_block(p, t, &b, &t->next[parity]);
                team_meet(t);
                if (thread == 0) /* used again only after another meeting */
                    atomic_store_explicit(&t->next[parity], 0, memory_order_relaxed);
                parity ^= 1;
                k += b.kb;
            } while (k < p->K);
        }
    }
}

/* ---- the batch ------------------------------------------------------------------------------ */

typedef struct batch {
    product p;
    int ndim;
    int64_t count, shape[KN_MAX_DIMS], a[KN_MAX_DIMS], b[KN_MAX_DIMS], c[KN_MAX_DIMS];
} batch;

/* Product i of the batch. */
static product batch_at(const batch *s, int64_t i)
{
    product p = s->p;
    for (int d = s->ndim - 1; d >= 0; d--) {
        const int64_t at = i % s->shape[d];
        i /= s->shape[d];
        p.a = gemm_at(p.a, p.t, at * s->a[d]);
        p.b = gemm_at(p.b, p.t, at * s->b[d]);
        p.c = gemm_at(p.c, p.ct, at * s->c[d]);
    }
    return p;
}

/* All threads on one product after the other. */
static bool batch_shared(const batch *s, int threads)
{
    const int64_t floats = workspace_floats(&s->p);
    float small[ROOM] __attribute__((aligned(64)));
    float *room = small;
    if (floats > ROOM)
        room = kn_take(kn_device_memory(KN_CPU), (size_t)floats * sizeof *room, KN_MEM_WORKSPACE);
    if (!room)
        return false;
    team t = { .size = threads };
    team_place(&t, &s->p, room);
    for (int64_t i = 0; i < s->count; i++) {
        const product p = batch_at(s, i);
        if (threads == 1) {
            product_run(&p, &t, 0);
            continue;
        }
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        {
#pragma omp single
            t.size = omp_get_num_threads();
            product_run(&p, &t, omp_get_thread_num());
        }
#endif
    }
    if (room != small)
        kn_give(kn_device_memory(KN_CPU), room, (size_t)floats * sizeof *room, KN_MEM_WORKSPACE);
    return true;
}

/* Every thread computes products of its own. */
static bool batch_divided(const batch *s, int threads)
{
    const int64_t floats = ceil_div(workspace_floats(&s->p), 16) * 16;
    const size_t bytes = (size_t)(floats * threads) * sizeof(float);
    float *room = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
    if (!room)
        return false;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static)
#endif
    for (int64_t part = 0; part < threads; part++) {
        team t = { .size = 1 };
        team_place(&t, &s->p, room + part * floats);
        for (int64_t i = s->count * part / threads; i < s->count * (part + 1) / threads; i++) {
            const product p = batch_at(s, i);
            product_run(&p, &t, 0);
        }
    }
    kn_give(kn_device_memory(KN_CPU), room, bytes, KN_MEM_WORKSPACE);
    return true;
}

/* ---- the entry ------------------------------------------------------------------------------ */

static bool fits(const kn_matmul_args *x)
{
    const int n = x->dst.ndim;
    if (n < 2 || x->a.ndim != n || x->b.ndim != n)
        return false;
    for (int d = 0; d < n - 2; d++)
        if (x->a.shape[d] != x->dst.shape[d] || x->b.shape[d] != x->dst.shape[d])
            return false;
    if (x->bias.data && (x->bias.ndim != 1 || x->bias.shape[0] != x->dst.shape[n - 1]))
        return false;
    return x->a.shape[n - 2] == x->dst.shape[n - 2] && x->b.shape[n - 1] == x->dst.shape[n - 1] &&
           x->a.shape[n - 1] == x->b.shape[n - 2];
}

static bool takes(const kn_matmul_args *x)
{
    const kn_dtype t = x->a.dtype, ct = x->dst.dtype, bt = x->bias.dtype;
    if (!vec_float(t) || x->b.dtype != t || (ct != t && ct != KN_F32))
        return false;
    if (x->bias.data && bt != t && bt != KN_F32)
        return false;
#if defined(KN_HAVE_ONEDNN) && KN_VW == 16
    if (t == KN_BF16 && __builtin_cpu_supports("avx512bf16")) /* oneDNN has instructions for it */
        return false;
#endif
    return fits(x);
}

/* Leading dims that continue the rows of a and dst and share b become rows; the rest is the
 * batch. */
static void batch_fold(batch *s, const kn_matmul_args *x)
{
    product *p = &s->p;
    bool rows = true;
    s->count = 1;
    for (int d = x->dst.ndim - 3; d >= 0; d--) {
        const int64_t n = x->dst.shape[d], a = x->a.stride[d], b = x->b.stride[d];
        if (n == 1)
            continue;
        if (rows && b == 0 && a == p->am * p->M && x->dst.stride[d] == p->cm * p->M) {
            p->M *= n;
            continue;
        }
        rows = false;
        s->shape[s->ndim] = n;
        s->a[s->ndim] = a;
        s->b[s->ndim] = b;
        s->c[s->ndim] = x->dst.stride[d];
        s->ndim++;
        s->count *= n;
    }
}

/* dst^T = b^T a^T, where dst is a transposed view. */
static void batch_swap(batch *s)
{
    const product q = s->p;
    product *p = &s->p;
    *p = (product){
        .M = q.N, .N = q.M, .K = q.K, .c = q.c, .a = q.b, .b = q.a, .t = q.t, .ct = q.ct
    };
    p->cm = q.cn, p->cn = q.cm;
    p->am = q.bn, p->ak = q.bk;
    p->bk = q.ak, p->bn = q.am;
    for (int d = 0; d < s->ndim; d++) {
        const int64_t a = s->a[d];
        s->a[d] = s->b[d];
        s->b[d] = a;
    }
}

kn_status vec_matmul(const void *args)
{
    const kn_matmul_args *x = args;
    if (!takes(x))
        return KN_DECLINED;
    if (kn_array_numel(&x->dst) == 0)
        return KN_DONE;
    const int r = x->dst.ndim - 2, c = x->dst.ndim - 1;
    batch s = { .p = { .M = x->dst.shape[r], .N = x->dst.shape[c], .K = x->a.shape[c] } };
    product *p = &s.p;
    p->c = x->dst.data, p->a = x->a.data, p->b = x->b.data, p->bias = x->bias.data;
    p->t = x->a.dtype, p->ct = x->dst.dtype, p->bias_t = x->bias.dtype;
    p->cm = x->dst.stride[r], p->cn = x->dst.stride[c];
    p->am = x->a.stride[r], p->ak = x->a.stride[c];
    p->bk = x->b.stride[r], p->bn = x->b.stride[c];
    p->bias_n = x->bias.stride[0];
    if (p->M == 1) /* a size-1 dim may carry any stride */
        p->cm = p->cn * p->N;
    batch_fold(&s, x);
    if (p->cn != 1 && p->cm == 1 && !p->bias)
        batch_swap(&s);
    const double each = 2.0 * (double)p->M * (double)p->N * (double)v_max_i64(p->K, 1);
    const double work = each * (double)s.count / 16;
    const int threads = kn_threads_for(work < 0x1p60 ? (int64_t)work : (int64_t)1 << 60);
    const bool divided = threads > 1 && s.count >= threads && each < 8e6;
    return (divided ? batch_divided(&s, threads) : batch_shared(&s, threads)) ? KN_DONE : KN_FAILED;
}
