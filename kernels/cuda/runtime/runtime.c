/* kernels/cuda/runtime/runtime.c: which GPU, and what it is. The CUDA runtime is part of this
 * program; it looks for the driver when it is first asked, here. */
#include "kernels/device.h"
#include "kernels/cuda/runtime/runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct {
    pthread_mutex_t lock;
    bool looked; /* the rest is known */
    pid_t process;
    cudaError_t error; /* of counting */
    int count, index, driver;
    const char *bad_index; /* KNAP_CUDA_DEVICE, where it isn't a number */
    int multiprocessors, arch, reads_pageable;
} gpu = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int chosen = -1;
static _Thread_local bool here; /* this thread works on gpu.index */

/* ---- errors ---------------------------------------------------------------------------------- */

bool kn_cuda_check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return true;
    cudaGetLastError(); /* the runtime forgets it; a broken context stays broken */
    if (e == cudaErrorMemoryAllocation)
        return kn_fail(
            "%s: out of GPU memory; lower the batch, use recompute, or shard over more ranks",
            what);
    if (e == cudaErrorNoKernelImageForDevice)
        return kn_fail("%s: this build has no code for GPUs of sm_%d; build it with -Dgpu_arch=%d",
                       what, gpu.arch, gpu.arch);
    return kn_fail("%s: CUDA says %s (%d); where an earlier kernel may be the cause, "
                   "CUDA_LAUNCH_BLOCKING=1 shows which",
                   what, cudaGetErrorString(e), (int)e);
}

/* ---- which GPU ------------------------------------------------------------------------------- */

void kn_cuda_choose(int index)
{
    chosen = index;
}

static bool parse_index(const char *text, int *index)
{
    char *end;
    long n = strtol(text, &end, 10);
    *index = (int)n;
    return end != text && *end == 0 && n >= 0 && n < 1 << 20;
}

static void look(void)
{
    const char *device = getenv("KNAP_CUDA_DEVICE"), *local = getenv("LOCAL_RANK");
    gpu.process = getpid();
    gpu.error = cudaGetDeviceCount(&gpu.count);
    if (gpu.error != cudaSuccess) {
        gpu.count = 0;
        cudaGetLastError();
    }
    cudaDriverGetVersion(&gpu.driver);
    gpu.index = 0;
    gpu.bad_index = NULL;
    if (chosen >= 0)
        gpu.index = chosen;
    else if (device && *device)
        gpu.bad_index = parse_index(device, &gpu.index) ? NULL : device;
    else if (local && parse_index(local, &gpu.index) && gpu.count > 0)
        gpu.index %= gpu.count;
    gpu.looked = true;
}

/* Of a driver that is there and doesn't start; NULL: another reason. */
static const char *why_not_started(void)
{
    switch (gpu.error) {
    case cudaErrorSystemNotReady:
        return "the GPUs aren't ready (802): on a machine with NVSwitch (HGX, DGX) "
               "nvidia-fabricmanager must run, of the driver's version (systemctl status "
               "nvidia-fabricmanager; nvidia-smi -q shows Fabric: Completed once it does)";
    case cudaErrorSystemDriverMismatch:
        return "the driver's library and its kernel module are of two versions (803): the driver "
               "was updated; load the module again, or restart the machine (in a container: the "
               "container's libcuda.so.1 must be the host's)";
    case cudaErrorCompatNotSupportedOnDevice:
        return "a forward-compatibility package (cuda-compat) is loaded, which this GPU doesn't "
               "support (804): take it out of LD_LIBRARY_PATH, or install a newer driver";
    default:
        return NULL;
    }
}

/* The sentence about what is missing; always false. */
static bool fail_missing(void)
{
    const char *why = why_not_started();
    if (why)
        return kn_fail("device cuda: %s; or use --device cpu", why);
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver)
        return kn_fail(
            "device cuda: this machine has no NVIDIA driver (libcuda.so.1 isn't there); install "
            "one, or use --device cpu");
    dlclose(driver);
    if (gpu.error == cudaErrorInsufficientDriver && gpu.driver > 0)
        return kn_fail(
            "device cuda: the NVIDIA driver knows CUDA %d.%d, this build needs %d.%d; install a "
            "newer driver, or use --device cpu",
            gpu.driver / 1000, gpu.driver % 1000 / 10, CUDART_VERSION / 1000,
            CUDART_VERSION % 1000 / 10);
    if (gpu.error == cudaSuccess || gpu.error == cudaErrorNoDevice ||
        gpu.error == cudaErrorInsufficientDriver)
        return kn_fail("device cuda: an NVIDIA driver is installed, but it shows no GPU; is "
                       "CUDA_VISIBLE_DEVICES "
                       "empty?");
    return kn_fail("device cuda: the NVIDIA driver doesn't start: %s (%d); does nvidia-smi work?",
                   cudaGetErrorString(gpu.error), (int)gpu.error);
}

static bool open_locked(bool quiet)
{
    if (gpu.looked && gpu.process != getpid())
        return !quiet &&
               kn_fail("device cuda: this process was forked after CUDA began in its parent, which "
                       "CUDA doesn't survive; fork first, or start ranks with --ranks");
    if (!gpu.looked)
        look();
    if (gpu.count == 0)
        return !quiet && fail_missing();
    if (gpu.bad_index)
        return !quiet &&
               kn_fail("KNAP_CUDA_DEVICE=%s: not the index of a GPU; this machine has %d, from 0",
                       gpu.bad_index, gpu.count);
    if (gpu.index >= gpu.count)
        return !quiet &&
               kn_fail(
                   "device cuda: no GPU %d: this machine has %d, counted from 0; choose one with "
                   "KNAP_CUDA_DEVICE",
                   gpu.index, gpu.count);
    if (!here) {
        cudaError_t e = cudaSetDevice(gpu.index);
        if (e != cudaSuccess)
            return !quiet && kn_cuda_check(e, "device cuda");
        here = true;
    }
    if (gpu.multiprocessors == 0) {
        int major = 0, minor = 0;
        cudaDeviceGetAttribute(&gpu.multiprocessors, cudaDevAttrMultiProcessorCount, gpu.index);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu.index);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu.index);
        gpu.arch = 10 * major + minor;
        cudaDeviceGetAttribute(&gpu.reads_pageable, cudaDevAttrPageableMemoryAccess, gpu.index);
    }
    return true;
}

static bool opened(bool quiet)
{
    if (here && gpu.process == getpid())
        return true;
    pthread_mutex_lock(&gpu.lock);
    bool ok = open_locked(quiet);
    pthread_mutex_unlock(&gpu.lock);
    return ok;
}

bool kn_cuda_open(void)
{
    return opened(false);
}

bool kn_cuda_usable(void)
{
    return opened(true);
}

bool kn_cuda_available(void)
{
    return opened(true);
}

int kn_cuda_index(void)
{
    return gpu.index;
}

int kn_cuda_arch(void)
{
    return gpu.arch;
}

bool kn_cuda_reads_pageable(void)
{
    return gpu.reads_pageable != 0;
}

int kn_cuda_multiprocessors(void)
{
    return gpu.multiprocessors > 0 ? gpu.multiprocessors : 1;
}

bool kn_cuda_capturing(cudaStream_t s)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(s, &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
}

/* ---- what it is ------------------------------------------------------------------------------ */

static const char *version_of(kn_cuda_library *l, char text[32])
{
    return kn_cuda_library_open(l) || l->version > 0 ? kn_cuda_version_text(l->version, text)
                                                     : "missing";
}

const char *kn_cuda_describe(void)
{
    static _Thread_local char text[512];
    static struct cudaDeviceProp properties;
    char lt[32], dnn[32];
    int runtime = 0;
    if (!kn_cuda_open() ||
        !kn_cuda_check(cudaGetDeviceProperties(&properties, gpu.index), "device cuda"))
        return NULL;
    cudaRuntimeGetVersion(&runtime);
    snprintf(
        text, sizeof text,
        "%s (sm_%d, %.0f GiB, %d multiprocessors), driver %d.%d, CUDA %d.%d, cuBLASLt %s, cuDNN %s",
        properties.name, gpu.arch, (double)properties.totalGlobalMem / (1 << 30),
        gpu.multiprocessors, gpu.driver / 1000, gpu.driver % 1000 / 10, runtime / 1000,
        runtime % 1000 / 10, version_of(&kn_cublaslt_library, lt),
        version_of(&kn_cudnn_library, dnn));
    return text;
}
