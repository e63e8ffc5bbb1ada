/* models/programs/image_eval.h: an image model's evaluation over a whole set: loss, the share of
 * images among whose likeliest one or five classes is the right one, counts by class, and the worst
 * mistakes. */
#ifndef KNAP_MODELS_PROGRAMS_IMAGE_EVAL_H
#define KNAP_MODELS_PROGRAMS_IMAGE_EVAL_H

#include "data/images.h"
#include "models/programs/training.h"

enum { WORST = 16, MOST_CONFUSED = 128 };

typedef struct mistake {
    double loss;
    int64_t index, label, guess; /* index: of the set */
} mistake;

typedef struct image_eval {
    int64_t classes, images;
    double loss;         /* mean */
    int64_t right, top5; /* images */
    int64_t *of_class;   /* [classes, 2]: images, right ones */
    int64_t *confusion;  /* [label, guess]; NULL with more than MOST_CONFUSED classes */
    mistake worst[WORST];
    int mistakes; /* in worst, the largest loss first */
} image_eval;

bool image_eval_init(image_eval *e, int64_t classes);
void image_eval_free(image_eval *e);
/* Evaluates t's model with one pass over test, a loader without shuffling and with KN_TAIL_SHORT,
 * whose batches have so many rows. Collective; the same result on all ranks. A stop request ends it
 * (t->stop), and all is 0. */
bool image_eval_run(image_eval *e, training *t, kn_loader *test, int64_t rows);

#endif
