/* models/programs/image_export.c: the model at the end of a training, for torchvision and timm. */
#include "models/programs/image_export.h"
#include "comm/comm.h"
#include "kernels/error.h"

bool image_export_check(const training *t, const char *dir)
{
    bool ok = true;
    if (dir && first_rank(t))
        ok = kn_pretrained_may_save(dir);
    if (ok && dir && first_rank(t) &&
        ((t->plan.out && same_folder(dir, t->plan.out)) || same_folder(dir, t->best.dir)))
        ok = kn_fail("--export %s: the run saves its checkpoint there; choose another folder", dir);
    return kn_agree(t->world, ok);
}

static bool load_best(training *t)
{
    kn_checkpoint *c = kn_checkpoint_open(t->best.dir, t->world);
    bool ok = c && kn_checkpoint_load(c, t->model);
    kn_checkpoint_free(c);
    return ok;
}

bool image_export(training *t, const char *dir, const kn_vision_config *c,
                  const kn_vision_input *in)
{
    const bool kept = t->best.step > 0;
    /* the best checkpoint's model has the averages already */
    const kn_pretrained_save_options o = { .comm = t->world, .ema = kept ? NULL : t->ema };
    if (t->stop) {
        if (first_rank(t))
            printf("not exported: the run was stopped before its end\n");
        return true;
    }
    if ((kept && !load_best(t)) || !kn_vision_save(dir, t->model, c, in, o))
        return false;
    if (first_rank(t))
        printf("exported to %s: the %s model\n", dir, kept ? "best" : "last");
    return true;
}
