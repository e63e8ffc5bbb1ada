/* tests/gpu/cuda_replay_test.c: training steps that are recorded and replayed (fsdp/replay.c) over
 * the fake runtime: the bits equal those of steps that aren't recorded, with other events in
 * between. */
#include "knap.h"
#include "kernels/context.h"
#include "tests/failing.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/gpu/replay_trainer.h"

static int64_t of_graphs(void)
{
    return kn_ledger_read().live[KN_MEM_GRAPH];
}

/* Allocates all free memory and overwrites it. */
static void scribble(void)
{
    enum { BLOCKS = 300 };
    static const size_t size[] = { 512, 4096, 40000, 300000 };
    kn_memory *m = kn_device_memory(KN_CUDA);
    void *p[BLOCKS];
    for (int i = 0; i < BLOCKS; i++)
        if ((p[i] = kn_take(m, size[i % 4], KN_MEM_DATA)))
            memset(p[i], 0xee, size[i % 4]);
    for (int i = 0; i < BLOCKS; i++)
        kn_give(m, p[i], size[i % 4], KN_MEM_DATA);
}

static void evaluate(trainer *t)
{
    bool mode = kn_set_grad_mode(false);
    kn_train(&t->model, false);
    kn_scope s = kn_scope_begin();
    KN_CHECK(isfinite(kn_item(kn_gpt_loss(&t->model, t->x[0], t->y[0]))));
    kn_scope_end(s);
    kn_train(&t->model, true);
    kn_set_grad_mode(mode);
}

KN_TEST(cuda_replay, replayed_steps_give_the_same_bits)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16 };
    static record eager, replayed;
    fake_begin();
    for (int i = 0; i < 2; i++) {
        train(&eager, types[i], trainer_step, false, NULL);
        KN_CHECK(eager.loss[0][0] != eager.loss[0][1] &&
                 eager.loss[STEPS - 1][0] < eager.loss[0][0]);
        for (int backwards = 0; backwards <= i; backwards++) {
            int launches = fake.launches;
            fake.backwards = backwards;
            train(&replayed, types[i], trainer_step, true, NULL);
            KN_CHECK(fake.launches == launches + STEPS - 2);
            records_same(&eager, &replayed, kn_dtype_name(types[i]));
        }
    }
    kn_context_end();
    KN_CHECK(fake.live == 0 && fake.graphs == 0 && fake.mallocs == fake.frees);
}

static void disturb(trainer *t, int n)
{
    (void)n;
    evaluate(t);
    scribble();
    kn_memory_trim(KN_CUDA);
    scribble();
}

KN_TEST(cuda_replay, what_happens_between_replays_doesnt_matter)
{
    static record eager, replayed;
    fake_begin();
    train(&eager, KN_BF16, trainer_step, false, NULL);
    train(&replayed, KN_BF16, trainer_step, true, disturb);
    records_same(&eager, &replayed, "evaluations and others' memory");
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

static int64_t recorded_at[STEPS];

static void change(trainer *t, int n)
{
    recorded_at[n] = kn_replay_count(t->replay).recorded;
    if (n == 3)
        kn_fsdp_set_reshard_after_forward(&t->model, KN_RESHARD_NEVER, true);
    disturb(t, n);
}

KN_TEST(cuda_replay, a_changed_step_is_recorded_anew)
{
    static record eager, replayed;
    fake_begin();
    train(&eager, KN_BF16, trainer_step, false, NULL);
    train(&replayed, KN_BF16, trainer_step, true, change);
    records_same(&eager, &replayed, "another schedule gives the same bits");
    KN_CHECK(recorded_at[2] == 1 && recorded_at[3] == 1 && recorded_at[5] == 1 &&
             recorded_at[6] == 2 && recorded_at[STEPS - 1] == 2);
    kn_context_end();
    KN_CHECK(fake.live == 0 && fake.graphs == 0);
}

static bool scaled_step(void *arg)
{
    trainer *t = arg;
    t->calls++;
    kn_tensor *loss = kn_gpt_loss(&t->model, t->x[0], t->y[0]);
    return kn_backward(kn_scale_loss(t->scaler, loss)) &&
           kn_copy_(kn_slice(t->loss, 0, 0, 1), kn_reshape(kn_detach(loss), KN_SHAPE(1))) &&
           kn_scaler_step(t->scaler, t->opt);
}

/* The scale begins so high that the first steps are skipped, some of them in replays. */
static void train_scaled(record *r, bool replayed)
{
    trainer t;
    *r = (record){ 0 };
    KN_CHECK(trainer_begin(&t, KN_F16, replayed));
    t.scaler = kn_scaler_new(&t.model, .init_scale = 0x1p38, .interval = 3, .backoff = 0.0625);
    for (int n = 0; n < STEPS; n++) {
        KN_CHECK(trainer_feed(&t, n) &&
                     (replayed ? kn_replay_step(t.replay, scaled_step, &t) : scaled_step(&t)),
                 "step %d", n);
        KN_CHECK(kn_to_host(t.loss, r->loss[n], sizeof r->loss[n]));
    }
    KN_CHECK(!kn_replay_why(t.replay), "%s", kn_replay_why(t.replay));
    KN_CHECK(!replayed || kn_replay_count(t.replay).replayed == STEPS - 3);
    kn_scaler_state s = kn_scaler_get(t.scaler);
    KN_CHECK(s.skipped >= 4 && s.skipped < STEPS, "%lld skipped", (long long)s.skipped);
    r->norm[0] = (float)s.scale;
    r->norm[1] = (float)s.skipped;
    KN_CHECK(trainer_read(&t, r));
    kn_scaler_free(t.scaler);
    trainer_end(&t);
}

KN_TEST(cuda_replay, a_scaled_step_is_skipped_in_replays_too)
{
    static record eager, replayed;
    fake_begin();
    train_scaled(&eager, false);
    train_scaled(&replayed, true);
    records_same(&eager, &replayed, "f16, scaled");
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

/* ---- steps that can't be recorded, errors ---------------------------------------------------- */

static bool looking_step(void *arg)
{
    trainer *t = arg;
    return trainer_step(t) && isfinite(kn_item(t->norm));
}

static bool setting_step(void *arg)
{
    kn_set_lr(((trainer *)arg)->opt, 1e-3);
    return trainer_step(arg);
}

static bool half_step(void *arg)
{
    trainer *t = arg;
    return kn_backward(kn_gpt_loss(&t->model, t->x[0], t->y[0]));
}

static bool copying_step(void *arg)
{
    trainer *t = arg;
    return trainer_feed(t, 3) && trainer_step(t);
}

KN_TEST(cuda_replay, what_cant_be_recorded_runs_and_says_why)
{
    static const struct {
        kn_step_fn fn;
        const char *why;
    } cases[] = {
        { looking_step, "kn_item, kn_to_host: the host reads a tensor's values" },
        { setting_step, "kn_set_lr" },
        { half_step, "doesn't end as it began" },
        { copying_step, "copy: a kernel on the cpu" },
    };
    static record r;
    fake_begin();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        trainer t;
        KN_CHECK(trainer_begin(&t, KN_F32, true) && trainer_feed(&t, 0));
        for (int n = 0; n < 5; n++)
            KN_CHECK(kn_replay_step(t.replay, cases[i].fn, &t));
        const char *why = kn_replay_why(t.replay);
        KN_CHECK(why && strstr(why, cases[i].why), "%zu: %s", i, why ? why : "recorded");
        KN_CHECK(kn_replay_count(t.replay).eager == 5);
        trainer_end(&t);
    }
    KN_CHECK(fake.graphs == 0);
    trainer t = { 0 }; /* on the CPU */
    kn_gpt_config c = { .layers = 1, .heads = 2, .embd = 16, .ctx = 8, .vocab = 50 };
    KN_CHECK(kn_gpt_init(&t.model, c, KN_F32, KN_CPU));
    t.replay = kn_replay_new(&t.model);
    t.opt = kn_adamw(&t.model, .lr = 1e-2);
    t.x[0] = kn_keep(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 8)));
    t.y[0] = kn_keep(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 8)));
    KN_CHECK(kn_replay_step(t.replay, half_step, &t) && kn_step(t.opt));
    KN_CHECK(strstr(kn_replay_why(t.replay), "device cpu records no steps, cuda does"));
    kn_tensor_free(t.x[0]);
    kn_tensor_free(t.y[0]);
    kn_replay_free(t.replay);
    kn_optim_free(t.opt);
    kn_module_free(&t.model);
    (void)r;
    KN_CHECK_OK();
}

static bool nested_step(void *arg)
{
    trainer *t = arg;
    return kn_replay_step(t->replay, trainer_step, t);
}

static bool sometimes_looking(void *arg)
{
    trainer *t = arg;
    return trainer_step(t) && (t->calls < 3 || isfinite(kn_item(t->norm)));
}

KN_TEST(cuda_replay, errors_of_a_recording_are_errors_of_the_step)
{
    fake_begin();
    trainer t;
    KN_CHECK(trainer_begin(&t, KN_F32, true) && trainer_feed(&t, 0));
    REFUSED(kn_replay_step(t.replay, NULL, &t), "the step is NULL");
    KN_CHECK(kn_replay_step(t.replay, sometimes_looking, &t) &&
             kn_replay_step(t.replay, sometimes_looking, &t));
    KN_CHECK(!kn_replay_step(t.replay, sometimes_looking, &t) && !kn_recording());
    KN_CHECK_ERROR("the host reads a tensor's values: not while a step is recorded");
    t.calls = 0;
    KN_CHECK(kn_replay_step(t.replay, sometimes_looking, &t));
    KN_CHECK(kn_replay_why(t.replay) && kn_replay_count(t.replay).recorded == 0);
    trainer_end(&t);
    KN_CHECK(trainer_begin(&t, KN_F32, true) && trainer_feed(&t, 0));
    for (int i = 0; i < 4; i++)
        KN_CHECK(kn_replay_step(t.replay, trainer_step, &t));
    kn_optim_free(t.opt); /* the graph contains its step, so it is recorded anew */
    t.opt = kn_adamw(&t.model, .lr = 1e-2);
    KN_CHECK(kn_replay_step(t.replay, trainer_step, &t) && kn_replay_count(t.replay).eager == 3);
    KN_CHECK(kn_optim_steps(t.opt) == 1);
    KN_CHECK(kn_graph_begin(KN_CUDA) && !nested_step(&t));
    KN_CHECK_ERROR("replays don't nest");
    kn_graph_cancel();
    kn_replay *late = t.replay; /* a graph may outlive its context, then empty */
    for (int i = 0; i < 2; i++)
        KN_CHECK(kn_replay_step(late, trainer_step, &t));
    t.replay = NULL;
    trainer_end(&t);
    kn_context_end();
    kn_replay_free(late);
    KN_CHECK(fake.live == 0 && fake.graphs == 0, "%zu", fake.live);
}

/* Allocations of a recording fail in turn (all of the first ones, fewer later): an error, nothing
 * of the step ran, and nothing is left behind. */
KN_TEST(cuda_replay, allocations_of_a_recording_may_fail)
{
    static record before, after;
    fake_begin();
    trainer first;
    KN_CHECK(trainer_begin(&first, KN_BF16, false) && trainer_feed(&first, 0) &&
             trainer_step(&first));
    trainer_end(&first); /* scratch and tables of the compute stream stay */
    int64_t tensors = kn_live_tensors(), bytes = kn_ledger_read().live_total, tries = 0;
    bool done = false;
    for (int64_t n = 1; !done; n += 1 + n / 4, tries++) {
        trainer t;
        KN_CHECK(trainer_begin(&t, KN_BF16, false) && trainer_feed(&t, 0));
        t.replay = kn_replay_new(&t.model, .eager_steps = 1);
        KN_CHECK(kn_replay_step(t.replay, trainer_step, &t));
        before.values = after.values = 0;
        KN_CHECK(trainer_read(&t, &before));
        done = WITH_FAILING(n, kn_replay_step(t.replay, trainer_step, &t));
        KN_CHECK(!kn_recording() && fake.graphs == done, "allocation %lld: a graph stays",
                 (long long)n);
        KN_CHECK(done || (trainer_read(&t, &after) &&
                          memcmp(before.param, after.param, (size_t)after.values * 4) == 0),
                 "allocation %lld: the parameters changed", (long long)n);
        trainer_end(&t);
        kn_clear_error();
        KN_CHECK(kn_live_tensors() == tensors && kn_ledger_read().live_total == bytes &&
                     of_graphs() == 0,
                 "allocation %lld: %lld tensors, %lld bytes leak", (long long)n,
                 (long long)(kn_live_tensors() - tensors),
                 (long long)(kn_ledger_read().live_total - bytes));
    }
    KN_CHECK(tries > 18, "only %lld allocations were tried", (long long)tries);
    kn_context_end();
    KN_CHECK(fake.live == 0 && fake.graphs == 0);
}
