/* bench/busy.c: how much slower a small GPT generates and trains while other threads load the same
 * cores; and what small work costs beside its arithmetic.
 *
 *   bench_busy [--times 7] [--busy N]      N threads that always compute (default: one a core)
 *   bench_busy --small                     alone: nodes of the tape, MLPs of width 8 to 512
 *
 * Runs alone and runs beside the busy threads alternate; the table has medians. The fair share is
 * half of the cores, so twice the time. Exit status 1 if a row exceeds GOAL times the time
 * alone.
 *
 * --small: a node is an addition of 4 elements, one of a chain. Its forward is shape rule,
 * dispatch, allocation and tape; its end is the scope's. Exit status 1 if a node that records costs
 * more than NODE seconds, forward and end together, or a wider MLP takes less time than a narrower
 * one. */
#include "bench/args.h"
#include "bench/times.h"
#include "knap.h"

#include "models/sample.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define GOAL 2.5
#define NODE 1e-6

enum { TIMES = 100, THREADS = 256, TOKENS = 100, STEPS = 10, ROWS = 12 };

typedef struct work {
    kn_gpt model;
    kn_optim *opt;
    kn_tokenizer *tokenizer;
    kn_gpt_config config;
} work;

typedef bool (*work_fn)(work *w);

static kn_tensor *next_logits(void *model, kn_tensor *ids)
{
    return kn_gpt_next_logits(model, ids);
}

static bool writes(work *w)
{
    const kn_sample_options o = { .temperature = 1, .seed = 1 };
    return kn_write_text(&w->model, next_logits, w->tokenizer, .prompt = "a", .tokens = TOKENS,
                         .ctx = w->config.ctx, .draw = o);
}

static bool trains(work *w)
{
    const int64_t n = ROWS * w->config.ctx;
    int64_t ids[2 * ROWS * 64];
    for (int64_t i = 0; i < 2 * n; i++)
        ids[i] = i * 7919 % w->config.vocab;
    for (int i = 0; i < STEPS; i++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(ROWS, w->config.ctx));
        kn_tensor *y = kn_from(KN_I64, KN_CPU, ids + n, KN_SHAPE(ROWS, w->config.ctx));
        kn_backward(kn_gpt_loss(&w->model, x, y));
        kn_clip_grad_norm(&w->model, 1.0);
        kn_step(w->opt);
        kn_scope_end(scope);
    }
    return kn_ok();
}

/* ---- busy threads ---------------------------------------------------------------------------- */

static _Atomic bool stop;

static void *never_rest(void *unused)
{
    uint64_t x = 1;
    while (!atomic_load_explicit(&stop, memory_order_relaxed))
        x = x * 6364136223846793005u + 1;
    (void)unused;
    return (void *)(uintptr_t)(x & 1);
}

static double seconds(work_fn fn, work *w, int busy)
{
    pthread_t thread[THREADS];
    int started = 0;
    atomic_store(&stop, false);
    while (started < busy && pthread_create(&thread[started], NULL, never_rest, NULL) == 0)
        started++;
    const double begin = kn_now();
    const bool ok = fn(w);
    const double end = kn_now();
    atomic_store(&stop, true);
    for (int i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    return ok && started == busy ? end - begin : -1;
}

/* ---- small work ------------------------------------------------------------------------------ */

enum { NODES = 100, CHAINS = 2000, LAYERS = 3, MLP_ROWS = 32, MLP_STEPS = 301 };

/* False if a node costs too much. */
static bool nodes(bool grad)
{
    static double forward[CHAINS], backward[CHAINS], end[CHAINS];
    kn_scope all = kn_scope_begin();
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(4)), *one = kn_ones_like(x);
    kn_require_grad(x, grad);
    for (int i = 0; i < CHAINS; i++) {
        kn_scope scope = kn_scope_begin();
        const double t = kn_now();
        kn_tensor *y = x;
        for (int n = 0; n < NODES; n++)
            y = kn_add(y, one);
        const double made = kn_now();
        if (grad)
            kn_backward(y, .grad = one);
        const double back = kn_now();
        kn_scope_end(scope);
        forward[i] = made - t, backward[i] = back - made, end[i] = kn_now() - back;
        kn_clear_grad(x);
    }
    kn_scope_end(all);
    const double f = median_of(forward, CHAINS) / NODES, b = median_of(backward, CHAINS) / NODES,
                 e = median_of(end, CHAINS) / NODES;
    const bool good = !grad || f + e <= NODE;
    printf("node, %s grad: forward %.0f ns, backward %.0f, end %.0f: %s\n", grad ? "with" : "no",
           1e9 * f, 1e9 * b, 1e9 * e, good ? "ok" : "MORE THAN A NODE MAY");
    return good;
}

/* Seconds of a forward and backward of LAYERS layers of so many channels. */
static double mlp(int64_t width)
{
    static double seconds[MLP_STEPS];
    kn_scope all = kn_scope_begin();
    kn_tensor *w[LAYERS], *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(MLP_ROWS, width));
    for (int l = 0; l < LAYERS; l++)
        w[l] = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(width, width)), true);
    for (int i = 0; i < MLP_STEPS; i++) {
        const double t = kn_now();
        kn_scope scope = kn_scope_begin();
        kn_tensor *y = x;
        for (int l = 0; l < LAYERS; l++)
            y = kn_relu(kn_linear(y, w[l], NULL, false));
        kn_backward(kn_mean(y, 0, NULL, false));
        for (int l = 0; l < LAYERS; l++)
            kn_clear_grad(w[l]);
        kn_scope_end(scope);
        seconds[i] = kn_now() - t;
    }
    kn_scope_end(all);
    return median_of(seconds, MLP_STEPS);
}

static bool small(void)
{
    const bool plain = nodes(false), taped = nodes(true), cheap = plain && taped;
    double before = 0;
    bool rises = true;
    for (int64_t width = 8; width <= 512; width += width < 64 ? 8 : width < 192 ? 32 : 64) {
        const double t = mlp(width);
        const bool good = t > 0.95 * before; /* the rest is noise */
        printf("MLP of %d x %lld, %d rows: %.1f us%s\n", LAYERS, (long long)width, MLP_ROWS,
               1e6 * t, good ? "" : ", LESS THAN A NARROWER ONE");
        rises = rises && good;
        before = t;
    }
    return kn_ok() && cheap && rises;
}

/* ---- measuring ------------------------------------------------------------------------------- */

static bool row(const char *what, work_fn fn, work *w, int busy, int times)
{
    double alone[TIMES], beside[TIMES];
    bool ok = fn(w); /* warm */
    for (int i = 0; ok && i < times; i++) {
        alone[i] = seconds(fn, w, 0);
        beside[i] = seconds(fn, w, busy);
        ok = alone[i] > 0 && beside[i] > 0;
    }
    if (!ok)
        return false;
    const double a = median_of(alone, times), b = median_of(beside, times);
    printf("%-8s %8.1f ms alone %8.1f ms beside %d busy threads: %.2f times, %s\n", what, 1e3 * a,
           1e3 * b, busy, b / a, b / a <= GOAL ? "ok" : "MORE THAN ITS SHARE");
    fflush(stdout);
    return b / a <= GOAL;
}

/* In [1, most]. */
static int count(int argc, char **argv, const char *name, int otherwise, int most)
{
    const int64_t n = number(argc, argv, name, otherwise);
    return n < 1 ? 1 : n < most ? (int)n : most;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "How much slower a small GPT generates and trains beside busy threads.\n"
               "  bench_busy [--times N] [--busy N] [--threads N]\n"
               "  bench_busy [--small] [--threads N]: what small work costs",
               0);
    kn_init(&argc, &argv);
    if (flag(argc, argv, "--small")) {
        const bool good = small();
        return kn_finish() || !good;
    }
    work w = { .config = { .layers = 4, .heads = 4, .embd = 128, .ctx = 64, .vocab = 256 } };
    const int times = count(argc, argv, "--times", 7, TIMES);
    const int busy = count(argc, argv, "--busy", kn_threads(), THREADS);
    bool ok = (w.tokenizer = kn_tokenizer_create("byte", NULL, 0)) != NULL;
    w.config.vocab = ok ? kn_tokenizer_vocab(w.tokenizer) : 1;
    ok = ok && kn_gpt_init(&w.model, w.config, KN_F32, KN_CPU) &&
         kn_materialize(&w.model, KN_CPU, 1337) && (w.opt = kn_adamw(&w.model, .lr = 1e-3));
    if (ok) {
        const bool write = row("writing", writes, &w, busy, times);
        ok = row("training", trains, &w, busy, times) && write;
    }
    kn_optim_free(w.opt);
    kn_module_free(&w.model);
    kn_tokenizer_free(w.tokenizer);
    return kn_finish() || !ok;
}
