/* models/programs/generate.c: writes text with a model that train_gpt --out saved. */
#include "comm/values.h"
#include "models/imported_internal.h"
#include "models/programs/chat.h"
#include "models/programs/prompts.h"
#include "models/programs/tool.h"
#include "models/record.h"
#include "models/sample.h"
#include "models/text.h"
#include "state/attempt.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    const char *from, *tokenizer;
    prompt_settings prompt;
    int64_t samples, tokens, ctx, top_k, seed;
    double temperature, top_p;
    int device, dtype, format;
    const char *export, *evaluate;
    int64_t stride;
    const char *system, *template;
    bool print_ids, no_end, chat;
    prompts prompts;
} settings;

static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16 }; /* of --dtype */

#define AT(field) offsetof(settings, field)
#define TASKS     "export|evaluate" /* write no text */
#define NO_CHAT   "chat|" TASKS     /* a conversation has prompts and ends of its own */

static const kn_option table[] = {
    { "from", KN_OPTION_PATH, AT(from), NULL,
      "the folder that train_gpt --out wrote, or in it step-N or best; one of transformers with a "
      "GPT-2, Llama, Mistral or Qwen and its tokenizer; or a file: a GGUF of these, llm.c's "
      "weights of a GPT-2" },
    { "tokenizer", KN_OPTION_PATH, AT(tokenizer), NULL,
      "the tokenizer: a tokenizer.json, or a folder with one", .note = "the model's own" },
    { "prompt", KN_OPTION_STRING, AT(prompt.prompt), "\n",
      "the text's beginning; given several times: of several texts", .note = "a new line",
      .several = true, .clashes = "prompt-file|prompts|prompt-ids|" NO_CHAT },
    { "prompt-file", KN_OPTION_PATH, AT(prompt.file), NULL,
      "the same in a file; -: from standard input", .clashes = "prompts|prompt-ids|" NO_CHAT },
    { "prompts", KN_OPTION_PATH, AT(prompt.lines), NULL,
      "a file with a prompt in each line that isn't empty; -: standard input",
      .clashes = "prompt-ids|" NO_CHAT },
    { "prompt-ids", KN_OPTION_STRING, AT(prompt.ids), NULL,
      "the same as ids with commas between them: 464,2068; several times, too", .several = true,
      .clashes = NO_CHAT },
    { "samples", KN_OPTION_INT, AT(samples), "1", "texts of each prompt", .min = 1, .max = 1 << 16,
      .clashes = NO_CHAT },
    { "print-ids", KN_OPTION_FLAG, AT(print_ids), NULL, "write ids, not text", .clashes = NO_CHAT },
    { "chat", KN_OPTION_FLAG, AT(chat), NULL,
      "a conversation: each line of standard input is answered, until its end or /exit",
      .clashes = TASKS },
    { "system", KN_OPTION_STRING, AT(system), NULL, "--chat: the system's message, before all",
      .with = "chat" },
    { "template", KN_OPTION_NAME, AT(template), "own",
      "--chat: how messages become a text; own: as the model was trained",
      .choices = "own|" KN_CHATS, .with = "chat" },
    { "tokens", KN_OPTION_INT, AT(tokens), "500",
      "tokens to write after the prompt, or of an answer, at most", .max = 1 << 24,
      .clashes = TASKS },
    { "no-end", KN_OPTION_FLAG, AT(no_end), NULL,
      "write on where the model ends the text (<|endoftext|>, or as its configuration says)",
      .clashes = NO_CHAT },
    { "ctx", KN_OPTION_INT, AT(ctx), NULL, "tokens that the model sees", .min = 1, .max = 1 << 20,
      .note = "as many as it was trained with" },
    { "temperature", KN_OPTION_FLOAT, AT(temperature), "0.8",
      "above 1 wilder, below 1 tamer, 0 always the likeliest", .max = 1000, .clashes = TASKS },
    { "top-k", KN_OPTION_INT, AT(top_k), "200", "choose among the k likeliest; 0: all",
      .max = 1 << 24, .clashes = TASKS },
    { "top-p", KN_OPTION_FLOAT, AT(top_p), "1", "choose among the likeliest that make up p",
      .max = 1, .clashes = TASKS },
    { "evaluate", KN_OPTION_PATH, AT(evaluate), NULL,
      "say how well the model predicts this text or token file, and write no text",
      .clashes = "export" },
    { "stride", KN_OPTION_INT, AT(stride), NULL,
      "--evaluate: tokens between two windows of the context", .min = 1, .max = 1 << 20,
      .with = "evaluate", .note = "half the context" },
    { "export", KN_OPTION_PATH, AT(export), NULL,
      "write the model for another program into this folder, and no text" },
    { "format", KN_OPTION_CHOICE, AT(format), "hf",
      "of the export: for transformers, llama.cpp (model.gguf), or llm.c (model.bin; a GPT only)",
      .choices = "hf|gguf|llmc", .with = "export" },
    { "dtype", KN_OPTION_CHOICE, AT(dtype), "f32",
      "of weights and computation, or of the exported file", .choices = "f32|bf16|f16" },
    { "device", KN_OPTION_CHOICE, AT(device), "cpu", "where to compute", .choices = "cpu|cuda" },
    { "seed", KN_OPTION_INT, AT(seed), "1337",
      "seed of the choices; each further text has the next", .max = 9e15, .clashes = TASKS },
    { 0 },
};

/* True on all ranks if rank 0 can't write to standard output any more. */
static bool output_failed(void *arg)
{
    kn_comm *world = arg;
    float failed = ferror(stdout) != 0;
    kn_hosts_max(world, &failed, 1, "output");
    return failed != 0;
}

/* The context of the training, unless --ctx says otherwise: positions behind it were never trained.
 * 0 with an error. */
static int64_t context(const settings *s, const kn_checkpoint *c, int64_t most)
{
    char text[32];
    const int64_t trained =
        c && kn_checkpoint_option(c, "ctx", text, sizeof text) ? strtoll(text, NULL, 10) : most;
    if (s->ctx > most)
        return kn_fail("--ctx %lld is longer than the model's context of %lld", (long long)s->ctx,
                       (long long)most);
    return !kn_ok() ? 0 : s->ctx ? s->ctx : trained > 0 && trained < most ? trained : most;
}

/* Writes text; NULL as tokenizer where all is ids. */
static bool write_text(const settings *s, kn_module *model, const kn_imported *from,
                       const kn_tokenizer *t, int64_t ctx, kn_sample_options draw, kn_comm *world)
{
    const kn_model_config *c = kn_import_config(from);
    const int64_t *ends = NULL;
    const int end_count = s->no_end ? 0 : kn_import_ends(from, &ends);
    const bool one = s->prompts.count == 1 && s->samples == 1;
    const bool ok =
        prompts_fit(&s->prompts, (int64_t)kn_config_get(c, "vocab", 0)) &&
        kn_write_text(model, kn_language_next_logits, t, .prompts = s->prompts.list,
                      .prompts_count = s->prompts.count, .samples = s->samples,
                      .print_ids = s->print_ids, .stop_ids = ends, .stop_count = end_count,
                      .tokens = s->tokens, .ctx = ctx, .draw = draw, .cached = true,
                      .out = kn_rank(world) == 0 ? stdout : NULL);
    if (ok && one && kn_rank(world) == 0)
        printf("\n");
    return ok;
}

static void evaluated(double share, void *arg)
{
    bar *b = arg;
    bar_move((int64_t)(share * 1000) - b->done, b);
}

/* Perplexity and bits a byte of a whole file. */
static bool evaluate(const settings *s, kn_module *model, const kn_model_config *c, kn_tokenizer *t,
                     int64_t ctx, kn_comm *world)
{
    kn_text_score score;
    bar progress;
    char *path = kn_data_find(s->evaluate);
    kn_text *text = path ? kn_text_open(path, "byte", &t) : NULL;
    const int64_t vocab = (int64_t)kn_config_get(c, "vocab", 0);
    bool ok = text != NULL;
    if (ok && kn_text_vocab(text) > vocab)
        ok = kn_fail("--evaluate: %s has %lld kinds of token, the model's vocabulary %lld", path,
                     (long long)kn_text_vocab(text), (long long)vocab);
    bar_begin(&progress, "evaluate", 1000);
    ok = kn_agree(world, ok) &&
         kn_text_evaluate(model, kn_language_loss, text, &score, .ctx = ctx, .batch = 4,
                          .stride = s->stride ? s->stride : (ctx + 1) / 2, .tokenizer = t,
                          .comm = world, .tell = kn_rank(world) == 0 ? evaluated : NULL,
                          .tell_arg = &progress);
    bar_end(&progress);
    if (ok && kn_rank(world) == 0) {
        printf("%s: %lld tokens predicted, loss %.4f nats a token, perplexity %.4g", path,
               (long long)score.tokens, score.loss, exp(score.loss));
        if (score.bytes > 0)
            printf(", %.4f bits a byte",
                   score.loss * (double)score.tokens / ((double)score.bytes * log(2)));
        printf("\n");
    }
    kn_text_free(text);
    kn_host_free(path);
    return ok;
}

static bool export_model(const settings *s, kn_module *model, const kn_imported *from,
                         const kn_tokenizer *t, kn_comm *world)
{
    kn_export_options o = { .comm = world,
                            .tokenizer = t,
                            .dtype = dtypes[s->dtype],
                            .format = (kn_export_format)s->format };
    kn_attempt a;
    char error[KN_ATTEMPT_TEXT];
    kn_attempt_begin(&a);
    const kn_chat *chat = kn_import_chat(from);
    kn_attempt_end(&a, error); /* another program's, which isn't known here, isn't told on */
    o.chat = chat ? chat->name : NULL;
    o.end_count = kn_import_ends(from, &o.ends);
    if (!kn_language_save(s->export, model, kn_import_config(from), o))
        return false;
    if (kn_rank(world) == 0)
        printf("exported to %s\n", s->export);
    return true;
}

static bool tokenizer_fits(const kn_tokenizer *t, const kn_model_config *c)
{
    const int64_t ids = kn_tokenizer_vocab(t), vocab = (int64_t)kn_config_get(c, "vocab", 0);
    return ids <= vocab || kn_fail("the tokenizer has %lld ids, the model's vocabulary %lld: it is "
                                   "another model's",
                                   (long long)ids, (long long)vocab);
}

static bool generate(const settings *s, kn_comm *world)
{
    kn_module model = { 0 };
    kn_tokenizer *tokenizer = NULL;
    kn_sample_options o = { .temperature = s->temperature,
                            .top_k = s->top_k,
                            .top_p = s->top_p,
                            .seed = (uint64_t)s->seed,
                            .stop = output_failed,
                            .stop_arg = world };
    if (!s->from)
        return kn_fail(
            "give --from DIR, a folder that train_gpt --out wrote, one of transformers, or a GGUF");
    if (s->samples > 1 && s->temperature == 0)
        return kn_fail("--samples %lld of --temperature 0 are all the same; give a temperature "
                       "above 0, or leave --samples out",
                       (long long)s->samples);
    if (s->top_p == 0)
        return kn_fail("--top-p 0 leaves no token to choose; give a share above 0, or 1 for all");
    kn_imported *from = kn_import_open(s->from, .comm = world);
    const kn_model_config *c = from ? kn_import_config(from) : NULL;
    /* a format without a tokenizer takes none along */
    const bool only_ids = !s->tokenizer && ((s->prompt.ids && s->print_ids && !s->export) ||
                                            (s->export && s->format == KN_EXPORT_LLMC));
    int64_t ctx = 0;
    if (from && kn_rank(world) == 0 && kn_import_note(from))
        fprintf(stderr, "generate: %s\n", kn_import_note(from));
    bool ok =
        c &&
        (only_ids || (tokenizer = s->tokenizer ? kn_tokenizer_load(s->tokenizer)
                                               : kn_import_tokenizer(from))) &&
        (!tokenizer || tokenizer_fits(tokenizer, c)) &&
        (ctx = context(s, kn_import_checkpoint(from), (int64_t)kn_config_get(c, "ctx", 0))) > 0 &&
        kn_config_init(&model, c, s->export ? KN_F32 : dtypes[s->dtype], KN_META) &&
        kn_fsdp_wrap(&model, world, .wrap_class = c->family->block_class,
                     .device = s->device ? KN_CUDA : KN_CPU) &&
        kn_import_load(from, &model);
    if (ok && s->export)
        ok = export_model(s, &model, from, tokenizer, world);
    else if (ok && s->evaluate)
        ok = evaluate(s, &model, c, tokenizer, ctx, world);
    else if (ok && s->chat) {
        const bool own = strcmp(s->template, "own") == 0;
        const chat_options talk = { own ? NULL : s->template, s->system, ctx, s->tokens, o };
        ok = chat(&model, from, tokenizer, &talk, world);
    } else
        ok = ok && write_text(s, &model, from, tokenizer, ctx, o, world);
    kn_module_free(&model);
    kn_tokenizer_free(tokenizer);
    kn_import_free(from);
    return ok;
}

int main(int argc, char **argv)
{
    settings s = { 0 };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *o =
        kn_ok() ? kn_options_main(table, &s, argc, argv,
                                  "Writes text with a model that train_gpt or transformers saved.")
                : NULL;
    if (o && prompts_read(&s.prompts, &s.prompt, world))
        generate(&s, world);
    prompts_free(&s.prompts);
    kn_options_free(o);
    return kn_finish();
}
