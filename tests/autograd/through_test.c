/* tests/autograd/through_test.c: the gradient of gelu_tanh in the product of the linear layer that
 * takes its result (kn_grad_through): the bits of the two operations apart, and everybody who looks
 * at the gradient between them sees it. */
#include "autograd/autograd_internal.h"
#include "kernels/trace.h"
#include "knap.h"
#include "tests/owned.h"

enum { ROWS = 5, IN = 7, HIDDEN = 16, OUT = 3, LEAVES = 5 };

/* y = W2 gelu(W1 x + b1) + b2 */
typedef struct net {
    kn_tensor *leaf[LEAVES]; /* x, w1, b1, w2, b2 */
    kn_tensor *h, *a, *y;
} net;

static kn_tensor *drawn(kn_dtype t, uint64_t seed, int ndim, const int64_t *shape)
{
    return kn_require_grad(kn_randn(t, KN_CPU, seed, 1, ndim, shape), true);
}

static net net_of(kn_dtype t)
{
    net n = { { drawn(t, 1, KN_SHAPE(ROWS, IN)), drawn(t, 2, KN_SHAPE(IN, HIDDEN)),
                drawn(t, 3, KN_SHAPE(HIDDEN)), drawn(t, 4, KN_SHAPE(OUT, HIDDEN)),
                drawn(t, 5, KN_SHAPE(OUT)) },
              NULL,
              NULL,
              NULL };
    n.h = kn_linear(n.leaf[0], n.leaf[1], n.leaf[2], true);
    n.a = kn_gelu_tanh(n.h);
    n.y = kn_linear(n.a, n.leaf[3], n.leaf[4], false);
    return n;
}

static kn_tensor *total(kn_tensor *y)
{
    return sum_of(kn_mul(y, y));
}

static kn_tensor *same_gradient(kn_tensor *g, void *calls)
{
    (void)g;
    ++*(int *)calls;
    return NULL;
}

static void count_call(kn_tensor *const *grads, int n, void *calls)
{
    (void)grads, (void)n;
    ++*(int *)calls;
}

/* Runs a backward: how many products come before the derivative. */
static int products_before(kn_tensor *loss, bool retain)
{
    OWNED_HOST kn_trace_event *e = NULL;
    int products = 0, before = -1;
    kn_trace_start(200);
    KN_CHECK(kn_backward(loss, .retain_graph = retain));
    const size_t n = kn_trace_stop(&e);
    for (size_t i = 0; i < n; i++) {
        products += strcmp(e[i].what, "matmul") == 0;
        if (before < 0 && strcmp(e[i].what, "unary_grad") == 0)
            before = products;
    }
    KN_CHECK(before >= 1, "no derivative in %zu events", n);
    return before;
}

/* It comes right after the product, before that of the weight's gradient. */
static bool went_through(kn_tensor *loss, bool retain)
{
    return products_before(loss, retain) == 1;
}

static void check_same(const net *a, const net *b, const char *what)
{
    for (int i = 0; i < LEAVES; i++) {
        kn_tensor *p = kn_grad(a->leaf[i]), *q = kn_grad(b->leaf[i]);
        KN_CHECK(
            p && q &&
                memcmp(kn_data(p), kn_data(q), (size_t)kn_numel(p) * kn_dtype_size(p->dtype)) == 0,
            "%s: other bits in the gradient of leaf %d", what, i);
    }
}

/* The net whose gradient is looked at between the two operations, which keeps them apart. */
static net apart(kn_dtype t, int *calls)
{
    net n = net_of(t);
    KN_CHECK(kn_on_grad(n.a, same_gradient, calls));
    KN_CHECK(!went_through(total(n.y), false), "a hook is passed by");
    return n;
}

KN_TEST(through, same_bits_in_every_dtype)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    for (int t = 0; t < 4; t++) {
        int calls = 0;
        net hooked = apart(types[t], &calls), n = net_of(types[t]);
        KN_CHECK(went_through(total(n.y), false), "%s", kn_dtype_name(types[t]));
        check_same(&n, &hooked, kn_dtype_name(types[t]));
        KN_CHECK(calls == 1, "the hook runs once");
    }
}

/* A second backward through a retained graph; one that adds to earlier gradients. */
KN_TEST(through, retained_graphs_and_sums)
{
    int calls = 0;
    net n = net_of(KN_F32), hooked = net_of(KN_F32);
    kn_on_grad(hooked.a, same_gradient, &calls);
    kn_tensor *p = total(n.y), *q = total(hooked.y);
    KN_CHECK(went_through(p, true) && went_through(p, false));
    KN_CHECK(!went_through(q, true) && !went_through(q, false) && calls == 2);
    check_same(&n, &hooked, "two backwards");
}

KN_TEST(through, hooks_on_the_nodes_see_their_gradients)
{
    for (int on = 0; on < 2; on++) {
        int calls = 0, hooks = 0;
        net hooked = apart(KN_F32, &calls), n = net_of(KN_F32);
        KN_CHECK(kn_on_node(on ? n.y : n.a, NULL, count_call, &hooks));
        KN_CHECK(!went_through(total(n.y), false) && hooks == 1);
        check_same(&n, &hooked, "hooks on a node");
    }
    int calls = 0;
    net n = net_of(KN_F32);
    kn_hook h = kn_on_grad(n.h, same_gradient, &calls);
    KN_CHECK(h && went_through(total(n.y), false) && calls == 1, "before gelu it hides nothing");
}

typedef struct late_hook {
    kn_tensor *on;
    bool node;
    int calls;
} late_hook;

static void put_on(kn_tensor *leaf, void *arg)
{
    late_hook *l = arg;
    (void)leaf;
    if (l->node)
        kn_on_node(l->on, count_call, NULL, &l->calls);
    else
        kn_on_grad(l->on, same_gradient, &l->calls);
}

/* Between the two backwards, a hook on gelu's result would see the gradient of gelu's input. */
KN_TEST(through, hooks_that_come_too_late_are_errors)
{
    for (int on = 0; on < 2; on++) {
        net n = net_of(KN_F32);
        late_hook late = { n.a, on == 1, 0 };
        KN_CHECK(kn_on_accumulated(n.leaf[3], put_on, &late));
        KN_CHECK(!kn_backward(total(n.y)) && late.calls == 0);
        KN_CHECK_ERROR("backward of 'gelu_tanh': a hook was put on its result after the gradient");
    }
    net n = net_of(KN_F32);
    late_hook late = { n.h, false, 0 };
    KN_CHECK(kn_on_accumulated(n.leaf[3], put_on, &late));
    KN_CHECK(went_through(total(n.y), false) && late.calls == 1, "before gelu it isn't late");
}

typedef struct inner {
    kn_tensor *loss, *of, *grad;
} inner;

static void run_inner(kn_tensor *leaf, void *arg)
{
    inner *i = arg;
    (void)leaf;
    KN_CHECK(kn_grad_of(i->loss, &i->of, 1, &i->grad, .retain_graph = true));
    i->grad = kn_tensor_ref(i->grad);
}

/* A hook that runs a backward through the two between their own: each pass has its gradients. */
KN_TEST(through, a_backward_between_the_two)
{
    int calls = 0;
    net hooked = apart(KN_F32, &calls), n = net_of(KN_F32);
    inner below = { total(n.y), n.h, NULL }, between = { below.loss, n.a, NULL };
    kn_tensor *g[2], *of[] = { n.h, n.a };
    for (int i = 0; i < 2; i++)
        KN_CHECK(kn_grad_of(below.loss, &of[i], 1, &g[i], .retain_graph = true));
    KN_CHECK(kn_on_accumulated(n.leaf[3], run_inner, &below));
    KN_CHECK(kn_on_accumulated(n.leaf[3], run_inner, &between));
    KN_CHECK(went_through(below.loss, true));
    check_same(&n, &hooked, "the backward around it");
    const size_t bytes = (size_t)kn_numel(g[0]) * sizeof(float);
    KN_CHECK(memcmp(kn_data(g[0]), kn_data(below.grad), bytes) == 0, "of gelu's input");
    KN_CHECK(memcmp(kn_data(g[1]), kn_data(between.grad), bytes) == 0, "of its result");
    kn_tensor_free(below.grad);
    kn_tensor_free(between.grad);
}

/* A sum of two gradients is multiplied by the derivative, not one of them. */
KN_TEST(through, two_takers)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16 };
    for (int t = 0; t < 2; t++)
        for (int first = 0; first < 2; first++) {
            net n[2] = { net_of(types[t]), net_of(types[t]) };
            int calls = 0;
            kn_on_grad(n[1].a, same_gradient, &calls);
            for (int i = 0; i < 2; i++) {
                kn_tensor *also = total(n[i].a), *main = total(n[i].y);
                KN_CHECK(!went_through(first ? kn_add(also, main) : kn_add(main, also), false));
            }
            check_same(&n[0], &n[1], "two takers");
        }
    /* one of which leads to no gradient that is wanted */
    net m = net_of(KN_F32), hooked = net_of(KN_F32);
    int calls = 0;
    kn_on_grad(hooked.a, same_gradient, &calls);
    KN_CHECK(total(m.a) && total(hooked.a), "made, but no part of the loss");
    KN_CHECK(went_through(total(m.y), false) && !went_through(total(hooked.y), false));
    check_same(&m, &hooked, "a taker outside of the loss");
}

KN_TEST(through, gradients_of_chosen_tensors)
{
    int calls = 0;
    net hooked = apart(KN_F32, &calls), n = net_of(KN_F32);
    kn_tensor *loss = total(n.y), *g[2];
    kn_tensor *between[] = { n.a, n.leaf[1] }, *below[] = { n.h, n.leaf[1] };
    KN_CHECK(kn_grad_of(loss, between, 2, g, .retain_graph = true));
    kn_tensor *dy = kn_scale(kn_detach(n.y), 2), *da = kn_matmul(dy, kn_detach(n.leaf[3]));
    const size_t bytes = (size_t)kn_numel(da) * sizeof(float);
    KN_CHECK(memcmp(kn_data(g[0]), kn_data(da), bytes) == 0, "the gradient of gelu's result");
    KN_CHECK(memcmp(kn_data(g[1]), kn_data(kn_grad(hooked.leaf[1])), IN * HIDDEN * 4) == 0);
    KN_CHECK(kn_grad_of(loss, below, 2, g, .retain_graph = true));
    KN_CHECK(memcmp(kn_data(g[0]), kn_data(da), bytes) != 0);
    KN_CHECK(memcmp(kn_data(g[1]), kn_data(kn_grad(hooked.leaf[1])), IN * HIDDEN * 4) == 0);
    KN_CHECK(kn_grad_of(loss, &n.a, 1, g));
    KN_CHECK(memcmp(kn_data(g[0]), kn_data(da), bytes) == 0, "gelu's own backward doesn't run");
}

/* Where x of gelu(x) is a leaf, its gradient has a place of its own; exact gelu has no epilogue; a
 * copy in between is another operation. */
KN_TEST(through, what_stays_apart)
{
    net n = net_of(KN_F32);
    kn_tensor *x = drawn(KN_F32, 6, KN_SHAPE(ROWS, HIDDEN));
    KN_CHECK(!went_through(total(kn_linear(kn_gelu_tanh(x), n.leaf[3], n.leaf[4], false)), false));
    KN_CHECK(!went_through(total(kn_linear(kn_gelu(n.h), n.leaf[3], n.leaf[4], false)), false));
    net m = net_of(KN_F32);
    kn_tensor *y = kn_linear(kn_transpose(kn_gelu_tanh(kn_transpose(m.h, 0, 1)), 0, 1), m.leaf[3],
                             m.leaf[4], false);
    KN_CHECK(!went_through(total(y), false));
}

/* The first operation that makes a value that isn't finite is named as before. */
KN_TEST(through, checks_name_the_operation)
{
    net n = net_of(KN_F32);
    kn_set_check(true);
    KN_CHECK(!went_through(total(n.y), false));
    kn_set_check(false);
    KN_CHECK_OK();
}

KN_TEST(through, writes_in_place_are_errors_of_gelu)
{
    net n = net_of(KN_F32);
    kn_tensor *loss = total(n.y);
    const bool mode = kn_set_grad_mode(false);
    kn_bump_version(n.h);
    kn_set_grad_mode(mode);
    REFUSED(kn_backward(loss), "backward of 'gelu_tanh'");
}

/* In a recompute the two operations run in a pass of their own. */
KN_TEST(through, recomputed_mlp)
{
    float grads[2][8 * 32];
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE kn_mlp m = { 0 };
        KN_CHECK(kn_mlp_init(&m, NULL, "mlp", 8) && kn_materialize(&m, KN_CPU, 3));
        KN_CHECK(kn_recompute(&m, again));
        kn_tensor *x = drawn(KN_F32, 1, KN_SHAPE(1, 4, 8));
        const int forward = again ? 2 : 0;
        KN_CHECK(products_before(total(kn_call(&m, x)), false) == forward + 1);
        const kn_param *p;
        KN_CHECK(kn_params(&m, &p) == 4 && p[0].numel == 8 * 32);
        memcpy(grads[again], kn_data(kn_param_grad(&p[0])), sizeof grads[again]);
    }
    KN_CHECK(memcmp(grads[0], grads[1], sizeof grads[0]) == 0);
}

static kn_values checked(kn_values in, void *arg)
{
    (void)arg;
    return KN_VALUES(kn_linear(kn_gelu_tanh(kn_scale(in.v[0], 1.5)), in.v[1], in.v[2], true));
}

KN_TEST(through, finite_differences)
{
    kn_tensor *x = drawn(KN_F64, 1, KN_SHAPE(3, 4)), *w = drawn(KN_F64, 2, KN_SHAPE(4, 2)),
              *b = drawn(KN_F64, 3, KN_SHAPE(2));
    KN_CHECK(kn_gradcheck(checked, KN_VALUES(x, w, b)));
}
