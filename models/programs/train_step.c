/* models/programs/train_step.c: the steps and evaluations of train_gpt.
 *
 *   step:  for a in accum: micro-batch a * ranks + rank -> loss -> backward
 *          norm, clip, learning rate, AdamW */
#include "kernels/error.h"
#include "kernels/graph.h"
#include "kernels/trace.h"
#include "models/programs/stop.h"
#include "models/programs/train_run.h"

#include <math.h>
#include <stdio.h>

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

bool evaluate(run *r, step_report *p)
{
    int ranks = kn_comm_size(r->world), rank = kn_rank(r->world);
    int64_t count = r->s.eval_steps;
    bool mode = kn_set_grad_mode(false), ok = true;
    double sum = 0;
    kn_train(&r->model, false);
    for (int64_t first = 0; ok && !r->stop && first < count; first += ranks) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = loss_of(r, KN_VALIDATION, 0, (first + rank) % count);
        float mine[2] = { loss ? (float)kn_item(loss) : 0, stop_asked() };
        ok = loss && kn_all_gather(r->world, r->losses, mine, 2, KN_F32, kn_compute_stream(KN_CPU),
                                   "evaluation");
        for (int i = 0; ok && i < ranks; i++) {
            sum += first + i < count ? r->losses[2 * i] : 0;
            r->stop |= r->losses[2 * i + 1] != 0;
        }
        kn_scope_end(scope);
    }
    kn_train(&r->model, true);
    kn_set_grad_mode(mode);
    p->has_val = !r->stop;
    p->val_loss = sum / (double)count;
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

bool look(run *r, int keep)
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

/* ---- steps ------------------------------------------------------------------------------------- */

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
        !measures_send(r->measures, stop_asked()))
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
        !measures_send(r->measures, stop_asked()))
        return;
    r->launched = step + 1;
    kn_set_lr(r->optim, p->lr);
    if (look(r, r->behind) && r->scaler)
        kn_scaler_step(r->scaler, r->optim);
    else if (kn_ok())
        kn_step(r->optim);
}

bool train_step(run *r, int64_t step)
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
