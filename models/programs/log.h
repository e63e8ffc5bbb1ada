/* models/programs/log.h: a run's values by steps, in files: a JSON object a line, a table (CSV),
 * and TensorBoard's event files. Only rank 0 has one. */
#ifndef KNAP_MODELS_PROGRAMS_LOG_H
#define KNAP_MODELS_PROGRAMS_LOG_H

#include "models/programs/report.h"

typedef struct run_log run_log;

#define LOG_FILE "log.jsonl" /* in a run's folder */

typedef struct log_options {
    const char *item;   /* the unit of the counts: "tokens" */
    const char *out;    /* OUT/log.jsonl; NULL: none */
    const char *file;   /* a table where its name ends in .csv, else JSON; NULL: none */
    const char *folder; /* for TensorBoard; NULL: none */
    /* The run goes on behind so many samples and steps: later ones are cut off from the files. */
    bool goes_on;
    int64_t samples, step;
} log_options;

/* The path of JSON lines of a run: --log (file), where those are JSON, else of its folder out, in
 * path[size]; NULL: there are none. */
const char *log_of_json(const char *file, const char *out, char *path, size_t size);
/* Opens the files; NULL with an error. The texts are borrowed. */
run_log *log_open(log_options o);
/* Writes a step's values; floats have 9 digits, from which their bits can be recovered; null, or
 * nothing in a table, where they are not finite. false: a file failed, now or before. */
bool log_step(run_log *l, const step_report *r);
/* Closes the files and frees l, which may be NULL. False with an error where one failed. */
bool log_close(run_log *l);

/* ---- a value of a step ----------------------------------------------------------------------- */

typedef struct log_value {
    char name[48];      /* "peak_bytes/total": total in the object peak_bytes of JSON */
    const char *format; /* of the value; NULL: a whole number */
    double value;       /* one that isn't finite: it has none */
    bool optional;      /* JSON leaves it out then */
} log_value;
enum { LOG_VALUES = 16 + KN_MEM_COUNT };

/* ---- events.c: TensorBoard's files ----------------------------------------------------------- */

/* Begins a new file in the folder, which is made where it isn't there; steps of earlier files from
 * this one on are void. path[size] gets its name. NULL with an error. */
FILE *events_open(const char *folder, int64_t from, char *path, size_t size);
/* The values of a step as one event. False: writing failed (errno). */
bool events_step(FILE *out, int64_t step, const log_value *value, int count);

/* ---- losses.c: reading a log ----------------------------------------------------------------- */

/* Calls take for each line of the file, until it is false; at: its place, cut: it has no end, as
 * after a crash. Without a file: nothing, where may_lack. */
bool log_lines(const char *path, bool (*take)(const char *line, off_t at, bool cut, void *arg),
               void *arg, bool may_lack);

#endif
