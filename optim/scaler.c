/* optim/scaler.c: dynamic loss scaling. The scale is left at the root module while gradients carry it,
 * where kn_grad_scale() reads it: so the step and clipping divide by it in the factor that they apply
 * anyway, and no gradient is rewritten. */
#include "optim/optim_internal.h"
#include <math.h>

/* Below this an overflow isn't the scale's fault; above the other the factor 1 / scale vanishes. */
#define SMALLEST 0x1p-20
#define LARGEST  0x1p100

struct kn_scaler {
    kn_module_impl *module;
    kn_scaler_options options;
    kn_scaler_state state;
};

kn_scaler *kn_scaler_new_(void *module, kn_scaler_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_scaler_new") : NULL;
    if (!m)
        return NULL;
    o.init_scale = o.init_scale != 0 ? o.init_scale : 65536;
    o.growth = o.growth != 0 ? o.growth : 2;
    o.backoff = o.backoff != 0 ? o.backoff : 0.5;
    o.interval = o.interval != 0 ? o.interval : 2000;
    if (!(o.init_scale >= SMALLEST && o.init_scale <= LARGEST)) {
        kn_fail("kn_scaler_new: .init_scale is %g; it must lie in [2^-20, 2^100]", o.init_scale);
        return NULL;
    }
    if (!(o.growth > 1 && isfinite(o.growth) && o.backoff > 0 && o.backoff < 1) || o.interval < 0) {
        kn_fail("kn_scaler_new: .growth is %g, .backoff %g, .interval %lld; they must be above 1, "
                "between 0 and 1, and above 0",
                o.growth, o.backoff, (long long)o.interval);
        return NULL;
    }
    kn_scaler *s = kn_malloc(sizeof *s);
    if (s)
        *s = (kn_scaler){ m, o, { .scale = o.init_scale } };
    return s;
}

void kn_scaler_free(kn_scaler *s)
{
    kn_free_host(s);
}

kn_tensor *kn_scale_loss(kn_scaler *s, kn_tensor *loss)
{
    if (!s || !kn_ok() || !kn_check(loss, "kn_scale_loss")) {
        if (kn_ok())
            kn_fail("kn_scale_loss: the scaler is NULL");
        return NULL;
    }
    kn_module_impl *root = kn_impl_root(s->module);
    if (root->rounds > 0 && root->loss_scale != s->state.scale) {
        kn_fail(
            "kn_scale_loss: gradients of this step carry the scale %g, this loss would carry %g; "
            "scale every loss of a step by one scaler",
            root->loss_scale > 0 ? root->loss_scale : 1, s->state.scale);
        return NULL;
    }
    root->loss_scale = s->state.scale;
    if (loss->dtype == KN_F16 || loss->dtype == KN_BF16)
        loss = kn_cast(loss, KN_F32); /* the default scale alone is more than f16 holds */
    return kn_scale(loss, s->state.scale);
}

static bool overflowed(kn_scaler *s)
{
    double lowered = s->state.scale * s->options.backoff;
    s->state.good = 0;
    s->state.skipped++;
    if (lowered < SMALLEST)
        return kn_fail(
            "kn_scaler_step: gradients aren't finite although the loss scale is down to %g; "
            "kn_find_nonfinite_grad, called before the step, names the parameter",
            s->state.scale);
    s->state.scale = lowered;
    return true;
}

bool kn_scaler_step(kn_scaler *s, kn_optim *o)
{
    if (!kn_ok() || !s || !o)
        return kn_ok() && kn_fail("kn_scaler_step: the %s is NULL", s ? "optimizer" : "scaler");
    kn_module_impl *m = kn_optim_module(o), *root = kn_impl_root(m);
    if (root != kn_impl_root(s->module))
        return kn_fail("kn_scaler_step: scaler and optimizer belong to different modules");
    if (root->rounds > 0 && root->loss_scale == 0)
        return kn_fail("kn_scaler_step: no loss of this step went through kn_scale_loss");
    const kn_param *p;
    int n = kn_params(m->self, &p);
    const kn_module_impl *clipped = kn_clipped(m); /* clipping has asked all ranks */
    float absmax = clipped ? clipped->grad_absmax : -1;
    if (n == 0 || !kn_may_step(m, p, n, "kn_scaler_step") ||
        (absmax < 0 && !kn_grads_absmax(root, p, n, &absmax)))
        return false;
    if (!isfinite(absmax)) {
        kn_consume_grads(m, p, n);
        return overflowed(s);
    }
    if (!kn_step(o))
        return false;
    if (++s->state.good >= s->options.interval) {
        s->state.good = 0;
        s->state.scale = fmin(LARGEST, s->state.scale * s->options.growth);
    }
    return true;
}

kn_scaler_state kn_scaler_get(const kn_scaler *s)
{
    return s ? s->state : (kn_scaler_state){ .scale = 1 };
}

bool kn_scaler_set(kn_scaler *s, kn_scaler_state state)
{
    if (!kn_ok() || !s)
        return kn_ok() && kn_fail("kn_scaler_set: the scaler is NULL");
    if (!(state.scale >= SMALLEST && state.scale <= LARGEST) || state.good < 0 || state.skipped < 0)
        return kn_fail(
            "kn_scaler_set: a scale of %g after %lld good and %lld skipped steps is no state "
            "of a scaler",
            state.scale, (long long)state.good, (long long)state.skipped);
    if (kn_impl_root(s->module)->rounds > 0)
        return kn_fail(
            "kn_scaler_set: gradients with the old scale wait for their step; set the state "
            "before the next backward");
    s->state = state;
    return true;
}
