/* tests/kernels/team_test.c: threads that share a kernel's work: every part runs once, for any
 * number of threads. */
#include "kernels/context.h"
#include "kernels/kernels_internal.h"
#include "kernels/stream.h"
#include "kernels/team.h"
#include "tests/kn_test.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 100 };

typedef struct tally {
    _Atomic int runs[MOST];
    _Atomic int sum, inner;
    _Atomic bool wrong;
    bool shared; /* parts run at the same time and check it */
    pthread_t caller;
    bool before; /* it blocks signals */
} tally;

static void count_part(const void *ctx, int64_t part)
{
    tally *t = *(tally *const *)ctx;
    if (t->shared && kn_threads_for(1 << 30) != 1)
        t->wrong = true;
    t->runs[part]++;
}

static bool each_once(tally *t, int parts)
{
    for (int i = 0; i < MOST; i++)
        if (t->runs[i] != (i < parts))
            return false;
    return !t->wrong;
}

KN_TEST(team, each_part_runs_once)
{
    for (int threads = 1; threads <= 5; threads++) {
        kn_set_threads(threads);
        for (int round = 0; round < 500; round++) {
            const int parts = round % 7 == 6 ? MOST : round % 7;
            tally t = { .shared = parts > 1 && threads > 1 }, *ctx = &t;
            kn_each_part(parts, count_part, &ctx);
            KN_CHECK(each_once(&t, parts), "%d threads, %d parts", threads, parts);
            KN_CHECK(kn_threads_for(1 << 30) == threads, "the caller is no part any more");
        }
    }
    kn_set_threads(1);
}

static bool blocked(int signal)
{
    sigset_t now;
    return pthread_sigmask(SIG_SETMASK, NULL, &now) == 0 && sigismember(&now, signal) == 1;
}

static void see_signals(const void *ctx, int64_t part)
{
    tally *t = *(tally *const *)ctx;
    const bool own = pthread_equal(t->caller, pthread_self());
    if (blocked(SIGINT) != (!own || t->before))
        t->wrong = true;
    t->runs[part]++;
}

/* Ctrl-C is the caller's: the threads block signals, and the caller takes them as before. */
KN_TEST(team, signals_stay_with_the_caller)
{
    tally t = { .caller = pthread_self(), .before = blocked(SIGINT) }, *ctx = &t;
    kn_set_threads(4);
    kn_team_end(); /* it is made anew */
    kn_each_part(MOST, see_signals, &ctx);
    KN_CHECK(each_once(&t, MOST) && blocked(SIGINT) == t.before);
    kn_set_threads(1);
}

static void see_signals_on_stream(void *arg)
{
    if (!blocked(SIGINT))
        (*(tally **)arg)->wrong = true;
    (*(tally **)arg)->runs[0]++;
}

/* So it is beside the thread of a stream. */
KN_TEST(team, signals_stay_with_the_maker_of_a_stream)
{
    tally t = { .before = blocked(SIGINT) }, *ctx = &t;
    kn_stream *s = kn_stream_create(KN_CPU, "side", KN_STREAM_WORKER);
    KN_CHECK(s && kn_stream_host(s, "look", see_signals_on_stream, &ctx, sizeof ctx) &&
             kn_stream_sync(s));
    KN_CHECK(each_once(&t, 1) && blocked(SIGINT) == t.before);
    kn_stream_destroy(s);
}

/* The piece that comes first waits for all others. */
static void wait_for_others(const void *ctx, int64_t begin, int64_t end)
{
    tally *t = *(tally *const *)ctx;
    if (t->inner++ == 0)
        while (t->sum < MOST - (int)(end - begin))
            usleep(100);
    for (int64_t i = begin; i < end; i++)
        t->runs[i]++;
    t->sum += (int)(end - begin);
}

/* A thread that gets no further holds back one piece, and no other of its share. */
KN_TEST(team, others_take_what_a_thread_has_not_begun)
{
    for (int threads = 2; threads <= 4; threads++) {
        tally t = { 0 }, *ctx = &t;
        kn_set_threads(threads);
        kn_each_range(threads, MOST, wait_for_others, &ctx);
        KN_CHECK(each_once(&t, MOST) && t.inner > threads, "%d pieces", t.inner);
    }
    kn_set_threads(1);
}

/* Each piece is given once, a part's own share first and in order. */
KN_TEST(team, claims)
{
    for (int parts = 1; parts <= MOST; parts += parts < 5 ? 1 : 19)
        for (int n = 0; n < MOST; n += 7) {
            kn_claims c = { .n = n, .parts = parts };
            tally t = { 0 };
            int64_t last = -1;
            for (int64_t i; (i = kn_claim(&c, parts / 2)) >= 0; last = i)
                t.runs[i]++;
            KN_CHECK(each_once(&t, n) && (n == 0 || last >= 0), "%d parts of %d", parts, n);
            KN_CHECK(kn_claim(&c, 0) == -1 && kn_claim(&c, parts - 1) == -1);
        }
}

static void count_range(const void *ctx, int64_t begin, int64_t end)
{
    tally *t = *(tally *const *)ctx;
    if (begin >= end)
        t->wrong = true;
    for (int64_t i = begin; i < end; i++)
        t->runs[i]++;
}

KN_TEST(team, ranges_cover_everything)
{
    kn_set_threads(3);
    for (int parts = 1; parts <= 9; parts++)
        for (int n = 0; n <= MOST; n++) {
            tally t = { 0 }, *ctx = &t;
            kn_each_range(parts, n, count_range, &ctx);
            KN_CHECK(each_once(&t, n), "%d elements in %d parts", n, parts);
        }
    kn_set_threads(1);
}

static void nested(const void *ctx, int64_t part)
{
    tally *t = *(tally *const *)ctx, inside = { 0 }, *p = &inside;
    kn_each_part(7, count_part, &p);
    if (each_once(&inside, 7))
        t->inner++;
}

KN_TEST(team, a_part_may_be_cut_again)
{
    tally t = { 0 }, *ctx = &t;
    kn_set_threads(3);
    kn_each_part(5, nested, &ctx);
    KN_CHECK(t.inner == 5);
    kn_set_threads(1);
}

static void *other_thread(void *arg)
{
    kn_set_threads(3);
    for (int round = 0; round < 300; round++) {
        tally t = { 0 }, *ctx = &t;
        kn_each_part(3, count_part, &ctx);
        if (!each_once(&t, 3))
            *(_Atomic bool *)arg = true;
    }
    kn_context_end();
    return NULL;
}

KN_TEST(team, contexts_have_teams_of_their_own)
{
    pthread_t thread[4];
    _Atomic bool wrong = false;
    for (int i = 0; i < 4; i++)
        KN_CHECK(pthread_create(&thread[i], NULL, other_thread, &wrong) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    KN_CHECK(!wrong);
}

/* True if every other thread of this process sleeps. */
static bool others_sleep(void)
{
    char path[300], stat[256];
    bool all = true;
    DIR *d = opendir("/proc/self/task");
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", e->d_name);
        FILE *f = e->d_name[0] != '.' && atoi(e->d_name) != gettid() ? fopen(path, "r") : NULL;
        if (!f)
            continue;
        stat[fread(stat, 1, sizeof stat - 1, f)] = 0;
        const char *name_end = strrchr(stat, ')');
        all = all && name_end && name_end[2] == 'S';
        fclose(f);
    }
    return d && closedir(d) == 0 && all;
}

/* Returns once the other threads have been asleep at many looks in a row. */
static void await_sleep(void)
{
    const struct timespec t = { .tv_nsec = 5 * 1000 * 1000 };
    for (int looks = 0; looks < 20; nanosleep(&t, NULL))
        looks = others_sleep() ? looks + 1 : 0;
}

KN_TEST(team, a_forked_process_has_one_of_its_own)
{
#ifdef __SANITIZE_THREAD__
    KN_SKIP("ThreadSanitizer has no threads in a forked process");
#endif
    tally t = { 0 }, *ctx = &t;
    kn_set_threads(3);
    kn_each_part(3, count_part, &ctx);
    await_sleep(); /* a thread that still starts may hold a lock of AddressSanitizer's */
    const pid_t child = fork();
    if (child == 0) {
        tally u = { 0 }, *p = &u;
        kn_each_part(3, count_part, &p);
        kn_context_end();
        _exit(each_once(&u, 3) ? 0 : 1);
    }
    int status = 1;
    KN_CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "status %d", status);
    kn_set_threads(1);
}

static void one_works(const void *ctx, int64_t part)
{
    (void)ctx;
    if (part == 1)
        await_sleep();
}

/* Waiting threads must free their cores: else the runner ends the case. */
KN_TEST(team, who_waits_sleeps)
{
    kn_set_threads(4);
    tally t = { 0 }, *ctx = &t;
    kn_each_part(4, count_part, &ctx);
    kn_each_part(4, one_works, NULL);
    kn_set_threads(1);
}
