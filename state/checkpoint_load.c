/* state/checkpoint_load.c: fills a module, its optimizer and its scaler from an open checkpoint.
 * Each rank reads the bytes of its own parts. */
#include "kernels/error_internal.h"
#include "state/checkpoint_internal.h"
#include "state/saving.h"

#include <stdio.h>
#include <string.h>

/* ---- checks ---------------------------------------------------------------------------------- */

static bool fits(const kn_entry *e, const kn_piece *p)
{
    return e->dtype == p->dtype && e->ndim == p->ndim &&
           memcmp(e->shape, p->shape, (size_t)e->ndim * sizeof *e->shape) == 0;
}

static bool check_entry(const kn_checkpoint *c, const kn_pieces *p, int part, const kn_entry *e)
{
    char got[96], want[96];
    int i = kn_pieces_find(p, e->name);
    if (i < 0)
        return kn_fail("%s: the %s has no tensor '%s'; it is of another model%s", c->dir,
                       kn_part_name[part], e->name,
                       part == KN_PART_OPTIMIZER ? ", or of an optimizer with other state" : "");
    const kn_piece *is = kn_pieces_tensor(p, i);
    if (fits(e, is))
        return true;
    kn_array a = kn_array_make(NULL, is->dtype, is->ndim, is->shape),
             b = kn_array_make(NULL, e->dtype, e->ndim, e->shape);
    return kn_fail("%s: '%s' is %s, but the model's is %s; give the model options that it was "
                   "trained with",
                   c->dir, e->name, kn_array_describe(&a, got, sizeof got),
                   kn_array_describe(&b, want, sizeof want));
}

/* How many tensors of p are those of other groups of ranks, under names of the list. */
static int of_other_groups(const kn_pieces *p, const kn_entry *list, int count)
{
    int others = 0;
    for (int i = 0; i < count; i++)
        for (int k = 0; list[i].plain && k < kn_pieces_count(p); k++) {
            const char *name = kn_pieces_tensor(p, k)->name;
            others += strncmp(name, list[i].name, list[i].plain + 6) == 0 && /* up to ".group" */
                      strcmp(name, list[i].name) != 0;
        }
    return others;
}

/* The number of p's tensors that are no buffers of m's tree which aren't saved (any more). */
static int saved_ones(const kn_pieces *p, kn_module_impl *m)
{
    int there = 0;
    for (int i = 0; p && i < kn_pieces_count(p); i++)
        there += !kn_is_unsaved_buffer(kn_impl_root(m), kn_pieces_tensor(p, i)->name);
    return there;
}

/* The part holds exactly these tensors. */
static bool check_part(const kn_checkpoint *c, const kn_pieces *p, int part, const kn_entries *e,
                       const kn_entry *list, int count)
{
    const int there = saved_ones(p, e->module->impl);
    for (int i = 0; p && i < count; i++)
        if (!check_entry(c, p, part, &list[i]))
            return false;
    return there == count || (p && there == count + of_other_groups(p, list, count)) ||
           kn_fail("%s: the %s holds %d tensors, the one to load has %d; it is of another model%s",
                   c->dir, kn_part_name[part], there, count,
                   part == KN_PART_OPTIMIZER ? ", or of an optimizer with other state" : "");
}

static bool check_optimizer(const kn_checkpoint *c)
{
    return (c->has_optimizer && (c->optimizer || !c->first_form)) ||
           kn_fail("%s: there is no optimizer.safetensors; the checkpoint was saved without an "
                   "optimizer, or is damaged",
                   c->dir);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Marks the buffers that the checkpoint holds for each rank. */
static bool mark_buffers(const kn_checkpoint *c, kn_entries *e)
{
    char name[512];
    int64_t differ = 0;
    for (int i = 0; i < e->count; i++) {
        if (e->list[i].kind != KN_ENTRY_BUFFER)
            continue;
        if (!kn_rank_buffer_name(name, sizeof name, e->list[i].name, 1))
            return false;
        e->list[i].differs = kn_pieces_find(c->optimizer, name) >= 0;
        differ += e->list[i].differs;
    }
    return differ * (c->buffer_ranks - 1) <= kn_pieces_count(c->optimizer) ||
           kn_fail("%s/%s: the buffers of %lld ranks aren't there; the checkpoint is damaged",
                   c->dir, KN_STATE_FILE, (long long)c->buffer_ranks);
}

/* A rank's own buffers return to it where as many ranks load as saved. */
static bool is_wanted(const kn_checkpoint *c, const kn_entry *e)
{
    return e->rank == 0 ||
           (e->rank == kn_rank(c->comm) && kn_comm_size(c->comm) == c->buffer_ranks);
}

/* Straight to where the values lie; through memory for one part where that isn't memory of the
 * host, or where they lie in another order. */
static bool read_entry(kn_pieces *p, const kn_entry *e)
{
    char *to = kn_entry_data(e), *room = NULL;
    if (!to && kn_ok())
        to = room = kn_host_alloc(kn_entry_part_bytes(e) + 1);
    bool ok =
        to && kn_pieces_read(p, kn_pieces_find(p, e->name), e->part, to) && kn_entry_write(e, to);
    kn_host_free(room);
    return ok;
}

static bool read_part(const kn_checkpoint *c, kn_pieces *p, const kn_entry *list, int count)
{
    bool ok = true;
    for (int i = 0; ok && i < count; i++)
        ok = !is_wanted(c, &list[i]) || read_entry(p, &list[i]);
    return ok;
}

/* ---- counts ---------------------------------------------------------------------------------- */

typedef struct counts {
    int64_t steps, updates;
    kn_scaler_state scaler;
    bool scaled;
} counts;

/* The optimizer's step count is less than the run's where a scaler skipped steps, and unrelated
 * where the caller counts something else. */
static bool read_counts(const kn_checkpoint *c, const kn_checkpoint_load_options *o, counts *n)
{
    const json_t *saved = json_object_get(c->state, "scaler"),
                 *scale = json_object_get(saved, "scale");
    *n = (counts){ .steps = c->step, .scaled = o->scaler && scale };
    if ((json_object_get(c->state, "optimizer_steps") &&
         !kn_folder_int(c->state, "optimizer_steps", 0, INT64_MAX, &n->steps, c->dir)) ||
        (o->ema && !kn_folder_int(c->state, "ema_updates", 0, INT64_MAX, &n->updates, c->dir)))
        return false;
    n->scaler.scale = json_number_value(scale);
    return !n->scaled ||
           (kn_folder_int(saved, "good", 0, INT64_MAX, &n->scaler.good, c->dir) &&
            kn_folder_int(saved, "skipped", 0, INT64_MAX, &n->scaler.skipped, c->dir));
}

static bool set_counts(const kn_checkpoint_load_options *o, const counts *n)
{
    kn_optim_set_steps(o->optim, n->steps);
    kn_ema_set_updates(o->ema, n->updates);
    return !n->scaled || kn_scaler_set(o->scaler, n->scaler);
}

/* ---- the call -------------------------------------------------------------------------------- */

static bool list_and_check(const kn_checkpoint *c, kn_entries *e, int *models, void *module,
                           const kn_checkpoint_load_options *o)
{
    if (o->optim && !check_optimizer(c))
        return false;
    if (!kn_checkpoint_entries(e, models, module, c->comm, o->optim, o->ema))
        return false;
    if (o->optim && c->buffer_ranks > 1 && c->optimizer &&
        (!mark_buffers(c, e) || !kn_entries_add_rank_buffers(e, (int)c->buffer_ranks)))
        return false;
    return check_part(c, c->model, KN_PART_MODEL, e, e->list, *models) &&
           (!o->optim || check_part(c, c->optimizer, KN_PART_OPTIMIZER, e, e->list + *models,
                                    e->count - *models)) &&
           kn_entries_may_write(e, "kn_checkpoint_load");
}

static bool load(const kn_checkpoint *c, void *module, const kn_checkpoint_load_options *o)
{
    kn_entries e = { 0 };
    counts n = { 0 };
    int models;
    bool ok = list_and_check(c, &e, &models, module, o) && (!o->optim || read_counts(c, o, &n));
    ok = kn_agree(c->comm, ok) && read_part(c, c->model, e.list, models) &&
         read_part(c, c->optimizer, e.list + models, e.count - models) &&
         (!o->optim || set_counts(o, &n));
    return kn_entries_end(&e) && ok;
}

bool kn_checkpoint_load_(const kn_checkpoint *c, void *module, kn_checkpoint_load_options o)
{
    if (!kn_given(c, "kn_checkpoint_load", "the checkpoint") ||
        !kn_given(module, "kn_checkpoint_load", "the module"))
        return false;
    if (o.scaler && !o.optim)
        return kn_fail(
            "kn_checkpoint_load: .scaler does nothing without .optim; leave it out or give both");
    bool saved = json_object_get(c->state, "ema_updates") != NULL;
    if (!kn_checkpoint_ema(o.ema, module, o.optim != NULL, "kn_checkpoint_load"))
        return false;
    if (o.optim && c->has_optimizer && saved != (o.ema != NULL))
        return kn_fail("%s was saved %s averages of the weights: load it %s .ema (--ema)", c->dir,
                       saved ? "with" : "without", saved ? "with" : "without");
    if (!kn_agree(c->comm, kn_ok()))
        return false;
    kn_comm_suspend_timeout(c->comm); /* a rank may read from a slower disk than the others */
    bool ok = kn_agree(c->comm, load(c, module, &o));
    kn_comm_resume_timeout(c->comm);
    return ok;
}
