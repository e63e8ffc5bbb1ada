/* models/programs/train_gpt.c: trains a GPT on a text, on one rank or on N sharded ranks.
 *
 * Read train() first, then train_step.c. Every rank runs the same statements; only rank 0 prints and writes.
 *
 * On a GPU the host is a step ahead: what a step measured is looked at (printed, logged, checked) when the
 * next one has been launched, at once only where training pauses. All ranks look at the same moment. */
#include "kernels/device.h"
#include "kernels/error.h"
#include "models/programs/stop.h"
#include "models/programs/train_run.h"
#include "models/sample.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- setting up ------------------------------------------------------------------------------- */

static bool same_folder(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Rank 0 takes the folder that this run will save into, once. */
static bool claim_folder(run *r)
{
    const settings *s = &r->s;
    const char *out = s->out ? s->out : s->resume;
    if (!out || r->folder || !first_rank(r))
        return true;
    bool goes_on = s->resume && same_folder(out, s->resume);
    if (kn_run_folder_has_checkpoint(out) && !goes_on && !s->overwrite)
        return kn_fail(
            "%s already holds a checkpoint: go on from it with --resume %s, or begin anew "
            "and replace it with --overwrite",
            out, out);
    return (r->folder = kn_run_folder_claim(out)) != NULL;
}

static bool read_options(run *r, int argc, char **argv)
{
    r->options = kn_options_create(settings_table, &r->s);
    if (!r->options || !kn_options_parse(r->options, argc, argv))
        return false;
    if (kn_options_help_wanted(r->options))
        return true;
    const char *out = r->s.out ? r->s.out : r->s.resume;
    if (out && kn_run_folder_has_checkpoint(out) && !claim_folder(r))
        return false;
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
        kn_host_free(path);
        return false;
    }
    r->text = kn_text_open(path, settings_word("tokenizer", r->s.tokenizer, kind, sizeof kind),
                           &r->tokenizer);
    kn_host_free(path);
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
    if (!r->optim ||
        (r->from && !kn_checkpoint_load(r->from, r->world, &r->model, r->optim, r->scaler)))
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
    r->fixed = kn_host_calloc(2 * (size_t)s->accum, sizeof(kn_tensor *));
    for (int64_t i = 0; r->fixed && i < 2 * s->accum && kn_ok(); i++)
        r->fixed[i] = kn_keep(kn_empty(KN_I64, settings_device(s), KN_SHAPE(s->batch, s->ctx)));
    return r->replay && r->fixed && kn_ok();
}

static bool make_buffers(run *r)
{
    size_t ids = (size_t)(r->s.batch * r->s.ctx);
    r->behind = settings_device(&r->s) == KN_CUDA;
    r->measures = measures_create(r->world, settings_device(&r->s), r->s.accum, r->behind);
    r->losses = kn_host_alloc(2 * sizeof(float) * (size_t)kn_comm_size(r->world));
    r->x = kn_host_alloc(ids * sizeof *r->x);
    r->y = kn_host_alloc(ids * sizeof *r->y);
    if (!r->measures || !r->losses || !r->x || !r->y || (r->s.cuda_graph && !make_fixed(r)))
        return false;
    if (!first_rank(r))
        return true;
    if (r->s.log && !(r->log = fopen(r->s.log, r->from ? "a" : "w")))
        return kn_fail("cannot write the log %s: %s", r->s.log, strerror(errno));
    return claim_folder(r);
}

/* ---- training --------------------------------------------------------------------------------- */

/* Was any rank asked to stop? Then all know. Collective. */
static bool asked_to_stop(void *arg)
{
    run *r = arg;
    float asked = stop_asked();
    if (kn_comm_size(r->world) > 1)
        kn_all_reduce_max(r->world, &asked, 1, kn_compute_stream(KN_CPU), "stop");
    r->stop |= asked != 0;
    return r->stop;
}

static bool sample(run *r)
{
    bool first = first_rank(r);
    if (!r->tokenizer)
        return kn_fail("--sample-every needs a tokenizer, and the token file has none beside it");
    kn_sample_options o = { .temperature = 0.8,
                            .top_k = 200,
                            .seed = (uint64_t)r->s.seed,
                            .stop = asked_to_stop,
                            .stop_arg = r };
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

static bool every(int64_t n, int64_t step)
{
    return n > 0 && step % n == 0;
}

/* The loss of the next step would end the run too, but only after this one replaced what was saved. */
static bool refuse_diverged(const run *r, const step_report *p)
{
    if (!p->has_val || isfinite(p->val_loss))
        return true;
    return kn_fail(
        "step %lld: the validation loss is %g: the run has diverged, and this step is not "
        "saved; use a smaller --lr or a longer --warmup%s",
        (long long)p->step, p->val_loss, r->s.out ? ", or --resume what was saved before" : "");
}

/* What comes behind a step: evaluation, news, saving, a sample. A run that was asked to stop only saves. */
static bool after_step(run *r, int64_t done)
{
    const settings *s = &r->s;
    step_report *p = &r->report[(done - 1) % 2];
    bool last = done == s->steps || done == s->stop_after, samples = every(s->sample_every, done);
    bool evaluates = s->eval_every > 0 && (done == s->steps || every(s->eval_every, done));
    if ((last || evaluates || samples || r->stop) && !look(r, 0))
        return false;
    if (evaluates && !r->stop && !evaluate(r, p))
        return false;
    if (measures_waiting(r->measures) == 0)
        tell(r, p);
    bool saves = last || evaluates || r->stop;
    if (!refuse_diverged(r, p) || (saves && !save(r, done)))
        return false;
    /* a request that came meanwhile needs no further step */
    if ((saves && s->out && !last) || samples)
        asked_to_stop(r);
    if (samples && !r->stop && !sample(r))
        return false;
    if (r->stop && !saves && !save(r, done))
        return false;
    r->stop |= done == s->stop_after;
    if (r->stop && done < s->steps)
        say_stopped(r, done);
    return kn_ok();
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
    for (int64_t step = begin; step < steps && !r->stop; step++)
        if (!train_step(r, step) || !after_step(r, step + 1))
            return false;
    say_gpu_memory(r);
    return true;
}

static void run_free(run *r)
{
    if (r->log)
        fclose(r->log);
    kn_run_folder_release(r->folder);
    kn_replay_free(r->replay);
    for (int64_t i = 0; r->fixed && i < 2 * r->s.accum; i++)
        kn_tensor_free(r->fixed[i]);
    kn_host_free(r->fixed);
    measures_free(r->measures);
    kn_scaler_free(r->scaler);
    kn_optim_free(r->optim);
    kn_module_free(&r->model);
    kn_text_free(r->text);
    kn_tokenizer_free(r->tokenizer);
    kn_checkpoint_free(r->from);
    kn_host_free(r->losses);
    kn_host_free(r->x);
    kn_host_free(r->y);
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
            stop_listen(first_rank(&r));
            if (print_table(&r))
                train(&r);
            end_output(&r);
        }
    }
    run_free(&r);
    return kn_finish();
}
