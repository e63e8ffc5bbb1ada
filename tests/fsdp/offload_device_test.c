/* tests/fsdp/offload_device_test.c: units that compute on a device while masters, gradients and
 * optimizer state lie in page-locked memory of the host. The device is a stand-in whose streams are
 * threads (stand_in.h): so the step really overlaps with the backward, and a transfer in the wrong
 * order changes the results. Rank functions return a status and never assert. */
#include "fsdp/fsdp.h"
#include "fsdp/unit.h"
#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/fsdp/stand_in.h"

#include <stdatomic.h>
#include <sys/mman.h>

enum { STEPS = 3, MICRO = 4, LAYERS = 3, VOCAB = 17, BATCH = 2, LEN = 5, PARAMS = 20000 };

typedef struct setting {
    const char *what;
    kn_device device;
    int ranks, micro; /* micro-batches a step over all ranks */
    kn_strategy strategy;
    kn_mesh mesh;
    kn_layout_kind layout;
    kn_dtype param, reduce;
    bool file, unpinned, on_device; /* offload to a file, to pageable memory; no offload */
    bool clip, scaler, no_sync, sgd, low_grads;
    int64_t embd;
    stand_in stand_in;
} setting;

typedef struct outcome {
    float loss[STEPS][MICRO], norm[STEPS], param[PARAMS];
    int64_t elements, peak; /* of the stand-in's memory */
    int64_t pinned;         /* bytes of page-locked memory */
    int waits;              /* of the host, before a step */
    char error[256];
} outcome;

typedef struct job {
    setting s;
    outcome *out; /* shared by all ranks */
} job;

static kn_tensor *forward(kn_gpt *g, const setting *s, int step, int micro)
{
    int64_t ids[BATCH * LEN], next[BATCH * LEN];
    for (int i = 0; i < BATCH * LEN; i++) {
        ids[i] = (i * 7 + micro * 5 + step) % VOCAB;
        next[i] = (ids[i] * 3 + 1) % VOCAB;
    }
    kn_tensor *x = kn_from(KN_I64, s->device, ids, KN_SHAPE(BATCH, LEN));
    kn_tensor *y = kn_from(KN_I64, s->device, next, KN_SHAPE(BATCH, LEN));
    return kn_gpt_loss(g, x, y);
}

static bool model(kn_gpt *g, kn_comm *world, const setting *s)
{
    kn_gpt_config c = { .layers = LAYERS,
                        .heads = 2,
                        .embd = s->embd ? s->embd : 12,
                        .ctx = LEN,
                        .vocab = VOCAB,
                        .dropout = 0.1 };
    const char *dir = s->file ? "/tmp" : "memory";
    kn_set_threads(1);
    kn_seed(7);
    kn_set_step(0);
    return kn_gpt_init(g, c, KN_F32, KN_META) &&
           kn_fsdp_wrap(g, world, .strategy = s->strategy, .mesh = s->mesh, .layout = s->layout,
                        .wrap_class = "gpt_block", .device = s->device, .seed = 42,
                        .param_dtype = s->param, .reduce_dtype = s->reduce,
                        .keep_low_precision_grads = s->low_grads,
                        .offload_unpinned = s->unpinned && s->device == STAND_IN,
                        .offload_dir = s->device == STAND_IN && !s->on_device ? dir : NULL);
}

static kn_optim *optimizer(void *m, const setting *s)
{
    return s->sgd ? kn_sgd(m, .lr = 1e-1, .momentum = 0.9)
                  : kn_adamw(m, .lr = 1e-2, .weight_decay = 0.1);
}

/* Losses are read after the step: until then the host doesn't wait for the device. */
static bool one_step(kn_gpt *g, job *j, int step, int rank, int n, kn_scaler *scaler, kn_optim *opt)
{
    const setting *s = &j->s;
    kn_tensor *loss[MICRO];
    kn_scope scope = kn_scope_begin();
    int before = stand_in_waits();
    for (int m = rank; m < s->micro; m += n) {
        if (s->no_sync)
            kn_fsdp_set_gradient_sync(g, m + n >= s->micro, true);
        loss[m] = forward(g, s, step, m);
        kn_backward(scaler ? kn_scale_loss(scaler, loss[m]) : loss[m]);
    }
    j->out->waits += stand_in_waits() - before;
    kn_tensor *norm = s->clip ? kn_clip_grad_norm(g, 0.5) : NULL;
    bool ok = scaler ? kn_scaler_step(scaler, opt) : kn_step(opt);
    for (int m = rank; ok && m < s->micro; m += n)
        j->out->loss[step][m] = (float)kn_item(loss[m]);
    if (ok && norm && rank == 0)
        j->out->norm[step] = (float)kn_item(norm);
    kn_scope_end(scope);
    return ok;
}

static int train(kn_comm *world, void *arg)
{
    job *j = arg;
    const setting *s = &j->s;
    kn_gpt g = { 0 };
    int n = kn_comm_size(world), rank = kn_rank(world);
    bool ok = model(&g, world, s);
    kn_optim *opt = ok ? optimizer(&g, s) : NULL;
    kn_scaler *scaler = s->scaler ? kn_scaler_new(&g) : NULL;
    for (int step = 0; ok && step < STEPS; step++)
        ok = one_step(&g, j, step, rank, n, scaler, opt);
    const kn_param *p;
    int params = ok ? kn_params(&g, &p) : 0;
    int64_t at = 0;
    static _Thread_local float whole[PARAMS];
    for (int i = 0; ok && i < params && at + p[i].numel <= PARAMS; at += p[i++].numel)
        ok = kn_param_read(&g, i, whole + at);
    if (rank == 0) {
        memcpy(j->out->param, whole, sizeof whole);
        j->out->elements = at;
        j->out->peak = stand_in_peak();
        j->out->pinned = kn_ledger_read().live_pinned;
        snprintf(j->out->error, sizeof j->out->error, "%s", kn_error() ? kn_error() : "");
    }
    kn_scaler_free(scaler);
    kn_optim_free(opt);
    kn_module_free(&g);
    return ok && kn_ok() ? 0 : 1;
}

static outcome *run(setting s, bool fails)
{
    outcome *o = mmap(NULL, sizeof *o, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    s.micro = s.micro ? s.micro : s.ranks;
    job j = { s, o };
    stand_in_begin(s.stand_in);
    int failed = kn_spawn(s.ranks, train, &j);
    stand_in_end();
    KN_CHECK_OK();
    KN_CHECK((failed > 0) == fails, "%s: %d of %d ranks failed: %s", s.what, failed, s.ranks,
             o->error);
    return o;
}

static void check_equal(const char *what, const outcome *a, const outcome *b)
{
    KN_CHECK(a->elements > 1000, "%s: %lld elements", what, (long long)a->elements);
    KN_CHECK(memcmp(a->loss, b->loss, sizeof a->loss) == 0 &&
                 memcmp(a->norm, b->norm, sizeof a->norm) == 0 &&
                 memcmp(a->param, b->param, sizeof a->param) == 0,
             "%s: bits differ: last loss %.9g and %.9g, norm %.9g and %.9g", what,
             (double)a->loss[STEPS - 1][0], (double)b->loss[STEPS - 1][0], (double)a->norm[0],
             (double)b->norm[0]);
}

/* The bits of units on the CPU, and no wait of the host before a step. */
static void check(setting s)
{
    if (THREADS_ONLY)
        return;
    s.device = KN_CPU;
    outcome *cpu = run(s, false);
    s.device = STAND_IN;
    outcome *away = run(s, false);
    check_equal(s.what, cpu, away);
    KN_CHECK(s.ranks > 1 || s.file || s.unpinned || away->waits == 0,
             "%s: the host waited %d times in forward and backward", s.what, away->waits);
    bool pinned = !s.file && !s.unpinned;
    KN_CHECK(s.ranks > 1 || (away->pinned >= 12 * away->elements) == pinned,
             "%s: %lld elements, %lld bytes of page-locked memory", s.what,
             (long long)away->elements, (long long)away->pinned);
    munmap(cpu, sizeof *cpu);
    munmap(away, sizeof *away);
}

KN_TEST(offload_device, same_bits_on_one_rank)
{
    check((setting){ .what = "f32", .ranks = 1 });
    check((setting){ .what = "f32, three micro-batches", .ranks = 1, .micro = 3, .clip = true });
    check((setting){ .what = "bf16", .ranks = 1, .param = KN_BF16, .micro = 2 });
    check((setting){ .what = "bf16, sgd", .ranks = 1, .param = KN_BF16, .sgd = true });
    check((setting){ .what = "bf16 gradients kept",
                     .ranks = 1,
                     .param = KN_BF16,
                     .low_grads = true,
                     .layout = KN_LAYOUT_PER_PARAM });
    check(
        (setting){ .what = "scaled f16", .ranks = 1, .param = KN_F16, .scaler = true, .micro = 2 });
    check((setting){ .what = "no sync", .ranks = 1, .no_sync = true, .micro = 4, .clip = true });
    check((setting){ .what = "a slow way home", .ranks = 1, .micro = 3, .stand_in.home_us = 3000 });
    check((setting){ .what = "inline", .ranks = 1, .micro = 2, .stand_in.inline_streams = true });
    check((setting){ .what = "a file", .ranks = 1, .micro = 2, .param = KN_BF16, .file = true });
}

KN_TEST(offload_device, same_bits_on_several_ranks)
{
    check((setting){ .what = "two ranks", .ranks = 2, .micro = 4 });
    check((setting){ .what = "two ranks, bf16, clipped",
                     .ranks = 2,
                     .param = KN_BF16,
                     .clip = true,
                     .layout = KN_LAYOUT_PER_PARAM });
    check((setting){
        .what = "shard grad op", .ranks = 2, .strategy = KN_SHARD_GRAD_OP, .param = KN_BF16 });
    check((setting){ .what = "no shard", .ranks = 2, .strategy = KN_NO_SHARD, .micro = 4 });
    check((setting){ .what = "hybrid",
                     .ranks = 4,
                     .strategy = KN_HYBRID_SHARD,
                     .mesh = { 2, 2 },
                     .layout = KN_LAYOUT_RAGGED });
}

/* Masters in memory that isn't page-locked: the same bits, and the ledger's bytes of the host. */
KN_TEST(offload_device, ordinary_memory_of_the_host)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        check((setting){ .what = "unpinned",
                         .ranks = ranks,
                         .micro = 4,
                         .unpinned = true,
                         .param = ranks > 1 ? KN_BF16 : KN_DTYPE_DEFAULT });
}

/* ---- a model larger than the device ---------------------------------------------------------- */

/* The model exceeds the device's limit with parameters, gradients and states there. Offloaded it
 * fits, and the losses equal those of a device without a limit. */
KN_TEST(offload_device, a_model_larger_than_the_device_trains)
{
    if (THREADS_ONLY)
        return;
    setting s = { .what = "unlimited", .device = STAND_IN, .ranks = 1, .micro = 2, .embd = 24 };
    outcome *offloaded = run(s, false);
    s.on_device = true;
    outcome *whole = run(s, false);
    check_equal("unlimited", whole, offloaded);
    s.stand_in.limit = offloaded->peak;
    KN_CHECK(4 * whole->elements * 4 > s.stand_in.limit,
             "the model's %lld elements fit the device's %lld bytes", (long long)whole->elements,
             (long long)s.stand_in.limit);
    outcome *refused = run(s, true);
    KN_CHECK(strstr(refused->error, "left in the stand-in's memory"), "%s", refused->error);
    s.on_device = false;
    s.what = "limited";
    outcome *limited = run(s, false);
    check_equal("limited", whole, limited);
    munmap(offloaded, sizeof *offloaded);
    munmap(whole, sizeof *whole);
    munmap(refused, sizeof *refused);
    munmap(limited, sizeof *limited);
}

/* ---- the step beside the backward ------------------------------------------------------------ */

static atomic_bool open_gate, gate_timed_out;
static int waits_in_step;

static void stand_at_gate(void *arg)
{
    (void)arg;
    double begin = kn_now();
    while (!open_gate && kn_now() - begin < 10)
        usleep(100);
    gate_timed_out = !open_gate;
}

/* Blocks the device until the gate is open. */
static void close_way(kn_module *m, void *arg)
{
    (void)m, (void)arg;
    char nothing = 0;
    kn_stream_host(kn_compute_stream(STAND_IN), "gate", stand_at_gate, &nothing, sizeof nothing);
}

/* A bucket's turn begins with two waits, so at the third the first bucket has been stepped. */
static void count_waits(void)
{
    if (++waits_in_step == 3)
        open_gate = true;
}

static int step_beside_backward(kn_comm *world, void *arg)
{
    setting s = { .device = STAND_IN, .ranks = 1, .micro = 1 };
    kn_gpt g = { 0 };
    (void)arg;
    EXPECT(model(&g, world, &s) && kn_fsdp_units(&g, NULL, 0) == LAYERS + 1);
    /* the first module of the first block: few enough jobs follow it to fit a stream's queue */
    kn_module *m = kn_module_find(&g, "transformer.h.0.ln_1");
    EXPECT(m && kn_module_hook(m, (kn_module_hooks){ .pre_backward = close_way }));
    kn_optim *opt = optimizer(&g, &s);
    kn_scope scope = kn_scope_begin();
    kn_backward(forward(&g, &s, 0, 0));
    stand_in_watch(count_waits);
    EXPECT(kn_step(opt));
    stand_in_watch(NULL);
    kn_scope_end(scope);
    EXPECT(waits_in_step == 2 * (LAYERS + 1), "%d waits", waits_in_step);
    EXPECT(open_gate && !gate_timed_out,
           "the first block's backward had to end before the step began");
    kn_optim_free(opt);
    kn_module_free(&g);
    return kn_ok() ? 0 : 1;
}

KN_TEST(offload_device, the_host_steps_late_layers_while_the_device_is_in_backward)
{
    if (THREADS_ONLY)
        return;
    stand_in_begin((stand_in){ 0 });
    int failed = kn_spawn(1, step_beside_backward, NULL);
    stand_in_end();
    KN_CHECK_OK();
    KN_CHECK(failed == 0);
}

/* ---- two optimizers over one bucket ---------------------------------------------------------- */

typedef struct pair {
    kn_module base;
    kn_linear a, b;
} pair;

static kn_tensor *pair_forward(kn_module *self, kn_tensor *x)
{
    pair *m = (pair *)self;
    return kn_call(&m->b, kn_tanh(kn_call(&m->a, x)));
}

typedef struct two {
    kn_device device;
    float *out; /* shared by all ranks */
} two;

/* a is stepped after every backward, b after every second: the gradients that a's step consumed are
 * zeroed on the host, where b's gradient waits. */
static int step_in_turns(kn_comm *world, void *arg)
{
    const two *t = arg;
    pair m = { 0 };
    float x[6] = { 1, -2, 3, -4, 5, -6 };
    EXPECT(kn_module_init(&m.base, pair_forward) &&
           kn_linear_init(&m.a, &m.base, "a", 6, 9, .device = KN_META) &&
           kn_linear_init(&m.b, &m.base, "b", 9, 4, .device = KN_META));
    EXPECT(kn_fsdp_wrap(&m, world, .device = t->device, .param_dtype = KN_BF16,
                        .offload_dir = t->device == STAND_IN ? "memory" : NULL));
    kn_optim *a = kn_sgd(&m.a, .lr = 0.1, .momentum = 0.9), *b = kn_adamw(&m.b, .lr = 0.1);
    for (int step = 0; step < 6; step++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *y = kn_call(&m, kn_from(KN_F32, t->device, x, KN_SHAPE(1, 6)));
        EXPECT(kn_backward(kn_mean(kn_mul(y, y), 0, NULL, false)) && kn_step(a));
        EXPECT(step % 2 == 0 || kn_step(b));
        kn_scope_end(scope);
    }
    for (int i = 0, at = 0; i < 4; at += i == 0 ? 54 : i == 1 ? 9 : 36, i++)
        EXPECT(kn_param_read(&m, i, t->out + at));
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    return kn_ok() ? 0 : 1;
}

KN_TEST(offload_device, two_optimizers_over_one_bucket)
{
    enum { BYTES = (54 + 9 + 36 + 4) * sizeof(float) };
    for (int ranks = 1; ranks <= 2 && !THREADS_ONLY; ranks++) {
        float *out[2];
        for (int away = 0; away < 2; away++) {
            out[away] =
                mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            two t = { away ? STAND_IN : KN_CPU, out[away] };
            stand_in_begin((stand_in){ .home_us = 1000 });
            int failed = kn_spawn(ranks, step_in_turns, &t);
            stand_in_end();
            KN_CHECK_OK();
            KN_CHECK(failed == 0, "%d of %d ranks failed", failed, ranks);
        }
        KN_CHECK(memcmp(out[0], out[1], BYTES) == 0, "%d ranks: first weight %.9g and %.9g", ranks,
                 (double)out[0][0], (double)out[1][0]);
        munmap(out[0], BYTES);
        munmap(out[1], BYTES);
    }
}

/* Offloaded parameters are stepped by the host, others by the device: one step can't do both. */
static int step_in_two_places(kn_comm *world, void *arg)
{
    kn_linear net = { 0 };
    (void)arg;
    EXPECT(kn_linear_init(&net, NULL, NULL, 5, 4, .device = KN_META));
    EXPECT(kn_materialize(&net, STAND_IN, 1));
    EXPECT(
        kn_fsdp_wrap(&net, world, .device = STAND_IN, .offload_dir = "memory", .ignore = "bias"));
    EXPECT(!kn_adamw(&net, .lr = 1) &&
           strstr(kn_error(), "'weight' lies on cpu and 'bias' on stand-in"));
    kn_clear_error();
    EXPECT(!kn_clip_grad_norm(&net, 1) && strstr(kn_error(), "the gradients' norm: 'weight' lies"));
    kn_clear_error();
    kn_module_free(&net);
    return kn_ok() ? 0 : 1;
}

KN_TEST(offload_device, parameters_in_two_places_are_refused)
{
    if (THREADS_ONLY)
        return;
    stand_in_begin((stand_in){ 0 });
    int failed = kn_spawn(1, step_in_two_places, NULL);
    stand_in_end();
    KN_CHECK_OK();
    KN_CHECK(failed == 0);
}

/* ---- a copy in param_dtype that can't be stale ----------------------------------------------- */

enum { IN = 7, OUT = 5, WAYS = 8 };

typedef struct writing {
    kn_device device;
    int ranks;
    float (*y)[OUT]; /* [WAYS + 1], shared by all ranks */
} writing;

static bool doubled(kn_module *m, void *arg)
{
    (void)arg;
    kn_tensor *w = kn_module_param(m, "weight");
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(false), ok = kn_copy_(w, kn_scale(w, 1.37));
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return ok;
}

/* This rank's part of the weight changes, by way number `way`. */
static bool change(kn_linear *net, kn_optim *opt, int way)
{
    const kn_param *p;
    float whole[IN * OUT];
    int n = kn_params(net, &p);
    bool ok = n == 2 && kn_param_read(net, 0, whole);
    for (int i = 0; i < IN * OUT; i++)
        whole[i] = whole[i] * 0.7f + 0.01f * (float)i;
    if (way == 0)
        return ok && kn_param_write(net, 0, whole);
    if (way == 1)
        return ok && kn_shard_write(net, 0, p[0].master, whole);
    if (way == 2 || way == 3) {
        kn_summon_scope s = kn_summon(net, .rank0_only = way == 3);
        if (way == 2 || kn_rank(kn_world()) == 0)
            ok = ok && doubled(&net->base, NULL);
        return kn_summon_end(s) && ok;
    }
    if (way == 4)
        return kn_fsdp_apply(net, doubled, NULL);
    kn_scope scope = kn_scope_begin();
    if (way == 5) { /* by the user, as a tensor */
        ok = ok && kn_copy_(p[0].master, kn_scale(p[0].master, 0.9));
    } else if (way == 6) { /* by the user, through a pointer */
        float *x = kn_numel(p[0].master) ? kn_data(p[0].master) : NULL;
        for (int64_t i = 0; x && i < kn_numel(p[0].master); i++)
            x[i] *= 1.1f;
        kn_bump_version(p[0].master);
    } else { /* only by the previous step */
        kn_set_lr(opt, 0.02);
    }
    kn_scope_end(scope);
    return ok && kn_ok();
}

static bool compute(kn_linear *net, const writing *w, float *y, bool backward)
{
    float x[IN] = { 1, -2, 3, -4, 5, -6, 7 };
    kn_scope scope = kn_scope_begin();
    kn_tensor *out = kn_call(net, kn_from(KN_F32, w->device, x, KN_SHAPE(1, IN)));
    if (backward)
        kn_backward(kn_mean(kn_mul(out, out), 0, NULL, false));
    float got[OUT];
    bool ok = kn_to_host(kn_cast(out, KN_F32), got, sizeof got);
    if (y)
        memcpy(y, got, sizeof got);
    kn_scope_end(scope);
    return ok;
}

static int write_masters(kn_comm *world, void *arg)
{
    const writing *w = arg;
    kn_linear net = { 0 };
    bool first = kn_rank(world) == 0;
    kn_set_threads(1);
    EXPECT(kn_linear_init(&net, NULL, NULL, IN, OUT, .device = KN_CPU));
    kn_seed((uint64_t)kn_rank(world)); /* all ranks get rank 0's values */
    EXPECT(kn_materialize(&net, KN_CPU, 3 + (uint64_t)kn_rank(world)));
    EXPECT(kn_fsdp_wrap(&net, world, .device = w->device, .param_dtype = KN_BF16,
                        .sync_from_rank0 = true,
                        .offload_dir = w->device == STAND_IN ? "memory" : NULL));
    kn_optim *opt = kn_sgd(&net, .lr = 0.01);
    EXPECT(opt && compute(&net, w, first ? w->y[WAYS] : NULL, false));
    for (int way = 0; way < WAYS; way++) {
        EXPECT(change(&net, opt, way), "way %d", way);
        EXPECT(compute(&net, w, first ? w->y[way] : NULL, true), "way %d", way);
        EXPECT(kn_step(opt)); /* raises the master's version by itself */
    }
    if (w->device == STAND_IN) { /* the last step made all copies */
        kn_bucket *b = kn_unit_of(net.base.impl)->bucket[0];
        EXPECT(b->cast_master && b->cast_version == b->master->version);
    }
    kn_optim_free(opt);
    kn_module_free(&net);
    return kn_ok() ? 0 : 1;
}

KN_TEST(offload_device, whoever_writes_a_master_is_seen_by_the_next_forward)
{
    size_t bytes = (WAYS + 1) * OUT * sizeof(float);
    for (int ranks = 1; ranks <= 2 && !THREADS_ONLY; ranks++) {
        float(*y[2])[OUT];
        for (int away = 0; away < 2; away++) {
            y[away] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            writing w = { away ? STAND_IN : KN_CPU, ranks, y[away] };
            stand_in_begin((stand_in){ 0 });
            int failed = kn_spawn(ranks, write_masters, &w);
            stand_in_end();
            KN_CHECK_OK();
            KN_CHECK(failed == 0, "%d of %d ranks failed", failed, ranks);
        }
        for (int way = 0; way <= WAYS; way++) {
            KN_CHECK(memcmp(y[0][way], y[1][way], sizeof y[0][way]) == 0,
                     "%d ranks, way %d: output 0 is %g, on the cpu %g", ranks, way,
                     (double)y[1][way][0], (double)y[0][way][0]);
            KN_CHECK(way == 0 || memcmp(y[0][way], y[0][way - 1], sizeof y[0][way]) != 0,
                     "%d ranks: way %d changes nothing", ranks, way);
        }
        munmap(y[0], bytes);
        munmap(y[1], bytes);
    }
}
