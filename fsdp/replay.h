/* fsdp/replay.h: a training step that is recorded once on CUDA and launched as one graph from then
 * on. Where kernels are short, a step is limited by launching thousands of them one by one; a graph
 * is one launch.
 *
 * fn is one whole optimizer step with all its micro-batches. It is called until the step is
 * recorded, and not afterwards. So values that change from step to step must lie in tensors that
 * were made before: inputs (kn_copy_ into them before the step), results (kn_copy_ the loss into
 * one inside the step, read it after). The learning rate (kn_set_lr, before the step), the number
 * of the step and random draws go on as without a graph. Other values that fn computes on the host
 * stay as they were recorded, and hooks of modules don't run. Inside fn the host must not wait for
 * the device (kn_item).
 *
 * The step is recorded after .eager_steps calls that just run it, while memory grows and
 * communicators are made. It is recorded anew, after as many calls, when modules, parameters,
 * units, optimizers or their settings change. Several ranks all call kn_replay_step alike; they
 * record and replay together. */
#ifndef KNAP_FSDP_REPLAY_H
#define KNAP_FSDP_REPLAY_H

#include "fsdp/fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_replay kn_replay;
typedef bool (*kn_step_fn)(void *arg); /* false: the step failed */

typedef struct kn_replay_options {
    KN_BEGIN_OPTIONS;
    int eager_steps; /* 0: 2 */
} kn_replay_options;
/* For steps of the module tree whose root is given. Free it before the module, and before its
 * optimizers if the graph's memory is wanted back at once. */
KN_API kn_replay *kn_replay_new_(void *module, kn_replay_options o);
#define kn_replay_new(module, ...)                                                                 \
    kn_replay_new_(module, KN_OPTIONS(kn_replay_options, __VA_ARGS__))
KN_API void kn_replay_free(kn_replay *r);
/* Runs fn(arg), or replays it with the same values to the bit. A step that can't be recorded runs
 * each time. After an error in a recording, nothing of that step has run on the device. */
KN_API bool kn_replay_step(kn_replay *r, kn_step_fn fn, void *arg);
/* Why the step isn't recorded: the first operation that a replay couldn't repeat, and its place.
 * NULL while nothing is known against a recording. */
KN_API const char *kn_replay_why(const kn_replay *r);
typedef struct kn_replay_counts {
    int64_t eager, recorded, replayed; /* steps */
} kn_replay_counts;
KN_API kn_replay_counts kn_replay_count(const kn_replay *r);

#ifdef __cplusplus
}
#endif
#endif
