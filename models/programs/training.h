/* models/programs/training.h: what trainers of any model have in common: the way of a program from
 * its options to its end, and the loop of steps, evaluation, saving, samples, progress, stopping. A
 * program describes what is its own by a trainer, and calls training_main. Every rank runs the same
 * statements; only rank 0 prints and writes. */
#ifndef KNAP_MODELS_PROGRAMS_TRAINING_H
#define KNAP_MODELS_PROGRAMS_TRAINING_H

#include "fsdp/ema.h"
#include "fsdp/replay.h"
#include "models/family.h"
#include "models/record.h"
#include "models/programs/log.h"
#include "models/programs/losses.h"
#include "models/programs/measures.h"
#include "models/programs/report.h"
#include "models/programs/settings.h"

/* The tensors of a micro-batch. */
typedef struct batch {
    kn_tensor *x, *y;  /* inputs, targets */
    kn_tensor *more;   /* another input of the model; NULL: none */
    kn_tensor *weight; /* of its loss among a step's; NULL: 1 */
    double bytes;      /* of text that the targets of a validation stand for; 0: unknown, or none */
} batch;

typedef struct training training;

/* A program that trains. Its run is a struct whose first member is a training, and its settings one
 * whose first member is a settings. On failure functions set an error. */
typedef struct trainer {
    const char *name, *about;   /* of --help */
    const char *item;           /* the unit of the counts: "tokens" */
    bool of_tokens;             /* the loss is one of tokens, which has a perplexity */
    bool (*table)(settings *s); /* makes the table of options */
    /* Options are read, the checkpoint to resume from is open: checks the options, opens the data,
     * declares the model on meta, and fills in the part of t that is the program's. */
    bool (*open)(training *t);
    bool (*declare)(training *t); /* the model on meta once more, after it was freed */
    bool (*sharded)(training *t); /* the model is, and not loaded yet; may be NULL */
    bool (*ready)(training *t);   /* before the first step; may be NULL */
    bool (*end)(training *t);     /* after the last one; may be NULL */
    void (*free)(training *t);
    kn_values (*example)(training *t); /* inputs of a micro-batch on meta, for --summary */
    /* rows of the start table, before and after the number of parameters */
    void (*print_model)(const training *t);
    void (*print_data)(const training *t);
    /* Micro-batch number micro of a step, or (validation) batch number micro of the validation set,
     * on device, made in the scope around. The same shapes at each call. */
    bool (*batch)(training *t, bool validation, int64_t step, int64_t micro, kn_device device,
                  batch *b);
    kn_tensor *(*loss)(training *t, const batch *b); /* their mean loss; one call of the model */
    bool (*sample)(training *t); /* prints a sample of the model's output; may be NULL */
    /* Sets p's val_loss, and more that belongs to an evaluation; collective. NULL: the mean loss of
     * --eval-steps validation batches. */
    bool (*evaluate)(training *t, step_report *p);
    /* What an evaluation changes in the model, before it; collective; may be NULL. */
    bool (*settle)(training *t);
} trainer;

#define FOLDER 4096 /* bytes of a path */

struct training {
    const trainer *of;
    settings *s;
    const char *program; /* argv[0] */
    kn_comm *world;
    kn_device device;
    kn_options *options;
    /* the program's, by its .open */
    kn_module model;
    const kn_family *family;       /* the model's, whose blocks are units and recompute */
    int64_t items;                 /* of a micro-batch */
    double item_flops;             /* of an item's forward and backward; 0: unknown */
    kn_schedule lr;                /* else a cosine from --lr to --min-lr */
    char *config;                  /* kn_checkpoint_save's; owned */
    const kn_tokenizer *tokenizer; /* saved beside it; may be NULL */
    bool over;                     /* there is nothing to train */
    losses *curves;                /* of rank 0; filled by the loop, and from the log; NULL: none */
    /* made before the first step */
    kn_optim *optim;
    kn_scaler *scaler; /* NULL: losses are not scaled */
    kn_ema *ema;       /* NULL: no averages of the weights */
    /* made by training_open, freed by training_end */
    kn_checkpoint *from;              /* NULL: begins anew */
    char out[FOLDER], resume[FOLDER]; /* "": none; the folders that the options stand for */
    kn_run_folder *folder;            /* with --out */
    char *record, *tokens;            /* what a save holds of the program; NULL: nothing */
    char *command;                    /* options that the command to go on repeats */
    /* where the training stands, in samples: set by training_place */
    int64_t rows;        /* samples of a step, of all ranks */
    int64_t begin;       /* the first step of this run, from 0 */
    int64_t before;      /* samples before step 0: less than a step's */
    int64_t rows_then;   /* of the checkpoint's steps; 0: begins anew */
    char data[192];      /* set by training_same_data */
    char data_then[192]; /* the checkpoint's, where it is another; "": none */
    /* made by training_begin, freed by training_end */
    run_log *log;     /* of rank 0, with a file to write */
    losses *plot;     /* of rank 0, with --plot */
    int output_error; /* errno of the write that failed first */
    progress progress;
    measures *measures;
    kn_replay *replay;     /* NULL: steps aren't recorded */
    batch *fixed;          /* [accum]: inputs of a replayed step, at fixed addresses */
    bool printed_why;      /* the reason for not recording steps was printed */
    int behind;            /* steps by which the host may be ahead of the device */
    step_report report[2]; /* of this step and the one before, by the step's number */
    int64_t step;          /* the running one, from 0 */
    int64_t launched;      /* steps launched so far */
    double taken;          /* time at which measurements were last taken */
    bool stop;             /* a stop was requested on some rank: save and end */
    bool save_now;         /* a save was requested on some rank: save, and go on */
    int saves;             /* in the background, so far, modulo MEASURES_SAVES */
    int64_t saved_step;    /* of the last save; -1: none, or it failed */
    bool saves_later;      /* it is in the background, and nobody asked yet how it ended */
    int64_t best_step;     /* with --keep-best; -1: none yet */
    double best;           /* its score */
    double least;          /* the best score of all evaluations, kept or not; NAN: none yet */
    int64_t worse;         /* evaluations since then */
    bool early;            /* as many as --patience: save and end */
    int64_t record_first, record_last; /* of --record and --explain, from 1; 0: no step */
};

static inline bool first_rank(const training *t)
{
    return kn_rank(t->world) == 0;
}

/* ---- trainer.c: from options to the end ------------------------------------------------------ */

/* A whole program: t is zeros but for .of and .s. Returns what main returns. */
int training_main(training *t, int argc, char **argv);
/* True if steps remain before --steps, --stop-after and the end of --patience, or none are asked
 * for (--eval-only); else an error that asks for a larger --option. */
bool training_has_steps(const training *t, const char *option);
/* Shards the model, which has no values yet. */
bool training_shard(training *t, kn_fsdp_wrap_options o);
/* Makes the optimizer, and what goes with it. */
bool training_make_optim(training *t);
/* Frees these and the model; none of them need be there. */
void training_free_model(training *t);

/* ---- recording.c: --record and --explain ----------------------------------------------------- */

bool recording_ready(training *t); /* which steps; before the first one */
/* Around each step, which counts from 0. */
bool recording_begin(training *t, int64_t step);
bool recording_end(training *t, int64_t step);
bool recording_over(training *t, int64_t steps); /* the run ended, after so many */

/* ---- training.c: the loop -------------------------------------------------------------------- */

/* Claims --out, or the folder of --resume where that is not given, if a checkpoint is there; opens
 * the one to resume from and sets the options that it recorded, and "out" where it was not given.
 * --resume is a folder, or latest or auto, which stand for --out. */
bool training_open(training *t);
/* Opens the log, claims the folder. The model is sharded and loaded. */
bool training_begin(training *t);
/* Trains to the end, or until a request to stop. */
bool training_run(training *t);
/* Frees what training_open and training_begin made. */
void training_end(training *t);
/* Waits for a save in the background, if there is one. Collective. */
void training_wait_for_save(training *t);
/* True on all ranks if a stop was requested on any. Collective; arg is the training. */
bool training_stop_requested(void *arg);

/* ---- resume.c: a training's place and data in a checkpoint ----------------------------------- */

/* Sets where the training stands. It counts samples, so where this run's steps have another number
 * of rows than the checkpoint's, the steps behind it and the options in steps that weren't given
 * anew become as many as have the same samples. */
bool training_place(training *t);
/* Samples that were trained before that step. */
int64_t training_samples(const training *t, int64_t step);
/* Whether all ranks read the same data, as text and a hash say, and the same as the checkpoint's
 * unless --other-data; else an error on all of them. Collective. */
bool training_same_data(training *t, const char *text, uint64_t hash);
/* Whether the options make the model that the checkpoint has: then->family is NULL where there is
 * no checkpoint. Else an error, before a load that would refuse it by the names of tensors, or not
 * see it. */
bool training_same_model(const training *t, const kn_model_config *now,
                         const kn_model_config *then);
/* What a save holds of the program, as the training stands. The caller frees it (kn_host_free);
 * NULL with an error. */
char *training_record(const training *t);
/* The rows of the start table. */
void print_resumed(const training *t);

/* ---- training_step.c: computing -------------------------------------------------------------- */

/* One optimizer step; step counts from 0. */
bool train_step(training *t, int64_t step);
/* Takes measurements until only keep steps are pending; reports the steps before the one launched
 * last. */
bool take_measurements(training *t, int keep);
/* The trainer's evaluation; else the mean loss over the same validation batches at every call,
 * summed in the same order on any number of ranks. Every rank takes part in every forward, which is
 * collective. Skipped after a stop request. */
bool evaluate(training *t, step_report *p);

/* A step on meta, whose inputs are the trainer's example, without measurements. */
bool train_step_on_meta(training *t);

/* ---- fit.c ----------------------------------------------------------------------------------- */

/* --fit: rehearses steps on meta, prints a table and a command. The options are read. */
bool training_fit(training *t);

/* ---- training_table.c: printed output -------------------------------------------------------- */

/* Prints the rows of the start table that every model has, after the program's own rows. Rank 0
 * prints. false with an error: writing to standard output failed. */
bool print_run(training *t, const kn_fsdp_memory *m);
void print_gpu_memory(const training *t);
/* --help */
void print_help(const training *t, const char *program, const char *about);
/* After a request to stop, or by --patience. */
void print_stopped(const training *t, int64_t step);
/* A save that was requested is done, if there is a folder. */
void print_saved(const training *t, int64_t step);
/* With --keep-best: which checkpoint it is. */
void print_best(const training *t);
/* --plot: the losses so far. */
void print_plot(const training *t);
/* The progress line and the log's line of a step. Requests a stop if they can't be written. */
void report_step(training *t, const step_report *p);
/* --eval-only: the evaluation of a model. */
void print_evaluation(const training *t, const step_report *p);
/* Closes the log. False with an error if some output of the run couldn't be written. */
bool end_output(training *t);

#endif
