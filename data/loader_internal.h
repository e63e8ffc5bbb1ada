/* data/loader_internal.h (private): the parts of a loader. order.c says which sample stands in a
 * row, fill.c calls the function that fills it, pool.c has the threads and the batches that they
 * fill ahead, tensor_loader.c the rows of tensors, loader.c makes batches of it all. */
#ifndef KNAP_DATA_LOADER_INTERNAL_H
#define KNAP_DATA_LOADER_INTERNAL_H

#include "data/loader.h"
#include "kernels/convert.h"
#include "tensor/tensor_internal.h"

#define KN_LOADER_ERROR 1024 /* bytes of an error's text */

typedef struct kn_row {
    int64_t epoch, index; /* of the data set */
    bool counts;          /* not a repetition at the end of an epoch */
} kn_row;

/* The outcome of filling rows. */
typedef struct kn_filled {
    int64_t bad_row;      /* the first that failed, or INT64_MAX */
    int64_t end_row, end; /* the first row without a sample, or INT64_MAX; its index */
    int64_t replaced;
    char error[KN_LOADER_ERROR];
} kn_filled;

/* A batch that is being filled. */
typedef struct kn_slot {
    int64_t round, rows;                /* rows 0: a view, or of a device without bytes */
    kn_storage *storage[KN_MAX_FIELDS]; /* on the host; the thread of the loader owns them */
    char *data[KN_MAX_FIELDS];
    int64_t claimed, done; /* rows; guarded by the pool's lock */
    kn_filled filled;      /* likewise */
} kn_slot;

typedef struct kn_loader_pool kn_loader_pool;

/* Changes two samples that are filled; the random numbers are those of the pair, functions of the
 * loader's seed and of the places of its rows. It can't fail. */
typedef void (*kn_mix_fn)(kn_data_sample *a, kn_data_sample *b, void *arg);

struct kn_loader {
    const char *caller; /* names it in errors: "kn_mnist" */
    kn_comm *world;     /* used only while the number of samples is unknown */
    int64_t rank, ranks, batch, accum;
    int64_t samples; /* 0: unknown */
    bool shuffle;
    uint64_t seed;
    kn_tail tail;
    int workers, ahead;
    kn_device device;
    int fields;
    kn_field field[KN_MAX_FIELDS];
    size_t row_bytes[KN_MAX_FIELDS];
    kn_fill_fn fill;
    void *arg;
    kn_mix_fn mix;                    /* of rows 2 i and 2 i + 1, once both are filled, or NULL */
    void (*release)(void *arg);       /* where the loader owns arg, else NULL */
    kn_tensor *source[KN_MAX_FIELDS]; /* of kn_tensor_loader; kept */
    const char *bytes[KN_MAX_FIELDS]; /* theirs */
    int64_t rounds;                   /* of kn_loader_rounds if the maker knows better, or 0 */
    int64_t round, origin;            /* round 0 begins at this place */
    int64_t proven;                   /* so many samples are known to exist */
    kn_loader_stats stats;
    double begin; /* of the first kn_next */
    kn_loader_pool *pool;
};

/* The common options of all makers, and the caller's name. */
typedef struct kn_loader_common {
    KN_LOADER_OPTIONS;
} kn_loader_common;
#define KN_LOADER_COMMON(o)                                                                        \
    &(kn_loader_common)                                                                            \
    {                                                                                              \
        .batch = (o).batch, .accum = (o).accum, .shuffle = (o).shuffle, .seed = (o).seed,          \
        .tail = (o).tail, .workers = (o).workers, .ahead = (o).ahead, .device = (o).device         \
    }

/* A loader with checked options; fields in front of field, samples 0: unknown. arg becomes the
 * loader's if release isn't NULL, also when this fails. NULL with an error. */
kn_loader *kn_loader_make(const char *caller, kn_fill_fn fill, void *arg,
                          void (*release)(void *arg), const kn_comm *world, int64_t samples,
                          const kn_field *field, const kn_loader_common *o);

/* order.c: rows and rounds. */
/* The number of a row among all rows of all ranks and rounds. */
int64_t kn_loader_place(const kn_loader *l, int64_t round, int64_t row);
kn_row kn_loader_row(const kn_loader *l, int64_t round, int64_t row);
bool kn_loader_check_samples(const kn_loader *l);
/* Fails: .batch lies outside 1 to samples. */
bool kn_loader_batch_fails(const char *caller, int64_t samples, int64_t batch);
/* Places of rounds up to this one fit into an int64_t; no round behind it is filled. */
int64_t kn_loader_last_round(const kn_loader *l);
/* Rows of the round that count, which come first. */
int64_t kn_loader_counting(const kn_loader *l, int64_t round);

/* fill.c: fills rows [begin, end) of the slot, adding to *out; on workers, with a context of their
 * own, takes errors from there. */
void kn_loader_fill(const kn_loader *l, const kn_slot *slot, int64_t begin, int64_t end, int worker,
                    kn_filled *out);

/* Element i of to, an array of floats, becomes v. */
static inline void kn_put_float(kn_dtype dtype, void *to, int64_t i, double v)
{
    if (dtype == KN_F32)
        ((float *)to)[i] = (float)v;
    else if (dtype == KN_F64)
        ((double *)to)[i] = v;
    else
        ((uint16_t *)to)[i] = dtype == KN_BF16 ? kn_f32_to_bf16((float)v) : kn_f32_to_f16((float)v);
}
/* The stream of a sample's random numbers. */
uint64_t kn_sample_stream(int64_t epoch, int64_t index);

/* pool.c. The slot of the loader's round, filled, or NULL with an error; the caller drops it. */
bool kn_loader_pool_take(kn_loader *l, kn_slot *slot);
void kn_slot_drop(kn_slot *slot);
void kn_loader_pool_reset(kn_loader *l); /* drops batches read ahead */
void kn_loader_pool_free(kn_loader *l);

/* tensor_loader.c. The first row of the round where its rows follow each other in the sources; -1:
 * they don't, or there are no sources, or the batch must be copied. */
int64_t kn_loader_view(const kn_loader *l, int64_t round);
/* A view of t's rows [first, first + rows). */
kn_tensor *kn_loader_rows_of(const kn_tensor *t, int64_t first, int64_t rows);
/* The sources gather rows on their own device. */
bool kn_loader_gathers_there(const kn_loader *l);
/* The rows of source f: a view, or gathered on the sources' device (*copied becomes true). */
kn_tensor *kn_loader_rows(const kn_loader *l, int64_t round, int f, bool *copied);

#endif
