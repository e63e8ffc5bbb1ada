/* tests/fsdp/gan.h: a generator and a discriminator, of which a backward may leave out the
 * second. */
#ifndef KNAP_TESTS_FSDP_GAN_H
#define KNAP_TESTS_FSDP_GAN_H

#include "tests/fsdp/two.h"

typedef struct gan {
    kn_module base;
    kn_linear g, d; /* a generator and a discriminator */
    bool skip_d;    /* the result leaves d out */
} gan;

static inline kn_tensor *gan_forward(kn_module *self, kn_tensor *x)
{
    gan *m = (gan *)self;
    x = kn_gelu_tanh(kn_call(&m->g, x));
    kn_tensor *y = kn_call(&m->d, x);
    return m->skip_d ? x : y;
}

static inline bool gan_init(gan *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, gan_forward) &&
           kn_linear_init(&m->g, &m->base, "g", 4, 4, .device = KN_META) &&
           kn_linear_init(&m->d, &m->base, "d", 4, 3, .device = KN_META);
}

static inline bool gan_backward(gan *m, int micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4)), *y = kn_call(m, x);
    bool ok = kn_backward(kn_mean(kn_mul(y, y), 0, NULL, false));
    kn_scope_end(scope);
    return ok;
}

#endif
