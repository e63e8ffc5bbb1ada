/* models/programs/waiting.c: cuts each step of each rank into busy and idle time of its compute
 * stream, and finds the cause of every idle piece.
 *
 * An idle piece is covered by a wait, for another stream, or by a job that the host ran itself
 * because no core was free for a worker. Either names one awaited job, with three times: q when it
 * was issued, t when it began, e when it was done. Read from left to right, the piece is
 *
 *     ... q        not issued yet: issued late
 *     q ... t      its stream was busy with another job: behind; else the host
 *     t ... peers  the same collective hadn't begun on another rank: a slower rank
 *     peers ... e  the job itself. As much as compute was busy while the stream was idle before t
 *                  would be hidden, had it been issued then: issued late. The rest: the transfer
 *     e ...        the host
 *
 * Where a limit of the schedule made compute wait, as much as compute was busy until it waited for
 * that stream again is the limiter's: without it, the wait would have come then.
 * What neither a wait nor a job covers is the host's. */
#include "models/programs/waiting.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const cause_words idle_causes[CAUSES] = {
    [ISSUED_LATE] = { "issued late", "could have run beside the compute before it",
                      "--prefetch pre and --forward-prefetch issue gathers a unit ahead" },
    [LIMITER] = { "the limiter", "was held back by .max_gathers or .max_reductions",
                  "a larger --max-gathers or --max-reductions, at the price of memory" },
    [BEHIND] = { "behind another collective", "its stream was still busy with another one",
                 "larger units: fewer collectives follow each other" },
    [SLOWER_RANK] = { "a slower rank", "the same collective began later there",
                      "give ranks equal work and equal cores" },
    [TRANSFER] = { "the transfer itself", "longer than the compute that could hide it",
                   "--dtype bf16, --reshard never, or a larger batch" },
    [COPY] = { "a copy", "to or from the host or a file", "do without --offload" },
    [HOST] = { "the host", "nothing was awaited, and nothing issued",
               "larger kernels: more work for each call" },
};

/* The numbers of events, in order of their begin. */
typedef struct lane {
    int64_t *event, count, room;
    double *reach; /* the latest end of an event and those before it */
} lane;

/* All about one rank: its compute, what waited, and what ran on other streams. */
typedef struct rank_lanes {
    lane compute, waits, others;
    double first, last, step; /* of its jobs; the begin of the step that hasn't ended */
    bool stepped;
} rank_lanes;

typedef struct finder {
    const recording *r;
    waiting *w;
    rank_lanes *rank;
    double *peers; /* by event: when the last rank of its group began that collective */
    const lane *waits, *others, *compute; /* of the rank in hand */
    double begin, end;                    /* of the step in hand */
    double flops, bytes;                  /* the processor's rates, a second; 0: unknown */
    bool backward;                        /* of the piece in hand */
} finder;

static double end_of(const event *e)
{
    return e->t + e->d;
}

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

bool is_collective(const recording *r, const event *e)
{
    static const char *const begin[] = { "all_gather", "all_reduce", "all_to_all", "reduce_scatter",
                                         "broadcast",  "barrier",    "agree",      NULL };
    const char *w = name_of(r, e->w);
    bool any = false;
    for (int i = 0; begin[i]; i++)
        any |= begins(w, begin[i]);
    return any;
}

static bool is_stream(const recording *r, int32_t name, const char *stream)
{
    return strcmp(name_of(r, name), stream) == 0;
}

/* ---- lanes ----------------------------------------------------------------------------------- */

static bool lane_add(lane *l, int64_t number)
{
    if (!kn_host_grow(&l->event, &l->room, l->count + 1, sizeof *l->event))
        return false;
    l->event[l->count++] = number;
    return true;
}

static int by_begin(const void *a, const void *b, void *events)
{
    const int64_t i = *(const int64_t *)a, k = *(const int64_t *)b;
    const double s = ((const event *)events)[i].t, t = ((const event *)events)[k].t;
    return s != t ? (s > t) - (s < t) : (i > k) - (i < k);
}

static bool lane_sort(lane *l, const recording *r)
{
    double reach = -INFINITY;
    if (l->count == 0)
        return true;
    qsort_r(l->event, (size_t)l->count, sizeof *l->event, by_begin, r->event);
    l->reach = kn_host_alloc((size_t)l->count * sizeof *l->reach);
    for (int64_t i = 0; l->reach && i < l->count; i++) {
        const double end = end_of(&r->event[l->event[i]]);
        l->reach[i] = reach = end > reach ? end : reach;
    }
    return l->reach != NULL;
}

static void lane_free(lane *l)
{
    kn_host_free(l->event);
    kn_host_free(l->reach);
}

static bool fill_lanes(finder *f)
{
    const recording *r = f->r;
    for (int64_t i = 0; i < r->events; i++) {
        const event *e = &r->event[i];
        rank_lanes *l = &f->rank[e->r];
        const bool compute = is_stream(r, e->s, "compute");
        if (e->k == WAIT && (compute || is_stream(r, e->s, "host"))) {
            if (!lane_add(&l->waits, i))
                return false;
        } else if (e->k == RUN) {
            if (!lane_add(compute && !is_collective(r, e) ? &l->compute : &l->others, i))
                return false;
        }
    }
    for (int k = 0; k < r->ranks; k++)
        if (!lane_sort(&f->rank[k].compute, r) || !lane_sort(&f->rank[k].waits, r) ||
            !lane_sort(&f->rank[k].others, r))
            return false;
    return true;
}

/* All before this one of the lane end by t. */
static int64_t first_after(const lane *l, double t)
{
    int64_t low = 0, high = l->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (l->reach[middle] <= t)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- the same collective on other ranks ------------------------------------------------------ */

/* Ranks that take part: a shard group; of an all_reduce over replicas those of the same shard. */
static int group_of(const recording *r, const event *e)
{
    const bool replicas = r->shards < r->ranks && begins(name_of(r, e->w), "all_reduce");
    return replicas ? e->r % r->shards : e->r / r->shards;
}

/* By group, name and rank; those of one rank in their order. */
static int by_collective(const void *a, const void *b, void *recording_)
{
    const recording *r = recording_;
    const int64_t i = *(const int64_t *)a, k = *(const int64_t *)b;
    const event *e = &r->event[i], *o = &r->event[k];
    const int64_t own[] = { group_of(r, e), e->w, e->r, i };
    const int64_t other[] = { group_of(r, o), o->w, o->r, k };
    int at = 0;
    while (at < 3 && own[at] == other[at])
        at++;
    return (own[at] > other[at]) - (own[at] < other[at]);
}

/* The nth of a name on a rank is the nth of that name on each rank of its group. */
static void join_ranks(finder *f, const int64_t *of, int64_t count, double *latest)
{
    const recording *r = f->r;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0, nth = 0; i < count; i++, nth++) {
            const event *e = &r->event[of[i]];
            nth = i > 0 && r->event[of[i - 1]].r == e->r ? nth : 0;
            if (pass)
                f->peers[of[i]] = latest[nth];
            else
                latest[nth] = fmax(latest[nth], e->t);
        }
}

static bool find_peers(finder *f)
{
    const recording *r = f->r;
    lane all = { 0 };
    bool ok = true;
    for (int64_t i = 0; ok && i < r->events; i++) {
        f->peers[i] = r->event[i].t;
        ok = r->event[i].k != RUN || !is_collective(r, &r->event[i]) || lane_add(&all, i);
    }
    double *latest = ok ? kn_host_alloc((size_t)(all.count + 1) * sizeof *latest) : NULL;
    if (latest && all.count > 0)
        qsort_r(all.event, (size_t)all.count, sizeof *all.event, by_collective, (void *)r);
    for (int64_t i = 0, k; latest && i < all.count; i = k) {
        const event *e = &r->event[all.event[i]], *o;
        for (k = i + 1; k < all.count; k++) {
            o = &r->event[all.event[k]];
            if (o->w != e->w || group_of(r, o) != group_of(r, e))
                break;
        }
        for (int64_t m = 0; m < k - i; m++)
            latest[m] = -INFINITY;
        join_ranks(f, all.event + i, k - i, latest);
    }
    kn_host_free(latest);
    kn_host_free(all.event);
    return kn_ok();
}

/* ---- pieces of idle time --------------------------------------------------------------------- */

/* From *from to the given time, but not past end; *from moves there. */
static bool piece(finder *f, double *from, double to, double end, idle_cause cause, int32_t rank,
                  int64_t awaited)
{
    waiting *w = f->w;
    to = to < end ? to : end;
    if (to <= *from)
        return true;
    if (!kn_host_grow(&w->idle, &w->idle_room, w->idles + 1, sizeof *w->idle))
        return false;
    w->idle[w->idles++] = (idle){ *from, to, awaited, cause, rank, f->backward };
    *from = to;
    return true;
}

/* How long compute was busy from begin to end. */
static double busy_between(const finder *f, double begin, double end)
{
    const lane *l = f->compute;
    double busy = 0;
    for (int64_t i = first_after(l, begin); i < l->count; i++) {
        const event *e = &f->r->event[l->event[i]];
        if (e->t >= end)
            break;
        const double from = e->t > begin ? e->t : begin, to = end_of(e) < end ? end_of(e) : end;
        if (to <= from)
            continue;
        busy += to - from;
        begin = to;
    }
    return busy;
}

/* The end of the job before this one on its stream, or the step's begin. */
static double stream_idle_since(const finder *f, int64_t job)
{
    const lane *l = f->others;
    const event *e = &f->r->event[job];
    int64_t i = first_after(l, e->t);
    while (i < l->count && l->event[i] != job)
        i++;
    for (i--; i >= 0 && l->reach[i] > f->begin; i--) {
        const event *o = &f->r->event[l->event[i]];
        if (o->s == e->s)
            return end_of(o) < e->t ? fmax(end_of(o), f->begin) : e->t;
    }
    return fmin(f->begin, e->t);
}

/* Whether the schedule waited because of a limit: the verb after the wait says so. */
static bool limited(const finder *f, int64_t wait)
{
    const recording *r = f->r;
    const event *e = &r->event[wait];
    for (int64_t i = wait + 1; i < r->events; i++) {
        const event *v = &r->event[i];
        if (v->r != e->r)
            continue;
        if (v->k == VERB)
            return strstr(name_of(r, v->c), "max_") != NULL;
        if (v->k == RUN && is_stream(r, v->s, "compute"))
            break;
    }
    return false;
}

/* How long compute was busy from then until it waited for that stream again, or the step ended:
 * so much of a wait could have come later. */
static double busy_until_next(const finder *f, int64_t wait)
{
    const event *e = &f->r->event[wait];
    double until = f->end;
    for (int64_t i = first_after(f->waits, end_of(e)); i < f->waits->count; i++) {
        const event *next = &f->r->event[f->waits->event[i]];
        if (next->t >= end_of(e) && next->w == e->w && next != e) {
            until = next->t;
            break;
        }
    }
    return busy_between(f, end_of(e), until);
}

/* The piece until end, of an awaited job. */
static bool awaited_piece(finder *f, double *from, double end, int64_t job, int64_t wait)
{
    const recording *r = f->r;
    const event *e = &r->event[job];
    const bool copy = is_stream(r, e->s, "upload") || is_stream(r, e->s, "download");
    const bool host = is_stream(r, e->s, "host");
    const bool held = wait >= 0 && limited(f, wait);
    const double since = stream_idle_since(f, job);
    const bool gather = begins(name_of(r, e->w), "all_gather");
    if (!piece(f, from, e->q, end, held ? LIMITER : ISSUED_LATE, e->r, job) ||
        !piece(f, from, since, end, BEHIND, e->r, job) ||
        !piece(f, from, e->t, end, HOST, e->r, job) ||
        !piece(f, from, f->peers[job] < end_of(e) ? f->peers[job] : end_of(e), end, SLOWER_RANK,
               e->r, job))
        return false;
    if (e->worker && gather && !held) {
        const double early = busy_between(f, since, e->t);
        if (!piece(f, from, *from + early, end < end_of(e) ? end : end_of(e), ISSUED_LATE, e->r,
                   job))
            return false;
    }
    if (held && !piece(f, from, *from + busy_until_next(f, wait), end < end_of(e) ? end : end_of(e),
                       LIMITER, e->r, job))
        return false;
    return piece(f, from, end_of(e), end, copy ? COPY : host ? HOST : TRANSFER, e->r, job);
}

/* The job that a wait ended with: of those on its stream the last one done by then. */
static int64_t awaited_by(const finder *f, const event *wait)
{
    int64_t best = -1;
    for (int64_t i = first_after(f->others, wait->t); i < f->others->count; i++) {
        const event *e = &f->r->event[f->others->event[i]];
        if (e->t > end_of(wait))
            break;
        if (e->s == wait->w && end_of(e) <= end_of(wait) + 1 && end_of(e) > wait->t &&
            (best < 0 || end_of(e) > end_of(&f->r->event[best])))
            best = f->others->event[i];
    }
    return best;
}

/* A piece without a wait: jobs that the host ran itself, and the host. */
static bool host_piece(finder *f, double *from, double end, int32_t rank)
{
    for (int64_t i = first_after(f->others, *from); i < f->others->count; i++) {
        const int64_t job = f->others->event[i];
        const event *e = &f->r->event[job];
        if (e->t >= end)
            break;
        if (e->worker || end_of(e) <= *from)
            continue;
        if (!piece(f, from, e->t, end, HOST, rank, -1) ||
            !awaited_piece(f, from, end < end_of(e) ? end : end_of(e), job, -1))
            return false;
    }
    return piece(f, from, end, end, HOST, rank, -1);
}

static bool idle_between(finder *f, double from, double end, int32_t rank)
{
    for (int64_t i = first_after(f->waits, from); i < f->waits->count && from < end; i++) {
        const event *wait = &f->r->event[f->waits->event[i]];
        if (wait->t >= end)
            break;
        if (end_of(wait) <= from)
            continue;
        const int64_t job = awaited_by(f, wait);
        const double until = end_of(wait) < end ? end_of(wait) : end;
        if (!host_piece(f, &from, wait->t > from ? wait->t : from, rank) ||
            (job >= 0 && !awaited_piece(f, &from, until, job, f->waits->event[i])) ||
            !piece(f, &from, until, end, HOST, rank, -1))
            return false;
    }
    return host_piece(f, &from, end, rank);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Busy and idle pieces of a step. Of an idle piece, what runs next says whether it is backward. */
static bool cut_step(finder *f, step_span *s)
{
    double from = s->begin;
    f->begin = s->begin;
    f->end = s->end;
    for (int64_t i = first_after(f->compute, s->begin); i < f->compute->count; i++) {
        const event *e = &f->r->event[f->compute->event[i]];
        if (e->t >= s->end)
            break;
        f->backward = *name_of(f->r, e->a) != 0;
        if (e->t > from && !idle_between(f, from, e->t, s->rank))
            return false;
        const double begin = e->t > from ? e->t : from;
        const double end = end_of(e) < s->end ? end_of(e) : s->end;
        s->busy += end > begin ? end - begin : 0;
        s->flops += e->f;
        s->ideal += f->flops > 0 && f->bytes > 0 ? 1e6 * fmax(e->f / f->flops, e->b / f->bytes) : 0;
        from = end > from ? end : from;
    }
    f->backward = false;
    return from >= s->end || idle_between(f, from, s->end, s->rank);
}

static bool add_step(waiting *w, step_span s)
{
    if (!kn_host_grow(&w->step, &w->step_room, w->steps + 1, sizeof *w->step))
        return false;
    w->step[w->steps++] = s;
    return true;
}

/* A step begins with its event, else where the one before ended, or with the recording. A rank
 * without events of steps has one, of all that it ran. */
static bool find_steps(finder *f)
{
    const recording *r = f->r;
    for (int k = 0; k < r->ranks; k++)
        f->rank[k].first = f->rank[k].step = INFINITY;
    for (int64_t i = 0; i < r->events; i++) {
        const event *e = &r->event[i];
        rank_lanes *l = &f->rank[e->r];
        l->step = fmin(l->step, e->t);
        if (e->k == RUN) {
            l->first = fmin(l->first, e->t);
            l->last = fmax(l->last, end_of(e));
        }
        if (e->k != STEP)
            continue;
        const bool ends = strcmp(name_of(r, e->w), "end") == 0;
        if (ends && l->step < e->t &&
            !add_step(f->w, (step_span){ .begin = l->step,
                                         .end = e->t,
                                         .number = (int64_t)e->n,
                                         .event = i,
                                         .rank = e->r }))
            return false;
        l->stepped |= ends;
        l->step = e->t;
    }
    for (int k = 0; k < r->ranks; k++)
        if (!f->rank[k].stepped && f->rank[k].first < f->rank[k].last &&
            !add_step(f->w, (step_span){ .begin = f->rank[k].first,
                                         .end = f->rank[k].last,
                                         .event = -1,
                                         .rank = k }))
            return false;
    return true;
}

bool waiting_find(waiting *w, const recording *r)
{
    *w = (waiting){ 0 };
    finder f = { .r = r,
                 .w = w,
                 .flops = head_number(r, "rates", "flops"),
                 .bytes = head_number(r, "rates", "bytes") };
    f.rank = kn_host_calloc((size_t)r->ranks, sizeof *f.rank);
    f.peers = kn_host_alloc((size_t)(r->events + 1) * sizeof *f.peers);
    bool ok = f.rank && f.peers && fill_lanes(&f) && find_peers(&f) && find_steps(&f);
    for (int64_t i = 0; ok && i < w->steps; i++) {
        const rank_lanes *l = &f.rank[w->step[i].rank];
        f.compute = &l->compute;
        f.waits = &l->waits;
        f.others = &l->others;
        ok = cut_step(&f, &w->step[i]);
    }
    for (int k = 0; f.rank && k < r->ranks; k++) {
        lane_free(&f.rank[k].compute);
        lane_free(&f.rank[k].waits);
        lane_free(&f.rank[k].others);
    }
    kn_host_free(f.rank);
    kn_host_free(f.peers);
    return ok;
}

void waiting_free(waiting *w)
{
    kn_host_free(w->idle);
    kn_host_free(w->step);
}
