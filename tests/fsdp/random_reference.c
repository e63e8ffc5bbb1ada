/* tests/fsdp/random_reference.c: a random program trained by one process without fsdp. It runs the
 * ranks' micro-batches one after another, keeps the gradient of each, and adds them in the grouping
 * that docs/fsdp.md promises:
 *
 *   local[rank]      += gradient, each round, in the dtype of reductions; without sync it waits
 *   partial[replica] += local[rank] over the ranks of a shard group; without all-reduce it waits
 *   total            += partial[replica]
 *
 * sums over ranks in f32, rounded once to the dtype of accumulated gradients. Passes that fail are
 * skipped. Two copies of the modules: one computes, in param_dtype; the other has the masters, on
 * which optimizers step. */
#include "autograd/autograd_internal.h"
#include "tests/fsdp/random.h"
#include "tests/owned.h"

typedef struct sum {
    bool has[RANDOM_PARAMS], zeros[RANDOM_PARAMS]; /* zeros: for what no gradient came for */
    float v[RANDOM_ELEMENTS];
} sum;

typedef struct plain {
    const random_program *p;
    random_net masters, net;
    random_optims optims;
    int ranks, rounds, params, done; /* done: rounds of this step so far */
    uint64_t came[RANDOM_PARAMS];    /* those of them that are summed in the gradient */
    int64_t begin[RANDOM_PARAMS + 1];
    kn_dtype compute, reduce;
    sum local[RANDOM_RANKS], partial[RANDOM_RANKS], shown, total, fresh[2 * RANDOM_RANKS];
    int factor;                                                           /* 0: as wrapped */
    bool full[RANDOM_PARAMS], ignored[RANDOM_PARAMS], f32[RANDOM_PARAMS]; /* f32: it computes so */
    kn_tensor *dest[RANDOM_PARAMS]; /* a micro-batch's gradients, if they have another dtype */
    random_outcome *out;
} plain;

static const kn_param *params_of(random_net *n)
{
    const kn_param *p;
    kn_params(&n->m[0], &p);
    return p;
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static kn_dtype choose(const random_program *p, int option, kn_dtype otherwise)
{
    kn_dtype t = random_dtype(p, option);
    return t ? t : otherwise;
}

static bool round_to(kn_dtype t, float *v, int64_t n)
{
    if (t == KN_F32 || n == 0)
        return true;
    IN_SCOPE;
    kn_tensor *low = kn_cast(kn_from(KN_F32, KN_CPU, v, 1, &n), t);
    bool ok = low && kn_to_host(kn_cast(low, KN_F32), v, (size_t)n * sizeof *v);
    return ok;
}

static kn_tensor *dest_of(void *arg, kn_tensor *leaf)
{
    plain *s = arg;
    const kn_param *p = params_of(&s->net);
    for (int i = 0; i < s->params; i++)
        if (p[i].tensor == leaf)
            return s->dest[i];
    return NULL;
}

static kn_dtype reduced(const plain *s, int i)
{
    if (s->full[i] || s->ignored[i])
        return KN_F32;
    return s->f32[i] ? choose(s->p, O_REDUCE_DTYPE, KN_F32) : s->reduce;
}

static kn_dtype kept(const plain *s, int i)
{
    return s->p->option[O_KEEP_LOW] ? reduced(s, i) : KN_F32;
}

/* Contributions to a gradient are added in the dtype of reductions, as a unit adds them. */
static bool make_dests(plain *s)
{
    const kn_param *p = params_of(&s->net);
    for (int i = 0; i < s->params; i++) {
        kn_tensor *t = p[i].tensor;
        if (!p[i].trainable || s->full[i] || s->ignored[i] || reduced(s, i) == kn_dtype_of(t))
            continue;
        s->dest[i] = kn_keep(kn_empty(reduced(s, i), KN_CPU, kn_ndim(t), kn_shape(t)));
        if (!s->dest[i])
            return false;
        t->leaf->dest = dest_of;
        t->leaf->dest_arg = s;
    }
    return true;
}

/* ---- adding ---------------------------------------------------------------------------------- */

/* to += from, of parameter i; from is used up. */
static void move_in(const plain *s, sum *to, sum *from, int i)
{
    if (!from->has[i])
        return;
    for (int64_t k = s->begin[i]; k < s->begin[i + 1]; k++)
        to->v[k] = to->has[i] ? to->v[k] + from->v[k] : from->v[k];
    to->has[i] = true;
    from->has[i] = false;
}

static bool round_sum(const plain *s, sum *to, int i, kn_dtype t)
{
    return !to->has[i] || round_to(t, to->v + s->begin[i], s->begin[i + 1] - s->begin[i]);
}

/* Ranks that hold different shards of parameter i. */
static int shards_of(const plain *s, int i)
{
    const int *o = s->p->option;
    if (o[O_STRATEGY] == STRATEGY_NONE ||
        s->begin[i + 1] - s->begin[i] < random_number(s->p, O_WHOLE_BELOW))
        return 1;
    if (o[O_STRATEGY] < STRATEGY_HYBRID)
        return s->ranks;
    return random_shards(s->ranks, o[O_MESH]);
}

/* A hook sees the sum over ranks before it is added to the total. */
static bool show(plain *s, int i)
{
    bool halves = s->p->option[O_SUM_HOOK] == SUM_HOOK_HALVES;
    if (!round_sum(s, &s->shown, i, kept(s, i)))
        return false;
    for (int64_t k = s->begin[i]; halves && s->shown.has[i] && k < s->begin[i + 1]; k++)
        s->shown.v[k] *= 0.5f;
    if (halves && !round_sum(s, &s->shown, i, kept(s, i)))
        return false;
    move_in(s, &s->total, &s->shown, i);
    return true;
}

static bool reduce_param(plain *s, int i, bool all_reduce)
{
    int shards = shards_of(s, i), replicas = s->ranks / shards;
    kn_dtype sent = s->p->option[O_COMM_HOOK] == 2 ? KN_BF16 : KN_F32; /* by the hook */
    bool ok = true;
    sum *to = s->p->option[O_SUM_HOOK] ? &s->shown : &s->total;
    for (int r = 0; r < s->ranks; r++) {
        ok = ok && round_sum(s, &s->local[r], i, sent);
        move_in(s, replicas == 1 ? to : &s->partial[r / shards], &s->local[r], i);
    }
    for (int q = 0; q < replicas && replicas > 1; q++) {
        ok = ok && round_sum(s, &s->partial[q], i, kept(s, i)) &&
             (!all_reduce || round_sum(s, &s->partial[q], i, sent));
        if (all_reduce)
            move_in(s, to, &s->partial[q], i);
    }
    return ok && show(s, i) && round_sum(s, &s->total, i, kept(s, i));
}

/* It isn't reduced: each rank steps with the mean over its own micro-batches, which are equal on
 * all ranks. So the sum over ranks is this gradient times their number. */
static void add_ignored(plain *s, sum *fresh, int i)
{
    for (int64_t k = s->begin[i]; k < s->begin[i + 1]; k++)
        fresh->v[k] *= (float)s->ranks;
    move_in(s, &s->total, fresh, i);
}

/* The gradients of all ranks' micro-batches of a round. */
static bool add_round(plain *s, sum *fresh, int round)
{
    bool sync = !(s->p->option[O_SKIP_SYNC] >> round & 1);
    uint64_t bit = (uint64_t)1 << s->done++;
    for (int i = 0; i < s->params; i++) {
        for (int r = 0; r < (s->ignored[i] ? 1 : s->ranks); r++)
            s->came[i] |= fresh[r].has[i] && !fresh[r].zeros[i] ? bit : 0;
        if (s->ignored[i]) {
            add_ignored(s, &fresh[0], i);
            continue;
        }
        for (int r = 0; r < s->ranks; r++) {
            move_in(s, &s->local[r], &fresh[r], i);
            if (!round_sum(s, &s->local[r], i, reduced(s, i)))
                return false;
        }
        if (sync && !reduce_param(s, i, !(s->p->option[O_SKIP_ALL_REDUCE] >> round & 1)))
            return false;
    }
    return true;
}

static void forget(plain *s)
{
    memset(s->local, 0, sizeof s->local);
    memset(s->partial, 0, sizeof s->partial);
    memset(&s->total, 0, sizeof s->total);
    memset(s->came, 0, sizeof s->came);
    s->done = 0;
}

/* ---- micro-batches --------------------------------------------------------------------------- */

static bool refresh(plain *s)
{
    const kn_param *from = params_of(&s->masters), *to = params_of(&s->net);
    bool mode = kn_set_grad_mode(false), ok = true;
    for (int i = 0; i < s->params && ok; i++)
        ok = kn_copy_(to[i].tensor, from[i].tensor);
    kn_set_grad_mode(mode);
    return ok;
}

/* Moves the last micro-batch's gradients out of the leaves. */
static bool take_gradients(plain *s, sum *to)
{
    const kn_param *p = params_of(&s->net);
    memset(to->has, 0, sizeof to->has);
    for (int i = 0; i < s->params; i++) {
        kn_leaf *leaf = p[i].tensor->leaf;
        bool there = leaf && (s->dest[i] ? leaf->filled : leaf->grad != NULL);
        if (there) {
            kn_tensor *g = kn_cast(s->dest[i] ? s->dest[i] : leaf->grad, KN_F32);
            if (!g || !kn_to_host(g, to->v + s->begin[i], (size_t)p[i].numel * sizeof(float)))
                return false;
            to->has[i] = true;
            to->zeros[i] = false;
        } else if (s->p->option[O_UNUSED] && p[i].tensor->requires_grad && !s->ignored[i]) {
            memset(to->v + s->begin[i], 0, (size_t)p[i].numel * sizeof(float));
            to->has[i] = to->zeros[i] = true;
        }
        if (leaf)
            leaf->filled = false;
        kn_clear_grad(p[i].tensor);
    }
    return true;
}

/* One rank's micro-batch of the whole, or of the module of a node alone. False: it failed (expected
 * if failing) and leaves nothing. */
static bool micro_batch_of(plain *s, int node, int step, int round, int rank, float *loss,
                           sum *fresh)
{
    int micro = round * s->ranks + (s->p->option[O_DATA] ? 0 : rank);
    kn_scope scope = kn_scope_begin();
    random_draws_of(micro);
    kn_tensor *l = refresh(s) ? random_part_loss(&s->net, node, step, round, micro) : NULL;
    if (l && loss)
        *loss = (float)kn_item(l);
    bool ok = l && kn_backward(s->optims.scaler ? kn_scale_loss(s->optims.scaler, l) : l);
    char failed[600] = "";
    if (!ok)
        snprintf(failed, sizeof failed, "%s", kn_error() ? kn_error() : "no error");
    kn_clear_error();
    bool taken = take_gradients(s, fresh);
    kn_scope_end(scope);
    if (!ok)
        memset(fresh->has, 0, sizeof fresh->has);
    if (!ok && loss)
        kn_fail("the reference: %s", failed);
    return ok && taken;
}

/* An extra pass, which should fail. -1: on some ranks only, after which the ranks can't
 * continue. */
static int failing_round(plain *s, const random_event *e)
{
    int failed = 0;
    bool sync = !(s->p->option[O_SKIP_SYNC] >> e->round & 1);
    for (int r = 0; r < s->ranks; r++) {
        bool here = e->who == 0 || e->who - 1 == r;
        s->net.failing = here ? e->kind : 0;
        s->net.fail_node = e->node;
        bool ok = micro_batch_of(s, 0, e->step, e->round, r, NULL, &s->fresh[r]);
        failed += !ok || (here && sync && e->kind == EVENT_FAIL_COMM_HOOK);
    }
    s->net.failing = 0;
    if (failed == 0)
        return add_round(s, s->fresh, e->round);
    return failed == s->ranks ? 1 : -1;
}

/* Two backwards of one forward. */
static bool retained_round(plain *s, const random_event *e)
{
    for (int k = 0; k < 2; k++) {
        for (int r = 0; r < s->ranks; r++)
            if (!micro_batch_of(s, 0, e->step, e->round, r, NULL, &s->fresh[r]))
                return false;
        if (!add_round(s, s->fresh, e->round))
            return false;
    }
    return true;
}

static bool part_round(plain *s, const random_event *e)
{
    for (int r = 0; r < s->ranks; r++)
        if (!micro_batch_of(s, e->node, e->step, e->round, r, NULL, &s->fresh[r]))
            return false;
    return add_round(s, s->fresh, e->round);
}

static int happen(plain *s, const random_event *e)
{
    switch (e->kind) {
    case EVENT_SUMMON_WRITE:
    case EVENT_SUMMON_RANK0:
    case EVENT_APPLY:
        return random_scale_gain(&s->masters);
    case EVENT_CLEAR:
    case EVENT_ZERO:
        forget(s);
        return 1;
    case EVENT_FREEZE:
        if (e->node) {
            kn_freeze(&s->masters.m[e->node], true);
            kn_freeze(&s->net.m[e->node], true);
        }
        return kn_ok();
    case EVENT_DIVIDE:
        s->factor = RANDOM_FACTOR;
        return 1;
    case EVENT_RETAIN:
        return retained_round(s, e);
    case EVENT_CALL_BACKWARD:
        return part_round(s, e);
    case EVENT_FAIL_STALE:
        return 1;
    default:
        return e->kind < EVENT_FAIL_FORWARD ? 1 : failing_round(s, e);
    }
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Whose parameter i is: of the optimizer that has a part of the tree, or of the other. */
static int optimizer_of(const plain *s, int i)
{
    const char *path = s->optims.of[0] ? kn_module_path(s->optims.of[0]) : "",
               *name = params_of((random_net *)&s->masters)[i].name;
    size_t n = strlen(path);
    return n == 0 || strncmp(name, path, n) != 0 || name[n] != '.';
}

/* The numbers of micro-batches that divide the raw sums of either optimizer. */
static void find_divisors(const plain *s, int divisor[2])
{
    int each = s->factor ? s->factor : random_number(s->p, O_DIVIDE);
    each = each ? each : s->p->option[O_REDUCE_OP] == 2 ? 1 : s->ranks;
    uint64_t came[2] = { 0 };
    for (int i = 0; i < s->params; i++)
        came[optimizer_of(s, i)] |= s->came[i];
    for (int k = 0; k < 2; k++)
        divisor[k] = came[k] ? __builtin_popcountll(came[k]) * each : 1;
}

/* Gives the masters the sums as gradients by ordinary backwards, of losses with these gradients.
 * The first brings the sum, the others -0, so that the library counts as many micro-batches. */
static bool give_gradients(plain *s)
{
    const kn_param *p = params_of(&s->masters);
    double scale = s->optims.scaler ? kn_scaler_get(s->optims.scaler).scale : 1;
    int divisor[2];
    find_divisors(s, divisor);
    for (int k = 0; k < divisor[0] || k < divisor[1]; k++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = NULL;
        for (int i = 0; i < s->params; i++) {
            kn_tensor *t = p[i].tensor, *c;
            if (!s->total.has[i] || k >= divisor[optimizer_of(s, i)])
                continue;
            c = kn_from(KN_F32, KN_CPU, s->total.v + s->begin[i], kn_ndim(t), kn_shape(t));
            c = k == 0 ? kn_scale(c, 1 / scale)
                       : kn_full(KN_F32, KN_CPU, -0.0, kn_ndim(t), kn_shape(t));
            c = sum_of(kn_mul(t, c));
            loss = loss ? kn_add(loss, c) : c;
        }
        bool ok =
            loss && kn_backward(s->optims.scaler ? kn_scale_loss(s->optims.scaler, loss) : loss);
        kn_scope_end(scope);
        if (!ok)
            return false;
    }
    return true;
}

static bool plain_step(plain *s, int step)
{
    int pairs = s->p->option[O_PAIRS] ? 2 : 1;
    forget(s);
    for (int round = 0; round < s->rounds; round += pairs) {
        int at = 0, order[2], n = random_turn(s->p, round, order);
        for (const random_event *e; (e = random_event_at(s->p, step, round, &at));)
            if (happen(s, e) < 0 || !kn_ok())
                return false;
        for (int k = 0; k < n; k++) {
            for (int r = 0; r < s->ranks; r++) {
                float *loss = &s->out->loss[step][order[k] * s->ranks + r];
                if (!micro_batch_of(s, 0, step, order[k], r, loss, &s->fresh[r]))
                    return false;
            }
            if (!add_round(s, s->fresh, order[k]))
                return false;
        }
    }
    return give_gradients(s) && random_optims_step(&s->optims, &s->masters, &s->out->norm[step]) &&
           random_read_params(&s->masters, s->out, step) && kn_ok();
}

static bool fill_masters(plain *s)
{
    const kn_param *p = params_of(&s->masters);
    bool mode = kn_set_grad_mode(false), ok = true;
    for (int i = 0; i < s->params && ok; i++) {
        float v[RANDOM_ELEMENTS];
        for (int64_t k = 0; k < p[i].numel && k < RANDOM_ELEMENTS; k++)
            v[k] = random_fill_value(p[i].name, k);
        IN_SCOPE;
        ok = kn_copy_(p[i].tensor,
                      kn_from(KN_F32, KN_CPU, v, kn_ndim(p[i].tensor), kn_shape(p[i].tensor)));
    }
    kn_set_grad_mode(mode);
    return ok;
}

static void look_at_params(plain *s, const kn_param *list)
{
    for (int i = 0; i < s->params && i < RANDOM_PARAMS; i++) {
        s->begin[i + 1] = s->begin[i] + list[i].numel;
        for (int m = 1; m < RANDOM_NODES; m++) {
            const random_node *node = &s->p->node[m];
            size_t path = node->kind ? strlen(kn_module_path(&s->net.m[m])) : 0;
            if (!path || strncmp(list[i].name, kn_module_path(&s->net.m[m]), path) != 0 ||
                list[i].name[path] != '.')
                continue;
            s->ignored[i] |= node->ignored;
            s->full[i] |=
                random_full_precision(s->p, m) || (random_full_precision_inside(s->p, m) &&
                                                   strncmp(list[i].name + path, ".norm.", 6) == 0);
            s->f32[i] |= random_norms_in_f32(s->p, m);
        }
    }
}

static bool build(plain *s)
{
    const random_program *p = s->p;
    const kn_param *list = NULL;
    s->compute = choose(p, O_PARAM_DTYPE, KN_F32);
    s->reduce = choose(p, O_REDUCE_DTYPE, s->compute);
    bool ok = random_net_init(&s->masters, p, KN_F32, KN_META) &&
              kn_materialize(&s->masters.m[0], KN_CPU, 42) &&
              random_net_init(&s->net, p, s->compute, KN_META) &&
              kn_materialize(&s->net.m[0], KN_CPU, 42) &&
              (!p->option[O_SYNC_NORMS] || kn_sync_batch_norm(&s->net.m[0], kn_comm_self()));
    s->masters.masters = true;
    s->net.input = s->compute;
    s->params = ok ? kn_params(&s->masters.m[0], &list) : 0;
    s->net.output = choose(p, O_OUTPUT_DTYPE, KN_DTYPE_DEFAULT);
    s->net.buffer = choose(p, O_BUFFER_DTYPE, KN_DTYPE_DEFAULT);
    look_at_params(s, list);
    if (ok && (s->params > RANDOM_PARAMS || s->begin[s->params] > RANDOM_ELEMENTS))
        return kn_fail("the program is too large for the test");
    return ok &&
           ((p->option[O_INIT] != INIT_FILL && p->option[O_INIT] != INIT_MODULE) ||
            fill_masters(s)) &&
           make_dests(s) && random_optims_make(&s->optims, &s->masters);
}

int random_reference(kn_comm *world, void *arg)
{
    const random_job *job = arg;
    plain *s = calloc(1, sizeof *s);
    random_begin(job->p);
    bool ok = s != NULL;
    if (ok) {
        s->p = job->p;
        s->out = job->out;
        s->ranks = random_number(job->p, O_RANKS);
        s->rounds = random_number(job->p, O_ROUNDS);
        ok = build(s);
    }
    for (int i = 0; ok && i < random_number(job->p, O_STEPS); i++) {
        ok = plain_step(s, i);
        s->out->steps += ok;
    }
    if (!kn_ok())
        snprintf(job->out->refused, sizeof job->out->refused, "%s", kn_error());
    return 0; /* the process ends, which frees its memory */
}
