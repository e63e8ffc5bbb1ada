/* models/imported.h: language models in files, of others and for them: Hugging Face's folders of
 * GPT-2, Llama, Mistral, Qwen2 and Qwen3, GGUFs of these, llm.c's weights of GPT-2, and checkpoints
 * of Knap.
 *
 *   kn_imported *from = kn_import_open("gpt2", .comm = world);
 *   const kn_gpt_config *sizes = from ? kn_import_gpt(from) : NULL; // else kn_import_llama
 *   kn_gpt model = { 0 };
 *   if (sizes && kn_gpt_init(&model, *sizes, KN_F32, KN_META) &&
 *       kn_fsdp_wrap(&model, world, .wrap_class = "gpt_block") && kn_import_load(from, &model))
 *       kn_write_text(&model, NULL, tokenizer, .prompt = "The", .tokens = 20, .ctx = sizes->ctx,
 *                     .cached = true, .out = stdout); */
#ifndef KNAP_MODELS_IMPORTED_H
#define KNAP_MODELS_IMPORTED_H

#include "fsdp/ema.h"
#include "models/gpt.h"
#include "models/llama.h"
#include "models/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_imported kn_imported;

typedef struct kn_import_open_options {
    KN_BEGIN_OPTIONS;
    kn_comm *comm; /* the ranks that open it; NULL: kn_world() */
} kn_import_open_options;
/* Opens a model, by what path is:
 *   a folder that train_gpt saved (kn_checkpoint_open)
 *   a folder of transformers, with config.json and model.safetensors, or several files with
 *     model.safetensors.index.json. The names of GPT-2's tensors may lack "transformer.", its masks
 *     and a head that is the token embedding are passed over
 *   a GGUF of llama.cpp: tensors of f32, f16, bf16 and Q8_0
 *   llm.c's weights of a GPT-2 (its versions 3, of f32, and 5, of bf16)
 *   a folder with model.gguf or model.bin, as kn_export writes them
 * A tied model whose files hold a head with other values is read as untied, as transformers does
 * (kn_import_note says so); a GPT, which has no head of its own, is refused. Names and shapes of
 * all tensors are compared with those of the configuration before memory is taken by them.
 * Collective; NULL with an error: another kind of model, something that the model here doesn't
 * compute (another activation, a scaling of rope that isn't Llama 3's, biases of a Llama), weights
 * that are quantized otherwise, tensors that are missing or of other shapes. comm must outlive the
 * result, which the caller frees. */
KN_API kn_imported *kn_import_open_(const char *path, kn_import_open_options o);
#define kn_import_open(path, ...)                                                                  \
    kn_import_open_(path, KN_OPTIONS(kn_import_open_options, __VA_ARGS__))
KN_API void kn_import_free(kn_imported *i); /* NULL is fine */
/* The model's sizes; borrowed. NULL, without an error, for a model of the other kind. */
KN_API const kn_gpt_config *kn_import_gpt(const kn_imported *i);
KN_API const kn_llama_config *kn_import_llama(const kn_imported *i);
/* What was read otherwise than the files say, in a sentence; borrowed. NULL: nothing. */
KN_API const char *kn_import_note(const kn_imported *i);
/* The tokenizer in the folder or GGUF; the caller frees it. NULL with an error where there is
 * none. */
KN_API kn_tokenizer *kn_import_tokenizer(const kn_imported *i);
/* The ids that end a text: of generation_config.json or config.json ("eos_token_id"), or of a
 * checkpoint's "<|endoftext|>": how many. *ids is borrowed. */
KN_API int kn_import_ends(const kn_imported *i, const int64_t **ids);
/* Fills module, with any sharding: each rank reads its own part of the files. Collective. */
KN_API bool kn_import_load(const kn_imported *i, void *module);

typedef enum kn_export_format {
    KN_EXPORT_HF = 0, /* a folder for transformers' from_pretrained (versions 4 and 5): config.json,
                       * model.safetensors, tokenizer.json and tokenizer_config.json */
    KN_EXPORT_GGUF,   /* model.gguf for llama.cpp, with the tokenizer; vectors stay f32 */
    KN_EXPORT_LLMC    /* model.bin for llm.c: of a GPT only, f32 or bf16 */
} kn_export_format;

typedef struct kn_export_options {
    KN_BEGIN_OPTIONS;
    kn_export_format format;
    /* One of the two: the module's sizes (kn_gpt_config_of, kn_llama_config_of). */
    const kn_gpt_config *gpt;
    const kn_llama_config *llama;
    const kn_tokenizer *tokenizer; /* NULL: none is written */
    const int64_t *ends;           /* [end_count]: ids that end a text; none: "<|endoftext|>" */
    int end_count;
    const char *chat;  /* the template of its conversations, by name (chatml); NULL: none */
    kn_comm *comm;     /* the ranks that hold module; NULL: kn_world() */
    const kn_ema *ema; /* made for module: its averages are saved */
    kn_dtype dtype;    /* of the file: KN_F32 (the default), KN_BF16, KN_F16 or KN_F64 */
} kn_export_options;
/* Writes module into the folder dir, made if missing. Where a GPT has no biases, the file has
 * zeros. A model that this function wrote there before is replaced, as by kn_pretrained_save; a
 * single file (.format) is there whole or not at all. Collective: one tensor at a time passes
 * through each rank, rank 0 writes. Errors also: the format has no such model or dtype. */
KN_API bool kn_export_(const char *dir, void *module, kn_export_options o);
#define kn_export(dir, module, ...)                                                                \
    kn_export_(dir, module, KN_OPTIONS(kn_export_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
