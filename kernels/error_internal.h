/* kernels/error_internal.h (private): the sticky error, for files that report one. */
#ifndef KNAP_KERNELS_ERROR_INTERNAL_H
#define KNAP_KERNELS_ERROR_INTERNAL_H

#include "kernels/error.h"

/* p isn't NULL; else false, with an error unless one stands: "what: noun is NULL". */
bool kn_given(const void *p, const char *what, const char *noun);
/* The same, and path isn't empty: "what: noun is empty". */
bool kn_given_path(const char *path, const char *what, const char *noun);
/* As kn_fail, for functions that give a pointer: always NULL. */
void *kn_fail_null(const char *fmt, ...) KN_PRINTF(1, 2);
/* kn_fail where a system call failed, or memory ran out: %m in fmt prints errno's words, and the
 * error keeps errno. It says that something could not be done just now, where kn_fail says that
 * something is wrong; who reads a checkpoint must tell the two apart. */
bool kn_fail_system(const char *fmt, ...) KN_PRINTF(1, 2);
/* The same where another library's call took no memory: "out of memory: " and the text. */
bool kn_fail_memory(const char *fmt, ...) KN_PRINTF(1, 2);
/* The errno of the error that stands; 0 where it is none of a system call. */
int kn_error_number(void);
/* kn_fail with the error of another rank, which names its own place and the rank that failed
 * first. */
bool kn_fail_of_rank(int rank, const char *error);
/* The user's place for error texts: of the context, or on a worker of the job that runs. */
void kn_place_get(const char **file, int *line);
void kn_place_set(const char *file, int line);

/* Control characters become '?': texts of files and users go to terminals. */
void kn_defuse(char *text);

/* Appends what the thread is about to a new error's text, before the place (autograd: the operands
 * of an operation); NULL: nothing. */
extern void (*kn_error_details)(char *text, size_t size);

#endif
