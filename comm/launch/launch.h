/* comm/launch/launch.h (private): programs that another launcher started as ranks: torchrun and its
 * like, mpirun, srun. Their environment, and how such ranks find each other. */
#ifndef KNAP_FSDP_COMM_LAUNCH_H
#define KNAP_FSDP_COMM_LAUNCH_H

#include "comm/messages/tcp.h"

typedef struct kn_launch {
    const char *launcher;  /* "torchrun", ...; NULL: no launcher started us as a rank */
    const char *size_name; /* the variable that says how many ranks there are */
    int rank, size;
    int local_rank, local_size; /* on this host; -1: unknown */
    bool mpi;                   /* the launcher supports MPI's start-up protocol */
    bool one_host;              /* every rank runs on this host */
    char job[256];              /* distinguishes this job from others of the user */
    kn_tcp_place place;         /* where ranks of several hosts meet; no host: not set */
    bool tcp;                   /* by KNAP_RENDEZVOUS */
} kn_launch;

/* Reads the environment. False with an error if it is contradictory or incomplete. */
bool kn_launch_read(kn_launch *l);
/* Makes this process rank l->rank; threads 0: the default. NULL with an error, or for one rank. */
kn_comm *kn_launch_join(const kn_launch *l, int threads);

/* say.c: prints the error of c that stands, if this rank is the one to print it. */
void kn_say_error(const struct kn_context *c, bool crashes);
/* From here on a signal of a crash does so first, unless the program has a handler of its own;
 * until c ends. */
void kn_say_at_crash(struct kn_context *c);
void kn_say_nothing(const struct kn_context *c);

/* rendezvous.c: ranks of one host that have no common parent of ours: rank 0 makes the shared
 * memory and hands it to the others over a Unix socket in the abstract namespace, named after job
 * and user. NULL with an error. */
kn_comm *kn_rendezvous(const char *job, int rank, int size, int threads);

/* mpi.c: the world of MPI_COMM_WORLD; NULL with an error. Built with -Dmpi. */
kn_comm *kn_comm_mpi(int rank, int size);

#endif
