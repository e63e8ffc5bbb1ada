/* comm/local/local.c: the back end for ranks of one host: collectives over shared memory.
 *
 * Every rank publishes the addresses of its buffers and reads its part straight from the others'
 * regions. Bytes in private memory go through a bounce buffer in chunks. A call is a sequence of
 * meetings (local.h):
 *
 *   1. meet: descriptions are out; compare them (a mismatch is an error on every rank)
 *   2. for each round (one, or one a chunk if any rank is staged):
 *        copy my chunk to my bounce buffer; meet; read the others' chunks
 *   3. meet: everyone has read, the buffers are free again
 *
 * Calls of at most KN_LOCAL_SMALL bytes put their data into the slot before meeting 1, and that is
 * all there is to them. Bounce buffers and payloads have two halves used in turn: when a half comes
 * round again, a meeting has passed since it was last read. */
#include "comm/local/local.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"
#include <math.h>
#include <stdatomic.h>
#include <string.h>

static kn_local_slot *slot_of(kn_local_comm *c, int rank)
{
    kn_local_head *h = c->local->head;
    return kn_local_slot_at(h, c->channel, c->member[rank]);
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
    if (!kn_comm_meeting(c->base.world))
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
        int family = c->base.family->id, a = c->member[0], b = c->member[r];
        kn_call_note of_a, of_b; /* they may have differed before this call */
        if (!kn_call_log_differ(&kn_local_slot_at(h, family, a)->log,
                                &kn_local_slot_at(h, family, b)->log, &of_a, &of_b)) {
            of_a = first->note;
            of_b = other->note;
        }
        return kn_call_mismatch(a, &of_a, b, &of_b);
    }
    return true;
}

/* Publishes this rank's call and waits until all have published theirs. */
static bool open_call(kn_local_comm *c, const kn_comm_call *call, bool small)
{
    kn_local_call *mine = &slot_of(c, c->base.rank)->call[c->number & 1];
    *mine = (kn_local_call){
        .note = kn_call_note_of(&c->base, call), .src = -1, .dst = -1, .bounce = -1
    };
    if (!small) {
        mine->src = offset_of(c, call->src);
        mine->dst = offset_of(c, call->dst);
        bool reads = call->kind == KN_CALL_ALL_REDUCE; /* the others read my dst */
        bool gives = call->kind != KN_CALL_BROADCAST || call->root == c->base.rank;
        if ((gives && mine->src < 0) || (reads && mine->dst < 0)) {
            if (!c->bounce)
                c->bounce = kn_take(&c->local->memory, KN_BOUNCE_BYTES, KN_MEM_COMM);
            if (!c->bounce)
                return false;
            mine->bounce = offset_of(c, c->bounce);
        }
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

/* One chunk of a call: elements [begin, begin + count) of the whole, staged in half of the bounce
 * buffers. */
typedef struct chunk {
    int64_t begin, count;
    unsigned half;
} chunk;

/* The address of rank's element 0 of this round, if its whole source begins at offset src and the
 * round at element first of it. */
static char *given(kn_local_comm *c, int rank, const chunk *r, int64_t first, int64_t staged_first,
                   size_t esize)
{
    const kn_local_call *d = said(c, rank);
    if (d->src >= 0)
        return at_offset(c, d->src) + (size_t)first * esize;
    return at_offset(c, d->bounce) + (size_t)r->half * KN_CHUNK + (size_t)staged_first * esize;
}

/* The place of rank's results of this round of an all-reduce. */
static char *result(kn_local_comm *c, int rank, const chunk *r, size_t esize)
{
    const kn_local_call *d = said(c, rank);
    if (d->dst >= 0)
        return at_offset(c, d->dst) + (size_t)r->begin * esize;
    return at_offset(c, d->bounce) + (size_t)(2 + r->half) * KN_CHUNK;
}

static char *my_half(kn_local_comm *c, const chunk *r)
{
    return c->bounce + (size_t)r->half * KN_CHUNK;
}

/* dst[size * count] = every rank's count elements. */
static bool round_all_gather(kn_local_comm *c, const kn_comm_call *call, const chunk *r,
                             bool staged)
{
    size_t esize = kn_dtype_size(call->dst_dtype);
    int64_t bytes = r->count * (int64_t)esize;
    const char *mine = (const char *)call->src + (size_t)r->begin * esize;
    if (staged) {
        if (said(c, c->base.rank)->src < 0)
            copy(my_half(c, r), mine, bytes);
        if (!meet(c, call))
            return false;
    }
    for (int i = 0; i < c->base.size; i++) {
        int peer = (c->base.rank + i) % c->base.size; /* not all from the same one at once */
        char *to = (char *)call->dst + (size_t)(peer * call->count + r->begin) * esize;
        copy(to, i == 0 ? mine : given(c, peer, r, r->begin, 0, esize), bytes);
    }
    return true;
}

/* dst[count] = acc + every rank's elements rank * count ... */
static bool round_reduce_scatter(kn_local_comm *c, const kn_comm_call *call, const chunk *r,
                                 kn_stream *s, bool staged)
{
    size_t esize = kn_dtype_size(call->src_dtype), dsize = kn_dtype_size(call->dst_dtype);
    int n = c->base.size, me = c->base.rank;
    if (staged) {
        if (said(c, me)->src < 0)
            for (int j = 0; j < n; j++)
                copy(my_half(c, r) + (size_t)(j * r->count) * esize,
                     (const char *)call->src + (size_t)(j * call->count + r->begin) * esize,
                     r->count * (int64_t)esize);
        if (!meet(c, call))
            return false;
    }
    for (int j = 0; j < n; j++)
        c->source[j] = given(c, j, r, me * call->count + r->begin, me * r->count, esize);
    size_t skip = (size_t)r->begin * dsize;
    return kn_comm_sum(s, (char *)call->dst + skip,
                       call->acc ? (const char *)call->acc + skip : NULL, c->source, n, r->count,
                       call->dst_dtype, call->src_dtype);
}

/* Each rank adds its slice of the round for all, then fetches the others' slices. In place is safe:
 * slice i of every src is read by rank i only, before it writes slice i of its own dst. */
static bool round_all_reduce(kn_local_comm *c, const kn_comm_call *call, const chunk *r,
                             kn_stream *s, bool staged)
{
    size_t esize = kn_dtype_size(call->src_dtype), dsize = kn_dtype_size(call->dst_dtype);
    int n = c->base.size, me = c->base.rank;
    if (staged) {
        if (said(c, me)->src < 0)
            copy(my_half(c, r), (const char *)call->src + (size_t)r->begin * esize,
                 r->count * (int64_t)esize);
        if (!meet(c, call))
            return false;
    }
    int64_t slice = (r->count + n - 1) / n;
    slice = (slice + 15) / 16 * 16;
#define FROM(i) ((i)*slice < r->count ? (i)*slice : r->count)
    int64_t from = FROM(me), count = FROM(me + 1) - from;
    for (int j = 0; j < n; j++)
        c->source[j] = given(c, j, r, r->begin + from, from, esize);
    const char *acc = call->acc;
    if (acc)
        acc += (size_t)(r->begin + from) * dsize;
    if (!kn_comm_sum(s, result(c, me, r, dsize) + (size_t)from * dsize, acc, c->source, n, count,
                     call->dst_dtype, call->src_dtype) ||
        !meet(c, call))
        return false;
    char *dst = (char *)call->dst + (size_t)r->begin * dsize;
    for (int i = 0; i < n; i++) {
        int peer = (me + i) % n;
        size_t skip = (size_t)FROM(peer) * dsize;
        copy(dst + skip, result(c, peer, r, dsize) + skip,
             (FROM(peer + 1) - FROM(peer)) * (int64_t)dsize);
    }
#undef FROM
    return true;
}

static bool round_broadcast(kn_local_comm *c, const kn_comm_call *call, const chunk *r, bool staged)
{
    bool root = c->base.rank == call->root;
    char *data = (char *)call->dst + r->begin;
    if (staged) {
        if (root)
            copy(my_half(c, r), data, r->count);
        if (!meet(c, call))
            return false;
    }
    if (!root)
        copy(data, given(c, call->root, r, r->begin, 0, 1), r->count);
    return true;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Is any rank's buffer private, so that the call goes in chunks? */
static bool anybody_staged(kn_local_comm *c)
{
    for (int r = 0; r < c->base.size; r++)
        if (said(c, r)->bounce >= 0)
            return true;
    return false;
}

/* Elements of a chunk: as many as fit into half a bounce buffer. */
static int64_t chunk_elements(kn_local_comm *c, const kn_comm_call *call)
{
    int64_t src = (int64_t)kn_dtype_size(call->src_dtype),
            dst = (int64_t)kn_dtype_size(call->dst_dtype);
    int64_t n = KN_CHUNK / (src > dst ? src : dst);
    return call->kind == KN_CALL_REDUCE_SCATTER ? n / c->base.size : n;
}

static bool run_large(kn_local_comm *c, const kn_comm_call *call, kn_stream *s)
{
    if (!open_call(c, call, false))
        return false;
    bool staged = anybody_staged(c);
    int64_t step = staged ? chunk_elements(c, call) : call->count;
    for (int64_t at = 0; at < call->count; at += step) {
        chunk r = { at, call->count - at < step ? call->count - at : step, c->half };
        c->half ^= 1;
        bool ok = call->kind == KN_CALL_ALL_GATHER ? round_all_gather(c, call, &r, staged)
                  : call->kind == KN_CALL_REDUCE_SCATTER
                      ? round_reduce_scatter(c, call, &r, s, staged)
                  : call->kind == KN_CALL_ALL_REDUCE ? round_all_reduce(c, call, &r, s, staged)
                                                     : round_broadcast(c, call, &r, staged);
        if (!ok)
            return false;
    }
    return meet(c, call);
}

static void add_i64(kn_local_comm *c, int64_t *data, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint64_t sum = 0; /* wraps like the machine does */
        for (int r = 0; r < c->base.size; r++)
            sum += ((const uint64_t *)(const void *)payload(c, r))[i];
        data[i] = (int64_t)sum;
    }
}

static void max_f32(kn_local_comm *c, float *data, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float most = ((const float *)(const void *)payload(c, 0))[i];
        for (int r = 1; r < c->base.size; r++) {
            float x = ((const float *)(const void *)payload(c, r))[i];
            most = isnan(most) || x <= most ? most : x;
        }
        data[i] = most;
    }
}

/* bytes: sent by this rank. whole: the published call (call may be a piece of it). */
static bool run_small(kn_local_comm *c, const kn_comm_call *whole, const kn_comm_call *call,
                      size_t bytes, kn_stream *s)
{
    int n = c->base.size, me = c->base.rank;
    if (bytes > 0 && (call->kind != KN_CALL_BROADCAST || call->root == me))
        memcpy(payload(c, me), call->src, bytes);
    if (!open_call(c, whole, true))
        return false;
    size_t esize = kn_dtype_size(call->src_dtype);
    switch (call->kind) {
    case KN_CALL_ALL_GATHER:
    case KN_CALL_GROUP:
        for (int r = 0; r < n && bytes > 0; r++)
            memcpy((char *)call->dst + (size_t)r * bytes, payload(c, r), bytes);
        return true;
    case KN_CALL_REDUCE_SCATTER:
    case KN_CALL_ALL_REDUCE:
        for (int r = 0; r < n; r++)
            c->source[r] =
                payload(c, r) +
                (call->kind == KN_CALL_REDUCE_SCATTER ? (size_t)(me * call->count) * esize : 0);
        return kn_comm_sum(s, call->dst, call->acc, c->source, n, call->count, call->dst_dtype,
                           call->src_dtype);
    case KN_CALL_SUM_I64:
    case KN_CALL_AGREE:
        add_i64(c, call->dst, call->count);
        return true;
    case KN_CALL_MAX_F32:
        max_f32(c, call->dst, call->count);
        return true;
    case KN_CALL_BROADCAST:
        if (call->root != me && bytes > 0)
            memcpy(call->dst, payload(c, call->root), bytes);
        return true;
    default:
        return true; /* barrier: the meeting was all */
    }
}

/* Reductions of scalars are in place and small by nature; longer ones go in pieces. */
static bool run_scalars(kn_local_comm *c, const kn_comm_call *call)
{
    int64_t esize = (int64_t)kn_dtype_size(call->dst_dtype), step = KN_LOCAL_SMALL / esize;
    int64_t at = 0;
    do {
        kn_comm_call piece = *call;
        piece.count = call->count - at < step ? call->count - at : step;
        piece.src = piece.dst = (char *)call->dst + at * esize;
        if (at > 0)
            c->number++;
        if (!run_small(c, call, &piece, (size_t)(piece.count * esize), NULL))
            return false;
        at += step;
    } while (at < call->count);
    return true;
}

bool kn_local_run(kn_comm *base, const kn_comm_call *call, kn_stream *s)
{
    kn_local_comm *c = (kn_local_comm *)base;
    const char *text;
    int failed = kn_local_poisoned(c->local->head, &text);
    if (failed >= 0)
        return kn_fail("rank %d failed: %s", failed, text);
    c->number++;
    atomic_store_explicit(&c->local->head->last[c->local->rank], base->family->id,
                          memory_order_relaxed);
    if (call->kind == KN_CALL_SUM_I64 || call->kind == KN_CALL_MAX_F32)
        return run_scalars(c, call);
    int64_t gives = call->count * (int64_t)kn_dtype_size(call->src_dtype);
    if (call->kind == KN_CALL_REDUCE_SCATTER)
        gives *= base->size;
    if (gives <= KN_LOCAL_SMALL)
        return run_small(c, call, call, (size_t)gives, s);
    return run_large(c, call, s);
}
