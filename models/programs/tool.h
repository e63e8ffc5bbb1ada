/* models/programs/tool.h: programs of several commands, knap-checkpoint and knap-tokenize: words
 * and options in any order, and a bar that shows how far they are. */
#ifndef KNAP_MODELS_PROGRAMS_TOOL_H
#define KNAP_MODELS_PROGRAMS_TOOL_H

#include "models/options.h"

typedef struct tool {
    const char *name, *about;
    const kn_option *table; /* begins with KN_OPTION_REST, named after the commands */
    void *settings;         /* that the table's options fill */
    /* The words among the arguments: a command and what it is about. */
    bool (*run)(char *const *word, int words);
} tool;

/* A main: the exit status. Without arguments it prints the help, too, and is 1. */
int tool_main(const tool *t, int argc, char **argv);

/* A bar on the terminal, of what takes long; nothing elsewhere. */
typedef struct bar {
    const char *what;
    int64_t done, all;
    int shown; /* per cent; -1: nothing yet */
    bool tty;
    double begun;
} bar;

void bar_begin(bar *b, const char *what, int64_t all);
void bar_move(int64_t more, void *bar); /* so much more is done */
void bar_end(const bar *b);

#endif
