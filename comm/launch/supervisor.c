/* comm/launch/supervisor.c: the process that starts ranks and watches them. It holds no tensors and
 * starts no threads; it is the one part of the library that prints and exits.
 *
 * When a rank dies, the others are poisoned, have a second to leave by themselves, and are ended by
 * SIGTERM and then SIGKILL. When the supervisor dies, the kernel kills the ranks
 * (PR_SET_PDEATHSIG). */
#include "kernels/trace.h"
#include "comm/local/local.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define GRACE_S 1.0 /* to leave after the poison, before SIGTERM */
#define TERM_S  0.4 /* after SIGTERM, before SIGKILL */
#define LOOK_S  0.1 /* between looks at the clock meanwhile, at most */
/* In which a signal that comes again is the same request: timeout(1) signals its child, then the
 * group. */
#define REPEAT_S 1.0

char *kn_local_describe_exit(int status, char *buf, size_t size)
{
    if (WIFSIGNALED(status))
        snprintf(buf, size, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else
        snprintf(buf, size, "exited with status %d%s", WEXITSTATUS(status),
                 WEXITSTATUS(status) == 127
                     ? ": the program, or a library that it needs, could not "
                       "be loaded (see its message, and ulimit -n)"
                     : "");
    return buf;
}

/* ---- watching -------------------------------------------------------------------------------- */

enum { RUNNING = 0, TOLD, TERMINATED, KILLED };

typedef struct watch {
    kn_local_head *head;
    int n, alive;
    const pid_t *pid;
    int *status; /* -1: alive */
    bool strict;
    bool stopped[KN_LOCAL_MAX_RANKS]; /* by a signal: will not leave by itself */
    int culprit;
    int stage;           /* RUNNING, ... */
    double left, looked; /* time until the next stage, and when it was counted last */
    int forwarded;
    double asked; /* when that signal came first */
} watch;

static void signal_all(const watch *w, int sig)
{
    for (int r = 0; r < w->n; r++)
        if (w->status[r] == -1)
            kill(w->pid[r], sig);
}

/* How it ended, and in or after which collective. */
static char *describe_death(kn_local_head *head, int r, int status, char *buf, size_t size)
{
    kn_comm_note last;
    bool finished;
    char call[256];
    size_t n = strlen(kn_local_describe_exit(status, buf, size));
    if (kn_local_last_call(head, r, &last, &finished))
        snprintf(buf + n, size - n, " %s %s", finished ? "after" : "in",
                 kn_comm_describe(&last, call, sizeof call));
    return buf;
}

/* Rank r is gone: which rank is at fault, and must the others end? */
static void note_end(watch *w, int r)
{
    int status = w->status[r];
    w->alive--;
    bool crashed = WIFSIGNALED(status), failed = status != 0;
    if (w->stage == RUNNING && (crashed || (failed && w->strict))) {
        char text[512];
        int first = kn_poisoned(&w->head->poison, NULL); /* the others may leave before it */
        w->culprit = first >= 0 ? first : r;
        if (first < 0) {
            kn_poison_set(&w->head->poison, r,
                          describe_death(w->head, r, status, text, sizeof text));
            if (kn_poisoned(&w->head->poison, NULL) == r)
                w->head->died = 1;
        }
        w->stage = TOLD;
        w->left = GRACE_S;
        w->looked = kn_now();
    }
    kn_local_left(w->head, r); /* after the poison, whose message the others shall repeat */
}

static void reap(watch *w)
{
    for (int r = 0; r < w->n; r++) {
        int status;
        if (w->status[r] != -1)
            continue;
        pid_t got = waitpid(w->pid[r], &status, WNOHANG | WUNTRACED | WCONTINUED);
        if (got > 0 && (WIFSTOPPED(status) || WIFCONTINUED(status))) {
            w->stopped[r] = WIFSTOPPED(status);
            got = 0;
        }
        if (got == 0 && w->stage != RUNNING && w->stopped[r])
            kill(w->pid[r], SIGKILL);
        if (got == 0 || (got < 0 && errno == EINTR))
            continue;
        w->status[r] = got < 0 ? 1 << 8 : status;
        bool by_us = w->stage >= TERMINATED || (w->stage != RUNNING && w->stopped[r]);
        if (got > 0 && by_us && r == w->culprit && WIFSIGNALED(status))
            w->status[r] = 1 << 8; /* it failed, and did not leave: our signal is not the news */
        note_end(w, r);
    }
}

static void pass_signal(watch *w, int signals)
{
    struct signalfd_siginfo s;
    if (read(signals, &s, sizeof s) != (ssize_t)sizeof s)
        return;
    bool again = w->forwarded == (int)s.ssi_signo;
    if (again && s.ssi_signo != SIGUSR1 && kn_now() - w->asked < REPEAT_S)
        return; /* a save may be wanted again at once */
    if (!again)
        w->asked = kn_now();
    w->forwarded = (int)s.ssi_signo;
    if (again && s.ssi_signo == SIGTERM)
        signal_all(w, SIGKILL);
    else if (s.ssi_code != SI_KERNEL) /* the terminal's own signals reach the ranks anyway */
        signal_all(w, (int)s.ssi_signo);
}

/* Time is up for ranks that should leave. Only time in which this process could run counts: a job
 * may be suspended as a whole. */
static void press(watch *w)
{
    double passed = kn_now() - w->looked;
    if (w->stage == RUNNING || w->stage == KILLED)
        return;
    w->looked += passed;
    w->left -= passed < LOOK_S ? passed : LOOK_S;
    if (w->left > 0)
        return;
    signal_all(w, w->stage == TOLD ? SIGTERM : SIGKILL);
    w->stage++;
    w->left = TERM_S;
}

static void close_ended(struct pollfd *p, int n, const int *status)
{
    for (int r = 0; r < n; r++)
        if (status[r] != -1 && p[r].fd >= 0) {
            close(p[r].fd);
            p[r].fd = -1;
        }
}

int kn_local_watch(kn_local_head *head, int n, const pid_t *pid, bool strict, int signals,
                   int *status, int *forwarded)
{
    struct pollfd p[KN_LOCAL_MAX_RANKS + 1];
    watch w = { .head = head,
                .n = n,
                .alive = n,
                .pid = pid,
                .status = status,
                .strict = strict,
                .culprit = -1 };
    bool complete = true;
    for (int r = 0; r < n; r++) {
        status[r] = -1;
        p[r] = (struct pollfd){ (int)syscall(SYS_pidfd_open, pid[r], 0), POLLIN, 0 };
        complete = complete && p[r].fd >= 0; /* an older kernel: look every 20 ms */
    }
    p[n] = (struct pollfd){ signals, POLLIN, 0 };
    reap(&w);
    while (w.alive > 0) {
        int timeout = complete ? -1 : 20;
        if (w.stage != RUNNING && w.stage != KILLED)
            timeout = (int)(1000 * (w.left < LOOK_S ? w.left : LOOK_S)) + 1;
        int ready = poll(p, (nfds_t)n + 1, timeout);
        if (ready > 0 && (p[n].revents & POLLIN))
            pass_signal(&w, signals);
        int stage = w.stage;
        reap(&w);
        if (w.stage != stage) /* stopped ranks among those that were looked at before */
            reap(&w);
        close_ended(p, n, status);
        press(&w);
    }
    close_ended(p, n, status); /* all may have ended before the first look */
    if (forwarded)
        *forwarded = w.forwarded;
    return w.culprit;
}

/* ---- starting -------------------------------------------------------------------------------- */

/* This program's own file. Its path if that still leads to it, so that ps shows a name; without
 * /proc the name by which it was started. */
static const char *own_program(char *buf, size_t size)
{
    struct stat here, there;
    ssize_t n = readlink("/proc/self/exe", buf, size - 1);
    const char *name = n < 0 ? (const char *)(uintptr_t)getauxval(AT_EXECFN) : NULL;
    if (name)
        return name;
    if (n <= 0 || (size_t)n >= size - 1)
        return "/proc/self/exe";
    buf[n] = 0;
    if (stat("/proc/self/exe", &here) != 0 || stat(buf, &there) != 0 ||
        here.st_ino != there.st_ino || here.st_dev != there.st_dev)
        return "/proc/self/exe";
    return buf;
}

static void set_number(const char *name, int n)
{
    char text[16];
    snprintf(text, sizeof text, "%d", n);
    setenv(name, text, 1);
}

/* In the child: becomes rank r of the program. */
static _Noreturn void exec_rank(const kn_local_head *head, int fd, int r, const char *program,
                                char **argv, pid_t supervisor, const sigset_t *mask)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != supervisor)
        _exit(1);
    sigprocmask(SIG_SETMASK, mask, NULL);
    fcntl(fd, F_SETFD, 0);
    set_number("KNAP_RANK", r);
    set_number("KNAP_WORLD", head->size);
    set_number("KNAP_LOCAL_FD", fd);
    set_number("KNAP_THREADS", head->cores.threads);
    set_number("OMP_NUM_THREADS", head->cores.threads);
    unsetenv("KNAP_RANKS");
    if (!head->cores.enough)
        setenv("OMP_WAIT_POLICY", "passive", 1); /* spinning would take the others' cores */
    kn_local_pin(r, head->size, head->cores.threads);
    execv(program, argv);
    dprintf(STDERR_FILENO, "knap: rank %d: cannot run %s: %s\n", r, program, strerror(errno));
    _exit(127);
}

/* Signals for the ranks, requests to save and to stop: to be read from a descriptor, and passed
 * on; not those that the program was started to ignore (nohup, a shell's background jobs). */
static int catch_signals(sigset_t *before)
{
    static const int ends[] = { SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGPWR, SIGXCPU };
    struct sigaction action;
    sigset_t mask;
    sigemptyset(&mask);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (sigaction(ends[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(&mask, ends[i]);
    sigprocmask(SIG_BLOCK, &mask, before);
    signal(SIGCHLD, SIG_DFL);
    return signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* Prints which rank ended the run and why, unless that rank has; the exit status of the whole. */
static int report(kn_local_head *head, int culprit, const int *status, int forwarded)
{
    char text[128];
    const char *why = NULL;
    if (culprit < 0)
        return 0;
    int s = status[culprit];
    bool first = kn_poisoned(&head->poison, &why) == culprit;
    bool unread = WIFSIGNALED(s) && WTERMSIG(s) == SIGPIPE; /* nobody wants the output: head(1) */
    if (unread)
        atomic_store(&head->spoken, 1);
    else if (WIFSIGNALED(s) && WTERMSIG(s) == forwarded)
        fprintf(stderr, "knap: ended by signal %d (%s)\n", forwarded, strsignal(forwarded));
    else if (atomic_exchange(&head->spoken, 1) == 0)
        fprintf(stderr, "knap: rank %d%s %s%s\n", culprit, first && !head->died ? ":" : "",
                first ? why : kn_local_describe_exit(s, text, sizeof text),
                first && !head->died ? "" : "; the other ranks were ended");
    if (WIFSIGNALED(s))
        return 128 + WTERMSIG(s);
    return WEXITSTATUS(s) ? WEXITSTATUS(s) : 1;
}

/* Ranks open their libraries, their shared memory, data and checkpoints. */
enum { FILES = 32 };

void kn_supervise(int n, const kn_local_cores *cores, char **argv)
{
    size_t bytes;
    int fd, status[KN_LOCAL_MAX_RANKS], forwarded = 0, started = 0;
    pid_t pid[KN_LOCAL_MAX_RANKS];
    char path[4096];
    sigset_t before;
    signal(SIGXFSZ,
           SIG_IGN); /* a limit of the file size is an error of a write, also of the ranks' */
    kn_local_head *head = kn_comm_allow_files("--ranks: each rank", FILES)
                              ? kn_local_create(n, *cores, &fd, &bytes)
                              : NULL;
    if (!head)
        return;
    const char *program = own_program(path, sizeof path);
    int signals = catch_signals(&before);
    pid_t self = getpid();
    fflush(NULL);
    for (; started < n; started++) {
        pid[started] = fork();
        if (pid[started] == 0)
            exec_rank(head, fd, started, program, argv, self, &before);
        if (pid[started] < 0)
            break;
    }
    if (started < n) {
        fprintf(stderr, "knap: cannot start rank %d of %d: %s (see ulimit -u)\n", started, n,
                strerror(errno));
        for (int r = 0; r < started; r++)
            kill(pid[r], SIGKILL);
    }
    close(fd);
    int culprit = kn_local_watch(head, started, pid, true, signals, status, &forwarded);
    if (started < n)
        exit(1);
    exit(report(head, culprit, status, forwarded));
}
