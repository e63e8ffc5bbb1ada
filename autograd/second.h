/* autograd/second.h (private): gradients that are differentiated in turn (kn_grad_of with
 * .create_graph). Such a pass runs with grad mode on and calls an operation's on_tape, whose
 * operations are recorded: to the tape they are a forward like any other, so each further order
 * needs nothing more. A backward made of operations serves as on_tape, as it is; for the others: */
#ifndef KNAP_AUTOGRAD_SECOND_H
#define KNAP_AUTOGRAD_SECOND_H

#include "autograd/autograd_internal.h"

/* Of an operation that is linear in all inputs together but those of const_in. Its gradient is
 * linear in dy, with the operation as its own gradient: dy' = op(gradients of dx). */
bool kn_linear_on_tape(kn_op_grad *g);
/* Of y = B(a, b), or B(a, b) + c, of inputs 0 to 2, the first two saved. Its gradients are bilinear
 * as well: with t = <dy, B(a, b)>, and p, q those of da and db, dy' = B(p, b) + B(a, q), and a, b
 * get what B's backward gives for (a, q) and for (p, b). */
bool kn_bilinear_on_tape(kn_op_grad *g);
/* Of any whose forward is made of operations as well (kn_op.composed): that is computed again, and
 * differentiated. */
bool kn_composed_on_tape(kn_op_grad *g);
/* slopes.c: dx of y = f(x), from the formula in its row of kernels/kinds.h. */
kn_tensor *kn_slope_on_tape(kn_unary kind, kn_tensor *d, kn_tensor *x, kn_tensor *y, double p0,
                            double p1);

/* A view of t that a node made, where t has a graph or is a leaf that requires grad. */
kn_tensor *kn_on_tape_view(kn_tensor *t);
/* *t, which was saved: again the output of node, or the leaf that it was a view of. NULL stays. */
bool kn_with_graph(kn_tensor **t, kn_node *node, int out, kn_tensor *leaf);

#endif
