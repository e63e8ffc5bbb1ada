/* tests/autograd/statistics_test.c: reductions made of other operations, and softmax along any dim,
 * against their formulas in f64; special values; gradients where formulas have none; errors.
 * (Other gradients: every_operation.c.) */
#include "tests/autograd/every.h"
#include "tests/owned.h"

/* ---- values ---------------------------------------------------------------------------------- */

typedef kn_tensor *(*reduction)(kn_tensor *x, int n, const int64_t *dims, bool keep);
typedef double (*formula)(const double *v, int n);

#define REDUCTION(name, call, body)                                                                \
    static kn_tensor *run_##name(kn_tensor *x, int n, const int64_t *dims, bool keep)              \
    {                                                                                              \
        return call;                                                                               \
    }                                                                                              \
    static double by_##name(const double *v, int n)                                                \
    {                                                                                              \
        double s = 0;                                                                              \
        body;                                                                                      \
        return s;                                                                                  \
    }
#define EACH for (int i = 0; i < n; i++)

static double average_of(const double *v, int n)
{
    double s = 0;
    EACH s += v[i] / n;
    return s;
}

static double squares_of(const double *v, int n)
{
    double s = 0, mean = average_of(v, n);
    EACH s += (v[i] - mean) * (v[i] - mean);
    return s;
}

REDUCTION(logsumexp, kn_logsumexp(x, n, dims, keep), EACH s += exp(v[i]); s = log(s))
REDUCTION(prod, kn_prod(x, n, dims, keep), s = 1; EACH s *= v[i])
REDUCTION(var, kn_var(x, n, dims, .keep = keep), s = squares_of(v, n) / (n - 1))
REDUCTION(var_biased, kn_var(x, n, dims, .correction = KN_ZERO, .keep = keep),
          s = squares_of(v, n) / n)
REDUCTION(std, kn_std(x, n, dims, .keep = keep), s = sqrt(squares_of(v, n) / (n - 1)))
REDUCTION(std_biased, kn_std(x, n, dims, .correction = KN_ZERO, .keep = keep),
          s = sqrt(squares_of(v, n) / n))
REDUCTION(norm_2, kn_norm(x, 2, n, dims, keep), EACH s += v[i] * v[i]; s = sqrt(s))
REDUCTION(norm_1, kn_norm(x, 1, n, dims, keep), EACH s += fabs(v[i]))
REDUCTION(norm_inf, kn_norm(x, INFINITY, n, dims, keep), EACH s = fmax(s, fabs(v[i])))
REDUCTION(norm_least, kn_norm(x, -INFINITY, n, dims, keep), s = INFINITY;
          EACH s = fmin(s, fabs(v[i])))
REDUCTION(norm_3, kn_norm(x, 3, n, dims, keep), EACH s += pow(fabs(v[i]), 3); s = cbrt(s))
REDUCTION(norm_half, kn_norm(x, 0.5, n, dims, keep), EACH s += sqrt(fabs(v[i])); s = s * s)
REDUCTION(norm_minus, kn_norm(x, -1, n, dims, keep), EACH s += 1 / fabs(v[i]); s = 1 / s)
REDUCTION(norm_0, kn_norm(x, 0, n, dims, keep), EACH s += v[i] != 0)

static const struct {
    const char *name;
    reduction run;
    formula by;
} all[] = {
#define ROW(name)                                                                                  \
    {                                                                                              \
#name, run_##name, by_##name                                                               \
    }
    ROW(logsumexp),  ROW(prod),      ROW(var),        ROW(var_biased), ROW(std),
    ROW(std_biased), ROW(norm_2),    ROW(norm_1),     ROW(norm_inf),   ROW(norm_least),
    ROW(norm_3),     ROW(norm_half), ROW(norm_minus), ROW(norm_0),
};
#define ALL (sizeof all / sizeof *all)

static const struct {
    input_spec in;
    int n;
    int64_t dims[3];
} shapes[] = {
    { { 1, { 7 } }, 0, { 0 } },
    { { 1, { 2 } }, 1, { -1 } },
    { { 2, { 3, 5 }, TRANSPOSED }, 1, { 0 } },
    { { 2, { 3, 5 }, SLICED }, 1, { -1 } },
    { { 3, { 2, 3, 4 } }, 2, { 0, -1 } },
    { { 3, { 3, 2, 5 }, TRANSPOSED }, 2, { 2, 1 } },
    { { 4, { 2, 3, 2, 3 } }, 1, { 1 } },
    { { 3, { 2, 2, 3 } }, 3, { 0, 1, 2 } },
    { { 3, { 0, 3, 2 } }, 1, { 1 } },
};
#define SHAPES (sizeof shapes / sizeof *shapes)

/* want[] of the result, row-major, from x[numel] row-major of shape s. */
static int64_t by_formula(formula f, const double *x, const int64_t *shape, int ndim, uint32_t dims,
                          double *want)
{
    int64_t outs = 1, count = 1;
    for (int d = 0; d < ndim; d++)
        *(dims >> d & 1 ? &count : &outs) *= shape[d];
    OWNED_BYTES double *v = calloc((size_t)(outs * count) + 1, sizeof *v);
    OWNED_BYTES int *have = calloc((size_t)outs + 1, sizeof *have);
    for (int64_t i = 0; i < outs * count; i++) {
        int64_t rest = i, to = 0, step = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            to += dims >> d & 1 ? 0 : rest % shape[d] * step;
            step *= dims >> d & 1 ? 1 : shape[d];
            rest /= shape[d];
        }
        v[to * count + have[to]++] = x[i];
    }
    for (int64_t o = 0; o < outs; o++)
        want[o] = f(v + o * count, (int)count);
    return outs;
}

static void check_values(size_t op, size_t shape, kn_dtype t, double tol)
{
    const input_spec *s = &shapes[shape].in, b = leaf_spec(s);
    int64_t n = 1;
    for (int d = 0; d < b.ndim; d++)
        n *= b.shape[d];
    double *values = random_doubles(n, 0.3, 1.5, 5 + shape), x[200], want[64], got[64];
    for (int64_t i = 0; i < n; i += 2)
        values[i] = -values[i];
    IN_SCOPE;
    kn_tensor *view = input_view(s, tensor_of(t, values, b.ndim, b.shape));
    to_doubles(kn_contiguous(view), x);
    uint32_t set = 0;
    for (int i = 0; i < shapes[shape].n; i++)
        set |= 1u << (shapes[shape].dims[i] + (shapes[shape].dims[i] < 0 ? s->ndim : 0));
    if (!set)
        set = (1u << s->ndim) - 1;
    int64_t outs = by_formula(all[op].by, x, s->shape, s->ndim, set, want);
    for (int keep = 0; keep < 2; keep++) {
        kn_tensor *y = all[op].run(view, shapes[shape].n, shapes[shape].dims, keep);
        KN_CHECK(y && y->dtype == t && kn_numel(y) == outs, "%s: %s", all[op].name,
                 kn_error() ? kn_error() : "shape");
        int left = s->ndim - __builtin_popcount(set);
        KN_CHECK(y->ndim == (keep ? s->ndim : left), "%s: %d dims", all[op].name, y->ndim);
        to_doubles(kn_contiguous(y), got);
        compare(all[op].name, "value", got, want, outs, tol);
        kn_tensor *m = kn_empty(t, KN_META, s->ndim, s->shape);
        m = all[op].run(m, shapes[shape].n, shapes[shape].dims, keep);
        KN_CHECK(m && m->ndim == y->ndim && kn_numel(m) == outs, "%s on meta: %s", all[op].name,
                 kn_error() ? kn_error() : "shape");
    }
    free(values);
}

KN_TEST(statistics, values_by_their_formulas)
{
    for (size_t op = 0; op < ALL; op++)
        for (size_t s = 0; s < SHAPES; s++) {
            check_values(op, s, KN_F64, 1e-12);
            check_values(op, s, KN_F32, 2e-6);
            check_values(op, s, s % 2 ? KN_BF16 : KN_F16, 8e-3);
        }
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* d y / d x for x[n] of one dim. */
static void gradient(reduction run, int n, const double *x, double *got)
{
    kn_tensor *t = kn_require_grad(kn_from(KN_F64, KN_CPU, x, 1, (int64_t[]){ n }), true);
    KN_CHECK(kn_backward(run(t, 0, NULL, false)));
    to_doubles(kn_grad(t), got);
}

#define CHECK_GRADIENT(name, x, ...)                                                               \
    do {                                                                                           \
        double in_[] = x, want_[] = __VA_ARGS__, got_[8];                                          \
        gradient(run_##name, (int)(sizeof in_ / sizeof *in_), in_, got_);                          \
        for (size_t i_ = 0; i_ < sizeof in_ / sizeof *in_; i_++)                                   \
            KN_CHECK(fabs(got_[i_] - want_[i_]) < 1e-12, #name ": d[%zu] is %g, not %g", i_,       \
                     got_[i_], want_[i_]);                                                         \
    } while (0)
#define LIST(...)                                                                                  \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

KN_TEST(statistics, gradients_where_formulas_have_none)
{
    CHECK_GRADIENT(prod, LIST(2, 0, 3, 5), LIST(0, 30, 0, 0));
    CHECK_GRADIENT(prod, LIST(2, 0, 3, 0, 5), LIST(0, 0, 0, 0, 0));
    CHECK_GRADIENT(std, LIST(4, 4, 4), LIST(0, 0, 0));
    CHECK_GRADIENT(norm_2, LIST(0, 0), LIST(0, 0));
    CHECK_GRADIENT(norm_3, LIST(0, 0), LIST(0, 0));
    CHECK_GRADIENT(norm_3, LIST(0, -2), LIST(0, -1));
    CHECK_GRADIENT(norm_1, LIST(0, -2, 3), LIST(0, -1, 1));
    CHECK_GRADIENT(norm_half, LIST(0, 4), LIST(0, 1));
    CHECK_GRADIENT(norm_minus, LIST(0, 4), LIST(0, 0));
    CHECK_GRADIENT(norm_0, LIST(0, 4, -INFINITY), LIST(0, 0, 0));
    CHECK_GRADIENT(norm_inf, LIST(3, -3, 1, 3), LIST(1. / 3, -1. / 3, 0, 1. / 3));
    CHECK_GRADIENT(logsumexp, LIST(-INFINITY, 1, 1), LIST(0, 0.5, 0.5));
    /* equal parts over several dims at once */
    double x[4] = { 2, 2, 1, -2 }, got[4];
    kn_tensor *t = kn_require_grad(kn_from(KN_F64, KN_CPU, x, KN_SHAPE(2, 2)), true);
    KN_CHECK(kn_backward(kn_norm(t, INFINITY, 2, (int64_t[]){ 0, 1 }, false)));
    to_doubles(kn_grad(t), got);
    KN_CHECK(fabs(got[0] - got[1]) < 1e-15 && fabs(got[0] + got[3]) < 1e-15 && got[2] == 0);
}

/* ---- special values -------------------------------------------------------------------------- */

static double of(reduction run, int n, const double *x)
{
    return kn_item(run(kn_from(KN_F64, KN_CPU, x, 1, (int64_t[]){ n }), 0, NULL, false));
}
#define OF(name, ...)                                                                              \
    of(run_##name, (int)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)),                      \
       (double[]){ __VA_ARGS__ })

KN_TEST(statistics, special_values)
{
    KN_CHECK(OF(logsumexp, -INFINITY, -INFINITY) == -INFINITY);
    KN_CHECK(OF(logsumexp, INFINITY, 1) == INFINITY && isnan(OF(logsumexp, 1, NAN)));
    KN_CHECK(fabs(OF(logsumexp, 1000, 1000) - 1000 - log(2)) < 1e-9);
    KN_CHECK(of(run_logsumexp, 0, NULL) == -INFINITY && of(run_prod, 0, NULL) == 1);
    KN_CHECK(isnan(OF(var, 3)) && OF(var_biased, 3) == 0 && isnan(of(run_var, 0, NULL)));
    KN_CHECK(OF(norm_minus, 0, 2) == 0 && OF(norm_half, 0, 4) == 4 && of(run_norm_2, 0, NULL) == 0);
    KN_CHECK(OF(norm_0, 0, 2, NAN, -0.0) == 2 && isnan(OF(norm_inf, NAN, 2)));
    KN_CHECK(OF(norm_2, INFINITY, 1) == INFINITY && isnan(OF(norm_2, 0, NAN)));
    /* f16 overflows and bf16 rounds in between, where it was not computed in f32 */
    kn_tensor *big = kn_full(KN_F16, KN_CPU, 300, KN_SHAPE(4));
    KN_CHECK(kn_item(kn_norm(big, 2, 0, NULL, false)) == 600);
    kn_tensor *many = kn_full(KN_BF16, KN_CPU, 1, KN_SHAPE(1000));
    KN_CHECK(kn_item(kn_logsumexp(many, 0, NULL, false)) == 7.90625);
    KN_CHECK(kn_ok());
}

KN_TEST(statistics, a_product_of_nothing_has_a_gradient_of_nothing)
{
    kn_tensor *x = kn_require_grad(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0)), true);
    kn_tensor *y = kn_prod(x, 1, (int64_t[]){ 1 }, false);
    KN_CHECK(kn_backward(y, .grad = kn_ones_like(y)));
    KN_CHECK(kn_numel(kn_grad(x)) == 0 && kn_item(kn_sum(y, 0, NULL, false)) == 2);
}

KN_TEST(statistics, products_of_integers_are_i64)
{
    int32_t x[3] = { 100000, -100000, 3 };
    kn_tensor *y = kn_prod(kn_from(KN_I32, KN_CPU, x, KN_SHAPE(3)), 0, NULL, false);
    KN_CHECK(y && y->dtype == KN_I64 && *(int64_t *)kn_data(y) == -30000000000);
    bool b[2] = { true, false };
    y = kn_prod(kn_from(KN_BOOL, KN_CPU, b, KN_SHAPE(2)), 0, NULL, true);
    KN_CHECK(y && y->dtype == KN_I64 && y->ndim == 1 && *(int64_t *)kn_data(y) == 0);
}

KN_TEST(statistics, any_and_all)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F64, KN_I64, KN_I32, KN_U8, KN_BOOL };
    double x[6] = { 0, 0, 1, 1, 1, 0 };
    const int64_t last[1] = { -1 };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        kn_tensor *t = tensor_of(types[i], x, KN_SHAPE(3, 2));
        kn_tensor *any = kn_any(t, 1, last, false), *every = kn_all(t, 1, last, true);
        KN_CHECK(any && every && any->dtype == KN_BOOL && every->ndim == 2);
        KN_CHECK(memcmp(kn_data(any), (bool[]){ false, true, true }, 3) == 0);
        KN_CHECK(memcmp(kn_data(every), (bool[]){ false, true, false }, 3) == 0);
    }
    kn_tensor *none = kn_zeros(KN_BOOL, KN_CPU, KN_SHAPE(0, 2));
    KN_CHECK(kn_item(kn_any(none, 0, NULL, false)) == 0);
    KN_CHECK(kn_item(kn_all(none, 0, NULL, false)) == 1);
    KN_CHECK(kn_item(kn_any(kn_full(KN_F32, KN_CPU, NAN, KN_SHAPE(2)), 0, NULL, false)) == 1);
}

KN_TEST(statistics, argmin_takes_the_first)
{
    double x[6] = { 3, 1, 1, -2, 5, -2 };
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F64, KN_I64, KN_I32 };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        kn_tensor *y = kn_argmin(tensor_of(types[i], x, KN_SHAPE(2, 3)), -1);
        KN_CHECK(y && y->dtype == KN_I64 && y->ndim == 1);
        KN_CHECK(memcmp(kn_data(y), (int64_t[]){ 1, 0 }, 16) == 0);
    }
    int64_t least[3] = { 0, INT64_MIN, -1 };
    KN_CHECK(kn_item(kn_argmin(kn_from(KN_I64, KN_CPU, least, KN_SHAPE(3)), 0)) == 1);
    double nan[3] = { -5, NAN, -INFINITY };
    KN_CHECK(kn_item(kn_argmin(kn_from(KN_F64, KN_CPU, nan, KN_SHAPE(3)), 0)) == 1);
}

/* ---- softmax along a dim --------------------------------------------------------------------- */

typedef struct along {
    int dim;
    bool log;
} along;

static kn_values run_softmax(kn_values in, void *arg)
{
    const along *a = arg;
    return KN_VALUES(a->log ? kn_log_softmax(in.v[0], a->dim) : kn_softmax(in.v[0], a->dim));
}

KN_TEST(statistics, softmax_along_any_dim)
{
    double *v = random_doubles(24, -2, 2, 3), got[24];
    for (int dim = -3; dim < 3; dim++) {
        const int64_t size = (int64_t[]){ 2, 3, 4 }[(dim + 3) % 3];
        const int64_t step = (int64_t[]){ 12, 4, 1 }[(dim + 3) % 3];
        kn_tensor *x = kn_require_grad(tensor_of(KN_F64, v, KN_SHAPE(2, 3, 4)), true);
        for (int log_ = 0; log_ < 2; log_++) {
            along a = { dim, log_ };
            to_doubles(kn_contiguous(run_softmax(KN_VALUES(x), &a).v[0]), got);
            for (int64_t i = 0; i < 24; i++) {
                double sum = 0;
                for (int64_t k = 0; k < size; k++)
                    sum += exp(v[i - i / step % size * step + k * step]);
                double want = log_ ? v[i] - log(sum) : exp(v[i]) / sum;
                KN_CHECK(fabs(got[i] - want) < 1e-13, "dim %d: %g, not %g", dim, got[i], want);
            }
            KN_CHECK(kn_gradcheck(run_softmax, KN_VALUES(x), .arg = &a));
        }
    }
    kn_tensor *x = tensor_of(KN_F64, v, KN_SHAPE(6, 4)), *y = kn_softmax(x);
    to_doubles(kn_sub(y, kn_softmax(x, -1)), got);
    KN_CHECK(got[5] == 0 && kn_size(kn_log_softmax(x), 0) == 6);
    kn_tensor *meta = kn_softmax(kn_empty(KN_F32, KN_META, KN_SHAPE(3, 0, 2)), 0);
    KN_CHECK(meta && kn_size(meta, 0) == 3 && kn_size(meta, 2) == 2);
    free(v);
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(statistics, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *none = kn_ones(KN_F32, KN_CPU, KN_SHAPE(0));
    kn_tensor *whole = kn_ones(KN_I64, KN_CPU, KN_SHAPE(2, 3));
    const int64_t two[1] = { 2 }, huge[1] = { 1LL << 32 };
    REFUSED(kn_logsumexp(x, 1, two, false), "logsumexp: dim 2 is out of range for f32[2,3]");
    REFUSED(kn_sum(x, 1, huge, false), "sum: dim 4294967296 is out of range for f32[2,3]");
    REFUSED(kn_prod(x, 1, NULL, false), "prod: the list of dims is NULL");
    REFUSED(kn_any(x, -1, two, false), "any: -1 dims are listed");
    REFUSED(kn_var(whole, 0, NULL), "var: needs a float tensor, got i64[2,3]");
    REFUSED(kn_std(x, 0, NULL, .correction = NAN), "std: correction is nan, should be finite");
    REFUSED(kn_norm(x, NAN, 0, NULL, false), "norm: p is NaN");
    REFUSED(kn_norm(none, INFINITY, 0, NULL, false), "norm: there are no elements to reduce");
    REFUSED(kn_argmin(none, 0), "argmin: dim 0 has size 0");
    REFUSED(kn_argmin(x, 2), "argmin: dim 2 is out of range");
    kn_tensor *odd = kn_empty(KN_U16, KN_CPU, KN_SHAPE(2));
    REFUSED(kn_prod(odd, 0, NULL, false), "prod: needs a dtype with arithmetic, got u16[2]");
    REFUSED(kn_any(odd, 0, NULL, false), "any: needs a dtype with arithmetic, got u16[2]");
    REFUSED(kn_argmin(odd, 0), "argmin: needs a dtype with arithmetic, got u16[2]");
    REFUSED(kn_softmax(x, 2), "softmax: dim 2 is out of range for f32[2,3]");
    REFUSED(kn_log_softmax(whole, 0), "log_softmax: needs a float tensor");
    REFUSED(kn_softmax(NULL, 0), "softmax:");
}

/* Temporaries go with the call: what stays is the result, or what backward keeps. */
KN_TEST(statistics, temporaries_go)
{
    kn_tensor *x = kn_ones(KN_BF16, KN_CPU, KN_SHAPE(1000));
    for (size_t op = 0; op < ALL; op++) {
        const int64_t before = kn_live_tensors();
        IN_SCOPE;
        KN_CHECK(all[op].run(x, 0, NULL, false) && kn_live_tensors() == before + 1, "%s keeps %lld",
                 all[op].name, (long long)(kn_live_tensors() - before));
    }
}
