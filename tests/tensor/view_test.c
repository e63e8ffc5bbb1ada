/* tests/tensor/view_test.c: strides of views and the broadcast rule, against their definitions. */
#include "tensor/tensor_internal.h"
#include "tests/kn_test.h"

KN_TEST(view, row_major)
{
    int64_t shape[4] = { 2, 3, 0, 5 }, stride[4];
    kn_row_major(4, shape, stride);
    KN_CHECK(stride[3] == 1 && stride[2] == 5 && stride[1] == 5 && stride[0] == 15);
}

KN_TEST(view, broadcast)
{
    int64_t out[KN_MAX_DIMS];
    int n;
    struct {
        int na, nb, n;
        int64_t a[3], b[3], out[3];
    } good[] = {
        { 2, 1, 2, { 2, 3 }, { 3 }, { 2, 3 } },
        { 0, 2, 2, { 0 }, { 4, 5 }, { 4, 5 } },
        { 2, 3, 3, { 1, 3 }, { 7, 2, 1 }, { 7, 2, 3 } },
        { 1, 1, 1, { 1 }, { 0 }, { 0 } },
        { 0, 0, 0, { 0 }, { 0 }, { 0 } },
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        KN_CHECK(kn_broadcast_shape(good[i].na, good[i].a, good[i].nb, good[i].b, &n, out));
        KN_CHECK(n == good[i].n && memcmp(out, good[i].out, (size_t)n * sizeof *out) == 0);
    }
    int64_t a[2] = { 2, 3 }, b[1] = { 2 }, zero[1] = { 0 };
    KN_CHECK(!kn_broadcast_shape(2, a, 1, b, &n, out));
    KN_CHECK(!kn_broadcast_shape(2, a, 1, zero, &n, out));
    KN_CHECK_OK();

    int64_t to[3] = { 4, 2, 3 }, shape[2] = { 2, 1 };
    float x[2] = { 1, 2 };
    kn_array e = kn_array_make(x, KN_F32, 2, shape);
    e = kn_array_expand(e, 3, to);
    KN_CHECK(e.ndim == 3 && e.stride[0] == 0 && e.stride[1] == 1 && e.stride[2] == 0);
    KN_CHECK(e.data == x && kn_array_numel(&e) == 24);
}

/* Element k in row-major order of a strided array. */
static int64_t place(int ndim, const int64_t *shape, const int64_t *stride, int64_t k)
{
    int64_t at = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        at += k % shape[d] * stride[d];
        k /= shape[d];
    }
    return at;
}

/* Every permutation of a few shapes, viewed in every shape of the same size with up to 4 dims: a
 * view must show the same elements in order; without a view, brute force over the new strides (each
 * is a difference of places) must find none either. */
KN_TEST(view, strides)
{
    static const int64_t from[][4] = {
        { 2, 3, 4, 1 }, { 6, 1, 2, 2 }, { 1, 1, 24, 1 }, { 3, 4, 2, 1 }
    };
    int given = 0, refused = 0;
    for (size_t f = 0; f < 4; f++)
        for (int perm = 0; perm < 256; perm++) {
            int p[4] = { perm & 3, perm >> 2 & 3, perm >> 4 & 3, perm >> 6 };
            if ((1 << p[0] | 1 << p[1] | 1 << p[2] | 1 << p[3]) != 15)
                continue;
            int64_t whole[4];
            kn_tensor t = { .magic = KN_TENSOR_MAGIC, .dtype = KN_F32, .ndim = 4 };
            kn_row_major(4, from[f], whole);
            for (int d = 0; d < 4; d++) {
                t.shape[d] = from[f][p[d]];
                t.stride[d] = whole[p[d]];
            }
            for (int64_t a = 1; a <= 24; a++)
                for (int64_t b = 1; a * b <= 24; b++) {
                    if (24 % (a * b))
                        continue;
                    int64_t to[3] = { a, b, 24 / (a * b) }, s[3], best[3] = { 0 };
                    bool ok = kn_view_strides(&t, 3, to, s), possible = true;
                    best[0] = place(4, t.shape, t.stride, (24 / a) % 24);
                    best[1] = place(4, t.shape, t.stride, to[2] % 24);
                    best[2] = place(4, t.shape, t.stride, 1);
                    for (int64_t k = 0; k < 24; k++) {
                        int64_t want = place(4, t.shape, t.stride, k);
                        possible &= place(3, to, best, k) == want;
                        KN_CHECK(!ok || place(3, to, s, k) == want, "shape %zu perm %d", f, perm);
                    }
                    KN_CHECK(ok == possible, "shape %zu perm %d to [%d,%d,%d]", f, perm, (int)a,
                             (int)b, (int)to[2]);
                    ok ? given++ : refused++;
                }
        }
    KN_CHECK(given > 100 && refused > 100, "%d given, %d refused", given, refused);
}

KN_TEST(view, strides_edges)
{
    int64_t s[KN_MAX_DIMS], one[2] = { 1, 1 }, six = 6, huge[3] = { INT64_MAX, 4, 0 },
                            none[2] = { 0, 5 };
    kn_tensor *scalar = kn_empty(KN_F32, KN_CPU, KN_SCALAR);
    kn_tensor *empty = kn_empty(KN_F32, KN_CPU, KN_SHAPE(3, 0));
    kn_tensor *t = kn_empty(KN_F32, KN_CPU, KN_SHAPE(2, 3));
    KN_CHECK(kn_view_strides(scalar, 2, one, s) && kn_view_strides(t, 1, &six, s) && s[0] == 1);
    KN_CHECK(!kn_view_strides(scalar, 1, &six, s));
    KN_CHECK(kn_view_strides(empty, 2, none, s) && !kn_view_strides(empty, 3, huge, s));
    six = -6;
    KN_CHECK(!kn_view_strides(t, 1, &six, s));
    KN_CHECK_OK();
}

KN_TEST(view, alias_and_order)
{
    kn_tensor *t = kn_arange(KN_F32, KN_CPU, 12);
    int64_t shape[2] = { 3, 2 }, stride[2] = { 4, 2 };
    kn_tensor *v = kn_tensor_alias(t, 1, 2, shape, stride);
    float got[6], want[6] = { 1, 3, 5, 7, 9, 11 };
    KN_CHECK(v && kn_to_host(v, got, sizeof got) && memcmp(got, want, sizeof got) == 0);
    KN_CHECK(v->storage == t->storage && !kn_is_contiguous(v));
    REFUSED(kn_tensor_alias(v, 6, 2, shape, stride), "leaves the storage");

    int64_t bhtd[4] = { 2, 3, 4, 5 };
    int order[4] = { 0, 2, 1, 3 }, twice[4] = { 0, 1, 1, 3 };
    kn_tensor *o = kn_tensor_new(KN_F32, KN_CPU, NULL, KN_MEM_ACTIVATION, 4, bhtd, order, true);
    KN_CHECK(o->stride[0] == 60 && o->stride[2] == 15 && o->stride[1] == 5 && o->stride[3] == 1);
    REFUSED(kn_tensor_new(KN_F32, KN_CPU, NULL, KN_MEM_ACTIVATION, 4, bhtd, twice, true),
            "permutation");
}
