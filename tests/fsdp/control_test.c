/* tests/fsdp/control_test.c: a user's controls of a backward: further backwards before the step,
 * units that aren't gathered, gradients of unused parameters, the number of running reductions.
 * Rank functions return a status and never assert. */
#include "tests/fsdp/chain.h"
#include "tests/fsdp/two.h"

/* ---- of one unit, or of all below ------------------------------------------------------------ */

static bool set_all(two *m, int setter, bool recurse)
{
    bool (*const off[])(void *, bool, bool) = { kn_fsdp_set_gradient_sync, kn_fsdp_set_all_reduce,
                                                kn_fsdp_set_reshard_after_backward,
                                                kn_fsdp_set_unshard_in_backward };
    return setter < 4    ? off[setter](m, false, recurse)
           : setter == 4 ? kn_fsdp_set_reshard_after_forward(m, KN_RESHARD_NEVER, recurse)
           : setter == 5 ? kn_fsdp_set_reduce_unused(m, true, recurse)
                         : kn_fsdp_set_divide_factor(m, 3, recurse);
}

static bool is_set(const kn_linear *m, int setter)
{
    const kn_unit *u = kn_unit_of(m->base.impl);
    const bool set[] = { !u->set.sync,
                         !u->set.all_reduce,
                         !u->set.reshard_after_backward,
                         !u->set.unshard_in_backward,
                         u->options.reshard_after_forward == KN_RESHARD_NEVER,
                         u->set.reduce_unused,
                         u->options.divide_factor == 3 };
    return set[setter];
}

KN_TEST(control, setters_of_one_unit_or_of_all)
{
    for (int setter = 0; setter < 7; setter++)
        for (int recurse = 0; recurse < 2; recurse++) {
            TWO_WRAPPED(m, kn_comm_self(), .wrap_class = "linear");
            KN_CHECK(set_all(&m, setter, recurse));
            KN_CHECK(is_set((kn_linear *)&m, setter) && is_set(&m.a, setter) == recurse &&
                         is_set(&m.b, setter) == recurse,
                     "setter %d, recurse %d", setter, recurse);
        }
}

/* ---- several backwards before a step --------------------------------------------------------- */

enum { MICROS = 4 };

/* MICROS micro-batches of a chain on meta, `ahead` forwards before the first backward; how often
 * ranks had to ask each other which calls a backward reaches. */
static int traced(chain *c, int ahead, chain_trace *t)
{
    kn_tensor *loss[MICROS];
    OWNED_HOST kn_trace_event *events = NULL;
    int asked = 0;
    kn_trace_watch(1u << KN_TRACE_RUN | 1u << KN_TRACE_CALL, KN_META);
    kn_scope scope = kn_scope_begin();
    for (int forward = 0, i = 0; i < MICROS; i++) {
        for (; forward < MICROS && forward <= i + ahead; forward++)
            loss[forward] = kn_call(c, kn_zeros(KN_F32, KN_META, KN_SHAPE(c->batch, c->dim)));
        KN_CHECK(kn_fsdp_set_is_last_backward(c, i == MICROS - 1) && kn_backward(loss[i]), "%d", i);
    }
    kn_scope_end(scope);
    size_t n = kn_trace_stop(&events);
    for (size_t i = 0; i < n; i++) {
        if (events[i].kind == KN_TRACE_CALL)
            chain_read_schedule(c, t, &events[i]);
        else
            chain_read(t, &events[i]);
        asked += strstr(events[i].what, "which units backward reaches") != NULL;
    }
    return asked;
}

/* Each backward takes the turns of its own forward, with its prefetches; one whose forward is the
 * only open one needs to ask nobody. */
KN_TEST(control, open_forwards_keep_their_order)
{
    static const char forward[] = "g0 F0 g1 F1", backward[] = "g1 g0 B1 s1 B0 s0";
    for (int ahead = 0; ahead < 2; ahead++) {
        chain_trace t = { 0 };
        char want[512] = "";
        CHAIN_OF(c, 2, 16, 4, 2, 1e6);
        int asked = traced(&c, ahead, &t);
        for (int i = 0; i < MICROS + ahead; i++)
            snprintf(want + strlen(want), sizeof want - strlen(want), "%s%s%s%s", i ? " " : "",
                     i < MICROS ? forward : "", i < MICROS && i >= ahead ? " " : "",
                     i >= ahead ? backward : "");
        KN_CHECK(strcmp(t.line, want) == 0, "%d ahead:\n  %s\nand not\n  %s", ahead, t.line, want);
        KN_CHECK(asked == (ahead ? MICROS : 0), "%d ahead: asked %d times", ahead, asked);
    }
}

RANK_TEST(control, a_step_needs_the_last_backward, .threads = "124")
{
    TWO_WRAPPED(m, world, .wrap_class = "linear");
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    KN_CHECK(o && kn_fsdp_set_is_last_backward(&m.b, false), "any unit of the tree will do");
    KN_CHECK(two_backward(&m, 0) && kn_grad_scale(&m) * kn_comm_size(world) == 1);
    REFUSED(kn_step(o), "a part may still be on its way", "kn_fsdp_set_is_last_backward on");
    if (kn_comm_size(world) == 1) { /* else the error has ended the ranks */
        kn_zero_grad(&m);
        KN_CHECK(kn_grad_scale(&m) == 1 && !kn_step(o) &&
                     error_has("no parameter has a gradient", ""),
                 "dropped gradients owe nothing");
        KN_CHECK(two_backward(&m, 0) && kn_fsdp_set_is_last_backward(&m, true));
        KN_CHECK(two_backward(&m, 1) && kn_grad_scale(&m) == 0.5 && kn_step(o));
    }
}

/* ---- parameters that backward doesn't need --------------------------------------------------- */

RANK_TEST(control, a_unit_that_backward_reads_after_all_is_named, .threads = "2")
{
    TWO_WRAPPED(m, world, .wrap_class = "linear");
    KN_CHECK(kn_fsdp_set_unshard_in_backward(&m.a, false, false) && two_backward(&m, 0),
             "nothing reads a.weight");
    KN_CHECK(kn_fsdp_set_unshard_in_backward(&m.b, false, false));
    KN_CHECK(!two_backward(&m, 0) && error_has("the bytes of b f32[4,5] are released", "unshard"),
             "the unit is named");
}

/* ---- parameters that nothing used ------------------------------------------------------------ */

/* The loss uses a's result, not b's; c never runs. */
typedef struct three {
    kn_module base;
    kn_linear a, b, c;
} three;

static kn_tensor *three_forward(kn_module *self, kn_tensor *x)
{
    three *m = (three *)self;
    kn_call(&m->b, x);
    return kn_call(&m->a, x);
}

typedef struct unused {
    bool on, no_sync, not_last;
    kn_strategy strategy;
} unused;

static bool changed(void *m, int i, const float *before, float factor)
{
    float now[16];
    bool same = kn_param_read(m, i, now);
    for (int k = 0; k < 16; k++)
        same = same && fabsf(now[k] - factor * before[k]) < 1e-6f;
    return !same;
}

static void decays(kn_comm *world, void *arg)
{
    const unused *u = arg;
    OWNED_MODULE three m = { 0 };
    float before[3][16];
    KN_CHECK(kn_module_init(&m.base, three_forward));
    kn_linear *l[3] = { &m.a, &m.b, &m.c };
    static const char *const name[] = { "a", "b", "c" };
    for (int i = 0; i < 3; i++)
        KN_CHECK(kn_linear_init(l[i], &m.base, name[i], 4, 4, .device = KN_META, .no_bias = true));
    KN_CHECK(kn_fsdp_wrap(&m, world, .wrap_class = "linear", .strategy = u->strategy,
                          .mesh.shards = u->strategy == KN_HYBRID_SHARD ? 2 : 0));
    KN_CHECK(!u->on || kn_fsdp_set_reduce_unused(&m, true, true));
    for (int i = 0; i < 3; i++)
        KN_CHECK(kn_param_read(&m, i, before[i]));
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.5, .weight_decay = 0.5);
    for (int round = 0; round < 2; round++) {
        KN_CHECK(!u->no_sync || kn_fsdp_set_gradient_sync(&m, round == 1, true));
        KN_CHECK(!u->not_last || kn_fsdp_set_is_last_backward(&m, round == 1));
        KN_CHECK(two_backward(&m, round * kn_comm_size(world) + kn_rank(world)));
    }
    const kn_param *p;
    KN_CHECK(kn_params(&m, &p) == 3);
    for (int i = 0; i < 3; i++) {
        IN_SCOPE;
        KN_CHECK((kn_param_grad(&p[i]) != NULL) == (i == 0 || (i == 1 && u->on)), "%s", name[i]);
    }
    KN_CHECK(kn_step(o));
    KN_CHECK(changed(&m, 0, before[0], 0.75f), "a");
    KN_CHECK(!changed(&m, 1, before[1], u->on ? 0.75f : 1), "b, on: %d", u->on);
    KN_CHECK(!changed(&m, 2, before[2], 1), "c");
}

KN_TEST(control, unused_parameters_have_gradients_of_zeros)
{
    for (int i = 0; i < 24; i++) {
        unused u = { .on = i % 2, .no_sync = i / 2 % 2, .not_last = i / 4 % 2 };
        int ranks = 1 << i / 8;
        u.strategy = ranks == 4 && i % 3 == 0 ? KN_HYBRID_SHARD : KN_FULL_SHARD + i % 3;
        KN_CHECK(spawn_threads(ranks, decays, &u) == 0, "way %d on %d ranks", i, ranks);
    }
}

/* ---- debts ----------------------------------------------------------------------------------- */

typedef struct one_used {
    kn_module base;
    kn_linear a;
    kn_module idle; /* a unit whose parameter forward doesn't use */
    bool fails;
} one_used;

static kn_tensor *idle_forward(kn_module *self, kn_tensor *x)
{
    return kn_scale(x, 2);
}

static kn_tensor *fail_grad(kn_tensor *grad, void *arg)
{
    kn_fail("this gradient fails");
    return NULL;
}

static kn_tensor *one_used_forward(kn_module *self, kn_tensor *x)
{
    one_used *m = (one_used *)self;
    x = kn_call(&m->a, x);
    if (m->fails)
        kn_on_grad(x, fail_grad, NULL);
    return kn_call(&m->idle, x);
}

/* A backward that fails below a unit owes none of the zeros that the unit would have had. */
KN_TEST(control, a_failed_backward_owes_no_zeros)
{
    for (int not_last = 0; not_last < 2; not_last++) {
        OWNED_MODULE one_used m = { .fails = true };
        kn_module_init(&m.base, one_used_forward);
        kn_module_init(&m.idle, idle_forward);
        KN_CHECK(kn_linear_init(&m.a, &m.base, "a", 4, 4, .device = KN_META) &&
                 kn_parameter(&m.idle, "w", KN_F32, KN_META,
                              (kn_initializer){ .kind = KN_INIT_ZEROS }, 1, (int64_t[]){ 4 }) &&
                 kn_module_add(&m.base, "idle", &m.idle));
        KN_CHECK(kn_fsdp_wrap(&m, kn_comm_self(), .wrap_class = "linear,idle"));
        KN_CHECK(kn_fsdp_set_reduce_unused(&m, true, true) &&
                 (not_last ? kn_fsdp_set_is_last_backward(&m, false)
                           : kn_fsdp_set_gradient_sync(&m, false, true)));
        OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1);
        for (int pass = 0; pass < 2; pass++, m.fails = false) {
            kn_scope scope = kn_scope_begin();
            kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4));
            bool ok = kn_backward(sum_of(kn_call(&m, x)));
            kn_scope_end(scope);
            KN_CHECK(ok == !m.fails, "not_last %d", not_last);
            kn_clear_error();
            KN_CHECK(kn_fsdp_set_is_last_backward(&m, true) &&
                     kn_fsdp_set_gradient_sync(&m, true, true));
            if (m.fails) {
                REFUSED(kn_step(o), "no parameter has a gradient");
            }
        }
        KN_CHECK(kn_step(o), "not_last %d", not_last);
    }
}

typedef enum skips_fault { FAULT_NONE, FAULT_FORWARD, FAULT_BACKWARD, FAULTS } skips_fault;

/* A unit that only some forwards call, and then without using its result. */
typedef struct skips {
    kn_module base;
    kn_linear a, b;
    skips_fault fault;
} skips;

static kn_tensor *skips_forward(kn_module *self, kn_tensor *x)
{
    skips *m = (skips *)self;
    x = kn_call(&m->a, x);
    if (m->fault != FAULT_NONE)
        kn_call(&m->b, x);
    if (m->fault == FAULT_BACKWARD)
        kn_on_grad(x, fail_grad, NULL);
    if (m->fault == FAULT_FORWARD)
        kn_fail("this forward fails");
    return kn_ok() ? x : NULL;
}

/* A unit that only a failed pass called has no zeros for its unused parameters. */
KN_TEST(control, a_call_of_a_failed_pass_brings_no_zeros)
{
    for (skips_fault f = FAULT_FORWARD; f < FAULTS; f++) {
        OWNED_MODULE skips m = { .fault = f };
        const kn_param *p;
        KN_CHECK(kn_module_init(&m.base, skips_forward) &&
                 kn_linear_init(&m.a, &m.base, "a", 4, 4, .device = KN_META, .no_bias = true) &&
                 kn_linear_init(&m.b, &m.base, "b", 4, 4, .device = KN_META, .no_bias = true));
        KN_CHECK(kn_fsdp_wrap(&m, kn_comm_self(), .wrap_class = "linear") &&
                 kn_fsdp_set_reduce_unused(&m, true, true) && kn_params(&m, &p) == 2);
        REFUSED(two_backward(&m, 0), "fails");
        m.fault = FAULT_NONE;
        KN_CHECK(two_backward(&m, 1));
        IN_SCOPE;
        KN_CHECK(kn_param_grad(&p[0]) && !kn_param_grad(&p[1]), "fault %d", (int)f);
    }
}

/* ---- many calls of a unit -------------------------------------------------------------------- */

enum { CALLS = 100, FORWARDS = 3 };

typedef struct recurrent {
    kn_module base;
    kn_linear in, cell;
} recurrent;

static kn_tensor *recurrent_forward(kn_module *self, kn_tensor *x)
{
    recurrent *m = (recurrent *)self;
    x = kn_call(&m->in, x);
    for (int i = 0; i < CALLS; i++)
        x = kn_call(&m->cell, x);
    return x;
}

/* A loss over several forwards, of which rank 1 uses the last alone. */
RANK_TEST(control, a_unit_that_is_called_often_has_its_turns, .threads = "124")
{
    OWNED_MODULE recurrent m = { 0 };
    kn_module_init(&m.base, recurrent_forward);
    KN_CHECK(kn_linear_init(&m.in, &m.base, "in", 4, 4, .device = KN_META) &&
             kn_linear_init(&m.cell, &m.base, "cell", 4, 4, .device = KN_META));
    KN_CHECK(kn_fsdp_wrap(&m, world, .wrap_class = "linear"));
    kn_tensor *loss = NULL;
    for (int i = 0; i < FORWARDS; i++) {
        kn_tensor *y = sum_of(kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4))));
        if (i < FORWARDS - 1 && kn_rank(world) == 1)
            y = kn_detach(y);
        loss = loss ? kn_add(loss, y) : y;
    }
    KN_CHECK(kn_backward(loss));
}

enum { WITHOUT_BACKWARD = 300 };

/* Forwards that may have a backward, but get none, are forgotten; the last one is not. */
RANK_TEST(control, forwards_without_backward_are_forgotten, .threads = "12")
{
    int most[2] = { 0 };
    TWO_WHOLE(whole);
    TWO_WRAPPED(m, world, .seed = NET_SEED, .wrap_class = "linear");
    for (int i = 0; i < 2 * WITHOUT_BACKWARD; i++) {
        kn_scope scope = kn_scope_begin();
        KN_CHECK(two_loss(&m, 0));
        kn_scope_end(scope);
        int visits = kn_unit_of(m.base.impl)->schedule->order.visits, half = i / WITHOUT_BACKWARD;
        most[half] = visits > most[half] ? visits : most[half];
    }
    KN_CHECK(most[0] == most[1], "calls that are remembered: at most %d, then %d", most[0],
             most[1]);
    OWNED_OPTIM kn_optim *a = kn_sgd(&m, .lr = 0.5), *b = kn_sgd(&whole, .lr = 0.5);
    KN_CHECK(two_backward(&m, kn_rank(world)) && kn_step(a));
    for (int i = 0; i < kn_comm_size(world); i++)
        KN_CHECK(two_backward(&whole, i));
    KN_CHECK(kn_step(b));
    const kn_param *list;
    int params = kn_params(&whole, &list);
    for (int i = 0; i < params; i++)
        KN_CHECK(reads_as(&m, i, list[i].tensor), "'%s'", list[i].name);
}
