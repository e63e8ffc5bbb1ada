/* models/programs/training.c: the loop of a trainer. Read training_run first, then training_step.c.
 *
 * On a GPU the host is a step ahead: a step's measurements are printed, logged and checked after
 * the next step has been launched, and at once only where training pauses. All ranks do so at the
 * same point. */
#include "data/data.h"
#include "kernels/device.h"
#include "kernels/error_internal.h"
#include "models/programs/training.h"
#include "models/programs/stop.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the folder ------------------------------------------------------------------------------ */

/* The folder of the run whose checkpoint lies in path: the folder around path/., where path is a
 * checkpoint or a link to one (RUN/step-N, RUN/best), else path itself. Into run. */
static bool run_of(const char *path, char run[FOLDER])
{
    char *real = kn_is_there(path) ? kn_real_path(path) : NULL;
    char *last = real ? strrchr(real, '/') : NULL;
    int n = snprintf(run, FOLDER, "%s", path);
    /* a checkpoint, and no run of such a name */
    if (last && last > real && kn_folder_checkpoint(last + 1) >= 0 &&
        kn_is_in(real, KN_STATE_FILE)) {
        *last = 0;
        while (n > 1 && n < FOLDER && run[n - 1] == '/')
            run[--n] = 0;
        const kn_path above = kn_path_above(run);
        const bool link = !kn_are_same(above.text, real); /* from elsewhere */
        n = snprintf(run, FOLDER, "%s", link ? real : above.text);
    }
    free(real);
    return (n < FOLDER && kn_ok()) || kn_fail("--resume: the path %s is too long", path);
}

/* What rank 0 finds, and tells the others. */
typedef struct finding {
    char resume[FOLDER], out[FOLDER]; /* "": none */
    bool there;                       /* out holds a checkpoint */
    bool checks; /* auto, latest: nobody chose the checkpoint, so all of its bytes are compared */
} finding;

/* May the run, which goes on with that of the folder run ("": anew), save into out? */
static bool may_save(const finding *f, const char *run, bool overwrite)
{
    if (!f->there || !kn_folder_outside(f->out))
        return kn_ok();
    const bool same = *run && kn_are_same(f->out, run);
    if (same && overwrite)
        return kn_fail(
            "--resume %s goes on in %s, --overwrite replaces what is there; leave one of "
            "them out, or save elsewhere (--out)",
            f->resume, f->out);
    return kn_ok() && (same || overwrite ||
                       kn_fail("%s already holds a checkpoint: go on from it with --resume %s, "
                               "or begin anew "
                               "and replace it with --overwrite",
                               f->out, f->out));
}

/* auto and latest stand for --out. */
static bool find(finding *f, const settings *s)
{
    const char *out = s->out, *resume = s->resume;
    char run[FOLDER] = "";
    const bool automatic = resume && strcmp(resume, "auto") == 0;
    f->checks = automatic || (resume && strcmp(resume, "latest") == 0);
    if (f->checks && !out)
        return kn_fail("--resume %s is for --out DIR, from where it goes on; give that as well",
                       resume);
    if (f->checks && s->overwrite)
        return kn_fail("--resume %s goes on from a checkpoint, --overwrite replaces it; leave one "
                       "of them out",
                       resume);
    if (f->checks) /* without an error where there is none */
        resume = automatic && !kn_run_folder_has_checkpoint(out) ? NULL : out;
    if (resume && !run_of(resume, run))
        return false;
    if (snprintf(f->out, FOLDER, "%s", out ? out : run) >= FOLDER ||
        snprintf(f->resume, FOLDER, "%s", resume ? resume : "") >= FOLDER)
        return kn_fail("--out, --resume: the path is too long");
    f->there = kn_run_folder_has_checkpoint(f->out);
    return kn_ok() && (s->eval_only || may_save(f, run, s->overwrite));
}

static bool claim_folder(training *t)
{
    return t->folder || (t->folder = kn_run_folder_claim(t->out, .comm = t->world,
                                                         .overwrite = t->s->overwrite));
}

bool training_open(training *t)
{
    const settings *s = t->s;
    finding f = { 0 };
    if (!s->out && !s->resume)
        return true;
    if (first_rank(t) && !find(&f, s))
        return false;
    if (!kn_hosts_broadcast(t->world, &f, sizeof f, 0, "--out"))
        return false;
    memcpy(t->out, f.out, sizeof t->out);
    memcpy(t->resume, f.resume, sizeof t->resume);
    if (f.there && !s->eval_only && !claim_folder(t))
        return false;
    if (!f.resume[0])
        return true;
    t->from = f.checks ? kn_checkpoint_open_checked(f.resume, t->world)
                       : kn_checkpoint_open(f.resume, t->world);
    return t->from && kn_checkpoint_options(t->from, t->options) &&
           (s->out || kn_options_set(t->options, "out", f.out));
}

/* ---- beginning and ending -------------------------------------------------------------------- */

/* Claims the folder, where none held a checkpoint when it was looked for: another run may have
 * saved one since, and this run's saves would remove it. */
static bool claim_empty(training *t)
{
    return t->folder ||
           (claim_folder(t) &&
            (!first_rank(t) || t->s->overwrite || !kn_run_folder_has_checkpoint(t->out) ||
             kn_fail("another run saved a checkpoint in %s meanwhile: go on from it "
                     "with --resume %s, or choose another folder",
                     t->out, t->out)));
}

/* RUN/config.toml, with which the run begins: one that goes on in its folder has it already. */
static bool write_config(const training *t)
{
    const kn_path path = kn_path_of(t->s->out, "config.toml", "");
    char *options = NULL, *text = NULL;
    const bool there = t->from && kn_is_there(path.text);
    if (!there && kn_ok() && (options = kn_options_toml(t->options)) &&
        (text = kn_host_alloc(strlen(options) + 512))) {
        const int n =
            sprintf(text,
                    "# Options with which this run of %s began; %s --config config.toml\n"
                    "# --out OTHER repeats it. Behind # stand values that nobody chose.\n%s",
                    t->of->name, t->of->name, options);
        kn_file_write(path.text, (const void *[]){ text }, (size_t[]){ (size_t)n }, 1);
    }
    kn_host_free(text);
    kn_host_free(options);
    return kn_ok();
}

/* Claims the folder; what saves hold, before there is one, so that an error comes early. */
static bool begin_saving(training *t)
{
    const settings *p = t->s;
    if (!claim_empty(t) || !(t->record = training_record(t)) ||
        !(t->command = kn_options_command(t->options)) ||
        (t->tokenizer && !(t->tokens = kn_tokenizer_text(t->tokenizer))))
        return false;
    if (t->from && !kn_run_folder_set_aside(t->folder, t->from))
        return false;
    if (!kn_agree(t->world, !first_rank(t) || write_config(t)))
        return false;
    t->best_step = p->keep_best ? kn_run_folder_best(t->folder, &t->best) : -1;
    return kn_ok();
}

/* The log, and the losses before this start for charts. */
static bool open_log(training *t)
{
    const settings *s = t->s;
    char path[FOLDER + 16];
    const int64_t samples = training_samples(t, t->begin);
    const char *before = log_of_json(s->log, s->out, path, sizeof path);
    const log_options o = { .item = t->of->item,
                            .out = s->out,
                            .file = s->log,
                            .folder = s->tensorboard,
                            .goes_on = t->from != NULL,
                            .samples = samples,
                            .step = t->begin };
    if (s->plot && !(t->plot = kn_host_calloc(1, sizeof *t->plot)))
        return false;
    losses *const charts[] = { t->plot, t->curves };
    for (int i = 0; i < 2 && t->from && before; i++)
        if (charts[i] && !losses_read(charts[i], before, samples, true))
            return false;
    return (!o.out && !o.file && !o.folder) || (t->log = log_open(o));
}

bool training_begin(training *t)
{
    const settings *p = t->s;
    t->behind = t->device == KN_CUDA;
    t->measures = measures_create(t->world, t->device, p->accum, t->behind);
    t->fixed = kn_host_calloc((size_t)p->accum, sizeof *t->fixed);
    t->replay = p->cuda_graph && kn_ok() ? kn_replay_new(&t->model) : NULL;
    if (!t->measures || !t->fixed || (p->cuda_graph && !t->replay))
        return false;
    if (p->out && !begin_saving(t))
        return false;
    return !first_rank(t) || open_log(t);
}

void training_end(training *t)
{
    log_close(t->log);
    if (t->plot)
        losses_free(t->plot);
    kn_host_free(t->plot);
    kn_run_folder_release(t->folder);
    kn_replay_free(t->replay);
    for (int64_t i = 0; t->fixed && i < t->s->accum; i++) {
        kn_tensor_free(t->fixed[i].x);
        kn_tensor_free(t->fixed[i].y);
        kn_tensor_free(t->fixed[i].more);
        kn_tensor_free(t->fixed[i].weight);
    }
    kn_host_free(t->fixed);
    measures_free(t->measures);
    kn_checkpoint_free(t->from);
    kn_host_free(t->record);
    kn_host_free(t->command);
    kn_host_free(t->tokens);
}

/* ---- training -------------------------------------------------------------------------------- */

bool training_stop_requested(void *arg)
{
    training *t = arg;
    float asked = stop_requested();
    kn_hosts_max(t->world, &asked, 1, "stop");
    t->stop |= asked != 0;
    return t->stop;
}

/* Into the model and out again, where there are any. */
static bool swap_averages(training *t)
{
    return !t->ema || kn_ema_swap(t->ema);
}

static bool sample(training *t)
{
    bool first = first_rank(t);
    if (first)
        printf("\n");
    bool ok = swap_averages(t) && t->of->sample(t) && swap_averages(t);
    if (first)
        printf("\n\n");
    return ok;
}

/* The evaluation's number that is the lower the better; NAN: there was none. */
static double score_of(const step_report *p)
{
    return !p->has_val ? NAN : p->has_accuracy ? 1 - p->accuracy : p->val_loss;
}

/* Waits for a save in the background. One that failed is none. */
static void settle_save(training *t)
{
    if (!t->saves_later)
        return;
    t->saves_later = false;
    if (kn_checkpoint_wait(t->folder) || !kn_ok())
        return;
    t->saved_step = -1;
    if (t->s->keep_best)
        t->best_step = kn_run_folder_best(t->folder, &t->best);
}

static bool beats_best(const training *t, double score)
{
    return isfinite(score) && (t->best_step < 0 || score < t->best);
}

/* later: beside the next steps. */
static bool save(training *t, const step_report *p, bool later)
{
    const settings *n = t->s;
    const double score = score_of(p);
    const kn_checkpoint_file file = { KN_TOKENIZER_FILE, t->tokens,
                                      t->tokens ? strlen(t->tokens) : 0 };
    if (!n->out)
        return true;
    settle_save(t); /* it may be of this step, before a stop was requested */
    if (t->saved_step == p->step)
        return kn_ok();
    kn_host_free(t->record);
    if (!(t->record = training_record(t)))
        return false;
    t->saved_step = p->step;
    t->saves_later = later;
    t->saves = (t->saves + later) % MEASURES_SAVES;
    if (n->keep_best && beats_best(t, score)) {
        t->best_step = p->step;
        t->best = score;
    }
    return kn_checkpoint_save(
        n->out, &t->model, .comm = t->world, .step = p->step, .optim = t->optim,
        .scaler = t->scaler, .ema = t->ema, .config = t->config, .record = t->record,
        .files = &file, .file_count = t->tokens != NULL, .score = score == 0 ? KN_ZERO : score,
        .keep = (int)n->keep, .keep_best = n->keep_best, .folder = t->folder, .async = later);
}

void training_wait_for_save(training *t)
{
    if (t->folder && kn_ok())
        kn_checkpoint_wait(t->folder);
}

/* The first evaluation, or one that is better than all before whose save didn't fail. */
static bool is_better(training *t, const step_report *p)
{
    const double score = score_of(p);
    if (!t->s->keep_best || !isfinite(score))
        return false;
    if (!beats_best(t, score) && t->best_step == t->saved_step)
        settle_save(t);
    return beats_best(t, score);
}

/* Counts the evaluations since the best one: as many as --patience end the training. */
static void count_worse(training *t, const step_report *p)
{
    const double score = score_of(p);
    if (!isfinite(score))
        return;
    const bool better = isnan(t->least) || score < t->least;
    t->least = better ? score : t->least;
    t->worse = better ? 0 : t->worse + 1;
    t->early = t->s->patience > 0 && t->worse >= t->s->patience;
}

static bool every(int64_t n, int64_t step)
{
    return n > 0 && step % n == 0;
}

/* The next step's loss would end the run too, but only after this step replaced the last
 * checkpoint. */
static bool refuse_diverged(training *t, const step_report *p)
{
    if (!p->has_val || isfinite(p->val_loss))
        return true;
    training_wait_for_save(t);
    return kn_fail(
        "step %lld: the validation loss is %g: the run has diverged, and this step is not "
        "saved; use a smaller --lr or a longer --warmup%s",
        (long long)p->step, p->val_loss, t->s->out ? ", or --resume the last checkpoint" : "");
}

static bool settle_model(training *t)
{
    return !t->of->settle || t->of->settle(t);
}

/* An evaluation settles the model, with and without averages, also where a stop request leaves it
 * out: a resumed run goes on as if it had been. */
static bool settle_and_evaluate(training *t, step_report *p)
{
    if (!settle_model(t) || !swap_averages(t) || (t->ema && !settle_model(t)))
        return false;
    return (t->stop || evaluate(t, p)) && swap_averages(t);
}

/* After a step: evaluation, report, saving, a sample. A stop request leaves only the saving. */
static bool after_step(training *t, int64_t done)
{
    const settings *n = t->s;
    step_report *p = &t->report[(done - 1) % 2];
    bool last = done == n->steps || done == n->stop_after;
    bool samples = t->of->sample && every(n->sample_every, done);
    bool evaluates = n->eval_every > 0 && (done == n->steps || every(n->eval_every, done));
    bool due = n->save_every > 0 ? every(n->save_every, done) : evaluates;
    if ((last || evaluates || samples || due || t->stop || t->save_now) && !take_measurements(t, 0))
        return false;
    if (evaluates && !settle_and_evaluate(t, p))
        return false;
    count_worse(t, p);
    if (measures_waiting(t->measures) == 0)
        report_step(t, p);
    if (p->has_val)
        print_plot(t);
    bool ends = last || t->stop || t->early, better = is_better(t, p),
         saves = ends || due || better || t->save_now;
    if (!refuse_diverged(t, p) || (saves && !save(t, p, n->async_save && !ends && !t->save_now)))
        return false;
    if (t->save_now)
        print_saved(t, done);
    t->save_now = false;
    /* evaluating and sampling take long: look for a stop request before another step */
    if ((saves && n->out && !last) || samples)
        training_stop_requested(t);
    if (samples && !t->stop && !sample(t))
        return false;
    if (t->stop && !save(t, p, false))
        return false;
    t->stop |= done == n->stop_after;
    if ((t->stop || t->early) && done < n->steps)
        print_stopped(t, done);
    return kn_ok();
}

bool training_run(training *t)
{
    int64_t begin = t->begin, steps = t->s->steps;
    t->saved_step = -1;
    progress_begin(&t->progress, t->of->item);
    if (t->device == KN_CUDA && t->item_flops > 0) {
        t->progress.item_flops = t->item_flops;
        t->progress.peak_flops =
            report_peak(kn_cuda_describe(), t->s->dtype != 0, kn_f32_products(KN_CUDA)) *
            kn_comm_size(t->world);
        t->progress.has_mfu = true;
    }
    int64_t step = begin;
    for (; step < steps && !t->stop && !t->early; step++)
        if (!train_step(t, step) || !after_step(t, step + 1))
            return false;
    if (!recording_over(t, step))
        return false;
    training_wait_for_save(t);
    if (t->s->keep_best) /* a save in the background may have failed */
        t->best_step = kn_run_folder_best(t->folder, &t->best);
    print_gpu_memory(t);
    print_best(t);
    return kn_ok();
}
