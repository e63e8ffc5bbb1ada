/* tests/data/samples_test.c: loaders over a function of the user: each row is the sample that its
 * place says, whichever thread fills it and however a run got there. */
#include "tests/data/owned.h"
#include "tests/data/samples.h"
#include "comm/comm.h"
#include "data/data.h"

enum { SAMPLES = 13, MOST = 16 }; /* rows of a batch */

KN_TEST(samples, any_number_of_workers)
{
    double one[8][4 * WIDTH], other[4 * WIDTH];
    int64_t live = kn_live_tensors();
    for (int shuffle = 0; shuffle < 2; shuffle++)
        for (int workers = 0; workers < 5; workers++) {
            OWNED_LOADER kn_loader *l =
                kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS,
                              .batch = 4, .shuffle = shuffle, .seed = 5, .workers = workers,
                              .ahead = workers > 2 ? workers : 0);
            for (int k = 0; k < 8; k++) {
                double *x = workers ? other : one[k];
                KN_CHECK(take(l, x, NULL) == 4);
                KN_CHECK(memcmp(x, one[k], sizeof one[k]) == 0, "%d workers", workers);
                for (int r = 0; r < 4; r++) {
                    int64_t at = 4 * k + r, i = at % SAMPLES, e = at / SAMPLES;
                    i = shuffle ? kn_shuffle(5, e, SAMPLES, i) : i;
                    KN_CHECK(x[WIDTH * r] == (double)i && x[WIDTH * r + 1] == (double)e);
                }
            }
        }
    KN_CHECK(kn_live_tensors() == live);
}

/* The numbers differ from sample to sample, epoch to epoch, seed to seed. */
KN_TEST(samples, random_numbers_of_a_sample)
{
    double x[2][4][4 * WIDTH];
    for (int seed = 0; seed < 2; seed++) {
        OWNED_LOADER kn_loader *l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 8,
                                                  NUMBERS, .batch = 4, .seed = (uint64_t)seed);
        for (int k = 0; k < 4; k++)
            KN_CHECK(take(l, x[seed][k], NULL) == 4);
    }
    for (int a = 0; a < 32; a++)
        for (int b = 0; b < a; b++)
            KN_CHECK((&x[0][0][0])[a * WIDTH + 2] != (&x[0][0][0])[b * WIDTH + 2]);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

typedef struct run {
    kn_tail tail;
    int64_t samples, batch, accum;
    int workers, unknown;
} run;

static kn_loader *loader_of(const run *r, const numbers *n, kn_comm *world)
{
    int ranks = kn_comm_size(world);
    return kn_loader_new(fill_numbers, (void *)n, world, .samples = r->unknown ? 0 : r->samples,
                         NUMBERS, .batch = r->batch, .accum = r->accum / ranks, .tail = r->tail,
                         .shuffle = !r->unknown, .seed = 9, .workers = r->workers);
}

/* Three epochs: rank r's round k is the micro-batch k N + r that one process with .accum = 4 sees,
 * to the bit; and each sample that counts comes once an epoch. */
static int shares(kn_comm *world, void *arg)
{
    const run *r = arg;
    numbers n = { r->unknown ? r->samples : 0, -1, -1 };
    int ranks = kn_comm_size(world), bad = 0;
    double x[MOST * WIDTH], y[MOST * WIDTH], seen[SAMPLES];
    run alone = *r;
    alone.unknown = alone.workers = 0;
    OWNED_LOADER kn_loader *mine = loader_of(r, &n, world);
    alone.accum = 4;
    OWNED_LOADER kn_loader *all =
        kn_loader_new(fill_numbers, &n, NULL, .samples = r->samples, NUMBERS, .batch = r->batch,
                      .accum = 4, .tail = r->tail, .seed = 9, .shuffle = !r->unknown);
    int64_t rounds = kn_loader_rounds(all) / ranks, full = 0;
    memset(seen, 0, sizeof seen);
    for (int64_t k = 0; k < 3 * rounds && kn_ok(); k++) {
        int64_t new_x, new_y, rows = take(mine, x, &new_x);
        kn_loader_seek(all, k * ranks + kn_rank(world));
        bad += rows < 1 || take(all, y, &new_y) != rows || new_x != new_y;
        bad += memcmp(x, y, (size_t)(rows * WIDTH) * sizeof *x) != 0;
        for (int64_t i = 0; i < new_x; i++)
            seen[(int)x[WIDTH * i]]++;
        full += new_x;
    }
    bad += r->tail != KN_TAIL_NEXT && !r->unknown && kn_loader_rounds(mine) != rounds;
    double total = kn_sum_over_ranks(world, (double)full);
    for (int i = 0; i < SAMPLES; i++) {
        double times = kn_sum_over_ranks(world, seen[i]);
        bad += (r->tail == KN_TAIL_PAD || r->tail == KN_TAIL_SHORT) && times != 3;
        bad += r->tail == KN_TAIL_NEXT &&
               (times < floor(total / SAMPLES) || times > ceil(total / SAMPLES));
        bad += r->tail == KN_TAIL_DROP && times > 3;
    }
    bad += !kn_ok();
    return bad;
}

KN_TEST(samples, ranks_partition_an_epoch)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int tail = 0; tail <= KN_TAIL_SHORT; tail++)
            for (int unknown = 0; unknown < 2; unknown++) {
                run r = { (kn_tail)tail, SAMPLES, 1 + unknown, 4, tail % 2 * 2, unknown };
                if (unknown && tail == KN_TAIL_DROP && ranks < 4)
                    continue; /* refused */
                KN_CHECK(kn_spawn_threads(ranks, shares, &r) == 0, "%d ranks, tail %d, %s", ranks,
                         tail, unknown ? "unknown" : "known");
            }
}

/* ---- positions ------------------------------------------------------------------------------- */

typedef struct resumed {
    run run;
    kn_position from;
    int64_t round; /* of the process that saved it, in steps of 4 samples */
} resumed;

/* Goes on from a position with G = 8: the rows are those of one process with .batch = 8. */
static int goes_on(kn_comm *world, void *arg)
{
    const resumed *r = arg;
    int ranks = kn_comm_size(world), bad = 0;
    run mine = r->run, whole = r->run;
    double x[MOST * WIDTH], y[MOST * WIDTH];
    mine.batch = 8 / ranks;
    OWNED_LOADER kn_loader *l = kn_loader_new(
        fill_numbers, (void *)&plain, world, .samples = SAMPLES, NUMBERS, .batch = mine.batch,
        .tail = mine.tail, .shuffle = true, .seed = 9, .workers = mine.workers);
    OWNED_LOADER kn_loader *all =
        kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS, .batch = 8,
                      .tail = whole.tail, .shuffle = true, .seed = 9);
    bad += take(l, x, NULL) < 1; /* it was somewhere else before */
    bad += !kn_loader_set_position(l, r->from);
    kn_loader_seek(all, r->round);
    for (int k = 0; k < 3 && kn_ok(); k++) {
        bad += take(l, x, NULL) != mine.batch || take(all, y, NULL) != 8;
        bad += memcmp(x, y + kn_rank(world) * mine.batch * WIDTH,
                      (size_t)(mine.batch * WIDTH) * sizeof *x) != 0;
    }
    kn_position a = kn_loader_position(l), b = kn_loader_position(all);
    bad += memcmp(&a, &b, sizeof a) != 0 || !kn_ok();
    return bad;
}

KN_TEST(samples, resume_at_every_position_on_other_ranks)
{
    const kn_tail tails[] = { KN_TAIL_NEXT, KN_TAIL_DROP, KN_TAIL_PAD };
    double x[8 * WIDTH];
    for (int t = 0; t < 3; t++) {
        OWNED_LOADER kn_loader *l =
            kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS,
                          .batch = 8, .tail = tails[t], .shuffle = true, .seed = 9);
        for (int64_t round = 0; round < 5; round++) {
            resumed r = { { .tail = tails[t], .workers = round % 2 },
                          kn_loader_position(l),
                          round };
            for (int ranks = 1; ranks <= 4; ranks *= 2)
                KN_CHECK(kn_spawn_threads(ranks, goes_on, &r) == 0, "tail %d, round %d, %d ranks",
                         t, (int)round, ranks);
            KN_CHECK(take(l, x, NULL) == 8);
        }
    }
}

/* Samples filled ahead are of no use behind a jump. */
KN_TEST(samples, jumps)
{
    static const int64_t rounds[] = { 0, 5, 6, 0, 1, 1, 7, 3, 4 };
    double x[4 * WIDTH];
    for (int workers = 0; workers < 3; workers++) {
        OWNED_LOADER kn_loader *l =
            kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS,
                          .batch = 4, .workers = workers);
        for (size_t i = 0; i < sizeof rounds / sizeof rounds[0]; i++) {
            kn_loader_seek(l, rounds[i]);
            KN_CHECK(kn_loader_round(l) == rounds[i] && take(l, x, NULL) == 4);
            KN_CHECK(x[0] == (double)(4 * rounds[i] % SAMPLES), "round %d", (int)rounds[i]);
        }
        kn_loader_seek(l, -3);
        KN_CHECK_ERROR("kn_loader_seek: round -3; rounds count from 0");
        KN_CHECK(kn_loader_round(l) == 5, "it stays");
    }
}

KN_TEST(samples, positions_that_do_not_fit)
{
    OWNED_LOADER kn_loader *l =
        kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS, .batch = 4,
                      .shuffle = true, .tail = KN_TAIL_DROP);
    const struct {
        kn_position p;
        const char *error;
    } cases[] = {
        { { 0, 4, 4, 14, 0 }, "of a data set of 14 samples; this one has 13" },
        { { 0, 4, 4, 13, 1 }, "of seed 1, this loader has seed 0" },
        { { 0, 4, 8, 13, 0 }, "of steps of 8 samples; this loader takes 4" },
        { { 0, 3, 4, 13, 0 }, "sample 3 of epoch 0 lies inside of a round of 4 samples" },
        { { 0, 12, 4, 13, 0 }, "no sample 12 of epoch 0" },
        { { -1, 0, 4, 13, 0 }, "no sample 0 of epoch -1" },
        { { 1, -4, 4, 13, 0 }, "no sample -4" },
        { { INT64_MAX, 4, 4, 13, 0 }, "no sample 4 of epoch 9223372036854775807" },
        { { INT64_MAX / 12, 4, 4, 13, 0 }, "no sample 4 of epoch" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        KN_CHECK(!kn_loader_set_position(l, cases[i].p), "case %zu", i);
        KN_CHECK_ERROR(cases[i].error);
        KN_CHECK(kn_loader_round(l) == 0);
    }
    kn_loader_seek(l, INT64_MAX);
    KN_CHECK_ERROR("kn_loader_seek: round 9223372036854775807 is beyond the last one");
    kn_loader_seek(l, INT64_MIN);
    KN_CHECK_ERROR("rounds count from 0");
    KN_CHECK(kn_loader_round(l) == 0);
    kn_data_sample s = { .seed = 1 };
    REFUSED(kn_draw_below(&s, 0), "kn_draw_below: n is 0");
    REFUSED(kn_random_below(1, 1, 1, -5), "kn_random_below: n is -5");
    kn_loader_free(l);
    l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS, .batch = 4,
                      .seed = 5); /* in order: the seed says nothing about places */
    KN_CHECK(kn_loader_set_position(l, (kn_position){ 0, 4, 4, 13, 1 }) && kn_loader_round(l) == 1);
}

/* A run goes on at any sample, with batches whose rounds don't begin there. */
KN_TEST(samples, go_on_inside_of_a_round)
{
    double x[4 * WIDTH];
    for (int64_t at = 0; at < 30; at++)
        for (int workers = 0; workers < 3; workers++) {
            OWNED_LOADER kn_loader *l =
                kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS,
                              .batch = 4, .shuffle = true, .seed = 5, .workers = workers);
            KN_CHECK(l && take(l, x, NULL) == 4); /* threads are ahead of it */
            const kn_position p = { at / SAMPLES, at % SAMPLES, 1, SAMPLES, 5 };
            KN_CHECK(kn_loader_set_position(l, p));
            KN_CHECK(kn_loader_round(l) == at / 4);
            const kn_position q = kn_loader_position(l);
            KN_CHECK(q.epoch == p.epoch && q.sample == p.sample);
            for (int64_t k = 0; k < 4; k++) {
                KN_CHECK(take(l, x, NULL) == 4);
                for (int64_t r = 0; r < 4; r++) {
                    const int64_t i = at + 4 * k + r, e = i / SAMPLES;
                    KN_CHECK(x[WIDTH * r] == (double)kn_shuffle(5, e, SAMPLES, i % SAMPLES) &&
                                 x[WIDTH * r + 1] == (double)e,
                             "from %d, round %d, row %d", (int)at, (int)k, (int)r);
                }
            }
            kn_loader_seek(l, 0); /* counts from the first sample again */
            KN_CHECK(kn_loader_position(l).sample == 0 && kn_loader_position(l).epoch == 0);
        }
}

/* A round of all ranks may take more samples than there are; an epoch still has one. */
KN_TEST(samples, an_epoch_has_a_round)
{
    kn_comm *world = kn_comm_simulated(4, 0, 1e9);
    kn_loader *l =
        kn_loader_new(fill_numbers, (void *)&plain, world, .samples = SAMPLES, NUMBERS, .batch = 4);
    KN_CHECK(kn_loader_rounds(l) == 1, "%d", (int)kn_loader_rounds(l));
    kn_loader_free(l);
    kn_comm_simulated_free(world);
}

/* Places are counted in 64 bits: behind the last round nothing is filled, also not ahead. */
KN_TEST(samples, the_last_round)
{
    const int64_t last = INT64_MAX / 4 - 2;
    double x[4 * WIDTH];
    for (int workers = 0; workers < 3; workers++) {
        OWNED_LOADER kn_loader *l =
            kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = SAMPLES, NUMBERS,
                          .batch = 4, .workers = workers, .ahead = workers ? 8 : 0);
        kn_loader_seek(l, last - 1);
        for (int k = 0; k < 2; k++) {
            KN_CHECK(take(l, x, NULL) == 4);
            KN_CHECK(x[0] == (double)((last - 1 + k) * 4 % SAMPLES) && x[1] > 0);
        }
        for (int k = 0; k < 2; k++) {
            KN_CHECK(take(l, x, NULL) < 0);
            KN_CHECK_ERROR(
                "there is no round 2305843009213693950; 2305843009213693949 is the last");
        }
        kn_loader_seek(l, 1);
        KN_CHECK(take(l, x, NULL) == 4 && x[0] == 4);
    }
}

/* A position that is refused changes no sample, also not of batches that threads are filling. */
KN_TEST(samples, refused_positions_beside_workers)
{
    const numbers long_data = { 1 << 20, -1, -1 };
    double x[4 * WIDTH];
    OWNED_LOADER kn_loader *l = kn_loader_new(fill_numbers, (void *)&long_data, NULL, NUMBERS,
                                              .batch = 4, .workers = 2, .ahead = 4);
    for (int k = 0; k < 500; k++) {
        KN_CHECK(take(l, x, NULL) == 4);
        for (int r = 0; r < 4; r++)
            KN_CHECK(x[WIDTH * r] == 4 * k + r && x[WIDTH * r + 1] == 0, "round %d", k);
        REFUSED(kn_loader_set_position(l, (kn_position){ .sample = 5, .step = 4, .samples = 5 }),
                "there is no sample 5 of epoch 0");
    }
}
