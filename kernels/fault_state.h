/* kernels/fault_state.h (private): the fault of a context (faults.h). */
#ifndef KNAP_KERNELS_FAULT_STATE_H
#define KNAP_KERNELS_FAULT_STATE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum kn_fault_place {
    KN_AT_ALLOCATION, /* of metadata and tensor bytes alike */
    KN_AT_COLLECTIVE, /* a call among several ranks */
    KN_AT_STEP,       /* its begin */
    KN_AFTER_STEP,    /* an optimizer's step over the fault's parameter */
    KN_AT_SAVE,       /* of a checkpoint; those before count within a step */
    KN_AT_MEETING,    /* tests: a call has at least one, one more a round where data is staged */
    KN_FAULT_PLACES
} kn_fault_place;

typedef enum kn_fault_kind {
    KN_NO_FAULT,
    KN_FAULT_KILL,   /* SIGKILL */
    KN_FAULT_STOP,   /* SIGSTOP */
    KN_FAULT_CRASH,  /* a segmentation fault */
    KN_FAULT_EXIT,   /* _exit(7), silently */
    KN_FAULT_ERROR,  /* an error comes to stand */
    KN_FAULT_DELAY,  /* so many milliseconds pass */
    KN_FAULT_MEMORY, /* an allocation fails */
    KN_FAULT_SHAPE,  /* a collective has another count than on other ranks */
    KN_FAULT_SKIP,   /* a collective isn't called */
    KN_FAULT_FLIP,   /* a bit of what came, or of a parameter, is another */
    KN_FAULT_DISK,   /* nothing more can be written */
    KN_FAULT_KINDS
} kn_fault_kind;

typedef struct kn_fault {
    const char *text; /* that asked for it; NULL: a test did, or nothing */
    kn_fault_kind kind;
    kn_fault_place place;
    _Atomic int64_t nth; /* which of these places, from 1; 0: there is no fault */
    int64_t step;        /* with a text: the step in which they count, from 1 */
    _Atomic int64_t count[KN_FAULT_PLACES]; /* with a text: in this step (saves: in all) */
    int64_t seen;                           /* places in the fault's step, once that is over */
    int64_t ms, bit, byte;
    char parameter[160];
    bool came, disk_full;
} kn_fault;

#endif
