/* comm/local/shared_pool.c: the allocator of one rank's region of the shared mapping. Blocks come
 * in size classes, each with a list of free ones, newest first, so that a block that was used
 * before is used again with its pages in place: a fresh 28 MiB costs about 20 ms of page faults, a
 * warm one nothing. The lists live outside the blocks. */
#include "comm/local/local.h"
#include "kernels/memory_internal.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { PAGE = 4096, CLASSES = 64 * 8, POPULATE_FROM = 1 << 16 };

typedef struct free_list {
    void **block;
    int count, room;
} free_list;

typedef struct shared_pool {
    pthread_mutex_t lock;
    char *base;
    size_t bytes, used; /* used: below it everything belongs to some block */
    free_list list[CLASSES];
} shared_pool;

static void *take_fresh(shared_pool *p, size_t block)
{
    size_t at = p->used;
    if (block >= POPULATE_FROM)
        at = (at + PAGE - 1) / PAGE * PAGE;
    if (at > p->bytes || block > p->bytes - at)
        return NULL;
    char *m = p->base + at;
    /* one system call instead of a fault a page; kernels before 5.14 don't have it */
    if (block >= POPULATE_FROM && madvise(m, block, MADV_POPULATE_WRITE) != 0 &&
        (errno == ENOMEM || errno == EFAULT))
        return NULL;
    p->used = at + block;
    return m;
}

static void *take(kn_memory *self, size_t bytes)
{
    shared_pool *p = self->state;
    if (bytes > p->bytes)
        return NULL;
    int k = kn_size_class(bytes);
    pthread_mutex_lock(&p->lock);
    free_list *l = &p->list[k];
    void *m = l->count > 0 ? l->block[--l->count] : take_fresh(p, kn_class_size(k));
    pthread_mutex_unlock(&p->lock);
    return m;
}

static void give(kn_memory *self, void *m, size_t bytes)
{
    shared_pool *p = self->state;
    if (!m)
        return;
    free_list *l = &p->list[kn_size_class(bytes)];
    pthread_mutex_lock(&p->lock);
    if (l->count == l->room) {
        int room = l->room ? 2 * l->room : 8;
        void **grown = realloc(l->block, (size_t)room * sizeof *grown);
        if (grown) {
            l->block = grown;
            l->room = room;
        }
    }
    if (l->count < l->room) /* else the block is lost until the world ends */
        l->block[l->count++] = m;
    pthread_mutex_unlock(&p->lock);
}

bool kn_shared_pool_open(kn_memory *m, void *base, size_t bytes)
{
    shared_pool *p = calloc(1, sizeof *p);
    if (!p)
        return kn_fail("communicator memory: out of host memory for the pool's table");
    pthread_mutex_init(&p->lock, NULL);
    p->base = base;
    p->bytes = bytes;
    *m = (kn_memory){ .name = "shared", .device = KN_CPU, .take = take, .give = give, .state = p };
    return true;
}

void kn_shared_pool_close(kn_memory *m)
{
    shared_pool *p = m->state;
    if (!p)
        return;
    for (int k = 0; k < CLASSES; k++)
        free(p->list[k].block);
    pthread_mutex_destroy(&p->lock);
    free(p);
    m->state = NULL;
}
