/* tests/autograd/grad_of_test.c: gradients of chosen tensors (kn_grad_of): those of kn_backward to
 * the last bit, while nothing else changes. Through recomputing modules and units of fsdp:
 * tests/fsdp/input_grads_test.c. */
#include "autograd/autograd_internal.h"
#include "tests/owned.h"

static kn_tensor *leaf_of(int n, const double *v)
{
    return kn_require_grad(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(n)), true);
}

static double at(const kn_tensor *t, int i)
{
    KN_CHECK(t != NULL, "no tensor");
    return ((const double *)kn_data(t))[i];
}

static void count_call(kn_tensor *const *grads, int n, void *arg)
{
    (void)grads, (void)n;
    ++*(int *)arg;
}

static void count_leaf(kn_tensor *leaf, void *arg)
{
    (void)leaf;
    ++*(int *)arg;
}

KN_TEST(grad_of, equals_backward_and_leaves_every_leaf_as_it_was)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *w = leaf_of(2, (double[]){ 5, 7 });
    kn_tensor *other = leaf_of(2, (double[]){ 1, 1 }), *g[5];
    int accumulated = 0;
    kn_on_accumulated(x, count_leaf, &accumulated);
    KN_CHECK(kn_backward(sum_of(kn_scale(x, 10))) && accumulated == 1);
    kn_tensor *h = kn_mul(x, w), *y = sum_of(kn_add(kn_mul(h, h), kn_mul(h, x)));
    kn_tensor *in[] = { x, h, other, x, y };
    KN_CHECK(kn_grad_of(y, in, 5, g, .retain_graph = true));
    /* y = x^2 w^2 + x^2 w */
    KN_CHECK(at(g[0], 0) == 2 * 2 * 25 + 2 * 2 * 5 && at(g[0], 1) == 2 * 3 * 49 + 2 * 3 * 7);
    KN_CHECK(at(g[1], 0) == 2 * 10 + 2 && at(g[1], 1) == 2 * 21 + 3);
    KN_CHECK(g[2] == NULL && g[3] == g[0] && at(g[4], 0) == 1);
    KN_CHECK(accumulated == 1 && at(kn_grad(x), 0) == 10 && !kn_grad(w) && !kn_grad(other));
    KN_CHECK(!kn_requires_grad(g[0]) && !kn_requires_grad(g[1]));
    const double first = at(g[0], 0);
    KN_CHECK(kn_backward(y) && at(kn_grad(x), 0) == 10 + first && at(g[0], 0) == first);
    KN_CHECK(at(kn_grad(w), 0) == 2 * 4 * 5 + 4);
}

KN_TEST(grad_of, computes_and_frees_only_what_leads_there)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *w = leaf_of(2, (double[]){ 5, 7 }), *g, *gw;
    kn_tensor *before = kn_mul(x, x), *h = kn_mul(before, w), *side = kn_exp(w);
    kn_tensor *y = sum_of(kn_add(kn_mul(h, h), side));
    int ran[3] = { 0 };
    kn_on_node(before, count_call, NULL, &ran[0]);
    kn_on_node(h, count_call, NULL, &ran[1]);
    kn_on_node(side, count_call, NULL, &ran[2]);
    KN_CHECK(kn_grad_of(y, &h, 1, &g));
    KN_CHECK(ran[0] == 0 && ran[1] == 0 && ran[2] == 0 && at(g, 0) == 2 * 20);
    /* on from there, in two parts */
    KN_CHECK(kn_grad_of(h, &w, 1, &gw, .grad = g, .retain_graph = true));
    KN_CHECK(ran[0] == 0 && ran[1] == 1 && at(gw, 0) == 40 * 4);
    KN_CHECK(kn_backward(h, .grad = g) && ran[0] == 1 && ran[1] == 2);
    KN_CHECK(at(kn_grad(w), 0) == 40 * 4 && at(kn_grad(x), 0) == 40 * 5 * 4);
    KN_CHECK(!kn_grad_of(h, &w, 1, &gw, .grad = g) && gw == NULL);
    KN_CHECK_ERROR("were freed by an earlier backward");
}

/* A freed part of the graph that isn't needed is no error. */
KN_TEST(grad_of, passes_by_what_was_freed)
{
    kn_tensor *x = leaf_of(1, (double[]){ 2 }), *w = leaf_of(1, (double[]){ 5 }), *g;
    kn_tensor *freed = kn_mul(x, x);
    KN_CHECK(kn_backward(sum_of(freed)));
    KN_CHECK(kn_grad_of(sum_of(kn_mul(freed, w)), &w, 1, &g) && at(g, 0) == 4);
    KN_CHECK(!kn_grad_of(sum_of(kn_mul(freed, w)), &x, 1, &g) && g == NULL);
    KN_CHECK_ERROR("were freed");
}

static kn_tensor *triple(kn_tensor *g, void *arg)
{
    ++*(int *)arg;
    return kn_scale(g, 3);
}

KN_TEST(grad_of, hooks_see_and_replace)
{
    kn_tensor *x = leaf_of(1, (double[]){ 2 }), *z = leaf_of(1, (double[]){ 7 }), *g[2];
    int seen[3] = { 0 };
    kn_tensor *h = kn_mul(x, z);
    kn_on_grad(x, triple, &seen[0]);
    kn_on_grad(z, triple, &seen[1]);
    kn_on_grad(h, triple, &seen[2]);
    KN_CHECK(kn_grad_of(sum_of(h), ((kn_tensor *[]){ x, h }), 2, g));
    KN_CHECK(at(g[1], 0) == 3 && at(g[0], 0) == 3 * 7 * 3);
    KN_CHECK(seen[0] == 1 && seen[1] == 0 && seen[2] == 1, "z's hook has nothing to see");
}

/* One leaf many times, as both inputs of a node, and through views. */
KN_TEST(grad_of, sums_all_ways)
{
    kn_tensor *x = leaf_of(4, (double[]){ 1, 2, 3, 4 }), *g[2], *part[2];
    KN_CHECK(kn_chunk(x, 0, 2, part));
    kn_tensor *y = sum_of(kn_add(kn_mul(x, x), kn_add(x, kn_cat(part, 2, 0))));
    KN_CHECK(kn_grad_of(y, ((kn_tensor *[]){ x, part[1] }), 2, g, .retain_graph = true));
    KN_CHECK(at(g[0], 0) == 4 && at(g[0], 3) == 10 && at(g[1], 0) == 1 && kn_numel(g[1]) == 2);
    KN_CHECK(kn_backward(y) && at(kn_grad(x), 3) == 10);
}

/* Draws of the micro-batch go on as if it hadn't been; a failed one leaves nothing behind. */
KN_TEST(grad_of, is_no_micro_batch)
{
    double drawn[2];
    for (int with = 0; with < 2; with++) {
        kn_set_step(5);
        kn_tensor *x = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(64)), true), *g;
        kn_tensor *y = mean_of(kn_dropout(x, 0.5));
        if (with)
            KN_CHECK(kn_grad_of(y, &x, 1, &g));
        drawn[with] = kn_item(sum_of(kn_mul(kn_dropout(x, 0.5), kn_arange(KN_F64, KN_CPU, 64))));
    }
    KN_CHECK(drawn[0] == drawn[1], "%g, %g", drawn[0], drawn[1]);
}

/* A sum whose backward asks for both places, wanted or not. */
static bool sum_shape(kn_op_call *c)
{
    c->spec[0] = (kn_spec){ .dtype = KN_F64 };
    return true;
}

static bool sum_forward(kn_op_call *c)
{
    return kn_fill_(c->out[0], at(c->in[0], 0) + at(c->in[1], 0));
}

static bool greedy_backward(kn_op_grad *g)
{
    for (int i = 0; i < 2; i++) {
        g->din[i] = kn_grad_out(g, i);
        if (!g->din[i] || !kn_copy_(g->din[i], g->dout[0]))
            return false;
    }
    return true;
}

static kn_tensor *place(void *asked, kn_tensor *leaf)
{
    ++*(int *)asked;
    return leaf;
}

KN_TEST(grad_of, writes_to_no_place_of_another_leaf)
{
    static const kn_op op = {
        .name = "greedy", .shape = sum_shape, .forward = sum_forward, .backward = greedy_backward
    };
    int asked = 0;
    kn_tensor *x = leaf_of(1, (double[]){ 2 }), *w = leaf_of(1, (double[]){ 5 }), *g;
    x = kn_require_grad(kn_reshape(kn_detach(x), KN_SCALAR), true);
    w = kn_require_grad(kn_reshape(kn_detach(w), KN_SCALAR), true);
    kn_tensor *y = kn_apply1(&op, 2, (kn_tensor *[]){ x, w }, 0, NULL);
    w->leaf->dest = place;
    w->leaf->dest_arg = &asked;
    KN_CHECK(kn_grad_of(y, &x, 1, &g) && at(g, 0) == 1 && asked == 0, "%s",
             kn_error() ? kn_error() : "the place was written");
    w->leaf->dest = NULL;
}

static kn_tensor *failing(kn_tensor *g, void *arg)
{
    (void)g, (void)arg;
    kn_fail("injected");
    return NULL;
}

KN_TEST(grad_of, that_fails_takes_nothing)
{
    kn_tensor *x = leaf_of(1, (double[]){ 2 }), *g[2];
    KN_CHECK(kn_backward(sum_of(kn_scale(x, 10))));
    const int64_t live = kn_live_tensors();
    kn_scope scope = kn_scope_begin();
    kn_tensor *h = kn_mul(x, x);
    kn_on_grad(h, failing, NULL);
    KN_CHECK(!kn_grad_of(sum_of(kn_add(h, kn_exp(x))), ((kn_tensor *[]){ x, h }), 2, g));
    KN_CHECK(g[0] == NULL && g[1] == NULL);
    KN_CHECK_ERROR("injected");
    kn_scope_end(scope);
    KN_CHECK(kn_live_tensors() == live && at(kn_grad(x), 0) == 10);
    KN_CHECK(kn_backward(sum_of(kn_mul(x, x))) && at(kn_grad(x), 0) == 14);
}

KN_TEST(grad_of, refuses)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *plain = kn_ones(KN_F64, KN_CPU, KN_SCALAR), *g;
    kn_tensor *y = kn_mul(x, x);
    REFUSED(kn_grad_of(y, &x, 1, &g), "grad_of: the result is f64[2], not a scalar");
    REFUSED(kn_grad_of(sum_of(y), &plain, 1, &g), "grad_of: input 1, f64[], doesn't require grad");
    REFUSED(kn_grad_of(plain, &x, 1, &g), "grad_of: the tensor has no graph");
    REFUSED(kn_grad_of(sum_of(y), &x, 0, &g), "grad_of: needs at least one input");
    REFUSED(kn_grad_of(y, &x, 1, &g, .grad = plain),
            "grad_of: .grad is f64[], but must have the result's shape and dtype, f64[2]");
    REFUSED(kn_grad_of(sum_of(y), ((kn_tensor *[]){ NULL }), 1, &g), "grad_of");
    KN_CHECK(kn_grad_of(sum_of(y), &x, 1, &g) && at(g, 1) == 6 && !kn_grad(x));
}

/* A penalty on a gradient would be a constant. */
KN_TEST(grad_of, is_of_first_order)
{
    kn_tensor *x = leaf_of(2, (double[]){ 2, 3 }), *y = kn_mul(x, x), *g;
    KN_CHECK(kn_grad_of(sum_of(y), &x, 1, &g, .retain_graph = true));
    kn_tensor *penalty = sum_of(kn_reshape(kn_square(g), KN_SHAPE(2, 1)));
    KN_CHECK(penalty && kn_item(penalty) == 52 && !kn_requires_grad(penalty));
    REFUSED(kn_backward(penalty), "made of gradients of kn_grad_of");
    REFUSED(kn_add(sum_of(y), penalty), "add: argument 2 is made of a gradient of kn_grad_of");
    REFUSED(kn_mul(g, x), "kn_detach takes it as a constant");
    KN_CHECK(kn_backward(kn_add(sum_of(y), kn_detach(penalty))) && at(kn_grad(x), 1) == 6);
    kn_tensor *moved = kn_add(kn_detach(x), kn_sign(g)); /* where an energy falls, say */
    KN_CHECK(kn_require_grad(moved, true) && kn_backward(sum_of(kn_mul(moved, x))));
    bool mode = kn_set_grad_mode(false); /* nothing is recorded */
    kn_tensor *norm = kn_square(g), *next = kn_add(x, g);
    kn_set_grad_mode(mode);
    KN_CHECK(next && kn_backward(sum_of(kn_mul(norm, x))));
    KN_CHECK(kn_grad_of(sum_of(kn_mul(x, x)), &x, 1, &g, .grad = NULL) && kn_item(sum_of(g)) == 10);
}

static kn_tensor *take_cube(kn_tensor *g, void *leaf)
{
    kn_tensor *x = leaf, *grad = NULL;
    (void)g;
    bool mode = kn_set_grad_mode(true);
    kn_tensor *cube = sum_of(kn_mul(kn_square(x), x));
    kn_grad_of(cube, &x, 1, &grad);
    kn_set_grad_mode(mode);
    KN_CHECK(!grad || *(float *)kn_data(grad) == 12);
    return NULL;
}

/* Inside of a backward: of another leaf; of one that the backward comes to as well. */
KN_TEST(grad_of, in_a_hook)
{
    kn_tensor *x = kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(1));
    kn_tensor *other = kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(1));
    kn_require_grad(x, true);
    kn_require_grad(other, true);
    for (int same = 0; same < 2; same++) {
        kn_tensor *y = kn_square(x), *grad = NULL;
        KN_CHECK(kn_on_grad(y, take_cube, same ? x : other));
        KN_CHECK(kn_backward(sum_of(y)) == !same);
        if (same)
            KN_CHECK_ERROR("is a leaf that the backward that runs has yet to complete");
        KN_CHECK(kn_grad_of(sum_of(kn_square(x)), &x, 1, &grad) && *(float *)kn_data(grad) == 4);
    }
    KN_CHECK(*(float *)kn_data(kn_grad(x)) == 4 && !kn_grad(other));
    KN_CHECK_OK();
}
