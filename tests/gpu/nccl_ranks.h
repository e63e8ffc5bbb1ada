/* tests/gpu/nccl_ranks.h: ranks over fake CUDA and fake NCCL, for test_cuda_nccl: their shared
 * machine, which is there before main, and running a test on them. */
#ifndef KNAP_TESTS_NCCL_RANKS_H
#define KNAP_TESTS_NCCL_RANKS_H

#include "tests/comm/comm_test.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/gpu/fake_nccl/fake.h"

#include <stdatomic.h>

/* The library's state in this process. */
extern fake_nccl *nccl;
/* Takes the library of that file name, beside the program; before ranks begin. */
void library(const char *name);
extern _Thread_local int naps; /* sleeps of this thread */
/* The CPU's kernels compute in place of the emulated ones: fast. */
extern bool on_cpu_kernels;

/* Memory shared by all ranks of a test. */
typedef struct board {
    _Atomic int aborts, ids, inits, splits, left, ready;
    char error[8][1200];
} board;

extern board *b;

typedef int (*rank_fn)(kn_comm *w);

/* Runs fn on n ranks; returns the number of failures. */
int on(int n, rank_fn fn);
/* The same, where none may fail, abort or leave memory registered. */
void good(int n, rank_fn fn);
/* fn with hosts over TCP, for on and good: without shared memory the ranks exchange messages. */
rank_fn over_tcp(rank_fn fn);
/* GPU memory with this content. */
void *gpu(kn_memory *m, const void *from, size_t bytes);
/* The sum of mine over the ranks of c is want; false with an error. */
bool sum_of(kn_comm *c, int64_t mine, int64_t want);

#endif
