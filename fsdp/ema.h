/* fsdp/ema.h: exponential moving averages of a module's weights, for evaluation and as the result
 * of a training (torch.optim.swa_utils.AveragedModel with an EMA). */
#ifndef KNAP_FSDP_EMA_H
#define KNAP_FSDP_EMA_H

#include "fsdp/fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_ema kn_ema;
typedef struct kn_ema_options {
    KN_BEGIN_OPTIONS;
    double decay; /* in [0, 1); 0: 0.999; KN_ZERO: 0 */
    /* Above 0: update number n (from 0) has the decay min(.decay, (1 + n) / (.warmup + n)), so that
     * early values fade; 10 is common. 0: .decay from the start. */
    double warmup;
    /* Buffers have averages too, as in AveragedModel (those that aren't floats: the last values).
     * A net with batch norm needs them: averaged weights with the statistics of the weights that
     * are trained say little. */
    bool use_buffers;
} kn_ema_options;
/* Averages of the parameters of module that are trainable now; buffers have none, the module's
 * count, unless .use_buffers. Each rank keeps the averages of its own parts, in
 * the masters' dtype, where optimizer state lies too: as many bytes as the masters. They are the
 * same bits for any number of ranks, strategy and layout. Make them after wrapping with fsdp.
 * Owned by the caller; NULL with an error. */
KN_API kn_ema *kn_ema_new_(void *module, kn_ema_options o);
#define kn_ema_new(module, ...) kn_ema_new_(module, KN_OPTIONS(kn_ema_options, __VA_ARGS__))
/* Before or after the module, which keeps what it holds. NULL is fine. From then on any call with e
 * is an error, as it is once the module was freed. */
KN_API void kn_ema_free(kn_ema *e);
/* average += (1 - decay)(value - average), of buffers as of parameters; the first one takes the
 * values. Call it after each step. An error while swapped. */
KN_API bool kn_ema_update(kn_ema *e);
/* Exchanges averages and parameters, bit for bit: once for an evaluation with the averages, once
 * more to go on with the training. Before the first kn_ema_update the averages are the values that
 * the module had in kn_ema_new. Gathered parameters are dropped; a forward from before can't be
 * followed by its backward. A step in between is an error. Where the module is sharded, every
 * rank calls it. Takes memory for another copy of the largest part meanwhile; where there is none,
 * nothing is exchanged. */
KN_API bool kn_ema_swap(kn_ema *e);
KN_API bool kn_ema_swapped(const kn_ema *e);                /* the module holds the averages */
KN_API int64_t kn_ema_updates(const kn_ema *e);             /* so far */
KN_API void kn_ema_set_updates(kn_ema *e, int64_t updates); /* for a program that resumes */
KN_API kn_module *kn_ema_module(const kn_ema *e); /* that e was made for; borrowed; NULL for NULL */
/* This rank's part of the average of parameter number param of kn_params, 1-d; while swapped, of
 * the training's values. Borrowed. NULL for a parameter that was frozen; NULL with an error where
 * there is no such parameter. */
KN_API kn_tensor *kn_ema_value(const kn_ema *e, int param);
/* The average of a buffer of the module, in full precision and its shape; while swapped, the
 * training's values. Borrowed. NULL without .use_buffers, and for another tensor. */
KN_API kn_tensor *kn_ema_buffer(const kn_ema *e, const kn_tensor *buffer);

#ifdef __cplusplus
}
#endif
#endif
