/* bench/muon.c: how fast Muon makes matrices orthogonal, beside the products that this takes: their
 * time alone over the whole time, which also has norms, polynomials and copies. Then Muon's share
 * of a training step of a GPT.
 *
 *   muon [--dtype bf16|f32] [--threads N] [--steps N]
 *
 * N of steps: measured steps of the GPT, default 4. */
#include "bench/args.h"
#include "bench/times.h"
#include "kernels/trace.h"
#include "knap.h"
#include "optim/optim_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NS = 5, REPEATS = 7 };

static const double quintic[3] = { 3.4445, -4.7750, 2.0315 };

/* The products of one matrix's step, and nothing else. */
static void products(kn_tensor *x)
{
    bool tall = kn_size(x, 0) > kn_size(x, 1);
    kn_tensor *turned = kn_transpose(x, 0, 1);
    for (int i = 0; i < NS; i++) {
        kn_tensor *gram = tall ? kn_matmul(turned, x) : kn_matmul(x, turned);
        kn_tensor *square = kn_matmul(gram, gram);
        kn_tensor *y = tall ? kn_matmul(x, square) : kn_matmul(square, x);
        (void)y;
    }
}

static void orthogonal(kn_tensor *x)
{
    kn_newton_schulz(x, quintic, NS, 1e-7);
}

static double seconds_of(void (*fn)(kn_tensor *x), kn_tensor *x)
{
    kn_scope s = kn_scope_begin();
    double begin = processor_seconds();
    fn(x);
    double took = processor_seconds() - begin;
    kn_scope_end(s);
    return took;
}

static void one(kn_dtype t, int64_t rows, int64_t cols)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *x = kn_scale(kn_randn(t, KN_CPU, 1, 0, KN_SHAPE(rows, cols)), 1e-3);
    double alone = HUGE_VAL, all = HUGE_VAL; /* the least time of some, in turn */
    for (int i = 0; i < REPEATS; i++) {
        alone = fmin(alone, seconds_of(products, x));
        all = fmin(all, seconds_of(orthogonal, x));
    }
    double flops = NS * kn_newton_schulz_flops(rows, cols);
    printf("%6lld x %-6lld %9.2f ms  %7.1f GFLOP/s  products alone %7.1f GFLOP/s  ratio %3.0f %%\n",
           (long long)rows, (long long)cols, 1e3 * all, flops / all / 1e9, flops / alone / 1e9,
           100 * alone / all);
    kn_scope_end(s);
}

static void share_of_a_step(kn_dtype t, int steps)
{
    enum { BATCH = 4, CTX = 128, VOCAB = 256 };
    int64_t ids[BATCH * CTX];
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 4, .heads = 8, .embd = 512, .ctx = CTX, .vocab = VOCAB };
    for (int i = 0; i < BATCH * CTX; i++)
        ids[i] = i * 7 % VOCAB;
    if (!kn_gpt_init(&g, c, KN_F32, KN_META) ||
        !kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .param_dtype = t))
        return;
    kn_optim *o = kn_muon(&g, .lr = 0.01, .ns_dtype = t);
    double muon = 0, all = 0;
    for (int step = 0; step <= steps && kn_ok(); step++) {
        kn_scope s = kn_scope_begin();
        double begin = kn_now();
        kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH, CTX));
        kn_backward(kn_gpt_loss(&g, x, x));
        kn_step(o);
        all += step > 0 ? kn_now() - begin : 0;
        muon += step > 0 ? kn_muon_seconds(o) : 0;
        kn_scope_end(s);
    }
    printf(
        "GPT of 4 blocks of 512 channels, %d tokens a step: %.0f ms a step, Muon %.0f %% of it\n",
        BATCH * CTX, 1e3 * all / steps, 100 * muon / all);
    kn_optim_free(o);
    kn_module_free(&g);
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Muon's matrices beside their products, and its share of a step.\n"
               "  bench_muon [--dtype bf16|f32] [--threads N] [--steps N]",
               0);
    kn_init(&argc, &argv);
    const char *dtype = word(argc, argv, "--dtype", "bf16");
    kn_dtype t = strcmp(dtype, "f32") == 0 ? KN_F32 : KN_BF16;
    int steps = (int)number(argc, argv, "--steps", 4);
    printf("Newton-Schulz of %d steps in %s, %d threads, by their CPU time\n", NS, kn_dtype_name(t),
           kn_threads());
    kn_set_grad_mode(false);
    one(t, 512, 512);
    one(t, 768, 768);
    one(t, 768, 3072);
    one(t, 3072, 768);
    one(t, 2048, 2048);
    kn_set_grad_mode(true);
    share_of_a_step(t, steps > 0 ? steps : 1);
    return kn_finish();
}
