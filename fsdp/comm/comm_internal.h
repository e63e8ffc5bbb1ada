/* fsdp/comm/comm_internal.h (private): what a back end of the communicator plugs into.
 *
 * comm.c checks arguments, launches on streams, traces; a back end gets one struct that describes
 * the call (kn_comm_call) and runs it to its end on the thread it is called on. A back end for a
 * device with streams of its own (NCCL) fills the optional launch entry instead. */
#ifndef KNAP_FSDP_COMM_INTERNAL_H
#define KNAP_FSDP_COMM_INTERNAL_H

#include "fsdp/comm/comm.h"
#include "kernels/context.h"

typedef enum kn_comm_kind {
    KN_CALL_NONE = 0,
    KN_CALL_ALL_GATHER,
    KN_CALL_REDUCE_SCATTER,
    KN_CALL_ALL_REDUCE,
    KN_CALL_SUM_I64,
    KN_CALL_MAX_F32,
    KN_CALL_BROADCAST,
    KN_CALL_BARRIER,
    KN_CALL_AGREE,
    KN_CALL_GROUP, /* the exchanges inside kn_comm_dup and kn_comm_split */
    KN_CALL_COUNT
} kn_comm_kind;

const char *kn_comm_kind_name(kn_comm_kind k);

/* One collective as a rank calls it; the meaning of the fields is that of the function in comm.h.
 * In-place calls (sums of i64, maximum, broadcast) have src == dst. */
typedef struct kn_comm_call {
    kn_comm_kind kind;
    kn_dtype dst_dtype, src_dtype;
    int root;
    int64_t count;
    void *dst;
    const void *acc, *src;
    const char *label;
} kn_comm_call;

/* Bytes this call reads and writes on this rank (for traces and kn_comm_slow). */
double kn_comm_bytes(const kn_comm *c, const kn_comm_call *call);

/* dst = acc + src[0] + ... + src[n-1] in that order, rounded once; any n (sum.c). */
bool kn_comm_sum(kn_stream *s, void *dst, const void *acc, const void *const *src, int n,
                 int64_t count, kn_dtype dst_dtype, kn_dtype src_dtype);

/* What all communicators made from one world share. */
typedef struct kn_comm_world {
    kn_comm *first; /* every communicator, newest first */
    kn_memory *memory;
    void *backend; /* the back end's own */
} kn_comm_world;

typedef struct kn_comm_ops {
    const char *backend;
    /* Runs the call; s is the stream it runs on (NULL: no stream, no arithmetic on floats). */
    bool (*run)(kn_comm *c, const kn_comm_call *call, kn_stream *s);
    /* Optional: enqueue on the device's stream instead of run as a host function. */
    bool (*launch)(kn_comm *c, const kn_comm_call *call, kn_stream *s);
    /* Collective. member[size] are ranks of c, ascending in the new order; rank is the caller's
     * place among them, -1 (and size 0) when it is in none: then NULL without error. */
    kn_comm *(*group)(kn_comm *c, const int *member, int size, int rank, const char *name);
    void (*poison)(kn_comm *c, const char *message); /* never blocks, never records an error */
    int (*culprit)(kn_comm *c);  /* the rank whose error came first; -1 while none is known */
    void (*destroy)(kn_comm *c); /* frees c and what it owns */
    void (*close)(kn_comm_world *world); /* after every communicator of the world is gone */
} kn_comm_ops;

/* First member of every back end's struct. */
struct kn_comm {
    const kn_comm_ops *ops;
    kn_comm_world *world;
    kn_comm *next;
    int rank, size;
    char name[48];
    double slow_latency, slow_rate; /* kn_comm_slow; 0: off */
};

/* Enters c into world's list and fills the common fields. */
void kn_comm_enter(kn_comm *c, kn_comm_world *world, const kn_comm_ops *ops, int rank, int size,
                   const char *name);
/* Frees every communicator and the world; the streams that used them are idle. */
void kn_comm_world_free(kn_comm_world *world);

/* ---- back ends ------------------------------------------------------------------------------- */

/* A world of one rank. */
kn_comm *kn_comm_self(void);

/* ---- becoming a rank (init.c) ---------------------------------------------------------------- */

/* Makes world the world of this thread's context: kn_world(), rank and size, and an error handler
 * that poisons it. It is freed by kn_context_end, after everything that may lie in its memory. */
bool kn_rank_enter(kn_comm *world);

#endif
