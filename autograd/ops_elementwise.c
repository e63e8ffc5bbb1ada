/* autograd/ops_elementwise.c: operations on each element, unary and binary. Their kinds are the
 * rows of kernels/kinds.h: one operation and, where the row says PLAIN, one function kn_<name>() is
 * made of each. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include "kernels/convert.h"
#include <math.h>
#include <string.h>

/* Is the first input's dtype one of the kind's? */
static bool kind_takes(const kn_op_call *c, const kn_kind_row *row)
{
    const kn_dtype t = c->in[0]->dtype;
    return kn_kind_takes(row, t) || row->dtypes == KN_NUMBERS ||
           kn_fail("%s: needs a float tensor, got %s; kn_cast it first", row->name,
                   kn_dtype_name(t));
}

/* Bools are no numbers where a result would be neither 0 nor 1. */
static bool has_numbers(const char *op, const kn_tensor *x)
{
    return x->dtype != KN_BOOL ||
           kn_fail("%s: %s holds bools, no numbers; kn_cast it first, or take kn_logical_not, "
                   "kn_logical_xor or kn_ne",
                   op, KN_SHOWN(x));
}

/* ---- unary: y = f(x), dx = dy f'(x) ---------------------------------------------------------- */

typedef struct unary_attr {
    kn_unary kind;
    double p0, p1;
} unary_attr;

static bool unary_shape(kn_op_call *c)
{
    const unary_attr *a = c->attr;
    return kind_takes(c, kn_unary_row(a->kind)) &&
           (a->kind != KN_NEG || has_numbers(c->op->name, c->in[0])) && kn_shape_of_input(c);
}

static bool unary_forward(kn_op_call *c)
{
    const unary_attr *a = c->attr;
    return KN_RUN(
        c->out[0], KN_K_UNARY,
        ((kn_unary_args){ kn_array_of(c->out[0]), kn_array_of(c->in[0]), a->kind, a->p0, a->p1 }));
}

static bool unary_backward(kn_op_grad *g)
{
    const unary_attr *a = g->attr;
    const kn_tensor *kept = g->in[0] ? g->in[0] : g->out[0];
    kn_tensor *dy = g->dout[0]; /* fast in the order of what was kept */
    if (kept && kn_order_of(kept) != kn_order_of(dy))
        dy = kn_in_order_of(dy, kept);
    kn_tensor *dx = dy ? kn_empty_as(dy) : NULL;
    if (!dx)
        return false;
    g->din[0] = dx;
    return KN_RUN(
        dx, KN_K_UNARY_GRAD,
        ((kn_unary_grad_args){ kn_array_of(dx), kn_array_of(dy), kn_array_or_none(g->in[0]),
                               kn_array_or_none(g->out[0]), a->kind, a->p0, a->p1 }));
}

static bool unary_on_tape(kn_op_grad *g)
{
    const unary_attr *a = g->attr;
    g->din[0] = kn_slope_on_tape(a->kind, g->dout[0], g->in[0], g->out[0], a->p0, a->p1);
    return g->din[0] != NULL;
}

/* The operation of a kind: what its derivative reads is saved. */
#define UNARY_OP(id, text, function, reads, ...)                                                   \
    [KN_##id] = { .name = #text,                                                                   \
                  .attr_size = sizeof(unary_attr),                                                 \
                  .save_in = KN_READS_##reads & KN_READS_X ? 1 : 0,                                \
                  .save_out = KN_READS_##reads & KN_READS_Y ? 1 : 0,                               \
                  .shape = unary_shape,                                                            \
                  .forward = unary_forward,                                                        \
                  .backward = KN_READS_##reads == KN_READS_NO_GRAD ? NULL : unary_backward,        \
                  .on_tape = unary_on_tape },
KN_OPS(unary_ops, KN_UNARY_KINDS(UNARY_OP));

static kn_tensor *unary(kn_tensor *x, kn_unary kind, double p0, double p1)
{
    unary_attr a = { kind, p0, p1 };
    return kn_apply1(&unary_ops[kind], 1, &x, 0, &a);
}

kn_tensor *kn_unary_of(kn_tensor *x, kn_unary kind)
{
    return unary(x, kind, 0, 0);
}

bool kn_unary_of_epilogue(const kn_op *op, kn_unary *kind)
{
    *kind = KN_GELU_TANH; /* cuBLASLt has this one */
    return op == &unary_ops[KN_GELU_TANH];
}

#define UNARY_FUNCTION(id, name, function, ...) UNARY_##function(id, name)
#define UNARY_PLAIN(id, name)                                                                      \
    kn_tensor *kn_##name(kn_tensor *x)                                                             \
    {                                                                                              \
        return unary(x, KN_##id, 0, 0);                                                            \
    }
#define UNARY_PARAMS(id, name) /* below */
KN_UNARY_KINDS(UNARY_FUNCTION)

/* x can be computed with v: its integers take whole numbers of i64, and as bounds infinity. */
static bool takes_number(const char *op, const kn_tensor *x, double v, bool bound)
{
    const bool whole = (v == floor(v) && fabs(v) < 0x1p63) || (bound && isinf(v));
    return kn_ok() && kn_check(x, op) && (bound || has_numbers(op, x)) &&
           (kn_dtype_is_float(x->dtype) || whole ||
            kn_fail("%s: x is %s, whose integers can't be computed with %g; kn_cast it first", op,
                    KN_SHOWN(x), v));
}

kn_tensor *kn_scale(kn_tensor *x, double f)
{
    return takes_number("scale", x, f, false) ? unary(x, KN_AFFINE, f, 0) : NULL;
}
kn_tensor *kn_add_scalar(kn_tensor *x, double o)
{
    return takes_number("add_scalar", x, o, false) ? unary(x, KN_AFFINE, 1, o) : NULL;
}
kn_tensor *kn_pow(kn_tensor *x, double e)
{
    return unary(x, KN_POW, e, 0);
}

/* v rounded to a float dtype: so a bound is a number that an element can be. */
static double in_dtype(double v, const kn_tensor *x)
{
    const kn_dtype t = x ? x->dtype : KN_F64;
    return t == KN_F32    ? (double)(float)v
           : t == KN_BF16 ? (double)kn_bf16_to_f32(kn_f64_to_bf16(v))
           : t == KN_F16  ? (double)kn_f16_to_f32(kn_f64_to_f16(v))
                          : v;
}

kn_tensor *kn_clamp(kn_tensor *x, double lo, double hi)
{
    if (kn_ok() && (isnan(lo) || isnan(hi)))
        kn_fail("clamp: the bounds are %g and %g; NaN is none", lo, hi);
    return takes_number("clamp", x, lo, true) && takes_number("clamp", x, hi, true)
               ? unary(x, KN_CLAMP, in_dtype(lo, x), in_dtype(hi, x))
               : NULL;
}

/* first and second: the options' names; NULL: there is no second. */
static kn_tensor *finite_unary(kn_tensor *x, kn_unary kind, double p0, const char *first, double p1,
                               const char *second)
{
    if (kn_ok() && !(isfinite(p0) && isfinite(p1)))
        kn_fail("%s: .%s is %g; it should be finite", kn_unary_row(kind)->name,
                isfinite(p0) ? second : first, isfinite(p0) ? p1 : p0);
    return kn_ok() ? unary(x, kind, p0, p1) : NULL;
}

kn_tensor *kn_leaky_relu_(kn_tensor *x, kn_leaky_relu_options o)
{
    return finite_unary(x, KN_LEAKY_RELU, kn_value_or(o.slope, 0.01), "slope", 0, NULL);
}

kn_tensor *kn_elu_(kn_tensor *x, kn_elu_options o)
{
    return finite_unary(x, KN_ELU, kn_value_or(o.alpha, 1), "alpha", 0, NULL);
}

kn_tensor *kn_celu_(kn_tensor *x, kn_elu_options o)
{
    const double alpha = kn_value_or(o.alpha, 1);
    if (kn_ok() && alpha == 0)
        kn_fail("celu: .alpha is 0, but x is divided by it");
    return finite_unary(x, KN_CELU, alpha, "alpha", 0, NULL);
}

static kn_tensor *shrink(kn_tensor *x, kn_unary kind, double lambda)
{
    if (kn_ok() && !(lambda >= 0))
        kn_fail("%s: .lambda is %g and should be at least 0", kn_unary_row(kind)->name, lambda);
    return finite_unary(x, kind, in_dtype(lambda, x), "lambda", 0, NULL);
}

kn_tensor *kn_hardshrink_(kn_tensor *x, kn_shrink_options o)
{
    return shrink(x, KN_HARDSHRINK, kn_value_or(o.lambda, 0.5));
}

kn_tensor *kn_softshrink_(kn_tensor *x, kn_shrink_options o)
{
    return shrink(x, KN_SOFTSHRINK, kn_value_or(o.lambda, 0.5));
}

kn_tensor *kn_softplus_(kn_tensor *x, kn_softplus_options o)
{
    const double beta = kn_value_or(o.beta, 1);
    if (kn_ok() && !(beta > 0))
        kn_fail("softplus: .beta is %g and should be above 0", beta);
    return finite_unary(x, KN_SOFTPLUS, beta, "beta", kn_value_or(o.threshold, 20), "threshold");
}

kn_tensor *kn_hardtanh_(kn_tensor *x, kn_hardtanh_options o)
{
    const double low = kn_value_or(o.low, -1), high = kn_value_or(o.high, 1);
    if (kn_ok() && !(low <= high))
        kn_fail("hardtanh: .low %g is above .high %g", low, high);
    if (!takes_number("hardtanh", x, low, true) || !takes_number("hardtanh", x, high, true))
        return NULL;
    return finite_unary(x, KN_HARDTANH, in_dtype(low, x), "low", in_dtype(high, x), "high");
}

kn_tensor *kn_relu6(kn_tensor *x)
{
    return kn_ok() && kn_check(x, "relu6") ? unary(x, KN_HARDTANH, 0, 6) : NULL;
}

/* ---- binary: y = a op b, broadcast ----------------------------------------------------------- */

typedef struct binary_attr {
    kn_binary kind;
    double p0;
} binary_attr;

const int *kn_order_of_both(const kn_spec *s, const kn_tensor *a, const kn_tensor *b)
{
    const bool first =
        a->ndim == s->ndim && memcmp(a->shape, s->shape, (size_t)s->ndim * sizeof *s->shape) == 0;
    return b->ndim == s->ndim || first ? kn_order_of(first ? a : b) : NULL;
}

static bool binary_shape(kn_op_call *c)
{
    const binary_attr *k = c->attr;
    const kn_tensor *a = c->in[0], *b = c->in[1];
    if (a->dtype != b->dtype)
        return kn_fail("%s: dtypes differ: a is %s, b is %s; kn_cast one of them", c->op->name,
                       KN_SHOWN(a), KN_SHOWN(b));
    const bool apart = k->kind == KN_SUB || k->kind == KN_DIV || k->kind == KN_FLOOR_DIVIDE ||
                       k->kind == KN_REMAINDER || k->kind == KN_FMOD;
    if (!kind_takes(c, kn_binary_row(k->kind)) || (apart && !has_numbers(c->op->name, a)))
        return false;
    kn_spec *s = &c->spec[0];
    *s = kn_spec_like(a);
    s->dtype = k->kind >= KN_EQ ? KN_BOOL : a->dtype;
    if (!kn_broadcast_shape(a->ndim, a->shape, b->ndim, b->shape, &s->ndim, s->shape))
        return kn_fail(
            "%s: shapes don't broadcast: a is %s, b is %s (aligned at the last dim, sizes must "
            "be equal or 1)",
            c->op->name, KN_SHOWN(a), KN_SHOWN(b));
    s->order = kn_order_of_both(s, a, b);
    return true;
}

static bool binary_forward(kn_op_call *c)
{
    const binary_attr *k = c->attr;
    const kn_array o = kn_array_of(c->out[0]);
    return KN_RUN(c->out[0], KN_K_BINARY,
                  ((kn_binary_args){ o, kn_array_expand(kn_array_of(c->in[0]), o.ndim, o.shape),
                                     kn_array_expand(kn_array_of(c->in[1]), o.ndim, o.shape),
                                     k->kind, k->p0 }));
}

/* The slopes: what dy brings each input where that is wanted, in the shape of the result.
 *
 * The larger (smaller) input gets the gradient; equal ones half each. */
static void extremum_slopes(const kn_op_grad *g, bool max, kn_tensor **d)
{
    kn_tensor *dy = g->dout[0], *zero = kn_number_like(dy, 0);
    for (int i = 0; i < 2; i++) {
        if (!g->want[i])
            continue;
        kn_tensor *x = g->in[i], *other = g->in[1 - i];
        kn_tensor *half = kn_where(kn_eq(x, other), kn_scale(dy, 0.5), zero);
        d[i] = kn_where(max ? kn_gt(x, other) : kn_lt(x, other), dy, half);
    }
}

/* d(angle) = (b da - a db) / (a^2 + b^2); of the origin, which has none, 0 */
static void atan2_slopes(const kn_op_grad *g, kn_tensor **d)
{
    kn_tensor *a = g->in[0], *b = g->in[1], *zero = kn_number_like(a, 0);
    kn_tensor *far = kn_add(kn_square(a), kn_square(b));
    kn_tensor *t = kn_div(g->dout[0], kn_where(kn_eq(far, zero), kn_number_like(a, INFINITY), far));
    d[0] = g->want[0] ? kn_mul(t, b) : NULL;
    d[1] = g->want[1] ? kn_mul(t, kn_neg(a)) : NULL;
}

/* d(a^b) = b a^(b-1) da + a^b log(a) db; the first is 0 where b is, the second where a is 0 and b
 * isn't below. */
static void power_slopes(const kn_op_grad *g, kn_tensor **d)
{
    kn_tensor *dy = g->dout[0], *a = g->in[0], *b = g->in[1], *zero = kn_number_like(dy, 0);
    if (g->want[0]) {
        kn_tensor *da = kn_mul(kn_mul(dy, b), kn_pow_tensor(a, kn_add_scalar(b, -1)));
        d[0] = kn_where(kn_eq(b, zero), zero, da);
    }
    if (g->want[1]) {
        kn_tensor *none = kn_logical_and(kn_eq(a, zero), kn_ge(b, zero));
        kn_tensor *safe = kn_grad_mode() ? kn_where(none, kn_number_like(dy, 1), a) : a;
        d[1] = kn_where(none, zero, kn_mul(kn_mul(dy, g->out[0]), kn_log(safe)));
    }
}

/* dy times the derivative by input i, where it takes no more than that. */
static kn_tensor *slope(const kn_op_grad *g, const binary_attr *k, int i)
{
    kn_tensor *dy = g->dout[0], *a = g->in[0], *b = g->in[1];
    const double lerp[] = { 1 - k->p0, k->p0 };
    double f = 1;
    switch (k->kind) {
    case KN_ADD:
        break;
    case KN_MUL:
        return kn_mul(dy, g->in[1 - i]);
    case KN_REMAINDER: /* a - b q, q the whole quotient */
        return i ? kn_neg(kn_mul(dy, kn_floor_divide(a, b))) : dy;
    case KN_FMOD:
        return i ? kn_neg(kn_mul(dy, kn_trunc(kn_div(a, b)))) : dy;
    case KN_SUB:
        f = i ? -1 : 1;
        break;
    case KN_ADD_SCALED:
        f = i ? k->p0 : 1;
        break;
    case KN_LERP:
        f = lerp[i];
        break;
    default:
        return kn_fail_null("%s: has no derivative", kn_binary_row(k->kind)->name);
    }
    return f == 1 ? dy : kn_scale(dy, f);
}

static void slopes(const kn_op_grad *g, const binary_attr *k, kn_tensor **d)
{
    kn_tensor *far = NULL;
    switch (k->kind) {
    case KN_DIV: /* d(a/b) = da / b - (a/b) db / b */
        d[0] = kn_div(g->dout[0], g->in[1]);
        d[1] = g->want[1] ? kn_scale(kn_mul(d[0], g->out[0]), -1) : NULL;
        break;
    case KN_LOGADDEXP: /* each gets its share of the sum */
        far = kn_sub(g->in[0], g->in[1]);
        d[0] = g->want[0] ? kn_mul(g->dout[0], kn_sigmoid(far)) : NULL;
        d[1] = g->want[1] ? kn_mul(g->dout[0], kn_sigmoid(kn_neg(far))) : NULL;
        break;
    case KN_MAXIMUM:
    case KN_MINIMUM:
        extremum_slopes(g, k->kind == KN_MAXIMUM, d);
        break;
    case KN_POWER:
        power_slopes(g, d);
        break;
    case KN_ATAN2:
        atan2_slopes(g, d);
        break;
    default:
        for (int i = 0; i < 2; i++)
            d[i] = g->want[i] ? slope(g, k, i) : NULL;
    }
}

static bool binary_grad(kn_op_grad *g)
{
    kn_tensor *d[2] = { NULL, NULL };
    slopes(g, g->attr, d);
    for (int i = 0; i < 2; i++)
        if (g->want[i])
            g->din[i] = kn_grad_unbroadcast(g, i, d[i]);
    return kn_ok();
}

#define BINARY_OP(id, text, function, reads, ...)                                                  \
    [KN_##id] = { .name = #text,                                                                   \
                  .attr_size = sizeof(binary_attr),                                                \
                  .save_in = KN_READS_##reads & KN_READS_AB,                                       \
                  .save_out = KN_READS_##reads & KN_READS_OUT ? 1 : 0,                             \
                  .shape = binary_shape,                                                           \
                  .forward = binary_forward,                                                       \
                  .backward = KN_READS_##reads == KN_READS_NO_GRAD ? NULL : binary_grad,           \
                  .on_tape = binary_grad },
KN_OPS(binary_ops, KN_BINARY_KINDS(BINARY_OP));

static kn_tensor *binary(kn_tensor *a, kn_tensor *b, kn_binary kind, double p0)
{
    binary_attr k = { kind, p0 };
    return kn_apply1(&binary_ops[kind], 2, (kn_tensor *[]){ a, b }, 0, &k);
}

#define BINARY_FUNCTION(id, name, function, ...) BINARY_##function(id, name)
#define BINARY_PLAIN(id, name)                                                                     \
    kn_tensor *kn_##name(kn_tensor *a, kn_tensor *b)                                               \
    {                                                                                              \
        return binary(a, b, KN_##id, 0);                                                           \
    }
#define BINARY_PARAMS(id, name) /* below */
KN_BINARY_KINDS(BINARY_FUNCTION)

kn_tensor *kn_add_scaled(kn_tensor *a, kn_tensor *b, double factor)
{
    if (kn_ok() && !isfinite(factor))
        kn_fail("add_scaled: the factor %g should be finite", factor);
    if (kn_ok() && b && kn_dtype_is_int(b->dtype))
        return kn_add(a, kn_scale(b, factor));
    return kn_ok() ? binary(a, b, KN_ADD_SCALED, factor) : NULL;
}

kn_tensor *kn_lerp(kn_tensor *a, kn_tensor *b, double weight)
{
    if (kn_ok() && !isfinite(weight))
        kn_fail("lerp: the weight %g should be finite", weight);
    return kn_ok() ? binary(a, b, KN_LERP, weight) : NULL;
}

/* Which elements aren't 0. */
static kn_tensor *truth(kn_tensor *x)
{
    return !kn_ok() || !x || x->dtype == KN_BOOL ? x : kn_ne(x, kn_number_like(x, 0));
}

kn_tensor *kn_logical_and(kn_tensor *a, kn_tensor *b)
{
    return binary(truth(a), truth(b), KN_AND, 0);
}
kn_tensor *kn_logical_or(kn_tensor *a, kn_tensor *b)
{
    return binary(truth(a), truth(b), KN_OR, 0);
}
kn_tensor *kn_logical_xor(kn_tensor *a, kn_tensor *b)
{
    return binary(truth(a), truth(b), KN_XOR, 0);
}
kn_tensor *kn_logical_not(kn_tensor *x)
{
    return unary(truth(x), KN_NOT, 0, 0);
}

/* A comparison with a number that x can hold. */
#define WITH_NUMBER(name)                                                                          \
    kn_tensor *kn_##name##_scalar(kn_tensor *x, double value)                                      \
    {                                                                                              \
        return takes_number(#name "_scalar", x, value, true)                                       \
                   ? kn_##name(x, kn_number_like(x, value))                                        \
                   : NULL;                                                                         \
    }
WITH_NUMBER(eq)
WITH_NUMBER(ne)
WITH_NUMBER(lt)
WITH_NUMBER(le)
WITH_NUMBER(gt)
WITH_NUMBER(ge)
