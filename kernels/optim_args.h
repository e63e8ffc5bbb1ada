/* kernels/optim_args.h: arguments of the kernels of sharding and optimizers: sums over ranks,
 * steps, norms of gradients, loss scaling. A part of kernels.h, whose rules hold. */
#ifndef KNAP_KERNELS_OPTIM_ARGS_H
#define KNAP_KERNELS_OPTIM_ARGS_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KN_SUM_N_MAX 64

/* dst[i] = round((acc ? acc[i] : 0) + src[0][i] + ... + src[n-1][i]), added left to right in f32
 * (f64 for f64), 1-d contiguous, count elements. src have dtype src_dtype, dst dst_dtype (any
 * float), acc dst's dtype; in place on dst == acc and on dst == any src[j]. Without acc the sum
 * starts from src[0] itself (so -0 survives). */
typedef struct kn_sum_n_args {
    void *dst;
    const void *acc;
    const void *src[KN_SUM_N_MAX];
    int n;
    int64_t count;
    kn_dtype dst_dtype, src_dtype;
} kn_sum_n_args;

/* Where a piece's elements stand in the whole parameter, for rounding at random: the piece's i-th
 * is element start + i / run * step + i % run (start + i where run is 0) of the stream. */
typedef struct kn_opt_place {
    uint64_t stream;
    int64_t start, run, step;
} kn_opt_place;

/* A piece of a parameter as the fused optimizer kernels see it: contiguous. */
typedef struct kn_opt_piece {
    void *param;      /* master values, updated */
    const void *grad; /* raw sum of gradients */
    void *m, *v;      /* state; SGD and Lion use m only, SGD without momentum none: NULL */
    void *more;       /* a third one, of updates made of operations; NULL: none */
    int64_t count;
    double lr_mul;       /* this group's factor on *lr */
    double weight_decay; /* decoupled for AdamW and Lion, added to the gradient for SGD */
    kn_dtype param_dtype, grad_dtype; /* any floats */
    void *out;          /* a copy of the updated masters, rounded as KN_K_COPY rounds; NULL: none */
    kn_dtype out_dtype; /* any float */
    kn_opt_place place;
} kn_opt_piece;

/* The pieces of an optimizer's step and its numbers, which lie in device memory and are rounded to
 * f32 unless masters are f64. If skip isn't NULL and *skip not 0, nothing is written.
 *
 * A step computes in f32 (f64 for f64 masters) and rounds masters and states once, to nearest. With
 * seed those of bf16 and f16 are rounded at random: masters by the words of (kn_step_key(*seed,
 * *step), place.stream), m and v by those of place.stream + 1 and + 2. */
typedef struct kn_opt_step {
    const kn_opt_piece *piece; /* host memory; must outlive the launch */
    int pieces;
    const double *lr, *grad_scale, *step; /* step: >= 1 */
    const double *skip;
    const double *limit;  /* a gradient times *grad_scale is clamped to +- *limit; NULL: it isn't */
    const uint64_t *seed; /* of rounding at random; NULL: to nearest */
} kn_opt_step;

/* A running average, beta old + (1-beta) fresh: the nearer of the two plus a step of at most half
 * their distance, so that a small one isn't lost beside the other. */
typedef struct kn_average {
    double step;
    bool from_fresh; /* fresh + step (old - fresh); else old + step (fresh - old) */
} kn_average;

static inline kn_average kn_average_of(double beta)
{
    const kn_average a = { beta < 0.5 ? beta : 1 - beta, beta < 0.5 };
    return a;
}

/* AdamW (Loshchilov and Hutter, arXiv:1711.05101) over all pieces in one pass, computed in f32:
 *   g = grad * *grad_scale;  m = average_b1(m, g);  v = average_b2(v, g^2);
 *   p -= lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + weight_decay p)
 * t is the step; bias corrections use f64 pow. m and v have the masters' dtype. g is clamped by
 * *limit. */
typedef struct kn_adamw_args {
    kn_opt_step s;
    double beta1, beta2, eps;
} kn_adamw_args;

/* g = grad * *grad_scale + weight_decay p;  with momentum: m = step 1 ? g : momentum m +
 * (1-dampening) g, and g = nesterov ? g + momentum m : m;  p -= lr g. */
typedef struct kn_sgd_args {
    kn_opt_step s;
    double momentum, dampening;
    bool nesterov;
} kn_sgd_args;

/* Lion (Chen et al., arXiv:2302.06675):
 *   g = grad * *grad_scale;  c = average_b1(m, g);  m = average_b2(m, g);
 *   p -= lr (sign(c) + weight_decay p)
 * sign(0) is 0, and c itself where it is NaN. m has the masters' dtype. */
typedef struct kn_lion_args {
    kn_opt_step s;
    double beta1, beta2;
} kn_lion_args;

/* A contiguous run of values for the norm kernels. */
typedef struct kn_run {
    const void *data;
    int64_t count;
    kn_dtype dtype;
} kn_run;

/* *out = max |x| over all runs (f32, device memory); NaN if any value is NaN, inf if any is inf.
 * *first (device memory; may be NULL) = the first run with a value that is not finite as an f32, -1
 * where there is none. */
typedef struct kn_absmax_args {
    const kn_run *run; /* host memory */
    int runs;
    float *out;
    int64_t *first;
} kn_absmax_args;

#define KN_SQSUM_LIMBS 4

/* The sum of squares in fixed point, independent of any partition (architecture, idea 9): with e =
 * the exponent that makes |x| * 2^-e < 1 for x = *absmax, out accumulates
 * floor((x * 2^-e)^2 * 2^60) as a 160-bit integer in KN_SQSUM_LIMBS limbs of 40 bits, so that up
 * to 2^23 ranks may add their limbs as i64. Zero limbs where *absmax is 0 or not finite. */
typedef struct kn_sqsum_args {
    const kn_run *run;
    int runs;
    const float *absmax; /* device memory: the maximum over all ranks */
    int64_t *out;        /* KN_SQSUM_LIMBS */
} kn_sqsum_args;

/* The same for the sum of p-th powers, p > 0 and finite: out accumulates
 * floor(min(1, |x| / *absmax)^p * 2^60), with division and power in f64. */
typedef struct kn_powsum_args {
    const kn_run *run;
    int runs;
    const float *absmax; /* device memory: the maximum over all ranks */
    double p;
    int64_t *out; /* KN_SQSUM_LIMBS */
} kn_powsum_args;

/* p = 0: limbs are KN_K_SQSUM's, norm = scale * sqrt(limbs * 2^(2e-60)). Other p: limbs are
 * KN_K_POWSUM's, norm = scale * *absmax * (limbs * 2^-60)^(1/p); p = infinity: limbs aren't read,
 * norm = scale * *absmax. Where *absmax is 0 or not finite, norm = scale * *absmax for every p.
 * coef = scale * min(1, max_norm / (norm + 1e-6)), or scale where max_norm <= 0. Where
 * loss_scale isn't NULL, scale stands for scale / *loss_scale. Where limit isn't NULL, the norm is
 * that of gradients clamped to +- value, and *limit = value * min(1, max_norm / (norm + 1e-6)). */
typedef struct kn_clip_args {
    const int64_t *limbs;
    const float *absmax;
    double scale, max_norm;
    float *norm;
    double *coef;
    double p;
    const float *loss_scale; /* device memory */
    double value, *limit;
} kn_clip_args;

/* The numbers of an optimizer that change from step to step, in device memory. */
typedef struct kn_step_scalars {
    double lr, grad_scale, step; /* step: of those that were taken, from 1 */
    uint64_t seed;               /* of rounding at random */
    double skip;                 /* not 0: this step changes nothing */
    double skipped;              /* steps so far that changed nothing */
} kn_step_scalars;

/* A dynamic loss scale (optim/optim.h, kn_scaler), in device memory. */
typedef struct kn_loss_scale_state {
    double scale;          /* of the losses to come */
    int64_t good, skipped; /* iterations since the last overflow or growth; overflows ever */
    int64_t stuck;         /* iterations ever with one where scale couldn't be lowered */
    int64_t found;         /* overflows of this iteration */
} kn_loss_scale_state;

/* Decides about a step of gradients that carry a loss scale, where step isn't NULL. With found =
 * *absmax is not finite:
 *   step->grad_scale = scale / *loss_scale (NULL: 1);  step->step -= step->skipped;  step->skip =
 *   found;  found: step->skipped++, state->skipped++, state->found++.
 * Then, unless later, ends the iteration, which may have had several steps:
 *   state->found > 0: good = 0, and scale *= backoff, or stuck++ where that is below smallest;
 *   else: at every interval-th good iteration scale = min(largest, scale * growth);  found = 0. */
typedef struct kn_loss_scale_args {
    kn_loss_scale_state *state;
    kn_step_scalars *step;
    const float *absmax, *loss_scale;
    double scale, growth, backoff, smallest, largest;
    int64_t interval;
    bool later;
} kn_loss_scale_args;

#ifdef __cplusplus
}
#endif
#endif
