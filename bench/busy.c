/* bench/busy.c: how much slower a small GPT generates and trains while other threads load the same
 * cores.
 *
 *   bench_busy [--times 7] [--busy N]      N threads that always compute (default: one a core)
 *
 * Runs alone and runs beside the busy threads alternate; the table has medians. The fair share is
 * half of the cores, so twice the time. Exit status 1 if a row exceeds GOAL times the time
 * alone. */
#include "bench/args.h"
#include "knap.h"

#include "kernels/kernels_internal.h"
#include "models/sample.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOAL 2.5

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

/* ---- measuring ------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

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
    qsort(alone, (size_t)times, sizeof *alone, by_value);
    qsort(beside, (size_t)times, sizeof *beside, by_value);
    const double a = alone[times / 2], b = beside[times / 2];
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
               "  bench_busy [--times N] [--busy N] [--threads N]",
               0);
    kn_init(&argc, &argv);
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
