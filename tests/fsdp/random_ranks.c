/* tests/fsdp/random_ranks.c: a rank trains its part of a random program. */
#include "autograd/autograd_internal.h"
#include "nn/nn_internal.h"
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

/* ---- options --------------------------------------------------------------------------------- */

static int last_dim(const char *name, int ndim, const int64_t *shape, void *shards)
{
    (void)name;
    return ndim > 1 && shape[ndim - 1] % *(int *)shards == 0 ? ndim - 1 : 0;
}

static bool fill_part(const char *name, kn_tensor *part, int64_t start, int ndim,
                      const int64_t *shape, void *arg)
{
    float v[RANDOM_ELEMENTS];
    int64_t n = kn_numel(part);
    (void)ndim, (void)shape, (void)arg;
    for (int64_t i = 0; i < n && i < RANDOM_ELEMENTS; i++)
        v[i] = random_fill_value(name, start + i);
    kn_scope scope = kn_scope_begin();
    kn_tensor *values = kn_from(KN_F32, KN_CPU, v, kn_ndim(part), kn_shape(part));
    bool ok = values && kn_copy_(part, values);
    kn_scope_end(scope);
    return ok;
}

static bool fill_module(kn_module *m, void *arg)
{
    for (int i = 0; i < m->impl->params; i++) {
        const kn_param_entry *e = &m->impl->param[i];
        char *name = e->owner ? kn_param_path(m->impl, e) : NULL;
        bool ok = !e->owner || (name && fill_part(name, e->tensor, 0, kn_ndim(e->tensor),
                                                  kn_shape(e->tensor), arg));
        kn_host_free(name);
        if (!ok)
            return false;
    }
    return true;
}

/* Norms' parameters compute in f32. */
static kn_dtype param_dtype_of(const char *name, int ndim, const int64_t *shape, void *arg)
{
    const trainer *t = arg;
    (void)ndim, (void)shape;
    for (int i = 0; i < RANDOM_NODES; i++) {
        const char *path = t->p->node[i].kind ? kn_module_path(&t->n->m[i]) : "";
        size_t n = strlen(path);
        if (n && strncmp(name, path, n) == 0 && name[n] == '.' && random_norms_in_f32(t->p, i))
            return KN_F32;
    }
    return KN_DTYPE_DEFAULT;
}

static const random_node *node_of(const trainer *t, const kn_module *m)
{
    for (int i = 0; i < RANDOM_NODES; i++)
        if (&t->n->m[i].base == m)
            return &t->p->node[i];
    return NULL;
}

/* A unit with options of its own. */
static void otherwise(kn_fsdp_wrap_options *o)
{
    o->layout = o->layout == KN_LAYOUT_RAGGED ? KN_LAYOUT_FLAT : o->layout + 1;
    o->strategy = o->strategy == KN_NO_SHARD ? KN_FULL_SHARD : o->strategy + 1;
    o->placement = NULL;
    o->backward_prefetch = KN_PREFETCH_NONE;
    o->reshard_after_forward = KN_RESHARD_DEFAULT;
    o->keep_whole_below = 0;
}

static bool policy(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                   void *arg)
{
    const random_node *node = node_of(arg, m);
    if (recurse)
        return true;
    if (!node || !node->unit || unclaimed == 0)
        return false;
    if (node->other)
        otherwise(o);
    return true;
}

static kn_dtype dtype_of(const random_program *p, int option)
{
    static const kn_dtype dtype[] = { KN_DTYPE_DEFAULT, KN_F32, KN_BF16, KN_F16 };
    return dtype[p->option[option]];
}

static void what_is_sharded(kn_fsdp_wrap_options *o, const random_program *p, int *shards)
{
    int ranks = random_number(p, O_RANKS);
    o->strategy = (kn_strategy)(KN_FULL_SHARD + p->option[O_STRATEGY]);
    *shards = o->strategy == KN_NO_SHARD ? 1 : ranks;
    if (o->strategy >= KN_HYBRID_SHARD) {
        int mesh = p->option[O_MESH];
        *shards = ranks == 4 ? (mesh == 0 ? 2 : mesh == 1 ? 4 : 1) : mesh == 2 ? 1 : ranks;
        o->mesh.shards = *shards;
    }
    o->layout = (kn_layout_kind)(KN_LAYOUT_FLAT + p->option[O_LAYOUT]);
    if (p->option[O_PLACEMENT]) {
        o->placement = last_dim;
        o->placement_arg = shards;
    }
    o->keep_whole_below = random_number(p, O_WHOLE_BELOW);
    o->reshard_after_forward = random_number(p, O_RESHARD);
}

/* The ignored modules, what they hold, and patterns of it. */
typedef struct left_alone {
    char patterns[128];
    kn_module *module[RANDOM_NODES + 1];
    kn_tensor *param[RANDOM_PARAMS + 1];
    int modules, params;
} left_alone;

static bool add_params(kn_module *m, void *arg)
{
    left_alone *l = arg;
    for (int i = 0; i < m->impl->params; i++)
        l->param[l->params++] = m->impl->param[i].tensor;
    return l->params + 8 < RANDOM_PARAMS;
}

static void ignore(const trainer *t, left_alone *l, kn_fsdp_wrap_options *o)
{
    size_t used = 0;
    for (int i = 1; i < RANDOM_NODES; i++) {
        if (!t->p->node[i].kind || !t->p->node[i].ignored)
            continue;
        used += (size_t)snprintf(l->patterns + used, sizeof l->patterns - used, "%s*m%d.*",
                                 used ? "," : "", i);
        l->module[l->modules++] = &t->n->m[i].base;
        kn_apply_modules(&t->n->m[i], add_params, l);
    }
    int as = t->p->option[O_IGNORED_AS];
    o->ignore = used && as == IGNORED_AS_NAMES ? l->patterns : NULL;
    o->ignored_modules = as == IGNORED_AS_MODULES ? l->module : NULL;
    o->ignored_params = as == IGNORED_AS_PARAMS ? l->param : NULL;
}

static kn_fsdp_wrap_options options(const trainer *t, int *shards, left_alone *alone)
{
    const random_program *p = t->p;
    const char *folder = getenv("TMPDIR");
    kn_fsdp_wrap_options o = { ._size = sizeof o, .seed = 42, .timeout_s = 60 };
    what_is_sharded(&o, p, shards);
    o.backward_prefetch = (kn_backward_prefetch)p->option[O_BACKWARD_PREFETCH];
    o.forward_prefetch = p->option[O_FORWARD_PREFETCH];
    o.max_gathers = random_number(p, O_GATHERS);
    o.max_reductions = random_number(p, O_REDUCTIONS);
    o.param_dtype = dtype_of(p, O_PARAM_DTYPE);
    o.param_dtype_of = p->option[O_PARAM_DTYPE_OF] ? param_dtype_of : NULL;
    o.param_dtype_of_arg = (void *)t;
    o.reduce_dtype = dtype_of(p, O_REDUCE_DTYPE);
    o.keep_low_precision_grads = p->option[O_KEEP_LOW];
    o.cast_inputs = (kn_cast_inputs)p->option[O_CAST_INPUTS];
    o.buffer_dtype = dtype_of(p, O_BUFFER_DTYPE);
    o.full_precision_class = p->option[O_FULL_PRECISION] ? "layer_norm" : NULL;
    if (p->option[O_OFFLOAD])
        o.offload_dir = folder && *folder ? folder : "/tmp";
    if (p->option[O_INIT] == INIT_FILL)
        o.fill = fill_part;
    if (p->option[O_INIT] == INIT_MODULE)
        o.fill_module = fill_module;
    o.sync_from_rank0 = p->option[O_INIT] == INIT_RANK0;
    o.reduce_op = (kn_grad_average)p->option[O_REDUCE_OP];
    o.divide_factor = random_number(p, O_DIVIDE);
    o.predivide_factor = random_number(p, O_PREDIVIDE);
    ignore(t, alone, &o);
    return o;
}

/* ---- wrapping -------------------------------------------------------------------------------- */

static bool wrap_by_hand(trainer *t, const kn_fsdp_wrap_options *base)
{
    for (int i = RANDOM_NODES - 1; i > 0; i--) {
        kn_fsdp_wrap_options o = *base;
        if (!t->p->node[i].kind || !t->p->node[i].unit)
            continue;
        if (t->p->node[i].other)
            otherwise(&o);
        if (!kn_fsdp_wrap_(&t->n->m[i], t->world, o))
            return false;
    }
    return true;
}

/* Pairs of marked children of the root become one unit each. */
static bool wrap_groups(trainer *t, const kn_fsdp_wrap_options *o)
{
    kn_module *member[2];
    int members = 0;
    for (int i = 1; i < RANDOM_NODES; i++) {
        if (!t->p->node[i].kind || !t->p->node[i].unit)
            continue;
        member[members++] = &t->n->m[i].base;
        if (members == 2 && !kn_fsdp_wrap_group_(member, members, t->world, *o))
            return false;
        members %= 2;
    }
    return true;
}

/* A part, or one that holds others; NULL: there is none. */
static kn_module *one_of_class(trainer *t, bool seq)
{
    for (int i = 1; i < RANDOM_NODES; i++) {
        int kind = t->p->node[i].kind;
        if (kind && (kind == KIND_SEQ || kind == KIND_RESIDUAL) == seq)
            return &t->n->m[i].base;
    }
    return NULL;
}

static bool wrap(trainer *t)
{
    static const char *const classes[] = { NULL, "linear", "part", "seq" };
    int shards, how = t->p->option[O_WRAP];
    left_alone alone = { 0 };
    kn_fsdp_wrap_options o = options(t, &shards, &alone);
    if (t->p->option[O_EMBEDDING] && !kn_fsdp_wrap_(&t->n->embed, t->world, o))
        return false;
    if (how == WRAP_HAND && !wrap_by_hand(t, &o))
        return false;
    if (how == WRAP_GROUPS && !wrap_groups(t, &o))
        return false;
    kn_module *like[] = { t->p->option[O_WRAP_LIKE] ? one_of_class(t, how == WRAP_SEQ) : NULL,
                          NULL };
    o.wrap_like = like[0] ? like : NULL;
    if (how <= WRAP_SEQ && !like[0])
        o.wrap_class = classes[how];
    o.min_params = how == WRAP_SIZE ? 4 : 0;
    o.policy = how == WRAP_POLICY ? policy : NULL;
    o.policy_arg = t;
    o.output_dtype = dtype_of(t->p, O_OUTPUT_DTYPE);
    return kn_fsdp_wrap_(&t->n->m[0], t->world, o);
}

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
    (void)arg;
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
    if (!random_net_init(t->n, p, KN_F32, cpu ? KN_CPU : KN_META) ||
        (cpu && !kn_materialize(&t->n->m[0], KN_CPU, seed)) || (!plain && !wrap(t)))
        return false;
    if (p->option[O_CAST_INPUTS] == 3)
        t->n->input = dtype_of(p, O_PARAM_DTYPE);
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
    kn_scope scope = kn_scope_begin();
    kn_tensor *loss = switch_sync(t, e->round, false) ? loss_of(t, e->step, e->round) : NULL;
    if (loss && t->optims.scaler)
        loss = kn_scale_loss(t->optims.scaler, loss);
    bool ok = loss && kn_backward(loss, .retain_graph = true) && kn_backward(loss);
    kn_scope_end(scope);
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
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(e->kind != EVENT_EVALUATE);
    bool ok = loss_of(t, e->step, e->round) != NULL;
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return ok;
}

static bool summon(trainer *t, int kind)
{
    bool rank0 = kind == EVENT_SUMMON_RANK0, read = kind == EVENT_SUMMON;
    kn_summon_scope s =
        kn_summon(&t->n->m[0], .rank0_only = rank0, .read_only = read, .with_grads = read);
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
        return read_all(t);
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
    kn_scope scope = kn_scope_begin();
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
    kn_scope_end(scope);
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

int random_ranks(kn_comm *world, void *arg)
{
    const random_job *job = arg;
    const random_program *p = job->p;
    random_net *n = calloc(1, sizeof *n);
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
        ok = train_step(&t, i);
        t.out->steps += ok;
    }
    if (!ok)
        snprintf(t.out->refused, sizeof t.out->refused, "%s",
                 kn_error() ? kn_error() : "a call failed without an error");
    kn_tensor_free(t.stale);
    random_optims_free(&t.optims);
    if (n && n->m[0].base.impl)
        kn_module_free(&n->m[0]);
    free(n);
    return 0;
}
