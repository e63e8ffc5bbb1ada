/* data/loader.h: loaders, objects that hand out the batches of a data set, each rank its own.
 *
 *   kn_loader *data = kn_tensor_loader(world, .field = { images, labels }, .batch = 64,
 *                                      .shuffle = true);
 *   for (...) { kn_scope s = kn_scope_begin(); kn_batch b = kn_next(data); ... kn_scope_end(s); }
 *
 * The samples of a step are a function of (seed, number of the step), never of the rank: with N
 * ranks and .accum = A, call c of a step on rank r gives rows (c N + r) B ... + B-1 of the step's
 * G = A N B samples. So N ranks with A/N calls a step see together the samples of one rank with A
 * calls (docs/architecture.md, idea 9), and the threads that fill batches change no bit.
 *
 * A loader belongs to the thread that made it. Its own threads start with the first kn_next (so
 * that a program can make loaders before kn_spawn) and end in kn_loader_free. */
#ifndef KNAP_DATA_LOADER_H
#define KNAP_DATA_LOADER_H

#include "comm/comm.h"
#include "kernels/types.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_loader kn_loader;

/* ---- batches --------------------------------------------------------------------------------- */

#define KN_MAX_FIELDS 8 /* of a sample: inputs, targets, masks */

/* Tensors of the scope that is open when kn_next is called; all NULL where an error stands. */
typedef struct kn_batch {
    kn_tensor *x, *y;                /* fields 0 and 1 */
    kn_tensor *field[KN_MAX_FIELDS]; /* [rows, shape of the field ...]; NULL: there is none */
    int64_t samples; /* rows in front that count; less than all only at the end of an epoch */
    int64_t epoch;   /* of the first row */
} kn_batch;

/* The next batch of this rank. */
KN_API kn_batch kn_next(kn_loader *l);
/* Calls of kn_next (rounds) so far; setting it jumps to any from 0 on (resume, evaluation). */
KN_API int64_t kn_loader_round(const kn_loader *l);
KN_API void kn_loader_seek(kn_loader *l, int64_t round);
/* Rounds in one pass over the data, on each rank the same: the rounds of an epoch, or, where a
 * batch may span two epochs, samples / (batch * ranks) rounded down, at least 1. 0 while the number
 * of samples is unknown. */
KN_API int64_t kn_loader_rounds(const kn_loader *l);
/* Waits for samples that are being filled, ends the threads, drops batches read ahead. NULL is
 * fine. */
KN_API void kn_loader_free(kn_loader *l);

/* ---- where a loader is ----------------------------------------------------------------------- */

/* The samples handed out so far, to all ranks: numbers for a checkpoint. */
typedef struct kn_position {
    int64_t epoch, sample; /* of this epoch so many, in its order */
    int64_t step;          /* G, samples a step */
    int64_t samples;       /* of the data set; 0: unknown */
    uint64_t seed;
} kn_position;

KN_API kn_position kn_loader_position(const kn_loader *l);
/* Goes on behind p; the samples that follow are those that would have followed there. The number of
 * ranks, .batch and .accum may be others as long as G is the same and a round begins there; with
 * KN_TAIL_NEXT any will do: from there on round kn_loader_round(l) begins at p, up to the next
 * kn_loader_seek, which counts from the first sample. Errors: another data set or seed, and a
 * position inside of a round or of a pair that is mixed. */
KN_API bool kn_loader_set_position(kn_loader *l, kn_position p);

/* The origin of this rank's batches. */
typedef struct kn_loader_stats {
    int64_t batches;  /* handed out */
    int64_t copied;   /* of them with copied rows; the others are views of the user's memory */
    int64_t replaced; /* rows whose sample was skipped (KN_SAMPLE_SKIP) */
    double waited_s;  /* in kn_next: filling, or waiting for threads that fill */
    double waiting;   /* its share of the time since the first kn_next began, 0 to 1 */
} kn_loader_stats;
KN_API kn_loader_stats kn_loader_read_stats(const kn_loader *l);

/* ---- options of every loader ----------------------------------------------------------------- */

/* The last samples of an epoch, if G doesn't divide their number. Ranks always take the same number
 * of rounds. */
typedef enum kn_tail {
    KN_TAIL_NEXT = 0, /* the batch goes on with the next epoch: each sample once an epoch */
    KN_TAIL_DROP,     /* they are left out */
    KN_TAIL_PAD,      /* the step is filled with the epoch's first samples; b.samples are new */
    KN_TAIL_SHORT     /* as PAD, but a batch ends with its last new row; it has at least one row */
} kn_tail;

#define KN_LOADER_OPTIONS                                                                          \
    int64_t batch; /* B, samples a batch; required */                                              \
    int64_t accum; /* A, calls of kn_next an optimizer step; default 1 */                          \
    bool shuffle;  /* a new order every epoch, by kn_shuffle(seed, epoch, ...) */                  \
    uint64_t seed;                                                                                 \
    kn_tail tail;                                                                                  \
    int workers;     /* threads that fill batches; 0: kn_next fills its own */                     \
    int ahead;       /* batches that they fill before they are asked for; default 2 */             \
    kn_device device /* of the batches; default the CPU */

/* ---- a loader over a function ---------------------------------------------------------------- */

/* One sample, which a function fills in. */
typedef struct kn_data_sample {
    int64_t index, epoch;       /* which sample of the data set, in which epoch */
    void *field[KN_MAX_FIELDS]; /* where its values go, row-major; zeroed */
    int worker;                 /* number of the thread that calls, from 0 */
    uint64_t seed, stream;      /* of its random numbers: from the loader's seed, epoch and index */
    uint64_t draws;             /* numbers drawn from them so far */
} kn_data_sample;

/* Returns true, or false after kn_fail, or one of the words below. It is called on several threads
 * at once where there are workers, for samples in any order; so it must be a function of index,
 * epoch and the sample's random numbers. Tensors that it makes are freed behind it. An error comes
 * up in the kn_next that would hand out the sample. */
typedef int (*kn_fill_fn)(kn_data_sample *s, void *arg);
#define KN_SAMPLE_SKIP 2 /* unusable: the next usable sample (index + 1, ...) takes its place */
#define KN_SAMPLE_END  3 /* there is no such sample, nor one behind it (.samples = 0) */

/* One field of a sample: { KN_F32, 3, { 3, 32, 32 } } is an image, { .dtype = KN_I64 } a label. */
typedef struct kn_field {
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS - 1];
} kn_field;

typedef struct kn_loader_new_options {
    KN_BEGIN_OPTIONS;
    int64_t samples; /* 0: unknown; the first epoch ends at KN_SAMPLE_END, and can't be shuffled */
    kn_field field[KN_MAX_FIELDS]; /* in front; at least one */
    KN_LOADER_OPTIONS;
} kn_loader_new_options;

/* fill and arg are borrowed. world NULL: one rank. With an unknown number of samples kn_next is
 * collective until the end was seen. */
#define kn_loader_new(fill, arg, world, ...)                                                       \
    kn_loader_new_(fill, arg, world, KN_OPTIONS(kn_loader_new_options, __VA_ARGS__))
KN_API kn_loader *kn_loader_new_(kn_fill_fn fill, void *arg, kn_comm *world,
                                 kn_loader_new_options o);

/* Random numbers of a sample, functions of (seed, epoch, index) and of how many were drawn before:
 * neither rank, worker nor resume changes them. Uniform in [0, 1); normal, mean 0 and deviation 1;
 * a whole number in [0, n). */
KN_API double kn_draw_uniform(kn_data_sample *s);
KN_API double kn_draw_normal(kn_data_sample *s);
KN_API int64_t kn_draw_below(kn_data_sample *s, int64_t n);

/* ---- a loader over memory -------------------------------------------------------------------- */

typedef struct kn_tensor_loader_options {
    KN_BEGIN_OPTIONS;
    kn_tensor *field[KN_MAX_FIELDS]; /* [samples, ...], in front; at least one */
    KN_LOADER_OPTIONS;
} kn_tensor_loader_options;

/* Batches of rows of tensors, which are kept; kn_borrow makes a tensor of any memory. A batch whose
 * rows follow each other (no shuffling, and not around the end of an epoch) is a view: no copy,
 * unless .device is another device. Other batches gather rows, with .workers on threads.
 * kn_loader_read_stats counts both. Tensors on a GPU are gathered there (.workers = 0). world NULL:
 * one rank. */
#define kn_tensor_loader(world, ...)                                                               \
    kn_tensor_loader_(world, KN_OPTIONS(kn_tensor_loader_options, __VA_ARGS__))
KN_API kn_loader *kn_tensor_loader_(kn_comm *world, kn_tensor_loader_options o);

#ifdef __cplusplus
}
#endif
#endif
