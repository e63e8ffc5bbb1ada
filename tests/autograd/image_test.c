/* tests/autograd/image_test.c: convolution, batch norm and pooling against their definitions and
 * against numbers computed by hand; memory order of results; error messages. */
#include "autograd/ops.h"
#include "comm/comm.h"
#include "tests/owned.h"

static kn_tensor *image(int64_t N, int64_t C, int64_t H, int64_t W)
{
    return kn_randn(KN_F32, KN_CPU, 5, (uint64_t)(N + C + H + W), KN_SHAPE(N, C, H, W));
}

static float at(kn_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l)
{
    const float *p = (const float *)kn_array_of(t).data;
    return p[i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3]];
}

/* ---- values ---------------------------------------------------------------------------------- */

KN_TEST(image, conv_by_hand)
{
    float x[12] = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }, w[4] = { 1, 0, -1, 2 }, b = 0.5f;
    kn_tensor *y = kn_conv2d(kn_from(KN_F32, KN_CPU, x, KN_SHAPE(1, 1, 3, 4)),
                             kn_from(KN_F32, KN_CPU, w, KN_SHAPE(1, 1, 2, 2)),
                             kn_from(KN_F32, KN_CPU, &b, KN_SHAPE(1)), .strides = { 1, 2 });
    KN_CHECK(y && kn_size(y, 2) == 2 && kn_size(y, 3) == 2);
    const float want[4] = { 1 - 5 + 12 + 0.5f, 3 - 7 + 16 + 0.5f, 5 - 9 + 20 + 0.5f,
                            7 - 11 + 24 + 0.5f };
    KN_CHECK(memcmp(kn_data(y), want, sizeof want) == 0, "%g %g", (double)((float *)kn_data(y))[0],
             (double)((float *)kn_data(y))[1]);
}

/* A kernel of 1 x 1 is a linear layer over the channels. */
KN_TEST(image, conv_of_one_is_linear)
{
    kn_tensor *x = image(2, 5, 3, 4), *w = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(7, 5));
    kn_tensor *b = kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(7));
    kn_tensor *y = kn_conv2d(x, kn_reshape(w, KN_SHAPE(7, 5, 1, 1)), b);
    kn_tensor *z = kn_linear(kn_permute(x, 4, (int64_t[]){ 0, 2, 3, 1 }), w, b, false);
    kn_tensor *d = kn_sub(y, kn_permute(z, 4, (int64_t[]){ 0, 3, 1, 2 }));
    KN_CHECK(kn_item(kn_amax(kn_abs(d), 0, NULL, false)) < 1e-5);
}

KN_TEST(image, batch_norm_by_its_definition)
{
    float mean[3] = { 1, 2, 3 }, var[3] = { 4, 5, 6 };
    kn_tensor *m = kn_from(KN_F32, KN_CPU, mean, KN_SHAPE(3)),
              *v = kn_from(KN_F32, KN_CPU, var, KN_SHAPE(3));
    kn_tensor *x = image(4, 3, 2, 5), *w = kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(3));
    kn_tensor *b = kn_full(KN_F32, KN_CPU, 0.5, KN_SHAPE(3));
    kn_tensor *y = kn_batch_norm(x, w, b, m, v, .training = true, .momentum = 0.25);
    kn_tensor *e = kn_batch_norm(x, w, b, m, v); /* with the running statistics */
    KN_CHECK(y && e);
    for (int c = 0; c < 3; c++) {
        double sum = 0, squares = 0;
        for (int i = 0; i < 40; i++)
            sum += (double)at(x, i / 10, c, i / 5 % 2, i % 5) / 40;
        for (int i = 0; i < 40; i++)
            squares += pow((double)at(x, i / 10, c, i / 5 % 2, i % 5) - sum, 2);
        double rm = 0.75 * (double)mean[c] + 0.25 * sum,
               rv = 0.75 * (double)var[c] + 0.25 * squares / 39;
        KN_CHECK(fabs((double)((float *)kn_data(m))[c] - rm) < 1e-5, "running mean %d", c);
        KN_CHECK(fabs((double)((float *)kn_data(v))[c] - rv) < 1e-5, "running var %d", c);
        for (int i = 0; i < 40; i++) {
            double h = (double)at(x, i / 10, c, i / 5 % 2, i % 5);
            double want = (h - sum) / sqrt(squares / 40 + 1e-5) * 2 + 0.5;
            double eval = (h - rm) / sqrt(rv + 1e-5) * 2 + 0.5;
            KN_CHECK(fabs((double)at(y, i / 10, c, i / 5 % 2, i % 5) - want) < 1e-4);
            KN_CHECK(fabs((double)at(e, i / 10, c, i / 5 % 2, i % 5) - eval) < 1e-4);
        }
    }
}

KN_TEST(image, pools_by_hand)
{
    float x[15] = { 1, 5, 2, 0, 3, 4, 5, 1, 7, 2, 0, 2, 6, 1, 8 };
    kn_tensor *t = kn_require_grad(kn_from(KN_F32, KN_CPU, x, KN_SHAPE(1, 1, 3, 5)), true);
    kn_tensor *y = kn_max_pool2d(t, .kernel = 2);
    const float max[2] = { 5, 7 }, ceil_max[6] = { 5, 7, 3, 2, 6, 8 };
    KN_CHECK(y && kn_numel(y) == 2 && memcmp(kn_data(y), max, sizeof max) == 0);
    KN_CHECK(kn_backward(sum_of(y)));
    const float dx[15] = { 0, 1, 0, 0, 0, 0, 0, 0, 1 }; /* the first of the two fives */
    KN_CHECK(memcmp(kn_data(kn_grad(t)), dx, sizeof dx) == 0);
    y = kn_max_pool2d(t, .kernel = 2, .ceil_mode = true);
    KN_CHECK(y && kn_numel(y) == 6 && memcmp(kn_data(y), ceil_max, sizeof ceil_max) == 0);
    y = kn_avg_pool2d(t, .kernel = 2, .pad = 1); /* corners: one element of four */
    KN_CHECK(y && at(y, 0, 0, 0, 0) == 0.25f && at(y, 0, 0, 0, 1) == 7 / 4.0f);
    y = kn_avg_pool2d(t, .kernel = 2, .pad = 1, .exclude_pad = true);
    KN_CHECK(y && at(y, 0, 0, 0, 0) == 1 && at(y, 0, 0, 0, 1) == 3.5f);
    y = kn_adaptive_avg_pool2d(t, 1, 2); /* columns 0 to 2 and 2 to 4 */
    KN_CHECK(y && at(y, 0, 0, 0, 0) == 26 / 9.0f && at(y, 0, 0, 0, 1) == 30 / 9.0f, "%g",
             (double)at(y, 0, 0, 0, 0));
}

/* ---- norm, sum and relu at once -------------------------------------------------------------- */

enum { X, W, B, R, ARGS };

/* relu(batch_norm(x) + r) as one operation or as three; the result, and the gradient of each. */
static kn_tensor *norm_relu(kn_tensor *const in[ARGS], kn_batch_norm_options o, bool at_once,
                            kn_tensor *grad[ARGS])
{
    const int64_t C = kn_size(in[X], 1);
    kn_tensor *leaf[ARGS] = { 0 }, *mean = kn_full(KN_F32, KN_CPU, 0.125, KN_SHAPE(C)),
              *var = kn_full(KN_F32, KN_CPU, 1.5, KN_SHAPE(C));
    for (int i = 0; i < ARGS; i++)
        if (in[i])
            leaf[i] = kn_require_grad(kn_detach(in[i]), true);
    if (at_once)
        o.relu = true, o.residual = leaf[R];
    kn_tensor *y = kn_batch_norm_(leaf[X], leaf[W], leaf[B], mean, var, o);
    if (!at_once)
        y = kn_relu(leaf[R] ? kn_add(y, leaf[R]) : y);
    kn_tensor *weigh = kn_randn(kn_dtype_of(in[X]), KN_CPU, 3, 3, kn_ndim(y), kn_shape(y));
    KN_CHECK(kn_backward(sum_of(kn_cast(kn_mul(y, weigh), KN_F32))));
    for (int i = 0; i < ARGS; i++)
        grad[i] = leaf[i] ? kn_grad(leaf[i]) : NULL;
    return y;
}

static bool same_bits(kn_tensor *a, kn_tensor *b)
{
    a = kn_contiguous(a), b = kn_contiguous(b);
    return a && b && kn_dtype_of(a) == kn_dtype_of(b) &&
           memcmp(kn_data(a), kn_data(b), (size_t)kn_numel(a) * kn_dtype_size(kn_dtype_of(a))) == 0;
}

/* In f32, and in bf16 where nothing is added, to the bit; sums are rounded once less in bf16. */
KN_TEST(image, norm_sum_and_relu_at_once)
{
    for (int i = 0; i < 48; i++) {
        IN_SCOPE;
        const bool residual = i & 1, last = i & 2, training = i & 4, bf16 = i & 8;
        const int64_t C = (int64_t[]){ 3, 16, 70 }[i / 16];
        kn_tensor *in[ARGS] = { [X] = kn_add_scalar(image(4, C, 5, 3), 0.25),
                                [W] = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(C)),
                                [B] = kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(C)),
                                [R] = residual ? image(4, C, 5, 3) : NULL };
        for (int k = 0; k < ARGS; k += R) {
            if (last && in[k])
                in[k] = kn_channels_last(in[k]);
            if (bf16 && in[k])
                in[k] = kn_cast(in[k], KN_BF16);
        }
        const kn_batch_norm_options o = { ._size = sizeof o,
                                          .training = training,
                                          .sync = i % 3 ? NULL : kn_comm_self() };
        kn_tensor *one[ARGS], *three[ARGS], *y = norm_relu(in, o, true, one),
                                            *z = norm_relu(in, o, false, three);
        KN_CHECK(kn_is_channels_last(y) == last);
        if (bf16 && residual) {
            kn_tensor *d = kn_amax(kn_abs(kn_sub(y, z)), 0, NULL, false);
            KN_CHECK(kn_item(d) < 0.05, "case %d: %g", i, kn_item(d));
        } else {
            KN_CHECK(same_bits(y, z), "case %d", i);
            for (int k = 0; k < ARGS; k++)
                KN_CHECK(!in[k] || same_bits(one[k], three[k]), "case %d: gradient %d", i, k);
        }
    }
}

/* What stands in one case of the other kinds: NaN passes, and an unwanted gradient isn't made. */
KN_TEST(image, norm_and_relu_let_nan_pass)
{
    float x[8] = { 1, -1, 2, -2, 3, NAN, 1, 0 }, r[8] = { 0, 0, NAN, 0, 9, 9, 9, 9 };
    kn_tensor *t = kn_from(KN_F32, KN_CPU, x, KN_SHAPE(4, 2)),
              *s = kn_require_grad(kn_from(KN_F32, KN_CPU, r, KN_SHAPE(4, 2)), true);
    kn_tensor *zero = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2)),
              *one = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2));
    kn_tensor *y = kn_batch_norm(t, NULL, NULL, zero, one, .relu = true, .residual = s);
    KN_CHECK(kn_backward(sum_of(y)) && !kn_grad(t));
    const float *v = kn_data(y), *g = kn_data(kn_grad(s));
    KN_CHECK(v[0] > 0 && v[1] == 0 && isnan(v[2]) && v[3] == 0 && isnan(v[5]) && v[6] > 9.9f);
    KN_CHECK(g[0] == 1 && g[1] == 0 && g[2] == 1 && g[3] == 0 && g[4] == 1 && g[5] == 1);
}

/* ---- order of memory ------------------------------------------------------------------------- */

static kn_tensor *net(kn_tensor *x, kn_tensor *w, kn_tensor **inner)
{
    kn_tensor *h = kn_relu(kn_conv2d(x, w, NULL, .pad = 1));
    inner[0] = h;
    inner[1] = h = kn_add(h, kn_batch_norm(h, NULL, NULL, NULL, NULL, .training = true));
    inner[2] = h = kn_max_pool2d(kn_cast(kn_scale(h, 0.5), KN_F64), .kernel = 2);
    return sum_of(kn_mul(h, h));
}

KN_TEST(image, order_is_kept)
{
    double loss[2];
    kn_tensor *grad[2];
    for (int last = 0; last < 2; last++) {
        kn_tensor *leaf = kn_require_grad(image(2, 6, 4, 4), true), *inner[3];
        kn_tensor *w = kn_randn(KN_F32, KN_CPU, 9, 9, KN_SHAPE(6, 6, 3, 3));
        kn_tensor *x = last ? kn_channels_last(leaf) : leaf;
        KN_CHECK(kn_is_channels_last(x) == last);
        kn_tensor *l = net(x, kn_scale(w, 0.1), inner);
        for (int i = 0; i < 3; i++)
            KN_CHECK(inner[i] && kn_is_channels_last(inner[i]) == last, "%d", i);
        KN_CHECK(kn_backward(l));
        loss[last] = kn_item(l);
        grad[last] = kn_grad(leaf);
    }
    KN_CHECK(fabs(loss[0] - loss[1]) < 1e-5 * loss[0], "%.9g, channels last %.9g", loss[0],
             loss[1]);
    kn_tensor *d = kn_abs(kn_sub(grad[0], grad[1]));
    KN_CHECK(kn_item(kn_amax(d, 0, NULL, false)) < 1e-4);
    kn_tensor *x = kn_channels_last(image(1, 3, 2, 2)), *one = image(1, 3, 1, 1),
              *other = image(1, 3, 2, 2);
    kn_tensor *made[] = { kn_add(one, x),
                          kn_mul(x, one),
                          kn_maximum(x, other),
                          kn_where(kn_gt(x, other), x, other),
                          kn_dropout(x, 0.5),
                          kn_cast(x, KN_BF16),
                          kn_conv2d(x, image(4, 3, 1, 1), NULL),
                          kn_add(x, mean_of(x)) };
    for (int i = 0; i < 8; i++)
        KN_CHECK(made[i] && kn_is_channels_last(made[i]) && !kn_is_contiguous(made[i]), "%d", i);
    KN_CHECK(kn_channels_last(x) == x && kn_is_contiguous(kn_contiguous(x)));
    KN_CHECK(!kn_is_channels_last(kn_contiguous(x)));
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(image, errors_of_convolutions)
{
    kn_tensor *x = image(2, 4, 5, 5), *w = image(6, 4, 3, 3);
    REFUSED(kn_conv2d(x, image(6, 3, 3, 3), NULL),
            "conv2d: x is f32[2,4,5,5], its 4 channels in 1 groups need a weight[O,4,R,S], "
            "got f32[6,3,3,3]");
    REFUSED(kn_conv2d(x, w, NULL, .groups = 3), "3 groups must divide the channels");
    REFUSED(kn_conv2d(x, w, NULL, .dilation = 3),
            "a kernel of 3 with dilation 3 reaches over 7 rows; x with pad 0 has 5");
    REFUSED(kn_conv2d(x, w, NULL, .pads = { 1, -1 }), "pad -1 along columns");
    REFUSED(kn_conv2d(x, w, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(5))),
            "bias is f32[5]; it should be [6]");
    REFUSED(kn_conv2d(x, kn_cast(w, KN_BF16), NULL),
            "of the same float dtype: x is f32[2,4,5,5], weight is bf16[6,4,3,3]");
    REFUSED(kn_conv2d(kn_reshape(x, KN_SHAPE(8, 25)), w, NULL), "x[N,C,H,W] or x[C,H,W]");
    REFUSED(kn_conv2d(x, w, NULL, .same = true, .stride = 2), "conv2d: .same goes with stride 1");
    REFUSED(kn_conv2d(x, w, NULL, .same = true, .pad = 1), "conv2d: .same goes with stride 1");
    REFUSED(kn_channels_last(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 4))),
            "channels_last: needs an image [N,C,H,W], got f32[3,4]");
}

KN_TEST(image, errors_of_norms_and_pools)
{
    kn_tensor *x = image(1, 4, 1, 1), *four = kn_ones(KN_F32, KN_CPU, KN_SHAPE(4));
    REFUSED(kn_batch_norm(x, NULL, NULL, NULL, NULL, .training = true),
            "batch_norm: x is f32[1,4,1,1], one value a channel");
    REFUSED(kn_batch_norm(x, NULL, NULL, four, NULL), "without training running_var is needed");
    REFUSED(kn_batch_norm(x, NULL, NULL, four, four, .residual = x), ".residual is for .relu");
    REFUSED(kn_batch_norm(x, NULL, NULL, four, four, .relu = true, .residual = image(1, 4, 1, 2)),
            ".residual is f32[1,4,1,2]; they should be alike");
    REFUSED(kn_batch_norm(x, NULL, NULL, four, four, .relu = true, .residual = four),
            ".residual is f32[4]; they should be alike");
    REFUSED(kn_batch_norm(x, kn_ones(KN_F32, KN_CPU, KN_SHAPE(3)), NULL, four, four),
            "weight is f32[3]; it should be [4]");
    REFUSED(
        kn_batch_norm(image(2, 4, 3, 3), NULL, NULL, four, four, .training = true, .momentum = 2),
        "momentum is 2");
    x = image(1, 2, 3, 3);
    REFUSED(kn_max_pool2d(x), "max_pool2d: kernel 0");
    REFUSED(kn_max_pool2d(x, .kernel = 2, .pad = 2), "pad at most half of kernel");
    REFUSED(kn_avg_pool2d(x, .kernel = 4),
            "avg_pool2d: a window reaches over 4 rows; x with pad 0 has 3");
    REFUSED(kn_avg_pool2d(x, .kernel = 2, .dilation = 2), "averages have no dilation");
    REFUSED(kn_adaptive_avg_pool2d(x, 0, 2), "avg_pool2d: 0 x 2 windows");
}
