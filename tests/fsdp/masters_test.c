/* tests/fsdp/masters_test.c: parameters, gradients and states of bf16 and f16, rounded at random
 * after each step: every way of sharding gives the bits of one plain process. Every rank has the
 * same micro-batch, and there are 1, 2 or 4 ranks, so that means of gradients are exact. Rank
 * functions return a status. */
#include "tests/fsdp/optimizers.h"
#include "tests/fsdp/two.h"
#include "tests/owned.h"

enum { STEPS = 3 };

static kn_tensor *loss_of(two *m, kn_dtype t, int micro)
{
    kn_tensor *x = kn_cast(kn_randn(KN_F32, KN_CPU, 5, (uint64_t)micro, KN_SHAPE(2, 4)), t);
    kn_tensor *y = kn_cast(kn_call(m, x), KN_F32);
    return mean_square(y);
}

static bool step_on(two *m, kn_optim *o, kn_dtype t, int micro)
{
    IN_SCOPE;
    bool ok = kn_backward(loss_of(m, t, micro));
    return ok && kn_step(o);
}

/* Matrices are cut along their columns where these divide by the ranks: then a part is rows of the
 * parameter, apart from each other. */
static int columns(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return ndim == 2 && shape[1] % *(int *)arg == 0 ? 1 : 0;
}

static void one(kn_comm *world, const way *w, kn_dtype t, int optimizer)
{
    OWNED_MODULE two m, plain;
    int ranks = kn_comm_size(world);
    KN_CHECK(two_init(&plain, KN_META, t) && kn_materialize(&plain, KN_CPU, NET_SEED));
    KN_CHECK(two_init(&m, KN_META, t) &&
             kn_fsdp_wrap(&m, world, WAY_OPTIONS(w), .wrap_class = "linear", .seed = NET_SEED,
                          .placement = w->layout == KN_LAYOUT_PER_PARAM ? columns : NULL,
                          .placement_arg = &ranks));
    OWNED_OPTIM kn_optim *o = optimizer_make(optimizer, &m, true),
                         *p = optimizer_make(optimizer, &plain, true);
    KN_CHECK(o && p);
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(step_on(&m, o, t, i) && step_on(&plain, p, t, i));
    const kn_param *list;
    KN_CHECK(kn_params(&m, &list) == 4 && kn_dtype_of(list[0].master) == t);
    KN_CHECK(all_read_as(&m, &plain), "optimizer %d, %s", optimizer, kn_dtype_name(t));
}

RANK_TEST(masters, rounded_at_random_to_the_same_bits, .by = in_all_ways_on_threads)
{
    kn_set_threads(1);
    for (int k = 0; k < OPTIMIZER_KINDS * 2; k++)
        one(world, arg, k % 2 ? KN_F16 : KN_BF16, k / 2);
}
