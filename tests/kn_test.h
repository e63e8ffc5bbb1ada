/* tests/kn_test.h: the shim every test is written against. It runs on Criterion (-DKN_CRITERION)
 * or alone, where tests/kn_test.c supplies main(): each test in a forked child, or all in this
 * process with --no-fork; last line "N passed, N failed".
 *
 *   KN_TEST(kernels, copy_casts) { KN_CHECK(x == 1, "x is %d", x); }
 *
 * A failed KN_CHECK ends the test, and says which error stands. Functions run by a forked rank must
 * not use it: they return a status (docs/architecture.md), unless tests/fsdp/ranks.h runs them. */
#ifndef KNAP_TESTS_KN_TEST_H
#define KNAP_TESTS_KN_TEST_H

#include "kernels/error.h"
#include "kernels/memory.h"
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef KN_CRITERION
#include <criterion/criterion.h>
#define KN_TEST(suite, name) Test(suite, name, .timeout = 300)
#define KN_CHECK(cond, ...)                                                                        \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);                             \
            fprintf(stderr, "" __VA_ARGS__);                                                       \
            fprintf(stderr, "%s%s\n", kn_ok() ? "" : " ", kn_ok() ? "" : kn_error());              \
            cr_assert_fail();                                                                      \
        }                                                                                          \
    } while (0)
#define KN_SKIP(...)       cr_skip_test("" __VA_ARGS__)
#define kn_test_at_end(fn) atexit(fn)
#else
typedef struct kn_test_case {
    const char *suite, *name;
    void (*run)(void);
    struct kn_test_case *next;
} kn_test_case;
void kn_test_register(kn_test_case *t);
_Noreturn void kn_test_fail(const char *file, int line, const char *cond, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
_Noreturn void kn_test_skip(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void kn_test_at_end(void (*fn)(void)); /* it is called once the case has passed */
#define KN_TEST(suite_, name_)                                                                     \
    static void suite_##_##name_(void);                                                            \
    __attribute__((constructor)) static void suite_##_##name_##_register(void)                     \
    {                                                                                              \
        static kn_test_case c = { #suite_, #name_, suite_##_##name_, 0 };                          \
        kn_test_register(&c);                                                                      \
    }                                                                                              \
    static void suite_##_##name_(void)
#define KN_CHECK(cond, ...)                                                                        \
    do {                                                                                           \
        if (!(cond))                                                                               \
            kn_test_fail(__FILE__, __LINE__, #cond, "" __VA_ARGS__);                               \
    } while (0)
#define KN_SKIP(...) kn_test_skip("" __VA_ARGS__)
#endif

#ifdef __SANITIZE_ADDRESS__
#define SANITIZED 1 /* a case takes seven times as long */
#else
#define SANITIZED 0
#endif
/* Of a long list of settings AddressSanitizer's suite takes one in n, because an access out of
 * bounds shows in most of them, and the unit suite compares the results of all. KN_TEST_WHOLE=1
 * (the slow suite): it takes all, too. */
static inline int kn_one_in(int n)
{
    return SANITIZED && !getenv("KN_TEST_WHOLE") ? n : 1;
}

static inline double kn_test_clock(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Before the declaration of a pointer to malloc's bytes, or to kn_host_alloc's: they go at the end
 * of its block. */
static inline void owned_bytes(void *at)
{
    void *p;
    memcpy(&p, at, sizeof p);
    free(p);
}

static inline void owned_host(void *at)
{
    void *p;
    memcpy(&p, at, sizeof p);
    kn_host_free(p);
}

#define OWNED_BYTES __attribute__((cleanup(owned_bytes), unused))
#define OWNED_HOST  __attribute__((cleanup(owned_host), unused))

/* No error stands. */
#define KN_CHECK_OK() KN_CHECK(kn_ok())
/* An error stands whose text contains part; clears it. */
#define KN_CHECK_ERROR(part)                                                                       \
    do {                                                                                           \
        KN_CHECK(!kn_ok(), "expected an error with '%s', none stands", part);                      \
        KN_CHECK(strstr(kn_error(), part) != NULL, "error is: %s", kn_error());                    \
        kn_clear_error();                                                                          \
    } while (0)
/* The call fails with an error that has all these texts. */
#define REFUSED(call, ...)                                                                         \
    do {                                                                                           \
        KN_CHECK(!(call), "%s succeeds", #call);                                                   \
        for (const char *const *p_ = (const char *const[]){ __VA_ARGS__, NULL }; *p_; p_++)        \
            KN_CHECK(!kn_ok() && strstr(kn_error(), *p_), "no '%s'", *p_);                         \
        kn_clear_error();                                                                          \
    } while (0)

#endif
