/* comm/local/local.h (private): the memory that ranks of one host share.
 *
 * One mapping: a control block, then a region of the same size for each rank.
 *
 *   | header, poison | channel 0: slot of rank 0, 1, .. | channel 1: .. | region 0 | region 1 | ..
 *
 * The mapping is sparse: pages exist once touched, so that a region can be as large as the address
 * space allows (64 GiB, halved until the mapping succeeds). Processes may map it at different
 * addresses, hence everything inside refers to it by offset.
 *
 * A channel carries the calls of one communicator; disjoint groups may share one. A rank writes
 * only its own slot: the description of its call (two of them, used in turn), a few bytes of
 * payload, and the phase, a counter that it raises once for each meeting and on which peers sleep.
 * When a rank has passed meeting p, everyone has arrived at p, so all that the others did before is
 * over; a description or payload of the meeting before the last may be overwritten. */
#ifndef KNAP_FSDP_COMM_LOCAL_H
#define KNAP_FSDP_COMM_LOCAL_H

#include "comm/comm_internal.h"
#include <sys/types.h>

#define KN_LOCAL_MAX_RANKS 256
#define KN_LOCAL_CHANNELS  256
#define KN_LOCAL_SMALL     1024 /* bytes of payload in a slot: smaller calls take one meeting */

/* A rank's description of its call. Offsets of its pieces into the mapping; -1: private memory. */
typedef struct kn_local_call {
    kn_comm_note note;
    int64_t bounce; /* -1: none of its pieces is staged */
    int64_t src[KN_COMM_PIECES], dst[KN_COMM_PIECES];
} kn_local_call;

typedef struct kn_local_slot {
    _Alignas(64) _Atomic uint32_t phase; /* futex word */
    _Atomic uint32_t sleepers;
    _Alignas(64) kn_local_call call[2];
    _Alignas(64) unsigned char payload[2][KN_LOCAL_SMALL];
    _Alignas(64) kn_comm_log log; /* of the first communicator of a family */
} kn_local_slot;

/* How the cores this process may use (its affinity mask) are shared among ranks: threads 0
 * takes the default, max(1, cores / ranks). */
typedef struct kn_local_cores {
    int threads; /* of each rank */
    int free;    /* cores left over for each rank's stream workers */
    bool enough; /* every rank has cores of its own */
} kn_local_cores;

typedef struct kn_local_head {
    uint64_t magic, control_bytes, region_bytes;
    int32_t size; /* ranks */
    kn_local_cores cores;
    _Alignas(64) kn_poison poison;
    int32_t died;       /* the supervisor's: that was no error, its rank ended */
    _Atomic int spoken; /* a rank has printed (or is about to) why the job failed */
    _Atomic int left[KN_LOCAL_MAX_RANKS];     /* this rank takes no further part */
    _Atomic int last[KN_LOCAL_MAX_RANKS];     /* channel of the family of this rank's last call */
    _Atomic int64_t beat[KN_LOCAL_MAX_RANKS]; /* when this rank last looked while waiting, in ms */
    kn_local_slot slot[];                     /* channel * size + rank */
} kn_local_head;

/* One process's (or thread's) view of the mapping. */
typedef struct kn_local {
    kn_local_head *head;
    size_t bytes;  /* of the mapping */
    int rank;      /* -1 for the supervisor */
    bool owns_map; /* unmap at the end */
    int lock;      /* ranks without a supervisor: a file of which each rank holds a byte; else -1 */
    kn_memory memory;
} kn_local;

/* A bounce buffer carries bytes of private memory. It has two halves used in turn; in each KN_CHUNK
 * bytes that a rank gives and KN_CHUNK bytes that it computed for the others. */
#define KN_CHUNK        ((int64_t)512 << 10)
#define KN_BOUNCE_BYTES (4 * (size_t)KN_CHUNK)

typedef struct kn_local_comm {
    kn_comm base;
    kn_local *local;
    uint32_t phase, number; /* meetings and calls so far */
    unsigned half;          /* of the bounce buffer, next to use */
    char *bounce;           /* NULL until a call needs it */
    const void **source;    /* [size] scratch */
    double left_since;      /* a rank was first seen to have ended, on a GPU's call; 0: not yet */
} kn_local_comm;

static inline kn_local_slot *kn_local_slot_at(kn_local_head *h, int channel, int rank)
{
    return &h->slot[(size_t)channel * (size_t)h->size + (size_t)rank];
}

/* kn_comm_ops.run of this back end (local.c). */
bool kn_local_run(kn_comm *c, const kn_comm_call *call, kn_stream *s);

/* Makes the mapping for n ranks with these cores; *fd is its memfd, or pass NULL for an anonymous
 * one (fork, threads). NULL with an error if that fails. */
kn_local_head *kn_local_create(int n, kn_local_cores cores, int *fd, size_t *bytes);
/* Maps the memfd of another process and checks its contents. */
kn_local_head *kn_local_map(int fd, size_t *bytes);
void kn_local_unmap(kn_local_head *head, size_t bytes);

/* The world communicator of one rank over the mapping, which gets the cores that it says; owns_map
 * as in kn_local. */
kn_comm *kn_comm_local(kn_local_head *head, size_t bytes, int rank, bool owns_map);

/* rank takes no further part: peers that wait for it get an error instead of waiting for ever. */
void kn_local_left(kn_local_head *head, int rank);

/* Sleeping on a phase. */
void kn_local_publish(kn_local_slot *mine, uint32_t phase);
/* Waits until peer's phase has reached target. False with an error if the world is poisoned, or the
 * peer has ended, is out of step with this rank's call, or doesn't come in time. */
bool kn_local_wait(kn_local_comm *c, int peer, uint32_t target, const kn_comm_call *call,
                   bool may_spin);
/* kn_comm_ops.healthy, .in_step and .late of this back end. */
bool kn_local_healthy(kn_comm *c);
bool kn_local_in_step(kn_comm *c, const kn_comm_call *call);
void kn_local_late(kn_comm *c, const kn_comm_call *call, double limit);
/* The last launch of rank r of the world; false without one. finished: it is over (may be NULL). */
bool kn_local_last_call(kn_local_head *head, int r, kn_comm_note *note, bool *finished);

/* shared_pool.c: a kn_memory over bytes at base. Keeps pages; thread-safe. */
bool kn_shared_pool_open(kn_memory *m, void *base, size_t bytes);
void kn_shared_pool_close(kn_memory *m);

/* supervisor.c: waits for the ranks' processes, ends all when one dies. A rank that exits with a
 * non-zero status ends the others too where strict. signals: a signalfd: the supervisor passes its
 * SIGINT and SIGTERM on; or -1. status[n] gets wait statuses. Returns the first rank that was at
 * fault, -1 for none; *forwarded the signal passed on, 0 for none. */
int kn_local_watch(kn_local_head *head, int n, const pid_t *pid, bool strict, int signals,
                   int *status, int *forwarded);
/* "was killed by signal 9 (Killed)" or "exited with status 3". */
char *kn_local_describe_exit(int status, char *buf, size_t size);

/* cores.c */
kn_local_cores kn_local_share_cores(int ranks, int threads);
/* supervisor.c: runs this program as n ranks; returns only with an error set. */
void kn_supervise(int n, const kn_local_cores *cores, char **argv);
/* Binds this process to rank's cores; does nothing if they don't suffice. */
void kn_local_pin(int rank, int ranks, int threads);

#endif
