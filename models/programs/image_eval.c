/* models/programs/image_eval.c: each rank counts its part of the set; sums over ranks follow. */
#include "models/programs/image_eval.h"
#include "comm/values.h"
#include "kernels/error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool image_eval_init(image_eval *e, int64_t classes)
{
    const size_t c = (size_t)classes;
    *e = (image_eval){ .classes = classes };
    e->of_class = kn_host_calloc(c, 2 * sizeof *e->of_class);
    if (classes <= MOST_CONFUSED)
        e->confusion = kn_host_calloc(c * c, sizeof *e->confusion);
    return e->of_class && (e->confusion || classes > MOST_CONFUSED);
}

void image_eval_free(image_eval *e)
{
    kn_host_free(e->of_class);
    kn_host_free(e->confusion);
    *e = (image_eval){ 0 };
}

static void begin(image_eval *e)
{
    const size_t c = (size_t)e->classes;
    memset(e->of_class, 0, 2 * c * sizeof *e->of_class);
    if (e->confusion)
        memset(e->confusion, 0, c * c * sizeof *e->confusion);
    e->loss = 0;
    e->images = e->right = e->top5 = 0;
    e->mistakes = 0;
}

/* ---- the worst mistakes ---------------------------------------------------------------------- */

/* The larger loss first, then the lower index: one order, whatever the number of ranks. */
static int worse_first(const void *a, const void *b)
{
    const mistake *x = a, *y = b;
    if (x->loss != y->loss)
        return x->loss > y->loss ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static void keep_mistake(image_eval *e, mistake m)
{
    if (e->mistakes == WORST && worse_first(&e->worst[WORST - 1], &m) < 0)
        return;
    e->mistakes += e->mistakes < WORST;
    e->worst[e->mistakes - 1] = m;
    qsort(e->worst, (size_t)e->mistakes, sizeof m, worse_first);
}

/* ---- counting -------------------------------------------------------------------------------- */

/* One image's logits[classes]. */
static void count(image_eval *e, const float *logit, int64_t label, int64_t index)
{
    int64_t guess = 0, above = 0;
    double sum = 0;
    for (int64_t c = 1; c < e->classes; c++)
        guess = logit[c] > logit[guess] ? c : guess;
    for (int64_t c = 0; c < e->classes; c++) {
        sum += exp((double)logit[c] - (double)logit[guess]);
        above += logit[c] > logit[label] || (logit[c] == logit[label] && c < label);
    }
    const double loss = (double)logit[guess] + log(sum) - (double)logit[label];
    const bool right = guess == label;
    e->images++;
    e->loss += loss;
    e->right += right;
    e->top5 += above < 5;
    e->of_class[2 * label]++;
    e->of_class[2 * label + 1] += right;
    if (e->confusion)
        e->confusion[label * e->classes + guess]++;
    if (!right)
        keep_mistake(e, (mistake){ loss, index, label, guess });
}

/* One batch; first: the index of its first image. */
static bool count_batch(image_eval *e, training *t, const kn_batch *b, int64_t first)
{
    const int64_t rows = b->x ? kn_size(b->x, 0) : 0, n = rows * e->classes;
    kn_tensor *x = b->x ? kn_to_device(b->x, t->device) : NULL;
    kn_tensor *logits = x ? kn_call(&t->model, x) : NULL;
    if (!logits)
        return false;
    float *value = kn_host_alloc((size_t)n * sizeof *value);
    int64_t *label = kn_host_alloc((size_t)rows * sizeof *label);
    bool ok = value && label &&
              kn_to_host(kn_cast(logits, KN_F32), value, (size_t)n * sizeof *value) &&
              kn_to_host(b->y, label, (size_t)rows * sizeof *label);
    for (int64_t i = 0; ok && i < b->samples; i++)
        count(e, value + i * e->classes, label[i], first + i);
    kn_host_free(value);
    kn_host_free(label);
    return ok;
}

/* ---- over ranks ------------------------------------------------------------------------------ */

static bool sum_counts(image_eval *e, kn_comm *world)
{
    int64_t all[] = { e->images, e->right, e->top5 };
    bool ok = kn_hosts_sum(world, all, 3, "images") &&
              kn_hosts_sum(world, e->of_class, 2 * e->classes, "images of a class") &&
              (!e->confusion ||
               kn_hosts_sum(world, e->confusion, e->classes * e->classes, "confusion matrix"));
    e->images = all[0], e->right = all[1], e->top5 = all[2];
    e->loss = kn_sum_over_ranks(world, e->loss) / (double)e->images;
    return ok && kn_ok();
}

static bool gather_mistakes(image_eval *e, kn_comm *world)
{
    enum { FIELDS = 4 };
    const int ranks = kn_comm_size(world);
    double mine[WORST * FIELDS] = { 0 };
    double *all = kn_host_alloc((size_t)ranks * sizeof mine);
    for (int i = 0; i < e->mistakes; i++) {
        const mistake *m = &e->worst[i];
        const double one[FIELDS] = { m->loss, (double)m->index + 1, (double)m->label,
                                     (double)m->guess };
        memcpy(mine + i * FIELDS, one, sizeof one);
    }
    bool ok = all && kn_all_gather(world, all, mine, WORST * FIELDS, KN_F64,
                                   kn_compute_stream(KN_CPU), "worst mistakes");
    e->mistakes = 0;
    for (int i = 0; ok && i < ranks * WORST; i++) {
        const double *m = all + i * FIELDS;
        if (m[1] > 0) /* the index + 1 */
            keep_mistake(e, (mistake){ m[0], (int64_t)m[1] - 1, (int64_t)m[2], (int64_t)m[3] });
    }
    kn_host_free(all);
    return ok;
}

bool image_eval_run(image_eval *e, training *t, kn_loader *test, int64_t rows)
{
    const int ranks = kn_comm_size(t->world), rank = kn_rank(t->world);
    bool ok = true;
    begin(e);
    kn_loader_seek(test, 0);
    for (int64_t k = 0; ok && !t->stop && k < kn_loader_rounds(test); k++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(test);
        ok = count_batch(e, t, &b, (k * ranks + rank) * rows);
        training_stop_requested(t);
        kn_scope_end(scope);
    }
    if (t->stop) /* the images so far are only a part of the set */
        begin(e);
    return ok && (t->stop || ranks == 1 || gather_mistakes(e, t->world)) &&
           (t->stop || sum_counts(e, t->world));
}
