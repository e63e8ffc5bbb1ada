/* kernels/cuda/cublaslt/gemm.c: a matrix product with any strides as column-major products with
 * leading dims, for cuBLASLt. Nothing here depends on CUDA. */
#include "kernels/cuda/cublaslt/gemm.h"

#include <string.h>

#define OUTER_MOST 64 /* repetitions by the host; beyond, the tiled kernel is as good */

/* A leading dim of dst, a and b after merging. */
typedef struct lead {
    int64_t size, a, b, d;
} lead;

/* How X[i, j] (i < rows, j < cols, at i*si + j*sj) lies in memory: by columns, or by rows (*t). */
static bool operand(int64_t rows, int64_t cols, int64_t si, int64_t sj, bool *t, int64_t *ld)
{
    if ((rows == 1 || si == 1) && (cols == 1 || sj >= rows)) {
        *t = false;
        *ld = cols == 1 ? rows : sj;
        return true;
    }
    if ((cols == 1 || sj == 1) && (rows == 1 || si >= cols)) {
        *t = true;
        *ld = rows == 1 ? cols : si;
        return true;
    }
    return false;
}

/* Leading dims, innermost first, those of size 1 left out, neighbours merged where all three allow
 * it. */
static int merge_leads(const kn_matmul_args *p, lead out[KN_MAX_DIMS])
{
    int n = 0;
    for (int i = p->dst.ndim - 3; i >= 0; i--) {
        lead x = { p->dst.shape[i], p->a.stride[i], p->b.stride[i], p->dst.stride[i] };
        if (x.size == 1)
            continue;
        lead *y = n > 0 ? &out[n - 1] : NULL;
        if (y && x.a == y->a * y->size && x.b == y->b * y->size && x.d == y->d * y->size)
            y->size *= x.size;
        else
            out[n++] = x;
    }
    return n;
}

/* [.., M, K] @ [K, N]: leading dims that b doesn't have are more rows of a and dst. */
static int fold_rows(lead *l, int n, int64_t *m, int64_t *sa, int64_t *sd)
{
    int at = 0;
    while (at < n && l[at].b == 0) {
        bool rows = *m == 1 || (l[at].a == *sa * *m && l[at].d == *sd * *m);
        if (!rows)
            break;
        if (*m == 1) {
            *sa = l[at].a;
            *sd = l[at].d;
        }
        *m *= l[at].size;
        at++;
    }
    memmove(l, l + at, (size_t)(n - at) * sizeof *l);
    return n - at;
}

/* The largest of the leading dims is the batch, the others are repetitions. */
static bool place_leads(const lead *l, int n, kn_gemm *g)
{
    int largest = 0;
    int64_t repeats = 1;
    g->batch = 1;
    for (int i = 1; i < n; i++)
        largest = l[i].size > l[largest].size ? i : largest;
    for (int i = 0; i < n; i++) {
        if (i == largest) {
            g->batch = l[i].size;
            g->sa = l[i].a, g->sb = l[i].b, g->sd = l[i].d;
            continue;
        }
        g->outer[g->outers] = l[i].size;
        g->outer_a[g->outers] = l[i].a;
        g->outer_b[g->outers] = l[i].b;
        g->outer_d[g->outers++] = l[i].d;
        repeats *= l[i].size;
    }
    return repeats <= OUTER_MOST;
}

static int align_of(const void *p)
{
    uintptr_t x = (uintptr_t)p;
    for (int n = 256; n > 1; n /= 2)
        if (x % (unsigned)n == 0)
            return n;
    return 1;
}

/* A vector of an epilogue lies close, and has the result's dtype. */
static bool fits(const kn_array *v, kn_dtype out)
{
    return !v->data || (v->dtype == out && (v->stride[0] == 1 || v->shape[0] == 1));
}

/* cuBLASLt's rows of products with a gradient in the epilogue: one alone, of a single product. */
static bool takes_epilogue(const kn_matmul_args *p)
{
    const kn_array *x = &p->x;
    if (p->dst.ndim != 2 || p->bias.data || p->add || p->a.dtype == KN_F64)
        return false;
    if (!x->data)
        return true;
    return !p->sum.data && p->grad_of == KN_GELU_TANH && x->dtype == p->dst.dtype &&
           (x->stride[1] == 1 || x->shape[1] == 1);
}

static bool takes_types(const kn_matmul_args *p)
{
    kn_dtype in = p->a.dtype, out = p->dst.dtype;
    bool half = in == KN_BF16 || in == KN_F16;
    if (in != p->b.dtype || !kn_dtype_is_float(in))
        return false;
    if (out != in && !(half && out == KN_F32))
        return false;
    if (kn_matmul_has_epilogue(p) && !takes_epilogue(p))
        return false;
    return fits(&p->bias, out) && fits(&p->sum, out);
}

/* Exchanges the operands: row-major is column-major of the transposed product. */
static void swap_operands(kn_gemm *g)
{
    for (int i = 0; i < g->outers; i++) {
        int64_t x = g->outer_a[i];
        g->outer_a[i] = g->outer_b[i];
        g->outer_b[i] = x;
    }
    int64_t x = g->sa;
    g->sa = g->sb;
    g->sb = x;
    const void *p = g->a;
    g->a = g->b;
    g->b = p;
}

/* The largest power of two up to align that divides stride too. */
static int align_with(int align, int64_t stride)
{
    while (stride % align != 0)
        align /= 2;
    return align;
}

/* Alignments that hold for every matrix of the batch and every repetition. */
static void lower_alignments(kn_gemm *g)
{
    int64_t in = (int64_t)kn_dtype_size(g->in), out = (int64_t)kn_dtype_size(g->out);
    for (int i = -1; i < g->outers; i++) {
        int64_t a = i < 0 ? g->sa : g->outer_a[i], b = i < 0 ? g->sb : g->outer_b[i];
        g->align_a = align_with(g->align_a, a * in);
        g->align_b = align_with(g->align_b, b * in);
        g->align_d = align_with(g->align_d, (i < 0 ? g->sd : g->outer_d[i]) * out);
    }
}

/* The bias, or what else is computed with the product. by_columns: dst lies so, and A is p's a. */
static bool map_epilogue(const kn_matmul_args *p, bool by_columns, kn_gemm *g)
{
    const kn_array *sum = &p->sum, *x = &p->x;
    if (p->bias.data) {
        g->epilogue = KN_GEMM_BIAS;
        g->bias = p->bias.data;
    } else if (sum->data) {
        g->epilogue = p->sum_of_b == by_columns ? KN_GEMM_SUM_B : KN_GEMM_SUM_A;
        g->bias = sum->data;
    } else if (x->data) {
        g->epilogue = KN_GEMM_DGELU;
        g->x = x->data;
        g->ldx = g->n == 1 ? g->m : x->stride[0];
    }
    g->align_bias = g->bias ? align_of(g->bias) : 0;
    g->align_x = g->x ? align_of(g->x) : 0;
    if (by_columns && (g->epilogue == KN_GEMM_BIAS || g->epilogue == KN_GEMM_DGELU))
        return false; /* along d's rows */
    /* cuBLASLt's rules for x */
    return !g->x || (g->ldx % 8 == 0 && g->ldx >= g->m && g->align_x >= 16);
}

bool kn_gemm_map(const kn_matmul_args *p, kn_gemm *g)
{
    int nd = p->dst.ndim;
    lead leads[KN_MAX_DIMS];
    memset(g, 0, sizeof *g); /* keys are compared as bytes */
    if (nd < 2 || !takes_types(p))
        return false;
    int64_t m = p->dst.shape[nd - 2], n = p->dst.shape[nd - 1], k = p->a.shape[nd - 1];
    int64_t am = p->a.stride[nd - 2], ak = p->a.stride[nd - 1];
    int64_t bk = p->b.stride[nd - 2], bn = p->b.stride[nd - 1];
    int64_t dm = p->dst.stride[nd - 2], dn = p->dst.stride[nd - 1];
    if (k == 0 || kn_array_numel(&p->dst) == 0)
        return false;
    g->in = p->a.dtype;
    g->out = p->dst.dtype;
    g->a = p->a.data;
    g->b = p->b.data;
    g->d = p->dst.data;
    g->add = p->add;
    int count = fold_rows(leads, merge_leads(p, leads), &m, &am, &dm);
    if (!place_leads(leads, count, g))
        return false;

    bool t = false, by_columns;
    if (operand(n, m, dn, dm, &t, &g->ldd) && !t) {
        by_columns = false; /* of dst: its transpose is */
    } else {
        if (!operand(m, n, dm, dn, &t, &g->ldd) || t)
            return false;
        by_columns = true;
    }
    g->k = k;
    g->m = by_columns ? m : n;
    g->n = by_columns ? n : m;
    bool operands =
        by_columns
            ? operand(m, k, am, ak, &g->ta, &g->lda) && operand(k, n, bk, bn, &g->tb, &g->ldb)
            : operand(n, k, bn, bk, &g->ta, &g->lda) && operand(k, m, ak, am, &g->tb, &g->ldb);
    if (!by_columns)
        swap_operands(g);
    g->align_a = align_of(g->a);
    g->align_b = align_of(g->b);
    g->align_d = align_of(g->d);
    lower_alignments(g);
    int64_t most = INT32_MAX;
    return operands && map_epilogue(p, by_columns, g) && g->m <= most && g->n <= most &&
           g->k <= most && g->batch <= most;
}

int64_t kn_gemm_repeats(const kn_gemm *g)
{
    int64_t n = 1;
    for (int i = 0; i < g->outers; i++)
        n *= g->outer[i];
    return n;
}

void kn_gemm_offsets(const kn_gemm *g, int64_t index, int64_t *a, int64_t *b, int64_t *d)
{
    *a = *b = *d = 0;
    for (int i = 0; i < g->outers; i++) {
        int64_t at = index % g->outer[i];
        index /= g->outer[i];
        *a += at * g->outer_a[i];
        *b += at * g->outer_b[i];
        *d += at * g->outer_d[i];
    }
}
