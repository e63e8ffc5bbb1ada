/* tests/fsdp/acts_test.c: some random programs of acts (acts.h); acts_slow_test.c runs many. */
#include "tests/fsdp/acts.h"

#ifdef __SANITIZE_ADDRESS__
enum { EACH = 40 };
#else
enum { EACH = THREADS_ONLY ? 20 : 500 };
#endif

KN_TEST(acts, programs)
{
    acts_check(1, EACH);
}

/* Units hold gradients when the root around them is wrapped, which hasn't run yet. */
KN_TEST(acts, a_late_root_reduces_what_its_units_hold)
{
    acts_check_program("0,2 backward:6,1 root:0 reduce:0 step:0");
    acts_check_program("0,2 backward:6,2 root:0 reduce:0 step:0");
    acts_check_program("3,2 backward:6,1 root:0 reduce:0 step:0");
    acts_check_program("3,2 backward:6,2 root:0 reduce:0 step:0");
}

/* A backward that isn't the last all-reduces what another one left in the shard groups. */
KN_TEST(acts, a_part_is_zeroed_while_the_rest_is_open)
{
    acts_check_program("2,1,0,3 backward:7,3 backward:5,2 zero:7 backward:4 step:0");
    acts_check_program("3,1,0,3 backward:7,3 backward:5,2 zero:7 backward:4 step:0");
}

KN_TEST(acts, zeros_of_the_unused_have_every_scale)
{
    acts_check_program("0,1,1,0,0,0,0,0,1 backward:3,0,0,1 measure:0");
    acts_check_program("2,1,1,0,0,0,0,0,1 backward:3,0,0,7 measure:0");
}

KN_TEST(acts, recomputed_parts_frozen_between_forward_and_backward)
{
    acts_check_program("0,0,0,0,0,0,0,0,0,1 backward:1,0,0,0,1 freeze:0,1 step:0");
    acts_check_program("3,0,0,0,0,0,0,0,0,1 backward:5,0,0,0,1,5 backward:2,0,0,0,2 step:0");
}

/* A norm, a scale and a clip are one number on all ranks, whatever the sizes of the groups of each
 * unit; one of them may be a rank alone. */
KN_TEST(acts, groups_of_ranks_of_other_sizes)
{
    acts_check_program("2,0,0,0,0,0,0,0,0,0,0,0,3,0,0 backward:7 measure:0 clip:0 step:0");
    acts_check_program(
        "2,0,0,0,0,0,0,0,0,0,0,0,3,0,0,0,4,0,0,0,1 backward:7 measure:0 clip:0 step:0");
    acts_check_program("3,0,0,0,0,0,0,0,0,0,0,0,4,0,0,0,3,0,0,0,2 backward:7 clip:0,1 step:0");
}

KN_TEST(acts, a_clip_of_sums_that_are_divided_by_less_since_is_refused)
{
    acts_check_program("0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1,0 backward:5 backward:7 clip:0 "
                       "zero:1 step:0");
}

KN_TEST(acts, a_unit_that_is_freed_while_gradients_wait)
{
    acts_check_program("1,1 backward:7,1 free:1 backward:5 step:0");
    acts_check_program("3,0,0,3 backward:7,3 free:0 reduce:0 step:0");
}

/* The printed text of a failure repeats it. */
KN_TEST(acts, one_program)
{
    const char *text = getenv("KN_ACTS");
    acts_check_program(text && *text ? text : "1 backward:1");
}
