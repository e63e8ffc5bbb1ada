/* examples/convnet.c: convolutions and batch norm on MNIST, sharded over the ranks: convnet
 * [--ranks N] [--steps N] [--out DIR] [--from DIR]. Ends with the accuracy on the test images. */
#include <knap.h>
#include <stddef.h>

typedef struct convnet {
    kn_module base;
    kn_conv2d conv1, conv2;
    kn_batch_norm bn1, bn2;
    kn_linear fc;
} convnet;

static kn_tensor *convnet_forward(kn_module *self, kn_tensor *x) /* (B, 784) -> (B, 10) */
{
    convnet *n = (convnet *)self;
    x = kn_reshape(x, KN_SHAPE(-1, 1, 28, 28));
    x = kn_relu(kn_call(&n->bn1, kn_call(&n->conv1, x)));
    x = kn_max_pool2d(x, .kernel = 2); /* (B, 16, 14, 14) */
    x = kn_relu(kn_call(&n->bn2, kn_call(&n->conv2, x)));
    x = kn_max_pool2d(x, .kernel = 2); /* (B, 32, 7, 7) */
    return kn_call(&n->fc, kn_flatten(x, 1, -1));
}

static void convnet_init(convnet *n)
{
    kn_module_init(&n->base, convnet_forward);
    kn_module_defaults(n, .device = KN_META); /* no bytes yet */
    kn_conv2d_init(&n->conv1, &n->base, "conv1", 1, 16, 3, .pad = 1, .no_bias = true);
    kn_batch_norm_init(&n->bn1, &n->base, "bn1", 16);
    kn_conv2d_init(&n->conv2, &n->base, "conv2", 16, 32, 3, .pad = 1, .no_bias = true);
    kn_batch_norm_init(&n->bn2, &n->base, "bn2", 32);
    kn_linear_init(&n->fc, &n->base, "fc", 32 * 7 * 7, 10);
}

/* Every rank classifies all 10000 test images with its own running statistics. */
static double accuracy(convnet *n)
{
    kn_loader *test = kn_mnist("test", NULL, .batch = 500);
    double right = 0;
    kn_train(n, false);
    bool grad = kn_set_grad_mode(false);
    for (int i = 0; i < 20 && kn_ok(); i++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(test);
        kn_tensor *hit = kn_eq(kn_argmax(kn_call(n, b.x), 1), b.y);
        right += kn_item(kn_sum(kn_cast(hit, KN_F32), 0, NULL, false));
        kn_scope_end(scope);
    }
    kn_set_grad_mode(grad);
    kn_train(n, true);
    kn_loader_free(test);
    return right / 100;
}

typedef struct settings {
    int64_t steps, stop;
    const char *out, *from;
} settings;

static void train(convnet *net, kn_optim *opt, kn_loader *data, int64_t step, const settings *s)
{
    for (; step < s->stop && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data);
        kn_tensor *loss = kn_cross_entropy(kn_call(net, b.x), b.y);
        kn_backward(loss);
        kn_set_lr(opt, 4e-3 * (1 - (double)step / (double)s->steps));
        kn_step(opt);
        if (kn_ok() && kn_rank(kn_world()) == 0 && (step % 50 == 0 || step == s->steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
}

/* Loads parameters, batch norm's statistics and AdamW's state; returns their step. */
static int64_t load(convnet *net, kn_optim *opt, kn_loader *data, const char *folder)
{
    kn_checkpoint *c = kn_checkpoint_open(folder, NULL);
    int64_t step = c && kn_checkpoint_load(c, net, .optim = opt) ? kn_checkpoint_step(c) : 0;
    kn_set_step(step);
    kn_loader_seek(data, step);
    kn_checkpoint_free(c);
    return step;
}

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "300", "until the learning rate is 0",
          .min = 1, .max = 1e9 },
        { "stop", KN_OPTION_INT, offsetof(settings, stop), "0", "stop after this many of them",
          .max = 1e9, .note = "all" },
        { "out", KN_OPTION_PATH, offsetof(settings, out), NULL, "folder to save into" },
        { "from", KN_OPTION_PATH, offsetof(settings, from), NULL, "folder to continue from" },
        { 0 },
    };
    settings s = { 0 };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads; else 1 rank */
    kn_options *options =
        kn_options_main(table, &s, argc, argv, "A convolutional net learns MNIST.");
    if (!options) /* --help, or an error */
        return kn_finish();
    s.stop = s.stop && s.stop < s.steps ? s.stop : s.steps;
    convnet net = { 0 };
    convnet_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "conv2d,linear", .seed = 42);
    kn_optim *opt = kn_adamw(&net, .lr = 4e-3, .weight_decay = 0.01);
    kn_loader *data = kn_mnist("train", world, .batch = 64, .shuffle = true);
    int64_t begin = s.from ? load(&net, opt, data, s.from) : 0;
    train(&net, opt, data, begin, &s);
    if (s.out)
        kn_checkpoint_save(s.out, &net, .optim = opt, .step = s.stop);
    double right = accuracy(&net);
    if (kn_rank(world) == 0 && kn_ok())
        printf("%.2f %% of the test images\n", right);
    kn_optim_free(opt), kn_loader_free(data), kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
