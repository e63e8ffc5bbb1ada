/* tests/comm/post_office.h: a back end of messages between threads, which counts them. Only for
 * programs that don't fail: nothing but time ends a wait. */
#ifndef KNAP_TESTS_COMM_POST_OFFICE_H
#define KNAP_TESTS_COMM_POST_OFFICE_H

#include "comm/messages/messages.h"

enum { POST_RANKS = 8 };

typedef struct post_letter {
    struct post_letter *next;
    int64_t comm, bytes;
    int tag;
    char data[];
} post_letter;

/* One for all ranks of a world. */
typedef struct post_office {
    pthread_mutex_t lock;
    pthread_cond_t came;
    post_letter *box[POST_RANKS][POST_RANKS]; /* to, from: in the order in which they were sent */
} post_office;

/* What a rank did so far. */
typedef struct post_count {
    int64_t messages, steps; /* sent; exchanges in which it sent or received */
} post_count;

void post_open(post_office *o);
void post_close(post_office *o);
/* The world of one rank, freed with post_free. NULL with an error. */
kn_comm *post_world(post_office *o, int rank, int size);
void post_free(kn_comm *world);
post_count post_counted(kn_comm *world);

#endif
