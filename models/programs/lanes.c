/* models/programs/lanes.c: sorts a recording's jobs and waits into lanes. */
#include "models/programs/lanes.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

bool is_stream(const recording *r, int32_t name, const char *stream)
{
    return strcmp(name_of(r, name), stream) == 0;
}

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

static bool fill_lanes(lanes *all, const recording *r)
{
    for (int64_t i = 0; i < r->events; i++) {
        const event *e = &r->event[i];
        rank_lanes *l = &all->rank[e->r];
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
        if (!lane_sort(&all->rank[k].compute, r) || !lane_sort(&all->rank[k].waits, r) ||
            !lane_sort(&all->rank[k].others, r))
            return false;
    return true;
}

int64_t first_after(const lane *l, double t)
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
static void join_ranks(lanes *l, const recording *r, const int64_t *of, int64_t count,
                       double *latest)
{
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0, nth = 0; i < count; i++, nth++) {
            const event *e = &r->event[of[i]];
            nth = i > 0 && r->event[of[i - 1]].r == e->r ? nth : 0;
            if (pass)
                l->peers[of[i]] = latest[nth];
            else
                latest[nth] = fmax(latest[nth], e->t);
        }
}

static bool find_peers(lanes *l, const recording *r)
{
    lane all = { 0 };
    bool ok = true;
    for (int64_t i = 0; ok && i < r->events; i++) {
        l->peers[i] = r->event[i].t;
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
        join_ranks(l, r, all.event + i, k - i, latest);
    }
    kn_host_free(latest);
    kn_host_free(all.event);
    return kn_ok();
}

bool lanes_find(lanes *l, const recording *r)
{
    *l = (lanes){ .rank = kn_host_calloc((size_t)r->ranks, sizeof *l->rank),
                  .peers = kn_host_alloc((size_t)(r->events + 1) * sizeof *l->peers) };
    return l->rank && l->peers && fill_lanes(l, r) && find_peers(l, r);
}

void lanes_free(lanes *l, const recording *r)
{
    for (int k = 0; l->rank && k < r->ranks; k++) {
        lane_free(&l->rank[k].compute);
        lane_free(&l->rank[k].waits);
        lane_free(&l->rank[k].others);
    }
    kn_host_free(l->rank);
    kn_host_free(l->peers);
}
