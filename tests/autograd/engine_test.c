/* tests/autograd/engine_test.c: the backward pass: accumulation, freed graphs, writes in place,
 * hooks, ownership, long chains. */
#include "autograd/autograd_internal.h"
#include "tests/owned.h"

static kn_tensor *leaf_of(int n, const double *v)
{
    return kn_require_grad(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(n)), true);
}

static double at(kn_tensor *t, int i)
{
    KN_CHECK(t != NULL, "no tensor");
    return ((double *)kn_data(t))[i];
}

KN_TEST(engine, two_backwards_add_up)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 });
    KN_CHECK(kn_grad(x) == NULL && kn_ok());
    KN_CHECK(kn_backward(sum_of(kn_mul(x, x))));
    KN_CHECK(at(kn_grad(x), 0) == 4 && at(kn_grad(x), 1) == 6);
    KN_CHECK(kn_backward(sum_of(kn_scale(x, 10))));
    KN_CHECK(at(kn_grad(x), 0) == 14 && at(kn_grad(x), 1) == 16);
    kn_clear_grad(x);
    KN_CHECK(kn_grad(x) == NULL);
}

KN_TEST(engine, retained_graph_runs_again)
{
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *y = sum_of(kn_mul(x, x));
    KN_CHECK(kn_backward(y, .retain_graph = true));
    KN_CHECK(kn_backward(y, .retain_graph = true));
    KN_CHECK(at(kn_grad(x), 0) == 12);
    KN_CHECK(kn_backward(y) && at(kn_grad(x), 0) == 18);
    REFUSED(kn_backward(y), "retain_graph");
    KN_CHECK(at(kn_grad(x), 0) == 18);
}

KN_TEST(engine, second_backward_through_a_shared_part)
{
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *shared = kn_mul(x, x);
    kn_tensor *a = sum_of(kn_exp(shared)), *b = sum_of(shared);
    KN_CHECK(kn_backward(a));
    REFUSED(kn_backward(b), "were freed by an earlier backward");
}

KN_TEST(engine, writes_in_place_are_noticed)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *y = kn_scale(x, 2);
    kn_tensor *z = sum_of(kn_mul(y, y));
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_fill_(y, 1));
    kn_set_grad_mode(mode);
    REFUSED(kn_backward(z), "written in place");
    KN_CHECK(kn_grad(x) == NULL);
    REFUSED(kn_fill_(x, 1), "writing in place");
    /* the output, where the derivative reads it */
    y = kn_exp(x);
    kn_set_grad_mode(false);
    kn_fill_(y, 1);
    kn_set_grad_mode(true);
    REFUSED(kn_backward(sum_of(y)), "output 1");
    /* a tensor that no derivative reads may be written */
    y = kn_scale(x, 2);
    z = sum_of(kn_scale(y, 3));
    kn_set_grad_mode(false);
    kn_fill_(y, 1);
    kn_set_grad_mode(true);
    KN_CHECK(kn_backward(z) && at(kn_grad(x), 0) == 6);
}

KN_TEST(engine, no_grad_leaves_no_node)
{
    kn_tensor *x = leaf_of(1, (double[]){ 3 });
    KN_CHECK(kn_set_grad_mode(false));
    kn_tensor *y = kn_mul(x, x);
    KN_CHECK(!kn_set_grad_mode(true));
    KN_CHECK(!y->node && !kn_requires_grad(y));
    REFUSED(kn_backward(y), "no graph");
    kn_tensor *d = kn_detach(kn_mul(x, x));
    KN_CHECK(!d->node && !kn_requires_grad(d) && at(d, 0) == 9);
    kn_tensor *c = leaf_of(1, (double[]){ 1 });
    kn_require_grad(c, false);
    KN_CHECK(!kn_requires_grad(kn_mul(c, c)));
}

KN_TEST(engine, diamonds_and_shared_leaves)
{
    /* y = (x^2 + 2x)(x^2 - x), dy/dx = (2x + 2)(x^2 - x) + (x^2 + 2x)(2x - 1) */
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *s = kn_mul(x, x);
    kn_tensor *a = kn_add(s, kn_scale(x, 2)), *b = kn_sub(s, x);
    KN_CHECK(kn_backward(sum_of(kn_mul(a, b))));
    KN_CHECK(at(kn_grad(x), 0) == 8 * 6 + 15 * 5, "%g", at(kn_grad(x), 0));
    kn_clear_grad(x);
    /* one leaf as both inputs, through views, whose gradients pass unchanged */
    kn_tensor *v = kn_add(kn_view(x, KN_SHAPE(1, 1)), x);
    KN_CHECK(kn_backward(v, .grad = kn_full(KN_F64, KN_CPU, 5, KN_SHAPE(1, 1))));
    KN_CHECK(at(kn_grad(x), 0) == 10);
    kn_clear_grad(x);
    kn_tensor *w = x;
    for (int i = 0; i < 10; i++)
        w = kn_add(w, w);
    KN_CHECK(kn_backward(w) && at(kn_grad(x), 0) == 1024);
}

/* An operation that hands on a gradient made in the category of gradients, as recompute does. */
KN_TEST(engine, a_gradient_as_gradient)
{
    kn_tensor *x = leaf_of(2, (double[]){ 1, 2 }), *z = leaf_of(2, (double[]){ 1, 2 });
    KN_CHECK(kn_backward(sum_of(kn_mul(x, x))));
    kn_tensor *y = kn_add(kn_add(z, z), kn_scale(z, 3));
    KN_CHECK(kn_backward(y, .grad = kn_grad(x)));
    KN_CHECK(at(kn_grad(z), 0) == 10 && at(kn_grad(z), 1) == 20);
    KN_CHECK(at(kn_grad(x), 0) == 2 && at(kn_grad(x), 1) == 4, "the given gradient was changed");
}

KN_TEST(engine, dropping_the_result_frees_the_graph)
{
    kn_tensor *x = kn_keep(leaf_of(100, (double[100]){ 1 }));
    int64_t tensors = kn_live_tensors();
    kn_ledger was = kn_ledger_read();
    int64_t host[300];
    for (int run = 0; run < 300; run++) {
        kn_scope s = kn_scope_begin();
        kn_tensor *y = x;
        for (int i = 0; i < 20; i++)
            y = kn_tanh(kn_mul(y, x));
        if (run % 3 > 0) {
            KN_CHECK(kn_backward(sum_of(y), .retain_graph = run % 3 == 2));
            kn_clear_grad(x);
        }
        kn_scope_end(s);
        KN_CHECK(kn_live_tensors() == tensors, "run %d: %lld tensors live, %lld before", run,
                 (long long)kn_live_tensors(), (long long)tensors);
        kn_ledger now = kn_ledger_read();
        KN_CHECK(now.live_total == was.live_total, "run %d: bytes still live", run);
        host[run] = now.live[KN_MEM_HOST];
    }
    /* Tolerance: tables grow at first, a debug build keeps the last freed handles, and malloc
     * rounds sizes. Losing one node a run would cost some 60 kB. */
    KN_CHECK(llabs((long long)(host[299] - host[200])) < 4096,
             "metadata grows: %lld bytes, %lld a hundred runs ago", (long long)host[299],
             (long long)host[200]);
    kn_tensor_free(x);
}

KN_TEST(engine, backward_frees_what_it_has_used)
{
    kn_tensor *x = leaf_of(1000, (double[1000]){ 1 });
    IN_SCOPE;
    kn_tensor *y = x;
    for (int i = 0; i < 10; i++) {
        IN_SCOPE;
        y = kn_keep(kn_sin(y)); /* saves its input; only the node holds it after the scope */
    }
    kn_tensor *last = sum_of(y);
    int64_t held = kn_ledger_read().live[KN_MEM_ACTIVATION];
    KN_CHECK(kn_backward(last));
    KN_CHECK(kn_ok());
    KN_CHECK(kn_ledger_read().live[KN_MEM_ACTIVATION] <= held);
}

/* ---- hooks ----------------------------------------------------------------------------------- */

static char order[256];

static kn_tensor *doubling(kn_tensor *g, void *arg)
{
    strcat(order, arg ? arg : "");
    return kn_scale(g, 2);
}
static kn_tensor *keeping(kn_tensor *g, void *arg)
{
    (void)g;
    strcat(order, arg);
    return NULL;
}
static kn_tensor *misshaping(kn_tensor *g, void *arg)
{
    (void)g;
    (void)arg;
    return kn_zeros(KN_F64, KN_CPU, KN_SHAPE(7));
}
static void on_node(kn_tensor *const *grads, int n, void *arg)
{
    KN_CHECK(n >= 1 && grads[0]);
    strcat(order, arg);
}
static void on_leaf(kn_tensor *leaf, void *arg)
{
    KN_CHECK(kn_grad(leaf) != NULL);
    strcat(order, arg);
}
static void at_end(void *arg)
{
    strcat(order, arg);
}
static kn_tensor *queueing(kn_tensor *g, void *arg)
{
    (void)g;
    kn_on_backward_end(at_end, arg);
    return NULL;
}

KN_TEST(engine, hooks_run_in_order_and_replace)
{
    order[0] = '\0';
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *y = kn_mul(x, x);
    KN_CHECK(kn_on_grad(y, keeping, "a") && kn_on_grad(y, doubling, "b"));
    KN_CHECK(kn_on_grad(y, queueing, "z"));
    KN_CHECK(kn_on_node(y, on_node, on_node, "n"));
    KN_CHECK(kn_on_grad(x, doubling, "x") && kn_on_accumulated(x, on_leaf, "l"));
    KN_CHECK(kn_backward(sum_of(y)));
    KN_CHECK(strcmp(order, "abnnxlz") == 0, "order: %s", order);
    KN_CHECK(at(kn_grad(x), 0) == 24, "%g", at(kn_grad(x), 0));
}

KN_TEST(engine, leaf_hooks_see_the_whole_gradient_once)
{
    order[0] = '\0';
    kn_tensor *x = leaf_of(1, (double[]){ 3 });
    kn_on_grad(x, doubling, "x");
    kn_on_accumulated(x, on_leaf, "l");
    KN_CHECK(kn_backward(sum_of(kn_add(kn_mul(x, x), kn_exp(kn_scale(x, 0))))));
    KN_CHECK(strcmp(order, "xl") == 0 && at(kn_grad(x), 0) == 12);
    KN_CHECK(kn_backward(sum_of(kn_scale(x, 1))));
    KN_CHECK(at(kn_grad(x), 0) == 14, "only the new gradient passes the hook");
}

/* The gradient itself, or a view of it. */
static kn_tensor *keeps(kn_tensor *g, void *arg)
{
    kn_tensor **kept = arg;
    kept[1] = kept[0] ? kept[1] : kn_keep(kn_detach(g));
    kept[0] = kept[0] ? kept[0] : kn_keep(g);
    return NULL;
}

static kn_hook second;
static int second_ran;

static void take_second_off(kn_tensor *leaf, void *arg)
{
    (void)arg;
    KN_CHECK(kn_off_grad(leaf, second));
}

static void count_second(kn_tensor *leaf, void *arg)
{
    (void)leaf, (void)arg;
    second_ran++;
}

KN_TEST(engine, a_leaf_hook_that_another_took_off_runs_no_more)
{
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(2)), true);
    second_ran = 0;
    kn_on_accumulated(x, take_second_off, NULL);
    second = kn_on_accumulated(x, count_second, NULL);
    kn_backward(kn_sum(kn_mul(x, x), 0, NULL, false));
    KN_CHECK(second_ran == 0 && !kn_off_grad(x, second));
    KN_CHECK_OK();
}

KN_TEST(engine, a_gradient_that_a_hook_of_a_leaf_kept_stays)
{
    kn_tensor *kept[2] = { NULL, NULL }, *x = leaf_of(1, (double[]){ 4 });
    kn_on_grad(x, keeps, kept);
    for (int i = 1; i <= 3; i++) {
        KN_CHECK(kn_backward(sum_of(kn_mul(x, x))));
        KN_CHECK(at(kn_grad(x), 0) == 8 * i && at(kept[0], 0) == 8 && at(kept[1], 0) == 8);
    }
    kn_tensor_free(kept[0]);
    kn_tensor_free(kept[1]);
}

static kn_tensor *failing(kn_tensor *g, void *arg)
{
    (void)g;
    strcat(order, arg);
    kn_fail("the hook fails on purpose");
    return NULL;
}

/* A hook of a leaf, then a hook of an intermediate result. */
KN_TEST(engine, nothing_runs_after_a_hook_that_failed)
{
    order[0] = '\0';
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *w = leaf_of(1, (double[]){ 5 });
    kn_tensor *y = kn_scale(x, 2);
    KN_CHECK(kn_on_grad(w, failing, "f") && kn_on_grad(y, keeping, "y"));
    KN_CHECK(kn_on_node(y, on_node, on_node, "n") && kn_on_accumulated(x, on_leaf, "l"));
    REFUSED(kn_backward(sum_of(kn_mul(y, w))), "fails on purpose");
    KN_CHECK(strcmp(order, "f") == 0, "order: %s", order);
    KN_CHECK(!kn_grad(x) && !kn_grad(w));
}

KN_TEST(engine, bad_hooks)
{
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *c = kn_ones(KN_F64, KN_CPU, KN_SHAPE(1));
    REFUSED(kn_on_grad(c, keeping, "a"), "doesn't require grad");
    REFUSED(kn_on_node(x, on_node, NULL, "a"), "no operation");
    kn_tensor *y = kn_mul(x, x);
    REFUSED(kn_on_accumulated(y, on_leaf, "a"), "only leaves");
    REFUSED(kn_on_backward_end(at_end, "a"), "no backward is running");
    kn_on_grad(y, misshaping, NULL);
    REFUSED(kn_backward(sum_of(y)), "another shape");
    KN_CHECK(!kn_in_backward() && kn_grad(x) == NULL);
    KN_CHECK(kn_backward(sum_of(kn_mul(x, x))) && at(kn_grad(x), 0) == 6, "works afterwards");
}

/* ---- results that are not scalars, errors ---------------------------------------------------- */

KN_TEST(engine, gradient_of_a_vector)
{
    kn_tensor *x = leaf_of(3, (double[]){ 1, 2, 3 }), *y = kn_mul(x, x);
    REFUSED(kn_backward(y), "f64[3], not a scalar");
    REFUSED(kn_backward(y, .grad = kn_ones(KN_F64, KN_CPU, KN_SHAPE(2))), "shape and dtype");
    double w[3] = { 1, 0, -1 };
    KN_CHECK(kn_backward(y, .grad = kn_from(KN_F64, KN_CPU, w, KN_SHAPE(3))));
    KN_CHECK(at(kn_grad(x), 0) == 2 && at(kn_grad(x), 1) == 0 && at(kn_grad(x), 2) == -6);
}

KN_TEST(engine, requiring_grad)
{
    kn_tensor *x = leaf_of(1, (double[]){ 3 }), *y = kn_mul(x, x);
    REFUSED(kn_require_grad(y, true), "only leaves");
    REFUSED(kn_require_grad(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(1)), true), "float tensors only");
    REFUSED(kn_backward(kn_zeros(KN_F64, KN_CPU, KN_SHAPE(1))), "no graph");
}

/* The gradient of a leaf by itself: ones, or what the caller gives, with hooks; a function that may
 * give its input itself works where backward begins at it. */
KN_TEST(engine, backward_begins_at_a_leaf)
{
    kn_tensor *x = kn_require_grad(leaf_of(1, (double[]){ 3 }), true), *g;
    KN_CHECK(kn_backward(x) && at(kn_grad(x), 0) == 1);
    KN_CHECK(!kn_set_grad_mode(false) || kn_backward(kn_contiguous(x)));
    KN_CHECK(!kn_set_grad_mode(true) && at(kn_grad(x), 0) == 2);
    KN_CHECK(kn_grad_of(x, &x, 1, &g) && at(g, 0) == 1 && at(kn_grad(x), 0) == 2);
    kn_tensor *two = leaf_of(2, (double[]){ 3, 4 });
    REFUSED(kn_backward(two), "the result is f64[2], not a scalar");
    kn_tensor *seed = kn_from(KN_F64, KN_CPU, (double[]){ 5, -7 }, KN_SHAPE(2));
    KN_CHECK(kn_backward(two, .grad = seed) && at(kn_grad(two), 1) == -7);
    KN_CHECK(kn_live_tensors() > 0 && !kn_in_backward());
}

KN_TEST(engine, casts_carry_gradients_between_dtypes)
{
    kn_tensor *x = leaf_of(2, (double[]){ 1.5, -2 });
    kn_tensor *y = kn_cast(kn_cast(x, KN_F32), KN_BF16);
    double w[2] = { 0.5, 3 };
    KN_CHECK(kn_backward(y, .grad = kn_cast(kn_from(KN_F64, KN_CPU, w, KN_SHAPE(2)), KN_BF16)));
    KN_CHECK(kn_grad(x)->dtype == KN_F64 && at(kn_grad(x), 0) == 0.5 && at(kn_grad(x), 1) == 3);
    KN_CHECK(kn_cast(x, KN_F64) == x);
}

KN_TEST(engine, maxima_share_equal_gradients)
{
    kn_tensor *x = leaf_of(4, (double[]){ 1, 7, 7, 7 });
    KN_CHECK(
        kn_backward(kn_amax(x, 0, NULL, false), .grad = kn_full(KN_F64, KN_CPU, 6, KN_SCALAR)));
    KN_CHECK(at(kn_grad(x), 0) == 0 && at(kn_grad(x), 1) == 2 && at(kn_grad(x), 3) == 2);
    kn_tensor *a = leaf_of(1, (double[]){ 4 }), *b = leaf_of(1, (double[]){ 4 });
    KN_CHECK(kn_backward(sum_of(kn_maximum(a, b))));
    KN_CHECK(at(kn_grad(a), 0) == 0.5 && at(kn_grad(b), 0) == 0.5);
}

KN_TEST(engine, a_long_chain)
{
    kn_tensor *x = kn_keep(leaf_of(1, (double[]){ 3 }));
    kn_tensor *y = kn_keep(kn_scale(x, 1));
    int64_t live = kn_live_tensors();
    for (int i = 0; i < 100000; i++) {
        kn_scope s = kn_scope_begin();
        kn_tensor *next = kn_keep(kn_scale(y, 1));
        kn_scope_end(s);
        kn_tensor_free(y);
        y = next;
    }
    kn_tensor *sum = kn_keep(sum_of(y));
    kn_tensor_free(y);
    KN_CHECK(kn_backward(sum, .retain_graph = true) && at(kn_grad(x), 0) == 1);
    kn_tensor_free(sum); /* frees the graph, without recursion */
    KN_CHECK_OK();
    KN_CHECK(kn_live_tensors() <= live + 2);
    kn_tensor_free(x);
}
