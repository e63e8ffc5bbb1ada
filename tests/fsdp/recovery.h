/* tests/fsdp/recovery.h: a model whose user callbacks can fail, each in its turn, in many
 * settings. */
#ifndef KNAP_TESTS_FSDP_RECOVERY_H
#define KNAP_TESTS_FSDP_RECOVERY_H

#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"

enum { DIM = 4, BATCH = 3, UNITS = 3 };

/* ---- a model with a callback everywhere ------------------------------------------------------ */

static _Thread_local struct {
    int at, now;  /* the callback's call that fails, 0: none; calls so far */
    bool all;     /* callbacks are attached */
    bool forward; /* the last pass got to the end of the root's */
} fault;

static inline bool tick(const char *where)
{
    return ++fault.now != fault.at || kn_fail("injected in %s", where);
}

typedef struct part { /* a unit around another one */
    kn_module base;
    kn_linear in, out;
    kn_dropout drop;
} part;

typedef struct model {
    kn_module base;
    kn_linear stem;
    part part[UNITS];
} model;

static inline kn_tensor *on_grad(kn_tensor *g, void *arg)
{
    tick(arg);
    return NULL;
}

static inline kn_tensor *watched(kn_tensor *x)
{
    if (x && fault.all && kn_grad_mode() && kn_requires_grad(x))
        kn_on_grad(x, on_grad, "kn_on_grad");
    return kn_ok() ? x : NULL;
}

static inline kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    part *m = (part *)self;
    if (!tick("a forward"))
        return NULL;
    kn_tensor *y = watched(kn_relu(kn_call(&m->in, x)));
    y = kn_call(&m->out, kn_call(&m->drop, y));
    return tick("a forward's end") ? kn_add(x, watched(y)) : NULL;
}

static inline kn_tensor *model_forward(kn_module *self, kn_tensor *x)
{
    model *m = (model *)self;
    x = watched(kn_call(&m->stem, x));
    for (int i = 0; i < UNITS; i++)
        x = kn_call(&m->part[i], x);
    kn_tensor *zero = x ? kn_zeros(KN_F32, kn_device_of(x), KN_SHAPE(BATCH, DIM)) : NULL;
    kn_tensor *l = zero ? kn_mse_loss(kn_cast(x, KN_F32), zero) : NULL;
    fault.forward = l != NULL;
    return l;
}

static inline void on_module(kn_module_event *e, void *where)
{
    tick(where);
}

static inline void on_leaf(kn_tensor *leaf, void *arg)
{
    tick(arg);
}

static inline bool hook_module(kn_module *m, void *arg)
{
    if (!kn_module_hook(m, (kn_module_hooks){ .pre_forward = on_module, .arg = "pre_forward" }) ||
        !kn_module_hook(m, (kn_module_hooks){ .post_forward = on_module, .arg = "post_forward" }) ||
        !kn_module_hook(m, (kn_module_hooks){ .pre_backward = on_module, .arg = "pre_backward" }) ||
        !kn_module_hook(m, (kn_module_hooks){ .post_backward = on_module, .arg = "post_backward" }))
        return false;
    for (int i = 0; i < m->impl->params; i++)
        if (!kn_on_accumulated(m->impl->param[i].tensor, on_leaf, "kn_on_accumulated"))
            return false;
    return true;
}

static inline bool comm_hook(const kn_grad_reduction *r, void *arg)
{
    return tick("a communication hook") && kn_reduce_default(r, arg);
}

static inline bool model_init(model *m, kn_device device)
{
    static const char *const name[UNITS] = { "0", "1", "2" };
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init(&m->base, model_forward) &&
              kn_linear_init(&m->stem, &m->base, "stem", DIM, DIM, .device = device);
    for (int i = 0; i < UNITS && ok; i++)
        ok = kn_module_init(&m->part[i].base, part_forward) &&
             kn_module_add(&m->base, name[i], &m->part[i].base) &&
             kn_linear_init(&m->part[i].in, &m->part[i].base, "in", DIM, 5, .device = device) &&
             kn_linear_init(&m->part[i].out, &m->part[i].base, "out", 5, DIM, .device = device) &&
             kn_dropout_init(&m->part[i].drop, &m->part[i].base, "drop", 0.3);
    return ok;
}

/* ---- settings -------------------------------------------------------------------------------- */

typedef struct setting {
    const char *name;
    kn_fsdp_wrap_options o;
    bool plain, recompute, unsynced, hook;
} setting;

static const setting settings[] = {
    { "plain", .plain = true },
    { "plain, recompute", .plain = true, .recompute = true },
    { "full shard", { .wrap_class = "part,linear" } },
    { "bf16, per parameter",
      { .wrap_class = "part", .param_dtype = KN_BF16, .layout = KN_LAYOUT_PER_PARAM } },
    { "kept gathered",
      { .strategy = KN_SHARD_GRAD_OP, .wrap_class = "part", .param_dtype = KN_BF16 } },
    { "gathered ahead",
      { .wrap_class = "part,linear", .param_dtype = KN_BF16, .forward_prefetch = true } },
    { "file", { .wrap_class = "part", .offload_dir = "/tmp" } },
    { "recompute", { .wrap_class = "part,linear", .param_dtype = KN_BF16 }, .recompute = true },
    { "without sync", { .wrap_class = "part" }, .unsynced = true },
    { "communication hook", { .wrap_class = "part" }, .hook = true },
    { "memory", { .wrap_class = "part", .device = STAND_IN, .offload_dir = "memory" } },
    { "memory, bf16",
      { .wrap_class = "part",
        .device = STAND_IN,
        .offload_dir = "memory",
        .param_dtype = KN_BF16 } },
    { "on a device", { .wrap_class = "part,linear", .device = STAND_IN, .param_dtype = KN_BF16 } },
};
enum { SETTINGS = sizeof settings / sizeof settings[0] };

static inline bool make(model *m, kn_comm *world, const setting *s, bool hooked)
{
    kn_fsdp_wrap_options o = s->o;
    o._size = sizeof o;
    o.seed = NET_SEED;
    if (!model_init(m, KN_META) ||
        !(s->plain ? kn_materialize(m, KN_CPU, NET_SEED) : kn_fsdp_wrap_(&m->base, world, o)))
        return false;
    for (int i = 0; i < UNITS; i++)
        kn_recompute(&m->part[i], s->recompute);
    if (s->hook && !kn_fsdp_set_comm_hook(m, comm_hook, NULL, true))
        return false;
    return !hooked || kn_apply_modules(m, hook_module, NULL);
}

/* ---- passes ---------------------------------------------------------------------------------- */

static inline kn_tensor *loss(model *m, int micro, kn_device device)
{
    float v[BATCH * DIM];
    for (int i = 0; i < BATCH * DIM; i++)
        v[i] = (float)((i * 5 + micro * 3) % 7) - 2.5f;
    kn_tensor *x = device == KN_META ? kn_zeros(KN_F32, KN_META, KN_SHAPE(BATCH, DIM))
                                     : kn_from(KN_F32, device, v, KN_SHAPE(BATCH, DIM));
    return x ? kn_call(m, x) : NULL;
}

static inline kn_device device_of(const model *m)
{
    const kn_unit *u = kn_unit_of(m->base.impl);
    return u ? u->options.device : KN_CPU;
}

static inline bool pass(model *m, int micro)
{
    IN_SCOPE;
    fault.forward = false;
    kn_tensor *l = loss(m, micro, device_of(m));
    bool ok = l && kn_backward(l);
    return ok && kn_ok();
}

#endif
