/* tests/kernels/overlay_rows_test.c: the fast providers against the reference (overlay.h): matrix
 * products, softmax, cross-entropy, attention, rope. */
#include "kernels/cpu/cpu_internal.h"
#include "tests/kernels/overlay.h"

/* ---- matmul -------------------------------------------------------------------------------- */

/* Most cases are small and odd, some as large as a small model's layer. */
static void matmul_sizes(overlay_case *c, int number, int64_t *m, int64_t *n, int64_t *k)
{
    int64_t max = number % 12 == 5 ? 257 : 100;
    *m = case_size(c, max);
    *n = case_size(c, max);
    *k = number % 15 == 8 ? 1000 : case_size(c, max);
}

OVERLAY(overlay_rows, matmul, MATMUL, 0, overlay_cases(260))
{
    int64_t m, n, k;
    matmul_sizes(c, i, &m, &n, &k);
    int batch = (int)case_pick(c, 3); /* leading dims */
    int64_t as[4] = { 2, 3 }, bs[4] = { 2, 3 }, ds[4] = { 2, 3 };
    if (batch == 1)
        as[0] = bs[0] = ds[0] = 3;
    as[batch] = ds[batch] = m;
    as[batch + 1] = bs[batch] = k;
    bs[batch + 1] = ds[batch + 1] = n;
    kn_dtype t = case_float(c);
    kn_dtype to = (t == KN_BF16 || t == KN_F16) && case_pick(c, 2) ? KN_F32 : t;
    layout lb = batch && case_pick(c, 4) == 0 ? ONE_ROW : case_layout(c, OUTPUT_LAYOUTS);
    kn_array a = case_array(c, t, case_layout(c, OUTPUT_LAYOUTS), NORMAL, batch + 2, as);
    kn_array b = case_array(c, t, lb, NORMAL, batch + 2, bs);
    const bool add = case_pick(c, 4) == 0;
    kn_array dst =
        case_array(c, to, case_layout(c, OUTPUT_LAYOUTS), add ? NORMAL : UNSET, batch + 2, ds);
    kn_matmul_args args = { .dst = dst, .a = a, .b = b, .add = add };
    case_note(c, " add %d", add);
    if (case_pick(c, 2))
        args.bias = case_vector(c, case_pick(c, 2) ? t : KN_F32, NORMAL, n);
    case_close(c, &args.dst, 4e-7 * (double)(k + 1) * 4);
    case_run(c, &args);
}

/* ---- softmax ------------------------------------------------------------------------------- */

OVERLAY(overlay_rows, softmax, SOFTMAX, 0, overlay_cases(240))
{
    case_row_shape(c, i);
    kn_dtype t = case_float(c);
    layout l = case_layout(c, LAYOUTS);
    kn_array x = case_array(c, t, l, NORMAL, c->ndim, c->shape);
    for (int64_t j = 0; i % 9 == 0 && l == DENSE && j < kn_array_numel(&x); j += 5)
        case_set(&x, j, j % 2 && c->shape[c->ndim - 1] > 10 ? -INFINITY : 80);
    kn_array y = case_result(c, &x, t);
    case_close(c, &y, i % 2 ? 1e-5 : 1e-7);
    case_note(c, "%s", i % 2 ? " log" : "");
    kn_softmax_args args = { y, x, i % 2 };
    case_run(c, &args);
}

OVERLAY(overlay_rows, softmax_grad, SOFTMAX_GRAD, 0, overlay_cases(240))
{
    case_row_shape(c, i);
    kn_dtype t = case_float(c);
    kn_array x = case_array(c, t, DENSE, NORMAL, c->ndim, c->shape);
    kn_array y = case_output(c, t, UNSET);
    kn_softmax_args forward = { y, x, i % 2 };
    case_prepare(KN_K_SOFTMAX, &forward);
    kn_array dy = case_input(c, t, NORMAL), dx = case_result(c, &dy, t);
    case_close(c, &dx, i % 2 ? 2e-5 : 1e-6);
    case_note(c, "%s", i % 2 ? " log" : "");
    kn_softmax_grad_args args = { dx, dy, y, i % 2 };
    case_run(c, &args);
}

/* ---- cross-entropy ------------------------------------------------------------------------- */

static kn_cross_entropy_args cross_entropy_case(overlay_case *c, int i)
{
    int64_t N = case_size(c, 100), V = 1 + case_size(c, 1000), one = 1;
    if (i % 30 == 4)
        N = 130, V = 1000;
    kn_dtype t = case_float(c), f = t == KN_F64 ? KN_F64 : KN_F32;
    int64_t shape[2] = { N, V };
    kn_cross_entropy_args a = { .ignore_index = -1, .smoothing = i % 3 == 0 ? 0.1 : 0 };
    a.logits = case_array(c, t, case_layout(c, OUTPUT_LAYOUTS), NORMAL, 2, shape);
    a.targets = case_vector(c, i % 2 ? KN_I64 : KN_I32, NORMAL, N);
    for (int64_t n = 0; n < N; n++)
        case_set(&a.targets, n, i % 7 == 6 || case_pick(c, 5) == 0 ? -1 : (double)case_pick(c, V));
    a.loss = case_vector(c, f, UNSET, one);
    a.count = case_vector(c, f, UNSET, one);
    a.lse = case_vector(c, f, UNSET, N);
    case_note(c, " smoothing %g", a.smoothing);
    return a;
}

/* Rows of a larger loss, whose gradient is made beside it: in place, or elsewhere. */
OVERLAY(overlay_rows, cross_entropy_of_a_part, CROSS_ENTROPY, 0, overlay_cases(160))
{
    kn_cross_entropy_args args = cross_entropy_case(c, i);
    args.part = true;
    if (i % 4)
        args.dlogits = i % 4 == 1 ? args.logits
                                  : case_array(c, args.logits.dtype, case_layout(c, OUTPUT_LAYOUTS),
                                               UNSET, 2, args.logits.shape);
    case_close(c, &args.loss, 1e-5);
    case_close(c, &args.count, 0);
    case_close(c, &args.lse, 1e-6);
    if (args.dlogits.data)
        case_close(c, &args.dlogits, 1e-6);
    case_run(c, &args);
}

OVERLAY(overlay_rows, cross_entropy, CROSS_ENTROPY, 0, overlay_cases(160))
{
    kn_cross_entropy_args args = cross_entropy_case(c, i);
    case_close(c, &args.loss, 1e-5);
    case_close(c, &args.count, 0);
    case_close(c, &args.lse, 1e-6);
    case_run(c, &args);
}

OVERLAY(overlay_rows, cross_entropy_grad, CROSS_ENTROPY_GRAD, 0, overlay_cases(160))
{
    kn_cross_entropy_args f = cross_entropy_case(c, i);
    case_prepare(KN_K_CROSS_ENTROPY, &f);
    kn_array dloss = case_vector(c, f.loss.dtype, NORMAL, 1);
    kn_array dx = i % 4 == 0 ? f.logits
                             : case_array(c, f.logits.dtype, case_layout(c, OUTPUT_LAYOUTS), UNSET,
                                          2, f.logits.shape);
    case_close(c, &dx, 1e-6);
    kn_cross_entropy_grad_args args = { dx,      f.logits, f.targets,      f.lse,
                                        f.count, dloss,    f.ignore_index, f.smoothing };
    case_run(c, &args);
}

KN_TEST(overlay_rows, bad_target)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = overlay_all_layers(providers);
    for (int i = 0; i < n; i++) {
        float x[15] = { 0 }, out[5];
        int64_t target[3] = { 1, -100, 5 };
        kn_array scalar = kn_array_make(out, KN_F32, 0, NULL), count = scalar;
        count.data = out + 1;
        kn_cross_entropy_args args = {
            .loss = scalar,
            .count = count,
            .lse = kn_array_make(out + 2, KN_F32, 1, (int64_t[]){ 3 }),
            .logits = kn_array_make(x, KN_F32, 2, (int64_t[]){ 3, 5 }),
            .targets = kn_array_make(target, KN_I64, 1, (int64_t[]){ 3 }),
            .ignore_index = -100,
            .first_row = 40,
        };
        kn_kernel_fn run = providers[i]->run[KN_K_CROSS_ENTROPY];
        kn_status s = run ? run(&args) : KN_DECLINED;
        KN_CHECK(s != KN_DONE, "%s took target 5 of 5 classes", providers[i]->name);
        if (s == KN_FAILED)
            KN_CHECK_ERROR("target 5 in row 42");
    }
}

/* ---- attention ----------------------------------------------------------------------------- */

/* A window, a mask of any layout, both or none. */
static void attention_hides(overlay_case *c, kn_attention_args *a, kn_dtype t)
{
    int64_t shape[4] = { a->q.shape[0], a->q.shape[1], a->q.shape[2], a->k.shape[2] };
    int64_t how = case_pick(c, 4), n = shape[0] * shape[1] * shape[2] * shape[3];
    if (a->causal && case_pick(c, 2))
        a->window = 1 + case_pick(c, 70);
    case_note(c, " window %lld", (long long)a->window);
    if (how < 2)
        return;
    a->mask = case_array(c, how == 2 ? KN_BOOL : t, case_layout(c, LAYOUTS), NORMAL, 4, shape);
    for (int64_t k = 0; how == 3 && k < n / 7; k++) {
        int64_t at = 0;
        for (int d = 0; d < 4; d++)
            at += case_pick(c, shape[d]) * a->mask.stride[d];
        case_set(&a->mask, at, -INFINITY);
    }
}

static kn_attention_args attention_case(overlay_case *c, int i)
{
    static const int64_t heads[][2] = { { 1, 1 }, { 4, 2 }, { 3, 1 }, { 2, 2 } };
    static const int64_t dims[] = { 8, 16, 32, 64, 7, 1, 33 };
    int64_t B = 1 + case_pick(c, 2), H = heads[i % 4][0], G = heads[i % 4][1];
    int64_t T = case_size(c, 64), S = case_pick(c, 2) ? T : case_size(c, 100);
    int64_t D = dims[case_pick(c, 7)];
    kn_dtype t = case_float(c);
    kn_attention_args a = { .scale = 1 / sqrt((double)D), .causal = i % 2, .seed = 5, .stream = 6 };
    a.dropout_p = i % 5 == 0 ? 0.2 : 0;
    /* (B, T, H, D) in memory as the models have it, or (B, H, T, D) */
    bool interleaved = case_pick(c, 2);
    int64_t qs[4] = { B, H, T, D }, ks[4] = { B, G, S, D }, ls[3] = { B, H, T };
    kn_array *part[] = { &a.q, &a.k, &a.v, &a.o };
    for (int p = 0; p < 4; p++) {
        int64_t *s = p == 0 || p == 3 ? qs : ks;
        *part[p] = case_array(c, t, DENSE, p == 3 ? UNSET : NORMAL, 4, s);
        if (interleaved) {
            part[p]->stride[1] = s[3];
            part[p]->stride[2] = s[3] * s[1];
        }
    }
    a.lse = case_array(c, t == KN_F64 ? KN_F64 : KN_F32, DENSE, UNSET, 3, ls);
    case_note(c, "%s%s dropout %g", interleaved ? " interleaved" : "", a.causal ? " causal" : "",
              a.dropout_p);
    attention_hides(c, &a, t);
    return a;
}

/* ---- what pairs of bf16 round -------------------------------------------------------------- */

typedef struct slack {
    double o, dq, dk, dv;
} slack;

static double get4(const kn_array *x, int64_t b, int64_t h, int64_t t, int64_t d)
{
    return case_get(x, b * x->stride[0] + h * x->stride[1] + t * x->stride[2] + d * x->stride[3]);
}

/* e^z of query t and key s; 0 of a hidden one. */
static double weight_of(const kn_attention_args *f, int64_t b, int64_t h, int64_t t, int64_t s)
{
    const int64_t last = t + f->k.shape[2] - f->q.shape[2], g = h / (f->q.shape[1] / f->k.shape[1]);
    const double mask = f->mask.data ? get4(&f->mask, b, h, t, s) : 0;
    double z = 0;
    if ((f->causal && s > last) || (f->window && s <= last - f->window) ||
        (f->mask.data && f->mask.dtype == KN_BOOL && mask == 0))
        return 0;
    for (int64_t d = 0; d < f->q.shape[3]; d++)
        z += get4(&f->q, b, h, t, d) * get4(&f->k, b, g, s, d);
    return exp(f->scale * z + (f->mask.dtype == KN_BOOL ? 0 : mask));
}

/* Adds the absolute terms of query t to dk and dv, [S, D], and notes the largest sums of o and dq.
 * The dz of a key with more than half of the weight is as large as those of the others together. */
static void add_terms(const kn_attention_args *f, const kn_array *dout, int64_t b, int64_t h,
                      int64_t t, double *dk, double *dv, slack *most)
{
    enum { KEYS = 128 };
    const int64_t S = f->k.shape[2], D = f->q.shape[3], g = h / (f->q.shape[1] / f->k.shape[1]);
    const double kept = 1 / (1 - f->dropout_p);
    double p[KEYS], dz[KEYS] = { 0 }, sum = 0, delta = 0, all = 0;
    KN_CHECK(S <= KEYS);
    for (int64_t s = 0; s < S; s++)
        sum += p[s] = weight_of(f, b, h, t, s);
    for (int64_t d = 0; dout && d < D; d++)
        delta += get4(dout, b, h, t, d) * get4(&f->o, b, h, t, d);
    for (int64_t s = 0; s < S; s++) {
        double dp = 0;
        p[s] = sum > 0 ? p[s] / sum : 0;
        for (int64_t d = 0; dout && d < D; d++)
            dp += get4(dout, b, h, t, d) * get4(&f->v, b, g, s, d);
        dz[s] = p[s] * fmax(fabs(kept * dp - delta), f->dropout_p > 0 ? fabs(delta) : 0);
        all += dz[s];
    }
    for (int64_t d = 0; d < D; d++) {
        double o = 0, dq = 0;
        for (int64_t s = 0; s < S; s++) {
            const double own = p[s] > 0.5 ? fmax(dz[s], all - dz[s]) : dz[s];
            o += kept * p[s] * fabs(get4(&f->v, b, g, s, d));
            dq += f->scale * own * fabs(get4(&f->k, b, g, s, d));
            dk[s * D + d] += f->scale * own * fabs(get4(&f->q, b, h, t, d));
            dv[s * D + d] += dout ? kept * p[s] * fabs(get4(dout, b, h, t, d)) : 0;
        }
        most->o = fmax(most->o, o), most->dq = fmax(most->dq, dq);
    }
}

/* What results may differ by where a CPU multiplies pairs of bf16: weights and dz are rounded, each
 * by at most 2^-8 of itself, so a sum moves by at most 2^-8 of that of its absolute terms. dout:
 * NULL in forward. */
static slack slack_of_pairs(const kn_attention_args *f, const kn_array *dout)
{
    slack most = { 0 };
#ifndef KN_TEST_DEVICE
    const int64_t S = f->k.shape[2], D = f->q.shape[3], heads = f->q.shape[1] / f->k.shape[1];
    if (f->q.dtype != KN_BF16 || !kn_cpu_multiplies_pairs() || S * D == 0)
        return most;
    double *dk = calloc((size_t)(2 * S * D), sizeof *dk);
    KN_CHECK(dk != NULL);
    for (int64_t i = 0; i < f->q.shape[0] * f->q.shape[1]; i++) {
        if (i % heads == 0)
            memset(dk, 0, (size_t)(2 * S * D) * sizeof *dk);
        for (int64_t t = 0; t < f->q.shape[2]; t++)
            add_terms(f, dout, i / f->q.shape[1], i % f->q.shape[1], t, dk, dk + S * D, &most);
        for (int64_t j = 0; j < S * D; j++) {
            most.dk = fmax(most.dk, dk[j]);
            most.dv = fmax(most.dv, dk[S * D + j]);
        }
    }
    free(dk);
    most = (slack){ most.o * 0x1p-8, most.dq * 0x1p-8, most.dk * 0x1p-8, most.dv * 0x1p-8 };
#else
    (void)add_terms, (void)f, (void)dout;
#endif
    return most;
}

OVERLAY(overlay_rows, attention, ATTENTION, 0, overlay_cases(160))
{
    kn_attention_args args = attention_case(c, i);
    case_close(c, &args.o, 1e-5 + slack_of_pairs(&args, NULL).o);
    case_close(c, &args.lse, 1e-5);
    case_run(c, &args);
}

OVERLAY(overlay_rows, attention_grad, ATTENTION_GRAD, 0, overlay_cases(160))
{
    kn_attention_args f = attention_case(c, i);
    case_prepare(KN_K_ATTENTION, &f);
    kn_attention_grad_args a = case_attention_grad(&f);
    kn_array *part[] = { &a.dq, &a.dk, &a.dv, &a.dout };
    const kn_array *like[] = { &f.q, &f.k, &f.v, &f.o };
    for (int p = 0; p < 4; p++) {
        *part[p] = case_array(c, f.q.dtype, DENSE, p == 3 ? NORMAL : UNSET, 4, like[p]->shape);
        memcpy(part[p]->stride, like[p]->stride, sizeof like[p]->stride);
    }
    /* o as stored carries its rounding into delta = dout . o: in bf16 by 2^-9 of it */
    double scale = f.q.dtype == KN_BF16 ? 1e-3 : 5e-5;
    double rows = (double)(f.q.shape[1] * f.q.shape[2]); /* that dk and dv add at most */
    const slack more = slack_of_pairs(&f, &a.dout);
    case_close(c, &a.dq, scale + more.dq);
    case_close(c, &a.dk, scale + 1e-6 * rows + more.dk);
    case_close(c, &a.dv, scale + 1e-6 * rows + more.dv);
    case_dmask(c, &a, scale);
    case_run(c, &a);
}

/* `heads` heads from `first` on of x [B, T, heads x D]. */
static kn_array heads_of(const kn_array *x, int64_t first, int64_t heads, int64_t D)
{
    const int64_t shape[4] = { x->shape[0], heads, x->shape[1], D };
    const int64_t bytes = first * D * (int64_t)kn_dtype_size(x->dtype);
    kn_array a = kn_array_make((char *)x->data + bytes, x->dtype, 4, shape);
    a.stride[0] = x->stride[0], a.stride[1] = D, a.stride[2] = x->stride[1];
    return a;
}

/* Queries, keys and values side by side in one array, their gradients in another: what lies between
 * and behind them stays as it was. */
OVERLAY(overlay_rows, attention_grad_into_parts, ATTENTION_GRAD, 9000, 16)
{
    static const struct {
        int64_t B, H, G, T, D;
    } sizes[] = {
        { 2, 3, 1, 37, 20 }, { 1, 4, 2, 65, 33 }, { 2, 2, 2, 16, 64 }, { 1, 2, 1, 1, 7 }
    };
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    const int64_t H = sizes[i % 4].H, G = sizes[i % 4].G, D = sizes[i % 4].D;
    const int64_t T = sizes[i % 4].T, B = sizes[i % 4].B, gap = i / 4 % 2;
    const int64_t all[3] = { B, T, (H + 2 * G + gap) * D }, qs[4] = { B, H, T, D };
    const kn_dtype t = types[(i + i / 4) % 4];
    kn_array x = case_array(c, t, DENSE, NORMAL, 3, all);
    kn_array dx = case_array(c, t, i % 3 ? DENSE : PITCHED, NORMAL, 3, all);
    kn_attention_args f = { .o = case_array(c, t, DENSE, UNSET, 4, qs),
                            .lse = case_array(c, t == KN_F64 ? t : KN_F32, DENSE, UNSET, 3, qs),
                            .q = heads_of(&x, 0, H, D),
                            .k = heads_of(&x, H, G, D),
                            .v = heads_of(&x, H + G, G, D),
                            .scale = 0.2,
                            .causal = i % 2 };
    case_prepare(KN_K_ATTENTION, &f);
    kn_attention_grad_args a = case_attention_grad(&f);
    a.dout = case_array(c, t, DENSE, NORMAL, 4, qs);
    a.dq = heads_of(&dx, 0, H, D);
    a.dk = heads_of(&dx, H, G, D);
    a.dv = heads_of(&dx, H + G, G, D);
    const double scale = t == KN_BF16 ? 4e-3 : t == KN_F16 ? 5e-4 : 1e-4;
    const slack more = slack_of_pairs(&f, &a.dout);
    case_close(c, &a.dq, scale + more.dq);
    case_close(c, &a.dk, 2 * scale + more.dk);
    case_close(c, &a.dv, scale + more.dv);
    case_run(c, &a);
}

/* Gradients by the scores where one key has nearly all of a row's weight: small ones to their
 * digits, and none at all where it is the only key. */
KN_TEST(overlay_rows, attention_grad_of_one_key)
{
    enum { T = 70, D = 40 };
    for (int only = 0; only < 2; only++) {
        overlay_case *c = case_begin(KN_K_ATTENTION_GRAD, (uint64_t)only);
        const int64_t S = only ? T : 2, qs[4] = { 1, 2, T, D }, ks[4] = { 1, 1, S, D };
        kn_attention_args f = { .o = case_array(c, KN_F32, DENSE, UNSET, 4, qs),
                                .lse = case_array(c, KN_F32, DENSE, UNSET, 3, qs),
                                .q = case_array(c, KN_F32, DENSE, NORMAL, 4, qs),
                                .k = case_array(c, KN_F32, DENSE, NORMAL, 4, ks),
                                .v = case_array(c, KN_F32, DENSE, NORMAL, 4, ks),
                                .scale = 1,
                                .causal = only,
                                .window = only };
        float *q = f.q.data, *k = f.k.data;
        for (int64_t d = 0; d < D && !only; d++) /* scores differ by 14 q_0 = 14 */
            k[D + d] = d ? k[d] : k[0] - 14;
        for (int64_t i = 0; i < 2 * T * D && !only; i++)
            q[i] = i % D ? q[i] / 16 : 1;
        case_prepare(KN_K_ATTENTION, &f);
        kn_attention_grad_args a = case_attention_grad(&f);
        a.dout = case_array(c, KN_F32, DENSE, NORMAL, 4, qs);
        a.dq = case_array(c, KN_F32, DENSE, UNSET, 4, qs);
        a.dk = case_array(c, KN_F32, DENSE, UNSET, 4, ks);
        a.dv = case_array(c, KN_F32, DENSE, UNSET, 4, ks);
        case_close(c, &a.dq, only ? 0 : 1e-8);
        case_close(c, &a.dk, only ? 0 : 1e-8 * T);
        case_close(c, &a.dv, 1e-4);
        case_run(c, &a);
    }
}

/* Rows in which a mask adds -1e9 (or less) to every score: f32's lse is the maximum alone. Weights
 * of a row add up to 1 all the same: values get gradients as large as those of the result. */
OVERLAY(overlay_rows, attention_grad_of_masked_rows, ATTENTION_GRAD, 0, 4)
{
    enum { T = 37, D = 24 };
    static const double masks[] = { 0, -300, -3e4, -1e9, -3e38, 5e6 };
    const int64_t S = i % 2 ? T : 150, qs[4] = { 2, 2, T, D }, ks[4] = { 2, 1, S, D };
    const int64_t ms[4] = { 2, 2, T, S };
    const kn_dtype t = i == 2 ? KN_F64 : KN_F32;
    kn_attention_args f = { .o = case_array(c, t, DENSE, UNSET, 4, qs),
                            .lse = case_array(c, t, DENSE, UNSET, 3, qs),
                            .q = case_array(c, t, DENSE, NORMAL, 4, qs),
                            .k = case_array(c, t, DENSE, NORMAL, 4, ks),
                            .v = case_array(c, t, DENSE, NORMAL, 4, ks),
                            .mask = case_array(c, t, DENSE, NORMAL, 4, ms),
                            .scale = 0.25,
                            .causal = i % 2 };
    for (int64_t j = 0; j < 2 * 2 * T * S; j++) /* the keys of a row are masked alike ... */
        case_set(&f.mask, j, masks[j / S % 6]);
    for (int64_t j = D; j < 2 * S * D; j++) /* ... and alike: so is f32's rounding of scores */
        case_set(&f.k, j, case_get(&f.k, j % D));
    case_prepare(KN_K_ATTENTION, &f);
    kn_attention_grad_args a = case_attention_grad(&f);
    a.dout = case_array(c, t, DENSE, NORMAL, 4, qs);
    a.dq = case_array(c, t, DENSE, UNSET, 4, qs);
    a.dk = case_array(c, t, DENSE, UNSET, 4, ks);
    a.dv = case_array(c, t, DENSE, UNSET, 4, ks);
    case_dmask(c, &a, 1e-5);
    case_close(c, &a.dq, 1e-3);
    case_close(c, &a.dk, 1e-3);
    case_close(c, &a.dv, 1e-4);
    case_prepare(KN_K_ATTENTION_GRAD, &a);
    double given = 0, got = 0;
    for (int64_t j = 0; j < 2 * 2 * T * D; j++)
        given += case_get(&a.dout, j);
    for (int64_t j = 0; j < 2 * S * D; j++)
        got += case_get(&a.dv, j);
    KN_CHECK(fabs(got - given) < 1e-3, "values got %g of %g", got, given);
    case_run(c, &a);
}

OVERLAY(overlay_rows, rope, ROPE, 0, overlay_cases(120))
{
    int64_t shape[4] = { 1 + case_pick(c, 2), 1 + case_pick(c, 3), case_size(c, 100),
                         2 * case_size(c, 33) };
    kn_dtype t = case_float(c);
    kn_array x = case_array(c, t, case_layout(c, LAYOUTS), NORMAL, 4, shape);
    kn_array y = case_result(c, &x, t);
    case_close(c, &y, 1e-5);
    kn_rope_scaling scaling = { i % 5 < 2 ? 8 : 0, 1, 4, i % 5 ? 100 : 8192 };
    kn_rope_args args = { y, x, 10000, i % 4 ? 0 : 1000, i % 2, scaling };
    case_run(c, &args);
}
