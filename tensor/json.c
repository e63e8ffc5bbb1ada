/* tensor/json.c: texts of JSON. jansson 2.14 collects each string and number in a buffer, and takes
 * no notice where that can't grow: it goes on without a character, or ends the program. So a parse
 * whose memory ran out goes on in memory that was taken before, enough for that buffer and for the
 * values that may still come, and its result is dropped. Ours ends a few characters later: it is
 * told that the text does. */
#include "tensor/json.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Of the parse that runs on this thread. */
static _Thread_local struct {
    char *room; /* NULL: none runs */
    size_t size, used;
    bool ran_out;
} parse;

static void *take(size_t bytes)
{
    void *p = malloc(bytes);
    if (p || !parse.room)
        return p;
    parse.ran_out = true;
    if (bytes > parse.size - parse.used)
        return NULL;
    p = parse.room + parse.used;
    bytes += -bytes % sizeof(max_align_t);
    parse.used += bytes < parse.size - parse.used ? bytes : parse.size - parse.used;
    return p;
}

static void release(void *p)
{
    const uintptr_t at = (uintptr_t)p, room = (uintptr_t)parse.room;
    if (!room || at < room || at >= room + parse.size)
        free(p);
}

/* A program that has given jansson its own allocator keeps it. */
static void watch(void) __attribute__((constructor));
static void watch(void)
{
    json_malloc_t allocate;
    json_free_t give;
    json_get_alloc_funcs(&allocate, &give);
    if (allocate == malloc && give == free)
        json_set_alloc_funcs(take, release);
}

/* No string or number of the text is longer. */
static size_t longest(const char *text, size_t size)
{
    size_t most = 0, begin = 0;
    for (size_t i = 0; i < size; i++)
        if (text[i] == '\\')
            i++;
        else if (text[i] == '"') {
            most = i - begin > most ? i - begin : most;
            begin = i;
        }
    return size - begin > most ? size - begin : most;
}

enum {
    CHUNK = 64,      /* characters that are given at a time */
    PER_VALUE = 320, /* bytes: an object with a member in jansson 2.14; of as many as characters */
};

bool kn_json_watch(const char *text, size_t size, const char *where)
{
    /* the buffer doubles from 16 bytes on; CHUNK characters may come after memory ran out */
    parse.size = 4 * longest(text, size) + PER_VALUE * CHUNK + 1024;
    parse.used = 0;
    parse.ran_out = false;
    parse.room = malloc(parse.size);
    return parse.room || kn_fail_memory("%s could not be read", where);
}

bool kn_json_watched(const char *where)
{
    free(parse.room);
    parse.room = NULL;
    return !parse.ran_out || kn_fail_memory("%s could not be read", where);
}

typedef struct given {
    const char *text;
    size_t left;
} given;

static size_t give_chunk(void *to, size_t room, void *arg)
{
    given *g = arg;
    size_t n = room < CHUNK ? room : CHUNK;
    n = parse.ran_out ? 0 : n < g->left ? n : g->left;
    memcpy(to, g->text, n);
    g->text += n;
    g->left -= n;
    return n;
}

json_t *kn_json_next(const char *text, size_t size, size_t flags, const char *where,
                     json_error_t *e)
{
    given g = { text, size };
    json_t *j = json_load_callback(give_chunk, &g, flags, e);
    if (!parse.ran_out)
        return j;
    json_decref(j);
    kn_fail_memory("%s could not be read", where);
    return NULL;
}

json_t *kn_json_parse(const char *text, size_t size, size_t flags, const char *where,
                      json_error_t *e)
{
    if (!kn_json_watch(text, size, where))
        return NULL;
    json_t *j = kn_json_next(text, size, flags, where, e);
    kn_json_watched(where);
    return j;
}

char *kn_json_text(const json_t *j, size_t flags, const char *what)
{
    const size_t size = j ? json_dumpb(j, NULL, 0, flags) : 0;
    char *text = size > 0 ? kn_host_alloc(size + 1) : NULL;
    if (text && json_dumpb(j, text, size, flags) == size) {
        text[size] = 0;
        return text;
    }
    kn_host_free(text);
    if (kn_ok())
        kn_fail_memory("the text of %s", what);
    return NULL;
}

char *kn_json_copy(json_t *j, size_t flags, const char *what)
{
    char *text = kn_json_text(j, flags, what);
    json_decref(j);
    return text;
}

json_t *kn_json_sizes(const int64_t *size, int count)
{
    json_t *list = json_array();
    for (int i = 0; list && i < count; i++)
        if (json_array_append_new(list, json_integer(size[i])) != 0) {
            json_decref(list);
            list = NULL;
        }
    return list;
}

bool kn_json_read_sizes(const json_t *list, size_t count, int64_t *size)
{
    bool ok = json_is_array(list) && json_array_size(list) == count;
    for (size_t i = 0; ok && i < count; i++) {
        const json_t *x = json_array_get(list, i);
        size[i] = json_integer_value(x);
        ok = json_is_integer(x) && size[i] >= 0;
    }
    return ok;
}
