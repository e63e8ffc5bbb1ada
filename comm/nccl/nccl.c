/* comm/nccl/nccl.c: collectives on streams of a GPU by NCCL.
 *
 * An NCCL communicator belongs to a kn_comm; how it is made: nccl_make.c. Calls that NCCL has not
 * finished when it returns are polled, so that a rank that fails meanwhile, or doesn't come, ends
 * them.
 *
 * Reductions. NCCL adds f32 and f64 in an order of its own: used if bits needn't repeat over
 * numbers of ranks. Everything else is an exchange of parts followed by one sum in rank order
 * (KN_K_SUM_N: f32, rounded once): bf16 and f16 always, since NCCL would round after each addition,
 * and all dtypes with kn_cuda_deterministic. Accumulators and results of another dtype go through
 * that kernel, too. */
#include "kernels/trace.h"
#include "comm/nccl/nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* ---- pieces of a call ------------------------------------------------------------------------ */

typedef struct job {
    kn_nccl_comm *n;
    const nccl_functions *f;
    const kn_comm_call *call;
    kn_stream *s;
    cudaStream_t handle;
    char *scratch;
} job;

static bool ok(const job *j, int error)
{
    return kn_nccl_settled(j->n, error, kn_comm_kind_name(j->call->kind), j->call->label);
}

static int type_of(kn_dtype t)
{
    return t == KN_F32 ? NCCL_F32 : t == KN_F64 ? NCCL_F64 : t == KN_F16 ? NCCL_F16 : NCCL_BF16;
}

/* Bytes in the order of the communicator's calls: taken for good, grown if a call needs more. Waits
 * until the compute stream has finished with them. */
static bool scratch(job *j, size_t bytes)
{
    kn_nccl_comm *n = j->n;
    kn_memory *m = kn_device_memory(KN_CUDA);
    if (bytes > n->scratch_bytes) {
        if (n->scratch && !kn_event_sync(n->last))
            return false;
        if (n->scratch)
            kn_give(m, n->scratch, n->scratch_bytes, KN_MEM_COMM);
        n->scratch = kn_take(m, bytes, KN_MEM_COMM);
        n->scratch_bytes = n->scratch ? bytes : 0;
        if (!n->scratch)
            return false;
        kn_stream *compute = kn_compute_stream(KN_CUDA);
        if (compute != j->s &&
            (!kn_event_record(n->last, compute) || !kn_event_wait(n->last, j->s)))
            return false;
    }
    j->scratch = n->scratch;
    return true;
}

static bool convert(const job *j, void *dst, kn_dtype to, const void *src, kn_dtype from,
                    int64_t count)
{
    kn_copy_args args = { kn_array_make(dst, to, 1, &count),
                          kn_array_make((void *)(uintptr_t)src, from, 1, &count) };
    return count == 0 || KN_LAUNCH(j->s, KN_K_COPY, args);
}

/* dst = acc + the n parts, which lie one after the other, stride elements apart. wide: room for
 * count values in f32 (f64), used if one kernel doesn't take all parts. */
static bool sum(const job *j, void *dst, const void *acc, const char *part, int n, int64_t stride,
                int64_t count, void *wide)
{
    const kn_comm_call *call = j->call;
    size_t size = kn_dtype_size(call->src_dtype);
    kn_dtype room = call->dst_dtype == KN_F64 ? KN_F64 : KN_F32;
    bool blocks = n > KN_SUM_N_MAX;
    if (count == 0)
        return true;
    if (blocks && acc && !convert(j, wide, room, acc, call->dst_dtype, count))
        return false;
    for (int at = 0; at < n; at += KN_SUM_N_MAX) {
        kn_sum_n_args args = { .dst = blocks ? wide : dst,
                               .acc = blocks ? (acc || at > 0 ? wide : NULL) : acc,
                               .n = n - at < KN_SUM_N_MAX ? n - at : KN_SUM_N_MAX,
                               .count = count,
                               .dst_dtype = blocks ? room : call->dst_dtype,
                               .src_dtype = call->src_dtype };
        for (int i = 0; i < args.n; i++)
            args.src[i] = part + (size_t)((at + i) * stride) * size;
        if (!KN_LAUNCH(j->s, KN_K_SUM_N, args))
            return false;
    }
    return !blocks || convert(j, dst, call->dst_dtype, wide, room, count);
}

/* Rank r's elements [r * step, ...) of src go to rank r; here arrive everyone's for this rank, step
 * apart. */
static bool exchange(const job *j, const char *src, char *dst, int64_t step, int64_t count)
{
    kn_comm *c = j->n->comm;
    size_t size = kn_dtype_size(j->call->src_dtype);
    int type = NCCL_U8, error = j->f->group_start();
#define LENGTH(r)                                                                                  \
    ((size_t)(count - (r)*step < 0 ? 0 : count - (r)*step < step ? count - (r)*step : step) * size)
    for (int r = 0; r < c->size && error == NCCL_SUCCESS; r++) {
        if (LENGTH(r) > 0)
            error = j->f->send(src + (size_t)(r * step) * size, LENGTH(r), type, r, j->n->handle,
                               j->handle);
        if (error == NCCL_IN_PROGRESS)
            error = NCCL_SUCCESS;
        if (LENGTH(c->rank) > 0 && error == NCCL_SUCCESS)
            error = j->f->recv(dst + (size_t)(r * step) * size, LENGTH(c->rank), type, r,
                               j->n->handle, j->handle);
        if (error == NCCL_IN_PROGRESS)
            error = NCCL_SUCCESS;
    }
#undef LENGTH
    int end = j->f->group_end();
    return ok(j, error == NCCL_SUCCESS ? end : error);
}

/* Whether parts are exchanged and added in rank order, rather than by NCCL. */
static bool ordered(const job *j)
{
    kn_dtype t = j->call->src_dtype;
    return t == KN_BF16 || t == KN_F16 || kn_cuda_is_deterministic();
}

static size_t room_for(int64_t count, kn_dtype t)
{
    return ((size_t)count * kn_dtype_size(t) + 255) / 256 * 256;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static bool reduce_scatter(job *j)
{
    const kn_comm_call *call = j->call;
    int n = j->n->comm->size;
    kn_dtype t = call->src_dtype;
    if (!ordered(j)) {
        bool straight = !call->acc && t == call->dst_dtype;
        if (!straight && !scratch(j, room_for(call->count, t)))
            return false;
        void *to = straight ? call->dst : j->scratch;
        return ok(j, j->f->reduce_scatter(call->src, to, (size_t)call->count, type_of(t), NCCL_SUM,
                                          j->n->handle, j->handle)) &&
               (straight || sum(j, call->dst, call->acc, j->scratch, 1, 0, call->count, NULL));
    }
    size_t parts = room_for(call->count * n, t);
    return scratch(j, parts + (n > KN_SUM_N_MAX ? room_for(call->count, KN_F64) : 0)) &&
           exchange(j, call->src, j->scratch, call->count, call->count * n) &&
           sum(j, call->dst, call->acc, j->scratch, n, call->count, call->count,
               j->scratch + parts);
}

/* Each rank adds its slice for all, then all gather the slices. */
static bool all_reduce_ordered(job *j)
{
    const kn_comm_call *call = j->call;
    kn_comm *c = j->n->comm;
    int64_t slice = ((call->count + c->size - 1) / c->size + 15) / 16 * 16;
    int64_t from = slice * c->rank < call->count ? slice * c->rank : call->count;
    int64_t mine = call->count - from < slice ? call->count - from : slice;
    size_t size = kn_dtype_size(call->dst_dtype);
    size_t parts = room_for(slice * c->size, call->src_dtype);
    size_t sums = room_for(slice * c->size, call->dst_dtype);
    if (!scratch(j, parts + sums + (c->size > KN_SUM_N_MAX ? room_for(slice, KN_F64) : 0)))
        return false;
    char *whole = j->scratch + parts, *own = whole + (size_t)(slice * c->rank) * size;
    const char *acc = call->acc ? (const char *)call->acc + (size_t)from * size : NULL;
    return exchange(j, call->src, j->scratch, slice, call->count) &&
           sum(j, own, acc, j->scratch, c->size, slice, mine, whole + sums) &&
           ok(j, j->f->all_gather(own, whole, (size_t)slice * size, NCCL_U8, j->n->handle,
                                  j->handle)) &&
           convert(j, call->dst, call->dst_dtype, whole, call->dst_dtype, call->count);
}

static bool all_reduce(job *j)
{
    const kn_comm_call *call = j->call;
    kn_dtype t = call->src_dtype;
    if (ordered(j))
        return all_reduce_ordered(j);
    bool straight = !call->acc && t == call->dst_dtype;
    if (!straight && !scratch(j, room_for(call->count, t)))
        return false;
    void *to = straight ? call->dst : j->scratch;
    return ok(j, j->f->all_reduce(call->src, to, (size_t)call->count, type_of(t), NCCL_SUM,
                                  j->n->handle, j->handle)) &&
           (straight || sum(j, call->dst, call->acc, j->scratch, 1, 0, call->count, NULL));
}

/* NCCL's maximum may lose a NaN; ours keeps it. */
static bool all_max(job *j)
{
    const kn_comm_call *call = j->call;
    int64_t shape[2] = { j->n->comm->size, call->count }, one[2] = { 1, call->count };
    if (!scratch(j, room_for(shape[0] * shape[1], KN_F32)) ||
        !ok(j, j->f->all_gather(call->src, j->scratch, (size_t)call->count, NCCL_F32, j->n->handle,
                                j->handle)))
        return false;
    kn_reduce_args args = { kn_array_make(call->dst, KN_F32, 2, one),
                            kn_array_make(j->scratch, KN_F32, 2, shape), KN_MAX };
    return KN_LAUNCH(j->s, KN_K_REDUCE, args);
}

static bool run(job *j)
{
    const kn_comm_call *call = j->call;
    nccl_comm_t h = j->n->handle;
    size_t bytes = (size_t)call->count * kn_dtype_size(call->dst_dtype);
    if (call->count == 0 && call->kind != KN_CALL_BARRIER)
        return true;
    switch (call->kind) {
    case KN_CALL_ALL_GATHER:
        return ok(j, j->f->all_gather(call->src, call->dst, bytes, NCCL_U8, h, j->handle));
    case KN_CALL_REDUCE_SCATTER:
        return reduce_scatter(j);
    case KN_CALL_ALL_REDUCE:
        return all_reduce(j);
    case KN_CALL_SUM_I64:
        return ok(j, j->f->all_reduce(call->src, call->dst, (size_t)call->count, NCCL_I64, NCCL_SUM,
                                      h, j->handle));
    case KN_CALL_MAX_F32:
        return all_max(j);
    case KN_CALL_BROADCAST:
        return ok(j,
                  j->f->broadcast(call->src, call->dst, bytes, NCCL_U8, call->root, h, j->handle));
    case KN_CALL_BARRIER:
        return scratch(j, 256) &&
               ok(j, j->f->all_reduce(j->scratch, j->scratch, 1, NCCL_I32, NCCL_SUM, h, j->handle));
    default:
        return kn_fail("nccl: %s runs between hosts only", kn_comm_kind_name(call->kind));
    }
}

static bool issue(job *j, kn_comm *c)
{
    kn_nccl_comm *n = j->n;
    bool tracing = kn_tracing();
    cudaEvent_t begun = NULL;
    char what[96];
    if (!kn_event_wait(n->last, j->s) || !kn_nccl_watch_begin(n, j->handle, &begun))
        return false;
    if (tracing)
        kn_gpu_trace_begin(j->s);
    pthread_mutex_lock(
        &n->calls); /* kept while NCCL is called, so that no thread frees the handle */
    bool done = !atomic_load(&n->aborted) && run(j);
    pthread_mutex_unlock(&n->calls);
    snprintf(what, sizeof what, "%s%s%s", kn_comm_kind_name(j->call->kind),
             j->call->label ? " " : "", j->call->label ? j->call->label : "");
    if (tracing)
        kn_gpu_trace_end(j->s, what, "nccl", 0, kn_comm_bytes(c, j->call));
    bool watched = kn_nccl_watch_end(n, j->handle, begun, j->call);
    return kn_event_record(n->last, j->s) && watched && done && kn_ok();
}

bool kn_nccl_launch(kn_comm *c, const kn_comm_call *given, kn_stream *s)
{
    kn_comm_call call = *given;
    kn_nccl_comm *n = c->nccl ? c->nccl : kn_nccl_make(c);
    if (!n)
        return false;
    if (atomic_load(&n->aborted))
        return kn_nccl_healthy(c) &&
               kn_fail("%s %s: the NCCL communicator %s was aborted", kn_comm_kind_name(call.kind),
                       call.label ? call.label : "-", c->name);
    if (!kn_comm_meeting(c->world)) /* the hook of tests */
        return false;
    job j = { .n = n, .f = kn_nccl(), .call = &call, .s = s };
    j.handle = ((kn_gpu_stream *)s)->handle;
    kn_comm_note_call(c, &call);
    return issue(&j, c);
}
