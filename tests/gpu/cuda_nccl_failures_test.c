/* tests/gpu/cuda_nccl_failures_test.c: ranks of NCCL that die, fail, are late or out of step, on
 * the machine of nccl_ranks.h. */
#include "comm/comm_internal.h"
#include "knap.h"
#include "tests/gpu/nccl_ranks.h"

/* ---- failures -------------------------------------------------------------------------------- */

static const char *how;       /* rank 1's fault while the others are in "block.3" */
static double patience = 0.5; /* of rank 0 where rank 1 is late */

static void misbehave(kn_comm *w, kn_comm *side)
{
    kn_stream *s = kn_compute_stream(KN_CUDA);
    int64_t *x = gpu(kn_device_memory(KN_CUDA), &(int64_t){ 1 }, 8);
    if (strcmp(how, "dies") == 0)
        raise(SIGKILL);
    else if (strcmp(how, "fails") == 0)
        kn_fail("data: file is empty");
    else if (strcmp(how, "is out of step") == 0)
        kn_all_reduce_i64(side, x, 1, s, "block.4");
    else {
        wait_for_a_failure(w);
        if (kn_all_reduce_i64(w, x, 1, s, "block.3"))
            kn_all_reduce_i64(w, x, 1, s, "block.5");
    }
}

static int failure_rank(kn_comm *w)
{
    int rank = kn_rank(w);
    bool late = strcmp(how, "is late") == 0;
    kn_comm *side = NULL;
    kn_comm_set_timeout(w, 100000); /* the runner ends what waits so long */
    EXPECT(kn_comm_memory_on(w, KN_CUDA) && (side = kn_comm_dup(w, "side")));
    EXPECT(sum_of(w, 1, kn_comm_size(w)) && sum_of(side, 1, kn_comm_size(w)));
    kn_stream *s = kn_compute_stream(KN_CUDA);
    int64_t *x = gpu(kn_device_memory(KN_CUDA), &(int64_t){ 1 }, 8);
    b->ready++;
    while (b->ready < kn_comm_size(w)) /* nobody fails before all are there */
        usleep(1000);
    if (late && rank == 0) /* alone, so that none but rank 1 is waited for */
        kn_comm_set_timeout(w, patience);
    if (rank == 1 && strcmp(how, "ends") == 0)
        return 0;
    if (rank == 1)
        misbehave(w, side);
    else
        kn_all_reduce_i64(w, x, 1, s, "block.3");
    if (rank == 0 && strcmp(how, "is told by NCCL") == 0)
        nccl->async_error = 6;
    if (kn_ok())
        kn_stream_sync(s);
    while (kn_ok())
        usleep(10000);
    snprintf(b->error[rank], sizeof b->error[rank], "%s", kn_error() ? kn_error() : "");
    return kn_ok() ? 1 : 0;
}

/* Ranks of which rank 1 does that. On a slow machine rank 0 may lose patience with rank 2, too:
 * then again with more. */
static void misbehaves(const char *what, rank_fn fn)
{
    how = what;
    patience = 0.5;
    for (on(3, fn); strstr(b->error[0], " s for rank 2 ") && patience < 60; on(3, fn))
        patience *= 2;
}

/* Every live rank has an error with these parts, not by a timeout unless one is among them, and has
 * aborted its two communicators. */
static void fails(const char *what, int live, const char *part, const char *other)
{
    nccl->slow_abort_ms = 50;
    misbehaves(what, failure_rank);
    for (int r = 0; r < 3; r++) {
        if (r == 1 && live == 2)
            continue;
        KN_CHECK(strstr(b->error[r], part) && strstr(b->error[r], other), "rank %d: %s", r,
                 b->error[r]);
    }
    KN_CHECK(b->aborts == 2 * live, "%s: %d aborts", what, b->aborts);
}

KN_TEST(cuda_nccl_failures, a_rank_that_dies_is_named)
{
    fails("dies", 2, "rank 1 ", "");
}

KN_TEST(cuda_nccl_failures, a_rank_that_ends_is_not_waited_for)
{
    fails("ends", 2, "(block.3) in communicator world, but rank 1 has ended", "");
}

KN_TEST(cuda_nccl_failures, a_rank_that_fails_is_repeated)
{
    fails("fails", 3, "data: file is empty", "");
    KN_CHECK(strstr(b->error[0], "rank 1 failed"), "%s", b->error[0]);
}

KN_TEST(cuda_nccl_failures, a_rank_that_does_not_come_is_named)
{
    fails("is late", 3, "for rank 1 in all_reduce_i64 of 1 i64 (block.3) in communicator world",
          "waited ");
}

KN_TEST(cuda_nccl_failures, ranks_out_of_step_are_told)
{
    fails("is out of step", 3, "collectives don't match", "(block.3)");
    KN_CHECK(strstr(b->error[0], "(block.4)"), "%s", b->error[0]);
}

KN_TEST(cuda_nccl_failures, an_error_of_nccl_names_the_call)
{
    fails("is told by NCCL", 3, "all_reduce_i64 block.3", "remote process exited");
}

/* NCCL lets no call follow one that is in progress and that nobody waits for any longer. */
static int given_up_rank(kn_comm *w)
{
    EXPECT(kn_comm_memory_on(w, KN_CUDA) && sum_of(w, 1, kn_comm_size(w)));
    kn_memory *m = kn_comm_memory_on(w, KN_CUDA);
    kn_stream *s = kn_compute_stream(KN_CUDA);
    int64_t *x = gpu(m, &(int64_t){ 1 }, 8);
    nccl->polls = INT_MAX;
    b->ready++;
    while (b->ready < kn_comm_size(w))
        usleep(1000);
    int before = nccl->calls;
    if (kn_rank(w) != 1)
        kn_all_reduce_i64(w, x, 1, s, "block.3");
    else if (usleep(100000) == 0)
        kn_fail("data: file is empty");
    bool begun = nccl->calls > before; /* before rank 1 failed */
    b->left += begun;
    for (int again = 0; again < 4; again++) {
        EXPECT(strstr(kn_error(), "data: file is empty"), "%d: %s", again, kn_error());
        kn_clear_error();
        int calls = nccl->calls, enrolled = nccl->enrolled;
        bool done = again == 0   ? kn_all_reduce_i64(w, x, 1, s, "block.4")
                    : again == 1 ? kn_barrier(w, s, "end")
                                 : kn_comm_dup(w, "copy") != NULL;
        EXPECT(!done && nccl->calls == calls, "%d", again);
        char *large = gpu(m, NULL, (size_t)8 << 20);
        EXPECT(!begun || nccl->enrolled == enrolled);
        if (large) /* the segment stays: the call may use it */
            kn_give(m, large, ((size_t)8 << 20) + 1, KN_MEM_DATA);
    }
    kn_clear_error();
    return 0;
}

KN_TEST(cuda_nccl_failures, a_call_that_is_given_up_is_the_last)
{
    int tries = 0;
    do
        KN_CHECK(on(3, given_up_rank) == 0);
    while (b->left == 0 && ++tries < 20);
    KN_CHECK(b->left > 0, "no rank was in a call");
}

/* Of a sum in rank order: the host waits for the exchange before it launches the addition, and
 * there the communicator is aborted. No call of NCCL follows. */
static int between_steps_rank(kn_comm *w)
{
    kn_cuda_deterministic(true);
    EXPECT(kn_comm_memory_on(w, KN_CUDA) && sum_of(w, 1, kn_comm_size(w)));
    kn_stream *s = kn_compute_stream(KN_CUDA);
    float *x = gpu(kn_device_memory(KN_CUDA), NULL, 4096 * sizeof *x);
    b->ready++;
    while (b->ready < kn_comm_size(w))
        usleep(1000);
    if (kn_rank(w) != 1)
        kn_all_reduce(w, x, NULL, x, 4096, KN_F32, KN_F32, s, "block.3");
    else if (usleep(100000) == 0)
        kn_fail("data: file is empty");
    EXPECT(kn_error() && strstr(kn_error(), "data: file is empty"));
    kn_clear_error();
    return 0;
}

KN_TEST(cuda_nccl_failures, nothing_follows_an_abort_between_the_steps_of_a_call)
{
    KN_CHECK(on(3, between_steps_rank) == 0);
}

/* Many communicators: all of them end, not only those with calls in progress. */
static int many_rank(kn_comm *w)
{
    enum { MANY = 70 };
    kn_comm_set_timeout(w, 100000);
    EXPECT(kn_comm_memory_on(w, KN_CUDA));
    for (int i = 0; i < MANY; i++)
        EXPECT(kn_comm_dup(w, "one of many"));
    return failure_rank(w);
}

KN_TEST(cuda_nccl_failures, many_communicators_end_together)
{
    how = "dies";
    nccl->slow_abort_ms = 50;
    on(2, many_rank); /* on a slow machine the supervisor may end rank 0 before it aborts any */
    for (int i = 0; i < 4 && b->aborts == 0; i++)
        on(2, many_rank);
    KN_CHECK(strstr(b->error[0], "rank 1 "), "%s", b->error[0]);
    KN_CHECK(b->aborts == 72, "%d aborts", b->aborts);
}

static void fails_over_tcp(const char *what, int live, const char *part)
{
    misbehaves(what, over_tcp(failure_rank));
    for (int r = 0; r < 3; r++)
        KN_CHECK((r == 1 && live == 2) || strstr(b->error[r], part), "rank %d: %s", r, b->error[r]);
    KN_CHECK(b->aborts == 2 * live, "%s: %d aborts", what, b->aborts);
}

KN_TEST(cuda_nccl_failures, over_tcp)
{
    fails_over_tcp("dies", 2, "rank 1 died without an error message");
    fails_over_tcp("ends", 2, "but rank 1 has ended");
    fails_over_tcp("fails", 3, "data: file is empty");
    fails_over_tcp("is late", 3, "for rank 1 in all_reduce_i64 of 1 i64 (block.3)");
    fails_over_tcp("is out of step", 3, "collectives don't match");
}

/* ---- making communicators with a rank missing ------------------------------------------------ */

static int init_rank(kn_comm *w)
{
    kn_comm_set_timeout(w, 100000);
    EXPECT(how[0] != 's' || kn_comm_memory_on(w, KN_CUDA));
    if (kn_rank(w) == 0) /* alone, so that none but rank 1 is waited for */
        kn_comm_set_timeout(w, 0.5);
    if (kn_rank(w) == 1 && how[2] == 'd')
        raise(SIGKILL);
    if (kn_rank(w) == 1 && how[2] == 's')
        wait_for_a_failure(w);
    else if (how[0] == 's')
        kn_comm_dup(w, "side");
    else
        sum_of(w, 1, 3);
    snprintf(b->error[kn_rank(w)], sizeof b->error[0], "%s", kn_error() ? kn_error() : "");
    return kn_ok() ? 1 : 0;
}

KN_TEST(cuda_nccl_failures, nobody_waits_for_a_rank_that_does_not_make_communicators)
{
    static const char *const ways[] = { "i d", "i s", "s d", "s s" };
    for (int k = 0; k < 4; k++) {
        how = ways[k];
        on(3, init_rank);
        for (int r = 0; r < 3; r += 2)
            KN_CHECK(strstr(b->error[r], "rank 1"), "%s: %s", how, b->error[r]);
    }
}
