/* tests/kernels/attention_test.c: attention of the vector provider against formulas in double that
 * store the whole matrix of probabilities: causal, grouped heads, more keys than queries and fewer,
 * strides, bf16 and f16, dropout; rows with nearly all weight on one key; bits over calls and
 * threads; memory linear in T. */
#include "kernels/memory.h"
#include "kernels/trace.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/philox.h"
#include "tests/kn_test.h"

typedef struct shape {
    int64_t B, H, G, T, S, D;
    bool causal, heads_inside; /* memory order [B, T, H, D], as after a projection */
    double p;
    int64_t window;
    kn_dtype
        mask; /* 0: none; KN_BOOL; another: an added mask of the call's dtype, with a gradient */
} shape;

static uint32_t rng_state;

static float next_value(void)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return (float)(int32_t)(rng_state >> 8) * 0x1p-23f - 1.0f;
}

static double round_to(kn_dtype t, double x)
{
    const float f = (float)x;
    return t == KN_F32    ? f
           : t == KN_BF16 ? kn_bf16_to_f32(kn_f32_to_bf16(f))
                          : kn_f16_to_f32(kn_f32_to_f16(f));
}

static double get(const kn_array *x, int64_t at)
{
    if (x->dtype == KN_F32)
        return ((const float *)x->data)[at];
    const uint16_t h = ((const uint16_t *)x->data)[at];
    return x->dtype == KN_BF16 ? kn_bf16_to_f32(h) : kn_f16_to_f32(h);
}

static void set(const kn_array *x, int64_t at, float v)
{
    if (x->dtype == KN_F32)
        ((float *)x->data)[at] = v;
    else
        ((uint16_t *)x->data)[at] = x->dtype == KN_BF16 ? kn_f32_to_bf16(v) : kn_f32_to_f16(v);
}

/* [B, H, T, D] filled at random. */
static kn_array make(kn_dtype t, int64_t B, int64_t H, int64_t T, int64_t D, bool heads_inside)
{
    kn_array x = kn_array_make(NULL, t, 4, (int64_t[]){ B, H, T, D });
    if (heads_inside)
        x.stride[1] = D, x.stride[2] = H * D;
    x.data = malloc((size_t)(B * H * T * D) * kn_dtype_size(t) + 64);
    KN_CHECK(x.data != NULL, "memory");
    for (int64_t i = 0; i < B * H * T * D; i++)
        set(&x, i, next_value());
    return x;
}

static int64_t at(const kn_array *x, int64_t b, int64_t h, int64_t t, int64_t d)
{
    return b * x->stride[0] + h * x->stride[1] + t * x->stride[2] + d * x->stride[3];
}

/* [B, H, T, S], the same for all batches; the last row hides all keys. */
static kn_array make_mask(const shape *s, kn_dtype t)
{
    kn_array x = make(s->mask == KN_BOOL ? KN_F32 : t, 1, s->H, s->T, s->S, false);
    for (int64_t i = 0; i < s->H * s->T * s->S; i++) {
        const bool hides = i % 5 == 0 || i / s->S % s->T == s->T - 1;
        if (s->mask == KN_BOOL)
            ((bool *)x.data)[i] = !hides;
        else if (hides)
            set(&x, i, -INFINITY);
    }
    x.dtype = s->mask == KN_BOOL ? KN_BOOL : t;
    x.shape[0] = s->B;
    x.stride[0] = 0;
    return x;
}

typedef struct call {
    shape s;
    kn_attention_args f;
    kn_attention_grad_args g;
} call;

static call build(shape s, kn_dtype t)
{
    call c = { .s = s };
    const bool in = s.heads_inside;
    rng_state = 99;
    c.f = (kn_attention_args){ .o = make(t, s.B, s.H, s.T, s.D, in),
                               .q = make(t, s.B, s.H, s.T, s.D, in),
                               .k = make(t, s.B, s.G, s.S, s.D, in),
                               .v = make(t, s.B, s.G, s.S, s.D, false),
                               .scale = 2.0 / sqrt((double)s.D),
                               .causal = s.causal,
                               .dropout_p = s.p,
                               .seed = 7,
                               .stream = 3 };
    c.f.window = s.window;
    c.f.mask = s.mask ? make_mask(&s, t) : (kn_array){ 0 };
    float *lse = malloc((size_t)(s.B * s.H * s.T) * sizeof *lse);
    KN_CHECK(lse != NULL, "memory");
    c.f.lse = kn_array_make(lse, KN_F32, 3, (int64_t[]){ s.B, s.H, s.T });
    c.g = (kn_attention_grad_args){ .dq = make(t, s.B, s.H, s.T, s.D, in),
                                    .dk = make(t, s.B, s.G, s.S, s.D, false),
                                    .dv = make(t, s.B, s.G, s.S, s.D, in),
                                    .dout = make(t, s.B, s.H, s.T, s.D, false),
                                    .o = c.f.o,
                                    .lse = c.f.lse,
                                    .q = c.f.q,
                                    .k = c.f.k,
                                    .v = c.f.v,
                                    .scale = c.f.scale,
                                    .causal = s.causal,
                                    .dropout_p = s.p,
                                    .seed = 7,
                                    .stream = 3,
                                    .window = s.window,
                                    .mask = c.f.mask };
    if (s.mask && s.mask != KN_BOOL) {
        c.g.dmask = make(t, s.B, s.H, s.T, s.S, false);
        memset(c.g.dmask.data, 0, (size_t)kn_array_numel(&c.g.dmask) * kn_dtype_size(t));
    }
    return c;
}

static void drop(call *c)
{
    kn_array *all[] = { &c->f.o,  &c->f.lse, &c->f.q,    &c->f.k,    &c->f.v,    &c->g.dq,
                        &c->g.dk, &c->g.dv,  &c->g.dout, &c->f.mask, &c->g.dmask };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
}
#define OWNED_CASE __attribute__((cleanup(drop), unused))

static void run(const call *c)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    KN_CHECK(kn_launch(s, KN_K_ATTENTION, &c->f, sizeof c->f));
    KN_CHECK(kn_launch(s, KN_K_ATTENTION_GRAD, &c->g, sizeof c->g));
}

/* The formulas' results for head (b, h); dk and dv are added to [S, D]. */
typedef struct truth {
    double *o, *lse, *dq, *dk, *dv; /* [T, D], [T], [T, D], [S, D], [S, D] */
    double *dmask;                  /* [T, S] */
} truth;

/* The addition to a score: the mask's value, -infinity for a hidden key. */
static double added(const call *c, int64_t b, int64_t h, int64_t t, int64_t j)
{
    const kn_array *m = &c->f.mask;
    const int64_t last = t + c->s.S - c->s.T;
    if ((c->s.causal && j > last) || (c->s.window && j <= last - c->s.window))
        return -INFINITY;
    if (m->data && m->dtype == KN_BOOL)
        return ((bool *)m->data)[at(m, b, h, t, j)] ? 0 : -INFINITY;
    return m->data ? get(m, at(m, b, h, t, j)) : 0;
}

static void head_truth(const call *c, int64_t b, int64_t h, truth *w)
{
    const shape *s = &c->s;
    const kn_attention_args *f = &c->f;
    const int64_t g = h / (s->H / s->G), D = s->D;
    OWNED_BYTES double *z = malloc((size_t)s->S * sizeof *z),
                       *keep = malloc((size_t)s->S * sizeof *keep);
    KN_CHECK(z != NULL && keep != NULL, "memory");
    for (int64_t t = 0; t < s->T; t++) {
        const int64_t n = s->S;
        double max = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j < n; j++) {
            z[j] = added(c, b, h, t, j);
            for (int64_t d = 0; d < D; d++)
                z[j] += f->scale * get(&f->q, at(&f->q, b, h, t, d)) *
                        get(&f->k, at(&f->k, b, g, j, d));
            max = fmax(max, z[j]);
            const uint64_t e = (uint64_t)(((b * s->H + h) * s->T + t) * s->S + j);
            const bool kept = kn_uniform01(kn_philox_at(f->seed, f->stream, e)) >= s->p;
            keep[j] = !kept ? 0 : 1 / (1 - s->p);
        }
        for (int64_t j = 0; j < n; j++)
            sum += max > -INFINITY ? exp(z[j] - max) : 0;
        w->lse[t] = max + log(sum);
        for (int64_t d = 0; d < D; d++) {
            w->o[t * D + d] = w->dq[t * D + d] = 0;
            for (int64_t j = 0; j < n; j++)
                w->o[t * D + d] +=
                    sum > 0 ? keep[j] * exp(z[j] - w->lse[t]) * get(&f->v, at(&f->v, b, g, j, d))
                            : 0;
            delta +=
                round_to(f->o.dtype, w->o[t * D + d]) * get(&c->g.dout, at(&c->g.dout, b, h, t, d));
        }
        for (int64_t j = 0; j < n; j++) {
            const double P = sum > 0 ? exp(z[j] - w->lse[t]) : 0;
            double dp = 0;
            for (int64_t d = 0; d < D; d++) {
                const double dout = get(&c->g.dout, at(&c->g.dout, b, h, t, d));
                dp += keep[j] * dout * get(&f->v, at(&f->v, b, g, j, d));
                w->dv[j * D + d] += keep[j] * P * dout;
            }
            const double dscore = sum == 1 ? 0 : P * (dp - delta); /* 1: it sees one key */
            const double dz = f->scale * dscore;
            w->dmask[t * s->S + j] = dscore;
            for (int64_t d = 0; d < D; d++) {
                w->dq[t * D + d] += dz * get(&f->k, at(&f->k, b, g, j, d));
                w->dk[j * D + d] += dz * get(&f->q, at(&f->q, b, h, t, d));
            }
        }
    }
}

static void compare(const char *what, const kn_array *x, int64_t b, int64_t h, const double *want,
                    double room)
{
    const double unit = x->dtype == KN_F32 ? 0 : x->dtype == KN_BF16 ? 0x1p-8 : 0x1p-11;
    for (int64_t t = 0; t < x->shape[2]; t++) {
        for (int64_t d = 0; d < x->shape[3]; d++) {
            const double found = get(x, at(x, b, h, t, d)), v = want[t * x->shape[3] + d];
            KN_CHECK(fabs(found - v) <= room + (unit + room) * fabs(v),
                     "%s[%lld,%lld,%lld,%lld] of %s is %.9g, not %.9g", what, (long long)b,
                     (long long)h, (long long)t, (long long)d, kn_dtype_name(x->dtype), found, v);
        }
    }
}

static void check(shape s, kn_dtype t)
{
    OWNED_CASE call c = build(s, t);
    run(&c);
    const int64_t td = s.T * s.D, sd = s.S * s.D;
    double *room = calloc((size_t)(2 * td + 2 * sd + s.T + s.T * s.S), sizeof *room);
    KN_CHECK(room != NULL, "memory");
    truth w = { room,
                room + td,
                room + td + s.T,
                room + 2 * td + s.T,
                room + 2 * td + s.T + sd,
                room + 2 * td + s.T + 2 * sd };
    const double small = t == KN_F32 ? 3e-6 : 3e-3; /* of f32: sums of some hundred terms */
    for (int64_t b = 0; b < s.B; b++) {
        for (int64_t h = 0; h < s.H; h++) {
            if (h % (s.H / s.G) == 0)
                memset(w.dk, 0, (size_t)(2 * sd) * sizeof *w.dk);
            head_truth(&c, b, h, &w);
            compare("o", &c.f.o, b, h, w.o, small);
            compare("dq", &c.g.dq, b, h, w.dq, small);
            if (c.g.dmask.data)
                compare("dmask", &c.g.dmask, b, h, w.dmask, small);
            for (int64_t i = 0; i < s.T; i++) {
                const double found = ((float *)c.f.lse.data)[(b * s.H + h) * s.T + i];
                KN_CHECK(found == w.lse[i] || fabs(found - w.lse[i]) < 1e-5,
                         "lse[%lld,%lld,%lld] is %.9g, not %.9g", (long long)b, (long long)h,
                         (long long)i, found, w.lse[i]);
            }
            if ((h + 1) % (s.H / s.G) == 0) {
                compare("dk", &c.g.dk, b, h / (s.H / s.G), w.dk, 3 * small);
                compare("dv", &c.g.dv, b, h / (s.H / s.G), w.dv, 3 * small);
            }
        }
    }
    free(room);
}

static const shape shapes[] = {
    { 1, 1, 1, 1, 1, 1, true, false, 0 },
    { 2, 2, 2, 64, 64, 32, true, true, 0 },
    { 1, 2, 1, 37, 37, 20, true, false, 0 },
    { 1, 4, 2, 50, 131, 16, true, true, 0 },
    { 2, 3, 3, 130, 70, 24, true, true, 0 },
    { 1, 2, 2, 97, 99, 64, false, true, 0 },
    { 1, 3, 1, 100, 200, 40, false, false, 0 },
    { 1, 2, 2, 200, 200, 8, true, false, 0.3 },
    { 1, 2, 1, 13, 33, 5, false, true, 0.5 },
    { 1, 2, 1, 200, 230, 8, true, true, 0, .window = 40 },
    { 1, 1, 1, 120, 60, 16, true, false, 0.2, .window = 1 },
    { 1, 2, 1, 70, 60, 100, false, true, 0.2 },
    { 2, 2, 1, 70, 130, 8, false, true, 0, .mask = KN_BOOL },
    { 2, 2, 2, 60, 101, 16, false, false, 0.2, .mask = KN_F32 },
    { 1, 2, 1, 150, 150, 8, true, true, 0, .window = 97, .mask = KN_F32 },
    { 1, 2, 1, 270, 560, 24, true, true, 0.2, .window = 300 }, /* keys of several blocks */
    { 1, 1, 1, 130, 600, 16, false, false, 0, .mask = KN_BOOL },
    { 1, 1, 1, 540, 540, 8, true, false, 0 },
};

KN_TEST(attention, f32_is_right)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i += (size_t)kn_one_in(2))
        check(shapes[i], KN_F32);
}

KN_TEST(attention, halves_are_right)
{
    const size_t step = (size_t)kn_one_in(2); /* then the others, where f32 has every second one */
    for (size_t i = step - 1; i < sizeof shapes / sizeof *shapes; i += step)
        check(shapes[i], i / 2 % 2 ? KN_BF16 : KN_F16);
}

KN_TEST(attention, vector_layer_takes_them)
{
    OWNED_CASE call c = build(shapes[3], KN_BF16);
    kn_trace_start(8);
    run(&c);
    kn_trace_event *events = NULL;
    const size_t n = kn_trace_stop(&events);
    KN_CHECK(n == 2, "%zu events", n);
    for (size_t i = 0; i < n; i++)
        KN_CHECK(strcmp(events[i].provider, kn_cpu_isa()) == 0, "%s ran in %s", events[i].what,
                 events[i].provider);
    kn_host_free(events);
}

KN_TEST(attention, bits_repeat)
{
    const int before = kn_threads();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        OWNED_CASE call c = build(shapes[i], KN_F32);
        kn_array *outs[] = { &c.f.o, &c.f.lse, &c.g.dq, &c.g.dk, &c.g.dv };
        void *first[5] = { 0 };
        for (int threads = 1; threads <= 4; threads++) {
            kn_set_threads(threads);
            run(&c);
            for (int k = 0; k < 5; k++) {
                const size_t bytes = (size_t)kn_array_numel(outs[k]) * sizeof(float);
                if (!first[k]) {
                    first[k] = malloc(bytes);
                    KN_CHECK(first[k] != NULL, "memory");
                    memcpy(first[k], outs[k]->data, bytes);
                }
                KN_CHECK(memcmp(first[k], outs[k]->data, bytes) == 0,
                         "shape %zu, output %d differs with %d threads", i, k, threads);
            }
        }
        for (int k = 0; k < 5; k++)
            free(first[k]);
    }
    kn_set_threads(before);
}

/* Two keys: with P and 1 - P of their weights, dz = P (1 - P) dout . (v_0 - v_1) of key 0, and
 * minus that of key 1, however near P is to 1. */
static void two_keys_truth(const call *c, int64_t t, double *dz, double *room)
{
    const kn_attention_args *f = &c->f;
    double gap = 0, more = 0;
    *room = 0;
    for (int64_t d = 0; d < c->s.D; d++) {
        const double k[2] = { get(&f->k, d), get(&f->k, c->s.D + d) };
        const double v[2] = { get(&f->v, d), get(&f->v, c->s.D + d) };
        const double dout = get(&c->g.dout, t * c->s.D + d);
        gap += f->scale * get(&f->q, t * c->s.D + d) * (k[0] - k[1]);
        more += dout * (v[0] - v[1]);
        *room += fabs(dout) * (fabs(v[0]) + fabs(v[1]));
    }
    const double both = 1 / (1 + exp(gap)) / (1 + exp(-gap));
    *dz = both * more;
    *room *= both;
}

static void check_two_keys(kn_dtype t)
{
    OWNED_CASE call c = build((shape){ 1, 1, 1, 200, 2, 24, false, false, 0 }, t);
    const int64_t T = c.s.T, D = c.s.D;
    for (int64_t i = 0; i < T * D; i++)
        set(&c.f.q, i, 12 * (float)get(&c.f.q, i));
    run(&c);
    const double part = t == KN_F32 ? 2e-5 : 0x1p-6; /* z is of up to 20; o's roundings */
    const double least = t == KN_F16 ? 0x1p-25 : 0;  /* half of the smallest f16 */
    int close = 0;
    for (int64_t r = 0; r < T; r++) {
        double dz, room;
        two_keys_truth(&c, r, &dz, &room);
        for (int64_t d = 0; d < D; d++) {
            const double k = get(&c.f.k, d) - get(&c.f.k, D + d);
            const double found = get(&c.g.dq, r * D + d), want = c.f.scale * dz * k;
            KN_CHECK(fabs(found - want) <= part * c.f.scale * room * fabs(k) + least,
                     "dq[%lld,%lld] of %s is %.9g, not %.9g", (long long)r, (long long)d,
                     kn_dtype_name(t), found, want);
        }
        close += room < 1e-4;
    }
    KN_CHECK(close > 20, "%d rows with nearly all weight on one key", close);
}

KN_TEST(attention, gradients_of_one_key_among_two_are_right)
{
    check_two_keys(KN_F32);
    check_two_keys(KN_BF16);
    check_two_keys(KN_F16);
}

/* NaN isn't taken for hidden scores: few queries, and many, that see all, some, or a window. */
KN_TEST(attention, a_query_of_nan_gives_nan)
{
    static const shape seen[] = {
        { 1, 1, 1, 1, 40, 16, false, false, 0 },
        { 1, 1, 1, 1, 40, 16, true, false, 0, .window = 9 },
        { 1, 1, 1, 66, 66, 16, true, false, 0 },
        { 1, 1, 1, 66, 66, 16, true, false, 0, .window = 9 },
        { 1, 1, 1, 66, 66, 16, false, false, 0, .mask = KN_F32 },
    };
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++) {
        OWNED_CASE call c = build(seen[i], KN_F32);
        for (int64_t d = 0; d < 16; d++)
            set(&c.f.q, d, NAN);
        run(&c);
        KN_CHECK(isnan(get(&c.f.o, 0)), "shape %zu: o is %g", i, get(&c.f.o, 0));
    }
}

static void check_scores_have_no_gradient(const call *c, const char *what)
{
    run(c);
    const kn_array *x[] = { &c->g.dq, &c->g.dk };
    for (int i = 0; i < 2; i++)
        for (int64_t e = 0; e < kn_array_numel(x[i]); e++)
            KN_CHECK(get(x[i], e) == 0, "%s: element %lld of %s is %.9g, not 0", what, (long long)e,
                     i ? "dk" : "dq", get(x[i], e));
}

/* Where a query sees one key, or two keys of one value, no score matters: exactly, not to
 * rounding. */
KN_TEST(attention, scores_that_do_not_matter_have_no_gradient)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
    for (int i = 0; i < 3; i++) {
        call one = build((shape){ 1, 2, 1, 60, 60, 24, true, false, 0, .window = 1 }, types[i]);
        check_scores_have_no_gradient(&one, "one key");
        drop(&one);
        OWNED_CASE call same = build((shape){ 1, 1, 1, 50, 2, 24, false, false, 0 }, types[i]);
        for (int64_t e = 0; e < 2 * 24; e++) {
            set(&same.f.k, e, (float)get(&same.f.k, e % 24));
            set(&same.f.v, e, (float)get(&same.f.v, e % 24));
        }
        check_scores_have_no_gradient(&same, "keys of one value");
    }
}

/* A key of -inf has no weight beside queries above 0, hence gradients of 0; of an odd number of
 * queries, too, where the last one's partner in a pair, a row of zeros, would make them NaN. */
KN_TEST(attention, an_infinite_key_that_nobody_attends_to_has_no_gradient)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
    enum { D = 16, KEY = 3 };
    for (int i = 0; i < 3; i++) {
        OWNED_CASE call c = build((shape){ 1, 1, 1, 17, 8, D, false, false, 0 }, types[i]);
        for (int64_t e = 0; e < kn_array_numel(&c.f.q); e++)
            set(&c.f.q, e, (float)fabs(get(&c.f.q, e)) + 0.5f);
        for (int64_t d = 0; d < D; d++)
            set(&c.f.k, KEY * D + d, -INFINITY);
        run(&c);
        for (int64_t e = 0; e < kn_array_numel(&c.f.k); e++) {
            const double dk = get(&c.g.dk, e), dv = get(&c.g.dv, e);
            KN_CHECK(e / D == KEY ? dk == 0 && dv == 0 : isfinite(dk) && isfinite(dv),
                     "%s: element %lld of dk is %g, of dv %g", kn_dtype_name(types[i]),
                     (long long)e, dk, dv);
        }
    }
}

/* What a call leaves in the workspace reaches no later one: here NaN where the last query's partner
 * lies, at keys before the window. */
KN_TEST(attention, a_call_after_one_of_nan_is_right)
{
    shape s = { 1, 1, 1, 37, 37, 16, true, false, 0 };
    OWNED_CASE call c = build(s, KN_BF16);
    const kn_array *x[] = { &c.f.q, &c.f.k, &c.f.v, &c.g.dout };
    for (int i = 0; i < 4; i++)
        for (int64_t e = 0; e < kn_array_numel(x[i]); e++)
            set(x[i], e, NAN);
    run(&c);
    s.window = 5;
    check(s, KN_BF16);
}

static int64_t workspace_of(int64_t T)
{
    call c = build((shape){ 1, 2, 2, T, T, 16, true, true, 0, 100, KN_BOOL }, KN_F32);
    kn_ledger_reset_peaks();
    run(&c);
    drop(&c);
    return kn_ledger_read().peak[KN_MEM_WORKSPACE];
}

KN_TEST(attention, memory_is_linear)
{
    kn_set_threads(2);
    const int64_t one = workspace_of(480), four = workspace_of(1920);
    KN_CHECK(four <= 4 * one, "%lld bytes at 1920, %lld at 480", (long long)four, (long long)one);
    KN_CHECK(kn_ledger_read().live[KN_MEM_WORKSPACE] == 0, "workspace is kept");
}
