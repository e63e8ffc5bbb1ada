/* fsdp/alike.c: whether ranks have alike what they must (alike.h). */
#include "fsdp/alike.h"
#include "comm/comm_internal.h"
#include "kernels/memory_internal.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool kn_alike_add(kn_alike *a, uint64_t value, const char *name, const char *format, ...)
{
    va_list list, again;
    va_start(list, format);
    va_copy(again, list);
    size_t named = strlen(name) + 1, shown = (size_t)vsnprintf(NULL, 0, format, list) + 1;
    int64_t size = a->size + (int64_t)(sizeof value + named + shown);
    bool ok = kn_host_grow(&a->text, &a->room, size, 1);
    if (ok) {
        char *at = a->text + a->size;
        memcpy(at, &value, sizeof value);
        memcpy(at + sizeof value, name, named);
        vsnprintf(at + sizeof value + named, shown, format, again);
        a->size = size;
        a->hash = kn_hash64(kn_hash64(a->hash, kn_hash_string(name)), value);
    }
    va_end(again);
    va_end(list);
    return ok;
}

void kn_alike_free(kn_alike *a)
{
    kn_host_free(a->text);
    a->text = NULL;
}

/* ---- the difference -------------------------------------------------------------------------- */

typedef struct line {
    uint64_t value;
    const char *name, *shown; /* NULL: the list has ended */
} line;

static line next(const char **at, const char *end)
{
    line l = { 0 };
    if (*at >= end)
        return l;
    memcpy(&l.value, *at, sizeof l.value);
    l.name = *at + sizeof l.value;
    l.shown = l.name + strlen(l.name) + 1;
    *at = l.shown + strlen(l.shown) + 1;
    return l;
}

static bool equal(line a, line b)
{
    return a.name && b.name && strcmp(a.name, b.name) == 0 &&
           (a.value == b.value || strcmp(a.shown, b.shown) == 0);
}

/* The sentence of the first line in which a differs from text[size], the list of rank first; ""
 * where none does. */
static void describe(char *sentence, size_t room, const kn_alike *a, const char *text, size_t size,
                     const char *what, int first, int rank)
{
    const char *at = text, *own = a->text;
    line theirs, mine;
    *sentence = 0;
    do {
        theirs = next(&at, text + size);
        mine = next(&own, a->text + a->size);
    } while (equal(theirs, mine));
    if (theirs.name && mine.name && strcmp(theirs.name, mine.name) != 0)
        snprintf(sentence, room, "%s: rank %d has %s (%.300s) where rank %d has %s (%.300s); %s",
                 what, first, theirs.name, theirs.shown, rank, mine.name, mine.shown, a->advice);
    else if (theirs.name || mine.name)
        snprintf(sentence, room, "%s: %s is %.300s on rank %d and %.300s on rank %d; %s", what,
                 theirs.name ? theirs.name : mine.name, theirs.name ? theirs.shown : "missing",
                 first, mine.name ? mine.shown : "missing", rank, a->advice);
}

/* Ranks first and rank have other hashes of list a: all ranks learn why. */
static bool compare(const kn_alike *a, kn_comm *comm, int first, int rank, const char *what)
{
    char sentence[1024] = "";
    size_t size = (size_t)a->size, length;
    char *text = kn_broadcast_bytes(comm, a->text, &size, first);
    if (text && kn_rank(comm) == rank)
        describe(sentence, sizeof sentence, a, text, size, what, first, rank);
    length = strlen(sentence);
    char *said = text ? kn_broadcast_bytes(comm, sentence, &length, rank) : NULL;
    bool ok = said && (length == 0 || kn_fail("%s", said));
    kn_host_free(text);
    kn_host_free(said);
    return ok;
}

bool kn_alike_agree(const kn_alike *a, int n, kn_comm *comm, const char *what)
{
    int size = kn_comm_size(comm), rank = kn_rank(comm);
    if (size == 1 || !kn_ok())
        return kn_ok();
    uint64_t *all = kn_host_alloc((size_t)size * (size_t)n * sizeof *all);
    for (int r = 0; all && r < size; r++) /* ranks that are simulated have the same */
        for (int i = 0; i < n; i++)
            all[r * n + i] = a[i].hash;
    bool ok =
        all && kn_all_gather(comm, all, &all[rank * n], n, KN_I64, kn_compute_stream(KN_CPU), what);
    for (int i = 0; ok && i < n; i++)
        for (int r = 1; ok && r < size; r++) {
            int first = r % (a[i].shards ? a[i].shards : 1);
            if (all[r * n + i] != all[first * n + i])
                ok = compare(&a[i], comm, first, r, what);
        }
    kn_host_free(all);
    return ok;
}
