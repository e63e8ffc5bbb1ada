/* models/programs/measures.h: a step's measurements on all ranks (losses, the gradient's norm).
 * They are gathered on the computing device and copied to the host, which waits only when it takes
 * them. */
#ifndef KNAP_MODELS_PROGRAMS_MEASURES_H
#define KNAP_MODELS_PROGRAMS_MEASURES_H

#include "fsdp/fsdp.h"
#include "state/checkpoint.h"

typedef struct measures measures;

/* For steps of accum micro-batches a rank on device; at most behind + 1 steps are pending. */
measures *measures_create(kn_comm *world, kn_device device, int64_t accum, int behind);
void measures_free(measures *m);

/* The loss of micro-batch a of this rank. */
bool measures_loss(measures *m, int64_t a, kn_tensor *loss);
/* The step's norm, and its first parameter with a gradient that isn't finite
 * (kn_first_nonfinite_grad). */
bool measures_grads(measures *m, kn_tensor *norm, kn_tensor *nonfinite);
/* What ranks tell each other with a step's measurements. */
typedef struct news {
    bool stop; /* a wish to stop */
    bool now;  /* a wish to save after this step */
    int save;  /* number of the save in the background, below MEASURES_SAVES */
    kn_save_state state;
} news;
#define MEASURES_SAVES 1000000
/* Starts the copy of the step's measurements, with this rank's news. Collective. */
bool measures_send(measures *m, news mine);

typedef struct measured {
    double loss; /* mean over all micro-batches, added in their order */
    double norm;
    int64_t nonfinite; /* lowest of all ranks, -1: none */
    /* .stop and .now of any rank; .state is RUNNING where a rank still writes, else FAILED where
     * one failed, else WRITTEN or NONE, of all */
    news news;
} measured;

int measures_waiting(const measures *m); /* steps sent and not yet taken */
/* Takes the oldest pending step; waits for the device until it has arrived. */
bool measures_take(measures *m, measured *out);

#endif
