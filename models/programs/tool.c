/* models/programs/tool.c: the main of programs of several commands, and their bar. */
#include "models/programs/tool.h"
#include "comm/comm_internal.h"
#include "kernels/trace.h"
#include "models/options_internal.h"

#include <stdio.h>
#include <unistd.h>

/* The options that were given are the command's. */
static bool belong(const kn_option *table, const kn_options *o, const char *command)
{
    for (const kn_option *r = table; r->name; r++) {
        if (r->kind == KN_OPTION_REST && (!command || !kn_is_listed(r->name, command)))
            return true; /* the program says what there is */
        if (r->commands && kn_options_given(o, r->name) && !kn_is_listed(r->commands, command))
            return kn_fail("%s: --%s is only for %s; leave --%s out", command, r->name, r->commands,
                           r->name);
    }
    return true;
}

int tool_main(const tool *t, int argc, char **argv)
{
    kn_options *o = kn_open_standard() ? kn_options_create(t->table, t->settings) : NULL;
    if (o && kn_options_parse(o, argc, argv)) {
        char *const *word = kn_options_rest(o);
        int words = 0;
        while (word[words])
            words++;
        if (kn_options_help_wanted(o) || argc == 1)
            kn_options_help(o, argc == 1 ? stderr : stdout, t->name, t->about);
        if (!kn_options_help_wanted(o) && belong(t->table, o, word[0]) && kn_options_check(o))
            t->run(word, words); /* without words: it asks for a command */
    }
    kn_options_free(o);
    return kn_finish();
}

#define BAR_AFTER 1.0 /* seconds: what takes less needs no bar */

void bar_begin(bar *b, const char *what, int64_t all)
{
    *b = (bar){ what, 0, all, -1, isatty(STDERR_FILENO), kn_now() };
}

void bar_move(int64_t more, void *arg)
{
    static const char full[] = "########################################";
    bar *b = arg;
    b->done += more;
    int now = b->all > 0 ? (int)(100 * ((double)b->done / (double)b->all)) : 100;
    now = now > 100 ? 100 : now;
    if (!b->tty || now == b->shown || kn_now() - b->begun < BAR_AFTER)
        return;
    fprintf(stderr, "\r%s [%-40.*s] %3d %%", b->what, now * 40 / 100, full, now);
    b->shown = now;
}

void bar_end(const bar *b)
{
    if (b->tty && b->shown >= 0)
        fprintf(stderr, "\n");
}
