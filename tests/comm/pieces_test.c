/* tests/comm/pieces_test.c: several buffers in one collective: the bits of a call each, with the
 * meetings of a single call. Over messages: messages_test.c. */
#include "tests/comm/pieces.h"
#include "comm/comm_internal.h"
#include <stdatomic.h>

static int pieces_rank(kn_comm *w, void *arg)
{
    kn_stream *side = kn_stream_create(KN_CPU, "side", KN_STREAM_WORKER);
    EXPECT(side != NULL);
    int failed = 0;
    for (int form = 0; form < PIECES_FORMS && !failed; form++)
        failed = pieces_once(w, form % 3 ? kn_compute_stream(KN_CPU) : side, form);
    kn_stream_destroy(side);
    return failed || arg != NULL;
}

KN_TEST(pieces, the_bits_of_as_many_calls)
{
    for (int n = 1; n <= 4; n++)
        on_ranks(n, pieces_rank, NULL);
}

/* Meetings of one call over count pieces of n elements in shared memory. */
static int64_t meetings(kn_comm *w, pieces_kind kind, int count, int64_t n)
{
    pieces p;
    bool ok = pieces_take(&p, w, kind, count, n, true);
    kn_fault_at(KN_AT_MEETING, 0, KN_NO_FAULT);
    ok = ok && pieces_move(&p, w, kn_compute_stream(KN_CPU), true) && kn_ok();
    int64_t met = kn_fault_at(KN_AT_MEETING, 0, KN_NO_FAULT);
    pieces_give(&p);
    return ok ? met : -1;
}

static int meetings_rank(kn_comm *w, void *arg)
{
    for (pieces_kind kind = 0; kind < PIECES_KINDS; kind++) {
        int64_t one = meetings(w, kind, 1, 70001), small = meetings(w, kind, 1, 3);
        EXPECT(one > 0 && meetings(w, kind, 5, 70001) == one, "kind %d", (int)kind);
        EXPECT(small > 0 && small < one && meetings(w, kind, 5, 3) == small, "kind %d", (int)kind);
    }
    return arg != NULL;
}

KN_TEST(pieces, the_meetings_of_one_call)
{
    on_ranks(3, meetings_rank, NULL);
}

/* A buffer of no elements lies nowhere: it costs no staging. */
static int empty_rank(kn_comm *w, void *arg)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    pieces p;
    EXPECT(pieces_take(&p, w, PIECES_GATHER, 2, 70001, true));
    int64_t met[2];
    for (int with = 0; with < 2; with++) {
        p.piece[1] =
            with ? (kn_comm_piece){ .dst_dtype = KN_F32, .src_dtype = KN_F32 } : p.piece[1];
        kn_fault_at(KN_AT_MEETING, 0, KN_NO_FAULT);
        EXPECT(pieces_move(&p, w, s, true));
        met[with] = kn_fault_at(KN_AT_MEETING, 0, KN_NO_FAULT);
    }
    EXPECT(met[0] == met[1], "%d and %d meetings", (int)met[0], (int)met[1]);
    pieces_give(&p);
    return arg != NULL;
}

KN_TEST(pieces, an_empty_buffer_is_not_staged)
{
    on_ranks(3, empty_rank, NULL);
}

/* Buffers that share a slot, of any small size. */
static int small_rank(kn_comm *w, void *arg)
{
    for (pieces_kind kind = 0; kind < PIECES_KINDS; kind++)
        for (int64_t n = 1; n <= 5; n++) {
            pieces p;
            EXPECT(pieces_take(&p, w, kind, 4, n, true));
            EXPECT(pieces_move(&p, w, kn_compute_stream(KN_CPU), true));
            EXPECT(pieces_right(&p, w, kn_compute_stream(KN_CPU)) == 0, "%d elements", (int)n);
            pieces_give(&p);
        }
    return arg != NULL;
}

KN_TEST(pieces, small_ones_lie_side_by_side)
{
    on_ranks(3, small_rank, NULL);
}

/* Buffers that fill the room of a trip to the last byte, before another one. */
static int full_rank(kn_comm *w, void *arg)
{
    enum { PRIVATE = 1 << 17 }; /* elements of which a bounce buffer takes one rank's */
    for (pieces_kind kind = 0; kind < PIECES_KINDS; kind++) {
        pieces p;
        int64_t blocks = kind == PIECES_SCATTER ? kn_comm_size(w) : 1;
        EXPECT(pieces_take(&p, w, kind, 3, PRIVATE / blocks, false));
        EXPECT(pieces_move(&p, w, kn_compute_stream(KN_CPU), true));
        EXPECT(pieces_right(&p, w, kn_compute_stream(KN_CPU)) == 0);
        pieces_give(&p);
    }
    return arg != NULL;
}

KN_TEST(pieces, a_buffer_that_fills_a_trip)
{
    on_ranks(2, full_rank, NULL);
}

/* More buffers than fit into a call; no buffer. */
static int many_rank(kn_comm *w, void *arg)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    uint64_t before = w->family->seq;
    pieces p;
    EXPECT(pieces_take(&p, w, PIECES_REDUCE, PIECES_MOST, 65, true));
    EXPECT(PIECES_MOST > KN_COMM_PIECES && pieces_move(&p, w, s, true));
    EXPECT(w->family->seq == before + 2 || !w->family->log);
    EXPECT(pieces_right(&p, w, s) == 0);
    pieces_give(&p);
    EXPECT(kn_all_gather_pieces(w, NULL, 0, s, "none"));
    return arg != NULL;
}

KN_TEST(pieces, more_than_fit_into_a_call)
{
    on_ranks(2, many_rank, NULL);
}

/* One more piece on a rank, or another count in the middle: an error on all ranks that names
 * both. */
static int differ_rank(kn_comm *w, void *arg)
{
    bool counts = *(bool *)arg, odd = kn_rank(w) == 1;
    float x[64] = { 0 }, all[4][64];
    kn_comm_piece p[3];
    for (int i = 0; i < 3; i++)
        p[i] = (kn_comm_piece){ all[i], NULL, x, 4, KN_F32, KN_F32 };
    p[1].count = odd && counts ? 3 : 4;
    p[2].count = odd && counts ? 5 : 4;
    kn_stream *s = kn_compute_stream(KN_CPU);
    EXPECT(!kn_all_gather_pieces(w, p, odd && !counts ? 2 : 3, s, "unit"));
    EXPECT(strstr(kn_error(), "collectives don't match: rank 0 calls all_gather of 12 f32 and "
                              "others, 3 buffers (unit)"));
    EXPECT(!strstr(kn_error(), "; counts or dtypes of their buffers differ") == !counts);
    return 0;
}

KN_TEST(pieces, lists_that_differ)
{
    on_ranks(2, differ_rank, &(bool){ false });
    on_ranks(2, differ_rank, &(bool){ true });
}

/* Whichever rank saw it first. */
KN_TEST(pieces, ranks_out_of_step_tell_the_same)
{
    const kn_comm_note a = { .kind = KN_CALL_BARRIER, .comm = "world" },
                       b = { .kind = KN_CALL_AGREE, .comm = "world" };
    kn_comm_mismatch(0, &a, 1, &b);
    KN_CHECK_ERROR("rank 0 calls barrier in communicator world, rank 1 calls");
    kn_comm_mismatch(1, &b, 0, &a);
    KN_CHECK_ERROR("rank 0 calls barrier in communicator world, rank 1 calls");
}

KN_TEST(pieces, bad_arguments)
{
    kn_comm *w = kn_init(NULL, NULL);
    kn_stream *s = kn_compute_stream(KN_CPU);
    float x[4] = { 0 };
    kn_comm_piece p[2] = { { x, NULL, x, 4, KN_F32, KN_F32 }, { x, NULL, x, 4, KN_F32, KN_BF16 } };
    kn_all_gather_pieces(w, p, 2, s, "u");
    KN_CHECK_ERROR("all_gather u: gathers bf16 as f32");
    kn_all_gather_pieces(w, NULL, 2, s, "u");
    KN_CHECK_ERROR("the list of pieces is NULL or has 2 of them");
    kn_reduce_scatter_pieces(w, p, -1, s, "u");
    KN_CHECK_ERROR("the list of pieces is NULL or has -1 of them");
    p[1].src = NULL;
    kn_all_reduce_pieces(w, p, 2, s, "u");
    KN_CHECK_ERROR("all_reduce u: src is NULL with count 4");
    p[1] = (kn_comm_piece){ x, NULL, x, 1, KN_I64, KN_I64 };
    kn_all_reduce_pieces(w, p, 2, s, "u");
    KN_CHECK_ERROR("adds f32, bf16, f16 or f64, not i64");
    kn_all_reduce_pieces(NULL, p, 2, s, "u");
    KN_CHECK_ERROR("communicator is NULL");
    KN_CHECK(kn_finish() == 0);
}
