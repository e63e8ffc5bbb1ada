/* examples/gpt.c: a GPT from text to sample, sharded over its ranks: gpt [--ranks N] [--steps N]
 * [--data FILE]
 *
 * Complete: attention, block, model, training, sampling. models/gpt.c is the same model with
 * GPT-2's names, presets and checks; train_gpt has every option of the library. */
#include <knap.h>
#include <stddef.h>

enum { LAYERS = 4, HEADS = 4, DIM = 128, CTX = 64, BATCH = 12 };

/* ---- the model: (B, T) ids -> (B, T, V) logits ----------------------------------------------- */

typedef struct block {
    kn_module base; /* comes first */
    kn_layer_norm ln1, ln2;
    kn_linear qkv, proj, up, down;
} block;

typedef struct gpt {
    kn_module base;
    kn_embedding token, position;
    block block[LAYERS];
    kn_layer_norm ln;
    kn_linear head;
} gpt;

/* softmax(q k^T / sqrt(D)) v over the tokens before each token: (B, T, C) -> (B, T, C) */
static kn_tensor *attention(block *b, kn_tensor *x)
{
    int64_t batch = kn_size(x, 0), len = kn_size(x, 1);
    kn_tensor *part[3] = { 0 };
    kn_chunk(kn_call(&b->qkv, x), 2, 3, part);
    for (int i = 0; i < 3; i++) /* (B, T, C) -> (B, H, T, D) */
        part[i] = kn_transpose(kn_reshape(part[i], KN_SHAPE(batch, len, HEADS, DIM / HEADS)), 1, 2);
    kn_tensor *y = kn_scaled_dot_product_attention(part[0], part[1], part[2], .causal = true);
    return kn_call(&b->proj, kn_reshape(kn_transpose(y, 1, 2), KN_SHAPE(batch, len, DIM)));
}

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    x = kn_add(x, attention(b, kn_call(&b->ln1, x)));
    kn_tensor *hidden = kn_gelu_tanh(kn_call(&b->up, kn_call(&b->ln2, x)));
    return kn_add(x, kn_call(&b->down, hidden));
}

static kn_tensor *gpt_forward(kn_module *self, kn_tensor *ids)
{
    gpt *g = (gpt *)self;
    kn_tensor *at = kn_arange(KN_I64, kn_device_of(ids), kn_size(ids, 1));
    kn_tensor *x = kn_add(kn_call(&g->token, ids), kn_call(&g->position, at));
    for (int i = 0; i < LAYERS; i++)
        x = kn_call(&g->block[i], x);
    return kn_call(&g->head, kn_call(&g->ln, x));
}

static void block_init(block *b, kn_module *parent, const char *name)
{
    kn_initializer w = KN_NORMAL_INIT(0.02),
                   last = KN_NORMAL_INIT(0.02 / 2.83); /* / sqrt(2 LAYERS) */
    kn_module_init(&b->base, block_forward);
    kn_module_add(parent, name, &b->base);
    kn_layer_norm_init(&b->ln1, &b->base, "ln1", DIM);
    kn_linear_init(&b->qkv, &b->base, "qkv", DIM, 3 * DIM, .weight = w);
    kn_linear_init(&b->proj, &b->base, "proj", DIM, DIM, .weight = last);
    kn_layer_norm_init(&b->ln2, &b->base, "ln2", DIM);
    kn_linear_init(&b->up, &b->base, "up", DIM, 4 * DIM, .weight = w);
    kn_linear_init(&b->down, &b->base, "down", 4 * DIM, DIM, .weight = last);
}

static void gpt_init(gpt *g, int64_t vocab)
{
    static const char *const name[LAYERS] = { "block0", "block1", "block2", "block3" };
    kn_initializer w = KN_NORMAL_INIT(0.02);
    kn_module_init(&g->base, gpt_forward);
    /* no bytes yet: kn_fsdp_wrap allocates each rank's shard */
    kn_module_defaults(g, .device = KN_META);
    kn_embedding_init(&g->token, &g->base, "token", vocab, DIM, .weight = w);
    kn_embedding_init(&g->position, &g->base, "position", CTX, DIM, .weight = w);
    for (int i = 0; i < LAYERS; i++)
        block_init(&g->block[i], &g->base, name[i]);
    kn_layer_norm_init(&g->ln, &g->base, "ln", DIM);
    kn_linear_init(&g->head, &g->base, "head", DIM, vocab, .weight = w);
}

/* ---- training -------------------------------------------------------------------------------- */

typedef struct settings {
    int64_t steps, tokens;
    const char *data;
} settings;

static void train(gpt *g, const kn_text *text, kn_comm *world, int64_t steps)
{
    kn_schedule lr = { KN_COSINE, .lr = 4e-3, .min_lr = 4e-4, .warmup = 100, .steps = steps };
    kn_optim *opt = kn_adamw(g, .lr = lr.lr, .beta2 = 0.99, .weight_decay = 0.1);
    kn_loader *data = kn_text_loader(text, world, .batch = BATCH, .ctx = CTX, .seed = 1337);
    for (int64_t step = 0; step < steps && kn_ok(); step++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data); /* x and y: (12, 64) ids, y one token further */
        kn_tensor *loss = kn_cross_entropy(kn_call(g, b.x), b.y);
        kn_backward(loss); /* gathers and reductions ride on its callbacks */
        kn_clip_grad_norm(g, 1.0);
        kn_set_lr(opt, kn_schedule_at(&lr, step));
        kn_step(opt);
        if (kn_ok() && kn_rank(world) == 0 && (step % 100 == 0 || step == steps - 1))
            printf("step %4d  loss %.4f\n", (int)step, kn_item(loss));
        kn_scope_end(scope);
    }
    kn_optim_free(opt), kn_loader_free(data);
}

int main(int argc, char **argv)
{
    static const kn_option table[] = {
        { "steps", KN_OPTION_INT, offsetof(settings, steps), "2000", "optimizer steps",
          .max = 1e9 },
        { "tokens", KN_OPTION_INT, offsetof(settings, tokens), "300", "to write", .max = 1e9 },
        { "data", KN_OPTION_PATH, offsetof(settings, data), "shakespeare", "a text file" },
        { 0 },
    };
    settings s = { 0 };
    gpt net = { 0 };
    kn_tokenizer *tokenizer = NULL;
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options =
        kn_options_main(table, &s, argc, argv, "A small GPT learns a text and writes.");
    if (!options) /* --help, or an error */
        return kn_finish();
    char *path = kn_data_find(s.data);
    kn_text *text = path ? kn_text_open(path, "char", &tokenizer) : NULL;
    if (text) {
        gpt_init(&net, kn_text_vocab(text));
        kn_fsdp_wrap(&net, world, .wrap_class = "block", .seed = 1337);
        train(&net, text, world, s.steps);
        /* every rank runs every forward, which is collective; all draw the same tokens */
        kn_write_text(&net, NULL, tokenizer, .tokens = s.tokens, .ctx = CTX,
                      .draw = { .temperature = 0.8, .top_k = 200, .seed = 1337 },
                      .out = kn_rank(world) == 0 ? stdout : NULL);
    }
    kn_text_free(text), kn_tokenizer_free(tokenizer), kn_options_free(options);
    kn_module_free(&net), kn_host_free(path);
    return kn_finish();
}
