/* nn/hooks.h: functions of the user's that run around the calls of modules. */
#ifndef KNAP_NN_HOOKS_H
#define KNAP_NN_HOOKS_H

#include "nn/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Hooks of one module run around each of its calls, and in backward before its first node and after
 * its last. Each is told its event and may change the tensors in it: it puts another tensor in the
 * place of one. Several hooks run in the order in which they were put on, those after a call and
 * after its backward the other way round: the first one is the outermost.
 *
 *     static void halve(kn_module_event *e, void *arg)
 *     {
 *         e->out.v[0] = kn_scale(e->out.v[0], 0.5);
 *     }
 *     ...
 *     kn_hook h = kn_module_hook(&net.fc1, (kn_module_hooks){ .post_forward = halve });
 *
 * - pre_forward sees the inputs, and may change their number too; post_forward the results, whose
 *   number stays. A unit of fsdp is gathered before and released after, and the tensors are on the
 *   device and in the dtype in which the module computes. post_forward also runs where an error
 *   stands, without tensors.
 * - pre_backward sees the gradients of the results, before the module's own backward, and a unit
 *   is gathered before it; post_backward those of the results and of the inputs, each complete,
 *   before they flow on. The results and inputs are those outside of the call: as its caller
 *   passed and got them. A gradient is NULL where none came (the tensor requires none, say), and
 *   that stays NULL; else it may be replaced by one of the same shape, dtype and device, never
 *   written in place. A tensor that is passed or returned twice has its gradient at the first
 *   place.
 * - Hooks run on every rank, under no_grad, and on meta, where tensors have no values. Those that
 *   only look change no bit. A replacement that is a function of the tensors keeps the bits of fsdp
 *   over ranks.
 * - kn_recompute runs a call's forward hooks again (event.again), and they must then do the same.
 * - kn_enter and kn_leave: the events have no tensors.
 *
 * An error in a hook names it, by .name where it is given. */
typedef enum kn_module_moment {
    KN_PRE_FORWARD = 1,
    KN_POST_FORWARD,
    KN_PRE_BACKWARD,
    KN_POST_BACKWARD
} kn_module_moment;
typedef struct kn_module_event {
    kn_module_moment moment;
    kn_module *module;
    bool again;                  /* forward: kn_recompute computes it for backward */
    kn_values in, out;           /* forward: inputs; results, after the call */
    kn_values grad_out, grad_in; /* backward: gradients of the results; of the inputs, after it */
} kn_module_event;
typedef struct kn_module_hooks { /* any may be NULL */
    void (*pre_forward)(kn_module_event *e, void *arg);
    void (*post_forward)(kn_module_event *e, void *arg);
    void (*pre_backward)(kn_module_event *e, void *arg);
    void (*post_backward)(kn_module_event *e, void *arg);
    void *arg;
    const char *name; /* for messages; must stay */
} kn_module_hooks;
/* Puts hooks on m, for calls that begin from now on; 0 with an error. */
KN_API kn_hook kn_module_hook(void *m, kn_module_hooks hooks);
/* Takes hooks off m, also from inside of one. False, without an error, where m has no such hooks
 * (any more). */
KN_API bool kn_module_unhook(void *m, kn_hook hook);

#ifdef __cplusplus
}
#endif

#endif
