/* autograd/distances.h: distances between rows, losses of distances and ranks, and of likelihoods.
 * They keep to the rules of autograd/functional.h. */
#ifndef KNAP_AUTOGRAD_DISTANCES_H
#define KNAP_AUTOGRAD_DISTANCES_H

#include "autograd/functional.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_pairwise_distance_options {
    KN_BEGIN_OPTIONS;
    double p;   /* of the norm; 0: 2 */
    double eps; /* added to each difference; 0: 1e-6; KN_ZERO: 0 */
    bool keep;  /* the last dim stays as 1 */
} kn_pairwise_distance_options;
/* The p-norm of a - b + eps over the last dim; a and b broadcast. */
KN_API kn_tensor *kn_pairwise_distance_(kn_tensor *a, kn_tensor *b, kn_pairwise_distance_options o);
#define kn_pairwise_distance(a, b, ...)                                                            \
    kn_pairwise_distance_(a, b, KN_OPTIONS(kn_pairwise_distance_options, __VA_ARGS__))

typedef struct kn_cdist_options {
    KN_BEGIN_OPTIONS;
    double p; /* of the norm; 0: 2; KN_ZERO: 0 */
} kn_cdist_options;
/* Distances y[..., i, j] of rows a[..., P, M] and b[..., R, M]: the p-norm of a_i - b_j. p = 2 of
 * more than 25 rows is made of a product, which loses digits of small distances; else all P R M
 * differences are in memory. The gradient of a distance of 0 is 0. */
KN_API kn_tensor *kn_cdist_(kn_tensor *a, kn_tensor *b, kn_cdist_options o);
#define kn_cdist(a, b, ...) kn_cdist_(a, b, KN_OPTIONS(kn_cdist_options, __VA_ARGS__))

typedef struct kn_margin_ranking_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    double margin;
} kn_margin_ranking_loss_options;
/* max(0, sign (b - a) + margin): a should be above b where sign is 1, below where it is -1. */
KN_API kn_tensor *kn_margin_ranking_loss_(kn_tensor *a, kn_tensor *b, kn_tensor *sign,
                                          kn_margin_ranking_loss_options o);
#define kn_margin_ranking_loss(a, b, sign, ...)                                                    \
    kn_margin_ranking_loss_(a, b, sign, KN_OPTIONS(kn_margin_ranking_loss_options, __VA_ARGS__))

typedef struct kn_hinge_embedding_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    double margin; /* 0: 1; KN_ZERO: 0 */
} kn_hinge_embedding_loss_options;
/* Of distances x: x where sign is 1, max(0, margin - x) where it is -1. */
KN_API kn_tensor *kn_hinge_embedding_loss_(kn_tensor *x, kn_tensor *sign,
                                           kn_hinge_embedding_loss_options o);
#define kn_hinge_embedding_loss(x, sign, ...)                                                      \
    kn_hinge_embedding_loss_(x, sign, KN_OPTIONS(kn_hinge_embedding_loss_options, __VA_ARGS__))

typedef struct kn_triplet_margin_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    double margin; /* 0: 1; KN_ZERO: 0 */
    double p, eps; /* of kn_pairwise_distance */
    bool swap;     /* the negative's distance is the smaller one of those to anchor and positive */
} kn_triplet_margin_loss_options;
/* max(0, |anchor - positive| - |anchor - negative| + margin) of rows [..., D], by
 * kn_pairwise_distance. */
KN_API kn_tensor *kn_triplet_margin_loss_(kn_tensor *anchor, kn_tensor *positive,
                                          kn_tensor *negative, kn_triplet_margin_loss_options o);
#define kn_triplet_margin_loss(anchor, positive, negative, ...)                                    \
    kn_triplet_margin_loss_(anchor, positive, negative,                                            \
                            KN_OPTIONS(kn_triplet_margin_loss_options, __VA_ARGS__))

typedef struct kn_gaussian_nll_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    bool full;  /* with the constant log(2 pi) / 2 */
    double eps; /* the least variance, above 0; 0: 1e-6 */
} kn_gaussian_nll_loss_options;
/* (log v + (x - target)^2 / v) / 2 with v = max(var, eps); var, of x's dtype, has x's shape without
 * the last dim, or broadcasts to x. The bound doesn't stop var's gradient. */
KN_API kn_tensor *kn_gaussian_nll_loss_(kn_tensor *x, kn_tensor *target, kn_tensor *var,
                                        kn_gaussian_nll_loss_options o);
#define kn_gaussian_nll_loss(x, target, var, ...)                                                  \
    kn_gaussian_nll_loss_(x, target, var, KN_OPTIONS(kn_gaussian_nll_loss_options, __VA_ARGS__))

typedef struct kn_poisson_nll_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    bool no_log_input; /* x is the rate itself, not its logarithm */
    bool full;         /* with Stirling's log(target!) for targets above 1 */
    double eps;        /* added to a rate before its logarithm; 0: 1e-8; KN_ZERO: 0 */
} kn_poisson_nll_loss_options;
/* e^x - target x, or x - target log(x + eps) */
KN_API kn_tensor *kn_poisson_nll_loss_(kn_tensor *x, kn_tensor *target,
                                       kn_poisson_nll_loss_options o);
#define kn_poisson_nll_loss(x, target, ...)                                                        \
    kn_poisson_nll_loss_(x, target, KN_OPTIONS(kn_poisson_nll_loss_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
