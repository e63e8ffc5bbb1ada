/* bench/products.c: products of the CPU by Knap's vector kernels and by oneDNN, in turns: which
 * of the two this processor prefers. A run with KNAP_TUNE=1 chooses so (kernels/cpu/choose.c).
 *
 *   bench_products [--rows 256] [--channels 768] [--vocab 50257] [--blocks 12] [--rounds 5]
 *                  [--threads N] [--dtype f32|bf16|f16]
 *
 * The products of the linear layers of a transformer (GPT-2 124M and a batch of 4 x 64 by default):
 * the forward x w^T, the gradient of x, dy w, and that of w, dy^T x. Each round goes through
 * --blocks layers, each with arrays of its own, so they come from memory as in a training step
 * (--blocks 1: from the cache). Prints both rates in GFLOP/s, the median of the rounds' ratios of
 * the times, oneDNN to own, and their range; at the end the milliseconds of a step's products.
 * --vocab 0: without the head. */
#include "bench/args.h"
#include "bench/times.h"
#include "knap.h"
#include "kernels/kernels.h"

enum { FORWARD, DX, DW, PRODUCTS, MOST_BLOCKS = 64, MOST_ROUNDS = 100 };

typedef struct layer {
    int64_t in, out;
} layer;

static kn_dtype dtype; /* of all matrices */

static size_t bytes_of(const kn_array *a)
{
    return (size_t)kn_array_numel(a) * kn_dtype_size(a->dtype);
}

static kn_array matrix(int64_t rows, int64_t columns)
{
    kn_array a = kn_array_make(NULL, dtype, 2, (int64_t[]){ rows, columns });
    a.data = kn_take(kn_device_memory(KN_CPU), bytes_of(&a), KN_MEM_WORKSPACE);
    if (a.data)
        KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_RANDOM,
                  ((kn_random_args){ .dst = a, .kind = KN_NORMAL, .seed = 1, .p1 = 1 }));
    return a;
}

static void give(const kn_array *a)
{
    kn_give(kn_device_memory(KN_CPU), a->data, bytes_of(a), KN_MEM_WORKSPACE);
}

static kn_array turned(kn_array a)
{
    const kn_array b = a;
    a.shape[0] = b.shape[1], a.shape[1] = b.shape[0];
    a.stride[0] = b.stride[1], a.stride[1] = b.stride[0];
    return a;
}

typedef struct work {
    int64_t blocks;
    kn_array x[MOST_BLOCKS], y[MOST_BLOCKS], w[MOST_BLOCKS], g[MOST_BLOCKS];
} work;

/* Seconds of one kind of product over all blocks, by the providers of that name. */
static double seconds(const work *s, int kind, const char *providers)
{
    kn_providers_only(providers);
    const double begin = kn_now();
    for (int64_t i = 0; i < s->blocks; i++) {
        const kn_matmul_args list[PRODUCTS] = {
            [FORWARD] = { s->y[i], s->x[i], turned(s->w[i]), { 0 } },
            [DX] = { s->x[i], s->y[i], s->w[i], { 0 } },
            [DW] = { s->g[i], turned(s->y[i]), s->x[i], { 0 } },
        };
        kn_launch(kn_compute_stream(KN_CPU), KN_K_MATMUL, &list[kind], sizeof *list);
    }
    kn_stream_sync(kn_compute_stream(KN_CPU));
    return kn_now() - begin;
}

/* x is written by DX: its values grow and shrink, which no product's time depends on. */
static void compare(int64_t rows, layer l, int64_t blocks, int rounds, double total[2])
{
    static const char *const names[] = { "x w^T", "dy w", "dy^T x" };
    static work s;
    char own[32];
    snprintf(own, sizeof own, "%s,reference", kn_cpu_isa());
    s.blocks = blocks;
    for (int64_t i = 0; i < blocks; i++) {
        s.x[i] = matrix(rows, l.in), s.y[i] = matrix(rows, l.out);
        s.w[i] = matrix(l.out, l.in), s.g[i] = matrix(l.out, l.in);
    }
    for (int kind = 0; kind < PRODUCTS && kn_ok(); kind++) {
        double a[MOST_ROUNDS], b[MOST_ROUNDS], ratio[MOST_ROUNDS];
        const double flops = 2e-9 * (double)(rows * l.in * l.out * blocks);
        for (int r = -1; r < rounds; r++) {
            const double first = seconds(&s, kind, own);
            const double second = seconds(&s, kind, "onednn,reference");
            if (r >= 0)
                a[r] = first, b[r] = second, ratio[r] = second / first;
        }
        const double x = median_of(a, rounds), y = median_of(b, rounds);
        const double middle = median_of(ratio, rounds);
        printf("%5lld x %5lld x %5lld  %-7s %8.1f %8.1f   %5.2f (%.2f to %.2f)\n", (long long)rows,
               (long long)l.in, (long long)l.out, names[kind], flops / x, flops / y, middle,
               ratio[0], ratio[rounds - 1]);
        fflush(stdout);
        total[0] += x;
        total[1] += y;
    }
    for (int64_t i = 0; i < blocks; i++)
        give(&s.x[i]), give(&s.y[i]), give(&s.w[i]), give(&s.g[i]);
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "products by Knap's kernels and oneDNN's: [--rows N] [--channels N] [--vocab N] "
               "[--blocks N] [--rounds N] [--threads N] [--dtype f32|bf16|f16]",
               0);
    const int64_t rows = number(argc, argv, "--rows", 256);
    const int64_t C = number(argc, argv, "--channels", 768);
    const int64_t vocab = number(argc, argv, "--vocab", 50257);
    const layer layers[] = { { C, 3 * C }, { C, C }, { C, 4 * C }, { 4 * C, C } };
    const int64_t blocks = number(argc, argv, "--blocks", 12);
    const int64_t rounds = number(argc, argv, "--rounds", 5);
    const int64_t threads = number(argc, argv, "--threads", 0);
    double total[2] = { 0 };
    dtype = kn_dtype_parse(word(argc, argv, "--dtype", "f32"));
    if (dtype != KN_F32 && dtype != KN_BF16 && dtype != KN_F16) {
        fprintf(stderr, "bench_products: --dtype is f32, bf16 or f16\n");
        return 2;
    }
    if (rows < 1 || C < 1 || vocab < 0 || blocks < 1 || blocks > MOST_BLOCKS || rounds < 1 ||
        rounds > MOST_ROUNDS || threads < 0) {
        fprintf(
            stderr,
            "bench_products: rows and channels from 1, blocks from 1 to %d, rounds from 1 to %d\n",
            MOST_BLOCKS, MOST_ROUNDS);
        return 2;
    }
    if (threads > 0)
        kn_set_threads((int)threads);
    printf("%s, %s, %d threads, %lld layers, %s\n%-21s  %-7s %8s %8s   %s\n", kn_cpu_isa(),
           kn_cpu_libraries(), kn_threads(), (long long)blocks, kn_dtype_name(dtype),
           "rows x in x out", "", kn_cpu_isa(), "oneDNN", "ratio (range)");
    for (int i = 0; i < 4; i++)
        compare(rows, layers[i], blocks, (int)rounds, total);
    if (vocab > 0)
        compare(rows, (layer){ C, vocab }, 1, (int)rounds, total);
    if (!kn_ok()) {
        fprintf(stderr, "bench_products: %s\n", kn_error());
        return 1;
    }
    printf("all: %.1f ms to %.1f: %.2f\n", 1e3 * total[0], 1e3 * total[1], total[1] / total[0]);
    return 0;
}
