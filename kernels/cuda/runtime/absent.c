/* kernels/cuda/runtime/absent.c: the CUDA functions of the public headers, in a build without
 * CUDA. */
#include "kernels/device.h"
#include "kernels/memory.h"

void kn_cuda_choose(int index)
{
    (void)index;
}

bool kn_cuda_available(void)
{
    return false;
}

const char *kn_cuda_describe(void)
{
    kn_device_memory(KN_CUDA); /* the error message */
    return NULL;
}

const char *kn_cuda_lacks(int i)
{
    (void)i;
    return NULL;
}

const char *kn_cuda_choices(void)
{
    return NULL;
}

void kn_cuda_deterministic(bool on)
{
    (void)on;
}

bool kn_cuda_epilogues(const char *list)
{
    (void)list;
    return true;
}

kn_cuda_memory_stats kn_cuda_memory_read(void)
{
    return (kn_cuda_memory_stats){ 0 };
}
