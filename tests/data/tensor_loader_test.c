/* tests/data/tensor_loader_test.c: batches of rows of tensors, as views or copies. */
#include "autograd/operations.h"
#include "comm/comm.h"
#include "data/data.h"
#include "data/loader.h"
#include "kernels/memory.h"
#include "tests/data/owned.h"
#include "tests/owned.h"

enum { ROWS = 10 };

/* x[i] = (10 i, 10 i + 1), y[i] = i, a mask of another dtype. */
typedef struct rows {
    float x[ROWS][2];
    int64_t y[ROWS];
    bool mask[ROWS][3];
    kn_tensor *field[3];
} rows;

static void rows_make(rows *r)
{
    for (int i = 0; i < ROWS; i++) {
        r->x[i][0] = 10.0f * (float)i;
        r->x[i][1] = r->x[i][0] + 1;
        r->y[i] = i;
        for (int j = 0; j < 3; j++)
            r->mask[i][j] = i % 3 == j;
    }
    r->field[0] = kn_borrow(KN_F32, r->x, KN_SHAPE(ROWS, 2));
    r->field[1] = kn_borrow(KN_I64, r->y, KN_SHAPE(ROWS));
    r->field[2] = kn_borrow(KN_BOOL, r->mask, KN_SHAPE(ROWS, 3));
}

#define FIELDS(r) .field = { (r).field[0], (r).field[1], (r).field[2] }

/* The batch holds these rows of r. */
static bool holds(const rows *r, const kn_batch *b, const int64_t *index, int64_t n)
{
    float x[ROWS][2];
    int64_t y[ROWS];
    bool mask[ROWS][3], ok = kn_ok() && kn_size(b->x, 0) == n && b->field[2] && !b->field[3];
    ok = ok && kn_to_host(b->x, x, (size_t)n * sizeof x[0]) &&
         kn_to_host(b->y, y, (size_t)n * sizeof y[0]) &&
         kn_to_host(b->field[2], mask, (size_t)n * sizeof mask[0]);
    for (int64_t i = 0; ok && i < n; i++)
        ok = y[i] == index[i] && memcmp(x[i], r->x[index[i]], sizeof x[i]) == 0 &&
             memcmp(mask[i], r->mask[index[i]], sizeof mask[i]) == 0;
    return ok;
}

KN_TEST(tensor_loader, rows_in_order_are_views)
{
    rows r;
    IN_SCOPE;
    rows_make(&r);
    int64_t before = kn_ledger_read().live[KN_MEM_DATA];
    OWNED_LOADER kn_loader *l = kn_tensor_loader(NULL, FIELDS(r), .batch = 4);
    for (int k = 0; k < 5; k++) {
        kn_batch b = kn_next(l);
        int64_t index[4];
        for (int i = 0; i < 4; i++)
            index[i] = (4 * k + i) % ROWS;
        KN_CHECK(holds(&r, &b, index, 4));
        bool around = k == 2; /* rows 8, 9, 0, 1 */
        KN_CHECK((kn_data(b.x) == (void *)r.x[index[0]]) == !around);
        KN_CHECK((kn_data(b.y) == (void *)&r.y[index[0]]) == !around);
        if (k == 1)
            KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before);
    }
    kn_loader_stats s = kn_loader_read_stats(l);
    KN_CHECK(s.batches == 5 && s.copied == 1 && s.replaced == 0);
}

KN_TEST(tensor_loader, shuffled_rows_are_copies)
{
    rows r;
    IN_SCOPE;
    rows_make(&r);
    for (int workers = 0; workers < 3; workers++) {
        OWNED_LOADER kn_loader *l = kn_tensor_loader(NULL, FIELDS(r), .batch = 4, .shuffle = true,
                                                     .seed = 3, .workers = workers);
        for (int k = 0; k < 5; k++) {
            kn_batch b = kn_next(l);
            int64_t index[4];
            for (int i = 0; i < 4; i++)
                index[i] = kn_shuffle(3, (4 * k + i) / ROWS, ROWS, (4 * k + i) % ROWS);
            KN_CHECK(holds(&r, &b, index, 4), "%d workers", workers);
        }
        kn_loader_stats s = kn_loader_read_stats(l);
        KN_CHECK(s.batches == 5 && s.copied == 5);
        KN_CHECK(s.waited_s > 0 && s.waiting > 0 && s.waiting <= 1);
    }
}

KN_TEST(tensor_loader, the_end_of_an_epoch)
{
    static const struct {
        kn_tail tail;
        int64_t rounds, rows, samples, next; /* of round 2: rows 8 and 9 of ten, and round 3 */
    } cases[] = { { KN_TAIL_NEXT, 2, 4, 4, 2 },
                  { KN_TAIL_DROP, 2, 4, 4, 4 },
                  { KN_TAIL_PAD, 3, 4, 2, 0 },
                  { KN_TAIL_SHORT, 3, 2, 2, 0 } };
    rows r;
    IN_SCOPE;
    rows_make(&r);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        OWNED_LOADER kn_loader *l =
            kn_tensor_loader(NULL, FIELDS(r), .batch = 4, .tail = cases[i].tail);
        KN_CHECK(kn_loader_rounds(l) == cases[i].rounds);
        kn_loader_seek(l, 2);
        kn_batch b = kn_next(l);
        const int64_t end[] = { 8, 9, 0, 1 }, again[] = { 0, 1, 2, 3 };
        KN_CHECK(holds(&r, &b, cases[i].tail == KN_TAIL_DROP ? again : end, cases[i].rows));
        KN_CHECK(b.samples == cases[i].samples && b.epoch == (cases[i].tail == KN_TAIL_DROP));
        b = kn_next(l);
        KN_CHECK(((int64_t *)kn_data(b.y))[0] == cases[i].next);
    }
    /* more places than samples: all of them in each batch */
    kn_loader *l = kn_tensor_loader(NULL, FIELDS(r), .batch = 25, .tail = KN_TAIL_PAD);
    kn_batch b = kn_next(l);
    KN_CHECK(b.samples == ROWS && kn_size(b.x, 0) == 25 && kn_loader_rounds(l) == 1);
    KN_CHECK(((int64_t *)kn_data(b.y))[24] == 4);
    kn_loader_free(l);
}

/* Short batches of ranks: the last one of an epoch has a row that doesn't count. */
static int short_of_rank(kn_comm *world, void *arg)
{
    rows r;
    int rank = kn_rank(world), bad = 0;
    kn_scope scope = kn_scope_begin();
    rows_make(&r);
    kn_loader *l = kn_tensor_loader(world, FIELDS(r), .batch = 3, .tail = KN_TAIL_SHORT);
    bad += kn_loader_rounds(l) != 1;
    kn_batch b = kn_next(l);
    static const int64_t index[4][3] = { { 0, 1, 2 }, { 3, 4, 5 }, { 6, 7, 8 }, { 9 } };
    bad += !holds(&r, &b, index[rank], rank == 3 ? 1 : 3) || b.samples != (rank == 3 ? 1 : 3);
    kn_loader_free(l);
    l = kn_tensor_loader(world, FIELDS(r), .batch = 5, .tail = KN_TAIL_SHORT);
    b = kn_next(l);
    bad += kn_size(b.x, 0) != (rank < 2 ? 5 : 1) || b.samples != (rank < 2 ? 5 : 0);
    kn_loader_free(l);
    kn_scope_end(scope);
    return bad + !kn_ok();
}

KN_TEST(tensor_loader, ranks_without_a_sample)
{
    KN_CHECK(kn_spawn_threads(4, short_of_rank, NULL) == 0);
}

KN_TEST(tensor_loader, on_meta)
{
    rows r;
    IN_SCOPE;
    rows_make(&r);
    kn_loader *l =
        kn_tensor_loader(NULL, FIELDS(r), .batch = 4, .shuffle = true, .device = KN_META);
    kn_batch b = kn_next(l);
    KN_CHECK(kn_device_of(b.x) == KN_META && kn_size(b.x, 0) == 4 && kn_size(b.x, 1) == 2);
    kn_loader_free(l);
    kn_tensor *there = kn_empty(KN_F32, KN_META, KN_SHAPE(ROWS, 3));
    l = kn_tensor_loader(NULL, .field = { there }, .batch = 4, .shuffle = true);
    b = kn_next(l);
    KN_CHECK(kn_device_of(b.x) == KN_META && kn_size(b.x, 0) == 4 && kn_size(b.x, 1) == 3);
    KN_CHECK(kn_loader_read_stats(l).copied == 1);
    kn_loader_free(l);
    KN_CHECK_OK();
}

KN_TEST(tensor_loader, keeps_its_tensors)
{
    int64_t live = kn_live_tensors();
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_arange(KN_F32, KN_CPU, 6);
    kn_loader *l = kn_tensor_loader(NULL, .field = { x }, .batch = 2);
    kn_scope_end(scope);
    scope = kn_scope_begin();
    kn_next(l);
    kn_tensor *b = kn_keep(kn_next(l).x);
    kn_scope_end(scope);
    kn_loader_free(l);
    float value[2];
    KN_CHECK(kn_to_host(b, value, sizeof value) && value[0] == 2 && value[1] == 3);
    kn_tensor_free(b);
    KN_CHECK(kn_live_tensors() == live);
}

KN_TEST(tensor_loader, errors)
{
    rows r;
    IN_SCOPE;
    rows_make(&r);
    kn_tensor *nine = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(9)),
              *none = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3));
    kn_tensor *meta = kn_empty(KN_F32, KN_META, KN_SHAPE(ROWS));
    const struct {
        kn_tensor_loader_options o;
        const char *error;
    } cases[] = {
        { { .batch = 2 }, ".field is empty" },
        { { .batch = 2, .field = { NULL, r.field[0] } }, "field 0 is NULL, but field 1 is given" },
        { { .batch = 2, .field = { r.field[0], nine } },
          "field 1, f32[9], has 9 samples, but field 0 has 10" },
        { { .batch = 2, .field = { kn_transpose(r.field[0], 0, 1) } },
          "field 0, f32[2,10], isn't contiguous" },
        { { .batch = 2, .field = { kn_full(KN_F32, KN_CPU, 1, KN_SCALAR) } },
          "without a dim of samples" },
        { { .batch = 2, .field = { r.field[0], meta } }, "is on meta, but field 0 on cpu" },
        { { .batch = 2, .field = { meta }, .device = KN_CPU },
          "tensors on meta make batches on meta, not on cpu" },
        { { .batch = 2, .field = { meta }, .workers = 1 }, "are gathered there" },
        { { .batch = 2, .field = { none } }, "the data set is empty" },
        { { .batch = 11, .field = { nine } },
          "kn_tensor_loader: .batch must lie between 1 and the 9 samples there are, not 11" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        KN_CHECK(!kn_tensor_loader_(NULL, cases[i].o), "case %zu", i);
        KN_CHECK_ERROR(cases[i].error);
    }
    REFUSED(kn_borrow(KN_F32, NULL, KN_SHAPE(2)), "is NULL");
    REFUSED(kn_borrow(KN_F32, (char *)r.x + 1, KN_SHAPE(2)), "not aligned to its elements");
    REFUSED(kn_borrow(KN_F32, r.x, KN_SHAPE(INT64_MAX, 4)),
            "borrow: size 9223372036854775807 in dim 0");
}
