/* tests/fsdp/chain.h: a chain of equal layers, each a unit, whose step on meta among simulated
 * ranks is recorded: the order and times of gathers, calls and reductions.
 *
 * A step reads as one line: "g1" gather of layer 1, "F1" its forward begins, "B1" its backward
 * begins, "s1" reduce-scatter, "a1" all-reduce, then optionally ":n", the number of layers gathered
 * at that moment. */
#ifndef KNAP_TESTS_CHAIN_H
#define KNAP_TESTS_CHAIN_H

#include "kernels/context.h"
#include "knap.h"
#include "tests/owned.h"

enum { CHAIN_MAX = 40 };

typedef struct chain_layer {
    kn_module base;
    kn_linear fc;
} chain_layer;

typedef struct chain {
    kn_module base;
    chain_layer layer[CHAIN_MAX];
    int layers, order[CHAIN_MAX]; /* the layers that a forward calls: order[0 .. runs-1] */
    int runs;
    int gathered;    /* layers whose whole parameters have bytes: the gather may still run */
    kn_optim *optim; /* NULL: a step doesn't end with the optimizer's */
    bool clip;
    kn_comm *world;
    int64_t dim, batch;
} chain;

static kn_tensor *chain_layer_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((chain_layer *)self)->fc, x);
}

static kn_tensor *chain_forward(kn_module *self, kn_tensor *x)
{
    chain *c = (chain *)self;
    for (int i = 0; i < c->runs; i++)
        x = kn_call(&c->layer[c->order[i]], x);
    return sum_of(x);
}

/* ---- making ---------------------------------------------------------------------------------- */

/* layers of dim x dim on meta, for batch rows. */
static inline void chain_init(chain *c, int layers, int64_t dim, int64_t batch)
{
    *c = (chain){ .layers = layers, .runs = layers, .dim = dim, .batch = batch };
    KN_CHECK(kn_module_init(&c->base, chain_forward));
    for (int i = 0; i < layers; i++) {
        char name[12];
        snprintf(name, sizeof name, "%d", i);
        c->order[i] = i;
        kn_module_init(&c->layer[i].base, chain_layer_forward);
        kn_module_add(&c->base, name, &c->layer[i].base);
        kn_linear_init(&c->layer[i].fc, &c->layer[i].base, "fc", dim, dim, .device = KN_META,
                       .no_bias = true);
    }
    KN_CHECK_OK();
}

/* Among `ranks` simulated ranks with a link of bytes_per_s. o: the options under test. */
static inline void chain_wrap(chain *c, int ranks, double bytes_per_s, kn_fsdp_wrap_options o)
{
    o._size = sizeof o;
    o.device = KN_META;
    if (!o.wrap_class && !o.policy)
        o.wrap_class = "chain_layer";
    c->world = kn_comm_simulated(ranks, 0, bytes_per_s);
    KN_CHECK(c->world && kn_fsdp_wrap_(&c->base, c->world, o));
}

static inline void chain_free(chain *c)
{
    kn_optim_free(c->optim);
    kn_module_free(&c->base);
    kn_comm_simulated_free(c->world);
}

/* ---- a step ---------------------------------------------------------------------------------- */

typedef struct chain_trace {
    char line[4096], counted[8192];                         /* without and with ":n" */
    double compute, gather, reduce, upload, download, host; /* seconds that each stream was busy */
    double seconds;                                         /* from begin to end */
    int64_t gathered, unreduced;                            /* peaks of bytes */
} chain_trace;

static inline void chain_append(chain_trace *t, char what, const char *name, int count)
{
    size_t n = strlen(t->line), m = strlen(t->counted);
    snprintf(t->line + n, sizeof t->line - n, "%s%c%s", n ? " " : "", what, name);
    snprintf(t->counted + m, sizeof t->counted - m, count < 0 ? "%s%c%s" : "%s%c%s:%d",
             m ? " " : "", what, name, count);
}

static inline void chain_read_schedule(chain *c, chain_trace *t, const kn_trace_event *e)
{
    if (e->kind == KN_TRACE_VERB)
        c->gathered += (strcmp(e->what, "gather") == 0) - (strcmp(e->what, "release") == 0);
    else if (strcmp(e->provider, "chain_layer") == 0 && !strchr(e->what, ' '))
        chain_append(t, *e->what == 'f' ? 'F' : 'B', e->path, c->gathered);
}

static inline void chain_read(chain_trace *t, const kn_trace_event *e)
{
    static const struct {
        const char *kind;
        char letter;
    } kinds[] = { { "all_gather ", 'g' }, { "reduce_scatter ", 's' }, { "all_reduce ", 'a' } };
    static const char *const side[] = { "gather", "reduce", "upload", "download", "host" };
    double *const busy[] = {
        &t->gather, &t->reduce, &t->upload, &t->download, &t->host, &t->compute
    };
    int k = 0;
    while (k < 5 && strcmp(e->stream, side[k]) != 0)
        k++;
    *busy[k] += e->end - e->begin;
    for (int i = 0; i < 3; i++)
        if (strncmp(e->what, kinds[i].kind, strlen(kinds[i].kind)) == 0)
            chain_append(t, kinds[i].letter, e->what + strlen(kinds[i].kind), -1);
}

/* Runs one forward (and backward) of zeros; returns its record. */
static inline chain_trace chain_step(chain *c, bool backward)
{
    chain_trace t = { 0 };
    kn_trace_event *events = NULL;
    kn_stream *s = kn_compute_stream(KN_META);
    kn_stream_sync(s);
    kn_ledger_reset_peaks();
    kn_trace_watch(1u << KN_TRACE_RUN | 1u << KN_TRACE_CALL | 1u << KN_TRACE_VERB, KN_META);
    double begin = fmax(kn_meta_clock(s), kn_context_get()->meta_host);
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(backward);
    kn_tensor *loss = kn_call(c, kn_zeros(KN_F32, KN_META, KN_SHAPE(c->batch, c->dim)));
    if (backward)
        kn_backward(loss);
    if (backward && c->clip)
        kn_clip_grad_norm(c, 1);
    if (backward && c->optim)
        kn_step(c->optim);
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    size_t n = kn_trace_stop(&events);
    KN_CHECK_OK();
    double end = kn_meta_clock(s);
    for (size_t i = 0; i < n; i++) {
        if (events[i].kind == KN_TRACE_RUN)
            chain_read(&t, &events[i]);
        else
            chain_read_schedule(c, &t, &events[i]);
        end = fmax(end, events[i].end);
    }
    kn_host_free(events);
    t.seconds = end - begin;
    t.gathered = kn_ledger_read().peak[KN_MEM_GATHERED];
    t.unreduced = kn_ledger_read().peak[KN_MEM_UNREDUCED];
    return t;
}

#define chain_check_line(what, got, want)                                                          \
    KN_CHECK(strcmp(got, want) == 0, "%s:\n  %s\nand not\n  %s", what, got, want)
#define CHAIN_OPTIONS(...) ((kn_fsdp_wrap_options){ __VA_ARGS__ })

/* A wrapped chain c, which goes with its block; CHAIN: DIM x DIM, 4 rows, a link of 1 MB/s. */
#define CHAIN_OF(c, layers, dim, batch, ranks, bytes_per_s, ...)                                   \
    __attribute__((cleanup(chain_free))) chain c;                                                  \
    chain_init(&c, layers, dim, batch);                                                            \
    chain_wrap(&c, ranks, bytes_per_s, CHAIN_OPTIONS(__VA_ARGS__))
#define CHAIN(c, layers, ranks, ...) CHAIN_OF(c, layers, DIM, 4, ranks, 1e6, ##__VA_ARGS__)

#endif
