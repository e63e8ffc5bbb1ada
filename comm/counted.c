/* comm/counted.c: a back end around another one: it hands every call on, and counts calls and bytes
 * of its rank, which it says when its world ends. */
#include "comm/launch/launch.h"
#include <stdatomic.h>
#include <stdio.h>

typedef struct counts {
    kn_comm *inner; /* the other back end's world */
    int rank;
    _Atomic int64_t calls, bytes;
} counts;

typedef struct counted_comm {
    kn_comm base;
    kn_comm *inner; /* of the same ranks */
} counted_comm;

static kn_comm *inner_of(const kn_comm *c)
{
    return ((const counted_comm *)c)->inner;
}

static bool run(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    counts *n = c->world->backend;
    atomic_fetch_add(&n->calls, 1);
    atomic_fetch_add(&n->bytes, (int64_t)kn_comm_bytes(c, call));
    return inner_of(c)->ops->run(inner_of(c), call, s);
}

static bool join(kn_comm *c, kn_comm *made, const char *name)
{
    kn_comm *inner =
        kn_comm_split(inner_of(c), made ? made->group : -1, made ? made->rank : 0, name);
    if (made)
        ((counted_comm *)made)->inner = inner;
    return kn_ok();
}

static void tell(kn_comm *c)
{
    if (inner_of(c)->ops->tell)
        inner_of(c)->ops->tell(inner_of(c));
}

static bool speaks(kn_comm *c)
{
    kn_comm *in = inner_of(c);
    return in->ops->speaks ? in->ops->speaks(in) : kn_poisoned(in->world->poison, NULL) == in->rank;
}

static bool healthy(kn_comm *c)
{
    return !inner_of(c)->ops->healthy || inner_of(c)->ops->healthy(inner_of(c));
}

static void close_world(kn_comm_world *w)
{
    counts *n = w->backend;
    fprintf(stderr, "knap: rank %d made %lld calls, of %lld bytes\n", n->rank, (long long)n->calls,
            (long long)n->bytes);
    kn_comm_world_free(n->inner->world);
    kn_host_free(n);
}

static const kn_comm_ops counted_ops = {
    .backend = "counted",
    .run = run,
    .bytes = sizeof(counted_comm),
    .join = join,
    .tell = tell,
    .speaks = speaks,
    .healthy = healthy,
    .close = close_world,
};

kn_comm *kn_comm_counted(kn_comm *inner)
{
    kn_comm_world *world = inner ? kn_comm_world_make() : NULL;
    counts *n = world ? kn_host_calloc(1, sizeof *n) : NULL;
    kn_comm *c = n ? kn_comm_make(world, &counted_ops, inner->size) : NULL;
    if (!c) {
        kn_host_free(n);
        kn_host_free(world);
        return NULL;
    }
    n->inner = inner;
    n->rank = inner->rank;
    world->backend = n;
    world->poison = inner->world->poison;
    world->memory = inner->world->memory;
    world->inline_only = inner->world->inline_only;
    ((counted_comm *)c)->inner = inner;
    kn_comm_enter(c, world, &counted_ops, inner->rank, inner->size, "world");
    return c;
}
