/* kernels/error.c: sticky errors. The first error of a context stands until it is cleared; the ones
 * that follow from it are dropped, because the first cause is the one to read. Recording one needs
 * no allocation, so that running out of memory can be reported too. */
#include "kernels/context.h"
#include "kernels/error_internal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* On a worker: the line that launched the running job. The context's own place belongs to the
 * creator's thread, which may have moved on by now. */
static _Thread_local const char *job_file;
static _Thread_local int job_line;

kn_place kn_place_enter(const char *file, int line)
{
    kn_place before;
    kn_place_get(&before.file, &before.line);
    kn_place_set(file, line);
    return before;
}

void kn_place_leave(kn_place *before)
{
    kn_place_set(before->file, before->line);
}

void kn_place_set(const char *file, int line)
{
    if (kn_context_is_worker()) {
        job_file = file;
        job_line = line;
    } else {
        kn_context *c = kn_context_get();
        c->user_file = file;
        c->user_line = line;
    }
}

void kn_place_get(const char **file, int *line)
{
    bool worker = kn_context_is_worker();
    const kn_context *c = worker ? NULL : kn_context_get();
    *file = worker ? job_file : c->user_file;
    *line = worker ? job_line : c->user_line;
}

/* Appends " in mlp.fc1, gpt.c:41", or the known part of it. */
static void append_place(const kn_context *c, char *text, size_t size)
{
    const char *file, *path = kn_context_is_worker() ? "" : kn_context_path(c);
    int line;
    size_t used = strlen(text);
    kn_place_get(&file, &line);
    if (path && *path)
        used += (size_t)snprintf(text + used, size - used, " in %s", path);
    if (file && used < size)
        snprintf(text + used, size - used, "%s%s:%d", path && *path ? ", " : " at ", file, line);
}

/* Names may come from any file: characters that control a terminal are not printed. C0, DEL, and
 * the C1 controls as UTF-8 has them (c2 80 to c2 9f). */
void kn_defuse(char *text)
{
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        bool c1 = *p == 0xc2 && p[1] >= 0x80 && p[1] <= 0x9f;
        if (c1)
            p[1] = '?';
        if (*p < 0x20 || *p == 0x7f || c1)
            *p = '?';
    }
}

/* A NULL among the names of a message, which the C library prints as "(null)". */
static void name_nulls(char *text, size_t size)
{
    static const char null[] = "(null)", word[] = "unnamed";
    for (char *at = text; (at = strstr(at, null)); at += strlen(word)) {
        const size_t room = size - (size_t)(at - text), rest = strlen(at + strlen(null));
        if (room <= strlen(word) + rest)
            return;
        memmove(at + strlen(word), at + strlen(null), rest + 1);
        memcpy(at, word, strlen(word));
    }
}

/* text has room for the context's; number: errno, or 0. */
static void record(kn_context *c, char *text, int number)
{
    kn_defuse(text);
    pthread_mutex_lock(&c->lock);
    bool first = !atomic_load(&c->failed);
    if (first) {
        memcpy(c->error_room, text, sizeof c->error_room);
        c->error = c->error_room;
        c->error_number = number;
        atomic_store(&c->failed, true);
    }
    kn_error_handler internal = c->on_error_internal, user = c->on_error;
    void *internal_arg = c->on_error_internal_arg, *user_arg = c->on_error_arg;
    bool stop = c->abort_on_error;
    pthread_mutex_unlock(&c->lock);

    if (!first)
        return;
    if (internal)
        internal(text, internal_arg);
    if (user)
        user(text, user_arg);
    if (stop)
        abort();
}

void (*kn_error_details)(char *text, size_t size);

static void KN_PRINTF(3, 0) fail(int number, const char *before, const char *fmt, va_list ap)
{
    kn_context *c = kn_context_get();
    char text[sizeof c->error_room];
    if (atomic_load(&c->failed))
        return;
    const size_t used = (size_t)snprintf(text, sizeof text, "%s", before);
    errno = number; /* for %m */
    if (vsnprintf(text + used, sizeof text - used, fmt, ap) < 0)
        snprintf(text, sizeof text, "an error whose text cannot be formatted: %s", fmt);
    name_nulls(text, sizeof text);
    if (kn_error_details && !kn_context_is_worker())
        kn_error_details(text, sizeof text);
    append_place(c, text, sizeof text);
    record(c, text, number);
}

bool kn_fail(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fail(0, "", fmt, ap);
    va_end(ap);
    return false;
}

void *kn_fail_null(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fail(0, "", fmt, ap);
    va_end(ap);
    return NULL;
}

bool kn_fail_system(const char *fmt, ...)
{
    const int number = errno;
    va_list ap;
    va_start(ap, fmt);
    fail(number ? number : EIO, "", fmt, ap);
    va_end(ap);
    return false;
}

bool kn_fail_memory(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fail(ENOMEM, "out of memory: ", fmt, ap);
    va_end(ap);
    return false;
}

bool kn_fail_of_rank(int rank, const char *error)
{
    kn_context *c = kn_context_get();
    char text[sizeof c->error_room];
    int first, length = 0;
    if (atomic_load(&c->failed))
        return false;
    if (sscanf(error, "rank %d failed: %n", &first, &length) == 1 && length > 0)
        snprintf(text, sizeof text, "%s", error); /* that rank passed it on */
    else
        snprintf(text, sizeof text, "rank %d failed: %s", rank, error);
    record(c, text, 0);
    return false;
}

bool kn_given(const void *p, const char *what, const char *noun)
{
    return p || kn_fail("%s: %s is NULL", what, noun);
}

bool kn_given_path(const char *path, const char *what, const char *noun)
{
    return kn_given(path, what, noun) && (*path || kn_fail("%s: %s is empty", what, noun));
}

bool kn_ok(void)
{
    return !atomic_load(&kn_context_get()->failed);
}

const char *kn_error(void)
{
    kn_context *c = kn_context_get();
    pthread_mutex_lock(&c->lock);
    const char *text = c->error;
    pthread_mutex_unlock(&c->lock);
    return text;
}

int kn_error_number(void)
{
    kn_context *c = kn_context_get();
    pthread_mutex_lock(&c->lock);
    int number = c->error ? c->error_number : 0;
    pthread_mutex_unlock(&c->lock);
    return number;
}

void kn_clear_error(void)
{
    kn_context *c = kn_context_get();
    pthread_mutex_lock(&c->lock);
    c->error = NULL;
    atomic_store(&c->failed, false);
    pthread_mutex_unlock(&c->lock);
}

void kn_set_error_handler(kn_error_handler handler, void *arg)
{
    kn_context *c = kn_context_get();
    pthread_mutex_lock(&c->lock);
    c->on_error = handler;
    c->on_error_arg = arg;
    pthread_mutex_unlock(&c->lock);
}

void kn_abort_on_error(bool on)
{
    kn_context *c = kn_context_get();
    pthread_mutex_lock(&c->lock);
    c->abort_on_error = on;
    pthread_mutex_unlock(&c->lock);
}
