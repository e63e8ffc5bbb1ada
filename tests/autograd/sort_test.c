/* tests/autograd/sort_test.c: sort, argsort, topk and cumsum against insertion and addition written
 * here, for all dtypes, with ties, NaN and zeros of both signs; errors. Gradients by finite
 * differences are rows of every.h. */
#include "tests/autograd/every.h"
#include "tests/owned.h"

static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32, KN_U8, KN_BOOL };
#define TYPES (sizeof types / sizeof *types)

/* a comes before b, NaN above all. */
static bool less(double a, double b)
{
    return isnan(b) ? !isnan(a) : a < b;
}

/* The positions of x[0], x[step], ... in order, by insertion: equal ones stay in theirs. */
static void order_of(const double *x, int64_t step, int64_t n, bool descending, int64_t *at)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t j = i;
        for (; j > 0; j--) {
            const double before = x[at[j - 1] * step], own = x[i * step];
            if (!(descending ? less(before, own) : less(own, before)))
                break;
            at[j] = at[j - 1];
        }
        at[j] = i;
    }
}

static bool same(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

/* y and p: the first k along dim of x[a, n, b], which stands in values. */
static void check_order(kn_tensor *y, kn_tensor *p, const double *values, const int64_t *shape,
                        int64_t k, bool descending, kn_dtype t)
{
    KN_CHECK(y && p && y->dtype == t && p->dtype == KN_I64 && kn_size(y, 1) == k, "%s",
             kn_error() ? kn_error() : "shape");
    double got[240], at[240];
    int64_t want[40];
    to_doubles(kn_contiguous(y), got);
    to_doubles(kn_contiguous(p), at);
    for (int64_t line = 0; line < shape[0] * shape[2]; line++) {
        const int64_t a = line / shape[2], b = line % shape[2];
        const double *x = values + a * shape[1] * shape[2] + b;
        order_of(x, shape[2], shape[1], descending, want);
        for (int64_t j = 0; j < k; j++) {
            const int64_t i = (a * k + j) * shape[2] + b;
            KN_CHECK(at[i] == (double)want[j] && same(got[i], x[want[j] * shape[2]]),
                     "%s line %lld place %lld: %g from %g, not %lld", kn_dtype_name(t),
                     (long long)line, (long long)j, got[i], at[i], (long long)want[j]);
        }
    }
}

KN_TEST(sort, every_dtype_stable_both_ways)
{
    const int64_t shapes[3][3] = { { 2, 7, 3 }, { 1, 33, 1 }, { 3, 1, 2 } };
    for (size_t i = 0; i < TYPES * 3; i++) {
        const kn_dtype t = types[i % TYPES];
        const int64_t *shape = shapes[i / TYPES], n = shape[0] * shape[1] * shape[2];
        double x[240];
        uint64_t state = 7 + i;
        for (int64_t j = 0; j < n; j++) /* few values, so many are equal */
            x[j] = floor(next_random(&state) * 9) - (kn_dtype_is_float(t) ? 4.5 : 0);
        for (int64_t j = 0; j < n && kn_dtype_is_float(t); j += 4)
            x[j] = (double[]){ 0, -0.0, NAN, INFINITY, -INFINITY }[j / 4 % 5];
        kn_tensor *plain = tensor_of(t, x, 3, shape);
        to_doubles(plain, x);
        kn_tensor *turned = kn_transpose(kn_contiguous(kn_transpose(plain, 1, 2)), 1, 2), *p;
        for (int down = 0; down < 2; down++) {
            kn_tensor *y = kn_sort(down ? turned : plain, -2, .descending = down, .indices = &p);
            check_order(y, p, x, shape, shape[1], down, t);
            check_order(y, kn_argsort(plain, 1, down), x, shape, shape[1], down, t);
            for (int64_t k = 0; k <= shape[1]; k += 1 + shape[1] / 4) {
                y = kn_topk(plain, k, 1, .smallest = !down, .indices = &p);
                check_order(y, p, x, shape, k, down, t);
            }
        }
    }
}

KN_TEST(sort, large_integers)
{
    int64_t x[4] = { INT64_MAX, INT64_MIN, INT64_MAX - 1, 0 }, want[4] = { 1, 3, 2, 0 };
    kn_tensor *p = kn_argsort(kn_from(KN_I64, KN_CPU, x, KN_SHAPE(4)), 0, false);
    KN_CHECK(p && memcmp(kn_data(p), want, sizeof want) == 0);
    kn_tensor *y = kn_topk(kn_from(KN_I64, KN_CPU, x, KN_SHAPE(4)), 2, 0);
    KN_CHECK(y && memcmp(kn_data(y), (int64_t[]){ INT64_MAX, INT64_MAX - 1 }, 16) == 0);
}

KN_TEST(sort, without_elements_and_on_meta)
{
    kn_tensor *p, *y = kn_sort(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), 1, .indices = &p);
    KN_CHECK(y && p && kn_numel(y) == 0 && kn_size(p, 0) == 2);
    y = kn_topk(kn_empty(KN_BF16, KN_META, KN_SHAPE(2, 5)), 3, -1, .indices = &p);
    KN_CHECK(y && kn_size(y, 1) == 3 && p->dtype == KN_I64 && kn_size(p, 1) == 3);
    y = kn_cumsum(kn_empty(KN_I32, KN_META, KN_SHAPE(2, 5)), 1);
    KN_CHECK(y && y->dtype == KN_I64);
}

/* The gradient of what was sorted goes back to its place; indices have none. */
KN_TEST(sort, second_use_and_indices)
{
    kn_tensor *p,
        *x = kn_require_grad(kn_from(KN_F64, KN_CPU, (double[]){ 3, 1, 2 }, KN_SHAPE(3)), true);
    kn_tensor *y = kn_topk(x, 2, 0, .indices = &p);
    KN_CHECK(y && !kn_requires_grad(p) && kn_requires_grad(y));
    KN_CHECK(kn_backward(y, .grad = kn_from(KN_F64, KN_CPU, (double[]){ 5, 7 }, KN_SHAPE(2))));
    KN_CHECK(memcmp(kn_data(kn_grad(x)), (double[]){ 5, 0, 7 }, 24) == 0);
    KN_CHECK(!kn_requires_grad(kn_argsort(x, 0, false)));
    WITHOUT_GRAD;
    KN_CHECK(!kn_requires_grad(kn_sort(x, 0)));
}

/* ---- cumsum ---------------------------------------------------------------------------------- */

KN_TEST(sort, cumsum_of_every_dtype)
{
    const int64_t shape[3] = { 2, 5, 3 };
    double x[30], got[30];
    for (int64_t i = 0; i < 30; i++)
        x[i] = (double)(i * 7 % 5);
    for (size_t i = 0; i < TYPES; i++) {
        double v[30];
        kn_tensor *t = tensor_of(types[i], x, 3, shape);
        to_doubles(t, v);
        for (int dim = 0; dim < 3; dim++) {
            const int64_t step = (int64_t[]){ 15, 3, 1 }[dim];
            kn_tensor *y = kn_cumsum(
                dim % 2 ? t : kn_transpose(kn_contiguous(kn_transpose(t, 0, 1)), 0, 1), dim - 3);
            KN_CHECK(y && y->dtype == (kn_dtype_is_float(types[i]) ? types[i] : KN_I64), "%s",
                     kn_error() ? kn_error() : "dtype");
            to_doubles(kn_contiguous(y), got);
            for (int64_t j = 0; j < 30; j++) {
                double want = v[j];
                for (int64_t k = j / step % shape[dim]; k > 0; k--)
                    want += v[j - k * step];
                KN_CHECK(got[j] == want, "dim %d: %g, not %g", dim, got[j], want);
            }
        }
    }
    /* each sum is rounded by itself */
    kn_tensor *many = kn_cumsum(kn_ones(KN_BF16, KN_CPU, KN_SHAPE(1000)), 0);
    KN_CHECK(kn_item(kn_slice(many, 0, 999, 1000)) == 1000);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(sort, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)), *p = x;
    kn_tensor *odd = kn_empty(KN_U16, KN_CPU, KN_SHAPE(2));
    REFUSED(kn_sort(x, 2, .indices = &p), "sort: dim 2 is out of range for f32[2,3]");
    KN_CHECK(!p, "indices of a failed call");
    REFUSED(kn_argsort(x, -3, false), "argsort: dim -3 is out of range");
    REFUSED(kn_topk(x, 4, 1), "topk: k is 4, should lie in [0, 3], the size of dim 1");
    REFUSED(kn_topk(x, -1, 1), "topk: k is -1");
    REFUSED(kn_sort(odd, 0), "sort: dtype u16 has no order here");
    REFUSED(kn_cumsum(odd, 0), "cumsum: dtype u16 has no sums");
    REFUSED(kn_cumsum(x, 5), "cumsum: dim 5 is out of range");
    REFUSED(kn_sort(NULL, 0), "sort:");
}
