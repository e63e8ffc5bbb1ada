/* kernels/error.h: the thread's sticky error. Functions that can fail return false or NULL and
 * record one error message with kn_fail(); the first one of a thread stands until it is cleared. */
#ifndef KNAP_KERNELS_ERROR_H
#define KNAP_KERNELS_ERROR_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Records an error unless one stands already (the first cause is the one to read). Appends the
 * module path and the user's file:line when they are known. A NULL for %s prints "unnamed". Always
 * returns false. */
KN_API bool kn_fail(const char *fmt, ...) KN_PRINTF(1, 2);
KN_API bool kn_ok(void);           /* no error stands in this thread's context */
KN_API const char *kn_error(void); /* the message, or NULL; valid until kn_clear_error */
KN_API void kn_clear_error(void);
/* Called once with each error that comes to stand (not for the ones that follow it). */
typedef void (*kn_error_handler)(const char *message, void *arg);
KN_API void kn_set_error_handler(kn_error_handler handler, void *arg);
/* abort() at the first error, for the debugger. Also KNAP_ABORT=1 in the environment. */
KN_API void kn_abort_on_error(bool on);
/* The user's file and line for error texts: enter notes one and gives the one before, which leave
 * takes back. The macros of places.h do both around each call of a public function. */
typedef struct kn_place {
    const char *file; /* NULL: none; must stay valid */
    int line;
} kn_place;
KN_API kn_place kn_place_enter(const char *file, int line);
KN_API void kn_place_leave(kn_place *before);
/* For messages that ask what was meant: the word of a '|'-separated list nearest to text (edits, at
 * most a third of its letters and at least 2, or a common start), copied into buf; NULL if none
 * is near. */
KN_API const char *kn_nearest(const char *text, const char *words, char *buf, size_t size);

#ifdef __cplusplus
}
#endif
#endif
