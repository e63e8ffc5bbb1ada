/* tests/fsdp/matrix_reference_test.c: the reference of the matrix is itself plain training. */
#include "tests/fsdp/matrix.h"

KN_TEST(matrix, reference_is_plain_accumulation)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        matrix_check_reference(m);
}
