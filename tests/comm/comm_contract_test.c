/* tests/comm/comm_contract_test.c: a rank that breaks the collective contract in any way is found
 * before anything hangs; a rank that doesn't arrive is named in time. */
#include "tests/comm/comm_test.h"
#include "comm/comm_internal.h"
#include <sys/mman.h>

/* Rank 1's deviation from the calls of the other ranks. */
typedef enum wrong {
    OTHER_COMM,    /* a reduction on "reduce" where the others gather on "gather" */
    OTHER_ORDER,   /* the same two calls in the opposite order, both inline */
    OTHER_STREAMS, /* the same, on worker streams, which don't block the program */
    SKIPS_ONE,     /* not the first gather */
    EARLIER_THERE, /* differs on "gather", found at the next call on the world */
    WORLD_BEFORE,  /* calls on the world before its group, the others after */
    AGREES,        /* kn_agree where the others gather */
    NO_LABEL,      /* the same call without its label */
    LEAVES,        /* the process ends */
    WRONGS
} wrong;

static const char *const expected[WRONGS] = {
    [OTHER_COMM] = "rank 1 calls all_reduce of 8 f32 (b) in communicator reduce",
    [OTHER_ORDER] = "rank 1 calls all_reduce of 8 f32 (b) in communicator reduce",
    [OTHER_STREAMS] = "rank 1 calls all_reduce of 8 f32 (b) in communicator reduce",
    [SKIPS_ONE] = "rank 1 calls all_gather of 8 f32 (block.1) in communicator gather",
    [EARLIER_THERE] = "rank 1 calls all_gather of 8 f32 (block.1) in communicator gather",
    [WORLD_BEFORE] = "rank 1 calls barrier (norm) in communicator world",
    [AGREES] = "rank 1 calls agree in communicator world",
    [NO_LABEL] = "rank 1 calls all_gather of 8 f32 in communicator gather",
    [LEAVES] = "rank 1 has ended",
};

static int wrong_rank(kn_comm *w, void *arg)
{
    wrong how = *(wrong *)arg;
    bool odd = kn_rank(w) == 1, streams = how == OTHER_STREAMS;
    float all[32] = { 0 }, x[8] = { 0 }, y[8] = { 0 }, z[8] = { 0 };
    kn_comm_set_timeout(w, 100000); /* the runner ends what waits so long */
    kn_comm *gather = kn_comm_dup(w, "gather"), *reduce = kn_comm_dup(w, "reduce");
    kn_comm *group = kn_comm_split(w, kn_rank(w) / 2, 0, "group");
    kn_stream *s = kn_compute_stream(KN_CPU), *sg = s, *sr = s;
    if (streams) {
        sg = kn_stream_create(KN_CPU, "gathers", KN_STREAM_WORKER);
        sr = kn_stream_create(KN_CPU, "reduces", KN_STREAM_WORKER);
    }
    if (odd && how == LEAVES)
        return 0;
    if (odd && how == AGREES)
        kn_agree(w, true);
    bool turned = odd && (how == OTHER_COMM || how == OTHER_ORDER || streams);
    if (turned)
        kn_all_reduce(reduce, y, NULL, y, 8, KN_F32, KN_F32, sr, "b");
    if (!odd || how != SKIPS_ONE)
        kn_all_gather(gather, all, x, 8, KN_F32, sg, odd && how == NO_LABEL ? NULL : "block.0");
    kn_all_gather(gather, all, x, 8, KN_F32, sg, "block.1");
    if (odd && how == EARLIER_THERE) /* the only caller, so a worker waits for ever */
        kn_all_gather(gather, all, x, 8, KN_F32, sg, "block.1");
    if (!turned)
        kn_all_reduce(reduce, y, NULL, y, 8, KN_F32, KN_F32, sr, "b");
    if (odd && how == WORLD_BEFORE)
        kn_barrier(w, s, "norm");
    kn_all_reduce(group, z, NULL, z, 8, KN_F32, KN_F32, s, "replicas");
    kn_barrier(w, s, "norm");
    bool ok = streams && kn_stream_sync(sg) && kn_stream_sync(sr) && kn_ok();
    EXPECT(!ok && !kn_ok());
    EXPECT(strstr(kn_error(), expected[how]), "case %d", (int)how);
    EXPECT(how == LEAVES || strstr(kn_error(), "collectives don't match: rank "), "%d", (int)how);
    if (streams) {
        kn_stream_destroy(sg);
        kn_stream_destroy(sr);
    }
    return 0;
}

/* Its name selects it for the run under ThreadSanitizer. */
KN_TEST(comm_contract, ranks_as_threads_out_of_step)
{
    for (wrong how = 0; how < WRONGS; how++)
        for (int n = 2; n <= 4; n += 2)
            KN_CHECK(kn_spawn_threads(n, wrong_rank, &how) == 0, "case %d, %d ranks", how, n);
}

KN_TEST(comm_contract, ranks_out_of_step)
{
    if (THREADS_ONLY)
        KN_SKIP("needs processes");
    for (wrong how = 0; how < WRONGS; how++)
        KN_CHECK(kn_spawn(3, wrong_rank, &how) == 0, "case %d", how);
}

/* A call of another communicator may come at any time, and workers may be far behind the program:
 * that is no divergence. */
static int far_ahead_rank(kn_comm *w, void *arg)
{
    enum { TIMES = 3 * KN_NOTES };
    kn_comm *a = kn_comm_dup(w, "a"), *b = kn_comm_dup(w, "b");
    kn_stream *sa = kn_stream_create(KN_CPU, "a", KN_STREAM_WORKER);
    kn_stream *sb = kn_stream_create(KN_CPU, "b", KN_STREAM_WORKER);
    float x[4] = { 0 }, all[4][4];
    kn_comm_slow(a, 1e-4, 0);
    for (int i = 0; i < TIMES; i++) {
        if (i == kn_rank(w) * 7)
            usleep(30000);
        EXPECT(kn_all_gather(a, all, x, 4, KN_F32, sa, i % 2 ? "even" : "odd"));
        if (i % 3 == 0)
            EXPECT(kn_barrier(b, sb, "beside"));
    }
    EXPECT(kn_stream_sync(sa) && kn_stream_sync(sb) && kn_agree(w, true));
    kn_stream_destroy(sa);
    kn_stream_destroy(sb);
    return arg != NULL;
}

KN_TEST(comm_contract, threads_far_ahead_are_in_step)
{
    KN_CHECK(kn_spawn_threads(4, far_ahead_rank, NULL) == 0);
}

/* Rank 1 arrives late or never; the others name it, the call and its last call. */
typedef struct late {
    double limit;
    _Atomic int started; /* times that rank 1 has finished its first call */
} late;

static int late_rank(kn_comm *w, void *arg)
{
    late *l = arg;
    double limit = l->limit;
    kn_stream *s = kn_compute_stream(KN_CPU);
    EXPECT(kn_barrier(w, s, "start"));
    l->started += kn_rank(w) == 1;
    while (kn_rank(w) == 0 && l->started == 0)
        usleep(1000);
    if (kn_rank(w) == 0) /* alone, so that it waits for no other rank */
        kn_comm_set_timeout(w, limit);
    if (kn_rank(w) == 1 && limit > 1)
        usleep(400000);
    else if (kn_rank(w) == 1)
        wait_for_a_failure(w);
    if (limit > 1) {
        EXPECT(kn_barrier(w, s, "block.7"));
        return 0;
    }
    EXPECT(!kn_barrier(w, s, "block.7"));
    EXPECT(
        strstr(kn_error(), "waited 0.1 s for rank 1 in barrier (block.7) in communicator world"));
    EXPECT(strstr(kn_error(), "the last call of rank 1 was barrier (start) in communicator world, "
                              "which it has finished"));
    return 0;
}

KN_TEST(comm_contract, a_timeout_names_the_missing_rank)
{
    late *l = mmap(NULL, sizeof *l, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int ends = 0; ends < 2; ends++)
        for (int threads = THREADS_ONLY; threads < 2; threads++) {
            *l = (late){ .limit = ends ? 100000 : 0.1 };
            int failed = (threads ? kn_spawn_threads : kn_spawn)(3, late_rank, l);
            KN_CHECK(failed == 0, "limit %g: %d failed", l->limit, failed);
        }
    munmap(l, sizeof *l);
    kn_comm *w = kn_init(NULL, NULL);
    kn_comm_set_timeout(w, -1);
    KN_CHECK_ERROR("must be more than 0 seconds");
    KN_CHECK(kn_finish() == 0);
}
