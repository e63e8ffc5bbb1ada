/* comm/messages/messages.c: collectives made of exchanges of messages (messages.h).
 *
 * Reductions send each rank the elements that it adds, and it adds them in rank order: the same
 * terms in the same order as over shared memory, hence the same bits. MPI's own reductions choose
 * their order by size and number of ranks. */
#include "comm/messages/messages.h"
#include "kernels/kernels.h"
#include <math.h>
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

/* Every rank sends its call; nothing else moves before all calls are found equal. */
static bool open_call(kn_message_comm *c, const kn_comm_call *call)
{
    int n = c->base.size, me = c->base.rank;
    kn_call_note mine = kn_call_note_of(&c->base, call);
    kn_message_parts p = { .send = (char *)&mine,
                           .send_bytes = sizeof mine,
                           .receive = (char *)c->said,
                           .receive_stride = sizeof *c->said,
                           .receive_bytes = sizeof *c->said,
                           .from = -1 };
    c->said[me] = mine;
    if (!c->w->by->exchange(c, call, &p, KN_TAG_HEADER))
        return false;
    for (int r = 0; r < n; r++) { /* as they came: perhaps without an end */
        c->said[r].label[sizeof c->said[r].label - 1] = 0;
        c->said[r].comm[sizeof c->said[r].comm - 1] = 0;
    }
    pthread_mutex_lock(&c->w->lock);
    for (int r = 0; r < n; r++)
        c->w->last[c->member[r]] = c->said[r];
    pthread_mutex_unlock(&c->w->lock);
    for (int r = 1; r < n; r++) {
        if (c->said[r].hash == c->said[0].hash)
            continue;
        return kn_call_mismatch(c->member[0], &c->said[0], c->member[r], &c->said[r]);
    }
    return true;
}

static bool all_gather(kn_message_comm *c, const kn_comm_call *call)
{
    int64_t bytes = call->count * (int64_t)kn_dtype_size(call->dst_dtype);
    char *dst = call->dst, *own = dst + c->base.rank * bytes;
    if (own != (const char *)call->src)
        memmove(own, call->src, (size_t)bytes);
    for (int64_t at = 0; at < bytes; at += CHUNK) {
        int64_t some = least(bytes - at, CHUNK);
        kn_message_parts p = { .send = own + at,
                               .send_bytes = some,
                               .receive = dst + at,
                               .receive_stride = bytes,
                               .receive_bytes = some,
                               .from = -1 };
        if (!c->w->by->exchange(c, call, &p, KN_TAG_DATA))
            return false;
    }
    return true;
}

/* dst[count] = acc + the count elements that every rank gives us. */
typedef struct share {
    const char *src; /* this rank's bytes for rank 0; stride bytes further on for the next rank */
    int64_t stride, count;
    char *dst;
    const char *acc;
} share;

static bool add_share(kn_message_comm *c, const kn_comm_call *call, const share *h, kn_stream *s)
{
    int n = c->base.size, me = c->base.rank;
    int64_t esize = (int64_t)kn_dtype_size(call->src_dtype), part = h->count * esize;
    if (!make_room(c, n * part))
        return false;
    kn_message_parts p = { .send = h->src,
                           .send_stride = h->stride,
                           .send_bytes = part,
                           .receive = c->room,
                           .receive_stride = part,
                           .receive_bytes = part,
                           .from = -1 };
    if (!c->w->by->exchange(c, call, &p, KN_TAG_DATA))
        return false;
    for (int j = 0; j < n; j++)
        c->source[j] = j == me ? h->src + me * h->stride : c->room + j * part;
    return kn_comm_sum(s, h->dst, h->acc, c->source, n, h->count, call->dst_dtype, call->src_dtype);
}

static bool reduce_scatter(kn_message_comm *c, const kn_comm_call *call, kn_stream *s)
{
    int64_t esize = (int64_t)kn_dtype_size(call->src_dtype);
    int64_t dsize = (int64_t)kn_dtype_size(call->dst_dtype);
    int64_t step = ROOM / c->base.size / esize;
    for (int64_t at = 0; at < call->count; at += step) {
        int64_t some = least(call->count - at, step);
        share h = { .src = (const char *)call->src + at * esize,
                    .stride = call->count * esize,
                    .count = some,
                    .dst = (char *)call->dst + at * dsize,
                    .acc = call->acc ? (const char *)call->acc + at * dsize : NULL };
        if (!add_share(c, call, &h, s))
            return false;
    }
    return true;
}

/* size slices from element at on: everyone adds its slice, then all fetch the others' results. In
 * place is safe: slice j of src is sent before rank j's result comes to lie there. */
static bool all_reduce_block(kn_message_comm *c, const kn_comm_call *call, int64_t at,
                             int64_t slice, kn_stream *s)
{
    int me = c->base.rank;
    int64_t esize = (int64_t)kn_dtype_size(call->src_dtype);
    int64_t dsize = (int64_t)kn_dtype_size(call->dst_dtype);
    char *dst = (char *)call->dst + at * dsize, *own = dst + me * slice * dsize;
    share h = { .src = (const char *)call->src + at * esize,
                .stride = slice * esize,
                .count = slice,
                .dst = own,
                .acc = call->acc ? (const char *)call->acc + (at + me * slice) * dsize : NULL };
    kn_message_parts p = { .send = own,
                           .send_bytes = slice * dsize,
                           .receive = dst,
                           .receive_stride = slice * dsize,
                           .receive_bytes = slice * dsize,
                           .from = -1 };
    return add_share(c, call, &h, s) && c->w->by->exchange(c, call, &p, KN_TAG_RESULT);
}

/* The few elements that don't divide by the ranks: everyone adds them all. */
static bool all_reduce_rest(kn_message_comm *c, const kn_comm_call *call, int64_t at, kn_stream *s)
{
    int64_t esize = (int64_t)kn_dtype_size(call->src_dtype);
    int64_t dsize = (int64_t)kn_dtype_size(call->dst_dtype), rest = call->count - at;
    share h = { .src = (const char *)call->src + at * esize,
                .stride = 0,
                .count = rest,
                .dst = (char *)call->dst + at * dsize,
                .acc = call->acc ? (const char *)call->acc + at * dsize : NULL };
    return add_share(c, call, &h, s);
}

static bool all_reduce(kn_message_comm *c, const kn_comm_call *call, kn_stream *s)
{
    int n = c->base.size;
    int64_t step = ROOM / n / (int64_t)kn_dtype_size(call->src_dtype), at = 0;
    while (call->count - at >= 64 * n) {
        int64_t slice = least((call->count - at) / n, step);
        if (!all_reduce_block(c, call, at, slice, s))
            return false;
        at += n * slice;
    }
    return at == call->count || all_reduce_rest(c, call, at, s);
}

static bool broadcast(kn_message_comm *c, const kn_comm_call *call)
{
    bool root = c->base.rank == call->root;
    for (int64_t at = 0; at < call->count; at += CHUNK) {
        int64_t some = least(call->count - at, CHUNK);
        char *data = (char *)call->dst + at;
        kn_message_parts p = { .send = data,
                               .send_bytes = root ? some : 0,
                               .receive = data,
                               .receive_bytes = root ? 0 : some,
                               .from = call->root };
        if (!c->w->by->exchange(c, call, &p, KN_TAG_DATA))
            return false;
    }
    return true;
}

static float larger(float a, float b) /* NaN wins */
{
    return isnan(a) || b <= a ? a : b;
}

/* Sums of i64 and maxima of f32: everyone gets everything and reduces it, in pieces. */
static bool scalars(kn_message_comm *c, const kn_comm_call *call)
{
    int n = c->base.size, me = c->base.rank;
    int64_t esize = (int64_t)kn_dtype_size(call->dst_dtype), step = ROOM / n / esize;
    for (int64_t at = 0; at < call->count; at += step) {
        int64_t some = least(call->count - at, step), bytes = some * esize;
        char *data = (char *)call->dst + at * esize;
        kn_message_parts p = { .send = data,
                               .send_bytes = bytes,
                               .receive_stride = bytes,
                               .receive_bytes = bytes,
                               .from = -1 };
        if (!make_room(c, n * bytes))
            return false;
        p.receive = c->room;
        if (!c->w->by->exchange(c, call, &p, KN_TAG_DATA))
            return false;
        memcpy(c->room + me * bytes, data, (size_t)bytes);
        for (int64_t i = 0; i < some; i++) {
            uint64_t sum = 0;
            float most = ((float *)(void *)c->room)[i];
            for (int r = 0; r < n; r++)
                if (call->kind == KN_CALL_MAX_F32)
                    most = larger(most, ((float *)(void *)(c->room + r * bytes))[i]);
                else
                    sum += ((uint64_t *)(void *)(c->room + r * bytes))[i];
            if (call->kind == KN_CALL_MAX_F32)
                ((float *)(void *)data)[i] = most;
            else
                ((uint64_t *)(void *)data)[i] = sum;
        }
    }
    return true;
}

bool kn_message_run(kn_comm *base, const kn_comm_call *call, kn_stream *s)
{
    kn_message_comm *c = (kn_message_comm *)base;
    c->left_since = 0;
    if (kn_message_broken(c->w) || !open_call(c, call))
        return false;
    switch (call->kind) {
    case KN_CALL_ALL_GATHER:
    case KN_CALL_GROUP:
        return all_gather(c, call);
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
