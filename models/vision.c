/* models/vision.c: the rows of the families of image models. */
#include "models/vision.h"
#include "kernels/error.h"
#include "models/vision_internal.h"

#include <string.h>

/* ---- residual nets --------------------------------------------------------------------------- */

static bool resnet_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c)
{
    if (!kn_resnet_preset(preset, &c->resnet))
        return false;
    c->resnet.channels = s->channels;
    c->resnet.classes = s->classes;
    c->resnet.small_images |= s->small_stem;
    return kn_resnet_config_check(&c->resnet);
}

static bool resnet_init(kn_vision_model *m, const kn_vision_config *c, kn_dtype dtype,
                        kn_device device)
{
    return kn_resnet_init(&m->resnet, c->resnet, dtype, device);
}

static const char *resnet_text(const kn_vision_config *c, char *buf)
{
    return kn_resnet_config_text(&c->resnet, buf);
}

static bool resnet_saved(const kn_checkpoint *c, kn_vision_config *config)
{
    return kn_resnet_config_saved(c, &config->resnet);
}

static bool resnet_read(const json_t *object, const char *file, kn_vision_config *c)
{
    return kn_resnet_config_read((kn_json_source){ object, file }, &c->resnet);
}

static const char *resnet_name(const kn_vision_config *c)
{
    return kn_resnet_name(&c->resnet);
}

static kn_vision_sizes resnet_sizes(const kn_vision_config *c)
{
    const kn_resnet_config *r = &c->resnet;
    return (kn_vision_sizes){ .channels = r->channels,
                              .classes = r->classes,
                              .small_stem = r->small_images };
}

const kn_vision_family kn_resnet_family = {
    .type = "resnet",
    .block_class = "resnet_block",
    .choices = KN_RESNET_CHOICES,
    .make = resnet_make,
    .init = resnet_init,
    .text = resnet_text,
    .saved = resnet_saved,
    .read = resnet_read,
    .name = resnet_name,
    .sizes = resnet_sizes,
    .first_conv = "conv1",
    .classifier = "fc",
    .global_pool = "avg",
};

/* ---- vision transformers --------------------------------------------------------------------- */

static bool vit_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c)
{
    if (!kn_vit_preset(preset, &c->vit))
        return false;
    c->vit.channels = s->channels;
    c->vit.classes = s->classes;
    c->vit.image = s->side;
    c->vit.dropout = s->dropout;
    if (s->patch > 0)
        c->vit.patch = s->patch;
    return kn_vit_config_check(&c->vit);
}

static bool vit_init(kn_vision_model *m, const kn_vision_config *c, kn_dtype dtype,
                     kn_device device)
{
    return kn_vit_init(&m->vit, c->vit, dtype, device);
}

static const char *vit_text(const kn_vision_config *c, char *buf)
{
    return kn_vit_config_text(&c->vit, buf);
}

static bool vit_saved(const kn_checkpoint *c, kn_vision_config *config)
{
    return kn_vit_config_saved(c, &config->vit);
}

static bool vit_read(const json_t *object, const char *file, kn_vision_config *c)
{
    return kn_vit_config_read((kn_json_source){ object, file }, &c->vit);
}

static const char *vit_name(const kn_vision_config *c)
{
    return kn_vit_name(&c->vit);
}

static kn_vision_sizes vit_sizes(const kn_vision_config *c)
{
    const kn_vit_config *v = &c->vit;
    return (kn_vision_sizes){ .channels = v->channels,
                              .side = v->image,
                              .classes = v->classes,
                              .patch = v->patch,
                              .dropout = v->dropout };
}

const kn_vision_family kn_vit_family = {
    .type = "vit",
    .block_class = "vit_block",
    .choices = KN_VIT_CHOICES,
    .make = vit_make,
    .init = vit_init,
    .text = vit_text,
    .saved = vit_saved,
    .read = vit_read,
    .name = vit_name,
    .sizes = vit_sizes,
    .first_conv = "patch_embed.proj",
    .classifier = "head",
    .global_pool = "token",
};

/* ---- any ------------------------------------------------------------------------------------- */

static const kn_vision_family *const families[] = { &kn_resnet_family, &kn_vit_family };
enum { FAMILIES = sizeof families / sizeof *families };

/* The word is one of a '|'-separated list. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *at = list; at; at = strchr(at, '|')) {
        at += *at == '|';
        if (strcspn(at, "|") == n && strncmp(at, word, n) == 0)
            return true;
    }
    return false;
}

const kn_vision_family *kn_vision_family_of(const char *preset)
{
    for (int i = 0; i < FAMILIES; i++)
        if (has_word(families[i]->choices, preset))
            return families[i];
    kn_fail("there is no image model '%.64s'; there are " KN_RESNET_CHOICES "|" KN_VIT_CHOICES,
            preset);
    return NULL;
}

const kn_vision_family *kn_vision_family_typed(const char *type)
{
    for (int i = 0; type && i < FAMILIES; i++)
        if (strcmp(type, families[i]->type) == 0)
            return families[i];
    return NULL;
}

bool kn_vision_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c)
{
    const kn_vision_family *f = kn_vision_family_of(preset);
    *c = (kn_vision_config){ .family = f };
    return f && f->make(preset, s, c);
}
