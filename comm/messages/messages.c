/* comm/messages/messages.c: collectives made of exchanges of messages (messages.h).
 *
 * Reductions send each rank the elements that it adds, and it adds them in rank order: the same
 * terms in the same order as over shared memory, hence the same bits. MPI's own reductions choose
 * their order by size and number of ranks. */
#include "comm/messages/messages.h"
#include "kernels/kernels.h"
#include <stdatomic.h>
#include <string.h>

#define CHUNK ((int64_t)64 << 20) /* bytes of a message at most */
#define ROOM  ((int64_t)8 << 20)  /* bytes that reductions keep of the other ranks' terms */

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* At least bytes of room for the others' messages; false with an error. */
static bool make_room(kn_message_comm *c, int64_t bytes)
{
    kn_memory *m = kn_device_memory(KN_CPU);
    if (bytes <= (int64_t)c->room_bytes)
        return true;
    kn_give(m, c->room, c->room_bytes, KN_MEM_COMM);
    c->room = kn_take(m, (size_t)bytes, KN_MEM_COMM);
    c->room_bytes = c->room ? (size_t)bytes : 0;
    return c->room != NULL;
}

int64_t kn_message_bytes(const kn_message_parts *p, int me, int j, bool sends)
{
    const int with = sends ? p->to : p->from;
    int64_t bytes = 0;
    for (int i = 0; i < p->parts && j != me && (with == KN_TO_ALL || with == j); i++)
        bytes += kn_message_at(p, i, j, sends).bytes;
    return bytes;
}

/* One message to and one from each other rank. */
static bool exchange_all(kn_message_comm *c, const kn_comm_call *call, const kn_message_part *part,
                         int parts, int tag)
{
    kn_message_parts p = { part, parts, KN_TO_ALL, KN_TO_ALL };
    return c->w->by->exchange(c, call, &p, tag);
}

/* bytes to one rank and as many from one; KN_TO_NONE: the other ranks have this step alone. */
static bool exchange_one(kn_message_comm *c, const kn_comm_call *call, int to, const void *send,
                         int from, void *receive, int64_t bytes, int tag)
{
    kn_message_part part = { { (char *)(uintptr_t)send, 0, bytes }, { receive, 0, bytes } };
    kn_message_parts p = { &part, 1, to, from };
    return c->w->by->exchange(c, call, &p, tag);
}

/* ---- descriptions ---------------------------------------------------------------------------- */

/* As they came: perhaps without an end. */
static void heard(kn_message_comm *c, int r)
{
    c->said[r].label[sizeof c->said[r].label - 1] = 0;
    c->said[r].comm[sizeof c->said[r].comm - 1] = 0;
    pthread_mutex_lock(&c->w->lock);
    c->w->peer[c->base.member[r]].last = c->said[r];
    pthread_mutex_unlock(&c->w->lock);
}

static bool same(kn_message_comm *c, int a, int b)
{
    return c->said[a].hash == c->said[b].hash ||
           kn_comm_mismatch(c->base.member[a], &c->said[a], c->base.member[b], &c->said[b]);
}

/* Every rank sends its call to all; nothing else moves before all calls are found equal. */
static bool open_all(kn_message_comm *c, const kn_comm_call *call)
{
    int n = c->base.size, me = c->base.rank;
    kn_comm_note mine = kn_comm_note_of(&c->base, call);
    kn_message_part part = { { (char *)&mine, 0, sizeof mine },
                             { (char *)c->said, sizeof *c->said, sizeof *c->said } };
    c->said[me] = mine;
    if (!exchange_all(c, call, &part, 1, KN_TAG_HEADER))
        return false;
    for (int r = 0; r < n; r++)
        heard(c, r);
    for (int r = 1; r < n; r++)
        if (!same(c, 0, r))
            return false;
    return true;
}

/* The same in ceil(log2 n) steps. A rank compares with the ranks 1, 2, 4, ... before it, and goes
 * on once they are equal: a rank that is through knows that all came to the same call. */
static bool open_steps(kn_message_comm *c, const kn_comm_call *call)
{
    int n = c->base.size, me = c->base.rank;
    kn_comm_note mine = kn_comm_note_of(&c->base, call);
    c->said[me] = mine;
    for (int step = 1; step < n; step *= 2) {
        int from = (me + n - step) % n;
        if (!exchange_one(c, call, (me + step) % n, &mine, from, &c->said[from], sizeof mine,
                          KN_TAG_HEADER))
            return false;
        heard(c, from);
        if (!same(c, from < me ? from : me, from < me ? me : from))
            return false;
    }
    return true;
}

/* ---- gathers and reductions ------------------------------------------------------------------ */

/* each: every rank has other bytes for each rank; else the same for all. */
static bool all_gather(kn_message_comm *c, const kn_comm_call *call, bool each)
{
    kn_comm_trip t = { 0 };
    while (kn_comm_next_trip(&t, call, 1, CHUNK)) {
        kn_message_part part[KN_COMM_PIECES];
        for (int i = 0; i < t.parts; i++) {
            const kn_comm_piece *q = t.part[i].piece;
            int64_t esize = (int64_t)kn_dtype_size(q->dst_dtype), stride = q->count * esize;
            int64_t at = t.part[i].begin * esize, bytes = t.part[i].count * esize;
            char *src = (char *)(uintptr_t)q->src + at, *dst = (char *)q->dst + at;
            char *mine = src + (each ? c->base.rank * stride : 0),
                 *own = dst + c->base.rank * stride;
            if (own != mine)
                memmove(own, mine, (size_t)bytes);
            part[i] = (kn_message_part){ { each ? src : own, each ? stride : 0, bytes },
                                         { dst, stride, bytes } };
        }
        if (!exchange_all(c, call, part, t.parts, KN_TAG_DATA))
            return false;
    }
    return true;
}

/* dst[count] = acc + the count elements that every rank gives us. */
typedef struct share {
    char *src; /* this rank's bytes for rank 0; stride bytes further on for the next rank */
    int64_t stride, count;
    char *dst;
    const char *acc;
    kn_dtype dst_dtype, src_dtype;
} share;

static int64_t share_bytes(const share *h)
{
    return h->count * (int64_t)kn_dtype_size(h->src_dtype);
}

/* Of the others' bytes in c->room: those of a share begin behind those of the ones before it. */
static int64_t room_of(const kn_message_comm *c, const share *h)
{
    return KN_ALIGNED(c->base.size * share_bytes(h));
}

/* All shares in one exchange. */
static bool add_shares(kn_message_comm *c, const kn_comm_call *call, const share *h, int shares,
                       kn_stream *s)
{
    kn_message_part part[KN_MESSAGE_PARTS];
    int n = c->base.size, me = c->base.rank;
    int64_t room = 0, at = 0;
    for (int i = 0; i < shares; i++)
        room += room_of(c, &h[i]);
    if (!make_room(c, room))
        return false;
    for (int i = 0; i < shares; at += room_of(c, &h[i++])) {
        const int64_t bytes = share_bytes(&h[i]);
        part[i] =
            (kn_message_part){ { h[i].src, h[i].stride, bytes }, { c->room + at, bytes, bytes } };
    }
    if (!exchange_all(c, call, part, shares, KN_TAG_DATA))
        return false;
    for (int i = 0; i < shares; i++) {
        for (int j = 0; j < n; j++)
            c->source[j] = j == me ? h[i].src + me * h[i].stride
                                   : part[i].receive.at + j * part[i].receive.stride;
        if (!kn_comm_sum(s, h[i].dst, h[i].acc, c->source, n, h[i].count, h[i].dst_dtype,
                         h[i].src_dtype))
            return false;
    }
    return true;
}

/* count elements of q, of which src begins at element from and the result at element to. */
static share share_of(const kn_comm_piece *q, int64_t from, int64_t stride, int64_t to,
                      int64_t count)
{
    int64_t esize = (int64_t)kn_dtype_size(q->src_dtype);
    int64_t dsize = (int64_t)kn_dtype_size(q->dst_dtype);
    return (share){ .src = (char *)(uintptr_t)q->src + from * esize,
                    .stride = stride * esize,
                    .count = count,
                    .dst = (char *)q->dst + to * dsize,
                    .acc = q->acc ? (const char *)q->acc + to * dsize : NULL,
                    .dst_dtype = q->dst_dtype,
                    .src_dtype = q->src_dtype };
}

static bool reduce_scatter(kn_message_comm *c, const kn_comm_call *call, kn_stream *s)
{
    kn_comm_trip t = { 0 };
    while (kn_comm_next_trip(&t, call, c->base.size, ROOM)) {
        share h[KN_COMM_PIECES];
        for (int i = 0; i < t.parts; i++) {
            const kn_comm_part *p = &t.part[i];
            h[i] = share_of(p->piece, p->begin, p->piece->count, p->begin, p->count);
        }
        if (!add_shares(c, call, h, t.parts, s))
            return false;
    }
    return true;
}

/* Of count elements of an all-reduce each rank adds a slice for all; the few that don't divide by
 * the ranks, or all of a small part, everyone adds. Those are few in all pieces together: they take
 * room for as many copies as there are ranks. */
static int64_t slice_of(const kn_message_comm *c, const kn_comm_call *call, int64_t count)
{
    bool small = count < c->base.size || count * call->pieces < 64 * (int64_t)c->base.size;
    return small ? 0 : count / c->base.size;
}

/* Everyone adds its slices, then all fetch the others' results. In place is safe: slice j of src is
 * sent before rank j's result comes to lie there. */
static bool all_reduce(kn_message_comm *c, const kn_comm_call *call, kn_stream *s)
{
    int n = c->base.size, me = c->base.rank;
    kn_comm_trip t = { 0 };
    while (kn_comm_next_trip(&t, call, 1, ROOM)) {
        share h[2 * KN_COMM_PIECES];
        kn_message_part result[KN_COMM_PIECES];
        int shares = 0, results = 0;
        for (int i = 0; i < t.parts; i++) {
            const kn_comm_part *p = &t.part[i];
            const kn_comm_piece *q = p->piece;
            int64_t slice = slice_of(c, call, p->count), rest = p->count - n * slice;
            int64_t dsize = (int64_t)kn_dtype_size(q->dst_dtype);
            char *dst = (char *)q->dst + p->begin * dsize;
            if (slice > 0) {
                share mine = share_of(q, p->begin, slice, p->begin + me * slice, slice);
                h[shares++] = mine;
                result[results++] = (kn_message_part){ { mine.dst, 0, slice * dsize },
                                                       { dst, slice * dsize, slice * dsize } };
            }
            int64_t from = p->begin + n * slice;
            if (rest > 0)
                h[shares++] = share_of(q, from, 0, from, rest);
        }
        if (!add_shares(c, call, h, shares, s) ||
            (results > 0 && !exchange_all(c, call, result, results, KN_TAG_RESULT)))
            return false;
    }
    return true;
}

/* ---- broadcasts and scalars ------------------------------------------------------------------ */

static int steps_of(int n) /* ceil(log2 n) */
{
    int steps = 0;
    while (1 << steps < n)
        steps++;
    return steps;
}

/* A tree: in each step twice as many ranks have the bytes. */
static bool broadcast(kn_message_comm *c, const kn_comm_call *call)
{
    const kn_comm_piece *q = call->piece;
    int n = c->base.size, v = (c->base.rank + n - call->root) % n; /* the root is 0 */
    for (int64_t at = 0; at < q->count; at += CHUNK) {
        char *data = (char *)q->dst + at;
        for (int step = steps_of(n) - 1; step >= 0; step--) {
            int far = 1 << step, to = KN_TO_NONE, from = KN_TO_NONE;
            if (v % (2 * far) == 0 && v + far < n)
                to = (c->base.rank + far) % n;
            else if (v % (2 * far) == far)
                from = (c->base.rank + n - far) % n;
            if (!exchange_one(c, call, to, data, from, data, least(q->count - at, CHUNK),
                              KN_TAG_DATA))
                return false;
        }
    }
    return true;
}

/* Sums of i64 and maxima of f32, by recursive doubling: in step k ranks whose numbers differ in bit
 * k exchange what they have so far. Ranks from the largest power of two on give theirs to a lower
 * one first, and get the result from it. */
static bool scalars(kn_message_comm *c, const kn_comm_call *call)
{
    const kn_comm_piece *q = call->piece;
    int n = c->base.size, me = c->base.rank, pow = 1;
    int64_t esize = (int64_t)kn_dtype_size(q->dst_dtype), step = ROOM / esize;
    while (2 * pow <= n)
        pow *= 2;
    int above = me >= pow ? me - pow : KN_TO_NONE, below = me + pow < n ? me + pow : KN_TO_NONE;
    for (int64_t at = 0; at < q->count; at += step) {
        int64_t some = least(q->count - at, step), bytes = some * esize;
        char *data = (char *)q->dst + at * esize;
        if (!make_room(c, bytes))
            return false;
        if (n > pow && !exchange_one(c, call, above, data, below, c->room, bytes, KN_TAG_DATA))
            return false;
        if (below >= 0)
            kn_comm_combine(call->kind, data, c->room, some);
        for (int bit = 1; bit < pow; bit *= 2) {
            int peer = me < pow ? me ^ bit : KN_TO_NONE;
            if (!exchange_one(c, call, peer, data, peer, c->room, bytes, KN_TAG_DATA))
                return false;
            if (peer >= 0)
                kn_comm_combine(call->kind, data, c->room, some);
        }
        if (n > pow && !exchange_one(c, call, below, data, above, data, bytes, KN_TAG_RESULT))
            return false;
    }
    return true;
}

/* ---- calls ----------------------------------------------------------------------------------- */

bool kn_message_run(kn_comm *base, const kn_comm_call *call, kn_stream *s)
{
    kn_message_comm *c = (kn_message_comm *)base;
    c->left_since = 0;
    bool all = call->kind == KN_CALL_ALL_GATHER || call->kind == KN_CALL_GROUP ||
               call->kind == KN_CALL_REDUCE_SCATTER || call->kind == KN_CALL_ALL_REDUCE ||
               call->kind == KN_CALL_ALL_TO_ALL;
    if (!(all ? open_all(c, call) : open_steps(c, call)))
        return false;
    switch (call->kind) {
    case KN_CALL_ALL_GATHER:
    case KN_CALL_GROUP:
    case KN_CALL_ALL_TO_ALL:
        return all_gather(c, call, call->kind == KN_CALL_ALL_TO_ALL);
    case KN_CALL_REDUCE_SCATTER:
        return reduce_scatter(c, call, s);
    case KN_CALL_ALL_REDUCE:
        return all_reduce(c, call, s);
    case KN_CALL_SUM_I64:
    case KN_CALL_AGREE:
    case KN_CALL_MAX_F32:
        return scalars(c, call);
    case KN_CALL_BROADCAST:
        return broadcast(c, call);
    default:
        return true; /* barrier: every rank is here */
    }
}
