/* data/order.c: which sample stands in which row. The places for samples form one endless line: row
 * i of round k on rank r is place (k N + r) B + i behind the origin, which is 0 unless the loader
 * was set to a position where no such round begins. An epoch takes as many of them as its samples
 * and the rule for its end need. */
#include "data/data.h"
#include "data/loader_internal.h"

/* Samples that all ranks take in a round; checked when the loader was made. */
static int64_t round_size(const kn_loader *l)
{
    return l->ranks * l->batch;
}

static int64_t step_size(const kn_loader *l)
{
    return l->accum * round_size(l);
}

bool kn_loader_batch_fails(const char *caller, int64_t samples, int64_t batch)
{
    return kn_fail("%s: .batch must lie between 1 and the %lld samples there are, not %lld", caller,
                   (long long)samples, (long long)batch);
}

bool kn_loader_check_samples(const kn_loader *l)
{
    int64_t step = step_size(l), n = l->samples;
    if (n < 1)
        return kn_fail("%s: the data set is empty", l->caller);
    if (l->tail == KN_TAIL_NEXT && l->batch > n)
        return kn_loader_batch_fails(l->caller, n, l->batch);
    if (l->tail == KN_TAIL_DROP && step > n)
        return kn_fail("%s: a step takes %lld samples (.batch %lld, %lld ranks, .accum %lld), but "
                       "there are %lld, and KN_TAIL_DROP drops what is no whole step",
                       l->caller, (long long)step, (long long)l->batch, (long long)l->ranks,
                       (long long)l->accum, (long long)n);
    if (n > INT64_MAX - step)
        return kn_fail("%s: %lld samples are too many", l->caller, (long long)n);
    return true;
}

/* Places for samples in an epoch, repetitions included; INT64_MAX while unknown. */
static int64_t places_of(const kn_loader *l)
{
    int64_t n = l->samples, step = step_size(l);
    if (n == 0)
        return INT64_MAX;
    switch (l->tail) {
    case KN_TAIL_DROP:
        return n / step * step;
    case KN_TAIL_PAD:
    case KN_TAIL_SHORT:
        return (n + step - 1) / step * step;
    case KN_TAIL_NEXT:
        break;
    }
    return n;
}

int64_t kn_loader_place(const kn_loader *l, int64_t round, int64_t row)
{
    return l->origin + (round * l->ranks + l->rank) * l->batch + row;
}

kn_row kn_loader_row(const kn_loader *l, int64_t round, int64_t row)
{
    int64_t place = kn_loader_place(l, round, row), places = places_of(l);
    int64_t epoch = place / places, i = place % places;
    bool counts = l->samples == 0 || i < l->samples;
    if (!counts)
        i %= l->samples;
    if (l->shuffle)
        i = kn_shuffle(l->seed, epoch, l->samples, i);
    return (kn_row){ epoch, i, counts };
}

int64_t kn_loader_counting(const kn_loader *l, int64_t round)
{
    int64_t place = kn_loader_place(l, round, 0), places = places_of(l);
    if (l->samples == 0 || l->tail == KN_TAIL_NEXT)
        return l->batch;
    int64_t left = l->samples - place % places;
    return left < 0 ? 0 : left < l->batch ? left : l->batch;
}

/* ---- rounds and positions ------------------------------------------------------------------- */

int64_t kn_loader_last_round(const kn_loader *l)
{
    return INT64_MAX / round_size(l) - 2;
}

int64_t kn_loader_round(const kn_loader *l)
{
    return kn_given(l, "kn_loader_round", "the loader") ? l->round : 0;
}

static void go_to(kn_loader *l, int64_t round, int64_t origin)
{
    if (round == l->round && origin == l->origin) /* which the workers read */
        return;
    kn_loader_pool_reset(l);
    l->round = round;
    l->origin = origin;
}

void kn_loader_seek(kn_loader *l, int64_t round)
{
    if (!kn_given(l, "kn_loader_seek", "the loader"))
        return;
    if (round < 0)
        kn_fail("kn_loader_seek: round %lld; rounds count from 0", (long long)round);
    else if (round > kn_loader_last_round(l))
        kn_fail("kn_loader_seek: round %lld is beyond the last one, %lld", (long long)round,
                (long long)kn_loader_last_round(l));
    else
        go_to(l, round, 0);
}

int64_t kn_loader_rounds(const kn_loader *l)
{
    if (!kn_given(l, "kn_loader_rounds", "the loader"))
        return 0;
    int64_t rounds = l->rounds ? l->rounds : places_of(l) / round_size(l);
    if (l->samples == 0)
        return 0;
    return rounds > 0 ? rounds : 1;
}

kn_position kn_loader_position(const kn_loader *l)
{
    if (!kn_given(l, "kn_loader_position", "the loader"))
        return (kn_position){ 0 };
    int64_t place = l->origin + l->round * round_size(l), places = places_of(l);
    return (kn_position){ .epoch = place / places,
                          .sample = place % places,
                          .step = step_size(l),
                          .samples = l->samples,
                          .seed = l->seed };
}

/* p belongs to this loader's data. */
static bool check_position(const kn_loader *l, const kn_position *p)
{
    if (p->samples != l->samples && p->samples != 0 && l->samples != 0)
        return kn_fail("kn_loader_set_position: the position is of a data set of %lld samples; "
                       "this one has %lld",
                       (long long)p->samples, (long long)l->samples);
    if (p->seed != l->seed && l->shuffle)
        return kn_fail("kn_loader_set_position: the position is of seed %llu, this loader has "
                       "seed %llu",
                       (unsigned long long)p->seed, (unsigned long long)l->seed);
    if (p->step != step_size(l) && l->tail != KN_TAIL_NEXT)
        return kn_fail("kn_loader_set_position: the position is of steps of %lld samples; this "
                       "loader takes %lld (.batch %lld, %lld ranks, .accum %lld)",
                       (long long)p->step, (long long)step_size(l), (long long)l->batch,
                       (long long)l->ranks, (long long)l->accum);
    return true;
}

/* The place of p in the line, where a round can begin. */
static bool find_place(const kn_loader *l, const kn_position *p, int64_t *place)
{
    int64_t places = places_of(l);
    if (p->epoch < 0 || p->sample < 0 || p->sample >= places ||
        __builtin_mul_overflow(p->epoch, places, place) ||
        __builtin_add_overflow(*place, p->sample, place) ||
        *place / round_size(l) > kn_loader_last_round(l))
        return kn_fail("kn_loader_set_position: there is no sample %lld of epoch %lld",
                       (long long)p->sample, (long long)p->epoch);
    if (l->mix && *place % 2)
        return kn_fail("kn_loader_set_position: sample %lld of epoch %lld lies inside of a pair "
                       "that is mixed",
                       (long long)p->sample, (long long)p->epoch);
    return l->tail == KN_TAIL_NEXT || *place % round_size(l) == 0 ||
           kn_fail("kn_loader_set_position: sample %lld of epoch %lld lies inside of a round "
                   "of %lld samples (.batch %lld, %lld ranks)",
                   (long long)p->sample, (long long)p->epoch, (long long)round_size(l),
                   (long long)l->batch, (long long)l->ranks);
}

bool kn_loader_set_position(kn_loader *l, kn_position p)
{
    if (!kn_given(l, "kn_loader_set_position", "the loader") || !check_position(l, &p))
        return false;
    int64_t known = l->samples, place = 0;
    kn_loader_pool_reset(l); /* its threads read what changes here */
    l->samples = known ? known : p.samples;
    if ((l->samples != known && !kn_loader_check_samples(l)) || !find_place(l, &p, &place)) {
        l->samples = known;
        return false;
    }
    l->round = place / round_size(l);
    l->origin = place % round_size(l);
    l->proven = l->samples == 0 && place > l->proven ? place : l->proven;
    return true;
}
