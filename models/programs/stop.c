/* models/programs/stop.c: requests to stop, and to save. */
#include "models/programs/stop.h"
#include "kernels/trace.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#define REPEAT_NS 1000000000 /* a repeat of the request within this time doesn't count */

static const char NOTICE[] = "\nknap: stopping: the run saves as soon as it can; once more, a "
                             "second later, to end it at once\n";
/* Atomic: a signal may interrupt any thread. */
static atomic_bool requested, reporting, save_wanted;
static _Atomic int64_t first_at;

/* Calls async-signal-safe functions only. The kernel repeats SIGXCPU each second: nobody asks. */
static void on_signal(int sig)
{
    int error = errno;
    int64_t none = 0, now = (int64_t)(1e9 * kn_now());
    if (atomic_compare_exchange_strong(&first_at, &none, now)) {
        if (atomic_load(&reporting) && write(STDERR_FILENO, NOTICE, sizeof NOTICE - 1) < 0)
            errno = 0; /* write may fail: ignored */
    } else if (sig != SIGXCPU && now - none >= REPEAT_NS) {
        signal(sig, SIG_DFL);
        raise(sig); /* delivered when this function returns */
    }
    atomic_store(&requested, true);
    errno = error;
}

static void on_save(int sig)
{
    (void)sig;
    atomic_store(&save_wanted, true);
}

static void listen_to(int sig, void (*handler)(int))
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART }, before;
    sigemptyset(&action.sa_mask);
    if (sigaction(sig, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(sig, &action, NULL);
    sigaddset(&action.sa_mask, sig);
    pthread_sigmask(SIG_UNBLOCK, &action.sa_mask, NULL); /* it may have been blocked at the start */
}

void save_listen(void)
{
    listen_to(SIGUSR1, on_save);
}

bool save_requested(void)
{
    return atomic_exchange(&save_wanted, false);
}

void stop_listen(bool reports)
{
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGUSR2, SIGPWR, SIGXCPU };
    atomic_store(&reporting, reports);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        listen_to(signals[i], on_signal);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

bool stop_requested(void)
{
    return atomic_load(&requested);
}

void stop_request(void)
{
    atomic_store(&requested, true);
}
