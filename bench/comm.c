/* bench/comm.c: collectives among local ranks beside the memory copies they need.
 *
 *   bench_comm [--ranks 2] [--mib 28] [--times 40]
 *
 * The floor of a row is plain copying: by every rank at once, between buffers of the same kind,
 * with as many threads, alternating with the collective in the same run. With n ranks and S = mib /
 * n, a rank must at least copy
 *
 *   all_gather, own shard in place      (n - 1) S     the others' shards
 *   all_gather, own shard elsewhere      n S
 *   reduce_scatter                      (n + 1) S / 2 reads n slices, writes one; a copy reads and
 *                                                     writes each byte
 *   reduce_scatter with accumulator     (n + 2) S / 2
 *   all_reduce                          (n + 1) S / 2 + (n - 1) S
 *   staged (private buffers)            as above, plus every byte sent: + S or + n S
 *
 * A time is that of the slowest rank, from a barrier to the end of the call; the table has medians.
 * The last line is the cost of the contract, which compares the collectives of all ranks. Goal: at
 * most 1 % of a step of 100 ms with 100 calls, so 10 us a call. */
#include "bench/args.h"
#include "bench/times.h"
#include "kernels/trace.h"
#include "comm/comm_internal.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

#define GOAL 1.25

typedef struct bench {
    kn_comm *w;
    kn_stream *s;
    int n, rank, times;
    int64_t count;                         /* f32 elements of a shard */
    int64_t bytes;                         /* copied for the floor */
    float *full, *shard, *sum, *from, *to; /* shared: n shards, one, one; for the floor */
    float *private_full, *private_shard, *private_in;
} bench;

typedef bool (*call_fn)(bench *b);

/* ---- the collectives ------------------------------------------------------------------------- */

static bool gather_in_place(bench *b)
{
    return kn_all_gather(b->w, b->full, b->full + b->rank * b->count, b->count, KN_F32, b->s, NULL);
}

static bool gather(bench *b)
{
    return kn_all_gather(b->w, b->full, b->shard, b->count, KN_F32, b->s, NULL);
}

static bool gather_private(bench *b)
{
    return kn_all_gather(b->w, b->private_full, b->private_shard, b->count, KN_F32, b->s, NULL);
}

static bool scatter(bench *b)
{
    return kn_reduce_scatter(b->w, b->sum, NULL, b->full, b->count, KN_F32, KN_F32, b->s, NULL);
}

static bool scatter_onto(bench *b)
{
    return kn_reduce_scatter(b->w, b->sum, b->shard, b->full, b->count, KN_F32, KN_F32, b->s, NULL);
}

static bool scatter_private(bench *b)
{
    return kn_reduce_scatter(b->w, b->private_shard, NULL, b->private_in, b->count, KN_F32, KN_F32,
                             b->s, NULL);
}

static bool reduce_all(bench *b)
{
    return kn_all_reduce(b->w, b->full, NULL, b->full, b->count * b->n, KN_F32, KN_F32, b->s, NULL);
}

/* ---- measuring ------------------------------------------------------------------------------- */

static void copy_pages(const void *ctx, int64_t begin, int64_t end)
{
    const bench *b = ctx;
    int64_t from = begin * 4096, to = end * 4096 < b->bytes ? end * 4096 : b->bytes;
    memcpy((char *)b->to + from, (const char *)b->from + from, (size_t)(to - from));
}

/* The floor: copies bytes within this rank's shared memory, by all its threads. */
static void copy(bench *b, int64_t bytes)
{
    b->bytes = bytes;
    kn_each_range(kn_threads(), (bytes + 4095) / 4096, copy_pages, b);
}

/* Seconds of the slowest rank. */
static float timed(bench *b, call_fn call, int64_t bytes)
{
    if (!kn_barrier(b->w, b->s, NULL))
        return 0;
    double begin = kn_now();
    if (call)
        call(b);
    else
        copy(b, bytes);
    float t = (float)(kn_now() - begin);
    kn_all_reduce_max(b->w, &t, 1, b->s, NULL);
    return t;
}

static void row(bench *b, const char *what, call_fn call, double shards, bool goal)
{
    enum { MOST = 1000 };
    double op[MOST], floor[MOST];
    int64_t bytes = (int64_t)(shards * (double)b->count * 4);
    for (int i = -3; i < b->times; i++) {
        double a = timed(b, call, 0), c = timed(b, NULL, bytes);
        if (i >= 0) {
            op[i] = a;
            floor[i] = c;
        }
    }
    if (!kn_ok() || b->rank != 0)
        return;
    double t = median_of(op, b->times), f = median_of(floor, b->times);
    printf("%-34s %8.3f ms  best %7.3f   copies %6.1f MiB %8.3f ms  best %7.3f   ratio %.2f%s\n",
           what, t * 1e3, op[0] * 1e3, (double)bytes / (1 << 20), f * 1e3, floor[0] * 1e3, t / f,
           !goal           ? ""
           : t / f <= GOAL ? "  goal 1.25: met"
                           : "  goal 1.25: MISSED");
    fflush(stdout);
}

/* ---- set-up ---------------------------------------------------------------------------------- */

static float *filled(kn_memory *m, int64_t count)
{
    float *p = kn_take(m, (size_t)count * sizeof *p, KN_MEM_DATA);
    for (int64_t i = 0; p && i < count; i++)
        p[i] = (float)(i % 1000);
    return p;
}

/* Times the contract's part of one call. */
static void contract(const bench *b)
{
    enum { CALLS = 100000, TIMES = 5 };
    static kn_comm_log log;
    kn_comm c = { .family = &c, .log = &log, .name = "gather" };
    kn_comm_call call = { .kind = KN_CALL_ALL_GATHER,
                          .dst_dtype = KN_F32,
                          .src_dtype = KN_F32,
                          .count = b->count,
                          .label = "transformer.h.11" };
    double best = INFINITY;
    for (int k = 0; k < TIMES; k++) {
        double begin = kn_now();
        for (int i = 0; i < CALLS; i++)
            kn_comm_note_call(&c, &call);
        best = fmin(best, (kn_now() - begin) / CALLS);
    }
    printf("the contract: %.0f ns a call\n", best * 1e9);
}

static bool prepare(bench *b)
{
    kn_memory *shared = kn_comm_memory(b->w), *own = kn_device_memory(KN_CPU);
    int64_t all = b->count * b->n;
    b->full = filled(shared, all);
    b->shard = filled(shared, b->count);
    b->sum = filled(shared, b->count);
    b->from = filled(shared, 4 * all);
    b->to = filled(shared, 4 * all);
    b->private_full = filled(own, all);
    b->private_in = filled(own, all);
    b->private_shard = filled(own, b->count);
    return kn_ok();
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Collectives among local ranks beside the memory copies they need.\n"
               "  bench_comm [--ranks N] [--threads N] [--mib N] [--times N]",
               0);
    two_ranks(argc, argv);
    kn_comm *w = kn_init(&argc, &argv);
    bench b = { .w = w, .s = kn_compute_stream(KN_CPU), .n = kn_comm_size(w), .rank = kn_rank(w) };
    long mib = number(argc, argv, "--mib", 28), times = number(argc, argv, "--times", 40);
    b.times = (int)(times < 1 ? 1 : times > 1000 ? 1000 : times);
    b.count = (int64_t)(mib < 1 ? 1 : mib) * (1 << 18) / b.n;
    if (kn_ok() && prepare(&b)) {
        double n = b.n;
        if (b.rank == 0)
            printf("%d ranks, %d threads each, %ld MiB, %s kernels\n", b.n, kn_threads(), mib,
                   kn_cpu_isa());
        row(&b, "all_gather, in place", gather_in_place, n - 1, true);
        row(&b, "all_gather, own shard elsewhere", gather, n, true);
        row(&b, "reduce_scatter", scatter, (n + 1) / 2, true);
        row(&b, "reduce_scatter with accumulator", scatter_onto, (n + 2) / 2, true);
        row(&b, "all_reduce", reduce_all, (n + 1) / 2 + n - 1, false);
        row(&b, "all_gather, private, staged", gather_private, n + 1, false);
        row(&b, "reduce_scatter, private, staged", scatter_private, (n + 1) / 2 + n, false);
        if (b.rank == 0)
            contract(&b);
    }
    return kn_finish();
}
