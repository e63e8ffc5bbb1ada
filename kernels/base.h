/* kernels/base.h: what every provider of Knap stands on: dtypes, arrays, the thread's context with
 * its sticky error, the memory ledger, streams and events. No tensors here: raw pointers only.
 *
 * Ownership: a kn_array borrows its bytes. Errors: functions that can fail return false or NULL
 * and record one sentence with kn_fail(); the first one of a thread stands until cleared. */
#ifndef KNAP_KERNELS_BASE_H
#define KNAP_KERNELS_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KN_API                __attribute__((visibility("default")))
#define KN_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))

/* ---- dtypes ------------------------------------------------------------------------------ */

/* Arithmetic exists for KN_F32, KN_BF16, KN_F16 (computed in f32), KN_F64 and, where it makes
 * sense, KN_I64, KN_I32, KN_U8, KN_BOOL. The rest are storage only (files of safetensors). */
typedef enum kn_dtype {
    KN_DTYPE_DEFAULT = 0, /* in options: "the obvious one", usually KN_F32 */
    KN_F32,
    KN_BF16,
    KN_F16,
    KN_F64,
    KN_I64,
    KN_I32,
    KN_U8,
    KN_BOOL,
    KN_I8,
    KN_I16,
    KN_U16,
    KN_U32,
    KN_U64,
    KN_F8_E4M3,
    KN_F8_E5M2,
    KN_DTYPE_COUNT
} kn_dtype;

KN_API size_t kn_dtype_size(kn_dtype t);          /* bytes an element; 0 for an unknown dtype */
KN_API const char *kn_dtype_name(kn_dtype t);     /* "f32", "bf16", ... */
KN_API kn_dtype kn_dtype_parse(const char *name); /* KN_DTYPE_DEFAULT when unknown */
KN_API bool kn_dtype_is_float(kn_dtype t);        /* f32, bf16, f16, f64 */

typedef enum kn_device {
    KN_DEVICE_DEFAULT = 0,
    KN_CPU,
    KN_META,
    KN_CUDA,
    KN_OTHER_DEVICE, /* the first number for a device that a program registers */
    KN_MAX_DEVICES = KN_OTHER_DEVICE + 4
} kn_device;

KN_API const char *kn_device_name(kn_device d); /* "cpu", "meta", "cuda", or as registered */

/* ---- arrays ------------------------------------------------------------------------------ */

#define KN_MAX_DIMS 8

/* A strided block of elements somewhere. data points at element [0,...,0]; strides count
 * elements and may be 0 (broadcast). On meta, data is NULL or an address that is never read. */
typedef struct kn_array {
    void *data;
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    int64_t stride[KN_MAX_DIMS];
} kn_array;

KN_API int64_t kn_array_numel(const kn_array *a);
KN_API bool kn_array_contiguous(const kn_array *a); /* row-major without gaps (dims of 1 ignored) */
/* A row-major array over data. */
KN_API kn_array kn_array_make(void *data, kn_dtype dtype, int ndim, const int64_t *shape);
/* Writes "f32[2,3]" into buf and returns buf. */
KN_API char *kn_array_describe(const kn_array *a, char *buf, size_t size);

/* ---- errors ------------------------------------------------------------------------------ */

/* Records an error unless one stands already (the first cause is the one to read). Appends the
 * module path and the user's file:line when they are known. Always returns false. */
KN_API bool kn_fail(const char *fmt, ...) KN_PRINTF(1, 2);
KN_API bool kn_ok(void);           /* no error stands in this thread's context */
KN_API const char *kn_error(void); /* the sentence, or NULL; valid until kn_clear_error */
KN_API void kn_clear_error(void);
/* Called once with each error that comes to stand (not for the ones that follow it). */
typedef void (*kn_error_handler)(const char *message, void *arg);
KN_API void kn_set_error_handler(kn_error_handler handler, void *arg);
/* abort() where the first error arises, for the debugger. Also KNAP_ABORT=1 in the environment. */
KN_API void kn_abort_on_error(bool on);
/* The user's file and line for error texts: enter notes one and gives the one before, which leave takes back. The
 * macros of places.h do both around each call of a public function. */
typedef struct kn_place {
    const char *file; /* NULL: none; must stay valid */
    int line;
} kn_place;
KN_API kn_place kn_place_enter(const char *file, int line);
KN_API void kn_place_leave(kn_place *before);

/* ---- metadata memory --------------------------------------------------------------------- */

/* malloc and friends for small host objects. They record an error and return NULL on failure,
 * are counted in the ledger (KN_MEM_HOST), and can be made to fail by kn_test_fail_alloc. */
KN_API void *kn_host_alloc(size_t bytes);
KN_API void *kn_host_calloc(size_t count, size_t bytes);
KN_API void *kn_host_realloc(void *p, size_t bytes);
KN_API char *kn_host_strdup(const char *s);
KN_API void kn_host_free(void *p); /* NULL is fine */
/* Test hook: the n-th allocation from now on (metadata and tensor bytes alike, 1 = the next) in
 * this thread's context fails once; 0 switches it off. Returns how many were made since the last
 * call. */
KN_API int64_t kn_test_fail_alloc(int64_t n);

/* ---- the ledger -------------------------------------------------------------------------- */

typedef enum kn_mem_category {
    KN_MEM_PARAM = 0,  /* master parameters (this rank's shard) */
    KN_MEM_GRAD,       /* accumulated gradients (this rank's shard) */
    KN_MEM_OPTIM,      /* optimizer state */
    KN_MEM_ACTIVATION, /* everything the model computes and saves */
    KN_MEM_GATHERED,   /* full parameters of gathered units */
    KN_MEM_UNREDUCED,  /* full gradients waiting for their reduction */
    KN_MEM_COMM,       /* staging buffers of communicators */
    KN_MEM_WORKSPACE,  /* scratch of kernels and libraries */
    KN_MEM_BUFFER,     /* module buffers */
    KN_MEM_DATA,       /* data sets and batches */
    KN_MEM_GRAPH,      /* what recorded steps keep for their replays (kn_graph_begin) */
    KN_MEM_STORE,      /* offloaded to a file (kn_store_open): not memory, in no total or limit */
    KN_MEM_HOST,       /* metadata: tensors, nodes, modules */
    KN_MEM_COUNT
} kn_mem_category;

typedef struct kn_ledger {
    int64_t live[KN_MEM_COUNT], peak[KN_MEM_COUNT]; /* bytes */
    int64_t live_total, peak_total;                 /* without KN_MEM_HOST and KN_MEM_STORE */
    int64_t live_pinned, peak_pinned; /* bytes above that lie in kn_memory.pinned: in no total */
    int64_t allocations;              /* count since the context began */
} kn_ledger;

KN_API const char *kn_mem_name(kn_mem_category category);
KN_API kn_ledger kn_ledger_read(void);   /* of this thread's context */
KN_API void kn_ledger_reset_peaks(void); /* peak = live */

/* ---- bytes of tensors -------------------------------------------------------------------- */

#define KN_ALIGN 64 /* bytes: alignment and rounding of every tensor allocation */

/* Where bytes come from: the device's pool, a communicator's shared memory, a mapped file. take
 * returns NULL when there is none left; size passed to give is the one passed to take. */
typedef struct kn_memory kn_memory;
struct kn_memory {
    const char *name;
    kn_device device;
    void *(*take)(kn_memory *self, size_t bytes);
    void (*give)(kn_memory *self, void *p, size_t bytes);
    void *state;
    bool
        pinned; /* the host's, beside a device's own: the ledger counts it apart, in no total or limit */
};

KN_API kn_memory *kn_device_memory(kn_device d); /* the device's own pool; keeps its pages */
/* Takes bytes (rounded up to KN_ALIGN) from m, entered in the ledger. Errors say requested, live
 * by category and what to change. bytes 0 gives a valid pointer that must not be read. */
KN_API void *kn_take(kn_memory *m, size_t bytes, kn_mem_category category);
KN_API void kn_give(kn_memory *m, void *p, size_t bytes, kn_mem_category category);
/* Gives the unused pages of the device's pool back to the system. */
KN_API void kn_memory_trim(kn_device d);

/* Memory whose bytes lie in an unnamed file in the folder dir, mapped and shared with the page cache:
 * the system writes pages out and reads them back, so more of it can be taken than there is memory.
 * Grows as needed; what was given back is free disk space again. Every byte handed out has its place on
 * the disk, so a full disk is an error of kn_take, never a signal later. Use it with KN_MEM_STORE. NULL
 * with an error where dir can't hold such a file. */
KN_API kn_memory *kn_store_open(const char *dir);
/* The store ends when the last of its bytes was given back. NULL is fine. */
KN_API void kn_store_close(kn_memory *store);
KN_API bool kn_memory_is_store(const kn_memory *m);
/* Bytes of a store will be read soon: begins to read them. Nothing for other memory. */
KN_API void kn_store_ahead(const void *p, size_t bytes);
/* Bytes of a store aren't needed for a while: begins to write them out and lets their pages go. */
KN_API void kn_store_done(const void *p, size_t bytes);

/* ---- streams and events ------------------------------------------------------------------ */

/* A stream runs what is launched on it in order. CPU: the compute stream runs inline on the
 * caller; a side stream is a worker thread where a core is free, else inline. Meta: a virtual
 * clock. Kernels launched on a worker copy their argument structs, not the bytes they point at. */
typedef struct kn_stream kn_stream;
typedef struct kn_event kn_event;

typedef enum kn_stream_kind {
    KN_STREAM_AUTO = 0, /* worker if this rank has a core left over, else inline */
    KN_STREAM_INLINE,
    KN_STREAM_WORKER,
    KN_STREAM_HOST /* what the host itself computes; on meta its time is the host's */
} kn_stream_kind;

KN_API kn_stream *kn_compute_stream(kn_device d); /* of this thread's context; borrowed */
KN_API kn_stream *kn_stream_create(kn_device d, const char *name, kn_stream_kind kind);
KN_API void kn_stream_destroy(kn_stream *s); /* waits for what was launched */
KN_API kn_device kn_stream_device(const kn_stream *s);
KN_API bool kn_stream_is_inline(const kn_stream *s);
KN_API const char *kn_stream_name(const kn_stream *s);
KN_API bool kn_stream_sync(kn_stream *s); /* blocks; false if an error stands afterwards */
/* Some kernels can't stop for what they find (a bad index, a bad target): the device notes it, and kn_stream_sync
 * says it. This says what is known by now of the compute streams of this thread's context and asks for the
 * rest, without waiting; kn_step calls it. False if an error stands afterwards. */
KN_API bool kn_streams_look(void);
/* Runs fn(copy of arg) on the stream, in order. fn reports errors with kn_fail. */
typedef void (*kn_host_fn)(void *arg);
KN_API bool kn_stream_host(kn_stream *s, const char *what, kn_host_fn fn, const void *arg,
                           size_t size);

/* Copies bytes on stream s, in its order: from the host to the stream's device, back, or within the
 * device. held: the caller keeps the host's bytes as they are until the stream is past the copy, so nobody
 * waits (memory of kn_pinned_memory; from other memory copies to the host are waited for). Not held: host
 * bytes that are read may change once this returns. Host bytes that are written are there when the stream
 * is past the copy. */
typedef enum kn_way { KN_TO_DEVICE = 0, KN_TO_HOST, KN_WITHIN } kn_way;
KN_API bool kn_transfer(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way,
                        bool held);

KN_API kn_event *kn_event_create(kn_device d);
KN_API void kn_event_destroy(kn_event *e);
KN_API bool kn_event_record(kn_event *e, kn_stream *s); /* re-recording replaces */
KN_API bool kn_event_wait(kn_event *e, kn_stream *s); /* s waits; never blocks a worker's caller */
KN_API bool kn_event_sync(kn_event *e); /* the caller waits; never-recorded: at once */
KN_API bool kn_event_done(kn_event *e);

/* The virtual time of meta streams in seconds, and what a meta device can do per second. */
KN_API double kn_meta_clock(const kn_stream *s);
/* Something that takes so long passes on a meta stream. */
KN_API void kn_meta_advance(kn_stream *s, const char *what, double seconds);
KN_API void kn_meta_rates(double flops_per_s, double bytes_per_s, double launch_s);
/* Bytes a second of copies between meta and its host (kn_transfer), each way by itself; and that the host
 * moves when it computes on a stream of KN_STREAM_HOST. */
KN_API void kn_meta_host_rates(double link_bytes_per_s, double host_bytes_per_s);

/* ---- recorded steps ---------------------------------------------------------------------- */

/* What is launched on a device between kn_graph_begin and kn_graph_end isn't run, but recorded: kernels,
 * copies, host functions, on all streams of this thread's context, with the addresses they were given.
 * kn_graph_launch runs it all again, in one launch. What the host does in between (its arithmetic, its
 * branches, the values it passes) isn't in the graph.
 *
 * Memory that is taken from the device's pool while recording belongs to the graph until that is freed,
 * also after it was given back: replays write it again. So does memory that was taken before, and is given
 * back while the graph exists. The ledger counts what nobody else holds of it as KN_MEM_GRAPH.
 *
 * What can't be recorded is an error that names the operation: whatever makes the host wait for the device,
 * host bytes that are copied to the device but aren't held (kn_transfer), kernels on other devices. */
typedef struct kn_graph kn_graph;

/* CUDA; false without an error elsewhere. */
KN_API bool kn_graph_supported(kn_device d);
/* One recording a context at a time. Until the end, no stream of the context runs anything. */
KN_API bool kn_graph_begin(kn_device d);
/* NULL with an error: the recording is gone, nothing of it ran. A graph doesn't run by being made. */
KN_API kn_graph *kn_graph_end(void);
KN_API void
kn_graph_cancel(void); /* ends a recording of which nothing is wanted, also after an error */
/* Behind what was launched before on any stream of the context, and before what follows. Steps and random
 * keys move on as they did in the recording. The first launch stands for the recorded call itself. */
KN_API bool kn_graph_launch(kn_graph *g);
/* Waits for the device. NULL is fine. */
KN_API void kn_graph_free(kn_graph *g);
KN_API bool kn_recording(void); /* this context is */
/* From now on (off: no longer) remembers the first thing that a recording for d couldn't take, while
 * everything runs as usual; returns what was remembered until now, or NULL. The text is valid until the
 * thread's next call. */
KN_API const char *kn_graph_rehearse(kn_device d, bool on);

/* A step has effects on the host, too: counters, values that it sends to the device. Who has some asks,
 * while recording, to be called around each launch: before (the values are sent here; first: this launch
 * stands for the recording, whose host effects are there already) and after. drop is called when the graph
 * is freed, or never came to be. Each may be NULL. before returns false with an error. */
typedef struct kn_graph_hook {
    bool (*before)(void *arg, bool first);
    void (*after)(void *arg);
    void (*drop)(void *arg);
    void *arg;
} kn_graph_hook;
KN_API bool kn_graph_on_launch(kn_graph_hook hook);
/* What hooks were given as arg ends: they aren't called any more, and their graphs can't be launched. */
KN_API void kn_graph_forget(const void *arg);

/* ---- CUDA -------------------------------------------------------------------------------- */

/* Which GPU this process uses, before its first use of one: index, or -1 for KNAP_CUDA_DEVICE, else
 * LOCAL_RANK modulo their number, else 0. */
KN_API void kn_cuda_choose(int index);
/* Whether a GPU can be used here; no error where not. */
KN_API bool kn_cuda_available(void);
/* "NVIDIA H200 (sm_90, 140 GiB, 132 multiprocessors), driver 13.0, CUDA 13.0, cuBLASLt 13.1.0, cuDNN 9.19.0";
 * NULL with an error where no GPU can be used. Valid until the thread's next call. */
KN_API const char *kn_cuda_describe(void);
/* f32 products in TF32 (10 bits of mantissa) from now on; off at start. Also KNAP_CUDA_TF32=1. */
KN_API void kn_cuda_allow_tf32(bool on);
/* Only algorithms that repeat their bits from now on; off at start. Also KNAP_CUDA_DETERMINISTIC=1. Everything
 * but cuDNN's backward of attention and some of its gradients of f32 convolutions repeats them anyway. */
KN_API void kn_cuda_deterministic(bool on);

/* Page-locked host memory, which device d copies from and to at full speed and without waiting; the CPU's own
 * pool where d has none, or no GPU can be used. A block is given back only after the copies that use it are
 * done. Its bytes are the ledger's pinned ones. */
KN_API kn_memory *kn_pinned_memory(kn_device d);

/* The pool of GPU memory of this thread's context; 1 - largest_free / (reserved - live) of it is fragmented. */
typedef struct kn_cuda_memory_stats {
    int64_t reserved, peak_reserved; /* bytes that were taken from the driver */
    int64_t live;                    /* bytes of blocks that are out, rounding included */
    int64_t largest_free;            /* bytes of the largest block that is free */
    int64_t segments, blocks_out, blocks_free;
    int64_t device_free, device_total; /* bytes, of all processes, as the driver says */
} kn_cuda_memory_stats;
/* Zeros where no GPU is in use. */
KN_API kn_cuda_memory_stats kn_cuda_memory_read(void);

/* ---- threads ------------------------------------------------------------------------------ */

KN_API void kn_set_threads(int n);    /* that share a kernel's work, this thread among them; >= 1 */
KN_API int kn_threads(void);          /* 1 on stream workers, which share nothing */
KN_API void kn_set_free_cores(int n); /* cores left over for stream workers (set by kn_init) */

/* ---- trace -------------------------------------------------------------------------------- */

typedef struct kn_trace_event {
    const char *what;     /* "matmul", "all_gather transformer.h.0", ... */
    const char *provider; /* which kernel provider ran it: "avx2", "onednn", "reference", ... */
    const char *stream;   /* stream name */
    double begin, end;    /* seconds (virtual on meta) */
    double flops, bytes;
} kn_trace_event;

KN_API void kn_trace_start(size_t capacity); /* keeps the last capacity events of this context */
KN_API size_t kn_trace_stop(kn_trace_event **events); /* caller frees with kn_host_free */
KN_API void kn_trace_add(const char *what, const char *provider, const kn_stream *s, double begin,
                         double end, double flops, double bytes);
KN_API bool kn_tracing(void);
KN_API bool kn_trace_write(const char *path); /* Chrome trace JSON of what was kept so far */
KN_API double kn_now(void);                   /* monotonic seconds */

#ifdef __cplusplus
}
#endif
#endif
