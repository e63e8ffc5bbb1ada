/* tests/optim/scaler_test.c: dynamic loss scaling in one process: exact scaling and unscaling,
 * overflow, growth, clipping in between, state, bad use. (tests/fsdp/scaler_test.c: over ranks.) */
#include "nn/nn_internal.h"
#include "tests/optim/one_layer.h"
#include "tests/refused.h"

static bool backward(net *m, kn_scaler *s, kn_dtype t, int batch, double size)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_scale(kn_randn(t, KN_CPU, 5, (uint64_t)batch, KN_SHAPE(4, 5)), size);
    kn_tensor *y = kn_zeros(t, KN_CPU, KN_SHAPE(4, 3));
    kn_tensor *loss = kn_mse_loss(kn_call(m, x), y);
    bool ok = kn_backward(s ? kn_scale_loss(s, loss) : loss);
    kn_scope_end(scope);
    return ok;
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
        net m;
        build(&m, KN_F32);
        kn_optim *o = kn_adamw(&m, .lr = 0.1);
        kn_scaler *s = kn_scaler_new(&m, .interval = 2, .init_scale = 1024);
        for (int i = 0; i < 6; i++) {
            KN_CHECK(backward(&m, scaled ? s : NULL, KN_F32, i, 1));
            KN_CHECK(backward(&m, scaled ? s : NULL, KN_F32, i + 9, 1));
            norm[scaled][i] = (float)kn_item(kn_clip_grad_norm(&m, i % 2 ? 0.2 : 0));
            KN_CHECK(scaled ? kn_scaler_step(s, o) : kn_step(o), "%s", kn_error());
        }
        kn_scaler_state st = kn_scaler_get(s);
        KN_CHECK(st.scale == (scaled ? 8192 : 1024) && st.good == 0 && st.skipped == 0);
        KN_CHECK(kn_optim_steps(o) == 6);
        read_weight(&m, w[scaled]);
        kn_scaler_free(s);
        kn_optim_free(o);
        kn_module_free(&m);
    }
    KN_CHECK(memcmp(w[0], w[1], sizeof w[0]) == 0 && memcmp(norm[0], norm[1], sizeof norm[0]) == 0);
}

KN_TEST(scaler, overflow_skips_the_step_and_lowers_the_scale)
{
    for (int clip = 0; clip < 2; clip++) {
        float before[15], after[15];
        net m;
        build(&m, KN_F32);
        kn_optim *o = kn_adamw(&m, .lr = 0.1);
        kn_scaler *s = kn_scaler_new(&m, .backoff = 0.25, .interval = 3);
        read_weight(&m, before);
        int64_t step = kn_get_step();
        KN_CHECK(backward(&m, s, KN_F32, 1, 1e30));
        if (clip)
            KN_CHECK(!isfinite(kn_item(kn_clip_grad_norm(&m, 1))));
        KN_CHECK(kn_scaler_step(s, o), "%s", kn_error());
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
        kn_scaler_free(s);
        kn_optim_free(o);
        kn_module_free(&m);
    }
}

/* The gradients of this batch underflow in f16 unless they are scaled. */
KN_TEST(scaler, small_gradients_survive_in_f16)
{
    for (int scaled = 0; scaled < 2; scaled++) {
        net m;
        build(&m, KN_F16);
        kn_scaler *s = kn_scaler_new(&m);
        int tries = 0;
        float norm = 0;
        for (; tries < 40; tries++) { /* 65536 exceeds f16's range: the first may overflow */
            KN_CHECK(backward(&m, scaled ? s : NULL, KN_F16, 1, 2e-5), "%s", kn_error());
            norm = (float)kn_item(kn_clip_grad_norm(&m, 0));
            if (isfinite(norm))
                break;
            kn_scaler_state st = kn_scaler_get(s);
            st.scale /= 2;
            kn_zero_grad(&m);
            KN_CHECK(kn_scaler_set(s, st), "%s", kn_error());
        }
        kn_scope scope = kn_scope_begin();
        const kn_param *p;
        kn_params(&m, &p);
        int zeros = 0;
        uint16_t g[15];
        KN_CHECK(kn_to_host(kn_param_grad(&p[0]), g, sizeof g));
        for (int i = 0; i < 15; i++)
            zeros += (g[i] & 0x7fff) < 0x40; /* hardly a bit left */
        KN_CHECK(scaled ? zeros == 0 : zeros > 5, "%d of 15 gradients are lost", zeros);
        kn_scope_end(scope);
        kn_scaler_free(s);
        kn_module_free(&m);
    }
}

KN_TEST(scaler, state_can_be_kept)
{
    net m;
    build(&m, KN_F32);
    kn_scaler *s = kn_scaler_new(&m);
    KN_CHECK(kn_scaler_get(s).scale == 65536);
    KN_CHECK(kn_scaler_set(s, (kn_scaler_state){ 128, 7, 3 }));
    kn_scaler_state st = kn_scaler_get(s);
    KN_CHECK(st.scale == 128 && st.good == 7 && st.skipped == 3);
    REFUSED(kn_scaler_set(s, (kn_scaler_state){ 0, 7, 3 }), "no state of a scaler");
    KN_CHECK(backward(&m, s, KN_F32, 1, 1));
    REFUSED(kn_scaler_set(s, st), "wait for their step");
    kn_scaler_free(s);
    kn_module_free(&m);
}

KN_TEST(scaler, bad_use)
{
    net m, other;
    build(&m, KN_F32);
    build(&other, KN_F32);
    REFUSED(kn_scaler_new(&m, .init_scale = -1), ".init_scale is -1");
    REFUSED(kn_scaler_new(&m, .growth = 0.5), ".growth is 0.5");
    REFUSED(kn_scaler_new(&m, .backoff = 1), ".backoff 1");
    REFUSED(kn_scaler_new(&m, .interval = -4), ".interval -4");
    kn_scaler *s = kn_scaler_new(&m, .init_scale = 0x1p-20), *s2 = kn_scaler_new(&m);
    kn_optim *o = kn_sgd(&m, .lr = 1), *wrong = kn_sgd(&other, .lr = 1);
    KN_CHECK(!kn_scaler_step(s, NULL) && !kn_scale_loss(s, NULL));
    KN_CHECK_ERROR("the optimizer is NULL");
    REFUSED(kn_scaler_step(NULL, o), "the scaler is NULL");
    REFUSED(kn_scaler_step(s, wrong), "different modules");
    REFUSED(kn_scaler_step(s, o), "no parameter has a gradient");
    KN_CHECK(backward(&m, NULL, KN_F32, 1, 1) && !kn_scaler_step(s, o));
    KN_CHECK_ERROR("no loss of this step went through kn_scale_loss");
    REFUSED(backward(&m, s, KN_F32, 1, 1), "scale every loss of a step by one scaler");
    KN_CHECK(kn_step(o));
    KN_CHECK(backward(&m, s, KN_F32, 1, 1) && !backward(&m, s2, KN_F32, 1, 1));
    KN_CHECK_ERROR(
        "gradients of this step carry the scale 9.53674e-07, this loss would carry 65536");
    KN_CHECK(kn_step(o), "kn_step divides by the scale as well");
    KN_CHECK(backward(&m, s, KN_F32, 1, 1e30) && !kn_scaler_step(s, o));
    KN_CHECK_ERROR("gradients aren't finite although the loss scale is down to");
    kn_scaler_free(s);
    kn_scaler_free(s2);
    kn_scaler_free(NULL);
    kn_optim_free(o);
    kn_optim_free(wrong);
    kn_module_free(&m);
    kn_module_free(&other);
}
