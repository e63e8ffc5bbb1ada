/* models/programs/train_gpt.c: trains a GPT on a text, on one rank or on N sharded ranks.
 *
 *   step:  for a in accum: micro-batch a * ranks + rank -> loss -> backward
 *          norm, clip, learning rate, AdamW
 *
 * Read train() first. Every rank runs the same statements; only rank 0 prints and writes. */
#include "kernels/kernels.h"
#include "models/checkpoint.h"
#include "models/programs/report.h"
#include "models/sample.h"
#include "models/text.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

/* ---- options ---------------------------------------------------------------------------------- */

typedef struct settings {
    const char *data, *log, *out, *resume, *prompt;
    int tokenizer, model, dtype, strategy, prefetch, device;
    int64_t layers, heads, embd, ctx, batch, accum, steps, warmup, seed, ranks, threads;
    int64_t eval_every, eval_steps, sample_every, sample_tokens, stop_after;
    double lr, min_lr, weight_decay, beta2, clip, dropout;
    bool bias, recompute;
} settings;

#define MODELS     "custom|gpt2|gpt2-medium|gpt2-large|gpt2-xl"
#define TOKENIZERS "char|byte"
#define STRATEGIES "full_shard|no_shard"
#define AT(field)  offsetof(settings, field)

static const kn_option table[] = {
    { "text", KN_OPTION_HEADING },
    { "data", KN_OPTION_PATH, AT(data), "shakespeare", "a data set (shakespeare) or a file" },
    { "tokenizer", KN_OPTION_CHOICE, AT(tokenizer), "char", "how text becomes tokens",
      .choices = TOKENIZERS },
    { "model", KN_OPTION_HEADING },
    { "model", KN_OPTION_CHOICE, AT(model), "custom", "sizes", .choices = MODELS },
    { "layers", KN_OPTION_INT, AT(layers), "4", "blocks", .min = 1, .max = 10000 },
    { "heads", KN_OPTION_INT, AT(heads), "4", "attention heads a block", .min = 1, .max = 10000 },
    { "embd", KN_OPTION_INT, AT(embd), "128", "channels", .min = 1, .max = 1 << 20 },
    { "ctx", KN_OPTION_INT, AT(ctx), "64", "tokens in a row of a batch, and that the model sees",
      .min = 1, .max = 1 << 20 },
    { "bias", KN_OPTION_FLAG, AT(bias), "true", "biases in linear layers and norms" },
    { "dropout", KN_OPTION_FLOAT, AT(dropout), "0", "probability", .max = 0.999 },
    { "dtype", KN_OPTION_CHOICE, AT(dtype), "f32", "of computation; masters stay f32",
      .choices = "f32|bf16" },
    { "recompute", KN_OPTION_FLAG, AT(recompute), NULL,
      "keep only the blocks' inputs, compute them again in backward" },
    { "training", KN_OPTION_HEADING },
    { "batch", KN_OPTION_INT, AT(batch), "12", "rows of a micro-batch", .min = 1, .max = 1 << 20 },
    { "accum", KN_OPTION_INT, AT(accum), "1", "micro-batches a step and rank", .min = 1,
      .max = 1 << 20 },
    { "steps", KN_OPTION_INT, AT(steps), "2000", "optimizer steps", .min = 1, .max = 1e12 },
    { "lr", KN_OPTION_FLOAT, AT(lr), "1e-3", "peak learning rate", .max = 1e30 },
    { "min-lr", KN_OPTION_FLOAT, AT(min_lr), "-1", "learning rate at the end of the cosine",
      .min = -1, .max = 1e30, .note = "lr / 10" },
    { "warmup", KN_OPTION_INT, AT(warmup), "100", "steps until the peak", .max = 1e12 },
    { "weight-decay", KN_OPTION_FLOAT, AT(weight_decay), "0.1", "of matrices", .max = 1e3 },
    { "beta2", KN_OPTION_FLOAT, AT(beta2), "0.99", "AdamW's second", .max = 0.99999999 },
    { "clip", KN_OPTION_FLOAT, AT(clip), "1", "largest norm of the gradient; 0: no clipping" },
    { "seed", KN_OPTION_INT, AT(seed), "1337", "of weights, batches, dropout", .max = 9e15 },
    { "ranks", KN_OPTION_HEADING },
    { "ranks", KN_OPTION_INT, AT(ranks), "1", "processes that train together", .min = 1,
      .max = 4096, .transient = true },
    { "threads", KN_OPTION_INT, AT(threads), NULL, "of each rank", .max = 1024,
      .note = "cores / ranks", .transient = true },
    { "strategy", KN_OPTION_CHOICE, AT(strategy), "full_shard", "what ranks share",
      .choices = STRATEGIES, .transient = true },
    { "prefetch", KN_OPTION_CHOICE, AT(prefetch), "pre", "when backward gathers the next block",
      .choices = "pre|post|none", .transient = true },
    { "device", KN_OPTION_CHOICE, AT(device), "cpu", "where to compute", .choices = "cpu" },
    { "watching", KN_OPTION_HEADING },
    { "eval-every", KN_OPTION_INT, AT(eval_every), "250", "steps; 0: never evaluate", .max = 1e12 },
    { "eval-steps", KN_OPTION_INT, AT(eval_steps), "20", "batches of an evaluation", .min = 1,
      .max = 1e9 },
    { "sample-every", KN_OPTION_INT, AT(sample_every), "0", "steps; 0: never sample", .max = 1e12 },
    { "sample-tokens", KN_OPTION_INT, AT(sample_tokens), "200", "tokens of a sample", .min = 1,
      .max = 1 << 20 },
    { "prompt", KN_OPTION_STRING, AT(prompt), "\n", "what samples begin with",
      .note = "a new line" },
    { "log", KN_OPTION_PATH, AT(log), NULL, "write a JSON object a step into this file",
      .transient = true },
    { "saving", KN_OPTION_HEADING },
    { "out", KN_OPTION_PATH, AT(out), NULL, "save into this folder at evaluations, Ctrl-C, the end",
      .transient = true },
    { "resume", KN_OPTION_PATH, AT(resume), NULL, "go on from this folder, and save there",
      .transient = true },
    { "stop-after", KN_OPTION_INT, AT(stop_after), "0", "stop as on Ctrl-C after this step",
      .max = 1e12, .note = "never", .transient = true },
    { 0 },
};

/* The i-th word of "a|b|c". */
static const char *word(const char *list, int i, char *buf, size_t size)
{
    while (i-- > 0)
        list += strcspn(list, "|") + 1;
    snprintf(buf, size, "%.*s", (int)strcspn(list, "|"), list);
    return buf;
}

/* ---- the run ---------------------------------------------------------------------------------- */

typedef struct run {
    settings s;
    kn_options *options;
    kn_comm *world;
    kn_checkpoint *from; /* NULL: begins anew */
    kn_tokenizer *tokenizer;
    kn_text *text;
    kn_gpt model;
    kn_optim *optim;
    FILE *log;
    progress progress;
    float *losses;     /* [accum + 1]: this rank's, and whether it wants to stop */
    float *all_losses; /* [ranks * (accum + 1)] */
    int64_t *x, *y;    /* [batch, ctx] */
    const char *program;
} run;

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
    (void)sig;
    interrupted = 1;
}

static bool first_rank(const run *r)
{
    return kn_rank(r->world) == 0;
}

/* ---- setting up ------------------------------------------------------------------------------- */

static bool read_options(run *r, int argc, char **argv)
{
    r->options = kn_options_create(table, &r->s);
    if (!r->options || !kn_options_parse(r->options, argc, argv))
        return false;
    if (kn_options_help_wanted(r->options))
        return true;
    if (r->s.resume) {
        r->from = kn_checkpoint_open(r->s.resume, r->world);
        if (!r->from || !kn_checkpoint_options(r->from, r->options))
            return false;
        if (!r->s.out && !kn_options_set(r->options, "out", r->s.resume))
            return false;
        if (kn_checkpoint_step(r->from) >= r->s.steps)
            return kn_fail("%s is at step %lld of %lld: nothing is left to train; give a larger "
                           "--steps",
                           r->s.resume, (long long)kn_checkpoint_step(r->from),
                           (long long)r->s.steps);
    }
    if (r->s.min_lr < 0)
        r->s.min_lr = r->s.lr / 10;
    if (r->s.model != 0)
        for (const char *const *n = (const char *const[]){ "layers", "heads", "embd", NULL }; *n;
             n++)
            if (kn_options_given(r->options, *n))
                return kn_fail("--%s doesn't go with --model, which fixes it; leave one of them "
                               "out",
                               *n);
    return true;
}

static bool open_text(run *r)
{
    char kind[16];
    char *path = kn_data_find(r->s.data);
    if (!path)
        return false;
    if (r->from && !(r->tokenizer = kn_checkpoint_tokenizer(r->from))) {
        kn_free_host(path);
        return false;
    }
    r->text =
        kn_text_open(path, word(TOKENIZERS, r->s.tokenizer, kind, sizeof kind), &r->tokenizer);
    kn_free_host(path);
    return r->text != NULL;
}

static bool make_model(run *r)
{
    const settings *s = &r->s;
    char name[32];
    int64_t vocab = kn_text_vocab(r->text);
    kn_gpt_config c = { (int)s->layers, (int)s->heads, s->embd, s->ctx, vocab, 0, false };
    if (s->model != 0 && !kn_gpt_preset(word(MODELS, s->model, name, sizeof name), &c))
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
    kn_gpt_recompute(&r->model, s->recompute);
    bool bf16 = s->dtype == 1;
    if (!kn_fsdp_wrap(&r->model, r->world, .wrap_class = "gpt_block", .seed = (uint64_t)s->seed,
                      .strategy = s->strategy == 0 ? KN_FULL_SHARD : KN_NO_SHARD,
                      .backward_prefetch = (kn_backward_prefetch)(KN_PREFETCH_PRE + s->prefetch),
                      .param_dtype = bf16 ? KN_BF16 : KN_F32, .reduce_dtype = KN_F32))
        return false;
    /* weights of products decay, biases and norms don't */
    kn_optim_group flat = { .max_ndim = 1, .weight_decay = KN_ZERO };
    r->optim = kn_adamw(&r->model, .lr = s->lr, .beta2 = s->beta2 > 0 ? s->beta2 : KN_ZERO,
                        .weight_decay = s->weight_decay > 0 ? s->weight_decay : KN_ZERO,
                        .groups = &flat, .group_count = 1);
    if (!r->optim || (r->from && !kn_checkpoint_load(r->from, &r->model, r->optim)))
        return false;
    kn_seed((uint64_t)s->seed);
    kn_set_step(r->from ? kn_checkpoint_step(r->from) : 0);
    return true;
}

static bool make_buffers(run *r)
{
    size_t pieces = (size_t)r->s.accum + 1, ids = (size_t)(r->s.batch * r->s.ctx);
    r->losses = kn_malloc(pieces * sizeof(float));
    r->all_losses = kn_malloc(pieces * sizeof(float) * (size_t)kn_comm_size(r->world));
    r->x = kn_malloc(ids * sizeof *r->x);
    r->y = kn_malloc(ids * sizeof *r->y);
    if (!r->losses || !r->all_losses || !r->x || !r->y)
        return false;
    if (!first_rank(r))
        return true;
    if (r->s.log && !(r->log = fopen(r->s.log, r->from ? "a" : "w")))
        return kn_fail("cannot write the log %s: %s", r->s.log, strerror(errno));
    return !r->s.out || kn_checkpoint_prepare(r->s.out);
}

static void print_table(run *r)
{
    const settings *s = &r->s;
    const kn_gpt_config *c = kn_gpt_config_of(&r->model);
    char a[32], b[32], buf[32], strategy[32];
    kn_fsdp_memory m = kn_fsdp_predict(&r->model);
    if (!first_rank(r))
        return;
    printf("train_gpt\n");
    report_row("model", "%s: %d layers, %d heads, %lld channels, context %lld, vocabulary %lld",
               word(MODELS, s->model, buf, sizeof buf), c->layers, c->heads, (long long)c->embd,
               (long long)c->ctx, (long long)c->vocab);
    report_row("parameters", "%lld", (long long)kn_param_count(&r->model));
    report_row("text", "%s: %lld tokens to train, %lld to validate", s->data,
               (long long)kn_text_count(r->text, KN_TRAIN),
               (long long)kn_text_count(r->text, KN_VALIDATION));
    report_row("step", "%lld rows of %lld x %lld micro-batches x %d ranks = %lld tokens",
               (long long)s->batch, (long long)s->ctx, (long long)s->accum, kn_comm_size(r->world),
               (long long)(s->batch * s->ctx * s->accum * kn_comm_size(r->world)));
    report_row("ranks", "%d (%s)", kn_comm_size(r->world), kn_comm_backend(r->world));
    report_row("strategy", "%s", word(STRATEGIES, s->strategy, strategy, sizeof strategy));
    report_row("threads a rank", "%d", kn_threads());
    report_row("instruction set", "%s", kn_cpu_isa());
    report_row("libraries", "%s", kn_cpu_libraries());
    report_row("memory a rank", "%s parameters, gradients and AdamW's, %s gathered and unreduced",
               report_bytes((double)(m.param + m.grad + m.optim), a, sizeof a),
               report_bytes((double)(m.gathered + m.unreduced), b, sizeof b));
    if (r->from)
        report_row("resumed", "%s at step %lld", s->resume, (long long)kn_checkpoint_step(r->from));
    printf("\n");
    fflush(stdout);
}

/* ---- losses ----------------------------------------------------------------------------------- */

static kn_tensor *loss_of(run *r, kn_text_split split, int64_t step, int64_t micro)
{
    const settings *s = &r->s;
    if (!kn_text_batch(r->text, split, (uint64_t)s->seed, step, micro, s->batch, s->ctx, r->x,
                       r->y))
        return NULL;
    kn_tensor *x = kn_from(KN_I64, KN_CPU, r->x, KN_SHAPE(s->batch, s->ctx));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, r->y, KN_SHAPE(s->batch, s->ctx));
    return kn_gpt_loss(&r->model, x, y);
}

/* Mean loss over the same validation batches at every call, summed in their order whichever rank
 * computed them. Every rank takes part in every forward, since that gathers. */
static bool evaluate(run *r, double *mean)
{
    int ranks = kn_comm_size(r->world), rank = kn_rank(r->world);
    int64_t count = r->s.eval_steps;
    bool mode = kn_set_grad_mode(false), ok = true;
    double sum = 0;
    kn_train(&r->model, false);
    for (int64_t first = 0; ok && first < count; first += ranks) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = loss_of(r, KN_VALIDATION, 0, (first + rank) % count);
        float mine = loss ? (float)kn_item(loss) : 0;
        ok = loss && kn_all_gather(r->world, r->all_losses, &mine, 1, KN_F32,
                                   kn_compute_stream(KN_CPU), "evaluation");
        for (int i = 0; ok && i < ranks && first + i < count; i++)
            sum += r->all_losses[i];
        kn_scope_end(scope);
    }
    kn_train(&r->model, true);
    kn_set_grad_mode(mode);
    *mean = sum / (double)count;
    return ok && kn_ok();
}

/* The step's mean loss in micro-batch order (a * ranks + rank), and whether any rank wants to stop. */
static bool share_losses(run *r, double *mean, bool *stop)
{
    int64_t accum = r->s.accum, ranks = kn_comm_size(r->world);
    r->losses[accum] = interrupted ? 1 : 0;
    if (!kn_all_gather(r->world, r->all_losses, r->losses, accum + 1, KN_F32,
                       kn_compute_stream(KN_CPU), "losses"))
        return false;
    double sum = 0;
    for (int64_t a = 0; a < accum; a++)
        for (int64_t k = 0; k < ranks; k++)
            sum += r->all_losses[k * (accum + 1) + a];
    for (int64_t k = 0; k < ranks; k++)
        *stop |= r->all_losses[k * (accum + 1) + accum] != 0;
    *mean = sum / (double)(accum * ranks);
    return true;
}

/* ---- training --------------------------------------------------------------------------------- */

static bool refuse_nonfinite(run *r, const step_report *p)
{
    if (isfinite(p->loss) && isfinite(p->grad_norm))
        return true;
    const char *name = kn_find_nonfinite_grad(&r->model);
    return kn_fail("step %lld: the loss is %g and the gradient's norm %g; the first tensor with a "
                   "value that is not finite is %s%s; use a smaller --lr or a longer --warmup%s",
                   (long long)p->step, p->loss, p->grad_norm, name ? "the gradient of " : "",
                   name ? name : "the loss", r->s.out ? ", or --resume what was saved before" : "");
}

/* One optimizer step; step counts from 0. */
static bool train_step(run *r, int64_t step, step_report *p, bool *stop)
{
    const settings *s = &r->s;
    const kn_schedule schedule = { KN_COSINE, s->lr, s->min_lr, s->warmup, s->steps };
    double begin = kn_now();
    kn_ledger_reset_peaks();
    kn_scope scope = kn_scope_begin();
    for (int64_t a = 0; a < s->accum && kn_ok(); a++) {
        kn_scope inner = kn_scope_begin();
        kn_tensor *loss =
            loss_of(r, KN_TRAIN, step, a * kn_comm_size(r->world) + kn_rank(r->world));
        kn_backward(loss);
        r->losses[a] = kn_ok() ? (float)kn_item(loss) : 0;
        kn_scope_end(inner);
    }
    p->step = step + 1;
    p->steps = s->steps;
    p->lr = kn_schedule_at(&schedule, step);
    p->has_val = false;
    if (kn_ok() && share_losses(r, &p->loss, stop)) {
        p->grad_norm = kn_clip_grad_norm(&r->model, s->clip);
        kn_set_lr(r->optim, p->lr);
        if (refuse_nonfinite(r, p))
            kn_step(r->optim);
    }
    kn_scope_end(scope);
    p->seconds = kn_now() - begin;
    p->tokens = s->batch * s->ctx * s->accum * kn_comm_size(r->world);
    p->ledger = kn_ledger_read();
    return kn_ok();
}

static bool sample(run *r)
{
    bool first = first_rank(r);
    if (!r->tokenizer)
        return kn_fail("--sample-every needs a tokenizer, and the token file has none beside it");
    kn_sample_options o = { .temperature = 0.8, .top_k = 200, .seed = (uint64_t)r->s.seed };
    if (first)
        printf("\n");
    bool ok = kn_gpt_write(&r->model, r->tokenizer, r->s.prompt, r->s.sample_tokens, &o,
                           first ? stdout : NULL);
    if (first)
        printf("\n\n");
    return ok;
}

static bool save(run *r, int64_t step)
{
    if (!r->s.out)
        return true;
    if (!r->tokenizer)
        return kn_fail("--out needs a tokenizer, and the token file has none beside it");
    return kn_checkpoint_save(r->s.out, r->world, &r->model, r->optim, step, r->tokenizer,
                              r->options);
}

static void say_stopped(const run *r, int64_t step)
{
    if (!first_rank(r))
        return;
    printf("\nstopped after step %lld of %lld; ", (long long)step, (long long)r->s.steps);
    if (r->s.out)
        printf("saved. To go on: %s --resume %s\n", r->program, r->s.out);
    else
        printf("nothing was saved, for lack of --out DIR\n");
}

static bool every(int64_t n, int64_t step)
{
    return n > 0 && step % n == 0;
}

static bool train(run *r)
{
    int64_t begin = r->from ? kn_checkpoint_step(r->from) : 0, steps = r->s.steps;
    bool stop = false;
    progress_begin(&r->progress);
    for (int64_t step = begin; step < steps && !stop; step++) {
        step_report p = { 0 };
        if (!train_step(r, step, &p, &stop))
            return false;
        int64_t done = step + 1;
        stop = stop || done == r->s.stop_after;
        bool last = done == steps || stop;
        bool look = r->s.eval_every > 0 && (last || every(r->s.eval_every, done));
        if (look) {
            if (!evaluate(r, &p.val_loss))
                return false;
            p.has_val = true;
        }
        if (first_rank(r)) {
            progress_step(&r->progress, &p);
            if (r->log)
                log_step(r->log, &p);
        }
        if ((look || last) && !save(r, done))
            return false;
        if (every(r->s.sample_every, done) && !sample(r))
            return false;
        if (stop && done < steps)
            say_stopped(r, done);
    }
    return true;
}

static void listen(void)
{
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static void run_free(run *r)
{
    if (r->log)
        fclose(r->log);
    kn_optim_free(r->optim);
    kn_module_free(&r->model);
    kn_text_free(r->text);
    kn_tokenizer_free(r->tokenizer);
    kn_checkpoint_free(r->from);
    kn_free_host(r->losses);
    kn_free_host(r->all_losses);
    kn_free_host(r->x);
    kn_free_host(r->y);
    kn_options_free(r->options);
}

int main(int argc, char **argv)
{
    run r = { .program = argv[0] };
    r.world = kn_init(&argc, &argv);
    if (kn_ok() && read_options(&r, argc, argv)) {
        if (kn_options_help_wanted(r.options)) {
            if (first_rank(&r))
                kn_options_help(r.options, stdout, "train_gpt",
                                "Trains a GPT on a text, on one rank or on several sharded ones.");
        } else if (open_text(&r) && make_model(&r) && make_buffers(&r)) {
            listen();
            print_table(&r);
            train(&r);
        }
    }
    run_free(&r);
    return kn_finish();
}
