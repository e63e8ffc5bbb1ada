/* tests/fsdp/scaler_test.c: loss scaling agrees over ranks: if one rank's gradients overflow, all
 * skip, lower the scale equally, and continue as one process does, which trains as one without a
 * scale. Rank functions return a status. */
#include "tests/fsdp/net.h"

enum { STEPS = 6, MICRO = 4, OVERFLOWS = 2 };
#define CLIP 0.001

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

/* Micro-batch 1 of step OVERFLOWS is large: its gradients, not its loss, overflow f16. Without a
 * scaler the loss has no scale. */
static bool half_backward(half *m, kn_scaler *s, int step, int micro)
{
    kn_scope scope = kn_scope_begin();
    double size = step == OVERFLOWS && micro == 1 ? 600 : 0.1;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)(2 * step + micro), KN_SHAPE(4, 5));
    kn_tensor *y = kn_cast(kn_call(m, kn_scale(x, size)), KN_F32);
    kn_tensor *loss = kn_mse_loss(y, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 3)));
    bool ok = kn_backward(s ? kn_scale_loss(s, loss) : loss);
    kn_scope_end(scope);
    return ok;
}

typedef struct outcome {
    float norm[STEPS], param[2][35];
    double scale[STEPS];
    int64_t done, skipped, step;
} outcome;

typedef struct setting {
    int ranks;
    kn_strategy strategy;
    kn_mesh mesh;
    kn_layout_kind layout;
} setting;

static const setting settings[] = {
    { 1, KN_FULL_SHARD, { 0 }, KN_LAYOUT_FLAT },
    { 2, KN_FULL_SHARD, { 0 }, KN_LAYOUT_FLAT },
    { 2, KN_NO_SHARD, { 0 }, KN_LAYOUT_FLAT },
    { 2, KN_SHARD_GRAD_OP, { 0 }, KN_LAYOUT_PER_PARAM },
    { 2, KN_HYBRID_SHARD, { 2, 1 }, KN_LAYOUT_RAGGED },
    { 4, KN_FULL_SHARD, { 0 }, KN_LAYOUT_PER_PARAM }, /* some ranks hold no part of a bias */
    { 4, KN_HYBRID_SHARD_GRAD_OP, { 2, 2 }, KN_LAYOUT_FLAT }, /* adds in another order */
};
enum { RUNS = sizeof settings / sizeof settings[0] };

typedef struct job {
    const setting *s;
    bool clip;
    outcome *out; /* one a rank; shared */
} job;

/* AdamW doesn't see a constant scale; SGD does. */
static kn_optim *optim_of(half *m, bool clip)
{
    return clip ? kn_adamw(m, .lr = 0.01) : kn_sgd(m, .lr = 1);
}

static int train(kn_comm *world, void *arg)
{
    job *j = arg;
    int n = kn_comm_size(world), rank = kn_rank(world);
    outcome *out = &j->out[rank];
    half m;
    kn_set_threads(1);
    kn_set_step(0);
    EXPECT(half_init(&m) && kn_fsdp_wrap(&m, world, .strategy = j->s->strategy, .mesh = j->s->mesh,
                                         .layout = j->s->layout, .wrap_class = "linear",
                                         .param_dtype = KN_F16, .reduce_dtype = KN_F32, .seed = 5));
    kn_optim *o = optim_of(&m, j->clip);
    kn_scaler *s = kn_scaler_new(&m, .init_scale = 4096, .interval = 2);
    EXPECT(o && s);
    for (int step = 0; step < STEPS; step++) {
        for (int a = 0; a < MICRO / n; a++)
            EXPECT(half_backward(&m, s, step, a * n + rank));
        out->norm[step] = j->clip ? (float)kn_item(kn_clip_grad_norm(&m, CLIP)) : 0;
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

/* One process alone: the reference for all. */
static void check_alone(const outcome *o, bool clip)
{
    const double scale[STEPS] = { 4096, 8192, 4096, 4096, 8192, 8192 };
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(o->scale[i] == scale[i], "step %d: scale %g", i, o->scale[i]);
    KN_CHECK(o->done == STEPS - 1 && o->skipped == 1 && o->step == STEPS);
    for (int i = 0; i < STEPS && clip; i++)
        KN_CHECK(isfinite(o->norm[i]) == (i != OVERFLOWS) && o->norm[i] != 0, "step %d: norm %g", i,
                 (double)o->norm[i]);
}

static bool near(float a, float b, bool same)
{
    return a == b || (!isfinite(a) && !isfinite(b)) || (!same && fabsf(a - b) < 1e-4f * fabsf(b));
}

static void check_rank(const outcome *o, const outcome *alone, const setting *s, int rank)
{
    bool same = s->mesh.shards != 2;
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(near(o->norm[i], alone->norm[i], same) && o->scale[i] == alone->scale[i],
                 "%d ranks, strategy %d, rank %d, step %d", s->ranks, s->strategy, rank, i);
    for (int i = 0; i < 35; i++)
        KN_CHECK(near(o->param[0][i], alone->param[0][i], same) &&
                     near(o->param[1][i], alone->param[1][i], same),
                 "%d ranks, strategy %d, rank %d, element %d", s->ranks, s->strategy, rank, i);
    KN_CHECK(o->done == alone->done && o->skipped == 1 && o->step == STEPS,
             "%d ranks, strategy %d: rank %d went another way", s->ranks, s->strategy, rank);
}

/* One process without scaler in f32 that leaves out step OVERFLOWS. */
static int train_unscaled(kn_comm *world, void *arg)
{
    const job *j = arg;
    half m;
    (void)world;
    kn_set_threads(1);
    kn_set_step(0);
    EXPECT(half_init(&m) && kn_materialize(&m, KN_CPU, 5));
    kn_optim *o = optim_of(&m, j->clip);
    for (int step = 0; step < STEPS; step++) {
        for (int a = 0; a < MICRO && step != OVERFLOWS; a++)
            EXPECT(half_backward(&m, NULL, step, a));
        if (step == OVERFLOWS)
            continue;
        j->out->norm[step] = j->clip ? (float)kn_item(kn_clip_grad_norm(&m, CLIP)) : 0;
        EXPECT(kn_step(o), "step %d", step);
    }
    EXPECT(kn_param_read(&m, 0, j->out->param[0]) && kn_param_read(&m, 2, j->out->param[1]));
    kn_optim_free(o);
    kn_module_free(&m);
    return 0;
}

/* The scale changes nothing but rounding: neither norms nor parameters. */
static void check_unscaled(const outcome *o, bool clip)
{
    outcome *plain =
        mmap(NULL, sizeof *plain, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    job j = { NULL, clip, plain };
    KN_CHECK((THREADS_ONLY ? kn_spawn_threads : kn_spawn)(1, train_unscaled, &j) == 0);
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(i == OVERFLOWS || fabsf(o->norm[i] - plain->norm[i]) <= 0.01f * plain->norm[i],
                 "step %d: norm %g, without a scale %g", i, (double)o->norm[i],
                 (double)plain->norm[i]);
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < (k ? 21 : 35); i++)
            KN_CHECK(fabsf(o->param[k][i] - plain->param[k][i]) < 2e-3f,
                     "element %d: %g, without a scale %g", i, (double)o->param[k][i],
                     (double)plain->param[k][i]);
    munmap(plain, sizeof *plain);
}

KN_TEST(scaler, an_overflow_on_one_rank_skips_the_step_on_all)
{
    outcome *out = mmap(NULL, RUNS * 4 * sizeof *out, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int clip = 0; clip < 2; clip++) {
        memset(out, 0, RUNS * 4 * sizeof *out);
        for (int i = 0; i < RUNS; i++) {
            const setting *s = &settings[i];
            job j = { s, clip, out + 4 * i };
            int failed = THREADS_ONLY ? kn_spawn_threads(s->ranks, train, &j)
                                      : kn_spawn(s->ranks, train, &j);
            KN_CHECK(failed == 0, "run %d: %d ranks failed", i, failed);
            for (int r = 0; r < s->ranks && i > 0; r++)
                check_rank(&j.out[r], out, s, r);
        }
        check_alone(out, clip);
        check_unscaled(out, clip);
    }
    munmap(out, RUNS * 4 * sizeof *out);
}

/* ---- ranks that choose branches -------------------------------------------------------------- */

static kn_tensor *head_only(kn_module *self, kn_tensor *x)
{
    return kn_call(&((net *)self)->head, x);
}

/* Of even ranks, the loss of all; odd ranks' reaches the head alone. */
static kn_tensor *branch_loss(net *m, int rank, int micro)
{
    kn_tensor *x =
        kn_from(KN_F32, KN_CPU, (float[NET_DIM]){ 1, (float)micro }, KN_SHAPE(1, NET_DIM));
    kn_tensor *all = net_loss(m, micro), *head = kn_call_method(m, head_only, x);
    return rank % 2 == 0 ? all : kn_mean(head, 0, NULL, false);
}

typedef struct branches {
    bool scales, mixes;
    float w[NET_VOCAB * NET_DIM], bias[NET_DIM];
} branches;

static int train_branches(kn_comm *world, void *arg)
{
    branches *b = arg, mine = *b;
    net m;
    EXPECT(net_init(&m, KN_META) && kn_fsdp_wrap(&m.fc2, world, .seed = NET_SEED) &&
               kn_fsdp_wrap(&m, world, .seed = NET_SEED),
           "wrap");
    kn_optim *o = kn_adamw(&m, .lr = 0.01);
    kn_scaler *s = kn_scaler_new(&m, .init_scale = 1024, .interval = 2);
    bool refused = false;
    for (int step = 0; step < 3; step++) {
        for (int micro = 0; micro < 3; micro++) {
            kn_scope scope = kn_scope_begin();
            kn_fsdp_set_gradient_sync(&m, micro > 0, true);
            kn_tensor *loss = branch_loss(&m, kn_rank(world) + micro, 3 * step + micro);
            bool scaled = b->scales && !(b->mixes && micro == 1);
            EXPECT(kn_backward(scaled ? kn_scale_loss(s, loss) : loss), "backward");
            kn_scope_end(scope);
        }
        if (b->mixes) {
            refused = !kn_scaler_step(s, o) && strstr(kn_error(), "some that didn't");
            break;
        }
        EXPECT(b->scales ? kn_scaler_step(s, o) : kn_step(o), "step");
    }
    if (b->mixes)
        kn_clear_error();
    EXPECT(refused == b->mixes, "%s", b->mixes ? "not refused" : "refused");
    EXPECT(b->mixes || (kn_param_read(&m, 0, mine.w) && kn_param_read(&m, 4, mine.bias)), "read");
    if (kn_rank(world) == 0)
        *b = mine;
    kn_scaler_free(s);
    kn_optim_free(o);
    kn_module_free(&m);
    return !kn_ok();
}

/* Their gradients carry the scale of the others' losses, as the plain steps' bits show; sums of
 * scaled and other losses are refused on all ranks. */
KN_TEST(scaler, gradients_of_other_ranks_carry_their_scale)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        branches plain = { .scales = false }, scaled = { .scales = true },
                 mixed = { .scales = true, .mixes = true };
        KN_CHECK(kn_spawn_threads(ranks, train_branches, &plain) == 0 &&
                     kn_spawn_threads(ranks, train_branches, &scaled) == 0,
                 "%d ranks", ranks);
        KN_CHECK(memcmp(plain.w, scaled.w, sizeof plain.w) == 0 &&
                     memcmp(plain.bias, scaled.bias, sizeof plain.bias) == 0,
                 "%d ranks: other bits", ranks);
        KN_CHECK(kn_spawn_threads(ranks, train_branches, &mixed) == 0, "%d ranks, mixed", ranks);
    }
}
