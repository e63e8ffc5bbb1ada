/* kernels/cpu/reference_optim.c: the sum over ranks and the optimizers' steps. */
#include "kernels/cpu/reference.h"
#include "kernels/philox.h"
#include "kernels/step_numbers.h"
#include <math.h>

/* x rounded to f32 unless the sum or step is in f64: every operation of f32 arithmetic is the f64
 * operation followed by this. */
static double in(bool f64, double x)
{
    return f64 ? x : (double)(float)x;
}

static double average(bool f64, kn_average a, double old, double fresh)
{
    const double from = a.from_fresh ? fresh : old, to = a.from_fresh ? old : fresh;
    return in(f64, from + in(f64, in(f64, a.step) * in(f64, to - from)));
}

static kn_array vector(const void *data, kn_dtype dtype, int64_t count)
{
    return kn_array_make((void *)(uintptr_t)data, dtype, 1, &count);
}

/* dst[i] = round(acc[i] + src[0][i] + ... + src[n-1][i]), left to right. */
kn_status kn_ref_sum_n(const void *args)
{
    const kn_sum_n_args *a = args;
    kn_array dst = vector(a->dst, a->dst_dtype, a->count);
    kn_array acc = vector(a->acc, a->dst_dtype, a->count);
    kn_array src = vector(NULL, a->src_dtype, a->count);
    bool f64 = a->dst_dtype == KN_F64 || a->src_dtype == KN_F64;
    for (int64_t i = 0; i < a->count; i++) {
        double sum = a->acc ? kn_ref_get(&acc, i) : 0;
        for (int j = 0; j < a->n; j++) {
            src.data = (void *)(uintptr_t)a->src[j];
            double x = kn_ref_get(&src, i);
            sum = j == 0 && !a->acc ? x : in(f64, sum + x); /* -0 + 0 would lose the sign */
        }
        kn_ref_set(&dst, i, sum);
    }
    return KN_DONE;
}

/* A step's tensors of a piece. */
enum { PARAM, M, V };

static kn_array tensor_of(const kn_opt_piece *o, int which)
{
    return vector(which == PARAM ? o->param : which == M ? o->m : o->v, o->param_dtype, o->count);
}

static double get(const kn_opt_piece *o, int which, int64_t i)
{
    kn_array a = tensor_of(o, which);
    return kn_ref_get(&a, i);
}

/* Masters go to their copy as well, if there is one. */
static void put(const kn_opt_step *s, const kn_opt_piece *o, int which, int64_t i, double value)
{
    kn_array a = tensor_of(o, which), out = vector(o->out, o->out_dtype, o->count);
    if (s->seed && (o->param_dtype == KN_BF16 || o->param_dtype == KN_F16)) {
        const kn_opt_place *at = &o->place;
        int64_t e = at->start + (at->run > 0 ? i / at->run * at->step + i % at->run : i);
        uint32_t word = kn_philox_at(kn_step_key(*s->seed, *s->step), at->stream + (uint64_t)which,
                                     (uint64_t)e);
        value = (double)kn_rounded_at_random(o->param_dtype, (float)value, word);
    }
    kn_ref_set(&a, i, value);
    if (which == PARAM && o->out)
        kn_ref_set(&out, i, kn_ref_get(&a, i));
}

/* The gradient of element i, scaled and then clamped; NaN stays. */
static double grad_of(const kn_opt_step *s, const kn_opt_piece *o, int64_t i)
{
    bool f64 = o->param_dtype == KN_F64;
    kn_array grad = vector(o->grad, o->grad_dtype, o->count);
    double g = in(f64, kn_ref_get(&grad, i) * in(f64, *s->grad_scale));
    double most = s->limit ? in(f64, *s->limit) : INFINITY;
    return g > most ? most : g < -most ? -most : g;
}

/* One piece of AdamW; c1 = 1 - beta1^t and c2 = 1 - beta2^t correct the bias of zero starts. */
static void adamw_piece(const kn_adamw_args *a, const kn_opt_piece *o, double c1, double c2)
{
    bool f64 = o->param_dtype == KN_F64;
    double lr = in(f64, in(f64, *a->s.lr) * in(f64, o->lr_mul)), wd = in(f64, o->weight_decay);
    kn_average b1 = kn_average_of(a->beta1), b2 = kn_average_of(a->beta2);
    double eps = in(f64, a->eps);
    c1 = in(f64, c1);
    c2 = in(f64, c2);
    for (int64_t i = 0; i < o->count; i++) {
        double g = grad_of(&a->s, o, i);
        double pi = get(o, PARAM, i), mi = get(o, M, i), vi = get(o, V, i);
        mi = average(f64, b1, mi, g);
        vi = average(f64, b2, vi, in(f64, g * g));
        double root = in(f64, sqrt(in(f64, vi / c2)));
        double step = in(f64, in(f64, mi / c1) / in(f64, root + eps));
        pi = in(f64, pi - in(f64, lr * in(f64, step + in(f64, wd * pi))));
        put(&a->s, o, M, i, mi);
        put(&a->s, o, V, i, vi);
        put(&a->s, o, PARAM, i, pi);
    }
}

/* m and v average g and g^2;  p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p). */
kn_status kn_ref_adamw(const void *args)
{
    const kn_adamw_args *a = args;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    double t = *a->s.step, c1 = 1 - pow(a->beta1, t), c2 = 1 - pow(a->beta2, t);
    for (int i = 0; i < a->s.pieces; i++)
        adamw_piece(a, &a->s.piece[i], c1, c2);
    return KN_DONE;
}

static void sgd_piece(const kn_sgd_args *a, const kn_opt_piece *o)
{
    bool f64 = o->param_dtype == KN_F64, first = *a->s.step == 1, momentum = o->m != NULL;
    double lr = in(f64, in(f64, *a->s.lr) * in(f64, o->lr_mul)), wd = in(f64, o->weight_decay);
    double mu = in(f64, a->momentum), fresh = in(f64, 1 - a->dampening);
    for (int64_t i = 0; i < o->count; i++) {
        double pi = get(o, PARAM, i), g = grad_of(&a->s, o, i);
        g = in(f64, g + in(f64, wd * pi));
        if (momentum) {
            double mi = g;
            if (!first)
                mi = in(f64, in(f64, mu * get(o, M, i)) + in(f64, fresh * g));
            put(&a->s, o, M, i, mi);
            g = a->nesterov ? in(f64, g + in(f64, mu * mi)) : mi;
        }
        put(&a->s, o, PARAM, i, in(f64, pi - in(f64, lr * g)));
    }
}

/* g += wd p;  m = first step ? g : momentum m + (1 - dampening) g;  p -= lr (g or m). */
kn_status kn_ref_sgd(const void *args)
{
    const kn_sgd_args *a = args;
    if (a->s.skip && *a->s.skip != 0)
        return KN_DONE;
    for (int i = 0; i < a->s.pieces; i++)
        sgd_piece(a, &a->s.piece[i]);
    return KN_DONE;
}

static void lion_piece(const kn_lion_args *a, const kn_opt_piece *o)
{
    bool f64 = o->param_dtype == KN_F64;
    double lr = in(f64, in(f64, *a->s.lr) * in(f64, o->lr_mul)), wd = in(f64, o->weight_decay);
    kn_average b1 = kn_average_of(a->beta1), b2 = kn_average_of(a->beta2);
    for (int64_t i = 0; i < o->count; i++) {
        double pi = get(o, PARAM, i), mi = get(o, M, i), g = grad_of(&a->s, o, i);
        double c = average(f64, b1, mi, g);
        double sign = c > 0 ? 1 : c < 0 ? -1 : c;
        put(&a->s, o, M, i, average(f64, b2, mi, g));
        put(&a->s, o, PARAM, i, in(f64, pi - in(f64, lr * in(f64, sign + in(f64, wd * pi)))));
    }
}

/* c averages g and the m before, m does so by b2;  p -= lr (sign(c) + wd p). */
kn_status kn_ref_lion(const void *args)
{
    const kn_lion_args *a = args;
    if (a->s.skip && *a->s.skip != 0)
        return KN_DONE;
    for (int i = 0; i < a->s.pieces; i++)
        lion_piece(a, &a->s.piece[i]);
    return KN_DONE;
}

kn_status kn_ref_loss_scale(const void *args)
{
    kn_loss_scale_numbers(args);
    return KN_DONE;
}
