/* fsdp/ema.c: averages of weights: each rank keeps those of its own part of each parameter. */
#include "fsdp/ema.h"
#include "fsdp/schedule.h"
#include <math.h>

typedef struct slot {
    kn_tensor *value;              /* the average, or while swapped the training's; NULL: frozen */
    const kn_param_source *source; /* as when it was made */
} slot;

struct kn_ema {
    kn_ema_options o;
    kn_module_impl *module;
    slot *slot;
    int slots;
    int64_t updates;
    bool swapped;
};

/* ---- making one ------------------------------------------------------------------------------ */

static bool make_slots(kn_ema *e, const kn_param *p)
{
    for (int i = 0; i < e->slots; i++) {
        e->slot[i].source = p[i].source;
        if (!p[i].trainable)
            continue;
        kn_mem_category category =
            kn_memory_is_store(p[i].state_memory) ? KN_MEM_STORE : KN_MEM_OPTIM;
        e->slot[i].value =
            kn_tensor_new(p[i].master->dtype, kn_device_of(p[i].master), p[i].state_memory,
                          category, 1, p[i].master->shape, NULL, false);
        if (!e->slot[i].value || !kn_copy_(e->slot[i].value, p[i].master))
            return false;
    }
    return true;
}

kn_ema *kn_ema_new_(void *module, kn_ema_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_ema_new") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    o.decay = o.decay == 0 ? 0.999 : kn_value_or(o.decay, 0);
    if (!m)
        return NULL;
    if (!(o.decay >= 0 && o.decay < 1) || !(o.warmup >= 0) || !isfinite(o.warmup)) {
        kn_fail("kn_ema_new: .decay is %g and .warmup %g; the first must lie in [0, 1), the second "
                "be at least 0",
                o.decay, o.warmup);
        return NULL;
    }
    kn_ema *e = kn_host_calloc(1, sizeof *e);
    if (!e)
        return NULL;
    *e = (kn_ema){ .o = o, .module = m, .slots = n };
    e->slot = kn_host_calloc((size_t)n + 1, sizeof *e->slot);
    bool mode = kn_set_grad_mode(false);
    bool ok = e->slot && make_slots(e, p);
    kn_set_grad_mode(mode);
    if (ok)
        return e;
    kn_ema_free(e);
    return NULL;
}

void kn_ema_free(kn_ema *e)
{
    if (!e)
        return;
    for (int i = 0; e->slot && i < e->slots; i++)
        kn_tensor_free(e->slot[i].value);
    kn_host_free(e->slot);
    kn_host_free(e);
}

/* ---- use ------------------------------------------------------------------------------------- */

/* The parameters, as many and as cut as when e was made; NULL with an error. */
static const kn_param *params_of(const kn_ema *e, const char *what)
{
    const kn_param *p;
    if (!kn_ok() || !kn_given(e, what, "the averages"))
        return NULL;
    int n = kn_params(e->module->self, &p);
    bool same = n == e->slots;
    for (int i = 0; same && i < n; i++)
        same = p[i].source == e->slot[i].source &&
               (!e->slot[i].value || kn_numel(p[i].master) == kn_numel(e->slot[i].value));
    if (!same && kn_ok())
        kn_fail("%s: the module changed after kn_ema_new, or was sharded; make the averages after "
                "kn_fsdp_wrap",
                what);
    return same ? p : NULL;
}

/* The host may read and write the master where it is offloaded. */
static bool settle(const kn_param *p, const char *what)
{
    kn_bucket *b = kn_bucket_of(p);
    if (b && b->unit->summoned)
        return kn_fail("%s: '%s' is summoned; end the scope first", what, p->name);
    return !b || kn_bucket_sync_transfers(b);
}

/* The weight of what is there already, of update number n. */
static double decay_of(const kn_ema *e, int64_t n)
{
    double early = (1 + (double)n) / (e->o.warmup + (double)n);
    return n == 0 ? 0 : e->o.warmup > 0 && early < e->o.decay ? early : e->o.decay;
}

bool kn_ema_update(kn_ema *e)
{
    const kn_param *p = params_of(e, "kn_ema_update");
    if (!p)
        return false;
    if (e->swapped)
        return kn_fail("kn_ema_update: the module holds the averages; call kn_ema_swap before");
    double decay = decay_of(e, e->updates);
    for (int i = 0; i < e->slots; i++) {
        if (!e->slot[i].value || kn_numel(p[i].master) == 0)
            continue;
        if (!settle(&p[i], "kn_ema_update"))
            return false;
        kn_array x = kn_array_of(e->slot[i].value), y = kn_array_of(p[i].master);
        kn_stream *s = kn_compute_stream(kn_device_of(p[i].master));
        kn_binary_args mix = { .dst = x, .a = x, .b = y, .kind = KN_LERP, .p0 = 1 - decay };
        kn_copy_args copy = { x, y };
        if (!(decay == 0 ? KN_LAUNCH(s, KN_K_COPY, copy) : KN_LAUNCH(s, KN_K_BINARY, mix)))
            return false;
    }
    e->updates++;
    return kn_ok();
}

static bool exchange(kn_tensor *a, kn_tensor *b)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *was = kn_empty_like(a);
    bool ok = was && (kn_numel(a) == 0 || (kn_copy_(was, a) && kn_copy_(a, b) && kn_copy_(b, was)));
    kn_scope_end(scope);
    return ok;
}

/* What is gathered is no longer true; a graph that used it must not go on. */
static bool drop_gathered(const kn_param *p)
{
    kn_bucket *b = kn_bucket_of(p);
    if (!b || b->full == b->master)
        return true;
    b->full->version++;
    return b->residency == KN_SHARDED || kn_unit_reshard(b->unit);
}

bool kn_ema_swap(kn_ema *e)
{
    const kn_param *p = params_of(e, "kn_ema_swap");
    bool mode = kn_set_grad_mode(false), ok = p != NULL;
    for (int i = 0; ok && i < e->slots; i++) /* before anything is written */
        ok = settle(&p[i], "kn_ema_swap");
    for (int i = 0; ok && i < e->slots; i++) {
        if (e->slot[i].value)
            ok = exchange(p[i].master, e->slot[i].value) && drop_gathered(&p[i]);
    }
    kn_set_grad_mode(mode);
    if (ok)
        e->swapped = !e->swapped;
    return ok && kn_ok();
}

bool kn_ema_swapped(const kn_ema *e)
{
    return e && e->swapped;
}

int64_t kn_ema_updates(const kn_ema *e)
{
    return e ? e->updates : 0;
}

kn_tensor *kn_ema_value(const kn_ema *e, int param)
{
    return e && param >= 0 && param < e->slots ? e->slot[param].value : NULL;
}

kn_module *kn_ema_module(const kn_ema *e)
{
    return e ? e->module->self : NULL;
}

void kn_ema_set_updates(kn_ema *e, int64_t updates)
{
    if (updates < 0)
        kn_fail("kn_ema_set_updates: %lld updates; there are at least 0", (long long)updates);
    else if (e)
        e->updates = updates;
}
