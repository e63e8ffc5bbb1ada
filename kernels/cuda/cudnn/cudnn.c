/* kernels/cuda/cudnn/cudnn.c: the provider of cuDNN's computations. */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/runtime/runtime.h"

/* How each kernel is computed: the first way that has a plan. */
static const kn_dnn_kernel *const ways[KN_K_COUNT][2] = {
    [KN_K_ATTENTION] = { &kn_dnn_attention_forward },
    [KN_K_ATTENTION_GRAD] = { &kn_dnn_attention_backward, &kn_dnn_attention_backward_dense },
    [KN_K_CONV] = { &kn_dnn_conv_y },
    [KN_K_CONV_GRAD_X] = { &kn_dnn_conv_x },
    [KN_K_CONV_GRAD_W] = { &kn_dnn_conv_w, &kn_dnn_conv_w_wide },
    [KN_K_BATCH_NORM] = { &kn_dnn_batch_norm_y },
    [KN_K_BATCH_NORM_GRAD] = { &kn_dnn_batch_norm_x },
};

static kn_status run(kn_kernel k, const void *args)
{
    kn_status s = KN_DECLINED;
    for (int i = 0; i < 2 && ways[k][i] && s == KN_DECLINED; i++)
        s = kn_dnn_run(k, ways[k][i], args);
    return s;
}

#define ENTRY(name, k)                                                                             \
    static kn_status name(const void *args)                                                        \
    {                                                                                              \
        return run(k, args);                                                                       \
    }
ENTRY(attention, KN_K_ATTENTION)
ENTRY(attention_grad, KN_K_ATTENTION_GRAD)
ENTRY(conv, KN_K_CONV)
ENTRY(conv_grad_x, KN_K_CONV_GRAD_X)
ENTRY(conv_grad_w, KN_K_CONV_GRAD_W)
ENTRY(batch_norm, KN_K_BATCH_NORM)
ENTRY(batch_norm_grad, KN_K_BATCH_NORM_GRAD)

const kn_provider kn_cuda_cudnn = {
    .name = "cudnn",
    .run = { [KN_K_ATTENTION] = attention,
             [KN_K_ATTENTION_GRAD] = attention_grad,
             [KN_K_CONV] = conv,
             [KN_K_CONV_GRAD_X] = conv_grad_x,
             [KN_K_CONV_GRAD_W] = conv_grad_w,
             [KN_K_BATCH_NORM] = batch_norm,
             [KN_K_BATCH_NORM_GRAD] = batch_norm_grad },
};

bool kn_cudnn_try(const char *json, int arch, kn_kernel k, const void *args, kn_dnn_found *found)
{
    bool made = false;
    for (int i = 0; i < 2 && ways[k][i] && !made; i++)
        made = kn_dnn_try(json, arch, k, ways[k][i], args, found);
    return made;
}
