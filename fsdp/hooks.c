/* fsdp/hooks.c: reducing a unit's gradients, and ways to send fewer bytes for it.
 *
 * A reduction has two stages, of which either may be missing:
 *   shards    reduce-scatter: each rank of a shard group gets the sum of one chunk
 *   replicas  all-reduce of that chunk over the ranks that hold the same one
 * Between them, where there are both, lies r->partial. With neither (one rank) the sum is src alone.
 * Every stage adds in rank order, starting from what was accumulated before.
 *
 * The compressing hooks convert what a stage sends and leave the sum alone: sums are made in f32 and
 * rounded once to the dtype of the result, whatever was sent. */
#include "fsdp/unit.h"
#include "kernels/philox.h"
#include <string.h>

/* ---- scratch ---------------------------------------------------------------------------------- */

static kn_memory *scratch_memory(const kn_bucket *b)
{
    const kn_unit *u = b->unit;
    return u->size > 1 ? kn_comm_memory_on(u->comm, u->options.device)
                       : kn_device_memory(u->options.device);
}

void *kn_reduction_scratch(const kn_grad_reduction *r, size_t bytes)
{
    if (!kn_given(r, "kn_reduction_scratch", "the reduction"))
        return NULL;
    kn_bucket *b = r->_bucket;
    size_t n = (size_t)b->scratches + 1;
    void **list = kn_host_realloc(b->scratch, n * sizeof *list);
    if (!list)
        return NULL;
    b->scratch = list;
    size_t *sizes = kn_host_realloc(b->scratch_bytes, n * sizeof *sizes);
    if (!sizes)
        return NULL;
    b->scratch_bytes = sizes;
    void *p = kn_take(scratch_memory(b), bytes, KN_MEM_COMM);
    if (!p)
        return NULL;
    list[b->scratches] = p;
    sizes[b->scratches++] = bytes;
    return p;
}

void kn_reduction_free_scratch(kn_bucket *b)
{
    for (int i = 0; i < b->scratches; i++)
        kn_give(scratch_memory(b), b->scratch[i], b->scratch_bytes[i], KN_MEM_COMM);
    kn_host_free(b->scratch);
    kn_host_free(b->scratch_bytes);
    b->scratch = NULL;
    b->scratch_bytes = NULL;
    b->scratches = 0;
}

/* ---- what is sent ----------------------------------------------------------------------------- */

/* How a stage sends its source: as it is (dtype 0), or converted, stochastically where key is set. */
typedef struct sending {
    kn_dtype dtype;
    bool stochastic;
    uint64_t seed, stream;
} sending;

/* What a stochastic stage sends: chunks of a bucket, in the buffers src and dst. */
typedef struct rounding {
    void *dst;
    const void *src;
    kn_dtype dtype; /* of src */
    const kn_bucket *bucket;
    int first, shards; /* which chunks of the bucket src has */
    uint64_t seed, stream;
} rounding;

/* The bits belong to an element of a parameter, wherever the layout has put it: a launch for each part of each
 * parameter. */
static bool round_part(const rounding *r, kn_stream *s, int param, int shard, uint64_t stream)
{
    const kn_layout *l = &r->bucket->layout;
    kn_interval p = kn_layout_part(l, param, r->first + shard);
    int64_t shape[2] = { p.blocks, p.count }, at = shard * l->shard + p.at;
    kn_round_args a = { .dst = kn_array_make((char *)r->dst + (size_t)at * kn_dtype_size(KN_BF16),
                                             KN_BF16, 2, shape),
                        .src = kn_array_make((char *)(uintptr_t)r->src +
                                                 (size_t)at * kn_dtype_size(r->dtype),
                                             r->dtype, 2, shape),
                        .seed = r->seed,
                        .stream = stream,
                        .start = p.start,
                        .step = p.stride };
    return p.blocks == 0 || p.count == 0 || KN_LAUNCH(s, KN_K_ROUND, a);
}

static bool round_all(const rounding *r, kn_stream *s)
{
    const kn_layout *l = &r->bucket->layout;
    int64_t all = r->shards * l->shard;
    kn_fill_args blank = { kn_array_make(r->dst, KN_BF16, 1, &all), 0, 0 }; /* padding */
    bool ok = KN_LAUNCH(s, KN_K_FILL, blank);
    for (int i = 0; i < l->params && ok; i++) {
        uint64_t stream = kn_hash64(kn_hash_string(r->bucket->param[i].name), r->stream);
        for (int k = 0; k < r->shards && ok; k++)
            ok = round_part(r, s, i, k, stream);
    }
    return ok;
}

static bool convert(const kn_grad_reduction *r, void *dst, const void *src, int64_t count,
                    kn_dtype src_dtype, const sending *how, int stage)
{
    if (how->stochastic) {
        const kn_bucket *b = r->_bucket;
        bool all = count == b->layout.shard * b->layout.shards;
        rounding a = { .dst = dst,
                       .src = src,
                       .dtype = src_dtype,
                       .bucket = b,
                       .first = all ? 0 : b->shard,
                       .shards = all ? b->layout.shards : 1,
                       .seed = how->seed,
                       .stream = kn_hash64(how->stream, (uint64_t)stage) };
        if (count != a.shards * b->layout.shard)
            return kn_fail(
                "kn_hook_bf16_stochastic: a reduction of %lld elements isn't all of unit "
                "'%s', whose chunks have %lld",
                (long long)count, r->unit, (long long)b->layout.shard);
        return round_all(&a, r->stream);
    }
    kn_copy_args a = { kn_array_make(dst, how->dtype, 1, &count),
                       kn_array_make((void *)(uintptr_t)src, src_dtype, 1, &count) };
    return KN_LAUNCH(r->stream, KN_K_COPY, a);
}

/* *src and *dtype become what stage sends. */
static bool prepare(const kn_grad_reduction *r, const void **src, kn_dtype *dtype, int64_t count,
                    const sending *how, int stage)
{
    if (!how->dtype || *dtype == how->dtype || count == 0)
        return true;
    void *room = kn_reduction_scratch(r, (size_t)count * kn_dtype_size(how->dtype));
    if (!room || !convert(r, room, *src, count, *dtype, how, stage))
        return false;
    *src = room;
    *dtype = how->dtype;
    return true;
}

/* ---- the two stages --------------------------------------------------------------------------- */

static bool add_alone(const kn_grad_reduction *r, void *dst, const void *acc, const void *src,
                      kn_dtype src_dtype)
{
    kn_sum_n_args a = { .dst = dst,
                        .acc = acc,
                        .src = { src },
                        .n = 1,
                        .count = r->count,
                        .dst_dtype = r->dst_dtype,
                        .src_dtype = src_dtype };
    return r->count == 0 || KN_LAUNCH(r->stream, KN_K_SUM_N, a);
}

static bool reduce(const kn_grad_reduction *r, sending how)
{
    const void *src = r->src;
    kn_dtype dtype = r->src_dtype;
    int64_t count = r->count;
    void *partial = r->partial;
    int stage = 1;
    if (r->shards && r->replicas && !partial) {
        partial = kn_reduction_scratch(r, (size_t)count * kn_dtype_size(r->dst_dtype));
        if (!partial)
            return false;
    }
    if (r->shards || partial || !r->replicas) { /* the first stage */
        int64_t all = r->shards ? count * kn_comm_size(r->shards) : count;
        void *to = partial ? partial : r->dst;
        const void *acc = partial ? r->partial_acc : r->acc;
        if (!prepare(r, &src, &dtype, all, &how, stage++))
            return false;
        bool ok = r->shards ? kn_reduce_scatter(r->shards, to, acc, src, count, r->dst_dtype, dtype,
                                                r->stream, r->unit)
                            : add_alone(r, to, acc, src, dtype);
        if (!ok || !r->replicas)
            return ok;
        src = partial;
        dtype = r->dst_dtype;
    }
    return prepare(r, &src, &dtype, count, &how, stage) &&
           kn_all_reduce(r->replicas, r->dst, r->acc, src, count, r->dst_dtype, dtype, r->stream,
                         r->unit);
}

bool kn_reduce_default(const kn_grad_reduction *r, void *arg)
{
    if (!kn_given(r, "kn_reduce_default", "the reduction"))
        return false;
    (void)arg;
    return reduce(r, (sending){ 0 });
}

bool kn_hook_bf16(const kn_grad_reduction *r, void *arg)
{
    if (!kn_given(r, "kn_hook_bf16", "the reduction"))
        return false;
    (void)arg;
    return reduce(r, (sending){ .dtype = KN_BF16 });
}

bool kn_hook_f16(const kn_grad_reduction *r, void *arg)
{
    if (!kn_given(r, "kn_hook_f16", "the reduction"))
        return false;
    (void)arg;
    return reduce(r, (sending){ .dtype = KN_F16 });
}

/* The bits depend on (seed, step, micro-batch, stage, parameter, element): not on the rank, the layout, or
 * the units. */
bool kn_hook_bf16_stochastic(const kn_grad_reduction *r, void *arg)
{
    if (!kn_given(r, "kn_hook_bf16_stochastic", "the reduction"))
        return false;
    const kn_rng_key *key = &kn_context_get()->rng;
    if (kn_unrecordable(KN_DEVICE_DEFAULT, "kn_hook_bf16_stochastic: bits that belong to the step"))
        return false;
    uint64_t seed = kn_hash64(arg ? *(const uint64_t *)arg : key->seed, (uint64_t)key->step);
    return reduce(r, (sending){ .dtype = KN_BF16,
                                .stochastic = true,
                                .seed = seed,
                                .stream = (uint64_t)key->micro });
}
