/* models/formats/gguf_model.c: a language model in a GGUF, by the table of its family: the values
 * become the object of a config.json, which the family reads; and back. */
#include "kernels/error_internal.h"
#include "models/formats/formats.h"
#include "models/formats/gguf.h"
#include "models/llama.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char OWN[] = "knap.config"; /* the first key of a file that Knap wrote: its sizes */
static const char ROPE[] = "rope_freqs.weight";
enum { ALIGNMENT = 32 };

/* ---- the configuration ----------------------------------------------------------------------- */

/* The value of "architecture.key"; NULL, without an error: there is none. */
static const kn_gguf_value *value_of(const kn_gguf *g, const char *arch, const char *key)
{
    char name[128];
    snprintf(name, sizeof name, "%s.%s", arch, key);
    return kn_gguf_find(g, name);
}

/* What llama.cpp computes by these values and no model here does. */
static bool check_values(const kn_gguf *g, const char *arch)
{
    static const char *const absent[] = { "expert_count", "rope.scaling.factor",
                                          "rope.scale_linear" };
    size_t length = 0;
    const char *scaling = kn_gguf_text(g, value_of(g, arch, "rope.scaling.type"), &length);
    if (scaling && !(length == 4 && memcmp(scaling, "none", 4) == 0))
        return kn_fail("%s: its '%s.rope.scaling.type' is %.*s, which the model here doesn't "
                       "compute",
                       g->path, arch, (int)(length < 60 ? length : 60), scaling);
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        const double x = kn_gguf_number(g, value_of(g, arch, absent[i]), 0);
        if (!isnan(x) && x != 0 && !(i > 0 && x == 1))
            return kn_fail("%s: its '%s.%s' is %g, which the model here doesn't compute", g->path,
                           arch, absent[i], x);
    }
    return true;
}

static bool copy_keys(const kn_gguf *g, const kn_family *f, const char *arch, json_t *object)
{
    static const char *const required[] = { "block_count", "attention.head_count",
                                            "embedding_length", "context_length" };
    for (const kn_key_name *k = f->keys; k->key; k++) {
        const kn_gguf_value *v = value_of(g, arch, k->gguf);
        json_t *j = v ? kn_gguf_json(g, v) : NULL;
        for (int i = 0; !v && i < 4; i++)
            if (strcmp(k->gguf, required[i]) == 0)
                return kn_fail("%s lacks '%s.%s'", g->path, arch, k->gguf);
        if (v && !json_is_number(j)) {
            json_decref(j);
            return kn_fail("%s: its '%s.%s' isn't one number, which the model here needs", g->path,
                           arch, k->gguf);
        }
        if (j && json_object_set_new(object, k->key, j) != 0)
            return kn_fail_memory("%s", g->path);
    }
    return true;
}

/* The object of a config.json that says the same; NULL with an error. */
static json_t *config_json(const kn_gguf *g, const kn_family *f, const char *arch)
{
    const kn_gguf_tensor *embedding = kn_gguf_tensor_of(g, "token_embd.weight");
    if (!embedding || embedding->ndim != 2)
        return kn_fail_null("%s has no 'token_embd.weight' of two dims", g->path);
    const bool tied = kn_family_makes(f, &kn_gpt_family) || !kn_gguf_tensor_of(g, "output.weight");
    json_t *j =
        json_pack("{s:s, s:I, s:b}", "model_type", strcmp(arch, "mistral") == 0 ? "llama" : arch,
                  "vocab_size", (json_int_t)embedding->shape[0], "tie_word_embeddings", tied);
    if (j && check_values(g, arch) && copy_keys(g, f, arch, j))
        return j;
    json_decref(j);
    return kn_ok() ? kn_fail_memory("%s", g->path), NULL : NULL;
}

/* ---- rope ------------------------------------------------------------------------------------ */

/* By what Llama 3's scaling divides frequency i of a head (its reference code, model.py). */
static double divisor(const kn_llama_config *c, int64_t i)
{
    const kn_rope_scaling *s = &c->rope_scaling;
    const double wave = 2 * M_PI * pow(c->rope_base, 2 * (double)i / (double)c->head_dim),
                 ratio = (double)s->original_ctx / wave;
    if (ratio >= s->high_freq_factor || s->factor == 0)
        return 1;
    if (ratio <= s->low_freq_factor)
        return s->factor;
    const double smooth = (ratio - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return 1 / ((1 - smooth) / s->factor + smooth);
}

/* The scaling that Knap's own file tells, or Llama 3's. */
static bool scaling_of(const kn_gguf *g, const kn_family *f, double factor, kn_rope_scaling *s)
{
    size_t length;
    json_error_t e;
    const char *own = kn_gguf_text(g, kn_gguf_find(g, OWN), &length);
    kn_model_config c = { .family = f };
    *s = (kn_rope_scaling){ factor, 1, 4, 8192 };
    json_t *j = own ? kn_json_parse(own, length, JSON_REJECT_DUPLICATES, g->path, &e) : NULL;
    if (j && kn_config_read(j, g->path, &c))
        *s = ((kn_llama_config *)(void *)c.of)->rope_scaling;
    json_decref(j);
    return kn_ok();
}

/* The divisors in the file must be those of a scaling that the Llama here computes. */
static bool read_rope(const kn_gguf *g, const kn_family *f, kn_llama_config *c)
{
    const kn_gguf_tensor *t = kn_gguf_tensor_of(g, ROPE);
    const int64_t count = c->head_dim / 2;
    if (!t)
        return true;
    if (t->ndim != 1 || t->shape[0] != count || t->type != KN_GGML_F32)
        return kn_fail("%s: '%s' isn't of %lld numbers of f32, one for each frequency", g->path,
                       ROPE, (long long)count);
    float *x = kn_host_alloc((size_t)count * sizeof *x), most = 0;
    const ssize_t bytes = count * (ssize_t)sizeof *x;
    bool ok = x != NULL, same = true;
    if (ok && kn_read_at(g->fd, x, (size_t)bytes, t->at) != bytes)
        ok = kn_fail("%s: '%s' ends behind the end of the file", g->path, ROPE);
    for (int64_t i = 0; ok && i < count; i++)
        most = x[i] > most ? x[i] : most;
    if (ok && most != 1)
        ok = scaling_of(g, f, most, &c->rope_scaling) && kn_family_check(f, c);
    for (int64_t i = 0; ok && i < count; i++)
        same = same && fabs(x[i] / divisor(c, i) - 1) < 1e-4;
    kn_host_free(x);
    return ok && (same || kn_fail("%s: the divisors of its '%s' aren't those of Llama 3's scaling "
                                  "of rope, which is what the Llama here computes",
                                  g->path, ROPE));
}

/* Sizes of a Llama's heads. */
static const char *const head_keys[] = { "attention.value_length", "rope.dimension_count" };

/* Heads that rotate in part, or have values of another size. */
static bool check_heads(const kn_gguf *g, const char *arch, const kn_llama_config *c)
{
    for (int i = 0; i < 2; i++) {
        const double x = kn_gguf_number(g, value_of(g, arch, head_keys[i]), 0);
        if (!isnan(x) && x != (double)c->head_dim)
            return kn_fail("%s: its '%s.%s' is %g, and its heads are of %lld, which the Llama here "
                           "doesn't compute",
                           g->path, arch, head_keys[i], x, (long long)c->head_dim);
    }
    return true;
}

static bool read_config(const kn_gguf *g, const char *arch, kn_model_config *c)
{
    const kn_family *f = c->family = kn_family_typed(KN_LANGUAGE_MODELS, arch);
    char types[KN_CHOICES];
    if (!f || !f->keys)
        return kn_fail("%s: the model is of the architecture '%.60s'; these are read: %s", g->path,
                       arch, kn_family_types(KN_LANGUAGE_MODELS, KN_TYPES_GGUF, types));
    json_t *j = config_json(g, f, arch);
    bool ok = j && kn_config_read_theirs(j, g->path, c);
    json_decref(j);
    kn_llama_config *llama = (kn_llama_config *)(void *)c->of;
    return ok && (!kn_family_makes(f, &kn_llama_family) ||
                  (check_heads(g, arch, llama) && read_rope(g, f, llama)));
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* How a row of the table lies in a file of this architecture. */
static void set_form(kn_piece_form *form, const kn_tensor_name *row, const char *arch,
                     const kn_model_config *c)
{
    const bool neighbours = strcmp(arch, "llama") == 0 || strcmp(arch, "mistral") == 0;
    form->transposed = row->form == KN_FORM_TRANSPOSED;
    if (row->form == KN_FORM_HEADS && neighbours)
        form->head = (int64_t)kn_config_get(c, "head-dim", 0);
}

/* The piece for a tensor of the module. */
static bool take(const kn_gguf *g, const char *arch, const kn_model_config *c, const char *name,
                 kn_foreign_piece *piece)
{
    char there[256];
    const kn_tensor_name *row = kn_tensor_name_of(c->family, name, there);
    const kn_gguf_tensor *t = row ? kn_gguf_tensor_of(g, there) : NULL;
    if (!t)
        return kn_fail("%s: the tensor '%s' isn't in it, which the model needs", g->path,
                       row ? there : name);
    if (!kn_gguf_piece(g, t, name, piece))
        return false;
    set_form(&piece->form, row, arch, c);
    int64_t *s = piece->piece.shape, bytes;
    if (piece->form.transposed && t->ndim == 2) {
        const int64_t first = s[0];
        s[0] = s[1];
        s[1] = first;
    }
    return kn_foreign_bytes(piece, &bytes) ||
           kn_fail("%s: the tensor '%s' hasn't the shape of a weight of the model", g->path, there);
}

/* Tensors of the file that no tensor of the model is. */
static bool check_others(const kn_gguf *g, const kn_foreign_piece *list, int count, bool rope)
{
    int64_t known = count + (rope && kn_gguf_tensor_of(g, ROPE));
    for (int64_t i = 0; known < g->tensors && i < g->tensors; i++) {
        bool found = rope && strcmp(g->tensor[i].name, ROPE) == 0;
        for (int k = 0; !found && k < count; k++)
            found = list[k].at == g->tensor[i].at;
        if (!found)
            return kn_fail("%s: its tensor '%.200s' isn't of the model that its values describe",
                           g->path, g->tensor[i].name);
    }
    return true;
}

static kn_pieces *open_tensors(const kn_gguf *g, const char *arch, const kn_model_config *c)
{
    kn_model_tensors t = { 0 };
    kn_pieces *p = NULL;
    const int64_t fewest = c->family->fewest_tensors(c->of);
    if (fewest > g->tensors)
        return kn_fail_null("%s: its values describe a model of at least %lld tensors, and it has "
                            "%lld",
                            g->path, (long long)fewest, (long long)g->tensors);
    const bool made = kn_model_tensors_of(&t, c);
    /* a head beside that of a tied model is compared with it when the model is opened */
    const kn_gguf_tensor *head = kn_gguf_tensor_of(g, "output.weight");
    kn_foreign_piece *list = made ? kn_host_calloc((size_t)t.count + 1, sizeof *list) : NULL;
    int count = 0;
    bool ok = list != NULL, has_head = false;
    for (; ok && count < t.count; count++) {
        ok = take(g, arch, c, t.entry[count].name, &list[count]);
        has_head = has_head || strcmp(t.entry[count].name, "lm_head.weight") == 0;
    }
    if (ok && head && !has_head)
        ok = kn_gguf_piece(g, head, "lm_head.weight", &list[count++]);
    if (ok && check_others(g, list, count, kn_family_makes(c->family, &kn_llama_family)))
        p = kn_pieces_of(g->path, &g->seen, list, count);
    kn_host_free(list);
    kn_model_tensors_free(&t);
    return p;
}

/* ---- opening --------------------------------------------------------------------------------- */

static void read_ends(const kn_gguf *g, kn_found *f)
{
    static const char *const keys[] = { "tokenizer.ggml.eos_token_id",
                                        "tokenizer.ggml.eot_token_id" };
    const double vocab = kn_config_get(&f->config, "vocab", 0);
    for (int i = 0; i < 2; i++) {
        const double id = kn_gguf_number_at(g, keys[i]);
        if (id >= 0 && id < vocab && (f->ends == 0 || f->end[0] != (int64_t)id))
            f->end[f->ends++] = (int64_t)id;
    }
}

static bool open_gguf(const char *path, kn_found *f)
{
    kn_gguf g = { 0 };
    size_t length = 0;
    char arch[64] = "";
    bool ok = kn_gguf_open(&g, path);
    const char *text =
        ok ? kn_gguf_text(&g, kn_gguf_find(&g, "general.architecture"), &length) : NULL;
    if (ok && (!text || length >= sizeof arch || memchr(text, 0, length)))
        ok = kn_fail("%s doesn't say which architecture its model has", path);
    if (ok)
        memcpy(arch, text, length);
    if (ok && read_config(&g, arch, &f->config)) {
        f->tensors = open_tensors(&g, arch, &f->config);
        read_ends(&g, f);
    }
    kn_gguf_close(&g);
    return f->tensors != NULL;
}

/* ---- writing --------------------------------------------------------------------------------- */

static uint32_t type_of(kn_dtype t)
{
    return t == KN_F16 ? KN_GGML_F16 : t == KN_BF16 ? KN_GGML_BF16 : KN_GGML_F32;
}

/* Vectors and positions are of f32, as llama.cpp needs them. */
static kn_dtype dtype_of(const kn_safetensors_entry *e, const kn_file_writer *o)
{
    return e->ndim < 2 || strstr(e->name, ".wpe.") || !o->dtype ? KN_F32 : o->dtype;
}

/* Writes the values that the object of a config.json has. */
static void put_config(kn_gguf_out *o, const kn_family *f, const char *arch, const json_t *j)
{
    char key[128];
    for (const kn_key_name *k = f->keys; k->key; k++) {
        const json_t *v = json_object_get(j, k->key);
        const float x = (float)json_number_value(v);
        snprintf(key, sizeof key, "%s.%s", arch, k->gguf);
        if (json_is_integer(v))
            kn_gguf_put_u32(o, key, json_integer_value(v));
        else if (json_is_real(v)) {
            kn_gguf_key(o, key, KN_GGUF_F32);
            kn_gguf_bytes(o, &x, sizeof x);
        }
    }
}

static void put_tokens(kn_gguf_out *o, const kn_file_writer *e)
{
    if (e->begin >= 0)
        kn_gguf_put_u32(o, "tokenizer.ggml.bos_token_id", e->begin);
    if (e->end_count > 0)
        kn_gguf_put_u32(o, "tokenizer.ggml.eos_token_id", e->ends[0]);
    if (e->end_count > 1)
        kn_gguf_put_u32(o, "tokenizer.ggml.eot_token_id", e->ends[1]);
    if (e->tokenizer)
        kn_gguf_put_tokenizer(o, e->tokenizer);
    if (e->tokenizer && e->jinja)
        kn_gguf_put_text(o, KN_GGUF_JINJA, e->jinja);
}

/* All values, with their number at its place. */
static bool put_values(kn_gguf_out *o, const kn_model_config *c, const kn_file_writer *e,
                       char arch[64])
{
    char key[128];
    const kn_family *f = c->family;
    json_t *own = kn_config_json(c), *j = kn_config_json_theirs(c);
    char *text = own && j ? kn_json_text(own, JSON_COMPACT, "a configuration") : NULL;
    if (text) {
        snprintf(arch, 64, "%s", json_string_value(json_object_get(j, "model_type")));
        if (strcmp(arch, "mistral") == 0)
            snprintf(arch, 64, "llama"); /* a Llama with a window */
        kn_gguf_put_text(o, OWN, text);
        kn_gguf_put_text(o, "general.architecture", arch);
        kn_gguf_put_text(o, "general.type", "model");
        kn_gguf_put_u32(o, "general.file_type",
                        e->dtype == KN_F16    ? 1
                        : e->dtype == KN_BF16 ? 32
                                              : 0);
        json_object_update_missing(j, own);
        put_config(o, f, arch, j);
        snprintf(key, sizeof key, "%s.vocab_size", arch);
        kn_gguf_put_u32(o, key, (int64_t)kn_config_get(c, "vocab", 0));
        for (int i = 0; kn_family_makes(f, &kn_llama_family) && i < 2; i++) {
            snprintf(key, sizeof key, "%s.%s", arch, head_keys[i]);
            kn_gguf_put_u32(o, key, (int64_t)kn_config_get(c, "head-dim", 0));
        }
        put_tokens(o, e);
    } else if (kn_ok())
        kn_fail_memory("the header of a GGUF");
    kn_host_free(text);
    json_decref(j);
    json_decref(own);
    return kn_ok() && !o->failed;
}

/* A tensor's line; *at: where the next one begins. */
static void put_tensor(kn_gguf_out *o, const char *name, int ndim, const int64_t *shape, bool swap,
                       uint32_t type, int64_t bytes, int64_t *at)
{
    kn_gguf_string(o, name, strlen(name));
    kn_gguf_u32(o, (uint32_t)ndim);
    for (int d = ndim - 1; d >= 0; d--)
        kn_gguf_u64(o, (uint64_t)shape[swap ? ndim - 1 - d : d]);
    kn_gguf_u32(o, type);
    kn_gguf_u64(o, (uint64_t)*at);
    *at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static bool put_tensors(kn_gguf_out *o, kn_file_plan *p, const kn_model_config *c,
                        const kn_model_tensors *t, const char *arch, const kn_file_writer *e,
                        int64_t *at)
{
    char there[256];
    for (int i = 0; i < t->count; i++) {
        const kn_safetensors_entry *x = &t->entry[i];
        const kn_tensor_name *row = kn_tensor_name_of(c->family, x->name, there);
        if (!row)
            return kn_fail("kn_export: GGUF has no name for the tensor '%s'", x->name);
        struct kn_planned *w = &p->tensor[i];
        w->dtype = dtype_of(x, e);
        set_form(&w->form, row, arch, c);
        int64_t bytes = (int64_t)kn_dtype_size(w->dtype);
        for (int d = 0; d < x->ndim; d++)
            bytes *= x->shape[d];
        w->zeros = (ALIGNMENT - bytes % ALIGNMENT) % ALIGNMENT;
        put_tensor(o, there, x->ndim, x->shape, w->form.transposed, type_of(w->dtype), bytes, at);
    }
    return true;
}

static bool plan(kn_file_plan *p, const kn_file_writer *e, const kn_model_tensors *t)
{
    const kn_model_config *c = e->config;
    kn_gguf_out o = { 0 }, counts = { 0 };
    const bool makes = kn_family_makes(c->family, &kn_llama_family);
    const kn_llama_config *llama = makes ? (const void *)c->of : NULL;
    const bool scaled = llama && llama->rope_scaling.factor != 0;
    const int64_t pairs = scaled ? llama->head_dim / 2 : 0, size = pairs * 4;
    char arch[64];
    int64_t at = 0;
    if (e->dtype && e->dtype != KN_F32 && e->dtype != KN_F16 && e->dtype != KN_BF16)
        return kn_fail("kn_export: a GGUF is of f32, f16 or bf16, not %s", kn_dtype_name(e->dtype));
    p->tensor = kn_host_calloc((size_t)t->count + 1, sizeof *p->tensor);
    bool ok = p->tensor && put_values(&o, c, e, arch);
    if (ok && scaled) /* they lie in front of the others */
        put_tensor(&o, ROPE, 1, &pairs, false, KN_GGML_F32, size, &at);
    ok = ok && put_tensors(&o, p, c, t, arch, e, &at);
    kn_gguf_bytes(&counts, "GGUF", 4);
    kn_gguf_u32(&counts, 3);
    kn_gguf_u64(&counts, (uint64_t)t->count + scaled);
    kn_gguf_u64(&counts, o.values);
    if (ok)
        kn_gguf_bytes(&counts, o.bytes, (size_t)o.used);
    while (ok && !counts.failed && counts.used % ALIGNMENT)
        kn_gguf_bytes(&counts, "", 1);
    for (int64_t i = 0; ok && i < pairs; i++) {
        const float x = (float)divisor(llama, i);
        kn_gguf_bytes(&counts, &x, sizeof x);
    }
    while (ok && !counts.failed && counts.used % ALIGNMENT)
        kn_gguf_bytes(&counts, "", 1);
    kn_host_free(o.bytes);
    p->header = counts.bytes;
    p->size = counts.used;
    return ok && !o.failed && !counts.failed;
}

const kn_file_format kn_gguf_format = { .name = "gguf",
                                        .file = "model.gguf",
                                        .magic = "GGUF",
                                        .mark = OWN,
                                        .mark_at = 4 + 4 + 8 + 8 + 8,
                                        .open = open_gguf,
                                        .tokenizer = kn_gguf_tokenizer,
                                        .jinja = kn_gguf_jinja,
                                        .plan = plan };
