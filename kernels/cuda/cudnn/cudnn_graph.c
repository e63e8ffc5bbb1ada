/* kernels/cuda/cudnn/cudnn_graph.c: cuDNN's backend interface, with one word for each step. cuDNN
 * describes everything by descriptors with attributes; a refused one makes the graph bad, which is
 * checked once, when the plan is made (cudnn_plan.c). */
#include "kernels/cuda/cudnn/cudnn.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

#include <string.h>

kn_dnn_functions kn_dnn;

static const kn_cuda_symbol symbols[] = {
    { "cudnnBackendCreateDescriptor", &kn_dnn.make },
    { "cudnnBackendDestroyDescriptor", &kn_dnn.destroy },
    { "cudnnBackendFinalize", &kn_dnn.finalize },
    { "cudnnBackendSetAttribute", &kn_dnn.set },
    { "cudnnBackendGetAttribute", &kn_dnn.get },
    { "cudnnBackendExecute", &kn_dnn.execute },
    { "cudnnCreate", &kn_dnn.create },
    { "cudnnSetStream", &kn_dnn.set_stream },
    { "cudnnGetErrorString", &kn_dnn.status },
    { "cudnnGetLastErrorString", &kn_dnn.last },
};

/* Older than 9.8 it has no descriptor of a device, without which there is no plan; older than 9.6
 * it wants the sum of dQ zeroed. */
kn_cuda_library kn_cudnn_library = {
    .name = "cuDNN",
    .soname = "libcudnn.so." KN_CUDA_NUMBER(CUDNN_MAJOR),
    .versions = "cudnnGetVersion",
    .least = 90800,
    .without = KN_WITHOUT_CUDNN,
    .cuda = "cudnnGetCudartVersion",
    .part = { { "libcudnn_graph.so." KN_CUDA_NUMBER(CUDNN_MAJOR) },
              { "libcublasLt.so.", .of_cuda = true },
              { "libnvrtc.so.", .of_cuda = true, .optional = true } },
    .symbols = symbols,
    .count = sizeof symbols / sizeof *symbols,
};

const char *kn_dnn_said(char *text, size_t size)
{
    text[0] = 0;
    kn_dnn.last(text, size);
    return text;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

bool kn_dnn_make(cudnnBackendDescriptorType_t type, kn_dnn_desc *d)
{
    *d = NULL;
    return kn_dnn.make(type, d) == CUDNN_STATUS_SUCCESS;
}

bool kn_dnn_put(kn_dnn_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t n, const void *value)
{
    return kn_dnn.set(d, name, type, n, value) == CUDNN_STATUS_SUCCESS;
}

bool kn_dnn_put_desc(kn_dnn_desc d, cudnnBackendAttributeName_t name, kn_dnn_desc value)
{
    return kn_dnn_put(d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

bool kn_dnn_finish(kn_dnn_desc d)
{
    return kn_dnn.finalize(d) == CUDNN_STATUS_SUCCESS;
}

void kn_dnn_destroy(kn_dnn_desc d)
{
    if (d)
        kn_dnn.destroy(d);
}

/* A descriptor that the graph owns. */
static kn_dnn_desc fresh(kn_dnn_graph *g, cudnnBackendDescriptorType_t type)
{
    kn_dnn_desc d = NULL;
    if (g->count == KN_DNN_DESCS || !kn_dnn_make(type, &d)) {
        g->bad = true;
        return NULL;
    }
    return g->all[g->count++] = d;
}

static void set(kn_dnn_graph *g, kn_dnn_desc d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t n, const void *value)
{
    g->bad = g->bad || !kn_dnn_put(d, name, type, n, value);
}

static void set_desc(kn_dnn_graph *g, kn_dnn_desc d, cudnnBackendAttributeName_t name,
                     kn_dnn_desc value)
{
    g->bad = g->bad || !kn_dnn_put_desc(d, name, value);
}

static void end(kn_dnn_graph *g, kn_dnn_desc d)
{
    g->bad = g->bad || !kn_dnn_finish(d);
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

/* ---- operations ------------------------------------------------------------------------------ */

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

void kn_dnn_bernoulli(kn_dnn_graph *g, double keep, kn_dnn_desc seed, kn_dnn_desc offset,
                      kn_dnn_desc y)
{
    cudnnRngDistribution_t bernoulli = CUDNN_RNG_DISTRIBUTION_BERNOULLI;
    kn_dnn_desc r = fresh(g, CUDNN_BACKEND_RNG_DESCRIPTOR);
    set(g, r, CUDNN_ATTR_RNG_DISTRIBUTION, CUDNN_TYPE_RNG_DISTRIBUTION, 1, &bernoulli);
    set(g, r, CUDNN_ATTR_RNG_BERNOULLI_DIST_PROBABILITY, CUDNN_TYPE_DOUBLE, 1, &keep);
    end(g, r);
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_RNG_DESCRIPTOR);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RNG_YDESC, y);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RNG_DESC, r);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RNG_SEED, seed);
    set_desc(g, op, CUDNN_ATTR_OPERATION_RNG_OFFSET_DESC, offset);
    add(g, op);
}

/* ---- operations on images -------------------------------------------------------------------- */

static kn_dnn_desc window_desc(kn_dnn_graph *g, const kn_dnn_window *w)
{
    cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    int64_t dims = 2;
    kn_dnn_desc d = fresh(g, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    set(g, d, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
    set(g, d, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
    set(g, d, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, w->pad);
    set(g, d, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, w->pad);
    set(g, d, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, w->dilation);
    set(g, d, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, w->stride);
    end(g, d);
    return d;
}

/* The same five attributes under three names. */
static void conv_attributes(kn_dnn_graph *g, kn_dnn_desc op,
                            const cudnnBackendAttributeName_t name[6], const kn_dnn_desc value[4])
{
    float one = 1, zero = 0;
    for (int i = 0; i < 4; i++)
        set_desc(g, op, name[i], value[i]);
    set(g, op, name[4], CUDNN_TYPE_FLOAT, 1, &one);
    set(g, op, name[5], CUDNN_TYPE_FLOAT, 1, &zero);
}

void kn_dnn_conv(kn_dnn_graph *g, cudnnBackendDescriptorType_t type, const kn_dnn_window *window,
                 kn_dnn_desc x, kn_dnn_desc w, kn_dnn_desc y)
{
    static const cudnnBackendAttributeName_t forward[6] = {
        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
        CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
    };
    static const cudnnBackendAttributeName_t data[6] = {
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
    };
    static const cudnnBackendAttributeName_t filter[6] = {
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
        CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
    };
    const kn_dnn_desc value[4] = { window_desc(g, window), x, w, y };
    kn_dnn_desc op = fresh(g, type);
    conv_attributes(g, op,
                    type == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR         ? forward
                    : type == CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR ? data
                                                                                           : filter,
                    value);
    add(g, op);
}

void kn_dnn_batch_norm(kn_dnn_graph *g, const kn_dnn_norm *n)
{
    cudnnBackendNormMode_t mode = CUDNN_BATCH_NORM;
    cudnnBackendNormFwdPhase_t phase = CUDNN_NORM_FWD_TRAINING;
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR);
    set(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_MODE, CUDNN_TYPE_NORM_MODE, 1, &mode);
    set(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, CUDNN_TYPE_NORM_FWD_PHASE, 1, &phase);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, n->x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, n->y);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, n->mean);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, n->rstd);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, n->scale);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, n->bias);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, n->eps);
    if (n->mean_in) {
        set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC, n->momentum);
        set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC, n->mean_in);
        set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC, n->var_in);
        set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC, n->mean_out);
        set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC, n->var_out);
    }
    add(g, op);
}

void kn_dnn_batch_norm_grad(kn_dnn_graph *g, const kn_dnn_norm_grad *n)
{
    cudnnBackendNormMode_t mode = CUDNN_BATCH_NORM;
    kn_dnn_desc op = fresh(g, CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR);
    set(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_MODE, CUDNN_TYPE_NORM_MODE, 1, &mode);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, n->x);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC, n->dy);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, n->dx);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, n->mean);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC, n->rstd);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, n->scale);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, n->dscale);
    set_desc(g, op, CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, n->dbias);
    add(g, op);
}
