/* Intervals as rectangles: random shapes, cuts and layouts against counting element by element. */
#include "fsdp/layout.h"
#include "state/rectangles.h"
#include "tests/kn_test.h"

static uint64_t seed;

static int64_t below(int64_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((seed >> 33) % (uint64_t)n);
}

static int64_t numel(int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    return n;
}

static int random_shape(int max_dims, int64_t shape[KN_MAX_DIMS])
{
    int ndim = (int)below(max_dims + 1);
    for (int d = 0; d < ndim; d++)
        shape[d] = below(20) == 0 ? 0 : 1 + below(ndim > 4 ? 3 : 6);
    return ndim;
}

/* The elements of rectangles, one rectangle after another, each row-major; how many. */
static int64_t list_elements(int ndim, const int64_t *shape, const kn_rectangle *r, int n,
                             int64_t *element)
{
    int64_t total = 0;
    for (int i = 0; i < n; i++) {
        int64_t held = kn_rectangle_numel(ndim, &r[i]);
        for (int64_t e = 0; e < held; e++) {
            int64_t left = e, stride = 1, at = 0;
            for (int d = ndim - 1; d >= 0; d--) {
                at += (r[i].offset[d] + left % r[i].size[d]) * stride;
                left /= r[i].size[d];
                stride *= shape[d];
            }
            element[total++] = at;
        }
    }
    return total;
}

static void check_part(int ndim, const int64_t *shape, kn_interval part, int *most)
{
    static int64_t element[100000];
    kn_rectangle r[KN_MAX_RECTANGLES];
    int n = kn_interval_rectangles("w", ndim, shape, part, r);
    KN_CHECK(n >= 0);
    KN_CHECK(n <= (ndim ? 2 * ndim - 1 : 1), "%d rectangles of %d dims", n, ndim);
    *most = n > *most ? n : *most;
    if (numel(ndim, shape) == 0) {
        KN_CHECK(n == 1 && memcmp(r[0].size, shape, (size_t)ndim * sizeof *shape) == 0);
        return;
    }
    KN_CHECK(list_elements(ndim, shape, r, n, element) == kn_interval_numel(part));
    for (int64_t b = 0, i = 0; b < part.blocks; b++)
        for (int64_t e = 0; e < part.count; e++, i++)
            KN_CHECK(element[i] == part.start + b * part.stride + e, "element %lld is %lld",
                     (long long)i, (long long)element[i]);
}

KN_TEST(rectangles, any_run_of_any_shape)
{
    int most = 0;
    for (int i = 0; i < 3000; i++) {
        int64_t shape[KN_MAX_DIMS];
        int ndim = random_shape(KN_MAX_DIMS, shape);
        int64_t all = numel(ndim, shape), from = below(all + 1), to = from + below(all - from + 1);
        check_part(ndim, shape, (kn_interval){ from, to - from, to > from, to - from, 0 }, &most);
    }
    KN_CHECK(most >= 9, "at most %d rectangles were seen", most);
}

/* The parts of all ranks, in any layout: each is rectangles, and together they cover the shape. */
static void check_layout(kn_layout_kind kind)
{
    int64_t shape[4][KN_MAX_DIMS];
    kn_layout_param param[4];
    kn_layout l;
    int most = 0, shards = 1 + (int)below(5);
    for (int i = 0; i < 4; i++) {
        param[i] = (kn_layout_param){ random_shape(4, shape[i]), shape[i], 0 };
        if (param[i].ndim > 1)
            param[i].dim = (int)below(param[i].ndim);
        if (param[i].dim > 0)
            shape[i][param[i].dim] = shards * below(4);
    }
    KN_CHECK(kn_layout_make(&l, kind, param, 4, shards));
    for (int i = 0; i < 4; i++) {
        kn_rectangle r[8 * KN_MAX_RECTANGLES];
        const char *file[8 * KN_MAX_RECTANGLES];
        int n = 0;
        for (int k = 0; k < shards; k++) {
            check_part(param[i].ndim, shape[i], kn_layout_part(&l, i, k), &most);
            n += kn_interval_rectangles("w", param[i].ndim, shape[i], kn_layout_part(&l, i, k),
                                        r + n);
        }
        for (int k = 0; k < n; k++)
            file[k] = "a";
        KN_CHECK(kn_rectangles_cover("w", param[i].ndim, shape[i], r, file, n));
    }
    kn_layout_free(&l);
}

KN_TEST(rectangles, parts_of_all_layouts_cover_the_shape)
{
    for (int i = 0; i < 300; i++)
        check_layout((kn_layout_kind)(1 + below(KN_LAYOUT_COUNT - 1)));
}

static void refused(int64_t start, int64_t count, int64_t blocks, int64_t stride, const char *text)
{
    kn_rectangle r[KN_MAX_RECTANGLES];
    kn_interval part = { start, count, blocks, stride, 0 };
    KN_CHECK(kn_interval_rectangles("w", 2, (int64_t[]){ 4, 6 }, part, r) == -1);
    KN_CHECK(strstr(kn_error(), text) && strstr(kn_error(), "\"w\""));
    kn_clear_error();
}

KN_TEST(rectangles, parts_that_are_none_are_refused)
{
    refused(20, 5, 1, 5, "beyond its 24 elements");
    refused(-1, 5, 1, 5, "negative");
    refused(0, 2, 2, 7, "no rectangle");
    refused(5, 2, 3, 6, "no rectangle"); /* around the end of a row */
    refused(0, 3, 3, 2, "overlap");
    refused(0, INT64_MAX, INT64_MAX, INT64_MAX, "beyond");
}

static void uncovered(const kn_rectangle *r, int n, const char *text)
{
    const char *file[] = { "a", "b", "c" };
    KN_CHECK(!kn_rectangles_cover("w", 2, (int64_t[]){ 4, 6 }, r, file, n));
    KN_CHECK(strstr(kn_error(), text) && strstr(kn_error(), "\"w\""));
    kn_clear_error();
}

KN_TEST(rectangles, holes_and_overlaps_are_named)
{
    kn_rectangle top = { { 0, 0 }, { 2, 6 } }, left = { { 2, 0 }, { 2, 3 } },
                 right = { { 2, 3 }, { 2, 3 } }, over = { { 1, 3 }, { 3, 3 } };
    uncovered((kn_rectangle[]){ top, left }, 2, "no file holds its element [2, 3]");
    uncovered((kn_rectangle[]){ right, left }, 2, "no file holds its element [0, 0]");
    uncovered(NULL, 0, "no file holds its element [0, 0]");
    uncovered((kn_rectangle[]){ right, left, over }, 3,
              "element [2, 3] lies in two files, a and c");
    uncovered((kn_rectangle[]){ top, left, over }, 3, "element [1, 3] lies in two files, a and c");
    uncovered((kn_rectangle[]){ top, left, { { 3, 3 }, { 2, 3 } } }, 3,
              "beyond its shape in dim 0");
}
