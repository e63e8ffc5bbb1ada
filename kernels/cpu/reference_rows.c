/* kernels/cpu/reference_rows.c: rows along the last dim: softmax, cross-entropy, layer_norm and
 * rms_norm, forward and backward. */
#include "kernels/cpu/reference.h"
#include <math.h>

/* ---- softmax --------------------------------------------------------------------------------- */

/* log sum_j exp(x_j) of the n values from offset at: max + log sum_j exp(x_j - max). */
static double log_sum_exp(const kn_array *x, int64_t at, int64_t n, int64_t stride)
{
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        double v = kn_ref_get(x, at + j * stride);
        max = v > max || isnan(v) ? v : max;
    }
    for (int64_t j = 0; j < n; j++)
        sum += exp(kn_ref_get(x, at + j * stride) - max);
    return max + log(sum);
}

/* y_j = exp(x_j - lse), or for log: x_j - lse. */
kn_status kn_ref_softmax(const void *args)
{
    const kn_softmax_args *a = args;
    const kn_array *y = &a->y, *x = &a->x;
    int64_t n = kn_ref_last_dim(x), sy = kn_ref_last_stride(y), sx = kn_ref_last_stride(x);
    const kn_array *arrays[] = { y, x };
    kn_ref_walk w = kn_ref_walk_shape(kn_ref_leading(x), x->shape, 2, arrays);
    for (; w.more; kn_ref_walk_next(&w)) {
        double lse = log_sum_exp(x, w.off[1], n, sx);
        for (int64_t j = 0; j < n; j++) {
            double v = kn_ref_get(x, w.off[1] + j * sx) - lse;
            kn_ref_set_computed(y, w.off[0] + j * sy, a->log ? v : exp(v));
        }
    }
    return KN_DONE;
}

/* dx_j = y_j (dy_j - sum_k dy_k y_k), or for log: dy_j - exp(y_j) sum_k dy_k. */
kn_status kn_ref_softmax_grad(const void *args)
{
    const kn_softmax_grad_args *a = args;
    const kn_array *dx = &a->dx, *dy = &a->dy, *y = &a->y;
    int64_t n = kn_ref_last_dim(y), sx = kn_ref_last_stride(dx), sd = kn_ref_last_stride(dy),
            sy = kn_ref_last_stride(y);
    const kn_array *arrays[] = { dx, dy, y };
    kn_ref_walk w = kn_ref_walk_shape(kn_ref_leading(y), y->shape, 3, arrays);
    for (; w.more; kn_ref_walk_next(&w)) {
        double sum = 0;
        for (int64_t j = 0; j < n; j++) {
            double d = kn_ref_get(dy, w.off[1] + j * sd);
            sum += a->log ? d : d * kn_ref_get(y, w.off[2] + j * sy);
        }
        for (int64_t j = 0; j < n; j++) {
            double d = kn_ref_get(dy, w.off[1] + j * sd), v = kn_ref_get(y, w.off[2] + j * sy);
            kn_ref_set_computed(dx, w.off[0] + j * sx, a->log ? d - exp(v) * sum : v * (d - sum));
        }
    }
    return KN_DONE;
}

/* ---- cross-entropy --------------------------------------------------------------------------- */

/* The target of row n, checked: false with an error if it is neither a class nor ignored. */
static bool target_of(kn_kernel k, const kn_array *targets, int64_t n, int64_t first, int64_t V,
                      int64_t ignore, int64_t *target)
{
    *target = kn_ref_get_int(targets, n * targets->stride[0]);
    if (*target == ignore || (*target >= 0 && *target < V))
        return true;
    return kn_fail("%s: target %lld in row %lld is outside [0, %lld) and not the ignored index "
                   "%lld; check the labels",
                   kn_kernel_name(k), (long long)*target, (long long)(first + n), (long long)V,
                   (long long)ignore);
}

/* dx[n, v] = each (exp(x[n, v] - lse) - (1 - s) [v == target] - s / V); 0 where the row is ignored.
 * In place. */
static void cross_entropy_grad_row(const kn_array *dx, const kn_array *x, int64_t n, int64_t target,
                                   bool ignored, double lse, double each, double s)
{
    const int64_t V = x->shape[1];
    for (int64_t v = 0; v < V; v++) {
        double p = exp(kn_ref_get(x, n * x->stride[0] + v * x->stride[1]) - lse);
        double d = each * (p - (v == target ? 1 - s : 0) - s / (double)V);
        kn_ref_set_computed(dx, n * dx->stride[0] + v * dx->stride[1], ignored ? 0 : d);
    }
}

/* lse[n] = log sum_v exp(logits[n, v]);
 * loss = sum_n w_n ((1 - s)(lse - logit[target]) + s (lse - mean_v logit)) / sum_n w_n. */
kn_status kn_ref_cross_entropy(const void *args)
{
    const kn_cross_entropy_args *a = args;
    const kn_array *x = &a->logits;
    int64_t N = x->shape[0], V = x->shape[1];
    double s = a->smoothing, total = 0, count = 0;
    for (int64_t n = 0; n < N; n++) {
        int64_t target, row = n * x->stride[0];
        if (!target_of(KN_K_CROSS_ENTROPY, &a->targets, n, a->first_row, V, a->ignore_index,
                       &target))
            return KN_FAILED;
        const bool ignored = target == a->ignore_index;
        double lse = log_sum_exp(x, row, V, x->stride[1]);
        kn_ref_set(&a->lse, n, lse);
        if (!ignored) {
            count++;
            total += (1 - s) * (lse - kn_ref_get(x, row + target * x->stride[1]));
        }
        if (s > 0 && !ignored) {
            double mean = 0;
            for (int64_t v = 0; v < V; v++)
                mean += kn_ref_get(x, row + v * x->stride[1]) / (double)V;
            total += s * (lse - mean);
        }
        if (a->dlogits.data)
            cross_entropy_grad_row(&a->dlogits, x, n, target, ignored, lse, 1, s);
    }
    kn_ref_set(&a->count, 0, count);
    kn_ref_set(&a->loss, 0, a->part || count == 0 ? total : total / count);
    return KN_DONE;
}

/* dlogits[n, v] = dloss / count w_n (exp(logits - lse) - (1 - s) [v == target] - s / V). */
kn_status kn_ref_cross_entropy_grad(const void *args)
{
    const kn_cross_entropy_grad_args *a = args;
    const kn_array *dx = &a->dlogits, *x = &a->logits;
    int64_t N = x->shape[0], V = x->shape[1];
    double count = kn_ref_get(&a->count, 0);
    double each = count > 0 ? kn_ref_get(&a->dloss, 0) / count : 0;
    for (int64_t n = 0; n < N; n++) {
        int64_t target;
        if (!target_of(KN_K_CROSS_ENTROPY_GRAD, &a->targets, n, 0, V, a->ignore_index, &target))
            return KN_FAILED;
        cross_entropy_grad_row(dx, x, n, target, target == a->ignore_index, kn_ref_get(&a->lse, n),
                               each, a->smoothing);
    }
    return KN_DONE;
}

/* Element j of w, or fallback if there is none. */
static double weight(const kn_array *w, int64_t j, double fallback)
{
    return w->data ? kn_ref_get(w, j * w->stride[0]) : fallback;
}

/* sum = x + add. */
static void norm_add(const kn_norm_args *a)
{
    kn_ref_walk w = kn_ref_walk_over(&a->sum, &a->x, &a->add, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        double x = kn_ref_get(&a->x, w.off[1]), add = kn_ref_get(&a->add, w.off[2]);
        kn_ref_set_computed(&a->sum, w.off[0], x + add);
    }
}

/* mean = sum x / C (0 for rms), var = sum (x - mean)^2 / C, rstd = 1 / sqrt(var + eps);
 * y = (x - mean) rstd w + b. */
kn_status kn_ref_norm(const void *args)
{
    const kn_norm_args *a = args;
    const kn_array *y = &a->y, *x = a->add.data ? &a->sum : &a->x;
    if (a->add.data)
        norm_add(a);
    int64_t C = kn_ref_last_dim(x), sy = kn_ref_last_stride(y), sx = kn_ref_last_stride(x);
    const kn_array *arrays[] = { y, x };
    kn_ref_walk w = kn_ref_walk_shape(kn_ref_leading(x), x->shape, 2, arrays);
    for (; w.more; kn_ref_walk_next(&w)) {
        double mean = 0, var = 0;
        for (int64_t j = 0; j < C && !a->rms; j++)
            mean += kn_ref_get(x, w.off[1] + j * sx) / (double)C;
        for (int64_t j = 0; j < C; j++) {
            double d = kn_ref_get(x, w.off[1] + j * sx) - mean;
            var += d * d / (double)C;
        }
        double rstd = 1 / sqrt(var + a->eps);
        if (a->mean.data && !a->rms)
            kn_ref_set(&a->mean, w.i, mean);
        if (a->rstd.data)
            kn_ref_set(&a->rstd, w.i, rstd);
        for (int64_t j = 0; j < C; j++) {
            double h = (kn_ref_get(x, w.off[1] + j * sx) - mean) * rstd;
            kn_ref_set_computed(y, w.off[0] + j * sy,
                                h * weight(&a->w, j, 1) + weight(&a->b, j, 0));
        }
    }
    return KN_DONE;
}

/* The terms of the backward at column j of a row: dy and the normalised h = (x - mean) rstd. */
typedef struct norm_row {
    const kn_norm_grad_args *a;
    int64_t dy, x; /* offsets of the row */
    double mean, rstd;
} norm_row;

static norm_row row_of(const kn_norm_grad_args *a, int64_t row, int64_t dy, int64_t x)
{
    double mean = a->rms ? 0 : kn_ref_get(&a->mean, row);
    return (norm_row){ a, dy, x, mean, kn_ref_get(&a->rstd, row) };
}

static double row_dy(const norm_row *r, int64_t j)
{
    return kn_ref_get(&r->a->dy, r->dy + j * kn_ref_last_stride(&r->a->dy));
}

static double row_h(const norm_row *r, int64_t j)
{
    return (kn_ref_get(&r->a->x, r->x + j * kn_ref_last_stride(&r->a->x)) - r->mean) * r->rstd;
}

/* dw_j = sum_rows dy h, db_j = sum_rows dy. */
static void norm_grad_weights(const kn_norm_grad_args *a)
{
    const kn_array *arrays[] = { &a->dy, &a->x };
    for (int64_t j = 0; j < kn_ref_last_dim(&a->x); j++) {
        double dw = 0, db = 0;
        kn_ref_walk w = kn_ref_walk_shape(kn_ref_leading(&a->x), a->x.shape, 2, arrays);
        for (; w.more; kn_ref_walk_next(&w)) {
            norm_row r = row_of(a, w.i, w.off[0], w.off[1]);
            dw += row_dy(&r, j) * row_h(&r, j);
            db += row_dy(&r, j);
        }
        if (a->dw.data)
            kn_ref_set_computed(&a->dw, j * a->dw.stride[0], dw);
        if (a->db.data)
            kn_ref_set_computed(&a->db, j * a->db.stride[0], db);
    }
}

/* With g = dy w: dx = rstd (g - mean_j(g) - h mean_j(g h)) + more; rms has no mean_j(g). */
static void norm_grad_input(const kn_norm_grad_args *a)
{
    const kn_array *more = a->more.data ? &a->more : &a->dx;
    const kn_array *arrays[] = { &a->dx, &a->dy, &a->x, more };
    int64_t C = kn_ref_last_dim(&a->x), sx = kn_ref_last_stride(&a->dx),
            sm = kn_ref_last_stride(more);
    kn_ref_walk w = kn_ref_walk_shape(kn_ref_leading(&a->x), a->x.shape, 4, arrays);
    for (; w.more; kn_ref_walk_next(&w)) {
        norm_row r = row_of(a, w.i, w.off[1], w.off[2]);
        double mean_g = 0, mean_gh = 0;
        for (int64_t j = 0; j < C; j++) {
            double g = row_dy(&r, j) * weight(&a->w, j, 1);
            mean_g += a->rms ? 0 : g / (double)C;
            mean_gh += g * row_h(&r, j) / (double)C;
        }
        for (int64_t j = 0; j < C; j++) {
            double g = row_dy(&r, j) * weight(&a->w, j, 1);
            double d = r.rstd * (g - mean_g - row_h(&r, j) * mean_gh);
            if (a->more.data)
                d += kn_ref_get(more, w.off[3] + j * sm);
            kn_ref_set_computed(&a->dx, w.off[0] + j * sx, d);
        }
    }
}

kn_status kn_ref_norm_grad(const void *args)
{
    const kn_norm_grad_args *a = args;
    if (a->dw.data || a->db.data)
        norm_grad_weights(a);
    if (a->dx.data)
        norm_grad_input(a);
    return KN_DONE;
}
