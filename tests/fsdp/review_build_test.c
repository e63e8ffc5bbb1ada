/* tests/fsdp/review_build_test.c: making units: a wrap that fails leaves the module as it was, one
 * parameter's step leaves its bucket's others alone, factors belong to a tree, communicators are used
 * again, classes in full precision. Rank functions return a status. */
#include "tests/fsdp/net.h"

typedef struct two {
    kn_module base;
    kn_linear a, b;
} two;

static kn_tensor *two_forward(kn_module *self, kn_tensor *x)
{
    two *m = (two *)self;
    return kn_call(&m->b, kn_relu(kn_call(&m->a, x)));
}

static bool two_init(two *m, kn_device device, kn_dtype dtype)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, two_forward) &&
           kn_linear_init(&m->a, &m->base, "a", 4, 4, .device = device, .dtype = dtype) &&
           kn_linear_init(&m->b, &m->base, "b", 4, 4, .device = device, .dtype = dtype);
}

static kn_tensor *input(void)
{
    return kn_from(KN_F32, KN_CPU, (float[]){ .3f, -.2f, .5f, 1, 2, -1, .1f, .7f }, KN_SHAPE(2, 4));
}

static bool backward(two *m)
{
    kn_scope scope = kn_scope_begin();
    bool ok = kn_backward(kn_mean(kn_cast(kn_call(m, input()), KN_F32), 0, NULL, false));
    kn_scope_end(scope);
    return ok;
}

static bool forward(void *m, double *value)
{
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(false);
    kn_tensor *y = kn_sum(kn_cast(kn_call(m, input()), KN_F32), 0, NULL, false);
    kn_set_grad_mode(mode);
    *value = y ? kn_item(y) : 0;
    kn_scope_end(scope);
    return kn_ok();
}

/* Whether the error that stands has these words; clears it. */
static bool says(const char *a, const char *b)
{
    bool yes = !kn_ok() && strstr(kn_error(), a) && strstr(kn_error(), b);
    if (!yes)
        fprintf(stderr, "no '%s', '%s' in: %s\n", a, b, kn_error() ? kn_error() : "(no error)");
    kn_clear_error();
    return yes;
}

/* ---- one parameter's step -------------------------------------------------------------------------- */

static bool grad_values(const kn_param *p, float *v, int64_t n)
{
    kn_tensor *g = p->source->grad(p);
    return g && kn_numel(g) <= n && kn_to_host(g, v, (size_t)kn_numel(g) * sizeof *v);
}

/* a's gradient is consumed, b's stays; a's next one does not count what was consumed. */
static int clear_one(kn_comm *world, void *arg)
{
    two m;
    const kn_param *p;
    float once[4][16] = { 0 }, v[16];
    (void)arg;
    EXPECT(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m, world) && backward(&m));
    int n = kn_params(&m, &p);
    EXPECT(n == 4);
    for (int i = 0; i < n; i++)
        EXPECT(grad_values(&p[i], once[i], 16), "parameter %d", i);
    p[0].source->clear(&p[0]);
    EXPECT(!p[0].source->grad(&p[0]), "what was stepped has no gradient left");
    for (int i = 1; i < n; i++)
        EXPECT(grad_values(&p[i], v, 16), "the step of %s took the gradient of %s", p[0].name,
               p[i].name);
    EXPECT(backward(&m));
    for (int i = 0; i < n; i++) {
        EXPECT(grad_values(&p[i], v, 16), "parameter %d", i);
        for (int64_t k = 0; k < kn_numel(p[i].master); k++)
            EXPECT(fabsf(v[k] - (i ? 2 : 1) * once[i][k]) <= (i ? 1e-6f : 0), "%s[%d]: %g, once %g",
                   p[i].name, (int)k, (double)v[k], (double)once[i][k]);
    }
    for (int i = 0; i < n; i++)
        p[i].source->clear(&p[i]);
    p[0].source->clear(&p[0]); /* and the rest's by hand */
    for (int i = 1; i < n; i++)
        kn_clear_grad(p[i].tensor);
    EXPECT(backward(&m) && backward(&m));
    for (int i = 0; i < n; i++) {
        EXPECT(grad_values(&p[i], v, 16), "parameter %d", i);
        for (int64_t k = 0; k < kn_numel(p[i].master); k++)
            EXPECT(fabsf(v[k] - 2 * once[i][k]) <= 1e-6f, "%s after clearing", p[i].name);
        p[i].source->clear(&p[i]);
    }
    EXPECT(backward(&m));
    for (int i = 0; i < n; i++) {
        EXPECT(grad_values(&p[i], v, 16), "parameter %d", i);
        EXPECT(memcmp(v, once[i], (size_t)kn_numel(p[i].master) * sizeof *v) == 0, "%s", p[i].name);
    }
    kn_module_free(&m);
    EXPECT(kn_ok());
    return 0;
}

KN_TEST(build, a_step_of_one_parameter_leaves_the_others)
{
    on_ranks(1, clear_one, NULL);
    on_ranks(3, clear_one, NULL);
}

/* ---- factors ------------------------------------------------------------------------------------------ */

static bool sums_b(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                   void *arg)
{
    (void)recurse;
    (void)unclaimed;
    (void)arg;
    if (strcmp(kn_module_path(m), "b") == 0)
        o->reduce_op = KN_REDUCE_SUM;
    return true;
}

/* Trees beside each other below a module that is no unit divide each by its own factor, in one optimizer's step as
 * in two, and in the norm. Reference: this process adds the ranks' gradients. */
static int siblings(kn_comm *world, void *arg)
{
    const int which = *(int *)arg;
    two m, ref;
    const kn_param *p, *r;
    float g[4][16] = { 0 }, value[16], want[16];
    double squares = 0;
    int n = kn_comm_size(world);
    EXPECT(two_init(&m, KN_META, KN_F32) && two_init(&ref, KN_META, KN_F32), "init");
    EXPECT(kn_materialize(&ref, KN_CPU, 1337), "reference");
    EXPECT(kn_fsdp_wrap(&m.a, world, .divide_factor = which & 1 ? 8 : 0,
                        .layout = KN_LAYOUT_PER_PARAM) &&
               kn_fsdp_wrap(&m.b, world, .divide_factor = which & 1 ? 0 : 8),
           "wrap");
    kn_optim *one = kn_sgd(which & 2 ? (void *)&m.a : &m, .lr = 1), *other = NULL;
    EXPECT(one && (!(which & 2) || (other = kn_sgd(&m.b, .lr = 1))), "optimizers");
    EXPECT(backward(&m) && backward(&m) && backward(&ref) && backward(&ref), "backward");
    EXPECT(kn_params(&ref, &r) == 4 && kn_params(&m, &p) == 4, "parameters");
    for (int i = 0; i < 4; i++) {
        float divisor = (i < 2) == (which & 1) ? 8 : (float)n;
        kn_scope scope = kn_scope_begin();
        EXPECT(kn_to_host(kn_param_grad(&r[i]), g[i], (size_t)r[i].numel * sizeof(float)),
               "gradient");
        kn_scope_end(scope);
        for (int64_t k = 0; k < r[i].numel; k++) {
            g[i][k] *= (float)n / divisor / 2; /* equal on all ranks; the mean of two backwards */
            squares += (double)g[i][k] * g[i][k];
        }
    }
    kn_scope scope = kn_scope_begin();
    double norm = which & 2 ? sqrt(squares) : kn_item(kn_clip_grad_norm(&m, 1e9));
    kn_scope_end(scope);
    EXPECT(fabs(norm - sqrt(squares)) < 1e-6 * norm, "norm %g, not %g", norm, sqrt(squares));
    EXPECT(kn_step(one) && (!other || kn_step(other)), "step");
    for (int i = 0; i < 4; i++) {
        EXPECT(kn_param_read(&m, i, value) &&
                   kn_to_host(r[i].master, want, sizeof(float) * (size_t)r[i].numel),
               "read");
        for (int64_t k = 0; k < r[i].numel; k++)
            EXPECT(fabsf(value[k] - (want[k] - g[i][k])) < 1e-6f, "%s[%d] of which %d: %g, not %g",
                   p[i].name, (int)k, which, (double)value[k], (double)(want[k] - g[i][k]));
    }
    kn_optim_free(one);
    kn_optim_free(other);
    kn_module_free(&m);
    kn_module_free(&ref);
    return !kn_ok();
}

KN_TEST(build, trees_beside_each_other_divide_by_their_own)
{
    for (int which = 0; which < 4; which++) {
        KN_CHECK(kn_spawn_threads(2, siblings, &which) == 0, "which %d", which);
        on_ranks(3, siblings, &which);
    }
}

KN_TEST(build, units_with_other_factors_than_the_root)
{
    for (int i = 0; i < 4; i++) {
        two m;
        double y;
        KN_CHECK(two_init(&m, KN_META, KN_F32), "%s", kn_error());
        bool ok = i == 0 ? kn_fsdp_wrap(&m.b, NULL, .divide_factor = 3) && kn_fsdp_wrap(&m, NULL)
                  : i == 1
                      ? kn_fsdp_wrap(&m.b, NULL, .predivide_factor = 2) && kn_fsdp_wrap(&m, NULL)
                  : i == 2 ? kn_fsdp_wrap(&m, NULL, .policy = sums_b)
                           : kn_fsdp_wrap(&m.b, NULL, .divide_factor = 3, .predivide_factor = 1) &&
                                 kn_fsdp_wrap(&m, NULL, .divide_factor = 3);
        KN_CHECK(ok, "%s", kn_error());
        bool ran = forward(&m, &y);
        static const char *const option[] = { ".divide_factor", ".predivide_factor", ".reduce_op" };
        KN_CHECK(ran == (i == 3), "%d: %s", i, kn_error() ? kn_error() : "no error");
        if (i < 3)
            KN_CHECK(says("'b'", option[i]));
        kn_module_free(&m);
    }
}

/* ---- schedules that go ------------------------------------------------------------------------------- */

typedef struct nest {
    kn_module base;
    two p, q;
} nest;

static kn_tensor *nest_forward(kn_module *self, kn_tensor *x)
{
    nest *m = (nest *)self;
    return kn_call(&m->q, kn_call(&m->p, x));
}

/* The schedule of a group that was the root goes with all that pointed at it, once. */
KN_TEST(build, wrapping_around_a_group_that_ran)
{
    nest m = { 0 };
    double before, after;
    kn_module *group[] = { &m.p.base, &m.q.base };
    KN_CHECK(two_init(&m.p, KN_CPU, KN_F32) && two_init(&m.q, KN_CPU, KN_F32) &&
                 kn_module_init(&m.base, nest_forward) && kn_module_add(&m.base, "p", &m.p.base) &&
                 kn_module_add(&m.base, "q", &m.q.base),
             "%s", kn_error());
    KN_CHECK(kn_fsdp_wrap(&m.p.a, NULL) && kn_fsdp_wrap(&m.q.a, NULL) &&
                 kn_fsdp_wrap_group(group, 2, NULL) && forward(&m, &before),
             "%s", kn_error());
    KN_CHECK(kn_fsdp_wrap(&m, NULL), "%s", kn_error());
    kn_module *inside[] = { &m.p.base, &m.p.a.base, &m.q.a.base };
    for (int i = 0; i < 3; i++)
        KN_CHECK(!kn_unit_of(inside[i]->impl)->schedule, "unit %d keeps the schedule", i);
    KN_CHECK(forward(&m, &after) && before == after, "%g, %g: %s", before, after,
             kn_error() ? kn_error() : "");
    kn_module_free(&m);
}

/* ---- a wrap that fails ---------------------------------------------------------------------------------- */

/* Of the second bucket only: a.bias, frozen. */
static int bad_for_bias(const char *name, int ndim, const int64_t *shape, void *arg)
{
    (void)ndim;
    (void)shape;
    (void)arg;
    return strcmp(name, "a.bias") == 0 ? 7 : 0;
}

KN_TEST(build, a_wrap_that_fails_leaves_the_module)
{
    two m;
    double before, after, wrapped;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
                 kn_require_grad(kn_module_param(&m.a, "bias"), false) && forward(&m, &before),
             "%s", kn_error());
    kn_tensor *weight = kn_module_param(&m.a, "weight");
    KN_CHECK(!kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .layout = KN_LAYOUT_PER_PARAM,
                           .placement = bad_for_bias));
    KN_CHECK(says(".placement", "a.bias"));
    KN_CHECK(kn_dtype_of(weight) == KN_F32, "%s", kn_dtype_name(kn_dtype_of(weight)));
    KN_CHECK(!kn_fsdp_is_unit(&m) && forward(&m, &after) && before == after, "%g, %g: %s", before,
             after, kn_error() ? kn_error() : "");
    KN_CHECK(kn_fsdp_wrap(&m, NULL) && forward(&m, &wrapped) && before == wrapped, "%g, %g: %s",
             before, wrapped, kn_error() ? kn_error() : "");
    kn_module_free(&m);
}

KN_TEST(build, a_wrap_that_fails_ignores_nothing)
{
    two m;
    const kn_param *p;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32), "%s", kn_error());
    KN_CHECK(!kn_fsdp_wrap(&m, NULL, .ignore = "*bias", .min_params = 1000));
    KN_CHECK(says("wraps nothing", "kn_module_print"));
    KN_CHECK(kn_fsdp_wrap(&m, NULL), "%s", kn_error());
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++)
        KN_CHECK(kn_bucket_of(&p[i]), "'%s' was left out", p[i].name);
    kn_module_free(&m);
}

/* ---- communicators -------------------------------------------------------------------------------------- */

enum { MODELS = 150 };

static int come_and_go(kn_comm *world, void *arg)
{
    (void)arg;
    for (int i = 0; i < MODELS; i++) {
        two m, other;
        double y = 0, z = 0;
        bool hybrid = i % 3 == 1;
        EXPECT(two_init(&m, KN_META, KN_F32) && two_init(&other, KN_META, KN_F32));
        EXPECT(kn_fsdp_wrap(&m, world, .strategy = hybrid ? KN_HYBRID_SHARD : KN_FULL_SHARD,
                            .mesh = { .shards = hybrid ? 1 : 0 }) &&
                   kn_fsdp_wrap(&other, world, .reshard_after_forward = kn_comm_size(world)),
               "model %d", i);
        EXPECT(forward(&m, &y) && forward(&other, &z) && y == z, "model %d: %g, %g", i, y, z);
        kn_ranks *a = kn_unit_of(m.base.impl)->bucket[0]->ranks,
                 *b = kn_unit_of(other.base.impl)->bucket[0]->ranks;
        EXPECT(a->gather == NULL || a->gather != b->gather, "two models at once share one");
        kn_module_free(&m);
        kn_module_free(&other);
    }
    EXPECT(kn_ok());
    return 0;
}

KN_TEST(build, communicators_are_used_again)
{
    int failed = kn_spawn_threads(2, come_and_go, NULL);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%d ranks failed", failed);
}

/* ---- classes in full precision --------------------------------------------------------------------------- */

static kn_dtype computes_in(const kn_linear *m)
{
    return kn_dtype_of(kn_module_param((kn_linear *)m, "weight"));
}

KN_TEST(build, the_wrapped_module_may_be_of_a_full_precision_class)
{
    two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
                 kn_fsdp_wrap(&m.a, NULL, .param_dtype = KN_BF16, .full_precision_class = "linear"),
             "%s", kn_error());
    KN_CHECK(computes_in(&m.a) == KN_F32, "%s", kn_dtype_name(computes_in(&m.a)));
    kn_module_free(&m);
    kn_module *pair[] = { &m.a.base, &m.b.base };
    KN_CHECK(two_init(&m, KN_CPU, KN_F32) &&
                 kn_fsdp_wrap_group(pair, 2, NULL, .param_dtype = KN_BF16,
                                    .full_precision_class = "linear"),
             "%s", kn_error());
    KN_CHECK(computes_in(&m.a) == KN_F32 && computes_in(&m.b) == KN_F32);
    kn_module_free(&m);
}

KN_TEST(build, full_precision_is_as_declared)
{
    static const kn_dtype declared[] = { KN_F32, KN_BF16, KN_F64 };
    for (int i = 0; i < 3; i++) {
        two m;
        KN_CHECK(two_init(&m, KN_CPU, declared[i]) &&
                     kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .reduce_dtype = KN_F32,
                                  .full_precision_class = "linear"),
                 "%s: %s", kn_dtype_name(declared[i]), kn_error());
        KN_CHECK(computes_in(&m.a) == declared[i], "%s computes in %s", kn_dtype_name(declared[i]),
                 kn_dtype_name(computes_in(&m.a)));
        KN_CHECK(backward(&m), "%s: %s", kn_dtype_name(declared[i]), kn_error());
        kn_module_free(&m);
    }
}

/* ---- policies that match nothing --------------------------------------------------------------------------- */

KN_TEST(build, full_precision_units_do_not_count_for_a_policy)
{
    two m;
    KN_CHECK(two_init(&m, KN_CPU, KN_F32), "%s", kn_error());
    KN_CHECK(!kn_fsdp_wrap(&m, NULL, .param_dtype = KN_BF16, .full_precision_class = "linear",
                           .wrap_class = "nothing"));
    KN_CHECK(says("wraps nothing", "nothing"));
    kn_module_free(&m);
}

KN_TEST(build, units_wrapped_by_hand_count_for_a_policy)
{
    for (int i = 0; i < 3; i++) {
        two m;
        KN_CHECK(two_init(&m, KN_CPU, KN_F32) && kn_fsdp_wrap(&m.a, NULL) &&
                     kn_fsdp_wrap(&m.b, NULL),
                 "%s", kn_error());
        bool ok = i == 0   ? kn_fsdp_wrap(&m, NULL, .wrap_class = "linear")
                  : i == 1 ? kn_fsdp_wrap(&m, NULL, .min_params = 10)
                           : kn_fsdp_wrap(&m, NULL, .wrap_class = "lineal");
        KN_CHECK(ok == (i < 2), "%d: %s", i, kn_error() ? kn_error() : "");
        if (i == 2)
            KN_CHECK(says("wraps nothing", "lineal"));
        kn_module_free(&m);
    }
}
