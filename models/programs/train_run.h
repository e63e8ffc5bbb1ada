/* models/programs/train_run.h: a run of train_gpt, which its files share. */
#ifndef KNAP_MODELS_PROGRAMS_TRAIN_RUN_H
#define KNAP_MODELS_PROGRAMS_TRAIN_RUN_H

#include "models/checkpoint.h"
#include "models/programs/measures.h"
#include "models/programs/report.h"
#include "models/programs/settings.h"
#include "models/run_folder.h"
#include "models/text.h"

typedef struct run {
    settings s;
    kn_options *options;
    kn_comm *world;
    kn_checkpoint *from; /* NULL: begins anew */
    kn_tokenizer *tokenizer;
    kn_text *text;
    kn_gpt model;
    kn_optim *optim;
    kn_scaler *scaler;     /* NULL: losses are not scaled */
    kn_run_folder *folder; /* rank 0's, with --out */
    FILE *log;
    int log_error, output_error; /* errno of the write that failed first */
    progress progress;
    measures *measures;
    kn_replay *replay; /* NULL: steps run as they come */
    kn_tensor *
        *fixed; /* [2 accum]: inputs and targets of a replayed step, which stay where they are */
    bool said;  /* why steps aren't recorded */
    int behind; /* steps that the host may be ahead */
    step_report report[2]; /* of this step and the one before, by the step's number */
    int64_t launched;      /* the step before this one was launched last */
    double taken;          /* when a step was last looked at */
    bool stop;             /* a rank was asked to: save at once, and end */
    float *losses;         /* [ranks, 2]: of an evaluation: loss, wants to stop */
    int64_t *x, *y;        /* [batch, ctx] */
    const char *program;
} run;

static inline bool first_rank(const run *r)
{
    return kn_rank(r->world) == 0;
}

/* ---- train_table.c: what people read ----------------------------------------------------------- */

/* The table at the start. Every rank calls it. false: standard output takes nothing, with an error. */
bool print_table(run *r);
void say_gpu_memory(const run *r);
void say_stopped(const run *r, int64_t step);
/* The progress line and the log's line of a step. A run that cannot be watched any more is asked to stop. */
void tell(run *r, const step_report *p);
/* Was everything written that the run told? Closes the log. */
bool end_output(run *r);

/* ---- train_step.c: computing -------------------------------------------------------------------- */

/* One optimizer step; step counts from 0. */
bool train_step(run *r, int64_t step);
/* Looks at what was measured until only keep steps are on their way; tells of those before the one that was
 * launched last. */
bool look(run *r, int keep);
/* Mean loss over the same validation batches at every call, summed in their order whichever rank
 * computed them. Every rank takes part in every forward, since that gathers. Left out where a rank was asked
 * to stop. */
bool evaluate(run *r, step_report *p);

#endif
