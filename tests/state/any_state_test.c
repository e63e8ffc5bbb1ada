/* tests/state/any_state_test.c: some of the cases of any_state.h; any_state_slow_test.c runs many
 * more. */
#include "tests/state/any_state.h"
#include "tests/kn_test.h"

#include <stdlib.h>

KN_TEST(any_state, from_any_sharding_into_any_other)
{
    any_check(1, 60 / kn_one_in(3));
}

/* KN_ANY_SEED=... repeats the case that a failure names. */
KN_TEST(any_state, one_case)
{
    const char *seed = getenv("KN_ANY_SEED");
    any_check(seed && *seed ? strtoull(seed, NULL, 0) : 1, 1);
}
