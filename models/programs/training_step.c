/* models/programs/training_step.c: the steps and evaluations of a trainer.
 *
 *   step:  for a in accum: micro-batch a * ranks + rank -> loss -> backward
 *          norm, clip, optimizer */
#include "fsdp/record.h"
#include "kernels/error.h"
#include "kernels/graph.h"
#include "kernels/trace.h"
#include "models/programs/stop.h"
#include "models/programs/training.h"

#include <math.h>
#include <stdio.h>

/* ---- evaluation ------------------------------------------------------------------------------ */

enum { LOSS, BYTES, STOP, EVALUATED }; /* of a batch */

/* Of one whole batch on this rank the mean loss, a stop request, the bytes; false with an error. */
static bool validate(training *t, int64_t number, double mine[EVALUATED])
{
    batch b = { 0 };
    bool ok = t->of->batch(t, true, 0, number, t->device, &b);
    kn_tensor *loss = ok ? t->of->loss(t, &b) : NULL;
    mine[LOSS] = loss ? kn_item(loss) : 0;
    mine[BYTES] = b.bytes;
    mine[STOP] = stop_requested();
    return loss != NULL;
}

/* sum: of the losses of count batches. */
static void set_loss(const training *t, step_report *p, double sum, double bytes)
{
    const double count = (double)t->s->eval_steps;
    p->has_val = !t->stop;
    p->val_loss = sum / count;
    p->perplexity = t->of->of_tokens ? exp(p->val_loss) : 0;
    p->bits_per_byte = bytes > 0 ? sum * (double)t->items / (bytes * log(2)) : 0;
}

static bool evaluate_loss(training *t, step_report *p)
{
    int ranks = kn_comm_size(t->world), rank = kn_rank(t->world);
    int64_t count = t->s->eval_steps;
    double sum = 0, bytes = 0, mine[EVALUATED];
    double *all = kn_host_alloc((size_t)ranks * sizeof mine);
    bool ok = all != NULL;
    for (int64_t first = 0; ok && !t->stop && first < count; first += ranks) {
        kn_scope scope = kn_scope_begin();
        ok = validate(t, (first + rank) % count, mine) &&
             kn_all_gather(t->world, all, mine, EVALUATED, KN_F64, kn_compute_stream(KN_CPU),
                           "evaluation");
        for (int i = 0; ok && i < ranks; i++) {
            const double *of = all + i * EVALUATED;
            sum += first + i < count ? of[LOSS] : 0;
            bytes += first + i < count ? of[BYTES] : 0;
            t->stop |= of[STOP] != 0;
        }
        kn_scope_end(scope);
    }
    kn_host_free(all);
    set_loss(t, p, sum, bytes);
    return ok && kn_ok();
}

bool evaluate(training *t, step_report *p)
{
    const bool mode = kn_set_grad_mode(false);
    kn_train(&t->model, false);
    const bool ok = t->of->evaluate ? t->of->evaluate(t, p) : evaluate_loss(t, p);
    kn_train(&t->model, true);
    kn_set_grad_mode(mode);
    return ok;
}

/* ---- measurements of a step ------------------------------------------------------------------ */

static bool refuse_nonfinite(training *t, const step_report *p, int64_t nonfinite)
{
    bool finite = isfinite(p->grad_norm) || t->scaler; /* a scaler skips the step */
    if (isfinite(p->loss) && finite)
        return true;
    training_wait_for_save(t);
    const kn_param *list;
    const char *name =
        nonfinite < kn_params(&t->model, &list) && nonfinite >= 0 ? list[nonfinite].name : NULL;
    return kn_fail("step %lld: the loss is %g and the gradient's norm %g; the first tensor with a "
                   "value that is not finite is %s%s; use a smaller --lr or a longer --warmup%s",
                   (long long)p->step, p->loss, p->grad_norm, name ? "the gradient of " : "",
                   name ? name : "the loss", t->s->out ? ", or --resume the last checkpoint" : "");
}

/* On a GPU those of the step before come when a recording has begun. */
static void record_numbers(const training *t, const step_report *p)
{
    if (p->step < t->record_first)
        return;
    kn_record_number(p->step, "loss", p->loss);
    kn_record_number(p->step, "norm", p->grad_norm);
    kn_record_number(p->step, "lr", p->lr);
    kn_record_number(p->step, "items", (double)p->items);
}

bool take_measurements(training *t, int keep)
{
    while (measures_waiting(t->measures) > keep) {
        int64_t step = t->launched - measures_waiting(t->measures);
        step_report *p = &t->report[step % 2];
        measured m;
        if (!measures_take(t->measures, &m))
            return false;
        p->loss = m.loss;
        p->grad_norm = m.norm;
        t->stop |= m.news.stop;
        t->save_now |= m.news.now;
        if (m.news.save == t->saves && m.news.state >= KN_SAVE_WRITTEN) /* on every rank */
            kn_checkpoint_finish(t->folder, m.news.state == KN_SAVE_WRITTEN);
        double now = kn_now();
        p->seconds = now - fmax(p->begun, t->taken);
        t->taken = now;
        record_numbers(t, p);
        if (!refuse_nonfinite(t, p, m.nonfinite))
            return false;
        if (step + 1 < t->launched)
            report_step(t, p);
    }
    return true;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Settings that differ between the last micro-batch of a step and the others. */
static void set_micro_batch(training *t, bool last)
{
    if (kn_fsdp_units(&t->model, NULL, 0) > 0)
        kn_fsdp_set_is_last_backward(&t->model, last);
    if (t->s->no_sync)
        kn_fsdp_set_gradient_sync(&t->model, last, true);
    if (t->s->keep_gathered)
        kn_fsdp_set_reshard_after_backward(&t->model, last, true);
    if (t->s->all_reduce_last)
        kn_fsdp_set_all_reduce(&t->model, last, true);
}

/* This rank's a-th micro-batch of the step on device. */
static bool read_batch(training *t, int64_t a, kn_device device, batch *b)
{
    int64_t number = a * kn_comm_size(t->world) + kn_rank(t->world);
    if (device == KN_META) {
        const kn_values v = t->of->example(t);
        b->x = v.v[0];
        b->y = v.n > 1 ? v.v[1] : kn_empty(KN_I64, KN_META, KN_SHAPE(t->s->batch));
        b->more = v.n > 2 ? v.v[2] : NULL;
        return kn_ok();
    }
    return t->of->batch(t, false, t->step, number, device, b);
}

static bool copy_fixed(kn_tensor **fixed, kn_tensor *host, kn_device device)
{
    if (!*fixed) {
        kn_tensor *made = kn_empty(kn_dtype_of(host), device, kn_ndim(host), kn_shape(host));
        *fixed = made ? kn_keep(made) : NULL;
    }
    return *fixed && kn_copy_(*fixed, host);
}

/* Copies a recorded step's inputs to their fixed addresses. */
static bool feed(training *t)
{
    bool ok = true;
    for (int64_t a = 0; a < t->s->accum && ok; a++) {
        kn_scope scope = kn_scope_begin();
        batch b = { 0 };
        ok = read_batch(t, a, KN_CPU, &b) && copy_fixed(&t->fixed[a].x, b.x, t->device) &&
             copy_fixed(&t->fixed[a].y, b.y, t->device) &&
             (!b.more || copy_fixed(&t->fixed[a].more, b.more, t->device)) &&
             (!b.weight || copy_fixed(&t->fixed[a].weight, b.weight, t->device));
        kn_scope_end(scope);
    }
    return ok;
}

static kn_tensor *micro_batch_loss(training *t, int64_t a)
{
    batch b = t->replay ? t->fixed[a] : (batch){ 0 };
    bool ok = t->replay || read_batch(t, a, t->device, &b);
    return ok ? t->of->loss(t, &b) : NULL;
}

/* A whole step. It may be recorded, so all values that change from step to step lie in tensors. */
static bool run_step(void *arg)
{
    training *t = arg;
    for (int64_t a = 0; a < t->s->accum && kn_ok(); a++) {
        kn_scope scope = kn_scope_begin();
        set_micro_batch(t, a + 1 == t->s->accum);
        kn_tensor *loss = micro_batch_loss(t, a);
        kn_backward(t->scaler ? kn_scale_loss(t->scaler, loss) : loss);
        if (kn_ok() && t->measures)
            measures_loss(t->measures, a, loss);
        kn_scope_end(scope);
    }
    kn_tensor *norm = kn_ok() ? kn_clip_grad_norm_p(&t->model, t->s->clip, t->s->norm_of) : NULL;
    kn_tensor *nonfinite = norm ? kn_first_nonfinite_grad(&t->model) : NULL;
    return nonfinite && (!t->measures || measures_grads(t->measures, norm, nonfinite)) &&
           (t->scaler ? kn_scaler_step(t->scaler, t->optim) : kn_step(t->optim));
}

static void print_why_not_recorded(training *t)
{
    const char *why = t->replay && !t->printed_why ? kn_replay_why(t->replay) : NULL;
    if (why && kn_graph_supported(t->device) && first_rank(t))
        printf("steps aren't recorded as a graph: %s\n", why);
    t->printed_why = t->printed_why || why;
}

/* Loss and norm are checked after the step, on a GPU after the next one, but always before a save:
 * a value that isn't finite ends the run. */
static bool launch_step(training *t)
{
    bool ok = t->replay ? feed(t) && kn_replay_step(t->replay, run_step, t) : run_step(t);
    ok = ok && (!t->ema || kn_ema_update(t->ema));
    if (!ok || !measures_send(t->measures, (news){ stop_requested(), save_requested(), t->saves,
                                                   kn_checkpoint_poll(t->folder) }))
        return false;
    t->launched = t->step + 1;
    print_why_not_recorded(t);
    return take_measurements(t, t->behind);
}

bool train_step_on_meta(training *t)
{
    kn_scope scope = kn_scope_begin();
    bool ok = run_step(t) && (!t->ema || kn_ema_update(t->ema));
    kn_scope_end(scope);
    return ok && kn_ok();
}

bool train_step(training *t, int64_t step)
{
    const settings *n = t->s;
    step_report *p = &t->report[step % 2];
    *p = (step_report){ .step = step + 1,
                        .steps = n->steps,
                        .samples = training_samples(t, step + 1),
                        .lr = kn_schedule_at(&t->lr, step),
                        .items = t->items * n->accum * kn_comm_size(t->world),
                        .begun = kn_now() };
    t->step = step;
    kn_set_step(step); /* a skipped step counts */
    kn_set_lr(t->optim, p->lr);
    kn_ledger_reset_peaks();
    if (!recording_begin(t, step))
        return false;
    kn_scope scope = kn_scope_begin();
    launch_step(t);
    kn_scope_end(scope);
    if (t->behind == 0)
        p->seconds = kn_now() - p->begun;
    if (t->device != KN_CUDA) /* where its time is that of its launches */
        p->muon = kn_muon_seconds(t->optim);
    p->ledger = kn_ledger_read();
    return kn_ok() && recording_end(t, step);
}
