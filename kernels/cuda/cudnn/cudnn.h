/* kernels/cuda/cudnn/cudnn.h (private): computations that cuDNN compiles or chooses as a whole. A
 * graph is a list of operations on tensors, most of them virtual (never stored); a plan is what the
 * library made of it for a device, and is kept (cudnn_plan.c). Building needs no GPU, only a
 * description of one.
 *
 * A kernel of the table is three functions (kn_dnn_kernel): describe says what its plan depends on
 * or declines, draw makes the graph, bind says where the tensors lie. */
#ifndef KNAP_KERNELS_CUDA_CUDNN_H
#define KNAP_KERNELS_CUDA_CUDNN_H

#include "kernels/kernels.h"

#include <cudnn.h>

typedef cudnnBackendDescriptor_t kn_dnn_desc;

/* ---- the library (cudnn_graph.c) ------------------------------------------------------------- */

typedef struct kn_dnn_functions {
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
} kn_dnn_functions;

extern kn_dnn_functions kn_dnn; /* filled where kn_cudnn_library is there */

/* cuDNN's last status. */
const char *kn_dnn_said(char *text, size_t size);

bool kn_dnn_make(cudnnBackendDescriptorType_t type, kn_dnn_desc *d); /* *d = NULL where refused */
bool kn_dnn_put(kn_dnn_desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t n, const void *value);
bool kn_dnn_put_desc(kn_dnn_desc d, cudnnBackendAttributeName_t name, kn_dnn_desc value);
bool kn_dnn_finish(kn_dnn_desc d);
void kn_dnn_destroy(kn_dnn_desc d); /* NULL is fine */

/* ---- graphs (cudnn_graph.c) ------------------------------------------------------------------ */

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

/* id: its number in the variant pack; 0 for virtual ones. */
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
/* y = 1 with the probability keep, else 0, drawn by cuDNN's generator from seed and offset. */
void kn_dnn_bernoulli(kn_dnn_graph *g, double keep, kn_dnn_desc seed, kn_dnn_desc offset,
                      kn_dnn_desc y);

typedef struct kn_dnn_window {
    int64_t stride[2], pad[2], dilation[2];
} kn_dnn_window;

/* Cross-correlation, computed in f32: y from x and w; or dx from dy and w; or dw from dy and x.
 * type chooses, CUDNN_BACKEND_OPERATION_CONVOLUTION_..._DESCRIPTOR. */
void kn_dnn_conv(kn_dnn_graph *g, cudnnBackendDescriptorType_t type, const kn_dnn_window *window,
                 kn_dnn_desc x, kn_dnn_desc w, kn_dnn_desc y);

/* Batch norm in training; the running ones may be NULL. */
typedef struct kn_dnn_norm {
    kn_dnn_desc x, y, mean, rstd, scale, bias, eps;
    kn_dnn_desc momentum, mean_in, var_in, mean_out, var_out;
} kn_dnn_norm;
void kn_dnn_batch_norm(kn_dnn_graph *g, const kn_dnn_norm *n);

typedef struct kn_dnn_norm_grad {
    kn_dnn_desc x, dy, dx, mean, rstd, scale, dscale, dbias;
} kn_dnn_norm_grad;
void kn_dnn_batch_norm_grad(kn_dnn_graph *g, const kn_dnn_norm_grad *n);
void kn_dnn_graph_end(kn_dnn_graph *g);

/* ---- the key of a plan ------------------------------------------------------------------ */

/* Strides are of b, h, t; unused ones 0. */
typedef struct kn_dnn_attention {
    int64_t b, h, g, t, s, d;
    int64_t q[3], k[3], v[3], o[3], dout[3], dq[3], dk[3], dv[3];
    int32_t type;
    bool causal, deterministic;
    double dropout; /* the probability to drop; 0: none */
} kn_dnn_attention;

/* Images lie packed, in the order of their dims or channels-last: a bit of layouts for x and y, and
 * for w. */
enum { KN_DNN_X_LAST = 1, KN_DNN_W_LAST = 2 };

typedef struct kn_dnn_image {
    int64_t n, c, h, w, o, p, q, r, s, groups;
    kn_dnn_window window;
    int32_t type, extra; /* extra: the dtype of bias or dw, -1 without */
    int32_t layouts;
    bool running; /* batch norm with running statistics */
} kn_dnn_image;

/* Compared as bytes: zero before it is filled. */
typedef struct kn_dnn_problem {
    int32_t kernel, arch; /* kn_kernel; sm_<arch> */
    /* Numerical notes, bit 1 << CUDNN_NUMERICAL_NOTE_...: of no engine that may run. */
    uint32_t avoid;
    uint32_t reserved;
    uint64_t most; /* bytes of workspace */
    union {
        kn_dnn_attention attention;
        kn_dnn_image image;
    } as;
} kn_dnn_problem;

/* ---- plans (cudnn_plan.c) -------------------------------------------------------------------- */

typedef struct kn_dnn_plan {
    kn_dnn_graph graph; /* lives as long as the plan */
    kn_dnn_desc operations, heuristics, config, plan;
    bool by_handle; /* not for a device's description */
    size_t workspace;
    uint32_t notes; /* the engine's numerical notes, as in kn_dnn_problem.avoid */
} kn_dnn_plan;

/* Where a plan's tensors lie: in the kernel's arrays, in scratch, or in a number. */
enum { KN_DNN_BOUND = 20, KN_DNN_SCALARS = 4, KN_DNN_COPIES = 4 };

/* An array in the dtype or layout for cuDNN. */
typedef struct kn_dnn_copy {
    kn_array there, room; /* room: in scratch, bound as number `at` */
    int at;
    bool after; /* from room to there when the plan has run; else the other way before it */
} kn_dnn_copy;

/* The key of a draw of cuDNN's: two numbers of 64 bits, the seed and an offset of 0. */
typedef struct kn_dnn_draw {
    bool used;
    int at; /* the number of the seed's room, before the offset's */
    uint64_t seed, stream;
    const uint64_t *seed_at;
} kn_dnn_draw;

typedef struct kn_dnn_pack {
    int n, scalars, copies;
    int64_t id[KN_DNN_BOUND];
    void *data[KN_DNN_BOUND];
    size_t room[KN_DNN_BOUND]; /* bytes of scratch that data is given when the plan runs */
    float scalar[KN_DNN_SCALARS];
    kn_dnn_copy copy[KN_DNN_COPIES];
    kn_dnn_draw draw;
} kn_dnn_pack;

void kn_dnn_bind(kn_dnn_pack *b, int64_t id, const void *data);
void kn_dnn_bind_room(kn_dnn_pack *b, int64_t id, size_t bytes);
void kn_dnn_bind_scalar(kn_dnn_pack *b, int64_t id, float value);
/* Binds seed and offset to what the draw (seed, stream) of kernels/philox.h makes of them; seed_at
 * as in kn_random_args. */
void kn_dnn_bind_draw(kn_dnn_pack *b, int64_t seed_id, int64_t offset_id, uint64_t seed,
                      const uint64_t *seed_at, uint64_t stream);
/* room has dtype, shape and strides; its data is given when the plan runs. */
void kn_dnn_bind_copy(kn_dnn_pack *b, int64_t id, const kn_array *there, kn_array room, bool after);

typedef union kn_dnn_args {
    kn_attention_args attention;
    kn_attention_grad_args attention_grad;
} kn_dnn_args;

/* How cuDNN computes a kernel of the table. */
typedef struct kn_dnn_kernel kn_dnn_kernel;
struct kn_dnn_kernel {
    /* Fills p, which is zero but for kernel, arch and most; false: declined. */
    bool (*describe)(kn_dnn_problem *p, const void *args);
    void (*draw)(kn_dnn_graph *g, const kn_dnn_problem *p);
    void (*bind)(kn_dnn_pack *b, const kn_dnn_problem *p, const void *args);
    /* Optional, for arguments that describe took: in how many parts they are computed, one after
     * the other, and the arguments of part i. All sizes of a part are those of the first or the
     * last. */
    int64_t (*parts)(const void *args);
    void (*part)(const void *args, int64_t i, kn_dnn_args *to);
    /* Optional, for arguments that describe took: the i-th other computation that must have a plan
     * too, or this one declines; its arguments go to *to. NULL after the last. */
    const kn_dnn_kernel *(*needs)(const void *args, int i, kn_kernel *k, kn_dnn_args *to);
};

/* The backward's dense one copies dout, and dq, dk and dv, between their places and row-major
 * arrays: only of these is its plan's key, beside what the forward has. */
extern const kn_dnn_kernel kn_dnn_attention_forward, kn_dnn_attention_backward;
extern const kn_dnn_kernel kn_dnn_attention_backward_dense;
/* Bytes that a part of a deterministic backward of attention may take; tests lower it. */
extern uint64_t kn_dnn_attention_most;
int64_t kn_dnn_attention_parts(const void *args); /* kn_dnn_kernel.parts and .part of these */
void kn_dnn_attention_part(const void *args, int64_t i, kn_dnn_args *to);
/* cudnn_image.c; the wide one widens x and dy, for dw in f32. */
extern const kn_dnn_kernel kn_dnn_conv_y, kn_dnn_conv_x, kn_dnn_conv_w, kn_dnn_conv_w_wide;
extern const kn_dnn_kernel kn_dnn_batch_norm_y, kn_dnn_batch_norm_x;

/* Runs kernel k as a plan on the stream of the running launch; declines where cuDNN has none. */
kn_status kn_dnn_run(kn_kernel k, const kn_dnn_kernel *how, const void *args);

typedef struct kn_dnn_found {
    size_t workspace;
    uint32_t notes;
} kn_dnn_found;

/* Plans for a device that is only described, sm_<arch>, of all parts: *found is the largest one's.
 * false where the provider would decline. */
bool kn_dnn_try(const char *json, int arch, kn_kernel k, const kn_dnn_kernel *how, const void *args,
                kn_dnn_found *found);

/* ---- the provider (cudnn.c) ------------------------------------------------------------------ */

/* Tests: kn_dnn_try with the provider's way to compute k. */
bool kn_cudnn_try(const char *json, int arch, kn_kernel k, const void *args, kn_dnn_found *found);

#endif
