/* autograd/slopes.c: derivatives of unary operations as operations, for gradients that are
 * differentiated in turn.
 *
 * The row of a kind (kernels/kinds.h) has the formula of dx. Here its text is read, and each word
 * becomes an operation on tensors, whose own derivative is known in the same way. So a kind has
 * derivatives of every order by its row alone.
 *
 *   sum     product { (+ | -) product }
 *   product factor { (* | /) factor }
 *   factor  - factor | number | ( sum ) | name | name ( sum { , sum } )
 *
 * The name of a kind, as v_exp, is its operation; shorts are words that are formulas again. */
#include "autograd/ops.h"
#include "autograd/second.h"
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GRADIENT(id, name, function, reads, dtypes, domain, work, formula, gradient)               \
    [KN_##id] = #gradient,
static const char *const gradients[] = { KN_UNARY_KINDS(GRADIENT) };

/* Words in x. */
static const struct {
    const char *word, *text;
} shorts[] = {
    { "softplus", "-v_logsigmoid(-x)" },
    { "normal_cdf", "0.5 + 0.5 * v_erf(0.70710678118654752440 * x)" },
    { "gelu_slope", "v_normal_cdf(x) + x * (0.39894228040143267794 * v_exp(-0.5 * x * x))" },
    { "gated_slope", "v_sigmoid(x) * (1 + x * v_sigmoid(-x))" },
    { "twice_u", "1.59576912160573071176 * x * (1 + 0.044715 * x * x)" },
    { "twice_u_slope", "1.59576912160573071176 * (1 + 0.134145 * x * x)" },
    { "gelu_tanh_slope", "v_sigmoid(v_twice_u(x)) * "
                         "(1 + x * v_sigmoid(-v_twice_u(x)) * v_twice_u_slope(x))" },
    { "mish_slope", "v_tanh(v_softplus(x)) + "
                    "x * v_sigmoid(x) * (1 - v_square(v_tanh(v_softplus(x))))" },
    { "hardswish_slope", "v_sel(v_le(x, -3), 0, v_sel(v_ge(x, 3), 1, (x + 1.5) / 3))" },
};
enum { SHORTS = sizeof shorts / sizeof *shorts };

/* A tensor, or where that is NULL a number. */
typedef struct value {
    kn_tensor *t;
    double n;
} value;

typedef struct reader {
    const char *at;
    value x, y, d, p0, p1;
} reader;

static value sum(reader *r);

static value number(double n)
{
    return (value){ NULL, n };
}

static value tensor(kn_tensor *t)
{
    return (value){ t, 0 };
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static value add(value a, value b)
{
    if (a.t && b.t)
        return tensor(kn_add(a.t, b.t));
    if (a.t || b.t)
        return tensor(kn_add_scalar(a.t ? a.t : b.t, a.t ? b.n : a.n));
    return number(a.n + b.n);
}

static value negative(value a)
{
    return a.t ? tensor(kn_neg(a.t)) : number(-a.n);
}

static value times(value a, value b)
{
    if (a.t && b.t)
        return tensor(kn_mul(a.t, b.t));
    if (a.t || b.t)
        return tensor(kn_scale(a.t ? a.t : b.t, a.t ? b.n : a.n));
    return number(a.n * b.n);
}

static value over(value a, value b)
{
    if (b.t)
        return a.t ? tensor(kn_div(a.t, b.t)) : times(a, tensor(kn_reciprocal(b.t)));
    return a.t ? tensor(kn_scale(a.t, 1 / b.n)) : number(a.n / b.n);
}

/* a < b and the like: a tensor of bools, or of numbers 0 or 1. */
static value compare(const char *word, value a, value b)
{
    static const struct {
        const char *word;
        kn_tensor *(*of)(kn_tensor *, kn_tensor *);
    } all[] = { { "lt", kn_lt }, { "le", kn_le }, { "gt", kn_gt },
                { "ge", kn_ge }, { "eq", kn_eq }, { "ne", kn_ne } };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (strcmp(word, all[i].word) != 0)
            continue;
        if (a.t || b.t)
            return tensor(all[i].of(a.t ? a.t : kn_number_like(b.t, a.n),
                                    b.t ? b.t : kn_number_like(a.t, b.n)));
        const bool less = a.n<b.n, more = a.n> b.n;
        return number(i == 0   ? less
                      : i == 1 ? !more
                      : i == 2 ? more
                      : i == 3 ? !less
                               : (i == 5) == (less || more));
    }
    kn_fail("no comparison '%s'", word);
    return number(0);
}

static value choose(value mask, value a, value b)
{
    if (!mask.t)
        return mask.n != 0 ? a : b;
    kn_tensor *like = a.t ? a.t : b.t;
    if (!like)
        return number(a.n == b.n ? a.n : NAN);
    return tensor(kn_where(mask.t, a.t ? a.t : kn_number_like(like, a.n),
                           b.t ? b.t : kn_number_like(like, b.n)));
}

/* ---- reading --------------------------------------------------------------------------------- */

static char peek(reader *r)
{
    while (isspace((unsigned char)*r->at))
        r->at++;
    return *r->at;
}

static bool next(reader *r, char c)
{
    const bool is = peek(r) == c;
    r->at += is;
    return is;
}

static bool read_name(reader *r, char *name, size_t size)
{
    size_t n = 0;
    while (n + 1 < size && (isalnum((unsigned char)*r->at) || *r->at == '_'))
        name[n++] = *r->at++;
    name[n] = 0;
    return n > 0;
}

/* A value that isn't taken must bring no NaN into the gradient: its x is 0.5 there, where every
 * formula is finite. */
static value select_words(reader *r)
{
    const value x = r->x, mask = sum(r);
    const value safe = x.t && mask.t ? tensor(kn_number_like(x.t, 0.5)) : x;
    next(r, ',');
    r->x = mask.t && x.t ? choose(mask, x, safe) : x;
    const value a = sum(r);
    next(r, ',');
    r->x = mask.t && x.t ? choose(mask, safe, x) : x;
    const value b = sum(r);
    r->x = x;
    return choose(mask, a, b);
}

static value in_short(const reader *r, const char *text, value x)
{
    reader inner = *r;
    inner.at = text;
    inner.x = x;
    return sum(&inner);
}

static value unary_word(const reader *r, const char *word, value x)
{
    for (int i = 0; i < SHORTS; i++)
        if (strcmp(word, shorts[i].word) == 0)
            return in_short(r, shorts[i].text, x);
    for (int k = 0; k < KN_UNARY_COUNT; k++)
        if (strcmp(word, kn_unary_row((kn_unary)k)->name) == 0 && x.t)
            return tensor(kn_unary_of(x.t, (kn_unary)k));
    kn_fail("the formula of a derivative has the word v_%s, which is no operation", word);
    return number(0);
}

/* A word of several values. */
static value word_of(const char *word, int n, const value *v)
{
    if (n == 3 && strcmp(word, "ratio") == 0)
        return times(v[0], over(v[1], v[2]));
    if (n == 3 && strcmp(word, "fma") == 0)
        return add(times(v[0], v[1]), v[2]);
    if (n == 2 && strcmp(word, "pow") == 0 && v[0].t && !v[1].t)
        return tensor(kn_pow(v[0].t, v[1].n));
    if (n == 2 && strcmp(word, "over") == 0)
        return over(v[0], v[1]);
    if (n == 4 && strcmp(word, "inside") == 0)
        return choose(compare("gt", v[0], v[1]), choose(compare("lt", v[0], v[2]), v[3], number(0)),
                      number(0));
    if (n == 2)
        return compare(word, v[0], v[1]);
    kn_fail("the formula of a derivative has the word v_%s of %d values", word, n);
    return number(0);
}

static value word(reader *r, const char *name)
{
    value v[4] = { { NULL, 0 } };
    int n = 0;
    if (strcmp(name, "sel") == 0)
        v[0] = select_words(r);
    else if (!next(r, ')'))
        do
            v[n++] = sum(r);
        while (n < 4 && next(r, ','));
    else
        return number(0); /* v_zero() */
    next(r, ')');
    if (n == 0 || (n == 1 && strcmp(name, "set1") == 0))
        return v[0];
    return n == 1 ? unary_word(r, name, v[0]) : word_of(name, n, v);
}

static value factor(reader *r)
{
    char name[32];
    if (next(r, '-'))
        return negative(factor(r));
    if (next(r, '(')) {
        const value v = sum(r);
        next(r, ')');
        return v;
    }
    if (isdigit((unsigned char)peek(r))) {
        char *end;
        const double n = strtod(r->at, &end);
        r->at = end;
        return number(n);
    }
    if (!read_name(r, name, sizeof name) || !kn_ok())
        kn_fail("the formula of a derivative can't be read at '%.20s'", r->at);
    else if (next(r, '('))
        return word(r, strncmp(name, "v_", 2) == 0 ? name + 2 : name);
    return name[0] == 'x'   ? r->x
           : name[0] == 'y' ? r->y
           : name[0] == 'd' ? r->d
           : name[1] == '0' ? r->p0
                            : r->p1;
}

static value product(reader *r)
{
    value v = factor(r);
    for (;;) {
        if (next(r, '*'))
            v = times(v, factor(r));
        else if (next(r, '/'))
            v = over(v, factor(r));
        else
            return v;
    }
}

static value sum(reader *r)
{
    value v = product(r);
    for (;;) {
        if (next(r, '+'))
            v = add(v, product(r));
        else if (next(r, '-'))
            v = add(v, negative(product(r)));
        else
            return v;
    }
}

kn_tensor *kn_slope_on_tape(kn_unary kind, kn_tensor *d, kn_tensor *x, kn_tensor *y, double p0,
                            double p1)
{
    const kn_dtype dtype = d->dtype, wide = kn_wide_dtype(dtype);
    d = kn_cast(d, wide);
    reader r = { .at = gradients[kind], .d = tensor(d), .p0 = number(p0), .p1 = number(p1) };
    r.x = tensor(x ? kn_cast(x, wide) : NULL);
    r.y = tensor(y ? kn_cast(y, wide) : NULL);
    const value dx = sum(&r);
    if (kn_ok() && peek(&r))
        kn_fail("the formula of a derivative can't be read at '%.20s'", r.at);
    return !kn_ok() ? NULL
           : dx.t   ? kn_cast(dx.t, dtype)
                    : kn_full(dtype, kn_device_of(d), dx.n, d->ndim, d->shape);
}
