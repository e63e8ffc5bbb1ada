/* models/programs/generate.c: writes text with a model that train_gpt --out saved. */
#include "kernels/error.h"
#include "models/imported_internal.h"
#include "models/record.h"
#include "models/sample.h"

#include <stddef.h>
#include <stdlib.h>

typedef struct settings {
    const char *from, *prompt;
    int64_t tokens, ctx, top_k, seed, ranks, threads;
    double temperature, top_p;
    int device, dtype;
    const char *export;
} settings;

#define AT(field) offsetof(settings, field)

static const kn_option table[] = {
    { "from", KN_OPTION_PATH, AT(from), NULL,
      "the folder that train_gpt --out wrote, or in it step-N or best; or one of transformers with "
      "a GPT-2, Llama, Mistral or Qwen and its tokenizer" },
    { "prompt", KN_OPTION_STRING, AT(prompt), "\n", "the text's beginning", .note = "a new line" },
    { "tokens", KN_OPTION_INT, AT(tokens), "500", "tokens to write after the prompt",
      .max = 1 << 24 },
    { "ctx", KN_OPTION_INT, AT(ctx), NULL, "tokens that the model sees", .min = 1, .max = 1 << 20,
      .note = "as many as it was trained with" },
    { "temperature", KN_OPTION_FLOAT, AT(temperature), "0.8",
      "above 1 wilder, below 1 tamer, 0 always the likeliest", .max = 1000 },
    { "top-k", KN_OPTION_INT, AT(top_k), "200", "choose among the k likeliest; 0: all",
      .max = 1 << 24 },
    { "top-p", KN_OPTION_FLOAT, AT(top_p), "1", "choose among the likeliest that make up p",
      .max = 1 },
    { "export", KN_OPTION_PATH, AT(export), NULL,
      "write the model for transformers into this folder, and no text" },
    { "dtype", KN_OPTION_CHOICE, AT(dtype), "f32", "of the exported file",
      .choices = "f32|bf16|f16" },
    { "device", KN_OPTION_CHOICE, AT(device), "cpu", "where to compute", .choices = "cpu|cuda" },
    { "seed", KN_OPTION_INT, AT(seed), "1337", "seed of the choices", .max = 9e15 },
    { "ranks", KN_OPTION_INT, AT(ranks), "1", "processes that share the weights", .min = 1,
      .max = 4096 },
    { "threads", KN_OPTION_INT, AT(threads), NULL, "threads of each rank", .max = 1024,
      .note = "cores / ranks" },
    { 0 },
};

/* True on all ranks if rank 0 can't write to standard output any more. */
static bool output_failed(void *arg)
{
    kn_comm *world = arg;
    float failed = ferror(stdout) != 0;
    if (kn_comm_size(world) > 1)
        kn_all_reduce_max(world, &failed, 1, kn_compute_stream(KN_CPU), "output");
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

static bool export_model(const settings *s, kn_module *model, const kn_model_config *c,
                         const kn_tokenizer *t, kn_comm *world)
{
    static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16 };
    const kn_export_options o = { .comm = world, .tokenizer = t, .dtype = dtypes[s->dtype] };
    if (!kn_language_save(s->export, model, c, o))
        return false;
    if (kn_rank(world) == 0)
        printf("exported to %s\n", s->export);
    return true;
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
            "give --from DIR, a folder that train_gpt --out wrote, or one of transformers");
    if (s->dtype && !s->export)
        return kn_fail("--dtype is for --export; leave it out");
    if (s->top_p == 0)
        return kn_fail("--top-p 0 leaves no token to choose; give a share above 0, or 1 for all");
    kn_imported *from = kn_import_open(s->from, .comm = world);
    const kn_model_config *c = from ? kn_import_config(from) : NULL;
    int64_t ctx = 0;
    bool ok =
        c && (tokenizer = kn_import_tokenizer(from)) &&
        (ctx = context(s, kn_import_checkpoint(from), (int64_t)kn_config_get(c, "ctx", 0))) > 0 &&
        kn_config_init(&model, c, KN_F32, KN_META) &&
        kn_fsdp_wrap(&model, world, .wrap_class = c->family->block_class,
                     .device = s->device ? KN_CUDA : KN_CPU) &&
        kn_import_load(from, &model);
    if (ok && s->export)
        ok = export_model(s, &model, c, tokenizer, world);
    else if (ok) {
        ok = kn_write_text(&model, c->family->next_logits, tokenizer, .prompt = s->prompt,
                           .tokens = s->tokens, .ctx = ctx, .draw = o, .cached = true,
                           .out = kn_rank(world) == 0 ? stdout : NULL);
        if (ok && kn_rank(world) == 0)
            printf("\n");
    }
    kn_module_free(&model);
    kn_tokenizer_free(tokenizer);
    kn_import_free(from);
    return ok;
}

int main(int argc, char **argv)
{
    settings s = { 0 };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options = kn_ok() ? kn_options_create(table, &s) : NULL;
    if (options && kn_options_parse(options, argc, argv) && kn_options_agree(options, world)) {
        if (!kn_options_help_wanted(options))
            generate(&s, world);
        else if (kn_rank(world) == 0)
            kn_options_help(options, stdout, "generate",
                            "Writes text with a model that train_gpt or transformers saved.");
    }
    kn_options_free(options);
    return kn_finish();
}
