/* comm/self.c: the back end for a world of one rank: no waits, at most a copy or a sum with the
 * accumulator. */
#include "comm/comm_internal.h"
#include <stdio.h>
#include <string.h>

/* The world's state: the message that poisoned it. */
typedef struct self_world {
    _Atomic bool poisoned;
    char text[512];
} self_world;

static bool run(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    self_world *w = c->world->backend;
    if (w->poisoned)
        return kn_fail_of_rank(0, w->text);
    if (!kn_comm_meeting(c->world))
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

static void poison(kn_comm *c, const char *message)
{
    self_world *w = c->world->backend;
    if (!w->poisoned) {
        snprintf(w->text, sizeof w->text, "%s", message);
        w->poisoned = true;
    }
}

static int culprit(kn_comm *c)
{
    return ((self_world *)c->world->backend)->poisoned ? 0 : -1;
}

static void destroy(kn_comm *c)
{
    kn_host_free(c);
}

static void close_world(kn_comm_world *w)
{
    kn_host_free(w->backend);
}

static kn_comm *make(kn_comm_world *world, int size)
{
    (void)world;
    (void)size;
    return kn_host_calloc(1, sizeof(kn_comm));
}

static const kn_comm_ops self_ops = {
    .backend = "self",
    .run = run,
    .make = make,
    .poison = poison,
    .culprit = culprit,
    .destroy = destroy,
    .close = close_world,
};

kn_comm *kn_comm_alone(void)
{
    kn_comm_world *world = kn_comm_world_make();
    self_world *state = kn_host_calloc(1, sizeof *state);
    kn_comm *c = world && state ? kn_comm_make(world, &self_ops, 1) : NULL;
    if (!c) {
        kn_host_free(world);
        kn_host_free(state);
        return NULL;
    }
    world->backend = state;
    world->memory = kn_device_memory(KN_CPU);
    kn_comm_enter(c, world, &self_ops, 0, 1, "world");
    return c;
}
