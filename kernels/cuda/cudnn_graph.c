/* kernels/cuda/cudnn_graph.c: cuDNN's backend interface, with one word for each step. cuDNN describes
 * everything by descriptors with attributes; whatever it refuses makes the graph bad, which is looked at
 * once, when the plan is made. */
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/runtime.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define SONAME  "libcudnn.so.9"
#define CONFIGS 16

static struct {
    cudnnStatus_t (*make)(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *);
    cudnnStatus_t (*destroy)(cudnnBackendDescriptor_t);
    cudnnStatus_t (*finalize)(cudnnBackendDescriptor_t);
    cudnnStatus_t (*set)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                         cudnnBackendAttributeType_t, int64_t, const void *);
    cudnnStatus_t (*get)(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t,
                         cudnnBackendAttributeType_t, int64_t, int64_t *, void *);
    cudnnStatus_t (*execute)(cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t);
    cudnnStatus_t (*create)(cudnnHandle_t *);
    cudnnStatus_t (*set_stream)(cudnnHandle_t, cudaStream_t);
    const char *(*status)(cudnnStatus_t);
    void (*last)(char *, size_t);
    bool loaded;
} dnn;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static cudnnHandle_t handle;

bool kn_dnn_load(void)
{
    const kn_cuda_symbol symbols[] = {
        { "cudnnBackendCreateDescriptor", &dnn.make },
        { "cudnnBackendDestroyDescriptor", &dnn.destroy },
        { "cudnnBackendFinalize", &dnn.finalize },
        { "cudnnBackendSetAttribute", &dnn.set },
        { "cudnnBackendGetAttribute", &dnn.get },
        { "cudnnBackendExecute", &dnn.execute },
        { "cudnnCreate", &dnn.create },
        { "cudnnSetStream", &dnn.set_stream },
        { "cudnnGetErrorString", &dnn.status },
        { "cudnnGetLastErrorString", &dnn.last },
    };
    pthread_mutex_lock(&lock);
    if (!dnn.loaded) {
        void *library = kn_cuda_library(SONAME, "attention on cuda");
        dnn.loaded =
            library && kn_cuda_symbols(library, SONAME, symbols, sizeof symbols / sizeof *symbols);
    }
    bool ok = dnn.loaded;
    pthread_mutex_unlock(&lock);
    return ok;
}

const char *kn_dnn_said(char *text, size_t size)
{
    text[0] = 0;
    dnn.last(text, size);
    return text;
}

/* ---- descriptors ---------------------------------------------------------------------------------- */

static bool make(cudnnBackendDescriptorType_t type, kn_dnn_desc *d)
{
    *d = NULL;
    return dnn.make(type, d) == CUDNN_STATUS_SUCCESS;
}

static bool put(kn_dnn_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t n, const void *value)
{
    return dnn.set(d, name, type, n, value) == CUDNN_STATUS_SUCCESS;
}

static bool put_desc(kn_dnn_desc d, cudnnBackendAttributeName_t name, kn_dnn_desc value)
{
    return put(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static bool finish(kn_dnn_desc d)
{
    return dnn.finalize(d) == CUDNN_STATUS_SUCCESS;
}

void kn_dnn_destroy(kn_dnn_desc d)
{
    if (d)
        dnn.destroy(d);
}

/* A descriptor that the graph owns. */
static kn_dnn_desc fresh(kn_dnn_graph *g, cudnnBackendDescriptorType_t type)
{
    kn_dnn_desc d = NULL;
    if (g->count == KN_DNN_DESCS || !make(type, &d)) {
        g->bad = true;
        return NULL;
    }
    return g->all[g->count++] = d;
}

static void set(kn_dnn_graph *g, kn_dnn_desc d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t n, const void *value)
{
    g->bad = g->bad || !put(d, name, type, n, value);
}

static void set_desc(kn_dnn_graph *g, kn_dnn_desc d, cudnnBackendAttributeName_t name,
                     kn_dnn_desc value)
{
    g->bad = g->bad || !put_desc(d, name, value);
}

static void end(kn_dnn_graph *g, kn_dnn_desc d)
{
    g->bad = g->bad || !finish(d);
}

static void add(kn_dnn_graph *g, kn_dnn_desc op)
{
    end(g, op);
    if (g->ops == KN_DNN_OPS)
        g->bad = true;
    else
        g->op[g->ops++] = op;
}

void kn_dnn_graph_end(kn_dnn_graph *g)
{
    while (g->count > 0)
        kn_dnn_destroy(g->all[--g->count]);
    g->ops = 0;
}

/* ---- operations ----------------------------------------------------------------------------------- */

kn_dnn_desc kn_dnn_tensor(kn_dnn_graph *g, int64_t id, cudnnDataType_t t, kn_dnn_kind kind,
                          kn_dnn_shape s)
{
    kn_dnn_desc d = fresh(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t align = 16, name = id ? id : 1000 + g->next_id++;
    bool yes = true;
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &t);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, s.dim);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, s.stride);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &name);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
    if (kind == KN_DNN_VIRTUAL)
        set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (kind == KN_DNN_SCALAR)
        set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    end(g, d);
    return d;
}

kn_dnn_desc kn_dnn_scalar(kn_dnn_graph *g, int64_t id)
{
    return kn_dnn_tensor(g, id, CUDNN_DATA_FLOAT, KN_DNN_SCALAR,
                         (kn_dnn_shape){ { 1, 1, 1, 1 }, { 1, 1, 1, 1 } });
}

void kn_dnn_matmul(kn_dnn_graph *g, kn_dnn_desc a, kn_dnn_desc b, kn_dnn_desc c)
{
    cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    kn_dnn_desc m = fresh(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    end(g, m);
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_desc(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, m);
    add(g, op);
}

void kn_dnn_pointwise(kn_dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t precision,
                      int64_t axis, kn_dnn_desc x, kn_dnn_desc b, kn_dnn_desc t, kn_dnn_desc y)
{
    float one = 1;
    kn_dnn_desc p = fresh(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, p, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, p, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &precision);
    if (mode == CUDNN_POINTWISE_GEN_INDEX)
        set(g, p, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    end(g, p);
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, p);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    if (b)
        set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t)
        set_desc(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set(g, op, CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, CUDNN_TYPE_FLOAT, 1, &one);
    set(g, op, CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, CUDNN_TYPE_FLOAT, 1, &one);
    add(g, op);
}

void kn_dnn_reduce(kn_dnn_graph *g, cudnnReduceTensorOp_t kind, kn_dnn_desc x, kn_dnn_desc y)
{
    cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    kn_dnn_desc r = fresh(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, r, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    set(g, r, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &kind);
    end(g, r);
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, r);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add(g, op);
}

void kn_dnn_reshape(kn_dnn_graph *g, kn_dnn_desc x, kn_dnn_desc y)
{
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add(g, op);
}

/* ---- plans ---------------------------------------------------------------------------------------- */

kn_dnn_desc kn_dnn_device(int index, const char *json)
{
    kn_dnn_desc d = NULL;
    int32_t id = index;
    bool ok = make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &d);
    if (json)
        ok = ok && put(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                       (int64_t)strlen(json), json);
    else
        ok = ok && put(d, CUDNN_ATTR_DEVICEPROP_DEVICE_ID, CUDNN_TYPE_INT32, 1, &id);
    if (ok && finish(d))
        return d;
    kn_dnn_destroy(d);
    return NULL;
}

/* Tries the configurations of one mode of the heuristics in their order. */
static bool try_mode(kn_dnn_plan *p, kn_dnn_desc device, cudnnBackendHeurMode_t mode)
{
    kn_dnn_desc configs[CONFIGS] = { NULL };
    int64_t found = 0, bytes = 0, n;
    bool ok = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, &p->heuristics) &&
              put_desc(p->heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, p->operations) &&
              put(p->heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode) &&
              put_desc(p->heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device) &&
              finish(p->heuristics);
    for (int i = 0; ok && i < CONFIGS; i++)
        ok = make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, &configs[i]);
    ok = ok && dnn.get(p->heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                       CONFIGS, &found, configs) == CUDNN_STATUS_SUCCESS;
    for (int i = 0; ok && i < found && !p->config; i++) {
        kn_dnn_desc plan = NULL;
        if (make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &plan) &&
            put_desc(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]) &&
            put_desc(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device) && finish(plan) &&
            dnn.get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &n,
                    &bytes) == CUDNN_STATUS_SUCCESS) {
            p->plan = plan;
            p->config = configs[i];
            p->workspace = (size_t)bytes;
            configs[i] = NULL;
        } else {
            kn_dnn_destroy(plan);
        }
    }
    for (int i = 0; i < CONFIGS; i++)
        kn_dnn_destroy(configs[i]);
    if (p->plan)
        return true;
    kn_dnn_destroy(p->heuristics);
    p->heuristics = NULL;
    return false;
}

bool kn_dnn_plan_make(kn_dnn_plan *p, kn_dnn_desc device)
{
    return device && !p->graph.bad &&
           make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, &p->operations) &&
           put(p->operations, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
               p->graph.ops, p->graph.op) &&
           finish(p->operations) &&
           (try_mode(p, device, CUDNN_HEUR_MODE_A) ||
            try_mode(p, device, CUDNN_HEUR_MODE_FALLBACK));
}

void kn_dnn_plan_end(kn_dnn_plan *p)
{
    kn_dnn_destroy(p->plan);
    kn_dnn_destroy(p->config);
    kn_dnn_destroy(p->heuristics);
    kn_dnn_destroy(p->operations);
    kn_dnn_graph_end(&p->graph);
    memset(p, 0, sizeof *p);
}

static bool check(cudnnStatus_t e, const char *what)
{
    char text[512];
    return e == CUDNN_STATUS_SUCCESS || kn_fail("attention: cuDNN says %s to %s: %s", dnn.status(e),
                                                what, kn_dnn_said(text, sizeof text));
}

bool kn_dnn_run(const kn_dnn_plan *p, int n, const int64_t *id, void *const *data, void *workspace)
{
    kn_dnn_desc pack = NULL;
    pthread_mutex_lock(&lock); /* the handle has one stream at a time */
    bool ok = handle || check(dnn.create(&handle), "making its handle");
    ok = ok && check(dnn.set_stream(handle, (cudaStream_t)kn_cuda_stream()), "the stream");
    if (ok) {
        ok = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack) &&
             put(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, id) &&
             put(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, data) &&
             put(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace) &&
             finish(pack);
        ok = check(ok ? dnn.execute(handle, p->plan, pack) : CUDNN_STATUS_BAD_PARAM, "running");
    }
    kn_dnn_destroy(pack);
    pthread_mutex_unlock(&lock);
    return ok;
}
