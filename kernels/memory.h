/* kernels/memory.h: memory of the host for small objects, memory for the bytes of tensors, and the
 * ledger that counts both by category. */
#ifndef KNAP_KERNELS_MEMORY_H
#define KNAP_KERNELS_MEMORY_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- host objects ---------------------------------------------------------------------------- */

/* malloc and friends for small host objects. They record an error and return NULL on failure,
 * and are counted in the ledger (KN_MEM_HOST). */
KN_API void *kn_host_alloc(size_t bytes);
KN_API void *kn_host_calloc(size_t count, size_t bytes);
KN_API void *kn_host_realloc(void *p, size_t bytes);
KN_API char *kn_host_strdup(const char *s);
KN_API void kn_host_free(void *p); /* NULL is fine */

/* ---- the ledger ------------------------------------------------------------------------------ */

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
    KN_MEM_STATE,      /* state dicts, and copies of states on their way to a file */
    KN_MEM_GRAPH,      /* kept by recorded steps for their replays (kn_graph_begin) */
    KN_MEM_CHECKPOINT, /* copies that asynchronous saves write (state/checkpoint.h) */
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

/* ---- bytes of tensors ------------------------------------------------------------------------ */

#define KN_ALIGN          64 /* bytes: alignment and rounding of every tensor allocation */
#define KN_ALIGNED(bytes) (((bytes) + KN_ALIGN - 1) / KN_ALIGN * KN_ALIGN)

/* A source of bytes: the device's pool, a communicator's shared memory, a mapped file. take returns
 * NULL when there is none left; size passed to give is the one passed to take. */
typedef struct kn_memory kn_memory;
struct kn_memory {
    const char *name;
    kn_device device;
    void *(*take)(kn_memory *self, size_t bytes);
    void (*give)(kn_memory *self, void *p, size_t bytes);
    void *state;
    /* The host's, beside a device's own: the ledger counts it apart, in no total or limit. */
    bool pinned;
};

KN_API kn_memory *kn_device_memory(kn_device d); /* the device's own pool; keeps its pages */
/* Takes bytes (rounded up to KN_ALIGN) from m, entered in the ledger. Errors give the bytes
 * requested, the live bytes by category and a remedy. bytes 0 gives a valid pointer that must not
 * be read. */
KN_API void *kn_take(kn_memory *m, size_t bytes, kn_mem_category category);
KN_API void kn_give(kn_memory *m, void *p, size_t bytes, kn_mem_category category);
/* Gives the unused pages of the device's pool back to the system. */
KN_API void kn_memory_trim(kn_device d);

/* Page-locked host memory, which device d copies from and to at full speed and without waiting; the
 * CPU's own pool if d has none, or no GPU can be used. A block is given back only after the copies
 * that use it are done. Its bytes are the ledger's pinned ones. */
KN_API kn_memory *kn_pinned_memory(kn_device d);

/* ---- stores: memory in a file ---------------------------------------------------------------- */

/* Memory whose bytes lie in an unnamed file in the folder dir, mapped and shared with the page
 * cache: the system writes pages out and reads them back, so more of it can be taken than there is
 * memory. Grows as needed; what was given back is free disk space again. Every byte handed out has
 * its place on the disk, so a full disk is an error of kn_take, never a signal later. Use it with
 * KN_MEM_STORE. NULL with an error where dir can't hold such a file. */
KN_API kn_memory *kn_store_open(const char *dir);
/* The store ends when the last of its bytes was given back. NULL is fine. */
KN_API void kn_store_close(kn_memory *store);
KN_API bool kn_memory_is_store(const kn_memory *m);
/* Bytes of a store will be read soon: begins to read them. Nothing for other memory. */
KN_API void kn_store_ahead(const void *p, size_t bytes);
/* Bytes of a store aren't needed for a while: begins to write them out and lets their pages go. */
KN_API void kn_store_done(const void *p, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
