/* tests/autograd/losses_test.c: losses against formulas in double written here, by every reduction
 * and with weights; extreme values; errors. (Gradients, dtypes, meta: every.h.) */
#include "tests/owned.h"
#include <math.h>

enum { ROWS = 3, CLASSES = 4, MOST = ROWS * CLASSES };

static kn_tensor *made(const double *v, int ndim, const int64_t *shape)
{
    return kn_from(KN_F64, KN_CPU, v, ndim, shape);
}

static kn_tensor *random_of(uint64_t stream, int ndim, const int64_t *shape)
{
    return kn_randn(KN_F64, KN_CPU, 17, stream, ndim, shape);
}

static const double *values(kn_tensor *t, int64_t n)
{
    KN_CHECK(t && kn_numel(t) == n, "%s", t ? "another number of elements" : kn_error());
    return kn_read_data(kn_cast(t, KN_F64), KN_F64);
}

/* A loss by its three reductions, from those of its elements. */
static void check_reductions(const char *name, kn_tensor *none, kn_tensor *sum, kn_tensor *mean,
                             const double *want, int64_t n, double divisor)
{
    const double *found = values(none, n);
    double total = 0;
    for (int64_t i = 0; i < n; i++) {
        KN_CHECK(fabs(found[i] - want[i]) < 1e-12, "%s[%d] is %.15g, not %.15g", name, (int)i,
                 found[i], want[i]);
        total += want[i];
    }
    KN_CHECK(fabs(values(sum, 1)[0] - total) < 1e-11 && kn_ndim(sum) == 0, "sum of %s", name);
    KN_CHECK(fabs(values(mean, 1)[0] - total / divisor) < 1e-11, "mean of %s", name);
}

#define CHECK_REDUCTIONS(name, want, n, divisor, ...)                                              \
    check_reductions(#name, kn_##name(__VA_ARGS__, .reduction = KN_REDUCTION_NONE),                \
                     kn_##name(__VA_ARGS__, .reduction = KN_REDUCTION_SUM),                        \
                     kn_##name(__VA_ARGS__), want, n, divisor)

/* ---- values ---------------------------------------------------------------------------------- */

KN_TEST(losses, differences)
{
    double x[5] = { 0.5, -2, 3, 1, 0.25 }, t[5] = { 0, 1, 2.5, 1, -4 }, want[4][5];
    for (int i = 0; i < 5; i++) {
        double d = x[i] - t[i], a = fabs(d);
        want[0][i] = d * d;
        want[1][i] = a;
        want[2][i] = a < 0.75 ? d * d / 2 : 0.75 * (a - 0.75 / 2);
        want[3][i] = a < 0.75 ? d * d / 1.5 : a - 0.75 / 2;
    }
    kn_tensor *a = made(x, KN_SHAPE(5)), *b = made(t, KN_SHAPE(5));
    CHECK_REDUCTIONS(mse_loss, want[0], 5, 5, a, b);
    CHECK_REDUCTIONS(l1_loss, want[1], 5, 5, a, b);
    CHECK_REDUCTIONS(huber_loss, want[2], 5, 5, a, b, .delta = 0.75);
    CHECK_REDUCTIONS(smooth_l1_loss, want[3], 5, 5, a, b, .beta = 0.75);
    CHECK_REDUCTIONS(smooth_l1_loss, want[1], 5, 5, a, b, .beta = KN_ZERO);
    KN_CHECK(kn_item(kn_huber_loss(a, b)) == kn_item(kn_smooth_l1_loss(a, b)), "delta 1");
}

KN_TEST(losses, probabilities)
{
    double x[4] = { 0.2, 0.9, 0.5, 0.01 }, t[4] = { 1, 0, 0.25, 1 }, w[4] = { 1, 2, 0, 0.5 };
    double want[3][4], p = 3;
    for (int i = 0; i < 4; i++) {
        double z = log(x[i] / (1 - x[i])), s = x[i];
        want[0][i] = -w[i] * (t[i] * log(x[i]) + (1 - t[i]) * log(1 - x[i]));
        want[1][i] = -w[i] * (p * t[i] * log(s) + (1 - t[i]) * log(1 - s));
        want[2][i] = t[i] > 0 ? t[i] * (log(t[i]) - z) : 0;
    }
    kn_tensor *a = made(x, KN_SHAPE(4)), *b = made(t, KN_SHAPE(4)), *weight = made(w, KN_SHAPE(4));
    kn_tensor *z = kn_log(kn_div(a, kn_sub(kn_ones(KN_F64, KN_CPU, KN_SHAPE(4)), a)));
    CHECK_REDUCTIONS(binary_cross_entropy, want[0], 4, 4, a, b, .weight = weight);
    CHECK_REDUCTIONS(binary_cross_entropy_with_logits, want[0], 4, 4, z, b, .weight = weight);
    CHECK_REDUCTIONS(binary_cross_entropy_with_logits, want[1], 4, 4, z, b, .weight = weight,
                     .pos_weight = made(&p, KN_SHAPE(1)));
    CHECK_REDUCTIONS(kl_div, want[2], 4, 4, z, b);
    kn_tensor *some = made((double[]){ 0.1, 0.9, 0.25, 0.75 }, KN_SHAPE(2, 2));
    kn_tensor *rows = kn_log_softmax(random_of(1, KN_SHAPE(2, 2)));
    kn_tensor *batch = kn_kl_div(rows, some, .reduction = KN_REDUCTION_BATCHMEAN);
    KN_CHECK(fabs(kn_item(batch) - 2 * kn_item(kn_kl_div(rows, some))) < 1e-15 &&
             fabs(kn_item(batch) - kn_item(kn_kl_div(rows, kn_log(some), .log_target = true,
                                                     .reduction = KN_REDUCTION_BATCHMEAN))) <
                 1e-14);
}

/* Logits of any size give finite losses and gradients; probabilities of 0 and 1 do too. */
KN_TEST(losses, extreme_probabilities)
{
    float x[6] = { 1e4f, -1e4f, 1e4f, -1e4f, -30, 0 }, t[6] = { 1, 1, 0, 0, 0, 1 };
    float want[6] = { 0, 1e4f, 1e4f, 0, 9.357623e-14f, 0.6931472f };
    float slope[6] = { 0, -1, 1, 0, 9.357623e-14f, -0.5f };
    kn_tensor *z = kn_require_grad(kn_from(KN_F32, KN_CPU, x, KN_SHAPE(6)), true);
    kn_tensor *loss = kn_binary_cross_entropy_with_logits(
        z, kn_from(KN_F32, KN_CPU, t, KN_SHAPE(6)), .reduction = KN_REDUCTION_NONE);
    KN_CHECK(loss && kn_backward(sum_of(loss)));
    const float *y = kn_data(loss), *dz = kn_data(kn_grad(z));
    for (int i = 0; i < 6; i++)
        KN_CHECK(fabsf(y[i] - want[i]) <= 2e-7f * want[i] &&
                     fabsf(dz[i] - slope[i]) <= 2e-7f * fabsf(slope[i]),
                 "logit %g: %.9g with gradient %.9g, not %.9g and %.9g", (double)x[i], (double)y[i],
                 (double)dz[i], (double)want[i], (double)slope[i]);
    float p[4] = { 0, 1, 0, 1 }, q[4] = { 0, 1, 1, 0 }, bound[4] = { 0, 0, 100, 100 };
    kn_tensor *a = kn_require_grad(kn_from(KN_F32, KN_CPU, p, KN_SHAPE(4)), true);
    loss = kn_binary_cross_entropy(a, kn_from(KN_F32, KN_CPU, q, KN_SHAPE(4)),
                                   .reduction = KN_REDUCTION_NONE);
    KN_CHECK(loss && kn_backward(sum_of(loss)));
    y = kn_data(loss);
    for (int i = 0; i < 4; i++)
        KN_CHECK(y[i] == bound[i] && isfinite(((float *)kn_data(kn_grad(a)))[i]), "at %g: %g",
                 (double)p[i], (double)y[i]);
}

/* Row r of want: the loss of targets[r], 0 for ignored ones; returns what the mean divides by. */
static double class_losses(const double *x, const int64_t *targets, const double *w, double smooth,
                           int64_t ignore, double *want)
{
    double counted = 0;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0, rest = 0;
        for (int c = 0; c < CLASSES; c++)
            sum += exp(x[r * CLASSES + c]);
        for (int c = 0; c < CLASSES; c++)
            rest += w[c] * (log(sum) - x[r * CLASSES + c]) / CLASSES;
        int64_t t = targets[r];
        bool counts = t != ignore;
        want[r] =
            counts ? (1 - smooth) * w[t] * (log(sum) - x[r * CLASSES + t]) + smooth * rest : 0;
        counted += counts ? w[t] : 0;
    }
    return counted;
}

KN_TEST(losses, classes)
{
    const double w[CLASSES] = { 0.5, 2, 1, 0.25 }, ones[CLASSES] = { 1, 1, 1, 1 };
    kn_tensor *x = random_of(2, KN_SHAPE(ROWS, CLASSES)), *lp = kn_log_softmax(x);
    kn_tensor *weight = made(w, KN_SHAPE(CLASSES));
    const double *v = values(x, MOST);
    double want[ROWS], n;
    int64_t t[ROWS] = { 1, 3, 0 };
    int32_t narrow[ROWS] = { 1, 3, 0 };
    kn_tensor *y = kn_from(KN_I64, KN_CPU, t, KN_SHAPE(ROWS));
    n = class_losses(v, t, ones, 0, -100, want);
    CHECK_REDUCTIONS(cross_entropy, want, ROWS, n, x, y);
    CHECK_REDUCTIONS(nll_loss, want, ROWS, n, lp, y);
    CHECK_REDUCTIONS(nll_loss, want, ROWS, n, lp, kn_from(KN_I32, KN_CPU, narrow, KN_SHAPE(ROWS)));
    n = class_losses(v, t, w, 0, -100, want);
    CHECK_REDUCTIONS(nll_loss, want, ROWS, n, lp, y, .weight = weight);
    CHECK_REDUCTIONS(cross_entropy, want, ROWS, n, x, y, .weight = weight);
    n = class_losses(v, t, w, 0.2, 3, want);
    CHECK_REDUCTIONS(cross_entropy, want, ROWS, n, x, y, .weight = weight, .smoothing = 0.2,
                     .ignore_index = 3);
    n = class_losses(v, t, ones, 0.2, 0, want);
    CHECK_REDUCTIONS(cross_entropy, want, ROWS, n, x, y, .smoothing = 0.2, .ignore_index = KN_ZERO);
    kn_tensor *all = kn_full(KN_I64, KN_CPU, -100, KN_SHAPE(ROWS));
    KN_CHECK(kn_item(kn_nll_loss(lp, all)) == 0 && kn_item(kn_cross_entropy(x, all)) == 0 &&
                 kn_item(kn_cross_entropy(x, all, .weight = weight)) == 0 &&
                 kn_item(kn_cross_entropy(x, all, .reduction = KN_REDUCTION_SUM)) == 0,
             "nothing counts");
}

KN_TEST(losses, soft_classes)
{
    const double w[CLASSES] = { 0.5, 2, 1, 0.25 };
    kn_tensor *x = random_of(3, KN_SHAPE(ROWS, CLASSES));
    kn_tensor *t = kn_softmax(random_of(4, KN_SHAPE(ROWS, CLASSES)));
    const double *lp = values(kn_log_softmax(x), MOST), *q = values(t, MOST);
    double plain[ROWS] = { 0 }, want[ROWS] = { 0 };
    for (int i = 0; i < MOST; i++) {
        plain[i / CLASSES] -= q[i] * lp[i];
        want[i / CLASSES] -= w[i % CLASSES] * (0.9 * q[i] + 0.1 / CLASSES) * lp[i];
    }
    CHECK_REDUCTIONS(cross_entropy, plain, ROWS, ROWS, x, t);
    CHECK_REDUCTIONS(cross_entropy, want, ROWS, ROWS, x, t, .weight = made(w, KN_SHAPE(CLASSES)),
                     .smoothing = 0.1);
    int64_t at[ROWS] = { 2, 0, 3 };
    double hot[MOST] = { [2] = 1, [CLASSES] = 1, [2 * CLASSES + 3] = 1 };
    KN_CHECK(fabs(kn_item(kn_cross_entropy(x, made(hot, KN_SHAPE(ROWS, CLASSES)))) -
                  kn_item(kn_cross_entropy(x, kn_from(KN_I64, KN_CPU, at, KN_SHAPE(ROWS))))) <
                 1e-14,
             "certain targets");
}

KN_TEST(losses, directions)
{
    double x[6] = { 3, 4, 0, 0, 1, -1 }, y[6] = { 4, 3, 1, 2, 2, 2 }, c[3] = { 24 / 25.0, 0, 0 };
    double unit[6] = { 0.6, 0.8, 0, 0, sqrt(0.5), -sqrt(0.5) };
    double sign[3] = { 1, -1, -1 }, want[3] = { 1 / 25.0, 0.25, 0.25 };
    kn_tensor *a = made(x, KN_SHAPE(3, 2)), *b = made(y, KN_SHAPE(3, 2));
    const double *n = values(kn_normalize(a), 6), *cos = values(kn_cosine_similarity(a, b), 3);
    for (int i = 0; i < 6; i++)
        KN_CHECK(fabs(n[i] - unit[i]) < 1e-15 && fabs(cos[i / 2] - c[i / 2]) < 1e-15, "%d", i);
    n = values(kn_normalize(a, .dim = KN_ZERO, .eps = 8), 6);
    KN_CHECK(fabs(n[0] - 3 / 8.0) < 1e-15 && fabs(n[1] - 4 / 8.0) < 1e-15, "eps");
    kn_tensor *first = kn_slice(b, 0, 0, 1); /* broadcasts */
    KN_CHECK(fabs(values(kn_cosine_similarity(a, first, .dim = -1), 3)[2] - 1 / sqrt(50)) < 1e-15);
    CHECK_REDUCTIONS(cosine_embedding_loss, want, 3, 3, a, b, made(sign, KN_SHAPE(3)),
                     .margin = -0.25);
    kn_tensor *zero = kn_require_grad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 4)), true);
    kn_tensor *s = kn_add(sum_of(kn_normalize(zero)), sum_of(kn_cosine_similarity(zero, zero)));
    KN_CHECK(kn_backward(s) && kn_item(s) == 0);
    for (int i = 0; i < 4; i++)
        KN_CHECK(isfinite(((float *)kn_data(kn_grad(zero)))[i]), "gradient of zeros");
}

/* Where a direction can't change, or only along itself, the gradient is 0, also in f32: a rounding
 * or two of dy / |x|, however small x is. */
KN_TEST(losses, gradients_that_cancel)
{
    for (int n = 1; n <= 7; n += 3) {
        kn_tensor *x = kn_full(KN_F32, KN_CPU, -0.0123, KN_SHAPE(1, n));
        kn_tensor *y = kn_full(KN_F32, KN_CPU, 3.7, KN_SHAPE(1, n));
        const double bound = n == 1 ? 0 : 4e-7 / (0.0123 * sqrt(n));
        for (int i = 0; i < 3; i++) {
            kn_tensor *leaf = kn_require_grad(kn_full_like(x, -0.0123), true);
            kn_tensor *dy = kn_full_like(x, 1.7);
            kn_tensor *sign = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1));
            kn_tensor *z = i == 0   ? sum_of(kn_mul(kn_normalize(leaf), dy))
                           : i == 1 ? sum_of(kn_cosine_similarity(leaf, y))
                                    : kn_cosine_embedding_loss(leaf, y, sign);
            KN_CHECK(kn_backward(z));
            for (int k = 0; k < n; k++) {
                const double g = (double)((float *)kn_data(kn_grad(leaf)))[k];
                KN_CHECK(fabs(g) <= bound + (i == 2 ? 1e-5 : 0), "%d of %d: %g", i, n, g);
            }
        }
    }
}

/* ---- nothing ------------------------------------------------------------------------------ */

KN_TEST(losses, of_no_rows)
{
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 4)),
              *to = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(0));
    kn_tensor *none[] = { kn_mse_loss(x, x, .reduction = KN_REDUCTION_NONE),
                          kn_binary_cross_entropy(x, x, .reduction = KN_REDUCTION_NONE),
                          kn_cross_entropy(x, to, .reduction = KN_REDUCTION_NONE),
                          kn_cross_entropy(x, x, .reduction = KN_REDUCTION_NONE),
                          kn_normalize(x),
                          kn_cosine_similarity(x, x) };
    for (int i = 0; i < 6; i++)
        KN_CHECK(none[i] && kn_numel(none[i]) == 0, "%d", i);
    KN_CHECK(kn_item(kn_nll_loss(x, to)) == 0 &&
             kn_item(kn_l1_loss(x, x, .reduction = KN_REDUCTION_SUM)) == 0);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(losses, errors)
{
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 4)),
              *row = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4));
    kn_tensor *to = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3)), *wide = kn_cast(x, KN_F64);
    REFUSED(kn_mse_loss(x, row),
            "mse_loss: x is f32[3,4] and the target f32[4]; it needs two of one shape");
    REFUSED(kn_l1_loss(x, wide), "l1_loss: x is f32[3,4] and the target f64[3,4]");
    REFUSED(kn_huber_loss(x, x, .delta = -1), "huber_loss: .delta is -1");
    REFUSED(kn_smooth_l1_loss(x, x, .beta = -1), "smooth_l1_loss: .beta is -1");
    REFUSED(kn_kl_div(x, x, .reduction = 9), "kl_div: reduction 9 is none of");
    REFUSED(kn_mse_loss(x, x, .reduction = KN_REDUCTION_BATCHMEAN),
            "mse_loss: reduction 4 is none of");
    REFUSED(
        kn_binary_cross_entropy(x, x, .weight = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3))),
        "binary_cross_entropy: .weight is f32[3]; it should be of x's dtype and broadcast to x");
    REFUSED(kn_binary_cross_entropy_with_logits(x, x, .pos_weight = wide),
            ".pos_weight is f64[3,4]");
    REFUSED(kn_nll_loss(x, row),
            "nll_loss: a float x f32[3,4] needs i64 or i32 targets of its shape without the last "
            "dim, got f32[4]");
    REFUSED(kn_nll_loss(x, to, .weight = x),
            "nll_loss: .weight is f32[3,4]; it should be one number of x's dtype for each class");
    REFUSED(kn_nll_loss(x, kn_full(KN_I64, KN_CPU, 4, KN_SHAPE(3))), "index 4");
    REFUSED(kn_cross_entropy(x, kn_full(KN_I64, KN_CPU, -1, KN_SHAPE(3)), .weight = row),
            "index -1");
    REFUSED(kn_cross_entropy(x, row), "cross_entropy: x is f32[3,4] and the target f32[4]");
    REFUSED(kn_cross_entropy(x, x, .smoothing = 1), "cross_entropy: smoothing is 1");
    REFUSED(kn_normalize(row), "normalize: .dim is 1 (0: 1; KN_ZERO: 0), which is out of range");
    REFUSED(kn_normalize(x, .eps = -1), "normalize: .eps is -1");
    REFUSED(kn_cosine_similarity(x, wide), "cosine_similarity: needs two of one float dtype");
    REFUSED(kn_cosine_embedding_loss(x, x, row),
            "cosine_embedding_loss: x and y are f32[3,4], so sign must be");
    REFUSED(kn_cosine_embedding_loss(x, x, to, .margin = 2), "cosine_embedding_loss: .margin is 2");
    REFUSED(kn_margin_ranking_loss(x, x, row), "margin_ranking_loss: x is f32[3,4] and the target");
    REFUSED(kn_margin_ranking_loss(x, wide, x), "margin_ranking_loss: x is f32[3,4]");
    REFUSED(kn_hinge_embedding_loss(x, row), "hinge_embedding_loss: x is f32[3,4]");
    REFUSED(kn_hinge_embedding_loss(x, x, .reduction = 9), "hinge_embedding_loss: reduction 9");
    REFUSED(kn_triplet_margin_loss(x, x, row), "triplet_margin_loss: x is f32[3,4]");
    REFUSED(kn_pairwise_distance(x, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3))),
            "shapes don't broadcast");
    REFUSED(kn_pairwise_distance(kn_sum(x, 0, NULL, false), kn_sum(x, 0, NULL, false)),
            "pairwise_distance: its tensors have no dim");
    REFUSED(kn_gaussian_nll_loss(x, x, NULL), "gaussian_nll_loss: needs a variance");
    REFUSED(kn_gaussian_nll_loss(x, x, x, .eps = -1), "and an .eps above 0");
    REFUSED(kn_gaussian_nll_loss(x, x, wide), "gaussian_nll_loss: .var is f64[3,4]");
    REFUSED(kn_poisson_nll_loss(x, wide), "poisson_nll_loss: x is f32[3,4]");
    REFUSED(kn_mse_loss(x, kn_empty(KN_F32, KN_META, KN_SHAPE(3, 4))), "on cpu and on meta");
}
