/* tests/fsdp/scaler_test.c: loss scaling agrees over ranks: where one rank's gradients overflow,
 * all skip, lower the scale alike, and go on as one process does. Rank functions return a
 * status. */
#include "tests/fsdp/net.h"

enum { STEPS = 6, MICRO = 2, OVERFLOWS = 2 };

/* A linear model in f16: the size of its inputs decides whether its gradients overflow. */
typedef struct half {
    kn_module base;
    kn_linear fc, out;
} half;

static kn_tensor *half_forward(kn_module *self, kn_tensor *x)
{
    half *m = (half *)self;
    return kn_call(&m->out, kn_call(&m->fc, x));
}

static bool half_init(half *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, half_forward) &&
           kn_linear_init(&m->fc, &m->base, "fc", 5, 7, .device = KN_META) &&
           kn_linear_init(&m->out, &m->base, "out", 7, 3, .device = KN_META);
}

/* Micro-batch 1 of step OVERFLOWS is large: its gradients, not its loss, leave f16. */
static bool half_backward(half *m, kn_scaler *s, int step, int micro)
{
    kn_scope scope = kn_scope_begin();
    double size = step == OVERFLOWS && micro == 1 ? 600 : 0.1;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)(2 * step + micro), KN_SHAPE(4, 5));
    kn_tensor *y = kn_cast(kn_call(m, kn_scale(x, size)), KN_F32);
    bool ok =
        kn_backward(kn_scale_loss(s, kn_mse_loss(y, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 3)))));
    kn_scope_end(scope);
    return ok;
}

typedef struct outcome {
    float norm[STEPS], param[2][35];
    double scale[STEPS];
    int64_t done, skipped, step;
} outcome;

typedef struct job {
    kn_strategy strategy;
    bool clip;
    outcome *out; /* one a rank; shared */
} job;

static int train(kn_comm *world, void *arg)
{
    job *j = arg;
    int n = kn_comm_size(world), rank = kn_rank(world);
    outcome *out = &j->out[rank];
    half m;
    kn_set_threads(1);
    kn_set_step(0);
    EXPECT(half_init(&m) && kn_fsdp_wrap(&m, world, .strategy = j->strategy, .wrap_class = "linear",
                                         .param_dtype = KN_F16, .reduce_dtype = KN_F32, .seed = 5));
    kn_optim *o = kn_adamw(&m, .lr = 0.01);
    kn_scaler *s = kn_scaler_new(&m, .init_scale = 4096, .interval = 2);
    EXPECT(o && s);
    for (int step = 0; step < STEPS; step++) {
        for (int a = 0; a < MICRO / n; a++)
            EXPECT(half_backward(&m, s, step, a * n + rank));
        out->norm[step] = j->clip ? (float)kn_item(kn_clip_grad_norm(&m, 0.001)) : 0;
        EXPECT(kn_scaler_step(s, o), "step %d", step);
        out->scale[step] = kn_scaler_get(s).scale;
    }
    out->done = kn_optim_steps(o);
    out->skipped = kn_scaler_get(s).skipped;
    out->step = kn_get_step();
    EXPECT(kn_param_read(&m, 0, out->param[0]) && kn_param_read(&m, 2, out->param[1]));
    kn_scaler_free(s);
    kn_optim_free(o);
    kn_module_free(&m);
    return 0;
}

KN_TEST(scaler, an_overflow_on_one_rank_skips_the_step_on_all)
{
    enum { RUNS = 3 };
    outcome *out = mmap(NULL, RUNS * 2 * sizeof *out, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int clip = 0; clip < 2; clip++) {
        memset(out, 0, RUNS * 2 * sizeof *out);
        for (int i = 0; i < RUNS; i++) { /* one process; two in two ways */
            job j = { i == 2 ? KN_NO_SHARD : KN_FULL_SHARD, clip, out + 2 * i };
            int ranks = i == 0 ? 1 : 2;
            int failed =
                THREADS_ONLY ? kn_spawn_threads(ranks, train, &j) : kn_spawn(ranks, train, &j);
            KN_CHECK(failed == 0, "run %d: %d ranks failed", i, failed);
        }
        const double scale[STEPS] = { 4096, 8192, 4096, 4096, 8192, 8192 };
        for (int i = 0; i < STEPS; i++)
            KN_CHECK(out->scale[i] == scale[i], "step %d: scale %g", i, out->scale[i]);
        KN_CHECK(out->done == STEPS - 1 && out->skipped == 1 && out->step == STEPS);
        for (int i = 0; i < STEPS && clip; i++)
            KN_CHECK(isfinite(out->norm[i]) == (i != OVERFLOWS) && out->norm[i] != 0,
                     "step %d: norm %g", i, (double)out->norm[i]);
        for (int r = 2; r < 2 * RUNS; r++)
            for (int i = 0; i < STEPS; i++) {
                bool same = out[r].norm[i] == out->norm[i] ||
                            (!isfinite(out[r].norm[i]) && !isfinite(out->norm[i]));
                KN_CHECK(same && out[r].scale[i] == out->scale[i], "rank %d, step %d", r, i);
            }
        for (int r = 2; r < 2 * RUNS; r++)
            KN_CHECK(memcmp(out[r].param, out->param, sizeof out->param) == 0 &&
                         out[r].done == out->done && out[r].skipped == 1 && out[r].step == STEPS,
                     "rank %d went another way", r);
    }
    munmap(out, RUNS * 2 * sizeof *out);
}
