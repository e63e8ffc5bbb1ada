/* comm/self.c: the back end for a world of one rank: no waits, at most a copy or a sum with the
 * accumulator. */
#include "comm/comm_internal.h"
#include <string.h>

static bool run(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    (void)c;
    if (!kn_fault_pass(KN_AT_MEETING))
        return false;
    bool adds = call->kind == KN_CALL_REDUCE_SCATTER || call->kind == KN_CALL_ALL_REDUCE;
    for (int i = 0; i < call->pieces; i++) {
        const kn_comm_piece *p = &call->piece[i];
        if (adds) {
            if (!kn_comm_sum(s, p->dst, p->acc, &p->src, 1, p->count, p->dst_dtype, p->src_dtype))
                return false;
        } else if (p->dst != p->src) {
            memmove(p->dst, p->src, (size_t)kn_piece_dst_bytes(p));
        }
    }
    return true;
}

static const kn_comm_ops self_ops = { .backend = "self", .run = run };

kn_comm *kn_comm_alone(void)
{
    kn_comm_world *world = kn_comm_world_make();
    kn_comm *c = world ? kn_comm_make(world, &self_ops, 1) : NULL;
    if (!c) {
        kn_host_free(world);
        return NULL;
    }
    world->memory = kn_device_memory(KN_CPU);
    kn_comm_enter(c, world, &self_ops, 0, 1, "world");
    return c;
}
