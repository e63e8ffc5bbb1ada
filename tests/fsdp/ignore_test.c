/* tests/fsdp/ignore_test.c: ignored modules and parameters: parameters and buffers stay unchanged
 * on every rank, and they become no units. Rank functions return a status and never assert. */
#include "tests/fsdp/net.h"

static bool add_buffers(net *m, float own)
{
    IN_SCOPE;
    return kn_buffer(&m->fc1, "count", kn_from(KN_F32, KN_CPU, &own, KN_SHAPE(1))) &&
           kn_buffer(&m->fc2, "count", kn_from(KN_F32, KN_CPU, &own, KN_SHAPE(1))) &&
           kn_declare_buffer(&m->fc1, "later", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(2));
}

static bool is_alone(const net *m, const char *name)
{
    return !kn_module_param(m, name)->leaf || !kn_module_param(m, name)->leaf->dest;
}

/* fc1 with its buffers, and wte, which head shares: by the module that shares it. */
RANK_TEST(ignore, modules_keep_what_they_hold, IN_ALL_WAYS)
{
    OWNED_MODULE net m, ref;
    const way *w = arg;
    float own = 7 + (float)kn_rank(world);
    kn_module *list[] = { &m.fc1.base, &m.head, NULL };
    KN_CHECK(net_init(&m, KN_CPU) && net_reference(&ref));
    KN_CHECK(kn_materialize(&m.fc1, KN_CPU, (uint64_t)(50 + kn_rank(world))) &&
                 add_buffers(&m, own),
             "own values");
    kn_tensor *fc1 = kn_module_param(&m.fc1, "weight");
    float first = *(float *)kn_data(fc1);
    KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout, .mesh = w->mesh,
                          .keep_whole_below = w->keep_whole_below, .wrap_class = "linear",
                          .ignored_modules = list, .buffer_dtype = KN_BF16, .sync_from_rank0 = true,
                          .seed = NET_SEED));
    KN_CHECK(!kn_fsdp_is_unit(&m.fc1) && kn_fsdp_is_unit(&m.fc2) && !kn_fsdp_is_unit(&m.head));
    KN_CHECK(is_alone(&m, "fc1.weight") && is_alone(&m, "fc1.bias") && is_alone(&m, "wte.weight"),
             "a unit took an ignored parameter");
    KN_CHECK(!is_alone(&m, "fc2.weight") && !is_alone(&m, "ln.weight"), "nothing was sharded");
    KN_CHECK(kn_module_param(&m.fc1, "weight") == fc1 && *(float *)kn_data(fc1) == first);
    const kn_tensor *alone = kn_module_buffer(&m, "fc1.count");
    KN_CHECK(kn_dtype_of(alone) == KN_F32 && *(float *)kn_data(alone) == own, "buffer was changed");
    KN_CHECK(kn_device_of(kn_module_buffer(&m, "fc1.later")) == KN_META, "buffer was moved");
    const kn_tensor *other = kn_module_buffer(&m, "fc2.count");
    KN_CHECK(kn_dtype_of(other) == KN_BF16 && kn_item(other) == 7, "the others' buffers");
    KN_CHECK(net_backward(&m, 0));
    KN_CHECK(kn_grad(fc1) && !kn_grad(kn_module_param(&m.fc2, "weight")), "whose gradients");
}

/* Modules below an ignored one are ignored with it, and their buffers. */
KN_TEST(ignore, modules_below_keep_what_they_hold)
{
    OWNED_MODULE net m;
    kn_batch_norm norm;
    kn_module *list[] = { &m.fc1.base, NULL };
    KN_CHECK(net_init(&m, KN_CPU) && kn_batch_norm_init(&norm, &m.fc1.base, "norm", 3));
    KN_CHECK(kn_fsdp_wrap(&m, NULL, .wrap_class = "linear", .ignored_modules = list,
                          .param_dtype = KN_BF16, .buffer_dtype = KN_BF16));
    KN_CHECK(!kn_fsdp_is_unit(&norm) && is_alone(&m, "fc1.norm.weight"));
    KN_CHECK(kn_dtype_of(kn_module_buffer(&norm, "running_var")) == KN_F32 &&
             kn_dtype_of(kn_module_param(&norm, "weight")) == KN_F32);
}

/* Declared like the others: filled whole on each rank, and the losses of one process. */
RANK_TEST(ignore, parameters_stay_whole, IN_ALL_WAYS)
{
    OWNED_MODULE net m, ref;
    const way *w = arg;
    KN_CHECK(net_init(&m, KN_CPU) && net_reference(&ref));
    kn_tensor *list[] = { kn_module_param(&m.fc2, "bias"), kn_module_param(&m.wte, "weight"),
                          NULL };
    KN_CHECK(kn_fsdp_wrap(&m, world, WAY_OPTIONS(w), .wrap_class = "linear", .ignored_params = list,
                          .seed = NET_SEED));
    KN_CHECK(is_alone(&m, "fc2.bias") && is_alone(&m, "wte.weight") && !is_alone(&m, "fc2.weight"),
             "which");
    kn_tensor *loss = net_loss(&m, 3), *want = net_loss(&ref, 3);
    KN_CHECK(loss && want && kn_item(loss) == kn_item(want), "the loss");
    KN_CHECK(kn_backward(loss) && kn_grad(list[0]) && kn_grad(list[1]), "gradients");
}

KN_TEST(ignore, wrong_lists)
{
    OWNED_MODULE net m;
    kn_module none = { 0 };
    KN_CHECK(net_init(&m, KN_CPU));
    kn_module *own[] = { &m.fc1.base, NULL }, *unmade[] = { &none, NULL };
    REFUSED(kn_fsdp_wrap(&m.fc1, NULL, .ignored_modules = own),
            "'fc1' (linear) is to be wrapped, but .ignored_modules lists it");
    REFUSED(kn_fsdp_wrap(&m, NULL, .ignored_modules = unmade),
            ".ignored_modules: not an initialised module");
    kn_tensor *list[] = { kn_module_buffer(&m, "scale"), NULL };
    REFUSED(kn_fsdp_wrap(&m, NULL, .ignored_params = list),
            ".ignored_params lists f32[3], which is no parameter of the tree of 'net'");
    kn_scope scope = kn_scope_begin();
    list[0] = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2));
    REFUSED(kn_fsdp_wrap(&m, NULL, .wrap_class = "linear", .ignored_params = list),
            ".ignored_params lists f32[2], which is no parameter");
    kn_scope_end(scope);
    list[0] = kn_module_param(&m.ln, "weight"); /* the same list may go to each wrap */
    KN_CHECK(kn_fsdp_wrap(&m.ln, NULL, .ignored_params = list));
    list[0] = kn_module_param(&m.ln, "bias");
    REFUSED(kn_fsdp_wrap(&m, NULL, .ignored_params = list),
            ".ignored_params lists 'bias' of 'ln', which unit 'ln' holds already");
    list[0] = kn_module_param(&m.ln, "weight");
    kn_module *both[] = { &m.fc1.base, &m.fc2.base, NULL };
    REFUSED(kn_fsdp_wrap(&m, NULL, .wrap_class = "linear", .ignored_modules = both),
            "the policy wraps nothing");
    KN_CHECK(kn_fsdp_wrap(&m, NULL, .ignored_modules = both, .ignored_params = list));
}
