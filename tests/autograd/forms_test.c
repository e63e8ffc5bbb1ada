/* tests/autograd/forms_test.c: forms of arguments that torch takes as well: integers, numbers as
 * rows, indices from the end, images without a batch. */
#include "autograd/ops.h"
#include "tests/kn_test.h"
#include <math.h>
#include <string.h>

/* a and b have one dtype, shape and bytes. */
static bool same(kn_tensor *a, kn_tensor *b)
{
    double x[256], y[256];
    a = a ? kn_contiguous(a) : NULL, b = b ? kn_contiguous(b) : NULL;
    if (!a || !b || a->dtype != b->dtype || a->ndim != b->ndim ||
        memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) != 0)
        return false;
    a = kn_cast(a, KN_F64), b = kn_cast(b, KN_F64);
    const size_t bytes = (size_t)kn_numel(a) * sizeof(double);
    return kn_to_host(a, x, bytes) && kn_to_host(b, y, bytes) && memcmp(x, y, bytes) == 0;
}

KN_TEST(forms, integers)
{
    const kn_dtype types[] = { KN_I64, KN_I32, KN_U8 };
    for (int i = 0; i < 3; i++) {
        const kn_dtype t = types[i];
        kn_tensor *x = kn_randint(t, KN_CPU, t == KN_U8 ? 0 : -90, 100, 1, 1, KN_SHAPE(2, 2, 5, 6));
        kn_tensor *wide = kn_cast(x, KN_F64), *y = kn_transpose(x, 2, 3);
#define AS_IN_F64(f, ...)                                                                          \
    KN_CHECK(same(f(x, __VA_ARGS__), kn_cast(f(wide, __VA_ARGS__), t)), "%d", i)
        AS_IN_F64(kn_max_pool2d, .kernel = 3, .stride = 2, .pad = 1);
        AS_IN_F64(kn_max_pool2d, .kernel = 2, .ceil_mode = true, .dilations = { 1, 2 });
        AS_IN_F64(kn_hardtanh, .low = 0, .high = 7);
        KN_CHECK(
            same(kn_max_pool2d(y, .kernel = 2), kn_transpose(kn_max_pool2d(x, .kernel = 2), 2, 3)));
        kn_tensor *rows = kn_reshape(x, KN_SHAPE(4, 30));
        KN_CHECK(same(kn_max_pool1d(rows, .kernel = 3),
                      kn_cast(kn_max_pool1d(kn_cast(rows, KN_F64), .kernel = 3), t)));
        KN_CHECK(same(kn_relu(x), kn_cast(kn_relu(wide), t)));
        KN_CHECK(same(kn_relu6(x), kn_cast(kn_relu6(wide), t)));
        KN_CHECK(same(kn_add_scaled(x, x, 2), kn_scale(x, 3)));
        KN_CHECK(same(kn_logical_and(x, kn_gt_scalar(x, 5)), kn_gt_scalar(x, 5)));
        KN_CHECK(same(kn_logical_not(x), kn_eq_scalar(x, 0)));
    }
    kn_tensor *least = kn_full(KN_I64, KN_CPU, -0x1p63, KN_SHAPE(1, 2, 2));
    KN_CHECK(same(kn_max_pool2d(least, .kernel = 2, .pad = 1), least));
    kn_tensor *nan = kn_full(KN_F32, KN_CPU, NAN, KN_SHAPE(2));
    KN_CHECK(same(kn_logical_not(nan), kn_lt_scalar(nan, 0)) && kn_item(kn_all(nan, 0, NULL, 0)));
}

KN_TEST(forms, numbers_as_rows)
{
    kn_tensor *x = kn_full(KN_F32, KN_CPU, 3, KN_SCALAR), *at = kn_zeros(KN_I64, KN_CPU, KN_SCALAR);
    kn_tensor *index = NULL, *two = kn_full(KN_F32, KN_CPU, 2, KN_SCALAR);
    for (int dim = -1; dim <= 0; dim++) {
        KN_CHECK(same(kn_sort(x, dim, .indices = &index), x) && same(index, at));
        KN_CHECK(same(kn_topk(x, 1, dim), x) && same(kn_argsort(x, dim, false), at));
        KN_CHECK(same(kn_cumsum(x, dim), x) && same(kn_gather(x, dim, at), x));
        KN_CHECK(same(kn_scatter(x, dim, at, two), two));
        KN_CHECK(kn_item(kn_scatter_add(x, dim, at, two)) == 5);
        KN_CHECK(kn_item(kn_index_add(x, dim, at, two)) == 5);
        KN_CHECK(same(kn_index_select(x, dim, at), x));
        KN_CHECK(kn_item(kn_softmax(x, dim)) == 1 && kn_item(kn_log_softmax(x, dim)) == 0);
        KN_CHECK(same(kn_sum(x, 1, (int64_t[]){ dim }, true), x));
    }
    REFUSED(kn_sort(x, 1), "dim 1 is out of range for f32[1]");
    REFUSED(kn_sum(x, KN_SHAPE(1), false), "dim 1 is out of range for f32[] (use -1 to 0)");
}

KN_TEST(forms, indices)
{
    kn_tensor *x = kn_reshape(kn_arange(KN_F32, KN_CPU, 12), KN_SHAPE(3, 4));
    kn_tensor *back = kn_from(KN_I64, KN_CPU, (int64_t[]){ -1, -3 }, KN_SHAPE(2, 1));
    KN_CHECK(same(kn_take_along_dim(x, back, 0),
                  kn_flip(kn_slice_step(x, 0, 0, 3, 2), 1, (int64_t[]){ 0 })));
    KN_CHECK(same(kn_select(x, 1, -1), kn_select(kn_slice(x, 1, 3, 4), 1, 0)));
    KN_CHECK(kn_size(kn_slice_step(x, 1, 0, 4, 3), 1) == 2 && kn_ok());
    kn_tensor *classes = kn_from(KN_I64, KN_CPU, (int64_t[]){ 1, 4 }, KN_SHAPE(2));
    KN_CHECK(same(kn_one_hot(classes, -1), kn_one_hot(classes, 5)));
    kn_tensor *none = kn_dropout(x, 1);
    KN_CHECK(same(none, kn_zeros_like(x)));
    REFUSED(kn_select(x, 1, 4), "select: index 4 is outside of dim 1 of f32[3,4]");
    REFUSED(kn_select(x, 0, -4), "select: index -4 is outside");
    REFUSED(kn_slice_step(x, 0, 0, 3, 0), "slice_step: the step is 0");
    REFUSED(kn_take_along_dim(x, kn_add_scalar(back, -1), 0), "outside [0, 3)");
    REFUSED(kn_one_hot(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(0)), -1), "-1 classes");
}
