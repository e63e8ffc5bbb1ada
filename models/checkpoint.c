/* models/checkpoint.c: saving a training run and going on from it. */
#include "models/checkpoint.h"

#include "models/data.h"
#include "tensor/safetensors.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_MAX_ 4096

static const char MODEL[] = "model.safetensors", OPTIMIZER[] = "optimizer.safetensors",
                  TOKENIZER[] = "tokenizer.json", STATE[] = "state.json";
/* In the order in which they are renamed: the one that makes a save count is last. */
static const char *const FILES[] = { MODEL, OPTIMIZER, TOKENIZER, STATE };
/* What AdamW keeps of a parameter. */
static const char *const KEPT[] = { "exp_avg", "exp_avg_sq" };

struct kn_checkpoint {
    char *dir;
    json_t *state;
    int64_t step;
    kn_gpt_config config;
};

static bool path_in(char *path, const char *dir, const char *name, const char *suffix)
{
    int n = snprintf(path, PATH_MAX_, "%s/%s%s", dir, name, suffix);
    return (n > 0 && n < PATH_MAX_) || kn_fail("checkpoint: the path %s is too long", dir);
}

/* ---- the folder ------------------------------------------------------------------------------- */

bool kn_checkpoint_prepare(const char *dir)
{
    char path[PATH_MAX_];
    if (!path_in(path, dir, "", ""))
        return false;
    for (char *p = path + 1; *p; p++) {
        if (*p != '/')
            continue;
        *p = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return kn_fail("checkpoint: cannot make the folder %s: %s", path, strerror(errno));
        *p = '/';
    }
    if (access(dir, W_OK | X_OK) != 0)
        return kn_fail("checkpoint: cannot write into %s: %s; give --out another folder", dir,
                       strerror(errno));
    return true;
}

/* Finishes a save that counts but whose files were not all renamed. */
static bool finish_renames(const char *dir)
{
    char from[PATH_MAX_], to[PATH_MAX_];
    if (!path_in(from, dir, STATE, ".new"))
        return false;
    if (access(from, F_OK) != 0)
        return true;
    for (size_t i = 0; i < sizeof FILES / sizeof *FILES; i++) {
        if (!path_in(from, dir, FILES[i], ".new") || !path_in(to, dir, FILES[i], ""))
            return false;
        if (rename(from, to) != 0 && errno != ENOENT)
            return kn_fail("checkpoint: cannot rename %s: %s", from, strerror(errno));
    }
    return true;
}

/* ---- saving ----------------------------------------------------------------------------------- */

/* One tensor of a file: a parameter, or what the optimizer keeps of it. */
typedef struct item {
    int param;
    const char *what; /* NULL: the parameter itself */
} item;

typedef struct items {
    item *list;
    kn_safetensors_entry *entry;
    int count;
    int64_t largest; /* elements */
} items;

static void items_free(items *s)
{
    for (int i = 0; s->entry && i < s->count; i++)
        kn_free_host((void *)s->entry[i].name);
    kn_free_host(s->entry);
    kn_free_host(s->list);
    *s = (items){ 0 };
}

static bool add_item(items *s, const kn_param *p, int param, const char *what)
{
    char name[512];
    int n = snprintf(name, sizeof name, "%s%s%s", p->name, what ? "." : "", what ? what : "");
    if (n >= (int)sizeof name)
        return kn_fail("checkpoint: the name %.60s... is too long", p->name);
    kn_safetensors_entry *e = &s->entry[s->count];
    *e = (kn_safetensors_entry){ .dtype = kn_dtype_of(p->master), .ndim = kn_ndim(p->tensor) };
    memcpy(e->shape, kn_shape(p->tensor), (size_t)e->ndim * sizeof *e->shape);
    e->name = kn_strdup(name);
    s->list[s->count++] = (item){ param, what };
    if (p->numel > s->largest)
        s->largest = p->numel;
    return e->name != NULL;
}

/* What a file holds: the parameters, or (state) the optimizer's tensors. */
static bool items_make(items *s, void *model, bool state)
{
    const kn_param *p;
    int n = kn_params(model, &p), kept = state ? (int)(sizeof KEPT / sizeof *KEPT) : 1;
    s->list = kn_calloc((size_t)(n * kept) + 1, sizeof *s->list);
    s->entry = kn_calloc((size_t)(n * kept) + 1, sizeof *s->entry);
    if (!s->list || !s->entry)
        return false;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < kept && (!state || p[i].trainable); k++)
            if (!add_item(s, &p[i], i, state ? KEPT[k] : NULL))
                return false;
    return true;
}

/* Every rank reads each tensor with the others; rank 0 appends it to the file. */
static bool save_tensors(const char *path, kn_comm *comm, void *model, kn_optim *optim,
                         int64_t step)
{
    items s = { 0 };
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)step);
    kn_safetensors_pair meta[] = { { "format", "knap" }, { "step", text } };
    kn_safetensors_writer *w = NULL;
    void *host = NULL;
    bool ok = items_make(&s, model, optim != NULL);
    if (ok)
        host = kn_malloc((size_t)s.largest * sizeof(double));
    if (host && kn_rank(comm) == 0)
        w = kn_safetensors_create(path, s.entry, s.count, meta, 2);
    ok = host && (w || kn_rank(comm) != 0);
    for (int i = 0; ok && i < s.count; i++) {
        kn_scope scope = kn_scope_begin();
        const item *it = &s.list[i];
        const kn_param *p;
        kn_params(model, &p);
        ok = it->what
                 ? kn_shard_read(model, it->param, kn_optim_state(optim, it->param, it->what), host)
                 : kn_param_read(model, it->param, host);
        size_t bytes = (size_t)p[it->param].numel * kn_dtype_size(s.entry[i].dtype);
        if (ok && w)
            ok = kn_safetensors_append(w, host, bytes);
        kn_scope_end(scope);
    }
    if (w && ok)
        ok = kn_safetensors_commit(w);
    else if (w)
        kn_safetensors_abandon(w);
    kn_free_host(host);
    items_free(&s);
    return ok;
}

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

static bool write_state(const char *dir, const kn_gpt *model, const kn_optim *optim,
                        const kn_scaler *scaler, const kn_tokenizer *tokenizer, int64_t step,
                        kn_options *options)
{
    const kn_gpt_config *c = kn_gpt_config_of(model);
    char path[PATH_MAX_];
    json_t *j = json_pack("{s:i, s:I, s:I, s:s, s:{s:i, s:i, s:I, s:I, s:I, s:f, s:b}, s:o, s:o}",
                          "version", 1, "step", (json_int_t)step, "optimizer_steps",
                          (json_int_t)kn_optim_steps(optim), "tokenizer",
                          kn_tokenizer_kind(tokenizer), "model", "layers", c->layers, "heads",
                          c->heads, "embd", (json_int_t)c->embd, "ctx", (json_int_t)c->ctx, "vocab",
                          (json_int_t)c->vocab, "dropout", c->dropout, "no_bias", (int)c->no_bias,
                          "options", options_json(options), "scaler", scaler_json(scaler));
    char *text = j ? json_dumps(j, JSON_INDENT(2)) : NULL;
    json_decref(j);
    if (!text)
        return kn_fail("checkpoint: no memory for %s", STATE);
    size_t size = strlen(text);
    const void *piece = text;
    bool ok = path_in(path, dir, STATE, ".new") && kn_file_write(path, &piece, &size, 1);
    free(text);
    return ok;
}

bool kn_checkpoint_save(const char *dir, kn_comm *comm, kn_gpt *model, kn_optim *optim,
                        const kn_scaler *scaler, int64_t step, const kn_tokenizer *tokenizer,
                        kn_options *options)
{
    char path[PATH_MAX_];
    bool first = kn_rank(comm) == 0;
    bool ok = kn_ok() && (!first || finish_renames(dir));
    ok = ok && path_in(path, dir, MODEL, ".new") && save_tensors(path, comm, model, NULL, step);
    ok =
        ok && path_in(path, dir, OPTIMIZER, ".new") && save_tensors(path, comm, model, optim, step);
    if (ok && first)
        ok = path_in(path, dir, TOKENIZER, ".new") && kn_tokenizer_save(tokenizer, path) &&
             write_state(dir, model, optim, scaler, tokenizer, step, options) &&
             finish_renames(dir);
    return kn_agree(comm, ok);
}

/* ---- opening ---------------------------------------------------------------------------------- */

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

static bool read_state(kn_checkpoint *c)
{
    char path[PATH_MAX_];
    kn_mapped map = { 0 };
    json_error_t error;
    int64_t version;
    if (!path_in(path, c->dir, STATE, ""))
        return false;
    if (access(path, F_OK) != 0)
        return kn_fail(
            "%s holds no checkpoint (there is no %s): give a folder that train_gpt --out "
            "wrote",
            c->dir, STATE);
    if (!kn_file_map(path, "checkpoint's state", &map))
        return false;
    c->state = json_loadb((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, &error);
    kn_file_unmap(&map);
    if (!json_is_object(c->state))
        return kn_fail("%s is no JSON object (%s in line %d); the checkpoint is damaged", path,
                       c->state ? "another value" : error.text, c->state ? 1 : error.line);
    return read_int(c->state, "version", 1, 1, &version, path) &&
           read_int(c->state, "step", 0, INT64_MAX, &c->step, path) && read_config(c, path);
}

kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm)
{
    if (kn_rank(comm) == 0)
        finish_renames(dir);
    if (!kn_agree(comm, kn_ok())) /* the others read after that */
        return NULL;
    kn_checkpoint *c = kn_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->dir = kn_strdup(dir);
    if (c->dir && read_state(c))
        return c;
    kn_checkpoint_free(c);
    return NULL;
}

void kn_checkpoint_free(kn_checkpoint *c)
{
    if (!c)
        return;
    json_decref(c->state);
    kn_free_host(c->dir);
    kn_free_host(c);
}

int64_t kn_checkpoint_step(const kn_checkpoint *c)
{
    return c->step;
}

const kn_gpt_config *kn_checkpoint_config(const kn_checkpoint *c)
{
    return &c->config;
}

kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c)
{
    char path[PATH_MAX_];
    return path_in(path, c->dir, TOKENIZER, "") ? kn_tokenizer_load(path) : NULL;
}

bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options)
{
    const char *name;
    json_t *value;
    json_object_foreach(json_object_get(c->state, "options"), name, value)
    {
        if (!json_is_string(value))
            return kn_fail("%s/%s: option %s has no text; the checkpoint is damaged", c->dir, STATE,
                           name);
        if (!kn_options_restore(options, name, json_string_value(value)))
            return false;
    }
    return true;
}

/* ---- loading ---------------------------------------------------------------------------------- */

static bool same_shape(const kn_tensor *t, const kn_safetensors_entry *e)
{
    return kn_ndim(t) == e->ndim &&
           memcmp(kn_shape(t), e->shape, (size_t)e->ndim * sizeof *e->shape) == 0;
}

/* The file holds these tensors and no others, and belongs to this step. */
static bool check_file(kn_safetensors *f, const char *path, const items *s, int64_t step)
{
    char got[96], want[96];
    const char *text = kn_safetensors_meta(f, "step");
    if (text && strtoll(text, NULL, 10) != step)
        return kn_fail("%s is of step %s, but %s of step %lld; the files belong to two checkpoints",
                       path, text, STATE, (long long)step);
    for (int i = 0; i < s->count; i++) {
        const kn_safetensors_entry *e = &s->entry[i];
        if (!kn_safetensors_has(f, e->name))
            return kn_fail("%s has no tensor '%s'; it is of another model", path, e->name);
        kn_tensor *t = kn_safetensors_get(f, e->name);
        if (!t)
            return false;
        if (!same_shape(t, e) || kn_dtype_of(t) != e->dtype) {
            kn_array a = { .dtype = e->dtype, .ndim = e->ndim };
            memcpy(a.shape, e->shape, sizeof a.shape);
            return kn_fail("%s: '%s' is %s, but the model's is %s; give the model options that it "
                           "was trained with",
                           path, e->name, kn_describe(t, got, sizeof got),
                           kn_array_describe(&a, want, sizeof want));
        }
    }
    if (kn_safetensors_count(f) != s->count)
        return kn_fail("%s holds %d tensors, the model has %d; it is of another model", path,
                       kn_safetensors_count(f), s->count);
    return true;
}

typedef struct loading {
    kn_safetensors *file;
    items items;
    char path[PATH_MAX_];
} loading;

static bool load_open(loading *l, const kn_checkpoint *c, const char *name, void *model, bool state)
{
    if (!path_in(l->path, c->dir, name, "") || !items_make(&l->items, model, state))
        return false;
    l->file = kn_safetensors_open(l->path);
    return l->file && check_file(l->file, l->path, &l->items, c->step);
}

static bool load_values(loading *l, void *model, kn_optim *optim)
{
    for (int i = 0; i < l->items.count; i++) {
        kn_scope scope = kn_scope_begin();
        const item *it = &l->items.list[i];
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
    char path[PATH_MAX_];
    int64_t steps = c->step;
    kn_scaler_state s = { 0 };
    const json_t *saved = json_object_get(c->state, "scaler"),
                 *scale = json_object_get(saved, "scale");
    if (!path_in(path, c->dir, STATE, "") ||
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

bool kn_checkpoint_load(const kn_checkpoint *c, kn_gpt *model, kn_optim *optim, kn_scaler *scaler)
{
    kn_scope scope = kn_scope_begin();
    loading weights = { 0 }, state = { 0 };
    bool ok = load_open(&weights, c, MODEL, model, false) &&
              (!optim || load_open(&state, c, OPTIMIZER, model, true)) &&
              load_values(&weights, model, NULL) && (!optim || load_values(&state, model, optim));
    ok = ok && (!optim || load_steps(c, optim, scaler));
    if (weights.file)
        kn_safetensors_close(weights.file);
    if (state.file)
        kn_safetensors_close(state.file);
    items_free(&weights.items);
    items_free(&state.items);
    kn_scope_end(scope);
    return ok;
}
