/* data/image_loader.c: loaders over sets of images. */
#include "data/images_internal.h"
#include "data/loader_internal.h"
#include "kernels/error_internal.h"

#include <stdio.h>
#include <string.h>

typedef struct feed {
    const kn_image_set *set;
    kn_augment_plan plan;
    kn_mix mix;
    bool mixes;
    int rooms;
    kn_image_room room[]; /* of each worker */
} feed;

/* Counts an image that can't be read. */
static int skip(const kn_image_set *s, const char *problem)
{
    if (!s->options.skip_bad)
        return kn_fail("%s", problem);
    kn_image_set *own = (kn_image_set *)s; /* read-only but for these */
    pthread_mutex_lock(&own->lock);
    if (own->skipped++ == 0)
        snprintf(own->first_skipped, sizeof own->first_skipped, "%s", problem);
    pthread_mutex_unlock(&own->lock);
    return KN_SAMPLE_SKIP;
}

static int fill_image(kn_data_sample *s, void *arg)
{
    feed *f = arg;
    kn_image_room *room = &f->room[s->worker];
    const int64_t label = f->set->label(f->set, s->index);
    kn_pixels image;
    int answer = f->set->read(f->set, s->index, room, &image);
    if (answer != true)
        return answer == KN_SAMPLE_SKIP ? skip(f->set, room->problem) : answer;
    if (!kn_augment_pixels(&f->plan, &image, s, room))
        return false;
    if (image.height != f->plan.height || image.width != f->plan.width)
        return kn_fail("an image has %lld x %lld pixels, others have %lld x %lld",
                       (long long)image.height, (long long)image.width, (long long)f->plan.height,
                       (long long)f->plan.width);
    kn_augment_store(&f->plan, image, s, s->field[0]);
    if (f->mixes)
        ((float *)s->field[1])[label] = 1;
    else
        memcpy(s->field[1], &label, sizeof label);
    return true;
}

static void mix_images(kn_data_sample *a, kn_data_sample *b, void *arg)
{
    feed *f = arg;
    kn_mix_pair(&f->mix, a, a->field[0], b->field[0], a->field[1], b->field[1]);
}

static void feed_free(void *arg)
{
    feed *f = arg;
    for (int i = 0; i < f->rooms; i++)
        kn_room_free(&f->room[i]);
    kn_host_free(f);
}

static bool check_mixing(const feed *f, const kn_image_loader_options *o)
{
    if (!(o->mixup_alpha >= 0 && o->mixup_alpha <= 1e6) ||
        !(o->cutmix_alpha >= 0 && o->cutmix_alpha <= 1e6))
        return kn_fail("kn_image_loader: .mixup_alpha is %g and .cutmix_alpha %g, should be 0 or "
                       "positive",
                       o->mixup_alpha, o->cutmix_alpha);
    if (f->mixes && o->batch % 2 != 0)
        return kn_fail("kn_image_loader: .batch is %lld, but images are mixed in pairs; make it "
                       "even",
                       (long long)o->batch);
    if (f->mixes && f->plan.dtype == KN_U8)
        return kn_fail("kn_image_loader: images of u8 can't be mixed; choose a .dtype of floats");
    return true;
}

static bool feed_init(feed *f, const kn_image_set *s, const kn_image_loader_options *o)
{
    const kn_image_set_info *info = &s->info;
    f->set = s;
    f->mixes = o->mixup_alpha != 0 || o->cutmix_alpha != 0;
    if (!kn_augment_plan_make(&f->plan, "kn_image_loader", &o->augment, o->dtype, info->channels,
                              info->height, info->width) ||
        !check_mixing(f, o))
        return false;
    if (f->plan.height == 0)
        return kn_fail("kn_image_loader: the images differ in size; give them one by "
                       ".random_resized_crop, .center_crop or .resize = { H, W }");
    f->plan.max_pixels = s->options.max_pixels;
    f->mix = (kn_mix){ o->mixup_alpha, o->cutmix_alpha, f->plan.dtype, info->channels,
                       f->plan.height, f->plan.width,   info->classes };
    return true;
}

kn_loader *kn_image_loader_(const kn_image_set *s, const kn_comm *world, kn_image_loader_options o)
{
    if (!kn_ok() || !kn_given(s, "kn_image_loader", "the set of images"))
        return NULL;
    int rooms = o.workers > 0 && o.workers < 4096 ? o.workers : 1;
    feed *f = kn_host_calloc(1, sizeof *f + (size_t)rooms * sizeof f->room[0]);
    if (!f)
        return NULL;
    f->rooms = rooms;
    if (!feed_init(f, s, &o)) {
        feed_free(f);
        return NULL;
    }
    kn_field field[KN_MAX_FIELDS] = {
        { f->plan.dtype, 3, { f->plan.channels, f->plan.height, f->plan.width } },
        { .dtype = KN_I64 }
    };
    if (f->mixes)
        field[1] = (kn_field){ KN_F32, 1, { s->info.classes } };
    kn_loader *l = kn_loader_make("kn_image_loader", fill_image, f, feed_free, world, s->info.count,
                                  field, KN_LOADER_COMMON(o));
    if (l && f->mixes)
        l->mix = mix_images;
    return l;
}
