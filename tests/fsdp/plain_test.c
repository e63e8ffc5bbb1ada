/* tests/fsdp/plain_test.c: sharded training against a process without fsdp, for cases that the
 * matrix has no reference for: bf16 with f32 masters, and one forward with several backwards. Rank
 * functions return a status. */
#include "tests/fsdp/net.h"

enum { LAYERS = 2, VOCAB = 17, BATCH = 2, LEN = 6, ROUNDS = 2, STEPS = 2, ROOM = 8192 };

typedef struct outcome {
    float loss[STEPS][ROUNDS][4]; /* of each rank */
    float param[ROOM];
    int64_t elements;
} outcome;

typedef struct job {
    kn_strategy strategy;
    kn_layout_kind layout;
    int ranks;
    outcome *out;
} job;

static bool gpt(kn_gpt *g, kn_dtype dtype)
{
    kn_gpt_config c = { .layers = LAYERS, .heads = 2, .embd = 12, .ctx = LEN, .vocab = VOCAB };
    memset(g, 0, sizeof *g);
    return kn_gpt_init(g, c, dtype, KN_META);
}

static kn_tensor *loss_of(kn_gpt *g, int step, int micro)
{
    int64_t ids[BATCH * LEN], next[BATCH * LEN];
    for (int i = 0; i < BATCH * LEN; i++) {
        ids[i] = (i * 7 + micro * 5 + step * 3) % VOCAB;
        next[i] = (ids[i] * 3 + 1) % VOCAB;
    }
    kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH, LEN));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, next, KN_SHAPE(BATCH, LEN));
    return kn_gpt_loss(g, x, y);
}

static outcome *shared_outcomes(void)
{
    return shared_bytes(4 * sizeof(outcome));
}

/* ---- bf16 ------------------------------------------------------------------------------------ */

static int train_bf16(kn_comm *world, void *arg)
{
    const job *j = arg;
    kn_gpt g;
    int rank = kn_rank(world), n = kn_comm_size(world);
    outcome *out = &j->out[rank];
    const kn_param *p;
    EXPECT(gpt(&g, KN_F32) &&
               kn_fsdp_wrap(&g, world, .wrap_class = "gpt_block", .seed = 42,
                            .strategy = j->strategy, .layout = j->layout, .param_dtype = KN_BF16),
           "wrap");
    kn_optim *opt = kn_sgd(&g, .lr = 0.5);
    for (int step = 0; step < STEPS; step++) {
        kn_scope scope = kn_scope_begin();
        for (int r = 0; r < ROUNDS; r++) {
            kn_tensor *l = loss_of(&g, step, r * n + rank);
            EXPECT(kn_backward(l), "backward");
            out->loss[step][r][rank] = (float)kn_item(l);
        }
        kn_scope_end(scope);
        EXPECT(kn_step(opt), "step");
    }
    int params = kn_params(&g, &p);
    for (int i = 0; i < params; out->elements += p[i++].numel)
        EXPECT(kn_param_read(&g, i, out->param + out->elements), "read");
    kn_optim_free(opt);
    kn_module_free(&g);
    return !kn_ok();
}

/* lo = hi, rounded. */
static bool round_params(const kn_param *lo, const kn_param *hi, int n)
{
    bool mode = kn_set_grad_mode(false), ok = true;
    for (int i = 0; i < n && ok; i++)
        ok = kn_copy_(lo[i].tensor, hi[i].tensor);
    kn_set_grad_mode(mode);
    return ok;
}

/* sum += lo's gradients, which are bf16, in f32. */
static bool add_gradients(const kn_param *lo, int n, float *sum, bool first)
{
    static float one[ROOM];
    bool ok = true;
    for (int i = 0; i < n && ok; sum += lo[i++].numel) {
        kn_tensor *g = kn_grad(lo[i].tensor);
        ok = g && kn_to_host(kn_cast(g, KN_F32), one, (size_t)lo[i].numel * sizeof *one);
        for (int64_t k = 0; k < lo[i].numel; k++)
            sum[k] = first ? one[k] : sum[k] + one[k];
        kn_clear_grad(lo[i].tensor);
    }
    return ok;
}

/* One process: a model whose parameters are bf16 computes, f32 masters take its gradients' sum in
 * f32. */
static int plain_bf16(kn_comm *world, void *arg)
{
    const job *j = arg;
    outcome *out = &j->out[0];
    kn_gpt hi, lo;
    const kn_param *master, *low;
    static float sum[ROOM];
    EXPECT(gpt(&hi, KN_F32) && kn_materialize(&hi, KN_CPU, 42), "masters");
    EXPECT(gpt(&lo, KN_BF16) && kn_materialize(&lo, KN_CPU, 1), "model");
    int n = kn_params(&hi, &master);
    EXPECT(kn_params(&lo, &low) == n, "parameters");
    for (int step = 0; step < STEPS; step++) {
        float factor = 1.0f / (float)(ROUNDS * j->ranks);
        for (int m = 0; m < ROUNDS * j->ranks; m++) {
            kn_scope scope = kn_scope_begin();
            EXPECT(round_params(low, master, n), "round");
            kn_tensor *l = loss_of(&lo, step, m);
            EXPECT(kn_backward(l) && add_gradients(low, n, sum, m == 0), "backward");
            out->loss[step][m / j->ranks][m % j->ranks] = (float)kn_item(l);
            kn_scope_end(scope);
        }
        float *s = sum;
        for (int i = 0; i < n; s += master[i++].numel) {
            float *v = kn_data(master[i].master);
            for (int64_t k = 0; k < master[i].numel; k++)
                v[k] -= 0.5f * (factor * s[k]);
        }
    }
    for (int i = 0; i < n; out->elements += master[i++].numel)
        EXPECT(kn_to_host(master[i].master, out->param + out->elements,
                          (size_t)master[i].numel * sizeof(float)),
               "read");
    kn_module_free(&hi);
    kn_module_free(&lo);
    return !kn_ok();
}

static void check_bf16(job j)
{
    job ref = { .ranks = j.ranks, .out = shared_outcomes() };
    j.out = shared_outcomes();
    KN_CHECK(spawn(1, plain_bf16, &ref) == 0, "reference");
    KN_CHECK(spawn(j.ranks, train_bf16, &j) == 0, "%d ranks", j.ranks);
    KN_CHECK(ref.out->elements > 1000 && ref.out->elements == j.out->elements);
    for (int r = 0; r < j.ranks; r++) {
        for (int s = 0; s < STEPS; s++)
            for (int a = 0; a < ROUNDS; a++)
                KN_CHECK(j.out[r].loss[s][a][r] == ref.out->loss[s][a][r],
                         "%d ranks, loss of step %d, round %d: %.9g, not %.9g", j.ranks, s, a,
                         (double)j.out[r].loss[s][a][r], (double)ref.out->loss[s][a][r]);
        for (int64_t k = 0; k < ref.out->elements; k++) /* fma or not is up to the optimizer */
            KN_CHECK(fabsf(j.out[r].param[k] - ref.out->param[k]) <=
                         2e-7f * (1 + fabsf(ref.out->param[k])),
                     "%d ranks, element %lld: %.9g, not %.9g", j.ranks, (long long)k,
                     (double)j.out[r].param[k], (double)ref.out->param[k]);
    }
    munmap(ref.out, 4 * sizeof(outcome));
    munmap(j.out, 4 * sizeof(outcome));
}

KN_TEST(plain, bf16_computes_as_a_model_declared_in_it)
{
    for (int ranks = 1; ranks <= 4; ranks++)
        check_bf16((job){ .ranks = ranks,
                          .strategy = KN_FULL_SHARD + ranks % 3,
                          .layout = KN_LAYOUT_FLAT + ranks % 2 });
}

/* ---- one forward, several backwards ---------------------------------------------------------- */

/* Two losses of one output: the second backward uses the graph that the first kept. */
static bool two_backwards(net *m, int micro, float *loss)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = net_loss(m, micro), *b = a ? kn_mul(a, a) : NULL;
    bool ok = b && kn_backward(a, .retain_graph = true) && kn_backward(b);
    *loss = ok ? (float)kn_item(b) : 0;
    kn_scope_end(scope);
    return ok;
}

static int several(kn_comm *world, const way *w, bool recompute)
{
    net m, ref;
    const kn_param *p, *r;
    static _Thread_local float sum[512], have[512];
    int n = kn_comm_size(world), at = 0;
    float loss, want[8];
    EXPECT(net_init(&m, KN_META) && net_wrap(&m, world, w) && net_reference(&ref), "init");
    EXPECT(kn_recompute(&m, recompute) && kn_recompute(&m.fc1, recompute), "recompute");
    EXPECT(two_backwards(&m, kn_rank(world), &loss), "backwards");
    int params = kn_params(&ref, &r);
    EXPECT(kn_params(&m, &p) == params, "parameters");
    /* both backwards of each rank, in the order in which ranks reduce: first every rank's first */
    for (int pass = 0; pass < 2; pass++)
        for (int rank = 0; rank < n; rank++) {
            kn_scope scope = kn_scope_begin();
            kn_tensor *a = net_loss(&ref, rank), *b = kn_mul(a, a);
            EXPECT(kn_backward(pass ? b : a), "reference");
            want[rank] = (float)kn_item(b);
            at = 0;
            for (int i = 0; i < params; at += (int)r[i++].numel) {
                kn_tensor *g = r[i].trainable ? kn_grad(r[i].tensor) : NULL;
                float one[128] = { 0 };
                EXPECT(!g || kn_to_host(g, one, (size_t)r[i].numel * sizeof *one), "gradient");
                for (int64_t k = 0; k < r[i].numel; k++)
                    sum[at + k] = pass == 0 && rank == 0 ? one[k] : sum[at + k] + one[k];
            }
            kn_scope_end(scope);
            kn_zero_grad(&ref);
        }
    EXPECT(loss == want[kn_rank(world)], "loss %g", (double)loss);
    EXPECT(kn_grad_scale(&m) == 0.5 / n, "each backward counts: %g", kn_grad_scale(&m));
    at = 0;
    for (int i = 0; i < params; at += (int)p[i++].numel) {
        kn_tensor *g = kn_param_grad(&p[i]);
        EXPECT((g != NULL) == r[i].trainable, "%s", p[i].name);
        if (g)
            EXPECT(kn_shard_read(&m, i, g, have), "read");
        for (int64_t k = 0; g && k < p[i].numel; k++)
            EXPECT(w->mesh.shards ? fabsf(have[k] - sum[at + k]) < 1e-5f * (1 + fabsf(sum[at + k]))
                                  : have[k] == sum[at + k],
                   "%s[%d]: %.9g, not %.9g", p[i].name, (int)k, (double)have[k],
                   (double)sum[at + k]);
    }
    kn_module_free(&m);
    kn_module_free(&ref);
    return !kn_ok();
}

static int several_backwards(kn_comm *world, void *arg)
{
    return several(world, arg, false);
}

static int several_replays(kn_comm *world, void *arg)
{
    return several(world, arg, true);
}

KN_TEST(plain, one_forward_with_several_backwards)
{
    in_all_ways(several_backwards);
}

/* Each of them runs the recomputed calls again, and the units inside. */
KN_TEST(plain, one_forward_with_several_backwards_of_recomputed_calls)
{
    in_all_ways(several_replays);
}
