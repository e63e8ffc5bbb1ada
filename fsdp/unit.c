/* fsdp/unit.c: what happens to a unit's bytes: gather, release, reduce. When it happens is decided in
 * fsdp/schedule.c. Everything here is ordered by streams and events; on the CPU without a free core the
 * streams run inline and the same calls happen in the same order. */
#include "fsdp/unit.h"
#include <string.h>

kn_unit *kn_unit_of(const kn_module_impl *m)
{
    return m && m->unit ? m->unit->unit : NULL;
}

static bool gathers(const kn_unit *u)
{
    return u->full != u->master;
}

static kn_stream *compute_stream(void)
{
    return kn_compute_stream(KN_CPU);
}

bool kn_unit_unshard(kn_unit *u)
{
    if (!kn_ok())
        return false;
    if (u->unsharded || u->gathering)
        return true;
    if (!gathers(u)) {
        u->unsharded = true;
        return true;
    }
    kn_stream *s = u->schedule->gather;
    if (!kn_storage_retake(u->full))
        return false;
    /* the optimizer may just have written the master */
    if (!kn_event_record(u->computed, compute_stream()) || !kn_event_wait(u->computed, s))
        return false;
    int64_t n = u->layout.shard;
    const void *src = u->master->data;
    char *own = (char *)u->full->data + (size_t)(u->shard * n) * kn_dtype_size(u->param_dtype);
    if (u->param_dtype != u->master_dtype) {
        kn_copy_args cast = { kn_array_make(own, u->param_dtype, 1, &n),
                              kn_array_make(u->master->data, u->master_dtype, 1, &n) };
        if (!KN_LAUNCH(s, KN_K_COPY, cast))
            return false;
        src = own;
    }
    bool ok;
    if (u->shards > 1) {
        ok = kn_all_gather(u->schedule->gather_comm, u->full->data, src, n, u->param_dtype, s,
                           u->module->path);
    } else {
        ok = true; /* one shard: the cast above filled all of it */
    }
    u->gathering = ok && kn_event_record(u->gathered, s);
    return u->gathering;
}

bool kn_unit_wait(kn_unit *u)
{
    if (!kn_unit_unshard(u))
        return false;
    if (u->gathering) {
        if (!kn_event_wait(u->gathered, compute_stream()))
            return false;
        u->gathering = false;
        u->unsharded = true;
    }
    return kn_ok();
}

bool kn_unit_reshard(kn_unit *u)
{
    if (u->gathering && !kn_unit_wait(u)) /* prefetched for nothing: let it arrive, then drop it */
        return false;
    if (!u->unsharded)
        return true;
    u->unsharded = false;
    if (gathers(u))
        kn_storage_release(u->full);
    return true;
}

kn_tensor *kn_unit_grad_dest(void *unit, kn_tensor *leaf)
{
    kn_unit *u = unit;
    if (u->grad->released && !kn_storage_retake(u->grad))
        return NULL;
    for (int i = 0; i < u->params; i++)
        if (u->param[i].tensor == leaf)
            return u->param[i].grad;
    kn_fail("fsdp: unit '%s' got a gradient for a parameter that isn't its own", u->module->path);
    return NULL;
}

/* Zeroes what no gradient came for: gaps between parameters, unused parameters, the padded end. */
static bool fill_gaps(kn_unit *u)
{
    size_t size = kn_dtype_size(u->reduce_dtype);
    char *base = u->grad->data;
    int64_t at = 0;
    for (int i = 0; i <= u->params; i++) {
        int64_t next = i < u->params ? u->layout.offset[i] : u->layout.total;
        if (next > at)
            memset(base + (size_t)at * size, 0, (size_t)(next - at) * size);
        if (i == u->params)
            break;
        kn_leaf *leaf = u->param[i].tensor->leaf;
        at = next + u->layout.numel[i];
        if (!leaf || !leaf->filled)
            memset(base + (size_t)next * size, 0, (size_t)(at - next) * size);
        else
            leaf->filled = false;
    }
    return true;
}

/* With one rank the unreduced buffer becomes the accumulated one: no copy. */
static bool swap_in(kn_unit *u)
{
    if (u->gshard->released && !kn_storage_retake(u->gshard))
        return false;
    void *p = u->grad->data;
    u->grad->data = u->gshard->data;
    u->gshard->data = p;
    return true;
}

bool kn_unit_reduce(kn_unit *u)
{
    if (u->grad->released) /* no gradient reached this unit: nothing to add */
        return true;
    if (!fill_gaps(u))
        return false;
    kn_stream *s = u->schedule->reduce;
    bool ok;
    if (u->ranks == 1 && !u->has_grad && u->reduce_dtype == u->master_dtype) {
        ok = swap_in(u);
    } else {
        if (u->gshard->released && !kn_storage_retake(u->gshard))
            return false;
        const void *acc = u->has_grad ? u->gshard->data : NULL;
        ok = kn_event_record(u->computed, compute_stream()) && kn_event_wait(u->computed, s);
        if (ok && u->ranks == 1)
            ok = KN_LAUNCH(s, KN_K_SUM_N,
                           ((kn_sum_n_args){ .dst = u->gshard->data,
                                             .acc = acc,
                                             .src = { u->grad->data },
                                             .n = 1,
                                             .count = u->layout.shard,
                                             .dst_dtype = u->master_dtype,
                                             .src_dtype = u->reduce_dtype }));
        else if (ok && u->shards > 1)
            ok = kn_reduce_scatter(u->schedule->reduce_comm, u->gshard->data, acc, u->grad->data,
                                   u->layout.shard, u->master_dtype, u->reduce_dtype, s,
                                   u->module->path);
        else if (ok)
            ok = kn_all_reduce(u->schedule->reduce_comm, u->gshard->data, acc, u->grad->data,
                               u->layout.shard, u->master_dtype, u->reduce_dtype, s,
                               u->module->path);
    }
    if (!ok)
        return false;
    u->has_grad = true;
    if (!kn_event_record(u->reduced, s))
        return false;
    u->schedule->reducing = u;
    return !kn_stream_is_inline(s) || kn_unit_finish_reduce(u);
}

bool kn_unit_finish_reduce(kn_unit *u)
{
    if (!u)
        return true;
    bool ok = kn_event_sync(u->reduced);
    kn_storage_release(u->grad);
    if (u->schedule->reducing == u)
        u->schedule->reducing = NULL;
    return ok && kn_ok();
}

void kn_unit_free(void *unit)
{
    kn_unit *u = unit;
    if (!u)
        return;
    if (u->schedule && u->schedule->root == u)
        kn_schedule_free(u->schedule);
    for (int i = 0; u->param && i < u->params; i++) {
        kn_unit_param *p = &u->param[i];
        if (p->tensor && p->tensor->leaf) {
            p->tensor->leaf->dest = NULL;
            p->tensor->leaf->group = NULL;
            p->tensor->leaf->on_round = NULL;
        }
        kn_free(p->master);
        kn_free(p->gpart);
        kn_free(p->grad);
        kn_free(p->tensor);
        kn_free_host(p->name);
    }
    if (u->full != u->master)
        kn_storage_unref(u->full);
    kn_storage_unref(u->master);
    kn_storage_unref(u->grad);
    kn_storage_unref(u->gshard);
    kn_event_destroy(u->gathered);
    kn_event_destroy(u->computed);
    kn_event_destroy(u->reduced);
    kn_layout_free(&u->layout);
    kn_free_host(u->param);
    kn_free_host(u);
}
