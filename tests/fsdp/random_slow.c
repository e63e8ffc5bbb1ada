/* tests/fsdp/random_slow.c: ten thousand random programs. KN_RANDOM_SEED=... begins elsewhere, KN_RANDOM_COUNT=...
 * runs more or fewer, KN_RANDOM_GO_ON=1 doesn't stop at the first that differs, KN_RANDOM_SHRINK=0 doesn't shrink,
 * KN_RANDOM_PROGRAM='...' is one program by its text (random.one_program of test_fsdp). */
#include "tests/fsdp/random.h"

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *s = getenv(name);
    return s && *s ? strtoull(s, NULL, 0) : otherwise;
}

static void run_part(uint64_t part, uint64_t parts)
{
    uint64_t count = from_environment("KN_RANDOM_COUNT", 10000);
    uint64_t each = count / parts, seed = from_environment("KN_RANDOM_SEED", 100000) + part * each;
    random_check(seed, part + 1 < parts ? each : count - part * each);
    if (each >= 500)
        KN_CHECK(random_coverage(NULL) == 0, "some values never occurred");
}

#define PART(i)                                                                                    \
    KN_TEST(random, many_programs_##i)                                                             \
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
