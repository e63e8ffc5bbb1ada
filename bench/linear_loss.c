/* bench/linear_loss.c: the head of a language model, forward and backward: kn_linear_cross_entropy
 * beside kn_cross_entropy of kn_linear, in turns: the medians of their times, and the most memory
 * of each besides the inputs.
 *
 *   linear_loss [--device cpu|cuda] [--dtype f32|bf16] [--rows N] [--embd N] [--vocab N]
 *               [--threads N]
 *
 * --rows: default 256, 1024 and 4096, a line each. Times by the clock and, on the CPU, by the
 * processor (the sum over all threads, where other programs of the machine count less). */
#include "bench/args.h"
#include "bench/times.h"
#include "kernels/stream.h"
#include "kernels/trace.h"
#include "knap.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ROUNDS = 9 };

typedef struct head {
    kn_tensor *x, *w, *targets;
} head;

typedef struct taken {
    double processor[ROUNDS], clock[ROUNDS]; /* seconds */
    int64_t peak;                            /* bytes */
    double loss;
} taken;

static bool once(const head *h, bool fused, int round, taken *t)
{
    kn_scope s = kn_scope_begin();
    kn_clear_grad(h->x);
    kn_clear_grad(h->w);
    kn_ledger_reset_peaks();
    const kn_ledger before = kn_ledger_read();
    const double begin = kn_now(), work = processor_seconds();
    kn_tensor *loss = fused ? kn_linear_cross_entropy(h->x, h->w, h->targets)
                            : kn_cross_entropy(kn_linear(h->x, h->w, NULL, false), h->targets);
    kn_backward(loss);
    t->loss = kn_item(loss);
    kn_stream_sync(kn_compute_stream(kn_device_of(h->x)));
    t->processor[round] = processor_seconds() - work;
    t->clock[round] = kn_now() - begin;
    t->peak = kn_ledger_read().peak_total - before.live_total;
    kn_scope_end(s);
    return kn_ok();
}

static bool line(kn_device device, kn_dtype dtype, int64_t rows, int64_t embd, int64_t vocab)
{
    taken apart = { 0 }, fused = { 0 };
    kn_scope s = kn_scope_begin();
    kn_tensor *ids = kn_empty(KN_I64, KN_CPU, KN_SHAPE(rows));
    for (int64_t i = 0; i < rows; i++)
        ((int64_t *)kn_data(ids))[i] = i * 7919 % vocab;
    const head h = {
        .x = kn_require_grad(kn_randn(dtype, device, 1, 1, KN_SHAPE(rows, embd)), true),
        .w = kn_require_grad(
            kn_detach(kn_scale(kn_randn(dtype, device, 1, 2, KN_SHAPE(vocab, embd)), 0.02)), true),
        .targets = device == KN_CPU ? ids : kn_to_device(ids, device)
    };
    bool ok = once(&h, false, 0, &apart) && once(&h, true, 0, &fused); /* the pool's pages */
    for (int i = 0; i < ROUNDS && ok; i++)
        ok = once(&h, i % 2, i, i % 2 ? &fused : &apart) &&
             once(&h, !(i % 2), i, i % 2 ? &apart : &fused);
    const double a = median_of(apart.clock, ROUNDS), f = median_of(fused.clock, ROUNDS);
    printf("%6lld x %lld -> %lld %-4s  apart %8.1f ms %6.0f MB   fused %8.1f ms %6.0f MB   "
           "time x%.3f (processor x%.3f), memory x%.2f, losses differ by %.1e\n",
           (long long)rows, (long long)embd, (long long)vocab, kn_dtype_name(dtype), 1e3 * a,
           1e-6 * (double)apart.peak, 1e3 * f, 1e-6 * (double)fused.peak, f / a,
           median_of(fused.processor, ROUNDS) / median_of(apart.processor, ROUNDS),
           (double)fused.peak / (double)apart.peak, fabs(fused.loss / apart.loss - 1));
    fflush(stdout);
    kn_scope_end(s);
    return ok;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "The head of a language model in one operation and in two.\n"
               "  bench_linear_loss [--device cpu|cuda] [--dtype f32|bf16] [--rows N] [--embd N] "
               "[--vocab N] [--threads N]",
               0);
    kn_init(&argc, &argv);
    const kn_device device = strcmp(word(argc, argv, "--device", "cpu"), "cuda") ? KN_CPU : KN_CUDA;
    const kn_dtype dtype = strcmp(word(argc, argv, "--dtype", "f32"), "bf16") ? KN_F32 : KN_BF16;
    const int64_t embd = number(argc, argv, "--embd", 768);
    const int64_t vocab = number(argc, argv, "--vocab", 50257);
    const int64_t given = number(argc, argv, "--rows", 0),
                  threads = number(argc, argv, "--threads", 0);
    static const int64_t usual[] = { 256, 1024, 4096 };
    if (threads > 0)
        kn_set_threads((int)threads);
    if (given > 0)
        line(device, dtype, given, embd, vocab);
    for (int i = 0; i < 3 && given <= 0 && kn_ok(); i++)
        line(device, dtype, usual[i], embd, vocab);
    return kn_finish();
}
