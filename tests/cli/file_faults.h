/* tests/cli/file_faults.h: which operation on files goes wrong, and how: file_faults.c tells what the variables mean. */
#ifndef KNAP_TESTS_CLI_FILE_FAULTS_H
#define KNAP_TESTS_CLI_FILE_FAULTS_H

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_int count;
static char rank[16] = "0"; /* the library forgets the variable once it has read it */

/* ---- the fault --------------------------------------------------------------------------------- */

/* The fault at an operation. */
typedef struct fault {
    int error;       /* fail with it; 0: don't */
    bool half, torn; /* do half of it; and end the process then */
    int number;      /* of the operation; 0: it isn't counted */
    const char *op;
    char path[4096];
} fault;

typedef struct named {
    const char *name;
    int number;
} named;
#define NAMED(e)                                                                                   \
    {                                                                                              \
#e, e                                                                                      \
    }
static const named errors[] = { NAMED(EIO),    NAMED(ENOSPC), NAMED(EINTR),  NAMED(EACCES),
                                NAMED(EMFILE), NAMED(ENFILE), NAMED(ENOMEM), NAMED(ESTALE),
                                NAMED(EAGAIN), NAMED(EPERM),  NAMED(ENODEV), NAMED(ETIMEDOUT) };

static int failure(const char *what)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (strcmp(what, errors[i].name) == 0)
            return errors[i].number;
    return 0;
}

/* The signals of their names, joined by "-". */
static void send(const char *what)
{
    static const named signals[] = { { "TERM", SIGTERM }, { "INT", SIGINT }, { "HUP", SIGHUP } };
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        for (const char *at = what; (at = strstr(at, signals[i].name)); at++)
            kill(getpid(), signals[i].number);
}

static void begin_rank(void) __attribute__((constructor));
static void begin_rank(void)
{
    const char *r = getenv("KNAP_RANK");
    snprintf(rank, sizeof rank, "%s", r ? r : "0");
}

static void put_line(const char *path, int how, const char *line, int n)
{
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666);
    syscall(SYS_write, fd, line, (size_t)n);
    syscall(SYS_close, fd);
}

static void note(const fault *f, long long at, long long bytes)
{
    const char *name = getenv("FAULT_LOG");
    char line[4300];
    int error = errno;
    if (f->number && name) {
        int n = snprintf(line, sizeof line, "%s %d %s %lld %lld %s\n", rank, f->number, f->op, at,
                         bytes, f->path);
        put_line(name, O_APPEND, line, n);
    }
    errno = error;
}

static void meet(fault *f, const char *op)
{
    const char *wanted = getenv("FAULT_PATH"), *only = getenv("FAULT_OP"), *at = getenv("FAULT_AT");
    const char *what = getenv("FAULT_DO"), *who = getenv("FAULT_RANK"),
               *more = getenv("FAULT_TIMES");
    f->op = op;
    f->error = f->number = 0;
    f->half = f->torn = false;
    if (!wanted || !strstr(f->path, wanted) ||
        (only && strcmp(only, "any") != 0 && strcmp(only, op) != 0) ||
        (who && strcmp(who, rank) != 0))
        return;
    f->number = atomic_fetch_add(&count, 1) + 1;
    int when = at ? atoi(at) : 0, times = more ? atoi(more) : 1, error = errno;
    if (!what || (when && (f->number < when || (times && f->number >= when + times))))
        return;
    f->torn = strcmp(what, "torn") == 0;
    f->half = f->torn || strcmp(what, "short") == 0;
    if (strcmp(what, "kill") == 0 || (f->torn && strcmp(op, "write") != 0)) {
        note(f, 0, 0);
        raise(SIGKILL);
    }
    if (strcmp(what, "stop") == 0)
        raise(SIGSTOP);
    if (!failure(what)) /* EINTR is no signal */
        send(what);
    int ms = atoi(what);
    for (struct timespec t = { ms / 1000, ms % 1000 * 1000000 }; ms && nanosleep(&t, &t) != 0;)
        ;
    f->error = failure(what);
    errno = error;
}

static fault fault_of(const char *op, const char *path)
{
    fault f;
    snprintf(f.path, sizeof f.path, "%s", path ? path : "");
    meet(&f, op);
    return f;
}

/* The path of a descriptor. */
static size_t path_of(int fd, char *to, size_t room)
{
    char link[40];
    int error = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = REAL(readlink)(link, to, room - 1);
    to[n > 0 ? n : 0] = '\0';
    errno = error;
    return n > 0 ? (size_t)n : 0;
}

static fault fault_at(const char *op, int fd)
{
    fault f;
    path_of(fd, f.path, sizeof f.path);
    meet(&f, op);
    return f;
}

static fault fault_in(const char *op, int dir, const char *path)
{
    fault f;
    size_t n = dir == AT_FDCWD || path[0] == '/' ? 0 : path_of(dir, f.path, sizeof f.path);
    snprintf(f.path + n, sizeof f.path - n, "%s%s", n ? "/" : "", path);
    meet(&f, op);
    return f;
}

/* Half of the bytes where the fault asks for it. */
static size_t part(const fault *f, size_t n)
{
    return f->half ? (n + 1) / 2 : n;
}

static ssize_t moved(const fault *f, long long at, ssize_t n)
{
    note(f, at, n);
    if (f->torn)
        raise(SIGKILL);
    return n;
}

static void fault_end(void) __attribute__((destructor));
static void fault_end(void)
{
    const char *path = getenv("FAULT_COUNT");
    char line[16];
    int n = snprintf(line, sizeof line, "%d\n", atomic_load(&count));
    if (!path || atomic_load(&count) == 0)
        return;
    put_line(path, O_TRUNC, line, n);
}

#endif
