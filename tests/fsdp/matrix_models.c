/* tests/fsdp/matrix_models.c: small models that sharding must not change: a GPT with dropout and a
 * tied head; a Llama with a head of its own; a network of odd sizes with tied, frozen and scalar
 * parameters; one whose control flow changes. */
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

enum { VOCAB = 13, LEN = 6, BATCH = 2, ODD = 7, HIDDEN = 11, TURN = 8 };

/* ---- odd sizes ------------------------------------------------------------------------------- */

static kn_tensor *odd_embed_forward(kn_module *self, kn_tensor *ids)
{
    odd_embed *e = (odd_embed *)self;
    return kn_mul(kn_embedding(e->table, ids), e->gain);
}

/* x + tanh(scale * down(gelu(up(x))) + one + x frozen^T) * sum(gate) */
static kn_tensor *odd_block_forward(kn_module *self, kn_tensor *x)
{
    odd_block *b = (odd_block *)self;
    kn_tensor *y = kn_call(&b->down, kn_gelu_tanh(kn_call(&b->up, x)));
    y = kn_add(kn_mul(y, b->scale), b->one);
    y = kn_tanh(kn_add(y, kn_linear(x, b->frozen, NULL, false)));
    return kn_add(x, kn_mul(y, kn_sum(b->gate, 1, (int64_t[]){ 0 }, false)));
}

static kn_tensor *odd_head_forward(kn_module *self, kn_tensor *x)
{
    odd_head *h = (odd_head *)self;
    return kn_linear(x, h->table, h->bias, false);
}

static kn_values odd_net_forward(kn_module *self, kn_values in, const void *arg)
{
    odd_net *n = (odd_net *)self;
    kn_tensor *x = kn_add(kn_call(&n->embed, in.v[0]), n->shift);
    for (int i = 0; i < 2; i++)
        x = kn_call(&n->block[i], x);
    return (kn_values){ 1, { kn_cross_entropy(kn_call(&n->head, x), in.v[1]) } };
}

static kn_tensor *declare(void *m, const char *name, double dev, int ndim, const int64_t *shape)
{
    return kn_parameter(m, name, KN_F32, KN_META, KN_NORMAL_INIT(dev), ndim, shape);
}

static bool odd_block_init(odd_block *b, kn_module *parent, const char *name)
{
    if (!kn_module_init(&b->base, odd_block_forward) || !kn_module_add(parent, name, &b->base))
        return false;
    b->scale = declare(b, "scale", 1, KN_SCALAR);
    bool ok = kn_linear_init(&b->up, &b->base, "up", ODD, HIDDEN, .device = KN_META) &&
              kn_linear_init(&b->down, &b->base, "down", HIDDEN, ODD, .device = KN_META);
    b->one = declare(b, "one", 1, KN_SHAPE(1));
    b->frozen = declare(b, "frozen", 0.5, KN_SHAPE(ODD, ODD));
    b->gate = declare(b, "gate", 1, KN_SHAPE(2, ODD));
    return ok && b->scale && b->one && b->gate && kn_require_grad(b->frozen, false);
}

static bool odd_init(odd_net *n)
{
    bool ok = kn_module_init_n(&n->base, odd_net_forward) &&
              kn_module_init(&n->embed.base, odd_embed_forward) &&
              kn_module_add(&n->base, "embed", &n->embed.base);
    n->shift = declare(n, "shift", 0.5, KN_SHAPE(ODD));
    n->embed.table = declare(&n->embed, "table", 0.5, KN_SHAPE(VOCAB, ODD));
    n->embed.gain = declare(&n->embed, "gain", 1, KN_SHAPE(ODD));
    ok = ok && odd_block_init(&n->block[0], &n->base, "first") &&
         odd_block_init(&n->block[1], &n->base, "second") &&
         kn_module_init(&n->head.base, odd_head_forward) &&
         kn_module_add(&n->base, "head", &n->head.base) &&
         kn_share_parameter(&n->head, "table", n->embed.table);
    n->head.table = n->embed.table;
    n->head.bias = declare(&n->head, "bias", 0.5, KN_SHAPE(VOCAB));
    return ok && n->head.bias;
}

/* ---- changing control flow ------------------------------------------------------------------- */

static kn_tensor *turn_block_forward(kn_module *self, kn_tensor *x)
{
    turn_block *b = (turn_block *)self;
    if (b->use)
        x = kn_add(x, mean_of(b->spare));
    return kn_add(x, kn_tanh(kn_call(&b->fc, x)));
}

/* A second entry point of a block. */
static kn_tensor *turn_block_doubled(turn_block *b, kn_tensor *x)
{
    kn_entered e = kn_enter(b);
    kn_tensor *y = kn_add(x, kn_scale(kn_tanh(kn_call(&b->fc, x)), 2));
    kn_leave(e, &y, 1);
    return y;
}

/* A call of a inside a call of a, and one of b: a is needed again after both. */
static kn_tensor *turn_block_around(turn_block *a, turn_block *b, kn_tensor *x)
{
    kn_entered e = kn_enter(a);
    kn_tensor *y = kn_call(b, kn_call(a, x));
    y = kn_add(x, kn_tanh(kn_call(&a->fc, y)));
    kn_leave(e, &y, 1);
    return y;
}

static kn_values turn_net_forward(kn_module *self, kn_values in, const void *arg)
{
    static const int way[5][4] = {
        { 0, 1, 2, 3 }, { 0, 2, 0, 3 }, { 2, 1, 0, 3 }, { 1, 0, 3, 2 }, { 0, 1, 2, 3 }
    };
    turn_net *n = (turn_net *)self;
    kn_tensor *x = kn_call(&n->embed, in.v[0]);
    for (int i = 0; i < 4; i++) {
        turn_block *b = &n->block[way[n->turn][i]];
        if (n->turn == TURN_ENTER && i == 3)
            x = turn_block_doubled(b, x);
        else if (n->turn == TURN_NESTED && i < 2)
            x = i == 0 ? turn_block_around(b, &n->block[1], x) : x;
        else
            x = kn_call(b, x);
    }
    return (kn_values){ 1, { kn_cross_entropy(kn_call(&n->head, x), in.v[1]) } };
}

static bool turn_init(turn_net *n, bool spare)
{
    static const char *const name[4] = { "a", "b", "c", "d" };
    bool ok = kn_module_init_n(&n->base, turn_net_forward) &&
              kn_embedding_init(&n->embed, &n->base, "embed", VOCAB, TURN, .device = KN_META);
    for (int i = 0; i < 4 && ok; i++) {
        turn_block *b = &n->block[i];
        ok = kn_module_init(&b->base, turn_block_forward) &&
             kn_module_add(&n->base, name[i], &b->base) &&
             kn_linear_init(&b->fc, &b->base, "fc", TURN, TURN, .device = KN_META);
        if (ok && spare)
            b->spare = declare(b, "spare", 1, KN_SHAPE(5, 3));
    }
    return ok && kn_linear_init(&n->head, &n->base, "head", TURN, VOCAB, .device = KN_META);
}

/* ---- what they share ------------------------------------------------------------------------- */

bool matrix_net_init(matrix_net *n, const matrix_spec *s)
{
    *n = (matrix_net){ .model = s->model, .by_data = s->by_data, .loss = s->loss };
    kn_gpt_config c = {
        .layers = 2, .heads = 2, .embd = 12, .ctx = LEN, .vocab = VOCAB, .dropout = 0.1
    };
    kn_llama_config l = { .layers = 2,
                          .heads = 2,
                          .kv_heads = 1,
                          .embd = 12,
                          .hidden = 20,
                          .ctx = LEN,
                          .vocab = VOCAB,
                          .rope_scaling = { .factor = 8, .original_ctx = 40 },
                          .dropout = 0.1,
                          .untied = true };
    bool ok;
    if (s->model == MATRIX_OWN) {
        n->root = n->own = calloc(1, s->bytes);
        ok = n->own && s->declare(n->own);
    } else if (s->model == MATRIX_GPT) {
        ok = kn_gpt_init(&n->gpt, c, KN_F32, KN_META);
        n->root = &n->gpt.base;
    } else if (s->model == MATRIX_LLAMA) {
        ok = kn_llama_init(&n->llama, l, KN_F32, KN_META);
        n->root = &n->llama.base;
    } else if (s->model == MATRIX_ODD) {
        ok = odd_init(&n->odd);
        n->root = &n->odd.base;
    } else {
        ok = turn_init(&n->turn, s->spare);
        n->root = &n->turn.base;
    }
    return ok && kn_ok();
}

const char *matrix_wrap_class(matrix_model model)
{
    static const char *const name[MATRIX_BUNDLED] = { "gpt_block", "odd_embed,odd_block,odd_head",
                                                      "turn_block", "llama_block" };
    return model == MATRIX_OWN ? NULL : name[model];
}

kn_module *matrix_block(matrix_net *n, int i)
{
    static const char *const block[][4] = {
        [MATRIX_GPT] = { "transformer.h.0", "transformer.h.1" },
        [MATRIX_ODD] = { "first", "second" },
        [MATRIX_TURN] = { "a", "b", "c", "d" },
        [MATRIX_LLAMA] = { "model.layers.0", "model.layers.1" },
        [MATRIX_OWN] = { "a", "b" },
    };
    return kn_module_find(n->root, block[n->model][i]);
}

void matrix_net_recompute(matrix_net *n)
{
    for (int i = 0; i < (n->model == MATRIX_TURN ? 4 : 2); i++)
        kn_recompute(matrix_block(n, i), true);
}

kn_tensor *matrix_loss(matrix_net *n, int step, int micro)
{
    if (n->loss)
        return n->loss(n->own, step, micro);
    int64_t ids[BATCH * LEN], targets[BATCH * LEN];
    for (int i = 0; i < BATCH * LEN; i++) {
        ids[i] = (i * 5 + micro * 3 + step * 7 + i * i % 4) % VOCAB;
        targets[i] = (ids[i] * 3 + 1) % VOCAB;
    }
    for (int i = 0; i < 4; i++) /* unchanged until the next loss, so a recompute uses the same */
        n->turn.block[i].use = n->by_data && micro % 3 == 1;
    kn_tensor *x = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH, LEN));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(BATCH, LEN));
    kn_values out = kn_call_n(n->root, (kn_values){ 2, { x, y } }, NULL, 0);
    return out.n == 1 ? out.v[0] : NULL;
}
