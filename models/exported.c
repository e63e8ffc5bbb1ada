/* models/exported.c: language models for other programs. Of transformers, the family's table says
 * what its config.json has, and which tensors; formats of one file are in models/formats/. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/formats/formats.h"
#include "models/imported_internal.h"
#include "models/model_folder.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <string.h>

/* The id that ends a text, and the one that begins it, which may be the same; -1: none is known. */
static int64_t end_id(const kn_export_options *o)
{
    return o->end_count > 0 ? o->ends[0] : -1;
}

static int64_t begin_id(const kn_export_options *o)
{
    const int64_t *prefix;
    return o->tokenizer && kn_tokenizer_prefix(o->tokenizer, &prefix) > 0 ? prefix[0] : end_id(o);
}

/* Of several a list. */
static json_t *ids_json(const int64_t *id, int count)
{
    json_t *list = json_array();
    for (int i = 0; i < count; i++)
        json_array_append_new(list, json_integer(id[i]));
    if (count > 1)
        return list;
    json_decref(list);
    return count > 0 && *id >= 0 ? json_integer(*id) : json_null();
}

/* Sets key to the text of the token. */
static void set_token(json_t *j, const char *key, const kn_tokenizer *t, int64_t id)
{
    const char *text;
    if (id < 0 || id >= kn_tokenizer_vocab(t))
        return;
    const size_t length = kn_tokenizer_piece(t, id, &text);
    json_object_set_new(j, key, json_stringn(text, length));
}

/* The text of config.json, for kn_host_free; NULL with an error. */
static char *config_text(const kn_model_config *c, const kn_export_options *o)
{
    const kn_family *f = c->family;
    const int64_t begin = begin_id(o);
    const char *type = o->dtype == KN_BF16  ? "bfloat16"
                       : o->dtype == KN_F16 ? "float16"
                       : o->dtype == KN_F64 ? "float64"
                                            : "float32";
    json_t *own = kn_config_json(c), *j = kn_config_json_theirs(c);
    /* both names of the dtype: versions 4 and 5 */
    json_t *more =
        json_pack("{s:[s], s:s, s:s, s:o, s:o, s:o}", "architectures", f->architecture,
                  "torch_dtype", type, "dtype", type, "bos_token_id", ids_json(&begin, 1),
                  "eos_token_id", ids_json(o->ends, o->end_count), "knap", own);
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
    set_token(j, "eos_token", t, end_id(o));
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
    const kn_file_format *f;
    const char *other = own && kn_is_in(dir, KN_MODEL_FILE) ? KN_MODEL_FILE : NULL;
    for (int i = 0; !other && (f = kn_file_format_at(i)); i++)
        other = f != own && kn_is_in(dir, f->file) ? f->file : NULL;
    return kn_ok() && (!other || kn_fail("%s holds a %s, an export of another format; choose "
                                         "another folder",
                                         dir, other));
}

bool kn_language_save(const char *dir, void *module, const kn_model_config *c, kn_export_options o)
{
    kn_comm *comm = o.comm ? o.comm : kn_world() ? kn_world() : kn_comm_self();
    const int64_t own = o.tokenizer ? kn_tokenizer_id(o.tokenizer, KN_END_TOKEN) : -1;
    if (o.end_count == 0 && own >= 0)
        o.ends = &own, o.end_count = 1;
    const kn_file_writer file = { .format = kn_file_format_at((int)o.format - 1),
                                  .config = c,
                                  .tokenizer = o.tokenizer,
                                  .begin = begin_id(&o),
                                  .ends = o.ends,
                                  .end_count = o.end_count,
                                  .jinja = o.chat ? kn_chat_named(o.chat)->jinja : NULL,
                                  .ema = o.ema,
                                  .dtype = o.dtype };
    if (!kn_agree(comm, kn_rank(comm) != 0 || holds_no_other(dir, file.format)))
        return false;
    char *text = file.format ? NULL : config_text(c, &o);
    const kn_model_saving how = { "kn_export", text,  file.format ? &file : NULL,
                                  comm,        o.ema, o.dtype };
    const bool ok = kn_model_save(dir, module, c, how);
    kn_host_free(text);
    if (file.format)
        return ok;
    return ok && kn_agree(comm, !o.tokenizer || kn_rank(comm) != 0 ||
                                    write_tokenizer(dir, &o, (int64_t)kn_config_get(c, "ctx", 0)));
}

bool kn_export_(const char *dir, void *module, kn_export_options o)
{
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
    kn_model_config c =
        o.gpt ? kn_config_of(&kn_gpt_family, o.gpt) : kn_config_of(&kn_llama_family, o.llama);
    return kn_family_check(c.family, c.of) && kn_language_save(dir, module, &c, o);
}
