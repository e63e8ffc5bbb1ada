/* fsdp/precision.c: the device and the dtypes that a unit's calls see (docs/architecture.md, idea 6: there is no
 * autocast; precision belongs to a unit). Float inputs of its modules become the dtype its gathered
 * parameters have, float outputs .output_dtype, float buffers .buffer_dtype. Integers pass through. The
 * casts are operations on the tape, so gradients flow back in the dtype that came in. */
#include "fsdp/unit.h"

/* The dtype that u computes in; the default where it takes its inputs as they come. */
static kn_dtype input_dtype(const kn_unit *u)
{
    kn_cast_inputs which = u->options.cast_inputs;
    if (!u->cast || which == KN_CAST_NONE)
        return KN_DTYPE_DEFAULT;
    if (which == KN_CAST_ROOT && !(u->schedule && u->schedule->root == u))
        return KN_DTYPE_DEFAULT;
    if (u->options.param_dtype)
        return u->options.param_dtype;
    return u->buckets > 0 ? u->bucket[0]->param_dtype : KN_DTYPE_DEFAULT;
}

/* x where u computes. On meta only its shape matters, so a gradient that arrives there stays there. */
static kn_tensor *moved(const kn_unit *u, kn_tensor *x)
{
    kn_device have = kn_device_of(x), want = u->options.device ? u->options.device : KN_CPU;
    if (have == want)
        return x;
    if (want != KN_META) {
        char buf[128];
        kn_fail(
            "fsdp: unit '%s' computes on the %s, but an input %s is on %s, where tensors have no "
            "values; make it on the %s",
            kn_unit_name(u), kn_device_name(want), kn_describe(x, buf, sizeof buf),
            kn_device_name(have), kn_device_name(want));
        return NULL;
    }
    kn_tensor *y = kn_empty(kn_dtype_of(x), want, kn_ndim(x), kn_shape(x));
    return y && kn_requires_grad(x) ? kn_require_grad(y, true) : y;
}

/* Both run inside the scope of the module's call, which then owns what was cast. */
static bool cast_floats(kn_values *v, kn_dtype dtype)
{
    for (int i = 0; i < v->n && dtype; i++) {
        if (!v->v[i] || !kn_dtype_is_float(kn_dtype_of(v->v[i])))
            continue;
        v->v[i] = kn_cast(v->v[i], dtype);
        if (!v->v[i])
            return false;
    }
    return kn_ok();
}

bool kn_unit_cast_inputs(kn_unit *u, kn_values *in)
{
    for (int i = 0; in && i < in->n; i++)
        if (in->v[i] && !(in->v[i] = moved(u, in->v[i])))
            return false;
    return !in || cast_floats(in, input_dtype(u));
}

bool kn_unit_cast_outputs(kn_unit *u, kn_values *out)
{
    return !out || cast_floats(out, u->options.output_dtype);
}

/* ---- buffers ---------------------------------------------------------------------------------- */

/* t keeps its handle, which the module's own struct may hold too, and gets other bytes. */
static bool recast(kn_tensor *t, kn_dtype dtype, const char *label)
{
    if (!kn_dtype_is_float(t->dtype) || t->dtype == dtype)
        return true;
    kn_device device = kn_device_of(t);
    size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(dtype);
    kn_storage *s = kn_storage_create(kn_device_memory(device), bytes, KN_MEM_BUFFER, label);
    kn_tensor *cast = s ? kn_tensor_on(s, 0, dtype, t->ndim, t->shape, NULL, false) : NULL;
    bool grad = kn_set_grad_mode(false);
    bool ok = cast && (kn_numel(t) == 0 || kn_copy_(cast, t));
    kn_set_grad_mode(grad);
    if (ok) {
        kn_storage_unref(t->storage);
        t->storage = kn_storage_ref(s);
        t->offset = 0;
        t->dtype = dtype;
        kn_row_major(t->ndim, t->shape, t->stride);
    }
    kn_free(cast);
    kn_storage_unref(s);
    return ok;
}

static bool recast_below(kn_module_impl *m, kn_dtype dtype)
{
    for (int i = 0; i < m->buffers; i++)
        if (!recast(m->buffer[i].tensor, dtype, m->buffer[i].name))
            return false;
    for (int i = 0; i < m->children; i++)
        if (!m->child[i]->impl->unit && !recast_below(m->child[i]->impl, dtype))
            return false;
    return true;
}

static bool settle_below(kn_module_impl *m, kn_device device, uint64_t seed)
{
    if (!kn_buffers_settle(m, device, seed, false))
        return false;
    for (int i = 0; i < m->children; i++)
        if (!m->child[i]->impl->unit && !settle_below(m->child[i]->impl, device, seed))
            return false;
    return true;
}

bool kn_unit_cast_buffers(kn_unit *u)
{
    const kn_device device = u->options.device ? u->options.device : KN_CPU;
    for (int i = 0; i < u->modules; i++)
        if (!settle_below(u->module[i], device, u->options.seed))
            return false;
    for (int i = 0; i < u->modules && u->options.buffer_dtype; i++)
        if (!recast_below(u->module[i], u->options.buffer_dtype))
            return false;
    return true;
}
