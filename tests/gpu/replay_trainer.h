/* tests/gpu/replay_trainer.h: training steps of a small GPT on a GPU, run as they are or recorded
 * and replayed, and what the tests compare of both. */
#ifndef KNAP_TESTS_REPLAY_TRAINER_H
#define KNAP_TESTS_REPLAY_TRAINER_H

#include "knap.h"
#include "tests/kn_test.h"

enum { STEPS = 8, MICRO = 2, IDS = 16, VALUES = 8192 };

typedef struct trainer {
    kn_gpt model;
    kn_optim *opt;
    kn_scaler *scaler;
    kn_tensor *x[MICRO], *y[MICRO], *loss, *norm; /* at fixed addresses */
    kn_replay *replay;
    int calls;
} trainer;

/* Losses, then parameters. */
typedef struct record {
    float loss[STEPS][MICRO], norm[STEPS];
    float param[VALUES];
    int64_t values, step, optim_steps;
} record;

bool trainer_begin(trainer *t, kn_dtype dtype, bool replayed);
void trainer_end(trainer *t);
/* The batches and the learning rate of step n. */
bool trainer_feed(trainer *t, int64_t n);
/* A whole step of the trainer: MICRO backwards, a clip, kn_step. */
bool trainer_step(void *trainer);
bool trainer_read(trainer *t, record *r);

/* STEPS steps of fn; between, which may be NULL, runs after each. */
void train(record *r, kn_dtype dtype, kn_step_fn fn, bool replayed,
           void (*between)(trainer *t, int n));
void records_same(const record *a, const record *b, const char *what);

#endif
