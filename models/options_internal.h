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
    bool help;    /* --help, or */
    bool version; /* --version: it asks for something else than the work, too */
    char **rest;  /* of KN_OPTION_REST; NULL: none was read */
    int rests;
};

/* The field of an option while its text is read. */
typedef union kn_option_field {
    int64_t whole;
    double number;
    int choice;
    bool on;
    const char *text;
} kn_option_field;
/* What an option of each kind has. */
typedef struct kn_option_kind_row {
    size_t size;                                                                 /* of its field */
    bool (*parse)(const kn_option *p, const char *text, kn_option_field *field); /* all but .text */
    const char *placeholder, *takes; /* in the help; in a file of options */
} kn_option_kind_row;
extern const kn_option_kind_row kn_option_kinds[KN_OPTION_HEADING];

/* A row that is an option, and one of those with .choices. */
static inline bool kn_option_is_one(const kn_option *p)
{
    return p->kind != KN_OPTION_HEADING && p->kind != KN_OPTION_REST;
}
static inline bool kn_option_chooses(const kn_option *p)
{
    return p->kind == KN_OPTION_CHOICE || p->kind == KN_OPTION_NAME;
}

/* The next word of a list "a|b" from *at on into word[64]; false: there is none. And whether a list
 * has a word. */
bool kn_next_word(const char **at, char word[64]);
bool kn_is_listed(const char *list, const char *word);
/* Whether the command line or a file of options asks for row i: not by a flag that is off. */
bool kn_option_asks(const kn_options *o, int i);

/* kn_options_command for options of these scopes, a bit each. */
char *kn_options_words(kn_options *o, unsigned scopes);
/* The row of that name, of so many characters; -1: none. */
int kn_options_find(const kn_options *o, const char *name, size_t length);
/* The error for a name that the table doesn't have; false. */
bool kn_options_fail_unknown(const kn_options *o, const char *name, size_t length);
/* Sets row i to a text of the command line or a file; the same option with another value is an
 * error. */
bool kn_options_give(kn_options *o, int i, const char *text);
/* No two that contradict each other were given. */
bool kn_options_check_clashes(const kn_options *o);

/* The shortest text that means the number; text. */
const char *kn_number_text(double number, char text[32]);
/* Ends a stream into *text (open_memstream; NULL: it failed), which the text that it returns
 * replaces; for kn_host_free, NULL with an error. */
char *kn_options_end(FILE *out, char **text);

#endif
