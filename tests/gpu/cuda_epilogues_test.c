/* tests/gpu/cuda_epilogues_test.c: products with an epilogue in cuBLASLt, over fake CUDA and a
 * cuBLASLt that computes on the host (fake_cublaslt.c), beside the same products in parts on the
 * CPU: every layout, dtype and alignment; who computes it; gradients of a net. */
#include "kernels/cuda/cublaslt/gemm.h"
#include "kernels/cuda/runtime/runtime.h"
#include "knap.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

static bool begin(void)
{
    static char path[4200];
    char self[4000] = "";
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    const char *slash = n > 0 ? strrchr(self, '/') : NULL;
    KN_CHECK(slash, "no path of this program");
    snprintf(path, sizeof path, "%.*s/libfake_cublaslt.so", (int)(slash - self), self);
    setenv("FAKE_ALGORITHMS", "0.004 0.002", 0);
    fake_begin();
    kn_cublaslt_library.soname = path, kn_cublaslt_library.looked = false;
    kn_providers_only("cublaslt,cuda");
    return kn_compute_stream(KN_CUDA) && kn_cuda_library_open(&kn_cublaslt_library);
}

static void end(void)
{
    kn_cuda_epilogues("timed");
    kn_providers_only("cuda");
}

/* ---- single products ------------------------------------------------------------------------- */

enum { ROOM = 2048, PLACES = 5 }; /* elements of a place: a, b, d, sum, x */

typedef struct shape {
    int64_t m, n, k, gap;
    bool ta, tb, td;
    kn_dtype in, out;
} shape;

static kn_array matrix(char *at, kn_dtype t, int64_t rows, int64_t cols, bool turned, int64_t gap)
{
    kn_array a = kn_array_make(at, t, 2, (int64_t[]){ rows, cols });
    a.stride[turned] = (turned ? rows : cols) + gap;
    a.stride[!turned] = 1;
    return a;
}

static kn_matmul_args product_of(const shape *s, char *memory)
{
    return (kn_matmul_args){
        .a = matrix(memory, s->in, s->m, s->k, s->ta, s->gap),
        .b = matrix(memory + 8 * ROOM, s->in, s->k, s->n, s->tb, s->gap),
        .dst = matrix(memory + 16 * ROOM, s->out, s->m, s->n, s->td, s->gap),
    };
}

/* Small multiples of an eighth, of which sums are exact in f32. */
static void fill(const shape *s, char *memory)
{
    float values[ROOM];
    memset(memory, 0, (size_t)8 * ROOM * PLACES);
    for (int p = 0; p < PLACES; p++) {
        if (p == 2 || p == 3)
            continue;
        for (int i = 0; i < ROOM; i++)
            values[i] = (float)((int)((unsigned)(i + 977 * p) * 2654435761u >> 27) - 16) / 8;
        const int64_t n = ROOM;
        kn_copy_args c = { kn_array_make(memory + (size_t)8 * ROOM * p, p == 4 ? s->out : s->in, 1,
                                         &n),
                           kn_array_make(values, KN_F32, 1, &n) };
        KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_COPY, c));
    }
}

static double value(const char *memory, kn_dtype t, int64_t i)
{
    double v;
    const int64_t one = 1;
    kn_array to = kn_array_make(&v, KN_F64, 1, &one);
    kn_array from =
        kn_array_make((char *)(uintptr_t)memory + i * (int64_t)kn_dtype_size(t), t, 1, &one);
    kn_copy_args c = { to, from };
    KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_COPY, c));
    return v;
}

/* Launches p: whether cuBLASLt computed it whole. */
static bool launch(kn_device device, const kn_matmul_args *p)
{
    kn_trace_event *e = NULL;
    kn_stream *s = kn_compute_stream(device);
    int whole = 0, products = 0, others = 0;
    kn_trace_start(20);
    KN_CHECK(kn_launch(s, KN_K_MATMUL, p, sizeof *p) && kn_stream_sync(s));
    const size_t n = kn_trace_stop(&e);
    for (size_t i = 0; i < n; i++) {
        const bool product = strcmp(e[i].what, "matmul") == 0;
        products += product;
        whole += product && strcmp(e[i].provider, "cublaslt") == 0;
        others += strcmp(e[i].what, "reduce") == 0 || strcmp(e[i].what, "unary_grad") == 0;
    }
    kn_host_free(e);
    KN_CHECK(products == 1 && others <= 1 && (others == 1 || whole == 1), "%d and %d kernels",
             products, others);
    return others == 0;
}

static char here[8 * ROOM * PLACES] __attribute__((aligned(256)));
static char *there;

static void take(void)
{
    there = kn_take(kn_device_memory(KN_CUDA), sizeof here, KN_MEM_WORKSPACE);
    KN_CHECK(there && begin(), "%s", kn_error() ? kn_error() : kn_cublaslt_library.lack);
}

static void give(void)
{
    kn_give(kn_device_memory(KN_CUDA), there, sizeof here, KN_MEM_WORKSPACE);
    end();
}

static bool sums(const shape *s, bool of_b, kn_dtype type)
{
    const int64_t n = of_b ? s->n : s->m;
    kn_matmul_args host = product_of(s, here), device = product_of(s, there);
    fill(s, here);
    memcpy(there, here, sizeof here);
    host.sum = kn_array_make(here + 24 * ROOM, type, 1, &n);
    device.sum = kn_array_make(there + 24 * ROOM, type, 1, &n);
    host.sum_of_b = device.sum_of_b = of_b;
    launch(KN_CPU, &host);
    const bool one = launch(KN_CUDA, &device);
    KN_CHECK(memcmp(here, there, sizeof here) == 0,
             "%s to %s, [%lld,%lld,%lld], layouts %d%d%d gap %lld, sum of %c", kn_dtype_name(s->in),
             kn_dtype_name(s->out), (long long)s->m, (long long)s->n, (long long)s->k, s->ta, s->tb,
             s->td, (long long)s->gap, of_b ? 'b' : 'a');
    return one;
}

static const kn_dtype types[][2] = {
    { KN_F32, KN_F32 }, { KN_BF16, KN_BF16 }, { KN_F16, KN_F16 }, { KN_BF16, KN_F32 }
};
static const int64_t sizes[][3] = { { 5, 7, 3 },  { 8, 16, 24 }, { 1, 8, 4 },
                                    { 16, 1, 8 }, { 1, 1, 9 },   { 4, 24, 1 } };

KN_TEST(cuda_epilogues, sums_in_every_layout)
{
    take();
    KN_CHECK(kn_cuda_epilogues("bgrad"));
    for (int i = 0; i < 6 * 4 * 16 * 2; i++) {
        const int64_t *z = sizes[i % 6];
        const kn_dtype *t = types[i / 6 % 4];
        const int bits = i / 24;
        shape s = { z[0], z[1], z[2], bits & 8 ? 3 : 0, bits & 1, bits & 2, bits & 4, t[0], t[1] };
        KN_CHECK(sums(&s, bits & 16, s.out), "case %d ran in parts", i);
    }
    give();
}

/* gelu's derivative multiplies what isn't rounded yet: the parts are two roundings away. */
static bool gelu(const shape *s, int64_t x_gap, size_t offset)
{
    const double rounding = s->out == KN_BF16 ? 0x1p-7 : s->out == KN_F16 ? 0x1p-10 : 1e-5;
    kn_matmul_args host = product_of(s, here), device = product_of(s, there);
    fill(s, here);
    memcpy(there, here, sizeof here);
    host.x = matrix(here + 32 * ROOM + offset, s->out, s->m, s->n, false, x_gap);
    device.x = matrix(there + 32 * ROOM + offset, s->out, s->m, s->n, false, x_gap);
    host.grad_of = device.grad_of = KN_GELU_TANH;
    launch(KN_CPU, &host);
    const bool one = launch(KN_CUDA, &device);
    double most = 0;
    for (int64_t i = 0; i < ROOM; i++)
        most = fmax(most, fabs(value(here + 16 * ROOM, s->out, i)));
    for (int64_t i = 0; i < ROOM; i++) {
        const double p = value(here + 16 * ROOM, s->out, i),
                     q = value(there + 16 * ROOM, s->out, i);
        KN_CHECK(fabs(p - q) <= rounding * most,
                 "%s, [%lld,%lld,%lld], layouts %d%d%d: element %lld is %g instead of %g",
                 kn_dtype_name(s->in), (long long)s->m, (long long)s->n, (long long)s->k, s->ta,
                 s->tb, s->td, (long long)i, q, p);
    }
    return one;
}

KN_TEST(cuda_epilogues, gelu_where_its_rules_allow_it)
{
    take();
    KN_CHECK(kn_cuda_epilogues("dgelu"));
    int fused = 0;
    for (int i = 0; i < 6 * 3 * 16 * 3; i++) {
        const int64_t *z = sizes[i % 6], x_gap = (int64_t[]){ 0, 8, 3 }[i / (6 * 3 * 16)];
        const kn_dtype *t = types[i / 6 % 3];
        const int bits = i / 18 % 16;
        shape s = { z[0], z[1], z[2], bits & 8 ? 3 : 0, bits & 1, bits & 2, bits & 4, t[0], t[1] };
        const bool one = gelu(&s, x_gap, 0), rows = !s.td || s.m == 1 || s.n == 1;
        const int64_t ld = s.m == 1 ? s.n : s.n + x_gap;
        if (!s.td || (s.m > 1 && s.n > 1))
            KN_CHECK(one == (rows && ld % 8 == 0), "case %d in %s", i, one ? "one" : "parts");
        fused += one;
    }
    KN_CHECK(fused > 50, "%d in one kernel", fused);
    shape s = { 8, 16, 24, 0, false, false, false, KN_BF16, KN_BF16 };
    KN_CHECK(gelu(&s, 0, 0) && gelu(&s, 8, 0) && gelu(&s, 0, 16));
    KN_CHECK(!gelu(&s, 0, 2) && !gelu(&s, 0, 8), "x isn't aligned to 16 bytes");
    give();
}

/* ---- who computes it ------------------------------------------------------------------------- */

KN_TEST(cuda_epilogues, only_what_was_chosen)
{
    static const struct {
        const char *list;
        bool sum, gelu;
    } rows[] = {
        { "none", false, false }, { "bgrad", true, false },      { "dgelu", false, true },
        { "all", true, true },    { "dgelu,bgrad", true, true }, { "timed", false, false }
    };
    const shape s = { 8, 16, 24, 0, true, false, false, KN_BF16, KN_BF16 };
    take();
    KN_CHECK(!sums(&s, true, s.out) && !gelu(&s, 0, 0), "none at start");
    for (int i = 0; i < 6; i++) {
        KN_CHECK(kn_cuda_epilogues(rows[i].list));
        KN_CHECK(sums(&s, true, s.out) == rows[i].sum && gelu(&s, 0, 0) == rows[i].gelu, "'%s'",
                 rows[i].list);
    }
    REFUSED(kn_cuda_epilogues("bgrad,gelu"), "kn_cuda_epilogues: bgrad,gelu: must be bgrad, dgelu");
    REFUSED(kn_cuda_epilogues("timed,dgelu"),
            "kn_cuda_epilogues: timed,dgelu: must be bgrad, dgelu");
    give();
}

KN_TEST(cuda_epilogues, the_environment_chooses)
{
    setenv("KNAP_CUDA_EPILOGUES", "dgelu,all", 1);
    KN_CHECK(kn_cuda_epilogues_chosen() == (KN_EPILOGUE_BGRAD | KN_EPILOGUE_DGELU));
}

KN_TEST(cuda_epilogues, another_word_in_the_environment)
{
    setenv("KNAP_CUDA_EPILOGUES", "bgrads", 1);
    KN_CHECK(kn_cuda_epilogues_chosen() == KN_EPILOGUES_TIMED);
    KN_CHECK_ERROR("KNAP_CUDA_EPILOGUES=bgrads: must be bgrad, dgelu");
}

/* What cuBLASLt doesn't have runs in parts. */
KN_TEST(cuda_epilogues, declined_ones_run_in_parts)
{
    const shape s = { 8, 16, 24, 0, true, false, false, KN_BF16, KN_BF16 };
    take();
    KN_CHECK(kn_cuda_epilogues("all"));
    KN_CHECK(sums(&s, true, KN_BF16) && !sums(&s, true, KN_F32), "a sum in a dtype of its own");
    const shape wide = { 8, 16, 24, 0, true, false, false, KN_F64, KN_F64 };
    KN_CHECK(!sums(&wide, true, KN_F64) && !gelu(&wide, 0, 0), "f64");
    kn_gemm g;
    kn_matmul_args p = product_of(&s, there);
    p.x = matrix(there + 32 * ROOM, s.out, s.m, s.n, false, 0);
    p.grad_of = KN_GELU_TANH;
    KN_CHECK(kn_gemm_map(&p, &g) && g.epilogue == KN_GEMM_DGELU && g.ldx == 16);
    p.grad_of = KN_GELU;
    KN_CHECK(!kn_gemm_map(&p, &g), "the exact one");
    p.grad_of = KN_GELU_TANH;
    p.add = true;
    KN_CHECK(!kn_gemm_map(&p, &g), "added to what is there");
    p.add = false;
    p.x.dtype = KN_F32;
    KN_CHECK(!kn_gemm_map(&p, &g), "x in a dtype of its own");
    p.x = (kn_array){ 0 };
    p.sum = kn_array_make(there + 24 * ROOM, s.out, 1, &s.n);
    p.sum.stride[0] = 2;
    KN_CHECK(!kn_gemm_map(&p, &g), "a sum with gaps");
    give();
}

/* ---- timed ----------------------------------------------------------------------------------- */

/* In a process of its own: bits 1 and 2: a sum and gelu in one kernel; 4: an error. The fake's
 * plain products take 2 ms at best, Knap's kernels no time. */
static int timed(const char *tune, const char *more, const char *list)
{
    const shape s = { 8, 16, 24, 0, true, false, false, KN_BF16, KN_BF16 };
    int status = -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        setenv("KNAP_TUNE", tune, 1);
        setenv("FAKE_EPILOGUE", more, 1);
        setenv("KNAP_CUDA_EPILOGUES", list, 1);
        take();
        const bool sum = sums(&s, true, s.out), again = sums(&s, true, s.out), x = gelu(&s, 0, 0);
        _exit(16 | sum | 2 * x | 4 * (sum != again || !kn_ok())); /* a failed check exits with 1 */
    }
    KN_CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) & 16,
             "status %d", status);
    return WEXITSTATUS(status) & 15;
}

/* Parts stay where they are faster; later runs go by what was timed, unless they are told. */
KN_TEST(cuda_epilogues, timing_chooses)
{
    static const struct {
        const char *more;
        int chosen;
    } rows[] = { { "0.001", 0 }, { "-0.001", 3 } };
    for (int i = 0; i < 2; i++) {
        char folder[] = "/tmp/knap-epilogues-XXXXXX", file[64];
        KN_CHECK(mkdtemp(folder) != NULL);
        snprintf(file, sizeof file, "%s/tuned", folder);
        setenv("KNAP_TUNED", file, 1);
        KN_CHECK(timed("0", rows[i].more, "timed") == 0, "not timed yet: in parts");
        const int chosen = timed("1", rows[i].more, "timed");
        KN_CHECK(chosen == rows[i].chosen, "%s s more: %d", rows[i].more, chosen);
        KN_CHECK(timed("0", "1", "timed") == rows[i].chosen, "kept for later");
        KN_CHECK(timed("0", rows[i].more, "all") == 3 && timed("0", rows[i].more, "none") == 0);
        KN_CHECK(timed("0", rows[i].more, "bgrad") == 1 && timed("1", "1", "dgelu") == 2);
        unlink(file);
        rmdir(folder);
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

enum { LEAVES = 5 };

/* The gradients of y = W2 gelu(W1 x + b1) + b2; the number of products, and of other kernels of
 * gradients. */
static void gradients(kn_dtype t, const char *list, double *to, int counts[2])
{
    kn_scope scope = kn_scope_begin();
    const int64_t shapes[LEAVES][2] = { { 6, 8 }, { 8, 16 }, { 16 }, { 16, 8 }, { 8 } };
    kn_tensor *leaf[LEAVES];
    kn_trace_event *e = NULL;
    KN_CHECK(kn_cuda_epilogues(list));
    for (int i = 0; i < LEAVES; i++)
        leaf[i] = kn_require_grad(
            kn_randn(t, KN_CUDA, (uint64_t)i, 1, i == 2 || i == 4 ? 1 : 2, shapes[i]), true);
    kn_tensor *y =
        kn_linear(kn_gelu_tanh(kn_linear(leaf[0], leaf[1], leaf[2], true)), leaf[3], leaf[4], true);
    kn_tensor *loss = kn_sum(kn_mul(y, y), 0, NULL, false);
    kn_trace_start(100);
    KN_CHECK(kn_backward(loss));
    const size_t n = kn_trace_stop(&e);
    counts[0] = counts[1] = 0;
    for (size_t i = 0; i < n; i++) {
        counts[0] += strcmp(e[i].what, "matmul") == 0 && strcmp(e[i].provider, "cublaslt") == 0;
        counts[1] += strcmp(e[i].what, "unary_grad") == 0 || strcmp(e[i].what, "reduce") == 0;
    }
    kn_host_free(e);
    for (int i = 0; i < LEAVES; i++) {
        kn_tensor *g = kn_cast(kn_grad(leaf[i]), KN_F64);
        const size_t bytes = g ? (size_t)kn_numel(g) * sizeof *to : 0;
        KN_CHECK(g && kn_to_host(g, to, bytes));
        to += kn_numel(g);
    }
    kn_scope_end(scope);
}

KN_TEST(cuda_epilogues, gradients_of_a_net)
{
    enum { NUMBERS = 6 * 8 + 8 * 16 + 16 + 16 * 8 + 8 };
    static const struct {
        const char *list;
        int others; /* kernels: two sums for biases, gelu's derivative */
    } rows[] = { { "none", 3 }, { "bgrad", 1 }, { "dgelu", 2 }, { "all", 0 } };
    static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16 };
    take();
    for (int t = 0; t < 3; t++) {
        const double rounding = dtypes[t] == KN_F32 ? 1e-5 : dtypes[t] == KN_F16 ? 0x1p-9 : 0x1p-6;
        double parts[NUMBERS], grads[NUMBERS], most = 0;
        for (int i = 0; i < 4; i++) {
            int counts[2];
            gradients(dtypes[t], rows[i].list, i == 0 ? parts : grads, counts);
            KN_CHECK(counts[0] == 4 && counts[1] == rows[i].others, "%s: %d products, %d others",
                     rows[i].list, counts[0], counts[1]);
            for (int k = 0; k < NUMBERS && i == 0; k++)
                most = fmax(most, fabs(parts[k]));
            for (int k = 0; k < NUMBERS && i > 0; k++)
                KN_CHECK(fabs(grads[k] - parts[k]) <= rounding * most, "%s, %s: %d is %g, not %g",
                         kn_dtype_name(dtypes[t]), rows[i].list, k, grads[k], parts[k]);
        }
    }
    give();
}
