/* state/checkpoint.c: saving a module with its training run. */
#include "state/checkpoint.h"

#include "autograd/autograd.h"
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/faults.h"
#include "state/checkpoint_internal.h"
#include "state/saving.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

/* ---- arguments ------------------------------------------------------------------------------- */

static bool check_object(const char *text, const char *field)
{
    json_t *j = kn_checkpoint_object(text, field);
    json_decref(j);
    return j != NULL;
}

static bool check_files(const kn_checkpoint_save_options *o)
{
    if (o->file_count < 0 || (o->file_count > 0 && !o->files))
        return kn_fail("checkpoint: .file_count is %d%s", o->file_count,
                       o->file_count < 0 ? "; it must be at least 0" : ", but .files is NULL");
    for (int i = 0; i < o->file_count; i++) {
        const kn_checkpoint_file *f = &o->files[i];
        if (!f->name || !kn_checkpoint_file_name(f->name) || (!f->data && f->size > 0))
            return kn_fail("checkpoint: .files[%d] is %s with %zu bytes; give a name of letters, "
                           "digits, '_', '-' and '.', other than %s, and its data",
                           i, f->name ? f->name : "nameless", f->size, KN_STATE_FILE);
    }
    return true;
}

static bool check_state(const kn_checkpoint_save_options *o, void *module)
{
    const bool some = o->optim || o->optim_count > 0;
    for (int i = 0; o->own && i < o->own->count; i++)
        if (o->own->list[i].type == KN_STATE_TENSOR)
            return kn_fail("checkpoint: .own has the tensor '%s'; numbers and texts are kept "
                           "there, and what a buffer holds is saved with the module",
                           o->own->list[i].name);
    return kn_checkpoint_optims(o->optim, o->optims, o->optim_count, module) &&
           kn_checkpoint_ema(o->ema, module, some, "kn_checkpoint_save");
}

static bool check_options(const kn_checkpoint_save_options *o, void *module)
{
    if (o->step < 0)
        return kn_fail("checkpoint: .step is %lld; it must be at least 0", (long long)o->step);
    if (o->keep < 0)
        return kn_fail("checkpoint: .keep is %d; it must be at least 0 (0: all)", o->keep);
    if (o->async && !o->folder)
        return kn_fail("checkpoint: .async needs .folder, which remembers the save that runs; "
                       "kn_run_folder_claim makes it");
    return check_state(o, module) && check_object(o->config, ".config") &&
           check_object(o->record, ".record") && check_files(o);
}

/* ---- one save -------------------------------------------------------------------------------- */

static bool make_id(char id[KN_CHECKPOINT_ID])
{
    unsigned char random[16];
    if (getentropy(random, sizeof random) != 0)
        return kn_fail_system("checkpoint: no random bytes: %m");
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(id + 2 * i, 3, "%02x", random[i]);
    return true;
}

static bool write_files(const kn_checkpoint_save_options *o, const kn_saving *s)
{
    bool ok = true;
    for (int i = 0; ok && i < o->file_count; i++)
        ok = kn_file_write(kn_path_of(s->place.path.text, o->files[i].name, "").text,
                           (const void *const[]){ o->files[i].data },
                           (const size_t[]){ o->files[i].size }, 1);
    return ok;
}

/* Rank 0 makes the folder. */
static bool prepare(kn_saving *s, const kn_checkpoint_save_options *o)
{
    return s->rank > 0 ||
           (make_id(s->id) && kn_folder_begin(s->folder, &s->place) && write_files(o, s));
}

/* All ranks learn where the folder is, and the save's id. */
static bool share(kn_saving *s, kn_comm *comm)
{
    return kn_ok() &&
           kn_hosts_broadcast(comm, &s->place.path, sizeof s->place.path, 0,
                              "checkpoint's folder") &&
           kn_hosts_broadcast(comm, s->id, sizeof s->id, 0, "checkpoint's id");
}

/* Lists what this rank writes; then writes it. */
static bool write_all(kn_saving *s, void *module, const kn_checkpoint_save_options *o,
                      bool (*write)(kn_saving *s))
{
    kn_entries e = { 0 };
    int models, ranks;
    bool ok = kn_checkpoint_list(&e, &models, &ranks, module, s->holders, o) &&
              kn_saving_list(s, &e, models) && kn_checkpoint_state(s, o, &e, ranks) && write(s);
    return kn_entries_end(&e) && ok;
}

static bool save_now(kn_saving *s, void *module, const kn_checkpoint_save_options *o)
{
    bool ok = prepare(s, o) && share(s, o->comm) && write_all(s, module, o, kn_saving_write) &&
              kn_agree(o->comm, kn_ok()) && (s->rank > 0 || kn_saving_commit(s));
    kn_saving_free(s, ok);
    return ok;
}

/* ---- saves in the background ----------------------------------------------------------------- */

/* True where it is on some rank. Collective. */
static bool on_any(kn_comm *comm, bool it)
{
    float word = it;
    kn_hosts_max(comm, &word, 1, "checkpoint");
    return word != 0;
}

/* Tells of a save that failed on this rank. */
static void tell(const kn_saving *s)
{
    char who[32] = "";
    if (kn_comm_size(s->folder->comm) > 1)
        snprintf(who, sizeof who, "rank %d: ", s->rank);
    fprintf(stderr, "knap: %sthe save of step %lld failed, and the training goes on: %s\n", who,
            (long long)s->place.saved.step, s->error);
}

/* A copy that finds no memory is the save's error, not the rank's. */
static bool copy_or_say(kn_saving *s)
{
    kn_attempt a;
    kn_attempt_begin(&a);
    kn_saving_copy(s);
    if (!kn_attempt_end(&a, s->error))
        atomic_store(&s->result, KN_SAVE_FAILED);
    return kn_ok();
}

static bool save_later(kn_saving *s, void *module, const kn_checkpoint_save_options *o)
{
    kn_attempt a;
    kn_run_folder *f = s->folder;
    kn_attempt_begin(&a); /* a disk that is full is no error of the rank either */
    prepare(s, o);
    f->failed = !kn_attempt_end(&a, s->error);
    if (f->failed)
        tell(s);
    f->failed = on_any(o->comm, f->failed);
    if (f->failed || !share(s, o->comm) || !write_all(s, module, o, copy_or_say)) {
        kn_saving_free(s, false);
        return kn_ok();
    }
    f->saving = s;
    if (atomic_load(&s->result) != KN_SAVE_FAILED)
        kn_saving_start(s, kn_saving_write);
    return kn_ok();
}

void kn_checkpoint_finish(kn_run_folder *f, bool written)
{
    kn_saving *s = f ? f->saving : NULL;
    if (!s || s->finished)
        return;
    kn_saving_join(s);
    s->finished = true;
    f->failed = !written;
    if (atomic_load(&s->result) == KN_SAVE_FAILED)
        tell(s);
    kn_saving_give(s);
    if (written && s->rank == 0) {
        kn_saving_start(s, kn_saving_commit);
        return;
    }
    kn_saving_free(s, s->rank > 0);
    f->saving = NULL;
}

/* Rank 0 waits for the commit. */
static void end_commit(kn_run_folder *f)
{
    kn_saving *s = f->saving;
    if (!s || !s->finished)
        return;
    kn_saving_join(s);
    bool ok = atomic_load(&s->result) == KN_SAVE_WRITTEN;
    if (!ok)
        tell(s);
    f->failed = !ok;
    kn_saving_free(s, ok);
    f->saving = NULL;
}

kn_save_state kn_checkpoint_poll(kn_run_folder *f)
{
    const kn_saving *s = f ? f->saving : NULL;
    if (!s || !s->finished)
        return s ? (kn_save_state)atomic_load(&s->result) : KN_SAVE_NONE;
    if (atomic_load(&s->result) != KN_SAVE_RUNNING)
        end_commit(f);
    return KN_SAVE_NONE;
}

bool kn_checkpoint_wait(kn_run_folder *f)
{
    if (!kn_given(f, "kn_checkpoint_wait", "the folder") || !kn_hosts_begin_slow(f->comm))
        return false;
    kn_saving *s = f->saving;
    if (s && !s->finished) {
        kn_saving_join(s);
        kn_checkpoint_finish(f, !on_any(f->comm, atomic_load(&s->result) != KN_SAVE_WRITTEN));
    }
    end_commit(f);
    bool failed = on_any(f->comm, f->failed);
    kn_comm_resume_timeout(f->comm);
    return !failed && kn_ok();
}

void kn_saving_drop(kn_run_folder *f)
{
    end_commit(f);
    kn_saving_free(f->saving, false);
    f->saving = NULL;
}

/* ---- the call -------------------------------------------------------------------------------- */

static double score_of(const kn_checkpoint_save_options *o)
{
    return o->score == KN_ZERO ? 0 : o->score == 0 || !isfinite(o->score) ? NAN : o->score;
}

static bool save(kn_run_folder *f, void *module, kn_comm *holders,
                 const kn_checkpoint_save_options *o)
{
    if (f->saving && !f->saving->finished)
        kn_checkpoint_wait(f); /* all ranks do */
    else
        end_commit(f);
    kn_saving *s = kn_ok() ? kn_host_calloc(1, sizeof *s) : NULL;
    if (!s)
        return false;
    s->folder = f;
    s->disk_full = kn_context_get()->fault.disk_full;
    s->holders = holders;
    f->failed = false;
    s->rank = kn_rank(o->comm);
    s->place.saved.step = o->step;
    s->place.saved.score = score_of(o);
    s->place.keep = o->keep;
    s->place.keep_best = o->keep_best;
    return o->async ? save_later(s, module, o) : save_now(s, module, o);
}

bool kn_checkpoint_save_(const char *dir, void *module, kn_checkpoint_save_options o)
{
    if (!kn_given_path(dir, "kn_checkpoint_save", "the folder") ||
        !kn_given(module, "kn_checkpoint_save", "the module") || !check_options(&o, module))
        return false;
    kn_comm *holders = o.comm;
    o.comm = o.folder ? o.folder->comm : o.comm ? o.comm : kn_entries_comm(module, kn_world());
    holders = holders ? holders : kn_entries_comm(module, o.comm);
    if (kn_comm_size(holders) != kn_comm_size(o.comm))
        kn_fail("kn_checkpoint_save: %d ranks hold the module, and %d claimed .folder; claim it "
                "with the communicator that kn_fsdp_wrap got",
                kn_comm_size(holders), kn_comm_size(o.comm));
    kn_fault_pass(KN_AT_SAVE);
    if (!kn_hosts_begin_slow(o.comm))
        return false;
    kn_run_folder *f = o.folder ? o.folder : kn_run_folder_claim(dir, .comm = o.comm);
    bool ok = kn_hosts_end_slow(o.comm, f && save(f, module, holders, &o));
    if (!o.folder)
        kn_run_folder_release(f);
    kn_context_get()->fault.disk_full = false;
    return ok;
}

int64_t kn_checkpoint_copy_bytes_(void *module, kn_checkpoint_save_options o)
{
    kn_entries e = { 0 };
    int models, ranks;
    int64_t bytes = 0;
    if (!kn_given(module, "kn_checkpoint_copy_bytes", "the module") || !check_state(&o, module))
        return -1;
    kn_comm *comm = o.comm ? o.comm : kn_entries_comm(module, kn_world());
    bool ok = kn_ok() && kn_checkpoint_list(&e, &models, &ranks, module, comm, &o);
    for (int i = 0; ok && i < e.count; i++)
        if (e.list[i].saver)
            bytes += (int64_t)KN_ALIGNED(kn_entry_part_bytes(&e.list[i]));
    return kn_entries_end(&e) && ok ? bytes : -1;
}
