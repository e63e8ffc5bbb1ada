/* tests/comm/comm_test.c: every collective on 1 to 4 ranks, as processes and as threads, from
 * shared and private buffers, on inline and worker streams; one rank alone, memory, the trace. Rank
 * functions return a status and never assert (docs/architecture.md). Errors: comm_errors_test.c,
 * comm_contract_test.c. */
#include "kernels/faults.h"
#include "kernels/trace.h"
#include "tests/comm/comm_test.h"
#include "tests/comm/pieces.h"
#include <sys/mman.h>

/* ---- collectives ----------------------------------------------------------------------------- */

static const int64_t counts[] = { 0, 1, 3, 64, 257, 1000, 65537, 300001 };
#define COUNTS (int)(sizeof counts / sizeof *counts)

static int gather_once(kn_comm *w, kn_stream *s, int64_t n, kn_dtype t, int form)
{
    size_t e = kn_dtype_size(t), bytes = (size_t)n * e;
    int size = kn_comm_size(w), rank = kn_rank(w);
    bool in_place = form & 4;
    buffer dst = take(w, form & 1, bytes * (size_t)size), src = take(w, form & 2, bytes);
    char *from = in_place ? (char *)dst.p + (size_t)rank * bytes : src.p;
    for (size_t i = 0; i < bytes; i++)
        from[i] = (char)(i * 7 + (size_t)rank * 31);
    EXPECT(kn_all_gather(w, dst.p, from, n, t, s, "test"));
    EXPECT(kn_stream_sync(s));
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < bytes; i++)
            EXPECT(((char *)dst.p)[(size_t)r * bytes + i] == (char)(i * 7 + (size_t)r * 31),
                   "n %lld %s form %d: byte %zu of rank %d", (long long)n, kn_dtype_name(t), form,
                   i, r);
    give(dst);
    give(src);
    return 0;
}

/* A collective that moves bytes, in one of so many forms. */
typedef struct mover {
    int (*once)(kn_comm *w, kn_stream *s, int64_t n, kn_dtype t, int form);
    int forms, step;
    bool by_rank; /* each rank has another form */
} mover;

static int moves(kn_comm *w, void *arg)
{
    const mover *m = arg;
    static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_U8, KN_I64 };
    kn_stream *side = kn_stream_create(KN_CPU, "side", KN_STREAM_WORKER);
    EXPECT(side != NULL);
    for (int k = 0; k < COUNTS; k++)
        for (int t = 0; t < 4; t++)
            for (int form = 0; form < m->forms; form++) {
                if (!chosen(counts[k], t * m->step + form))
                    continue;
                kn_stream *s = (k + form) % 2 ? side : kn_compute_stream(KN_CPU);
                const int own = m->by_rank ? (form + kn_rank(w)) % m->forms : form;
                if (m->once(w, s, counts[k], dtypes[t], own))
                    return 1;
            }
    kn_stream_destroy(side);
    return 0;
}

KN_TEST(comm, all_gather)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, moves, &(mover){ gather_once, 8, 11, false });
}

KN_TEST(comm, all_to_all)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, moves, &(mover){ to_all_once, 4, 5, true });
}

static const struct {
    kn_dtype dst, src;
} sums[] = { { KN_F32, KN_F32 }, { KN_F32, KN_BF16 }, { KN_BF16, KN_BF16 },
             { KN_F16, KN_F16 }, { KN_F32, KN_F16 },  { KN_F64, KN_F64 } };
#define SUMS (int)(sizeof sums / sizeof *sums)

/* Forms: bits 0, 1: dst, src in shared memory (by rank where bit 4 is set, so that they differ);
 * bits 2, 3: 0 no acc, 1 acc is dst, 2 acc of its own, 3 (all-reduce) dst is src. */
static int sum_once(kn_comm *w, kn_stream *s, bool scatter, int64_t n, int which, int form)
{
    kn_dtype dt = sums[which].dst, st = sums[which].src;
    size_t de = kn_dtype_size(dt), se = kn_dtype_size(st);
    int size = kn_comm_size(w), rank = kn_rank(w), accs = form >> 2 & 3;
    int swap = (form & 16) && rank % 2 ? 3 : 0;
    if (accs == 3 && (scatter || dt != st))
        return 0;
    int64_t total = scatter ? n * size : n, first = scatter ? n * rank : 0;
    buffer dst = take(w, (form ^ swap) & 1, (size_t)n * de), acc = take(w, true, (size_t)n * de);
    buffer src = take(w, (form ^ swap) & 2, (size_t)total * se),
           want = take(w, false, (size_t)n * de);
    EXPECT(fill(src.p, st, rank, 0, total));
    EXPECT(fill(acc.p, dt, 77, first, n));
    const void *from = accs == 1 ? dst.p : accs == 2 ? acc.p : NULL;
    EXPECT(linear_sum(want.p, dt, from ? acc.p : NULL, st, size, first, n));
    if (accs == 1)
        memcpy(dst.p, acc.p, dst.bytes);
    void *to = accs == 3 ? src.p : dst.p;
    EXPECT(scatter ? kn_reduce_scatter(w, to, from, src.p, n, dt, st, s, "test")
                   : kn_all_reduce(w, to, from, src.p, n, dt, st, s, "test"));
    EXPECT(kn_stream_sync(s));
    EXPECT(memcmp(to, want.p, (size_t)n * de) == 0, "n %lld %s to %s form %d", (long long)n,
           kn_dtype_name(st), kn_dtype_name(dt), form);
    give(dst);
    give(acc);
    give(src);
    give(want);
    return 0;
}

static int sums_rank(kn_comm *w, void *arg)
{
    bool scatter = *(bool *)arg;
    kn_stream *side = kn_stream_create(KN_CPU, "side", KN_STREAM_WORKER);
    EXPECT(side != NULL);
    for (int k = 0; k < COUNTS; k++)
        for (int which = 0; which < SUMS; which++)
            for (int form = 0; form < 32; form++) {
                if (!chosen(counts[k], which * 37 + form))
                    continue;
                kn_stream *s = (form + k) % 3 ? kn_compute_stream(KN_CPU) : side;
                if (sum_once(w, s, scatter, counts[k], which, form))
                    return 1;
            }
    kn_stream_destroy(side);
    return 0;
}

KN_TEST(comm, reduce_scatter)
{
    bool scatter = true;
    for (int n = 1; n <= 4; n++)
        on_ranks(n, sums_rank, &scatter);
}

KN_TEST(comm, all_reduce)
{
    bool scatter = false;
    for (int n = 1; n <= 4; n++)
        on_ranks(n, sums_rank, &scatter);
}

/* More ranks than one kernel call adds. */
static int many_rank(kn_comm *w, void *arg)
{
    (void)arg;
    for (int form = 0; form < 12; form++) {
        kn_stream *s = kn_compute_stream(KN_CPU);
        if (sum_once(w, s, form % 2, 260, 2, form) || sum_once(w, s, form % 2, 37, 0, form) ||
            (form == 4 && sum_once(w, s, false, 2500, 2, form)))
            return 1;
    }
    return 0;
}

KN_TEST(comm, seventy_ranks)
{
    if (THREADS_ONLY)
        KN_SKIP("a matter of arithmetic");
    KN_CHECK(kn_spawn_threads(70, many_rank, NULL) == 0);
}

static int scalars_rank(kn_comm *w, void *arg)
{
    (void)arg;
    kn_stream *s = kn_compute_stream(KN_CPU);
    int size = kn_comm_size(w), rank = kn_rank(w);
    static const int64_t lengths[] = { 0, 1, 4, 128, 129, 1000 };
    for (int k = 0; k < 6; k++) {
        int64_t n = lengths[k], i64[1000];
        float f32[1000];
        for (int64_t i = 0; i < n; i++) {
            i64[i] = (rank + 1) * (i - 3) * (INT64_C(1) << 40);
            f32[i] = (float)((rank * 5 + i) % 7) - 9;
        }
        if (n > 2)
            f32[2] = rank == size / 2 ? NAN : 1;
        EXPECT(kn_all_reduce_i64(w, i64, n, s, "i64") && kn_all_reduce_max(w, f32, n, s, "max"));
        for (int64_t i = 0; i < n; i++) {
            float most = -INFINITY;
            for (int r = 0; r < size; r++)
                most = fmaxf(most, (float)((r * 5 + i) % 7) - 9);
            EXPECT(i64[i] == size * (size + 1) / 2 * (i - 3) * (INT64_C(1) << 40));
            EXPECT(i == 2 ? isnan(f32[i]) : f32[i] == most, "i %d: %g", (int)i, (double)f32[i]);
        }
    }
    return 0;
}

KN_TEST(comm, scalars)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, scalars_rank, NULL);
}

static int broadcast_rank(kn_comm *w, void *arg)
{
    (void)arg;
    kn_stream *s = kn_compute_stream(KN_CPU);
    static const size_t sizes[] = { 0, 1, 1000, 1025, 2000003 };
    for (int k = 0; k < 5; k++)
        for (int root = 0; root < kn_comm_size(w); root++)
            for (int form = 0; form < 4; form++) {
                bool shared = form < 2 ? form : (form + kn_rank(w)) % 2;
                if (sizes[k] > 50000 && (form + root) % kn_one_in(4))
                    continue;
                buffer b = take(w, shared, sizes[k]);
                unsigned char *p = b.p;
                for (size_t i = 0; i < sizes[k]; i++)
                    p[i] = (unsigned char)(kn_rank(w) == root ? i * 13 + 5 : 0);
                EXPECT(kn_broadcast(w, p, (int64_t)sizes[k], root, s, NULL));
                for (size_t i = 0; i < sizes[k]; i++)
                    EXPECT(p[i] == (unsigned char)(i * 13 + 5), "root %d size %zu", root, sizes[k]);
                EXPECT(kn_barrier(w, s, "b"));
                give(b);
            }
    EXPECT(kn_agree(w, true));
    EXPECT(!kn_agree(w, kn_rank(w) != kn_comm_size(w) - 1));
    EXPECT(kn_agree(w, true));
    return 0;
}

KN_TEST(comm, broadcast_barrier_agree)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, broadcast_rank, NULL);
}

/* A rank that is past a barrier knows that the late rank arrived. */
static int barrier_rank(kn_comm *w, void *arg)
{
    _Atomic int *came = arg;
    for (int round = 0; round < 12; round++) {
        if (kn_rank(w) == round % kn_comm_size(w))
            usleep(1000);
        (*came)++;
        EXPECT(kn_barrier(w, kn_compute_stream(KN_CPU), "b"));
        EXPECT(*came >= (round + 1) * kn_comm_size(w), "round %d: %d came", round, *came);
    }
    return 0;
}

KN_TEST(comm, nobody_passes_a_barrier_early)
{
    _Atomic int *came =
        mmap(NULL, sizeof *came, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int n = 2; n <= 4; n++)
        for (int threads = THREADS_ONLY; threads < 2; threads++) {
            *came = 0;
            int failed = (threads ? kn_spawn_threads : kn_spawn)(n, barrier_rank, came);
            KN_CHECK(failed == 0, "%d ranks, threads %d: %d failed", n, threads, failed);
        }
    munmap(came, sizeof *came);
}

/* ---- several communicators ------------------------------------------------------------------- */

/* Gathers on one communicator and reduces on another, at the same time on two worker streams. */
static int overlap_rank(kn_comm *w, void *arg)
{
    (void)arg;
    enum { N = 20001, TIMES = THREADS_ONLY ? 10 : 30 };
    int size = kn_comm_size(w), rank = kn_rank(w);
    kn_comm *a = kn_comm_dup(w, "gather"), *b = kn_comm_dup(w, "reduce");
    kn_stream *sa = kn_stream_create(KN_CPU, "gather", KN_STREAM_WORKER);
    kn_stream *sb = kn_stream_create(KN_CPU, "reduce", KN_STREAM_WORKER);
    EXPECT(a && b && sa && sb);
    buffer all = take(w, true, (size_t)size * N * 4), mine = take(w, false, N * 4);
    buffer grad = take(w, true, (size_t)size * N * 4), sum = take(w, false, N * 4);
    buffer want = take(w, false, N * 4);
    EXPECT(fill(mine.p, KN_F32, rank, 0, N) && fill(grad.p, KN_F32, rank, 0, (int64_t)size * N));
    for (int i = 0; i < TIMES; i++) {
        EXPECT(kn_all_gather(a, all.p, mine.p, N, KN_F32, sa, "a"));
        EXPECT(kn_reduce_scatter(b, sum.p, NULL, grad.p, N, KN_F32, KN_F32, sb, "b"));
        EXPECT(kn_agree(w, true)); /* and on the world at the same time */
    }
    EXPECT(kn_stream_sync(sa) && kn_stream_sync(sb));
    EXPECT(linear_sum(want.p, KN_F32, NULL, KN_F32, size, (int64_t)rank * N, N));
    EXPECT(memcmp(sum.p, want.p, N * 4) == 0);
    for (int r = 0; r < size; r++) {
        EXPECT(fill(want.p, KN_F32, r, 0, N));
        EXPECT(memcmp((float *)all.p + r * N, want.p, N * 4) == 0);
    }
    kn_stream_destroy(sa);
    kn_stream_destroy(sb);
    give(all);
    give(mine);
    give(grad);
    give(sum);
    give(want);
    return 0;
}

KN_TEST(comm, two_at_once)
{
    for (int n = 1; n <= 3; n++)
        on_ranks(n, overlap_rank, NULL);
}

static int split_rank(kn_comm *w, void *arg)
{
    (void)arg;
    kn_stream *s = kn_compute_stream(KN_CPU);
    int size = kn_comm_size(w), rank = kn_rank(w);
    kn_comm *g = kn_comm_split(w, rank % 2, -rank, "halves"); /* the largest rank comes first */
    EXPECT(g != NULL);
    int members = rank % 2 ? size / 2 : (size + 1) / 2;
    EXPECT(kn_comm_size(g) == members);
    EXPECT(kn_rank(g) == members - 1 - rank / 2);
    int64_t all[4] = { 0 }, me = rank;
    EXPECT(kn_all_gather(g, all, &me, 1, KN_I64, s, NULL));
    for (int i = 0; i < members; i++)
        EXPECT(all[i] == 2 * (members - 1 - i) + rank % 2);
    kn_comm *h = kn_comm_split(w, rank == 0 ? -1 : 5, 0, "others");
    EXPECT((h == NULL) == (rank == 0) && kn_ok());
    int64_t one = 1;
    EXPECT(!h || (kn_all_reduce_i64(h, &one, 1, s, NULL) && one == size - 1));
    kn_comm *d = kn_comm_dup(g, "again");
    one = 1;
    EXPECT(d && kn_all_reduce_i64(d, &one, 1, s, NULL) && one == members);
    EXPECT(kn_comm_memory(d) == kn_comm_memory(w) && strcmp(kn_comm_backend(d), "local") == 0);
    return 0;
}

KN_TEST(comm, split)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, split_rank, NULL);
}

static int too_many_rank(kn_comm *w, void *arg)
{
    (void)arg;
    int made = 1;
    while (kn_comm_dup(w, "more"))
        made++;
    EXPECT(made == 256 && kn_error() && strstr(kn_error(), "more than 256 communicators"));
    return 0;
}

KN_TEST(comm, too_many_communicators)
{
    on_ranks(2, too_many_rank, NULL);
}

/* ---- one rank, memory, the trace ------------------------------------------------------------- */

KN_TEST(comm, self)
{
    kn_comm *w = kn_init(NULL, NULL);
    KN_CHECK(w && kn_world() == w && kn_comm_size(w) == 1 && kn_rank(w) == 0);
    KN_CHECK(strcmp(kn_comm_backend(w), "self") == 0);
    kn_stream *s = kn_compute_stream(KN_CPU);
    float a[3] = { 1, 2, 3 }, b[3] = { 10, 20, 30 }, c[3];
    int64_t n[1] = { 5 };
    KN_CHECK(kn_all_gather(w, c, a, 3, KN_F32, s, NULL) && memcmp(a, c, sizeof a) == 0);
    KN_CHECK(kn_reduce_scatter(w, c, b, a, 3, KN_F32, KN_F32, s, NULL) && c[2] == 33);
    KN_CHECK(kn_all_reduce(w, c, NULL, b, 3, KN_F32, KN_F32, s, NULL) && c[2] == 30);
    KN_CHECK(kn_all_reduce_i64(w, n, 1, s, NULL) && n[0] == 5 && kn_barrier(w, s, NULL));
    KN_CHECK(kn_agree(w, true) && !kn_agree(w, false));
    kn_comm *d = kn_comm_dup(w, "d"), *none = kn_comm_split(w, -1, 0, "none");
    KN_CHECK(d && !none && kn_comm_size(d) == 1);
    KN_CHECK_OK();
    kn_comm_poison(d, "enough");
    REFUSED(kn_barrier(w, s, NULL), "enough");
    KN_CHECK(kn_finish() == 0);
}

static int memory_rank(kn_comm *w, void *arg)
{
    (void)arg;
    kn_memory *m = kn_comm_memory(w);
    kn_ledger before = kn_ledger_read();
    void *a = kn_take(m, 1000000, KN_MEM_GATHERED), *b = kn_take(m, 100, KN_MEM_GATHERED);
    EXPECT(a && b && (uintptr_t)a % KN_ALIGN == 0 && (uintptr_t)b % KN_ALIGN == 0);
    memset(a, 1, 1000000);
    int64_t live = kn_ledger_read().live[KN_MEM_GATHERED];
    EXPECT(live == 1000000 + 128, "live %lld", (long long)live);
    kn_give(m, a, 1000000, KN_MEM_GATHERED);
    void *c = kn_take(m, 990000, KN_MEM_GATHERED); /* the same block, its pages in place */
    EXPECT(c == a && ((char *)c)[5] == 1);
    kn_give(m, b, 100, KN_MEM_GATHERED);
    kn_give(m, c, 990000, KN_MEM_GATHERED);
    EXPECT(kn_ledger_read().live_total == before.live_total);
    EXPECT(kn_take(m, (size_t)1 << 50, KN_MEM_GATHERED) == NULL && !kn_ok());
    kn_clear_error();
    return 0;
}

KN_TEST(comm, memory)
{
    on_ranks(2, memory_rank, NULL);
}

static int staging_rank(kn_comm *w, void *arg)
{
    (void)arg;
    buffer src = take(w, false, 4000000), dst = take(w, false, 8000000);
    EXPECT(kn_ledger_read().live[KN_MEM_COMM] == 0);
    EXPECT(kn_all_gather(w, dst.p, src.p, 1000000, KN_F32, kn_compute_stream(KN_CPU), "u"));
    EXPECT(kn_ledger_read().live[KN_MEM_COMM] > 0); /* bounce buffers, far less than the data */
    EXPECT(kn_ledger_read().live[KN_MEM_COMM] <= 2 << 20);
    EXPECT(kn_barrier(w, kn_compute_stream(KN_CPU), "u"));
    if (kn_rank(w) == 0) { /* an allocation that fails inside a collective of a new communicator */
        kn_comm *d = kn_comm_dup(w, "d");
        EXPECT(d);
        kn_fail_alloc(1);
        EXPECT(!kn_all_gather(d, dst.p, src.p, 1000000, KN_F32, kn_compute_stream(KN_CPU), "u"));
        kn_fail_alloc(0);
    } else {
        kn_comm *d = kn_comm_dup(w, "d");
        EXPECT(!kn_all_gather(d, dst.p, src.p, 1000000, KN_F32, kn_compute_stream(KN_CPU), "u"));
        EXPECT(strstr(kn_error(), "rank 0 failed: "));
    }
    give(src);
    give(dst);
    return 0;
}

KN_TEST(comm, staging)
{
    on_ranks(2, staging_rank, NULL);
}

static int trace_rank(kn_comm *w, void *arg)
{
    (void)arg;
    float x[2] = { 0 };
    kn_trace_start(64);
    kn_comm_slow(w, 0.03, 0);
    double begin = kn_now();
    EXPECT(kn_all_gather(w, x, x + kn_rank(w), 1, KN_F32, kn_compute_stream(KN_CPU), "fc1"));
    EXPECT(kn_now() - begin >= 0.03);
    kn_comm_slow(w, 0, 0);
    kn_trace_event *e;
    size_t n = kn_trace_stop(&e), found = 0;
    for (size_t i = 0; i < n; i++)
        if (strcmp(e[i].what, "all_gather fc1") == 0 && strcmp(e[i].provider, "local") == 0)
            found += e[i].bytes > 0 && e[i].end - e[i].begin >= 0.03;
    kn_host_free(e);
    EXPECT(found == 1);
    return 0;
}

KN_TEST(comm, trace_and_slow)
{
    on_ranks(2, trace_rank, NULL);
}
