/* models/checkpoint_read.c: opening what was saved, and loading it. All files are opened at once and stay open,
 * so that a save which replaces them meanwhile changes nothing. */
#include "kernels/context.h"
#include "models/checkpoint_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOOKS 100 /* at a folder whose files change while they are opened, 50 ms apart */

struct kn_checkpoint {
    char *dir;
    json_t *state;
    char save[40]; /* the save's random name; "" in files from before there were any */
    int64_t step;
    kn_gpt_config config;
    kn_safetensors *model, *optimizer; /* NULL: there is no such file */
    kn_mapped tokenizer;
    const char *strange; /* the file that no look found of this save; NULL: all were */
};

/* ---- one set of files ------------------------------------------------------------------------- */

typedef enum {
    OPENED,
    MOVED,
    FAILED
} outcome; /* MOVED: no file of this save; FAILED: an error stands */

/* -1 where there is none. *outcome is FAILED where there is one that cannot be opened. */
static int open_file(const char *path, outcome *o)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno != ENOENT) {
        kn_fail("cannot open %s: %s", path, strerror(errno));
        *o = FAILED;
    }
    return fd;
}

static bool same_save(const kn_checkpoint *c, const char *name)
{
    return strcmp(c->save, name ? name : "") == 0;
}

/* Both take fd. */
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
    /* what is no JSON is refused when the tokenizer is made of it */
    bool same = !j || same_save(c, json_string_value(json_object_get(j, KN_SAVE_KEY)));
    json_decref(j);
    if (!same)
        kn_file_unmap(&c->tokenizer);
    return same ? OPENED : MOVED;
}

/* Finds the file of c's save under its name, or under the one that it has until it is renamed. */
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

/* The state that counts: state.json.new where a save waits to be renamed. */
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
        kn_fail("%s holds no checkpoint (there is no %s): give a folder that train_gpt --out wrote",
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

static outcome find_files(kn_checkpoint *c)
{
    outcome o = find_state(c);
    c->strange = NULL;
    for (int file = KN_FILE_MODEL; file < KN_FILE_STATE && o == OPENED; file++) {
        o = find_file(c, file);
        if (o == MOVED && file == KN_FILE_OPTIMIZER && !is_there(c, file))
            o = OPENED; /* generating needs none */
        if (o == MOVED)
            c->strange = kn_checkpoint_file[file];
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

/* ---- opening ---------------------------------------------------------------------------------- */

/* What ranks tell each other of a look at the folder. */
enum { ALL_OPENED, AGAIN, NEVER };

/* Have all ranks opened the same save? again: it changed since the look before, so another one may help. */
static bool compare_ranks(kn_comm *comm, const kn_checkpoint *c, outcome o, bool changed,
                          int *verdict)
{
    char first[sizeof c->save];
    float word[2]; /* does a rank want to look again; has a rank seen a change */
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

/* A save may come between two files: then the folder is looked at again, until its state stays the same. */
static bool open_all(kn_checkpoint *c, kn_comm *comm)
{
    char before[sizeof c->save] = "?";
    int same = 0;
    for (int look = 0; look < LOOKS; look++) {
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
    if (!c->strange)
        return kn_fail("%s: ranks see different files there", c->dir);
    return kn_fail(
        "%s: there is no %s of the save that %s names: the files belong to two checkpoints, "
        "or one is damaged or missing",
        c->dir, c->strange, kn_checkpoint_file[KN_FILE_STATE]);
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

static bool read_config(kn_checkpoint *c, const char *path)
{
    const json_t *m = json_object_get(c->state, "model");
    int64_t layers = 0, heads = 0;
    if (!read_int(m, "layers", 1, 100000, &layers, path) ||
        !read_int(m, "heads", 1, 100000, &heads, path) ||
        !read_int(m, "embd", 1, 1 << 24, &c->config.embd, path) ||
        !read_int(m, "ctx", 1, 1 << 30, &c->config.ctx, path) ||
        !read_int(m, "vocab", 1, 1 << 30, &c->config.vocab, path))
        return false;
    c->config.layers = (int)layers;
    c->config.heads = (int)heads;
    c->config.dropout = json_number_value(json_object_get(m, "dropout"));
    c->config.no_bias = json_is_true(json_object_get(m, "no_bias"));
    return true;
}

/* What state.json claims must be in the file, before memory is taken for it. */
static bool check_sizes(const kn_checkpoint *c)
{
    const kn_gpt_config *g = &c->config;
    char last[64], after[64];
    kn_array wte, wpe;
    snprintf(last, sizeof last, "transformer.h.%d.ln_1.weight", g->layers - 1);
    snprintf(after, sizeof after, "transformer.h.%d.ln_1.weight", g->layers);
    if (!kn_safetensors_describe(c->model, "transformer.wte.weight", &wte) ||
        !kn_safetensors_describe(c->model, "transformer.wpe.weight", &wpe))
        return false;
    if (wte.ndim == 2 && wpe.ndim == 2 && wte.shape[0] == g->vocab && wpe.shape[0] == g->ctx &&
        wte.shape[1] == g->embd && wpe.shape[1] == g->embd && kn_safetensors_has(c->model, last) &&
        !kn_safetensors_has(c->model, after))
        return true;
    return kn_fail(
        "%s/%s speaks of %d layers, %lld channels, context %lld, vocabulary %lld; %s holds "
        "a model of other sizes; the checkpoint is damaged",
        c->dir, kn_checkpoint_file[KN_FILE_STATE], g->layers, (long long)g->embd, (long long)g->ctx,
        (long long)g->vocab, kn_checkpoint_file[KN_FILE_MODEL]);
}

static bool read_state(kn_checkpoint *c)
{
    char path[KN_CHECKPOINT_PATH];
    int64_t version;
    return kn_checkpoint_path(path, c->dir, kn_checkpoint_file[KN_FILE_STATE], "") &&
           read_int(c->state, "version", 1, 1, &version, path) &&
           read_int(c->state, "step", 0, INT64_MAX, &c->step, path) && read_config(c, path) &&
           check_sizes(c);
}

kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm)
{
    if (!kn_given(dir, "kn_checkpoint_open", "the folder"))
        return NULL;
    if (!kn_agree(comm, kn_ok()))
        return NULL;
    kn_checkpoint *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->dir = kn_host_strdup(dir);
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
    kn_host_free(c);
}

int64_t kn_checkpoint_step(const kn_checkpoint *c)
{
    if (!kn_given(c, "kn_checkpoint_step", "the checkpoint"))
        return 0;
    return c->step;
}

const kn_gpt_config *kn_checkpoint_config(const kn_checkpoint *c)
{
    if (!kn_given(c, "kn_checkpoint_config", "the checkpoint"))
        return NULL;
    return &c->config;
}

kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c)
{
    if (!kn_given(c, "kn_checkpoint_tokenizer", "the checkpoint"))
        return NULL;
    char path[KN_CHECKPOINT_PATH];
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

/* ---- loading ---------------------------------------------------------------------------------- */

static bool same_array(const kn_array *a, const kn_safetensors_entry *e)
{
    return a->dtype == e->dtype && a->ndim == e->ndim &&
           memcmp(a->shape, e->shape, (size_t)e->ndim * sizeof *e->shape) == 0;
}

/* The file holds these tensors and no others, and belongs to this step. */
static bool check_file(kn_safetensors *f, const char *path, const kn_saved_items *s, int64_t step)
{
    char got[96], want[96];
    const char *text = kn_safetensors_meta(f, "step");
    if (text && strtoll(text, NULL, 10) != step)
        return kn_fail("%s is of step %s, but %s of step %lld; the files belong to two checkpoints",
                       path, text, kn_checkpoint_file[KN_FILE_STATE], (long long)step);
    for (int i = 0; i < s->count; i++) {
        const kn_safetensors_entry *e = &s->entry[i];
        if (!kn_safetensors_has(f, e->name))
            return kn_fail("%s has no tensor '%s'; it is of another model", path, e->name);
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

/* file: borrowed from the checkpoint. */
typedef struct loading {
    kn_safetensors *file;
    kn_saved_items items;
} loading;

static bool load_prepare(loading *l, const kn_checkpoint *c, int file, void *model)
{
    char path[KN_CHECKPOINT_PATH];
    l->file = file == KN_FILE_MODEL ? c->model : c->optimizer;
    if (!kn_checkpoint_path(path, c->dir, kn_checkpoint_file[file], ""))
        return false;
    if (!l->file)
        return kn_fail("there is no %s; the checkpoint is damaged", path);
    return kn_saved_items_make(&l->items, model, file == KN_FILE_OPTIMIZER) &&
           check_file(l->file, path, &l->items, c->step);
}

static bool load_values(loading *l, void *model, kn_optim *optim)
{
    for (int i = 0; i < l->items.count; i++) {
        kn_scope scope = kn_scope_begin();
        const kn_saved_item *it = &l->items.list[i];
        kn_tensor *t = kn_safetensors_get(l->file, l->items.entry[i].name);
        const void *host = t ? kn_data(t) : NULL;
        bool ok =
            host && (it->what ? kn_shard_write(model, it->param,
                                               kn_optim_state(optim, it->param, it->what), host)
                              : kn_param_write(model, it->param, host));
        kn_scope_end(scope);
        if (!ok)
            return false;
    }
    return true;
}

/* Steps that the optimizer made: fewer than the run's where a scaler skipped some. */
static bool load_steps(const kn_checkpoint *c, kn_optim *optim, kn_scaler *scaler)
{
    char path[KN_CHECKPOINT_PATH];
    int64_t steps = c->step;
    kn_scaler_state s = { 0 };
    const json_t *saved = json_object_get(c->state, "scaler"),
                 *scale = json_object_get(saved, "scale");
    if (!kn_checkpoint_path(path, c->dir, kn_checkpoint_file[KN_FILE_STATE], "") ||
        (json_object_get(c->state, "optimizer_steps") &&
         !read_int(c->state, "optimizer_steps", 0, c->step, &steps, path)))
        return false;
    kn_optim_set_steps(optim, steps);
    if (!scaler || !scale)
        return true;
    s.scale = json_number_value(scale);
    return read_int(saved, "good", 0, INT64_MAX, &s.good, path) &&
           read_int(saved, "skipped", 0, INT64_MAX, &s.skipped, path) && kn_scaler_set(scaler, s);
}

static bool load_all(const kn_checkpoint *c, kn_gpt *model, kn_optim *optim, kn_scaler *scaler)
{
    kn_scope scope = kn_scope_begin();
    loading weights = { 0 }, state = { 0 };
    bool ok = load_prepare(&weights, c, KN_FILE_MODEL, model) &&
              (!optim || load_prepare(&state, c, KN_FILE_OPTIMIZER, model)) &&
              load_values(&weights, model, NULL) && (!optim || load_values(&state, model, optim));
    ok = ok && (!optim || load_steps(c, optim, scaler));
    kn_saved_items_free(&weights.items);
    kn_saved_items_free(&state.items);
    kn_scope_end(scope);
    return ok;
}

bool kn_checkpoint_load(const kn_checkpoint *c, kn_comm *comm, kn_gpt *model, kn_optim *optim,
                        kn_scaler *scaler)
{
    if (!kn_given(c, "kn_checkpoint_load", "the checkpoint") ||
        !kn_given(model, "kn_checkpoint_load", "the model"))
        return false;
    if (!kn_agree(comm, kn_ok()))
        return false;
    double seconds = kn_comm_get_timeout(comm);
    kn_comm_set_timeout(comm, INFINITY); /* a rank may read from a slower disk than the others */
    bool ok = kn_agree(comm, load_all(c, model, optim, scaler));
    kn_comm_set_timeout(comm, seconds);
    return ok;
}
