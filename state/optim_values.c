/* state/optim_values.c: the numbers of an optimizer's state dict: for each parameter that it steps,
 * how often it did, and the options of its group. An optimizer has one step number and one rate, so
 * those of its parameters must agree. */
#include "optim/optim_internal.h"
#include "state/dict_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

bool kn_optim_steps_param(const kn_optim *o, const kn_param *p, int i)
{
    return p->trainable && !o->slot[i].group.frozen;
}

/* ---- taking ---------------------------------------------------------------------------------- */

static bool add_int(kn_state *s, const char *prefix, const char *name, const char *after,
                    int64_t value)
{
    char *joined = kn_state_join(prefix, name, after);
    bool ok = joined && kn_state_set_int(s, joined, value);
    kn_host_free(joined);
    return ok;
}

static bool add_number(kn_state *s, const char *prefix, const char *name, const char *after,
                       double value)
{
    char *joined = kn_state_join(prefix, name, after);
    bool ok = joined && kn_state_set_number(s, joined, value);
    kn_host_free(joined);
    return ok;
}

bool kn_optim_values_take(kn_state *s, const kn_optim *o, const char *prefix)
{
    const kn_param *p;
    const int n = kn_params(o->live.module->self, &p);
    const int64_t steps = kn_optim_steps(o);
    bool ok = kn_ok();
    for (int i = 0; ok && i < n; i++)
        if (kn_optim_steps_param(o, &p[i], i))
            ok = add_int(s, prefix, p[i].name, "step", steps) &&
                 add_number(s, prefix, p[i].name, "lr", kn_lr(o)) &&
                 add_number(s, prefix, p[i].name, "lr_mul", o->slot[i].group.lr_mul) &&
                 add_number(s, prefix, p[i].name, "weight_decay", o->slot[i].group.weight_decay);
    return ok;
}

/* ---- reading --------------------------------------------------------------------------------- */

#define MOST_STEPS ((int64_t)1 << 62)

static const kn_state_item *find(const kn_state *s, const char *prefix, const char *name,
                                 const char *after, kn_names *missing, bool *ok)
{
    char *joined = kn_state_join(prefix, name, after);
    const kn_state_item *i = joined ? kn_state_find(s, joined) : NULL;
    if (!joined || (!i && !kn_names_add(missing, joined)))
        *ok = false;
    kn_host_free(joined);
    return i;
}

/* A number that is finite and at least 0; *value stays where it is missing. */
static bool read_number(double *value, const kn_state_item *i, const char *what)
{
    const double x = !i ? *value : i->type == KN_STATE_INT ? (double)i->whole_number : i->number;
    if (i && (i->type == KN_STATE_TENSOR || i->type == KN_STATE_TEXT || !isfinite(x) || x < 0))
        return kn_fail("%s: '%s' is no finite number of at least 0", what, i->name);
    *value = x;
    return true;
}

static bool read_steps(int64_t *steps, const kn_state_item *i, const char *what)
{
    if (!i)
        return true;
    if (i->type != KN_STATE_INT || i->whole_number < 0 || i->whole_number > MOST_STEPS)
        return kn_fail("%s: '%s' is no whole number from 0 to 2^62", what, i->name);
    if (*steps >= 0 && *steps != i->whole_number)
        return kn_fail("%s: '%s' is %lld, that of other parameters of the optimizer %lld: it has "
                       "one step number; give .keep_options, or load them into two optimizers",
                       what, i->name, (long long)i->whole_number, (long long)*steps);
    *steps = i->whole_number;
    return true;
}

/* The rate, which is the same for all. */
static bool read_rate(double *lr, const kn_state_item *i, const char *what)
{
    double mine = 0;
    if (!i || !read_number(&mine, i, what))
        return !i;
    if (*lr >= 0 && *lr != mine)
        return kn_fail("%s: '%s' is %g, that of other parameters of the optimizer %g: it has one "
                       "rate; give .keep_options, or load them into two optimizers",
                       what, i->name, mine, *lr);
    *lr = mine;
    return true;
}

bool kn_optim_values_read(kn_optim_values *v, const kn_state *s, const kn_optim *o,
                          const char *prefix, kn_names *missing)
{
    static const char what[] = "kn_load_optim_state_dict";
    const kn_param *p;
    const int n = kn_params(o->live.module->self, &p);
    bool ok = kn_ok();
    *v = (kn_optim_values){ .steps = -1, .lr = -1 };
    v->lr_mul = kn_host_calloc((size_t)n + 1, sizeof *v->lr_mul);
    v->weight_decay = kn_host_calloc((size_t)n + 1, sizeof *v->weight_decay);
    ok = ok && v->lr_mul && v->weight_decay;
    for (int i = 0; ok && i < n; i++) {
        v->lr_mul[i] = o->slot[i].group.lr_mul;
        v->weight_decay[i] = o->slot[i].group.weight_decay;
        if (!kn_optim_steps_param(o, &p[i], i))
            continue;
        const char *name = p[i].name;
        ok = read_steps(&v->steps, find(s, prefix, name, "step", missing, &ok), what) &&
             read_rate(&v->lr, find(s, prefix, name, "lr", missing, &ok), what) &&
             read_number(&v->lr_mul[i], find(s, prefix, name, "lr_mul", missing, &ok), what) &&
             read_number(&v->weight_decay[i], find(s, prefix, name, "weight_decay", missing, &ok),
                         what) &&
             ok;
    }
    return ok && kn_ok();
}

bool kn_optim_values_set(const kn_optim_values *v, kn_optim *o)
{
    for (int i = 0; i < o->slots; i++) {
        o->slot[i].group.lr_mul = v->lr_mul[i];
        o->slot[i].group.weight_decay = v->weight_decay[i];
    }
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
