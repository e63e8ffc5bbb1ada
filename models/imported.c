/* models/imported.c: language models of others, by the table of their family: what their
 * config.json says, and as what their tensors are looked for. Formats of one file are in
 * models/formats/. */
#include "models/imported_internal.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/formats/formats.h"
#include "models/model_folder.h"
#include "models/record.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "state/attempt.h"
#include "state/checkpoint_internal.h"
#include "state/dict_internal.h"
#include "tensor/files.h"

#include <stdio.h>
#include <string.h>

enum { MOST_ENDS = 16 };

struct kn_imported {
    char dir[4096];               /* or a file */
    kn_comm *comm;                /* borrowed */
    kn_checkpoint *checkpoint;    /* NULL: the files are another program's */
    const kn_file_format *format; /* of one file; NULL: a folder */
    kn_pieces *files;             /* their tensors; a reference */
    kn_model_config config;
    int64_t end[MOST_ENDS];
    int ends;
    char note[4096 + 256]; /* "": none */
};

/* ---- opening --------------------------------------------------------------------------------- */

static bool read_config(const char *dir, kn_model_config *c)
{
    const kn_path at = kn_path_of(dir, "config.json", "");
    const char *path = at.text;
    json_t *j = kn_model_json(path);
    const char *type = json_string_value(json_object_get(j, "model_type"));
    char types[KN_CHOICES];
    if (!j)
        return false;
    *c = (kn_model_config){ .family = type ? kn_family_typed(KN_LANGUAGE_MODELS, type) : NULL };
    const kn_family *f = c->family;
    const json_t *quantized = json_object_get(j, "quantization_config");
    const char *method = json_string_value(json_object_get(quantized, "quant_method"));
    bool ok =
        !quantized || json_is_null(quantized) ||
        kn_fail("%s: the model's weights are quantized (\"quantization_config\"%s%.60s), which "
                "isn't read; use the model that it was made of, or a GGUF of F16, BF16 or Q8_0",
                path, method ? " by " : "", method ? method : "");
    ok = ok && (f || kn_fail("%s: the model is %s%.64s; these are read: %s", path,
                             type ? "a " : "of an unknown kind", type ? type : "",
                             kn_family_types(KN_LANGUAGE_MODELS, KN_TYPES_THEIRS, types)));
    ok = ok && kn_config_read_theirs(j, path, c);
    json_decref(j);
    return ok;
}

/* "eos_token_id" of a file: a number or a list of them; a file that isn't there says nothing. */
static bool read_ends(kn_imported *x, const char *dir, const char *name)
{
    const kn_path path = kn_path_of(dir, name, "");
    if (x->ends > 0 || !kn_is_there(path.text))
        return kn_ok();
    json_t *j = kn_model_json(path.text), *end = json_object_get(j, "eos_token_id");
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
    if (!kn_is_there(dir))
        return kn_ok() && kn_fail("there is no folder or file %s", dir);
    if (!kn_is_in(dir, "config.json"))
        return kn_ok() && kn_fail("%s holds no model: it is neither a run's folder nor one with a "
                                  "config.json, as transformers and --export write it",
                                  dir);
    if (!read_config(dir, &x->config) || !read_ends(x, dir, "generation_config.json") ||
        !read_ends(x, dir, "config.json"))
        return false;
    if (!kn_pieces_are_there(dir)) {
        const bool pickled = kn_is_in(dir, "pytorch_model.bin");
        return kn_ok() &&
               kn_fail("%s holds no .safetensors%s", dir,
                       pickled ? ": write its pytorch_model.bin again by save_pretrained(dir, "
                                 "safe_serialization=True)"
                               : "");
    }
    x->files = kn_pieces_open(dir);
    return x->files != NULL;
}

static bool open_file(kn_imported *x)
{
    kn_found f = { 0 };
    bool ok = x->format->open(x->dir, &f);
    x->config = f.config;
    x->files = f.tensors;
    memcpy(x->end, f.end, sizeof f.end);
    x->ends = f.ends;
    return ok;
}

/* ---- heads ----------------------------------------------------------------------------------- */

/* Whether tensors a and b of the same shape differ: 1 or 0; -1 with an error. */
static int differ(kn_pieces *files, int a, int b)
{
    enum { MOST = 1 << 16 };
    const kn_piece *p[2] = { kn_pieces_tensor(files, a), kn_pieces_tensor(files, b) };
    const int64_t all = kn_interval_numel(p[0]->part);
    float *x = kn_host_alloc(2 * MOST * sizeof *x);
    void *raw = kn_host_alloc(MOST * 8);
    int result = x && raw ? 0 : -1;
    for (int64_t at = 0, n; result == 0 && at < all; at += n) {
        n = all - at < MOST ? all - at : MOST;
        for (int k = 0; k < 2 && result == 0; k++)
            if (!kn_pieces_read(files, k ? b : a, (kn_interval){ at, n, 1, 0, 0 }, raw) ||
                !kn_state_convert(x + k * MOST, KN_F32, raw, p[k]->dtype, n))
                result = -1;
        if (result == 0 && memcmp(x, x + MOST, (size_t)n * sizeof *x) != 0)
            result = 1;
    }
    kn_host_free(x);
    kn_host_free(raw);
    return result;
}

/* transformers ties a head to the embedding only where the files don't hold another one. */
static bool settle_head(kn_imported *x)
{
    const kn_family *f = x->config.family;
    const int head = kn_pieces_find(x->files, "lm_head.weight"),
              found = kn_pieces_find(x->files, f->embedding);
    const char *bare = f->embedding + (f->optional_prefix ? strlen(f->optional_prefix) : 0);
    const int embedding = found < 0 ? kn_pieces_find(x->files, bare) : found;
    int32_t differs = 0;
    if (head < 0 || embedding < 0 || kn_config_get(&x->config, "tied", 1) == 0)
        return true;
    const kn_piece *a = kn_pieces_tensor(x->files, head),
                   *b = kn_pieces_tensor(x->files, embedding);
    if (a->ndim != 2 || memcmp(a->shape, b->shape, 2 * sizeof *a->shape) != 0 ||
        !kn_dtype_is_float(a->dtype))
        return kn_fail("%s: its 'lm_head.weight' hasn't the shape of its token embedding", x->dir);
    if (kn_rank(x->comm) == 0) /* the others needn't read it */
        differs = differ(x->files, head, embedding);
    if (!kn_agree(x->comm, differs >= 0) ||
        !kn_hosts_broadcast(x->comm, &differs, sizeof differs, 0, "head of a model"))
        return false;
    if (!differs)
        return true;
    if (!kn_family_field(f, "tied"))
        return kn_fail("%s: its 'lm_head.weight' differs from its token embedding, which is the "
                       "head of the %s here",
                       x->dir, f->noun);
    kn_config_set(&x->config, "tied", 0);
    snprintf(x->note, sizeof x->note,
             "%s: it is to be tied, but holds a head of other values: it is read as untied, as "
             "transformers does",
             x->dir);
    return true;
}

static bool open_checkpoint(kn_imported *x, const char *dir)
{
    char own[256];
    x->checkpoint = kn_checkpoint_open(dir, x->comm);
    if (!x->checkpoint || !kn_config_saved(x->checkpoint, KN_LANGUAGE_MODELS, &x->config, NULL))
        return false;
    kn_attempt a;
    char error[KN_ATTEMPT_TEXT];
    kn_attempt_begin(&a);
    kn_tokenizer *t = kn_import_tokenizer(x);
    kn_attempt_end(&a, error); /* without one, a text has no end, either */
    const kn_chat *chat = kn_import_chat(x);
    if (t && chat && (x->end[0] = kn_tokenizer_id(t, chat->stop)) >= 0)
        x->ends = 1;
    const int64_t end = !t ? -1
                        : kn_checkpoint_option(x->checkpoint, "end", own, sizeof own)
                            ? kn_tokenizer_id(t, own)
                            : kn_text_end(t, NULL, 0);
    if (end >= 0 && (x->ends == 0 || end != x->end[0]))
        x->end[x->ends++] = end;
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
    bool ok = kn_agree(comm, x && kn_ok()) &&
              kn_hosts_broadcast(comm, &saved, sizeof saved, 0, "kind of a model");
    if (ok && !saved)
        x->format = kn_file_format_of(x->dir);
    ok = ok && kn_agree(comm, !kn_ok()    ? false
                              : saved     ? open_checkpoint(x, path)
                              : x->format ? open_file(x)
                                          : open_folder(x, path));
    ok = ok && (saved || kn_agree(comm, settle_head(x) &&
                                            kn_model_check(&x->config, x->files, true, x->dir,
                                                           x->format ? "its header gives"
                                                                     : "its config.json gives")));
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
    kn_pieces_close(x->files);
    kn_host_free(x);
}

/* ---- what it is ------------------------------------------------------------------------------ */

const kn_model_config *kn_import_config(const kn_imported *x)
{
    return &x->config;
}

bool kn_import_is_file(const kn_imported *x)
{
    return x->format != NULL;
}

kn_checkpoint *kn_import_checkpoint(const kn_imported *x)
{
    return x->checkpoint;
}

static const void *config_of(const kn_imported *x, const kn_family *f, const char *what)
{
    return kn_given(x, what, "the model") && kn_family_makes(x->config.family, f) ? x->config.of
                                                                                  : NULL;
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
    return x->checkpoint ? kn_checkpoint_tokenizer(x->checkpoint)
           : x->format   ? x->format->tokenizer(x->dir)
                         : kn_tokenizer_load(x->dir);
}

const char *kn_import_note(const kn_imported *x)
{
    return kn_given(x, "kn_import_note", "the model") && *x->note ? x->note : NULL;
}

const kn_chat *kn_import_chat(const kn_imported *x)
{
    char name[32];
    if (x->format) {
        char *jinja = x->format->jinja ? x->format->jinja(x->dir) : NULL;
        const kn_chat *c = jinja ? kn_chat_known(jinja, x->dir) : NULL;
        kn_host_free(jinja);
        return c;
    }
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
    return x->checkpoint ? kn_checkpoint_load(x->checkpoint, module)
                         : kn_model_load(&x->config, module, x->files, x->dir, false, x->comm);
}
