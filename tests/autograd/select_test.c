/* tests/autograd/select_test.c: elements picked by their values; columns added up into images;
 * pools of sequences. Gradients and meta: every_test.c. */
#include "tests/autograd/expect.h"
#include "tests/owned.h"

static double listed(const int64_t *at, void *arg)
{
    return ((const double *)arg)[at[0]];
}
#define EXPECT_LIST(y, n, ...) expect(y, 1, (int64_t[]){ n }, listed, (double[]){ __VA_ARGS__ })

static double in_rows_of_two(const int64_t *at, void *arg)
{
    return ((const double *)arg)[2 * at[0] + at[1]];
}

KN_TEST(select, places_that_are_not_zero)
{
    const kn_dtype types[] = { KN_F32, KN_BF16, KN_F64, KN_I64, KN_U8, KN_BOOL };
    double want[] = { 0, 1, 1, 0, 1, 2 };
    for (int t = 0; t < 6; t++) {
        const double v[] = { 0, 1, -0.0, 1, 0, 1 };
        kn_tensor *x = kn_cast(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(2, 3)), types[t]);
        expect(kn_nonzero(x), 2, (int64_t[]){ 3, 2 }, in_rows_of_two, want);
    }
    double nan[] = { NAN, 0, 2 }, at[] = { 0, 2 };
    kn_tensor *y = kn_nonzero(kn_from(KN_F64, KN_CPU, nan, KN_SHAPE(3)));
    expect(kn_reshape(y, KN_SHAPE(-1)), 1, (int64_t[]){ 2 }, listed, at);
    y = kn_nonzero(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)));
    KN_CHECK(y && kn_size(y, 0) == 0 && kn_size(y, 1) == 2);
    y = kn_nonzero(kn_ones(KN_F32, KN_CPU, KN_SCALAR));
    KN_CHECK(y && kn_size(y, 0) == 1 && kn_size(y, 1) == 0);
}

KN_TEST(select, elements_by_a_mask)
{
    const uint8_t columns[] = { 1, 0, 1 };
    kn_tensor *mask = kn_cast(kn_from(KN_U8, KN_CPU, columns, KN_SHAPE(3)), KN_BOOL);
    kn_tensor *x = kn_require_grad(counted(KN_F32, KN_CPU, 2, (int64_t[]){ 2, 3 }), true);
    kn_tensor *y = kn_masked_select(x, mask);
    EXPECT_LIST(y, 4, 0, 2, 3, 5);
    KN_CHECK(kn_backward(y, .grad = kn_ones_like(y)));
    EXPECT_LIST(kn_reshape(kn_grad(x), KN_SHAPE(-1)), 6, 1, 0, 1, 1, 0, 1);
    /* x broadcasts to the mask; an order of memory that isn't row-major; nothing chosen */
    kn_tensor *both = kn_stack((kn_tensor *[]){ mask, mask }, 2, 0);
    EXPECT_LIST(kn_masked_select(counted(KN_I64, KN_CPU, 1, (int64_t[]){ 3 }), both), 4, 0, 2, 0,
                2);
    EXPECT_LIST(
        kn_masked_select(kn_transpose(counted(KN_F64, KN_CPU, 2, (int64_t[]){ 3, 2 }), 0, 1), mask),
        4, 0, 4, 1, 5);
    y = kn_masked_select(x, kn_zeros(KN_BOOL, KN_CPU, KN_SCALAR));
    KN_CHECK(y && kn_ndim(y) == 1 && kn_numel(y) == 0);
}

/* fold(unfold(x)): each element as often as windows see it. */
KN_TEST(select, fold_adds_windows_up)
{
    kn_tensor *x = counted(KN_F32, KN_CPU, 4, (int64_t[]){ 1, 2, 4, 5 });
    kn_tensor *once = kn_ones_like(x);
    for (int i = 0; i < 8; i++) {
        const int64_t k[2] = { 1 + i % 2, 2 }, s[2] = { 1 + i / 2 % 2, 1 }, p[2] = { 0, i / 4 };
#define WINDOWS .kernels = { k[0], k[1] }, .strides = { s[0], s[1] }, .pads = { p[0], p[1] }
        kn_tensor *seen = kn_fold2d(kn_unfold2d(once, WINDOWS), 4, 5, WINDOWS);
        kn_tensor *y = kn_fold2d(kn_unfold2d(x, WINDOWS), 4, 5, WINDOWS);
        kn_tensor *off = y && seen ? sum_of(kn_ne(y, kn_mul(x, seen))) : NULL;
        KN_CHECK(off && kn_item(off) == 0, "%d: %s", i, kn_error() ? kn_error() : "differs");
    }
    /* another stride, pad and dilation along each dim */
#define APART .kernels = { 2, 2 }, .strides = { 2, 1 }, .pads = { 0, 1 }, .dilations = { 1, 3 }
    kn_tensor *seen = kn_fold2d(kn_unfold2d(once, APART), 4, 5, APART);
    kn_tensor *y = kn_fold2d(kn_unfold2d(x, APART), 4, 5, APART);
    KN_CHECK(y && seen && kn_item(sum_of(kn_ne(y, kn_mul(x, seen)))) == 0, "%s",
             kn_error() ? kn_error() : "differs");
}

KN_TEST(select, pools_of_sequences)
{
    kn_tensor *x = counted(KN_F32, KN_CPU, 3, (int64_t[]){ 1, 1, 6 });
    const int64_t all = -1;
    EXPECT_LIST(kn_reshape(kn_max_pool1d(x, .kernel = 2), 1, &all), 3, 1, 3, 5);
    EXPECT_LIST(kn_reshape(kn_max_pool1d(x, .kernel = 2, .stride = 1, .dilation = 3), 1, &all), 3,
                3, 4, 5);
    EXPECT_LIST(kn_reshape(kn_avg_pool1d(x, .kernel = 4, .ceil_mode = true), 1, &all), 2, 1.5, 4.5);
    EXPECT_LIST(kn_reshape(kn_avg_pool1d(x, .kernel = 2, .pad = 1, .exclude_pad = true), 1, &all),
                4, 0, 1.5, 3.5, 5);
    EXPECT_LIST(kn_reshape(kn_adaptive_avg_pool1d(x, 4), 1, &all), 4, 0.5, 1.5, 3.5, 4.5);
}

KN_TEST(select, errors)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)), *image = kn_unsqueeze(x, 0);
    kn_tensor *mask = kn_zeros(KN_BOOL, KN_CPU, KN_SHAPE(2, 2));
    REFUSED(kn_nonzero(kn_empty(KN_F32, KN_META, KN_SHAPE(2))), "nonzero: the size of the result");
    REFUSED(kn_masked_select(x, mask), "masked_select: x is f32[2,3] on cpu, the mask bool[2,2]");
    REFUSED(kn_masked_select(x, x), "masked_select: x is f32[2,3] on cpu, the mask f32[2,3]");
    REFUSED(kn_masked_select(x, kn_empty(KN_BOOL, KN_META, KN_SCALAR)), "the mask bool[] on meta");
    REFUSED(kn_max_pool1d(kn_select(x, 0, 0), .kernel = 2),
            "max_pool1d: needs a float x[N,C,L] or x[C,L], got f32[3]");
    REFUSED(kn_max_pool1d(image, .kernel = 4), "max_pool1d: a window reaches over 4 steps of 1");
    REFUSED(kn_max_pool1d(image, .kernel = INT64_MAX, .pad = INT64_MAX / 2), "max_pool1d: kernel");
    REFUSED(kn_avg_pool1d(image, .kernel = 2, .pad = 2), "avg_pool1d: kernel 2, stride 0");
    REFUSED(kn_avg_pool1d(image, .kernel = 2, .dilation = 2), "averages have no dilation");
    REFUSED(kn_adaptive_avg_pool1d(image, 0), "adaptive_avg_pool1d: 0 windows of 3 elements");
    REFUSED(kn_fold2d(image, 3, 3, .kernel = 2),
            "fold2d: y is f32[1,2,3]; it needs [N, a multiple");
    REFUSED(kn_fold2d(image, 3, 3, .kernel = 9), "fold2d: kernel 9, stride 1");
    REFUSED(kn_fold2d(image, INT64_MAX, 3, .kernel = 1), "fold2d: kernel 1");
    REFUSED(kn_fold2d(image, -1, 3, .kernel = 2, .pad = 2), "fold2d: kernel 2");
    /* windows that lie in the pad alone */
    kn_tensor *empty =
        kn_fold2d(kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 4, 4)), 0, 3, .kernel = 2, .pad = 1);
    KN_CHECK(empty && kn_size(empty, 2) == 0 && kn_size(empty, 3) == 3);
}
