/* nn/hooks_internal.h (private): where a call runs the hooks of its module. */
#ifndef KNAP_NN_HOOKS_INTERNAL_H
#define KNAP_NN_HOOKS_INTERNAL_H

#include "nn/nn_internal.h"

/* How many hooks m has, in a replay without those that came after its forward. */
int kn_hooks_count(const kn_module_impl *m);
/* The hooks of a call: around forward, with its tensors (NULL: kn_enter), and around
 * backward. */
void kn_hooks_pre_forward(kn_module_impl *m, kn_values *in);
void kn_hooks_post_forward(kn_module_impl *m, kn_values in, kn_values *out);
void kn_hooks_pre_backward(kn_module_impl *m, kn_frame *f);
void kn_hooks_post_backward(kn_module_impl *m, kn_frame *f);
/* Where hooks look at gradients: *in become tensors whose gradients they see, before the call f;
 * *out after it. */
void kn_hooks_inputs(kn_module_impl *m, kn_frame *f, kn_values *in);
void kn_hooks_results(kn_module_impl *m, kn_frame *f, kn_values *out);

#endif
