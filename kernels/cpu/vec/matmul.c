/* kernels/cpu/vec/matmul.c: KN_K_MATMUL for f32, bf16 and f16: batches of products, each by the way
 * that suits its size: blocks of packed panels (gemm_blocks.h), few rows (gemm_few.h), small ones
 * (gemm_small.h).
 *
 * Some products go to oneDNN before they come here (kernels/cpu/choose.c). */
#include "kernels/cpu/cpu_internal.h"
#include "kernels/cpu/vec/gemm_batch.h"
#include "kernels/cpu/vec/gemm_few.h"
#include "kernels/cpu/vec/gemm_small.h"
#include "kernels/device.h"

/* Products [begin, end) of a batch of small ones (gemm_small.h). */
static void small_products(const void *ctx, int64_t begin, int64_t end)
{
    const batch *s = ctx;
    for (int64_t i = begin; i < end; i++) {
        const product p = batch_at(s, i);
        small_product((float *)(void *)p.c, p.cm, (const float *)(const void *)p.a, p.am, p.ak,
                      (const float *)(const void *)p.b, p.bk, p.bn, p.M, p.N, p.K, p.add);
    }
}

/* ---- few rows (gemm_few.h) ------------------------------------------------------------------ */

static bool few_takes(const product *p)
{
    return p->M <= FEW && p->K > 0 && !p->add && (p->bn == 1 || p->bk == 1);
}

/* Columns [n, n + w) of the product; a is the left operand as f32 [M, K]. */
static void few_columns(const product *p, const float *a, int64_t n, int64_t w)
{
    float s[FEW * FEW_COLUMNS] __attribute__((aligned(64)));
    for (int64_t m = 0; m < p->M; m++)
        memset(s + m * FEW_COLUMNS, 0, (size_t)(ceil_div(w, KN_VW) * KN_VW) * sizeof *s);
    const void *b = gemm_at(p->b, p->t, n * p->bn);
    if (p->bn == 1)
        VEC_BY_DTYPE(p->t, few_along_rows, s, a, p->M, p->K, b, p->bk, w);
    else
        VEC_BY_DTYPE(p->t, few_dots, s, a, p->M, p->K, b, p->bn, w);
    for (int64_t m = 0; p->bias && m < p->M; m++)
        for (int64_t j = 0; j < w; j++)
            s[m * FEW_COLUMNS + j] += gemm_get(p->bias, p->bias_t, (n + j) * p->bias_n);
    VEC_BY_DTYPE(p->ct, store_corner, p, s, FEW_COLUMNS, 0, n, p->M, w);
}

typedef struct few_call {
    const product *p;
    const float *a;
    int64_t w; /* columns at a time */
} few_call;

static void few_range(const void *ctx, int64_t begin, int64_t end)
{
    const few_call *f = ctx;
    for (int64_t n = begin * f->w; n < v_min_i64(end * f->w, f->p->N); n += f->w)
        few_columns(f->p, f->a, n, v_min_i64(f->w, f->p->N - n));
}

static bool batch_few(const batch *s, int threads)
{
    const int64_t M = s->p.M, K = s->p.K, N = s->p.N;
    const int64_t most = s->p.bn == 1 ? FEW_COLUMNS : FEW_DOTS;
    const int64_t w = v_min_i64(most, ceil_div(ceil_div(N, threads), 64) * 64);
    const size_t bytes = (size_t)(M * K) * sizeof(float);
    float small[ROOM], *a = small;
    if (M * K > ROOM)
        a = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
    if (!a)
        return false;
    for (int64_t i = 0; i < s->count; i++) {
        const product p = batch_at(s, i);
        for (int64_t m = 0; m < M; m++)
            for (int64_t k = 0; k < K; k++)
                a[m * K + k] = gemm_get(p.a, p.t, m * p.am + k * p.ak);
        kn_each_range(threads, ceil_div(N, w), few_range, &(few_call){ &p, a, w });
    }
    if (a != small)
        kn_give(kn_device_memory(KN_CPU), a, bytes, KN_MEM_WORKSPACE);
    return true;
}

/* ---- the entry ------------------------------------------------------------------------------ */

static bool takes(const kn_matmul_args *x)
{
    const kn_dtype t = x->a.dtype, ct = x->dst.dtype, bt = x->bias.dtype;
    if (!vec_float(t) || x->b.dtype != t || (ct != t && ct != KN_F32))
        return false;
    return !x->bias.data || bt == t || bt == KN_F32;
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
        if (p->M == 1) { /* whose own strides mean nothing */
            p->am = a;
            p->cm = x->dst.stride[d];
        }
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

/* Whether every product is of a matrix by its own transpose. */
static bool batch_gram(const batch *s)
{
    const product *p = &s->p;
    bool same = p->a == p->b && p->am == p->bn && p->ak == p->bk && p->M == p->N;
    for (int d = 0; d < s->ndim; d++)
        same = same && s->a[d] == s->b[d];
    return same && writes_through(p) && !p->bias && !p->add;
}

/* dst^T = b^T a^T, where dst is a transposed view. */
static void batch_swap(batch *s)
{
    const product q = s->p;
    product *p = &s->p;
    *p = (product){
        .M = q.N, .N = q.M, .K = q.K, .c = q.c, .a = q.b, .b = q.a, .t = q.t, .ct = q.ct
    };
    p->add = q.add;
    p->cm = q.cn, p->cn = q.cm;
    p->am = q.bn, p->ak = q.bk;
    p->bk = q.ak, p->bn = q.am;
    for (int d = 0; d < s->ndim; d++) {
        const int64_t a = s->a[d];
        s->a[d] = s->b[d];
        s->b[d] = a;
    }
}

kn_status VEC_FN(vec_matmul)(const void *args)
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
    p->add = x->add;
    batch_fold(&s, x);
    const bool transposed = p->cn != 1 && p->cm == 1;
    if (!p->bias && (transposed || p->N == 1))
        batch_swap(&s);
    const bool few = few_takes(p);
    if (p->add && !writes_through(p))
        return KN_DECLINED;
    const double each = 2.0 * (double)p->M * (double)p->N * (double)v_max_i64(p->K, 1);
    const double work = few ? each : each * (double)s.count / 16; /* few rows: bytes */
    const int threads = gemm_threads(work);
    if (few)
        return batch_few(&s, threads) ? KN_DONE : KN_FAILED;
    if (s.count > 1 && p->t == KN_F32 && writes_through(p) && !p->bias && p->K > 0 &&
        p->K <= DEPTH && p->K * p->N <= SMALL && p->M <= 32) {
        kn_each_range(threads, s.count, small_products, &s);
        return KN_DONE;
    }
    p->gram = batch_gram(&s);
    p->pairs = (p->t == KN_BF16 && kn_cpu_multiplies_pairs()) ||
               (p->t == KN_F32 && kn_f32_products(KN_CPU) == KN_PRODUCTS_BF16);
    const bool divided = threads > 1 && s.count >= threads && each < 8e6;
    return (divided ? batch_divided(&s, threads) : batch_shared(&s, threads)) ? KN_DONE : KN_FAILED;
}
