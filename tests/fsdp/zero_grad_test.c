/* tests/fsdp/zero_grad_test.c: dropped gradients have no effect: neither their values nor their
 * count of micro-batches remain. Each case compares the parameters after a step with a run that
 * never had the dropped gradients. Rank functions return a status. */
#include "tests/fsdp/gan.h"

/* True if parameters of a and b whose names begin with part have the same bits. Collective. */
static bool same_part(gan *a, gan *b, const char *part)
{
    const kn_param *p;
    int n = kn_params(a, &p);
    for (int i = 0; i < n; i++) {
        float x[16], y[16];
        if (strncmp(p[i].name, part, strlen(part)) != 0)
            continue;
        if (!kn_param_read(a, i, x) || !kn_param_read(b, i, y) ||
            memcmp(x, y, (size_t)p[i].numel * sizeof *x) != 0)
            return false;
    }
    return n == 4;
}

static bool same_params(gan *a, gan *b)
{
    return same_part(a, b, "");
}

static void clear_each(void *m)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++)
        kn_clear_grad(p[i].tensor);
}

/* ---- all gradients --------------------------------------------------------------------------- */

typedef struct drop {
    bool sharded, by_hand, unsynced, clip;
} drop;

static bool begin(gan *m, kn_comm *world, const drop *d, kn_optim **o)
{
    if (!gan_init(m))
        return false;
    if (d->sharded ? !kn_fsdp_wrap(m, world, .wrap_class = "linear", .seed = NET_SEED)
                   : !kn_materialize(m, KN_CPU, NET_SEED))
        return false;
    *o = kn_sgd(m, .lr = 0.5);
    return *o != NULL;
}

static int all_dropped(kn_comm *world, void *arg)
{
    const drop *d = arg;
    int rank = kn_rank(world);
    gan m, want;
    kn_optim *o, *w;
    EXPECT(begin(&m, world, d, &o) && begin(&want, world, d, &w));
    for (int step = 0; step < 2; step++) {
        if (d->unsynced)
            EXPECT(kn_fsdp_set_gradient_sync(&m, false, true));
        EXPECT(gan_backward(&m, 50 + rank) && gan_backward(&m, 60 + rank));
        if (d->unsynced)
            EXPECT(kn_fsdp_set_gradient_sync(&m, true, true));
        d->by_hand ? clear_each(&m) : kn_zero_grad(&m);
        EXPECT(kn_grad_scale(&m) == 1);
        EXPECT(gan_backward(&m, rank) && gan_backward(&want, rank));
        EXPECT(kn_grad_scale(&m) == kn_grad_scale(&want), "%g, not %g", kn_grad_scale(&m),
               kn_grad_scale(&want));
        kn_scope scope = kn_scope_begin();
        if (d->clip)
            EXPECT(kn_item(kn_clip_grad_norm(&m, 0.01)) == kn_item(kn_clip_grad_norm(&want, 0.01)));
        kn_scope_end(scope);
        EXPECT(kn_step(o) && kn_step(w), "%s", kn_error());
        EXPECT(same_params(&m, &want), "step %d", step);
    }
    kn_optim_free(o);
    kn_optim_free(w);
    kn_module_free(&m);
    kn_module_free(&want);
    return 0;
}

KN_TEST(zero_grad, dropped_gradients_are_not_counted)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int how = 0; how < 16; how++) {
            drop d = { how & 1, how & 2, how & 4, how & 8 };
            if (!d.sharded && (ranks > 1 || d.unsynced))
                continue;
            KN_CHECK(kn_spawn_threads(ranks, all_dropped, &d) == 0, "%d ranks, way %d", ranks, how);
        }
}

/* ---- a part of the tree: what a GAN does ----------------------------------------------------- */

/* Of two backwards the first one's gradients of d are dropped: d steps with the second alone, g
 * with both. */
static int part_dropped(kn_comm *world, void *arg)
{
    const drop *d = arg;
    int rank = kn_rank(world);
    gan m, second, both;
    kn_optim *o[4] = { 0 };
    EXPECT(begin(&m, world, d, &o[0]) && begin(&second, world, d, &o[1]) &&
           begin(&both, world, d, &o[2]));
    kn_optim *on_d = o[3] = kn_sgd(&m.d, .lr = 0.5), *on_g = kn_sgd(&m.g, .lr = 0.5);
    EXPECT(gan_backward(&m, rank));
    d->by_hand ? clear_each(&m.d) : kn_zero_grad(&m.d);
    EXPECT(kn_grad_scale(&m.d) == 1 && kn_grad_scale(&m.g) * kn_comm_size(world) == 1);
    EXPECT(gan_backward(&m, 20 + rank) && gan_backward(&second, 20 + rank));
    EXPECT(gan_backward(&both, rank) && gan_backward(&both, 20 + rank));
    EXPECT(kn_step(on_d) && kn_step(on_g) && kn_step(o[1]) && kn_step(o[2]), "%s", kn_error());
    EXPECT(same_part(&m, &second, "d.") && same_part(&m, &both, "g."));
    EXPECT(!same_part(&second, &both, "d.") && kn_grad_scale(&m) == 1);
    for (int i = 0; i < 4; i++)
        kn_optim_free(o[i]);
    kn_optim_free(on_g);
    kn_module_free(&m);
    kn_module_free(&second);
    kn_module_free(&both);
    return 0;
}

KN_TEST(zero_grad, a_part_of_the_tree)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int how = 0; how < 4; how++) {
            drop d = { how & 1, how & 2, 0, 0 };
            if (d.sharded || ranks == 1)
                KN_CHECK(kn_spawn_threads(ranks, part_dropped, &d) == 0, "%d ranks, way %d", ranks,
                         how);
        }
}

/* ---- ranks that differ ----------------------------------------------------------------------- */

/* Without sync only rank 0's data reach d. Then g's gradients are dropped: all ranks count the same
 * micro-batches of d, whatever gradients they hold. */
static int dropped_on_some(kn_comm *world, void *arg)
{
    const drop plain = { .sharded = true };
    gan m;
    kn_optim *o;
    EXPECT(begin(&m, world, &plain, &o) && kn_fsdp_set_gradient_sync(&m, false, true));
    m.skip_d = kn_rank(world) > 0;
    EXPECT(gan_backward(&m, kn_rank(world)));
    kn_zero_grad(&m.g);
    EXPECT(kn_grad_scale(&m.d) * kn_comm_size(world) == 1, "%g", kn_grad_scale(&m.d));
    EXPECT(kn_fsdp_set_gradient_sync(&m, true, true) && gan_backward(&m, 9));
    EXPECT(kn_grad_scale(&m.d) * kn_comm_size(world) == 0.5, "%g", kn_grad_scale(&m.d));
    kn_optim_free(o);
    kn_module_free(&m);
    (void)arg;
    return 0;
}

KN_TEST(zero_grad, ranks_count_the_same_whatever_their_data_reached)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        KN_CHECK(kn_spawn_threads(ranks, dropped_on_some, NULL) == 0, "%d ranks", ranks);
}

/* ---- backwards that bring nothing ------------------------------------------------------------ */

/* d is frozen while a loss goes through it: it counts no micro-batch. */
static int through_frozen(kn_comm *world, void *arg)
{
    gan m;
    EXPECT(gan_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = NET_SEED));
    kn_freeze(&m, true);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4)), true);
    EXPECT(kn_backward(kn_mean(kn_call(&m, x), 0, NULL, false)) && kn_grad(x) != NULL);
    kn_scope_end(scope);
    EXPECT(kn_grad_scale(&m) == 1, "%g", kn_grad_scale(&m));
    kn_freeze(&m, false);
    EXPECT(gan_backward(&m, 0) && kn_grad_scale(&m) * kn_comm_size(world) == 1);
    kn_module_free(&m);
    (void)arg;
    return 0;
}

KN_TEST(zero_grad, a_backward_through_frozen_parameters_counts_nothing)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        KN_CHECK(kn_spawn_threads(ranks, through_frozen, NULL) == 0, "%d ranks", ranks);
}

/* ---- what counts as a micro-batch ------------------------------------------------------------ */

/* The base's own parameter: none, a frozen one, or one that no backward reaches, in a unit that
 * never waits. */
enum { OWN_NONE, OWN_FROZEN, OWN_UNUSED, OWNS };

typedef struct branch {
    kn_module base, part; /* two units */
    int own;
    bool used; /* part's parameter, by this rank's data */
} branch;

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    branch *m = (branch *)((char *)self - offsetof(branch, part));
    return m->used ? kn_mul(x, kn_module_param(self, "w")) : kn_scale(x, 2);
}

static kn_tensor *branch_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((branch *)self)->part, x);
}

static bool branch_begin(branch *m, kn_comm *world, bool hybrid, int own)
{
    kn_strategy s = hybrid ? KN_HYBRID_SHARD : KN_FULL_SHARD;
    kn_initializer ones = { .kind = KN_INIT_ONES };
    int64_t shape[] = { 4 };
    *m = (branch){ .own = own };
    if (!kn_module_init(&m->base, branch_forward) || !kn_module_init(&m->part, part_forward) ||
        !kn_parameter(&m->part, "w", KN_F32, KN_META, ones, 1, shape))
        return false;
    kn_tensor *of_base =
        own == OWN_NONE ? NULL : kn_parameter(&m->base, "own", KN_F32, KN_META, ones, 1, shape);
    if (of_base)
        kn_require_grad(of_base, own != OWN_FROZEN);
    return kn_module_add(&m->base, "part", &m->part) &&
           kn_fsdp_wrap(&m->part, world, .strategy = s, .mesh.shards = hybrid ? 2 : 0) &&
           kn_fsdp_wrap(m, world, .strategy = s, .mesh.shards = hybrid ? 2 : 0);
}

enum { USED_BY_NONE, USED_BY_LAST_RANK, USED_BY_ALL, USES };
enum { SETTLES, NO_SYNC, NOT_LAST, NO_ALL_REDUCE, MODES };

static bool branch_set(branch *m, kn_comm *world, int use, int mode)
{
    kn_module *waits = m->own == OWN_UNUSED ? &m->part : &m->base;
    m->used = use == USED_BY_ALL ||
              (use == USED_BY_LAST_RANK && kn_rank(world) == kn_comm_size(world) - 1);
    return kn_fsdp_set_gradient_sync(waits, mode != NO_SYNC, true) &&
           kn_fsdp_set_is_last_backward(m, mode != NOT_LAST) &&
           kn_fsdp_set_all_reduce(waits, mode != NO_ALL_REDUCE, true);
}

static bool branch_backward(void *m)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4)), true);
    bool ok = kn_backward(kn_sum(kn_call(m, x), 0, NULL, false));
    kn_scope_end(scope);
    return ok;
}

/* All programs of three backwards, of which the last one settles, after each other. */
static int counts(kn_comm *world, void *arg)
{
    int own = *(const int *)arg, modes = kn_comm_size(world) == 4 ? MODES : NO_ALL_REDUCE,
        each = USES * modes, programs = 2 * each * each * USES;
    branch m;
    EXPECT(branch_begin(&m, world, modes == MODES, own));
    for (int i = 0; i < programs; i++) {
        int use[3] = { i / 2 % USES, i / 2 / USES % USES, i / 2 / USES / USES % USES };
        int mode[3] = { i / 2 / 27 % modes, i / 2 / 27 / modes, SETTLES }, brought = 0;
        EXPECT(kn_fsdp_set_reduce_unused(&m, i % 2, true));
        for (int k = 0; k < 3; k++) {
            EXPECT(branch_set(&m, world, use[k], mode[k]) && branch_backward(&m), "%s", kn_error());
            brought += use[k] != USED_BY_NONE;
        }
        double want = brought ? 1.0 / brought / kn_comm_size(world) : 1, is = kn_grad_scale(&m);
        EXPECT(is == want, "own %d, uses %d %d %d, modes %d %d, unused %d: %g, not %g", own, use[0],
               use[1], use[2], mode[0], mode[1], i % 2, is, want);
        kn_zero_grad(&m);
    }
    kn_module_free(&m);
    return 0;
}

KN_TEST(zero_grad, a_backward_counts_where_it_brought_any_rank_a_gradient)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int own = OWN_NONE; own < OWNS; own++)
            KN_CHECK(kn_spawn_threads(ranks, counts, &own) == 0, "%d ranks", ranks);
}

typedef struct trees {
    kn_module base;
    branch a, b; /* a tree of units each; their root is one */
} trees;

static kn_tensor *trees_forward(kn_module *self, kn_tensor *x)
{
    trees *m = (trees *)self;
    return kn_call(&m->b, kn_call(&m->a, x));
}

/* A backward whose gradients wait, b's dropped or not, then one of both. Each tree counts those
 * that brought it any, on any rank. */
static int counts_of_trees(kn_comm *world, void *arg)
{
    trees m;
    EXPECT(branch_begin(&m.a, world, false, OWN_NONE) &&
           branch_begin(&m.b, world, false, OWN_NONE) && kn_module_init(&m.base, trees_forward) &&
           kn_module_add(&m.base, "a", &m.a.base) && kn_module_add(&m.base, "b", &m.b.base));
    for (int i = 0; i < 2 * 3 * USES * USES; i++) {
        int a = i / 6 % USES, b = i / 6 / USES, mode = i / 2 % 3;
        bool drops = i % 2, any_a = a != USED_BY_NONE, any_b = b != USED_BY_NONE && !drops;
        EXPECT(branch_set(&m.a, world, a, mode) && branch_set(&m.b, world, b, mode) &&
               branch_backward(&m));
        if (drops)
            kn_zero_grad(&m.b);
        EXPECT(branch_set(&m.a, world, USED_BY_ALL, SETTLES) &&
               branch_set(&m.b, world, USED_BY_ALL, SETTLES) && branch_backward(&m));
        double n = 1 / kn_grad_scale(&m.a) / kn_comm_size(world),
               n_b = 1 / kn_grad_scale(&m.b) / kn_comm_size(world);
        EXPECT(n == 1 + any_a && n_b == 1 + any_b, "%d %d, mode %d, drop %d: %g and %g", a, b, mode,
               drops, n, n_b);
        kn_zero_grad(&m);
    }
    kn_module_free(&m);
    (void)arg;
    return 0;
}

KN_TEST(zero_grad, trees_beside_each_other_count_a_backward_once)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        KN_CHECK(kn_spawn_threads(ranks, counts_of_trees, NULL) == 0, "%d ranks", ranks);
}

/* ---- parameters that no unit holds ----------------------------------------------------------- */

/* d is ignored: each rank steps it with its own gradient, as if it were alone. */
static int ignored_trains(kn_comm *world, void *arg)
{
    bool clip = *(const bool *)arg;
    int rank = kn_rank(world), n = kn_comm_size(world);
    gan m, alone;
    EXPECT(gan_init(&m) && kn_materialize(&m, KN_CPU, NET_SEED) &&
           kn_fsdp_wrap(&m, world, .ignore = "d.*"));
    EXPECT(gan_init(&alone) && kn_materialize(&alone, KN_CPU, NET_SEED));
    kn_optim *o = kn_sgd(&m, .lr = 0.5), *w = kn_sgd(&alone.d, .lr = 0.5);
    EXPECT(o && w && gan_backward(&m, rank) && gan_backward(&m, 20 + rank));
    EXPECT(gan_backward(&alone, rank) && gan_backward(&alone, 20 + rank));
    kn_scope scope = kn_scope_begin();
    double norm =
        clip ? kn_item(kn_clip_grad_norm(&m, 1e6)) : 0; /* measures, and steps by its factor */
    EXPECT((norm > 0) == clip);
    kn_scope_end(scope);
    EXPECT(kn_step(o) && kn_step(w), "%s", kn_error());
    for (int i = 2; i < 4; i++) {
        float x[12], y[12];
        const kn_param *p;
        kn_params(&m, &p);
        size_t bytes = (size_t)p[i].numel * sizeof *x;
        EXPECT(kn_to_host(p[i].tensor, x, bytes));
        kn_params(&alone, &p);
        EXPECT(kn_to_host(p[i].tensor, y, bytes));
        for (int k = 0; k < p[i].numel; k++) /* 1/3 isn't a float: off by a rounding */
            EXPECT(n == 3 ? fabsf(x[k] - y[k]) < 1e-6f : x[k] == y[k], "%d ranks: %g, not %g", n,
                   x[k], y[k]);
    }
    kn_optim_free(o);
    kn_optim_free(w);
    kn_module_free(&m);
    kn_module_free(&alone);
    return 0;
}

KN_TEST(zero_grad, ignored_parameters_keep_their_own_gradient)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int clip = 0; clip < 2; clip++) {
            bool on = clip;
            KN_CHECK(kn_spawn_threads(ranks, ignored_trains, &on) == 0, "%d ranks", ranks);
        }
}

/* ---- switched on after the list was made ----------------------------------------------------- */

KN_TEST(zero_grad, a_parameter_switched_on_later_is_stepped)
{
    gan m;
    KN_CHECK(gan_init(&m) && kn_materialize(&m, KN_CPU, NET_SEED));
    kn_tensor *w = kn_module_param(&m, "d.weight");
    KN_CHECK(kn_require_grad(w, false) && kn_param_count(&m) == 35); /* makes the list */
    kn_optim *o = kn_sgd(&m, .lr = 0.5);
    float before[12], after[12];
    KN_CHECK(kn_to_host(w, before, sizeof before) && kn_require_grad(w, true));
    KN_CHECK(gan_backward(&m, 0) && kn_step(o) && kn_to_host(w, after, sizeof after));
    KN_CHECK(memcmp(before, after, sizeof before) != 0 && !kn_grad(w), "the step left it alone");
    KN_CHECK(kn_require_grad(w, false) && gan_backward(&m, 0) && kn_step(o));
    KN_CHECK(kn_to_host(w, before, sizeof before) && memcmp(before, after, sizeof before) == 0);
    kn_optim_free(o);
    kn_module_free(&m);
}

/* ---- clearing by hand ------------------------------------------------------------------------ */

/* Drops the gradient of a.weight, in every state of waiting; the others stay. */
static int clear_by_hand(kn_comm *world, void *arg)
{
    bool sync = *(const bool *)arg;
    two m, want;
    kn_optim *o[2];
    for (int k = 0; k < 2; k++) {
        two *t = k ? &want : &m;
        EXPECT(two_init(t, KN_META, KN_F32) && kn_fsdp_wrap(t, world, .seed = NET_SEED));
        EXPECT((o[k] = kn_sgd(t, .lr = 1)) != NULL);
        EXPECT(kn_fsdp_set_gradient_sync(t, sync, true) && two_backward(t, kn_rank(world)));
        EXPECT(kn_fsdp_set_gradient_sync(t, true, true));
    }
    const kn_param *p, *q;
    int n = kn_params(&m, &p);
    kn_params(&want, &q);
    kn_clear_grad(p[0].tensor);
    EXPECT(kn_param_grad(&p[0]) == NULL && (!sync || kn_param_grad(&p[1]) != NULL));
    EXPECT(two_backward(&m, 7) && two_backward(&want, 7));
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_param_grad(&p[i]), *w = kn_param_grad(&q[i]);
        EXPECT(g && w);
        bool same = memcmp(kn_array_of(g).data, kn_array_of(w).data, (size_t)kn_numel(g) * 4) == 0;
        EXPECT(kn_numel(g) == 0 || same == (i > 0), "gradient of '%s'", p[i].name);
    }
    for (int i = 0; i < n; i++) /* all of them: no gradient and no count is left */
        kn_clear_grad(p[i].tensor);
    EXPECT(!kn_step(o[0]) && error_has("no parameter has a gradient", ""));
    for (int k = 0; k < 2; k++)
        kn_optim_free(o[k]);
    kn_module_free(&m);
    kn_module_free(&want);
    return 0;
}

KN_TEST(zero_grad, kn_clear_grad_drops_a_sharded_gradient)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int sync = 0; sync < 2; sync++) {
            bool on = sync;
            KN_CHECK(kn_spawn_threads(ranks, clear_by_hand, &on) == 0, "%d ranks, sync %d", ranks,
                     on);
        }
}
