/* models/programs/gpt_settings.c: the table of train_gpt's options, and the model and the optimizer
 * that they describe. */
#include "kernels/error.h"
#include "models/programs/gpt_settings.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#define AT(field)  offsetof(gpt_settings, field)
#define RUN(field) offsetof(gpt_settings, run.field) /* the options of any trainer */

static const kn_option text_rows[] = {
    { "text", KN_OPTION_HEADING },
    { "data", KN_OPTION_PATH, AT(data), "shakespeare", "a data set (shakespeare) or a file",
      .only_read = true },
    { "tokenizer", KN_OPTION_CHOICE, AT(tokenizer), "char", "tokenizer for a text file",
      .choices = "char|byte", .fixed = true },
    { 0 },
};

static const kn_option model_rows[] = {
    { "model", KN_OPTION_HEADING },
    { "model", KN_OPTION_CHOICE, AT(model), "custom",
      "custom: a GPT, llama: a Llama of the sizes below; else a published one",
      .choices = KN_GPT_CHOICES "|" KN_LLAMA_CHOICES },
    { "layers", KN_OPTION_INT, AT(layers), "4", "blocks", .min = 1, .max = 10000 },
    { "heads", KN_OPTION_INT, AT(heads), "4", "attention heads a block", .min = 1, .max = 10000 },
    { "embd", KN_OPTION_INT, AT(embd), "128", "channels", .min = 1, .max = 1 << 20 },
    { "ctx", KN_OPTION_INT, AT(ctx), "64", "tokens in a row of a batch, the model's context",
      .min = 1, .max = 1 << 20 },
    { "bias", KN_OPTION_FLAG, AT(bias), "true", "GPT: biases in linear layers and norms" },
    { "kv-heads", KN_OPTION_INT, AT(kv_heads), NULL, "Llama: heads of keys and values", .min = 1,
      .max = 10000, .note = "heads" },
    { "hidden", KN_OPTION_INT, AT(hidden), NULL, "Llama: channels inside the MLP", .min = 1,
      .max = 1 << 24, .note = "8/3 embd, up to a multiple of 64" },
    { "tied", KN_OPTION_FLAG, AT(tied), "true", "Llama: the token embedding is the head, too" },
    { "rope-base", KN_OPTION_FLOAT, AT(rope_base), "10000", "Llama: base of the rotary embedding",
      .min = 1, .max = 1e12 },
    { "rope-factor", KN_OPTION_FLOAT, AT(rope_factor), NULL,
      "Llama: Llama 3's scaling of it to a context so many times as long", .min = 1, .max = 1e6,
      .note = "no scaling" },
    { "rope-original", KN_OPTION_INT, AT(rope_original), "8192",
      "Llama: the context before --rope-factor", .min = 1, .max = 1 << 30 },
    { "dropout", KN_OPTION_FLOAT, AT(dropout), "0",
      "dropout probability; Llama: of attention's probabilities", .max = 0.999 },
    { "recompute", KN_OPTION_FLAG, RUN(recompute), NULL,
      "keep only the blocks' inputs, compute them again in backward" },
    { 0 },
};

static const kn_option training_rows[] = {
    { "training", KN_OPTION_HEADING },
    { "batch", KN_OPTION_INT, RUN(batch), "12", "rows of a micro-batch", .min = 1, .max = 1 << 20 },
    { "accum", KN_OPTION_INT, RUN(accum), "1", "micro-batches a step and rank", .min = 1,
      .max = 1 << 20 },
    { "no-sync", KN_OPTION_FLAG, RUN(no_sync), NULL,
      "reduce once a step, not at each micro-batch; takes memory" },
    { "steps", KN_OPTION_INT, RUN(steps), "2000", "optimizer steps", .min = 1, .max = 1e12 },
    { "optimizer", KN_OPTION_CHOICE, RUN(optimizer), "adamw",
      "muon: matrices of blocks; AdamW has embeddings, head and vectors; prints its share",
      .choices = "adamw|muon" },
    { "lr", KN_OPTION_FLOAT, RUN(lr), "1e-3", "peak learning rate", .max = 1e30 },
    { "min-lr", KN_OPTION_FLOAT, RUN(min_lr), "-1", "learning rate at the end of the cosine",
      .min = -1, .max = 1e30, .note = "lr / 10" },
    { "warmup", KN_OPTION_INT, RUN(warmup), "-1", "steps until the peak", .min = -1, .max = 1e12,
      .note = "100, or a tenth of fewer than 1000 steps" },
    { "weight-decay", KN_OPTION_FLOAT, RUN(weight_decay), "0.1", "weight decay of matrices",
      .max = 1e3 },
    { "beta2", KN_OPTION_FLOAT, RUN(beta2), "0.99", "AdamW's second beta", .max = 0.99999999 },
    { "ema", KN_OPTION_FLOAT, RUN(ema), "0",
      "decay of averages of the weights: evaluated, sampled and saved as the model; 0: none",
      .max = 0.99999999 },
    { "clip", KN_OPTION_FLOAT, RUN(clip), "1", "largest norm of the gradient; 0: no clipping" },
    { "clip-norm", KN_OPTION_STRING, RUN(clip_order), "2",
      "p of that norm: a number above 0, or inf" },
    { "seed", KN_OPTION_INT, RUN(seed), "1337", "seed of weights, batches, dropout", .max = 9e15 },
    { 0 },
};

static const kn_option progress_rows[] = {
    { "progress", KN_OPTION_HEADING },
    { "eval-every", KN_OPTION_INT, RUN(eval_every), "250", "steps between evaluations; 0: never",
      .max = 1e12 },
    { "eval-steps", KN_OPTION_INT, RUN(eval_steps), "20", "batches of an evaluation", .min = 1,
      .max = 1e9 },
    { "sample-every", KN_OPTION_INT, RUN(sample_every), "0", "steps between samples; 0: never",
      .max = 1e12 },
    { "sample-tokens", KN_OPTION_INT, AT(sample_tokens), "200", "tokens of a sample", .min = 1,
      .max = 1 << 20 },
    { "prompt", KN_OPTION_STRING, AT(prompt), "\n", "the samples' beginning",
      .note = "a new line" },
    { 0 },
};

bool gpt_settings_begin(gpt_settings *s)
{
    static kn_option room[96];
    static const char *const in_steps[] = { "steps",        "warmup",     "eval-every",
                                            "sample-every", "save-every", NULL };
    const kn_option *const parts[] = { text_rows,     model_rows,     settings_precision,
                                       training_rows, settings_ranks, settings_sharding,
                                       progress_rows, settings_log,   settings_saving,
                                       NULL };
    s->run.in_steps = in_steps;
    return settings_join(&s->run, room, sizeof room / sizeof *room, parts);
}

/* ---- the model ------------------------------------------------------------------------------- */

static const char *model_word(const gpt_settings *s)
{
    static char word[32];
    return settings_word(&s->run, "model", s->model, word, sizeof word);
}

const kn_family *gpt_settings_family(const gpt_settings *s)
{
    return kn_family_of_choice(model_word(s));
}

/* Options of the model's sizes. */
static const struct {
    const char *option;
    const kn_family *only; /* NULL: every family has it */
    bool free;             /* a preset leaves it open */
} size_options[] = {
    { "layers", NULL, false },
    { "heads", NULL, false },
    { "embd", NULL, false },
    { "bias", &kn_gpt_family, true },
    { "kv-heads", &kn_llama_family, false },
    { "hidden", &kn_llama_family, false },
    { "tied", &kn_llama_family, false },
    { "rope-base", &kn_llama_family, false },
    { "rope-factor", &kn_llama_family, false },
    { "rope-original", &kn_llama_family, false },
};

/* "no-" for a flag that is off, as in --no-bias. */
static const char *no_before(const gpt_settings *s, const char *option)
{
    const kn_option *p = s->run.table;
    while (p->name && strcmp(p->name, option) != 0)
        p++;
    return p->kind == KN_OPTION_FLAG && !*(const bool *)((const char *)s + p->offset) ? "no-" : "";
}

static bool check_model(const gpt_settings *s, const kn_options *o)
{
    const char *word = model_word(s);
    const kn_family *f = gpt_settings_family(s);
    bool preset = !kn_family_is_own_size(f, word);
    for (size_t i = 0; i < sizeof size_options / sizeof *size_options; i++) {
        const char *option = size_options[i].option;
        const char *no = no_before(s, option);
        const kn_family *only = size_options[i].only;
        if (!kn_options_given(o, option))
            continue;
        if (only && only != f)
            return kn_fail("--%s%s is an option of a %s, and --model %s is a %s; leave one of them "
                           "out",
                           no, option, only->name, word, f->name);
        if (preset && !size_options[i].free)
            return kn_fail(
                "--%s%s doesn't go with --model %s, which fixes it; leave one of them out", no,
                option, word);
    }
    return s->rope_factor > 0 || !kn_options_given(o, "rope-original") ||
           kn_fail("--rope-original is for --rope-factor; give that as well, or leave it out");
}

bool gpt_settings_model(const gpt_settings *s, int64_t vocab, kn_language_config *c)
{
    const char *word = model_word(s);
    const kn_family *f = gpt_settings_family(s);
    *c = (kn_language_config){ .family = f };
    if (!kn_family_is_own_size(f, word)) {
        if (!f->preset(word, c))
            return false;
    } else if (f == &kn_llama_family) {
        c->llama = (kn_llama_config){ .layers = (int)s->layers,
                                      .heads = (int)s->heads,
                                      .kv_heads = (int)s->kv_heads,
                                      .embd = s->embd,
                                      .hidden = s->hidden,
                                      .ctx = s->ctx,
                                      .vocab = vocab,
                                      .rope_base = s->rope_base,
                                      .untied = !s->tied };
        if (s->rope_factor > 0)
            c->llama.rope_scaling =
                (kn_rope_scaling){ .factor = s->rope_factor, .original_ctx = s->rope_original };
    } else {
        c->gpt = (kn_gpt_config){ (int)s->layers, (int)s->heads, s->embd, s->ctx, vocab, 0, false };
    }
    if (f == &kn_llama_family) {
        c->llama.dropout = s->dropout;
        return kn_llama_config_check(&c->llama);
    }
    c->gpt.dropout = s->dropout;
    c->gpt.no_bias = !s->bias;
    return true;
}

bool gpt_settings_check(gpt_settings *s, kn_options *o, kn_comm *world)
{
    const double steps = (double)s->run.steps;
    s->run.optimizer_name = s->run.optimizer == 0 ? "AdamW" : "Muon";
    if (!kn_options_derive(o, "warmup", steps < 1000 ? floor(steps / 10) : 100) ||
        !kn_options_derive(o, "min-lr", s->run.lr / 10))
        return false;
    if (s->run.min_lr < 0)
        return kn_fail("--min-lr is %g; give 0 or more, or -1 for --lr / 10", s->run.min_lr);
    return settings_check_rate(&s->run, o) && check_model(s, o) &&
           settings_check(&s->run, o, world);
}

/* Muon's steps have the size of AdamW's, so that one rate fits both. */
kn_optim *gpt_settings_optim(const gpt_settings *s, void *model)
{
    double beta2 = s->run.beta2 > 0 ? s->run.beta2 : KN_ZERO;
    double decay = s->run.weight_decay > 0 ? s->run.weight_decay : KN_ZERO;
    kn_optim_group flat = { .max_ndim = 1, .weight_decay = KN_ZERO };
    if (s->run.optimizer == 0)
        return kn_adamw(model, .lr = s->run.lr, .beta2 = beta2, .weight_decay = decay,
                        .groups = &flat, .group_count = 1);
    return kn_muon(model, .lr = s->run.lr, .scale = KN_MUON_MATCH_ADAMW, .beta2 = beta2,
                   .weight_decay = decay, .groups = &flat, .group_count = 1);
}
