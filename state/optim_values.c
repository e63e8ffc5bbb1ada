/* state/optim_values.c: the numbers of an optimizer's state dict: of each parameter how often it
 * was stepped, the options of its group, and the constants of the method. An optimizer has one step
 * number, one rate and one of each constant, so those of its parameters must agree. */
#include "state/dict_internal.h"

#include <math.h>

static bool has_param(const kn_optim *o, const kn_param *p, int i, const kn_entries *all)
{
    return !o->slot[i].group.frozen && kn_entries_want(all, p->name);
}

/* ---- taking ---------------------------------------------------------------------------------- */

typedef struct taking {
    kn_state *s;
    const char *prefix, *name; /* of the parameter */
} taking;

static bool add_number(const taking *t, const char *after, double value)
{
    return kn_state_add_value(t->s, t->prefix, t->name, after, KN_STATE_NUMBER, 0, value);
}

static bool add_constants(const taking *t, const kn_optim *o)
{
    const kn_optim_constant *c;
    double x;
    bool ok = true;
    for (int k = 0; ok && (c = kn_optim_constant_at(o, k, &x)); k++)
        ok = kn_state_add_value(t->s, t->prefix, t->name, c->name,
                                c->type == KN_OF_REALS ? KN_STATE_NUMBER : KN_STATE_INT, (int64_t)x,
                                x);
    return ok;
}

/* Frozen since the optimizer was made, which would keep something of it. */
static bool unstepped(const kn_optim *o, const kn_param *p, int i)
{
    bool any = p->trainable || !kn_optim_state_name_of(o, i, 0);
    for (int k = 0; k < KN_OPTIM_STATES; k++)
        any = any || o->slot[i].state[k];
    return !any;
}

bool kn_optim_values_take(kn_state *s, const kn_optim *o, const char *prefix, const kn_entries *all)
{
    const kn_param *p;
    const int n = kn_params(o->live.module->self, &p);
    const int64_t steps = kn_optim_steps(o);
    bool ok = kn_ok();
    for (int i = 0; ok && i < n; i++) {
        const kn_optim_group *g = &o->slot[i].group;
        const taking t = { s, prefix, p[i].name + all->below };
        if (has_param(o, &p[i], i, all))
            ok = kn_state_add_value(s, prefix, t.name, "step", KN_STATE_INT,
                                    unstepped(o, &p[i], i) ? 0 : steps, 0) &&
                 add_number(&t, "lr", kn_lr(o)) && add_number(&t, "lr_mul", g->lr_mul) &&
                 add_number(&t, "weight_decay", g->weight_decay) && add_constants(&t, o);
    }
    return ok && kn_ok();
}

/* ---- reading --------------------------------------------------------------------------------- */

#define MOST_STEPS ((int64_t)1 << 62)

static const char what[] = "state of an optimizer";

typedef struct reading {
    const kn_state *s;
    const char *prefix, *name; /* of the parameter */
    kn_names *missing;         /* NULL: nothing of it must be there */
    bool ok;
} reading;

/* needed: it comes into missing where it isn't there. */
static const kn_state_item *find(reading *r, const char *after, bool needed)
{
    char *joined = kn_state_join(r->prefix, r->name, after);
    const kn_state_item *i = joined ? kn_state_find(r->s, joined) : NULL;
    if (!joined || (!i && needed && r->missing && !kn_names_add(r->missing, joined)))
        r->ok = false;
    kn_host_free(joined);
    return i;
}

/* A finite number from low on; *value stays where it is missing. */
static bool read_number(double *value, const kn_state_item *i)
{
    const double x = !i ? *value : i->type == KN_STATE_INT ? (double)i->whole_number : i->number;
    if (i && (i->type == KN_STATE_TENSOR || i->type == KN_STATE_TEXT || !isfinite(x) || x < 0))
        return kn_fail("%s: '%s' is no finite number of at least 0", what, i->name);
    *value = x;
    return true;
}

static bool read_steps(int64_t *steps, const kn_state_item *i)
{
    if (i->type != KN_STATE_INT || i->whole_number < 0 || i->whole_number > MOST_STEPS)
        return kn_fail("%s: '%s' is no whole number from 0 to 2^62", what, i->name);
    if (*steps >= 0 && *steps != i->whole_number)
        return kn_fail("%s: '%s' is %lld, that of other parameters of the optimizer %lld: it has "
                       "one step number; give .keep_options, or load them into two optimizers",
                       what, i->name, (long long)i->whole_number, (long long)*steps);
    *steps = i->whole_number;
    return true;
}

/* A number that is the same for all of them; *value is below 0 before the first. */
static bool read_common(double *value, const kn_state_item *i, const char *of)
{
    double mine = 0;
    if (!i || !read_number(&mine, i))
        return !i;
    if (*value >= 0 && *value != mine)
        return kn_fail("%s: '%s' is %g, that of other parameters of the optimizer %g: it has one "
                       "%s; give .keep_options, or load them into two optimizers",
                       what, i->name, mine, *value, of);
    *value = mine;
    return true;
}

/* Another method's state lacks them: those of the optimizer stay. */
static bool read_constants(kn_optim_values *v, reading *r, const kn_optim *o)
{
    const kn_optim_constant *c;
    double own;
    for (int k = 0; r->ok && (c = kn_optim_constant_at(o, k, &own)); k++) {
        const kn_state_item *i = find(r, c->name, false);
        double *x = &v->constant[k];
        *x = v->has[k] ? *x : -1;
        if (!read_common(x, i, c->name))
            return false;
        if (i && !kn_optim_in_range(c, *x))
            return kn_fail("%s: '%s' is %g; %g to %g is its range", what, i->name, *x, c->low,
                           c->high);
        v->has[k] = v->has[k] || i;
    }
    return r->ok;
}

/* Whether r's parameter, o's number i, was never stepped: its step is 0, and o's state of it isn't
 * there. */
static bool is_unstepped(reading *r, const kn_optim *o, int i)
{
    const kn_state_item *step = find(r, "step", false);
    const char *state = kn_optim_state_name_of(o, i, 0);
    return step && step->type == KN_STATE_INT && step->whole_number == 0 && state &&
           !find(r, state, false) && r->ok;
}

/* Where the numbers of steps differ, and the optimizer's own options stay, so does its own. */
static bool keep_steps(kn_optim_values *v, const kn_state_item *i)
{
    const bool one =
        !i || v->steps == -1 || (i->type == KN_STATE_INT && i->whole_number == v->steps);
    if (i && v->steps == -1)
        return read_steps(&v->steps, i);
    v->steps = one ? v->steps : -2;
    return true;
}

static bool read_param(kn_optim_values *v, reading *r, const kn_optim *o, int i, bool keep)
{
    const kn_state_item *step = find(r, "step", !keep);
    const bool none = !step || is_unstepped(r, o, i);
    if (keep)
        return (none || keep_steps(v, step)) && r->ok;
    return (none || read_steps(&v->steps, step)) &&
           read_common(&v->lr, find(r, "lr", true), "rate") &&
           read_number(&v->lr_mul[i], find(r, "lr_mul", true)) &&
           read_number(&v->weight_decay[i], find(r, "weight_decay", true)) &&
           read_constants(v, r, o) && r->ok;
}

/* Takes the groups' numbers from o, which has n parameters. */
static bool take_groups(kn_optim_values *v, const kn_optim *o, int n)
{
    v->lr_mul = kn_host_calloc((size_t)n + 1, sizeof *v->lr_mul);
    v->weight_decay = kn_host_calloc((size_t)n + 1, sizeof *v->weight_decay);
    for (int i = 0; v->lr_mul && v->weight_decay && i < n; i++) {
        v->lr_mul[i] = o->slot[i].group.lr_mul;
        v->weight_decay[i] = o->slot[i].group.weight_decay;
    }
    return v->lr_mul && v->weight_decay && kn_ok();
}

bool kn_optim_values_read(kn_optim_values *v, const kn_state *s, const kn_optim *o,
                          const char *prefix, const kn_entries *all, bool keep, kn_names *missing)
{
    const kn_param *p;
    const int n = kn_params(o->live.module->self, &p);
    *v = (kn_optim_values){ .steps = -1, .lr = -1 };
    bool ok = take_groups(v, o, n);
    for (int i = 0; ok && i < n; i++) {
        reading r = { s, prefix, p[i].name + all->below, p[i].trainable ? missing : NULL, true };
        ok = !has_param(o, &p[i], i, all) || read_param(v, &r, o, i, keep);
    }
    return ok && kn_ok();
}

bool kn_optim_values_unstepped(const kn_state *s, const char *prefix, const char *param,
                               const kn_optim *o, int i)
{
    reading r = { .s = s, .prefix = prefix, .name = param, .ok = true };
    return is_unstepped(&r, o, i);
}

bool kn_optim_values_set(const kn_optim_values *v, kn_optim *o)
{
    for (int i = 0; i < o->slots; i++) {
        o->slot[i].group.lr_mul = v->lr_mul[i];
        o->slot[i].group.weight_decay = v->weight_decay[i];
    }
    for (int k = 0; k < KN_OPTIM_CONSTANTS; k++)
        if (v->has[k])
            kn_optim_constant_set(o, k, v->constant[k]);
    kn_changed(); /* a recorded step has the old ones */
    if (v->lr >= 0)
        kn_set_lr(o, v->lr);
    if (v->steps >= 0)
        kn_optim_set_steps(o, v->steps);
    return kn_ok();
}

void kn_optim_values_free(kn_optim_values *v)
{
    kn_host_free(v->lr_mul);
    kn_host_free(v->weight_decay);
    *v = (kn_optim_values){ 0 };
}
