/* models/loader_internal.h (private): the functions that a data set supplies for its loader. */
#ifndef KNAP_MODELS_LOADER_INTERNAL_H
#define KNAP_MODELS_LOADER_INTERNAL_H

#include "models/data.h"

/* First member of every loader's struct, which is one block of kn_host_alloc. */
struct kn_loader {
    kn_batch (*fill)(kn_loader *l, int64_t micro); /* micro-batch micro of the whole run */
    void (*release)(kn_loader *l);                 /* frees the memory that the struct points at */
    int64_t round, rounds;                         /* calls so far; calls in an epoch */
    int rank, ranks;
};

/* Checks batch against the number of samples and fills in l; caller: its function, for errors. */
bool kn_loader_init(kn_loader *l, const char *caller, const kn_comm *world, int64_t batch,
                    int64_t samples, kn_batch (*fill)(kn_loader *, int64_t),
                    void (*release)(kn_loader *));

#endif
