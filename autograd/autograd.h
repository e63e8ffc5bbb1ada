/* autograd/autograd.h: the tape: gradients, hooks and random keys.
 *
 * Every operation takes borrowed tensors and gives its result to the current scope. Where grad mode
 * is on and an input requires grad, it also leaves a node; kn_backward() runs the nodes in reverse.
 * autograd/operations.h has the operations on tensors of any kind, autograd/functional.h those of
 * neural networks. */
#ifndef KNAP_AUTOGRAD_AUTOGRAD_H
#define KNAP_AUTOGRAD_AUTOGRAD_H

#include "autograd/distances.h"
#include "autograd/functional.h"
#include "autograd/operations.h"
#include "autograd/spectral.h"
#include "autograd/volumes.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Options: a field that is left out, or 0, has the default of the comment beside it. If 0 itself
 * has a meaning, KN_ZERO stands for it: .weight_decay = KN_ZERO, .ignore_index = KN_ZERO, .seed =
 * KN_ZERO. Every value is checked; values that aren't finite are refused. */
#define KN_ZERO (-((int64_t)1 << 62))

/* ---- gradients ------------------------------------------------------------------------------- */

/* Makes a leaf collect a gradient (float tensors that no operation made). Returns t. */
KN_API kn_tensor *kn_require_grad(kn_tensor *t, bool on);
KN_API bool kn_requires_grad(const kn_tensor *t);
/* The accumulated gradient of a leaf: the raw sum over backward passes since it was cleared.
 * Borrowed; NULL where none arrived (without an error), and for parameters of units of fsdp, whose
 * gradients lie in shards (kn_param_grad, or kn_summon with .with_grads). */
KN_API kn_tensor *kn_grad(const kn_tensor *t);
KN_API void kn_clear_grad(kn_tensor *t); /* drops it */
/* From now on the gradient of w[N, C], a leaf that has none yet, stays rows (torch: sparse=True): a
 * backward takes time and memory for the rows that kn_embedding picked, and a step changes those
 * alone. Returns w; see docs/tables.md. */
KN_API kn_tensor *kn_keep_rows(kn_tensor *w);
/* The gradient of such a table: numbers of rows that rise, i64 [U], and the sums of their gradients,
 * f32 (f64 of f64) [U, C]. Of a table that kn_fsdp_wrap cut, those of this rank's rows, numbered
 * from its first. Borrowed until the next backward; NULL where none arrived. */
KN_API kn_tensor *kn_grad_rows(const kn_tensor *w);
KN_API kn_tensor *kn_grad_values(const kn_tensor *w);
/* Records nothing while off. Returns the previous state, to be restored. */
KN_API bool kn_set_grad_mode(bool on);
KN_API bool kn_grad_mode(void);
/* The same values without history. */
KN_API kn_tensor *kn_detach(kn_tensor *t);

typedef struct kn_backward_options {
    KN_BEGIN_OPTIONS;
    kn_tensor *grad;   /* gradient of the result; NULL: ones, result must be a scalar */
    bool retain_graph; /* keep saved tensors for a second backward */
} kn_backward_options;

/* Adds d result / d leaf to every reachable leaf that requires grad (ones to a leaf itself). Frees
 * the graph's saved tensors unless retain_graph; a second backward through freed ones is an error
 * that says so. A backward that fails takes back what it had added; where a leaf had a gradient
 * before, that can't be, and kn_grad and steps refuse until kn_clear_grad. */
KN_API bool kn_backward_(kn_tensor *result, kn_backward_options o);
#define kn_backward(result, ...) kn_backward_(result, KN_OPTIONS(kn_backward_options, __VA_ARGS__))

typedef struct kn_grad_of_options {
    KN_BEGIN_OPTIONS;
    kn_tensor *grad;   /* gradient of the result; NULL: ones, result must be a scalar */
    bool retain_graph; /* keep saved tensors for another backward */
    bool create_graph; /* the gradients have a graph; keeps saved tensors, too */
} kn_grad_of_options;

/* grads[i] = d result / d inputs[i] (torch.autograd.grad), the scope's; NULL where the result
 * doesn't depend on the input. inputs are n tensors that require grad: leaves, or results of
 * operations; a list written in the call stands in parentheses, ((kn_tensor *[]){ x, w }).
 *
 * No leaf's accumulated gradient changes. Only the operations between are computed and let go of:
 * so one can catch the gradient of a result in the middle and go on with kn_backward from there.
 * Hooks on them and on the inputs run. It is no backward of a micro-batch: random keys and the mean
 * over micro-batches stay. A parameter of a unit of fsdp is an error, as its gradient lies in
 * shards; so is, in a hook, a leaf that the backward that runs comes to as well (take kn_detach of
 * it).
 *
 * With .create_graph the gradients are results like others: a loss may be made of them, and
 * kn_backward, or kn_grad_of again, goes on through them to all that they depend on, .grad
 * included. Each backward on the way is then made of operations; hooks run with grad mode on. An
 * operation that has a first derivative only, and a call that recomputes, is an error that names
 * it, before anything runs. Without it the gradients have no graph, and an operation that is
 * recorded with one, or with what was computed from one while grad mode was on, is an error; as a
 * constant it goes by kn_detach, kn_require_grad or a copy. */
KN_API bool kn_grad_of_(kn_tensor *result, kn_tensor *const *inputs, int n, kn_tensor **grads,
                        kn_grad_of_options o);
#define kn_grad_of(result, inputs, n, grads, ...)                                                  \
    kn_grad_of_(result, inputs, n, grads, KN_OPTIONS(kn_grad_of_options, __VA_ARGS__))

/* ---- finding values that aren't finite ------------------------------------------------------- */

/* From now on, in this thread, the first operation that makes a NaN or an infinity is an error.
 * It names the operation, the module, and where it was called; result or gradient with shape,
 * dtype and the number of such values; and the inputs (in backward: what came to it and what
 * forward had saved) that weren't finite already, or says that all were.
 *
 * - An infinity is no error where an input holds one: masks of -inf, made by kn_full,
 *   kn_masked_fill, kn_pad or from data, go through scores and softmax. A NaN always is one, also
 *   one that data brought in: of the first operation that passes it on.
 * - While a loss went through kn_scale_loss, gradients of its backward and operations in hooks
 *   there aren't judged: overflows in f16 are expected, and the scaler skips their steps. Forward
 *   is judged.
 * - Not judged: operations in place, the optimizer, sums over ranks (kn_find_nonfinite_grad).
 * - Every result is read by the host: for debugging. A step can't be recorded (kn_replay_step).
 *   Off, it costs nothing. */
KN_API void kn_set_check(bool on);
KN_API bool kn_checking(void);

/* ---- hooks ----------------------------------------------------------------------------------- */

/* The hook that kn_on_grad and the like (or kn_module_hook) put on; 0, with an error, where they
 * failed. Hooks of a tensor run in the order in which they were put on. An error in a hook names
 * it. */
typedef uint64_t kn_hook;

/* Runs with the complete gradient of t before it flows on; returns NULL to keep it, or a
 * replacement of the same shape, dtype and device, which the next hook sees. It must not write to
 * grad. t requires grad. Of a leaf it sees what one backward brings, before that is added to
 * kn_grad; of a parameter in a unit of fsdp this rank's whole gradient, in the dtype that is
 * reduced, before the reduction. Put on while a backward runs, after the gradient has gone by, it
 * may be an error of that backward (t of kn_gelu_tanh, taken by kn_linear: one product is both). */
typedef kn_tensor *(*kn_tensor_hook)(kn_tensor *grad, void *arg);
KN_API kn_hook kn_on_grad(kn_tensor *t, kn_tensor_hook hook, void *arg);
/* Runs after a leaf's gradient of one backward was complete and accumulated. */
typedef void (*kn_leaf_hook)(kn_tensor *leaf, void *arg);
KN_API kn_hook kn_on_accumulated(kn_tensor *leaf, kn_leaf_hook hook, void *arg);
/* Run just before and after the node that made t computes its backward. */
typedef void (*kn_node_hook)(kn_tensor *const *grads, int n, void *arg);
KN_API kn_hook kn_on_node(kn_tensor *t, kn_node_hook pre, kn_node_hook post, void *arg);
/* Takes a hook off t, also from inside a hook: it doesn't run again. False, without an error, where
 * t has no such hook (any more). Hooks of results go with their graph. */
KN_API bool kn_off_grad(kn_tensor *t, kn_hook hook);
/* Queues fn to run once at the end of the running backward, if that doesn't fail (error outside
 * one). */
KN_API bool kn_on_backward_end(void (*fn)(void *arg), void *arg);

/* ---- random keys ----------------------------------------------------------------------------- */

/* A draw of dropout and the like is a function of (seed, step, micro-batch, module path, call,
 * element). A micro-batch is the same on any rank, so ranks draw different numbers, and N of them
 * those of one process. With grad mode off, draws and calls have a count of their own: they go on
 * with each call, and training draws the same numbers with and without them.
 *
 * kn_seed sets the seed, 1337 at first; parameters that their first read fills take it, too.
 * kn_set_step sets the number of steps done, at least 0, for a program that resumes; kn_get_step
 * tells it. Both begin the count of draws with grad mode off again: the same seed and step give the
 * same numbers.
 * kn_step counts the step on, with several optimizers once each time that one of them steps again:
 * they step in turn, and it counts the rounds. */
KN_API void kn_seed(uint64_t seed);
KN_API void kn_set_step(int64_t step);
KN_API int64_t kn_get_step(void);
/* From here to kn_draws_end a draw is a function of (seed, step, number, module path, call,
 * element), with grad mode on or off, and shifts no draw outside. Ranks that give the same number
 * draw alike: a text that all ranks write, a game that all play. The number of a game gives its
 * draws on whichever rank plays it. The same number begins the same draws again, so count on.
 * Neither it nor its end may lie in a call of a module that the other lies outside of. */
typedef struct kn_draws {
    struct kn_frame *frame;
} kn_draws;
KN_API kn_draws kn_draws_begin(int64_t number);
KN_API void kn_draws_end(kn_draws draws); /* Ends it. To be called also where an error stands. */

#ifdef __cplusplus
}
#endif
#endif
