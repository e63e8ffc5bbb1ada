/* comm/nccl/nccl.h (private): NCCL as this library uses it: opened when first needed, so its header
 * isn't needed to build. Names and numbers are those of NCCL's interface, 2.14 and later. */
#ifndef KNAP_FSDP_COMM_NCCL_H
#define KNAP_FSDP_COMM_NCCL_H

#include "comm/comm_internal.h"
#include "kernels/cuda/runtime/runtime.h"

#include <pthread.h>

typedef struct nccl_comm *nccl_comm_t; /* ncclComm_t */
typedef struct nccl_id {
    char bytes[128];
} nccl_id; /* ncclUniqueId */
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum { NCCL_SUM = 0, NCCL_SPLIT_NOCOLOR = -1 };
enum {
    NCCL_I32 = 2,
    NCCL_U8 = 1,
    NCCL_I64 = 4,
    NCCL_F16 = 6,
    NCCL_F32 = 7,
    NCCL_F64 = 8,
    NCCL_BF16 = 9
};

/* ncclConfig_t as of 2.14: a library reads .size bytes and takes defaults for the rest. */
typedef struct nccl_config {
    size_t size;
    unsigned int magic, version;
    int blocking;
} nccl_config;
#define NCCL_MAGIC          0xcafebeefu
#define NCCL_CONFIG_VERSION 21400u

typedef struct nccl_functions {
    int (*version)(int *version);
    int (*unique_id)(nccl_id *id);
    int (*init)(nccl_comm_t *c, int ranks, nccl_id id, int rank, nccl_config *config);
    int (*async_error)(nccl_comm_t c, int *error);
    int (*abort)(nccl_comm_t c);
    int (*finalize)(nccl_comm_t c);
    int (*destroy)(nccl_comm_t c);
    const char *(*error_string)(int error);
    const char *(*last_error)(nccl_comm_t c);
    int (*all_gather)(const void *src, void *dst, size_t n, int type, nccl_comm_t c,
                      cudaStream_t s);
    int (*reduce_scatter)(const void *src, void *dst, size_t n, int type, int op, nccl_comm_t c,
                          cudaStream_t s);
    int (*all_reduce)(const void *src, void *dst, size_t n, int type, int op, nccl_comm_t c,
                      cudaStream_t s);
    int (*broadcast)(const void *src, void *dst, size_t n, int type, int root, nccl_comm_t c,
                     cudaStream_t s);
    int (*send)(const void *src, size_t n, int type, int peer, nccl_comm_t c, cudaStream_t s);
    int (*recv)(void *dst, size_t n, int type, int peer, nccl_comm_t c, cudaStream_t s);
    int (*group_start)(void);
    int (*group_end)(void);
    /* NULL in older libraries: 2.18, 2.19 */
    int (*split)(nccl_comm_t c, int color, int key, nccl_comm_t *made, nccl_config *config);
    int (*mem_alloc)(void **p, size_t bytes);
    int (*mem_free)(void *p);
    int (*enroll)(nccl_comm_t c, void *p, size_t bytes, void **handle); /* ncclCommRegister */
    int (*dismiss)(nccl_comm_t c, void *handle);                        /* ncclCommDeregister */
} nccl_functions;

extern kn_cuda_library kn_nccl_library;
/* The functions; NULL with an error if there is no NCCL. */
const nccl_functions *kn_nccl(void);

#define KN_NCCL_PENDING 256

/* A collective that a stream may not be past yet. */
typedef struct kn_nccl_pending {
    kn_comm_call call;
    char label[64]; /* call.label points here */
    cudaEvent_t begun, done;
    bool issued;  /* done is recorded */
    double since; /* when it was first seen running; 0: not yet */
} kn_nccl_pending;

/* Registered memory of one communicator. */
typedef struct kn_nccl_held {
    void *segment, *handle;
} kn_nccl_held;

typedef struct kn_nccl {
    kn_comm *comm;
    nccl_comm_t handle;
    /* Where NCCL puts what is split off; here, because it may do so after a split has failed. */
    nccl_comm_t split;
    /* Held by the thread that calls NCCL with handle, let go of while waiting for it. */
    pthread_mutex_t calls;
    kn_context *context;  /* where errors go */
    _Atomic bool aborted; /* handle is gone */
    bool given_up;        /* handle is in the midst of a call that nobody waits for any longer */
    bool shared;          /* several ranks share a GPU */
    kn_event *last;       /* after the newest collective */
    void *scratch;
    size_t scratch_bytes;
    kn_memory *scratch_memory;
    kn_nccl_held *held;
    int held_count;
    /* watched (nccl_watch.c); guarded by its lock */
    struct kn_nccl *next;
    kn_nccl_pending pending[KN_NCCL_PENDING];
    int first, count;
    kn_nccl_pending *replay; /* between the hooks of a launch (nccl_graph.c) */
    pthread_t aborter;       /* while aborting: ends handle */
    bool aborting;
    double failed; /* when NCCL was first seen to report an error; 0: not yet */
} kn_nccl_comm;

/* nccl_load.c: the error that NCCL reports, in its words; false. */
bool kn_nccl_failed(const kn_nccl_comm *n, const char *what, const char *label, int error);

/* nccl_make.c: the NCCL communicator of c, which has none; collective among the hosts. NULL with an
 * error. */
kn_nccl_comm *kn_nccl_make(kn_comm *c);
/* n->calls is held; a call of NCCL has returned error. Waits until its work is done, whatever it
 * returned; false with an error if it failed, a rank failed meanwhile, or the others don't come in
 * time. Then the call is given up, and the world is poisoned. */
bool kn_nccl_settled(kn_nccl_comm *n, int error, const char *what, const char *label);
/* false with an error, the first cause, if a rank has failed. */
bool kn_nccl_healthy(kn_comm *c);
/* Whether NCCL may be called with n; false with an error that begins with what and label, or names
 * the rank that failed. After a failure n may be in the midst of a call that was given up: NCCL
 * lets none follow, and only an abort ends it. */
bool kn_nccl_open(const kn_nccl_comm *n, const char *what, const char *label);
/* The values become their sums over the ranks, by way of the hosts. */
bool kn_nccl_host_sum(kn_comm *c, int64_t *values, int count, const char *label);

/* nccl_place.c: *shared: ranks of c share a GPU, as NCCL tells GPUs apart; then NCCL's settings let
 * them, and a line says so. Collective among the hosts. */
bool kn_nccl_place(kn_comm *c, bool *shared);

/* nccl_memory.c: registers all memory of n's world with n, or unregisters it. n->calls is held. */
bool kn_nccl_enroll_all(kn_nccl_comm *n);
/* The memory that kn_nccl_memory_of has given, if it was asked before; else the device's. */
kn_memory *kn_nccl_memory_made(const kn_comm_world *w);
void kn_nccl_dismiss_all(kn_nccl_comm *n);

/* nccl_watch.c: a thread looks after the collectives that are on their way: an error of NCCL, a
 * rank that failed, a call that takes longer than the world's timeout become errors of the context,
 * and all NCCL communicators of the process are aborted, so that its streams end. */
bool kn_nccl_watch(kn_nccl_comm *n);
void kn_nccl_unwatch(kn_nccl_comm *n);
/* nccl_graph.c: a collective of n is being recorded into a graph. */
bool kn_nccl_recorded(kn_nccl_comm *n);
/* Around the launches of call on stream, which are watched from the first on: the host may have to
 * wait for the GPU's queue between two. False with an error; *p: NULL while a step is recorded. */
bool kn_nccl_watch_begin(kn_nccl_comm *n, cudaStream_t stream, const kn_comm_call *call,
                         kn_nccl_pending **p);
bool kn_nccl_watch_end(cudaStream_t stream, kn_nccl_pending *p);

#endif
