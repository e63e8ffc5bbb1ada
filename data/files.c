/* data/files.c: finds data sets on this machine and reads files into memory. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "tensor/whole_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- finding ------------------------------------------------------------------------------- */

static const struct named_set {
    const char *name, *path; /* below a data folder */
    const char *file;        /* that tells a whole folder; NULL: any */
    bool part;               /* a folder without it is of use, too, where there is no other */
    bool images;
} named_sets[] = {
    { "shakespeare", "tinyshakespeare/input.txt", NULL, false, false },
    { "mnist", "mnist", NULL, false, true },
    { "fashion-mnist", "fashion-mnist", "train-images-idx3-ubyte.gz", true, true },
    { "cifar10", "cifar10", "test_batch.bin", false, true },
    { "cifar100", "cifar100", "test.bin", false, true },
};
#define NAMED_SETS (sizeof named_sets / sizeof named_sets[0])
#define SET_NAMES  "shakespeare|mnist|fashion-mnist|cifar10|cifar100"

static const struct named_set *find_set(const char *name)
{
    for (size_t i = 0; i < NAMED_SETS; i++)
        if (strcmp(named_sets[i].name, name) == 0)
            return &named_sets[i];
    return NULL;
}

bool kn_names_images(const char *name)
{
    const struct named_set *set = find_set(name);
    return set && set->images;
}

/* "a/b", or "a/b/c" where c is given. */
static char *join(const char *a, size_t a_length, const char *b, const char *c)
{
    size_t size = a_length + strlen(b) + (c ? strlen(c) : 0) + 3;
    char *path = kn_host_alloc(size);
    if (path)
        snprintf(path, size, "%.*s/%s%s%s", (int)a_length, a, b, c ? "/" : "", c ? c : "");
    return path;
}

/* path exists, and, where the set must be whole, its file below it. */
static bool is_there(const struct named_set *set, const char *path, bool whole)
{
    return set->file && whole ? kn_is_in(path, set->file) : kn_is_there(path);
}

/* Searches every data folder. NULL without an error if none has the set. */
static char *find_one(const struct named_set *set, bool whole)
{
    const char *list = getenv("KNAP_DATA"), *home = getenv("HOME");
    for (const char *p = list ? list : ""; *p;) {
        size_t n = strcspn(p, ":");
        char *path = n ? join(p, n, set->path, NULL) : NULL;
        if (n && (!path || is_there(set, path, whole)))
            return path;
        kn_host_free(path);
        if (!kn_ok())
            return NULL;
        p += n + (p[n] == ':');
    }
    char *path = home && *home ? join(home, strlen(home), ".cache/knap", set->path) : NULL;
    if (path && is_there(set, path, whole))
        return path;
    kn_host_free(path);
    return NULL;
}

static char *find_named(const struct named_set *set)
{
    char *path = find_one(set, true);
    return path || !set->part || !kn_ok() ? path : find_one(set, false);
}

char *kn_data_find_quietly(const char *name)
{
    if (!kn_given(name, "kn_data_find_quietly", "the name"))
        return NULL;
    const struct named_set *set = find_set(name);
    return set ? find_named(set) : NULL;
}

char *kn_data_find(const char *name)
{
    if (!kn_given_path(name, "kn_data_find", "the name"))
        return NULL;
    char buf[32];
    const struct named_set *set = find_set(name);
    if (!set) {
        if (kn_is_there(name))
            return kn_host_strdup(name);
        if (!kn_ok())
            return NULL;
        const char *near = kn_nearest(name, SET_NAMES, buf, sizeof buf);
        if (near)
            kn_fail("there is no data set, file or folder '%s'; did you mean %s?", name, near);
        else
            kn_fail("there is no data set, file or folder '%s'; the text among the data sets is "
                    "shakespeare, images are mnist, fashion-mnist, cifar10 and cifar100",
                    name);
        return NULL;
    }
    char *path = find_named(set);
    const char *list = getenv("KNAP_DATA");
    if (!path && kn_ok())
        kn_fail("data set %s: there is no %s%s%s below the folders of KNAP_DATA (%s), nor below "
                "~/.cache/knap; run scripts/get-data %s, or give a path",
                name, set->path, set->file ? "/" : "", set->file ? set->file : "",
                list && *list ? list : "not set", name);
    return path;
}

/* ---- files --------------------------------------------------------------------------------- */

/* Small files are copied, so that truncating one afterwards does no harm. */
static void take_bytes(int fd, size_t size, const char *path, const char *what, kn_mapped *map)
{
    bool copy = size <= KN_FILE_COPIED;
    void *p = mmap(NULL, size, copy ? PROT_READ | PROT_WRITE : PROT_READ,
                   MAP_PRIVATE | (copy ? MAP_ANONYMOUS : 0), copy ? -1 : fd, 0);
    if (p == MAP_FAILED)
        kn_fail_system("cannot map the %s %s: %m", what, path);
    else if (copy && !kn_read_whole(fd, path, p, size, 0))
        munmap(p, size);
    else
        *map = (kn_mapped){ .data = p, .size = size };
}

bool kn_file_map_fd(int fd, const char *path, const char *what, kn_mapped *map)
{
    if (!kn_given(path, "kn_file_map_fd", "the path") ||
        !kn_given(map, "kn_file_map_fd", "the place for the map"))
        return false;
    struct stat st;
    *map = (kn_mapped){ 0 };
    if (kn_file_facts(fd, &st) != 0)
        kn_fail_system("cannot read the %s %s: %m", what, path);
    else if (S_ISDIR(st.st_mode))
        kn_fail("%s is a folder; give the path of a %s", path, what);
    else if (!S_ISREG(st.st_mode))
        kn_fail("%s is not a regular file; give the path of a %s", path, what);
    else if (st.st_size == 0)
        kn_fail("the %s %s is empty", what, path);
    else
        take_bytes(fd, (size_t)st.st_size, path, what, map);
    close(fd);
    return map->data != NULL;
}

bool kn_file_map(const char *path, const char *what, kn_mapped *map)
{
    if (!kn_given_path(path, "kn_file_map", "the path") ||
        !kn_given(map, "kn_file_map", "the place for the map"))
        return false;
    *map = (kn_mapped){ 0 };
    /* O_NONBLOCK: opening a FIFO must not block */
    int fd = kn_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0)
        return kn_fail_system("cannot open the %s %s: %m", what, path);
    return kn_file_map_fd(fd, path, what, map);
}

void kn_file_unmap(kn_mapped *map)
{
    if (!map)
        return;
    if (map->data)
        munmap((void *)map->data, map->size);
    *map = (kn_mapped){ 0 };
}

bool kn_file_write(const char *path, const void *const *piece, const size_t *size, int count)
{
    if (!kn_given_path(path, "kn_file_write", "the path") ||
        (count > 0 && !(kn_given(piece, "kn_file_write", "the list of pieces") &&
                        kn_given(size, "kn_file_write", "the list of sizes"))))
        return false;
    kn_whole_file *f = kn_whole_file_create(path);
    bool ok = f != NULL;
    for (int i = 0; ok && i < count; i++)
        ok = kn_whole_file_write(f, piece[i], size[i]);
    if (ok)
        return kn_whole_file_commit(f);
    kn_whole_file_abandon(f);
    return false;
}
