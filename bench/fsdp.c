/* bench/fsdp.c: the cost of sharding where communication is cheap: tokens/s of a training step
 * (forward, backward, clip, AdamW) under each strategy and layout over tokens/s of NO_SHARD, on the
 * same ranks.
 *
 *   bench_fsdp [--ranks 2] [--threads 1] [--repeats 3] [--steps 1] [--only NAME]
 *              [--layers 12] [--embd 768] [--heads 12] [--vocab 50257] [--batch 4] [--ctx 256]
 *
 * The sizes are those of GPT-2 124M with batch 4 x 256 a rank; f32. Each contender runs against a
 * NO_SHARD model: one untimed step each, then repeats of --steps steps of one and as many of the
 * other. A row has the medians over the repeats, and the median, smallest and largest of their
 * ratios. Times run from barrier to barrier, so they are the slowest rank's. --threads is max(1,
 * cores / ranks) by default. */
#include "bench/args.h"
#include "knap.h"
#include "kernels/kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOAL        0.95
#define MAX_REPEATS 100

typedef struct sizes {
    kn_gpt_config model;
    int64_t batch, ctx;
    int repeats, steps;
} sizes;

typedef struct contender {
    const char *name;
    kn_strategy strategy;
    kn_layout_kind layout;
    bool counts; /* the goal is for this one */
} contender;

static const contender no_shard = { "no_shard", KN_NO_SHARD, KN_LAYOUT_FLAT, false };
static const contender contenders[] = {
    { "full_shard", KN_FULL_SHARD, KN_LAYOUT_FLAT, true },
    { "shard_grad_op", KN_SHARD_GRAD_OP, KN_LAYOUT_FLAT, false },
    { "full_shard_per_param", KN_FULL_SHARD, KN_LAYOUT_PER_PARAM, false },
    { "full_shard_ragged", KN_FULL_SHARD, KN_LAYOUT_RAGGED, false },
};

/* A model in training. */
typedef struct run {
    kn_gpt model;
    kn_optim *optim;
    int64_t *x, *y; /* [batch * ctx] */
    int step;
    double rate[MAX_REPEATS]; /* tokens/s of all ranks */
} run;

static bool run_begin(run *r, const contender *c, const sizes *s, kn_comm *world)
{
    size_t ids = (size_t)(s->batch * s->ctx);
    r->x = kn_host_alloc(ids * sizeof *r->x);
    r->y = kn_host_alloc(ids * sizeof *r->y);
    if (!r->x || !r->y || !kn_gpt_init(&r->model, s->model, KN_F32, KN_META) ||
        !kn_fsdp_wrap(&r->model, world, .wrap_class = "gpt_block", .strategy = c->strategy,
                      .layout = c->layout))
        return false;
    r->optim = kn_adamw(&r->model, .lr = 1e-4, .weight_decay = 0.1);
    return r->optim != NULL;
}

static void run_end(run *r)
{
    kn_optim_free(r->optim);
    kn_module_free(&r->model);
    kn_host_free(r->x);
    kn_host_free(r->y);
    kn_memory_trim(KN_CPU);
    *r = (run){ 0 };
}

static bool train_step(run *r, const sizes *s, kn_comm *world)
{
    int64_t n = s->batch * s->ctx, vocab = s->model.vocab;
    for (int64_t i = 0; i < n; i++) {
        r->x[i] = (i * 7919 + (r->step * kn_comm_size(world) + kn_rank(world)) * 104729) % vocab;
        r->y[i] = (r->x[i] * 31 + 7) % vocab;
    }
    r->step++;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, KN_CPU, r->x, KN_SHAPE(s->batch, s->ctx));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, r->y, KN_SHAPE(s->batch, s->ctx));
    kn_backward(kn_gpt_loss(&r->model, x, y));
    kn_clip_grad_norm(&r->model, 1.0);
    kn_step(r->optim);
    kn_scope_end(scope);
    return kn_ok();
}

/* One repeat: s->steps steps between two barriers. */
static bool measure(run *r, const sizes *s, kn_comm *world, int repeat)
{
    kn_stream *stream = kn_compute_stream(KN_CPU);
    if (!kn_barrier(world, stream, "bench"))
        return false;
    double t = kn_now();
    for (int i = 0; i < s->steps; i++)
        if (!train_step(r, s, world))
            return false;
    if (!kn_barrier(world, stream, "bench"))
        return false;
    double tokens = (double)(s->batch * s->ctx) * s->steps * kn_comm_size(world);
    r->rate[repeat] = tokens / (kn_now() - t);
    return true;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts v. */
static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_size);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static void print_row(const contender *c, run *r, run *base, int n)
{
    double ratio[MAX_REPEATS];
    for (int i = 0; i < n; i++)
        ratio[i] = r->rate[i] / base->rate[i];
    double mid = median(ratio, n);
    printf("%-21s %9.1f tokens/s, no_shard %9.1f: ratio %5.1f %% (%.1f to %.1f)", c->name,
           median(r->rate, n), median(base->rate, n), 100 * mid, 100 * ratio[0],
           100 * ratio[n - 1]);
    if (c->counts)
        printf("; goal %.0f %%: %s", 100 * GOAL, mid >= GOAL ? "met" : "missed");
    printf("\n");
    fflush(stdout);
}

static bool compare(const contender *c, const sizes *s, kn_comm *world)
{
    static run r, base; /* too large for the stack */
    bool ok = run_begin(&base, &no_shard, s, world) && run_begin(&r, c, s, world) &&
              train_step(&base, s, world) && train_step(&r, s, world);
    for (int i = 0; ok && i < s->repeats; i++) {
        run *first = i % 2 ? &r : &base, *second = i % 2 ? &base : &r;
        ok = measure(first, s, world, i) && measure(second, s, world, i);
    }
    if (ok && kn_rank(world) == 0)
        print_row(c, &r, &base, s->repeats);
    run_end(&r);
    run_end(&base);
    return ok;
}

static int64_t option(int argc, char **argv, const char *name, int64_t otherwise)
{
    int64_t value = number(argc, argv, name, otherwise);
    return value < 1 ? 1 : value;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Tokens/s of a training step sharded in several ways, over those without sharding.\n"
               "  bench_fsdp [--ranks N] [--threads N] [--repeats N] [--steps N] [--only NAME] "
               "[--layers N] [--embd N]"
               "\n    [--heads N] [--vocab N] [--batch N] [--ctx N]",
               0);
    if (!word(argc, argv, "--ranks", NULL))
        setenv("KNAP_RANKS", "2", 0);
    kn_comm *world = kn_init(&argc, &argv);
    const char *only = word(argc, argv, "--only", NULL);
    sizes s = { .batch = option(argc, argv, "--batch", 4),
                .ctx = option(argc, argv, "--ctx", 256),
                .repeats = (int)option(argc, argv, "--repeats", 3),
                .steps = (int)option(argc, argv, "--steps", 1) };
    kn_gpt_preset("gpt2", &s.model);
    s.model.layers = (int)option(argc, argv, "--layers", s.model.layers);
    s.model.heads = (int)option(argc, argv, "--heads", s.model.heads);
    s.model.embd = option(argc, argv, "--embd", s.model.embd);
    s.model.vocab = option(argc, argv, "--vocab", s.model.vocab);
    s.repeats = s.repeats < MAX_REPEATS ? s.repeats : MAX_REPEATS;
    if (kn_ok() && kn_rank(world) == 0)
        printf(
            "%d ranks x %d threads, %s kernels, %s; %d layers of %lld channels, vocabulary %lld; "
            "batch %lld x %lld a rank\n",
            kn_comm_size(world), kn_threads(), kn_cpu_isa(), kn_cpu_libraries(), s.model.layers,
            (long long)s.model.embd, (long long)s.model.vocab, (long long)s.batch,
            (long long)s.ctx);
    fflush(stdout);
    int compared = 0;
    for (size_t i = 0; i < sizeof contenders / sizeof *contenders && kn_ok(); i++)
        if (!only || strcmp(only, contenders[i].name) == 0)
            compared += compare(&contenders[i], &s, world);
    if (kn_ok() && compared == 0)
        kn_fail("--only %s is none of full_shard, shard_grad_op, full_shard_per_param, "
                "full_shard_ragged",
                only);
    return kn_finish();
}
