/* models/family_calls.c: models of any family: made, called, told to recompute, and their
 * configuration in checkpoints. */
#include "kernels/error_internal.h"
#include "models/model_tensors.h"
#include "state/checkpoint_internal.h"
#include "tensor/json.h"

#include <stdio.h>
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
    kn_model_config c = kn_config_of(f, config);
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

/* ---- in checkpoints -------------------------------------------------------------------------- */

/* The family that the JSON names: want, or NULL: any of the kind. */
static const kn_family *family_in(const json_t *j, kn_family_kind kind, const kn_family *want,
                                  const char *file)
{
    const char *type = json_string_value(json_object_get(j, "model_type"));
    const kn_family *f = kn_family_typed(kind, type);
    char types[KN_CHOICES];
    if (f && (!want || f == want))
        return f;
    if (!type)
        return kn_fail_null("%s tells no sizes of a model: weights alone, as an export has them, "
                            "begin a training of their own (--init)",
                            file);
    return kn_fail_null(want ? "%s: the model is a %.64s, not a %s"
                             : "%s: the model is a %.64s, none of this program's, which are %s",
                        file, type, want ? want->noun : kn_family_types(kind, KN_TYPES_OWN, types));
}

/* want: NULL: any of the kind. */
static bool saved(const kn_checkpoint *c, kn_family_kind kind, const kn_family *want,
                  kn_model_config *config, json_t **json)
{
    char than[4096 + 64];
    json_error_t error;
    const char *text = kn_checkpoint_config(c);
    json_t *j = text ? kn_json_parse(text, strlen(text), 0, "a configuration", &error) : NULL;
    if (!j)
        return kn_ok() && kn_fail("a model's configuration: no memory");
    const kn_path file = kn_path_of(kn_checkpoint_folder(c), "state.json", "");
    snprintf(than, sizeof than, "%s gives", file.text);
    kn_model_config read = { .family = family_in(j, kind, want, file.text) };
    bool ok = read.family && kn_config_read(j, file.text, &read) &&
              (c->part[KN_PART_MODEL]
                   ? kn_model_check(&read, c->part[KN_PART_MODEL], false, c->dir, than)
                   : kn_fail("%s holds no tensors; the checkpoint is damaged", c->dir));
    if (ok)
        *config = read;
    if (ok && json)
        *json = j;
    else
        json_decref(j);
    return ok;
}

bool kn_config_saved(const kn_checkpoint *c, kn_family_kind kind, kn_model_config *config,
                     json_t **json)
{
    return saved(c, kind, NULL, config, json);
}

bool kn_family_saved(const kn_family *f, const kn_checkpoint *c, void *config)
{
    kn_model_config read;
    if (c && !config)
        return kn_fail("kn_%s_config_saved: the place for the configuration is NULL", f->prefix);
    if (!saved(c, f->kind, f, &read, NULL))
        return false;
    memcpy(config, read.of, f->size);
    return true;
}
