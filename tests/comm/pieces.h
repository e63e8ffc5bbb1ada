/* tests/comm/pieces.h: lists of buffers of several sizes, dtypes and memories, for collectives
 * together and one by one. */
#ifndef KNAP_TESTS_COMM_PIECES_H
#define KNAP_TESTS_COMM_PIECES_H

#include "tests/comm/comm_test.h"
#include "comm/comm.h"

typedef enum pieces_kind { PIECES_GATHER, PIECES_SCATTER, PIECES_REDUCE, PIECES_KINDS } pieces_kind;
enum { PIECES_MOST = 40, PIECES_FORMS = 18 };

typedef struct pieces {
    pieces_kind kind;
    int count;
    kn_comm_piece piece[PIECES_MOST];
    buffer dst[PIECES_MOST], src[PIECES_MOST], acc[PIECES_MOST];
    void *want[PIECES_MOST]; /* the results of a call each */
} pieces;

static inline size_t pieces_bytes(const pieces *p, int i, bool dst)
{
    kn_dtype t = dst ? p->piece[i].dst_dtype : p->piece[i].src_dtype;
    return (size_t)p->piece[i].count * kn_dtype_size(t);
}

static inline size_t pieces_blocks(const pieces *p, const kn_comm *w, bool dst)
{
    bool all = p->kind == (dst ? PIECES_GATHER : PIECES_SCATTER);
    return all ? (size_t)kn_comm_size(w) : 1;
}

/* Buffer i of count: of n elements, or, n < 0, of a size and a dtype of its own. shared: all in
 * memory that collectives use without a copy; else alternating. */
static inline bool pieces_take(pieces *p, kn_comm *w, pieces_kind kind, int count, int64_t n,
                               bool shared)
{
    static const int64_t sizes[] = { 7, 0, 1000, 140003, 1, 64, 20000 };
    static const kn_dtype dst[] = { KN_F32, KN_F32, KN_BF16, KN_F64 },
                          src[] = { KN_F32, KN_BF16, KN_BF16, KN_F64 };
    bool ok = true;
    *p = (pieces){ .kind = kind, .count = count };
    for (int i = 0; i < count && ok; i++) {
        kn_comm_piece *q = &p->piece[i];
        int t = n < 0 ? i % 4 : 0;
        q->count = n < 0 ? sizes[i % 7] : n;
        q->dst_dtype = dst[t];
        q->src_dtype = kind == PIECES_GATHER ? dst[t] : src[t];
        size_t to = pieces_bytes(p, i, true), from = pieces_bytes(p, i, false);
        p->dst[i] = take(w, shared || i % 2, to * pieces_blocks(p, w, true));
        p->src[i] = take(w, shared || i % 3, from * pieces_blocks(p, w, false));
        p->acc[i] = take(w, false, to);
        p->want[i] = malloc(to * pieces_blocks(p, w, true) + 1);
        q->dst = p->dst[i].p;
        q->src = p->src[i].p;
        q->acc = kind != PIECES_GATHER && i % 3 == 2 ? p->acc[i].p : NULL;
        int64_t given = q->count * (int64_t)pieces_blocks(p, w, false);
        ok = p->want[i] && fill(p->src[i].p, q->src_dtype, kn_rank(w) + i, 0, given) &&
             fill(p->acc[i].p, q->dst_dtype, 17, 0, q->count);
    }
    return ok;
}

static inline void pieces_give(pieces *p)
{
    for (int i = 0; i < p->count; i++) {
        give(p->dst[i]);
        give(p->src[i]);
        give(p->acc[i]);
        free(p->want[i]);
    }
}

/* In one collective, or one by one. */
static inline bool pieces_move(pieces *p, kn_comm *w, kn_stream *s, bool together)
{
    int n = together ? p->count : 1;
    bool ok = true;
    for (int i = 0; i < p->count && ok; i += n)
        ok = p->kind == PIECES_GATHER    ? kn_all_gather_pieces(w, p->piece + i, n, s, "unit")
             : p->kind == PIECES_SCATTER ? kn_reduce_scatter_pieces(w, p->piece + i, n, s, "unit")
                                         : kn_all_reduce_pieces(w, p->piece + i, n, s, "unit");
    return ok && kn_stream_sync(s);
}

/* True if dst holds the results of one call a buffer. */
static inline int pieces_right(pieces *p, kn_comm *w, kn_stream *s)
{
    for (int i = 0; i < p->count; i++) {
        size_t bytes = pieces_bytes(p, i, true) * pieces_blocks(p, w, true);
        memcpy(p->want[i], p->dst[i].p, bytes);
        memset(p->dst[i].p, 0x33, bytes);
    }
    EXPECT(pieces_move(p, w, s, false));
    for (int i = 0; i < p->count; i++) {
        size_t bytes = pieces_bytes(p, i, true) * pieces_blocks(p, w, true);
        EXPECT(memcmp(p->want[i], p->dst[i].p, bytes) == 0, "kind %d, buffer %d of %d",
               (int)p->kind, i, p->count);
    }
    return 0;
}

/* n elements for each rank; form: bits 0, 1: dst, src in memory that ranks share. */
static inline int to_all_once(kn_comm *w, kn_stream *s, int64_t n, kn_dtype t, int form)
{
    const int size = kn_comm_size(w), rank = kn_rank(w);
    const size_t bytes = (size_t)n * kn_dtype_size(t), all = bytes * (size_t)size;
    buffer dst = take(w, form & 1, all), src = take(w, form & 2, all);
    for (size_t i = 0; i < all; i++)
        ((char *)src.p)[i] = (char)(i * 7 + (size_t)rank * 31);
    EXPECT(kn_all_to_all(w, dst.p, src.p, n, t, s, "test"));
    EXPECT(kn_stream_sync(s));
    for (size_t i = 0; i < all; i++) {
        const size_t from = i / bytes, at = (size_t)rank * bytes + i % bytes;
        EXPECT(((char *)dst.p)[i] == (char)(at * 7 + from * 31),
               "n %lld %s form %d: byte %zu from rank %zu", (long long)n, kn_dtype_name(t), form,
               i % bytes, from);
    }
    give(dst);
    give(src);
    return 0;
}

static inline int pieces_once(kn_comm *w, kn_stream *s, int form)
{
    static const int counts[] = { 1, 2, 9 };
    pieces p;
    EXPECT(pieces_take(&p, w, (pieces_kind)(form % 3), counts[form / 3 % 3], -1, form >= 9));
    EXPECT(pieces_move(&p, w, s, true));
    int failed = pieces_right(&p, w, s);
    pieces_give(&p);
    return failed;
}

#endif
