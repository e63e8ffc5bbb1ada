/* autograd/hooks.h (private): running the user's functions on gradients. */
#ifndef KNAP_AUTOGRAD_HOOKS_H
#define KNAP_AUTOGRAD_HOOKS_H

#include "autograd/autograd_internal.h"

/* The gradients of a call's results and inputs, for the hooks of its module. */
typedef struct kn_call_grads {
    kn_node *results; /* stands for them; borrowed; NULL: none */
    int nin, nout;
    kn_tensor *out[KN_MAX_OUT]; /* gradients of the results in the running backward: references */
    bool ended;                 /* the hooks after it have run */
} kn_call_grads;

/* A hook that runs, for messages; the innermost one of the context. */
typedef struct kn_hook_run {
    char text[96]; /* "pre_forward hook 'spy'" */
    struct kn_hook_run *outer;
} kn_hook_run;
void kn_hook_begin(kn_hook_run *h, const char *fmt, ...) KN_PRINTF(2, 3);
void kn_hook_end(kn_hook_run *h);
void kn_hooks_free(kn_hook_entry *list);
void kn_leaf_sweep(kn_leaf *leaf); /* frees the hooks that were taken off */

/* The gradient that the hooks on output out_index leave, g or another one; NULL with an
 * error. Messages say "of 'name'". */
kn_tensor *kn_run_grad_hooks(kn_hook_entry *h, int out_index, kn_tensor *g, const char *of,
                             const char *name);
bool kn_run_leaf_hooks(kn_leaf *leaf);
void kn_run_node_hooks(const kn_node *n, kn_tensor *const *grads, int count, bool after);
/* other may stand for the gradient g; else an error. */
bool kn_gradient_fits(const kn_tensor *other, const kn_tensor *g);

#endif
