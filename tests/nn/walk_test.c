/* tests/nn/walk_test.c: walks over modules, parameters and buffers; look-ups that fail nothing. */
#include "nn/walk.h"
#include "nn/layers.h"
#include "tests/owned.h"

static kn_tensor *net_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return x;
}

typedef struct net {
    kn_module base, part, list;
    kn_linear a, b, c;
} net;

static void build(net *n)
{
    *n = (net){ 0 };
    kn_module_init(&n->base, net_forward);
    kn_linear_init(&n->a, &n->base, "a", 2, 2);
    kn_module_list_init(&n->list, &n->base, "list");
    kn_linear_init(&n->b, &n->list, "0", 2, 2, .no_bias = true);
    kn_module_init(&n->part, net_forward);
    kn_module_add(&n->base, "part", &n->part);
    kn_linear_init(&n->c, &n->part, "c", 2, 2);
    kn_share_parameter(&n->part, "tied", kn_module_param(&n->a, "weight"));
    kn_tensor *mean =
        kn_declare_buffer(&n->part, "mean", KN_F32, KN_CPU, KN_ZEROS_INIT, KN_SHAPE(1));
    kn_buffer(&n->c, "mean", mean);
    kn_buffer(&n->base, "steps", kn_zeros(KN_I64, KN_CPU, KN_SHAPE(1)));
    KN_CHECK_OK();
}

static const char *walk(void *m, bool (*next)(kn_walk *w))
{
    static char text[512];
    text[0] = 0;
    for (kn_walk w = kn_walk_begin(m); next(&w);) {
        KN_CHECK(w.module && (next == kn_next_module) == !w.tensor);
        KN_CHECK(next != kn_next_param || kn_look_param(m, w.name) == w.tensor);
        KN_CHECK(next != kn_next_buffer || kn_look_buffer(m, w.name) == w.tensor);
        KN_CHECK(next != kn_next_module || kn_look_module(m, w.name) == w.module);
        strcat(strcat(text, w.name), " ");
    }
    return text;
}

KN_TEST(walk, over_a_tree)
{
    OWNED_MODULE net n;
    build(&n);
    KN_CHECK(strcmp(walk(&n, kn_next_module), " a list list.0 part part.c ") == 0);
    KN_CHECK(strcmp(walk(&n, kn_next_param),
                    "a.weight a.bias list.0.weight part.c.weight part.c.bias ") == 0,
             "the shared one comes once: %s", walk(&n, kn_next_param));
    KN_CHECK(strcmp(walk(&n, kn_next_buffer), "steps part.mean ") == 0);
    KN_CHECK(strcmp(walk(&n.part, kn_next_module), " c ") == 0);
    KN_CHECK(strcmp(walk(&n.part, kn_next_param), "tied c.weight c.bias ") == 0);
    KN_CHECK(strcmp(walk(&n.list, kn_next_buffer), "") == 0);
    kn_walk w = kn_walk_begin(&n.b);
    KN_CHECK(kn_next_module(&w) && !kn_next_module(&w) && !kn_next_module(&w));
    KN_CHECK_OK();
}

KN_TEST(walk, look_ups_fail_nothing)
{
    OWNED_MODULE net n;
    build(&n);
    static const char *const absent[] = { "b",      "a.",     ".a", "a..weight", "part.c.weight.x",
                                          "list.1", "weight", "." };
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
        KN_CHECK(!kn_look_module(&n, absent[i]) && !kn_look_param(&n, absent[i]) &&
                     !kn_look_buffer(&n, absent[i]) && !kn_module_has(&n, absent[i]),
                 "%s", absent[i]);
    KN_CHECK(kn_look_module(&n, "") == &n.base && kn_look_module(&n, "part.c") == &n.c.base);
    KN_CHECK(kn_look_param(&n, "part.tied") == kn_look_param(&n.a, "weight"));
    KN_CHECK(kn_look_buffer(&n, "steps") && !kn_look_param(&n, "steps"));
    KN_CHECK(kn_module_has(&n, "steps") && kn_module_has(&n, "part.tied"));
    KN_CHECK_OK();
    REFUSED(kn_look_module(NULL, "a"), "kn_look_module: not an initialised module");
    REFUSED(kn_look_param(&n, NULL), "kn_look_param: the path is NULL");
    kn_walk w = kn_walk_begin(NULL);
    KN_CHECK_ERROR("kn_walk_begin: not an initialised module");
    KN_CHECK(!kn_next_module(&w) && !kn_next_param(&w) && kn_ok() && !kn_next_buffer(NULL));
    KN_CHECK_ERROR("the walk is NULL");
}
