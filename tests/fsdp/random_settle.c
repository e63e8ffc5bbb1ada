/* tests/fsdp/random_settle.c: resolves conflicts between the values of a random program. */
#include "kernels/kernels_internal.h"
#include "tests/fsdp/random.h"

static bool is_container(int kind)
{
    return kind == KIND_SEQ || kind == KIND_RESIDUAL;
}

static bool has_own(int kind)
{
    return kind != KIND_NONE && kind != KIND_SHARED && kind != KIND_DROPOUT && !is_container(kind);
}

static bool inside(const random_program *p, int node, int outer)
{
    while (node > outer)
        node = p->node[node].parent;
    return node == outer;
}

bool random_full_precision(const random_program *p, int node)
{
    int kind = p->node[node].kind;
    return p->option[O_PARAM_DTYPE] &&
           (kind == KIND_BATCHNORM || (kind == KIND_NORM && p->option[O_FULL_PRECISION]));
}

bool random_full_precision_inside(const random_program *p, int node)
{
    return p->option[O_PARAM_DTYPE] && p->node[node].kind == KIND_CONV;
}

bool random_norms_in_f32(const random_program *p, int node)
{
    int kind = p->node[node].kind;
    return p->option[O_PARAM_DTYPE_OF] && (kind == KIND_NORM || kind == KIND_RMSNORM) &&
           !random_full_precision(p, node);
}

/* True if wrapping may make a unit of the module of a node. */
static bool may_be_wrapped(const random_program *p, int node)
{
    const random_node *n = &p->node[node];
    switch (p->option[O_WRAP]) {
    case WRAP_ROOT:
    case WRAP_UNWRAPPED:
        return false;
    case WRAP_LINEAR:
        return n->kind == KIND_LINEAR || n->kind == KIND_MLP;
    case WRAP_PARTS:
        return !is_container(n->kind);
    case WRAP_SEQ:
        return is_container(n->kind);
    case WRAP_SIZE:
        return true;
    default:
        return n->unit;
    }
}

/* True if it may be a unit, or hold its own batch norm as one. */
static bool may_be_unit(const random_program *p, int node)
{
    return random_full_precision(p, node) || random_full_precision_inside(p, node) ||
           may_be_wrapped(p, node);
}

bool random_holds_units(const random_program *p, int node)
{
    for (int i = node; i < RANDOM_NODES; i++)
        if (p->node[i].kind && inside(p, i, node) && may_be_unit(p, i))
            return true;
    return false;
}

/* By class: of modules of a class all recompute, or none. A class that no module has is an
 * error. */
static void settle_recompute(random_program *p)
{
    int *by = &p->option[O_RECOMPUTE_BY], found[2] = { 0, 0 };
    for (int i = 1; i < RANDOM_NODES; i++)
        if (p->node[i].kind)
            found[is_container(p->node[i].kind)]++;
    if ((!found[0] && (*by == RECOMPUTE_PARTS || *by == RECOMPUTE_BOTH)) ||
        (!found[1] && (*by == RECOMPUTE_SEQS || *by == RECOMPUTE_BOTH)))
        *by = RECOMPUTE_BY_HAND;
    for (int i = 0; i < RANDOM_NODES && *by && *by != RECOMPUTE_POLICY; i++) {
        bool seq = is_container(p->node[i].kind);
        p->node[i].recompute =
            i > 0 && p->node[i].kind && (*by == RECOMPUTE_BOTH || seq == (*by == RECOMPUTE_SEQS));
    }
    for (int i = 0; i < RANDOM_NODES; i++)
        if (p->node[i].recompute && p->node[i].entered == ENTERED_BY_HAND)
            p->node[i].entered = ENTERED_AS_METHOD;
}

static void settle_tree(random_program *p)
{
    p->node[0] = (random_node){ .kind = KIND_SEQ, .recompute = p->node[0].recompute };
    for (int i = 1; i < RANDOM_NODES; i++) {
        random_node *n = &p->node[i];
        n->parent %= i;
        while (n->parent && (!n->kind || !is_container(p->node[n->parent].kind)))
            n->parent--;
        if (n->kind != KIND_LINEAR && n->kind != KIND_MLP && n->kind != KIND_UNUSED &&
            n->kind != KIND_CONV)
            n->hidden = 0;
        if (!n->kind)
            *n = (random_node){ 0 };
        if (n->kind == KIND_BATCHNORM && random_number(p, O_BATCH) == 1) /* no variance */
            n->kind = KIND_RMSNORM;
        if (n->kind == KIND_CONV && random_number(p, O_BATCH) * random_number(p, O_DIM) == 1)
            n->kind = KIND_RMSNORM;
        if ((n->kind == KIND_BATCHNORM || n->kind == KIND_CONV) &&
            !p->option[O_PARAM_DTYPE]) /* needed for its running statistics */
            p->option[O_BUFFER_DTYPE] = 0;
    }
    settle_recompute(p);
}

/* True if a policy surely wraps a module at node i: one that wraps nothing is an error. */
static bool surely_wrapped(const random_program *p, int i)
{
    const random_node *n = &p->node[i];
    if (random_full_precision(p, i)) /* a unit, but not by the policy */
        return false;
    switch (p->option[O_WRAP]) {
    case WRAP_LINEAR:
    case WRAP_SIZE: /* two in three have a bias, which is never shared */
        return (n->kind == KIND_LINEAR && i % 3 != 2) || n->kind == KIND_MLP;
    case WRAP_SEQ: /* a container that holds parameters */
        return n->parent > 0 && has_own(n->kind) && n->kind != KIND_LINEAR &&
               n->kind != KIND_BATCHNORM;
    default:
        return has_own(n->kind) && may_be_wrapped(p, i) && (n->kind != KIND_LINEAR || i % 3 != 2);
    }
}

/* True if a module inside node shares a parameter with one outside, in either direction. */
static bool shares(const random_program *p, int node)
{
    for (int i = 1; i < RANDOM_NODES; i++) {
        int of = i - 1;
        while (of > 0 && p->node[of].kind != KIND_LINEAR)
            of--;
        if (p->node[i].kind == KIND_SHARED && of > 0 && inside(p, i, node) != inside(p, of, node))
            return true;
    }
    return false;
}

/* Marked modules are grouped in pairs; an odd last one stays alone. */
static bool in_group(const random_program *p, int node)
{
    int before = 0, after = 0;
    for (int i = 1; i < RANDOM_NODES; i++)
        *(i < node ? &before : &after) += p->node[i].kind && p->node[i].unit && i != node;
    return p->node[node].unit && (before % 2 == 1 || after > 0);
}

/* True if the module of a node computes for all data: else backwards of some ranks don't reach
 * it. */
static bool acts(const random_program *p, int node)
{
    bool any = p->node[node].kind != KIND_SEQ;
    for (int i = node + 1; i < RANDOM_NODES; i++)
        any |= p->node[i].parent == node && p->node[i].kind && !is_container(p->node[i].kind) &&
               p->node[i].when == WHEN_ALWAYS;
    return any;
}

bool random_runs_alone(const random_program *p, int node)
{
    const random_node *n = &p->node[node];
    if (node == 0 || !n->kind || shares(p, node) || !acts(p, node))
        return false;
    switch (p->option[O_WRAP]) {
    case WRAP_PARTS:
        return !is_container(n->kind);
    case WRAP_SEQ:
        return is_container(n->kind);
    case WRAP_POLICY:
        return surely_wrapped(p, node);
    case WRAP_HAND:
        return n->unit;
    case WRAP_GROUPS:
        return in_group(p, node);
    case WRAP_UNWRAPPED:
        return true;
    default:
        return false;
    }
}

static void settle_wrap(random_program *p)
{
    int *wrap = &p->option[O_WRAP], found = 0;
    if (*wrap == WRAP_SIZE && random_number(p, O_DIM) < 4) /* too small for it */
        *wrap = WRAP_LINEAR;
    for (int i = 1; i < RANDOM_NODES; i++) {
        random_node *n = &p->node[i];
        if (*wrap < WRAP_POLICY || (*wrap == WRAP_GROUPS && n->parent))
            n->unit = 0;
        n->other = n->unit && n->other;
        found += surely_wrapped(p, i);
    }
    if (!found && *wrap != WRAP_UNWRAPPED)
        *wrap = WRAP_ROOT;
    if (*wrap != WRAP_PARTS && *wrap != WRAP_SEQ)
        p->option[O_WRAP_LIKE] = 0;
    for (int i = 0; i < RANDOM_NODES && (*wrap == WRAP_ROOT || *wrap == WRAP_UNWRAPPED); i++)
        p->node[i].unit = p->node[i].other = 0;
}

/* Plain training on one rank, where the engine accumulates: no options of fsdp. */
static void settle_unwrapped(random_program *p)
{
    static const int of_fsdp[] = { O_RANKS,         O_STRATEGY,        O_LAYOUT,
                                   O_WHOLE_BELOW,   O_LISTS,           O_RESHARD,
                                   O_PARAM_DTYPE,   O_REDUCE_DTYPE,    O_OUTPUT_DTYPE,
                                   O_BUFFER_DTYPE,  O_OFFLOAD,         O_RECOMPUTE_BY,
                                   O_INIT,          O_REDUCE_OP,       O_DIVIDE,
                                   O_PREDIVIDE,     O_COMM_HOOK,       O_SUM_HOOK,
                                   O_GATHER_HOOK,   O_EMBEDDING,       O_UNUSED,
                                   O_LAST,          O_SKIP_SYNC,       O_DATA,
                                   O_KEEP_GATHERED, O_SKIP_ALL_REDUCE, O_FORWARD_PREFETCH,
                                   O_GATHERS,       O_REDUCTIONS,      O_BACKWARD_PREFETCH };
    if (p->option[O_WRAP] != WRAP_UNWRAPPED)
        return;
    for (size_t i = 0; i < sizeof of_fsdp / sizeof *of_fsdp; i++)
        p->option[of_fsdp[i]] = 0;
    p->option[O_RANKS] = 1; /* one */
    for (int i = 0; i < RANDOM_NODES; i++)
        p->node[i].ignored = 0;
    for (int i = 0; i < RANDOM_EVENTS; i++)
        if ((p->event[i].kind >= EVENT_SUMMON && p->event[i].kind <= EVENT_RESHARD) ||
            (p->event[i].kind >= EVENT_NEVER_RESHARD && p->event[i].kind <= EVENT_DIVIDE))
            p->event[i].kind = EVENT_READ;
        else if (p->event[i].kind == EVENT_FAIL_COMM_HOOK)
            p->event[i].kind = EVENT_FAIL_LOSS;
}

static void settle_mesh(random_program *p)
{
    int *o = p->option, ranks = random_number(p, O_RANKS);
    bool hybrid = o[O_STRATEGY] >= STRATEGY_HYBRID;
    if (!hybrid)
        o[O_MESH] = 0;
    if (!hybrid && o[O_STRATEGY] != STRATEGY_NONE)
        o[O_SKIP_ALL_REDUCE] = 0;
    for (int i = 0; (hybrid || o[O_SKIP_ALL_REDUCE]) && i < RANDOM_NODES; i++)
        p->node[i].other = 0; /* another strategy would add in another grouping */
    int shards = o[O_STRATEGY] == STRATEGY_NONE ? 1 : ranks;
    if (hybrid)
        shards = random_shards(ranks, o[O_MESH]);
    if (random_number(p, O_RESHARD) == 2 && shards < 4)
        o[O_RESHARD] = 0;
    if (o[O_LAYOUT] != 1)
        o[O_PLACEMENT] = 0;
    /* the last micro-batch reduces everything: else a step is refused */
    int rounds = random_number(p, O_ROUNDS);
    o[O_SKIP_SYNC] &= (1 << (rounds - 1)) - 1;
    o[O_SKIP_ALL_REDUCE] &= (1 << (rounds - 1)) - 1;
}

static void settle_precision(random_program *p)
{
    int *o = p->option;
    bool cast = o[O_PARAM_DTYPE] > 1;
    if (!o[O_PARAM_DTYPE])
        o[O_CAST_INPUTS] = o[O_FULL_PRECISION] = 0;
    bool norms = false; /* a class that no module has is an error */
    for (int i = 0; i < RANDOM_NODES; i++)
        norms |= p->node[i].kind == KIND_NORM;
    o[O_FULL_PRECISION] &= norms;
    if (o[O_WRAP] != WRAP_ROOT && o[O_WRAP] != WRAP_HAND) /* inner units would cast, too */
        o[O_OUTPUT_DTYPE] = 0;
    if (!cast && o[O_REDUCE_DTYPE] < 2)
        o[O_KEEP_LOW] = 0;
    if (!cast)
        o[O_PARAM_DTYPE_OF] = 0;
    for (int i = 0; cast && i < RANDOM_NODES; i++) { /* their inputs aren't cast for them */
        if (p->node[i].entered == ENTERED_BY_HAND)
            p->node[i].entered = ENTERED_AS_METHOD;
        p->node[i].ignored = 0;
    }
    if (o[O_SCALER]) /* it needs one step of the whole tree */
        o[O_OPTIMIZERS] = 0;
    if (o[O_REDUCE_DTYPE] == 3 || o[O_PARAM_DTYPE] == 3 || o[O_SCALER] == 2)
        o[O_PREDIVIDE] = 0; /* it moves gradients, or a step's factor, near the smallest numbers */
    for (int i = 0; i < RANDOM_NODES; i++) /* or another's are ignored */
        if (!has_own(p->node[i].kind) || may_be_unit(p, i))
            p->node[i].ignored = 0;
    bool exact = o[O_DATA] && random_number(p, O_RANKS) != 3 && !o[O_DIVIDE] && !o[O_PREDIVIDE] &&
                 !o[O_SCALER] && o[O_REDUCE_OP] < 2 && o[O_SUM_HOOK] != SUM_HOOK_HALVES;
    for (int i = 0; i < RANDOM_EVENTS; i++)
        exact = exact && p->event[i].kind != EVENT_DIVIDE;
    for (int i = 0; i < RANDOM_NODES && !exact; i++) /* their gradients aren't reduced */
        p->node[i].frozen |= p->node[i].ignored;
    bool ignored = false;
    if (o[O_INIT] == INIT_RANK0 || o[O_INIT] == INIT_FILL || o[O_INIT] == INIT_MODULE)
        for (int i = 0; i < RANDOM_NODES; i++)
            p->node[i].ignored = 0;
    for (int i = 0; i < RANDOM_NODES; i++)
        ignored |= p->node[i].ignored;
    if (!ignored)
        o[O_IGNORED_AS] = IGNORED_AS_NAMES;
    if (ignored && kn_default_device == KN_CUDA) /* they would lie elsewhere than the others */
        o[O_OFFLOAD] = 0;
}

/* Over ranks with the same 2^k samples, batch norm gives the bits of one rank that has them. */
static void settle_sync_norms(random_program *p)
{
    int *o = p->option, ranks = random_number(p, O_RANKS);
    bool norms = false;
    for (int i = 0; i < RANDOM_NODES; i++)
        norms |= p->node[i].kind == KIND_BATCHNORM || p->node[i].kind == KIND_CONV;
    if (!norms || ranks == 3 || random_number(p, O_BATCH) == 3)
        o[O_SYNC_NORMS] = SYNC_NOT;
    if (o[O_SYNC_NORMS] && ranks > 1)
        o[O_DATA] = 1;
}

static void settle_events(random_program *p)
{
    int *o = p->option;
    bool odd = false;
    for (int i = 0; i < RANDOM_EVENTS; i++) {
        random_event *e = &p->event[i];
        e->step %= random_number(p, O_STEPS);
        e->round %= random_number(p, O_ROUNDS);
        if (e->who > random_number(p, O_RANKS))
            e->who = 0;
        if (e->kind < EVENT_FAIL_FORWARD || o[O_SYNC_NORMS])
            e->who = 0;
        if (e->kind == EVENT_FAIL_INPUT || e->kind == EVENT_FAIL_LOSS || !p->node[e->node].kind)
            e->node = 0;
        if (e->kind == EVENT_FAIL_STALE)
            e->round = e->who = e->node = 0;
        if (e->kind == EVENT_FAIL_STALE && e->step == 0)
            e->step = 1;
        if (e->kind == EVENT_CALL_BACKWARD && o[O_UNUSED]) /* the reference has no units */
            e->kind = EVENT_CALL;
        bool called = e->kind == EVENT_CALL || e->kind == EVENT_CALL_BACKWARD;
        if (called ? !random_runs_alone(p, e->node)
                   : e->kind < EVENT_FAIL_FORWARD && e->kind != EVENT_UNSHARD &&
                         e->kind != EVENT_UNSHARD_RESHARD && e->kind != EVENT_FREEZE)
            e->node = 0;
        if (e->kind == EVENT_CALL_BACKWARD && e->node) /* of other units nothing is unused */
            o[O_UNUSED] = 0;
        if (e->kind == EVENT_FREEZE)
            e->round = 0;
        if (!e->kind)
            *e = (random_event){ 0 };
        if (e->kind == EVENT_FAIL_COMM_HOOK)
            o[O_COMM_HOOK] = o[O_COMM_HOOK] ? o[O_COMM_HOOK] : 1;
        odd |= e->kind == EVENT_ABANDON || e->kind == EVENT_RETAIN ||
               e->kind == EVENT_CALL_BACKWARD || e->kind >= EVENT_FAIL_FORWARD;
    }
    int rounds = random_number(p, O_ROUNDS);
    if (rounds % 2 || odd)
        o[O_PAIRS] = 0;
    if (o[O_PAIRS] == 2) { /* the last backward is that of the last round but one */
        o[O_SKIP_SYNC] &= ~(1 << (rounds - 2));
        o[O_SKIP_ALL_REDUCE] &= ~(1 << (rounds - 2));
    }
}

void random_settle(random_program *p)
{
    settle_tree(p);
    settle_wrap(p);
    settle_unwrapped(p);
    settle_mesh(p);
    settle_sync_norms(p);
    settle_precision(p);
    if (p->option[O_HEAD] != HEAD_EMBED)
        p->option[O_EMBEDDING] = EMBEDDING_IN_ROOT;
    for (int i = 1; i < RANDOM_NODES; i++) {
        random_node *n = &p->node[i];
        if (n->when == WHEN_RUN_MICRO && random_holds_units(p, i))
            n->when = WHEN_LOSS_MICRO;
        if (n->when == WHEN_ROUND && p->option[O_UNUSED] && random_holds_units(p, i))
            n->when = WHEN_LOSS_ROUND; /* the reference can't tell units that didn't run */
    }
    settle_events(p);
}
