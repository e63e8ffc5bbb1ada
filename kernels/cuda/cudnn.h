/* kernels/cuda/cudnn.h (private): computations that cuDNN compiles as one kernel. A graph is a list of
 * operations on tensors, most of them virtual (never stored); a plan is what the library made of it for a
 * device. Building needs no GPU, only a description of one. */
#ifndef KNAP_KERNELS_CUDA_CUDNN_H
#define KNAP_KERNELS_CUDA_CUDNN_H

#include "kernels/kernels.h"

#include <cudnn.h>

typedef cudnnBackendDescriptor_t kn_dnn_desc;

/* Opens the library; false with a sentence where it isn't installed. */
bool kn_dnn_load(void);

/* ---- graphs --------------------------------------------------------------------------------------- */

enum { KN_DNN_OPS = 32, KN_DNN_DESCS = 160 };

typedef struct kn_dnn_graph {
    kn_dnn_desc op[KN_DNN_OPS], all[KN_DNN_DESCS];
    int ops, count;
    int64_t next_id;
    bool bad; /* cuDNN refused something: no plan */
} kn_dnn_graph;

typedef struct kn_dnn_shape {
    int64_t dim[4], stride[4];
} kn_dnn_shape;

typedef enum kn_dnn_kind { KN_DNN_REAL, KN_DNN_VIRTUAL, KN_DNN_SCALAR } kn_dnn_kind;

/* id: what the variant pack calls it; 0 for virtual ones. */
kn_dnn_desc kn_dnn_tensor(kn_dnn_graph *g, int64_t id, cudnnDataType_t t, kn_dnn_kind kind,
                          kn_dnn_shape s);
kn_dnn_desc kn_dnn_scalar(kn_dnn_graph *g, int64_t id); /* f32, passed by value */
/* c = a b over the last two dims, computed in f32. */
void kn_dnn_matmul(kn_dnn_graph *g, kn_dnn_desc a, kn_dnn_desc b, kn_dnn_desc c);
/* y = mode(x, b, t); b and t may be NULL; axis for CUDNN_POINTWISE_GEN_INDEX. */
void kn_dnn_pointwise(kn_dnn_graph *g, cudnnPointwiseMode_t mode, cudnnDataType_t precision,
                      int64_t axis, kn_dnn_desc x, kn_dnn_desc b, kn_dnn_desc t, kn_dnn_desc y);
void kn_dnn_reduce(kn_dnn_graph *g, cudnnReduceTensorOp_t op, kn_dnn_desc x, kn_dnn_desc y);
void kn_dnn_reshape(kn_dnn_graph *g, kn_dnn_desc x, kn_dnn_desc y);
void kn_dnn_graph_end(kn_dnn_graph *g);

/* ---- plans ---------------------------------------------------------------------------------------- */

typedef struct kn_dnn_plan {
    kn_dnn_graph graph; /* lives as long as the plan */
    kn_dnn_desc operations, heuristics, config, plan;
    size_t workspace;
} kn_dnn_plan;

/* The first configuration of the heuristics that compiles for the device; false where there is none, without
 * an error. p->graph is complete; a failed plan is to be ended as well. */
bool kn_dnn_plan_make(kn_dnn_plan *p, kn_dnn_desc device);
void kn_dnn_plan_end(kn_dnn_plan *p);
/* A device's description: of the GPU index where json is NULL, else of the text. NULL where refused. */
kn_dnn_desc kn_dnn_device(int index, const char *json);
void kn_dnn_destroy(kn_dnn_desc d);
/* Runs on the stream of the running launch; false with an error. */
bool kn_dnn_run(const kn_dnn_plan *p, int n, const int64_t *id, void *const *data, void *workspace);
/* What cuDNN said last. */
const char *kn_dnn_said(char *text, size_t size);

/* ---- attention (cudnn.c) -------------------------------------------------------------------------- */

/* Tests: a plan for a device that is only described, sm_<arch>: args are kn_attention_args, or
 * kn_attention_grad_args for backward. false where the layer would decline; *workspace in bytes. */
bool kn_cudnn_try(const char *json, int arch, bool backward, const void *args, size_t *workspace);

#endif
