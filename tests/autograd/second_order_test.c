/* tests/autograd/second_order_test.c: gradients of gradients (kn_grad_of with .create_graph): those
 * of every operation, against differences, or a refusal that names it; what the gradients do on the
 * tape. Units of fsdp: tests/fsdp/penalty_test.c. */
#include "autograd/function.h"
#include "autograd/gradcheck.h"
#include "nn/layers.h"
#include "tests/autograd/every.h"
#include "tests/owned.h"

/* ---- every operation ------------------------------------------------------------------------- */

/* Sentences of rows with a first derivative only; the line 0 stands for all rows. */
static const struct {
    const char *name, *says;
} first_only[] = {
    { "kn_batch_norm", "'sync_batch_norm" },
    { "kn_ctc_loss", "'ctc_loss'" },
    { "kn_cummin", "'cummin'" },
    { "kn_cummax", "'cummax'" },
    { "kn_cumprod", "'cumprod'" },
    { "kn_logcumsumexp", "'logcumsumexp'" },
    { "kn_recurrent", "'rnn'" },
    { "kn_recurrent", "'lstm'" },
    { "kn_recurrent", "'gru'" },
    { "kn_inv", "'inv'" },
    { "kn_solve", "'solve'" },
    { "kn_cholesky", "'cholesky'" },
    { "kn_det", "'slogdet'" },
    { "kn_slogdet", "'slogdet'" },
    { "kn_eigh", "'eigh'" },
    { "kn_qr", "'qr'" },
    { "kn_svd", "'svd'" },
    { "kn_linear_cross_entropy", "'linear_cross_entropy" },
    { "kn_scatter_reduce", "'scatter_reduce' has" },
    { "kn_index_reduce", "'index_reduce' has" },
    { "kn_segment_reduce", "'segment_reduce' has" },
    { "kn_segment_softmax", "'segment_softmax' has" },
    { "kn_cdist", "'cdist' has" },
    { "kn_digamma", "'digamma' has a first derivative only: that has the word v_trigamma" },
    { "kn_embedding_bag", ".padding_idx isn't there" },
    { "kn_scaled_dot_product_attention",
      "attention: with .dropout it has a first derivative only" },
};

static bool may_refuse(const every_case *c, const char *says)
{
    bool may = false;
    for (size_t i = 0; i < sizeof first_only / sizeof *first_only; i++)
        may = may || (strcmp(c->name, first_only[i].name) == 0 && strstr(says, first_only[i].says));
    return may;
}

typedef struct evaluated {
    const every_case *row;
    const every_set *set;
} evaluated;

static kn_values called(kn_values in, void *arg)
{
    const evaluated *r = arg;
    kn_tensor *x[EVERY_MAX_IN];
    every_inputs(r->set, in.v, x);
    return KN_VALUES(r->row->call(x));
}

/* As compare. */
static void compare_tensors(const char *op, const char *what, kn_tensor *x, kn_tensor *y,
                            double tol)
{
    const int64_t n = kn_numel(x);
    OWNED_BYTES double *a = calloc((size_t)n + 1, sizeof *a), *b = calloc((size_t)n + 1, sizeof *b);
    to_doubles(x, a);
    to_doubles(y, b);
    compare(op, what, a, b, n, tol);
}

/* Gradients with a graph are those without: gradgradcheck sees only that they agree with
 * themselves. */
static void check_first(const every_case *c, const every_set *s, kn_tensor *const *leaf)
{
    kn_tensor *x[EVERY_MAX_IN], *plain[EVERY_MAX_IN], *graph[EVERY_MAX_IN];
    every_inputs(s, leaf, x);
    kn_tensor *y = c->call(x);
    kn_tensor *dy = kn_randn(KN_F64, KN_CPU, 5, 0, kn_ndim(y), kn_shape(y));
    KN_CHECK(kn_grad_of(y, leaf, s->n, plain, .grad = dy, .retain_graph = true) &&
             kn_grad_of(y, leaf, s->n, graph, .grad = dy, .create_graph = true));
    for (int i = 0; i < s->n; i++) {
        KN_CHECK(!plain[i] == !graph[i], "%s (line %d): gradient %d", c->name, c->line, i);
        if (!plain[i])
            continue;
        compare_tensors(c->name, "gradient with a graph", graph[i], plain[i], 1e-10);
    }
}

KN_TEST(second_order, every_operation_has_it_or_refuses)
{
    int checked = 0, refused = 0;
    EACH_CASE(c)
    EACH_SET(c, s)
    {
        IN_SCOPE;
        if (!c->differentiable)
            continue;
        kn_values in = { .n = s.n };
        every_leaves(&s, KN_F64, KN_CPU, in.v);
        if (kn_gradgradcheck(called, in, .arg = &(evaluated){ c, &s }, .one_in = kn_one_in(5))) {
            check_first(c, &s, in.v);
            checked++;
            continue;
        }
        KN_CHECK(may_refuse(c, kn_error()), "%s (line %d) of %d dims, layout %d", c->name, c->line,
                 s.in[0].ndim, (int)s.in[0].how);
        kn_clear_error();
        refused++;
    }
    KN_CHECK(checked > 700 && refused < 90, "%d checked, %d refused", checked, refused);
}

/* In other dtypes and on meta the gradients of gradients have the shapes and dtypes of leaves, and
 * values near those in f64. */
static void penalty_of(const every_case *c, const every_set *s, kn_dtype t, kn_device device,
                       kn_tensor **leaf, kn_tensor **gg)
{
    kn_tensor *x[EVERY_MAX_IN], *g[EVERY_MAX_IN], *sum = NULL;
    every_leaves(s, t, device, leaf);
    every_inputs(s, leaf, x);
    kn_set_step(3);
    kn_tensor *y = c->call(x);
    KN_CHECK(kn_grad_of(y, leaf, s->n, g, .grad = kn_ones_like(y), .create_graph = true), "%s: %s",
             c->name, kn_error() ? kn_error() : "");
    for (int i = 0; i < s->n; i++) {
        gg[i] = NULL;
        if (!g[i])
            continue;
        kn_tensor *term = kn_sum(kn_square(kn_cast(g[i], KN_F64)), 0, NULL, false);
        KN_CHECK(kn_dtype_of(g[i]) == t);
        sum = sum ? kn_add(sum, term) : term;
    }
    if (sum && kn_requires_grad(sum))
        KN_CHECK(kn_grad_of(sum, leaf, s->n, gg), "%s: %s", c->name, kn_error() ? kn_error() : "");
}

KN_TEST(second_order, other_dtypes_and_meta)
{
    EACH_CASE(c)
    EACH_SET(c, s)
    {
        IN_SCOPE;
        bool refuses = !c->differentiable || !c->on_meta;
        for (size_t i = 0; i < sizeof first_only / sizeof *first_only; i++)
            refuses = refuses || strcmp(c->name, first_only[i].name) == 0;
        if (refuses)
            continue;
        kn_tensor *leaf[EVERY_MAX_IN], *meta[EVERY_MAX_IN], *f64[EVERY_MAX_IN], *gg[EVERY_MAX_IN],
            *mm[EVERY_MAX_IN], *dd[EVERY_MAX_IN];
        penalty_of(c, &s, KN_F64, KN_CPU, f64, dd);
        penalty_of(c, &s, KN_BF16, KN_CPU, leaf, gg);
        penalty_of(c, &s, KN_BF16, KN_META, meta, mm);
        for (int i = 0; i < s.n; i++)
            KN_CHECK(!gg[i] == !mm[i] && !gg[i] == !dd[i], "%s: %d", c->name, i);
        penalty_of(c, &s, KN_F32, KN_CPU, leaf, gg);
        for (int i = 0; i < s.n; i++) {
            if (!gg[i])
                continue;
            compare_tensors(c->name, "second gradient", gg[i], dd[i], 2e-3);
        }
    }
}

/* ---- on the tape ----------------------------------------------------------------------------- */

static kn_tensor *leaf_of(int n, const double *v)
{
    return kn_require_grad(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(n)), true);
}

static double at(const kn_tensor *t, int i)
{
    KN_CHECK(t != NULL, "no tensor");
    return ((const double *)kn_data(t))[i];
}

KN_TEST(second_order, goes_on_to_any_order)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *g[5];
    kn_tensor *y = sum_of(kn_pow(x, 4));
    for (int k = 0; k < 5; k++)
        KN_CHECK(kn_grad_of(k ? sum_of(g[k - 1]) : y, &x, 1, &g[k], .create_graph = k < 4));
    /* 4 x^3, 12 x^2, 24 x, 24, 0 */
    KN_CHECK(at(g[0], 0) == 32 && at(g[1], 1) == 108 && at(g[2], 0) == 48 && at(g[3], 1) == 24);
    KN_CHECK(!g[4] || at(g[4], 0) == 0);
    KN_CHECK(kn_requires_grad(g[0]) && kn_requires_grad(g[1]) && !kn_grad(x));
    /* a loss of y and of its gradients */
    KN_CHECK(kn_backward(kn_add(y, sum_of(kn_mul(g[0], g[1])))));
    /* 4 x^3 + d/dx 48 x^5 = 4 x^3 + 240 x^4 */
    KN_CHECK(at(kn_grad(x), 0) == 32 + 240 * 16);
}

KN_TEST(second_order, of_sin_to_the_sixth)
{
    kn_tensor *x = leaf_of(1, (double[]){ 0.7 }), *g = kn_sin(x);
    for (int k = 0; k < 6; k++)
        KN_CHECK(kn_grad_of(sum_of(g), &x, 1, &g, .create_graph = true));
    KN_CHECK(fabs(at(g, 0) + sin(0.7)) < 1e-15, "%.17g", at(g, 0));
}

static kn_tensor *doubled(kn_tensor *g, void *count)
{
    ++*(int *)count;
    return kn_scale(g, 2);
}

KN_TEST(second_order, hooks_are_a_part_of_it)
{
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *h = kn_mul(x, x), *y = kn_mul(h, h), *g;
    int calls[2] = { 0 };
    kn_on_grad(h, doubled, &calls[0]);
    kn_on_grad(x, doubled, &calls[1]);
    KN_CHECK(kn_grad_of(sum_of(y), &x, 1, &g, .create_graph = true));
    KN_CHECK(calls[0] == 1 && calls[1] == 1 && at(g, 0) == 4 * 4 * 27); /* 2 2 4 x^3 */
    /* g = 4 x (2 (2 h)): by x 16 h; by h 16 x, which h's hook doubles; all doubled again */
    KN_CHECK(kn_backward(sum_of(g)) && at(kn_grad(x), 0) == 2 * (16 * 9 + 2 * 16 * 3 * 2 * 3));
}

KN_TEST(second_order, of_given_gradients_and_tensors_in_the_middle)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *v = leaf_of(2, (double[]){ 5, 7 }), *g[3];
    kn_tensor *other = leaf_of(1, (double[]){ 1 }), *h = kn_square(x), *y = kn_mul(h, x);
    KN_CHECK(
        kn_grad_of(y, ((kn_tensor *[]){ x, h, other }), 3, g, .grad = v, .create_graph = true));
    KN_CHECK(at(g[0], 0) == 3 * 4 * 5 && at(g[1], 1) == 3 * 7 && !g[2]);
    /* linear in v: the gradient by v of <g, w> is the product of the derivative with w */
    kn_tensor *w = kn_from(KN_F64, KN_CPU, (double[]){ 1, 10 }, KN_SHAPE(2)), *jw;
    KN_CHECK(kn_grad_of(g[0], &v, 1, &jw, .grad = w, .retain_graph = true));
    KN_CHECK(at(jw, 0) == 12 && at(jw, 1) == 270);
    KN_CHECK(kn_backward(sum_of(g[1])) && at(kn_grad(v), 1) == 3 && at(kn_grad(x), 1) == 7);
}

KN_TEST(second_order, weights_of_a_net_get_a_penalty)
{
    kn_tensor *w = leaf_of(1, (double[]){ 3 }), *x = leaf_of(1, (double[]){ 2 }), *g;
    kn_tensor *y = sum_of(kn_mul(kn_square(w), kn_square(x))); /* g = 2 w^2 x */
    const bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_grad_of(y, &x, 1, &g, .create_graph = true) && kn_requires_grad(g));
    KN_CHECK(!kn_grad_mode());
    kn_set_grad_mode(mode);
    KN_CHECK(kn_backward(sum_of(kn_square(g))) && at(kn_grad(w), 0) == 16.0 * 27 * 4);
}

/* A value that isn't taken, and is infinite, brings no NaN. */
KN_TEST(second_order, untaken_sides_of_formulas_stay_finite)
{
    kn_tensor *x = leaf_of(3, (double[]){ 1e3, -1e3, 0.5 }), *g, *gg;
    kn_tensor *y[] = { kn_elu(x),       kn_softplus(x), kn_gelu(x),      kn_silu(x),
                       kn_gelu_tanh(x), kn_mish(x),     kn_hardswish(x), kn_sigmoid(x) };
    for (size_t i = 0; i < sizeof y / sizeof *y; i++) {
        KN_CHECK(kn_grad_of(sum_of(y[i]), &x, 1, &g, .create_graph = true));
        KN_CHECK(kn_grad_of(sum_of(g), &x, 1, &gg));
        for (int k = 0; k < 3; k++)
            KN_CHECK(isfinite(at(g, k)) && isfinite(at(gg, k)) && (k == 2 || at(gg, k) == 0),
                     "%zu at %d: %g, %g", i, k, at(g, k), at(gg, k));
    }
}

KN_TEST(second_order, of_a_power_of_zero_is_finite)
{
    kn_tensor *in[] = { leaf_of(2, (double[]){ 0, 2 }), leaf_of(2, (double[]){ 2, 3 }) };
    kn_tensor *y = sum_of(kn_pow_tensor(in[0], in[1])), *g[2], *gg[2];
    KN_CHECK(kn_grad_of(y, in, 2, g, .create_graph = true));
    KN_CHECK(at(g[0], 0) == 0 && at(g[0], 1) == 12 && at(g[1], 0) == 0);
    KN_CHECK(kn_grad_of(sum_of(g[1]), in, 2, gg)); /* of a^b log a: a^(b - 1) (b log a + 1) */
    KN_CHECK(at(gg[0], 0) == 0 && fabs(at(gg[0], 1) - 4 * (3 * log(2) + 1)) < 1e-14);
}

/* ---- functions of the user's own, and refusals ----------------------------------------------- */

static kn_values cube_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *x = in.v[0], *square = kn_mul(x, x), *y = kn_mul(square, x);
    kn_save_for_backward(run, x, *(const bool *)run->arg ? square : NULL, y);
    return KN_VALUES(y);
}

static kn_values cube_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = run->saved.v[0], *y = run->saved.v[2]; /* 3 y / x */
    return KN_VALUES(kn_mul(dout.v[0], kn_scale(kn_div(y, x), 3)));
}

KN_TEST(second_order, of_a_function)
{
    kn_function cube = { .name = "cube", .forward = cube_forward, .backward = cube_backward };
    kn_tensor *x = leaf_of(1, (double[]){ 2 }), *g;
    bool more = false;
    kn_tensor *y = kn_function_call_n(&cube, KN_VALUES(x), &more, sizeof more).v[0];
    REFUSED(kn_grad_of(y, &x, 1, &g, .create_graph = true), "'cube' has a first derivative only");
    cube.second_order = true;
    y = kn_function_call_n(&cube, KN_VALUES(x), &more, sizeof more).v[0];
    KN_CHECK(kn_grad_of(y, &x, 1, &g, .create_graph = true) && at(g, 0) == 12);
    KN_CHECK(kn_backward(g) && at(kn_grad(x), 0) == 12);
    more = true;
    y = kn_function_call_n(&cube, KN_VALUES(x), &more, sizeof more).v[0];
    REFUSED(kn_grad_of(y, &x, 1, &g, .create_graph = true),
            "saved tensor 2 is neither an input nor a result");
}

KN_TEST(second_order, refusals_run_nothing)
{
    kn_tensor *x = leaf_of(2, (double[]){ 1, 2 }), *g;
    OWNED_MODULE kn_linear fc;
    KN_CHECK(kn_linear_init(&fc, NULL, "", 2, 2, .dtype = KN_F64));
    kn_recompute(&fc, true);
    int calls = 0;
    kn_tensor *y = sum_of(kn_call(&fc, kn_reshape(x, KN_SHAPE(1, 2))));
    kn_on_grad(y, doubled, &calls);
    REFUSED(kn_grad_of(y, &x, 1, &g, .create_graph = true, .retain_graph = true),
            "that recomputes, whose values aren't kept");
    KN_CHECK(calls == 0 && kn_grad_of(y, &x, 1, &g) && calls == 1);
    kn_tensor *z = kn_mul(x, x);
    KN_CHECK(kn_grad_of(sum_of(z), &x, 1, &g));
    REFUSED(kn_add(x, g), "a gradient of kn_grad_of without .create_graph");
}

/* ---- the check ------------------------------------------------------------------------------- */

/* The derivative 3 x^2 is right, what it says of its own isn't: x is a constant there. */
static kn_values half_known(kn_function_run *run, kn_values dout)
{
    kn_tensor *x = kn_detach(run->saved.v[0]);
    return KN_VALUES(kn_mul(dout.v[0], kn_scale(kn_mul(x, x), 3)));
}

static kn_values half_known_cube(kn_values in, void *arg)
{
    const bool none = false;
    return kn_function_call_n(arg, in, &none, sizeof none);
}

KN_TEST(second_order, gradgradcheck_finds_wrong_ones)
{
    kn_function cube = {
        .name = "cube", .forward = cube_forward, .backward = half_known, .second_order = true
    };
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 });
    KN_CHECK(kn_gradcheck(half_known_cube, KN_VALUES(x), .arg = &cube));
    REFUSED(kn_gradgradcheck(half_known_cube, KN_VALUES(x), .arg = &cube), "gradcheck: input 1");
    cube.backward = cube_backward;
    KN_CHECK(kn_gradgradcheck(half_known_cube, KN_VALUES(x), .arg = &cube));
    REFUSED(kn_gradgradcheck(NULL, KN_VALUES(x)), "needs a function");
    REFUSED(kn_gradgradcheck(half_known_cube, KN_VALUES(kn_detach(x)), .arg = &cube),
            "no input requires grad");
}
