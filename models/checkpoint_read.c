/* models/checkpoint_read.c: opens a checkpoint and loads it. All files are opened at once and stay
 * open, so a save that replaces them meanwhile has no effect. */
#include "kernels/error_internal.h"
#include "models/checkpoint_internal.h"
#include "tensor/whole_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ATTEMPTS 100 /* attempts, 50 ms apart, while the folder's files change */

struct kn_checkpoint {
    char *dir;
    json_t *state;
    char save[40]; /* the save's random name; "" in files older than this name */
    int64_t step;
    char *config;                      /* JSON text */
    int64_t ranks;                     /* number of ranks with buffers in the optimizer's file */
    kn_comm *comm;                     /* borrowed */
    kn_safetensors *model, *optimizer; /* NULL: there is no such file */
    kn_mapped tokenizer;
    const char *missing; /* the file of this save that wasn't found; NULL: all were */
};

/* ---- one set of files ------------------------------------------------------------------------ */

typedef enum {
    OPENED,
    MOVED, /* the file belongs to another save */
    FAILED /* an error stands */
} outcome;

/* Returns -1 if there is no such file (its folder may be one), and also, with FAILED in *o, if it
 * can't be opened. */
static int open_file(const char *path, outcome *o)
{
    int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0 && errno != ENOENT && errno != ENOTDIR) {
        kn_fail("cannot open %s: %s", path, strerror(errno));
        *o = FAILED;
    }
    return fd;
}

static bool same_save(const kn_checkpoint *c, const char *name)
{
    return strcmp(c->save, name ? name : "") == 0;
}

/* Both close fd. */
static outcome take_tensors(const kn_checkpoint *c, const char *path, int fd, kn_safetensors **file)
{
    kn_safetensors *f = kn_safetensors_open_fd(path, fd);
    if (!f)
        return FAILED;
    if (same_save(c, kn_safetensors_meta(f, KN_SAVE_KEY))) {
        *file = f;
        return OPENED;
    }
    kn_safetensors_close(f);
    return MOVED;
}

static outcome take_tokenizer(kn_checkpoint *c, const char *path, int fd)
{
    json_error_t error;
    if (!kn_file_map_fd(fd, path, "tokenizer file", &c->tokenizer))
        return FAILED;
    json_t *j =
        json_loadb((const char *)c->tokenizer.data, c->tokenizer.size, JSON_ALLOW_NUL, &error);
    /* a file that isn't JSON fails later, when the tokenizer is made from it */
    bool same = !j || same_save(c, json_string_value(json_object_get(j, KN_SAVE_KEY)));
    json_decref(j);
    if (!same)
        kn_file_unmap(&c->tokenizer);
    return same ? OPENED : MOVED;
}

/* Finds the file of c's save under its final name or under its name before renaming. */
static outcome find_file(kn_checkpoint *c, int file)
{
    char path[KN_CHECKPOINT_PATH];
    outcome o = MOVED;
    for (int i = 0; i < 2 && o == MOVED; i++) {
        if (!kn_checkpoint_path(path, c->dir, kn_checkpoint_file[file], i ? ".new" : ""))
            return FAILED;
        int fd = open_file(path, &o);
        if (fd < 0)
            continue;
        o = file == KN_FILE_TOKENIZER
                ? take_tokenizer(c, path, fd)
                : take_tensors(c, path, fd, file == KN_FILE_MODEL ? &c->model : &c->optimizer);
    }
    return o;
}

static bool is_there(const kn_checkpoint *c, int file)
{
    char path[KN_CHECKPOINT_PATH];
    return kn_checkpoint_path(path, c->dir, kn_checkpoint_file[file], "") &&
           access(path, F_OK) == 0;
}

/* Opens the valid state: state.json.new if a save's renaming is unfinished, else state.json. */
static outcome find_state(kn_checkpoint *c)
{
    char path[KN_CHECKPOINT_PATH];
    json_error_t error;
    outcome o = OPENED;
    kn_mapped map;
    int fd = -1;
    for (int i = 0; i < 2 && fd < 0 && o == OPENED; i++)
        if (kn_checkpoint_path(path, c->dir, kn_checkpoint_file[KN_FILE_STATE], i ? "" : ".new"))
            fd = open_file(path, &o);
    if (fd < 0 && kn_ok())
        kn_fail("%s holds no checkpoint (there is no %s): give a folder that kn_checkpoint_save or "
                "train_gpt --out wrote",
                c->dir, kn_checkpoint_file[KN_FILE_STATE]);
    if (fd < 0 || !kn_file_map_fd(fd, path, "checkpoint's state", &map))
        return FAILED;
    c->state = json_loadb((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, &error);
    kn_file_unmap(&map);
    if (!json_is_object(c->state)) {
        kn_fail("%s is no JSON object (%s in line %d); the checkpoint is damaged", path,
                c->state ? "another value" : error.text, c->state ? 1 : error.line);
        return FAILED;
    }
    const char *save = json_string_value(json_object_get(c->state, KN_SAVE_KEY));
    snprintf(c->save, sizeof c->save, "%s", save ? save : "");
    return OPENED;
}

/* False for the optimizer or tokenizer that this save lacks: a file of that name is older. */
static bool was_saved(const kn_checkpoint *c, int file)
{
    const char *key = file == KN_FILE_TOKENIZER ? "tokenizer" : "optimizer_steps";
    return file == KN_FILE_MODEL || !json_is_null(json_object_get(c->state, key));
}

static outcome find_files(kn_checkpoint *c)
{
    outcome o = find_state(c);
    c->missing = NULL;
    for (int file = KN_FILE_MODEL; file < KN_FILE_STATE && o == OPENED; file++) {
        if (!was_saved(c, file))
            continue;
        o = find_file(c, file);
        if (o == MOVED && file == KN_FILE_OPTIMIZER && !is_there(c, file))
            o = OPENED; /* generating needs none */
        if (o == MOVED)
            c->missing = kn_checkpoint_file[file];
    }
    return o;
}

static void close_files(kn_checkpoint *c)
{
    json_decref(c->state);
    kn_safetensors_close(c->model);
    kn_safetensors_close(c->optimizer);
    kn_file_unmap(&c->tokenizer);
    c->state = NULL;
    c->model = c->optimizer = NULL;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* The ranks' common result of one attempt. */
enum { ALL_OPENED, AGAIN, NEVER };

/* True if all ranks opened the same save. again: a file changed since the last attempt, so another
 * attempt may help. */
static bool compare_ranks(kn_comm *comm, const kn_checkpoint *c, outcome o, bool changed,
                          int *verdict)
{
    char first[sizeof c->save];
    float word[2]; /* some rank needs another attempt; some rank saw a change */
    memcpy(first, c->save, sizeof first);
    if (o == FAILED || !kn_agree(comm, kn_ok()))
        return false;
    if (comm &&
        !kn_broadcast(comm, first, sizeof first, 0, kn_compute_stream(KN_CPU), "checkpoint"))
        return false;
    word[0] = o == MOVED || strcmp(first, c->save) != 0;
    word[1] = changed;
    if (comm && !kn_all_reduce_max(comm, word, 2, kn_compute_stream(KN_CPU), "checkpoint"))
        return false;
    *verdict = word[0] == 0 ? ALL_OPENED : word[1] != 0 ? AGAIN : NEVER;
    return true;
}

/* A save may replace files while they are opened: repeats until all files belong to one save, or
 * until the state no longer changes. */
static bool open_all(kn_checkpoint *c, kn_comm *comm)
{
    char before[sizeof c->save] = "?";
    int same = 0;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        int verdict;
        outcome o = find_files(c);
        same = strcmp(before, c->save) == 0 ? same + 1 : 0;
        memcpy(before, c->save, sizeof before);
        if (!compare_ranks(comm, c, o, same < 2, &verdict))
            return false;
        if (verdict == ALL_OPENED)
            return true;
        if (verdict == NEVER)
            break;
        close_files(c);
        nanosleep(&(struct timespec){ .tv_nsec = 50000000 }, NULL);
    }
    if (!c->missing)
        return kn_fail("%s: ranks see different files there", c->dir);
    return kn_fail(
        "%s: there is no %s of the save that %s names: the files belong to two checkpoints, "
        "or one is damaged or missing",
        c->dir, c->missing, kn_checkpoint_file[KN_FILE_STATE]);
}

static bool read_int(const json_t *object, const char *key, int64_t low, int64_t high,
                     int64_t *value, const char *path)
{
    const json_t *v = json_object_get(object, key);
    *value = json_integer_value(v);
    if (json_is_integer(v) && *value >= low && *value <= high)
        return true;
    return kn_fail("%s: \"%s\" is missing or not a whole number from %lld to %lld; the checkpoint "
                   "is damaged",
                   path, key, (long long)low, (long long)high);
}

/* Reads the number of ranks with buffers in optimizer.safetensors. */
static bool read_ranks(kn_checkpoint *c, const char *path)
{
    return !c->optimizer || !json_object_get(c->state, "ranks") ||
           read_int(c->state, "ranks", 2, kn_safetensors_count(c->optimizer) + 1, &c->ranks, path);
}

static bool read_config(kn_checkpoint *c, const char *path)
{
    const json_t *model = json_object_get(c->state, "model");
    if (!json_is_object(model))
        return kn_fail("%s: \"model\" is missing or no object; the checkpoint is damaged", path);
    char *text = json_dumps(model, 0);
    c->config = text ? kn_host_strdup(text) : NULL;
    free(text);
    return c->config || (kn_ok() && kn_fail("%s: no memory for it", path));
}

static bool read_state(kn_checkpoint *c)
{
    char path[KN_CHECKPOINT_PATH];
    int64_t version;
    return kn_checkpoint_path(path, c->dir, kn_checkpoint_file[KN_FILE_STATE], "") &&
           read_int(c->state, "version", 1, 1, &version, path) &&
           read_int(c->state, "step", 0, INT64_MAX, &c->step, path) && read_config(c, path) &&
           read_ranks(c, path);
}

kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm)
{
    if (!kn_given_path(dir, "kn_checkpoint_open", "the folder"))
        return NULL;
    comm = comm ? comm : kn_world();
    if (!kn_agree(comm, kn_ok()))
        return NULL;
    kn_checkpoint *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->dir = kn_host_strdup(dir);
    c->comm = comm;
    if (c->dir && open_all(c, comm) && read_state(c))
        return c;
    kn_checkpoint_free(c);
    return NULL;
}

void kn_checkpoint_free(kn_checkpoint *c)
{
    if (!c)
        return;
    close_files(c);
    kn_host_free(c->dir);
    kn_host_free(c->config);
    kn_host_free(c);
}

int64_t kn_checkpoint_step(const kn_checkpoint *c)
{
    if (!kn_given(c, "kn_checkpoint_step", "the checkpoint"))
        return 0;
    return c->step;
}

const char *kn_checkpoint_folder(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_folder", "the checkpoint") ? c->dir : NULL;
}

const char *kn_checkpoint_config(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_config", "the checkpoint") ? c->config : NULL;
}

kn_safetensors *kn_checkpoint_model(const kn_checkpoint *c)
{
    return kn_given(c, "kn_checkpoint_model", "the checkpoint") ? c->model : NULL;
}

kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c)
{
    if (!kn_given(c, "kn_checkpoint_tokenizer", "the checkpoint"))
        return NULL;
    char path[KN_CHECKPOINT_PATH];
    if (!c->tokenizer.data) {
        kn_fail("%s: the checkpoint was saved without a tokenizer", c->dir);
        return NULL;
    }
    return kn_checkpoint_path(path, c->dir, kn_checkpoint_file[KN_FILE_TOKENIZER], "")
               ? kn_tokenizer_parse((const char *)c->tokenizer.data, c->tokenizer.size, path)
               : NULL;
}

bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options)
{
    if (!kn_given(c, "kn_checkpoint_options", "the checkpoint") ||
        !kn_given(options, "kn_checkpoint_options", "the place for the options"))
        return false;
    const char *name;
    json_t *value;
    json_object_foreach(json_object_get(c->state, "options"), name, value)
    {
        if (!json_is_string(value))
            return kn_fail("%s/%s: option %s has no text; the checkpoint is damaged", c->dir,
                           kn_checkpoint_file[KN_FILE_STATE], name);
        if (!kn_options_restore(options, name, json_string_value(value)))
            return false;
    }
    return true;
}

/* ---- loading --------------------------------------------------------------------------------- */

static bool same_array(const kn_array *a, const kn_safetensors_entry *e)
{
    return a->dtype == e->dtype && a->ndim == e->ndim &&
           memcmp(a->shape, e->shape, (size_t)e->ndim * sizeof *e->shape) == 0;
}

/* Checks that the file holds exactly these tensors and belongs to this step. */
static bool check_file(kn_safetensors *f, const char *path, const kn_saved_items *s, int64_t step,
                       const kn_safetensors *optimizer)
{
    char got[96], want[96];
    const char *text = kn_safetensors_meta(f, "step");
    if (text && strtoll(text, NULL, 10) != step)
        return kn_fail("%s is of step %s, but %s of step %lld; the files belong to two checkpoints",
                       path, text, kn_checkpoint_file[KN_FILE_STATE], (long long)step);
    for (int i = 0; i < s->count; i++) {
        const kn_safetensors_entry *e = &s->entry[i];
        if (!kn_safetensors_has(f, e->name))
            return kn_fail("%s has no tensor '%s'; it is of another model%s", path, e->name,
                           f == optimizer ? ", or of an optimizer with other state" : "");
        kn_array a;
        if (!kn_safetensors_describe(f, e->name, &a))
            return false;
        if (!same_array(&a, e)) {
            kn_array ours = { .dtype = e->dtype, .ndim = e->ndim };
            memcpy(ours.shape, e->shape, sizeof ours.shape);
            return kn_fail("%s: '%s' is %s, but the model's is %s; give the model options that it "
                           "was trained with",
                           path, e->name, kn_array_describe(&a, got, sizeof got),
                           kn_array_describe(&ours, want, sizeof want));
        }
    }
    if (kn_safetensors_count(f) != s->count)
        return kn_fail("%s holds %d tensors, the model has %d; it is of another model", path,
                       kn_safetensors_count(f), s->count);
    return true;
}

static bool check(const kn_checkpoint *c, int file, const kn_saved_items *items)
{
    char path[KN_CHECKPOINT_PATH];
    kn_safetensors *f = file == KN_FILE_MODEL ? c->model : c->optimizer;
    if (!kn_checkpoint_path(path, c->dir, kn_checkpoint_file[file], ""))
        return false;
    if (!f)
        return kn_fail(
            "there is no %s; the checkpoint was saved without an optimizer, or is damaged", path);
    return check_file(f, path, items, c->step, c->optimizer);
}

/* Marks the buffers that the optimizer's file holds for each rank. */
static bool mark_buffers(const kn_checkpoint *c, kn_saved_items *model)
{
    char name[512];
    for (int i = 0; c->ranks > 1 && i < model->count; i++) {
        if (!model->list[i].buffer)
            continue;
        if (!kn_saved_buffer_name(name, sizeof name, model->entry[i].name, 1))
            return false;
        model->list[i].differs = kn_safetensors_has(c->optimizer, name);
    }
    return true;
}

static bool load_values(kn_safetensors *f, const kn_saved_items *items, const kn_checkpoint *c,
                        void *module, kn_optim *optim)
{
    bool ok = true, own = kn_comm_size(c->comm) == c->ranks;
    for (int i = 0; ok && i < items->count; i++) {
        const kn_saved_item *it = &items->list[i];
        if (it->rank > 0 && (!own || it->rank != kn_rank(c->comm)))
            continue;
        kn_scope scope = kn_scope_begin();
        kn_tensor *t = kn_safetensors_get(f, items->entry[i].name);
        ok = t && kn_saved_item_write(it, module, optim, t);
        kn_scope_end(scope);
    }
    return ok;
}

/* Loads the optimizer's step count, which is less than the run's where a scaler skipped steps, and
 * unrelated where the caller counts something else; then those of averages and scaler. */
static bool load_counts(const kn_checkpoint *c, const kn_checkpoint_load_options *o)
{
    char path[KN_CHECKPOINT_PATH];
    int64_t steps = c->step, updates = 0;
    kn_scaler_state s = { 0 };
    const json_t *saved = json_object_get(c->state, "scaler"),
                 *scale = json_object_get(saved, "scale");
    if (!kn_checkpoint_path(path, c->dir, kn_checkpoint_file[KN_FILE_STATE], "") ||
        (json_object_get(c->state, "optimizer_steps") &&
         !read_int(c->state, "optimizer_steps", 0, INT64_MAX, &steps, path)) ||
        (o->ema && !read_int(c->state, "ema_updates", 0, INT64_MAX, &updates, path)))
        return false;
    kn_optim_set_steps(o->optim, steps);
    kn_ema_set_updates(o->ema, updates);
    if (!o->scaler || !scale)
        return true;
    s.scale = json_number_value(scale);
    return read_int(saved, "good", 0, INT64_MAX, &s.good, path) &&
           read_int(saved, "skipped", 0, INT64_MAX, &s.skipped, path) &&
           kn_scaler_set(o->scaler, s);
}

static bool load_all(const kn_checkpoint *c, void *module, const kn_checkpoint_load_options *o)
{
    kn_scope scope = kn_scope_begin();
    kn_saved_items model = { 0 }, state = { 0 };
    bool ok = kn_module_full_buffers(module, true) && kn_saved_items_make(&model, module, o->ema) &&
              check(c, KN_FILE_MODEL, &model);
    if (ok && o->optim) /* check reported a missing file */
        ok = (!c->optimizer || mark_buffers(c, &model)) &&
             kn_saved_items_make_state(&state, module, o->optim, o->ema, &model, (int)c->ranks) &&
             check(c, KN_FILE_OPTIMIZER, &state);
    ok = ok && load_values(c->model, &model, c, module, NULL);
    if (ok && o->optim)
        ok = load_values(c->optimizer, &state, c, module, o->optim) && load_counts(c, o);
    ok = kn_module_full_buffers(module, false) && ok;
    kn_saved_items_free(&model);
    kn_saved_items_free(&state);
    kn_scope_end(scope);
    return ok;
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
    if (o.optim && saved != (o.ema != NULL))
        return kn_fail("%s was saved %s averages of the weights: load it %s .ema (--ema)", c->dir,
                       saved ? "with" : "without", saved ? "with" : "without");
    if (!kn_agree(c->comm, kn_ok()))
        return false;
    kn_comm_suspend_timeout(c->comm); /* a rank may read from a slower disk than the others */
    bool ok = kn_agree(c->comm, load_all(c, module, &o));
    kn_comm_resume_timeout(c->comm);
    return ok;
}
