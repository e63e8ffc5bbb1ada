/* bench/offload.c: the cost of offloading to page-locked host memory. Compares a step of GPT-2
 * whose masters, gradients and AdamW state lie on the host with the longest of its parts, each
 * measured alone in the same run:
 *
 *   compute    forward and backward with everything on the GPU; if that doesn't fit, extrapolated
 *              from two smaller numbers of layers
 *   transfer   parameters up twice and gradients down once, both ways at the same time
 *   host       AdamW on the host once all gradients have arrived
 *
 *   bench_offload [--model gpt2|gpt2-medium|gpt2-large|gpt2-xl] [--layers N] [--batch N] [--ctx N]
 *                 [--dtype f32|bf16] [--steps N] [--embd N]
 *
 * Gradients come down in --dtype. No clipping: the norm would need all gradients before the first
 * update. */
#include "bench/args.h"
#include "fsdp/schedule.h"
#include "knap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct sizes {
    kn_gpt_config model;
    const char *name;
    int64_t batch, ctx, steps;
    kn_dtype dtype;
} sizes;

static bool make(kn_gpt *g, const sizes *s, int layers, bool offload)
{
    kn_gpt_config c = s->model;
    c.layers = layers;
    return kn_gpt_init(g, c, KN_F32, KN_META) &&
           kn_fsdp_wrap(g, NULL, .wrap_class = "gpt_block", .device = KN_CUDA,
                        .param_dtype = s->dtype == KN_F32 ? KN_DTYPE_DEFAULT : s->dtype,
                        .keep_low_precision_grads = true, .offload_dir = offload ? "memory" : NULL);
}

static bool forward_backward(kn_gpt *g, const sizes *s)
{
    int64_t n = s->batch * s->ctx, *ids = malloc((size_t)n * sizeof *ids);
    for (int64_t i = 0; ids && i < n; i++)
        ids[i] = i * 7919 % s->model.vocab;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = ids ? kn_from(KN_I64, KN_CUDA, ids, KN_SHAPE(s->batch, s->ctx)) : NULL;
    bool ok = x && kn_backward(kn_gpt_loss(g, x, x));
    kn_scope_end(scope);
    free(ids);
    return ok;
}

static bool device_is_done(void)
{
    return kn_stream_sync(kn_compute_stream(KN_CUDA));
}

static bool drop_gradients(kn_gpt *g)
{
    kn_zero_grad(g);
    return kn_ok();
}

/* ---- each alone ------------------------------------------------------------------------------ */

/* Seconds of forward and backward with the whole model on the GPU; 0 with an error. */
static double compute_of(const sizes *s, int layers)
{
    kn_gpt g = { 0 };
    double begin = 0;
    bool ok = make(&g, s, layers, false);
    for (int64_t i = 0; ok && i < s->steps + 2; i++) {
        if (i == 2) {
            ok = device_is_done();
            begin = kn_now();
        }
        ok = ok && forward_backward(&g, s) && drop_gradients(&g);
    }
    ok = ok && device_is_done();
    double spent = (kn_now() - begin) / (double)s->steps;
    kn_module_free(&g);
    return ok ? spent : 0;
}

static double compute_alone(const sizes *s, int64_t elements, char *how, size_t size)
{
    int all = s->model.layers, few = (all + 7) / 8, more = 2 * few;
    bool fits = 12.0 * (double)elements < 0.6 * (double)kn_cuda_memory_read().device_total;
    snprintf(how, size, "%s", "");
    if (fits || all <= more)
        return compute_of(s, all);
    double a = compute_of(s, few), b = compute_of(s, more);
    snprintf(how, size, " (extrapolated from %d and %d of %d layers)", few, more, all);
    return a > 0 && b > 0 ? a + (b - a) / (more - few) * (all - few) : 0;
}

/* Copies one unit's bytes both ways, as often as a step does. */
static bool both_ways(const kn_unit *u, char *device_up, char *device_down, kn_stream *up,
                      kn_stream *down)
{
    bool ok = true;
    for (int i = 0; i < u->buckets; i++) {
        const kn_bucket *b = u->bucket[i];
        const kn_storage *sent = kn_bucket_gather_source(b);
        for (int k = 0; k < 2; k++)
            ok = ok && kn_transfer(up, device_up, sent->data, sent->bytes, KN_TO_DEVICE, true);
        ok = ok && (b->grad_shard->released || kn_transfer(down, b->grad_shard->data, device_down,
                                                           b->grad_shard->bytes, KN_TO_HOST, true));
    }
    return ok;
}

/* Overwrites the model's gradients. *bytes: of one step, up and down. */
static double transfer_alone(const sizes *s, kn_schedule_state *t, double bytes[2])
{
    size_t most = 0;
    for (int i = 0; i < t->units; i++)
        for (int k = 0; k < t->unit[i]->buckets; k++) {
            const kn_bucket *b = t->unit[i]->bucket[k];
            size_t sent = kn_bucket_gather_source(b)->bytes;
            bytes[0] += 2 * (double)sent;
            bytes[1] += (double)b->grad_shard->bytes;
            most = sent > most ? sent : most;
            most = b->grad_shard->bytes > most ? b->grad_shard->bytes : most;
        }
    kn_memory *m = kn_device_memory(KN_CUDA);
    char *there[2] = { kn_take(m, most, KN_MEM_WORKSPACE), kn_take(m, most, KN_MEM_WORKSPACE) };
    bool ok = there[0] && there[1] && device_is_done();
    double begin = kn_now();
    for (int64_t n = 0; ok && n < s->steps; n++)
        for (int i = 0; ok && i < t->units; i++)
            ok = both_ways(t->unit[i], there[0], there[1], t->lanes->upload, t->lanes->download);
    ok = ok && kn_stream_sync(t->lanes->upload) && kn_stream_sync(t->lanes->download);
    double spent = (kn_now() - begin) / (double)s->steps;
    for (int i = 0; i < 2; i++)
        kn_give(m, there[i], most, KN_MEM_WORKSPACE);
    return ok ? spent : 0;
}

/* ---- together -------------------------------------------------------------------------------- */

typedef struct result {
    double step, host, transfer, bytes[2];
    kn_fsdp_memory memory;
    int64_t peak; /* of the GPU's memory */
} result;

static bool measure(const sizes *s, result *r)
{
    kn_gpt g = { 0 };
    bool ok = make(&g, s, s->model.layers, true);
    kn_optim *opt = ok ? kn_adamw(&g, .lr = 1e-4, .weight_decay = 0.1) : NULL;
    double begin = 0;
    ok = opt != NULL;
    for (int64_t i = 0; ok && i < s->steps + 2; i++) {
        if (i == 2)
            begin = kn_now();
        ok = forward_backward(&g, s) && kn_step(opt);
    }
    r->step =
        (kn_now() - begin) / (double)s->steps; /* the step ends with the last gradient's update */
    ok = ok && forward_backward(&g, s) && device_is_done();
    begin = kn_now();
    ok = ok && kn_step(opt);
    r->host = kn_now() - begin;
    r->memory = kn_fsdp_predict(&g);
    r->peak = kn_ledger_read().peak_total;
    if (ok)
        r->transfer = transfer_alone(s, kn_schedule_of(kn_unit_of(g.base.impl)), r->bytes);
    kn_optim_free(opt);
    kn_module_free(&g);
    return ok && r->transfer > 0;
}

static void report(const sizes *s, const result *r, double compute, const char *how,
                   int64_t elements)
{
    double longest = compute > r->transfer ? compute : r->transfer, gb = 1e-9;
    printf("%s, %d layers, %.0f M parameters, %s, batch %lld x %lld\n", s->name, s->model.layers,
           1e-6 * (double)elements, kn_dtype_name(s->dtype), (long long)s->batch,
           (long long)s->ctx);
    printf("  on the host  %.2f GB of parameters, gradients and AdamW's; peak on the GPU %.2f GB\n",
           gb * (double)r->memory.pinned, gb * (double)r->peak);
    printf("  compute      %9.2f ms alone%s\n", 1e3 * compute, how);
    printf("  transfer     %9.2f ms alone: %.2f GB up, %.2f GB down, %.1f GB/s\n",
           1e3 * r->transfer, gb * r->bytes[0], gb * r->bytes[1],
           gb * (r->bytes[0] + r->bytes[1]) / r->transfer);
    printf("  host's step  %9.2f ms alone, on %d threads: %.1f GB/s\n", 1e3 * r->host, kn_threads(),
           gb * 28 * (double)elements / r->host);
    printf(
        "  step         %9.2f ms: %.3f x max(compute, transfer), %.3f x the longest of the three\n",
        1e3 * r->step, r->step / longest, r->step / (longest > r->host ? longest : r->host));
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "A step of GPT-2 offloaded to the host, beside the longest of its parts.\n"
               "  bench_offload [--model gpt2|gpt2-medium|gpt2-large|gpt2-xl] [--layers N] "
               "[--batch N] [--ctx N]"
               "\n    [--dtype f32|bf16] [--steps N] [--embd N] [--threads N]",
               0);
    kn_init(&argc, &argv);
    sizes s = { .name = word(argc, argv, "--model", "gpt2-large") };
    if (!kn_ok() || !kn_gpt_preset(s.name, &s.model) || !kn_device_memory(KN_CUDA))
        return kn_finish();
    s.batch = number(argc, argv, "--batch", 8);
    s.ctx = number(argc, argv, "--ctx", 1024);
    s.steps = number(argc, argv, "--steps", 10);
    s.dtype = kn_dtype_parse(word(argc, argv, "--dtype", "bf16"));
    int layers = (int)number(argc, argv, "--layers", 0),
        embd = (int)number(argc, argv, "--embd", 0);
    s.model.layers = layers > 0 ? layers : s.model.layers;
    s.model.embd = embd > 0 ? embd : s.model.embd;
    result r = { 0 };
    char how[96];
    printf("device: %s\n", kn_cuda_describe());
    if (measure(&s, &r)) {
        int64_t elements = (int64_t)(r.memory.optim / 8);
        double compute = compute_alone(&s, elements, how, sizeof how);
        if (compute > 0)
            report(&s, &r, compute, how, elements);
    }
    return kn_finish();
}
