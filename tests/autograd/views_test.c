/* tests/autograd/views_test.c: views with other dims against formulas of the place; their shapes on
 * meta and of empty tensors; bytes that are shared; errors. */
#include "tests/autograd/expect.h"
#include "tests/owned.h"

static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32, KN_U8 };
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

/* x[2,3,1,4] counts: the places below are those of x. */
static double at_234(int64_t i, int64_t j, int64_t k)
{
    return (double)(12 * i + 4 * j + k);
}

static kn_tensor *x_of(kn_dtype t, kn_device device)
{
    return counted(t, device, KN_SHAPE(2, 3, 1, 4));
}

static double squeezed(const int64_t *at, void *arg)
{
    (void)arg;
    return at_234(at[0], at[1], at[2]);
}
static double unsqueezed(const int64_t *at, void *arg)
{
    (void)arg;
    return at_234(at[0], at[1], at[4]);
}
static double flattened(const int64_t *at, void *arg)
{
    (void)arg;
    return (double)(4 * at[0] + at[1]);
}
static double all_flat(const int64_t *at, void *arg)
{
    (void)arg;
    return (double)at[0];
}
static double unflattened(const int64_t *at, void *arg)
{
    (void)arg;
    return at_234(at[0], at[1], 2 * at[3] + at[4]);
}
static double moved(const int64_t *at, void *arg) /* [4,2,3,1] */
{
    (void)arg;
    return at_234(at[1], at[2], at[0]);
}
static double moved_back(const int64_t *at, void *arg) /* [3,1,2,4] */
{
    (void)arg;
    return at_234(at[2], at[0], at[3]);
}

KN_TEST(views, dims_that_change)
{
    for (int t = 0; t < DTYPES; t++) {
        for (int device = KN_CPU; device <= KN_META; device++) {
            kn_tensor *x = x_of(dtypes[t], (kn_device)device);
            expect(kn_squeeze(x, KN_SCALAR), KN_SHAPE(2, 3, 4), squeezed, NULL);
            expect(kn_squeeze(x, KN_SHAPE(-2, 0)), KN_SHAPE(2, 3, 4), squeezed, NULL);
            expect(kn_unsqueeze(x, -2), KN_SHAPE(2, 3, 1, 1, 4), unsqueezed, NULL);
            expect(kn_unsqueeze(x, 2), KN_SHAPE(2, 3, 1, 1, 4), unsqueezed, NULL);
            expect(kn_flatten(x, 0, 2), KN_SHAPE(6, 4), flattened, NULL);
            expect(kn_flatten(x, 0, -1), KN_SHAPE(24), all_flat, NULL);
            expect(kn_unflatten(x, -1, KN_SHAPE(2, -1)), KN_SHAPE(2, 3, 1, 2, 2), unflattened,
                   NULL);
            expect(kn_movedim(x, -1, 0), KN_SHAPE(4, 2, 3, 1), moved, NULL);
            expect(kn_movedim(x, 0, 2), KN_SHAPE(3, 1, 2, 4), moved_back, NULL);
        }
    }
}

/* Of strided tensors they are views where that is possible: a write to one shows in the other. */
KN_TEST(views, share_bytes)
{
    kn_tensor *x = kn_transpose(counted(KN_F32, KN_CPU, KN_SHAPE(4, 3)), 0, 1); /* [3,4] */
    kn_tensor *made[] = { kn_unsqueeze(x, 1),
                          kn_squeeze(kn_unsqueeze(x, 0), KN_SHAPE(0)),
                          kn_unflatten(x, 1, KN_SHAPE(2, 2)),
                          kn_movedim(x, 0, 1),
                          kn_diagonal(x, 0, 0, 1),
                          kn_unfold(x, 1, 2, 1) };
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        KN_CHECK(made[i] && made[i]->storage == x->storage, "view %zu", i);
    KN_CHECK(kn_fill_(made[4], -1));
    for (int64_t i = 0; i < 3; i++)
        KN_CHECK(kn_item(kn_slice(kn_slice(x, 0, i, i + 1), 1, i, i + 1)) == -1);
    KN_CHECK(kn_item(sum_of(x)) == 66 - 0 - 4 - 8 - 3, "others changed");
    KN_CHECK(!kn_fill_(made[5], 1)); /* windows overlap */
    KN_CHECK_ERROR("elements share bytes");
    KN_CHECK(kn_fill_(kn_unfold(x, 1, 2, 2), 7)); /* these don't */
    KN_CHECK(kn_item(sum_of(x)) == 7 * 12);
}

static double on_diagonal(const int64_t *at, void *arg) /* x[3,2,4], dims 0 and 2 */
{
    const int64_t offset = *(const int64_t *)arg, i = at[1] + (offset < 0 ? -offset : 0);
    return (double)(8 * i + 4 * at[0] + i + offset);
}

KN_TEST(views, diagonal)
{
    const struct {
        int64_t offset, size;
    } rows[] = { { 0, 3 },  { 1, 3 },  { 2, 2 },  { 3, 1 },         { 4, 0 },        { -1, 2 },
                 { -2, 1 }, { -3, 0 }, { 99, 0 }, { INT64_MAX, 0 }, { INT64_MIN, 0 } };
    for (int t = 0; t < DTYPES; t++) {
        kn_tensor *x = counted(dtypes[t], KN_CPU, KN_SHAPE(3, 2, 4));
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            int64_t offset = rows[i].offset;
            expect(kn_diagonal(x, offset, 0, -1), KN_SHAPE(2, rows[i].size), on_diagonal, &offset);
        }
    }
    kn_tensor *none = kn_diagonal(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3)), 0, 0, 1);
    KN_CHECK(none && kn_numel(none) == 0);
}

static double in_window(const int64_t *at, void *arg) /* x[2,7], dim 1 */
{
    return (double)(7 * at[0] + at[1] * *(const int64_t *)arg + at[2]);
}
static double in_window_of_rows(const int64_t *at, void *arg) /* x[5,3], dim 0 */
{
    return (double)(3 * (at[0] * *(const int64_t *)arg + at[2]) + at[1]);
}

KN_TEST(views, unfold)
{
    for (int t = 0; t < DTYPES; t++)
        for (int64_t step = 1; step < 9; step++)
            for (int64_t size = 1; size < 5; size++) {
                kn_tensor *x = counted(dtypes[t], KN_CPU, KN_SHAPE(2, 7));
                expect(kn_unfold(x, -1, size, step), KN_SHAPE(2, (7 - size) / step + 1, size),
                       in_window, &step);
                x = counted(dtypes[t], KN_CPU, KN_SHAPE(5, 3));
                expect(kn_unfold(x, 0, size, step), KN_SHAPE((5 - size) / step + 1, 3, size),
                       in_window_of_rows, &step);
            }
    kn_tensor *far = kn_unfold(counted(KN_F32, KN_CPU, KN_SHAPE(4)), 0, 4, INT64_MAX);
    KN_CHECK(far && kn_size(far, 0) == 1 && kn_size(far, 1) == 4);
    KN_CHECK(kn_unfold(kn_empty(KN_F32, KN_META, KN_SHAPE(8, 100)), 1, 10, 3));
}

/* A gradient of bf16 is the sum in f32, rounded once: 1 + 1/256 + 1/256, but not in two steps. */
KN_TEST(views, gradient_of_windows_is_rounded_once)
{
    kn_tensor *x = kn_require_grad(kn_zeros(KN_BF16, KN_CPU, KN_SHAPE(5)), true);
    kn_tensor *y = kn_unfold(x, 0, 3, 1);
    float w[9] = { 0, 0, 1, 0, 0.00390625f, 0, 0.00390625f, 0, 0 };
    kn_tensor *g = kn_cast(kn_from(KN_F32, KN_CPU, w, KN_SHAPE(3, 3)), KN_BF16);
    KN_CHECK(kn_backward(y, .grad = g));
    KN_CHECK(kn_item(kn_slice(kn_grad(x), 0, 2, 3)) == 1.0078125, "%g",
             kn_item(kn_slice(kn_grad(x), 0, 2, 3)));
}

static double second_part(const int64_t *at, void *arg) /* x[2,9], [3, 7) */
{
    (void)arg;
    return (double)(9 * at[0] + 3 + at[1]);
}

KN_TEST(views, split_by_sizes)
{
    kn_tensor *p[8], *x = counted(KN_I32, KN_CPU, KN_SHAPE(2, 9));
    KN_CHECK(kn_split(x, -1, 4, (int64_t[]){ 3, 4, 0, 2 }, p));
    expect(p[1], KN_SHAPE(2, 4), second_part, NULL);
    KN_CHECK(kn_size(p[2], 1) == 0 && kn_item(kn_amax(p[3], 0, NULL, false)) == 17);
    kn_tensor *f = kn_require_grad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4)), true);
    KN_CHECK(kn_split(f, 0, 3, (int64_t[]){ 1, 0, 3 }, p));
    KN_CHECK(kn_backward(sum_of(p[2])));
    const float want[4] = { 0, 1, 1, 1 };
    KN_CHECK(memcmp(kn_data(kn_grad(f)), want, sizeof want) == 0);
}

/* Parts without elements at the end of strided tensors: their place would be past the bytes. */
KN_TEST(views, empty_parts_of_strided)
{
    kn_tensor *x = kn_require_grad(counted(KN_F32, KN_CPU, KN_SHAPE(3, 8)), true), *p[8];
    kn_tensor *end = kn_slice(x, 1, 3, 8), *empty = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 5));
    kn_tensor *strided[] = { end, kn_transpose(end, 0, 1), kn_unfold(end, 1, 2, 1),
                             kn_expand(kn_slice(x, 1, 7, 8), KN_SHAPE(2, 3, 8 - 3)) };
    for (size_t i = 0; i < sizeof strided / sizeof *strided; i++)
        for (int d = 0; d < kn_ndim(strided[i]); d++) {
            int64_t n = kn_size(strided[i], d);
            kn_tensor *none = kn_slice(strided[i], d, n, n);
            KN_CHECK(none && kn_size(none, d) == 0, "tensor %zu dim %d", i, d);
            KN_CHECK(kn_backward(sum_of(none), .retain_graph = true));
            KN_CHECK(kn_split(strided[i], d, 2, (int64_t[]){ n, 0 }, p));
            KN_CHECK(kn_backward(sum_of(p[1]), .retain_graph = true));
        }
    KN_CHECK(kn_item(sum_of(kn_grad(x))) == 0);
    kn_require_grad(empty, true);
    kn_tensor *y = kn_cat(((kn_tensor *[]){ end, empty }), 2, 0);
    kn_tensor *wide = kn_ones(KN_F32, KN_CPU, KN_SHAPE(3, 8));
    KN_CHECK(kn_backward(y, .grad = kn_slice(wide, 1, 3, 8)));
    KN_CHECK(kn_item(sum_of(kn_grad(x))) == 15);
}

/* ---- errors ---------------------------------------------------------------------------------- */

static bool alike(kn_tensor *a, kn_tensor *b)
{
    return a && b && kn_item(sum_of(kn_ne(a, b))) == 0;
}

/* x[3, the parts' sizes] cut, each part times its number, and put together again by kn_cat; or
 * chunks of one size by kn_stack. Values and gradient are those of x and dy times the numbers. */
static void many_parts(int n, bool equal, bool stacked)
{
    enum { MOST_PARTS = 300 };
    int64_t size[MOST_PARTS], total = 0, at = 0;
    kn_tensor *part[MOST_PARTS];
    for (int i = 0; i < n; i++)
        total += size[i] = equal ? 2 : i % 4;
    IN_SCOPE;
    kn_tensor *x = kn_randn(KN_F64, KN_CPU, 3, 0, KN_SHAPE(3, total));
    kn_tensor *dy = kn_randn(KN_F64, KN_CPU, 3, 1, KN_SHAPE(3, total)), *factor = kn_zeros_like(x);
    for (int i = 0; i < n; at += size[i++])
        kn_copy_(kn_slice(factor, 1, at, at + size[i]),
                 kn_full(KN_F64, KN_CPU, i + 1, KN_SHAPE(3, size[i])));
    kn_require_grad(x, true);
    KN_CHECK(equal ? kn_chunk(x, -1, n, part) : kn_split(x, 1, n, size, part));
    for (int i = 0; i < n; i++)
        part[i] = kn_scale(part[i], i + 1);
    kn_tensor *y =
        stacked ? kn_reshape(kn_stack(part, n, -2), KN_SHAPE(3, total)) : kn_cat(part, n, -1);
    KN_CHECK(y && alike(y, kn_mul(kn_detach(x), factor)), "%d parts", n);
    KN_CHECK(kn_backward(sum_of(kn_mul(y, dy))));
    KN_CHECK(alike(kn_grad(x), kn_mul(dy, factor)), "%d parts", n);
}

KN_TEST(views, any_number_of_parts)
{
    static const int counts[] = { 1, 8, 9, 16, 17, 65, 256, 257, 300 };
    for (int i = 0; i < 9; i++) {
        many_parts(counts[i], false, false);
        many_parts(counts[i], true, false);
        many_parts(counts[i], true, true);
    }
    kn_tensor *x[20];
    for (int i = 0; i < 20; i++)
        x[i] = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, i == 18 ? 4 : 3));
    REFUSED(kn_cat(x, 20, 0), "cat: argument 19 is f32[2,4], argument 1 is f32[2,3]");
    REFUSED(kn_stack(x, 20, 0), "stack: argument 19 is f32[2,4], argument 1 is f32[2,3]");
    REFUSED(kn_cat(x, 0, 0), "cat: 0 tensors; at least 1 is needed");
    REFUSED(kn_stack(x, 0, 0), "stack: 0 tensors; at least 1 is needed");
}

/* A vector in a product is a row or a column, and the result lacks its dim. */
KN_TEST(views, products_with_vectors)
{
    IN_SCOPE;
    kn_tensor *v = kn_randn(KN_F64, KN_CPU, 3, 0, KN_SHAPE(4)), *w = kn_scale(v, 0.5);
    kn_tensor *a = kn_randn(KN_F64, KN_CPU, 3, 1, KN_SHAPE(2, 4, 3)), *b = kn_transpose(a, 1, 2);
    kn_tensor *row = kn_matmul(v, a), *column = kn_matmul(b, v), *number = kn_matmul(v, w);
    KN_CHECK(row && kn_has_shape(row, 2, (int64_t[]){ 2, 3 }) && alike(row, column));
    KN_CHECK(alike(row, kn_sum(kn_mul(kn_unsqueeze(v, 1), a), 1, (int64_t[]){ 1 }, false)));
    KN_CHECK(number && kn_ndim(number) == 0);
    KN_CHECK(fabs(kn_item(number) - kn_item(sum_of(kn_mul(v, w)))) < 1e-14);
    REFUSED(kn_matmul(v, b), "inner dims differ");
    REFUSED(kn_matmul(v, kn_zeros(KN_F64, KN_CPU, KN_SCALAR)), "needs at least 1 dim on both");
}

KN_TEST(views, errors)
{
    kn_tensor *x = counted(KN_F32, KN_CPU, KN_SHAPE(2, 6)), *p[9];
    kn_tensor *eight = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 1, 1, 1, 1, 1, 1, 2));
    REFUSED(kn_squeeze(x, KN_SHAPE(2)), "squeeze: dim 2 is out of range for f32[2,6]");
    REFUSED(kn_squeeze(x, KN_SHAPE((int64_t)1 << 32)), "squeeze: dim 4294967296 is out of range");
    REFUSED(kn_squeeze(x, 1, NULL), "squeeze: the list of dims is NULL");
    REFUSED(kn_unsqueeze(x, 3), "unsqueeze: dim 3 is out of range for f32[2,6] (use -3 to 2)");
    REFUSED(kn_unsqueeze(eight, 0), "has 8 dims already");
    REFUSED(kn_flatten(x, 1, 0), "flatten: dim 1 comes after dim 0");
    REFUSED(kn_flatten(x, 0, 2), "flatten: dim 2 is out of range");
    REFUSED(kn_unflatten(x, 1, KN_SHAPE(4, -1)),
            "unflatten: the sizes don't multiply to the 6 elements of dim 1 of f32[2,6]");
    REFUSED(kn_unflatten(x, 1, KN_SHAPE(-1, -1)), "unflatten: size -1 of part 1 cannot be");
    REFUSED(kn_unflatten(x, 1, KN_SHAPE(INT64_MAX, 4)), "size 4 of part 1 cannot be");
    REFUSED(kn_unflatten(x, 1, KN_SHAPE(6, 1, 1, 1, 1, 1, 1, 1)), "the result has at most 8 dims");
    REFUSED(kn_movedim(x, 0, -3), "movedim: dim -3 is out of range");
    REFUSED(kn_diagonal(x, 0, 1, -1), "diagonal: dims 1 and -1 of f32[2,6] are the same");
    REFUSED(kn_unfold(x, 1, 7, 1), "unfold: windows of size 7, step 1");
    REFUSED(kn_unfold(x, 1, 2, 0), "all are at least 1");
    REFUSED(kn_unfold(eight, 7, 1, 1), "the result has at most 8 dims");
    REFUSED(kn_split(x, 1, 2, (int64_t[]){ 3, 4 }, p),
            "split: the sizes [3, 4] of the parts aren't those of dim 1 of f32[2,6]");
    REFUSED(kn_split(x, 1, 3, (int64_t[]){ INT64_MAX, INT64_MAX, 8 }, p), "aren't those of dim 1");
    KN_CHECK(!kn_split(x, 1, 2, (int64_t[]){ 7, -1 }, p) && !p[0] && !p[1]);
    KN_CHECK_ERROR("aren't those of dim 1");
    REFUSED(kn_split(x, 1, 9, (int64_t[9]){ 7 }, p),
            "split: the sizes [7, 0, 0, 0, 0, 0, 0, 0, 0]");
    REFUSED(kn_split(x, 1, 0, (int64_t[]){ 6 }, p), "split: 0 parts; at least 1 is needed");
    REFUSED(kn_chunk(x, 1, -1, p), "chunk: -1 parts; at least 1 is needed");
    REFUSED(kn_split(x, 1, 1, NULL, p), "split: the sizes");
    REFUSED(kn_expand(x, 2, NULL), "expand: the shape");
}

/* ---- gradients that are views ---------------------------------------------------------------- */

static bool all_are(kn_tensor *t, float value)
{
    float v[4] = { 0 };
    KN_CHECK(t && kn_numel(t) == 4 && kn_to_host(t, v, sizeof v), "%s", kn_error());
    return v[0] == value && v[1] == value && v[2] == value && v[3] == value;
}

static kn_tensor *four(void)
{
    return kn_require_grad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 2)), true);
}

/* p's gradient of the sum lies where q's does when that of 5 p comes to it. */
KN_TEST(views, a_gradient_that_grows_changes_no_view_of_it)
{
    kn_tensor *a = four(), *b = four();
    kn_tensor *p = kn_scale(a, 2), *q = kn_scale(b, 3), *more = kn_scale(p, 5);
    kn_tensor *z = kn_add(p, kn_reshape(kn_reshape(q, KN_SHAPE(4)), KN_SHAPE(2, 2)));
    KN_CHECK(kn_backward(kn_add(sum_of(z), sum_of(more))));
    KN_CHECK(all_are(kn_grad(a), 12) && all_are(kn_grad(b), 3));
}

static kn_values spread_forward(kn_function_run *run, kn_values in)
{
    (void)run;
    return KN_VALUES(kn_sum(in.v[0], KN_SHAPE(1), false));
}

static kn_values spread_backward(kn_function_run *run, kn_values dout)
{
    (void)run;
    return KN_VALUES(kn_expand(kn_unsqueeze(kn_scale(dout.v[0], 1), 1), KN_SHAPE(2, 2)));
}

static float own[] = { 1, 1, 1, 1 };

static kn_values own_backward(kn_function_run *run, kn_values dout)
{
    (void)run, (void)dout;
    return KN_VALUES(kn_borrow(KN_F32, own, KN_SHAPE(2, 2)));
}

/* p's first gradient: elements that share a place, or the caller's memory. */
KN_TEST(views, a_gradient_that_nobody_may_add_into_grows_elsewhere)
{
    static const kn_function sums[] = { { "spread", spread_forward, spread_backward },
                                        { "own", spread_forward, own_backward } };
    for (int i = 0; i < 2; i++) {
        kn_tensor *a = four(), *p = kn_scale(a, 2), *more = kn_scale(p, 5);
        kn_tensor *s = kn_function_call(&sums[i], p);
        KN_CHECK(s && kn_backward(kn_add(sum_of(s), sum_of(more))), "%s", kn_error());
        KN_CHECK(all_are(kn_grad(a), 12) && own[0] == 1 && own[3] == 1, "%s", sums[i].name);
    }
}
