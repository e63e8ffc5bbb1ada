/* comm/simulated.c: the back end of a world whose other ranks don't exist: time passes on meta
 * streams (comm.c), nothing moves. So one process walks through a rank's step among a thousand. On
 * the host the other ranks say what this one says: they agree with it. */
#include "comm/comm_internal.h"
#include <string.h>

static bool run(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    const kn_comm_piece *p = call->piece;
    const bool sums = call->kind == KN_CALL_SUM_I64 || call->kind == KN_CALL_AGREE;
    const bool come = call->kind == KN_CALL_ALL_GATHER || call->kind == KN_CALL_ALL_TO_ALL;
    (void)s;
    for (int64_t i = 0; sums && i < p->count; i++)
        ((int64_t *)p->dst)[i] *= c->size;
    for (int i = 0; come && i < c->size * call->pieces; i++) {
        const size_t bytes = (size_t)kn_piece_dst_bytes(&p[i / c->size]);
        memmove((char *)p[i / c->size].dst + (size_t)(i % c->size) * bytes, p[i / c->size].src,
                bytes);
    }
    return kn_ok();
}

static bool join(kn_comm *c, kn_comm *made, const char *name)
{
    (void)name;
    if (made) {
        made->slow_latency = c->slow_latency;
        made->slow_rate = c->slow_rate;
    }
    return true;
}

static const kn_comm_ops simulated_ops = { .backend = "simulated", .run = run, .join = join };

static kn_comm *enter(kn_comm_world *world, int size, const char *name, double latency, double rate)
{
    kn_comm *c = kn_comm_make(world, &simulated_ops, size);
    if (!c)
        return NULL;
    kn_comm_enter(c, world, &simulated_ops, 0, size, name);
    c->slow_latency = latency;
    c->slow_rate = rate;
    return c;
}

kn_comm *kn_comm_simulated_part(kn_comm *c, int size, const char *name)
{
    if (!kn_given(c, "kn_comm_simulated_part", "the communicator") ||
        !kn_comm_usable(c, "kn_comm_simulated_part"))
        return NULL;
    return enter(c->world, size, name, c->slow_latency, c->slow_rate);
}

kn_comm *kn_comm_simulated(int ranks, double latency_s, double bytes_per_s)
{
    if (ranks < 1 || latency_s < 0 || bytes_per_s < 0)
        return kn_fail_null(
            "kn_comm_simulated: %d ranks, %g s, %g bytes a second: at least one rank, and "
            "nothing negative",
            ranks, latency_s, bytes_per_s);
    kn_comm_world *world = kn_ok() ? kn_comm_world_make() : NULL;
    if (!world)
        return NULL;
    world->memory = kn_device_memory(KN_CPU);
    kn_comm *c = enter(world, ranks, "world", latency_s, bytes_per_s);
    if (!c)
        kn_host_free(world);
    return c;
}

void kn_comm_simulated_free(kn_comm *world)
{
    if (world && kn_comm_usable(world, "kn_comm_simulated_free"))
        kn_comm_world_free(world->world);
}
