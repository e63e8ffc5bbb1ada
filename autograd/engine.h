/* autograd/engine.h (private): running a backward from several roots; used by kn_backward and, nested,
 * by recompute. */
#ifndef KNAP_AUTOGRAD_ENGINE_H
#define KNAP_AUTOGRAD_ENGINE_H

#include "autograd/autograd_internal.h"

typedef struct kn_engine kn_engine;

/* Runs the pass from roots' outputs with their gradients. Roots may repeat. */
bool kn_engine_run(kn_node *const *root, const int *out_index, kn_tensor *const *grad, int roots,
                   bool retain);

#endif
