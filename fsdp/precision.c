/* fsdp/precision.c: the device and the dtypes that a unit's calls see (docs/architecture.md, idea
 * 6: there is no autocast; precision belongs to a unit). Float inputs of its modules become the
 * dtype its gathered parameters have, float outputs .output_dtype. Integers pass through. Moves and
 * casts are operations on the tape, so gradients flow back to the device and in the dtype that came
 * in. */
#include "fsdp/schedule.h"
#include "kernels/kernels_internal.h"

/* The dtype of u's outputs; the default: as they come, also where u evaluates in full precision. */
static kn_dtype output_dtype(const kn_unit *u)
{
    return u->set.full ? KN_DTYPE_DEFAULT : u->options.output_dtype;
}

/* The dtype that u computes in; the default where it takes its inputs as they come. */
static kn_dtype input_dtype(const kn_unit *u)
{
    kn_cast_inputs which = u->options.cast_inputs;
    if (!u->cast || which == KN_CAST_NONE)
        return KN_DTYPE_DEFAULT;
    if (which == KN_CAST_ROOT && kn_unit_is_inside(u))
        return KN_DTYPE_DEFAULT;
    if (u->options.param_dtype && !u->set.full)
        return u->options.param_dtype;
    return u->buckets > 0 ? u->bucket[0]->full_dtype : KN_DTYPE_DEFAULT;
}

static kn_device device_of(const kn_unit *u)
{
    return u->options.device ? u->options.device : kn_default_device;
}

/* x where u computes. On meta only its shape matters, so a gradient that arrives there stays
 * there. */
static kn_tensor *moved(const kn_unit *u, kn_tensor *x)
{
    kn_device have = x->storage->device, want = device_of(u);
    if (have == want)
        return x;
    if (have == KN_META) {
        char buf[128];
        return kn_fail_null(
            "fsdp: unit '%s' computes on %s, but its input %s is on meta, where tensors have no "
            "values; make it on %s",
            kn_unit_name(u), kn_device_name(want), kn_describe(x, buf, sizeof buf),
            kn_device_name(want));
    }
    if (want != KN_META)
        return kn_to_device(x, want);
    kn_tensor *y = kn_empty(kn_dtype_of(x), want, kn_ndim(x), kn_shape(x));
    return y && kn_requires_grad(x) ? kn_require_grad(y, true) : y;
}

/* The inputs that u's modules widen themselves and whose results would be cast back: they stay, and
 * with them half of the memory of batch norm's activations. */
static kn_dtype stays(const kn_unit *u)
{
    bool widens = input_dtype(u) == KN_F32;
    for (int i = 0; i < u->modules; i++)
        widens = widens && u->module[i]->widens;
    const kn_dtype t = output_dtype(u);
    return widens && (t == KN_BF16 || t == KN_F16) ? t : KN_DTYPE_DEFAULT;
}

/* Whether x becomes dtype (default: it stays). Floats do, but those that have the dtype `as_is`. */
static bool to_cast(const kn_tensor *x, kn_dtype dtype, kn_dtype as_is)
{
    return dtype && kn_dtype_is_float(x->dtype) && x->dtype != dtype &&
           !(as_is && x->dtype == as_is);
}

/* Runs inside the scope of the module's call, which then owns what was cast. */
static bool cast_floats(kn_values *v, kn_dtype dtype, kn_dtype as_is)
{
    for (int i = 0; i < v->n; i++)
        if (v->v[i] && to_cast(v->v[i], dtype, as_is) && !(v->v[i] = kn_cast(v->v[i], dtype)))
            return false;
    return kn_ok();
}

bool kn_unit_cast_inputs(kn_unit *u, kn_values *in)
{
    for (int i = 0; in && i < in->n; i++)
        if (in->v[i] && !(in->v[i] = moved(u, in->v[i])))
            return false;
    return !in || cast_floats(in, input_dtype(u), stays(u));
}

bool kn_unit_cast_outputs(kn_unit *u, kn_values *out)
{
    for (int i = 0; out && i < out->n; i++)
        if (out->v[i] && !kn_check(out->v[i], "the result of a unit"))
            return false;
    return !out || cast_floats(out, output_dtype(u), KN_DTYPE_DEFAULT);
}

bool kn_unit_converts(const void *unit, const kn_tensor *x)
{
    const kn_unit *u = unit;
    return kn_device_of(x) != device_of(u) || to_cast(x, input_dtype(u), stays(u)) ||
           to_cast(x, output_dtype(u), KN_DTYPE_DEFAULT);
}
