/* tests/optim/groups_test.c: groups of parameters that a function chooses, frozen groups, bad
 * use. */
#include "nn/layers.h"
#include "optim/optim.h"
#include "tests/owned.h"

typedef struct net {
    kn_module base;
    kn_linear a, b;
    kn_layer_norm norm;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    net *m = (net *)self;
    return kn_call(&m->norm, kn_call(&m->b, kn_tanh(kn_call(&m->a, x))));
}

static void build(net *m)
{
    KN_CHECK(kn_module_init(&m->base, net_forward) && kn_linear_init(&m->a, &m->base, "a", 3, 4) &&
             kn_linear_init(&m->b, &m->base, "b", 4, 2) &&
             kn_layer_norm_init(&m->norm, &m->base, "norm", 2) && kn_materialize(m, KN_CPU, 7));
}

static bool backward(net *m)
{
    IN_SCOPE;
    kn_tensor *y = kn_call(m, kn_randn(KN_F32, KN_CPU, 5, 0, KN_SHAPE(6, 3)));
    kn_tensor *up = kn_randn(KN_F32, KN_CPU, 6, 0, KN_SHAPE(6, 2));
    return kn_backward(sum_of(kn_mul(y, up)));
}

enum { NARROW, NORMS, STILL, GROUPS };

/* By the shape, the module's class, and the name. */
static int choose(const kn_param *p, kn_module *m, void *arg)
{
    ++*(int *)arg;
    if (strcmp(kn_module_class(m), "layer_norm") == 0)
        return NORMS;
    if (strcmp(p->name, "b.bias") == 0)
        return STILL;
    return kn_ndim(p->tensor) == 2 && kn_shape(p->tensor)[0] == 2 ? NARROW : -1;
}

static const kn_optim_group groups[GROUPS] = { [NARROW] = { .lr_mul = 0.5 },
                                               [NORMS] = { .lr_mul = 0.25,
                                                           .weight_decay = KN_ZERO },
                                               [STILL] = { .frozen = true } };

/* A step of SGD shows each parameter's rate and decay. */
KN_TEST(groups, chosen_by_a_function)
{
    const double mul[] = { 1, 1, 0.5, 0, 0.25, 0.25 }, decay[] = { 0.5, 0.5, 0.5, 0, 0, 0 };
    float before[6][12], grad[6][12];
    int calls = 0;
    OWNED_MODULE net m;
    const kn_param *p;
    build(&m);
    OWNED_OPTIM kn_optim *o =
        kn_sgd(&m, .lr = 0.125, .weight_decay = 0.5, .groups = groups, .group_count = GROUPS,
               .group_of = choose, .group_arg = &calls);
    KN_CHECK(o && calls == 6 && kn_params(&m, &p) == 6 && backward(&m));
    for (int i = 0; i < 6; i++) {
        size_t bytes = (size_t)p[i].numel * sizeof(float);
        KN_CHECK(kn_to_host(p[i].master, before[i], bytes) &&
                 kn_to_host(kn_param_grad(&p[i]), grad[i], bytes));
    }
    KN_CHECK(kn_step(o) && calls == 6);
    for (int i = 0; i < 6; i++)
        for (int64_t k = 0; k < p[i].numel; k++) {
            float is = ((float *)kn_data(p[i].master))[k];
            double was = (double)before[i][k];
            double want = was - 0.125 * mul[i] * ((double)grad[i][k] + decay[i] * was);
            KN_CHECK(fabs((double)is - want) < 1e-6, "%s[%d]", p[i].name, (int)k);
        }
}

/* A frozen group has no state, in memory and in checkpoints; the step drops its gradient. */
KN_TEST(groups, frozen_ones_have_no_state)
{
    kn_optim_group still = { .pattern = "b.weight, b.bias", .frozen = true };
    OWNED_MODULE net m;
    const kn_param *p;
    build(&m);
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1, .groups = &still, .group_count = 1);
    int n = kn_params(&m, &p);
    KN_CHECK(backward(&m) && kn_step(o));
    for (int i = 0; i < n; i++) {
        bool frozen = strncmp(p[i].name, "b.", 2) == 0;
        KN_CHECK(!kn_optim_state_name_of(o, i, 0) == frozen, "%s", p[i].name);
        KN_CHECK(!kn_optim_state(o, i, "exp_avg") == frozen && !kn_param_grad(&p[i]));
    }
    kn_optim_free(o);
    still.pattern = NULL;
    o = kn_adamw(&m, .lr = 0.1, .groups = &still, .group_count = 1);
    KN_CHECK(backward(&m) && !kn_step(o) &&
             strstr(kn_error(), "no parameter has a gradient but those of frozen groups"));
    kn_clear_error();
}

static int beyond(const kn_param *p, kn_module *m, void *arg)
{
    (void)p, (void)m;
    return *(int *)arg;
}

static int fails(const kn_param *p, kn_module *m, void *arg)
{
    (void)m, (void)arg;
    kn_fail("no group for %s", p->name);
    return 0;
}

KN_TEST(groups, refuses)
{
    int number = 1;
    kn_optim_group g = { .lr_mul = 0.5 }, named = { .pattern = "*" };
    OWNED_MODULE net m;
    build(&m);
    REFUSED(kn_sgd(&m, .lr = 1, .groups = &g, .group_count = 1, .group_of = beyond,
                   .group_arg = &number),
            "returned 1 for 'a.weight'");
    number = -2;
    REFUSED(kn_adamw(&m, .lr = 1, .groups = &g, .group_count = 1, .group_of = beyond,
                     .group_arg = &number),
            "returned -2");
    REFUSED(kn_lion(&m, .lr = 1, .groups = &g, .group_count = 1, .group_of = fails),
            "no group for a.weight");
    REFUSED(kn_muon(&m, .lr = 1, .group_of = fails), "without .groups");
    kn_optim_group list = { .pattern = "a.*, c.*" };
    REFUSED(kn_sgd(&m, .lr = 1, .groups = &list, .group_count = 1),
            "the group pattern 'c.*' matches no parameter");
    REFUSED(kn_sgd(&m, .lr = 1, .groups = &named, .group_count = 1, .group_of = fails),
            "give one of both");
    REFUSED(kn_sgd(&m, .lr = 1, .groups = &named, .group_count = 1, .group_arg = &number),
            ".group_arg is given without .group_of");
}
