/* models/checkpoint.c: saving a training run. */
#include "kernels/error.h"
#include "models/checkpoint_internal.h"

#include "models/tokenizer_internal.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What tells the files of one save from those of another. */
typedef struct save_stamp {
    int64_t step;
    char name[33]; /* random, in hexadecimal */
} save_stamp;

/* ---- tensors ---------------------------------------------------------------------------------- */

/* What AdamW keeps of a parameter. */
static const char *const KEPT[] = { "exp_avg", "exp_avg_sq" };

void kn_saved_items_free(kn_saved_items *s)
{
    for (int i = 0; s->entry && i < s->count; i++)
        kn_host_free((void *)s->entry[i].name);
    kn_host_free(s->entry);
    kn_host_free(s->list);
    *s = (kn_saved_items){ 0 };
}

static bool add_item(kn_saved_items *s, const kn_param *p, int param, const char *what)
{
    char name[512];
    int n = snprintf(name, sizeof name, "%s%s%s", p->name, what ? "." : "", what ? what : "");
    if (n >= (int)sizeof name)
        return kn_fail("checkpoint: the name %.60s... is too long", p->name);
    kn_safetensors_entry *e = &s->entry[s->count];
    *e = (kn_safetensors_entry){ .dtype = kn_dtype_of(p->master), .ndim = kn_ndim(p->tensor) };
    memcpy(e->shape, kn_shape(p->tensor), (size_t)e->ndim * sizeof *e->shape);
    e->name = kn_host_strdup(name);
    s->list[s->count++] = (kn_saved_item){ param, what };
    if (p->numel > s->largest)
        s->largest = p->numel;
    return e->name != NULL;
}

bool kn_saved_items_make(kn_saved_items *s, void *model, bool state)
{
    const kn_param *p;
    int n = kn_params(model, &p), kept = state ? (int)(sizeof KEPT / sizeof *KEPT) : 1;
    s->list = kn_host_calloc((size_t)(n * kept) + 1, sizeof *s->list);
    s->entry = kn_host_calloc((size_t)(n * kept) + 1, sizeof *s->entry);
    if (!s->list || !s->entry)
        return false;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < kept && (!state || p[i].trainable); k++)
            if (!add_item(s, &p[i], i, state ? KEPT[k] : NULL))
                return false;
    return true;
}

/* A run that went wrong must not replace what it saved when it was well. */
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
                              "nothing is saved, what was saved before stays",
                              (long long)bad, name);
}

/* Every rank reads each tensor with the others; rank 0 appends it to the file. */
static bool save_tensors(const char *path, kn_comm *comm, void *model, kn_optim *optim,
                         const save_stamp *stamp)
{
    kn_saved_items s = { 0 };
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)stamp->step);
    kn_safetensors_pair meta[] = { { "format", "knap" },
                                   { "step", text },
                                   { KN_SAVE_KEY, stamp->name } };
    kn_safetensors_writer *w = NULL;
    void *host = NULL;
    bool ok = kn_saved_items_make(&s, model, optim != NULL);
    if (ok)
        host = kn_host_alloc((size_t)s.largest * sizeof(double));
    if (host && kn_rank(comm) == 0)
        w = kn_safetensors_create(path, s.entry, s.count, meta, 3);
    ok = host && (w || kn_rank(comm) != 0);
    for (int i = 0; ok && i < s.count; i++) {
        kn_scope scope = kn_scope_begin();
        const kn_saved_item *it = &s.list[i];
        const kn_param *p;
        kn_params(model, &p);
        ok = it->what
                 ? kn_shard_read(model, it->param, kn_optim_state(optim, it->param, it->what), host)
                 : kn_param_read(model, it->param, host);
        size_t bytes = (size_t)p[it->param].numel * kn_dtype_size(s.entry[i].dtype);
        if (ok)
            ok = check_finite(s.entry[i].name, s.entry[i].dtype, host, p[it->param].numel);
        if (ok && w)
            ok = kn_safetensors_append(w, host, bytes);
        kn_scope_end(scope);
    }
    if (w && ok)
        ok = kn_safetensors_commit(w);
    else if (w)
        kn_safetensors_abandon(w);
    kn_host_free(host);
    kn_saved_items_free(&s);
    return ok;
}

/* ---- files ------------------------------------------------------------------------------------ */

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

static bool write_state(const char *dir, const kn_gpt *model, const kn_optim *optim,
                        const kn_scaler *scaler, const kn_tokenizer *tokenizer,
                        const save_stamp *stamp, kn_options *options)
{
    const kn_gpt_config *c = kn_gpt_config_of(model);
    json_t *j = json_pack(
        "{s:i, s:s, s:I, s:I, s:s, s:{s:i, s:i, s:I, s:I, s:I, s:f, s:b}, s:o, s:o}", "version", 1,
        KN_SAVE_KEY, stamp->name, "step", (json_int_t)stamp->step, "optimizer_steps",
        (json_int_t)kn_optim_steps(optim), "tokenizer", kn_tokenizer_kind(tokenizer), "model",
        "layers", c->layers, "heads", c->heads, "embd", (json_int_t)c->embd, "ctx",
        (json_int_t)c->ctx, "vocab", (json_int_t)c->vocab, "dropout", c->dropout, "no_bias",
        (int)c->no_bias, "options", options_json(options), "scaler", scaler_json(scaler));
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

static bool save_tensor_file(const char *dir, int file, kn_comm *comm, kn_gpt *model,
                             kn_optim *optim, const save_stamp *stamp)
{
    char path[KN_CHECKPOINT_PATH];
    return kn_checkpoint_path(path, dir, kn_checkpoint_file[file], ".new") &&
           save_tensors(path, comm, model, optim, stamp);
}

bool kn_checkpoint_save(const char *dir, kn_comm *comm, kn_gpt *model, kn_optim *optim,
                        const kn_scaler *scaler, int64_t step, const kn_tokenizer *tokenizer,
                        kn_options *options)
{
    save_stamp stamp;
    if (!kn_agree(comm, kn_ok())) /* a rank that is stuck before the save is late as ever */
        return false;
    double seconds = kn_comm_get_timeout(comm);
    kn_comm_set_timeout(comm, INFINITY); /* rank 0 takes as long as its disk; deaths are seen */
    bool first = kn_rank(comm) == 0;
    bool ok = make_stamp(&stamp, step) && (!first || kn_checkpoint_finish_renames(dir)) &&
              save_tensor_file(dir, KN_FILE_MODEL, comm, model, NULL, &stamp) &&
              save_tensor_file(dir, KN_FILE_OPTIMIZER, comm, model, optim, &stamp);
    if (ok && first)
        ok = write_tokenizer(dir, tokenizer, &stamp) &&
             write_state(dir, model, optim, scaler, tokenizer, &stamp, options) &&
             kn_checkpoint_finish_renames(dir);
    ok = kn_agree(comm, ok);
    kn_comm_set_timeout(comm, seconds);
    return ok;
}
