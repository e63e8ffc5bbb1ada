/* tests/fsdp/wrap_again_test.c: a unit wrapped around a tree of units that trained: the larger tree
 * trains on as one plain process does. */
#include "tests/fsdp/two.h"

/* Takes a step of sgd from micro-batch first on, one a rank. */
static bool step_of(void *m, kn_comm *world, int first, int micro_batches)
{
    bool ok = true;
    for (int i = kn_rank(world); i < micro_batches && ok; i += kn_comm_size(world))
        ok = two_backward(m, first + i);
    kn_optim *o = ok ? kn_sgd(m, .lr = 0.5) : NULL;
    ok = o && kn_step(o);
    kn_optim_free(o);
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

static int trains_on(kn_comm *world, void *arg)
{
    around m, plain;
    kn_comm *alone = kn_comm_self();
    const int ranks = kn_comm_size(world);
    (void)arg;
    EXPECT(around_init(&m, NULL) && around_init(&plain, &(kn_device){ KN_CPU }));
    EXPECT(kn_fsdp_wrap(&m.m, world, .wrap_class = "linear", .seed = NET_SEED));
    EXPECT(step_of(&m.m, world, 0, ranks) && step_of(&plain.m, alone, 0, ranks));
    EXPECT(kn_fsdp_wrap(&m, world, .seed = NET_SEED));
    for (int step = 1; step < 3; step++) {
        EXPECT(step_of(&m, world, step * ranks, ranks) &&
               step_of(&plain, alone, step * ranks, ranks));
        EXPECT(all_read_as(&m, &plain), "step %d", step);
    }
    kn_module_free(&m);
    kn_module_free(&plain);
    return !kn_ok();
}

KN_TEST(wrap_again, a_tree_that_trained_trains_on_inside_another)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        KN_CHECK(kn_spawn_threads(ranks, trains_on, NULL) == 0, "%d ranks", ranks);
}
