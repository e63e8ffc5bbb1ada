/* nn/conv.c: layers of images and sequences: convolutions, group norm, instance norm. (Batch norm:
 * batch_norm.c.) */
#include "autograd/ops.h"
#include "autograd/volumes.h"
#include "nn/layers.h"
#include "nn/nn_internal.h"
#include <math.h>
#include <string.h>

/* ---- convolutions ---------------------------------------------------------------------------- */

/* The common part of the layers of convolutions. */
typedef struct conv_plan {
    void *layer;
    kn_module *parent;
    const char *name, *class_name;                         /* of the layer; of its kind: "conv2d" */
    int64_t in, out, kernel[3], groups;                    /* as many as there are dims */
    int64_t stride[4], pad[4], dilation[4], output_pad[4]; /* as given: of all, of each */
    int dims;
    bool transposed, no_bias, same;
    kn_dtype dtype;
    kn_device device;
    kn_initializer weight, bias;
} conv_plan;

static bool check_given(const conv_plan *p, const char *option, const int64_t *given)
{
    for (int i = 0; i < 4; i++)
        if (given[i] < 0)
            return kn_fail(
                "kn_%s_init: '%s' has .%s%s %lld; it must be at least 0 (0: the default)",
                p->class_name, p->name, option, i ? "s" : "", (long long)given[i]);
    return true;
}

static bool check_plan(const conv_plan *p)
{
    char kernel[96] = "";
    bool whole = true;
    for (int d = 0; d < p->dims; d++) {
        const size_t at = strlen(kernel);
        snprintf(kernel + at, sizeof kernel - at, "%s%lld", d ? " x " : "",
                 (long long)p->kernel[d]);
        whole = whole && p->kernel[d] >= 1;
    }
    if (p->in < 1 || p->out < 1 || !whole)
        return kn_fail("kn_%s_init: '%s' would be %lld -> %lld with a kernel of %s; all must be at "
                       "least 1",
                       p->class_name, p->name, (long long)p->in, (long long)p->out, kernel);
    if (!check_given(p, "stride", p->stride) || !check_given(p, "pad", p->pad) ||
        !check_given(p, "dilation", p->dilation) || !check_given(p, "output_pad", p->output_pad))
        return false;
    return (p->groups >= 1 && p->in % p->groups == 0 && p->out % p->groups == 0) ||
           kn_fail("kn_%s_init: '%s' is %lld -> %lld, which %lld groups don't divide",
                   p->class_name, p->name, (long long)p->in, (long long)p->out,
                   (long long)p->groups);
}

static kn_tensor *conv_forward(kn_module *self, kn_tensor *x)
{
    return kn_convolve(x, kn_layer_param(self, 0), kn_layer_param(self, 1), kn_module_data(self));
}

static kn_tensor *conv3d_forward(kn_module *self, kn_tensor *x)
{
    const kn_conv3d_options *o = kn_module_data(self);
    return kn_conv3d_(x, kn_layer_param(self, 0), kn_layer_param(self, 1), *o);
}

static bool begin_volumes(const conv_plan *p)
{
    kn_conv3d_options o = { ._size = sizeof o,
                            .stride = p->stride[0],
                            .pad = p->pad[0],
                            .dilation = p->dilation[0],
                            .groups = p->groups,
                            .same = p->same };
    memcpy(o.strides, p->stride + 1, sizeof o.strides);
    memcpy(o.pads, p->pad + 1, sizeof o.pads);
    memcpy(o.dilations, p->dilation + 1, sizeof o.dilations);
    return kn_layer_begin(p->layer, p->parent, p->name, conv3d_forward, p->class_name, &o,
                          sizeof o);
}

static bool begin_images(const conv_plan *p)
{
    kn_conv_attr a = {
        .dims = p->dims, .transposed = p->transposed, .same = p->same, .groups = p->groups
    };
    kn_conv_numbers(a.stride, p->dims, p->stride[0], p->stride + 1, 1);
    kn_conv_numbers(a.pad, p->dims, p->pad[0], p->pad + 1, 0);
    kn_conv_numbers(a.dilation, p->dims, p->dilation[0], p->dilation + 1, 1);
    kn_conv_numbers(a.output_pad, p->dims, p->output_pad[0], p->output_pad + 1, 0);
    return kn_layer_begin(p->layer, p->parent, p->name, conv_forward, p->class_name, &a, sizeof a);
}

static bool make_conv(const conv_plan *p)
{
    if (!check_plan(p))
        return false;
    const int64_t to = p->transposed ? p->in : p->out, from = p->transposed ? p->out : p->in;
    const int64_t shape[5] = { to, from / p->groups, p->kernel[0], p->kernel[1], p->kernel[2] };
    double terms = 1; /* of a sum, as PyTorch counts them for both kinds */
    for (int d = 1; d < 2 + p->dims; d++)
        terms *= (double)shape[d];
    const kn_initializer d = KN_UNIFORM_INIT(-1 / sqrt(terms), 1 / sqrt(terms));
    return (p->dims == 3 ? begin_volumes : begin_images)(p) &&
           kn_parameter(p->layer, "weight", p->dtype, p->device, kn_init_or(p->weight, d),
                        2 + p->dims, shape) &&
           (p->no_bias || kn_parameter(p->layer, "bias", p->dtype, p->device,
                                       kn_init_or(p->bias, d), 1, &p->out));
}

/* The fields of a plan that the options of all kinds have. */
#define CONV_PLAN(m, o, kind, n)                                                                   \
    .layer = (m), .parent = parent, .name = name, .class_name = kind, .in = in, .out = out,        \
    .dims = (n), .groups = (o).groups ? (o).groups : 1, .no_bias = (o).no_bias,                    \
    .dtype = (o).dtype, .device = (o).device, .weight = (o).weight, .bias = (o).bias,              \
    .stride[0] = (o).stride, .pad[0] = (o).pad, .dilation[0] = (o).dilation
#define CONV_PLAN_2D(m, o, kind)                                                                   \
    CONV_PLAN(m, o, kind, 2),                                                                      \
        .stride[1] = (o).strides[0], .stride[2] = (o).strides[1], .pad[1] = (o).pads[0],           \
        .pad[2] = (o).pads[1], .dilation[1] = (o).dilations[0], .dilation[2] = (o).dilations[1],   \
        .kernel = { kernel ? kernel : (o).kernels[0], kernel ? kernel : (o).kernels[1] }

bool kn_conv2d_init_(kn_conv2d *c, kn_module *parent, const char *name, int64_t in, int64_t out,
                     int64_t kernel, kn_conv2d_init_options o)
{
    return make_conv(&(conv_plan){ CONV_PLAN_2D(c, o, "conv2d"), .same = o.same });
}

bool kn_conv3d_init_(kn_conv3d *c, kn_module *parent, const char *name, int64_t in, int64_t out,
                     int64_t kernel, kn_conv3d_init_options o)
{
    conv_plan p = { CONV_PLAN(c, o, "conv3d", 3), .same = o.same };
    for (int d = 0; d < 3; d++) {
        p.kernel[d] = kernel ? kernel : o.kernels[d];
        p.stride[1 + d] = o.strides[d];
        p.pad[1 + d] = o.pads[d];
        p.dilation[1 + d] = o.dilations[d];
    }
    return make_conv(&p);
}

bool kn_conv1d_init_(kn_conv1d *c, kn_module *parent, const char *name, int64_t in, int64_t out,
                     int64_t kernel, kn_conv1d_init_options o)
{
    return make_conv(
        &(conv_plan){ CONV_PLAN(c, o, "conv1d", 1), .same = o.same, .kernel = { kernel } });
}

bool kn_conv_transpose2d_init_(kn_conv_transpose2d *c, kn_module *parent, const char *name,
                               int64_t in, int64_t out, int64_t kernel,
                               kn_conv_transpose2d_init_options o)
{
    return make_conv(
        &(conv_plan){ CONV_PLAN_2D(c, o, "conv_transpose2d"), .transposed = true,
                      .output_pad = { o.output_pad, o.output_pads[0], o.output_pads[1] } });
}

bool kn_conv_transpose1d_init_(kn_conv_transpose1d *c, kn_module *parent, const char *name,
                               int64_t in, int64_t out, int64_t kernel,
                               kn_conv_transpose1d_init_options o)
{
    return make_conv(&(conv_plan){ CONV_PLAN(c, o, "conv_transpose1d", 1), .transposed = true,
                                   .kernel = { kernel }, .output_pad = { o.output_pad } });
}

/* ---- group norm and instance norm ------------------------------------------------------------ */

typedef struct group_state {
    int64_t groups, channels;
    double eps, momentum; /* of running statistics, where the layer has the buffers */
} group_state;

/* x has the layer's channels, also where no weight says so; other faults are the operation's. */
static bool fits_norm(const kn_module *self, const kn_tensor *x)
{
    const group_state *s = kn_module_data(self);
    return x->ndim < 2 || x->shape[1] == s->channels ||
           kn_fail("%s: the layer is for %lld channels, x is %s", kn_module_class(self),
                   (long long)s->channels, KN_SHOWN(x));
}

static kn_tensor *group_norm_forward(kn_module *self, kn_tensor *x)
{
    const group_state *s = kn_module_data(self);
    return fits_norm(self, x) ? kn_group_norm(x, s->groups, kn_layer_param(self, 0),
                                              kn_layer_param(self, 1), s->eps)
                              : NULL;
}

static kn_tensor *instance_norm_forward(kn_module *self, kn_tensor *x)
{
    const group_state *s = kn_module_data(self);
    const kn_module_impl *m = self->impl;
    const bool tracks = m->buffers > 0;
    if (!fits_norm(self, x))
        return NULL;
    return kn_instance_norm(x, kn_layer_param(self, 0), kn_layer_param(self, 1), s->eps,
                            .running_mean = tracks ? m->buffer[0].tensor : NULL,
                            .running_var = tracks ? m->buffer[1].tensor : NULL,
                            .momentum = s->momentum, .use_running = tracks && !m->training);
}

bool kn_group_norm_init_(kn_group_norm *m, kn_module *parent, const char *name, int64_t groups,
                         int64_t channels, kn_group_norm_init_options o)
{
    const group_state s = { groups, channels, o.eps, 0 };
    if (!kn_norm_fits("group_norm", name, channels, o.eps))
        return false;
    if (groups < 1 || channels % groups)
        return kn_fail("kn_group_norm_init: '%s' has %lld channels, which %lld groups don't divide",
                       name, (long long)channels, (long long)groups);
    return kn_layer_begin(m, parent, name, group_norm_forward, "group_norm", &s, sizeof s) &&
           (o.no_affine || kn_norm_params(m, channels, o.dtype, o.device, KN_ONES_INIT, true));
}

bool kn_instance_norm_init_(kn_instance_norm *m, kn_module *parent, const char *name,
                            int64_t channels, kn_instance_norm_init_options o)
{
    const group_state s = { channels, channels, o.eps, o.momentum };
    if (!kn_norm_fits("instance_norm", name, channels, o.eps))
        return false;
    if (!(kn_value_or(o.momentum, 0.1) >= 0 && o.momentum <= 1) ||
        (o.momentum != 0 && !o.track_running_stats))
        return kn_fail("kn_instance_norm_init: '%s' has momentum %g, should lie in [0, 1] (KN_ZERO "
                       "for 0), and goes with .track_running_stats",
                       name, o.momentum);
    return kn_layer_begin(m, parent, name, instance_norm_forward, "instance_norm", &s, sizeof s) &&
           (!o.affine || kn_norm_params(m, channels, o.dtype, o.device, KN_ONES_INIT, true)) &&
           (!o.track_running_stats || kn_running_stats(m, channels, o.dtype, o.device));
}
