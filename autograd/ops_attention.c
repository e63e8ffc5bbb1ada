/* autograd/ops_attention.c: fused scaled-dot-product attention and rotary embedding. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <math.h>
#include <string.h>

static const int positions_first[4] = { 0, 2, 1, 3 };

/* Device address of the seed (kn_seed_place), if probabilities are dropped. */
static const uint64_t *seed_place(const kn_tensor *t, double dropout, uint64_t seed, bool *ok)
{
    *ok = true;
    return dropout > 0 ? kn_seed_place(kn_device_of(t), seed, ok) : NULL;
}

/* kn_grad_part, if the elements of a row are side by side there, as fast kernels want them. */
static kn_tensor *rows_place(kn_op_grad *g, int i)
{
    kn_tensor *place = kn_grad_part(g, i);
    return place && (place->stride[3] == 1 || place->shape[3] == 1) ? place : NULL;
}

/* ---- attention: outputs o[B,H,T,D] (laid out [B,T,H,D]) and lse[B,H,T] ----------------------- */

typedef struct attention_attr {
    double scale, dropout;
    uint64_t seed, stream;
    bool causal;
    int64_t window;
    bool aligned;
} attention_attr;

/* The mask of scores [B,H,T,S]: bool, or a float that is added. */
static bool mask_fits(const kn_tensor *q, const kn_tensor *k, const kn_tensor *mask)
{
    int ndim;
    int64_t scores[4] = { q->shape[0], q->shape[1], q->shape[2], k->shape[2] }, all[KN_MAX_DIMS];
    bool fits = mask->ndim <= 4 && (mask->dtype == KN_BOOL || mask->dtype == q->dtype) &&
                kn_broadcast_shape(4, scores, mask->ndim, mask->shape, &ndim, all) &&
                memcmp(scores, all, sizeof scores) == 0;
    return fits ||
           kn_fail("attention: the mask is %s; for q %s and k %s it should broadcast to "
                   "[%lld,%lld,%lld,%lld] and be bool (true: seen) or of their dtype (added)",
                   KN_SHOWN(mask), KN_SHOWN(q), KN_SHOWN(k), (long long)scores[0],
                   (long long)scores[1], (long long)scores[2], (long long)scores[3]);
}

static bool attention_shape(kn_op_call *c)
{
    const attention_attr *a = c->attr;
    const kn_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2];
    bool ok = q->ndim == 4 && k->ndim == 4 && v->ndim == 4 && kn_dtype_is_float(q->dtype) &&
              q->dtype == k->dtype && q->dtype == v->dtype;
    ok = ok && memcmp(k->shape, v->shape, 4 * sizeof(int64_t)) == 0 && q->shape[0] == k->shape[0] &&
         q->shape[3] == k->shape[3];
    if (!ok)
        return kn_fail("attention: needs q[B,H,T,D], k[B,G,S,D], v[B,G,S,D] of one float dtype; "
                       "got %s, %s, %s",
                       KN_SHOWN(q), KN_SHOWN(k), KN_SHOWN(v));
    if (k->shape[1] == 0 || q->shape[1] % k->shape[1])
        return kn_fail("attention: %lld query heads don't divide by %lld key heads",
                       (long long)q->shape[1], (long long)k->shape[1]);
    if (!(a->dropout >= 0 && a->dropout < 1))
        return kn_fail("attention: dropout is %g, should lie in [0, 1)", a->dropout);
    if (a->window < 0 || (a->window > 0 && !a->causal))
        return kn_fail("attention: .window is %lld; it counts the keys that a query sees, at least "
                       "1 (0: all), of causal attention (.causal = true)",
                       (long long)a->window);
    if (c->in[3] && !mask_fits(q, k, c->in[3]))
        return false;
    if (a->causal && !a->aligned && q->shape[2] != k->shape[2])
        return kn_fail("attention: .causal of q %s and k %s: which keys does a query see? .align = "
                       "KN_CAUSAL_FIRST: query 0 key 0 (torch's is_causal); KN_CAUSAL_LAST: the "
                       "last query all of them (behind a cache)",
                       KN_SHOWN(q), KN_SHOWN(k));
    c->spec[0] = kn_spec_like(q);
    c->spec[0].order = positions_first; /* so that [B,T,H*D] is a view */
    c->spec[1] = kn_spec_like(q);
    c->spec[1].ndim = 3;
    c->spec[1].dtype = kn_wide_dtype(q->dtype);
    return true;
}

/* The mask as the kernels take it, expanded to [B,H,T,S]; {0} without one. */
static kn_array mask_of(const kn_tensor *q, const kn_tensor *k, const kn_tensor *mask)
{
    const int64_t scores[4] = { q->shape[0], q->shape[1], q->shape[2], k->shape[2] };
    return mask ? kn_array_expand(kn_array_of(mask), 4, scores) : (kn_array){ 0 };
}

static bool attention_forward(kn_op_call *c)
{
    const attention_attr *a = c->attr;
    bool ok;
    const uint64_t *place = seed_place(c->out[0], a->dropout, a->seed, &ok);
    kn_attention_args args = { kn_array_of(c->out[0]),
                               kn_array_of(c->out[1]),
                               kn_array_of(c->in[0]),
                               kn_array_of(c->in[1]),
                               kn_array_of(c->in[2]),
                               mask_of(c->in[0], c->in[1], c->in[3]),
                               a->scale,
                               a->causal,
                               a->dropout,
                               a->seed,
                               a->stream,
                               place,
                               a->window };
    return ok && KN_RUN(c->out[0], KN_K_ATTENTION, args);
}

static bool attention_backward(kn_op_grad *g)
{
    const attention_attr *a = g->attr;
    kn_tensor *d[3], *dy = g->dout[0];
    if (!dy)
        return true;
    if (dy->shape[3] > 1 && dy->stride[3] != 1 && !(dy = kn_contiguous(dy)))
        return false;
    for (int i = 0; i < 3; i++) { /* else in memory as [B,T,H,D], the usual order */
        const kn_spec *s = &g->in_spec[i];
        d[i] = rows_place(g, i);
        if (!d[i])
            d[i] = kn_tensor_new(s->dtype, kn_device_of(dy), NULL, KN_MEM_ACTIVATION, 4, s->shape,
                                 positions_first, true);
        if (!d[i])
            return false;
        g->din[i] = g->want[i] ? d[i] : NULL;
    }
    kn_tensor *dmask = NULL;
    if (g->want[3]) {
        const int64_t *q = g->in_spec[0].shape;
        dmask = kn_zeros(g->in_spec[3].dtype, kn_device_of(dy),
                         KN_SHAPE(q[0], q[1], q[2], g->in_spec[1].shape[2]));
        if (!dmask)
            return false;
    }
    bool ok;
    const uint64_t *place = seed_place(dy, a->dropout, a->seed, &ok);
    kn_attention_grad_args args = { kn_array_of(d[0]),
                                    kn_array_of(d[1]),
                                    kn_array_of(d[2]),
                                    kn_array_of(dy),
                                    kn_array_of(g->out[0]),
                                    kn_array_of(g->out[1]),
                                    kn_array_of(g->in[0]),
                                    kn_array_of(g->in[1]),
                                    kn_array_of(g->in[2]),
                                    mask_of(g->in[0], g->in[1], g->in[3]),
                                    kn_array_or_none(dmask),
                                    a->scale,
                                    a->causal,
                                    a->dropout,
                                    a->seed,
                                    a->stream,
                                    place,
                                    a->window };
    if (!ok || !KN_RUN(dy, KN_K_ATTENTION_GRAD, args))
        return false;
    g->din[3] = dmask ? kn_grad_unbroadcast(g, 3, dmask) : NULL;
    return !dmask || g->din[3];
}

/* [H, T, S] of positions: the key s that the query t sees, as .causal and .window say. */
static kn_tensor *causally_seen(const attention_attr *a, kn_device device, int64_t T, int64_t S)
{
    kn_tensor *t = kn_view(kn_arange(KN_I64, device, T), KN_SHAPE(T, 1));
    kn_tensor *s = kn_arange(KN_I64, device, S), *newest = kn_add_scalar(t, (double)(S - T));
    kn_tensor *seen = kn_le(s, newest);
    return a->window > 0 ? kn_logical_and(seen, kn_gt(s, kn_add_scalar(newest, -(double)a->window)))
                         : seen;
}

/* softmax(scale q k^T + mask) v, with heads in groups: [B,G,H/G,T,S] scores. A key that isn't seen
 * has a score of almost nothing, then no weight, so that no infinity meets a zero. */
static bool attention_composed(kn_op_grad *g, kn_tensor **y)
{
    const attention_attr *a = g->attr;
    kn_tensor *q = g->in[0], *k = g->in[1], *v = g->in[2], *mask = g->in[3], *seen = NULL;
    const int64_t B = q->shape[0], H = q->shape[1], T = q->shape[2], D = q->shape[3];
    const int64_t G = k->shape[1], S = k->shape[2], each = G ? H / G : 1;
    if (a->dropout > 0)
        return kn_fail("attention: with .dropout it has a first derivative only; make it of "
                       "kn_matmul, kn_softmax and kn_dropout for .create_graph");
    const kn_dtype wide = kn_wide_dtype(q->dtype);
    kn_tensor *in[3] = { kn_reshape(q, KN_SHAPE(B, G, each, T, D)), kn_unsqueeze(k, 2),
                         kn_unsqueeze(v, 2) };
    for (int i = 0; i < 3; i++)
        in[i] = in[i] ? kn_cast(in[i], wide) : NULL;
    kn_tensor *score = kn_scale(kn_matmul(in[0], kn_transpose(in[1], -1, -2)), a->scale);
    if (a->causal)
        seen = causally_seen(a, kn_device_of(q), T, S);
    if (mask) {
        mask =
            kn_reshape(kn_expand(mask, 4, (int64_t[]){ B, H, T, S }), KN_SHAPE(B, G, each, T, S));
        kn_tensor *open =
            mask && mask->dtype != KN_BOOL ? kn_gt(mask, kn_number_like(mask, -INFINITY)) : mask;
        score = mask != open ? kn_add(score, kn_cast(mask, wide)) : score;
        seen = seen ? kn_logical_and(seen, open) : open;
    }
    kn_tensor *p = kn_softmax(seen ? kn_where(seen, score, kn_number_like(score, -1e30)) : score);
    p = seen ? kn_where(seen, p, kn_number_like(p, 0)) : p;
    kn_tensor *o = kn_matmul(p, in[2]);
    y[0] = kn_cast(kn_reshape(o, KN_SHAPE(B, H, T, D)), q->dtype);
    return y[0] != NULL;
}

KN_OP(kn_op_attention, .name = "attention", .attr_size = sizeof(attention_attr), .save_in = 15,
      .save_out = 3, .shape = attention_shape, .forward = attention_forward,
      .backward = attention_backward, .on_tape = kn_composed_on_tape,
      .composed = attention_composed);

/* Queries and keys begin together: queries before key S are aligned by their own, keys behind query
 * T are seen by none. */
static kn_tensor *from_the_first(kn_tensor *q, kn_tensor *k, kn_tensor *v,
                                 kn_scaled_dot_product_attention_options o)
{
    const int64_t T = q->shape[2], S = k->shape[2];
    const int last = o.mask ? o.mask->ndim - 1 : 0;
    kn_scope s = kn_scope_begin();
    kn_tensor *part[2] = { NULL }, *mask = o.mask, *y = NULL;
    const bool rows = mask && last > 0 && mask->shape[last - 1] == T;
    o.align = KN_CAUSAL_LAST;
    if (T < S) {
        if (mask && mask->shape[last] == S)
            o.mask = kn_slice(mask, last, 0, T);
        y = kn_scaled_dot_product_attention_(q, kn_slice(k, 2, 0, T), kn_slice(v, 2, 0, T), o);
    } else if (o.window > 0) {
        kn_fail("attention: .window with more queries, %lld, than keys, %lld, goes with "
                ".align = KN_CAUSAL_LAST only",
                (long long)T, (long long)S);
    } else {
        o.mask = rows ? kn_slice(mask, last - 1, 0, S) : mask;
        part[0] = kn_scaled_dot_product_attention_(kn_slice(q, 2, 0, S), k, v, o);
        o.mask = rows ? kn_slice(mask, last - 1, S, T) : mask;
        o.causal = false;
        part[1] = kn_scaled_dot_product_attention_(kn_slice(q, 2, S, T), k, v, o);
        y = kn_cat(part, 2, 2);
    }
    return kn_scope_result(s, y);
}

kn_tensor *kn_scaled_dot_product_attention_(kn_tensor *q, kn_tensor *k, kn_tensor *v,
                                            kn_scaled_dot_product_attention_options o)
{
    kn_tensor *in[4] = { q, k, v, o.mask }, *out[2];
    if (!kn_ok() || (o.mask && !kn_check(o.mask, "attention")))
        return NULL;
    if (!isfinite(o.scale))
        return kn_fail_null("attention: .scale is %g; it should be finite", o.scale);
    for (int i = 0; i < 3; i++) {
        if (!kn_check(in[i], "attention"))
            return NULL;
        if (in[i]->ndim == 4 && in[i]->shape[3] > 1 && in[i]->stride[3] != 1)
            in[i] = kn_contiguous(in[i]);
    }
    const bool apart = o.causal && q->ndim == 4 && k->ndim == 4 && v->ndim == 4 &&
                       k->shape[2] == v->shape[2] && q->shape[2] != k->shape[2];
    if (apart && o.align == KN_CAUSAL_FIRST)
        return from_the_first(q, k, v, o);
    double depth = q->ndim == 4 && q->shape[3] ? (double)q->shape[3] : 1;
    attention_attr a = { kn_value_or(o.scale, 1 / sqrt(depth)), o.dropout, kn_draw_seed(),
                         o.dropout > 0 ? kn_draw_stream() : 0,  o.causal,  o.window,
                         o.align != KN_CAUSAL_ALIGN_DEFAULT };
    if (o.causal && k->ndim == 4 && o.window >= k->shape[2])
        a.window = 0; /* it holds all keys */
    return kn_apply(&kn_op_attention, 4, in, 8, &a, 2, out) ? out[0] : NULL;
}

/* ---- rope: rotates pairs; the backward rotates back ------------------------------------------ */

typedef struct rope_attr {
    double base;
    int64_t start;
    kn_rope_scaling scaling;
} rope_attr;

static bool rope_shape(kn_op_call *c)
{
    const kn_tensor *x = c->in[0];
    if (x->ndim != 4 || x->shape[3] % 2 || !kn_dtype_is_float(x->dtype))
        return kn_fail("rope: needs a float x[B,H,T,D] with even D, got %s", KN_SHOWN(x));
    c->spec[0] = kn_spec_like(x);
    c->spec[0].order = positions_first;
    return true;
}

static bool turn(kn_tensor *y, kn_tensor *x, const void *attr, bool inverse)
{
    const rope_attr *a = attr;
    return KN_RUN(
        y, KN_K_ROPE,
        ((kn_rope_args){ kn_array_of(y), kn_array_of(x), a->base, a->start, inverse, a->scaling }));
}

static bool rope_backward(kn_op_grad *g)
{
    kn_tensor *place = rows_place(g, 0);
    g->din[0] = place ? place : kn_empty_like(g->dout[0]);
    return g->din[0] && turn(g->din[0], g->dout[0], g->attr, true);
}

KN_OP(kn_op_rope, .name = "rope", .attr_size = sizeof(rope_attr), .shape = rope_shape, .map = turn,
      .forward = kn_map_forward, .backward = rope_backward, .on_tape = kn_linear_on_tape);

static bool zero(kn_rope_scaling s)
{
    return s.factor == 0 && s.low_freq_factor == 0 && s.high_freq_factor == 0 &&
           s.original_ctx == 0;
}

bool kn_rope_check(const char *who, bool rope, double base, kn_rope_scaling *s)
{
    kn_rope_scaling d = { s->factor, s->low_freq_factor != 0 ? s->low_freq_factor : 1,
                          s->high_freq_factor != 0 ? s->high_freq_factor : 4,
                          s->original_ctx ? s->original_ctx : 8192 };
    if (!rope)
        return (base == 0 && zero(*s)) || kn_fail("%s has %s without .rope, which does nothing",
                                                  who, base != 0 ? ".rope_base" : ".rope_scaling");
    if (!(base >= 0 && base < INFINITY))
        return kn_fail("%s: the base of rope is %g, should be above 0 (0: 10000)", who, base);
    if (s->factor == 0)
        return zero(*s) ||
               kn_fail("%s: the scaling of rope has no .factor, without which its other "
                       "numbers do nothing",
                       who);
    *s = d;
    return (d.factor >= 1 && isfinite(d.factor) && d.low_freq_factor > 0 &&
            d.high_freq_factor > d.low_freq_factor && isfinite(d.high_freq_factor) &&
            d.original_ctx > 0) ||
           kn_fail("%s: the scaling of rope has .factor %g, .low_freq_factor %g, "
                   ".high_freq_factor %g, .original_ctx %lld; the factor must be at least 1, the "
                   "others above 0, the high factor above the low one",
                   who, d.factor, d.low_freq_factor, d.high_freq_factor, (long long)d.original_ctx);
}

kn_tensor *kn_rope_(kn_tensor *x, double base, int64_t start, kn_rope_options o)
{
    if (!kn_ok() || !kn_rope_check("rope", true, base, &o.scaling))
        return NULL;
    rope_attr a = { base != 0 ? base : 10000, start, o.scaling };
    return kn_apply1(&kn_op_rope, 1, &x, 0, &a);
}
