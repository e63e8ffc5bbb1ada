/* tests/state/operations.c: the C library's operations on folders, with a hook before each. */
#include "tests/state/operations.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int (*operation_hook)(const char *name);

static int refused(const char *name)
{
    int error = operation_hook ? operation_hook(name) : 0;
    if (error)
        errno = error;
    return error;
}

int lstat(const char *path, struct stat *st)
{
    return refused("lstat") ? -1 : fstatat(AT_FDCWD, path, st, AT_SYMLINK_NOFOLLOW);
}

int mkdir(const char *path, mode_t mode)
{
    return refused("mkdir") ? -1 : mkdirat(AT_FDCWD, path, mode);
}

int symlink(const char *text, const char *at)
{
    return refused("symlink") ? -1 : symlinkat(text, AT_FDCWD, at);
}

int rename(const char *from, const char *to)
{
    return refused("rename") ? -1 : renameat(AT_FDCWD, from, AT_FDCWD, to);
}

int unlink(const char *path)
{
    return refused("unlink") ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    return refused("rmdir") ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}

int unlinkat(int dir, const char *path, int flags)
{
    return refused("unlinkat") ? -1 : (int)syscall(SYS_unlinkat, dir, path, flags);
}

DIR *opendir(const char *path)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    int fd = refused("opendir") ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0);
    return fd < 0 ? NULL : fdopendir(fd);
}

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return refused("open") ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    return refused("openat") ? -1 : (int)syscall(SYS_openat, dir, path, flags, mode);
}
