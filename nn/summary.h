/* nn/summary.h: what a model is and costs, from a run without values. */
#ifndef KNAP_NN_SUMMARY_H
#define KNAP_NN_SUMMARY_H

#include "nn/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One module of a summary, with all that lies below it. */
typedef struct kn_summary_row {
    const kn_module *module; /* borrowed */
    int depth;               /* 0: the module that was summarized */
    int calls; /* 0: it wasn't called by itself (a list, say); then it costs what is below it */
    /* Results of its first call. */
    int results, ndim[KN_MAX_VALUES];
    kn_dtype dtype[KN_MAX_VALUES];
    int64_t shape[KN_MAX_VALUES][KN_MAX_DIMS];
    /* Elements; a shared parameter counts at its owner (kn_params). Bytes in the masters' dtype. */
    int64_t params, trainable, param_bytes;
    double forward, backward; /* floating point operations of all its calls */
    int64_t
        kept; /* bytes that its calls keep for backward, besides parameters; tensors that several
                     operations keep count where the first one keeps them */
} kn_summary_row;
typedef struct kn_summary_table {
    int rows;
    kn_summary_row *row; /* parents before their children; [0]: the whole */
} kn_summary_table;

typedef struct kn_summary_options {
    KN_BEGIN_OPTIONS;
    int depth;           /* of the deepest modules that are printed; 0: all */
    kn_forward_n method; /* in the place of forward, as in kn_call_method_n */
    const void *arg;     /* the forward's, of arg_size bytes */
    size_t arg_size;
    bool no_backward; /* the forward as under no_grad: nothing is kept */
} kn_summary_options;

/* Runs m's forward once, and its backward, for inputs of the shapes and dtypes of in (their
 * values aren't read; they may lie on meta), and counts. Everything happens on meta: nothing of
 * the model's size is allocated, and parameters, gradients, random numbers and hooks stay as they
 * are (hooks don't run, but the functions of the user's modules do). Sharded modules are counted
 * as they were before kn_fsdp_wrap: whole parameters in the masters' dtype; every rank may call
 * it, or one alone. A call that recomputes runs forward in backward, which counts there. The
 * caller frees it. NULL with an error: forward failed, reads values, or uses tensors that belong
 * to no module; in a call or a backward. */
KN_API kn_summary_table *kn_summary_new_(void *m, kn_values in, kn_summary_options o);
#define kn_summary_new(m, in, ...)                                                                 \
    kn_summary_new_(m, in, KN_OPTIONS(kn_summary_options, __VA_ARGS__))
KN_API void kn_summary_free(kn_summary_table *s);
/* Prints the modules down to depth (0: all), a line each, and the totals. */
KN_API bool kn_summary_print(FILE *out, const kn_summary_table *s, int depth);
/* kn_summary_new and kn_summary_print:
 *
 *     kn_summary(stdout, &net, KN_VALUES(x), .depth = 2); */
KN_API bool kn_summary_(FILE *out, void *m, kn_values in, kn_summary_options o);
#define kn_summary(out, m, in, ...)                                                                \
    kn_summary_(out, m, in, KN_OPTIONS(kn_summary_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif

#endif
