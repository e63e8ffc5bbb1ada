/* examples/pinn.c: a net is the solution of an equation: pinn [--ranks N] [--steps N]
 *
 * Burgers' equation u_t + u u_x = nu u_xx with u(0, x) = -sin(pi x) and u(t, -1) = u(t, 1) = 0
 * (Raissi et al., arXiv:1711.10561): the loss is how far u = net(t, x) is from it at random points.
 * Derivatives of u are gradients with a graph (.create_graph); the loss is made of them. */
#include <knap.h>
#include <math.h>

enum { POINTS = 64, WIDTH = 32, MICRO = 4 }; /* MICRO sets of points a step */

typedef struct net {
    kn_module base;
    kn_linear in, mid, out;
} net;

static kn_values net_forward(kn_module *self, kn_values in, const void *arg) /* t, x (N, 1) -> u */
{
    net *m = (net *)self;
    kn_tensor *h = kn_tanh(kn_call(&m->in, kn_cat(in.v, 2, 1)));
    (void)arg;
    return KN_VALUES(kn_call(&m->out, kn_tanh(kn_call(&m->mid, h))));
}

static void net_init(net *m)
{
    kn_module_init_n(&m->base, net_forward);
    kn_module_defaults(m, .device = KN_META); /* no bytes yet */
    kn_linear_init(&m->in, &m->base, "fc_in", 2, WIDTH);
    kn_linear_init(&m->mid, &m->base, "mid", WIDTH, WIDTH);
    kn_linear_init(&m->out, &m->base, "out", WIDTH, 1);
}

/* du / dx at each point */
static kn_tensor *slope(kn_tensor *u, kn_tensor *x)
{
    kn_tensor *g;
    kn_grad_of(u, &x, 1, &g, .grad = kn_ones_like(u), .create_graph = true);
    return g;
}

static kn_tensor *loss_of(net *m, uint64_t micro)
{
    kn_tensor *x = kn_rand(KN_F32, KN_CPU, 2, micro, KN_SHAPE(POINTS, 1));
    kn_tensor *t = kn_require_grad(kn_rand(KN_F32, KN_CPU, 1, micro, KN_SHAPE(POINTS, 1)), true);
    x = kn_require_grad(kn_add_scalar(kn_scale(x, 2), -1), true);
    kn_tensor *u = kn_call_with(m, t, x), *u_x = slope(u, x), *u_xx = slope(u_x, x);
    kn_tensor *off = kn_sub(kn_add(slope(u, t), kn_mul(u, u_x)), kn_scale(u_xx, 0.01 / M_PI));
    kn_tensor *begin = kn_add(kn_call_with(m, kn_zeros_like(t), x), kn_sin(kn_scale(x, M_PI)));
    kn_tensor *edge = kn_call_with(m, t, kn_sign(x)), *part[] = { off, begin, edge };
    return kn_mean(kn_square(kn_cat(part, 3, 1)), 0, NULL, false);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "500", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options =
        kn_options_main(table, &steps, argc, argv, "A net solves Burgers' equation.");
    if (!options) /* --help, or an error */
        return kn_finish();
    if (MICRO % kn_comm_size(world))
        kn_fail("%d micro-batches don't divide among %d ranks", MICRO, kn_comm_size(world));
    net m = { 0 };
    net_init(&m);
    kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = 42);
    kn_optim *opt = kn_adamw(&m, .lr = 5e-3, .weight_decay = KN_ZERO);
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
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.6f\n", (int)step, sum);
    }
    kn_optim_free(opt), kn_module_free(&m), kn_options_free(options);
    return kn_finish();
}
