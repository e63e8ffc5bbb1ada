/* bench/kernels.c: the speed of a device's kernels beside the device's ceilings: its copy bandwidth
 * and its matrix product, measured in the same run. Arrays are larger than caches. Each line has a
 * kernel's time a call, its GB/s and TFLOP/s (bytes and operations by kn_kernel_cost), and their
 * shares of the ceilings. The last line names the kernels below 60 % of both.
 *
 *   kernels [--device cpu|cuda] [--only WORD]
 *
 * N: MiB of the largest array, default 256. WORD: only the lines whose name begins with it. */
#include "bench/args.h"
#include "kernels/kernels.h"
#include "knap.h"

#include <stdio.h>
#include <string.h>

enum { ARRAYS = 64 };

typedef struct bench {
    kn_device device;
    kn_stream *s;
    int64_t mb;
    const char *only;
    double copy, product;
    void *taken[ARRAYS];
    size_t bytes[ARRAYS];
    int count;
    char low[4096]; /* names and shares of the kernels below LOW of both ceilings */
} bench;

#define LOW 0.6

static void note_low(bench *b, const char *name, double share)
{
    size_t n = strlen(b->low);
    if (share < LOW)
        snprintf(b->low + n, sizeof b->low - n, "%s%s (%.0f %%)", n ? ", " : "", name, 100 * share);
}

static void give_all(bench *b)
{
    kn_stream_sync(b->s);
    while (b->count > 0) {
        b->count--;
        kn_give(kn_device_memory(b->device), b->taken[b->count], b->bytes[b->count],
                KN_MEM_WORKSPACE);
    }
}

static kn_array array(bench *b, kn_dtype t, int ndim, const int64_t *shape)
{
    kn_array a = kn_array_make(NULL, t, ndim, shape);
    size_t bytes = (size_t)kn_array_numel(&a) * kn_dtype_size(t);
    a.data =
        b->count < ARRAYS ? kn_take(kn_device_memory(b->device), bytes, KN_MEM_WORKSPACE) : NULL;
    if (!a.data)
        return a;
    b->taken[b->count] = a.data;
    b->bytes[b->count++] = bytes;
    if (kn_dtype_is_float(t))
        KN_LAUNCH(b->s, KN_K_RANDOM,
                  ((kn_random_args){ .dst = a, .kind = KN_NORMAL, .seed = 1, .p1 = 1 }));
    else
        KN_LAUNCH(b->s, KN_K_FILL, ((kn_fill_args){ .dst = a }));
    return a;
}

/* Seconds of a call: the best of five groups of calls, each of about 20 ms. */
static double seconds(const bench *b, kn_kernel k, const void *args, size_t size)
{
    double best = 1e30;
    int64_t calls = 1;
    for (int group = 0; group < 6 && kn_ok(); group++) {
        double t = kn_now();
        for (int64_t i = 0; i < calls; i++)
            kn_launch(b->s, k, args, size);
        kn_stream_sync(b->s);
        t = (kn_now() - t) / (double)calls;
        if (group == 0) /* a single call, cold */
            calls = t > 0.02 ? 1 : (int64_t)(0.02 / t) + 1;
        else
            best = t < best ? t : best;
    }
    return best;
}

static void line(bench *b, const char *name, kn_kernel k, const void *args, size_t size)
{
    if (strncmp(name, b->only, strlen(b->only)) != 0) {
        give_all(b);
        return;
    }
    kn_cost cost = kn_kernel_cost(k, args);
    double t = kn_ok() ? seconds(b, k, args, size) : 0;
    if (!kn_ok()) {
        printf("%-36s FAILED: %s\n", name, kn_error());
        kn_clear_error();
    } else {
        printf("%-36s %10.1f us %9.1f GB/s %5.1f %%  %8.2f TFLOP/s %5.1f %%\n", name, 1e6 * t,
               cost.bytes / t / 1e9, b->copy > 0 ? 100 * cost.bytes / t / b->copy : 100,
               cost.flops / t / 1e12, b->product > 0 ? 100 * cost.flops / t / b->product : 0);
        double moves = b->copy > 0 ? cost.bytes / t / b->copy : 1;
        double computes = b->product > 0 ? cost.flops / t / b->product : 0;
        note_low(b, name, moves > computes ? moves : computes);
    }
    fflush(stdout);
    give_all(b);
}

#define LINE(b, name, k, ...) line(b, name, k, &(__VA_ARGS__), sizeof(__VA_ARGS__))
#define SHAPE(...)                                                                                 \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / 8), (int64_t[])                                     \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

static double rate_of_copy(bench *b)
{
    int64_t n = b->mb << 18;
    kn_copy_args a = { array(b, KN_F32, SHAPE(n)), array(b, KN_F32, SHAPE(n)) };
    double t = seconds(b, KN_K_COPY, &a, sizeof a);
    give_all(b);
    return 8.0 * (double)n / t;
}

static double rate_of_product(bench *b, kn_dtype t, int64_t n)
{
    kn_matmul_args a = {
        array(b, t, SHAPE(n, n)), array(b, t, SHAPE(n, n)), array(b, t, SHAPE(n, n)), { 0 }
    };
    double s = seconds(b, KN_K_MATMUL, &a, sizeof a);
    give_all(b);
    return 2.0 * (double)n * (double)n * (double)n / s;
}

static void elementwise(bench *b, kn_dtype t, const char *dtype)
{
    int64_t n = (b->mb << 20) / (int64_t)kn_dtype_size(t);
    char name[64];
#define NAME(text) (snprintf(name, sizeof name, text " %s", dtype), name)
    LINE(b, NAME("copy"), KN_K_COPY,
         ((kn_copy_args){ array(b, t, SHAPE(n)), array(b, t, SHAPE(n)) }));
    LINE(b, NAME("fill"), KN_K_FILL, ((kn_fill_args){ .dst = array(b, t, SHAPE(n)) }));
    LINE(b, NAME("add"), KN_K_BINARY,
         ((kn_binary_args){ array(b, t, SHAPE(n)), array(b, t, SHAPE(n)), array(b, t, SHAPE(n)),
                            KN_ADD }));
    LINE(b, NAME("gelu"), KN_K_UNARY,
         ((kn_unary_args){ array(b, t, SHAPE(n)), array(b, t, SHAPE(n)), KN_GELU_TANH, 0, 0 }));
    LINE(b, NAME("gelu backward"), KN_K_UNARY_GRAD,
         ((kn_unary_grad_args){ array(b, t, SHAPE(n)),
                                array(b, t, SHAPE(n)),
                                array(b, t, SHAPE(n)),
                                { 0 },
                                KN_GELU_TANH,
                                0,
                                0 }));
    LINE(b, NAME("random normal"), KN_K_RANDOM,
         ((kn_random_args){ .dst = array(b, t, SHAPE(n)), .kind = KN_NORMAL, .seed = 7, .p1 = 1 }));
    LINE(b, NAME("dropout"), KN_K_DROPOUT,
         ((kn_dropout_args){ array(b, t, SHAPE(n)), array(b, t, SHAPE(n)), 0.1, 7, 9 }));
    LINE(b, NAME("sum of rows"), KN_K_REDUCE,
         ((kn_reduce_args){ array(b, t, SHAPE(n / 1024, 1)), array(b, t, SHAPE(n / 1024, 1024)),
                            KN_SUM }));
    LINE(b, NAME("sum of columns"), KN_K_REDUCE,
         ((kn_reduce_args){ array(b, t, SHAPE(1, 1024)), array(b, t, SHAPE(n / 1024, 1024)),
                            KN_SUM }));
}

static void rows(bench *b, kn_dtype t, const char *dtype)
{
    int64_t c = 768, n = (b->mb << 20) / (int64_t)kn_dtype_size(t) / c, v = 50304;
    int64_t tokens = (b->mb << 20) / (int64_t)kn_dtype_size(t) / v + 1;
    char name[64];
    for (int added = 0; added < 2; added++) { /* of a sum, and with another gradient of it */
        const kn_array none = { 0 };
        LINE(b, added ? NAME("add + layer_norm") : NAME("layer_norm"), KN_K_NORM,
             ((kn_norm_args){ .y = array(b, t, SHAPE(n, c)),
                              .x = array(b, t, SHAPE(n, c)),
                              .w = array(b, KN_F32, SHAPE(c)),
                              .b = array(b, KN_F32, SHAPE(c)),
                              .mean = array(b, KN_F32, SHAPE(n)),
                              .rstd = array(b, KN_F32, SHAPE(n)),
                              .add = added ? array(b, t, SHAPE(n, c)) : none,
                              .sum = added ? array(b, t, SHAPE(n, c)) : none,
                              .eps = 1e-5 }));
        LINE(b, added ? NAME("layer_norm backward + add") : NAME("layer_norm backward"),
             KN_K_NORM_GRAD,
             ((kn_norm_grad_args){ .dx = array(b, t, SHAPE(n, c)),
                                   .dw = array(b, KN_F32, SHAPE(c)),
                                   .db = array(b, KN_F32, SHAPE(c)),
                                   .dy = array(b, t, SHAPE(n, c)),
                                   .x = array(b, t, SHAPE(n, c)),
                                   .w = array(b, KN_F32, SHAPE(c)),
                                   .mean = array(b, KN_F32, SHAPE(n)),
                                   .rstd = array(b, KN_F32, SHAPE(n)),
                                   .more = added ? array(b, t, SHAPE(n, c)) : none }));
    }
    LINE(b, NAME("softmax"), KN_K_SOFTMAX,
         ((kn_softmax_args){ array(b, t, SHAPE(n, c)), array(b, t, SHAPE(n, c)), false }));
    LINE(b, NAME("cross entropy"), KN_K_CROSS_ENTROPY,
         ((kn_cross_entropy_args){ .loss = array(b, KN_F32, 0, NULL),
                                   .count = array(b, KN_F32, 0, NULL),
                                   .lse = array(b, KN_F32, SHAPE(tokens)),
                                   .logits = array(b, t, SHAPE(tokens, v)),
                                   .targets = array(b, KN_I64, SHAPE(tokens)),
                                   .ignore_index = -1 }));
    LINE(b, NAME("embedding"), KN_K_INDEX_SELECT,
         ((kn_index_select_args){ array(b, t, SHAPE(n, c)), array(b, t, SHAPE(v, c)),
                                  array(b, KN_I64, SHAPE(n)), 0 }));
}

static void turn(kn_array *a)
{
    int64_t rows = a->shape[0];
    a->shape[0] = a->shape[1], a->shape[1] = rows;
    a->stride[1] = a->stride[0], a->stride[0] = 1;
}

/* Gradients of an MLP's products with what follows them: in parts, and on GPUs by cuBLASLt in one
 * kernel, where it has one. */
static void epilogues(bench *b, kn_dtype t, const char *dtype, int64_t m, int64_t c)
{
    char name[64];
    for (int one = 0; one < (b->device == KN_CUDA ? 2 : 1); one++) {
        kn_cuda_epilogues(one ? "all" : "none");
        kn_array w = array(b, t, SHAPE(4 * c, c)), x = array(b, t, SHAPE(m, c));
        kn_array dx = array(b, t, SHAPE(m, 4 * c)), z = array(b, t, SHAPE(m, 4 * c));
        turn(&w);
        LINE(b, one ? NAME("dX C -> 4C, gelu' at once") : NAME("dX C -> 4C, gelu'"), KN_K_MATMUL,
             ((kn_matmul_args){ .dst = dx, .a = x, .b = w, .x = z, .grad_of = KN_GELU_TANH }));
        x = array(b, t, SHAPE(m, c));
        turn(&x);
        LINE(b, one ? NAME("dW C -> 4C, db at once") : NAME("dW C -> 4C, db"), KN_K_MATMUL,
             ((kn_matmul_args){ .dst = array(b, t, SHAPE(c, 4 * c)),
                                .a = x,
                                .b = array(b, t, SHAPE(m, 4 * c)),
                                .sum = array(b, t, SHAPE(4 * c)),
                                .sum_of_b = true }));
    }
    kn_cuda_epilogues("none");
}

static void products(bench *b, kn_dtype t, const char *dtype)
{
    int64_t m = b->mb >= 256 ? 8192 : 512, c = b->mb >= 256 ? 768 : 128;
    char name[64];
    LINE(b, NAME("product T x C -> 4C + bias"), KN_K_MATMUL,
         ((kn_matmul_args){ array(b, t, SHAPE(m, 4 * c)), array(b, t, SHAPE(m, c)),
                            array(b, t, SHAPE(c, 4 * c)), array(b, t, SHAPE(4 * c)) }));
    LINE(b, NAME("product T x 4C -> C"), KN_K_MATMUL,
         ((kn_matmul_args){ array(b, t, SHAPE(m, c)),
                            array(b, t, SHAPE(m, 4 * c)),
                            array(b, t, SHAPE(4 * c, c)),
                            { 0 } }));
    epilogues(b, t, dtype, m, c);
    int64_t B = b->mb >= 256 ? 8 : 1, H = c / 64, T = b->mb >= 256 ? 1024 : 128;
    LINE(b, NAME("attention, causal"), KN_K_ATTENTION,
         ((kn_attention_args){ .o = array(b, t, SHAPE(B, H, T, 64)),
                               .lse = array(b, KN_F32, SHAPE(B, H, T)),
                               .q = array(b, t, SHAPE(B, H, T, 64)),
                               .k = array(b, t, SHAPE(B, H, T, 64)),
                               .v = array(b, t, SHAPE(B, H, T, 64)),
                               .scale = 0.125,
                               .causal = true }));
    LINE(b, NAME("attention backward"), KN_K_ATTENTION_GRAD,
         ((kn_attention_grad_args){ .dq = array(b, t, SHAPE(B, H, T, 64)),
                                    .dk = array(b, t, SHAPE(B, H, T, 64)),
                                    .dv = array(b, t, SHAPE(B, H, T, 64)),
                                    .dout = array(b, t, SHAPE(B, H, T, 64)),
                                    .o = array(b, t, SHAPE(B, H, T, 64)),
                                    .lse = array(b, KN_F32, SHAPE(B, H, T)),
                                    .q = array(b, t, SHAPE(B, H, T, 64)),
                                    .k = array(b, t, SHAPE(B, H, T, 64)),
                                    .v = array(b, t, SHAPE(B, H, T, 64)),
                                    .scale = 0.125,
                                    .causal = true }));
}

/* [N,C,H,W], channels-last in memory where last. */
static kn_array image(bench *b, kn_dtype t, int64_t N, int64_t C, int64_t H, bool last)
{
    kn_array a = array(b, t, SHAPE(N, C, H, H));
    for (int d = 1; d < 4 && last; d++)
        a.stride[d] = d == 1 ? 1 : d == 2 ? H * C : C;
    return a;
}

/* Providers of ResNet-50 at a quarter of its input's side, and the pool before them. */
static void images(bench *b, kn_dtype t, const char *dtype)
{
    int64_t N = b->mb >= 256 ? 32 : 4, H = 56;
    char name[64];
#define NUMBERS(p) .stride = { 1, 1 }, .pad = { (p), (p) }, .dilation = { 1, 1 }, .groups = 1
    for (int last = 0; last < 2; last++) {
        const char *order = last ? ", channels last" : "";
#define NAME_IN(text) (snprintf(name, sizeof name, text "%s %s", order, dtype), name)
        LINE(b, NAME_IN("conv 3x3 64"), KN_K_CONV,
             ((kn_conv_args){ .y = image(b, t, N, 64, H, last),
                              .x = image(b, t, N, 64, H, last),
                              .w = array(b, t, SHAPE(64, 64, 3, 3)),
                              NUMBERS(1) }));
        LINE(b, NAME_IN("conv 1x1 64 -> 256"), KN_K_CONV,
             ((kn_conv_args){ .y = image(b, t, N, 256, H, last),
                              .x = image(b, t, N, 64, H, last),
                              .w = array(b, t, SHAPE(256, 64, 1, 1)),
                              NUMBERS(0) }));
        LINE(b, NAME_IN("conv 3x3 dx"), KN_K_CONV_GRAD_X,
             ((kn_conv_grad_x_args){ .dx = image(b, t, N, 64, H, last),
                                     .dy = image(b, t, N, 64, H, last),
                                     .w = array(b, t, SHAPE(64, 64, 3, 3)),
                                     NUMBERS(1) }));
        LINE(b, NAME_IN("conv 3x3 dw"), KN_K_CONV_GRAD_W,
             ((kn_conv_grad_w_args){ .dw = array(b, t, SHAPE(64, 64, 3, 3)),
                                     .dy = image(b, t, N, 64, H, last),
                                     .x = image(b, t, N, 64, H, last),
                                     NUMBERS(1) }));
        if (t != KN_F32)
            LINE(b, NAME_IN("conv 3x3 dw in f32"), KN_K_CONV_GRAD_W,
                 ((kn_conv_grad_w_args){ .dw = array(b, KN_F32, SHAPE(64, 64, 3, 3)),
                                         .dy = image(b, t, N, 64, H, last),
                                         .x = image(b, t, N, 64, H, last),
                                         NUMBERS(1) }));
        LINE(b, NAME_IN("batch norm"), KN_K_BATCH_NORM,
             ((kn_batch_norm_args){ .y = image(b, t, N, 64, H, last),
                                    .x = image(b, t, N, 64, H, last),
                                    .w = array(b, KN_F32, SHAPE(64)),
                                    .b = array(b, KN_F32, SHAPE(64)),
                                    .running_mean = array(b, KN_F32, SHAPE(64)),
                                    .running_var = array(b, KN_F32, SHAPE(64)),
                                    .momentum = 0.1,
                                    .mean = array(b, KN_F32, SHAPE(64)),
                                    .rstd = array(b, KN_F32, SHAPE(64)),
                                    .eps = 1e-5,
                                    .training = true }));
        LINE(b, NAME_IN("batch norm dx"), KN_K_BATCH_NORM_GRAD,
             ((kn_batch_norm_grad_args){ .dx = image(b, t, N, 64, H, last),
                                         .dy = image(b, t, N, 64, H, last),
                                         .x = image(b, t, N, 64, H, last),
                                         .w = array(b, KN_F32, SHAPE(64)),
                                         .dw = array(b, KN_F32, SHAPE(64)),
                                         .db = array(b, KN_F32, SHAPE(64)),
                                         .mean = array(b, KN_F32, SHAPE(64)),
                                         .rstd = array(b, KN_F32, SHAPE(64)),
                                         .training = true }));
        kn_window w = {
            .kernel = { 3, 3 }, .stride = { 2, 2 }, .pad = { 1, 1 }, .dilation = { 1, 1 }
        };
        LINE(b, NAME_IN("max pool 3x3"), KN_K_POOL,
             ((kn_pool_args){ .y = image(b, t, N, 64, H, last),
                              .index = image(b, KN_I32, N, 64, H, last),
                              .x = image(b, t, N, 64, 2 * H, last),
                              .window = w }));
        kn_array index = image(b, KN_I32, N, 64, H, last);
        LINE(b, NAME_IN("max pool dx"), KN_K_POOL_GRAD,
             ((kn_pool_grad_args){ .dx = image(b, t, N, 64, 2 * H, last),
                                   .dy = image(b, t, N, 64, H, last),
                                   .index = index,
                                   .window = w }));
    }
#undef NUMBERS
#undef NAME_IN
#undef NAME
}

static void optimizer(bench *b)
{
    int64_t n = b->mb << 17;
    kn_array p = array(b, KN_F32, SHAPE(n)), g = array(b, KN_F32, SHAPE(n)),
             m = array(b, KN_F32, SHAPE(n)), v = array(b, KN_F32, SHAPE(n)),
             x = array(b, KN_F64, SHAPE(3));
    kn_unary_args positive = { v, v, KN_ABS, 0, 0 };
    KN_LAUNCH(b->s, KN_K_UNARY, positive);
    KN_LAUNCH(b->s, KN_K_FILL, ((kn_fill_args){ .dst = x, .value = 1e-6, .step = 1 }));
    kn_opt_piece piece = { .param = p.data,
                           .grad = g.data,
                           .m = m.data,
                           .v = v.data,
                           .count = n,
                           .lr_mul = 1,
                           .param_dtype = KN_F32,
                           .grad_dtype = KN_F32 };
    const double *scalar = x.data;
    if (scalar)
        LINE(b, "adamw f32", KN_K_ADAMW,
             ((kn_adamw_args){
                 { &piece, 1, scalar, scalar + 1, scalar + 2, NULL }, 0.9, 0.95, 1e-8 }));
    kn_array runs = array(b, KN_F32, SHAPE(2 * n)), out = array(b, KN_F32, SHAPE(16));
    kn_run run = { runs.data, 2 * n, KN_F32 };
    if (!out.data)
        return;
    LINE(b, "absmax f32", KN_K_ABSMAX, ((kn_absmax_args){ &run, 1, out.data }));
    LINE(b, "sqsum f32", KN_K_SQSUM,
         ((kn_sqsum_args){ &run, 1, out.data, (int64_t *)out.data + 1 }));
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "The speed of a device's kernels beside the device's ceilings.\n"
               "  bench_kernels [--device cpu|cuda] [--mb N] [--only WORD] [--threads N]",
               0);
    kn_init(&argc, &argv);
    bool cuda = strcmp(word(argc, argv, "--device", "cpu"), "cuda") == 0;
    bench b = { .device = cuda ? KN_CUDA : KN_CPU, .mb = (int)number(argc, argv, "--mb", 256) };
    b.only = word(argc, argv, "--only", "");
    b.s = kn_device_memory(b.device) ? kn_compute_stream(b.device) : NULL;
    if (!b.s || b.mb < 1)
        return kn_finish();
    int64_t cube = b.mb >= 256 ? 8192 : 512;
    double copy = rate_of_copy(&b), f32 = rate_of_product(&b, KN_F32, cube / 2);
    double half = rate_of_product(&b, KN_BF16, cube);
    if (cuda)
        printf("device: %s\n", kn_cuda_describe());
    else
        printf("device: cpu (%s), %d threads, %s\n", kn_cpu_isa(), kn_threads(),
               kn_cpu_libraries());
    printf(
        "ceilings: copy %.1f GB/s; product %lld^3 f32 %.2f TFLOP/s, %lld^3 bf16 %.2f TFLOP/s\n\n",
        copy / 1e9, (long long)cube / 2, f32 / 1e12, (long long)cube, half / 1e12);
    b.copy = copy;
    for (int i = 0; i < 2; i++) {
        kn_dtype t = i ? KN_BF16 : KN_F32;
        b.product = i ? half : f32;
        elementwise(&b, t, kn_dtype_name(t));
        rows(&b, t, kn_dtype_name(t));
        products(&b, t, kn_dtype_name(t));
        images(&b, t, kn_dtype_name(t));
    }
    b.product = f32;
    optimizer(&b);
    printf("\nbelow %.0f %% of both ceilings: %s\n", 100 * LOW, *b.low ? b.low : "none");
    return kn_finish();
}
