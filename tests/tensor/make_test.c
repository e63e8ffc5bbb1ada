/* tests/tensor/make_test.c: tensors with values, reading, writing in place, meta. */
#include "tensor/tensor_internal.h"
#include "tests/kn_test.h"

static float at(const kn_tensor *t, int64_t i)
{
    float v[64] = { 0 };
    KN_CHECK(kn_numel(t) <= 64 && kn_dtype_of(t) == KN_F32);
    KN_CHECK(kn_to_host(t, v, (size_t)kn_numel(t) * sizeof *v));
    return v[i];
}

KN_TEST(make, filled)
{
    kn_tensor *z = kn_zeros(KN_DTYPE_DEFAULT, KN_DEVICE_DEFAULT, KN_SHAPE(2, 3));
    kn_tensor *o = kn_ones(KN_I64, KN_CPU, KN_SCALAR),
              *f = kn_full(KN_F64, KN_CPU, -2.5, KN_SCALAR);
    kn_tensor *r = kn_arange(KN_F32, KN_CPU, 5);
    KN_CHECK_OK();
    KN_CHECK(kn_ndim(z) == 2 && kn_size(z, 0) == 2 && kn_size(z, -1) == 3 && kn_shape(z)[1] == 3);
    KN_CHECK(kn_dtype_of(z) == KN_F32 && kn_device_of(z) == KN_CPU && kn_is_contiguous(z));
    for (int i = 0; i < 6; i++)
        KN_CHECK(at(z, i) == 0);
    KN_CHECK(kn_item(o) == 1 && kn_ndim(o) == 0 && kn_numel(o) == 1 && kn_item(f) == -2.5);
    for (int i = 0; i < 5; i++)
        KN_CHECK(at(r, i) == (float)i);
    kn_tensor *like = kn_zeros_like(f), *same = kn_empty_like(z);
    KN_CHECK(kn_dtype_of(like) == KN_F64 && kn_item(like) == 0 && kn_numel(same) == 6);
    KN_CHECK((uintptr_t)kn_data(z) % KN_ALIGN == 0);
    KN_CHECK_OK();
}

/* t's elements are these, in order. */
static void has(kn_tensor *t, int n, const double *want)
{
    KN_CHECK(t && kn_numel(t) == n);
    const kn_array a = kn_array_of(t);
    for (int i = 0; i < n; i++) {
        const void *at = (const char *)a.data + (size_t)i * kn_dtype_size(a.dtype);
        KN_CHECK(kn_element(a.dtype, at) == want[i], "element %d is %.17g, should be %.17g", i,
                 kn_element(a.dtype, at), want[i]);
    }
}

KN_TEST(make, ranges)
{
    has(kn_arange(KN_I64, KN_CPU, 3), 3, (double[]){ 0, 1, 2 });
    has(kn_arange(KN_I32, KN_CPU, 7, .start = 2, .step = 2), 3, (double[]){ 2, 4, 6 });
    has(kn_arange(KN_F32, KN_CPU, 8, .start = 2, .step = 2), 3, (double[]){ 2, 4, 6 });
    has(kn_arange(KN_BF16, KN_CPU, -2, .start = 1, .step = -1.5), 2, (double[]){ 1, -0.5 });
    has(kn_arange(KN_F64, KN_CPU, 1, .step = 0.25), 4, (double[]){ 0, 0.25, 0.5, 0.75 });
    has(kn_arange(KN_F64, KN_CPU, 5, .start = 5), 0, NULL);
    has(kn_linspace(KN_F64, KN_CPU, 1, 2, 5), 5, (double[]){ 1, 1.25, 1.5, 1.75, 2 });
    has(kn_linspace(KN_F32, KN_CPU, 3, -1, 3), 3, (double[]){ 3, 1, -1 });
    has(kn_linspace(KN_F64, KN_CPU, 4, 9, 1), 1, (double[]){ 4 });
    has(kn_linspace(KN_F64, KN_CPU, 4, 9, 0), 0, NULL);
    kn_tensor *tenths = kn_linspace(KN_F64, KN_CPU, 0.1, 0.7, 50);
    KN_CHECK(((const double *)kn_data(tenths))[49] == 0.7, "the last one isn't the end");
    KN_CHECK(kn_size(kn_linspace(KN_F32, KN_META, 0, 1, 9), 0) == 9);
}

KN_TEST(make, eye_and_likes)
{
    has(kn_eye(KN_F32, KN_CPU, 2, 3), 6, (double[]){ 1, 0, 0, 0, 1, 0 });
    has(kn_eye(KN_BOOL, KN_CPU, 3, 2), 6, (double[]){ 1, 0, 0, 1, 0, 0 });
    has(kn_eye(KN_I64, KN_CPU, 0, 2), 0, NULL);
    kn_tensor *t = kn_empty(KN_I32, KN_CPU, KN_SHAPE(2, 1));
    has(kn_ones_like(t), 2, (double[]){ 1, 1 });
    has(kn_full_like(t, 7), 2, (double[]){ 7, 7 });
    KN_CHECK(kn_dtype_of(kn_full_like(t, 7)) == KN_I32 && kn_ndim(kn_ones_like(t)) == 2);
    KN_CHECK(kn_device_of(kn_full_like(kn_eye(KN_F32, KN_META, 4, 4), 1)) == KN_META);
}

KN_TEST(make, ranges_refuse)
{
    REFUSED(kn_arange(KN_F32, KN_CPU, -1), "arange: from 0 to -1 by steps of 1");
    REFUSED(kn_arange(KN_F32, KN_CPU, 1, .step = -1e30), "steps that lead from one to the other");
    REFUSED(kn_arange(KN_F32, KN_CPU, INFINITY), "needs finite numbers");
    REFUSED(kn_arange(KN_F32, KN_CPU, 1, .start = (double)NAN), "needs finite numbers");
    REFUSED(kn_arange(KN_F32, KN_CPU, 1e300), "arange: from 0 to 1e+300");
    REFUSED(kn_linspace(KN_F32, KN_CPU, 0, 1, -1), "linspace: -1 elements from 0 to 1");
    REFUSED(kn_linspace(KN_F32, KN_CPU, 0, INFINITY, 2), "finite numbers");
    REFUSED(kn_eye(KN_F32, KN_CPU, 2, -3), "eye: 2 rows, -3 columns");
}

KN_TEST(make, from)
{
    float v[6] = { 1, 2, 3, 4, 5, 6 };
    int32_t n[2] = { -7, 1 << 30 };
    kn_tensor *t = kn_from(KN_F32, KN_CPU, v, KN_SHAPE(3, 2));
    v[4] = 0; /* it was a copy */
    KN_CHECK(at(t, 4) == 5 && at(t, 0) == 1);
    kn_tensor *i = kn_from(KN_I32, KN_CPU, n, KN_SHAPE(2));
    KN_CHECK(((int32_t *)kn_data(i))[1] == 1 << 30);
    KN_CHECK(kn_from(KN_F32, KN_CPU, NULL, KN_SHAPE(0, 4)) != NULL);
    REFUSED(kn_from(KN_F32, KN_CPU, NULL, KN_SHAPE(1)), "NULL");
}

KN_TEST(make, random)
{
    enum { N = 4096 };
    static float u[N], v[N];
    kn_tensor *a = kn_rand(KN_F32, KN_CPU, 7, 1, KN_SHAPE(N));
    kn_tensor *b = kn_randn(KN_F32, KN_CPU, 7, 2, KN_SHAPE(N));
    kn_tensor *again = kn_rand(KN_F32, KN_CPU, 7, 1, KN_SHAPE(64, 64));
    KN_CHECK_OK();
    kn_to_host(a, u, sizeof u);
    kn_to_host(again, v, sizeof v);
    KN_CHECK(memcmp(u, v, sizeof u) == 0, "the shape must not change the draw");
    double mean = 0, square = 0, least = 1, most = 0;
    for (int i = 0; i < N; i++) {
        mean += u[i] / N;
        least = fmin(least, u[i]);
        most = fmax(most, u[i]);
    }
    KN_CHECK(least >= 0 && most < 1 && fabs(mean - 0.5) < 0.03, "mean %g in [%g, %g]", mean, least,
             most);
    kn_to_host(b, v, sizeof v);
    mean = 0;
    for (int i = 0; i < N; i++) {
        mean += v[i] / N;
        square += (double)v[i] * v[i] / N;
    }
    KN_CHECK(fabs(mean) < 0.08 && fabs(square - 1) < 0.12, "mean %g square %g", mean, square);
    REFUSED(kn_rand(KN_I64, KN_CPU, 1, 1, KN_SHAPE(2)), "i64");
}

KN_TEST(make, refuses)
{
    int64_t nine[9] = { 1, 1, 1, 1, 1, 1, 1, 1, 1 };
    REFUSED(kn_empty(KN_F32, KN_CPU, KN_SHAPE(2, -3)), "[2,-3]");
    REFUSED(kn_empty(KN_F32, KN_CPU, 9, nine), "9 dims");
    KN_CHECK(kn_empty(KN_F32, KN_CPU, 8, nine) != NULL);
    REFUSED(kn_empty(KN_F32, KN_CPU, KN_SHAPE(INT64_MAX, 2)), "address");
    REFUSED(kn_empty(KN_F32, KN_CPU, KN_SHAPE(INT64_MAX, 2, 0)), "address");
    REFUSED(kn_empty((kn_dtype)99, KN_CPU, KN_SHAPE(2)), "dtype");
    REFUSED(kn_size(kn_empty(KN_F32, KN_CPU, KN_SHAPE(2)), 1), "dim 1");
}

KN_TEST(make, errors_stick)
{
    kn_tensor *t = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2));
    kn_fail("the first");
    KN_CHECK(!kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2)) && !kn_zeros_like(NULL) && !kn_fill_(t, 3));
    KN_CHECK(!kn_copy_(t, NULL) && kn_ndim(NULL) == 0 && kn_item(t) == 0 && !kn_data(t));
    KN_CHECK(kn_ndim(t) == 1, "looking at shapes works while an error stands");
    KN_CHECK_ERROR("the first");
    KN_CHECK(at(t, 0) == 1);
    REFUSED(kn_numel(NULL), "numel: a tensor is NULL");
    int not_a_tensor[64] = { 0 };
    REFUSED(kn_check((kn_tensor *)(void *)not_a_tensor, "test"), "not a tensor");
}

KN_TEST(make, fill_and_copy)
{
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3));
    kn_tensor *row = kn_arange(KN_I32, KN_CPU, 3);
    uint32_t version = t->storage->version;
    KN_CHECK(kn_fill_(t, 4) && at(t, 5) == 4);
    KN_CHECK(kn_copy_(t, row) && at(t, 2) == 2 && at(t, 4) == 1);
    KN_CHECK(t->storage->version == version + 2);
    kn_bump_version(t);
    KN_CHECK(t->storage->version == version + 3);
    REFUSED(kn_copy_(row, t), "f32[2,3] does not expand to i32[3]");
    REFUSED(kn_copy_(t, kn_zeros(KN_F32, KN_META, KN_SHAPE(2, 3))), "meta");
    REFUSED(kn_copy_(t, kn_empty(KN_U16, KN_CPU, KN_SHAPE(3))), "storage-only");
    int64_t shape[2] = { 4, 3 }, stride[2] = { 0, 1 };
    kn_tensor *wide = kn_tensor_alias(t, 0, 2, shape, stride);
    REFUSED(kn_fill_(wide, 1), "expanded");
}

/* t[1:] = t[:-1] must behave as if all elements were read first, in both directions. */
KN_TEST(make, copy_overlapping)
{
    int64_t n = 7, one = 1;
    for (int way = 0; way < 2; way++) {
        kn_tensor *t = kn_arange(KN_F32, KN_CPU, 8);
        kn_tensor *low = kn_tensor_alias(t, 0, 1, &n, &one),
                  *high = kn_tensor_alias(t, 1, 1, &n, &one);
        int64_t workspace = kn_ledger_read().live[KN_MEM_WORKSPACE];
        KN_CHECK(kn_copy_(way ? low : high, way ? high : low));
        for (int i = 0; i < 8; i++)
            KN_CHECK(at(t, i) == (way ? fmin(i + 1, 7) : fmax(i - 1, 0)), "way %d: [%d] %g", way, i,
                     at(t, i));
        KN_CHECK(kn_ledger_read().live[KN_MEM_WORKSPACE] == workspace);
    }
}

static bool refuse(kn_tensor *t, const char *what)
{
    return kn_fail("%s of %s refused", what, kn_name(t));
}

KN_TEST(make, write_hook)
{
    kn_tensor *t = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2));
    kn_set_name(t, "w");
    bool (*old)(kn_tensor *, const char *) = kn_tensor_before_write;
    kn_tensor_before_write = refuse;
    REFUSED(kn_fill_(t, 0), "fill_ of w refused");
    kn_tensor_before_write = old;
    KN_CHECK(at(t, 0) == 1);
}

KN_TEST(make, reading_refuses)
{
    float v[3];
    kn_tensor *t = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2));
    int64_t n = 2, two = 2;
    REFUSED(kn_to_host(t, v, sizeof v), "8 bytes");
    REFUSED(kn_item(t), "2 elements");
    kn_tensor *apart = kn_tensor_alias(kn_ones(KN_F32, KN_CPU, KN_SHAPE(4)), 0, 1, &n, &two);
    REFUSED(kn_data(apart), "contiguous");
    KN_CHECK(kn_to_host(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 0)), NULL, 0));
}

KN_TEST(make, meta_has_no_values)
{
    float v[6] = { 0 };
    kn_tensor *t = kn_full(KN_F32, KN_META, 3, KN_SHAPE(2, 3));
    KN_CHECK(t && kn_numel(t) == 6 && kn_device_of(t) == KN_META);
    KN_CHECK(kn_fill_(t, 1) && kn_copy_(t, kn_arange(KN_F32, KN_META, 3)));
    KN_CHECK(kn_rand(KN_F32, KN_META, 1, 1, KN_SHAPE(4)) &&
             kn_from(KN_F32, KN_META, v, KN_SHAPE(6)));
    KN_CHECK(kn_empty(KN_BF16, KN_META, KN_SHAPE(1 << 20, 1 << 20)) != NULL);
    REFUSED(kn_to_host(t, v, sizeof v), "on meta");
    REFUSED(kn_data(t), "on meta");
    REFUSED(kn_item(kn_zeros(KN_F32, KN_META, KN_SCALAR)), "on meta");
}

KN_TEST(make, values_are_fetched_as_they_were)
{
    float row[6] = { 0 };
    kn_tensor *t = kn_from(KN_F32, KN_CPU, (float[]){ 1, 2, 3, 4, 5, 6 }, KN_SHAPE(2, 3));
    kn_fetch *f = kn_fetch_begin(kn_tensor_alias(t, 0, KN_SHAPE(3, 2), (int64_t[]){ 1, 3 })),
             *g = kn_fetch_begin(t);
    KN_CHECK(f && g && kn_fetch_ready(f) && kn_fill_(t, 9));
    KN_CHECK(kn_fetch_end(f, row, sizeof row) && row[1] == 4 && row[2] == 2);
    REFUSED(kn_fetch_end(g, row, 4), "the tensor had 24 bytes, the host buffer has 4");
    f = kn_fetch_begin(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0)));
    KN_CHECK(kn_fetch_end(f, NULL, 0) && kn_ok());
    REFUSED(kn_fetch_begin(kn_zeros(KN_F32, KN_META, KN_SCALAR)), "fetch: f32[] is on meta");
    REFUSED(kn_fetch_end(NULL, row, 4), "nothing was begun");
}
