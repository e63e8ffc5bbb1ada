/* tests/gpu/cuda_gemm_test.c: the mapping of matrix products to cuBLASLt. A plain column-major
 * product on the host carries out the mapping, and is compared with the reference; cuBLASLt's
 * descriptors are made without a GPU. */
#include "kernels/cuda/cublaslt/plan.h"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/kn_test.h"

#include <sys/wait.h>
#include <unistd.h>

/* One product: leading dims, m, n, k, and how each operand lies: order[i] is the place of dim i in
 * memory, outermost first; gap: elements between rows beyond their length. */
typedef struct layout {
    int order[4];
    int64_t gap;
    bool broadcast; /* stride 0 in the leading dims */
} layout;

typedef struct product {
    int64_t lead[2], m, n, k;
    layout dst, a, b;
    bool bias;
} product;

static kn_array array(void *data, kn_dtype t, const int64_t shape[4], const layout *l)
{
    kn_array a = kn_array_make(data, t, 4, shape);
    int64_t stride = 1;
    bool inner = true;
    for (int place = 3; place >= 0; place--) {
        int d = l->order[place];
        a.stride[d] = l->broadcast && d < 2 ? 0 : stride;
        if (l->broadcast && d < 2)
            continue;
        stride *= shape[d];
        if (inner)
            stride += l->gap;
        inner = false;
    }
    return a;
}

static float value(uint64_t i)
{
    return (float)((int)(i * 2654435761u >> 7 & 15) - 8); /* small integers: every sum is exact */
}

enum { ROOM = 4096 };
static float A[ROOM], B[ROOM], D[ROOM], expected[ROOM] __attribute__((aligned(16))), bias[64];

/* The result of cuBLASLt for g. */
static void multiply(const kn_gemm *g)
{
    for (int64_t r = 0; r < kn_gemm_repeats(g); r++) {
        int64_t oa, ob, od;
        kn_gemm_offsets(g, r, &oa, &ob, &od);
        for (int64_t x = 0; x < g->batch; x++) {
            const float *a = (const float *)g->a + oa + x * g->sa,
                        *b = (const float *)g->b + ob + x * g->sb;
            float *d = (float *)g->d + od + x * g->sd;
            for (int64_t j = 0; j < g->n; j++)
                for (int64_t i = 0; i < g->m; i++) {
                    float sum = g->bias ? ((const float *)g->bias)[i] : 0;
                    sum += g->add ? d[i + j * g->ldd] : 0;
                    for (int64_t l = 0; l < g->k; l++)
                        sum += (g->ta ? a[l + i * g->lda] : a[i + l * g->lda]) *
                               (g->tb ? b[j + l * g->ldb] : b[l + j * g->ldb]);
                    d[i + j * g->ldd] = sum;
                }
        }
    }
}

static kn_matmul_args args_of(const product *p, float *dst, kn_dtype t)
{
    int64_t d[4] = { p->lead[0], p->lead[1], p->m, p->n },
            a[4] = { p->lead[0], p->lead[1], p->m, p->k };
    int64_t b[4] = { p->lead[0], p->lead[1], p->k, p->n };
    kn_matmul_args x = { .dst = array(dst, t, d, &p->dst),
                         .a = array(A, t, a, &p->a),
                         .b = array(B, t, b, &p->b) };
    if (p->bias)
        x.bias = kn_array_make(bias, t, 1, &p->n);
    return x;
}

#define ROWS                                                                                       \
    {                                                                                              \
        { 0, 1, 2, 3 }, 0, false                                                                   \
    }
#define COLS                                                                                       \
    {                                                                                              \
        { 0, 1, 3, 2 }, 0, false                                                                   \
    }
#define GAPPED                                                                                     \
    {                                                                                              \
        { 0, 1, 2, 3 }, 5, false                                                                   \
    }
#define SHARED                                                                                     \
    {                                                                                              \
        { 0, 1, 2, 3 }, 0, true                                                                    \
    }
#define HEADS                                                                                      \
    {                                                                                              \
        { 0, 2, 1, 3 }, 0, false                                                                   \
    } /* [B,T,H,D] seen as [B,H,T,D] */

static const product products[] = {
    { { 1, 1 }, 5, 7, 3, ROWS, ROWS, ROWS, false },
    { { 1, 1 }, 5, 7, 3, ROWS, ROWS, ROWS, true },
    { { 1, 1 }, 5, 7, 3, ROWS, ROWS, COLS, true },
    { { 1, 1 }, 5, 7, 3, ROWS, COLS, ROWS, false },
    { { 1, 1 }, 5, 7, 3, ROWS, COLS, COLS, false },
    { { 1, 1 }, 5, 7, 3, COLS, ROWS, COLS, false },
    { { 1, 1 }, 5, 7, 3, COLS, COLS, ROWS, false },
    { { 1, 1 }, 5, 7, 3, GAPPED, GAPPED, GAPPED, true },
    { { 2, 3 }, 5, 7, 3, ROWS, ROWS, ROWS, false },
    { { 2, 3 }, 5, 7, 3, ROWS, ROWS, SHARED, true },
    { { 2, 3 }, 5, 7, 3, ROWS, SHARED, COLS, false },
    { { 2, 3 }, 5, 7, 3, HEADS, HEADS, HEADS, false },
    { { 2, 3 }, 5, 7, 3, ROWS, HEADS, HEADS, false },
    { { 2, 3 }, 4, 4, 6, HEADS, ROWS, HEADS, true },
    { { 2, 3 }, 1, 7, 3, ROWS, ROWS, SHARED, true },
    { { 2, 3 }, 5, 1, 3, ROWS, ROWS, SHARED, true },
    { { 2, 3 }, 5, 7, 1, ROWS, ROWS, ROWS, false },
    { { 1, 1 }, 1, 1, 9, ROWS, ROWS, ROWS, true },
    { { 2, 3 }, 1, 7, 1, COLS, COLS, COLS, false },
    { { 1, 1 }, 1, 8, 9, GAPPED, COLS, COLS, true },
    { { 3, 1 }, 5, 7, 3, GAPPED, GAPPED, SHARED, true },
    { { 1, 4 }, 6, 2, 5, COLS, SHARED, ROWS, false },
};
enum { PRODUCTS = sizeof products / sizeof *products };

static void fill(void)
{
    for (int i = 0; i < ROOM; i++) {
        A[i] = value((uint64_t)i);
        B[i] = value((uint64_t)i + 100000);
        D[i] = expected[i] = 99;
    }
    for (int i = 0; i < 64; i++)
        bias[i] = value((uint64_t)i + 7777);
}

KN_TEST(cuda_gemm, maps_every_layout)
{
    for (int i = 0; i < 2 * PRODUCTS; i++) {
        kn_gemm g;
        fill();
        kn_matmul_args want = args_of(&products[i / 2], expected, KN_F32),
                       got = args_of(&products[i / 2], D, KN_F32);
        want.add = got.add = i % 2;
        KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_MATMUL, want));
        KN_CHECK(kn_gemm_map(&got, &g), "product %d is declined", i / 2);
        multiply(&g);
        KN_CHECK(memcmp(D, expected, sizeof D) == 0, "product %d is another one, add %d", i / 2,
                 i % 2);
    }
}

KN_TEST(cuda_gemm, weights_shared_by_a_batch_are_one_product)
{
    kn_gemm g;
    product p = { { 2, 3 }, 5, 7, 3, ROWS, ROWS, SHARED, true };
    kn_matmul_args a = args_of(&p, D, KN_F32);
    KN_CHECK(kn_gemm_map(&a, &g) && g.batch == 1 && g.outers == 0 && g.n == 30 && g.m == 7 &&
             g.k == 3);
}

KN_TEST(cuda_gemm, declines)
{
    kn_gemm g;
    product p = { { 1, 1 }, 5, 7, 3, COLS, ROWS, ROWS, true };
    kn_matmul_args a = args_of(&p, D, KN_F32);
    KN_CHECK(!kn_gemm_map(&a, &g), "a bias along the columns of a transposed result");
    p = (product){ { 1, 1 }, 5, 7, 3, ROWS, ROWS, ROWS, false };
    a = args_of(&p, D, KN_F32);
    a.a.stride[3] = 2, a.a.stride[2] = 6;
    KN_CHECK(!kn_gemm_map(&a, &g), "every second element");
    a = args_of(&p, D, KN_I32);
    KN_CHECK(!kn_gemm_map(&a, &g), "integers");
    a = args_of(&p, D, KN_BF16);
    a.dst.dtype = KN_F32;
    KN_CHECK(kn_gemm_map(&a, &g) && g.in == KN_BF16 && g.out == KN_F32);
    a = args_of(&p, D, KN_F32);
    a.a.shape[3] = a.b.shape[2] = 0;
    KN_CHECK(!kn_gemm_map(&a, &g), "no terms");
}

/* cuBLASLt's heuristics know of the first matrices only the alignment that they are told. */
KN_TEST(cuda_gemm, alignments_hold_for_every_matrix)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F64 };
    int low = 0;
    for (int i = 0; i < PRODUCTS * 3; i++) {
        kn_gemm g;
        kn_matmul_args args = args_of(&products[i / 3], D, types[i % 3]);
        KN_CHECK(kn_gemm_map(&args, &g));
        int64_t in = (int64_t)kn_dtype_size(g.in), out = (int64_t)kn_dtype_size(g.out);
        low += g.align_a < 16 || g.align_b < 16 || g.align_d < 16;
        for (int64_t r = 0; r < kn_gemm_repeats(&g); r++)
            for (int64_t x = 0, a, b, d; x < g.batch; x++) {
                kn_gemm_offsets(&g, r, &a, &b, &d);
                uintptr_t at = (uintptr_t)g.a + (uintptr_t)((a + x * g.sa) * in);
                uintptr_t bt = (uintptr_t)g.b + (uintptr_t)((b + x * g.sb) * in);
                uintptr_t dt = (uintptr_t)g.d + (uintptr_t)((d + x * g.sd) * out);
                KN_CHECK(at % (uintptr_t)g.align_a == 0 && bt % (uintptr_t)g.align_b == 0 &&
                             dt % (uintptr_t)g.align_d == 0,
                         "product %d, matrix %lld of %lld", i, (long long)x, (long long)g.batch);
            }
    }
    KN_CHECK(low > 0, "strides of some are odd");
}

/* In a process of its own, whose cuBLASLt is fake_cublaslt.c: the product's status; 9: no such
 * library. */
static int answered(const char *numbers, const char *error)
{
    char path[4200], self[4000] = "";
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash = n > 0 ? strrchr(self, '/') : NULL;
    int status = -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        kn_matmul_args a = args_of(&products[0], D, KN_F32);
        snprintf(path, sizeof path, "%.*s/gpu/libfake_cublaslt.so", (int)(slash - self), self);
        setenv("FAKE_HEURISTIC", numbers, 1);
        kn_cublaslt_library.soname = path, kn_cublaslt_library.looked = false;
        if (access(path, R_OK) != 0)
            _exit(9);
        kn_status s = kn_cuda_cublaslt.run[KN_K_MATMUL](&a);
        bool said = error ? kn_error() && strstr(kn_error(), error) : kn_ok();
        _exit(said ? (int)s : 8);
    }
    KN_CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 7;
}

/* Where the heuristics have no algorithm, or none that works, another provider takes the product;
 * a library in trouble is an error. 15: not supported, 7: an invalid value, 3: no memory. */
KN_TEST(cuda_gemm, products_without_an_algorithm_are_declined)
{
    static const char *const none[] = { "0 0 0", "0 15 1", "15 0 0", "7 0 0" };
    if (answered(none[0], NULL) == 9)
        KN_SKIP("libfake_cublaslt.so is not built");
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        int s = answered(none[i], NULL);
        KN_CHECK(s == KN_DECLINED, "heuristics that answer %s: %d", none[i], s);
    }
    KN_CHECK(answered("3 0 0", "CUBLAS_STATUS_ALLOC_FAILED") == KN_FAILED);
}

KN_TEST(cuda_gemm, descriptors_without_a_gpu)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    if (!kn_cuda_library_open(&kn_cublaslt_library))
        KN_SKIP("%s", kn_cublaslt_library.lack);
    for (int i = 0; i < PRODUCTS; i++)
        for (int t = 0; t < 4; t++) {
            kn_gemm g;
            kn_matmul_args a = args_of(&products[i], D, types[t]);
            KN_CHECK(kn_gemm_map(&a, &g));
            g.tf32 = i % 2 && types[t] == KN_F32;
            KN_CHECK(kn_blas_try(&g), "product %d, %s", i, kn_dtype_name(types[t]));
        }
}

/* Sums and gelu's gradient beside dX and dW of a linear layer whose weight lies either way. */
KN_TEST(cuda_gemm, descriptors_of_epilogues_without_a_gpu)
{
    static const product grads[] = {
        { { 1, 1 }, 8, 16, 24, ROWS, ROWS, COLS, false }, /* dY W^T */
        { { 1, 1 }, 8, 16, 24, ROWS, ROWS, ROWS, false }, /* dY W */
        { { 1, 1 }, 8, 16, 24, ROWS, COLS, ROWS, false }, /* X^T dY */
    };
    static const kn_dtype types[][2] = {
        { KN_F32, KN_F32 }, { KN_BF16, KN_BF16 }, { KN_F16, KN_F16 }, { KN_BF16, KN_F32 }
    };
    static const kn_gemm_epilogue wanted[] = { KN_GEMM_SUM_B, KN_GEMM_SUM_A, KN_GEMM_DGELU };
    if (!kn_cuda_library_open(&kn_cublaslt_library))
        KN_SKIP("%s", kn_cublaslt_library.lack);
    for (int i = 0; i < 3 * 4 * 3; i++) {
        kn_gemm g;
        kn_matmul_args a = args_of(&grads[i % 3], D, types[i / 3 % 4][0]);
        kn_array *const all[] = { &a.dst, &a.a, &a.b };
        for (int k = 0; k < 3; k++) { /* two dims */
            memmove(all[k]->shape, all[k]->shape + 2, 2 * sizeof(int64_t));
            memmove(all[k]->stride, all[k]->stride + 2, 2 * sizeof(int64_t));
            all[k]->ndim = 2;
        }
        a.dst.dtype = types[i / 3 % 4][1];
        const int what = i / 12;
        if (what < 2) {
            a.sum = kn_array_make(bias, a.dst.dtype, 1, (int64_t[]){ what ? 16 : 8 });
            a.sum_of_b = what;
        } else {
            a.x = kn_array_make(expected, a.dst.dtype, 2, a.dst.shape);
            a.grad_of = KN_GELU_TANH;
        }
        KN_CHECK(kn_gemm_map(&a, &g) && g.epilogue == wanted[what], "%d is declined", i);
        KN_CHECK(kn_blas_try(&g), "%d", i);
    }
}

KN_TEST(cuda_gemm, products_for_a_part_of_the_gpu)
{
    kn_gemm g;
    kn_matmul_args a = args_of(&products[0], D, KN_BF16);
    if (!kn_cuda_library_open(&kn_cublaslt_library))
        KN_SKIP("%s", kn_cublaslt_library.lack);
    setenv("KNAP_CUDA_SM_TARGET", "100", 1);
    KN_CHECK(kn_cuda_sm_target() == 100 && kn_gemm_map(&a, &g));
    KN_CHECK(kn_blas_try(&g));
}
