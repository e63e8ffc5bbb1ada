/* tests/models/real_steps.c: see real_steps.h. */
#include "tests/owned.h"
#include "tests/models/real_steps.h"
#include "models/family.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 130, CLASSES = 10 };

struct real_steps {
    real_options o;
    int64_t batch, ctx, side;
    const kn_family *family;
    kn_module net;
    kn_optim *opt;
    kn_scaler *scaler; /* of f16 */
    kn_ema *ema;
    kn_tensor *x, *y; /* kept */
};

/* The context and the side are set by the size of a run. */
static const struct {
    const char *name;
    const kn_family *family;
    const void *config;
} models[REAL_MODELS] = {
    { "gpt", &kn_gpt_family,
      &(const kn_gpt_config){
          .layers = 1, .heads = 2, .embd = 32, .vocab = VOCAB, .dropout = 0.1 } },
    { "llama", &kn_llama_family,
      &(const kn_llama_config){
          .layers = 1, .heads = 4, .kv_heads = 2, .embd = 32, .hidden = 64, .vocab = VOCAB } },
    { "resnet", &kn_resnet_family,
      &(const kn_resnet_config){
          .blocks = { 1, 1 }, .classes = CLASSES, .width = 16, .bottleneck = true } },
    { "cifar resnet", &kn_resnet_family,
      &(const kn_resnet_config){
          .blocks = { 1, 1, 1 }, .classes = CLASSES, .width = 8, .cifar = true } },
    { "vit", &kn_vit_family,
      &(const kn_vit_config){
          .layers = 1, .heads = 2, .embd = 32, .patch = 4, .classes = CLASSES, .dropout = 0.1 } },
};

const char *real_model_name(real_model m)
{
    return models[m].name;
}

bool real_model_sees(real_model m)
{
    return m >= REAL_RESNET;
}

/* ---- making ---------------------------------------------------------------------------------- */

static bool declare(real_steps *s)
{
    kn_model_config c = { .family = models[s->o.model].family };
    memcpy(c.of, models[s->o.model].config, c.family->size);
    kn_config_set(&c, "ctx", (double)s->ctx);
    kn_config_set(&c, "image", (double)s->side);
    s->family = c.family;
    return kn_config_init(&s->net, &c, KN_F32, KN_META);
}

static kn_optim *make_optimizer(void *net, int kind)
{
    const kn_optim_group flat = { .max_ndim = 1, .weight_decay = KN_ZERO };
    if (kind == REAL_SGD)
        return kn_sgd(net, .lr = 0.01, .momentum = 0.9, .nesterov = true, .weight_decay = 5e-4);
    if (kind == REAL_MUON)
        return kn_muon(net, .lr = 1e-3, .scale = KN_MUON_MATCH_ADAMW, .weight_decay = 0.05,
                       .groups = &flat, .group_count = 1);
    return kn_adamw(net, .lr = 1e-3, .weight_decay = 0.1, .groups = &flat, .group_count = 1);
}

/* Token ids and the next ones; or images, and their classes or mixed labels. */
static bool make_batch(real_steps *s)
{
    const bool sees = real_model_sees(s->o.model);
    const int64_t n = s->batch;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = sees ? kn_randn(KN_F32, KN_CPU, 1, 3, KN_SHAPE(n, 3, s->side, s->side))
                        : kn_randint(KN_I64, KN_CPU, 0, VOCAB, 1, 1, KN_SHAPE(n, s->ctx));
    kn_tensor *y = sees ? kn_randint(KN_I64, KN_CPU, 0, CLASSES, 1, 2, KN_SHAPE(n)) : x;
    if (sees && s->o.mixed)
        y = kn_softmax(kn_randn(KN_F32, KN_CPU, 1, 4, KN_SHAPE(n, CLASSES)), 1);
    if (sees && s->o.channels_last)
        x = kn_channels_last(x);
    x = kn_to_device(x, s->o.device);
    y = kn_to_device(y, s->o.device);
    s->x = x ? kn_keep(x) : NULL;
    s->y = y == x ? s->x : y ? kn_keep(y) : NULL;
    kn_scope_end(scope);
    return s->x && s->y;
}

real_steps *real_steps_begin(real_options o)
{
    real_steps *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->o = o;
    s->batch = o.tiny ? 2 : 4;
    s->ctx = o.tiny ? 6 : 24;
    s->side = o.tiny ? 8 : 16;
    bool ok =
        declare(s) &&
        kn_fsdp_wrap(&s->net, o.comm, .seed = 7, .param_dtype = o.dtype,
                     .reduce_dtype = o.reduce_dtype, .device = o.device,
                     .wrap_class = models[o.model].family->block_class,
                     .recompute_class = o.recompute ? models[o.model].family->block_class : NULL);
    ok = ok && (!o.sync || kn_sync_batch_norm(&s->net, o.comm) > 0) &&
         (s->opt = make_optimizer(&s->net, o.optimizer)) &&
         (o.dtype != KN_F16 || (s->scaler = kn_scaler_new(&s->net, .init_scale = 1024))) &&
         (s->ema = kn_ema_new(&s->net, .decay = 0.9)) && make_batch(s);
    if (ok)
        return s;
    real_steps_end(s);
    return NULL;
}

void real_steps_end(real_steps *s)
{
    if (!s)
        return;
    kn_tensor_free(s->x);
    if (s->y != s->x)
        kn_tensor_free(s->y);
    kn_ema_free(s->ema);
    kn_scaler_free(s->scaler);
    kn_optim_free(s->opt);
    kn_module_free(&s->net);
    free(s);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static kn_tensor *loss_of(real_steps *s)
{
    if (s->family->kind == KN_LANGUAGE_MODELS)
        return kn_language_loss(&s->net, s->x, s->y);
    kn_tensor *logits = kn_call(&s->net, s->x);
    if (s->o.mixed)
        logits = kn_cast(logits, KN_F32);
    return kn_cross_entropy(logits, s->y, .smoothing = s->o.optimizer == REAL_SGD ? 0.1 : 0);
}

bool real_steps_train(real_steps *s)
{
    const double p = s->o.clip_order != 0 ? s->o.clip_order : 2;
    IN_SCOPE;
    kn_tensor *loss = loss_of(s);
    kn_backward(s->scaler ? kn_scale_loss(s->scaler, loss) : loss);
    kn_clip_grad_norm_p(&s->net, 1.0, p);
    kn_first_nonfinite_grad(&s->net);
    if (s->scaler)
        kn_scaler_step(s->scaler, s->opt);
    else
        kn_step(s->opt);
    kn_ema_update(s->ema);
    const bool ok = kn_ok() && isfinite(kn_item(loss));
    return ok && kn_ok();
}

bool real_steps_evaluate(real_steps *s)
{
    IN_SCOPE;
    WITHOUT_GRAD;
    kn_train(&s->net, false);
    bool ok = kn_ema_swap(s->ema) && kn_item(loss_of(s)) > 0 && kn_ema_swap(s->ema);
    kn_train(&s->net, true);
    return ok && kn_ok();
}
