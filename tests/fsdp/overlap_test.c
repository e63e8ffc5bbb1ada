/* tests/fsdp/overlap_test.c: overlap is real: on virtual clocks (meta streams, simulated ranks; no wall time
 * decides) a step takes max(compute, communication) with prefetch, and their sum without. The same on
 * real streams: bench/overlap.c. */
#include "tests/fsdp/chain.h"

enum { LAYERS = 32, DIM = 256, BATCH = 64 };
static const double FLOPS = 1e12; /* a second */

/* A layer's forward is 2 B D^2 flops, its backward twice as much. */
static double compute_seconds(void)
{
    return 6.0 * BATCH * DIM * DIM / FLOPS * LAYERS;
}

/* Bytes that gathers of one step move, as kn_comm_bytes counts them, with 8 ranks in full. */
static double gather_bytes(void)
{
    return 2 * 2.0 * DIM * DIM * 4 * LAYERS;
}

/* A step whose gathers take `ratio` times the compute. */
static chain_trace timed_step(double ratio, bool prefetch, kn_fsdp_options o)
{
    chain c;
    kn_meta_rates(FLOPS, 1e18, 0); /* compute is bound by arithmetic alone */
    chain_init(&c, LAYERS, DIM, BATCH);
    o.forward_prefetch = prefetch;
    if (!o.backward_prefetch)
        o.backward_prefetch = prefetch ? KN_PREFETCH_PRE : KN_PREFETCH_NONE;
    chain_wrap(&c, 8, gather_bytes() / (ratio * compute_seconds()), o);
    chain_step(&c, true);
    chain_trace t = chain_step(&c, true);
    chain_free(&c);
    KN_CHECK(fabs(t.compute / compute_seconds() - 1) < 0.05, "compute %g s, not %g", t.compute,
             compute_seconds());
    KN_CHECK(fabs(t.gather / (ratio * compute_seconds()) - 1) < 0.05, "gathers %g s, not %g",
             t.gather, ratio * compute_seconds());
    return t;
}

static void check_near(const char *what, double ratio, double got, double want)
{
    KN_CHECK(fabs(got / want - 1) <= 0.1, "gathers %g x compute, %s: %g s, not %g within 10 %%",
             ratio, what, got, want);
}

/* What the schedule can at best reach. Forward: gathers beside compute. Backward: gathers, twice the
 * compute, and reductions, three streams beside each other. */
static double ideal(const chain_trace *t)
{
    double forward = fmax(t->compute / 3, t->gather / 2);
    return forward + fmax(fmax(t->compute * 2 / 3, t->gather / 2), t->reduce);
}

KN_TEST(overlap, with_prefetch_the_maximum)
{
    static const double ratio[] = { 0.1, 0.3, 0.6 };
    for (int i = 0; i < 3; i++) { /* compute is longer, in each half of the step */
        chain_trace t = timed_step(ratio[i], true, CHAIN_OPTIONS(.max_gathers = 2));
        check_near("with prefetch: compute", ratio[i], t.seconds, t.compute);
        check_near("with prefetch: the ideal", ratio[i], t.seconds, ideal(&t));
    }
}

KN_TEST(overlap, with_prefetch_communication_bounds)
{
    for (double ratio = 2; ratio <= 8; ratio *= 2) { /* gathers are longer */
        chain_trace t = timed_step(ratio, true, CHAIN_OPTIONS(.max_gathers = 2));
        check_near("with prefetch: gathers and reductions", ratio, t.seconds, ideal(&t));
        KN_CHECK(t.seconds >= t.gather, "%g s, faster than the link", t.seconds);
    }
}

KN_TEST(overlap, without_prefetch_the_sum)
{
    static const double ratio[] = { 0.3, 1, 3 };
    for (int i = 0; i < 3; i++) {
        chain_trace t = timed_step(ratio[i], false, CHAIN_OPTIONS(.max_gathers = 2));
        /* reductions overlap all the same: with the next unit's gather and compute */
        check_near("without prefetch: the sum", ratio[i], t.seconds, t.compute + t.gather);
    }
}

KN_TEST(overlap, backward_prefetch_alone_hides_half)
{
    chain_trace none = timed_step(0.6, false, CHAIN_OPTIONS(.max_gathers = 2));
    chain_trace pre = timed_step(0.6, false, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_PRE));
    check_near("backward prefetch only", 0.6, pre.seconds, none.seconds - none.gather / 2);
}

/* PRE gathers beside a unit's gradients, POST only beside what comes after its release. */
KN_TEST(overlap, pre_hides_more_than_post)
{
    chain_trace pre = timed_step(0.6, false, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_PRE));
    chain_trace post = timed_step(0.6, false, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_POST));
    chain_trace none = timed_step(0.6, false, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_NONE));
    KN_CHECK(pre.seconds < post.seconds && post.seconds <= 1.000001 * none.seconds,
             "PRE %g s, POST %g s, none %g s", pre.seconds, post.seconds, none.seconds);
    KN_CHECK(pre.gathered > post.gathered, "PRE %lld bytes, POST %lld", (long long)pre.gathered,
             (long long)post.gathered);
}

/* Prefetch costs one unit more; how long the chain is doesn't matter. */
KN_TEST(overlap, memory_stays_flat)
{
    chain_trace with = timed_step(2, true, CHAIN_OPTIONS(.max_gathers = 2));
    chain_trace without = timed_step(2, false, CHAIN_OPTIONS(.max_gathers = 2));
    int64_t unit = DIM * DIM * 4;
    KN_CHECK(with.gathered == 2 * unit && without.gathered == unit,
             "%lld and %lld bytes gathered, a unit is %lld", (long long)with.gathered,
             (long long)without.gathered, (long long)unit);
}

/* Virtual time is a function of the schedule: twice the same to the last bit. */
KN_TEST(overlap, is_deterministic)
{
    chain_trace a = timed_step(0.6, true, CHAIN_OPTIONS(.max_gathers = 2));
    chain_trace b = timed_step(0.6, true, CHAIN_OPTIONS(.max_gathers = 2));
    KN_CHECK(fabs(a.seconds - b.seconds) <= 1e-12 * a.seconds && strcmp(a.line, b.line) == 0);
}
