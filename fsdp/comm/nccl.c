/* fsdp/comm/nccl.c: collectives on streams of a GPU by NCCL.
 *
 * An NCCL communicator belongs to a kn_comm and is made by its first collective on a GPU: rank 0's unique
 * id travels through the hosts' communicator. Init doesn't block: it is polled, so that a rank that fails
 * meanwhile, or doesn't come, ends it.
 *
 * Reductions. NCCL adds f32 and f64 in an order of its own: that is what is used where bits needn't
 * repeat over numbers of ranks. Everything else is an exchange of parts followed by one sum in rank order
 * (KN_K_SUM_N: f32, rounded once): bf16 and f16 always, since NCCL would round after each addition, and
 * all dtypes where kn_cuda_deterministic asks for it. Accumulators and results of another dtype go
 * through that kernel, too. */
#include "fsdp/comm/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the library ------------------------------------------------------------------------------ */

static nccl_functions nccl;
static bool nccl_there;
static pthread_once_t nccl_once = PTHREAD_ONCE_INIT;

static void *open_library(void)
{
    static const char *const folder[] = { "/usr/local/cuda/lib64", "/usr/local/cuda/lib" };
    const char *given = getenv("KNAP_NCCL");
    char path[1024];
    if (given && *given)
        return dlopen(given, RTLD_NOW | RTLD_LOCAL);
    void *l = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; !l && i < sizeof folder / sizeof *folder; i++) {
        snprintf(path, sizeof path, "%s/libnccl.so.2", folder[i]);
        l = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    return l;
}

static void load(void)
{
    const kn_cuda_symbol list[] = {
        { "ncclGetVersion", &nccl.version },
        { "ncclGetUniqueId", &nccl.unique_id },
        { "ncclCommInitRankConfig", &nccl.init },
        { "ncclCommGetAsyncError", &nccl.async_error },
        { "ncclCommAbort", &nccl.abort },
        { "ncclCommFinalize", &nccl.finalize },
        { "ncclCommDestroy", &nccl.destroy },
        { "ncclGetErrorString", &nccl.error_string },
        { "ncclGetLastError", &nccl.last_error },
        { "ncclAllGather", &nccl.all_gather },
        { "ncclReduceScatter", &nccl.reduce_scatter },
        { "ncclAllReduce", &nccl.all_reduce },
        { "ncclBroadcast", &nccl.broadcast },
        { "ncclSend", &nccl.send },
        { "ncclRecv", &nccl.recv },
        { "ncclGroupStart", &nccl.group_start },
        { "ncclGroupEnd", &nccl.group_end },
    };
    void *l = open_library();
    nccl_there = l && kn_cuda_symbols(l, "libnccl.so.2", list, (int)(sizeof list / sizeof *list));
}

const nccl_functions *kn_nccl(void)
{
    pthread_once(&nccl_once, load);
    if (nccl_there)
        return &nccl;
    kn_fail("collectives of GPU tensors need libnccl.so.2, which is neither among the system's "
            "libraries "
            "nor below /usr/local/cuda; install it, name it in KNAP_NCCL, or set KNAP_COMM=local");
    return NULL;
}

const char *kn_nccl_version(void)
{
    static char text[32];
    int v = 0;
    pthread_once(&nccl_once, load);
    if (!nccl_there || nccl.version(&v) != NCCL_SUCCESS)
        return NULL;
    snprintf(text, sizeof text, "%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
    return text;
}

static bool failed(const kn_nccl_comm *n, const char *what, const char *label, int error)
{
    const char *last = n->handle ? nccl.last_error(n->handle) : "";
    return kn_fail("%s %s: NCCL says %s%s%s (NCCL_DEBUG=WARN tells more)", what,
                   label ? label : "-", nccl.error_string(error), last && *last ? ": " : "",
                   last ? last : "");
}

/* ---- several ranks on one GPU -------------------------------------------------------------------- */

static int local_ranks(const kn_comm *c)
{
    static const char *const names[] = { "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                         "LOCAL_WORLD_SIZE" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]) && atoi(getenv(names[i])) > 0)
            return atoi(getenv(names[i]));
    return strcmp(c->ops->backend, "local") == 0 ? kn_context_get()->world : 1;
}

/* NCCL refuses two ranks on one GPU of one host. Where there are more ranks than GPUs, each rank says that
 * it is a host of its own, so that they talk through sockets: slow, and right, for tests. */
static bool share_gpus(const kn_comm *c)
{
    static const char *const setting[][2] = {
        { "NCCL_NET", "Socket" },     { "NCCL_SOCKET_IFNAME", "lo" }, { "NCCL_IB_DISABLE", "1" },
        { "NCCL_MNNVL_ENABLE", "0" }, { "NCCL_NVLS_ENABLE", "0" },    { "NCCL_GIN_ENABLE", "0" },
        { "NCCL_RAS_ENABLE", "0" },   { "NCCL_MAX_CTAS", "2" },       { "NCCL_ALGO", "Ring" },
        { "NCCL_PROTO", "Simple" },
    };
    int gpus = 0, ranks = local_ranks(c);
    char id[32];
    /* gathers and reductions have communicators of their own, issued in the same order on every rank */
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    if (!kn_cuda_check(cudaGetDeviceCount(&gpus), "nccl"))
        return false;
    if (ranks <= gpus && !(ranks > 1 && getenv("KNAP_CUDA_DEVICE")))
        return true;
    snprintf(id, sizeof id, "knap%d", kn_context_get()->rank);
    setenv("NCCL_HOSTID", id, 0);
    for (size_t i = 0; i < sizeof setting / sizeof *setting; i++)
        setenv(setting[i][0], setting[i][1], 0);
    return true;
}

/* ---- making communicators ------------------------------------------------------------------------ */

static bool healthy(kn_comm *c)
{
    if (c->ops->healthy)
        return c->ops->healthy(c);
    int rank = c->ops->culprit(c);
    return rank < 0 || kn_fail("rank %d failed: its own message says why", rank);
}

/* A call that doesn't block may go on afterwards; the next one must wait for it. */
static bool settled(kn_nccl_comm *n, int error, const char *what, const char *label)
{
    double begin = kn_now(), limit = kn_comm_timeout(n->comm->world);
    for (int looks = 0; error == NCCL_IN_PROGRESS; looks++) {
        if (atomic_load(&n->aborted) || !kn_ok() || !healthy(n->comm))
            return false;
        if (kn_now() - begin > limit)
            return kn_fail(
                "%s %s: rank %d waited %g s for the others: a rank is stopped, stuck or late "
                "(to wait longer: kn_comm_set_timeout, KNAP_TIMEOUT)",
                what, label ? label : "-", n->comm->rank, limit);
        if (looks > 100)
            nanosleep(&(struct timespec){ .tv_nsec = 200000 }, NULL);
        int asked = nccl.async_error(n->handle, &error);
        error = asked == NCCL_SUCCESS ? error : asked;
    }
    return error == NCCL_SUCCESS || failed(n, what, label, error);
}

/* Rank 0's id becomes everyone's, by way of the hosts. */
static bool share_id(kn_comm *c, nccl_id *id)
{
    kn_comm_call call = { .kind = KN_CALL_BROADCAST,
                          .dst_dtype = KN_U8,
                          .src_dtype = KN_U8,
                          .count = sizeof *id,
                          .dst = id,
                          .src = id,
                          .label = "NCCL's unique id" };
    if (c->rank == 0) {
        int error = nccl.unique_id(id);
        if (error != NCCL_SUCCESS)
            return kn_fail("%s: NCCL has no unique id to give: %s", c->name,
                           nccl.error_string(error));
    }
    kn_comm_note_call(c, &call);
    if (!c->ops->run(c, &call, kn_compute_stream(KN_CPU)))
        return false;
    kn_comm_note_end(c, &call);
    return true;
}

static kn_nccl_comm *make(kn_comm *c)
{
    nccl_id id = { { 0 } };
    nccl_config config = { sizeof config, NCCL_MAGIC, NCCL_CONFIG_VERSION, 0 };
    if (!kn_cuda_open() || !share_gpus(c) || !kn_nccl() || !share_id(c, &id))
        return NULL;
    kn_nccl_comm *n = kn_calloc(1, sizeof *n);
    if (!n)
        return NULL;
    n->comm = c;
    n->context = kn_context_get();
    n->last = kn_event_create(KN_CUDA);
    c->nccl = n;
    int error = nccl.init(&n->handle, c->size, id, c->rank, &config);
    if (n->last && settled(n, error, "nccl: making communicator", c->name) && kn_nccl_watch(n))
        return n;
    kn_nccl_free(c);
    return NULL;
}

void kn_nccl_free(kn_comm *c)
{
    kn_nccl_comm *n = c->nccl;
    if (!n)
        return;
    kn_nccl_unwatch(n);
    if (n->handle && !atomic_load(&n->aborted)) {
        bool ok =
            kn_ok() && settled(n, nccl.finalize(n->handle), "nccl: ending communicator", c->name);
        if (ok)
            nccl.destroy(n->handle);
        else
            nccl.abort(n->handle);
    }
    kn_event_destroy(n->last);
    if (n->scratch)
        kn_give(kn_device_memory(KN_CUDA), n->scratch, n->scratch_bytes, KN_MEM_COMM);
    kn_free_host(n);
    c->nccl = NULL;
}

/* ---- pieces of a call ------------------------------------------------------------------------------ */

typedef struct job {
    kn_nccl_comm *n;
    const kn_comm_call *call;
    kn_stream *s;
    cudaStream_t handle;
    char *scratch;
} job;

static bool ok(const job *j, int error)
{
    return settled(j->n, error, kn_comm_kind_name(j->call->kind), j->call->label);
}

static int type_of(kn_dtype t)
{
    return t == KN_F32 ? NCCL_F32 : t == KN_F64 ? NCCL_F64 : t == KN_F16 ? NCCL_F16 : NCCL_BF16;
}

/* Bytes in the order of the communicator's calls: taken for good, grown where a call needs more. What the
 * compute stream did with them before is waited for. */
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

/* dst = acc + the n parts, which lie one after the other, stride elements apart. wide: room for count
 * values in f32 (f64), used where one kernel doesn't take all parts. */
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

/* Rank r's elements [r * step, ...) of src go to rank r; here arrive everyone's for this rank, step apart. */
static bool exchange(const job *j, const char *src, char *dst, int64_t step, int64_t count)
{
    kn_comm *c = j->n->comm;
    size_t size = kn_dtype_size(j->call->src_dtype);
    int type = NCCL_U8, error = nccl.group_start();
#define LENGTH(r)                                                                                  \
    ((size_t)(count - (r)*step < 0 ? 0 : count - (r)*step < step ? count - (r)*step : step) * size)
    for (int r = 0; r < c->size && error == NCCL_SUCCESS; r++) {
        if (LENGTH(r) > 0)
            error = nccl.send(src + (size_t)(r * step) * size, LENGTH(r), type, r, j->n->handle,
                              j->handle);
        if (error == NCCL_IN_PROGRESS)
            error = NCCL_SUCCESS;
        if (LENGTH(c->rank) > 0 && error == NCCL_SUCCESS)
            error = nccl.recv(dst + (size_t)(r * step) * size, LENGTH(c->rank), type, r,
                              j->n->handle, j->handle);
        if (error == NCCL_IN_PROGRESS)
            error = NCCL_SUCCESS;
    }
#undef LENGTH
    int end = nccl.group_end();
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

/* ---- calls ------------------------------------------------------------------------------------------- */

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
        return ok(j, nccl.reduce_scatter(call->src, to, (size_t)call->count, type_of(t), NCCL_SUM,
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
           ok(j, nccl.all_gather(own, whole, (size_t)slice * size, NCCL_U8, j->n->handle,
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
    return ok(j, nccl.all_reduce(call->src, to, (size_t)call->count, type_of(t), NCCL_SUM,
                                 j->n->handle, j->handle)) &&
           (straight || sum(j, call->dst, call->acc, j->scratch, 1, 0, call->count, NULL));
}

/* NCCL's maximum may lose a NaN; ours keeps it. */
static bool all_max(job *j)
{
    const kn_comm_call *call = j->call;
    int64_t shape[2] = { j->n->comm->size, call->count }, one[2] = { 1, call->count };
    if (!scratch(j, room_for(shape[0] * shape[1], KN_F32)) ||
        !ok(j, nccl.all_gather(call->src, j->scratch, (size_t)call->count, NCCL_F32, j->n->handle,
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
        return ok(j, nccl.all_gather(call->src, call->dst, bytes, NCCL_U8, h, j->handle));
    case KN_CALL_REDUCE_SCATTER:
        return reduce_scatter(j);
    case KN_CALL_ALL_REDUCE:
        return all_reduce(j);
    case KN_CALL_SUM_I64:
        return ok(j, nccl.all_reduce(call->src, call->dst, (size_t)call->count, NCCL_I64, NCCL_SUM,
                                     h, j->handle));
    case KN_CALL_MAX_F32:
        return all_max(j);
    case KN_CALL_BROADCAST:
        return ok(j,
                  nccl.broadcast(call->src, call->dst, bytes, NCCL_U8, call->root, h, j->handle));
    case KN_CALL_BARRIER:
        return scratch(j, 256) &&
               ok(j, nccl.all_reduce(j->scratch, j->scratch, 1, NCCL_I32, NCCL_SUM, h, j->handle));
    default:
        return kn_fail("nccl: %s runs between hosts only", kn_comm_kind_name(call->kind));
    }
}

bool kn_nccl_launch(kn_comm *c, const kn_comm_call *given, kn_stream *s)
{
    kn_comm_call call = *given;
    kn_nccl_comm *n = c->nccl ? c->nccl : make(c);
    cudaEvent_t begun = NULL;
    char what[96];
    if (!n)
        return false;
    if (atomic_load(&n->aborted))
        return healthy(c) &&
               kn_fail("%s %s: the NCCL communicator %s was aborted", kn_comm_kind_name(call.kind),
                       call.label ? call.label : "-", c->name);
    if (!kn_comm_meeting(c->world)) /* the hook of tests */
        return false;
    job j = { n, &call, s, ((kn_gpu_stream *)s)->handle, NULL };
    kn_comm_note_call(c, &call);
    bool tracing = kn_tracing();
    if (!kn_event_wait(n->last, s) || !kn_nccl_watch_begin(n, j.handle, &begun))
        return false;
    if (tracing)
        kn_gpu_trace_begin(s);
    bool done = run(&j);
    snprintf(what, sizeof what, "%s%s%s", kn_comm_kind_name(call.kind), call.label ? " " : "",
             call.label ? call.label : "");
    if (tracing)
        kn_gpu_trace_end(s, what, "nccl", 0, kn_comm_bytes(c, &call));
    bool watched = kn_nccl_watch_end(n, j.handle, begun, &call);
    return kn_event_record(n->last, s) && watched && done && kn_ok();
}
