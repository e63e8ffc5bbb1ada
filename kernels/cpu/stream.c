/* kernels/cpu/stream.c: streams of the CPU. The compute stream is inline: its work runs on the
 * caller. A side stream is a worker thread with a bounded queue if a core is free for it, else
 * inline. Workers share no kernel with others and never spin: waiting threads sleep. Once an error
 * stands nothing more is queued, but earlier jobs run to their end, as on a GPU: the error may be
 * cleared, and work before it must have happened. */
#include "kernels/trace.h"
#include "kernels/cpu/cpu_internal.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static _Thread_local kn_cpu_stream *mine; /* the stream whose worker this thread is */

/* ---- waiting ----------------------------------------------------------------------------- */

void kn_cpu_stream_hold(kn_cpu_stream *s)
{
    atomic_fetch_add(&s->refs, 1);
}

void kn_cpu_stream_release(kn_cpu_stream *s)
{
    if (atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->arrived);
    pthread_cond_destroy(&s->moved);
    kn_host_free(s);
}

uint64_t kn_cpu_stream_seq(kn_cpu_stream *s)
{
    pthread_mutex_lock(&s->lock);
    uint64_t seq = mine == s ? s->done + 1 : s->entered;
    pthread_mutex_unlock(&s->lock);
    return seq;
}

/* Sleeps, holding the lock before and after, until s has done seq jobs. */
static void await_locked(kn_cpu_stream *s, uint64_t seq)
{
    s->waiting++;
    while (s->done < seq)
        pthread_cond_wait(&s->moved, &s->lock);
    s->waiting--;
}

/* Sleeps until s has done seq jobs. */
static void await(kn_cpu_stream *s, uint64_t seq)
{
    if (mine == s) /* a job cannot wait for itself; earlier jobs are done */
        return;
    pthread_mutex_lock(&s->lock);
    await_locked(s, seq);
    pthread_mutex_unlock(&s->lock);
}

bool kn_cpu_stream_past(kn_cpu_stream *s, uint64_t seq)
{
    pthread_mutex_lock(&s->lock);
    bool past = s->done >= seq;
    pthread_mutex_unlock(&s->lock);
    return past;
}

/* ---- the worker -------------------------------------------------------------------------- */

static void run_host(kn_stream *s, const char *what, kn_host_fn fn, void *arg)
{
    double begin = kn_now();
    fn(arg);
    if (kn_tracing())
        kn_trace_add(what, "host", s, begin, kn_now(), 0, 0);
}

/* s, or the host (NULL), waits for other. */
static void wait_for(const kn_stream *s, kn_cpu_stream *other, uint64_t seq)
{
    const double begin = kn_now();
    const bool waits = mine != other && !kn_cpu_stream_past(other, seq);
    await(other, seq);
    if (waits)
        kn_trace_put(s, (kn_trace_event){ .kind = KN_TRACE_WAIT,
                                          .what = other->base.name,
                                          .begin = begin,
                                          .end = kn_now() });
}

void kn_cpu_stream_host_waits(kn_cpu_stream *other, uint64_t seq)
{
    wait_for(NULL, other, seq);
}

static void run_job(kn_cpu_stream *s, kn_job *job)
{
    kn_place_set(job->file, job->line);
    kn_trace_issued(job->issued);
    if (job->kind == KN_JOB_WAIT) {
        wait_for(&s->base, job->other, job->other_seq);
        kn_cpu_stream_release(job->other);
    } else if (job->kind == KN_JOB_KERNEL) {
        kn_run_providers(&s->base, job->kernel, job->args);
    } else if (job->kind == KN_JOB_HOST) {
        run_host(&s->base, job->what, job->fn, job->args);
    }
}

static void *worker_main(void *arg)
{
    kn_cpu_stream *s = arg;
    kn_context_adopt(s->base.context);
    mine = s;
    for (bool running = true; running;) {
        pthread_mutex_lock(&s->lock);
        while (s->done == s->entered)
            pthread_cond_wait(&s->arrived, &s->lock);
        kn_job *job = &s->job[s->done % KN_JOBS];
        pthread_mutex_unlock(&s->lock);

        run_job(s, job);
        running = job->kind != KN_JOB_STOP;

        pthread_mutex_lock(&s->lock);
        s->done++;
        if (s->waiting > 0)
            pthread_cond_broadcast(&s->moved);
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

/* The next slot of the queue, the lock held; sleeps while the queue is full. */
static kn_job *enter_begin(kn_cpu_stream *s)
{
    pthread_mutex_lock(&s->lock);
    if (s->entered - s->done >= KN_JOBS) {
        s->waiting++;
        while (s->entered - s->done >= KN_JOBS)
            pthread_cond_wait(&s->moved, &s->lock);
        s->waiting--;
    }
    kn_job *job = &s->job[s->entered % KN_JOBS];
    job->issued = kn_tracing() ? kn_now() : 0;
    kn_place_get(&job->file, &job->line);
    return job;
}

static void enter_end(kn_cpu_stream *s)
{
    s->entered++;
    pthread_cond_signal(&s->arrived);
    pthread_mutex_unlock(&s->lock);
}

/* ---- launching --------------------------------------------------------------------------- */

/* Runs at once: on inline streams, and for launches of a worker's own job on its stream. */
static bool at_once(const kn_cpu_stream *s)
{
    return !s->worker || mine == s;
}

bool kn_cpu_launch(kn_stream *stream, kn_kernel k, const void *args, size_t size)
{
    kn_cpu_stream *s = (kn_cpu_stream *)stream;
    if (at_once(s))
        return kn_run_providers(stream, k, args);
    if (size > KN_JOB_BYTES)
        return kn_fail("%s: arguments of %zu bytes, a stream copies at most %d", kn_kernel_name(k),
                       size, KN_JOB_BYTES);
    kn_job *job = enter_begin(s);
    job->kind = KN_JOB_KERNEL;
    job->kernel = k;
    memcpy(job->args, args, size);
    enter_end(s);
    return true;
}

bool kn_cpu_stream_host(kn_stream *stream, const char *what, kn_host_fn fn, const void *arg,
                        size_t size)
{
    kn_cpu_stream *s = (kn_cpu_stream *)stream;
    if (size > KN_JOB_BYTES)
        return kn_fail("%s: an argument of %zu bytes, a stream copies at most %d", what, size,
                       KN_JOB_BYTES);
    if (at_once(s)) {
        _Alignas(max_align_t) char copy[KN_JOB_BYTES];
        if (size > 0)
            memcpy(copy, arg, size);
        run_host(stream, what, fn, copy);
        return kn_ok();
    }
    kn_job *job = enter_begin(s);
    job->kind = KN_JOB_HOST;
    job->fn = fn;
    snprintf(job->what, sizeof job->what, "%s", what);
    if (size > 0)
        memcpy(job->args, arg, size);
    enter_end(s);
    return true;
}

void kn_cpu_stream_wait(kn_cpu_stream *s, kn_cpu_stream *other, uint64_t seq)
{
    if (s == other || kn_cpu_stream_past(other, seq))
        return;
    if (at_once(s)) {
        wait_for(&s->base, other, seq);
        return;
    }
    kn_cpu_stream_hold(other);
    kn_job *job = enter_begin(s);
    job->kind = KN_JOB_WAIT;
    job->other = other;
    job->other_seq = seq;
    enter_end(s);
}

bool kn_cpu_stream_sync(kn_stream *stream)
{
    kn_cpu_stream *s = (kn_cpu_stream *)stream;
    if (!at_once(s))
        kn_cpu_stream_host_waits(s, kn_cpu_stream_seq(s));
    return kn_ok();
}

/* ---- life -------------------------------------------------------------------------------- */

/* Starts the thread with all signals blocked: Ctrl-C belongs to the main thread. */
static bool start_worker(kn_cpu_stream *s)
{
    sigset_t all, before;
    s->job = kn_host_alloc(KN_JOBS * sizeof *s->job);
    if (!s->job)
        return false;
    s->worker = true;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&s->thread, NULL, worker_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0)
        return true;
    s->worker = false;
    kn_host_free(s->job);
    s->job = NULL;
    return kn_fail("stream %s: no thread could be started for it: %s", s->base.name,
                   strerror(error));
}

kn_stream *kn_cpu_stream_create(const char *name, kn_stream_kind kind)
{
    kn_context *c = kn_context_get();
    kn_cpu_stream *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->base.table = &kn_cpu_table;
    s->base.device = KN_CPU;
    s->base.context = c;
    snprintf(s->base.name, sizeof s->base.name, "%s", name);
    atomic_init(&s->refs, 1);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->arrived, NULL);
    pthread_cond_init(&s->moved, NULL);
    s->took_core = kind == KN_STREAM_AUTO && kn_core_take(c);
    if ((s->took_core || kind == KN_STREAM_WORKER) && !start_worker(s)) {
        kn_cpu_stream_destroy(&s->base);
        return NULL;
    }
    return &s->base;
}

void kn_cpu_stream_destroy(kn_stream *stream)
{
    kn_cpu_stream *s = (kn_cpu_stream *)stream;
    if (s->worker) {
        enter_begin(s)->kind = KN_JOB_STOP;
        enter_end(s);
        pthread_join(s->thread, NULL);
        kn_host_free(s->job);
        s->job = NULL;
    }
    if (s->took_core)
        kn_core_return(s->base.context);
    kn_cpu_stream_release(s);
}

bool kn_cpu_stream_is_inline(const kn_stream *s)
{
    return !((const kn_cpu_stream *)s)->worker;
}
