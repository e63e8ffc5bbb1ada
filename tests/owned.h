/* tests/owned.h: what a block of a test makes goes at its end; sums and means for losses. */
#ifndef KNAP_TESTS_OWNED_H
#define KNAP_TESTS_OWNED_H

#include "autograd/operations.h"
#include "fsdp/ema.h"
#include "nn/nn.h"
#include "optim/optim.h"
#include "tests/kn_test.h"

static inline void owned_optim(kn_optim **o)
{
    kn_optim_free(*o);
}

static inline void owned_scaler(kn_scaler **s)
{
    kn_scaler_free(*s);
}

static inline void owned_ema(kn_ema **e)
{
    kn_ema_free(*e);
}

static inline void owned_simulated(kn_comm **c)
{
    kn_comm_simulated_free(*c);
}

static inline void owned_scope(kn_scope *s)
{
    kn_scope_end(*s);
}

static inline void owned_mode(bool *mode)
{
    kn_set_grad_mode(*mode);
}

/* Before a declaration: OWNED_MODULE net m; OWNED_OPTIM kn_optim *o = kn_sgd(&m); */
#define OWNED_MODULE    __attribute__((cleanup(kn_module_free), unused))
#define OWNED_OPTIM     __attribute__((cleanup(owned_optim), unused))
#define OWNED_SCALER    __attribute__((cleanup(owned_scaler), unused))
#define OWNED_EMA       __attribute__((cleanup(owned_ema), unused))
#define OWNED_SIMULATED __attribute__((cleanup(owned_simulated), unused))

/* From here to the end of the block: a scope of tensors; grad mode is off. */
#define IN_SCOPE                                                                                   \
    kn_scope OWNED_NAME(__LINE__) __attribute__((cleanup(owned_scope), unused)) = kn_scope_begin()
#define WITHOUT_GRAD                                                                               \
    bool OWNED_NAME(__LINE__) __attribute__((cleanup(owned_mode), unused)) = kn_set_grad_mode(false)
#define OWNED_NAME(line)  OWNED_PASTE(line)
#define OWNED_PASTE(line) owned_##line

/* Of all elements. */
static inline kn_tensor *sum_of(kn_tensor *x)
{
    return kn_sum(x, 0, NULL, false);
}

static inline kn_tensor *mean_of(kn_tensor *x)
{
    return kn_mean(x, 0, NULL, false);
}

static inline kn_tensor *mean_square(kn_tensor *x)
{
    return mean_of(kn_mul(x, x));
}

#endif
