/* tests/fuzz/pretrained_fuzz.c: a config.json beside the tensors of a small vision transformer. */
#include "models/pretrained.h"
#include "tests/fuzz/fuzz.h"

static bool save_model(const char *folder)
{
    const kn_vit_config vit = { 1, 2, 4, 8, 4, 3, 3, 0 };
    kn_vit n = { 0 };
    const bool ok = kn_vit_init(&n, vit, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1) &&
                    kn_pretrained_save(folder, &n, .vit = &vit);
    kn_module_free(&n);
    return ok;
}

KN_FUZZ(pretrained, .factor = 800, .extra = 4 << 20)
{
    kn_vit n = { 0 };
    static fuzz_kept kept;
    fuzz_tensors(&kept, save_model);
    fuzz_file("config.json", data, size);
    kn_pretrained *p = kn_pretrained_open(fuzz_folder());
    const kn_vit_config *c = p ? kn_pretrained_vit(p) : NULL;
    FUZZ_CHECK(!p || (c && c->layers == 1 && c->embd == 4 && c->image == 8));
    if (c && kn_vit_init(&n, *c, KN_F32, KN_META)) {
        FUZZ_CHECK(kn_materialize(&n, KN_CPU, 1) && kn_pretrained_load(p, &n), "%s", kn_error());
        kn_module_free(&n);
    }
    for (int64_t i = 0; p && i < 3; i++)
        (void)kn_pretrained_label(p, i);
    if (p)
        (void)kn_pretrained_augment(p);
    kn_pretrained_free(p);
}
