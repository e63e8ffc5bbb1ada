/* examples/timeline.c: the schedule of a sharded step, without the ranks. One process walks a GPT
 * through a step among 8 simulated ranks, on meta (no bytes, a virtual clock), and writes the
 * trace: timeline [TRACE.json]. A browser's about:tracing shows it; scripts/draw.py makes a picture
 * of it. */
#include <knap.h>

enum { RANKS = 8, BATCH = 4, UNITS = 8 };

/* Each unit's forward and backward is a span of its own in the trace. */
typedef struct span {
    double begin;
} span;

static void begin(kn_module_event *e, void *arg)
{
    (void)e;
    ((span *)arg)->begin = kn_meta_clock(kn_compute_stream(KN_META));
}

static void end(kn_module *m, const span *s, const char *what)
{
    char text[64];
    kn_stream *compute = kn_compute_stream(KN_META);
    snprintf(text, sizeof text, "%s %s", what, kn_module_path(m));
    kn_trace_add(text, "unit", compute, s->begin, kn_meta_clock(compute), 0, 0);
}

static void end_forward(kn_module_event *e, void *arg)
{
    end(e->module, arg, "forward");
}

static void end_backward(kn_module_event *e, void *arg)
{
    end(e->module, arg, "backward");
}

int main(int argc, char **argv)
{
    kn_init(&argc, &argv);
    if (argc > 2 || (argc > 1 && argv[1][0] == '-')) {
        puts("usage: timeline [FILE]: writes a step's trace to the file (trace.json)");
        return kn_finish();
    }
    kn_gpt_config config = { .layers = 4, .heads = 12, .embd = 768, .ctx = 512, .vocab = 16384 };
    kn_gpt net = { 0 };
    kn_gpt_init(&net, config, KN_F32, KN_META);
    kn_meta_rates(20e12, 1e12, 2e-6); /* operations and bytes a second, seconds a launch */
    kn_comm *ranks = kn_comm_simulated(RANKS, 10e-6, 25e9); /* seconds, bytes a second */
    kn_fsdp_wrap(&net, ranks, .device = KN_META, .wrap_class = "gpt_block",
                 .forward_prefetch = true);
    kn_optim *opt = kn_adamw(&net, .lr = 1e-3);
    kn_module *unit[UNITS];
    span spans[UNITS];
    int units = kn_fsdp_units(&net, unit, UNITS);
    for (int i = 0; i < units; i++)
        if (unit[i] != &net.base)
            kn_module_hook(unit[i], (kn_module_hooks){ begin, end_forward, begin, end_backward,
                                                       .arg = &spans[i] });
    for (int step = 0; step < 2 && kn_ok();
         step++) { /* the first one records the order that prefetch needs */
        kn_scope scope = kn_scope_begin();
        kn_trace_start(10000);
        kn_tensor *ids = kn_zeros(KN_I64, KN_META, KN_SHAPE(BATCH, config.ctx));
        kn_backward(kn_gpt_loss(&net, ids, ids));
        kn_step(opt);
        kn_scope_end(scope);
    }
    kn_trace_write(argc > 1 ? argv[1] : "trace.json");
    kn_trace_stop(NULL);
    kn_optim_free(opt), kn_module_free(&net), kn_comm_simulated_free(ranks);
    return kn_finish();
}
