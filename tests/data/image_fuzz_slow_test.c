/* tests/data/image_fuzz_slow_test.c: many rounds of tests/data/image_fuzz.h. */
#include "tests/data/image_fuzz.h"

KN_TEST(image_fuzz_slow, many_changes)
{
    fuzz_images(3000, 1000000);
}
