/* comm/nccl/nccl_make.c: NCCL communicators: how they are made, split, and ended (nccl.h).
 *
 * The world's is made of a unique id of rank 0, which travels through the hosts' communicator:
 * shared memory, MPI or TCP, by the launcher. A communicator that kn_comm_dup or kn_comm_split
 * makes afterwards is split off NCCL's, so that there is one bootstrap; where there is none to
 * split, its first collective makes it of an id of its own. Nothing blocks: unfinished calls of
 * NCCL are polled, so that a rank that fails meanwhile, or doesn't come, ends them.
 *
 * From 2.23 on NCCL begins a thread for each group of calls on a communicator that doesn't block.
 * One that blocks would save that, but the watch (nccl_watch.c) couldn't end it: ncclCommAbort
 * waits for the thread of a call in progress (ncclCommEnsureReady, ncclGroupJobAbort), yet not for
 * a caller that is inside a blocking call, in whose hands it would free the communicator. So all
 * buffers of a call are one group: a step has one for each gather and each reduction, a replayed
 * step none (cuda_nccl_graph_test.c counts them). */
#include "kernels/trace.h"
#include "comm/nccl/nccl.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* After an error of NCCL's, the wait for its cause takes this long: "rank 3 was killed" is the
 * better message. */
#define GRACE_S 1.0

/* ---- among the hosts ------------------------------------------------------------------------- */

bool kn_nccl_host_sum(kn_comm *c, int64_t *values, int count, const char *label)
{
    kn_comm_piece piece;
    kn_comm_call call =
        kn_comm_call_in_place(KN_CALL_SUM_I64, 0, values, count, KN_I64, label, &piece);
    return kn_comm_run_now(c, &call, NULL);
}

/* Rank 0's id becomes everyone's. */
static bool share_id(kn_comm *c, nccl_id *id)
{
    kn_comm_piece piece;
    int error = c->rank == 0 ? kn_nccl()->unique_id(id) : NCCL_SUCCESS;
    if (error != NCCL_SUCCESS)
        return kn_fail("%s: NCCL has no unique id to give: %s", c->name,
                       kn_nccl()->error_string(error));
    kn_comm_call call = kn_comm_call_in_place(KN_CALL_BROADCAST, 0, id, sizeof *id, KN_U8,
                                              "NCCL's unique id", &piece);
    return kn_comm_run_now(c, &call, NULL);
}

/* ---- waiting for NCCL ------------------------------------------------------------------------ */

bool kn_nccl_healthy(kn_comm *c)
{
    return c->ops->healthy ? c->ops->healthy(c) : kn_unpoisoned(c->world->poison);
}

bool kn_nccl_open(const kn_nccl_comm *n, const char *what, const char *label)
{
    return kn_unpoisoned(n->comm->world->poison) &&
           (!atomic_load(&n->aborted) || kn_fail("%s %s: the NCCL communicator %s was aborted",
                                                 what, label ? label : "-", n->comm->name));
}

/* Lets go of the communicator while this thread sleeps; false if it was aborted meanwhile, or an
 * error stands. */
static bool nap(kn_nccl_comm *n, int64_t ns)
{
    pthread_mutex_unlock(&n->calls);
    nanosleep(&(struct timespec){ .tv_nsec = ns }, NULL);
    bool well = kn_ok() && kn_nccl_healthy(n->comm);
    pthread_mutex_lock(&n->calls);
    return well && !atomic_load(&n->aborted);
}

/* A call that doesn't block is finished by a thread that NCCL starts for it, some 10 us later. A
 * sleep takes the host longer than that, so the first SPIN_S are looked through. */
#define SPIN_S 200e-6
enum { NAP_NS = 20000, LONG_NAP_NS = 200000 };

/* NCCL's state of n, once a call has returned error: an error stands. A call that returned success
 * may still be in the making (ncclCommSplit of every version returns success while a thread makes
 * the child; ncclSend up to 2.23), so it is asked, too. */
static int state_after(kn_nccl_comm *n, int error)
{
    int state = error, asked = NCCL_SUCCESS;
    if (error == NCCL_SUCCESS || error == NCCL_IN_PROGRESS)
        asked = kn_nccl()->async_error(n->handle, &state);
    return asked == NCCL_SUCCESS ? state : asked;
}

static bool settle(kn_nccl_comm *n, int error, const char *what, const char *label)
{
    double begin = kn_now(), limit = kn_comm_timeout(n->comm), failed = 0, looked;
    int64_t ns = NAP_NS;
    for (;;) {
        error = state_after(n, error);
        looked = kn_now();
        if (error == NCCL_SUCCESS)
            return true;
        bool pending = error == NCCL_IN_PROGRESS;
        if (!pending && failed == 0)
            failed = looked;
        if (!pending && looked - failed > GRACE_S)
            return kn_nccl_failed(n, what, label, error);
        if (looked - begin > limit)
            return kn_fail(
                "%s %s: rank %d waited %g s for the others: a rank is stopped, stuck or late "
                "(to wait longer: kn_comm_set_timeout, KNAP_TIMEOUT)",
                what, label ? label : "-", n->comm->rank, limit);
        if (pending && looked - begin <= SPIN_S) {
            sched_yield();
            continue;
        }
        if (!nap(n, pending ? ns : LONG_NAP_NS))
            return false;
        ns = ns * 2 < LONG_NAP_NS ? ns * 2 : LONG_NAP_NS;
    }
}

bool kn_nccl_settled(kn_nccl_comm *n, int error, const char *what, const char *label)
{
    const bool well = settle(n, error, what, label);
    if (!well) {
        n->given_up = true;
        kn_comm_poison(n->comm, kn_error()); /* the error has, unless it doesn't count */
    }
    return well;
}

/* ---- making ---------------------------------------------------------------------------------- */

static kn_nccl_comm *begin(kn_comm *c)
{
    kn_nccl_comm *n = kn_host_calloc(1, sizeof *n);
    if (!n)
        return NULL;
    n->comm = c;
    n->context = kn_context_get();
    n->last = kn_event_create(KN_CUDA);
    pthread_mutex_init(&n->calls, NULL);
    c->nccl = n;
    if (n->last)
        return n;
    kn_nccl_free(c);
    return NULL;
}

/* The handle is there or in the making: error is NCCL's result. */
static kn_nccl_comm *finish(kn_nccl_comm *n, int error)
{
    pthread_mutex_lock(&n->calls);
    bool ok = kn_nccl_settled(n, error, "nccl: making communicator", n->comm->name) &&
              kn_nccl_enroll_all(n);
    pthread_mutex_unlock(&n->calls);
    if (ok && kn_nccl_watch(n))
        return n;
    kn_nccl_free(n->comm);
    return NULL;
}

kn_nccl_comm *kn_nccl_make(kn_comm *c)
{
    nccl_id id = { { 0 } };
    nccl_config config = { sizeof config, NCCL_MAGIC, NCCL_CONFIG_VERSION, 0 };
    bool shared = false;
    if (!kn_cuda_open() || !kn_nccl_place(c, &shared) || !kn_nccl() || !share_id(c, &id))
        return NULL;
    kn_nccl_comm *n = begin(c);
    if (!n)
        return NULL;
    n->shared = shared;
    return finish(n, kn_nccl()->init(&n->handle, c->size, id, c->rank, &config));
}

bool kn_nccl_split(kn_comm *parent, kn_comm *made, int color, int key)
{
    const nccl_functions *f = kn_nccl();
    kn_nccl_comm *from = parent->nccl, *n = NULL;
    if (!f || !from)
        return f != NULL;
    if (!f->split) /* each makes its own, then */
        return true;
    if (!kn_event_sync(from->last)) /* the parent has to be idle */
        return false;
    pthread_mutex_lock(&from->calls);
    from->split = NULL;
    bool ok = kn_nccl_open(from, "nccl: splitting communicator", parent->name) &&
              kn_nccl_settled(from,
                              f->split(from->handle, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                                       &from->split, NULL),
                              "nccl: splitting communicator", parent->name);
    nccl_comm_t handle = from->split;
    pthread_mutex_unlock(&from->calls);
    if (!ok || !made)
        return ok;
    if (!handle)
        return kn_fail("nccl: splitting communicator %s gave none for %s", parent->name,
                       made->name);
    if (!(n = begin(made))) {
        f->abort(handle);
        return false;
    }
    n->handle = handle;
    n->shared = from->shared;
    return finish(n, NCCL_IN_PROGRESS) != NULL;
}

/* ---- ending ---------------------------------------------------------------------------------- */

/* The handle goes: quietly if all is well, by an abort if ranks may be missing or a call was given
 * up. */
static void end_handle(kn_nccl_comm *n)
{
    const nccl_functions *f = kn_nccl();
    bool well = kn_ok() && kn_event_sync(n->last) && kn_ok() &&
                kn_poisoned(n->comm->world->poison, NULL) < 0;
    pthread_mutex_lock(&n->calls);
    if (!atomic_load(&n->aborted)) {
        if (well)
            kn_nccl_dismiss_all(n);
        well = well && kn_nccl_settled(n, f->finalize(n->handle), "nccl: ending communicator",
                                       n->comm->name);
        if (well)
            f->destroy(n->handle);
        else
            f->abort(n->handle);
        n->handle = NULL;
    }
    pthread_mutex_unlock(&n->calls);
}

void kn_nccl_free(kn_comm *c)
{
    kn_nccl_comm *n = c->nccl;
    if (!n)
        return;
    if (n->handle) /* still watched: the last collective may hang */
        kn_event_sync(n->last);
    kn_nccl_unwatch(n);
    if (n->handle)
        end_handle(n);
    kn_event_destroy(n->last);
    if (n->scratch)
        kn_give(n->scratch_memory, n->scratch, n->scratch_bytes, KN_MEM_COMM);
    pthread_mutex_destroy(&n->calls);
    kn_host_free(n->held);
    kn_host_free(n);
    c->nccl = NULL;
}
