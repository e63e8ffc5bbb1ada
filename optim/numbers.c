/* optim/numbers.c: the numbers that change from step to step (kn_step_scalars). They lie in device
 * memory; the host sends its part of them ahead of each step and of each replay of a recorded
 * step. */
#include "optim/optim_internal.h"
#include <math.h>
#include <string.h>

/* Copies the host's scalars to the device, ahead of the step on its stream. The count of skipped
 * steps stays. */
static bool send(const kn_optim *o)
{
    kn_step_scalars x = { .lr = o->lr,
                          .grad_scale = o->sent_scale,
                          .step = (double)o->sent_step,
                          .seed = kn_hash64(kn_context_get()->rng.seed, kn_hash_string("step")) };
    size_t bytes = offsetof(kn_step_scalars, skipped);
    void *at = kn_data_of(o->scalars);
    kn_device d = kn_device_of(o->scalars);
    if (d == KN_CPU)
        memcpy(at, &x, bytes);
    return d == KN_CPU || kn_transfer(kn_compute_stream(d), at, &x, bytes, KN_TO_DEVICE, false);
}

/* The host's part of a replayed step: it is counted, and it gets the learning rate of now. */
static bool before_step(void *arg, bool first)
{
    kn_optim *o = arg;
    const kn_param *p;
    int n = first ? 0 : kn_params(o->live.module->self, &p);
    for (int i = 0; i < n; i++)
        p[i].source->written(&p[i]);
    if (!first) {
        o->sent_step = ++o->steps;
        o->sent_scale = o->recorded_scale;
    }
    return kn_ok() && send(o);
}

static void graph_dropped(void *arg)
{
    ((kn_optim *)arg)->recorded = NULL;
}

bool kn_send_numbers(kn_optim *o, double scale)
{
    const kn_graph *g = kn_graph_recording();
    if (g && o->recorded == g)
        return kn_fail("kn_step: this optimizer has stepped already in the step that is recorded; "
                       "record one step at a time");
    if (g) {
        o->recorded = g;
        o->recorded_scale = scale;
    }
    o->sent_scale = scale;
    o->sent_step = o->steps + 1;
    return kn_graph_host_part(
        (kn_graph_hook){ .before = before_step, .drop = graph_dropped, .arg = o });
}

bool kn_settle_steps(kn_optim *o)
{
    if (!o->scaled)
        return true;
    o->steps = kn_optim_steps(o);
    o->scaled = false;
    return kn_fill_(o->scalars, 0);
}

void kn_set_lr(kn_optim *o, double lr)
{
    if (!(lr >= 0 && isfinite(lr))) {
        kn_fail("kn_set_lr: the learning rate is %g, should be at least 0", lr);
        return;
    }
    if (kn_optim_lives(o, "kn_set_lr") &&
        !kn_unrecordable(KN_DEVICE_DEFAULT, "kn_set_lr (call it before kn_replay_step)"))
        o->lr = lr;
}

double kn_lr(const kn_optim *o)
{
    return kn_optim_lives(o, "kn_lr") ? o->lr : 0;
}

int64_t kn_optim_steps(const kn_optim *o)
{
    kn_step_scalars x = { 0 };
    bool lives = kn_optim_lives(o, "kn_optim_steps");
    if (lives && o->scaled && kn_device_of(o->scalars) != KN_META)
        kn_to_host(o->scalars, &x, sizeof x);
    return lives ? o->steps - (int64_t)x.skipped : 0;
}

void kn_optim_set_steps(kn_optim *o, int64_t steps)
{
    if (!kn_optim_lives(o, "kn_optim_set_steps") || !kn_settle_steps(o))
        return;
    o->steps = steps;
}
