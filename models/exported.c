/* models/exported.c: language models for transformers: the family's table says what its config.json
 * has, and which tensors. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/imported_internal.h"
#include "models/pretrained_internal.h"
#include "tensor/json.h"

#include <string.h>

static const char END[] = "<|endoftext|>";

/* The id of the end of a text, as JSON. */
static json_t *end_id(const kn_tokenizer *t)
{
    const int64_t id = t ? kn_tokenizer_id(t, END) : -1;
    return id < 0 ? json_null() : json_integer(id);
}

/* The text of config.json, for kn_host_free; NULL with an error. */
static char *config_text(const kn_model_config *c, const kn_tokenizer *t, kn_dtype dtype)
{
    static const struct {
        kn_dtype dtype;
        const char *name;
    } types[] = {
        { KN_F32, "float32" }, { KN_BF16, "bfloat16" }, { KN_F16, "float16" }, { KN_F64, "float64" }
    };
    const kn_family *f = c->family;
    const char *type = "float32";
    json_t *own = kn_config_json(c), *j = own ? json_deep_copy(own) : NULL;
    for (int i = 0; i < 4; i++)
        type = types[i].dtype == dtype ? types[i].name : type;
    /* both names of the dtype: versions 4 and 5 */
    json_t *more = json_pack("{s:[s], s:s, s:s, s:o, s:o, s:o}", "architectures", f->architecture,
                             "torch_dtype", type, "dtype", type, "bos_token_id", end_id(t),
                             "eos_token_id", end_id(t), "knap", own);
    bool ok = j && more && json_object_update(j, more) == 0 && f->export(j, c->of);
    json_decref(more);
    if (ok)
        return kn_json_copy(j, JSON_INDENT(2), "config.json");
    json_decref(j);
    if (kn_ok())
        kn_fail_memory("config.json");
    return NULL;
}

/* Its own file, and what makes transformers take it as it is. */
static bool write_tokenizer(const char *dir, const kn_tokenizer *t, int64_t ctx)
{
    char path[4096];
    json_t *j = json_pack("{s:s, s:I}", "tokenizer_class", "PreTrainedTokenizerFast",
                          "model_max_length", (json_int_t)ctx);
    if (kn_tokenizer_id(t, END) >= 0) {
        json_object_set_new(j, "bos_token", json_string(END));
        json_object_set_new(j, "eos_token", json_string(END));
    }
    char *text = kn_json_copy(j, JSON_INDENT(2), "tokenizer_config.json");
    bool ok = text && kn_pretrained_path(path, dir, "tokenizer.json") &&
              kn_tokenizer_save(t, path) &&
              kn_pretrained_path(path, dir, "tokenizer_config.json") &&
              kn_file_write(path, (const void *const[]){ text, "\n" },
                            (const size_t[]){ strlen(text), 1 }, 2);
    kn_host_free(text);
    return ok;
}

bool kn_language_save(const char *dir, void *module, const kn_model_config *c, kn_export_options o)
{
    kn_comm *comm = o.comm ? o.comm : kn_world() ? kn_world() : kn_comm_self();
    char *text = config_text(c, o.tokenizer, o.dtype ? o.dtype : KN_F32);
    bool ok =
        kn_agree(comm, text != NULL) &&
        kn_model_save(dir, module, c, text, "kn_export",
                      (kn_pretrained_save_options){ .comm = comm, .ema = o.ema, .dtype = o.dtype });
    kn_host_free(text);
    return ok && kn_agree(comm, !o.tokenizer || kn_rank(comm) != 0 ||
                                    write_tokenizer(dir, o.tokenizer,
                                                    (int64_t)kn_config_get(c, "ctx", 0)));
}

bool kn_export_(const char *dir, void *module, kn_export_options o)
{
    kn_model_config c = { 0 };
    if (!kn_given_path(dir, "kn_export", "the folder") ||
        !kn_given(module, "kn_export", "the module"))
        return false;
    if (!o.gpt == !o.llama)
        return kn_fail("kn_export: give one of .gpt and .llama, the module's sizes");
    c.family = o.gpt ? &kn_gpt_family : &kn_llama_family;
    memcpy(c.of, o.gpt ? (const void *)o.gpt : o.llama, c.family->size);
    return kn_family_check(c.family, c.of) && kn_language_save(dir, module, &c, o);
}
