/* tests/comm/comm_test.h: shared by the tests of communicators: running a function on ranks,
 * buffers of known content, the linear sum that reductions must equal. */
#ifndef KNAP_TESTS_COMM_TEST_H
#define KNAP_TESTS_COMM_TEST_H

#include "tests/kn_test.h"
#include "comm/comm_internal.h"
#include "comm/messages/tcp.h"
#include "kernels/kernels.h"
#include "tests/ports.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREADS_ONLY 1
#endif
#endif
#ifdef __SANITIZE_THREAD__
#define THREADS_ONLY 1
#endif
#ifndef THREADS_ONLY
#define THREADS_ONLY 0 /* ThreadSanitizer runs a thread of its own, which rules out fork */
#endif

/* In a rank: on failure, prints the condition and returns 1. */
#define EXPECT(cond, ...)                                                                          \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: rank %d: %s: ", __FILE__, __LINE__, kn_rank(kn_world()),       \
                    #cond);                                                                        \
            fprintf(stderr, "" __VA_ARGS__);                                                       \
            fprintf(stderr, " %s\n", kn_error() ? kn_error() : "");                                \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

/* Processes, or threads where there can't be any; returns how many failed. */
static inline int spawn(int n, kn_rank_fn fn, void *arg)
{
    return THREADS_ONLY ? kn_spawn_threads(n, fn, arg) : kn_spawn(n, fn, arg);
}

/* A rank that is a host of its own: it speaks to the others over TCP. */
typedef struct host_job {
    kn_rank_fn fn;
    void *arg;
    kn_tcp_place place;
} host_job;

static inline host_job hosts_of(kn_rank_fn fn, void *arg)
{
    return (host_job){
        fn, arg, { .host = "127.0.0.1", .port = kn_test_ports(20), .ports = 1, .job = "hosts" }
    };
}

static inline int host_main(kn_comm *w, void *arg)
{
    const host_job *j = arg;
    kn_comm *world = kn_comm_tcp(&j->place, kn_rank(w), kn_comm_size(w));
    EXPECT(world && kn_rank_enter(world));
    return j->fn(world, j->arg);
}

/* Without processes, threads. */
static inline int spawn_hosts(int n, kn_rank_fn fn, void *arg)
{
    host_job j = hosts_of(fn, arg);
    return THREADS_ONLY ? kn_spawn_threads(n, fn, arg) : kn_spawn(n, host_main, &j);
}

/* Memory of zeros that the processes started from here on share. */
static inline void *shared_bytes(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KN_CHECK(p != MAP_FAILED);
    return p;
}

static inline void on_ranks(int n, kn_rank_fn fn, void *arg)
{
    if (!THREADS_ONLY) {
        int failed = kn_spawn(n, fn, arg);
        KN_CHECK_OK();
        KN_CHECK(failed == 0, "%d of %d processes failed", failed, n);
    }
    if (n % 2 == 0 && !THREADS_ONLY) /* the same protocol, so odd numbers of ranks suffice */
        return;
    int failed = kn_spawn_threads(n, fn, arg);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%d of %d threads failed", failed, n);
}

/* On 1, 2 and 4 threads. */
static inline void on_thread_ranks(kn_rank_fn fn, void *arg)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        KN_CHECK(kn_spawn_threads(ranks, fn, arg) == 0, "%d ranks", ranks);
}

/* Returns once another rank has failed: rank 1 is late, however long the others' times are. */
static inline void wait_for_a_failure(kn_comm *w)
{
    while (w->ops->healthy(w))
        usleep(1000);
}

/* Selects combinations of a test to run: a third of the small counts, some of the large ones, few
 * under sanitizers, which are 7 to 20 times slower. */
static inline bool chosen(int64_t count, int which)
{
    if (THREADS_ONLY || kn_one_in(2) > 1)
        return count > 50000 ? which % 53 == 0 : (which + count) % 19 == 0;
    return which % (count > 100000 ? 17 : count > 50000 ? 7 : 3) == 0;
}

/* ---- buffers --------------------------------------------------------------------------------- */

typedef struct buffer {
    void *p;
    size_t bytes;
    kn_memory *memory; /* NULL: private */
} buffer;

static inline buffer take(kn_comm *w, bool shared, size_t bytes)
{
    buffer b = { NULL, bytes, shared ? kn_comm_memory(w) : NULL };
    b.p = shared ? kn_take(b.memory, bytes, KN_MEM_GATHERED) : malloc(bytes + 1);
    if (b.p)
        memset(b.p, 0x5a, bytes);
    return b;
}

static inline void give(buffer b)
{
    if (b.memory)
        kn_give(b.memory, b.p, b.bytes, KN_MEM_GATHERED);
    else
        free(b.p);
}

/* Values whose sums depend on the order: magnitudes differ by up to 2^12. Repeats after a prime. */
static inline double value(int rank, int64_t i)
{
    enum { PERIOD = 4093 };
    static _Thread_local float table[PERIOD];
    if (table[1] == 0)
        for (uint32_t k = 0, h = 1; k < PERIOD; k++, h = h * 1664525u + 1013904223u)
            table[k] = ldexpf((float)(int32_t)h / 2147483648.0f, (int)(k % 13) - 4);
    return table[(i + rank * 1009) % PERIOD];
}

static inline bool convert(void *dst, kn_dtype d, const void *src, kn_dtype t, int64_t n)
{
    kn_copy_args a = { kn_array_make(dst, d, 1, &n),
                       kn_array_make((void *)(uintptr_t)src, t, 1, &n) };
    return KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_COPY, a);
}

/* Fills dst (dtype t) with value(rank, first ...). */
static inline bool fill(void *dst, kn_dtype t, int rank, int64_t first, int64_t n)
{
    OWNED_BYTES double *v = malloc((size_t)n * sizeof *v + 1);
    for (int64_t i = 0; i < n; i++)
        v[i] = value(rank, first + i);
    bool ok = convert(dst, t, v, KN_F64, n);
    return ok;
}

/* out (dst dtype) = acc + rank 0 + rank 1 + ... linearly, over elements first ... of each
 * source. */
static inline bool linear_sum(void *out, kn_dtype dst, const void *acc, kn_dtype src, int ranks,
                              int64_t first, int64_t n)
{
    OWNED_BYTES double *term = malloc((size_t)n * sizeof *term + 1),
                       *sum = malloc((size_t)n * sizeof *sum + 1);
    OWNED_BYTES char *raw = malloc((size_t)n * 8 + 1);
    bool ok = !acc || convert(sum, KN_F64, acc, dst, n);
    for (int r = 0; r < ranks && ok; r++) {
        ok = fill(raw, src, r, first, n) && convert(term, KN_F64, raw, src, n);
        for (int64_t i = 0; i < n; i++)
            sum[i] = r == 0 && !acc  ? term[i]
                     : dst == KN_F64 ? sum[i] + term[i]
                                     : (double)((float)sum[i] + (float)term[i]);
    }
    ok = ok && convert(out, dst, sum, KN_F64, n);
    return ok;
}

#endif
