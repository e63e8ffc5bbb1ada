/* kernels/cpu/onednn.h (private): shared by the files of the oneDNN provider.
 *
 * Primitives of oneDNN are made for one thread and kept (making one costs 10 to 100 us); Knap cuts
 * a call into pieces by its shapes alone and gives them to threads, so that the bits don't depend
 * on their number. Scratchpads are ours and hence in the ledger. */
#ifndef KNAP_KERNELS_CPU_ONEDNN_H
#define KNAP_KERNELS_CPU_ONEDNN_H

#include "kernels/kernels_internal.h"
#include "kernels/team.h"

#include <oneapi/dnnl/dnnl.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* A descriptor as functions of oneDNN take it, and as they return it. */
#if DNNL_VERSION_MAJOR >= 3
#define DESC(md) (md)
typedef const_dnnl_memory_desc_t kn_onednn_lent_desc;
#else
#define DESC(md) (&(md))
typedef const dnnl_memory_desc_t *kn_onednn_lent_desc;
#endif

/* The process's engine; NULL if there is none. */
dnnl_engine_t kn_onednn_engine(void);

/* ---- descriptors: the two major versions differ in how they are made and passed -------------- */

/* Of an array; strides NULL: in the order that oneDNN prefers. False if it can't be made. */
bool kn_onednn_desc(dnnl_memory_desc_t *md, int ndim, const int64_t *dims, const int64_t *strides,
                    kn_dtype t);
bool kn_onednn_desc_copy(dnnl_memory_desc_t *to, kn_onednn_lent_desc from);
void kn_onednn_desc_free(dnnl_memory_desc_t *md); /* zeros are fine */

bool kn_onednn_matmul_desc(dnnl_primitive_desc_t *pd, dnnl_memory_desc_t *a, dnnl_memory_desc_t *b,
                           dnnl_memory_desc_t *bias, dnnl_memory_desc_t *c,
                           const_dnnl_primitive_attr_t attr);

typedef enum kn_onednn_conv_kind {
    KN_CONV_FORWARD = 0,
    KN_CONV_DATA,
    KN_CONV_WEIGHTS
} kn_onednn_conv_kind;
/* dilation counts from 1. bias NULL: none; only the forward has one. */
bool kn_onednn_conv_desc(dnnl_primitive_desc_t *pd, kn_onednn_conv_kind kind, dnnl_memory_desc_t *x,
                         dnnl_memory_desc_t *w, dnnl_memory_desc_t *bias, dnnl_memory_desc_t *y,
                         const int64_t stride[2], const int64_t dilation[2], const int64_t pad[2],
                         const int64_t pad_after[2], const_dnnl_primitive_attr_t attr);

/* oneDNN's own reference is no faster than ours. */
bool kn_onednn_worth_calling(const_dnnl_primitive_desc_t pd);
/* Attributes of a primitive whose scratchpad the caller gives; NULL if there are none. */
dnnl_primitive_attr_t kn_onednn_attr(void);
/* The primitive adds its result to the destination. False if there is no such attribute. */
bool kn_onednn_attr_add(dnnl_primitive_attr_t attr);
/* Makes the primitive that pd describes (*p; NULL where oneDNN can't) and tells its scratch. */
void kn_onednn_make(dnnl_primitive_t *p, dnnl_memory_desc_t *scratch, size_t *bytes,
                    const_dnnl_primitive_desc_t pd);
/* Fills one argument of an execution; arg->memory is to be destroyed. */
bool kn_onednn_arg(dnnl_exec_arg_t *arg, int index, const dnnl_memory_desc_t *desc, void *p);

/* oneDNN plans and runs for as many threads as OpenMP would give the caller: the first makes that
 * one thread and returns the argument of the second. */
int kn_onednn_threads_one(void);
void kn_onednn_threads_restore(int before);

/* ---- running --------------------------------------------------------------------------------- */

/* Runs a primitive on its n arguments, if good, and lets go of them. */
bool kn_onednn_execute(dnnl_primitive_t p, dnnl_stream_t stream, int n, dnnl_exec_arg_t *arg,
                       bool good);
/* Threads for a call of so many operations. */
int kn_onednn_threads(double flops);
typedef bool (*kn_onednn_fn)(const void *ctx, int64_t i, dnnl_stream_t stream, void *scratch);
/* Runs fn for each i in [0, count), on up to `threads` threads; each has `each` bytes of scratch.
 * False if one of them failed. */
bool kn_onednn_each(int64_t threads, int64_t count, kn_onednn_fn fn, const void *ctx, void *scratch,
                    size_t each);

/* ---- the cache of primitives ----------------------------------------------------------------- */

/* First member of kept items. Keys are compared as bytes: int64_t only, unused parts 0. */
typedef struct kn_onednn_item {
    const void *key; /* inside the item */
    size_t size;
    void (*destroy)(struct kn_onednn_item *item);
    int users; /* calls that run it now; with the cache's lock */
    bool kept; /* in the cache */
} kn_onednn_item;

/* The item of a key, made if there is none; NULL: out of memory. Give it back with release. */
kn_onednn_item *kn_onednn_get(const void *key, size_t size,
                              kn_onednn_item *(*make)(const void *key));
void kn_onednn_release(kn_onednn_item *item);

/* Whether products and convolutions of bf16 or f16 use instructions of this CPU made for them. */
bool kn_onednn_fast(kn_dtype t);

/* ---- the entries ----------------------------------------------------------------------------- */

kn_status kn_onednn_matmul(const void *args);
kn_status kn_onednn_conv(const void *args);
kn_status kn_onednn_conv_grad_x(const void *args);
kn_status kn_onednn_conv_grad_w(const void *args);

#endif
