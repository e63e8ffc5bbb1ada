/* tests/fsdp/acts_slow_test.c: many random programs of acts, from KN_RANDOM_SEED on,
 * KN_RANDOM_COUNT of them; KN_RANDOM_GO_ON=1 continues after the first difference. */
#include "tests/fsdp/acts.h"

KN_TEST(acts_slow, many_programs)
{
    const char *seed = getenv("KN_RANDOM_SEED"), *count = getenv("KN_RANDOM_COUNT");
    acts_check(seed ? strtoull(seed, NULL, 0) : 100000, count ? strtoull(count, NULL, 0) : 10000);
}
