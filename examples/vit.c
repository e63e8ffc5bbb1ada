/* examples/vit.c: a vision transformer on MNIST: vit [--ranks N] [--steps N]
 *
 * An image is a sentence of 16 patches of 7 x 7 pixels behind a token of its own, from which its
 * class is read (Dosovitskiy et al., arXiv:2010.11929). */
#include <knap.h>

enum { LAYERS = 3, DIM = 64, HEADS = 4, PATCH = 7, PATCHES = 16, BATCH = 64 };

typedef struct block {
    kn_module base;
    kn_layer_norm norm1, norm2;
    kn_self_attention attn;
    kn_mlp mlp;
} block;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    x = kn_add(x, kn_call(&b->attn, kn_call(&b->norm1, x)));
    return kn_add(x, kn_call(&b->mlp, kn_call(&b->norm2, x)));
}

static void block_init(block *b, kn_module *parent, const char *name)
{
    kn_module_init(&b->base, block_forward);
    kn_module_add(parent, name, &b->base);
    kn_layer_norm_init(&b->norm1, &b->base, "norm1", DIM);
    kn_self_attention_init(&b->attn, &b->base, "attn", DIM, HEADS, .not_causal = true);
    kn_layer_norm_init(&b->norm2, &b->base, "norm2", DIM);
    kn_mlp_init(&b->mlp, &b->base, "mlp", DIM);
}

typedef struct vit {
    kn_module base;
    kn_conv2d patch;
    kn_tensor *token, *position; /* (1, 1, DIM), (1, 1 + PATCHES, DIM) */
    block block[LAYERS];
    kn_layer_norm norm;
    kn_linear head;
} vit;

static kn_tensor *vit_forward(kn_module *self, kn_tensor *x) /* (B, 784) -> (B, 10) */
{
    vit *v = (vit *)self;
    x = kn_call(&v->patch, kn_reshape(x, KN_SHAPE(-1, 1, 28, 28)));
    x = kn_transpose(kn_flatten(x, 2, -1), 1, 2); /* (B, PATCHES, DIM) */
    kn_tensor *all[] = { kn_expand(v->token, KN_SHAPE(kn_size(x, 0), 1, DIM)), x };
    x = kn_add(kn_cat(all, 2, 1), v->position);
    for (int i = 0; i < LAYERS; i++)
        x = kn_call(&v->block[i], x);
    x = kn_squeeze(kn_slice(x, 1, 0, 1), KN_SHAPE(1));
    return kn_call(&v->head, kn_call(&v->norm, x));
}

static void vit_init(vit *v)
{
    static const char *const name[LAYERS] = { "block0", "block1", "block2" };
    const kn_initializer w = KN_NORMAL_INIT(0.02);
    kn_module_init(&v->base, vit_forward);
    kn_module_defaults(v, .device = KN_META); /* no bytes yet */
    kn_conv2d_init(&v->patch, &v->base, "patch", 1, DIM, PATCH, .stride = PATCH);
    v->token = kn_parameter(v, "token", KN_F32, KN_META, w, KN_SHAPE(1, 1, DIM));
    v->position = kn_parameter(v, "position", KN_F32, KN_META, w, KN_SHAPE(1, 1 + PATCHES, DIM));
    for (int i = 0; i < LAYERS; i++)
        block_init(&v->block[i], &v->base, name[i]);
    kn_layer_norm_init(&v->norm, &v->base, "norm", DIM);
    kn_linear_init(&v->head, &v->base, "head", DIM, 10);
}

int main(int argc, char **argv)
{
    int64_t steps;
    const kn_option table[] = { { "steps", KN_OPTION_INT, 0, "500", "to train", .max = 1e9 },
                                { 0 } };
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &steps, argc, argv, "A ViT learns MNIST.");
    if (!options) /* --help, or an error */
        return kn_finish();
    vit net = { 0 };
    vit_init(&net);
    kn_fsdp_wrap(&net, world, .wrap_class = "block", .seed = 42);
    kn_optim *opt = kn_adamw(&net, .lr = 1e-3, .weight_decay = 0.05);
    kn_loader *data = kn_mnist("train", world, .batch = BATCH, .shuffle = true);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data);
        kn_tensor *loss = kn_cross_entropy(kn_call(&net, b.x), b.y, .smoothing = 0.1);
        kn_backward(loss);
        kn_clip_grad_norm(&net, 1.0);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 100 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_loader_free(data), kn_module_free(&net), kn_options_free(options);
    return kn_finish();
}
