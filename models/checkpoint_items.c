/* models/checkpoint_items.c: the tensors of a checkpoint's files: names, reading, writing. */
#include "kernels/error.h"
#include "kernels/memory_internal.h"
#include "models/checkpoint_internal.h"

#include <stdio.h>
#include <string.h>

void kn_saved_items_free(kn_saved_items *s)
{
    for (int i = 0; i < s->count; i++)
        kn_host_free((void *)s->entry[i].name);
    kn_host_free(s->entry);
    kn_host_free(s->list);
    *s = (kn_saved_items){ 0 };
}

/* ---- names ----------------------------------------------------------------------------------- */

static bool make_room(kn_saved_items *s)
{
    int64_t room = s->room; /* grown when both lists have */
    return kn_host_grow(&s->list, &room, s->count + 1, sizeof *s->list) &&
           kn_host_grow(&s->entry, &s->room, s->count + 1, sizeof *s->entry);
}

/* Adds an item of whole's shape, named "before.after", or "before" where after is NULL. */
static bool add_item(kn_saved_items *s, kn_saved_item item, kn_dtype dtype, const kn_tensor *whole,
                     const char *before, const char *after)
{
    char name[512];
    int n = snprintf(name, sizeof name, "%s%s%s", before, after ? "." : "", after ? after : "");
    if (n >= (int)sizeof name)
        return kn_fail("checkpoint: the name %.60s... is too long", before);
    char *copy = make_room(s) ? kn_host_strdup(name) : NULL;
    if (!copy)
        return false;
    kn_safetensors_entry *e = &s->entry[s->count];
    *e = (kn_safetensors_entry){ .name = copy, .dtype = dtype, .ndim = kn_ndim(whole) };
    memcpy(e->shape, kn_shape(whole), (size_t)e->ndim * sizeof *e->shape);
    s->list[s->count++] = item;
    size_t bytes = kn_saved_item_bytes(s, s->count - 1);
    if (bytes > s->largest)
        s->largest = bytes;
    return true;
}

static bool add_buffers(kn_module *m, void *arg)
{
    kn_saved_items *s = arg;
    const char *path = kn_module_path(m), *name;
    for (int i = 0; i < kn_module_buffers(m); i++) {
        kn_tensor *t = kn_module_buffer_at(m, i, &name);
        kn_saved_item item = { .param = -1, .buffer = t };
        if (!add_item(s, item, kn_dtype_of(t), t, *path ? path : name, *path ? name : NULL))
            return false;
    }
    return true;
}

/* A parameter, or where average: that of it. Either may be in the module now. */
static kn_saved_item value_of(int param, const kn_ema *ema, bool average)
{
    kn_tensor *other = kn_ema_value(ema, param);
    return (kn_saved_item){ .param = param, .part = average == kn_ema_swapped(ema) ? NULL : other };
}

bool kn_saved_items_make(kn_saved_items *s, void *module, const kn_ema *ema)
{
    const kn_param *p;
    int n = kn_params(module, &p);
    for (int i = 0; i < n; i++)
        if (!add_item(s, value_of(i, ema, true), kn_dtype_of(p[i].master), p[i].tensor, p[i].name,
                      NULL))
            return false;
    return kn_apply_modules(module, add_buffers, s) && kn_ok();
}

bool kn_saved_buffer_name(char *name, size_t size, const char *buffer, int rank)
{
    return snprintf(name, size, "%s.rank%d", buffer, rank) < (int)size ||
           kn_fail("checkpoint: the name %.60s... is too long", buffer);
}

/* A module's name in messages: the root has no path. */
static const char *shown(const kn_module *m)
{
    const char *path = kn_module_path(m);
    return *path ? path : "the root";
}

bool kn_saved_items_make_state(kn_saved_items *s, void *module, const kn_optim *optim,
                               const kn_ema *ema, const kn_saved_items *model, int ranks)
{
    char name[512];
    const char *state;
    const kn_param *p;
    int n = kn_params(module, &p);
    if (kn_optim_module(optim) != (kn_module *)module)
        return kn_fail("checkpoint: the optimizer was made for '%s' (%s), not for the module that "
                       "it is saved or "
                       "loaded with, '%s' (%s)",
                       shown(kn_optim_module(optim)), kn_module_class(kn_optim_module(optim)),
                       shown(module), kn_module_class(module));
    for (int i = 0; i < n; i++)
        for (int k = 0; p[i].trainable && (state = kn_optim_state_name_of(optim, i, k)); k++)
            if (!add_item(s, (kn_saved_item){ .param = i, .state = state },
                          kn_dtype_of(p[i].master), p[i].tensor, p[i].name, state))
                return false;
    for (int i = 0; i < n; i++)
        if (kn_ema_value(ema, i) && !add_item(s, value_of(i, ema, false), kn_dtype_of(p[i].master),
                                              p[i].tensor, p[i].name, "trained"))
            return false;
    for (int i = 0; i < model->count; i++)
        for (int r = 1; model->list[i].differs && r < ranks; r++) {
            kn_tensor *t = model->list[i].buffer;
            if (!kn_saved_buffer_name(name, sizeof name, model->entry[i].name, r) ||
                !add_item(s, (kn_saved_item){ .param = -1, .buffer = t, .rank = r }, kn_dtype_of(t),
                          t, name, NULL))
                return false;
        }
    return true;
}

bool kn_checkpoint_ema(const kn_ema *ema, void *module, bool optim, const char *what)
{
    if (ema && kn_ema_module(ema) != (kn_module *)module)
        return kn_fail("%s: .ema was made for another module", what);
    return !ema || optim || kn_fail("%s: .ema needs .optim, beside which it is saved", what);
}

/* ---- values ---------------------------------------------------------------------------------- */

size_t kn_saved_item_bytes(const kn_saved_items *s, int i)
{
    size_t bytes = kn_dtype_size(s->entry[i].dtype);
    for (int d = 0; d < s->entry[i].ndim; d++)
        bytes *= (size_t)s->entry[i].shape[d];
    return bytes;
}

static bool read_buffer(const kn_saved_item *it, size_t bytes, kn_comm *comm, void *host)
{
    bool ok = kn_rank(comm) != it->rank || bytes == 0 || kn_to_host(it->buffer, host, bytes);
    return ok && (kn_comm_size(comm) < 2 || bytes == 0 ||
                  kn_broadcast(comm, host, (int64_t)bytes, it->rank, kn_compute_stream(KN_CPU),
                               "buffer of a checkpoint"));
}

bool kn_saved_item_read(const kn_saved_items *s, int i, kn_comm *comm, void *module,
                        const kn_optim *optim, void *host)
{
    const kn_saved_item *it = &s->list[i];
    if (it->buffer)
        return read_buffer(it, kn_saved_item_bytes(s, i), comm, host);
    if (it->part)
        return kn_shard_read(module, it->param, it->part, host);
    return it->state
               ? kn_shard_read(module, it->param, kn_optim_state(optim, it->param, it->state), host)
               : kn_param_read(module, it->param, host);
}

bool kn_saved_item_write(const kn_saved_item *it, void *module, const kn_optim *optim, kn_tensor *t)
{
    if (it->buffer)
        return kn_copy_(it->buffer, t);
    const void *host = kn_data(t);
    if (!host)
        return false;
    if (it->part)
        return kn_shard_write(module, it->param, it->part, host);
    return it->state ? kn_shard_write(module, it->param,
                                      kn_optim_state(optim, it->param, it->state), host)
                     : kn_param_write(module, it->param, host);
}

static bool compare_buffers(kn_saved_items *s, kn_comm *comm, char *first, char *mine,
                            float *differ)
{
    for (int i = 0; i < s->count; i++) {
        size_t bytes = kn_saved_item_bytes(s, i);
        if (!s->list[i].buffer || bytes == 0)
            continue;
        if (!kn_to_host(s->list[i].buffer, mine, bytes) ||
            !kn_saved_item_read(s, i, comm, NULL, NULL, first))
            return false;
        differ[i] = memcmp(first, mine, bytes) != 0;
    }
    return kn_all_reduce_max(comm, differ, s->count, kn_compute_stream(KN_CPU),
                             "buffers of a checkpoint");
}

bool kn_saved_items_compare(kn_saved_items *s, kn_comm *comm)
{
    bool any = false;
    for (int i = 0; i < s->count; i++)
        any = any || s->list[i].buffer;
    if (!any || kn_comm_size(comm) < 2)
        return true;
    char *first = kn_host_alloc(s->largest + 1), *mine = kn_host_alloc(s->largest + 1);
    float *differ = kn_host_calloc((size_t)s->count, sizeof *differ);
    bool ok = first && mine && differ && compare_buffers(s, comm, first, mine, differ);
    for (int i = 0; ok && i < s->count; i++)
        s->list[i].differs = differ[i] != 0;
    kn_host_free(first);
    kn_host_free(mine);
    kn_host_free(differ);
    return ok;
}
