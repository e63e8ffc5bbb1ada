/* models/programs/image_settings.c: the table of train_resnet's options, and what they describe:
 * the model, the changes of its images, the rates and the optimizer. */
#include "kernels/error.h"
#include "models/programs/image_settings.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define AT(field)  offsetof(image_settings, field)
#define RUN(field) offsetof(image_settings, run.field) /* the options of any trainer */

static const kn_option image_rows[] = {
    { "images", KN_OPTION_HEADING },
    { "data", KN_OPTION_PATH, AT(data), NULL,
      "cifar10, cifar100, mnist, fashion-mnist, shapes (drawn by a formula), or a folder of images",
      .note = "cifar10, or shapes where it isn't there", .only_read = true },
    { "image", KN_OPTION_INT, AT(image), NULL, "rows and columns of the model's images", .min = 1,
      .max = KN_MOST_SIDE, .note = "the set's; 224 where its images differ" },
    { "augment", KN_OPTION_CHOICE, AT(augment), "crop",
      "crop: parts of padded images; resized: parts of any size; none: whole images",
      .choices = "crop|resized|none" },
    { "pad", KN_OPTION_INT, AT(pad), "4", "black pixels around an image before it is cropped",
      .max = 4096, .with = "augment=crop" },
    { "flip", KN_OPTION_FLAG, AT(flip), "true", "mirror every second image, left to right" },
    { "jitter", KN_OPTION_FLOAT, AT(jitter), "0",
      "change brightness, contrast and saturation by up to this factor", .max = 1 },
    { "erase", KN_OPTION_FLOAT, AT(erase), "0", "probability of an erased rectangle", .max = 1 },
    { "mixup", KN_OPTION_FLOAT, AT(mixup), "0", "alpha of mixup; 0: none", .max = 100 },
    { "cutmix", KN_OPTION_FLOAT, AT(cutmix), "0", "alpha of cutmix; 0: none", .max = 100 },
    { "smoothing", KN_OPTION_FLOAT, AT(smoothing), "0", "of labels", .max = 0.999 },
    { "skip-bad", KN_OPTION_FLAG, AT(skip_bad), NULL,
      "folders: another image takes the place of one that can't be read" },
    { "workers", KN_OPTION_INT, AT(workers), "1", "threads a rank that make images", .max = 256,
      .of = KN_OF_RUN, .own = true },
    { 0 },
};
static char choices[KN_CHOICES]; /* by image_settings_begin */

static const kn_option model_rows[] = {
    { "model", KN_OPTION_HEADING },
    { "model", KN_OPTION_NAME, AT(model), "resnet20",
      "resnet20 to resnet110 are for images of 32 x 32", .choices = choices, .fixed = true },
    { "init", KN_OPTION_PATH, AT(init), NULL,
      "begin with the weights of this folder (train_resnet's, timm's) or .safetensors file, with a "
      "new last layer for another number of classes",
      .clashes = "resume", .of = KN_OF_START },
    { "stem", KN_OPTION_NAME, AT(stem), "auto",
      "the first layers of resnet18 to 152; small: without strides, for images up to 64 x 64",
      .choices = "auto|large|small" },
    { "patch", KN_OPTION_INT, AT(patch), NULL, "vit: rows and columns of a patch", .min = 1,
      .max = 4096, .note = "the model's" },
    { "dropout", KN_OPTION_FLOAT, AT(dropout), "0", "vit: dropout probability", .max = 0.999 },
    { "sync-bn", KN_OPTION_FLAG, AT(sync_bn), NULL,
      "batch norms take the batches of all ranks as one" },
    { "recompute", KN_OPTION_FLAG, RUN(recompute), NULL,
      "keep only the blocks' inputs, compute them again in backward" },
    { 0 },
};
static const kn_option training_rows[] = {
    { "training", KN_OPTION_HEADING },
    { "batch", KN_OPTION_INT, RUN(batch), "128", "images of a micro-batch", .min = 1,
      .max = 1 << 20 },
    { "accum", KN_OPTION_INT, RUN(accum), "1", "micro-batches a step and rank", .min = 1,
      .max = 1 << 20 },
    { "no-sync", KN_OPTION_FLAG, RUN(no_sync), NULL,
      "reduce once a step, not at each micro-batch; takes memory" },
    { "epochs", KN_OPTION_FLOAT, AT(epochs), "12", "passes over the images", .min = 0.001,
      .max = 1e6 },
    { "optimizer", KN_OPTION_NAME, RUN(optimizer), "sgd",
      "muon: matrices and convolutions of blocks; AdamW has the rest",
      .choices = "sgd|adamw|muon" },
    { "lr", KN_OPTION_FLOAT, RUN(lr), NULL, "peak learning rate", .max = 1e30,
      .note = "sgd: 0.25 with one_cycle, else 0.1; adamw and muon: 1e-3" },
    { "schedule", KN_OPTION_NAME, AT(schedule), "one_cycle",
      "one_cycle: up and down; step: a tenth after a half, a hundredth after three quarters",
      .choices = "one_cycle|cosine|step|constant" },
    { "min-lr", KN_OPTION_FLOAT, RUN(min_lr), "0", "learning rate at the end of one_cycle, cosine",
      .max = 1e30, .with = "schedule=one_cycle|cosine" },
    { "warmup", KN_OPTION_INT, RUN(warmup), "-1", "steps until the peak", .min = -1, .max = 1e12,
      .note = "one_cycle: 3/10 of all; else none" },
    { "momentum", KN_OPTION_FLOAT, RUN(momentum), "0.9", "sgd's", .max = 0.99999999,
      .with = "optimizer=sgd" },
    { "nesterov", KN_OPTION_FLAG, RUN(nesterov), "true", "sgd: Nesterov's momentum",
      .with = "optimizer=sgd" },
    { "weight-decay", KN_OPTION_FLOAT, RUN(weight_decay), "-1",
      "weight decay; adamw and muon: only of matrices and convolutions", .min = -1, .max = 1e3,
      .note = "5e-4; adamw and muon: 0.05" },
    { "beta1", KN_OPTION_FLOAT, RUN(beta1), "0.9", "AdamW's first beta", .max = 0.99999999,
      .with = "optimizer=adamw|muon" },
    { "beta2", KN_OPTION_FLOAT, RUN(beta2), "0.999", "AdamW's second beta", .max = 0.99999999,
      .with = "optimizer=adamw|muon" },
    { "ema", KN_OPTION_FLOAT, RUN(ema), "0",
      "decay of averages of the weights: evaluated and saved as the model; 0: none",
      .max = 0.99999999 },
    { "ema-buffers", KN_OPTION_FLAG, RUN(ema_buffers), "true",
      "averages have statistics of batch norms of their own" },
    { "clip", KN_OPTION_FLOAT, RUN(clip), "0", "largest norm of the gradient; 0: no clipping" },
    { "clip-norm", KN_OPTION_STRING, RUN(clip_order), "2",
      "p of that norm: a number above 0, or inf" },
    { "seed", KN_OPTION_INT, RUN(seed), "1337", "seed of weights, images, dropout", .max = 9e15 },
    { 0 },
};
/* Behind settings_saving. */
static const kn_option export_rows[] = {
    { "export", KN_OPTION_PATH, AT(export), NULL,
      "at the end write the model (--keep-best: the best) into this folder, for torchvision and "
      "timm",
      .of = KN_OF_RUN },
    { 0 },
};
static const kn_option progress_rows[] = {
    { "progress", KN_OPTION_HEADING },
    { "eval-every", KN_OPTION_INT, AT(eval_epochs), "1", "epochs between evaluations; 0: never",
      .max = 1e6 },
    { "pictures", KN_OPTION_PATH, AT(pictures), NULL,
      "write curves, confusion matrix and the worst mistakes into this folder at the end",
      .of = KN_OF_RUN },
    { "grid", KN_OPTION_PATH, AT(grid), NULL,
      "write the first images of the training as a PNG, print their labels, and end",
      .of = KN_OF_ONCE },
    { 0 },
};

bool image_settings_begin(settings *s)
{
    static const char *const in_steps[] = { "warmup", "save-every", NULL };
    const kn_option *const parts[] = { image_rows,
                                       model_rows,
                                       settings_precision,
                                       training_rows,
                                       settings_ranks,
                                       settings_sharding,
                                       progress_rows,
                                       settings_log,
                                       settings_saving,
                                       export_rows,
                                       NULL };
    s->in_steps = in_steps;
    kn_family_choices(KN_IMAGE_MODELS, choices);
    return settings_join(s, parts);
}

/* ---- checks ---------------------------------------------------------------------------------- */

enum { CROP, RESIZED, WHOLE };

static bool is(const char *word, const char *name)
{
    return strcmp(word, name) == 0;
}

static bool check_rates(const image_settings *s, const kn_options *o)
{
    const settings *r = &s->run;
    if (kn_options_given(o, "nesterov") && r->nesterov && r->momentum == 0)
        return kn_fail("--nesterov needs a --momentum above 0; leave one of them out");
    if (r->weight_decay < 0)
        return kn_fail("--weight-decay is %g; give 0 or more, or -1 for the optimizer's",
                       r->weight_decay);
    if (is(s->schedule, "one_cycle") && r->steps > 1 && (r->warmup < 1 || r->warmup >= r->steps))
        return kn_fail("--warmup %lld: one_cycle rises and falls, so that 1 to %lld of these %lld "
                       "steps can be its warmup; or take another --schedule",
                       (long long)r->warmup, (long long)r->steps - 1, (long long)r->steps);
    if (r->warmup > r->steps)
        return kn_fail("--warmup %lld is more than the %lld steps of --epochs %g: the rate would "
                       "never reach --lr; give fewer steps of warmup",
                       (long long)r->warmup, (long long)r->steps, s->epochs);
    return true;
}

/* What was left open. */
static bool derive_rates(const image_settings *s, kn_options *o)
{
    const bool sgd = is(s->run.optimizer, "sgd"), cycle = is(s->schedule, "one_cycle");
    return kn_options_derive(o, "lr",
                             !sgd    ? 1e-3
                             : cycle ? 0.25
                                     : 0.1) &&
           kn_options_derive(o, "weight-decay", sgd ? 5e-4 : 0.05) &&
           kn_options_derive(o, "warmup", cycle ? (double)((s->run.steps * 3 + 9) / 10) : 0);
}

/* Options of one family beside another one. */
static bool check_model(const image_settings *s, const kn_options *o)
{
    static const struct {
        const char *option;
        const kn_family *of;
    } only[] = { { "patch", &kn_vit_family },
                 { "dropout", &kn_vit_family },
                 { "stem", &kn_resnet_family },
                 { "sync-bn", &kn_resnet_family } };
    for (size_t i = 0; i < sizeof only / sizeof *only; i++)
        if (kn_options_given(o, only[i].option) &&
            !kn_family_makes(kn_family_of_choice(KN_IMAGE_MODELS, s->model), only[i].of))
            return kn_fail("--%s is an option of a %s, and --model %s is none; leave one of them "
                           "out",
                           only[i].option, only[i].of->noun, s->model);
    return true;
}

static bool check_images(const image_settings *s)
{
    if ((s->mixup > 0 || s->cutmix > 0) && s->run.batch % 2)
        return kn_fail("--%s mixes images in pairs; give an even --batch, not %lld",
                       s->mixup > 0 ? "mixup" : "cutmix", (long long)s->run.batch);
    return true;
}

bool image_settings_check(image_settings *s, kn_options *o, kn_comm *world, int64_t samples,
                          int64_t before)
{
    settings *r = &s->run;
    const int64_t step = r->batch * r->accum * kn_comm_size(world);
    if (step > samples)
        return kn_fail("a step takes %lld images (--batch %lld, --accum %lld, %d ranks), the "
                       "training set has %lld; use a smaller --batch",
                       (long long)step, (long long)r->batch, (long long)r->accum,
                       kn_comm_size(world), (long long)samples);
    const double steps = ceil((s->epochs * (double)samples - (double)before) / (double)step - 1e-9);
    if (steps > 1e12)
        return kn_fail("--epochs %g are %.3g steps; give fewer", s->epochs, steps);
    r->steps = steps < 1 ? 1 : (int64_t)steps;
    r->eval_every = (s->eval_epochs * samples + step - 1) / step; /* the last: at the end */
    return derive_rates(s, o) && check_model(s, o) && check_images(s) && check_rates(s, o) &&
           settings_check_rate(r, o) && settings_check(r, o, world);
}

/* ---- the classes ----------------------------------------------------------------------------- */

bool image_settings_classes(const char *data, const kn_image_set *train, const kn_image_set *test)
{
    const kn_image_set_info a = kn_image_set_read_info(train), b = kn_image_set_read_info(test);
    if (b.classes != a.classes || b.channels != a.channels)
        return kn_fail("%s: the training images have %lld classes and %lld channels, the test "
                       "images %lld and %lld; they must agree",
                       data, (long long)a.classes, (long long)a.channels, (long long)b.classes,
                       (long long)b.channels);
    for (int64_t c = 0; c < a.classes; c++) {
        const char *one = kn_image_set_class(train, c), *other = kn_image_set_class(test, c);
        if (strcmp(one, other) != 0)
            return kn_fail("%s: class %lld of the training images is %s, of the test images %s; "
                           "both need the same classes",
                           data, (long long)c, one, other);
    }
    return true;
}

bool image_settings_names(const image_settings *s, const kn_image_set *train,
                          const kn_checkpoint *from)
{
    kn_model_config config;
    kn_vision_input saved = { 0 };
    char name[KN_LABEL_SIZE];
    const int64_t classes = kn_image_set_read_info(train).classes;
    bool ok = !from || kn_vision_config_saved(from, &config, &saved);
    for (int64_t c = 0; ok && saved.label && c < saved.classes && c < classes; c++) {
        kn_vision_label(name, kn_image_set_class(train, c));
        ok = strcmp(name, saved.label[c]) == 0 || s->run.other_data ||
             kn_fail("--data: class %lld is %s here and %s in %s: labels are numbers in the order "
                     "of the names; give the classes their names back, or accept these with "
                     "--other-data",
                     (long long)c, name, saved.label[c], kn_checkpoint_folder(from));
    }
    kn_host_free(saved.label);
    return ok;
}

/* ---- weights to begin with ------------------------------------------------------------------- */

static bool follow_number(kn_options *o, const char *option, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    return settings_follow(o, option, text);
}

static bool follow_weights(const image_settings *s, kn_options *o, const kn_pretrained *p)
{
    const kn_model_config *c = kn_pretrained_config(p);
    const kn_preset *preset = kn_config_preset(c);
    const kn_vision_sizes sizes = kn_vision_sizes_of(c);
    const int64_t side = kn_pretrained_input(p)->side;
    const char *stem = sizes.small_stem ? "small" : "large";
    if (!preset)
        return kn_fail("--init %s: the model has sizes of its own, none of --model's", s->init);
    if (!settings_follow(o, "model", preset->name))
        return false;
    if (kn_family_makes(c->family, &kn_vit_family))
        return follow_number(o, "patch", sizes.patch) && follow_number(o, "image", side);
    return (is(s->stem, "auto") ? kn_options_set(o, "stem", stem)
                                : settings_follow(o, "stem", stem)) &&
           (s->image > 0 || follow_number(o, "image", side));
}

kn_pretrained *image_settings_init(image_settings *s, kn_options *o, kn_comm *world)
{
    kn_pretrained *p = kn_pretrained_open(
        s->init, .model = kn_options_given(o, "model") ? s->model : NULL, .comm = world);
    if (!p || follow_weights(s, o, p))
        return p;
    kn_pretrained_free(p);
    return NULL;
}

/* ---- the model and its images ---------------------------------------------------------------- */

int64_t image_settings_side(const image_settings *s, const kn_image_set_info *set)
{
    if (s->image > 0)
        return s->image;
    return set->height > 0 && set->height == set->width ? set->height : 224;
}

bool image_settings_model(const image_settings *s, const kn_vision_input *in, kn_model_config *c)
{
    const kn_vision_sizes sizes = { .channels = in->channels,
                                    .side = in->side,
                                    .classes = in->classes,
                                    .small_stem = is(s->stem, "small") ||
                                                  (is(s->stem, "auto") && in->side <= 64),
                                    .patch = s->patch,
                                    .dropout = s->dropout };
    return kn_vision_preset(s->model, c) && kn_vision_fit(c, &sizes);
}

kn_augment image_settings_augment(const image_settings *s, const kn_image_set_info *set,
                                  const kn_vision_input *in, bool train)
{
    const int64_t side = in->side;
    kn_augment a = { 0 };
    const bool fits = set->height == side && set->width == side;
    memcpy(a.normalize.mean, in->mean, sizeof in->mean);
    memcpy(a.normalize.std, in->std, sizeof in->std);
    if (train && s->augment == RESIZED) {
        a.random_resized_crop.size[0] = side;
    } else if (!fits) { /* the whole shorter side, as torchvision's Resize and CenterCrop */
        a.resize[0] = side;
        if (!train || s->augment == WHOLE)
            a.center_crop[0] = side;
    }
    if (train && s->augment == CROP) {
        a.random_crop.size[0] = side;
        a.random_crop.padding = s->pad;
    }
    if (!train)
        return a;
    a.random_horizontal_flip = s->flip ? 0.5 : 0;
    a.color_jitter.brightness = a.color_jitter.contrast = s->jitter;
    a.color_jitter.saturation = in->channels == 3 ? s->jitter : 0;
    a.random_erasing.p = s->erase;
    return a;
}

/* ---- rates ----------------------------------------------------------------------------------- */

/* He et al.: divided by 10 after a half and after three quarters of the steps. */
static double step_rate(int64_t step, void *arg)
{
    const image_settings *s = arg;
    const int64_t n = s->run.steps;
    const double rise = step < s->run.warmup ? (double)(step + 1) / (double)(s->run.warmup + 1) : 1;
    return s->run.lr * rise * (step * 2 < n ? 1 : step * 4 < n * 3 ? 0.1 : 0.01);
}

kn_schedule image_settings_rates(const image_settings *s)
{
    const kn_schedule_kind kind = is(s->schedule, "one_cycle") ? KN_ONE_CYCLE
                                  : is(s->schedule, "cosine")  ? KN_COSINE
                                  : is(s->schedule, "step")    ? KN_OWN_SCHEDULE
                                                               : KN_CONSTANT;
    const bool single = s->run.steps == 1; /* it has no rise and no fall */
    return (kn_schedule){ .kind = single ? KN_CONSTANT : kind,
                          .lr = s->run.lr,
                          .min_lr = single ? 0 : s->run.min_lr,
                          .warmup = single ? 0 : s->run.warmup,
                          .steps = s->run.steps,
                          .rate = step_rate,
                          .arg = (void *)(uintptr_t)s };
}
