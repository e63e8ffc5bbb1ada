/* tensor/tensor_internal.h (private): storage and the tensor struct, for autograd/, nn/ and fsdp/.
 *
 * A storage owns bytes on a device and can let go of them and take bytes again while tensors refer
 * to it: resharding is exactly this. Releasing and retaking don't count as writes (the version
 * stays). */
#ifndef KNAP_TENSOR_INTERNAL_H
#define KNAP_TENSOR_INTERNAL_H

#include "kernels/context.h"
#include "kernels/error_internal.h"
#include "kernels/kernels.h"
#include "tensor/tensor.h"

/* A part of a storage that is written apart from the others: a parameter among those of a unit. */
typedef struct kn_storage_part {
    int64_t offset; /* of its first element */
    uint32_t version;
} kn_storage_part;

/* digest.c: an event of t's values (KN_TRACE_VALUE), where it has any: name, and what it is of the
 * model ("activation", "gradient", "parameter"). */
void kn_trace_tensor(const char *name, const char *kind, const kn_tensor *t);

typedef struct kn_storage kn_storage;
struct kn_storage {
    int refs;
    uint64_t born; /* its number: storages count from 1, and those made later have more */
    kn_device device;
    kn_memory *memory; /* the source of bytes; NULL for wrapped bytes */
    kn_mem_category category;
    void *data; /* NULL while released (meta: fake address) */
    size_t bytes;
    bool released;
    /* NULL, or fills the bytes before their first read (parameters that were never filled) */
    bool (*first)(void *arg, kn_storage *s);
    void *first_arg;
    uint32_t version;      /* counts in-place writes, but those that a part counts */
    kn_storage_part *part; /* NULL: all of it is written at once; owned */
    int parts;
    char *label; /* names it in errors ("transformer.h.0.attn.c_attn.weight"); may be NULL */
    void (*on_free)(void *arg); /* wrapped bytes: called at the end */
    void *on_free_arg;
};

/* refs 1. label is copied, may be NULL. */
kn_storage *kn_storage_create(kn_memory *memory, size_t bytes, kn_mem_category category,
                              const char *label);
/* As create, but begins released. */
kn_storage *kn_storage_create_released(kn_memory *memory, size_t bytes, kn_mem_category category,
                                       const char *label);
/* Borrowed or foreign bytes (an mmap); on_free(arg) when the last reference goes. */
kn_storage *kn_storage_wrap(kn_device device, void *data, size_t bytes, void (*on_free)(void *),
                            void *arg, const char *label);
uint64_t kn_storages_made(void); /* the number of the newest one */
kn_storage *kn_storage_ref(kn_storage *s);
void kn_storage_unref(kn_storage *s);
/* Where an element lies, counted from the first byte in elements of t. */
void *kn_storage_at(const kn_storage *s, int64_t element, kn_dtype t);
void kn_storage_release(kn_storage *s); /* gives the bytes back; nothing if released already */
bool kn_storage_retake(kn_storage *s);  /* bytes again, content undefined; nothing if present */
/* Writes to tensors in the n parts that begin at offset[n], in elements, count for one part. */
bool kn_storage_divide(kn_storage *s, const int64_t *offset, int n);
/* t was written in place; so often were the bytes of t, by which backward finds out that those that
 * it saved are others now. */
void kn_written(const kn_tensor *t);
uint32_t kn_version_of(const kn_tensor *t);
/* Before a read: if first is set, takes bytes and fills them, once. */
bool kn_storage_settle(kn_storage *s);

#define KN_TENSOR_MAGIC 0x6b6e7431u /* "knt1" */
#define KN_TENSOR_DEAD  0xdead6b6eu

struct kn_node;
struct kn_leaf;

/* Of a buffer that computes in another dtype than its own (nn/buffer.c): its values in full
 * precision [0] and in the computing dtype [1]; the handle shows one of them. */
typedef struct kn_dtypes {
    kn_storage *storage[2];
    kn_dtype dtype[2];
    uint32_t version[2]; /* of the storages when both agreed */
    int shown;           /* scopes that show it in full precision */
} kn_dtypes;

struct kn_tensor {
    uint32_t magic; /* KN_TENSOR_DEAD after the last reference went */
    int refs;
    kn_storage *storage;
    int64_t offset; /* elements from the storage's start */
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS], stride[KN_MAX_DIMS];
    char *name;
    kn_dtypes *dtypes; /* NULL: it has one; owned */
    int scoped;        /* how many of refs belong to scopes */
    bool passing;      /* kn_scope_end_except is handing it to the scope around */
#ifdef KN_DEBUG
    const char *made_file; /* the user's place when it was made */
    int made_line;
    kn_tensor *live_prev, *live_next; /* the list of survivors */
#endif
    /* autograd (owned by autograd/) */
    bool requires_grad;
    bool first_order; /* made of gradients of kn_grad_of, which no graph may hold for constants */
    struct kn_node *node; /* its maker; NULL for leaves; holds a reference on the node */
    int out_index;
    struct kn_leaf *leaf; /* gradient bookkeeping of a leaf that requires grad; owned */
};

/* A tensor on a storage (takes a reference of its own). strides NULL: row-major. scoped: the
 * current scope owns the returned reference; otherwise the caller does. NULL and an error if the
 * view would leave the storage. */
kn_tensor *kn_tensor_on(kn_storage *s, int64_t offset, kn_dtype dtype, int ndim,
                        const int64_t *shape, const int64_t *stride, bool scoped);
/* kn_empty with the choice of memory pool, category and ownership. stride_order: NULL or, for each
 * dim of the result in memory order (outermost first), which dim it is (for [B,H,T,D] laid out as
 * [B,T,H,D]: {0,2,1,3}). */
kn_tensor *kn_tensor_new(kn_dtype dtype, kn_device device, kn_memory *memory,
                         kn_mem_category category, int ndim, const int64_t *shape,
                         const int *stride_order, bool scoped);
/* Another view of t's storage: no tape. Scoped. offset is relative to t's first element. */
kn_tensor *kn_tensor_alias(const kn_tensor *t, int64_t offset, int ndim, const int64_t *shape,
                           const int64_t *stride);
/* Gives t to the current scope (takes over the caller's reference). */
kn_tensor *kn_scope_adopt(kn_tensor *t);
/* Ends s but passes the listed tensors to the scope around it. */
void kn_scope_end_except(kn_scope s, kn_tensor *const *keep, int n);

kn_tensor *kn_tensor_ref(kn_tensor *t); /* kn_keep without checks */
/* Kernels on the device of on: to = from; to = value, value + step, ... */
bool kn_array_copy(const kn_tensor *on, kn_array to, kn_array from);
bool kn_array_fill(const kn_tensor *on, kn_array to, double value, double step);
/* A new tensor of draws, of the current scope: how, but for its dst; uniform ones stay below 1. */
kn_tensor *kn_drawn(kn_dtype dtype, kn_device device, kn_random_args how, int ndim,
                    const int64_t *shape);

/* The raw array of t for a kernel. When the storage is released, an error stands that names the
 * tensor or its storage's label, and data is NULL. Checks the handle's magic. */
/* "f32[2,3]" of t, for the message of an error. */
#define KN_SHOWN(t) kn_describe((t), (char[128]){ 0 }, 128)

kn_array kn_array_of(const kn_tensor *t);
/* a becomes a row-major copy of itself on its device, converted to dtype: that of *made, which the
 * caller frees, after an error too. */
bool kn_array_pack(kn_array *a, kn_dtype dtype, kn_device device, kn_tensor **made);
/* t = host's elements, row-major and of its dtype, which may go at once; they may be t's own. On
 * meta nothing is read. */
bool kn_from_host(kn_tensor *t, const void *host);
/* True for a live handle; false with an error for NULL (if none stands), a freed or foreign one. */
bool kn_check(const kn_tensor *t, const char *what);
/* Called by autograd when the last reference goes (to drop node and leaf); set once. */
extern void (*kn_tensor_on_free)(kn_tensor *t);
/* Called before any in-place write through the public functions; autograd refuses writes to leaves
 * that require grad while grad mode is on. Returns false with an error. May be NULL. */
extern bool (*kn_tensor_before_write)(kn_tensor *t, const char *what);
/* Called before t's values are read other than by an operation. May be NULL. */
extern void (*kn_tensor_before_read)(const kn_tensor *t);

/* ---- inside of tensor/: birth and death of handles; scopes hold references ------------------ */

/* A zeroed live handle with refs 1 and no storage; NULL with an error. */
kn_tensor *kn_handle_new(void);
/* Drops one reference without checks; the last one frees. */
void kn_handle_unref(kn_tensor *t);

/* This thread's scope stack, made at first use; NULL with an error. */
struct kn_scope_stack *kn_scope_stack_get(void);

#ifdef KN_DEBUG
/* Dead handles wait here before their memory is given back, so that a late use finds a dead handle
 * instead of other bytes. */
#define KN_QUARANTINE 4096
/* Puts p in and returns the pointer to free now (p itself without a stack). */
kn_tensor *kn_quarantine_swap(kn_tensor *p);
#endif

/* ---- arithmetic of shapes ------------------------------------------------------------------- */

/* One element at p as a double, for any dtype (i64 and u64 round beyond 2^53). */
double kn_element(kn_dtype dtype, const void *p);

/* *count = each * the product of the shape; false without an error where a size is negative or that
 * is too large. Sizes of 0 count as 1 for that: strides of an empty tensor must fit too. */
bool kn_shape_count(int ndim, const int64_t *shape, int64_t each, int64_t *count);
/* Strides of a row-major array of this shape. */
void kn_row_major(int ndim, const int64_t *shape, int64_t *stride);
/* Broadcast shape of a and b by the usual rule; false without an error if they disagree. */
bool kn_broadcast_shape(int na, const int64_t *a, int nb, const int64_t *b, int *n, int64_t *out);
/* a expanded to shape (stride 0 in broadcast dims); the shape must be compatible. */
kn_array kn_array_expand(kn_array a, int ndim, const int64_t *shape);
/* Strides under which t's elements can be seen in the new shape without a copy; false if not. */
bool kn_view_strides(const kn_tensor *t, int ndim, const int64_t *shape, int64_t *stride);

#endif
