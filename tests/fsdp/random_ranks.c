/* tests/fsdp/random_ranks.c: a rank trains its part of a random program. */
#include "tests/owned.h"
#include "tests/fsdp/random.h"

typedef struct trainer {
    random_net *n;
    const random_program *p;
    kn_comm *world;
    int rank, ranks, rounds;
    bool own_draws; /* the test sets the micro-batch of draws */
    bool hook_fails;
    kn_tensor *stale; /* the loss of a forward before the last step */
    random_optims optims;
    random_outcome *out;
} trainer;

/* ---- building -------------------------------------------------------------------------------- */

static bool hook(const kn_grad_reduction *r, void *arg)
{
    const trainer *t = arg;
    if (t->hook_fails)
        return kn_fail("the communication hook of '%s' was to fail", r->unit);
    return t->p->option[O_COMM_HOOK] == 2 ? kn_hook_bf16(r, NULL) : kn_reduce_default(r, NULL);
}

/* Sees the sum over ranks, or halves it. */
static bool sum_hook(const kn_grad_reduction *r, void *arg)
{
    const trainer *t = arg;
    kn_array a = kn_array_make(r->dst, r->dst_dtype, 1, &r->count);
    kn_unary_args half = { .dst = a, .src = a, .kind = KN_AFFINE, .p0 = 0.5, .p1 = 0 };
    return t->p->option[O_SUM_HOOK] != SUM_HOOK_HALVES || r->count == 0 ||
           KN_LAUNCH(r->stream, KN_K_UNARY, half);
}

static bool gather_hook(const kn_param_gather *g, void *arg)
{
    return kn_gather_default(g, NULL);
}

static bool set_controls(trainer *t)
{
    const random_program *p = t->p;
    void *root = &t->n->m[0];
    return (!p->option[O_SUM_HOOK] || kn_fsdp_set_all_reduce_hook(root, sum_hook, t, true)) &&
           (!p->option[O_GATHER_HOOK] || kn_fsdp_set_gather_hook(root, gather_hook, t, true)) &&
           (p->option[O_EMBEDDING] != EMBEDDING_STAYS_SHARDED ||
            kn_fsdp_set_unshard_in_backward(&t->n->embed, false, false)) &&
           (!p->option[O_UNUSED] || kn_fsdp_set_reduce_unused(root, true, true));
}

static bool set_lists(trainer *t)
{
    kn_module *unit[2 * RANDOM_NODES];
    int n = kn_fsdp_units(&t->n->m[0], unit, 2 * RANDOM_NODES);
    bool all = t->p->option[O_LISTS] == 2;
    for (int i = 0; i < n; i++) {
        kn_module *const *list = all ? unit : &unit[(i + 1) % n];
        if (!kn_fsdp_prefetch_forward(unit[i], list, all ? n : 1) ||
            !kn_fsdp_prefetch_backward(unit[n - 1 - i], list, all ? n : 1))
            return false;
    }
    return true;
}

static bool build(trainer *t)
{
    const random_program *p = t->p;
    bool plain = p->option[O_WRAP] == WRAP_UNWRAPPED;
    bool cpu = plain || p->option[O_INIT] == INIT_CPU || p->option[O_INIT] == INIT_RANK0;
    uint64_t seed = p->option[O_INIT] == INIT_RANK0 && t->rank > 0 ? 43 : 42;
    for (int i = 0; i < RANDOM_NODES; i++)
        cpu |= p->node[i].ignored;
    const int sync = p->option[O_SYNC_NORMS];
    if (!random_net_init(t->n, p, KN_F32, cpu ? KN_CPU : KN_META) ||
        (cpu && !kn_materialize(&t->n->m[0], KN_CPU, seed)) ||
        (sync == SYNC_BEFORE && !kn_sync_batch_norm(&t->n->m[0], t->world)) ||
        (!plain && !random_wrap(t->n, t->world)) ||
        (sync == SYNC_AFTER && !kn_sync_batch_norm(&t->n->m[0], t->world)))
        return false;
    if (p->option[O_CAST_INPUTS] == 3)
        t->n->input = random_dtype(p, O_PARAM_DTYPE);
    return (!p->option[O_KEEP_GATHERED] ||
            kn_fsdp_set_reshard_after_backward(&t->n->m[0], false, true)) &&
           (!p->option[O_COMM_HOOK] || kn_fsdp_set_comm_hook(&t->n->m[0], hook, t, true)) &&
           set_controls(t) && (!p->option[O_LISTS] || set_lists(t)) &&
           random_optims_make(&t->optims, t->n);
}

/* ---- events ---------------------------------------------------------------------------------- */

static kn_tensor *loss_of(trainer *t, int step, int round)
{
    int micro = round * t->ranks + (t->p->option[O_DATA] ? 0 : t->rank);
    if (t->own_draws)
        random_draws_of(micro);
    return random_loss(t->n, step, round, micro);
}

static kn_tensor *part_loss(trainer *t, const random_event *e)
{
    int micro = e->round * t->ranks + (t->p->option[O_DATA] ? 0 : t->rank);
    if (t->own_draws)
        random_draws_of(micro);
    return random_part_loss(t->n, e->node, e->step, e->round, micro);
}

/* last: no more backwards follow in this step. */
static bool switch_sync(trainer *t, int round, bool last)
{
    int sync = t->p->option[O_SKIP_SYNC], all = t->p->option[O_SKIP_ALL_REDUCE];
    void *root = &t->n->m[0];
    return (!t->p->option[O_LAST] || kn_fsdp_set_is_last_backward(root, last)) &&
           (!sync || kn_fsdp_set_gradient_sync(root, !(sync >> round & 1), true)) &&
           (!all || kn_fsdp_set_all_reduce(root, !(all >> round & 1), true));
}

/* A forward whose backward comes after a step, which has changed its parameters. */
static bool begin_stale(trainer *t, int step)
{
    for (int i = 0; i < RANDOM_EVENTS; i++)
        if (t->p->event[i].kind == EVENT_FAIL_STALE && t->p->event[i].step == step + 1 &&
            !t->stale) {
            kn_scope scope = kn_scope_begin();
            kn_tensor *loss = loss_of(t, step, 0);
            t->stale = loss ? kn_keep(loss) : NULL;
            kn_scope_end(scope);
            if (!loss)
                return false;
        }
    return true;
}

static bool end_stale(trainer *t)
{
    bool ok = t->stale && kn_backward(t->stale);
    kn_tensor_free(t->stale);
    t->stale = NULL;
    kn_clear_error();
    return !ok || kn_fail("a backward read parameters that a step had changed, without an error");
}

static bool retain(trainer *t, const random_event *e)
{
    IN_SCOPE;
    kn_tensor *loss = switch_sync(t, e->round, false) ? loss_of(t, e->step, e->round) : NULL;
    if (loss && t->optims.scaler)
        loss = kn_scale_loss(t->optims.scaler, loss);
    bool ok = loss && kn_backward(loss, .retain_graph = true) && kn_backward(loss);
    return ok;
}

static bool call_directly(trainer *t, const random_event *e)
{
    bool train = e->kind == EVENT_CALL_BACKWARD, mode = kn_set_grad_mode(train);
    kn_scope scope = kn_scope_begin();
    kn_tensor *loss = switch_sync(t, e->round, false) ? part_loss(t, e) : NULL;
    if (loss && train && t->optims.scaler)
        loss = kn_scale_loss(t->optims.scaler, loss);
    bool ok = loss && (!train || kn_backward(loss));
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    return ok;
}

/* Drops a failed pass. */
static bool failing_pass(trainer *t, const random_event *e)
{
    bool here = e->who == 0 || e->who - 1 == t->rank;
    t->n->failing = here ? e->kind : 0;
    t->n->fail_node = e->node;
    t->hook_fails = here && e->kind == EVENT_FAIL_COMM_HOOK;
    kn_scope scope = kn_scope_begin();
    kn_tensor *loss = switch_sync(t, e->round, false) ? loss_of(t, e->step, e->round) : NULL;
    bool ok = loss && kn_backward(t->optims.scaler ? kn_scale_loss(t->optims.scaler, loss) : loss);
    kn_scope_end(scope);
    t->n->failing = 0;
    t->hook_fails = false;
    if (!ok && kn_ok())
        return kn_fail("a pass failed without an error");
    kn_clear_error();
    return true;
}

static bool forward_only(trainer *t, const random_event *e)
{
    IN_SCOPE;
    bool mode = kn_set_grad_mode(e->kind != EVENT_EVALUATE);
    bool ok = loss_of(t, e->step, e->round) != NULL;
    kn_set_grad_mode(mode);
    return ok;
}

static bool summon(trainer *t, int kind)
{
    bool rank0 = kind == EVENT_SUMMON_RANK0, read = kind == EVENT_SUMMON;
    const int *o = t->p->option; /* by these gradients wait, which can't be shown */
    const bool grads = read && !o[O_LAST] && !o[O_SKIP_SYNC] && !o[O_SKIP_ALL_REDUCE];
    kn_summon_scope s =
        kn_summon(&t->n->m[0], .rank0_only = rank0, .read_only = read, .with_grads = grads);
    bool ok = kn_ok() && ((rank0 && t->rank > 0) || random_scale_gain(t->n));
    return kn_summon_end(s) && ok;
}

static bool scale_in_root(kn_module *m, void *arg)
{
    trainer *t = arg;
    return m != &t->n->m[0].base || random_scale_gain(t->n);
}

static bool read_all(trainer *t)
{
    const kn_param *p;
    float v[RANDOM_ELEMENTS];
    int n = kn_params(&t->n->m[0], &p);
    for (int i = 0; i < n; i++)
        if (!kn_param_read(&t->n->m[0], i, v))
            return false;
    return true;
}

/* Everything, one parameter after another and as state dicts. */
static bool read_and_move(trainer *t, const random_event *e)
{
    return read_all(t) && random_move_state(t->n, &t->optims, e->step + e->round);
}

static bool clear_all(trainer *t)
{
    const kn_param *p;
    int n = kn_params(&t->n->m[0], &p);
    for (int i = 0; i < n; i++)
        kn_clear_grad(p[i].tensor);
    return kn_ok();
}

static bool happen(trainer *t, const random_event *e)
{
    void *unit = kn_fsdp_is_unit(&t->n->m[e->node]) ? &t->n->m[e->node] : &t->n->m[0];
    switch (e->kind) {
    case EVENT_EVALUATE:
    case EVENT_ABANDON:
        return forward_only(t, e);
    case EVENT_SUMMON:
    case EVENT_SUMMON_WRITE:
    case EVENT_SUMMON_RANK0:
        return summon(t, e->kind);
    case EVENT_APPLY:
        return kn_fsdp_apply(&t->n->m[0], scale_in_root, t);
    case EVENT_READ:
        return read_and_move(t, e);
    case EVENT_UNSHARD:
        return kn_unshard_wait(kn_fsdp_unshard(unit));
    case EVENT_UNSHARD_RESHARD:
        return kn_unshard_wait(kn_fsdp_unshard(unit)) && kn_fsdp_reshard(unit);
    case EVENT_RESHARD:
        return kn_fsdp_reshard(unit);
    case EVENT_CLEAR:
        return clear_all(t);
    case EVENT_ZERO:
        kn_zero_grad(&t->n->m[0]);
        return kn_ok();
    case EVENT_NEVER_RESHARD:
        return kn_fsdp_set_reshard_after_forward(&t->n->m[0], KN_RESHARD_NEVER, true);
    case EVENT_ALWAYS_RESHARD:
        return kn_fsdp_set_reshard_after_forward(&t->n->m[0], KN_RESHARD_ALWAYS, true);
    case EVENT_FREEZE:
        if (e->node) /* the root's own always train */
            kn_freeze(&t->n->m[e->node], true);
        return kn_ok();
    case EVENT_DIVIDE:
        return kn_fsdp_set_divide_factor(&t->n->m[0], RANDOM_FACTOR, true);
    case EVENT_RETAIN:
        return retain(t, e);
    case EVENT_CALL:
    case EVENT_CALL_BACKWARD:
        return call_directly(t, e);
    case EVENT_FAIL_STALE:
        return end_stale(t);
    default:
        return failing_pass(t, e);
    }
}

/* ---- training -------------------------------------------------------------------------------- */

/* One micro-batch, or two forwards and then their backwards. */
static bool turn(trainer *t, int step, int round, float *loss)
{
    IN_SCOPE;
    kn_tensor *l[2] = { NULL, NULL };
    int order[2], n = random_turn(t->p, round, order);
    bool ok = switch_sync(t, round, false);
    for (int i = 0; i < n && ok; i++) {
        l[i] = loss_of(t, step, round + i);
        ok = l[i] && kn_ok();
        if (ok)
            loss[(round + i) * t->ranks + t->rank] = (float)kn_item(l[i]);
    }
    for (int i = 0; i < n && ok; i++) {
        kn_tensor *of = l[order[i] - round];
        random_at(t->n, step, order[i], order[i] * t->ranks + (t->p->option[O_DATA] ? 0 : t->rank));
        ok = switch_sync(t, order[i], round + n == t->rounds && i == n - 1) &&
             kn_backward(t->optims.scaler ? kn_scale_loss(t->optims.scaler, of) : of);
    }
    return ok && kn_ok();
}

static bool train_step(trainer *t, int step)
{
    random_outcome *o = t->out;
    for (int r = 0; r < t->rounds; r += t->p->option[O_PAIRS] ? 2 : 1) {
        int at = 0;
        for (const random_event *e; (e = random_event_at(t->p, step, r, &at));)
            if (!happen(t, e))
                return false;
        if (!turn(t, step, r, o->loss[step]))
            return false;
    }
    return begin_stale(t, step) && random_optims_step(&t->optims, t->n, &o->norm[step]) &&
           random_read_params(t->n, o, step) && kn_ok();
}

/* The test overrides the library's numbering of draws only where needed. */
static bool needs_own_draws(const random_program *p)
{
    bool yes = p->option[O_PAIRS] || p->option[O_SCALER] || p->option[O_DATA] || random_fails(p);
    for (int i = 0; i < RANDOM_EVENTS; i++)
        yes |= p->event[i].kind == EVENT_ABANDON || p->event[i].kind == EVENT_RETAIN ||
               p->event[i].kind == EVENT_CALL_BACKWARD;
    return yes;
}

/* Whether the state moves before the second step, and in which kind (random_move_state). */
static int moves(const random_program *p)
{
    return (p->option[O_DIM] + p->option[O_BATCH]) % 6;
}

int random_ranks(kn_comm *world, void *arg)
{
    const random_job *job = arg;
    const random_program *p = job->p;
    OWNED_BYTES random_net *n = calloc(1, sizeof *n);
    trainer t = { .n = n,
                  .p = p,
                  .world = world,
                  .rank = kn_rank(world),
                  .ranks = random_number(p, O_RANKS),
                  .rounds = random_number(p, O_ROUNDS),
                  .own_draws = needs_own_draws(p),
                  .out = &job->out[kn_rank(world)] };
    random_begin(p);
    bool ok = n && build(&t);
    for (int i = 0; ok && i < random_number(p, O_STEPS); i++) {
        ok = (i != 1 || moves(p) == 0 || random_move_state(n, &t.optims, moves(p))) &&
             train_step(&t, i);
        t.out->steps += ok;
    }
    if (!ok)
        snprintf(t.out->refused, sizeof t.out->refused, "%s",
                 kn_error() ? kn_error() : "a call failed without an error");
    kn_tensor_free(t.stale);
    random_optims_free(&t.optims);
    if (n && n->m[0].base.impl)
        kn_module_free(&n->m[0]);
    return 0;
}
