/* state/cover.c: whether rectangles cover a shape, each element once. The part that is left of it
 * is kept as boxes, from which one rectangle after the other is taken: one that isn't all there
 * overlaps an earlier one, and no rectangle holds the part that is left in the end. */
#include "kernels/error.h"
#include "kernels/memory_internal.h"
#include "state/rectangles.h"
#include <stdio.h>
#include <string.h>

typedef struct boxes {
    kn_rectangle *list;
    int count;
    int64_t room;
} boxes;

static bool add(boxes *b, const kn_rectangle *r)
{
    if (!kn_host_grow(&b->list, &b->room, b->count + 1, sizeof *b->list))
        return false;
    b->list[b->count++] = *r;
    return true;
}

/* Takes r from box number i, with which it shares `both`: what is left of the box, before and after
 * r in one dim after another, becomes boxes of its own. */
static bool take(boxes *b, int ndim, int i, const kn_rectangle *both)
{
    kn_rectangle box = b->list[i];
    b->list[i] = b->list[--b->count];
    for (int d = 0; d < ndim; d++) {
        const int64_t begin = box.offset[d], end = begin + box.size[d],
                      cut[2][2] = { { begin, both->offset[d] },
                                    { both->offset[d] + both->size[d], end } };
        for (int k = 0; k < 2; k++) {
            box.offset[d] = cut[k][0];
            box.size[d] = cut[k][1] - cut[k][0];
            if (box.size[d] > 0 && !add(b, &box))
                return false;
        }
        box.offset[d] = both->offset[d];
        box.size[d] = both->size[d];
    }
    return true;
}

/* Takes r from all boxes; *left: its elements that weren't in them. */
static bool take_all(boxes *b, int ndim, const kn_rectangle *r, int64_t *left)
{
    kn_rectangle both;
    *left = kn_rectangle_numel(ndim, r);
    for (int i = b->count - 1; i >= 0 && *left > 0; i--) /* new ones come behind, without r */
        if (kn_rectangle_meet(ndim, &b->list[i], r, &both)) {
            *left -= kn_rectangle_numel(ndim, &both);
            if (!take(b, ndim, i, &both))
                return false;
        }
    return true;
}

static const char *element(int ndim, const int64_t *at, char *text, size_t size)
{
    size_t n = (size_t)snprintf(text, size, "[");
    for (int d = 0; d < ndim; d++)
        n += (size_t)snprintf(text + n, size - n, d ? ", %lld" : "%lld", (long long)at[d]);
    snprintf(text + n, size - n, "]");
    return text;
}

enum { ELEMENT = KN_MAX_DIMS * 22 + 3 };

static bool fail_hole(const char *name, int ndim, const kn_rectangle *box)
{
    char text[ELEMENT];
    return kn_fail("tensor \"%.200s\": no file holds its element %s: a file is missing or isn't of "
                   "this checkpoint",
                   name, element(ndim, box->offset, text, sizeof text));
}

/* Rectangle number i overlaps an earlier one. */
static bool fail_overlap(const char *name, int ndim, const kn_rectangle *r, const char *const *file,
                         int i)
{
    char text[ELEMENT];
    kn_rectangle both;
    int k = 0;
    while (!kn_rectangle_meet(ndim, &r[k], &r[i], &both))
        k++;
    return kn_fail("tensor \"%.200s\": its element %s lies in two files, %.200s and %.200s: they "
                   "aren't of one checkpoint",
                   name, element(ndim, both.offset, text, sizeof text), file[k], file[i]);
}

static bool is_inside(int ndim, const int64_t *shape, const kn_rectangle *r, int *dim)
{
    for (*dim = 0; *dim < ndim; ++*dim)
        if (r->offset[*dim] < 0 || r->size[*dim] < 0 ||
            r->offset[*dim] > shape[*dim] - r->size[*dim])
            return false;
    return true;
}

bool kn_rectangles_cover(const char *name, int ndim, const int64_t *shape,
                         const kn_rectangle *rectangle, const char *const *file, int count)
{
    kn_rectangle all = { 0 };
    boxes b = { 0 };
    int64_t left;
    int dim;
    memcpy(all.size, shape, (size_t)ndim * sizeof *shape);
    bool ok = kn_rectangle_numel(ndim, &all) == 0 || add(&b, &all);
    for (int i = 0; ok && i < count; i++) {
        if (!is_inside(ndim, shape, &rectangle[i], &dim))
            ok = kn_fail("%s: tensor \"%.200s\": its part reaches beyond its shape in dim %d",
                         file[i], name, dim);
        else if ((ok = take_all(&b, ndim, &rectangle[i], &left)) && left > 0)
            ok = fail_overlap(name, ndim, rectangle, file, i);
    }
    ok = ok && (b.count == 0 || fail_hole(name, ndim, b.list));
    kn_host_free(b.list);
    return ok;
}
