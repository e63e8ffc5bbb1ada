/* models/programs/train_gpt.c: trains a GPT or a Llama on a text, on one rank or on N sharded
 * ranks. This file holds the parts specific to language models and text; training.c has the
 * loop. */
#include "kernels/error.h"
#include "data/data.h"
#include "models/imported_internal.h"
#include "models/programs/gpt_settings.h"
#include "models/programs/stop.h"
#include "models/programs/training.h"
#include "models/sample.h"
#include "models/text.h"
#include "nn/summary.h"
#include <string.h>

typedef struct gpt_run {
    gpt_settings s;
    training t;
    kn_module model;
    kn_model_config config;
    kn_model_config saved; /* of the checkpoint to resume from; family NULL: none */
    kn_imported *init;     /* weights to begin with; NULL: none */
    kn_tokenizer *tokenizer;
    kn_text *text;
    int64_t *x, *y; /* [batch, ctx] */
    char *config_text;
} gpt_run;

/* ---- the task -------------------------------------------------------------------------------- */

static bool text_batch(void *arg, bool validation, int64_t step, int64_t micro, kn_device device,
                       batch *b)
{
    gpt_run *r = arg;
    const gpt_settings *s = &r->s;
    const int64_t first = (validation ? 0 : training_samples(&r->t, step)) + micro * s->run.batch;
    if (!kn_text_batch(r->text, validation ? KN_VALIDATION : KN_TRAIN, (uint64_t)s->run.seed, first,
                       s->run.batch, s->ctx, r->x, r->y))
        return false;
    b->x = kn_from(KN_I64, device, r->x, KN_SHAPE(s->run.batch, s->ctx));
    b->y = kn_from(KN_I64, device, r->y, KN_SHAPE(s->run.batch, s->ctx));
    return b->x && b->y;
}

static kn_tensor *model_loss(void *arg, const batch *b)
{
    gpt_run *r = arg;
    return r->config.family->loss(&r->model, b->x, b->y);
}

static bool write_sample(void *arg)
{
    gpt_run *r = arg;
    kn_sample_options draw = { .temperature = 0.8,
                               .top_k = 200,
                               .seed = (uint64_t)r->s.run.seed,
                               .stop = training_stop_requested,
                               .stop_arg = &r->t };
    return kn_write_text(&r->model, r->config.family->next_logits, r->tokenizer,
                         .prompt = r->s.prompt, .tokens = r->s.sample_tokens, .ctx = r->s.ctx,
                         .cached = true, .draw = draw, .out = first_rank(&r->t) ? stdout : NULL);
}

/* ---- setting up ------------------------------------------------------------------------------ */

static bool read_options(gpt_run *r, int argc, char **argv)
{
    training *t = &r->t;
    t->options = gpt_settings_begin(&r->s) ? kn_options_create(r->s.run.table, &r->s) : NULL;
    if (!t->options || !kn_options_parse(t->options, argc, argv) ||
        !kn_options_agree(t->options, t->world))
        return false;
    if (kn_options_help_wanted(t->options))
        return true;
    return training_open(t, r->s.run.out, r->s.run.resume, r->s.run.overwrite) &&
           training_place(t, &r->s.run) &&
           (!t->from || kn_config_saved(t->from, KN_LANGUAGE_MODELS, &r->saved, NULL)) &&
           (!r->s.init || ((r->init = kn_import_open(r->s.init, .comm = t->world)) &&
                           gpt_settings_follow(&r->s, t->options, kn_import_config(r->init)))) &&
           training_has_steps(t, &r->s.run, "steps") &&
           gpt_settings_check(&r->s, t->options, t->world);
}

static bool open_text(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    if (r->t.from && !(r->tokenizer = kn_checkpoint_tokenizer(r->t.from)))
        return false;
    if (r->init && !kn_options_given(r->t.options, "tokenizer") &&
        !(r->tokenizer = kn_import_tokenizer(r->init)))
        return false;
    char *path = kn_data_find(s->data);
    const bool plain = path && kn_text_is_plain(path);
    if (path && s->vocab && !plain)
        kn_fail("--vocab is for tokens without a header, which %s isn't; leave it out", path);
    else if (plain && s->vocab)
        r->text = kn_text_map_plain(path, s->vocab);
    else if (path && kn_ok())
        r->text = kn_text_open(path, s->tokenizer, &r->tokenizer);
    kn_host_free(path);
    if (r->text && !r->tokenizer && (s->run.out || s->run.sample_every > 0))
        return kn_fail("--%s needs a tokenizer, but the token file has none beside it",
                       s->run.out ? "out" : "sample-every");
    return r->text != NULL;
}

/* The samples' beginning is a text that the tokenizer knows. */
static bool check_prompt(gpt_run *r)
{
    size_t length = strlen(r->s.prompt);
    if (!r->tokenizer || (r->s.run.sample_every == 0 && !kn_options_given(r->t.options, "prompt")))
        return true;
    if (length == 0)
        return kn_fail("--prompt is empty; give at least one character to go on from");
    const size_t room = (size_t)kn_tokenizer_most(r->tokenizer, length);
    int64_t *ids = kn_host_alloc(room * sizeof *ids);
    bool ok = ids && kn_tokenizer_encode(r->tokenizer, r->s.prompt, length, ids, KN_I64) > 0;
    kn_host_free(ids);
    return ok;
}

static int64_t size_of(const kn_model_config *c, const char *name, int64_t otherwise)
{
    return (int64_t)kn_config_get(c, name, (double)otherwise);
}

/* The checkpoint's model against that of the options, in what a load can't see. */
static bool check_saved(const gpt_run *r)
{
    const kn_model_config *now = &r->config, *then = &r->saved;
    if (!then->family)
        return true;
    const int64_t heads = size_of(now, "heads", 0), kv = size_of(now, "kv-heads", heads);
    const int64_t old = size_of(then, "heads", 0), old_kv = size_of(then, "kv-heads", old);
    const char *dir = kn_checkpoint_folder(r->t.from);
    if (now->family != then->family)
        return kn_fail("--model is a %s, but the checkpoint in %s holds a %s; leave --model out",
                       now->family->noun, dir, then->family->noun);
    return (heads == old && kv == old_kv) ||
           kn_fail("the options give %lld heads and %lld of keys and values, the checkpoint in %s "
                   "has %lld and %lld; leave --model, --heads and --kv-heads out",
                   (long long)heads, (long long)kv, dir, (long long)old, (long long)old_kv);
}

static bool make_model(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    int64_t vocab = kn_text_vocab(r->text);
    const kn_model_config *from = r->init           ? kn_import_config(r->init)
                                  : r->saved.family ? &r->saved
                                                    : NULL;
    if (!gpt_settings_model(s, vocab, from, &r->config))
        return false;
    const int64_t known = size_of(&r->config, "vocab", 0), ctx = size_of(&r->config, "ctx", 0);
    if (vocab > known)
        return kn_fail("the text has %lld kinds of token, the model's vocabulary %lld: use "
                       "--model custom, or --tokenizer byte",
                       (long long)vocab, (long long)known);
    if (s->ctx > ctx)
        return kn_fail("--ctx %lld is longer than the model's context of %lld", (long long)s->ctx,
                       (long long)ctx);
    const int64_t train = kn_text_count(r->text, KN_TRAIN),
                  rest = kn_text_count(r->text, KN_VALIDATION), most = rest < train ? rest : train;
    if (most > 1 && s->ctx >= most)
        return kn_fail("--ctx %lld doesn't fit the text: of its %lld tokens, %lld are for "
                       "validation; use --ctx %lld or less, or a longer text",
                       (long long)s->ctx, (long long)(train + rest), (long long)rest,
                       (long long)most - 1);
    return check_saved(r) && kn_text_check(r->text, s->ctx) &&
           kn_config_init(&r->model, &r->config, KN_F32, KN_META) &&
           (r->config_text = kn_config_text(&r->config)) != NULL;
}

/* Of all ranks, and of the checkpoint. */
static bool same_text(gpt_run *r)
{
    char text[128];
    snprintf(text, sizeof text, "%lld + %lld tokens of %lld kinds",
             (long long)kn_text_count(r->text, KN_TRAIN),
             (long long)kn_text_count(r->text, KN_VALIDATION), (long long)kn_text_vocab(r->text));
    return training_same_data(&r->t, &r->s.run, text, kn_text_hash(r->text));
}

/* Shards the model, makes the optimizer, loads the checkpoint. */
static bool prepare(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    training *t = &r->t;
    kn_comm_hook hook = settings_hook(&s->run);
    if (!kn_fsdp_wrap_(&r->model, t->world,
                       settings_fsdp(&s->run, r->config.family->block_class)) ||
        (hook && !kn_fsdp_set_comm_hook(&r->model, hook, NULL, true)))
        return false;
    if (r->init && !kn_import_load(r->init, &r->model)) /* averages begin with these weights */
        return false;
    t->model = &r->model;
    t->optim = gpt_settings_optim(s, &r->model);
    if (settings_scaled(&s->run) && !(t->scaler = kn_scaler_new(&r->model)))
        return false;
    if (s->run.ema > 0 && !(t->ema = kn_ema_new(&r->model, .decay = s->run.ema)))
        return false;
    if (!t->optim || !training_load(t))
        return false;
    kn_seed((uint64_t)s->run.seed);
    kn_set_step(t->begin);
    return true;
}

static bool begin(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    training *t = &r->t;
    const size_t ids = (size_t)(s->run.batch * s->ctx);
    r->x = kn_host_alloc(ids * sizeof *r->x);
    r->y = kn_host_alloc(ids * sizeof *r->y);
    t->device = settings_device(&s->run);
    kn_set_check(s->run.check);
    t->task = (task){ r, text_batch, model_loss, write_sample };
    t->plan = settings_plan(&s->run);
    t->plan.item = "tokens";
    t->plan.items = s->run.batch * s->ctx;
    t->plan.item_flops = r->config.family->flops_per_token(r->config.of, s->ctx);
    t->plan.config = r->config_text;
    t->plan.tokenizer = r->tokenizer;
    return r->x && r->y && training_begin(t);
}

static void print_model(const gpt_run *r)
{
    const kn_model_config *c = &r->config;
    const int64_t heads = size_of(c, "heads", 0), kv_heads = size_of(c, "kv-heads", heads),
                  embd = size_of(c, "embd", 0), mlp = size_of(c, "hidden", 4 * embd);
    char word[32], kv[48] = "", hidden[48] = "";
    if (kv_heads != heads)
        snprintf(kv, sizeof kv, ", %lld of keys and values", (long long)kv_heads);
    if (mlp != 4 * embd)
        snprintf(hidden, sizeof hidden, ", %lld in the MLP", (long long)mlp);
    report_row("model",
               "%s: %lld layers, %lld heads%s, %lld channels%s, context %lld, vocabulary %lld",
               settings_word(&r->s.run, "model", r->s.model, word, sizeof word),
               (long long)size_of(c, "layers", 0), (long long)heads, kv, (long long)embd, hidden,
               (long long)size_of(c, "ctx", 0), (long long)size_of(c, "vocab", 0));
}

/* A micro-batch's modules and what they cost, before the model takes memory. */
static bool print_summary(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    if (!s->run.summary || !first_rank(&r->t))
        return true;
    if (s->run.recompute)
        kn_family_recompute(r->config.family, &r->model, true);
    kn_scope scope = kn_scope_begin();
    kn_tensor *ids = kn_empty(KN_I64, KN_META, 2, (int64_t[]){ s->run.batch, s->ctx });
    bool ok = kn_summary(stdout, &r->model, KN_VALUES(ids, ids)) && fflush(stdout) == 0;
    kn_scope_end(scope);
    return ok;
}

/* The table at the start. Every rank calls it. */
static bool print_table(gpt_run *r)
{
    const gpt_settings *s = &r->s;
    const training *t = &r->t;
    int ranks = kn_comm_size(t->world);
    kn_fsdp_memory m = kn_fsdp_predict_optim(t->optim);
    if (first_rank(t)) {
        printf("train_gpt\n");
        print_model(r);
        if (r->init)
            report_row("begins with", "%s", s->init);
        report_row("parameters", "%lld", (long long)kn_param_count(&r->model));
        report_row("text", "%s: %lld tokens to train, %lld to validate", s->data,
                   (long long)kn_text_count(r->text, KN_TRAIN),
                   (long long)kn_text_count(r->text, KN_VALIDATION));
        report_row("step", "%lld rows of %lld x %lld micro-batches x %d ranks = %lld tokens",
                   (long long)s->run.batch, (long long)s->ctx, (long long)s->run.accum, ranks,
                   (long long)(s->run.batch * s->ctx * s->run.accum * ranks));
    }
    return print_run(t, &s->run, &m);
}

static void run_free(gpt_run *r)
{
    training_end(&r->t);
    kn_scaler_free(r->t.scaler);
    kn_ema_free(r->t.ema);
    kn_optim_free(r->t.optim);
    kn_module_free(&r->model);
    kn_import_free(r->init);
    kn_text_free(r->text);
    kn_tokenizer_free(r->tokenizer);
    kn_host_free(r->x);
    kn_host_free(r->y);
    kn_host_free(r->config_text);
    kn_options_free(r->t.options);
}

int main(int argc, char **argv)
{
    gpt_run r = { .t = { .program = argv[0] } };
    training *t = &r.t;
    save_listen();
    t->world = kn_init(&argc, &argv);
    if (kn_ok() && read_options(&r, argc, argv)) {
        if (kn_options_help_wanted(t->options)) {
            print_help(
                t, "train_gpt",
                "Trains a GPT or a Llama on a text, on one rank or on several sharded ones.");
        } else if (open_text(&r) && check_prompt(&r) && make_model(&r) && same_text(&r) &&
                   print_summary(&r) && prepare(&r) && begin(&r)) {
            stop_listen(first_rank(t));
            if (print_table(&r))
                training_run(t);
            end_output(t);
        }
    }
    run_free(&r);
    return kn_finish();
}
