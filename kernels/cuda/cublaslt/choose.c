/* kernels/cuda/cublaslt/choose.c: which of cuBLASLt's algorithms computes a product: the one that
 * was timed before (tuned.h), else the heuristics' first; in a run with KNAP_TUNE=1 the fastest of
 * the heuristics' first eight. */
#include "kernels/choices.h"
#include "kernels/cuda/cublaslt/plan.h"
#include "kernels/cuda/cublaslt/tuned.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

#include <math.h>
#include <string.h>

#define TIMED  8    /* of the heuristics' choices */
#define FASTER 0.99 /* of the first one's time: above, it is noise, and the bits may stay */

/* ---- the heuristics -------------------------------------------------------------------------- */

/* Of sums across blocks. The result's dtype is as good as the compute type where it is that; in
 * place they may come in any order. */
static uint32_t reductions(const kn_gemm *g, bool all)
{
    bool as_computed = g->out == KN_F32 || g->out == KN_F64;
    return CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE |
           (all && as_computed ? CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE : 0);
}

bool kn_blas_preference(cublasLtMatmulPreference_t *pref, const kn_gemm *g, bool all)
{
    size_t workspace = KN_BLAS_WORKSPACE;
    uint32_t reduction = reductions(g, all);
    uint32_t a = (uint32_t)g->align_a, b = (uint32_t)g->align_b, d = (uint32_t)g->align_d;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t size;
    } list[] = {
        { CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace },
        { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &d, sizeof d },
        { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &d, sizeof d },
    };
    bool ok = kn_blas_check(kn_blas.pref_create(pref), "a preference");
    for (size_t i = 0; ok && i < sizeof list / sizeof *list; i++)
        ok = kn_blas_check(kn_blas.pref_set(*pref, list[i].name, list[i].value, list[i].size),
                           "a preference's field");
    return ok;
}

/* The heuristics' first choices, at most `most`; *count 0 if it has none, which is no error:
 * another provider takes the product, and the trace says which. A library without memory or in a
 * bad state is an error. */
static bool ask(const kn_blas_plan *p, const kn_gemm *g, bool all, int most,
                cublasLtMatmulHeuristicResult_t *list, int *count)
{
    cublasLtMatmulPreference_t pref = NULL;
    bool ok = kn_blas_preference(&pref, g, all);
    int found = 0;
    *count = 0;
    if (ok) {
        cublasStatus_t e = kn_blas.heuristic(kn_blas_handle, p->desc, p->a, p->b, p->d, p->d, pref,
                                             most, list, &found);
        bool none = e == CUBLAS_STATUS_NOT_SUPPORTED || e == CUBLAS_STATUS_INVALID_VALUE;
        ok = none || kn_blas_check(e, "choosing an algorithm");
        for (int i = 0; i < (e == CUBLAS_STATUS_SUCCESS ? found : 0); i++)
            if (list[i].state == CUBLAS_STATUS_SUCCESS)
                list[(*count)++] = list[i];
    }
    if (pref)
        kn_blas.pref_destroy(pref);
    return ok;
}

/* ---- timing ---------------------------------------------------------------------------------- */

/* A product with one of the algorithms. */
typedef struct trial {
    kn_blas_plan plan;
    kn_gemm g;
    size_t scratch, d; /* bytes; where the result lies among them, 0: in its own place */
} trial;

static kn_status try_one(void *arg)
{
    trial *t = arg;
    char *scratch = kn_cuda_scratch(t->scratch);
    if (!scratch)
        return KN_FAILED;
    if (t->d > 0)
        t->g.d = scratch + t->d;
    return kn_blas_multiply(&t->plan, &t->g, scratch) == CUBLAS_STATUS_SUCCESS ? KN_DONE
                                                                               : KN_DECLINED;
}

static kn_status try_parts(void *arg)
{
    const kn_blas_parts *x = arg;
    void *workspace = kn_cuda_scratch(KN_BLAS_WORKSPACE);
    if (!workspace)
        return KN_FAILED;
    return kn_blas_multiply(x->product, &x->g, workspace) == CUBLAS_STATUS_SUCCESS
               ? kn_cuda_own_provider->run[x->after](&x->args)
               : KN_DECLINED;
}

/* Elements from a result's first to behind its last. */
static int64_t span(const kn_gemm *g)
{
    int64_t n = (g->batch - 1) * g->sd + (g->n - 1) * g->ldd + g->m;
    for (int i = 0; i < g->outers; i++)
        n += (g->outer[i] - 1) * g->outer_d[i];
    return n;
}

/* Times the candidates and keeps the best. A sum is added up elsewhere meanwhile: it comes once. */
static bool time_all(kn_blas_plan *p, const kn_gemm *g, const cublasLtMatmulHeuristicResult_t *list,
                     int count, kn_blas_parts *parts)
{
    trial trials[TIMED + 1];
    kn_gpu_way ways[TIMED + 2];
    int best = 0;
    for (int i = 0; i < count; i++) {
        trials[i] = (trial){ *p, *g, KN_BLAS_WORKSPACE, g->add ? KN_BLAS_WORKSPACE : 0 };
        trials[i].scratch += g->add ? (size_t)span(g) * kn_dtype_size(g->out) : 0;
        trials[i].plan.algo = list[i].algo;
        trials[i].plan.workspace = list[i].workspaceSize;
        ways[i] = (kn_gpu_way){ try_one, &trials[i], 0 };
    }
    if (parts)
        ways[count] = (kn_gpu_way){ try_parts, parts, 0 };
    if (!kn_gpu_time_ways(ways, count + (parts != NULL)))
        return false;
    for (int i = 1; i < count; i++)
        if (ways[i].us < ways[best].us && ways[i].us < FASTER * ways[0].us)
            best = i;
    if (ways[best].us == INFINITY) /* none runs: the product says why */
        return true;
    p->algo = trials[best].plan.algo;
    p->workspace = trials[best].plan.workspace;
    kn_tuned t = { .first_us = ways[0].us == INFINITY ? 0 : ways[0].us, .best_us = ways[best].us };
    p->slower = parts && ways[best].us >= FASTER * ways[count].us;
    t.parts = p->slower;
    if (t.parts)
        t.best_us = ways[count].us;
    else
        memcpy(t.algorithm, &p->algo, sizeof t.algorithm);
    kn_tuned_keep(g, &t);
    return true;
}

/* ---- choosing -------------------------------------------------------------------------------- */

/* Does it sum across blocks in one of the ways that are allowed? A preference's mask binds the
 * heuristics, but not an algorithm that comes as bytes. */
static bool sums_as_allowed(const kn_gemm *g, const cublasLtMatmulAlgo_t *algo)
{
    uint32_t scheme;
    size_t wrote;
    return kn_blas.config_get(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme,
                              &wrote) == CUBLAS_STATUS_SUCCESS &&
           (scheme & ~reductions(g, true)) == 0;
}

/* What was timed before; false where the library doesn't take it for this product, or where it
 * might sum in an order that varies. *slower: than its parts. */
static bool take_tuned(kn_blas_plan *p, const kn_gemm *g, bool *slower)
{
    cublasLtMatmulHeuristicResult_t r = { .state = CUBLAS_STATUS_NOT_SUPPORTED };
    cublasLtMatmulAlgo_t algo;
    kn_tuned t;
    _Static_assert(sizeof algo == sizeof t.algorithm, "kept as bytes");
    if (!kn_tuned_find(g, &t))
        return false;
    *slower = t.parts;
    if (t.parts)
        return p->declined = !kn_gemm_has_gradient(g); /* which may be asked for all the same */
    memcpy(&algo, t.algorithm, sizeof algo);
    if (kn_blas.fits(kn_blas_handle, p->desc, p->a, p->b, p->d, p->d, &algo, &r) !=
            CUBLAS_STATUS_SUCCESS ||
        r.state != CUBLAS_STATUS_SUCCESS || r.workspaceSize > KN_BLAS_WORKSPACE ||
        !sums_as_allowed(g, &algo))
        return false;
    p->algo = algo;
    p->workspace = r.workspaceSize;
    return true;
}

/* The first one of 16 bits, which should run on tensor cores. */
static void tell_declined(const kn_gemm *g)
{
    static _Atomic bool told;
    if ((g->in == KN_BF16 || g->in == KN_F16) && !kn_gemm_has_gradient(g))
        kn_cuda_tell(&told,
                     "cuBLASLt has no algorithm for a product of %s, %lld x %lld x %lld; Knap's "
                     "kernel computes it, without tensor cores",
                     kn_dtype_name(g->in), (long long)g->m, (long long)g->n, (long long)g->k);
}

/* Of the timed ones stands first what would be taken without timing. A recorded launch isn't timed:
 * the step before it, which isn't recorded, has met the same products. */
bool kn_blas_choose(kn_blas_plan *p, const kn_gemm *g, kn_blas_parts *parts)
{
    cublasLtMatmulHeuristicResult_t list[TIMED + 1];
    bool slower = false;
    int count, more = 0;
    if (take_tuned(p, g, &slower))
        return true;
    p->slower = kn_gemm_has_gradient(g); /* as far as is known */
    if (!ask(p, g, false, 1, list, &count))
        return false;
    p->declined = count == 0;
    if (p->declined) {
        tell_declined(g);
        return true;
    }
    p->algo = list[0].algo;
    p->workspace = list[0].workspaceSize;
    if (slower || !kn_tuning() || kn_cuda_capturing((cudaStream_t)kn_cuda_stream()) ||
        (kn_gemm_has_gradient(g) && !parts))
        return kn_ok();
    if (!ask(p, g, true, TIMED, list + 1, &more))
        return false;
    for (int i = 1; i <= more; i++)
        if (memcmp(&list[i].algo, &list[0].algo, sizeof list[i].algo) != 0 &&
            sums_as_allowed(g, &list[i].algo))
            list[count++] = list[i];
    return time_all(p, g, list, count, parts);
}
