/* kernels/context.h (private): the one object that holds all implicit state of a thread.
 * Files above own the fields named after them and define the types behind the pointers; thread.c
 * begins and ends contexts. */
#ifndef KNAP_KERNELS_CONTEXT_H
#define KNAP_KERNELS_CONTEXT_H

#include "kernels/fault_state.h"
#include "kernels/graph_state.h"
#include "kernels/memory.h"
#include "kernels/stream.h"
#include <pthread.h>

/* The inputs of a random draw, never the rank (docs/architecture.md, idea 7). */
typedef struct kn_rng_key {
    uint64_t seed;
    int64_t step;   /* optimizer steps done */
    int64_t micro;  /* index of the micro-batch in the step: round * ranks + rank */
    uint64_t calls; /* draws and calls made outside of module calls in this micro-batch */
    /* Those of no training, with grad mode off: made so far, and before this micro-batch. */
    uint64_t quiet, quiet_before;
    int64_t counted; /* how often a step was counted on by an optimizer */
} kn_rng_key;

struct kn_tensor;

typedef struct kn_context {
    /* errors */
    pthread_mutex_t lock; /* guards the error's text: stream workers report here too */
    _Atomic bool failed;
    char *error;
    char error_room[2048]; /* so that running out of memory can still be reported */
    int error_number;      /* errno of a system call that failed; 0: the error is none of one */
    void (*on_error)(const char *message, void *arg);
    void *on_error_arg;
    bool abort_on_error;
    const char *user_file;
    int user_line;
    /* called first with each new error, e.g. to poison the communicator (comm/) */
    void (*on_error_internal)(const char *message, void *arg);
    void *on_error_internal_arg;
    /* memory; atomic because stream workers allocate too */
    _Atomic int64_t live[KN_MEM_COUNT], peak[KN_MEM_COUNT], live_total, peak_total, live_pinned,
        peak_pinned, allocations;
    int64_t memory_limit; /* KNAP_MEMORY_LIMIT: bytes kn_take may have live at once; 0: no limit */
    /* threads, streams, trace (kernels) */
    int threads, free_cores;
    kn_stream *compute[KN_MAX_DEVICES];
    kn_stream *streams;         /* every stream made here, compute streams too; guarded by lock */
    struct kn_trace *trace;     /* guarded by trace_lock */
    pthread_mutex_t trace_lock; /* taken after no other */
    struct kn_recording *recording; /* fsdp/record.c; NULL: none */
    _Atomic unsigned tracing;       /* the kinds that are kept, a sum of 1 << kind */
    double meta_host;  /* the host's own virtual time, moved on by waits for meta streams */
    double meta_flops; /* of all that was computed on meta */
    kn_graph_state graph;
    /* tensor */
    struct kn_scope_stack *scopes;
    /* autograd */
    bool no_grad;
    bool trains; /* grad mode is off only for the function that runs: its draws are training's */
    kn_mem_category alloc_category; /* 0 is KN_MEM_PARAM, so stored + 1; 0 means activation */
    struct kn_frame *frame;         /* the module call that is running, or NULL */
    int nested;                     /* calls of modules and functions that run in one another */
    struct kn_engine *engine;
    struct kn_function_run *function; /* the user's operation that is running, or NULL */
    struct kn_hook_run *hook;         /* the user's hook that is running, or NULL */
    bool check;                       /* kn_set_check */
    void (*on_save)(void *arg, const struct kn_tensor *t); /* each tensor saved for backward */
    void *on_save_arg;
    uint64_t node_seq;
    kn_rng_key rng;
    kn_fault fault;
    /* comm/: rank and world as kn_init found them */
    int rank, world;
    void *init_state; /* owned by comm/launch/init.c */
} kn_context;

KN_API kn_context *kn_context_get(void); /* this thread's, made at first use; never NULL */
/* A stream worker adopts its creator's context and must not touch the providers' fields. */
void kn_context_adopt(kn_context *c);
bool kn_context_is_worker(void);
/* Takes a free core of the context for a thread, if there is one; and gives it back. */
bool kn_core_take(kn_context *c);
void kn_core_return(kn_context *c);
uint64_t kn_hash64(uint64_t a, uint64_t b);
uint64_t kn_hash_string(const char *s);
/* Frees this thread's context with its streams. The next use makes a new one. */
KN_API void kn_context_end(void);
/* Called by kn_context_end first, while the context is whole (defined NULL in kernels/thread.c).
 * A provider that puts itself here at start calls the one it found there afterwards. */
extern void (*kn_context_on_end)(kn_context *c);
/* Called once, when the first context of this process is made (comm/ counts threads then). */
extern void (*kn_process_on_begin)(void);
/* The dotted path of the running module call, or "". Filled in by autograd; used by kn_fail. */
extern const char *(*kn_context_path)(const kn_context *c);

#endif
