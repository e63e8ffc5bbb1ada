/* kernels/cuda/runtime/arena.c: memory that belongs to a recorded step. A replay writes the
 * addresses that its recording used, so no other user may have them as long as there are replays:
 *
 *   what is taken while recording    comes from an arena of the graph: a pool whose segments are
 *                                    blocks of the context's pool. Within the recording it is given
 *                                    back and taken again as usual; afterwards nobody takes from
 *                                    it.
 *   what was out before the end of   (parameters, inputs, scratch that grows later) the graph may
 *                                    have
 *   the recording and comes back     seen: it is held until the graph is freed. Blocks that were
 *                                    taken later go back to the pool at once.
 *
 * A tensor may outlive the graph in whose arena it lies; the arena ends with its last block. */
#include "kernels/cuda/runtime/arena.h"

#include <stdlib.h>

typedef struct held {
    void *p;
    size_t bytes;
} held;

struct kn_gpu_arena {
    kn_gpu_memory *memory;
    kn_gpu_arena *next; /* of the same memory */
    kn_gpu_arena *more; /* of the same graph */
    kn_gpu_pool *pool;
    bool recording, freed;
    int64_t since; /* blocks of the context's pool taken before this take may be in the graph */
    int64_t out;   /* bytes that tensors have of the arena: in the ledger already */
    held *held;
    size_t count, room;
    int64_t held_bytes, entered; /* entered: in the ledger as KN_MEM_GRAPH */
};

/* ---- segments are blocks of the context's pool ----------------------------------------------- */

static void *get_segment(void *arg, size_t bytes)
{
    return kn_gpu_pool_take(((kn_gpu_memory *)arg)->pool, bytes);
}

static void put_segment(void *arg, void *p, size_t bytes)
{
    (void)bytes;
    kn_gpu_pool_give(((kn_gpu_memory *)arg)->pool, p);
}

static kn_gpu_arena *begin(kn_gpu_memory *m)
{
    kn_gpu_arena *a = kn_host_calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->memory = m;
    a->recording = true;
    a->pool = kn_gpu_pool_create(
        (kn_gpu_pool_source){ .get = get_segment, .put = put_segment, .arg = m });
    if (!a->pool) {
        kn_host_free(a);
        return NULL;
    }
    pthread_mutex_lock(&m->lock);
    a->next = m->arenas;
    m->arenas = m->recording = a;
    pthread_mutex_unlock(&m->lock);
    return a;
}

kn_gpu_arena *kn_gpu_arena_begin(kn_gpu_memory *m)
{
    kn_gpu_arena *first = NULL;
    for (; m; m = m->more) {
        kn_gpu_arena *a = begin(m);
        if (!a) {
            kn_gpu_arena_free(first);
            return NULL;
        }
        a->more = first;
        first = a;
    }
    return first;
}

/* ---- accounts -------------------------------------------------------------------------------- */

/* Enters into the ledger the memory that only the graph has. */
static void account(kn_gpu_arena *a)
{
    int64_t alone = a->recording ? 0 : kn_gpu_pool_read(a->pool).reserved - a->out + a->held_bytes;
    if (alone != a->entered)
        kn_ledger_move(kn_context_get(), KN_MEM_GRAPH, alone - a->entered);
    a->entered = alone;
}

static void unlink_arena(kn_gpu_arena *a)
{
    for (kn_gpu_arena **at = &a->memory->arenas; *at; at = &(*at)->next)
        if (*at == a) {
            *at = a->next;
            return;
        }
}

/* Gives back memory that a freed graph's arena no longer needs, in the end the arena itself. */
static void settle(kn_gpu_arena *a)
{
    if (a->freed)
        kn_gpu_pool_trim(a->pool);
    account(a);
    if (!a->freed || kn_gpu_pool_read(a->pool).blocks_out > 0)
        return;
    unlink_arena(a);
    kn_gpu_pool_destroy(a->pool);
    free(a->held);
    kn_host_free(a);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

void *kn_gpu_arena_take(kn_gpu_arena *a, size_t bytes)
{
    void *p = kn_gpu_pool_take(a->pool, bytes);
    if (p)
        a->out += (int64_t)bytes;
    return p;
}

/* Without memory for the list the block is never handed out again: lost, but not shared. */
static void hold(kn_gpu_arena *a, void *p, size_t bytes)
{
    if (a->count == a->room) {
        size_t room = a->room ? 2 * a->room : 64;
        held *more = realloc(a->held, room * sizeof *more);
        if (!more) {
            kn_fail(
                "out of memory: the host has no bytes for a list of blocks; end other programs");
            return;
        }
        a->held = more;
        a->room = room;
    }
    a->held[a->count++] = (held){ p, bytes };
    a->held_bytes += (int64_t)bytes;
    account(a);
}

void kn_gpu_arenas_give(kn_gpu_memory *m, void *p, size_t bytes)
{
    for (kn_gpu_arena *a = m->arenas; a; a = a->next) {
        if (kn_gpu_pool_taken(a->pool, p) < 0)
            continue;
        kn_gpu_pool_give(a->pool, p);
        a->out -= (int64_t)bytes;
        settle(a);
        return;
    }
    int64_t taken = kn_gpu_pool_taken(m->pool, p);
    for (kn_gpu_arena *a = m->arenas; a && taken >= 0; a = a->next) {
        if (a->freed || !(a->recording || taken < a->since))
            continue;
        hold(a, p, bytes);
        return;
    }
    kn_gpu_pool_give(m->pool, p);
}

static void recorded(kn_gpu_arena *a)
{
    kn_gpu_memory *m = a->memory;
    pthread_mutex_lock(&m->lock);
    if (a->recording) {
        a->recording = false;
        a->since = kn_gpu_pool_takes(m->pool);
        m->recording = NULL;
        account(a);
    }
    pthread_mutex_unlock(&m->lock);
}

void kn_gpu_arena_recorded(kn_gpu_arena *a)
{
    for (; a; a = a->more)
        recorded(a);
}

static void end(kn_gpu_arena *a)
{
    kn_gpu_memory *m = a->memory;
    recorded(a);
    pthread_mutex_lock(&m->lock);
    a->freed = true;
    a->held_bytes = 0;
    for (size_t i = 0; i < a->count; i++) /* another graph may have seen it, too */
        kn_gpu_arenas_give(m, a->held[i].p, a->held[i].bytes);
    a->count = 0;
    settle(a);
    pthread_mutex_unlock(&m->lock);
    kn_gpu_memory_settle(m);
}

void kn_gpu_arena_free(kn_gpu_arena *a)
{
    for (kn_gpu_arena *more; a; a = more) {
        more = a->more;
        end(a);
    }
}
