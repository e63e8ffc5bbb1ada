/* models/programs/lanes.c: sorts a recording's jobs and waits into lanes. */
#include "models/programs/lanes.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"
#include "models/programs/database.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* clang-format off */
/* The nth of a name on a rank is the nth of that name on each rank that takes part: of its shard
 * group; of an all_reduce over replicas on those of the same shard. */
static const char peers[] = SQL(
    select i, max(t) over (partition by part, w, nth)
    from (select *, row_number() over (partition by part, w, r order by i) nth
        from (select *, iif(?1 and w like 'all_reduce%', r % ?2, r / ?2) part
            from main.event where k = 'run' and collective)));
/* clang-format on */

static bool find_peers(lanes *l, const recording *r, sqlite3 *db)
{
    sqlite3_stmt *q = database_ask(db, peers);
    for (int64_t i = 0; i < r->events; i++)
        l->peers[i] = r->event[i].t;
    database_bind(q, "ii", (int64_t)(r->shards < r->ranks), (int64_t)r->shards);
    while (database_next(q))
        l->peers[sqlite3_column_int64(q, 0)] = sqlite3_column_double(q, 1);
    sqlite3_finalize(q);
    return kn_ok();
}

bool lanes_find(lanes *l, const recording *r, sqlite3 *db)
{
    *l = (lanes){ .rank = kn_host_calloc((size_t)r->ranks, sizeof *l->rank),
                  .peers = kn_host_alloc((size_t)(r->events + 1) * sizeof *l->peers) };
    return l->rank && l->peers && fill_lanes(l, r) && find_peers(l, r, db);
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
