/* tests/fsdp/acts_test.c: some random programs of acts (acts.h); acts_slow_test.c runs many. */
#include "tests/fsdp/acts.h"

#ifdef __SANITIZE_ADDRESS__
enum { EACH = 40 };
#else
enum { EACH = THREADS_ONLY ? 20 : 300 };
#endif

KN_TEST(acts, programs)
{
    acts_check(1, EACH);
}

/* The printed text of a failure repeats it. */
KN_TEST(acts, one_program)
{
    const char *text = getenv("KN_ACTS");
    acts_check_program(text && *text ? text : "1 backward:1");
}
