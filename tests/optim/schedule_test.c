/* tests/optim/schedule_test.c: learning rates by step, at the ends and inside of each part. */
#include "optim/optim.h"
#include "tests/kn_test.h"

/* The rate of step; an error fails the case. */
static double at(kn_schedule s, int64_t step)
{
    double rate = kn_schedule_at(&s, step);
    KN_CHECK_OK();
    return rate;
}

static bool close_to(double a, double b)
{
    return fabs(a - b) < 1e-12;
}

KN_TEST(schedule, constant_linear_cosine)
{
    kn_schedule c = { .lr = 2, .warmup = 3 };
    KN_CHECK(at(c, 0) == 0.5 && at(c, 2) == 1.5);
    KN_CHECK(at(c, 3) == 2 && at(c, 1000) == 2);
    kn_schedule l = { KN_LINEAR, .lr = 2, .min_lr = 1, .warmup = 10, .steps = 20 };
    KN_CHECK(at(l, 10) == 2 && at(l, 15) == 1.5);
    KN_CHECK(at(l, 20) == 1 && at(l, 99) == 1);
    kn_schedule s = { KN_COSINE, .lr = 2, .min_lr = 1, .warmup = 10, .steps = 20 };
    KN_CHECK(at(s, 10) == 2 && close_to(at(s, 15), 1.5));
    KN_CHECK(close_to(at(s, 12), 1 + 0.5 * (1 + cos(M_PI * 0.2))));
    KN_CHECK(at(s, 20) == 1);
}

KN_TEST(schedule, polynomial)
{
    kn_schedule s = { KN_POLYNOMIAL, .lr = 3, .min_lr = 1, .warmup = 4, .steps = 14, .power = 2 };
    KN_CHECK(close_to(at(s, 0), 3.0 / 5) && at(s, 4) == 3 && close_to(at(s, 9), 1.5));
    KN_CHECK(at(s, 14) == 1 && at(s, 15) == 1);
    s.power = 0; /* 1: linear */
    KN_CHECK(close_to(at(s, 9), 2));
}

KN_TEST(schedule, step_decay)
{
    kn_schedule s = { KN_STEP_DECAY, .lr = 8, .warmup = 1, .every = 10, .factor = 0.5 };
    KN_CHECK(at(s, 0) == 4 && at(s, 1) == 8 && at(s, 10) == 8 && at(s, 11) == 4 && at(s, 31) == 1);
    s.min_lr = 3;
    KN_CHECK(at(s, 31) == 3);
    s.factor = 0; /* 0.1 */
    s.min_lr = 0;
    KN_CHECK(close_to(at(s, 21), 0.08));
}

KN_TEST(schedule, warmup_stable_decay)
{
    kn_schedule s = { KN_WSD, .lr = 4, .min_lr = 2, .warmup = 5, .steps = 100, .decay = 20 };
    KN_CHECK(close_to(at(s, 4), 4 * 5.0 / 6) && at(s, 5) == 4 && at(s, 80) == 4);
    KN_CHECK(close_to(at(s, 90), 3) && close_to(at(s, 99), 2.1) && at(s, 100) == 2);
    s.decay = 0; /* a tenth of the steps */
    KN_CHECK(at(s, 90) == 4 && close_to(at(s, 95), 3));
    s.steps = 6; /* at least one step, and no more than warmup leaves */
    KN_CHECK(at(s, 5) == 4 && at(s, 6) == 2);
    s.warmup = 6;
    KN_CHECK(at(s, 6) == 2);
}

/* torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=10, pct_start=0.4,
 * final_div_factor=1e4): the rates that torch gives. */
KN_TEST(schedule, one_cycle)
{
    static const double torch[] = { 0.04,
                                    0.28,
                                    0.76,
                                    1.0,
                                    0.9330129698414118,
                                    0.750001,
                                    0.500002,
                                    0.2500030000000001,
                                    0.06699103015858822,
                                    4e-06 };
    kn_schedule s = { KN_ONE_CYCLE, .lr = 1, .min_lr = 4e-6, .warmup = 4, .steps = 10 };
    for (int i = 0; i < 10; i++)
        KN_CHECK(close_to(at(s, i), torch[i]), "step %d: %.16g, not %.16g", i, at(s, i), torch[i]);
    KN_CHECK(at(s, 11) == 4e-6, "it stays");
    s.warmup = 1; /* begins at the top */
    KN_CHECK(at(s, 0) == 1);
}

static double squares(int64_t step, void *arg)
{
    return *(const double *)arg * (double)(step * step);
}

KN_TEST(schedule, own_function)
{
    double factor = 0.5;
    kn_schedule s = { KN_OWN_SCHEDULE, .rate = squares, .arg = &factor };
    KN_CHECK(at(s, 0) == 0 && at(s, 4) == 8);
}

KN_TEST(schedule, bad_values)
{
    static const struct {
        kn_schedule s;
        const char *says;
    } bad[] = {
        { { .kind = (kn_schedule_kind)99 }, "no kind of schedule" },
        { { .kind = (kn_schedule_kind)-1 }, "no kind of schedule" },
        { { KN_COSINE, .lr = -1 }, ".lr is -1" },
        { { KN_COSINE, .lr = NAN }, ".lr is nan" },
        { { KN_COSINE, .steps = 10 }, ".lr is 0" },
        { { KN_COSINE, .lr = 1 }, ".steps is 0" },
        { { KN_WSD, .lr = 1 }, ".steps is 0" },
        { { KN_LINEAR, .lr = 1, .min_lr = INFINITY }, ".min_lr inf" },
        { { KN_LINEAR, .lr = 1, .min_lr = 2, .steps = 9 }, ".min_lr is 2, above .lr, 1" },
        { { KN_ONE_CYCLE, .lr = 1, .min_lr = 2, .warmup = 2, .steps = 9 }, "above .lr, 1" },
        { { KN_STEP_DECAY, .lr = 1, .min_lr = 2, .every = 3 }, "above .lr, 1" },
        { { KN_CONSTANT, .lr = 1, .min_lr = 0.1 }, ".min_lr is 0.1, but the rate is constant" },
        { { .lr = 1, .min_lr = 0.1, .steps = 9 }, "but the rate is constant" },
        { { KN_LINEAR, .lr = 1, .warmup = -1 }, ".warmup is -1" },
        { { KN_LINEAR, .lr = 1, .steps = -5 }, ".steps -5" },
        { { KN_POLYNOMIAL, .lr = 1, .steps = 9, .power = -1 }, ".power is -1" },
        { { KN_STEP_DECAY, .lr = 1 }, ".every is 0" },
        { { KN_STEP_DECAY, .lr = 1, .every = 1, .factor = 2 }, ".factor 2" },
        { { KN_WSD, .lr = 1, .steps = 10, .warmup = 5, .decay = 6 }, "don't fit" },
        { { KN_WSD, .lr = 1, .steps = 10, .decay = -1 }, "don't fit" },
        { { KN_ONE_CYCLE, .lr = 1, .steps = 10 }, "rises for .warmup steps, 0" },
        { { KN_ONE_CYCLE, .lr = 1, .steps = 10, .warmup = 10 }, "give at least 1 and more" },
        { { KN_OWN_SCHEDULE }, "needs .rate" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        KN_CHECK(kn_schedule_at(&bad[i].s, 3) == 0 && strstr(kn_error(), bad[i].says),
                 "'%s' is not in '%s'", bad[i].says, kn_error());
        kn_clear_error();
    }
    kn_schedule good = { .lr = 1, .warmup = INT64_MAX };
    KN_CHECK(kn_schedule_at(&good, 0) >= 0, "a rate below 0");
    kn_schedule rises = { KN_COSINE, .lr = 8, .warmup = 7, .steps = 4 }; /* beyond its steps */
    KN_CHECK(kn_schedule_at(&rises, 3) == 4 && kn_schedule_at(&rises, 5) == 6);
    KN_CHECK(kn_schedule_at(&good, -1) == 0 && strstr(kn_error(), "the step is -1"));
    kn_clear_error();
}
