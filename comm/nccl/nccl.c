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
 * that kernel, too.
 *
 * What moves for several pieces moves in one group of NCCL's calls; the sums follow. */
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

static bool is_open(const job *j)
{
    return kn_nccl_open(j->n, kn_comm_kind_name(j->call->kind), j->call->label);
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
    if (bytes > n->scratch_bytes) {
        if (n->scratch && !kn_event_sync(n->last))
            return false;
        if (n->scratch)
            kn_give(n->scratch_memory, n->scratch, n->scratch_bytes, KN_MEM_COMM);
        n->scratch_memory = kn_nccl_memory_made(n->comm->world);
        n->scratch = kn_take(n->scratch_memory, bytes, KN_MEM_COMM);
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

/* dst = acc + the n parts, which lie one after the other, stride elements apart; dtypes as p's.
 * wide: room for count values in f32 (f64), used if one kernel doesn't take all parts. */
static bool sum(const job *j, const kn_comm_piece *p, void *dst, const void *acc, const char *part,
                int n, int64_t stride, int64_t count, void *wide)
{
    size_t size = kn_dtype_size(p->src_dtype);
    kn_dtype room = p->dst_dtype == KN_F64 ? KN_F64 : KN_F32;
    bool blocks = n > KN_SUM_N_MAX;
    if (count == 0)
        return true;
    if (blocks && acc && !kn_copy_run(j->s, wide, room, acc, p->dst_dtype, count))
        return false;
    for (int at = 0; at < n; at += KN_SUM_N_MAX) {
        kn_sum_n_args args = { .dst = blocks ? wide : dst,
                               .acc = blocks ? (acc || at > 0 ? wide : NULL) : acc,
                               .n = n - at < KN_SUM_N_MAX ? n - at : KN_SUM_N_MAX,
                               .count = count,
                               .dst_dtype = blocks ? room : p->dst_dtype,
                               .src_dtype = p->src_dtype };
        for (int i = 0; i < args.n; i++)
            args.src[i] = part + (size_t)((at + i) * stride) * size;
        if (!KN_LAUNCH(j->s, KN_K_SUM_N, args))
            return false;
    }
    return !blocks || kn_copy_run(j->s, dst, p->dst_dtype, wide, room, count);
}

/* Rank r's elements [r * step, ...) of src go to rank r; here arrive everyone's for this rank, step
 * apart. */
static int exchange(const job *j, const kn_comm_piece *p, char *dst, int64_t step, int64_t count)
{
    kn_comm *c = j->n->comm;
    const char *src = p->src;
    size_t size = kn_dtype_size(p->src_dtype);
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
    return error == NCCL_SUCCESS ? end : error;
}

/* Whether parts are exchanged and added in rank order, rather than by NCCL. */
static bool ordered(const kn_comm_piece *p)
{
    kn_dtype t = p->src_dtype;
    return t == KN_BF16 || t == KN_F16 || kn_cuda_is_deterministic();
}

/* NCCL's sum is the result itself. */
static bool straight(const kn_comm_piece *p)
{
    return !ordered(p) && !p->acc && p->src_dtype == p->dst_dtype;
}

static size_t room_for(int64_t count, kn_dtype t)
{
    return ((size_t)count * kn_dtype_size(t) + 255) / 256 * 256;
}

/* One step of all pieces: NCCL's calls for a piece, whose scratch is given, return its result. */
typedef int (*moves)(const job *j, const kn_comm_piece *p, char *scratch);
typedef size_t (*needs)(const job *j, const kn_comm_piece *p); /* bytes of scratch */

static bool move_all(job *j, moves move, needs need)
{
    const kn_comm_call *call = j->call;
    if (!is_open(j)) /* no more, where the kernels of the step before were waited for */
        return false;
    bool group = call->pieces > 1;
    int error = group ? j->f->group_start() : NCCL_SUCCESS;
    char *at = j->scratch;
    for (int i = 0; i < call->pieces && error == NCCL_SUCCESS; i++) {
        if (call->piece[i].count > 0)
            error = move(j, &call->piece[i], at);
        if (group && error == NCCL_IN_PROGRESS)
            error = NCCL_SUCCESS;
        at += need ? need(j, &call->piece[i]) : 0;
    }
    int end = group ? j->f->group_end() : NCCL_SUCCESS;
    return ok(j, error == NCCL_SUCCESS ? end : error);
}

/* Then what this device does with each. */
typedef bool (*sums)(const job *j, const kn_comm_piece *p, char *scratch);

static bool sum_all(job *j, sums add, needs need)
{
    char *at = j->scratch;
    bool well = true;
    for (int i = 0; i < j->call->pieces && well; i++) {
        const kn_comm_piece *p = &j->call->piece[i];
        well = p->count == 0 || add(j, p, at);
        at += need(j, p);
    }
    return well;
}

static size_t need_of_all(const job *j, needs need)
{
    size_t bytes = 0;
    for (int i = 0; i < j->call->pieces; i++)
        bytes += need(j, &j->call->piece[i]);
    return bytes;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static int gather(const job *j, const kn_comm_piece *p, char *unused)
{
    (void)unused;
    return j->f->all_gather(p->src, p->dst, (size_t)kn_piece_dst_bytes(p), NCCL_U8, j->n->handle,
                            j->handle);
}

static int swap(const job *j, const kn_comm_piece *p, char *unused)
{
    (void)unused;
    return exchange(j, p, p->dst, p->count, p->count * j->n->comm->size);
}

/* ---- a reduce-scatter: the parts, or NCCL's sum, in scratch, unless that is the result */

static size_t room_to_scatter(const job *j, const kn_comm_piece *p)
{
    int n = j->n->comm->size;
    if (!ordered(p))
        return straight(p) ? 0 : room_for(p->count, p->src_dtype);
    return room_for(p->count * n, p->src_dtype) +
           (n > KN_SUM_N_MAX ? room_for(p->count, KN_F64) : 0);
}

static int move_to_scatter(const job *j, const kn_comm_piece *p, char *scratch)
{
    if (ordered(p))
        return exchange(j, p, scratch, p->count, p->count * j->n->comm->size);
    return j->f->reduce_scatter(p->src, straight(p) ? p->dst : scratch, (size_t)p->count,
                                type_of(p->src_dtype), NCCL_SUM, j->n->handle, j->handle);
}

static bool sum_scattered(const job *j, const kn_comm_piece *p, char *scratch)
{
    int n = j->n->comm->size;
    if (straight(p))
        return true;
    if (!ordered(p))
        return sum(j, p, p->dst, p->acc, scratch, 1, 0, p->count, NULL);
    return sum(j, p, p->dst, p->acc, scratch, n, p->count, p->count,
               scratch + room_for(p->count * n, p->src_dtype));
}

static bool reduce_scatter(job *j)
{
    return move_all(j, move_to_scatter, room_to_scatter) &&
           sum_all(j, sum_scattered, room_to_scatter);
}

/* ---- an all-reduce; in order: each rank adds its slice for all, then all gather the slices */

/* Of an ordered one, with its scratch: everyone's parts of this rank's slice, all slices' sums,
 * room for a sum in blocks. */
typedef struct slices {
    int64_t each, from, count; /* of this rank: elements [from, from + count) */
    size_t parts, sums;        /* bytes of scratch */
    char *whole, *own;         /* all sums, and this rank's */
} slices;

static slices slices_of(const job *j, const kn_comm_piece *p, char *scratch)
{
    const kn_comm *c = j->n->comm;
    slices s;
    s.each = ((p->count + c->size - 1) / c->size + 15) / 16 * 16;
    s.from = s.each * c->rank < p->count ? s.each * c->rank : p->count;
    s.count = p->count - s.from < s.each ? p->count - s.from : s.each;
    s.parts = room_for(s.each * c->size, p->src_dtype);
    s.sums = room_for(s.each * c->size, p->dst_dtype);
    s.whole = scratch + s.parts;
    s.own = s.whole + (size_t)(s.each * c->rank) * kn_dtype_size(p->dst_dtype);
    return s;
}

static size_t room_to_reduce(const job *j, const kn_comm_piece *p)
{
    if (!ordered(p))
        return straight(p) ? 0 : room_for(p->count, p->src_dtype);
    slices s = slices_of(j, p, NULL);
    return s.parts + s.sums + (j->n->comm->size > KN_SUM_N_MAX ? room_for(s.each, KN_F64) : 0);
}

static int move_to_reduce(const job *j, const kn_comm_piece *p, char *scratch)
{
    if (ordered(p))
        return exchange(j, p, scratch, slices_of(j, p, scratch).each, p->count);
    return j->f->all_reduce(p->src, straight(p) ? p->dst : scratch, (size_t)p->count,
                            type_of(p->src_dtype), NCCL_SUM, j->n->handle, j->handle);
}

static bool sum_slices(const job *j, const kn_comm_piece *p, char *scratch)
{
    if (straight(p))
        return true;
    if (!ordered(p))
        return sum(j, p, p->dst, p->acc, scratch, 1, 0, p->count, NULL);
    slices s = slices_of(j, p, scratch);
    const char *acc = p->acc;
    acc = acc ? acc + (size_t)s.from * kn_dtype_size(p->dst_dtype) : NULL;
    return sum(j, p, s.own, acc, scratch, j->n->comm->size, s.each, s.count, s.whole + s.sums);
}

static int move_slices(const job *j, const kn_comm_piece *p, char *scratch)
{
    if (!ordered(p))
        return NCCL_SUCCESS;
    slices s = slices_of(j, p, scratch);
    return j->f->all_gather(s.own, s.whole, (size_t)s.each * kn_dtype_size(p->dst_dtype), NCCL_U8,
                            j->n->handle, j->handle);
}

static bool copy_slices(const job *j, const kn_comm_piece *p, char *scratch)
{
    return !ordered(p) || kn_copy_run(j->s, p->dst, p->dst_dtype, slices_of(j, p, scratch).whole,
                                      p->dst_dtype, p->count);
}

static bool all_reduce(job *j)
{
    bool any = false;
    for (int i = 0; i < j->call->pieces; i++)
        any |= ordered(&j->call->piece[i]);
    return move_all(j, move_to_reduce, room_to_reduce) && sum_all(j, sum_slices, room_to_reduce) &&
           (!any ||
            (move_all(j, move_slices, room_to_reduce) && sum_all(j, copy_slices, room_to_reduce)));
}

/* ---- the others */

/* NCCL's maximum may lose a NaN; ours keeps it. */
static bool all_max(job *j)
{
    const kn_comm_piece *p = j->call->piece;
    int64_t shape[2] = { j->n->comm->size, p->count }, one[2] = { 1, p->count };
    if (!ok(j, j->f->all_gather(p->src, j->scratch, (size_t)p->count, NCCL_F32, j->n->handle,
                                j->handle)))
        return false;
    kn_reduce_args args = { kn_array_make(p->dst, KN_F32, 2, one),
                            kn_array_make(j->scratch, KN_F32, 2, shape), KN_MAX };
    return KN_LAUNCH(j->s, KN_K_REDUCE, args);
}

static bool run(job *j)
{
    const kn_comm_call *call = j->call;
    const kn_comm_piece *p = call->piece;
    nccl_comm_t h = j->n->handle;
    if (call->count == 0 && call->kind != KN_CALL_BARRIER)
        return true;
    switch (call->kind) {
    case KN_CALL_ALL_GATHER:
        return move_all(j, gather, NULL);
    case KN_CALL_ALL_TO_ALL:
        return move_all(j, swap, NULL);
    case KN_CALL_REDUCE_SCATTER:
        return reduce_scatter(j);
    case KN_CALL_ALL_REDUCE:
        return all_reduce(j);
    case KN_CALL_SUM_I64:
        return ok(j, j->f->all_reduce(p->src, p->dst, (size_t)p->count, NCCL_I64, NCCL_SUM, h,
                                      j->handle));
    case KN_CALL_MAX_F32:
        return all_max(j);
    case KN_CALL_BROADCAST:
        return ok(j, j->f->broadcast(p->src, p->dst, (size_t)kn_piece_dst_bytes(p), NCCL_U8,
                                     call->root, h, j->handle));
    case KN_CALL_BARRIER:
        return ok(j, j->f->all_reduce(j->scratch, j->scratch, 1, NCCL_I32, NCCL_SUM, h, j->handle));
    default:
        return kn_fail("nccl: %s runs between hosts only", kn_comm_kind_name(call->kind));
    }
}

/* Before the communicator is taken hold of: new memory is registered with all of them. */
static bool find_scratch(job *j)
{
    const kn_comm_call *call = j->call;
    size_t bytes = 0;
    if (call->kind == KN_CALL_REDUCE_SCATTER)
        bytes = need_of_all(j, room_to_scatter);
    else if (call->kind == KN_CALL_ALL_REDUCE)
        bytes = need_of_all(j, room_to_reduce);
    else if (call->kind == KN_CALL_MAX_F32)
        bytes = room_for(call->piece->count * j->n->comm->size, KN_F32);
    else if (call->kind == KN_CALL_BARRIER)
        bytes = 256;
    return bytes == 0 || scratch(j, bytes);
}

static bool issue(job *j, kn_comm *c)
{
    kn_nccl_comm *n = j->n;
    bool tracing = kn_tracing();
    kn_nccl_pending *pending = NULL;
    char what[96];
    if (!kn_event_wait(n->last, j->s) || !find_scratch(j) ||
        !kn_nccl_watch_begin(n, j->handle, j->call, &pending))
        return false;
    if (tracing)
        kn_gpu_trace_begin(j->s);
    pthread_mutex_lock(
        &n->calls); /* kept while NCCL is called, so that no thread frees the handle */
    bool done = is_open(j) && run(j);
    pthread_mutex_unlock(&n->calls);
    snprintf(what, sizeof what, "%s%s%s", kn_comm_kind_name(j->call->kind),
             j->call->label ? " " : "", j->call->label ? j->call->label : "");
    if (tracing)
        kn_gpu_trace_end(j->s, what, "nccl", 0, kn_comm_bytes(c, j->call));
    bool watched = kn_nccl_watch_end(j->handle, pending);
    return kn_event_record(n->last, j->s) && watched && done && kn_ok();
}

bool kn_nccl_launch(kn_comm *c, const kn_comm_call *given, kn_stream *s)
{
    kn_comm_call call = *given;
    kn_nccl_comm *n = c->nccl ? c->nccl : kn_nccl_make(c);
    job j = { .n = n, .f = kn_nccl(), .call = &call, .s = s };
    if (!n || !is_open(&j) || !kn_fault_pass(KN_AT_MEETING)) /* the hook of tests */
        return false;
    j.handle = ((kn_gpu_stream *)s)->handle;
    if (!kn_comm_note_call(c, &call))
        return kn_ok();
    return issue(&j, c) && (!call.flips || kn_comm_flip(c, &call, s));
}
