/* tensor/files.h (private to the library): system calls on files, and which of their faults pass.
 *
 * A read or a look is tried again:
 *
 *   EINTR                      as often as a signal comes
 *   EAGAIN, ESTALE, ETIMEDOUT  up to 4 times, after 1, 5, 25 and 125 ms: another machine replaced
 *                              the file or has a lease of it, or the server is busy
 *   EIO of a read              once, at once: what a server's restart gives; a disk stays at it
 *
 * A fault that stays is an error with its errno (kn_fail_system), and so is any other errno but
 * ENOENT and ENOTDIR: it is never taken for a file that isn't there, or for a damaged one. What
 * changes files is tried again after EINTR only (KN_AGAIN): nobody knows how far it came. */
#ifndef KNAP_TENSOR_FILES_H
#define KNAP_TENSOR_FILES_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

/* ---- trying again ---------------------------------------------------------------------------- */

/* After a call that failed with errno: is it to be made again? Waits where that helps. *tries is 0
 * before the first call. */
bool kn_try_again(int *tries, bool reads);
/* A call that returns 0 if all is well, again if a signal came between: file systems over a network
 * and in user space may say so. */
#define KN_AGAIN(call)                                                                             \
    ({                                                                                             \
        int failed_;                                                                               \
        while ((failed_ = (call)) != 0 && errno == EINTR)                                          \
            ;                                                                                      \
        failed_;                                                                                   \
    })

/* ---- calls with the errors of the system's: -1, errno ---------------------------------------- */

int kn_open(const char *path, int flags, unsigned mode);
int kn_file_facts(int fd, struct stat *st);
/* The bytes read: fewer than asked for only where the file ends. */
ssize_t kn_read_at(int fd, void *to, size_t bytes, int64_t at);
/* 0: all of them are written. */
int kn_write_at(int fd, const void *data, size_t bytes, int64_t at);

/* ---- calls with errors of their own ---------------------------------------------------------- */

/* 1: there is a file, a folder or the like at path, st tells about it; 0: there is none; -1 with an
 * error: nobody knows. */
int kn_look(const char *path, struct stat *st);
/* The same; a link tells about itself. */
int kn_look_at_link(const char *path, struct stat *st);
/* False also with an error: whether there is one; whether both are there, and are the same one. */
bool kn_is_there(const char *path);
bool kn_is_in(const char *dir, const char *name); /* dir/name */
bool kn_are_same(const char *a, const char *b);
/* Whether two looks found the same file, which nobody wrote in between. */
bool kn_same_file(const struct stat *a, const struct stat *b);
/* realpath(3), to be freed with free; NULL with an error. */
char *kn_real_path(const char *path);

/* Opens a regular file to read it; *st tells about it. -1 with an error. */
int kn_open_regular(const char *path, struct stat *st);
/* Exactly so many bytes of an open file, which path names in errors: also where it was cut. */
bool kn_read_whole(int fd, const char *path, void *to, size_t bytes, int64_t at);

/* Whether the name has that ending, and something before it. */
bool kn_ends_in(const char *name, const char *ending);
/* Removes a file, if it is there. */
bool kn_remove_file(const char *path);

/* The names in a folder. */
typedef struct kn_folder_names {
    struct kn_folder_name {
        char *name;
        unsigned char type; /* DT_REG and so on, as readdir(3) tells; DT_UNKNOWN: see kn_look */
    } * list;               /* in order of the names; without "." and ".." */
    int64_t count;
} kn_folder_names;
/* Lists the folder. Where there is none, the list is empty and *there false (NULL: that is an
 * error, too). The caller frees it, after an error too. */
bool kn_folder_names_read(kn_folder_names *n, const char *path, bool *there);
void kn_folder_names_free(kn_folder_names *n);

/* The bytes of a regular file, which may be empty, and a 0, in memory of the host that the
 * caller frees. NULL with an error, and *size 0, also where the file has more than `most` bytes, or
 * is cut meanwhile. */
void *kn_file_read(const char *path, size_t most, size_t *size);
/* Makes the folder where it isn't there. option: stands before the path in errors, as "--out "; may
 * be "". */
bool kn_folder_make(const char *path, const char *option);
/* dir/name and the suffix; "" with an error where that is too long. */
typedef struct kn_path {
    char text[4096];
} kn_path;
kn_path kn_path_of(const char *dir, const char *name, const char *suffix);
/* The last part of a path, and the folder that it is in. */
const char *kn_path_last(const char *path);
kn_path kn_path_above(const char *path);

#endif
