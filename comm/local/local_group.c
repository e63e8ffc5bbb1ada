/* comm/local/local_group.c: communicators over shared memory: the world, and groups of its
 * ranks. */
#include "comm/local/local.h"
#include <stdatomic.h>
#include <unistd.h>

static void end(kn_comm *base)
{
    kn_local_comm *c = (kn_local_comm *)base;
    if (c->bounce)
        kn_give(&c->local->memory, c->bounce, KN_BOUNCE_BYTES, KN_MEM_COMM);
    kn_host_free(c->source);
}

/* The rank whose error came first prints it, once; the supervisor then doesn't. */
static bool speaks(kn_comm *base)
{
    kn_local *l = ((kn_local_comm *)base)->local;
    int first = kn_poisoned(&l->head->poison, NULL);
    return (first < 0 || first == l->rank) && atomic_exchange(&l->head->spoken, 1) == 0;
}

static void close_world(kn_comm_world *w)
{
    kn_local *l = w->backend;
    kn_shared_pool_close(&l->memory);
    kn_local_left(l->head, l->rank);
    if (l->owns_map)
        kn_local_unmap(l->head, l->bytes);
    if (l->lock >= 0)
        close(l->lock);
    kn_host_free(l);
}

static bool begin(kn_comm *base, int size)
{
    kn_local_comm *c = (kn_local_comm *)base;
    c->local = base->world->backend;
    c->source = kn_host_calloc((size_t)size, sizeof *c->source);
    return c->source != NULL;
}

/* Its number is its channel. The first of a family has the log. */
static bool join(kn_comm *c, kn_comm *made, const char *name)
{
    kn_local *l = ((kn_local_comm *)c)->local;
    if (made && made->id >= KN_LOCAL_CHANNELS)
        return kn_fail("comm_split %s: more than %d communicators in one world: make them once and "
                       "keep them",
                       name, KN_LOCAL_CHANNELS);
    if (made && made->family == made)
        made->log = &kn_local_slot_at(l->head, made->id, l->rank)->log;
    return true;
}

static const kn_comm_ops local_ops = {
    .backend = "local",
    .run = kn_local_run,
    .bytes = sizeof(kn_local_comm),
    .begin = begin,
    .join = join,
    .speaks = speaks,
    .healthy = kn_local_healthy,
    .in_step = kn_local_in_step,
    .late = kn_local_late,
    .end = end,
    .close = close_world,
};

kn_comm *kn_comm_local(kn_local_head *head, size_t bytes, int rank, bool owns_map)
{
    kn_comm_world *world = kn_comm_world_make();
    kn_local *l = kn_host_calloc(1, sizeof *l);
    kn_comm *c = NULL;
    kn_set_threads(head->cores.threads);
    kn_set_free_cores(head->cores.free);
    if (!world || !l)
        goto fail;
    world->backend = l;
    world->poison = &head->poison;
    *l = (kn_local){ .head = head, .bytes = bytes, .rank = rank, .owns_map = owns_map, .lock = -1 };
    char *region = (char *)head + head->control_bytes + (size_t)rank * head->region_bytes;
    if (!kn_shared_pool_open(&l->memory, region, head->region_bytes) ||
        !(c = kn_comm_make(world, &local_ops, head->size)))
        goto fail;
    c->log = &kn_local_slot_at(head, 0, rank)->log;
    world->memory = &l->memory;
    kn_comm_enter(c, world, &local_ops, rank, head->size, "world");
    return c;
fail:
    kn_host_free(world);
    if (l && l->memory.state)
        kn_shared_pool_close(&l->memory);
    kn_host_free(l);
    return NULL;
}
