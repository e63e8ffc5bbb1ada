/* comm/messages/tcp.h (private): the back end for ranks on several hosts without MPI, over TCP:
 * exchanges of messages (messages.h). Each pair of ranks has two connections: bytes of collectives,
 * and words. It is meant for the hosts' small collectives beside NCCL; everything else works over
 * it, too, without overlap.
 *
 * For networks that are trusted: connections are not encrypted, like MPI's and NCCL's. Processes
 * that aren't ranks of this job are refused, each for about half a millisecond of rank 0: a hello
 * and its answer carry a seal over their numbers, made with the key (tcp_seal.c). Addresses and
 * everything that follows carry none. The key is the job's name, which is as secret as KNAP_JOB is,
 * and the token of the meeting file, if there is one, which only its user can read.
 */
#ifndef KNAP_FSDP_COMM_TCP_H
#define KNAP_FSDP_COMM_TCP_H

#include "comm/messages/messages.h"
#include <poll.h>
#include <sys/socket.h>

#define KN_TCP_MAX_RANKS 1024

/* To one other rank. */
typedef struct kn_tcp_link {
    int data, control;  /* sockets; -1: none */
    bool ended;         /* control is at its end: no more words */
    kn_message_word in; /* the word that is coming; got bytes of it are here */
    size_t got;
    kn_message_word out; /* the unsent rest of the last word: its last left bytes */
    size_t left;
} kn_tcp_link;

/* The head of a message, before its bytes. */
typedef struct kn_tcp_head {
    uint32_t magic;
    int32_t tag;
    int64_t comm, number, bytes; /* of the communicator; its how manieth exchange; of the message */
} kn_tcp_head;

/* One message on its way, head first. */
typedef struct kn_tcp_flow {
    kn_tcp_head head;
    int64_t done; /* bytes of head and message */
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
    kn_tcp_flow *flow;             /* [2 * size]: sends, then receives */
    const kn_message_parts *parts; /* of the running exchange */
    struct pollfd *polled;         /* [2 * size] */
} kn_tcp_comm;

/* The meeting place of ranks. */
typedef struct kn_tcp_place {
    char host[256];  /* of rank 0, or the path of the file that holds it */
    int port, ports; /* from port on so many are tried; 0: file */
    bool secret;     /* KNAP_JOB was given: strangers don't know job */
    char job[256];   /* the same on all ranks of this job, other than that of others */
} kn_tcp_place;

/* tcp.c: this process becomes rank of size; NULL with an error. */
kn_comm *kn_comm_tcp(const kn_tcp_place *place, int rank, int size);
/* tcp_meet.c: connects link[size] to all other ranks. *local_rank, *local_size: among the ranks of
 * this host. */
bool kn_tcp_meet(const kn_tcp_place *place, int rank, int size, kn_tcp_link *link, int *local_rank,
                 int *local_size);

/* ---- addresses (tcp_address.c) --------------------------------------------------------------- */

enum { KN_TCP_ADDRESSES = 8, KN_TCP_TARGETS = 32, KN_TCP_TEXT = 64 };

/* Addresses are 16 bytes, those of IPv6, into which IPv4's are mapped. */
typedef struct kn_tcp_target {
    uint8_t address[16];
    int port;
} kn_tcp_target;

/* The addresses that a rank listens at. */
typedef struct kn_tcp_seat {
    uint8_t address[KN_TCP_ADDRESSES][16]; /* count of them, the best first; no loopback, but it
                                            * alone where the rank listens at no other address */
    uint64_t host, net; /* equal where ranks share a host; where they share its loopback */
    int32_t port, count;
} kn_tcp_seat;

/* This process listens at port: by that address alone, NULL: by all of its own. */
void kn_tcp_seat_begin(kn_tcp_seat *s, int port, const uint8_t *address);
/* The address to listen at where rank 0's place is host: only a numeric one and localhost say it.
 * That of rank 0 itself (own), or the one by which this host would call it. False: all
 * interfaces. */
bool kn_tcp_address_for(const char *host, bool own, uint8_t *address);
bool kn_tcp_is_loopback(const uint8_t *address);
/* Of another process: its counts are such that they can be used. */
bool kn_tcp_seat_sound(const kn_tcp_seat *s);
/* One more, before all others or behind them; nothing if it is there, is of no use to other hosts,
 * or all places are taken. */
void kn_tcp_seat_add(kn_tcp_seat *s, const uint8_t *address, bool first);
/* Its addresses as seen from net: at most KN_TCP_TARGETS. A shared loopback comes first. */
int kn_tcp_seat_targets(const kn_tcp_seat *s, uint64_t net, kn_tcp_target *t);
/* The addresses of a host, at so many ports from port on; 0 with *why if it has none. */
int kn_tcp_resolve(const char *host, int port, int ports, kn_tcp_target *t, const char **why);
bool kn_tcp_address_of(int fd, bool own, uint8_t *address);
const char *kn_tcp_address_text(const uint8_t *address, char *text); /* text[KN_TCP_TEXT] */
bool kn_tcp_address_read(const char *text, uint8_t *address);
socklen_t kn_tcp_socket_address(const kn_tcp_target *t, struct sockaddr_storage *to);

/* The result of the meeting: every rank's addresses, and the meeting's number. */
typedef struct kn_tcp_table {
    const char *key;
    uint64_t number[2], net;
    int rank, size, listener;
    double deadline;
    const kn_tcp_seat *seat; /* [size] */
} kn_tcp_table;

/* tcp_connect.c: fills link, which has the connection to rank 0 for words. False with an error. */
bool kn_tcp_connect_all(const kn_tcp_table *t, kn_tcp_link *link);

/* ---- the file (tcp_file.c) ------------------------------------------------------------------- */

typedef struct kn_tcp_file {
    char token[33]; /* random; empty: not written */
    kn_tcp_seat seat;
} kn_tcp_file;

/* Makes up f->token and writes f, which appears whole. An error if another file lies there. */
bool kn_tcp_file_write(const char *path, kn_tcp_file *f);
/* False with *why if there is none of this user. */
bool kn_tcp_file_read(const char *path, kn_tcp_file *f, const char **why);
/* The file is still the one that was written as f. */
bool kn_tcp_file_stands(const char *path, const kn_tcp_file *f);
/* Removes it while it is. */
void kn_tcp_file_remove(const char *path, const kn_tcp_file *f);

/* ---- seals (tcp_seal.c) ---------------------------------------------------------------------- */

enum { KN_TCP_SEAL = 44 };

/* seal[KN_TCP_SEAL] of the words, of a message of this kind. False with an error. */
bool kn_tcp_seal(const char *key, char kind, const uint64_t *word, int words, char *seal);
/* The seal was made with the key. */
bool kn_tcp_sealed(const char *key, char kind, const uint64_t *word, int words, const char *seal);

/* ---- sockets that don't block (tcp_socket.c) ------------------------------------------------- */

/* At that address; NULL: on every interface, of IPv6 and IPv4. Port 0: any. -1 with errno. */
int kn_tcp_listen(const uint8_t *address, int port, int *got_port);
/* Sends bytes of say to the targets, one after the other until one answers size right bytes, and
 * returns the connection to it; tries the next without waiting for a slow one. -1 with errno. */
int kn_tcp_call(const kn_tcp_target *t, int n, const void *say, size_t bytes, void *answer,
                size_t size, bool (*right)(void *arg, const void *answer), void *arg,
                double deadline);
/* Waits for events of poll(2), until the deadline. */
bool kn_tcp_ready(int fd, short events, double deadline);
bool kn_tcp_receive(int fd, void *data, size_t size, double deadline);
bool kn_tcp_send(int fd, const void *data, size_t size, double deadline);
/* The other end has left. */
bool kn_tcp_is_gone(int fd);
/* Takes connections and reads a message of size bytes from each, several at a time, until admit
 * says that all are there (1). admit keeps fd (0 or 1) or refuses it (-1). False with kn_ok() where
 * the time is over, or go_on (may be NULL), which is asked again and again, says no. Strangers that
 * say nothing cost a place among those that are listened to, not time. */
bool kn_tcp_admit(int listener, size_t size, double deadline,
                  int (*admit)(void *arg, int fd, const void *message), bool (*go_on)(void *arg),
                  void *arg);

/* ---- the lobby (lobby.c) --------------------------------------------------------------------- */

/* Where rank 0 waits for the others. */
typedef struct kn_lobby {
    int size, missing; /* ranks; those that aren't here */
    kn_tcp_link *link; /* [size] control: the connection to the rank that came; -1: none */
    char error[240];   /* why the last arrival is refused; empty: it may enter */
    char refused[240]; /* the last such reason */
} kn_lobby;

/* The seat of a rank that left again is free. */
void kn_lobby_clear(kn_lobby *l, int rank);
/* Whether a process may enter that says it is rank of size. */
bool kn_lobby_judge(kn_lobby *l, int rank, int size, bool same_version);
/* It enters; 1 where all are here, else 0. */
int kn_lobby_enter(kn_lobby *l, int rank, int fd);
/* The error of ranks that didn't come to where; false. */
bool kn_lobby_late(const kn_lobby *l, const char *where);
bool kn_lobby_tell(const kn_lobby *l, const void *data, size_t bytes, double deadline);
/* All ranks say that they are ready, and are told to go on; what rank 0 does, and another, whose
 * connection to it is fd. */
bool kn_lobby_go(const kn_lobby *l, double deadline);
bool kn_lobby_wait(int fd, int size, double deadline);

/* tcp_wait.c */
extern const kn_transport kn_tcp_transport;

#endif
