/* optim/make.c: makes and frees optimizers and their state for each parameter. */
#include "optim/optim_internal.h"
#include <math.h>
#include <string.h>

static bool muon_is_kn_muons(const kn_optim_method *method, const kn_optim_groups *g)
{
    for (int k = 0; k < g->group_count; k++)
        if (g->groups[k].muon && !method->matrices)
            return kn_fail("optimizer: group %d ('%s') has .muon, which is for kn_muon", k,
                           g->groups[k].pattern ? g->groups[k].pattern : "*");
    return true;
}

/* There is something to round. */
static bool rounds(const kn_optim_groups *g, const kn_param *p, int n)
{
    bool any = !g->stochastic_rounding;
    for (int i = 0; i < n && !any; i++)
        any = p[i].master->dtype == KN_BF16 || p[i].master->dtype == KN_F16;
    return any || kn_fail("optimizer: .stochastic_rounding is for parameters of bf16 and f16, and "
                          "the module has none (kn_module_defaults, .dtype)");
}

/* The place of a draw says where a piece lies in its parameter, which rows that were copied out
 * don't. */
static bool rows_round(const kn_optim_groups *g, const kn_param *p, int n)
{
    for (int i = 0; i < n && g->stochastic_rounding; i++)
        if (kn_param_row(&p[i]) && (p[i].master->dtype == KN_BF16 || p[i].master->dtype == KN_F16))
            return kn_fail(
                "optimizer: .stochastic_rounding doesn't know '%s', whose gradient stays "
                "rows; keep that table in f32 (.dtype), or leave .sparse out",
                p[i].name);
    return true;
}

kn_optim *kn_optim_new(void *module, const kn_optim_method *method, const void *options,
                       size_t size, kn_optim_groups groups)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "optimizer") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (m && n == 0)
        kn_fail("optimizer: the module has no parameters");
    if (!m || n == 0 || !kn_one_place(p, n, "optimizer") || !kn_optim_groups_check(&groups, p, n) ||
        !muon_is_kn_muons(method, &groups) || !rounds(&groups, p, n) || !rows_round(&groups, p, n))
        return NULL;
    kn_optim *o = kn_host_calloc(1, sizeof *o);
    if (!o)
        return NULL;
    kn_live_begin(&o->live, m);
    m->optims++;
    o->method = method;
    o->at_random = groups.stochastic_rounding;
    o->maximize = groups.maximize;
    o->lr = kn_value_or(groups.lr, 0);
    o->seen = kn_steps_seen();
    o->slots = n;
    o->options = kn_host_alloc(size);
    o->slot = kn_host_calloc((size_t)n, sizeof *o->slot);
    o->piece = kn_host_calloc((size_t)n, sizeof *o->piece);
    o->param = kn_host_calloc((size_t)n, sizeof *o->param);
    int64_t scalars = sizeof(kn_step_scalars) / sizeof(double);
    o->scalars = kn_tensor_new(KN_F64, kn_device_of(p[0].master), NULL, KN_MEM_OPTIM, 1, &scalars,
                               NULL, false);
    bool ok = o->options && o->slot && o->piece && o->param && o->scalars &&
              kn_fill_(o->scalars, 0) && kn_marks_begin(&o->marks, p, n);
    for (int i = 0; ok && i < n; i++)
        ok = kn_optim_group_of(&o->slot[i].group, &groups, &p[i], m);
    if (!ok) {
        kn_optim_free(o);
        return NULL;
    }
    memcpy(o->options, options, size);
    kn_changed();
    return o;
}

bool kn_optim_lives(const kn_optim *o, const char *what)
{
    return kn_lives(o ? &o->live : NULL, "optimizer", what);
}

void kn_optim_free(kn_optim *o)
{
    if (!kn_live_end(o ? &o->live : NULL, "optimizer", "kn_optim_free"))
        return;
    kn_graph_forget(o);
    kn_changed();
    if (o->live.module)
        o->live.module->optims--;
    for (int i = 0; o->slot && i < o->slots; i++)
        for (int k = 0; k < KN_OPTIM_STATES; k++)
            kn_tensor_free(o->slot[i].state[k]);
    kn_tensor_free(o->scalars);
    kn_marks_end(&o->marks);
    kn_host_free(o->options);
    kn_host_free(o->slot);
    kn_host_free(o->piece);
    kn_host_free(o->param);
    kn_host_free(o->taken);
    kn_host_free(o);
}

/* ---- states ---------------------------------------------------------------------------------- */

const char *kn_slot_state_name(const kn_optim *o, const kn_optim_slot *s, int k)
{
    if (s->group.frozen)
        return NULL;
    if (s->matrix)
        return k == 0 ? o->method->matrix_state : NULL;
    return k >= 0 && k < KN_OPTIM_STATES ? o->method->state[k] : NULL;
}

int64_t kn_optim_state_row(const kn_optim *o, const kn_param *p)
{
    return o->method->one_a_row ? kn_param_row(p) : 0;
}

static kn_tensor *state_new(const kn_optim *o, const kn_param *p)
{
    const int64_t row = kn_optim_state_row(o, p);
    const int64_t rows = row ? kn_numel(p->master) / row : 0;
    return row ? kn_tensor_new(p->master->dtype, kn_device_of(p->master), p->state_memory,
                               KN_MEM_OPTIM, 1, &rows, NULL, false)
               : kn_param_state_new(p);
}

bool kn_optim_make_state(kn_optim *o, const kn_param *p, int i)
{
    for (int k = 0; k < KN_OPTIM_STATES; k++) {
        kn_tensor **state = &o->slot[i].state[k];
        if (!kn_slot_state_name(o, &o->slot[i], k) || *state)
            continue;
        if (kn_recording()) /* each replay would clear it */
            return kn_fail(
                "optimizer: the first step of '%s' is being recorded: run a step with its "
                "gradient before (.eager_steps)",
                p->name);
        *state = state_new(o, p);
        if (!*state || !kn_fill_(*state, 0))
            return false;
    }
    return true;
}

bool kn_optim_unchanged(const kn_optim *o, const kn_param *p, int n, const char *what)
{
    return kn_marks_hold(&o->marks, p, n, "optimizer", what);
}

const char *kn_optim_state_name(const kn_optim *o, int k)
{
    bool lives = kn_optim_lives(o, "kn_optim_state_name");
    for (int i = 0; lives && k >= 0 && i < KN_OPTIM_STATES; i++)
        if (o->method->state[i] && k-- == 0)
            return o->method->state[i];
    return lives && k == 0 ? o->method->matrix_state : NULL;
}

const char *kn_optim_state_name_of(const kn_optim *o, int param, int k)
{
    bool none = !kn_optim_lives(o, "kn_optim_state_name_of") || param < 0 || param >= o->slots;
    for (int i = 0; !none && k >= 0 && i < KN_OPTIM_STATES; i++) {
        const char *name = kn_slot_state_name(o, &o->slot[param], i);
        if (name && k-- == 0)
            return name;
    }
    return NULL;
}

kn_tensor *kn_optim_state_there(const kn_optim *o, int i, const char *name)
{
    for (int k = 0; k < KN_OPTIM_STATES; k++) {
        const char *is = kn_slot_state_name(o, &o->slot[i], k);
        if (is && name && strcmp(name, is) == 0)
            return o->slot[i].state[k];
    }
    return NULL;
}

void kn_optim_drop_state(kn_optim *o, int i)
{
    for (int k = 0; k < KN_OPTIM_STATES; k++) {
        kn_tensor_free(o->slot[i].state[k]);
        o->slot[i].state[k] = NULL;
    }
}

/* Made where a step would miss it. */
kn_tensor *kn_optim_state(const kn_optim *o, int i, const char *what)
{
    const kn_param *p;
    int n = kn_optim_lives(o, "kn_optim_state") ? kn_params(o->live.module->self, &p) : 0;
    if (i < 0 || i >= n || !kn_optim_unchanged(o, p, n, "kn_optim_state") ||
        (p[i].trainable && !kn_optim_make_state((kn_optim *)o, &p[i], i)))
        return NULL;
    return kn_optim_state_there(o, i, what);
}

/* ---- constants ------------------------------------------------------------------------------- */

static double value_of(const kn_optim_constant *c, const void *options)
{
    const void *at = (const char *)options + c->at;
    return c->type == KN_OF_REALS  ? *(const double *)at
           : c->type == KN_OF_INTS ? *(const int *)at
                                   : *(const bool *)at;
}

const kn_optim_constant *kn_optim_constant_at(const kn_optim *o, int k, double *value)
{
    const kn_optim_constant *c = o->method->constant ? &o->method->constant[k] : NULL;
    if (!c || !c->name)
        return NULL;
    *value = value_of(c, o->options);
    return c;
}

bool kn_optim_in_range(const kn_optim_constant *c, double x)
{
    return x >= c->low && (c->below ? x < c->high : x <= c->high) &&
           (c->type == KN_OF_REALS || x == rint(x));
}

bool kn_optim_in_ranges(const kn_optim_constant *c, const void *options, const char *what)
{
    for (double x; c->name; c++)
        if (!kn_optim_in_range(c, x = value_of(c, options)))
            return kn_fail("%s: .%s is %g; it must lie in [%g, %g%c", what,
                           c->option ? c->option : c->name, x, c->low, c->high,
                           c->below ? ')' : ']');
    return true;
}

void kn_optim_constant_set(kn_optim *o, int k, double value)
{
    const kn_optim_constant *c = &o->method->constant[k];
    void *at = (char *)o->options + c->at;
    if (c->type == KN_OF_REALS)
        *(double *)at = value;
    else if (c->type == KN_OF_INTS)
        *(int *)at = (int)value;
    else
        *(bool *)at = value != 0;
}

kn_module_impl *kn_optim_impl(const kn_optim *o)
{
    return o->live.module;
}

kn_module *kn_optim_module(const kn_optim *o)
{
    return kn_optim_lives(o, "kn_optim_module") ? o->live.module->self : NULL;
}
