/* tests/data/samples_test.c: loaders over a function of the user: each row is the sample that its
 * place says, whichever thread fills it and however a run got there. */
#include "data/loader.h"
#include "tests/kn_test.h"
#include "autograd/operations.h"
#include "comm/comm.h"

enum { MOST = 64 };

/* A sample that tells what it was made of: x = (index, epoch, a random number), y = index. */
typedef struct numbers {
    int64_t end;       /* with .samples = 0; else 0 */
    int64_t bad, skip; /* indices; -1: none */
} numbers;

static int fill_numbers(kn_data_sample *s, void *arg)
{
    const numbers *n = arg;
    double *x = s->field[0];
    if (n->end && s->index >= n->end)
        return KN_SAMPLE_END;
    if (s->index == n->bad)
        return kn_fail("sample %d is bad", (int)s->index);
    if (n->skip >= 0 && s->index % 7 == n->skip)
        return KN_SAMPLE_SKIP;
    x[0] = (double)s->index;
    x[1] = (double)s->epoch;
    x[2] = kn_draw_uniform(s) + kn_draw_normal(s) + (double)kn_draw_below(s, 1000);
    *(int64_t *)s->field[1] = s->index;
    return true;
}

#define NUMBERS .field = { { KN_F64, 1, { 3 } }, { KN_I64 } }

/* Takes count batches of rows rows; their x one after another. */
static bool take(kn_loader *l, int count, int64_t rows, double *x)
{
    for (int k = 0; k < count && kn_ok(); k++, x += 3 * rows) {
        kn_scope s = kn_scope_begin();
        kn_batch b = kn_next(l);
        if (b.x)
            kn_to_host(b.x, x, (size_t)(3 * rows) * sizeof *x);
        kn_scope_end(s);
    }
    return kn_ok();
}

static const numbers plain = { 0, -1, -1 };

KN_TEST(samples, any_number_of_workers)
{
    double one[8 * 4 * 3], other[8 * 4 * 3];
    for (int shuffle = 0; shuffle < 2; shuffle++)
        for (int workers = 0; workers < 5; workers++) {
            kn_loader *l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                         .batch = 4, .shuffle = shuffle, .workers = workers);
            KN_CHECK(take(l, 8, 4, workers ? other : one), "%s", kn_error());
            KN_CHECK(workers == 0 || memcmp(one, other, sizeof one) == 0, "%d workers", workers);
            kn_loader_free(l);
        }
}
