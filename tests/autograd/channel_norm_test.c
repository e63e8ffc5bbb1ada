/* tests/autograd/channel_norm_test.c: group norm and instance norm against their definition;
 * dtypes, memory order, empty tensors, meta, errors. (Batch norm: image_test.c.) */
#include "tests/owned.h"

static kn_tensor *noise(uint64_t stream, int ndim, const int64_t *shape)
{
    return kn_randn(KN_F64, KN_CPU, 5, stream, ndim, shape);
}

/* (x - mean) / sqrt(var + eps) * w + b over the values of each group of a row-major x. */
static void check_values(const double *y, const double *x, const double *w, const double *b,
                         const int64_t *shape, int ndim, int64_t groups, double eps)
{
    int64_t rest = 1;
    for (int d = 2; d < ndim; d++)
        rest *= shape[d];
    const int64_t C = shape[1], M = C / groups * rest;
    for (int64_t g = 0; g < shape[0] * groups; g++) {
        double mean = 0, var = 0;
        for (int64_t i = 0; i < M; i++)
            mean += x[g * M + i] / (double)M;
        for (int64_t i = 0; i < M; i++)
            var += (x[g * M + i] - mean) * (x[g * M + i] - mean) / (double)M;
        for (int64_t i = 0; i < M; i++) {
            const int64_t c = (g * M + i) / rest % C;
            const double h = (x[g * M + i] - mean) / sqrt(var + eps);
            const double want = h * (w ? w[c] : 1) + (b ? b[c] : 0);
            KN_CHECK(fabs(y[g * M + i] - want) < 1e-10, "group %lld, element %lld: %g, not %g",
                     (long long)g, (long long)i, y[g * M + i], want);
        }
    }
}

KN_TEST(channel_norm, by_its_definition)
{
    static const int64_t shapes[4][5] = {
        { 3, 6 }, { 2, 6, 5 }, { 2, 6, 3, 2 }, { 1, 6, 2, 1, 3 }
    };
    for (int i = 0; i < 4; i++)
        for (int64_t groups = 1; groups <= 6; groups++) {
            if (6 % groups)
                continue;
            IN_SCOPE;
            kn_tensor *x = noise(1, i + 2, shapes[i]), *w = noise(2, KN_SHAPE(6)),
                      *b = noise(3, KN_SHAPE(6));
            kn_tensor *y = kn_group_norm(x, groups, w, b, 0);
            kn_tensor *plain = kn_group_norm(x, groups, NULL, NULL, 0.5);
            KN_CHECK(y && plain);
            check_values(kn_data(y), kn_data(x), kn_data(w), kn_data(b), shapes[i], i + 2, groups,
                         1e-5);
            check_values(kn_data(plain), kn_data(x), NULL, NULL, shapes[i], i + 2, groups, 0.5);
            if (groups == 6 && i > 0) {
                kn_tensor *z = kn_instance_norm(x, w, NULL, KN_ZERO);
                KN_CHECK(z);
                check_values(kn_data(z), kn_data(x), kn_data(w), NULL, shapes[i], i + 2, 6, 0);
            }
        }
}

/* Statistics are of f32 for narrow images, and weights may be. */
KN_TEST(channel_norm, narrow_images_with_f32_weights)
{
    const int64_t shape[4] = { 2, 4, 3, 5 };
    kn_tensor *x = kn_cast(noise(1, 4, shape), KN_BF16),
              *w = kn_cast(noise(2, KN_SHAPE(4)), KN_F32);
    kn_require_grad(w, true);
    kn_tensor *y = kn_group_norm(x, 2, w, NULL, 0);
    KN_CHECK(y && kn_dtype_of(y) == KN_BF16);
    kn_tensor *wide = kn_group_norm(kn_cast(x, KN_F32), 2, kn_detach(w), NULL, 0);
    kn_tensor *d = kn_abs(kn_sub(kn_cast(y, KN_F32), wide));
    KN_CHECK(kn_item(kn_amax(d, 0, NULL, false)) < 3e-2);
    KN_CHECK(kn_backward(sum_of(kn_cast(y, KN_F32))));
    KN_CHECK(kn_dtype_of(kn_grad(w)) == KN_F32);
}

KN_TEST(channel_norm, order_empty_and_meta)
{
    kn_tensor *x = noise(1, KN_SHAPE(2, 4, 3, 5)), *last = kn_channels_last(x);
    kn_tensor *y = kn_group_norm(last, 2, NULL, NULL, 0);
    KN_CHECK(y && kn_is_channels_last(y));
    kn_tensor *d = kn_abs(kn_sub(y, kn_group_norm(x, 2, NULL, NULL, 0)));
    KN_CHECK(kn_item(kn_amax(d, 0, NULL, false)) == 0);
    static const int64_t empty[3][3] = { { 0, 4, 3 }, { 2, 4, 0 }, { 2, 0, 3 } };
    for (int i = 0; i < 3; i++) {
        const int64_t C = empty[i][1];
        x = kn_require_grad(noise(1, 3, empty[i]), true);
        kn_tensor *w = kn_require_grad(noise(2, 1, &C), true);
        kn_tensor *b = kn_require_grad(noise(3, 1, &C), true);
        y = kn_group_norm(x, 2, w, b, 0);
        KN_CHECK(y && kn_numel(y) == 0, "%d", i);
        KN_CHECK(kn_instance_norm(x, w, b, 0), "%d", i);
        KN_CHECK(kn_backward(sum_of(y)), "%d", i);
        for (int64_t c = 0; c < C; c++)
            KN_CHECK(((double *)kn_data(kn_grad(w)))[c] == 0 &&
                     ((double *)kn_data(kn_grad(b)))[c] == 0);
    }
    x = kn_require_grad(kn_empty(KN_F16, KN_META, KN_SHAPE(8, 64, 32, 32)), true);
    y = kn_group_norm(x, 32, kn_empty(KN_F32, KN_META, KN_SHAPE(64)), NULL, 0);
    KN_CHECK(y && kn_size(y, 1) == 64 && kn_dtype_of(y) == KN_F16);
    KN_CHECK(kn_backward(sum_of(y)));
}

KN_TEST(channel_norm, errors)
{
    kn_tensor *x = noise(1, KN_SHAPE(2, 6, 3));
    REFUSED(kn_group_norm(x, 4, NULL, NULL, 0),
            "group_norm: 4 groups must divide the 6 channels of x f64[2,6,3]");
    REFUSED(kn_group_norm(x, 0, NULL, NULL, 0), "group_norm: 0 groups must divide");
    REFUSED(kn_group_norm(x, 2, noise(1, KN_SHAPE(3)), NULL, 0),
            "group_norm: x is f64[2,6,3], weight is f64[3]; it should be [6] in x's dtype");
    REFUSED(kn_group_norm(x, 2, NULL, kn_zeros(KN_BF16, KN_CPU, KN_SHAPE(6)), 0),
            "bias is bf16[6]; it should be [6]");
    REFUSED(kn_group_norm(x, 2, NULL, NULL, -1), "group_norm: eps is -1, should be at least 0");
    REFUSED(kn_group_norm(noise(1, KN_SHAPE(6)), 2, NULL, NULL, 0),
            "group_norm: needs a float x[N,C,...] of at least 2 dims, got f64[6]");
    REFUSED(kn_group_norm(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 6)), 2, NULL, NULL, 0),
            "group_norm: needs a float x");
    REFUSED(kn_instance_norm(noise(1, KN_SHAPE(2, 6)), NULL, NULL, 0),
            "instance_norm: needs a float x[N,C,...] of at least 3 dims, got f64[2,6]");
    REFUSED(kn_instance_norm(noise(1, KN_SHAPE(2, 6, 1)), NULL, NULL, 0),
            "instance_norm: x is f64[2,6,1], one value a channel");
    REFUSED(kn_instance_norm(x, NULL, noise(1, KN_SHAPE(5)), NAN), "instance_norm: eps is nan");
    kn_tensor *five = noise(1, KN_SHAPE(5)), *six = noise(1, KN_SHAPE(6));
    REFUSED(
        kn_instance_norm(x, NULL, NULL, 0, .running_mean = five),
        "instance_norm: x is f64[2,6,3], .running_mean is f64[5]; it should be [6] in x's dtype");
    REFUSED(kn_instance_norm(x, NULL, NULL, 0, .running_var = six, .momentum = 1.5),
            "instance_norm: .momentum is 1.5, should lie in [0, 1]");
    REFUSED(kn_instance_norm(x, NULL, NULL, 0, .running_var = six, .use_running = true),
            "without training running_mean is needed");
}
