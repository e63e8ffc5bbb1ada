/* models/options.h: command-line options from one table. The table generates the parser, --help
 * (with defaults), the banner at the start, the record in a checkpoint, and the command that goes
 * on with a run.
 *
 *   typedef struct { int64_t steps; double lr; const char *data; bool recompute; } config;
 *   static const kn_option table[] = {
 *       { "steps", KN_OPTION_INT, offsetof(config, steps), "2000", "optimizer steps", .min = 1,
 *         .max = 1e9 },
 *       { "lr", KN_OPTION_FLOAT, offsetof(config, lr), "1e-3", "peak learning rate", .max = 10 },
 *       { "data", KN_OPTION_PATH, offsetof(config, data), "shakespeare", "data set or file" },
 *       { "recompute", KN_OPTION_FLAG, offsetof(config, recompute), NULL, "save memory" },
 *       { 0 },
 *   };
 *
 * Long names only: "--name value", "--name=value"; flags: "--name", "--no-name",
 * "--name=true|false". An unknown option, a missing or bad value, a value out of range, and an
 * option given twice with two values, unless it is one of .several, are errors; nothing is ever
 * ignored. */
#ifndef KNAP_MODELS_OPTIONS_H
#define KNAP_MODELS_OPTIONS_H

#include "comm/comm.h"
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The type of the field that an option fills. */
typedef enum kn_option_kind {
    KN_OPTION_INT = 1, /* int64_t; decimal */
    KN_OPTION_FLOAT,   /* double; finite */
    KN_OPTION_STRING,  /* const char *, owned by the kn_options; NULL without value and default */
    KN_OPTION_PATH,    /* the same; an empty text is an error */
    KN_OPTION_FLAG,    /* bool */
    KN_OPTION_CHOICE,  /* int: the index in choices */
    KN_OPTION_NAME,    /* const char *: the choice itself, owned by the kn_options */
    KN_OPTION_HEADING, /* no option: name is a heading of --help and the banner */
    /* No option: a line of --help for the arguments that are no options (kn_options_rest), called
     * name, as in "IMAGE...". Without such a row they are an error. */
    KN_OPTION_REST
} kn_option_kind;

/* What an option belongs to. */
typedef enum kn_option_scope {
    KN_OF_TRAINING = 0, /* a checkpoint records it, and a resumed run has it without being told */
    KN_OF_RUN,          /* where and how a run works: the command to go on repeats it */
    KN_OF_START,        /* how a run begins: neither, but a file of options has it */
    KN_OF_ONCE          /* what one start does: none of these */
} kn_option_scope;

/* Where a value comes from. */
typedef enum kn_option_origin {
    KN_VALUE_DEFAULT = 0, /* the table */
    KN_VALUE_DERIVED,     /* the program worked it out, since nobody chose another value */
    KN_VALUE_RESTORED,    /* a checkpoint: somebody chose it when the training began */
    KN_VALUE_GIVEN        /* the command line */
} kn_option_origin;

typedef struct kn_option {
    const char *name; /* without the dashes; a NULL name ends the table */
    kn_option_kind kind;
    size_t offset;       /* offsetof(struct, field) */
    const char *value;   /* the default as text; NULL: 0, false, the first choice, no text */
    const char *help;    /* one line */
    double min, max;     /* INT and FLOAT, inclusive; both 0: at least 0 (FLOAT and INT alike) */
    bool any;            /* INT and FLOAT: negative values are fine where min and max are 0 */
    const char *choices; /* CHOICE and NAME: "full_shard|no_shard" */
    const char *note;    /* shown by the help as the default instead of value ("one per core") */
    /* Options that may not be given together with this one: "a|b"; flags that are off may. */
    const char *clashes;
    /* It does something only beside another option: one of "a|b" that is set, or "a" with a value
     * of "a=x|y". Else to give it is an error (kn_options_check), unless it is off or 0 as it would
     * be anyway. */
    const char *with;
    kn_option_scope of;
    bool only_read; /* PATH: the program writes nothing there, so a checkpoint may name it */
    bool fixed;     /* a resumed run can't have another value than the checkpoint's */
    bool own;       /* each rank may have its own value: kn_options_agree compares all others */
    bool several;   /* STRING: given again, it has one value more, behind KN_OPTION_BETWEEN */
    const char
        *commands; /* of a program of several, those that take it: "train|encode"; NULL: all */
} kn_option;
#define KN_OPTION_BETWEEN "\036" /* between the values of .several, which can't have it */

typedef struct kn_options kn_options;

/* Fills the fields with the defaults. table and fields are borrowed and must live as long as the
 * result. A mistake in the table (bad default, name twice, choice without choices) is an error. */
KN_API kn_options *kn_options_create(const kn_option *table, void *fields);
/* Also frees the texts that STRING and PATH fields point at. NULL is fine. */
KN_API void kn_options_free(kn_options *o);

/* For small programs: kn_options_create, then kn_options_parse of the arguments that kn_init left
 * in argv, and kn_options_agree over kn_world(). With --help or --version rank 0 prints
 * that. NULL if the program must end: after these, and with an error.
 *
 *     kn_options *options = kn_options_main(table, &fields, argc, argv, "Trains an MLP on MNIST.");
 *     if (!options)
 *         return kn_finish(); */
KN_API kn_options *kn_options_main(const kn_option *table, void *fields, int argc,
                                   char *const *argv, const char *about);

/* Reads argv[1 .. argc-1]. "--help" and "--version" set kn_options_help_wanted, and nothing is
 * checked after them. */
KN_API bool kn_options_parse(kn_options *o, int argc, char *const *argv);
/* Whether every option that was given does something (.with); else false with an error. Call it
 * where no file and no checkpoint sets others any more; kn_options_main does. */
KN_API bool kn_options_check(const kn_options *o);
KN_API bool kn_options_help_wanted(const kn_options *o);
/* Whether all ranks of comm (NULL: kn_world()) have the same options; else false, with an error
 * that names the first one that differs and its value on two ranks. A path with a slash may be
 * another on each machine: only that all have one is compared. Options that are .own aren't.
 * Collective: call it after kn_options_parse, before the values say which collectives come. */
KN_API bool kn_options_agree(kn_options *o, kn_comm *comm);
/* Writes "usage", an optional paragraph about the program, and a line an option; after --version
 * only the program's name and the version of Knap. */
KN_API void kn_options_help(const kn_options *o, FILE *out, const char *program, const char *about);
/* Writes the values in force as a table; those that were given are marked with a star. */
KN_API void kn_options_banner(const kn_options *o, FILE *out);

/* Sets the options that the file at path holds as if they were given on the command line; those
 * that were, and what contradicts them, stay. The file is a subset of TOML: "name = value" a line
 * and comments behind "#", where a value is a text in quotes, a number, true or false. An unknown
 * name, a value of another type, a name twice, and all else of TOML are errors with the line. Call
 * it after kn_options_parse, before kn_options_agree. At most 1 MiB. */
KN_API bool kn_options_load(kn_options *o, const char *path);
/* Such a file's text: the options that were chosen but for KN_OF_ONCE, and the others' values as
 * comments. The caller frees it (kn_host_free). NULL with an error. */
KN_API char *kn_options_toml(const kn_options *o);

/* Sets one option as if it were given on the command line, replacing any earlier value. */
KN_API bool kn_options_set(kn_options *o, const char *name, const char *value);
/* Sets a number that was left open, that is to say whose value is the table's, to the value that
 * the program works out of others; may be repeated. Without effect on a value that was chosen. */
KN_API bool kn_options_derive(kn_options *o, const char *name, double value);
/* Sets one option to the value that a checkpoint recorded. One given on the command line stays (an
 * error where the option is .fixed and the values differ), and one that was KN_VALUE_DERIVED is
 * left open, to be derived again. Checkpoints may come from untrusted sources, so options that
 * aren't KN_OF_TRAINING and paths that aren't .only_read are errors. */
KN_API bool kn_options_restore(kn_options *o, const char *name, const char *value,
                               kn_option_origin origin);
/* True if the option was given (command line or kn_options_set); false for unknown names. */
KN_API bool kn_options_given(const kn_options *o, const char *name);

/* The value in force as text, valid until it changes; NULL: none, without an error. */
KN_API const char *kn_options_value(const kn_options *o, const char *name);

/* The arguments that are no options, in their order, ended by NULL; borrowed from o and argv. */
KN_API char *const *kn_options_rest(const kn_options *o);

typedef struct kn_option_record {
    const kn_option *row; /* of the table */
    const char *name;
    /* As text, from which kn_options_restore recovers it exactly; "" for no text. */
    const char *value;
    kn_option_origin origin;
    const char *saved; /* the text that a checkpoint recorded; NULL: none */
    bool changed;      /* value and saved mean different things: 0.001 is 1e-3 */
} kn_option_record;

/* The i-th option, i = 0, 1, ... (headings are skipped); false after the last. The texts are valid
 * until the next call on o. */
KN_API bool kn_options_record(kn_options *o, int i, kn_option_record *record);

/* The options of KN_OF_RUN that were given, as a shell reads them: " --layout ragged --log 'my
 * log'". The caller frees it (kn_host_free). NULL with an error. */
KN_API char *kn_options_command(kn_options *o);

#ifdef __cplusplus
}
#endif
#endif
