/* tests/kernels/epilogue_test.c: what is asked for along with a matrix product
 * (kn_matmul_args.sum, .x): on a device whose providers compute none of it, the bits of the product
 * and of a kernel after it; on one that does, one call; if that declines, the parts again. */
#include "kernels/kernels_internal.h"
#include "kernels/trace.h"
#include "tests/kn_test.h"

enum { M = 5, N = 16, K = 9, ROOM = 1024 };

typedef struct place {
    double a[ROOM], b[ROOM], x[ROOM], d[ROOM], sum[ROOM]; /* of any dtype */
} place;
static place memory;

/* rows x cols, or the transpose of what lies there row-major. */
static kn_array matrix(void *data, kn_dtype t, int64_t rows, int64_t cols, bool turned)
{
    kn_array a = kn_array_make(data, t, 2, (int64_t[]){ rows, cols });
    if (turned) {
        a.stride[0] = 1;
        a.stride[1] = rows;
    }
    return a;
}

static void draw(kn_stream *s, void *data, kn_dtype t, uint64_t seed)
{
    kn_random_args r = { .dst = kn_array_make(data, t, 1, (int64_t[]){ ROOM }),
                         .kind = KN_NORMAL,
                         .p1 = 1,
                         .seed = seed };
    KN_CHECK(KN_LAUNCH(s, KN_K_RANDOM, r));
}

static kn_matmul_args product_of(place *p, kn_dtype t, kn_dtype out, bool ta, bool tb)
{
    return (kn_matmul_args){ .dst = matrix(p->d, out, M, N, false),
                             .a = matrix(p->a, t, M, K, ta),
                             .b = matrix(p->b, t, K, N, tb) };
}

static void prepare(kn_stream *s, kn_dtype t)
{
    draw(s, memory.a, t, 1);
    draw(s, memory.b, t, 2);
    draw(s, memory.x, t, 3);
    memset(memory.d, 0, sizeof memory.d);
    memset(memory.sum, 0, sizeof memory.sum);
}

/* The product and the kernels after it, launched one by one. */
static void by_hand(kn_stream *s, kn_matmul_args p)
{
    kn_matmul_args plain = { .dst = p.dst, .a = p.a, .b = p.b, .add = p.add };
    KN_CHECK(KN_LAUNCH(s, KN_K_MATMUL, plain));
    if (p.x.data)
        KN_CHECK(KN_LAUNCH(
            s, KN_K_UNARY_GRAD,
            ((kn_unary_grad_args){ .dx = p.dst, .dy = p.dst, .x = p.x, .kind = p.grad_of })));
    if (!p.sum.data)
        return;
    const int64_t n = p.sum.shape[0];
    kn_array from = p.sum_of_b ? p.b : p.a;
    if (!p.sum_of_b) {
        from.shape[0] = p.a.shape[1], from.shape[1] = p.a.shape[0];
        from.stride[0] = p.a.stride[1], from.stride[1] = p.a.stride[0];
    }
    kn_array to = kn_array_make(p.sum.data, p.sum.dtype, 2, (int64_t[]){ 1, n });
    KN_CHECK(KN_LAUNCH(s, KN_K_REDUCE, ((kn_reduce_args){ to, from, KN_SUM })));
}

static void check_case(kn_stream *s, kn_dtype t, kn_dtype out, int layouts, bool of_b, bool sum)
{
    static place other;
    prepare(s, t);
    kn_matmul_args p = product_of(&memory, t, out, layouts & 1, layouts & 2);
    p.add = sum && layouts & 1;
    if (sum) {
        p.sum = kn_array_make(memory.sum, out, 1, (int64_t[]){ of_b ? N : M });
        p.sum_of_b = of_b;
    } else {
        p.x = matrix(memory.x, t, M, N, layouts & 1);
        p.grad_of = KN_GELU_TANH;
    }
    KN_CHECK(KN_LAUNCH(s, KN_K_MATMUL, p));
    KN_CHECK(kn_stream_sync(s));
    other = memory;
    memset(memory.d, 0, sizeof memory.d);
    memset(memory.sum, 0, sizeof memory.sum);
    by_hand(s, p);
    KN_CHECK(kn_stream_sync(s));
    KN_CHECK(memcmp(&other, &memory, sizeof other) == 0, "%s to %s, layouts %d, %s",
             kn_dtype_name(t), kn_dtype_name(out), layouts,
             !sum   ? "gelu"
             : of_b ? "sum of b"
                    : "sum of a");
    static const place nothing;
    KN_CHECK(!sum || memcmp(memory.sum, nothing.sum, 4) != 0, "a sum was written");
}

KN_TEST(epilogue, parts_have_the_bits_of_two_kernels)
{
    static const kn_dtype types[][2] = {
        { KN_F32, KN_F32 }, { KN_BF16, KN_BF16 }, { KN_F16, KN_F16 },
        { KN_F64, KN_F64 }, { KN_BF16, KN_F32 },
    };
    kn_stream *s = kn_compute_stream(KN_CPU);
    for (int t = 0; t < 5; t++)
        for (int layouts = 0; layouts < 4; layouts++) {
            check_case(s, types[t][0], types[t][1], layouts, false, true);
            check_case(s, types[t][0], types[t][1], layouts, true, true);
            if (types[t][0] == types[t][1])
                check_case(s, types[t][0], types[t][1], layouts, false, false);
        }
}

/* ---- a device with such a provider ----------------------------------------------------------- */

static kn_device_table device;
static kn_device number;
static int whole; /* calls with an epilogue */
static kn_status answer;

static kn_status fused(const void *args)
{
    whole += kn_matmul_has_epilogue(args);
    return kn_matmul_has_epilogue(args) ? answer : KN_DECLINED;
}

static kn_provider both = { .name = "both", .run = { [KN_K_MATMUL] = fused } };

static int providers(const kn_provider *out[KN_MAX_PROVIDERS])
{
    out[0] = &both;
    out[1] = &kn_cpu_reference;
    return 2;
}

static kn_stream *device_stream(const char *name, kn_stream_kind kind)
{
    kn_stream *s = kn_cpu_table.stream_create(name, KN_STREAM_INLINE);
    (void)kind;
    if (s) {
        s->table = &device;
        s->device = number;
    }
    return s;
}

/* The kernels that a product with a sum is. */
static const char *kernels_of(kn_stream *s, const kn_matmul_args *p)
{
    static char names[200];
    OWNED_HOST kn_trace_event *e = NULL;
    names[0] = 0;
    kn_trace_start(8);
    KN_CHECK(kn_launch(s, KN_K_MATMUL, p, sizeof *p) == (answer != KN_FAILED));
    const size_t n = kn_trace_stop(&e);
    for (size_t i = 0; i < n; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s by %s", i ? ", " : "",
                 e[i].what, e[i].provider);
    return names;
}

KN_TEST(epilogue, a_provider_of_both_is_asked_first)
{
    device = kn_cpu_table;
    device.name = "with epilogues";
    device.providers = providers;
    device.stream_create = device_stream;
    number = kn_device_register(&device);
    KN_CHECK(number);
    kn_stream *s = kn_stream_create(number, "compute", KN_STREAM_AUTO);
    KN_CHECK(s);
    prepare(kn_compute_stream(KN_CPU), KN_F32);
    KN_CHECK(kn_stream_sync(kn_compute_stream(KN_CPU)));
    kn_matmul_args p = product_of(&memory, KN_F32, KN_F32, false, false), plain = p;
    p.sum = kn_array_make(memory.sum, KN_F32, 1, (int64_t[]){ N });
    p.sum_of_b = true;
    static const struct {
        bool epilogues;
        kn_status answer;
        int whole;
        const char *kernels;
    } rows[] = {
        { false, KN_DONE, 0, "matmul by reference, reduce by reference" },
        { true, KN_DONE, 1, "matmul by both" },
        { true, KN_DECLINED, 1, "matmul by reference, reduce by reference" },
        { true, KN_FAILED, 1, "" },
    };
    for (int i = 0; i < 4; i++) {
        whole = 0;
        both.epilogues = rows[i].epilogues;
        answer = rows[i].answer;
        const char *ran = kernels_of(s, &p);
        KN_CHECK(strcmp(ran, rows[i].kernels) == 0 && whole == rows[i].whole, "%d: %s", i, ran);
        if (answer == KN_FAILED)
            KN_CHECK_ERROR("matmul: provider both failed");
    }
    answer = KN_DONE;
    KN_CHECK(strcmp(kernels_of(s, &plain), "matmul by reference") == 0, "without an epilogue");
    kn_providers_only("reference");
    KN_CHECK(strcmp(kernels_of(s, &p), rows[0].kernels) == 0, "it may not run");
    kn_providers_only(NULL);
    kn_stream_destroy(s);
    kn_device_unregister(number);
}

KN_TEST(epilogue, costs_are_the_products_and_what_it_moves)
{
    kn_matmul_args p = product_of(&memory, KN_F32, KN_F32, false, false);
    const kn_cost plain = kn_kernel_cost(KN_K_MATMUL, &p);
    p.sum = kn_array_make(memory.sum, KN_F32, 1, (int64_t[]){ N });
    kn_cost more = kn_kernel_cost(KN_K_MATMUL, &p);
    KN_CHECK(more.flops == plain.flops && more.bytes == plain.bytes + 4 * N);
    p.x = matrix(memory.x, KN_F32, M, N, false);
    more = kn_kernel_cost(KN_K_MATMUL, &p);
    KN_CHECK(more.flops == plain.flops && more.bytes == plain.bytes + 4 * N + 4 * M * N);
}
