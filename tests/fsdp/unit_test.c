/* tests/fsdp/unit_test.c: one test named after each capability of units: what may be a unit, and
 * control flow through units. Against the plain reference (matrix.h). */
#include "tests/fsdp/matrix.h"
#include "tests/fsdp/two.h"

/* ---- parameters ------------------------------------------------------------------------------ */

KN_TEST(unit, tied_across_units)
{
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
        for (int r = KN_RESHARD_NEVER; r <= KN_RESHARD_ALWAYS; r++)
            MATRIX_CHECK(.model = MATRIX_ODD, .o = { .strategy = s, .reshard_after_forward = r });
    MATRIX_CHECK(.model = MATRIX_GPT, .ranks = 3); /* head and embedding in the root */
}

/* wte in a unit of its own: the head in the root uses it after the embedding released its unit. */
KN_TEST(unit, tied_embedding_in_a_unit_of_its_own)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        MATRIX_CHECK(.ranks = ranks, .o.wrap_class = "gpt_block,embedding");
}

KN_TEST(unit, frozen_in_a_unit)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int l = KN_LAYOUT_FLAT; l <= KN_LAYOUT_RAGGED; l++)
            MATRIX_CHECK(.model = MATRIX_ODD, .ranks = ranks, .steps = 2, .o.layout = l);
}

/* All of a unit is frozen: it has no gradients at all, but passes gradients on to the units before
 * it. */
KN_TEST(unit, a_frozen_unit)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int ranks = 1; ranks <= 3; ranks++)
            MATRIX_CHECK(.model = m, .ranks = ranks, .frozen = 1 + ranks % 2,
                         .o = { .strategy = KN_FULL_SHARD + ranks % 3,
                                .forward_prefetch = ranks == 2,
                                .keep_whole_below = ranks == 3 ? 20 : 0 });
    MATRIX_CHECK(.model = MATRIX_TURN, .frozen = 3, .recompute = true, .rounds = 4, .skip_sync = 5);
}

KN_TEST(unit, parameters_without_gradient)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .spare = true);
        MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .spare = true, .skip_sync = 1,
                     .o.layout = KN_LAYOUT_PER_PARAM);
    }
}

/* Experts: the data select the used parameters of a unit, so ranks differ; a parameter has a
 * gradient everywhere if it has one anywhere. */
KN_TEST(unit, gradient_on_some_ranks_only)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
            MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .rounds = 1, .spare = true,
                         .by_data = true, .o.strategy = s);
    MATRIX_CHECK(.model = MATRIX_TURN, .ranks = 4, .spare = true, .by_data = true, .skip_sync = 1,
                 .recompute = true,
                 .o = { .strategy = KN_HYBRID_SHARD,
                        .mesh = { .shards = 2 },
                        .layout = KN_LAYOUT_PER_PARAM });
    MATRIX_CHECK(.model = MATRIX_TURN, .ranks = 3, .spare = true, .by_data = true, .rounds = 4,
                 .skip_sync = 5, .workers = true, .o.keep_whole_below = 20);
}

static bool ignore_frozen(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    kn_fsdp_wrap_options o = matrix_options(s);
    o.wrap_class = matrix_wrap_class(s->model);
    o.ignore = "*.frozen,no.such";
    const kn_param *p;
    bool ok = kn_fsdp_wrap_(n->root, world, o) && kn_materialize(n->root, KN_CPU, 42);
    int found = 0, params = kn_params(n->root, &p);
    for (int i = 0; i < params; i++)
        if (strstr(p[i].name, ".frozen"))
            found += kn_numel(p[i].master) == p[i].numel;
    return ok && (found == 2 || kn_fail("%d ignored parameters are whole, not 2", found));
}

KN_TEST(unit, ignored_parameters)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        MATRIX_CHECK(.model = MATRIX_ODD, .ranks = ranks, .wrap = ignore_frozen);
}

/* ---- which modules are units ----------------------------------------------------------------- */

static bool count_units(matrix_net *n, int want)
{
    kn_module *list[16];
    int got = kn_fsdp_units(n->root, list, 16);
    return got == want || kn_fail("%d units, not %d", got, want);
}

static bool one_unit(matrix_net *n, const matrix_spec *s)
{
    (void)s;
    return count_units(n, 1);
}

KN_TEST(unit, whole_model)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .whole = true, .prepare = one_unit);
}

static bool by_hand(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    for (int i = 0; i < 2; i++)
        if (!kn_fsdp_wrap_(matrix_block(n, i), world, matrix_options(s)))
            return false;
    return kn_fsdp_wrap_(n->root, world, matrix_options(s)) && count_units(n, 3);
}

KN_TEST(unit, wrapped_by_hand)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .wrap = by_hand);
}

static bool grouped(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    int blocks = s->model == MATRIX_TURN ? 4 : 2;
    for (int i = 0; i < blocks; i += 2) {
        kn_module *pair[2] = { matrix_block(n, i), matrix_block(n, i + 1) };
        if (!kn_fsdp_wrap_group_(pair, 2, world, matrix_options(s)))
            return false;
    }
    return kn_fsdp_wrap_(n->root, world, matrix_options(s)) && count_units(n, 1 + blocks / 2);
}

KN_TEST(unit, group_of_modules)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        MATRIX_CHECK(.model = MATRIX_GPT, .ranks = ranks, .wrap = grouped);
        MATRIX_CHECK(.model = MATRIX_ODD, .ranks = ranks, .wrap = grouped,
                     .o = { .forward_prefetch = true, .backward_prefetch = KN_PREFETCH_POST });
        MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .wrap = grouped,
                     .only_turn = 1 + TURN_ALL);
    }
}

/* Members are skipped, used twice and called in another order. */
KN_TEST(unit, group_with_changing_control_flow)
{
    for (int turn = 0; turn <= 4; turn++)
        MATRIX_CHECK(.model = MATRIX_TURN, .wrap = grouped, .only_turn = turn,
                     .recompute = turn % 2, .evaluate = true);
}

/* Sibling trees, two of them with a group as their root, of which one member or both run. */
static bool groups_as_roots(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    for (int i = 0; i < 4; i += 2) {
        kn_module *pair[2] = { matrix_block(n, i), matrix_block(n, i + 1) };
        if (!kn_fsdp_wrap_group_(pair, 2, world, matrix_options(s)))
            return false;
    }
    return kn_fsdp_wrap_(&n->turn.embed, world, matrix_options(s)) &&
           kn_fsdp_wrap_(&n->turn.head, world, matrix_options(s));
}

KN_TEST(unit, a_root_group_of_which_a_part_runs)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int turn = 0; turn <= 1 + TURN_TWICE; turn++)
            MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .wrap = groups_as_roots,
                         .workers = turn == 1, .only_turn = turn);
}

/* Blocks are units; the second has a layout, a strategy and a prefetch of its own. */
static bool policy(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                   void *arg)
{
    if (recurse)
        return strcmp(kn_module_path(m), "embed") != 0;
    if (unclaimed < 100 || !strstr(arg, kn_module_class(m)))
        return false;
    if (strstr(kn_module_path(m), "1") || strstr(kn_module_path(m), "second")) {
        o->layout = KN_LAYOUT_PER_PARAM;
        o->strategy = KN_SHARD_GRAD_OP;
        o->backward_prefetch = KN_PREFETCH_NONE;
    }
    return true;
}

static bool three_units(matrix_net *n, const matrix_spec *s)
{
    (void)s;
    return count_units(n, 3);
}

KN_TEST(unit, user_policy_and_overrides)
{
    for (int ranks = 2; ranks <= 3; ranks++) {
        MATRIX_CHECK(.model = MATRIX_GPT, .ranks = ranks, .prepare = three_units,
                     .o = { .policy = policy, .policy_arg = "gpt_block" });
        MATRIX_CHECK(.model = MATRIX_ODD, .ranks = ranks, .prepare = three_units,
                     .o = {
                         .policy = policy, .policy_arg = "odd_block", .forward_prefetch = true });
    }
}

KN_TEST(unit, size_policy)
{
    MATRIX_CHECK(.model = MATRIX_GPT, .prepare = three_units, .o.min_params = 1500);
    MATRIX_CHECK(.model = MATRIX_ODD, .prepare = three_units, .o.min_params = 150);
    MATRIX_CHECK(.model = MATRIX_GPT, .o.min_params = 600); /* units inside blocks */
}

/* Units inside units: the outer one holds the remaining parameters. */
static bool nested(matrix_net *n, const matrix_spec *s)
{
    return count_units(n, s->model == MATRIX_GPT ? 1 + 2 * (3 + 4) : 1 + 1 + 4 * 2);
}

KN_TEST(unit, nested_units)
{
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++) {
        MATRIX_CHECK(.model = MATRIX_GPT, .ranks = 3, .prepare = nested,
                     .o = { .strategy = s, .wrap_class = "gpt_block,self_attention,mlp,linear" });
        MATRIX_CHECK(.model = MATRIX_TURN, .prepare = nested,
                     .o = { .strategy = s,
                            .wrap_class = "turn_block,linear",
                            .forward_prefetch = true,
                            .max_gathers = 1 });
    }
}

/* ---- control flow ---------------------------------------------------------------------------- */

static void check_turn(int turn)
{
    for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
        MATRIX_CHECK(.model = MATRIX_TURN, .only_turn = 1 + turn, .rounds = 3,
                     .o = { .backward_prefetch = p, .forward_prefetch = p != KN_PREFETCH_NONE });
    MATRIX_CHECK(.model = MATRIX_TURN, .only_turn = 1 + turn, .recompute = true, .workers = true);
}

KN_TEST(unit, module_used_twice)
{
    check_turn(TURN_TWICE);
    MATRIX_CHECK(.model = MATRIX_TURN, .only_turn = 1 + TURN_TWICE, .skip_sync = 1,
                 .o = { .strategy = KN_SHARD_GRAD_OP });
}

/* b is skipped in some rounds: its gradients of the others must not wait or get lost. */
KN_TEST(unit, branch_skips_a_unit)
{
    for (unsigned skip = 0; skip < 8; skip++)
        MATRIX_CHECK(.model = MATRIX_TURN, .rounds = 4, .skip_sync = skip);
    MATRIX_CHECK(.model = MATRIX_TURN, .ranks = 4, .rounds = 4, .skip_all_reduce = 7,
                 .o = { .strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 } });
}

KN_TEST(unit, changed_order)
{
    for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
        for (int most = 1; most <= 4; most += 3)
            MATRIX_CHECK(.model = MATRIX_TURN, .rounds = 1, .steps = 4,
                         .o = { .backward_prefetch = p,
                                .forward_prefetch = true,
                                .max_gathers = most });
    check_turn(TURN_SWAPPED);
}

KN_TEST(unit, two_forwards_before_backward)
{
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++) {
        MATRIX_CHECK(.model = MATRIX_TURN, .pairs = true, .rounds = 4, .o.strategy = s);
        MATRIX_CHECK(.model = MATRIX_ODD, .pairs = true, .o.strategy = s);
    }
    MATRIX_CHECK(.model = MATRIX_ODD, .pairs = true, .recompute = true, .workers = true,
                 .o.forward_prefetch = true);
}

KN_TEST(unit, entry_points_other_than_forward)
{
    check_turn(TURN_ENTER);
}

/* The inner call's end must not release what the outer one still needs. */
KN_TEST(unit, module_called_inside_itself)
{
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
        for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
            MATRIX_CHECK(.model = MATRIX_TURN, .only_turn = 1 + TURN_NESTED, .recompute = p % 2,
                         .o = { .strategy = s, .backward_prefetch = p, .forward_prefetch = true });
}

static bool recompute_inside(matrix_net *n, kn_comm *world, const matrix_spec *s)
{
    kn_fsdp_wrap_options o = matrix_options(s);
    o.wrap_class = matrix_wrap_class(s->model);
    if (s->model == MATRIX_TURN)
        for (int i = 0; i < 4; i++)
            kn_recompute(&n->turn.block[i].fc, true);
    else
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < kn_module_children(matrix_block(n, i)); k++)
                kn_recompute(kn_module_child(matrix_block(n, i), k), true);
    return kn_fsdp_wrap_(n->root, world, o);
}

KN_TEST(unit, recompute_inside_and_outside_units)
{
    for (int m = 0; m < MATRIX_MODELS; m++) {
        MATRIX_CHECK(.model = m, .wrap = recompute_inside, .rounds = 3);
        MATRIX_CHECK(.model = m, .recompute = true, .o.forward_prefetch = true); /* on units */
    }
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++) { /* the recomputed block holds units */
        MATRIX_CHECK(.recompute = true,
                     .o = { .strategy = s, .wrap_class = "self_attention,mlp,layer_norm" });
        MATRIX_CHECK(.model = MATRIX_TURN, .recompute = true,
                     .o = { .strategy = s, .wrap_class = "linear" });
        MATRIX_CHECK(.model = MATRIX_ODD, .recompute = true, .workers = true,
                     .o = { .strategy = s, .wrap_class = "odd_block,linear" });
    }
}

/* ---- one unit by itself ---------------------------------------------------------------------- */

/* A loss of a parameter that the user gathered: no module was called. What a backward that isn't
 * the last one brings it is held back as that of a call. */
static int outside_any_call(kn_comm *world, void *arg)
{
    two m, plain, *both[2] = { &plain, &m };
    const kn_param *p;
    (void)arg;
    EXPECT(two_init(&plain, KN_META, KN_F32) && kn_materialize(&plain, KN_CPU, NET_SEED));
    EXPECT(two_init(&m, KN_META, KN_F32) &&
           kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = NET_SEED));
    kn_optim *a = kn_sgd(&plain, .lr = 0.1), *b = kn_sgd(&m, .lr = 0.1);
    kn_scope scope = kn_scope_begin();
    for (int last = 0; last < 2; last++) {
        EXPECT(kn_unshard_wait(kn_fsdp_unshard(&m.a)) && kn_fsdp_set_is_last_backward(&m, last));
        for (int i = 0; i < 2; i++) {
            kn_tensor *w = kn_module_param(&both[i]->a, "weight");
            EXPECT(kn_backward(kn_sum(kn_mul(w, w), 0, NULL, false)));
        }
        EXPECT(kn_params(&m, &p) == 4 && (p[0].source->held_back(&p[0]) == NULL) == last, "last %d",
               last);
    }
    EXPECT(kn_grad_scale(&m) == 0.5 / kn_comm_size(world));
    EXPECT(kn_step(a) && kn_step(b));
    EXPECT(all_read_as(&m, &plain));
    kn_scope_end(scope);
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

KN_TEST(unit, a_parameter_used_outside_any_call)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        on_ranks(ranks, outside_any_call, NULL);
}

/* The replay of the root is not a second forward: each unit begins and ends once. */
KN_TEST(unit, a_root_that_recomputes_records_its_order)
{
    two m;
    KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m, NULL, .wrap_class = "linear"));
    kn_recompute(&m, true);
    kn_scope scope = kn_scope_begin();
    KN_CHECK(two_loss(&m, 0), "%s", kn_error());
    int visits = kn_unit_of(m.base.impl)->schedule->order.visits;
    KN_CHECK(visits == 4, "%d visits", visits);
    kn_scope_end(scope);
    kn_module_free(&m);
}

/* Modules are freed while gathers run on workers: no access may follow (valgrind, TSan). */
static int gone(kn_comm *world, void *arg)
{
    (void)arg;
    kn_set_free_cores(2);
    for (int i = 0; i < 5; i++) {
        two m;
        EXPECT(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m, world, .wrap_class = "linear"));
        kn_comm_slow(world, 0.002, 0);
        kn_fsdp_unshard(&m.a);
        kn_fsdp_unshard(&m.b);
        kn_module_free(&m);
    }
    return kn_ok() ? 0 : 1;
}

KN_TEST(unit, modules_freed_while_a_gather_runs_on_a_worker_thread)
{
    KN_CHECK(kn_spawn_threads(2, gone, NULL) == 0);
}

/* ---- one parameter twice in an operation ----------------------------------------------------- */

typedef struct turned {
    kn_module base;
    kn_tensor *w; /* [3, 3] */
} turned;

static kn_tensor *turned_twice(kn_module *self, kn_tensor *x)
{
    turned *m = (turned *)self;
    return kn_matmul(x, kn_matmul(m->w, m->w));
}

static bool turned_backward(turned *m)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *y = kn_call(m, kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(2, 3)));
    bool ok = kn_backward(kn_sum(kn_mul(y, y), 0, NULL, false));
    kn_scope_end(s);
    return ok;
}

/* Both gradients of a product of a parameter with itself come to its place. */
static int multiplied_by_itself(kn_comm *world, void *arg)
{
    turned m[2];
    float w[2][9];
    (void)arg;
    for (int k = 0; k < 2; k++) {
        EXPECT(kn_module_init(&m[k].base, turned_twice));
        m[k].w = kn_parameter(&m[k], "w", KN_F32, KN_META, KN_NORMAL_INIT(0.5), KN_SHAPE(3, 3));
        EXPECT(k ? kn_materialize(&m[k], KN_CPU, NET_SEED)
                 : kn_fsdp_wrap(&m[k], world, .seed = NET_SEED),
               "%s", kn_error());
        kn_optim *o = kn_sgd(&m[k], .lr = 0.25);
        EXPECT(turned_backward(&m[k]) && kn_step(o) && kn_param_read(&m[k], 0, w[k]), "%s",
               kn_error());
        kn_optim_free(o);
        kn_module_free(&m[k]);
    }
    EXPECT(memcmp(w[0], w[1], sizeof w[0]) == 0, "%g, expected %g", (double)w[0][0],
           (double)w[1][0]);
    return 0;
}

KN_TEST(unit, a_parameter_multiplied_by_itself)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        on_ranks(ranks, multiplied_by_itself, NULL);
}

/* ---- frozen or switched on after wrapping ---------------------------------------------------- */

/* a.weight is frozen when m is wrapped and on from the second step, b.bias the other way round. */
static int switch_after_wrapping(kn_comm *world, void *arg)
{
    const kn_layout_kind *layout = arg;
    two m, want;
    kn_optim *o[2];
    for (int k = 0; k < 2; k++) {
        two *t = k ? &want : &m;
        EXPECT(two_init(t, k ? KN_CPU : KN_META, KN_F32) &&
               kn_freeze_matching(t, "a.*", true) == 2);
        EXPECT(k ? kn_materialize(t, KN_CPU, NET_SEED)
                 : kn_fsdp_wrap(t, world, .seed = NET_SEED, .layout = *layout));
        EXPECT((o[k] = kn_adamw(t, .lr = 0.01)) != NULL);
    }
    for (int step = 0; step < 3; step++) {
        for (int k = 0; k < 2 && step == 1; k++) {
            EXPECT(kn_freeze_matching(k ? &want : &m, "a.weight", false) == 1);
            EXPECT(kn_freeze_matching(k ? &want : &m, "b.bias", true) == 1);
        }
        EXPECT(two_backward(&m, step * kn_comm_size(world) + kn_rank(world)) && kn_step(o[0]));
        for (int r = 0; r < kn_comm_size(world); r++)
            EXPECT(two_backward(&want, step * kn_comm_size(world) + r));
        EXPECT(kn_step(o[1]));
    }
    kn_summon_scope whole = kn_summon(&m);
    const kn_param *p, *q;
    for (int i = 0, n = kn_params(&m, &p); i < n && kn_params(&want, &q); i++)
        EXPECT(memcmp(kn_data(p[i].tensor), kn_data(q[i].tensor),
                      (size_t)kn_numel(q[i].tensor) * 4) == 0,
               "%s", p[i].name);
    EXPECT(kn_summon_end(whole));
    for (int k = 0; k < 2; k++)
        kn_optim_free(o[k]);
    kn_module_free(&m);
    kn_module_free(&want);
    return 0;
}

KN_TEST(unit, parameters_are_frozen_and_switched_on_after_wrapping)
{
    for (int ranks = 1; ranks <= 4; ranks += ranks)
        for (kn_layout_kind l = KN_LAYOUT_FLAT; l <= KN_LAYOUT_RAGGED; l++)
            KN_CHECK(kn_spawn_threads(ranks, switch_after_wrapping, &l) == 0, "%d ranks, layout %d",
                     ranks, l);
}
