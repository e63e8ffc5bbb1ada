/* tests/fsdp/random_test.c: some random programs; random_slow_test.c runs many more. */
#include "tests/fsdp/random.h"

/* Under sanitizers fewer, and others. */
enum { FIRST = SANITIZED ? 50 : 0, EACH = SANITIZED ? 15 : THREADS_ONLY ? 30 : 100 };

KN_TEST(random, programs_1)
{
    random_check(1000 + FIRST, EACH);
}
KN_TEST(random, programs_2)
{
    random_check(2000 + FIRST, EACH);
}
KN_TEST(random, programs_3)
{
    random_check(3000 + FIRST, EACH);
}
/* The case that ThreadSanitizer's program runs: there all ranks are threads. */
KN_TEST(random, programs_that_may_be_threads)
{
    random_check(4000 + FIRST, EACH);
}

/* Shrunk programs that differed once. */
KN_TEST(random, programs_that_differed)
{
    static const char *const text[] = {
        /* the order of reductions where ranks reach different units */
        "dim=8 head=embed strategy=hybrid_shard_grad_op wrap=linear m1.kind=mlp m1.when=loss_micro",
        "wrap=groups m2.kind=norm m2.when=round m2.unit=yes m7.kind=seq m7.unit=yes m8.kind=own "
        "m8.in=m7 m8.when=run_micro",
        "wrap=parts m1.kind=residual m1.when=loss_micro m2.kind=residual m2.in=m1 m2.recompute=yes "
        "m5.kind=own m5.in=m2 m5.when=round",
        /* zeros for what a backward without sync didn't reach */
        "wrap=linear reduce_unused=yes data=same no_sync=1 pairs=yes m7.kind=linear "
        "m7.when=loss_micro",
        /* modules filled whole, of which several units hold parameters */
        "wrap=parts init=module m1.kind=linear m9.kind=shared",
        /* passes that failed */
        "ranks=1 e0.kind=fail_input",
        "ranks=1 e0.kind=fail_post_backward",
        "ranks=1 comm_hook=default e0.kind=fail_comm_hook",
        "ranks=1 m0.recompute=yes m1.kind=shared e1.kind=fail_grad",
        "ranks=1 wrap=unwrapped m1.kind=mlp e0.kind=fail_post_backward",
        "ranks=1 wrap=unwrapped m1.kind=mlp e0.kind=fail_pre_backward e0.at=m1",
        /* cleared gradients and their count */
        "e0.kind=clear e0.round=1",
        "ranks=1 wrap=unwrapped e0.kind=clear e0.round=1",
        /* passes that fail or are dropped, and steps that go on */
        "ranks=1 steps=3 wrap=linear m1.kind=mlp e0.kind=fail_input e1.kind=fail_grad e1.step=1",
        "ranks=1 steps=3 wrap=linear m1.kind=mlp e0.kind=abandon e1.kind=fail_forward e1.step=1 "
        "e1.at=m1",
        /* frozen after a gradient came */
        "ranks=1 optimizers=2 m2.kind=rms_norm m2.frozen=yes m3.kind=linear "
        "e0.kind=fail_pre_backward e0.step=1 e0.at=m2 e1.kind=freeze e1.step=1 e1.at=m3",
        /* a backward that brings nothing, but reduces partial sums beside a frozen unit */
        "ranks=4 strategy=hybrid_shard wrap=hand no_all_reduce=1 m9.kind=norm m9.unit=yes "
        "m9.frozen=yes "
        "e0.kind=call_backward e0.round=1 e0.at=m9",
        /* a summon after the call of one module of a group */
        "wrap=groups m2.kind=batchnorm m2.unit=yes m6.kind=partly m6.unit=yes e0.kind=call "
        "e0.step=1 e0.at=m2 e1.kind=summon_rank0 e1.step=1",
        /* an ignored module without a parameter of its own */
        "ignored_as=modules data=same m4.kind=linear m6.kind=shared m6.ignored=yes",
        /* halving a gradient before or after it is rounded to f16 */
        "ranks=1 rounds=1 steps=4 param_dtype=f16 output_dtype=f32 grad_hook=activation "
        "scaler=too_large",
    };
    for (size_t i = 0; i < sizeof text / sizeof *text; i++)
        random_check_program(text[i]);
}

/* The printed text of a failure repeats it. */
KN_TEST(random, one_program)
{
    const char *text = getenv("KN_RANDOM_PROGRAM");
    random_check_program(text && *text ? text : "m1.kind=linear");
}
