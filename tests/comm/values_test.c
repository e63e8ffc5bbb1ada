/* tests/comm/values_test.c: scalars over ranks, bytes whose number only the root has, options of
 * kn_init, and timeouts of one group. Rank functions return a status and never assert. */
#include "comm/values.h"
#include "tests/comm/comm_test.h"
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

static double number_of(int rank)
{
    return rank == 2 ? -1e16 : 1e16 / (rank + 1) + 0.1 * rank; /* another order, other bits */
}

static int sums(kn_comm *w, void *arg)
{
    double sum = 0;
    int n = kn_comm_size(w);
    (void)arg;
    for (int r = 0; r < n; r++)
        sum += number_of(r);
    double mine = number_of(kn_rank(w)), got = kn_sum_over_ranks(w, mine),
           mean = kn_mean_over_ranks(NULL, mine);
    EXPECT(got == sum, "%.17g, not %.17g", got, sum);
    EXPECT(mean == sum / n, "%.17g, not %.17g", mean, sum / n);
    EXPECT(isnan(kn_sum_over_ranks(w, kn_rank(w) == 0 ? NAN : 1)));
    kn_comm *half = kn_comm_split(w, kn_rank(w) / 2, 0, "half");
    EXPECT(half && kn_sum_over_ranks(half, 1) == kn_comm_size(half));
    return !kn_ok();
}

KN_TEST(values, sums_and_means_of_a_number)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, sums, NULL);
    KN_CHECK(kn_sum_over_ranks(NULL, 3) == 3 && kn_mean_over_ranks(NULL, 3) == 3);
    kn_fail("an error stands");
    KN_CHECK(isnan(kn_mean_over_ranks(NULL, 3)));
    KN_CHECK_ERROR("an error stands");
}

static int slow_ends(kn_comm *w, void *arg)
{
    const int bad = *(int *)arg;
    EXPECT(kn_hosts_begin_slow(w), "%s", kn_error());
    bool mine = kn_rank(w) != bad || kn_fail("the disk of rank %d is full", bad);
    bool all = kn_hosts_end_slow(w, mine);
    EXPECT(all == (bad < 0), "rank %d failed, and this one hears %d", bad, all);
    EXPECT(bad < 0 || strstr(kn_error(), "is full"), "%s", kn_error());
    kn_clear_error();
    return 0;
}

KN_TEST(values, all_ranks_hear_how_slow_work_ended)
{
    for (int n = 1; n <= 3; n++)
        for (int bad = -1; bad < n; bad++)
            on_ranks(n, slow_ends, &bad);
}

static int bytes(kn_comm *w, void *arg)
{
    static const char *const text[] = { "", "a", "a text that the others have never seen" };
    (void)arg;
    for (int i = 0; i < 3 * kn_comm_size(w); i++) {
        int root = i % kn_comm_size(w);
        bool mine = kn_rank(w) == root;
        size_t size = mine ? strlen(text[i % 3]) : 77;
        OWNED_HOST char *got =
            kn_broadcast_bytes(w, mine && size ? text[i % 3] : NULL, &size, root);
        EXPECT(got && strcmp(got, text[i % 3]) == 0 && size == strlen(text[i % 3]), "text %d", i);
    }
    return !kn_ok();
}

KN_TEST(values, bytes_of_which_only_the_root_knows_how_many)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, bytes, NULL);
    size_t size = 3;
    char *copy = kn_broadcast_bytes(NULL, "abc", &size, 0);
    KN_CHECK(copy && strcmp(copy, "abc") == 0);
    kn_host_free(copy);
    REFUSED(kn_broadcast_bytes(NULL, NULL, &size, 0), "rank 0 gives NULL of 3 bytes");
    REFUSED(kn_broadcast_bytes(NULL, "abc", &size, 1), "root is 1");
    REFUSED(kn_broadcast_bytes(NULL, "abc", NULL, 0), "the place for the size");
}

/* The root's mistake reaches the others, which wait for it. */
static int bad_bytes(kn_comm *w, void *arg)
{
    size_t size = 3;
    (void)arg;
    EXPECT(!kn_broadcast_bytes(w, NULL, &size, 0) && strstr(kn_error(), "rank 0 gives NULL"));
    return 0;
}

KN_TEST(values, a_root_without_bytes_is_an_error_of_all)
{
    on_ranks(3, bad_bytes, NULL);
}

/* ---- timeouts -------------------------------------------------------------------------------- */

static int timeouts(kn_comm *w, void *arg)
{
    (void)arg;
    kn_comm_set_timeout(w, 40);
    kn_comm *group = kn_comm_dup(w, "group"), *other = kn_comm_dup(w, "other");
    kn_comm *below = group ? kn_comm_split(group, 0, kn_rank(w), "below") : NULL;
    EXPECT(group && other && below);
    EXPECT(kn_comm_get_timeout(group) == 40 && kn_comm_get_timeout(below) == 40);
    kn_comm_set_timeout(group, 0.1);
    EXPECT(kn_comm_get_timeout(w) == 40 && kn_comm_get_timeout(other) == 40);
    EXPECT(kn_comm_get_timeout(group) == 0.1 && kn_comm_get_timeout(below) == 0.1);
    kn_comm_set_timeout(below, 30);
    kn_comm_set_timeout(w, 50);
    EXPECT(kn_comm_get_timeout(other) == 50 && kn_comm_get_timeout(group) == 0.1 &&
           kn_comm_get_timeout(below) == 30);
    kn_comm_set_timeout(below, 0);
    EXPECT(kn_comm_get_timeout(below) == 0.1);
    kn_comm_set_timeout(w, 0);
    EXPECT(kn_comm_get_timeout(other) == 60);
    kn_comm_set_timeout(below, 100000);
    kn_stream *s = kn_compute_stream(KN_CPU);
    EXPECT(kn_barrier(below, s, "start"));
    if (kn_rank(w) > 1) /* rank 0 waits for rank 1 only */
        kn_comm_set_timeout(group, 100000);
    if (kn_rank(w) == 1)
        wait_for_a_failure(w);
    EXPECT(!kn_barrier(group, s, "late"));
    EXPECT(strstr(kn_error(), "waited 0.1 s for rank 1 in barrier (late) in communicator group"));
    return 0;
}

KN_TEST(values, a_group_has_a_timeout_of_its_own)
{
    on_ranks(2, timeouts, NULL);
    on_ranks(3, timeouts, NULL);
}

/* Suspended by any communicator, nested, for one with a time of its own. */
static int suspended(kn_comm *w, void *arg)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    kn_comm *group = kn_comm_dup(w, "group"), *other = kn_comm_dup(w, "other");
    (void)arg;
    EXPECT(group && other);
    kn_comm_set_timeout(group, 0.1);
    kn_comm_suspend_timeout(w);
    kn_comm_suspend_timeout(other);
    kn_comm_resume_timeout(w);
    EXPECT(isinf(kn_comm_get_timeout(group)) && isinf(kn_comm_get_timeout(w)));
    if (kn_rank(w) == 1)
        usleep(300000);
    EXPECT(kn_barrier(group, s, "late"));
    kn_comm_resume_timeout(other);
    EXPECT(kn_comm_get_timeout(group) == 0.1 && kn_comm_get_timeout(w) == 60);
    if (kn_rank(w) > 1) /* rank 0 waits for rank 1 only */
        kn_comm_set_timeout(group, 100000);
    if (kn_rank(w) == 1)
        wait_for_a_failure(w);
    EXPECT(!kn_barrier(group, s, "late") && strstr(kn_error(), "waited 0.1 s for rank 1"));
    return 0;
}

KN_TEST(values, suspension_holds_in_every_communicator)
{
    on_ranks(3, suspended, NULL);
}

/* ---- kn_init --------------------------------------------------------------------------------- */

KN_TEST(values, kn_init_takes_a_timeout)
{
    kn_comm *w = kn_init(NULL, NULL, .timeout_s = 7.5);
    KN_CHECK(kn_comm_get_timeout(w) == 7.5, "%g", kn_comm_get_timeout(w));
    KN_CHECK(kn_finish() == 0);
    w = kn_init(NULL, NULL);
    KN_CHECK(kn_comm_get_timeout(w) == 60, "%g: the last world's", kn_comm_get_timeout(w));
    KN_CHECK(kn_finish() == 0);
    kn_init(NULL, NULL, .timeout_s = -1);
    KN_CHECK_ERROR(".timeout_s = -1: must be more than 0");
    KN_CHECK(kn_finish() == 0);
}

KN_TEST(values, kn_init_takes_a_way_of_collectives)
{
    kn_init(NULL, NULL, .comm = "pigeons");
    KN_CHECK_ERROR(".comm = \"pigeons\" must be \"nccl\", or \"local\"");
    KN_CHECK(kn_finish() == 0);
}

/* ---- communicators that are over, and processes that are no rank ----------------------------- */

static int after_the_end(kn_comm *w, void *arg)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    kn_comm *part = kn_comm_dup(w, "part");
    (void)arg;
    EXPECT(part && kn_barrier(w, s, "before"));
    EXPECT(kn_finish() == 0);
    for (int i = 0; i < 2; i++) {
        kn_comm *c = i ? part : w;
        s = kn_compute_stream(KN_CPU);
        EXPECT(!kn_barrier(c, s, "late") && strstr(kn_error(), "the communicator has ended"));
        kn_clear_error();
        EXPECT(!kn_agree(c, true) && strstr(kn_error(), "kn_agree: the communicator has ended"));
        kn_clear_error();
        EXPECT(!kn_comm_dup(c, "late") && strstr(kn_error(), "the communicator has ended"));
        kn_clear_error();
    }
    return 0;
}

KN_TEST(values, a_communicator_that_is_over)
{
    for (int n = 1; n <= 3; n++)
        KN_CHECK(kn_spawn_threads(n, after_the_end, NULL) == 0, "%d ranks", n);
    KN_CHECK(kn_spawn(2, after_the_end, NULL) == 0);
}

static int forks(kn_comm *w, void *arg)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    int status = 1;
    (void)arg;
    EXPECT(kn_barrier(w, s, "before"));
    pid_t child = fork();
    if (child == 0) {
        bool told = kn_comm_size(w) == 1 ||
                    (!kn_barrier(w, s, "child") && strstr(kn_error(), "was forked from rank"));
        kn_clear_error();
        kn_fail("an error of the child's own");
        _exit(told && !kn_agree(w, true) && kn_finish() == 1 ? 0 : 1);
    }
    EXPECT(waitpid(child, &status, 0) == child && status == 0, "%d", status);
    for (int i = 0; i < 3; i++)
        EXPECT(kn_barrier(w, s, "after"), "%s", kn_error());
    return 0;
}

KN_TEST(values, a_child_of_a_rank_is_none)
{
    for (int n = 1; n <= 3; n++)
        KN_CHECK(kn_spawn(n, forks, NULL) == 0, "%d ranks", n);
}
