/* tests/kernels/base_test.c: dtypes, arrays, contexts, sticky errors, metadata memory, ledger,
 * threads. */
#include "kernels/faults.h"
#include "kernels/context.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"
#include "tests/kn_test.h"
#include <limits.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- dtypes and arrays ------------------------------------------------------------------- */

KN_TEST(base, dtype_names_round_trip)
{
    for (int t = KN_DTYPE_DEFAULT + 1; t < KN_DTYPE_COUNT; t++) {
        KN_CHECK(kn_dtype_parse(kn_dtype_name(t)) == (kn_dtype)t, "%s", kn_dtype_name(t));
        KN_CHECK(kn_dtype_size(t) >= 1 && kn_dtype_size(t) <= 8);
    }
    KN_CHECK(kn_dtype_parse("f31") == KN_DTYPE_DEFAULT && kn_dtype_parse(NULL) == KN_DTYPE_DEFAULT);
    KN_CHECK(kn_dtype_size(KN_BF16) == 2 && kn_dtype_size(KN_F64) == 8);
    KN_CHECK(kn_dtype_size((kn_dtype)99) == 0 && kn_dtype_size((kn_dtype)-1) == 0);
    KN_CHECK(kn_dtype_is_float(KN_F16) && !kn_dtype_is_float(KN_I64));
}

KN_TEST(base, arrays)
{
    char text[64], tiny[6];
    kn_array a = kn_array_make(NULL, KN_F32, 3, (int64_t[]){ 2, 3, 4 });
    KN_CHECK(kn_array_numel(&a) == 24 && kn_array_contiguous(&a));
    KN_CHECK(a.stride[0] == 12 && a.stride[1] == 4 && a.stride[2] == 1);
    KN_CHECK(strcmp(kn_array_describe(&a, text, sizeof text), "f32[2,3,4]") == 0, "%s", text);
    kn_array_describe(&a, tiny, sizeof tiny);
    KN_CHECK(strcmp(tiny, "f32[2") == 0, "%s", tiny);
    a.stride[0] = 13;
    KN_CHECK(!kn_array_contiguous(&a));
    a.shape[0] = 1; /* the stride of a dim of 1 does not matter */
    KN_CHECK(kn_array_contiguous(&a));
    a.shape[1] = 0;
    a.stride[2] = 7;
    KN_CHECK(kn_array_numel(&a) == 0 && kn_array_contiguous(&a));
    kn_array scalar = kn_array_make(NULL, KN_I64, 0, NULL);
    KN_CHECK(kn_array_numel(&scalar) == 1);
    KN_CHECK(strcmp(kn_array_describe(&scalar, text, sizeof text), "i64[]") == 0, "%s", text);
}

/* ---- errors ------------------------------------------------------------------------------ */

static int calls;
static char order[8], last[256];

static void on_error(const char *message, void *arg)
{
    order[calls++] = *(const char *)arg;
    snprintf(last, sizeof last, "%s", message);
}

KN_TEST(base, first_error_stands)
{
    calls = 0;
    kn_set_error_handler(on_error, "u");
    kn_context_get()->on_error_internal = on_error;
    kn_context_get()->on_error_internal_arg = "i";
    KN_CHECK(kn_ok() && kn_error() == NULL);
    KN_CHECK(!kn_fail("first %d", 1));
    KN_CHECK(!kn_fail("second %d", 2));
    KN_CHECK(!kn_ok() && strcmp(kn_error(), "first 1") == 0);
    KN_CHECK(calls == 2 && memcmp(order, "iu", 2) == 0, "internal first, each once");
    KN_CHECK(strcmp(last, "first 1") == 0);
    kn_clear_error();
    KN_CHECK(kn_ok() && kn_error() == NULL);
    kn_fail("third");
    KN_CHECK(calls == 4);
    kn_context_end();
    KN_CHECK(kn_ok() && kn_error() == NULL, "a new context has no error");
}

static const char *some_path(const kn_context *c)
{
    (void)c;
    return "mlp.fc1";
}

/* A tensor's or a file's name must not move the reader's cursor. */
KN_TEST(base, errors_hold_no_control_characters)
{
    kn_fail("no tensor \"%s\"", "a\x1b[2J\nb\x7f\xc2\x9b"
                                "c \xc3\xa4\xe2\x82\xac");
    KN_CHECK_ERROR("no tensor \"a?[2J?b???c \xc3\xa4\xe2\x82\xac\"");
}

KN_TEST(base, error_says_where)
{
    const char *(*before)(const kn_context *) = kn_context_path;
    kn_place_enter("train.c", 41);
    kn_fail("matmul: inner dims differ");
    KN_CHECK(strcmp(kn_error(), "matmul: inner dims differ at train.c:41") == 0);
    kn_clear_error();
    kn_context_path = some_path;
    kn_fail("matmul: inner dims differ");
    kn_context_path = before;
    KN_CHECK(strcmp(kn_error(), "matmul: inner dims differ in mlp.fc1, train.c:41") == 0);
    kn_clear_error();
    char longer[4096];
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    kn_fail("%s", longer);
    KN_CHECK(strlen(kn_error()) == sizeof kn_context_get()->error_room - 1);
    kn_clear_error();
    kn_fail("again: %s", kn_error() ? kn_error() : "none");
    KN_CHECK_ERROR("again: none");
}

/* The error of another rank has its own place, and the rank that failed first. */
KN_TEST(base, errors_of_ranks_are_passed_on_as_they_are)
{
    const char *(*before)(const kn_context *) = kn_context_path;
    kn_context_path = some_path;
    kn_place_enter("train.c", 41);
    static const char *const text[] = { "matmul: no in ln, b.c:7",
                                        "rank 2 failed: matmul: no in ln, b.c:7" };
    for (int i = 0; i < 2; i++) {
        kn_fail_of_rank(2 - i, text[i]);
        KN_CHECK(strcmp(kn_error(), text[1]) == 0);
        kn_clear_error();
    }
    kn_place_enter(NULL, 0);
    kn_context_path = before;
}

KN_TEST(base, errors_call_a_null_unnamed)
{
    const char *volatile none = NULL;
    kn_fail("'%s' and '%s' are alike", none, none);
    KN_CHECK(strcmp(kn_error(), "'unnamed' and 'unnamed' are alike") == 0);
    kn_clear_error();
    const size_t room = sizeof kn_context_get()->error_room;
    char longer[4096];
    memset(longer, 'x', sizeof longer);
    for (size_t n = room - 9; n < room; n++) { /* at the end of the room */
        kn_fail("%.*s%s", (int)n, longer, none);
        KN_CHECK(strlen(kn_error()) < room, "%zu", n);
        kn_clear_error();
    }
}

/* True if an error ends a child in which set_up ran. */
static bool child_aborts(void (*set_up)(void))
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        set_up();
        kn_fail("for the debugger");
        _exit(0);
    }
    KN_CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void set_nothing(void)
{
}

static void set_environment(void)
{
    setenv("KNAP_ABORT", "1", 1);
    kn_context_end();
}

static void set_switch(void)
{
    kn_abort_on_error(true);
}

KN_TEST(base, abort_on_error)
{
    KN_CHECK(!child_aborts(set_nothing));
    KN_CHECK(child_aborts(set_switch));
    KN_CHECK(child_aborts(set_environment));
}

static void *fail_in_thread(void *arg)
{
    KN_CHECK(kn_ok(), "another thread's error is not ours");
    kn_fail("in a thread");
    *(bool *)arg = !kn_ok();
    return NULL;
}

KN_TEST(base, contexts_are_per_thread)
{
    pthread_t t;
    bool failed = false;
    kn_fail("here");
    pthread_create(&t, NULL, fail_in_thread, &failed);
    pthread_join(t, NULL);
    KN_CHECK(failed);
    KN_CHECK_ERROR("here");
}

/* ---- metadata memory --------------------------------------------------------------------- */

KN_TEST(base, metadata_is_counted)
{
    kn_ledger before = kn_ledger_read();
    char *p = kn_host_alloc(1000);
    int *q = kn_host_calloc(10, sizeof *q);
    char *s = kn_host_strdup("hello");
    kn_ledger during = kn_ledger_read();
    KN_CHECK(p && q && s && strcmp(s, "hello") == 0 && q[9] == 0);
    KN_CHECK(during.live[KN_MEM_HOST] >= before.live[KN_MEM_HOST] + 1046);
    KN_CHECK(during.allocations == before.allocations + 3);
    KN_CHECK(during.live_total == before.live_total, "host is not in the total");
    p[999] = 7;
    p = kn_host_realloc(p, 5000);
    KN_CHECK(p && p[999] == 7);
    kn_host_free(p);
    kn_host_free(q);
    kn_host_free(s);
    kn_host_free(NULL);
    kn_ledger after = kn_ledger_read();
    KN_CHECK(after.live[KN_MEM_HOST] == before.live[KN_MEM_HOST]);
    KN_CHECK(after.peak[KN_MEM_HOST] >= before.live[KN_MEM_HOST] + 5000);
}

KN_TEST(base, injected_failures)
{
    kn_memory *m = kn_device_memory(KN_CPU);
    kn_fail_alloc(3);
    void *a = kn_host_alloc(8);
    void *b = kn_take(m, 100, KN_MEM_PARAM);
    KN_CHECK(a && b);
    KN_CHECK_OK();
    REFUSED(kn_host_calloc(1, 8), "out of memory");
    a = kn_host_realloc(a, 16); /* fails once only */
    KN_CHECK(a);
    KN_CHECK(kn_fail_alloc(1) == 4);
    REFUSED(kn_take(m, 100, KN_MEM_PARAM), "parameters");
    KN_CHECK(kn_fail_alloc(1) == 1);
    KN_CHECK(kn_host_realloc(a, 1 << 20) == NULL, "the old block stays");
    KN_CHECK_ERROR("out of memory");
    kn_fail_alloc(0);
    kn_host_free(a);
    kn_give(m, b, 100, KN_MEM_PARAM);
    KN_CHECK(kn_ledger_read().live_total == 0);
}

KN_TEST(base, absurd_sizes_fail)
{
    REFUSED(kn_host_alloc(SIZE_MAX / 2), "out of memory");
    KN_CHECK(kn_host_calloc(SIZE_MAX / 2, 4) == NULL, "the product overflows");
    KN_CHECK_ERROR("out of memory");
    REFUSED(kn_take(kn_device_memory(KN_CPU), SIZE_MAX - 7, KN_MEM_DATA), "data");
    REFUSED(kn_take(kn_device_memory(KN_CPU), (size_t)1 << 50, KN_MEM_DATA), "data");
}

/* ---- threads ----------------------------------------------------------------------------- */

KN_TEST(base, threads_for_work)
{
    KN_CHECK(kn_threads() >= 1);
    kn_set_threads(4);
    KN_CHECK(kn_threads() == 4);
    KN_CHECK(kn_threads_for(0) == 1 && kn_threads_for(1000) == 1);
    KN_CHECK(kn_threads_for(1 << 16) == 2 && kn_threads_for(1 << 30) == 4);
    kn_set_threads(0);
    KN_CHECK(kn_threads() == 1 && kn_threads_for(1 << 30) == 1);
    const int bad[] = { -3, INT_MIN, 4097, INT_MAX };
    for (int i = 0; i < 4; i++) {
        kn_set_threads(bad[i]);
        KN_CHECK(kn_error() && strstr(kn_error(), "1 to 4096 are supported"), "%d", bad[i]);
        kn_clear_error();
    }
    KN_CHECK(kn_threads() == 1);
}
