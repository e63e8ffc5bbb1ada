/* tests/kernels/cuda_emulated_test.c: what the overlay's cases don't reach of the CUDA kernels, on the host
 * (kernels/cuda/emulate.h). */
#include "kernels/cuda/cuda_internal.h"
#include "tests/kernels/overlay.h"

/* The layer has no fallback: an empty entry is a call that fails on a GPU. */
KN_TEST(cuda_emulated, no_entry_is_empty)
{
    for (int k = 0; k < KN_K_COUNT; k++)
        KN_CHECK(kn_cuda_kernels.run[k], "%s has no kernel", kn_kernel_name((kn_kernel)k));
}
