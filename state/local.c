/* state/local.c: units as they lie in memory: the flat part of each bucket, with its padding
 * (FSDP1's local state dict). Also hashes of how tensors are cut. */
#include "state/dict_internal.h"
#include "tensor/checksum.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- hashes ---------------------------------------------------------------------------------- */

static void add_part(kn_checksum *c, kn_interval part)
{
    const int64_t n[] = { part.start, part.count, part.blocks, part.stride };
    kn_checksum_add(c, n, sizeof n);
}

/* How b lies in memory on this rank. */
static void add_layout(kn_checksum *c, const kn_bucket *b)
{
    const kn_layout *l = &b->layout;
    const int64_t n[] = { l->kind, b->shard, l->shards, l->shard };
    kn_checksum_add(c, n, sizeof n);
    for (int i = 0; i < l->params; i++) {
        const kn_bucket_param *p = &b->param[i];
        kn_checksum_add(c, p->name, strlen(p->name) + 1);
        kn_checksum_add(c, p->shape, (size_t)p->ndim * sizeof *p->shape);
        add_part(c, p->part);
        kn_checksum_add(c, &p->part.at, sizeof p->part.at);
    }
}

uint64_t kn_entry_split(const kn_entry *e)
{
    const int64_t numel = kn_entry_numel(e);
    kn_checksum c;
    kn_checksum_begin(&c);
    kn_checksum_add(&c, &numel, sizeof numel);
    if (e->kind == KN_ENTRY_FLAT)
        add_layout(&c, e->bucket);
    for (int s = 0; e->kind != KN_ENTRY_FLAT && e->bucket && s < e->bucket->shards; s++)
        add_part(&c, kn_layout_part(&e->bucket->layout, e->index, s));
    return kn_checksum_end(&c);
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
    bool ok = kn_unit_closed(u, kn_unit_name(u), "state");
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
