/* state/attempt.h (private): an error that doesn't count: the reader of a damaged checkpoint takes
 * the one before it, so its error must not become the rank's, which would end all ranks. */
#ifndef KNAP_STATE_ATTEMPT_H
#define KNAP_STATE_ATTEMPT_H

#include "kernels/context.h"
#include "kernels/error.h"

#define KN_ATTEMPT_TEXT 1024

typedef struct kn_attempt {
    bool counts; /* an error stood already, and stays */
    void (*internal)(const char *message, void *arg);
    kn_error_handler user;
    bool abort;
    int number; /* at the end: of the error, as kn_error_number tells it */
} kn_attempt;

/* From here to the end the thread's errors are told to nobody. */
void kn_attempt_begin(kn_attempt *a);
/* True where there was none; else its text is in error, and its number in a; no error stands. */
bool kn_attempt_end(kn_attempt *a, char error[KN_ATTEMPT_TEXT]);

#endif
