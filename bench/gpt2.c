/* bench/gpt2.c: tokens/s of training GPT-2 (forward, backward, clipping, AdamW; masters in f32) on
 * one rank or several, and MFU: kn_gpt_flops_per_token over the peak of the device's data sheet.
 *
 *   gpt2 [--device cpu|cuda] [--model gpt2|gpt2-medium|gpt2-large|gpt2-xl] [--batch N] [--ctx N]
 *   [--dtype f32|bf16]
 *        [--steps N] [--layers N] [--peak TFLOPS] [--goal TOKENS] [--offload PATH] [--recompute]
 *        [--graph] [--sweep] [--overhead] [--expect KERNEL=PROVIDER,...] [--ranks N]
 *
 * --graph: records and replays steps (kn_replay_step), or prints the reason against it. --overhead:
 * f32; also runs the model without kn_fsdp_wrap and prints the cost of wrapping on one rank.
 * --sweep: doubles --batch until the memory is full, then prints the fastest. --expect: in the
 * traced steps each of these kernels runs, and only in that provider; else the exit status is 1.
 * --offload: masters, gradients and AdamW's state on the host ("memory", or a folder).
 *
 * Prints a line for each: the speed; memory by category beside kn_fsdp_predict (exit status 1 if
 * they differ), and what else the GPU holds, which depends on its libraries; for three more, traced
 * steps how long each stream was busy and the device idle, how much of the collectives' time ran
 * beside kernels, and, on one rank, each kernel's calls and time, which bench/predict.c prints
 * beside its own. */
#include "bench/args.h"
#include "bench/kernel_rows.h"
#include "knap.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of GPU memory besides Knap's that are no surprise: the context with its code, the modules
 * that libraries load, NCCL's buffers, and those of its sends and receives to each other rank. More
 * is said, but no failure. */
#define BESIDES        2e9
#define BESIDES_A_RANK 0.5e9

typedef struct sizes {
    kn_device device;
    kn_gpt_config model;
    const char *name;
    int64_t batch, ctx, steps;
    kn_dtype dtype;
    bool recompute, graph;
    double peak, goal;
    const char *offload, *expect;
} sizes;

#define TRACED 3 /* steps */

/* The data of a step: tensors at fixed addresses, as a recorded step needs them. */
typedef struct work {
    const sizes *sizes;
    kn_gpt model;
    kn_optim *opt;
    kn_tensor *x, *y;
    kn_replay *replay; /* NULL: steps aren't recorded */
    int64_t *ids;
} work;

/* The measurements of a run. */
typedef struct result {
    double seconds; /* a step; 0: it failed */
    bool wrapped;
    kn_fsdp_memory formula;
    kn_ledger ledger;
    kn_cuda_memory_stats pool;
    kn_trace_event *events; /* of TRACED further steps */
    size_t count;
    double begin, end; /* of the device's work in them */
} result;

static bool whole_step(void *arg)
{
    work *w = arg;
    kn_backward(kn_gpt_loss(&w->model, w->x, w->y));
    kn_clip_grad_norm(&w->model, 1.0);
    return kn_step(w->opt);
}

static bool step(work *w, int64_t at)
{
    const sizes *s = w->sizes;
    int64_t n = s->batch * s->ctx;
    for (int64_t i = 0; i < 2 * n; i++)
        w->ids[i] = (i % n * 7919 + at * 104729 + (i >= n)) % s->model.vocab;
    kn_scope scope = kn_scope_begin();
    bool ok = kn_copy_(w->x, kn_from(KN_I64, KN_CPU, w->ids, KN_SHAPE(s->batch, s->ctx))) &&
              kn_copy_(w->y, kn_from(KN_I64, KN_CPU, w->ids + n, KN_SHAPE(s->batch, s->ctx))) &&
              (w->replay ? kn_replay_step(w->replay, whole_step, w) : whole_step(w));
    kn_scope_end(scope);
    return ok && kn_ok();
}

static bool work_begin(work *w, kn_comm *world, bool wrap)
{
    const sizes *s = w->sizes;
    kn_dtype dtype = s->dtype == KN_F32 ? KN_DTYPE_DEFAULT : s->dtype;
    w->ids = malloc((size_t)(2 * s->batch * s->ctx) * sizeof *w->ids);
    if (!w->ids || !kn_gpt_init(&w->model, s->model, KN_F32, KN_META))
        return false;
    kn_gpt_recompute(&w->model, s->recompute);
    kn_scope scope = kn_scope_begin();
    w->x = kn_keep(kn_empty(KN_I64, s->device, KN_SHAPE(s->batch, s->ctx)));
    w->y = kn_keep(kn_empty(KN_I64, s->device, KN_SHAPE(s->batch, s->ctx)));
    kn_scope_end(scope);
    return (wrap ? kn_fsdp_wrap(&w->model, world, .wrap_class = "gpt_block", .device = s->device,
                                .param_dtype = dtype, .offload_dir = s->offload)
                 : kn_materialize(&w->model, s->device, 1337)) &&
           (w->opt = kn_adamw(&w->model, .lr = 1e-4, .weight_decay = 0.1)) &&
           (!s->graph || (w->replay = kn_replay_new(&w->model)));
}

static void work_end(work *w)
{
    kn_replay_free(w->replay);
    kn_tensor_free(w->x);
    kn_tensor_free(w->y);
    kn_optim_free(w->opt);
    kn_module_free(&w->model);
    free(w->ids);
}

/* False for waits of the host. */
static bool on_device(const kn_trace_event *e)
{
    return e->stream && strcmp(e->provider, "host") != 0;
}

/* Runs TRACED traced steps. */
static bool traced(work *w, result *r)
{
    bool ok = true;
    kn_trace_start(100000);
    for (int i = 0; i < TRACED && ok; i++)
        ok = step(w, w->sizes->steps + 3 + i);
    ok = ok && kn_stream_sync(kn_compute_stream(w->sizes->device));
    r->count = kn_trace_stop(&r->events);
    r->begin = INFINITY;
    for (size_t i = 0; i < r->count; i++)
        if (on_device(&r->events[i])) {
            r->begin = fmin(r->begin, r->events[i].begin);
            r->end = fmax(r->end, r->events[i].end);
        }
    return ok;
}

/* The first three steps are not timed. */
static result measure(const sizes *s, kn_comm *world, bool wrap)
{
    result r = { .wrapped = wrap };
    work w = { .sizes = s };
    double begin = 0;
    kn_ledger_reset_peaks();
    bool ok = work_begin(&w, world, wrap);
    for (int64_t i = 0; ok && i < s->steps + 3; i++) {
        ok = i != 3 || kn_stream_sync(kn_compute_stream(s->device));
        if (i == 3)
            begin = kn_now();
        ok = ok && step(&w, i);
    }
    ok = ok && kn_stream_sync(kn_compute_stream(s->device));
    if (ok)
        r.seconds = (kn_now() - begin) / (double)s->steps;
    r.ledger = kn_ledger_read();
    r.pool = kn_cuda_memory_read();
    if (ok && wrap)
        r.formula = kn_fsdp_predict(&w.model);
    if (ok && !traced(&w, &r))
        r.seconds = 0;
    if (kn_replay_why(w.replay) && kn_rank(world) == 0)
        printf("steps aren't recorded as a graph: %s\n", kn_replay_why(w.replay));
    work_end(&w);
    return r;
}

/* ---- output ---------------------------------------------------------------------------------- */

/* Of products' factors: those of f32 may be rounded. */
static const char *dtype_name(const sizes *s)
{
    const kn_products p = s->dtype == KN_F32 ? kn_f32_products(s->device) : KN_PRODUCTS_EXACT;
    return p ? kn_products_name(p) : kn_dtype_name(s->dtype);
}

static void print_speed(const sizes *s, int ranks, const char *what, const result *r)
{
    double tokens = (double)(s->batch * s->ctx) * ranks / r->seconds;
    double flops = tokens * kn_gpt_flops_per_token(&s->model, s->ctx);
    char mfu[32] = "n/a";
    if (s->peak > 0)
        snprintf(mfu, sizeof mfu, "%.1f %%", 100 * flops / (s->peak * 1e12 * ranks));
    printf("%s%s%s %s, batch %lld x %lld, %d rank%s: %.2f ms a step, %.0f tokens/s, %.2f TFLOP/s, "
           "MFU %s, peak %.2f GB\n",
           s->name, what, s->recompute ? ", recomputed," : "", dtype_name(s), (long long)s->batch,
           (long long)s->ctx, ranks, ranks == 1 ? "" : "s", 1e3 * r->seconds, tokens, flops / 1e12,
           mfu, (double)r->ledger.peak_total / 1e9);
    if (s->goal > 0 && r->wrapped)
        printf("goal %.0f tokens/s: %s, %.1f %% of it\n", s->goal,
               tokens >= s->goal ? "reached" : "MISSED", 100 * tokens / s->goal);
    fflush(stdout);
}

/* Peaks of the ledger beside the formula; false if they differ. */
static bool print_memory(const sizes *s, const result *r, int ranks)
{
    const kn_fsdp_memory *f = &r->formula;
    const struct {
        kn_mem_category category;
        int64_t formula;
    } line[] = { { KN_MEM_PARAM, f->param },
                 { KN_MEM_GRAD, f->grad },
                 { KN_MEM_OPTIM, f->optim },
                 { KN_MEM_GATHERED, f->gathered },
                 { KN_MEM_UNREDUCED, f->unreduced } };
    int64_t sum = 0;
    bool same = true;
    printf("memory, ledger and formula:");
    for (size_t i = 0; i < sizeof line / sizeof *line; i++) {
        int64_t have = r->ledger.peak[line[i].category];
        same = same && have == line[i].formula;
        sum += line[i].formula;
        printf(" %s %lld %s %lld,", kn_mem_name(line[i].category), (long long)have,
               have == line[i].formula ? "=" : "IS NOT", (long long)line[i].formula);
    }
    printf(" in all %.3f GB of %.3f GB at the peak", (double)(sum - f->pinned) / 1e9,
           (double)r->ledger.peak_total / 1e9);
    if (s->device == KN_CUDA) {
        const kn_cuda_memory_stats *p = &r->pool;
        double rest = (double)(p->device_total - p->device_free - p->reserved) / 1e9;
        double usual = (BESIDES + BESIDES_A_RANK * (ranks - 1)) / 1e9;
        printf("; %.3f GB from the driver, %.3f GB besides (contexts, libraries, NCCL's channels: "
               "%s %.1f)",
               (double)p->peak_reserved / 1e9, rest,
               rest > usual ? "MORE THAN THE USUAL" : "at most", usual);
    }
    printf("\n");
    return same;
}

static int by_begin(const void *a, const void *b)
{
    const kn_trace_event *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

static bool is_collective(const kn_trace_event *e)
{
    return strcmp(e->provider, "nccl") == 0 || strcmp(e->provider, "staged") == 0;
}

typedef enum work_kind { ANY, COLLECTIVES, KERNELS } work_kind;

/* Seconds in which the stream (NULL: any) was busy with such work; events are sorted by their
 * begin. */
static double busy(const result *r, const char *stream, work_kind kind)
{
    double sum = 0, until = r->begin;
    for (size_t i = 0; i < r->count; i++) {
        const kn_trace_event *e = &r->events[i];
        if (!e->stream || strcmp(e->provider, "host") == 0 ||
            (stream && strcmp(stream, e->stream) != 0) ||
            (kind != ANY && is_collective(e) != (kind == COLLECTIVES)))
            continue;
        double from = e->begin > until ? e->begin : until;
        if (e->end > from) {
            sum += e->end - from;
            until = e->end;
        }
    }
    return sum;
}

static void print_trace(const result *r)
{
    double span = r->end - r->begin, longest = 0;
    const char *seen[16];
    int n = 0;
    qsort(r->events, r->count, sizeof *r->events, by_begin);
    printf("traced, %.2f ms a step:", 1e3 * span / TRACED);
    for (size_t i = 0; i < r->count; i++) {
        const char *stream = r->events[i].stream;
        bool is_new = on_device(&r->events[i]) && n < 16;
        for (int k = 0; k < n && is_new; k++)
            is_new = strcmp(seen[k], stream) != 0;
        if (!is_new)
            continue;
        seen[n++] = stream;
        double time = busy(r, stream, ANY);
        longest = time > longest ? time : longest;
        printf(" %s busy %.2f ms,", stream, 1e3 * time / TRACED);
    }
    const double all = busy(r, NULL, ANY), collectives = busy(r, NULL, COLLECTIVES);
    printf(" the device idle %.1f %%; step over its longest stream %.3f\n", 100 * (1 - all / span),
           longest > 0 ? span / longest : 0);
    if (collectives > 0)
        printf("collectives %.2f ms a step, %.1f %% of it beside kernels\n",
               1e3 * collectives / TRACED,
               100 * (collectives + busy(r, NULL, KERNELS) - all) / collectives);
}

/* Each kernel's part of a step. */
static void print_kernels(const result *r)
{
    kernel_rows t = { .count = 0 };
    for (size_t i = 0; i < r->count; i++)
        if (on_device(&r->events[i]))
            kernel_rows_add(&t, &r->events[i], r->events[i].end - r->events[i].begin);
    for (int i = 0; i < t.count; i++)
        kernel_row_print(&t.row[i], TRACED);
}

/* Names each kernel of --expect that another provider ran, or none. */
static bool print_unexpected(const sizes *s, const result *r)
{
    bool well = true;
    for (const char *at = s->expect, *next; at && *at; at = *next ? next + 1 : next) {
        next = at + strcspn(at, ",");
        const char *provider = at + strcspn(at, "=,");
        int name = (int)(provider - at), want = (int)(next - provider) - 1, runs = 0;
        const char *other = NULL;
        for (size_t i = 0; i < r->count; i++) {
            const kn_trace_event *e = &r->events[i];
            if ((int)strlen(e->what) != name || strncmp(e->what, at, (size_t)name) != 0)
                continue;
            runs++;
            if ((int)strlen(e->provider) != want ||
                strncmp(e->provider, provider + 1, (size_t)want))
                other = e->provider;
        }
        if (runs == 0 || other)
            printf("%.*s ran %s%s, NOT %s %.*s\n", name, at, other ? "in " : "nowhere",
                   other ? other : "", other ? "only in" : "in", want, provider + 1);
        well = well && runs > 0 && !other;
    }
    return well;
}

/* ---- modes ----------------------------------------------------------------------------------- */

static bool one(const sizes *s, kn_comm *world, bool overhead)
{
    bool first = kn_rank(world) == 0, same = true;
    result alone = { 0 }, r;
    if (overhead) {
        alone = measure(s, world, false);
        if (alone.seconds > 0 && first)
            print_speed(s, 1, ", not wrapped,", &alone);
    }
    r = measure(s, world, true);
    if (r.seconds > 0 && first) {
        print_speed(s, kn_comm_size(world),
                    s->offload ? ", offloaded,"
                    : s->graph ? ", as a graph,"
                               : "",
                    &r);
        same = print_memory(s, &r, kn_comm_size(world));
        print_trace(&r);
        if (kn_comm_size(world) == 1)
            print_kernels(&r);
        same = print_unexpected(s, &r) && same;
        if (alone.seconds > 0)
            printf("wrapping costs %.2f %% on one rank\n", 100 * (r.seconds / alone.seconds - 1));
    }
    kn_host_free(alone.events);
    kn_host_free(r.events);
    return same;
}

/* Doubles the batch until memory runs out, which is no error here. */
static bool sweep(sizes s, kn_comm *world)
{
    bool same = true;
    int64_t fits = 0, best = 0;
    double most = 0;
    for (;; s.batch *= 2) {
        result r = measure(&s, world, true);
        double tokens = r.seconds > 0 ? (double)(s.batch * s.ctx) / r.seconds : 0;
        if (r.seconds > 0) {
            print_speed(&s, kn_comm_size(world), "", &r);
            same = print_memory(&s, &r, kn_comm_size(world)) && same;
            print_trace(&r);
            print_kernels(&r);
            same = print_unexpected(&s, &r) && same;
            fits = s.batch;
        }
        kn_host_free(r.events);
        if (tokens > most) {
            most = tokens;
            best = s.batch;
        }
        if (r.seconds <= 0 || (double)s.batch * (double)s.ctx > 1e6)
            break;
    }
    if (!kn_ok() && fits > 0 && strstr(kn_error(), "memory")) {
        printf("batch %lld does not fit: %s\n", (long long)s.batch, kn_error());
        kn_clear_error();
    }
    if (fits > 0)
        printf("largest batch that fits %lld, fastest %lld: %.0f tokens/s\n", (long long)fits,
               (long long)best, most);
    return same;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Tokens/s of training GPT-2.\n"
               "  bench_gpt2 [--device cpu|cuda] [--model gpt2|gpt2-medium|gpt2-large|gpt2-xl] "
               "[--batch N] [--ctx N]"
               "\n    [--dtype f32|bf16] [--steps N] [--layers N] [--peak TFLOPS] [--goal TOKENS] "
               "[--offload PATH]"
               "\n    [--recompute] [--graph] [--sweep] [--overhead] [--expect "
               "KERNEL=PROVIDER,...] [--ranks N]"
               "\n    [--threads N]",
               0);
    kn_comm *world = kn_init(&argc, &argv);
    bool overhead = flag(argc, argv, "--overhead");
    sizes s = { .name = word(argc, argv, "--model", "gpt2") };
    s.device = strcmp(word(argc, argv, "--device", "cuda"), "cuda") == 0 ? KN_CUDA : KN_CPU;
    s.batch = number(argc, argv, "--batch", 8);
    s.steps = number(argc, argv, "--steps", 20);
    s.peak = real(argc, argv, "--peak", 0);
    s.goal = real(argc, argv, "--goal", 0);
    s.offload = word(argc, argv, "--offload", NULL);
    s.expect = word(argc, argv, "--expect", NULL);
    s.recompute = flag(argc, argv, "--recompute");
    s.graph = flag(argc, argv, "--graph");
    s.dtype = overhead ? KN_F32 : kn_dtype_parse(word(argc, argv, "--dtype", "bf16"));
    if (!kn_ok() || !kn_gpt_preset(s.name, &s.model) || !kn_device_memory(s.device))
        return kn_finish();
    s.ctx = number(argc, argv, "--ctx", 1024);
    s.model.layers = (int)number(argc, argv, "--layers", s.model.layers);
    if (kn_rank(world) == 0 && s.device == KN_CUDA)
        printf("device: %s\n", kn_cuda_describe());
    bool same = flag(argc, argv, "--sweep") && kn_comm_size(world) == 1 ? sweep(s, world)
                                                                        : one(&s, world, overhead);
    if (kn_rank(world) == 0 && s.device == KN_CUDA)
        printf("algorithms: %s\n", kn_cuda_choices() ? kn_cuda_choices() : "none of cuBLASLt's");
    int status = kn_finish();
    return status ? status : !same;
}
