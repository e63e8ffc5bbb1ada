/* state/checkpoint_load.c: fills a module, its optimizers and its scaler from an open checkpoint,
 * by the way of state dicts (load.c). Each rank reads the bytes of its own parts. */
#include "kernels/error_internal.h"
#include "state/checkpoint_internal.h"

#include <stdio.h>

enum { MODEL, REST, OPTIMS }; /* sources: the model, what belongs to no named optimizer, those */

/* ---- counts ---------------------------------------------------------------------------------- */

typedef struct counts {
    int64_t updates;
    kn_scaler_state scaler;
    bool scaled;
} counts;

static bool read_counts(const kn_checkpoint *c, const kn_checkpoint_load_options *o, counts *n)
{
    const json_t *saved = json_object_get(c->state, "scaler"),
                 *scale = json_object_get(saved, "scale");
    *n = (counts){ .scaled = o->scaler && scale };
    if (o->ema && !kn_folder_int(c->state, "ema_updates", 0, INT64_MAX, &n->updates, c->dir))
        return false;
    n->scaler.scale = json_number_value(scale);
    return !n->scaled ||
           (kn_folder_int(saved, "good", 0, INT64_MAX, &n->scaler.good, c->dir) &&
            kn_folder_int(saved, "skipped", 0, INT64_MAX, &n->scaler.skipped, c->dir));
}

static bool set_counts(const kn_checkpoint_load_options *o, const counts *n)
{
    kn_ema_set_updates(o->ema, n->updates);
    return !n->scaled || kn_scaler_set(o->scaler, n->scaler);
}

/* ---- what is loaded -------------------------------------------------------------------------- */

static bool check_optimizer(const kn_checkpoint *c)
{
    return c->has_optimizer ||
           kn_fail("%s was saved without an optimizer; load the module alone", c->dir);
}

/* Marks the buffers that the checkpoint holds for each rank. */
static bool mark_buffers(const kn_checkpoint *c, kn_loading *l)
{
    const kn_state *names = l->source[REST].names;
    int64_t differ = 0;
    for (int i = 0; i < l->all.count; i++) {
        kn_entry *e = &l->all.list[i];
        if (e->kind != KN_ENTRY_BUFFER)
            continue;
        e->differs =
            kn_state_find_joined(names, l->prefix, e->name + l->all.below, "rank1") != NULL;
        if (!kn_ok())
            return false;
        differ += e->differs;
    }
    return differ * (c->buffer_ranks - 1) <= kn_pieces_count(c->part[KN_PART_OPTIMIZER]) ||
           kn_fail("%s/%s: the buffers of %lld ranks aren't there; the checkpoint is damaged",
                   c->dir, KN_STATE_FILE, (long long)c->buffer_ranks);
}

/* A source for the entries that were added since the last one. */
static bool add_source(kn_loading *l, const kn_state *s, const char *optim, kn_optim *of)
{
    kn_source *x = &l->source[l->sources++];
    x->s = s;
    x->optim = of;
    x->first = l->sources > 1 ? x[-1].end : 0;
    x->end = l->all.count;
    return kn_source_names(l, x, s, optim);
}

static bool add_rest(const kn_checkpoint *c, kn_loading *l, const kn_checkpoint_load_options *o)
{
    if ((o->optim && !kn_entries_add_optim_all(&l->all, o->optim)) ||
        !kn_entries_add_trained(&l->all, o->ema) ||
        !add_source(l, c->names[KN_PART_OPTIMIZER], "", o->optim) ||
        (c->buffer_ranks > 1 && c->part[KN_PART_OPTIMIZER] &&
         (!mark_buffers(c, l) || !kn_entries_add_rank_buffers(&l->all, (int)c->buffer_ranks))))
        return false;
    l->source[REST].end = l->all.count;
    bool ok = true;
    for (int k = 0; ok && k < o->optim_count; k++) {
        kn_optim *optim = o->optims[k].optim;
        ok = kn_entries_add_optim_all(&l->all, optim) &&
             add_source(l, c->names[KN_PART_OPTIMIZER], o->optims[k].name, optim);
    }
    return ok;
}

static bool list(const kn_checkpoint *c, kn_loading *l, void *module,
                 const kn_checkpoint_load_options *o)
{
    const bool some = o->optim || o->optim_count > 0;
    if (!kn_entries_begin(&l->all, module, kn_entries_comm(module, c->comm)))
        return false;
    if (kn_comm_size(l->all.comm) != kn_comm_size(c->comm))
        return kn_fail("kn_checkpoint_load: %d ranks hold the module, and %d opened the "
                       "checkpoint; open it with the communicator that kn_fsdp_wrap got",
                       kn_comm_size(l->all.comm), kn_comm_size(c->comm));
    l->all.only = o->only;
    l->all.except = o->except;
    return kn_entries_add_model(&l->all, o->ema) &&
           add_source(l, c->names[KN_PART_MODEL], NULL, NULL) && (!some || add_rest(c, l, o));
}

/* ---- the call -------------------------------------------------------------------------------- */

/* Where names begin at the root, those below module have its path before them. */
static char *prefix_of(const kn_loading *l, void *module)
{
    const char *path = kn_module_path(module);
    return l->o->prefix ? kn_host_strdup(l->o->prefix) : kn_state_join(path, "", *path ? "" : NULL);
}

static bool load(const kn_checkpoint *c, void *module, const kn_checkpoint_load_options *o,
                 const kn_load_state_dict_options *names)
{
    counts n = { 0 };
    kn_source *source = kn_host_calloc(KN_MOST_SOURCES, sizeof *source);
    char *what = kn_state_join("kn_checkpoint_load: ", c->dir, NULL);
    kn_loading l = { .what = what, .o = names, .source = source, .from_root = !o->prefix };
    char *prefix = source && what ? prefix_of(&l, module) : NULL;
    l.prefix = prefix;
    const bool some = o->optim || o->optim_count > 0;
    bool ok = prefix && kn_loading_options(names, what) &&
              (!some || (check_optimizer(c) && read_counts(c, o, &n))) && list(c, &l, module, o) &&
              kn_loading_check(&l);
    ok = kn_agree(c->comm, ok) && ok && kn_loading_write(&l) && set_counts(o, &n);
    ok = kn_loading_end(&l, ok);
    kn_host_free(source);
    kn_host_free(what);
    kn_host_free(prefix);
    return ok;
}

bool kn_checkpoint_load_(const kn_checkpoint *c, void *module, kn_checkpoint_load_options o)
{
    if (o.report)
        *o.report = (kn_load_report){ 0 };
    if (!kn_given(c, "kn_checkpoint_load", "the checkpoint") ||
        !kn_given(module, "kn_checkpoint_load", "the module"))
        return false;
    const bool some = o.optim || o.optim_count > 0;
    if ((o.scaler || o.keep_options) && !some)
        return kn_fail("kn_checkpoint_load: .%s does nothing without an optimizer; leave it out or "
                       "give .optim",
                       o.scaler ? "scaler" : "keep_options");
    bool saved = json_object_get(c->state, "ema_updates") != NULL;
    if (!kn_checkpoint_optims(o.optim, o.optims, o.optim_count, module) ||
        !kn_checkpoint_ema(o.ema, module, some, "kn_checkpoint_load"))
        return false;
    if (some && c->has_optimizer && saved != (o.ema != NULL))
        return kn_fail("%s was saved %s averages of the weights: load it %s .ema (--ema)", c->dir,
                       saved ? "with" : "without", saved ? "with" : "without");
    const kn_load_state_dict_options names = {
        .prefix = o.prefix,
        .only = o.only,
        .except = o.except,
        .renames = o.renames,
        .rename_count = o.rename_count,
        .rename = o.rename,
        .rename_arg = o.rename_arg,
        .not_strict = o.not_strict,
        .skip_mismatched = o.skip_mismatched,
        .report = o.report,
        .keep_options = o.keep_options,
    };
    return kn_hosts_begin_slow(c->comm) && kn_hosts_end_slow(c->comm, load(c, module, &o, &names));
}
