/* models/family_calls.c: models of any family: made, called, and told to recompute. */
#include "kernels/error_internal.h"
#include "models/family.h"

#include <string.h>

/* ---- models ---------------------------------------------------------------------------------- */

bool kn_config_init(kn_module *m, const kn_model_config *c, kn_dtype dtype, kn_device device)
{
    kn_model_config whole = *c; /* with this table's defaults, which init may not know */
    return kn_family_check(c->family, whole.of) && c->family->init(m, whole.of, dtype, device);
}

const void *kn_family_config_of(const kn_family *f, const void *model)
{
    if (model)
        return kn_module_data((void *)(uintptr_t)model);
    return kn_fail_null("kn_%s_config_of: the model is NULL", f->prefix);
}

typedef struct recompute_blocks {
    const char *class;
    bool on;
} recompute_blocks;

static bool recompute_block(kn_module *m, void *arg)
{
    const recompute_blocks *r = arg;
    return strcmp(kn_module_class(m), r->class) != 0 || kn_recompute(m, r->on);
}

void kn_family_recompute(const kn_family *f, void *model, bool on)
{
    recompute_blocks r = { f->block_class, on };
    if (!model)
        kn_fail("kn_%s_recompute: the model is NULL", f->prefix);
    else if (kn_module_data(model))
        kn_apply_modules(model, recompute_block, &r);
}

double kn_family_flops(const kn_family *f, const void *config, int64_t ctx)
{
    if (!config) {
        kn_fail("kn_%s_flops_per_token: the configuration is NULL", f->prefix);
        return 0;
    }
    kn_model_config c = { .family = f };
    memcpy(c.of, config, f->size);
    return kn_family_check(f, c.of) ? f->flops_per_token(c.of, ctx) : 0;
}

/* ---- language models ------------------------------------------------------------------------- */

static kn_tensor *call_root(void *model, kn_values in, bool last)
{
    kn_values out = kn_call_n(model, in, &last, sizeof last);
    return out.n == 1 ? out.v[0] : NULL;
}

kn_tensor *kn_language_logits(void *model, kn_tensor *ids)
{
    return call_root(model, (kn_values){ 1, { ids } }, false);
}

kn_tensor *kn_language_next_logits(void *model, kn_tensor *ids)
{
    return call_root(model, (kn_values){ 1, { ids } }, true);
}

kn_tensor *kn_language_loss(void *model, kn_tensor *ids, kn_tensor *targets)
{
    return call_root(model, (kn_values){ 2, { ids, targets } }, false);
}

kn_tensor *kn_language_documents_loss(void *model, kn_tensor *ids, kn_tensor *targets,
                                      kn_tensor *begin)
{
    return call_root(model, (kn_values){ 3, { ids, targets, begin } }, false);
}
