/* fsdp/whole.h (private): the whole parameters of a bucket in bytes of their own (whole.c), apart
 * from what computes. */
#ifndef KNAP_FSDP_WHOLE_H
#define KNAP_FSDP_WHOLE_H

#include "fsdp/unit.h"

typedef struct kn_whole {
    kn_bucket *bucket;
    kn_device place;            /* where the whole lies: the unit's device, or the host */
    bool rank0_only;            /* the others have no bytes */
    kn_storage *values, *grads; /* [full_numel]; grads NULL without */
} kn_whole;

/* values = the masters of all ranks; grads, where asked for and there are any. Collective. */
bool kn_whole_gather(kn_whole *w, bool with_grads);
/* Each rank's master becomes its part of values, and its gradients that of grads, rank 0's with
 * rank0_only; parameters gathered before are out of date where values changed. Collective. */
bool kn_whole_write_back(const kn_whole *w);

#endif
