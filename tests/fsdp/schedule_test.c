/* tests/fsdp/schedule_test.c: the order in which units are gathered, run, reduced and released,
 * read from the trace of a step on meta among simulated ranks (chain.h); and that the limiter holds
 * memory. */
#include "fsdp/schedule.h"
#include "schedule_head.h"
#include "tests/fsdp/chain.h"
#include "tensor/tensor_internal.h"

enum { DIM = 16 };

/* The line of the second of two steps of a chain of layers. */
static chain_trace second_step(int layers, int ranks, kn_fsdp_wrap_options o)
{
    chain c;
    chain_init(&c, layers, DIM, 4);
    chain_wrap(&c, ranks, 1e6, o);
    chain_step(&c, true);
    chain_trace t = chain_step(&c, true);
    chain_free(&c);
    return t;
}

static void check_line(const char *what, const char *got, const char *want)
{
    KN_CHECK(strcmp(got, want) == 0, "%s:\n  %s\nand not\n  %s", what, got, want);
}

static void check_step(const char *what, const char *want, int ranks, kn_fsdp_wrap_options o)
{
    check_line(what, second_step(3, ranks, o).line, want);
}

/* ---- backward -------------------------------------------------------------------------------- */

KN_TEST(schedule, backward_prefetch)
{
    check_step("PRE", "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0", 2,
               CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_PRE));
    check_step("POST", "g0 F0 g1 F1 g2 F2 g2 B2 g1 s2 B1 g0 s1 B0 s0", 2,
               CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_POST));
    check_step("none", "g0 F0 g1 F1 g2 F2 g2 B2 s2 g1 B1 s1 g0 B0 s0", 2,
               CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_NONE));
}

/* The three lines in the first comment of fsdp/schedule.c are true. */
KN_TEST(schedule, the_head_of_the_page_is_what_a_step_prints)
{
    check_step("PRE", SCHEDULE_PRE, 2, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_PRE));
    check_step("POST", SCHEDULE_POST, 2, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_POST));
    check_step("NONE", SCHEDULE_NONE, 2, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_NONE));
}

/* ---- events ---------------------------------------------------------------------------------- */

typedef struct heard {
    char line[1024];
    int64_t gathered, unreduced; /* bytes held by units */
    int wrong;                   /* events without bytes */
} heard;

static void hear_event(const kn_fsdp_event *e, void *arg)
{
    heard *h = arg;
    size_t n = strlen(h->line);
    snprintf(h->line + n, sizeof h->line - n, "%s%s %s", n ? ", " : "", kn_fsdp_event_name(e->kind),
             e->unit);
    h->gathered += e->kind == KN_FSDP_GATHER    ? e->bytes
                   : e->kind == KN_FSDP_RELEASE ? -e->bytes
                                                : 0;
    h->unreduced += e->kind == KN_FSDP_REDUCE    ? e->bytes
                    : e->kind == KN_FSDP_REDUCED ? -e->bytes
                                                 : 0;
    h->wrong += e->bytes != DIM * DIM * 4;
}

KN_TEST(schedule, events_of_a_step)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    heard h = { .line = "" };
    KN_CHECK(kn_fsdp_on_event(&c, hear_event, &h));
    chain_step(&c, true);
    check_line("events", h.line,
               "gather 0, gathered 0, release 0, gather 1, gathered 1, release 1, gather 1, "
               "gathered 1, gather 0, release 1, reduce 1, gathered 0, release 0, reduced 1, "
               "reduce 0, reduced 0");
    KN_CHECK(h.gathered == 0 && h.unreduced == 0 && h.wrong == 0,
             "%lld and %lld bytes are left, %d events have other bytes than a layer's",
             (long long)h.gathered, (long long)h.unreduced, h.wrong);
    h.line[0] = 0;
    KN_CHECK(kn_fsdp_on_event(&c.layer[0], NULL, NULL));
    kn_fsdp_unshard(&c.layer[0]);
    KN_CHECK(kn_fsdp_unshard(&c.layer[1]).unit && kn_fsdp_reshard(&c.layer[1]));
    KN_CHECK(kn_fsdp_reshard(&c.layer[0]));
    check_line("by hand, and of one unit only", h.line, "gather 1, gathered 1, release 1");
    KN_CHECK(strcmp(kn_fsdp_event_name((kn_fsdp_event_kind)99), "unknown") == 0);
    KN_CHECK(!kn_fsdp_on_event(&c.layer[0].fc, hear_event, &h), "there is no unit");
    KN_CHECK(kn_error() && strstr(kn_error(), "no unit of fsdp"), "%s", kn_error());
    kn_clear_error();
    chain_free(&c);
}

/* Reductions in the order of events: r is issued, d is done, of four layers. */
KN_TEST(schedule, at_most_so_many_reductions)
{
    static const char *const want[] = { "r3 d3 r2 d2 r1 d1 r0 d0", "r3 d3 r2 d2 r1 d1 r0 d0",
                                        "r3 r2 d3 r1 d2 r0 d1 d0", "r3 r2 r1 d3 r0 d2 d1 d0",
                                        "r3 r2 r1 r0 d3 d2 d1 d0" };
    for (int most = 0; most <= 4; most++) {
        chain c;
        chain_init(&c, 4, DIM, 4);
        chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.max_reductions = most));
        heard h = { .line = "" };
        KN_CHECK(kn_fsdp_on_event(&c, hear_event, &h));
        chain_trace t = chain_step(&c, true);
        char line[64] = "", *save = NULL;
        size_t n = 0;
        for (char *e = strtok_r(h.line, ",", &save); e; e = strtok_r(NULL, ",", &save))
            if (strstr(e, "reduce"))
                n += (size_t)snprintf(line + n, sizeof line - n, "%s%c%c", n ? " " : "",
                                      strstr(e, "reduced") ? 'd' : 'r', e[strlen(e) - 1]);
        check_line("reductions", line, want[most]);
        int64_t layers = t.unreduced / (DIM * DIM * 4);
        KN_CHECK(layers == (most == 0  ? 2
                            : most < 4 ? most + 1
                                       : 4),
                 "%d reductions: %d layers", most, (int)layers);
        chain_free(&c);
    }
}

/* Without a movement of bytes there is no event; slices are released, too. */
KN_TEST(schedule, events_where_nothing_moves)
{
    chain c;
    chain_init(&c, 1, DIM, 4);
    chain_wrap(&c, 1, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    heard h = { .line = "" };
    KN_CHECK(kn_fsdp_on_event(&c, hear_event, &h));
    chain_step(&c, true);
    check_line("one rank", h.line, "reduce 0, reduced 0");
    kn_fsdp_set_gradient_sync(&c, false, true);
    h.line[0] = 0;
    chain_step(&c, true);
    check_line("without sync", h.line, "");
    chain_free(&c);
}

KN_TEST(schedule, strategies)
{
    check_step("SHARD_GRAD_OP", "g0 F0 g1 F1 g2 F2 B2 s2 B1 s1 B0 s0", 2,
               CHAIN_OPTIONS(.strategy = KN_SHARD_GRAD_OP));
    check_step("NO_SHARD", "F0 F1 F2 B2 a2 B1 a1 B0 a0", 2, CHAIN_OPTIONS(.strategy = KN_NO_SHARD));
    check_step("HYBRID", "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 a2 g0 B1 s1 a1 B0 s0 a0", 4,
               CHAIN_OPTIONS(.strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 }));
    check_step("HYBRID_GRAD_OP", "g0 F0 g1 F1 g2 F2 B2 s2 a2 B1 s1 a1 B0 s0 a0", 4,
               CHAIN_OPTIONS(.strategy = KN_HYBRID_SHARD_GRAD_OP, .mesh = { .replicas = 2 }));
    check_step("one rank", "F0 F1 F2 B2 B1 B0", 1, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    check_step("reshard never", "g0 F0 g1 F1 g2 F2 B2 s2 B1 s1 B0 s0", 2,
               CHAIN_OPTIONS(.reshard_after_forward = KN_RESHARD_NEVER));
}

/* Between forward and backward a group of 2 keeps half of each unit on a rank. */
KN_TEST(schedule, reshard_to_group_size)
{
    static const struct {
        int reshard;
        double units; /* gathered at the peak; 2: the last unit whole beside three halves */
        const char *line;
    } c[] = { { KN_RESHARD_ALWAYS, 1, "g0 F0 g1 F1 g2 F2 g2 B2 s2 g1 B1 s1 g0 B0 s0" },
              { KN_RESHARD_NEVER, 3, "g0 F0 g1 F1 g2 F2 B2 s2 B1 s1 B0 s0" },
              { 2, 2.5, "g0 F0 g1 F1 g2 F2 g2 B2 s2 g1 B1 s1 g0 B0 s0" } };
    for (int i = 0; i < 3; i++) {
        chain_trace t = second_step(3, 8,
                                    CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_NONE,
                                                  .reshard_after_forward = c[i].reshard));
        check_line("order", t.line, c[i].line);
        double units = (double)t.gathered / (DIM * DIM * 4);
        KN_CHECK(units == c[i].units, "reshard %d: %g units gathered", c[i].reshard, units);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

KN_TEST(schedule, forward_prefetch)
{
    chain c;
    chain_init(&c, 3, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.forward_prefetch = true));
    check_line("the first step knows no order", chain_step(&c, true).line,
               "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
    check_line("the second does", chain_step(&c, true).line,
               "g0 g1 F0 g2 F1 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
    check_line("evaluation too", chain_step(&c, false).line, "g0 g1 F0 g2 F1 F2");
    chain_free(&c);
}

KN_TEST(schedule, a_refused_call_changes_no_order)
{
    chain c;
    chain_init(&c, 3, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.forward_prefetch = true));
    chain_step(&c, true);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_ones(KN_F32, KN_META, KN_SHAPE(4, DIM));
    kn_unit_of(c.base.impl)->state = KN_UNIT_POST_BACKWARD;
    KN_CHECK(!kn_call(&c, x) && kn_error() && strstr(kn_error(), "done with backward"));
    kn_clear_error();
    kn_unit_of(c.base.impl)->state = KN_UNIT_IDLE;
    kn_scope_end(scope);
    check_line("what is known of the step before stays", chain_step(&c, true).line,
               "g0 g1 F0 g2 F1 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
    chain_free(&c);
}

KN_TEST(schedule, changed_order)
{
    chain c;
    chain_init(&c, 3, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.forward_prefetch = true));
    chain_step(&c, true);
    memcpy(c.order, (int[]){ 1, 0, 2 }, 3 * sizeof(int));
    check_line("the old order is gathered, the new one runs", chain_step(&c, true).line,
               "g0 g1 g2 F1 F0 F2 g2 g0 B2 s2 g1 B0 s0 B1 s1");
    check_line("and is known from then on", chain_step(&c, true).line,
               "g1 g0 F1 g2 F0 F2 g2 g0 B2 s2 g1 B0 s0 B1 s1");
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0, "nothing stays gathered");
    chain_free(&c);
}

KN_TEST(schedule, branch_skips_a_unit)
{
    chain c;
    chain_init(&c, 3, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.forward_prefetch = true));
    chain_step(&c, true);
    memcpy(c.order, (int[]){ 0, 2 }, 2 * sizeof(int));
    c.runs = 2;
    check_line("layer 1 is gathered in vain", chain_step(&c, true).line,
               "g0 g1 F0 g2 F2 g2 g0 B2 s2 B0 s0");
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0, "nothing stays gathered");
    check_line("once", chain_step(&c, true).line, "g0 g2 F0 F2 g2 g0 B2 s2 B0 s0");
    chain_free(&c);
}

/* Each layer called directly is an outermost call of its own: a loop over layers, beside forwards
 * that no backward follows, is reduced layer by layer all the same. */
KN_TEST(schedule, layers_called_one_by_one)
{
    chain c;
    chain_init(&c, CHAIN_MAX, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    chain_step(&c, true);
    kn_ledger_reset_peaks();
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(c.batch, c.dim));
    for (int i = 0; i < 30; i++)
        kn_call(&c.layer[i], x);
    for (int i = 0; i < CHAIN_MAX; i++)
        x = kn_call(&c.layer[i], x);
    KN_CHECK(kn_backward(kn_sum(x, 0, NULL, false)), "%s", kn_error());
    kn_scope_end(scope);
    int64_t layer = DIM * DIM * 4, unreduced = kn_ledger_read().peak[KN_MEM_UNREDUCED];
    KN_CHECK(unreduced == 2 * layer, "gradients of %g layers at a time",
             (double)unreduced / (double)layer);
    int64_t gathered = kn_ledger_read().peak[KN_MEM_GATHERED];
    KN_CHECK(gathered == 2 * layer, "%g layers are gathered at a time",
             (double)gathered / (double)layer);
    chain_free(&c);
}

/* The replay of a call gathers its units one after another; then each is released and reduced when
 * its own backward is done. */
KN_TEST(schedule, units_inside_a_recomputed_call)
{
    static const char *const counted[] = {
        "g0 F0:1 g1 F1:1 g2 F2:1 g0 g1 F0:2 g2 F1:3 F2:3 B2:3 s2 B1:2 s1 B0:1 s0",
        "g0 F0:1 g1 F1:1 g2 F2:1 g0 F0:1 g1 F1:2 g2 F2:3 B2:3 s2 B1:2 s1 B0:1 s0",
        "g0 F0:1 g1 F1:1 g2 F2:1 g0 F0:1 g1 F1:2 g2 F2:3 B2:3 s2 B1:2 s1 B0:1 s0"
    };
    for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++) {
        chain c;
        chain_init(&c, 3, DIM, 4);
        chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.backward_prefetch = p));
        kn_recompute(&c, true);
        chain_step(&c, true);
        chain_trace t = chain_step(&c, true);
        check_line("all in one call", t.counted, counted[p - KN_PREFETCH_PRE]);
        KN_CHECK(t.unreduced == 2 * DIM * DIM * 4, "%lld bytes of gradients at a time",
                 (long long)t.unreduced);
        chain_free(&c);
    }
}

KN_TEST(schedule, module_used_twice)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    memcpy(c.order, (int[]){ 0, 1, 0 }, 3 * sizeof(int));
    c.runs = 3;
    chain_step(&c, true);
    check_line("layer 0 is reduced once, after its first call's backward",
               chain_step(&c, true).line, "g0 F0 g1 F1 g0 F0 g0 g1 B0 B1 s1 B0 s0");
    chain_free(&c);
}

/* Nothing reads layer 0 in backward, whose input needs no gradient. */
KN_TEST(schedule, units_that_backward_does_not_need)
{
    static const char *const want[] = { "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 B1 s1 B0 s0",
                                        "g0 F0 g1 F1 g2 F2 g2 B2 g1 s2 B1 s1 B0 s0",
                                        "g0 F0 g1 F1 g2 F2 g2 B2 s2 g1 B1 s1 B0 s0" };
    for (int i = 0; i < 3; i++) {
        chain c;
        chain_init(&c, 3, DIM, 4);
        chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_PRE + i));
        KN_CHECK(kn_fsdp_set_unshard_in_backward(&c.layer[0], false, false));
        chain_step(&c, true);
        check_line("layer 0 stays sharded", chain_step(&c, true).line, want[i]);
        kn_module *all[3] = { &c.layer[0].base, &c.layer[1].base, &c.layer[2].base };
        kn_fsdp_prefetch_backward(&c.layer[2], all, 3);
        check_line("in lists too", chain_step(&c, true).line, want[0]);
        KN_CHECK(kn_recompute(&c.layer[0], true));
        check_line("gathered where it runs again", chain_step(&c, true).line,
                   "g0 F0 g1 F1 g2 F2 g2 g0 g1 B2 s2 B1 s1 B0 F0 s0");
        chain_free(&c);
    }
}

/* ---- lists and by hand ----------------------------------------------------------------------- */

KN_TEST(schedule, explicit_prefetch_lists)
{
    chain c;
    chain_init(&c, 4, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.max_gathers = 3));
    kn_module *l[4];
    for (int i = 0; i < 4; i++)
        l[i] = &c.layer[i].base;
    kn_fsdp_prefetch_forward(l[0], (kn_module *[]){ l[2], l[3] }, 2);
    kn_fsdp_prefetch_backward(l[3], (kn_module *[]){ l[1], l[2], l[0] }, 3);
    check_line("lists", chain_step(&c, true).line,
               "g0 g2 g3 F0 g1 F1 F2 F3 g3 g1 g2 g0 B3 s3 B2 s2 B1 s1 B0 s0");
    kn_fsdp_prefetch_forward(l[0], NULL, 0);
    kn_fsdp_prefetch_backward(l[3], NULL, 0);
    check_line("none any more", chain_step(&c, true).line,
               "g0 F0 g1 F1 g2 F2 g3 F3 g3 g2 B3 s3 g1 B2 s2 g0 B1 s1 B0 s0");
    chain_free(&c);
}

KN_TEST(schedule, manual_unshard)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    chain_step(&c, true);
    kn_trace_start(100);
    kn_unshard_handle h = kn_fsdp_unshard(&c.layer[1]);
    int64_t bytes = kn_ledger_read().live[KN_MEM_GATHERED];
    KN_CHECK(bytes == DIM * DIM * 4, "%lld bytes gathered before the wait", (long long)bytes);
    KN_CHECK(h.unit && kn_unshard_wait(h));
    bytes = kn_ledger_read().live[KN_MEM_GATHERED];
    KN_CHECK(bytes == DIM * DIM * 4, "%lld bytes gathered", (long long)bytes);
    check_line("layer 1 is there already", chain_step(&c, true).line, "g0 F0 F1 g1 g0 B1 s1 B0 s0");
    kn_fsdp_unshard(&c.layer[0]);
    KN_CHECK(kn_fsdp_reshard(&c.layer[0]));
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0);
    check_line("and gone again", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 s1 B0 s0");
    chain_free(&c);
}

/* When the first gather of a step after an optimizer's began and when it ended, in seconds after
 * the optimizer's: between them comes work that reads no parameter. */
static double first_gather(chain *c, bool early, double *work)
{
    kn_stream *s = kn_compute_stream(KN_META);
    kn_trace_event *events = NULL;
    chain_step(c, true);
    kn_trace_start(100);
    double begin = kn_meta_clock(s);
    KN_CHECK(!early || kn_fsdp_unshard(&c->layer[0]).unit, "%s", kn_error());
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(512, 512));
    KN_CHECK(kn_matmul(x, x));
    *work = kn_meta_clock(s) - begin;
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_call(c, kn_zeros(KN_F32, KN_META, KN_SHAPE(c->batch, c->dim))));
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    size_t n = kn_trace_stop(&events), i = 0;
    while (i < n && strcmp(events[i].what, "all_gather 0") != 0)
        i++;
    KN_CHECK(i < n, "no gather");
    double at = events[i].begin - begin;
    kn_host_free(events);
    return at;
}

/* Gathers wait for the compute stream as it is when they are issued: after the optimizer's step,
 * they wait for that alone. */
KN_TEST(schedule, a_gather_issued_after_the_step_runs_beside_what_follows)
{
    chain c;
    double work;
    kn_meta_rates(1e12, 1e18, 0);
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 2, 1e9, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    c.optim = kn_sgd(&c, .lr = 0.1);
    double late = first_gather(&c, false, &work), early = first_gather(&c, true, &work);
    KN_CHECK(work > 1e-5 && late >= work && early < 0.1 * work,
             "the work takes %g s; the gather begins after %g s, issued early %g s", work, late,
             early);
    chain_free(&c);
}

/* ---- the end --------------------------------------------------------------------------------- */

/* In a debug build dead handles keep their bytes for a while: from here on each frees another. */
static void fill_quarantine(void)
{
#ifdef KN_DEBUG
    for (int i = 0; kn_scope_stack_get() && i < KN_QUARANTINE; i++)
        kn_handle_unref(kn_handle_new());
#endif
}

/* Freeing a tree frees all its memory, to the last byte of the host. */
KN_TEST(schedule, nothing_stays_of_a_tree_that_is_freed)
{
    fill_quarantine();
    for (int layout = KN_LAYOUT_FLAT; layout <= KN_LAYOUT_RAGGED; layout++) {
        kn_ledger before = { { 0 } };
        for (int round = 0; round < 3; round++) { /* the first makes memory that stays */
            chain c;
            chain_init(&c, 3, DIM, 4);
            chain_wrap(&c, 4, 1e6,
                       CHAIN_OPTIONS(.layout = layout, .reshard_after_forward = 2,
                                     .forward_prefetch = true));
            c.optim = kn_adamw(&c, .lr = 1e-3);
            kn_module *next = &c.layer[1].base;
            KN_CHECK(kn_fsdp_prefetch_forward(&c.layer[0], &next, 1));
            for (int step = 0; step < 2; step++)
                chain_step(&c, true);
            chain_free(&c);
            kn_ledger now = kn_ledger_read();
            for (int k = 0; k < KN_MEM_COUNT && round == 2; k++)
                KN_CHECK(now.live[k] == before.live[k], "layout %d: %lld bytes of %s stay", layout,
                         (long long)(now.live[k] - before.live[k]), kn_mem_name(k));
            before = now;
        }
    }
}

/* ---- groups ---------------------------------------------------------------------------------- */

KN_TEST(schedule, group_of_modules)
{
    chain c;
    chain_init(&c, 3, DIM, 4);
    c.world = kn_comm_simulated(2, 0, 1e6);
    kn_module *pair[2] = { &c.layer[0].base, &c.layer[1].base };
    kn_fsdp_wrap_group(pair, 2, c.world, .device = KN_META);
    kn_fsdp_wrap(&c.layer[2], c.world, .device = KN_META);
    kn_fsdp_wrap(&c, c.world, .device = KN_META);
    KN_CHECK_OK();
    chain_step(&c, true);
    check_line("gathered before the first, released after the last", chain_step(&c, true).line,
               "g0 F0 F1 g2 F2 g2 g0 B2 s2 B1 B0 s0");
    chain_free(&c);
}

/* ---- accumulation ---------------------------------------------------------------------------- */

KN_TEST(schedule, no_sync)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    kn_fsdp_set_gradient_sync(&c, false, true);
    check_line("no reduction", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 B0");
    int64_t held = kn_ledger_read().live[KN_MEM_UNREDUCED];
    KN_CHECK(held == 2 * DIM * DIM * 4, "%lld bytes of whole gradients", (long long)held);
    kn_fsdp_set_gradient_sync(&c, true, true);
    check_line("the sum is reduced", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 s1 B0 s0");
    KN_CHECK(kn_ledger_read().live[KN_MEM_UNREDUCED] == 0);
    kn_fsdp_set_gradient_sync(&c.layer[1], false, false);
    check_line("one unit only", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 B0 s0");
    chain_free(&c);
}

KN_TEST(schedule, all_reduce_on_the_last_micro_batch)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 4, 1e6, CHAIN_OPTIONS(.strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 }));
    kn_fsdp_set_all_reduce(&c, false, true);
    check_line("inside the group", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 s1 B0 s0");
    kn_fsdp_set_all_reduce(&c, true, true);
    check_line("over replicas", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 s1 a1 B0 s0 a0");
    chain_free(&c);
}

KN_TEST(schedule, keep_gathered_across_micro_batches)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
    kn_optim *opt = kn_sgd(&c, .lr = 0.1);
    kn_fsdp_set_reshard_after_backward(&c, false, true);
    chain_step(&c, true);
    check_line("after the first micro-batch backward leaves them", chain_step(&c, true).line,
               "F0 F1 g1 g0 B1 s1 B0 s0");
    kn_fsdp_set_reshard_after_forward(&c, KN_RESHARD_NEVER, true);
    chain_step(&c, true);
    check_line("and forward too", chain_step(&c, true).line, "F0 F1 B1 s1 B0 s0");
    KN_CHECK(kn_step(opt), "%s", kn_error() ? kn_error() : "");
    check_line("until a step changes them", chain_step(&c, true).line, "g0 F0 g1 F1 B1 s1 B0 s0");
    kn_optim_free(opt);
    chain_free(&c);
}

/* ---- the limiter ----------------------------------------------------------------------------- */

/* Every layer requests the next eight (in backward: the previous eight). */
static int64_t greedy_peak(int layers, int most)
{
    chain c;
    chain_init(&c, layers, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.max_gathers = most));
    for (int i = 0; i < layers; i++) {
        kn_module *after[8], *before[8];
        int a = 0, b = 0;
        for (int k = 1; k <= 8; k++) {
            if (i + k < layers)
                after[a++] = &c.layer[i + k].base;
            if (i - k >= 0)
                before[b++] = &c.layer[i - k].base;
        }
        kn_fsdp_prefetch_forward(&c.layer[i], after, a);
        kn_fsdp_prefetch_backward(&c.layer[i], before, b);
    }
    chain_step(&c, true);
    int64_t peak = chain_step(&c, true).gathered;
    chain_free(&c);
    return peak / (DIM * DIM * 4);
}

KN_TEST(schedule, limiter_holds_memory_flat)
{
    for (int most = 1; most <= 4; most++)
        for (int layers = 8; layers <= 32; layers *= 2) {
            int64_t units = greedy_peak(layers, most);
            KN_CHECK(units == most + 1, "%d layers, %d gathers ahead: %lld units gathered", layers,
                     most, (long long)units);
        }
    KN_CHECK(greedy_peak(16, 0) == 3, "two gathers ahead are the default");
}

/* The limit counts what is ahead of its use at each moment. */
KN_TEST(schedule, limiter)
{
    chain c;
    chain_init(&c, 5, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.max_gathers = 2));
    kn_module *all[5];
    for (int i = 0; i < 5; i++)
        all[i] = &c.layer[i].base;
    kn_fsdp_prefetch_forward(&c.layer[0], all + 1, 4);
    check_line("two of four", chain_step(&c, false).counted,
               "g0 g1 g2 F0:3 F1:2 F2:1 g3 F3:1 g4 F4:1");
    chain_free(&c);
}
