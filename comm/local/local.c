/* comm/local/local.c: the back end for ranks of one host: collectives over shared memory.
 *
 * Every rank publishes the addresses of its buffers and reads its part straight from the others'
 * regions. Bytes in private memory are staged where the others see them: in a bounce buffer, chunk
 * by chunk. A call is a sequence of meetings (local.h):
 *
 *   1. meet: descriptions are out; compare them (a mismatch is an error on every rank)
 *   2. for each trip (one, or one a bounce buffer's fill if any rank is staged):
 *        copy my part to my bounce buffer; meet; read the others' parts
 *   3. meet: everyone has read, the buffers are free again
 *
 * A trip carries parts of as many pieces as it has room for: a call of several pieces takes no more
 * meetings than one of one piece.
 *
 * What fits into KN_LOCAL_SMALL bytes is staged in the slot, beside the description: meeting 1 is
 * all there is to such a call. Bounce buffers and payloads of slots have two halves used in turn:
 * when a half comes round again, a meeting has passed since it was last read. */
#include "comm/local/local.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"
#include <stdatomic.h>
#include <string.h>

static kn_local_slot *slot_of(kn_local_comm *c, int rank)
{
    kn_local_head *h = c->local->head;
    return kn_local_slot_at(h, c->base.id, c->base.member[rank]);
}

static char *at_offset(kn_local_comm *c, int64_t offset)
{
    return (char *)c->local->head + offset;
}

/* -1 if p lies in memory that the other ranks can't see. */
static int64_t offset_of(kn_local_comm *c, const void *p)
{
    kn_local_head *h = c->local->head;
    uintptr_t a = (uintptr_t)p, base = (uintptr_t)h;
    if (a < base + h->control_bytes || a >= base + c->local->bytes)
        return -1;
    return (int64_t)(a - base);
}

/* ---- meeting --------------------------------------------------------------------------------- */

static bool meet(kn_local_comm *c, const kn_comm_call *call)
{
    bool may_spin = !kn_context_is_worker();
    if (!kn_fault_pass(KN_AT_MEETING))
        return false;
    uint32_t target = ++c->phase;
    kn_local_publish(slot_of(c, c->base.rank), target);
    for (int i = 1; i < c->base.size; i++) {
        int peer = (c->base.rank + i) % c->base.size;
        if (!kn_local_wait(c, peer, target, call, may_spin))
            return false;
    }
    return true;
}

static const kn_local_call *said(kn_local_comm *c, int rank)
{
    return &slot_of(c, rank)->call[c->number & 1];
}

static char *payload(kn_local_comm *c, int rank)
{
    return (char *)slot_of(c, rank)->payload[c->number & 1];
}

/* Every rank compares with rank 0, so that all find the same pair. */
static bool compare(kn_local_comm *c)
{
    const kn_local_call *first = said(c, 0);
    for (int r = 1; r < c->base.size; r++) {
        const kn_local_call *other = said(c, r);
        if (first->note.hash == other->note.hash)
            continue;
        kn_local_head *h = c->local->head;
        int family = c->base.family->id, a = c->base.member[0], b = c->base.member[r];
        kn_comm_note of_a, of_b; /* they may have differed before this call */
        if (!kn_comm_log_differ(&kn_local_slot_at(h, family, a)->log,
                                &kn_local_slot_at(h, family, b)->log, &of_a, &of_b)) {
            of_a = first->note;
            of_b = other->note;
        }
        return kn_comm_mismatch(a, &of_a, b, &of_b);
    }
    return true;
}

/* Publishes this rank's call and waits until all have published theirs. */
static bool open_call(kn_local_comm *c, const kn_comm_call *call, bool small)
{
    kn_local_call *mine = &slot_of(c, c->base.rank)->call[c->number & 1];
    mine->note = kn_comm_note_of(&c->base, call);
    mine->bounce = -1;
    bool reads = call->kind == KN_CALL_ALL_REDUCE; /* the others read my dst */
    bool gives = call->kind != KN_CALL_BROADCAST || call->root == c->base.rank, stages = false;
    for (int i = 0; i < call->pieces && !small; i++) {
        mine->src[i] = offset_of(c, call->piece[i].src);
        mine->dst[i] = offset_of(c, call->piece[i].dst);
        stages |= call->piece[i].count > 0 &&
                  ((gives && mine->src[i] < 0) || (reads && mine->dst[i] < 0));
    }
    if (stages) {
        if (!c->bounce)
            c->bounce = kn_take(&c->local->memory, KN_BOUNCE_BYTES, KN_MEM_COMM);
        if (!c->bounce)
            return false;
        mine->bounce = offset_of(c, c->bounce);
    }
    return meet(c, call) && compare(c);
}

/* ---- moving bytes ---------------------------------------------------------------------------- */

typedef struct block_copy {
    char *dst;
    const char *src;
    int64_t bytes;
} block_copy;

static void copy_pages(const void *ctx, int64_t begin, int64_t end)
{
    const block_copy *c = ctx;
    int64_t from = begin * 4096, to = end * 4096 < c->bytes ? end * 4096 : c->bytes;
    memcpy(c->dst + from, c->src + from, (size_t)(to - from));
}

/* memcpy, by several threads if that is allowed here and the block is large. */
static void copy(void *dst, const void *src, int64_t bytes)
{
    if (dst != src && bytes > 0)
        kn_each_range(kn_threads_for(2 * bytes), (bytes + 4095) / 4096, copy_pages,
                      &(block_copy){ dst, src, bytes });
}

/* The bytes of one pass. */
typedef struct trip {
    kn_comm_trip of;
    bool small;    /* they are staged in slots, all of them */
    bool bounces;  /* any rank's are staged in bounce buffers, */
    unsigned half; /* in this half */
} trip;
typedef kn_comm_part part;

/* Where rank's bytes of a part lie if they are staged. */
static char *staged(kn_local_comm *c, int rank, const trip *t, const part *p)
{
    return t->small ? payload(c, rank) + p->at
                    : at_offset(c, said(c, rank)->bounce) + (size_t)t->half * KN_CHUNK + p->at;
}

/* The address of rank's element first of a piece, which is element staged_first of what it staged
 * of the part. */
static char *given(kn_local_comm *c, int rank, const trip *t, const part *p, int64_t first,
                   int64_t staged_first)
{
    const size_t esize = kn_dtype_size(p->piece->src_dtype);
    const int64_t src = t->small ? -1 : said(c, rank)->src[p->index];
    return src >= 0 ? at_offset(c, src) + (size_t)first * esize
                    : staged(c, rank, t, p) + (size_t)staged_first * esize;
}

/* The place of rank's results of a part of an all-reduce. */
static char *result(kn_local_comm *c, int rank, const trip *t, const part *p)
{
    const kn_local_call *d = said(c, rank);
    if (d->dst[p->index] >= 0)
        return at_offset(c, d->dst[p->index]) +
               (size_t)p->begin * kn_dtype_size(p->piece->dst_dtype);
    return at_offset(c, d->bounce) + (size_t)(2 + t->half) * KN_CHUNK + p->at;
}

/* How many blocks of a piece's elements each rank gives. */
static int blocks_of(const kn_local_comm *c, const kn_comm_call *call)
{
    bool each = call->kind == KN_CALL_REDUCE_SCATTER || call->kind == KN_CALL_ALL_TO_ALL;
    return each ? c->base.size : 1;
}

/* This rank's bytes go to where they are staged, unless the others can see them where they are. */
static void stage(kn_local_comm *c, const kn_comm_call *call, const trip *t, const part *p)
{
    size_t esize = kn_dtype_size(p->piece->src_dtype);
    bool gives = call->kind != KN_CALL_BROADCAST || call->root == c->base.rank;
    const char *from = (const char *)p->piece->src + (size_t)p->begin * esize;
    int64_t bytes = p->count * (int64_t)esize;
    if (!gives || (!t->small && said(c, c->base.rank)->src[p->index] >= 0))
        return;
    char *to = staged(c, c->base.rank, t, p);
    for (int j = 0; j < blocks_of(c, call); j++)
        copy(to + j * bytes, from + (size_t)(j * p->piece->count) * esize, bytes);
}

/* dst[size * count] = every rank's count elements; each: those that it has for this rank. */
static void gather(kn_local_comm *c, const trip *t, const part *p, bool each)
{
    size_t esize = kn_dtype_size(p->piece->dst_dtype);
    int64_t block = each ? c->base.rank : 0, first = block * p->piece->count + p->begin;
    for (int i = 0; i < c->base.size; i++) {
        int peer = (c->base.rank + i) % c->base.size; /* not all from the same one at once */
        char *to = (char *)p->piece->dst + (size_t)(peer * p->piece->count + p->begin) * esize;
        const char *own = (const char *)p->piece->src + (size_t)first * esize;
        copy(to, i == 0 ? own : given(c, peer, t, p, first, block * p->count),
             p->count * (int64_t)esize);
    }
}

/* to[count] = acc, from element at on, + every rank's elements from first on, or of what it staged
 * of the part from staged_first on. */
static bool add(kn_local_comm *c, const trip *t, const part *p, int64_t at, int64_t first,
                int64_t staged_first, int64_t count, char *to, kn_stream *s)
{
    const kn_comm_piece *q = p->piece;
    const char *acc = q->acc;
    acc = acc ? acc + (size_t)at * kn_dtype_size(q->dst_dtype) : NULL;
    for (int j = 0; j < c->base.size; j++)
        c->source[j] = given(c, j, t, p, first, staged_first);
    return kn_comm_sum(s, to, acc, c->source, c->base.size, count, q->dst_dtype, q->src_dtype);
}

/* Where rank's slice of count elements begins. */
static int64_t slice_at(const kn_local_comm *c, int64_t count, int rank)
{
    int64_t slice = (count + c->base.size - 1) / c->base.size;
    slice = (slice + 15) / 16 * 16;
    return rank * slice < count ? rank * slice : count;
}

/* An all-reduce: each rank adds its slice of a part for all. In place is safe: slice i of every src
 * is read by rank i only, before it writes slice i of its own dst. */
static bool add_slice(kn_local_comm *c, const trip *t, const part *p, kn_stream *s)
{
    int me = c->base.rank;
    int64_t from = slice_at(c, p->count, me), count = slice_at(c, p->count, me + 1) - from;
    char *to = result(c, me, t, p) + (size_t)from * kn_dtype_size(p->piece->dst_dtype);
    return add(c, t, p, p->begin + from, p->begin + from, from, count, to, s);
}

/* Then it fetches the others' slices. */
static void fetch_slices(kn_local_comm *c, const trip *t, const part *p)
{
    size_t dsize = kn_dtype_size(p->piece->dst_dtype);
    char *dst = (char *)p->piece->dst + (size_t)p->begin * dsize;
    for (int i = 0; i < c->base.size; i++) {
        int peer = (c->base.rank + i) % c->base.size;
        int64_t from = slice_at(c, p->count, peer), to = slice_at(c, p->count, peer + 1);
        size_t skip = (size_t)from * dsize;
        copy(dst + skip, result(c, peer, t, p) + skip, (to - from) * (int64_t)dsize);
    }
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Is any rank's buffer private, so that the call goes through the bounce buffers? */
static bool anybody_staged(kn_local_comm *c)
{
    for (int r = 0; r < c->base.size; r++)
        if (said(c, r)->bounce >= 0)
            return true;
    return false;
}

/* This rank's result of a part; of a large all-reduce its slice. */
static bool take(kn_local_comm *c, const kn_comm_call *call, const trip *t, const part *p,
                 kn_stream *s)
{
    const int64_t me = c->base.rank;
    char *dst = (char *)p->piece->dst + (size_t)p->begin * kn_dtype_size(p->piece->dst_dtype);
    switch (call->kind) {
    case KN_CALL_ALL_GATHER:
    case KN_CALL_GROUP:
    case KN_CALL_ALL_TO_ALL:
        gather(c, t, p, call->kind == KN_CALL_ALL_TO_ALL);
        return true;
    case KN_CALL_REDUCE_SCATTER:
        return add(c, t, p, p->begin, me * p->piece->count + p->begin, me * p->count, p->count, dst,
                   s);
    case KN_CALL_ALL_REDUCE:
        return t->small ? add(c, t, p, 0, 0, 0, p->count, dst, s) : add_slice(c, t, p, s);
    case KN_CALL_BROADCAST:
        if (call->root != me)
            copy(dst, given(c, call->root, t, p, p->begin, 0), p->count);
        return true;
    default: /* scalars */
        for (int r = 0; r < c->base.size; r++)
            if (r != me)
                kn_comm_combine(call->kind, dst, given(c, r, t, p, p->begin, 0), p->count);
        return true;
    }
}

static bool run_trip(kn_local_comm *c, const kn_comm_call *call, const trip *t, kn_stream *s)
{
    bool ok = true;
    for (int i = 0; (t->small || t->bounces) && i < t->of.parts; i++)
        stage(c, call, t, &t->of.part[i]);
    if (t->small ? !open_call(c, call, true) : t->bounces && !meet(c, call))
        return false;
    for (int i = 0; ok && i < t->of.parts; i++)
        ok = take(c, call, t, &t->of.part[i], s);
    if (t->small || call->kind != KN_CALL_ALL_REDUCE)
        return ok;
    if (!ok || !meet(c, call))
        return false;
    for (int i = 0; i < t->of.parts; i++)
        fetch_slices(c, t, &t->of.part[i]);
    return true;
}

static bool run_large(kn_local_comm *c, const kn_comm_call *call, kn_stream *s)
{
    trip t;
    t.of.next = 0;
    t.of.next_begin = 0;
    t.small = false;
    c->number++;
    if (!open_call(c, call, false))
        return false;
    t.bounces = anybody_staged(c);
    while (kn_comm_next_trip(&t.of, call, blocks_of(c, call), t.bounces ? KN_CHUNK : INT64_MAX)) {
        t.half = c->half;
        c->half ^= 1;
        if (!run_trip(c, call, &t, s))
            return false;
    }
    return meet(c, call);
}

/* Scalars are in place and small by nature; more of them are several small calls. */
bool kn_local_run(kn_comm *base, const kn_comm_call *call, kn_stream *s)
{
    kn_local_comm *c = (kn_local_comm *)base;
    const bool scalars = call->kind == KN_CALL_SUM_I64 || call->kind == KN_CALL_MAX_F32;
    trip t;
    t.of.next = 0;
    t.of.next_begin = 0;
    t.small = true;
    atomic_store_explicit(&c->local->head->last[c->local->rank], base->family->id,
                          memory_order_relaxed);
    kn_comm_next_trip(&t.of, call, blocks_of(c, call), KN_LOCAL_SMALL);
    if (t.of.next < call->pieces && !scalars)
        return run_large(c, call, s);
    do {
        c->number++;
        if (!run_trip(c, call, &t, s))
            return false;
    } while (kn_comm_next_trip(&t.of, call, 1, KN_LOCAL_SMALL));
    return true;
}
