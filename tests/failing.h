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

/* A run whose allocation n fails, and what there was before it. */
typedef struct failing_run {
    int64_t n, live, bytes;
    kn_scope scope;
    bool mode;
} failing_run;

static inline failing_run fail_at(int64_t n)
{
    const failing_run f = { n, kn_live_tensors(), kn_ledger_read().live_total, kn_scope_begin(),
                            kn_grad_mode() };
    kn_fail_alloc(n);
    return f;
}

/* After the run: whether it failed, which must be an error that leaves no tensor and no byte
 * behind. One that didn't must have had more than `least` allocations, and none failed. */
static inline bool has_failed(const failing_run *f, bool ok, int64_t least)
{
    const int64_t made = kn_fail_alloc(0);
    kn_scope_end(f->scope);
    if (ok) {
        KN_CHECK(made < f->n && f->n > least, "allocation %d failed silently", (int)f->n);
        return false;
    }
    KN_CHECK(!kn_ok() && kn_grad_mode() == f->mode, "allocation %d: no error, or another mode",
             (int)f->n);
    kn_clear_error();
    KN_CHECK(kn_live_tensors() == f->live && kn_ledger_read().live_total == f->bytes,
             "allocation %d leaks", (int)f->n);
    return true;
}

/* A loop over run, an expression that is false after an error: the first allocation fails, then the
 * second, until none does; under AddressSanitizer one in 3. Its body may look at what is left. */
#define EACH_ALLOCATION_FAILS(run, least)                                                          \
    for (failing_run _f = fail_at(1); has_failed(&_f, run, least);                                 \
         _f = fail_at(_f.n + kn_one_in(3)))

/* The loop with a function; after each failure as_before, which may be NULL, looks at the rest. */
static inline void each_allocation_fails(bool (*run)(void *arg), void (*as_before)(void *arg),
                                         void *arg, int64_t least)
{
    EACH_ALLOCATION_FAILS(run(arg), least)
    if (as_before)
        as_before(arg);
}

#endif
