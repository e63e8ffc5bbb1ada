/* kernels/cpu/reference_sort.c: the order of elements along a dim, and their running sums. */
#include "kernels/cpu/reference.h"
#include "kernels/join.h"
#include <math.h>
#include <string.h>

/* ---- sorting --------------------------------------------------------------------------------- */

typedef struct item {
    uint64_t key; /* in the order of values */
    int64_t at;
} item;

static bool before(const item *a, const item *b)
{
    return a->key < b->key || (a->key == b->key && a->at < b->at);
}

/* The bits of a double are in its own order, backwards for negative ones. */
static uint64_t key_of(const kn_array *a, int64_t offset, bool descending)
{
    uint64_t key;
    if (kn_dtype_is_int(a->dtype)) {
        key = (uint64_t)kn_ref_get_int(a, offset) ^ (1ULL << 63);
    } else {
        const double x = kn_ref_get(a, offset);
        memcpy(&key, &x, sizeof key);
        key = key >> 63 ? ~key : key | 1ULL << 63;
        key = isnan(x) ? UINT64_MAX : x == 0 ? 1ULL << 63 : key;
    }
    return descending ? ~key : key;
}

/* n items in order, by merging runs of 1, 2, 4, ...; the result is x or room. */
static item *merge_sort(item *x, item *room, int64_t n)
{
    for (int64_t run = 1; run < n; run *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * run) {
            const int64_t middle = begin + run < n ? begin + run : n;
            const int64_t end = middle + run < n ? middle + run : n;
            int64_t i = begin, j = middle;
            for (int64_t to = begin; to < end; to++)
                room[to] = j == end || (i < middle && !before(&x[j], &x[i])) ? x[i++] : x[j++];
        }
        item *other = x;
        x = room;
        room = other;
    }
    return x;
}

/* x goes to place i of a heap of k, or below: the last one in order lies on top, in heap[0]. */
static void sift(item *heap, int64_t k, int64_t i, item x)
{
    for (int64_t child = 2 * i + 1; child < k; child = 2 * i + 1) {
        child += child + 1 < k && before(&heap[child], &heap[child + 1]);
        if (!before(&x, &heap[child]))
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = x;
}

/* The first k in order of n items come to stand in x[0..k-1], in any order. */
static void select_first(item *x, int64_t n, int64_t k)
{
    for (int64_t i = k / 2; i-- > 0;)
        sift(x, k, i, x[i]);
    for (int64_t i = k; i < n && k > 0; i++)
        if (before(&x[i], &x[0]))
            sift(x, k, 0, x[i]);
}

/* The line of src at offset from, into those of values and indices. */
static void sort_line(const kn_sort_args *a, int64_t value, int64_t index, int64_t from, item *x)
{
    const int64_t n = a->src.shape[a->dim], k = a->values.shape[a->dim];
    const int64_t size = (int64_t)kn_dtype_size(a->src.dtype), step = a->src.stride[a->dim];
    item *room = x + n;
    for (int64_t i = 0; i < n; i++)
        x[i] = (item){ key_of(&a->src, from + i * step, a->descending), i };
    if (k < n)
        select_first(x, n, k);
    x = merge_sort(x, room, k);
    for (int64_t j = 0; j < k; j++) {
        memcpy((char *)a->values.data + (value + j * a->values.stride[a->dim]) * size,
               (const char *)a->src.data + (from + x[j].at * step) * size, (size_t)size);
        ((int64_t *)a->indices.data)[index + j * a->indices.stride[a->dim]] = x[j].at;
    }
}

kn_status kn_ref_sort(const void *args)
{
    const kn_sort_args *a = args;
    const int64_t n = a->src.shape[a->dim];
    item *items = kn_host_alloc((size_t)(n > 0 ? n : 1) * 2 * sizeof *items);
    if (!items)
        return KN_FAILED;
    kn_array v = kn_without_dim(&a->values, a->dim), p = kn_without_dim(&a->indices, a->dim),
             x = kn_without_dim(&a->src, a->dim);
    kn_ref_walk w = kn_ref_walk_over(&x, &v, &p, NULL);
    for (; w.more; kn_ref_walk_next(&w))
        sort_line(a, w.off[1], w.off[2], w.off[0], items);
    kn_host_free(items);
    return KN_DONE;
}

kn_status kn_ref_cumsum(const void *args)
{
    const kn_cumsum_args *a = args;
    const int64_t n = a->x.shape[a->dim];
    kn_array lines_y = kn_without_dim(&a->y, a->dim), lines_x = kn_without_dim(&a->x, a->dim);
    kn_ref_walk w = kn_ref_walk_over(&lines_x, &lines_y, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        double joined = kn_join_neutral(a->by);
        int64_t whole = kn_join_neutral_int(a->by);
        for (int64_t j = 0; j < n; j++) {
            const int64_t i = a->reverse ? n - 1 - j : j;
            const int64_t from = w.off[0] + i * a->x.stride[a->dim];
            const int64_t to = w.off[1] + i * a->y.stride[a->dim];
            if (kn_dtype_is_int(a->x.dtype)) {
                whole = kn_joined_int(a->by, whole, kn_ref_get_int(&a->x, from));
                kn_ref_set_int(&a->y, to, whole);
            } else {
                joined = kn_joined(a->by, joined, kn_ref_get(&a->x, from));
                kn_ref_set_computed(&a->y, to, joined);
            }
        }
    }
    return KN_DONE;
}
