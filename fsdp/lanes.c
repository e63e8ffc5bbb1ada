/* fsdp/lanes.c: the streams beside compute, and the communicators whose collectives run on them.
 * Trees of units beside each other below one module (stages of a pipeline, two networks that train
 * each other) share them: a stream runs one thing after another, so one communicator is enough for
 * all that runs on it, and a GPU has one set of them, not one a tree. */
#include "fsdp/schedule.h"

/* Those of another tree of the same ranks and device, beside that of root; NULL: there are none. */
static kn_lanes *found_beside(const kn_unit *root)
{
    kn_module_impl *top = kn_impl_root(root->module[0]);
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        const kn_unit *u = kn_unit_of(m);
        if (u && u->schedule && u->schedule->lanes && u->comm == root->comm &&
            u->options.device == root->options.device)
            return u->schedule->lanes;
    }
    return NULL;
}

static kn_lanes *new_lanes(const kn_unit *root, kn_stream_kind kind)
{
    kn_lanes *l = kn_host_calloc(1, sizeof *l);
    if (!l)
        return NULL;
    l->device = root->options.device;
    l->gather = kn_stream_create(l->device, "gather", kind);
    l->reduce = kn_stream_create(l->device, "reduce", kind);
    l->groups.comm = root->comm;
    return l;
}

static bool make_transfer_streams(kn_lanes *l, kn_stream_kind kind)
{
    if (!l->upload)
        l->upload = kn_stream_create(l->device, "upload", kind);
    if (!l->download)
        l->download = kn_stream_create(l->device, "download", kind);
    if (!l->host && l->device == KN_META)
        l->host = kn_stream_create(l->device, "host", KN_STREAM_HOST);
    return l->upload && l->download && (l->host || l->device != KN_META);
}

bool kn_lanes_join(kn_schedule_state *s, bool away)
{
    kn_stream_kind kind = s->root->size > 1 ? KN_STREAM_AUTO : KN_STREAM_INLINE;
    kn_lanes *beside = found_beside(s->root);
    kn_lanes *l = s->lanes = beside ? beside : new_lanes(s->root, kind);
    if (!l)
        return false;
    l->trees++;
    if (!l->gather || !l->reduce || (away && !make_transfer_streams(l, kind)))
        return false;
    s->inline_reduce = kn_stream_is_inline(l->reduce);
    return true;
}

void kn_lanes_sync(kn_lanes *l)
{
    kn_stream *stream[] = { l->gather, l->reduce, l->upload, l->download, l->host };
    for (size_t i = 0; i < sizeof stream / sizeof *stream; i++)
        if (stream[i])
            kn_stream_sync(stream[i]);
}

void kn_lanes_leave(kn_schedule_state *s)
{
    kn_lanes *l = s->lanes;
    if (!l)
        return;
    s->lanes = NULL;
    if (--l->trees > 0) {
        kn_lanes_sync(l);
        return;
    }
    kn_stream *stream[] = { l->gather, l->reduce, l->upload, l->download, l->host };
    for (size_t i = 0; i < sizeof stream / sizeof *stream; i++)
        kn_stream_destroy(stream[i]);
    kn_ranks_free(&l->groups);
    kn_host_free(l);
}
