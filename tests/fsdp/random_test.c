/* tests/fsdp/random_test.c: some random programs; random_slow.c runs many more. */
#include "tests/fsdp/random.h"

/* Under sanitizers a program takes ten times as long. */
#ifdef __SANITIZE_ADDRESS__
enum { EACH = 15 };
#else
enum { EACH = THREADS_ONLY ? 10 : 50 };
#endif

KN_TEST(random, programs_1)
{
    random_check(1000, EACH);
}
KN_TEST(random, programs_2)
{
    random_check(2000, EACH);
}
KN_TEST(random, programs_3)
{
    random_check(3000, EACH);
}
KN_TEST(random, programs_4)
{
    random_check(4000, EACH);
}

/* What a failure prints repeats it. */
KN_TEST(random, one_program)
{
    const char *text = getenv("KN_RANDOM_PROGRAM");
    random_check_program(text && *text ? text : "m1.kind=linear");
}
