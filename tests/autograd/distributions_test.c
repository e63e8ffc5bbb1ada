/* tests/autograd/distributions_test.c: autograd/distributions.h: rows of every.h; draws have the
 * distribution whose logarithm log_prob gives, and depend on the key alone; infinite logits;
 * errors. */
#include "autograd/autograd.h"
#include "autograd/distributions.h"
#include "tests/autograd/every.h"

EVERY(kn_normal_log_prob, "2 3; +3; 2 1 | 3t 2; +; 2", kn_normal_log_prob(x, y, z));
EVERY(kn_normal_entropy, "+2 3", kn_normal_entropy(x));
EVERY(kn_normal_kl, "2 3; +3; 2 1; +2 3", kn_normal_kl(x, y, z, w));
EVERY(kn_normal_rsample, "2 3; +3", kn_normal_rsample(x, y));
EVERY_FLAT(kn_normal_sample, "2 3; +3", kn_normal_sample(x, y));
EVERY(kn_categorical_log_prob, "2 3 | 2 4t", kn_categorical_log_prob(x, WHOLE(x, (2), 2, 0)));
EVERY(kn_categorical_entropy, "2 3 | 4", kn_categorical_entropy(x));
EVERY(kn_categorical_kl, "2 3; 2 3 | 3 4; 4", kn_categorical_kl(x, y));
EVERY_FLAT(kn_categorical_sample, "2 3", kn_categorical_sample(x));
EVERY(kn_bernoulli_log_prob, "2 3; %3", kn_bernoulli_log_prob(x, y));
EVERY(kn_bernoulli_entropy, "2 3", kn_bernoulli_entropy(x));
EVERY(kn_bernoulli_kl, "2 3; 3", kn_bernoulli_kl(x, y));
EVERY_FLAT(kn_bernoulli_sample, "2 3", kn_bernoulli_sample(x));

enum { N = 20000 };

static double average(kn_tensor *x)
{
    return kn_item(kn_mean(kn_cast(x, KN_F64), 0, NULL, false));
}

/* The mean of n draws is within five standard deviations of it. */
static void expect_mean(kn_tensor *x, double mean, double deviation)
{
    KN_CHECK(x && fabs(average(x) - mean) < 5 * deviation / sqrt((double)kn_numel(x)),
             "mean %g, should be %g", average(x), mean);
}

/* Entropy is the mean of -log p of draws, KL that of log p - log q. */
KN_TEST(distributions, draws_have_the_probabilities)
{
    kn_tensor *p = tensor_of(KN_F64, (double[]){ 0.5, -1, 2 }, 1, (int64_t[]){ 3 });
    kn_tensor *q = tensor_of(KN_F64, (double[]){ 1, 0.5, 0 }, 1, (int64_t[]){ 3 });
    kn_tensor *std = kn_exp(p), *other = kn_exp(kn_neg(q));
    kn_tensor *many = kn_expand(p, KN_SHAPE(N, 3));
    kn_tensor *z = kn_normal_sample(many, std), *i = kn_categorical_sample(many);
    kn_tensor *b = kn_bernoulli_sample(many), *lp, *lq;
    KN_CHECK(z && i && b && kn_dtype_of(i) == KN_I64 && kn_ndim(i) == 1);
    lp = kn_normal_log_prob(p, std, z), lq = kn_normal_log_prob(q, other, z);
    expect_mean(kn_neg(lp), average(kn_normal_entropy(std)), 1);
    expect_mean(kn_sub(lp, lq), average(kn_normal_kl(p, std, q, other)), 120);
    lp = kn_categorical_log_prob(many, i);
    lq = kn_categorical_log_prob(kn_expand(q, KN_SHAPE(N, 3)), i);
    expect_mean(kn_neg(lp), kn_item(kn_categorical_entropy(p)), 1);
    expect_mean(kn_sub(lp, lq), kn_item(kn_categorical_kl(p, q)), 1);
    lp = kn_bernoulli_log_prob(p, b), lq = kn_bernoulli_log_prob(q, b);
    expect_mean(kn_neg(lp), average(kn_bernoulli_entropy(p)), 1);
    expect_mean(kn_sub(lp, lq), average(kn_bernoulli_kl(p, q)), 1);
}

/* A number of kn_draws_begin, and nothing else, says which draws come. */
KN_TEST(distributions, draws_by_number)
{
    double first[12] = { 0 }, again[12] = { 0 };
    kn_tensor *zero = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(4)), *one = kn_add_scalar(zero, 1);
    kn_tensor *logits = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(4, 50));
    for (int k = 0; k < 3; k++) {
        double *to = k == 1 ? again : first;
        memcpy(again, first, sizeof again);
        kn_draws d = kn_draws_begin(k == 2 ? 8 : 7);
        to_doubles(kn_normal_sample(zero, one), to);
        to_doubles(kn_cast(kn_categorical_sample(logits), KN_F64), to + 4);
        to_doubles(kn_normal_rsample(zero, one), to + 8);
        kn_draws_end(d);
        KN_CHECK(k == 0 || (memcmp(first, again, sizeof first) == 0) == (k == 1), "draw %d", k);
        KN_CHECK(memcmp(first, first + 8, 4 * sizeof *first) != 0, "two calls draw alike");
    }
}

KN_TEST(distributions, infinite_logits)
{
    double d[3];
    kn_tensor *p = kn_require_grad(
        tensor_of(KN_F64, (double[]){ 0, -INFINITY, 0 }, 1, (int64_t[]){ 3 }), true);
    kn_tensor *q = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(3));
    kn_tensor *h = kn_categorical_entropy(p), *kl = kn_categorical_kl(p, q);
    KN_CHECK(fabs(kn_item(h) - log(2)) < 1e-15 && fabs(kn_item(kl) - log(1.5)) < 1e-15);
    KN_CHECK(kn_ndim(h) == 0 && kn_ndim(kl) == 0, "the categories' dim stays");
    KN_CHECK(kn_item(kn_categorical_kl(q, p)) == INFINITY);
    kn_tensor *narrow = kn_categorical_entropy(kn_cast(q, KN_BF16));
    KN_CHECK(kn_dtype_of(narrow) == KN_BF16 && kn_item(narrow) == 1.1015625); /* log 3 */
    KN_CHECK(kn_backward(kn_add(h, kl)));
    to_doubles(kn_grad(p), d);
    KN_CHECK(d[0] == 0 && d[1] == 0 && d[2] == 0, "%g %g %g", d[0], d[1], d[2]);
}

KN_TEST(distributions, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)), *wide = kn_cast(x, KN_F64);
    kn_tensor *odd = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2)),
              *id = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2));
    REFUSED(kn_normal_log_prob(x, wide, x),
            "normal_log_prob: argument 2 is f64[2,3], the first f32[2,3]");
    REFUSED(kn_normal_kl(x, x, x, odd), "normal_kl: argument 4 is f32[2]");
    REFUSED(kn_normal_rsample(x, id), "normal_rsample: argument 2 is i64[2]");
    REFUSED(kn_normal_entropy(id), "normal_entropy: argument 1 is i64[2]");
    REFUSED(kn_categorical_log_prob(x, odd), "categorical_log_prob: indices must be i64 or i32");
    REFUSED(kn_categorical_log_prob(odd, id),
            "categorical_log_prob: logits are f32[2], the index i64[2]");
    REFUSED(kn_categorical_kl(x, odd), "categorical_kl: argument 2 is f32[2]");
    REFUSED(kn_bernoulli_log_prob(x, NULL), "bernoulli_log_prob: a tensor is NULL");
}
