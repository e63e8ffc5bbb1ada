/* models/programs/gpt_settings.c: the table of train_gpt's options, and the model and the optimizer
 * that they describe. */
#include "kernels/error.h"
#include "models/programs/gpt_settings.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define AT(field)  offsetof(gpt_settings, field)
#define RUN(field) offsetof(gpt_settings, run.field) /* the options of any trainer */

static const kn_option text_rows[] = {
    { "text", KN_OPTION_HEADING },
    { "data", KN_OPTION_PATH, AT(data), "shakespeare",
      "a data set (shakespeare), a text or token file, a folder of them, or a quoted pattern "
      "('tokens/train_*.bin')",
      .only_read = true },
    { "val-data", KN_OPTION_PATH, AT(val_data), NULL, "the same to validate with",
      .only_read = true, .note = "the last 10 % of --data" },
    { "field", KN_OPTION_STRING, AT(field), NULL,
      "the data are lines of JSON, with a document in this field of each (text)",
      .clashes = "separator" },
    { "separator", KN_OPTION_STRING, AT(separator), NULL,
      "the data are documents with lines like this one between them" },
    { "end", KN_OPTION_STRING, AT(end), NULL, "the token that ends a document",
      .note = "<|endoftext|>, <|end_of_text|> or </s>" },
    { "template", KN_OPTION_NAME, AT(chat), "none",
      "the data are conversations in lines of JSON (messages, or prompt and completion), whose "
      "answers count, written by this template; auto: --init's own, else the first that its "
      "tokenizer has the tokens of, else chatml",
      .choices = "none|auto|chatml|llama3|llama2|plain" },
    { "mask-documents", KN_OPTION_FLAG, AT(mask_documents), NULL,
      "attention stays inside of a document, whose positions count from 0; a row holds as many "
      "conversations as fit, not one" },
    { "tokenizer", KN_OPTION_PATH, AT(tokenizer), "char",
      "for a text file: char, byte, or a tokenizer's file or folder (knap-tokenize train)",
      .only_read = true, .fixed = true },
    { "vocab", KN_OPTION_INT, AT(vocab), NULL,
      "kinds of tokens in a file of them without a header (nanoGPT's .bin)", .min = 1, .max = 65536,
      .note = "the tokenizer's, or the model's" },
    { 0 },
};

static char choices[KN_CHOICES]; /* by gpt_settings_begin */

static const kn_option model_rows[] = {
    { "model", KN_OPTION_HEADING },
    { "model", KN_OPTION_NAME, AT(model), "custom",
      "custom: a GPT, llama: a Llama of the sizes below; else a published one", .choices = choices,
      .fixed = true },
    { "init", KN_OPTION_PATH, AT(init), NULL,
      "begin with the weights of this folder, train_gpt's or one of transformers (GPT-2, Llama, "
      "Mistral, Qwen), or file, a GGUF or llm.c's weights; and its tokenizer",
      .clashes = "resume", .of = KN_OF_START },
    { "ctx", KN_OPTION_INT, AT(ctx), "64",
      "tokens in a row of a batch, the model's context; --init: its context, at most 1024",
      .min = 1, .max = 1 << 20 },
    { 0 },
};

static const kn_option recompute_rows[] = {
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
    { "optimizer", KN_OPTION_NAME, RUN(optimizer), "adamw",
      "muon: matrices of blocks; AdamW has embeddings, head and vectors; prints its share",
      .choices = "adamw|muon" },
    { "lr", KN_OPTION_FLOAT, RUN(lr), "1e-3", "peak learning rate", .max = 1e30 },
    { "min-lr", KN_OPTION_FLOAT, RUN(min_lr), "-1", "learning rate at the end of the cosine",
      .min = -1, .max = 1e30, .note = "lr / 10" },
    { "warmup", KN_OPTION_INT, RUN(warmup), "-1", "steps until the peak", .min = -1, .max = 1e12,
      .note = "100, or a tenth of fewer than 1000 steps" },
    { "weight-decay", KN_OPTION_FLOAT, RUN(weight_decay), "0.1", "weight decay of matrices",
      .max = 1e3 },
    { "beta1", KN_OPTION_FLOAT, RUN(beta1), "0.9", "AdamW's first beta", .max = 0.99999999 },
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

/* ---- the model's options --------------------------------------------------------------------- */

/* A field of the family that is an option; NULL: it has none of that name. */
static const kn_config_field *option_field(const kn_family *f, const char *name)
{
    const kn_config_field *p = kn_family_field(f, name);
    return p && p->option ? p : NULL;
}

/* "blocks"; of one family alone "Llama: heads of keys and values". */
static const char *help_of(const char *name, char *buf, size_t size)
{
    const kn_family *f;
    int have = 0;
    for (int i = 0; (f = kn_family_at(KN_LANGUAGE_MODELS, i)); i++)
        have += option_field(f, name) != NULL;
    buf[0] = '\0';
    for (int i = 0; (f = kn_family_at(KN_LANGUAGE_MODELS, i)); i++) {
        const kn_config_field *p = option_field(f, name);
        const size_t n = strlen(buf);
        const bool named = have == 1 || n > 0;
        if (p && p->help)
            snprintf(buf + n, size - n, "%s%s%s%s", n ? "; " : "", named ? f->noun : "",
                     named ? ": " : "", p->help);
    }
    return buf;
}

/* A row for each name among the fields of all families. */
static bool make_size_rows(kn_option row[MODEL_OPTIONS + 1])
{
    static char help[MODEL_OPTIONS][128];
    const kn_family *f;
    int n = 0, k;
    for (int i = 0; (f = kn_family_at(KN_LANGUAGE_MODELS, i)); i++)
        for (const kn_config_field *p = f->field; p->kind; p++) {
            for (k = 0; k < n && p->option && strcmp(row[k].name, p->name) != 0; k++)
                ;
            if (!p->option || k < n)
                continue;
            if (n == MODEL_OPTIONS)
                return kn_fail("families of models have more than %d options", MODEL_OPTIONS);
            row[n++] = (kn_option){ p->name,
                                    p->kind == KN_FIELD_NUMBER ? KN_OPTION_FLOAT
                                    : p->low < p->high         ? KN_OPTION_INT
                                                               : KN_OPTION_FLAG,
                                    AT(sizes[k]),
                                    p->value,
                                    help_of(p->name, help[k], sizeof help[k]),
                                    .min = p->low,
                                    .max = p->high,
                                    .with = p->with,
                                    .note = p->note };
        }
    row[n] = (kn_option){ 0 };
    return true;
}

static kn_option size_rows[MODEL_OPTIONS + 1];

bool gpt_settings_begin(settings *s)
{
    static const char *const in_steps[] = { "steps",        "warmup",     "eval-every",
                                            "sample-every", "save-every", NULL };
    const kn_option *const parts[] = { text_rows,      model_rows,         size_rows,
                                       recompute_rows, settings_precision, training_rows,
                                       settings_ranks, settings_sharding,  progress_rows,
                                       settings_log,   settings_saving,    NULL };
    s->in_steps = in_steps;
    kn_family_choices(KN_LANGUAGE_MODELS, choices);
    return make_size_rows(size_rows) && settings_join(s, parts);
}

/* ---- the model ------------------------------------------------------------------------------- */

static double value_of(const gpt_settings *s, const char *option)
{
    const kn_option *p = size_rows;
    while (p->name && strcmp(p->name, option) != 0)
        p++;
    const model_size *v = (const void *)((const char *)s + p->offset);
    return p->kind == KN_OPTION_FLOAT ? v->number
           : p->kind == KN_OPTION_INT ? (double)v->whole
                                      : v->flag;
}

/* An option of the model that was given. */
static bool check_option(const gpt_settings *s, const kn_option *row)
{
    const char *word = s->model, *name = row->name;
    const kn_family *f = kn_family_of_choice(KN_LANGUAGE_MODELS, word), *only;
    const kn_config_field *p = option_field(f, name);
    /* as in --no-bias */
    const char *no = row->kind == KN_OPTION_FLAG && !value_of(s, name) ? "no-" : "";
    for (int i = 0; !p && (only = kn_family_at(KN_LANGUAGE_MODELS, i)); i++)
        if (option_field(only, name))
            return kn_fail("--%s%s is an option of a %s, and --model %s is a %s; leave one of them "
                           "out",
                           no, name, only->noun, word, f->noun);
    if (strcmp(f->custom, word) != 0 && !p->free)
        return kn_fail("--%s%s doesn't go with --model %s, which fixes it; leave one of them out",
                       no, name, word);
    return true;
}

static bool check_model(const gpt_settings *s, const kn_options *o)
{
    for (const kn_option *row = size_rows; row->name; row++)
        if (kn_options_given(o, row->name) && !check_option(s, row))
            return false;
    return true;
}

bool gpt_settings_follow(kn_options *o, const kn_model_config *c)
{
    const kn_preset *preset = kn_config_preset(c);
    char rows[32];
    const int64_t ctx = (int64_t)kn_config_get(c, "ctx", 0);
    snprintf(rows, sizeof rows, "%lld", (long long)(ctx < 1024 ? ctx : 1024));
    bool ok = settings_follow(o, "model", preset ? preset->name : c->family->custom) &&
              (kn_options_given(o, "ctx") || kn_options_set(o, "ctx", rows));
    for (const kn_option *row = size_rows; ok && !preset && row->name; row++) {
        const kn_config_field *p = option_field(c->family, row->name);
        const double value = p ? kn_config_get(c, row->name, 0) : 0;
        char text[32];
        if (!p || p->free || (value == 0 && row->kind != KN_OPTION_FLAG) ||
            (p->with && kn_config_get(c, p->with, 0) == 0))
            continue;
        snprintf(text, sizeof text, "%.17g", value);
        ok = settings_follow(o, row->name,
                             row->kind != KN_OPTION_FLAG ? text
                             : value != 0                ? "true"
                                                         : "false");
    }
    return ok;
}

bool gpt_settings_model(const gpt_settings *s, int64_t vocab, const kn_model_config *from,
                        kn_model_config *c)
{
    const kn_family *f = kn_family_of_choice(KN_LANGUAGE_MODELS, s->model);
    const bool preset = strcmp(f->custom, s->model) != 0;
    from = from && from->family == f ? from : NULL;
    *c = from ? *from : (kn_model_config){ .family = f };
    if (preset && !from && !kn_family_preset(f, s->model, c->of))
        return false;
    for (const kn_option *row = size_rows; row->name; row++) {
        const kn_config_field *p = option_field(f, row->name);
        if (p && (p->free || !preset) && (!p->with || value_of(s, p->with) != 0))
            kn_config_set(c, row->name, value_of(s, row->name));
    }
    if (!preset && !from) {
        kn_config_set(c, "ctx", (double)s->ctx);
        kn_config_set(c, "vocab", (double)vocab);
    }
    return kn_family_check(f, c->of);
}

bool gpt_settings_check(gpt_settings *s, kn_options *o, kn_comm *world)
{
    const double steps = (double)s->run.steps;
    if (!kn_options_derive(o, "warmup", steps < 1000 ? floor(steps / 10) : 100) ||
        !kn_options_derive(o, "min-lr", s->run.lr / 10))
        return false;
    const char *divides = s->field ? "field" : s->separator ? "separator" : s->end ? "end" : NULL;
    if (divides && strcmp(s->chat, "none") != 0)
        return kn_fail("--%s is for documents, and --template says where conversations end; leave "
                       "one of them out",
                       divides);
    if (s->run.min_lr < 0)
        return kn_fail("--min-lr is %g; give 0 or more, or -1 for --lr / 10", s->run.min_lr);
    return settings_check_rate(&s->run, o) && check_model(s, o) &&
           settings_check(&s->run, o, world);
}
