/* bench/gpt2.c: tokens/s of training GPT-2 (forward, backward, clipping, AdamW; masters in f32) on one rank or
 * several, and MFU: kn_gpt_flops_per_token over what the device's data sheet promises.
 *
 *   gpt2 [--device cpu|cuda] [--model gpt2|gpt2-medium|gpt2-large|gpt2-xl] [--batch N] [--ctx N] [--dtype f32|bf16]
 *        [--steps N] [--layers N] [--peak TFLOPS] [--recompute] [--overhead] [--ranks N]
 *
 * --overhead: f32; the same model without kn_fsdp_wrap as well, and what wrapping costs on one rank.
 */
#include "knap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct sizes {
    kn_device device;
    kn_gpt_config model;
    const char *name;
    int64_t batch, ctx, steps;
    kn_dtype dtype;
    bool recompute;
    double peak;
} sizes;

static const char *word(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return otherwise;
}

static bool flag(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return false;
}

static bool step(const sizes *s, kn_gpt *g, kn_optim *opt, int64_t *ids, int64_t at, double *norm)
{
    int64_t n = s->batch * s->ctx;
    for (int64_t i = 0; i < 2 * n; i++)
        ids[i] = (i % n * 7919 + at * 104729 + (i >= n)) % s->model.vocab;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, s->device, ids, KN_SHAPE(s->batch, s->ctx));
    kn_tensor *y = kn_from(KN_I64, s->device, ids + n, KN_SHAPE(s->batch, s->ctx));
    kn_backward(kn_gpt_loss(g, x, y));
    *norm = (float)kn_item(kn_clip_grad_norm(g, 1.0));
    kn_step(opt);
    kn_scope_end(scope);
    return kn_ok();
}

/* Seconds a step, the mean of all but the first three; 0 with an error. */
static double measure(const sizes *s, kn_comm *world, bool wrap)
{
    kn_gpt g = { 0 };
    kn_optim *opt = NULL;
    double norm = 0, begin = 0, spent = 0;
    int64_t *ids = malloc((size_t)(2 * s->batch * s->ctx) * sizeof *ids);
    bool ok = ids && kn_gpt_init(&g, s->model, KN_F32, KN_META);
    if (ok)
        kn_gpt_recompute(&g, s->recompute);
    kn_dtype dtype = s->dtype == KN_F32 ? KN_DTYPE_DEFAULT : s->dtype;
    ok = ok && (wrap ? kn_fsdp_wrap(&g, world, .wrap_class = "gpt_block", .device = s->device,
                                    .param_dtype = dtype)
                     : kn_materialize(&g, s->device, 1337));
    ok = ok && (opt = kn_adamw(&g, .lr = 1e-4, .weight_decay = 0.1));
    for (int64_t i = 0; ok && i < s->steps + 3; i++) {
        if (i == 3)
            begin = kn_now();
        ok = step(s, &g, opt, ids, i, &norm);
    }
    if (ok && kn_stream_sync(kn_compute_stream(s->device)))
        spent = (kn_now() - begin) / (double)s->steps;
    kn_optim_free(opt);
    kn_module_free(&g);
    free(ids);
    return spent;
}

static void report(const sizes *s, int ranks, const char *what, double spent)
{
    double tokens = (double)(s->batch * s->ctx) * ranks / spent;
    double flops = tokens * kn_gpt_flops_per_token(&s->model, s->ctx);
    char mfu[32] = "n/a";
    if (s->peak > 0)
        snprintf(mfu, sizeof mfu, "%.1f %%", 100 * flops / (s->peak * 1e12 * ranks));
    printf("%s%s %s, batch %lld x %lld, %d rank%s: %.2f ms a step, %.0f tokens/s, %.2f TFLOP/s, "
           "MFU %s, "
           "peak %.2f GB\n",
           s->name, what, kn_dtype_name(s->dtype), (long long)s->batch, (long long)s->ctx, ranks,
           ranks == 1 ? "" : "s", 1e3 * spent, tokens, flops / 1e12, mfu,
           (double)kn_ledger_read().peak_total / 1e9);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    kn_comm *world = kn_init(&argc, &argv);
    bool first = kn_rank(world) == 0, overhead = flag(argc, argv, "--overhead");
    sizes s = { .name = word(argc, argv, "--model", "gpt2") };
    s.device = strcmp(word(argc, argv, "--device", "cuda"), "cuda") == 0 ? KN_CUDA : KN_CPU;
    s.batch = atoll(word(argc, argv, "--batch", "8"));
    s.steps = atoll(word(argc, argv, "--steps", "20"));
    s.peak = atof(word(argc, argv, "--peak", "0"));
    s.recompute = flag(argc, argv, "--recompute");
    s.dtype = overhead ? KN_F32 : kn_dtype_parse(word(argc, argv, "--dtype", "bf16"));
    if (!kn_ok() || !kn_gpt_preset(s.name, &s.model) || !kn_device_memory(s.device))
        return kn_finish();
    s.ctx = atoll(word(argc, argv, "--ctx", "1024"));
    s.model.layers = atoi(word(argc, argv, "--layers", "0"))
                         ? atoi(word(argc, argv, "--layers", "0"))
                         : s.model.layers;
    if (first && s.device == KN_CUDA)
        printf("device: %s\n", kn_cuda_describe());
    double alone = overhead ? measure(&s, world, false) : 0;
    if (alone > 0 && first)
        report(&s, 1, ", not wrapped,", alone);
    kn_ledger_reset_peaks();
    double spent = measure(&s, world, true);
    if (spent > 0 && first)
        report(&s, kn_comm_size(world), "", spent);
    if (spent > 0 && alone > 0 && first)
        printf("wrapping costs %.2f %% on one rank\n", 100 * (spent / alone - 1));
    return kn_finish();
}
