/* tests/comm/message_queues.h: a back end of messages between threads, with a count of them. Only
 * for programs that don't fail: a wait ends only by its timeout. */
#ifndef KNAP_TESTS_COMM_MESSAGE_QUEUES_H
#define KNAP_TESTS_COMM_MESSAGE_QUEUES_H

#include "comm/messages/messages.h"

enum { QUEUE_RANKS = 8 };

typedef struct queued_message {
    struct queued_message *next;
    int64_t comm, bytes;
    int tag;
    char data[];
} queued_message;

/* One for all ranks of a world. */
typedef struct message_queues {
    pthread_mutex_t lock;
    pthread_cond_t came;
    queued_message *box[QUEUE_RANKS][QUEUE_RANKS]; /* to, from: in the order of sending */
} message_queues;

/* A rank's messages so far. */
typedef struct message_count {
    int64_t messages, steps; /* sent; exchanges in which it sent or received */
} message_count;

void queues_open(message_queues *o);
void queues_close(message_queues *o);
/* The world of one rank, freed with queues_free. NULL with an error. */
kn_comm *queues_world(message_queues *o, int rank, int size);
void queues_free(kn_comm *world);
message_count queues_counted(kn_comm *world);

#endif
