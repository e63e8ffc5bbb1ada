/* fsdp/matrices.c: a step that needs whole matrices (kn_param_source.matrices). Each rank has a
 * part of each matrix, cut by any layout; one rank, its owner, gets the whole, changes it, and the
 * parts go back.
 *
 * Matrices are taken by windows. In a window the parts lie in chunks, one a shard, of equal length:
 *
 *     stage  | m0 m1 m3 | m1 m2 m3 | m3 ....  |      parts of matrices by shard, padded
 *
 * An all-gather fills the stage on every rank. Each rank changes the matrices that it owns, where
 * they lie, and writes zeros over the others; then the sum over ranks has each value once. Owners
 * are all ranks, those of other replicas too: the matrix with the most work goes to the rank with
 * the least so far. */
#include "fsdp/matrices.h"
#include "fsdp/schedule.h"

static const char label[] = "matrices of a step";

typedef struct window {
    const kn_matrix_step *s;
    const int *item; /* [count]: numbers of parameters in s */
    int count;
    kn_bucket *first;  /* of item[0]; the others' have the same ranks, and lie on the same device */
    int64_t *at;       /* [count * shards]: place of a part in its chunk */
    int *owner;        /* [count]: a rank, counted replica by replica */
    const bool *casts; /* [s->count]: the master's copy in param_dtype is written too */
    int64_t chunk;     /* elements */
    kn_tensor *stage;  /* [shards * chunk] */
} window;

static kn_bucket *bucket_at(const kn_matrix_step *s, int i)
{
    return kn_bucket_of(s->param[i]);
}

static kn_interval part_of(const window *w, int k, int shard)
{
    const kn_param *p = w->s->param[w->item[k]];
    return kn_layout_part(&kn_bucket_of(p)->layout, p->index, shard);
}

static kn_device device_of(const window *w)
{
    return w->first->memory->device;
}

/* ---- where things lie ------------------------------------------------------------------------ */

/* The chunk's length where the window has count items. */
static int64_t chunk_of(const window *w, int count, int64_t *at)
{
    int64_t longest = 0;
    for (int shard = 0; shard < w->first->shards; shard++) {
        int64_t end = 0;
        for (int k = 0; k < count; k++) {
            if (at)
                at[k * w->first->shards + shard] = end;
            end += kn_interval_numel(part_of(w, k, shard));
        }
        longest = end > longest ? end : longest;
    }
    return longest;
}

/* The k-th item's part of a shard, 1-d, in a tensor of chunks. */
static kn_tensor *part_in(const window *w, kn_tensor *chunks, int k, int shard, int chunk)
{
    int64_t n = kn_interval_numel(part_of(w, k, shard)), one = 1;
    return kn_tensor_alias(chunks, chunk * w->chunk + w->at[k * w->first->shards + shard], 1, &n,
                           &one);
}

/* How much of the item the rank holds: of ranks with as little to do, the one with the most gets
 * it. */
static int64_t held_by(const window *w, int k, int rank)
{
    return kn_interval_numel(part_of(w, k, rank % w->first->shards));
}

static int least_busy(const window *w, int k, const double *load, int ranks)
{
    int best = 0;
    for (int r = 1; r < ranks; r++)
        if (load[r] < load[best] ||
            (load[r] == load[best] && held_by(w, k, r) > held_by(w, k, best)))
            best = r;
    return best;
}

/* The most work first. */
static bool choose_owners(window *w)
{
    int ranks = w->first->shards * w->first->replicas;
    double *load = kn_host_calloc((size_t)ranks, sizeof *load);
    for (int k = 0; load && k < w->count; k++)
        w->owner[k] = -1;
    for (int left = load ? w->count : 0; left > 0; left--) {
        int most = -1;
        for (int k = 0; k < w->count; k++)
            if (w->owner[k] < 0 && (most < 0 || w->s->cost[w->item[k]] > w->s->cost[w->item[most]]))
                most = k;
        w->owner[most] = least_busy(w, most, load, ranks);
        load[w->owner[most]] += w->s->cost[w->item[most]];
    }
    kn_host_free(load);
    return load != NULL;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static kn_tensor *chunks_new(const window *w, int chunks)
{
    const kn_bucket *b = w->first;
    int64_t n = chunks * w->chunk;
    kn_memory *memory = b->memory->device == b->device ? kn_bucket_comm_memory(b)
                                                       : kn_device_memory(b->memory->device);
    return kn_tensor_new(w->s->dtype, device_of(w), memory, KN_MEM_GATHERED, 1, &n, NULL, true);
}

static bool clear(kn_tensor *t, int64_t from, int64_t count)
{
    int64_t one = 1;
    return count == 0 || kn_fill_(kn_tensor_alias(t, from, 1, &count, &one), 0);
}

/* Copies of a part between its chunk and the whole matrix. */
static bool move_part(const window *w, int k, int shard, kn_tensor *matrix, bool out)
{
    kn_interval i = part_of(w, k, shard);
    int64_t shape[2] = { i.blocks, i.count }, packed[2] = { i.count, 1 };
    int64_t apart[2] = { i.stride, 1 };
    int64_t at = shard * w->chunk + w->at[k * w->first->shards + shard];
    if (i.blocks == 0 || i.count == 0)
        return true;
    kn_tensor *here = kn_tensor_alias(w->stage, at, 2, shape, packed);
    kn_tensor *there = kn_tensor_alias(matrix, i.start, 2, shape, apart);
    return here && there && (out ? kn_copy_(there, here) : kn_copy_(here, there));
}

static bool change(const window *w, int k)
{
    int shards = w->first->shards;
    int64_t n = w->s->param[w->item[k]]->numel;
    for (int shard = 0; shard < shards; shard++) { /* in place where one shard has all of it */
        kn_interval i = part_of(w, k, shard);
        if (i.blocks == 1 && i.count == n)
            return w->s->whole(w->s->arg, w->item[k], part_in(w, w->stage, k, shard, shard));
    }
    kn_tensor *matrix =
        kn_tensor_new(w->s->dtype, device_of(w), NULL, KN_MEM_GATHERED, 1, &n, NULL, true);
    bool ok = matrix != NULL;
    for (int shard = 0; ok && shard < shards; shard++)
        ok = move_part(w, k, shard, matrix, true);
    ok = ok && (n == 0 || w->s->whole(w->s->arg, w->item[k], matrix));
    for (int shard = 0; ok && shard < shards; shard++)
        ok = move_part(w, k, shard, matrix, false);
    return ok;
}

static bool settle(const window *w, int k)
{
    const kn_ranks *r = w->first->ranks;
    bool ok = true;
    kn_scope scope = kn_scope_begin();
    if (w->owner[k] == r->replica * r->shards + r->shard)
        ok = change(w, k);
    else
        for (int shard = 0; ok && shard < w->first->shards; shard++)
            ok = clear(part_in(w, w->stage, k, shard, shard), 0,
                       kn_interval_numel(part_of(w, k, shard)));
    kn_scope_end(scope);
    return ok;
}

/* ---- a window -------------------------------------------------------------------------------- */

static void *data_at(kn_tensor *t, int64_t element)
{
    kn_array a = kn_array_of(t);
    return a.data ? (char *)a.data + (size_t)element * kn_dtype_size(t->dtype) : NULL;
}

/* This rank's parts go to the stage of every rank. */
static bool spread(const window *w)
{
    const kn_ranks *r = w->first->ranks;
    int64_t mine = r->shard * w->chunk, end = 0;
    bool ok = true;
    kn_scope scope = kn_scope_begin();
    for (int k = 0; ok && k < w->count; k++) {
        ok = kn_bucket_sync_transfers(bucket_at(w->s, w->item[k])) &&
             w->s->begin(w->s->arg, w->item[k], part_in(w, w->stage, k, r->shard, r->shard));
        end += kn_interval_numel(part_of(w, k, r->shard));
    }
    ok = ok && clear(w->stage, mine + end, w->chunk - end);
    kn_scope_end(scope);
    return ok && (!r->reduce ||
                  kn_all_gather(r->reduce, data_at(w->stage, 0), data_at(w->stage, mine), w->chunk,
                                w->s->dtype, kn_compute_stream(device_of(w)), label));
}

/* This rank's chunk of the sum over all; NULL with an error. */
static kn_tensor *collect(const window *w)
{
    const kn_ranks *r = w->first->ranks;
    kn_dtype t = w->s->dtype;
    kn_stream *stream = kn_compute_stream(device_of(w));
    kn_tensor *chunk = r->reduce ? chunks_new(w, 1) : w->stage;
    bool ok = chunk && (!r->reduce ||
                        kn_reduce_scatter(r->reduce, data_at(chunk, 0), NULL, data_at(w->stage, 0),
                                          w->chunk, t, t, stream, label));
    ok = ok && (!r->replicate || kn_all_reduce(r->replicate, data_at(chunk, 0), NULL,
                                               data_at(chunk, 0), w->chunk, t, t, stream, label));
    return ok ? chunk : NULL;
}

static bool run_window(window *w)
{
    const kn_ranks *r = w->first->ranks;
    w->chunk = chunk_of(w, w->count, w->at);
    w->stage = chunks_new(w, w->first->shards);
    bool ok = w->stage && choose_owners(w) && spread(w);
    for (int k = 0; ok && k < w->count; k++)
        ok = settle(w, k);
    kn_tensor *chunk = ok ? collect(w) : NULL;
    kn_scope scope = kn_scope_begin();
    for (int k = 0; chunk && ok && k < w->count; k++) {
        int i = w->item[k];
        ok = w->s->end(w->s->arg, i, part_in(w, chunk, k, r->shard, 0)) &&
             (!w->casts[i] || kn_bucket_cast_part(bucket_at(w->s, i), w->s->param[i]));
    }
    kn_scope_end(scope);
    return chunk && ok;
}

/* ---- all ------------------------------------------------------------------------------------- */

static bool go_together(const kn_bucket *a, const kn_bucket *b)
{
    return a->ranks == b->ranks && a->memory->device == b->memory->device;
}

/* Takes items from the first on that fit the window; returns their number, at least 1. */
static int items_of(window *w, int left)
{
    int64_t bytes = (int64_t)kn_dtype_size(w->s->dtype) * w->first->shards, count = 1;
    while (count < left && go_together(w->first, bucket_at(w->s, w->item[count])) &&
           chunk_of(w, (int)count + 1, NULL) * bytes <= w->s->window)
        count++;
    return (int)count;
}

bool kn_step_matrices(const kn_matrix_step *s)
{
    int *item = kn_host_alloc((size_t)s->count * sizeof *item), n = 0, most = 1;
    bool *casts = kn_host_calloc((size_t)s->count, sizeof *casts);
    bool ok = item && casts;
    for (int i = 0; ok && i < s->count; i++) {
        const kn_bucket *b = bucket_at(s, i);
        if (!b)
            continue;
        ok = kn_schedule_of(b->unit) != NULL; /* a tree that has changed since its last forward */
        item[n++] = i;
        most = b->shards > most ? b->shards : most;
        casts[i] = kn_bucket_casts(b);
    }
    window w = { .s = s, .casts = casts };
    w.at = kn_host_alloc(((size_t)n * (size_t)most + 1) * sizeof *w.at);
    w.owner = kn_host_alloc(((size_t)n + 1) * sizeof *w.owner);
    ok = ok && w.at && w.owner;
    for (int done = 0; ok && done < n; done += w.count) {
        kn_scope scope = kn_scope_begin();
        w.item = item + done;
        w.first = bucket_at(s, item[done]);
        w.count = items_of(&w, n - done);
        ok = run_window(&w);
        kn_scope_end(scope);
    }
    kn_host_free(item);
    kn_host_free(casts);
    kn_host_free(w.at);
    kn_host_free(w.owner);
    return ok && kn_ok();
}
