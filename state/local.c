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

uint64_t kn_entry_split(const kn_entry *e)
{
    uint64_t h = mix_number(FIRST, kn_entry_numel(e));
    for (int s = 0; e->bucket && s < e->bucket->shards; s++)
        h = mix_part(h, kn_layout_part(&e->bucket->layout, e->index, s));
    return h;
}

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

/* ---- which ----------------------------------------------------------------------------------- */

static bool add_unit(kn_flats *f, const kn_unit *u, size_t below, const char *prefix)
{
    const char *path = u->module[0]->path;
    path = strlen(path) > below ? path + below : "";
    for (int i = 0; i < u->buckets; i++) {
        char after[32] = "_flat_param";
        if (i > 0)
            snprintf(after, sizeof after, "_flat_param_%d", i);
        if (u->summoned)
            return kn_fail("state: unit '%s' is summoned; end the scope first", kn_unit_name(u));
        char *name = kn_host_grow(&f->list, &f->room, f->count + 1, sizeof *f->list)
                         ? kn_state_join(prefix, *path ? path : after, *path ? after : NULL)
                         : NULL;
        if (!name)
            return false;
        f->list[f->count++] = (kn_flat){ name, u->bucket[i], layout_hash(u->bucket[i]) };
    }
    return true;
}

bool kn_flats_hold(const kn_flats *f, const kn_bucket *b)
{
    bool found = false;
    for (int i = 0; i < f->count; i++)
        found = found || f->list[i].bucket == b;
    return found;
}

bool kn_flats_list(kn_flats *f, kn_module *module, const char *prefix)
{
    const char *path = kn_module_path(module);
    const size_t below = *path ? strlen(path) + 1 : 0;
    const int units = kn_fsdp_units(module, NULL, 0);
    kn_module **unit = kn_host_calloc((size_t)units + 1, sizeof *unit);
    bool ok = unit && kn_fsdp_units(module, unit, units) == units;
    for (int i = 0; ok && i < units; i++)
        ok = add_unit(f, kn_unit_of(unit[i]->impl), below, prefix);
    kn_host_free(unit);
    const kn_param *p;
    const int n = kn_params(module, &p);
    for (int i = 0; ok && i < n; i++) {
        const kn_bucket *b = kn_bucket_of(&p[i]);
        if (b && !kn_flats_hold(f, b))
            ok = kn_fail("state: '%s' lies in unit '%s', which isn't at or below '%s': a local "
                         "state is of whole units",
                         p[i].name, kn_unit_name(b->unit), path);
    }
    return ok && kn_ok();
}

void kn_flats_free(kn_flats *f)
{
    for (int i = 0; i < f->count; i++)
        kn_host_free(f->list[i].name);
    kn_host_free(f->list);
    *f = (kn_flats){ 0 };
}

/* ---- values ---------------------------------------------------------------------------------- */

/* The master as a tensor, given to the scope. */
static kn_tensor *flat_of(kn_bucket *b)
{
    return kn_bucket_sync_transfers(b)
               ? kn_tensor_on(b->master, 0, b->master_dtype, 1, &b->layout.shard, NULL, true)
               : NULL;
}

static bool take(const kn_flat *f, kn_state *s, kn_dtype dtype)
{
    kn_bucket *b = f->bucket;
    const int64_t n = b->layout.shard;
    const size_t bytes = (size_t)n * kn_dtype_size(b->master_dtype);
    kn_tensor *master = flat_of(b);
    kn_tensor *to = master ? kn_state_tensor_new(dtype ? dtype : b->master_dtype, 1, &n) : NULL;
    void *room = to && dtype && dtype != b->master_dtype ? kn_host_alloc(bytes + 1) : NULL;
    void *values = to ? kn_array_of(to).data : NULL;
    bool ok = values && kn_ok() && kn_to_host(master, room ? room : values, bytes) &&
              (!room || kn_state_convert(values, dtype, room, b->master_dtype, n));
    kn_state_item *i = ok ? kn_state_add(s, NULL, f->name) : NULL;
    kn_host_free(room);
    if (!i) {
        kn_tensor_free(to);
        return false;
    }
    i->type = KN_STATE_TENSOR;
    i->tensor = to;
    i->dtype = kn_dtype_of(to);
    i->ndim = 1;
    i->shape[0] = n;
    i->part = (kn_interval){ .count = n, .blocks = n > 0, .stride = n };
    i->ranks = b->unit->size;
    i->rank = b->unit->rank;
    i->shards = b->shards;
    i->split = f->split;
    i->flat = true;
    return true;
}

bool kn_flats_take(const kn_flats *f, kn_state *s, kn_dtype dtype)
{
    bool ok = true;
    for (int i = 0; ok && i < f->count; i++) {
        kn_scope scope = kn_scope_begin();
        ok = take(&f->list[i], s, dtype);
        kn_scope_end(scope);
    }
    return ok;
}

bool kn_flat_write(const kn_flat *f, const kn_state_item *item, void *room)
{
    kn_bucket *b = f->bucket;
    const int64_t n = b->layout.shard;
    const void *from = kn_array_of(item->tensor).data;
    const kn_device d = b->master->device;
    bool ok = kn_bucket_sync_transfers(b);
    if (ok && item->dtype != b->master_dtype) {
        ok = kn_state_convert(room, b->master_dtype, from, item->dtype, n);
        from = room;
    }
    const size_t bytes = (size_t)n * kn_dtype_size(b->master_dtype);
    if (ok && d == KN_CPU)
        memcpy(b->master->data, from, bytes);
    else if (ok && d != KN_META)
        ok = kn_transfer(kn_compute_stream(d), b->master->data, from, bytes, KN_TO_DEVICE, false);
    b->master->version++;
    return ok && kn_bucket_drop_gathered(b, -1);
}
