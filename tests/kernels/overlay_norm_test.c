/* tests/kernels/overlay_norm_test.c: layer_norm and rms_norm of the fast providers against the
 * reference (overlay.h), and of a sum against two steps of the same provider. */
#include "tests/kernels/overlay.h"

/* As case_output; now and then rows that lie apart, the leading dims exchanged in memory. */
static kn_array rows_output(overlay_case *c, kn_dtype t, values v)
{
    if (c->ndim != 3 || case_pick(c, 3) > 0)
        return case_output(c, t, v);
    kn_array x = case_array(c, t, case_pick(c, 2) ? DENSE : PITCHED, v, 3,
                            (int64_t[]){ c->shape[1], c->shape[0], c->shape[2] });
    const int64_t stride = x.stride[0];
    x.stride[0] = x.stride[1], x.stride[1] = stride;
    x.shape[0] = c->shape[0], x.shape[1] = c->shape[1];
    return x;
}

/* Arguments of a forward over x [.., C], or of x + add; weight and bias now and then absent or
 * f32. */
static kn_norm_args norm_case(overlay_case *c, int i, bool added)
{
    case_row_shape(c, i);
    int64_t C = c->shape[c->ndim - 1], rows = 1;
    for (int d = 0; d < c->ndim - 1; d++)
        rows *= c->shape[d];
    kn_dtype t = case_float(c), stat = t == KN_F64 ? KN_F64 : KN_F32;
    kn_dtype wt = case_pick(c, 2) && t != KN_F64 ? KN_F32 : t;
    kn_norm_args a = { .eps = 1e-5, .rms = i % 2 };
    a.x = rows_output(c, t, NORMAL);
    a.y = rows_output(c, t, UNSET);
    if (case_pick(c, 4))
        a.w = case_vector(c, wt, NORMAL, C);
    if (case_pick(c, 4) && !a.rms)
        a.b = case_vector(c, wt, NORMAL, C);
    if (!a.rms)
        a.mean = case_vector(c, stat, UNSET, rows);
    a.rstd = case_vector(c, stat, UNSET, rows);
    if (added) {
        const int64_t place = case_pick(c, 4);
        a.add = case_output(c, t, NORMAL);
        a.sum = place == 0 ? a.x : place == 1 ? a.add : case_output(c, t, UNSET);
    }
    case_note(c, "%s%s", a.rms ? " rms" : "", added ? " of a sum" : "");
    return a;
}

OVERLAY(overlay_norm, forward, NORM, 0, overlay_cases(240))
{
    kn_norm_args args = norm_case(c, i, case_pick(c, 2));
    const bool nan = i % 11 == 3 && args.add.data && kn_array_numel(&args.x) > 0;
    if (nan)
        case_set(&args.add, 0, NAN);
    if (nan)
        case_close(c, &args.sum, 0);
    else if (args.sum.data)
        case_exact(c, &args.sum);
    case_close(c, &args.y, 1e-5);
    if (args.mean.data)
        case_close(c, &args.mean, 1e-6);
    case_close(c, &args.rstd, 1e-6);
    case_run(c, &args);
}

OVERLAY(overlay_norm, backward, NORM_GRAD, 0, overlay_cases(240))
{
    kn_norm_args f = norm_case(c, i, false);
    case_prepare(KN_K_NORM, &f);
    int last = f.x.ndim - 1;
    int64_t C = f.x.shape[last], rows = kn_array_numel(&f.rstd);
    kn_norm_grad_args a = { .x = f.x, .w = f.w, .mean = f.mean, .rstd = f.rstd, .rms = f.rms };
    a.dy = rows_output(c, f.x.dtype, NORMAL);
    kn_dtype wt = f.w.data ? f.w.dtype : f.x.dtype;
    if (i % 5)
        a.dx = rows_output(c, f.x.dtype, NORMAL);
    if (case_pick(c, 2)) /* dx isn't read where it isn't more */
        a.more = case_pick(c, 3) == 0 && a.dx.data ? a.dx : case_output(c, f.x.dtype, NORMAL);
    if (i % 13 == 5 && a.more.data && kn_array_numel(&a.more) > 0)
        case_set(&a.more, 0, NAN);
    case_note(c, "%s", a.more.data ? " more" : "");
    if (i % 7)
        a.dw = case_vector(c, wt, UNSET, C);
    if (i % 3 && !f.rms)
        a.db = case_vector(c, wt, UNSET, C);
    double scale = C > 2 ? 2e-5 : 1e-2; /* rows of 1 or 2 values have rstd up to 1/sqrt(eps) */
    if (a.dx.data)
        case_close(c, &a.dx, scale);
    if (a.dw.data)
        case_close(c, &a.dw, 1e-5 + 2e-6 * (double)rows);
    if (a.db.data)
        case_close(c, &a.db, 1e-5 + 2e-6 * (double)rows);
    case_run(c, &a);
}

static void check_bits(const char *what, const kn_provider *p, const kn_array *a, const kn_array *b)
{
    const size_t size = kn_dtype_size(a->dtype);
    int64_t at[KN_MAX_DIMS] = { 0 };
    for (int64_t i = 0; i < kn_array_numel(a) && a->data; i++) {
        int64_t x = 0, y = 0;
        for (int d = 0; d < a->ndim; d++)
            x += at[d] * a->stride[d], y += at[d] * b->stride[d];
        KN_CHECK(memcmp((char *)a->data + x * (int64_t)size, (char *)b->data + y * (int64_t)size,
                        size) == 0,
                 "%s by %s: element %lld is %.9g, in two steps it is %.9g", what, p->name,
                 (long long)i, case_get(a, x), case_get(b, y));
        for (int d = a->ndim - 1; d >= 0 && ++at[d] == a->shape[d]; d--)
            at[d] = 0;
    }
}

/* In one step and in two, which must be done by p: false where p declines. */
static bool norm_in_two(overlay_case *c, const kn_provider *p, int i)
{
    kn_norm_args a = norm_case(c, i, true), b = a;
    b.y = case_output(c, a.x.dtype, UNSET);
    b.sum = case_output(c, a.x.dtype, UNSET);
    kn_binary_args sum = { b.sum, a.x, a.add, KN_ADD };
    if (a.mean.data)
        b.mean = case_vector(c, a.mean.dtype, UNSET, kn_array_numel(&a.mean));
    b.rstd = case_vector(c, a.rstd.dtype, UNSET, kn_array_numel(&a.rstd));
    b.x = b.sum;
    b.add = b.sum = (kn_array){ 0 };
    if (p->run[KN_K_BINARY](&sum) != KN_DONE || p->run[KN_K_NORM](&b) != KN_DONE ||
        p->run[KN_K_NORM](&a) != KN_DONE)
        return false;
    check_bits("sum", p, &a.sum, &b.x);
    check_bits("y", p, &a.y, &b.y);
    check_bits("mean", p, &a.mean, &b.mean);
    check_bits("rstd", p, &a.rstd, &b.rstd);
    /* of gradients 16 bits have one rounding less, and the reference computes f32 in f64 */
    if (kn_dtype_size(a.x.dtype) == 2 || (a.x.dtype == KN_F32 && strcmp(p->name, "reference") == 0))
        return true;
    kn_norm_grad_args g = { .x = b.x, .w = a.w, .mean = a.mean, .rstd = a.rstd, .rms = a.rms };
    g.dy = case_output(c, a.x.dtype, NORMAL);
    g.dx = case_output(c, a.x.dtype, UNSET);
    kn_norm_grad_args h = g;
    h.dx = b.y;
    g.more = case_output(c, a.x.dtype, NORMAL);
    kn_binary_args grown = { h.dx, g.more, h.dx, KN_ADD };
    if (p->run[KN_K_NORM_GRAD](&h) != KN_DONE || p->run[KN_K_BINARY](&grown) != KN_DONE ||
        p->run[KN_K_NORM_GRAD](&g) != KN_DONE)
        return false;
    check_bits("dx", p, &g.dx, &h.dx);
    return true;
}

KN_TEST(overlay_norm, a_sum_has_the_bits_of_two_steps)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    const int n = overlay_all_layers(providers);
    for (int k = 0; k < n; k++) {
        int ran = 0;
        if (!providers[k]->run[KN_K_NORM])
            continue;
        for (int i = 0; i < overlay_cases(120); i++)
            ran += norm_in_two(case_begin(KN_K_NORM, (uint64_t)i), providers[k], i);
        KN_CHECK(kn_ok() && ran > overlay_cases(120) / 6, "%s computed %d cases",
                 providers[k]->name, ran);
    }
}
