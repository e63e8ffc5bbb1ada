/* nn/conv.c: layers of images: convolution and batch norm. */
#include "nn/nn_internal.h"
#include <math.h>

/* ---- convolution ----------------------------------------------------------------------------- */

static kn_tensor *conv2d_forward(kn_module *self, kn_tensor *x)
{
    const kn_conv2d_options *o = kn_module_data(self);
    return kn_conv2d_(x, kn_layer_param(self, 0), kn_layer_param(self, 1), *o);
}

bool kn_conv2d_init_(kn_conv2d *c, kn_module *parent, const char *name, int64_t in, int64_t out,
                     int64_t kernel, kn_conv2d_init_options o)
{
    const kn_conv2d_options call = { ._size = sizeof call,
                                     .stride = o.stride,
                                     .pad = o.pad,
                                     .dilation = o.dilation,
                                     .strides = { o.strides[0], o.strides[1] },
                                     .pads = { o.pads[0], o.pads[1] },
                                     .dilations = { o.dilations[0], o.dilations[1] },
                                     .groups = o.groups };
    const int64_t R = kernel ? kernel : o.kernels[0], S = kernel ? kernel : o.kernels[1];
    const int64_t groups = o.groups ? o.groups : 1;
    if (in < 1 || out < 1 || R < 1 || S < 1)
        return kn_fail("kn_conv2d_init: '%s' would be %lld -> %lld with a kernel of %lld x %lld; "
                       "all must be at least 1",
                       name, (long long)in, (long long)out, (long long)R, (long long)S);
    if (groups < 1 || in % groups || out % groups)
        return kn_fail("kn_conv2d_init: '%s' is %lld -> %lld, which %lld groups don't divide", name,
                       (long long)in, (long long)out, (long long)groups);
    const double bound = 1 / sqrt((double)(in / groups * R * S));
    const kn_initializer d = KN_UNIFORM_INIT(-bound, bound);
    return kn_layer_begin(c, parent, name, conv2d_forward, "conv2d", &call, sizeof call) &&
           kn_parameter(c, "weight", o.dtype, o.device, kn_init_or(o.weight, d),
                        KN_SHAPE(out, in / groups, R, S)) &&
           (o.no_bias ||
            kn_parameter(c, "bias", o.dtype, o.device, kn_init_or(o.bias, d), 1, &out));
}

/* ---- batch norm: buffers running_mean, running_var, num_batches_tracked ---------------------- */

static kn_tensor *batchnorm_forward(kn_module *self, kn_tensor *x)
{
    const kn_batch_norm_init_options *o = kn_module_data(self);
    const kn_module_impl *m = self->impl;
    const kn_frame *f = kn_context_get()->frame;
    const bool tracks = m->buffers > 0, trains = m->training || !tracks;
    const bool moves = tracks && m->training && !(f && f->replay); /* not again in backward */
    kn_tensor *mean = NULL, *var = NULL;
    if (moves || !trains)
        mean = m->buffer[0].tensor, var = m->buffer[1].tensor;
    kn_tensor *y = kn_batch_norm(x, kn_layer_param(self, 0), kn_layer_param(self, 1), mean, var,
                                 .training = trains, .momentum = o->momentum, .eps = o->eps);
    if (!y || !moves)
        return y;
    kn_tensor *count = m->buffer[2].tensor;
    kn_array a = kn_array_of(count);
    count->storage->version++;
    kn_stream *s = kn_compute_stream(kn_device_of(count));
    return KN_LAUNCH(s, KN_K_UNARY, ((kn_unary_args){ a, a, KN_AFFINE, 1, 1 })) ? y : NULL;
}

bool kn_batch_norm_init_(kn_batch_norm *b, kn_module *parent, const char *name, int64_t channels,
                         kn_batch_norm_init_options o)
{
    const kn_initializer zeros = KN_ZEROS_INIT, ones = KN_ONES_INIT;
    if (channels < 1)
        return kn_fail("kn_batch_norm_init: '%s' has %lld channels; at least 1 is needed", name,
                       (long long)channels);
    if (!(kn_value_or(o.eps, 1e-5) >= 0 && isfinite(o.eps)))
        return kn_fail("kn_batch_norm_init: '%s' has eps %g, should be at least 0 (KN_ZERO for 0)",
                       name, o.eps);
    if (!(kn_value_or(o.momentum, 0.1) >= 0 && o.momentum <= 1))
        return kn_fail(
            "kn_batch_norm_init: '%s' has momentum %g, should lie in [0, 1] (KN_ZERO for 0)", name,
            o.momentum);
    if (!kn_layer_begin(b, parent, name, batchnorm_forward, "batchnorm", &o, sizeof o))
        return false;
    const kn_dtype stat = kn_dtype_in(b->base.impl, o.dtype) == KN_F64 ? KN_F64 : KN_F32;
    if (!o.no_affine && (!kn_parameter(b, "weight", o.dtype, o.device, ones, 1, &channels) ||
                         !kn_parameter(b, "bias", o.dtype, o.device, zeros, 1, &channels)))
        return false;
    return o.no_running ||
           (kn_declare_buffer(b, "running_mean", stat, o.device, zeros, 1, &channels) &&
            kn_declare_buffer(b, "running_var", stat, o.device, ones, 1, &channels) &&
            kn_declare_buffer(b, "num_batches_tracked", KN_I64, o.device, zeros, KN_SCALAR));
}
