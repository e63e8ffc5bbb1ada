/* state/load.c: fills a module or an optimizer from a state dict. All that may fail comes first, on
 * every rank; ranks agree; then values are written. */
#include "comm/comm_internal.h"
#include "kernels/error_internal.h"
#include "state/load_internal.h"
#include "tensor/tensor_internal.h"

#include <string.h>

/* ---- before anything is written -------------------------------------------------------------- */

static size_t item_bytes(const kn_state_item *i, int64_t numel)
{
    return (size_t)numel * kn_dtype_size(i->dtype);
}

static bool same_part(kn_interval a, kn_interval b)
{
    return a.start == b.start && a.count == b.count && a.blocks == b.blocks &&
           (a.blocks <= 1 || a.stride == b.stride);
}

/* Whether some rank needs elements of parts that others have. */
static bool find_travels(kn_loading *l)
{
    float travels = 0;
    for (int i = 0; i < l->all.count; i++) {
        const kn_state_item *item = l->item[i];
        if (item && item->shards > 1 && !same_part(item->part, l->all.list[i].part))
            travels = 1;
    }
    bool ok = !l->parts || kn_comm_size(l->all.comm) < 2 ||
              kn_all_reduce_max(l->all.comm, &travels, 1, kn_compute_stream(KN_CPU), l->what);
    l->travels = travels > 0;
    return ok;
}

/* Parts that travel come from one state. */
static bool same_splits(const kn_loading *l)
{
    uint64_t mine = 0, first;
    for (int i = 0; i < l->all.count; i++)
        if (l->item[i] && l->item[i]->shards > 1)
            mine = (mine ^ l->item[i]->split) * 0x100000001b3u + (uint64_t)l->item[i]->shards;
    first = mine;
    return kn_broadcast(l->all.comm, &first, sizeof first, 0, kn_compute_stream(KN_CPU), l->what) &&
           kn_agree(l->all.comm, first == mine || kn_fail("%s: the parts that ranks give are of "
                                                          "different states",
                                                          l->what));
}

static bool make_room(kn_loading *l)
{
    size_t whole = 0, part = 0, converted = 0;
    for (int i = 0; i < l->all.count; i++) {
        const kn_entry *e = &l->all.list[i];
        const kn_state_item *item = l->item[i];
        if (!item)
            continue;
        const size_t all = item_bytes(item, kn_entry_numel(e));
        const size_t some = item_bytes(item, kn_interval_numel(e->part));
        whole = all > whole ? all : whole;
        part = some > part ? some : part;
        converted = kn_entry_part_bytes(e) > converted ? kn_entry_part_bytes(e) : converted;
    }
    for (int i = 0; i < l->flats.count; i++) {
        const kn_bucket *b = l->flats.list[i].bucket;
        const size_t bytes = (size_t)b->layout.shard * kn_dtype_size(b->master_dtype);
        converted = bytes > converted ? bytes : converted;
    }
    l->whole = kn_host_alloc(l->travels || l->dealt ? whole + 1 : 1);
    l->sent = kn_host_alloc(l->travels ? whole + 1 : 1);
    l->part = kn_host_alloc(part + 1);
    l->converted = kn_host_alloc(converted + 1);
    return l->whole && l->sent && l->part && l->converted;
}

/* ---- values ---------------------------------------------------------------------------------- */

/* This rank's bytes of an item. */
static const char *bytes_of(const kn_loading *l, const kn_state_item *i)
{
    const kn_state_item *own = l->s == l->names ? i : kn_state_find(l->s, i->name);
    return kn_array_of(own->tensor).data;
}

/* l->whole becomes the item on all ranks, from their parts. */
static bool gather_item(kn_loading *l, const kn_state_item *i)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    const size_t size = kn_dtype_size(i->dtype);
    bool ok = true;
    for (int r = 0; ok && r < i->shards; r++) {
        kn_interval part = i->part;
        ok = kn_broadcast(l->all.comm, &part, sizeof part, r, s, i->name);
        const size_t bytes = (size_t)kn_interval_numel(part) * size;
        if (!ok || bytes == 0)
            continue;
        if (r == kn_rank(l->all.comm))
            memcpy(l->sent, bytes_of(l, i), bytes);
        ok = kn_broadcast(l->all.comm, l->sent, (int64_t)bytes, r, s, i->name);
        if (ok)
            kn_interval_paste(part, l->whole, l->sent, size);
    }
    return ok;
}

/* *whole: the item's elements from the first on. */
static bool whole_of(kn_loading *l, const kn_state_item *i, int64_t numel, const char **whole)
{
    const int64_t bytes = (int64_t)item_bytes(i, numel);
    *whole = l->whole;
    if (l->travels && i->shards > 1)
        return gather_item(l, i);
    if (!l->dealt) {
        *whole = bytes_of(l, i);
        return kn_ok();
    }
    if (kn_rank(l->all.comm) == 0 && bytes > 0)
        memcpy(l->whole, bytes_of(l, i), (size_t)bytes);
    return bytes == 0 || kn_comm_size(l->all.comm) < 2 ||
           kn_broadcast(l->all.comm, l->whole, bytes, 0, kn_compute_stream(KN_CPU), i->name);
}

static bool write_entry(kn_loading *l, const kn_entry *e, const kn_state_item *i)
{
    const kn_interval part = e->part;
    const char *from;
    if (i->shards > 1 && !l->travels) {
        from = bytes_of(l, i);
    } else if (!whole_of(l, i, kn_entry_numel(e), &from)) {
        return false;
    } else if (part.blocks == 1) {
        from += item_bytes(i, part.start);
    } else if (part.blocks > 1) {
        kn_interval_cut(part, l->part, from, kn_dtype_size(i->dtype));
        from = l->part;
    }
    if (i->dtype != e->dtype) {
        if (!kn_state_convert(l->converted, e->dtype, from, i->dtype, kn_interval_numel(part)))
            return false;
        from = l->converted;
    }
    return kn_entry_write(e, from);
}

static bool write_all(kn_loading *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->all.count; i++)
        ok = !l->item[i] || write_entry(l, &l->all.list[i], l->item[i]);
    for (int i = 0; ok && i < l->flats.count; i++)
        ok = !l->flat[i] || kn_flat_write(&l->flats.list[i], l->flat[i], l->converted);
    return ok && (!l->optim || l->o->keep_options || kn_optim_values_set(&l->values, l->optim)) &&
           kn_ok();
}

/* ---- the whole ------------------------------------------------------------------------------- */

static bool take_names(kn_loading *l)
{
    l->dealt = l->o->from_rank0 && l->all.comm;
    const bool has = !l->dealt || kn_rank(l->all.comm) == 0;
    if (has && !kn_given(l->s, l->what, "the state"))
        return false;
    if (!l->dealt) {
        l->names = l->s;
        return true;
    }
    l->s = has ? l->s : NULL;
    for (int i = 0; l->s && i < l->s->count; i++)
        if (l->s->list[i].flat || l->s->list[i].shards > 1)
            kn_fail("state: .from_rank0: '%s' of rank 0 is a part; take the state full, or gather "
                    "the parts (kn_state_gather)",
                    l->s->list[i].name);
    l->names = l->header = kn_ok() ? kn_state_header(l->s, l->all.comm, 0) : NULL;
    return l->header != NULL;
}

static bool run(kn_loading *l)
{
    bool ok = kn_entries_may_write(&l->all, l->what) && take_names(l) && kn_loading_match(l);
    const bool fits = ok && kn_loading_fits(l);
    kn_loading_report(l);
    ok = fits && find_travels(l) && make_room(l);
    return kn_agree(l->all.comm, ok) && ok && (!l->travels || same_splits(l)) && write_all(l);
}

static bool end(kn_loading *l, bool ok)
{
    ok = kn_entries_end(&l->all) && ok && kn_ok();
    kn_loading_report(l);
    kn_flats_free(&l->flats);
    kn_optim_values_free(&l->values);
    kn_state_free(l->header);
    kn_host_free(l->item);
    kn_host_free(l->flat);
    kn_host_free(l->used);
    kn_host_free(l->whole);
    kn_host_free(l->sent);
    kn_host_free(l->part);
    kn_host_free(l->converted);
    return ok;
}

static bool is_averaged(kn_module *m, void *arg)
{
    bool *averaged = arg;
    *averaged = *averaged || m->impl->averaged;
    return true;
}

/* What is written into the module must be what it trains. */
static bool holds_own(kn_module_impl *m, const char *what)
{
    bool averaged = false;
    kn_apply_modules(m->self, is_averaged, &averaged);
    for (const kn_module_impl *up = m->parent; up; up = up->parent)
        averaged = averaged || up->averaged;
    return !averaged || kn_fail("%s: the module holds averages: call kn_ema_swap before", what);
}

bool kn_load_state_dict_(void *module, const kn_state *s, kn_load_state_dict_options o)
{
    static const char what[] = "kn_load_state_dict";
    if (o.report)
        *o.report = (kn_load_report){ 0 };
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    if (!m || (o.keep_options && !kn_fail("%s: .keep_options is for optimizers", what)))
        return false;
    kn_loading l = { .what = what, .o = &o, .s = s };
    l.below = *m->path ? strlen(m->path) + 1 : 0;
    bool ok = (o.ema || holds_own(m, what)) && kn_entries_begin(&l.all, module, o.comm) &&
              kn_entries_add_model(&l.all, o.ema) && run(&l);
    return end(&l, ok);
}

bool kn_load_optim_state_dict_(kn_optim *optim, const kn_state *s, kn_load_state_dict_options o)
{
    static const char what[] = "kn_load_optim_state_dict";
    if (o.report)
        *o.report = (kn_load_report){ 0 };
    kn_module *m =
        kn_ok() && kn_given(optim, what, "the optimizer") ? kn_optim_module(optim) : NULL;
    if (!m || (o.ema && !kn_fail("%s: .ema is for kn_load_state_dict", what)))
        return false;
    kn_loading l = { .what = what, .o = &o, .s = s, .optim = optim };
    bool ok = kn_entries_begin(&l.all, m, o.comm) && kn_entries_add_optim(&l.all, optim) && run(&l);
    return end(&l, ok);
}
