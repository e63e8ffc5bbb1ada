/* tests/kernels/memory_test.c: the ledger of tensor bytes, the CPU pool, out of memory. */
#include "kernels/context.h"
#include "kernels/kernels_internal.h"
#include "tests/kn_test.h"

#include <unistd.h>

static void *limit_of_a_new_thread(void *limit)
{
    *(int64_t *)limit = kn_context_get()->memory_limit;
    if (!kn_ok())
        *(int64_t *)limit = strstr(kn_error(), "must be a number of bytes") ? -1 : -2;
    kn_context_end();
    return NULL;
}

KN_TEST(memory, limits_are_sizes)
{
    static const struct {
        const char *text;
        int64_t bytes; /* -1: an error */
    } cases[] = { { "0", 0 },
                  { "", 0 },
                  { "12345", 12345 },
                  { "4K", 4096 },
                  { "3m", 3 << 20 },
                  { "4G", INT64_C(4) << 30 },
                  { "4GB", INT64_C(4) << 30 },
                  { "4GiB", INT64_C(4) << 30 },
                  { "2T", INT64_C(2) << 40 },
                  { "abc", -1 },
                  { "G", -1 },
                  { "-1", -1 },
                  { " 1", -1 },
                  { "+1", -1 },
                  { "1.5G", -1 },
                  { "4GG", -1 },
                  { "4X", -1 },
                  { "4B", -1 },
                  { "1e9", -1 },
                  { "0x10", -1 },
                  { "9223372036854775808", -1 },
                  { "8388608T", -1 },
                  { "8388607T", INT64_C(8388607) << 40 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pthread_t thread;
        int64_t limit = -3;
        setenv("KNAP_MEMORY_LIMIT", cases[i].text, 1);
        KN_CHECK(pthread_create(&thread, NULL, limit_of_a_new_thread, &limit) == 0);
        pthread_join(thread, NULL);
        KN_CHECK(limit == cases[i].bytes, "'%s': %lld", cases[i].text, (long long)limit);
    }
    unsetenv("KNAP_MEMORY_LIMIT");
}

KN_TEST(memory, ledger_by_category)
{
    kn_memory *m = kn_device_memory(KN_CPU);
    kn_ledger_reset_peaks();
    void *a = kn_take(m, 1, KN_MEM_PARAM);
    void *b = kn_take(m, 640, KN_MEM_GRAD);
    kn_ledger l = kn_ledger_read();
    KN_CHECK(l.live[KN_MEM_PARAM] == 64 && l.live[KN_MEM_GRAD] == 640 && l.live_total == 704);
    kn_give(m, b, 640, KN_MEM_GRAD);
    void *c = kn_take(m, 65, KN_MEM_OPTIM);
    l = kn_ledger_read();
    KN_CHECK(l.live[KN_MEM_GRAD] == 0 && l.peak[KN_MEM_GRAD] == 640);
    KN_CHECK(l.live[KN_MEM_OPTIM] == 128 && l.live_total == 192 && l.peak_total == 704);
    kn_ledger_reset_peaks();
    l = kn_ledger_read();
    KN_CHECK(l.peak_total == 192 && l.peak[KN_MEM_GRAD] == 0);
    kn_give(m, a, 1, KN_MEM_PARAM);
    kn_give(m, c, 65, KN_MEM_OPTIM);
    KN_CHECK(kn_ledger_read().live_total == 0);
}

KN_TEST(memory, nothing_is_a_valid_pointer)
{
    for (int d = KN_CPU; d <= KN_META; d++) {
        kn_memory *m = kn_device_memory(d);
        void *p = kn_take(m, 0, KN_MEM_PARAM);
        KN_CHECK(p != NULL && kn_ledger_read().live_total == 0);
        kn_give(m, p, 0, KN_MEM_PARAM);
        kn_give(m, NULL, 100, KN_MEM_PARAM);
    }
    KN_CHECK_OK();
}

/* Sizes around every class boundary: aligned, writable to the last byte, not overlapping. */
KN_TEST(memory, blocks_do_not_overlap)
{
    enum { N = 600 };
    static unsigned char *p[N];
    static size_t size[N];
    kn_memory *m = kn_device_memory(KN_CPU);
    uint64_t x = 88172645463325252u;
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < N; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            size[i] = (size_t)(x % (i % 60 == 0 ? 5000000 : i % 7 == 0 ? 200000 : 3000)) + 1;
            p[i] = kn_take(m, size[i], KN_MEM_ACTIVATION);
            KN_CHECK(p[i] && (uintptr_t)p[i] % KN_ALIGN == 0);
            memset(p[i], i & 255, size[i]);
        }
        for (int i = N - 1; i >= 0; i -= 1 + round % 2) {
            KN_CHECK(p[i][0] == (i & 255) && p[i][size[i] - 1] == (i & 255), "block %d", i);
            kn_give(m, p[i], size[i], KN_MEM_ACTIVATION);
            p[i] = NULL;
        }
        if (round == 3)
            kn_memory_trim(KN_CPU); /* while blocks are in use */
        for (int i = 0; i < N; i++) {
            KN_CHECK(!p[i] || (p[i][0] == (i & 255) && p[i][size[i] / 2] == (i & 255)));
            kn_give(m, p[i], size[i], KN_MEM_ACTIVATION);
        }
        KN_CHECK(kn_ledger_read().live_total == 0);
    }
    kn_memory_trim(KN_CPU);
}

static int64_t resident_bytes(void)
{
    long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &pages, &resident) != 2)
        resident = 0;
    if (f)
        fclose(f);
    return resident * sysconf(_SC_PAGESIZE);
}

/* A sanitizer maps pages of its own, too. */
static bool pool_is_plain(void)
{
    const char *env = getenv("KNAP_POOL");
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#endif
    return env && strcmp(env, "0") == 0;
}

KN_TEST(memory, keeps_pages_until_trimmed)
{
    const size_t size = 28 << 20;
    kn_memory *m = kn_device_memory(KN_CPU);
    if (pool_is_plain())
        KN_SKIP("the pool is off");
    void *p = kn_take(m, size, KN_MEM_ACTIVATION);
    memset(p, 1, size);
    kn_give(m, p, size, KN_MEM_ACTIVATION);
    int64_t kept = resident_bytes();
    void *q = kn_take(m, size - 100, KN_MEM_ACTIVATION);
    KN_CHECK(q == p, "the same call gets the same warm block");
    kn_give(m, q, size - 100, KN_MEM_ACTIVATION);
    kn_memory_trim(KN_CPU);
    KN_CHECK(resident_bytes() < kept - (int64_t)size / 2, "%lld -> %lld", (long long)kept,
             (long long)resident_bytes());
}

/* The pool maps at most 1/8 more than requested. */
KN_TEST(memory, waste_is_bounded)
{
    enum { N = 64 };
    void *p[N];
    kn_memory *m = kn_device_memory(KN_CPU);
    if (pool_is_plain())
        KN_SKIP("the pool is off");
    int64_t asked = 0, before = resident_bytes();
    for (size_t i = 0; i < N; i++) {
        size_t size = (300 << 10) + i * 8191;
        p[i] = kn_take(m, size, KN_MEM_ACTIVATION);
        KN_CHECK(p[i]);
        memset(p[i], 1, (size + 63) / 64 * 64);
        asked += (int64_t)size;
    }
    int64_t used = resident_bytes() - before;
    KN_CHECK((double)used < 1.125 * (double)asked + (1 << 20), "%lld for %lld", (long long)used,
             (long long)asked);
    for (size_t i = 0; i < N; i++)
        kn_give(m, p[i], (300 << 10) + i * 8191, KN_MEM_ACTIVATION);
    kn_memory_trim(KN_CPU);
}

KN_TEST(memory, limit)
{
    setenv("KNAP_MEMORY_LIMIT", "1048576", 1);
    kn_context_end(); /* the next context reads it */
    kn_memory *m = kn_device_memory(KN_CPU);
    void *a = kn_take(m, 800000, KN_MEM_PARAM);
    KN_CHECK(a);
    KN_CHECK(kn_take(m, 300000, KN_MEM_ACTIVATION) == NULL);
    KN_CHECK(strstr(kn_error(), "300000 bytes") && strstr(kn_error(), "activations") &&
             strstr(kn_error(), "live: parameters 0.8 MiB") && strstr(kn_error(), "recompute"));
    KN_CHECK(kn_ledger_read().live_total == 800000 && kn_ledger_read().peak_total == 800000);
    kn_clear_error();
    void *b = kn_take(m, 200000, KN_MEM_ACTIVATION);
    KN_CHECK(b);
    kn_give(m, b, 200000, KN_MEM_ACTIVATION);
    kn_give(m, a, 800000, KN_MEM_PARAM);
    unsetenv("KNAP_MEMORY_LIMIT");
    kn_context_end();
    KN_CHECK(kn_context_get()->memory_limit == 0);
}

static void *churn(void *arg)
{
    kn_memory *m = kn_device_memory(KN_CPU);
    uintptr_t tag = (uintptr_t)arg;
    for (size_t i = 0; i < 3000; i++) {
        size_t n = 64 + (i * 37 + tag * 11) % 4000, big = 100000 + i % 5 * 50000;
        unsigned char *a = kn_take(m, n, KN_MEM_COMM), *b = kn_take(m, big, KN_MEM_COMM);
        if (!a || !b)
            return (void *)1;
        memset(a, (int)tag, n);
        b[0] = b[big - 1] = (unsigned char)tag;
        if (a[n - 1] != tag || b[0] != tag || b[big - 1] != tag)
            return (void *)2;
        kn_give(m, a, n, KN_MEM_COMM);
        kn_give(m, b, big, KN_MEM_COMM);
    }
    return kn_ledger_read().live_total ? (void *)3 : NULL;
}

KN_TEST(memory, threads_share_the_pool)
{
    pthread_t t[3];
    for (uintptr_t i = 0; i < 3; i++)
        KN_CHECK(pthread_create(&t[i], NULL, churn, (void *)(i + 1)) == 0);
    for (int i = 0; i < 3; i++) {
        void *status;
        pthread_join(t[i], &status);
        KN_CHECK(status == NULL, "thread %d: status %d", i, (int)(intptr_t)status);
    }
}

KN_TEST(memory, no_such_device)
{
    if (kn_device_table_of(KN_CUDA))
        KN_SKIP("this build has CUDA");
    REFUSED(kn_device_memory(KN_CUDA), "supported: cpu, meta");
    REFUSED(kn_stream_create(KN_CUDA, "x", KN_STREAM_AUTO), "cuda");
    kn_memory_trim(KN_CUDA);
    KN_CHECK_OK();
}

/* On meta tensors may have any size, but not beyond what the counts hold. */
KN_TEST(memory, counts_do_not_overflow)
{
    kn_memory *m = kn_device_memory(KN_META);
    const size_t half = ((size_t)1 << 61) - 4096;
    const int64_t before = kn_ledger_read().live_total;
    void *a = kn_take(m, half, KN_MEM_PARAM), *b = kn_take(m, half, KN_MEM_GRAD);
    KN_CHECK(a && b);
    REFUSED(kn_take(m, half, KN_MEM_ACTIVATION),
            "more than 2^62, which can't be counted, on meta neither");
    kn_ledger full = kn_ledger_read();
    KN_CHECK(full.live_total > (int64_t)half && full.peak_total >= full.live_total);
    kn_give(m, a, half, KN_MEM_PARAM);
    KN_CHECK((a = kn_take(m, half, KN_MEM_ACTIVATION)));
    kn_give(m, a, half, KN_MEM_ACTIVATION), kn_give(m, b, half, KN_MEM_GRAD);
    KN_CHECK(kn_ledger_read().live_total == before);
}
