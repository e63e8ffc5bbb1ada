/* fsdp/layout.c: the flat layout as a map of intervals. */
#include "fsdp/layout.h"

static int64_t align_up(int64_t n)
{
    return (n + KN_LAYOUT_ALIGN - 1) / KN_LAYOUT_ALIGN * KN_LAYOUT_ALIGN;
}

bool kn_layout_flat(kn_layout *l, const int64_t *numel, int params, int shards)
{
    *l = (kn_layout){ .params = params, .shards = shards };
    l->numel = kn_calloc((size_t)params + 1, sizeof *l->numel);
    l->offset = kn_calloc((size_t)params + 1, sizeof *l->offset);
    if (!l->numel || !l->offset) {
        kn_layout_free(l);
        return false;
    }
    int64_t at = 0;
    for (int i = 0; i < params; i++) {
        l->numel[i] = numel[i];
        l->offset[i] = at;
        at += align_up(numel[i]);
    }
    l->shard = align_up((at + shards - 1) / shards);
    l->total = l->shard * shards;
    return true;
}

void kn_layout_free(kn_layout *l)
{
    kn_free_host(l->numel);
    kn_free_host(l->offset);
    l->numel = l->offset = NULL;
}

kn_interval kn_layout_part(const kn_layout *l, int param, int shard)
{
    int64_t begin = l->offset[param], end = begin + l->numel[param];
    int64_t lo = shard * l->shard, hi = lo + l->shard;
    int64_t from = begin > lo ? begin : lo, to = end < hi ? end : hi;
    if (from >= to) /* an empty part still has a valid place */
        return (kn_interval){ .start = from >= end ? l->numel[param] : 0, .count = 0, .at = 0 };
    return (kn_interval){ .start = from - begin, .count = to - from, .at = from - lo };
}
