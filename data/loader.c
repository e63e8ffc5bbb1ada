/* data/loader.c: makes loaders and the batches that they hand out. */
#include "data/loader_internal.h"
#include "kernels/graph_internal.h"
#include "kernels/trace.h"

#include <string.h>

#define MOST_WORKERS 256
#define MOST_AHEAD   1024

/* ---- making ---------------------------------------------------------------------------------- */

static bool check_field(kn_loader *l, int f, const kn_field *field)
{
    size_t bytes = kn_dtype_size(field->dtype), total;
    if (bytes == 0 || field->ndim < 0 || field->ndim > KN_MAX_DIMS - 1)
        return kn_fail("%s: field %d has dtype %d and %d dims; at most %d dims are possible",
                       l->caller, f, (int)field->dtype, field->ndim, KN_MAX_DIMS - 1);
    for (int d = 0; d < field->ndim; d++)
        if (field->shape[d] < 0 || __builtin_mul_overflow(bytes, (size_t)field->shape[d], &bytes))
            return kn_fail("%s: field %d has size %lld in dim %d", l->caller, f,
                           (long long)field->shape[d], d);
    if (__builtin_mul_overflow(bytes, (size_t)l->batch, &total) || total > INT64_MAX / 2)
        return kn_fail("%s: %lld samples of field %d, of %zu bytes each, are more than any memory",
                       l->caller, (long long)l->batch, f, bytes);
    l->field[f] = *field;
    l->row_bytes[f] = bytes;
    return true;
}

static bool check_fields(kn_loader *l, const kn_field *field)
{
    while (l->fields < KN_MAX_FIELDS && field[l->fields].dtype != KN_DTYPE_DEFAULT)
        if (!check_field(l, l->fields, &field[l->fields]))
            return false;
        else
            l->fields++;
    for (int f = l->fields; f < KN_MAX_FIELDS; f++)
        if (field[f].dtype != KN_DTYPE_DEFAULT || field[f].ndim != 0)
            return f == l->fields ? kn_fail("%s: field %d has a shape, but no dtype", l->caller, f)
                                  : kn_fail("%s: field %d is given, but field %d has no dtype",
                                            l->caller, f, l->fields);
    return l->fields > 0 || kn_fail("%s: .field is empty; a sample has at least one", l->caller);
}

/* The numbers of batches and threads. */
static bool check_counts(const kn_loader *l, const kn_loader_common *o)
{
    int64_t step;
    if (o->batch < 1 && l->samples > 0)
        return kn_loader_batch_fails(l->caller, l->samples, o->batch);
    if (o->batch < 1)
        return kn_fail("%s: .batch must be at least 1, not %lld", l->caller, (long long)o->batch);
    if (o->accum < 0)
        return kn_fail("%s: .accum must be at least 1, not %lld", l->caller, (long long)o->accum);
    if (__builtin_mul_overflow(l->batch, l->ranks, &step) ||
        __builtin_mul_overflow(step, l->accum, &step) || step > INT64_MAX / 16)
        return kn_fail("%s: .batch %lld with .accum %lld is too large", l->caller,
                       (long long)o->batch, (long long)o->accum);
    if (o->workers < 0 || o->workers > MOST_WORKERS)
        return kn_fail("%s: .workers must lie between 0 and %d, not %d", l->caller, MOST_WORKERS,
                       o->workers);
    if (o->ahead < 0 || o->ahead > MOST_AHEAD)
        return kn_fail("%s: .ahead must lie between 1 and %d, not %d", l->caller, MOST_AHEAD,
                       o->ahead);
    if (o->ahead > 0 && o->workers == 0)
        return kn_fail("%s: .ahead is %d, but there are no .workers to fill batches ahead",
                       l->caller, o->ahead);
    return true;
}

static bool check_samples(const kn_loader *l)
{
    if ((unsigned)l->tail > KN_TAIL_SHORT)
        return kn_fail("%s: .tail %d is none of kn_tail", l->caller, (int)l->tail);
    if (l->samples < 0)
        return kn_fail("%s: .samples must be at least 1, or 0 for an unknown number, not %lld",
                       l->caller, (long long)l->samples);
    if (l->samples > 0)
        return kn_loader_check_samples(l);
    if (l->shuffle)
        return kn_fail("%s: .shuffle needs the number of .samples", l->caller);
    if (l->tail == KN_TAIL_DROP && l->accum > 1)
        return kn_fail("%s: KN_TAIL_DROP with .accum needs the number of .samples", l->caller);
    return true;
}

kn_loader *kn_loader_make(const char *caller, kn_fill_fn fill, void *arg,
                          void (*release)(void *arg), const kn_comm *world, int64_t samples,
                          const kn_field *field, const kn_loader_common *o)
{
    kn_loader *l = kn_ok() ? kn_host_calloc(1, sizeof *l) : NULL;
    if (!l) {
        if (release)
            release(arg);
        return NULL;
    }
    l->caller = caller;
    l->rank = kn_rank(world);
    l->ranks = kn_comm_size(world);
    l->batch = o->batch;
    l->accum = o->accum ? o->accum : 1;
    l->samples = samples;
    l->shuffle = o->shuffle;
    l->seed = o->seed;
    l->tail = o->tail;
    l->workers = o->workers;
    l->ahead = o->ahead ? o->ahead : 2;
    l->device = o->device ? o->device : KN_CPU;
    l->fill = fill;
    l->arg = arg;
    l->release = release;
    if (check_counts(l, o) && check_fields(l, field) && check_samples(l) &&
        kn_compute_stream(l->device))
        return l;
    kn_loader_free(l);
    return NULL;
}

kn_loader *kn_loader_new_(kn_fill_fn fill, void *arg, kn_comm *world, kn_loader_new_options o)
{
    if (!fill)
        return kn_fail_null("kn_loader_new: the function that fills samples is NULL");
    kn_loader *l = kn_loader_make("kn_loader_new", fill, arg, NULL, world, o.samples, o.field,
                                  KN_LOADER_COMMON(o));
    if (l)
        l->world = world;
    return l;
}

void kn_loader_free(kn_loader *l)
{
    if (!l)
        return;
    kn_loader_pool_free(l);
    if (l->release)
        l->release(l->arg);
    for (int f = 0; f < KN_MAX_FIELDS; f++)
        kn_tensor_free(l->source[f]);
    kn_host_free(l);
}

/* ---- the end of data of unknown length ------------------------------------------------------- */

/* The smallest index on any rank for which there was no sample, or -1; collective. */
static int64_t find_end(kn_loader *l, const kn_filled *filled)
{
    bool ended = filled->end_row != INT64_MAX;
    int64_t end = ended ? filled->end : -1, first = -1;
    if (l->ranks == 1)
        return end;
    if (kn_agree(l->world, !ended) || !kn_ok())
        return -1;
    for (int64_t r = 0; r < l->ranks; r++) {
        int64_t of_rank = (int64_t)kn_sum_over_ranks(l->world, r == l->rank ? (double)end : 0);
        if (of_rank >= 0 && (first < 0 || of_rank < first))
            first = of_rank;
    }
    return kn_ok() ? first : -1;
}

/* The number of samples is known from here on; the batches that were filled are of no use. */
static bool learn_samples(kn_loader *l, int64_t samples)
{
    kn_loader_pool_reset(l);
    if (samples > l->proven && samples == l->origin + l->round * l->ranks * l->batch)
        return kn_fail("%s: there is no sample %lld; the loader was sent behind the end of its "
                       "data",
                       l->caller, (long long)samples);
    l->samples = samples;
    if (kn_loader_check_samples(l))
        return true;
    l->samples = 0;
    return false;
}

/* ---- batches --------------------------------------------------------------------------------- */

/* The bytes of a slot as a tensor: on the CPU the bytes themselves. */
static kn_tensor *filled_tensor(const kn_loader *l, const kn_slot *slot, int f)
{
    int64_t shape[KN_MAX_DIMS] = { l->batch };
    int ndim = l->field[f].ndim + 1;
    kn_dtype dtype = l->field[f].dtype;
    memcpy(shape + 1, l->field[f].shape, (size_t)l->field[f].ndim * sizeof *shape);
    if (l->device == KN_CPU)
        return kn_tensor_on(slot->storage[f], 0, dtype, ndim, shape, NULL, true);
    kn_tensor *t = kn_empty(dtype, l->device, ndim, shape);
    if (!t || !slot->storage[f] || kn_numel(t) == 0)
        return t;
    return kn_transfer(kn_compute_stream(l->device), kn_array_of(t).data, slot->data[f],
                       (size_t)l->batch * l->row_bytes[f], KN_TO_DEVICE, true)
               ? t
               : NULL;
}

static bool make_batch(kn_loader *l, const kn_slot *slot, kn_batch *b)
{
    bool copied = slot->rows > 0;
    bool from_source = l->source[0] && !copied && kn_device_of(l->source[0]) == l->device;
    b->samples = kn_loader_counting(l, slot->round);
    b->epoch = kn_loader_row(l, slot->round, 0).epoch;
    int64_t rows = l->tail == KN_TAIL_SHORT && b->samples > 0 ? b->samples : l->batch;
    if (l->tail == KN_TAIL_SHORT && b->samples == 0)
        rows = 1;
    for (int f = 0; f < l->fields; f++) {
        kn_tensor *t =
            from_source ? kn_loader_rows(l, slot->round, f, &copied) : filled_tensor(l, slot, f);
        b->field[f] = t && rows < t->shape[0] ? kn_loader_rows_of(t, 0, rows) : t;
        if (!b->field[f])
            return false;
    }
    b->x = b->field[0];
    b->y = b->field[1];
    l->stats.batches++;
    l->stats.copied += copied;
    l->stats.replaced += slot->filled.replaced;
    return true;
}

/* An error of the thread that filled, which has named the place in the program already. */
static bool report(const kn_filled *filled)
{
    const char *file;
    int line;
    kn_place_get(&file, &line);
    kn_place_set(NULL, 0);
    kn_fail("%s", filled->error);
    kn_place_set(file, line);
    return false;
}

/* The filled slot of the loader's round. */
static bool take(kn_loader *l, kn_slot *slot)
{
    for (;;) {
        double begin = kn_now();
        bool ok = kn_loader_pool_take(l, slot);
        l->stats.waited_s += kn_now() - begin;
        if (!ok)
            return false;
        const kn_filled *filled = &slot->filled;
        if (filled->bad_row < filled->end_row) {
            report(filled);
            break;
        }
        int64_t end = l->samples == 0 ? find_end(l, filled) : -1;
        if (end < 0 && kn_ok())
            return true;
        if (!kn_ok() || !learn_samples(l, end))
            break;
        kn_slot_drop(slot);
    }
    kn_slot_drop(slot);
    kn_loader_pool_reset(l);
    return false;
}

kn_batch kn_next(kn_loader *l)
{
    kn_batch b = { 0 };
    kn_slot slot = { 0 };
    if (!kn_given(l, "kn_next", "the loader") || !kn_ok() ||
        kn_unrecordable(l->device, "kn_next, whose batch a replay would repeat"))
        return b;
    if (l->round > kn_loader_last_round(l)) {
        kn_fail("%s: there is no round %lld; %lld is the last one", l->caller, (long long)l->round,
                (long long)kn_loader_last_round(l));
        return b;
    }
    if (l->begin == 0)
        l->begin = kn_now();
    if (!take(l, &slot))
        return b;
    bool ok = make_batch(l, &slot, &b);
    kn_slot_drop(&slot);
    if (!ok) {
        kn_loader_pool_reset(l);
        return (kn_batch){ 0 };
    }
    l->round++;
    int64_t places = l->round * l->ranks * l->batch;
    l->proven = places > l->proven ? places : l->proven;
    return b;
}

kn_loader_stats kn_loader_read_stats(const kn_loader *l)
{
    if (!kn_given(l, "kn_loader_read_stats", "the loader"))
        return (kn_loader_stats){ 0 };
    kn_loader_stats s = l->stats;
    double time = l->begin > 0 ? kn_now() - l->begin : 0;
    s.waiting = time > 0 ? s.waited_s / time : 0;
    return s;
}
