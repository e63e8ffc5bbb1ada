/* models/imported.c: language models of others, by the table of their family: what their
 * config.json says, and as what their tensors are looked for. */
#include "models/imported_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/model_tensors.h"
#include "models/pretrained_internal.h"
#include "models/record.h"
#include "models/tokens/tokens.h"
#include "state/checkpoint_internal.h"
#include "tensor/files.h"

#include <stdio.h>
#include <string.h>

enum { MOST_ENDS = 16 };

struct kn_imported {
    char dir[4096];
    kn_comm *comm;             /* borrowed */
    kn_checkpoint *checkpoint; /* NULL: the files are another program's */
    kn_state *state;           /* their tensors */
    kn_model_config config;
    int64_t end[MOST_ENDS];
    int ends;
};

/* ---- tensors --------------------------------------------------------------------------------- */

/* The number of the file's tensor that is loaded as name; -1: none. */
static int find(const kn_family *f, const kn_pieces *files, const char *name)
{
    const size_t n = f->optional_prefix ? strlen(f->optional_prefix) : 0;
    const int i = kn_pieces_find(files, name);
    return i < 0 && n > 0 && strncmp(name, f->optional_prefix, n) == 0
               ? kn_pieces_find(files, name + n)
               : i;
}

/* Every tensor of the model is there, with its shape. */
static bool check_tensors(const kn_model_config *c, const kn_pieces *files, const char *dir)
{
    kn_module m = { 0 };
    kn_model_tensors t = { 0 };
    const int64_t fewest = c->family->fewest_tensors(c->of);
    if (fewest > kn_pieces_count(files))
        return kn_fail("%s: its config.json describes a model of at least %lld tensors, the files "
                       "have %d",
                       dir, (long long)fewest, kn_pieces_count(files));
    bool ok = kn_config_init(&m, c, KN_F32, KN_META) && kn_model_tensors_make(&t, &m);
    for (int i = 0; ok && i < t.count; i++) {
        const kn_safetensors_entry *e = &t.entry[i];
        const int at = find(c->family, files, e->name);
        const kn_piece *p = at >= 0 ? kn_pieces_tensor(files, at) : NULL;
        char a[128], b[128];
        kn_array want = kn_array_make(NULL, e->dtype, e->ndim, e->shape),
                 got = p ? kn_array_make(NULL, p->dtype, p->ndim, p->shape) : want;
        if (!p)
            ok = kn_fail("%s: the tensor '%s' isn't in its files", dir, e->name);
        else if (p->ndim != e->ndim || !kn_dtype_is_float(p->dtype) ||
                 memcmp(p->shape, e->shape, (size_t)e->ndim * sizeof *e->shape) != 0)
            ok = kn_fail("%s: '%s' is %s, should be %s by its config.json", dir, e->name,
                         kn_array_describe(&got, a, sizeof a),
                         kn_array_describe(&want, b, sizeof b));
    }
    kn_model_tensors_free(&t);
    kn_module_free(&m);
    return ok;
}

/* ---- opening --------------------------------------------------------------------------------- */

static bool read_config(const char *dir, kn_model_config *c)
{
    char path[4096];
    json_t *j =
        kn_pretrained_path(path, dir, "config.json") ? kn_pretrained_config_read(path) : NULL;
    const char *type = json_string_value(json_object_get(j, "model_type"));
    if (!j)
        return false;
    *c = (kn_model_config){ .family = type ? kn_family_typed(KN_LANGUAGE_MODELS, type) : NULL };
    const kn_family *f = c->family;
    bool ok =
        f || kn_fail("%s: the model is %s%.64s; gpt2, llama, mistral, qwen2 and qwen3 are read",
                     path, type ? "a " : "of an unknown kind", type ? type : "");
    ok = ok && (f->import ? f->import(j, path, c->of) && kn_family_check(f, c->of)
                          : kn_config_read(j, path, c));
    json_decref(j);
    return ok;
}

/* "eos_token_id" of a file: a number or a list of them; a file that isn't there says nothing. */
static bool read_ends(kn_imported *x, const char *dir, const char *name)
{
    char path[4096];
    if (x->ends > 0 || !kn_pretrained_path(path, dir, name) || !kn_is_there(path))
        return kn_ok();
    json_t *j = kn_pretrained_config_read(path), *end = json_object_get(j, "eos_token_id");
    const int64_t vocab = (int64_t)kn_config_get(&x->config, "vocab", 0);
    for (size_t i = 0; i < (json_is_array(end) ? json_array_size(end) : 1); i++) {
        const json_t *one = json_is_array(end) ? json_array_get(end, i) : end;
        const json_int_t id = json_integer_value(one);
        if (json_is_integer(one) && id >= 0 && id < vocab && x->ends < MOST_ENDS)
            x->end[x->ends++] = id;
    }
    json_decref(j);
    return j != NULL;
}

static bool open_folder(kn_imported *x, const char *dir)
{
    char path[4096];
    if (!kn_is_there(dir))
        return kn_ok() && kn_fail("there is no folder %s", dir);
    if (kn_pretrained_path(path, dir, "config.json") && !kn_is_there(path))
        return kn_ok() && kn_fail("%s holds no model: it is neither a run's folder nor one with a "
                                  "config.json, as transformers and --export write it",
                                  dir);
    if (!read_config(dir, &x->config) || !read_ends(x, dir, "generation_config.json") ||
        !read_ends(x, dir, "config.json"))
        return false;
    if (!kn_pieces_are_there(dir)) {
        const bool pickled =
            kn_pretrained_path(path, dir, "pytorch_model.bin") && kn_is_there(path);
        return kn_ok() &&
               kn_fail("%s holds no .safetensors%s", dir,
                       pickled ? ": write its pytorch_model.bin again by save_pretrained(dir, "
                                 "safe_serialization=True)"
                               : "");
    }
    kn_pieces *files = kn_pieces_open(dir);
    bool ok =
        files && check_tensors(&x->config, files, dir) && (x->state = kn_state_open(dir)) != NULL;
    kn_pieces_close(files);
    return ok;
}

static bool open_checkpoint(kn_imported *x, const char *dir)
{
    static const char *const ends[] = { "<|endoftext|>", "<|end_of_text|>", "</s>" };
    x->checkpoint = kn_checkpoint_open(dir, x->comm);
    if (!x->checkpoint || !kn_config_saved(x->checkpoint, KN_LANGUAGE_MODELS, &x->config, NULL))
        return false;
    kn_tokenizer *t = kn_import_tokenizer(x);
    if (!t) /* then a text has no end, either */
        kn_clear_error();
    const kn_chat *chat = kn_import_chat(x);
    if (t && chat && (x->end[0] = kn_tokenizer_id(t, chat->stop)) >= 0)
        x->ends = 1;
    for (size_t i = 0; t && i < sizeof ends / sizeof *ends; i++)
        if ((x->end[x->ends] = kn_tokenizer_id(t, ends[i])) >= 0) {
            x->ends += x->ends == 0 || x->end[x->ends] != x->end[0];
            break;
        }
    kn_tokenizer_free(t);
    return kn_ok();
}

kn_imported *kn_import_open_(const char *path, kn_import_open_options o)
{
    if (!kn_given_path(path, "kn_import_open", "the path"))
        return NULL;
    kn_comm *comm = o.comm ? o.comm : kn_world() ? kn_world() : kn_comm_self();
    kn_imported *x = kn_host_calloc(1, sizeof *x);
    if (x) {
        x->comm = comm;
        snprintf(x->dir, sizeof x->dir, "%s", path);
    }
    /* rank 0 says what path is, since a run may change it meanwhile */
    int32_t saved = x && kn_rank(comm) == 0 && kn_run_folder_has_checkpoint(path);
    bool ok =
        kn_agree(comm, x && kn_ok()) &&
        kn_broadcast(comm, &saved, sizeof saved, 0, kn_compute_stream(KN_CPU), "kind of a model") &&
        kn_agree(comm, saved ? open_checkpoint(x, path) : open_folder(x, path));
    if (ok)
        return x;
    kn_import_free(x);
    return NULL;
}

void kn_import_free(kn_imported *x)
{
    if (!x)
        return;
    kn_checkpoint_free(x->checkpoint);
    kn_state_free(x->state);
    kn_host_free(x);
}

/* ---- what it is ------------------------------------------------------------------------------ */

const kn_model_config *kn_import_config(const kn_imported *x)
{
    return &x->config;
}

kn_checkpoint *kn_import_checkpoint(const kn_imported *x)
{
    return x->checkpoint;
}

static const void *config_of(const kn_imported *x, const kn_family *f, const char *what)
{
    return kn_given(x, what, "the model") && x->config.family == f ? x->config.of : NULL;
}

const kn_gpt_config *kn_import_gpt(const kn_imported *x)
{
    return config_of(x, &kn_gpt_family, "kn_import_gpt");
}

const kn_llama_config *kn_import_llama(const kn_imported *x)
{
    return config_of(x, &kn_llama_family, "kn_import_llama");
}

kn_tokenizer *kn_import_tokenizer(const kn_imported *x)
{
    if (!kn_given(x, "kn_import_tokenizer", "the model"))
        return NULL;
    return x->checkpoint ? kn_checkpoint_tokenizer(x->checkpoint) : kn_tokenizer_load(x->dir);
}

const kn_chat *kn_import_chat(const kn_imported *x)
{
    char name[32];
    if (!x->checkpoint)
        return kn_chat_of_folder(x->dir);
    return kn_checkpoint_option(x->checkpoint, "template", name, sizeof name) ? kn_chat_named(name)
                                                                              : NULL;
}

int kn_import_ends(const kn_imported *x, const int64_t **ids)
{
    if (!kn_given(x, "kn_import_ends", "the model") ||
        !kn_given(ids, "kn_import_ends", "the place for the ids"))
        return 0;
    *ids = x->end;
    return x->ends;
}

bool kn_import_load(const kn_imported *x, void *module)
{
    if (!kn_given(x, "kn_import_load", "the model") ||
        !kn_given(module, "kn_import_load", "the module"))
        return false;
    if (x->checkpoint)
        return kn_checkpoint_load(x->checkpoint, module);
    const kn_family *f = x->config.family;
    int count = 0;
    while (f->renames && f->renames[count].from)
        count++;
    /* The head of a model that has none is the token embedding once more. */
    const bool tied =
        !kn_state_has(x->state, "lm_head.weight") || kn_config_get(&x->config, "tied", 1) != 0;
    kn_rename renames[8] = { { "lm_head.weight", tied ? NULL : "lm_head.weight" } };
    for (int i = 0; i < count && i < 7; i++)
        renames[i + 1] = f->renames[i];
    return kn_load_state_dict(module, x->state, .renames = renames, .rename_count = count + 1,
                              .comm = x->comm);
}
