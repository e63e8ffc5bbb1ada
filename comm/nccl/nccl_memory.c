/* comm/nccl/nccl_memory.c: memory registered with NCCL beforehand (user buffer registration), so
 * that it moves bytes without copies of its own: ncclMemAlloc's, in segments of a pool, each
 * registered once with every NCCL communicator of the world.
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
#include "kernels/cuda/runtime/pool.h"
#include "kernels/environment.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct segment {
    struct segment *next;
    void *p;
    size_t bytes;
} segment;

struct kn_nccl_memory {
    kn_memory memory; /* state points back here */
    kn_comm_world *world;
    kn_gpu_pool *pool; /* NULL: the ranks agreed on plain memory */
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

static void *get(void *arg, size_t bytes)
{
    kn_nccl_memory *m = arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    segment *s = calloc(1, sizeof *s);
    if (!s || !kn_cuda_usable()) {
        free(s);
        return NULL;
    }
    s->bytes = bytes;
    cudaThreadExchangeStreamCaptureMode(&mode);
    bool ok = kn_nccl()->mem_alloc(&s->p, bytes) == NCCL_SUCCESS;
    cudaGetLastError();
    bool there = ok;
    for (kn_comm *c = m->world->first; ok && c; c = c->next) {
        kn_nccl_comm *n = c->nccl;
        if (!n || atomic_load(&n->aborted))
            continue;
        pthread_mutex_lock(&n->calls);
        ok = !atomic_load(&n->aborted) && enroll(n, s);
        pthread_mutex_unlock(&n->calls);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (ok) {
        s->next = m->segments;
        m->segments = s;
        return s->p;
    }
    if (there)
        kn_fail("nccl: %zu bytes could not be registered: a communicator was aborted", bytes);
    free(s); /* its bytes stay: they may be registered with some communicator */
    return NULL;
}

/* Waits for all users of the bytes: unmapping doesn't. */
static void put(void *arg, void *p, size_t bytes)
{
    kn_nccl_memory *m = arg;
    (void)bytes;
    cudaDeviceSynchronize();
    for (kn_comm *c = m->world->first; c; c = c->next) {
        kn_nccl_comm *n = c->nccl;
        if (!n)
            continue;
        pthread_mutex_lock(&n->calls);
        for (int i = 0; i < n->held_count && !atomic_load(&n->aborted); i++)
            if (n->held[i].segment == p) {
                dismiss(n, i);
                break;
            }
        pthread_mutex_unlock(&n->calls);
    }
    kn_nccl()->mem_free(p);
    for (segment **at = &m->segments; *at; at = &(*at)->next)
        if ((*at)->p == p) {
            segment *gone = *at;
            *at = gone->next;
            free(gone);
            break;
        }
}

/* ---- the memory ------------------------------------------------------------------------------ */

/* A graph's buffers are its own for as long as it is replayed: they come from the device's memory,
 * which keeps them, and NCCL registers recorded buffers by itself. */
static bool recording(void)
{
    kn_stream *s = kn_compute_stream(KN_CUDA);
    return s && kn_cuda_capturing(((kn_gpu_stream *)s)->handle);
}

static bool is_ours(const kn_nccl_memory *m, const char *p)
{
    for (const segment *s = m->segments; s; s = s->next)
        if (p >= (const char *)s->p && p < (const char *)s->p + s->bytes)
            return true;
    return false;
}

static void *take(kn_memory *self, size_t bytes)
{
    kn_memory *plain = recording() ? kn_device_memory(KN_CUDA) : NULL;
    return plain ? plain->take(plain, bytes)
                 : kn_gpu_pool_take(((kn_nccl_memory *)self->state)->pool, bytes);
}

static void give(kn_memory *self, void *p, size_t bytes)
{
    kn_nccl_memory *m = self->state;
    kn_memory *plain = is_ours(m, p) ? NULL : kn_device_memory(KN_CUDA);
    if (plain)
        plain->give(plain, p, bytes);
    else if (!recording()) /* the graph's memory stays out, for its replays */
        kn_gpu_pool_give(m->pool, p);
}

/* When plain GPU memory runs out, so that idle memory here can become plain. */
static void trim(void)
{
    const kn_comm *world = kn_context_get()->init_state;
    kn_nccl_memory *m = world ? world->world->registered : NULL;
    if (m && m->pool)
        kn_gpu_pool_trim(m->pool);
}

/* Before, ncclMemAlloc rounds each segment up to the multicast granularity: 512 MiB on an H100. */
#define WITHOUT_ROUNDING 22600

/* Can this rank do it? Tries, with the smallest segment. */
static bool can(kn_nccl_comm *n)
{
    const nccl_functions *f = kn_nccl();
    int version = 0;
    bool wanted = f->version(&version) == NCCL_SUCCESS && version >= WITHOUT_ROUNDING;
    void *p = NULL, *handle = NULL;
    const size_t bytes = (size_t)2 << 20;
    if (!kn_env_switch("KNAP_REGISTER", &wanted) || !wanted || n->shared || !f->mem_alloc ||
        !f->mem_free || !f->enroll || !f->dismiss)
        return false;
    bool ok = f->mem_alloc(&p, bytes) == NCCL_SUCCESS;
    cudaGetLastError();
    if (!ok)
        return false;
    ok = f->enroll(n->handle, p, bytes, &handle) == NCCL_SUCCESS; /* never in progress */
    if (ok && handle)
        f->dismiss(n->handle, handle);
    f->mem_free(p);
    return ok;
}

static kn_nccl_memory *begin(kn_nccl_comm *n)
{
    kn_comm *c = n->comm;
    kn_nccl_memory *m = kn_host_calloc(1, sizeof *m);
    if (!m)
        return NULL;
    pthread_mutex_lock(&n->calls);
    int64_t able = !atomic_load(&n->aborted) && can(n);
    pthread_mutex_unlock(&n->calls);
    if (!kn_nccl_host_sum(c, &able, 1, "ranks that can register memory"))
        goto fail;
    m->world = c->world;
    m->memory = (kn_memory){
        .name = "registered memory", .device = KN_CUDA, .take = take, .give = give, .state = m
    };
    if (able == c->size &&
        !(m->pool = kn_gpu_pool_create((kn_gpu_pool_source){ .get = get, .put = put, .arg = m })))
        goto fail;
    kn_gpu_trim_more = trim;
    return m;
fail:
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
    return w->registered->pool ? &w->registered->memory : kn_device_memory(KN_CUDA);
}

void kn_nccl_memory_free(kn_comm_world *w)
{
    if (w->registered)
        kn_gpu_pool_destroy(w->registered->pool);
    kn_host_free(w->registered);
    w->registered = NULL;
}
