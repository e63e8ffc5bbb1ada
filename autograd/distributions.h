/* autograd/distributions.h: distributions, for policies and variational nets, as functions of
 * tensors.
 *
 * Parameters, float tensors of one dtype, broadcast with each other and with values x. Results have
 * that dtype, computed in f32 or f64 and rounded once; gradients reach every float argument. Draws
 * depend on the random key, as kn_dropout (autograd/autograd.h): ranks draw apart, but alike
 * between kn_draws_begin and kn_draws_end. Categories are the last dim of logits[..., K], whose
 * softmax is their probability; the other logits are those of 1, sigmoid(logits). */
#ifndef KNAP_AUTOGRAD_DISTRIBUTIONS_H
#define KNAP_AUTOGRAD_DISTRIBUTIONS_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of the normal distribution with this mean and standard deviation, which isn't checked to be above
 * 0: -(x - mean)^2 / (2 std^2) - log std - log(2 pi) / 2. */
KN_API kn_tensor *kn_normal_log_prob(kn_tensor *mean, kn_tensor *std, kn_tensor *x);
/* Draws without gradient; and mean + std noise, which passes gradients to both. */
KN_API kn_tensor *kn_normal_sample(kn_tensor *mean, kn_tensor *std);
KN_API kn_tensor *kn_normal_rsample(kn_tensor *mean, kn_tensor *std);
/* log std + (1 + log(2 pi)) / 2 */
KN_API kn_tensor *kn_normal_entropy(kn_tensor *std);
/* KL(p || q) of two normal distributions. */
KN_API kn_tensor *kn_normal_kl(kn_tensor *p_mean, kn_tensor *p_std, kn_tensor *q_mean,
                               kn_tensor *q_std);

/* log softmax(logits) at index[...] (i64 or i32), which has the shape of logits[..., K] without
 * K. */
KN_API kn_tensor *kn_categorical_log_prob(kn_tensor *logits, kn_tensor *index);
/* Draws, i64 [...]. */
KN_API kn_tensor *kn_categorical_sample(kn_tensor *logits);
/* [...]; a category with logit -infinity adds nothing. */
KN_API kn_tensor *kn_categorical_entropy(kn_tensor *logits);
KN_API kn_tensor *kn_categorical_kl(kn_tensor *p_logits, kn_tensor *q_logits);

/* x log sigmoid(logits) + (1 - x) log sigmoid(-logits), for x of 0 and 1 or between. */
KN_API kn_tensor *kn_bernoulli_log_prob(kn_tensor *logits, kn_tensor *x);
/* Draws of 0 and 1, in the dtype of logits (kn_bernoulli takes probabilities). */
KN_API kn_tensor *kn_bernoulli_sample(kn_tensor *logits);
KN_API kn_tensor *kn_bernoulli_entropy(kn_tensor *logits);
KN_API kn_tensor *kn_bernoulli_kl(kn_tensor *p_logits, kn_tensor *q_logits);

#ifdef __cplusplus
}
#endif
#endif
