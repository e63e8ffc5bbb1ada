/* autograd/record_internal.h (private): the record itself, for record.c (its beginning and end,
 * what is saved, the replay) and seen.c (what is read and written). */
#ifndef KNAP_AUTOGRAD_RECORD_INTERNAL_H
#define KNAP_AUTOGRAD_RECORD_INTERNAL_H

#include "autograd/record.h"

/* A tensor from outside that the forward read, or a module that it called. */
typedef struct seen {
    uint64_t id;
    uint32_t version;
    bool wants;
} seen;

/* The bytes of a storage from outside before the forward wrote there. */
typedef struct written {
    int input;           /* that it belongs to, or -1 */
    kn_storage *storage; /* a reference, or, of an input, NULL */
    kn_tensor *before;   /* all of its bytes; owned */
    kn_tensor *scratch;  /* in a replay: the bytes that come back after it */
    uint32_t version, version_now;
} written;

typedef struct place {
    kn_saved *to;  /* NULL: nobody waits for it any more */
    uint64_t like; /* a hash of dtype and shape */
} place;

typedef enum state { RESTS, FORWARD, REPLAYS } state;

struct kn_record {
    int refs;
    state state;
    kn_frame *frame;   /* of the call; a reference */
    kn_record *around; /* of the call around it; a reference, or NULL */
    kn_frame *run;     /* while it runs: the call, in a replay one like it; borrowed */
    kn_rerun how;
    kn_rng_key rng;
    uint64_t hooks; /* kn_record_hooks */
    int inputs;
    kn_saved input[KN_MAX_OUT];
    bool wants[KN_MAX_OUT];
    kn_storage *from[KN_MAX_OUT];     /* while it runs: the inputs' storages; borrowed */
    int64_t offset[KN_MAX_OUT];       /* their places there */
    uint32_t version[KN_MAX_OUT];     /* and their versions as it began */
    uint64_t first, last, begin, end; /* numbers of storages: of the forward, of the newest run */
    seen *seen;
    int64_t seens, seen_room, at; /* at: where the replay looks first */
    written *write;
    int64_t writes, write_room;
    place *place;
    int64_t places, place_room, saved; /* saved: by the replay so far */
};

/* The beginning of an error, with kn_record_call. */
#define AGAIN "backward of a call of '%s' that recomputes: "
const char *kn_record_call(const kn_record *r);
kn_record *kn_record_around(const kn_record *r); /* the running one around r, which runs, or NULL */
/* In a replay: what forward wrote becomes as it was before it; and again what it was before the
 * replay. */
bool kn_record_put_before(kn_record *r);
void kn_record_put_back(kn_record *r);

#endif
