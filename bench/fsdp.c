/* bench/fsdp.c: the cost of sharding where communication is cheap: a training step under each
 * strategy and layout beside one of NO_SHARD, in turns on the same ranks.
 *
 *   bench_fsdp [--model gpt2|resnet50] [--ranks 2] [--threads 1] [--repeats 5] [--steps 1]
 *              [--only NAME] [--batch N] [--ctx 256] [--layers N] [--size 224] [--where] [--serve]
 *
 * gpt2 is GPT-2 124M of batch 4 x 256 a rank with clipping and AdamW, resnet50 a ResNet-50 of batch
 * 8 x 224 x 224 a rank with momentum (or another name of models/resnet.h); f32. Each contender runs
 * against a NO_SHARD model: one untimed step each, then repeats of --steps steps of one and as many
 * of the other. Times run from barrier to barrier, so they are the slowest rank's. A row has both
 * medians, the range of NO_SHARD's own steps about its median (what this machine's noise is), the
 * median of the ratios and their range, and the floor: the ratio if each byte that a traced step
 * moves more or less than NO_SHARD's cost as much as one of a copy by all ranks at once, measured
 * beside. The last figures are the processor's time of rank 0, which other programs disturb less.
 * --threads is max(1, cores / ranks) by default.
 *
 * --where: then a line for each kernel and collective that takes longer or shorter than in a step
 * of NO_SHARD (rank 0, medians would need more steps: noise shows here too).
 * --serve: takes --steps steps of the contender --only at each line "steps" of stdin and answers by
 * a line, the seconds of one; at "end" it ends. So scripts/peers fsdp makes it take turns. */
#include "bench/args.h"
#include "bench/kernel_rows.h"
#include "bench/times.h"
#include "knap.h"
#include "kernels/kernels.h"

#include <math.h>

#define GOAL        0.97
#define MAX_REPEATS 100

enum { TRACED = 2, TRACE_EVENTS = 400000 };

typedef struct sizes {
    kn_gpt_config gpt;
    kn_resnet_config resnet;
    bool images;
    int64_t batch, ctx, size;
    int repeats, steps;
} sizes;

typedef struct contender {
    const char *name;
    kn_strategy strategy;
    kn_layout_kind layout;
} contender;

static const contender contenders[] = {
    { "no_shard", KN_NO_SHARD, KN_LAYOUT_FLAT },
    { "full_shard", KN_FULL_SHARD, KN_LAYOUT_FLAT },
    { "full_shard_per_param", KN_FULL_SHARD, KN_LAYOUT_PER_PARAM },
    { "full_shard_ragged", KN_FULL_SHARD, KN_LAYOUT_RAGGED },
    { "shard_grad_op", KN_SHARD_GRAD_OP, KN_LAYOUT_FLAT },
};
enum { CONTENDERS = sizeof contenders / sizeof *contenders };

/* A model in training. */
typedef struct run {
    union {
        kn_module base;
        kn_gpt gpt;
        kn_resnet resnet;
    } net;
    kn_optim *optim;
    kn_tensor *x, *y;
    double seconds[MAX_REPEATS], busy[MAX_REPEATS]; /* of a step; of its processors, on this rank */
    kernel_rows rows;                               /* of TRACED steps */
} run;

/* ---- a step ---------------------------------------------------------------------------------- */

static bool run_begin(run *r, const contender *c, const sizes *s, kn_comm *world)
{
    const uint64_t rank = (uint64_t)kn_rank(world);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = s->images ? kn_channels_last(kn_randn(KN_F32, KN_CPU, rank, 1,
                                                         KN_SHAPE(s->batch, 3, s->size, s->size)))
                             : kn_randint(KN_I64, KN_CPU, 0, s->gpt.vocab, rank, 1,
                                          KN_SHAPE(s->batch, s->ctx));
    kn_tensor *y =
        s->images
            ? kn_randint(KN_I64, KN_CPU, 0, s->resnet.classes, rank, 2, KN_SHAPE(s->batch))
            : kn_randint(KN_I64, KN_CPU, 0, s->gpt.vocab, rank, 2, KN_SHAPE(s->batch, s->ctx));
    r->x = kn_keep(x);
    r->y = kn_keep(y);
    kn_scope_end(scope);
    if (!(s->images ? kn_resnet_init(&r->net.resnet, s->resnet, KN_F32, KN_META)
                    : kn_gpt_init(&r->net.gpt, s->gpt, KN_F32, KN_META)) ||
        !kn_fsdp_wrap(&r->net, world, .wrap_class = s->images ? "resnet_block" : "gpt_block",
                      .strategy = c->strategy, .layout = c->layout))
        return false;
    r->optim = s->images ? kn_sgd(&r->net, .lr = 1e-3, .momentum = 0.9)
                         : kn_adamw(&r->net, .lr = 1e-4, .weight_decay = 0.1);
    return kn_ok();
}

static void run_end(run *r)
{
    kn_optim_free(r->optim);
    kn_module_free(&r->net);
    kn_tensor_free(r->x);
    kn_tensor_free(r->y);
    kn_memory_trim(KN_CPU);
    *r = (run){ 0 };
}

/* Seconds of a step of so many, between two barriers. */
static double step(run *r, const sizes *s, kn_comm *world, int steps)
{
    kn_stream *stream = kn_compute_stream(KN_CPU);
    if (!kn_barrier(world, stream, "bench"))
        return 0;
    const double begin = kn_now();
    for (int i = 0; i < steps && kn_ok(); i++) {
        kn_scope scope = kn_scope_begin();
        kn_backward(s->images ? kn_cross_entropy(kn_call(&r->net, r->x), r->y)
                              : kn_gpt_loss(&r->net.gpt, r->x, r->y));
        if (!s->images)
            kn_clip_grad_norm(&r->net, 1.0);
        kn_step(r->optim);
        kn_scope_end(scope);
    }
    kn_barrier(world, stream, "bench");
    return (kn_now() - begin) / steps;
}

/* ---- where it goes --------------------------------------------------------------------------- */

/* A traced step; collectives are rows of their kind, whatever the unit. */
static bool trace(run *r, const sizes *s, kn_comm *world)
{
    kn_trace_event *events = NULL;
    kn_trace_start(TRACE_EVENTS);
    step(r, s, world, 1);
    const size_t count = kn_trace_stop(&events);
    for (size_t i = 0; i < count; i++) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(events[i].what, " "), events[i].what);
        if (events[i].stream && strcmp(events[i].provider, "host") != 0)
            kernel_rows_add_as(&r->rows, name, &events[i], events[i].end - events[i].begin);
    }
    kn_host_free(events);
    return kn_ok();
}

/* Seconds and bytes of a step that its rows have more than the other's. */
static double more(const kernel_rows *a, const kernel_rows *b, bool bytes)
{
    double sum = 0;
    for (int i = 0; i < a->count; i++)
        sum += bytes ? a->row[i].bytes : a->row[i].seconds;
    for (int i = 0; i < b->count; i++)
        sum -= bytes ? b->row[i].bytes : b->row[i].seconds;
    return sum / TRACED;
}

static void print_where(run *r, run *base)
{
    for (int i = 0; i < base->rows.count; i++)
        kernel_rows_of(&r->rows, base->rows.row[i].name);
    for (int i = 0; i < r->rows.count; i++) {
        const kernel_row none = { .calls = 0 }, *a = &r->rows.row[i],
                         *found = kernel_rows_find(&base->rows, a->name),
                         *b = found ? found : &none;
        const double seconds = (a->seconds - b->seconds) / TRACED;
        if (fabs(seconds) < 0.0005)
            continue;
        printf("    %-18s %+8.1f ms, %5.0f calls of %5.0f; %+8.1f MB, %5.1f GB/s\n", a->name,
               1e3 * seconds, a->calls / TRACED, b->calls / TRACED,
               (a->bytes - b->bytes) / TRACED / 1e6,
               a->seconds > 0 ? a->bytes / a->seconds / 1e9 : 0);
    }
    printf("    all of them %+.1f ms\n", 1e3 * more(&r->rows, &base->rows, false));
}

/* Bytes a second that a rank's copies read and write while all ranks copy. */
static double copy_rate(kn_comm *world)
{
    const int64_t count = 8 << 20;
    double best = 0;
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(count)), *b = kn_zeros_like(a);
    for (int i = 0; i < 6 && kn_barrier(world, kn_compute_stream(KN_CPU), "bench"); i++) {
        const double begin = kn_now();
        kn_copy_(b, a);
        kn_stream_sync(kn_compute_stream(KN_CPU));
        best = fmax(best, 8.0 * (double)count / (kn_now() - begin));
    }
    kn_scope_end(scope);
    return best;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void print_row(const contender *c, run *r, run *base, int n, double rate)
{
    double ratio[MAX_REPEATS], of_busy[MAX_REPEATS];
    for (int i = 0; i < n; i++) {
        ratio[i] = base->seconds[i] / r->seconds[i];
        of_busy[i] = base->busy[i] / r->busy[i];
    }
    const double mid = median_of(ratio, n), mine = median_of(r->seconds, n),
                 other = median_of(base->seconds, n);
    printf("%-21s %8.1f ms a step, no_shard %8.1f (%.1f to %.1f %%): ratio %5.1f %% (%.1f to "
           "%.1f), floor %.1f %%",
           c->name, 1e3 * mine, 1e3 * other, 100 * base->seconds[0] / other,
           100 * base->seconds[n - 1] / other, 100 * mid, 100 * ratio[0], 100 * ratio[n - 1],
           100 * other / (other + more(&r->rows, &base->rows, true) / rate));
    printf("; processor %.1f ms, %.1f: ratio %.1f %%", 1e3 * median_of(r->busy, n),
           1e3 * median_of(base->busy, n), 100 * median_of(of_busy, n));
    if (c->strategy == KN_FULL_SHARD)
        printf("; goal %.0f %%: %s", 100 * GOAL, mid >= GOAL ? "met" : "missed");
    printf("\n");
}

static bool compare(const contender *c, const sizes *s, kn_comm *world, bool where)
{
    static run r, base; /* too large for the stack */
    bool ok = run_begin(&base, &contenders[0], s, world) && run_begin(&r, c, s, world);
    for (int i = -1; ok && i < s->repeats; i++)
        for (int k = 0; ok && k < 2; k++) {
            run *one = (i & 1) == k ? &base : &r;
            const double before = processor_seconds(),
                         seconds = step(one, s, world, i < 0 ? 1 : s->steps);
            ok = kn_ok();
            one->seconds[i < 0 ? 0 : i] = seconds;
            one->busy[i < 0 ? 0 : i] = (processor_seconds() - before) / s->steps;
        }
    for (int i = 0; ok && i < TRACED; i++)
        ok = trace(&base, s, world) && trace(&r, s, world);
    const double rate = ok ? copy_rate(world) : 0;
    if (ok && kn_rank(world) == 0) {
        print_row(c, &r, &base, s->repeats, rate);
        if (where)
            print_where(&r, &base);
        fflush(stdout);
    }
    run_end(&r);
    run_end(&base);
    return ok;
}

/* Rank 0 reads the lines, all take the steps. */
static bool serve(const contender *c, const sizes *s, kn_comm *world)
{
    static run r;
    kn_stream *stream = kn_compute_stream(KN_CPU);
    bool ok = run_begin(&r, c, s, world);
    for (int i = 0; i < 2 && ok; i++)
        ok = step(&r, s, world, 1) > 0 && kn_ok();
    while (ok) {
        char line[16];
        float on =
            kn_rank(world) == 0 && fgets(line, sizeof line, stdin) && strcmp(line, "steps\n") == 0;
        if (!kn_all_reduce_max(world, &on, 1, stream, "bench") || on == 0)
            break;
        const double seconds = step(&r, s, world, s->steps);
        ok = kn_ok();
        if (kn_rank(world) == 0)
            printf("%.9f\n", seconds);
        fflush(stdout);
    }
    run_end(&r);
    return ok;
}

static int64_t option(int argc, char **argv, const char *name, int64_t otherwise)
{
    int64_t value = number(argc, argv, name, otherwise);
    return value < 1 ? 1 : value;
}

static bool models(sizes *s, int argc, char **argv)
{
    const char *name = word(argc, argv, "--model", "gpt2");
    s->images = strncmp(name, "resnet", 6) == 0;
    s->batch = option(argc, argv, "--batch", s->images ? 8 : 4);
    s->size = option(argc, argv, "--size", 224);
    s->ctx = option(argc, argv, "--ctx", 256);
    s->resnet.small_images = s->size < 64;
    if (s->images)
        return kn_resnet_preset(name, &s->resnet) && kn_resnet_config_check(&s->resnet);
    if (!kn_gpt_preset(name, &s->gpt))
        return false;
    s->gpt.layers = (int)option(argc, argv, "--layers", s->gpt.layers);
    s->gpt.ctx = s->gpt.ctx > s->ctx ? s->gpt.ctx : s->ctx;
    return true;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "A training step sharded in several ways, over one without sharding.\n"
               "  bench_fsdp [--model NAME] [--ranks N] [--threads N] [--repeats N] [--steps N] "
               "[--only NAME]\n"
               "    [--batch N] [--ctx N] [--layers N] [--size N] [--where] [--serve]\n"
               "NAME: gpt2 (default), resnet50, resnet18, ...; of --only: full_shard, "
               "full_shard_per_param,\n    full_shard_ragged, shard_grad_op; --serve takes "
               "no_shard too, and needs one",
               0);
    two_ranks(argc, argv);
    kn_comm *world = kn_init(&argc, &argv);
    const char *only = word(argc, argv, "--only", NULL);
    sizes s = { .repeats = (int)option(argc, argv, "--repeats", 5),
                .steps = (int)option(argc, argv, "--steps", 1) };
    if (!kn_ok() || !models(&s, argc, argv))
        return kn_finish();
    s.repeats = s.repeats < MAX_REPEATS ? s.repeats : MAX_REPEATS;
    const bool serves = flag(argc, argv, "--serve");
    if (kn_rank(world) == 0 && !serves)
        printf("%d ranks x %d threads, %s kernels, %s; %s, %lld x %lld a rank\n",
               kn_comm_size(world), kn_threads(), kn_cpu_isa(), kn_cpu_libraries(),
               word(argc, argv, "--model", "gpt2"), (long long)s.batch,
               (long long)(s.images ? s.size : s.ctx));
    fflush(stdout);
    bool known = false;
    for (int i = serves ? 0 : 1; i < CONTENDERS && kn_ok() && (only || !serves); i++) {
        if (only && strcmp(only, contenders[i].name) != 0)
            continue;
        known = true;
        if (serves) {
            serve(&contenders[i], &s, world);
            break;
        }
        compare(&contenders[i], &s, world, flag(argc, argv, "--where"));
    }
    if (kn_ok() && serves && !only)
        kn_fail("--serve needs --only NAME: the contender whose steps it takes");
    if (kn_ok() && !known)
        kn_fail("--only %s is none of %sfull_shard, full_shard_per_param, full_shard_ragged, "
                "shard_grad_op",
                only, serves ? "no_shard, " : "");
    return kn_finish();
}
