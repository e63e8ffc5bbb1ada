/* tests/kernels/matmul_test.c: KN_K_MATMUL of the fast providers against sums in double: odd sizes,
 * transposed, strided, batched and broadcast operands, bias, bf16 and f16, empty sums; and that
 * bits repeat over calls and numbers of threads. Failures print the case. */
#include "kernels/memory.h"
#include "kernels/trace.h"
#include "kernels/convert.h"
#include "kernels/cpu/cpu_internal.h"
#include "kernels/kernels.h"
#include "tests/kn_test.h"

static uint32_t rng_state = 12345;

static float next_value(void)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return (float)(int32_t)(rng_state >> 8) * 0x1p-23f - 1.0f;
}

static void set(const kn_array *x, int64_t at, float v)
{
    if (x->dtype == KN_F32)
        ((float *)x->data)[at] = v;
    else if (x->dtype == KN_BF16)
        ((uint16_t *)x->data)[at] = kn_f32_to_bf16(v);
    else
        ((uint16_t *)x->data)[at] = kn_f32_to_f16(v);
}

static double get(const kn_array *x, int64_t at)
{
    if (x->dtype == KN_F32)
        return ((const float *)x->data)[at];
    const uint16_t h = ((const uint16_t *)x->data)[at];
    return x->dtype == KN_BF16 ? kn_bf16_to_f32(h) : kn_f16_to_f32(h);
}

/* The memory order of a matrix. */
typedef enum lie { ROWS, COLUMNS, PADDED, SPREAD, LIES } lie;

/* Like a [B0, B1, R, C] array, a leading dim broadcast (stride 0) where its bit in same is set;
 * all of the memory is filled. */
static kn_array make(kn_dtype t, const int64_t shape[4], lie how, unsigned same)
{
    static const int64_t gap[LIES] = { 0, 0, 3, 5 };
    kn_array x = { .dtype = t, .ndim = 4 };
    memcpy(x.shape, shape, 4 * sizeof *shape);
    const int64_t R = shape[2], C = shape[3], step = how == SPREAD ? 2 : 1;
    x.stride[3] = how == COLUMNS ? R : step;
    x.stride[2] = how == COLUMNS ? 1 : C * step + gap[how];
    const int64_t matrix = (R + 1) * (C + 1) * step + R * gap[how];
    x.stride[1] = same & 2 ? 0 : how == ROWS ? R * C : matrix; /* dense if possible */
    x.stride[0] = same & 1 ? 0 : how == ROWS ? R * C * shape[1] : matrix * shape[1];
    const int64_t all = matrix * (shape[0] + 1) * (shape[1] + 1) + 8;
    x.data = calloc((size_t)all, 4);
    KN_CHECK(x.data != NULL);
    for (int64_t i = 0; i < all; i++)
        set(&x, i, next_value());
    return x;
}

static int64_t offset(const kn_array *x, const int64_t at[4])
{
    int64_t o = 0;
    for (int d = 0; d < 4; d++)
        o += at[d] * x->stride[d];
    return o;
}

static double unit(kn_dtype t)
{
    return t == KN_F32 ? 0x1p-24 : t == KN_BF16 ? 0x1p-8 : 0x1p-11;
}

/* |dst - sum| <= (K + 2) u32 sum|ab| + u |sum| for every element. */
static void check_all(const kn_matmul_args *p, const char *what)
{
    const int64_t *s = p->dst.shape, K = p->a.shape[3];
    for (int64_t i = 0; i < s[0] * s[1] * s[2] * s[3]; i++) {
        const int64_t at[4] = { i / s[3] / s[2] / s[1], i / s[3] / s[2] % s[1], i / s[3] % s[2],
                                i % s[3] };
        double sum = 0, size = 0;
        for (int64_t k = 0; k < K; k++) {
            const double a = get(&p->a, offset(&p->a, (int64_t[]){ at[0], at[1], at[2], k }));
            const double b = get(&p->b, offset(&p->b, (int64_t[]){ at[0], at[1], k, at[3] }));
            sum += a * b;
            size += fabs(a * b);
        }
        if (p->bias.data) {
            sum += get(&p->bias, at[3] * p->bias.stride[0]);
            size += fabs(get(&p->bias, at[3] * p->bias.stride[0]));
        }
        const double found = get(&p->dst, offset(&p->dst, at));
        const double room = (double)(K + 2) * 0x1p-24 * size + unit(p->dst.dtype) * fabs(sum);
        KN_CHECK(fabs(found - sum) <= 1.01 * room + 1e-7,
                 "%s: element %lld,%lld,%lld,%lld is %.9g, not %.9g", what, (long long)at[0],
                 (long long)at[1], (long long)at[2], (long long)at[3], found, sum);
    }
}

static void launch(const kn_matmul_args *p)
{
    KN_CHECK(kn_launch(kn_compute_stream(KN_CPU), KN_K_MATMUL, p, sizeof *p));
}

static void drop(kn_matmul_args *p)
{
    free(p->dst.data);
    free(p->a.data);
    free(p->b.data);
    free(p->bias.data);
}
#define OWNED_CASE __attribute__((cleanup(drop), unused))

typedef struct sizes {
    int64_t B0, B1, M, N, K;
} sizes;

static kn_matmul_args build(sizes s, kn_dtype t, kn_dtype ct, const lie how[3], unsigned same,
                            int bias)
{
    kn_matmul_args p = {
        .dst = make(ct, (int64_t[]){ s.B0, s.B1, s.M, s.N }, how[0], 0),
        .a = make(t, (int64_t[]){ s.B0, s.B1, s.M, s.K }, how[1], same & 3),
        .b = make(t, (int64_t[]){ s.B0, s.B1, s.K, s.N }, how[2], same >> 2),
    };
    if (bias) {
        p.bias = make(bias == 1 ? t : KN_F32, (int64_t[]){ 1, 1, 1, s.N }, ROWS, 0);
        p.bias.ndim = 1, p.bias.shape[0] = s.N, p.bias.stride[0] = 1;
    }
    return p;
}

static const char *describe(char text[160], sizes s, kn_dtype t, kn_dtype ct, const lie how[3],
                            unsigned same, int bias)
{
    snprintf(text, 160, "batch %lldx%lld, %lldx%lldx%lld %s->%s, lies %d%d%d, same %u, bias %d",
             (long long)s.B0, (long long)s.B1, (long long)s.M, (long long)s.N, (long long)s.K,
             kn_dtype_name(t), kn_dtype_name(ct), how[0], how[1], how[2], same, bias);
    return text;
}

static const sizes small[] = {
    { 1, 1, 1, 1, 1 },   { 1, 1, 1, 1, 37 },  { 1, 1, 1, 50, 33 },  { 1, 1, 33, 1, 50 },
    { 1, 1, 4, 131, 9 }, { 1, 1, 7, 33, 5 },  { 1, 1, 13, 17, 19 }, { 1, 1, 65, 47, 66 },
    { 3, 2, 5, 40, 7 },  { 2, 3, 19, 9, 11 }, { 1, 4, 48, 64, 32 }, { 1, 1, 3, 5, 700 },
};

/* Every size, with random dtypes, memory orders, broadcasts and biases. */
static void sweep(int rounds, unsigned seed)
{
    static const kn_dtype types[][2] = {
        { KN_F32, KN_F32 },
        { KN_BF16, KN_BF16 },
        { KN_BF16, KN_F32 },
        { KN_F16, KN_F16 },
    };
    rng_state = seed;
    for (int round = 0; round < rounds; round++) {
        for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
            const uint32_t r = (next_value(), rng_state >> 8);
            const kn_dtype *t = types[r % 8 < 4 ? r % 4 : 0];
            const lie how[3] = { r >> 3 & 3, r >> 5 & 3, r >> 7 & 3 };
            const unsigned same = r >> 9 & 15;
            const int bias = (int)(r >> 13) % 3;
            char text[160];
            describe(text, small[i], t[0], t[1], how, same, bias);
            OWNED_CASE kn_matmul_args p = build(small[i], t[0], t[1], how, same, bias);
            launch(&p);
            check_all(&p, text);
        }
    }
}

KN_TEST(matmul, vector_layer_is_right)
{
    sweep(25, 1);
}

KN_TEST(matmul, onednn_layer_is_right)
{
    kn_providers_only("onednn,reference");
    sweep(25, 2);
    kn_providers_only(NULL);
}

/* More than one block in every direction: a few rows and columns are compared. */
KN_TEST(matmul, large_products_are_right)
{
    static const sizes large[] = { { 1, 1, 1100, 70, 50 },
                                   { 1, 1, 70, 2100, 50 },
                                   { 1, 1, 50, 70, 1300 },
                                   { 1, 1, 64, 50, 1500 } };
    for (size_t i = 0; i < sizeof large / sizeof *large; i++) {
        for (int form = (int)i % kn_one_in(4); form < 4; form += kn_one_in(4)) {
            const lie how[3] = { ROWS, form & 1 ? COLUMNS : ROWS, form & 2 ? COLUMNS : ROWS };
            const kn_dtype t = form == 3 ? KN_BF16 : KN_F32;
            char text[160];
            OWNED_CASE kn_matmul_args p = build(large[i], t, t, how, 0, 1);
            launch(&p);
            check_all(&p, describe(text, large[i], t, t, how, 0, 1));
        }
    }
}

KN_TEST(matmul, empty_sums_and_sizes)
{
    const lie how[3] = { ROWS, ROWS, ROWS };
    for (int bias = 0; bias < 2; bias++) {
        OWNED_CASE kn_matmul_args p =
            build((sizes){ 1, 2, 5, 19, 0 }, KN_F32, KN_F32, how, 0, bias);
        launch(&p);
        check_all(&p, "K = 0");
    }
    const lie turned[3] = { ROWS, ROWS, COLUMNS };
    kn_matmul_args q = build((sizes){ 1, 2, 9, 131, 0 }, KN_F32, KN_F32, turned, 0, 0);
    launch(&q);
    check_all(&q, "K = 0, turned");
    drop(&q);
    kn_matmul_args p = build((sizes){ 1, 1, 0, 8, 8 }, KN_F32, KN_F32, how, 0, 0);
    launch(&p);
    drop(&p);
    KN_CHECK_OK();
}

KN_TEST(matmul, misfits_are_errors)
{
    const lie how[3] = { ROWS, ROWS, ROWS };
    OWNED_CASE kn_matmul_args p = build((sizes){ 1, 1, 4, 8, 6 }, KN_F32, KN_F32, how, 0, 0);
    p.b.shape[2] = 5;
    REFUSED(kn_launch(kn_compute_stream(KN_CPU), KN_K_MATMUL, &p, sizeof p), "matmul");
}

/* The same bits from 1, 2, 3 and 4 threads and from call to call. */
static void check_repeats(sizes s, kn_dtype t, lie la, lie lb)
{
    const lie how[3] = { ROWS, la, lb };
    OWNED_CASE kn_matmul_args p = build(s, t, t, how, 0, 1);
    const size_t bytes = (size_t)kn_array_numel(&p.dst) * kn_dtype_size(t);
    void *first = malloc(bytes);
    KN_CHECK(first != NULL);
    for (int threads = 1; threads <= 4; threads++) {
        for (int call = 0; call < 2; call++) {
            kn_set_threads(threads);
            memset(p.dst.data, 0xff, bytes);
            launch(&p);
            if (threads == 1 && call == 0)
                memcpy(first, p.dst.data, bytes);
            KN_CHECK(memcmp(first, p.dst.data, bytes) == 0,
                     "batch %lld, %lldx%lldx%lld %s differs with %d threads, call %d",
                     (long long)s.B1, (long long)s.M, (long long)s.N, (long long)s.K,
                     kn_dtype_name(t), threads, call);
        }
    }
    free(first);
}

/* most16: multiply-adds of the largest product of 16-bit floats. */
static void repeats(int64_t most16)
{
    static const sizes list[] = {
        { 1, 1, 256, 768, 768 }, { 1, 1, 768, 384, 256 }, { 1, 1, 128, 384, 768 },
        { 1, 1, 65, 128, 768 },  { 1, 1, 1, 768, 768 },   { 1, 1, 768, 1, 768 },
        { 1, 1, 16, 16, 4096 },  { 1, 12, 64, 64, 64 },   { 1, 3, 100, 500, 333 },
    };
    const int before = kn_threads();
    for (int i = 0; i < 4 * (int)(sizeof list / sizeof *list); i += kn_one_in(3)) {
        const sizes z = list[i / 4];
        const int form = i % 4;
        if (form == 3 && z.B0 * z.B1 * z.M * z.N * z.K > most16)
            continue;
        check_repeats(z, form == 3 ? KN_BF16 : KN_F32, form & 1 ? COLUMNS : ROWS,
                      form & 2 ? COLUMNS : ROWS);
    }
    kn_set_threads(before);
}

KN_TEST(matmul, bits_repeat)
{
    repeats(INT64_MAX);
}

KN_TEST(matmul, bits_repeat_through_onednn)
{
    kn_providers_only("onednn,reference");
    repeats(10000000); /* many CPUs have no instructions for them, and the reference is slow */
    kn_providers_only(NULL);
}

/* An element's bits don't depend on its place in a larger product: more than 4 rows and columns
 * from (m, n) on, computed alone, equal those of the whole. */
static void check_cut(kn_dtype t, int64_t m, int64_t n, int64_t rows, int64_t columns)
{
    const lie how[3] = { ROWS, ROWS, ROWS };
    const int64_t size = (int64_t)kn_dtype_size(t), N = 300, K = 700;
    OWNED_CASE kn_matmul_args p = build((sizes){ 1, 1, 200, N, K }, t, t, how, 0, 0);
    launch(&p);
    kn_matmul_args q = p;
    q.a.data = (char *)p.a.data + m * K * size, q.b.data = (char *)p.b.data + n * size;
    q.a.shape[2] = q.dst.shape[2] = rows;
    q.b.shape[3] = q.dst.shape[3] = columns;
    q.dst = make(t, q.dst.shape, ROWS, 0);
    launch(&q);
    for (int64_t i = 0; i < rows; i++)
        KN_CHECK(memcmp((char *)q.dst.data + i * columns * size,
                        (char *)p.dst.data + ((i + m) * N + n) * size,
                        (size_t)(columns * size)) == 0,
                 "%s: row %lld of %lldx%lld from %lld,%lld", kn_dtype_name(t), (long long)i,
                 (long long)rows, (long long)columns, (long long)m, (long long)n);
    free(q.dst.data);
}

KN_TEST(matmul, bits_survive_cuts)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
    for (int i = 0; i < 3; i++) {
        check_cut(types[i], 13, 27, 50, 101);
        check_cut(types[i], 120, 250, 20, 40); /* across the borders of calls of oneDNN */
        check_cut(types[i], 7, 1, 9, 256);
        check_cut(types[i], 3, 0, 30, 17);
    }
}

/* A bf16 product of up to 1024 terms is one chain of multiply-adds in ascending k, also where the
 * CPU multiplies pairs of terms (gemm.h). */
KN_TEST(matmul, bf16_pairs_are_chains)
{
    static const int64_t K[] = { 1, 2, 7, 31, 32, 33, 64, 95, 257, 512, 1023, 1024 };
    static const int64_t M[] = { 5, 12, 25, 270 }, N[] = { 5, 31, 32, 70 };
    if (!kn_cpu_multiplies_pairs())
        KN_SKIP("the CPU or KNAP_ISA has no products of pairs");
    kn_providers_only("avx512,reference"); /* a CPU with AMX asks oneDNN first */
    for (int i = 0; i < 12 * 4 * 4 * 4; i++) {
        const lie how[3] = { ROWS, i & 1 ? COLUMNS : PADDED, i & 2 ? COLUMNS : ROWS };
        const sizes z = { 1, 1, M[i / 4 % 4], N[i / 16 % 4], K[i / 64] };
        kn_matmul_args p = build(z, KN_BF16, KN_F32, how, 0, 0);
        launch(&p);
        for (int64_t m = 0; m < z.M; m++)
            for (int64_t n = 0; n < z.N; n++) {
                float sum = 0;
                for (int64_t k = 0; k < z.K; k++)
                    sum = fmaf((float)get(&p.a, m * p.a.stride[2] + k * p.a.stride[3]),
                               (float)get(&p.b, k * p.b.stride[2] + n * p.b.stride[3]), sum);
                KN_CHECK((float)get(&p.dst, m * p.dst.stride[2] + n) == sum,
                         "case %d: element %lld,%lld of %lld x %lld, K %lld", i, (long long)m,
                         (long long)n, (long long)z.M, (long long)z.N, (long long)z.K);
            }
        drop(&p);
    }
    kn_providers_only(NULL);
}

/* A matrix by its own transpose has the bits of its product with a copy of that. */
KN_TEST(matmul, bits_of_gram_matrices)
{
    static const int64_t size[][2] = { { 1, 5 },    { 7, 3 },    { 64, 300 },
                                       { 100, 64 }, { 270, 33 }, { 301, 600 } };
    const int before = kn_threads();
    for (int i = 0; i < 6 * 2 * 2 * 3; i++) {
        const int64_t M = size[i % 6][0], K = size[i % 6][1];
        const kn_dtype t = i / 6 % 2 ? KN_BF16 : KN_F32;
        const lie how[3] = { i / 12 % 2 ? PADDED : ROWS, i / 24 % 2 ? COLUMNS : ROWS, COLUMNS };
        kn_matmul_args p = build((sizes){ 1, 2, M, M, K }, t, KN_F32, how, 0, 0), q = p;
        kn_set_threads(1 + i / 24);
        for (int64_t b = 0; b < 2; b++)
            for (int64_t m = 0; m < M; m++)
                for (int64_t k = 0; k < K; k++)
                    set(&p.b, offset(&p.b, (int64_t[]){ 0, b, k, m }),
                        (float)get(&p.a, offset(&p.a, (int64_t[]){ 0, b, m, k })));
        launch(&p);
        q.b = q.a;
        q.b.shape[2] = K, q.b.shape[3] = M;
        q.b.stride[2] = q.a.stride[3], q.b.stride[3] = q.a.stride[2];
        q.dst = make(KN_F32, p.dst.shape, how[0], 0);
        launch(&q);
        for (int64_t b = 0; b < 2; b++)
            for (int64_t m = 0; m < M; m++)
                for (int64_t n = 0; n < M; n++) {
                    const int64_t at = offset(&p.dst, (int64_t[]){ 0, b, m, n });
                    KN_CHECK(memcmp((float *)q.dst.data + at, (float *)p.dst.data + at,
                                    sizeof(float)) == 0,
                             "case %d: element %lld,%lld of %lld, K %lld", i, (long long)m,
                             (long long)n, (long long)M, (long long)K);
                }
        free(q.dst.data);
        drop(&p);
    }
    kn_set_threads(before);
}

/* A product has the bits that it has among many. */
KN_TEST(matmul, bits_survive_cut_batches)
{
    static const int64_t M[] = { 2, 4, 7, 32 }, N[] = { 1, 3, 17 }, K[] = { 1, 60, 257, 600 };
    for (int i = 0; i < 4 * 3 * 4 * 4; i++) {
        const lie how[3] = { ROWS, i & 1 ? COLUMNS : ROWS, ROWS };
        const sizes z = { 1, 3, M[i / 4 % 4], N[i / 16 % 3], K[i / 48] };
        kn_matmul_args p = build(z, KN_F32, KN_F32, how, 0, 0), q = p;
        p.add = q.add = i & 2;
        q.dst = make(KN_F32, q.dst.shape, ROWS, 0);
        memcpy(q.dst.data, p.dst.data, (size_t)(3 * z.M * z.N) * sizeof(float));
        launch(&p);
        q.a.shape[1] = q.b.shape[1] = q.dst.shape[1] = 1;
        for (int b = 0; b < 3; b++) {
            launch(&q);
            q.a.data = (float *)q.a.data + q.a.stride[1];
            q.b.data = (float *)q.b.data + q.b.stride[1];
            q.dst.data = (float *)q.dst.data + z.M * z.N;
        }
        q.dst.data = (float *)q.dst.data - 3 * z.M * z.N;
        KN_CHECK(memcmp(q.dst.data, p.dst.data, (size_t)(3 * z.M * z.N) * sizeof(float)) == 0,
                 "%lldx%lldx%lld of case %d", (long long)z.M, (long long)z.N, (long long)z.K, i);
        free(q.dst.data);
        drop(&p);
    }
}

/* The same numbers at other addresses give the same bits. */
KN_TEST(matmul, bits_survive_moves)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
    const lie how[3] = { ROWS, ROWS, ROWS };
    for (int i = 0; i < 3; i++) {
        const int64_t size = (int64_t)kn_dtype_size(types[i]);
        OWNED_CASE kn_matmul_args p =
            build((sizes){ 1, 1, 40, 72, 96 }, types[i], types[i], how, 0, 1);
        const size_t a = (size_t)(40 * 96 * size), b = (size_t)(96 * 72 * size),
                     c = (size_t)(40 * 72 * size), bias = (size_t)(72 * size);
        launch(&p);
        for (int64_t move = 1; move < 16; move += 2) {
            kn_matmul_args q = p;
            OWNED_BYTES char *room = malloc(a + b + c + bias + 256);
            KN_CHECK(room != NULL);
            q.a.data = room + move * size;
            q.b.data = (char *)q.a.data + a + (size_t)((move + 1) * size);
            q.bias.data = (char *)q.b.data + b;
            q.dst.data = (char *)q.bias.data + bias;
            memcpy(q.a.data, p.a.data, a);
            memcpy(q.b.data, p.b.data, b);
            memcpy(q.bias.data, p.bias.data, bias);
            launch(&q);
            KN_CHECK(memcmp(q.dst.data, p.dst.data, c) == 0, "%s moved by %lld elements",
                     kn_dtype_name(types[i]), (long long)move);
        }
    }
}

/* The reference computes no product of a GPT, for any dtypes and bias. */
KN_TEST(matmul, hot_shapes_run_fast)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
    const lie how[][3] = { { ROWS, ROWS, ROWS }, { ROWS, ROWS, COLUMNS }, { ROWS, COLUMNS, ROWS } };
    for (int i = 0; i < 3 * 3 * 3 * 2; i += kn_one_in(5)) {
        const kn_dtype t = types[i % 3], ct = i / 27 ? KN_F32 : t;
        const int form = i / 3 % 3, bias = i / 9 % 3;
        char text[160];
        const sizes s = { 1, 1, 96, 128, 64 };
        OWNED_CASE kn_matmul_args p = build(s, t, ct, how[form], 0, bias);
        kn_trace_start(4);
        launch(&p);
        check_all(&p, describe(text, s, t, ct, how[form], 0, bias));
        kn_trace_event *events = NULL;
        const size_t n = kn_trace_stop(&events);
        KN_CHECK(n == 1 && strcmp(events[0].provider, "reference") != 0, "%s ran in %s", text,
                 n ? events[0].provider : "nothing");
        kn_host_free(events);
    }
}

/* Nor products that oneDNN declines while it is fast in others: neither rows nor columns dense. */
KN_TEST(matmul, spread_products_run_fast)
{
    static const kn_dtype types[] = { KN_BF16, KN_F16 };
    for (int i = 0; i < 6; i++) {
        const lie how[3] = { i / 2 == 0 ? SPREAD : ROWS, i / 2 == 1 ? SPREAD : ROWS,
                             i / 2 == 2 ? SPREAD : ROWS };
        OWNED_CASE kn_matmul_args p =
            build((sizes){ 1, 1, 96, 128, 64 }, types[i % 2], types[i % 2], how, 0, 1);
        kn_trace_start(4);
        launch(&p);
        kn_trace_event *events = NULL;
        const size_t n = kn_trace_stop(&events);
        KN_CHECK(n == 1 && strcmp(events[0].provider, "reference") != 0, "%s form %d ran in %s",
                 kn_dtype_name(types[i % 2]), i / 2, n ? events[0].provider : "nothing");
        kn_host_free(events);
    }
}
