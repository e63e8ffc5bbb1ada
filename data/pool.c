/* data/pool.c: batches that are being filled, by the loader's own thread or by workers.
 *
 * The workers claim rows of the oldest batch that has any left, so that all of them work on the one
 * needed next; each row is written once, at its place, so their number changes no bit. A worker has
 * a context of its own: its errors and tensors aren't the program's, and its kernels use no team.
 * Workers take cores that the rank has left over (kn_set_free_cores), as streams do; those without
 * one run at lower priority, so that they use the time in which the rank waits. Memory and storages
 * belong to the loader's thread. */
#include "data/loader_internal.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define POLITE 5 /* nice levels below the threads of the rank */

typedef struct worker {
    kn_loader *loader;
    pthread_t thread;
    int number;
    bool took_core;
} worker;

struct kn_loader_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, filled; /* rows to claim, or stop; a batch is done, or a worker idle */
    kn_slot *slot;               /* a ring of room batches, in the order of their rounds */
    int room, first, count;
    int busy; /* workers that fill rows */
    bool stop;
    pid_t process; /* that has the threads */
    int started;
    kn_context *context; /* whose cores they took */
    worker worker[];
};

/* ---- slots ---------------------------------------------------------------------------------- */

void kn_slot_drop(kn_slot *slot)
{
    for (int f = 0; f < KN_MAX_FIELDS; f++)
        kn_storage_unref(slot->storage[f]);
    memset(slot, 0, sizeof *slot);
}

static bool slot_make(const kn_loader *l, kn_slot *slot, int64_t round)
{
    *slot = (kn_slot){ .round = round };
    slot->filled.bad_row = slot->filled.end_row = INT64_MAX;
    if (l->device == KN_META || kn_loader_gathers_there(l) || kn_loader_view(l, round) >= 0)
        return true;
    slot->rows = l->batch;
    kn_memory *memory = kn_pinned_memory(l->device);
    for (int f = 0; f < l->fields; f++) {
        size_t bytes = (size_t)l->batch * l->row_bytes[f];
        slot->storage[f] = kn_storage_create(memory, bytes, KN_MEM_DATA, l->caller);
        if (!slot->storage[f]) {
            kn_slot_drop(slot);
            return false;
        }
        slot->data[f] = slot->storage[f]->data;
    }
    return true;
}

/* ---- workers -------------------------------------------------------------------------------- */

static kn_slot *nth(kn_loader_pool *p, int i)
{
    return &p->slot[(p->first + i) % p->room];
}

/* The oldest batch with rows that nobody has claimed, or NULL. */
static kn_slot *find_work(kn_loader_pool *p)
{
    for (int i = 0; i < p->count; i++)
        if (nth(p, i)->claimed < nth(p, i)->rows)
            return nth(p, i);
    return NULL;
}

static void merge(kn_filled *all, const kn_filled *part)
{
    all->replaced += part->replaced;
    if (part->bad_row < all->bad_row) {
        all->bad_row = part->bad_row;
        memcpy(all->error, part->error, sizeof all->error);
    }
    if (part->end_row < all->end_row) {
        all->end_row = part->end_row;
        all->end = part->end;
    }
}

/* Claims rows of the slot and fills them. The lock is held before and after. */
static void work_on(worker *w, kn_loader_pool *p, kn_slot *slot)
{
    const kn_loader *l = w->loader;
    int64_t each = slot->rows / (4 * l->workers) > 0 ? slot->rows / (4 * l->workers) : 1;
    each += l->mix ? each % 2 : 0; /* pairs stay together */
    int64_t begin = slot->claimed, end = begin + each < slot->rows ? begin + each : slot->rows;
    kn_filled part = { .bad_row = INT64_MAX, .end_row = INT64_MAX };
    slot->claimed = end;
    p->busy++;
    pthread_mutex_unlock(&p->lock);
    kn_loader_fill(l, slot, begin, end, w->number, &part);
    kn_clear_error();
    pthread_mutex_lock(&p->lock);
    p->busy--;
    merge(&slot->filled, &part);
    slot->done += end - begin;
    if (slot->done == slot->rows || p->busy == 0)
        pthread_cond_broadcast(&p->filled);
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    kn_loader_pool *p = w->loader->pool;
    kn_set_threads(1);
    if (!w->took_core) {
        int level = getpriority(PRIO_PROCESS, 0); /* of this thread */
        setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), level + POLITE);
    }
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        kn_slot *slot = find_work(p);
        if (slot)
            work_on(w, p, slot);
        else
            pthread_cond_wait(&p->work, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    kn_context_end();
    return NULL;
}

/* ---- the pool's life ------------------------------------------------------------------------ */

static bool is_elsewhere(const kn_loader_pool *p)
{
    return p->process != getpid();
}

/* Starts the threads with all signals blocked: Ctrl-C belongs to the main thread. */
static bool start(kn_loader *l, kn_loader_pool *p)
{
    sigset_t all, before;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (; p->started < l->workers && error == 0; p->started += error == 0) {
        worker *w = &p->worker[p->started];
        *w = (worker){ .loader = l, .number = p->started, .took_core = kn_core_take(p->context) };
        error = pthread_create(&w->thread, NULL, worker_main, w);
        if (error != 0 && w->took_core)
            kn_core_return(p->context);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return p->started == l->workers || kn_fail("%s: worker %d of %d could not be started: %s",
                                               l->caller, p->started, l->workers, strerror(error));
}

static bool pool_make(kn_loader *l)
{
    int room = l->ahead + 1;
    kn_loader_pool *p = kn_host_calloc(1, sizeof *p + (size_t)l->workers * sizeof(worker));
    if (!p)
        return false;
    p->slot = kn_host_calloc((size_t)room, sizeof *p->slot);
    if (!p->slot) {
        kn_host_free(p);
        return false;
    }
    p->room = room;
    p->process = getpid();
    p->context = kn_context_get();
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->filled, NULL);
    l->pool = p;
    if (start(l, p))
        return true;
    kn_loader_pool_free(l);
    return false;
}

static void drop_slots(kn_loader_pool *p)
{
    for (; p->count > 0; p->count--) {
        kn_slot_drop(nth(p, 0));
        p->first = (p->first + 1) % p->room;
    }
}

void kn_loader_pool_reset(kn_loader *l)
{
    kn_loader_pool *p = l->pool;
    if (!p || is_elsewhere(p))
        return;
    pthread_mutex_lock(&p->lock);
    for (int i = 0; i < p->count; i++)
        nth(p, i)->claimed = nth(p, i)->rows; /* nobody begins more of them */
    while (p->busy > 0)
        pthread_cond_wait(&p->filled, &p->lock);
    drop_slots(p);
    pthread_mutex_unlock(&p->lock);
}

void kn_loader_pool_free(kn_loader *l)
{
    kn_loader_pool *p = l->pool;
    if (!p)
        return;
    if (!is_elsewhere(p)) { /* a child of fork has none of the threads, and the lock as it was */
        pthread_mutex_lock(&p->lock);
        p->stop = true;
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
        for (int i = 0; i < p->started; i++) {
            pthread_join(p->worker[i].thread, NULL);
            if (p->worker[i].took_core)
                kn_core_return(p->context);
        }
        pthread_mutex_destroy(&p->lock);
        pthread_cond_destroy(&p->work);
        pthread_cond_destroy(&p->filled);
    }
    drop_slots(p);
    kn_host_free(p->slot);
    kn_host_free(p);
    l->pool = NULL;
}

/* ---- taking a batch -------------------------------------------------------------------------- */

/* The next rounds, up to the room there is. */
static bool push_all(kn_loader *l)
{
    kn_loader_pool *p = l->pool;
    bool ok = true;
    while (ok && p->count < p->room && l->round + p->count <= kn_loader_last_round(l)) {
        kn_slot slot;
        ok = slot_make(l, &slot, l->round + p->count);
        if (!ok)
            break;
        pthread_mutex_lock(&p->lock);
        *nth(p, p->count) = slot;
        p->count++;
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
    }
    return ok;
}

static bool take_filled(kn_loader *l, kn_slot *slot)
{
    kn_loader_pool *p = l->pool;
    if (!push_all(l)) {
        kn_loader_pool_reset(l);
        return false;
    }
    pthread_mutex_lock(&p->lock);
    while (nth(p, 0)->done < nth(p, 0)->rows)
        pthread_cond_wait(&p->filled, &p->lock);
    *slot = *nth(p, 0);
    memset(nth(p, 0), 0, sizeof *slot);
    p->first = (p->first + 1) % p->room;
    p->count--;
    pthread_mutex_unlock(&p->lock);
    return true;
}

bool kn_loader_pool_take(kn_loader *l, kn_slot *slot)
{
    if (l->workers == 0) {
        if (!slot_make(l, slot, l->round))
            return false;
        kn_loader_fill(l, slot, 0, slot->rows, 0, &slot->filled);
        return true;
    }
    if (l->pool && is_elsewhere(l->pool))
        return kn_fail("%s: the threads of this loader belong to the process that was forked; "
                       "make a loader in each",
                       l->caller);
    return (l->pool || pool_make(l)) && take_filled(l, slot);
}
