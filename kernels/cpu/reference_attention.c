/* kernels/cpu/reference_attention.c: scaled-dot-product attention and rotary embedding.
 *
 * Head h of q uses group g = h / (H / G) of k and v. For a row (b, h, t) with its visible keys s:
 *   z_s = scale q_t . k_s + mask_s     lse = log sum_s exp(z_s)     P_s = exp(z_s - lse)
 *   o_t = sum_s m_s P_s v_s   where m_s = 0 or 1 / (1 - p) from dropout
 * Nothing of size T x S is stored: the backward computes P again from lse (Dao and others,
 * arXiv:2205.14135). */
#include "kernels/cpu/reference.h"
#include "kernels/lse.h"
#include "kernels/philox.h"
#include "kernels/rope.h"
#include <math.h>

/* The sizes and the dropout of a call, the same for forward and backward. */
typedef struct attention {
    int64_t B, H, G, T, S, D;
    double scale;
    bool causal, dropout;
    int64_t window;
    const kn_array *mask; /* NULL: none */
    uint32_t threshold;
    double kept;
    uint64_t seed, stream;
} attention;

static attention attention_of(const kn_array *q, const kn_array *k, double scale, bool causal,
                              double p, uint64_t seed, uint64_t stream, const kn_array *mask,
                              int64_t window)
{
    double kept = kn_dropout_scale(p);
    return (attention){ .B = q->shape[0],
                        .H = q->shape[1],
                        .G = k->shape[1],
                        .T = q->shape[2],
                        .S = k->shape[2],
                        .D = q->shape[3],
                        .scale = scale,
                        .causal = causal,
                        .window = window,
                        .mask = mask->data ? mask : NULL,
                        .dropout = p > 0,
                        .threshold = kn_dropout_threshold(p),
                        .kept = q->dtype == KN_F64 ? kept : (float)kept,
                        .seed = seed,
                        .stream = stream };
}

/* Query t sees keys [hidden, visible): visible is all, or s <= t + (S - T). */
static int64_t visible(const attention *a, int64_t t)
{
    if (!a->causal)
        return a->S;
    int64_t n = t + a->S - a->T + 1;
    return n < 0 ? 0 : n;
}

static int64_t hidden(const attention *a, int64_t t)
{
    int64_t n = a->window ? t + a->S - a->T + 1 - a->window : 0;
    return n < 0 ? 0 : n;
}

/* The mask's addition to a score. */
static double bias(const attention *a, int64_t b, int64_t h, int64_t t, int64_t s)
{
    const kn_array *m = a->mask;
    if (!m)
        return 0;
    int64_t at = kn_ref_at(m, b, h, t, s);
    if (m->dtype == KN_BOOL)
        return kn_ref_get_int(m, at) ? 0 : -INFINITY;
    return kn_ref_get(m, at);
}

/* P_s from z_s, 0 where the mask hides s. */
static double probability(const attention *a, double z, double lse)
{
    return a->mask && z == -INFINITY ? 0 : exp(z - lse);
}

/* m_s of row (b, h, t): element ((b H + h) T + t) S + s of the draw. */
static double dropout_factor(const attention *a, int64_t row, int64_t s)
{
    if (!a->dropout)
        return 1;
    uint32_t word = kn_philox_at(a->seed, a->stream, (uint64_t)(row * a->S + s));
    return kn_dropout_keeps(word, a->threshold) ? a->kept : 0;
}

static double dot(const kn_array *x, int64_t xi, const kn_array *y, int64_t yi, int64_t n)
{
    double sum = 0;
    for (int64_t d = 0; d < n; d++)
        sum += kn_ref_get(x, xi + d * x->stride[3]) * kn_ref_get(y, yi + d * y->stride[3]);
    return sum;
}

/* The factor of a row's weights: 1, or where lse is coarse one over their sum. */
static double row_share(const attention *a, const kn_attention_grad_args *p, int64_t b, int64_t h,
                        int64_t t, double lse)
{
    int64_t n = visible(a, t), g = h / (a->H / a->G);
    double sum = 0;
    if (!kn_lse_is_coarse(lse))
        return 1;
    for (int64_t s = hidden(a, t); s < n; s++) {
        double z =
            dot(&p->q, kn_ref_at(&p->q, b, h, t, 0), &p->k, kn_ref_at(&p->k, b, g, s, 0), a->D);
        sum += probability(a, a->scale * z + bias(a, b, h, t, s), lse);
    }
    return 1 / sum;
}

/* One row: z in room [S], then o_t and lse. */
static void attention_row(const attention *a, const kn_attention_args *p, int64_t b, int64_t h,
                          int64_t t, double *z)
{
    int64_t n = visible(a, t), g = h / (a->H / a->G), row = (b * a->H + h) * a->T + t;
    int64_t qt = kn_ref_at(&p->q, b, h, t, 0), ot = kn_ref_at(&p->o, b, h, t, 0),
            first = hidden(a, t);
    double max = -INFINITY, sum = 0;
    for (int64_t s = first; s < n; s++) {
        z[s] = a->scale * dot(&p->q, qt, &p->k, kn_ref_at(&p->k, b, g, s, 0), a->D) +
               bias(a, b, h, t, s);
        max = z[s] > max || isnan(z[s]) ? z[s] : max;
    }
    for (int64_t s = first; s < n; s++)
        sum += probability(a, z[s], max);
    double lse = n > 0 ? max + log(sum) : -INFINITY;
    kn_ref_set(&p->lse, row, lse);
    for (int64_t s = first; s < n; s++)
        z[s] = probability(a, z[s], lse) * dropout_factor(a, row, s);
    for (int64_t d = 0; d < a->D; d++) {
        double o = 0;
        for (int64_t s = first; s < n; s++)
            o += z[s] * kn_ref_get(&p->v, kn_ref_at(&p->v, b, g, s, d));
        kn_ref_set_computed(&p->o, ot + d * p->o.stride[3], o);
    }
}

kn_status kn_ref_attention(const void *args)
{
    const kn_attention_args *p = args;
    attention a = attention_of(&p->q, &p->k, p->scale, p->causal, p->dropout_p,
                               kn_seed_of(p->seed, p->seed_at), p->stream, &p->mask, p->window);
    double *z = kn_host_alloc((size_t)(a.S + 1) * sizeof *z);
    if (!z)
        return KN_FAILED;
    for (int64_t b = 0; b < a.B; b++)
        for (int64_t h = 0; h < a.H; h++)
            for (int64_t t = 0; t < a.T; t++)
                attention_row(&a, p, b, h, t, z);
    kn_host_free(z);
    return KN_DONE;
}

/* A row (b, h, t) of the backward, and its sums of gradients: dq one row [D]; dk and dv [S, D],
 * over the rows of a group. */
typedef struct grad_row {
    const attention *a;
    const kn_attention_grad_args *x;
    int64_t b, h, t;
    double *dq, *dk, *dv;
} grad_row;

/* Adds what the gradient dz by the score of key s gives. */
static void give_dz(const grad_row *r, int64_t s, double dz)
{
    const attention *a = r->a;
    const kn_attention_grad_args *x = r->x;
    int64_t qt = kn_ref_at(&x->q, r->b, r->h, r->t, 0);
    int64_t ks = kn_ref_at(&x->k, r->b, r->h / (a->H / a->G), s, 0);
    if (x->dmask.data)
        kn_ref_set_computed(&x->dmask, kn_ref_at(&x->dmask, r->b, r->h, r->t, s), dz);
    for (int64_t d = 0; d < a->D; d++) {
        r->dq[d] += a->scale * dz * kn_ref_get(&x->k, ks + d * x->k.stride[3]);
        r->dk[s * a->D + d] += a->scale * dz * kn_ref_get(&x->q, qt + d * x->q.stride[3]);
    }
}

/* With dP_s = m_s dout . v_s:
 *   delta = sum_s P_s dP_s = dout . o     dz_s = P_s (dP_s - delta)
 *   dq_t = scale sum_s dz_s k_s           dk_s += scale dz_s q_t        dv_s += m_s P_s dout
 * and the gradient by the mask is dz. Where P_s is above one half, dP_s - delta is a small
 * difference of large numbers: that dz is minus the sum of the others', for a row of dz has the
 * sum 0. */
static void attention_grad_row(const grad_row *r)
{
    const attention *a = r->a;
    const kn_attention_grad_args *p = r->x;
    const int64_t b = r->b, h = r->h, t = r->t;
    int64_t n = visible(a, t), g = h / (a->H / a->G), row = (b * a->H + h) * a->T + t;
    int64_t qt = kn_ref_at(&p->q, b, h, t, 0), dt = kn_ref_at(&p->dout, b, h, t, 0), heavy = -1;
    double lse = kn_ref_get(&p->lse, row), rest = 0, share = row_share(a, p, b, h, t, lse);
    double delta = dot(&p->dout, dt, &p->o, kn_ref_at(&p->o, b, h, t, 0), a->D);
    for (int64_t d = 0; d < a->D; d++)
        r->dq[d] = 0;
    for (int64_t s = hidden(a, t); s < n; s++) {
        int64_t ks = kn_ref_at(&p->k, b, g, s, 0), vs = kn_ref_at(&p->v, b, g, s, 0);
        double m = dropout_factor(a, row, s);
        double z = a->scale * dot(&p->q, qt, &p->k, ks, a->D) + bias(a, b, h, t, s);
        double P = probability(a, z, lse) * share;
        double dz = P * (m * dot(&p->dout, dt, &p->v, vs, a->D) - delta);
        for (int64_t d = 0; d < a->D; d++)
            r->dv[s * a->D + d] += m * P * kn_ref_get(&p->dout, dt + d * p->dout.stride[3]);
        if (P > 0.5 && heavy < 0) {
            heavy = s;
            continue;
        }
        rest += dz;
        give_dz(r, s, dz);
    }
    if (heavy >= 0)
        give_dz(r, heavy, -rest);
    int64_t to = kn_ref_at(&p->dq, b, h, t, 0);
    for (int64_t d = 0; d < a->D; d++)
        kn_ref_set_computed(&p->dq, to + d * p->dq.stride[3], r->dq[d]);
}

/* Stores the sums of group (b, g) and zeroes them. */
static void store_group(const attention *a, const kn_array *dst, int64_t b, int64_t g, double *sum)
{
    for (int64_t s = 0; s < a->S; s++) {
        for (int64_t d = 0; d < a->D; d++) {
            kn_ref_set_computed(dst, kn_ref_at(dst, b, g, s, d), sum[s * a->D + d]);
            sum[s * a->D + d] = 0;
        }
    }
}

kn_status kn_ref_attention_grad(const void *args)
{
    const kn_attention_grad_args *p = args;
    attention a = attention_of(&p->q, &p->k, p->scale, p->causal, p->dropout_p,
                               kn_seed_of(p->seed, p->seed_at), p->stream, &p->mask, p->window);
    int64_t size = a.S * a.D;
    double *room = kn_host_calloc((size_t)(2 * size + a.D + 1), sizeof *room);
    if (!room)
        return KN_FAILED;
    double *dk = room, *dv = room + size, *dq = room + 2 * size;
    int64_t heads = a.G > 0 ? a.H / a.G : 0; /* heads of one group */
    for (int64_t b = 0; b < a.B; b++) {
        for (int64_t g = 0; g < a.G; g++) {
            for (int64_t h = g * heads; h < (g + 1) * heads; h++)
                for (int64_t t = 0; t < a.T; t++)
                    attention_grad_row(&(grad_row){ &a, p, b, h, t, dq, dk, dv });
            store_group(&a, &p->dk, b, g, dk);
            store_group(&a, &p->dv, b, g, dv);
        }
    }
    kn_host_free(room);
    return KN_DONE;
}

/* With angle = (start + t) kn_rope_speed(i), pairs (x_i, x_{i + D/2}) rotate (Su and others,
 * arXiv:2104.09864): y_i = x_i cos - x_{i+D/2} sin,  y_{i+D/2} = x_{i+D/2} cos + x_i sin. */
kn_status kn_ref_rope(const void *args)
{
    const kn_rope_args *a = args;
    const kn_array *y = &a->y, *x = &a->x;
    int64_t half = x->shape[3] / 2, sy = y->stride[3], sx = x->stride[3];
    const kn_array *arrays[] = { y, x };
    kn_ref_walk w = kn_ref_walk_shape(3, x->shape, 2, arrays);
    for (; w.more; kn_ref_walk_next(&w)) {
        for (int64_t i = 0; i < half; i++) {
            double position = (double)(a->start + w.at[2]);
            double angle = position * kn_rope_speed(a->base, a->scaling, i, half);
            double c = cos(angle), s = a->inverse ? -sin(angle) : sin(angle);
            double u = kn_ref_get(x, w.off[1] + i * sx);
            double v = kn_ref_get(x, w.off[1] + (i + half) * sx);
            kn_ref_set_computed(y, w.off[0] + i * sy, u * c - v * s);
            kn_ref_set_computed(y, w.off[0] + (i + half) * sy, v * c + u * s);
        }
    }
    return KN_DONE;
}
