/* tests/gpu/cuda_nccl_graph_test.c: recorded steps of several ranks over the fake NCCL: their bits,
 * the memory that they use, communicators that end while a graph of theirs lives. */
#include "comm/comm_internal.h"
#include "comm/nccl/nccl.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/gpu/replay_trainer.h"

/* ---- whole steps ----------------------------------------------------------------------------- */

/* Step 2 is recorded, and those that follow are replayed. */
enum { SOME = 5, RECORDED = 2 };

static kn_dtype dtype;

/* NCCL's calls in a step; those whose buffers were all registered; threads that NCCL began. */
typedef struct calls {
    int all, in_held, threads;
} calls;

static calls so_far(void)
{
    return (calls){ nccl->calls, nccl->calls_in_held, nccl->threads };
}

/* Registered memory of somebody else, taken once a step is recorded, whose replays must leave it as
 * it is. */
enum { BLOCKS = 60, BLOCK = 40000, FILL = 0xee };

static bool others_take(kn_memory *m, char *p[BLOCKS])
{
    for (int i = 0; i < BLOCKS; i++) {
        if (!(p[i] = kn_take(m, BLOCK, KN_MEM_DATA)))
            return false;
        memset(p[i], FILL, BLOCK);
    }
    return true;
}

static bool others_give(kn_memory *m, char *p[BLOCKS])
{
    bool same = true;
    for (int i = 0; i < BLOCKS; i++) {
        for (int k = 0; k < BLOCK; k++)
            same = same && (unsigned char)p[i][k] == FILL;
        kn_give(m, p[i], BLOCK, KN_MEM_DATA);
    }
    return same || kn_fail("a replay wrote memory that wasn't its own");
}

/* made: in step RECORDED and in the last. */
static bool steps(kn_comm *w, record *r, calls made[2], bool replayed)
{
    trainer t;
    kn_memory *m = kn_comm_memory_on(w, KN_CUDA);
    *r = (record){ 0 };
    if (!trainer_begin(&t, dtype, replayed))
        return false;
    for (int n = 0; n < SOME; n++) {
        char *others[BLOCKS];
        if (n > RECORDED && !others_take(m, others))
            return false;
        calls before = so_far();
        kn_scope s = kn_scope_begin();
        bool ok = trainer_feed(&t, n) &&
                  (t.replay ? kn_replay_step(t.replay, trainer_step, &t) : trainer_step(&t));
        kn_scope_end(s);
        calls after = so_far();
        made[n > RECORDED] = (calls){ after.all - before.all, after.in_held - before.in_held,
                                      after.threads - before.threads };
        if (!ok || !kn_to_host(t.loss, r->loss[n], sizeof r->loss[n]) ||
            !kn_to_host(t.norm, &r->norm[n], sizeof r->norm[n]))
            return false;
        if (n > RECORDED && !others_give(m, others))
            return false;
    }
    bool ok = trainer_read(&t, r);
    if (t.replay && kn_replay_count(t.replay).replayed != SOME - RECORDED - 1)
        kn_fail("not replayed: %s", kn_replay_why(t.replay));
    trainer_end(&t);
    return ok && kn_ok();
}

static int steps_rank(kn_comm *w)
{
    record *eager = calloc(2, sizeof *eager), *replayed = eager + 1;
    calls now[2], then[2];
    EXPECT(steps(w, eager, now, false) && steps(w, replayed, then, true), "%s", kn_error());
    EXPECT(memcmp(eager, replayed, sizeof *eager) == 0 && eager->norm[SOME - 1] > 0);
    EXPECT(now->all == then->all && now->in_held == then->in_held, "%d of %d, recorded %d of %d",
           now->in_held, now->all, then->in_held, then->all);
    /* all but the words of the norm */
    EXPECT(now->in_held == now->all - 2, "%d of %d", now->in_held, now->all);
    /* One thread for each call: of a micro-batch 3 units are gathered in forward, 2 again
     * in backward, 3 reduced; the norm takes 2. A replay makes no calls. */
    EXPECT(now->threads == MICRO * (3 + 2 + 3) + 2 && now[1].threads == now->threads,
           "%d threads, then %d", now->threads, now[1].threads);
    EXPECT(then[1].all == 0 && then[1].threads == 0);
    free(eager);
    return 0;
}

KN_TEST(cuda_nccl_graph, replayed_steps_have_the_bits_and_the_memory_of_others)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16 };
    for (int i = 0; i < 2; i++) {
        dtype = types[i];
        good(2, steps_rank);
    }
}

/* ---- scratch --------------------------------------------------------------------------------- */

/* Exchanged parts need a new segment, which is registered with the very communicator. */
static int scratch_rank(kn_comm *w)
{
    enum { COUNT = 7 << 20 };
    int n = kn_comm_size(w);
    kn_memory *m = kn_comm_memory_on(w, KN_CUDA);
    kn_stream *s = kn_compute_stream(KN_CUDA);
    uint16_t *from = gpu(m, NULL, (size_t)n * COUNT * 2), *to = gpu(m, NULL, COUNT * 2);
    EXPECT(from && to);
    for (int i = 0; i < n * COUNT; i++)
        from[i] = 0x3f80; /* 1 as bf16 */
    calls before = so_far();
    EXPECT(kn_reduce_scatter(w, to, NULL, from, COUNT, KN_BF16, KN_BF16, s, "large"));
    EXPECT(kn_stream_sync(s) && to[0] == 0x4000 && to[COUNT - 1] == 0x4000);
    EXPECT(nccl->calls_in_held == before.in_held + 1 && nccl->calls == before.all + 1);
    return 0;
}

KN_TEST(cuda_nccl_graph, exchanged_parts_are_registered)
{
    good(2, scratch_rank);
}

/* Nobody may wait for the GPU while a step is recorded, so nothing is unmapped then. */
static int idle_rank(kn_comm *w)
{
    const size_t bytes = (size_t)64 << 20;
    kn_memory *m = kn_comm_memory_on(w, KN_CUDA);
    void *p = gpu(m, NULL, bytes / 16);
    kn_give(m, p, bytes / 16 + 1, KN_MEM_DATA);
    size_t idle = nccl->memory;
    EXPECT(p && idle > 0 && kn_graph_begin(KN_CUDA));
    nccl->fail_memory = 1;
    EXPECT(!kn_take(m, bytes, KN_MEM_DATA) && nccl->memory == idle);
    nccl->fail_memory = 0;
    kn_graph_cancel();
    kn_clear_error();
    EXPECT((p = kn_take(m, bytes, KN_MEM_DATA)) && nccl->memory == bytes, "%zu", nccl->memory);
    kn_give(m, p, bytes, KN_MEM_DATA);
    return 0;
}

KN_TEST(cuda_nccl_graph, nothing_is_unmapped_while_a_step_is_recorded)
{
    KN_CHECK(on(2, idle_rank) == 0); /* ranks hear of each other's errors, and abort */
}

/* ---- before the first step ------------------------------------------------------------------- */

/* Ranks connect before the first step has activations, not in its first reduction. */
static int connected_rank(kn_comm *w)
{
    trainer t;
    EXPECT(kn_comm_size(w) == 2 && trainer_begin(&t, KN_BF16, false) && trainer_feed(&t, 0));
    bool mode = kn_set_grad_mode(false);
    kn_scope s = kn_scope_begin();
    EXPECT(nccl->connected == 0 && kn_gpt_loss(&t.model, t.x[0], t.y[0]));
    kn_scope_end(s);
    kn_set_grad_mode(mode);
    int connected = nccl->connected;
    EXPECT(connected > 0 && trainer_step(&t) && kn_stream_sync(kn_compute_stream(KN_CUDA)) &&
               nccl->connected == connected,
           "%d, later %d", connected, nccl->connected);
    trainer_end(&t);
    return 0;
}

KN_TEST(cuda_nccl_graph, ranks_connect_before_the_first_step)
{
    good(2, connected_rank);
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* NCCL ends no communicator that a living graph uses; the context ends with one. */
static int ends_rank(kn_comm *w)
{
    kn_comm_set_timeout(w, 10);
    int64_t *x = gpu(kn_device_memory(KN_CUDA), &(int64_t){ 1 }, sizeof *x);
    kn_stream *s = kn_compute_stream(KN_CUDA);
    EXPECT(x && sum_of(w, 1, 2) && kn_graph_begin(KN_CUDA));
    EXPECT(kn_all_reduce_i64(w, x, 1, s, "recorded"));
    kn_graph *g = kn_graph_end();
    EXPECT(g && *x == 1 && kn_graph_launch(g) && kn_stream_sync(s), "%s", kn_error());
    EXPECT(*x == 2 && kn_graph_launch(g) && kn_stream_sync(s) && *x == 4, "%lld", (long long)*x);
    return 0;
}

KN_TEST(cuda_nccl_graph, communicators_end_after_their_graphs)
{
    good(2, ends_rank);
}
