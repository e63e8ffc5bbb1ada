/* examples/maml.c: a net learns to learn: maml [--ranks N] [--steps N]
 *
 * Model-agnostic meta-learning (Finn et al., arXiv:1703.03400) of sine waves: a task is a wave, of
 * which the net sees 10 points and takes one step of descent; the loss is that of the stepped net
 * at 10 others. Its gradient goes through the step, which is made of gradients with a graph. */
#include <knap.h>
#include <math.h>

enum { POINTS = 10, WIDTH = 40, WEIGHTS = 6, MICRO = 4 }; /* MICRO tasks a step */

typedef struct net {
    kn_module base;
    kn_tensor *w[WEIGHTS]; /* weight and bias of three layers */
} net;

static kn_tensor *predict(kn_tensor *const *w, kn_tensor *x) /* (POINTS, 1) -> (POINTS, 1) */
{
    x = kn_relu(kn_linear(x, w[0], w[1], false));
    return kn_linear(kn_relu(kn_linear(x, w[2], w[3], false)), w[4], w[5], false);
}

/* The loss of a task (x and x of other points, their y) after a step. */
static kn_tensor *adapt(kn_module *self, kn_tensor *task) /* (4 POINTS, 1) -> () */
{
    kn_tensor *v[4], *w[WEIGHTS], *g[WEIGHTS];
    kn_chunk(task, 0, 4, v);
    for (int i = 0; i < WEIGHTS; i++) /* results: the gradients of parameters lie in shards */
        w[i] = kn_scale(((net *)self)->w[i], 1);
    kn_grad_of(kn_mse_loss(predict(w, v[0]), v[2]), w, WEIGHTS, g, .create_graph = true);
    for (int i = 0; i < WEIGHTS; i++)
        w[i] = kn_add_scaled(w[i], g[i], -0.01);
    return kn_mse_loss(predict(w, v[1]), v[3]);
}

static void net_init(net *m)
{
    static const int64_t size[] = { 1, WIDTH, WIDTH, 1 };
    kn_module_init(&m->base, adapt);
    for (int i = 0; i < WEIGHTS; i++) {
        const int64_t in = size[i / 2], out = size[i / 2 + 1];
        m->w[i] = kn_parameter(&m->base, (char[]){ 'w', (char)('0' + i), 0 }, KN_F32, KN_META,
                               KN_NORMAL_INIT(i % 2 ? 0 : 1 / sqrt((double)in)), 2 - i % 2,
                               (int64_t[]){ out, in });
    }
}

/* A wave a sin(x + b), at points in [-5, 5). */
static kn_tensor *loss_of(net *m, uint64_t micro)
{
    kn_tensor *wave = kn_rand(KN_F32, KN_CPU, 1, micro, KN_SHAPE(2, 1));
    kn_tensor *x = kn_rand(KN_F32, KN_CPU, 2, micro, KN_SHAPE(2 * POINTS, 1));
    x = kn_add_scalar(kn_scale(x, 10), -5);
    kn_tensor *a = kn_add_scalar(kn_scale(kn_slice(wave, 0, 0, 1), 4.9), 0.1);
    kn_tensor *y = kn_mul(a, kn_sin(kn_add(x, kn_scale(kn_slice(wave, 0, 1, 2), M_PI))));
    return kn_call(m, kn_cat((kn_tensor *[]){ x, y }, 2, 0));
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "1000", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options =
        kn_options_main(table, &steps, argc, argv, "A net learns to learn waves.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    net m = { 0 };
    net_init(&m);
    kn_fsdp_wrap(&m, world, .seed = 42);
    kn_optim *opt = kn_adamw(&m, .lr = 1e-3, .weight_decay = KN_ZERO);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        double sum = 0;
        for (int64_t k = kn_rank(world); k < MICRO; k += kn_comm_size(world)) {
            kn_scope scope = kn_scope_begin();
            kn_tensor *loss = loss_of(&m, (uint64_t)(step * MICRO + k));
            kn_backward(loss);
            sum += kn_item(loss);
            kn_scope_end(scope);
        }
        kn_step(opt);
        sum = kn_sum_over_ranks(world, sum) / MICRO;
        if (kn_ok() && kn_rank(world) == 0 && (step % 100 == 0 || step == steps - 1))
            printf("step %4d  loss %.5f\n", (int)step, sum);
    }
    kn_optim_free(opt), kn_module_free(&m), kn_options_free(options);
    return kn_finish();
}
