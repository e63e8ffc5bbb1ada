/* tests/nn/sequential_test.c: modules called one after another, and functions as modules. */
#include "nn/layers.h"
#include "tests/owned.h"

static double first_difference(kn_tensor *a, kn_tensor *b)
{
    KN_CHECK(a && b, "%s", kn_error() ? kn_error() : "no result");
    return kn_item(kn_amax(kn_abs(kn_sub(a, b)), 0, NULL, false));
}

/* Built in all three ways: appended, from an array, and by names of the program's own. */
KN_TEST(sequential, calls_its_children_in_order)
{
    for (int way = 0; way < 3; way++) {
        kn_sequential net;
        kn_linear a, b;
        kn_activation act;
        kn_scope scope = kn_scope_begin();
        KN_CHECK(kn_sequential_init(&net, NULL, ""));
        kn_module *at = way == 2 ? &net.base : NULL;
        KN_CHECK(kn_linear_init(&a, at, "in", 3, 5) &&
                 kn_activation_init(&act, at, "act", kn_relu) &&
                 kn_linear_init(&b, at, "out", 5, 2));
        if (way == 0)
            KN_CHECK(kn_sequential_append(&net, &a) && kn_sequential_append(&net, &act) &&
                     kn_sequential_append(&net, &b));
        if (way == 1)
            KN_CHECK(kn_sequential_extend(&net, (void *[]){ &a, &act, &b }, 3));
        const char *const names[2] = { way == 2 ? "in.weight" : "0.weight",
                                       way == 2 ? "out.bias" : "2.bias" };
        KN_CHECK(kn_module_children(&net) == 3 && kn_module_param(&net, names[0]) &&
                 kn_module_param(&net, names[1]));
        KN_CHECK(kn_materialize(&net, KN_CPU, 5));
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(4, 3));
        kn_tensor *y = kn_call(&net, x);
        KN_CHECK(first_difference(y, kn_call(&b, kn_relu(kn_call(&a, x)))) == 0);
        KN_CHECK(kn_backward(sum_of(y)) && kn_grad(kn_module_param(&net, names[0])));
        kn_scope_end(scope);
        kn_module_free(&net);
        KN_CHECK(!a.base.impl && !act.base.impl, "the children were not freed");
        KN_CHECK_OK();
    }
}

KN_TEST(sequential, empty_and_nested)
{
    kn_sequential outer, inner;
    kn_activation act;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(4, 3));
    KN_CHECK(kn_sequential_init(&outer, NULL, "") && kn_call(&outer, x) == x);
    KN_CHECK(kn_sequential_init(&inner, &outer.base, "inner") &&
             kn_activation_init(&act, &inner.base, "act", kn_tanh));
    KN_CHECK(kn_recompute(&inner, true));
    kn_require_grad(x, true);
    kn_tensor *y = kn_call(&outer, x);
    KN_CHECK(first_difference(y, kn_tanh(x)) == 0);
    KN_CHECK(kn_backward(sum_of(y)) && kn_grad(x));
    KN_CHECK(kn_sequential_extend(&outer, NULL, 0));
    kn_module_free(&outer);
}

KN_TEST(sequential, appends_after_a_removal)
{
    OWNED_MODULE kn_sequential s;
    kn_linear l[5];
    KN_CHECK(kn_sequential_init(&s, NULL, ""));
    for (int i = 0; i < 5; i++) {
        KN_CHECK(kn_linear_init(&l[i], NULL, "", 3, 3) && kn_sequential_append(&s, &l[i]));
        if (i == 2) /* "1" and "2" are left, then "3" comes */
            kn_module_free(kn_module_remove(&s, "0"));
    }
    KN_CHECK(kn_module_children(&s) == 4 && kn_module_has(&s, "3") && kn_module_has(&s, "4"));
    KN_CHECK(kn_module_child(&s, 2) == &l[3].base && kn_module_child(&s, 3) == &l[4].base);
    KN_CHECK_OK();
}

KN_TEST(sequential, errors)
{
    OWNED_MODULE kn_sequential s;
    kn_linear l, other = { 0 };
    kn_activation a;
    REFUSED(kn_activation_init(&a, NULL, "act", NULL),
            "kn_activation_init: 'act' has no function (NULL)");
    KN_CHECK(kn_sequential_init(&s, NULL, "") && kn_linear_init(&l, NULL, "", 3, 3));
    REFUSED(kn_sequential_append(&s, &other), "not an initialised module");
    REFUSED(kn_sequential_append(&s, NULL), "not an initialised module");
    KN_CHECK(kn_sequential_append(&s, &l));
    REFUSED(kn_sequential_append(&s, &l), "has a place in the tree already ('0')");
    REFUSED(kn_sequential_append(&s, &s), "would become its own ancestor");
    KN_CHECK(s.base.impl, "freed by its own append");
    REFUSED(kn_sequential_extend(&s, NULL, 2), "kn_sequential_extend: the list of modules is NULL");
    REFUSED(kn_sequential_extend(&s, (void *[]){ &l }, -1), "the number of modules is -1");
    KN_CHECK(kn_linear_init(&other, NULL, "", 3, 3));
    REFUSED(kn_sequential_append((kn_sequential *)&l, &other),
            "'0' (linear) isn't a kn_sequential");
    KN_CHECK(!other.base.impl, "an error leaked the child");
    REFUSED(kn_sequential_append((kn_sequential *)&l, &s), "'0' (linear) isn't a kn_sequential");
    KN_CHECK(s.base.impl && l.base.impl, "an error freed the tree");
    KN_CHECK(kn_linear_init(&other, NULL, "", 3, 3));
    kn_fail("earlier");
    REFUSED(kn_sequential_extend(&s, (void *[]){ &l, &other }, 2), "earlier");
    KN_CHECK(!other.base.impl, "an error leaked the child");
    KN_CHECK(!kn_call(&s, NULL));
    kn_clear_error();
}
