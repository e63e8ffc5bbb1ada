/* tests/autograd/gather_test.c: gather, scatter, scatter_add, take_along_dim, index_add and one_hot
 * against loops over their elements, for all dtypes; the gradient where an index repeats; errors.
 * Gradients by finite differences are rows of every.h. */
#include "tests/autograd/expect.h"

static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32, KN_U8, KN_BOOL };
#define TYPES (sizeof types / sizeof *types)

/* x [4, 3, 5] and an index [3, 3, 2] into dim, whose element a, b, c is (5 a + 3 b + 2 c) mod the
 * size of dim. */
static const int64_t X[3] = { 4, 3, 5 }, I[3] = { 3, 3, 2 };

static int64_t picked(int dim, const int64_t *at)
{
    return (5 * at[0] + 3 * at[1] + 2 * at[2]) % X[dim];
}

static kn_tensor *index_for(kn_dtype t, kn_device device, int dim)
{
    int64_t id[18];
    for (int64_t i = 0; i < 18; i++)
        id[i] = picked(dim, (int64_t[]){ i / 6, i / 2 % 3, i % 2 });
    return device == KN_META ? kn_empty(t, device, 3, I)
                             : kn_cast(kn_from(KN_I64, device, id, 3, I), t);
}

static double gathered(const int64_t *at, void *arg)
{
    int64_t from[3] = { at[0], at[1], at[2] };
    const int dim = *(int *)arg;
    from[dim] = picked(dim, at);
    return (double)(from[0] * 15 + from[1] * 5 + from[2]);
}

KN_TEST(gather, picks_by_an_index_each)
{
    for (int dim = 0; dim < 3; dim++) {
        for (size_t i = 0; i < TYPES; i++) {
            if (types[i] == KN_BOOL)
                continue; /* holds no numbers */
            kn_tensor *x = counted(types[i], KN_CPU, 3, X);
            kn_tensor *id = index_for(i % 2 ? KN_I32 : KN_I64, KN_CPU, dim);
            expect(kn_gather(x, dim, id), 3, I, gathered, &dim);
            kn_tensor *turned = kn_transpose(kn_contiguous(kn_transpose(x, 0, 2)), 0, 2);
            expect(kn_gather(turned, dim - 3, id), 3, I, gathered, &dim);
        }
        kn_tensor *m = kn_empty(KN_BF16, KN_META, 3, X);
        expect(kn_gather(m, dim, index_for(KN_I64, KN_META, dim)), 3, I, gathered, &dim);
    }
}

/* y is x[4, 3, 5] of 0, 1, 2, ... after 18 elements 1, 2, 3, ... went in. */
typedef struct put {
    double y[60];
} put;

static double after(const int64_t *at, void *arg)
{
    return ((put *)arg)->y[at[0] * 15 + at[1] * 5 + at[2]];
}

static put put_all(int dim, bool add)
{
    put p;
    for (int64_t i = 0; i < 60; i++)
        p.y[i] = (double)i;
    for (int64_t i = 0; i < 18; i++) {
        int64_t at[3] = { i / 6, i / 2 % 3, i % 2 };
        at[dim] = picked(dim, at);
        double *y = &p.y[at[0] * 15 + at[1] * 5 + at[2]];
        *y = (double)(i + 1) + (add ? *y : 0);
    }
    return p;
}

static double untouched(const int64_t *at, void *arg)
{
    (void)arg;
    return (double)(at[0] * 15 + at[1] * 5 + at[2]);
}

KN_TEST(gather, scatter_leaves_the_last_and_scatter_add_the_sum)
{
    for (int dim = 0; dim < 3; dim++) {
        put set = put_all(dim, false), sum = put_all(dim, true);
        for (size_t i = 0; i < TYPES; i++) {
            if (types[i] == KN_BOOL)
                continue;
            kn_tensor *x = counted(types[i], KN_CPU, 3, X);
            kn_tensor *src = kn_cast(kn_add_scalar(counted(KN_F32, KN_CPU, 3, I), 1), types[i]);
            kn_tensor *wide = kn_cat((kn_tensor *[]){ src, src }, 2, 2); /* its part counts */
            kn_tensor *id = index_for(i % 2 ? KN_I32 : KN_I64, KN_CPU, dim);
            expect(kn_scatter(x, dim, id, src), 3, X, after, &set);
            expect(kn_scatter_add(x, dim, id, wide), 3, X, after, &sum);
            expect(x, 3, X, untouched, NULL);
        }
        kn_tensor *m = kn_empty(KN_F32, KN_META, 3, X), *src = kn_empty(KN_F32, KN_META, 3, I);
        expect(kn_scatter_add(m, dim, index_for(KN_I64, KN_META, dim), src), 3, X, after, &sum);
    }
}

/* 256 + 1 is 256 in bf16, and 256 + 1 + 1 is not: the terms are added before one rounding. */
KN_TEST(gather, narrow_sums_are_rounded_once)
{
    kn_tensor *x = kn_full(KN_BF16, KN_CPU, 256, KN_SHAPE(2)),
              *one = kn_ones(KN_BF16, KN_CPU, KN_SHAPE(2));
    kn_tensor *y = kn_scatter_add(x, 0, kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)), one);
    KN_CHECK(y && kn_item(kn_slice(y, 0, 0, 1)) == 258);
    y = kn_index_add(x, 0, kn_zeros(KN_I32, KN_CPU, KN_SHAPE(2)), one);
    KN_CHECK(y && kn_item(kn_slice(y, 0, 0, 1)) == 258 && kn_item(kn_slice(y, 0, 1, 2)) == 256);
}

/* Only the element that stayed has a gradient; where sums are made, all have. */
KN_TEST(gather, gradients_where_an_index_repeats)
{
    const int64_t id[4] = { 1, 0, 1, 1 };
    const double w[3] = { 10, 20, 30 }, stays[4] = { 0, 10, 0, 20 }, adds[4] = { 20, 10, 20, 20 };
    kn_tensor *index = kn_from(KN_I64, KN_CPU, id, KN_SHAPE(4));
    kn_tensor *dy = kn_from(KN_F64, KN_CPU, w, KN_SHAPE(3));
    for (int add = 0; add < 2; add++) {
        kn_tensor *x = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(3)), true);
        kn_tensor *src = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(4)), true);
        kn_tensor *y = add ? kn_scatter_add(x, 0, index, src) : kn_scatter(x, 0, index, src);
        KN_CHECK(kn_backward(y, .grad = dy));
        KN_CHECK(memcmp(kn_data(kn_grad(src)), add ? adds : stays, sizeof stays) == 0);
        KN_CHECK(memcmp(kn_data(kn_grad(x)), add ? w : (double[]){ 0, 0, 30 }, sizeof w) == 0);
    }
    /* the same along the second of two dims */
    kn_tensor *ones = kn_ones(KN_F64, KN_CPU, KN_SHAPE(2, 3));
    kn_tensor *src2 = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(2, 4)), true);
    kn_tensor *rows =
        kn_from(KN_I64, KN_CPU, (int64_t[]){ 1, 0, 1, 1, 2, 2, 0, 1 }, KN_SHAPE(2, 4));
    kn_tensor *up = kn_from(KN_F64, KN_CPU, (double[]){ 10, 20, 30, 40, 50, 60 }, KN_SHAPE(2, 3));
    KN_CHECK(kn_backward(kn_scatter(ones, 1, rows, src2), .grad = up));
    KN_CHECK(memcmp(kn_data(kn_grad(src2)), (double[]){ 0, 10, 0, 20, 0, 60, 40, 50 }, 64) == 0);
    const double sums[2] = { 2, 4 + 8 + 16 };
    kn_tensor *x = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(2)), true);
    kn_tensor *y = kn_gather(x, 0, index);
    KN_CHECK(
        kn_backward(y, .grad = kn_from(KN_F64, KN_CPU, (double[]){ 4, 2, 8, 16 }, KN_SHAPE(4))));
    KN_CHECK(memcmp(kn_data(kn_grad(x)), sums, sizeof sums) == 0);
}

KN_TEST(gather, take_along_dim_broadcasts)
{
    const int64_t shape[2] = { 3, 4 };
    kn_tensor *x = counted(KN_F32, KN_CPU, 2, shape);
    kn_tensor *best = kn_argmax(x, 1), *id = kn_reshape(best, KN_SHAPE(3, 1));
    kn_tensor *y = kn_take_along_dim(x, id, 1);
    KN_CHECK(y && memcmp(kn_data(y), (float[]){ 3, 7, 11 }, 12) == 0);
    y = kn_take_along_dim(x, kn_from(KN_I64, KN_CPU, (int64_t[]){ 2, 0 }, KN_SHAPE(1, 2)), -1);
    KN_CHECK(y && memcmp(kn_data(y), (float[]){ 2, 0, 6, 4, 10, 8 }, 24) == 0);
    kn_tensor *row = kn_slice(x, 0, 1, 2);
    y = kn_take_along_dim(row, kn_from(KN_I32, KN_CPU, (int32_t[]){ 0, 3 }, KN_SHAPE(2, 1)), 1);
    KN_CHECK(y && memcmp(kn_data(y), (float[]){ 4, 7 }, 8) == 0);
}

static double hot(const int64_t *at, void *arg)
{
    return ((const int64_t *)arg)[at[0] * 2 + at[1]] == at[2];
}

KN_TEST(gather, one_hot)
{
    int64_t id[6] = { 0, 3, 1, 1, 2, 0 };
    const int64_t shape[3] = { 3, 2, 4 };
    kn_tensor *x = kn_from(KN_I64, KN_CPU, id, KN_SHAPE(3, 2)), *y = kn_one_hot(x, 4);
    expect(y, 3, shape, hot, id);
    KN_CHECK(y->dtype == KN_I64);
    expect(kn_one_hot(kn_cast(x, KN_I32), 4), 3, shape, hot, id);
    expect(kn_one_hot(kn_empty(KN_I64, KN_META, KN_SHAPE(3, 2)), 4), 3, shape, hot, id);
    y = kn_one_hot(kn_from(KN_I64, KN_CPU, (int64_t[]){ 1 }, KN_SCALAR), 2);
    KN_CHECK(y && y->ndim == 1 && memcmp(kn_data(y), (int64_t[]){ 0, 1 }, 16) == 0);
    const int64_t none[2] = { 0, 5 };
    expect(kn_one_hot(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(0)), 5), 2, none, hot, id);
}

/* x[:, id[i], :] += src[:, i, :] */
static double index_added(const int64_t *at, void *arg)
{
    const int64_t *id = arg;
    double y = (double)(at[0] * 15 + at[1] * 5 + at[2]);
    for (int64_t i = 0; i < 4; i++)
        y += id[i] == at[1] ? (double)(at[0] * 20 + i * 5 + at[2]) : 0;
    return y;
}

KN_TEST(gather, index_add)
{
    int64_t id[4] = { 2, 0, 2, 2 };
    const int64_t S[3] = { 4, 4, 5 };
    for (size_t i = 0; i < TYPES; i++) {
        if (types[i] == KN_BOOL || types[i] == KN_U8 || types[i] == KN_BF16)
            continue; /* too small for the sums */
        kn_tensor *x = counted(types[i], KN_CPU, 3, X), *src = counted(types[i], KN_CPU, 3, S);
        kn_tensor *index = kn_from(KN_I64, KN_CPU, id, KN_SHAPE(4));
        expect(kn_index_add(x, 1, index, src), 3, X, index_added, id);
        expect(kn_index_add(x, -2, kn_cast(index, KN_I32), src), 3, X, index_added, id);
        expect(x, 3, X, untouched, NULL);
    }
}

KN_TEST(gather, nothing_to_move)
{
    kn_tensor *x = counted(KN_F32, KN_CPU, KN_SHAPE(3, 2)),
              *none = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(0, 2));
    kn_tensor *y = kn_gather(x, 0, none);
    KN_CHECK(y && kn_size(y, 0) == 0 && kn_size(y, 1) == 2);
    y = kn_scatter_add(x, 0, none, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 2)));
    KN_CHECK(y && memcmp(kn_data(y), kn_data(x), 24) == 0);
    y = kn_gather(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 2)), 0, none);
    KN_CHECK(y && kn_numel(y) == 0);
}

KN_TEST(gather, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *id = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 3));
    kn_tensor *bad = kn_full(KN_I64, KN_CPU, 3, KN_SHAPE(2, 3)),
              *tall = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3, 3));
    kn_tensor *flat = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2)),
              *far = kn_zeros(KN_I64, KN_META, KN_SHAPE(2, 3));
    kn_tensor *wide = kn_ones(KN_F64, KN_CPU, KN_SHAPE(2, 3));
    REFUSED(kn_gather(x, 2, id), "gather: dim 2 is out of range for f32[2,3]");
    REFUSED(kn_gather(x, 0, x), "gather: indices must be i64 or i32, got f32");
    REFUSED(kn_gather(x, 1, tall),
            "gather: the index is i64[3,3], x f32[2,3]; it needs as many dims");
    REFUSED(kn_gather(x, 1, flat), "gather: the index is i64[2]");
    REFUSED(kn_gather(x, 1, bad), "gather: index 3 at position 0 is outside [0, 3) of dim 1");
    REFUSED(kn_gather(x, 1, kn_neg(bad)), "gather: index -3 at position 0");
    REFUSED(kn_gather(x, 1, far), "gather: argument 2 is on meta");
    REFUSED(kn_gather(x, 1, NULL), "gather: argument 2 is NULL");
    REFUSED(kn_scatter(x, 0, id, kn_slice(x, 1, 0, 2)),
            "scatter: src is f32[2,2], the index i64[2,3]");
    REFUSED(kn_scatter(x, 0, id, wide), "scatter: dtypes differ: x is f32[2,3], src f64[2,3]");
    REFUSED(kn_scatter_add(x, 1, bad, x), "scatter_add: index 3 at position 0");
    REFUSED(kn_scatter(x, 1, bad, x), "scatter: index 3 at position 0");
    REFUSED(kn_scatter_add(x, 1, tall, kn_ones(KN_F32, KN_CPU, KN_SHAPE(3, 3))),
            "scatter_add: the index is");
    REFUSED(kn_take_along_dim(x, flat, 0), "take_along_dim: x is f32[2,3], the index i64[2]");
    REFUSED(kn_take_along_dim(x, tall, 1), "take_along_dim: x is f32[2,3], the index i64[3,3]");
    REFUSED(kn_take_along_dim(x, x, 1), "take_along_dim: indices must be i64 or i32");
    REFUSED(kn_one_hot(id, 0), "one_hot: 0 classes for i64[2,3]");
    REFUSED(kn_one_hot(x, 2), "one_hot: indices must be i64 or i32, got f32");
    REFUSED(kn_one_hot(bad, 3), "one_hot: index 3 at position 0 is outside [0, 3)");
    REFUSED(kn_index_add(x, 0, id, x), "index_add: x is f32[2,3], the index i64[2,3]");
    REFUSED(kn_index_add(x, 0, flat, wide), "index_add: x is f32[2,3]");
    REFUSED(kn_index_add(x, 0, kn_full(KN_I64, KN_CPU, 2, KN_SHAPE(2)), x),
            "index_add: index 2 at position 0");
}
