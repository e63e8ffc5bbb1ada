/* tests/state/any_state_slow_test.c: two thousand cases of any_state.h. */
#include "tests/state/any_state.h"
#include "tests/kn_test.h"

KN_TEST(any_state_slow, from_any_sharding_into_any_other)
{
    any_check(100000, 2000);
}
