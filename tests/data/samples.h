/* tests/data/samples.h: a data set whose samples tell what they were made of. */
#ifndef KNAP_TESTS_DATA_SAMPLES_H
#define KNAP_TESTS_DATA_SAMPLES_H

#include "data/loader.h"
#include "kernels/memory.h"
#include "tests/kn_test.h"

/* x = (index, epoch, random numbers), y = index. */
typedef struct numbers {
    int64_t end; /* for an unknown number of samples, else 0 */
    int64_t bad; /* an index, or -1 */
    int skip;    /* of each seven one, or -1 */
} numbers;

static const numbers plain = { 0, -1, -1 };

#define NUMBERS .field = { { KN_F64, 1, { 3 } }, { .dtype = KN_I64 } }
#define WIDTH   3

static inline int fill_numbers(kn_data_sample *s, void *arg)
{
    const numbers *n = arg;
    double *x = s->field[0];
    if (n->end && s->index >= n->end)
        return KN_SAMPLE_END;
    if (s->index == n->bad)
        return kn_fail("sample %d is bad", (int)s->index);
    if (s->index % 7 == n->skip)
        return KN_SAMPLE_SKIP;
    x[0] = (double)s->index;
    x[1] = (double)s->epoch;
    x[2] = kn_draw_uniform(s) + kn_draw_normal(s) + (double)kn_draw_below(s, 1000);
    *(int64_t *)s->field[1] = s->index;
    return true;
}

/* Takes a batch; copies its x to x and returns its rows, or -1 with an error. */
static inline int64_t take(kn_loader *l, double *x, int64_t *counting)
{
    int64_t rows = -1;
    kn_scope s = kn_scope_begin();
    kn_batch b = kn_next(l);
    if (b.x && kn_to_host(b.x, x, (size_t)kn_numel(b.x) * sizeof *x))
        rows = kn_size(b.x, 0);
    if (counting)
        *counting = b.samples;
    kn_scope_end(s);
    return kn_ok() ? rows : -1;
}

#endif
