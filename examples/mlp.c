/* examples/mlp.c: an MLP on MNIST, sharded over its ranks: mlp [--ranks N] [--steps N] */
#include <knap.h>

typedef struct mlp {
    kn_module base; /* comes first */
    kn_linear fc1, fc2;
} mlp;

static kn_tensor *mlp_forward(kn_module *self, kn_tensor *x) /* (B, 784) -> (B, 10) */
{
    mlp *m = (mlp *)self;
    return kn_call(&m->fc2, kn_gelu_tanh(kn_call(&m->fc1, x)));
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "1000", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads; else 1 rank */
    kn_options *options = kn_options_main(table, &steps, argc, argv, "An MLP learns MNIST.");
    if (!options) /* --help, or an error */
        return kn_finish();
    mlp net = { 0 };
    kn_module_init(&net.base, mlp_forward);
    kn_module_defaults(&net, .device = KN_META); /* no bytes yet */
    kn_linear_init(&net.fc1, &net.base, "fc1", 784, 512);
    kn_linear_init(&net.fc2, &net.base, "fc2", 512, 10);
    kn_fsdp_wrap(&net, world, .wrap_class = "linear", .seed = 42); /* each rank fills its shard */
    kn_optim *opt = kn_adamw(&net, .lr = 1e-3, .weight_decay = 0.1);
    kn_loader *data = kn_mnist("train", world, .batch = 128, .shuffle = true);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin(); /* owns the tensors made until its end */
        kn_batch b = kn_next(data);        /* x (128, 784) in [0, 1], y (128) */
        kn_tensor *loss = kn_cross_entropy(kn_call(&net, b.x), b.y);
        kn_backward(loss); /* gathers and reductions ride on its callbacks */
        kn_clip_grad_norm(&net, 1.0);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 100 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_loader_free(data), kn_module_free(&net), kn_options_free(options);
    return kn_finish(); /* prints the error that stands, if any */
}
