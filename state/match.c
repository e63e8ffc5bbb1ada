/* state/match.c: which item of a state dict goes to which tensor, and what doesn't fit. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "state/load_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- lists of names -------------------------------------------------------------------------- */

bool kn_names_add(kn_names *n, const char *name)
{
    char *copy = kn_host_grow(&n->list, &n->room, n->count + 2, sizeof *n->list)
                     ? kn_host_strdup(name)
                     : NULL;
    if (!copy)
        return false;
    n->list[n->count++] = copy;
    n->list[n->count] = NULL;
    return true;
}

static void free_list(char **list)
{
    for (int i = 0; list && list[i]; i++)
        kn_host_free(list[i]);
    kn_host_free(list);
}

void kn_names_free(kn_names *n)
{
    free_list(n->list);
    *n = (kn_names){ 0 };
}

void kn_load_report_free(kn_load_report *r)
{
    if (!r)
        return;
    free_list(r->missing);
    free_list(r->unexpected);
    free_list(r->mismatched);
    *r = (kn_load_report){ 0 };
}

void kn_loading_report(kn_loading *l)
{
    if (l->o->report && !l->reported) {
        *l->o->report = (kn_load_report){ l->missing.list, l->unexpected.list, l->mismatched.list };
        l->missing = l->unexpected = l->mismatched = (kn_names){ 0 };
        l->reported = true;
    }
    kn_names_free(&l->missing);
    kn_names_free(&l->unexpected);
    kn_names_free(&l->mismatched);
}

/* ---- one entry ------------------------------------------------------------------------------- */

static kn_array shape_of(kn_dtype dtype, int ndim, const int64_t *shape)
{
    kn_array a = { .dtype = dtype, .ndim = ndim };
    memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
    return a;
}

static bool mismatch(kn_loading *l, const char *name, const kn_state_item *i, const kn_array *want)
{
    char a[96], b[96];
    if (l->mismatched.count == 0 && i->type == KN_STATE_TENSOR && !i->flat) {
        const kn_array have = shape_of(i->dtype, i->ndim, i->shape);
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
    return i->type == KN_STATE_TENSOR && !i->flat && i->ndim == e->ndim &&
           memcmp(i->shape, e->shape, (size_t)e->ndim * sizeof *e->shape) == 0 &&
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

static bool match(kn_loading *l, int at, const kn_state_item *i)
{
    const kn_entry *e = &l->all.list[at];
    const kn_array want = shape_of(e->dtype, e->ndim, e->shape);
    l->used[i - l->names->list] = true;
    if (!same_shape(i, e))
        return mismatch(l, i->name, i, &want);
    l->item[at] = i;
    l->parts = l->parts || i->shards > 1;
    return is_mine(l, i);
}

/* ---- other names of the same tensor ---------------------------------------------------------- */

/* The item of entry number `at` under another of its names, if it has none yet. */
static bool match_alias(kn_loading *l, int at, const char *path)
{
    char *name = kn_state_join(l->o->prefix, path + l->below, NULL);
    const kn_state_item *i = name ? kn_state_find(l->names, name) : NULL;
    bool ok = name != NULL;
    if (i && l->item[at])
        l->used[i - l->names->list] = true;
    else if (i)
        ok = match(l, at, i);
    kn_host_free(name);
    return ok;
}

/* The entry of a tensor whose first name isn't this module's; -1: none. */
static int entry_of(const kn_loading *l, const kn_param *p, const kn_tensor *t, const char *path)
{
    for (int i = 0; i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        const kn_tensor *of = e->kind == KN_ENTRY_PARAM ? p[e->param].tensor : e->tensor;
        if (of == t && !e->plain && strcmp(e->name, path) != 0)
            return i;
    }
    return -1;
}

static bool match_aliases(kn_module *m, void *arg)
{
    kn_loading *l = arg;
    const kn_module_impl *impl = m->impl;
    const kn_param *p;
    bool ok = kn_params(l->all.module, &p) >= 0;
    for (int i = 0; ok && i < impl->params + impl->buffers; i++) {
        const bool param = i < impl->params;
        const char *own = param ? impl->param[i].name : impl->buffer[i - impl->params].name;
        const kn_tensor *t = param ? impl->param[i].tensor : impl->buffer[i - impl->params].tensor;
        char *path =
            *impl->path ? kn_state_join(NULL, impl->path, own) : kn_state_join(NULL, own, NULL);
        const int at = path ? entry_of(l, p, t, path) : -1;
        ok = path && (at < 0 || match_alias(l, at, path));
        kn_host_free(path);
    }
    return ok && kn_ok();
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* Of a local state, a unit's flat part has it. */
static bool in_flat(const kn_loading *l, const kn_entry *e)
{
    return l->local && e->kind == KN_ENTRY_PARAM && e->bucket;
}

static bool match_entries(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        if (in_flat(l, e))
            continue;
        char *name = kn_state_join(l->o->prefix, e->name + l->below, NULL);
        const kn_state_item *item = name ? kn_state_find(l->names, name) : NULL;
        ok = name && (!item || match(l, i, item));
        kn_host_free(name);
    }
    return ok && (l->optim || kn_apply_modules(l->all.module, match_aliases, l));
}

static bool match_flats(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->flats.count; i++) {
        const kn_flat *f = &l->flats.list[i];
        const kn_state_item *item = kn_state_find(l->names, f->name);
        const kn_array none = { 0 };
        if (!item) {
            ok = kn_names_add(&l->missing, f->name);
            continue;
        }
        l->used[item - l->names->list] = true;
        if (item->flat && item->split == f->split && item->shape[0] == f->bucket->layout.shard)
            l->flat[i] = item;
        else
            ok = mismatch(l, f->name, item, &none);
    }
    return ok;
}

static bool list_missing(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        if (l->item[i] || in_flat(l, e))
            continue;
        char *name = kn_state_join(l->o->prefix, e->name + l->below, NULL);
        const bool there = name && kn_state_find(l->names, name); /* a mismatch */
        ok = name && (there || kn_names_add(&l->missing, name));
        kn_host_free(name);
    }
    return ok;
}

/* Whether a name of another optimizer's parameters, or of those that this one leaves alone. */
static bool of_others(const kn_loading *l, const char *name)
{
    const kn_param *p;
    const char *path = kn_module_path(l->all.module);
    const size_t length = strlen(path);
    const int n = kn_params(l->all.module, &p);
    if (length > 0 && (strncmp(name, path, length) != 0 || name[length] != '.'))
        return true;
    for (int i = 0; i < n; i++) {
        const size_t own = strlen(p[i].name);
        if (strncmp(name, p[i].name, own) == 0 && name[own] == '.' &&
            !kn_optim_steps_param(l->optim, &p[i], i))
            return true;
    }
    return false;
}

static bool list_unexpected(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->names->count; i++) {
        const kn_state_item *item = &l->names->list[i];
        const char *name = kn_state_below(item->name, l->o->prefix);
        if (l->used[i] || !name || item->type != KN_STATE_TENSOR ||
            (!l->optim && kn_is_unsaved_buffer(l->all.module->impl, name)))
            continue;
        ok = (l->optim && of_others(l, name)) || kn_names_add(&l->unexpected, item->name);
    }
    return ok;
}

bool kn_loading_match(kn_loading *l)
{
    for (int i = 0; i < l->names->count && !l->optim; i++)
        l->local = l->local ||
                   (l->names->list[i].flat && kn_state_below(l->names->list[i].name, l->o->prefix));
    if (l->local && l->o->ema)
        return kn_fail("%s: .ema isn't for local states", l->what);
    if (l->local && !kn_flats_list(&l->flats, l->all.module, l->o->prefix))
        return false;
    l->item = kn_host_calloc((size_t)l->all.count + 1, sizeof *l->item);
    l->flat = kn_host_calloc((size_t)l->flats.count + 1, sizeof *l->flat);
    l->used = kn_host_calloc((size_t)l->names->count + 1, sizeof *l->used);
    return l->item && l->flat && l->used && match_entries(l) && match_flats(l) && list_missing(l) &&
           list_unexpected(l) &&
           (!l->optim || l->o->keep_options ||
            kn_optim_values_read(&l->values, l->names, l->optim, l->o->prefix, &l->missing));
}

/* ---- strict ---------------------------------------------------------------------------------- */

/* "2 missing (a, b)" behind what text[size] has. */
static void tell(char *text, size_t size, const kn_names *n, const char *how)
{
    size_t at = strlen(text);
    if (n->count == 0)
        return;
    snprintf(text + at, size - at, "%s%d %s (", at ? ", " : "", n->count, how);
    for (int i = 0; i < n->count && i < 3; i++) {
        at = strlen(text);
        snprintf(text + at, size - at, "%s%.80s", i ? ", " : "", n->list[i]);
    }
    at = strlen(text);
    snprintf(text + at, size - at, "%s)", n->count > 3 ? ", ..." : "");
}

/* .not_strict, and nothing is loaded: most likely .prefix is another's. */
static bool some_fit(const kn_loading *l)
{
    bool some = l->all.count == 0 || l->o->report;
    for (int i = 0; i < l->all.count; i++)
        some = some || l->item[i];
    for (int i = 0; i < l->flats.count; i++)
        some = some || l->flat[i];
    return some || kn_fail("%s: no name fits: the module has %d (%.80s), the state %d%s; check "
                           ".prefix, or give a .report if nothing may fit",
                           l->what, l->all.count, l->missing.count ? l->missing.list[0] : "none",
                           l->names->count, l->o->prefix ? " with and without the prefix" : "");
}

bool kn_loading_fits(const kn_loading *l)
{
    char text[1200] = "";
    if (l->o->not_strict)
        return kn_ok() && some_fit(l);
    tell(text, sizeof text, &l->missing, "missing");
    tell(text, sizeof text, &l->unexpected, "unexpected");
    tell(text, sizeof text, &l->mismatched, "mismatched");
    return !*text ? kn_ok()
                  : kn_fail("%s: names don't fit: %s%s; give .not_strict to load those that do, or "
                            "the .prefix that they were taken with",
                            l->what, text, l->mismatched.count ? l->first : "");
}
