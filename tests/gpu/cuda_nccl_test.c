/* tests/gpu/cuda_nccl_test.c: collectives of GPU tensors through NCCL, without a GPU and without
 * NCCL: a CUDA fake runtime (tests/gpu/fake_cuda/fake.h), kernels on the host, a library in the
 * place of NCCL's (fake_nccl/fake.h), all in nccl_ranks.h. Ranks are processes. Training over it:
 * device_test.c, which this program has, too. */
#include "comm/comm_internal.h"
#include "comm/nccl/nccl.h"
#include "fsdp/mesh.h"
#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/gpu/nccl_ranks.h"

/* ---- collectives ----------------------------------------------------------------------------- */

enum { N = 20000 };
static const struct {
    kn_dtype dst, src;
} sums[] = { { KN_F32, KN_F32 }, { KN_F32, KN_BF16 }, { KN_BF16, KN_BF16 }, { KN_F64, KN_F64 } };

static bool sum_is(const void *got, kn_dtype dst, kn_dtype src, const void *acc, int n, int64_t at)
{
    size_t bytes = N * kn_dtype_size(dst);
    OWNED_BYTES char *want = malloc(bytes);
    bool same = linear_sum(want, dst, acc, src, n, at, N) && memcmp(want, got, bytes) == 0;
    return same;
}

/* N = 20000 exceeds the message size of the fake library. All bits: its sums are in rank order;
 * with an accumulator it takes deterministic mode for that, with every second number of ranks all
 * calls take it. */
static int sums_rank(kn_comm *w)
{
    int n = kn_comm_size(w), rank = kn_rank(w);
    kn_memory *m = kn_device_memory(KN_CUDA);
    kn_stream *s = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    for (int k = 0; k < 8; k++) {
        kn_dtype dst = sums[k / 2].dst, src = sums[k / 2].src;
        size_t e = kn_dtype_size(src), d = kn_dtype_size(dst);
        void *from = gpu(m, NULL, (size_t)n * N * e), *to = gpu(m, NULL, N * d);
        void *acc = k % 2 ? gpu(m, NULL, N * d) : NULL;
        EXPECT(from && to && fill(from, src, rank, 0, (int64_t)n * N));
        EXPECT(!acc || fill(acc, dst, 77, 0, N));
        kn_cuda_deterministic(k % 2 || n % 2);
        EXPECT(kn_reduce_scatter(w, to, acc, from, N, dst, src, s, "rs") && kn_stream_sync(s));
        EXPECT(sum_is(to, dst, src, acc, n, rank * (int64_t)N), "reduce_scatter %d", k);
        EXPECT(kn_all_reduce(w, to, acc, from, N, dst, src, s, "ar") && kn_stream_sync(s));
        EXPECT(sum_is(to, dst, src, acc, n, 0), "all_reduce %d", k);
        kn_give(m, from, (size_t)n * N * e + 1, KN_MEM_DATA);
        kn_give(m, to, N * d + 1, KN_MEM_DATA);
        if (acc)
            kn_give(m, acc, N * d + 1, KN_MEM_DATA);
    }
    kn_stream_destroy(s);
    return 0;
}

/* Four buffers in one group of NCCL's calls, of which some are exchanged and some are NCCL's to
 * add; the second time all with accumulators. */
static int pieces_rank(kn_comm *w)
{
    int n = kn_comm_size(w), rank = kn_rank(w);
    kn_memory *m = kn_device_memory(KN_CUDA);
    kn_stream *s = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    for (int k = 0; k < 2; k++) {
        kn_comm_piece p[4], g[4];
        kn_cuda_deterministic(k);
        for (int i = 0; i < 4; i++) {
            size_t e = kn_dtype_size(sums[i].src), d = kn_dtype_size(sums[i].dst);
            void *from = gpu(m, NULL, (size_t)n * N * e), *acc = k ? gpu(m, NULL, N * d) : NULL;
            void *all = gpu(m, NULL, (size_t)n * N * d);
            p[i] = (kn_comm_piece){ gpu(m, NULL, N * d), acc, from, N, sums[i].dst, sums[i].src };
            g[i] = (kn_comm_piece){ all, NULL, p[i].dst, N, sums[i].dst, sums[i].dst };
            EXPECT(from && all && p[i].dst && fill(from, sums[i].src, rank, 0, (int64_t)n * N));
            EXPECT(!acc || fill(acc, sums[i].dst, 77, 0, N));
        }
        EXPECT(kn_reduce_scatter_pieces(w, p, 4, s, "rs") && kn_all_gather_pieces(w, g, 4, s, "g"));
        EXPECT(kn_stream_sync(s));
        for (int i = 0; i < 4; i++)
            for (int r = 0; r < n; r++)
                EXPECT(sum_is((char *)g[i].dst + (size_t)r * N * kn_dtype_size(sums[i].dst),
                              sums[i].dst, sums[i].src, p[i].acc, n, r * (int64_t)N),
                       "buffer %d, rank %d", i, r);
        EXPECT(kn_all_reduce_pieces(w, p, 4, s, "ar") && kn_stream_sync(s));
        for (int i = 0; i < 4; i++)
            EXPECT(sum_is(p[i].dst, sums[i].dst, sums[i].src, p[i].acc, n, 0), "buffer %d", i);
    }
    kn_stream_destroy(s);
    return 0;
}

KN_TEST(cuda_nccl, several_buffers_in_one_call)
{
    for (int n = 1; n <= 8; n += 1 + n / 4) {
        nccl->polls = 3 * n - 3;
        good(n, pieces_rank);
    }
}

static int others_rank(kn_comm *w)
{
    int n = kn_comm_size(w), rank = kn_rank(w);
    kn_memory *m = kn_device_memory(KN_CUDA);
    kn_stream *s = kn_compute_stream(KN_CUDA);
    int64_t two[2] = { rank, 5 };
    float most[3] = { (float)rank, (float)-rank, rank == 0 ? NAN : 1 };
    int64_t *i = gpu(m, two, sizeof two);
    float *f = gpu(m, most, sizeof most);
    char *all = gpu(m, NULL, (size_t)n * N);
    memset(all + (size_t)rank * N, rank + 1, N);
    EXPECT(kn_all_gather(w, all, all + (size_t)rank * N, N, KN_U8, s, "g"));
    char *mine = gpu(m, NULL, (size_t)n * N);
    EXPECT(kn_all_to_all(w, mine, all, N, KN_U8, s, "x"));
    EXPECT(kn_all_reduce_i64(w, i, 2, s, "i") && kn_all_reduce_max(w, f, 3, s, "m"));
    EXPECT(kn_stream_sync(s));
    for (int k = 0; k < n * N; k++)
        EXPECT(all[k] == k / N + 1 && mine[k] == rank + 1, "byte %d is %d", k, all[k]);
    EXPECT(i[0] == n * (n - 1) / 2 && i[1] == 5 * n);
    EXPECT(f[0] == (float)(n - 1) && f[1] == 0 && isnan(f[2]), "%g %g", (double)f[0], (double)f[1]);
    i[0] = rank == n - 1 ? 99 : 0;
    EXPECT(kn_broadcast(w, i, 8, n - 1, s, "b") && kn_barrier(w, s, "e") && kn_stream_sync(s));
    EXPECT(i[0] == 99);
    return 0;
}

KN_TEST(cuda_nccl, collectives)
{
    for (int n = 1; n <= 8; n += 1 + n / 4) {
        nccl->polls = 3 * n - 3;
        good(n, others_rank);
        good(n, sums_rank);
    }
}

/* NCCL finishes most calls some 10 us after it returned: a sleep of the host would take longer. A
 * call that takes long leaves the processor to others. */
static int settling_rank(kn_comm *w)
{
    int64_t one = 1, *i = gpu(kn_device_memory(KN_CUDA), &one, sizeof one);
    kn_stream *s = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    EXPECT(kn_all_reduce_i64(w, i, 1, s, "first") && kn_stream_sync(s));
    nccl->busy_us = 100, naps = 0;
    for (int k = 0; k < 10; k++)
        EXPECT(kn_all_reduce_i64(w, i, 1, s, "quick"));
    EXPECT(naps == 0, "the host slept %d times for calls of 100 us", naps);
    nccl->busy_us = 20000;
    EXPECT(kn_all_reduce_i64(w, i, 1, s, "slow"));
    EXPECT(naps > 0, "the host did not sleep in a call of 20 ms");
    nccl->busy_us = 0;
    EXPECT(kn_stream_sync(s));
    kn_stream_destroy(s);
    return 0;
}

KN_TEST(cuda_nccl, quick_calls_are_not_slept_through)
{
    nccl->polls = 1;
    good(2, settling_rank);
}

/* ---- meshes ---------------------------------------------------------------------------------- */

/* 2 replicas of 2 shards; a group without this rank; ranks in another order; a copy of a part. */
static int mesh_rank(kn_comm *w)
{
    int rank = kn_rank(w);
    EXPECT(kn_comm_memory_on(w, KN_CUDA)); /* makes the world's communicator */
    kn_comm *shard = kn_comm_split(w, rank / 2, rank, "shard");
    kn_comm *replica = kn_comm_split(w, rank % 2, rank, "replicate");
    kn_comm *few = kn_comm_split(w, rank == 1 ? -1 : 0, -rank, "few");
    kn_comm *copy = kn_comm_dup(w, "copy"), *again = shard ? kn_comm_dup(shard, "again") : NULL;
    EXPECT(shard && replica && copy && again && (few != NULL) == (rank != 1));
    EXPECT(sum_of(shard, rank, rank < 2 ? 1 : 5) && sum_of(replica, rank, rank % 2 ? 4 : 2));
    EXPECT(sum_of(copy, rank, 6) && sum_of(again, rank, rank < 2 ? 1 : 5));
    if (!few)
        return 0;
    int64_t *all = gpu(kn_device_memory(KN_CUDA), NULL, 3 * sizeof *all);
    all[kn_rank(few)] = rank;
    kn_stream *s = kn_compute_stream(KN_CUDA);
    EXPECT(kn_all_gather(few, all, all + kn_rank(few), 1, KN_I64, s, "few") && kn_stream_sync(s));
    EXPECT(all[0] == 3 && all[1] == 2 && all[2] == 0, "in the order of the keys");
    return 0;
}

KN_TEST(cuda_nccl, meshes_are_split_off_the_world)
{
    good(4, mesh_rank);
    KN_CHECK(b->ids == 1 && b->inits == 4, "one bootstrap: %d ids", b->ids);
    KN_CHECK(b->splits == 4 * 5, "%d splits", b->splits);
}

/* What fsdp gathers and reduces with, in a hybrid mesh and over all ranks: communicators of NCCL of
 * their own, so that neither waits for the other. */
static int groups_rank(kn_comm *w)
{
    kn_rank_groups g = { .comm = w };
    int rank = kn_rank(w), pair = rank < 2 ? 1 : 5;
    EXPECT(kn_comm_memory_on(w, KN_CUDA));
    kn_ranks *hybrid = kn_ranks_of(&g, 2), *all = kn_ranks_of(&g, 4);
    EXPECT(hybrid && all && hybrid->gather != hybrid->reduce && all->gather != all->reduce);
    EXPECT(sum_of(hybrid->gather, rank, pair) && sum_of(hybrid->reduce, rank, pair) &&
           sum_of(hybrid->replicate, rank, rank % 2 ? 4 : 2));
    EXPECT(sum_of(all->gather, rank, 6) && sum_of(all->reduce, rank, 6));
    kn_ranks_free(&g);
    return 0;
}

KN_TEST(cuda_nccl, gathers_and_reductions_have_communicators_of_their_own)
{
    good(4, groups_rank);
    KN_CHECK(b->splits == 4 * (3 + 2), "%d splits", b->splits);
}

KN_TEST(cuda_nccl, an_older_library_makes_each_by_itself)
{
    library("libfake_nccl_2_17.so");
    good(4, mesh_rank);
    KN_CHECK(b->ids == 9 && b->splits == 0, "%d ids", b->ids); /* 2 shards, 2 again, ... */
}

KN_TEST(cuda_nccl, over_tcp)
{
    good(3, over_tcp(others_rank));
    good(4, over_tcp(mesh_rank));
}

/* ---- registered memory ----------------------------------------------------------------------- */

static bool expect_registered;
static int fails_on = -1;

static int registered_rank(kn_comm *w)
{
    nccl->fail_register = kn_rank(w) == fails_on;
    kn_memory *m = kn_comm_memory_on(w, KN_CUDA);
    EXPECT(m && (strcmp(m->name, "registered memory") == 0) == expect_registered, "%s", m->name);
    kn_comm *gather = kn_comm_dup(w, "gather");
    kn_stream *s = kn_stream_create(KN_CUDA, "gather", KN_STREAM_AUTO);
    size_t bytes = (size_t)3 << 20;
    char *all = gpu(m, NULL, 2 * bytes); /* in a segment allocated after the communicators */
    kn_comm *late = kn_comm_dup(w, "late");
    EXPECT(all && gather && late);
    memset(all + (size_t)kn_rank(w) * bytes, 7, bytes);
    EXPECT(kn_all_gather(gather, all, all + (size_t)kn_rank(w) * bytes, (int64_t)bytes, KN_U8, s,
                         "unit") &&
           kn_all_gather(late, all, all + (size_t)kn_rank(w) * bytes, (int64_t)bytes, KN_U8, s,
                         "unit") &&
           kn_stream_sync(s));
    EXPECT(all[0] == 7 && all[2 * bytes - 1] == 7);
    EXPECT(nccl->calls_in_held == (expect_registered ? 2 : 0), "%d", nccl->calls_in_held);
    EXPECT(nccl->memory >= (expect_registered ? 2 * bytes : 0));
    kn_give(m, all, 2 * bytes + 1, KN_MEM_DATA);
    int out = nccl->enrolled - nccl->dismissed;
    kn_memory_trim(KN_CUDA); /* idle segments are deregistered with all three */
    EXPECT(nccl->enrolled - nccl->dismissed == out - (expect_registered ? 3 : 0));
    EXPECT(nccl->memory == 0);
    EXPECT(gpu(m, NULL, bytes)); /* stays out until the end */
    kn_stream_destroy(s);
    return 0;
}

KN_TEST(cuda_nccl, gathered_buffers_are_registered)
{
    expect_registered = true;
    good(2, registered_rank);
}

KN_TEST(cuda_nccl, plain_memory_where_registering_does_not_work)
{
    fails_on = 1; /* on one rank, so on none */
    good(2, registered_rank);
    fails_on = -1;
    nccl->fail_memory = 1;
    good(2, registered_rank);
    nccl->fail_memory = 0;
    setenv("KNAP_REGISTER", "0", 1);
    good(2, registered_rank);
    unsetenv("KNAP_REGISTER");
    nccl->version = 22403; /* rounds each segment up to hundreds of MiB */
    good(2, registered_rank);
    setenv("KNAP_REGISTER", "1", 1);
    expect_registered = true;
    good(2, registered_rank);
    unsetenv("KNAP_REGISTER");
    expect_registered = false;
    nccl->version = 22902;
    fake.devices = 1; /* two ranks on one GPU communicate through sockets */
    good(2, registered_rank);
}

KN_TEST(cuda_nccl, plain_memory_with_an_older_library)
{
    library("libfake_nccl_2_17.so");
    good(2, registered_rank);
}

/* ---- without a library ----------------------------------------------------------------------- */

static int without_rank(kn_comm *w)
{
    EXPECT(!kn_comm_memory_on(w, KN_CUDA) && strstr(kn_error(), "KNAP_COMM=local"), "%s",
           kn_error());
    return 0;
}

KN_TEST(cuda_nccl, no_library_is_a_sentence)
{
    setenv("KNAP_NCCL", "/no/such/libnccl.so", 1);
    KN_CHECK(on(2, without_rank) == 0);
}
