/* tests/nn/recompute_rows.h: programs that run once without and once with recompute: both give the
 * same numbers to the last bit, or, where the row has a text, the one with recompute refuses with
 * it. Each calls net, whose part recomputes in one of the two runs. */
#ifndef KNAP_TESTS_NN_RECOMPUTE_ROWS_H
#define KNAP_TESTS_NN_RECOMPUTE_ROWS_H

#include "nn/hooks.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "tests/kn_test.h"

enum { WIDE = 4 };

/* Its forward is the row's. */
typedef struct part {
    kn_module base;
    kn_linear fc;
    kn_dropout drop;
    kn_batch_norm bn;
    kn_tensor *buffer; /* [WIDE] */
    kn_tensor *captured;
    int runs;
} part;
typedef struct net {
    kn_module base;
    part p;
    kn_linear head;
} net;
extern net n;

typedef struct row {
    const char *name;
    kn_tensor *(*part)(part *p, kn_tensor *x);
    void (*program)(void);
    const char *refuses;
    bool plain_refuses; /* too */
} row;
void run_rows(const row *rows, int count);

/* The numbers of a run. A gradient that isn't there is one, too. */
void note_value(double v);
void note(const kn_tensor *t);
void note_grads(void);                     /* of net's parameters */
kn_tensor *count(kn_tensor *g, void *arg); /* a hook that notes g and counts in the int at arg */

bool recomputes(void);            /* this run is the one with recompute */
kn_tensor *data(uint64_t stream); /* [3, WIDE] */
kn_tensor *leaf(uint64_t stream);
kn_tensor *total(kn_tensor *y); /* of the squares */
kn_tensor *w(const void *linear);
kn_tensor *plain(part *p, kn_tensor *x); /* tanh(fc(x)) */
kn_tensor *forward(void);                /* of net; its total, noted */
void backward(kn_tensor *y);             /* and its gradients, noted */
void simple(void);                       /* both */

#endif
