/* tests/fsdp/counts_test.c: what divides a gradient, where the mechanisms that gradients pass
 * through meet: several losses, optimizers and communicators in a tree, parameters frozen between
 * micro-batches, trees that grow while gradients wait. Each against one process, or against the
 * gradients themselves. Rank functions return a status. */
#include "tests/fsdp/two.h"

/* ---- two parts that may be used apart -------------------------------------------------------- */

enum { USE_A = 1, USE_B = 2 };

typedef struct parts {
    kn_module base;
    kn_linear a, b; /* 4 -> 4 each */
    int use;
} parts;

/* All ranks make both calls; the result depends on those in use. */
static kn_tensor *parts_forward(kn_module *self, kn_tensor *x)
{
    parts *m = (parts *)self;
    kn_tensor *y = kn_call(&m->a, x), *z = kn_call(&m->b, m->use & USE_A ? kn_gelu_tanh(y) : x);
    return m->use & USE_B ? z : y;
}

static bool parts_init(parts *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, parts_forward) &&
           kn_linear_init(&m->a, &m->base, "a", 4, 4, .device = KN_META) &&
           kn_linear_init(&m->b, &m->base, "b", 4, 4, .device = KN_META);
}

static bool parts_backward(parts *m, int use, int micro)
{
    m->use = use;
    return two_backward(m, micro);
}

typedef enum wrapping {
    PLAIN,
    ONE_UNIT,
    UNITS,
    PER_PARAM,
    RAGGED,
    TREES, /* two trees of one unit each */
    WRAPPINGS
} wrapping;

static bool parts_begin(parts *m, kn_comm *world, wrapping w)
{
    if (!parts_init(m))
        return false;
    if (w == PLAIN)
        return kn_materialize(m, KN_CPU, NET_SEED);
    if (w == TREES)
        return kn_fsdp_wrap(&m->a, world, .seed = NET_SEED) &&
               kn_fsdp_wrap(&m->b, world, .seed = NET_SEED);
    return kn_fsdp_wrap(m, world, .seed = NET_SEED,
                        .layout = w == PER_PARAM ? KN_LAYOUT_PER_PARAM
                                  : w == RAGGED  ? KN_LAYOUT_RAGGED
                                                 : KN_LAYOUT_FLAT,
                        .wrap_class = w == ONE_UNIT ? NULL : "linear");
}

/* The largest difference of m's parameters and those of ref, by names that begin with part. */
static double distance(void *m, void *ref, const char *part)
{
    const kn_param *p;
    double far = 0;
    for (int i = 0, n = kn_params(ref, &p); i < n; i++) {
        float x[TWO_MOST], y[TWO_MOST];
        if (strncmp(p[i].name, part, strlen(part)) != 0)
            continue;
        if (!kn_param_read(m, i, x) || !kn_param_read(ref, i, y))
            return NAN;
        for (int64_t k = 0; k < p[i].numel; k++)
            far = fmax(far, fabs((double)x[k] - (double)y[k]));
    }
    return far;
}

static int on_all_ranks(int (*fn)(kn_comm *, void *), wrapping first)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (wrapping w = first; w < WRAPPINGS; w++)
            if (kn_spawn_threads(ranks, fn, &w) != 0)
                return kn_fail("%d ranks, wrapping %d", ranks, (int)w), 1;
    return 0;
}

/* ---- several losses -------------------------------------------------------------------------- */

/* w -= the gradient of one loss, by its own definition. */
KN_TEST(counts, a_loss_of_one_part_counts_for_that_part_alone)
{
    parts m;
    KN_CHECK(parts_begin(&m, NULL, PLAIN));
    kn_optim *a = kn_sgd(&m.a, .lr = 1), *b = kn_sgd(&m.b, .lr = 1);
    for (int clips = 0; clips < 2; clips++) {
        float grad[4][TWO_MOST], before[4][TWO_MOST], after[TWO_MOST];
        const kn_param *p;
        double sum = 0, factor = 1;
        KN_CHECK(parts_backward(&m, USE_A, 1) && parts_backward(&m, USE_B, 2) &&
                 parts_backward(&m, USE_B, 3));
        int n = kn_params(&m, &p);
        for (int i = 0; i < n; i++) {
            double of = p[i].name[0] == 'a' ? 1 : 2;
            KN_CHECK(kn_param_read(&m, i, before[i]) &&
                     kn_to_host(kn_param_grad(&p[i]), grad[i], (size_t)p[i].numel * 4));
            for (int64_t k = 0; k < p[i].numel; k++)
                sum += (double)grad[i][k] * (double)grad[i][k] / of / of;
        }
        if (clips) {
            double norm = kn_item(kn_clip_grad_norm(&m, 0.01));
            KN_CHECK(fabs(norm / sqrt(sum) - 1) < 1e-6, "%g, not %g", norm, sqrt(sum));
            factor = 0.01 / norm;
        }
        KN_CHECK(kn_step(a) && kn_step(b), "%s", kn_error());
        for (int i = 0; i < n; i++) {
            double of = p[i].name[0] == 'a' ? 1 : 2;
            KN_CHECK(kn_param_read(&m, i, after));
            for (int64_t k = 0; k < p[i].numel; k++)
                KN_CHECK(fabs((double)after[k] - (double)before[i][k] +
                              (double)grad[i][k] / of * factor) < 1e-6);
        }
    }
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
}

static bool two_losses(parts *m, int ranks, int rank, kn_optim *a, kn_optim *b)
{
    bool ok = true;
    for (int step = 0; step < 3 && ok; step++) {
        for (int use = USE_A; use <= USE_B; use++)
            for (int r = 0; r < ranks; r++)
                if (rank < 0 || rank == r)
                    ok = ok && parts_backward(m, use, 10 * step + 4 * use + r);
        if (step == 1)
            ok = ok && kn_item(kn_clip_grad_norm(m, 0.01)) > 0.01;
        ok = ok && kn_step(a) && kn_step(b);
    }
    return ok;
}

static int losses(kn_comm *world, void *arg)
{
    parts m, whole;
    int n = kn_comm_size(world);
    EXPECT(parts_begin(&m, world, *(wrapping *)arg) && parts_begin(&whole, NULL, PLAIN));
    kn_optim *o[4] = { kn_sgd(&m.a, .lr = 0.5), kn_sgd(&m.b, .lr = 0.5),
                       kn_sgd(&whole.a, .lr = 0.5), kn_sgd(&whole.b, .lr = 0.5) };
    EXPECT(two_losses(&m, n, kn_rank(world), o[0], o[1]) && two_losses(&whole, n, -1, o[2], o[3]),
           "%s", kn_error());
    EXPECT(all_read_as(&m, &whole));
    for (int i = 0; i < 4; i++)
        kn_optim_free(o[i]);
    kn_module_free(&m);
    kn_module_free(&whole);
    return 0;
}

KN_TEST(counts, two_losses_and_two_optimizers_are_as_in_one_process)
{
    KN_CHECK(on_all_ranks(losses, ONE_UNIT) == 0, "%s", kn_error());
}

/* ---- frozen between micro-batches ------------------------------------------------------------ */

/* Rank 0 alone (of two trees: all, which each must reach) reaches b, in a backward without sync or
 * in one whose forward came before b was frozen. Then a backward in which b is frozen, or none, and
 * b trains again before the step. */
static bool frozen_meanwhile(parts *m, kn_comm *world, bool frozen_first, bool reaches, int rank)
{
    bool ok = true;
    kn_scope scope = kn_scope_begin();
    m->use = reaches ? USE_A | USE_B : USE_A;
    kn_tensor *loss = two_loss(m, rank);
    if (frozen_first)
        kn_freeze(&m->b, true);
    ok = (!world || kn_fsdp_set_gradient_sync(m, frozen_first, true)) && kn_backward(loss);
    kn_scope_end(scope);
    return ok;
}

static int freezes(kn_comm *world, void *arg)
{
    int n = kn_comm_size(world), rank = kn_rank(world);
    wrapping w = *(wrapping *)arg;
    for (int frozen_first = 0; frozen_first < 2; frozen_first++) {
        parts m, whole;
        EXPECT(parts_begin(&m, world, w) && parts_begin(&whole, NULL, PLAIN));
        kn_optim *o = kn_sgd(&m, .lr = 1), *plain = kn_sgd(&whole, .lr = 1);
        for (int r = 0; r < n; r++) {
            kn_freeze(&whole.b, false);
            EXPECT(frozen_meanwhile(&whole, NULL, frozen_first, r == 0 || w == TREES, r));
        }
        EXPECT(frozen_meanwhile(&m, world, frozen_first, rank == 0 || w == TREES, rank), "%s",
               kn_error());
        kn_freeze(&whole.b, true);
        kn_freeze(&m.b, true);
        if (!frozen_first) {
            for (int r = 0; r < n; r++)
                EXPECT(parts_backward(&whole, USE_A | USE_B, 10 + r));
            EXPECT(kn_fsdp_set_gradient_sync(&m, true, true) &&
                       parts_backward(&m, USE_A | USE_B, 10 + rank),
                   "%s", kn_error());
        }
        kn_freeze(&whole.b, false);
        kn_freeze(&m.b, false);
        EXPECT(kn_step(o) && kn_step(plain), "%s", kn_error());
        double a = distance(&m, &whole, "a."), b = distance(&m, &whole, "b.");
        EXPECT(a < 1e-6 && b < 1e-6, "frozen first %d: a differs by %g, b by %g", frozen_first, a,
               b);
        kn_optim_free(o);
        kn_optim_free(plain);
        kn_module_free(&m);
        kn_module_free(&whole);
    }
    return 0;
}

KN_TEST(counts, gradients_of_what_is_frozen_meanwhile_stay)
{
    KN_CHECK(on_all_ranks(freezes, ONE_UNIT) == 0, "%s", kn_error());
}

/* ---- gradients of before --------------------------------------------------------------------- */

KN_TEST(counts, a_gradient_of_before_the_wrap_is_refused)
{
    parts m;
    KN_CHECK(parts_begin(&m, NULL, PLAIN) && parts_backward(&m, USE_B, 0));
    KN_CHECK(!kn_fsdp_wrap(&m, NULL));
    KN_CHECK_ERROR("'b.weight' holds a gradient of before it is sharded");
    kn_zero_grad(&m);
    KN_CHECK(kn_fsdp_wrap(&m, NULL), "%s", kn_error());
    kn_optim *o = kn_sgd(&m, .lr = 1);
    KN_CHECK(parts_backward(&m, USE_B, 0) && kn_grad_scale(&m) == 1 && kn_step(o));
    kn_optim_free(o);
    kn_module_free(&m);
}

/* Units, then a root around them while gradients wait; the next backward reaches one of them. */
static int late_root(kn_comm *world, void *arg)
{
    int n = kn_comm_size(world), rank = kn_rank(world);
    parts m, whole;
    EXPECT(parts_begin(&m, world, TREES) && parts_begin(&whole, NULL, PLAIN));
    EXPECT(kn_fsdp_set_gradient_sync(&m, false, true) && parts_backward(&m, USE_A | USE_B, rank));
    EXPECT(kn_fsdp_wrap(&m, world), "%s", kn_error());
    EXPECT(kn_fsdp_set_gradient_sync(&m, true, true) && parts_backward(&m, USE_A, 10 + rank));
    for (int r = 0; r < n; r++)
        EXPECT(parts_backward(&whole, USE_A | USE_B, r) && parts_backward(&whole, USE_A, 10 + r));
    EXPECT(kn_grad_scale(&m.a) * 2 * n == 1 && kn_grad_scale(&m.b) * n == 1, "%g %g",
           kn_grad_scale(&m.a), kn_grad_scale(&m.b));
    kn_optim *o = kn_sgd(&m, .lr = 1), *plain = kn_sgd(&whole, .lr = 1);
    EXPECT(kn_step(o) && kn_step(plain), "%s", kn_error());
    double far = distance(&m, &whole, "");
    EXPECT(far < 1e-6, "%g", far);
    kn_optim_free(o);
    kn_optim_free(plain);
    kn_module_free(&m);
    kn_module_free(&whole);
    (void)arg;
    return 0;
}

KN_TEST(counts, a_late_root_keeps_what_its_units_count)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        KN_CHECK(kn_spawn_threads(ranks, late_root, NULL) == 0, "%d ranks", ranks);
}

KN_TEST(counts, trees_with_gradients_of_other_backwards_do_not_merge)
{
    for (int together = 0; together < 2; together++) {
        two top, child;
        KN_CHECK(two_init(&top, KN_CPU, KN_F32) && two_init(&child, KN_CPU, KN_F32));
        KN_CHECK(two_backward(&child, 0) && two_backward(&child, 1));
        kn_zero_grad(&child);
        for (int i = 0; i < 3; i++) {
            kn_scope scope = kn_scope_begin();
            kn_tensor *loss = two_loss(&child, i);
            KN_CHECK(kn_backward(together ? kn_add(loss, two_loss(&top, i)) : loss));
            kn_scope_end(scope);
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

/* ---- what waits without a backward that would reduce it -------------------------------------- */

/* Nothing but the call reduces what waits; rank 0 alone has a gradient of b (of two trees: all). */
static int one_reached(kn_comm *world, void *arg)
{
    int n = kn_comm_size(world), rank = kn_rank(world);
    for (int how = 0; how < 3; how++) {
        parts m, whole;
        wrapping w = *(wrapping *)arg;
        EXPECT(parts_begin(&m, world, w) && parts_begin(&whole, NULL, PLAIN));
        kn_optim *o = kn_sgd(&m, .lr = 1), *plain = kn_sgd(&whole, .lr = 1);
        EXPECT(how == 0   ? kn_fsdp_set_gradient_sync(&m, false, true)
               : how == 1 ? kn_fsdp_set_is_last_backward(&m, false)
                          : kn_fsdp_set_all_reduce(&m, false, true));
        EXPECT(parts_backward(&m, rank == 0 || w == TREES ? USE_A | USE_B : USE_A, rank));
        for (int r = 0; r < n; r++)
            EXPECT(parts_backward(&whole, r == 0 || w == TREES ? USE_A | USE_B : USE_A, r));
        if (how == 0 && w == TREES) { /* the last backward comes to one of them */
            EXPECT(kn_fsdp_set_gradient_sync(&m, true, true) &&
                   parts_backward(&m, USE_A, 20 + rank));
            for (int r = 0; r < n; r++)
                EXPECT(parts_backward(&whole, USE_A, 20 + r));
        }
        EXPECT(kn_fsdp_reduce_grads(&m) && kn_step(o) && kn_step(plain), "way %d: %s", how,
               kn_error());
        double far = distance(&m, &whole, "");
        EXPECT(far < 1e-6, "way %d: %g", how, far);
        EXPECT(n > 1 || how == 2 || w == TREES ||
                   (parts_backward(&m, USE_A | USE_B, rank) && !kn_step(o)),
               "the switches are as they were");
        kn_clear_error();
        kn_optim_free(o);
        kn_optim_free(plain);
        kn_module_free(&m);
        kn_module_free(&whole);
    }
    return 0;
}

KN_TEST(counts, gradients_that_wait_are_reduced_without_a_backward)
{
    KN_CHECK(on_all_ranks(one_reached, ONE_UNIT) == 0, "%s", kn_error());
}

/* ---- gradients as users see them ------------------------------------------------------------- */

/* An edit in place holds, whatever the unit's divide factor; measuring a clipped gradient leaves it
 * clipped. */
static int edits(kn_comm *world, void *arg)
{
    parts m;
    const kn_param *p;
    float before[TWO_MOST], after[TWO_MOST];
    EXPECT(parts_begin(&m, world, *(wrapping *)arg));
    if (m.b.base.impl->unit)
        EXPECT(kn_fsdp_set_divide_factor(&m.b, 3, false));
    kn_optim *o = kn_sgd(&m, .lr = 1);
    EXPECT(parts_backward(&m, USE_A | USE_B, kn_rank(world)));
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++) {
        EXPECT(kn_param_read(&m, i, before));
        kn_tensor *g = kn_param_grad(&p[i]);
        EXPECT(g && kn_fill_(g, 0));
    }
    parts same;
    EXPECT(parts_begin(&same, world, *(wrapping *)arg));
    EXPECT(kn_step(o));
    for (int i = 0; i < n; i++)
        EXPECT(kn_param_read(&m, i, after) && kn_param_read(&same, i, before) &&
                   memcmp(before, after, (size_t)p[i].numel * sizeof *before) == 0,
               "%s moved", p[i].name);
    kn_optim_free(o);
    kn_module_free(&m);
    kn_module_free(&same);
    return 0;
}

KN_TEST(counts, an_edit_of_a_gradient_holds)
{
    KN_CHECK(on_all_ranks(edits, ONE_UNIT) == 0, "%s", kn_error());
}

static int measures(kn_comm *world, void *arg)
{
    parts m[2];
    for (int k = 0; k < 2; k++) {
        EXPECT(parts_begin(&m[k], world, *(wrapping *)arg));
        kn_optim *o = kn_sgd(&m[k], .lr = 1);
        EXPECT(parts_backward(&m[k], USE_A | USE_B, kn_rank(world)));
        double norm = kn_item(kn_clip_grad_norm(&m[k], 1e-3));
        EXPECT(norm > 1e-3);
        if (k)
            EXPECT(kn_item(kn_clip_grad_norm(&m[k], 0)) == norm &&
                   kn_item(kn_clip_grad_norm(&m[k].b, 0)) < norm && !kn_find_nonfinite_grad(&m[k]));
        EXPECT(kn_step(o));
        kn_optim_free(o);
    }
    EXPECT(distance(&m[0], &m[1], "") == 0);
    kn_module_free(&m[0]);
    kn_module_free(&m[1]);
    return 0;
}

KN_TEST(counts, measuring_leaves_a_clipped_step_clipped)
{
    KN_CHECK(on_all_ranks(measures, ONE_UNIT) == 0, "%s", kn_error());
}

/* ---- several communicators in a tree --------------------------------------------------------- */

/* a is sharded over all ranks, b over pairs: neighbours, or every other rank; a or b is wrapped
 * first. */
static bool mixed_begin(parts *m, kn_comm *world, int how)
{
    int rank = kn_rank(world);
    kn_comm *pair = kn_comm_split(world, how & 1 ? rank % 2 : rank / 2, rank, "pair");
    for (int k = 0; pair && k < 2; k++) {
        bool of_a = (k == 0) == !(how & 2);
        if (k == 0 && !parts_init(m))
            return false;
        if (!kn_fsdp_wrap(of_a ? &m->a : &m->b, of_a ? world : pair, .seed = NET_SEED))
            return false;
    }
    return pair != NULL;
}

/* The 2-norm of all parts that any rank holds, of means. Collective. */
static double norm_of_parts(parts *m, kn_comm *world)
{
    const kn_param *p;
    float sum = 0, all[4];
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_param_grad(&p[i]);
        double scale = kn_grad_scale(p[i].name[0] == 'a' ? &m->a : &m->b);
        float v[TWO_MOST];
        if (!g || !kn_to_host(g, v, (size_t)kn_numel(g) * sizeof *v))
            return NAN;
        for (int64_t k = 0; k < kn_numel(g); k++)
            sum += (float)((double)v[k] * scale * (double)v[k] * scale);
    }
    if (!kn_all_gather(world, all, &sum, 1, KN_F32, kn_compute_stream(KN_CPU), "test"))
        return NAN;
    return sqrt((double)all[0] + (double)all[1] + (double)all[2] + (double)all[3]);
}

static int mixed(kn_comm *world, void *arg)
{
    int rank = kn_rank(world);
    for (int how = 0; how < 4; how++) {
        parts m;
        const kn_param *p;
        float before[4][TWO_MOST], v[TWO_MOST];
        EXPECT(mixed_begin(&m, world, how), "way %d: %s", how, kn_error());
        kn_optim *o = kn_sgd(&m, .lr = 1);
        kn_scaler *s = kn_scaler_new(&m, .init_scale = 256);
        EXPECT(parts_backward(&m, USE_A | USE_B, rank));
        double want = norm_of_parts(&m, world), norm = kn_item(kn_clip_grad_norm(&m, 1e-3));
        EXPECT(fabs(norm / want - 1) < 1e-5, "way %d: %g, not %g", how, norm, want);
        EXPECT(kn_step(o));
        /* the ranks of a pair that hold no part of what overflows skip the step as well */
        int n = kn_params(&m, &p);
        for (int i = 0; i < n; i++)
            EXPECT(kn_param_read(&m, i, before[i]));
        m.use = USE_A | USE_B;
        kn_scope scope = kn_scope_begin();
        EXPECT(kn_backward(kn_scale_loss(s, two_loss(&m, rank))));
        kn_scope_end(scope);
        for (int i = 0; i < n && rank == 3; i++)
            if (p[i].name[0] == 'b' && kn_numel(p[i].master) > 0)
                EXPECT(kn_fill_(kn_param_grad(&p[i]), INFINITY));
        const char *name = kn_find_nonfinite_grad(&m);
        EXPECT(name && name[0] == 'b', "way %d", how);
        EXPECT(kn_scaler_step(s, o), "%s", kn_error());
        EXPECT(kn_scaler_get(s).scale == 128 && kn_optim_steps(o) == 1);
        for (int i = 0; i < n; i++)
            EXPECT(kn_param_read(&m, i, v) &&
                   memcmp(v, before[i], (size_t)p[i].numel * sizeof *v) == 0);
        kn_scaler_free(s);
        kn_optim_free(o);
        kn_module_free(&m);
    }
    (void)arg;
    return 0;
}

KN_TEST(counts, norms_and_scales_go_over_all_ranks_of_a_tree)
{
    KN_CHECK(kn_spawn_threads(4, mixed, NULL) == 0);
}
