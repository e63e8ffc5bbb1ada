/* autograd/function.h: operations of one's own, a forward and a backward in C.
 *
 *     static kn_values cube_forward(kn_function_run *run, kn_values in) // y = x^3
 *     {
 *         kn_save_for_backward(run, in.v[0]);
 *         return KN_VALUES(kn_mul(in.v[0], kn_mul(in.v[0], in.v[0])));
 *     }
 *     static kn_values cube_backward(kn_function_run *run, kn_values dout) // dx = 3 x^2 dy
 *     {
 *         kn_tensor *x = run->saved.v[0];
 *         return KN_VALUES(kn_mul(dout.v[0], kn_scale(kn_mul(x, x), 3)));
 *     }
 *     static const kn_function cube = { .name = "cube", .forward = cube_forward,
 *                                       .backward = cube_backward };
 *     ...
 *     kn_tensor *y = kn_function_call(&cube, x);
 *
 * docs/own-operation.md is the tutorial; kn_gradcheck (autograd/gradcheck.h) checks a backward. */
#ifndef KNAP_AUTOGRAD_FUNCTION_H
#define KNAP_AUTOGRAD_FUNCTION_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KN_MAX_VALUES 8
/* Several tensors into or out of an operation or a module: at most KN_MAX_VALUES, the first n of
 * v; borrowed. */
typedef struct kn_values {
    int n;
    kn_tensor *v[KN_MAX_VALUES];
} kn_values;
/* KN_VALUES(x, NULL, y): at least one, at most KN_MAX_VALUES of them. */
#define KN_VALUES(...)                                                                             \
    ((kn_values){ (int)(sizeof((kn_tensor *[]){ __VA_ARGS__ }) / sizeof(kn_tensor *)),             \
                  { __VA_ARGS__ } })

/* One call of a function, in its forward and later in its backward; to be read. */
typedef struct kn_function_run {
    const void *arg; /* a copy of what the caller passed besides tensors, or NULL */
    int inputs;
    bool needs[KN_MAX_VALUES]; /* input i needs a gradient */
    /* Of each input, in backward as well; a NULL input has dtype KN_DTYPE_DEFAULT. */
    kn_dtype dtype[KN_MAX_VALUES];
    int ndim[KN_MAX_VALUES];
    int64_t shape[KN_MAX_VALUES][KN_MAX_DIMS];
    kn_values saved; /* backward: what kn_save_for_backward was given, in its order */
} kn_function_run;

/* An operation. The struct is copied by each call; what it points at must stay. */
typedef struct kn_function {
    const char *name; /* in messages and traces */
    /* Computes 1 to KN_MAX_VALUES results from the inputs, by operations, which record nothing
     * here, or from raw data (kn_read_data, kn_write_data). Tensors made in it go when it returns,
     * but for the results and those saved. It runs on the thread of the call. A failure: say
     * kn_fail and return whatever. Writing in place to an input that needs a gradient is an
     * error. */
    kn_values (*forward)(kn_function_run *run, kn_values in);
    /* The gradients of all inputs, in their order, from those of the results: the shape, dtype and
     * device of the input, or NULL, which counts as zero; those of inputs that need none
     * (run->needs) are dropped. dout has zeros where a result got no gradient, and NULL for results
     * without one. It must not write to dout or to what was saved. Runs once each time that
     * kn_backward comes through, and records nothing, but for .second_order. NULL: the results have
     * no gradient. */
    kn_values (*backward)(kn_function_run *run, kn_values dout);
    /* Stands in for forward, and for backward, where tensors are on meta and have no values: makes
     * tensors of the results' shapes and dtypes (kn_empty_like). It saves what forward saves, so
     * that its memory is counted. NULL: forward and backward run there too, which functions made of
     * operations only can. */
    kn_values (*shape)(kn_function_run *run, kn_values in);
    /* Floating point operations that forward does itself, besides operations; backward counts
     * twice. For traces and the clock of meta. NULL: 0. */
    double (*flops)(kn_values in);
    uint32_t optional; /* bit i: input i may be NULL */
    uint32_t no_grad;  /* bit i: result i has no gradient; integers and bool never have one */
    /* backward is made of operations, and of the floats that it reads of what was saved, each is an
     * input or a result: so kn_grad_of with .create_graph, which runs it with grad mode on, can go
     * through it. Without this it is an error there. */
    bool second_order;
} kn_function;

/* Applies f. arg[arg_size], or NULL and 0, is copied for backward. Inputs that require grad while
 * grad mode is on leave a node, as with any operation; the results are new tensors of the current
 * scope, even where forward returns an input. {0} with an error that names f where f, an input or a
 * result is wrong. */
KN_API kn_values kn_function_call_n(const kn_function *f, kn_values in, const void *arg,
                                    size_t arg_size);
/* As kn_function_call_n, for a function of one result: kn_function_call(&cube, x). */
KN_API kn_tensor *kn_function_call_(const kn_function *f, kn_values in);
#define kn_function_call(f, ...) kn_function_call_((f), KN_VALUES(__VA_ARGS__))

/* In forward (or shape): keeps inputs, results or others for backward; several calls add up, to at
 * most KN_MAX_VALUES; a NULL stays NULL. Nothing is kept where no input needs a gradient. They are
 * freed with the graph, after a backward without .retain_graph or with the results. A saved tensor
 * that is written in place before backward is an error there. False with an error outside of the
 * run's forward. */
KN_API bool kn_save_for_backward_(kn_function_run *run, kn_values t);
#define kn_save_for_backward(run, ...) kn_save_for_backward_((run), KN_VALUES(__VA_ARGS__))

/* The elements of t, row-major, of the dtype: t's own bytes or, where it isn't contiguous, a copy
 * of the current scope's. For tensors on the CPU, whose operations are done when they return. NULL
 * with an error for another dtype or device. */
KN_API const void *kn_read_data(kn_tensor *t, kn_dtype dtype);
/* The bytes of t to be written, counted as a write in place (kn_bump_version). NULL with an error
 * also where t isn't contiguous, or is a leaf that requires grad while grad mode is on. */
KN_API void *kn_write_data(kn_tensor *t, kn_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
