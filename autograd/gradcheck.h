/* autograd/gradcheck.h: a gradient against central differences. */
#ifndef KNAP_AUTOGRAD_GRADCHECK_H
#define KNAP_AUTOGRAD_GRADCHECK_H

#include "autograd/autograd.h"
#include "autograd/function.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The function under check: results from inputs, by differentiable operations, alike each time. */
typedef kn_values (*kn_gradcheck_fn)(kn_values in, void *arg);

typedef struct kn_gradcheck_options {
    KN_BEGIN_OPTIONS;
    void *arg;      /* passed to the function */
    double eps;     /* h; 0: 1e-5 */
    double atol;    /* 0: 1e-6; KN_ZERO: 0 */
    double rtol;    /* 0: 1e-6; KN_ZERO: 0 */
    uint64_t seed;  /* of the weights */
    int64_t one_in; /* compares one element in so many; 0: each */
} kn_gradcheck_options;

/* Whether the gradients of fn are right. For results y_k and random weights w_k of them, L = sum
 * over k of w_k y_k has a derivative by each element of each input that requires grad: backward's
 * must equal the central difference (L(x + h) - L(x - h)) / 2h, within atol + rtol |difference|.
 * Such inputs are f64; others, of any dtype, or NULL, are passed on as they are. A tensor that is
 * given twice is one input with two uses. Backward is checked on copies of the inputs: contiguous
 * ones, ones with gaps in another order of memory, and with fn called twice before one backward;
 * fn draws the same random values each time. Results that don't require grad don't count, unless
 * none does.
 *
 * false with an error: fn failed, or a sentence that says which element of which input differs most
 * and by how much. Gradients and random keys are afterwards as before, also of parameters
 * that fn uses beside its inputs, unless a unit of fsdp holds them. */
KN_API bool kn_gradcheck_(kn_gradcheck_fn fn, kn_values in, kn_gradcheck_options o);
#define kn_gradcheck(fn, in, ...)                                                                  \
    kn_gradcheck_(fn, in, KN_OPTIONS(kn_gradcheck_options, __VA_ARGS__))

/* Whether the gradients of fn's gradients are right (kn_grad_of with .create_graph): kn_gradcheck of
 * the function whose inputs are those of fn and a random weight of the shape of each result, and
 * whose results are the gradients of the sum of weights times results. Inputs and results are
 * KN_MAX_VALUES together at most. */
KN_API bool kn_gradgradcheck_(kn_gradcheck_fn fn, kn_values in, kn_gradcheck_options o);
#define kn_gradgradcheck(fn, in, ...)                                                              \
    kn_gradgradcheck_(fn, in, KN_OPTIONS(kn_gradcheck_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
