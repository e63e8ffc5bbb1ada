/* tensor/whole_file.c: files that are there whole or not at all. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "tensor/files.h"
#include "tensor/whole_file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct kn_whole_file {
    char *path, *temp;
    int fd; /* -1: closed */
    int64_t bytes;
};

/* 1: the file that is open as fd still lies at path; 0: it doesn't; -1: nobody knows. */
static int lies_at(int fd, const char *path)
{
    struct stat is, there;
    if (kn_file_facts(fd, &is) != 0)
        return -1;
    if (KN_AGAIN(lstat(path, &there)) != 0)
        return errno == ENOENT ? 0 : -1;
    return is.st_dev == there.st_dev && is.st_ino == there.st_ino;
}

/* Removes what a dead process left: nobody holds its lock. */
static bool remove_dead(const char *temp)
{
    int fd = kn_open(temp, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0);
    bool dead = fd >= 0 && KN_AGAIN(flock(fd, LOCK_EX | LOCK_NB)) == 0;
    int there = dead ? lies_at(fd, temp) : -1;
    bool gone = there == 0 || (there > 0 && KN_AGAIN(unlink(temp)) == 0);
    if (fd >= 0)
        close(fd);
    return gone;
}

/* Creates f->temp and locks it. False with errno; EAGAIN: another process took it for a dead one's.
 * A file system without locks has no leftovers removed. */
static bool create_temp(kn_whole_file *f)
{
    f->fd = kn_open(f->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (f->fd < 0)
        return false;
    bool taken = KN_AGAIN(flock(f->fd, LOCK_EX | LOCK_NB)) != 0 && errno == EWOULDBLOCK;
    if (!taken && lies_at(f->fd, f->temp) != 0)
        return true;
    close(f->fd);
    f->fd = -1;
    errno = EAGAIN;
    return false;
}

/* The first N that no living process has. */
static bool open_temp(kn_whole_file *f)
{
    size_t room = strlen(f->path) + 20;
    if (!(f->temp = kn_host_alloc(room)))
        return false;
    for (int i = 0; i < 1000; i++) {
        snprintf(f->temp, room, i ? "%s.tmp.%d" : "%s.tmp", f->path, i);
        if (create_temp(f))
            return true;
        if (errno != EEXIST && errno != EAGAIN)
            break;
        if (errno == EEXIST && remove_dead(f->temp) && create_temp(f))
            return true;
    }
    kn_fail_system("cannot write %s: cannot create %s: %m", f->path, f->temp);
    kn_host_free(f->temp); /* nothing to remove */
    f->temp = NULL;
    return false;
}

/* A rename onto a device would take it from every program of the machine. */
static bool may_be_replaced(const char *path)
{
    struct stat st;
    int there = kn_look(path, &st);
    return there == 0 || (there > 0 && (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode))) ||
           kn_fail("cannot write %s: it is a device or a pipe, no file", path);
}

kn_whole_file *kn_whole_file_create(const char *path)
{
    kn_whole_file *f = kn_host_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->fd = -1;
    if ((f->path = kn_host_strdup(path)) && may_be_replaced(path) && open_temp(f))
        return f;
    kn_whole_file_abandon(f);
    return NULL;
}

bool kn_whole_file_write(kn_whole_file *f, const void *data, size_t bytes)
{
    if (kn_write_at(f->fd, data, bytes, f->bytes) != 0)
        return kn_fail_system("cannot write %s: %m; %s is as it was", f->temp, f->path);
    f->bytes += (int64_t)bytes;
    return true;
}

bool kn_sync_folder(const char *dir)
{
    int fd = kn_open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), error = 0;
    if (fd < 0)
        return errno == EACCES ||
               kn_fail_system("cannot sync the folder %s: cannot open it: %m", dir);
    if (KN_AGAIN(fsync(fd)) != 0)
        error = errno;
    close(fd);
    if (error == EIO || error == ENOSPC || error == EDQUOT)
        return errno = error, kn_fail_system("cannot sync the folder %s: %m", dir);
    return true;
}

bool kn_whole_file_commit(kn_whole_file *f)
{
    bool ok = kn_ok();
    if (ok && KN_AGAIN(fsync(f->fd)) != 0)
        ok = kn_fail_system("cannot sync %s: %m; %s is as it was", f->temp, f->path);
    int fd = f->fd;
    f->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* keeps the lock until the file has its name */
    if (f->fd < 0 && ok)
        ok = kn_fail_system("cannot write %s: %m; %s is as it was", f->temp, f->path);
    if (close(fd) != 0 && ok && errno != EINTR)
        ok = kn_fail_system("cannot close %s: %m; %s is as it was", f->temp, f->path);
    if (ok && KN_AGAIN(rename(f->temp, f->path)) != 0)
        ok = kn_fail_system("cannot rename %s to %s: %m", f->temp, f->path);
    if (ok) {
        kn_host_free(f->temp); /* renamed: nothing to remove */
        f->temp = NULL;
        ok = kn_sync_folder(kn_path_above(f->path).text);
    }
    kn_whole_file_abandon(f);
    return ok;
}

void kn_whole_file_abandon(kn_whole_file *f)
{
    if (!f)
        return;
    if (f->temp)
        (void)KN_AGAIN(unlink(f->temp));
    if (f->fd >= 0)
        close(f->fd);
    kn_host_free(f->temp);
    kn_host_free(f->path);
    kn_host_free(f);
}
