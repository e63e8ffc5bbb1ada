/* nn/buffers_over_ranks.c: buffers that differ over ranks become equal: their mean, or one
 * rank's. */
#include "comm/comm_internal.h"
#include "nn/nn_internal.h"

/* t, row-major, becomes the mean over ranks, added in their order in f64. */
static bool take_mean(kn_comm *c, kn_tensor *t, kn_stream *s, const char *label)
{
    kn_tensor *sum = kn_contiguous(kn_cast(t, KN_F64));
    void *data = sum ? kn_array_of(sum).data : NULL;
    return data && kn_all_reduce(c, data, NULL, data, kn_numel(t), KN_F64, KN_F64, s, label) &&
           kn_copy_(t, kn_cast(kn_scale(sum, 1.0 / kn_comm_size(c)), t->dtype));
}

static bool take_from(kn_comm *c, int root, kn_tensor *t, kn_stream *s, const char *label)
{
    kn_tensor *whole = kn_contiguous(t);
    const size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(t->dtype);
    if (!whole)
        return false;
    whole->storage->version++;
    return kn_broadcast(c, kn_array_of(whole).data, (int64_t)bytes, root, s, label) &&
           (whole == t || kn_copy_(t, whole));
}

/* root: whose buffer counts; -1: floats become their mean. */
static bool share(kn_comm *comm, int root, const kn_buffer_entry *b)
{
    kn_tensor *t = b->tensor;
    if (kn_numel(t) == 0 || kn_device_of(t) == KN_META)
        return true;
    kn_scope scope = kn_scope_begin();
    kn_stream *s = kn_compute_stream(kn_device_of(t));
    bool ok = root < 0 && kn_dtype_is_float(t->dtype)
                  ? take_mean(comm, t, s, b->name)
                  : take_from(comm, root < 0 ? 0 : root, t, s, b->name);
    kn_scope_end(scope);
    return ok;
}

static bool share_all(void *module, kn_comm *comm, int root, const char *what)
{
    kn_module_impl *top = kn_impl(module, what);
    if (!top || !kn_ok() || (!comm && !kn_comm_default(&comm, what)))
        return false;
    const int ranks = kn_comm_size(comm);
    if (root >= ranks)
        return kn_fail("%s: root is %d, must be a rank from 0 to %d", what, root, ranks - 1);
    if (ranks == 1)
        return true;
    const bool mode = kn_set_grad_mode(false);
    bool ok = kn_module_full_buffers(module, true);
    for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top))
        for (int i = 0; ok && i < m->buffers; i++)
            ok = share(comm, root, &m->buffer[i]) && kn_ok();
    ok = kn_module_full_buffers(module, false) && ok;
    kn_set_grad_mode(mode);
    return ok;
}

bool kn_mean_buffers(void *module, kn_comm *comm)
{
    return share_all(module, comm, -1, "kn_mean_buffers");
}

bool kn_broadcast_buffers(void *module, kn_comm *comm, int root)
{
    static const char what[] = "kn_broadcast_buffers";
    return (root >= 0 || kn_fail("%s: root is %d, must be a rank from 0", what, root)) &&
           share_all(module, comm, root, what);
}
