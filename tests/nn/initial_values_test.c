/* tests/nn/initial_values_test.c: initializers by fans and truncated normal ones: their ranges and
 * deviations, parts of a parameter, errors. */
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "tests/owned.h"

enum { N = 4096 };

typedef struct moments {
    double mean, deviation, most;
} moments;

/* Of the values of a parameter that begins by init. */
static moments moments_of(kn_initializer init, kn_dtype dtype, int ndim, const int64_t *shape)
{
    OWNED_MODULE kn_module m;
    IN_SCOPE;
    KN_CHECK(kn_module_init_n(&m, NULL) &&
             kn_parameter(&m, "w", dtype, KN_CPU, init, ndim, shape) &&
             kn_materialize(&m, KN_CPU, 5));
    kn_tensor *w = kn_cast(kn_detach(kn_module_param(&m, "w")), KN_F64);
    const double *v = kn_data(w), n = (double)kn_numel(w);
    moments r = { 0 };
    for (int64_t i = 0; i < kn_numel(w); i++) {
        r.mean += v[i] / n;
        r.deviation += v[i] * v[i] / n;
        r.most = fmax(r.most, fabs(v[i]));
    }
    r.deviation = sqrt(r.deviation - r.mean * r.mean);
    return r;
}

static void check_deviation(moments r, double want)
{
    KN_CHECK(fabs(r.mean) < 0.06 * want && fabs(r.deviation - want) < 0.05 * want,
             "mean %g, deviation %g, not %g", r.mean, r.deviation, want);
}

KN_TEST(initial_values, by_fans)
{
    static const int64_t matrix[2] = { 32, 128 }, filters[4] = { 64, 16, 2, 2 };
    check_deviation(moments_of(KN_XAVIER_NORMAL_INIT(1), KN_F32, 2, matrix), sqrt(2.0 / 160));
    check_deviation(moments_of(KN_XAVIER_UNIFORM_INIT(2), KN_F32, 2, matrix), 2 * sqrt(2.0 / 160));
    check_deviation(moments_of(KN_KAIMING_NORMAL_INIT(sqrt(2)), KN_F32, 2, matrix),
                    sqrt(2.0 / 128));
    check_deviation(moments_of(KN_KAIMING_UNIFORM_INIT(1), KN_F64, 4, filters), sqrt(1.0 / 64));
    const kn_initializer out = { KN_INIT_KAIMING_NORMAL, 1, 1 };
    check_deviation(moments_of(out, KN_F32, 4, filters), sqrt(1.0 / 256));
    const double bound = sqrt(6.0 / 160);
    const moments r = moments_of(KN_XAVIER_UNIFORM_INIT(1), KN_F32, 2, matrix);
    KN_CHECK(r.most <= bound && r.most > 0.99 * bound, "%g of %g", r.most, bound);
    KN_CHECK(moments_of(KN_XAVIER_NORMAL_INIT(0), KN_F32, 2, matrix).most == 0);
    OWNED_MODULE kn_module m;
    KN_CHECK(kn_module_init_n(&m, NULL) &&
             kn_parameter(&m, "w", KN_F32, KN_CPU, KN_KAIMING_NORMAL_INIT(1), KN_SHAPE(4, 0)) &&
             kn_materialize(&m, KN_CPU, 1));
}

/* fan_in is the layer's inputs, whichever dim of the weight they are. */
KN_TEST(initial_values, fans_of_a_transposed_layer)
{
    static const kn_initializer by_in = { KN_INIT_KAIMING_NORMAL, 1, 0 },
                                by_out = { KN_INIT_KAIMING_UNIFORM, 1, 1 };
    for (int i = 0; i < 4; i++) {
        OWNED_MODULE kn_linear l = { 0 };
        IN_SCOPE;
        KN_CHECK(kn_linear_init(&l, NULL, "", 100, 25, .in_out = i % 2, .device = KN_META,
                                .weight = i / 2 ? by_out : by_in) &&
                 kn_materialize(&l, KN_CPU, 1));
        const double d =
            kn_item(kn_std(kn_detach(kn_module_param(&l, "weight")), 0, NULL, .correction = 1));
        KN_CHECK(fabs(d * (i / 2 ? 5 : 10) - 1) < 0.05, "case %d: %g", i, d);
    }
}

/* A normal distribution cut at 2 deviations has a deviation of 0.8796. */
/* Rounding to a short dtype doesn't reach the end of [a, b), and reaches the number before it. */
KN_TEST(initial_values, uniform_stays_below_its_end)
{
    static const struct {
        double a, b, before[2]; /* in bf16, f16 */
    } c[] = {
        { 0, 1, { 1 - 0x1p-8, 1 - 0x1p-11 } },           { 1, 2, { 2 - 0x1p-7, 2 - 0x1p-10 } },
        { -0.3, 0.3, { 0.298828125, 0.2998046875 } },    { -2, -1, { -1 - 0x1p-7, -1 - 0x1p-10 } },
        { -3, -1.5, { -1.5 - 0x1p-7, -1.5 - 0x1p-10 } }, { -1, 0, { -0x1p-133, -0x1p-24 } },
    };
    for (int k = 0; k < 12; k++) {
        const kn_dtype dtype = k % 2 ? KN_F16 : KN_BF16;
        const double a = c[k / 2].a, b = c[k / 2].b, before = c[k / 2].before[k % 2];
        OWNED_MODULE kn_module m;
        IN_SCOPE;
        KN_CHECK(kn_module_init_n(&m, NULL) &&
                 kn_parameter(&m, "w", dtype, KN_CPU, KN_UNIFORM_INIT(a, b), KN_SHAPE(1 << 15)) &&
                 kn_materialize(&m, KN_CPU, 5));
        kn_tensor *w = kn_cast(kn_detach(kn_module_param(&m, "w")), KN_F64);
        const double least = kn_item(kn_amin(w, 0, NULL, false)),
                     most = kn_item(kn_amax(w, 0, NULL, false));
        KN_CHECK(least >= a - 0x1p-9 && most < b, "[%g, %g): %g to %.9g", a, b, least, most);
        KN_CHECK(most == before || b == 0, "[%g, %g): %.9g, not %.9g", a, b, most, before);
    }
}

KN_TEST(initial_values, truncated)
{
    static const kn_dtype types[] = { KN_F32, KN_F64, KN_BF16 };
    const int64_t n = N;
    for (int i = 0; i < 3; i++) {
        const moments r = moments_of(KN_TRUNCATED_NORMAL_INIT(0.5), types[i], 1, &n);
        check_deviation(r, 0.5 * 0.8796);
        KN_CHECK(r.most <= 1 && r.most > 0.95, "%g", r.most);
    }
}

/* A rank fills its part: the same bits. */
KN_TEST(initial_values, parts_of_a_parameter)
{
    const kn_initializer init = { KN_INIT_TRUNCATED_NORMAL, 0.25, 2 };
    kn_tensor *whole = kn_empty(KN_F32, KN_CPU, KN_SHAPE(N)), *part;
    KN_CHECK(kn_init_fill(&init, 7, "a.w", whole, 0));
    for (int64_t from = 0; from < N; from += 1000) {
        const int64_t count = from + 1000 < N ? 1000 : N - from;
        part = kn_empty(KN_F32, KN_CPU, KN_SHAPE(count));
        KN_CHECK(kn_init_fill(&init, 7, "a.w", part, from));
        KN_CHECK(memcmp(kn_data(part), (float *)kn_data(whole) + from,
                        (size_t)count * sizeof(float)) == 0);
    }
    KN_CHECK(kn_init_fill(&init, 7, "b.w", part, 0) &&
             memcmp(kn_data(part), kn_data(whole), 96 * sizeof(float)) != 0);
}

/* Orthonormal rows, or columns where those are fewer, times the gain; parts have the same bits. */
KN_TEST(initial_values, orthogonal)
{
    static const int64_t shape[][3] = { { 6, 6, 1 }, { 5, 3, 3 }, { 40, 7, 1 }, { 1, 4, 1 } };
    for (int i = 0; i < 4; i++) {
        OWNED_MODULE kn_module m;
        const int64_t *size = shape[i], rows = size[0], cols = size[1] * size[2];
        IN_SCOPE;
        KN_CHECK(kn_module_init_n(&m, NULL));
        kn_tensor *w = kn_parameter(&m, "w", KN_F64, KN_CPU, KN_ORTHOGONAL_INIT(3), 3, size);
        KN_CHECK(w && kn_materialize(&m, KN_CPU, 7));
        w = kn_view(kn_detach(w), 2, (int64_t[]){ rows, cols });
        kn_tensor *turned = kn_transpose(w, 0, 1);
        kn_tensor *gram = rows <= cols ? kn_matmul(w, turned) : kn_matmul(turned, w);
        int64_t few = kn_size(gram, 0);
        for (int64_t k = 0; k < few * few; k++)
            KN_CHECK(fabs(((double *)kn_data(gram))[k] - 9 * (k % (few + 1) == 0)) < 1e-13);
        kn_initializer init = KN_ORTHOGONAL_INIT(3);
        kn_tensor *part = kn_empty(KN_F64, KN_CPU, KN_SHAPE(rows * cols - 2));
        KN_CHECK(kn_init_resolve(&init, "w", 3, size) && kn_init_fill(&init, 7, "w", part, 1));
        KN_CHECK(memcmp(kn_data(part), (double *)kn_data(w) + 1,
                        (size_t)(rows * cols - 2) * sizeof(double)) == 0);
    }
    OWNED_MODULE kn_module m;
    KN_CHECK(kn_module_init_n(&m, NULL));
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, KN_ORTHOGONAL_INIT(1), KN_SHAPE(4)),
            "'w' has 1 dims");
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, KN_ORTHOGONAL_INIT(-1), KN_SHAPE(4, 4)),
            "a gain of at least 0");
}

KN_TEST(initial_values, errors)
{
    OWNED_MODULE kn_module m;
    KN_CHECK(kn_module_init_n(&m, NULL));
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, KN_XAVIER_NORMAL_INIT(1), KN_SHAPE(4)),
            "'w' has 1 dims; an initializer by fans needs a shape [out, in, ...]");
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, KN_KAIMING_UNIFORM_INIT(-1), KN_SHAPE(4, 4)),
            "an initializer by its fans with -1 and 0");
    const kn_initializer fan = { KN_INIT_KAIMING_UNIFORM, 1, 2 },
                         unknown = { (kn_init_kind)77, 0, 0 };
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, fan, KN_SHAPE(4, 4)),
            "0 (fan_in) or 1 (fan_out) are needed");
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, unknown, KN_SHAPE(4, 4)),
            "an initializer of kind 77");
    REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, KN_TRUNCATED_NORMAL_INIT(-1), KN_SHAPE(4)),
            "a deviation at least 0");
    REFUSED(kn_declare_buffer(&m, "b", KN_F32, KN_CPU, KN_XAVIER_NORMAL_INIT(1), KN_SHAPE(4)),
            "'b' has 1 dims");
    static const kn_initializer each[] = { KN_XAVIER_NORMAL_INIT(1), KN_ZEROS_INIT };
    for (size_t i = 0; i < sizeof each / sizeof *each; i++) {
        REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, each[i], 2, NULL), "the shape is NULL");
        REFUSED(kn_declare_buffer(&m, "b", KN_F32, KN_CPU, each[i], 2, NULL), "the shape is NULL");
        int64_t many[KN_MAX_DIMS] = { 1, 1, 1, 1, 1, 1, 1, 1 };
        REFUSED(kn_parameter(&m, "w", KN_F32, KN_CPU, each[i], 100000000, many), "100000000 dims");
    }
}
