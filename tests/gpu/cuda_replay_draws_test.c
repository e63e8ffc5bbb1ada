/* tests/gpu/cuda_replay_draws_test.c: random draws with grad mode off in recorded steps and around
 * them: those of steps that aren't recorded. */
#include "kernels/context.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/gpu/replay_trainer.h"

/* The losses get noise of before and after the step. */
static bool noisy_step(void *arg)
{
    trainer *t = arg;
    bool mode = kn_set_grad_mode(false);
    kn_tensor *before = kn_randn_like(t->loss);
    kn_set_grad_mode(mode);
    bool ok = before && trainer_step(t);
    kn_set_grad_mode(false);
    ok = ok && kn_copy_(t->loss, kn_add(t->loss, kn_add(before, kn_randn_like(t->loss))));
    kn_set_grad_mode(mode);
    return ok;
}

static float drawn_between[2][2]; /* [replayed]: after one of the steps that are replayed */
static int64_t replays;

static void draw(trainer *t, int n)
{
    bool mode = kn_set_grad_mode(false);
    kn_scope s = kn_scope_begin();
    for (int i = 0; n == 5 && i < 2; i++)
        drawn_between[t->replay != NULL][i] =
            (float)kn_item(kn_mean(kn_randn_like(t->loss), 0, NULL, false));
    kn_scope_end(s);
    kn_set_grad_mode(mode);
    replays = kn_replay_count(t->replay).replayed;
}

/* Draws around the step, and in it as well. */
KN_TEST(cuda_replay_draws, with_grad_mode_off)
{
    static record eager, replayed;
    fake_begin();
    for (int how = 2; how < 4; how++) {
        const kn_step_fn fn = how & 1 ? noisy_step : trainer_step;
        train(&eager, KN_F32, fn, false, draw);
        KN_CHECK(!(how & 1) || eager.loss[STEPS - 2][0] != eager.loss[STEPS - 1][0]);
        train(&replayed, KN_F32, fn, true, draw);
        records_same(&eager, &replayed, how & 1 ? "in the step, too" : "around it");
        for (int i = 0; i < 2; i++)
            KN_CHECK(drawn_between[0][i] == drawn_between[1][i],
                     "draw %d after a replay is another one", i);
        KN_CHECK(drawn_between[0][0] != drawn_between[0][1] && replays > 0);
        KN_CHECK(how & 1 || replays == STEPS - 3, "%lld steps were replayed", (long long)replays);
    }
    kn_context_end();
}

static bool only_draws(void *arg)
{
    trainer *t = arg;
    bool mode = kn_set_grad_mode(false);
    kn_tensor *x = kn_randn_like(t->norm);
    kn_set_grad_mode(mode);
    return x && kn_copy_(t->norm, x);
}

/* Replays of draws without a step would repeat them. */
KN_TEST(cuda_replay_draws, without_a_step_arent_recorded)
{
    float drawn[5];
    trainer t;
    fake_begin();
    KN_CHECK(trainer_begin(&t, KN_F32, true));
    for (int i = 0; i < 5; i++) {
        KN_CHECK(kn_replay_step(t.replay, only_draws, &t));
        KN_CHECK(kn_to_host(t.norm, &drawn[i], sizeof drawn[i]));
        for (int k = 0; k < i; k++)
            KN_CHECK(drawn[i] != drawn[k], "draw %d is draw %d", i, k);
    }
    const char *why = kn_replay_why(t.replay);
    KN_CHECK(why && strstr(why, "draws random numbers without a kn_step"), "%s",
             why ? why : "recorded");
    trainer_end(&t);
    kn_context_end();
}
