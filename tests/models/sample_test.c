/* tests/models/sample_test.c: drawing a token from logits: the distribution, its cuts, logits that
 * are not finite. */
#include "models/sample.h"
#include "tests/kn_test.h"

KN_TEST(sample, follows_the_distribution)
{
    const float logits[4] = { 0.0f, logf(2), logf(4), logf(1) }; /* weights 1 2 4 1 */
    const kn_sample_options o = { .temperature = 1, .seed = 5 };
    int count[4] = { 0 }, n = 8000;
    for (int i = 0; i < n; i++)
        count[kn_sample(logits, 4, &o, i)]++;
    const double want[4] = { 1 / 8., 2 / 8., 4 / 8., 1 / 8. };
    for (int i = 0; i < 4; i++)
        KN_CHECK(fabs(count[i] / (double)n - want[i]) < 0.03, "%d of %d", count[i], n);
}

KN_TEST(sample, cuts_to_top_k_and_top_p)
{
    const float logits[4] = { 0.0f, logf(2), logf(4), logf(1) };
    const kn_sample_options zero = { 0 }, k = { .temperature = 1, .top_k = 2 },
                            p = { .temperature = 1, .top_p = 0.4 },
                            p2 = { .temperature = 1, .top_p = 0.7 };
    bool seen = false;
    for (int i = 0; i < 200; i++) {
        KN_CHECK(kn_sample(logits, 4, &zero, i) == 2);
        KN_CHECK(kn_sample(logits, 4, &p, i) == 2);
        int64_t a = kn_sample(logits, 4, &k, i), b = kn_sample(logits, 4, &p2, i);
        KN_CHECK((a == 1 || a == 2) && (b == 1 || b == 2));
        KN_CHECK(a == kn_sample(logits, 4, &k, i));
        seen |= a == 1;
    }
    KN_CHECK(seen);
    static const struct {
        float logit[3];
        const char *says; /* NULL: the one in the middle */
    } rows[] = {
        { { -INFINITY, 1, -INFINITY }, NULL },
        { { -INFINITY, -INFINITY, -INFINITY }, "none of 3 logits is finite" },
        { { 0, 1, INFINITY }, "logit 2 of 3 is inf" },
        { { NAN, 1, 0 }, "logit 0 of 3 is" },
        { { 0, 1, -NAN }, "logit 2 of 3 is" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int greedy = 0; greedy < 2; greedy++) {
            const int64_t id = kn_sample(rows[i].logit, 3, greedy ? &zero : &k, 0);
            KN_CHECK(id == (rows[i].says ? -1 : 1), "row %zu", i);
            if (rows[i].says)
                KN_CHECK_ERROR(rows[i].says);
        }
}
