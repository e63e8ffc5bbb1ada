/* kernels/kernels_internal.h (private): how a device plugs in. One kn_device_table a device,
 * in cpu/, meta/ and cuda/; kernels/device.c only looks up and calls. */
#ifndef KNAP_KERNELS_INTERNAL_H
#define KNAP_KERNELS_INTERNAL_H

#include "kernels/context.h"
#include "kernels/error_internal.h"
#include "kernels/kernels.h"

typedef struct kn_device_table {
    kn_device device;
    const char *name;
    /* false with an error if the device cannot be used (no driver, ...) */
    bool (*open)(void);
    kn_memory *(*memory)(void);
    void (*trim)(void);
    kn_stream *(*stream_create)(const char *name, kn_stream_kind kind);
    void (*stream_destroy)(kn_stream *s);
    bool (*stream_is_inline)(const kn_stream *s);
    bool (*stream_sync)(kn_stream *s);
    bool (*stream_host)(kn_stream *s, const char *what, kn_host_fn fn, const void *arg,
                        size_t size);
    /* runs or enqueues; tracing and the sticky error are handled by the caller of run_providers */
    bool (*launch)(kn_stream *s, kn_kernel k, const void *args, size_t size);
    kn_event *(*event_create)(void);
    void (*event_destroy)(kn_event *e);
    bool (*event_record)(kn_event *e, kn_stream *s);
    bool (*event_wait)(kn_event *e, kn_stream *s);
    bool (*event_sync)(kn_event *e);
    bool (*event_done)(kn_event *e);
    int (*providers)(const kn_provider *out[KN_MAX_PROVIDERS]);
    /* Optional: the place in providers of the one that is asked first for this call; below 0: they
     * are asked in their order. */
    int (*first)(kn_kernel k, const void *args);
    /* Optional: its fastest products of f32; without it they are exact. */
    kn_products (*f32_products)(void);
    /* Optional, for devices whose kernels leave notes (kn_streams_look). */
    bool (*stream_look)(kn_stream *s);
    /* Optional, for devices whose memory the host can't read (kn_transfer). */
    bool (*transfer)(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way, bool held);
    /* Optional: memory of its host that it copies from and to by itself; the CPU's pool
     * elsewhere. */
    kn_memory *(*pinned)(void);
    /* Optional, for devices that keep their own time: around kernels that kn_run_providers runs on
     * s, while its context is tracing; flush enters the events timed so far. */
    void (*trace_begin)(kn_stream *s);
    void (*trace_end)(kn_stream *s, const char *what, const char *provider, double flops,
                      double bytes);
    void (*trace_flush)(kn_stream *s);
    /* Optional: recorded steps (graph_internal.h). */
    const struct kn_graph_table *graph;
} kn_device_table;

/* First members of every device's stream and event structs. */
struct kn_stream {
    const kn_device_table *table;
    kn_device device;
    char name[32];
    kn_context *context; /* the creator's: it gets errors and traces */
    kn_stream *next;     /* in the context's list */
};
struct kn_event {
    const kn_device_table *table;
};

/* Of a worker's: the job that it begins was put into its queue then; 0: nobody looked. */
void kn_trace_issued(double at);

/* Bytes of category come (go, below 0) that no kn_take took. */
void kn_ledger_move(kn_context *c, kn_mem_category category, int64_t bytes);

extern const kn_device_table kn_cpu_table, kn_meta_table;
#ifdef KN_HAVE_CUDA
extern const kn_device_table kn_cuda_device_table;
#endif
/* Adds a device of a program's own; borrowed until it is unregistered. Gives the lowest free number
 * from KN_OTHER_DEVICE on, which t's streams carry, or KN_DEVICE_DEFAULT with an error. Not while
 * kernels run. */
KN_API kn_device kn_device_register(const kn_device_table *t);
KN_API void kn_device_unregister(kn_device d); /* its streams, events and memory are gone by now */
/* That of KN_DEVICE_DEFAULT: the CPU, or what a test puts in its place before the first use. */
extern KN_API kn_device kn_default_device;
/* NULL for a device that this build does not have. */
const kn_device_table *kn_device_table_of(kn_device d);
/* False with an error where KNAP_F32_PRODUCTS is none of them. */
bool kn_f32_products_known(void);
/* As kn_set_f32_products has it: the device may take others. */
kn_products kn_f32_products_allowed(void);
/* Its memory lies apart from the host's: bytes cross by kn_transfer. */
bool kn_device_is_apart(kn_device d);

/* This thread waits so long, whatever signals come. */
void kn_sleep(double seconds);

/* Tries the device's providers, records the trace, turns "all declined" into an error. */
bool kn_run_providers(kn_stream *s, kn_kernel k, const void *args);
/* A product with an epilogue in parts: the product, and the arguments of the kernel after it, which
 * is returned. */
typedef union kn_epilogue_args {
    kn_unary_grad_args through;
    kn_reduce_args sum;
} kn_epilogue_args;
kn_kernel kn_matmul_parts(const kn_matmul_args *whole, kn_matmul_args *product,
                          kn_epilogue_args *after);
/* How many arrays the struct of k's arguments begins with. */
KN_API int kn_kernel_arrays(kn_kernel k);

/* The CPU's providers. kn_cpu_reference takes everything; the others may decline. Each overlay file
 * of kernels/cpu is compiled once an instruction set; accessors say whether this CPU runs it. */
extern const kn_provider kn_cpu_reference;
extern const kn_provider kn_cpu_vec_base, kn_cpu_vec_avx2, kn_cpu_vec_avx512;
#ifdef KN_HAVE_ONEDNN
extern const kn_provider kn_cpu_onednn;
#endif
/* Whether the lengths of a recurrent layer's rows lie in [1, steps]; else an error. */
bool kn_cpu_lengths_fit(const kn_array *lengths, int64_t steps);

#endif
