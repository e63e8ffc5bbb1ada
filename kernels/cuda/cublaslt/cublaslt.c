/* kernels/cuda/cublaslt/cublaslt.c: matrix products by cuBLASLt, with the bias in the epilogue, or
 * the gradient of a bias or of gelu_tanh, where that was timed to be faster or is asked for.
 * Descriptors and an algorithm (choose.c) are kept for each shape. Sums across blocks are in the
 * compute type or none: the library's other ways round each partial sum to the result's dtype. The
 * workspace belongs to the stream: the same shapes give the same bits. */
#include "kernels/choices.h"
#include "kernels/cuda/cublaslt/plan.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/device.h"

#include <pthread.h>
#include <string.h>

#define PLANS 1024 /* a power of two; once 3/4 full, all are forgotten */

struct kn_blas_functions kn_blas;
cublasLtHandle_t kn_blas_handle;

static struct {
    pthread_mutex_t lock;
    kn_blas_plan plan[PLANS];
    int plans;
} state = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- the library ----------------------------------------------------------------------------- */

static const kn_cuda_symbol symbols[] = {
    { "cublasLtCreate", &kn_blas.create },
    { "cublasLtMatmul", &kn_blas.matmul },
    { "cublasLtMatmulDescCreate", &kn_blas.desc_create },
    { "cublasLtMatmulDescDestroy", &kn_blas.desc_destroy },
    { "cublasLtMatmulDescSetAttribute", &kn_blas.desc_set },
    { "cublasLtMatrixLayoutCreate", &kn_blas.layout_create },
    { "cublasLtMatrixLayoutDestroy", &kn_blas.layout_destroy },
    { "cublasLtMatrixLayoutSetAttribute", &kn_blas.layout_set },
    { "cublasLtMatmulPreferenceCreate", &kn_blas.pref_create },
    { "cublasLtMatmulPreferenceDestroy", &kn_blas.pref_destroy },
    { "cublasLtMatmulPreferenceSetAttribute", &kn_blas.pref_set },
    { "cublasLtMatmulAlgoGetHeuristic", &kn_blas.heuristic },
    { "cublasLtMatmulAlgoCheck", &kn_blas.fits },
    { "cublasLtMatmulAlgoConfigGetAttribute", &kn_blas.config_get },
    { "cublasLtGetStatusString", &kn_blas.status },
};

kn_cuda_library kn_cublaslt_library = {
    .name = "cuBLASLt",
    .soname = "libcublasLt.so." KN_CUDA_NUMBER(CUBLAS_VER_MAJOR),
    .versions = "cublasLtGetVersion",
    .without = "matrix products run on Knap's kernels, without tensor cores",
    .symbols = symbols,
    .count = sizeof symbols / sizeof *symbols,
};

bool kn_blas_check(cublasStatus_t e, const char *what)
{
    return e == CUBLAS_STATUS_SUCCESS ||
           kn_fail("matmul: cuBLASLt says %s (%d) to %s", kn_blas.status(e), (int)e, what);
}

static bool ready(void)
{
    return kn_blas_handle || kn_blas_check(kn_blas.create(&kn_blas_handle), "making its handle");
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
    if (!kn_blas_check(kn_blas.layout_create(l, type_of(t), r, c, ld), "a layout"))
        return false;
    return batch == 1 ||
           (kn_blas_check(
                kn_blas.layout_set(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count),
                "a batch") &&
            kn_blas_check(kn_blas.layout_set(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                             &stride, sizeof stride),
                          "a batch's stride"));
}

#define SET(desc, name, value)                                                                     \
    kn_blas_check(kn_blas.desc_set((desc), (name), &(value), sizeof(value)), #name)

/* The pointers of a call; the heuristics read alignments from the first one's. */
static cublasStatus_t set_pointers(cublasLtMatmulDesc_t desc, const kn_gemm *g)
{
    cublasStatus_t e = CUBLAS_STATUS_SUCCESS;
    if (g->bias)
        e = kn_blas.desc_set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias);
    if (g->x && e == CUBLAS_STATUS_SUCCESS)
        e = kn_blas.desc_set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->x, sizeof g->x);
    return e;
}

static bool set_epilogue(cublasLtMatmulDesc_t desc, const kn_gemm *g)
{
    static const cublasLtEpilogue_t numbers[] = {
        [KN_GEMM_BIAS] = CUBLASLT_EPILOGUE_BIAS,
        [KN_GEMM_SUM_A] = CUBLASLT_EPILOGUE_BGRADA,
        [KN_GEMM_SUM_B] = CUBLASLT_EPILOGUE_BGRADB,
        [KN_GEMM_DGELU] = CUBLASLT_EPILOGUE_DGELU,
    };
    const cudaDataType type = type_of(g->out);
    return SET(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, numbers[g->epilogue]) &&
           (!g->bias || SET(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type)) &&
           (!g->x || (SET(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, type) &&
                      SET(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g->ldx))) &&
           kn_blas_check(set_pointers(desc, g), "an epilogue's pointers");
}

static bool make_desc(kn_blas_plan *p, const kn_gemm *g)
{
    cublasComputeType_t compute = g->in == KN_F64 ? CUBLAS_COMPUTE_64F
                                  : g->tf32       ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                  : CUBLAS_COMPUTE_32F;
    cudaDataType scale = g->in == KN_F64 ? CUDA_R_64F : CUDA_R_32F;
    cublasOperation_t ta = g->ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                      tb = g->tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    int32_t sms = kn_cuda_sm_target();
    if (!kn_blas_check(kn_blas.desc_create(&p->desc, compute, scale), "a product's description") ||
        (sms > 0 && !SET(p->desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sms)) ||
        !SET(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, ta) ||
        !SET(p->desc, CUBLASLT_MATMUL_DESC_TRANSB, tb))
        return false;
    return g->epilogue == KN_GEMM_PLAIN || set_epilogue(p->desc, g);
}

static bool describe(kn_blas_plan *p, const kn_gemm *g)
{
    return make_desc(p, g) &&
           make_layout(&p->a, g->in, g->ta, g->m, g->k, g->lda, g->batch, g->sa) &&
           make_layout(&p->b, g->in, g->tb, g->k, g->n, g->ldb, g->batch, g->sb) &&
           make_layout(&p->d, g->out, false, g->m, g->n, g->ldd, g->batch, g->sd);
}

static void forget(kn_blas_plan *p)
{
    if (p->desc)
        kn_blas.desc_destroy(p->desc);
    cublasLtMatrixLayout_t layouts[] = { p->a, p->b, p->d };
    for (int i = 0; i < 3; i++)
        if (layouts[i])
            kn_blas.layout_destroy(layouts[i]);
    memset(p, 0, sizeof *p);
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

static void make_room(void)
{
    if (state.plans < PLANS / 4 * 3)
        return;
    for (int i = 0; i < PLANS; i++)
        forget(&state.plan[i]);
    state.plans = 0;
}

static kn_blas_plan *find(const kn_gemm *g, kn_blas_parts *parts)
{
    size_t at = hash(g);
    while (state.plan[at].used && memcmp(&state.plan[at].key, g, KN_GEMM_KEY) != 0)
        at = (at + 1) & (PLANS - 1);
    kn_blas_plan *p = &state.plan[at];
    if (p->used)
        return p;
    if (!describe(p, g) || !kn_blas_choose(p, g, parts)) {
        forget(p);
        return NULL;
    }
    memcpy(&p->key, g, KN_GEMM_KEY);
    p->used = true;
    state.plans++;
    return p;
}

/* The product of one with a gradient in its epilogue, and the kernel after it; NULL: they can't be
 * compared. Its algorithm is timed first. */
static kn_blas_parts *find_parts(const kn_matmul_args *whole, kn_blas_parts *parts)
{
    kn_matmul_args product;
    parts->after = kn_matmul_parts(whole, &product, &parts->args);
    if (!kn_gemm_map(&product, &parts->g))
        return NULL;
    parts->g.tf32 = parts->g.in == KN_F32 && kn_f32_products(KN_CUDA);
    parts->product = find(&parts->g, NULL);
    return parts->product && !parts->product->declined ? parts : NULL;
}

/* ---- the product ----------------------------------------------------------------------------- */

cublasStatus_t kn_blas_multiply(const kn_blas_plan *p, const kn_gemm *g, void *workspace)
{
    static const float one = 1, zero = 0;
    static const double one64 = 1, zero64 = 0;
    const bool wide = g->in == KN_F64;
    const void *alpha = wide ? (const void *)&one64 : &one;
    const void *beta = g->add ? alpha : wide ? (const void *)&zero64 : &zero;
    size_t in = kn_dtype_size(g->in), out = kn_dtype_size(g->out);
    cublasStatus_t e = set_pointers(p->desc, g);
    for (int64_t i = 0, n = kn_gemm_repeats(g); i < n && e == CUBLAS_STATUS_SUCCESS; i++) {
        int64_t a, b, d;
        kn_gemm_offsets(g, i, &a, &b, &d);
        void *to = (char *)g->d + (size_t)d * out;
        e = kn_blas.matmul(kn_blas_handle, p->desc, alpha, (const char *)g->a + (size_t)a * in,
                           p->a, (const char *)g->b + (size_t)b * in, p->b, beta, to, p->d, to,
                           p->d, &p->algo, workspace, p->workspace, (cudaStream_t)kn_cuda_stream());
    }
    return e;
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Someone asked for the epilogue of g, or it is a bias or none. */
static bool is_asked_for(const kn_gemm *g)
{
    const unsigned one = g->epilogue == KN_GEMM_DGELU ? KN_EPILOGUE_DGELU : KN_EPILOGUE_BGRAD;
    return !kn_gemm_has_gradient(g) || kn_cuda_epilogues_chosen() & one;
}

/* Nor does timing decide. */
static bool is_refused(const kn_gemm *g)
{
    return !is_asked_for(g) && !(kn_cuda_epilogues_chosen() & KN_EPILOGUES_TIMED);
}

static kn_status matmul(const void *args)
{
    kn_gemm g;
    kn_blas_parts parts;
    void *workspace = NULL;
    kn_status status = KN_FAILED;
    if (!kn_gemm_map(args, &g) || is_refused(&g) || !kn_cuda_library_open(&kn_cublaslt_library))
        return KN_DECLINED;
    g.tf32 = g.in == KN_F32 && kn_f32_products(KN_CUDA);
    pthread_mutex_lock(&state.lock);
    make_room();
    const bool compare = kn_gemm_has_gradient(&g) && kn_tuning() && ready();
    kn_blas_parts *apart = compare ? find_parts(args, &parts) : NULL;
    kn_blas_plan *p = ready() ? find(&g, apart) : NULL;
    if (p && (p->declined || (p->slower && !is_asked_for(&g)))) {
        status = KN_DECLINED;
    } else if (p) {
        if (p->workspace > 0)
            workspace = kn_cuda_scratch(KN_BLAS_WORKSPACE);
        if ((workspace || p->workspace == 0) &&
            kn_blas_check(kn_blas_multiply(p, &g, workspace), "a product"))
            status = KN_DONE;
    }
    pthread_mutex_unlock(&state.lock);
    return kn_ok() ? status : KN_FAILED;
}

bool kn_blas_try(const kn_gemm *g)
{
    kn_blas_plan p = { 0 };
    cublasLtMatmulPreference_t pref = NULL;
    if (!kn_cuda_library_open(&kn_cublaslt_library))
        return false;
    pthread_mutex_lock(&state.lock);
    bool ok = describe(&p, g) && kn_blas_preference(&pref, g, true);
    if (pref)
        kn_blas.pref_destroy(pref);
    forget(&p);
    pthread_mutex_unlock(&state.lock);
    return ok;
}

/* ---- the steps of recurrent layers: the own kernels', with products of cuBLASLt where it takes
 * them ---- */

static bool product_of_step(const kn_matmul_args *p)
{
    kn_status s = matmul(p);
    if (s == KN_DECLINED)
        s = kn_cuda_own_provider->run[KN_K_MATMUL](p);
    return s == KN_DONE;
}

static kn_status recurrent(const void *args)
{
    kn_recurrent_args a = *(const kn_recurrent_args *)args;
    a.product = product_of_step;
    return kn_cuda_own_provider->run[KN_K_RECURRENT](&a);
}

static kn_status recurrent_grad(const void *args)
{
    kn_recurrent_grad_args a = *(const kn_recurrent_grad_args *)args;
    a.product = product_of_step;
    return kn_cuda_own_provider->run[KN_K_RECURRENT_GRAD](&a);
}

const kn_provider kn_cuda_cublaslt = { .name = "cublaslt",
                                       .run = { [KN_K_MATMUL] = matmul,
                                                [KN_K_RECURRENT] = recurrent,
                                                [KN_K_RECURRENT_GRAD] = recurrent_grad },
                                       .epilogues = true };
