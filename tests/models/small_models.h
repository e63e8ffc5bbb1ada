/* tests/models/small_models.h: small models of each family, of any kind alike: made, given a batch,
 * saved in a checkpoint with a configuration that may be changed. */
#ifndef KNAP_TESTS_MODELS_SMALL_MODELS_H
#define KNAP_TESTS_MODELS_SMALL_MODELS_H

#include "models/gpt.h"
#include "models/llama.h"
#include "models/resnet.h"
#include "models/vision.h"
#include "models/vit.h"
#include "tests/kn_test.h"
#include "tests/models/ids.h"
#include "tests/models/temp.h"

enum { GPT, LLAMA, OWN_HEAD, RESNET, BOTTLENECKS, CIFAR, VIT, SMALL_MODELS };

/* Language models have 11 tokens and a context of 6, image models 5 classes. */
static const struct small_model {
    const kn_family *family;
    const void *config;
} small_models[SMALL_MODELS] = {
    { &kn_gpt_family, &(const kn_gpt_config){ 2, 2, 8, 6, 11, 0, false } },
    { &kn_llama_family, &(const kn_llama_config){ 2, 4, 2, 16, 0, 6, 11 } },
    { &kn_llama_family,
      &(const kn_llama_config){
          2, 4, 2, 16, 0, 6, 11, 1e-6, 5e5, { 32 }, .dropout = 0.125, .untied = true } },
    { &kn_resnet_family, &(const kn_resnet_config){ { 1, 2 }, 5, .width = 4 } },
    { &kn_resnet_family, &(const kn_resnet_config){ { 1, 1 }, 5, .width = 2, .bottleneck = true } },
    { &kn_resnet_family, &(const kn_resnet_config){ { 1, 1, 1 }, 5, .width = 2, .cifar = true } },
    { &kn_vit_family, &(const kn_vit_config){ 2, 2, 8, 16, 8, 5 } },
};

static inline kn_model_config small_config(int kind)
{
    kn_model_config c = { .family = small_models[kind].family };
    memcpy(c.of, small_models[kind].config, c.family->size);
    return c;
}

static inline bool declare_small(kn_module *m, int kind, kn_dtype dtype)
{
    const kn_model_config c = small_config(kind);
    *m = (kn_module){ 0 };
    return kn_config_init(m, &c, dtype, KN_META);
}

static inline void make_small(kn_module *m, int kind, kn_dtype dtype, uint64_t seed)
{
    KN_CHECK(declare_small(m, kind, dtype) && kn_materialize(m, KN_CPU, seed), "model %d", kind);
}

static inline kn_tensor *small_images(int64_t n)
{
    float x[8 * 3 * 16 * 16];
    for (int64_t i = 0; i < n * 768; i++)
        x[i] = (float)((i * 37 + i / 768 * 11) % 101) / 50 - 1;
    return kn_from(KN_F32, KN_CPU, x, KN_SHAPE(n, 3, 16, 16));
}

/* Of a batch of eight images or two rows of tokens. */
static inline kn_tensor *small_loss(kn_module *m, int kind, kn_dtype dtype)
{
    const kn_family *f = small_models[kind].family;
    int64_t y[8];
    if (f->kind == KN_LANGUAGE_MODELS)
        return kn_language_loss(m, ids_of(2, 6, 0), ids_of(2, 6, 4));
    for (int64_t i = 0; i < 8; i++)
        y[i] = (3 * i + 1) % 5;
    return kn_cross_entropy(kn_call(m, kn_cast(small_images(8), dtype)),
                            kn_from(KN_I64, KN_CPU, y, KN_SHAPE(8)));
}

/* text with to in the place of the first from. */
static inline const char *replaced(const char *text, const char *from, const char *to, char *buf,
                                   size_t size)
{
    const char *at = from ? strstr(text, from) : text;
    KN_CHECK(at != NULL, "no %s in %s", from, text);
    snprintf(buf, size, "%.*s%s%s", (int)(at - text), text, from ? to : "",
             at + (from ? strlen(from) : 0));
    return buf;
}

/* Saves m with the configuration, in which to replaces from, and opens it. */
static inline kn_checkpoint *saved_with(kn_module *m, const char *config, const char *from,
                                        const char *to)
{
    char text[2048];
    replaced(config, from, to, text, sizeof text);
    KN_CHECK(kn_checkpoint_save(temp_path("run"), m, .config = text));
    kn_checkpoint *c = kn_checkpoint_open(temp_path("run"), NULL);
    KN_CHECK(c != NULL);
    return c;
}

#endif
