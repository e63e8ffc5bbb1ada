/* bench/predict.c: predicts a training step of GPT-2 on a GPU that isn't there. One step runs on
 * the meta device (no bytes, no data); its trace has the operations and bytes of every kernel,
 * which the rates of a GPU's data sheet turn into seconds, as a roofline:
 *
 *   a call takes LAUNCH + max(operations / (their rate x share), bytes / (bandwidth x share))
 *
 * Beside it stands a measured step, where a file of bench/gpt2.c's output has one; a row that
 * differs from it by more than a factor of 1.5 is marked. */
#include "bench/kernel_rows.h"
#include "knap.h"

#include <math.h>
#include <stdlib.h>

/* One GPU by NVIDIA's data sheet: dense products (the sheets give twice that, for sparse ones) and
 * operations of the CUDA cores in TFLOP/s, memory in TB/s and GB. */
typedef struct gpu {
    const char *name;
    double bf16, tf32, f32, bandwidth, memory;
    const char *source;
} gpu;

static const gpu gpus[] = {
    { "A100", 312, 156, 19.5, 2.039, 80, "A100 data sheet, 80GB SXM" },
    { "H100", 989.4, 494.7, 66.9, 3.35, 80, "H100 data sheet, SXM5 80GB" },
    { "H200", 989.4, 494.7, 66.9, 4.8, 141, "H200 data sheet, SXM 141GB" },
    { "B200", 2250, 1125, 75, 8, 180, "DGX B200 data sheet, an eighth of the machine" },
};

/* Shares of these rates that kernels reach.
 *
 * PRODUCTS: the best shapes of cuBLAS reach 0.87 on an A100, 0.80 on an H100 and 0.78 on a B200
 * (the table of measured matmul rates in github.com/stas00/ml-engineering, compute/accelerator);
 * GPT-2's are a little worse, since their last tiles aren't full. Rows are supposed to begin at
 * multiples of 16 bytes, as those of 50,257 logits do in kn_linear_cross_entropy.
 * ATTENTION: cuDNN on an H100 at 1,024 tokens and heads of 64 reaches 373 TFLOP/s forward and 348
 * backward without a mask (FlashAttention-3, arXiv:2407.08608, figures 5 and 6); of tiles of 128 on
 * the causal diagonal half is wasted, a ninth of all: 0.32 of 989.
 * ATTENTION_F32: a guess, of the kernel that multiplies on the CUDA cores.
 * MEMORY: copies reach about 0.9 of the sheet's bandwidth; kernels that also reduce, or are too
 * short to fill the GPU, less. The 0.85 is a guess.
 * LAUNCH: seconds from one queued kernel's end to the next one's full speed. A guess, too: 1 us
 * between kernels of a stream and 1.5 us until all multiprocessors have work and after the first
 * has none. */
#define PRODUCTS      0.75
#define ATTENTION     0.32
#define ATTENTION_F32 0.25
#define MEMORY        0.85
#define LAUNCH        2.5e-6
#define OFF           1.5
#define BESIDES       2e9 /* bytes of GPU memory that aren't Knap's, as bench/gpt2.c allows */

/* In the first words of every line, so that no line of it is ever quoted as a measurement. */
#define P "predicted  "

typedef struct settings {
    int gpu, dtype;
    const char *model, *measured;
    int64_t batch, ctx;
} settings;

static const char *const dtypes[] = { "bf16", "tf32" };

/* A step that bench/gpt2.c measured. */
typedef struct measured {
    int64_t batch;
    double seconds;
    kernel_rows rows;
} measured;

typedef struct prediction {
    kernel_rows rows;
    double calls, flops, products, bytes, seconds, memory;
} prediction;

/* ---- the measured step ----------------------------------------------------------------------- */

/* Reads the steps of this model, dtype and context on one rank, by themselves: not as a graph, not
 * recomputed. Takes the given batch's, or the fastest. */
static bool read_measured(const settings *s, measured *m)
{
    FILE *f = fopen(s->measured, "r");
    char line[4096], form[128];
    bool here = false;
    kernel_row r;
    if (!f)
        return kn_fail("predict: --measured %s: no such file", s->measured);
    snprintf(form, sizeof form, "%s %s, batch %%lld x %lld, 1 rank: %%lf ms a step", s->model,
             dtypes[s->dtype], (long long)s->ctx);
    while (fgets(line, sizeof line, f)) {
        long long batch;
        double ms;
        if (sscanf(line, form, &batch, &ms) == 2 && batch > 0 && ms > 0) {
            here = s->batch ? batch == s->batch
                            : !m->batch || ms / (double)batch < 1e3 * m->seconds / (double)m->batch;
            if (here)
                *m = (measured){ .batch = batch, .seconds = ms / 1e3 };
        } else if (strncmp(line, s->model, strlen(s->model)) == 0 || strncmp(line, "--", 2) == 0) {
            here = false;
        } else if (here && m->rows.count < KERNEL_ROWS && kernel_row_scan(line, &r)) {
            m->rows.row[m->rows.count++] = r;
        }
    }
    fclose(f);
    return true;
}

/* ---- the predicted step ---------------------------------------------------------------------- */

static double seconds_of(const settings *s, const kn_trace_event *e)
{
    const gpu *g = &gpus[s->gpu];
    bool f32 = s->dtype == 1;
    double rate = g->f32;
    if (is_product(e->what))
        rate = (f32 ? g->tf32 : g->bf16) * PRODUCTS;
    else if (is_attention(e->what))
        rate = f32 ? g->f32 * ATTENTION_F32 : g->bf16 * ATTENTION;
    return LAUNCH + fmax(e->flops / (rate * 1e12), e->bytes / (g->bandwidth * 1e12 * MEMORY));
}

/* The second step: it is as all that follow, while the first one also makes AdamW's state. */
static bool trace_step(const settings *s, const kn_gpt_config *config, kn_trace_event **events,
                       size_t *count, double *memory)
{
    kn_gpt net = { 0 };
    kn_dtype dtype = s->dtype == 0 ? KN_BF16 : KN_DTYPE_DEFAULT;
    kn_optim *opt = NULL;
    kn_ledger_reset_peaks();
    bool ok = kn_gpt_init(&net, *config, KN_F32, KN_META) &&
              kn_fsdp_wrap(&net, kn_world(), .wrap_class = "gpt_block", .device = KN_META,
                           .param_dtype = dtype) &&
              (opt = kn_adamw(&net, .lr = 1e-4, .weight_decay = 0.1));
    for (int i = 0; i < 2 && ok; i++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *ids = kn_empty(KN_I64, KN_META, KN_SHAPE(s->batch, s->ctx));
        kn_trace_start(100000);
        kn_backward(kn_gpt_loss(&net, ids, ids));
        kn_clip_grad_norm(&net, 1.0);
        ok = kn_step(opt);
        kn_scope_end(scope);
    }
    *memory = (double)kn_ledger_read().peak_total;
    *count = kn_trace_stop(ok ? events : NULL);
    kn_optim_free(opt);
    kn_module_free(&net);
    return ok && kn_ok();
}

static bool predict(const settings *s, const kn_gpt_config *config, prediction *p)
{
    kn_trace_event *events = NULL;
    size_t count = 0;
    *p = (prediction){ .calls = 0 };
    if (!trace_step(s, config, &events, &count, &p->memory))
        return false;
    for (size_t i = 0; i < count; i++) {
        const kn_trace_event *e = &events[i];
        if (strcmp(e->provider, "meta") != 0 && strcmp(e->what, "clip") != 0)
            continue; /* the host's; meta's norms lie there, so the clipping is computed there */
        double seconds = seconds_of(s, e);
        kernel_rows_add(&p->rows, e, seconds);
        p->calls++;
        p->seconds += seconds;
        p->flops += e->flops;
        p->products += is_product(e->what) || is_attention(e->what) ? e->flops : 0;
        p->bytes += e->bytes;
    }
    kn_host_free(events);
    return true;
}

static bool fits(const settings *s, const prediction *p)
{
    return p->memory + BESIDES <= gpus[s->gpu].memory * 1e9;
}

/* ---- output ---------------------------------------------------------------------------------- */

static int by_seconds(const void *a, const void *b)
{
    const kernel_row *x = a, *y = b;
    return x->seconds > y->seconds ? -1 : x->seconds < y->seconds;
}

/* The measured part of a line. */
static void print_beside(double predicted, double seconds, const char *provider)
{
    double ratio = seconds / predicted;
    printf("  %9.3f %6.2f%s%s%s", 1e3 * seconds, ratio, *provider ? "  " : "", provider,
           ratio > OFF || ratio < 1 / OFF ? "  OFF" : "");
}

static void print_head(const settings *s, const measured *m)
{
    const gpu *g = &gpus[s->gpu];
    bool f32 = s->dtype == 1;
    printf(P "a step of %s %s, batch %lld x %lld, on one %s, from a trace on the meta device\n",
           s->model, dtypes[s->dtype], (long long)s->batch, (long long)s->ctx, g->name);
    printf(P "from NVIDIA's %s: %g TFLOP/s of dense %s, %g TB/s\n", g->source,
           f32 ? g->tf32 : g->bf16, dtypes[s->dtype], g->bandwidth);
    printf(P
           "if products reach %.2f and attention %.2f of that%s, the rest %.2f of the bandwidth, a "
           "launch costs %.1f us\n",
           PRODUCTS, f32 ? ATTENTION_F32 : ATTENTION,
           f32 ? " (attention: of the CUDA cores' rate)" : "", MEMORY, 1e6 * LAUNCH);
    printf(P "%-30s %6s %10s %9s %9s %6s", "kernel", "calls", "GFLOP", "GB", "ms", "%");
    if (m->batch)
        printf("  %9s %6s  by", "measured", "ratio");
    printf("\n");
}

static void print_rows(prediction *p, measured *m)
{
    qsort(p->rows.row, (size_t)p->rows.count, sizeof *p->rows.row, by_seconds);
    for (int i = 0; i < p->rows.count; i++) {
        const kernel_row *r = &p->rows.row[i];
        const kernel_row *beside = kernel_rows_find(&m->rows, r->name);
        printf(P "%-30s %6g %10.1f %9.3f %9.3f %6.1f", r->name, r->calls, r->flops / 1e9,
               r->bytes / 1e9, 1e3 * r->seconds, 100 * r->seconds / p->seconds);
        if (beside)
            print_beside(r->seconds, beside->seconds, beside->provider);
        printf("\n");
    }
    for (int i = 0; i < m->rows.count; i++) {
        const kernel_row *r = &m->rows.row[i];
        if (!kernel_rows_find(&p->rows, r->name))
            printf(P "%-30s %6s %10s %9s %9s %6s  %9.3f %6s  %s  OFF\n", r->name, "-", "-", "-",
                   "-", "-", 1e3 * r->seconds, "-", r->provider);
    }
}

static void print_sums(const settings *s, const kn_gpt_config *config, const prediction *p,
                       const measured *m)
{
    const gpu *g = &gpus[s->gpu];
    double tokens = (double)(s->batch * s->ctx), peak = s->dtype == 1 ? g->tf32 : g->bf16;
    double flops = tokens * kn_gpt_flops_per_token(config, s->ctx);
    printf(P "%-30s %6g %10.1f %9.3f %9.3f %6.1f", "in all", p->calls, p->flops / 1e9,
           p->bytes / 1e9, 1e3 * p->seconds, 100.0);
    if (m->batch)
        print_beside(p->seconds, m->seconds, "");
    printf("\n" P "%.0f tokens/s, MFU %.1f %%, at the peak %.1f GB of %g%s\n", tokens / p->seconds,
           100 * flops / (p->seconds * peak * 1e12), p->memory / 1e9, g->memory,
           fits(s, p) ? "" : ": it does NOT fit");
    printf(P "products and attention: %.3f TFLOP, by kn_gpt_flops_per_token %.3f (%+.1f %%)\n",
           p->products / 1e12, flops / 1e12, 100 * (p->products / flops - 1));
    if (!m->batch)
        printf(P "nothing measured stands beside it: %s%s\n",
               s->measured ? "no such step in " : "no results of this GPU were given",
               s->measured ? s->measured : "");
}

static const kn_option options[] = {
    { "device", KN_OPTION_CHOICE, offsetof(settings, gpu), "H200", "the GPU",
      .choices = "A100|H100|H200|B200" },
    { "model", KN_OPTION_STRING, offsetof(settings, model), "gpt2",
      "gpt2, gpt2-medium, gpt2-large or gpt2-xl" },
    { "batch", KN_OPTION_INT, offsetof(settings, batch), NULL, "rows of a step", .max = 1e6,
      .note = "the fastest measured one's, else the most up to 64 that fit" },
    { "ctx", KN_OPTION_INT, offsetof(settings, ctx), "1024", "tokens of a row", .min = 1,
      .max = 1024 },
    { "dtype", KN_OPTION_CHOICE, offsetof(settings, dtype), "bf16", "of products",
      .choices = "bf16|tf32" },
    { "measured", KN_OPTION_PATH, offsetof(settings, measured), NULL,
      "a file with bench_gpt2's output, to print beside it" },
    { 0 },
};

int main(int argc, char **argv)
{
    kn_init(&argc, &argv);
    settings s = { 0 };
    kn_gpt_config config;
    static measured m;
    static prediction p;
    kn_options *o = kn_options_main(
        options, &s, argc, argv, "Predicts a training step of GPT-2 on a GPU, kernel by kernel.");
    if (o && kn_comm_size(kn_world()) > 1)
        kn_fail("bench_predict: a step of one rank is predicted; leave --ranks away");
    if (o && kn_ok() && kn_gpt_preset(s.model, &config) && (!s.measured || read_measured(&s, &m))) {
        bool chosen = s.batch == 0 && m.batch == 0;
        s.batch = chosen ? 64 : s.batch ? s.batch : m.batch;
        bool ok = predict(&s, &config, &p);
        while (ok && chosen && !fits(&s, &p) && s.batch > 1) {
            s.batch /= 2;
            ok = predict(&s, &config, &p);
        }
        if (ok) {
            print_head(&s, &m);
            print_rows(&p, &m);
            print_sums(&s, &config, &p, &m);
        }
    }
    kn_options_free(o);
    return kn_finish();
}
