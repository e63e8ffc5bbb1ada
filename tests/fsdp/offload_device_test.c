/* tests/fsdp/offload_device_test.c: units that compute on a device while masters, gradients and
 * optimizer state lie in page-locked memory of the host. The device is a stand-in whose streams are
 * threads (stand_in.h): so the step really overlaps with the backward, and a transfer in the wrong
 * order changes the results. Rank functions return a status and never assert. */
#include "fsdp/fsdp.h"
#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/fsdp/stand_in.h"
#include "tests/owned.h"

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
    bool clip, scaler, no_sync, sgd, muon, low_grads;
    bool matrices; /* only they are trained */
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
    static const kn_optim_group still[] = { { .pattern = "*.bias", .frozen = true },
                                            { .pattern = "*.ln_*", .frozen = true },
                                            { .pattern = "*.w[tp]e.*", .frozen = true } };
    return s->sgd    ? kn_sgd(m, .lr = 1e-1, .momentum = 0.9)
           : s->muon ? kn_muon(m, .lr = 1e-2, .groups = still, .group_count = s->matrices ? 3 : 0)
                     : kn_adamw(m, .lr = 1e-2, .weight_decay = 0.1);
}

/* Losses are read after the step: until then the host doesn't wait for the device. */
static bool one_step(kn_gpt *g, job *j, int step, int rank, int n, kn_scaler *scaler, kn_optim *opt)
{
    const setting *s = &j->s;
    kn_tensor *loss[MICRO];
    IN_SCOPE;
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
    return ok;
}

static void train(kn_comm *world, void *arg)
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
    KN_CHECK(ok);
}

static outcome *run(setting s, bool fails)
{
    outcome *o = shared_bytes(sizeof *o);
    s.micro = s.micro ? s.micro : s.ranks;
    job j = { s, o };
    int failed = on_stand_in(s.stand_in, s.ranks, train, &j);
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
    check((setting){ .what = "bf16, muon", .ranks = 1, .param = KN_BF16, .muon = true });
    check((setting){ .what = "matrices alone, a slow way home",
                     .ranks = 1,
                     .param = KN_BF16,
                     .muon = true,
                     .matrices = true,
                     .stand_in.home_us = 3000 });
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
    check((setting){ .what = "two ranks, muon", .ranks = 2, .param = KN_BF16, .muon = true });
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

/* Averages come into masters of which a forward still takes copies to the device: it computes with
 * the weights of its time. */
static void swap_behind_a_forward(kn_comm *world, void *arg)
{
    const setting *s = arg;
    OWNED_MODULE kn_gpt g = { 0 };
    const kn_param *p;
    KN_CHECK(model(&g, world, s));
    kn_train(&g, false);
    OWNED_EMA kn_ema *e = kn_ema_new(&g);
    for (int i = 0, n = kn_params(&g, &p); i < n; i++)
        KN_CHECK(kn_fill_(kn_ema_value(e, i), 0.25));
    kn_set_grad_mode(false);
    IN_SCOPE;
    const double trained = kn_item(forward(&g, s, 0, 0));
    kn_tensor *loss = forward(&g, s, 0, 0);
    KN_CHECK(kn_ema_swap(e) && kn_item(loss) == trained);
    const double averaged = kn_item(forward(&g, s, 0, 0));
    loss = forward(&g, s, 0, 0);
    KN_CHECK(kn_ema_swap(e) && kn_item(loss) == averaged && averaged != trained);
    KN_CHECK(kn_item(forward(&g, s, 0, 0)) == trained);
}

KN_TEST(offload_device, averages_wait_for_copies_to_the_device)
{
    if (THREADS_ONLY)
        return;
    for (int ranks = 1; ranks <= 2; ranks++) {
        setting s = { .device = STAND_IN, .ranks = ranks, .stand_in.away_us = 1000 };
        KN_CHECK(on_stand_in(s.stand_in, ranks, swap_behind_a_forward, &s) == 0);
    }
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

static atomic_bool open_gate;
static int waits_in_step;

static void stand_at_gate(void *arg)
{
    while (!open_gate)
        usleep(100);
}

/* Blocks the device until the gate is open; if that never happens the runner ends the case. */
static void close_way(kn_module_event *e, void *arg)
{
    char nothing = 0;
    kn_stream_host(kn_compute_stream(STAND_IN), "gate", stand_at_gate, &nothing, sizeof nothing);
}

/* A bucket's turn begins with two waits, so at the third the first bucket has been stepped. */
static void count_waits(const kn_stream *s)
{
    if (++waits_in_step == 3)
        open_gate = true;
}

static void step_beside_backward(kn_comm *world, void *arg)
{
    setting s = { .device = STAND_IN, .ranks = 1, .micro = 1 };
    OWNED_MODULE kn_gpt g = { 0 };
    KN_CHECK(model(&g, world, &s) && kn_fsdp_units(&g, NULL, 0) == LAYERS + 1);
    /* the first module of the first block: few enough jobs follow it to fit a stream's queue */
    kn_module *m = kn_module_find(&g, "transformer.h.0.ln_1");
    KN_CHECK(m && kn_module_hook(m, (kn_module_hooks){ .pre_backward = close_way }));
    OWNED_OPTIM kn_optim *opt = optimizer(&g, &s);
    kn_scope scope = kn_scope_begin();
    kn_backward(forward(&g, &s, 0, 0));
    stand_in_watch(count_waits);
    KN_CHECK(kn_step(opt));
    stand_in_watch(NULL);
    kn_scope_end(scope);
    KN_CHECK(waits_in_step == 2 * (LAYERS + 1), "%d waits", waits_in_step);
    KN_CHECK(open_gate, "nothing waited for the first block's backward");
}

KN_TEST(offload_device, the_host_steps_late_layers_while_the_device_is_in_backward)
{
    if (THREADS_ONLY)
        return;
    KN_CHECK(on_stand_in((stand_in){ 0 }, 1, step_beside_backward, NULL) == 0);
}
