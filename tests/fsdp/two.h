/* tests/fsdp/two.h: a model of two linear layers, of which each may be a unit, or both together
 * one. */
#ifndef KNAP_TESTS_FSDP_TWO_H
#define KNAP_TESTS_FSDP_TWO_H

#include "tests/fsdp/net.h"

enum { TWO_MOST = 20 }; /* elements of its largest parameter */

typedef struct two {
    kn_module base;
    kn_linear a, b; /* 4 -> 5 -> 4 */
} two;

static inline kn_tensor *two_forward(kn_module *self, kn_tensor *x)
{
    two *m = (two *)self;
    return kn_call(&m->b, kn_gelu_tanh(kn_call(&m->a, x)));
}

static inline bool two_init(two *m, kn_device device, kn_dtype dtype)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, two_forward) &&
           kn_linear_init(&m->a, &m->base, "a", 4, 5, .device = device, .dtype = dtype) &&
           kn_linear_init(&m->b, &m->base, "b", 5, 4, .device = device, .dtype = dtype);
}

/* Declare m, which goes with its block: on meta, wrapped, whole. */
#define TWO(m)                                                                                     \
    OWNED_MODULE two m;                                                                            \
    KN_CHECK(two_init(&m, KN_META, KN_F32))
#define TWO_WRAPPED(m, ...)                                                                        \
    TWO(m);                                                                                        \
    KN_CHECK(kn_fsdp_wrap(&m, __VA_ARGS__))
#define TWO_WHOLE(m)                                                                               \
    TWO(m);                                                                                        \
    KN_CHECK(kn_materialize(&m, KN_CPU, NET_SEED))

/* The loss of micro-batch micro, f32; scoped. m: a two, or a module around one. */
static inline kn_tensor *two_loss(void *m, int micro)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4));
    kn_tensor *y = kn_cast(kn_call(m, x), KN_F32);
    return mean_square(y);
}

static inline bool two_backward(void *m, int micro)
{
    IN_SCOPE;
    bool ok = kn_backward(two_loss(m, micro));
    return ok;
}

/* A forward alone; false where it fails. */
static inline bool two_evaluate(void *m, double *loss)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    kn_tensor *y = two_loss(m, 0);
    *loss = y ? kn_item(y) : NAN;
    return kn_ok();
}

/* An error stands that has both texts in it; clears it. */
static inline bool error_has(const char *a, const char *b)
{
    bool yes = !kn_ok() && strstr(kn_error(), a) && strstr(kn_error(), b);
    if (!yes)
        fprintf(stderr, "no '%s', '%s' in: %s\n", a, b, kn_ok() ? "(no error)" : kn_error());
    kn_clear_error();
    return yes;
}

#endif
