/* models/programs/train_gpt.c: trains a GPT on a text, on one rank or on N sharded ranks. This file
 * holds the parts specific to GPT and text; training.c has the loop. */
#include "kernels/error.h"
#include "data/data.h"
#include "models/gpt.h"
#include "models/programs/stop.h"
#include "models/programs/training.h"
#include "models/sample.h"
#include "models/text.h"
#include <string.h>

typedef struct gpt_run {
    settings s;
    training t;
    kn_gpt model;
    kn_tokenizer *tokenizer;
    kn_text *text;
    int64_t *x, *y; /* [batch, ctx] */
    char config[KN_GPT_CONFIG_TEXT];
} gpt_run;

/* ---- the task -------------------------------------------------------------------------------- */

static bool text_batch(void *arg, bool validation, int64_t step, int64_t micro, kn_device device,
                       batch *b)
{
    gpt_run *r = arg;
    const settings *s = &r->s;
    if (!kn_text_batch(r->text, validation ? KN_VALIDATION : KN_TRAIN, (uint64_t)s->seed, step,
                       micro, s->batch, s->ctx, r->x, r->y))
        return false;
    b->x = kn_from(KN_I64, device, r->x, KN_SHAPE(s->batch, s->ctx));
    b->y = kn_from(KN_I64, device, r->y, KN_SHAPE(s->batch, s->ctx));
    return b->x && b->y;
}

static kn_tensor *gpt_loss(void *arg, const batch *b)
{
    gpt_run *r = arg;
    return kn_gpt_loss(&r->model, b->x, b->y);
}

static kn_tensor *next_logits(void *model, kn_tensor *ids)
{
    return kn_gpt_next_logits(model, ids);
}

static bool write_sample(void *arg)
{
    gpt_run *r = arg;
    kn_sample_options draw = { .temperature = 0.8,
                               .top_k = 200,
                               .seed = (uint64_t)r->s.seed,
                               .stop = training_stop_requested,
                               .stop_arg = &r->t };
    return kn_write_text(&r->model, next_logits, r->tokenizer, .prompt = r->s.prompt,
                         .tokens = r->s.sample_tokens, .ctx = kn_gpt_config_of(&r->model)->ctx,
                         .draw = draw, .out = first_rank(&r->t) ? stdout : NULL);
}

/* ---- setting up ------------------------------------------------------------------------------ */

static bool read_options(gpt_run *r, int argc, char **argv)
{
    training *t = &r->t;
    kn_gpt_config saved;
    t->options = kn_options_create(settings_table, &r->s);
    if (!t->options || !kn_options_parse(t->options, argc, argv))
        return false;
    if (kn_options_help_wanted(t->options))
        return true;
    return training_open(t, r->s.out, r->s.resume, r->s.overwrite) &&
           (!t->from || kn_gpt_config_saved(t->from, &saved)) &&
           training_has_steps(t, r->s.steps) && settings_check(&r->s, t->options, t->world);
}

static bool open_text(gpt_run *r)
{
    char kind[16];
    const settings *s = &r->s;
    if (r->t.from && !(r->tokenizer = kn_checkpoint_tokenizer(r->t.from)))
        return false;
    char *path = kn_data_find(s->data);
    if (path)
        r->text = kn_text_open(path, settings_word("tokenizer", s->tokenizer, kind, sizeof kind),
                               &r->tokenizer);
    kn_host_free(path);
    if (r->text && !r->tokenizer && (s->out || s->sample_every > 0))
        return kn_fail("--%s needs a tokenizer, but the token file has none beside it",
                       s->out ? "out" : "sample-every");
    return r->text != NULL;
}

/* The samples' beginning is a text that the tokenizer knows. */
static bool check_prompt(gpt_run *r)
{
    size_t length = strlen(r->s.prompt);
    if (!r->tokenizer || (r->s.sample_every == 0 && !kn_options_given(r->t.options, "prompt")))
        return true;
    if (length == 0)
        return kn_fail("--prompt is empty; give at least one character to go on from");
    int64_t *ids = kn_host_alloc(length * sizeof *ids);
    bool ok = ids && kn_tokenizer_encode(r->tokenizer, r->s.prompt, length, ids, KN_I64) > 0;
    kn_host_free(ids);
    return ok;
}

static bool make_model(gpt_run *r)
{
    const settings *s = &r->s;
    char name[32];
    int64_t vocab = kn_text_vocab(r->text);
    kn_gpt_config c = { (int)s->layers, (int)s->heads, s->embd, s->ctx, vocab, 0, false };
    if (s->model != 0 && !kn_gpt_preset(settings_word("model", s->model, name, sizeof name), &c))
        return false;
    if (vocab > c.vocab)
        return kn_fail("the text has %lld kinds of token, the model's vocabulary %lld: use "
                       "--model custom, or --tokenizer byte",
                       (long long)vocab, (long long)c.vocab);
    if (s->ctx > c.ctx)
        return kn_fail("--ctx %lld is longer than the model's context of %lld", (long long)s->ctx,
                       (long long)c.ctx);
    c.dropout = s->dropout;
    c.no_bias = !s->bias;
    if (!kn_text_check(r->text, s->ctx) || !kn_gpt_init(&r->model, c, KN_F32, KN_META))
        return false;
    return kn_gpt_config_text(&c, r->config) != NULL;
}

/* Shards the model, makes the optimizer, loads the checkpoint. */
static bool prepare(gpt_run *r)
{
    const settings *s = &r->s;
    training *t = &r->t;
    kn_comm_hook hook = settings_hook(s);
    if (!kn_fsdp_wrap_(&r->model, t->world, settings_fsdp(s, "gpt_block")) ||
        (hook && !kn_fsdp_set_comm_hook(&r->model, hook, NULL, true)))
        return false;
    t->model = &r->model.base;
    t->optim = settings_optim(s, &r->model);
    if (settings_scaled(s) && !(t->scaler = kn_scaler_new(&r->model)))
        return false;
    if (!t->optim || (t->from && !kn_checkpoint_load(t->from, &r->model, .optim = t->optim,
                                                     .scaler = t->scaler)))
        return false;
    kn_seed((uint64_t)s->seed);
    kn_set_step(t->from ? kn_checkpoint_step(t->from) : 0);
    return true;
}

static bool begin(gpt_run *r)
{
    const settings *s = &r->s;
    training *t = &r->t;
    size_t ids = (size_t)(s->batch * s->ctx);
    r->x = kn_host_alloc(ids * sizeof *r->x);
    r->y = kn_host_alloc(ids * sizeof *r->y);
    t->device = settings_device(s);
    t->task = (task){ r, text_batch, gpt_loss, write_sample };
    t->plan = settings_plan(s);
    t->plan.item = "tokens";
    t->plan.items = s->batch * s->ctx;
    t->plan.item_flops = kn_gpt_flops_per_token(kn_gpt_config_of(&r->model), s->ctx);
    t->plan.config = r->config;
    t->plan.tokenizer = r->tokenizer;
    return r->x && r->y && training_begin(t);
}

/* The table at the start. Every rank calls it. */
static bool print_table(gpt_run *r)
{
    const settings *s = &r->s;
    const training *t = &r->t;
    const kn_gpt_config *c = kn_gpt_config_of(&r->model);
    int ranks = kn_comm_size(t->world);
    char buf[32];
    kn_fsdp_memory m = kn_fsdp_predict_optim(t->optim);
    if (first_rank(t)) {
        printf("train_gpt\n");
        report_row("model", "%s: %d layers, %d heads, %lld channels, context %lld, vocabulary %lld",
                   settings_word("model", s->model, buf, sizeof buf), c->layers, c->heads,
                   (long long)c->embd, (long long)c->ctx, (long long)c->vocab);
        report_row("parameters", "%lld", (long long)kn_param_count(&r->model));
        report_row("text", "%s: %lld tokens to train, %lld to validate", s->data,
                   (long long)kn_text_count(r->text, KN_TRAIN),
                   (long long)kn_text_count(r->text, KN_VALIDATION));
        report_row("step", "%lld rows of %lld x %lld micro-batches x %d ranks = %lld tokens",
                   (long long)s->batch, (long long)s->ctx, (long long)s->accum, ranks,
                   (long long)(s->batch * s->ctx * s->accum * ranks));
    }
    return print_run(t, s, &m);
}

static void run_free(gpt_run *r)
{
    training_end(&r->t);
    kn_scaler_free(r->t.scaler);
    kn_optim_free(r->t.optim);
    kn_module_free(&r->model);
    kn_text_free(r->text);
    kn_tokenizer_free(r->tokenizer);
    kn_host_free(r->x);
    kn_host_free(r->y);
    kn_options_free(r->t.options);
}

int main(int argc, char **argv)
{
    gpt_run r = { .t = { .program = argv[0] } };
    training *t = &r.t;
    t->world = kn_init(&argc, &argv);
    if (kn_ok() && read_options(&r, argc, argv)) {
        if (kn_options_help_wanted(t->options)) {
            if (first_rank(t))
                kn_options_help(t->options, stdout, "train_gpt",
                                "Trains a GPT on a text, on one rank or on several sharded ones.");
        } else if (open_text(&r) && check_prompt(&r) && make_model(&r) && prepare(&r) &&
                   begin(&r)) {
            stop_listen(first_rank(t));
            if (print_table(&r))
                training_run(t);
            end_output(t);
        }
    }
    run_free(&r);
    return kn_finish();
}
