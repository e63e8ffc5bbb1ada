/* models/programs/train_gpt.c: trains a GPT on a text, on one rank or on N sharded ranks.
 *
 *   step:  for a in accum: micro-batch a * ranks + rank -> loss -> backward
 *          norm, clip, learning rate, AdamW
 *
 * Read train() first. Every rank runs the same statements; only rank 0 prints and writes.
 *
 * On a GPU the host is a step ahead: what a step measured is looked at (printed, logged, checked) when the
 * next one has been launched, at once only where training pauses. All ranks look at the same moment. */
#include "kernels/kernels.h"
#include "models/checkpoint.h"
#include "models/programs/measures.h"
#include "models/programs/report.h"
#include "models/programs/settings.h"
#include "models/sample.h"
#include "models/text.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <string.h>

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
    kn_scaler *scaler; /* NULL: losses are not scaled */
    FILE *log;
    progress progress;
    measures *measures;
    kn_replay *replay; /* NULL: steps run as they come */
    kn_tensor *
        *fixed; /* [2 accum]: inputs and targets of a replayed step, which stay where they are */
    bool said;  /* why steps aren't recorded */
    int behind; /* steps that the host may be ahead */
    step_report report[2]; /* of this step and the one before, by the step's number */
    int64_t launched;      /* the step before this one was launched last */
    double taken;          /* when a step was last looked at */
    bool stop;             /* some rank wants to */
    float *losses;         /* [ranks]: of an evaluation */
    int64_t *x, *y;        /* [batch, ctx] */
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
    r->options = kn_options_create(settings_table, &r->s);
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
    return settings_check(&r->s, r->options, kn_comm_size(r->world));
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
    r->text = kn_text_open(path, settings_word("tokenizer", r->s.tokenizer, kind, sizeof kind),
                           &r->tokenizer);
    kn_free_host(path);
    return r->text != NULL;
}

static bool make_model(run *r)
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
    kn_gpt_recompute(&r->model, s->recompute);
    return true;
}

/* Shards the model, makes the optimizer, takes up what was saved. */
static bool prepare(run *r)
{
    const settings *s = &r->s;
    kn_comm_hook hook = settings_hook(s);
    if (!kn_fsdp_wrap_(&r->model, r->world, settings_fsdp(s)) ||
        (hook && !kn_fsdp_set_comm_hook(&r->model, hook, NULL, true)))
        return false;
    /* weights of products decay, biases and norms don't */
    kn_optim_group flat = { .max_ndim = 1, .weight_decay = KN_ZERO };
    r->optim = kn_adamw(&r->model, .lr = s->lr, .beta2 = s->beta2 > 0 ? s->beta2 : KN_ZERO,
                        .weight_decay = s->weight_decay > 0 ? s->weight_decay : KN_ZERO,
                        .groups = &flat, .group_count = 1);
    if (settings_scaled(s) && !(r->scaler = kn_scaler_new(&r->model)))
        return false;
    if (!r->optim || (r->from && !kn_checkpoint_load(r->from, &r->model, r->optim, r->scaler)))
        return false;
    kn_seed((uint64_t)s->seed);
    kn_set_step(r->from ? kn_checkpoint_step(r->from) : 0);
    return true;
}

/* What a step reads and writes has to stay where it is, for replays. */
static bool make_fixed(run *r)
{
    const settings *s = &r->s;
    r->replay = kn_replay_new(&r->model);
    r->fixed = kn_calloc(2 * (size_t)s->accum, sizeof(kn_tensor *));
    for (int64_t i = 0; r->fixed && i < 2 * s->accum && kn_ok(); i++)
        r->fixed[i] = kn_keep(kn_empty(KN_I64, settings_device(s), KN_SHAPE(s->batch, s->ctx)));
    return r->replay && r->fixed && kn_ok();
}

static bool make_buffers(run *r)
{
    size_t ids = (size_t)(r->s.batch * r->s.ctx);
    r->behind = settings_device(&r->s) == KN_CUDA;
    r->measures = measures_create(r->world, settings_device(&r->s), r->s.accum, r->behind);
    r->losses = kn_malloc(sizeof(float) * (size_t)kn_comm_size(r->world));
    r->x = kn_malloc(ids * sizeof *r->x);
    r->y = kn_malloc(ids * sizeof *r->y);
    if (!r->measures || !r->losses || !r->x || !r->y || (r->s.cuda_graph && !make_fixed(r)))
        return false;
    if (!first_rank(r))
        return true;
    if (r->s.log && !(r->log = fopen(r->s.log, r->from ? "a" : "w")))
        return kn_fail("cannot write the log %s: %s", r->s.log, strerror(errno));
    return !r->s.out || kn_checkpoint_prepare(r->s.out);
}

static void print_sharding(const settings *s)
{
    char a[32], b[32], c[32];
    report_row("strategy", "%s", settings_word("strategy", s->strategy, a, sizeof a));
    report_row("mesh", "%d replica%s of %d shard%s", s->mesh.replicas,
               s->mesh.replicas == 1 ? "" : "s", s->mesh.shards, s->mesh.shards == 1 ? "" : "s");
    report_row("layout", "%s", settings_word("layout", s->layout, a, sizeof a));
    report_row("dtypes", "%s computes, %s reduces%s%s, f32 masters",
               settings_word("dtype", s->dtype, a, sizeof a),
               settings_word("reduce-dtype", s->reduce_dtype, b, sizeof b),
               s->hook ? " through " : "",
               s->hook ? settings_word("hook", s->hook, c, sizeof c) : "");
}

static void print_table(run *r)
{
    const settings *s = &r->s;
    const kn_gpt_config *c = kn_gpt_config_of(&r->model);
    char a[32], b[32], buf[32];
    kn_fsdp_memory m = kn_fsdp_predict(&r->model);
    if (!first_rank(r))
        return;
    printf("train_gpt\n");
    report_row("model", "%s: %d layers, %d heads, %lld channels, context %lld, vocabulary %lld",
               settings_word("model", s->model, buf, sizeof buf), c->layers, c->heads,
               (long long)c->embd, (long long)c->ctx, (long long)c->vocab);
    report_row("parameters", "%lld", (long long)kn_param_count(&r->model));
    report_row("text", "%s: %lld tokens to train, %lld to validate", s->data,
               (long long)kn_text_count(r->text, KN_TRAIN),
               (long long)kn_text_count(r->text, KN_VALIDATION));
    report_row("step", "%lld rows of %lld x %lld micro-batches x %d ranks = %lld tokens",
               (long long)s->batch, (long long)s->ctx, (long long)s->accum, kn_comm_size(r->world),
               (long long)(s->batch * s->ctx * s->accum * kn_comm_size(r->world)));
    report_row("ranks", "%d (%s)", kn_comm_size(r->world), kn_comm_backend(r->world));
    print_sharding(s);
    report_row("threads a rank", "%d", kn_threads());
    report_row("instruction set", "%s", kn_cpu_isa());
    report_row("libraries", "%s", kn_cpu_libraries());
    if (settings_device(s) == KN_CUDA) {
        const char *gpu = kn_cuda_describe();
        report_row("gpu", "%s, NCCL %s", gpu ? gpu : "n/a", kn_comm_nccl_version());
        report_row("tf32, deterministic", "%s, %s", s->tf32 ? "yes" : "no",
                   s->deterministic ? "yes" : "no");
    }
    report_row("memory a rank", "%s parameters, gradients and AdamW's, %s gathered and unreduced",
               report_bytes((double)(m.param + m.grad + m.optim - m.pinned), a, sizeof a),
               report_bytes((double)(m.gathered + m.unreduced), b, sizeof b));
    if (r->replay)
        report_row("step as a graph", "%s%s", kn_replay_why(r->replay) ? "no: " : "from step 3 on",
                   kn_replay_why(r->replay) ? kn_replay_why(r->replay) : "");
    if (m.pinned)
        report_row("on the host", "%s parameters, gradients and AdamW's, page-locked",
                   report_bytes((double)m.pinned, a, sizeof a));
    else if (s->offload)
        report_row("in the store", "%s parameters, gradients and AdamW's, in %s",
                   report_bytes((double)m.store, a, sizeof a), s->offload);
    if (r->from)
        report_row("resumed", "%s at step %lld", s->resume, (long long)kn_checkpoint_step(r->from));
    printf("\n");
    fflush(stdout);
}

/* ---- losses ----------------------------------------------------------------------------------- */

static bool read_batch(run *r, kn_text_split split, int64_t step, int64_t micro)
{
    const settings *s = &r->s;
    return kn_text_batch(r->text, split, (uint64_t)s->seed, step, micro, s->batch, s->ctx, r->x,
                         r->y);
}

static kn_tensor *loss_of(run *r, kn_text_split split, int64_t step, int64_t micro)
{
    const settings *s = &r->s;
    if (!read_batch(r, split, step, micro))
        return NULL;
    kn_tensor *x = kn_from(KN_I64, settings_device(s), r->x, KN_SHAPE(s->batch, s->ctx));
    kn_tensor *y = kn_from(KN_I64, settings_device(s), r->y, KN_SHAPE(s->batch, s->ctx));
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
        ok = loss && kn_all_gather(r->world, r->losses, &mine, 1, KN_F32, kn_compute_stream(KN_CPU),
                                   "evaluation");
        for (int i = 0; ok && i < ranks && first + i < count; i++)
            sum += r->losses[i];
        kn_scope_end(scope);
    }
    kn_train(&r->model, true);
    kn_set_grad_mode(mode);
    *mean = sum / (double)count;
    return ok && kn_ok();
}

/* ---- what a step measured --------------------------------------------------------------------- */

static bool refuse_nonfinite(run *r, const step_report *p, int64_t nonfinite)
{
    bool finite = isfinite(p->grad_norm) || r->scaler; /* which skips the step */
    if (isfinite(p->loss) && finite)
        return true;
    const kn_param *list;
    const char *name =
        nonfinite < kn_params(&r->model, &list) && nonfinite >= 0 ? list[nonfinite].name : NULL;
    return kn_fail("step %lld: the loss is %g and the gradient's norm %g; the first tensor with a "
                   "value that is not finite is %s%s; use a smaller --lr or a longer --warmup%s",
                   (long long)p->step, p->loss, p->grad_norm, name ? "the gradient of " : "",
                   name ? name : "the loss", r->s.out ? ", or --resume what was saved before" : "");
}

static void tell(run *r, const step_report *p)
{
    if (!first_rank(r))
        return;
    progress_step(&r->progress, p);
    if (r->log)
        log_step(r->log, p);
}

/* Looks at what was measured until only `keep` steps are on their way; tells of those before the one that was
 * launched last. */
static bool look(run *r, int keep)
{
    while (measures_waiting(r->measures) > keep) {
        int64_t step = r->launched - measures_waiting(r->measures);
        step_report *p = &r->report[step % 2];
        measured m;
        if (!measures_take(r->measures, &m))
            return false;
        p->loss = m.loss;
        p->grad_norm = m.norm;
        r->stop |= m.stop;
        double now = kn_now();
        p->seconds = now - fmax(p->begun, r->taken);
        r->taken = now;
        if (!refuse_nonfinite(r, p, m.nonfinite))
            return false;
        if (step + 1 < r->launched)
            tell(r, p);
    }
    return true;
}

/* ---- training --------------------------------------------------------------------------------- */

/* What differs between the last micro-batch of a step and those before it. */
static void set_micro_batch(run *r, bool last)
{
    if (r->s.no_sync)
        kn_fsdp_set_gradient_sync(&r->model, last, true);
    if (r->s.keep_gathered)
        kn_fsdp_set_reshard_after_backward(&r->model, last, true);
    if (r->s.all_reduce_last)
        kn_fsdp_set_all_reduce(&r->model, last, true);
}

/* The number of this rank's a-th micro-batch in a step. */
static int64_t micro_batch(const run *r, int64_t a)
{
    return a * kn_comm_size(r->world) + kn_rank(r->world);
}

/* Losses and gradients of a step's micro-batches. */
static void run_micro_batches(run *r, int64_t step)
{
    for (int64_t a = 0; a < r->s.accum && kn_ok(); a++) {
        kn_scope scope = kn_scope_begin();
        set_micro_batch(r, a + 1 == r->s.accum);
        kn_tensor *loss = r->replay ? kn_gpt_loss(&r->model, r->fixed[2 * a], r->fixed[2 * a + 1])
                                    : loss_of(r, KN_TRAIN, step, micro_batch(r, a));
        kn_backward(r->scaler ? kn_scale_loss(r->scaler, loss) : loss);
        if (kn_ok())
            measures_loss(r->measures, a, loss);
        kn_scope_end(scope);
    }
}

/* What is recorded: nothing here depends on the step but what lies in tensors. */
static bool whole_step(void *arg)
{
    run *r = arg;
    run_micro_batches(r, 0);
    kn_tensor *norm = kn_ok() ? kn_clip_grad_norm_p(&r->model, r->s.clip, r->s.norm_of) : NULL;
    kn_tensor *nonfinite = norm ? kn_first_nonfinite_grad(&r->model) : NULL;
    return nonfinite && measures_grads(r->measures, norm, nonfinite) &&
           (r->scaler ? kn_scaler_step(r->scaler, r->optim) : kn_step(r->optim));
}

static bool feed(run *r, int64_t step)
{
    const settings *s = &r->s;
    bool ok = true;
    for (int64_t a = 0; a < s->accum && ok; a++) {
        kn_scope scope = kn_scope_begin();
        ok = read_batch(r, KN_TRAIN, step, micro_batch(r, a)) &&
             kn_copy_(r->fixed[2 * a], kn_from(KN_I64, KN_CPU, r->x, KN_SHAPE(s->batch, s->ctx))) &&
             kn_copy_(r->fixed[2 * a + 1],
                      kn_from(KN_I64, KN_CPU, r->y, KN_SHAPE(s->batch, s->ctx)));
        kn_scope_end(scope);
    }
    return ok;
}

/* A step as a graph. What it measured is looked at after it: a value that isn't finite ends the run one or
 * two steps later. */
static void replay_step(run *r, int64_t step, const step_report *p)
{
    kn_set_lr(r->optim, p->lr);
    if (!feed(r, step) || !kn_replay_step(r->replay, whole_step, r) ||
        !measures_send(r->measures, interrupted))
        return;
    r->launched = step + 1;
    const char *why = r->said ? NULL : kn_replay_why(r->replay);
    if (why && kn_graph_supported(settings_device(&r->s)) && first_rank(r))
        printf("steps aren't recorded as a graph: %s\n", why);
    r->said = r->said || why;
    look(r, r->behind);
}

static void plain_step(run *r, int64_t step, const step_report *p)
{
    run_micro_batches(r, step);
    kn_tensor *norm = kn_ok() ? kn_clip_grad_norm_p(&r->model, r->s.clip, r->s.norm_of) : NULL;
    kn_tensor *nonfinite = norm ? kn_first_nonfinite_grad(&r->model) : NULL;
    if (!nonfinite || !measures_grads(r->measures, norm, nonfinite) ||
        !measures_send(r->measures, interrupted))
        return;
    r->launched = step + 1;
    kn_set_lr(r->optim, p->lr);
    if (look(r, r->behind) && r->scaler)
        kn_scaler_step(r->scaler, r->optim);
    else if (kn_ok())
        kn_step(r->optim);
}

/* One optimizer step; step counts from 0. */
static bool train_step(run *r, int64_t step)
{
    const settings *s = &r->s;
    const kn_schedule schedule = { KN_COSINE, s->lr, s->min_lr, s->warmup, s->steps };
    step_report *p = &r->report[step % 2];
    *p = (step_report){ .step = step + 1,
                        .steps = s->steps,
                        .lr = kn_schedule_at(&schedule, step),
                        .tokens = s->batch * s->ctx * s->accum * kn_comm_size(r->world),
                        .begun = kn_now() };
    kn_set_step(step); /* a skipped step counts */
    kn_ledger_reset_peaks();
    kn_scope scope = kn_scope_begin();
    (r->replay ? replay_step : plain_step)(r, step, p);
    kn_scope_end(scope);
    if (r->behind == 0)
        p->seconds = kn_now() - p->begun;
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
    return kn_checkpoint_save(r->s.out, r->world, &r->model, r->optim, r->scaler, step,
                              r->tokenizer, r->options);
}

/* What GPU memory was taken from the driver, and how much of it lies idle in pieces. */
static void say_gpu_memory(const run *r)
{
    char a[32], b[32];
    if (settings_device(&r->s) != KN_CUDA || !first_rank(r))
        return;
    kn_cuda_memory_stats m = kn_cuda_memory_read();
    int64_t idle = m.reserved - m.live;
    printf("\ngpu memory: %s reserved at most; of %s that are free in it now, %.0f %% are in "
           "pieces smaller "
           "than the largest\n",
           report_bytes((double)m.peak_reserved, a, sizeof a),
           report_bytes((double)idle, b, sizeof b),
           idle > 0 ? 100 - 100 * (double)m.largest_free / (double)idle : 0);
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
    progress_begin(&r->progress);
    if (settings_device(&r->s) == KN_CUDA) {
        const kn_gpt_config *c = kn_gpt_config_of(&r->model);
        r->progress.flops_per_token = kn_gpt_flops_per_token(c, r->s.ctx);
        r->progress.peak_flops = report_peak(kn_cuda_describe(), (int)r->s.dtype != 0, r->s.tf32) *
                                 kn_comm_size(r->world);
        r->progress.has_mfu = true;
    }
    for (int64_t step = begin; step < steps && !r->stop; step++) {
        if (!train_step(r, step))
            return false;
        int64_t done = step + 1;
        step_report *p = &r->report[step % 2];
        r->stop |= done == r->s.stop_after;
        bool pause = done == steps || r->stop || every(r->s.eval_every, done) ||
                     every(r->s.sample_every, done);
        if (pause && !look(r, 0))
            return false;
        bool last = done == steps || r->stop;
        p->has_val = r->s.eval_every > 0 && (last || every(r->s.eval_every, done));
        if (p->has_val && !evaluate(r, &p->val_loss))
            return false;
        if (measures_waiting(r->measures) == 0)
            tell(r, p);
        if ((p->has_val || last) && !save(r, done))
            return false;
        if (every(r->s.sample_every, done) && !sample(r))
            return false;
        if (r->stop && done < steps)
            say_stopped(r, done);
    }
    say_gpu_memory(r);
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
    kn_replay_free(r->replay);
    for (int64_t i = 0; r->fixed && i < 2 * r->s.accum; i++)
        kn_free(r->fixed[i]);
    kn_free_host(r->fixed);
    measures_free(r->measures);
    kn_scaler_free(r->scaler);
    kn_optim_free(r->optim);
    kn_module_free(&r->model);
    kn_text_free(r->text);
    kn_tokenizer_free(r->tokenizer);
    kn_checkpoint_free(r->from);
    kn_free_host(r->losses);
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
        } else if (open_text(&r) && make_model(&r) && prepare(&r) && make_buffers(&r)) {
            listen();
            print_table(&r);
            train(&r);
        }
    }
    run_free(&r);
    return kn_finish();
}
