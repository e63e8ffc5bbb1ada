/* models/programs/image_export.c: the model at the end of a training, for torchvision and timm. */
#include "models/programs/image_export.h"
#include "comm/comm.h"
#include "kernels/error.h"

#include <stdio.h>

static bool check(const training *t, const char *dir)
{
    return t->s->out && same_folder(dir, t->s->out)
               ? kn_fail("--export %s: the run saves its checkpoints there; choose another folder",
                         dir)
               : kn_pretrained_may_save(dir);
}

bool image_export_check(const training *t, const char *dir)
{
    return kn_agree(t->world, !dir || !first_rank(t) || check(t, dir));
}

static bool load_best(training *t)
{
    char dir[FOLDER + 8];
    snprintf(dir, sizeof dir, "%s/best", t->s->out);
    kn_checkpoint *c = kn_checkpoint_open(dir, t->world);
    bool ok = c && kn_checkpoint_load(c, &t->model);
    kn_checkpoint_free(c);
    return ok;
}

bool image_export(training *t, const char *dir, const kn_model_config *c, const kn_vision_input *in)
{
    const bool kept = t->s->keep_best && t->best_step >= 0;
    /* the best checkpoint's model has the averages already */
    const kn_pretrained_save_options o = { .comm = t->world, .ema = kept ? NULL : t->ema };
    if (t->stop) {
        if (first_rank(t))
            printf("not exported: the run was stopped before its end\n");
        return true;
    }
    if ((kept && !load_best(t)) || !kn_vision_save(dir, &t->model, c, in, o))
        return false;
    if (first_rank(t))
        printf("exported to %s: the %s model\n", dir, kept ? "best" : "last");
    return true;
}
