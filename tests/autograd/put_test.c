/* tests/autograd/put_test.c: index_put, index_copy, masked_scatter, searchsorted, isin, bincount,
 * unique, histc: values where places repeat or elements are equal, sizes of 0, errors. Gradients by
 * finite differences are rows of every.h. */
#include "tests/autograd/lists.h"

KN_TEST(put, where_places_repeat)
{
    kn_tensor *x = kn_reshape(kn_arange(KN_I32, KN_CPU, 6), KN_SHAPE(2, 3));
    kn_tensor *at[] = { WHOLES(1, 0, -1), WHOLES(2, -3, 2) }, *v = kn_cast(REAL(7, 8, 9), KN_I32);
    IS(kn_index_put(x, 2, at, v, false), 8, 1, 2, 3, 4, 9);
    IS(kn_index_put(x, 2, at, v, true), 8, 1, 2, 3, 4, 21);
    IS(kn_index_put(x, 1, at, v, true), 7, 9, 11, 17, 20, 23);
    IS(kn_index_copy(x, 1, WHOLES(2, 0),
                     kn_cast(kn_reshape(REAL(7, 8, 9, 6), KN_SHAPE(2, 2)), KN_I32)),
       8, 1, 7, 6, 4, 9);
    kn_tensor *mask = kn_gt(x, kn_full(KN_I32, KN_CPU, 2, KN_SCALAR));
    IS(kn_masked_scatter(x, mask, kn_cast(REAL(7, 8, 9, 6), KN_I32)), 0, 1, 2, 7, 8, 9);
    IS(kn_masked_scatter(x, kn_slice(mask, 0, 1, 2),
                         kn_cast(kn_neg(REAL(1, 2, 3, 4, 5, 6)), KN_I32)),
       -1, -2, -3, -4, -5, -6);
    kn_tensor *none = kn_zeros(KN_BOOL, KN_CPU, KN_SHAPE(1, 1));
    IS(kn_masked_scatter(x, none, kn_zeros(KN_I32, KN_CPU, KN_SHAPE(0))), 0, 1, 2, 3, 4, 5);
}

static void has_shape(int line, const kn_tensor *t, int n, const int64_t *shape)
{
    KN_CHECK(t && kn_has_shape(t, n, shape), "line %d: %s", line,
             kn_error() ? kn_error() : "the shape");
}
#define HAS_SHAPE(t, ...) has_shape(__LINE__, t, KN_SHAPE(__VA_ARGS__))

KN_TEST(put, indices_of_several_dims)
{
    kn_tensor *x = kn_reshape(kn_arange(KN_I32, KN_CPU, 24), KN_SHAPE(2, 3, 4)); /* 12, 4, 1 */
    kn_tensor *i = WHOLES(1, 0), *j = WHOLES(-1, 1), *none = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(0));
    kn_tensor *row[] = { i, j }, *last[] = { NULL, i, j }, *apart[] = { i, NULL, j };
    kn_tensor *table[] = { NULL, kn_reshape(i, KN_SHAPE(2, 1)), j },
              *empty[] = { none, NULL, none };
    IS(kn_index(x, 2, row), 20, 21, 22, 23, 4, 5, 6, 7);
    IS(kn_index(x, 3, last), 7, 1, 19, 13);
    HAS_SHAPE(kn_index(x, 3, last), 2, 2);
    IS(kn_index(x, 3, apart), 15, 19, 23, 1, 5, 9);
    HAS_SHAPE(kn_index(x, 3, apart), 2, 3);
    IS(kn_index(x, 3, table), 7, 5, 3, 1, 19, 17, 15, 13);
    HAS_SHAPE(kn_index(x, 3, table), 2, 2, 2);
    HAS_SHAPE(kn_index(x, 3, empty), 0, 3);
    HAS_SHAPE(kn_index(kn_permute(x, 3, (int64_t[]){ 2, 0, 1 }), 2, last), 4, 2, 3);
    kn_tensor *zeros = kn_zeros(KN_I32, KN_CPU, KN_SHAPE(2, 2, 2)),
              *one = kn_full(KN_I32, KN_CPU, 1, KN_SCALAR);
    IS(kn_index_put(zeros, 3, ((kn_tensor *[]){ i, NULL, WHOLES(1, 1) }), one, false), 0, 1, 0, 1,
       0, 1, 0, 1);
    IS(kn_index_put(zeros, 2, ((kn_tensor *[]){ NULL, WHOLES(1, 1) }),
                    kn_cast(kn_reshape(REAL(1, 2, 3, 4, 5, 6, 7, 8), KN_SHAPE(2, 2, 2)), KN_I32),
                    true),
       0, 0, 4, 6, 0, 0, 12, 14);
}

KN_TEST(put, masks_of_some_dims)
{
    kn_tensor *x = kn_reshape(kn_arange(KN_F32, KN_CPU, 12), KN_SHAPE(2, 3, 2));
    kn_tensor *two = kn_gt(kn_slice(x, 2, 0, 1), kn_full(KN_F32, KN_CPU, 3, KN_SCALAR));
    kn_tensor *in_front[] = { kn_squeeze(two, 1, (int64_t[]){ 2 }) };
    IS(kn_index(x, 1, in_front), 4, 5, 6, 7, 8, 9, 10, 11);
    HAS_SHAPE(kn_index(x, 1, in_front), 4, 2);
    kn_tensor *rows = kn_gt(REAL(1, 0, 1), REAL(0, 0, 0)),
              *beside[] = { WHOLES(1), rows, WHOLES(0) };
    IS(kn_index(x, 2, ((kn_tensor *[]){ NULL, rows })), 0, 1, 4, 5, 6, 7, 10, 11);
    IS(kn_index(x, 3, beside), 6, 10);
    IS(kn_index_put(x, 2, ((kn_tensor *[]){ NULL, rows }), kn_full(KN_F32, KN_CPU, -1, KN_SCALAR),
                    false),
       -1, -1, 2, 3, -1, -1, -1, -1, 8, 9, -1, -1);
    HAS_SHAPE(kn_index(x, 2, ((kn_tensor *[]){ NULL, kn_logical_and(rows, kn_logical_not(rows)) })),
              2, 0, 2);
}

KN_TEST(put, extrema_over_several_dims)
{
    kn_tensor *x =
        kn_require_grad(kn_reshape(REAL(1, 5, 5, 2, 5, 0, 7, 7), KN_SHAPE(2, 2, 2)), true);
    IS(kn_amax(x, KN_SHAPE(0, 2), false), 5, 7);
    IS(kn_amin(x, KN_SHAPE(0, -1), true), 0, 2);
    HAS_SHAPE(kn_amin(x, KN_SHAPE(0, -1), true), 1, 2, 1);
    IS(kn_amax(x, 0, NULL, false), 7);
    KN_CHECK(kn_backward(kn_sum(kn_amax(x, KN_SHAPE(0, 2), false), 0, NULL, false)));
    IS(kn_grad(x), 0, 0.5, 0, 0, 0.5, 0, 0.5, 0.5);
    REFUSED(kn_amin(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), 0, NULL, false), "no extremum");
}

KN_TEST(put, among_sorted_values)
{
    kn_tensor *a = REAL(1, 3, 3, 5), *x = REAL(0, 3, 5, 9, 1), *inverse, *counts;
    IS(kn_searchsorted(a, x, false), 0, 1, 3, 4, 0);
    IS(kn_bucketize(x, a, true), 0, 3, 4, 4, 1);
    IS(kn_isin(x, a), 0, 1, 1, 0, 1);
    IS(kn_isin(x, kn_zeros(KN_F64, KN_CPU, KN_SHAPE(0))), 0, 0, 0, 0, 0);
    IS(kn_bincount(WHOLES(1, 4, 1), NULL, 0), 0, 2, 0, 0, 1);
    IS(kn_bincount(WHOLES(1, 0, 1), REAL(0.5, 2, 4), 4), 2, 4.5, 0, 0);
    IS(kn_unique(REAL(5, -1, 5, 0, -0.0), &inverse, &counts), -1, 0, 5);
    IS(inverse, 2, 0, 2, 1, 1);
    IS(counts, 1, 2, 2);
    IS(kn_unique(kn_ones(KN_BOOL, KN_CPU, KN_SHAPE(2, 2)), NULL, &counts), 1);
    IS(counts, 4);
    kn_tensor *none = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3));
    KN_CHECK(kn_numel(kn_unique(none, &inverse, &counts)) == 0 && kn_numel(counts) == 0);
    KN_CHECK(kn_numel(kn_bincount(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(0)), NULL, 0)) == 0);
    IS(kn_histc(REAL(0, 1, 1, 2, 5, NAN, -1), 3, 0, 3), 1, 2, 1);
    IS(kn_histc(REAL(2, 4, 3, 2), 2, 0, 0), 2, 2);
}

KN_TEST(put, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *id = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2));
    kn_tensor *at[] = { id, kn_full(KN_I64, KN_CPU, 3, KN_SHAPE(2)), id }, *odd[] = { x };
    kn_tensor *one = kn_ones(KN_F32, KN_CPU, KN_SCALAR);
    REFUSED(
        kn_index_put(x, 3, at, one, true),
        "index_put: index 2 is i64[2], for dim 2 of x f32[2,3]; needs at most an index for each "
        "dim");
    REFUSED(kn_index_put(x, 1, at, id, true), "index_put: values i64[2] for x f32[2,3]");
    REFUSED(kn_index(x, 0, at), "index: 0 indices, none of a dim of x f32[2,3]");
    REFUSED(kn_index(x, 2, ((kn_tensor *[]){ NULL, NULL })), "index: 2 indices, none of a dim");
    REFUSED(kn_index(x, 2, ((kn_tensor *[]){ NULL, kn_gt(at[1], id) })),
            "index: index 1 is bool[2], for dim 1 of x f32[2,3]");
    REFUSED(kn_index(x, 1, &at[1]), "index 2 at position 0 is outside [0, 2)");
    REFUSED(kn_index(x, 1, odd), "index: indices must be i64 or i32");
    REFUSED(kn_index_put(x, 2, at, one, true), "index 6 at position 0 is outside [0, 6)");
    REFUSED(kn_index_put(x, 1, NULL, one, true), "index_put: the indices are NULL");
    REFUSED(kn_index_put(x, 1, odd, one, true), "index_put: indices must be i64 or i32");
    REFUSED(kn_index_copy(x, 0, id, id), "index_copy: x is f32[2,3], the index i64[2], src i64[2]");
    REFUSED(kn_masked_scatter(x, x, x), "masked_scatter: x is f32[2,3], the mask f32[2,3]");
    REFUSED(kn_masked_scatter(x, kn_gt(x, kn_neg(x)), kn_slice(x, 0, 0, 1)), "is outside [0, 3)");
    REFUSED(kn_masked_scatter(x, kn_gt(x, kn_neg(x)), kn_slice(x, 0, 0, 0)), "is outside [0, 1)");
    REFUSED(kn_searchsorted(x, one, false), "searchsorted: sorted is f32[2,3], x f32[]");
    REFUSED(kn_bucketize(x, x, false), "bucketize: boundaries are f32[2,3], should be 1-d");
    REFUSED(kn_bincount(x, NULL, 0), "bincount: indices must be i64 or i32");
    REFUSED(kn_bincount(kn_neg(at[1]), NULL, 5), "index -3 at position 0");
    REFUSED(kn_histc(x, 0, 0, 1), "histc: 0 bins from 0 to 1 of f32[2,3]");
    REFUSED(kn_histc(kn_full(KN_F32, KN_CPU, INFINITY, KN_SHAPE(1)), 2, 0, 0),
            "histc: the values of f32[1] aren't finite");
}
