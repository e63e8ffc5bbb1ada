/* tests/gpu/fake_nccl/inside.h (private): what the files of the library share: fake.c has the
 * communicators and their memory, collectives.c moves bytes, returns.c knows what calls return. */
#ifndef KNAP_TESTS_NCCL_INSIDE_H
#define KNAP_TESTS_NCCL_INSIDE_H

#include "tests/gpu/fake_nccl/fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

extern API fake_nccl fake_nccl_state;

enum { SUCCESS = 0, INVALID_USAGE = 5, IN_PROGRESS = 7, MOST = 8, ROOM = 1 << 14, SPLITS = 128 };

/* Functions whose returns differ (returns.c); LETTER: a send or a receive outside a group. */
typedef enum function {
    INIT,
    SPLIT,
    FINALIZE,
    DESTROY,
    COLLECTIVE,
    LETTER,
    GROUP,
    REGISTER,
    DEREGISTER
} function;
typedef enum doer { CALLER, THREAD, CONNECTING /* a thread where ranks have to connect */ } doer;
enum { STATE = -1 };

/* A call that real NCCL forbids or leaves undefined ends the test. */
static inline bool must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "fake NCCL: %s\n", what);
        abort();
    }
    return ok;
}

/* ---- what ranks share ------------------------------------------------------------------------ */

/* A message buffer from one rank to another; full while it holds bytes. */
typedef struct box {
    _Atomic int full;
    size_t bytes;
    char data[ROOM];
} box;

typedef struct shared {
    _Atomic int here[MOST];
    char gpu[MOST][64]; /* host and bus id of each rank's */
    struct {
        _Atomic int set;
        int color, key;
    } split[SPLITS][MOST];
    box box[MOST][MOST];
} shared;

typedef struct comm {
    shared *s;
    char name[160];
    int rank, size, splits;
    bool blocking;
    pthread_t maker; /* its thread: NCCL's queues are a thread's own */
    /* What ncclCommGetAsyncError says. While in progress a thread of NCCL has something to do: it
     * takes so many more looks, and until then. */
    int state, polls;
    double ready;
    bool joining; /* until all ranks have joined */
    bool finalizing;
    struct comm **child, *made; /* the running split's handle goes there; it */
    int child_at;
    struct job *queue; /* to be launched */
    bool connected[MOST];
    _Atomic bool gone;    /* aborted or destroyed */
    int held;             /* registrations in use */
    _Atomic int recorded; /* collectives in graphs that live */
} comm;

/* ---- of fake.c ------------------------------------------------------------------------------- */

double fake_nccl_seconds(void);
/* A call begins: nothing may be in progress. */
bool fake_nccl_may(comm *c);
/* What is at work on c goes on; true, with c's state, once it is done. */
bool fake_nccl_work(comm *c);
/* p lies in memory that is registered with c. */
bool fake_nccl_in_held(const comm *c, const void *p);

/* ---- of collectives.c ------------------------------------------------------------------------ */

void fake_nccl_launch_queue(comm *c);

/* ---- of returns.c ---------------------------------------------------------------------------- */

/* A call of f has given c something to do: its result. connects: with ranks for the first time. */
int fake_nccl_answer(function f, comm *c, bool connects);

#endif
