/* tests/fsdp/schedule_test.c: the order in which units are gathered, run, reduced and released,
 * read from the trace of a step on meta among simulated ranks (chain.h). */
#include "fsdp/schedule.h"
#include "schedule_head.h"
#include "tests/fsdp/chain.h"
#include "tensor/tensor_internal.h"
#include "tests/owned.h"

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

static void check_step(const char *what, const char *want, int ranks, kn_fsdp_wrap_options o)
{
    chain_check_line(what, second_step(3, ranks, o).line, want);
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

/* ---- strategies ------------------------------------------------------------------------------ */

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
        chain_check_line("order", t.line, c[i].line);
        double units = (double)t.gathered / (DIM * DIM * 4);
        KN_CHECK(units == c[i].units, "reshard %d: %g units gathered", c[i].reshard, units);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

KN_TEST(schedule, forward_prefetch)
{
    CHAIN(c, 3, 2, .forward_prefetch = true);
    chain_check_line("the first step knows no order", chain_step(&c, true).line,
                     "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
    chain_check_line("the second does", chain_step(&c, true).line,
                     "g0 g1 F0 g2 F1 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
    chain_check_line("evaluation too", chain_step(&c, false).line, "g0 g1 F0 g2 F1 F2");
    memcpy(c.order, (int[]){ 2, 0, 1 }, 3 * sizeof(int));
    chain_step(&c, false);
    chain_check_line("evaluations have an order of their own", chain_step(&c, false).line,
                     "g2 g0 F2 g1 F0 F1");
    memcpy(c.order, (int[]){ 0, 1, 2 }, 3 * sizeof(int));
    chain_check_line("which training doesn't know", chain_step(&c, true).line,
                     "g0 g1 F0 g2 F1 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
}

KN_TEST(schedule, a_refused_call_changes_no_order)
{
    CHAIN(c, 3, 2, .forward_prefetch = true);
    chain_step(&c, true);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_ones(KN_F32, KN_META, KN_SHAPE(4, DIM));
    kn_unit_of(c.base.impl)->state = KN_UNIT_POST_BACKWARD;
    REFUSED(kn_call(&c, x), "done with backward");
    kn_unit_of(c.base.impl)->state = KN_UNIT_IDLE;
    kn_scope_end(scope);
    chain_check_line("what is known of the step before stays", chain_step(&c, true).line,
                     "g0 g1 F0 g2 F1 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0");
}

KN_TEST(schedule, changed_order)
{
    chain c;
    chain_init(&c, 3, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.forward_prefetch = true));
    chain_step(&c, true);
    memcpy(c.order, (int[]){ 1, 0, 2 }, 3 * sizeof(int));
    chain_check_line("the old order is gathered, the new one runs", chain_step(&c, true).line,
                     "g0 g1 g2 F1 F0 F2 g2 g0 B2 s2 g1 B0 s0 B1 s1");
    chain_check_line("and is known from then on", chain_step(&c, true).line,
                     "g1 g0 F1 g2 F0 F2 g2 g0 B2 s2 g1 B0 s0 B1 s1");
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0, "nothing stays gathered");
    chain_free(&c);
    chain_init(&c, 3, DIM, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.backward_prefetch = KN_PREFETCH_POST));
    chain_step(&c, true);
    memcpy(c.order, (int[]){ 1, 0, 2 }, 3 * sizeof(int));
    chain_check_line("backward gathers by the forward just run", chain_step(&c, true).line,
                     "g1 F1 g0 F0 g2 F2 g2 B2 g0 s2 B0 g1 s0 B1 s1");
    chain_free(&c);
}

KN_TEST(schedule, branch_skips_a_unit)
{
    CHAIN(c, 3, 2, .forward_prefetch = true);
    chain_step(&c, true);
    memcpy(c.order, (int[]){ 0, 2 }, 2 * sizeof(int));
    c.runs = 2;
    chain_check_line("layer 1 is gathered in vain", chain_step(&c, true).line,
                     "g0 g1 F0 g2 F2 g2 g0 B2 s2 B0 s0");
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == 0, "nothing stays gathered");
    chain_check_line("once", chain_step(&c, true).line, "g0 g2 F0 F2 g2 g0 B2 s2 B0 s0");
}

/* Each layer called directly is an outermost call of its own: a loop over layers, beside forwards
 * that no backward follows, is reduced layer by layer all the same. */
KN_TEST(schedule, layers_called_one_by_one)
{
    CHAIN(c, CHAIN_MAX, 2);
    chain_step(&c, true);
    kn_ledger_reset_peaks();
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_zeros(KN_F32, KN_META, KN_SHAPE(c.batch, c.dim));
    for (int i = 0; i < 30; i++)
        kn_call(&c.layer[i], x);
    for (int i = 0; i < CHAIN_MAX; i++)
        x = kn_call(&c.layer[i], x);
    KN_CHECK(kn_backward(sum_of(x)));
    kn_scope_end(scope);
    int64_t layer = DIM * DIM * 4, unreduced = kn_ledger_read().peak[KN_MEM_UNREDUCED];
    KN_CHECK(unreduced == 2 * layer, "gradients of %g layers at a time",
             (double)unreduced / (double)layer);
    int64_t gathered = kn_ledger_read().peak[KN_MEM_GATHERED];
    KN_CHECK(gathered == 2 * layer, "%g layers are gathered at a time",
             (double)gathered / (double)layer);
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
        CHAIN(c, 3, 2, .backward_prefetch = p);
        kn_recompute(&c, true);
        chain_step(&c, true);
        chain_trace t = chain_step(&c, true);
        chain_check_line("all in one call", t.counted, counted[p - KN_PREFETCH_PRE]);
        KN_CHECK(t.unreduced == 2 * DIM * DIM * 4, "%lld bytes of gradients at a time",
                 (long long)t.unreduced);
    }
}

KN_TEST(schedule, module_used_twice)
{
    CHAIN(c, 2, 2);
    memcpy(c.order, (int[]){ 0, 1, 0 }, 3 * sizeof(int));
    c.runs = 3;
    chain_step(&c, true);
    chain_check_line("layer 0 is reduced once, after its first call's backward",
                     chain_step(&c, true).line, "g0 F0 g1 F1 g0 F0 g0 g1 B0 B1 s1 B0 s0");
}

/* Nothing reads layer 0 in backward, whose input needs no gradient. */
KN_TEST(schedule, units_that_backward_does_not_need)
{
    static const char *const want[] = { "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 B1 s1 B0 s0",
                                        "g0 F0 g1 F1 g2 F2 g2 B2 g1 s2 B1 s1 B0 s0",
                                        "g0 F0 g1 F1 g2 F2 g2 B2 s2 g1 B1 s1 B0 s0" };
    for (int i = 0; i < 3; i++) {
        CHAIN(c, 3, 2, .backward_prefetch = KN_PREFETCH_PRE + i);
        KN_CHECK(kn_fsdp_set_unshard_in_backward(&c.layer[0], false, false));
        chain_step(&c, true);
        chain_check_line("layer 0 stays sharded", chain_step(&c, true).line, want[i]);
        kn_module *all[3] = { &c.layer[0].base, &c.layer[1].base, &c.layer[2].base };
        kn_fsdp_prefetch_backward(&c.layer[2], all, 3);
        chain_check_line("in lists too", chain_step(&c, true).line, want[0]);
        KN_CHECK(kn_recompute(&c.layer[0], true));
        chain_check_line("gathered where it runs again", chain_step(&c, true).line,
                         "g0 F0 g1 F1 g2 F2 g2 g0 g1 B2 s2 B1 s1 B0 F0 s0");
    }
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
    chain_check_line("gathered before the first, released after the last",
                     chain_step(&c, true).line, "g0 F0 F1 g2 F2 g2 g0 B2 s2 B1 B0 s0");
    chain_free(&c);
}

/* A forward of the group's first module ends one that ran a part of the group. */
KN_TEST(schedule, a_part_of_a_group_again)
{
    chain c;
    chain_init(&c, 2, DIM, 4);
    c.world = kn_comm_simulated(2, 0, 1e6);
    kn_module *pair[2] = { &c.layer[0].base, &c.layer[1].base };
    KN_CHECK(kn_fsdp_wrap_group(pair, 2, c.world, .device = KN_META));
    c.runs = 1;
    for (int i = 0; i < 3; i++)
        chain_check_line("a part", chain_step(&c, false).line, "g0 F0");
    c.runs = 2;
    chain_check_line("all of it", chain_step(&c, false).line, "g0 F0 F1");
    KN_CHECK(kn_fsdp_wrap(&c, c.world, .device = KN_META));
    c.runs = 1;
    chain_check_line("a part, in a root", chain_step(&c, false).line, "g0 F0");
    c.runs = 2;
    chain_check_line("all, in a root", chain_step(&c, false).line, "g0 F0 F1");
    chain_free(&c);
}

/* ---- accumulation ---------------------------------------------------------------------------- */

KN_TEST(schedule, no_sync)
{
    CHAIN(c, 2, 2);
    kn_fsdp_set_gradient_sync(&c, false, true);
    chain_check_line("no reduction", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 B0");
    int64_t held = kn_ledger_read().live[KN_MEM_UNREDUCED];
    KN_CHECK(held == 2 * DIM * DIM * 4, "%lld bytes of whole gradients", (long long)held);
    kn_fsdp_set_gradient_sync(&c, true, true);
    chain_check_line("the sum is reduced", chain_step(&c, true).line,
                     "g0 F0 g1 F1 g1 g0 B1 s1 B0 s0");
    KN_CHECK(kn_ledger_read().live[KN_MEM_UNREDUCED] == 0);
    kn_fsdp_set_gradient_sync(&c.layer[1], false, false);
    chain_check_line("one unit only", chain_step(&c, true).line, "g0 F0 g1 F1 g1 g0 B1 B0 s0");
}

KN_TEST(schedule, all_reduce_on_the_last_micro_batch)
{
    CHAIN(c, 2, 4, .strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 });
    kn_fsdp_set_all_reduce(&c, false, true);
    chain_check_line("inside the group", chain_step(&c, true).line,
                     "g0 F0 g1 F1 g1 g0 B1 s1 B0 s0");
    kn_fsdp_set_all_reduce(&c, true, true);
    chain_check_line("over replicas", chain_step(&c, true).line,
                     "g0 F0 g1 F1 g1 g0 B1 s1 a1 B0 s0 a0");
}

/* It is gathered and released as others are, and reduces nothing; behind it nothing is gathered
 * that only frozen units hold. */
KN_TEST(schedule, a_frozen_unit)
{
    for (int frozen = 0; frozen < 3; frozen++) {
        static const char *const want[] = { "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 B1 s1",
                                            "g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 g0 B1 B0 s0",
                                            "g0 F0 g1 F1 g2 F2 g2 g1 B2 g0 B1 s1 B0 s0" };
        chain c;
        chain_init(&c, 3, DIM, 4);
        kn_freeze(&c.layer[frozen], true);
        chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.strategy = KN_FULL_SHARD));
        chain_step(&c, true);
        chain_check_line("frozen", chain_step(&c, true).line, want[frozen]);
        KN_CHECK(c.gathered == 0, "%d layers stay gathered", c.gathered);
        chain_free(&c);
    }
}

/* A forward without gradients releases what one with them would keep, and leaves no turn for a
 * backward. */
KN_TEST(schedule, evaluation_leaves_nothing)
{
    CHAIN(c, 3, 2, .reshard_after_forward = KN_RESHARD_NEVER);
    chain_check_line("training keeps them", chain_step(&c, true).counted,
                     "g0 F0:1 g1 F1:2 g2 F2:3 B2:3 s2 B1:2 s1 B0:1 s0");
    const kn_order *order = &kn_unit_of(c.base.impl)->schedule->order;
    const int visits = order->visits, forwards = order->forwards;
    chain_check_line("evaluation", chain_step(&c, false).counted, "g0 F0:1 g1 F1:1 g2 F2:1");
    KN_CHECK(c.gathered == 0 && order->visits == visits && order->forwards == forwards,
             "%d layers stay gathered, %d visits, %d forwards", c.gathered, order->visits,
             order->forwards);
}

KN_TEST(schedule, keep_gathered_across_micro_batches)
{
    CHAIN(c, 2, 2);
    OWNED_OPTIM kn_optim *opt = kn_sgd(&c, .lr = 0.1);
    kn_fsdp_set_reshard_after_backward(&c, false, true);
    chain_step(&c, true);
    chain_check_line("after the first micro-batch backward leaves them", chain_step(&c, true).line,
                     "F0 F1 g1 g0 B1 s1 B0 s0");
    kn_fsdp_set_reshard_after_forward(&c, KN_RESHARD_NEVER, true);
    chain_step(&c, true);
    chain_check_line("and forward too", chain_step(&c, true).line, "F0 F1 B1 s1 B0 s0");
    KN_CHECK(kn_step(opt));
    chain_check_line("until a step changes them", chain_step(&c, true).line,
                     "g0 F0 g1 F1 B1 s1 B0 s0");
}
