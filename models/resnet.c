/* models/resnet.c: residual nets (He et al., "Deep Residual Learning for Image Recognition",
 * arXiv:1512.03385) with torchvision's modules:
 *
 *   x = relu(bn1(conv1(x)))                              7x7, stride 2; for small images 3x3
 *   x = max of 3x3 windows, stride 2                     not for small images
 *   x = relu(shortcut(x) + bn2(conv2(relu(bn1(conv1(x))))))    once a block of layer1 to layer4
 *   logits = fc(mean of x over rows and columns)
 *
 * The first block of each stage but the first has stride 2, in its first 3x3 convolution. Its
 * shortcut is a 1x1 convolution with a batch norm ("downsample"), as wherever the number of
 * channels changes; in the nets for CIFAR it has no parameters (the paper's option A). */
#include "models/resnet.h"

#include "kernels/error.h"

#include <math.h>
#include <stdio.h>

enum { STAGES = 4, CONVS = 3 /* in a block, at most */, WIDER = 4 /* a bottleneck's result */ };

typedef struct resnet_block {
    kn_module base;
    kn_conv2d conv[CONVS];
    kn_batch_norm bn[CONVS];
    kn_sequential downsample; /* of .down and .down_bn */
    kn_conv2d down;
    kn_batch_norm down_bn;
    int convs;
    int64_t in, out, stride;
    bool cifar; /* the shortcut has no parameters */
} resnet_block;

typedef struct resnet_state {
    kn_resnet_config config; /* comes first; defaults filled in */
    int blocks;
    kn_conv2d conv1;
    kn_batch_norm bn1;
    kn_module layer[STAGES];
    kn_linear fc;
    resnet_block block[]; /* [blocks] of all stages */
} resnet_state;

/* ---- forward --------------------------------------------------------------------------------- */

static kn_tensor *shortcut(resnet_block *b, kn_tensor *x)
{
    if (b->in == b->out && b->stride == 1)
        return x;
    if (!b->cifar)
        return kn_call(&b->downsample, x);
    int64_t more = b->out - b->in;
    x = b->stride > 1 ? kn_max_pool2d(x, .kernel = 1, .stride = b->stride) : x;
    return kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(0, 0, 0, 0, more / 2, more - more / 2));
}

static kn_tensor *resnet_block_forward(kn_module *self, kn_tensor *x)
{
    resnet_block *b = (resnet_block *)self;
    kn_tensor *y = x;
    for (int i = 0; i < b->convs; i++) {
        y = kn_call(&b->conv[i], y);
        y = kn_batch_norm_relu(&b->bn[i], y, i == b->convs - 1 ? shortcut(b, x) : NULL);
    }
    return y;
}

static kn_tensor *resnet_forward(kn_module *self, kn_tensor *x)
{
    resnet_state *s = kn_module_data(self);
    char buf[128];
    if (kn_ndim(x) != 4 || kn_size(x, 1) != s->config.channels) {
        kn_fail("resnet: images are %s; the net takes [N,%lld,H,W]",
                kn_describe(x, buf, sizeof buf), (long long)s->config.channels);
        return NULL;
    }
    x = kn_batch_norm_relu(&s->bn1, kn_call(&s->conv1, kn_channels_last(x)), NULL);
    if (!s->config.small_images)
        x = kn_max_pool2d(x, .kernel = 3, .stride = 2, .pad = 1);
    for (int i = 0; i < s->blocks; i++)
        x = kn_call(&s->block[i], x);
    return kn_call(&s->fc, kn_mean(x, KN_SHAPE(2, 3), false));
}

/* ---- making ---------------------------------------------------------------------------------- */

/* Convolution number i of b, from 0, and its batch norm. */
static bool conv_init(resnet_block *b, int i, int64_t in, int64_t out, int64_t kernel,
                      int64_t stride, bool zero_gamma)
{
    char name[16];
    snprintf(name, sizeof name, "conv%d", i + 1);
    if (!kn_conv2d_init(&b->conv[i], &b->base, name, in, out, kernel, .stride = stride,
                        .pad = kernel / 2, .no_bias = true,
                        .weight = { .kind = KN_INIT_KAIMING_NORMAL, .a = sqrt(2), .b = 1 }))
        return false;
    snprintf(name, sizeof name, "bn%d", i + 1);
    return kn_batch_norm_init(&b->bn[i], &b->base, name, out,
                              .weight = zero_gamma ? KN_ZEROS_INIT : KN_ONES_INIT);
}

static bool downsample_init(resnet_block *b)
{
    return kn_sequential_init(&b->downsample, &b->base, "downsample") &&
           kn_conv2d_init(&b->down, &b->downsample.base, "0", b->in, b->out, 1, .stride = b->stride,
                          .no_bias = true,
                          .weight = { .kind = KN_INIT_KAIMING_NORMAL, .a = sqrt(2), .b = 1 }) &&
           kn_batch_norm_init(&b->down_bn, &b->downsample.base, "1", b->out);
}

/* The block "index" of stage; width: channels of its 3x3 convolutions. */
static bool block_init(resnet_block *b, kn_module *stage, int index, int64_t width,
                       const kn_resnet_config *c)
{
    const bool zero = !c->plain_gamma;
    char name[16];
    snprintf(name, sizeof name, "%d", index);
    b->cifar = c->cifar;
    b->convs = c->bottleneck ? 3 : 2;
    bool ok = kn_module_init((kn_module *)b, resnet_block_forward) &&
              kn_module_add(stage, name, &b->base);
    if (c->bottleneck)
        ok = ok && conv_init(b, 0, b->in, width, 1, 1, false) &&
             conv_init(b, 1, width, width, 3, b->stride, false) &&
             conv_init(b, 2, width, b->out, 1, 1, zero);
    else
        ok = ok && conv_init(b, 0, b->in, width, 3, b->stride, false) &&
             conv_init(b, 1, width, b->out, 3, 1, zero);
    return ok && ((b->in == b->out && b->stride == 1) || b->cifar || downsample_init(b));
}

static bool stages_init(resnet_state *s, kn_module *root)
{
    const kn_resnet_config *c = &s->config;
    int64_t in = c->width;
    resnet_block *b = s->block;
    for (int k = 0; k < STAGES && c->blocks[k] > 0; k++) {
        char name[16];
        snprintf(name, sizeof name, "layer%d", k + 1);
        if (!kn_module_list_init(&s->layer[k], root, name))
            return false;
        for (int i = 0; i < c->blocks[k]; i++, b++) {
            const int64_t width = c->width << k;
            b->in = in;
            b->out = in = c->bottleneck ? WIDER * width : width;
            b->stride = k > 0 && i == 0 ? 2 : 1;
            if (!block_init(b, &s->layer[k], i, width, c))
                return false;
        }
    }
    return kn_linear_init(&s->fc, root, "fc", in, c->classes);
}

bool kn_resnet_init(kn_resnet *net, kn_resnet_config config, kn_dtype dtype, kn_device device)
{
    if (!kn_ok() || !kn_resnet_config_check(&config))
        return false;
    int blocks = 0;
    for (int k = 0; k < STAGES; k++)
        blocks += config.blocks[k];
    if (!kn_module_init((kn_module *)net, resnet_forward))
        return false;
    size_t size = sizeof(resnet_state) + (size_t)blocks * sizeof(resnet_block);
    if (!kn_module_set_data(net, NULL, size)) {
        kn_module_free(net);
        return false;
    }
    resnet_state *s = kn_module_data(net);
    s->config = config;
    s->blocks = blocks;
    const int64_t kernel = config.small_images ? 3 : 7;
    bool ok =
        kn_module_defaults(net, .dtype = dtype, .device = device) &&
        kn_conv2d_init(&s->conv1, &net->base, "conv1", config.channels, config.width, kernel,
                       .stride = config.small_images ? 1 : 2, .pad = kernel / 2, .no_bias = true,
                       .weight = { .kind = KN_INIT_KAIMING_NORMAL, .a = sqrt(2), .b = 1 }) &&
        kn_batch_norm_init(&s->bn1, &net->base, "bn1", config.width) && stages_init(s, &net->base);
    if (!ok)
        kn_module_free(net);
    return ok;
}
