/* models/programs/sums.c: sums by a pair of numbers. */
#include "models/programs/sums.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"

#include <stdio.h>
#include <stdlib.h>

sum *sums_at(sums *s, int32_t a, int32_t b)
{
    char key[32];
    snprintf(key, sizeof key, "%d %d", a, b);
    const int64_t before = s->key.count;
    const int32_t at = names_add(&s->key, key);
    if (at < 0 || !kn_host_grow(&s->sum, &s->room, s->key.count, sizeof *s->sum))
        return NULL;
    if (at == before)
        s->sum[at] = (sum){ .a = a, .b = b };
    return &s->sum[at];
}

void sums_free(sums *s)
{
    names_free(&s->key);
    kn_host_free(s->sum);
}

static int by_time(const void *a, const void *b)
{
    const sum *s = a, *t = b;
    return (s->time < t->time) - (s->time > t->time);
}

static int by_bytes(const void *a, const void *b)
{
    const sum *s = a, *t = b;
    return (s->bytes < t->bytes) - (s->bytes > t->bytes);
}

static int64_t sort(sums *s, int (*order)(const void *, const void *))
{
    if (s->key.count > 0)
        qsort(s->sum, (size_t)s->key.count, sizeof *s->sum, order);
    return s->key.count;
}

int64_t sums_sort_by_time(sums *s)
{
    return sort(s, by_time);
}

int64_t sums_sort_by_bytes(sums *s)
{
    return sort(s, by_bytes);
}
