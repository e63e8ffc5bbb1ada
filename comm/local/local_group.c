/* comm/local/local_group.c: communicators over shared memory: the world, and groups of its
 * ranks. */
#include "comm/local/local.h"
#include <stdatomic.h>
#include <unistd.h>

static const kn_comm_ops local_ops;

static void destroy(kn_comm *base)
{
    kn_local_comm *c = (kn_local_comm *)base;
    if (c->bounce)
        kn_give(&c->local->memory, c->bounce, KN_BOUNCE_BYTES, KN_MEM_COMM);
    kn_host_free(c->member);
    kn_host_free(c->source);
    kn_host_free(c);
}

static void poison(kn_comm *base, const char *message)
{
    kn_local_comm *c = (kn_local_comm *)base;
    kn_local_poison(c->local->head, c->local->rank, message);
}

static int culprit(kn_comm *base)
{
    return kn_local_poisoned(((kn_local_comm *)base)->local->head, NULL);
}

/* The rank whose error came first prints it, once; the supervisor then doesn't. */
static bool speaks(kn_comm *base)
{
    kn_local *l = ((kn_local_comm *)base)->local;
    int first = kn_local_poisoned(l->head, NULL);
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

static kn_local_comm *comm_alloc(kn_local *l, int size)
{
    kn_local_comm *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->local = l;
    c->member = kn_host_calloc((size_t)size, sizeof *c->member);
    c->source = kn_host_calloc((size_t)size, sizeof *c->source);
    if (!c->member || !c->source) {
        destroy(&c->base);
        return NULL;
    }
    return c;
}

/* Names c among the world's communicators; family NULL: c begins one. */
static void join_family(kn_local_comm *c, kn_comm *family, int channel)
{
    c->channel = c->base.id = channel;
    c->base.family = family ? family : &c->base;
    if (!family)
        c->base.log = &kn_local_slot_at(c->local->head, channel, c->local->rank)->log;
}

/* The group's first rank takes a channel; everyone learns it through the parent. */
static kn_comm *group(kn_comm *base, const int *member, int size, int rank, const char *name)
{
    kn_local_comm *parent = (kn_local_comm *)base, *made = NULL;
    int64_t *channel = kn_host_calloc((size_t)base->size, sizeof *channel), mine = -1;
    if (!channel || (size > 0 && !(made = comm_alloc(parent->local, size))))
        goto fail;
    if (size > 0 && rank == 0)
        mine = atomic_fetch_add(&parent->local->head->next_channel, 1);
    kn_comm_piece piece = { channel, NULL, &mine, 1, KN_I64, KN_I64 };
    kn_comm_call call = kn_comm_call_of(KN_CALL_GROUP, 0, &piece, 1, name);
    if (!kn_local_run(base, &call, NULL) || size == 0)
        goto fail;
    if (channel[member[0]] >= KN_LOCAL_CHANNELS) {
        kn_fail("comm_split %s: more than %d communicators in one world: make them once and keep "
                "them",
                name ? name : "-", KN_LOCAL_CHANNELS);
        goto fail;
    }
    made->channel = (int)channel[member[0]];
    for (int i = 0; i < size; i++)
        made->member[i] = parent->member[member[i]];
    bool dup = size == base->size;
    for (int i = 0; i < size; i++)
        dup = dup && member[i] == i;
    join_family(made, dup ? base->family : NULL, made->channel);
    kn_comm_enter(&made->base, base->world, &local_ops, rank, size, name);
    kn_host_free(channel);
    return &made->base;
fail:
    kn_host_free(channel);
    if (made)
        destroy(&made->base);
    return NULL;
}

static const kn_comm_ops local_ops = {
    .backend = "local",
    .run = kn_local_run,
    .group = group,
    .poison = poison,
    .culprit = culprit,
    .speaks = speaks,
    .healthy = kn_local_healthy,
    .in_step = kn_local_in_step,
    .late = kn_local_late,
    .destroy = destroy,
    .close = close_world,
};

kn_comm *kn_comm_local(kn_local_head *head, size_t bytes, int rank, bool owns_map, bool spin)
{
    kn_comm_world *world = kn_comm_world_make();
    kn_local *l = kn_host_calloc(1, sizeof *l);
    kn_local_comm *c = NULL;
    if (!world || !l)
        goto fail;
    *l = (kn_local){
        .head = head, .bytes = bytes, .rank = rank, .owns_map = owns_map, .spin = spin, .lock = -1
    };
    char *region = (char *)head + head->control_bytes + (size_t)rank * head->region_bytes;
    if (!kn_shared_pool_open(&l->memory, region, head->region_bytes) ||
        !(c = comm_alloc(l, head->size)))
        goto fail;
    for (int r = 0; r < head->size; r++)
        c->member[r] = r;
    join_family(c, NULL, 0);
    world->backend = l;
    world->memory = &l->memory;
    kn_comm_enter(&c->base, world, &local_ops, rank, head->size, "world");
    return &c->base;
fail:
    kn_host_free(world);
    if (l && l->memory.state)
        kn_shared_pool_close(&l->memory);
    kn_host_free(l);
    return NULL;
}
