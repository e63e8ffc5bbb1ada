/* tests/nn/edit_test.c: a tree that changes: modules found without an error, taken out, replaced;
 * parameters frozen by patterns of their names. */
#include "nn/layers.h"
#include "nn/walk.h"
#include "optim/optim.h"
#include "tests/owned.h"

typedef struct net {
    kn_module base;
    kn_sequential body;
    kn_linear a, b, c;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((net *)self)->body, x);
}

static void build(net *n)
{
    KN_CHECK(kn_module_init(&n->base, net_forward) &&
             kn_sequential_init(&n->body, &n->base, "body") &&
             kn_linear_init(&n->a, &n->body.base, "a", 3, 3) &&
             kn_linear_init(&n->b, &n->body.base, "b", 3, 3, .no_bias = true) &&
             kn_linear_init(&n->c, &n->body.base, "c", 3, 3) &&
             kn_declare_buffer(&n->body, "seen", KN_I64, KN_CPU, KN_ZEROS_INIT, KN_SCALAR) &&
             kn_materialize(n, KN_CPU, 3));
}

static kn_tensor *input(void)
{
    return kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(2, 3));
}

static void check_same(kn_tensor *x, kn_tensor *y)
{
    KN_CHECK(x && y && memcmp(kn_data(x), kn_data(y), 6 * sizeof(float)) == 0, "%s",
             kn_error() ? kn_error() : "other values");
}

KN_TEST(edit, has)
{
    OWNED_MODULE net n = { 0 };
    build(&n);
    static const char *const there[] = { "",       "body",          "body.a",
                                         "body.c", "body.a.weight", "body.seen" };
    static const char *const absent[] = { "b",  "body.d", "body.b.bias", "body.a.", ".body",
                                          "..", "body.",  "body.seen.x", "weight",  "body.aa" };
    for (size_t i = 0; i < sizeof there / sizeof *there; i++)
        KN_CHECK(kn_module_has(&n, there[i]), "'%s'", there[i]);
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        KN_CHECK(!kn_module_has(&n, absent[i]), "'%s'", absent[i]);
    KN_CHECK(kn_module_has(&n.body, "a.bias") && !kn_module_has(&n.body, "body"));
    KN_CHECK_OK();
    REFUSED(kn_module_has(&n, NULL), "kn_module_has: the path is NULL");
    REFUSED(kn_module_find(&n, NULL), "kn_module_find: the path is NULL");
}

/* The removed module is a tree of its own, with its gradient; the others don't notice. */
KN_TEST(edit, remove)
{
    net n = { 0 };
    build(&n);
    kn_tensor *x = input(), *want = kn_call(&n.c, kn_call(&n.a, x));
    const kn_param *p;
    KN_CHECK(kn_params(&n, &p) == 5);
    KN_CHECK(kn_backward(sum_of(kn_call(&n, x))) && kn_backward(sum_of(kn_call(&n, x))));
    KN_CHECK(kn_module_remove(&n, "body.b") == &n.b.base);
    KN_CHECK(strcmp(kn_module_path(&n.b), "") == 0 && kn_module_children(&n.body) == 2);
    KN_CHECK(kn_params(&n, &p) == 4 && strcmp(p[2].name, "body.c.weight") == 0);
    KN_CHECK(kn_params(&n.b, &p) == 1 && strcmp(p[0].name, "weight") == 0);
    KN_CHECK(kn_param_grad(&p[0]) && kn_grad_scale(&n.b) == 0.5 && kn_grad_scale(&n) == 0.5);
    check_same(kn_call(&n, x), want);
    KN_CHECK(!kn_module_has(&n, "body.b"));
    kn_module *body = kn_module_remove(&n, "body");
    KN_CHECK(body == &n.body.base && strcmp(kn_module_path(&n.c), "c") == 0 &&
             kn_module_children(&n) == 0 && kn_params(&n, &p) == 0);
    KN_CHECK(kn_module_add(&n.base, "again", body) && kn_module_add(&n.base, "b", &n.b.base) &&
             strcmp(kn_module_path(&n.c), "again.c") == 0);
    kn_module_free(&n);
    KN_CHECK_OK();
}

/* Gradients of a scaled loss that wait in a part are still those of a scaled loss. */
KN_TEST(edit, a_part_leaves_with_its_loss_scale)
{
    OWNED_MODULE net n = { 0 };
    build(&n);
    kn_scaler *s = kn_scaler_new(&n, .init_scale = 256);
    kn_tensor *loss = sum_of(kn_call(&n, input()));
    KN_CHECK(kn_backward(kn_scale_loss(s, loss)));
    KN_CHECK(kn_grad_scale(&n.b) == 1.0 / 256);
    KN_CHECK(kn_module_remove(&n, "body.b") == &n.b.base && kn_grad_scale(&n.b) == 1.0 / 256 &&
                 kn_grad_scale(&n) == 1.0 / 256,
             "%g", kn_grad_scale(&n.b));
    kn_scaler_free(s);
    kn_module_free(&n.b);
}

KN_TEST(edit, replace)
{
    net n = { 0 };
    kn_mlp other;
    build(&n);
    kn_tensor *x = input();
    KN_CHECK(kn_mlp_init(&other, NULL, "", 3) && kn_materialize(&other, KN_CPU, 4));
    kn_tensor *want = kn_call(&n.c, kn_call(&other, kn_call(&n.a, x)));
    KN_CHECK(kn_module_replace(&n, "body.b", &other) == &n.b.base);
    KN_CHECK(kn_module_child(&n.body, 1) == &other.base &&
             strcmp(kn_module_path(&other), "body.b") == 0 &&
             kn_module_param(&n, "body.b.c_fc.weight"));
    check_same(kn_call(&n, x), want);
    const kn_param *p;
    KN_CHECK(kn_params(&n, &p) == 8 && strcmp(p[2].name, "body.b.c_fc.weight") == 0);
    KN_CHECK(kn_backward(sum_of(kn_call(&n, x))));
    KN_CHECK(kn_grad_scale(&n) == 1);
    kn_module_free(&n.b); /* the caller's now */
    kn_module_free(&n);
    KN_CHECK(!other.base.impl);
    KN_CHECK_OK();
}

/* ---- replaced by address --------------------------------------------------------------------- */

typedef struct direct {
    kn_module base;
    kn_linear fc;
} direct;

static kn_tensor *direct_forward(kn_module *self, kn_tensor *x)
{
    return kn_call(&((direct *)self)->fc, x);
}

/* Twice what inner gives. */
typedef struct doubler {
    kn_module base, *inner;
} doubler;

static kn_tensor *doubler_forward(kn_module *self, kn_tensor *x)
{
    return kn_scale(kn_call(((doubler *)self)->inner, x), 2);
}

static void double_at(void *n, const char *path, doubler *d)
{
    KN_CHECK(kn_module_init(&d->base, doubler_forward));
    d->inner = kn_module_replace(n, path, d);
    KN_CHECK(d->inner && kn_module_add(&d->base, "inner", d->inner));
}

/* A forward that calls its struct's member runs the module in its place, which may call it. */
KN_TEST(edit, calls_of_the_old_module_run_the_new)
{
    for (int recompute = 0; recompute < 2; recompute++) {
        direct n = { 0 };
        doubler once, twice;
        KN_CHECK(kn_module_init(&n.base, direct_forward) &&
                 kn_linear_init(&n.fc, &n.base, "fc", 3, 3) && kn_materialize(&n, KN_CPU, 3));
        kn_recompute(&n, recompute);
        kn_tensor *x = input(), *y = kn_call(&n, x);
        double_at(&n, "fc", &once);
        check_same(kn_call(&n, x), kn_scale(y, 2));
        double_at(&n, "fc", &twice);
        check_same(kn_call(&n, x), kn_scale(y, 4));
        check_same(kn_call(&n.fc, x), kn_scale(y, 4));
        KN_CHECK(kn_backward(sum_of(kn_call(&n, x))));
        KN_CHECK(kn_item(kn_amax(kn_abs(kn_grad(kn_module_param(&n, "fc.inner.inner.bias"))), 0,
                                 NULL, false)) == 8);
        REFUSED(kn_call_method(&n.fc, direct_forward, x),
                "put 'fc' (doubler) in the place of the module that is called");
        REFUSED(kn_enter(&n.fc).frame, "kn_enter: kn_module_replace put 'fc'");
        kn_linear other;
        KN_CHECK(kn_linear_init(&other, NULL, "", 3, 3));
        REFUSED(kn_module_replace(&n, "fc.inner.inner", &other),
                "'fc.inner.inner' stands inside of its own replacement");
        kn_module_free(&n);
        KN_CHECK(!n.fc.base.impl && !once.base.impl && !twice.base.impl);
    }
    KN_CHECK_OK();
}

/* An optimizer of the tree as it was says so. */
KN_TEST(edit, optimizers_notice)
{
    OWNED_MODULE net n = { 0 };
    build(&n);
    kn_optim *o = kn_sgd(&n, .lr = 0.1);
    KN_CHECK(kn_module_remove(&n, "body.b"));
    KN_CHECK(kn_backward(sum_of(kn_call(&n, input()))));
    KN_CHECK(!kn_step(o) && kn_error());
    kn_clear_error();
    kn_optim_free(o);
    kn_module_free(&n.b);
}

/* Everything that walks over n's tree: params[] has so many entries. */
static void walk_everything(net *n, int params)
{
    const kn_param *p;
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    KN_CHECK(kn_params(n, &p) == params && kn_module_print(out, n));
    fclose(out);
    KN_CHECK(!strstr(text, "b: linear"), "%s", text);
    free(text);
    int walked = 0;
    for (kn_walk w = kn_walk_begin(n); kn_next_param(&w);)
        walked++;
    KN_CHECK(walked == params && kn_module_find(n, "body.c") == &n->c.base);
    kn_train(n, true);
    kn_zero_grad(n);
    kn_tensor *y = kn_call(n, input());
    KN_CHECK(y && kn_backward(sum_of(y)));
    OWNED_OPTIM kn_optim *o = kn_sgd(n, .lr = 0.1);
    KN_CHECK(kn_clip_grad_norm(n, 1) && kn_step(o));
}

/* Whatever walks over the tree then doesn't meet it: also one that came in another's place, and one
 * whose struct is used anew. */
KN_TEST(edit, a_freed_child_leaves_the_tree)
{
    for (int i = 0; i < 3; i++) {
        net n = { 0 };
        kn_linear other;
        build(&n);
        KN_CHECK(kn_backward(sum_of(kn_call(&n, input()))));
        kn_optim *before = kn_sgd(&n, .lr = 0.1);
        if (i == 1)
            KN_CHECK(kn_linear_init(&other, NULL, "", 3, 3) &&
                     kn_module_replace(&n, "body.b", &other) == &n.b.base);
        kn_module_free(i == 1 ? &other : &n.b);
        walk_everything(&n, 4);
        REFUSED(kn_step(before), "make the optimizer after the module is complete");
        kn_optim_free(before);
        REFUSED(kn_call(&n.b, input()), "that was freed");
        KN_CHECK(i != 2 || kn_linear_init(&n.b, &n.body.base, "b", 3, 3, .no_bias = true));
        KN_CHECK(kn_module_children(&n.body) == 2 + (i == 2));
        kn_module_free(&n.body);
        KN_CHECK(kn_module_children(&n) == 0 && kn_param_count(&n) == 0);
        kn_module_free(&n);
        KN_CHECK_OK();
    }
}

static net *open_net;

static kn_tensor *meddling_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    KN_CHECK(!kn_module_remove(open_net, "body.a"));
    return x;
}

/* Forwards of the library's layers call their children by address: those can be replaced, but not
 * taken out. */
KN_TEST(edit, parts_of_layers)
{
    kn_module top;
    kn_self_attention self;
    kn_mlp mlp;
    kn_swiglu swiglu;
    doubler twice[12];
    KN_CHECK(kn_module_list_init(&top, NULL, "") &&
             kn_self_attention_init(&self, &top, "self", 4, 2, .qk_norm = true) &&
             kn_mlp_init(&mlp, &top, "mlp", 4) && kn_swiglu_init(&swiglu, &top, "swiglu", 4, 8) &&
             kn_materialize(&top, KN_CPU, 3));
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(1, 3, 4));
    int parts = 0;
    for (int i = 0; i < kn_module_children(&top); i++) {
        kn_module *layer = kn_module_child(&top, i);
        for (int k = 0; k < kn_module_children(layer); k++) {
            kn_tensor *before = kn_call(layer, x);
            char path[64];
            snprintf(path, sizeof path, "%s", kn_module_path(kn_module_child(layer, k)));
            if (kn_module_class(kn_module_child(layer, k))[0] == 'd') /* dropout: no parameters */
                continue;
            REFUSED(kn_module_remove(&top, path), "which goes on to call it");
            double_at(&top, path, &twice[parts++]);
            kn_tensor *apart = kn_abs(kn_sub(kn_call(layer, x), before));
            KN_CHECK(kn_item(kn_amax(apart, 0, NULL, false)) > 1e-6, "%s isn't called", path);
        }
    }
    KN_CHECK(parts == 4 + 2 + 3, "%d", parts);
    kn_module_free(&top);
    KN_CHECK_OK();
}

/* A module that was replaced and has no other place is freed with the one that replaced it. */
KN_TEST(edit, the_old_module_goes_with_the_new)
{
    direct n = { 0 };
    kn_linear other;
    KN_CHECK(kn_module_init(&n.base, direct_forward) &&
             kn_linear_init(&n.fc, &n.base, "fc", 3, 3) && kn_materialize(&n, KN_CPU, 3) &&
             kn_linear_init(&other, NULL, "", 3, 3) && kn_materialize(&other, KN_CPU, 4));
    kn_tensor *want = kn_call(&other, input());
    KN_CHECK(kn_module_replace(&n, "fc", &other) == &n.fc.base);
    check_same(kn_call(&n, input()), want);
    kn_module_free(&n);
    KN_CHECK(!n.fc.base.impl && !other.base.impl);
    KN_CHECK_OK();
}

static kn_tensor *direct_method(kn_module *self, kn_tensor *x)
{
    return kn_call_method(&((direct *)self)->fc, direct_forward, x);
}

/* A forward still calls the struct of an old module that was freed. */
KN_TEST(edit, the_old_module_may_be_freed_first)
{
    for (int recompute = 0; recompute < 2; recompute++) {
        OWNED_MODULE direct n = { 0 };
        kn_linear first, second;
        KN_CHECK(kn_module_init(&n.base, direct_forward) &&
                 kn_linear_init(&n.fc, &n.base, "fc", 3, 3) && kn_materialize(&n, KN_CPU, 3) &&
                 kn_linear_init(&first, NULL, "", 3, 3) && kn_materialize(&first, KN_CPU, 4) &&
                 kn_linear_init(&second, NULL, "", 3, 3) && kn_materialize(&second, KN_CPU, 5));
        kn_tensor *one = kn_call(&first, input()), *two = kn_call(&second, input());
        kn_recompute(&n, recompute);
        kn_module_free(kn_module_replace(&n, "fc", &first));
        check_same(kn_call(&n, input()), one);
        kn_module_free(kn_module_replace(&n, "fc", &second));
        kn_tensor *y = kn_call(&n, input());
        check_same(y, two);
        KN_CHECK(kn_backward(sum_of(y)) && !n.fc.base.impl);
        REFUSED(kn_call_method(&n, direct_method, input()),
                "kn_call_method: kn_module_replace put 'fc' (linear) in the place");
        KN_CHECK(!kn_call(&n.fc, input())); /* outside of the tree's calls */
        KN_CHECK_ERROR("kn_call: not an initialised module, or one that was freed");
        kn_module *last = kn_module_remove(&n, "fc");
        KN_CHECK(last == &second.base && !kn_call(&n, input()));
        KN_CHECK_ERROR("kn_call: not an initialised module, or one that was freed");
        kn_module_free(last);
    }
}

/* A struct whose kn_module isn't its first member is no module, whatever stands there. */
KN_TEST(edit, a_struct_that_begins_with_something_else)
{
    struct {
        int64_t first;
        kn_module base;
    } m;
    KN_CHECK(kn_module_init(&m.base, direct_forward));
    static const uint64_t values[] = {
        0, 1, 784, 0xa00000310, 0x3ff0000000000000, UINT64_MAX, 0xdeadbeefcafe
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        memcpy(&m.first, &values[i], sizeof m.first);
        REFUSED(kn_call(&m, input()), "kn_module must be the first member of the struct");
        kn_module_free(&m);
    }
    kn_module_free(&m.base);
    KN_CHECK_OK();
}

/* Messages call a root, which has no path, by its class. */
KN_TEST(edit, errors_name_a_root_by_its_class)
{
    kn_module m, child;
    KN_CHECK(kn_module_init(&m, direct_forward) && kn_module_init(&child, net_forward));
    REFUSED(kn_module_param(&m, "w"), "'direct' (direct) has no parameter 'w'");
    REFUSED(kn_module_find(&m, "w"), "there is no module 'w' below 'direct'");
    REFUSED(kn_module_add(&m, NULL, &m), "'direct' would become its own ancestor");
    KN_CHECK(kn_module_add(&m, "a", &child) && !kn_module_add(&m, NULL, &child));
    KN_CHECK_ERROR("'net' has a place in the tree already ('a')");
    REFUSED(kn_call_n(&m, (kn_values){ 2, { input(), input() } }, NULL, 0).n,
            "'direct' (direct) takes one tensor, 2 were passed");
    kn_module_free(&m);
}

KN_TEST(edit, errors)
{
    OWNED_MODULE net n = { 0 };
    kn_linear l;
    OWNED_MODULE kn_module meddler;
    build(&n);
    REFUSED(kn_module_remove(&n, "body.d"), "there is no module 'body.d'");
    REFUSED(kn_module_remove(&n, ""), "kn_module_remove: '' names the module itself");
    REFUSED(kn_module_remove(&n, NULL), "the path is NULL");
    REFUSED(kn_module_replace(&n, "body.b", &n.c), "has a place in a tree already ('body.c')");
    REFUSED(kn_module_replace(&n.body, "b", &n), "would become its own ancestor");
    static const char *const places[] = { "body.b", "body.d", "", NULL };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        REFUSED(kn_module_replace(&n, places[i], &n), "would become its own ancestor");
        KN_CHECK(n.base.impl, "an error freed the tree (%zu)", i);
    }
    REFUSED(kn_module_replace(&n, "body.b", NULL), "kn_module_replace: not an initialised module");
    KN_CHECK(kn_linear_init(&l, NULL, "", 3, 3));
    REFUSED(kn_module_replace(&n, "body.d", &l), "there is no module 'body.d'");
    KN_CHECK(!l.base.impl, "an error leaked the child");
    KN_CHECK(kn_module_init(&meddler, meddling_forward));
    open_net = &n;
    kn_call(&meddler, input());
    KN_CHECK_ERROR("'body.a' can't leave its place while a module is called");
    KN_CHECK(kn_module_children(&n.body) == 3);
}

static int trainable(void *m)
{
    const kn_param *p;
    int n = kn_params(m, &p), count = 0;
    for (int i = 0; i < n; i++)
        count += p[i].trainable;
    return count;
}

KN_TEST(edit, freeze_by_names)
{
    OWNED_MODULE net n = { 0 };
    build(&n);
    KN_CHECK(kn_freeze_matching(&n, "*.bias", true) == 2 && trainable(&n) == 3);
    KN_CHECK(kn_freeze_matching(&n, "body.a.*, body.?.weight", true) == 4 && trainable(&n) == 0);
    KN_CHECK(kn_freeze_matching(&n, "body.c.weight", false) == 1 && trainable(&n) == 1);
    KN_CHECK(kn_freeze_matching(&n, "*", false) == 5 && trainable(&n) == 5);
    KN_CHECK_OK();
    REFUSED(kn_freeze_matching(&n, "body.a.*, *.scale", true),
            "kn_freeze_matching: the pattern '*.scale' matches no parameter");
    KN_CHECK(trainable(&n) == 5);
    REFUSED(kn_freeze_matching(&n, NULL, true), "the list of patterns is NULL");
}
