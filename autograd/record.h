/* autograd/record.h (private): calls that recompute.
 *
 * Such a call runs its forward on the tape like any other, but its nodes save nothing: each saved
 * tensor is a place in the call's record. When backward comes to the call, the forward runs again
 * (a replay); the tensors that its operations save go, in the same order, to those places, and
 * the replay's own nodes are dropped. So hooks, counts and gradients are those of the tape that the
 * forward made, and a replay only computes values.
 *
 * The values are the forward's because the record holds all that it saw: its inputs, the key, seed
 * and step of its draws, the versions of all tensors from outside that it read and whether they
 * required grad, and the bytes, as they were, of those that it wrote in place. The replay writes
 * those again, after which they are as before it. It refuses a tensor that changed, or that the
 * forward didn't read. (The modules are in nn/recompute.c.)
 *
 * A call inside another one that recomputes has a record of its own; its inputs are places in the
 * outer record. */
#ifndef KNAP_AUTOGRAD_RECORD_H
#define KNAP_AUTOGRAD_RECORD_H

#include "autograd/autograd_internal.h"

typedef struct kn_record kn_record;

/* How a forward runs again; owned by the record. */
typedef struct kn_rerun {
    bool (*run)(void *arg, int n, kn_tensor *const *in); /* inside of a frame like the call's own */
    void (*drop)(void *arg);
    void *arg;
} kn_rerun;

/* The forward of the call f begins; kn_record_end must follow. Takes over how.arg. NULL with an
 * error. */
kn_record *kn_record_begin(kn_frame *f, int n, kn_tensor *const *in, kn_rerun how);
void kn_record_end(kn_record *r); /* drops the caller's reference */

/* A step of the running forward or replay; false with an error where a replay differs. They do
 * nothing outside of both. */
/* t is read. Whether a gradient of it is wanted: in a replay as the forward found it. t may be
 * NULL. */
bool kn_record_read(const kn_tensor *t);
bool kn_record_write(kn_tensor *t, const char *what); /* t will be written in place */
/* Something else is used whose number is id and whose state is what: a module. */
bool kn_record_use(uint64_t id, uint32_t what, const char *name);
void kn_record_group(kn_group *g); /* something of g is used; NULL: nothing to do */
/* The number that kn_hook_next had given last in the forward of the replay that runs; outside of
 * one the highest number. */
uint64_t kn_record_hooks(void);
KN_API bool kn_recomputing(void);   /* nn/nn.h */
bool kn_record_replays(void);       /* the innermost call that recomputes is replayed */
kn_record *kn_record_running(void); /* of the innermost one; NULL: none */

/* A place in the running forward's record for the tensor that s saves; of a replay, the tensor goes
 * to its place. False with an error. There must be a running one. */
bool kn_record_save(kn_saved *s, const kn_tensor *t);
void kn_record_forget(kn_saved *s); /* s, which has a place, goes */
/* In a backward: replays r if s has no tensor. False with an error. */
bool kn_record_fill(kn_record *r);
bool kn_record_wants_fill(const kn_record *r); /* a place is empty */
void kn_record_empty(kn_record *r);            /* all places */
kn_record *kn_record_ref(kn_record *r);
void kn_record_unref(kn_record *r);

#endif
