/* examples/optimizer.c: an optimizer of one's own: optimizer [--ranks N] [--steps N]
 *
 * AdaBelief (Zhuang et al., arXiv:2010.07468) steps far where gradients come as expected:
 *
 *   m += (1 - b1)(g - m);  s += (1 - b2)((g - m)^2 - s)
 *   p -= lr (m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps) + weight_decay p)
 *
 * Its update sees parts of parameters: those of one process and those of a shard get the same
 * bits. */
#include <knap.h>
#include <math.h>

static bool adabelief(const kn_optim_part *p, void *arg)
{
    const double *beta = arg, t = (double)p->step;
    kn_tensor *m = p->state[0], *s = p->state[1];
    kn_copy_(m, kn_add(m, kn_scale(kn_sub(p->grad, m), 1 - beta[0])));
    kn_tensor *surprise = kn_pow(kn_sub(p->grad, m), 2);
    kn_copy_(s, kn_add(s, kn_scale(kn_sub(surprise, s), 1 - beta[1])));
    kn_tensor *size = kn_add_scalar(kn_sqrt(kn_scale(s, 1 / (1 - pow(beta[1], t)))), 1e-8);
    kn_tensor *step = kn_div(kn_scale(m, 1 / (1 - pow(beta[0], t))), size);
    step = kn_add(step, kn_scale(p->param, p->weight_decay));
    return kn_copy_(p->param, kn_sub(p->param, kn_scale(step, p->lr)));
}

/* ---- a net, and its training ----------------------------------------------------------------- */

enum { BATCH = 64, IN = 32, HIDDEN = 64, CLASSES = 4 };

typedef struct mlp {
    kn_module base;
    kn_linear fc1, fc2;
} mlp;

static kn_tensor *mlp_forward(kn_module *self, kn_tensor *x) /* (B, IN) -> (B, CLASSES) */
{
    mlp *m = (mlp *)self;
    return kn_call(&m->fc2, kn_relu(kn_call(&m->fc1, x)));
}

/* Random points, labelled by a fixed random linear map. */
static kn_tensor *loss_of(mlp *net, uint64_t micro)
{
    kn_tensor *teacher = kn_randn(KN_F32, KN_CPU, 1, 0, KN_SHAPE(CLASSES, IN));
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 2, micro, KN_SHAPE(BATCH, IN));
    kn_tensor *y = kn_argmax(kn_linear(x, teacher, NULL, false), 1);
    return kn_cross_entropy(kn_call(net, x), y);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "300", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options = kn_options_main(table, &steps, argc, argv, "Trains with AdaBelief.");
    if (!options) /* --help, or an error */
        return kn_finish();
    mlp net = { 0 };
    double beta[] = { 0.9, 0.999 };
    kn_module_init(&net.base, mlp_forward);
    kn_linear_init(&net.fc1, &net.base, "fc1", IN, HIDDEN, .device = KN_META);
    kn_linear_init(&net.fc2, &net.base, "fc2", HIDDEN, CLASSES, .device = KN_META);
    kn_fsdp_wrap(&net, world, .wrap_class = "linear", .seed = 42);
    kn_optim *opt =
        kn_own_optim(&net, .name = "adabelief", .update = adabelief, .arg = beta,
                     .state = { "exp_avg", "exp_avg_var" }, .lr = 3e-3, .weight_decay = 0.01);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = loss_of(&net, (uint64_t)(step * kn_comm_size(world) + kn_rank(world)));
        kn_backward(loss);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
