/* autograd/ops_mask.c: masks, made of other operations: the elements that aren't finite, and
 * filling where a mask holds. */
#include "autograd/ops.h"
#include <math.h>

/* |x| compared with infinity. Integers, whose comparison with themselves says it, are finite. */
static kn_tensor *beside_infinity(kn_tensor *x, const char *op,
                                  kn_tensor *(*compare)(kn_tensor *, kn_tensor *), bool finite)
{
    if (!kn_takes(op, x, false))
        return NULL;
    if (!kn_dtype_is_float(x->dtype))
        return finite ? kn_eq(x, x) : kn_ne(x, x);
    const bool mode = kn_set_grad_mode(false);
    kn_tensor *y = compare(kn_abs(x), kn_full(x->dtype, kn_device_of(x), INFINITY, KN_SCALAR));
    kn_set_grad_mode(mode);
    return y;
}

kn_tensor *kn_isnan(kn_tensor *x)
{
    return kn_takes("isnan", x, false) ? kn_ne(x, x) : NULL;
}

kn_tensor *kn_isinf(kn_tensor *x)
{
    return beside_infinity(x, "isinf", kn_eq, false);
}

kn_tensor *kn_isfinite(kn_tensor *x)
{
    return beside_infinity(x, "isfinite", kn_lt, true);
}

kn_tensor *kn_masked_fill(kn_tensor *x, kn_tensor *mask, double value)
{
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    if (!kn_takes("masked_fill", x, false) || !kn_check(mask, "masked_fill"))
        return NULL;
    if (mask->dtype != KN_BOOL ||
        !kn_broadcast_shape(x->ndim, x->shape, mask->ndim, mask->shape, &ndim, shape))
        return kn_fail_null(
            "masked_fill: needs a bool mask whose shape broadcasts with x; x is %s, mask is %s",
            KN_SHOWN(x), KN_SHOWN(mask));
    if (kn_device_of(mask) != kn_device_of(x))
        return kn_fail_null("masked_fill: x %s is on %s, mask %s on %s; move one of them",
                            KN_SHOWN(x), kn_device_name(kn_device_of(x)), KN_SHOWN(mask),
                            kn_device_name(kn_device_of(mask)));
    if (!kn_dtype_is_float(x->dtype) && !(value == floor(value) && isfinite(value)))
        return kn_fail_null("masked_fill: x is %s, which can't hold %g; kn_cast it first",
                            KN_SHOWN(x), value);
    kn_tensor *filling = kn_full(x->dtype, kn_device_of(x), value, KN_SCALAR);
    return kn_where(mask, filling, x);
}
