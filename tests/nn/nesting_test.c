/* tests/nn/nesting_test.c: forwards that call themselves. */
#include "knap.h"
#include "tests/owned.h"

static kn_tensor *ones(void)
{
    return kn_ones(KN_F32, KN_CPU, KN_SHAPE(8, 4));
}

typedef struct chain {
    kn_module base;
    int left; /* calls to go; below 0: without an end */
} chain;

static kn_tensor *chain_forward(kn_module *self, kn_tensor *x)
{
    chain *m = (chain *)self;
    return m->left-- == 0 ? x : kn_call(m, kn_scale(x, 1));
}

static kn_values endless(kn_function_run *run, kn_values in);
static kn_values endless_grad(kn_function_run *run, kn_values grad)
{
    (void)run;
    return grad;
}
static const kn_function calls_itself = { .name = "calls_itself",
                                          .forward = endless,
                                          .backward = endless_grad };

static kn_values endless(kn_function_run *run, kn_values in)
{
    (void)run;
    return KN_VALUES(kn_function_call(&calls_itself, in.v[0]));
}

KN_TEST(nesting, a_forward_that_calls_itself)
{
    for (int recompute = 0; recompute < 2; recompute++) {
        OWNED_MODULE chain m = { .left = 300 };
        KN_CHECK(kn_module_init(&m.base, chain_forward) && kn_recompute(&m, recompute));
        KN_CHECK(recompute || kn_call(&m, ones()));
        m.left = -1;
        REFUSED(kn_call(&m, ones()), "does a forward call its own module or function?");
        m.left = 3; /* nothing of it stays */
        KN_CHECK(recompute || kn_call(&m, ones()));
    }
    REFUSED(kn_function_call(&calls_itself, ones()), "'calls_itself' is called inside");
}
