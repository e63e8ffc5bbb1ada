/* fsdp/hooks.c: hooks that send fewer bytes for a reduction (stages.c). They convert what a stage
 * sends and leave the sum alone: sums are made in f32 and rounded once to the dtype of the result,
 * whatever was sent. */
#include "fsdp/bucket.h"
#include "kernels/graph_internal.h"

/* ---- rounding -------------------------------------------------------------------------------- */

/* The message of a stochastic stage: chunks of a bucket, in the buffers src and dst. */
typedef struct rounding {
    void *dst;
    const void *src;
    kn_dtype dtype; /* of src */
    const kn_bucket *bucket;
    int first, shards; /* which chunks of the bucket src has */
    uint64_t seed, stream;
} rounding;

/* The bits belong to an element of a parameter, wherever the layout has put it: a launch for each
 * part of each parameter. */
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
    bool ok = kn_fill_run(s, r->dst, KN_BF16, r->shards * l->shard, 0); /* padding */
    for (int i = 0; i < l->params && ok; i++) {
        uint64_t stream = kn_hash64(kn_hash_string(r->bucket->param[i].name), r->stream);
        for (int k = 0; k < r->shards && ok; k++)
            ok = round_part(r, s, i, k, stream);
    }
    return ok;
}

static bool stochastic(const kn_grad_reduction *r, void *dst, const void *src, int64_t count,
                       kn_dtype src_dtype, const kn_sending *how, int stage)
{
    const kn_bucket *b = r->_bucket;
    bool all = count == b->layout.shard * b->layout.shards;
    /* a sum of a shard group counts as of its first rank's micro-batch, wherever a part lies */
    uint64_t micro = how->stream - (all ? 0 : (uint64_t)b->shard);
    rounding a = { .dst = dst,
                   .src = src,
                   .dtype = src_dtype,
                   .bucket = b,
                   .first = all ? 0 : b->shard,
                   .shards = all ? b->layout.shards : 1,
                   .seed = how->seed,
                   .stream = kn_hash64(micro, (uint64_t)stage) };
    if (count != a.shards * b->layout.shard)
        return kn_fail("kn_hook_bf16_stochastic: a reduction of %lld elements isn't all of unit "
                       "'%s', whose chunks have %lld",
                       (long long)count, r->unit, (long long)b->layout.shard);
    return round_all(&a, r->stream);
}

static bool to_nearest(const kn_grad_reduction *r, void *dst, const void *src, int64_t count,
                       kn_dtype src_dtype, const kn_sending *how, int stage)
{
    (void)stage;
    return kn_copy_run(r->stream, dst, how->dtype, src, src_dtype, count);
}

/* ---- the hooks ------------------------------------------------------------------------------- */

static bool send_as(const kn_grad_reduction *r, kn_dtype dtype, const char *what)
{
    return kn_given(r, what, "the reduction") &&
           kn_reduce_in_stages(r, 1, &(kn_sending){ .dtype = dtype, .convert = to_nearest });
}

bool kn_hook_bf16(const kn_grad_reduction *r, void *arg)
{
    (void)arg;
    return send_as(r, KN_BF16, "kn_hook_bf16");
}

bool kn_hook_f16(const kn_grad_reduction *r, void *arg)
{
    (void)arg;
    return send_as(r, KN_F16, "kn_hook_f16");
}

/* The bits depend on (seed, step, micro-batch, stage, parameter, element): not on the rank, the
 * layout, or the units. */
bool kn_hook_bf16_stochastic(const kn_grad_reduction *r, void *arg)
{
    if (!kn_given(r, "kn_hook_bf16_stochastic", "the reduction"))
        return false;
    const kn_rng_key *key = &kn_context_get()->rng;
    if (kn_unrecordable(KN_DEVICE_DEFAULT, "kn_hook_bf16_stochastic: bits that belong to the step"))
        return false;
    uint64_t seed = kn_hash64(arg ? *(const uint64_t *)arg : key->seed, (uint64_t)key->step);
    kn_sending how = {
        .dtype = KN_BF16, .convert = stochastic, .seed = seed, .stream = (uint64_t)key->micro
    };
    return kn_reduce_in_stages(r, 1, &how);
}
