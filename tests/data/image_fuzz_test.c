/* tests/data/image_fuzz_test.c: some rounds of tests/data/image_fuzz.h. */
#include "tests/data/image_fuzz.h"

KN_TEST(image_fuzz, some_changes)
{
    fuzz_images(0, 3000);
}
