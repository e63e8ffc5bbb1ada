/* kernels/cuda/cublaslt/cublaslt.c: matrix products by cuBLASLt, with the bias in the epilogue.
 * Descriptors and the algorithm that the library's heuristics put first are kept for each shape.
 * Sums across blocks are in the compute type or none: the library's other ways round each partial
 * sum to the result's dtype. The workspace belongs to the stream: the same shapes give the same
 * bits. */
#include "kernels/cuda/cublaslt/cublaslt.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

#include <cublasLt.h>
#include <pthread.h>
#include <string.h>

#define WORKSPACE ((size_t)32 << 20) /* what Hopper's algorithms can use */
#define PLANS     1024               /* a power of two; once 3/4 full, all are forgotten */

/* The library's functions, found when first needed. */
static struct {
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                             cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                             const void *, const void *, cublasLtMatrixLayout_t, void *,
                             cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                             cudaStream_t);
    cublasStatus_t (*desc_create)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
    cublasStatus_t (*desc_destroy)(cublasLtMatmulDesc_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                               size_t);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t,
                                    int64_t);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t);
    cublasStatus_t (*layout_set)(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                 const void *, size_t);
    cublasStatus_t (*pref_create)(cublasLtMatmulPreference_t *);
    cublasStatus_t (*pref_destroy)(cublasLtMatmulPreference_t);
    cublasStatus_t (*pref_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                               const void *, size_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                cublasLtMatmulHeuristicResult_t *, int *);
    const char *(*status)(cublasStatus_t);
} lt;

/* A kept product. */
typedef struct plan {
    kn_gemm key; /* the fields before the pointers */
    bool used;
    bool declined; /* the library has no algorithm for it */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
} plan;

static struct {
    pthread_mutex_t lock;
    cublasLtHandle_t handle;
    plan plan[PLANS];
    int plans;
} state = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- the library ----------------------------------------------------------------------------- */

static const kn_cuda_symbol symbols[] = {
    { "cublasLtCreate", &lt.create },
    { "cublasLtMatmul", &lt.matmul },
    { "cublasLtMatmulDescCreate", &lt.desc_create },
    { "cublasLtMatmulDescDestroy", &lt.desc_destroy },
    { "cublasLtMatmulDescSetAttribute", &lt.desc_set },
    { "cublasLtMatrixLayoutCreate", &lt.layout_create },
    { "cublasLtMatrixLayoutDestroy", &lt.layout_destroy },
    { "cublasLtMatrixLayoutSetAttribute", &lt.layout_set },
    { "cublasLtMatmulPreferenceCreate", &lt.pref_create },
    { "cublasLtMatmulPreferenceDestroy", &lt.pref_destroy },
    { "cublasLtMatmulPreferenceSetAttribute", &lt.pref_set },
    { "cublasLtMatmulAlgoGetHeuristic", &lt.heuristic },
    { "cublasLtGetStatusString", &lt.status },
};

kn_cuda_library kn_cublaslt_library = {
    .name = "cuBLASLt",
    .soname = "libcublasLt.so." KN_CUDA_NUMBER(CUBLAS_VER_MAJOR),
    .versions = "cublasLtGetVersion",
    .without = "matrix products run on Knap's kernels, without tensor cores",
    .symbols = symbols,
    .count = sizeof symbols / sizeof *symbols,
};

static bool check(cublasStatus_t e, const char *what)
{
    return e == CUBLAS_STATUS_SUCCESS ||
           kn_fail("matmul: cuBLASLt says %s (%d) to %s", lt.status(e), (int)e, what);
}

static bool ready(void)
{
    return state.handle || check(lt.create(&state.handle), "making its handle");
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static cudaDataType type_of(kn_dtype t)
{
    switch (t) {
    case KN_BF16:
        return CUDA_R_16BF;
    case KN_F16:
        return CUDA_R_16F;
    case KN_F64:
        return CUDA_R_64F;
    default:
        return CUDA_R_32F;
    }
}

/* rows and cols as they lie in memory. */
static bool make_layout(cublasLtMatrixLayout_t *l, kn_dtype t, bool transposed, int64_t rows,
                        int64_t cols, int64_t ld, int64_t batch, int64_t stride)
{
    int32_t count = (int32_t)batch;
    uint64_t r = (uint64_t)(transposed ? cols : rows), c = (uint64_t)(transposed ? rows : cols);
    if (!check(lt.layout_create(l, type_of(t), r, c, ld), "a layout"))
        return false;
    return batch == 1 ||
           (check(lt.layout_set(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
                  "a batch") &&
            check(lt.layout_set(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                sizeof stride),
                  "a batch's stride"));
}

#define SET(desc, name, value) check(lt.desc_set((desc), (name), &(value), sizeof(value)), #name)

static bool make_desc(plan *p, const kn_gemm *g)
{
    cublasComputeType_t compute = g->in == KN_F64 ? CUBLAS_COMPUTE_64F
                                  : g->tf32       ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                  : CUBLAS_COMPUTE_32F;
    cudaDataType scale = g->in == KN_F64 ? CUDA_R_64F : CUDA_R_32F, bias = type_of(g->out);
    cublasOperation_t ta = g->ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                      tb = g->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    int32_t sms = kn_cuda_sm_target();
    if (!check(lt.desc_create(&p->desc, compute, scale), "a product's description") ||
        (sms > 0 && !SET(p->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sms)) ||
        !SET(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, ta) ||
        !SET(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, tb))
        return false;
    return !g->has_bias || (SET(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue) &&
                            SET(p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias) &&
                            SET(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g->bias));
}

static bool describe(plan *p, const kn_gemm *g)
{
    return make_desc(p, g) &&
           make_layout(&p->a, g->in, g->ta, g->m, g->k, g->lda, g->batch, g->sa) &&
           make_layout(&p->b, g->in, g->tb, g->k, g->n, g->ldb, g->batch, g->sb) &&
           make_layout(&p->d, g->out, false, g->m, g->n, g->ldd, g->batch, g->sd);
}

static void forget(plan *p)
{
    if (p->desc)
        lt.desc_destroy(p->desc);
    cublasLtMatrixLayout_t layouts[] = { p->a, p->b, p->d };
    for (int i = 0; i < 3; i++)
        if (layouts[i])
            lt.layout_destroy(layouts[i]);
    memset(p, 0, sizeof *p);
}

static bool make_preference(cublasLtMatmulPreference_t *pref, const kn_gemm *g)
{
    size_t workspace = WORKSPACE;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
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
    bool ok = check(lt.pref_create(pref), "a preference");
    for (size_t i = 0; ok && i < sizeof list / sizeof *list; i++)
        ok = check(lt.pref_set(*pref, list[i].name, list[i].value, list[i].size),
                   "a preference's field");
    return ok;
}

/* The heuristics' first choice; none is no error: another provider takes the product, and the trace
 * says which. A library without memory or in a bad state is an error. */
static bool choose(plan *p, const kn_gemm *g)
{
    cublasLtMatmulPreference_t pref = NULL;
    cublasLtMatmulHeuristicResult_t best = { .state = CUBLAS_STATUS_NOT_SUPPORTED };
    int found = 0;
    bool ok = make_preference(&pref, g);
    if (ok) {
        cublasStatus_t e =
            lt.heuristic(state.handle, p->desc, p->a, p->b, p->d, p->d, pref, 1, &best, &found);
        bool none =
            e == CUBLAS_STATUS_SUCCESS && (found == 0 || best.state != CUBLAS_STATUS_SUCCESS);
        p->declined = none || e == CUBLAS_STATUS_NOT_SUPPORTED || e == CUBLAS_STATUS_INVALID_VALUE;
        ok = p->declined || check(e, "choosing an algorithm");
    }
    if (pref)
        lt.pref_destroy(pref);
    if (ok && !p->declined) {
        p->algo = best.algo;
        p->workspace = best.workspaceSize;
    }
    return ok;
}

/* ---- the kept ones --------------------------------------------------------------------------- */

static size_t hash(const kn_gemm *g)
{
    const unsigned char *c = (const unsigned char *)g;
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < KN_GEMM_KEY; i++)
        h = (h ^ c[i]) * UINT64_C(0x100000001b3);
    return (size_t)(h ^ h >> 32) & (PLANS - 1);
}

static plan *find(const kn_gemm *g)
{
    if (state.plans >= PLANS / 4 * 3) {
        for (int i = 0; i < PLANS; i++)
            forget(&state.plan[i]);
        state.plans = 0;
    }
    size_t at = hash(g);
    while (state.plan[at].used && memcmp(&state.plan[at].key, g, KN_GEMM_KEY) != 0)
        at = (at + 1) & (PLANS - 1);
    plan *p = &state.plan[at];
    if (p->used)
        return p;
    if (!describe(p, g) || !choose(p, g)) {
        forget(p);
        return NULL;
    }
    memcpy(&p->key, g, KN_GEMM_KEY);
    p->used = true;
    state.plans++;
    return p;
}

/* ---- the kernel ------------------------------------------------------------------------------ */

static bool run(plan *p, const kn_gemm *g, void *workspace)
{
    static const float one = 1, zero = 0;
    static const double one64 = 1, zero64 = 0;
    const bool wide = g->in == KN_F64;
    const void *alpha = wide ? (const void *)&one64 : &one;
    const void *beta = g->add ? alpha : wide ? (const void *)&zero64 : &zero;
    size_t in = kn_dtype_size(g->in), out = kn_dtype_size(g->out);
    if (g->has_bias && !SET(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, g->bias))
        return false;
    for (int64_t i = 0, n = kn_gemm_repeats(g); i < n; i++) {
        int64_t a, b, d;
        kn_gemm_offsets(g, i, &a, &b, &d);
        void *to = (char *)g->d + (size_t)d * out;
        cublasStatus_t e =
            lt.matmul(state.handle, p->desc, alpha, (const char *)g->a + (size_t)a * in, p->a,
                      (const char *)g->b + (size_t)b * in, p->b, beta, to, p->d, to, p->d, &p->algo,
                      workspace, p->workspace, (cudaStream_t)kn_cuda_stream());
        if (!check(e, "a product"))
            return false;
    }
    return true;
}

static kn_status matmul(const void *args)
{
    kn_gemm g;
    void *workspace = NULL;
    kn_status status = KN_FAILED;
    if (!kn_gemm_map(args, &g) || !kn_cuda_library_open(&kn_cublaslt_library))
        return KN_DECLINED;
    g.tf32 = g.in == KN_F32 && kn_cuda_tf32();
    pthread_mutex_lock(&state.lock);
    plan *p = ready() ? find(&g) : NULL;
    if (p && p->declined) {
        status = KN_DECLINED;
    } else if (p) {
        if (p->workspace > 0)
            workspace = kn_cuda_scratch(WORKSPACE);
        if ((workspace || p->workspace == 0) && run(p, &g, workspace))
            status = KN_DONE;
    }
    pthread_mutex_unlock(&state.lock);
    return status;
}

bool kn_cublaslt_try(const kn_gemm *g)
{
    plan p = { 0 };
    cublasLtMatmulPreference_t pref = NULL;
    if (!kn_cuda_library_open(&kn_cublaslt_library))
        return false;
    pthread_mutex_lock(&state.lock);
    bool ok = describe(&p, g) && make_preference(&pref, g);
    if (pref)
        lt.pref_destroy(pref);
    forget(&p);
    pthread_mutex_unlock(&state.lock);
    return ok;
}

const kn_provider kn_cuda_cublaslt = { .name = "cublaslt", .run = { [KN_K_MATMUL] = matmul } };
