/* tests/fsdp/review_optim_test.c: steps, norms and whole parameters where a tree isn't used in the plain
 * way: several optimizers, gradients held back, wrapped before it was added, gathered by hand. Rank
 * functions return a status. */
#include "tests/fsdp/net.h"

typedef struct two {
    kn_module base;
    kn_linear a, b;
} two;

static kn_tensor *two_forward(kn_module *self, kn_tensor *x)
{
    two *m = (two *)self;
    return kn_call(&m->b, kn_gelu_tanh(kn_call(&m->a, x)));
}

static bool two_init(two *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, two_forward) &&
           kn_linear_init(&m->a, &m->base, "a", 4, 5, .device = KN_META) &&
           kn_linear_init(&m->b, &m->base, "b", 5, 3, .device = KN_META);
}

static kn_tensor *two_loss(void *m, int micro)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4));
    kn_tensor *y = kn_call(m, x);
    return kn_mean(kn_mul(y, y), 0, NULL, false);
}

static bool two_backward(void *m, int micro)
{
    kn_scope scope = kn_scope_begin();
    bool ok = kn_backward(two_loss(m, micro));
    kn_scope_end(scope);
    return ok;
}

static double loss_now(void *m)
{
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(false);
    kn_tensor *y = two_loss(m, 0);
    double loss = y ? kn_item(y) : NAN;
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return loss;
}

static bool said(const char *part)
{
    bool so = !kn_ok() && strstr(kn_error(), part);
    if (!so)
        fprintf(stderr, "expected '%s', got: %s\n", part, kn_ok() ? "no error" : kn_error());
    kn_clear_error();
    return so;
}

/* ---- two optimizers ----------------------------------------------------------------------------- */

/* 3 rounds; a steps after each, b after the second and third. Without ranks: the same on one process
 * that sees every micro-batch. */
static bool train_by_turns(two *m, int ranks, int rank, bool clip)
{
    kn_optim *a = kn_sgd(&m->a, .lr = 0.5), *b = kn_sgd(&m->b, .lr = 0.5);
    bool ok = a && b;
    for (int round = 0; round < 3 && ok; round++) {
        for (int r = 0; r < ranks && ok; r++)
            if (rank < 0 || rank == r)
                ok = two_backward(m, round * ranks + r);
        if (clip && round == 2)
            ok = ok && kn_item(kn_clip_grad_norm(m, 0.01)) > 0.01f;
        ok = ok && kn_step(a) && (round == 0 || kn_step(b));
    }
    kn_optim_free(a);
    kn_optim_free(b);
    return ok;
}

static int by_turns(kn_comm *world, void *arg)
{
    for (int one_unit = 0; one_unit < 2; one_unit++)
        for (int clip = 0; clip < 2; clip++) {
            two m, whole;
            int n = kn_comm_size(world);
            EXPECT(two_init(&whole) && kn_materialize(&whole, KN_CPU, NET_SEED));
            EXPECT(two_init(&m) && kn_fsdp_wrap(&m, world, .seed = NET_SEED,
                                                .wrap_class = one_unit ? NULL : "linear"));
            EXPECT(train_by_turns(&whole, n, -1, clip) &&
                       train_by_turns(&m, n, kn_rank(world), clip),
                   "%s", kn_error());
            const kn_param *p;
            int params = kn_params(&whole, &p);
            for (int i = 0; i < params; i++)
                EXPECT(reads_as(&m, i, p[i].tensor), "'%s' differs, one unit %d, clipped %d",
                       p[i].name, one_unit, clip);
            kn_module_free(&m);
            kn_module_free(&whole);
        }
    (void)arg;
    return 0;
}

KN_TEST(review_optim, two_optimizers_each_see_their_own_micro_batches)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        KN_CHECK(kn_spawn_threads(ranks, by_turns, NULL) == 0, "%d ranks", ranks);
}

KN_TEST(review_optim, gradients_of_different_micro_batches_make_no_step)
{
    two m;
    KN_CHECK(two_init(&m) && kn_fsdp_wrap(&m, NULL, .wrap_class = "linear"));
    kn_optim *a = kn_sgd(&m.a, .lr = 1), *all = kn_sgd(&m, .lr = 1);
    KN_CHECK(two_backward(&m, 0) && kn_step(a) && two_backward(&m, 1));
    KN_CHECK(kn_grad_scale(&m.a) == 1 && kn_grad_scale(&m.b) == 0.5);
    KN_CHECK(!kn_step(all));
    KN_CHECK_ERROR("kn_step: gradients of 'a' are of 1 micro-batches a rank, others of 2");
    KN_CHECK(kn_item(kn_clip_grad_norm(&m, 1)) == 0);
    KN_CHECK_ERROR("kn_clip_grad_norm: gradients of 'a'");
    KN_CHECK(kn_step(a) && kn_step(all), "%s", kn_error());
    KN_CHECK(kn_grad_scale(&m) == 1);
    KN_CHECK(two_backward(&m, 0) && kn_item(kn_clip_grad_norm(&m.a, 1e-9)) > 0 && !kn_step(all));
    KN_CHECK_ERROR("kn_step: only the gradients of 'a' were clipped");
    KN_CHECK(kn_item(kn_clip_grad_norm(&m, 1)) > 0 && kn_step(all), "%s", kn_error());
    kn_optim_free(a);
    kn_optim_free(all);
    kn_module_free(&m);
}

/* ---- gradients held back ------------------------------------------------------------------------ */

static int held_back(kn_comm *world, void *arg)
{
    bool hybrid = kn_comm_size(world) == 4;
    two m;
    EXPECT(two_init(&m) && kn_fsdp_wrap(&m, world, .seed = NET_SEED, .wrap_class = "linear",
                                        .strategy = hybrid ? KN_HYBRID_SHARD : KN_FULL_SHARD,
                                        .mesh = { .shards = hybrid ? 2 : 0 }));
    kn_optim *o = kn_sgd(&m, .lr = 1);
    kn_scaler *s = kn_scaler_new(&m, .init_scale = 1);
    EXPECT(o && s && two_backward(&m, 0));
    EXPECT(hybrid ? kn_fsdp_set_all_reduce(&m, false, true)
                  : kn_fsdp_set_gradient_sync(&m, false, true));
    EXPECT(two_backward(&m, 1));
    const char *why = hybrid ? "held back in its shard group; run the last backward"
                             : "held back on its rank; run the last backward";
    EXPECT(!kn_step(o) && said(why));
    if (kn_comm_size(world) == 1) { /* else the error has ended the ranks */
        EXPECT(!kn_scaler_step(s, o) && said("kn_scaler_step: no loss"));
        EXPECT(kn_fsdp_set_gradient_sync(&m, true, true) && two_backward(&m, 2));
        EXPECT(kn_grad_scale(&m) * 3 == 1 && kn_step(o));
    }
    kn_scaler_free(s);
    kn_optim_free(o);
    kn_module_free(&m);
    (void)arg;
    return 0;
}

KN_TEST(review_optim, a_step_refuses_while_gradients_are_held_back)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        KN_CHECK(kn_spawn_threads(ranks, held_back, NULL) == 0, "%d ranks", ranks);
}

/* ---- clearing by hand --------------------------------------------------------------------------- */

/* What a backward brought to a.weight is dropped, in every way that it may wait; the rest stays. */
static int clear_by_hand(kn_comm *world, void *arg)
{
    bool sync = *(const bool *)arg;
    two m, want;
    kn_optim *o[2];
    for (int k = 0; k < 2; k++) {
        two *t = k ? &want : &m;
        EXPECT(two_init(t) && kn_fsdp_wrap(t, world, .seed = NET_SEED));
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
    for (int i = 0; i < n; i++) /* all of them: nothing is left to step or to count */
        kn_clear_grad(p[i].tensor);
    EXPECT(!kn_step(o[0]) && said("no parameter has a gradient"));
    for (int k = 0; k < 2; k++)
        kn_optim_free(o[k]);
    kn_module_free(&m);
    kn_module_free(&want);
    return 0;
}

KN_TEST(review_optim, kn_clear_grad_drops_a_sharded_gradient)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int sync = 0; sync < 2; sync++) {
            bool on = sync;
            KN_CHECK(kn_spawn_threads(ranks, clear_by_hand, &on) == 0, "%d ranks, sync %d", ranks,
                     on);
        }
}

/* ---- wrapped before it is added ----------------------------------------------------------------- */

static kn_tensor *outer_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(kn_module_child(self, 0), x);
}

static int added_after_wrapping(kn_comm *world, void *arg)
{
    two m, plain;
    kn_module outer = { 0 };
    EXPECT(two_init(&plain) && kn_fsdp_wrap(&plain, world, .seed = NET_SEED));
    EXPECT(two_init(&m) && kn_fsdp_wrap(&m, world, .seed = NET_SEED));
    EXPECT(two_backward(&m, kn_rank(world)) && two_backward(&plain, kn_rank(world)));
    EXPECT(kn_module_init(&outer, outer_forward) && kn_module_add(&outer, "inner", &m.base));
    EXPECT(kn_grad_scale(&outer) == kn_grad_scale(&plain), "gradients that wait are counted");
    float norm = (float)kn_item(kn_clip_grad_norm(&outer, 0)),
          want = (float)kn_item(kn_clip_grad_norm(&plain, 0));
    EXPECT(norm == want && want > 0, "norm %g, not %g", norm, want);
    kn_module_free(&outer);
    kn_module_free(&plain);
    (void)arg;
    return 0;
}

KN_TEST(review_optim, norms_agree_where_a_unit_is_added_after_wrapping)
{
    KN_CHECK(kn_spawn_threads(2, added_after_wrapping, NULL) == 0);
}

/* ---- gathered copies that are out of date ------------------------------------------------------- */

static int stale(kn_comm *world, void *arg)
{
    two m;
    EXPECT(two_init(&m) && kn_fsdp_wrap(&m.a, world) && kn_fsdp_wrap(&m.b, world));
    EXPECT(kn_unshard_wait(kn_fsdp_unshard(&m.a)) && kn_fsdp_wrap(&m, world));
    kn_summon_scope s = kn_summon(&m);
    bool mode = kn_set_grad_mode(false);
    EXPECT(s.s && kn_fill_(kn_module_param(&m.a, "weight"), 5));
    kn_set_grad_mode(mode);
    EXPECT(kn_summon_end(s));
    double first = loss_now(&m);
    EXPECT(first == loss_now(&m), "a summoned change reaches a unit that was gathered by hand");
    EXPECT(kn_unshard_wait(kn_fsdp_unshard(&m.a)));
    const kn_param *p;
    kn_params(&m, &p);
    float host[20];
    for (int i = 0; i < 20; i++)
        host[i] = (float)i;
    EXPECT(kn_shard_write(&m, 0, p[0].master, host));
    double second = loss_now(&m);
    EXPECT(second != first && second == loss_now(&m), "a shard that is written reaches it, too");
    s = kn_summon(&m, .read_only = true);
    EXPECT(!kn_shard_write(&m, 0, p[0].master, host) && said("'a.weight' is summoned"));
    EXPECT(kn_summon_end(s));
    kn_module_free(&m);
    (void)arg;
    return 0;
}

KN_TEST(review_optim, changed_parameters_are_gathered_anew)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        KN_CHECK(kn_spawn_threads(ranks, stale, NULL) == 0, "%d ranks", ranks);
}
