/* tests/fsdp/edges_test.c: what a schedule must survive: branches that ranks choose by data, forwards and
 * backwards that fail, gradients of parameters used outside any call, settings that change in between. */
#include "tests/fsdp/net.h"

/* ---- branches chosen by data ---------------------------------------------------------------------------- */

enum { BRANCHES = 3, DIM = 4, BATCH = 2 };

typedef struct branch {
    kn_module base;
    kn_linear in, out; /* in is a unit inside the unit */
} branch;

typedef struct tree {
    kn_module base;
    branch b[BRANCHES];
    unsigned runs, counts; /* bit i: branch i runs in forward; its result is used */
} tree;

static kn_tensor *branch_forward(kn_module *self, kn_tensor *x)
{
    branch *m = (branch *)self;
    return kn_call(&m->out, kn_relu(kn_call(&m->in, x)));
}

static kn_tensor *tree_forward(kn_module *self, kn_tensor *x)
{
    tree *m = (tree *)self;
    kn_tensor *sum = x;
    for (int i = 0; i < BRANCHES; i++) {
        kn_tensor *y = m->runs >> i & 1 ? kn_call(&m->b[i], x) : NULL;
        if (y && m->counts >> i & 1)
            sum = kn_add(sum, y);
    }
    return sum;
}

static bool tree_init(tree *m)
{
    static const char *const name[BRANCHES] = { "0", "1", "2" };
    memset(m, 0, sizeof *m);
    m->runs = m->counts = 7;
    bool ok = kn_module_init(&m->base, tree_forward);
    for (int i = 0; i < BRANCHES && ok; i++)
        ok = kn_module_init(&m->b[i].base, branch_forward) &&
             kn_module_add(&m->base, name[i], &m->b[i].base) &&
             kn_linear_init(&m->b[i].in, &m->b[i].base, "in", DIM, 5, .device = KN_META) &&
             kn_linear_init(&m->b[i].out, &m->b[i].base, "out", 5, DIM, .device = KN_META);
    return ok;
}

static kn_tensor *input(int micro)
{
    float v[BATCH * DIM];
    for (int i = 0; i < BATCH * DIM; i++)
        v[i] = (float)((i * 5 + micro * 3) % 7) - 2.5f;
    return kn_from(KN_F32, KN_CPU, v, KN_SHAPE(BATCH, DIM));
}

static bool backward(tree *m, int micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *zero = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(BATCH, DIM));
    bool ok = kn_backward(kn_mse_loss(kn_call(m, input(micro)), zero));
    kn_scope_end(scope);
    return ok;
}

/* Which branches micro-batch micro uses: at least one. */
static unsigned branches_of(int micro)
{
    static const unsigned mask[] = { 5, 2, 1, 7, 4, 3, 6, 1 };
    return mask[micro % 8];
}

static bool same_as(tree *m, tree *plain)
{
    const kn_param *p;
    int n = kn_params(plain, &p);
    for (int i = 0; i < n; i++)
        if (!reads_as(m, i, p[i].tensor))
            return kn_fail("'%s' differs from one process", p[i].name);
    return true;
}

typedef struct setting {
    kn_strategy strategy;
    kn_backward_prefetch prefetch;
} setting;

static bool rounds(tree *m, int rank, int ranks, bool sharded)
{
    for (int step = 0; step < 3; step++)
        for (int r = 0; r < 2; r++) {
            for (int k = 0; k < (sharded ? 1 : ranks); k++) {
                int micro = (step * 2 + r) * ranks + (sharded ? rank : k);
                m->runs = 7;
                m->counts = branches_of(micro);
                if (!backward(m, micro))
                    return false;
            }
        }
    return true;
}

static int by_data(kn_comm *world, void *arg)
{
    const setting *s = arg;
    tree m, plain;
    int ranks = kn_comm_size(world);
    kn_set_threads(1);
    EXPECT(tree_init(&plain) && kn_materialize(&plain, KN_CPU, NET_SEED));
    kn_optim *o = kn_adamw(&plain, .lr = 0.1);
    EXPECT(o && rounds(&plain, 0, ranks, false) && kn_step(o));
    kn_optim_free(o);
    EXPECT(tree_init(&m) &&
           kn_fsdp_wrap(&m, world, .strategy = s->strategy, .seed = NET_SEED,
                        .backward_prefetch = s->prefetch, .wrap_class = "branch,linear"));
    o = kn_adamw(&m, .lr = 0.1);
    EXPECT(o && rounds(&m, kn_rank(world), ranks, true) && kn_step(o));
    EXPECT(same_as(&m, &plain));
    kn_optim_free(o);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

KN_TEST(edges, ranks_choose_branches_by_data)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
            for (int st = KN_FULL_SHARD; st <= KN_NO_SHARD; st++) {
                setting s = { .strategy = st, .prefetch = p };
                KN_CHECK(kn_spawn(ranks, by_data, &s) == 0, "%d ranks, strategy %d, prefetch %d",
                         ranks, st, p);
            }
}

/* ---- after an error ---------------------------------------------------------------------------------------- */

static kn_tensor *fails(kn_tensor *g, void *arg)
{
    (void)g;
    (void)arg;
    kn_fail("no gradient today");
    return NULL;
}

KN_TEST(edges, training_goes_on_after_an_error_that_was_cleared)
{
    tree m, plain;
    kn_set_threads(1);
    KN_CHECK(tree_init(&plain) && kn_materialize(&plain, KN_CPU, NET_SEED));
    KN_CHECK(tree_init(&m) && kn_fsdp_wrap(&m, NULL, .wrap_class = "branch,linear",
                                           .param_dtype = KN_F32, .seed = NET_SEED));
    kn_optim *a = kn_adamw(&plain, .lr = 0.1), *b = kn_adamw(&m, .lr = 0.1);
    for (int step = 0; step < 3; step++) {
        kn_scope scope = kn_scope_begin();
        KN_CHECK(!kn_call(&m, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, DIM + 1))));
        KN_CHECK_ERROR("linear");
        kn_tensor *y = kn_call(&m, input(9));
        kn_on_grad(y, fails, NULL);
        KN_CHECK(!kn_backward(kn_mean(y, 0, NULL, false)));
        KN_CHECK_ERROR("no gradient today");
        y = kn_call(&m.base, input(8));
        kn_scope_end(scope);
        KN_CHECK(backward(&m, step) && kn_step(b), "%s", kn_error());
        KN_CHECK(backward(&plain, step) && kn_step(a));
    }
    kn_scope scope = kn_scope_begin();
    KN_CHECK(same_as(&m, &plain), "%s", kn_error());
    kn_scope_end(scope);
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    kn_module_free(&plain);
}

/* ---- in between ----------------------------------------------------------------------------------------------- */

static int changes(kn_comm *world, void *arg)
{
    tree m, plain;
    (void)arg;
    kn_set_threads(1);
    EXPECT(tree_init(&plain) && kn_materialize(&plain, KN_CPU, NET_SEED));
    EXPECT(tree_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "branch", .seed = NET_SEED,
                                         .reshard_after_forward = 2));
    kn_optim *a = kn_adamw(&plain, .lr = 0.1), *b = kn_adamw(&m, .lr = 0.1);
    static const int value[] = { KN_RESHARD_NEVER, 2, KN_RESHARD_ALWAYS, 2, KN_RESHARD_NEVER };
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < kn_comm_size(world); k++)
            EXPECT(backward(&plain, i * 4 + k));
        kn_tensor *zero = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(BATCH, DIM));
        kn_tensor *loss = kn_mse_loss(kn_call(&m, input(i * 4 + kn_rank(world))), zero);
        EXPECT(kn_fsdp_set_reshard_after_forward(&m, value[i], true)); /* between the two */
        EXPECT(kn_backward(loss) && kn_step(a) && kn_step(b));
    }
    EXPECT(same_as(&m, &plain));
    EXPECT(!kn_fsdp_set_reshard_after_forward(&m, 4, true) &&
           (strstr(kn_error(), "wrapped") || strstr(kn_error(), "divide")));
    kn_clear_error();
    kn_scope_end(scope);
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

KN_TEST(edges, resharding_changes_between_forward_and_backward)
{
    for (int ranks = 2; ranks <= 4; ranks += 2)
        KN_CHECK(kn_spawn(ranks, changes, NULL) == 0, "%d ranks", ranks);
}

/* A loss of a parameter itself, gathered by hand. */
static int outside(kn_comm *world, void *arg)
{
    tree m, plain;
    (void)arg;
    kn_set_threads(1);
    EXPECT(tree_init(&plain) && kn_materialize(&plain, KN_CPU, NET_SEED));
    EXPECT(tree_init(&m) &&
           kn_fsdp_wrap(&m, world, .wrap_class = "branch,linear", .seed = NET_SEED));
    kn_optim *a = kn_sgd(&plain, .lr = 0.1), *b = kn_sgd(&m, .lr = 0.1);
    tree *both[2] = { &plain, &m };
    kn_scope scope = kn_scope_begin();
    EXPECT(kn_unshard_wait(kn_fsdp_unshard(&m.b[1].in)));
    for (int i = 0; i < 2; i++) {
        kn_tensor *w = kn_module_param(&both[i]->b[1].in, "weight");
        EXPECT(kn_backward(kn_sum(kn_mul(w, w), 0, NULL, false)));
    }
    EXPECT(kn_step(a) && kn_step(b) && same_as(&m, &plain));
    kn_scope_end(scope);
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

KN_TEST(edges, a_parameter_used_outside_any_call)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        KN_CHECK(kn_spawn(ranks, outside, NULL) == 0, "%d ranks", ranks);
}

/* A group of branches 0 and 1 is the root of one tree, branch 2 of another; branch 1 runs in some rounds only. */
static int root_group(kn_comm *world, void *arg)
{
    tree m, plain;
    int ranks = kn_comm_size(world);
    (void)arg;
    kn_set_threads(1);
    EXPECT(tree_init(&plain) && kn_materialize(&plain, KN_CPU, NET_SEED));
    EXPECT(tree_init(&m));
    kn_module *list[2] = { &m.b[0].base, &m.b[1].base };
    EXPECT(kn_fsdp_wrap_group(list, 2, world, .seed = NET_SEED) &&
           kn_fsdp_wrap(&m.b[2].base, world, .seed = NET_SEED));
    kn_optim *a = kn_sgd(&plain, .lr = 0.1), *b = kn_sgd(&m, .lr = 0.1);
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < 6; i++) {
        m.runs = m.counts = plain.runs = plain.counts = i % 2 ? 5 : 7;
        EXPECT(backward(&m, i * ranks + kn_rank(world)));
        for (int k = 0; k < ranks; k++)
            EXPECT(backward(&plain, i * ranks + k));
        if (i < 2) /* two rounds in the first step */
            continue;
        EXPECT(kn_step(a) && kn_step(b) && same_as(&m, &plain), "round %d", i);
    }
    kn_scope_end(scope);
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

KN_TEST(edges, a_root_group_of_which_a_part_runs)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        KN_CHECK(kn_spawn(ranks, root_group, NULL) == 0, "%d ranks", ranks);
}

KN_TEST(edges, a_root_that_recomputes_records_its_order)
{
    tree m;
    KN_CHECK(tree_init(&m) && kn_fsdp_wrap(&m, NULL, .wrap_class = "branch"));
    kn_recompute(&m, true);
    kn_scope scope = kn_scope_begin();
    kn_call(&m, input(1));
    KN_CHECK(kn_unit_of(m.base.impl)->schedule->order.visits == 2 * BRANCHES);
    kn_scope_end(scope);
    kn_module_free(&m);
}

KN_TEST(edges, settings_without_units_are_refused)
{
    tree m;
    KN_CHECK(tree_init(&m));
    KN_CHECK(!kn_fsdp_set_gradient_sync(&m, false, true));
    KN_CHECK_ERROR("no unit of fsdp");
    kn_module_free(&m);
}

/* Modules go while gathers run on workers: nothing may be read or written afterwards (valgrind, TSan). */
static int gone(kn_comm *world, void *arg)
{
    (void)arg;
    kn_set_free_cores(2);
    for (int i = 0; i < 5; i++) {
        tree m;
        EXPECT(tree_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "branch,linear"));
        kn_comm_slow(world, 0.002, 0);
        for (int k = 0; k < BRANCHES; k++)
            kn_fsdp_unshard(&m.b[k].in);
        kn_module_free(&m);
    }
    return kn_ok() ? 0 : 1;
}

KN_TEST(edges, modules_freed_while_a_gather_runs_on_a_worker_thread)
{
    KN_CHECK(kn_spawn_threads(2, gone, NULL) == 0);
}
