/* comm/launch/say.c: the error that stands, on stderr: when the program ends, and when it crashes.
 * A program that goes on after an error often dies of a NULL. Runs in handlers of signals: it takes
 * no memory and no lock. */
#include "comm/launch/launch.h"
#include "kernels/context.h"
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static kn_context *_Atomic shown; /* whose error a crash prints; NULL: none's */

/* The others only repeat it. Of a crash the ranks of one host have a common note; others can't be
 * asked in a handler. */
static bool speaks(kn_comm *world, const char *error, bool crashes)
{
    if (crashes && strcmp(world->ops->backend, "local") != 0)
        return strncmp(error, "rank ", 5) != 0;
    return !world->ops->speaks || world->ops->speaks(world);
}

static struct iovec text_of(const char *text)
{
    return (struct iovec){ (void *)(uintptr_t)text, strlen(text) };
}

void kn_say_error(const kn_context *c, bool crashes)
{
    kn_comm *world = c->init_state;
    const char *error = c->error;
    const bool alone = !world || world->size == 1 || kn_comm_is_forked(world->world);
    char number[16] = "", *digit = number + sizeof number - 1;
    const bool first = error && (alone || speaks(world, error, crashes));
    /* The supervisor's ranks share its standard error; other launchers may keep a log for each. */
    if (!error || (!first && (crashes || kn_comm_started_ranks())))
        return;
    for (int rank = alone ? 0 : world->rank; digit == number + sizeof number - 1 || rank > 0;
         rank /= 10)
        *--digit = (char)('0' + rank % 10);
    /* it names ranks itself */
    const bool named = alone || (first && strncmp(error, "rank ", 5) == 0);
    const struct iovec line[] = { text_of("knap: "),
                                  text_of(named ? "" : "rank "),
                                  text_of(named ? "" : digit),
                                  text_of(named   ? ""
                                          : first ? ": "
                                                  : " ends: "),
                                  text_of(error),
                                  text_of("\n") };
    if (writev(STDERR_FILENO, line, sizeof line / sizeof *line) < 0)
        return; /* nobody reads it */
}

static void on_crash(int sig)
{
    const kn_context *c = atomic_exchange(&shown, NULL);
    if (c)
        kn_say_error(c, true);
    raise(sig); /* the default action has come back; it comes at the handler's end */
}

void kn_say_at_crash(kn_context *c)
{
    static const int crashes[] = { SIGSEGV, SIGBUS, SIGFPE, SIGABRT };
    struct sigaction before,
        action = { .sa_handler = on_crash, .sa_flags = (int)(SA_RESETHAND | SA_ONSTACK) };
    atomic_store(&shown, c);
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++)
        if (sigaction(crashes[i], NULL, &before) == 0 && !(before.sa_flags & SA_SIGINFO) &&
            before.sa_handler == SIG_DFL)
            sigaction(crashes[i], &action, NULL);
}

void kn_say_nothing(const kn_context *c)
{
    kn_context *expected = (kn_context *)(uintptr_t)c;
    atomic_compare_exchange_strong(&shown, &expected, NULL);
}
