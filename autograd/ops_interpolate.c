/* autograd/ops_interpolate.c: images of another size: interpolation, and channels as pixels. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <math.h>

/* ---- interpolation --------------------------------------------------------------------------- */

typedef struct interpolate_attr {
    int64_t size[2]; /* of the result */
    kn_grid grid;
    bool linear;
} interpolate_attr;

static bool interpolate_shape(kn_op_call *c)
{
    const interpolate_attr *a = c->attr;
    kn_shape_of_input(c);
    for (int d = 0; d < 2; d++)
        c->spec[0].shape[2 + d] = a->size[d];
    return true;
}

static bool interpolate(kn_tensor *to, kn_tensor *from, const void *attr, bool back)
{
    const interpolate_attr *a = attr;
    const kn_array y = kn_array_of(to), x = kn_array_of(from);
    return back ? KN_RUN(to, KN_K_INTERPOLATE_GRAD,
                         ((kn_interpolate_grad_args){ y, x, a->grid, a->linear }))
                : KN_RUN(to, KN_K_INTERPOLATE, ((kn_interpolate_args){ y, x, a->grid, a->linear }));
}

KN_OP(kn_op_interpolate, .name = "interpolate", .attr_size = sizeof(interpolate_attr),
      .shape = interpolate_shape, KN_MAP(interpolate), .on_tape = kn_linear_on_tape);

/* ---- sizes ----------------------------------------------------------------------------------- */

/* Position p of a dim lies at (p + centre) mul / div - centre. */
typedef struct along {
    int64_t from, to;
    double mul, div, centre;
} along;

static bool mode_is_of(const kn_interpolate_options *o, const kn_tensor *x)
{
    if ((int)o->mode < 0 || o->mode > KN_AREA)
        return kn_fail("interpolate: there is no mode %d; KN_NEAREST to KN_AREA are", (int)o->mode);
    const bool matrices = o->mode == KN_BICUBIC || o->antialias;
    if (x->ndim < 3 || x->ndim > 5 || !kn_dtype_is_float(x->dtype) || (matrices && x->ndim != 4))
        return kn_fail("interpolate: needs a float x[N,C,H,W]%s, got %s",
                       matrices ? " for KN_BICUBIC and .antialias" : ", x[N,C,L] or x[N,C,D,H,W]",
                       KN_SHOWN(x));
    if (o->align_corners && o->mode != KN_BILINEAR && o->mode != KN_BICUBIC)
        return kn_fail(
            "interpolate: .align_corners does nothing with KN_NEAREST, KN_NEAREST_EXACT and "
            "KN_AREA; leave it out or use KN_BILINEAR");
    return !o->antialias || o->mode == KN_BILINEAR || o->mode == KN_BICUBIC ||
           kn_fail("interpolate: .antialias is of KN_BILINEAR and KN_BICUBIC only");
}

static bool check_options(const kn_interpolate_options *o, const kn_tensor *x)
{
    for (int d = x->ndim - 2; d >= 0 && d < 3; d++)
        if (o->sizes[d] || o->scales[d] != 0)
            return kn_fail("interpolate: .%s[%d] is given, and x is %s, of %d spatial dims",
                           o->sizes[d] ? "sizes" : "scales", d, KN_SHOWN(x), x->ndim - 2);
    const bool sized = o->size || o->sizes[0] || o->sizes[1] || o->sizes[2];
    const bool scaled =
        o->scale != 0 || o->scales[0] != 0 || o->scales[1] != 0 || o->scales[2] != 0;
    return sized != scaled || kn_fail("interpolate: needs either a size or a scale, %s",
                                      sized ? "both were given" : "neither was given");
}

/* The size of the result along spatial dim d, and where its positions lie. */
static bool resolve(const kn_tensor *x, const kn_interpolate_options *o, int d, along *a)
{
    static const char *const dims[3][3] = { { "elements" },
                                            { "rows", "columns" },
                                            { "planes", "rows", "columns" } };
    const char *dim = dims[x->ndim - 3][d];
    const int64_t H = x->shape[2 + d];
    const bool by_dim = o->scales[0] != 0 || o->scales[1] != 0 || o->scales[2] != 0;
    const double each = by_dim ? o->scales[d] : o->scale;
    const int64_t size = o->sizes[0] || o->sizes[1] || o->sizes[2] ? o->sizes[d] : o->size;
    if (each != 0 && !(each > 0 && (double)H * each < 9e15))
        return kn_fail("interpolate: a scale of %g makes no size of %lld %s; it should be above 0 "
                       "and not so large",
                       each, (long long)H, dim);
    const int64_t P = each != 0 ? (int64_t)floor((double)H * each) : size;
    if (P < 1 || H < 1)
        return kn_fail("interpolate: %lld %s would become %lld; at least 1 are needed (x is %s)",
                       (long long)H, dim, (long long)P, KN_SHOWN(x));
    const bool aligned = o->align_corners;
    a->from = H, a->to = P;
    a->centre = o->mode == KN_NEAREST || aligned ? 0 : 0.5;
    a->mul = (double)(aligned ? (P > 1 ? H - 1 : 0) : each != 0 ? 1 : H);
    a->div = aligned ? (P > 1 ? (double)(P - 1) : 1) : each != 0 ? each : (double)P;
    return true;
}

/* ---- ways ------------------------------------------------------------------------------------ */

/* The kernel along two dims; NULL: as they are. */
static kn_tensor *along_two(kn_tensor *x, const along *rows, const along *columns, bool linear)
{
    const along *const of[2] = { rows, columns };
    interpolate_attr a = { .linear = linear, .grid.centre = (rows ? rows : columns)->centre };
    for (int d = 0; x && d < 2; d++) {
        a.size[d] = of[d] ? of[d]->to : x->shape[2 + d];
        a.grid.mul[d] = of[d] ? of[d]->mul : 1;
        a.grid.div[d] = of[d] ? of[d]->div : 1;
    }
    return kn_apply1(&kn_op_interpolate, 1, &x, 0, &a);
}

/* A sequence is an image of one row. A volume is many images, then one whose columns are all places
 * of a plane: nearest and linear ones go by dim. */
static kn_tensor *by_kernels(kn_tensor *x, const along *a, bool linear)
{
    if (x->ndim == 4)
        return along_two(x, &a[0], &a[1], linear);
    if (x->ndim == 3)
        return kn_squeeze(along_two(kn_unsqueeze(x, 2), NULL, &a[0], linear), 1, (int64_t[]){ 2 });
    kn_tensor *y = along_two(kn_flatten(x, 1, 2), &a[1], &a[2], linear);
    y = kn_reshape(y, KN_SHAPE(x->shape[0], x->shape[1], a[0].from, a[1].to * a[2].to));
    y = along_two(y, &a[0], NULL, linear);
    return kn_unflatten(y, 3, KN_SHAPE(a[1].to, a[2].to));
}

/* Rows picked in each dim. */
static kn_tensor *by_index(kn_tensor *x, const along *a, int n)
{
    for (int d = 0; x && d < n; d++) {
        int64_t *at = kn_host_calloc((size_t)a[d].to, sizeof *at);
        for (int64_t p = 0; at && p < a[d].to; p++) {
            const double place = floor(((double)p + 0.5) * a[d].mul / a[d].div);
            at[p] = (int64_t)fmin(place, (double)(a[d].from - 1));
        }
        kn_tensor *index = kn_of_host(KN_I64, kn_device_of(x), at, KN_SHAPE(a[d].to));
        x = kn_index_select(x, 2 + d, index);
    }
    return x;
}

static kn_tensor *by_area(kn_tensor *x, const along *a)
{
    return x->ndim == 3   ? kn_adaptive_avg_pool1d(x, a[0].to)
           : x->ndim == 4 ? kn_adaptive_avg_pool2d(x, a[0].to, a[1].to)
                          : kn_adaptive_avg_pool3d(x, a[0].to, a[1].to, a[2].to);
}

/* The weight of an element at a distance from the place: a triangle, or Keys' cubic. */
static double weight_at(double t, bool cubic, double k)
{
    t = fabs(t);
    if (!cubic)
        return t < 1 ? 1 - t : 0;
    return t <= 1  ? ((k + 2) * t - (k + 3)) * t * t + 1
           : t < 2 ? ((t - 5) * t + 8) * t * k - 4 * k
                   : 0;
}

/* One row of the matrix: the weights of the H elements at position p. */
static void fill_row(double *row, const along *a, int64_t p, bool cubic, bool antialias)
{
    const double scale = a->mul / a->div, wide = antialias && scale > 1 ? scale : 1;
    const double place = ((double)p + a->centre) * a->mul / a->div - a->centre;
    const double reach = (cubic ? 2 : 1) * wide, last = (double)(a->from - 1);
    if (antialias) { /* the elements inside share all weight */
        const int64_t begin = (int64_t)fmax(place + 0.5 - reach + 0.5, 0);
        const int64_t end = (int64_t)fmin(place + 0.5 + reach + 0.5, last + 1);
        double sum = 0;
        for (int64_t h = begin; h < end; h++)
            sum += row[h] = weight_at(((double)h - place) / wide, cubic, -0.5);
        for (int64_t h = begin; h < end; h++)
            row[h] /= sum;
        return;
    }
    for (int i = -1; i <= 2; i++) { /* those outside count as the edge */
        const double h = floor(place) + i;
        row[(int64_t)fmin(fmax(h, 0), last)] += weight_at(h - place, cubic, -0.75);
    }
}

static kn_tensor *matrix_of(const kn_tensor *x, const along *a, bool cubic, bool antialias)
{
    double *w = a->to < INT64_MAX / 8 / a->from
                    ? kn_host_calloc((size_t)(a->to * a->from), sizeof *w)
                    : NULL;
    for (int64_t p = 0; w && p < a->to; p++)
        fill_row(w + p * a->from, a, p, cubic, antialias);
    return kn_cast(kn_of_host(KN_F64, kn_device_of(x), w, KN_SHAPE(a->to, a->from)), x->dtype);
}

/* rows x columns^T */
static kn_tensor *by_matrices(kn_tensor *x, const along *a, bool cubic, bool antialias)
{
    const kn_dtype t = x->dtype;
    kn_tensor *wide = kn_cast(x, kn_wide_dtype(t));
    kn_tensor *rows = wide ? matrix_of(wide, &a[0], cubic, antialias) : NULL;
    kn_tensor *columns = rows ? matrix_of(wide, &a[1], cubic, antialias) : NULL;
    return kn_cast(kn_matmul(rows, kn_matmul(wide, kn_transpose(columns, 0, 1))), t);
}

kn_tensor *kn_interpolate_(kn_tensor *x, kn_interpolate_options o)
{
    along a[3];
    if (!kn_ok() || !kn_check(x, "interpolate") || !check_options(&o, x) || !mode_is_of(&o, x))
        return NULL;
    for (int d = 0; d < x->ndim - 2; d++)
        if (!resolve(x, &o, d, &a[d]))
            return NULL;
    kn_scope s = kn_scope_begin();
    return kn_scope_result(s, o.mode == KN_NEAREST_EXACT ? by_index(x, a, x->ndim - 2)
                              : o.mode == KN_AREA        ? by_area(x, a)
                              : o.mode == KN_BICUBIC || o.antialias
                                  ? by_matrices(x, a, o.mode == KN_BICUBIC, o.antialias)
                                  : by_kernels(x, a, o.mode != KN_NEAREST));
}

/* ---- channels as pixels ---------------------------------------------------------------------- */

/* x as leading dims in one, and the last three. */
static bool check_pixels(const char *op, kn_tensor *x, int64_t r, int64_t *lead)
{
    if (!kn_ok() || !kn_check(x, op))
        return false;
    if (x->ndim < 3)
        return kn_fail("%s: needs x[...,C,H,W], got %s", op, KN_SHOWN(x));
    if (r < 1 || r > INT32_MAX)
        return kn_fail("%s: the factor is %lld, should be at least 1", op, (long long)r);
    *lead = 1;
    for (int d = 0; d < x->ndim - 3; d++)
        *lead *= x->shape[d];
    return true;
}

/* y in the shape of x but for the last three dims. */
static kn_tensor *with_sizes(kn_tensor *y, const kn_tensor *x, int64_t C, int64_t H, int64_t W)
{
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < x->ndim; d++)
        shape[d] = x->shape[d];
    shape[x->ndim - 3] = C, shape[x->ndim - 2] = H, shape[x->ndim - 1] = W;
    return kn_reshape(y, x->ndim, shape);
}

kn_tensor *kn_pixel_shuffle(kn_tensor *x, int64_t r)
{
    int64_t lead;
    if (!check_pixels("pixel_shuffle", x, r, &lead))
        return NULL;
    const int64_t *last = x->shape + x->ndim - 3, C = last[0] / (r * r), H = last[1], W = last[2];
    if (last[0] % (r * r))
        return kn_fail_null("pixel_shuffle: the channels of x %s don't divide by %lld x %lld",
                            KN_SHOWN(x), (long long)r, (long long)r);
    kn_tensor *y = kn_reshape(x, KN_SHAPE(lead, C, r, r, H, W));
    y = kn_permute(y, 6, (int64_t[]){ 0, 1, 4, 2, 5, 3 });
    return with_sizes(y, x, C, H * r, W * r);
}

kn_tensor *kn_pixel_unshuffle(kn_tensor *x, int64_t r)
{
    int64_t lead;
    if (!check_pixels("pixel_unshuffle", x, r, &lead))
        return NULL;
    const int64_t *last = x->shape + x->ndim - 3, C = last[0], H = last[1] / r, W = last[2] / r;
    if (last[1] % r || last[2] % r)
        return kn_fail_null("pixel_unshuffle: rows and columns of x %s don't divide by %lld",
                            KN_SHOWN(x), (long long)r);
    kn_tensor *y = kn_reshape(x, KN_SHAPE(lead, C, H, r, W, r));
    y = kn_permute(y, 6, (int64_t[]){ 0, 1, 3, 5, 2, 4 });
    return with_sizes(y, x, C * r * r, H, W);
}
