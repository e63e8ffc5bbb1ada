/* optim/scaler.c: dynamic loss scaling. A scaled loss knows its scale, and so do the gradients of
 * its backward (autograd/scale.c): step and clipping divide by it in the factor that they apply
 * anyway, and no gradient is rewritten.
 *
 * Scale and counts live where the masters do, and a kernel decides there whether the step changes
 * anything (KN_K_LOSS_SCALE): the host doesn't wait for the norm. The error for a scale that can't
 * be lowered further comes when the state has arrived, on a GPU a step or two later. */
#include "optim/optim_internal.h"
#include <math.h>

/* An overflow below SMALLEST has another cause than the scale; above LARGEST 1 / scale vanishes. */
#define SMALLEST 0x1p-20
#define LARGEST  0x1p100

struct kn_scaler {
    kn_module_impl *module;
    kn_scaler_options options;
    kn_scaler_state initial; /* until there is a state on the device */
    kn_tensor *state;        /* kn_loss_scale_state */
    kn_tensor *carried;      /* f32: the scale of losses; gradients hold references */
    bool moved;              /* state's scale may differ from carried */
    kn_fetch *incoming;      /* a copy of state on its way to the host */
    int64_t stuck;           /* state.stuck when last checked */
    const kn_optim *last;    /* that stepped, maybe a freed one */
    int64_t iteration;       /* kn_optim.scaled_in of those that stepped in this one */
    bool stepped;            /* one did */
};

static _Atomic int64_t iterations; /* no two scalers have one in common */

kn_scaler *kn_scaler_new_(void *module, kn_scaler_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_scaler_new") : NULL;
    if (!m)
        return NULL;
    o.init_scale = o.init_scale != 0 ? o.init_scale : 65536;
    o.growth = o.growth != 0 ? o.growth : 2;
    o.backoff = o.backoff != 0 ? o.backoff : 0.5;
    o.interval = o.interval != 0 ? o.interval : 2000;
    if (!(o.init_scale >= SMALLEST && o.init_scale <= LARGEST))
        return kn_fail_null("kn_scaler_new: .init_scale is %g; it must lie in [2^-20, 2^100]",
                            o.init_scale);
    if (!(o.growth > 1 && isfinite(o.growth) && o.backoff > 0 && o.backoff < 1) || o.interval < 0)
        return kn_fail_null(
            "kn_scaler_new: .growth is %g, .backoff %g, .interval %lld; they must be above 1, "
            "between 0 and 1, and above 0",
            o.growth, o.backoff, (long long)o.interval);
    kn_scaler *s = kn_host_alloc(sizeof *s);
    kn_changed();
    if (s)
        *s = (kn_scaler){ .module = m,
                          .options = o,
                          .initial = { .scale = o.init_scale },
                          .iteration = ++iterations };
    return s;
}

void kn_scaler_free(kn_scaler *s)
{
    if (!s)
        return;
    kn_graph_forget(s);
    kn_changed();
    if (s->incoming)
        kn_fetch_end(s->incoming, NULL, 0);
    kn_tensor_free(s->state);
    kn_tensor_free(s->carried);
    kn_host_free(s);
}

/* ---- the state on the device ----------------------------------------------------------------- */

static bool write_state(kn_scaler *s, kn_scaler_state from)
{
    kn_loss_scale_state x = { from.scale, from.good, from.skipped, 0, 0 };
    kn_stream *stream = kn_compute_stream(kn_device_of(s->state));
    s->moved = true;
    return kn_transfer(stream, kn_array_of(s->state).data, &x, sizeof x, KN_TO_DEVICE, false);
}

/* Made at first use: until then the module may move to another device. */
static bool state_begin(kn_scaler *s)
{
    const kn_param *p;
    int n = s->state ? 1 : kn_params(s->module->self, &p);
    if (s->state || n == 0)
        return n > 0 || kn_fail("kn_scaler: the module has no parameters");
    int64_t words = sizeof(kn_loss_scale_state) / sizeof(int64_t);
    kn_device d = kn_norms_device(p);
    s->carried = kn_tensor_new(KN_F32, d, NULL, KN_MEM_OPTIM, 0, NULL, NULL, false);
    s->state = kn_tensor_new(KN_I64, d, NULL, KN_MEM_OPTIM, 1, &words, NULL, false);
    if (s->carried && s->state && write_state(s, s->initial))
        return true;
    kn_tensor_free(s->carried);
    kn_tensor_free(s->state);
    s->carried = s->state = NULL;
    return false;
}

/* Waits for the device. */
static bool read_state(const kn_scaler *s, kn_loss_scale_state *x)
{
    *x = (kn_loss_scale_state){ s->initial.scale, s->initial.good, s->initial.skipped, 0, 0 };
    return !s->state || kn_to_host(s->state, x, sizeof *x);
}

/* A step that is yet to come has gradients with the scale of before: others that add to them get
 * it, too. */
static bool waits(const kn_scaler *s)
{
    return s->carried && kn_scale_waits(s->module, s->carried);
}

/* Where something still refers to the scale of before, there is another tensor for the new one. */
static bool renew_carried(kn_scaler *s)
{
    if (s->carried->refs == 1 || kn_recording()) /* a replay writes to one place */
        return true;
    kn_tensor *t =
        kn_tensor_new(KN_F32, kn_device_of(s->carried), NULL, KN_MEM_OPTIM, 0, NULL, NULL, false);
    if (!t)
        return false;
    kn_tensor_free(s->carried);
    s->carried = t;
    return true;
}

/* carried = the scale of the state. */
static bool carry(kn_scaler *s)
{
    if (!kn_recording() && (!s->moved || waits(s))) /* a replay always copies */
        return kn_ok();
    if (!renew_carried(s))
        return false;
    s->moved = false;
    s->carried->storage->version++;
    return kn_copy_run(kn_compute_stream(kn_device_of(s->state)), kn_array_of(s->carried).data,
                       KN_F32, kn_array_of(s->state).data, KN_F64, 1);
}

/* ---- scaling --------------------------------------------------------------------------------- */

kn_tensor *kn_scale_loss(kn_scaler *s, kn_tensor *loss)
{
    if (!kn_given(s, "kn_scale_loss", "the scaler") || !kn_ok() || !kn_check(loss, "kn_scale_loss"))
        return NULL;
    if (!state_begin(s) || !carry(s))
        return NULL;
    if (loss->dtype == KN_F16 || loss->dtype == KN_BF16)
        loss = kn_cast(loss, KN_F32); /* the default scale exceeds f16's range */
    bool here = loss && kn_device_of(loss) == kn_device_of(s->carried);
    kn_tensor *by = !here || loss->dtype == KN_F32 ? s->carried : kn_cast(s->carried, loss->dtype);
    kn_tensor *scaled = here ? kn_mul(loss, by) : kn_scale(loss, kn_item(s->carried));
    kn_scaled_by(scaled, s->carried);
    return scaled;
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Fails if gradients overflowed at the smallest scale since the last check. */
static bool may_go_on(kn_scaler *s, const kn_loss_scale_state *x)
{
    bool ok = x->stuck <= s->stuck;
    s->stuck = x->stuck;
    return ok ||
           kn_fail("kn_scaler_step: gradients aren't finite although the loss scale is down to "
                   "%g; kn_find_nonfinite_grad, called before the step, names the parameter",
                   x->scale);
}

/* Checks the state: at once in host memory; on a GPU the copy that has arrived, then starts the
 * next. */
static bool check_state(kn_scaler *s)
{
    kn_loss_scale_state x;
    if (kn_device_of(s->state) == KN_CPU)
        return read_state(s, &x) && may_go_on(s, &x);
    if (s->incoming && !kn_fetch_ready(s->incoming))
        return true;
    bool ok = !s->incoming || (kn_fetch_end(s->incoming, &x, sizeof x) && may_go_on(s, &x));
    s->incoming = ok ? kn_fetch_begin(s->state) : NULL;
    return s->incoming != NULL;
}

static void after_launch(void *s)
{
    check_state(s);
}

static kn_loss_scale_args args_of(const kn_scaler *s)
{
    return (kn_loss_scale_args){ .state = kn_array_of(s->state).data,
                                 .growth = s->options.growth,
                                 .backoff = s->options.backoff,
                                 .smallest = SMALLEST,
                                 .largest = LARGEST,
                                 .interval = s->options.interval };
}

/* o may step in this iteration: the scale moves once in each. */
static bool has_turn(const kn_scaler *s, const kn_optim *o)
{
    if (s->options.several)
        return o->scaled_in != s->iteration ||
               kn_fail("kn_scaler_step: the optimizer stepped already in this iteration; end each "
                       "one with kn_scaler_update");
    return !s->last || s->last == o || !kn_is_live(&s->last->live) ||
           kn_fail("kn_scaler_step: a second optimizer steps with this scaler, whose scale would "
                   "move twice an iteration; make it with .several = true, and end each iteration "
                   "with kn_scaler_update");
}

static bool lie_together(const kn_scaler *s, const kn_param *p)
{
    kn_device d = kn_device_of(s->state);
    return kn_norms_device(p) == d ||
           kn_fail("kn_scaler_step: the scaler's parameters lie on %s, the optimizer's on %s; "
                   "make a scaler for the module of the optimizer",
                   kn_device_name(d), kn_device_name(kn_norms_device(p)));
}

bool kn_scaler_step(kn_scaler *s, kn_optim *o)
{
    if (!kn_ok() || !kn_given(s, "kn_scaler_step", "the scaler") ||
        !kn_given(o, "kn_scaler_step", "the optimizer") || !kn_optim_lives(o, "kn_scaler_step"))
        return false;
    kn_module_impl *m = kn_optim_impl(o);
    if (kn_root_of(m) != kn_root_of(s->module))
        return kn_fail("kn_scaler_step: scaler and optimizer belong to different modules");
    const kn_param *p;
    int n = kn_params(m->self, &p);
    const kn_clipping *clipped;
    if (n == 0 || !has_turn(s, o) || !kn_may_step(m, p, n, "kn_scaler_step") || !state_begin(s) ||
        !kn_clipped(m, &clipped))
        return false;
    bool known = clipped && clipped->value == 0; /* by a norm, of all ranks' raw sums */
    kn_loss_scale_args args = args_of(s);
    if ((!known && !kn_find_absmax(m, p, n, &args.absmax)) || !lie_together(s, p))
        return false;
    if (known)
        args.absmax = &kn_norms_of(clipped, true)->absmax;
    args.later = s->options.several;
    if (!kn_step_scaled(o, args, s->carried))
        return false;
    s->last = o;
    s->stepped = true;
    s->moved = s->moved || !args.later;
    o->scaled_in = s->iteration;
    return args.later || kn_graph_host_part((kn_graph_hook){ .after = after_launch, .arg = s });
}

bool kn_scaler_update(kn_scaler *s)
{
    if (!kn_ok() || !kn_given(s, "kn_scaler_update", "the scaler"))
        return false;
    if (!s->options.several)
        return kn_fail("kn_scaler_update: each kn_scaler_step of this scaler ends an iteration; "
                       "make it with .several = true for several optimizers");
    if (!s->stepped)
        return kn_fail("kn_scaler_update: no kn_scaler_step came since the last one");
    kn_loss_scale_args args = args_of(s);
    if (!KN_LAUNCH(kn_compute_stream(kn_device_of(s->state)), KN_K_LOSS_SCALE, args))
        return false;
    s->moved = true;
    s->stepped = false;
    s->iteration = ++iterations;
    return kn_graph_host_part((kn_graph_hook){ .after = after_launch, .arg = s });
}

kn_scaler_state kn_scaler_get(const kn_scaler *s)
{
    kn_loss_scale_state x = { .scale = 1 };
    if (s && read_state(s, &x))
        may_go_on((kn_scaler *)s, &x);
    return (kn_scaler_state){ x.scale, x.good, x.skipped };
}

bool kn_scaler_set(kn_scaler *s, kn_scaler_state state)
{
    if (!kn_ok() || !kn_given(s, "kn_scaler_set", "the scaler"))
        return false;
    if (!(state.scale >= SMALLEST && state.scale <= LARGEST) || state.good < 0 || state.skipped < 0)
        return kn_fail(
            "kn_scaler_set: a scale of %g after %lld good and %lld skipped steps is no state "
            "of a scaler",
            state.scale, (long long)state.good, (long long)state.skipped);
    if (waits(s))
        return kn_fail(
            "kn_scaler_set: gradients with the old scale wait for their step; set the state "
            "before the next backward");
    s->initial = state;
    return !s->state || write_state(s, state);
}
