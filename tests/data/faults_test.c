/* tests/data/faults_test.c: loaders whose samples fail, are skipped or end, that stop early,
 * or whose options are refused. */
#include "comm/comm.h"
#include "tests/data/owned.h"
#include "tests/data/samples.h"
#include "tests/failing.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static const numbers ends_at_13 = { 13, -1, -1 };

/* The error of a sample comes with its batch, whichever thread met it first. */
KN_TEST(faults, an_error_comes_with_its_batch)
{
    numbers n = { 0, 9, -1 };
    double x[4 * WIDTH];
    for (int workers = 0; workers < 3; workers++) {
        kn_loader *l = kn_loader_new(fill_numbers, &n, NULL, .samples = 16, NUMBERS, .batch = 4,
                                     .workers = workers);
        KN_CHECK(take(l, x, NULL) == 4 && take(l, x, NULL) == 4);
        for (int again = 0; again < 2; again++) {
            KN_CHECK(take(l, x, NULL) < 0 && kn_loader_round(l) == 2);
            KN_CHECK_ERROR("sample 9 is bad");
        }
        n.bad = -1; /* the batch can be tried again */
        KN_CHECK(take(l, x, NULL) == 4 && x[WIDTH] == 9);
        kn_loader_free(l);
        n.bad = 9;
    }
}

/* Of two workers the one with rows 0 and 1 waits in row 1 until the other has met row 10 and has
 * gone on: what it finds comes second. */
typedef struct late {
    int answer;        /* of rows 1 and 10: KN_SAMPLE_END, or false with an error */
    _Atomic int other; /* the worker that met row 10, or -1 */
    atomic_bool gone_on;
} late;

static int comes_late(kn_data_sample *s, void *arg)
{
    late *x = arg;
    if (s->index != 10 && s->worker == atomic_load(&x->other))
        atomic_store(&x->gone_on, true);
    if (s->index == 1)
        while (!atomic_load(&x->gone_on))
            usleep(100);
    if (s->index == 10)
        atomic_store(&x->other, s->worker);
    if (s->index != 1 && s->index != 10)
        return true;
    return x->answer ? x->answer : kn_fail("sample %d is bad", (int)s->index);
}

/* The first row of a batch counts, not the first in time. */
KN_TEST(faults, the_first_row_counts)
{
    static const struct {
        int answer, samples;
        const char *error;
    } cases[] = {
        { false, 16, "sample 1 is bad" },
        { KN_SAMPLE_END, 0, ".batch must lie between 1 and the 1 samples there are, not 16" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double x[16];
        late how = { .answer = cases[i].answer, .other = -1 };
        OWNED_LOADER kn_loader *l =
            kn_loader_new(comes_late, &how, NULL, .samples = cases[i].samples,
                          .field = { { .dtype = KN_F64 } }, .batch = 16, .workers = 2);
        KN_CHECK(take(l, x, NULL) < 0);
        KN_CHECK_ERROR(cases[i].error);
    }
}

KN_TEST(faults, skipped_samples_are_replaced_and_counted)
{
    double x[7 * WIDTH], first[7 * WIDTH];
    for (int workers = 0; workers < 3; workers++)
        for (int known = 0; known < 2; known++) {
            numbers n = { known ? 0 : 14, -1, 6 }; /* 6 and 13 */
            kn_loader *l = kn_loader_new(fill_numbers, &n, NULL, .samples = known ? 14 : 0, NUMBERS,
                                         .batch = 7, .workers = workers);
            for (int k = 0; k < 4; k++) {
                KN_CHECK(take(l, x, NULL) == 7);
                for (int r = 0; r < 7; r++)
                    KN_CHECK(x[WIDTH * r] == (k % 2 * 7 + r + (r == 6)) % 14, "row %d", r);
                if (k == 0)
                    memcpy(first, x, sizeof x);
            }
            KN_CHECK(kn_loader_read_stats(l).replaced == 4);
            kn_loader_free(l);
        }
    numbers none = { 0, -1, 0 };
    OWNED_LOADER kn_loader *l =
        kn_loader_new(fill_numbers, &none, NULL, .samples = 1, NUMBERS, .batch = 1);
    KN_CHECK(take(l, x, NULL) < 0);
    KN_CHECK_ERROR("sample 0 and all that follow it are skipped");
}

static int answer(kn_data_sample *s, void *arg)
{
    return *(int *)arg;
}

KN_TEST(faults, answers_of_the_function)
{
    static const struct {
        int answer;
        const char *error;
    } cases[] = { { 0, "returns 0 for sample 0 without a kn_fail that says why" },
                  { 7, "returns 7 for sample 0; true, false, KN_SAMPLE_SKIP" },
                  { -1, "returns -1 for sample 0" },
                  { KN_SAMPLE_END, "returns KN_SAMPLE_END for sample 0 of 4" } };
    double x[2];
    for (int workers = 0; workers < 2; workers++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            int a = cases[i].answer;
            OWNED_LOADER kn_loader *l =
                kn_loader_new(answer, &a, NULL, .samples = 4, .field = { { .dtype = KN_F64 } },
                              .batch = 2, .workers = workers);
            KN_CHECK(take(l, x, NULL) < 0);
            KN_CHECK_ERROR(cases[i].error);
        }
}

/* A function leaves zeros; tensors that it makes are freed; its own error text counts. */
static int sparse(kn_data_sample *s, void *arg)
{
    if (!kn_zeros(KN_F32, KN_CPU, KN_SHAPE(100)))
        return false;
    ((float *)s->field[0])[(s->index + s->epoch / 3) % 3] = 1;
    s->index = s->epoch = 77; /* its own copy */
    return true;
}

KN_TEST(faults, rows_begin_as_zeros)
{
    float x[6 * 3];
    int64_t live = kn_live_tensors();
    kn_loader *l = kn_loader_new(sparse, NULL, NULL, .samples = 6, .batch = 6, .workers = 2,
                                 .field = { { KN_F32, 1, { 3 } } });
    for (int k = 0; k < 9; k++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(l);
        KN_CHECK(b.x && !b.y && kn_to_host(b.x, x, sizeof x));
        for (int i = 0; i < 18; i++)
            KN_CHECK(x[i] == ((i / 3 + k / 3) % 3 == i % 3), "epoch %d", k);
        kn_scope_end(scope);
    }
    kn_loader_free(l);
    KN_CHECK(kn_live_tensors() == live);
}

/* ---- data of unknown length ------------------------------------------------------------------ */

KN_TEST(faults, ends_that_make_no_sense)
{
    double x[16 * WIDTH];
    int end = KN_SAMPLE_END;
    OWNED_LOADER kn_loader *l =
        kn_loader_new(answer, &end, NULL, .field = { { .dtype = KN_F64 } }, .batch = 2);
    KN_CHECK(take(l, x, NULL) < 0);
    KN_CHECK_ERROR("kn_loader_new: the data set is empty");
    kn_loader_free(l);
    l = kn_loader_new(fill_numbers, (void *)&ends_at_13, NULL, NUMBERS, .batch = 16);
    KN_CHECK(take(l, x, NULL) < 0);
    KN_CHECK_ERROR(".batch must lie between 1 and the 13 samples there are, not 16");
    kn_loader_free(l);
    l = kn_loader_new(fill_numbers, (void *)&ends_at_13, NULL, NUMBERS, .batch = 4, .workers = 1);
    KN_CHECK(kn_loader_rounds(l) == 0 && kn_loader_position(l).samples == 0);
    kn_loader_seek(l, 5);
    KN_CHECK(take(l, x, NULL) < 0);
    KN_CHECK_ERROR("there is no sample 20; the loader was sent behind the end of its data");
    kn_loader_seek(l, 3);
    KN_CHECK(take(l, x, NULL) == 4 && x[0] == 12 && x[WIDTH] == 0);
    KN_CHECK(kn_loader_rounds(l) == 3 && kn_loader_position(l).samples == 13);
    KN_CHECK(kn_loader_position(l).epoch == 1 && kn_loader_position(l).sample == 3);
}

/* Behind the end of its data a function may fail: the workers that come so far meet no error. */
static int ends_then_fails(kn_data_sample *s, void *arg)
{
    const numbers *n = arg;
    return s->index > n->end ? kn_fail("sample %d is behind the end", (int)s->index)
                             : fill_numbers(s, arg);
}

KN_TEST(faults, errors_behind_the_end_are_none)
{
    double x[8 * WIDTH];
    for (int workers = 0; workers < 4; workers++) {
        OWNED_LOADER kn_loader *l = kn_loader_new(ends_then_fails, (void *)&ends_at_13, NULL,
                                                  NUMBERS, .batch = 8, .workers = workers);
        KN_CHECK(take(l, x, NULL) == 8 && take(l, x, NULL) == 8);
        KN_CHECK(x[4 * WIDTH] == 12 && x[5 * WIDTH] == 0);
    }
}

/* Goes on from each position of a run whose end isn't known at first, also where the data end. */
KN_TEST(faults, resume_before_and_behind_the_end)
{
    const numbers ends[] = { { 13, -1, -1 }, { 12, -1, -1 } };
    double x[4 * WIDTH], y[4 * WIDTH];
    for (int e = 0; e < 2; e++)
        for (int round = 0; round < 8; round++) {
            OWNED_LOADER kn_loader *one = kn_loader_new(fill_numbers, (void *)&ends[e], NULL,
                                                        NUMBERS, .batch = 4, .workers = round % 2);
            OWNED_LOADER kn_loader *two = kn_loader_new(fill_numbers, (void *)&ends[e], NULL,
                                                        NUMBERS, .batch = 4, .workers = round % 3);
            for (int k = 0; k < round; k++)
                KN_CHECK(take(one, x, NULL) == 4);
            kn_position p = kn_loader_position(one);
            KN_CHECK(p.samples == (round > 3 ? ends[e].end : 0));
            KN_CHECK(kn_loader_set_position(two, p));
            for (int k = 0; k < 5; k++) {
                KN_CHECK(take(one, x, NULL) == 4 && take(two, y, NULL) == 4);
                KN_CHECK(memcmp(x, y, sizeof x) == 0, "round %d + %d", round, k);
            }
            KN_CHECK(kn_loader_position(two).samples == ends[e].end);
        }
}

/* ---- stopping -------------------------------------------------------------------------------- */

static _Atomic int calls;

static int counted(kn_data_sample *s, void *arg)
{
    atomic_fetch_add(&calls, 1);
    return fill_numbers(s, arg);
}

__attribute__((unused)) static int nothing_to_do(kn_comm *world, void *arg)
{
    return 0;
}

/* The threads are gone when kn_loader_free returns: kn_spawn forks beside none. */
KN_TEST(faults, stops_at_any_time)
{
    double x[4 * WIDTH];
    for (int taken = 0; taken < 6; taken++) {
        kn_loader *l = kn_loader_new(counted, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                     .batch = 4, .workers = 3, .ahead = 5);
        for (int k = 0; k < taken; k++) {
            KN_CHECK(take(l, x, NULL) == 4);
            if (k % 2)
                kn_loader_seek(l, 7);
        }
        kn_loader_free(l);
        int now = atomic_load(&calls);
#ifndef __SANITIZE_THREAD__ /* it has a thread of its own, which kn_spawn counts */
        KN_CHECK(kn_spawn(1, nothing_to_do, NULL) == 0);
#endif
        KN_CHECK(atomic_load(&calls) == now);
    }
}

static bool blocked(int signal)
{
    sigset_t now;
    return pthread_sigmask(SIG_SETMASK, NULL, &now) == 0 && sigismember(&now, signal) == 1;
}

static int counted_alone(kn_data_sample *s, void *arg)
{
    if (!blocked(SIGINT))
        return kn_fail("a worker takes signals");
    if (kn_threads() != 1)
        return kn_fail("%d threads share the kernels of a worker", kn_threads());
    return counted(s, arg);
}

/* So many batches are filled ahead of the one that was taken, and none beyond. The threads use no
 * others, and take no signals. */
KN_TEST(faults, fills_as_far_ahead_as_it_may)
{
    double x[4 * WIDTH];
    const bool before = blocked(SIGINT);
    for (int ahead = 1; ahead < 4; ahead++) {
        const int most = 4 * (1 + ahead);
        atomic_store(&calls, 0);
        kn_loader *l = kn_loader_new(counted_alone, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                     .batch = 4, .workers = 2, .ahead = ahead);
        KN_CHECK(take(l, x, NULL) == 4 && blocked(SIGINT) == before);
        for (int i = 0; i < 200000 && atomic_load(&calls) < most; i++)
            usleep(1000); /* without end but for a pool that fills too little */
        kn_loader_free(l);
        KN_CHECK(atomic_load(&calls) == most, "%d samples", atomic_load(&calls));
    }
}

static int trains(kn_comm *world, void *arg)
{
    double x[4 * WIDTH];
    return take(arg, x, NULL) != 4 || x[WIDTH] != 1 || kn_comm_size(world) != 2;
}

/* Threads start with the first batch, so ranks can be forked after a loader was made. */
KN_TEST(faults, loaders_made_before_ranks)
{
    double x[4 * WIDTH];
    OWNED_LOADER kn_loader *l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13,
                                              NUMBERS, .batch = 4, .workers = 2);
    KN_CHECK(kn_spawn(2, trains, l) == 0);
    KN_CHECK(take(l, x, NULL) == 4);
}

/* A child of fork has none of the threads: it is told so, and doesn't wait for them. */
KN_TEST(faults, a_fork_beside_workers)
{
#ifdef __SANITIZE_THREAD__
    KN_SKIP("the thread sanitizer ends a child that is forked beside threads");
#else
    double x[4 * WIDTH];
    int status;
    kn_loader *l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                 .batch = 4, .workers = 2);
    KN_CHECK(take(l, x, NULL) == 4);
    pid_t child = fork();
    if (child == 0) {
        bool told = take(l, x, NULL) < 0 &&
                    strstr(kn_error(), "the threads of this loader belong to the process");
        kn_loader_free(l);
        _exit(told ? 0 : 1);
    }
    KN_CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    KN_CHECK(take(l, x, NULL) == 4 && x[0] == 4);
    kn_loader_free(l);
#endif
}

KN_TEST(faults, a_batch_outlives_its_loader)
{
    kn_ledger before = kn_ledger_read();
    for (int workers = 0; workers < 2; workers++) {
        kn_loader *l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                     .batch = 4, .workers = workers);
        kn_scope s = kn_scope_begin();
        kn_tensor *x = kn_keep(kn_next(l).x);
        kn_next(l);
        kn_scope_end(s);
        kn_loader_free(l);
        double row[4 * WIDTH];
        KN_CHECK(kn_to_host(x, row, sizeof row) && row[WIDTH * 3] == 3);
        kn_tensor_free(x);
    }
    KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before.live[KN_MEM_DATA]);
}

KN_TEST(faults, every_allocation_failing)
{
    for (int workers = 0; workers < 2; workers++)
        for (int64_t n = 1;; n++) {
            kn_ledger before = kn_ledger_read();
            kn_scope s = kn_scope_begin();
            kn_loader *l = NULL;
            const bool ok = WITH_FAILING(
                n, (l = kn_loader_new(fill_numbers, (void *)&plain, NULL, NUMBERS, .samples = 13,
                                      .batch = 4, .workers = workers)) &&
                       kn_next(l).x != NULL);
            KN_CHECK(!l || kn_next(l).x != NULL); /* it goes on */
            kn_scope_end(s);
            kn_loader_free(l);
            KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before.live[KN_MEM_DATA]);
            if (ok)
                break;
            KN_CHECK(n < 100);
        }
}

/* ---- options --------------------------------------------------------------------------------- */

#define REFUSES(error, ...)                                                                        \
    do {                                                                                           \
        KN_CHECK(!kn_loader_new(fill_numbers, (void *)&plain, NULL, __VA_ARGS__));                 \
        KN_CHECK_ERROR(error);                                                                     \
    } while (0)

KN_TEST(faults, options)
{
    const int64_t big = (int64_t)1 << 62;
    REFUSES(".batch must lie between 1 and the 13 samples there are, not 0", .samples = 13,
            NUMBERS);
    REFUSES(".batch must lie between 1 and the 13 samples there are, not 14", .samples = 13,
            NUMBERS, .batch = 14);
    REFUSES(".batch must be at least 1, not -1", NUMBERS, .batch = -1);
    REFUSES(".accum must be at least 1, not -1", .samples = 13, NUMBERS, .batch = 1, .accum = -1);
    REFUSES("is too large", .samples = big, NUMBERS, .batch = big);
    REFUSES("is too large", .samples = 13, NUMBERS, .batch = 13, .accum = big);
    REFUSES("are more than any memory", .samples = big, NUMBERS, .batch = big / 16 - 1);
    REFUSES(".samples must be at least 1, or 0", .samples = -1, NUMBERS, .batch = 1);
    REFUSES(".workers must lie between 0 and 256, not -1", .samples = 13, NUMBERS, .batch = 1,
            .workers = -1);
    REFUSES(".ahead must lie between 1 and 1024, not 5000", .samples = 13, NUMBERS, .batch = 1,
            .workers = 1, .ahead = 5000);
    REFUSES("there are no .workers", .samples = 13, NUMBERS, .batch = 1, .ahead = 1);
    REFUSES(".tail 9 is none", .samples = 13, NUMBERS, .batch = 1, .tail = (kn_tail)9);
    REFUSES(".shuffle needs the number of .samples", NUMBERS, .batch = 1, .shuffle = true);
    REFUSES("KN_TAIL_DROP with .accum needs", NUMBERS, .batch = 1, .accum = 2,
            .tail = KN_TAIL_DROP);
    REFUSES("a step takes 16 samples (.batch 4, 1 ranks, .accum 4), but there are 13",
            .samples = 13, NUMBERS, .batch = 4, .accum = 4, .tail = KN_TAIL_DROP);
    REFUSES(".field is empty", .samples = 13, .batch = 1);
    REFUSES("field 1 is given, but field 0 has no dtype", .samples = 13, .batch = 1,
            .field = { { 0 }, { .dtype = KN_F32 } });
    REFUSES("field 0 has a shape, but no dtype", .samples = 13, .batch = 1,
            .field = { { .ndim = 1, .shape = { 4 } } });
    REFUSES("field 0 has dtype 1 and 8 dims", .samples = 13, .batch = 1,
            .field = { { .dtype = KN_F32, .ndim = 8 } });
    REFUSES("field 0 has dtype 99", .samples = 13, .batch = 1,
            .field = { { .dtype = (kn_dtype)99 } });
    REFUSES("field 0 has size -1 in dim 1", .samples = 13, .batch = 1,
            .field = { { KN_F32, 2, { 1, -1 } } });
    REFUSES("field 0 has size 4611686018427387904 in dim 0", .samples = 13, .batch = 1,
            .field = { { KN_F64, 1, { big } } });
    REFUSED(kn_loader_new(NULL, NULL, NULL, .samples = 13, NUMBERS, .batch = 1),
            "the function that fills samples is NULL");
}
