/* fsdp/tree.c: the schedule of a tree of units: which units are in it, and their communicators. It
 * is made by the first call of the outermost unit, and goes with the first unit of the tree that is
 * freed. Then how a unit goes, and the ranks that scalars of a whole tree go over, as norms do. */
#include "comm/comm_internal.h"
#include "fsdp/build.h"
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"

static bool check_claimed(kn_module_impl *m)
{
    for (int i = 0; i < m->params; i++)
        if (m->param[i].owner && !m->param[i].source && !m->param[i].ignored)
            return kn_fail("fsdp: parameter '%s%s%s' belongs to no unit: it was declared after "
                           "wrapping, or is shared with a module outside; wrap a module around all "
                           "its users as well (the root)",
                           m->path, *m->path ? "." : "", m->param[i].name);
    return true;
}

/* u has the root's ranks and device, which one schedule needs. */
static bool same_place(const kn_unit *u, const kn_unit *root)
{
    if (u->comm != root->comm && (u->size > 1 || root->size > 1))
        return kn_fail(
            "fsdp: unit '%s' was wrapped with another communicator (%d ranks) than the root "
            "'%s' (%d ranks); wrap all units of a tree with the same one",
            kn_unit_name(u), u->size, kn_unit_name(root), root->size);
    return u->options.device == root->options.device ||
           kn_fail(
               "fsdp: unit '%s' was wrapped with .device = %s and the root '%s' with %s; give all "
               "units of a tree the same .device",
               kn_unit_name(u), kn_device_name(u->options.device), kn_unit_name(root),
               kn_device_name(root->options.device));
}

/* Finds the units of the tree and what belongs to no unit though it should. */
static bool collect(kn_schedule_state *s, kn_module_impl *m)
{
    kn_unit *u = kn_unit_of(m);
    if (!check_claimed(m))
        return false;
    if (!u || u->module[0] != m)
        return true;
    if (!same_place(u, s->root) ||
        !kn_host_grow(&s->unit, &s->unit_room, s->units + 1, sizeof(kn_unit *)))
        return false;
    s->unit[s->units++] = u;
    return true;
}

static int64_t changes_of(const kn_unit *root)
{
    int64_t n = 0;
    for (int i = 0; i < root->modules; i++)
        n += root->module[i]->changes;
    return n;
}

/* What came to the tree since belongs to a unit: else no rank's gradients of it would be summed. */
static bool still_claimed(kn_schedule_state *s)
{
    bool ok = true;
    if (s->changes == changes_of(s->root))
        return true;
    for (int i = 0; i < s->root->modules; i++) {
        kn_module_impl *top = s->root->module[i];
        for (kn_module_impl *m = kn_impl_lowest(top); ok && m; m = kn_impl_next_up(m, top))
            ok = check_claimed(m);
    }
    s->changes = ok ? changes_of(s->root) : s->changes;
    return ok;
}

/* Tables have a communicator of their own: rows travel while others are gathered. */
static bool join_bucket(kn_schedule_state *s, kn_bucket *b)
{
    if (!b->rows)
        return (b->ranks = kn_ranks_of(&s->lanes->groups, b->shards)) &&
               kn_ranks_connect(b->ranks, b->unit->options.device, b->reduce_dtype, b->grad_dtype);
    if (b->shards > 1 && !s->tables)
        s->tables = kn_comm_lend(s->root->comm, b->shards, 0, "tables");
    kn_bucket_give_ranks(b, s->tables);
    return b->shards == 1 || s->tables;
}

/* Every unit joins; its buckets get their communicators (collective, in the same order
 * everywhere). */
static bool join(kn_schedule_state *s)
{
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        u->schedule = s;
        for (int k = 0; k < u->buckets; k++)
            if (!join_bucket(s, u->bucket[k]))
                return false;
        int keep = u->slice_ranks;
        if (keep > 1 && u->size > 1 && !kn_slice_comm(&s->lanes->groups, keep))
            return false;
    }
    return true;
}

static bool any_away(const kn_schedule_state *s)
{
    for (int i = 0; i < s->units; i++)
        for (int k = 0; k < s->unit[i]->buckets; k++)
            if (s->unit[i]->bucket[k]->offloaded)
                return true;
    return false;
}

kn_schedule_state *kn_schedule_of(kn_unit *u)
{
    if (u->schedule)
        return still_claimed(u->schedule) ? u->schedule : NULL;
    kn_unit *root = kn_unit_outermost(u);
    kn_schedule_state *s = kn_ok() ? kn_host_calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    s->root = root;
    s->changes = changes_of(root);
    bool ok = true;
    for (int i = 0; i < root->modules; i++) {
        kn_module_impl *top = root->module[i];
        for (kn_module_impl *m = kn_impl_lowest(top); ok && m; m = kn_impl_next_up(m, top))
            ok = collect(s, m);
    }
    if (ok && kn_lanes_join(s, any_away(s)) && join(s))
        return s;
    kn_schedule_free(s);
    return NULL;
}

void kn_schedule_free(kn_schedule_state *s)
{
    if (!s)
        return;
    kn_finish_reductions(s, 0, KN_WHY("the schedule ends"));
    for (int i = 0; i < s->units; i++)
        if (s->unit[i]->schedule == s) {
            /* a step may come before the next schedule */
            kn_unit_reshard(s->unit[i], KN_WHY("the schedule ends"));
            s->unit[i]->schedule = NULL;
            for (int k = 0; k < s->unit[i]->buckets; k++) {
                s->unit[i]->bucket[k]->ranks = NULL;
                kn_bucket_give_ranks(s->unit[i]->bucket[k], NULL);
            }
            s->unit[i]->ahead = s->unit[i]->ran = false;
            kn_prefetch_free(s->unit[i]); /* it speaks of other units */
        }
    kn_lanes_leave(s);
    kn_comm_give_back(s->tables);
    kn_host_free(s->unit);
    kn_order_free(&s->order);
    kn_host_free(s);
}

/* ---- the end of a unit ---------------------------------------------------------------------- */

void kn_unit_free(void *unit)
{
    kn_unit *u = unit;
    if (!u)
        return;
    kn_live_end(&u->live, "unit", "kn_module_free");
    kn_summon_forget(u);
    kn_schedule_free(u->schedule); /* which speaks of all its units */
    for (int i = 0; i < u->buckets; i++)
        kn_bucket_free(u->bucket[i]);
    kn_passes_free(&u->open);
    kn_group_end(u->group);
    kn_host_free(u->bucket);
    kn_host_free(u->module);
    kn_host_free(u->next_forward.list);
    kn_host_free(u->next_backward.list);
    kn_host_free(u);
}

/* Units of the tree gather the one that goes ahead of its use no more. */
static void forget_unit(kn_module_impl *top, const kn_unit *gone)
{
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        kn_unit *u = kn_unit_of(m);
        if (!u)
            continue;
        kn_units_remove(&u->next_forward, gone);
        kn_units_remove(&u->next_backward, gone);
    }
}

void kn_unit_leave(void *unit, kn_module_impl *m)
{
    kn_unit *u = unit;
    int left = 0;
    if (u->schedule) /* what runs still reads the unit's bytes and m's path */
        kn_lanes_sync(u->schedule->lanes);
    for (int i = 0; i < u->modules; i++)
        if (u->module[i] != m)
            u->module[left++] = u->module[i];
    u->modules = left;
    if (left > 0)
        return;
    forget_unit(kn_impl_root(m), u);
    kn_unit_free(u);
}

/* ---- scalars over the ranks of a tree -------------------------------------------------------- */

/* Ranks that no other shares, as of kn_comm_self. A group of one that was split off has its place
 * among the others, where ranks must agree on which communicator is around all. */
static bool is_alone(const kn_comm *c)
{
    return !c || (kn_comm_size(c) == 1 && !c->parent);
}

/* *all: the communicator around those of all units at and below top; *one: one of the units. False
 * where there is none. */
static bool join_ranks(kn_module_impl *top, kn_comm **all, const kn_unit **one)
{
    *all = NULL;
    for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top)) {
        const kn_unit *u = kn_unit_of(m);
        if (!u || is_alone(u->comm))
            continue;
        kn_comm *both = *all ? kn_comm_around(*all, u->comm) : u->comm;
        *one = *all ? *one : u;
        *all = both ? both : *all;
        if (!both)
            return false;
    }
    return true;
}

/* Over them norms of the tree go. Each part of a gradient is counted by one rank of its own unit,
 * so groups that hold different parameters add up, and all ranks have one factor. */
kn_comm *kn_ranks_around(kn_module_impl *m)
{
    kn_comm *all;
    const kn_unit *one;
    join_ranks(m, &all, &one);
    return all;
}

static bool reduce_scalars(kn_module_impl *top, kn_device d, int64_t *sum, int sums, float *max)
{
    kn_comm *comm = kn_ranks_around(top);
    kn_stream *s = kn_compute_stream(d);
    if (!comm || kn_comm_size(comm) == 1)
        return true;
    return (!max || kn_all_reduce_max(comm, max, 1, s, "gradient norm")) &&
           (!sum || kn_all_reduce_i64(comm, sum, sums, s, "gradient norm"));
}

static bool is_first(kn_module_impl *top)
{
    kn_comm *comm = kn_ranks_around(top);
    return !comm || kn_rank(comm) == 0;
}

bool kn_ranks_join(kn_module_impl *m, kn_comm *comm)
{
    kn_comm *all;
    const kn_unit *one = NULL;
    bool ok = join_ranks(kn_impl_root(m), &all, &one);
    if (ok && (!all || is_alone(comm) || kn_comm_around(all, comm)))
        return true;
    return kn_fail("fsdp: '%s' is to be wrapped on a communicator that has no common origin with "
                   "that of unit '%s' in its tree, so norms can't go over the ranks of both; make "
                   "both by kn_comm_split from one",
                   kn_module_shown(m), kn_unit_name(one));
}

void kn_root_joins_ranks(kn_root *root)
{
    root->scalar_reduce = reduce_scalars;
    root->first = is_first;
}
