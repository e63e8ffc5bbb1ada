/* tests/fsdp/module_hooks_test.c: hooks of modules in sharded models. Those that only look change
 * no bit, beside one process without them; those that change tensors and gradients give the same
 * bits over ranks, with recompute too. They see what the unit computes with. */
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

enum { STEPS = 2, MICRO = 4, BATCH = 3, IN = 14, HIDDEN = 15 };

/* ---- looking --------------------------------------------------------------------------------- */

static void look(kn_module_event *e, void *arg)
{
    const kn_values *v = e->moment == KN_PRE_FORWARD    ? &e->in
                         : e->moment == KN_POST_FORWARD ? &e->out
                                                        : &e->grad_out;
    double sum = 0;
    for (int i = 0; i < v->n && kn_ok(); i++)
        if (v->v[i] && kn_dtype_is_float(kn_dtype_of(v->v[i])))
            sum += kn_item(sum_of(kn_cast(kn_detach(v->v[i]), KN_F32)));
    if (sum != sum)
        kn_fail("not a number");
}

static bool look_at(kn_module *m, void *arg)
{
    return kn_module_hook(m, (kn_module_hooks){ look, look, look, look, NULL });
}

static bool look_at_all(matrix_net *n, const matrix_spec *s)
{
    return kn_apply_modules(n->root, look_at, NULL);
}

KN_TEST(module_hooks, looking_changes_no_bit)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        MATRIX_CHECK(.model = MATRIX_GPT, .ranks = ranks, .rounds = MICRO / ranks, .steps = STEPS,
                     .threads = true, .prepare = look_at_all);
        MATRIX_CHECK(.model = MATRIX_ODD, .ranks = ranks, .rounds = MICRO / ranks, .steps = STEPS,
                     .threads = true, .prepare = look_at_all, .recompute = true,
                     .o.layout = KN_LAYOUT_PER_PARAM);
    }
    MATRIX_CHECK(.model = MATRIX_TURN, .ranks = 2, .threads = true, .prepare = look_at_all,
                 .spare = true, .by_data = true);
}

/* ---- changing -------------------------------------------------------------------------------- */

typedef struct net {
    kn_module base;
    kn_linear a, b;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x) /* (B, IN) -> (B, 1) */
{
    net *n = (net *)self;
    return kn_call(&n->b, kn_relu(kn_call(&n->a, x)));
}

static void bend(kn_module_event *e, void *arg)
{
    if (e->moment == KN_PRE_FORWARD)
        e->in.v[0] = kn_dropout(kn_tanh(e->in.v[0]), 0.1);
    else if (e->moment == KN_POST_FORWARD)
        e->out.v[0] = kn_mul(e->out.v[0], kn_sigmoid(e->out.v[0]));
    else if (e->moment == KN_PRE_BACKWARD)
        e->grad_out.v[0] = kn_clamp(e->grad_out.v[0], -0.05, 0.05);
    else if (e->grad_in.v[0])
        e->grad_in.v[0] = kn_add(e->grad_in.v[0], kn_scale(e->grad_in.v[0], 0.1));
}

static bool net_init(net *n)
{
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && kn_module_defaults(n, .device = KN_META) &&
           kn_linear_init(&n->a, &n->base, "a", IN, HIDDEN) &&
           kn_linear_init(&n->b, &n->base, "b", HIDDEN, 1);
}

static bool bent_init(void *own)
{
    net *n = own;
    const kn_module_hooks hooks = { bend, bend, bend, bend, .name = "bend" };
    return net_init(n) && kn_module_hook(&n->a, hooks) && kn_module_hook(&n->b, hooks) &&
           kn_module_hook(n, hooks);
}

static kn_tensor *loss(void *n, int step, int micro)
{
    uint64_t stream = (uint64_t)(step * MICRO + micro);
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, stream, KN_SHAPE(BATCH, IN));
    kn_tensor *y = kn_cast(kn_call(n, x), KN_F32);
    return mean_square(y);
}

KN_TEST(module_hooks, changes_have_the_same_bits_over_ranks)
{
    MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = bent_init, .loss = loss, .steps = STEPS,
                     .o.wrap_class = "linear");
}

/* ---- what they see --------------------------------------------------------------------------- */

static void bf16_inside(kn_module_event *e, void *arg)
{
    kn_tensor *w = kn_module_param(e->module, "weight");
    KN_CHECK(w && kn_module_param(e->module, "bias"));
    if (e->moment == KN_PRE_FORWARD)
        KN_CHECK(kn_dtype_of(e->in.v[0]) == KN_BF16);
    else if (e->moment == KN_POST_FORWARD)
        KN_CHECK(kn_dtype_of(e->out.v[0]) == KN_BF16);
    else if (e->moment == KN_PRE_BACKWARD)
        KN_CHECK(kn_dtype_of(e->grad_out.v[0]) == KN_BF16);
    else
        KN_CHECK(kn_dtype_of(e->grad_in.v[0]) == KN_BF16);
    /* the unit is gathered */
    if (e->moment != KN_POST_BACKWARD) {
        WITHOUT_GRAD;
        KN_CHECK(kn_contiguous(kn_transpose(w, 0, 1)) && kn_ok());
    }
}

KN_TEST(module_hooks, see_what_a_unit_computes_with)
{
    net n;
    KN_CHECK(net_init(&n) &&
             kn_fsdp_wrap(&n, NULL, .wrap_class = "linear", .param_dtype = KN_BF16));
    kn_module_hook(&n.a,
                   (kn_module_hooks){ bf16_inside, bf16_inside, bf16_inside, bf16_inside, NULL });
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, 0, KN_SHAPE(BATCH, IN)), *y = NULL;
    y = kn_cast(kn_call(&n, kn_require_grad(x, true)), KN_F32);
    KN_CHECK(kn_backward(mean_of(y)));
    kn_scope_end(scope);
    kn_module_free(&n);
    KN_CHECK_OK();
}
