/* fsdp/bucket.c: a bucket's bytes: between its shards and whole parameters, how many they are, and
 * their end. gather.c and reduce.c move them over the ranks. */
#include "fsdp/bucket.h"

kn_location kn_turn_to(kn_tensor *t, kn_location to)
{
    kn_location was = { t->storage, t->offset, t->dtype };
    t->storage = to.storage;
    t->offset = to.offset;
    t->dtype = to.dtype;
    return was;
}

void kn_turn_back(kn_tensor *t, kn_location was)
{
    if (was.storage)
        kn_storage_unref(kn_turn_to(t, was).storage);
}

/* ---- between the shards and whole parameters ------------------------------------------------- */

bool kn_bucket_move_chunk(const kn_bucket *b, kn_stream *s, int shard, void *chunk, void *full,
                          kn_dtype t, bool out)
{
    const kn_layout *l = &b->layout;
    size_t size = kn_dtype_size(t);
    for (int i = 0; i < l->params; i++) {
        kn_interval p = kn_layout_part(l, i, shard);
        if (p.blocks == 0 || p.count == 0)
            continue;
        int64_t shape[2] = { p.blocks, p.count };
        kn_array part = kn_array_make((char *)chunk + (size_t)p.at * size, t, 2, shape);
        kn_array whole =
            kn_array_make((char *)full + (size_t)(l->offset[i] + p.start) * size, t, 2, shape);
        whole.stride[0] = p.stride;
        kn_copy_args args = { out ? whole : part, out ? part : whole };
        if (!KN_LAUNCH(s, KN_K_COPY, args))
            return false;
    }
    return true;
}

bool kn_bucket_rearrange(const kn_bucket *b, kn_stream *s, void *stage, void *full, kn_dtype t,
                         bool out)
{
    size_t bytes = (size_t)b->layout.shard * kn_dtype_size(t);
    bool ok = true;
    for (int r = 0; ok && r < b->layout.shards; r++)
        ok = kn_bucket_move_chunk(b, s, r, (char *)stage + (size_t)r * bytes, full, t, out);
    return ok;
}

/* ---- the rest -------------------------------------------------------------------------------- */

/* A parameter frozen since its forward gets the gradient that this forward recorded. */
bool kn_bucket_param_trains(const kn_bucket_param *p)
{
    return p->tensor->requires_grad || p->wanted;
}

bool kn_bucket_trains(const kn_bucket *b)
{
    bool any = false;
    for (int i = 0; i < b->params; i++)
        any |= kn_bucket_param_trains(&b->param[i]);
    return any;
}

int64_t kn_bucket_bytes(int64_t numel, kn_dtype t)
{
    return KN_ALIGNED(numel * (int64_t)kn_dtype_size(t));
}

void kn_bucket_free(kn_bucket *b)
{
    if (!b)
        return;
    for (int i = 0; b->param && i < b->params; i++)
        kn_bucket_free_param(&b->param[i]);
    kn_reduction_free_scratch(b);
    if (b->full != b->master)
        kn_storage_unref(b->full);
    kn_storage *rest[] = { b->master,           b->gather_stage,       b->slice,   b->grad,
                           b->unsynced,         b->reduce_stage,       b->partial, b->grad_shard,
                           b->away.cast_master, b->away.grad_transfer, b->flags };
    for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++)
        kn_storage_unref(rest[i]);
    kn_event_destroy(b->gathered);
    kn_event_destroy(b->computed);
    kn_event_destroy(b->reduced);
    kn_event_destroy(b->away.uploaded);
    kn_event_destroy(b->away.downloaded);
    kn_layout_free(&b->layout);
    if (b->memory && b->stored)
        kn_store_close(b->memory);
    kn_host_free(b->param);
    kn_host_free(b);
}
