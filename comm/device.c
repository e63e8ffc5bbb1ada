/* comm/device.c: collectives on streams of a device with memory of its own (a GPU). Two ways:
 *
 *   nccl    NCCL moves the bytes between GPUs, beside the communicator of the hosts (nccl.c)
 *   local   any such device: bytes go through page-locked host memory and the hosts' communicator;
 *           the host waits. For tests with several ranks on one GPU, threads as ranks, machines
 *           without NCCL.
 *
 * .comm of kn_init or KNAP_COMM, nccl or local, chooses; default NCCL if this build has CUDA.
 * Agreements, barriers and counts of the hosts go through their own communicator in both cases. */
#include "kernels/trace.h"
#include "comm/comm_internal.h"
#include "comm/values.h"
#include "kernels/environment.h"
#include "kernels/kernels_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef KN_HAVE_CUDA
enum { HAVE_NCCL = true };
#else
enum { HAVE_NCCL = false }; /* the compiler leaves out the calls that it guards */
#endif

/* ---- through the host ------------------------------------------------------------------------ */

/* Bytes of a piece that this rank reads and writes. */
typedef struct extent {
    size_t dst, src, acc;
} extent;

static extent extent_of(const kn_comm *c, kn_comm_kind kind, const kn_comm_piece *p)
{
    size_t dst = (size_t)kn_piece_dst_bytes(p), src = (size_t)kn_piece_src_bytes(p);
    size_t n = (size_t)c->size, acc = p->acc ? dst : 0;
    switch (kind) {
    case KN_CALL_ALL_GATHER:
        return (extent){ n * dst, src, 0 };
    case KN_CALL_REDUCE_SCATTER:
        return (extent){ dst, n * src, acc };
    case KN_CALL_ALL_TO_ALL:
        return (extent){ n * dst, n * src, 0 };
    case KN_CALL_ALL_REDUCE:
        return (extent){ dst, src, acc };
    case KN_CALL_BARRIER:
        return (extent){ 0, 0, 0 };
    default: /* in place */
        return (extent){ dst, 0, 0 };
    }
}

static size_t room_for(extent e)
{
    return KN_ALIGNED(e.dst) + KN_ALIGNED(e.src) + KN_ALIGNED(e.acc);
}

/* Room for a call's bytes on the host; kept for the next one. */
static char *staging(kn_comm *c, kn_device d, size_t bytes)
{
    if (bytes <= c->staging_bytes)
        return c->staging;
    if (c->staging)
        kn_give(c->staging_memory, c->staging, c->staging_bytes, KN_MEM_COMM);
    c->staging_memory = kn_pinned_memory(d);
    c->staging = c->staging_memory ? kn_take(c->staging_memory, bytes, KN_MEM_COMM) : NULL;
    c->staging_bytes = c->staging ? bytes : 0;
    return c->staging;
}

/* *h is p with its bytes in room, to which those that are read go. */
static bool to_room(const kn_comm_piece *p, extent e, char *room, kn_stream *s, kn_comm_piece *h)
{
    bool in_place = e.src == 0;
    char *src = room + KN_ALIGNED(e.dst), *acc = src + KN_ALIGNED(e.src);
    *h = *p;
    h->dst = room;
    h->src = in_place ? room : src;
    h->acc = p->acc ? acc : NULL;
    return (in_place ? kn_transfer(s, room, p->dst, e.dst, KN_TO_HOST, true)
                     : kn_transfer(s, src, p->src, e.src, KN_TO_HOST, true)) &&
           (!p->acc || kn_transfer(s, acc, p->acc, e.acc, KN_TO_HOST, true));
}

static bool run_staged(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    kn_comm_piece piece[KN_COMM_PIECES];
    kn_comm_call h = *call;
    size_t bytes = KN_ALIGN, at = 0;
    for (int i = 0; i < call->pieces; i++)
        bytes += room_for(extent_of(c, call->kind, &call->piece[i]));
    char *room = staging(c, kn_stream_device(s), bytes);
    kn_stream *host = kn_compute_stream(KN_CPU);
    bool ok = room && host;
    for (int i = 0; ok && i < call->pieces; i++) {
        extent e = extent_of(c, call->kind, &call->piece[i]);
        ok = to_room(&call->piece[i], e, room + at, s, &piece[i]);
        at += room_for(e);
    }
    if (!ok || !kn_stream_sync(s))
        return false;
    double begin = kn_now();
    h.piece = piece;
    if (!kn_comm_run_now(c, &h, host))
        return false;
    if (kn_tracing())
        kn_trace_add(kn_comm_kind_name(call->kind), "staged", s, begin, kn_now(), 0,
                     kn_comm_bytes(c, call));
    for (int i = 0; ok && i < call->pieces; i++)
        ok = kn_transfer(s, call->piece[i].dst, piece[i].dst,
                         extent_of(c, call->kind, &call->piece[i]).dst, KN_TO_DEVICE, false);
    return ok && kn_ok();
}

/* ---- which way ------------------------------------------------------------------------------- */

static char given[8]; /* to kn_init; "": KNAP_COMM says */

static bool is_way(const char *way)
{
    return strcmp(way, "nccl") == 0 || strcmp(way, "local") == 0;
}

bool kn_comm_device_choose(const char *way)
{
    if (way && !is_way(way))
        return kn_fail("kn_init: .comm = \"%s\" must be \"nccl\", or \"local\" for collectives "
                       "through the host",
                       way);
    snprintf(given, sizeof given, "%s", way ? way : "");
    return true;
}

/* NCCL works on NVIDIA's GPUs only. false with an error if KNAP_COMM is neither. */
static bool choose(kn_device d, bool *nccl)
{
    const char *variable = getenv("KNAP_COMM"), *way = *given ? given : variable ? variable : "";
    if (*way && !is_way(way))
        return kn_fail("KNAP_COMM=%s: must be nccl, or local for collectives through the host",
                       way);
    *nccl = HAVE_NCCL && d == KN_CUDA && strcmp(way, "local") != 0;
    return HAVE_NCCL || strcmp(way, "nccl") != 0 ||
           kn_fail("%s: this build has no CUDA; configure with -Dcuda=enabled",
                   *given ? ".comm = \"nccl\"" : "KNAP_COMM=nccl");
}

static bool is_simulated(const kn_comm *c)
{
    return strcmp(c->ops->backend, "simulated") == 0;
}

bool kn_comm_device_launch(kn_comm *c, const kn_comm_call *call, kn_stream *s)
{
    bool nccl;
    if (is_simulated(c))
        return kn_ok();
    if (!choose(kn_stream_device(s), &nccl))
        return false;
    return HAVE_NCCL && nccl ? kn_nccl_launch(c, call, s) : run_staged(c, call, s);
}

kn_memory *kn_comm_device_memory(kn_comm *c, kn_device d)
{
    bool nccl = false;
    if (!is_simulated(c) && !choose(d, &nccl))
        return NULL;
    return HAVE_NCCL && nccl ? kn_nccl_memory_of(c) : kn_device_memory(d);
}

bool kn_comm_device_split(kn_comm *c, kn_comm *made, int color, int key)
{
    return !HAVE_NCCL || !c->nccl || kn_nccl_split(c, made, color, key);
}

void kn_comm_device_world_free(kn_comm_world *w)
{
    if (HAVE_NCCL)
        kn_nccl_memory_free(w);
}

void kn_comm_device_free(kn_comm *c)
{
    if (c->staging)
        kn_give(c->staging_memory, c->staging, c->staging_bytes, KN_MEM_COMM);
    c->staging = NULL;
    c->staging_bytes = 0;
    if (HAVE_NCCL)
        kn_nccl_free(c);
}

const char *kn_comm_nccl_lacks(const kn_comm *c, int i)
{
    static _Thread_local char text[200];
    if (!HAVE_NCCL || !c || !c->nccl)
        return NULL;
    const char *why[2] = { kn_nccl_unregistered(c->world), kn_nccl_serial() };
    i += !why[0];
    if (i < 0 || i > 1 || !why[i])
        return NULL;
    snprintf(text, sizeof text, "%s: %s",
             i ? "recorded steps run their collectives one after another"
               : "NCCL copies the bytes that it moves, as memory isn't registered with it",
             why[i]);
    return text;
}

const char *kn_comm_nccl_version(void)
{
    const char *version = HAVE_NCCL ? kn_nccl_version() : NULL;
    return version ? version : "none";
}

void kn_comm_device_place(int local_rank, int local_size, bool replace)
{
    char text[16];
    snprintf(text, sizeof text, "%d", local_rank);
    setenv("LOCAL_RANK", text, replace);
    snprintf(text, sizeof text, "%d", local_size);
    setenv("LOCAL_WORLD_SIZE", text, replace);
}

/* -1: not set, or an error. */
static int64_t launcher_number(const char *name, int64_t least)
{
    int64_t n = -1;
    return kn_env_number(name, least, 1 << 20, &n) ? n : -1;
}

/* The launcher's count of this rank's machine, which is of the world; 0: unknown. */
static int64_t said_of_machine(const kn_comm *c)
{
    if (c->size == 1) /* what is said may be of a job around this program */
        return 1;
    int64_t n = launcher_number("LOCAL_WORLD_SIZE", 1);
    if (n > 0 && kn_comm_size(kn_world()) == c->size)
        return n;
    return strcmp(c->ops->backend, "local") == 0 ? c->size : 0;
}

int kn_comm_ranks_a_machine(kn_comm *c)
{
    if (!kn_ok() || !c)
        return kn_ok();
    int64_t mine = said_of_machine(c), sum[3] = { mine, mine * mine };
    int64_t place = c->size == kn_comm_size(kn_world()) ? launcher_number("LOCAL_RANK", 0) : -1;
    bool others = c->size > 1 && !is_simulated(c);
    sum[2] = mine > 0 && place >= 0 && place != c->rank % mine;
    if (others && !kn_hosts_sum(c, sum, 3, "ranks a machine"))
        return 0;
    if (others && (sum[0] != mine * c->size || sum[1] != mine * sum[0]))
        kn_fail("the machine of rank %d holds %d ranks (LOCAL_WORLD_SIZE), and others hold another "
                "number; give the mesh (.mesh, --shards)",
                c->rank, (int)mine);
    else if (mine > 0 && c->size % mine)
        kn_fail("%d ranks can't be machines of %d each (LOCAL_WORLD_SIZE); give the mesh (.mesh, "
                "--shards)",
                c->size, (int)mine);
    else if (others && sum[2] > 0)
        kn_fail("the ranks of a machine don't follow each other: %d of the %d ranks are at another "
                "place on their machine (LOCAL_RANK) than rank %% %d; start the ranks of a machine "
                "one after another, or give the mesh (.mesh, --shards)",
                (int)sum[2], c->size, (int)mine);
    return kn_ok() ? (int)mine : 0;
}
