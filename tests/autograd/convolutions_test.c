/* tests/autograd/convolutions_test.c: transposed convolutions against their definition, and those
 * of sequences against those of images of one row; memory order, meta, errors. */
#include "autograd/ops.h"
#include "tests/owned.h"

static kn_tensor *noise(uint64_t stream, int ndim, const int64_t *shape)
{
    return kn_randn(KN_F64, KN_CPU, 5, stream, ndim, shape);
}

static double at(kn_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l)
{
    const double *p = kn_array_of(t).data;
    return p[i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3]];
}

/* ---- values ---------------------------------------------------------------------------------- */

typedef struct transposed_case {
    int64_t in, out, kernel[2], stride[2], pad[2], more[2], dilation[2], groups;
} transposed_case;

/* y[n, o, h stride - pad + r dilation, ...] += x[n,c,h,w] w[c,o,r,s]: each element of x sends its
 * value. */
static double scattered(const transposed_case *v, kn_tensor *x, kn_tensor *w, const int64_t at_y[4])
{
    const int64_t each = v->out / v->groups, from = v->in / v->groups, group = at_y[1] / each;
    double sum = 0;
    for (int64_t c = group * from; c < (group + 1) * from; c++)
        for (int64_t i = 0; i < kn_size(x, 2) * kn_size(x, 3); i++)
            for (int64_t k = 0; k < v->kernel[0] * v->kernel[1]; k++) {
                const int64_t h = i / kn_size(x, 3), u = i % kn_size(x, 3);
                const int64_t r = k / v->kernel[1], s = k % v->kernel[1];
                if (h * v->stride[0] - v->pad[0] + r * v->dilation[0] == at_y[2] &&
                    u * v->stride[1] - v->pad[1] + s * v->dilation[1] == at_y[3])
                    sum += at(x, at_y[0], c, h, u) * at(w, c, at_y[1] % each, r, s);
            }
    return sum;
}

static void check_transposed(const transposed_case *v)
{
    IN_SCOPE;
    kn_tensor *x = noise(1, KN_SHAPE(2, v->in, 3, 4)), *b = noise(3, 1, &v->out);
    kn_tensor *w = noise(2, KN_SHAPE(v->in, v->out / v->groups, v->kernel[0], v->kernel[1]));
    kn_tensor *y = kn_conv_transpose2d(
        x, w, b, .strides = { v->stride[0], v->stride[1] }, .pads = { v->pad[0], v->pad[1] },
        .output_pads = { v->more[0], v->more[1] }, .dilations = { v->dilation[0], v->dilation[1] },
        .groups = v->groups);
    KN_CHECK(y);
    KN_CHECK(kn_size(y, 0) == 2 && kn_size(y, 1) == v->out);
    for (int d = 0; d < 2; d++)
        KN_CHECK(kn_size(y, 2 + d) == (kn_size(x, 2 + d) - 1) * v->stride[d] - 2 * v->pad[d] +
                                          v->dilation[d] * (v->kernel[d] - 1) + v->more[d] + 1);
    for (int64_t i = 0; i < kn_numel(y); i++) {
        const int64_t W = kn_size(y, 3), H = kn_size(y, 2), C = v->out;
        const int64_t p[4] = { i / (C * H * W), i / (H * W) % C, i / W % H, i % W };
        const double want = scattered(v, x, w, p) + ((double *)kn_data(b))[p[1]];
        KN_CHECK(fabs(at(y, p[0], p[1], p[2], p[3]) - want) < 1e-12, "%lld: %g, not %g",
                 (long long)i, at(y, p[0], p[1], p[2], p[3]), want);
    }
}

KN_TEST(convolutions, transposed_by_its_definition)
{
    static const transposed_case cases[] = {
        { 2, 3, { 3, 2 }, { 1, 1 }, { 0, 0 }, { 0, 0 }, { 1, 1 }, 1 },
        { 4, 6, { 3, 3 }, { 2, 3 }, { 1, 2 }, { 1, 2 }, { 1, 1 }, 2 },
        { 3, 3, { 2, 3 }, { 2, 1 }, { 0, 1 }, { 0, 1 }, { 1, 2 }, 3 },
        { 2, 2, { 1, 3 }, { 1, 1 }, { 0, 1 }, { 1, 2 }, { 2, 3 }, 1 }, /* more than the stride */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_transposed(&cases[i]);
}

static bool same_elements(kn_tensor *a, kn_tensor *b)
{
    KN_CHECK(a && b && kn_numel(a) == kn_numel(b), "%s", kn_error() ? kn_error() : "sizes");
    return memcmp(kn_data(kn_contiguous(a)), kn_data(kn_contiguous(b)),
                  (size_t)kn_numel(a) * kn_dtype_size(a->dtype)) == 0;
}

KN_TEST(convolutions, sequences_are_images_of_one_row)
{
    kn_tensor *x = noise(1, KN_SHAPE(2, 4, 9)), *w = noise(2, KN_SHAPE(6, 2, 3)),
              *b = noise(3, KN_SHAPE(6));
    kn_tensor *rows = kn_reshape(x, KN_SHAPE(2, 4, 1, 9));
    kn_tensor *y = kn_conv1d(x, w, b, .stride = 2, .pad = 2, .dilation = 2, .groups = 2);
    KN_CHECK(y && kn_ndim(y) == 3 && kn_size(y, 2) == 5);
    KN_CHECK(same_elements(y, kn_conv2d(rows, kn_reshape(w, KN_SHAPE(6, 2, 1, 3)), b,
                                        .strides = { 1, 2 }, .pads = { 0, 2 },
                                        .dilations = { 1, 2 }, .groups = 2)));
    w = noise(2, KN_SHAPE(4, 3, 3));
    y = kn_conv_transpose1d(x, w, b, .stride = 3, .pad = 1, .output_pad = 2, .groups = 2);
    KN_CHECK(y && kn_ndim(y) == 3 && kn_size(y, 2) == 8 * 3 - 2 + 2 + 2 + 1);
    KN_CHECK(same_elements(y, kn_conv_transpose2d(rows, kn_reshape(w, KN_SHAPE(4, 3, 1, 3)), b,
                                                  .strides = { 1, 3 }, .pads = { 0, 1 },
                                                  .output_pads = { 0, 2 }, .groups = 2)));
}

/* The transposed convolution takes an image back to the shape it had. */
KN_TEST(convolutions, dtypes_order_and_meta)
{
    kn_tensor *x = kn_cast(noise(1, KN_SHAPE(2, 3, 4, 5)), KN_BF16);
    kn_tensor *w = kn_cast(noise(2, KN_SHAPE(3, 2, 3, 3)), KN_BF16);
    kn_tensor *b = kn_cast(noise(3, KN_SHAPE(2)), KN_F32);
    kn_tensor *y = kn_conv_transpose2d(kn_channels_last(x), w, b, .stride = 2);
    KN_CHECK(y && kn_is_channels_last(y) && kn_dtype_of(y) == KN_BF16);
    kn_tensor *z = kn_conv_transpose2d(x, w, kn_cast(b, KN_BF16), .stride = 2);
    KN_CHECK(same_elements(y, z));
    x = kn_empty(KN_F32, KN_META, KN_SHAPE(8, 16, 32, 32));
    y = kn_conv_transpose2d(x, kn_empty(KN_F32, KN_META, KN_SHAPE(16, 4, 4, 4)), NULL, .stride = 2,
                            .pad = 1, .groups = 2);
    KN_CHECK(y && kn_size(y, 1) == 8 && kn_size(y, 2) == 64 && kn_size(y, 3) == 64);
    kn_set_grad_mode(false);
    KN_CHECK(kn_conv1d(noise(1, KN_SHAPE(1, 2, 3)), noise(2, KN_SHAPE(2, 2, 1)), NULL) &&
             kn_conv_transpose1d(noise(1, KN_SHAPE(1, 2, 3)), noise(2, KN_SHAPE(2, 2, 1)), NULL));
    kn_set_grad_mode(true);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(convolutions, errors_of_sequences)
{
    kn_tensor *x = noise(1, KN_SHAPE(2, 4, 5)), *w = noise(2, KN_SHAPE(6, 4, 3));
    REFUSED(kn_conv1d(noise(1, KN_SHAPE(2, 4, 5, 5)), w, NULL),
            "conv1d: needs x[N,C,L] or x[C,L] and weight[O,C/groups,S] of the same float dtype: "
            "x is f64[2,4,5,5], weight is f64[6,4,3]");
    REFUSED(kn_conv1d(x, w, NULL, .groups = 2),
            "conv1d: x is f64[2,4,5], its 4 channels in 2 groups need a weight[O,2,S], got "
            "f64[6,4,3]");
    REFUSED(kn_conv1d(x, w, NULL, .dilation = 3),
            "conv1d: a kernel of 3 with dilation 3 reaches over 7 columns; x with pad 0 has "
            "5");
    REFUSED(kn_conv1d(x, w, NULL, .pad = INT64_MAX), "are too many to count");
    REFUSED(kn_conv1d(x, w, NULL, .dilation = INT64_MAX), "are too many to count");
    REFUSED(kn_conv1d(x, w, NULL, .stride = -1),
            "conv1d: stride -1, dilation 1, pad 0 along columns");
    REFUSED(kn_conv1d(x, kn_cast(w, KN_F32), NULL), "of the same float dtype");
    REFUSED(kn_conv1d(x, NULL, NULL), "conv1d: argument 2 is NULL");
    REFUSED(kn_conv_transpose1d(x, w, NULL),
            "conv_transpose1d: x is f64[2,4,5], its 4 channels need a weight[4,O/groups,S], "
            "got f64[6,4,3]");
}

KN_TEST(convolutions, errors_of_transposed_ones)
{
    kn_tensor *x = noise(1, KN_SHAPE(2, 4, 2, 2)), *w = noise(2, KN_SHAPE(4, 3, 3, 3));
    REFUSED(kn_conv_transpose2d(x, noise(2, KN_SHAPE(4, 3, 3)), NULL),
            "conv_transpose2d: needs x[N,C,H,W] or x[C,H,W] and weight[C,O/groups,R,S]");
    REFUSED(kn_conv_transpose2d(x, w, NULL, .groups = 3),
            "conv_transpose2d: 3 groups must divide the channels of x f64[2,4,2,2]");
    REFUSED(kn_conv_transpose2d(x, w, noise(3, KN_SHAPE(4))),
            "bias is f64[4]; it should be [3] in x's dtype or f32");
    REFUSED(kn_conv_transpose2d(x, w, NULL, .stride = 2, .output_pads = { 1, 2 }),
            "conv_transpose2d: stride 2, dilation 1, pad 0, output_pad 2 along columns");
    REFUSED(kn_conv_transpose2d(x, w, NULL, .pads = { 2, 0 }),
            "conv_transpose2d: 2 rows with stride 1, pad 2, output_pad 0 under a kernel of "
            "3 with dilation 1 would give 0; at least 1 is needed");
    REFUSED(kn_conv_transpose2d(x, w, NULL, .stride = INT64_MAX), "are too many to count");
    REFUSED(kn_conv_transpose2d(noise(1, KN_SHAPE(2, 0, 2, 2)), noise(2, KN_SHAPE(0, 4, 1, 1)),
                                NULL, .groups = INT64_MAX / 2),
            "make too many channels");
    REFUSED(kn_conv_transpose2d(x, w, NULL, .groups = -2), "-2 groups must divide the channels");
}
