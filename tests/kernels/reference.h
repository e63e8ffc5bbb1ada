/* tests/kernels/reference.h: running the reference provider by itself, for reference_test.c,
 * reference_attention_test.c and reference_optim_test.c. */
#ifndef KNAP_TESTS_REFERENCE_H
#define KNAP_TESTS_REFERENCE_H

#include "kernels/checks.h"
#include "kernels/faults.h"
#include "tests/kn_test.h"

/* Runs an entry of the reference provider, if the arguments fit. */
static inline bool reference(kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = kn_providers(KN_CPU, providers);
    return kn_kernel_fits(k, args) && providers[n - 1]->run[k](args) == KN_DONE;
}

/* It succeeds; where it needs memory, it fails without. */
static inline void run_reference(kn_kernel k, const void *args)
{
    kn_fail_alloc(INT64_MAX);
    const bool ok = reference(k, args);
    const int64_t allocations = kn_fail_alloc(0);
    KN_CHECK(ok);
    if (allocations == 0)
        return;
    kn_fail_alloc(1);
    const bool without = reference(k, args);
    kn_fail_alloc(0);
    KN_CHECK(!without && !kn_ok(), "%s: no error without memory", kn_kernel_name(k));
    kn_clear_error();
}
#define RUN(kernel, ...) run_reference(kernel, &(__VA_ARGS__))

#define ARRAY(data, dtype, ...)                                                                    \
    kn_array_make((data), (dtype), (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),    \
                  (int64_t[]){ __VA_ARGS__ })
#define F64(data, ...) ARRAY(data, KN_F64, __VA_ARGS__)
#define F32(data, ...) ARRAY(data, KN_F32, __VA_ARGS__)
#define I64(data, ...) ARRAY(data, KN_I64, __VA_ARGS__)

static inline bool near(double a, double b, double tolerance)
{
    return isnan(b) ? isnan(a) : a == b || fabs(a - b) <= tolerance * (1 + fabs(b));
}

static inline void randomize(double *x, int n, uint64_t stream)
{
    kn_random_args r = {
        .dst = F64(x, n), .kind = KN_NORMAL, .seed = 5, .stream = stream, .p1 = 1
    };
    RUN(KN_K_RANDOM, r);
}

#endif
