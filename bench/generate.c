/* bench/generate.c: tokens/s of generation, one text with a cache of keys and values, beside this
 * machine's copy bandwidth, which is measured in turn with it. A token's work is to read the
 * weights and the cache, so the share of the bandwidth is the bytes of both times tokens/s over the
 * bytes that a copy reads and writes a second.
 *
 *   generate [--model gpt2|llama] [--dtype f32|bf16] [--tokens N] [--most N] [--kernels]
 *     [--processor] [--threads N]
 *
 * GPT-2 124M and a Llama of the same sizes (stories110m), random weights, contexts of 128, 1,024
 * and 4,096 tokens (--most leaves out longer ones). The fastest token and the fastest copy count.
 * --kernels: a line a kernel of a token, too. --processor: times are the processor's, of all
 * threads, on a machine that runs other programs, too: with --threads 1. */
#include "bench/args.h"
#include "bench/kernel_rows.h"
#include "kernels/kernels.h"
#include "knap.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CONTEXTS = 3, COPY_BYTES = 128 << 20 };
static const int64_t contexts[CONTEXTS] = { 128, 1024, 4096 };

/* A model in use. */
typedef struct subject {
    kn_module model;
    kn_logits_fn next;
    const char *name;
    kn_dtype dtype;
    int64_t vocab;
    double weights;    /* bytes that a token reads of them */
    double a_position; /* bytes of a position's keys and values */
    kn_cache *cache;
} subject;

static bool processor; /* --processor */

static double seconds(void)
{
    struct timespec t;
    if (!processor)
        return kn_now();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Bytes a second that a copy reads and writes. */
static double copy_rate(void)
{
    static kn_tensor *from, *to;
    if (!from) {
        from = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(COPY_BYTES / 4));
        to = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(COPY_BYTES / 4));
    }
    const double t = seconds();
    kn_copy_(to, from);
    return 2.0 * COPY_BYTES / (seconds() - t);
}

static kn_tensor *gpt_next(void *m, kn_tensor *ids)
{
    return kn_gpt_next_logits(m, ids);
}

static kn_tensor *llama_next(void *m, kn_tensor *ids)
{
    return kn_llama_next_logits(m, ids);
}

/* All but the positions' rows, which are looked up, and in Llama the embedding. */
static double bytes_read(void *model)
{
    const kn_param *p;
    double bytes = 0;
    for (int64_t i = 0, n = kn_params(model, &p); i < n; i++)
        if (!strstr(p[i].name, "wpe"))
            bytes +=
                (double)kn_numel(p[i].tensor) * (double)kn_dtype_size(kn_dtype_of(p[i].tensor));
    return bytes;
}

static bool begin(subject *s, kn_comm *world, const char *name, kn_dtype dtype)
{
    *s = (subject){ .name = name, .dtype = dtype };
    kn_gpt_config g;
    kn_llama_config l;
    bool ok;
    if (strcmp(name, "gpt2") == 0) {
        ok = kn_gpt_preset("gpt2", &g);
        g.ctx = contexts[CONTEXTS - 1];
        ok = ok && kn_gpt_init((kn_gpt *)&s->model, g, dtype, KN_META);
        s->next = gpt_next, s->vocab = g.vocab, s->a_position = 2.0 * g.layers * g.embd;
    } else {
        ok = kn_llama_preset("stories110m", &l);
        l.ctx = contexts[CONTEXTS - 1];
        ok = ok && kn_llama_init((kn_llama *)&s->model, l, dtype, KN_META);
        s->next = llama_next, s->vocab = l.vocab;
        s->a_position = 2.0 * l.layers * l.kv_heads * (l.embd / l.heads);
    }
    s->a_position *= (double)kn_dtype_size(dtype);
    ok = ok && kn_fsdp_wrap(&s->model, world,
                            .wrap_class = s->next == gpt_next ? "gpt_block" : "llama_block");
    kn_train(&s->model, false);
    s->weights = ok ? bytes_read(&s->model) : 0;
    return ok && (s->cache = kn_cache_new(&s->model, contexts[CONTEXTS - 1])) != NULL;
}

static void end(subject *s)
{
    kn_cache_free(s->cache);
    kn_module_free(&s->model);
}

/* n tokens behind those in the cache: the last one's likeliest successor. */
static int64_t step(subject *s, int64_t n, int64_t first)
{
    int64_t ids[256], id = -1;
    float *logits = malloc((size_t)s->vocab * sizeof *logits);
    for (int64_t i = 0; i < n; i++)
        ids[i] = (first + i * 7919) % s->vocab;
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = s->next(&s->model, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(1, n)));
    y = y ? kn_cast(y, KN_F32) : NULL;
    if (logits && y && kn_to_host(y, logits, (size_t)s->vocab * sizeof *logits))
        id = kn_sample(logits, s->vocab, &(kn_sample_options){ .temperature = 0.8, .top_k = 200 },
                       first);
    kn_scope_end(scope);
    free(logits);
    return id;
}

/* The cache holds `length` positions. */
static bool fill(subject *s, int64_t length)
{
    const int64_t have = kn_cache_length(s->cache);
    if (have >= length)
        return kn_cache_truncate(s->cache, length);
    for (int64_t at = have, n; at < length; at += n) {
        n = length - at < 256 ? length - at : 256;
        if (step(s, n, at) < 0)
            return false;
    }
    return true;
}

/* Seconds of the fastest of `tokens` that end in a context, each in turn with a copy. */
static double token_time(subject *s, int64_t context, int64_t tokens, double *copy)
{
    double best = INFINITY;
    int64_t id = fill(s, context - tokens) ? 1 : -1;
    for (int64_t i = 0; i < tokens && id >= 0; i++) {
        *copy = fmax(*copy, copy_rate());
        const double t = seconds();
        id = step(s, 1, id);
        best = fmin(best, seconds() - t);
    }
    return kn_ok() ? best : INFINITY;
}

static void print_kernels(subject *s, int64_t tokens)
{
    kernel_rows t = { .count = 0 };
    kn_trace_event *e = NULL;
    kn_trace_start(1000000);
    for (int64_t i = 0; i < tokens; i++)
        step(s, 1, i);
    const size_t n = kn_trace_stop(&e);
    for (size_t i = 0; i < n; i++)
        kernel_rows_add(&t, &e[i], e[i].end - e[i].begin);
    for (int i = 0; i < t.count; i++)
        kernel_row_print(&t.row[i], (int)tokens);
    kn_host_free(e);
}

typedef struct plan {
    int64_t tokens, most;
    bool kernels;
} plan;

static void measure(subject *s, const plan *p)
{
    double best[CONTEXTS] = { INFINITY, INFINITY, INFINITY }, copy = 0;
    for (int c = CONTEXTS - 1; c >= 0; c--)
        if (contexts[c] <= p->most && kn_ok())
            best[c] = token_time(s, contexts[c], p->tokens, &copy);
    for (int c = 0; c < CONTEXTS && contexts[c] <= p->most && kn_ok(); c++) {
        const double bytes = s->weights + s->a_position * (double)contexts[c];
        printf("%-6s %-5s context %5lld: %7.2f ms a token, %6.1f tokens/s, %6.1f MB a token, %5.1f "
               "GB/s, %3.0f %% of a copy's %.1f GB/s\n",
               s->name, kn_dtype_name(s->dtype), (long long)contexts[c], 1e3 * best[c], 1 / best[c],
               bytes / 1e6, bytes / best[c] / 1e9, 100 * bytes / best[c] / copy, copy / 1e9);
        fflush(stdout);
        if (p->kernels && fill(s, contexts[c] - p->tokens - 1))
            print_kernels(s, p->tokens);
    }
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Tokens/s of generation with a cache, beside the bandwidth of a copy.\n"
               "  bench_generate [--model gpt2|llama] [--dtype f32|bf16] [--tokens N] \n"
               "    [--most N] [--kernels] [--processor] [--threads N]",
               0);
    kn_comm *world = kn_init(&argc, &argv);
    const char *model = word(argc, argv, "--model", NULL),
               *dtype = word(argc, argv, "--dtype", NULL);
    const plan p = { number(argc, argv, "--tokens", 40), number(argc, argv, "--most", 4096),
                     flag(argc, argv, "--kernels") };
    static const char *const models[] = { "gpt2", "llama" }, *const dtypes[] = { "f32", "bf16" };
    processor = flag(argc, argv, "--processor");
    kn_set_grad_mode(false);
    printf("%s, %d threads, %s\n", kn_cpu_isa(), kn_threads(), kn_cpu_libraries());
    for (int i = 0; i < 4 && kn_ok(); i++) {
        subject s;
        if ((model && strcmp(model, models[i / 2]) != 0) ||
            (dtype && strcmp(dtype, dtypes[i % 2]) != 0))
            continue;
        if (begin(&s, world, models[i / 2], kn_dtype_parse(dtypes[i % 2])))
            measure(&s, &p);
        end(&s);
    }
    return kn_finish();
}
