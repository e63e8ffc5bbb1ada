/* tests/autograd/segments_test.c: scatter_reduce, index_reduce, segments: values and gradients
 * where several elements, equal ones, zeros or none go to a place; dtypes; threads; errors.
 * Gradients by finite differences are rows of every.h. */
#include "tests/autograd/lists.h"

/* Places 0, 2, 2, 0, 3 of 4: two, none, two, one. */
KN_TEST(segments, values_by_each_reduction)
{
    kn_tensor *x = REAL(10, 20, 30, 40), *index = WHOLES(0, 2, 2, 0, 3),
              *src = REAL(1, 50, -3, 4, 7);
    for (int slices = 0; slices < 2; slices++) {
#define BY(by, ...)                                                                                \
    (slices ? kn_index_reduce(x, 0, index, src, by, __VA_ARGS__)                                   \
            : kn_scatter_reduce(x, 0, index, src, by, __VA_ARGS__))
        IS(BY(KN_BY_SUM, .exclude_self = false), 15, 20, 77, 47);
        IS(BY(KN_BY_SUM, .exclude_self = true), 5, 20, 47, 7);
        IS(BY(KN_BY_MEAN, .exclude_self = false), 5, 20, 77.0 / 3, 23.5);
        IS(BY(KN_BY_MEAN, .exclude_self = true), 2.5, 20, 23.5, 7);
        IS(BY(KN_BY_PROD, .exclude_self = false), 40, 20, -4500, 280);
        IS(BY(KN_BY_PROD, .exclude_self = true), 4, 20, -150, 7);
        IS(BY(KN_BY_AMAX, .exclude_self = false), 10, 20, 50, 40);
        IS(BY(KN_BY_AMAX, .exclude_self = true), 4, 20, 50, 7);
        IS(BY(KN_BY_AMIN, .exclude_self = false), 1, 20, -3, 7);
        IS(BY(KN_BY_AMIN, .exclude_self = true), 1, 20, -3, 7);
    }
    IS(kn_segment_reduce(src, index, 5, KN_BY_SUM), 5, 0, 47, 7, 0);
    IS(kn_segment_reduce(src, index, 5, KN_BY_PROD), 4, 1, -150, 7, 1);
    IS(kn_segment_reduce(src, index, 5, KN_BY_AMIN), 1, 0, -3, 7, 0);
    IS(kn_segment_reduce(src, index, 5, KN_BY_MEAN), 2.5, 0, 23.5, 7, 0);
    kn_tensor *odd = REAL(1, NAN, -3, -INFINITY, INFINITY);
    IS(kn_segment_reduce(odd, index, 4, KN_BY_AMAX), 1, 0, NAN, INFINITY);
    IS(kn_segment_reduce(odd, index, 4, KN_BY_AMIN), -INFINITY, 0, NAN, INFINITY);
    REFUSED(kn_segment_reduce(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3)),
                              kn_reshape(WHOLES(0), 1, (int64_t[]){ 1 }), 2, 0),
            "segment_reduce: x is f32[0,3], the index i64[1]");
}

/* The mean of integers is rounded down; bf16 is rounded once. */
KN_TEST(segments, dtypes)
{
    kn_tensor *index = WHOLES(0, 1, 1, 0);
    kn_tensor *whole = WHOLES(3, -3, -4, 4);
    IS(kn_segment_reduce(whole, index, 2, KN_BY_MEAN), 3, -4);
    IS(kn_segment_reduce(kn_cast(whole, KN_I32), index, 3, KN_BY_AMAX), 4, -3, 0);
    IS(kn_segment_reduce(kn_cast(whole, KN_I32), index, 2, KN_BY_PROD), 12, 12);
    kn_tensor *narrow = kn_cast(REAL(256, 1, 1, 256), KN_BF16), *same = WHOLES(0, 0, 0, 0);
    KN_CHECK(kn_dtype_of(kn_segment_reduce(narrow, same, 1, KN_BY_MEAN)) == KN_BF16);
    IS(kn_segment_reduce(narrow, same, 1, KN_BY_MEAN), 128); /* 128.5 to even */
    IS(kn_segment_softmax(kn_cast(REAL(1, 1, 1, 2), KN_F16), WHOLES(0, 0, 1, 2), 3), 0.5, 0.5, 1,
       1);
    IS(kn_segment_softmax(REAL(1000, -INFINITY, -1000, 3), WHOLES(0, 0, 1, 2), 3), 1, 0, 1, 1);
}

/* Gradients that finite differences don't see: ties, zeros, what doesn't count. */
KN_TEST(segments, gradients_of_ties_and_zeros)
{
    static const struct {
        kn_reduce_by by;
        bool exclude;
        double dx[3], ds[4];
    } rows[] = {
        { KN_BY_AMAX, false, { 8.0 / 3, 16, 0 }, { 8.0 / 3, 8.0 / 3, 32, 0 } },
        { KN_BY_AMAX, true, { 0, 16, 0 }, { 4, 4, 32, 0 } },
        { KN_BY_AMIN, true, { 0, 16, 0 }, { 4, 4, 0, 32 } },
        { KN_BY_PROD, false, { 32, 16, 0 }, { 32, 32, 0, 192 } },
        { KN_BY_PROD, true, { 0, 16, 0 }, { 16, 16, 0, 96 } },
        { KN_BY_MEAN, false, { 8.0 / 3, 16, 32.0 / 3 }, { 8.0 / 3, 8.0 / 3, 32.0 / 3, 32.0 / 3 } },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int slices = 0; slices < 2; slices++) {
            kn_tensor *x = kn_require_grad(REAL(2, 5, 2), true);
            kn_tensor *src = kn_require_grad(REAL(2, 2, 3, 0), true), *index = WHOLES(0, 0, 2, 2);
            const bool exclude = rows[i].exclude;
            kn_tensor *y =
                slices ? kn_index_reduce(x, 0, index, src, rows[i].by, .exclude_self = exclude)
                       : kn_scatter_reduce(x, 0, index, src, rows[i].by, .exclude_self = exclude);
            KN_CHECK(kn_backward(y, .grad = REAL(8, 16, 32)));
            is((int)i, kn_grad(x), 0, 3, rows[i].dx);
            is((int)i, kn_grad(src), 0, 4, rows[i].ds);
        }
    }
}

/* 5000 rows of 70 columns into 90 places, of the vector provider and the reference, on one thread
 * and more. */
KN_TEST(segments, bits_do_not_depend_on_threads)
{
    const int64_t rows = 5000, columns = 70;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(rows, columns));
    kn_tensor *index = kn_randint(KN_I64, KN_CPU, 0, 90, 1, 3, 1, &rows);
    float *first = calloc(90 * 70, sizeof *first), *second = calloc(90 * 70, sizeof *second);
    const int threads = kn_threads();
    for (kn_reduce_by by = KN_BY_SUM; by <= KN_BY_AMIN; by++) {
        for (int t = 1; t <= 3; t++) {
            kn_set_threads(t);
            kn_tensor *y = kn_segment_reduce(x, index, 90, by);
            KN_CHECK(y && kn_to_host(y, t == 1 ? first : second, 90 * 70 * sizeof *first));
            KN_CHECK(t == 1 || memcmp(first, second, 90 * 70 * sizeof *first) == 0, "by %d",
                     (int)by);
        }
    }
    kn_set_threads(threads);
    free(first), free(second);
}

KN_TEST(segments, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *id = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 3));
    kn_tensor *flat = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)),
              *wide = kn_ones(KN_F64, KN_CPU, KN_SHAPE(2, 3));
    kn_tensor *bad = kn_full(KN_I64, KN_CPU, 9, KN_SHAPE(2));
    REFUSED(kn_scatter_reduce(x, 2, id, x, KN_BY_SUM),
            "scatter_reduce: dim 2 is out of range for f32[2,3]");
    REFUSED(kn_scatter_reduce(x, 0, flat, x, KN_BY_SUM),
            "scatter_reduce: x is f32[2,3], the index i64[2]");
    REFUSED(kn_scatter_reduce(x, 0, id, wide, KN_BY_SUM), "x and src have one dtype");
    REFUSED(kn_scatter_reduce(x, 0, x, x, KN_BY_SUM), "scatter_reduce: indices must be i64 or i32");
    REFUSED(kn_scatter_reduce(x, 0, id, x, (kn_reduce_by)7),
            "scatter_reduce: 7 is none of KN_BY_SUM");
    REFUSED(kn_index_reduce(x, 0, id, x, KN_BY_AMAX),
            "index_reduce: x is f32[2,3], the index i64[2,3]");
    REFUSED(kn_index_reduce(x, 0, bad, x, KN_BY_AMAX), "index_reduce: index 9 at position 0");
    REFUSED(kn_index_reduce(x, 0, kn_zeros(KN_I64, KN_META, KN_SHAPE(2)), x, KN_BY_AMAX),
            "index_reduce: its tensors are on cpu and on meta");
    REFUSED(kn_segment_reduce(x, id, 3, KN_BY_SUM),
            "segment_reduce: x is f32[2,3], the index i64[2,3], for 3 segments");
    REFUSED(kn_segment_reduce(x, flat, -1, KN_BY_SUM), "for -1 segments");
    REFUSED(kn_segment_softmax(kn_cast(x, KN_I64), flat, 3),
            "segment_softmax: needs a float x, got i64[2,3]");
    REFUSED(kn_segment_softmax(x, bad, 3), "index 9 at position 0");
    REFUSED(kn_segment_softmax(NULL, flat, 3), "segment_softmax: a tensor is NULL");
}
