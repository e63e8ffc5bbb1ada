/* fsdp/ema.c: averages of weights: each rank keeps those of its own part of each parameter. */
#include "fsdp/ema.h"
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"
#include "nn/marks.h"
#include <math.h>

/* A parameter (buffer NULL) or a buffer. */
typedef struct slot {
    kn_tensor *buffer; /* the module's, borrowed */
    kn_tensor *value;  /* the average, or while swapped the training's; NULL: frozen */
} slot;

struct kn_ema {
    kn_live live;
    kn_ema_options o;
    slot *slot; /* of each parameter, then of each buffer once */
    int64_t slots, room;
    int params;
    kn_marks marks; /* of the parameters */
    int64_t updates;
    bool swapped;
};

/* ---- making one ------------------------------------------------------------------------------ */

static bool add_slot(kn_ema *e, kn_tensor *buffer, kn_tensor *value)
{
    if (!kn_host_grow(&e->slot, &e->room, e->slots + 1, sizeof *e->slot))
        return false;
    e->slot[e->slots++] = (slot){ buffer, value };
    return true;
}

static bool make_params(kn_ema *e, const kn_param *p)
{
    for (int i = 0; i < e->params; i++) {
        kn_tensor *value = p[i].trainable ? kn_param_state_new(&p[i]) : NULL;
        if (!kn_ok() || !add_slot(e, NULL, value)) {
            kn_tensor_free(value);
            return false;
        }
        if (value && !kn_copy_(value, p[i].master))
            return false;
    }
    return true;
}

/* The slot of a buffer; NULL: none. */
static const slot *slot_of(const kn_ema *e, const kn_tensor *buffer)
{
    for (int64_t i = e->params; i < e->slots; i++)
        if (e->slot[i].buffer == buffer)
            return &e->slot[i];
    return NULL;
}

static bool make_buffers_of(kn_ema *e, const kn_module_impl *m)
{
    for (int i = 0; i < m->buffers; i++) {
        kn_tensor *t = m->buffer[i].tensor;
        if (slot_of(e, t))
            continue;
        kn_tensor *value = kn_empty(t->dtype, kn_device_of(t), t->ndim, t->shape);
        if (!value || !kn_copy_(value, t) || !add_slot(e, t, NULL))
            return false;
        e->slot[e->slots - 1].value = kn_keep(value);
    }
    return kn_ok();
}

static bool make_buffers(kn_ema *e)
{
    if (!e->o.use_buffers)
        return true;
    kn_module_impl *top = e->live.module;
    kn_scope scope = kn_scope_begin();
    bool ok = kn_module_full_buffers(top->self, true);
    for (kn_module_impl *m = top; ok && m; m = kn_impl_next(m, top))
        ok = make_buffers_of(e, m);
    ok = kn_module_full_buffers(top->self, false) && ok;
    kn_scope_end(scope);
    return ok;
}

kn_ema *kn_ema_new_(void *module, kn_ema_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_ema_new") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    o.decay = o.decay == 0 ? 0.999 : kn_value_or(o.decay, 0);
    if (!m)
        return NULL;
    if (!(o.decay >= 0 && o.decay < 1) || !(o.warmup >= 0) || !isfinite(o.warmup))
        return kn_fail_null(
            "kn_ema_new: .decay is %g and .warmup %g; the first must lie in [0, 1), the second "
            "be at least 0",
            o.decay, o.warmup);
    kn_ema *e = kn_host_calloc(1, sizeof *e);
    if (!e)
        return NULL;
    *e = (kn_ema){ .o = o, .params = n };
    kn_live_begin(&e->live, m);
    bool mode = kn_set_grad_mode(false);
    bool ok = kn_marks_begin(&e->marks, p, n) && make_params(e, p) && make_buffers(e);
    kn_set_grad_mode(mode);
    if (ok)
        return e;
    kn_ema_free(e);
    return NULL;
}

static bool lives(const kn_ema *e, const char *what)
{
    return kn_lives(e ? &e->live : NULL, "kn_ema", what);
}

void kn_ema_free(kn_ema *e)
{
    if (!kn_live_end(e ? &e->live : NULL, "kn_ema", "kn_ema_free"))
        return;
    if (e->swapped && e->live.module) /* it keeps what it holds */
        e->live.module->averaged = false;
    for (int64_t i = 0; i < e->slots; i++)
        kn_tensor_free(e->slot[i].value);
    kn_marks_end(&e->marks);
    kn_host_free(e->slot);
    kn_host_free(e);
}

/* ---- use ------------------------------------------------------------------------------------- */

/* The module's buffers are those of the slots, in their order. */
static bool same_buffers(const kn_ema *e, const char *what)
{
    int64_t found = e->params;
    bool same = true;
    const kn_module_impl *top = e->live.module;
    for (const kn_module_impl *m = top; e->o.use_buffers && m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->buffers; i++) {
            const slot *of = slot_of(e, m->buffer[i].tensor);
            same = same && of;
            found += of && of - e->slot == found; /* shared ones were found before */
        }
    return !e->o.use_buffers || (same && found == e->slots) ||
           kn_fail("%s: the module has other buffers than at kn_ema_new; make the averages anew",
                   what);
}

/* The parameters, as many and as cut as when e was made; NULL with an error. */
static const kn_param *params_of(const kn_ema *e, const char *what)
{
    const kn_param *p;
    if (!kn_ok() || !kn_given(e, what, "the averages") || !lives(e, what))
        return NULL;
    int n = kn_params(e->live.module->self, &p);
    return kn_ok() && kn_marks_hold(&e->marks, p, n, "kn_ema", what) && same_buffers(e, what)
               ? p
               : NULL;
}

/* The host may read and write the masters where they are offloaded. */
static bool settle(const kn_ema *e, const kn_param *p, const char *what)
{
    bool ok = true;
    for (int i = 0; ok && i < e->params; i++) {
        kn_bucket *b = kn_bucket_of(&p[i]);
        ok = !b || (kn_unit_closed(b->unit, p[i].name, what) && kn_bucket_sync_transfers(b));
    }
    return ok;
}

/* What slot i averages. */
static kn_tensor *averaged(const kn_ema *e, const kn_param *p, int64_t i)
{
    return i < e->params ? p[i].master : e->slot[i].buffer;
}

/* The weight of what is there already, of update number n. */
static double decay_of(const kn_ema *e, int64_t n)
{
    double early = (1 + (double)n) / (e->o.warmup + (double)n);
    return n == 0 ? 0 : e->o.warmup > 0 && early < e->o.decay ? early : e->o.decay;
}

/* x moves towards y. */
static bool average(kn_tensor *value, kn_tensor *of, double decay)
{
    kn_array x = kn_array_of(value), y = kn_array_of(of);
    kn_stream *s = kn_compute_stream(kn_device_of(of));
    kn_binary_args mix = { .dst = x, .a = x, .b = y, .kind = KN_LERP, .p0 = 1 - decay };
    kn_copy_args copy = { x, y };
    return kn_numel(of) == 0 ||
           (decay == 0 || !kn_dtype_is_float(of->dtype) ? KN_LAUNCH(s, KN_K_COPY, copy)
                                                        : KN_LAUNCH(s, KN_K_BINARY, mix));
}

/* Shows the buffers' own values, or hides them again. */
static bool show_buffers(const kn_ema *e, bool full)
{
    return e->slots == e->params || kn_module_full_buffers(e->live.module->self, full);
}

bool kn_ema_update(kn_ema *e)
{
    const kn_param *p = params_of(e, "kn_ema_update");
    if (!p)
        return false;
    if (e->swapped)
        return kn_fail("kn_ema_update: the module holds the averages; call kn_ema_swap before");
    double decay = decay_of(e, e->updates);
    if (!settle(e, p, "kn_ema_update"))
        return false;
    bool ok = show_buffers(e, true);
    for (int64_t i = 0; ok && i < e->slots; i++)
        ok = !e->slot[i].value || average(e->slot[i].value, averaged(e, p, i), decay);
    ok = show_buffers(e, false) && ok;
    e->updates++;
    return ok && kn_ok();
}

static bool copy(kn_device d, kn_array to, kn_array from)
{
    return KN_LAUNCH(kn_compute_stream(d), KN_K_COPY, ((kn_copy_args){ to, from }));
}

/* By way of room, which is at least as large. */
static bool exchange(kn_tensor *a, kn_tensor *b, const kn_tensor *room)
{
    kn_device d = kn_device_of(a);
    kn_array x = kn_array_of(a), y = kn_array_of(b);
    if (kn_numel(a) == 0)
        return true;
    kn_array was = kn_array_make(kn_array_of(room).data, a->dtype, a->ndim, a->shape);
    bool ok = copy(d, was, x) && copy(d, x, y) && copy(d, y, was);
    kn_written(a);
    kn_written(b);
    return ok;
}

/* Room for the largest of them on each device: what may fail does so before anything is
 * written. */
static bool make_room(const kn_ema *e, const kn_param *p, kn_tensor *room[KN_MAX_DEVICES])
{
    int64_t most[KN_MAX_DEVICES] = { 0 };
    bool ok = true;
    for (int64_t i = 0; i < e->slots; i++) {
        const kn_tensor *t = averaged(e, p, i);
        int64_t bytes = kn_numel(t) * (int64_t)kn_dtype_size(t->dtype);
        int64_t *of = &most[kn_device_of(t)];
        *of = e->slot[i].value && bytes > *of ? bytes : *of;
    }
    for (int d = 0; ok && d < KN_MAX_DEVICES; d++)
        if (most[d] > 0)
            ok = (room[d] = kn_empty(KN_F64, (kn_device)d, KN_SHAPE((most[d] + 7) / 8))) != NULL;
    return ok;
}

bool kn_ema_swap(kn_ema *e)
{
    const kn_param *p = params_of(e, "kn_ema_swap");
    kn_tensor *room[KN_MAX_DEVICES] = { 0 };
    kn_scope scope = kn_scope_begin();
    const bool shows = p && settle(e, p, "kn_ema_swap");
    bool ok = shows && show_buffers(e, true) && make_room(e, p, room);
    for (int64_t i = 0; ok && i < e->slots; i++) {
        kn_tensor *t = averaged(e, p, i);
        kn_bucket *b = i < e->params ? kn_bucket_of(&p[i]) : NULL;
        if (e->slot[i].value)
            ok = exchange(t, e->slot[i].value, room[kn_device_of(t)]) &&
                 (!b || kn_bucket_drop_gathered(b, p[i].index));
    }
    ok = (!shows || show_buffers(e, false)) && ok;
    kn_scope_end(scope);
    if (ok)
        e->live.module->averaged = e->swapped = !e->swapped;
    return ok && kn_ok();
}

bool kn_ema_swapped(const kn_ema *e)
{
    return lives(e, "kn_ema_swapped") && e->swapped;
}

int64_t kn_ema_updates(const kn_ema *e)
{
    return lives(e, "kn_ema_updates") ? e->updates : 0;
}

kn_tensor *kn_ema_value(const kn_ema *e, int param)
{
    if (!lives(e, "kn_ema_value"))
        return NULL;
    if (param >= 0 && param < e->params)
        return e->slot[param].value;
    return kn_fail_null("kn_ema_value: parameter number %d doesn't exist; the module had %d", param,
                        e->params);
}

kn_tensor *kn_ema_buffer(const kn_ema *e, const kn_tensor *buffer)
{
    const slot *of = lives(e, "kn_ema_buffer") ? slot_of(e, buffer) : NULL;
    return of ? of->value : NULL;
}

kn_module *kn_ema_module(const kn_ema *e)
{
    return lives(e, "kn_ema_module") ? e->live.module->self : NULL;
}

void kn_ema_set_updates(kn_ema *e, int64_t updates)
{
    if (updates < 0)
        kn_fail("kn_ema_set_updates: %lld updates; there are at least 0", (long long)updates);
    else if (lives(e, "kn_ema_set_updates"))
        e->updates = updates;
}
