/* models/programs/report.h: a trainer's printed output: the table at the start, the progress
 * line. */
#ifndef KNAP_MODELS_PROGRAMS_REPORT_H
#define KNAP_MODELS_PROGRAMS_REPORT_H

#include "kernels/memory.h"
#include <stdio.h>

/* The results of a finished step. */
typedef struct step_report {
    int64_t step, steps; /* done, planned */
    int64_t samples;     /* trained so far */
    double loss, val_loss, lr, grad_norm;
    double accuracy; /* of the validation, 0 to 1 */
    bool has_val, has_accuracy;
    double perplexity, bits_per_byte; /* of the validation; 0: unknown, or of no language model */
    double begun;                     /* time of the start */
    double seconds; /* of the training step: on a GPU, between the arrivals of two steps' results */
    double muon;    /* kn_muon_seconds; 0: another optimizer, or unknown */
    int64_t items;
    kn_ledger ledger; /* peaks of this step */
} step_report;

typedef struct progress {
    bool tty;
    const char *item;  /* the unit of work: "tokens" */
    double per_second; /* items/s, smoothed */
    double last;       /* time of the last line */
    /* model FLOPs utilisation: shown where has_mfu; "n/a" where peak_flops is 0 */
    bool has_mfu;
    double item_flops, peak_flops; /* peak_flops: of all ranks, a second */
} progress;

/* One row of the table at the start. */
void report_row(const char *name, const char *format, ...) KN_PRINTF(2, 3);
/* "12.3 MB" into buf. */
const char *report_bytes(double bytes, char *buf, size_t size);

void progress_begin(progress *p, const char *item);
/* FLOP/s of a GPU's data sheet for dense products (16-bit floats, TF32, or f32), by the GPU's name;
 * 0 if unknown. */
double report_peak(const char *gpu, bool half, bool tf32);
/* "val 1.5, perplexity 4.48, 2.16 bits/byte", or with a share of right ones, into buf. */
const char *report_evaluation(const step_report *r, char *buf, size_t size);
/* In place on a terminal; else a line about every 10 s, at evaluations and at the end. false:
 * writing to standard output failed (errno). */
bool progress_step(progress *p, const step_report *r);

#endif
