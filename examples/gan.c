/* examples/gan.c: a DCGAN learns to write digits: gan [--ranks N] [--steps N] [--out FILE.png]
 *
 * Two nets, two losses, two optimizers (Goodfellow et al., arXiv:1406.2661; Radford et al.,
 * arXiv:1511.06434): the discriminator tells MNIST's digits from made ones, and the generator
 * makes digits of noise that the discriminator takes for real. */
#include <knap.h>
#include <stddef.h>

enum { NOISE = 64, WIDTH = 32, BATCH = 32, MICRO = 2 }; /* MICRO batches a step */

typedef struct generator {
    kn_module base;
    kn_conv_transpose2d up1, up2, up3;
    kn_batch_norm bn1, bn2;
} generator;

static kn_tensor *generator_forward(kn_module *self, kn_tensor *z) /* noise -> (B, 1, 28, 28) */
{
    generator *g = (generator *)self;
    kn_tensor *x = kn_reshape(z, KN_SHAPE(-1, NOISE, 1, 1));
    x = kn_relu(kn_call(&g->bn1, kn_call(&g->up1, x))); /* 7 x 7 */
    x = kn_relu(kn_call(&g->bn2, kn_call(&g->up2, x))); /* 14 x 14 */
    return kn_tanh(kn_call(&g->up3, x));
}

typedef struct discriminator {
    kn_module base;
    kn_conv2d down1, down2, down3;
    kn_batch_norm bn;
} discriminator;

static kn_tensor *discriminator_forward(kn_module *self, kn_tensor *x) /* images -> logits (B) */
{
    discriminator *d = (discriminator *)self;
    x = kn_leaky_relu(kn_call(&d->down1, x), .slope = 0.2);                  /* 14 x 14 */
    x = kn_leaky_relu(kn_call(&d->bn, kn_call(&d->down2, x)), .slope = 0.2); /* 7 x 7 */
    return kn_flatten(kn_call(&d->down3, x), 0, -1);
}

static void nets_init(generator *g, discriminator *d)
{
    const kn_initializer w = KN_NORMAL_INIT(0.02);
    kn_module_init(&g->base, generator_forward);
    kn_module_defaults(g, .device = KN_META); /* no bytes yet */
    kn_conv_transpose2d_init(&g->up1, &g->base, "up1", NOISE, 2 * WIDTH, 7, .weight = w);
    kn_batch_norm_init(&g->bn1, &g->base, "bn1", 2 * WIDTH);
    kn_conv_transpose2d_init(&g->up2, &g->base, "up2", 2 * WIDTH, WIDTH, 4, .stride = 2, .pad = 1,
                             .weight = w);
    kn_batch_norm_init(&g->bn2, &g->base, "bn2", WIDTH);
    kn_conv_transpose2d_init(&g->up3, &g->base, "up3", WIDTH, 1, 4, .stride = 2, .pad = 1,
                             .weight = w);
    kn_module_init(&d->base, discriminator_forward);
    kn_module_defaults(d, .device = KN_META);
    kn_conv2d_init(&d->down1, &d->base, "down1", 1, WIDTH, 4, .stride = 2, .pad = 1, .weight = w);
    kn_conv2d_init(&d->down2, &d->base, "down2", WIDTH, 2 * WIDTH, 4, .stride = 2, .pad = 1,
                   .weight = w);
    kn_batch_norm_init(&d->bn, &d->base, "bn", 2 * WIDTH);
    kn_conv2d_init(&d->down3, &d->base, "down3", 2 * WIDTH, 1, 7, .weight = w);
}

/* ---- training -------------------------------------------------------------------------------- */

static kn_tensor *noise(int64_t draw, int64_t count)
{
    return kn_randn(KN_F32, KN_CPU, 1, (uint64_t)draw, KN_SHAPE(count, NOISE));
}

/* How far logits are from saying "real" (1) or "made" (0). */
static kn_tensor *loss_of(kn_tensor *logits, double truth)
{
    return kn_binary_cross_entropy_with_logits(logits, kn_full_like(logits, truth));
}

/* The discriminator's loss of one micro-batch; its backward has run. */
static double judge(generator *g, discriminator *d, kn_loader *data, int64_t micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *real = kn_reshape(kn_next(data).x, KN_SHAPE(-1, 1, 28, 28));
    real = kn_add_scalar(kn_scale(real, 2), -1); /* [0, 1] -> [-1, 1], as tanh gives */
    bool mode = kn_set_grad_mode(false);
    kn_tensor *made = kn_call(g, noise(2 * micro, BATCH));
    kn_set_grad_mode(mode);
    kn_tensor *loss = kn_add(loss_of(kn_call(d, real), 1), loss_of(kn_call(d, made), 0));
    kn_backward(loss);
    double value = kn_item(loss);
    kn_scope_end(scope);
    return value;
}

/* The same of the generator, whose gradients come through the discriminator. */
static double forge(generator *g, discriminator *d, int64_t micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *loss = loss_of(kn_call(d, kn_call(g, noise(2 * micro + 1, BATCH))), 1);
    kn_backward(loss);
    double value = kn_item(loss);
    kn_scope_end(scope);
    return value;
}

static void train(generator *g, discriminator *d, kn_comm *world, int64_t steps)
{
    kn_optim *opt_g = kn_adamw(g, .lr = 1e-3, .beta1 = 0.5, .weight_decay = KN_ZERO),
             *opt_d = kn_adamw(d, .lr = 2e-4, .beta1 = 0.5, .weight_decay = KN_ZERO);
    kn_loader *data = kn_mnist("train", world, .batch = BATCH, .shuffle = true);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        double loss_d = 0, loss_g = 0;
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world))
            loss_d += judge(g, d, data, step * MICRO + k);
        kn_step(opt_d);
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world))
            loss_g += forge(g, d, step * MICRO + k);
        kn_step(opt_g);
        kn_zero_grad(d); /* the generator's loss left some there */
        loss_d = kn_sum_over_ranks(world, loss_d) / MICRO;
        loss_g = kn_sum_over_ranks(world, loss_g) / MICRO;
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  discriminator %.6f  generator %.6f\n", (int)step, loss_d, loss_g);
    }
    kn_optim_free(opt_g), kn_optim_free(opt_d), kn_loader_free(data);
}

typedef struct settings {
    int64_t steps;
    const char *out;
} settings;

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "300", "to train", .max = 1e9 },
        { "out", KN_OPTION_PATH, offsetof(settings, out), NULL, "a PNG of 64 digits to write" },
        { 0 },
    };
    settings s = { 0 };
    generator g = { 0 };
    discriminator d = { 0 };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &s, argc, argv, "A DCGAN learns MNIST.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    nets_init(&g, &d);
    kn_fsdp_wrap(&g, world, .wrap_class = "conv_transpose2d", .seed = 1);
    kn_fsdp_wrap(&d, world, .wrap_class = "conv2d", .seed = 2);
    train(&g, &d, world, s.steps);
    if (s.out && kn_ok()) {
        bool mode = kn_set_grad_mode(false);
        kn_tensor *digits = kn_call(&g, noise(-1, 64)); /* collective: every rank calls it */
        kn_set_grad_mode(mode);
        if (kn_rank(world) == 0)
            kn_image_save(s.out, digits, .low = -1, .high = 1);
    }
    kn_module_free(&g), kn_module_free(&d), kn_options_free(options);
    return kn_finish();
}
