/* tests/fsdp/seeing_test.c: a summary of a sharded model is that of the whole one; kn_set_check
 * changes no bit over ranks, and lets a scaler's overflows pass, but not those of a forward. */
#include "nn/summary.h"
#include "tests/fsdp/matrix.h"
#include "tests/fsdp/two.h"
#include "tests/owned.h"

enum { STEPS = 2, MICRO = 4, BATCH = 3, IN = 4 };

/* ---- summaries ------------------------------------------------------------------------------- */

/* The options of a wrap. */
static const kn_fsdp_wrap_options summed_up[] = {
    { .wrap_class = "linear" },
    { .wrap_class = "linear", .param_dtype = KN_BF16, .layout = KN_LAYOUT_PER_PARAM },
};

RANK_TEST(seeing, a_summary_of_a_sharded_model_is_that_of_the_whole, .threads = "124",
          ROWS(summed_up))
{
    kn_fsdp_wrap_options o = *(const kn_fsdp_wrap_options *)arg;
    o._size = sizeof o;
    TWO(whole);
    TWO(sharded);
    KN_CHECK(kn_fsdp_wrap_(&sharded, world, o));
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(BATCH, IN));
    for (int step = 0; step < 2; step++) {
        kn_summary_table *want = kn_summary_new(&whole, KN_VALUES(x)),
                         *got = kn_summary_new(&sharded, KN_VALUES(x));
        KN_CHECK(want && got && got->rows == want->rows);
        for (int i = 0; i < got->rows; i++) {
            got->row[i].module = want->row[i].module;
            KN_CHECK(memcmp(&got->row[i], &want->row[i], sizeof *got->row) == 0, "row %d", i);
        }
        kn_summary_free(want);
        kn_summary_free(got);
        KN_CHECK(kn_backward(mean_of(kn_cast(kn_call(&sharded, x), KN_F32))));
    }
    double before, after; /* a unit that is gathered computes with what was gathered */
    KN_CHECK(two_evaluate(&sharded, &before) && kn_unshard_wait(kn_fsdp_unshard(&sharded)));
    kn_summary_free(kn_summary_new(&sharded, KN_VALUES(x)));
    KN_CHECK(two_evaluate(&sharded, &after) && before == after, "loss %g, was %g", after, before);
}

/* ---- checks ---------------------------------------------------------------------------------- */

static bool check_it(matrix_net *n, const matrix_spec *s)
{
    kn_set_check(true);
    return true;
}

KN_TEST(seeing, checking_changes_no_bit)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        MATRIX_CHECK(.model = MATRIX_GPT, .ranks = ranks, .rounds = MICRO / ranks, .steps = STEPS,
                     .threads = true, .prepare = check_it, .recompute = ranks == 2);
    kn_set_check(false);
}

static kn_tensor *loss_of(two *n, double factor)
{
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, 0, KN_SHAPE(BATCH, IN));
    return mean_of(kn_cast(kn_call(n, kn_scale(x, factor)), KN_F32));
}

/* With a scaler gradients in f16 may overflow, a forward may not; without one neither may. */
KN_TEST(seeing, overflows_of_a_scaled_loss_pass_the_check)
{
    TWO_WRAPPED(n, NULL, .wrap_class = "linear", .param_dtype = KN_F16, .reduce_dtype = KN_F32);
    OWNED_OPTIM kn_optim *opt = kn_sgd(&n, .lr = 0.1);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&n, .init_scale = 1e9);
    kn_set_check(true);
    IN_SCOPE;
    KN_CHECK(kn_backward(kn_scale_loss(s, loss_of(&n, 1))));
    KN_CHECK(kn_find_nonfinite_grad(&n), "the scale was too small for an overflow");
    KN_CHECK(kn_scaler_step(s, opt));
    REFUSED(kn_scale_loss(s, loss_of(&n, 1e9)),
            "check: forward of 'cast' made values that aren't finite: its result f16[3,4]");
    kn_tensor *huge = kn_full(KN_F32, KN_CPU, 1e9, KN_SCALAR), *loss = loss_of(&n, 1);
    KN_CHECK(loss && !kn_backward(loss, .grad = huge));
    KN_CHECK_ERROR("check: backward of 'cast'");
    kn_set_check(false);
}
