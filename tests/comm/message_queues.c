/* tests/comm/message_queues.c: see message_queues.h. */
#include "tests/comm/message_queues.h"
#include <stdlib.h>
#include <string.h>

typedef struct comm {
    kn_message_world base;
    message_queues *queues;
    message_count count;
} comm;

void queues_open(message_queues *o)
{
    *o = (message_queues){ .lock = PTHREAD_MUTEX_INITIALIZER, .came = PTHREAD_COND_INITIALIZER };
}

void queues_close(message_queues *o)
{
    for (int to = 0; to < QUEUE_RANKS; to++)
        for (int from = 0; from < QUEUE_RANKS; from++)
            while (o->box[to][from]) {
                queued_message *l = o->box[to][from];
                o->box[to][from] = l->next;
                free(l);
            }
    pthread_mutex_destroy(&o->lock);
    pthread_cond_destroy(&o->came);
}

/* ---- letters --------------------------------------------------------------------------------- */

static void send_to(kn_message_comm *c, const kn_message_parts *p, int j, int tag)
{
    comm *w = (comm *)c->w;
    int64_t bytes = kn_message_bytes(p, c->base.rank, j, true), at = 0;
    queued_message *l = malloc(sizeof *l + (size_t)bytes),
                   **end = &w->queues->box[c->base.member[j]][c->w->first->rank];
    *l = (queued_message){ .comm = c->base.id, .bytes = bytes, .tag = tag };
    for (int i = 0; i < p->parts; at += p->part[i++].send.bytes)
        memcpy(l->data + at, kn_message_at(p, i, j, true).at, (size_t)p->part[i].send.bytes);
    pthread_mutex_lock(&w->queues->lock);
    while (*end)
        end = &(*end)->next;
    *end = l;
    w->count.messages++;
    pthread_cond_broadcast(&w->queues->came);
    pthread_mutex_unlock(&w->queues->lock);
}

/* The first message for this communicator. If none comes, the runner ends the case. */
static queued_message *wait_for(kn_message_comm *c, int j)
{
    comm *w = (comm *)c->w;
    queued_message *found = NULL;
    pthread_mutex_lock(&w->queues->lock);
    while (!found) {
        queued_message **at = &w->queues->box[c->w->first->rank][c->base.member[j]];
        while (*at && (*at)->comm != c->base.id)
            at = &(*at)->next;
        found = *at;
        if (found)
            *at = found->next;
        else
            pthread_cond_wait(&w->queues->came, &w->queues->lock);
    }
    pthread_mutex_unlock(&w->queues->lock);
    return found;
}

static bool receive_from(kn_message_comm *c, const kn_message_parts *p, int j, int tag)
{
    queued_message *l = wait_for(c, j);
    int64_t at = 0;
    bool right = l->tag == tag && l->bytes == kn_message_bytes(p, c->base.rank, j, false);
    for (int i = 0; right && i < p->parts; at += p->part[i++].receive.bytes)
        memcpy(kn_message_at(p, i, j, false).at, l->data + at, (size_t)p->part[i].receive.bytes);
    free(l);
    return right || kn_fail("rank %d: a wrong message of rank %d", c->base.rank, j);
}

static bool exchange(kn_message_comm *c, const kn_comm_call *call, const kn_message_parts *p,
                     int tag)
{
    comm *w = (comm *)c->w;
    bool any = false, ok = true;
    (void)call;
    for (int j = 0; j < c->base.size; j++)
        if (kn_message_bytes(p, c->base.rank, j, true) > 0) {
            send_to(c, p, j, tag);
            any = true;
        }
    for (int j = 0; ok && j < c->base.size; j++)
        if (kn_message_bytes(p, c->base.rank, j, false) > 0) {
            ok = receive_from(c, p, j, tag);
            any = true;
        }
    w->count.steps += any;
    return ok;
}

/* ---- the rest of a transport, which a program that doesn't fail has no use for --------------- */

static void tell(kn_message_world *w, int r, const kn_message_word *word)
{
    (void)w, (void)r, (void)word;
}

static bool yes(kn_message_world *w)
{
    return w != NULL;
}

static bool closed(kn_message_comm *c, int peer)
{
    (void)c, (void)peer;
    return false;
}

static const kn_transport by_post = { exchange, tell, yes, yes, closed, NULL };

/* ---- worlds ---------------------------------------------------------------------------------- */

static bool begin(kn_comm *c, int size)
{
    return kn_message_comm_begin((kn_message_comm *)c, size);
}

static void end(kn_comm *c)
{
    kn_message_comm_end((kn_message_comm *)c);
}

static void close_world(kn_comm_world *world)
{
    kn_message_world_end(world->backend);
    kn_host_free(world->backend);
}

static const kn_comm_ops ops = {
    .backend = "comm",
    .run = kn_message_run,
    .bytes = sizeof(kn_message_comm),
    .begin = begin,
    .tell = kn_message_ops_tell,
    .end = end,
    .close = close_world,
};

kn_comm *queues_world(message_queues *o, int rank, int size)
{
    kn_comm_world *world = kn_comm_world_make();
    comm *w = kn_host_calloc(1, sizeof *w);
    if (!world || !w || !kn_message_world_begin(&w->base, &by_post, size))
        return NULL;
    world->backend = w;
    kn_comm *c = kn_comm_make(world, &ops, size);
    if (!c)
        return NULL;
    w->queues = o;
    w->base.first = c;
    world->inline_only = true; /* its counts are of the program's order */
    world->memory = kn_device_memory(KN_CPU);
    kn_comm_enter(c, world, &ops, rank, size, "world");
    return c;
}

void queues_free(kn_comm *world)
{
    if (world)
        kn_comm_world_free(world->world);
}

message_count queues_counted(kn_comm *world)
{
    return ((comm *)((kn_message_comm *)world)->w)->count;
}
