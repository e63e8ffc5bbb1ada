/* fsdp/comm/mpi.c: the world of MPI_COMM_WORLD and communicators over some of its ranks
 * (mpi_world.h). The only file that begins and ends MPI. */
#include "fsdp/comm/launch.h"
#include "fsdp/comm/mpi_world.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A rank that only repeats another's error gives it this long to print and end the job. */
#define PATIENCE_S 1.5
/* An error takes less than this to reach the other ranks. */
#define ROUND_S 0.1

static const kn_comm_ops mpi_ops;

static void destroy(kn_comm *base)
{
    kn_mpi_comm *c = (kn_mpi_comm *)base;
    kn_give(kn_device_memory(KN_CPU), c->room, c->room_bytes, KN_MEM_COMM);
    if (c->mpi != MPI_COMM_NULL && kn_mpi_poisoned(c->w, NULL) < 0)
        MPI_Comm_free(&c->mpi);
    kn_free_host(c->base.log);
    kn_free_host(c->member);
    kn_free_host(c->req);
    kn_free_host(c->done);
    kn_free_host(c->said);
    kn_free_host(c->source);
    kn_free_host(c);
}

static kn_mpi_comm *comm_alloc(kn_mpi_world *w, int size)
{
    kn_mpi_comm *c = kn_calloc(1, sizeof *c);
    size_t n = (size_t)size;
    if (!c)
        return NULL;
    c->w = w;
    c->mpi = MPI_COMM_NULL;
    c->base.log = kn_calloc(1, sizeof *c->base.log);
    c->member = kn_calloc(n, sizeof *c->member);
    c->req = kn_calloc(2 * n, sizeof *c->req);
    c->done = kn_calloc(2 * n, sizeof *c->done);
    c->said = kn_calloc(n, sizeof *c->said);
    c->source = kn_calloc(n, sizeof *c->source);
    if (c->base.log && c->member && c->req && c->done && c->said && c->source)
        return c;
    destroy(&c->base);
    return NULL;
}

static void poison(kn_comm *base, const char *message)
{
    kn_mpi_world *w = ((kn_mpi_comm *)base)->w;
    kn_mpi_poison(w, w->first->rank, message);
    kn_mpi_tell_poison(w);
}

static int culprit(kn_comm *base)
{
    return kn_mpi_poisoned(((kn_mpi_comm *)base)->w, NULL);
}

/* The culprit prints and then ends the job, which ends the others while they wait here. Where
 * several ranks found an error at the same moment, the lowest of them is it. */
static bool speaks(kn_comm *base)
{
    kn_mpi_world *w = ((kn_mpi_comm *)base)->w;
    int me = w->first->rank;
    double end = kn_now() + ROUND_S;
    kn_mpi_tell_poison(w);
    while (kn_now() < end) {
        kn_mpi_listen(w);
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
    int first = kn_mpi_poisoned(w, NULL);
    if ((first < 0 || first == me) && atomic_load(&w->loudest) > me)
        return true;
    for (end = kn_now() + PATIENCE_S; kn_now() < end;)
        nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
    return true;
}

static void close_world(kn_comm_world *world)
{
    kn_mpi_world *w = world->backend;
    bool broken = kn_mpi_poisoned(w, NULL) >= 0;
    if (broken) /* messages may be under way to memory that is gone: there is no way back */
        MPI_Abort(MPI_COMM_WORLD, 1);
    kn_mpi_tell(w, -1, KN_MPI_LEFT, &(kn_mpi_word){ .family = 0 });
    while (w->sent)
        kn_mpi_forget_sent(w);
    MPI_Comm_free(&w->control);
    if (w->owns_mpi)
        MPI_Finalize();
    pthread_mutex_destroy(&w->lock);
    kn_free_host(w->left);
    kn_free_host(w->last);
    kn_free_host(w);
}

/* Every rank learns the number of the new communicator: one more than any member has used. */
static bool next_id(kn_comm *base, const char *name, int *id)
{
    kn_mpi_world *w = ((kn_mpi_comm *)base)->w;
    int64_t mine = w->next_id, *all = kn_calloc((size_t)base->size, sizeof *all);
    kn_comm_call call = { .kind = KN_CALL_GROUP,
                          .dst_dtype = KN_I64,
                          .src_dtype = KN_I64,
                          .count = 1,
                          .dst = all,
                          .src = &mine,
                          .label = name };
    bool ok = all && kn_mpi_run(base, &call, NULL);
    for (int r = 0; r < base->size && ok; r++)
        mine = all[r] > mine ? all[r] : mine;
    kn_free_host(all);
    *id = (int)mine;
    w->next_id = (int)mine + 1;
    return ok;
}

static kn_comm *group(kn_comm *base, const int *member, int size, int rank, const char *name)
{
    kn_mpi_comm *parent = (kn_mpi_comm *)base, *made = NULL;
    int id;
    MPI_Comm mpi = MPI_COMM_NULL;
    if (size > 0 && !(made = comm_alloc(parent->w, size)))
        goto fail;
    if (!next_id(base, name, &id))
        goto fail;
    if (MPI_Comm_split(parent->mpi, size > 0 ? member[0] : MPI_UNDEFINED, rank, &mpi) !=
        MPI_SUCCESS) {
        kn_fail("comm_split %s: MPI_Comm_split failed: too many communicators in this world",
                name ? name : "-");
        goto fail;
    }
    if (size == 0)
        return NULL;
    made->mpi = mpi;
    made->base.id = id;
    bool dup = size == base->size;
    for (int i = 0; i < size; i++) {
        made->member[i] = parent->member[member[i]];
        dup = dup && member[i] == i;
    }
    made->base.family = dup ? base->family : &made->base;
    kn_comm_enter(&made->base, base->world, &mpi_ops, rank, size, name);
    return &made->base;
fail:
    if (made)
        destroy(&made->base);
    return NULL;
}

static const kn_comm_ops mpi_ops = {
    .backend = "mpi",
    .run = kn_mpi_run,
    .group = group,
    .poison = poison,
    .culprit = culprit,
    .speaks = speaks,
    .destroy = destroy,
    .close = close_world,
};

/* ---- the world ------------------------------------------------------------------------------- */

/* Starts MPI unless the program has; *threads: calls may come from several threads at once. */
static bool begin(kn_mpi_world *w, int rank, int size, bool *threads)
{
    int running = 0, ended = 0, level = MPI_THREAD_SINGLE, r = -1, n = -1;
    char library[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Finalized(&ended);
    if (ended)
        return kn_fail("kn_init: MPI has ended in this process: call kn_init before MPI_Finalize");
    MPI_Initialized(&running);
    if (running)
        MPI_Query_thread(&level);
    else if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS)
        return kn_fail("kn_init: MPI_Init_thread failed: start with mpirun of the MPI that libknap "
                       "was built with");
    w->owns_mpi = !running;
    *threads = level == MPI_THREAD_MULTIPLE;
    MPI_Comm_rank(MPI_COMM_WORLD, &r);
    MPI_Comm_size(MPI_COMM_WORLD, &n);
    MPI_Get_library_version(library, &length);
    library[strcspn(library, ",\n")] = 0;
    if (r != rank || n != size) {
        if (w->owns_mpi)
            MPI_Finalize();
        return kn_fail("kn_init: the launcher says rank %d of %d, MPI (%s) rank %d of %d: start "
                       "with mpirun of the MPI that libknap was built with",
                       rank, size, library, r, n);
    }
    return true;
}

kn_comm *kn_comm_mpi(int rank, int size)
{
    bool threads = false;
    kn_comm_world *world = kn_comm_world_make();
    kn_mpi_world *w = kn_calloc(1, sizeof *w);
    kn_mpi_comm *c = NULL;
    if (!world || !w || !begin(w, rank, size, &threads))
        goto fail;
    w->left = kn_calloc((size_t)size, sizeof *w->left);
    w->last = kn_calloc((size_t)size, sizeof *w->last);
    if (!w->left || !w->last || !(c = comm_alloc(w, size)))
        goto fail;
    if (MPI_Comm_dup(MPI_COMM_WORLD, &w->control) != MPI_SUCCESS ||
        MPI_Comm_dup(MPI_COMM_WORLD, &c->mpi) != MPI_SUCCESS) {
        kn_fail("kn_init: MPI_Comm_dup of MPI_COMM_WORLD failed");
        goto fail;
    }
    MPI_Comm_set_errhandler(w->control, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(c->mpi, MPI_ERRORS_RETURN); /* inherited by communicators made of it */
    pthread_mutex_init(&w->lock, NULL);
    w->main = pthread_self();
    w->first = &c->base;
    w->next_id = 1;
    atomic_store(&w->loudest, INT32_MAX);
    for (int r = 0; r < size; r++)
        c->member[r] = r;
    c->base.family = &c->base;
    world->backend = w;
    world->memory = kn_device_memory(KN_CPU);
    world->inline_only = !threads;
    if (!threads)
        kn_set_free_cores(0); /* so that nobody makes workers for nothing */
    kn_comm_enter(&c->base, world, &mpi_ops, rank, size, "world");
    return &c->base;
fail:
    if (c)
        destroy(&c->base);
    if (w) {
        kn_free_host(w->left);
        kn_free_host(w->last);
    }
    kn_free_host(w);
    kn_free_host(world);
    return NULL;
}
