/* tests/cli/file_faults.c: loaded before a program's libraries (LD_PRELOAD), counts a process's operations
 * on files and makes them fail.
 *
 *   FAULT_PATH   only files whose path has this text; required
 *   FAULT_OP     open, read, write, sync, close, rename, unlink, link, mkdir, rmdir, truncate, grow, list
 *                (opendir), entry (readdir), look (stat, access, readlink, realpath), lock, or any (default)
 *   FAULT_AT     which of them, from 1; 0 (default): each
 *   FAULT_TIMES  how many in turn, from FAULT_AT on (default 1); 0: all that follow
 *   FAULT_DO     the name of an error (errors below), short (half of a read or write), torn (half of a write,
 *                then SIGKILL), kill (SIGKILL before it), stop (SIGSTOP before it), TERM, INT or HUP (that
 *                signal to the process before it; twice: TERM-TERM), or milliseconds to wait
 *   FAULT_RANK   only in the process of this rank; in all processes, if it isn't set
 *   FAULT_FS     the number of a type of file system, on which all files seem to lie
 *   FAULT_COUNT  a file to write their number to at the end
 *   FAULT_LOG    a file that gets a line for each operation of FAULT_PATH, of every rank:
 *                "RANK NUMBER OP OFFSET BYTES PATH"; bytes are those that the operation moved
 *
 * Opening counts whether or not it makes a file. Closing a descriptor that isn't open is reported on
 * stderr. Operations inside of the C library (stdio's writes) aren't seen; its fopen is. */
#include "tests/cli/file_faults.h"

/* ---- the C library's, replaced ------------------------------------------------------------------ */

#pragma GCC visibility push(default)

static int with_errno(int error)
{
    errno = error;
    return -1;
}

/* An operation that either fails or runs, as one expression. */
#define SIMPLE(f, call)                                                                            \
    do {                                                                                           \
        fault fault_ = (f);                                                                        \
        note(&fault_, 0, 0);                                                                       \
        return fault_.error ? with_errno(fault_.error) : (call);                                   \
    } while (0)
/* One that returns a pointer. */
#define POINTER(f, call)                                                                           \
    do {                                                                                           \
        fault fault_ = (f);                                                                        \
        note(&fault_, 0, 0);                                                                       \
        if (!fault_.error)                                                                         \
            return (call);                                                                         \
        errno = fault_.error;                                                                      \
        return NULL;                                                                               \
    } while (0)

static mode_t mode_of(int flags, va_list ap)
{
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(ap, mode_t) : 0;
}

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = mode_of(flags, ap);
    va_end(ap);
    SIMPLE(fault_of("open", path), REAL(open)(path, flags, mode));
}

int openat(int dir, const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = mode_of(flags, ap);
    va_end(ap);
    SIMPLE(fault_in("open", dir, path), REAL(openat)(dir, path, flags, mode));
}

FILE *fopen(const char *path, const char *mode)
{
    POINTER(fault_of("open", path), REAL(fopen)(path, mode));
}

DIR *opendir(const char *path)
{
    POINTER(fault_of("list", path), REAL(opendir)(path));
}

struct dirent *readdir(DIR *d)
{
    POINTER(fault_at("entry", dirfd(d)), REAL(readdir)(d));
}

int stat(const char *path, struct stat *st)
{
    SIMPLE(fault_of("look", path), REAL(stat)(path, st));
}

int lstat(const char *path, struct stat *st)
{
    SIMPLE(fault_of("look", path), REAL(lstat)(path, st));
}

int fstat(int fd, struct stat *st)
{
    SIMPLE(fault_at("look", fd), REAL(fstat)(fd, st));
}

int fstatat(int dir, const char *path, struct stat *st, int flags)
{
    SIMPLE(fault_in("look", dir, path), REAL(fstatat)(dir, path, st, flags));
}

int access(const char *path, int how)
{
    SIMPLE(fault_of("look", path), REAL(access)(path, how));
}

ssize_t readlink(const char *path, char *to, size_t room)
{
    SIMPLE(fault_of("look", path), REAL(readlink)(path, to, room));
}

char *realpath(const char *path, char *to)
{
    POINTER(fault_of("look", path), REAL(realpath)(path, to));
}

ssize_t write(int fd, const void *p, size_t n)
{
    fault f = fault_at("write", fd);
    return f.error ? with_errno(f.error) : moved(&f, -1, REAL(write)(fd, p, part(&f, n)));
}

ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    fault f = fault_at("write", fd);
    return f.error ? with_errno(f.error) : moved(&f, at, REAL(pwrite)(fd, p, part(&f, n), at));
}

static size_t span_bytes(const struct iovec *span, int spans)
{
    size_t n = 0;
    for (int i = 0; i < spans; i++)
        n += span[i].iov_len;
    return n;
}

/* Of several spans half is the first part of the first one that has bytes. */
static int cut_spans(const fault *f, const struct iovec *span, int spans, struct iovec *one)
{
    for (int i = 0; f->half && i < spans; i++)
        if (span[i].iov_len > 0) {
            size_t half = (span_bytes(span, spans) + 1) / 2;
            *one =
                (struct iovec){ span[i].iov_base, half < span[i].iov_len ? half : span[i].iov_len };
            return 1;
        }
    return 0;
}

ssize_t writev(int fd, const struct iovec *span, int spans)
{
    fault f = fault_at("write", fd);
    struct iovec one;
    int cut = cut_spans(&f, span, spans, &one);
    return f.error ? with_errno(f.error)
                   : moved(&f, -1, REAL(writev)(fd, cut ? &one : span, cut ? 1 : spans));
}

ssize_t pwritev(int fd, const struct iovec *span, int spans, off_t at)
{
    fault f = fault_at("write", fd);
    struct iovec one;
    int cut = cut_spans(&f, span, spans, &one);
    return f.error ? with_errno(f.error)
                   : moved(&f, at, REAL(pwritev)(fd, cut ? &one : span, cut ? 1 : spans, at));
}

ssize_t read(int fd, void *p, size_t n)
{
    fault f = fault_at("read", fd);
    return f.error ? with_errno(f.error) : moved(&f, -1, REAL(read)(fd, p, part(&f, n)));
}

/* As _FORTIFY_SOURCE has it; hardening.sh looks for others. */
ssize_t __read_chk(int fd, void *p, size_t n, size_t room);
ssize_t __read_chk(int fd, void *p, size_t n, size_t room)
{
    (void)room;
    return read(fd, p, n);
}

ssize_t pread(int fd, void *p, size_t n, off_t at)
{
    fault f = fault_at("read", fd);
    return f.error ? with_errno(f.error) : moved(&f, at, REAL(pread)(fd, p, part(&f, n), at));
}

ssize_t preadv(int fd, const struct iovec *span, int spans, off_t at)
{
    fault f = fault_at("read", fd);
    struct iovec one;
    int cut = cut_spans(&f, span, spans, &one);
    return f.error ? with_errno(f.error)
                   : moved(&f, at, REAL(preadv)(fd, cut ? &one : span, cut ? 1 : spans, at));
}

int posix_fallocate(int fd, off_t at, off_t n)
{
    fault f = fault_at("grow", fd);
    note(&f, at, n);
    return f.error ? f.error : REAL(posix_fallocate)(fd, at, n);
}

int fallocate(int fd, int mode, off_t at, off_t n)
{
    SIMPLE(fault_at("grow", fd), REAL(fallocate)(fd, mode, at, n));
}

int ftruncate(int fd, off_t n)
{
    SIMPLE(fault_at("truncate", fd), REAL(ftruncate)(fd, n));
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
    SIMPLE(fault_at("sync", fd), REAL(fsync)(fd));
}

int fdatasync(int fd)
{
    SIMPLE(fault_at("sync", fd), REAL(fdatasync)(fd));
}

int flock(int fd, int how)
{
    SIMPLE(fault_at("lock", fd), REAL(flock)(fd, how));
}

/* The descriptor is gone whatever close() says. */
int close(int fd)
{
    fault f = fault_at("close", fd);
    note(&f, 0, 0);
    int failed = REAL(close)(fd);
    if (failed && errno == EBADF && fd >= 0)
        fprintf(stderr, "file_faults: descriptor %d was closed twice\n", fd);
    return f.error ? with_errno(f.error) : failed;
}

int rename(const char *from, const char *to)
{
    SIMPLE(fault_of("rename", from), REAL(rename)(from, to));
}

int renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    SIMPLE(fault_in("rename", from_dir, from), REAL(renameat)(from_dir, from, to_dir, to));
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    SIMPLE(fault_in("rename", from_dir, from), REAL(renameat2)(from_dir, from, to_dir, to, flags));
}

int link(const char *from, const char *to)
{
    SIMPLE(fault_of("link", to), REAL(link)(from, to));
}

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags)
{
    SIMPLE(fault_in("link", to_dir, to), REAL(linkat)(from_dir, from, to_dir, to, flags));
}

int symlink(const char *text, const char *at)
{
    SIMPLE(fault_of("link", at), REAL(symlink)(text, at));
}

int unlink(const char *path)
{
    SIMPLE(fault_of("unlink", path), REAL(unlink)(path));
}

int unlinkat(int dir, const char *path, int flags)
{
    SIMPLE(fault_in(flags & AT_REMOVEDIR ? "rmdir" : "unlink", dir, path),
           REAL(unlinkat)(dir, path, flags));
}

int remove(const char *path)
{
    SIMPLE(fault_of("unlink", path), REAL(remove)(path));
}

int mkdir(const char *path, mode_t mode)
{
    SIMPLE(fault_of("mkdir", path), REAL(mkdir)(path, mode));
}

int mkdirat(int dir, const char *path, mode_t mode)
{
    SIMPLE(fault_in("mkdir", dir, path), REAL(mkdirat)(dir, path, mode));
}

int rmdir(const char *path)
{
    SIMPLE(fault_of("rmdir", path), REAL(rmdir)(path));
}

/* The same functions under the names that libraries without large files take. */
#if defined __USE_FILE_OFFSET64 && __SIZEOF_LONG__ == 8
#ifdef __GNUC__
#pragma GCC diagnostic ignored "-Wattributes" /* an alias has none of its own */
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmissing-attributes"
#endif
#endif
#define PLAIN(name)                                                                                \
    extern __typeof__(name) plain_##name __asm__(#name) __attribute__((alias(#name "64")))
PLAIN(open);
PLAIN(openat);
PLAIN(fopen);
PLAIN(readdir);
PLAIN(stat);
PLAIN(lstat);
PLAIN(fstat);
PLAIN(fstatat);
PLAIN(pread);
PLAIN(pwrite);
PLAIN(ftruncate);
#endif
