/* tests/kernels/philox_test.c: the generator against the published known answers, its draws against
 * exact distribution functions. */
#include "kernels/philox.h"
#include "tests/kn_test.h"

/* From Random123's known-answer file (philox4x32, 10 rounds). */
KN_TEST(philox, known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], answer[4];
    } known[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { ~0u, ~0u, ~0u, ~0u },
          { ~0u, ~0u },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        kn_philox4 c;
        memcpy(c.word, known[i].counter, sizeof c.word);
        c = kn_philox_rounds(c, known[i].key[0], known[i].key[1]);
        KN_CHECK(memcmp(c.word, known[i].answer, sizeof c.word) == 0, "answer %zu", i);
    }
}

/* seed, stream and block all reach the words, in their high halves too. */
KN_TEST(philox, every_input_bit_counts)
{
    const uint32_t plain = kn_philox_at(0, 0, 0);
    for (int bit = 0; bit < 64; bit++) {
        KN_CHECK(kn_philox_at(1ULL << bit, 0, 0) != plain, "seed bit %d", bit);
        KN_CHECK(kn_philox_at(0, 1ULL << bit, 0) != plain, "stream bit %d", bit);
        KN_CHECK(kn_philox_at(0, 0, 1ULL << bit) != plain, "element bit %d", bit);
    }
    for (uint64_t i = 0; i < 16; i++)
        KN_CHECK(kn_philox_at(7, 9, i) == kn_philox(7, 9, i / 4).word[i % 4]);
}

KN_TEST(philox, uniform)
{
    KN_CHECK(kn_uniform01(0) == 0.0f && kn_uniform01(~0u) == 1.0f - 0x1p-24f);
    KN_CHECK(kn_uniform_between(kn_uniform01(~0u), 1.0f, 2.0f) < 2.0f, "rounds up to hi");
    double sum = 0, squares = 0;
    enum { N = 1 << 20 };
    for (int i = 0; i < N; i++) {
        double u = kn_uniform01(kn_philox_at(42, 3, (uint64_t)i));
        sum += u;
        squares += u * u;
    }
    /* standard errors: 0.289 / 1024 and 0.298 / 1024 */
    KN_CHECK(fabs(sum / N - 0.5) < 5 * 0.289 / 1024, "mean %g", sum / N);
    KN_CHECK(fabs(squares / N - 1.0 / 3) < 5 * 0.298 / 1024, "second moment %g", squares / N);
}

KN_TEST(philox, dropout_is_uniform_at_least_p)
{
    static const double ps[] = { 0, 0x1p-25, 0x1p-24, 0.1, 1.0 / 3, 0.5, 0.9, 1 - 0x1p-24, 1 };
    for (size_t k = 0; k < sizeof ps / sizeof *ps; k++) {
        uint32_t edge = kn_dropout_threshold(ps[k]);
        for (int64_t d = -3; d <= 3; d++) {
            int64_t top = (int64_t)edge + d;
            if (top < 0 || top >= 1 << 24)
                continue;
            uint32_t word = (uint32_t)top << 8 | 0x5a;
            KN_CHECK(kn_dropout_keeps(word, edge) == ((double)kn_uniform01(word) >= ps[k]),
                     "p %g word %08x", ps[k], word);
        }
    }
    KN_CHECK(kn_dropout_scale(0.5) == 2 && kn_dropout_scale(0) == 1 && kn_dropout_scale(1) == 0);
}

/* ---- the normal ---------------------------------------------------------------------------- */

/* z with tail probability p = P(Z > z), by Newton's method in f64. */
static double exact_normal(double p)
{
    double z = p < 0.02 ? sqrt(-2 * log(p)) : 0;
    for (int i = 0; i < 100; i++) {
        double step = (0.5 * erfc(z / sqrt(2.0)) - p) / (exp(-z * z / 2) / sqrt(2 * M_PI));
        z += step;
        if (fabs(step) < 1e-14 * (1 + fabs(z)))
            break;
    }
    return z;
}

/* Dense near both ends of the range of p and at the seam of the two polynomials. */
KN_TEST(philox, normal_is_the_inverse_distribution)
{
    for (uint32_t i = 0; i < 300000; i++) {
        uint32_t word = kn_philox_at(1, 2, i) >> (i % 2 ? i % 31 : 0);
        double p = ((double)(word >> 1) + 0.5) * 0x1p-32, z = exact_normal(p);
        if (word & 1)
            z = -z;
        KN_CHECK(fabs(kn_normal(word) - z) <= 1e-6 * fmax(1, fabs(z)), "word %08x: %.9g, not %.9g",
                 word, kn_normal(word), z);
    }
    KN_CHECK(kn_normal(0) == -kn_normal(1) && fabsf(kn_normal(0)) < 6.34f);
}

KN_TEST(philox, normal_does_not_decrease)
{
    float last = -10;
    for (int64_t k = 0; k < 1 << 20; k++) { /* ascending z: falling p on the negative side */
        uint32_t word = (uint32_t)(k << 11 | 1);
        float z = kn_normal(word);
        KN_CHECK(z >= last - 2e-6f, "at %lld: %.9g after %.9g", (long long)k, z, last);
        last = z;
    }
}

KN_TEST(philox, normal_moments)
{
    enum { N = 1 << 20 };
    double m[5] = { 0 };
    for (int i = 0; i < N; i++) {
        double z = kn_normal(kn_philox_at(11, 5, (uint64_t)i));
        for (int k = 1; k <= 4; k++)
            m[k] += pow(z, k) / N;
    }
    /* five standard errors: sqrt(Var z^k / N), Var = 1, 2, 15, 96 */
    KN_CHECK(fabs(m[1]) < 5 * 1.0 / 1024, "mean %g", m[1]);
    KN_CHECK(fabs(m[2] - 1) < 5 * 1.42 / 1024, "variance %g", m[2]);
    KN_CHECK(fabs(m[3]) < 5 * 3.9 / 1024, "third moment %g", m[3]);
    KN_CHECK(fabs(m[4] - 3) < 5 * 9.8 / 1024, "fourth moment %g", m[4]);
}

/* The bits are part of the format: initial weights depend on them on every device. */
KN_TEST(philox, normal_bits_are_fixed)
{
    uint32_t hash = 0;
    for (uint32_t i = 0; i < 65536; i++)
        hash = hash * 31 + kn_f32_bits(kn_normal(kn_philox_at(3, 4, i)));
    KN_CHECK(hash == 0xcca71a73, "hash %#x", hash);
}

/* ---- rounding at random ---------------------------------------------------------------------- */

/* The result is one of x's two neighbours, and x itself on average; exact values stay. */
KN_TEST(philox, rounding_at_random_is_unbiased)
{
    enum { DRAWS = 4096 };
    static const kn_dtype narrow[] = { KN_BF16, KN_F16 };
    static const float odd[] = {
        0, 1, -65504, 6e-8f, 1e-9f, -3e-5f, 6.1e-5f, 0.1f, -1000.3f, 1e-3f
    };
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 200; i++) {
            float x =
                i < 10 ? odd[i] : ldexpf(kn_normal(kn_philox_at(1, 2, (uint64_t)i)), i % 24 - 20);
            int e;
            frexp((double)x, &e);
            int digits = k == 0 ? 8 : 11, lowest = k == 0 ? -133 : -24;
            double unit = ldexp(1, e - digits > lowest ? e - digits : lowest), sum = 0;
            for (int j = 0; j < DRAWS; j++) {
                double y = (double)kn_rounded_at_random(narrow[k], x, (uint32_t)j << 20 | 0xfffffu);
                KN_CHECK(fabs(y - (double)x) < unit || y == (double)x, "%a became %a", (double)x,
                         y);
                KN_CHECK(ldexp(round(ldexp(y, -e)), e) == y || fmod(y, unit) == 0, "%a", y);
                sum += y;
            }
            KN_CHECK(fabs(sum / DRAWS - (double)x) <= unit / 1000, "%s: the mean of %a is %a",
                     kn_dtype_name(narrow[k]), (double)x, sum / DRAWS);
        }
    KN_CHECK(isinf(kn_rounded_at_random(KN_F16, 1e6f, 0)) &&
             isnan(kn_rounded_at_random(KN_F16, NAN, ~0u)) &&
             kn_rounded_at_random(KN_F32, 0.1f, ~0u) == 0.1f);
}
