/* bench/step.c: one training step of GPT-2 124M (f32, batch 4 x context 64, AdamW) beside this
 * machine's ceilings: its 1024-cubed product and its copy bandwidth, measured in the same run.
 * Prints the step's time, the products' share, and a line a kernel.
 *
 *   step [--steps N] [--threads N] [--layers N] */
#include "bench/args.h"
#include "knap.h"
#include "kernels/kernels.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 4, CTX = 64, MAX_ROWS = 64 };

static double product_rate(int n)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(n, n)),
              *b = kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(n, n));
    double best = 1e9;
    for (int i = 0; i < 12 && kn_ok(); i++) {
        double t = kn_now();
        kn_matmul(a, b);
        t = kn_now() - t;
        best = t < best ? t : best;
    }
    kn_scope_end(scope);
    return 2.0 * n * n * n / best;
}

static double copy_rate(void)
{
    size_t bytes = (size_t)256 << 20;
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = kn_zeros(KN_F32, KN_CPU, KN_SHAPE((int64_t)(bytes / 4))), *b = kn_zeros_like(a);
    double best = 1e9;
    for (int i = 0; i < 5 && kn_ok(); i++) {
        double t = kn_now();
        kn_copy_(b, a);
        t = kn_now() - t;
        best = t < best ? t : best;
    }
    kn_scope_end(scope);
    return 2.0 * (double)bytes / best;
}

typedef struct row {
    const char *what, *provider;
    double seconds, flops, bytes;
    int calls;
} row;

static int by_time(const void *a, const void *b)
{
    double x = ((const row *)a)->seconds, y = ((const row *)b)->seconds;
    return x < y ? 1 : x > y ? -1 : 0;
}

static int add_up(const kn_trace_event *e, size_t n, row *rows)
{
    int count = 0;
    for (size_t i = 0; i < n; i++) {
        int k = 0;
        while (k < count && (strcmp(rows[k].what, e[i].what) != 0 ||
                             strcmp(rows[k].provider, e[i].provider) != 0))
            k++;
        if (k == MAX_ROWS)
            continue;
        if (k == count)
            rows[count++] = (row){ .what = e[i].what, .provider = e[i].provider };
        rows[k].seconds += e[i].end - e[i].begin;
        rows[k].flops += e[i].flops;
        rows[k].bytes += e[i].bytes;
        rows[k].calls++;
    }
    qsort(rows, (size_t)count, sizeof *rows, by_time);
    return count;
}

static double train_step(kn_gpt *g, kn_optim *opt, int64_t vocab, int step)
{
    int64_t ids[BATCH * CTX], next[BATCH * CTX];
    for (int i = 0; i < BATCH * CTX; i++) {
        ids[i] = (i * 7919 + step * 104729) % vocab;
        next[i] = (ids[i] * 31 + 7) % vocab;
    }
    double t = kn_now();
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH, CTX));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, next, KN_SHAPE(BATCH, CTX));
    kn_tensor *loss = kn_gpt_loss(g, x, y);
    kn_backward(loss);
    kn_clip_grad_norm(g, 1.0);
    kn_step(opt);
    kn_scope_end(scope);
    return kn_now() - t;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "A training step of GPT-2 124M beside this machine's ceilings.\n"
               "  bench_step [--steps N] [--threads N] [--layers N]",
               0);
    kn_comm *world = kn_init(&argc, &argv);
    int steps = (int)number(argc, argv, "--steps", 5);
    kn_gpt_config c;
    kn_gpt_preset("gpt2", &c);
    c.layers = (int)number(argc, argv, "--layers", c.layers);
    kn_gpt g = { 0 };
    double peak = product_rate(1024), copy = copy_rate();
    printf("machine: %s, %d threads, %s; 1024-cubed f32 product %.0f GFLOP/s, copy %.1f GB/s\n",
           kn_cpu_isa(), kn_threads(), kn_cpu_libraries(), peak / 1e9, copy / 1e9);
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, world, .wrap_class = "gpt_block");
    kn_optim *opt = kn_adamw(&g, .lr = 1e-4, .weight_decay = 0.1);
    double best = 1e9;
    for (int i = 0; i < 2 + steps && kn_ok(); i++) {
        double t = train_step(&g, opt, c.vocab, i);
        best = i >= 2 && t < best ? t : best;
    }
    kn_trace_start(100000);
    double traced = train_step(&g, opt, c.vocab, steps + 2);
    kn_trace_event *e = NULL;
    size_t n = kn_trace_stop(&e);
    static row rows[MAX_ROWS];
    int count = kn_ok() ? add_up(e, n, rows) : 0;
    double products = 0, flops = 0, all = 0;
    printf("%-22s %-10s %6s %9s %6s %9s %6s %9s %6s\n", "kernel", "provider", "calls", "ms",
           "share", "GFLOP/s", "of it", "GB/s", "of it");
    for (int i = 0; i < count; i++) {
        const row *r = &rows[i];
        all += r->seconds;
        if (strcmp(r->what, "matmul") == 0) {
            products += r->seconds;
            flops += r->flops;
        }
        printf("%-22s %-10s %6d %9.2f %5.1f%% %9.1f %5.0f%% %9.1f %5.0f%%\n", r->what, r->provider,
               r->calls, 1e3 * r->seconds, 100 * r->seconds / traced, r->flops / r->seconds / 1e9,
               100 * r->flops / r->seconds / peak, r->bytes / r->seconds / 1e9,
               100 * r->bytes / r->seconds / copy);
    }
    printf("step: best of %d %.3f s (traced %.3f s); kernels %.3f s, products %.3f s (%.0f %%) at "
           "%.0f GFLOP/s\n",
           steps, best, traced, all, products, 100 * products / traced, flops / products / 1e9);
    /* products scale with the machine's product rate, the rest is assumed unchanged */
    printf(
        "on a machine whose product runs at 480 GFLOP/s: products' floor %.3f s; step %.3f s with "
        "everything else as slow as here, %.3f s with everything scaled; goal 1.0 s\n",
        flops / 480e9, best - products * (1 - peak / 480e9), best * peak / 480e9);
    kn_host_free(e);
    kn_optim_free(opt);
    kn_module_free(&g);
    return kn_finish();
}
