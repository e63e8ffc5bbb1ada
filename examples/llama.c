/* examples/llama.c: a Llama of one's own learns a text: llama [--ranks N] [--steps N] [--data FILE]
 *
 * RMS norms, rotary embeddings, grouped queries, SwiGLU. models/llama.c is the same model with
 * presets and checks. */
#include <knap.h>
#include <stddef.h>

enum { LAYERS = 3, DIM = 96, HEADS = 6, KV_HEADS = 2, HIDDEN = 256, CTX = 64, BATCH = 8 };

typedef struct block {
    kn_module base;
    kn_rms_norm norm1, norm2;
    kn_multi_head_attention attn;
    kn_swiglu mlp;
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
    kn_rms_norm_init(&b->norm1, &b->base, "norm1", DIM);
    kn_multi_head_attention_init(&b->attn, &b->base, "attn", DIM, HEADS, .kv_heads = KV_HEADS,
                                 .rope = true, .causal = true, .no_bias = true);
    kn_rms_norm_init(&b->norm2, &b->base, "norm2", DIM);
    kn_swiglu_init(&b->mlp, &b->base, "mlp", DIM, HIDDEN, .no_bias = true);
}

typedef struct llama {
    kn_module base;
    kn_embedding embed;
    block block[LAYERS];
    kn_rms_norm norm;
    kn_linear head;
} llama;

static kn_tensor *llama_forward(kn_module *self, kn_tensor *ids) /* (B, T) -> (B, T, V) */
{
    llama *m = (llama *)self;
    kn_tensor *x = kn_call(&m->embed, ids);
    for (int i = 0; i < LAYERS; i++)
        x = kn_call(&m->block[i], x);
    return kn_call(&m->head, kn_call(&m->norm, x));
}

static void llama_init(llama *m, int64_t vocab)
{
    static const char *const name[LAYERS] = { "block0", "block1", "block2" };
    kn_module_init(&m->base, llama_forward);
    kn_module_defaults(m, .device = KN_META); /* no bytes yet */
    kn_embedding_init(&m->embed, &m->base, "embed", vocab, DIM, .weight = KN_NORMAL_INIT(0.02));
    for (int i = 0; i < LAYERS; i++)
        block_init(&m->block[i], &m->base, name[i]);
    kn_rms_norm_init(&m->norm, &m->base, "norm", DIM);
    kn_linear_init(&m->head, &m->base, "head", DIM, vocab, .no_bias = true);
}

static void train(llama *m, const kn_text *text, kn_comm *world, int64_t steps)
{
    kn_optim *opt = kn_adamw(m, .lr = 3e-3, .beta2 = 0.95, .weight_decay = 0.1);
    kn_loader *data = kn_text_loader(text, world, .batch = BATCH, .ctx = CTX, .seed = 1);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data);
        kn_tensor *loss = kn_cross_entropy(kn_call(m, b.x), b.y);
        kn_backward(loss);
        kn_clip_grad_norm(m, 1.0);
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 100 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_loader_free(data);
}

typedef struct settings {
    int64_t steps;
    const char *data;
} settings;

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "500", "to train", .max = 1e9 },
        { "data", KN_OPTION_PATH, offsetof(settings, data), "shakespeare", "a text file" },
        { 0 },
    };
    settings s = { 0 };
    llama model = { 0 };
    kn_tokenizer *tokenizer = NULL;
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options = kn_options_main(table, &s, argc, argv, "A small Llama learns a text.");
    if (!options) /* --help, or an error */
        return kn_finish();
    char *path = kn_data_find(s.data);
    kn_text *text = path ? kn_text_open(path, "char", &tokenizer) : NULL;
    if (text) {
        llama_init(&model, kn_text_vocab(text));
        kn_fsdp_wrap(&model, world, .wrap_class = "block", .seed = 1);
        train(&model, text, world, s.steps);
    }
    kn_text_free(text), kn_tokenizer_free(tokenizer), kn_options_free(options);
    kn_module_free(&model), kn_host_free(path);
    return kn_finish();
}
