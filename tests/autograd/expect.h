/* tests/autograd/expect.h: results of operations that move elements, against a formula of the
 * place. */
#ifndef KNAP_TESTS_EXPECT_H
#define KNAP_TESTS_EXPECT_H

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "tests/kn_test.h"

/* 0, 1, 2, ... in row-major order. */
static inline kn_tensor *counted(kn_dtype t, kn_device device, int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    return kn_reshape(kn_arange(t, device, n), ndim, shape);
}

/* y has this shape, and value(at, arg) at each place. On meta only the shape counts. */
typedef double (*expected)(const int64_t *at, void *arg);
static inline void expect(kn_tensor *y, int ndim, const int64_t *shape, expected value, void *arg)
{
    KN_CHECK(y && kn_ok());
    char buf[128];
    int64_t n = 1, at[KN_MAX_DIMS] = { 0 };
    KN_CHECK(kn_ndim(y) == ndim, "%s has not %d dims", kn_describe(y, buf, sizeof buf), ndim);
    for (int d = 0; d < ndim; d++) {
        KN_CHECK(kn_size(y, d) == shape[d], "dim %d of %s isn't %lld", d,
                 kn_describe(y, buf, sizeof buf), (long long)shape[d]);
        n *= shape[d];
    }
    if (kn_device_of(y) == KN_META)
        return;
    OWNED_BYTES double *got = calloc((size_t)n + 1, sizeof *got);
    kn_tensor *wide = kn_cast(kn_detach(y), KN_F64);
    KN_CHECK(kn_to_host(wide, got, (size_t)n * sizeof *got));
    for (int64_t i = 0; i < n; i++) {
        const double want = value(at, arg);
        KN_CHECK(got[i] == want, "element %lld of %s is %g, should be %g", (long long)i,
                 kn_describe(y, buf, sizeof buf), got[i], want);
        for (int d = ndim - 1; d >= 0 && ++at[d] == shape[d]; d--)
            at[d] = 0;
    }
}

#endif
