/* kernels/faults.h (private): faults on demand, one in a thread's context at a time. A text asks
 * for one (KNAP_FAULT and --fault of kn_init; docs/failures.md has its grammar), and so do tests.
 *
 * A place counts itself, and asks whether the fault is its: allocations in ledger.c, collectives
 * and meetings of ranks in comm/, steps where their number changes, saves in state/. */
#ifndef KNAP_KERNELS_FAULTS_H
#define KNAP_KERNELS_FAULTS_H

#include "kernels/fault_state.h"
#include "kernels/stream.h"

/* Reads a text. On its rank of so many the fault waits from now on. False with an error that says
 * what is wrong with the text, also on the other ranks. text is borrowed for good. */
bool kn_fault_read(const char *text, int rank, int ranks);
/* Tests: the nth such place from now on has this fault, on whichever thread of the context; 0:
 * none has. Returns how many there were since the last call. */
KN_API int64_t kn_fault_at(kn_fault_place place, int64_t nth, kn_fault_kind kind);
/* The nth allocation fails. */
static inline int64_t kn_fail_alloc(int64_t nth)
{
    return kn_fault_at(KN_AT_ALLOCATION, nth, KN_FAULT_MEMORY);
}

/* Counts a place, and gives the fault that it has. With a text those of worker threads don't count:
 * their order isn't the program's. */
kn_fault_kind kn_fault_due(kn_fault_place place);
/* Says that the fault comes, where a text asked for it; what: the place in words, NULL if the text
 * says all. Then does what needs nothing of the place. False where an error now stands. */
bool kn_fault_come(kn_fault_kind kind, const char *what);
/* Both. */
bool kn_fault_pass(kn_fault_place place);
/* The number of steps done (kn_context.rng) was this: where it is another now, counts of the step
 * begin anew. */
void kn_fault_step(int64_t before);
/* Flips the fault's bit in its byte of those at at, of s's device (NULL: the host). False with an
 * error where there are fewer; whose names them. */
bool kn_fault_flip(kn_stream *s, void *at, int64_t bytes, const char *whose);
/* The program ends well: an error where the fault never came. */
void kn_fault_missed(void);

#endif
