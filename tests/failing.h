/* tests/failing.h: calls in which each allocation fails in its turn. */
#ifndef KNAP_TESTS_FAILING_H
#define KNAP_TESTS_FAILING_H

#include "kernels/faults.h"
#include "kernels/memory.h"
#include "autograd/autograd.h"
#include "tests/kn_test.h"

/* Makes the call, which is true if all went well, with its allocation n failing, and says how it
 * went: well where it has fewer. What fails is an error, which is cleared. */
#define WITH_FAILING(n, ...)                                                                       \
    ({                                                                                             \
        kn_fail_alloc(n);                                                                          \
        const bool ok_ = (__VA_ARGS__);                                                            \
        kn_fail_alloc(0);                                                                          \
        KN_CHECK(ok_ == kn_ok(), "allocation %d: %s", (int)(n), ok_ ? kn_error() : "no error");    \
        kn_clear_error();                                                                          \
        ok_;                                                                                       \
    })

/* Runs it with the first allocation failing, then the second, until none fails; under
 * AddressSanitizer one in 3. Each failure must be an error that leaves no tensor and no byte
 * behind; then as_before, which may be NULL, looks at the rest. There must be more than `least`
 * allocations. */
static inline void each_allocation_fails(bool (*run)(void *arg), void (*as_before)(void *arg),
                                         void *arg, int64_t least)
{
    const bool mode = kn_grad_mode();
    for (int64_t n = 1;; n += kn_one_in(3)) {
        const int64_t live = kn_live_tensors(), bytes = kn_ledger_read().live_total;
        kn_scope scope = kn_scope_begin();
        kn_fail_alloc(n);
        const bool ok = run(arg);
        const int64_t made = kn_fail_alloc(0);
        kn_scope_end(scope);
        if (ok) {
            KN_CHECK(made < n && n > least, "allocation %d failed silently", (int)n);
            return;
        }
        KN_CHECK(!kn_ok() && kn_grad_mode() == mode, "allocation %d: no error, or another mode",
                 (int)n);
        kn_clear_error();
        KN_CHECK(kn_live_tensors() == live && kn_ledger_read().live_total == bytes,
                 "allocation %d leaks", (int)n);
        if (as_before)
            as_before(arg);
    }
}

#endif
