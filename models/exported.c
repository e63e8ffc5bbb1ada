/* models/exported.c: language models for other programs. Of transformers, the family's table says
 * what its config.json has, and which tensors; formats of one file are in models/formats/. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/formats/formats.h"
#include "models/imported_internal.h"
#include "models/pretrained_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <string.h>

/* The ids that end a text, and the one that begins it: a number or a list; null where none is
 * known. */
static json_t *end_ids(const kn_export_options *o)
{
    const int64_t own = o->tokenizer ? kn_tokenizer_id(o->tokenizer, "<|endoftext|>") : -1;
    if (o->end_count == 0)
        return own < 0 ? json_null() : json_integer(own);
    if (o->end_count == 1)
        return json_integer(o->ends[0]);
    json_t *list = json_array();
    for (int i = 0; i < o->end_count; i++)
        json_array_append_new(list, json_integer(o->ends[i]));
    return list;
}

static json_t *begin_id(const kn_export_options *o)
{
    const int64_t *prefix;
    if (o->tokenizer && kn_tokenizer_prefix(o->tokenizer, &prefix) > 0)
        return json_integer(prefix[0]);
    json_t *ends = end_ids(o);
    json_t *first = json_is_array(ends) ? json_incref(json_array_get(ends, 0)) : json_incref(ends);
    json_decref(ends);
    return first;
}

/* Sets key to the text of the token id, a number or the first of a list. Takes id over. */
static void set_token(json_t *j, const char *key, const kn_tokenizer *t, json_t *id)
{
    const json_t *one = json_is_array(id) ? json_array_get(id, 0) : id;
    const char *text;
    const int64_t n = json_integer_value(one);
    if (json_is_integer(one) && n >= 0 && n < kn_tokenizer_vocab(t)) {
        const size_t length = kn_tokenizer_piece(t, n, &text);
        json_object_set_new(j, key, json_stringn(text, length));
    }
    json_decref(id);
}

/* The text of config.json, for kn_host_free; NULL with an error. */
static char *config_text(const kn_model_config *c, const kn_export_options *o, kn_dtype dtype)
{
    static const struct {
        kn_dtype dtype;
        const char *name;
    } types[] = {
        { KN_F32, "float32" }, { KN_BF16, "bfloat16" }, { KN_F16, "float16" }, { KN_F64, "float64" }
    };
    const kn_family *f = c->family;
    const char *type = "float32";
    json_t *own = kn_config_json(c), *j = kn_config_json_theirs(c);
    for (int i = 0; i < 4; i++)
        type = types[i].dtype == dtype ? types[i].name : type;
    /* both names of the dtype: versions 4 and 5 */
    json_t *more = json_pack("{s:[s], s:s, s:s, s:o, s:o, s:o}", "architectures", f->architecture,
                             "torch_dtype", type, "dtype", type, "bos_token_id", begin_id(o),
                             "eos_token_id", end_ids(o), "knap", own);
    bool ok = own && j && more && json_object_update_missing(j, more) == 0;
    json_decref(more);
    if (ok)
        return kn_json_copy(j, JSON_INDENT(2), "config.json");
    json_decref(j);
    if (kn_ok())
        kn_fail_memory("config.json");
    return NULL;
}

/* Its own file, and what makes transformers take it as it is. */
static bool write_tokenizer(const char *dir, const kn_export_options *o, int64_t ctx)
{
    json_t *j = json_pack("{s:s, s:I}", "tokenizer_class", "PreTrainedTokenizerFast",
                          "model_max_length", (json_int_t)ctx);
    const kn_tokenizer *t = o->tokenizer;
    set_token(j, "bos_token", t, begin_id(o));
    set_token(j, "eos_token", t, end_ids(o));
    if (o->chat)
        json_object_set_new(j, "chat_template", json_string(kn_chat_named(o->chat)->jinja));
    char *text = kn_json_copy(j, JSON_INDENT(2), "tokenizer_config.json");
    bool ok =
        text && kn_tokenizer_save(t, kn_path_of(dir, "tokenizer.json", "").text) &&
        kn_file_write(kn_path_of(dir, "tokenizer_config.json", "").text,
                      (const void *const[]){ text, "\n" }, (const size_t[]){ strlen(text), 1 }, 2);
    kn_host_free(text);
    return ok;
}

/* A folder holds one export: a file of another format there would be read in its place. */
static bool holds_no_other(const char *dir, const kn_file_format *own)
{
    const kn_file_format *f = NULL;
    for (int i = -1; i < 0 || (f = kn_file_format_at(i)); i++) {
        const char *file = i < 0 ? "model.safetensors" : f->file;
        if ((i < 0 ? own != NULL : f != own) && kn_is_there(kn_path_of(dir, file, "").text))
            return kn_fail("%s holds a %s, an export of another format; choose another folder", dir,
                           file);
    }
    return kn_ok();
}

bool kn_language_save(const char *dir, void *module, const kn_model_config *c, kn_export_options o)
{
    kn_comm *comm = o.comm ? o.comm : kn_world() ? kn_world() : kn_comm_self();
    const kn_pretrained_save_options how = { .comm = comm, .ema = o.ema, .dtype = o.dtype };
    const kn_file_writer file = { .base = kn_file_in_folder,
                                  .format = kn_file_format_at((int)o.format - 1),
                                  .config = c,
                                  .tokenizer = o.tokenizer,
                                  .ends = o.ends,
                                  .end_count = o.end_count,
                                  .jinja = o.chat ? kn_chat_named(o.chat)->jinja : NULL,
                                  .ema = o.ema,
                                  .dtype = o.dtype };
    if (!kn_agree(comm, kn_rank(comm) != 0 || holds_no_other(dir, file.format)))
        return false;
    if (file.format)
        return kn_model_save(dir, module, c, NULL, &file.base, "kn_export", how);
    char *text = config_text(c, &o, o.dtype ? o.dtype : KN_F32);
    bool ok =
        kn_agree(comm, text != NULL) && kn_model_save(dir, module, c, text, NULL, "kn_export", how);
    kn_host_free(text);
    return ok && kn_agree(comm, !o.tokenizer || kn_rank(comm) != 0 ||
                                    write_tokenizer(dir, &o, (int64_t)kn_config_get(c, "ctx", 0)));
}

bool kn_export_(const char *dir, void *module, kn_export_options o)
{
    kn_model_config c = { 0 };
    if (!kn_given_path(dir, "kn_export", "the folder") ||
        !kn_given(module, "kn_export", "the module"))
        return false;
    if (o.end_count < 0 || (o.end_count > 0 && !o.ends))
        return kn_fail("kn_export: .end_count is %d; give as many .ends", o.end_count);
    if (o.format != KN_EXPORT_HF && !kn_file_format_at((int)o.format - 1))
        return kn_fail("kn_export: .format is %d, none of kn_export_format", (int)o.format);
    if (o.chat && !kn_chat_named(o.chat))
        return kn_fail("kn_export: no template '%.100s'; there are " KN_CHATS, o.chat);
    if (!o.gpt == !o.llama)
        return kn_fail("kn_export: give one of .gpt and .llama, the module's sizes");
    c.family = o.gpt ? &kn_gpt_family : &kn_llama_family;
    memcpy(c.of, o.gpt ? (const void *)o.gpt : o.llama, c.family->size);
    return kn_family_check(c.family, c.of) && kn_language_save(dir, module, &c, o);
}
