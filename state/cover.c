/* state/cover.c: whether rectangles cover a shape, each element once. They do if none overlaps
 * another and together they have as many elements as the shape; where they don't, a search finds an
 * element to name. */
#include "kernels/error.h"
#include "kernels/memory.h"
#include "state/rectangles.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEARCH_STEPS 1000000 /* of the search: an error's text is not worth more */

typedef struct cover {
    const char *name;
    int ndim, count;
    const int64_t *shape;
    const kn_rectangle *r;
    const char *const *file;
    int64_t element[KN_MAX_DIMS]; /* what the search found */
    int *list;                    /* [ndim + 1][count]: the rectangles that hold an index */
    int64_t steps;
} cover;

/* ---- the check ------------------------------------------------------------------------------- */

static int compare_first(const void *x, const void *y)
{
    const kn_rectangle *a = *(const kn_rectangle *const *)x, *b = *(const kn_rectangle *const *)y;
    return (a->offset[0] > b->offset[0]) - (a->offset[0] < b->offset[0]);
}

/* Only rectangles that begin before this one ends in dim 0 can overlap it. */
static bool overlap(const cover *c, const kn_rectangle **order)
{
    kn_rectangle both;
    for (int i = 0; i < c->count; i++)
        for (int j = i + 1; j < c->count; j++) {
            if (order[j]->offset[0] >= order[i]->offset[0] + order[i]->size[0])
                break;
            if (kn_rectangle_meet(c->ndim, order[i], order[j], &both))
                return true;
        }
    return false;
}

/* Whether each element is covered once; *ok false if there is no memory to find out. */
static bool covered(const cover *c, int64_t *held, bool *ok)
{
    int64_t all = 1;
    *held = 0;
    for (int d = 0; d < c->ndim; d++)
        all *= c->shape[d];
    for (int i = 0; i < c->count; i++)
        if (__builtin_add_overflow(*held, kn_rectangle_numel(c->ndim, &c->r[i]), held))
            return false;
    if (*held != all)
        return false;
    if (c->ndim == 0 || c->count < 2)
        return true; /* as many elements as there are, none twice */
    const kn_rectangle **order = kn_host_calloc((size_t)c->count, sizeof *order);
    *ok = order != NULL;
    if (!order)
        return false;
    for (int i = 0; i < c->count; i++)
        order[i] = &c->r[i];
    qsort(order, (size_t)c->count, sizeof *order, compare_first);
    bool twice = overlap(c, order);
    kn_host_free(order);
    return !twice;
}

/* ---- the search for an element to name ------------------------------------------------------- */

/* The rectangles of from that hold index x of dim d go to `to`; *next becomes the first index after
 * x at which that changes. */
static int holding(const cover *c, int d, int64_t x, const int *from, int n, int *to, int64_t *next)
{
    int held = 0;
    *next = c->shape[d];
    for (int i = 0; i < n; i++) {
        const kn_rectangle *r = &c->r[from[i]];
        int64_t begin = r->offset[d], end = begin + r->size[d];
        int64_t change = begin > x ? begin : end;
        if (begin <= x && x < end)
            to[held++] = from[i];
        if (change > x && change < *next)
            *next = change;
    }
    return held;
}

/* Finds an element, by its indices from dim d on, that not exactly one of n rectangles holds; which
 * ones hold it is left in list, and how many in *held. */
static bool find(cover *c, int d, int n, int *held)
{
    int *list = c->list + (size_t)d * (size_t)c->count;
    if (n == 0 || d == c->ndim) {
        *held = n;
        c->list = list;
        return n != 1;
    }
    for (int64_t x = 0, next; x < c->shape[d] && c->steps > 0; x = next) {
        c->steps -= n;
        int some = holding(c, d, x, list, n, list + c->count, &next);
        int *base = c->list;
        c->element[d] = x;
        if (find(c, d + 1, some, held))
            return true;
        c->list = base;
        c->element[d] = 0;
    }
    return false;
}

static void explain(cover *c, int64_t held)
{
    char where[KN_MAX_DIMS * 22 + 3] = "[";
    int n = 0, at = 1;
    c->steps = SEARCH_STEPS;
    if (!(c->list = kn_host_calloc((size_t)c->count * (size_t)(c->ndim + 1) + 1, sizeof(int))))
        return;
    int *list = c->list;
    for (int i = 0; i < c->count; i++)
        list[i] = i;
    bool found = find(c, 0, c->count, &n);
    for (int d = 0; d < c->ndim; d++)
        at += snprintf(where + at, sizeof where - (size_t)at, d ? ", %lld" : "%lld",
                       (long long)c->element[d]);
    if (!found)
        kn_fail(
            "tensor \"%.200s\": its parts in the files hold %lld elements, and not each element "
            "of its shape once",
            c->name, (long long)held);
    else if (n == 0)
        kn_fail("tensor \"%.200s\": no file holds its element %s]: a file is missing or isn't of "
                "this checkpoint",
                c->name, where);
    else
        kn_fail("tensor \"%.200s\": its element %s] lies in two files, %.200s and %.200s: they "
                "aren't of one checkpoint",
                c->name, where, c->file[c->list[0]], c->file[c->list[1]]);
    kn_host_free(list);
}

static bool check_inside(const cover *c)
{
    for (int i = 0; i < c->count; i++)
        for (int d = 0; d < c->ndim; d++)
            if (c->r[i].offset[d] < 0 || c->r[i].size[d] < 0 ||
                c->r[i].offset[d] > c->shape[d] - c->r[i].size[d])
                return kn_fail("%s: tensor \"%.200s\": its part reaches beyond its shape in dim %d",
                               c->file[i], c->name, d);
    return true;
}

bool kn_rectangles_cover(const char *name, int ndim, const int64_t *shape,
                         const kn_rectangle *rectangle, const char *const *file, int count)
{
    cover c = { name, ndim, count, shape, rectangle, file, { 0 }, NULL, 0 };
    int64_t held;
    bool ok = true;
    if (!check_inside(&c))
        return false;
    if (covered(&c, &held, &ok))
        return true;
    if (ok)
        explain(&c, held);
    return false;
}
