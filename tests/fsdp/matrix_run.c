/* tests/fsdp/matrix_run.c: trains a setting on ranks, and the plain reference: the same
 * micro-batches one after another in one process without fsdp. */
#include "fsdp/kinds.h"
#include "tests/owned.h"
#include "tests/fsdp/matrix.h"
#include "nn/nn_internal.h"

/* ---- describing ------------------------------------------------------------------------------ */

const char *matrix_describe(const matrix_spec *s, char *buf, size_t size)
{
    static const char *const model[] = { "gpt", "odd", "turn", "llama", "own" };
#define STRATEGY(id, name, ...) [KN_##id] = name,
#define LAYOUT(id, name, ...)   [KN_LAYOUT_##id] = name,
    static const char *const strategy[] = { "default", KN_STRATEGIES(STRATEGY) };
    static const char *const layout[] = { "default", KN_LAYOUTS(LAYOUT) };
    static const char *const prefetch[] = { "default", "pre", "post", "none" };
    static const char *const optimizer[OPTIMIZER_KINDS] = { "adamw", "sgd", "momentum", "nesterov",
                                                            "lion",  "own", "muon",     "amsgrad" };
    const kn_fsdp_wrap_options *o = &s->o;
    snprintf(buf, size,
             "%s x%d%s%s strategy=%s mesh=%dx%d layout=%s prefetch=%s%s gathers=%d reshard=%d "
             "whole_below=%lld%s%s%s%s%s turn=%d rounds=%d optimizer=%s",
             model[s->model], s->ranks,
             s->hosts     ? " hosts"
             : s->threads ? " threads"
                          : "",
             s->workers ? " workers" : "", strategy[o->strategy], o->mesh.replicas, o->mesh.shards,
             layout[o->layout], prefetch[o->backward_prefetch],
             o->forward_prefetch ? "+forward" : "", o->max_gathers, o->reshard_after_forward,
             (long long)o->keep_whole_below, s->offload ? " offload" : "",
             s->whole ? " one_unit" : "", s->recompute ? " recompute" : "",
             s->by_data ? " by_data"
             : s->spare ? " spare"
                        : "",
             s->evaluate ? " evaluate" : "", s->only_turn - 1, s->rounds, optimizer[s->optimizer]);
    return buf;
}

/* ---- on a rank ------------------------------------------------------------------------------- */

kn_fsdp_wrap_options matrix_options(const matrix_spec *s)
{
    kn_fsdp_wrap_options o = s->o;
    const char *folder = getenv("TMPDIR");
    o._size = sizeof o;
    o.seed = 42;
    o.timeout_s = o.timeout_s > 0 ? o.timeout_s : 30;
    if (s->offload)
        o.offload_dir = folder && *folder ? folder : "/tmp";
    if (!o.wrap_class && !o.policy && !o.min_params && !s->whole && !s->wrap)
        o.wrap_class = matrix_wrap_class(s->model);
    return o;
}

static bool shard_it(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    if (s->recompute)
        matrix_net_recompute(n);
    if (!(s->wrap ? s->wrap(n, world, s) : kn_fsdp_wrap_(n->root, world, matrix_options(s))))
        return false;
    return !s->prepare || s->prepare(n, s);
}

static void choose_turn(matrix_net *n, const matrix_spec *s, int step, int round)
{
    n->turn.turn = s->only_turn ? s->only_turn - 1 : (step * s->rounds + round) % 4;
}

static bool one_round(matrix_net *n, const matrix_spec *s, int step, int round, int micro,
                      float *loss)
{
    IN_SCOPE;
    choose_turn(n, s, step, round);
    kn_tensor *l = matrix_loss(n, step, micro);
    *loss = l ? (float)kn_item(l) : 0;
    bool ok = l && (!s->between || s->between(n, step, round)) && kn_backward(l);
    return ok && kn_ok();
}

static bool evaluate(matrix_net *n, int step)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    n->turn.turn = step % 4;
    bool ok = matrix_loss(n, step, 0) != NULL;
    return ok;
}

static bool read_params(matrix_net *n, matrix_outcome *o, int step)
{
    const kn_param *p;
    o->params = kn_params(n->root, &p);
    if (o->params > MATRIX_PARAMS)
        return kn_fail("the test's model has more than %d parameters", MATRIX_PARAMS);
    for (int i = 0; i < o->params; i++) {
        int64_t end = o->begin[i] + p[i].numel;
        snprintf(o->name[i], sizeof o->name[i], "%s", p[i].name);
        if (end > MATRIX_ELEMENTS)
            return kn_fail("the test's model has more than %d elements", MATRIX_ELEMENTS);
        if (!kn_param_read(n->root, i, o->param[step] + o->begin[i]))
            return false;
        o->begin[i + 1] = end;
    }
    return kn_ok();
}

static bool gather_losses(kn_comm *world, const matrix_spec *s, const float *mine, float *out)
{
    float all[MATRIX_MICRO];
    int n = s->ranks;
    memcpy(all, mine, sizeof all);
    if (n > 1 &&
        !kn_all_gather(world, all, mine, s->rounds, KN_F32, kn_compute_stream(KN_CPU), "losses"))
        return false;
    for (int r = 0; r < n; r++)
        for (int a = 0; a < s->rounds; a++)
            out[a * n + r] = all[r * s->rounds + a];
    return kn_ok();
}

static bool train_step(matrix_net *n, kn_comm *world, const matrix_spec *s, kn_optim *opt, int step,
                       matrix_outcome *o)
{
    int rank = kn_rank(world);
    float loss[MATRIX_MICRO] = { 0 };
    bool ok = !s->evaluate || evaluate(n, step);
    for (int r = 0; r < s->rounds && ok; r++)
        ok = one_round(n, s, step, r, r * s->ranks + rank, loss + r);
    if (!ok || !gather_losses(world, s, loss, o->loss[step]))
        return false;
    o->norm[step] = (float)kn_item(kn_clip_grad_norm(n->root, 0.5));
    if (!kn_step(opt))
        return false;
    return !(s->history || step == s->steps - 1) || read_params(n, o, step);
}

static void begin_rank(const matrix_spec *s)
{
    kn_set_threads(1);
    kn_set_free_cores(s->workers ? 2 : 0);
    kn_seed(7);
    kn_set_step(0);
}

static void matrix_net_free(matrix_net *n)
{
    if (!n)
        return;
    kn_module_free(n->root);
    free(n->own);
    free(n);
}

int matrix_train(kn_comm *world, void *arg)
{
    const matrix_job *j = arg;
    const matrix_spec *s = &j->s;
    OWNED_BYTES matrix_outcome *o = calloc(1, sizeof *o);
    matrix_net *n = calloc(1, sizeof *n);
    kn_optim *opt = NULL;
    begin_rank(s);
    bool ok = o && n && matrix_net_init(n, s) && shard_it(n, world, s);
    ok = ok && (opt = optimizer_make(s->optimizer, n->root, false)) != NULL;
    for (int i = 0; i < s->steps && ok; i++)
        ok = train_step(n, world, s, opt, i, o);
    if (ok)
        j->out[kn_rank(world)] = *o;
    kn_optim_free(opt);
    matrix_net_free(n);
    return ok && kn_ok() ? 0 : 1;
}

/* ---- the reference --------------------------------------------------------------------------- */

static bool reference_step(matrix_net *n, const matrix_spec *s, kn_optim *opt, int step,
                           matrix_outcome *o)
{
    matrix_spec plain = { .model = s->model, .rounds = s->rounds, .only_turn = s->only_turn };
    bool ok = !s->evaluate || evaluate(n, step);
    for (int k = 0; k < s->rounds * s->ranks && ok; k++)
        ok = one_round(n, &plain, step, k / s->ranks, k, &o->loss[step][k]);
    o->norm[step] = (float)kn_item(kn_clip_grad_norm(n->root, 0.5));
    return ok && kn_step(opt) && read_params(n, o, step);
}

int matrix_reference(kn_comm *world, void *arg)
{
    const matrix_job *j = arg;
    OWNED_BYTES matrix_outcome *o = calloc(1, sizeof *o);
    matrix_net *n = calloc(1, sizeof *n);
    kn_optim *opt = NULL;
    begin_rank(&j->s);
    bool ok = o && n && matrix_net_init(n, &j->s) && kn_materialize(n->root, KN_CPU, 42);
    if (ok && j->s.recompute)
        matrix_net_recompute(n);
    ok = ok && (opt = optimizer_make(j->s.optimizer, n->root, false)) != NULL;
    for (int i = 0; i < j->s.steps && ok; i++)
        ok = reference_step(n, &j->s, opt, i, o);
    if (ok)
        *j->out = *o;
    kn_optim_free(opt);
    matrix_net_free(n);
    return ok && kn_ok() ? 0 : 1;
}
