/* models/checkpoint.c: saving a module with its training run. */
#include "kernels/error_internal.h"
#include "models/checkpoint_internal.h"

#include "models/tokenizer_internal.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Marks the files of one save: in all of them. */
typedef struct save_stamp {
    int64_t step;
    char name[33]; /* random, in hexadecimal */
} save_stamp;

/* ---- tensors --------------------------------------------------------------------------------- */

/* A diverged run must not replace its last good checkpoint. */
static bool check_finite(const char *name, kn_dtype dtype, const void *data, int64_t count)
{
    const uint32_t *w = data;
    const uint16_t *h = data;
    uint32_t half = dtype == KN_BF16 ? 0x7f80 : 0x7c00;
    int64_t bad = -1;
    for (int64_t i = 0; dtype == KN_F32 && i < count && bad < 0; i++)
        bad = (w[i] & 0x7f800000) == 0x7f800000 ? i : -1;
    for (int64_t i = 0; (dtype == KN_BF16 || dtype == KN_F16) && i < count && bad < 0; i++)
        bad = (h[i] & half) == half ? i : -1;
    return bad < 0 || kn_fail("checkpoint: element %lld of %s is not finite: the run has diverged; "
                              "nothing is saved; the checkpoint saved before stays",
                              (long long)bad, name);
}

/* Every rank reads each tensor with the others; rank 0 appends it to the file. */
static bool append_tensors(const kn_saved_items *s, kn_comm *comm, void *module,
                           const kn_optim *optim, kn_safetensors_writer *w, void *host)
{
    bool ok = true;
    for (int i = 0; ok && i < s->count; i++) {
        kn_scope scope = kn_scope_begin();
        const kn_safetensors_entry *e = &s->entry[i];
        size_t bytes = kn_saved_item_bytes(s, i);
        ok = kn_saved_item_read(s, i, comm, module, optim, host);
        if (ok && !s->list[i].buffer) /* a mask of -inf is fine */
            ok = check_finite(e->name, e->dtype, host, (int64_t)(bytes / kn_dtype_size(e->dtype)));
        if (ok && w)
            ok = kn_safetensors_append(w, host, bytes);
        kn_scope_end(scope);
    }
    return ok;
}

static bool save_tensors(const char *path, kn_comm *comm, void *module, const kn_optim *optim,
                         const save_stamp *stamp, const kn_saved_items *s)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)stamp->step);
    kn_safetensors_pair meta[] = { { "format", "knap" },
                                   { "step", text },
                                   { KN_SAVE_KEY, stamp->name } };
    bool writes = kn_rank(comm) == 0;
    void *host = kn_host_alloc(s->largest + 1);
    kn_safetensors_writer *w =
        host && writes ? kn_safetensors_create(path, s->entry, s->count, meta, 3) : NULL;
    bool ok = host && (w || !writes) && append_tensors(s, comm, module, optim, w, host);
    if (w && ok)
        ok = kn_safetensors_commit(w);
    else if (w)
        kn_safetensors_abandon(w);
    kn_host_free(host);
    return ok;
}

/* ---- files ----------------------------------------------------------------------------------- */

static json_t *options_json(kn_options *options)
{
    json_t *o = json_object();
    kn_option_record r;
    for (int i = 0; o && options && kn_options_record(options, i, &r); i++)
        if (!r.transient && json_object_set_new(o, r.name, json_string(r.value)) != 0) {
            json_decref(o);
            return NULL;
        }
    return o;
}

/* {} without a scaler. */
static json_t *scaler_json(const kn_scaler *scaler)
{
    kn_scaler_state s = kn_scaler_get(scaler);
    return scaler ? json_pack("{s:f, s:I, s:I}", "scale", s.scale, "good", (json_int_t)s.good,
                              "skipped", (json_int_t)s.skipped)
                  : json_object();
}

/* Writes dir/FILE.new; takes j over. */
static bool write_json(const char *dir, int file, json_t *j)
{
    char path[KN_CHECKPOINT_PATH];
    char *text = j ? json_dumps(j, JSON_INDENT(1)) : NULL;
    json_decref(j);
    if (!text)
        return kn_ok() && kn_fail("checkpoint: no memory for %s", kn_checkpoint_file[file]);
    bool ok = kn_checkpoint_path(path, dir, kn_checkpoint_file[file], ".new") &&
              kn_file_write(path, (const void *const[]){ text, "\n" },
                            (const size_t[]){ strlen(text), 1 }, 2);
    free(text);
    return ok;
}

/* The caller's .config; NULL with an error where that is no JSON object. */
static json_t *config_json(const char *config)
{
    json_error_t error;
    json_t *j = json_loads(config ? config : "{}", JSON_REJECT_DUPLICATES, &error);
    if (json_is_object(j))
        return j;
    kn_fail("checkpoint: .config is no JSON object (%s): give text such as {\"layers\": 4}",
            j ? "another value" : error.text);
    json_decref(j);
    return NULL;
}

/* null without an optimizer. Absent only in files older than the field, which have an optimizer. */
static json_t *steps_json(const kn_optim *optim)
{
    return optim ? json_integer((json_int_t)kn_optim_steps(optim)) : json_null();
}

static bool write_state(const char *dir, const kn_checkpoint_save_options *o,
                        const save_stamp *stamp, int ranks)
{
    json_t *config = config_json(o->config);
    if (!config)
        return false;
    const char *tokenizer = o->tokenizer ? kn_tokenizer_kind(o->tokenizer) : NULL;
    json_t *j = json_pack("{s:i, s:s, s:I, s:o, s:s?, s:o, s:o, s:o}", "version", 1, KN_SAVE_KEY,
                          stamp->name, "step", (json_int_t)stamp->step, "optimizer_steps",
                          steps_json(o->optim), "tokenizer", tokenizer, "model", config, "options",
                          options_json(o->options), "scaler", scaler_json(o->scaler));
    if (j && o->ema &&
        json_object_set_new(j, "ema_updates", json_integer(kn_ema_updates(o->ema))) != 0) {
        json_decref(j);
        j = NULL;
    }
    if (j && ranks > 1 && json_object_set_new(j, "ranks", json_integer(ranks)) != 0) {
        json_decref(j);
        j = NULL;
    }
    return write_json(dir, KN_FILE_STATE, j);
}

static bool write_tokenizer(const char *dir, const kn_tokenizer *tokenizer, const save_stamp *stamp)
{
    json_t *j = kn_tokenizer_json(tokenizer);
    if (j && json_object_set_new(j, KN_SAVE_KEY, json_string(stamp->name)) != 0) {
        json_decref(j);
        j = NULL;
    }
    return write_json(dir, KN_FILE_TOKENIZER, j);
}

/* Only rank 0 writes, so only its name counts. */
static bool make_stamp(save_stamp *s, int64_t step)
{
    unsigned char random[16];
    s->step = step;
    if (getentropy(random, sizeof random) != 0)
        return kn_fail("checkpoint: no random bytes: %s", strerror(errno));
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(s->name + 2 * i, 3, "%02x", random[i]);
    return true;
}

static bool save_tensor_file(const char *dir, int file, const kn_checkpoint_save_options *o,
                             void *module, const save_stamp *stamp, const kn_saved_items *s)
{
    char path[KN_CHECKPOINT_PATH];
    return kn_checkpoint_path(path, dir, kn_checkpoint_file[file], ".new") &&
           save_tensors(path, o->comm, module, o->optim, stamp, s);
}

/* Both files of tensors. *ranks: the number of ranks with buffers in optimizer.safetensors. */
static bool save_all_tensors(const char *dir, const kn_checkpoint_save_options *o, void *module,
                             const save_stamp *stamp, int *ranks)
{
    kn_saved_items model = { 0 }, state = { 0 };
    *ranks = 1;
    bool ok = kn_module_full_buffers(module, true) && kn_saved_items_make(&model, module, o->ema) &&
              (!o->optim || kn_saved_items_compare(&model, o->comm));
    for (int i = 0; i < model.count; i++)
        *ranks = model.list[i].differs ? kn_comm_size(o->comm) : *ranks;
    ok = ok &&
         (!o->optim || kn_saved_items_make_state(&state, module, o->optim, o->ema, &model, *ranks));
    ok = ok && save_tensor_file(dir, KN_FILE_MODEL, o, module, stamp, &model) &&
         (!o->optim || save_tensor_file(dir, KN_FILE_OPTIMIZER, o, module, stamp, &state));
    ok = kn_module_full_buffers(module, false) && ok;
    kn_saved_items_free(&model);
    kn_saved_items_free(&state);
    return ok;
}

/* Removes a file of an earlier save that this save doesn't have. Readers ignore such a file. */
static void remove_file(const char *dir, int file)
{
    char path[KN_CHECKPOINT_PATH];
    if (kn_checkpoint_path(path, dir, kn_checkpoint_file[file], ""))
        unlink(path);
}

/* Rank 0 writes the JSON files after the tensors. */
static bool finish_save(const char *dir, const kn_checkpoint_save_options *o,
                        const save_stamp *stamp, int ranks)
{
    if ((o->tokenizer && !write_tokenizer(dir, o->tokenizer, stamp)) ||
        !write_state(dir, o, stamp, ranks) || !kn_checkpoint_finish_renames(dir))
        return false;
    if (!o->optim)
        remove_file(dir, KN_FILE_OPTIMIZER);
    if (!o->tokenizer)
        remove_file(dir, KN_FILE_TOKENIZER);
    return true;
}

static bool save(const char *dir, void *module, const kn_checkpoint_save_options *o)
{
    save_stamp stamp;
    int ranks;
    bool first = kn_rank(o->comm) == 0;
    kn_run_folder *claimed = first && !o->folder ? kn_run_folder_claim(dir) : NULL;
    bool ok = (!first || claimed || o->folder) && make_stamp(&stamp, o->step) &&
              (!first || kn_checkpoint_finish_renames(dir)) &&
              save_all_tensors(dir, o, module, &stamp, &ranks) &&
              (!first || finish_save(dir, o, &stamp, ranks));
    kn_run_folder_release(claimed);
    return ok;
}

bool kn_checkpoint_save_(const char *dir, void *module, kn_checkpoint_save_options o)
{
    if (!kn_given_path(dir, "kn_checkpoint_save", "the folder") ||
        !kn_given(module, "kn_checkpoint_save", "the module"))
        return false;
    if (o.step < 0)
        return kn_fail("checkpoint: .step is %lld; it must be at least 0", (long long)o.step);
    if (!kn_checkpoint_ema(o.ema, module, o.optim != NULL, "kn_checkpoint_save"))
        return false;
    json_t *config =
        config_json(o.config); /* all ranks report a mistake in it, before anything is written */
    json_decref(config);
    if (!config)
        return false;
    o.comm = o.comm ? o.comm : kn_world();
    if (!kn_agree(o.comm, kn_ok())) /* the timeout still holds for reaching the save */
        return false;
    kn_comm_suspend_timeout(o.comm); /* while rank 0 writes */
    bool ok = kn_agree(o.comm, save(dir, module, &o));
    kn_comm_resume_timeout(o.comm);
    return ok;
}
