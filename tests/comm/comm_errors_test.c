/* tests/comm/comm_errors_test.c: communicators after errors: calls that don't match, poison, the
 * death of a rank, bad arguments. */
#include "tests/comm/comm_test.h"
#include <math.h>

/* Rank 1 makes another call than the others; arg: the kind of difference. */
static int mismatch_rank(kn_comm *w, void *arg)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    bool odd = kn_rank(w) == 1;
    float src[4000] = { 0 }, dst[12000];
    switch (*(int *)arg) {
    case 0:
        kn_all_gather(w, dst, src, odd ? 11 : 10, KN_F32, s, "fc1");
        break;
    case 1:
        kn_all_gather(w, dst, src, 4000, odd ? KN_BF16 : KN_F32, s, "fc1");
        break;
    case 2:
        odd ? kn_barrier(w, s, "fc2") : kn_all_gather(w, dst, src, 4000, KN_F32, s, "fc1");
        break;
    case 3:
        kn_all_gather(w, dst, src, 10, KN_F32, s, odd ? "fc2" : "fc1");
        break;
    default:
        kn_all_reduce_max(w, src, odd ? 257 : 256, s, "fc1");
    }
    EXPECT(!kn_ok());
    EXPECT(strstr(kn_error(), "collectives don't match: rank ") &&
           strstr(kn_error(), "rank 1 calls "));
    EXPECT(strstr(kn_error(), "fc1") && strstr(kn_error(), "communicator world"));
    return 0;
}

KN_TEST(comm_errors, mismatched_calls)
{
    for (int kind = 0; kind < 5; kind++)
        on_ranks(3, mismatch_rank, &kind);
}

static int poison_rank(kn_comm *w, void *arg)
{
    bool by_error = *(bool *)arg;
    kn_comm *d = kn_comm_dup(w, "side");
    kn_stream *side = kn_stream_create(KN_CPU, "side", KN_STREAM_WORKER);
    EXPECT(d && side);
    if (kn_rank(w) == 1) {
        nanosleep(&(struct timespec){ .tv_nsec = 150000000 }, NULL);
        if (by_error)
            kn_fail("matmul: the sky fell in mlp.fc1");
        else
            kn_comm_poison(w, "matmul: the sky fell in mlp.fc1");
        EXPECT(!kn_agree(w, true));
        kn_stream_destroy(side);
        return 0;
    }
    if (kn_rank(w) == 0) /* waits on a worker, rank 2 inline */
        EXPECT(kn_barrier(d, side, "late") && !kn_stream_sync(side));
    else
        EXPECT(!kn_barrier(d, kn_compute_stream(KN_CPU), "late"));
    EXPECT(strcmp(kn_error(), "rank 1 failed: matmul: the sky fell in mlp.fc1") == 0);
    kn_clear_error(); /* future waits fail too */
    EXPECT(!kn_barrier(w, kn_compute_stream(KN_CPU), "later") && !kn_ok());
    kn_stream_destroy(side);
    return 0;
}

KN_TEST(comm_errors, poison_wakes_the_others)
{
    for (int by_error = 0; by_error < 2; by_error++)
        on_ranks(3, poison_rank, &(bool){ by_error });
}

/* Each rank fails as soon as the call in which all were is over for it. */
static int fail_after_meeting(kn_comm *w, void *arg)
{
    int64_t sum[2] = { 1, 1 };
    int n = kn_comm_size(w);
    EXPECT(*(bool *)arg
               ? kn_agree(w, true)
               : kn_all_reduce_i64(w, sum, 2, kn_compute_stream(KN_CPU), "sum") && sum[1] == n);
    kn_fail("rank %d is through", kn_rank(w));
    kn_agree(w, true);
    kn_clear_error();
    return 0;
}

KN_TEST(comm_errors, a_call_in_which_all_ranks_were_succeeds_on_all)
{
    for (int i = 0; i < 40; i++)
        on_ranks(4, fail_after_meeting, &(bool){ i % 2 });
}

static int leaver_rank(kn_comm *w, void *arg)
{
    (void)arg;
    if (kn_rank(w) == 1)
        return 0;
    EXPECT(!kn_barrier(w, kn_compute_stream(KN_CPU), "alone"));
    EXPECT(strstr(kn_error(), "rank 1 has ended") || strstr(kn_error(), "but rank 1 has ended"));
    return 0;
}

KN_TEST(comm_errors, a_rank_that_ends_early)
{
    on_ranks(3, leaver_rank, NULL);
}

static int killed_rank(kn_comm *w, void *arg)
{
    (void)arg;
    if (kn_rank(w) == 1)
        raise(SIGKILL);
    if (kn_rank(w) == 2) /* ignores SIGTERM */
        for (;;)
            pause();
    bool ok = kn_barrier(w, kn_compute_stream(KN_CPU), "b");
    EXPECT(!ok && strncmp(kn_error(), "rank 1 failed: was killed by signal 9 (Killed)", 46) == 0);
    return 0;
}

KN_TEST(comm_errors, a_killed_rank_ends_the_spawn)
{
    if (THREADS_ONLY)
        KN_SKIP("needs processes");
    int failed = kn_spawn(3, killed_rank, NULL);
    KN_CHECK(failed == 2, "%d failed",
             failed); /* the killed rank, and the one that ignores SIGTERM */
}

static void *idle(void *arg)
{
    pthread_mutex_lock(arg);
    pthread_mutex_unlock(arg);
    return NULL;
}

static int nothing_rank(kn_comm *w, void *arg)
{
    (void)w;
    return arg != NULL;
}

KN_TEST(comm_errors, spawn_refuses_a_second_thread)
{
    pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
    pthread_t t;
    KN_CHECK_OK(); /* from here on the library counts threads */
    pthread_mutex_lock(&m);
    pthread_create(&t, NULL, idle, &m);
    KN_CHECK(kn_spawn(2, nothing_rank, NULL) == 2);
    KN_CHECK_ERROR("threads");
    pthread_mutex_unlock(&m);
    pthread_join(t, NULL);
    REFUSED(kn_spawn(0, nothing_rank, NULL), "must be 1 to 256");
    KN_CHECK(kn_spawn_threads(3, nothing_rank, &m) == 3); /* each returns non-zero */
    KN_CHECK_OK();
}

static void *linger(void *arg)
{
    nanosleep(&(struct timespec){ .tv_nsec = 30000000 }, NULL);
    return arg;
}

/* The kernel lists a joined thread for some time: one that ends a moment later stands for it. */
KN_TEST(comm_errors, spawn_waits_for_a_thread_that_ends)
{
    if (THREADS_ONLY)
        KN_SKIP("needs processes");
    pthread_t t;
    KN_CHECK_OK(); /* from here on the library counts threads */
    pthread_create(&t, NULL, linger, NULL);
    KN_CHECK(kn_spawn(2, nothing_rank, NULL) == 0);
    pthread_join(t, NULL);
    KN_CHECK_OK();
}

KN_TEST(comm_errors, bad_arguments)
{
    kn_comm *w = kn_init(NULL, NULL);
    kn_stream *s = kn_compute_stream(KN_CPU);
    float x[4] = { 0 };
    kn_all_gather(NULL, x, x, 4, KN_F32, s, "u");
    KN_CHECK_ERROR("communicator is NULL");
    kn_all_gather(w, x, x, 4, KN_F32, NULL, "u");
    KN_CHECK_ERROR("stream is NULL");
    kn_all_gather(w, x, x, -1, KN_F32, s, "u");
    KN_CHECK_ERROR("count is -1");
    kn_all_gather(w, NULL, x, 4, KN_F32, s, "u");
    KN_CHECK_ERROR("dst is NULL");
    kn_all_gather(w, x, x, 4, KN_DTYPE_DEFAULT, s, "u");
    KN_CHECK_ERROR("unknown dtype");
    kn_all_reduce(w, x, NULL, x, 1, KN_I64, KN_I64, s, "u");
    KN_CHECK_ERROR("kn_all_reduce_i64");
    kn_reduce_scatter(w, x, NULL, x, 1, KN_F32, KN_F64, s, "u");
    KN_CHECK_ERROR("f64 adds to f64 only");
    kn_broadcast(w, x, 4, 1, s, "u");
    KN_CHECK_ERROR("root is 1");
    KN_CHECK(kn_finish() == 0);
}

/* Counts whose bytes over both ranks don't fit into 63 bits. */
static int absurd_rank(kn_comm *w, void *arg)
{
    static const int64_t counts[] = { INT64_MAX, INT64_C(1) << 62, INT64_C(1) << 61,
                                      INT64_C(1) << 60 };
    (void)arg;
    double x[4] = { 0 };
    kn_stream *s = kn_compute_stream(KN_CPU);
    for (int i = 0; i < 4; i++) {
        for (int what = 0; what < 4; what++) {
            bool ok =
                what == 0   ? kn_all_gather(w, x, x, counts[i], KN_F64, s, "huge")
                : what == 1 ? kn_reduce_scatter(w, x, NULL, x, counts[i], KN_F64, KN_F64, s, "huge")
                : what == 2 ? kn_all_reduce(w, x, NULL, x, counts[i], KN_F64, KN_F64, s, "huge")
                            : kn_all_reduce_i64(w, (int64_t *)(void *)x, counts[i], s, "huge");
            EXPECT(!ok && strstr(kn_error(), "more than memory can hold"), "%d %d", i, what);
            kn_clear_error();
        }
    }
    return 0;
}

KN_TEST(comm_errors, absurd_counts_fail)
{
    if (THREADS_ONLY)
        KN_SKIP("errors that are cleared poison a world of threads");
    on_ranks(2, absurd_rank, NULL);
}

/* ---- after the end --------------------------------------------------------------------------- */

static void ask(kn_comm *c, int what)
{
    switch (what) {
    case 0:
        KN_CHECK(kn_rank(c) == 0);
        break;
    case 1:
        KN_CHECK(kn_comm_size(c) == 1);
        break;
    case 2:
        KN_CHECK(strcmp(kn_comm_backend(c), "self") == 0);
        break;
    case 3:
        KN_CHECK(kn_comm_memory(c) == kn_device_memory(KN_CPU));
        break;
    case 4:
        KN_CHECK(kn_comm_memory_on(c, KN_CPU) == kn_device_memory(KN_CPU));
        break;
    case 5:
        KN_CHECK(isinf(kn_comm_get_timeout(c)));
        break;
    case 6:
        kn_comm_set_timeout(c, 1);
        break;
    case 7:
        kn_comm_suspend_timeout(c);
        break;
    case 8:
        kn_comm_resume_timeout(c);
        break;
    case 9:
        kn_comm_slow(c, 1, 1);
        break;
    case 10:
        kn_comm_poison(c, "late");
        break;
    case 11:
        KN_CHECK(!kn_comm_simulated_part(c, 2, "part"));
        break;
    case 12:
        KN_CHECK(!kn_comm_dup(c, "again"));
        break;
    default:
        kn_comm_simulated_free(c);
    }
}

KN_TEST(comm_errors, what_asks_a_communicator_that_has_ended_gets_an_error)
{
    for (int what = 0; what < 14; what++) {
        kn_comm *c = kn_comm_simulated(3, 0, 0);
        KN_CHECK(c && kn_comm_size(c) == 3);
        kn_comm_simulated_free(c);
        ask(c, what);
        KN_CHECK_ERROR("the communicator has ended");
    }
}
