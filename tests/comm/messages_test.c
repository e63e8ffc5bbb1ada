/* tests/comm/messages_test.c: collectives made of messages, over a back end that counts them
 * (message_queues.h): their number, and the bits of shared memory. */
#include "tests/comm/pieces.h"
#include "tests/comm/message_queues.h"

typedef struct queues_test {
    message_queues queues;
    int (*rank)(kn_comm *local, kn_comm *comm);
} queues_test;

static int office_rank(kn_comm *w, void *arg)
{
    queues_test *t = arg;
    kn_comm *comm = queues_world(&t->queues, kn_rank(w), kn_comm_size(w));
    EXPECT(comm);
    int failed = t->rank(w, comm);
    queues_free(comm);
    return failed;
}

static void on_office(int n, int (*rank)(kn_comm *local, kn_comm *comm))
{
    static queues_test t;
    queues_open(&t.queues);
    t.rank = rank;
    int failed = kn_spawn_threads(n, office_rank, &t);
    queues_close(&t.queues);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%d of %d ranks failed", failed, n);
}

static int pieces_rank(kn_comm *local, kn_comm *comm)
{
    for (int form = 0; form < PIECES_FORMS; form++)
        if (pieces_once(comm, kn_compute_stream(KN_CPU), form))
            return 1;
    return local == NULL;
}

KN_TEST(messages, several_buffers_have_the_bits_of_as_many_calls)
{
    for (int n = 1; n <= 5; n++)
        on_office(n, pieces_rank);
}

/* One call sends descriptions and bytes to each other rank; an all-reduce its results, too. */
static int count_rank(kn_comm *local, kn_comm *comm)
{
    static const int want[PIECES_KINDS] = { 2, 2, 3 };
    for (pieces_kind kind = 0; kind < PIECES_KINDS; kind++)
        for (int count = 1; count < 8; count += 3) {
            pieces p;
            EXPECT(pieces_take(&p, comm, kind, count, 5003, true));
            message_count before = queues_counted(comm);
            EXPECT(pieces_move(&p, comm, kn_compute_stream(KN_CPU), true));
            message_count after = queues_counted(comm);
            pieces_give(&p);
            EXPECT(after.messages - before.messages == want[kind] * (kn_comm_size(local) - 1) &&
                       after.steps - before.steps == want[kind],
                   "kind %d, %d buffers: %lld messages", (int)kind, count,
                   (long long)(after.messages - before.messages));
        }
    return 0;
}

KN_TEST(messages, several_buffers_are_one_message_to_each_rank)
{
    for (int n = 2; n <= 5; n++)
        on_office(n, count_rank);
}

/* All ranks' terms of an all-reduce lie in about as much memory as one rank's, however the elements
 * are cut into pieces. */
static int room_rank(kn_comm *local, kn_comm *comm)
{
    int n = kn_comm_size(local);
    const kn_message_comm *c = (const kn_message_comm *)comm;
    for (int64_t count = 2 * n; count < 128 * n; count = 4 * count - 1) {
        pieces p;
        EXPECT(pieces_take(&p, comm, PIECES_REDUCE, KN_COMM_PIECES, count, true));
        EXPECT(pieces_move(&p, comm, kn_compute_stream(KN_CPU), true));
        pieces_give(&p);
        int64_t given = KN_COMM_PIECES * count * 4;
        int64_t rests = KN_COMM_PIECES * (4 * n * n + 2 * KN_ALIGN);
        EXPECT((int64_t)c->room_bytes <= given + rests, "%d buffers of %lld: %zu bytes",
               KN_COMM_PIECES, (long long)count, c->room_bytes);
    }
    return 0;
}

KN_TEST(messages, small_buffers_take_no_more_room)
{
    for (int n = 2; n <= 8; n += 3)
        on_office(n, room_rank);
}

/* ---- scalars --------------------------------------------------------------------------------- */

static int log2_up(int n)
{
    int steps = 0;
    while (1 << steps < n)
        steps++;
    return steps;
}

/* Values whose sum wraps around, and maxima that differ only in bits. */
static void scalars_of(int rank, int n, int64_t *sum, float *most)
{
    static const uint32_t nans[] = { 0x7fc00001, 0xffc00002, 0x7fc00003 };
    sum[0] = INT64_MAX - rank;
    sum[1] = -rank;
    sum[2] = INT64_C(1) << rank;
    most[0] = (float)((rank * 5 + 3) % n);
    most[1] = rank % 2 ? 0.0f : -0.0f;
    memcpy(&most[2], &nans[rank % 3], sizeof *most);
    most[3] = rank == n - 1 ? most[2] : -1;
}

/* Any N: the bits of shared memory; at most 2 ceil(log2 N) messages a rank, in as many exchanges,
 * one more where N is no power of two. */
static int scalars_rank(kn_comm *local, kn_comm *comm)
{
    enum { MANY = 2000 };
    int n = kn_comm_size(local), me = kn_rank(local), most_messages = 2 * log2_up(n);
    kn_stream *s = kn_compute_stream(KN_CPU);
    static _Thread_local int64_t many[2][MANY];
    for (int root = 0; root < n + 4; root++) {
        int64_t sum[2][3];
        float most[2][4];
        unsigned char bytes[2][37];
        bool yes[2];
        message_count before = queues_counted(comm);
        for (int k = 0; k < 2; k++) {
            kn_comm *c = k ? comm : local;
            scalars_of(me, n, sum[k], most[k]);
            memset(bytes[k], me + 1, sizeof bytes[k]);
            for (int i = 0; i < MANY; i++)
                many[k][i] = i * me;
            yes[k] = root != 1 || me != n - 1;
            if (root == n)
                EXPECT(kn_all_reduce_i64(c, sum[k], 3, s, "sum"));
            else if (root == n + 1)
                EXPECT(kn_all_reduce_max(c, most[k], 4, s, "most"));
            else if (root == n + 2)
                EXPECT(kn_all_reduce_i64(c, many[k], MANY, s, "many"));
            else if (root == n + 3)
                EXPECT(kn_barrier(c, s, "barrier"));
            else if (root % 2)
                yes[k] = kn_agree(c, yes[k]);
            else
                EXPECT(kn_broadcast(c, bytes[k], sizeof bytes[k], root, s, "bytes"));
        }
        message_count after = queues_counted(comm);
        EXPECT(memcmp(sum[0], sum[1], sizeof *sum) == 0 &&
                   memcmp(most[0], most[1], sizeof *most) == 0 &&
                   memcmp(bytes[0], bytes[1], sizeof *bytes) == 0 &&
                   memcmp(many[0], many[1], sizeof *many) == 0 && yes[0] == yes[1],
               "case %d of %d", root, n);
        EXPECT(after.messages - before.messages <= most_messages, "case %d: %lld messages", root,
               (long long)(after.messages - before.messages));
        EXPECT(after.steps - before.steps <= most_messages + ((n & (n - 1)) != 0),
               "case %d: %lld exchanges", root, (long long)(after.steps - before.steps));
    }
    return 0;
}

KN_TEST(messages, scalars_take_a_logarithm_of_them)
{
    for (int n = 1; n <= 8; n++)
        on_office(n, scalars_rank);
}
