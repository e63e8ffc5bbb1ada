/* kernels/image_args.h: arguments of the kernels of images: convolutions, batch norm, pooling,
 * interpolation. A part of kernels.h, whose rules hold. */
#ifndef KNAP_KERNELS_IMAGE_ARGS_H
#define KNAP_KERNELS_IMAGE_ARGS_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Images are [N,C,H,W] in any order of strides: channels-last is the one with stride 1 in C. */

/* Cross-correlation in groups: with c in [0, C/G) and g = o / (O/G),
 *   y[n,o,p,q] = bias[o] + sum_{c,r,s} w[o,c,r,s] x[n, g C/G + c, p stride - pad + r dilation, ...]
 * for y[N,O,P,Q], x[N,C,H,W], w[O,C/G,R,S]; x is 0 outside. Positions p and q are as many as y has.
 * bias[O] has x's dtype or f32, data NULL: none. */
typedef struct kn_conv_args {
    kn_array y, x, w, bias;
    int64_t stride[2], pad[2], dilation[2], groups;
} kn_conv_args;

/* dx from dy and w, overwritten. The gradient of bias is KN_K_REDUCE's sum of dy. */
typedef struct kn_conv_grad_x_args {
    kn_array dx, dy, w;
    int64_t stride[2], pad[2], dilation[2], groups;
} kn_conv_grad_x_args;

/* dw from dy and x, overwritten; dw may be f32 while dy and x are bf16/f16. */
typedef struct kn_conv_grad_w_args {
    kn_array dw, dy, x;
    int64_t stride[2], pad[2], dilation[2], groups;
} kn_conv_grad_w_args;

/* y = (x - mean) rstd w + b + add for each channel of x[N,C,...], w and b [C] as for KN_K_NORM, add
 * like x (data NULL: none); relu: 0 where that is less. mean and rstd [C] (f32, f64 for f64 x;
 * contiguous) are written. Training: of the M values of the channel,
 * rstd = 1/sqrt(var + eps), and where M > 1 running_mean and running_var [C] (any float; data NULL:
 * none) become (1 - momentum) running + momentum (mean, or var M/(M-1)). Else mean and rstd come
 * from them, and they stay. y data NULL, in training: only the statistics. */
typedef struct kn_batch_norm_args {
    kn_array y, x, w, b, mean, rstd, running_mean, running_var, add;
    double eps, momentum;
    bool training, relu;
} kn_batch_norm_args;

/* dx, dadd, dw, db (data NULL: not wanted; dw and db of x's dtype or f32), overwritten: with h = (x
 * - mean) rstd, dw = sum dy h, db = sum dy, dx = w rstd (dy - (db + h dw) / M), or not training w
 * rstd dy. relu: dy is 0 where y, or y's data NULL h w + b, is 0 or less. dadd = dy, so masked.
 * mean_dw, mean_db [C] (as mean; data NULL: none, both or neither): training, they stand for dw / M
 * and db / M in dx, where x is a part of the batch. */
typedef struct kn_batch_norm_grad_args {
    kn_array dx, dw, db, dadd, dy, x, y, w, b, mean, rstd, mean_dw, mean_db;
    bool training, relu;
} kn_batch_norm_grad_args;

/* Joins n parts of a batch: rows 0 and 1, 2 and 3, ..., then what became of these in the same way,
 * until one is left; a row without a partner goes up alone. So a part that was joined from 2^k rows
 * before stands for them with the same bits. The rows are from_a, from_b [n,C] (any float and
 * strides), the result a, b [C] (any float, contiguous); in f64 in between, 0 for n = 0.
 * moments: a is the mean of a row's values, scale * b the sum of squares around it; row i has
 * from_count[i] values (f64; data NULL: each), and their sum goes to count[1] (f64; data NULL: not
 * wanted). With d = a2 - a1 and M = M1 + M2: a = a1 + d M2 / M, b = b1 + b2 + d d M1 M2 / M.
 * finish: b is divided by M (0 for 0: the variance), and where M > 1 running_mean and running_var
 * [C] (any float; data NULL: none) move as those of KN_K_BATCH_NORM.
 * Else sums: a = a1 + a2, b = b1 + b2. finish: both are divided by from_count[0]. */
typedef struct kn_batch_norm_join_args {
    kn_array a, b, count, from_a, from_b, from_count, running_mean, running_var;
    double each, scale, momentum;
    bool moments, finish;
} kn_batch_norm_join_args;

typedef enum kn_pool { KN_POOL_MAX = 0, KN_POOL_AVG, KN_POOL_COUNT } kn_pool;

/* Which elements of x[N,C,H,W] make y[n,c,p,q]: those in the image of p stride - pad + r dilation,
 * r in [0, kernel), and likewise of q. adaptive: floor(p H/P) up to, not including, ceil((p+1)
 * H/P), and the numbers of the window aren't read. */
typedef struct kn_window {
    int64_t kernel[2], stride[2], pad[2], dilation[2];
    bool adaptive, count_include_pad;
} kn_window;

/* MAX: the largest, NaN above all, and index[n,c,p,q] (i32; data NULL: not wanted) = h W + w of the
 * first of equals; -inf and -1 of nothing. AVG (dilation 1): their mean, 0 of nothing;
 * count_include_pad divides by the positions before H + pad and W + pad instead. */
typedef struct kn_pool_args {
    kn_array y, index, x;
    kn_pool kind;
    kn_window window;
} kn_pool_args;

/* dx, overwritten: an element's windows are added in ascending p, then q. MAX reads index, AVG
 * none. */
typedef struct kn_pool_grad_args {
    kn_array dx, dy, index;
    kn_pool kind;
    kn_window window;
} kn_pool_grad_args;

/* Where the positions of y along a spatial dim lie in x: position p at (p + centre) mul / div -
 * centre, not below the first of x and not beyond the last. mul is at least 0, div above 0, all
 * finite. */
typedef struct kn_grid {
    double mul[2], div[2], centre;
} kn_grid;

/* y[N,C,P,Q] = x[N,C,H,W] at the places of a grid: of the element at the place, rounded down;
 * linear: between the elements around it, in both dims, in proportion to the distance. The fraction
 * of the place is rounded to the dtype that x is computed in. x isn't empty where y isn't. */
typedef struct kn_interpolate_args {
    kn_array y, x;
    kn_grid grid;
    bool linear;
} kn_interpolate_args;

/* dx, overwritten: an element's shares of dy are added in ascending p, then q. */
typedef struct kn_interpolate_grad_args {
    kn_array dx, dy;
    kn_grid grid;
    bool linear;
} kn_interpolate_grad_args;

#ifdef __cplusplus
}
#endif
#endif
