/* examples/diffusion.c: a diffusion model learns to draw digits: diffusion [--ranks N] [--steps N]
 * [--out FILE.png]
 *
 * DDPM (Ho et al., arXiv:2006.11239): a small U-Net learns to tell the noise in a noisy digit of
 * MNIST, x_t = sqrt(a_t) x + sqrt(1 - a_t) noise for a random time t; digits are then drawn by
 * taking it away from pure noise, time by time. */
#include <knap.h>
#include <math.h>
#include <stddef.h>

enum { BATCH = 32, MICRO = 2 }; /* MICRO batches a step */
enum { TIMES = 100, WIDTH = 16, EMBD = 64 };

/* ---- the model: images (B, 1, 28, 28) and times (B) -> their noise --------------------------- */

typedef struct block {
    kn_module base;
    kn_group_norm norm1, norm2;
    kn_conv2d conv1, conv2, skip;
    kn_linear time;
} block;

static kn_values block_forward(kn_module *self, kn_values in, const void *arg) /* x, time -> y */
{
    block *b = (block *)self;
    (void)arg;
    kn_tensor *x = in.v[0], *time = kn_call(&b->time, in.v[1]);
    kn_tensor *y = kn_call(&b->conv1, kn_silu(kn_call(&b->norm1, x)));
    y = kn_add(y, kn_unsqueeze(kn_unsqueeze(time, -1), -1));
    y = kn_call(&b->conv2, kn_silu(kn_call(&b->norm2, y)));
    return KN_VALUES(kn_add(kn_call(&b->skip, x), y));
}

static void block_init(block *b, kn_module *parent, const char *name, int64_t in, int64_t out)
{
    kn_module_init_n(&b->base, block_forward);
    kn_module_add(parent, name, &b->base);
    kn_group_norm_init(&b->norm1, &b->base, "norm1", 4, in);
    kn_conv2d_init(&b->conv1, &b->base, "conv1", in, out, 3, .pad = 1);
    kn_linear_init(&b->time, &b->base, "time", EMBD, out);
    kn_group_norm_init(&b->norm2, &b->base, "norm2", 4, out);
    kn_conv2d_init(&b->conv2, &b->base, "conv2", out, out, 3, .pad = 1);
    kn_conv2d_init(&b->skip, &b->base, "skip", in, out, 1);
}

typedef struct unet {
    kn_module base;
    kn_linear time1, time2;
    kn_conv2d in, out;
    block down1, down2, up1, up2;
} unet;

/* Sines and cosines of the times, at EMBD / 2 frequencies from 1 to 1 / 10000: (B, EMBD) */
static kn_tensor *waves(kn_tensor *time)
{
    kn_tensor *i = kn_arange(KN_F32, kn_device_of(time), EMBD / 2);
    kn_tensor *frequency = kn_exp(kn_scale(i, -log(10000) / (EMBD / 2)));
    kn_tensor *angle = kn_mul(kn_unsqueeze(kn_cast(time, KN_F32), 1), frequency);
    kn_tensor *both[] = { kn_sin(angle), kn_cos(angle) };
    return kn_cat(both, 2, 1);
}

static kn_tensor *halved(kn_tensor *x)
{
    return kn_avg_pool2d(x, .kernel = 2);
}

/* x at twice its size, and beside it y, which has that size: (B, C of x + C of y, H, W) */
static kn_tensor *doubled(kn_tensor *x, kn_tensor *y)
{
    kn_tensor *both[] = { kn_interpolate(x, .scale = 2), y };
    return kn_cat(both, 2, 1);
}

static kn_values unet_forward(kn_module *self, kn_values in, const void *arg)
{
    unet *u = (unet *)self;
    (void)arg;
    kn_tensor *time = kn_call(&u->time2, kn_silu(kn_call(&u->time1, waves(in.v[1]))));
    time = kn_silu(time);
    kn_tensor *x = kn_call(&u->in, in.v[0]);                 /* 28 x 28 */
    kn_tensor *y = kn_call_with(&u->down1, halved(x), time); /* 14 x 14 */
    kn_tensor *z = kn_call_with(&u->down2, halved(y), time); /* 7 x 7 */
    y = kn_call_with(&u->up1, doubled(z, y), time);
    x = kn_call_with(&u->up2, doubled(y, x), time);
    return KN_VALUES(kn_call(&u->out, x));
}

static void unet_init(unet *u)
{
    kn_module_init_n(&u->base, unet_forward);
    kn_module_defaults(u, .device = KN_META); /* no bytes yet */
    kn_linear_init(&u->time1, &u->base, "time1", EMBD, EMBD);
    kn_linear_init(&u->time2, &u->base, "time2", EMBD, EMBD);
    kn_conv2d_init(&u->in, &u->base, "in", 1, WIDTH, 3, .pad = 1);
    block_init(&u->down1, &u->base, "down1", WIDTH, 2 * WIDTH);
    block_init(&u->down2, &u->base, "down2", 2 * WIDTH, 2 * WIDTH);
    block_init(&u->up1, &u->base, "up1", 4 * WIDTH, 2 * WIDTH);
    block_init(&u->up2, &u->base, "up2", 3 * WIDTH, WIDTH);
    kn_conv2d_init(&u->out, &u->base, "out", WIDTH, 1, 3, .pad = 1);
}

/* ---- noise ----------------------------------------------------------------------------------- */

/* The part beta of noise that time t adds, and the part a of the digit that is left after it. */
typedef struct plan {
    double beta[TIMES], left[TIMES];
} plan;

static plan plan_of(void)
{
    plan p;
    for (int t = 0; t < TIMES; t++) {
        p.beta[t] = 1e-3 + (0.2 - 1e-3) * t / (TIMES - 1);
        p.left[t] = (1 - p.beta[t]) * (t ? p.left[t - 1] : 1);
    }
    return p;
}

/* How far the net is from the noise in a micro-batch; backward has run. */
static double learn(unet *net, const plan *p, kn_loader *data, int64_t micro)
{
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_reshape(kn_next(data).x, KN_SHAPE(-1, 1, 28, 28));
    x = kn_add_scalar(kn_scale(x, 2), -1);
    kn_tensor *left = kn_cast(kn_from(KN_F64, KN_CPU, p->left, KN_SHAPE(TIMES, 1, 1, 1)), KN_F32);
    kn_tensor *time = kn_randint(KN_I64, KN_CPU, 0, TIMES, 1, (uint64_t)micro, KN_SHAPE(BATCH));
    kn_tensor *noise = kn_randn(KN_F32, KN_CPU, 2, (uint64_t)micro, kn_ndim(x), kn_shape(x));
    left = kn_index_select(left, 0, time); /* (B, 1, 1, 1) */
    x = kn_add(kn_mul(kn_sqrt(left), x), kn_mul(kn_sqrt(kn_add_scalar(kn_neg(left), 1)), noise));
    kn_tensor *loss = kn_mse_loss(kn_call_with(net, x, time), noise);
    kn_backward(loss);
    double value = kn_item(loss);
    kn_scope_end(scope);
    return value;
}

/* Digits (count, 1, 28, 28) out of noise. Collective: every rank draws the same ones. */
static kn_tensor *drawn(unet *net, const plan *p, int64_t count)
{
    const int64_t shape[] = { count, 1, 28, 28 };
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 3, TIMES, 4, shape);
    bool mode = kn_set_grad_mode(false);
    for (int t = TIMES - 1; t >= 0 && kn_ok(); t--) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *time = kn_full(KN_I64, KN_CPU, t, KN_SHAPE(count));
        kn_tensor *noise = kn_call_with(net, x, time);
        kn_tensor *y = kn_add_scaled(x, noise, -p->beta[t] / sqrt(1 - p->left[t]));
        y = kn_scale(y, 1 / sqrt(1 - p->beta[t]));
        if (t > 0)
            y = kn_add_scaled(y, kn_randn(KN_F32, KN_CPU, 3, (uint64_t)t, 4, shape),
                              sqrt(p->beta[t]));
        kn_copy_(x, y);
        kn_scope_end(scope);
    }
    kn_set_grad_mode(mode);
    return x;
}

/* ---- the program ----------------------------------------------------------------------------- */

static void train(unet *net, const plan *p, kn_comm *world, int64_t steps)
{
    kn_optim *opt = kn_adamw(net, .lr = 2e-3);
    kn_ema *ema = kn_ema_new(net, .decay = 0.99, .warmup = 10);
    kn_loader *data = kn_mnist("train", world, .batch = BATCH, .shuffle = true);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        double loss = 0;
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world))
            loss += learn(net, p, data, step * MICRO + k);
        kn_step(opt);
        kn_ema_update(ema);
        loss = kn_sum_over_ranks(world, loss) / MICRO;
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, loss);
    }
    kn_ema_swap(ema); /* the net draws with the average of its weights */
    kn_optim_free(opt), kn_ema_free(ema), kn_loader_free(data);
}

typedef struct settings {
    int64_t steps;
    const char *out;
} settings;

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "300", "to train", .max = 1e9 },
        { "out", KN_OPTION_PATH, offsetof(settings, out), NULL, "a PNG of 16 digits to write" },
        { 0 },
    };
    settings s = { 0 };
    unet net = { 0 };
    const plan p = plan_of();
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &s, argc, argv, "A DDPM learns MNIST.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    unet_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "block", .seed = 42);
    train(&net, &p, world, s.steps);
    kn_tensor *digits = s.out ? drawn(&net, &p, 16) : NULL;
    if (digits && kn_rank(world) == 0)
        kn_image_save(s.out, digits, .low = -1, .high = 1);
    kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
