/* tests/autograd/draws_test.c: random draws: their range and distribution, their dependence on keys
 * alone, the same under recompute and with any number of threads; errors. */
#include "nn/nn.h"
#include "tests/autograd/expect.h"
#include "tests/owned.h"

static bool equal(kn_tensor *a, kn_tensor *b)
{
    kn_tensor *differ = kn_sum(kn_ne(a, b), 0, NULL, false);
    KN_CHECK(differ);
    return kn_item(differ) == 0;
}

static double average_of(kn_tensor *x)
{
    return kn_item(kn_mean(kn_cast(x, KN_F64), 0, NULL, false));
}

/* Within five standard deviations of a mean of n draws. */
static void expect_mean(kn_tensor *x, double mean, double deviation)
{
    const double error = fabs(average_of(x) - mean);
    KN_CHECK(error < 5 * deviation / sqrt((double)kn_numel(x)), "mean %g, should be %g",
             average_of(x), mean);
}

/* ---- values ---------------------------------------------------------------------------------- */

KN_TEST(draws, like_a_tensor)
{
    const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int t = 0; t < 4; t++) {
        kn_tensor *x = kn_transpose(kn_empty(types[t], KN_CPU, KN_SHAPE(50, 40)), 0, 1);
        kn_tensor *u = kn_rand_like(x), *z = kn_randn_like(x);
        KN_CHECK(u && z && kn_dtype_of(u) == types[t] && kn_size(z, 0) == 40);
        expect_mean(u, 0.5, 0.29);
        expect_mean(z, 0, 1);
        expect_mean(kn_mul(z, z), 1, 1.42);
        kn_tensor *on_meta = kn_randn_like(kn_empty(types[t], KN_META, KN_SHAPE(3, 2)));
        KN_CHECK(on_meta && kn_device_of(on_meta) == KN_META);
        KN_CHECK(!kn_requires_grad(kn_rand_like(kn_require_grad(x, true))));
    }
}

KN_TEST(draws, integers_in_their_range)
{
    const kn_dtype types[] = { KN_I64, KN_I32, KN_U8, KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int t = 0; t < 7; t++) {
        const int64_t low = types[t] == KN_U8 ? 2 : -3, high = low + 5;
        kn_tensor *x = kn_randint(types[t], KN_CPU, low, high, 1, (uint64_t)t, KN_SHAPE(40, 50));
        KN_CHECK(x && kn_dtype_of(x) == types[t]);
        for (int64_t v = low - 1; v <= high; v++) {
            const double p = v >= low && v < high ? 0.2 : 0;
            kn_tensor *hit = kn_eq(x, kn_full(types[t], KN_CPU, (double)v, KN_SCALAR));
            expect_mean(hit, p, p > 0 ? 0.4 : 1e-9);
        }
    }
    kn_tensor *wide =
        kn_randint(KN_I64, KN_CPU, -((int64_t)1 << 47), (int64_t)1 << 47, 1, 1, KN_SHAPE(2000));
    expect_mean(kn_scale(kn_cast(wide, KN_F64), 0x1p-48), 0, 0.29);
    kn_tensor *odd = kn_sub(wide, kn_mul(kn_div(wide, kn_full(KN_I64, KN_CPU, 2, KN_SCALAR)),
                                         kn_full(KN_I64, KN_CPU, 2, KN_SCALAR)));
    expect_mean(kn_ne(odd, kn_full(KN_I64, KN_CPU, 0, KN_SCALAR)), 0.5, 0.5); /* lowest bits too */
    kn_tensor *one =
        kn_randint(KN_I64, KN_CPU, ((int64_t)1 << 53) - 1, (int64_t)1 << 53, 1, 1, KN_SCALAR);
    int64_t value = 0;
    KN_CHECK(one && kn_to_host(one, &value, sizeof value));
    KN_CHECK(value == ((int64_t)1 << 53) - 1);
    KN_CHECK(kn_dtype_of(kn_randint(0, 0, 0, 9, 1, 1, KN_SHAPE(0))) == KN_I64);
}

KN_TEST(draws, permutations)
{
    for (int64_t n = 0; n < 40; n++) {
        kn_tensor *p = kn_randperm(KN_CPU, n, 3, 4);
        KN_CHECK(p && kn_numel(p) == n);
        int64_t seen = 0;
        for (int64_t i = 0; i < n; i++)
            seen |= (int64_t)1 << ((const int64_t *)kn_data(p))[i];
        KN_CHECK(seen == ((int64_t)1 << n) - 1, "not each of %lld once", (long long)n);
    }
    int count[6] = { 0 }; /* each order of three equally often */
    for (uint64_t stream = 0; stream < 3000; stream++) {
        IN_SCOPE;
        const int64_t *p = kn_data(kn_randperm(KN_CPU, 3, 1, stream));
        count[2 * p[0] + (p[1] > p[2])]++;
    }
    for (int i = 0; i < 6; i++)
        KN_CHECK(abs(count[i] - 500) < 5 * 21, "order %d: %d of 3000", i, count[i]);
    KN_CHECK(kn_size(kn_randperm(KN_META, 7, 1, 1), 0) == 7);
}

static double one_if_odd(const int64_t *at, void *arg)
{
    (void)arg;
    return (double)(at[0] % 2);
}

KN_TEST(draws, bernoulli)
{
    const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int t = 0; t < 4; t++) {
        for (int i = 0; i <= 4; i++) {
            const double q = i / 4.0;
            kn_tensor *p = kn_require_grad(kn_full(types[t], KN_CPU, q, KN_SHAPE(30, 70)), true);
            kn_tensor *x = kn_bernoulli(p);
            KN_CHECK(x && kn_dtype_of(x) == types[t] && !kn_requires_grad(x));
            expect_mean(x, q, i % 4 ? sqrt(q * (1 - q)) : 1e-9);
            KN_CHECK(equal(x, kn_mul(x, x)), "other than 0 and 1");
        }
    }
    const float odd[4] = { -1, 2, NAN, INFINITY };
    expect(kn_bernoulli(kn_from(KN_F32, KN_CPU, odd, KN_SHAPE(4))), KN_SHAPE(4), one_if_odd, NULL);
}

/* How often each of K indices stands in column j of index[M, n]. */
static void count_column(kn_tensor *index, int64_t j, int64_t K, double *share)
{
    const int64_t M = kn_size(index, 0), n = kn_size(index, 1), *at = kn_data(index);
    for (int64_t k = 0; k < K; k++)
        share[k] = 0;
    for (int64_t i = 0; i < M; i++) {
        KN_CHECK(at[i * n + j] >= 0 && at[i * n + j] < K, "index %lld", (long long)at[i * n + j]);
        share[at[i * n + j]] += 1.0 / (double)M;
    }
}

/* Weights 1, 3, 0, 4: the second choice, of those that are left, is k with the sum over the first i
 * of w_i / 8 w_k / (8 - w_i). */
KN_TEST(draws, multinomial)
{
    enum { M = 4000 };
    const float w[4] = { 1, 3, 0, 4 };
    kn_set_step(1);
    for (int replacement = 0; replacement < 2; replacement++) {
        kn_tensor *p = kn_expand(kn_from(KN_F32, KN_CPU, w, KN_SHAPE(4)), KN_SHAPE(M, 4));
        kn_tensor *x = kn_multinomial(kn_require_grad(kn_contiguous(p), true), 3, replacement);
        KN_CHECK(x && kn_dtype_of(x) == KN_I64 && !kn_requires_grad(x));
        for (int64_t j = 0; j < 2; j++) {
            double share[4];
            count_column(x, j, 4, share);
            for (int k = 0; k < 4; k++) {
                double want = j == 0 || replacement ? (double)w[k] / 8 : 0;
                for (int i = 0; i < 4 && j == 1 && !replacement; i++)
                    want += i != k ? (double)(w[i] * w[k]) / 8 / (8 - (double)w[i]) : 0;
                KN_CHECK(fabs(share[k] - want) <= 5 * sqrt(want * (1 - want) / M),
                         "%d of choice %d: %g, should be %g", k, (int)j, share[k], want);
            }
        }
        const int64_t *at = kn_data(x);
        for (int64_t i = 0; i < M && !replacement; i++)
            KN_CHECK(at[3 * i] + at[3 * i + 1] + at[3 * i + 2] == 4, "not 0, 1 and 3, each once");
    }
}

/* Many choices from one row of many, and shapes. */
KN_TEST(draws, multinomial_of_other_shapes)
{
    enum { K = 5000, N = 8000 };
    kn_tensor *p = kn_cast(kn_arange(KN_F32, KN_CPU, K), KN_F16); /* k in proportion */
    kn_tensor *x = kn_multinomial(p, N, true);
    KN_CHECK(x && kn_ndim(x) == 1 && kn_numel(x) == N);
    expect_mean(kn_scale(kn_cast(x, KN_F64), 1.0 / K), 2.0 / 3, 0.24);
    kn_tensor *all = kn_multinomial(kn_ones(KN_F64, KN_CPU, KN_SHAPE(K)), K, false);
    KN_CHECK(equal(kn_sort(all, 0), kn_arange(KN_I64, KN_CPU, K)), "not each once");
    kn_tensor *on_meta = kn_empty(KN_BF16, KN_META, KN_SHAPE(2, 3, 5));
    for (int replacement = 0; replacement < 2; replacement++) {
        x = kn_multinomial(on_meta, 4, replacement);
        KN_CHECK(x && kn_ndim(x) == 3 && kn_size(x, 2) == 4 && kn_size(x, 1) == 3);
        x = kn_multinomial(kn_ones(KN_F32, KN_CPU, KN_SHAPE(0, 3)), 2, replacement);
        KN_CHECK(x && kn_size(x, 0) == 0 && kn_size(x, 1) == 2);
        kn_set_step(3);
        x = kn_multinomial(p, 50, replacement);
        KN_CHECK(!equal(x, kn_multinomial(p, 50, replacement)), "a second call draws the same");
        kn_set_step(3);
        KN_CHECK(equal(x, kn_multinomial(p, 50, replacement)), "the same key draws others");
    }
}

/* Weights whose sums are below the normal numbers, and one that is tiny beside the others: indices
 * lie in the row, and weights of 0 are never drawn. */
KN_TEST(draws, multinomial_of_tiny_weights)
{
    enum { N = 400 };
    const double rows[][3] = { { 5e-324, 0, 0 }, { 0, 5e-324, 5e-324 }, { 1e300, 1e-320, 0 } };
    for (int i = 0; i < 3; i++) {
        kn_tensor *p = kn_from(KN_F64, KN_CPU, rows[i], KN_SHAPE(3));
        kn_tensor *x = kn_multinomial(p, N, true);
        for (int64_t k = 0; k < N; k++) {
            const int64_t at = ((const int64_t *)kn_data(x))[k];
            KN_CHECK(at >= 0 && at < 3 && rows[i][at] > 0, "row %d: %lld", i, (long long)at);
        }
        const int64_t some = 1 + (i > 0);
        for (int again = 0; again < 20; again++) {
            x = kn_multinomial(p, some, false);
            for (int64_t k = 0; k < some; k++)
                KN_CHECK(x && rows[i][((const int64_t *)kn_data(x))[k]] > 0, "row %d", i);
        }
    }
}

/* Of 2^-9 and 2^-12 of the draws the f32 rounds to 1. */
KN_TEST(draws, uniform_stays_below_one)
{
    for (int t = 0; t < 2; t++) {
        const double below = t ? 1 - 0x1p-11 : 1 - 0x1p-8;
        kn_tensor *x = kn_rand(t ? KN_F16 : KN_BF16, KN_CPU, 1, 2, KN_SHAPE(1 << 16));
        KN_CHECK(kn_item(kn_amax(x, 0, NULL, false)) == below);
        KN_CHECK(kn_item(kn_amax(kn_rand_like(x), 0, NULL, false)) == below);
    }
}

KN_TEST(draws, errors_of_multinomial)
{
    const double rows[][3] = { { 1, -1, 1 }, { 0, 0, 0 }, { NAN, 1, 1 }, { 1, INFINITY, 1 } };
    for (int i = 0; i < 4; i++)
        for (int replacement = 0; replacement < 2; replacement++) {
            double p[9] = { 1, 2, 3, 1, 1, 1 };
            memcpy(p + 6, rows[i], sizeof rows[i]);
            kn_tensor *t = kn_from(KN_F64, KN_CPU, p, KN_SHAPE(3, 3));
            REFUSED(kn_multinomial(t, 1, replacement),
                    "multinomial: row 2 of p f64[3,3] can't give 1 choices");
        }
    kn_tensor *p = kn_from(KN_F32, KN_CPU, (float[]){ 1, 0, 1 }, KN_SHAPE(3));
    KN_CHECK(kn_multinomial(p, 3, true) && kn_multinomial(p, 2, false));
    REFUSED(kn_multinomial(p, 3, false), "row 0 of p f32[3] can't give 3 choices");
    REFUSED(kn_multinomial(p, 4, false), "multinomial: 4 choices from f32[3]");
    REFUSED(kn_multinomial(p, 0, true), "at least 1 choice");
    REFUSED(kn_multinomial(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3)), 1, true),
            "needs a float p[..., K]");
    REFUSED(kn_multinomial(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 0)), 1, true),
            "needs a float p[..., K]");
}

/* ---- keys ------------------------------------------------------------------------------------ */

static kn_tensor *all_draws(void)
{
    kn_tensor *x = kn_full(KN_F64, KN_CPU, 0.5, KN_SHAPE(3, 20000));
    kn_tensor *made[] = { kn_rand_like(x), kn_randn_like(x), kn_randint_like(x, 0, 1000),
                          kn_bernoulli(x) };
    return kn_stack(made, 4, 0);
}

KN_TEST(draws, are_functions_of_their_key)
{
    kn_seed(5);
    kn_set_step(2);
    kn_tensor *first = all_draws(), *next = all_draws();
    KN_CHECK(!equal(first, next), "a second call draws the same");
    kn_set_step(2);
    KN_CHECK(equal(first, all_draws()), "the same key draws others");
    kn_set_step(3);
    KN_CHECK(!equal(first, all_draws()), "another step draws the same");
    kn_seed(6);
    kn_set_step(2);
    KN_CHECK(!equal(first, all_draws()), "another seed draws the same");
    kn_seed(5);
    for (int threads = 1; threads <= 4; threads++) {
        kn_set_threads(threads);
        kn_set_step(2);
        KN_CHECK(equal(first, all_draws()), "%d threads draw others", threads);
    }
    kn_set_threads(1);
    kn_tensor *a = kn_randint(KN_I64, KN_CPU, 0, 1 << 20, 1, 2, KN_SHAPE(100));
    KN_CHECK(equal(a, kn_randint(KN_I64, KN_CPU, 0, 1 << 20, 1, 2, KN_SHAPE(100))));
    KN_CHECK(!equal(a, kn_randint(KN_I64, KN_CPU, 0, 1 << 20, 1, 3, KN_SHAPE(100))));
    KN_CHECK(!equal(kn_randperm(KN_CPU, 50, 1, 2), kn_randperm(KN_CPU, 50, 1, 3)));
}

static kn_tensor *noise_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    kn_tensor *kept = kn_mul(x, kn_bernoulli(kn_full_like(x, 0.5)));
    kn_tensor *z = kn_add(kn_mul(kn_randn_like(x), kept), kn_mul(kn_rand_like(x), x));
    return kn_mul(kn_mul(z, x), kn_randint_like(x, 1, 9));
}

/* A recomputed call draws the numbers of its first time. */
KN_TEST(draws, are_the_same_again_under_recompute)
{
    kn_tensor *grad[2];
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE kn_module m = { 0 };
        kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(64)), true);
        KN_CHECK(kn_module_init(&m, noise_forward));
        if (again)
            kn_recompute(&m, true);
        kn_set_step(4);
        KN_CHECK(kn_backward(kn_sum(kn_call(&m, x), 0, NULL, false)));
        grad[again] = kn_grad(x);
    }
    KN_CHECK(equal(grad[0], grad[1]), "other draws");
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(draws, errors)
{
    kn_tensor *i = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3));
    REFUSED(kn_rand_like(i), "rand_like: needs a float tensor, got i64");
    REFUSED(kn_randn_like(i), "randn_like: needs a float tensor, got i64");
    REFUSED(kn_bernoulli(i), "bernoulli: needs a float tensor, got i64");
    REFUSED(kn_randint_like(i, 3, 3), "randint_like: [3, 3) is empty");
    REFUSED(kn_randint(KN_U8, KN_CPU, -1, 9, 1, 1, KN_SHAPE(2)),
            "randint: [-1, 9) as u8; numbers from 0 to 255");
    REFUSED(kn_randint(KN_BF16, KN_CPU, 0, 258, 1, 1, KN_SHAPE(2)),
            "as bf16; numbers from -256 to 256");
    REFUSED(kn_randint(KN_I64, KN_CPU, INT64_MIN, INT64_MAX, 1, 1, KN_SHAPE(2)),
            "at most 2^48 of them");
    REFUSED(kn_randint(KN_F8_E4M3, KN_CPU, 0, 2, 1, 1, KN_SHAPE(2)),
            "randint: f8_e4m3 has no arithmetic");
    REFUSED(kn_randint(KN_I64, KN_CPU, 0, 2, 1, 1, KN_SHAPE(-2)), "size of dim 0 is negative");
    REFUSED(kn_randperm(KN_CPU, -1, 1, 1), "randperm: -1 elements");
}
