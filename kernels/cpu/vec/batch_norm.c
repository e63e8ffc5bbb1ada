/* kernels/cpu/vec/batch_norm.c: batch norm with what often follows it, and its gradient.
 *
 * Passes over memory: forward reads x for the moments, in training, then x and add, and writes y.
 * Backward reads dy and x twice and writes dx; where dadd is wanted, the first pass reads y and
 * writes dadd, and the second reads dadd in place of dy. */
#include "kernels/cpu/vec/images.h"

/* ---- element by element ---------------------------------------------------------------------- */

enum { Y = 1, ADD = 2 }; /* the arrays of forward, after x */

typedef struct image_call {
    const images *m;
    const factors *f;
    bool add, relu;  /* forward */
    image_mask mask; /* backward */
} image_call;

VEC_INLINE void forward_at(bool add, bool relu, kn_dtype t, const void *x, const void *more,
                           void *y, int64_t i, int64_t w, const image_lanes *f)
{
    vf v = v_fma((v_get_n(t, x, i, w) - f->mean) * f->rstd, f->w, f->b);
    if (add)
        v = v + v_get_n(t, more, i, w);
    v_put_n(t, y, i, relu ? v_max(v_zero(), v) : v, w); /* NaN passes */
}

VEC_INLINE void forward_unit(const image_call *s, bool add, bool relu, bool last, int64_t at,
                             kn_dtype t)
{
    const images *m = s->m;
    const int64_t n = last ? m->C : m->S;
    const void *x = image_unit(m, last, AT_X, at, t), *more = image_unit(m, last, ADD, at, t);
    void *y = image_unit(m, last, Y, at, t);
    image_lanes f = image_lanes_of(s->f, last ? 0 : at % m->C, 0);
    int64_t i = 0;
    for (; i + KN_VW <= n; i += KN_VW) {
        if (last)
            f = image_lanes_of(s->f, i, KN_VW);
        forward_at(add, relu, t, x, more, y, i, KN_VW, &f);
    }
    if (i < n && last)
        f = image_lanes_of(s->f, i, n - i);
    if (i < n)
        forward_at(add, relu, t, x, more, y, i, n - i, &f);
}

VEC_INLINE void forward_range(const image_call *s, bool add, bool relu, int64_t begin, int64_t end,
                              kn_dtype t)
{
    for (int64_t i = begin; i < end; i++)
        if (s->m->last)
            forward_unit(s, add, relu, true, i, t);
        else
            forward_unit(s, add, relu, false, i, t);
}

VEC_INLINE void forward_by_case(const image_call *s, int64_t begin, int64_t end, kn_dtype t)
{
    if (s->add && s->relu)
        forward_range(s, true, true, begin, end, t);
    else if (s->add)
        forward_range(s, true, false, begin, end, t);
    else if (s->relu)
        forward_range(s, false, true, begin, end, t);
    else
        forward_range(s, false, false, begin, end, t);
}

static void forward_some(const void *ctx, int64_t begin, int64_t end)
{
    const image_call *s = ctx;
    VEC_BY_DTYPE(s->m->t, forward_by_case, s, begin, end);
}

VEC_INLINE void backward_at(image_mask mask, kn_dtype t, const void *x, const void *dy,
                            const void *y, void *dx, int64_t i, int64_t w, const image_lanes *f)
{
    const vf h = (v_get_n(t, x, i, w) - f->mean) * f->rstd;
    const vf g = image_masked(mask, t, dy, y, i, w, h, f);
    const vf mean = v_sel(v_ne(f->dw, v_zero()), v_fma(h, f->dw, f->db), f->db); /* h may be NaN */
    v_put_n(t, dx, i, f->scale * (g - mean), w);
}

VEC_INLINE void backward_unit(const image_call *s, image_mask mask, bool last, int64_t at,
                              kn_dtype t)
{
    const images *m = s->m;
    const int64_t n = last ? m->C : m->S;
    const void *x = image_unit(m, last, AT_X, at, t), *dy = image_unit(m, last, AT_DY, at, t),
               *y = image_unit(m, last, AT_Y, at, t);
    void *dx = image_unit(m, last, AT_DX, at, t);
    image_lanes f = image_lanes_of(s->f, last ? 0 : at % m->C, 0);
    int64_t i = 0;
    for (; i + KN_VW <= n; i += KN_VW) {
        if (last)
            f = image_lanes_of(s->f, i, KN_VW);
        backward_at(mask, t, x, dy, y, dx, i, KN_VW, &f);
    }
    if (i < n && last)
        f = image_lanes_of(s->f, i, n - i);
    if (i < n)
        backward_at(mask, t, x, dy, y, dx, i, n - i, &f);
}

VEC_INLINE void backward_range(const image_call *s, image_mask mask, int64_t begin, int64_t end,
                               kn_dtype t)
{
    for (int64_t i = begin; i < end; i++)
        if (s->m->last)
            backward_unit(s, mask, true, i, t);
        else
            backward_unit(s, mask, false, i, t);
}

VEC_INLINE void backward_by_case(const image_call *s, int64_t begin, int64_t end, kn_dtype t)
{
    if (s->mask == MASK_NONE)
        backward_range(s, MASK_NONE, begin, end, t);
    else if (s->mask == MASK_FROM_X)
        backward_range(s, MASK_FROM_X, begin, end, t);
    else
        backward_range(s, MASK_FROM_Y, begin, end, t);
}

static void backward_some(const void *ctx, int64_t begin, int64_t end)
{
    const image_call *s = ctx;
    VEC_BY_DTYPE(s->m->t, backward_by_case, s, begin, end);
}

static void each_image(const image_call *s, kn_range_fn fn)
{
    kn_each_range(image_threads(s->m), s->m->last ? s->m->M : s->m->N * s->m->C, fn, s);
}

/* ---- vectors of channels --------------------------------------------------------------------- */

static bool vector_ok(const kn_array *v, const images *m)
{
    return !v->data || (kn_array_contiguous(v) && (v->dtype == m->t || v->dtype == KN_F32));
}

static bool statistic_ok(const kn_array *v, const images *m)
{
    return v->data && v->dtype == KN_F32 && vector_ok(v, m);
}

/* The means of the whole batch's gradient, which dx needs while training: both or neither. */
static bool given_ok(const kn_batch_norm_grad_args *a, const images *m)
{
    return (!a->mean_dw.data && !a->mean_db.data) ||
           (a->training && statistic_ok(&a->mean_dw, m) && statistic_ok(&a->mean_db, m));
}

static void vector_get(float *to, const kn_array *v, float otherwise, int64_t C)
{
    for (int64_t c = 0; c < C; c++)
        to[c] = v->data ? v_get1(v->dtype, v->data, c)[0] : otherwise;
}

static void vector_put(const kn_array *v, const double *from, int64_t C)
{
    for (int64_t c = 0; v->data && c < C; c++)
        v_put_n(v->dtype, v->data, c, v_set1((float)from[c]), 1);
}

/* Scratch: sums, then the factors that are computed. */
static double *room_take(const images *m, factors *f, size_t *bytes)
{
    const size_t first = (size_t)image_sum_room(m) * sizeof(double);
    float **const at[] = { &f->w, &f->b, &f->scale, &f->dw, &f->db };
    const size_t count = sizeof at / sizeof *at;
    *bytes = first + count * (size_t)m->C * sizeof(float);
    double *sum = vec_scratch(*bytes);
    for (size_t i = 0; sum && i < count; i++)
        *at[i] = (float *)(void *)((char *)sum + first) + (int64_t)i * m->C;
    return sum;
}

/* ---- the entries ----------------------------------------------------------------------------- */

static void move(const kn_array *running, int64_t c, double momentum, double value)
{
    float *r = running->data;
    if (r)
        r[c] = (float)((1 - momentum) * (double)r[c] + momentum * value);
}

static void statistics(const kn_batch_norm_args *a, const images *m, const factors *f, double *sum)
{
    const double M = (double)m->M;
    if (a->training)
        image_moments(m, sum);
    for (int64_t c = 0; c < m->C; c++) {
        const double var =
            a->training ? sum[m->C + c] / M : ((const float *)a->running_var.data)[c];
        f->mean[c] = a->training ? (float)sum[c] : ((const float *)a->running_mean.data)[c];
        f->rstd[c] = (float)(1.0 / __builtin_sqrt(var + a->eps));
        if (!a->training || m->M == 1)
            continue;
        move(&a->running_mean, c, a->momentum, sum[c]);
        move(&a->running_var, c, a->momentum, sum[m->C + c] / (M - 1));
    }
}

kn_status VEC_FN(vec_batch_norm)(const void *args)
{
    const kn_batch_norm_args *a = args;
    const kn_array *const arrays[] = { [AT_X] = &a->x, [Y] = &a->y, [ADD] = &a->add };
    images m;
    if (!images_of(&m, 3, arrays) || !vector_ok(&a->w, &m) || !vector_ok(&a->b, &m) ||
        !statistic_ok(&a->mean, &m) || !statistic_ok(&a->rstd, &m))
        return KN_DECLINED;
    if ((!a->training || a->running_mean.data) && !statistic_ok(&a->running_mean, &m))
        return KN_DECLINED;
    if ((!a->training || a->running_var.data) && !statistic_ok(&a->running_var, &m))
        return KN_DECLINED;
    factors f = { .mean = a->mean.data, .rstd = a->rstd.data };
    size_t bytes;
    double *sum = room_take(&m, &f, &bytes);
    if (!sum)
        return KN_FAILED;
    statistics(a, &m, &f, sum);
    vector_get(f.w, &a->w, 1, m.C);
    vector_get(f.b, &a->b, 0, m.C);
    if (a->y.data)
        each_image(&(image_call){ &m, &f, .add = a->add.data, .relu = a->relu }, forward_some);
    vec_scratch_end(sum, bytes);
    return KN_DONE;
}

/* dw and db by M, or those that are given. */
static void means_of_grad(const kn_batch_norm_grad_args *a, const images *m, const factors *f,
                          const double *sum)
{
    const double M = (double)m->M;
    for (int64_t c = 0; c < m->C; c++) {
        f->scale[c] = f->w[c] * f->rstd[c];
        f->dw[c] = a->training && !a->mean_dw.data ? (float)(sum[c] / M) : 0.0f;
        f->db[c] = a->training && !a->mean_db.data ? (float)(sum[m->C + c] / M) : 0.0f;
    }
    if (a->mean_dw.data) {
        vector_get(f->dw, &a->mean_dw, 0, m->C);
        vector_get(f->db, &a->mean_db, 0, m->C);
    }
}

kn_status VEC_FN(vec_batch_norm_grad)(const void *args)
{
    const kn_batch_norm_grad_args *a = args;
    const kn_array *const arrays[] = {
        [AT_X] = &a->x, [AT_DY] = &a->dy, [AT_DX] = &a->dx, [AT_Y] = &a->y, [AT_DADD] = &a->dadd
    };
    images m;
    if (!images_of(&m, IMAGES, arrays) || !vector_ok(&a->w, &m) || !vector_ok(&a->b, &m) ||
        !vector_ok(&a->dw, &m) || !vector_ok(&a->db, &m) || !statistic_ok(&a->mean, &m) ||
        !statistic_ok(&a->rstd, &m) || !given_ok(a, &m))
        return KN_DECLINED;
    image_mask mask = !a->relu ? MASK_NONE : a->y.data ? MASK_FROM_Y : MASK_FROM_X;
    factors f = { .mean = a->mean.data, .rstd = a->rstd.data };
    size_t bytes;
    double *sum = room_take(&m, &f, &bytes);
    if (!sum)
        return KN_FAILED;
    vector_get(f.w, &a->w, 1, m.C);
    vector_get(f.b, &a->b, 0, m.C);
    if ((a->training && a->dx.data && !a->mean_dw.data) || a->dw.data || a->db.data || a->dadd.data)
        image_products(&m, mask, &f, sum);
    if (a->dadd.data) { /* masked by now */
        mask = MASK_NONE;
        m.p[AT_DY] = m.p[AT_DADD], m.n[AT_DY] = m.n[AT_DADD], m.c[AT_DY] = m.c[AT_DADD];
    }
    vector_put(&a->dw, sum, m.C);
    vector_put(&a->db, sum + m.C, m.C);
    means_of_grad(a, &m, &f, sum);
    if (a->dx.data)
        each_image(&(image_call){ &m, &f, .mask = mask }, backward_some);
    vec_scratch_end(sum, bytes);
    return KN_DONE;
}
