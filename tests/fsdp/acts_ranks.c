/* tests/fsdp/acts_ranks.c: a program of acts on ranks; each act is compared with the reference. */
#include "fsdp/unit.h"
#include "tests/owned.h"
#include "tests/fsdp/acts.h"

typedef struct trainer {
    acts_job *job;
    const acts_program *p;
    acts_net net;
    kn_comm *comm[RANKS_WAYS];
    int rank, mode; /* of the last backward, -1: trees have come */
    bool merged[ACTS_PARTS], gone[ACTS_PARTS], root;
    kn_optim *optim[ACTS_PLACES];
    kn_scaler *scaler; /* or NULL */
} trainer;

static bool near(double a, double b)
{
    return a == b || fabs(a - b) <= 2e-5 * fmax(1, fabs(b));
}

/* ---- building -------------------------------------------------------------------------------- */

static bool is_gone(const trainer *t, int place)
{
    int k = acts_part_of(place);
    return k >= 0 && t->gone[k];
}

static void freeze(trainer *t, int place, bool frozen)
{
    if (place < ACTS_PLACES)
        kn_freeze(acts_place(&t->net, place), frozen);
    else
        kn_require_grad(acts_tensor(&t->net, place - ACTS_PLACES), !frozen);
}

static void drop_optims(trainer *t)
{
    for (int i = 0; i < ACTS_PLACES; i++) {
        kn_optim_free(t->optim[i]);
        t->optim[i] = NULL;
    }
}

static bool make_optims(trainer *t)
{
    for (int i = 0; i < ACTS_PLACES; i++)
        if (acts_has_optim(t->p, i) && !is_gone(t, i) &&
            !(t->optim[i] = kn_sgd(acts_place(&t->net, i), .lr = 0.0625)))
            return false;
    return true;
}

static bool sees_nothing(const kn_grad_reduction *r, void *arg)
{
    return r->dst != NULL || r->count == 0;
}

static bool set_hooks(void *module, int hook)
{
    return hook == 0   ? true
           : hook == 1 ? kn_fsdp_set_comm_hook(module, kn_reduce_default, NULL, true)
                       : kn_fsdp_set_all_reduce_hook(module, sees_nothing, NULL, true);
}

/* Part k, or (-1) the root. */
static bool wrap(trainer *t, void *module, kn_comm *comm, int k)
{
    const acts_program *p = t->p;
    bool linears = k >= 0 && p->part[k].style == STYLE_UNITS;
    return kn_fsdp_wrap(module, comm, .wrap_class = linears ? "linear" : NULL, .seed = 5,
                        .strategy = p->strategy == 0   ? KN_FULL_SHARD
                                    : p->strategy == 1 ? KN_SHARD_GRAD_OP
                                    : p->strategy == 2 ? KN_NO_SHARD
                                                       : KN_HYBRID_SHARD,
                        .mesh = { .shards = p->strategy == 3 ? 2 - kn_comm_size(comm) % 2 : 0 },
                        .layout = p->layout == 0   ? KN_LAYOUT_FLAT
                                  : p->layout == 1 ? KN_LAYOUT_PER_PARAM
                                                   : KN_LAYOUT_RAGGED,
                        .backward_prefetch = p->prefetch == 0   ? KN_PREFETCH_PRE
                                             : p->prefetch == 1 ? KN_PREFETCH_POST
                                                                : KN_PREFETCH_NONE,
                        .forward_prefetch = p->forward_prefetch,
                        .keep_whole_below = p->whole ? 6 : 0, .max_reductions = p->several ? 3 : 0,
                        .divide_factor = p->factor && k == 1 ? 3 : 0,
                        .offload_dir = p->store ? "/tmp" : NULL) &&
           set_hooks(module, p->hook) &&
           (!p->keep || kn_fsdp_set_reshard_after_backward(module, false, true)) &&
           (!p->unused || kn_fsdp_set_reduce_unused(module, true, true));
}

static bool put(trainer *t, void *module, int k, const acts_values *v)
{
    const kn_param *p;
    int n = kn_params(module, &p);
    for (int j = 0; j < n; j++)
        if (!kn_param_write(module, j, v->of[acts_param(&p[j], k)]))
            return false;
    return true;
}

/* Gradients of before the wrap are refused, on one rank; several end with an error. */
static bool early(trainer *t, void *part, int k)
{
    kn_scope scope = kn_scope_begin();
    t->net.calls = t->net.uses = 1 << k;
    bool ok = kn_materialize(part, KN_CPU, 5) && kn_backward(acts_loss(&t->net, 1000, false));
    kn_scope_end(scope);
    if (ok && t->p->ranks == 0) {
        ok = !wrap(t, part, t->comm[RANKS_ALL], k) && kn_error() &&
             strstr(kn_error(), "holds a gradient of before it is sharded");
        kn_clear_error();
    }
    kn_zero_grad(part);
    return ok;
}

static bool begin(trainer *t)
{
    bool ok = acts_net_init(&t->net, t->p, false);
    for (int i = RANKS_PAIRS; ok && i < RANKS_WAYS; i++)
        ok = (t->comm[i] = kn_comm_split(t->comm[RANKS_ALL], acts_color(i, t->rank), t->rank,
                                         "some")) != NULL;
    for (int i = 0; ok && i < ACTS_PARTS; i++) {
        int k = (i + t->p->order) % ACTS_PARTS;
        const acts_part *part = &t->p->part[k];
        t->merged[k] = !part->apart;
        if (k == 2 && t->p->cold)
            freeze(t, AT_PART + 2, true);
        ok = (part->style == STYLE_PLAIN || !part->early || early(t, t->net.part[k], k)) &&
             (part->style == STYLE_PLAIN ||
              wrap(t, t->net.part[k], t->comm[acts_split(t->p, k)], k)) &&
             (!part->apart || put(t, t->net.part[k], k, &t->job->begin));
    }
    t->root = t->p->root == ROOT_FIRST;
    return ok && (!t->root || wrap(t, &t->net, t->comm[RANKS_ALL], -1)) &&
           put(t, &t->net, -1, &t->job->begin) && make_optims(t) &&
           (!t->p->scaler ||
            (t->scaler = kn_scaler_new(&t->net, .init_scale = ACTS_FIRST_SCALE,
                                       .interval = ACTS_INTERVAL, .several = t->p->optims != 0)));
}

/* ---- comparing ------------------------------------------------------------------------------- */

static bool differs(trainer *t, int number, const char *what, double is, double want)
{
    char *w = t->job->where;
    kn_fail("act %d: rank %d: %s is %.9g, not %.9g", number, t->rank, what, is, want);
    if (!*w)
        snprintf(w, sizeof t->job->where, "%s", kn_error());
    return false;
}

static bool read_params(trainer *t, acts_values *v)
{
    const kn_param *p;
    memset(v, 0, sizeof *v);
    for (int k = -1; k < ACTS_PARTS; k++) {
        void *m = k < 0 ? (void *)&t->net : t->net.part[k];
        bool own = k < 0 || !(t->merged[k] || t->gone[k]);
        for (int j = 0, n = own ? kn_params(m, &p) : 0; j < n; j++)
            if (!kn_param_read(m, j, v->of[acts_param(&p[j], k)]))
                return false;
    }
    return true;
}

static bool same_params(trainer *t, int number)
{
    acts_values v;
    char name[32];
    if (!read_params(t, &v))
        return false;
    for (int i = 0; i < ACTS_PARAMS && !t->p->dropout; i++)
        for (int e = 0; e < acts_numel(i) && !is_gone(t, acts_above(ACTS_PLACES + i)); e++) {
            double want = (double)t->job->want[number].values[t->rank].of[i][e];
            snprintf(name, sizeof name, "parameter %d[%d]", i, e);
            if (!near((double)v.of[i][e], want))
                return differs(t, number, name, (double)v.of[i][e], want);
        }
    return true;
}

/* ---- acts ------------------------------------------------------------------------------------ */

static kn_tensor *loss(trainer *t, const act *a, int number)
{
    t->net.uses = acts_uses(a, t->rank);
    t->net.calls = a->arg[0];
    t->net.gains = a->arg[2] && t->root;
    t->net.reverse = a->kind == ACT_EVALUATE && a->arg[4] & 1;
    return acts_loss(&t->net, (uint64_t)(number * ACTS_RANKS + t->rank), a->arg[2]);
}

static bool evaluate(trainer *t, const act *a, int number, bool compares)
{
    bool mode = kn_set_grad_mode(false);
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = loss(t, a, number);
    double is = y ? kn_item(y) : NAN, want = t->job->want[number].loss[t->rank];
    if (y && t->scaler) /* no backward comes */
        kn_scale_loss(t->scaler, y);
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    return kn_ok() && (t->p->dropout || !compares || near(is, want) ||
                       differs(t, number, "the evaluated loss", is, want));
}

static bool sample(int rank)
{
    WITHOUT_GRAD;
    IN_SCOPE;
    bool ok = true;
    for (int i = 0; i <= rank && ok; i++)
        ok = kn_multinomial(
                 kn_softmax(kn_randn_like(kn_dropout(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)), 0.5)),
                            -1),
                 1, true) != NULL;
    return ok && kn_ok();
}

/* Switches of all trees of units. */
static bool set_mode(trainer *t, int mode)
{
    bool ok = true;
    for (int k = -1; ok && k < ACTS_PARTS; k++) {
        void *m = k < 0 ? (void *)&t->net : t->net.part[k];
        bool top = k < 0 ? t->root : !t->root && t->p->part[k].style != STYLE_PLAIN && !t->gone[k];
        ok = !top || (kn_fsdp_set_gradient_sync(m, mode != MODE_NO_SYNC, true) &&
                      kn_fsdp_set_is_last_backward(m, mode != MODE_NOT_LAST) &&
                      kn_fsdp_set_all_reduce(m, mode != MODE_NO_ALL_REDUCE, true));
    }
    return ok;
}

static bool backward(trainer *t, const act *a, int number)
{
    bool ok = kn_unclip_grads(&t->net) && (t->mode == a->arg[1] || set_mode(t, a->arg[1]));
    t->mode = a->arg[1];
    for (int k = 0; k < ACTS_PARTS; k++)
        ok = ok && (t->gone[k] || kn_unclip_grads(t->net.part[k]));
    IN_SCOPE;
    kn_tensor *y = ok ? loss(t, a, number) : NULL;
    double is = y ? kn_item(y) : NAN, want = t->job->want[number].loss[t->rank];
    int between = t->job->without && a->arg[4] >= BETWEEN_EVALUATE ? 0 : a->arg[4];
    act other = { ACT_EVALUATE, { a->arg[0], 0, a->arg[2], 0, 1 } };
    ok = y && (t->p->dropout || near(is, want) || differs(t, number, "the loss", is, want));
    y = ok && t->job->want[number].scaled ? kn_scale_loss(t->scaler, y) : y;
    if ((between == BETWEEN_FREEZE || between == BETWEEN_UNFREEZE) && !is_gone(t, a->arg[5]))
        freeze(t, a->arg[5], between == BETWEEN_FREEZE);
    ok = ok && (between != BETWEEN_EVALUATE || evaluate(t, &other, number, false)) &&
         (between != BETWEEN_SAMPLE || sample(t->rank)) && kn_backward(y);
    return ok && kn_ok();
}

static bool clip(trainer *t, const act *a, int number)
{
    static const double order[] = { 2, 1, HUGE_VAL }, most[] = { 0.5, 0.01, 3 };
    const act_outcome *want = &t->job->want[number];
    void *m = acts_place(&t->net, a->arg[0]);
    bool measures = a->kind == ACT_MEASURE;
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = kn_clip_grad_norm_p(m, measures ? 0 : most[a->arg[2]], order[a->arg[1]]);
    double is = y ? kn_item(y) : NAN;
    bool again = a->kind == ACT_CLIP && a->arg[3] && !t->job->without && y;
    const bool finite = isfinite(want->norm[t->rank]);
    bool ok = !again || (kn_clip_grad_norm(m, 0) && !kn_find_nonfinite_grad(m) == finite);
    kn_scope_end(scope);
    if (!ok || !kn_ok() || (!t->p->dropout && !near(is, want->norm[t->rank])))
        return kn_ok() && differs(t, number, "the norm", is, want->norm[t->rank]);
    ok = !measures || (!kn_find_nonfinite_grad(m) == finite && kn_ok());
    if (!ok || !measures || want->scale[t->rank] == 0)
        return ok;
    is = kn_grad_scale(m);
    return kn_ok() && (near(is, want->scale[t->rank]) ||
                       differs(t, number, "the scale", is, want->scale[t->rank]));
}

/* Of the module that holds the parameter. */
static bool edit(trainer *t, const act *a, int number)
{
    const kn_param *p;
    int i = a->arg[0], k = i == ACTS_GAIN ? -1 : i / 4;
    void *m = k < 0 ? (void *)&t->net : t->net.part[k];
    kn_summon_scope whole = { NULL };
    bool mode = kn_set_grad_mode(false),
         ok = !a->arg[2] || (whole = kn_summon(m, .with_grads = true)).s;
    kn_scope scope = kn_scope_begin();
    for (int j = 0, n = kn_params(m, &p); j < n && ok; j++) {
        kn_tensor *g = acts_param(&p[j], k) != i ? NULL
                       : a->arg[2]               ? kn_grad(p[j].tensor)
                                                 : kn_param_grad(&p[j]);
        ok = !g || kn_numel(g) == 0 ||
             (a->arg[1] == 2 ? kn_fill_(g, INFINITY) : kn_scale_(g, a->arg[1] ? 0.5 : 4));
    }
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    ok = ok && (!a->arg[2] || kn_summon_end(whole));
    return ok && kn_ok();
}

static bool same_scale(trainer *t, int number)
{
    double is = kn_scaler_get(t->scaler).scale, want = t->job->want[number].loss_scale;
    return kn_ok() && (is == want || differs(t, number, "the loss scale", is, want));
}

/* The scaler takes no gradients without its scale. */
static bool step(trainer *t, int number)
{
    const act_outcome *want = &t->job->want[number];
    kn_optim *o = t->optim[want->place];
    if (want->scaled)
        return kn_scaler_step(t->scaler, o) && same_scale(t, number);
    if (t->scaler && want->bare && t->p->ranks == 0) { /* several end with an error */
        bool refused = !kn_scaler_step(t->scaler, o) && strstr(kn_error(), "carry no scale");
        if (!refused)
            return differs(t, number, "refusals of gradients without scale", refused, 1);
        kn_clear_error();
    }
    return kn_step(o) && (!t->scaler || same_scale(t, number));
}

/* The switches are as they were. */
static bool reduce(trainer *t, void *place, int number)
{
    kn_module *unit[1 + 3 * ACTS_PARTS];
    bool ok = kn_fsdp_reduce_grads(place);
    for (int i = 0, n = ok && t->mode >= 0 ? kn_fsdp_units(place, unit, 10) : 0; i < n; i++) {
        const kn_unit *u = kn_unit_of(unit[i]->impl);
        if (u->set.sync != (t->mode != MODE_NO_SYNC) ||
            u->set.all_reduce != (t->mode != MODE_NO_ALL_REDUCE) ||
            (unit[i] == place && u->set.is_last_backward != (t->mode != MODE_NOT_LAST)))
            return differs(t, number, "the unit with other switches", i, -1);
    }
    return ok;
}

static bool merge(trainer *t, int k, bool zero_first)
{
    if (zero_first)
        kn_zero_grad(t->net.part[k]);
    drop_optims(t);
    t->merged[k] = true;
    return kn_unclip_grads(&t->net) && kn_unclip_grads(t->net.part[k]) &&
           kn_module_add(&t->net.base, (char[]){ (char)('a' + k), 0 }, &t->net.part[k]->base) &&
           make_optims(t);
}

static bool replace(trainer *t, int k, int number)
{
    char name[] = { (char)('a' + k), 0 };
    acts_values v;
    drop_optims(t);
    acts_module *m = acts_part_new(&t->net, t->p, k, KN_CPU);
    kn_module *old = m ? kn_module_replace(&t->net, name, &m->base) : NULL;
    kn_module_free(old);
    acts_fill(&v, k, (uint64_t)number);
    return old && put(t, m, k, &v) && make_optims(t);
}

static bool free_part(trainer *t, int k)
{
    drop_optims(t);
    kn_unclip_grads(&t->net);
    kn_module_free(t->net.part[k]);
    t->gone[k] = true;
    return make_optims(t);
}

static bool run(trainer *t, const act *a, int number)
{
    const act_outcome *want = &t->job->want[number];
    switch (a->kind) {
    case ACT_BACKWARD:
        return backward(t, a, number);
    case ACT_STEP:
        return step(t, number);
    case ACT_CLIP:
    case ACT_MEASURE:
        return clip(t, a, number);
    case ACT_FREEZE:
        freeze(t, a->arg[0], !a->arg[1]);
        return kn_ok();
    case ACT_ZERO:
        if (a->arg[0] < ACTS_PLACES)
            kn_zero_grad(acts_place(&t->net, a->arg[0]));
        else
            kn_clear_grad(acts_tensor(&t->net, a->arg[0] - ACTS_PLACES));
        return kn_ok();
    case ACT_EDIT:
        return edit(t, a, number);
    case ACT_REDUCE:
        return reduce(t, acts_place(&t->net, a->arg[0]), number);
    case ACT_ROOT:
        drop_optims(t);
        t->mode = -1;
        return (t->root = wrap(t, &t->net, t->comm[RANKS_ALL], -1)) &&
               put(t, &t->net, -1, &want->values[t->rank]) && make_optims(t);
    case ACT_MERGE:
        return merge(t, a->arg[0], want->zero_first);
    case ACT_REPLACE:
        return replace(t, a->arg[0], number);
    case ACT_FREE:
        return free_part(t, a->arg[0]);
    case ACT_UPDATE:
        return kn_scaler_update(t->scaler) && same_scale(t, number);
    case ACT_EVALUATE:
        return evaluate(t, a, number, true);
    default:
        return sample(t->rank);
    }
}

int acts_ranks(kn_comm *world, void *arg)
{
    acts_job *job = arg;
    OWNED_BYTES trainer *t = calloc(1, sizeof *t);
    *t = (trainer){ .job = job, .p = &job->p, .rank = kn_rank(world), .mode = -1 };
    t->comm[RANKS_ALL] = world;
    kn_set_threads(1);
    kn_seed(7);
    kn_set_step(0);
    bool ok = begin(t);
    int i = 0;
    for (; ok && i < ACTS_MOST; i++) {
        const act *a = &job->p.act[i];
        if (job->want[i].run && !(job->without && acts_changes_nothing(a)))
            ok = run(t, a, i) && (a->kind != ACT_STEP || same_params(t, i));
    }
    ok = ok && same_params(t, ACTS_MOST - 1) && read_params(t, &job->end[job->without][t->rank]);
    if (!ok && t->rank == 0 && !*job->where)
        snprintf(job->where, sizeof job->where, "act %d: %s", i - 1, kn_ok() ? "?" : kn_error());
    drop_optims(t);
    kn_scaler_free(t->scaler);
    for (int k = 0; k < ACTS_PARTS; k++)
        if (!t->merged[k] && !t->gone[k])
            kn_module_free(t->net.part[k]);
    kn_module_free(&t->net);
    return !ok;
}
