/* tests/fsdp/overlap_test.c: overlap is real: on virtual clocks (meta streams, simulated ranks; no
 * wall time is involved) a step takes max(compute, communication) with prefetch, and their sum
 * without. The same on real streams: bench/overlap.c. */
#include "tests/failing.h"
#include "tests/fsdp/chain.h"
#include "tests/owned.h"

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
static chain_trace timed_step(double ratio, bool prefetch, kn_fsdp_wrap_options o)
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

/* The schedule's best case. Forward: gathers beside compute. Backward: gathers, twice the compute,
 * and reductions, three streams beside each other. */
static double ideal(const chain_trace *t)
{
    double forward = fmax(t->compute / 3, t->gather / 2);
    return forward + fmax(fmax(t->compute * 2 / 3, t->gather / 2), t->reduce);
}

KN_TEST(overlap, with_prefetch_the_maximum)
{
    static const double ratio[] = { 0.1, 0.3, 0.6 };
    for (int i = 0; i < 3; i++) { /* compute takes longer, in each half of the step */
        chain_trace t = timed_step(ratio[i], true, CHAIN_OPTIONS(.max_gathers = 2));
        check_near("with prefetch: compute", ratio[i], t.seconds, t.compute);
        check_near("with prefetch: the ideal", ratio[i], t.seconds, ideal(&t));
    }
}

KN_TEST(overlap, with_prefetch_communication_bounds)
{
    for (double ratio = 2; ratio <= 8; ratio *= 2) { /* gathers take longer */
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

/* Prefetch costs one unit more, for any length of the chain. */
KN_TEST(overlap, memory_stays_flat)
{
    chain_trace with = timed_step(2, true, CHAIN_OPTIONS(.max_gathers = 2));
    chain_trace without = timed_step(2, false, CHAIN_OPTIONS(.max_gathers = 2));
    int64_t unit = DIM * DIM * 4;
    KN_CHECK(with.gathered == 2 * unit && without.gathered == unit,
             "%lld and %lld bytes gathered, a unit is %lld", (long long)with.gathered,
             (long long)without.gathered, (long long)unit);
}

/* Virtual time is a function of the schedule: repeated runs agree to the last bit. */
KN_TEST(overlap, is_deterministic)
{
    chain_trace a = timed_step(0.6, true, CHAIN_OPTIONS(.max_gathers = 2));
    chain_trace b = timed_step(0.6, true, CHAIN_OPTIONS(.max_gathers = 2));
    KN_CHECK(fabs(a.seconds - b.seconds) <= 1e-12 * a.seconds && strcmp(a.line, b.line) == 0);
}

/* ---- by hand --------------------------------------------------------------------------------- */

/* A gather by the user and products of the same duration: the wait comes before them, or after. */
static double gathered_by_hand(bool wait_first)
{
    enum { PRODUCTS = 8 };
    chain c;
    double compute = PRODUCTS * 2.0 * BATCH * DIM * DIM / FLOPS;
    kn_meta_rates(FLOPS, 1e18, 0);
    chain_init(&c, 1, DIM, BATCH);
    chain_wrap(&c, 8, 2.0 * DIM * DIM * 4 / compute, CHAIN_OPTIONS(.max_gathers = 1));
    chain_step(&c, false);
    kn_stream *s = kn_compute_stream(KN_META);
    kn_stream_sync(s);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(BATCH, DIM));
    kn_tensor *w = kn_zeros(KN_F32, KN_META, KN_SHAPE(DIM, DIM));
    double begin = fmax(kn_meta_clock(s), kn_context_get()->meta_host);
    kn_unshard_handle h = kn_fsdp_unshard(&c.layer[0]);
    KN_CHECK(!wait_first || kn_unshard_wait(h));
    for (int i = 0; i < PRODUCTS; i++)
        kn_matmul(x, w);
    KN_CHECK(kn_unshard_wait(h));
    double seconds = kn_meta_clock(s) - begin;
    kn_scope_end(scope);
    chain_free(&c);
    KN_CHECK(seconds > 0.95 * compute, "%g s, the products alone take %g", seconds, compute);
    return seconds;
}

KN_TEST(overlap, a_gather_by_hand_runs_beside_compute)
{
    double beside = gathered_by_hand(false), before = gathered_by_hand(true);
    KN_CHECK(fabs(before / beside - 2) < 0.2, "%g s beside, %g s before", beside, before);
}

/* The device is behind: a gather issued now must read the values that the pending step will
 * write. */
KN_TEST(overlap, a_gather_waits_for_the_step_before_it)
{
    kn_meta_rates(FLOPS, 1e9, 0); /* steps are bound by bytes */
    CHAIN_OF(c, 2, DIM, BATCH, 8, 1e12, .max_gathers = 1);
    c.optim = kn_adamw(&c, .lr = 1e-3);
    chain_step(&c, true);
    double stepped = kn_meta_clock(kn_compute_stream(KN_META));
    KN_CHECK(stepped > 1.001 * kn_context_get()->meta_host, "the host is not ahead");
    OWNED_HOST kn_trace_event *events = NULL;
    kn_trace_start(100);
    KN_CHECK(kn_unshard_wait(kn_fsdp_unshard(&c.layer[0])));
    size_t n = kn_trace_stop(&events), gathers = 0;
    for (size_t i = 0; i < n; i++)
        if (strncmp(events[i].what, "all_gather", 10) == 0 && ++gathers)
            KN_CHECK(events[i].begin >= stepped, "gathered at %g s, the step ended at %g s",
                     events[i].begin, stepped);
    KN_CHECK(gathers == 1, "%d gathers", (int)gathers);
}

/* The bytes that a gather takes and the slice that it reads are compute's until then. */
KN_TEST(overlap, gathers_wait_for_what_compute_was_given)
{
    for (int slices = 0; slices < 2; slices++) {
        OWNED_HOST kn_trace_event *events = NULL;
        double given = 0;
        int gathers = 0;
        kn_meta_rates(FLOPS, 1e9, 0);
        CHAIN_OF(c, 3, DIM, BATCH, 8, 1e12, .reshard_after_forward = slices ? 2 : 0);
        chain_step(&c, true);
        kn_trace_start(1000);
        kn_scope scope = kn_scope_begin();
        KN_CHECK(kn_backward(kn_call(&c, kn_zeros(KN_F32, KN_META, KN_SHAPE(BATCH, DIM)))));
        kn_scope_end(scope);
        size_t n = kn_trace_stop(&events);
        for (size_t i = 0; i < n; i++) {
            bool gather = strncmp(events[i].what, "all_gather", 10) == 0;
            gathers += gather;
            KN_CHECK(!gather || events[i].begin >= given, "gather %d at %g s, and not %g s",
                     gathers, events[i].begin, given);
            if (strcmp(events[i].stream, "compute") == 0)
                given = fmax(given, events[i].end);
        }
        KN_CHECK(given > 0 && gathers == 6, "%d gathers", gathers);
    }
}

/* ---- offload --------------------------------------------------------------------------------- */

/* A step of offloaded layers of one rank whose uploads take `up` times the compute, and the host's
 * optimizer `host` times. Downloads pass over a link of the same speed: parameters go up twice,
 * gradients come down once. */
static chain_trace offloaded_step(double up, double host, kn_dtype dtype)
{
    chain c;
    double elements = (double)LAYERS * DIM * DIM;
    double sent = elements * (dtype == KN_BF16 ? 2 : 4);
    double stepped =
        elements * 28; /* bytes that AdamW moves: of bf16 it reads one and writes one */
    kn_meta_rates(FLOPS, 1e18, 0);
    kn_meta_host_rates(2 * sent / (up * compute_seconds()), stepped / (host * compute_seconds()));
    chain_init(&c, LAYERS, DIM, BATCH);
    chain_wrap(&c, 1, 1,
               CHAIN_OPTIONS(.offload_dir = "memory", .param_dtype = dtype,
                             .keep_low_precision_grads = true));
    c.optim = kn_adamw(&c, .lr = 1e-3);
    chain_step(&c, true);
    chain_step(&c, true);
    chain_trace t = chain_step(&c, true);
    chain_free(&c);
    KN_CHECK(fabs(t.compute / compute_seconds() - 1) < 0.05, "compute %g s, not %g", t.compute,
             compute_seconds());
    KN_CHECK(fabs(t.upload / (up * compute_seconds()) - 1) < 0.05, "uploads %g s, not %g", t.upload,
             up * compute_seconds());
    KN_CHECK(fabs(t.host / (host * compute_seconds()) - 1) < 0.05, "the host %g s, not %g", t.host,
             host * compute_seconds());
    KN_CHECK(t.download > 0.45 * t.upload, "downloads %g s, uploads %g", t.download, t.upload);
    return t;
}

/* The parts that can't overlap: the first layer's upload, the last one's download and its step. */
static double ends(const chain_trace *t)
{
    return t->upload / (2 * LAYERS) + (t->download + t->host) / LAYERS;
}

/* Four activities overlap, in each half of the step: forward, then backward, with uploads,
 * downloads and the optimizer's step. */
static double ideal_offloaded(const chain_trace *t)
{
    double forward = fmax(t->compute / 3, t->upload / 2);
    double there = fmax(t->compute * 2 / 3, t->upload / 2), back = fmax(t->download, t->host);
    return forward + fmax(there, back);
}

KN_TEST(overlap, offloaded_the_longest_of_compute_transfers_and_the_hosts_step)
{
    static const struct {
        double up, host; /* x compute */
    } row[] = { { 0.1, 0.1 }, { 0.6, 0.3 }, { 0.3, 0.6 }, { 3, 0.3 }, { 0.3, 4 }, { 6, 3 } };
    static const kn_dtype dtype[] = { KN_DTYPE_DEFAULT, KN_BF16 };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        for (int k = 0; k < 2; k++) {
            chain_trace t = offloaded_step(row[i].up, row[i].host, dtype[k]);
            double longest = fmax(fmax(t.compute, t.upload), fmax(t.download, t.host));
            KN_CHECK(t.seconds <= 1.1 * longest + ends(&t),
                     "uploads %g, the host %g: %g s, not %g (+ %g)", row[i].up, row[i].host,
                     t.seconds, longest, ends(&t));
            KN_CHECK(t.seconds >= longest, "%g s, less than %g", t.seconds, longest);
        }
}

/* Forward and backward have different longest activities. */
KN_TEST(overlap, offloaded_each_half_by_itself)
{
    static const double ratio[] = { 0.5, 1, 1.5, 2, 3 };
    for (int up = 0; up < 5; up++)
        for (int host = 0; host < 5; host++) {
            chain_trace t = offloaded_step(ratio[up], ratio[host], KN_DTYPE_DEFAULT);
            KN_CHECK(t.seconds <= 1.1 * ideal_offloaded(&t) + ends(&t),
                     "uploads %g, the host %g: %g s, not %g (+ %g)", ratio[up], ratio[host],
                     t.seconds, ideal_offloaded(&t), ends(&t));
        }
}

/* Unreduced gradients stay on the device; their sum is downloaded once. */
KN_TEST(overlap, without_sync_nothing_goes_to_the_host)
{
    kn_meta_rates(FLOPS, 1e18, 0);
    kn_meta_host_rates(1e12, 1e12);
    CHAIN_OF(c, LAYERS, DIM, BATCH, 1, 1, .offload_dir = "memory");
    double once = chain_step(&c, true).download;
    kn_zero_grad(&c);
    KN_CHECK(once > 0 && kn_fsdp_set_gradient_sync(&c, false, true));
    for (int i = 0; i < 2; i++) {
        chain_trace t = chain_step(&c, true);
        KN_CHECK(t.download == 0 && t.upload > 0, "%g s of downloads", t.download);
    }
    KN_CHECK(kn_fsdp_set_gradient_sync(&c, true, true));
    double sum = chain_step(&c, true).download;
    KN_CHECK(fabs(sum / once - 1) < 1e-6, "%g s of downloads, once %g s", sum, once);
}

/* The norm is of all gradients: no step begins before the last download. */
KN_TEST(overlap, a_clipped_step_comes_after_the_backward)
{
    chain c;
    kn_meta_rates(FLOPS, 1e18, 0);
    kn_meta_host_rates(1e12, 28.0 * LAYERS * DIM * DIM / compute_seconds());
    chain_init(&c, LAYERS, DIM, BATCH);
    chain_wrap(&c, 1, 1, CHAIN_OPTIONS(.offload_dir = "memory"));
    c.optim = kn_adamw(&c, .lr = 1e-3);
    chain_step(&c, true);
    chain_trace beside = chain_step(&c, true);
    c.clip = true;
    chain_trace after = chain_step(&c, true);
    chain_free(&c);
    check_near("not clipped", 1, beside.seconds, beside.compute / 3 + beside.host);
    KN_CHECK(after.seconds > after.compute + beside.host, "%g s clipped", after.seconds);
}

/* Two layers' parameters and two layers' gradients on the device, however long the chain. */
KN_TEST(overlap, offloaded_memory_stays_flat)
{
    int64_t unit = DIM * DIM * 4;
    chain_trace t = offloaded_step(1, 1, KN_DTYPE_DEFAULT);
    KN_CHECK(t.gathered == 2 * unit && t.unreduced == 2 * unit,
             "%lld bytes gathered, %lld unreduced, a unit is %lld", (long long)t.gathered,
             (long long)t.unreduced, (long long)unit);
}

/* One step of an offloaded layer, and all of it freed; false where it failed. */
static bool offloaded_layer(void *arg)
{
    (void)arg;
    OWNED_MODULE kn_linear net = { 0 };
    bool ok = kn_linear_init(&net, NULL, NULL, 8, 8, .device = KN_META) &&
              kn_fsdp_wrap(&net, NULL, .device = KN_META, .param_dtype = KN_BF16,
                           .offload_dir = "memory");
    OWNED_OPTIM kn_optim *opt = ok ? kn_adamw(&net, .lr = 1e-3) : NULL;
    IN_SCOPE;
    for (int i = 0; ok && i < 2; i++)
        ok = kn_backward(sum_of(kn_call(&net, kn_zeros(KN_F32, KN_META, KN_SHAPE(2, 8)))));
    ok = ok && kn_clip_grad_norm(&net, 1) && kn_step(opt);
    return ok;
}

static void nothing_is_pinned(void *arg)
{
    (void)arg;
    KN_CHECK(kn_ledger_read().live_pinned == 0);
}

KN_TEST(overlap, offloaded_every_allocation_failing_is_an_error)
{
    KN_CHECK(offloaded_layer(NULL));
    each_allocation_fails(offloaded_layer, nothing_is_pinned, NULL, 50);
}
