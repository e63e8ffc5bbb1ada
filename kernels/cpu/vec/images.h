/* kernels/cpu/vec/images.h (private): arrays x[N,C,...] as batch norm walks them, where channels
 * are planes without gaps (row-major) or lie side by side (channels-last), and sums over the
 * elements of each channel. Sums are in f32 over short runs and in f64 across them, cut by shape
 * alone. */
#ifndef KNAP_KERNELS_CPU_VEC_IMAGES_H
#define KNAP_KERNELS_CPU_VEC_IMAGES_H

#include "kernels/cpu/vec/iter.h"

enum { IMAGES = 5 };

/* Arrays of one shape, the first is there always; p NULL: none. last: M rows of C channels; else
 * planes of S. */
typedef struct images {
    bool last;
    int64_t N, C, S, M;
    int64_t n[IMAGES], c[IMAGES]; /* strides: of samples and channels, or n: of rows */
    char *p[IMAGES];
    kn_dtype t;
} images;

/* Where the gradient of a result is 0: nowhere; where h w + b, or y, is 0 or less. */
typedef enum image_mask { MASK_NONE, MASK_FROM_X, MASK_FROM_Y } image_mask;

/* The numbers of each channel, as f32 [C]. */
typedef struct factors {
    float *mean, *rstd, *w, *b;
    float *scale, *dw, *db; /* of a gradient: w rstd, and dw and db by M */
} factors;

/* The arrays of a gradient. */
enum { AT_X, AT_DY, AT_DX, AT_Y, AT_DADD };

#define images_of      VEC_FN(images_of)
#define image_sum_room VEC_FN(image_sum_room)
#define image_moments  VEC_FN(image_moments)
#define image_products VEC_FN(image_products)

/* False where the arrays don't lie in one of the two orders, all in the same. Data NULL: not there,
 * except for the first. */
bool images_of(images *m, int count, const kn_array *const a[]);
/* Numbers of scratch that sums of m take. */
int64_t image_sum_room(const images *m);
/* Means, then sums of squares around them, to sum[2][C]; x is read once. */
void image_moments(const images *m, double *sum);
/* sum dy h, then sum dy, to sum[2][C], with h = (x - mean) rstd and dy masked; the masked dy goes
 * to AT_DADD if that is there. */
void image_products(const images *m, image_mask mask, const factors *f, double *sum);

static inline int image_threads(const images *m)
{
    return kn_threads_for(m->M * m->C * 4);
}

/* NULL of an array that isn't there. */
VEC_INLINE void *image_plane(const images *m, int i, int64_t n, int64_t c, kn_dtype t)
{
    return m->p[i] ? m->p[i] + (n * m->n[i] + c * m->c[i]) * v_size(t) : NULL;
}

VEC_INLINE void *image_row(const images *m, int i, int64_t r, kn_dtype t)
{
    return m->p[i] ? m->p[i] + r * m->n[i] * v_size(t) : NULL;
}

/* Unit i: a row of channels, or the plane of a channel. */
VEC_INLINE void *image_unit(const images *m, bool last, int k, int64_t i, kn_dtype t)
{
    return last ? image_row(m, k, i, t) : image_plane(m, k, i / m->C, i % m->C, t);
}

/* The numbers of `lanes` channels from c on; lanes 0: of channel c, everywhere. */
typedef struct image_lanes {
    vf mean, rstd, w, b, scale, dw, db;
} image_lanes;

VEC_INLINE vf image_lane(const float *f, int64_t c, int64_t lanes)
{
    return lanes ? v_get_n(KN_F32, f, c, lanes) : v_set1(f[c]);
}

VEC_INLINE image_lanes image_lanes_of(const factors *f, int64_t c, int64_t lanes)
{
    return (image_lanes){ image_lane(f->mean, c, lanes),  image_lane(f->rstd, c, lanes),
                          image_lane(f->w, c, lanes),     image_lane(f->b, c, lanes),
                          image_lane(f->scale, c, lanes), image_lane(f->dw, c, lanes),
                          image_lane(f->db, c, lanes) };
}

/* Rows of an array: row k from the first on lies at p + k * step. p NULL: the array isn't there. */
typedef struct image_rows {
    char *p;
    int64_t step;
} image_rows;

VEC_INLINE image_rows image_rows_of(const images *m, int i, int64_t r, kn_dtype t)
{
    return (image_rows){ image_row(m, i, r, t), m->n[i] * v_size(t) };
}

/* w lanes of dy at i, 0 where the mask says so. mask should be a constant. */
VEC_INLINE vf image_masked(image_mask mask, kn_dtype t, const void *dy, const void *y, int64_t i,
                           int64_t w, vf h, const image_lanes *f)
{
    const vf g = v_get_n(t, dy, i, w);
    if (mask == MASK_NONE)
        return g;
    const vf v = mask == MASK_FROM_X ? v_fma(h, f->w, f->b) : v_get_n(t, y, i, w);
    return v_sel(v_le(v, v_zero()), v_zero(), g); /* NaN passes */
}

#endif
