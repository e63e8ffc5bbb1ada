/* fsdp/full.c: evaluation in full precision of units that train in less. Between a forward and its
 * backward it may come, too: what the forward saved are views of the same storages, which hold
 * their dtype again by then. */
#include "fsdp/schedule.h"
#include "kernels/graph_internal.h"

bool kn_unit_may_train_in_full(const kn_unit *u)
{
    return !(kn_grad_mode() || kn_in_backward()) ||
           kn_fail("fsdp: unit '%s' evaluates in full precision: set grad mode off, or call "
                   "kn_fsdp_set_full_precision(module, false) before it trains",
                   kn_unit_name(u));
}

/* The released bytes that hold count elements hold them in dtype from now on. */
static void resize(kn_storage *s, int64_t count, kn_dtype dtype)
{
    if (s)
        s->bytes = (size_t)count * kn_dtype_size(dtype);
}

static void set_bucket(kn_bucket *b, bool full)
{
    const kn_dtype dtype = full ? b->master_dtype : b->param_dtype;
    if (b->full == b->master || b->full_dtype == dtype)
        return;
    b->full_dtype = dtype;
    resize(b->full, b->layout.full_numel, dtype);
    resize(b->gather_stage, b->layout.shard * b->shards, dtype);
    resize(b->slice, b->unit->slice_ranks > 1 ? b->layout.full_numel / b->unit->slice_ranks : 0,
           dtype);
    for (int i = 0; i < b->params; i++)
        b->param[i].tensor->dtype = dtype;
}

static bool may_turn(kn_unit *u, void *what)
{
    if (u->schedule) {
        kn_forward_close(u->schedule);
        kn_schedule_recover(u->schedule);
    }
    if (u->state == KN_UNIT_FORWARD || u->calls > 0)
        return kn_fail("%s: unit '%s' is in a forward; call it after that", (const char *)what,
                       kn_unit_name(u));
    return kn_unit_closed(u, kn_unit_name(u), what);
}

static bool turn(kn_unit *u, void *on)
{
    const bool full = *(bool *)on;
    if (u->set.full == full)
        return true;
    if (!kn_unit_reshard(u, KN_WHY("kn_fsdp_set_full_precision")) || !kn_unit_show_buffers(u, full))
        return false;
    for (int i = 0; i < u->buckets; i++)
        set_bucket(u->bucket[i], full);
    u->set.full = full;
    return true;
}

bool kn_fsdp_set_full_precision(void *module, bool on)
{
    char what[] = "kn_fsdp_set_full_precision";
    if (kn_ok() && kn_impl(module, what) && kn_in_backward())
        return kn_fail("%s: a backward runs; call it after that", what);
    if (!kn_ok() || !kn_apply_units(module, may_turn, what, what))
        return false;
    kn_changed();
    return kn_apply_units(module, turn, &on, NULL) && kn_ok();
}
