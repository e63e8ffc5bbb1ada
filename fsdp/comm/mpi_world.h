/* fsdp/comm/mpi_world.h (private): the back end for ranks started by mpirun, on any number of hosts.
 *
 * Everything is non-blocking point to point, waited for by looking (MPI_Testsome), so that a wait
 * can end for other reasons than its messages: poison, a mismatch, time. Each call begins with an
 * exchange of its description; bytes move only once all ranks have said the same.
 *
 * Beside the communicators runs a control channel, read by whoever waits:
 *   poison   an error stands on the sender
 *   left     the sender's world is closed
 *   where    the sender waits for you in this call, and this is how far it is elsewhere */
#ifndef KNAP_FSDP_COMM_MPI_WORLD_H
#define KNAP_FSDP_COMM_MPI_WORLD_H

#include "fsdp/comm/comm_internal.h"
#include <mpi.h>
#include <pthread.h>

enum { KN_MPI_POISON = 1, KN_MPI_LEFT, KN_MPI_WHERE }; /* tags of the control channel */
enum { KN_MPI_FAMILIES = 32 };

typedef struct kn_mpi_word {
    char text[1024];   /* poison */
    kn_call_note note; /* where: the call, */
    int32_t family, families;
    struct {
        int64_t id, launched;
    } at[KN_MPI_FAMILIES]; /* and the number of the last call in each family */
} kn_mpi_word;

typedef struct kn_mpi_sent {
    MPI_Request request;
    struct kn_mpi_sent *next;
    kn_mpi_word word;
} kn_mpi_sent;

typedef struct kn_mpi_world {
    kn_comm *first; /* the world */
    MPI_Comm control;
    pthread_t main;
    pthread_mutex_t lock; /* guards sent and the receiving of words */
    kn_mpi_sent *sent;
    _Atomic int poison; /* 0, 1: being written, 2: culprit and text are there */
    int culprit;
    char text[1024];
    _Atomic bool told;   /* the others know of it */
    _Atomic int loudest; /* the lowest rank that told us of an error; INT32_MAX: none */
    bool owns_mpi;       /* we called MPI_Init */
    int next_id;
    _Atomic int *left;  /* [size] */
    kn_call_note *last; /* [size] what we last heard of each rank's calls; guarded by lock */
} kn_mpi_world;

typedef struct kn_mpi_comm {
    kn_comm base;
    kn_mpi_world *w;
    MPI_Comm mpi;
    int *member;         /* ranks of the world */
    MPI_Request *req;    /* [2 * size]: receives, then sends */
    int *done;           /* [2 * size] scratch */
    kn_call_note *said;  /* [size] */
    const void **source; /* [size] scratch */
    char *room;          /* what the others sent, of room_bytes; taken when needed */
    size_t room_bytes;
} kn_mpi_comm;

/* One message to and one from each other rank, or none where bytes are 0. What lies for rank j, or
 * comes from it, lies j strides further on. */
typedef struct kn_mpi_parts {
    const char *send;
    int64_t send_stride, send_bytes;
    char *receive;
    int64_t receive_stride, receive_bytes;
    int from; /* receive from this rank only; -1: from all */
} kn_mpi_parts;

/* mpi_run.c */
bool kn_mpi_run(kn_comm *c, const kn_comm_call *call, kn_stream *s);
/* mpi_wait.c: starts what parts says and waits for all of it; tag orders exchanges of one call.
 * False with an error; the world is broken then. */
bool kn_mpi_exchange(kn_mpi_comm *c, const kn_comm_call *call, const kn_mpi_parts *parts, int tag);
/* Sends a word to rank r of the world (-1: to all others); never blocks, gives up silently. */
void kn_mpi_tell(kn_mpi_world *w, int r, int tag, const kn_mpi_word *word);
/* Frees the words that have been sent. */
void kn_mpi_forget_sent(kn_mpi_world *w);
/* Reads what the others told; false where an error now stands. */
bool kn_mpi_listen(kn_mpi_world *w);
/* First caller wins. */
void kn_mpi_poison(kn_mpi_world *w, int culprit, const char *message);
/* The error that stands here becomes known to the others, once; when MPI may be called here. */
void kn_mpi_tell_poison(kn_mpi_world *w);
/* The rank whose error came first, -1: none; *text its sentence. */
int kn_mpi_poisoned(kn_mpi_world *w, const char **text);

#endif
