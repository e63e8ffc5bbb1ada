/* bench/images.c: images that a core reads, augments and stores in batches, a second (of processor
 * time, so that other programs hardly matter).
 *
 * bench_images DATA [SPLIT] [--images 2000] [--batch 50] [--workers 0]
 *
 * DATA is what kn_image_set_open takes: "shapes", "cifar10", a folder. Images of one size are
 * padded by 4 and cropped; others get a random resized crop of 224. Then a flip and .normalize.
 * With --workers threads share the work. scripts/peers images measures the same beside torchvision.
 */
#include "bench/args.h"
#include "knap.h"

#include <stdio.h>
#include <time.h>

static kn_augment augment_for(const kn_image_set_info *info)
{
    kn_augment a = { .random_horizontal_flip = 0.5,
                     .normalize = { { 0.485, 0.456, 0.406 }, { 0.229, 0.224, 0.225 } } };
    if (info->height > 0) {
        a.random_crop.size[0] = info->height;
        a.random_crop.size[1] = info->width;
        a.random_crop.padding = 4;
    } else
        a.random_resized_crop.size[0] = 224;
    return a;
}

/* Images a second of processor time; 0 with an error. */
static double measure(kn_loader *l, int64_t batches, int64_t batch)
{
    clock_t begin = 0;
    for (int64_t i = -1; i < batches && kn_ok(); i++) {
        if (i == 0)
            begin = clock(); /* behind a batch that warms up */
        kn_scope scope = kn_scope_begin();
        kn_next(l);
        kn_scope_end(scope);
    }
    const double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    return kn_ok() && seconds > 0 ? (double)(batches * batch) / seconds : 0;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Images a second that a core reads, augments and stores in batches.\n"
               "  bench_images DATA [SPLIT] [--images N] [--batch N] [--workers N]",
               2);
    if (argc < 2 || argv[1][0] == '-') {
        fprintf(stderr, "bench_images: DATA is missing; --help lists the options\n");
        return 2;
    }
    const char *split = argc > 2 && argv[2][0] != '-' ? argv[2] : NULL;
    const int64_t batch = number(argc, argv, "--batch", 50);
    kn_set_threads(1);
    kn_image_set *s = kn_image_set_open(argv[1], split);
    const kn_image_set_info info = s ? kn_image_set_read_info(s) : (kn_image_set_info){ 0 };
    kn_loader *l = s ? kn_image_loader(s, NULL, .batch = batch, .shuffle = true,
                                       .workers = (int)number(argc, argv, "--workers", 0),
                                       .augment = augment_for(&info))
                     : NULL;
    double rate = l ? measure(l, number(argc, argv, "--images", 2000) / batch, batch) : 0;
    if (rate > 0)
        printf("%.0f images/s a core, of %s\n", rate, info.kind);
    else
        fprintf(stderr, "bench_images: %s\n", kn_error() ? kn_error() : "too few --images");
    kn_loader_free(l);
    kn_image_set_free(s);
    return rate > 0 ? 0 : 1;
}
