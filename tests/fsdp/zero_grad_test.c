/* tests/fsdp/zero_grad_test.c: which backwards a gradient counts, where some bring none, or a
 * parameter has no unit (acts.h has the rest). Rank functions return a status. */
#include "tests/fsdp/two.h"

/* ---- backwards that bring nothing ------------------------------------------------------------ */

/* All is frozen while a loss goes through it: it counts no micro-batch. */
RANK_TEST(zero_grad, a_backward_through_frozen_parameters_counts_nothing, .threads = "12")
{
    TWO_WRAPPED(m, world, .wrap_class = "linear", .seed = NET_SEED);
    kn_freeze(&m, true);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4)), true);
    KN_CHECK(kn_backward(mean_of(kn_call(&m, x))) && kn_grad(x) != NULL);
    kn_scope_end(scope);
    KN_CHECK(kn_grad_scale(&m) == 1, "%g", kn_grad_scale(&m));
    kn_freeze(&m, false);
    KN_CHECK(two_backward(&m, 0) && kn_grad_scale(&m) * kn_comm_size(world) == 1);
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
    IN_SCOPE;
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4)), true);
    return kn_backward(sum_of(kn_call(m, x)));
}

/* All programs of three backwards, of which the last one settles, after each other; under
 * AddressSanitizer one in 7. */
static void counts(kn_comm *world, void *arg)
{
    int own = *(const int *)arg, modes = kn_comm_size(world) == 4 ? MODES : NO_ALL_REDUCE,
        each = USES * modes, programs = 2 * each * each * USES;
    OWNED_MODULE branch m;
    KN_CHECK(branch_begin(&m, world, modes == MODES, own));
    for (int i = 0; i < programs; i += kn_one_in(7)) {
        int use[3] = { i / 2 % USES, i / 2 / USES % USES, i / 2 / USES / USES % USES };
        int mode[3] = { i / 2 / 27 % modes, i / 2 / 27 / modes, SETTLES }, brought = 0;
        KN_CHECK(kn_fsdp_set_reduce_unused(&m, i % 2, true));
        for (int k = 0; k < 3; k++) {
            KN_CHECK(branch_set(&m, world, use[k], mode[k]) && branch_backward(&m));
            brought += use[k] != USED_BY_NONE;
        }
        double want = brought ? 1.0 / brought / kn_comm_size(world) : 1, is = kn_grad_scale(&m);
        KN_CHECK(is == want, "own %d, uses %d %d %d, modes %d %d, unused %d: %g, not %g", own,
                 use[0], use[1], use[2], mode[0], mode[1], i % 2, is, want);
        kn_zero_grad(&m);
    }
}

KN_TEST(zero_grad, a_backward_counts_where_it_brought_any_rank_a_gradient)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int own = OWN_NONE; own < OWNS; own++)
            KN_CHECK(spawn_threads(ranks, counts, &own) == 0, "%d ranks", ranks);
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
RANK_TEST(zero_grad, trees_beside_each_other_count_a_backward_once, .threads = "124")
{
    OWNED_MODULE trees m;
    KN_CHECK(branch_begin(&m.a, world, false, OWN_NONE) &&
             branch_begin(&m.b, world, false, OWN_NONE) && kn_module_init(&m.base, trees_forward) &&
             kn_module_add(&m.base, "a", &m.a.base) && kn_module_add(&m.base, "b", &m.b.base));
    for (int i = 0; i < 2 * 3 * USES * USES; i++) {
        int a = i / 6 % USES, b = i / 6 / USES, mode = i / 2 % 3;
        bool drops = i % 2, any_a = a != USED_BY_NONE, any_b = b != USED_BY_NONE && !drops;
        KN_CHECK(branch_set(&m.a, world, a, mode) && branch_set(&m.b, world, b, mode) &&
                 branch_backward(&m));
        if (drops)
            kn_zero_grad(&m.b);
        KN_CHECK(branch_set(&m.a, world, USED_BY_ALL, SETTLES) &&
                 branch_set(&m.b, world, USED_BY_ALL, SETTLES) && branch_backward(&m));
        double n = 1 / kn_grad_scale(&m.a) / kn_comm_size(world),
               n_b = 1 / kn_grad_scale(&m.b) / kn_comm_size(world);
        KN_CHECK(n == 1 + any_a && n_b == 1 + any_b, "%d %d, mode %d, drop %d: %g and %g", a, b,
                 mode, drops, n, n_b);
        kn_zero_grad(&m);
    }
}

KN_TEST(zero_grad, trees_with_gradients_of_other_backwards_do_not_merge)
{
    for (int together = 0; together < 2; together++) {
        two top, child;
        KN_CHECK(two_init(&top, KN_CPU, KN_F32) && two_init(&child, KN_CPU, KN_F32));
        KN_CHECK(two_backward(&child, 0) && two_backward(&child, 1));
        kn_zero_grad(&child);
        for (int i = 0; i < 3; i++) {
            IN_SCOPE;
            kn_tensor *loss = two_loss(&child, i);
            KN_CHECK(kn_backward(together ? kn_add(loss, two_loss(&top, i)) : loss));
        }
        KN_CHECK(together || two_backward(&top, 0));
        bool added = kn_module_add(&top.base, "child", &child.base);
        KN_CHECK(added == together);
        if (together) {
            KN_CHECK(fabs(kn_grad_scale(&top) * 3 - 1) < 1e-12);
        } else {
            KN_CHECK_ERROR("hold gradients of different backwards");
        }
        kn_module_free(&top);
    }
}

/* ---- parameters that no unit holds ----------------------------------------------------------- */

/* b is ignored: each rank steps it with its own gradient, as if it were alone. */
static void ignored_trains(kn_comm *world, void *arg)
{
    bool clip = *(const bool *)arg;
    int rank = kn_rank(world), n = kn_comm_size(world);
    TWO_WHOLE(m);
    KN_CHECK(kn_fsdp_wrap(&m, world, .ignore = "b.*"));
    TWO_WHOLE(alone);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.5), *w = kn_sgd(&alone.b, .lr = 0.5);
    KN_CHECK(o && w && two_backward(&m, rank) && two_backward(&m, 20 + rank));
    KN_CHECK(two_backward(&alone, rank) && two_backward(&alone, 20 + rank));
    kn_scope scope = kn_scope_begin();
    double norm =
        clip ? kn_item(kn_clip_grad_norm(&m, 1e6)) : 0; /* measures, and steps by its factor */
    KN_CHECK((norm > 0) == clip);
    kn_scope_end(scope);
    KN_CHECK(kn_step(o) && kn_step(w));
    for (int i = 2; i < 4; i++) {
        float x[TWO_MOST], y[TWO_MOST];
        const kn_param *p;
        kn_params(&m, &p);
        size_t bytes = (size_t)p[i].numel * sizeof *x;
        KN_CHECK(kn_to_host(p[i].tensor, x, bytes));
        kn_params(&alone, &p);
        KN_CHECK(kn_to_host(p[i].tensor, y, bytes));
        for (int k = 0; k < p[i].numel; k++) /* 1/3 isn't a float: off by a rounding */
            KN_CHECK(n == 3 ? fabsf(x[k] - y[k]) < 1e-6f : x[k] == y[k], "%d ranks: %g, not %g", n,
                     x[k], y[k]);
    }
}

KN_TEST(zero_grad, ignored_parameters_keep_their_own_gradient)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int clip = 0; clip < 2; clip++) {
            bool on = clip;
            KN_CHECK(spawn_threads(ranks, ignored_trains, &on) == 0, "%d ranks", ranks);
        }
}

/* ---- switched on after the list was made ----------------------------------------------------- */

KN_TEST(zero_grad, a_parameter_switched_on_later_is_stepped)
{
    TWO_WHOLE(m);
    kn_tensor *w = kn_module_param(&m, "b.weight");
    KN_CHECK(kn_require_grad(w, false) && kn_param_count(&m) == 49); /* makes the list */
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.5);
    float before[TWO_MOST], after[TWO_MOST];
    KN_CHECK(kn_to_host(w, before, sizeof before) && kn_require_grad(w, true));
    KN_CHECK(two_backward(&m, 0) && kn_step(o) && kn_to_host(w, after, sizeof after));
    KN_CHECK(memcmp(before, after, sizeof before) != 0 && !kn_grad(w), "the step left it alone");
    KN_CHECK(kn_require_grad(w, false) && two_backward(&m, 0) && kn_step(o));
    KN_CHECK(kn_to_host(w, before, sizeof before) && memcmp(before, after, sizeof before) == 0);
}
