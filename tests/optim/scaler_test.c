/* tests/optim/scaler_test.c: dynamic loss scaling in one process: exact scaling and unscaling,
 * overflow, growth, clipping in between, state, bad use. (tests/fsdp/scaler_test.c: over ranks.) */
#include "nn/nn_internal.h"
#include "tests/optim/one_layer.h"
#include "tests/owned.h"

static bool backward(net *m, kn_scaler *s, kn_dtype t, int batch, double size)
{
    IN_SCOPE;
    kn_tensor *x = kn_scale(kn_randn(t, KN_CPU, 5, (uint64_t)batch, KN_SHAPE(4, 5)), size);
    kn_tensor *y = kn_zeros(t, KN_CPU, KN_SHAPE(4, 3));
    kn_tensor *loss = kn_mse_loss(kn_call(m, x), y);
    return kn_backward(s ? kn_scale_loss(s, loss) : loss);
}

static void read_weight(net *m, float w[15])
{
    KN_CHECK(kn_to_host(kn_module_param(m, "fc.weight"), w, 15 * sizeof *w));
}

/* Scaling by a power of two is exact: the bits of steps without scaling. */
KN_TEST(scaler, scaling_changes_no_bit)
{
    static float w[2][15], norm[2][6];
    for (int scaled = 0; scaled < 2; scaled++) {
        OWNED_MODULE net m;
        build(&m, KN_F32);
        OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
        OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .interval = 2, .init_scale = 1024);
        for (int i = 0; i < 6; i++) {
            KN_CHECK(backward(&m, scaled ? s : NULL, KN_F32, i, 1));
            KN_CHECK(backward(&m, scaled ? s : NULL, KN_F32, i + 9, 1));
            norm[scaled][i] = (float)kn_item(kn_clip_grad_norm(&m, i % 2 ? 0.2 : 0));
            KN_CHECK(scaled ? kn_scaler_step(s, o) : kn_step(o));
        }
        kn_scaler_state st = kn_scaler_get(s);
        KN_CHECK(st.scale == (scaled ? 8192 : 1024) && st.good == 0 && st.skipped == 0);
        KN_CHECK(kn_optim_steps(o) == 6);
        read_weight(&m, w[scaled]);
    }
    KN_CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0 && memcmp(norm[0], norm[1], sizeof norm[0]) == 0);
}

KN_TEST(scaler, overflow_skips_the_step_and_lowers_the_scale)
{
    for (int clip = 0; clip < 2; clip++) {
        float before[15], after[15];
        OWNED_MODULE net m;
        build(&m, KN_F32);
        OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
        OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .backoff = 0.25, .interval = 3);
        read_weight(&m, before);
        int64_t step = kn_get_step();
        KN_CHECK(backward(&m, s, KN_F32, 1, 1e30));
        if (clip)
            KN_CHECK(!isfinite(kn_item(kn_clip_grad_norm(&m, 1))));
        KN_CHECK(kn_scaler_step(s, o));
        kn_scaler_state st = kn_scaler_get(s);
        KN_CHECK(st.scale == 16384 && st.good == 0 && st.skipped == 1);
        KN_CHECK(kn_optim_steps(o) == 0 && kn_get_step() == step + 1, "the data moves on");
        read_weight(&m, after);
        KN_CHECK(memcmp(before, after, sizeof before) == 0);
        const kn_param *p;
        kn_params(&m, &p);
        KN_CHECK(!kn_param_grad(&p[0]) && kn_grad_scale(&m) == 1, "the gradients are consumed");
        for (int i = 0; i < 4; i++)
            KN_CHECK(backward(&m, s, KN_F32, i, 1) && kn_scaler_step(s, o));
        st = kn_scaler_get(s);
        KN_CHECK(st.scale == 32768 && st.good == 1 && st.skipped == 1 && kn_optim_steps(o) == 4);
    }
}

/* The gradients of this batch underflow in f16 unless they are scaled. */
KN_TEST(scaler, small_gradients_survive_in_f16)
{
    for (int scaled = 0; scaled < 2; scaled++) {
        OWNED_MODULE net m = { 0 };
        build(&m, KN_F16);
        OWNED_SCALER kn_scaler *s = kn_scaler_new(&m);
        int tries = 0;
        float norm = 0;
        for (; tries < 40; tries++) { /* 65536 exceeds f16's range: the first may overflow */
            KN_CHECK(backward(&m, scaled ? s : NULL, KN_F16, 1, 2e-5));
            norm = (float)kn_item(kn_clip_grad_norm(&m, 0));
            if (isfinite(norm))
                break;
            kn_scaler_state st = kn_scaler_get(s);
            st.scale /= 2;
            kn_zero_grad(&m);
            KN_CHECK(kn_scaler_set(s, st));
        }
        IN_SCOPE;
        const kn_param *p;
        kn_params(&m, &p);
        int zeros = 0;
        uint16_t g[15];
        KN_CHECK(kn_to_host(kn_param_grad(&p[0]), g, sizeof g));
        for (int i = 0; i < 15; i++)
            zeros += (g[i] & 0x7fff) < 0x40; /* hardly a bit left */
        KN_CHECK(scaled ? zeros == 0 : zeros > 5, "%d of 15 gradients are lost", zeros);
    }
}

KN_TEST(scaler, state_can_be_kept)
{
    OWNED_MODULE net m;
    build(&m, KN_F32);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&m);
    KN_CHECK(kn_scaler_get(s).scale == 65536);
    KN_CHECK(kn_scaler_set(s, (kn_scaler_state){ 128, 7, 3 }));
    kn_scaler_state st = kn_scaler_get(s);
    KN_CHECK(st.scale == 128 && st.good == 7 && st.skipped == 3);
    REFUSED(kn_scaler_set(s, (kn_scaler_state){ 0, 7, 3 }), "no state of a scaler");
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    KN_CHECK(backward(&m, s, KN_F32, 1, 1));
    REFUSED(kn_scaler_set(s, st), "wait for their step");
    KN_CHECK(kn_scaler_step(s, o) && kn_scaler_set(s, st));
}

KN_TEST(scaler, bad_use)
{
    OWNED_MODULE net m, other;
    build(&m, KN_F32);
    build(&other, KN_F32);
    REFUSED(kn_scaler_new(&m, .init_scale = -1), ".init_scale is -1");
    REFUSED(kn_scaler_new(&m, .growth = 0.5), ".growth is 0.5");
    REFUSED(kn_scaler_new(&m, .backoff = 1), ".backoff 1");
    REFUSED(kn_scaler_new(&m, .interval = -4), ".interval -4");
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .init_scale = 0x1p-20), *s2 = kn_scaler_new(&m);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1), *wrong = kn_sgd(&other, .lr = 1);
    KN_CHECK(!kn_scaler_step(s, NULL) && !kn_scale_loss(s, NULL));
    KN_CHECK_ERROR("the optimizer is NULL");
    REFUSED(kn_scaler_step(NULL, o), "the scaler is NULL");
    REFUSED(kn_scaler_step(s, wrong), "different modules");
    REFUSED(kn_scaler_step(s, o), "no parameter has a gradient");
    KN_CHECK(backward(&m, NULL, KN_F32, 1, 1) && !kn_scaler_step(s, o));
    KN_CHECK_ERROR("no loss of this step went through kn_scale_loss");
    kn_zero_grad(&m);
    KN_CHECK(backward(&m, s, KN_F32, 1, 1) && kn_step(o), "kn_step divides by the scale as well");
    REFUSED(kn_scaler_update(s), ".several = true");
    REFUSED(kn_scaler_update(NULL), "the scaler is NULL");
    KN_CHECK(backward(&m, s, KN_F32, 1, 1e30) && !kn_scaler_step(s, o));
    KN_CHECK_ERROR("gradients aren't finite although the loss scale is down to");
    kn_scaler_free(NULL);
}

/* ---- gradients carry the scale of their loss ------------------------------------------------- */

/* Two parts with a layer each; a loss of either, in f32. */
typedef struct pair {
    kn_module base;
    kn_linear part[2];
} pair;

static void build_pair(pair *p)
{
    *p = (pair){ 0 };
    KN_CHECK(kn_module_list_init(&p->base, NULL, "") &&
             kn_linear_init(&p->part[0], &p->base, "a", 5, 3, .no_bias = true) &&
             kn_linear_init(&p->part[1], &p->base, "b", 5, 3, .no_bias = true) &&
             kn_materialize(p, KN_CPU, 3));
}

static kn_tensor *loss_of(pair *p, int part, double size)
{
    kn_tensor *x = kn_scale(kn_randn(KN_F32, KN_CPU, 5, 1, KN_SHAPE(4, 5)), size);
    return kn_mse_loss(kn_call(&p->part[part], x), kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 3)));
}

/* Acts of a program: a loss of part a or b, scaled by s or t or not at all; a step of all with a
 * scaler or without. */
enum { A, B, SUM };
typedef struct act {
    enum { END, BACKWARD, LOOK, STEP, ZERO } what; /* LOOK: scaled, but no backward */
    int part;
    char scaler, twice; /* 's', 't', 0; twice: of the second loss of SUM */
} act;

static const struct program {
    act act[6];
    const char *refused; /* NULL: it trains as without scalers */
} programs[] = {
    { { { BACKWARD, A, 's', 0 }, { BACKWARD, A, 's', 0 }, { STEP, 0, 's', 0 } }, NULL },
    { { { BACKWARD, A, 's', 0 }, { BACKWARD, B, 's', 0 }, { STEP, 0, 's', 0 } }, NULL },
    { { { BACKWARD, SUM, 's', 's' }, { STEP, 0, 's', 0 } }, NULL },
    { { { LOOK, A, 's', 0 }, { BACKWARD, A, 0, 0 }, { STEP, 0, 0, 0 } }, NULL },
    { { { BACKWARD, A, 's', 0 }, { LOOK, A, 't', 0 }, { STEP, 0, 's', 0 } }, NULL },
    { { { BACKWARD, A, 's', 0 }, { ZERO }, { BACKWARD, A, 't', 0 }, { STEP, 0, 't', 0 } }, NULL },
    { { { BACKWARD, A, 's', 0 }, { STEP, 0, 0, 0 } }, NULL },
    { { { BACKWARD, A, 's', 0 }, { BACKWARD, A, 't', 0 }, { STEP, 0, 's', 0 } },
      "different loss scales" },
    { { { BACKWARD, A, 's', 0 }, { BACKWARD, A, 't', 0 }, { STEP, 0, 't', 0 } },
      "different loss scales" },
    { { { BACKWARD, A, 's', 0 }, { BACKWARD, B, 't', 0 }, { STEP, 0, 's', 0 } },
      "different loss scales" },
    { { { BACKWARD, A, 's', 0 }, { BACKWARD, A, 0, 0 }, { STEP, 0, 's', 0 } }, "some that didn't" },
    { { { BACKWARD, A, 0, 0 }, { BACKWARD, A, 's', 0 }, { STEP, 0, 's', 0 } }, "some that didn't" },
    { { { BACKWARD, A, 0, 0 }, { BACKWARD, A, 's', 0 }, { STEP, 0, 0, 0 } }, "some that didn't" },
    { { { BACKWARD, A, 't', 0 }, { STEP, 0, 's', 0 } }, "the scale of another scaler" },
    { { { BACKWARD, A, 0, 0 }, { STEP, 0, 's', 0 } }, "carry no scale" },
    { { { BACKWARD, SUM, 's', 0 } }, "brings 'weight' a gradient" },
    { { { BACKWARD, SUM, 's', 't' } }, "losses with different loss scales" },
};

static kn_tensor *scaled(kn_scaler *const s[2], char by, kn_tensor *loss)
{
    return by ? kn_scale_loss(s[by == 't'], loss) : loss;
}

static bool run_act(const act *a, pair *p, kn_scaler *const s[2], kn_optim *o)
{
    if (a->what == ZERO)
        kn_zero_grad(p);
    if (a->what == ZERO)
        return kn_ok();
    if (a->what == STEP)
        return a->scaler && s ? kn_scaler_step(s[a->scaler == 't'], o) : kn_step(o);
    IN_SCOPE;
    kn_tensor *loss = loss_of(p, a->part == B, 1);
    loss = s ? scaled(s, a->scaler, loss) : loss;
    if (a->part == SUM) {
        kn_tensor *other = loss_of(p, B, 1);
        loss = kn_add(loss, s ? scaled(s, a->twice, other) : other);
    }
    return a->what == LOOK ? loss != NULL : kn_backward(loss);
}

/* The weights after a program, twice, so that what it leaves counts, too. */
static bool run_program(const struct program *g, bool scales, float w[2][15])
{
    pair p;
    build_pair(&p);
    kn_scaler *s[2] = { kn_scaler_new(&p, .init_scale = 64), kn_scaler_new(&p, .init_scale = 8) };
    kn_optim *o = kn_adamw(&p, .lr = 0.1);
    bool ok = true;
    for (int k = 0; k < 2; k++)
        for (const act *a = g->act; a->what && ok; a++)
            ok = run_act(a, &p, scales ? s : NULL, o);
    for (int i = 0; i < 2 && ok; i++)
        kn_to_host(kn_module_param(&p.part[i], "weight"), w[i], sizeof w[i]);
    kn_optim_free(o);
    kn_module_free(&p);
    kn_scaler_free(s[0]);
    kn_scaler_free(s[1]);
    return ok;
}

KN_TEST(scaler, gradients_carry_the_scale_of_their_loss)
{
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        const struct program *g = &programs[i];
        float w[2][2][15];
        if (g->refused) {
            KN_CHECK(!run_program(g, true, w[0]), "program %zu runs", i);
            KN_CHECK_ERROR(g->refused);
            continue;
        }
        KN_CHECK(run_program(g, true, w[0]) && run_program(g, false, w[1]), "%zu", i);
        KN_CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0, "program %zu: other weights", i);
    }
}

KN_TEST(scaler, a_loss_goes_through_one_scale_once)
{
    OWNED_MODULE pair p;
    build_pair(&p);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&p);
    kn_tensor *loss = loss_of(&p, A, 1);
    REFUSED(kn_backward(kn_scale_loss(s, kn_scale_loss(s, loss))), "kn_scale_loss twice");
    KN_CHECK(!kn_grads_wait(&p));
    kn_tensor *x = loss_of(&p, A, 1), *w = kn_module_param(&p.part[0], "weight"), *g;
    KN_CHECK(kn_grad_of(kn_scale_loss(s, x), &w, 1, &g));
    KN_CHECK(!kn_grads_wait(&p) && kn_grad_scale(&p) == 1);
}

/* Gradients that no optimizer steps pile up with the scales of all times; the others' moves. */
KN_TEST(scaler, a_part_without_an_optimizer_holds_nothing_up)
{
    OWNED_MODULE pair p;
    build_pair(&p);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&p, .init_scale = 64, .interval = 1);
    OWNED_OPTIM kn_optim *o = kn_sgd(&p.part[A], .lr = 0.1);
    for (int i = 0; i < 3; i++) {
        IN_SCOPE;
        KN_CHECK(kn_backward(kn_scale_loss(s, kn_add(loss_of(&p, A, 1), loss_of(&p, B, 1)))) &&
                 kn_scaler_step(s, o));
    }
    KN_CHECK(kn_scaler_get(s).scale == 512 && kn_scaler_get(s).skipped == 0);
    kn_tensor *one = kn_scale_loss(s, kn_ones(KN_F32, KN_CPU, KN_SCALAR));
    KN_CHECK(kn_item(one) == 512, "%g", kn_item(one));
    REFUSED(kn_grad_scale(&p.part[B]) == 0, "different loss scales");
}

/* ---- several optimizers ---------------------------------------------------------------------- */

/* What torch.amp.GradScaler gives (2.15; init_scale 1024, growth_interval 3, one update an
 * iteration) where the first optimizer's gradient overflows in iteration 1. */
static const struct {
    double scale;
    int64_t good, steps[2];
} torch_gives[] = { { 1024, 1, { 1, 1 } },
                    { 512, 0, { 1, 2 } },
                    { 512, 1, { 2, 3 } },
                    { 512, 2, { 3, 4 } },
                    { 1024, 0, { 4, 5 } } };

/* gan: each loss comes right before its step. */
static void train_two(bool gan)
{
    OWNED_MODULE pair p;
    build_pair(&p);
    kn_scaler *s = kn_scaler_new(&p, .init_scale = 1024, .interval = 3, .several = true);
    kn_optim *o[2] = { kn_sgd(&p.part[A], .lr = 0.01), kn_sgd(&p.part[B], .lr = 0.01) };
    for (int i = 0; i < 5; i++) {
        for (int k = 0; k < 4; k++) {
            int of = gan ? k / 2 : k % 2;
            bool steps = gan ? k % 2 : k / 2;
            IN_SCOPE;
            KN_CHECK(steps ? kn_scaler_step(s, o[of])
                           : kn_backward(
                                 kn_scale_loss(s, loss_of(&p, of, i == 1 && of == 0 ? 1e19 : 1))));
        }
        KN_CHECK(kn_scaler_update(s));
        kn_scaler_state st = kn_scaler_get(s);
        KN_CHECK(st.scale == torch_gives[i].scale && st.good == torch_gives[i].good &&
                     st.skipped == (i > 0),
                 "iteration %d: %g %lld", i, st.scale, (long long)st.good);
        IN_SCOPE;
        kn_tensor *one = kn_scale_loss(s, kn_ones(KN_F32, KN_CPU, KN_SCALAR));
        KN_CHECK(kn_item(one) == st.scale, "iteration %d: a loss has %g", i, kn_item(one));
        for (int k = 0; k < 2; k++)
            KN_CHECK(kn_optim_steps(o[k]) == torch_gives[i].steps[k]);
    }
    REFUSED(kn_scaler_update(s), "no kn_scaler_step came");
    KN_CHECK(kn_backward(kn_scale_loss(s, loss_of(&p, A, 1))) && kn_scaler_step(s, o[0]) &&
             kn_backward(kn_scale_loss(s, loss_of(&p, A, 1))));
    REFUSED(kn_scaler_step(s, o[0]), "end each one with kn_scaler_update");
    kn_scaler_free(s);
    kn_optim_free(o[0]);
    kn_optim_free(o[1]);
}

KN_TEST(scaler, several_optimizers_have_one_update_an_iteration)
{
    train_two(false);
    train_two(true);
}

KN_TEST(scaler, a_second_optimizer_says_so)
{
    OWNED_MODULE pair p;
    build_pair(&p);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&p);
    kn_optim *o = kn_sgd(&p.part[A], .lr = 0.01), *more = kn_sgd(&p.part[B], .lr = 0.01);
    KN_CHECK(kn_backward(kn_scale_loss(s, kn_add(loss_of(&p, A, 1), loss_of(&p, B, 1)))));
    KN_CHECK(kn_scaler_step(s, o));
    REFUSED(kn_scaler_step(s, more), "make it with .several = true");
    kn_optim_free(o); /* one instead of another */
    KN_CHECK(kn_scaler_step(s, more));
    kn_optim_free(more);
}
