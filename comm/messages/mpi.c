/* comm/messages/mpi.c: the world of MPI_COMM_WORLD and communicators over some of its ranks
 * (mpi_world.h). The only file that begins and ends MPI. */
#include "kernels/trace.h"
#include "comm/launch/launch.h"
#include "comm/messages/mpi_world.h"
#include <stdatomic.h>
#include <string.h>
#include <time.h>

/* An abort ends all ranks. Each says why it ends first, for which the others have this long. */
#define PATIENCE_S 1.5

static bool begin(kn_comm *base, int size)
{
    kn_mpi_comm *c = (kn_mpi_comm *)base;
    size_t n = (size_t)size;
    c->mpi = MPI_COMM_NULL;
    c->req = kn_host_calloc(2 * n, sizeof *c->req);
    c->done = kn_host_calloc(2 * n, sizeof *c->done);
    return kn_message_comm_begin(&c->base, size) && c->req && c->done;
}

static void drop_words(kn_mpi_world *w)
{
    kn_message_word word;
    MPI_Status s;
    int here = 0;
    while (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, w->control, &here, &s) == MPI_SUCCESS && here)
        MPI_Recv(&word, (int)sizeof word, MPI_BYTE, s.MPI_SOURCE, s.MPI_TAG, w->control,
                 MPI_STATUS_IGNORE);
}

/* A long word is sent only when the other rank receives it, which it can't in MPI_Finalize: so
 * every rank receives until the words of all are gone. */
static void wait_for_all(kn_mpi_world *w)
{
    MPI_Request all;
    int done = 0;
    if (MPI_Ibarrier(w->control, &all) != MPI_SUCCESS)
        return;
    while (MPI_Test(&all, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done)
        drop_words(w);
}

static bool all_left(kn_message_world *w)
{
    int left = 1; /* this rank */
    for (int r = 0; r < w->first->size; r++)
        left += atomic_load(&w->peer[r].left);
    return left >= w->first->size;
}

/* Where the world is broken, messages may be under way to memory that will be gone: there is no way
 * back. A rank that cleared the error waits for all, which may be saving. */
static void say_goodbye(kn_message_world *w)
{
    kn_message_say_goodbye(w);
    if (kn_poisoned(w->first->world->poison, NULL) < 0)
        return;
    for (double end = kn_now() + PATIENCE_S; (kn_ok() || kn_now() < end) && !all_left(w);) {
        w->by->listen(w);
        nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void end(kn_comm *base)
{
    kn_mpi_comm *c = (kn_mpi_comm *)base;
    if (base == c->base.w->first)
        say_goodbye(c->base.w);
    if (c->mpi != MPI_COMM_NULL && kn_poisoned(base->world->poison, NULL) < 0)
        MPI_Comm_free(&c->mpi);
    kn_message_comm_end(&c->base);
    kn_host_free(c->req);
    kn_host_free(c->done);
}

static void close_world(kn_comm_world *world)
{
    kn_mpi_world *w = world->backend;
    while (w->sent) {
        kn_mpi_forget_sent(w);
        drop_words(w);
    }
    wait_for_all(w);
    MPI_Comm_free(&w->control);
    if (w->owns_mpi)
        MPI_Finalize();
    kn_message_world_end(&w->base);
    kn_host_free(w);
}

static bool join(kn_comm *c, kn_comm *made, const char *name)
{
    MPI_Comm of = MPI_COMM_NULL;
    if (MPI_Comm_split(((kn_mpi_comm *)c)->mpi, made ? made->group : MPI_UNDEFINED,
                       made ? made->rank : 0, &of) != MPI_SUCCESS)
        return kn_fail("comm_split %s: MPI_Comm_split failed: too many communicators in this world",
                       name);
    if (made)
        ((kn_mpi_comm *)made)->mpi = of;
    return true;
}

static const kn_comm_ops mpi_ops = {
    .backend = "mpi",
    .bytes = sizeof(kn_mpi_comm),
    .begin = begin,
    .join = join,
    .end = end,
    .close = close_world,
    KN_MESSAGE_OPS,
};

/* ---- the world ------------------------------------------------------------------------------- */

/* Starts MPI unless the program has; *threads: calls may come from several threads at once. */
static bool start(kn_mpi_world *w, int rank, int size, bool *threads)
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
        return kn_fail("kn_init: the launcher gave rank %d of %d, MPI (%s) rank %d of %d: start "
                       "with mpirun of the MPI that libknap was built with",
                       rank, size, library, r, n);
    }
    return true;
}

kn_comm *kn_comm_mpi(int rank, int size)
{
    bool threads = false;
    kn_comm_world *world = kn_comm_world_make();
    kn_mpi_world *w = kn_host_calloc(1, sizeof *w);
    kn_comm *first = NULL;
    if (!world || !w || !start(w, rank, size, &threads))
        goto fail;
    world->backend = w;
    if (!kn_message_world_begin(&w->base, &kn_mpi_transport, size) ||
        !(first = kn_comm_make(world, &mpi_ops, size)))
        goto fail;
    kn_mpi_comm *c = (kn_mpi_comm *)first;
    if (MPI_Comm_dup(MPI_COMM_WORLD, &w->control) != MPI_SUCCESS ||
        MPI_Comm_dup(MPI_COMM_WORLD, &c->mpi) != MPI_SUCCESS) {
        kn_fail("kn_init: MPI_Comm_dup of MPI_COMM_WORLD failed");
        goto fail;
    }
    MPI_Comm_set_errhandler(w->control, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(c->mpi, MPI_ERRORS_RETURN); /* inherited by communicators made of it */
    w->base.first = first;
    world->memory = kn_device_memory(KN_CPU);
    world->inline_only = !threads;
    if (!threads)
        kn_set_free_cores(0); /* so that no workers are made in vain */
    kn_comm_enter(first, world, &mpi_ops, rank, size, "world");
    return first;
fail:
    kn_comm_drop(first);
    if (w)
        kn_message_world_end(&w->base);
    kn_host_free(w);
    kn_host_free(world);
    return NULL;
}
