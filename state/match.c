/* state/match.c: which item of a source goes to which tensor, and what doesn't fit. */
#include "state/load_internal.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- one entry ------------------------------------------------------------------------------- */

static bool mismatch(kn_loading *l, const char *name, const kn_state_item *i, const kn_array *want)
{
    char a[96], b[96];
    if (l->mismatched.count == 0 && i->type == KN_STATE_TENSOR && !i->flat) {
        const kn_array have = kn_array_make(NULL, i->dtype, i->ndim, i->shape);
        snprintf(l->first, sizeof l->first, ": it is %s, not %s",
                 kn_array_describe(&have, a, sizeof a), kn_array_describe(want, b, sizeof b));
    } else if (l->mismatched.count == 0) {
        snprintf(l->first, sizeof l->first, ": it is %s",
                 i->flat ? "the local part of another sharding" : "no tensor");
    }
    return kn_names_add(&l->mismatched, name);
}

static bool same_shape(const kn_state_item *i, const kn_entry *e)
{
    const bool flat = e->kind == KN_ENTRY_FLAT;
    return i->type == KN_STATE_TENSOR && i->flat == flat && i->ndim == e->ndim &&
           memcmp(i->shape, e->shape, (size_t)e->ndim * sizeof *e->shape) == 0 &&
           (!flat || i->split == kn_entry_split(e)) &&
           (i->dtype == e->dtype || (kn_dtype_is_float(i->dtype) && kn_dtype_is_float(e->dtype)));
}

/* A part is loaded on the rank that took it. */
static bool is_mine(const kn_loading *l, const kn_state_item *i)
{
    const int ranks = kn_comm_size(l->all.comm), rank = kn_rank(l->all.comm);
    return i->shards <= 1 || (i->ranks == ranks && i->rank == rank) ||
           kn_fail("%s: '%s' is the part of rank %d of %d, and this is rank %d of %d: load it on "
                   "the ranks that took it (.comm), or take a full state",
                   l->what, i->name, i->rank, i->ranks, rank, ranks);
}

static kn_source *source_of(const kn_loading *l, int at)
{
    int k = 0;
    while (at >= l->source[k].end)
        k++;
    return &l->source[k];
}

static bool match(kn_loading *l, kn_source *x, int at, const kn_state_item *i)
{
    const kn_entry *e = &l->all.list[at];
    const kn_array want = kn_array_make(NULL, e->dtype, e->ndim, e->shape);
    x->used[i - x->names->list] = true;
    if (!same_shape(i, e))
        return mismatch(l, i->name, i, &want);
    l->item[at] = i;
    l->parts = l->parts || (i->shards > 1 && !i->flat);
    return is_mine(l, i);
}

/* ---- other names of the same tensor ---------------------------------------------------------- */

/* The item of entry number `at` under another of its names, if it has none yet. */
static bool match_alias(kn_loading *l, int at, const char *path)
{
    kn_source *x = source_of(l, at);
    const kn_state_item *i =
        l->from_root ? kn_state_find(x->names, path)
                     : kn_state_find_joined(x->names, l->prefix, path + l->all.below, NULL);
    if (i && l->item[at])
        x->used[i - x->names->list] = true;
    else if (i)
        return match(l, x, at, i);
    return kn_ok();
}

/* The entry of a tensor that is listed under another name; -1: none. */
static int entry_of(const kn_loading *l, const kn_tensor *t, const char *path)
{
    for (int i = 0; i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        const bool model = e->kind == KN_ENTRY_PARAM || (e->kind == KN_ENTRY_BUFFER && !e->rank);
        if (model && !e->plain && e->handle == t && strcmp(e->name, path) != 0)
            return i;
    }
    return -1;
}

static bool match_aliases(kn_module *m, void *arg)
{
    kn_loading *l = arg;
    const kn_module_impl *impl = m->impl;
    bool ok = true;
    for (int i = 0; ok && i < impl->params + impl->buffers; i++) {
        const bool param = i < impl->params;
        const char *own = param ? impl->param[i].name : impl->buffer[i - impl->params].name;
        const kn_tensor *t = param ? impl->param[i].tensor : impl->buffer[i - impl->params].tensor;
        char *path =
            *impl->path ? kn_state_join(NULL, impl->path, own) : kn_state_join(NULL, own, NULL);
        const int at = path ? entry_of(l, t, path) : -1;
        ok = path && (at < 0 || match_alias(l, at, path));
        kn_host_free(path);
    }
    return ok && kn_ok();
}

/* Also those outside of the module, where names are from the root. */
static bool match_all_aliases(kn_loading *l)
{
    kn_module_impl *m = l->all.module->impl;
    return kn_apply_modules(l->from_root ? kn_impl_root(m)->self : m->self, match_aliases, l);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static bool match_entries(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        kn_source *x = source_of(l, i);
        const kn_state_item *item =
            kn_state_find_joined(x->names, l->prefix, e->name + l->all.below, NULL);
        ok = kn_ok() && (!item || match(l, x, i, item));
    }
    return ok && match_all_aliases(l);
}

/* A state that isn't there: that of a frozen parameter may be missing, and one that no step needed
 * yet is 0. */
static bool may_miss(kn_loading *l, const kn_source *x, int at)
{
    const kn_entry *e = &l->all.list[at];
    const kn_param *p;
    if (e->kind != KN_ENTRY_STATE || kn_params(kn_optim_module(e->optim), &p) <= e->param)
        return false;
    l->zero[at] = kn_optim_values_unstepped(x->names, l->prefix, p[e->param].name + l->all.below,
                                            e->optim, e->param);
    return l->zero[at] || !p[e->param].trainable;
}

static bool list_missing(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        const kn_source *x = source_of(l, i);
        if (l->item[i] || may_miss(l, x, i))
            continue;
        char *name = kn_loading_name(l, e->name, NULL);
        const bool there = name && kn_state_find(x->names, name); /* a mismatch */
        ok = name && (there || kn_names_add(&l->missing, name));
        kn_host_free(name);
    }
    return ok && kn_ok();
}

/* Whether name, below the module, is of a parameter that the source's optimizer leaves alone, or of
 * another optimizer's. */
static bool of_others(const kn_loading *l, const kn_source *x, const char *name)
{
    const kn_param *p;
    const char *path = kn_module_path(kn_optim_module(x->optim));
    path += strlen(path) > l->all.below ? l->all.below : strlen(path);
    const size_t length = strlen(path);
    const int n = kn_params(kn_optim_module(x->optim), &p);
    if (length > 0 && (strncmp(name, path, length) != 0 || name[length] != '.'))
        return true;
    for (int i = 0; i < n; i++) {
        const char *own = p[i].name + l->all.below;
        const size_t all = strlen(own);
        if (strncmp(name, own, all) == 0 && name[all] == '.' &&
            (x->optim->slot[i].group.frozen || !kn_entries_want(&l->all, p[i].name)))
            return true;
    }
    return false;
}

/* Whether a name of the model, below the module, isn't asked for. */
static bool unasked(const kn_loading *l, const char *name)
{
    return (l->all.only && !kn_matched(l->all.only, name)) ||
           (l->all.except && kn_matched(l->all.except, name));
}

/* Whether name, below the module, is of another group of ranks than this one's of an entry. */
static bool of_other_group(const kn_loading *l, const char *name)
{
    static const char group[] = ".group";
    bool found = false;
    for (int i = 0; i < l->all.count && !found; i++) {
        const kn_entry *e = &l->all.list[i];
        const size_t own = e->plain ? e->plain - l->all.below : 0;
        found = e->plain && strncmp(name, e->name + l->all.below, own) == 0 &&
                strncmp(name + own, group, sizeof group - 1) == 0;
    }
    return found;
}

static bool list_unexpected(kn_loading *l, const kn_source *x)
{
    bool ok = true;
    for (int i = 0; ok && i < x->names->count; i++) {
        const kn_state_item *item = &x->names->list[i];
        const char *name = kn_state_below(item->name, l->prefix);
        if (x->used[i] || !name || item->type != KN_STATE_TENSOR ||
            kn_is_unsaved_buffer(l->all.module->impl, name) || (x->rest && strchr(item->name, '/')))
            continue;
        ok = (x->optim ? of_others(l, x, name) : unasked(l, name)) || of_other_group(l, name) ||
             kn_names_add(&l->unexpected, item->name);
    }
    return ok && kn_ok();
}

static bool match_source(kn_loading *l, kn_source *x)
{
    return list_unexpected(l, x) &&
           (!x->optim || kn_optim_values_read(&x->values, x->names, x->optim, l->prefix, &l->all,
                                              l->o->keep_options, &l->missing));
}

bool kn_loading_match(kn_loading *l)
{
    const size_t n = (size_t)l->all.count + 1;
    l->item = kn_host_calloc(n, sizeof *l->item);
    l->zero = kn_host_calloc(n, sizeof *l->zero);
    l->made = kn_host_calloc(n, sizeof *l->made);
    bool ok = l->item && l->zero && l->made && match_entries(l) && list_missing(l);
    for (int k = 0; ok && k < l->sources; k++)
        ok = match_source(l, &l->source[k]);
    return ok;
}
