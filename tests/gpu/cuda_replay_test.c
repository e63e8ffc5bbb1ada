/* tests/gpu/cuda_replay_test.c: training steps that are recorded and replayed (fsdp/replay.c) over
 * the fake runtime: the bits equal those of steps that aren't recorded, with other events in
 * between. */
#include "kernels/faults.h"
#include "knap.h"
#include "kernels/context.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

static int64_t of_graphs(void)
{
    return kn_ledger_read().live[KN_MEM_GRAPH];
}

/* ---- training steps -------------------------------------------------------------------------- */

enum { STEPS = 9, MICRO = 2, IDS = 16, VALUES = 8192 };

typedef struct trainer {
    kn_gpt model;
    kn_optim *opt;
    kn_scaler *scaler;
    kn_tensor *x[MICRO], *y[MICRO], *loss, *norm; /* at fixed addresses */
    kn_replay *replay;
    int calls;
} trainer;

static bool begin(trainer *t, kn_dtype dtype, bool replayed)
{
    kn_gpt_config c = {
        .layers = 2, .heads = 2, .embd = 16, .ctx = 8, .vocab = 50, .dropout = 0.2
    };
    *t = (trainer){ 0 };
    kn_seed(11);
    kn_set_step(0);
    bool ok = kn_gpt_init(&t->model, c, KN_F32, KN_META) &&
              kn_recompute(kn_module_find(&t->model, "transformer.h.1"), true) &&
              kn_fsdp_wrap(&t->model, NULL, .wrap_class = "gpt_block", .device = KN_CUDA,
                           .param_dtype = dtype, .forward_prefetch = true);
    t->opt = ok ? kn_adamw(&t->model, .lr = 1e-2) : NULL;
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < MICRO; i++) {
        t->x[i] = kn_keep(kn_empty(KN_I64, KN_CUDA, KN_SHAPE(2, 8)));
        t->y[i] = kn_keep(kn_empty(KN_I64, KN_CUDA, KN_SHAPE(2, 8)));
    }
    t->loss = kn_keep(kn_zeros(KN_F32, KN_CUDA, KN_SHAPE(MICRO)));
    t->norm = kn_keep(kn_empty(KN_F32, KN_CUDA, KN_SCALAR));
    kn_scope_end(scope);
    t->replay = replayed && ok ? kn_replay_new(&t->model) : NULL;
    return kn_ok();
}

static void end(trainer *t)
{
    kn_replay_free(t->replay);
    for (int i = 0; i < MICRO; i++) {
        kn_tensor_free(t->x[i]);
        kn_tensor_free(t->y[i]);
    }
    kn_tensor_free(t->loss);
    kn_tensor_free(t->norm);
    kn_optim_free(t->opt);
    kn_module_free(&t->model);
}

static bool step(void *arg)
{
    trainer *t = arg;
    t->calls++;
    for (int i = 0; i < MICRO; i++) {
        kn_tensor *loss = kn_gpt_loss(&t->model, t->x[i], t->y[i]);
        if (!kn_backward(loss) ||
            !kn_copy_(kn_slice(t->loss, 0, i, i + 1), kn_reshape(kn_detach(loss), KN_SHAPE(1))))
            return false;
    }
    kn_tensor *norm = kn_clip_grad_norm(&t->model, 0.05); /* always above the limit */
    return norm && kn_copy_(t->norm, norm) && kn_step(t->opt);
}

static bool feed(trainer *t, int64_t n)
{
    for (int m = 0; m < MICRO; m++) {
        int64_t x[IDS], y[IDS];
        for (int i = 0; i < IDS; i++) {
            x[i] = (i * 7 + n * MICRO + m) % 50;
            y[i] = (i * 7 + 7 + n * MICRO + m) % 50;
        }
        kn_scope s = kn_scope_begin();
        bool ok = kn_copy_(t->x[m], kn_from(KN_I64, KN_CPU, x, KN_SHAPE(2, 8))) &&
                  kn_copy_(t->y[m], kn_from(KN_I64, KN_CPU, y, KN_SHAPE(2, 8)));
        kn_scope_end(s);
        if (!ok)
            return false;
    }
    kn_set_lr(t->opt, 1e-2 / (double)(1 + n));
    return true;
}

/* Losses, then parameters. */
typedef struct record {
    float loss[STEPS][MICRO], norm[STEPS];
    float param[VALUES];
    int64_t values, step, optim_steps;
} record;

static bool read_all(trainer *t, record *r)
{
    const kn_param *p;
    int n = kn_params(&t->model, &p);
    for (int i = 0; i < n; i++) {
        if (r->values + p[i].numel > VALUES)
            return kn_fail("the model has more than %d values", VALUES);
        if (!kn_param_read(&t->model, i, r->param + r->values))
            return false;
        r->values += p[i].numel;
    }
    r->step = kn_get_step();
    r->optim_steps = kn_optim_steps(t->opt);
    return kn_ok();
}

static bool run_step(trainer *t, int n, record *r)
{
    kn_scope s = kn_scope_begin();
    bool ok = feed(t, n) && (t->replay ? kn_replay_step(t->replay, step, t) : step(t));
    kn_scope_end(s);
    return ok && kn_to_host(t->loss, r->loss[n], sizeof r->loss[n]) &&
           kn_to_host(t->norm, &r->norm[n], sizeof r->norm[n]);
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

static void same(const record *a, const record *b, const char *what)
{
    for (int i = 0; i < STEPS; i++)
        for (int m = 0; m < MICRO; m++)
            KN_CHECK(a->loss[i][m] == b->loss[i][m], "%s: loss of step %d, %d: %.9g, %.9g", what, i,
                     m, (double)a->loss[i][m], (double)b->loss[i][m]);
    KN_CHECK(memcmp(a->norm, b->norm, sizeof a->norm) == 0 && a->norm[0] > 0.05);
    KN_CHECK(a->values == b->values && a->values > 1000 &&
                 memcmp(a->param, b->param, (size_t)a->values * 4) == 0,
             "%s: the parameters differ", what);
    KN_CHECK(a->step == b->step && a->optim_steps == b->optim_steps && a->step == STEPS);
}

static void train(record *r, kn_dtype dtype, bool replayed, void (*between)(trainer *t, int n))
{
    trainer t;
    *r = (record){ 0 };
    KN_CHECK(begin(&t, dtype, replayed), "%s", kn_error());
    for (int n = 0; n < STEPS; n++) {
        KN_CHECK(run_step(&t, n, r), "step %d: %s", n, kn_error());
        if (between)
            between(&t, n);
    }
    if (replayed && !between) {
        kn_replay_counts c = kn_replay_count(t.replay);
        KN_CHECK(!kn_replay_why(t.replay), "%s", kn_replay_why(t.replay));
        KN_CHECK(c.eager == 2 && c.recorded == 1 && c.replayed == STEPS - 3 && t.calls == 3);
    }
    KN_CHECK(read_all(&t, r), "%s", kn_error());
    end(&t);
    KN_CHECK_OK();
}

KN_TEST(cuda_replay, replayed_steps_give_the_same_bits)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16 };
    static record eager, replayed;
    fake_begin();
    for (int i = 0; i < 2; i++) {
        train(&eager, types[i], false, NULL);
        KN_CHECK(eager.loss[0][0] != eager.loss[0][1] && eager.loss[8][0] < eager.loss[0][0]);
        for (int backwards = 0; backwards < 2; backwards++) {
            int launches = fake.launches;
            fake.backwards = backwards;
            train(&replayed, types[i], true, NULL);
            KN_CHECK(fake.launches == launches + STEPS - 2);
            same(&eager, &replayed, kn_dtype_name(types[i]));
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
    train(&eager, KN_BF16, false, NULL);
    train(&replayed, KN_BF16, true, disturb);
    same(&eager, &replayed, "evaluations and others' memory");
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
    train(&eager, KN_BF16, false, NULL);
    train(&replayed, KN_BF16, true, change);
    same(&eager, &replayed, "another schedule gives the same bits");
    KN_CHECK(recorded_at[2] == 1 && recorded_at[3] == 1 && recorded_at[5] == 1 &&
             recorded_at[6] == 2 && recorded_at[8] == 2);
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
    KN_CHECK(begin(&t, KN_F16, replayed), "%s", kn_error());
    t.scaler = kn_scaler_new(&t.model, .init_scale = 0x1p38, .interval = 3, .backoff = 0.0625);
    for (int n = 0; n < STEPS; n++) {
        KN_CHECK(feed(&t, n) &&
                     (replayed ? kn_replay_step(t.replay, scaled_step, &t) : scaled_step(&t)),
                 "step %d: %s", n, kn_error());
        KN_CHECK(kn_to_host(t.loss, r->loss[n], sizeof r->loss[n]));
    }
    KN_CHECK(!kn_replay_why(t.replay), "%s", kn_replay_why(t.replay));
    KN_CHECK(!replayed || kn_replay_count(t.replay).replayed == STEPS - 3);
    kn_scaler_state s = kn_scaler_get(t.scaler);
    KN_CHECK(s.skipped >= 4 && s.skipped < STEPS, "%lld skipped", (long long)s.skipped);
    r->norm[0] = (float)s.scale;
    r->norm[1] = (float)s.skipped;
    KN_CHECK(read_all(&t, r), "%s", kn_error());
    kn_scaler_free(t.scaler);
    end(&t);
}

KN_TEST(cuda_replay, a_scaled_step_is_skipped_in_replays_too)
{
    static record eager, replayed;
    fake_begin();
    train_scaled(&eager, false);
    train_scaled(&replayed, true);
    same(&eager, &replayed, "f16, scaled");
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

/* ---- steps that can't be recorded, errors ---------------------------------------------------- */

static bool looking_step(void *arg)
{
    trainer *t = arg;
    return step(t) && isfinite(kn_item(t->norm));
}

static bool setting_step(void *arg)
{
    kn_set_lr(((trainer *)arg)->opt, 1e-3);
    return step(arg);
}

static bool half_step(void *arg)
{
    trainer *t = arg;
    return kn_backward(kn_gpt_loss(&t->model, t->x[0], t->y[0]));
}

static bool copying_step(void *arg)
{
    trainer *t = arg;
    return feed(t, 3) && step(t);
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
        KN_CHECK(begin(&t, KN_F32, true) && feed(&t, 0), "%s", kn_error());
        for (int n = 0; n < 5; n++)
            KN_CHECK(kn_replay_step(t.replay, cases[i].fn, &t), "%s", kn_error());
        const char *why = kn_replay_why(t.replay);
        KN_CHECK(why && strstr(why, cases[i].why), "%zu: %s", i, why ? why : "recorded");
        KN_CHECK(kn_replay_count(t.replay).eager == 5);
        end(&t);
    }
    KN_CHECK(fake.graphs == 0);
    trainer t = { 0 }; /* on the CPU */
    kn_gpt_config c = { .layers = 1, .heads = 2, .embd = 16, .ctx = 8, .vocab = 50 };
    KN_CHECK(kn_gpt_init(&t.model, c, KN_F32, KN_CPU));
    t.replay = kn_replay_new(&t.model);
    t.opt = kn_adamw(&t.model, .lr = 1e-2);
    t.x[0] = kn_keep(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 8)));
    t.y[0] = kn_keep(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 8)));
    KN_CHECK(kn_replay_step(t.replay, half_step, &t) && kn_step(t.opt), "%s", kn_error());
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
    return kn_replay_step(t->replay, step, t);
}

static bool sometimes_looking(void *arg)
{
    trainer *t = arg;
    return step(t) && (t->calls < 3 || isfinite(kn_item(t->norm)));
}

KN_TEST(cuda_replay, errors_of_a_recording_are_errors_of_the_step)
{
    fake_begin();
    trainer t;
    KN_CHECK(begin(&t, KN_F32, true) && feed(&t, 0), "%s", kn_error());
    KN_CHECK(!kn_replay_step(t.replay, NULL, &t));
    KN_CHECK_ERROR("the step is NULL");
    KN_CHECK(kn_replay_step(t.replay, sometimes_looking, &t) &&
             kn_replay_step(t.replay, sometimes_looking, &t));
    KN_CHECK(!kn_replay_step(t.replay, sometimes_looking, &t) && !kn_recording());
    KN_CHECK_ERROR("the host reads a tensor's values: not while a step is recorded");
    t.calls = 0;
    KN_CHECK(kn_replay_step(t.replay, sometimes_looking, &t), "%s", kn_error());
    KN_CHECK(kn_replay_why(t.replay) && kn_replay_count(t.replay).recorded == 0);
    end(&t);
    KN_CHECK(begin(&t, KN_F32, true) && feed(&t, 0), "%s", kn_error());
    for (int i = 0; i < 4; i++)
        KN_CHECK(kn_replay_step(t.replay, step, &t), "%s", kn_error());
    kn_optim_free(t.opt); /* the graph contains its step, so it is recorded anew */
    t.opt = kn_adamw(&t.model, .lr = 1e-2);
    KN_CHECK(kn_replay_step(t.replay, step, &t) && kn_replay_count(t.replay).eager == 3, "%s",
             kn_error());
    KN_CHECK(kn_optim_steps(t.opt) == 1);
    KN_CHECK(kn_graph_begin(KN_CUDA) && !nested_step(&t));
    KN_CHECK_ERROR("replays don't nest");
    kn_graph_cancel();
    kn_replay *late = t.replay; /* a graph may outlive its context, then empty */
    for (int i = 0; i < 2; i++)
        KN_CHECK(kn_replay_step(late, step, &t), "%s", kn_error());
    t.replay = NULL;
    end(&t);
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
    train(&before, KN_BF16, false, NULL); /* scratch and tables of the compute stream stay */
    int64_t tensors = kn_live_tensors(), bytes = kn_ledger_read().live_total, tries = 0;
    bool done = false;
    for (int64_t n = 1; !done; n += 1 + n / 4, tries++) {
        trainer t;
        KN_CHECK(begin(&t, KN_BF16, false) && feed(&t, 0), "%s", kn_error());
        t.replay = kn_replay_new(&t.model, .eager_steps = 1);
        KN_CHECK(kn_replay_step(t.replay, step, &t), "%s", kn_error());
        before.values = after.values = 0;
        KN_CHECK(read_all(&t, &before));
        kn_fail_alloc(n);
        done = kn_replay_step(t.replay, step, &t);
        kn_fail_alloc(0);
        KN_CHECK(done == kn_ok() && !kn_recording() && fake.graphs == done,
                 "allocation %lld: the step %s, but an error %s", (long long)n,
                 done ? "went well" : "failed", kn_ok() ? "doesn't stand" : kn_error());
        kn_clear_error();
        KN_CHECK(done || (read_all(&t, &after) &&
                          memcmp(before.param, after.param, (size_t)after.values * 4) == 0),
                 "allocation %lld: the parameters changed", (long long)n);
        end(&t);
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
