/* tests/fsdp/random_slow_test.c: ten thousand random programs. KN_RANDOM_SEED=... sets the first
 * seed, KN_RANDOM_COUNT=... the number, KN_RANDOM_GO_ON=1 continues after the first difference,
 * KN_RANDOM_SHRINK=0 doesn't shrink, KN_RANDOM_PROGRAM='...' is one program by its text
 * (random.one_program of test_fsdp). */
#include "tests/fsdp/random.h"

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *s = getenv(name);
    return s && *s ? strtoull(s, NULL, 0) : otherwise;
}

static uint64_t count(void)
{
    return from_environment("KN_RANDOM_COUNT", 10000);
}

static uint64_t first(void)
{
    return from_environment("KN_RANDOM_SEED", 100000);
}

/* The programs contain every value of every option. */
KN_TEST(random_slow, every_value_occurs)
{
    for (uint64_t i = 0; i < count(); i++) {
        random_program p = random_draw(first() + i);
        random_coverage(&p);
    }
    int never = random_coverage(NULL);
    KN_CHECK(never == 0 || count() < 5000, "%d values never occurred", never);
}

static void run_part(uint64_t part, uint64_t parts)
{
    uint64_t each = count() / parts;
    random_check(first() + part * each, part + 1 < parts ? each : count() - part * each);
}

#define PART(i)                                                                                    \
    KN_TEST(random_slow, many_programs_##i)                                                        \
    {                                                                                              \
        run_part(i - 1, 10);                                                                       \
    }
PART(1)
PART(2)
PART(3)
PART(4)
PART(5)
PART(6)
PART(7)
PART(8)
PART(9)
PART(10)
