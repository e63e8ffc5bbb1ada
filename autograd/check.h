/* autograd/check.h (private): values that aren't finite (kn_set_check). */
#ifndef KNAP_AUTOGRAD_CHECK_H
#define KNAP_AUTOGRAD_CHECK_H

#include "autograd/autograd_internal.h"

/* The results of an operation's forward; false with an error that names it. may_fill: the caller's
 * own infinities may stand in them. */
bool kn_check_results(const char *what, bool may_fill, kn_tensor *const *in, int nin,
                      kn_tensor *const *out, int nout);
/* The gradients that n's backward made. */
bool kn_check_gradients(const kn_node *n, const kn_op_grad *g);
/* Around n's backward: returns whether the check is on. */
bool kn_check_pause(const kn_node *n);
void kn_check_resume(bool was);

#endif
