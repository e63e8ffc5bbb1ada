/* tests/fsdp/controls.h: the controls of a backward, set on a model of several units. */
#ifndef KNAP_TESTS_FSDP_CONTROLS_H
#define KNAP_TESTS_FSDP_CONTROLS_H

#include "knap.h"

static inline bool half_of_sum(const kn_grad_reduction *r, void *arg)
{
    kn_array a = kn_array_make(r->dst, r->dst_dtype, 1, &r->count);
    kn_unary_args half = { .dst = a, .src = a, .kind = KN_AFFINE, .p0 = 0.5, .p1 = 0 };
    return KN_LAUNCH(r->stream, KN_K_UNARY, half);
}

static inline bool plain_gather(const kn_param_gather *g, void *arg)
{
    return kn_gather_default(g, NULL);
}

/* Hooks and a factor that change no bit, zeros for what is unused, a block with another factor. */
static inline bool set_controls(void *g, int ranks)
{
    kn_module *unit[8];
    return kn_fsdp_units(g, unit, 8) > 1 &&
           kn_fsdp_set_all_reduce_hook(g, half_of_sum, NULL, true) &&
           kn_fsdp_set_gather_hook(g, plain_gather, NULL, true) &&
           kn_fsdp_set_reduce_unused(g, true, true) &&
           kn_fsdp_set_divide_factor(g, 0.5 * ranks, true) &&
           kn_fsdp_set_divide_factor(unit[1], ranks, false);
}

#endif
