/* tests/cli/file_faults.c: loaded before a program's libraries (LD_PRELOAD), makes operations on
 * files fail.
 *
 *   FAULT_PATH   only files whose path has this text; required
 *   FAULT_OP     open, write, sync, close, rename, unlink, read, grow, or any (default)
 *   FAULT_AT     which of them, from 1; 0 (default): each
 *   FAULT_DO     EIO, ENOSPC, EINTR, short (half of a write), kill (SIGKILL before it), or milliseconds to wait
 *   FAULT_FS     the number of a type of file system, on which all files seem to lie
 *   FAULT_COUNT  a file to write their number to at the end
 *
 * Closing a descriptor that isn't open is reported on stderr. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static atomic_int count;

static int failure(const char *what)
{
    return strcmp(what, "EIO") == 0      ? EIO
           : strcmp(what, "ENOSPC") == 0 ? ENOSPC
           : strcmp(what, "EINTR") == 0  ? EINTR
                                         : 0;
}

/* 0: do it as usual; an errno; -1: do half of it. */
static int fault(const char *op, const char *path)
{
    const char *wanted = getenv("FAULT_PATH"), *only = getenv("FAULT_OP"), *at = getenv("FAULT_AT");
    const char *what = getenv("FAULT_DO");
    if (!wanted || !strstr(path, wanted) ||
        (only && strcmp(only, "any") != 0 && strcmp(only, op) != 0))
        return 0;
    int n = atomic_fetch_add(&count, 1) + 1, when = at ? atoi(at) : 0;
    if (!what || (when && n != when))
        return 0;
    if (strcmp(what, "kill") == 0)
        raise(SIGKILL);
    if (strcmp(what, "short") == 0)
        return -1;
    int ms = atoi(what);
    for (struct timespec t = { ms / 1000, ms % 1000 * 1000000 }; ms && nanosleep(&t, &t) != 0;)
        ;
    return failure(what);
}

static int fault_at(const char *op, int fd)
{
    char link[40], path[4096];
    int error = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    errno = error;
    return fault(op, path);
}

static void fault_end(void) __attribute__((destructor));
static void fault_end(void)
{
    const char *path = getenv("FAULT_COUNT");
    FILE *f = path && atomic_load(&count) > 0 ? fopen(path, "w") : NULL;
    if (f) {
        fprintf(f, "%d\n", atomic_load(&count));
        fclose(f);
    }
}

#pragma GCC visibility push(default) /* these replace the C library's */

static int with_errno(int error)
{
    errno = error;
    return -1;
}

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    int f = flags & O_CREAT ? fault("open", path) : 0;
    return f > 0 ? with_errno(f) : REAL(open)(path, flags, mode);
}

ssize_t write(int fd, const void *p, size_t n)
{
    int f = fault_at("write", fd);
    return f > 0 ? with_errno(f) : REAL(write)(fd, p, f < 0 ? (n + 1) / 2 : n);
}

ssize_t pread(int fd, void *p, size_t n, off_t at)
{
    int f = fault_at("read", fd);
    return f > 0 ? with_errno(f) : REAL(pread)(fd, p, f < 0 ? (n + 1) / 2 : n, at);
}

int posix_fallocate(int fd, off_t at, off_t n)
{
    int f = fault_at("grow", fd);
    return f > 0 ? f : REAL(posix_fallocate)(fd, at, n);
}

int fstatfs(int fd, struct statfs *fs)
{
    const char *type = getenv("FAULT_FS");
    int status = REAL(fstatfs)(fd, fs);
    if (type && status == 0)
        fs->f_type = strtol(type, NULL, 0);
    return status;
}

int fsync(int fd)
{
    int f = fault_at("sync", fd);
    return f > 0 ? with_errno(f) : REAL(fsync)(fd);
}

int close(int fd)
{
    int f = fault_at("close", fd), failed = REAL(close)(fd);
    if (failed && errno == EBADF && fd >= 0)
        fprintf(stderr, "file_faults: descriptor %d was closed twice\n", fd);
    return f > 0 ? with_errno(f) : failed;
}

int rename(const char *from, const char *to)
{
    int f = fault("rename", from);
    return f > 0 ? with_errno(f) : REAL(rename)(from, to);
}

int unlink(const char *path)
{
    int f = fault("unlink", path);
    return f > 0 ? with_errno(f) : REAL(unlink)(path);
}
