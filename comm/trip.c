/* comm/trip.c: how the pieces of a call are dealt to trips: buffers of bounded size, or messages,
 * that carry parts of as many pieces as they have room for. Uses no memory of its own. */
#include "comm/comm_internal.h"

bool kn_comm_next_trip(kn_comm_trip *t, const kn_comm_call *call, int blocks, int64_t room)
{
    int64_t used = 0;
    t->parts = 0;
    while (t->next < call->pieces) {
        const kn_comm_piece *q = &call->piece[t->next];
        size_t dst = kn_dtype_size(q->dst_dtype), src = kn_dtype_size(q->src_dtype);
        int64_t each = (int64_t)(src > dst ? src : dst) * blocks, some = q->count - t->next_begin;
        int64_t fits = used < room ? (room - used) / each : 0;
        some = some < fits ? some : fits;
        if (some > 0)
            t->part[t->parts++] = (kn_comm_part){ q, t->next_begin, some, used, t->next };
        used += KN_ALIGNED(some * each);
        t->next_begin += some;
        if (t->next_begin < q->count) /* it is full */
            break;
        t->next++;
        t->next_begin = 0;
    }
    return t->parts > 0;
}
