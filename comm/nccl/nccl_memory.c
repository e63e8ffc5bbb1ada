/* comm/nccl/nccl_memory.c: memory registered with NCCL beforehand (user buffer registration), so
 * that it moves bytes without copies of its own: ncclMemAlloc's, in segments of a pool, each
 * registered once with every NCCL communicator of the world. Recorded steps use the same segments
 * as others: NCCL registers a graph's buffers by itself, but only in memory of that kind
 * (ncclIpcGraphRegisterBuffer, ncclNvlsGraphRegisterBuffer).
 *
 * All ranks of a call must pass registered buffers, or none. So whether there is such memory is
 * agreed on by all ranks of the world, once; who has it takes every gathered buffer and flat
 * gradient from it, in the same program on every rank; and a segment that can't be registered later
 * is an error, not plain memory.
 *
 * Offsets into a segment may differ between ranks, after a branch that only one took: NCCL compares
 * them for each call and uses buffers of its own where NVLS wants equal ones.
 *
 * Left out: symmetric windows (ncclCommWindowRegister), and with them gathers without
 * multiprocessors (NCCL_CTA_POLICY_ZERO). They want a call's buffers at the same offset on every
 * rank, which NCCL doesn't check: a pool can't promise that if one rank takes a branch that another
 * doesn't. */
#include "comm/nccl/nccl.h"
#include "kernels/environment.h"
#include "kernels/graph.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct segment {
    struct segment *next;
    void *p;
    size_t bytes;
    bool idle; /* the pool gave it back while a step was being recorded */
} segment;

struct kn_nccl_memory {
    kn_comm_world *world;  /* NULL: it has ended */
    kn_gpu_memory *memory; /* NULL: the ranks agreed on plain memory, because */
    const char *why;
    segment *segments;
};

/* ---- registering ----------------------------------------------------------------------------- */

static bool enroll(kn_nccl_comm *n, const segment *s)
{
    void *handle = NULL;
    kn_nccl_held *held = kn_host_realloc(n->held, (size_t)(n->held_count + 1) * sizeof *held);
    if (!held)
        return false;
    n->held = held;
    if (!kn_nccl_settled(n, kn_nccl()->enroll(n->handle, s->p, s->bytes, &handle),
                         "nccl: registering memory with communicator", n->comm->name))
        return false;
    n->held[n->held_count++] = (kn_nccl_held){ s->p, handle };
    return true;
}

static void dismiss(kn_nccl_comm *n, int i)
{
    if (n->held[i].handle)
        kn_nccl()->dismiss(n->handle, n->held[i].handle);
    n->held[i] = n->held[--n->held_count];
}

bool kn_nccl_enroll_all(kn_nccl_comm *n)
{
    kn_nccl_memory *m = n->comm->world->registered;
    bool ok = true;
    for (const segment *s = m ? m->segments : NULL; ok && s; s = s->next)
        ok = enroll(n, s);
    return ok;
}

void kn_nccl_dismiss_all(kn_nccl_comm *n)
{
    while (n->held_count > 0)
        dismiss(n, n->held_count - 1);
}

/* ---- segments -------------------------------------------------------------------------------- */

/* Of the world that still is. */
static kn_comm *first_of(const kn_nccl_memory *m)
{
    return m->world ? m->world->first : NULL;
}

/* A call that was given up may still use memory, and none will follow. */
static bool is_over(const kn_nccl_memory *m)
{
    bool over = false;
    for (const kn_comm *c = first_of(m); c; c = c->next)
        over |= c->nccl && c->nccl->given_up;
    return over;
}

static void free_segment(kn_nccl_memory *m, segment **at)
{
    segment *s = *at;
    for (kn_comm *c = first_of(m); c; c = c->next) {
        kn_nccl_comm *n = c->nccl;
        if (!n)
            continue;
        pthread_mutex_lock(&n->calls);
        for (int i = 0; i < n->held_count && !atomic_load(&n->aborted); i++)
            if (n->held[i].segment == s->p) {
                dismiss(n, i);
                break;
            }
        pthread_mutex_unlock(&n->calls);
    }
    kn_nccl()->mem_free(s->p);
    *at = s->next;
    free(s);
}

/* Waits for all users of the bytes: unmapping doesn't. Nobody may wait while a step is recorded. */
static void free_idle(kn_nccl_memory *m)
{
    bool waited = false;
    for (segment **at = &m->segments; *at && !kn_recording() && !is_over(m);) {
        if (!(*at)->idle) {
            at = &(*at)->next;
            continue;
        }
        if (!waited)
            cudaDeviceSynchronize();
        waited = true;
        free_segment(m, at);
    }
}

static void *get(void *arg, size_t bytes)
{
    kn_nccl_memory *m = arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    free_idle(m);
    segment *s = m->world && kn_cuda_usable() ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    s->bytes = bytes;
    cudaThreadExchangeStreamCaptureMode(&mode);
    bool ok = kn_nccl()->mem_alloc(&s->p, bytes) == NCCL_SUCCESS;
    cudaGetLastError();
    for (kn_comm *c = first_of(m); ok && c && !is_over(m); c = c->next) {
        kn_nccl_comm *n = c->nccl;
        if (!n)
            continue;
        pthread_mutex_lock(&n->calls);
        ok = atomic_load(&n->aborted) || enroll(n, s);
        pthread_mutex_unlock(&n->calls);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (ok) {
        s->next = m->segments;
        m->segments = s;
        return s->p;
    }
    free(s); /* its bytes stay: they may be registered with some communicator */
    return NULL;
}

static void put(void *arg, void *p, size_t bytes)
{
    kn_nccl_memory *m = arg;
    (void)bytes;
    for (segment *s = m->segments; s; s = s->next)
        s->idle |= s->p == p;
    free_idle(m);
}

/* The pool is gone, after its world or with it. */
static void end(void *arg)
{
    kn_nccl_memory *m = arg;
    for (segment *s = m->segments, *next; s; s = next) { /* idle in a recording without an end */
        next = s->next;
        free(s);
    }
    kn_host_free(m);
}

/* ---- the memory ------------------------------------------------------------------------------ */

/* Before, ncclMemAlloc rounds each segment up to the multicast granularity: 512 MiB on an H100. */
#define WITHOUT_ROUNDING 22600

/* NULL: this rank can do it, which it tries with the smallest segment. Else why not. */
static const char *cannot(kn_nccl_comm *n)
{
    const nccl_functions *f = kn_nccl();
    int version = 0;
    bool wanted = f->version(&version) == NCCL_SUCCESS && version >= WITHOUT_ROUNDING;
    const char *old =
        wanted ? NULL : "NCCL before 2.26 would take hundreds of MiB for each segment";
    void *p = NULL, *handle = NULL;
    const size_t bytes = (size_t)2 << 20;
    if (!kn_env_switch("KNAP_REGISTER", &wanted) || !wanted)
        return old ? old : "KNAP_REGISTER=0";
    if (n->shared)
        return "ranks share a GPU";
    if (!f->mem_alloc || !f->mem_free || !f->enroll || !f->dismiss)
        return "NCCL before 2.19 can't";
    bool ok = f->mem_alloc(&p, bytes) == NCCL_SUCCESS;
    cudaGetLastError();
    if (!ok)
        return "ncclMemAlloc failed (NCCL_DEBUG=WARN says why)";
    ok = f->enroll(n->handle, p, bytes, &handle) == NCCL_SUCCESS; /* never in progress */
    if (ok && handle)
        f->dismiss(n->handle, handle);
    f->mem_free(p);
    return ok ? NULL : "ncclCommRegister failed (NCCL_DEBUG=WARN says why)";
}

static kn_nccl_memory *begin(kn_nccl_comm *n)
{
    kn_comm *c = n->comm;
    kn_nccl_memory *m = kn_host_calloc(1, sizeof *m);
    if (!m)
        return NULL;
    pthread_mutex_lock(&n->calls);
    m->why = n->given_up || atomic_load(&n->aborted) ? "a rank failed" : cannot(n);
    pthread_mutex_unlock(&n->calls);
    int64_t able = !m->why;
    bool agreed = kn_nccl_host_sum(c, &able, 1, "ranks that can register memory");
    if (!m->why && able < c->size)
        m->why = "another rank can't";
    m->world = c->world;
    if (agreed && !m->why)
        m->memory = kn_gpu_memory_more(
            "registered memory",
            (kn_gpu_pool_source){ .get = get, .put = put, .end = end, .arg = m });
    if (agreed && (m->memory || m->why))
        return m;
    kn_host_free(m);
    return NULL;
}

kn_memory *kn_nccl_memory_of(kn_comm *c)
{
    kn_comm_world *w = c->world;
    if (c->family->id != 0) /* not the world's ranks, so they can't agree for it */
        return kn_device_memory(KN_CUDA);
    if (!w->registered) {
        kn_nccl_comm *n = c->nccl ? c->nccl : kn_nccl_make(c);
        if (!n || !(w->registered = begin(n)))
            return NULL;
    }
    return kn_nccl_memory_made(w);
}

kn_memory *kn_nccl_memory_made(const kn_comm_world *w)
{
    const kn_nccl_memory *m = w->registered;
    return m && m->memory ? kn_gpu_memory_of(m->memory) : kn_device_memory(KN_CUDA);
}

const char *kn_nccl_unregistered(const kn_comm_world *w)
{
    return w->registered ? w->registered->why : NULL;
}

void kn_nccl_memory_free(kn_comm_world *w)
{
    kn_nccl_memory *m = w->registered;
    w->registered = NULL;
    if (!m)
        return;
    m->world = NULL;
    if (m->memory)
        kn_gpu_memory_end(m->memory); /* m goes with it */
    else
        kn_host_free(m);
}
