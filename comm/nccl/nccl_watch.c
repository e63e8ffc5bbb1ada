/* comm/nccl/nccl_watch.c: the thread that looks after collectives on their way (nccl.h). A kernel
 * of NCCL that waits for a rank that never comes waits for ever: only an abort ends it. */
#include "kernels/graph.h"
#include "kernels/trace.h"
#include "comm/nccl/nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { LOOK_NS = 20 * 1000 * 1000 };
/* From then on a call is checked: are the others where this rank is? */
#define SUSPICIOUS_S 0.2

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kn_nccl_comm *watched;
static bool running;

/* ---- faults ----------------------------------------------------------------------- */

/* Whether the GPU is past e; true also if it never will be, because it failed. */
static bool past(cudaEvent_t e)
{
    bool not_yet = cudaEventQuery(e) == cudaErrorNotReady;
    if (not_yet)
        /* It counts as an error there, and this may be the thread that launches. */
        cudaGetLastError();
    return !not_yet;
}

/* Pops finished work. The lock is held. */
static void pop_done(kn_nccl_comm *n)
{
    while (n->count > 0) {
        kn_nccl_pending *p = &n->pending[n->first];
        if (!p->issued || !past(p->done))
            return;
        kn_comm_note_end(n->comm, &p->call);
        kn_gpu_event_give(p->begun, false);
        kn_gpu_event_give(p->done, false);
        n->first = (n->first + 1) % KN_NCCL_PENDING;
        n->count--;
    }
}

/* NCCL reports an error. The wait for its cause takes a second: "rank 3 was killed" is the better
 * message. */
static bool nccl_well(kn_nccl_comm *n)
{
    const nccl_functions *f = kn_nccl();
    int error = NCCL_SUCCESS;
    if (pthread_mutex_trylock(&n->calls) != 0) /* a call is being made, and sees to it itself */
        return true;
    bool asked = f->async_error(n->handle, &error) == NCCL_SUCCESS;
    pthread_mutex_unlock(&n->calls);
    if (!asked || error == NCCL_SUCCESS || error == NCCL_IN_PROGRESS)
        return true;
    if (n->failed == 0)
        n->failed = kn_now();
    if (kn_now() - n->failed < 1)
        return true;
    const kn_nccl_pending *p = &n->pending[n->first];
    return kn_fail("%s %s in communicator %s: NCCL reports %s: another rank or the network is gone",
                   kn_comm_kind_name(p->call.kind), p->call.label ? p->call.label : "-",
                   n->comm->name, f->error_string(error));
}

/* Records the error in the context of n (this thread has adopted it); false if there is one. */
static bool looks_well(kn_nccl_comm *n)
{
    kn_comm *c = n->comm;
    if (!kn_ok()) /* of this rank: its kernels wait for ranks that will get the poison and stop */
        return false;
    if (!kn_nccl_healthy(c) || !nccl_well(n))
        return false;
    kn_nccl_pending *p = &n->pending[n->first];
    double now = kn_now(), limit = kn_comm_timeout(c);
    if (!past(p->begun))
        return true;
    if (p->since == 0)
        p->since = now;
    if (now - p->since > SUSPICIOUS_S && c->ops->in_step && !c->ops->in_step(c, &p->call))
        return false;
    if (now - p->since <= limit)
        return true;
    if (c->ops->late)
        c->ops->late(c, &p->call, limit);
    if (kn_ok())
        kn_comm_timed_out(c, &p->call, c->rank, (c->rank + 1) % c->size, limit, NULL, false);
    return false;
}

/* ---- aborting -------------------------------------------------------------------------------- */

static void *abort_main(void *handle)
{
    cudaSetDevice(kn_cuda_index());
    kn_nccl()->abort(handle);
    return NULL;
}

/* By the clock that nobody sets. */
static struct timespec in_seconds(int seconds)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += seconds;
    return t;
}

/* A thread that calls NCCL with the handle finishes first, or is stuck there; the abort ends it. */
static void abort_begin(kn_nccl_comm *n, const struct timespec *until)
{
    bool locked = pthread_mutex_clocklock(&n->calls, CLOCK_MONOTONIC, until) == 0;
    bool mine = n->handle && !atomic_exchange(&n->aborted, true);
    n->aborting = mine && pthread_create(&n->aborter, NULL, abort_main, n->handle) == 0;
    if (mine && !n->aborting)
        kn_nccl()->abort(n->handle);
    if (locked)
        pthread_mutex_unlock(&n->calls);
}

static void abort_end(kn_nccl_comm *n, const struct timespec *until)
{
    if (n->aborting && pthread_clockjoin_np(n->aborter, NULL, CLOCK_MONOTONIC, until) != 0)
        pthread_detach(n->aborter);
    n->aborting = false;
}

/* Every NCCL communicator of the context ends, all at once: a kernel of one may wait for a kernel
 * of another, and an abort for both. */
static void abort_all(const kn_context *context)
{
    struct timespec until = in_seconds(1); /* for all together, however many are stuck */
    for (kn_nccl_comm *n = watched; n; n = n->next)
        if (n->context == context)
            abort_begin(n, &until);
    until = in_seconds(2);
    for (kn_nccl_comm *n = watched; n; n = n->next)
        abort_end(n, &until);
}

static void *watch_main(void *arg)
{
    (void)arg;
    cudaSetDevice(kn_cuda_index());
    for (;;) {
        nanosleep(&(struct timespec){ .tv_nsec = LOOK_NS }, NULL);
        pthread_mutex_lock(&lock);
        for (kn_nccl_comm *n = watched; n; n = n->next) {
            if (atomic_load(&n->aborted))
                continue;
            pop_done(n);
            kn_context_adopt(n->context);
            if (n->count > 0 && !looks_well(n)) {
                abort_all(n->context);
                break; /* the list may have more of them */
            }
        }
        bool go_on = watched != NULL;
        running = go_on;
        pthread_mutex_unlock(&lock);
        if (!go_on)
            return NULL;
    }
}

/* ---- watched communicators ------------------------------------------------------------------- */

bool kn_nccl_watch(kn_nccl_comm *n)
{
    pthread_mutex_lock(&lock);
    n->next = watched;
    watched = n;
    pthread_t thread;
    bool ok = running || pthread_create(&thread, NULL, watch_main, NULL) == 0;
    if (ok && !running)
        pthread_detach(thread);
    running = ok;
    if (!ok)
        watched = n->next;
    pthread_mutex_unlock(&lock);
    return ok || kn_fail("nccl: the system has no thread left to watch collectives with");
}

void kn_nccl_unwatch(kn_nccl_comm *n)
{
    kn_graph_forget(n);
    pthread_mutex_lock(&lock);
    for (kn_nccl_comm **at = &watched; *at; at = &(*at)->next) {
        if (*at == n) {
            *at = n->next;
            break;
        }
    }
    for (; n->count > 0; n->count--, n->first = (n->first + 1) % KN_NCCL_PENDING) {
        kn_gpu_event_give(n->pending[n->first].begun, false);
        kn_gpu_event_give(n->pending[n->first].done, false);
    }
    pthread_mutex_unlock(&lock);
}

static void enter(kn_nccl_comm *n, kn_nccl_pending *p, const kn_comm_call *call)
{
    p->call = *call;
    p->call.piece = NULL; /* the caller's */
    if (call->label) {
        snprintf(p->label, sizeof p->label, "%s", call->label);
        p->call.label = p->label;
    }
    n->count++;
}

bool kn_nccl_watch_begin(kn_nccl_comm *n, cudaStream_t stream, const kn_comm_call *call,
                         kn_nccl_pending **p)
{
    *p = NULL;
    if (kn_cuda_capturing(stream)) /* the watch is over launches of the graph */
        return kn_nccl_recorded(n);
    cudaEvent_t begun = kn_gpu_event_take(false), done = kn_gpu_event_take(false);
    bool ok = begun && done && kn_cuda_check(cudaEventRecord(begun, stream), "nccl");
    while (ok && !*p) {
        pthread_mutex_lock(&lock);
        pop_done(n);
        if (n->count < KN_NCCL_PENDING) {
            *p = &n->pending[(n->first + n->count) % KN_NCCL_PENDING];
            **p = (kn_nccl_pending){ .begun = begun, .done = done };
            enter(n, *p, call);
        }
        pthread_mutex_unlock(&lock);
        ok = *p || !atomic_load(&n->aborted);
        if (ok && !*p)
            nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
    }
    if (!ok) {
        kn_gpu_event_give(begun, false);
        kn_gpu_event_give(done, false);
    }
    return ok;
}

bool kn_nccl_watch_end(cudaStream_t stream, kn_nccl_pending *p)
{
    if (!p)
        return true;
    bool ok = kn_cuda_check(cudaEventRecord(p->done, stream), "nccl");
    pthread_mutex_lock(&lock);
    p->issued = true; /* an event that was never recorded counts as past */
    pthread_mutex_unlock(&lock);
    return ok;
}
