/* models/programs/train_resnet.c: trains a residual net or a vision transformer on images, on one
 * rank or on N sharded ranks. This file holds the parts specific to image models; trainer.c has the
 * way from the options to the end, training.c the loop. */
#include "data/data.h"
#include "kernels/context.h"
#include "kernels/error_internal.h"
#include "models/programs/image_settings.h"
#include "models/programs/pictures.h"
#include "nn/summary.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <stdlib.h>
#include <string.h>

typedef struct image_run {
    training t; /* comes first */
    image_settings s;
    kn_image_set *train, *test;
    kn_image_set_info set; /* of train */
    kn_loader *images, *test_images;
    kn_model_config config;
    kn_model_config saved; /* of the checkpoint to resume from; family NULL: none */
    kn_vision_input input;
    kn_pretrained *init; /* NULL: none */
    image_eval eval;
    losses curves; /* over epochs, for --pictures */
} image_run;

/* ---- the task -------------------------------------------------------------------------------- */

/* The loop asks for one micro-batch after another; make_loaders set where they begin. */
static bool image_batch(training *t, bool validation, int64_t step, int64_t number,
                        kn_device device, batch *b)
{
    image_run *r = (image_run *)t;
    (void)step, (void)number;
    (void)validation; /* image_eval.c reads the test images */
    kn_batch next = kn_next(r->images);
    b->x = next.x ? kn_to_device(next.x, device) : NULL;
    b->y = next.y ? kn_to_device(next.y, device) : NULL;
    return b->x && b->y;
}

static kn_tensor *image_loss(training *t, const batch *b)
{
    kn_tensor *logits = kn_call(&t->model, b->x);
    if (logits && kn_dtype_of(b->y) != KN_I64) /* mixed labels are probabilities in f32 */
        logits = kn_cast(logits, KN_F32);
    return kn_cross_entropy(logits, b->y, .smoothing = ((image_run *)t)->s.smoothing);
}

/* Batch norms' statistics become the mean of the ranks', so that these evaluate and save one
 * model. */
static bool image_settle(training *t)
{
    return kn_comm_size(t->world) == 1 || kn_mean_buffers(&t->model, t->world);
}

static bool image_evaluate(training *t, step_report *p)
{
    image_run *r = (image_run *)t;
    if (!image_eval_run(&r->eval, t, r->test_images, t->s->batch))
        return false;
    p->has_val = p->has_accuracy = !t->stop;
    p->val_loss = r->eval.loss;
    p->accuracy = (double)r->eval.right / (double)(r->eval.images ? r->eval.images : 1);
    return true;
}

/* ---- setting up ------------------------------------------------------------------------------ */

/* --data, else CIFAR-10, else the drawn set, said aloud by the table. */
static bool open_images(image_run *r)
{
    const image_settings *s = &r->s;
    const char *data = s->data;
    if (!data) {
        char *path = kn_data_find_quietly("cifar10");
        data = path ? "cifar10" : "shapes";
        kn_host_free(path);
        if (!kn_options_set(r->t.options, "data", data)) /* for the checkpoint */
            return false;
    }
    r->train = kn_image_set_open(data, "train", .skip_bad = s->skip_bad);
    r->test = r->train ? kn_image_set_open(data, "test", .skip_bad = s->skip_bad) : NULL;
    if (!r->test)
        return false;
    r->set = kn_image_set_read_info(r->train);
    return image_settings_classes(data, r->train, r->test);
}

static bool same_images(image_run *r)
{
    char text[128];
    snprintf(text, sizeof text, "%lld + %lld images of %lld classes", (long long)r->set.count,
             (long long)kn_image_set_read_info(r->test).count, (long long)r->set.classes);
    const uint64_t train = kn_image_set_hash(r->train), test = kn_image_set_hash(r->test);
    return image_settings_names(&r->s, r->train, r->t.from) &&
           training_same_data(&r->t, text, kn_hash64(train, test));
}

/* Means and deviations of the weights that the run begins with. */
static bool follow_weights(image_run *r)
{
    kn_vision_input saved = { 0 };
    bool ok = !r->t.from || kn_vision_config_saved(r->t.from, &r->saved, &saved);
    const kn_vision_input *from = r->init ? kn_pretrained_input(r->init) : &saved;
    if (ok && from->channels == r->input.channels) {
        memcpy(r->input.mean, from->mean, sizeof from->mean);
        memcpy(r->input.std, from->std, sizeof from->std);
    }
    kn_host_free(saved.label);
    return ok;
}

/* What the model sees. */
static bool describe_input(image_run *r)
{
    kn_vision_input *in = &r->input;
    in->channels = r->set.channels;
    in->classes = r->set.classes;
    in->side = image_settings_side(&r->s, &r->set);
    kn_vision_input_guess(in, false);
    in->crop_pct = 1;
    in->label = kn_host_calloc((size_t)in->classes, sizeof *in->label);
    for (int64_t c = 0; in->label && c < in->classes; c++)
        kn_vision_label(in->label[c], kn_image_set_class(r->train, c));
    return in->label != NULL && follow_weights(r);
}

static bool declare(training *t)
{
    return kn_config_init(&t->model, &((image_run *)t)->config, KN_F32, KN_META);
}

static bool make_model(image_run *r)
{
    return describe_input(r) && image_settings_model(&r->s, &r->input, &r->config) &&
           training_same_model(&r->t, &r->config, &r->saved) && declare(&r->t) &&
           (r->t.config = kn_vision_config_text(&r->config, &r->input)) != NULL;
}

static bool make_loaders(image_run *r)
{
    const image_settings *s = &r->s;
    const int64_t rows = s->run.batch;
    r->images = kn_image_loader(
        r->train, r->t.world, .batch = rows, .accum = s->run.accum, .shuffle = true,
        .seed = (uint64_t)s->run.seed, .workers = (int)s->workers, .mixup_alpha = s->mixup,
        .cutmix_alpha = s->cutmix, .augment = image_settings_augment(s, &r->set, &r->input, true));
    const kn_image_set_info test = kn_image_set_read_info(r->test);
    r->test_images =
        r->images ? kn_image_loader(r->test, r->t.world, .batch = rows, .tail = KN_TAIL_SHORT,
                                    .workers = (int)s->workers,
                                    .augment = image_settings_augment(s, &test, &r->input, false))
                  : NULL;
    const int64_t done = training_samples(&r->t, r->t.begin);
    return r->test_images &&
           (done == 0 ||
            kn_loader_set_position(r->images, (kn_position){ .epoch = done / r->set.count,
                                                             .sample = done % r->set.count,
                                                             .step = r->t.rows,
                                                             .samples = r->set.count,
                                                             .seed = (uint64_t)s->run.seed }));
}

static bool sharded(training *t)
{
    const image_run *r = (image_run *)t;
    return (!r->s.sync_bn || kn_sync_batch_norm(&t->model, t->world)) &&
           (!r->init || kn_pretrained_load(r->init, &t->model, .new_head = true));
}

static kn_values meta_images(const image_run *r, int64_t n)
{
    const kn_vision_input *in = &r->input;
    return KN_VALUES(kn_empty(KN_F32, KN_META, KN_SHAPE(n, in->channels, in->side, in->side)));
}

/* Operations of one image's forward and backward, counted on meta with two: a batch norm of one
 * value has no variance. */
static double image_flops(image_run *r)
{
    kn_scope scope = kn_scope_begin();
    kn_summary_table *table = kn_summary_new(&r->t.model, meta_images(r, 2));
    const double flops = table ? (table->row[0].forward + table->row[0].backward) / 2 : 0;
    kn_summary_free(table);
    kn_scope_end(scope);
    return flops;
}

/* ---- printing -------------------------------------------------------------------------------- */

/* The row of --init. */
static void print_weights(const image_run *r)
{
    const int64_t had = r->init ? kn_pretrained_input(r->init)->classes : 0;
    if (r->init && had != r->input.classes)
        report_row("begins with", "%s; the last layer is new: %lld classes, not %lld", r->s.init,
                   (long long)r->input.classes, (long long)had);
    else if (r->init)
        report_row("begins with", "%s, its last layer too", r->s.init);
}

static void print_model(const training *t)
{
    const image_run *r = (const image_run *)t;
    const kn_vision_input *in = &r->input;
    report_row("model", "%s: images of %lld x %lld x %lld, %lld classes", r->s.model,
               (long long)in->channels, (long long)in->side, (long long)in->side,
               (long long)in->classes);
    print_weights(r);
}

static void print_images(const training *t)
{
    const image_run *r = (const image_run *)t;
    const settings *s = t->s;
    const int ranks = kn_comm_size(t->world);
    report_row("images", "%s: %lld to train, %lld to test", r->set.kind, (long long)r->set.count,
               (long long)kn_image_set_read_info(r->test).count);
    if (r->set.made)
        report_row("", "drawn by a formula: results say nothing about photographs");
    report_row("step",
               "%lld images x %lld micro-batches x %d ranks = %lld; %lld steps are %g epochs",
               (long long)s->batch, (long long)s->accum, ranks,
               (long long)(s->batch * s->accum * ranks), (long long)s->steps, r->s.epochs);
}

/* A label in columns of so many bytes, cut before a character that has no room. */
static void print_label(const char *label, int columns)
{
    int n = (int)strlen(label);
    if (n > columns)
        for (n = columns; n > 0 && ((unsigned char)label[n] & 0xc0) == 0x80; n--)
            ;
    printf("%.*s%*s", n, label, columns - n, "");
}

static kn_values example(training *t)
{
    return meta_images((image_run *)t, t->s->batch);
}

/* Every rank calls it; the first one prints, of the images that it read the first bad one. */
static void print_skipped(const training *t, const char *which, const kn_image_set *set)
{
    const kn_image_set_info i = kn_image_set_read_info(set);
    const double all = kn_sum_over_ranks(t->world, (double)i.skipped);
    if (!first_rank(t) || all == 0)
        return;
    printf("%s images that can't be read: %.0f times another took the place%s%s\n", which, all,
           i.first_skipped ? "; the first: " : "", i.first_skipped ? i.first_skipped : "");
}

/* What became of bad images, and the last evaluation by class. Every rank calls it. */
static void print_end(image_run *r)
{
    const image_eval *e = &r->eval;
    print_skipped(&r->t, "training", r->train);
    print_skipped(&r->t, "test", r->test);
    if (!first_rank(&r->t) || e->images == 0)
        return;
    printf("\n%-20s %8s %8s\n", "class", "images", "right");
    for (int64_t c = 0; c < e->classes; c++) {
        print_label(r->input.label[c], 20);
        printf(" %8lld %6.1f %%\n", (long long)e->of_class[2 * c],
               e->of_class[2 * c]
                   ? 100.0 * (double)e->of_class[2 * c + 1] / (double)e->of_class[2 * c]
                   : 0.0);
    }
    printf("%-20s %8lld %6.2f %%, among the likeliest five %.2f %%\n", "all", (long long)e->images,
           100.0 * (double)e->right / (double)e->images,
           100.0 * (double)e->top5 / (double)e->images);
    printf("waited for images: %.1f %% of the time\n",
           100 * kn_loader_read_stats(r->images).waiting);
}

/* ---- pictures -------------------------------------------------------------------------------- */

/* --pictures: of the last evaluation. */
static bool write_pictures(image_run *r)
{
    const char *dir = r->s.pictures;
    if (!dir || !first_rank(&r->t) || r->curves.line[VALIDATED].count == 0)
        return true;
    const kn_image_set_info test = kn_image_set_read_info(r->test);
    if (!picture_curves(kn_path_of(dir, "curves.svg", "").text, &r->curves))
        return false;
    if (r->eval.images == 0) /* a stop request cut it short */
        return true;
    return (!r->eval.confusion ||
            picture_confusion(kn_path_of(dir, "confusion.svg", "").text, &r->eval, &r->input)) &&
           picture_mistakes(dir, &r->eval, r->test, &r->input,
                            image_settings_augment(&r->s, &test, &r->input, false));
}

/* --grid: the first images of the training, as the model sees them. */
static bool write_grid(image_run *r)
{
    enum { MOST = 64, ACROSS = 8 };
    const kn_vision_input *in = &r->input;
    kn_scope scope = kn_scope_begin();
    kn_batch b = kn_next(r->images);
    int64_t n = b.x ? kn_size(b.x, 0) : 0;
    n = n < MOST ? n : MOST;
    kn_tensor *x = n ? kn_slice(b.x, 0, 0, n) : NULL, *y = n ? kn_slice(b.y, 0, 0, n) : NULL;
    kn_tensor *scale = kn_from(KN_F64, KN_CPU, in->std, KN_SHAPE(1, in->channels, 1, 1));
    kn_tensor *shift = kn_from(KN_F64, KN_CPU, in->mean, KN_SHAPE(1, in->channels, 1, 1));
    x = x ? kn_add(kn_mul(x, kn_cast(scale, KN_F32)), kn_cast(shift, KN_F32)) : NULL;
    int64_t label[MOST];
    y = y && kn_ndim(y) == 2 ? kn_argmax(y, 1) : y; /* mixed: the heavier class */
    bool ok = x && picture_grid(r->s.grid, x, ACROSS) &&
              kn_to_host(kn_contiguous(y), label, (size_t)n * sizeof *label);
    for (int64_t i = 0; ok && i < n; i++) {
        print_label(in->label[label[i]], 14);
        printf("%s", i % ACROSS == ACROSS - 1 || i == n - 1 ? "\n" : " ");
    }
    kn_scope_end(scope);
    return ok;
}

/* ---- export ---------------------------------------------------------------------------------- */

/* Before the training: the folder of --export may be written, and is none of the run's own. */
static bool may_export(const training *t, const char *dir)
{
    return t->s->out && kn_are_same(dir, t->s->out)
               ? kn_fail("--export %s: the run saves its checkpoints there; choose another folder",
                         dir)
               : kn_model_may_save(dir);
}

static bool load_best(training *t)
{
    kn_checkpoint *c = kn_checkpoint_open(kn_path_of(t->s->out, "best", "").text, t->world);
    bool ok = c && kn_checkpoint_load(c, &t->model);
    kn_checkpoint_free(c);
    return ok;
}

/* --export: the best model of the run, where one was kept, else the last one; nothing, said aloud,
 * if the run was stopped. t's model may change. Collective. */
static bool export_model(image_run *r)
{
    training *t = &r->t;
    const char *dir = r->s.export;
    const bool kept = t->s->keep_best && t->best_step >= 0;
    /* the best checkpoint's model has the averages already */
    const kn_pretrained_save_options o = { .comm = t->world, .ema = kept ? NULL : t->ema };
    if (t->stop) {
        if (first_rank(t))
            printf("not exported: the run was stopped before its end\n");
        return true;
    }
    if ((kept && !load_best(t)) || !kn_vision_save(dir, &t->model, &r->config, &r->input, o))
        return false;
    if (first_rank(t))
        printf("exported to %s: the %s model\n", dir, kept ? "best" : "last");
    return true;
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool open_all(training *t)
{
    image_run *r = (image_run *)t;
    image_settings *s = &r->s;
    if ((s->init && !(r->init = image_settings_init(s, t->options, t->world))) || !open_images(r) ||
        !same_images(r) ||
        !image_settings_check(s, t->options, t->world, r->set.count, t->before) ||
        !training_has_steps(t, "epochs") || !make_model(r) || !make_loaders(r))
        return false;
    t->over = s->grid != NULL;
    if (s->grid)
        return !first_rank(t) || write_grid(r);
    t->family = r->config.family;
    t->lr = image_settings_rates(s);
    t->items = t->s->batch;
    t->item_flops = image_flops(r);
    r->curves = (losses){ .unit = r->set.count, .means = true };
    t->curves = s->pictures && first_rank(t) ? &r->curves : NULL;
    return kn_ok() && image_eval_init(&r->eval, r->input.classes);
}

static bool ready(training *t)
{
    const image_settings *s = &((image_run *)t)->s;
    bool ok = !first_rank(t) || !s->pictures ||
              (kn_folder_outside(s->pictures) && kn_folder_make(s->pictures, "--pictures "));
    return kn_agree(t->world, ok && (!first_rank(t) || !s->export || may_export(t, s->export)));
}

static bool end(training *t)
{
    image_run *r = (image_run *)t;
    if (!write_pictures(r))
        return false;
    print_end(r);
    return !r->s.export || export_model(r);
}

static void run_free(training *t)
{
    image_run *r = (image_run *)t;
    kn_loader_free(r->images);
    kn_loader_free(r->test_images);
    kn_image_set_free(r->train);
    kn_image_set_free(r->test);
    image_eval_free(&r->eval);
    kn_pretrained_free(r->init);
    kn_host_free(r->input.label);
    losses_free(&r->curves);
}

static const trainer of_images = {
    .name = "train_resnet",
    .about = "Trains a residual net or a vision transformer on images, on one rank or on several "
             "sharded ones.",
    .item = "images",
    .table = image_settings_begin,
    .open = open_all,
    .declare = declare,
    .sharded = sharded,
    .ready = ready,
    .end = end,
    .free = run_free,
    .example = example,
    .print_model = print_model,
    .print_data = print_images,
    .batch = image_batch,
    .loss = image_loss,
    .evaluate = image_evaluate,
    .settle = image_settle,
};

int main(int argc, char **argv)
{
    image_run r = { .t = { .of = &of_images, .s = &r.s.run } };
    return training_main(&r.t, argc, argv);
}
