/* state/rectangles.h (private): an interval of a tensor's elements (fsdp/layout.h) as rectangles of
 * the whole shape, which is how files of shards say what they hold, and back.
 *
 * A run of elements of a matrix is at most three rectangles: the end of a row, whole rows, the
 * beginning of a row. Each further dim adds two: a run of a shape of n dims is at most 2n - 1. */
#ifndef KNAP_STATE_RECTANGLES_H
#define KNAP_STATE_RECTANGLES_H

#include "fsdp/layout.h"

#define KN_MAX_RECTANGLES (2 * KN_MAX_DIMS - 1)

/* The elements with offset[d] <= index[d] < offset[d] + size[d]; of ndim 0: the one element. */
typedef struct kn_rectangle {
    int64_t offset[KN_MAX_DIMS], size[KN_MAX_DIMS];
} kn_rectangle;

/* The rectangles of part, in the order of its elements: taken one after another, each row-major,
 * they give the part's elements in the order in which a contiguous buffer holds them. Returns how
 * many (0 for an empty part), or -1 with an error that names the tensor: part reaches beyond the
 * shape, or its runs are no rectangle of it. A shape without elements is one rectangle: the shape
 * itself. */
int kn_interval_rectangles(const char *name, int ndim, const int64_t *shape, kn_interval part,
                           kn_rectangle rectangle[KN_MAX_RECTANGLES]);
int64_t kn_rectangle_numel(int ndim, const kn_rectangle *r);
/* The elements that a and b share; whether there are any. out may be a or b. */
bool kn_rectangle_meet(int ndim, const kn_rectangle *a, const kn_rectangle *b, kn_rectangle *out);

/* Whether the rectangles cover the shape: each element once. If not, an error that names the tensor
 * and an element that lies in two of them, or in none. file[i], borrowed, is where rectangle[i]
 * lies, for the error. */
bool kn_rectangles_cover(const char *name, int ndim, const int64_t *shape,
                         const kn_rectangle *rectangle, const char *const *file, int count);

#endif
