/* tests/nn/oom_test.c: out of memory at every place. A small transformer, or a convolutional net,
 * is built, trained and freed, again and again, with the first, second, third, ... allocation
 * failing. Each run must end in a standing error (never a crash), free every tensor and byte, and
 * leave a context in which the next run works. */
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include "optim/optim.h"
#include "tests/failing.h"
#include "tests/owned.h"

typedef struct net {
    kn_module base;
    kn_embedding wte;
    kn_embedding_bag bag;
    kn_layer_norm ln;
    kn_rms_norm rms;
    kn_self_attention attn;
    kn_multi_head_attention other;
    kn_mlp mlp;
    kn_swiglu glu;
    kn_linear head;
} net;

static kn_tensor *net_forward(kn_module *self, kn_tensor *ids)
{
    net *m = (net *)self;
    kn_tensor *x = kn_call(&m->wte, ids);
    x = kn_add(x, kn_unsqueeze(kn_call(&m->bag, ids), 1));
    kn_tensor *h = kn_add_norm(&m->rms, x, kn_call(&m->attn, kn_call(&m->ln, x)), &x);
    x = kn_add(x, kn_call_n(&m->other, KN_VALUES(h, NULL), NULL, 0).v[0]);
    return kn_call(&m->head, kn_add(kn_call(&m->glu, x), kn_call(&m->mlp, x)));
}

static bool build(net *m)
{
    return kn_module_init(&m->base, net_forward) &&
           kn_embedding_init(&m->wte, &m->base, "wte", 5, 8) &&
           kn_embedding_bag_init(&m->bag, &m->base, "bag", 5, 8, .sparse = true,
                                 .padding_idx = 1) &&
           kn_layer_norm_init(&m->ln, &m->base, "ln", 8) &&
           kn_rms_norm_init(&m->rms, &m->base, "rms", 8) &&
           kn_self_attention_init(&m->attn, &m->base, "attn", 8, 2, .kv_heads = 1, .rope = true,
                                  .rope_base = 100, .dropout = 0.1) &&
           kn_multi_head_attention_init(&m->other, &m->base, "other", 8, 2, .qk_norm = true) &&
           kn_mlp_init(&m->mlp, &m->base, "mlp", 8, .dropout = 0.1) &&
           kn_swiglu_init(&m->glu, &m->base, "glu", 8, 4, .no_bias = true) &&
           kn_linear_init(&m->head, &m->base, "head", 8, 5, .no_bias = true) &&
           kn_share_parameter(&m->base, "tied", kn_module_param(&m->wte, "weight")) &&
           kn_recompute(&m->mlp, true) && kn_materialize(m, KN_CPU, 1);
}

static bool train(net *m, kn_optim *o)
{
    int64_t ids[6] = { 0, 1, 2, 3, 4, 0 };
    kn_scope s = kn_scope_begin();
    kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(2, 3));
    bool ok = kn_backward(kn_cross_entropy(kn_call(m, x), x));
    kn_scope_end(s);
    kn_clip_grad_norm(m, 1);
    return ok && kn_find_nonfinite_grad(m) == NULL && kn_step(o);
}

static bool whole_run(void *arg)
{
    (void)arg;
    OWNED_MODULE net m = { 0 };
    IN_SCOPE;
    OWNED_OPTIM kn_optim *o = build(&m) ? kn_adamw(&m, .lr = 1e-3) : NULL;
    return o && train(&m, o) && train(&m, o);
}

/* ---- a convolutional net --------------------------------------------------------------------- */

typedef struct convnet {
    kn_module base;
    kn_conv2d conv;
    kn_batch_norm bn;
    kn_sequential more;
    kn_conv_transpose2d up;
    kn_group_norm gn;
    kn_activation act;
    kn_linear head;
} convnet;

static kn_tensor *convnet_forward(kn_module *self, kn_tensor *x)
{
    convnet *m = (convnet *)self;
    x = kn_call(&m->bn, kn_call(&m->conv, kn_channels_last(x)));
    x = kn_interpolate(kn_call(&m->more, x), .size = 4, .mode = KN_BILINEAR);
    x = kn_avg_pool2d(kn_max_pool2d(x, .kernel = 2), .kernel = 2);
    return kn_call(&m->head, kn_flatten(x, 1, -1));
}

static bool build_convnet(convnet *m)
{
    return kn_module_init(&m->base, convnet_forward) &&
           kn_conv2d_init(&m->conv, &m->base, "conv", 2, 3, 3, .pad = 1, .device = KN_META) &&
           kn_batch_norm_init(&m->bn, &m->base, "bn", 3, .device = KN_META, .cumulative = true) &&
           kn_sync_batch_norm(&m->bn, kn_comm_self()) == 1 &&
           kn_sequential_init(&m->more, &m->base, "more") &&
           kn_conv_transpose2d_init(&m->up, &m->more.base, "0", 3, 4, 2, .device = KN_META) &&
           kn_group_norm_init(&m->gn, &m->more.base, "1", 2, 4, .device = KN_META) &&
           kn_activation_init(&m->act, NULL, "", kn_relu) &&
           kn_sequential_append(&m->more, &m->act) &&
           kn_linear_init(&m->head, &m->base, "head", 4, 2, .device = KN_META) &&
           kn_recompute(&m->bn, true) && kn_materialize(m, KN_CPU, 1);
}

static bool whole_run_of_convnet(void *arg)
{
    (void)arg;
    OWNED_MODULE convnet m = { 0 };
    const int64_t target[2] = { 0, 1 };
    IN_SCOPE;
    OWNED_OPTIM kn_optim *o = build_convnet(&m) ? kn_sgd(&m, .lr = 1e-2) : NULL;
    kn_tensor *x = o ? kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(2, 2, 4, 4)) : NULL;
    kn_tensor *y = x ? kn_from(KN_I64, KN_CPU, target, KN_SHAPE(2)) : NULL;
    return y && kn_backward(kn_cross_entropy(kn_call(&m, x), y)) && kn_step(o);
}

/* ---- a tree that changes --------------------------------------------------------------------- */

static bool change(kn_sequential *m, kn_linear *layer, kn_module **out)
{
    return kn_sequential_init(m, NULL, "") &&
           kn_linear_init(&layer[0], &m->base, "a", 3, 3, .weight = KN_TRUNCATED_NORMAL_INIT(1)) &&
           kn_linear_init(&layer[1], &m->base, "b", 3, 3) &&
           kn_linear_init(&layer[2], NULL, "", 3, 3) && kn_materialize(m, KN_CPU, 1) &&
           (out[0] = kn_module_replace(m, "a", &layer[2])) && (out[1] = kn_module_remove(m, "b")) &&
           kn_freeze_matching(m, "*.bias, a.*", true) == 2 && kn_module_has(m, "a.bias") &&
           kn_call(out[0], kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)));
}

static bool whole_run_of_changes(void *arg)
{
    (void)arg;
    kn_sequential m = { 0 };
    kn_linear layer[3] = { 0 };
    kn_module *out[2] = { 0 };
    IN_SCOPE;
    bool ok = change(&m, layer, out);
    for (int i = 0; i < 2; i++)
        kn_module_free(out[i]);
    kn_module_free(&m);
    kn_module_free(&layer[2]);
    return ok;
}

/* ---- each allocation in turn ----------------------------------------------------------------- */

static void nothing_is_open(void *arg)
{
    (void)arg;
    KN_CHECK(!kn_in_backward() && !kn_context_get()->frame, "a backward or a call was left open");
}

static void each_allocation(bool (*run)(void *arg), int64_t least)
{
    KN_CHECK(run(NULL)); /* pools and streams are made at first use and stay */
    each_allocation_fails(run, nothing_is_open, NULL, least);
}

KN_TEST(oom, every_allocation_may_fail)
{
    each_allocation(whole_run, 500);
}

KN_TEST(oom, every_allocation_of_a_convnet_may_fail)
{
    each_allocation(whole_run_of_convnet, 200);
}

KN_TEST(oom, every_allocation_of_a_changing_tree_may_fail)
{
    each_allocation(whole_run_of_changes, 40);
}
