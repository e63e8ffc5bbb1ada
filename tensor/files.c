/* tensor/files.c: system calls on files. */
#include "tensor/files.h"
#include "kernels/context.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PORTION ((size_t)1 << 30) /* bytes: read(2) and write(2) take at most 2 GiB at once */

/* ---- trying again ---------------------------------------------------------------------------- */

bool kn_try_again(int *tries, bool reads)
{
    static const long wait_ms[] = { 1, 5, 25, 125 };
    const int again = (int)(sizeof wait_ms / sizeof *wait_ms), error = errno;
    if (error == EINTR)
        return true;
    if (error == EIO && reads && *tries == 0) {
        *tries = again;
        return true;
    }
    if ((error != EAGAIN && error != ESTALE && error != ETIMEDOUT) || *tries >= again)
        return false;
    nanosleep(&(struct timespec){ .tv_nsec = wait_ms[(*tries)++] * 1000000 }, NULL);
    errno = error;
    return true;
}

int kn_open(const char *path, int flags, unsigned mode)
{
    int fd, tries = 0;
    while ((fd = open(path, flags, mode)) < 0 &&
           (flags & O_EXCL ? errno == EINTR : kn_try_again(&tries, false)))
        ;
    return fd;
}

int kn_file_facts(int fd, struct stat *st)
{
    int failed, tries = 0;
    while ((failed = fstat(fd, st)) != 0 && kn_try_again(&tries, false))
        ;
    return failed;
}

ssize_t kn_read_at(int fd, void *to, size_t bytes, int64_t at)
{
    size_t done = 0;
    for (int tries = 0; done < bytes;) {
        const size_t left = bytes - done;
        ssize_t n = pread(fd, (char *)to + done, left < PORTION ? left : PORTION,
                          (off_t)(at + (int64_t)done));
        if (n < 0 && kn_try_again(&tries, true))
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        done += (size_t)n;
        tries = 0;
    }
    return (ssize_t)done;
}

int kn_write_at(int fd, const void *data, size_t bytes, int64_t at)
{
    const char *p = data;
    if (kn_context_get()->fault.disk_full) { /* as asked for (kernels/faults.h) */
        errno = ENOSPC;
        return -1;
    }
    while (bytes > 0) { /* write(2) takes less when it is interrupted or the disk is full */
        errno = EIO;    /* where nothing is written */
        const ssize_t n = pwrite(fd, p, bytes < PORTION ? bytes : PORTION, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        p += n;
        at += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* ---- looking --------------------------------------------------------------------------------- */

static int look(const char *path, struct stat *st,
                int (*call)(const char *restrict path, struct stat *restrict st))
{
    int tries = 0;
    while (call(path, st) != 0) {
        if (kn_try_again(&tries, false))
            continue;
        if (errno == ENOENT || errno == ENOTDIR)
            return 0;
        kn_fail_system("cannot look at %s: %m", path);
        return -1;
    }
    return 1;
}

int kn_look(const char *path, struct stat *st)
{
    return look(path, st, stat);
}

int kn_look_at_link(const char *path, struct stat *st)
{
    return look(path, st, lstat);
}

bool kn_is_there(const char *path)
{
    struct stat st;
    return kn_look(path, &st) > 0;
}

bool kn_is_in(const char *dir, const char *name)
{
    return kn_is_there(kn_path_of(dir, name, "").text);
}

bool kn_are_same(const char *a, const char *b)
{
    struct stat x, y;
    return kn_look(a, &x) > 0 && kn_look(b, &y) > 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

bool kn_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

char *kn_real_path(const char *path)
{
    char *real;
    int tries = 0;
    while (!(real = realpath(path, NULL)) && kn_try_again(&tries, false))
        ;
    if (!real)
        kn_fail_system("cannot find the way to %s: %m", path);
    return real;
}

int kn_open_regular(const char *path, struct stat *st)
{
    const int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0); /* no wait at a FIFO */
    if (fd < 0)
        kn_fail_system("cannot open %s: %m", path);
    else if (kn_file_facts(fd, st) != 0)
        kn_fail_system("cannot read %s: %m", path);
    else if (!S_ISREG(st->st_mode))
        kn_fail("%s is not a regular file", path);
    else
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

bool kn_read_whole(int fd, const char *path, void *to, size_t bytes, int64_t at)
{
    const ssize_t n = kn_read_at(fd, to, bytes, at);
    if (n < 0)
        return kn_fail_system("%s: cannot read: %m", path);
    return (size_t)n == bytes || kn_fail("%s: the file was cut to %lld bytes while it was read; "
                                         "save or fetch it again",
                                         path, (long long)(at + n));
}

bool kn_remove_file(const char *path)
{
    return KN_AGAIN(unlink(path)) == 0 || errno == ENOENT ||
           kn_fail_system("cannot remove %s: %m", path);
}

/* ---- folders --------------------------------------------------------------------------------- */

typedef struct kn_folder_name folder_name;

/* Adds the entries of d; false: errno tells a fault of the folder, or an error stands. */
static bool list_entries(DIR *d, kn_folder_names *n, int64_t *room)
{
    errno = 0;
    for (struct dirent *e; (e = readdir(d)); errno = 0) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (!kn_host_grow(&n->list, room, n->count + 1, sizeof *n->list))
            return false;
        folder_name *f = &n->list[n->count];
        *f = (folder_name){ kn_host_strdup(e->d_name), e->d_type };
        if (!f->name)
            return false;
        n->count++;
    }
    return errno == 0;
}

static int by_name(const void *x, const void *y)
{
    const folder_name *a = x, *b = y;
    return strcmp(a->name, b->name);
}

bool kn_folder_names_read(kn_folder_names *n, const char *path, bool *there)
{
    bool ok = false;
    *n = (kn_folder_names){ 0 };
    for (int tries = 0; !ok;) { /* a list that ends with an error begins again */
        int64_t room = 0;
        kn_folder_names_free(n);
        DIR *d = opendir(path);
        ok = d && list_entries(d, n, &room);
        const int error = errno;
        if (d)
            closedir(d);
        errno = error;
        if (!ok && there && (error == ENOENT || error == ENOTDIR)) {
            kn_folder_names_free(n); /* removed meanwhile */
            *there = false;
            return true;
        }
        if (!ok && (!kn_ok() || !kn_try_again(&tries, false)))
            return kn_fail_system("cannot read the folder %s: %m", path);
    }
    if (there)
        *there = true;
    if (n->count > 1)
        qsort(n->list, (size_t)n->count, sizeof *n->list, by_name);
    return true;
}

void kn_folder_names_free(kn_folder_names *n)
{
    for (int64_t i = 0; i < n->count; i++)
        kn_host_free(n->list[i].name);
    kn_host_free(n->list);
    *n = (kn_folder_names){ 0 };
}

/* ---- a file ---------------------------------------------------------------------------------- */

void *kn_file_read(const char *path, size_t most, size_t *size)
{
    struct stat st;
    char *to = NULL;
    const int fd = kn_open_regular(path, &st);
    *size = 0;
    if (fd < 0)
        return NULL;
    if ((uint64_t)st.st_size > most)
        kn_fail("%s has %lld bytes, and may have %zu: it is damaged, or another file", path,
                (long long)st.st_size, most);
    else if ((to = kn_host_alloc((size_t)st.st_size + 1))) {
        *size = (size_t)st.st_size;
        to[*size] = 0;
    }
    if (to && !kn_read_whole(fd, path, to, *size, 0)) {
        kn_host_free(to);
        to = NULL;
        *size = 0;
    }
    close(fd);
    return to;
}

bool kn_folder_make(const char *path, const char *option)
{
    struct stat st;
    if (KN_AGAIN(mkdir(path, 0777)) == 0)
        return true;
    if (errno != EEXIST)
        return kn_fail_system("%s%s: cannot make the folder: %m", option, path);
    return (kn_look(path, &st) > 0 && S_ISDIR(st.st_mode)) ||
           (kn_ok() && kn_fail("%s%s: a file that is no folder lies there", option, path));
}

bool kn_ends_in(const char *name, const char *ending)
{
    const size_t n = strlen(name), end = strlen(ending);
    return n > end && strcmp(name + n - end, ending) == 0;
}

kn_path kn_path_of(const char *dir, const char *name, const char *suffix)
{
    kn_path p;
    if (snprintf(p.text, sizeof p.text, "%s/%s%s", dir, name, suffix) >= (int)sizeof p.text) {
        p.text[0] = 0; /* cut, it would be another file's */
        kn_fail("the path %.200s... is too long", dir);
    }
    return p;
}

const char *kn_path_last(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

kn_path kn_path_above(const char *path)
{
    kn_path p;
    const char *slash = strrchr(path, '/');
    snprintf(p.text, sizeof p.text, "%.*s", slash > path ? (int)(slash - path) : 1,
             slash ? path : ".");
    return p;
}
