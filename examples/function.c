/* examples/function.c: an operation of one's own: function [--ranks N] [--steps N]
 *
 * A net learns with weights of 2 q + 1 values. Each layer has a step s, which is learned as well
 * (Esser et al.: Learned step size quantization, arXiv:1902.08153):
 *
 *   y  = s round(clamp(w / s, -q, q))
 *   dw = dy where |w / s| < q, else 0            rounding counts as the identity
 *   ds = sum of dy (y - w) / s inside, +-q outside */
#include <knap.h>
#include <math.h>

static kn_values quantize_forward(kn_function_run *run, kn_values in) /* w, s [] -> y */
{
    const float q = *(const float *)run->arg;
    kn_tensor *y = kn_empty_like(in.v[0]);
    const float *w = kn_read_data(in.v[0], KN_F32), *s = kn_read_data(in.v[1], KN_F32);
    float *out = kn_write_data(y, KN_F32);
    for (int64_t i = 0; kn_ok() && i < kn_numel(y); i++)
        out[i] = *s * rintf(fminf(fmaxf(w[i] / *s, -q), q));
    kn_save_for_backward(run, in.v[0], in.v[1]);
    return KN_VALUES(y);
}

static kn_values quantize_backward(kn_function_run *run, kn_values dout)
{
    const float q = *(const float *)run->arg;
    kn_tensor *dw = kn_empty_like(run->saved.v[0]), *ds = kn_zeros_like(run->saved.v[1]);
    const float *w = kn_read_data(run->saved.v[0], KN_F32),
                *s = kn_read_data(run->saved.v[1], KN_F32);
    const float *dy = kn_read_data(dout.v[0], KN_F32);
    float *to_w = kn_write_data(dw, KN_F32), *to_s = kn_write_data(ds, KN_F32);
    for (int64_t i = 0; kn_ok() && i < kn_numel(dw); i++) {
        const float v = w[i] / *s;
        to_w[i] = fabsf(v) < q ? dy[i] : 0;
        *to_s += dy[i] * (fabsf(v) < q ? rintf(v) - v : copysignf(q, v));
    }
    return KN_VALUES(dw, ds);
}

static const kn_function quantize = { .name = "quantize",
                                      .forward = quantize_forward,
                                      .backward = quantize_backward };

/* ---- a net that uses it, and its training ---------------------------------------------------- */

enum { BATCH = 64, IN = 32, HIDDEN = 64, CLASSES = 4 };

typedef struct coarse {
    kn_module base;
    kn_tensor *weight, *step; /* [out, in], [] */
    float q;
} coarse;

static kn_tensor *coarse_forward(kn_module *self, kn_tensor *x) /* (B, in) -> (B, out) */
{
    coarse *m = (coarse *)self;
    kn_values in = KN_VALUES(m->weight, m->step);
    return kn_linear(x, kn_function_call_n(&quantize, in, &m->q, sizeof m->q).v[0], NULL, false);
}

static void coarse_init(coarse *m, kn_module *parent, const char *name, int64_t in, int64_t out)
{
    const double deviation = 1 / sqrt((double)in);
    m->q = 1; /* weights are -s, 0 and s */
    kn_module_init(&m->base, coarse_forward);
    kn_module_add(parent, name, &m->base);
    m->weight = kn_parameter(&m->base, "weight", KN_F32, KN_META, KN_NORMAL_INIT(deviation),
                             KN_SHAPE(out, in));
    m->step =
        kn_parameter(&m->base, "step", KN_F32, KN_META, KN_CONSTANT_INIT(deviation), KN_SCALAR);
}

typedef struct mlp {
    kn_module base;
    coarse fc1, fc2;
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
    kn_options *options = kn_options_main(table, &steps, argc, argv, "Weights of three values.");
    if (!options) /* --help, or an error */
        return kn_finish();
    mlp net = { 0 };
    kn_module_init(&net.base, mlp_forward);
    coarse_init(&net.fc1, &net.base, "fc1", IN, HIDDEN);
    coarse_init(&net.fc2, &net.base, "fc2", HIDDEN, CLASSES);
    kn_fsdp_wrap(&net, world, .wrap_class = "coarse", .seed = 42);
    kn_optim *opt = kn_adamw(&net, .lr = 3e-3);
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
