/* bench/collectives.c: GB/s of the collectives that steps make, on a device's ranks.
 *
 *   bench_collectives [--ranks 8] [--device cuda] [--kib 1024] [--mib 256] [--times 20]
 *                     [--dtype f32]
 *
 * A row a collective, dtype and size, from --kib to --mib, each four times the last. Sizes are
 * those of all ranks' parts together. GB/s are nccl-tests' "busbw": size x (n - 1) / n over the
 * time of one call (all_reduce: twice that), so a row of f32 stands beside all_gather_perf,
 * reduce_scatter_perf and all_reduce_perf -d float as it is. Reductions of bf16 are exchanges and a
 * sum in rank order; NCCL sends the same bytes as for its own.
 *
 * Calls are issued one after another on a stream, below 1 MiB ten times --times; the time is the
 * slowest rank's. */
#include "bench/args.h"
#include "kernels/kernels_internal.h"
#include "knap.h"

typedef struct bench {
    kn_comm *w;
    kn_stream *s;
    kn_memory *memory;
    kn_device device;
    int ranks, times;
    char *part, *whole; /* of one rank, of all */
} bench;

typedef bool (*call_fn)(const bench *b, int64_t count, kn_dtype t);

static bool gather(const bench *b, int64_t count, kn_dtype t)
{
    return kn_all_gather(b->w, b->whole, b->part, count, t, b->s, "gather");
}

/* Onto f32, as gradients are. */
static bool scatter(const bench *b, int64_t count, kn_dtype t)
{
    return kn_reduce_scatter(b->w, b->part, NULL, b->whole, count, KN_F32, t, b->s, "scatter");
}

static bool reduce(const bench *b, int64_t count, kn_dtype t)
{
    return kn_all_reduce(b->w, b->whole, NULL, b->whole, count * b->ranks, t, t, b->s, "reduce");
}

/* Seconds of one call on the slowest rank; 0 with an error. */
static double measure(const bench *b, call_fn call, int64_t count, kn_dtype t)
{
    const bool small = count * b->ranks * (int64_t)kn_dtype_size(t) < 1 << 20;
    const int times = b->times * (small ? 10 : 1);
    double seconds = 0;
    for (int round = 0; round < 2; round++) { /* the first connects, and grows scratch */
        if (!kn_barrier(b->w, b->s, "together") || !kn_stream_sync(b->s))
            return 0;
        double begin = kn_now();
        for (int i = 0; i < (round ? times : 3); i++)
            if (!call(b, count, t))
                return 0;
        if (!kn_stream_sync(b->s))
            return 0;
        seconds = (kn_now() - begin) / (round ? times : 3);
    }
    kn_stream *host = kn_compute_stream(KN_CPU);
    float worst = (float)seconds;
    return kn_all_reduce_max(b->w, &worst, 1, host, "slowest") && kn_stream_sync(host)
               ? (double)worst
               : 0;
}

static bool row(const bench *b, const char *name, call_fn call, int64_t bytes, kn_dtype t)
{
    int64_t count = bytes / b->ranks / (int64_t)kn_dtype_size(t);
    double seconds = measure(b, call, count, t);
    double moved = (double)bytes * (b->ranks - 1) / b->ranks * (call == reduce ? 2 : 1);
    if (seconds > 0 && kn_rank(b->w) == 0)
        printf("%-14s %-5s %8.0f KiB %10.1f us %8.2f GB/s\n", name, kn_dtype_name(t),
               (double)bytes / (1 << 10), 1e6 * seconds, moved / seconds / 1e9);
    return seconds > 0;
}

/* only: a dtype's name, or NULL. */
static bool rows(const bench *b, int64_t least, int64_t most, const char *only)
{
    static const struct {
        const char *name;
        call_fn call;
        kn_dtype dtype;
    } all[] = { { "all_gather", gather, KN_F32 },      { "all_gather", gather, KN_BF16 },
                { "reduce_scatter", scatter, KN_F32 }, { "reduce_scatter", scatter, KN_BF16 },
                { "all_reduce", reduce, KN_F32 },      { "all_reduce", reduce, KN_BF16 } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int64_t bytes = least; bytes <= most; bytes *= 4)
            if ((!only || strcmp(only, kn_dtype_name(all[i].dtype)) == 0) &&
                !row(b, all[i].name, all[i].call, bytes, all[i].dtype))
                return false;
    return true;
}

/* Zeros, so that sums stay finite. */
static char *zeros(const bench *b, int64_t bytes)
{
    char *p = kn_take(b->memory, (size_t)bytes, KN_MEM_DATA);
    kn_fill_args args = { .dst = kn_array_make(p, KN_F32, 1, &(int64_t){ bytes / 4 }) };
    return p && KN_LAUNCH(b->s, KN_K_FILL, args) ? p : NULL;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "GB/s of the collectives that steps make, as nccl-tests count them.\n"
               "  bench_collectives [--ranks N] [--device cpu|cuda] [--kib N] [--mib N]\n"
               "    [--times N] [--dtype f32|bf16] [--threads N]",
               0);
    two_ranks(argc, argv);
    const char *device = word(argc, argv, "--device", "cuda");
    const char *only = word(argc, argv, "--dtype", NULL);
    const bool cpu = strcmp(device, "cpu") == 0;
    const int64_t most = (int64_t)number(argc, argv, "--mib", 256) << 20;
    const int64_t least = (int64_t)number(argc, argv, "--kib", 1024) << 10;
    bench b = { .device = cpu ? KN_CPU : KN_CUDA, .w = kn_init(&argc, &argv) };
    b.ranks = kn_comm_size(b.w);
    b.times = (int)number(argc, argv, "--times", 20);
    if (!cpu && strcmp(device, "cuda") != 0)
        kn_fail("--device %s is neither cpu nor cuda", device);
    if (only && strcmp(only, "f32") != 0 && strcmp(only, "bf16") != 0)
        kn_fail("--dtype %s is neither f32 nor bf16", only);
    if (least < 1 || least > most || b.times < 1)
        kn_fail("--kib and --times are at least 1, and --kib is at most --mib (in KiB)");
    b.s = kn_ok() ? kn_compute_stream(b.device) : NULL;
    b.memory = b.s ? kn_comm_memory_on(b.w, b.device) : NULL;
    b.whole = b.memory ? zeros(&b, most) : NULL;
    b.part = b.whole ? zeros(&b, 2 * most) : NULL; /* bf16 is summed onto f32 */
    if (b.part) {
        if (kn_rank(b.w) == 0)
            printf("%d ranks, %s, %s, NCCL %s\n", b.ranks, cpu ? "cpu" : "cuda", b.memory->name,
                   kn_comm_nccl_version());
        rows(&b, least, most, only);
    }
    return kn_finish();
}
