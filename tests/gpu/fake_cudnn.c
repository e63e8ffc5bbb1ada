/* tests/gpu/fake_cudnn.c: a cuDNN that makes plans of everything and computes nothing. FAKE_CUDNN
 * says what it refuses of plans that are made for a device's description: "plans", or "runs", or
 * "all" plans of whatever kind; unset: nothing. */
#include <cudnn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

/* Plans that ran: made for a device's description, made for a handle. */
API int fake_cudnn_ran[2];

typedef struct cudnnBackendDescriptor {
    cudnnBackendDescriptorType_t type;
    bool described, by_handle;
} descriptor;

static bool refuses(const char *what)
{
    const char *text = getenv("FAKE_CUDNN");
    return text && strcmp(text, what) == 0;
}

API size_t cudnnGetVersion(void)
{
    return CUDNN_VERSION;
}

API size_t cudnnGetCudartVersion(void)
{
    return 13010;
}

API cudnnStatus_t cudnnCreate(cudnnHandle_t *h)
{
    static int handle;
    *h = (cudnnHandle_t)(void *)&handle;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s)
{
    return h && s ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

API const char *cudnnGetErrorString(cudnnStatus_t s)
{
    return s == CUDNN_STATUS_SUCCESS ? "fine" : "refused";
}

API void cudnnGetLastErrorString(char *text, size_t size)
{
    strncpy(text, "by the fake", size);
}

API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                               cudnnBackendDescriptor_t *d)
{
    *d = calloc(1, sizeof(descriptor));
    ((descriptor *)*d)->type = type;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d)
{
    free(d);
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d,
                                           cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t n,
                                           const void *value)
{
    (void)type, (void)n, (void)value;
    descriptor *to = d;
    to->described |= name == CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
    to->by_handle |= name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d)
{
    const descriptor *of = d;
    bool plan = of->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
    return plan && ((refuses("plans") && of->described) || refuses("all"))
               ? CUDNN_STATUS_NOT_SUPPORTED
               : CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const d,
                                           cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t wanted,
                                           int64_t *n, void *value)
{
    (void)d, (void)type, (void)wanted;
    *n = name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE ? 0 : 1;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        *(int64_t *)value = 0;
    return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan,
                                      cudnnBackendDescriptor_t pack)
{
    const descriptor *p = plan;
    if (!h || !pack || p->described == p->by_handle || (refuses("runs") && p->described))
        return CUDNN_STATUS_BAD_PARAM;
    fake_cudnn_ran[p->by_handle]++;
    return CUDNN_STATUS_SUCCESS;
}
