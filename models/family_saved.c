/* models/family_saved.c: configurations in checkpoints. */
#include "kernels/error.h"
#include "models/model_tensors.h"
#include "state/checkpoint_internal.h"
#include "tensor/json.h"

#include <stdio.h>
#include <string.h>

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
