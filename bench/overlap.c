/* bench/overlap.c: whether communication hides behind computation, on real streams by wall-clock
 * time. Waits (kn_comm_slow), which use no core, slow the communicator. The time of a step is
 * compared with max(compute, communication) if units are gathered ahead, else with their sum. Exit
 * status 1 if one differs by more than 10 %.
 *
 *   bench_overlap [--ranks 2] [--layers 24] [--dim 256] [--batch 1024] [--times 7] [--compute_us N]
 *
 * Compute is the time of a step without the slowing; communication is the waiting of the gather
 * stream, twice a unit and step. It is set to half and to twice the compute: near equality forward
 * (a third of the compute) and backward (two thirds) have different limits, so neither formula
 * holds. Reductions are slowed as much, on a stream beside the other two.
 *
 * A stream's worker needs a core as soon as it wakes up. With fewer than three cores a rank (one
 * for compute, one for each worker) it would wait for a product to end. There, or with
 * --compute_us, a layer's compute is a wait too, of --compute_us (default 1500) forward and twice
 * that backward; else it is a real product. */
#include "bench/args.h"
#include "bench/times.h"
#include "fsdp/schedule.h"
#include "knap.h"
#include <stdio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_LAYERS = 64, MAX_TIMES = 64 };

typedef struct layer {
    kn_module base;
    kn_linear fc;
} layer;

typedef struct chain {
    kn_module base;
    layer layer[MAX_LAYERS];
    int layers;
} chain;

typedef struct settings {
    int layers, dim, batch, times, compute_us;
} settings;

static kn_tensor *layer_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((layer *)self)->fc, x);
}

static kn_tensor *chain_forward(kn_module *self, kn_tensor *x)
{
    chain *c = (chain *)self;
    for (int i = 0; i < c->layers; i++)
        x = kn_call(&c->layer[i], x);
    return kn_mean(x, 0, NULL, false);
}

static void wait_us(int us)
{
    struct timespec t = { .tv_nsec = us * 1000L };
    while (nanosleep(&t, &t) != 0)
        ;
}

static void wait_forward(kn_module_event *e, void *arg)
{
    (void)e;
    wait_us(((const settings *)arg)->compute_us);
}

static void wait_backward(kn_module_event *e, void *arg)
{
    (void)e;
    wait_us(2 * ((const settings *)arg)->compute_us);
}

/* Inside the unit, which is gathered at this point. */
static bool add_waits(layer *l, settings *s)
{
    return s->compute_us == 0 ||
           kn_module_hook(&l->fc, (kn_module_hooks){ .pre_forward = wait_forward,
                                                     .pre_backward = wait_backward,
                                                     .arg = s });
}

static bool chain_init(chain *c, settings *s)
{
    *c = (chain){ .layers = s->layers };
    kn_module_init(&c->base, chain_forward);
    for (int i = 0; i < s->layers; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        kn_module_init(&c->layer[i].base, layer_forward);
        kn_module_add(&c->base, name, &c->layer[i].base);
        kn_linear_init(&c->layer[i].fc, &c->layer[i].base, "fc", s->dim, s->dim, .device = KN_META,
                       .no_bias = true);
        if (!add_waits(&c->layer[i], s))
            return false;
    }
    return kn_ok();
}

/* ---- one step -------------------------------------------------------------------------------- */

static bool step(chain *c, const settings *s)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_full(KN_F32, KN_CPU, 0.5, KN_SHAPE(s->batch, s->dim));
    bool ok = kn_backward(kn_call(c, x));
    kn_scope_end(scope);
    kn_zero_grad(c); /* the next step's gradients must not add to these */
    return ok;
}

/* Median seconds of a step of the slowest rank, with every gather and reduction slowed by
 * latency. */
static double measure(kn_comm *world, settings *s, bool prefetch, double latency, double *units)
{
    chain c;
    double seconds[MAX_TIMES];
    if (!chain_init(&c, s) ||
        !kn_fsdp_wrap(&c, world, .wrap_class = "layer", .forward_prefetch = prefetch,
                      .backward_prefetch = prefetch ? KN_PREFETCH_PRE : KN_PREFETCH_NONE) ||
        !step(&c, s)) /* makes the schedule, its streams and communicators */
        return 0;
    kn_ranks *r = kn_unit_of(c.layer[0].base.impl)->schedule->lanes->groups.ranks;
    kn_comm_slow(r->gather, latency, 0);
    kn_comm_slow(r->reduce, latency, 0);
    step(&c, s);
    kn_ledger_reset_peaks();
    for (int i = 0; i < s->times; i++) {
        kn_barrier(world, kn_compute_stream(KN_CPU), "begin");
        double begin = kn_now();
        step(&c, s);
        kn_barrier(world, kn_compute_stream(KN_CPU), "end");
        seconds[i] = kn_now() - begin;
    }
    *units = (double)kn_ledger_read().peak[KN_MEM_GATHERED] / (4.0 * s->dim * s->dim);
    kn_module_free(&c);
    return median_of(seconds, s->times);
}

/* ---- the comparison -------------------------------------------------------------------------- */

static bool row(kn_comm *world, settings *s, bool prefetch, double compute, double ratio)
{
    double communication = ratio * compute, units = 0;
    double got = measure(world, s, prefetch, communication / (2.0 * s->layers), &units);
    double want = !prefetch ? compute + communication : ratio < 1 ? compute : communication;
    bool good = kn_ok() && got <= 1.1 * want && got >= 0.9 * want;
    if (kn_rank(world) == 0)
        printf("%-9s %10.1f %14.1f %10.1f %10.1f %8.3f  %6.1f  %s\n",
               prefetch ? "prefetch" : "none", compute * 1e3, communication * 1e3, want * 1e3,
               got * 1e3, got / want, units, good ? "PASS" : "FAIL");
    return good;
}

static int size(int argc, char **argv, const char *name, int64_t otherwise, int64_t most)
{
    int64_t v = number(argc, argv, name, otherwise);
    if (v < 0 || v > most || (v == 0 && otherwise > 0))
        kn_fail("bench_overlap: %s %lld must be 1 to %lld", name, (long long)v, (long long)most);
    return (int)v;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Whether communication hides behind computation.\n"
               "  bench_overlap [--ranks N] [--layers N] [--dim N] [--batch N] [--times N] "
               "[--compute_us N]",
               0);
    two_ranks(argc, argv);
    kn_comm *world = kn_init(&argc, &argv);
    settings s = { size(argc, argv, "--layers", 24, MAX_LAYERS),
                   size(argc, argv, "--dim", 256, 1 << 14),
                   size(argc, argv, "--batch", 1024, 1 << 20),
                   size(argc, argv, "--times", 7, MAX_TIMES),
                   size(argc, argv, "--compute_us", 0, 400000) };
    if (s.compute_us == 0 && sysconf(_SC_NPROCESSORS_ONLN) < 3L * kn_comm_size(world)) {
        s.compute_us = 1500;
        s.dim = s.batch = 16; /* the waits replace the products */
    }
    kn_set_threads(1);
    kn_set_free_cores(2); /* the streams' workers mostly wait */
    double units, compute = kn_ok() ? measure(world, &s, true, 0, &units) : 0;
    float agreed = (float)compute; /* the same on every rank */
    kn_all_reduce_max(world, &agreed, 1, kn_compute_stream(KN_CPU), "compute");
    if (kn_ok() && kn_rank(world) == 0)
        printf(
            "%d ranks, %d layers of %d x %d, batch %d, %s; ms, median of %d\n%-9s %10s %14s %10s "
            "%10s %8s  %6s\n",
            kn_comm_size(world), s.layers, s.dim, s.dim, s.batch,
            s.compute_us ? "computing is a wait" : "real products", s.times, "gathers", "compute",
            "communication", "expected", "measured", "ratio", "units");
    int bad = 0;
    for (int prefetch = 1; prefetch >= 0 && kn_ok(); prefetch--)
        for (int i = 0; i < 2 && kn_ok(); i++)
            bad += !row(world, &s, prefetch, (double)agreed, i ? 2 : 0.5);
    int status = kn_finish();
    return status ? status : bad > 0;
}
