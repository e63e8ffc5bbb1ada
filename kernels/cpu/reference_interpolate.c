/* kernels/cpu/reference_interpolate.c: images of another size, and their gradient. */
#include "kernels/cpu/reference.h"
#include "kernels/grid.h"

/* Between two neighbours of a row that begins at. */
static double along(const kn_array *x, int64_t at, kn_grid_place w)
{
    const double left = kn_ref_get(x, at + w.first * x->stride[3]);
    if (w.part == 0)
        return left;
    return (1 - w.part) * left + w.part * kn_ref_get(x, at + (w.first + 1) * x->stride[3]);
}

kn_status kn_ref_interpolate(const void *args)
{
    const kn_interpolate_args *a = args;
    const kn_array *x = &a->x;
    const kn_grid_dim rows = kn_grid_dim_of(&a->grid, a->linear, 0, x, &a->y);
    const kn_grid_dim columns = kn_grid_dim_of(&a->grid, a->linear, 1, x, &a->y);
    for (kn_ref_walk i = kn_ref_walk_over(&a->y, NULL); i.more; kn_ref_walk_next(&i)) {
        const kn_grid_place h = kn_grid_at(&rows, i.at[2]), w = kn_grid_at(&columns, i.at[3]);
        const int64_t row = kn_ref_at(x, i.at[0], i.at[1], h.first, 0);
        double v = along(x, row, w);
        if (h.part != 0)
            v = (1 - h.part) * v + h.part * along(x, row + x->stride[2], w);
        kn_ref_set_computed(&a->y, i.off[0], v);
    }
    return KN_DONE;
}

kn_status kn_ref_interpolate_grad(const void *args)
{
    const kn_interpolate_grad_args *a = args;
    const kn_array *dy = &a->dy;
    const kn_grid_dim rows = kn_grid_dim_of(&a->grid, a->linear, 0, &a->dx, dy);
    const kn_grid_dim columns = kn_grid_dim_of(&a->grid, a->linear, 1, &a->dx, dy);
    for (kn_ref_walk i = kn_ref_walk_over(&a->dx, NULL); i.more; kn_ref_walk_next(&i)) {
        const int64_t h = i.at[2], w = i.at[3];
        double sum = 0;
        for (int64_t p = kn_grid_from(&rows, h); p < kn_grid_to(&rows, h); p++) {
            const double share = kn_grid_share(&rows, p, h);
            for (int64_t q = kn_grid_from(&columns, w); share != 0 && q < kn_grid_to(&columns, w);
                 q++) {
                const double by = share * kn_grid_share(&columns, q, w);
                if (by != 0)
                    sum += by * kn_ref_get(dy, kn_ref_at(dy, i.at[0], i.at[1], p, q));
            }
        }
        kn_ref_set_computed(&a->dx, i.off[0], sum);
    }
    return KN_DONE;
}
