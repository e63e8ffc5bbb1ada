/* state/rectangles.c: runs of elements as rectangles of a shape, and covering a shape with them.
 *
 *   . . . o o       the elements 3 .. 16 of [5, 5]: the end of a row, two whole rows, the
 *   o o o o o       beginning of a row. With more dims an end or a beginning is itself a
 *   o o o o o       run of the dims that follow, and cut the same way. */
#include "kernels/error.h"
#include "state/rectangles.h"

/* ---- an interval as rectangles --------------------------------------------------------------- */

typedef struct cutting {
    int ndim; /* dims that are cut; a rectangle may have more */
    const int64_t *shape;
    kn_rectangle *out;
    int count;
} cutting;

static int64_t product(const int64_t *shape, int from, int to)
{
    int64_t n = 1;
    for (int d = from; d < to; d++)
        n *= shape[d];
    return n;
}

/* Adds the rectangle that follows at in the dims before d, has the indices [from, to) of dim d, and
 * all of the dims after it. */
static void add(cutting *c, const int64_t *at, int d, int64_t from, int64_t to)
{
    kn_rectangle *r = &c->out[c->count++];
    *r = (kn_rectangle){ 0 };
    for (int i = 0; i < c->ndim; i++) {
        r->offset[i] = i < d ? at[i] : 0;
        r->size[i] = i < d ? 1 : c->shape[i];
    }
    if (d < c->ndim) {
        r->offset[d] = from;
        r->size[d] = to - from;
    }
}

/* The elements [a, b), a < b, of the dims from d on, at a place of the dims before d. */
static void cut_run(cutting *c, int64_t *at, int d, int64_t a, int64_t b)
{
    if (d + 1 >= c->ndim) {
        add(c, at, d, a, b);
        return;
    }
    int64_t row = product(c->shape, d + 1, c->ndim), first = a / row, last = b / row;
    at[d] = first;
    if (first == last) {
        cut_run(c, at, d + 1, a % row, b % row);
        return;
    }
    if (a % row)
        cut_run(c, at, d + 1, a % row, row);
    if (first + (a % row > 0) < last)
        add(c, at, d, first + (a % row > 0), last);
    at[d] = last;
    if (b % row)
        cut_run(c, at, d + 1, 0, b % row);
}

/* Runs at equal distances are a cut of one dim: each takes the same indices of it and all of the
 * dims after it, and the places of the runs in the dims before are themselves a run. The last dim
 * for which that holds, or -1. */
static int cut_dim(int ndim, const int64_t *shape, kn_interval p)
{
    for (int d = ndim - 1; d > 0; d--) {
        int64_t inner = product(shape, d + 1, ndim), all = inner * shape[d];
        if (all == p.stride && p.start % inner == 0 && p.count % inner == 0 &&
            p.start % all + p.count <= all)
            return d;
    }
    return -1;
}

/* Whether part lies in the shape, whose elements are counted. */
static bool inside(const char *name, int ndim, const int64_t *shape, kn_interval p, int64_t *numel)
{
    int64_t last, end;
    *numel = 1;
    bool ok = ndim >= 0 && ndim <= KN_MAX_DIMS;
    for (int d = 0; d < ndim && ok; d++)
        ok = shape[d] >= 0 && !__builtin_mul_overflow(*numel, shape[d], numel);
    if (!ok)
        return kn_fail("tensor \"%.200s\": a shape of %d dims with a negative size or too many "
                       "elements",
                       name, ndim);
    if (p.start < 0 || p.count < 0 || p.blocks < 0 || (p.blocks > 1 && p.stride < p.count))
        return kn_fail("tensor \"%.200s\": a part with negative numbers or runs that overlap",
                       name);
    if (p.blocks == 0 || p.count == 0)
        return true;
    if (__builtin_mul_overflow(p.blocks - 1, p.blocks > 1 ? p.stride : 0, &last) ||
        __builtin_add_overflow(last, p.start, &last) ||
        __builtin_add_overflow(last, p.count, &end) || end > *numel)
        return kn_fail("tensor \"%.200s\": a part reaches beyond its %lld elements", name,
                       (long long)*numel);
    return true;
}

int kn_interval_rectangles(const char *name, int ndim, const int64_t *shape, kn_interval part,
                           kn_rectangle rectangle[KN_MAX_RECTANGLES])
{
    int64_t at[KN_MAX_DIMS] = { 0 }, numel;
    cutting c = { ndim, shape, rectangle, 0 };
    if (!inside(name, ndim, shape, part, &numel))
        return -1;
    if (numel == 0 || ndim == 0) {
        if (numel == 0 || part.blocks * part.count > 0)
            add(&c, at, 0, 0, ndim ? shape[0] : 1);
        return c.count;
    }
    if (part.blocks * part.count == 0)
        return 0;
    if (part.blocks == 1 || part.stride == part.count) {
        cut_run(&c, at, 0, part.start, part.start + part.blocks * part.count);
        return c.count;
    }
    int d = cut_dim(ndim, shape, part);
    if (d < 0) {
        kn_fail("tensor \"%.200s\": its %lld runs of %lld elements at distances of %lld are no "
                "rectangle of its shape",
                name, (long long)part.blocks, (long long)part.count, (long long)part.stride);
        return -1;
    }
    int64_t inner = product(shape, d + 1, ndim), outer = part.start / part.stride;
    c.ndim = d;
    cut_run(&c, at, 0, outer, outer + part.blocks);
    for (int i = 0; i < c.count; i++) {
        rectangle[i].offset[d] = part.start % part.stride / inner;
        rectangle[i].size[d] = part.count / inner;
        for (int e = d + 1; e < ndim; e++)
            rectangle[i].size[e] = shape[e];
    }
    return c.count;
}

int64_t kn_rectangle_numel(int ndim, const kn_rectangle *r)
{
    return product(r->size, 0, ndim);
}

bool kn_rectangle_meet(int ndim, const kn_rectangle *a, const kn_rectangle *b, kn_rectangle *out)
{
    kn_rectangle both = { 0 };
    for (int d = 0; d < ndim; d++) {
        int64_t from = a->offset[d] > b->offset[d] ? a->offset[d] : b->offset[d];
        int64_t end_a = a->offset[d] + a->size[d], end_b = b->offset[d] + b->size[d];
        int64_t to = end_a < end_b ? end_a : end_b;
        if (from >= to)
            return false;
        both.offset[d] = from;
        both.size[d] = to - from;
    }
    *out = both;
    return true;
}
