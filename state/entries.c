/* state/entries.c: lists the tensors of a state: which, and which part of them this rank has.
 * values.c reads and writes them. */
#include "state/entries.h"
#include "comm/comm_internal.h"
#include "fsdp/build.h"
#include "kernels/memory_internal.h"
#include "optim/optim_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- the list -------------------------------------------------------------------------------- */

/* The communicator of a unit that holds a parameter of m, or lies around it; NULL: none does. */
static kn_comm *comm_near(kn_module *m)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++) {
        const kn_bucket *b = kn_bucket_of(&p[i]);
        if (b)
            return b->unit->comm;
    }
    for (const kn_module_impl *up = m->impl; up; up = up->parent)
        if (up->unit)
            return kn_unit_of(up)->comm;
    return NULL;
}

kn_comm *kn_entries_comm(void *module, kn_comm *otherwise)
{
    kn_module_impl *m = kn_impl(module, "state");
    kn_comm *comm = m ? kn_ranks_around(m) : NULL;
    comm = comm || !m ? comm : comm_near(module);
    return comm ? comm : otherwise;
}

bool kn_entries_begin(kn_entries *e, void *module, kn_comm *comm)
{
    *e = (kn_entries){ 0 };
    if (!kn_ok() || !kn_impl(module, "state"))
        return false;
    e->comm = comm ? comm : kn_entries_comm(module, NULL);
    if (!kn_ok())
        return false;
    const char *path = kn_module_path(module);
    e->below = *path ? strlen(path) + 1 : 0;
    e->module = module;
    return kn_module_full_buffers(module, true);
}

bool kn_entries_end(kn_entries *e)
{
    bool ok = !e->module || kn_module_full_buffers(e->module, false);
    for (int i = 0; i < e->count; i++) {
        kn_host_free((void *)e->list[i].name);
        if (e->list[i].kind == KN_ENTRY_FLAT)
            kn_tensor_free(e->list[i].tensor);
    }
    kn_host_free(e->list);
    *e = (kn_entries){ 0 };
    return ok && kn_ok();
}

bool kn_entries_want(const kn_entries *e, const char *name)
{
    name += strlen(name) > e->below ? e->below : 0;
    return (!e->only || kn_matched(e->only, name)) && !(e->except && kn_matched(e->except, name)) &&
           kn_ok();
}

/* As kn_entries_add, with a group behind the name. */
static bool add(kn_entries *all, kn_entry e, const char *before, const char *after,
                const char *group)
{
    const char *label = all->label ? all->label : "";
    size_t n = strlen(label) + strlen(before) + (after ? strlen(after) : 0) + strlen(group) + 3;
    char *name =
        kn_host_grow(&all->list, &all->room, all->count + 1, sizeof e) ? kn_host_alloc(n) : NULL;
    if (!name)
        return false;
    snprintf(name, n, "%s%s%s%s%s%s", label, all->label ? "/" : "", before, after ? "." : "",
             after ? after : "", group);
    e.name = name;
    e.plain = *group ? strlen(name) - strlen(group) : 0;
    all->list[all->count++] = e;
    return true;
}

bool kn_entries_add(kn_entries *all, kn_entry e, const char *before, const char *after)
{
    return add(all, e, before, after, "");
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* Part of the entry on a rank of its unit; the whole outside of units. */
static kn_interval part_of(const kn_entry *e, int shard)
{
    if (!e->bucket)
        return kn_interval_whole(kn_entry_numel(e));
    kn_interval part = kn_layout_part(&e->bucket->layout, e->index, shard);
    part.at = 0;
    return e->row ? kn_interval_of_rows(part, e->row) : part;
}

/* The ranks of c among the groups of all that a split made: ".group0of2", with more numbers where
 * those were split again. */
static void name_group(const kn_comm *c, const kn_comm *all, char *name, size_t size)
{
    *name = 0;
    if (c == all)
        return;
    name_group(c->parent, all, name, size);
    size_t used = strlen(name);
    if (c->groups > 1 && used < size)
        snprintf(name + used, size - used, "%s%dof%d", used ? "_" : ".group", c->group, c->groups);
}

/* Groups of ranks that have a parameter each under p's name tell theirs apart; "": all ranks have
 * the same. */
static bool find_group(const kn_entries *all, const kn_param *p, const kn_bucket *b, char *name,
                       size_t size)
{
    const kn_comm *c = b ? b->unit->comm : NULL;
    const int unit = b ? b->unit->size : 1, ranks = kn_comm_size(all->comm);
    *name = 0;
    while (c && c != all->comm)
        c = c->parent;
    if (c)
        name_group(b->unit->comm, c, name, size);
    return c || unit == 1 || unit == ranks ||
           kn_fail("state: '%s' is shared by %d ranks, but .comm has %d; give the communicator "
                   "that kn_fsdp_wrap got, or the one around those of all units",
                   p->name, unit, ranks);
}

/* tensor: cut as p, with values of the given kind; NULL: like the master, and not made yet. */
static bool add_param(kn_entries *all, const kn_param *p, kn_tensor *tensor, kn_entry e,
                      const char *name, const char *after)
{
    kn_bucket *b = kn_bucket_of(p);
    char group[80];
    if ((b && all->outside) || !kn_entries_want(all, name) ||
        !find_group(all, p, b, group, sizeof group))
        return kn_ok();
    if (b && !kn_unit_closed(b->unit, p->name, "state"))
        return false;
    e.dtype = kn_dtype_of(tensor ? tensor : all->declared && !p->master ? p->tensor : p->master);
    e.bucket = b;
    e.ndim = e.row ? 1 : kn_ndim(p->tensor);
    memcpy(e.shape, kn_shape(p->tensor), (size_t)e.ndim * sizeof *e.shape);
    e.index = p->index;
    e.handle = p->tensor;
    e.tensor = tensor;
    e.part = part_of(&e, b ? b->shard : 0);
    return add(all, e, name, after, group);
}

/* The values of parameter i that are wanted. While the averages are swapped in they are what the
 * module holds. */
static kn_tensor *values_of(const kn_param *p, int i, const kn_ema *ema, bool averages)
{
    kn_tensor *other = ema ? kn_ema_value(ema, i) : NULL;
    return other && averages != kn_ema_swapped(ema) ? other : p->master;
}

static bool is_of(const kn_entries *all, const kn_ema *ema)
{
    return !ema || kn_ema_module(ema) == all->module ||
           (kn_ok() && kn_fail("state: .ema was made for another module"));
}

/* trained: of those with an average what trains beside it, as "name.trained". */
static bool add_params(kn_entries *e, const kn_ema *ema, bool trained)
{
    const kn_param *p;
    int n = kn_params(e->module, &p);
    const kn_entry entry = { .kind = trained ? KN_ENTRY_TRAINED : KN_ENTRY_PARAM };
    bool ok = is_of(e, ema);
    for (int i = 0; ok && i < n; i++)
        if (!trained || kn_ema_value(ema, i))
            ok = add_param(e, &p[i], values_of(&p[i], i, ema, !trained), entry, p[i].name,
                           trained ? "trained" : NULL);
    return ok && kn_ok();
}

/* ---- buffers --------------------------------------------------------------------------------- */

static bool add_buffer(kn_entries *all, const kn_tensor *handle, kn_tensor *t, int rank, bool mine,
                       const char *before, const char *after)
{
    kn_entry e = { .kind = KN_ENTRY_BUFFER, .handle = handle, .rank = rank, .index = -1 };
    e.dtype = kn_dtype_of(t);
    e.ndim = kn_ndim(t);
    memcpy(e.shape, kn_shape(t), (size_t)e.ndim * sizeof *e.shape);
    e.tensor = mine ? t : NULL;
    e.part = mine ? kn_interval_whole(kn_entry_numel(&e)) : (kn_interval){ 0 };
    return kn_entries_add(all, e, before, after);
}

static bool has_buffer(const kn_entries *all, const kn_tensor *handle)
{
    bool found = false;
    for (int i = 0; i < all->count && !found; i++)
        found = all->list[i].kind == KN_ENTRY_BUFFER && all->list[i].handle == handle;
    return found;
}

typedef struct adding {
    kn_entries *all;
    const kn_ema *ema;
    bool trained;
} adding;

/* The values of a buffer that are wanted, as of a parameter. */
static kn_tensor *buffer_of(kn_tensor *t, const kn_ema *ema, bool averages)
{
    kn_tensor *other = ema ? kn_ema_buffer(ema, t) : NULL;
    return other && averages != kn_ema_swapped(ema) ? other : t;
}

static bool add_buffers_of(kn_module *m, void *arg)
{
    const adding *a = arg;
    kn_entries *all = a->all;
    const char *path = kn_module_path(m), *own;
    bool ok = true;
    for (int i = 0; ok && i < kn_module_buffers(m); i++) {
        kn_tensor *t = kn_module_buffer_at(m, i, &own);
        if (t && (!kn_module_buffer_saved(m, i) || (a->trained && !kn_ema_buffer(a->ema, t))))
            continue;
        kn_tensor *values = t ? buffer_of(t, a->ema, !a->trained) : NULL;
        kn_tensor *handle = a->trained ? kn_ema_buffer(a->ema, t) : t; /* one of its own */
        const size_t room = strlen(path) + strlen(own) + 2;
        char *name = t ? kn_host_alloc(room) : NULL;
        if (name)
            snprintf(name, room, "%s%s%s", path, *path ? "." : "", own);
        ok =
            name && (has_buffer(all, handle) || !kn_entries_want(all, name) ||
                     add_buffer(all, handle, values, 0, true, name, a->trained ? "trained" : NULL));
        kn_host_free(name);
    }
    return ok && kn_ok();
}

static bool add_all(kn_entries *e, const kn_ema *ema, bool trained)
{
    return add_params(e, ema, trained) &&
           kn_apply_modules(e->module, add_buffers_of, &(adding){ e, ema, trained }) && kn_ok();
}

bool kn_entries_add_model(kn_entries *e, const kn_ema *ema)
{
    return add_all(e, ema, false);
}

bool kn_entries_add_trained(kn_entries *e, const kn_ema *ema)
{
    return ema ? add_all(e, ema, true) : kn_ok();
}

static bool add_optim(kn_entries *e, kn_optim *optim, bool all)
{
    const kn_param *p;
    const char *state;
    int n = kn_params(kn_optim_module(optim), &p);
    bool ok = kn_ok() && kn_optim_unchanged(optim, p, n, "state");
    for (int i = 0; ok && i < n; i++)
        for (int k = 0; ok && (state = kn_optim_state_name_of(optim, i, k)); k++) {
            const kn_entry entry = { .kind = KN_ENTRY_STATE,
                                     .optim = optim,
                                     .param = i,
                                     .state = state,
                                     .row = kn_optim_state_row(optim, &p[i]) };
            if (!kn_entries_want(e, p[i].name))
                break;
            kn_tensor *t =
                all ? kn_optim_state_there(optim, i, state) : kn_optim_state(optim, i, state);
            ok = kn_ok() && ((!t && !all) || add_param(e, &p[i], t, entry, p[i].name, state));
        }
    return ok && kn_ok();
}

bool kn_entries_add_optim(kn_entries *e, const kn_optim *optim)
{
    return add_optim(e, (kn_optim *)optim, false);
}

bool kn_entries_add_optim_all(kn_entries *e, kn_optim *optim)
{
    return add_optim(e, optim, true);
}

/* ---- buffers of other ranks ------------------------------------------------------------------ */

bool kn_entries_add_rank_buffers(kn_entries *e, int ranks)
{
    const bool own = ranks == kn_comm_size(e->comm);
    const int count = e->count;
    char after[32];
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        for (int r = 1; ok && e->list[i].differs && e->list[i].rank == 0 && r < ranks; r++) {
            snprintf(after, sizeof after, "rank%d", r);
            ok = add_buffer(e, e->list[i].handle, e->list[i].tensor, r,
                            own && r == kn_rank(e->comm), e->list[i].name, after);
        }
    return ok && kn_ok();
}

/* ---- who writes ------------------------------------------------------------------------------ */

/* Of any rank. */
static kn_interval part_on(const kn_entry *e, const kn_entries *all, int rank)
{
    const bool cut = e->bucket && e->bucket->unit->size == kn_comm_size(all->comm);
    if (e->kind == KN_ENTRY_BUFFER && e->rank > 0 && e->rank != rank)
        return (kn_interval){ 0 };
    return part_of(e, cut ? rank % e->bucket->shards : 0);
}

/* The rank that writes shard number s of e: of its replicas that with the least to write so far. */
static int saver_of(const kn_entry *e, const kn_entries *all, int s, const int64_t *bytes)
{
    const int ranks = kn_comm_size(all->comm);
    if (!e->bucket || e->bucket->unit->size != ranks)
        return e->rank;
    int best = s;
    for (int r = s; r < ranks; r += e->bucket->shards)
        best = bytes[r] < bytes[best] ? r : best;
    return best;
}

/* The first replica does. Its bytes don't count for the others, which know their own group only. */
static bool saves_in_group(const kn_entry *e)
{
    const int rank = e->bucket->unit->rank;
    return rank < e->bucket->shards &&
           (kn_interval_numel(e->part) > 0 || (rank == 0 && kn_entry_numel(e) == 0));
}

bool kn_entries_deal(kn_entries *all)
{
    const int ranks = kn_comm_size(all->comm);
    int64_t *bytes = kn_host_calloc((size_t)ranks, sizeof *bytes); /* that each has to write */
    for (int i = 0; bytes && i < all->count; i++) {
        kn_entry *e = &all->list[i];
        const bool cut = e->bucket && e->bucket->unit->size == ranks;
        e->saver = e->plain && saves_in_group(e);
        if (e->plain)
            continue;
        for (int s = 0; s < (cut ? e->bucket->shards : 1); s++) {
            const int64_t part = kn_interval_numel(part_on(e, all, cut ? s : e->rank));
            const int saver = saver_of(e, all, s, bytes);
            if (saver >= ranks || (part == 0 && (s > 0 || kn_entry_numel(e) > 0)))
                continue;
            bytes[saver] += part * (int64_t)kn_dtype_size(e->dtype);
            e->saver = e->saver || saver == kn_rank(all->comm);
        }
    }
    kn_host_free(bytes);
    return bytes != NULL;
}
