/* state/checkpoint_state.c: the contents of a checkpoint to be: the list of tensors, and
 * state.json. */
#include "comm/comm_internal.h"
#include "kernels/error_internal.h"
#include "state/checkpoint_internal.h"
#include "tensor/checksum.h"
#include "tensor/json.h"

#include <math.h>
#include <string.h>

/* ---- arguments ------------------------------------------------------------------------------- */

json_t *kn_checkpoint_object(const char *text, const char *field)
{
    json_error_t error;
    const char *given = text ? text : "{}";
    json_t *j = kn_json_parse(given, strlen(given), JSON_REJECT_DUPLICATES, field, &error);
    if (json_is_object(j))
        return j;
    kn_fail("checkpoint: %s is no JSON object (%s): give text such as {\"layers\": 4}", field,
            j ? "another value" : error.text);
    json_decref(j);
    return NULL;
}

bool kn_checkpoint_ema(const kn_ema *ema, void *module, bool optim, const char *what)
{
    if (ema && kn_ema_module(ema) != (kn_module *)module)
        return kn_fail("%s: .ema was made for another module", what);
    return !ema || optim || kn_fail("%s: .ema needs .optim, beside which it is saved", what);
}

/* A module's name in messages: the root has no path. */
static const char *shown(const kn_module *m)
{
    const char *path = kn_module_path(m);
    return *path ? path : "the root";
}

static bool holds(const kn_optim *optim, void *module)
{
    const kn_module *of = kn_optim_module(optim);
    const kn_module_impl *at = of ? of->impl : NULL;
    while (at && at->self != (kn_module *)module)
        at = at->parent;
    return at || (kn_ok() &&
                  kn_fail("checkpoint: the optimizer was made for '%s' (%s), not for the "
                          "module that it is saved or loaded with, '%s' (%s), or one "
                          "below it",
                          shown(of), kn_module_class(of), shown(module), kn_module_class(module)));
}

bool kn_checkpoint_is_plain(const char *name, size_t most)
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    return name && *name && strlen(name) <= most && name[strspn(name, allowed)] == 0;
}

bool kn_checkpoint_optims(const kn_optim *optim, const kn_named_optim *optims, int count,
                          void *module)
{
    if (count < 0 || count > KN_MOST_SOURCES - 2 || (count > 0 && !optims))
        return kn_fail("checkpoint: .optim_count is %d%s; 0 to %d are supported", count,
                       count > 0 && !optims ? ", but .optims is NULL" : "", KN_MOST_SOURCES - 2);
    for (int k = 0; k < count; k++) {
        if (!kn_checkpoint_is_plain(optims[k].name, 64) || !optims[k].optim)
            return kn_fail("checkpoint: .optims[%d] is '%s'%s; give a name of 1 to 64 letters, "
                           "digits, '_', '-' and '.', and the optimizer",
                           k, optims[k].name ? optims[k].name : "NULL",
                           optims[k].optim ? "" : " without an optimizer");
        for (int i = 0; i < k; i++)
            if (strcmp(optims[i].name, optims[k].name) == 0)
                return kn_fail("checkpoint: two of .optims are called '%s'", optims[k].name);
        if (!holds(optims[k].optim, module))
            return false;
    }
    return !optim || holds(optim, module);
}

/* ---- the list -------------------------------------------------------------------------------- */

/* Adds other ranks' buffers where they differ; *ranks: how many ranks have some of their own. */
static bool add_rank_buffers(kn_entries *e, int *ranks)
{
    *ranks = 1;
    if (!kn_entries_compare_buffers(e))
        return false;
    for (int i = 0; i < e->count; i++)
        *ranks = e->list[i].differs ? kn_comm_size(e->comm) : *ranks;
    return *ranks == 1 || kn_entries_add_rank_buffers(e, *ranks);
}

/* The model; then what belongs to training it. */
bool kn_checkpoint_list(kn_entries *e, int *models, int *ranks, void *module, kn_comm *comm,
                        const kn_checkpoint_save_options *o)
{
    *ranks = 1;
    *models = 0;
    if (!kn_entries_begin(e, module, comm))
        return false;
    e->only = o->only;
    e->except = o->except;
    bool ok = kn_entries_add_model(e, o->ema);
    *models = e->count;
    ok =
        ok && (!o->optim || kn_entries_add_optim(e, o->optim)) && kn_entries_add_trained(e, o->ema);
    for (int k = 0; ok && k < o->optim_count; k++) {
        e->label = o->optims[k].name;
        ok = kn_entries_add_optim(e, o->optims[k].optim);
    }
    e->label = NULL;
    return ok && ((!o->optim && o->optim_count == 0) || add_rank_buffers(e, ranks)) &&
           kn_entries_deal(e);
}

/* ---- state.json ------------------------------------------------------------------------------ */

/* {} without a scaler. */
static json_t *scaler_json(const kn_scaler *scaler)
{
    kn_scaler_state s = kn_scaler_get(scaler);
    return scaler ? json_pack("{s:f, s:I, s:I}", "scale", s.scale, "good", (json_int_t)s.good,
                              "skipped", (json_int_t)s.skipped)
                  : json_object();
}

static json_t *own_files(const kn_checkpoint_save_options *o)
{
    json_t *list = json_array();
    for (int i = 0; list && i < o->file_count; i++) {
        const kn_checkpoint_file *f = &o->files[i];
        const uint64_t sum = kn_checksum_of(f->data, f->size);
        if (json_array_append_new(list, kn_saved_file("", f->name, (int64_t)f->size, sum)) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

/* The numbers of all optimizers, as a state dict has them. */
static json_t *values_json(const kn_checkpoint_save_options *o, const kn_entries *e)
{
    const char *path = kn_module_path(e->module);
    kn_state *s = kn_state_new();
    bool ok = s != NULL;
    for (int k = o->optim ? -1 : 0; ok && k < o->optim_count; k++) {
        char *prefix = kn_state_join(k < 0 ? "" : o->optims[k].name, k < 0 ? "" : "/", NULL);
        char *whole = prefix ? kn_state_join(prefix, path, *path ? "" : NULL) : NULL;
        ok = whole && kn_optim_values_take(s, k < 0 ? o->optim : o->optims[k].optim, whole, e);
        kn_host_free(prefix);
        kn_host_free(whole);
    }
    json_t *j = ok ? kn_state_values_json(s) : NULL;
    kn_state_free(s);
    return j;
}

/* The .own of each rank, in their order; null: none. On rank 0; collective. */
static json_t *own_json(const kn_checkpoint_save_options *o, kn_comm *comm)
{
    json_t *all = json_array();
    json_error_t error;
    bool ok = all != NULL;
    for (int r = 0; r < kn_comm_size(comm); r++) { /* all take part */
        char *text = o->own && r == kn_rank(comm) ? kn_state_values_text(o->own) : NULL;
        size_t size = text ? strlen(text) : 0;
        char *got = kn_broadcast_bytes(comm, text ? text : "", &size, r);
        json_t *own = got && size > 0 ? kn_json_parse(got, size, 0, ".own", &error) : json_null();
        ok = ok && got && own && json_array_append_new(all, own) == 0;
        kn_host_free(got);
        kn_host_free(text);
    }
    if (!ok && kn_ok())
        kn_fail_memory("the checkpoint's .own");
    return all;
}

static json_t *state_json(const kn_checkpoint_save_options *o, const kn_saving *s,
                          const kn_entries *e, int ranks)
{
    json_t *config = kn_checkpoint_object(o->config, ".config"),
           *record = kn_checkpoint_object(o->record, ".record");
    double score = s->place.saved.score;
    const kn_optim *first = o->optim ? o->optim : o->optim_count > 0 ? o->optims[0].optim : NULL;
    json_t *steps = first ? json_integer((json_int_t)kn_optim_steps(first)) : json_null();
    json_t *j = json_pack(
        "{s:i, s:s, s:I, s:O, s:I, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o}", "version",
        KN_STATE_VERSION, "id", s->id, "number", (json_int_t)s->place.saved.number, "replaces",
        s->folder->replaces, "step", (json_int_t)o->step, "ranks", kn_comm_size(o->comm),
        "buffer_ranks", ranks, "score", isfinite(score) ? json_real(score) : json_null(),
        "optimizer_steps", steps, "scaler", scaler_json(o->scaler), "model", config, "record",
        record, "own_files", own_files(o));
    bool ok = j && (!first || json_object_set_new(j, "values", values_json(o, e)) == 0) &&
              (!o->ema ||
               json_object_set_new(j, "ema_updates", json_integer(kn_ema_updates(o->ema))) == 0);
    if (ok)
        return j;
    json_decref(j);
    if (kn_ok())
        kn_fail_memory("the checkpoint's %s", KN_STATE_FILE);
    return NULL;
}

bool kn_checkpoint_state(kn_saving *s, const kn_checkpoint_save_options *o, const kn_entries *e,
                         int ranks)
{
    float gives[2] = { o->own != NULL, o->own == NULL };
    json_t *own = NULL;
    if (!kn_hosts_max(o->comm, gives, 2, "checkpoint"))
        return false;
    if (gives[0] > 0 && gives[1] > 0)
        return kn_fail("kn_checkpoint_save: some ranks give .own and others don't");
    if (gives[0] > 0)
        own = own_json(o, o->comm);
    if (s->rank == 0)
        s->state = kn_ok() ? state_json(o, s, e, ranks) : NULL;
    bool ok = kn_ok() && (s->rank > 0 || s->state);
    if (ok && own && s->rank == 0)
        ok = json_object_set(s->state, "own", own) == 0 ||
             kn_fail_memory("the checkpoint's %s", KN_STATE_FILE);
    json_decref(own);
    return ok;
}
