/* models/programs/image_export.c: the model at the end of a training, for torchvision and timm. */
#include "models/programs/image_export.h"
#include "comm/comm.h"
#include "kernels/error.h"

#include <stdio.h>
#include <string.h>

/* Is dir the run's folder, or does it have the name of a checkpoint there? dir may not exist. */
static bool is_of_run(const char *dir, const char *run)
{
    char above[FOLDER];
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/')
        n--;
    size_t name = n;
    while (name > 0 && dir[name - 1] != '/')
        name--;
    const bool taken = (n - name == 4 && strncmp(dir + name, "best", 4) == 0) ||
                       strncmp(dir + name, "step-", 5) == 0;
    snprintf(above, sizeof above, "%.*s", name ? (int)name : 1, name ? dir : ".");
    return same_folder(dir, run) || (taken && same_folder(above, run));
}

static bool check(const training *t, const char *dir)
{
    return t->plan.out && is_of_run(dir, t->plan.out)
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
    snprintf(dir, sizeof dir, "%s/best", t->plan.out);
    kn_checkpoint *c = kn_checkpoint_open(dir, t->world);
    bool ok = c && kn_checkpoint_load(c, t->model);
    kn_checkpoint_free(c);
    return ok;
}

bool image_export(training *t, const char *dir, const kn_vision_config *c,
                  const kn_vision_input *in)
{
    const bool kept = t->plan.keep_best && t->best_step >= 0;
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
