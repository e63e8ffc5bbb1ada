/* tests/state/any_state.h: the state of a training goes from any sharding into any other: a case is
 * drawn by its seed, and any_check runs cases. any_state_test.c runs some, any_state_slow_test.c
 * many. */
#ifndef KNAP_TESTS_STATE_ANY_STATE_H
#define KNAP_TESTS_STATE_ANY_STATE_H

#include <stdint.h>

/* Cases of seeds first, first + 1, ...; a failure prints its seed and its text. */
void any_check(uint64_t first, int count);

#endif
