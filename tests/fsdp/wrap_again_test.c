/* tests/fsdp/wrap_again_test.c: trees of units that change after they trained: a unit is wrapped
 * around them, or a part is freed; they train on as one plain process does. */
#include "tests/fsdp/two.h"

/* Takes a step of sgd from micro-batch first on, one a rank. */
static bool step_of(void *m, kn_comm *world, int first, int micro_batches)
{
    bool ok = true;
    for (int i = kn_rank(world); i < micro_batches && ok; i += kn_comm_size(world))
        ok = two_backward(m, first + i);
    OWNED_OPTIM kn_optim *o = ok ? kn_sgd(m, .lr = 0.5) : NULL;
    ok = o && kn_step(o);
    return ok;
}

/* Two layers around a tree of units that trained before, which then train on with it. */
typedef struct around {
    kn_module base;
    kn_linear in, out;
    two m;
} around;

static kn_tensor *around_forward(kn_module *self, kn_tensor *x)
{
    around *m = (around *)self;
    return kn_call(&m->out, kn_call(&m->m, kn_call(&m->in, x)));
}

static bool around_init(around *m, const kn_device *values)
{
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init(&m->base, around_forward) &&
              kn_linear_init(&m->in, &m->base, "in", 4, 4, .device = KN_META) &&
              kn_linear_init(&m->out, &m->base, "out", 4, 4, .device = KN_META) &&
              two_init(&m->m, KN_META, KN_F32) && kn_module_add(&m->base, "m", &m->m.base);
    return ok && (!values || kn_materialize(m, *values, NET_SEED));
}

RANK_TEST(wrap_again, a_tree_that_trained_trains_on_inside_another, .threads = "124")
{
    OWNED_MODULE around m, plain;
    kn_comm *alone = kn_comm_self();
    const int ranks = kn_comm_size(world);
    KN_CHECK(around_init(&m, NULL) && around_init(&plain, &(kn_device){ KN_CPU }));
    KN_CHECK(kn_fsdp_wrap(&m.m, world, .wrap_class = "linear", .seed = NET_SEED));
    KN_CHECK(step_of(&m.m, world, 0, ranks) && step_of(&plain.m, alone, 0, ranks));
    KN_CHECK(kn_fsdp_wrap(&m, world, .seed = NET_SEED));
    for (int step = 1; step < 3; step++) {
        KN_CHECK(step_of(&m, world, step * ranks, ranks) &&
                 step_of(&plain, alone, step * ranks, ranks));
        KN_CHECK(all_read_as(&m, &plain), "step %d", step);
    }
}

/* ---- a step between a change of the tree and its next forward -------------------------------- */

typedef enum change { ROOT_WRAPPED, SIBLING_FREED, UNIT_FREED, CHANGES } change;
typedef struct changed {
    change change;
    kn_strategy strategy;
    bool muon, handle; /* of a gather from before */
} changed;

/* Two layers, and one that no forward calls. */
typedef struct three {
    two m;
    kn_linear idle;
} three;

static bool three_begin(three *m, kn_comm *world, const changed *w)
{
    bool ok = two_init(&m->m, KN_META, KN_F32) &&
              kn_linear_init(&m->idle, &m->m.base, "idle", 4, 4, .device = KN_META);
    void *part[] = { &m->m.a, &m->m.b, &m->idle };
    int n = w->change == UNIT_FREED ? 1 : 3;
    for (int i = 0; ok && i < n; i++)
        ok = kn_fsdp_wrap(n == 1 ? (void *)m : part[i], world, .seed = NET_SEED,
                          .wrap_class = n == 1 ? "linear" : NULL, .strategy = w->strategy,
                          .param_dtype = KN_BF16) &&
             kn_fsdp_set_reshard_after_backward(n == 1 ? (void *)m : part[i], false, true);
    return ok;
}

/* The loss after a step between whose backward and which the tree changes, or doesn't. */
static bool loss_after(kn_comm *world, const changed *w, bool changes, double *loss)
{
    three m;
    bool ok = three_begin(&m, world, w) && two_backward(&m.m, kn_rank(world));
    kn_unshard_handle h = { NULL };
    ok = ok && (!w->handle || (h = kn_fsdp_unshard(&m.m.a)).unit);
    if (ok && changes && w->change == ROOT_WRAPPED)
        ok = kn_fsdp_wrap(&m.m, world, .seed = NET_SEED, .strategy = w->strategy);
    else if (ok && changes)
        kn_module_free(&m.idle);
    ok = ok && (!w->handle || kn_unshard_wait(h));
    kn_optim *o = w->muon ? kn_muon(&m.m, .lr = 0.5) : kn_sgd(&m.m, .lr = 0.5);
    ok = ok && kn_step(o) && two_evaluate(&m.m, loss);
    kn_optim_free(o);
    kn_module_free(&m.m);
    return ok;
}

RANK_TEST(wrap_again, a_step_after_the_tree_changed_is_seen_by_the_next_forward, .threads = "12")
{
    static const kn_strategy strategy[] = { KN_FULL_SHARD, KN_SHARD_GRAD_OP, KN_NO_SHARD };
    for (int i = 0; i < CHANGES * 3 * 4; i++) {
        changed w = { (change)(i / 12), strategy[i / 4 % 3], i & 1, i & 2 };
        double want, is;
        KN_CHECK(loss_after(world, &w, false, &want) && loss_after(world, &w, true, &is), "way %d",
                 i);
        KN_CHECK(is == want, "way %d: the loss is %.9g, not %.9g", i, is, want);
    }
}
