/* fsdp/comm/tcp.h (private): the back end for ranks on several hosts without MPI, over TCP: exchanges of messages
 * (messages.h). Each pair of ranks has two connections: bytes of collectives, and words. It is meant for the
 * hosts' small collectives beside NCCL; everything else works over it, too, without overlap.
 *
 * Connections are neither encrypted nor secret from who can read the network, as MPI's and NCCL's aren't. Who
 * is no rank of this job is turned away: a meeting begins with a magic number and the job's, connections
 * between ranks with a random number that rank 0 gives out. */
#ifndef KNAP_FSDP_COMM_TCP_H
#define KNAP_FSDP_COMM_TCP_H

#include "fsdp/comm/messages.h"
#include <poll.h>

#define KN_TCP_MAX_RANKS 1024

/* To one other rank. */
typedef struct kn_tcp_link {
    int data, control;  /* sockets; -1: none */
    bool ended;         /* control is at its end: no more words */
    kn_message_word in; /* the word that is coming, of which got bytes are here */
    size_t got;
    kn_message_word out; /* what has not been sent of the last word: its last left bytes */
    size_t left;
} kn_tcp_link;

/* What comes before the bytes of a message. */
typedef struct kn_tcp_head {
    uint32_t magic;
    int32_t tag;
    int64_t comm, number, bytes; /* of the communicator; its how manieth exchange; of the message */
} kn_tcp_head;

/* One message on its way, head first. */
typedef struct kn_tcp_flow {
    kn_tcp_head head;
    char *p;
    int64_t done; /* bytes of head and p */
    bool checked; /* the head that came is the one that should */
} kn_tcp_flow;

typedef struct kn_tcp_world {
    kn_message_world base;
    kn_tcp_link *link;        /* [size] */
    pthread_mutex_t out_lock; /* guards the sending of words */
    pthread_mutex_t ear;      /* guards their reading */
} kn_tcp_world;

typedef struct kn_tcp_comm {
    kn_message_comm base;
    int64_t exchanges;
    kn_tcp_flow *flow;     /* [2 * size]: what is sent, then what comes */
    struct pollfd *polled; /* [2 * size] */
} kn_tcp_comm;

/* Where ranks meet. */
typedef struct kn_tcp_place {
    char host[256];  /* of rank 0, or the path of the file that says it */
    int port, ports; /* from port on so many are tried; 0: file */
    char job[256];   /* the same on all ranks of this job, other than that of others */
} kn_tcp_place;

/* tcp.c: this process becomes rank of size; NULL with an error. */
kn_comm *kn_comm_tcp(const kn_tcp_place *place, int rank, int size);
/* tcp_meet.c: connects link[size] to all other ranks. *local_rank, *local_size: among the ranks of this host. */
bool kn_tcp_meet(const kn_tcp_place *place, int rank, int size, kn_tcp_link *link, int *local_rank,
                 int *local_size);
/* tcp_socket.c: sockets that don't block. */
int kn_tcp_listen_at(const char *host, int port, int *got_port); /* host NULL: any; -1 with errno */
int kn_tcp_connect(const char *host, int port, double deadline); /* -1 where nobody is there */
bool kn_tcp_receive(int fd, void *data, size_t size, double deadline);
bool kn_tcp_send(int fd, const void *data, size_t size, double deadline);
/* Takes connections and reads a message of size bytes from each, several at a time, until admit says that all
 * are there (1). admit keeps fd (0 or 1) or refuses it (-1), or ends the whole with an error (-2). False with
 * kn_ok() where the time is over. Strangers that say nothing cost a place among those that are listened to, not
 * time. */
bool kn_tcp_admit(int listener, size_t size, double deadline,
                  int (*admit)(void *arg, int fd, const void *message), void *arg);
/* tcp_wait.c */
extern const kn_transport kn_tcp_transport;

#endif
