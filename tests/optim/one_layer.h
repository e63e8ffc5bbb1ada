/* tests/optim/one_layer.h: a net of one layer, 5 -> 3. */
#ifndef KNAP_TESTS_ONE_LAYER_H
#define KNAP_TESTS_ONE_LAYER_H

#include "nn/layers.h"
#include "optim/optim.h"
#include "tests/kn_test.h"

typedef struct net {
    kn_module base;
    kn_linear fc;
} net;

static inline kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((net *)self)->fc, x);
}

static inline void build(net *m, kn_dtype t)
{
    kn_module_init(&m->base, net_forward);
    kn_linear_init(&m->fc, &m->base, "fc", 5, 3, .dtype = t);
    kn_materialize(m, KN_CPU, 7);
    KN_CHECK_OK();
}

#endif
