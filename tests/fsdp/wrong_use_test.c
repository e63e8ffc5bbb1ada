/* tests/fsdp/wrong_use_test.c: wrong use gives an error that names the mistake and the remedy, on
 * one rank and among simulated ones; nothing crashes and nothing leaks. */
#include "tensor/tensor_internal.h"
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

/* The call fails, and says all these. */
#define SAYS(call, ...)                                                                            \
    do {                                                                                           \
        (void)(call);                                                                              \
        check_says((const char *[]){ __VA_ARGS__, NULL });                                         \
    } while (0)

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

static void drop(matrix_net **n)
{
    kn_module_free((*n)->root);
    free(*n);
}
/* It goes with its block. */
#define NET __attribute__((cleanup(drop))) matrix_net *n

/* ---- wrapping -------------------------------------------------------------------------------- */

KN_TEST(wrong_use, wrapping_twice)
{
    NET = wrapped(MATRIX_TURN);
    SAYS(kn_fsdp_wrap(n->root, NULL), "unit already", "once");
    SAYS(kn_fsdp_wrap(&n->turn.block[0], NULL), "'a'", "unit already");
    SAYS(kn_fsdp_wrap(&n->turn.head, NULL), "head", "inside");
}

static bool chooses_nothing(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                            void *arg)
{
    return recurse;
}

KN_TEST(wrong_use, a_policy_that_wraps_nothing)
{
    NET = make(MATRIX_TURN);
    SAYS(kn_fsdp_wrap(n->root, NULL, .wrap_class = "no_such_class"),
         ".wrap_class names 'no_such_class'", "turn_net", "kn_module_print");
    SAYS(kn_fsdp_wrap(n->root, NULL, .min_params = 1000000), "wraps nothing", ".min_params");
    SAYS(kn_fsdp_wrap(n->root, NULL, .policy = chooses_nothing),
         "wraps nothing below 'turn_net': .policy chose no module;");
    KN_CHECK(kn_fsdp_units(n->root, NULL, 0) == 0, "nothing was wrapped");
}

static kn_comm *ranks(int n)
{
    kn_comm *c = kn_comm_simulated(n, 0, 1e9);
    KN_CHECK(c);
    return c;
}

KN_TEST(wrong_use, a_mesh_that_does_not_divide_the_world)
{
    OWNED_SIMULATED kn_comm *world = ranks(6);
    matrix_net *n = make(MATRIX_ODD);
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .strategy = KN_HYBRID_SHARD,
                      .mesh = { .shards = 4 }),
         "4", "6 ranks");
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .strategy = KN_HYBRID_SHARD,
                      .mesh = { 2, 2 }),
         "2", "6");
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .strategy = KN_HYBRID_SHARD), "mesh");
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .mesh = { .shards = -1 }), "mesh");
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .reshard_after_forward = 4),
         "reshard_after_forward", "4", "6");
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .reshard_after_forward = -7),
         "reshard_after_forward", "-7");
    drop(&n);
}

KN_TEST(wrong_use, a_dtype_that_the_reduction_cannot_do)
{
    NET = make(MATRIX_ODD);
    SAYS(kn_fsdp_wrap(n->root, NULL, .reduce_dtype = KN_I32), "reduce_dtype", "f32");
    SAYS(kn_fsdp_wrap(n->root, NULL, .param_dtype = KN_U8), "param_dtype", "f32");
    SAYS(kn_fsdp_wrap(n->root, NULL, .reduce_dtype = KN_F64), "f64");
}

KN_TEST(wrong_use, options_out_of_range)
{
    NET = make(MATRIX_ODD);
    SAYS(kn_fsdp_wrap(n->root, NULL, .strategy = (kn_strategy)99), "strategy", "99");
    SAYS(kn_fsdp_wrap(n->root, NULL, .layout = (kn_layout_kind)99), "layout", "99");
    SAYS(kn_fsdp_wrap(n->root, NULL, .backward_prefetch = (kn_backward_prefetch)99),
         "backward_prefetch", "99");
    SAYS(kn_fsdp_wrap(n->root, NULL, .reduce_op = (kn_grad_average)99), "reduce_op", "99");
    SAYS(kn_fsdp_wrap(n->root, NULL, .max_gathers = -1), "max_gathers");
    SAYS(kn_fsdp_wrap(n->root, NULL, .max_reductions = -1), "max_reductions");
    SAYS(kn_fsdp_wrap(n->root, NULL, .divide_factor = -2), "divide_factor");
    SAYS(kn_fsdp_wrap(n->root, NULL, .predivide_factor = -2), "predivide_factor");
    SAYS(kn_fsdp_wrap(n->root, NULL, .offload_dir = "/no/such/folder"), "/no/such/folder");
    SAYS(kn_fsdp_wrap(n->root, NULL, .device = KN_CUDA), "cuda");
    SAYS(kn_fsdp_wrap(NULL, NULL), "module");
    KN_CHECK(kn_fsdp_units(n->root, NULL, 0) == 0, "a refused wrap leaves units");
    kn_fsdp_wrap(n->root, NULL);
    KN_CHECK_OK();
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
    OWNED_SIMULATED kn_comm *world = ranks(4);
    matrix_net *n = make(MATRIX_ODD);
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .layout = KN_LAYOUT_PER_PARAM,
                      .placement = last_dim),
         "divide", "4");
    SAYS(kn_fsdp_wrap(n->root, world, .device = KN_META, .layout = KN_LAYOUT_PER_PARAM,
                      .placement = negative_dim),
         "dim");
    drop(&n);
}

KN_TEST(wrong_use, groups)
{
    NET = make(MATRIX_TURN);
    kn_module *nested[2] = { &n->turn.block[0].base, &n->turn.block[0].fc.base };
    SAYS(kn_fsdp_wrap_group(nested, 2, NULL), "a", "fc", "inside");
    kn_module *turned[2] = { nested[1], nested[0] };
    SAYS(kn_fsdp_wrap_group(turned, 2, NULL), "inside");
    kn_module *twice[2] = { nested[0], nested[0] };
    SAYS(kn_fsdp_wrap_group(twice, 2, NULL), "once");
    SAYS(kn_fsdp_wrap_group(nested, 0, NULL), "group");
    kn_module *good[2] = { &n->turn.block[0].base, &n->turn.block[1].base };
    kn_fsdp_wrap_group(good, 2, NULL);
    KN_CHECK_OK();
    kn_module *again[2] = { &n->turn.block[1].base, &n->turn.block[2].base };
    SAYS(kn_fsdp_wrap_group(again, 2, NULL), "'b'", "unit already");
}

KN_TEST(wrong_use, a_tree_with_two_communicators)
{
    OWNED_SIMULATED kn_comm *one = ranks(2), *other = ranks(2);
    matrix_net *n = make(MATRIX_TURN);
    kn_fsdp_wrap(&n->turn.block[0], one, .device = KN_META);
    KN_CHECK_OK();
    if (kn_fsdp_wrap(n->root, other, .device = KN_META)) /* here, or at the first forward */
        kn_call_n(n->root,
                  (kn_values){ 2,
                               { kn_zeros(KN_I64, KN_META, KN_SHAPE(2, 6)),
                                 kn_zeros(KN_I64, KN_META, KN_SHAPE(2, 6)) } },
                  NULL, 0);
    check_says((const char *[]){ "communicator", "'a'", NULL });
    drop(&n);
}

/* ---- running --------------------------------------------------------------------------------- */

KN_TEST(wrong_use, optimizer_made_before_wrapping)
{
    NET = make(MATRIX_TURN);
    kn_materialize(n->root, KN_CPU, 1);
    OWNED_OPTIM kn_optim *opt = kn_adamw(n->root, .lr = 0.1);
    KN_CHECK_OK();
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block");
    if (kn_ok()) {
        kn_backward(matrix_loss(n, 0, 0));
        kn_step(opt);
    }
    check_says((const char *[]){ "optimizer", "after", "wrap", NULL });
}

KN_TEST(wrong_use, changing_a_sharded_tree)
{
    NET = make(MATRIX_TURN);
    kn_linear other;
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block");
    KN_CHECK(kn_linear_init(&other, NULL, "", 2, 2));
    SAYS(kn_module_remove(n->root, kn_module_path(&n->turn.block[0])), "kn_module_remove",
         "is sharded", "before kn_fsdp_wrap");
    SAYS(kn_module_replace(n->root, kn_module_path(&n->turn.head), &other), "kn_module_replace",
         "is sharded", "before kn_fsdp_wrap");
    KN_CHECK(!other.base.impl && matrix_loss(n, 0, 0));
}

/* A module that is no unit needs the call of the unit that holds its parameters. */
KN_TEST(wrong_use, forward_outside_the_unit)
{
    NET = make(MATRIX_TURN);
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block", .param_dtype = KN_BF16,
                 .reduce_dtype = KN_F32);
    kn_tensor *x = kn_zeros(KN_BF16, KN_CPU, KN_SHAPE(2, 6, 8));
    SAYS(kn_call(&n->turn.block[2].fc, x), "c.fc.weight", "released");
    KN_CHECK(matrix_loss(n, 0, 0), "a right call afterwards works");
    SAYS(kn_call(&n->turn.block[2].fc, x), "c.fc.weight", "released");
    kn_tensor *w = kn_module_param(n->root, "a.fc.weight");
    SAYS(sum_of(w), "a.fc.weight");
}

KN_TEST(wrong_use, shape_changed_after_wrapping)
{
    NET = wrapped(MATRIX_TURN);
    kn_tensor *w = kn_module_param(n->root, "b.fc.weight");
    w->shape[0] = 4;
    SAYS(matrix_loss(n, 0, 0), "shape", "b.fc.weight", "before");
    w->shape[0] = 8;
}

KN_TEST(wrong_use, parameter_declared_after_wrapping)
{
    NET = wrapped(MATRIX_TURN);
    SAYS(kn_parameter(&n->turn.block[0], "late", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(3)),
         "before wrapping");
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
        SAYS(matrix_loss(n, 0, 0), "'late.weight' belongs to no unit", "declared after wrapping");
        drop(&n);
    }
    n = make(MATRIX_TURN);
    kn_tensor *w = kn_module_param(&n->turn.block[0].fc, "weight");
    KN_CHECK(kn_share_parameter(&n->turn.block[1], "tied", w));
    KN_CHECK(kn_fsdp_wrap(&n->turn.block[0], NULL));
    kn_scope scope = kn_scope_begin();
    kn_call(&n->turn.block[0], kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 6, 8)));
    kn_scope_end(scope);
    check_says((const char *[]){ "'a.fc.weight' belongs to no unit", "shared with a module outside",
                                 NULL });
    drop(&n);
}

/* A graph made before wrapping: no unit took part in its forward. */
KN_TEST(wrong_use, backward_without_forward)
{
    NET = make(MATRIX_TURN);
    kn_materialize(n->root, KN_CPU, 1);
    kn_tensor *loss = matrix_loss(n, 0, 0);
    KN_CHECK_OK();
    kn_fsdp_wrap(n->root, NULL, .wrap_class = "turn_block");
    KN_CHECK_OK();
    SAYS(kn_backward(loss), "forward");
}

KN_TEST(wrong_use, a_second_backward)
{
    NET = wrapped(MATRIX_TURN);
    kn_tensor *loss = matrix_loss(n, 0, 0);
    KN_CHECK(kn_backward(loss));
    SAYS(kn_backward(loss), "forward again");
}

KN_TEST(wrong_use, step_without_gradients)
{
    NET = wrapped(MATRIX_TURN);
    OWNED_OPTIM kn_optim *opt = kn_adamw(n->root, .lr = 0.1);
    SAYS(kn_step(opt), "no parameter has a gradient", "kn_backward");
}

static bool releases; /* in place of a backward */

static kn_tensor *backward_forward(kn_module *self, kn_tensor *x)
{
    kn_tensor *y = kn_linear(x, kn_module_param(self, "weight"), NULL, false);
    if (releases)
        kn_fsdp_reshard(self);
    else
        kn_backward(sum_of(y));
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
    SAYS(kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))),
         "is in forward, so a backward cannot happen now", "calls of its units are over");
    releases = true;
    SAYS(kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))), "kn_fsdp_reshard",
         "in a forward or backward and needs its parameters");
}

static kn_tensor *writing_forward(kn_module *self, kn_tensor *x)
{
    kn_tensor *w = kn_module_param(self, "weight"), *y = kn_linear(x, w, NULL, false);
    WITHOUT_GRAD;
    kn_scale_(w, 2);
    return y;
}

/* Its replay would have to write the whole unit as it was. */
KN_TEST(wrong_use, a_parameter_written_by_a_call_that_recomputes)
{
    OWNED_MODULE kn_module m = { 0 };
    IN_SCOPE;
    KN_CHECK(kn_module_init(&m, writing_forward) && kn_recompute(&m, true) &&
             kn_parameter(&m, "weight", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(3, 3)) &&
             kn_fsdp_wrap(&m, NULL));
    SAYS(kn_call(&m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3))), "'weight' is written in place",
         "but is a parameter of a unit");
}

KN_TEST(wrong_use, calls_during_summon)
{
    NET = wrapped(MATRIX_TURN);
    kn_tensor *loss = matrix_loss(n, 0, 0);
    kn_summon_scope s = kn_summon(n->root);
    KN_CHECK_OK();
    SAYS(matrix_loss(n, 0, 0), "summon", "kn_summon_end");
    SAYS(kn_backward(loss), "summon", "kn_summon_end");
    SAYS(kn_summon(n->root), "summon");
    KN_CHECK(kn_summon_end(s));
    SAYS(kn_summon_end(s), "summon", "ended");
}

KN_TEST(wrong_use, switches_on_what_is_no_unit)
{
    NET = make(MATRIX_TURN);
    SAYS(kn_fsdp_set_gradient_sync(n->root, false, false), "kn_fsdp_set_gradient_sync",
         "not a unit", "wrap");
    SAYS(kn_fsdp_set_gradient_sync(n->root, false, true), "no unit of fsdp");
    SAYS(kn_fsdp_set_all_reduce(n->root, false, false), "not a unit");
    SAYS(kn_fsdp_set_reshard_after_backward(n->root, false, false), "not a unit");
    SAYS(kn_fsdp_set_reshard_after_forward(n->root, KN_RESHARD_NEVER, false), "not a unit");
    SAYS(kn_fsdp_unshard(n->root), "kn_fsdp_unshard", "not a unit");
    SAYS(kn_unshard_wait((kn_unshard_handle){ NULL }), "handle");
    SAYS(kn_fsdp_reshard(n->root), "not a unit");
    kn_module *list[1] = { n->root };
    SAYS(kn_fsdp_prefetch_forward(n->root, list, 1), "not a unit");
    SAYS(kn_fsdp_prefetch_backward(n->root, list, 1), "not a unit");
    SAYS(kn_fsdp_set_comm_hook(n->root, kn_hook_bf16, NULL, false), "not a unit");
}

KN_TEST(wrong_use, a_group_size_that_was_not_wrapped)
{
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        OWNED_SIMULATED kn_comm *world = kn_comm_simulated(ranks, 0, 1e9);
        matrix_net *n = make(MATRIX_TURN);
        KN_CHECK(kn_fsdp_wrap(n->root, world, .wrap_class = "turn_block", .device = KN_META,
                              .reshard_after_forward = 2));
        SAYS(kn_fsdp_set_reshard_after_forward(n->root, 4, true),
             ranks == 2 ? "divide" : "wrapped");
        drop(&n);
    }
}

KN_TEST(wrong_use, prefetch_lists)
{
    NET = wrapped(MATRIX_TURN);
    kn_module *list[1] = { &n->turn.head.base };
    SAYS(kn_fsdp_prefetch_forward(n->root, list, 1), "head", "not a unit");
    SAYS(kn_fsdp_prefetch_forward(n->root, NULL, 1), "list");
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
    drop(&n);
    kn_scope_end(scope);
    KN_CHECK(kn_live_tensors() == live, "%lld tensors leak", (long long)(kn_live_tensors() - live));
}

/* An error names a missing argument, at any position. */
KN_TEST(wrong_use, nothing_passed)
{
    NET = make(MATRIX_ODD);
    const kn_param *p;
    kn_fsdp_wrap(n->root, NULL);
    KN_CHECK_OK();
    SAYS(kn_param_read(n->root, 0, NULL), "kn_param_read", "host memory");
    SAYS(kn_param_write(n->root, 0, NULL), "kn_param_write", "host memory");
    KN_CHECK(kn_params(n->root, &p) > 0);
    SAYS(kn_shard_read(n->root, 0, NULL, &p), "kn_shard_read");
    SAYS(kn_fsdp_print(NULL, n->root), "kn_fsdp_print", "NULL");
    SAYS(kn_fsdp_apply(n->root, NULL, NULL), "kn_fsdp_apply", "NULL");
    SAYS(kn_fsdp_predict(NULL), "kn_fsdp_predict");
    SAYS(kn_fsdp_set_comm_hook(NULL, NULL, NULL, true), "kn_fsdp_set_comm_hook");
    SAYS(kn_fsdp_prefetch_forward(n->root, NULL, 3), "the list of modules is NULL");
    SAYS(kn_fsdp_prefetch_forward(n->root, (kn_module *[]){ NULL }, 1), "kn_fsdp_prefetch_forward");
    SAYS(kn_unshard_wait((kn_unshard_handle){ NULL }), "kn_unshard_wait");
}
