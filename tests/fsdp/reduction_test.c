/* tests/fsdp/reduction_test.c: reductions by themselves, without a unit: both stages, accumulators,
 * compression. */
#include "tests/fsdp/net.h"
#include "kernels/philox.h"

enum { COUNT = 1003 };

/* A bucket, with the fields that hooks read. */
typedef struct bench {
    kn_unit unit;
    kn_bucket bucket;
    kn_bucket_param param;
} bench;

static void bench_init(bench *b, kn_comm *world)
{
    *b = (bench){ 0 };
    b->unit.comm = world;
    b->unit.size = kn_comm_size(world);
    b->bucket.unit = &b->unit;
}

static float bf16(float x)
{
    return kn_bf16_to_f32(kn_f32_to_bf16(x));
}

static float f16(float x)
{
    return kn_f16_to_f32(kn_f32_to_f16(x));
}

static float same(float x)
{
    return x;
}

/* ---- the default and the plain compressors --------------------------------------------------- */

typedef struct job {
    kn_comm_hook hook;
    float (*sent)(float); /* the compressed form of a value */
} job;

/* acc + the ranks' values of element i, in order. */
static float added(int n, int64_t i, float acc, float (*sent)(float))
{
    for (int r = 0; r < n; r++)
        acc += sent((float)value(r, i));
    return acc;
}

static void shards_only(kn_comm *world, void *arg)
{
    const job *j = arg;
    int n = kn_comm_size(world), rank = kn_rank(world);
    bench b;
    bench_init(&b, world);
    float *src = malloc((size_t)(n * COUNT) * sizeof *src), dst[COUNT];
    for (int64_t i = 0; i < n * COUNT; i++)
        src[i] = (float)value(rank, i);
    for (int i = 0; i < COUNT; i++)
        dst[i] = 0.25f * (float)i;
    kn_grad_reduction r = { .unit = "u",
                            .shards = world,
                            .stream = kn_compute_stream(KN_CPU),
                            .dst = dst,
                            .acc = dst,
                            .src = src,
                            .count = COUNT,
                            .dst_dtype = KN_F32,
                            .src_dtype = KN_F32,
                            ._bucket = &b.bucket };
    KN_CHECK(j->hook(&r, NULL));
    for (int i = 0; i < COUNT; i++) {
        float want = added(n, (int64_t)rank * COUNT + i, 0.25f * (float)i, j->sent);
        KN_CHECK(memcmp(&dst[i], &want, 4) == 0, "element %d: %.9g, expected %.9g", i,
                 (double)dst[i], (double)want);
    }
    int64_t with = kn_ledger_read().live[KN_MEM_COMM];
    int64_t scratch = b.bucket.scratch.count ? (int64_t)b.bucket.scratch.list[0].bytes : 0;
    KN_CHECK(scratch == (j->sent == same ? 0 : n * COUNT * 2), "scratch of %lld",
             (long long)scratch);
    kn_reduction_free_scratch(&b.bucket);
    int64_t freed = with - kn_ledger_read().live[KN_MEM_COMM];
    KN_CHECK(freed == kn_bucket_bytes(scratch, KN_U8), "%lld bytes freed", (long long)freed);
    free(src);
}

/* Every rank is a replica; then a world of one rank. */
static void replicas_only(kn_comm *world, void *arg)
{
    const job *j = arg;
    int n = kn_comm_size(world);
    bench b;
    bench_init(&b, world);
    float src[COUNT], dst[COUNT];
    kn_grad_reduction r = { .unit = "u",
                            .stream = kn_compute_stream(KN_CPU),
                            .dst = dst,
                            .src = src,
                            .count = COUNT,
                            .dst_dtype = KN_F32,
                            .src_dtype = KN_F32,
                            ._bucket = &b.bucket };
    for (int alone = 0; alone < 2; alone++) {
        for (int i = 0; i < COUNT; i++)
            src[i] = (float)value(alone ? 0 : kn_rank(world), i);
        r.replicas = alone ? NULL : world;
        r.acc = alone ? dst : NULL; /* a second round on top of the first */
        float before[COUNT];
        memcpy(before, dst, sizeof dst);
        KN_CHECK(j->hook(&r, NULL));
        for (int i = 0; i < COUNT; i++) {
            float first = alone ? before[i] : j->sent((float)value(0, i)), want = first;
            want = alone ? first + j->sent((float)value(0, i)) : want;
            for (int k = 1; k < n && !alone; k++)
                want += j->sent((float)value(k, i));
            KN_CHECK(memcmp(&dst[i], &want, 4) == 0, "alone %d, element %d: %.9g, expected %.9g",
                     alone, i, (double)dst[i], (double)want);
        }
    }
    kn_reduction_free_scratch(&b.bucket);
}

/* Four ranks, 2 x 2: a round that stays in the shard group, then one that reaches the replicas. */
static void both_stages(kn_comm *world, void *arg)
{
    const job *j = arg;
    int rank = kn_rank(world), shard = rank % 2, replica = rank / 2;
    kn_comm *shards = kn_comm_split(world, replica, rank, "shards"),
            *replicas = kn_comm_split(world, shard, rank, "replicas");
    bench b;
    bench_init(&b, world);
    float src[2 * COUNT], dst[COUNT], partial[COUNT];
    for (int i = 0; i < 2 * COUNT; i++)
        src[i] = (float)value(rank, i);
    kn_grad_reduction r = { .unit = "u",
                            .shards = shards,
                            .stream = kn_compute_stream(KN_CPU),
                            .src = src,
                            .count = COUNT,
                            .dst_dtype = KN_F32,
                            .src_dtype = KN_F32,
                            .partial = partial,
                            ._bucket = &b.bucket };
    KN_CHECK(j->hook(&r, NULL), "first round");
    r.replicas = replicas;
    r.dst = dst;
    r.partial_acc = partial;
    KN_CHECK(j->hook(&r, NULL), "second round");
    kn_reduction_free_scratch(&b.bucket);
    for (int i = 0; i < COUNT; i++) {
        float sum[2];
        for (int k = 0; k < 2; k++) {
            float x = j->sent((float)value(2 * k, (int64_t)shard * COUNT + i)),
                  y = j->sent((float)value(2 * k + 1, (int64_t)shard * COUNT + i));
            sum[k] = x + y;
            sum[k] = sum[k] + x;
            sum[k] = sum[k] + y;
        }
        float want = j->sent(sum[0]) + j->sent(sum[1]);
        KN_CHECK(memcmp(&dst[i], &want, 4) == 0, "element %d: %.9g, expected %.9g", i,
                 (double)dst[i], (double)want);
    }
}

static void on_some_ranks(rank_body body, kn_comm_hook hook, float (*sent)(float))
{
    job j = { hook, sent };
    by_processes("123", body, &j);
    by_threads("13", body, &j);
}

KN_TEST(reduction, default_adds_in_order)
{
    job j = { kn_reduce_default, same };
    on_some_ranks(shards_only, kn_reduce_default, same);
    on_some_ranks(replicas_only, kn_reduce_default, same);
    by_processes("4", both_stages, &j);
}

KN_TEST(reduction, bf16_and_f16_round_what_is_sent)
{
    job b = { kn_hook_bf16, bf16 }, h = { kn_hook_f16, f16 };
    on_some_ranks(shards_only, kn_hook_bf16, bf16);
    on_some_ranks(replicas_only, kn_hook_bf16, bf16);
    by_processes("4", both_stages, &b);
    on_some_ranks(shards_only, kn_hook_f16, f16);
    by_processes("4", both_stages, &h);
}

/* ---- stochastic rounding --------------------------------------------------------------------- */

/* One parameter, name, whole on this rank. */
static bool stochastic_in(const char *unit, const char *name, uint64_t *seed, const float *src,
                          float *dst, int64_t n)
{
    bench b;
    kn_layout_param whole = { 1, &n, 0 };
    bench_init(&b, NULL);
    b.param.name = (char *)(uintptr_t)name;
    b.bucket.param = &b.param;
    if (!kn_layout_make(&b.bucket.layout, KN_LAYOUT_PER_PARAM, &whole, 1, 1))
        return false;
    int64_t shard = b.bucket.layout.shard; /* n and padding */
    float *from = calloc((size_t)shard, sizeof *from), *to = calloc((size_t)shard, sizeof *to);
    memcpy(from, src, (size_t)n * sizeof *from);
    kn_grad_reduction r = { .unit = unit,
                            .stream = kn_compute_stream(KN_CPU),
                            .dst = to,
                            .src = from,
                            .count = shard,
                            .dst_dtype = KN_F32,
                            .src_dtype = KN_F32,
                            ._bucket = &b.bucket };
    bool ok = kn_hook_bf16_stochastic(&r, seed);
    kn_reduction_free_scratch(&b.bucket);
    kn_layout_free(&b.bucket.layout);
    memcpy(dst, to, (size_t)n * sizeof *dst);
    free(from);
    free(to);
    return ok;
}

static bool stochastic(const char *name, uint64_t *seed, const float *src, float *dst, int64_t n)
{
    return stochastic_in("u", name, seed, src, dst, n);
}

KN_TEST(reduction, stochastic_rounding_is_unbiased)
{
    enum { N = 40000 };
    OWNED_BYTES float *src = malloc(N * sizeof *src), *dst = malloc(N * sizeof *dst);
    const float at[] = { 1 + 1 / 512.0f, -3 - 1 / 1024.0f, 1e-3f, 1.5f, 0, 123.456f };
    for (int k = 0; k < 6; k++) {
        for (int i = 0; i < N; i++)
            src[i] = at[k];
        uint64_t seed = 5;
        KN_CHECK(stochastic("u", &seed, src, dst, N));
        uint32_t u = kn_f32_bits(at[k]);
        float low = kn_f32_from_bits(u & 0xffff0000),
              high = kn_f32_from_bits((u & 0xffff0000) + 0x10000);
        double sum = 0, p = (double)(u & 0xffff) / 65536;
        int ups = 0;
        for (int i = 0; i < N; i++) {
            KN_CHECK(dst[i] == low || dst[i] == high, "%g became %g", (double)at[k],
                     (double)dst[i]);
            ups += dst[i] != low;
            sum += (double)dst[i];
        }
        double deviation = sqrt(N * p * (1 - p)); /* of a binomial */
        KN_CHECK(fabs(ups - N * p) <= 5 * deviation, "%g: %d of %d away from zero, expected %g",
                 (double)at[k], ups, N, N * p);
        KN_CHECK(fabs(sum / N - (double)at[k]) <=
                     5 * deviation / N * fabs((double)(high - low)) + 1e-12,
                 "mean of %.9g is %.9g", (double)at[k], sum / N);
    }
    const float special[] = { INFINITY, -INFINITY, NAN, -0.0f };
    KN_CHECK(stochastic("u", NULL, special, dst, 4));
    KN_CHECK(dst[0] == INFINITY && dst[1] == -INFINITY && isnan(dst[2]) && signbit(dst[3]));
}

KN_TEST(reduction, stochastic_rounding_repeats_its_bits)
{
    enum { N = 1000 };
    float src[N], a[N], b[N];
    uint64_t five = 5, six = 6;
    for (int i = 0; i < N; i++)
        src[i] = (float)value(0, i);
    KN_CHECK(stochastic("u", &five, src, a, N) && stochastic("u", &five, src, b, N));
    KN_CHECK(memcmp(a, b, sizeof a) == 0, "the same call gives other bits");
    KN_CHECK(stochastic("u", &six, src, b, N) && memcmp(a, b, sizeof a) != 0, "the seed");
    KN_CHECK(stochastic("v", &five, src, b, N) && memcmp(a, b, sizeof a) != 0, "the parameter");
    KN_CHECK(stochastic_in("other", "u", &five, src, b, N) && memcmp(a, b, sizeof a) == 0,
             "how parameters are dealt to units");
    kn_set_step(kn_get_step() + 1);
    KN_CHECK(stochastic("u", &five, src, b, N) && memcmp(a, b, sizeof a) != 0, "the step");
    kn_seed(5);
    KN_CHECK(stochastic("u", &five, src, a, N) && stochastic("u", NULL, src, b, N));
    KN_CHECK(memcmp(a, b, sizeof a) == 0, "the seed of the run is the default");
}
