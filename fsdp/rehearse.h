/* fsdp/rehearse.h (private): a step of trees of units, run on meta for its memory (rehearse.c). */
#ifndef KNAP_FSDP_REHEARSE_H
#define KNAP_FSDP_REHEARSE_H

#include "fsdp/unit.h"

/* Peaks of bytes of a step. */
typedef struct kn_step_peaks {
    int64_t gathered, unreduced;
} kn_step_peaks;
/* Runs the schedule for copies on meta of the units at and below n modules, which the step calls
 * one after the other, among simulated ranks, and reads the ledger. Nothing of the trees changes.
 * overlap: a reduction runs beside the next unit's backward. False with an error. */
bool kn_rehearse_step(kn_module_impl *const *module, int n, bool overlap, kn_step_peaks *peaks);

#endif
