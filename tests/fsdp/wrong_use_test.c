/* tests/fsdp/wrong_use_test.c: wrong use gives an error that names the mistake and the remedy, on
 * one rank and among simulated ones; nothing crashes and nothing leaks. */
#include "tensor/tensor_internal.h"
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

#define CHECK_SAYS(...) check_says((const char *[]){ __VA_ARGS__, NULL })

/* The error that stands has all these parts; clears it. */
static void check_says(const char *const *part)
{
    KN_CHECK(!kn_ok(), "expected an error with '%s', none stands", part[0]);
    for (; *part; part++)
        KN_CHECK(strstr(kn_error(), *part), "no '%s' in", *part);
    kn_clear_error();
}

static matrix_net *make(matrix_model model)
{
    matrix_net *n = calloc(1, sizeof *n);
    matrix_spec s = { .model = model };
    KN_CHECK(n && matrix_net_init(n, &s));
    return n;
}

static matrix_net *wrapped(matrix_model model)
{
    matrix_net *n = make(model);
    kn_fsdp_wrap(n->root, NULL, .wrap_class = matrix_wrap_class(model));
    KN_CHECK_OK();
    return n;
}

static void drop(matrix_net *n)
{
    kn_module_free(n->root);
    free(n);
}

/* ---- wrapping -------------------------------------------------------------------------------- */

KN_TEST(wrong_use, wrapping_twice)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_fsdp_wrap(n->root, NULL);
    CHECK_SAYS("unit already", "once");
    kn_fsdp_wrap(&n->turn.block[0], NULL);
    CHECK_SAYS("'a'", "unit already");
    kn_fsdp_wrap(&n->turn.head, NULL);
    CHECK_SAYS("head", "inside");
    drop(n);
}

static bool chooses_nothing(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                            void *arg)
{
    return recurse;
}

KN_TEST(wrong_use, a_policy_that_wraps_nothing)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "no_such_class");
    CHECK_SAYS(".wrap_class names 'no_such_class'", "turn_net", "kn_module_print");
    kn_fsdp_wrap(n->root, NULL, .min_params = 1000000);
    CHECK_SAYS("wraps nothing", ".min_params");
    kn_fsdp_wrap(n->root, NULL, .policy = chooses_nothing);
    CHECK_SAYS("wraps nothing below 'turn_net': .policy chose no module;");
    KN_CHECK(kn_fsdp_units(n->root, NULL, 0) == 0, "nothing was wrapped");
    drop(n);
}

static kn_comm *ranks(int n)
{
    kn_comm *c = kn_comm_simulated(n, 0, 1e9);
    KN_CHECK(c);
    return c;
}

KN_TEST(wrong_use, a_mesh_that_does_not_divide_the_world)
{
    kn_comm *world = ranks(6);
    matrix_net *n = make(MATRIX_ODD);
    kn_fsdp_wrap(n->root, world, .device = KN_META, .strategy = KN_HYBRID_SHARD,
                 .mesh = { .shards = 4 });
    CHECK_SAYS("4", "6 ranks");
    kn_fsdp_wrap(n->root, world, .device = KN_META, .strategy = KN_HYBRID_SHARD, .mesh = { 2, 2 });
    CHECK_SAYS("2", "6");
    kn_fsdp_wrap(n->root, world, .device = KN_META, .strategy = KN_HYBRID_SHARD);
    CHECK_SAYS("mesh");
    kn_fsdp_wrap(n->root, world, .device = KN_META, .mesh = { .shards = -1 });
    CHECK_SAYS("mesh");
    kn_fsdp_wrap(n->root, world, .device = KN_META, .reshard_after_forward = 4);
    CHECK_SAYS("reshard_after_forward", "4", "6");
    kn_fsdp_wrap(n->root, world, .device = KN_META, .reshard_after_forward = -7);
    CHECK_SAYS("reshard_after_forward", "-7");
    drop(n);
    kn_comm_simulated_free(world);
}

KN_TEST(wrong_use, a_dtype_that_the_reduction_cannot_do)
{
    matrix_net *n = make(MATRIX_ODD);
    kn_fsdp_wrap(n->root, NULL, .reduce_dtype = KN_I32);
    CHECK_SAYS("reduce_dtype", "f32");
    kn_fsdp_wrap(n->root, NULL, .param_dtype = KN_U8);
    CHECK_SAYS("param_dtype", "f32");
    kn_fsdp_wrap(n->root, NULL, .reduce_dtype = KN_F64);
    CHECK_SAYS("f64");
    drop(n);
}

KN_TEST(wrong_use, options_out_of_range)
{
    matrix_net *n = make(MATRIX_ODD);
    kn_fsdp_wrap(n->root, NULL, .strategy = (kn_strategy)99);
    CHECK_SAYS("strategy", "99");
    kn_fsdp_wrap(n->root, NULL, .layout = (kn_layout_kind)99);
    CHECK_SAYS("layout", "99");
    kn_fsdp_wrap(n->root, NULL, .backward_prefetch = (kn_backward_prefetch)99);
    CHECK_SAYS("backward_prefetch", "99");
    kn_fsdp_wrap(n->root, NULL, .reduce_op = (kn_grad_average)99);
    CHECK_SAYS("reduce_op", "99");
    kn_fsdp_wrap(n->root, NULL, .max_gathers = -1);
    CHECK_SAYS("max_gathers");
    kn_fsdp_wrap(n->root, NULL, .max_reductions = -1);
    CHECK_SAYS("max_reductions");
    kn_fsdp_wrap(n->root, NULL, .divide_factor = -2);
    CHECK_SAYS("divide_factor");
    kn_fsdp_wrap(n->root, NULL, .predivide_factor = -2);
    CHECK_SAYS("predivide_factor");
    kn_fsdp_wrap(n->root, NULL, .offload_dir = "/no/such/folder");
    CHECK_SAYS("/no/such/folder");
    kn_fsdp_wrap(n->root, NULL, .device = KN_CUDA);
    CHECK_SAYS("cuda");
    kn_fsdp_wrap(NULL, NULL);
    CHECK_SAYS("module");
    KN_CHECK(kn_fsdp_units(n->root, NULL, 0) == 0, "a refused wrap leaves units");
    kn_fsdp_wrap(n->root, NULL);
    KN_CHECK_OK();
    drop(n);
}

static int negative_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return ndim;
}

static int last_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return ndim ? ndim - 1 : 0;
}

KN_TEST(wrong_use, a_placement_that_does_not_fit)
{
    kn_comm *world = ranks(4);
    matrix_net *n = make(MATRIX_ODD);
    kn_fsdp_wrap(n->root, world, .device = KN_META, .layout = KN_LAYOUT_PER_PARAM,
                 .placement = last_dim);
    CHECK_SAYS("divide", "4");
    kn_fsdp_wrap(n->root, world, .device = KN_META, .layout = KN_LAYOUT_PER_PARAM,
                 .placement = negative_dim);
    CHECK_SAYS("dim");
    drop(n);
    kn_comm_simulated_free(world);
}

KN_TEST(wrong_use, groups)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_module *nested[2] = { &n->turn.block[0].base, &n->turn.block[0].fc.base };
    kn_fsdp_wrap_group(nested, 2, NULL);
    CHECK_SAYS("a", "fc", "inside");
    kn_module *turned[2] = { nested[1], nested[0] };
    kn_fsdp_wrap_group(turned, 2, NULL);
    CHECK_SAYS("inside");
    kn_module *twice[2] = { nested[0], nested[0] };
    kn_fsdp_wrap_group(twice, 2, NULL);
    CHECK_SAYS("once");
    kn_fsdp_wrap_group(nested, 0, NULL);
    CHECK_SAYS("group");
    kn_module *good[2] = { &n->turn.block[0].base, &n->turn.block[1].base };
    kn_fsdp_wrap_group(good, 2, NULL);
    KN_CHECK_OK();
    kn_module *again[2] = { &n->turn.block[1].base, &n->turn.block[2].base };
    kn_fsdp_wrap_group(again, 2, NULL);
    CHECK_SAYS("'b'", "unit already");
    drop(n);
}

KN_TEST(wrong_use, a_tree_with_two_communicators)
{
    kn_comm *one = ranks(2), *other = ranks(2);
    matrix_net *n = make(MATRIX_TURN);
    kn_fsdp_wrap(&n->turn.block[0], one, .device = KN_META);
    KN_CHECK_OK();
    if (kn_fsdp_wrap(n->root, other, .device = KN_META)) /* here, or at the first forward */
        kn_call_n(n->root,
                  (kn_values){ 2,
                               { kn_zeros(KN_I64, KN_META, KN_SHAPE(2, 6)),
                                 kn_zeros(KN_I64, KN_META, KN_SHAPE(2, 6)) } },
                  NULL, 0);
    CHECK_SAYS("communicator", "'a'");
    drop(n);
    kn_comm_simulated_free(one);
    kn_comm_simulated_free(other);
}

/* ---- running --------------------------------------------------------------------------------- */

KN_TEST(wrong_use, optimizer_made_before_wrapping)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_materialize(n->root, KN_CPU, 1);
    kn_optim *opt = kn_adamw(n->root, .lr = 0.1);
    KN_CHECK_OK();
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block");
    if (kn_ok()) {
        kn_backward(matrix_loss(n, 0, 0));
        kn_step(opt);
    }
    CHECK_SAYS("optimizer", "after", "wrap");
    kn_optim_free(opt);
    drop(n);
}

KN_TEST(wrong_use, changing_a_sharded_tree)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_linear other;
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block");
    KN_CHECK(kn_linear_init(&other, NULL, "", 2, 2));
    KN_CHECK(!kn_module_remove(n->root, kn_module_path(&n->turn.block[0])));
    CHECK_SAYS("kn_module_remove", "is sharded", "before kn_fsdp_wrap");
    KN_CHECK(!kn_module_replace(n->root, kn_module_path(&n->turn.head), &other));
    CHECK_SAYS("kn_module_replace", "is sharded", "before kn_fsdp_wrap");
    KN_CHECK(!other.base.impl && matrix_loss(n, 0, 0));
    drop(n);
}

/* A module that is no unit needs the call of the unit that holds its parameters. */
KN_TEST(wrong_use, forward_outside_the_unit)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block", .param_dtype = KN_BF16,
                 .reduce_dtype = KN_F32);
    kn_tensor *x = kn_zeros(KN_BF16, KN_CPU, KN_SHAPE(2, 6, 8));
    kn_call(&n->turn.block[2].fc, x);
    CHECK_SAYS("c.fc.weight", "released");
    KN_CHECK(matrix_loss(n, 0, 0), "a right call afterwards works");
    kn_call(&n->turn.block[2].fc, x);
    CHECK_SAYS("c.fc.weight", "released");
    kn_tensor *w = kn_module_param(n->root, "a.fc.weight");
    kn_sum(w, 0, NULL, false);
    CHECK_SAYS("a.fc.weight");
    drop(n);
}

KN_TEST(wrong_use, shape_changed_after_wrapping)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_tensor *w = kn_module_param(n->root, "b.fc.weight");
    w->shape[0] = 4;
    matrix_loss(n, 0, 0);
    CHECK_SAYS("shape", "b.fc.weight", "before");
    w->shape[0] = 8;
    drop(n);
}

KN_TEST(wrong_use, parameter_declared_after_wrapping)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_parameter(&n->turn.block[0], "late", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(3));
    CHECK_SAYS("before wrapping");
    drop(n);
}

/* One that came after wrapping, before the first forward or later, in a module of its own, and one
 * that a module outside shares. */
KN_TEST(wrong_use, a_parameter_of_no_unit)
{
    matrix_net *n;
    for (int ran = 0; ran < 2; ran++) {
        kn_linear late;
        n = wrapped(MATRIX_TURN);
        KN_CHECK(!ran || kn_backward(matrix_loss(n, 0, 0)));
        KN_CHECK(kn_linear_init(&late, n->root, "late", 2, 2, .device = KN_CPU));
        matrix_loss(n, 0, 0);
        CHECK_SAYS("'late.weight' belongs to no unit", "declared after wrapping");
        drop(n);
    }
    n = make(MATRIX_TURN);
    kn_tensor *w = kn_module_param(&n->turn.block[0].fc, "weight");
    KN_CHECK(kn_share_parameter(&n->turn.block[1], "tied", w));
    KN_CHECK(kn_fsdp_wrap(&n->turn.block[0], NULL));
    kn_scope scope = kn_scope_begin();
    kn_call(&n->turn.block[0], kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 6, 8)));
    kn_scope_end(scope);
    CHECK_SAYS("'a.fc.weight' belongs to no unit", "shared with a module outside");
    drop(n);
}

/* A graph made before wrapping: no unit took part in its forward. */
KN_TEST(wrong_use, backward_without_forward)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_materialize(n->root, KN_CPU, 1);
    kn_tensor *loss = matrix_loss(n, 0, 0);
    KN_CHECK_OK();
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block");
    KN_CHECK_OK();
    kn_backward(loss);
    KN_CHECK(!kn_ok(), "backward through a graph of unwrapped parameters works");
    CHECK_SAYS("forward");
    drop(n);
}

KN_TEST(wrong_use, a_second_backward)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_tensor *loss = matrix_loss(n, 0, 0);
    KN_CHECK(kn_backward(loss));
    kn_backward(loss);
    CHECK_SAYS("forward again");
    drop(n);
}

KN_TEST(wrong_use, step_without_gradients)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_optim *opt = kn_adamw(n->root, .lr = 0.1);
    kn_step(opt);
    CHECK_SAYS("no parameter has a gradient", "kn_backward");
    kn_optim_free(opt);
    drop(n);
}

static bool releases; /* in place of a backward */

static kn_tensor *backward_forward(kn_module *self, kn_tensor *x)
{
    kn_tensor *y = kn_linear(x, kn_module_param(self, "weight"), NULL, false);
    if (releases)
        kn_fsdp_reshard(self);
    else
        kn_backward(kn_sum(y, 0, NULL, false));
    return y;
}

/* A unit's forward that runs its backward, or releases its parameters, before it is over. */
KN_TEST(wrong_use, backward_inside_forward)
{
    OWNED_MODULE kn_module m = { 0 };
    releases = false;
    IN_SCOPE;
    KN_CHECK(kn_module_init(&m, backward_forward) &&
             kn_parameter(&m, "weight", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(3, 3)) &&
             kn_fsdp_wrap(&m, NULL));
    KN_CHECK(!kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))));
    CHECK_SAYS("is in forward, so a backward cannot happen now", "calls of its units are over");
    releases = true;
    KN_CHECK(!kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))));
    CHECK_SAYS("kn_fsdp_reshard", "in a forward or backward and needs its parameters");
}

KN_TEST(wrong_use, calls_during_summon)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_tensor *loss = matrix_loss(n, 0, 0);
    kn_summon_scope s = kn_summon(n->root);
    KN_CHECK_OK();
    matrix_loss(n, 0, 0);
    CHECK_SAYS("summon", "kn_summon_end");
    kn_backward(loss);
    CHECK_SAYS("summon", "kn_summon_end");
    kn_summon(n->root);
    CHECK_SAYS("summon");
    KN_CHECK(kn_summon_end(s));
    kn_summon_end(s);
    CHECK_SAYS("summon", "ended");
    drop(n);
}

KN_TEST(wrong_use, switches_on_what_is_no_unit)
{
    matrix_net *n = make(MATRIX_TURN);
    kn_fsdp_set_gradient_sync(n->root, false, false);
    CHECK_SAYS("kn_fsdp_set_gradient_sync", "not a unit", "wrap");
    kn_fsdp_set_gradient_sync(n->root, false, true);
    CHECK_SAYS("no unit of fsdp");
    kn_fsdp_set_all_reduce(n->root, false, false);
    CHECK_SAYS("not a unit");
    kn_fsdp_set_reshard_after_backward(n->root, false, false);
    CHECK_SAYS("not a unit");
    kn_fsdp_set_reshard_after_forward(n->root, KN_RESHARD_NEVER, false);
    CHECK_SAYS("not a unit");
    kn_fsdp_unshard(n->root);
    CHECK_SAYS("kn_fsdp_unshard", "not a unit");
    KN_CHECK(!kn_unshard_wait((kn_unshard_handle){ NULL }));
    CHECK_SAYS("handle");
    kn_fsdp_reshard(n->root);
    CHECK_SAYS("not a unit");
    kn_module *list[1] = { n->root };
    kn_fsdp_prefetch_forward(n->root, list, 1);
    CHECK_SAYS("not a unit");
    kn_fsdp_prefetch_backward(n->root, list, 1);
    CHECK_SAYS("not a unit");
    kn_fsdp_set_comm_hook(n->root, kn_hook_bf16, NULL, false);
    CHECK_SAYS("not a unit");
    drop(n);
}

KN_TEST(wrong_use, a_group_size_that_was_not_wrapped)
{
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        kn_comm *world = kn_comm_simulated(ranks, 0, 1e9);
        matrix_net *n = make(MATRIX_TURN);
        KN_CHECK(kn_fsdp_wrap(n->root, world, .wrap_class = "turn_block", .device = KN_META,
                              .reshard_after_forward = 2));
        kn_fsdp_set_reshard_after_forward(n->root, 4, true);
        CHECK_SAYS(ranks == 2 ? "divide" : "wrapped");
        drop(n);
        kn_comm_simulated_free(world);
    }
}

KN_TEST(wrong_use, prefetch_lists)
{
    matrix_net *n = wrapped(MATRIX_TURN);
    kn_module *list[1] = { &n->turn.head.base };
    kn_fsdp_prefetch_forward(n->root, list, 1);
    CHECK_SAYS("head", "not a unit");
    kn_fsdp_prefetch_forward(n->root, NULL, 1);
    CHECK_SAYS("list");
    drop(n);
}

/* Nothing above leaves handles behind. */
KN_TEST(wrong_use, leaves_nothing)
{
    int64_t live = kn_live_tensors();
    kn_scope scope = kn_scope_begin();
    matrix_net *n = make(MATRIX_ODD);
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "odd_block", .mesh = { .shards = 3 });
    KN_CHECK(!kn_ok());
    kn_clear_error();
    drop(n);
    kn_scope_end(scope);
    KN_CHECK(kn_live_tensors() == live, "%lld tensors leak", (long long)(kn_live_tensors() - live));
}

/* An error names a missing argument, at any position. */
KN_TEST(wrong_use, nothing_passed)
{
    matrix_net *n = make(MATRIX_ODD);
    const kn_param *p;
    kn_fsdp_wrap(n->root, NULL);
    KN_CHECK_OK();
    kn_param_read(n->root, 0, NULL);
    CHECK_SAYS("kn_param_read", "host memory");
    kn_param_write(n->root, 0, NULL);
    CHECK_SAYS("kn_param_write", "host memory");
    KN_CHECK(kn_params(n->root, &p) > 0);
    kn_shard_read(n->root, 0, NULL, &p);
    CHECK_SAYS("kn_shard_read");
    kn_fsdp_print(NULL, n->root);
    CHECK_SAYS("kn_fsdp_print", "NULL");
    kn_fsdp_apply(n->root, NULL, NULL);
    CHECK_SAYS("kn_fsdp_apply", "NULL");
    kn_fsdp_predict(NULL);
    CHECK_SAYS("kn_fsdp_predict");
    kn_fsdp_set_comm_hook(NULL, NULL, NULL, true);
    CHECK_SAYS("kn_fsdp_set_comm_hook");
    kn_fsdp_prefetch_forward(n->root, NULL, 3);
    CHECK_SAYS("the list of modules is NULL");
    kn_fsdp_prefetch_forward(n->root, (kn_module *[]){ NULL }, 1);
    CHECK_SAYS("kn_fsdp_prefetch_forward");
    kn_unshard_wait((kn_unshard_handle){ NULL });
    CHECK_SAYS("kn_unshard_wait");
    drop(n);
}
