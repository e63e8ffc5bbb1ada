/* tests/fuzz/checkpoint_fuzz.c: a checkpoint's state.json beside files of tensors that are sound:
 * opening, options, configurations, loading. */
#include "tests/fuzz/fuzz.h"
#include "models/record.h"
#include "models/language.h"
#include "models/programs/gpt_settings.h"
#include "models/vision.h"
#include "nn/layers.h"
#include "tensor/safetensors.h"

/* Tensors of a linear layer and of AdamW's state, all without a save's name. */
static void write_tensors(void)
{
    static const float zeros[4];
    kn_safetensors_entry model[2] = { { "weight", KN_F32, 2, { 2, 2 }, zeros },
                                      { "bias", KN_F32, 1, { 2 }, zeros } };
    kn_safetensors_entry optim[4] = { { "weight.exp_avg", KN_F32, 2, { 2, 2 }, zeros },
                                      { "weight.exp_avg_sq", KN_F32, 2, { 2, 2 }, zeros },
                                      { "bias.exp_avg", KN_F32, 1, { 2 }, zeros },
                                      { "bias.exp_avg_sq", KN_F32, 1, { 2 }, zeros } };
    static const char tokenizer[] = "{\"version\": 1, \"kind\": \"byte\"}";
    static uint8_t *file[2];
    static size_t size[2];
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "optimizer.safetensors" : "model.safetensors";
        if (!file[i]) {
            const char *path = fuzz_file("tensors", "", 0);
            FUZZ_CHECK(kn_safetensors_save(path, i ? optim : model, i ? 4 : 2, NULL, 0));
            FILE *f = fopen(path, "rb");
            file[i] = malloc(1 << 16);
            FUZZ_CHECK(f && file[i]);
            size[i] = fread(file[i], 1, 1 << 16, f);
            fclose(f);
        }
        fuzz_file(name, file[i], size[i]);
    }
    fuzz_file("tokenizer.json", tokenizer, sizeof tokenizer - 1);
}

/* Objects of each rank. */
static void read_own(const kn_checkpoint *c)
{
    for (int r = 0; r < 3 && r < kn_checkpoint_own_ranks(c); r++) {
        kn_state *s = kn_checkpoint_own(c, r);
        kn_clear_error();
        if (s)
            kn_state_get(s, .random = true);
        kn_clear_error();
        kn_state_free(s);
    }
}

static void load(const kn_checkpoint *c)
{
    kn_linear l = { 0 };
    kn_optim *o = NULL;
    kn_scaler *scaler = NULL;
    if (kn_linear_init(&l, NULL, "", 2, 2) && (o = kn_adamw(&l, .lr = 1)) &&
        (scaler = kn_scaler_new(&l)))
        kn_checkpoint_load(c, &l, .optim = o, .scaler = scaler);
    kn_clear_error();
    const kn_named_optim gen = { "gen", o };
    if (o)
        kn_checkpoint_load(c, &l, .optims = &gen, .optim_count = 1, .not_strict = true);
    kn_clear_error();
    kn_checkpoint_load(c, &l);
    kn_clear_error();
    kn_scaler_free(scaler);
    kn_optim_free(o);
    kn_module_free(&l);
}

KN_FUZZ(checkpoint, .factor = 800, .extra = 4 << 20)
{
    write_tensors();
    fuzz_file("state.json", data, size);
    kn_checkpoint *c = kn_checkpoint_open(fuzz_folder(), NULL);
    if (c) {
        gpt_settings s = { 0 };
        kn_options *o = gpt_settings_begin(&s) ? kn_options_create(s.run.table, &s) : NULL;
        kn_language_config language;
        kn_vision_config vision;
        kn_vision_input in = { 0 };
        FUZZ_CHECK(o, "%s", kn_error());
        kn_checkpoint_options(c, o);
        kn_clear_error();
        kn_language_config_saved(c, &language);
        kn_clear_error();
        kn_vision_config_saved(c, &vision, &in);
        kn_host_free(in.label);
        kn_clear_error();
        kn_tokenizer_free(kn_checkpoint_tokenizer(c));
        kn_clear_error();
        load(c);
        read_own(c);
        kn_options_free(o);
    }
    kn_checkpoint_free(c);
}
