/* comm/messages/mpi_world.h (private): the back end for ranks started by mpirun: exchanges of
 * messages (messages.h) by MPI, non-blocking point to point, waited for by looking
 * (MPI_Testsome). */
#ifndef KNAP_FSDP_COMM_MPI_WORLD_H
#define KNAP_FSDP_COMM_MPI_WORLD_H

#include "comm/messages/messages.h"
#include <mpi.h>

typedef struct kn_mpi_sent {
    MPI_Request request;
    struct kn_mpi_sent *next;
    kn_message_word word;
} kn_mpi_sent;

typedef struct kn_mpi_world {
    kn_message_world base;
    MPI_Comm control;  /* for words; the tag is the kind of word */
    kn_mpi_sent *sent; /* guarded by base.lock */
    bool owns_mpi;     /* we called MPI_Init */
} kn_mpi_world;

typedef struct kn_mpi_comm {
    kn_message_comm base;
    MPI_Comm mpi;
    MPI_Request *req; /* [2 * size]: receives, then sends */
    int *done;        /* [2 * size] scratch */
} kn_mpi_comm;

/* mpi_wait.c */
extern const kn_transport kn_mpi_transport;
/* Frees the words that have been sent. */
void kn_mpi_forget_sent(kn_mpi_world *w);

#endif
