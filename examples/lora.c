/* examples/lora.c: low-rank adapters for the bundled GPT: lora [--ranks N] [--steps N]
 *
 * A small GPT learns a rule that each token follows from the one before. Then its weights are
 * frozen, and adapters beside the first linear layers of attention and MLP learn another rule (Hu
 * et al.: LoRA, arXiv:2106.09685). The GPT's forward doesn't change: it finds an adapter in the
 * layer's place. */
#include <knap.h>

enum { BATCH = 8, CTX = 16, VOCAB = 31, RANK = 8, LAYERS = 2 };

typedef struct adapter {
    kn_module base, *inner; /* the frozen layer */
    kn_tensor *a, *b;       /* [RANK, in], [out, RANK] */
} adapter;

static kn_tensor *adapter_forward(kn_module *self, kn_tensor *x) /* inner(x) + x a^T b^T */
{
    adapter *m = (adapter *)self;
    kn_tensor *low = kn_linear(kn_linear(x, m->a, NULL, false), m->b, NULL, false);
    return kn_add(kn_call(m->inner, x), low);
}

/* Puts m into the place of the layer at path, whose weight is [in, out]. */
static bool adapter_around(adapter *m, void *model, const char *path)
{
    kn_tensor *w = kn_module_param(kn_module_find(model, path), "weight");
    const int64_t in = kn_size(w, 0), out = kn_size(w, 1);
    kn_module_init(&m->base, adapter_forward);
    m->a = kn_parameter(&m->base, "a", KN_F32, KN_CPU, KN_NORMAL_INIT(0.1), KN_SHAPE(RANK, in));
    m->b = kn_parameter(&m->base, "b", KN_F32, KN_CPU, KN_ZEROS_INIT, KN_SHAPE(out, RANK));
    m->inner = kn_module_replace(model, path, m);
    return m->inner && kn_module_add(&m->base, "inner", m->inner);
}

/* ---- training -------------------------------------------------------------------------------- */

/* The loss on sequences that begin anywhere and go on by t -> factor t + 1. */
static kn_tensor *loss_of(kn_gpt *model, int64_t factor, int64_t micro)
{
    int64_t x[BATCH][CTX], y[BATCH][CTX];
    for (int64_t i = 0; i < BATCH; i++)
        for (int64_t t = 0, token = (micro * BATCH + i) * 7 % VOCAB; t < CTX; t++) {
            x[i][t] = token;
            y[i][t] = token = (factor * token + 1) % VOCAB;
        }
    return kn_gpt_loss(model, kn_from(KN_I64, KN_CPU, x, KN_SHAPE(BATCH, CTX)),
                       kn_from(KN_I64, KN_CPU, y, KN_SHAPE(BATCH, CTX)));
}

static void train(kn_gpt *model, kn_comm *comm, kn_comm *world, int64_t factor, int64_t steps)
{
    kn_optim *opt = kn_adamw(model, .lr = 1e-2);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *loss = loss_of(model, factor, step * kn_comm_size(comm) + kn_rank(comm));
        kn_backward(loss);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 50 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = {
        { "steps", KN_OPTION_INT, 0, "100", "of each training", .max = 1e9 }, { 0 }
    };
    kn_comm *world = kn_init(&argc, &argv);
    kn_options *options = kn_options_main(table, &steps, argc, argv, "Adapts a GPT by LoRA.");
    if (!options) /* --help, or an error */
        return kn_finish();
    kn_gpt model = { 0 };
    kn_gpt_config config = { .layers = LAYERS, .heads = 2, .embd = 32, .ctx = CTX, .vocab = VOCAB };
    static const char *const part[] = { "attn.c_attn", "mlp.c_fc" };
    adapter adapters[LAYERS][2];
    kn_gpt_init(&model, config, KN_F32, KN_CPU);
    kn_materialize(&model, KN_CPU, 42);
    train(&model, kn_comm_self(), world, 3,
          steps); /* each rank the same, instead of a checkpoint */

    kn_freeze(&model, true);
    for (int i = 0; i < 2 * LAYERS; i++) {
        char path[64];
        snprintf(path, sizeof path, "transformer.h.%d.%s", i / 2, part[i % 2]);
        adapter_around(&adapters[i / 2][i % 2], &model, path);
    }
    kn_fsdp_wrap(&model, world, .wrap_class = "adapter", .seed = 43);
    if (kn_rank(world) == 0 && kn_ok()) {
        const kn_param *p;
        int64_t trained = 0;
        for (int i = kn_params(&model, &p) - 1; i >= 0; i--)
            trained += p[i].trainable ? p[i].numel : 0;
        printf("%d of %d parameters are trained\n", (int)trained, (int)kn_param_count(&model));
    }
    train(&model, world, world, 5, steps);
    kn_module_free(&model), kn_options_free(options);
    return kn_finish();
}
