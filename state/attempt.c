/* state/attempt.c: an error that doesn't count. */
#include "state/attempt.h"

#include "kernels/error_internal.h"
#include <stdio.h>

void kn_attempt_begin(kn_attempt *a)
{
    kn_context *c = kn_context_get();
    *a = (kn_attempt){ .counts = !kn_ok() };
    pthread_mutex_lock(&c->lock);
    a->internal = c->on_error_internal;
    a->user = c->on_error;
    a->abort = c->abort_on_error;
    c->on_error_internal = NULL;
    c->on_error = NULL;
    c->abort_on_error = false;
    pthread_mutex_unlock(&c->lock);
}

bool kn_attempt_end(kn_attempt *a, char error[KN_ATTEMPT_TEXT])
{
    kn_context *c = kn_context_get();
    bool ok = kn_ok();
    a->number = kn_error_number();
    snprintf(error, KN_ATTEMPT_TEXT, "%s", ok ? "" : kn_error());
    if (!ok && !a->counts)
        kn_clear_error();
    pthread_mutex_lock(&c->lock);
    c->on_error_internal = a->internal;
    c->on_error = a->user;
    c->abort_on_error = a->abort;
    pthread_mutex_unlock(&c->lock);
    return ok;
}
