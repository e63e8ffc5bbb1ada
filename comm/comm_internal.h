/* comm/comm_internal.h (private): the interface that a back end implements.
 *
 * comm.c checks arguments, launches on streams, traces; a back end gets one struct that describes
 * the call (kn_comm_call) and runs it to its end on the thread it is called on. A back end for a
 * device with streams of its own (NCCL) fills the optional launch entry instead. */
#ifndef KNAP_FSDP_COMM_INTERNAL_H
#define KNAP_FSDP_COMM_INTERNAL_H

#include "comm/comm.h"
#include "kernels/context.h"
#include "kernels/faults.h"
#include "kernels/error_internal.h"

typedef enum kn_comm_kind {
    KN_CALL_NONE = 0,
    KN_CALL_ALL_GATHER,
    KN_CALL_REDUCE_SCATTER,
    KN_CALL_ALL_REDUCE,
    KN_CALL_ALL_TO_ALL,
    KN_CALL_SUM_I64,
    KN_CALL_MAX_F32,
    KN_CALL_BROADCAST,
    KN_CALL_BARRIER,
    KN_CALL_AGREE,
    KN_CALL_GROUP,  /* the exchanges inside kn_comm_dup and kn_comm_split */
    KN_CALL_REPLAY, /* of the calls in a recorded graph (nccl_graph.c) */
    KN_CALL_COUNT
} kn_comm_kind;

const char *kn_comm_kind_name(kn_comm_kind k);

/* One collective as a rank calls it; the meaning of a piece's fields is that of the function in
 * comm.h. In-place calls (sums of i64, maximum, broadcast) have src == dst. Gathers and reductions
 * may have several pieces, all others have one. */
typedef struct kn_comm_call {
    kn_comm_kind kind;
    int root;
    const kn_comm_piece *piece; /* borrowed; where the call is only described, they may be gone */
    int pieces;
    const char *label;
    uint64_t content; /* a hash of the pieces' dtypes and counts */
    int64_t count;    /* elements of all pieces; dtypes of the first */
    kn_dtype dst_dtype, src_dtype;
    uint64_t seq, hash; /* kn_comm_note_call: its place in the contract; seq 0: not in order */
    bool flips;         /* a bit of what comes (kernels/faults.h) */
} kn_comm_call;

/* A call with these pieces, not noted yet. */
kn_comm_call kn_comm_call_of(kn_comm_kind kind, int root, const kn_comm_piece *piece, int pieces,
                             const char *label);
/* A call in place over count elements of dtype t at data. piece: where it describes them. */
kn_comm_call kn_comm_call_in_place(kn_comm_kind kind, int root, void *data, int64_t count,
                                   kn_dtype t, const char *label, kn_comm_piece *piece);
/* The bytes of a piece that each rank gives, size of which a rank gives in a reduce-scatter or to
 * all; and of its result, size of which it gets in a gather or from all. */
static inline int64_t kn_piece_src_bytes(const kn_comm_piece *p)
{
    return p->count * (int64_t)kn_dtype_size(p->src_dtype);
}
static inline int64_t kn_piece_dst_bytes(const kn_comm_piece *p)
{
    return p->count * (int64_t)kn_dtype_size(p->dst_dtype);
}

/* ---- the contract (contract.c) ---------------------------------------------------------------
 *
 * Ranks make the same calls in the same order, counted over a family: a communicator and those made
 * from it with the same ranks (kn_comm_dup). Each call takes the next number of its family when it
 * is launched and a rolling hash of all calls so far: (number, communicator, kind, label, dtypes,
 * count, root). Ranks compare hashes where they meet; a rank that waits compares the logs, so that
 * calls in different communicators that never meet are found as well. */

/* A rank's description of one of its calls. */
typedef struct kn_comm_note {
    uint64_t seq, hash;
    int64_t count;
    int32_t kind, dst_dtype, src_dtype, root, pieces;
    uint32_t content; /* a hash of all pieces' counts and dtypes */
    char label[64];
    char comm[32]; /* the communicator's name */
} kn_comm_note;

#define KN_NOTES 32 /* calls of a family that the log keeps */

/* The last calls of one rank in one family: written by the launching thread, read by every process
 * that maps it. */
typedef struct kn_comm_log {
    _Atomic uint64_t launched; /* number of the newest note, 0: none yet */
    _Atomic uint64_t finished; /* the highest number among the calls that are over */
    kn_comm_note note[KN_NOTES];
} kn_comm_log;

/* Enters call (made on c) into the log of c's family; fills call->seq and call->hash. Here a fault
 * that was asked for comes (kernels/faults.h). False: it isn't made. */
bool kn_comm_note_call(kn_comm *c, kn_comm_call *call);
/* The call is over on this rank. */
void kn_comm_note_end(kn_comm *c, const kn_comm_call *call);
kn_comm_note kn_comm_note_of(const kn_comm *c, const kn_comm_call *call);
/* Call number seq; false if it is not there yet or no longer. */
bool kn_comm_log_read(kn_comm_log *log, uint64_t seq, kn_comm_note *note);
/* The first calls, as far as both logs reach, in which two ranks differ. */
bool kn_comm_log_differ(kn_comm_log *a, kn_comm_log *b, kn_comm_note *of_a, kn_comm_note *of_b);
/* "all_gather of 10 f32 (fc1) in communicator world"; returns buf. */
char *kn_comm_describe(const kn_comm_note *note, char *buf, size_t size);
/* The error of two ranks that are out of step; false. */
bool kn_comm_mismatch(int rank_a, const kn_comm_note *a, int rank_b, const kn_comm_note *b);
/* The error of a wait that took too long; last: of the missing rank, may be NULL; false. */
bool kn_comm_timed_out(const kn_comm *c, const kn_comm_call *call, int me, int missing,
                       double seconds, const kn_comm_note *last, bool finished);

/* ---- trips (trip.c) -------------------------------------------------------------------------- */

/* Elements [begin, begin + count) of a piece; at: bytes into the trip's buffer, a multiple of
 * KN_ALIGN, where there is one. */
typedef struct kn_comm_part {
    const kn_comm_piece *piece;
    int64_t begin, count, at;
    int index; /* of the piece */
} kn_comm_part;

typedef struct kn_comm_trip {
    int next; /* the piece that the next trip begins with; 0 before the first, */
    int64_t next_begin;
    int parts;
    kn_comm_part part[KN_COMM_PIECES];
} kn_comm_trip;

/* The next trip of call: all that is left, or what fits into room bytes, where each rank gives
 * blocks of a piece's elements. False: nothing is left. */
bool kn_comm_next_trip(kn_comm_trip *t, const kn_comm_call *call, int blocks, int64_t room);

/* Flips a bit of what came by call, which is over on s, where call->flips. */
bool kn_comm_flip(const kn_comm *c, const kn_comm_call *call, kn_stream *s);
/* Runs call at once, on this thread; s as in kn_comm_ops.run. */
bool kn_comm_run_now(kn_comm *c, kn_comm_call *call, kn_stream *s);

/* Bytes this call reads and writes on this rank (for traces and kn_comm_slow). */
double kn_comm_bytes(const kn_comm *c, const kn_comm_call *call);

/* dst = acc + src[0] + ... + src[n-1] in that order, rounded once; any n (sum.c). */
bool kn_comm_sum(kn_stream *s, void *dst, const void *acc, const void *const *src, int n,
                 int64_t count, kn_dtype dst_dtype, kn_dtype src_dtype);
/* data = data and other, as a call of scalars puts them together: their maximum (of f32, a NaN if
 * there is one) or sum (of i64). The same bits in any order. */
void kn_comm_combine(kn_comm_kind kind, void *data, const void *other, int64_t count);

/* ---- poison (world.c) ------------------------------------------------------------------------ */

/* The first error of a world's ranks, which ends every wait among them. Ranks that share memory
 * share it. Zeros: none. */
typedef struct kn_poison {
    _Atomic int state; /* 0: none, 1: it is being written, 2: it is there */
    int rank;          /* whose error it was */
    char text[1024];
} kn_poison;

/* First caller wins; never blocks. */
void kn_poison_set(kn_poison *p, int rank, const char *message);
/* The rank whose error came first, -1 while there is none; *text (may be NULL) its message. */
int kn_poisoned(kn_poison *p, const char **text);
/* False with an error, which repeats the first, if there is one. */
bool kn_unpoisoned(kn_poison *p);

/* Shared by all communicators made from one world. */
typedef struct kn_comm_world {
    kn_comm *first; /* every communicator, newest first */
    kn_memory *memory;
    struct kn_nccl_memory *registered; /* GPU memory registered with NCCL; NULL: none yet */
    void *backend;                     /* the back end's own */
    kn_poison own, *poison;            /* own, or one that ranks share */
    double timeout; /* seconds a collective waits for a rank, where its communicator says none */
    int next_id;    /* of communicators: more than any of this rank has */
    int forks;      /* of this process's line, when the world was made */
    _Atomic int suspended; /* kn_comm_suspend_timeout: calls that aren't resumed yet */
    bool inline_only;      /* the back end runs on the launching thread, never on a worker */
} kn_comm_world;

typedef struct kn_comm_ops {
    const char *backend;
    /* Runs the call, with kn_fault_pass(KN_AT_MEETING) at each meeting; s is the stream it runs on
     * (NULL: no stream, no arithmetic on floats). */
    bool (*run)(kn_comm *c, const kn_comm_call *call, kn_stream *s);
    /* Optional: enqueue on the device's stream instead of run as a host function. */
    bool (*launch)(kn_comm *c, const kn_comm_call *call, kn_stream *s);
    size_t bytes; /* of the back end's struct; 0: kn_comm is all */
    /* Optional: fills the back end's part of a communicator of at most size ranks; the common part
     * isn't complete. False with an error; then end is called, too. */
    bool (*begin)(kn_comm *c, int size);
    /* Optional, collective over c: made, whose fields are complete, is a group of its ranks; NULL:
     * this rank is in none. False with an error. */
    bool (*join)(kn_comm *c, kn_comm *made, const char *name);
    /* Optional: poison came to stand on this rank, and the others don't see it: tells them. Never
     * blocks, never records an error. */
    void (*tell)(kn_comm *c);
    /* Optional: an error stands and kn_finish runs: waits for other ranks' errors and returns
     * whether this rank prints the job's one error message. Without: the culprit does. */
    bool (*speaks)(kn_comm *c);
    /* Optional: false if a rank has failed, with an error that repeats the first cause. Any
     * thread. */
    bool (*healthy)(kn_comm *c);
    /* Optional: call has been in flight on a device for a while. False with an error if a rank is
     * out of step, so that it never comes. Any thread, repeatedly. */
    bool (*in_step)(kn_comm *c, const kn_comm_call *call);
    /* Optional: call, in flight on a device, takes longer than limit seconds: an error that names
     * the rank that is missing or out of step. */
    void (*late)(kn_comm *c, const kn_comm_call *call, double limit);
    void (*end)(kn_comm *c);             /* optional: frees what begin took */
    void (*close)(kn_comm_world *world); /* optional: after every communicator of it is gone */
} kn_comm_ops;

/* First member of every back end's struct. */
struct kn_comm {
    const kn_comm_ops *ops;
    kn_comm_world *world;
    kn_comm *next;
    kn_comm *older; /* of all that live in this process */
    int rank, size;
    int *member;     /* [size] its ranks in the world */
    int id;          /* which communicator of the world this is: the same on all its ranks */
    kn_comm *family; /* the first communicator with these ranks; itself, or the original of a dup */
    kn_comm_log *log; /* of the family's first: this rank's calls; NULL: no rank to compare with */
    uint64_t seq, hash;    /* of the family's first: calls so far */
    const kn_comm *parent; /* that this one was split off; NULL: the first of its world */
    int group, groups;     /* of those made by one split, by their first ranks: this one; all */
    double timeout;        /* kn_comm_set_timeout; 0: the parent's */
    char name[48];
    double slow_latency, slow_rate; /* kn_comm_slow; 0: off */
    /* for streams of a GPU (device.c, nccl.c) */
    kn_memory *staging_memory;
    void *staging;
    size_t staging_bytes;
    struct kn_nccl *nccl; /* made by the first collective there */
    const kn_comm *of;    /* kn_comm_lend: the communicator that lends this part; NULL: not lent */
    bool idle;            /* given back */
};

/* A communicator of a back end whose world has its backend: of all ranks of the world, until
 * kn_comm_split chooses others. NULL with an error. It is entered, or dropped. */
kn_comm *kn_comm_make(kn_comm_world *world, const kn_comm_ops *ops, int size);
void kn_comm_drop(kn_comm *c); /* NULL is fine */
/* Enters c into world's list and fills the common fields. */
void kn_comm_enter(kn_comm *c, kn_comm_world *world, const kn_comm_ops *ops, int rank, int size,
                   const char *name);
/* The part of c's ranks with this color, which has size ranks and is called name, for one user at a
 * time: the oldest that was given back, or a new one. Collective; color follows from name, size and
 * the rank. All ranks lend and give back in the same order. NULL with an error. */
kn_comm *kn_comm_lend(kn_comm *c, int size, int color, const char *name);
/* Back to be lent again; no stream uses it any more. NULL is fine. */
void kn_comm_give_back(kn_comm *c);
/* This process is a child of the rank that made the world, by fork, and no rank of it. */
bool kn_comm_is_forked(const kn_comm_world *w);
/* c has this rank of the world. */
bool kn_comm_holds(const kn_comm *c, int world_rank);
/* c hasn't ended, and is this process's; else false with an error in the name of what. */
bool kn_comm_usable(const kn_comm *c, const char *what);
/* This process may have so many open files; false with an error in the name of who needs them. */
bool kn_comm_allow_files(const char *who, int files);
/* A world without communicators; NULL with an error where memory runs out. */
kn_comm_world *kn_comm_world_make(void);
double kn_comm_timeout(const kn_comm *c);
/* The timeout of kn_init, else KNAP_TIMEOUT, else 60 seconds; kn_init refuses a bad value
 * (init.c). */
double kn_comm_default_timeout(void);
/* Frees every communicator and the world; the streams that used them are idle. */
void kn_comm_world_free(kn_comm_world *world);

/* ---- streams of a GPU (device.c, nccl.c) ----------------------------------------------------- */

/* The communicator that kn_init made stays the one of the hosts: agreements, barriers, names. A
 * collective on a stream of a GPU goes to an NCCL communicator of the same ranks, made by the first
 * of them (so the first one is collective among the hosts), or through the host
 * (KNAP_COMM=local). */
bool kn_comm_device_launch(kn_comm *c, const kn_comm_call *call, kn_stream *s);
kn_memory *kn_comm_device_memory(kn_comm *c,
                                 kn_device d); /* kn_comm_memory_on, for several ranks */
void kn_comm_device_free(kn_comm *c);          /* c's own resources there */
/* "nccl" or "local", instead of KNAP_COMM; NULL: KNAP_COMM. False with an error for another. */
bool kn_comm_device_choose(const char *way);
/* This process is the local_rank-th of local_size on its host: LOCAL_RANK, which chooses its GPU,
 * and LOCAL_WORLD_SIZE say so from now on. replace: also where they are set already; those of a job
 * around this one are inherited. */
void kn_comm_device_place(int local_rank, int local_size, bool replace);
/* The smallest communicator that a and b are or were split off; NULL: there is none. */
kn_comm *kn_comm_around(kn_comm *a, kn_comm *b);
/* made (NULL: this rank is in none) was just split off c: its device resources are split too.
 * Collective over c. */
bool kn_comm_device_split(kn_comm *c, kn_comm *made, int color, int key);
void kn_comm_device_world_free(kn_comm_world *w); /* after its communicators */
bool kn_nccl_launch(kn_comm *c, const kn_comm_call *call, kn_stream *s);
bool kn_nccl_split(kn_comm *parent, kn_comm *made, int color, int key);
void kn_nccl_free(kn_comm *c);
typedef struct kn_nccl_memory kn_nccl_memory;
/* GPU memory for buffers of collectives over all ranks of c's world; collective the first time.
 * Borrowed; NULL with an error. */
kn_memory *kn_nccl_memory_of(kn_comm *c);
void kn_nccl_memory_free(kn_comm_world *w);
/* "2.28.9"; NULL without an error if NCCL can't be opened. */
const char *kn_nccl_version(void);
const char *kn_nccl_unregistered(const kn_comm_world *w); /* why; NULL: registered, or not known */
const char *kn_nccl_serial(void); /* why collectives of recorded steps run one by one; NULL */

/* ---- back ends ------------------------------------------------------------------------------- */

/* A world of one rank. */
kn_comm *kn_comm_alone(void);

/* The meaning of a NULL communicator, for errors in the name of what: the whole world, or NULL (one
 * rank) in a program that is no rank. False with an error if a launcher made the program a rank but
 * it never called kn_init. */
bool kn_comm_default(kn_comm **c, const char *what);

/* ---- becoming a rank (init.c) ---------------------------------------------------------------- */

/* Whether the program started its ranks itself (--ranks, KNAP_RANKS), and no launcher did. */
bool kn_comm_started_ranks(void);

/* Opens /dev/null on those of the descriptors 0 to 2 that are closed: no file of the program gets
 * what it prints. kn_init does it first. False with an error. */
bool kn_open_standard(void);

/* Makes world the world of this thread's context: kn_world(), rank and size, and an error handler
 * that poisons it. It is freed by kn_context_end, after everything that may lie in its memory. */
bool kn_rank_enter(kn_comm *world);

#endif
