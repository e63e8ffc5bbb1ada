/* tests/fsdp/acts_test.c: some random programs of acts (acts.h); acts_slow_test.c runs many. */
#include "tests/fsdp/acts.h"

/* Under sanitizers fewer, and others. */
enum { FIRST = SANITIZED ? 501 : 1, EACH = SANITIZED ? 40 : THREADS_ONLY ? 20 : 500 };

KN_TEST(acts, programs)
{
    acts_check(FIRST, EACH);
}

/* ---- programs with a name -------------------------------------------------------------------- */

typedef struct named {
    int ranks;            /* 1 to 4; 0: all of these */
    const char *settings; /* those after the ranks: root, optimizers, strategy, ... (acts.h) */
    const char *acts;
} named;

static void check(const named *program, int count)
{
    for (int i = 0; i < count; i++)
        for (int ranks = 1; ranks <= ACTS_RANKS; ranks++) {
            char text[512];
            const named *p = &program[i];
            snprintf(text, sizeof text, "%d%s%s %s", ranks - 1, *p->settings ? "," : "",
                     p->settings, p->acts);
            if (!p->ranks || p->ranks == ranks)
                KN_CHECK(acts_check_program(text), "an act is left out: %s", text);
        }
}
#define CHECK(...)                                                                                 \
    check((const named[]){ __VA_ARGS__ }, sizeof((const named[]){ __VA_ARGS__ }) / sizeof(named))

/* Units hold gradients when the root around them is wrapped, which hasn't run yet. */
KN_TEST(acts, a_late_root_reduces_what_its_units_hold)
{
    CHECK({ 0, "2", "backward:6,1 root:0 reduce:0 step:0" },
          { 0, "2", "backward:6,2 root:0 reduce:0 step:0" },
          { 0, "2", "backward:7,1 root:0 backward:1 step:0" });
}

/* A backward that isn't the last all-reduces what another one left in the shard groups. */
KN_TEST(acts, a_part_is_zeroed_while_the_rest_is_open)
{
    CHECK({ 3, "1,0,3", "backward:7,3 backward:5,2 zero:7 backward:4 step:0" },
          { 4, "1,0,3", "backward:7,3 backward:5,2 zero:7 backward:4 step:0" });
}

KN_TEST(acts, zeros_of_the_unused_have_every_scale)
{
    CHECK({ 1, "1,1,0,0,0,0,0,1", "backward:3,0,0,1 measure:0" },
          { 3, "1,1,0,0,0,0,0,1", "backward:3,0,0,7 measure:0" });
}

KN_TEST(acts, recomputed_parts_frozen_between_forward_and_backward)
{
    CHECK({ 1, "0,0,0,0,0,0,0,0,1", "backward:1,0,0,0,1 freeze:0,1 step:0" },
          { 4, "0,0,0,0,0,0,0,0,1", "backward:5,0,0,0,1,5 backward:2,0,0,0,2 step:0" });
}

/* A norm, a scale and a clip are one number on all ranks, whatever the sizes of the groups of each
 * unit; one of them may be a rank alone. */
KN_TEST(acts, groups_of_ranks_of_other_sizes)
{
    CHECK({ 3, "0,0,0,0,0,0,0,0,0,0,0,3,0,0", "backward:7 measure:0 clip:0 step:0" },
          { 3, "0,0,0,0,0,0,0,0,0,0,0,3,0,0,0,4,0,0,0,1", "backward:7 measure:0 clip:0 step:0" },
          { 4, "0,0,0,0,0,0,0,0,0,0,0,4,0,0,0,3,0,0,0,2", "backward:7 clip:0,1 step:0" });
}

KN_TEST(acts, a_clip_of_sums_that_are_divided_by_less_since_is_refused)
{
    KN_CHECK(!acts_check_program("0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1,0 backward:5 "
                                 "backward:7 clip:0 zero:1 step:0"));
}

KN_TEST(acts, a_unit_that_is_freed_while_gradients_wait)
{
    CHECK({ 2, "1", "backward:7,1 free:1 backward:5 step:0" },
          { 4, "0,0,3", "backward:7,3 free:0 reduce:0 step:0" });
}

KN_TEST(acts, a_gradient_of_before_the_wrap_is_refused)
{
    CHECK({ 1, "0,0,0,0,0,0,0,0,0,0,0,0,0,1", "backward:7 step:0" });
}

/* ---- what divides a gradient ----------------------------------------------------------------- */

KN_TEST(acts, dropped_gradients_are_not_counted)
{
    CHECK({ 0, "1", "backward:7 backward:7 zero:0 backward:7 clip:0 step:0" },
          { 0, "1", "backward:7,1 backward:7,1 zero:0 backward:7 clip:0,1,1 step:0" },
          { 0, "1,0,3", "backward:7,2 backward:7,3 zero:0 backward:7 step:0" },
          { 0, "0", "backward:7 zero:0 backward:7 clip:0 step:0" });
}

/* As of a GAN: the first backward's gradients of a part are dropped, which steps by itself. */
KN_TEST(acts, gradients_of_a_part_are_dropped)
{
    CHECK({ 0, "1,1", "backward:7 zero:3 backward:7 measure:3 step:3 step:1 step:2" },
          { 0, "1,1", "backward:7,1 zero:2 backward:7 step:1 step:2 step:3" });
    for (int param = 0; param < ACTS_PARAMS; param++) { /* kn_clear_grad */
        char acts[128];
        snprintf(acts, sizeof acts, "backward:7,%d,1 zero:%d backward:7,0,1 step:0", param % 4,
                 ACTS_PLACES + param);
        CHECK({ 1 + param % 4, "1,0,3", acts });
    }
}

/* Optimizers of parts, or of layers of one unit: each counts its own micro-batches. */
KN_TEST(acts, several_losses_and_optimizers)
{
    CHECK({ 0, "1,1", "backward:1 backward:6 backward:6 clip:0,0,1 step:1 step:2 step:3" },
          { 0, "1,1", "backward:7 step:1 backward:7 step:2 step:1 backward:7 step:1 step:3" },
          { 0, "0,4", "backward:7 step:4 backward:7 step:4 step:2 step:0" },
          { 0, "1,4", "backward:7,1 backward:7 step:4 backward:3 step:4 step:0" },
          { 0, "0,5", "backward:7 step:4 backward:7 step:4 step:1 step:2" });
}

/* Rank 0 alone reaches a part that is then frozen, in a backward without sync, or in one whose
 * forward came before. */
KN_TEST(acts, gradients_of_what_is_frozen_meanwhile_stay)
{
    CHECK({ 0, "1", "backward:3,1,0,14 freeze:2,0 backward:3 freeze:2,1 step:0" },
          { 0, "1", "backward:3,0,0,14,1,2 freeze:2,1 step:0" },
          { 0, "0", "backward:3,1 freeze:2,0 backward:3 freeze:2,1 step:0" });
}

/* Of a part that is frozen when it is wrapped, and of one that trains then, in each layout. */
KN_TEST(acts, parameters_are_frozen_and_switched_on_after_wrapping)
{
#define COLD ",0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1"
    const char *acts =
        "backward:7 step:0 freeze:3,1 freeze:2,0 backward:7 clip:0 step:0 backward:7 "
        "freeze:10,0 freeze:2,1 backward:7 step:0";
    CHECK({ 0, "1,0,0,0" COLD, acts }, { 0, "1,0,1,1" COLD, acts }, { 0, "1,0,0,2" COLD, acts },
          { 4, "0,0,3,1" COLD, acts });
}

/* Nothing but the call reduces what waits. */
KN_TEST(acts, gradients_that_wait_are_reduced_without_a_backward)
{
    CHECK({ 0, "1", "backward:7,1,0,14 reduce:0 step:0" },
          { 0, "1", "backward:7,2 reduce:0 step:0" },
          { 0, "1,0,3", "backward:7,3,0,14 reduce:0 step:0" },
          { 0, "0", "backward:7,1 backward:1 reduce:2 reduce:3 step:0" });
}

KN_TEST(acts, backwards_that_are_not_the_last)
{
    CHECK({ 0, "1", "backward:7,2 backward:7,2 backward:7,2 backward:7 step:0" },
          { 0, "1,0,1", "backward:7,2 backward:7,1 backward:7,2 backward:7 step:0" },
          { 0, "1,0,2", "backward:7,2 backward:3,2 backward:7 step:0" },
          { 0, "1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1",
            "backward:7,2 backward:7,2 backward:7 step:0" });
}

/* Whatever its unit's factor is; summoned or not. */
KN_TEST(acts, an_edit_of_a_gradient_holds)
{
    for (int param = 0; param < ACTS_GAIN; param++) {
        char acts[128];
        snprintf(acts, sizeof acts, "backward:7 edit:%d,%d,%d clip:0,0,1,1 step:0", param,
                 param % 2, param / 2 % 2);
        CHECK({ 1 + param % 4, "1", acts },
              { 2, "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1", acts });
    }
}

KN_TEST(acts, measuring_leaves_a_clipped_step_clipped)
{
    CHECK({ 0, "1", "backward:7 clip:0,0,1,1 measure:0 measure:2 step:0" },
          { 0, "0", "backward:7 clip:0,1,1,1 measure:3,2 step:0" });
}

/* The ranks that hold no part of what overflows skip the step as well. */
KN_TEST(acts, an_overflow_on_one_rank_skips_the_step_on_all)
{
#define SCALED ",0,0,0,0,0,0,0,1"
    static const char *const settings[] = {
        "1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0" SCALED,
        "1,0,1,1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0" SCALED,
        "1,0,2,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0" SCALED,
        "1,0,3,2,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0" SCALED,
        "0,0,0,0,0,0,0,0,0,0,0,1,0,0,0,2,0,0,0,3,0,0" SCALED, /* on groups of ranks */
    };
    for (int i = 0; i < 5; i++)
        for (int param = 0; param < 4; param++) {
            char acts[128];
            snprintf(acts, sizeof acts,
                     "backward:7 step:0 backward:7 edit:%d,2 step:0 backward:7 clip:0,0,1 step:0",
                     5 * param % 12);
            CHECK({ 0, settings[i], acts });
        }
}

/* The printed text of a failure repeats it. */
KN_TEST(acts, one_program)
{
    const char *text = getenv("KN_ACTS");
    acts_check_program(text && *text ? text : "1 backward:1");
}
