/* tests/gpu/fake_nccl/inside.h (private): what the files of the library share: fake.c has the
 * communicators and their memory, collectives.c moves bytes. */
#ifndef KNAP_TESTS_NCCL_INSIDE_H
#define KNAP_TESTS_NCCL_INSIDE_H

#include "tests/gpu/fake_nccl/fake.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

extern API fake_nccl fake_nccl_state;

enum { SUCCESS = 0, INVALID_USAGE = 5, IN_PROGRESS = 7, MOST = 4, ROOM = 1 << 14, SPLITS = 128 };

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
    int pending;         /* remaining polls until done; more while ranks are missing */
    double begun;        /* when the newest call was made, in seconds */
    bool joining;        /* until all ranks have joined */
    struct comm **child; /* the running split's handle goes here */
    int child_color, child_at;
    _Atomic bool aborted;
    int held; /* registrations in use */
} comm;

/* ---- of fake.c ------------------------------------------------------------------------------- */

/* A call begins: nothing may be in progress. */
bool fake_nccl_may(comm *c);
/* The result of a call that has begun. */
int fake_nccl_later(comm *c);
/* p lies in memory that is registered with c. */
bool fake_nccl_in_held(const comm *c, const void *p);

#endif
