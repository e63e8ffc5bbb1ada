/* state/objects.c: the numbers of scaler, schedule, averages, loader and random draws. */
#include "kernels/context.h"
#include "kernels/error_internal.h"
#include "state/dict_internal.h"

#include <stddef.h>

/* ---- numbers by name ------------------------------------------------------------------------- */

/* Puts numbers, or gets them; the first error ends it. */
typedef struct numbers {
    kn_state *to;         /* NULL: get */
    const kn_state *from; /* NULL: put */
    const char *prefix, *what;
    bool ok;
} numbers;

/* The item to get; NULL where numbers are put, or with an error. */
static const kn_state_item *wanted(numbers *n, const char *name, bool real)
{
    if (!n->ok || n->to)
        return NULL;
    const kn_state_item *i = kn_state_find_joined(n->from, n->prefix, name, NULL);
    n->ok = i && (i->type == KN_STATE_INT || (real && i->type == KN_STATE_NUMBER));
    if (!n->ok && kn_ok())
        kn_fail("%s: the state has no %s '%s%s'", n->what, real ? "number" : "whole number",
                n->prefix ? n->prefix : "", name);
    return n->ok ? i : NULL;
}

static void whole(numbers *n, const char *name, int64_t *value)
{
    const kn_state_item *i = wanted(n, name, false);
    if (i)
        *value = i->whole_number;
    else if (n->ok)
        n->ok = kn_state_add_value(n->to, n->prefix, name, NULL, KN_STATE_INT, *value, 0);
}

static void real(numbers *n, const char *name, double *value)
{
    const kn_state_item *i = wanted(n, name, true);
    if (i)
        *value = i->type == KN_STATE_INT ? (double)i->whole_number : i->number;
    else if (n->ok)
        n->ok = kn_state_add_value(n->to, n->prefix, name, NULL, KN_STATE_NUMBER, 0, *value);
}

/* ---- objects --------------------------------------------------------------------------------- */

typedef struct values {
    kn_scaler_state scaler;
    kn_schedule schedule;
    int64_t kind, updates, loader_seed, seed, step, quiet;
    kn_position loader;
} values;

static void go_over(numbers *n, const kn_state_objects *o, values *v)
{
    if (o->scaler) {
        real(n, "scaler.scale", &v->scaler.scale);
        whole(n, "scaler.good", &v->scaler.good);
        whole(n, "scaler.skipped", &v->scaler.skipped);
    }
    if (o->schedule) {
        whole(n, "schedule.kind", &v->kind);
        real(n, "schedule.lr", &v->schedule.lr);
        real(n, "schedule.min_lr", &v->schedule.min_lr);
        whole(n, "schedule.warmup", &v->schedule.warmup);
        whole(n, "schedule.steps", &v->schedule.steps);
        real(n, "schedule.power", &v->schedule.power);
        whole(n, "schedule.every", &v->schedule.every);
        real(n, "schedule.factor", &v->schedule.factor);
        whole(n, "schedule.decay", &v->schedule.decay);
    }
    if (o->ema)
        whole(n, "ema.updates", &v->updates);
    if (o->loader) {
        whole(n, "loader.epoch", &v->loader.epoch);
        whole(n, "loader.sample", &v->loader.sample);
        whole(n, "loader.step", &v->loader.step);
        whole(n, "loader.samples", &v->loader.samples);
        whole(n, "loader.seed", &v->loader_seed);
    }
    if (o->random) {
        whole(n, "random.seed", &v->seed);
        whole(n, "random.step", &v->step);
        whole(n, "random.quiet", &v->quiet);
    }
}

static values read_objects(const kn_state_objects *o)
{
    values v = { 0 };
    if (o->scaler)
        v.scaler = kn_scaler_get(o->scaler);
    if (o->schedule)
        v.schedule = *o->schedule;
    v.kind = v.schedule.kind;
    if (o->ema)
        v.updates = kn_ema_updates(o->ema);
    if (o->loader)
        v.loader = kn_loader_position(o->loader);
    v.loader_seed = (int64_t)v.loader.seed;
    const kn_rng_key *key = &kn_context_get()->rng;
    v.seed = (int64_t)key->seed;
    v.step = key->step;
    v.quiet = (int64_t)(key->quiet - key->quiet_before);
    return v;
}

bool kn_state_put_(kn_state *s, kn_state_objects o)
{
    static const char what[] = "kn_state_put";
    if (!kn_ok() || !kn_given(s, what, "the state"))
        return false;
    values v = read_objects(&o);
    numbers n = { .to = s, .prefix = o.prefix, .what = what, .ok = kn_ok() };
    go_over(&n, &o, &v);
    return n.ok && kn_ok();
}

/* A rate or count that no schedule has is an error before anything is set. */
static bool check(const kn_state_objects *o, const values *v, const char *what)
{
    const int64_t most = (int64_t)1 << 62;
    if (o->schedule && (v->kind < 0 || v->kind > KN_OWN_SCHEDULE))
        return kn_fail("%s: schedule.kind is %lld, which is none", what, (long long)v->kind);
    if (o->schedule && v->kind != KN_OWN_SCHEDULE)
        kn_schedule_at(&v->schedule, 0);
    if (o->schedule && v->kind == KN_OWN_SCHEDULE && !o->schedule->rate)
        return kn_fail("%s: the schedule was a program's own: set its .rate before", what);
    if (o->ema && (v->updates < 0 || v->updates > most))
        return kn_fail("%s: ema.updates is %lld; there are at least 0", what,
                       (long long)v->updates);
    if (o->random && (v->step < 0 || v->step > most))
        return kn_fail("%s: random.step is %lld; steps count from 0 to 2^62", what,
                       (long long)v->step);
    if (o->random && v->quiet < 0)
        return kn_fail("%s: random.quiet is %lld; draws count from 0", what, (long long)v->quiet);
    return kn_ok();
}

/* A loader or scaler that refuses comes before what can't; the first goes back for the second. */
static bool set_objects(const kn_state_objects *o, values *v)
{
    const kn_position before = o->loader ? kn_loader_position(o->loader) : (kn_position){ 0 };
    v->loader.seed = (uint64_t)v->loader_seed;
    if (!kn_ok() || (o->loader && !kn_loader_set_position(o->loader, v->loader)))
        return false;
    if (o->scaler && !kn_scaler_set(o->scaler, v->scaler)) {
        if (o->loader)
            kn_loader_set_position(o->loader, before);
        return false;
    }
    if (o->ema)
        kn_ema_set_updates(o->ema, v->updates);
    if (o->schedule) {
        v->schedule.kind = (kn_schedule_kind)v->kind;
        *o->schedule = v->schedule;
    }
    if (o->random) {
        kn_seed((uint64_t)v->seed);
        kn_set_step(v->step);
        kn_context_get()->rng.quiet_before -= (uint64_t)v->quiet;
    }
    return kn_ok();
}

bool kn_state_get_(const kn_state *s, kn_state_objects o)
{
    static const char what[] = "kn_state_get";
    if (!kn_ok() || !kn_given(s, what, "the state"))
        return false;
    values v = read_objects(&o); /* a schedule keeps its functions */
    numbers n = { .from = s, .prefix = o.prefix, .what = what, .ok = kn_ok() };
    go_over(&n, &o, &v);
    v.schedule.kind = (kn_schedule_kind)v.kind;
    return n.ok && check(&o, &v, what) && set_objects(&o, &v);
}
