/* models/programs/recorded.h: a recording that was read and checked. docs/recording.md gives its
 * form; the names of fields are the keys of the file. */
#ifndef KNAP_MODELS_PROGRAMS_RECORDED_H
#define KNAP_MODELS_PROGRAMS_RECORDED_H

#include "models/tokens/tokens.h"

/* clang-format off */
typedef enum event_kind {
    STEP, CALL, RUN, WAIT, VERB, TAKE, GIVE, VALUE, NUMBER, NOTE, KINDS
} event_kind;
/* clang-format on */

/* Texts are numbers of names; 0: missing, "". Of an event on its rank r at t microseconds. */
typedef struct event {
    event_kind k;
    int32_t r, w, s, m, c, x, p, a, o, h, v;
    bool worker; /* the host's thread didn't run it */
    double t, d, f, b, l, q, n;
    int64_t line; /* of the file */
} event;

/* Where a key of the file lies in event; at least `least`. */
typedef struct event_key {
    const char *key;
    size_t at;
    bool text;
    double least;
} event_key;
extern const event_key event_keys[]; /* a NULL key ends them */
extern const char *const event_kinds[KINDS];

typedef struct recording {
    const char *path; /* borrowed */
    json_t *head;     /* the first line: what the page relies on was checked */
    int ranks, shards;
    bool inlines; /* the host's thread runs what has no q: the streams of a CPU without workers */
    event *event; /* of all ranks, in order of their times */
    int64_t events, room;
    kn_strings names; /* the first is "" */
} recording;

/* False with an error that names file and line. The caller frees r, after an error too. */
bool recording_read(recording *r, const char *path);
void recording_free(recording *r);

/* Runs a trainer's command, with more options and those that record it into path. It prints to
 * standard error. False with an error where it fails. */
bool recording_make(const char *command, const char *more, const char *path);

static inline const char *name_of(const recording *r, int32_t number)
{
    return kn_strings_text(&r->names, number);
}
/* Whether the event ran a collective. */
bool is_collective(const recording *r, const event *e);
/* head.object.key, 0 where it is missing. */
double head_number(const recording *r, const char *object, const char *key);

#endif
