/* models/programs/tool.c: the main of programs of several commands, and their bar. */
#include "models/programs/tool.h"
#include "comm/comm_internal.h"
#include "kernels/memory.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Whether the option's value is the argument behind it. */
static bool takes_next(const kn_option *table, const char *option)
{
    for (; table->name; table++)
        if (table->kind == KN_OPTION_FLAG &&
            (strcmp(option, table->name) == 0 ||
             (strncmp(option, "no-", 3) == 0 && strcmp(option + 3, table->name) == 0)))
            return false;
    return !strchr(option, '=') && strcmp(option, "help") != 0;
}

/* Options and their values, then the other arguments; returns where those begin. sorted has room
 * for twice as many. */
static int options_first(const kn_option *table, int argc, char **argv, char **sorted)
{
    char **word = sorted + argc;
    int n = 0, words = 0;
    for (int i = 0; i < argc; i++) {
        bool option = i > 0 && strncmp(argv[i], "--", 2) == 0;
        if (i > 0 && !option) {
            word[words++] = argv[i];
            continue;
        }
        sorted[n++] = argv[i];
        if (option && takes_next(table, argv[i] + 2) && i + 1 < argc)
            sorted[n++] = argv[++i];
    }
    memcpy(sorted + n, word, (size_t)words * sizeof *word);
    return n;
}

int tool_main(const tool *t, int argc, char **argv)
{
    char **sorted =
        kn_open_standard() ? kn_host_calloc(2 * (size_t)argc + 1, sizeof *sorted) : NULL;
    kn_options *o = sorted ? kn_options_create(t->table, t->settings) : NULL;
    if (o) {
        int n = options_first(t->table, argc, argv, sorted);
        if (kn_options_parse(o, n, sorted)) {
            if (kn_options_help_wanted(o) || argc == 1)
                kn_options_help(o, stdout, t->name, t->about);
            else
                t->run(sorted + n, argc - n);
        }
    }
    kn_options_free(o);
    kn_host_free(sorted);
    return kn_finish();
}

void bar_begin(bar *b, const char *what, int64_t all)
{
    *b = (bar){ what, 0, all, -1, isatty(STDERR_FILENO) };
}

void bar_move(int64_t more, void *arg)
{
    static const char full[] = "########################################";
    bar *b = arg;
    b->done += more;
    int now = b->all > 0 ? (int)(100 * ((double)b->done / (double)b->all)) : 100;
    now = now > 100 ? 100 : now;
    if (b->tty && now != b->shown)
        fprintf(stderr, "\r%s [%-40.*s] %3d %%", b->what, now * 40 / 100, full, now);
    b->shown = now;
}

void bar_end(const bar *b)
{
    if (b->tty && b->shown >= 0)
        fprintf(stderr, "\n");
}
