/* autograd/gradcheck.c: gradients against central differences (gradcheck.h). Everything runs on
 * copies of the inputs, so that one element at a time can be moved, and in f64. */
#include "autograd/gradcheck.h"
#include "autograd/engine.h"
#include "kernels/memory_internal.h"
#include <math.h>
#include <string.h>

/* How backward is checked. */
typedef enum turn { CONTIGUOUS = 0, STRIDED, TWICE, TURNS } turn;

typedef struct check {
    kn_gradcheck_fn fn;
    kn_gradcheck_options o;
    kn_values given;
    kn_rng_key rng;                 /* of each evaluation */
    kn_tensor *copy[KN_MAX_VALUES]; /* of inputs whose gradient is checked, else NULL; kept */
    kn_catch caught[KN_MAX_VALUES]; /* the copies' gradients by backward */
    double *slope[KN_MAX_VALUES];   /* by differences, of the elements that are compared */
    double *room; /* of as many doubles as the largest input or result has elements */
    int64_t roomy;
    bool counts[KN_MAX_VALUES]; /* result k is a part of L */
    /* the element that is furthest off, and how many are off */
    int input;
    int64_t element, off;
    turn turn;
    double got, want, excess;
} check;

/* ---- numbers --------------------------------------------------------------------------------- */

/* In [-1, 1): a function of its place. */
static double weight(const check *c, int result, int64_t i)
{
    const uint64_t h = kn_hash64(kn_hash64(c->o.seed, (uint64_t)result), (uint64_t)i);
    return (double)(h >> 11) / 4503599627370496.0 - 1;
}

static bool make_room(check *c, int64_t n)
{
    return kn_host_grow(&c->room, &c->roomy, n, sizeof *c->room);
}

/* The elements of t in c->room. */
static bool fetch(check *c, const kn_tensor *t)
{
    kn_tensor *d = kn_empty(KN_F64, kn_device_of(t), t->ndim, t->shape);
    const int64_t n = kn_numel(t);
    return d && kn_copy_(d, t) && make_room(c, n) &&
           kn_to_host(d, c->room, (size_t)n * sizeof *c->room);
}

/* Where element i of t, counted row by row, lies. */
static int64_t place_of(const kn_tensor *t, int64_t i)
{
    int64_t at = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        at += i % t->shape[d] * t->stride[d];
        i /= t->shape[d];
    }
    return at;
}

static bool set_element(kn_tensor *t, int64_t i, double value)
{
    kn_tensor *one = kn_tensor_alias(t, place_of(t, i), KN_SCALAR, NULL);
    return one && kn_fill_(one, value);
}

/* ---- inputs and weights ---------------------------------------------------------------------- */

/* A tensor like t with gaps between its elements, the first dim's side by side. */
static kn_tensor *with_gaps(const kn_tensor *t, kn_dtype dtype)
{
    int64_t stride[KN_MAX_DIMS], n = 2;
    for (int d = 0; d < t->ndim; d++) {
        stride[d] = n;
        n *= t->shape[d] ? t->shape[d] : 1;
    }
    kn_tensor *base = kn_zeros(dtype, kn_device_of(t), KN_SHAPE(2 * kn_numel(t) + 1));
    return base ? kn_tensor_alias(base, 1, t->ndim, t->shape, stride) : NULL;
}

static kn_tensor *make_copy(const kn_tensor *t, turn how)
{
    kn_tensor *copy = how == STRIDED ? with_gaps(t, KN_F64)
                                     : kn_empty(KN_F64, kn_device_of(t), t->ndim, t->shape);
    return copy && kn_copy_(copy, t) ? kn_require_grad(copy, true) : NULL;
}

/* Copies of the inputs whose gradients are checked; where one is given twice, the same copy. */
static bool make_copies(check *c, turn how)
{
    for (int i = 0; i < c->given.n; i++) {
        kn_tensor *t = c->given.v[i], *copy = NULL;
        kn_tensor_free(c->copy[i]);
        c->copy[i] = NULL;
        if (!t || !t->requires_grad)
            continue;
        for (int k = 0; k < i; k++)
            copy = c->given.v[k] == t ? c->copy[k] : copy;
        copy = copy ? copy : make_copy(t, how);
        if (!copy)
            return false;
        c->copy[i] = kn_tensor_ref(copy);
    }
    return true;
}

/* Input i is checked at its first use. */
static bool is_first(const check *c, int i)
{
    bool first = c->copy[i] != NULL;
    for (int k = 0; k < i; k++)
        first = first && c->copy[k] != c->copy[i];
    return first;
}

static kn_tensor *weights_of(check *c, int result, const kn_tensor *y, double factor, turn how)
{
    const int64_t n = kn_numel(y);
    if (!make_room(c, n))
        return NULL;
    for (int64_t i = 0; i < n; i++)
        c->room[i] = factor * weight(c, result, i);
    kn_tensor *w = kn_from(KN_F64, kn_device_of(y), c->room, y->ndim, y->shape);
    kn_tensor *as = how == STRIDED ? with_gaps(y, y->dtype)
                                   : kn_empty(y->dtype, kn_device_of(y), y->ndim, y->shape);
    return w && as && kn_copy_(as, w) ? as : NULL;
}

/* ---- the two gradients ----------------------------------------------------------------------- */

static kn_values evaluate(check *c)
{
    kn_values in = c->given;
    for (int i = 0; i < in.n; i++)
        in.v[i] = c->copy[i] ? c->copy[i] : in.v[i];
    kn_context_get()->rng = c->rng;
    kn_values out = c->fn(in, c->o.arg);
    if (kn_ok() && (out.n < 1 || out.n > KN_MAX_VALUES))
        kn_fail("gradcheck: the function returned %d results, not 1 to %d", out.n, KN_MAX_VALUES);
    for (int k = 0; k < out.n && kn_ok(); k++)
        kn_check(out.v[k], "gradcheck: a result");
    return kn_ok() ? out : (kn_values){ 0 };
}

static bool sum_of_results(check *c, double *sum)
{
    kn_scope scope = kn_scope_begin();
    kn_values out = evaluate(c);
    *sum = 0;
    for (int k = 0; k < out.n && kn_ok(); k++) {
        if (!c->counts[k] || !fetch(c, out.v[k]))
            continue;
        for (int64_t i = 0; i < kn_numel(out.v[k]); i++)
            *sum += weight(c, k, i) * c->room[i];
    }
    kn_scope_end(scope);
    return kn_ok();
}

static int64_t first_element(const check *c, const kn_tensor *t)
{
    return kn_numel(t) / 2 % c->o.one_in;
}

/* Slopes of L by differences. */
static bool measure(check *c, int i)
{
    kn_tensor *x = c->copy[i];
    const int64_t n = kn_numel(x);
    double up = 0, down = 0, *before = kn_host_calloc((size_t)n + 1, sizeof *before);
    c->slope[i] = kn_host_calloc((size_t)n + 1, sizeof *c->slope[i]);
    bool ok = before && c->slope[i] && kn_to_host(x, before, (size_t)n * sizeof *before);
    for (int64_t e = first_element(c, x); ok && e < n; e += c->o.one_in) {
        ok = set_element(x, e, before[e] + c->o.eps) && sum_of_results(c, &up) &&
             set_element(x, e, before[e] - c->o.eps) && sum_of_results(c, &down) &&
             set_element(x, e, before[e]);
        c->slope[i][e] = (up - down) / (2 * c->o.eps);
    }
    kn_host_free(before);
    return ok;
}

static void drop_caught(check *c)
{
    for (int i = 0; i < KN_MAX_VALUES; i++) {
        kn_tensor_free(c->caught[i].grad);
        c->caught[i] = (kn_catch){ 0 };
    }
}

/* Runs backward for the copies alone; in TWICE, from two calls with a quarter and three quarters
 * of the weights. */
static bool run_backward(check *c, turn how)
{
    kn_node *root[2 * KN_MAX_VALUES];
    kn_tensor *grad[2 * KN_MAX_VALUES];
    int index[2 * KN_MAX_VALUES], roots = 0;
    kn_engine e = { .caught = c->caught, .catches = c->given.n };
    drop_caught(c);
    for (int i = 0; i < c->given.n; i++)
        c->caught[i].input = c->copy[i];
    for (int call = 0; call < (how == TWICE ? 2 : 1) && kn_ok(); call++) {
        const double factor = how != TWICE ? 1 : call ? 0.75 : 0.25;
        kn_values out = evaluate(c);
        for (int k = 0; k < out.n; k++) {
            kn_tensor *y = out.v[k];
            if (!c->counts[k] || !y->requires_grad)
                continue;
            if (!y->node && !(y = kn_scale(y, 1))) /* an input itself: a pass begins at a node */
                return false;
            root[roots] = y->node;
            index[roots] = y->out_index;
            grad[roots] = weights_of(c, k, y, factor, how);
            if (!grad[roots++])
                return false;
        }
    }
    return kn_ok() && (roots == 0 || kn_engine_run(&e, root, index, grad, roots));
}

/* Which results are a part of L: those that require grad; all floats where none does. */
static bool choose_results(check *c)
{
    kn_values out = evaluate(c);
    bool any = false;
    for (int k = 0; k < out.n; k++)
        any = any || out.v[k]->requires_grad;
    for (int k = 0; k < out.n; k++)
        c->counts[k] = any ? out.v[k]->requires_grad : kn_dtype_is_float(out.v[k]->dtype);
    return kn_ok();
}

/* ---- comparing ------------------------------------------------------------------------------- */

static bool compare(check *c, int i, turn how)
{
    const kn_tensor *x = c->copy[i], *dx = c->caught[i].grad;
    const int64_t n = kn_numel(x);
    if (dx && !fetch(c, dx))
        return false;
    for (int64_t e = first_element(c, x); e < n; e += c->o.one_in) {
        const double got = dx ? c->room[e] : 0, want = c->slope[i][e];
        const double excess = fabs(got - want) - (c->o.atol + c->o.rtol * fabs(want));
        if (excess <= 0)
            continue;
        c->off++;
        if (c->off > 1 && !(excess > c->excess) && !isnan(excess))
            continue;
        c->input = i;
        c->element = e;
        c->turn = how;
        c->got = got;
        c->want = want;
        c->excess = excess;
    }
    return kn_ok();
}

static bool report(const check *c)
{
    static const char *const when[TURNS] = {
        [STRIDED] = ", with inputs and gradients that aren't contiguous",
        [TWICE] = ", with two calls before one backward",
    };
    const kn_tensor *x = c->given.v[c->input];
    char index[16 * KN_MAX_DIMS] = "", shape[128];
    int64_t rest = c->element, size = kn_numel(x);
    for (int d = 0; d < x->ndim; d++) {
        const size_t used = strlen(index);
        size /= x->shape[d];
        snprintf(index + used, sizeof index - used, "%s%lld", d ? "," : "",
                 (long long)(rest / size));
        rest %= size;
    }
    return kn_fail("gradcheck: input %d %s, element [%s]: backward gives %.10g, differences give "
                   "%.10g; they differ by %.3g, allowed is %.3g%s (%lld elements are off)",
                   c->input + 1, kn_describe(x, shape, sizeof shape), index, c->got, c->want,
                   fabs(c->got - c->want), c->o.atol + c->o.rtol * fabs(c->want),
                   when[c->turn] ? when[c->turn] : "", (long long)c->off);
}

/* One way of running backward; the first also measures. */
static bool take_turn(check *c, turn how)
{
    kn_scope scope = kn_scope_begin();
    bool ok = make_copies(c, how) && (how != CONTIGUOUS || choose_results(c));
    for (int i = 0; i < c->given.n && ok && how == CONTIGUOUS; i++)
        ok = !is_first(c, i) || measure(c, i);
    ok = ok && run_backward(c, how);
    for (int i = 0; i < c->given.n && ok; i++)
        ok = !is_first(c, i) || compare(c, i, how);
    kn_scope_end(scope);
    return ok && (c->off == 0 || report(c));
}

/* ---- the check ------------------------------------------------------------------------------- */

static bool check_inputs(const check *c)
{
    bool any = false;
    if (!c->fn)
        return kn_fail("gradcheck: no function");
    if (c->given.n < 1 || c->given.n > KN_MAX_VALUES)
        return kn_fail("gradcheck: takes 1 to %d inputs, got %d", KN_MAX_VALUES, c->given.n);
    for (int i = 0; i < c->given.n; i++) {
        const kn_tensor *t = c->given.v[i];
        if (t && !kn_check(t, "gradcheck"))
            return false;
        if (!t || !t->requires_grad)
            continue;
        any = true;
        if (t->dtype != KN_F64 || kn_device_of(t) == KN_META)
            return kn_fail("gradcheck: input %d is %s on %s; differences need f64 and values",
                           i + 1, KN_SHOWN(t), kn_device_name(kn_device_of(t)));
    }
    return any || kn_fail("gradcheck: no input requires grad (kn_require_grad)");
}

static bool read_options(kn_gradcheck_options *o)
{
    o->eps = o->eps != 0 ? o->eps : 1e-5;
    o->atol = kn_value_or(o->atol, 1e-6);
    o->rtol = kn_value_or(o->rtol, 1e-6);
    o->one_in = o->one_in ? o->one_in : 1;
    return (o->eps > 0 && o->eps < 1 && o->atol >= 0 && o->rtol >= 0 && isfinite(o->atol) &&
            isfinite(o->rtol) && o->one_in > 0) ||
           kn_fail("gradcheck: eps is %g, atol %g, rtol %g, one_in %lld; eps should lie in (0, 1), "
                   "the others be positive",
                   o->eps, o->atol, o->rtol, (long long)o->one_in);
}

bool kn_gradcheck_(kn_gradcheck_fn fn, kn_values in, kn_gradcheck_options o)
{
    kn_context *ctx = kn_context_get();
    check c = { .fn = fn, .given = in, .rng = ctx->rng };
    if (!kn_ok() || !read_options(&o))
        return false;
    c.o = o;
    if (!check_inputs(&c))
        return false;
    const bool mode = kn_set_grad_mode(true);
    bool ok = true;
    for (int how = 0; how < TURNS && ok; how++)
        ok = take_turn(&c, (turn)how);
    drop_caught(&c);
    for (int i = 0; i < in.n; i++) {
        kn_tensor_free(c.copy[i]);
        kn_host_free(c.slope[i]);
    }
    kn_host_free(c.room);
    kn_set_grad_mode(mode);
    ctx->rng = c.rng;
    return ok;
}
