/* tests/fsdp/held_test.c: gradients that ranks have not agreed on, or that are held back, where
 * something is dropped or frozen meanwhile. */
#include "nn/hooks.h"
#include "tests/fsdp/two.h"

typedef struct gan {
    kn_module base;
    kn_linear g, d; /* a generator and a discriminator */
    bool skip_d;    /* the result leaves d out */
} gan;

static kn_tensor *gan_forward(kn_module *self, kn_tensor *x)
{
    gan *m = (gan *)self;
    x = kn_gelu_tanh(kn_call(&m->g, x));
    kn_tensor *y = kn_call(&m->d, x);
    return m->skip_d ? x : y;
}

static bool gan_init(gan *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, gan_forward) &&
           kn_linear_init(&m->g, &m->base, "g", 4, 4, .device = KN_META) &&
           kn_linear_init(&m->d, &m->base, "d", 4, 3, .device = KN_META);
}

static bool gan_backward(gan *m, int micro)
{
    IN_SCOPE;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4)), *y = kn_call(m, x);
    return kn_backward(mean_square(y));
}

/* When g is through, ranks have reduced what rank 0's data brought d. */
static void drop_weight(kn_module_event *e, void *arg)
{
    kn_clear_grad(kn_module_param(&((gan *)arg)->d, "weight"));
}

RANK_TEST(held, dropped_inside_the_backward_that_brought_them, .threads = "23")
{
    const kn_param *p;
    OWNED_MODULE gan m;
    KN_CHECK(gan_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = NET_SEED) &&
             kn_module_hook(&m.g, (kn_module_hooks){ .post_backward = drop_weight, .arg = &m }));
    m.skip_d = kn_rank(world) > 0;
    KN_CHECK(gan_backward(&m, kn_rank(world)));
    int n = kn_params(&m, &p);
    for (int i = 0; i < n; i++)
        KN_CHECK((kn_param_grad(&p[i]) == NULL) == (strcmp(p[i].name, "d.weight") == 0), "'%s'",
                 p[i].name);
}

/* d is frozen while its gradients wait on their ranks, then in their shard groups: they stay. */
RANK_TEST(held, what_is_frozen_while_its_gradients_are_held_keeps_them, .threads = "4")
{
    const kn_param *p[2];
    gan m[2]; /* the second one reduces at once */
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < 2; i++) {
        KN_CHECK(gan_init(&m[i]) &&
                 kn_fsdp_wrap(&m[i], world, .wrap_class = "linear", .seed = NET_SEED,
                              .strategy = KN_HYBRID_SHARD, .mesh.shards = 2) &&
                 kn_fsdp_set_gradient_sync(&m[i], i == 1, true));
        KN_CHECK(gan_backward(&m[i], kn_rank(world)));
        kn_freeze(&m[i].d, true);
        for (int last = 0; last < 2; last++)
            KN_CHECK(kn_fsdp_set_gradient_sync(&m[i], true, true) &&
                     kn_fsdp_set_all_reduce(&m[i], last, true) && gan_backward(&m[i], 9));
    }
    int n = kn_params(&m[0], &p[0]), checked = 0;
    kn_params(&m[1], &p[1]);
    for (int i = 0; i < n; i++) {
        kn_tensor *a = kn_param_grad(&p[0][i]), *b = kn_param_grad(&p[1][i]);
        if (p[0][i].name[0] != 'd')
            continue;
        KN_CHECK(a && b && same_bytes(a, b), "'%s'", p[0][i].name);
        checked++;
    }
    KN_CHECK(checked == 2 && kn_grad_scale(&m[0].d) == kn_grad_scale(&m[1].d));
    kn_scope_end(scope);
    kn_module_free(&m[0]);
    kn_module_free(&m[1]);
}

/* d is frozen between two forwards that one backward follows: the first forward's gradient comes,
 * as if it had been the only one, also where d got none on other ranks. */
RANK_TEST(held, of_several_forwards_each_counts_with_its_own_freezing, .threads = "123")
{
    const kn_param *p[2];
    gan m[2];
    (void)arg;
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < 2; i++) {
        KN_CHECK(gan_init(&m[i]) &&
                 kn_fsdp_wrap(&m[i], world, .wrap_class = "linear", .seed = NET_SEED));
        m[i].skip_d = kn_rank(world) > 0;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, 0, KN_SHAPE(2, 4));
        kn_tensor *loss = sum_of(kn_call(&m[i], x));
        kn_freeze(&m[i].d, true);
        if (i == 0)
            loss = kn_add(loss, sum_of(kn_call(&m[i], x)));
        KN_CHECK(kn_backward(loss));
    }
    const int n = kn_params(&m[0], &p[0]);
    kn_params(&m[1], &p[1]);
    for (int i = 0; i < n; i++) {
        kn_tensor *a = kn_param_grad(&p[0][i]), *b = kn_param_grad(&p[1][i]);
        if (p[0][i].name[0] == 'd')
            KN_CHECK(a && b && same_bytes(a, b), "'%s'", p[0][i].name);
    }
    kn_scope_end(scope);
    kn_module_free(&m[0]);
    kn_module_free(&m[1]);
}
