/* tests/autograd/lists.h: tensors and their elements as lists of numbers. */
#ifndef KNAP_TESTS_LISTS_H
#define KNAP_TESTS_LISTS_H

#include "tests/autograd/every.h"

#define OF(...)     (int64_t)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double))
#define REAL(...)   tensor_of(KN_F64, (double[]){ __VA_ARGS__ }, 1, (int64_t[]){ OF(__VA_ARGS__) })
#define WHOLES(...) kn_cast(REAL(__VA_ARGS__), KN_I64)
/* The elements of t are these, or within so much of each, relatively. */
#define IS(t, ...)             is(__LINE__, t, 0, OF(__VA_ARGS__), (double[]){ __VA_ARGS__ })
#define IS_NEAR(t, share, ...) is(__LINE__, t, share, OF(__VA_ARGS__), (double[]){ __VA_ARGS__ })

static inline void is(int line, kn_tensor *t, double share, int64_t n, const double *want)
{
    double got[32];
    KN_CHECK(t && kn_numel(t) == n && n <= 32, "line %d: %s", line,
             kn_error() ? kn_error() : "size");
    to_doubles(t, got);
    for (int64_t i = 0; i < n; i++)
        KN_CHECK(fabs(got[i] - want[i]) <= share * fabs(want[i]) || got[i] == want[i] ||
                     (isnan(got[i]) && isnan(want[i])),
                 "line %d: element %lld is %g, should be %g", line, (long long)i, got[i], want[i]);
}

#endif
