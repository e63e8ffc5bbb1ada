/* tests/nn/hooks_test.c: hooks of modules see and change tensors and gradients; those that only
 * look change no bit; they are taken off, also by themselves; errors name them. Hooks of tensors
 * are taken off. */
#include "nn/hooks.h"
#include "nn/layers.h"
#include "tests/owned.h"

static double at(kn_tensor *t, int64_t i)
{
    float v[64];
    KN_CHECK(t && kn_numel(t) <= 64 && kn_to_host(t, v, (size_t)kn_numel(t) * sizeof *v));
    return (double)v[i];
}

static kn_tensor *row(float a, float b)
{
    return kn_require_grad(kn_from(KN_F32, KN_CPU, (float[]){ a, b }, KN_SHAPE(2)), true);
}

static kn_tensor *triple_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_mul(x, kn_full_like(x, 3)); /* saves, so it has to run again */
}

/* ---- values ---------------------------------------------------------------------------------- */

typedef struct seen {
    kn_module *m;
    int calls[5];
    double in, out, grad_out, grad_in, grad_out_after; /* of element 1 */
    bool again;
} seen;

static void look(kn_module_event *e, void *arg)
{
    seen *s = arg;
    s->calls[e->moment]++;
    KN_CHECK(e->module == s->m);
    if (e->moment == KN_PRE_FORWARD) {
        KN_CHECK(e->in.n == 1 && e->out.n == 0 && e->grad_out.n == 0);
        s->in = at(e->in.v[0], 1);
        s->again = s->again || e->again;
    } else if (e->moment == KN_POST_FORWARD) {
        KN_CHECK(e->in.n == 1 && e->out.n == 1);
        s->out = at(e->out.v[0], 1);
    } else if (e->moment == KN_PRE_BACKWARD) {
        KN_CHECK(e->grad_out.n == 1 && e->grad_in.n == 0 && e->in.n == 0);
        s->grad_out = at(e->grad_out.v[0], 1);
    } else {
        KN_CHECK(e->grad_out.n == 1 && e->grad_in.n == 1);
        s->grad_out_after = at(e->grad_out.v[0], 1);
        s->grad_in = at(e->grad_in.v[0], 1);
    }
}

static void change(kn_module_event *e, void *arg)
{
    (void)arg;
    if (e->moment == KN_PRE_FORWARD)
        e->in.v[0] = kn_add_scalar(e->in.v[0], 1);
    else if (e->moment == KN_POST_FORWARD)
        e->out.v[0] = kn_scale(e->out.v[0], 5);
    else if (e->moment == KN_PRE_BACKWARD)
        e->grad_out.v[0] = kn_scale(e->grad_out.v[0], 7);
    else
        e->grad_in.v[0] = kn_scale(e->grad_in.v[0], 0.5);
}

static kn_module_hooks all_four(void (*fn)(kn_module_event *e, void *arg), void *arg)
{
    return (kn_module_hooks){ fn, fn, fn, fn, .arg = arg };
}

KN_TEST(hooks, see_and_change)
{
    for (int recompute = 0; recompute < 2; recompute++) {
        OWNED_MODULE kn_module m;
        kn_module_init(&m, triple_forward);
        kn_recompute(&m, recompute);
        seen before = { .m = &m }, after = { .m = &m };
        KN_CHECK(kn_module_hook(&m, all_four(look, &before)) &&
                 kn_module_hook(&m, all_four(change, NULL)) &&
                 kn_module_hook(&m, all_four(look, &after)));
        kn_tensor *x = row(1, 2), *y = kn_call(&m, x);
        KN_CHECK(kn_backward(sum_of(kn_scale(y, 2))));
        /* y = 5 * 3 (x + 1); the hooks after a call run the other way round */
        KN_CHECK(before.in == 2 && after.in == 3 && after.out == 9 && before.out == 45);
        KN_CHECK(at(y, 1) == 45 && at(y, 0) == 30);
        KN_CHECK(before.grad_out == 2 && after.grad_out == 14 && after.grad_out_after == 14);
        KN_CHECK(after.grad_in == 210 && before.grad_in == 105 && before.grad_out_after == 14);
        KN_CHECK(at(kn_grad(x), 0) == 105 && at(kn_grad(x), 1) == 105);
        KN_CHECK(before.calls[KN_PRE_FORWARD] == 1 + recompute && before.again == recompute);
        KN_CHECK(before.calls[KN_PRE_BACKWARD] == 1 && before.calls[KN_POST_BACKWARD] == 1);
        KN_CHECK_OK();
    }
}

/* Several tensors: some without gradient, not given, passed twice, or unused. */
static kn_values mix_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)self, (void)arg;
    kn_tensor *y = kn_mul(in.v[0], in.v[1]);
    return KN_VALUES(y, kn_scale(in.v[0], 2), y, kn_arange(KN_I64, KN_CPU, 3));
}

typedef struct mixed {
    int pre, post;
} mixed;

static void look_at_mix(kn_module_event *e, void *arg)
{
    mixed *s = arg;
    KN_CHECK(e->grad_out.n == 4 && !e->grad_out.v[2] && !e->grad_out.v[3]);
    KN_CHECK(at(e->grad_out.v[0], 0) == 2 && !e->grad_out.v[1], "the second result is unused");
    if (e->moment == KN_PRE_BACKWARD) {
        s->pre++;
        return;
    }
    s->post++;
    KN_CHECK(e->grad_in.n == 4 && !e->grad_in.v[1] && !e->grad_in.v[2] && !e->grad_in.v[3]);
    KN_CHECK(at(e->grad_in.v[0], 0) == 2 * 2 * 4, "d (2 x x) / dx at 4");
}

KN_TEST(hooks, several_tensors)
{
    OWNED_MODULE kn_module m;
    mixed s = { 0 };
    kn_module_init_n(&m, mix_forward);
    kn_module_hook(&m, (kn_module_hooks){
                           .pre_backward = look_at_mix, .post_backward = look_at_mix, .arg = &s });
    kn_tensor *x = row(4, 5);
    kn_values out = kn_call_n(&m, KN_VALUES(x, x, NULL, kn_detach(x)), NULL, 0);
    KN_CHECK(out.n == 4 && out.v[0] == out.v[2]);
    KN_CHECK(kn_backward(sum_of(kn_add(out.v[0], out.v[2]))));
    KN_CHECK(s.pre == 1 && s.post == 1 && at(kn_grad(x), 1) == 20);
    /* chosen gradients, twice from one graph */
    out = kn_call_n(&m, KN_VALUES(x, x, NULL, NULL), NULL, 0);
    for (int i = 0; i < 2; i++) {
        kn_tensor *g = NULL, *ones = kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(2));
        KN_CHECK(kn_grad_of(out.v[0], &x, 1, &g, .grad = ones, .retain_graph = true));
        KN_CHECK(at(g, 0) == 16 && s.pre == 2 + i && s.post == 2 + i);
    }
}

/* ---- looking changes no bit ------------------------------------------------------------------ */

typedef struct block {
    kn_module base;
    kn_layer_norm ln;
    kn_self_attention attn;
    kn_mlp mlp;
} block;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    x = kn_add(x, kn_call(&b->attn, x)); /* x has four consumers */
    return kn_add(kn_call(&b->mlp, x), kn_mul(x, kn_call(&b->ln, x)));
}

static void count(kn_module_event *e, void *arg)
{
    (void)e;
    ++*(int *)arg;
}

static bool hook_one(kn_module *m, void *arg)
{
    return kn_module_hook(m, all_four(count, arg));
}

/* The loss and all gradients of two micro-batches. */
static int gradients(bool hooked, bool recompute, float *out)
{
    OWNED_MODULE block b = { 0 };
    const kn_param *p;
    int times = 0, got = 0;
    kn_module_init(&b.base, block_forward);
    kn_layer_norm_init(&b.ln, &b.base, "ln", 8);
    kn_self_attention_init(&b.attn, &b.base, "attn", 8, 2, .dropout = 0.1);
    kn_mlp_init(&b.mlp, &b.base, "mlp", 8, .dropout = 0.1);
    kn_materialize(&b, KN_CPU, 3);
    kn_recompute(&b.attn, recompute);
    kn_set_step(3);
    KN_CHECK(!hooked || kn_apply_modules(&b, hook_one, &times));
    kn_tensor *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(2, 3, 8)), true);
    for (int i = 0; i < 2; i++) {
        kn_tensor *y = kn_scale(x, 1.25), *inside = kn_call(&b, y);
        kn_tensor *z = kn_add(inside, kn_mul(y, y)); /* y's gradients come from here first */
        kn_tensor *loss = mean_square(z);
        KN_CHECK(kn_backward(loss));
        out[got++] = (float)kn_item(loss);
    }
    for (int i = -1, n = kn_params(&b, &p); i < n; i++) {
        kn_tensor *g = kn_grad(i < 0 ? x : p[i].tensor);
        KN_CHECK(g && got + kn_numel(g) <= 2000);
        kn_to_host(g, out + got, (size_t)kn_numel(g) * sizeof *out);
        got += (int)kn_numel(g);
    }
    KN_CHECK(!hooked || times > 4 * 2 * 4, "%d events", times);
    return got;
}

KN_TEST(hooks, looking_changes_no_bit)
{
    static float want[2000], got[2000];
    for (int recompute = 0; recompute < 2; recompute++) {
        int n = gradients(false, recompute, want);
        KN_CHECK(n > 500 && gradients(true, recompute, got) == n);
        KN_CHECK(memcmp(want, got, (size_t)n * sizeof *want) == 0, "recompute %d", recompute);
    }
}

/* ---- putting on and taking off --------------------------------------------------------------- */

typedef struct once {
    kn_module *m;
    kn_hook hook;
    int runs;
    bool again; /* puts on another one */
} once;

static void run_once(kn_module_event *e, void *arg)
{
    once *o = arg;
    o->runs++;
    KN_CHECK(kn_module_unhook(e->module, o->hook) && !kn_module_unhook(e->module, o->hook));
    if (o->again)
        o->hook = kn_module_hook(e->module, (kn_module_hooks){ .pre_forward = run_once, .arg = o });
}

static void fails(kn_module_event *e, void *arg)
{
    kn_fail("on purpose");
}

KN_TEST(hooks, taken_off)
{
    OWNED_MODULE kn_module m;
    int times = 0;
    once a = { 0 }, b = { .again = true };
    kn_module_init(&m, triple_forward);
    a.hook = kn_module_hook(&m, (kn_module_hooks){ .pre_forward = run_once, .arg = &a });
    kn_hook c = kn_module_hook(&m, all_four(count, &times));
    b.hook = kn_module_hook(&m, (kn_module_hooks){ .pre_forward = run_once, .arg = &b });
    KN_CHECK(a.hook && b.hook && c && a.hook != c);
    for (int i = 1; i <= 3; i++) {
        kn_tensor *x = row(1, 2);
        kn_backward(sum_of(kn_call(&m, x)));
        KN_CHECK(a.runs == 1 && b.runs == i && times == 4 * i, "%d %d %d", a.runs, b.runs, times);
    }
    kn_tensor *y = kn_call(&m, row(1, 2)); /* taken off between forward and backward */
    KN_CHECK(kn_module_unhook(&m, c) && !kn_module_unhook(&m, c) && !kn_module_unhook(&m, 0));
    KN_CHECK(kn_backward(sum_of(y)) && times == 14);
    KN_CHECK(kn_call(&m, row(1, 2)) &&
             kn_module_hook(&m, (kn_module_hooks){ .pre_forward = fails }));
    REFUSED(kn_call(&m, row(1, 2)), "pre_forward hook 2"); /* b comes before, once */
    KN_CHECK(kn_ok() && !kn_module_unhook(NULL, c));
    KN_CHECK_ERROR("kn_module_unhook: not an initialised module");
}

typedef struct off {
    kn_hook other;
    int runs;
} off;

static void takes_off(kn_module_event *e, void *arg)
{
    KN_CHECK(kn_module_unhook(e->module, ((off *)arg)->other));
}

/* From the moment on in which it is taken off a hook doesn't run. */
KN_TEST(hooks, taken_off_by_the_one_before)
{
    OWNED_MODULE kn_module m;
    off o = { 0 };
    kn_module_init(&m, triple_forward);
    kn_module_hook(&m, (kn_module_hooks){ .pre_forward = takes_off, .arg = &o });
    o.other = kn_module_hook(&m, (kn_module_hooks){ .pre_forward = count, .arg = &o.runs });
    KN_CHECK(kn_call(&m, row(1, 2)) && o.runs == 0);
}

static kn_tensor *twice(kn_tensor *g, void *arg)
{
    (void)arg;
    return kn_scale(g, 2);
}

static void leaf_once(kn_tensor *leaf, void *arg)
{
    once *o = arg;
    o->runs++;
    KN_CHECK(kn_off_grad(leaf, o->hook) && !kn_off_grad(leaf, o->hook));
}

KN_TEST(hooks, of_tensors_taken_off)
{
    kn_tensor *x = row(1, 2), *y = kn_scale(x, 1);
    once o = { 0 };
    kn_hook h = kn_on_grad(x, twice, NULL), of_y = kn_on_grad(y, twice, NULL);
    o.hook = kn_on_accumulated(x, leaf_once, &o);
    KN_CHECK(h && of_y && o.hook && !kn_off_grad(y, h), "of another tensor");
    for (int i = 0; i < 3; i++) {
        kn_clear_grad(x);
        KN_CHECK(kn_backward(sum_of(y), .retain_graph = true));
        KN_CHECK(at(kn_grad(x), 0) == (i == 0 ? 4 : i == 1 ? 2 : 1), "%g", at(kn_grad(x), 0));
        KN_CHECK(kn_off_grad(i == 0 ? x : y, i == 0 ? h : of_y) == (i < 2) && o.runs == 1);
    }
    KN_CHECK(!kn_off_grad(kn_detach(x), h) && !kn_off_grad(x, 0));
    KN_CHECK_OK();
}

/* ---- without gradients, on meta, kn_enter ---------------------------------------------------- */

static void shapes(kn_module_event *e, void *arg)
{
    kn_tensor *t = e->moment == KN_PRE_FORWARD    ? e->in.v[0]
                   : e->moment == KN_POST_FORWARD ? e->out.v[0]
                   : e->moment == KN_PRE_BACKWARD ? e->grad_out.v[0]
                                                  : e->grad_in.v[0];
    KN_CHECK(t && kn_size(t, 0) == 2 && kn_device_of(t) == KN_META);
    ++*(int *)arg;
    change(e, NULL);
}

static void no_tensors(kn_module_event *e, void *arg)
{
    KN_CHECK(e->in.n == 0 && e->out.n == 0 && e->grad_in.n == 0 && e->grad_out.n == 0);
    ++*(int *)arg;
}

KN_TEST(hooks, no_grad_meta_and_enter)
{
    OWNED_MODULE kn_module m, n;
    int on_meta = 0, entered = 0;
    kn_module_init(&m, triple_forward);
    kn_module_init(&n, triple_forward);
    kn_module_hook(&m, all_four(shapes, &on_meta));
    kn_module_hook(&n, all_four(no_tensors, &entered));
    kn_tensor *x = kn_require_grad(kn_zeros(KN_F32, KN_META, KN_SHAPE(2)), true);
    KN_CHECK(kn_backward(sum_of(kn_call(&m, x))) && on_meta == 4);
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_call(&m, x) && on_meta == 6);
    kn_set_grad_mode(mode);
    x = row(1, 2);
    kn_entered e = kn_enter(&n);
    kn_tensor *y = kn_scale(x, 2);
    kn_leave(e, &y, 1);
    KN_CHECK(kn_backward(sum_of(y)) && entered == 4, "%d", entered);
    KN_CHECK_OK();
}

/* ---- errors ---------------------------------------------------------------------------------- */

enum {
    FAIL,
    NO_RESULT,
    TWO_RESULTS,
    MANY_INPUTS,
    NO_INPUT,
    NO_GRAD,
    SHAPE,
    IN_PLACE,
    ADDED,
    DTYPE
};

static void wrong(kn_module_event *e, void *arg)
{
    int how = *(int *)arg;
    const bool forward = e->moment <= KN_POST_FORWARD;
    if (how == FAIL)
        kn_fail("on purpose");
    else if (how == NO_RESULT && e->moment == KN_POST_FORWARD)
        e->out.v[0] = NULL;
    else if (how == TWO_RESULTS && e->moment == KN_POST_FORWARD)
        e->out = KN_VALUES(e->out.v[0], e->out.v[0]);
    else if (how == MANY_INPUTS && e->moment == KN_PRE_FORWARD)
        e->in.n = KN_MAX_VALUES + 1;
    else if (how == NO_INPUT && e->moment == KN_PRE_FORWARD)
        e->in.v[0] = NULL;
    else if (how == NO_GRAD && !forward)
        e->grad_out.v[0] = NULL;
    else if (how == SHAPE && e->moment == KN_POST_BACKWARD)
        e->grad_in.v[0] = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 3));
    else if (how == DTYPE && e->moment == KN_PRE_BACKWARD)
        e->grad_out.v[0] = kn_cast(e->grad_out.v[0], KN_F64);
    else if (how == IN_PLACE && !forward)
        kn_fill_(e->grad_out.v[0], 0);
    else if (how == ADDED && e->moment == KN_POST_BACKWARD)
        e->grad_in.n = 2;
}

KN_TEST(hooks, errors_name_them)
{
    static const struct {
        int how, moment;
        const char *text;
    } cases[] = {
        { FAIL, KN_PRE_FORWARD, "on purpose in fc, pre_forward hook 'spy'" },
        { FAIL, KN_POST_FORWARD, "on purpose in fc, post_forward hook 'spy'" },
        { FAIL, KN_PRE_BACKWARD, "on purpose in fc, pre_backward hook 'spy'" },
        { FAIL, KN_POST_BACKWARD, "on purpose in fc, post_backward hook 'spy'" },
        { NO_RESULT, 0, "'fc' (triple): the hook left NULL as result 1" },
        { TWO_RESULTS, 0, "left 2 results in the place of 1 in fc, post_forward hook 'spy'" },
        { MANY_INPUTS, 0, "left 9 inputs; at most 8" },
        { NO_INPUT, 0, "NULL" },
        { NO_GRAD, 0, "left no gradient of result 1, which had one; zeros" },
        { SHAPE, 0, "f32[1,3] on cpu in the place of f32[2] on cpu" },
        { DTYPE, 0, "f64[2] on cpu in the place of f32[2] on cpu" },
        { IN_PLACE, 0, "wrote in place to the gradient of result 1" },
        { ADDED, 0, "gradients of 2 inputs in the place of 1" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kn_module root, m;
        int how = cases[i].how, moment = cases[i].moment;
        kn_module_init(&root, triple_forward);
        kn_module_init(&m, triple_forward);
        kn_module_add(&root, "fc", &m);
        kn_module_hook(&m, (kn_module_hooks){ !moment || moment == KN_PRE_FORWARD ? wrong : NULL,
                                              !moment || moment == KN_POST_FORWARD ? wrong : NULL,
                                              !moment || moment == KN_PRE_BACKWARD ? wrong : NULL,
                                              !moment || moment == KN_POST_BACKWARD ? wrong : NULL,
                                              .arg = &how, .name = "spy" });
        kn_tensor *x = row(1, 2);
        kn_backward(sum_of(kn_call(&m, x)));
        KN_CHECK(kn_error() && strstr(kn_error(), cases[i].text), "%zu: %s", i,
                 kn_error() ? kn_error() : "no error");
        kn_clear_error();
        KN_CHECK(!kn_grad(x));
        kn_module_free(&root);
    }
}

static kn_tensor *bad_gradient(kn_tensor *g, void *arg)
{
    return arg ? kn_fill_(g, 0), NULL : kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3));
}

static void failing_node(kn_tensor *const *grads, int n, void *arg)
{
    (void)grads, (void)n, (void)arg;
    kn_fail("on purpose");
}

KN_TEST(hooks, errors_name_hooks_of_tensors)
{
    kn_tensor *x = row(1, 2), *y = kn_scale(x, 2);
    kn_on_grad(y, bad_gradient, NULL);
    REFUSED(kn_backward(sum_of(y)), "f32[3] on cpu in the place of f32[2] on cpu");
    y = kn_scale(x, 2);
    kn_on_grad(y, bad_gradient, x);
    REFUSED(kn_backward(sum_of(y)), "hook on the gradient of the result of 'affine'");
    y = kn_scale(x, 2);
    kn_on_node(y, failing_node, NULL, NULL);
    REFUSED(kn_backward(sum_of(y)), "on purpose in hook on the node of 'affine'");
    REFUSED(kn_on_grad(x, NULL, NULL), "the hook is NULL");
    REFUSED(kn_on_node(kn_scale(x, 2), NULL, NULL, NULL), "the hook is NULL");
    REFUSED(kn_on_accumulated(x, NULL, NULL), "the hook is NULL");
}

/* ---- methods --------------------------------------------------------------------------------- */

static kn_tensor *alone(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_relu(x);
}

static kn_values with_option(kn_module *self, kn_values in, const void *arg)
{
    (void)self;
    (void)arg;
    return KN_VALUES(in.v[1] ? kn_add(in.v[0], in.v[1]) : kn_neg(in.v[0]));
}

static void only_look(kn_module_event *e, void *arg)
{
    ++*(int *)arg;
    (void)e;
}

/* Hooks leave a method's input that isn't given as it is, whatever the forward takes. */
KN_TEST(hooks, inputs_that_are_not_given)
{
    OWNED_MODULE kn_module m;
    int looks = 0;
    kn_module_init(&m, alone);
    kn_module_hook(&m, (kn_module_hooks){ only_look, only_look, only_look, only_look, &looks });
    kn_tensor *x = kn_require_grad(kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(1)), true);
    kn_values y = kn_call_method_n(&m, with_option, KN_VALUES(x, NULL), NULL, 0);
    KN_CHECK(y.n == 1 && kn_item(y.v[0]) == -2);
    KN_CHECK(kn_backward(y.v[0]) && kn_item(kn_grad(x)) == -1 && looks == 4);
}
