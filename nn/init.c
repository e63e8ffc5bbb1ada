/* nn/init.c: initial values of parameters and buffers. Each element is a function of the seed, the
 * name and its index, so that a rank can fill its part. */
#include "nn/orthogonal.h"
#include <math.h>

enum { DRAWS = 8 }; /* of a truncated normal value; all miss once in 5 * 10^10 elements */

static bool is_by_fan(kn_init_kind kind)
{
    return kind >= KN_INIT_XAVIER_NORMAL && kind <= KN_INIT_ORTHOGONAL;
}

static bool check_init(const kn_initializer *i, const char *name)
{
    const bool normal = i->kind == KN_INIT_NORMAL || i->kind == KN_INIT_TRUNCATED_NORMAL;
    bool sane = i->kind >= KN_INIT_DEFAULT && i->kind <= KN_INIT_ORTHOGONAL && isfinite(i->a) &&
                isfinite(i->b) && (!normal || i->b >= 0) &&
                (i->kind != KN_INIT_UNIFORM || i->a <= i->b);
    if (!sane)
        return kn_fail("initial values: '%s' has an initializer of kind %d with %g and %g; both "
                       "must be finite, a deviation at least 0, and an interval's end not below "
                       "its beginning",
                       name ? name : "", (int)i->kind, i->a, i->b);
    return !is_by_fan(i->kind) || (i->a >= 0 && (i->b == 0 || i->b == 1)) ||
           kn_fail(
               "initial values: '%s' has an initializer by its fans with %g and %g; a gain of at "
               "least 0, and 0 (fan_in) or 1 (fan_out) are needed",
               name ? name : "", i->a, i->b);
}

bool kn_init_resolve(kn_initializer *i, const char *name, int ndim, const int64_t *shape)
{
    if (!check_init(i, name) || (ndim > 0 && !kn_given(shape, "initial values", "the shape")) ||
        !is_by_fan(i->kind))
        return kn_ok();
    if (ndim < 2 || ndim > KN_MAX_DIMS)
        return kn_fail("initial values: '%s' has %d dims; an initializer by fans needs a shape "
                       "[out, in, ...]",
                       name ? name : "", ndim);
    if (i->kind == KN_INIT_ORTHOGONAL) {
        i->_rows = shape[0];
        i->_cols = 1;
        for (int d = 1; d < ndim; d++)
            i->_cols *= shape[d];
        return true;
    }
    const bool xavier = i->kind == KN_INIT_XAVIER_NORMAL || i->kind == KN_INIT_XAVIER_UNIFORM;
    const bool normal = i->kind == KN_INIT_XAVIER_NORMAL || i->kind == KN_INIT_KAIMING_NORMAL;
    double rest = 1;
    for (int d = 2; d < ndim; d++)
        rest *= (double)shape[d];
    const double in = (double)shape[1] * rest, out = (double)shape[0] * rest;
    const double fan = xavier ? (in + out) / 2 : i->b == 1 ? out : in;
    const double dev = fan > 0 ? i->a / sqrt(fan) : 0; /* no elements */
    *i = normal ? KN_NORMAL_INIT(dev) : KN_UNIFORM_INIT(-sqrt(3) * dev, sqrt(3) * dev);
    return true;
}

kn_initializer kn_init_or(kn_initializer i, kn_initializer d)
{
    return i.kind ? i : d;
}

bool kn_init_draw(kn_tensor *dst, kn_random kind, uint64_t seed, uint64_t stream, int64_t start,
                  double p0, double p1)
{
    return KN_LAUNCH(kn_compute_stream(kn_device_of(dst)), KN_K_RANDOM,
                     ((kn_random_args){ .dst = kn_array_of(dst),
                                        .kind = kind,
                                        .seed = seed,
                                        .stream = stream,
                                        .start = start,
                                        .p0 = p0,
                                        .p1 = p1 }));
}

/* Draws anew where the first draw lies beyond 2 deviations, from other streams. */
static bool draw_truncated(kn_tensor *dst, const kn_initializer *init, uint64_t seed,
                           uint64_t stream, int64_t start)
{
    kn_scope scope = kn_scope_begin();
    const bool mode = kn_set_grad_mode(false);
    kn_tensor *x = kn_empty_like(dst);
    kn_tensor *limit = kn_full(dst->dtype, kn_device_of(dst), 2, KN_SCALAR);
    bool ok = x && limit && kn_init_draw(x, KN_NORMAL, seed, stream, start, 0, 1);
    for (uint64_t n = 1; n < DRAWS && ok; n++) {
        kn_tensor *again = kn_empty_like(dst);
        ok = again &&
             kn_init_draw(again, KN_NORMAL, seed, stream + n * 0x9e3779b97f4a7c15u, start, 0, 1);
        x = ok ? kn_where(kn_gt(kn_abs(x), limit), again, x) : NULL;
        ok = x != NULL;
    }
    x = ok ? kn_add_scalar(kn_scale(kn_clamp(x, -2, 2), init->b), init->a) : NULL;
    ok = x && kn_array_copy(dst, kn_array_of(dst), kn_array_of(x));
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    return ok;
}

/* The largest number of bf16 or f16 below x. */
static double before(kn_dtype dtype, double x)
{
    const int bits = dtype == KN_BF16 ? 8 : 11, least = dtype == KN_BF16 ? -133 : -24;
    int exponent = least;
    if (x != 0 && frexp(x, &exponent) == 0.5)
        exponent--; /* numbers below a power of two are closer to each other than those above it */
    const int step = exponent - bits > least ? exponent - bits : least;
    return ldexp(ceil(ldexp(x, -step)) - 1, step);
}

/* Rounding may reach the interval's end: such elements become the number before it. */
static bool draw_uniform(kn_tensor *dst, const kn_initializer *init, uint64_t seed, uint64_t stream,
                         int64_t start)
{
    if (!kn_init_draw(dst, KN_UNIFORM, seed, stream, start, init->a, init->b))
        return false;
    const bool rounds = dst->dtype == KN_BF16 || dst->dtype == KN_F16;
    const double most = rounds ? before(dst->dtype, init->b) : init->b;
    if (!rounds || most < init->a) /* there may be no number in the interval */
        return true;
    kn_unary_args args = { kn_array_of(dst), kn_array_of(dst), KN_CLAMP, -HUGE_VAL, most };
    return KN_LAUNCH(kn_compute_stream(kn_device_of(dst)), KN_K_UNARY, args);
}

static bool fill(const kn_initializer *init, uint64_t seed, const char *name, kn_tensor *dst,
                 int64_t start)
{
    const uint64_t stream = kn_hash_string(name);
    if (init->kind == KN_INIT_NORMAL)
        return kn_init_draw(dst, KN_NORMAL, seed, stream, start, init->a, init->b);
    if (init->kind == KN_INIT_UNIFORM)
        return draw_uniform(dst, init, seed, stream, start);
    if (init->kind == KN_INIT_TRUNCATED_NORMAL)
        return draw_truncated(dst, init, seed, stream, start);
    if (init->kind == KN_INIT_ORTHOGONAL)
        return kn_device_of(dst) == KN_META || kn_init_orthogonal(init, seed, stream, dst, start);
    const double value = init->kind == KN_INIT_ONES       ? 1
                         : init->kind == KN_INIT_CONSTANT ? init->a
                                                          : 0;
    return kn_array_fill(dst, kn_array_of(dst), value, 0);
}

bool kn_init_fill(const kn_initializer *init, uint64_t seed, const char *name, kn_tensor *dst,
                  int64_t start)
{
    const int64_t end = start + kn_numel(dst), last = init->_blank + init->_blanks;
    const int64_t from = init->_blank > start ? init->_blank : start, to = last < end ? last : end;
    const int64_t n = to - from;
    kn_array all = kn_array_of(dst);
    if (!fill(init, seed, name, dst, start) || n <= 0)
        return kn_ok();
    all.data = (char *)all.data + (size_t)(from - start) * kn_dtype_size(all.dtype);
    return kn_array_fill(dst, kn_array_make(all.data, all.dtype, 1, &n), 0, 0);
}
