/* tests/comm/program_test.h: starts programs of several ranks (rank_program.c), reads their output,
 * and finds processes that they leave behind. */
#ifndef KNAP_TESTS_PROGRAM_TEST_H
#define KNAP_TESTS_PROGRAM_TEST_H

#include "tests/kn_test.h"
#include "kernels/trace.h"
#include "tests/ports.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* The path of rank_program: beside this test program, in fsdp/ below it, or KNAP_RANK_PROGRAM. */
static inline const char *program(void)
{
    static char path[4400];
    char self[4096];
    const char *given = getenv("KNAP_RANK_PROGRAM");
    if (given)
        return given;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    char *slash = strrchr(self, '/');
    if (slash)
        *slash = 0;
    static const char *const places[] = { "", "/comm" };
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s%s/rank_program", self, places[i]);
        if (access(path, X_OK) == 0)
            return path;
    }
    return NULL;
}

typedef struct result {
    pid_t pid;
    int out, err; /* pipes */
    int status;   /* exit status, or 1000 + signal */
    char text[4096], errors[4096];
} result;

/* Starts the program with these words as arguments; words of the form A=B go into the
 * environment. Without KNAP_TIMEOUT among them its ranks wait longer than the case may take, so
 * that the runner ends a case in which an end came from nothing but a timeout: no test has to
 * measure how long the end took. */
static inline void start(result *r, const char *line)
{
    char words[512], *argv[32], *save = NULL;
    int out[2], err[2], n = 0;
    const char *path = program();
    KN_CHECK(path, "rank_program is not beside the test; build all, or set KNAP_RANK_PROGRAM");
    KN_CHECK(pipe(out) == 0 && pipe(err) == 0);
    snprintf(words, sizeof words, "%s", line);
    fflush(NULL);
    r->pid = fork();
    if (r->pid == 0) {
        argv[n++] = (char *)(uintptr_t)path;
        setenv("KNAP_TIMEOUT", "100000", 1);
        for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save))
            if (w[0] >= 'A' && w[0] <= 'Z' && strchr(w, '='))
                putenv(w);
            else
                argv[n++] = w;
        argv[n] = NULL;
        static const int ends[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT };
        for (int i = 0; i < 4;
             i++) /* a shell's background jobs ignore some signals, and ranks would inherit that */
            signal(ends[i], SIG_DFL);
        setrlimit(RLIMIT_CORE, &(struct rlimit){ 0 });
        dup2(out[1], STDOUT_FILENO);
        dup2(err[1], STDERR_FILENO);
        for (int fd = 3; fd < 256; fd++)
            close(fd);
        execv(path, argv);
        _exit(126);
    }
    close(out[1]);
    close(err[1]);
    r->out = out[0];
    r->err = err[0];
}

static inline void read_all(int fd, char *buf, size_t size)
{
    size_t used = strlen(buf);
    ssize_t n;
    while (used < size - 1 && (n = read(fd, buf + used, size - 1 - used)) > 0)
        used += (size_t)n;
    buf[used] = 0;
    close(fd);
}

static inline void finish(result *r)
{
    int status;
    read_all(r->out, r->text, sizeof r->text); /* until the last rank has closed it */
    read_all(r->err, r->errors, sizeof r->errors);
    KN_CHECK(waitpid(r->pid, &status, 0) == r->pid);
    r->status = WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* Words for a rank that gives up after this time. */
static inline const char *hasty_words(double seconds)
{
    static char words[64];
    snprintf(words, sizeof words, "KNAP_TIMEOUT=%g ok", seconds);
    return words;
}

/* True if a rank ran out of this time. Where ranks have too little of it, a slow machine may keep
 * one away that isn't missing: such a run says nothing, and the test repeats it with twice the
 * time, which this allows up to a minute. */
static inline bool ran_out_of(const char *errors, double seconds)
{
    char text[64];
    snprintf(text, sizeof text, "waited %g s", seconds);
    return seconds < 60 && strstr(errors, text);
}

/* True if the program has ended; it is to be finished yet. */
static inline bool has_ended(const result *r)
{
    siginfo_t ended = { 0 };
    return waitid(P_PID, (id_t)r->pid, &ended, WEXITED | WNOWAIT | WNOHANG) == 0 && ended.si_pid;
}

/* The first of two programs to end; it is to be finished yet. */
static inline result *first_to_end(result *a, result *b)
{
    for (;; usleep(1000))
        if (has_ended(a) || has_ended(b))
            return has_ended(a) ? a : b;
}

/* Two programs say that they are the same rank: the one that comes second is refused, whichever
 * that is on a busy machine. It becomes *second. */
static inline void order_by_end(result *first, result *second)
{
    if (first_to_end(first, second) == second)
        return;
    result other = *first;
    *first = *second;
    *second = other;
}

static inline result run(const char *line)
{
    static result r;
    memset(&r, 0, sizeof r);
    start(&r, line);
    finish(&r);
    return r;
}

/* ---- ranks that another launcher starts ------------------------------------------------------ */

/* This process's port for ranks of one host; the same at each call. */
static inline int local_port(void)
{
    static int first;
    return first ? first : (first = kn_test_ports(20));
}

/* Starts rank r of n on this host as torchrun would, running words. */
static inline void start_local_rank(result *r, int rank, int n, const char *words)
{
    char line[400];
    memset(r, 0, sizeof *r);
    snprintf(line, sizeof line,
             "RANK=%d WORLD_SIZE=%d LOCAL_RANK=%d LOCAL_WORLD_SIZE=%d MASTER_ADDR=127.0.0.1 "
             "MASTER_PORT=%d %s",
             rank, n, rank, n, local_port(), words);
    start(r, line);
}

/* Starts rank r of n; they meet at KNAP_RENDEZVOUS. */
static inline void start_meeting(result *r, int rank, int n, const char *place, const char *words)
{
    char line[500];
    memset(r, 0, sizeof *r);
    snprintf(line, sizeof line, "RANK=%d WORLD_SIZE=%d KNAP_RENDEZVOUS=%s %s", rank, n, place,
             words);
    start(r, line);
}

/* Rank r's number in the output of a step (rank_step.c). */
static inline bool number_of(const char *text, int rank, int n, char *number)
{
    char want[64];
    snprintf(want, sizeof want, "rank %d of %d: ", rank, n);
    const char *at = strstr(text, want);
    return at && sscanf(at + strlen(want), "%16[0-9a-f]", number) == 1;
}

/* The n programs ran "step" as one job, with the numbers of ranks that --ranks starts. */
static inline void check_step(result *r, int n, const char *what)
{
    char line[40];
    snprintf(line, sizeof line, "step --ranks %d", n);
    result all = run(line);
    KN_CHECK(all.status == 0, "%s", all.errors);
    for (int k = 0; k < n; k++) {
        char want[20] = "", got[20] = "";
        finish(&r[k]);
        KN_CHECK(r[k].status == 0 && !r[k].errors[0], "%s: rank %d: %s", what, k, r[k].errors);
        KN_CHECK(number_of(all.text, k, n, want) && number_of(r[k].text, k, n, got));
        KN_CHECK(strcmp(want, got) == 0, "%s: rank %d of %d: %s, under --ranks %s", what, k, n, got,
                 want);
    }
}

/* The n programs ran "ok" to its end. */
static inline void check_good(result *r, int n)
{
    for (int k = 0; k < n; k++) {
        finish(&r[k]);
        KN_CHECK(r[k].status == 0 && strstr(r[k].text, "good") && !r[k].errors[0], "rank %d: %s", k,
                 r[k].errors);
    }
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* Checks that no process of this test is left: orphans become this process's children. */
static inline void adopt_orphans(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

static inline void check_no_orphans(void)
{
    for (int i = 0; i < 3000; i++) { /* a process killed just now may still exist */
        pid_t p = waitpid(-1, NULL, WNOHANG);
        if (p < 0 && errno == ECHILD)
            return;
        if (p == 0)
            usleep(20000);
    }
    KN_CHECK(0, "a process is left");
}

static inline int lines_with(const char *text, const char *part)
{
    int n = 0;
    for (const char *s = text; (s = strstr(s, part)); s += strlen(part))
        n++;
    return n;
}

/* Each of the n command lines ends with status 1 and one sentence, which has the text beside it. */
static inline void check_refused_lines(const char *const (*lines)[2], size_t n)
{
    for (size_t i = 0; i < n; i++) {
        result r = run(lines[i][0]);
        KN_CHECK(r.status == 1, "%s: status %d", lines[i][0], r.status);
        KN_CHECK(strstr(r.errors, lines[i][1]), "%s: %s", lines[i][0], r.errors);
        KN_CHECK(strncmp(r.errors, "knap: ", 6) == 0 && lines_with(r.errors, "\n") == 1, "%s",
                 r.errors);
    }
}

#endif
