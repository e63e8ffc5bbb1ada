/* autograd/volumes.h: differentiable operations of volumes x[N,C,D,H,W], and of places in images.
 * They keep to the rules of autograd/functional.h. */
#ifndef KNAP_AUTOGRAD_VOLUMES_H
#define KNAP_AUTOGRAD_VOLUMES_H

#include "autograd/functional.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_conv3d_options {
    KN_BEGIN_OPTIONS;
    int64_t stride, pad, dilation;             /* 0: 1, 0, 1; the same for all three dims */
    int64_t strides[3], pads[3], dilations[3]; /* {planes, rows, columns} where not all 0 */
    int64_t groups;                            /* 0: 1; divides C and O */
    bool same;                                 /* as in kn_conv2d_options */
} kn_conv3d_options;
/* kn_conv2d in three dims: x[N,C,D,H,W] or x[C,D,H,W] by w[O,C/groups,K,R,S]; bias[O] may be NULL
 * (torch.nn.functional.conv3d). It is one convolution of images, whose channels are the K planes
 * under each window: these take K / stride times the memory of x, until backward. */
KN_API kn_tensor *kn_conv3d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv3d_options o);
#define kn_conv3d(x, w, bias, ...)                                                                 \
    kn_conv3d_(x, w, bias, KN_OPTIONS(kn_conv3d_options, __VA_ARGS__))

typedef struct kn_pool3d_options {
    KN_BEGIN_OPTIONS;
    int64_t kernel, stride, pad, dilation; /* as in kn_pool2d_options */
    int64_t kernels[3], strides[3], pads[3],
        dilations[3]; /* {planes, rows, columns} where not all 0 */
    bool ceil_mode, exclude_pad;
} kn_pool3d_options;
/* kn_max_pool2d and kn_avg_pool2d of such x, and means or maxima of O x P x Q windows that cover
 * it, as kn_adaptive_avg_pool2d. Planes are pooled first, then along D. */
KN_API kn_tensor *kn_max_pool3d_(kn_tensor *x, kn_pool3d_options o);
KN_API kn_tensor *kn_avg_pool3d_(kn_tensor *x, kn_pool3d_options o);
#define kn_max_pool3d(x, ...) kn_max_pool3d_(x, KN_OPTIONS(kn_pool3d_options, __VA_ARGS__))
#define kn_avg_pool3d(x, ...) kn_avg_pool3d_(x, KN_OPTIONS(kn_pool3d_options, __VA_ARGS__))
KN_API kn_tensor *kn_adaptive_avg_pool3d(kn_tensor *x, int64_t O, int64_t P, int64_t Q);
KN_API kn_tensor *kn_adaptive_max_pool3d(kn_tensor *x, int64_t O, int64_t P, int64_t Q);
/* The largest elements of the windows of kn_adaptive_avg_pool2d and _1d. */
KN_API kn_tensor *kn_adaptive_max_pool2d(kn_tensor *x, int64_t P, int64_t Q);
KN_API kn_tensor *kn_adaptive_max_pool1d(kn_tensor *x, int64_t P);

/* Where places of kn_grid_sample are that lie outside. */
typedef enum kn_grid_padding {
    KN_GRID_ZEROS = 0,  /* they give 0 */
    KN_GRID_BORDER,     /* at the edge's element */
    KN_GRID_REFLECTION, /* mirrored at the edge, as often as it takes */
} kn_grid_padding;
typedef struct kn_grid_sample_options {
    KN_BEGIN_OPTIONS;
    bool nearest; /* the nearest element; else between the four around */
    kn_grid_padding padding;
    bool
        align_corners; /* -1 and 1 are the centres of the outer elements; else the edges of these */
} kn_grid_sample_options;
/* y[n,c,p,q] = x[n,c] at the place grid[n,p,q] = {column, row}, from -1 to 1 over the image
 * (torch.nn.functional.grid_sample), of x[N,C,H,W] and grid[N,P,Q,2] of one dtype. Both get
 * gradients, x's in a fixed order. Made of kn_gather and others: some tensors of y's size. */
KN_API kn_tensor *kn_grid_sample_(kn_tensor *x, kn_tensor *grid, kn_grid_sample_options o);
#define kn_grid_sample(x, grid, ...)                                                               \
    kn_grid_sample_(x, grid, KN_OPTIONS(kn_grid_sample_options, __VA_ARGS__))
/* The grid[N,H,W,2] for kn_grid_sample of theta[N,2,3]: theta (column, row, 1) for each place of an
 * image of H x W (torch.nn.functional.affine_grid). */
KN_API kn_tensor *kn_affine_grid(kn_tensor *theta, int64_t H, int64_t W, bool align_corners);

#ifdef __cplusplus
}
#endif
#endif
