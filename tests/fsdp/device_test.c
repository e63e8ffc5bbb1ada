/* tests/fsdp/device_test.c: training on a device whose memory the host can't touch, without such a
 * device.
 *
 * That of guarded.h takes its place: a host memcpy on its memory ends the test, a kernel on host
 * memory is an error. Collectives go through the host, so all results have the bits of the CPU.
 *
 * Built with KN_TEST_GPU (scripts/gpu-check) the same tests run on a real GPU, against the CPU
 * within a tolerance; KNAP_COMM selects the collectives there. */
#include "fsdp/unit.h"
#include "knap.h"
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/controls.h"
#include "tests/fsdp/guarded.h"

#include <math.h>
#include <sys/mman.h>

#ifdef KN_TEST_GPU
#define ON_GPU 1
#define DEVICE KN_CUDA
static void begin(void)
{
    if (!getenv("KNAP_NCCL")) /* the fake one: each rank has a GPU (cuda_nccl_test.c) */
        setenv("KNAP_CUDA_DEVICE", "0", 0); /* ranks share it */
    kn_cuda_deterministic(true);
}

static void end(void)
{
}
#else
#define ON_GPU 0
#define DEVICE GUARDED
static void begin(void)
{
    guarded_begin();
}

static void end(void)
{
    guarded_end();
}
#endif

/* ---- training -------------------------------------------------------------------------------- */

enum { STEPS = 3, MICRO = 4, VOCAB = 17, BATCH = 2, LEN = 5, PARAMS = 20000 };
enum { IMAGES = 3, SIDE = 6, CLASSES = 5, PIXELS = IMAGES * 3 * SIDE * SIDE };

typedef struct setting {
    const char *what;
    kn_device device;
    int ranks;
    kn_strategy strategy;
    kn_mesh mesh;
    kn_layout_kind layout;
    bool bf16, offload, pinned, prefetch, no_sync, scaler, stochastic, controls;
    bool images; /* a residual net, whose batch norms take the batches of all ranks as one */
    int reshard;
} setting;

typedef struct outcome {
    float loss[STEPS][MICRO], norm[STEPS], param[PARAMS];
    float evaluated; /* the last loss, in evaluation mode */
    int64_t elements;
} outcome;

typedef struct job {
    setting s;
    outcome *out; /* shared by all ranks */
} job;

typedef struct any_net {
    kn_gpt gpt;
    kn_resnet resnet;
    kn_module *self; /* the one in use */
} any_net;

static bool any_init(any_net *n, bool images)
{
    const kn_gpt_config gpt = {
        .layers = 2, .heads = 2, .embd = 12, .ctx = LEN, .vocab = VOCAB, .dropout = 0.1
    };
    const kn_resnet_config resnet = {
        .blocks = { 1, 1 }, .classes = CLASSES, .width = 4, .small_images = true
    };
    *n = (any_net){ 0 };
    n->self = images ? &n->resnet.base : &n->gpt.base;
    return images ? kn_resnet_init(&n->resnet, resnet, KN_F32, KN_META)
                  : kn_gpt_init(&n->gpt, gpt, KN_F32, KN_META);
}

static kn_tensor *text_loss(any_net *n, const setting *s, int step, int micro)
{
    int64_t ids[BATCH * LEN], next[BATCH * LEN];
    for (int i = 0; i < BATCH * LEN; i++) {
        ids[i] = (i * 7 + micro * 5 + step) % VOCAB;
        next[i] = (ids[i] * 3 + 1) % VOCAB;
    }
    kn_tensor *x = kn_from(KN_I64, s->device, ids, KN_SHAPE(BATCH, LEN));
    kn_tensor *y = kn_from(KN_I64, s->device, next, KN_SHAPE(BATCH, LEN));
    return kn_gpt_loss(&n->gpt, x, y);
}

static kn_tensor *image_loss(any_net *n, const setting *s, int step, int micro)
{
    float pixels[PIXELS];
    int64_t classes[IMAGES];
    for (int i = 0; i < PIXELS; i++)
        pixels[i] = (float)((i * 37 + micro * 29 + step * 17 + i / 64 * 5) % 101) / 50 - 1;
    for (int i = 0; i < IMAGES; i++)
        classes[i] = (i * 2 + micro + step) % CLASSES;
    kn_tensor *x = kn_from(KN_F32, s->device, pixels, KN_SHAPE(IMAGES, 3, SIDE, SIDE));
    kn_tensor *y = kn_from(KN_I64, s->device, classes, KN_SHAPE(IMAGES));
    return kn_cross_entropy(kn_call(n->self, x), y);
}

static kn_tensor *loss_of(any_net *n, const setting *s, int step, int micro)
{
    return s->images ? image_loss(n, s, step, micro) : text_loss(n, s, step, micro);
}

static bool micro_batch(any_net *n, const setting *s, int step, int micro, kn_scaler *scaler,
                        float *loss)
{
    IN_SCOPE;
    kn_tensor *l = loss_of(n, s, step, micro);
    kn_backward(scaler ? kn_scale_loss(scaler, l) : l);
    *loss = kn_ok() ? (float)kn_item(l) : 0;
    return kn_ok();
}

static bool evaluate(any_net *n, const setting *s, float *loss)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    kn_train(n->self, false);
    kn_tensor *l = loss_of(n, s, 0, 0);
    *loss = l ? (float)kn_item(l) : 0;
    return kn_ok();
}

/* Of rank 0. */
static bool keep_params(any_net *n, kn_comm *world, outcome *o)
{
    const kn_param *p;
    int params = kn_params(n->self, &p);
    int64_t at = 0;
    static _Thread_local float whole[PARAMS];
    for (int i = 0; i < params && at + p[i].numel <= PARAMS; at += p[i++].numel)
        if (!kn_param_read(n->self, i, whole + at))
            return false;
    if (kn_rank(world) == 0) {
        memcpy(o->param, whole, sizeof whole);
        o->elements = at;
    }
    return true;
}

static void train(kn_comm *world, void *arg)
{
    job *j = arg;
    const setting *s = &j->s;
    any_net net;
    int n = kn_comm_size(world), rank = kn_rank(world), steps = s->images ? 2 : STEPS;
    const int micros = s->images ? n : MICRO; /* emulated convolutions are slow */
    kn_set_threads(1);
    kn_seed(7);
    kn_set_step(0);
    KN_CHECK(any_init(&net, s->images));
    KN_CHECK(kn_fsdp_wrap(net.self, world, .strategy = s->strategy, .mesh = s->mesh,
                          .layout = s->layout, .device = s->device, .seed = 42,
                          .wrap_class = s->images ? "resnet_block" : "gpt_block",
                          .param_dtype = s->bf16 ? KN_BF16 : KN_DTYPE_DEFAULT,
                          .offload_dir = s->pinned && s->device == DEVICE ? "memory"
                                         : s->offload                     ? "/tmp"
                                                                          : NULL,
                          .forward_prefetch = s->prefetch, .reshard_after_forward = s->reshard,
                          .max_reductions = s->controls ? 2 : 0));
    KN_CHECK(!s->images || kn_sync_batch_norm(net.self, world) > 0);
    KN_CHECK(!s->stochastic ||
             kn_fsdp_set_comm_hook(net.self, kn_hook_bf16_stochastic, NULL, true));
    kn_optim *opt = s->images ? kn_sgd(net.self, .lr = 0.05, .momentum = 0.9, .nesterov = true)
                              : kn_adamw(net.self, .lr = 1e-2, .weight_decay = 0.1);
    kn_scaler *scaler = s->scaler ? kn_scaler_new(net.self) : NULL;
    KN_CHECK(opt && (!s->controls || set_controls(&net.gpt, n)));
    for (int step = 0; step < steps; step++) {
        for (int m = rank; m < micros; m += n) {
            if (s->no_sync)
                kn_fsdp_set_gradient_sync(net.self, m + n >= micros, true);
            kn_fsdp_set_is_last_backward(net.self, !s->controls || m + n >= micros);
            KN_CHECK(micro_batch(&net, s, step, m, scaler, &j->out->loss[step][m]));
        }
        float norm = (float)kn_item(kn_clip_grad_norm(net.self, 0.5));
        if (rank == 0)
            j->out->norm[step] = norm;
        KN_CHECK(scaler ? kn_scaler_step(scaler, opt) : kn_step(opt));
    }
    float evaluated = 0;
    KN_CHECK(keep_params(&net, world, j->out) && (!s->images || evaluate(&net, s, &evaluated)));
    if (s->images && rank == 0)
        j->out->evaluated = evaluated;
    kn_scaler_free(scaler);
    kn_optim_free(opt);
    kn_module_free(net.self);
}

static outcome *run(setting s)
{
    outcome *o = shared_bytes(sizeof *o);
    job j = { s, o };
    int failed = spawn_processes(s.ranks, train, &j);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%s: %d of %d ranks failed", s.what, failed, s.ranks);
    return o;
}

/* The GPU's tolerance: sums in another order, functions of another library. */
static void check_close(const setting *s, const char *what, const float *a, const float *b,
                        int64_t n, double most)
{
    for (int64_t i = 0; i < n; i++)
        KN_CHECK(fabs((double)a[i] - b[i]) <= most * fmax(1, fabs((double)a[i])),
                 "%s: %s %lld is %.9g on the cpu, %.9g on the gpu", s->what, what, (long long)i,
                 (double)a[i], (double)b[i]);
}

static void check(setting s)
{
    if (THREADS_ONLY)
        return;
    begin();
    s.device = KN_CPU;
    outcome *cpu = run(s);
    s.device = DEVICE;
    outcome *guarded = run(s);
    end();
    KN_CHECK(cpu->elements > 1000, "%s: %lld elements", s.what, (long long)cpu->elements);
    if (ON_GPU) {
        s.bf16 |= s.stochastic;
        double most = s.bf16 ? 2e-2 : 1e-4;
        check_close(&s, "loss", cpu->loss[0], guarded->loss[0], STEPS * MICRO, most);
        check_close(&s, "norm", cpu->norm, guarded->norm, STEPS, 10 * most);
        check_close(&s, "evaluation", &cpu->evaluated, &guarded->evaluated, 1, 10 * most);
        /* a step of AdamW has length lr whenever the gradient's sign is right */
        check_close(&s, "parameter", cpu->param, guarded->param, cpu->elements,
                    s.bf16 ? 7e-2 : 1e-2);
        munmap(cpu, sizeof *cpu);
        munmap(guarded, sizeof *guarded);
        return;
    }
    KN_CHECK(memcmp(cpu, guarded, sizeof *cpu) == 0,
             "%s: bits differ: first loss %.9g and %.9g, norm %.9g and %.9g", s.what,
             (double)cpu->loss[0][0], (double)guarded->loss[0][0], (double)cpu->norm[0],
             (double)guarded->norm[0]);
    munmap(cpu, sizeof *cpu);
    munmap(guarded, sizeof *guarded);
}

KN_TEST(device, one_rank)
{
    check((setting){ .what = "f32", .ranks = 1 });
    check((setting){ .what = "bf16", .ranks = 1, .bf16 = true, .controls = true });
    check((setting){ .what = "scaled", .ranks = 1, .bf16 = true, .scaler = true });
}

KN_TEST(device, ranks)
{
    check((setting){ .what = "full shard", .ranks = 2 });
    check((setting){
        .what = "shard grad op", .ranks = 2, .strategy = KN_SHARD_GRAD_OP, .bf16 = true });
    check((setting){ .what = "no shard", .ranks = 2, .strategy = KN_NO_SHARD, .no_sync = true });
    check((setting){ .what = "hybrid", .ranks = 4, .strategy = KN_HYBRID_SHARD, .mesh = { 2, 2 } });
}

KN_TEST(device, residual_nets)
{
    check((setting){ .what = "one batch norm over ranks", .ranks = 2, .images = true });
    check((setting){ .what = "one batch norm over ranks, bf16",
                     .ranks = 2,
                     .images = true,
                     .bf16 = true,
                     .pinned = true });
}

KN_TEST(device, layouts_and_prefetch)
{
    check((setting){
        .what = "per param", .ranks = 2, .layout = KN_LAYOUT_PER_PARAM, .prefetch = true });
    check((setting){ .what = "ragged", .ranks = 2, .layout = KN_LAYOUT_RAGGED, .controls = true });
    check((setting){ .what = "rounded at random",
                     .ranks = 2,
                     .layout = KN_LAYOUT_PER_PARAM,
                     .stochastic = true });
    check((setting){ .what = "reshard 2", .ranks = 4, .reshard = 2, .controls = true });
}

KN_TEST(device, offload)
{
    check((setting){ .what = "offload to memory", .ranks = 1, .pinned = true });
    check((setting){ .what = "offload to memory, bf16",
                     .ranks = 2,
                     .pinned = true,
                     .bf16 = true,
                     .controls = true,
                     .layout = KN_LAYOUT_PER_PARAM });
    check((setting){ .what = "offload", .ranks = 1, .offload = true });
    check((setting){
        .what = "offload bf16", .ranks = 2, .offload = true, .bf16 = true, .prefetch = true });
    check((setting){
        .what = "offload per param", .ranks = 2, .offload = true, .layout = KN_LAYOUT_PER_PARAM });
}

/* ---- looking at parameters ------------------------------------------------------------------- */

static bool doubled(kn_module *m, void *arg)
{
    kn_tensor *w = strcmp(m->impl->class_name, "linear") == 0 ? kn_module_param(m, "weight") : NULL;
    IN_SCOPE;
    return !w || kn_copy_(w, kn_scale(w, 2));
}

static void look(kn_comm *world, void *arg)
{
    const setting *s = arg;
    static _Thread_local float before[PARAMS], after[PARAMS];
    OWNED_MODULE kn_linear net = { 0 };
    kn_set_threads(1);
    KN_CHECK(kn_linear_init(&net, NULL, NULL, 7, 5,
                            .device = s->device)); /* wrapping uses that device */
    KN_CHECK(
        kn_fsdp_wrap(&net, world, .layout = s->layout, .offload_dir = s->offload ? "/tmp" : NULL));
    KN_CHECK(kn_device_of(kn_module_param(&net, "weight")) == s->device);
    KN_CHECK(kn_param_read(&net, 0, before));
    KN_CHECK(kn_fsdp_apply(&net, doubled, NULL));
    KN_CHECK(kn_param_read(&net, 0, after));
    for (int i = 0; i < 35; i++)
        KN_CHECK(after[i] == 2 * before[i], "element %d: %g, was %g", i, (double)after[i],
                 (double)before[i]);
    KN_CHECK(kn_param_write(&net, 0, before) && kn_param_read(&net, 0, after));
    KN_CHECK(memcmp(before, after, 35 * sizeof *after) == 0);
    kn_summon_scope scope = kn_summon(&net, .rank0_only = true);
    if (kn_rank(world) == 0)
        KN_CHECK(kn_to_host(kn_module_param(&net, "weight"), after, 35 * sizeof *after));
    KN_CHECK(kn_summon_end(scope) && memcmp(before, after, 35 * sizeof *after) == 0);
}

KN_TEST(device, parameters_are_read_written_and_summoned)
{
    for (int i = 0; i < 8 && !THREADS_ONLY; i++) {
        setting s = { .device = DEVICE,
                      .layout = i & 1 ? KN_LAYOUT_PER_PARAM : KN_LAYOUT_FLAT,
                      .offload = i & 2 };
        begin();
        int failed = spawn_processes(i & 4 ? 2 : 1, look, &s);
        end();
        KN_CHECK_OK();
        KN_CHECK(failed == 0, "%d ranks failed: case %d", failed, i);
    }
}

/* ---- tensors and collectives ----------------------------------------------------------------- */

KN_TEST(device, tensors_cross)
{
    begin();
    kn_scope scope = kn_scope_begin();
    float back[6];
    kn_tensor *a = kn_from(KN_F32, DEVICE, (float[]){ 1, 2, 3, 4, 5, 6 }, KN_SHAPE(2, 3));
    kn_tensor *t = kn_transpose(a, 0, 1), *b = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(3, 2));
    KN_CHECK(kn_to_host(t, back, sizeof back) && back[1] == 4 && back[2] == 2);
    KN_CHECK(kn_copy_(b, t) && ((double *)kn_data(b))[1] == 4);
    KN_CHECK(kn_copy_(kn_transpose(a, 0, 1), kn_scale(b, 10)) && kn_to_host(a, back, sizeof back));
    for (int i = 0; i < 6; i++)
        KN_CHECK(back[i] == 10 * (float)(i + 1), "element %d: %g", i, (double)back[i]);
    kn_scope_end(scope);
    kn_context_end();
    end();
}

static void collect(kn_comm *world, void *arg)
{
    int n = kn_comm_size(world), rank = kn_rank(world);
    kn_stream *s = kn_compute_stream(DEVICE);
    float own[4] = { (float)rank, 1, 2, 3 }, all[8] = { 0 };
    int64_t count[2] = { rank, 5 };
    kn_tensor *a = kn_from(KN_F32, DEVICE, own, KN_SHAPE(4)),
              *b = kn_zeros(KN_F32, DEVICE, KN_SHAPE(4 * n));
    kn_tensor *i = kn_from(KN_I64, DEVICE, count, KN_SHAPE(2));
    void *pa = kn_array_of(a).data, *pb = kn_array_of(b).data, *pi = kn_array_of(i).data;
    KN_CHECK(kn_all_gather(world, pb, pa, 4, KN_F32, s, "a") &&
             kn_to_host(b, all, (size_t)(4 * n) * sizeof *all));
    KN_CHECK(all[4 * (n - 1)] == (float)(n - 1));
    KN_CHECK(kn_reduce_scatter(world, pa, pa, pb, 4, KN_F32, KN_F32, s, "b") &&
             kn_to_host(a, own, sizeof own));
    KN_CHECK(own[0] == (float)(rank + n * rank) && own[3] == (float)(3 + 3 * n));
    KN_CHECK(kn_all_reduce_i64(world, pi, 2, s, "c") && kn_to_host(i, count, sizeof count));
    KN_CHECK(count[0] == n * (n - 1) / 2 && count[1] == 5 * n);
    KN_CHECK(kn_all_reduce_max(world, pa, 4, s, "d") && kn_to_host(a, own, sizeof own));
    KN_CHECK(own[0] == (float)(n - 1 + n * (n - 1)));
    KN_CHECK(kn_broadcast(world, pi, 16, n - 1, s, "e") && kn_barrier(world, s, "f"));
}

/* Each collective of a tensor once: y and dx in f32. */
static void of_tensors(kn_comm *w, kn_device device, kn_dtype dtype, float *y, float *dx)
{
    const int n = kn_comm_size(w), rank = kn_rank(w);
    int64_t rows[8] = { 0 }, received[8];
    float v[12];
    for (int i = 0; i < 12; i++)
        v[i] = sinf((float)(i + 12 * rank));
    rows[rank] = 4;
    rows[n - 1] += 2; /* of 6 */
    kn_tensor *x = kn_require_grad(kn_from(KN_F32, device, v, KN_SHAPE(6, 2)), true);
    kn_tensor *t = kn_all_gather_tensor(w, kn_cast(x, dtype), 1);
    t = kn_reduce_scatter_tensor(w, kn_all_reduce_tensor(w, t), -1);
    t = kn_add(kn_mean_tensor(w, t), kn_broadcast_tensor(w, kn_mul(t, t), n - 1));
    t = kn_all_to_all_tensor(w, kn_all_to_all_tensor(w, t, rows, received), received, NULL);
    t = kn_cast(t, KN_F32);
    KN_CHECK(kn_backward(kn_sum(kn_mul(t, kn_sin(t)), 0, NULL, false)), "backward");
    KN_CHECK(kn_to_host(t, y, 12 * sizeof *y) && kn_to_host(kn_grad(x), dx, 12 * sizeof *dx));
}

static void collect_tensors(kn_comm *world, void *arg)
{
    static const kn_dtype dtypes[] = { KN_F32, KN_BF16 };
    float y[2][12], dx[2][12];
    for (int k = 0; k < 2; k++) {
        of_tensors(world, KN_CPU, dtypes[k], y[0], dx[0]);
        of_tensors(world, DEVICE, dtypes[k], y[1], dx[1]);
        for (int i = 0; i < 12; i++)
            KN_CHECK(fabsf(y[0][i] - y[1][i]) <= (ON_GPU ? 1e-5f : 0) &&
                         fabsf(dx[0][i] - dx[1][i]) <= (ON_GPU ? 1e-5f : 0),
                     "%s, element %d: %g and %g, %g and %g", kn_dtype_name(dtypes[k]), i,
                     (double)y[0][i], (double)y[1][i], (double)dx[0][i], (double)dx[1][i]);
    }
}

KN_TEST(device, collectives)
{
    begin();
    int failed =
        THREADS_ONLY ? 0 : spawn_processes(1, collect, NULL) + spawn_processes(2, collect, NULL);
    for (int n = 1; n <= 3 && !THREADS_ONLY; n++)
        failed += spawn_processes(n, collect_tensors, NULL);
    end();
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%d ranks failed", failed);
}
