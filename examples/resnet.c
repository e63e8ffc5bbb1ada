/* examples/resnet.c: a residual net on MNIST: resnet [--ranks N] [--steps N]
 *
 * Blocks of two convolutions with batch norm beside a shortcut, which is a convolution where size
 * or channels change (He et al., arXiv:1512.03385). */
#include <knap.h>

enum { BLOCKS = 3, WIDTH = 8, BATCH = 32 };

typedef struct block {
    kn_module base;
    kn_conv2d conv1, conv2, down;
    kn_batch_norm bn1, bn2, bn_down;
    bool changes; /* has a shortcut of its own */
} block;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    kn_tensor *y = kn_relu(kn_call(&b->bn1, kn_call(&b->conv1, x)));
    y = kn_call(&b->bn2, kn_call(&b->conv2, y));
    return kn_relu(kn_add(y, b->changes ? kn_call(&b->bn_down, kn_call(&b->down, x)) : x));
}

static void block_init(block *b, kn_module *parent, const char *name, int64_t in, int64_t out)
{
    const int64_t stride = in == out ? 1 : 2;
    kn_module_init(&b->base, block_forward);
    kn_module_add(parent, name, &b->base);
    kn_conv2d_init(&b->conv1, &b->base, "conv1", in, out, 3, .stride = stride, .pad = 1,
                   .no_bias = true);
    kn_batch_norm_init(&b->bn1, &b->base, "bn1", out);
    kn_conv2d_init(&b->conv2, &b->base, "conv2", out, out, 3, .pad = 1, .no_bias = true);
    kn_batch_norm_init(&b->bn2, &b->base, "bn2", out);
    b->changes = stride != 1;
    if (b->changes) {
        kn_conv2d_init(&b->down, &b->base, "down", in, out, 1, .stride = stride, .no_bias = true);
        kn_batch_norm_init(&b->bn_down, &b->base, "bn_down", out);
    }
}

typedef struct resnet {
    kn_module base;
    kn_conv2d conv;
    kn_batch_norm bn;
    block block[BLOCKS];
    kn_linear fc;
} resnet;

static kn_tensor *resnet_forward(kn_module *self, kn_tensor *x) /* (B, 784) -> (B, 10) */
{
    resnet *n = (resnet *)self;
    x = kn_reshape(x, KN_SHAPE(-1, 1, 28, 28));
    x = kn_relu(kn_call(&n->bn, kn_call(&n->conv, x)));
    for (int i = 0; i < BLOCKS; i++)
        x = kn_call(&n->block[i], x);
    return kn_call(&n->fc, kn_mean(x, KN_SHAPE(2, 3), false));
}

static void resnet_init(resnet *n)
{
    kn_module_init(&n->base, resnet_forward);
    kn_module_defaults(n, .device = KN_META); /* no bytes yet */
    kn_conv2d_init(&n->conv, &n->base, "conv", 1, WIDTH, 3, .pad = 1, .no_bias = true);
    kn_batch_norm_init(&n->bn, &n->base, "bn", WIDTH);
    block_init(&n->block[0], &n->base, "block0", WIDTH, WIDTH);
    block_init(&n->block[1], &n->base, "block1", WIDTH, 2 * WIDTH);
    block_init(&n->block[2], &n->base, "block2", 2 * WIDTH, 4 * WIDTH);
    kn_linear_init(&n->fc, &n->base, "fc", 4 * WIDTH, 10);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "300", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &steps, argc, argv, "A ResNet learns MNIST.");
    if (!options) /* --help, or an error */
        return kn_finish();
    resnet net = { 0 };
    resnet_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "block", .seed = 42);
    kn_optim *opt = kn_sgd(&net, .lr = 0.05, .momentum = 0.9, .weight_decay = 5e-4);
    kn_loader *data = kn_mnist("train", world, .batch = BATCH, .shuffle = true);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data);
        kn_tensor *loss = kn_cross_entropy(kn_call(&net, b.x), b.y);
        kn_backward(loss);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_loader_free(data), kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
