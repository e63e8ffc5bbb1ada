/* state/local.c: units as they lie in memory: the flat part of each bucket, with its padding
 * (FSDP1's local state dict). Also hashes of how tensors are cut. */
#include "kernels/error_internal.h"
#include "kernels/kernels.h"
#include "kernels/memory_internal.h"
#include "state/dict_internal.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- hashes ---------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t h, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return h;
}

static uint64_t mix_number(uint64_t h, int64_t n)
{
    return mix(h, &n, sizeof n);
}

static uint64_t mix_part(uint64_t h, kn_interval part)
{
    h = mix_number(mix_number(h, part.start), part.count);
    return mix_number(mix_number(h, part.blocks), part.stride);
}

#define FIRST 0xcbf29ce484222325u

/* How b lies in memory on this rank. */
static uint64_t layout_hash(const kn_bucket *b)
{
    const kn_layout *l = &b->layout;
    uint64_t h = mix_number(mix_number(FIRST, l->kind), b->shard);
    h = mix_number(mix_number(h, l->shards), l->shard);
    for (int i = 0; i < l->params; i++) {
        const kn_bucket_param *p = &b->param[i];
        h = mix(h, p->name, strlen(p->name) + 1);
        h = mix(h, p->shape, (size_t)p->ndim * sizeof *p->shape);
        h = mix_number(mix_part(h, p->part), p->part.at);
    }
    return h;
}

uint64_t kn_entry_split(const kn_entry *e)
{
    if (e->kind == KN_ENTRY_FLAT)
        return layout_hash(e->bucket);
    uint64_t h = mix_number(FIRST, kn_entry_numel(e));
    for (int s = 0; e->bucket && s < e->bucket->shards; s++)
        h = mix_part(h, kn_layout_part(&e->bucket->layout, e->index, s));
    return h;
}

/* ---- entries --------------------------------------------------------------------------------- */

static bool add_bucket(kn_entries *e, kn_bucket *b, int number)
{
    const char *path = b->unit->module[0]->path;
    char own[32] = "_flat_param";
    if (number > 0)
        snprintf(own, sizeof own, "_flat_param_%d", number);
    const int64_t n = b->layout.shard;
    kn_tensor *t = kn_tensor_on(b->master, 0, b->master_dtype, 1, &n, NULL, false);
    const kn_entry flat = { .kind = KN_ENTRY_FLAT,
                            .dtype = b->master_dtype,
                            .ndim = 1,
                            .shape = { n },
                            .part = kn_interval_whole(n),
                            .tensor = t,
                            .bucket = b,
                            .index = -1 };
    bool ok = t && kn_entries_add(e, flat, *path ? path : own, *path ? own : NULL);
    if (!ok)
        kn_tensor_free(t);
    return ok;
}

static bool add_unit(kn_entries *e, const kn_unit *u)
{
    bool ok = !u->summoned ||
              kn_fail("state: unit '%s' is summoned; end the scope first", kn_unit_name(u));
    for (int i = 0; ok && i < u->buckets; i++)
        ok = add_bucket(e, u->bucket[i], i);
    return ok;
}

static bool is_listed(const kn_entries *e, const kn_bucket *b)
{
    bool found = false;
    for (int i = 0; i < e->count; i++)
        found = found || (e->list[i].kind == KN_ENTRY_FLAT && e->list[i].bucket == b);
    return found;
}

bool kn_entries_add_flat(kn_entries *e)
{
    const kn_param *p;
    const int n = kn_params(e->module, &p), units = kn_fsdp_units(e->module, NULL, 0);
    kn_module **unit = kn_host_calloc((size_t)units + 1, sizeof *unit);
    bool ok = unit && kn_fsdp_units(e->module, unit, units) == units;
    for (int i = 0; ok && i < units; i++)
        ok = add_unit(e, kn_unit_of(unit[i]->impl));
    kn_host_free(unit);
    for (int i = 0; ok && i < n; i++) {
        const kn_bucket *b = kn_bucket_of(&p[i]);
        if (b && !is_listed(e, b))
            ok = kn_fail("state: '%s' lies in unit '%s', which isn't at or below '%s': a local "
                         "state is of whole units",
                         p[i].name, kn_unit_name(b->unit), kn_module_path(e->module));
    }
    return ok && kn_ok();
}
