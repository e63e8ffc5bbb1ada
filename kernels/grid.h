/* kernels/grid.h (private): where the positions of an interpolated image lie along one dim; for the
 * CPU and for CUDA. */
#ifndef KNAP_KERNELS_GRID_H
#define KNAP_KERNELS_GRID_H

#include "kernels/convert.h"
#include "kernels/image_args.h"

/* One dim: `read` elements of x, `made` positions of y. */
typedef struct kn_grid_dim {
    double mul, div, centre;
    int64_t read, made;
    bool linear;
} kn_grid_dim;

/* x is the image that is read in forward, y the one that is made; d: 0 for rows, 1 for columns. */
static inline kn_grid_dim kn_grid_dim_of(const kn_grid *g, bool linear, int d, const kn_array *x,
                                         const kn_array *y)
{
    const kn_grid_dim r = { g->mul[d],       g->div[d],       g->centre,
                            x->shape[2 + d], y->shape[2 + d], linear };
    return r;
}

/* A position: between element first and the next one; part: the weight of the next one, in [0, 1).
 * Where it is 0, the next one may not exist. */
typedef struct kn_grid_place {
    int64_t first;
    double part;
} kn_grid_place;

static inline KN_HD kn_grid_place kn_grid_at(const kn_grid_dim *d, int64_t p)
{
    const double at = ((double)p + d->centre) * d->mul / d->div - d->centre;
    const double last = (double)(d->read - 1);
    kn_grid_place place = { 0, 0 };
    if (at >= last)
        place.first = d->read - 1;
    else if (at > 0)
        place.first = (int64_t)at;
    if (d->linear && at > 0 && at < last)
        place.part = at - (double)place.first;
    return place;
}

/* The weight of element h at position p. */
static inline KN_HD double kn_grid_share(const kn_grid_dim *d, int64_t p, int64_t h)
{
    const kn_grid_place place = kn_grid_at(d, p);
    if (place.first == h)
        return 1 - place.part;
    return place.first == h - 1 ? place.part : 0;
}

/* The position at h, moved by so much, as one of [0, made]. */
static inline KN_HD int64_t kn_grid_near(const kn_grid_dim *d, int64_t h, double move)
{
    const double p = ((double)h + d->centre) * d->div / d->mul - d->centre + move;
    if (!(p > 0))
        return 0;
    return p < (double)d->made ? (int64_t)p : d->made;
}

/* The first position that may have a share of element h, and the one after the last. */
static inline KN_HD int64_t kn_grid_from(const kn_grid_dim *d, int64_t h)
{
    return h == 0 || !(d->mul > 0) ? 0 : kn_grid_near(d, h - 1, -1);
}

static inline KN_HD int64_t kn_grid_to(const kn_grid_dim *d, int64_t h)
{
    return h == d->read - 1 || !(d->mul > 0) ? d->made : kn_grid_near(d, h + 1, 2);
}

#endif
