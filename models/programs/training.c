/* models/programs/training.c: the loop of a trainer. Read training_run first, then training_step.c.
 *
 * On a GPU the host is a step ahead: a step's measurements are printed, logged and checked after
 * the next step has been launched, and at once only where training pauses. All ranks do so at the
 * same point. */
#include "kernels/error.h"
#include "models/programs/training.h"
#include "models/programs/stop.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>

/* ---- the folder ------------------------------------------------------------------------------ */

bool same_folder(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Rank 0 claims the folder that this run will save into, once. */
static bool claim_folder(training *t, const char *out, const char *resume, bool overwrite)
{
    out = out ? out : resume;
    if (!out || t->folder || !first_rank(t))
        return true;
    bool goes_on = resume && same_folder(out, resume);
    if (kn_run_folder_has_checkpoint(out) && !goes_on && !overwrite)
        return kn_fail(
            "%s already holds a checkpoint: go on from it with --resume %s, or begin anew "
            "and replace it with --overwrite",
            out, out);
    return (t->folder = kn_run_folder_claim(out)) != NULL;
}

bool training_open(training *t, const char *out, const char *resume, bool overwrite)
{
    const char *folder = out ? out : resume;
    if (folder && kn_run_folder_has_checkpoint(folder) && !claim_folder(t, out, resume, overwrite))
        return false;
    if (!resume)
        return true;
    t->from = kn_checkpoint_open(resume, t->world);
    return t->from && kn_checkpoint_options(t->from, t->options) &&
           (out || kn_options_set(t->options, "out", resume));
}

bool training_has_steps(const training *t, int64_t steps, const char *option)
{
    int64_t done = t->from ? kn_checkpoint_step(t->from) : 0;
    return !t->from || done < steps ||
           kn_fail("%s is at step %lld of %lld: nothing is left to train; give a larger --%s",
                   kn_checkpoint_folder(t->from), (long long)done, (long long)steps, option);
}

/* ---- beginning and ending -------------------------------------------------------------------- */

bool training_begin(training *t)
{
    const plan *p = &t->plan;
    t->behind = t->device == KN_CUDA;
    t->measures = measures_create(t->world, t->device, p->accum, t->behind);
    t->losses = kn_host_alloc(2 * sizeof(float) * (size_t)kn_comm_size(t->world));
    t->fixed = kn_host_calloc((size_t)p->accum, sizeof *t->fixed);
    t->replay = p->replay && kn_ok() ? kn_replay_new(t->model) : NULL;
    if (!t->measures || !t->losses || !t->fixed || (p->replay && !t->replay))
        return false;
    const bool goes_on = p->resume && p->out && same_folder(p->out, p->resume);
    if (p->keep_best && !best_begin(t, goes_on))
        return false;
    if (!first_rank(t))
        return true;
    if (p->log && !(t->log = fopen(p->log, t->from ? "a" : "w")))
        return kn_fail("cannot write the log %s: %s", p->log, strerror(errno));
    return claim_folder(t, p->out, p->resume, p->overwrite);
}

void training_end(training *t)
{
    if (t->log)
        fclose(t->log);
    kn_run_folder_release(t->folder);
    kn_replay_free(t->replay);
    for (int64_t i = 0; t->fixed && i < t->plan.accum; i++) {
        kn_tensor_free(t->fixed[i].x);
        kn_tensor_free(t->fixed[i].y);
    }
    kn_host_free(t->fixed);
    measures_free(t->measures);
    kn_checkpoint_free(t->from);
    kn_host_free(t->losses);
}

/* ---- training -------------------------------------------------------------------------------- */

bool training_stop_requested(void *arg)
{
    training *t = arg;
    float asked = stop_requested();
    if (kn_comm_size(t->world) > 1)
        kn_all_reduce_max(t->world, &asked, 1, kn_compute_stream(KN_CPU), "stop");
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
    bool ok = swap_averages(t) && t->task.sample(t->task.arg) && swap_averages(t);
    if (first)
        printf("\n\n");
    return ok;
}

static bool save(training *t, int64_t step)
{
    const plan *p = &t->plan;
    return !p->out || kn_checkpoint_save(p->out, t->model, .comm = t->world, .step = step,
                                         .optim = t->optim, .scaler = t->scaler, .ema = t->ema,
                                         .config = p->config, .tokenizer = p->tokenizer,
                                         .options = t->options, .folder = t->folder);
}

static bool every(int64_t n, int64_t step)
{
    return n > 0 && step % n == 0;
}

/* The next step's loss would end the run too, but only after this step replaced the last
 * checkpoint. */
static bool refuse_diverged(const training *t, const step_report *p)
{
    if (!p->has_val || isfinite(p->val_loss))
        return true;
    return kn_fail(
        "step %lld: the validation loss is %g: the run has diverged, and this step is not "
        "saved; use a smaller --lr or a longer --warmup%s",
        (long long)p->step, p->val_loss, t->plan.out ? ", or --resume the last checkpoint" : "");
}

/* After a step: evaluation, report, saving, a sample. A stop request leaves only the saving. */
static bool after_step(training *t, int64_t done)
{
    const plan *n = &t->plan;
    step_report *p = &t->report[(done - 1) % 2];
    bool last = done == n->steps || done == n->stop_after;
    bool samples = t->task.sample && every(n->sample_every, done);
    bool evaluates = n->eval_every > 0 && (done == n->steps || every(n->eval_every, done));
    if ((last || evaluates || samples || t->stop) && !take_measurements(t, 0))
        return false;
    if (evaluates && !t->stop && !(swap_averages(t) && evaluate(t, p) && swap_averages(t)))
        return false;
    if (measures_waiting(t->measures) == 0)
        report_step(t, p);
    bool saves = last || evaluates || t->stop;
    /* the best one first: where the run dies in between, it evaluates this step again */
    if (!refuse_diverged(t, p) || !best_keep(t, p) || (saves && !save(t, done)))
        return false;
    /* evaluating and sampling take long: look for a stop request before another step */
    if ((saves && n->out && !last) || samples)
        training_stop_requested(t);
    if (samples && !t->stop && !sample(t))
        return false;
    if (t->stop && !saves && !save(t, done))
        return false;
    t->stop |= done == n->stop_after;
    if (t->stop && done < n->steps)
        print_stopped(t, done);
    return kn_ok();
}

bool training_run(training *t)
{
    int64_t begin = t->from ? kn_checkpoint_step(t->from) : 0, steps = t->plan.steps;
    progress_begin(&t->progress, t->plan.item);
    if (t->device == KN_CUDA && t->plan.item_flops > 0) {
        t->progress.item_flops = t->plan.item_flops;
        t->progress.peak_flops = t->plan.peak_flops * kn_comm_size(t->world);
        t->progress.has_mfu = true;
    }
    for (int64_t step = begin; step < steps && !t->stop; step++)
        if (!train_step(t, step) || !after_step(t, step + 1))
            return false;
    print_gpu_memory(t);
    best_print(t);
    return true;
}
