/* fsdp/ema.c: averages of weights: each rank keeps those of its own part of each parameter. */
#include "fsdp/ema.h"
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"
#include "nn/marks.h"
#include <math.h>

typedef struct buffer_slot {
    kn_tensor *buffer; /* the module's, borrowed */
    kn_tensor *value;  /* as of a parameter */
} buffer_slot;

struct kn_ema {
    kn_live live;
    kn_ema_options o;
    kn_tensor **value; /* of each: the average, or while swapped the training's; NULL: frozen */
    int slots;
    kn_marks marks;      /* of the parameters */
    buffer_slot *buffer; /* each buffer once */
    int64_t buffers, room;
    int64_t updates;
    bool swapped;
};

/* ---- making one ------------------------------------------------------------------------------ */

static bool make_slots(kn_ema *e, const kn_param *p)
{
    for (int i = 0; i < e->slots; i++) {
        if (!p[i].trainable)
            continue;
        e->value[i] = kn_param_state_new(&p[i]);
        if (!e->value[i] || !kn_copy_(e->value[i], p[i].master))
            return false;
    }
    return true;
}

static buffer_slot *find_buffer(const kn_ema *e, const kn_tensor *t)
{
    for (int64_t i = 0; i < e->buffers; i++)
        if (e->buffer[i].buffer == t)
            return &e->buffer[i];
    return NULL;
}

static bool make_buffers_of(kn_module *m, void *arg)
{
    kn_ema *e = arg;
    for (int i = 0; i < kn_module_buffers(m); i++) {
        kn_tensor *t = kn_module_buffer_at(m, i, NULL);
        if (!t || find_buffer(e, t))
            continue;
        kn_tensor *value = kn_empty(t->dtype, kn_device_of(t), t->ndim, t->shape);
        if (!value || !kn_copy_(value, t) ||
            !kn_host_grow(&e->buffer, &e->room, e->buffers + 1, sizeof *e->buffer))
            return false;
        e->buffer[e->buffers++] = (buffer_slot){ t, kn_keep(value) };
    }
    return kn_ok();
}

static bool make_buffers(kn_ema *e)
{
    if (!e->o.use_buffers)
        return true;
    kn_module *m = e->live.module->self;
    kn_scope scope = kn_scope_begin();
    bool ok = kn_module_full_buffers(m, true) && kn_apply_modules(m, make_buffers_of, e);
    ok = kn_module_full_buffers(m, false) && ok;
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
    *e = (kn_ema){ .o = o, .slots = n };
    kn_live_begin(&e->live, m);
    e->value = kn_host_calloc((size_t)n + 1, sizeof *e->value);
    bool mode = kn_set_grad_mode(false);
    bool ok = e->value && kn_marks_begin(&e->marks, p, n) && make_slots(e, p) && make_buffers(e);
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
    for (int i = 0; e->value && i < e->slots; i++)
        kn_tensor_free(e->value[i]);
    for (int64_t i = 0; i < e->buffers; i++)
        kn_tensor_free(e->buffer[i].value);
    kn_host_free(e->buffer);
    kn_marks_end(&e->marks);
    kn_host_free(e->value);
    kn_host_free(e);
}

/* ---- use ------------------------------------------------------------------------------------- */

typedef struct seen {
    const kn_ema *e;
    int64_t found; /* of the slots */
    bool other;    /* a buffer without one */
} seen;

static bool see_buffers_of(kn_module *m, void *arg)
{
    seen *s = arg;
    for (int i = 0; i < kn_module_buffers(m); i++) {
        const buffer_slot *b = find_buffer(s->e, kn_module_buffer_at(m, i, NULL));
        s->other |= !b;
        s->found += b && b - s->e->buffer == s->found; /* shared ones were found before */
    }
    return true;
}

static bool same_buffers(const kn_ema *e, const char *what)
{
    seen s = { .e = e };
    return !e->o.use_buffers ||
           (kn_apply_modules(e->live.module->self, see_buffers_of, &s) && !s.other &&
            s.found == e->buffers) ||
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
    return e->buffers == 0 || kn_module_full_buffers(e->live.module->self, full);
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
        if (!e->value[i] || kn_numel(p[i].master) == 0)
            continue;
        if (!settle(&p[i], "kn_ema_update"))
            return false;
        if (!average(e->value[i], p[i].master, decay))
            return false;
    }
    bool ok = show_buffers(e, true);
    for (int64_t i = 0; ok && i < e->buffers; i++)
        ok = average(e->buffer[i].value, e->buffer[i].buffer, decay);
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
    for (int i = 0; i < e->slots; i++) {
        int64_t bytes = kn_numel(p[i].master) * (int64_t)kn_dtype_size(p[i].master->dtype);
        int64_t *of = &most[kn_device_of(p[i].master)];
        *of = e->value[i] && bytes > *of ? bytes : *of;
    }
    for (int64_t i = 0; i < e->buffers; i++) {
        const kn_tensor *t = e->buffer[i].value;
        int64_t bytes = kn_numel(t) * (int64_t)kn_dtype_size(t->dtype),
                *of = &most[kn_device_of(t)];
        *of = bytes > *of ? bytes : *of;
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
    bool ok = p != NULL;
    kn_scope scope = kn_scope_begin();
    for (int i = 0; ok && i < e->slots; i++)
        ok = settle(&p[i], "kn_ema_swap");
    ok = ok && make_room(e, p, room);
    for (int i = 0; ok && i < e->slots; i++) {
        kn_bucket *b = kn_bucket_of(&p[i]);
        if (e->value[i])
            ok = exchange(p[i].master, e->value[i], room[kn_device_of(p[i].master)]) &&
                 (!b || kn_bucket_drop_gathered(b, p[i].index));
    }
    bool shown = ok && show_buffers(e, true);
    ok = ok && shown;
    for (int64_t i = 0; ok && i < e->buffers; i++)
        ok = exchange(e->buffer[i].buffer, e->buffer[i].value,
                      room[kn_device_of(e->buffer[i].value)]);
    ok = (!shown || show_buffers(e, false)) && ok;
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
    if (param >= 0 && param < e->slots)
        return e->value[param];
    return kn_fail_null("kn_ema_value: parameter number %d doesn't exist; the module had %d", param,
                        e->slots);
}

kn_tensor *kn_ema_buffer(const kn_ema *e, const kn_tensor *buffer)
{
    const buffer_slot *b = lives(e, "kn_ema_buffer") ? find_buffer(e, buffer) : NULL;
    return b ? b->value : NULL;
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
