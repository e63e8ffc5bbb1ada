/* kernels/cpu/vec/rows.c: softmax and cross-entropy over the last dim. A row belongs to one thread;
 * its sums are f32 in vector lanes inside a block of fixed size and f64 across blocks. */
#include "kernels/cpu/vec/math.h"
#include "kernels/cpu/vec/rows.h"

/* sum e^(x - max) of n elements; the exponentials go to y as well where it is given. Missing lanes
 * of the tail contribute nothing. */
VEC_INLINE double row_exp_sum(const void *x, int64_t n, float max, float *y, kn_dtype t)
{
    const vf m = v_set1(max);
    double sum = 0;
    for (int64_t b = 0; b < n; b += ROW_BLOCK) {
        const int64_t end = v_min_i64(b + ROW_BLOCK, n);
        vf s0 = v_zero(), s1 = s0;
        int64_t i = b;
        for (; i + 2 * KN_VW <= end; i += 2 * KN_VW) {
            const vf e0 = v_exp(v_get(t, x, i) - m), e1 = v_exp(v_get(t, x, i + KN_VW) - m);
            if (y) {
                v_store(y + i, e0);
                v_store(y + i + KN_VW, e1);
            }
            s0 += e0;
            s1 += e1;
        }
        for (; i < end; i += KN_VW) {
            const int64_t w = end - i;
            const vf e = v_exp(v_get_n(t, x, i, w) - m);
            if (y)
                v_put_n(KN_F32, y, i, e, w);
            s0 += w < KN_VW ? v_first_lanes(e, v_zero(), w) : e;
        }
        sum += v_hsum(s0 + s1);
    }
    return sum;
}

/* y = e^(x - max) / sum, or its logarithm (shift: that of sum). softmax keeps the exponentials in y
 * where y is f32, else it computes them twice so that y is rounded once. */
VEC_INLINE void softmax_row(void *y, const void *x, int64_t n, float max, double sum, float shift,
                            bool log, kn_dtype t)
{
    const bool kept = t == KN_F32 && !log;
    const vf m = v_set1(max), inverse = v_set1((float)(1.0 / sum));
    for (int64_t i = 0; i < n; i += KN_VW) {
        if (kept) {
            v_put_n(t, y, i, v_get_n(t, y, i, n - i) * inverse, n - i);
            continue;
        }
        const vf v = v_get_n(t, x, i, n - i) - m;
        v_put_n(t, y, i, log ? v - v_set1(shift) : v_exp(v) * inverse, n - i);
    }
}

typedef struct softmax_call {
    vec_rows y, x;
    vec_rows dx, dy; /* of the backward, which reads y */
    kn_dtype t;
    bool log;
} softmax_call;

/* Rows r to r + rows, at most KN_VW, whose logarithms are taken at once. */
VEC_INLINE void softmax_some(const softmax_call *c, int64_t r, int64_t rows, kn_dtype t)
{
    const int64_t size = (int64_t)kn_dtype_size(t), n = c->x.cols;
    const bool keep = t == KN_F32 && !c->log;
    float max[KN_VW], sums[KN_VW] = { 0 };
    double sum[KN_VW];
    for (int64_t k = 0; k < rows; k++) {
        const void *x = vec_row(&c->x, r + k, size);
        max[k] = row_extremum(x, n, true, t);
        sum[k] = row_exp_sum(x, n, max[k], keep ? vec_row(&c->y, r + k, size) : NULL, t);
        sums[k] = (float)sum[k];
    }
    const vf shift = c->log ? v_log(v_load(sums)) : v_zero();
    for (int64_t k = 0; k < rows; k++)
        softmax_row(vec_row(&c->y, r + k, size), vec_row(&c->x, r + k, size), n, max[k], sum[k],
                    shift[k], c->log, t);
}

/* As many rows at once as stay in the first-level cache. */
static void softmax_rows(const void *ctx, int64_t begin, int64_t end)
{
    const softmax_call *c = ctx;
    const int64_t group = c->x.cols < ROW_BLOCK / KN_VW ? KN_VW : 1;
    for (int64_t r = begin; r < end; r += group)
        VEC_BY_DTYPE(c->t, softmax_some, c, r, v_min_i64(group, end - r));
}

kn_status VEC_FN(vec_softmax)(const void *args)
{
    const kn_softmax_args *a = args;
    softmax_call c = { .t = a->x.dtype, .log = a->log };
    if (!vec_float(a->x.dtype) || a->y.dtype != a->x.dtype || !vec_rows_of(&a->x, &c.x) ||
        !vec_rows_of(&a->y, &c.y))
        return KN_DECLINED;
    const int64_t numel = c.x.rows * c.x.cols;
    if (numel > 0)
        kn_each_range(kn_threads_for(numel * 32), c.x.rows, softmax_rows, &c);
    return KN_DONE;
}

/* ---- backward of softmax -------------------------------------------------------------------- */

/* sum of dy * y, or of dy alone for log_softmax */
VEC_INLINE double grad_sum(const void *dy, const void *y, int64_t n, bool log, kn_dtype t)
{
    double sum = 0;
    for (int64_t b = 0; b < n; b += ROW_BLOCK) {
        const int64_t end = v_min_i64(b + ROW_BLOCK, n);
        vf s = v_zero();
        for (int64_t i = b; i < end; i += KN_VW) {
            const vf d = v_get_n(t, dy, i, end - i);
            s = log ? s + d : v_fma(d, v_get_n(t, y, i, end - i), s);
        }
        sum += v_hsum(s);
    }
    return sum;
}

VEC_INLINE void softmax_grad_row(void *dx, const void *dy, const void *y, int64_t n, bool log,
                                 kn_dtype t)
{
    const vf sum = v_set1((float)grad_sum(dy, y, n, log, t));
    for (int64_t i = 0; i < n; i += KN_VW) {
        const vf g = v_get_n(t, dy, i, n - i), q = v_get_n(t, y, i, n - i);
        v_put_n(t, dx, i, log ? v_fnma(v_exp(q), sum, g) : q * (g - sum), n - i);
    }
}

static void softmax_grad_rows(const void *ctx, int64_t begin, int64_t end)
{
    const softmax_call *c = ctx;
    const int64_t size = (int64_t)kn_dtype_size(c->t);
    for (int64_t r = begin; r < end; r++)
        VEC_BY_DTYPE(c->t, softmax_grad_row, vec_row(&c->dx, r, size), vec_row(&c->dy, r, size),
                     vec_row(&c->y, r, size), c->y.cols, c->log);
}

kn_status VEC_FN(vec_softmax_grad)(const void *args)
{
    const kn_softmax_grad_args *a = args;
    softmax_call c = { .t = a->y.dtype, .log = a->log };
    if (!vec_float(a->y.dtype) || a->dy.dtype != a->y.dtype || a->dx.dtype != a->y.dtype ||
        !vec_rows_of(&a->y, &c.y) || !vec_rows_of(&a->dx, &c.dx) || !vec_rows_of(&a->dy, &c.dy))
        return KN_DECLINED;
    const int64_t numel = c.y.rows * c.y.cols;
    if (numel > 0)
        kn_each_range(kn_threads_for(numel * 16), c.y.rows, softmax_grad_rows, &c);
    return KN_DONE;
}

/* ---- cross-entropy -------------------------------------------------------------------------- */

typedef struct targets {
    const void *data;
    kn_dtype dtype;
    int64_t stride, ignore;
} targets;

static int64_t target_at(const targets *t, int64_t n)
{
    const int64_t i = n * t->stride;
    return t->dtype == KN_I64 ? ((const int64_t *)t->data)[i] : ((const int32_t *)t->data)[i];
}

/* Fills t; false if a target is out of range (the reference then reports it). */
static bool targets_of(const kn_array *a, const vec_rows *logits, int64_t ignore, targets *t)
{
    *t = (targets){ a->data, a->dtype, a->stride[0], ignore };
    for (int64_t n = 0; n < logits->rows; n++) {
        const int64_t v = target_at(t, n);
        if (v != ignore && (v < 0 || v >= logits->cols))
            return false;
    }
    return true;
}

/* log sum_v e^x[v] in one pass over memory: a block's maximum, a rescaled running sum, the block's
 * exponentials. *total += sum_v x[v] where wanted. */
VEC_INLINE double row_lse(const void *x, int64_t n, double *total, kn_dtype t)
{
    const int64_t size = v_size(t);
    double sum = 0;
    float max = -__builtin_inff();
    for (int64_t b = 0; b < n; b += ROW_BLOCK) {
        const int64_t w = v_min_i64(ROW_BLOCK, n - b);
        const void *p = (const char *)x + b * size;
        const float top = row_extremum(p, w, true, t);
        if (!(top <= max)) {
            if (sum != 0)
                sum *= v_exp(v_set1(max - top))[0];
            max = top;
        }
        if (max != -__builtin_inff()) /* a block of -inf adds nothing */
            sum += row_exp_sum(p, w, max, NULL, t);
        if (total) {
            vf s = v_zero();
            for (int64_t i = 0; i < w; i += KN_VW)
                s += v_get_n(t, p, i, w - i);
            *total += v_hsum(s);
        }
    }
    return max == -__builtin_inff() ? __builtin_nan("") : max + __builtin_log(sum);
}

/* dx = scale (e^(x - lse) - s/V), less scale (1-s) at the target */
VEC_INLINE void cross_entropy_grad_row(void *dx, const void *x, int64_t n, int64_t target,
                                       float lse, float scale, double smoothing, kn_dtype t)
{
    const vf l = v_set1(lse), k = v_set1(scale), s = v_set1((float)(smoothing / (double)n));
    const vf p = v_exp(v_get1(t, x, target) - l); /* before x may be overwritten */
    for (int64_t i = 0; i < n; i += KN_VW)
        v_put_n(t, dx, i, k * (v_exp(v_get_n(t, x, i, n - i) - l) - s), n - i);
    v_put_n(t, dx, target, k * ((p - v_set1((float)(1 - smoothing))) - s), 1);
}

/* Of both ways; scale: of a backward. */
typedef struct loss_call {
    vec_rows x, dx; /* dx.data NULL: not wanted */
    kn_dtype x_dtype;
    targets targets;
    float *lse, scale;
    double *row_loss, smoothing;
} loss_call;

/* lse of row n, its weighted loss in row_loss, and its gradient where wanted. */
VEC_INLINE void cross_entropy_row(const loss_call *c, int64_t n, kn_dtype type)
{
    const int64_t size = v_size(type), v = target_at(&c->targets, n);
    const void *row = vec_row(&c->x, n, size);
    const double smoothing = c->smoothing;
    double total = 0;
    const double l = row_lse(row, c->x.cols, smoothing != 0 ? &total : NULL, type);
    void *out = c->dx.data ? vec_row(&c->dx, n, size) : NULL;
    c->lse[n] = (float)l;
    c->row_loss[n] = 0;
    if (v == c->targets.ignore) {
        if (out)
            memset(out, 0, (size_t)(c->x.cols * size));
        return;
    }
    c->row_loss[n] = (1 - smoothing) * (l - v_get1(type, row, v)[0]);
    if (smoothing != 0)
        c->row_loss[n] += smoothing * (l - total / (double)c->x.cols);
    if (out) /* the row is still in a cache */
        cross_entropy_grad_row(out, row, c->x.cols, v, (float)l, 1, smoothing, type);
}

static void cross_entropy_rows(const void *ctx, int64_t begin, int64_t end)
{
    const loss_call *c = ctx;
    for (int64_t n = begin; n < end; n++)
        VEC_BY_DTYPE(c->x_dtype, cross_entropy_row, c, n);
}

kn_status VEC_FN(vec_cross_entropy)(const void *args)
{
    const kn_cross_entropy_args *a = args;
    loss_call c = { .x_dtype = a->logits.dtype, .lse = a->lse.data, .smoothing = a->smoothing };
    if (!vec_float(a->logits.dtype) || a->lse.dtype != KN_F32 || a->loss.dtype != KN_F32 ||
        a->count.dtype != KN_F32 || !kn_array_contiguous(&a->lse))
        return KN_DECLINED;
    if (a->dlogits.data &&
        (a->dlogits.dtype != a->logits.dtype || !vec_rows_of(&a->dlogits, &c.dx)))
        return KN_DECLINED;
    if (!vec_rows_of(&a->logits, &c.x) || c.x.rows * c.x.cols == 0 ||
        !targets_of(&a->targets, &c.x, a->ignore_index, &c.targets))
        return KN_DECLINED;
    const size_t bytes = (size_t)c.x.rows * sizeof(double);
    double loss = 0, count = 0;
    c.row_loss = vec_scratch(bytes);
    if (!c.row_loss)
        return KN_FAILED;
    kn_each_range(kn_threads_for(c.x.rows * c.x.cols * (c.dx.data ? 32 : 16)), c.x.rows,
                  cross_entropy_rows, &c);
    for (int64_t n = 0; n < c.x.rows; n++) {
        loss += c.row_loss[n];
        count += target_at(&c.targets, n) != a->ignore_index;
    }
    *(float *)a->loss.data = (float)(a->part || count == 0 ? loss : loss / count);
    *(float *)a->count.data = (float)count;
    vec_scratch_end(c.row_loss, bytes);
    return KN_DONE;
}

static void cross_entropy_grad_rows(const void *ctx, int64_t begin, int64_t end)
{
    const loss_call *c = ctx;
    const int64_t cols = c->x.cols, size = (int64_t)kn_dtype_size(c->x_dtype);
    for (int64_t n = begin; n < end; n++) {
        void *out = vec_row(&c->dx, n, size);
        const int64_t v = target_at(&c->targets, n);
        if (v == c->targets.ignore)
            memset(out, 0, (size_t)(cols * size));
        else
            VEC_BY_DTYPE(c->x_dtype, cross_entropy_grad_row, out, vec_row(&c->x, n, size), cols, v,
                         c->lse[n], c->scale, c->smoothing);
    }
}

kn_status VEC_FN(vec_cross_entropy_grad)(const void *args)
{
    const kn_cross_entropy_grad_args *a = args;
    loss_call c = { .x_dtype = a->logits.dtype, .lse = a->lse.data, .smoothing = a->smoothing };
    if (!vec_float(a->logits.dtype) || a->dlogits.dtype != a->logits.dtype ||
        a->lse.dtype != KN_F32 || a->count.dtype != KN_F32 || a->dloss.dtype != KN_F32 ||
        !kn_array_contiguous(&a->lse))
        return KN_DECLINED;
    if (!vec_rows_of(&a->logits, &c.x) || !vec_rows_of(&a->dlogits, &c.dx) ||
        c.x.rows * c.x.cols == 0 || !targets_of(&a->targets, &c.x, a->ignore_index, &c.targets))
        return KN_DECLINED;
    const float count = *(const float *)a->count.data;
    c.scale = count > 0 ? *(const float *)a->dloss.data / count : 0.0f;
    kn_each_range(kn_threads_for(c.x.rows * c.x.cols * 16), c.x.rows, cross_entropy_grad_rows, &c);
    return KN_DONE;
}
