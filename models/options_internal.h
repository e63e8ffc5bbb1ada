/* models/options_internal.h (private): the object of options.c, which options_text.c prints. */
#ifndef KNAP_MODELS_OPTIONS_INTERNAL_H
#define KNAP_MODELS_OPTIONS_INTERNAL_H

#include "models/options.h"

#define WORD_MAX 48 /* characters of a suggestion, a choice, the head of a line of the help */

/* The state of one row of the table besides its field. */
typedef struct kn_option_value {
    char *text; /* the value in force, NULL: none; STRING and PATH fields point here */
    kn_option_origin origin;
    char *saved; /* that a checkpoint recorded; NULL: none */
} kn_option_value;

struct kn_options {
    const kn_option *table;
    char *fields;
    kn_option_value *values; /* [count], parallel to the table */
    int count;
    bool help;
};

/* The row of that name, of so many characters; -1: none. */
int kn_options_find(const kn_options *o, const char *name, size_t length);

#endif
