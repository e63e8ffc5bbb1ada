/* tests/fsdp/wrap_test.c: kn_fsdp_wrap: wraps around units that ran, wraps that fail and leave the
 * module unchanged, policies that match nothing. */
#include "tests/fsdp/two.h"

/* ---- schedules that go ----------------------------------------------------------------------- */

typedef struct nest {
    kn_module base;
    two p, q;
} nest;

static kn_tensor *nest_forward(kn_module *self, kn_tensor *x)
{
    nest *m = (nest *)self;
    return kn_call(&m->q, kn_call(&m->p, x));
}

/* The schedule of a group that was the root is freed once, with all pointers to it. */
KN_TEST(wrap, wrapping_around_a_group_that_ran)
{
    OWNED_MODULE nest m = { 0 };
    double before = 0, after = 0;
    kn_module *group[] = { &m.p.base, &m.q.base };
    KN_CHECK(two_init(&m.p, KN_CPU, KN_F32) && two_init(&m.q, KN_CPU, KN_F32) &&
             kn_module_init(&m.base, nest_forward) && kn_module_add(&m.base, "p", &m.p.base) &&
             kn_module_add(&m.base, "q", &m.q.base));
    KN_CHECK(kn_fsdp_wrap(&m.p.a, NULL) && kn_fsdp_wrap(&m.q.a, NULL) &&
             kn_fsdp_wrap_group(group, 2, NULL) && two_evaluate(&m, &before));
    KN_CHECK(kn_fsdp_wrap(&m, NULL));
    kn_module *inside[] = { &m.p.base, &m.p.a.base, &m.q.a.base };
    for (int i = 0; i < 3; i++)
        KN_CHECK(!kn_unit_of(inside[i]->impl)->schedule, "unit %d keeps the schedule", i);
    KN_CHECK(two_evaluate(&m, &after) && before == after, "%g, %g", before, after);
}

/* ---- a wrap that fails ----------------------------------------------------------------------- */

/* Of the second bucket only: a.bias, frozen. */
static int bad_for_bias(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return strcmp(name, "a.bias") == 0 ? 7 : 0;
}

KN_TEST(wrap, a_wrap_that_fails_leaves_the_module)
{
    OWNED_MODULE two m;
    double before = 0, after = 0, wrapped = 0;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
             kn_require_grad(kn_module_param(&m.a, "bias"), false) && two_evaluate(&m, &before));
    kn_tensor *weight = kn_module_param(&m.a, "weight");
    REFUSED(kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .layout = KN_LAYOUT_PER_PARAM,
                         .placement = bad_for_bias),
            ".placement", "a.bias");
    KN_CHECK(kn_dtype_of(weight) == KN_F32, "%s", kn_dtype_name(kn_dtype_of(weight)));
    KN_CHECK(!kn_fsdp_is_unit(&m) && two_evaluate(&m, &after) && before == after, "%g, %g", before,
             after);
    KN_CHECK(kn_fsdp_wrap(&m, NULL) && two_evaluate(&m, &wrapped) && before == wrapped, "%g, %g",
             before, wrapped);
}

KN_TEST(wrap, a_wrap_that_fails_ignores_nothing)
{
    OWNED_MODULE two m;
    const kn_param *p;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32));
    REFUSED(kn_fsdp_wrap(&m, NULL, .ignore = "*bias", .min_params = 1000), "wraps nothing",
            "kn_module_print");
    KN_CHECK(kn_fsdp_wrap(&m, NULL));
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++)
        KN_CHECK(kn_bucket_of(&p[i]), "'%s' was left out", p[i].name);
}

/* ---- policies that match nothing ------------------------------------------------------------- */

KN_TEST(wrap, full_precision_units_do_not_count_for_a_policy)
{
    OWNED_MODULE two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32));
    REFUSED(kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .full_precision_class = "linear",
                         .wrap_class = "nothing"),
            ".wrap_class names 'nothing'", "kn_module_print");
    REFUSED(kn_fsdp_wrap(&m.a, NULL, .param_dtype = KN_BF16, .full_precision_class = "linear",
                         .wrap_class = "linear"),
            "wraps nothing below", "linear");
}

KN_TEST(wrap, units_wrapped_by_hand_count_for_a_policy)
{
    for (int i = 0; i < 3; i++) {
        OWNED_MODULE two m;
        KN_CHECK(two_init(&m, KN_CPU, KN_F32) && kn_fsdp_wrap(&m.a, NULL) &&
                 kn_fsdp_wrap(&m.b, NULL));
        bool ok = i == 0   ? kn_fsdp_wrap(&m, NULL, .wrap_class = "linear")
                  : i == 1 ? kn_fsdp_wrap(&m, NULL, .min_params = 10)
                           : kn_fsdp_wrap(&m, NULL, .wrap_class = "lineal");
        KN_CHECK(ok == (i < 2), "%d", i);
        if (i == 2)
            KN_CHECK(error_has("names 'lineal', but no module of 'two'", "did you mean 'linear'?"));
    }
    for (int i = 0; i < 2; i++) { /* the policy wraps the others */
        two m;
        KN_CHECK(two_init(&m, KN_CPU, KN_F32) && kn_fsdp_wrap(&m.a, NULL));
        const void *by_hand = kn_unit_of(m.a.base.impl);
        KN_CHECK(i ? kn_fsdp_wrap(&m, NULL, .min_params = 10)
                   : kn_fsdp_wrap(&m, NULL, .wrap_class = "linear"));
        KN_CHECK(kn_fsdp_is_unit(&m.b) && kn_unit_of(m.a.base.impl) == by_hand &&
                 kn_fsdp_units(&m, NULL, 0) == 3);
        kn_module_free(&m);
    }
}

/* A name in a list that no module has is an error, for any other names. The whole tree counts: the
 * same options may wrap modules one by one. */
KN_TEST(wrap, unknown_names_in_lists_of_classes)
{
    static const struct {
        kn_fsdp_wrap_options o;
        const char *a, *b;
    } wrong[] = {
        { { .wrap_class = "linear, tow" }, ".wrap_class names 'tow'", "did you mean 'two'?" },
        { { .wrap_class = "linera,two" }, ".wrap_class names 'linera'", "did you mean 'linear'?" },
        { { .recompute_class = "liner,linear" }, ".recompute_class names 'liner'", "'linear'?" },
        { { .full_precision_class = "linear,layer_norm", .param_dtype = KN_BF16 },
          ".full_precision_class names 'layer_norm'",
          "no module of 'two'" },
        { { .full_precision_class = "l" }, ".full_precision_class names 'l'", "no module" },
        { { .recompute_class = "linear,a_name_that_is_longer_than_any_buffer_for_names_ever_was_"
                               "made_and_goes_on" },
          "a_name_that_is_longer",
          "no module" },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        kn_fsdp_wrap_options o = wrong[i].o;
        o._size = sizeof o;
        TWO(m);
        KN_CHECK(!kn_fsdp_wrap_(&m, NULL, o));
        KN_CHECK(error_has(wrong[i].a, wrong[i].b), "case %d", (int)i);
        KN_CHECK(!kn_fsdp_is_unit(&m) && !m.a.base.impl->recompute, "case %d", (int)i);
    }
    OWNED_MODULE two m;
    KN_CHECK(two_init(&m, KN_META, KN_F32) &&
                 kn_fsdp_wrap(&m.a, NULL, .full_precision_class = "two, linear,",
                              .recompute_class = "two"),
             "the class of a module around it");
    KN_CHECK(!m.base.impl->recompute && !m.a.base.impl->recompute);
}

/* ---- which modules recompute ----------------------------------------------------------------- */

static bool recomputes(const void *m)
{
    return ((const kn_module *)m)->impl->recompute;
}

KN_TEST(wrap, recompute_by_class)
{
    for (int i = 0; i < 3; i++) {
        const char *const list[] = { "linear", "two,linear", "two" };
        TWO_WRAPPED(m, NULL, .wrap_class = "linear", .recompute_class = list[i]);
        KN_CHECK(recomputes(&m) == (i > 0) && recomputes(&m.a) == (i < 2) &&
                     recomputes(&m.b) == (i < 2),
                 "'%s'", list[i]);
        KN_CHECK(two_backward(&m, 0));
    }
    TWO(m);
    KN_CHECK(kn_recompute(&m.b, true) && kn_fsdp_wrap(&m.a, NULL, .recompute_class = "linear") &&
             kn_fsdp_wrap(&m, NULL));
    KN_CHECK(!recomputes(&m) && recomputes(&m.a) && recomputes(&m.b),
             "only what is wrapped; and what was chosen by hand stays");
}

/* True for the module that arg names; fails if it names none. */
static bool named(const kn_module *m, void *arg)
{
    const char *name = arg;
    return *name ? strcmp(kn_module_path(m), name) == 0 : kn_fail("there is no name");
}

KN_TEST(wrap, recompute_by_policy)
{
    OWNED_MODULE two m;
    char b[] = "b", none[] = "";
    for (int by_hand = 0; by_hand < 2; by_hand++) {
        KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_recompute(&m.a, by_hand) &&
                 kn_fsdp_wrap(&m, NULL, .wrap_class = "linear", .recompute_policy = named,
                              .recompute_policy_arg = b));
        KN_CHECK(!recomputes(&m) && recomputes(&m.a) == by_hand && recomputes(&m.b),
                 "what was chosen by hand stays");
        KN_CHECK(two_backward(&m, 0));
        kn_module_free(&m);
    }
    KN_CHECK(two_init(&m, KN_META, KN_F32) &&
             !kn_fsdp_wrap(&m, NULL, .recompute_policy = named, .recompute_policy_arg = none) &&
             error_has("there is no name", ""));
}

/* ---- options that differ over ranks ---------------------------------------------------------- */

static kn_module *first_only[] = { NULL };

static bool any_module(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                       void *arg)
{
    return true;
}

/* The options of the last rank and of the others, and the error of all. */
static const struct unlike {
    kn_fsdp_wrap_options first, last;
    const char *says;
} unlike[] = {
    { { .seed = 42 }, { .seed = 43 }, ".seed is 42 on rank 0 and 43 on rank %d" },
    { { .seed = (uint64_t)KN_ZERO }, { 0 }, ".seed is 0 on rank 0 and 1337 on rank %d" },
    { { 0 }, { .divide_factor = 1.5 }, ".divide_factor is 0 on rank 0 and 1.5 on rank %d" },
    { { .wrap_class = "linear" },
      { 0 },
      ".wrap_class is 'linear' on rank 0 and not given on rank %d" },
    { { 0 }, { .policy = any_module }, ".policy is not given on rank 0 and given on rank %d" },
    { { 0 }, { .keep_low_precision_grads = true }, ".keep_low_precision_grads is 0 on rank 0 and" },
    { { 0 }, { .mesh.shards = 1 }, ".mesh.shards is 0 on rank 0 and 1 on rank %d" },
    { { 0 }, { .keep_whole_below = 5 }, ".keep_whole_below is 0 on rank 0 and 5 on rank %d" },
};
/* These may differ, or are the same thing. */
static const struct {
    kn_fsdp_wrap_options first, last;
} may_differ[] = {
    { { .seed = 1337 }, { 0 } },
    { { .strategy = KN_FULL_SHARD }, { .layout = KN_LAYOUT_FLAT } },
    { { .predivide_factor = 1, .keep_whole_below = 1 }, { .mesh.replicas = 1 } },
    { { .wrap_class = "linear", .ignore = "x.*, y" },
      { .wrap_class = " linear ,linear,", .ignore = "y,x.* " } },
    { { 0 }, { .timeout_s = 30, .ignored_modules = first_only } },
};

static bool wrap_each(two *m, kn_comm *world, kn_fsdp_wrap_options first, kn_fsdp_wrap_options last)
{
    bool is_last = kn_rank(world) == kn_comm_size(world) - 1;
    kn_fsdp_wrap_options o = is_last ? last : first;
    o._size = sizeof o;
    return kn_fsdp_wrap_(m, world, o);
}

RANK_TEST(wrap, options_that_differ_over_ranks, .threads = "24", ROWS(unlike))
{
    const struct unlike *u = arg;
    char says[128];
    snprintf(says, sizeof says, u->says, kn_comm_size(world) - 1);
    TWO(m);
    REFUSED(wrap_each(&m, world, u->first, u->last), says, "all ranks");
    KN_CHECK(!kn_fsdp_is_unit(&m) && !kn_fsdp_is_unit(&m.a));
}

RANK_TEST(wrap, options_that_may_differ_over_ranks, .threads = "24")
{
    two m;
    for (size_t i = 0; i < sizeof may_differ / sizeof *may_differ; i++) {
        KN_CHECK(two_init(&m, KN_META, KN_F32) &&
                 wrap_each(&m, world, may_differ[i].first, may_differ[i].last) &&
                 two_backward(&m, 0));
        kn_module_free(&m);
    }
}

/* Chooses b and, on one rank, gives it another factor. */
static bool b_by_rank(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                      void *arg)
{
    if (*(bool *)arg && !recurse)
        o->divide_factor = 3;
    return recurse || strcmp(kn_module_path(m), "b") == 0;
}

RANK_TEST(wrap, policies_and_factors_that_differ_over_ranks, .threads = "24", .cases = 3)
{
    const int which = *(int *)arg, rank = kn_rank(world);
    bool last = rank == kn_comm_size(world) - 1;
    TWO(m);
    if (which == 0)
        REFUSED(kn_fsdp_wrap(&m, world, .policy = b_by_rank, .policy_arg = &last),
                ".divide_factor of unit 'b' is 0 on rank 0 and 3 on rank", ".policy");
    else
        KN_CHECK(kn_fsdp_wrap(&m, world, .wrap_class = "linear"));
    if (which == 1)
        KN_CHECK(
            kn_fsdp_set_divide_factor(&m, 2, true) &&
            !kn_fsdp_set_divide_factor(&m, 2 + rank, true) &&
            error_has("kn_fsdp_set_divide_factor: the factor is 2 on rank 0 and 3 on rank 1", ""));
    if (which == 2)
        KN_CHECK(kn_fsdp_set_reduce_unused(&m, true, true) &&
                 !kn_fsdp_set_reduce_unused(&m, rank == 0, true) &&
                 error_has("kn_fsdp_set_reduce_unused: on is 1 on rank 0 and 0 on rank 1", ""));
}

/* ---- what is left alone ---------------------------------------------------------------------- */

RANK_TEST(wrap, units_inside_what_is_ignored_stay_units, .threads = "124")
{
    OWNED_MODULE nest m = { 0 };
    const kn_param *p;
    KN_CHECK(two_init(&m.p, KN_CPU, KN_F32) && two_init(&m.q, KN_CPU, KN_F32) &&
             kn_module_init(&m.base, nest_forward) && kn_module_add(&m.base, "p", &m.p.base) &&
             kn_module_add(&m.base, "q", &m.q.base));
    KN_CHECK(kn_fsdp_wrap(&m.p.a, world) && kn_fsdp_wrap(&m, world, .ignore = "p.*"));
    KN_CHECK(kn_fsdp_is_unit(&m.p.a) && two_backward(&m, kn_rank(world)));
    int n = kn_params(&m, &p), sharded = 0;
    for (int i = 0; i < n; i++) {
        const kn_bucket *b = kn_bucket_of(&p[i]);
        bool alone = strncmp(p[i].name, "p.b.", 4) == 0;
        KN_CHECK(!b == alone, "'%s' is%s ignored", p[i].name, b ? " not" : "");
        KN_CHECK(!b || (b->unit->module[0] == m.p.a.base.impl) == !strncmp(p[i].name, "p.a.", 4),
                 "'%s' is of another unit", p[i].name);
        sharded += kn_numel(p[i].master) < p[i].numel;
    }
    KN_CHECK(n == 8 && (sharded > 0) == (kn_comm_size(world) > 1), "%d of %d are cut", sharded, n);
}

/* ---- policies -------------------------------------------------------------------------------- */

KN_TEST(wrap, policy_by_size)
{
    OWNED_MODULE kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 2, .heads = 4, .embd = 24, .ctx = 8, .vocab = 37 };
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, NULL, .min_params = 5000);
    KN_CHECK_OK();
    kn_module *unit[8];
    int n = kn_fsdp_units(&g, unit, 8);
    KN_CHECK(n == 3, "%d units", n);
    KN_CHECK(strcmp(kn_module_class(unit[0]), "gpt_block") == 0, "%s", kn_module_class(unit[0]));
    KN_CHECK(kn_fsdp_is_unit(&g), "the root is a unit");
}

static bool changes_b(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                      void *arg)
{
    if (!recurse && strcmp(kn_module_path(m), "b") == 0) {
        o->layout = KN_LAYOUT_PER_PARAM;
        o->param_dtype = KN_BF16;
    }
    return true;
}

/* A policy's changes of the options are for that unit alone. */
KN_TEST(wrap, policy_gives_units_options_of_their_own)
{
    TWO_WRAPPED(m, NULL, .policy = changes_b);
    const kn_unit *a = kn_unit_of(m.a.base.impl), *b = kn_unit_of(m.b.base.impl);
    KN_CHECK(a && a->options.layout == KN_LAYOUT_FLAT && !a->options.param_dtype);
    KN_CHECK(b && b->options.layout == KN_LAYOUT_PER_PARAM && b->options.param_dtype == KN_BF16);
    KN_CHECK(kn_unit_of(m.base.impl)->options.layout == KN_LAYOUT_FLAT);
}

/* Parameters of a unit below don't count for the module around it. */
KN_TEST(wrap, policy_by_size_counts_what_is_left)
{
    OWNED_MODULE kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 2, .heads = 4, .embd = 24, .ctx = 8, .vocab = 37 };
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, NULL, .min_params = 3000);
    KN_CHECK_OK();
    kn_module *unit[8];
    KN_CHECK(kn_fsdp_units(&g, unit, 8) == 3 && unit[0] != &g.base && unit[1] != &g.base);
    for (int i = 0; i < 2; i++)
        KN_CHECK(strcmp(kn_module_class(unit[i]), "gpt_block") != 0, "unit %d", i);
}

/* FSDP1's default: modules of 100 million elements and more. */
KN_TEST(wrap, size_policy_of_fsdp1)
{
    OWNED_MODULE kn_module m = { 0 };
    kn_linear at = { 0 }, below = { 0 };
    KN_CHECK(kn_module_init(&m, NULL) &&
             kn_linear_init(&at, &m, "at", 10000, 10000, .device = KN_META, .no_bias = true) &&
             kn_linear_init(&below, &m, "below", 9999, 10001, .device = KN_META, .no_bias = true) &&
             kn_fsdp_wrap(&m, NULL, .device = KN_META, .min_params = KN_SIZE_POLICY));
    KN_CHECK(kn_fsdp_is_unit(&at) && !kn_fsdp_is_unit(&below) && kn_fsdp_is_unit(&m));
}

/* ---- classes of one name --------------------------------------------------------------------- */

/* As from another file: the class has the same name. */
static kn_tensor *twin_forward(kn_module *self, kn_tensor *x)
{
    return kn_mul(x, kn_module_param(self, "weight"));
}
static kn_tensor *other_twin_forward(kn_module *self, kn_tensor *x)
{
    return kn_add(x, kn_module_param(self, "weight"));
}

KN_TEST(wrap, like_another_module)
{
    kn_module root, child[4];
    static const char *const name[] = { "a", "b", "c", "d" };
    KN_CHECK(kn_module_init(&root, twin_forward));
    for (int i = 0; i < 4; i++)
        KN_CHECK(kn_module_init_(&child[i], i % 2 ? other_twin_forward : twin_forward, NULL,
                                 "block_forward") &&
                 kn_module_add(&root, name[i], &child[i]) &&
                 kn_parameter(&child[i], "weight", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(4)));
    kn_module none = { 0 }, *like[] = { &child[1], NULL }, *unmade[] = { &none, NULL };
    REFUSED(kn_fsdp_wrap(&root, NULL, .wrap_like = unmade),
            ".wrap_like: not an initialised module");
    KN_CHECK(kn_fsdp_wrap(&root, NULL, .wrap_like = like));
    for (int i = 0; i < 4; i++)
        KN_CHECK(kn_fsdp_is_unit(&child[i]) == (i % 2 == 1), "%s", name[i]);
    kn_module_free(&root);
    TWO(m);
    TWO(other);
    like[0] = &other.base;
    REFUSED(kn_fsdp_wrap(&m, NULL, .wrap_like = like), "none is like those of .wrap_like");
}
