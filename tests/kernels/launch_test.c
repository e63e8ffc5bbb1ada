/* tests/kernels/launch_test.c: launching kernels through the providers. */
#include "kernels/checks.h"
#include "kernels/trace.h"
#include "kernels/kernels_internal.h"
#include "tests/kn_test.h"

static kn_copy_args copy(float *dst, float *src, int64_t n)
{
    return (kn_copy_args){ .dst = kn_array_make(dst, KN_F32, 1, &n),
                           .src = kn_array_make(src, KN_F32, 1, &n) };
}

static bool launch_copy(kn_stream *s, float *dst, float *src, int64_t n)
{
    kn_copy_args args = copy(dst, src, n);
    return kn_launch(s, KN_K_COPY, &args, sizeof args);
}

KN_TEST(launch, on_every_kind_of_stream)
{
    for (int kind = KN_STREAM_INLINE; kind <= KN_STREAM_WORKER; kind++) {
        float a[100], b[100] = { 0 }, c[100] = { 0 };
        for (int i = 0; i < 100; i++)
            a[i] = (float)i;
        kn_stream *s = kn_stream_create(KN_CPU, "s", kind);
        KN_CHECK(launch_copy(s, b, a, 100));
        KN_CHECK(launch_copy(s, c, b, 100));
        KN_CHECK(kn_stream_sync(s) && memcmp(a, c, sizeof a) == 0);
        kn_stream_destroy(s);
    }
    KN_CHECK_OK();
}

KN_TEST(launch, bad_calls)
{
    float a[4] = { 0 };
    kn_copy_args args = copy(a, a, 4);
    kn_stream *s = kn_compute_stream(KN_CPU);
    REFUSED(launch_copy(NULL, a, a, 4), "no stream");
    REFUSED(kn_launch(s, KN_K_MATMUL, &args, sizeof args), "matmul: arguments of");
    REFUSED(kn_launch(s, (kn_kernel)KN_K_COUNT, &args, sizeof args), "no such kernel");
    REFUSED(launch_copy(s, a, NULL, 4), "copy: array src f32[4] has no bytes");
    KN_CHECK(launch_copy(s, NULL, NULL, 0), "no elements need no bytes");
    args.src.shape[0] = 3; /* whatever the device, and before any provider sees it */
    for (int meta = 0; meta < 2; meta++) {
        kn_stream *to = kn_compute_stream(meta ? KN_META : KN_CPU);
        KN_CHECK(!kn_launch(to, KN_K_COPY, &args, sizeof args), "meta %d", meta);
        KN_CHECK_ERROR("copy: src f32[3] does not fit: it takes dst[*] src[*]; got dst f32[4]");
    }
    kn_fail("stands");
    REFUSED(launch_copy(s, a, a, 4), "stands");
}

/* Arrays over the same bytes, a letter and the sizes of dims: "f23" is f32[2,3], "i" i64, "b" bool,
 * "-" none. */
static bool fits(kn_kernel k, const char *arrays)
{
    static int64_t bytes[64];
    union {
        kn_array array[16];
        char rest[16 * sizeof(kn_array) + 256]; /* zeros */
    } args = { 0 };
    for (int n = 0; *arrays; arrays += *arrays == ' ', n++) {
        int64_t shape[KN_MAX_DIMS];
        const char type = *arrays++;
        int ndim = 0;
        while (*arrays && *arrays != ' ')
            shape[ndim++] = *arrays++ - '0';
        const kn_dtype t = type == 'f' ? KN_F32 : type == 'i' ? KN_I64 : KN_BOOL;
        if (type != '-')
            args.array[n] = kn_array_make(bytes, t, ndim, shape);
    }
    return kn_kernel_fits(k, &args);
}

KN_TEST(launch, arrays_fit_the_kernel)
{
    static const struct {
        kn_kernel k;
        const char *good, *bad, *why;
    } cases[] = {
        { KN_K_WHERE, "f23 b23 f23 f23", "f23 b23 f23 f32", "where: b f32[3,2] does" },
        { KN_K_WHERE, "i23 b23 i23 i23", "i23 i23 i23 i23", "where: cond i64[2,3]" },
        { KN_K_WHERE, "b4 b4 b4 b4", "f4 b4 i4 f4", "where: a i64[4] does not fit" },
        { KN_K_SOFTMAX, "f23 f23", "f23 f234", "softmax: x f32[2,3,4]" },
        { KN_K_SOFTMAX, "f f", "i2 i2", "softmax: y i64[2]" },
        { KN_K_FILL, "i2", "-", "fill: dst" },
        { KN_K_MATMUL, "f524 f523 f534 f4", "f524 f523 f534 f5", "bias f32[5]" },
        { KN_K_MATMUL, "f24 f23 f34", "f524 f23 f34", "matmul: a f32[2,3]" },
        { KN_K_CROSS_ENTROPY, "f f f2 f23 i2", "f f f2 f23 f2", "targets f32[2]" },
        { KN_K_CROSS_ENTROPY, "f f f2 f23 i2 f23", "f f f2 f23 i2 f22", "dlogits f32[2,2]" },
        { KN_K_NORM, "f23 f23 f3 - - f", "f23 f23 f2 - - f", "norm: w f32[2]" },
        { KN_K_NORM, "f23 f23 - - - f f23 f23", "f23 f23 - - - f i23 f23", "add i64[2,3]" },
        { KN_K_BATCH_NORM, "f2345 f2345 - - f3 f3 f3 f3", "f2345 f2345 - - f3 f4 f3 f3", "rstd" },
        { KN_K_BATCH_NORM, "- f23 - - f3 f3 f3 f3", "- f2 - - f3 f3 f3 f3", "x f32[2] does" },
        { KN_K_BATCH_NORM, "- f23 - - f3 f3 f3 f3", "- f23 - - f3 f3", "needs running_mean" },
        { KN_K_ATTENTION, "f2334 f233 f2334 f2354 f2354", "f2334 f233 f2334 f2254 f2254", "heads" },
        { KN_K_ATTENTION, "f1112 f111 f1112 f1112 f1112 b1111",
          "f1112 f111 f1112 f1112 f1112 i1111", "q's dtype or bool" },
        { KN_K_SORT, "f2 i2 f3", "f2 f2 f3", "indices f32[2]" },
        { KN_K_SORT, "f2 i2 f3", "i2 i2 f3", "src f32[3]" },
        { KN_K_GATHER, "f2 f3 i2", "f2 i3 i2", "gather: src i64[3]" },
        { KN_K_GATHER, "f2 f3 i2", "f2 f3 f2", "index f32[2]" },
        { KN_K_INDEX_ADD, "f3 f2 i2", "f3 i2 i2", "float into float" },
        { KN_K_INDEX_SELECT, "f2 f3 i2", "f3 f3 i2", "along dim 0" },
        { KN_K_UNARY_GRAD, "f2 f2 f2 f2", "i2 i2 i2 i2", "dx i64[2]" },
        { KN_K_ROPE, "f1112 f1112", "f1113 f1113", "even D" },
        { KN_K_CUMSUM, "f2 f2", "i2 f2", "float into float" },
        { KN_K_REDUCE, "f13 f23", "f23 f33", "1 where reduced" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        KN_CHECK(fits(cases[i].k, cases[i].good), "case %d", (int)i);
        KN_CHECK(!fits(cases[i].k, cases[i].bad), "case %d fits", (int)i);
        KN_CHECK_ERROR(cases[i].why);
    }
}

KN_TEST(launch, every_kernel_has_a_name)
{
    for (int k = 0; k < KN_K_COUNT; k++)
        for (int j = 0; j < k; j++)
            KN_CHECK(strcmp(kn_kernel_name(k), kn_kernel_name(j)) != 0, "%d and %d", k, j);
    KN_CHECK(strcmp(kn_kernel_name(KN_K_CLIP), "clip") == 0);
}

/* ---- providers ------------------------------------------------------------------------------ */

static const char *layer_that_ran(kn_kernel k, const void *args, size_t size)
{
    static char name[32];
    OWNED_HOST kn_trace_event *events = NULL;
    kn_trace_start(4);
    name[0] = 0;
    kn_launch(kn_compute_stream(KN_CPU), k, args, size);
    if (kn_trace_stop(&events) == 1)
        snprintf(name, sizeof name, "%s", events[0].provider);
    return name;
}

KN_TEST(launch, layers_in_order)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    float a[8] = { 1 }, b[8];
    kn_copy_args args = copy(b, a, 8);
    int n = kn_providers(KN_CPU, providers);
    KN_CHECK(n >= 2 && strcmp(providers[0]->name, kn_cpu_isa()) == 0);
    KN_CHECK(providers[n - 1] == &kn_cpu_reference &&
             strcmp(providers[n - 1]->name, "reference") == 0);
    for (int k = 0; k < KN_K_COUNT; k++)
        KN_CHECK(providers[n - 1]->run[k], "the reference has no %s", kn_kernel_name(k));

    const char *first = providers[0]->run[KN_K_COPY] ? kn_cpu_isa() : "reference";
    const char *ran = layer_that_ran(KN_K_COPY, &args, sizeof args);
    KN_CHECK(strcmp(ran, first) == 0, "%s", ran);
    kn_providers_only("reference");
    ran = layer_that_ran(KN_K_COPY, &args, sizeof args);
    KN_CHECK(strcmp(ran, "reference") == 0, "%s", ran);
    kn_providers_only(NULL);
    ran = layer_that_ran(KN_K_COPY, &args, sizeof args);
    KN_CHECK(strcmp(ran, first) == 0, "%s", ran);
    KN_CHECK_OK();
    kn_providers_only("referense");
    KN_CHECK_ERROR("'referense': no provider of that name");
    KN_CHECK(kn_providers(KN_CUDA, providers) == 0 || kn_device_table_of(KN_CUDA));
}

KN_TEST(launch, nobody_takes_it)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    float a[8] = { 1 }, b[8];
    kn_copy_args args = copy(b, a, 8);
    int n = kn_providers(KN_CPU, providers), without = -1;
    for (int i = 0; i < n; i++)
        if (!providers[i]->run[KN_K_COPY])
            without = i;
    if (without < 0)
        KN_SKIP("every provider copies");
    kn_providers_only(providers[without]->name);
    KN_CHECK(!kn_launch(kn_compute_stream(KN_CPU), KN_K_COPY, &args, sizeof args));
    kn_providers_only(NULL);
    KN_CHECK_ERROR("copy: no kernel provider of cpu takes dst f32[8], src f32[8]");
}

KN_TEST(launch, forced_isa)
{
    setenv("KNAP_ISA", "base", 1); /* read once: each test has a process of its own */
    kn_stream *s = kn_compute_stream(KN_CPU);
    if (strcmp(kn_cpu_isa(), "base") != 0)
        KN_SKIP("chosen by an earlier test of this process, or the build has no other");
    KN_CHECK(s);
}

KN_TEST(launch, unknown_isa)
{
    setenv("KNAP_ISA", "sse9", 1);
    kn_stream *s = kn_compute_stream(KN_CPU);
    unsetenv("KNAP_ISA");
    if (s)
        KN_SKIP("chosen by an earlier test of this process");
    KN_CHECK_ERROR("KNAP_ISA=sse9: this machine and build run ");
}

KN_TEST(launch, unknown_layers_in_the_environment)
{
    float a[8] = { 1 }, b[8];
    setenv("KNAP_PROVIDERS", "turbo", 1);
    bool ran = launch_copy(kn_compute_stream(KN_CPU), b, a, 8);
    unsetenv("KNAP_PROVIDERS");
    if (ran)
        KN_SKIP("read by an earlier test of this process");
    KN_CHECK_ERROR("KNAP_PROVIDERS 'turbo': no provider of that name; this machine has");
}

KN_TEST(launch, libraries)
{
#ifdef KN_HAVE_ONEDNN
    KN_CHECK(strncmp(kn_cpu_libraries(), "oneDNN ", 7) == 0);
#else
    KN_CHECK(strcmp(kn_cpu_libraries(), "none") == 0);
#endif
}
