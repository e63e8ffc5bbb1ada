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
 * Casts and sums beside a collective are a part of it.
 *
 * Where a limit of the schedule made compute wait, as much as compute was busy until it waited for
 * that stream again is the limiter's: without it, the wait would have come then.
 * Time that neither a wait nor a job covers is the host's. */
#include "models/programs/waiting.h"
#include "kernels/error.h"
#include "kernels/memory_internal.h"
#include "models/programs/database.h"

#include <math.h>
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

/* Events of a rank, in order of their begin. */
typedef struct lane {
    struct spot {
        int64_t event;
        double reach; /* the latest end of it and those before */
    } * at;
    int64_t count, room;
} lane;
/* Its compute, waits of compute and of the host, what ran on other streams. */
enum { COMPUTE, WAITS, OTHERS, LANES };

typedef struct finder {
    const recording *r;
    waiting *w;
    lane *lanes;   /* [ranks, LANES] */
    double *peers; /* by event: when the last rank of its group began that collective */
    const lane *waits, *others, *compute; /* of the rank in hand */
    double begin, end;                    /* of the step in hand */
    double flops, bytes;                  /* the processor's rates, a second; 0: unknown */
    int32_t number;                       /* of the rank in hand */
    bool backward;                        /* of the piece in hand */
} finder;

/* ---- lanes ----------------------------------------------------------------------------------- */

static double end_of(const event *e)
{
    return e->t + e->d;
}

static bool is_stream(const recording *r, int32_t name, const char *stream)
{
    return strcmp(name_of(r, name), stream) == 0;
}

static bool fill_lanes(finder *f)
{
    const recording *r = f->r;
    for (int64_t i = 0; i < r->events; i++) { /* in order of their begin */
        const event *e = &r->event[i];
        const bool compute = is_stream(r, e->s, "compute"),
                   waits = e->k == WAIT && (compute || is_stream(r, e->s, "host"));
        lane *l = f->lanes + (int64_t)e->r * LANES;
        l += waits ? WAITS : compute && !is_collective(r, e) ? COMPUTE : OTHERS;
        if (!waits && e->k != RUN)
            continue;
        if (!kn_host_grow(&l->at, &l->room, l->count + 1, sizeof *l->at))
            return false;
        const double reach = l->count > 0 ? l->at[l->count - 1].reach : -INFINITY;
        l->at[l->count++] = (struct spot){ i, fmax(reach, end_of(e)) };
    }
    return true;
}

/* All before this place of the lane end by t. */
static int64_t first_after(const lane *l, double t)
{
    int64_t low = 0, high = l->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (l->at[middle].reach <= t)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* clang-format off */
/* The nth of a name on a rank is the nth of that name on each rank that takes part: of its shard
 * group; of an all_reduce over replicas on those of the same shard. */
static const char peers[] = SQL(
    select i, max(t) over (partition by part, w, nth)
    from (select *, row_number() over (partition by part, w, r order by i) nth
        from (select *, iif(?1 and w like 'all_reduce%', r % ?2, r / ?2) part
            from main.event where k = 'run' and collective)));
/* clang-format on */

static bool find_peers(finder *f, sqlite3 *db)
{
    const recording *r = f->r;
    sqlite3_stmt *q = database_ask(db, peers);
    for (int64_t i = 0; i < r->events; i++)
        f->peers[i] = r->event[i].t;
    database_bind(q, "ii", (int64_t)(r->shards < r->ranks), (int64_t)r->shards);
    while (database_next(q))
        f->peers[sqlite3_column_int64(q, 0)] = sqlite3_column_double(q, 1);
    sqlite3_finalize(q);
    return kn_ok();
}

/* ---- pieces of idle time --------------------------------------------------------------------- */

/* From *from to the given time, but not past end; *from moves there. */
static bool piece(finder *f, double *from, double to, double end, idle_cause cause, int64_t awaited)
{
    waiting *w = f->w;
    to = to < end ? to : end;
    if (to <= *from)
        return true;
    if (!kn_host_grow(&w->idle, &w->idle_room, w->idles + 1, sizeof *w->idle))
        return false;
    w->idle[w->idles++] = (idle){ *from, to, awaited, cause, f->number, f->backward };
    *from = to;
    return true;
}

/* How long compute was busy from begin to end. */
static double busy_between(const finder *f, double begin, double end)
{
    const lane *l = f->compute;
    double busy = 0;
    for (int64_t i = first_after(l, begin); i < l->count; i++) {
        const event *e = &f->r->event[l->at[i].event];
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

/* The job before this one on its stream, in the step in hand; -1: none. */
static int64_t job_before(const finder *f, int64_t job)
{
    const lane *l = f->others;
    int64_t i = first_after(l, f->r->event[job].t);
    while (i < l->count && l->at[i].event != job)
        i++;
    for (i--; i >= 0 && l->at[i].reach > f->begin; i--)
        if (f->r->event[l->at[i].event].s == f->r->event[job].s)
            return l->at[i].event;
    return -1;
}

/* A collective with the casts and sums around it, which were issued as one. */
typedef struct batch {
    int64_t first, collective; /* jobs; the job itself where there is no collective */
} batch;

/* Whether two jobs of a stream follow each other at once, or were put into its queue at once. */
static bool at_once(const event *before, const event *after)
{
    enum { GAP = 5, ISSUES = 50 }; /* microseconds */
    return end_of(before) >= after->t - GAP || fabs(after->q - before->q) <= ISSUES;
}

static batch batch_of(const finder *f, int64_t job)
{
    const event *of = f->r->event;
    bool found = is_collective(f->r, &of[job]);
    batch b = { job, job };
    for (int64_t o; (o = job_before(f, b.first)) >= 0; b.first = o) {
        const bool collective = is_collective(f->r, &of[o]);
        if (!at_once(&of[o], &of[b.first]) || (collective && found))
            break;
        b.collective = collective ? o : b.collective;
        found |= collective;
    }
    return b;
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
        const event *next = &f->r->event[f->waits->at[i].event];
        if (next->t >= end_of(e) && next->w == e->w && next != e) {
            until = next->t;
            break;
        }
    }
    return busy_between(f, end_of(e), until);
}

/* A piece in which the job ran: *early of it could have been sooner, the rest has its own cause. */
static bool work_piece(finder *f, double *from, double to, double end, double *early,
                       idle_cause sooner, idle_cause rest, int64_t job)
{
    const double before = *from;
    const bool ok = piece(f, from, fmin(*from + *early, to), end, sooner, job);
    *early -= *from - before;
    return ok && piece(f, from, to, end, rest, job);
}

/* The piece until end, of an awaited job. */
static bool awaited_piece(finder *f, double *from, double end, int64_t job, int64_t wait)
{
    const recording *r = f->r;
    const batch b = batch_of(f, job);
    const event *e = &r->event[job], *first = &r->event[b.first], *c = &r->event[b.collective];
    const int64_t before = job_before(f, b.first);
    const double since = before < 0 ? f->begin : fmin(end_of(&r->event[before]), first->t);
    const bool copy = is_stream(r, e->s, "upload") || is_stream(r, e->s, "download");
    const bool held = wait >= 0 && limited(f, wait);
    const idle_cause sooner = held ? LIMITER : ISSUED_LATE;
    const idle_cause rest = copy ? COPY : is_stream(r, e->s, "host") ? HOST : TRANSFER;
    const int64_t of = b.collective;
    double early = 0;
    if (held)
        early = busy_until_next(f, wait);
    else if (e->worker && is_stream(r, e->s, "gather"))
        early = busy_between(f, since, first->t);
    return piece(f, from, first->q, end, sooner, of) && piece(f, from, since, end, BEHIND, of) &&
           piece(f, from, first->t, end, HOST, of) &&
           work_piece(f, from, c->t, end, &early, sooner, rest, of) &&
           piece(f, from, fmin(f->peers[b.collective], end_of(c)), end, SLOWER_RANK, of) &&
           work_piece(f, from, end_of(e), end, &early, sooner, rest, of);
}

/* The job that a wait ended with: of those on its stream the last one done by then. What prepares
 * the next collective may be done by then, too: it wasn't awaited. */
static int64_t awaited_by(const finder *f, const event *wait)
{
    const event *of = f->r->event;
    int64_t best = -1;
    for (int64_t i = first_after(f->others, wait->t); i < f->others->count; i++) {
        const event *e = &of[f->others->at[i].event];
        if (e->t > end_of(wait))
            break;
        if (e->s == wait->w && end_of(e) <= end_of(wait) + 1 && end_of(e) > wait->t &&
            (best < 0 || end_of(e) > end_of(&of[best])))
            best = f->others->at[i].event;
    }
    while (best >= 0 && !is_collective(f->r, &of[batch_of(f, best).collective])) {
        const int64_t before = job_before(f, best);
        if (before < 0 || end_of(&of[before]) <= wait->t)
            break;
        best = before;
    }
    return best;
}

/* A piece without a wait: jobs that the host ran itself, and the host. */
static bool host_piece(finder *f, double *from, double end)
{
    for (int64_t i = first_after(f->others, *from); i < f->others->count; i++) {
        const int64_t job = f->others->at[i].event;
        const event *e = &f->r->event[job];
        if (e->t >= end)
            break;
        if (e->worker || end_of(e) <= *from)
            continue;
        if (!piece(f, from, e->t, end, HOST, -1) ||
            !awaited_piece(f, from, end < end_of(e) ? end : end_of(e), job, -1))
            return false;
    }
    return piece(f, from, end, end, HOST, -1);
}

static bool idle_between(finder *f, double from, double end)
{
    for (int64_t i = first_after(f->waits, from); i < f->waits->count && from < end; i++) {
        const event *wait = &f->r->event[f->waits->at[i].event];
        if (wait->t >= end)
            break;
        if (end_of(wait) <= from)
            continue;
        const int64_t job = awaited_by(f, wait);
        const double until = end_of(wait) < end ? end_of(wait) : end;
        if (!host_piece(f, &from, fmax(wait->t, from)) ||
            (job >= 0 && !awaited_piece(f, &from, until, job, f->waits->at[i].event)) ||
            !piece(f, &from, until, end, HOST, -1))
            return false;
    }
    return host_piece(f, &from, end);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Busy and idle pieces of a step. Of an idle piece, what runs next says whether it is backward. */
static bool cut_step(finder *f, step_span *s)
{
    double from = s->begin;
    f->begin = s->begin;
    f->end = s->end;
    f->number = s->rank;
    for (int64_t i = first_after(f->compute, s->begin); i < f->compute->count; i++) {
        const event *e = &f->r->event[f->compute->at[i].event];
        if (e->t >= s->end)
            break;
        f->backward = *name_of(f->r, e->a) != 0;
        if (e->t > from && !idle_between(f, from, e->t))
            return false;
        const double begin = e->t > from ? e->t : from;
        const double end = end_of(e) < s->end ? end_of(e) : s->end;
        s->busy += end > begin ? end - begin : 0;
        s->flops += e->f;
        s->ideal += f->flops > 0 && f->bytes > 0 ? 1e6 * fmax(e->f / f->flops, e->b / f->bytes) : 0;
        from = end > from ? end : from;
    }
    f->backward = false;
    return from >= s->end || idle_between(f, from, s->end);
}

static bool add_step(waiting *w, step_span s)
{
    if (!kn_host_grow(&w->step, &w->step_room, w->steps + 1, sizeof *w->step))
        return false;
    w->step[w->steps++] = s;
    return true;
}

/* What find_steps knows of a rank: the span of its jobs, and where its next step begins. */
typedef struct rank_span {
    double first, last, step;
    bool stepped;
} rank_span;

/* A step begins with its event, else where the one before ended, or with the recording. A rank
 * without events of steps has one, of all that it ran. */
static bool find_steps(finder *f, rank_span *span)
{
    const recording *r = f->r;
    for (int k = 0; k < r->ranks; k++)
        span[k] = (rank_span){ .first = INFINITY, .step = INFINITY };
    for (int64_t i = 0; i < r->events; i++) {
        const event *e = &r->event[i];
        rank_span *s = &span[e->r];
        s->step = fmin(s->step, e->t);
        if (e->k == RUN) {
            s->first = fmin(s->first, e->t);
            s->last = fmax(s->last, end_of(e));
        }
        if (e->k != STEP)
            continue;
        const bool ends = strcmp(name_of(r, e->w), "end") == 0;
        if (ends && s->step < e->t &&
            !add_step(f->w, (step_span){ s->step, e->t, .number = (int64_t)e->n, .rank = e->r }))
            return false;
        s->stepped |= ends;
        s->step = e->t;
    }
    for (int k = 0; k < r->ranks; k++)
        if (!span[k].stepped && span[k].first < span[k].last &&
            !add_step(f->w, (step_span){ span[k].first, span[k].last, .rank = k }))
            return false;
    return true;
}

bool waiting_find(waiting *w, const recording *r, sqlite3 *db)
{
    *w = (waiting){ 0 };
    finder f = { .r = r,
                 .w = w,
                 .flops = head_number(r, "rates", "flops"),
                 .bytes = head_number(r, "rates", "bytes") };
    rank_span *span = kn_host_alloc((size_t)r->ranks * sizeof *span);
    f.lanes = kn_host_calloc((size_t)r->ranks * LANES, sizeof *f.lanes);
    f.peers = kn_host_alloc((size_t)(r->events + 1) * sizeof *f.peers);
    bool ok =
        span && f.lanes && f.peers && fill_lanes(&f) && find_peers(&f, db) && find_steps(&f, span);
    for (int64_t i = 0; ok && i < w->steps; i++) {
        const lane *l = f.lanes + (int64_t)w->step[i].rank * LANES;
        f.compute = l + COMPUTE;
        f.waits = l + WAITS;
        f.others = l + OTHERS;
        ok = cut_step(&f, &w->step[i]);
    }
    kn_host_free(span);
    for (int64_t i = 0; f.lanes && i < (int64_t)r->ranks * LANES; i++)
        kn_host_free(f.lanes[i].at);
    kn_host_free(f.lanes);
    kn_host_free(f.peers);
    return ok;
}

bool waiting_add(const waiting *w, sqlite3 *db, const char *schema)
{
    sqlite3_stmt *steps = database_into(db, schema, "step", 7),
                 *pieces = database_into(db, schema, "idle", 6),
                 *causes = database_into(db, schema, "cause", 3);
    bool ok = steps && pieces && causes;
    for (int64_t i = 0; ok && i < w->steps; i++) {
        const step_span *s = &w->step[i];
        ok = database_put(steps, "iiddddd", (int64_t)s->rank, s->number, s->begin,
                          s->end - s->begin, s->busy, s->flops, s->ideal);
    }
    for (int64_t i = 0; ok && i < w->idles; i++) {
        const idle *p = &w->idle[i];
        ok = database_put(pieces, "iddsii", (int64_t)p->rank, p->begin, p->end - p->begin,
                          idle_causes[p->cause].name, p->awaited, (int64_t)p->backward);
    }
    for (int i = 0; ok && i < CAUSES; i++)
        ok = database_put(causes, "sss", idle_causes[i].name, idle_causes[i].explained,
                          idle_causes[i].remedy);
    sqlite3_finalize(steps);
    sqlite3_finalize(pieces);
    sqlite3_finalize(causes);
    return ok;
}

void waiting_free(waiting *w)
{
    kn_host_free(w->idle);
    kn_host_free(w->step);
}
