/* kernels/cuda/runtime/providers.c: the providers of the CUDA device, and the options of all of
 * them. */
#include "kernels/device.h"
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/environment.h"
#include "kernels/graph_internal.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

const kn_provider *kn_cuda_own_provider = &kn_cuda_kernels;

int kn_cuda_providers(const kn_provider *out[KN_MAX_PROVIDERS])
{
    int n = 0;
    out[n++] = &kn_cuda_cublaslt;
#ifdef KN_HAVE_CUDNN
    out[n++] = &kn_cuda_cudnn;
#endif
    out[n++] = kn_cuda_own_provider;
    return n;
}

static _Atomic bool tf32, deterministic;
static int sm_target;
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

static bool is_on(const char *name)
{
    bool on = false;
    kn_env_switch(name, &on);
    return on;
}

static void read_environment(void)
{
    int64_t sms = 0;
    atomic_store(&tf32, is_on("KNAP_CUDA_TF32"));
    atomic_store(&deterministic, is_on("KNAP_CUDA_DETERMINISTIC"));
    kn_env_number("KNAP_CUDA_SM_TARGET", 0, 100000, &sms);
    sm_target = (int)sms;
}

void kn_cuda_allow_tf32(bool on)
{
    pthread_once(&environment_once, read_environment);
    atomic_store(&tf32, on);
    kn_changed();
}

void kn_cuda_deterministic(bool on)
{
    pthread_once(&environment_once, read_environment);
    atomic_store(&deterministic, on);
    kn_changed();
}

bool kn_cuda_tf32(void)
{
    pthread_once(&environment_once, read_environment);
    return atomic_load_explicit(&tf32, memory_order_relaxed);
}

bool kn_cuda_is_deterministic(void)
{
    pthread_once(&environment_once, read_environment);
    return atomic_load_explicit(&deterministic, memory_order_relaxed);
}

int kn_cuda_sm_target(void)
{
    pthread_once(&environment_once, read_environment);
    return sm_target;
}
