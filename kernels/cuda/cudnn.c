/* kernels/cuda/cudnn.c: the layer of what cuDNN computes. */
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/runtime.h"

static const kn_dnn_kernel *const ways[KN_K_COUNT] = {
    [KN_K_ATTENTION] = &kn_dnn_attention_forward,
    [KN_K_ATTENTION_GRAD] = &kn_dnn_attention_backward,
};

#define ENTRY(name, k)                                                                             \
    static kn_status name(const void *args)                                                        \
    {                                                                                              \
        return kn_dnn_run(k, ways[k], args);                                                       \
    }
ENTRY(attention, KN_K_ATTENTION)
ENTRY(attention_grad, KN_K_ATTENTION_GRAD)

const kn_layer kn_cuda_cudnn = {
    .name = "cudnn",
    .run = { [KN_K_ATTENTION] = attention, [KN_K_ATTENTION_GRAD] = attention_grad },
};

bool kn_cudnn_try(const char *json, int arch, kn_kernel k, const void *args, kn_dnn_found *found)
{
    return ways[k] && kn_dnn_try(json, arch, k, ways[k], args, found);
}
