/* tests/fsdp/matrix_slow.c: some hundred random settings against the plain reference. The seed is printed;
 * KN_MATRIX_SEED=... repeats a run, KN_MATRIX_COUNT=... makes it longer. */
#include "tests/fsdp/matrix.h"
#include <time.h>

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *s = getenv(name);
    return s && *s ? strtoull(s, NULL, 0) : otherwise;
}

static void run_some(int part, int parts)
{
    uint64_t seed = from_environment("KN_MATRIX_SEED", (uint64_t)time(NULL));
    uint64_t count = from_environment("KN_MATRIX_COUNT", 480) / (uint64_t)parts;
    uint64_t state = seed * (uint64_t)parts + (uint64_t)part;
    printf("KN_MATRIX_SEED=%llu, part %d of %d: %llu settings\n", (unsigned long long)seed, part,
           parts, (unsigned long long)count);
    for (uint64_t i = 0; i < count; i++) {
        matrix_spec s = matrix_random(&state);
        s.rounds = 1 + (int)(state >> 40 & 3);
        s.skip_sync &= s.rounds > 1 ? ~0u : 0u;
        s.skip_all_reduce &= s.rounds > 1 ? ~0u : 0u;
        s.evaluate = state >> 50 & 1;
        matrix_check(&s);
    }
}

KN_TEST(matrix, random_settings_1)
{
    run_some(0, 4);
}
KN_TEST(matrix, random_settings_2)
{
    run_some(1, 4);
}
KN_TEST(matrix, random_settings_3)
{
    run_some(2, 4);
}
KN_TEST(matrix, random_settings_4)
{
    run_some(3, 4);
}
