/* examples/nanochat.c: the recipe of nanochat (github.com/karpathy/nanochat): nanochat [--depth N]
 * [--steps N] [--data FILE] [--ranks N]
 *
 * Its model: rotary embeddings, norms without parameters, also of queries and keys, squared relu,
 * value embeddings, windows, smear, backout, a soft cap. Its optimizers: Muon with Polar Express
 * and NorMuon, AdamW in six groups. Its schedules, and rates that follow from width and batch.
 * Sizes are those of its run on a CPU; --data takes a text, or tokens of knap-tokenize. */
#include <knap.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

enum { MOST_LAYERS = 64, SMEAR = 24, GATE = 12 }; /* channels that the gates see */

typedef struct settings {
    int64_t depth, head_dim, ctx, batch, total_batch, steps, warmup, eval_every, eval_tokens;
    const char *windows, *data;
} settings;

/* ---- the model: (B, T) ids -> (B, T, V) logits ----------------------------------------------- */

typedef struct block {
    kn_module base; /* comes first */
    kn_module attn, mlp;
    kn_linear q, k, v, proj, gate, up, down;
    int64_t heads, window; /* keys that a query sees; 0: all */
} block;

typedef struct gpt {
    kn_module base;
    kn_module transformer, h, value_embeds, resid_lambdas, x0_lambdas, smear;
    kn_embedding token, value[MOST_LAYERS];
    block block[MOST_LAYERS];
    kn_linear head, smear_gate;
    kn_tensor *resid[MOST_LAYERS], *x0[MOST_LAYERS], *smear_lambda, *backout_lambda;
    int64_t depth, dim, vocab;
} gpt;

static bool has_values(const gpt *g, int64_t layer)
{
    return layer % 2 == (g->depth - 1) % 2;
}

static kn_tensor *norm(kn_tensor *x)
{
    return kn_rms_norm(x, NULL, 0x1p-23); /* the eps that PyTorch takes in f32 */
}

/* Of normed x; ve: the tokens' value embeddings (B, T, C), or NULL. */
static kn_tensor *attention(block *b, kn_tensor *x, kn_tensor *ve)
{
    int64_t B = kn_size(x, 0), T = kn_size(x, 1), D = kn_size(x, 2) / b->heads;
    const int64_t shape[] = { B, T, b->heads, D };
    kn_tensor *q = norm(kn_view(kn_call(&b->q, x), 4, shape));
    kn_tensor *k = norm(kn_view(kn_call(&b->k, x), 4, shape));
    kn_tensor *v = kn_view(kn_call(&b->v, x), 4, shape);
    if (ve) {
        kn_tensor *gate = kn_sigmoid(kn_call(&b->gate, kn_slice(x, 2, 0, GATE)));
        gate = kn_unsqueeze(kn_scale(gate, 3), 3);
        v = kn_add(v, kn_mul(gate, kn_view(ve, 4, shape)));
    }
    q = kn_rope(kn_transpose(q, 1, 2), 100000, 0); /* nanochat norms behind it: the same lengths */
    k = kn_rope(kn_transpose(k, 1, 2), 100000, 0);
    kn_tensor *y = kn_scaled_dot_product_attention(
        q, k, kn_transpose(v, 1, 2), .causal = true, .window = b->window < T ? b->window : 0,
        .scale = 1.2 * 1.2 / sqrt((double)D)); /* nanochat scales both q and k by 1.2 */
    return kn_call(&b->proj, kn_reshape(kn_transpose(y, 1, 2), KN_SHAPE(B, T, b->heads * D)));
}

static kn_values block_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)arg;
    block *b = (block *)self;
    kn_tensor *x = kn_add(in.v[0], attention(b, norm(in.v[0]), in.v[1]));
    kn_tensor *hidden = kn_relu_squared(kn_call(&b->up, norm(x)));
    return KN_VALUES(kn_add(x, kn_call(&b->down, hidden)));
}

/* Mixes each token's embedding with that of the token before it. */
static kn_tensor *smeared(gpt *g, kn_tensor *x)
{
    int64_t T = kn_size(x, 1);
    kn_tensor *now = kn_slice(x, 1, 1, T), *before = kn_slice(x, 1, 0, T - 1);
    kn_tensor *gate = kn_sigmoid(kn_call(&g->smear_gate, kn_slice(now, 2, 0, SMEAR)));
    now = kn_add(now, kn_mul(kn_mul(gate, g->smear_lambda), before));
    return kn_cat((kn_tensor *[]){ kn_slice(x, 1, 0, 1), now }, 2, 1);
}

static kn_tensor *gpt_forward(kn_module *self, kn_tensor *ids)
{
    gpt *g = (gpt *)self;
    kn_tensor *x = smeared(g, norm(kn_call(&g->token, ids))), *x0 = x, *middle = NULL;
    for (int64_t i = 0; i < g->depth; i++) {
        kn_tensor *ve = has_values(g, i) ? kn_call(&g->value[i], ids) : NULL;
        x = kn_add(kn_mul(x, g->resid[i]), kn_mul(x0, g->x0[i]));
        x = kn_call_with(&g->block[i], x, ve);
        if (i == g->depth / 2)
            middle = x;
    }
    x = norm(kn_sub(x, kn_mul(middle, g->backout_lambda)));
    kn_tensor *logits = kn_call(&g->head, kn_scale(x, 1 / 15.0)); /* of which padding is cut off */
    return kn_scale(kn_tanh(kn_slice(logits, 2, 0, g->vocab)), 15);
}

static void block_init(gpt *g, int64_t i, const settings *s)
{
    char name[8];
    block *b = &g->block[i];
    int64_t dim = g->dim, few = (s->ctx + 511) / 512 * 128; /* a quarter, in tiles of 128 */
    double bound = sqrt(3.0 / (double)dim);
    kn_initializer w = KN_UNIFORM_INIT(-bound, bound), zeros = KN_ZEROS_INIT;
    snprintf(name, sizeof name, "%d", (int)i);
    b->heads = dim / s->head_dim;
    char kind = s->windows[i % (int64_t)strlen(s->windows)];
    b->window = kind == 'S' && i < g->depth - 1 ? few + 1 : 0; /* the last layer sees all */
    kn_module_init_n(&b->base, block_forward);
    kn_module_add(&g->h, name, &b->base);
    kn_module_list_init(&b->attn, &b->base, "attn"), kn_module_list_init(&b->mlp, &b->base, "mlp");
    kn_linear_init(&b->q, &b->attn, "c_q", dim, dim, .no_bias = true, .weight = w);
    kn_linear_init(&b->k, &b->attn, "c_k", dim, dim, .no_bias = true, .weight = w);
    kn_linear_init(&b->v, &b->attn, "c_v", dim, dim, .no_bias = true, .weight = w);
    kn_linear_init(&b->proj, &b->attn, "c_proj", dim, dim, .no_bias = true, .weight = zeros);
    kn_linear_init(&b->up, &b->mlp, "c_fc", dim, 4 * dim, .no_bias = true,
                   .weight = KN_UNIFORM_INIT(-0.4 * bound, 0.4 * bound));
    kn_linear_init(&b->down, &b->mlp, "c_proj", 4 * dim, dim, .no_bias = true, .weight = zeros);
    double along = (double)i / fmax(1, (double)(g->depth - 1));
    const int64_t one = 1;
    g->resid[i] = kn_parameter(&g->resid_lambdas, name, KN_F32, KN_META,
                               KN_CONSTANT_INIT(1.15 - 0.10 * along), 1, &one);
    g->x0[i] = kn_parameter(&g->x0_lambdas, name, KN_F32, KN_META,
                            KN_CONSTANT_INIT(0.20 - 0.15 * along), 1, &one);
    if (!has_values(g, i))
        return;
    kn_linear_init(&b->gate, &b->attn, "ve_gate", GATE, b->heads, .no_bias = true,
                   .weight = KN_UNIFORM_INIT(0, 0.02));
    kn_embedding_init(&g->value[i], &g->value_embeds, name, (g->vocab + 63) / 64 * 64, dim,
                      .weight = w);
}

static void gpt_init(gpt *g, const settings *s, int64_t vocab)
{
    const int64_t padded = (vocab + 63) / 64 * 64, one = 1;
    g->depth = s->depth, g->vocab = vocab;
    g->dim = (s->depth * 64 + s->head_dim - 1) / s->head_dim * s->head_dim;
    kn_module_init(&g->base, gpt_forward);
    kn_module_defaults(g, .device = KN_META); /* no bytes yet */
    kn_module_list_init(&g->transformer, &g->base, "transformer");
    kn_embedding_init(&g->token, &g->transformer, "wte", padded, g->dim,
                      .weight = KN_NORMAL_INIT(0.8));
    kn_module_list_init(&g->h, &g->transformer, "h");
    kn_linear_init(&g->head, &g->base, "lm_head", g->dim, padded, .no_bias = true,
                   .weight = KN_NORMAL_INIT(0.001));
    kn_module_list_init(&g->resid_lambdas, &g->base, "resid_lambdas");
    kn_module_list_init(&g->x0_lambdas, &g->base, "x0_lambdas");
    kn_module_list_init(&g->smear, &g->base, "smear");
    kn_linear_init(&g->smear_gate, &g->smear, "gate", SMEAR, 1, .no_bias = true,
                   .weight = KN_UNIFORM_INIT(0, 0.02));
    g->smear_lambda = kn_parameter(&g->smear, "lambda", KN_F32, KN_META, KN_ZEROS_INIT, 1, &one);
    g->backout_lambda =
        kn_parameter(&g->smear, "backout", KN_F32, KN_META, KN_CONSTANT_INIT(0.2), 1, &one);
    kn_module_list_init(&g->value_embeds, &g->base, "value_embeds");
    for (int64_t i = 0; i < s->depth; i++)
        block_init(g, i, s);
}

/* ---- its Muon -------------------------------------------------------------------------------- */

typedef struct muon_state {
    kn_module *net; /* the root, of which it updates matrices */
    double momentum, decay;
} muon_state;

static kn_tensor *length(kn_tensor *x, double least)
{
    return kn_clamp(kn_norm(x, 2, 0, NULL, true), least, HUGE_VAL);
}

/* Nearly the orthogonal factor of x, by Polar Express (Amsel et al., arXiv:2505.16932), of rows
 * that were brought to one length (arXiv:2603.28254), with the length of an orthogonal matrix
 * (arXiv:2602.21545). */
static kn_tensor *orthogonal(kn_tensor *x)
{
    static const double polar[5][3] = {
        { 8.156554524902461, -22.48329292557795, 15.878769915207462 },
        { 4.042929935166739, -2.808917465908714, 0.5000178451051316 },
        { 3.8916678022926607, -2.772484153217685, 0.5060648178503393 },
        { 3.285753657755655, -2.3681294933425376, 0.46449024233003106 },
        { 2.3465413258596377, -1.7097828382687081, 0.42323551169305323 },
    };
    const double rows = (double)kn_size(x, 0), cols = (double)kn_size(x, 1);
    const int64_t last = 1;
    kn_tensor *row = kn_clamp(kn_norm(x, 2, 1, &last, true), 1e-6, HUGE_VAL);
    x = kn_mul(x, kn_div(kn_scale(length(x, 0), 1 / sqrt(rows)), row));
    x = kn_div(x, kn_add_scalar(kn_scale(length(x, 0), 1.01), 1e-6));
    for (int i = 0; i < 5; i++) { /* x = a x + (b A + c A A) x, A = x x'; where x is tall, x' x */
        kn_tensor *turned = kn_transpose(x, 0, 1);
        kn_tensor *A = rows > cols ? kn_matmul(turned, x) : kn_matmul(x, turned);
        kn_tensor *square = kn_matmul(A, kn_transpose(A, 0, 1)); /* A is its own transpose */
        kn_tensor *P = kn_add_scaled(kn_scale(A, polar[i][1]), square, polar[i][2]);
        kn_tensor *y = rows > cols ? kn_matmul(x, P) : kn_matmul(P, x);
        x = kn_add_scaled(y, x, polar[i][0]);
    }
    return kn_mul(x, kn_scale(kn_reciprocal(length(x, 1e-6)), sqrt(fmin(rows, cols))));
}

/* The update of one whole matrix: NorMuon (Li et al., arXiv:2510.05491) with decay only where it
 * pulls the way of the step. The second state has a number for each row, or column where there are
 * more of these, in front. */
static bool muon(const kn_optim_part *p, void *arg)
{
    const muon_state *o = arg;
    const int64_t *shape = kn_shape(kn_module_param(o->net, p->name));
    const bool high = shape[0] >= shape[1];
    const int64_t along = high, many = high ? shape[0] : shape[1];
    const double few = (double)(high ? shape[1] : shape[0]);
    const double rate = p->lr * sqrt(fmax(1, (double)shape[0] / (double)shape[1]));
    kn_copy_(p->state[0], kn_lerp(p->state[0], p->grad, 1 - o->momentum));
    kn_tensor *nesterov = kn_lerp(p->grad, p->state[0], o->momentum);
    kn_tensor *x = orthogonal(kn_view(nesterov, 2, shape)), *w = kn_view(p->param, 2, shape);
    kn_tensor *mean = kn_mean(kn_square(x), 1, &along, true);
    const int64_t sizes[] = { high ? many : 1, high ? 1 : many };
    kn_tensor *second = kn_view(kn_slice(p->state[1], 0, 0, many), 2, sizes);
    kn_copy_(second, kn_lerp(second, mean, 1 - 0.9));
    kn_tensor *size = kn_rsqrt(kn_clamp(second, 1e-10, HUGE_VAL));
    kn_tensor *sum = kn_sum(kn_mul(mean, kn_square(size)), 0, NULL, true);
    kn_tensor *length_now = kn_clamp(kn_sqrt(kn_scale(sum, few)), 1e-10, HUGE_VAL);
    x = kn_mul(x, kn_mul(size, kn_div(length(x, 0), length_now)));
    kn_tensor *decayed = kn_add_scaled(x, w, o->decay);
    kn_tensor *step = kn_where(kn_ge(kn_mul(x, w), kn_zeros_like(x)), decayed, x);
    return kn_copy_(w, kn_add_scaled(w, step, -rate));
}

/* ---- training -------------------------------------------------------------------------------- */

enum { GROUPS = 7 };

/* Parameters whose number sets nanochat's horizon: of matrices and the head. */
static double scaling_params(double depth, double dim, double heads, double vocab)
{
    return 12 * depth * dim * dim + ceil(depth / 2) * GATE * heads + vocab * dim;
}

/* Mean bits that a byte of the validation text takes. */
static double bits_per_byte(gpt *g, kn_loader *data, const int64_t *bytes, const settings *s)
{
    double nats = 0, length_of_all = 0;
    kn_loader_seek(data, 0);
    kn_train(g, false), kn_set_grad_mode(false);
    for (int64_t i = 0; i < s->eval_tokens / (s->batch * s->ctx) && kn_ok(); i++) {
        kn_scope scope = kn_scope_begin();
        kn_batch b = kn_next(data);
        int64_t *y = kn_data(b.y), counted = 0;
        for (int64_t k = 0; y && k < s->batch * s->ctx; k++) {
            const int64_t length = bytes[y[k]];
            counted += length > 0, length_of_all += (double)length;
            y[k] = length > 0 ? y[k] : -100; /* of no text: not in the mean */
        }
        kn_bump_version(b.y);
        if (counted > 0)
            nats += kn_item(kn_cross_entropy(kn_call(g, b.x), b.y)) * (double)counted;
        kn_scope_end(scope);
    }
    kn_train(g, true), kn_set_grad_mode(true);
    return nats / log(2) / length_of_all;
}

/* The factor of all rates, and Muon's momentum and decay, at a step. */
static double schedule(muon_state *o, const settings *s, int64_t step, double decay)
{
    double n = (double)s->steps, down = rint(0.65 * n), at = (double)step;
    double left = fmin(1, (n - at) / down); /* of the last 65 % of the steps */
    o->momentum = step < 400 ? 0.85 + 0.12 * at / 400 : 0.90 + 0.07 * left;
    o->decay = decay * 0.5 * (1 + cos(M_PI * at / n));
    return step < s->warmup ? (at + 1) / (double)s->warmup : left + (1 - left) * 0.05;
}

static void train(gpt *g, const kn_text *text, const int64_t *bytes, kn_comm *world,
                  const settings *s)
{
    int64_t micro = s->total_batch / (s->batch * s->ctx * kn_comm_size(world));
    double padded = (double)kn_size(kn_module_param(&g->head, "weight"), 0);
    double heads = (double)g->block[0].heads;
    /* Rates were tuned for 12 layers of 768 channels and batches of 2^19 tokens. */
    double batch = sqrt((double)s->total_batch / 0x1p19), width = sqrt(768.0 / (double)g->dim);
    double decay = 0.28 * batch * scaling_params(12, 768, 768 / (double)s->head_dim, padded) /
                   scaling_params((double)g->depth, (double)g->dim, heads, padded);
    const struct {
        void *module;
        double lr, beta1, beta2, decay;
    } adamw[GROUPS - 1] = {
        { &g->head, 0.008 * batch * width, 0.8, 0.96, 0.01 },
        { &g->token, 0.3 * batch * width, 0.8, 0.995, 0.001 },
        { &g->value_embeds, 0.15 * batch * width, 0.8, 0.995, 0.01 },
        { &g->resid_lambdas, 0.005 * batch, 0.8, 0.95, 0.05 },
        { &g->x0_lambdas, 0.5 * batch, 0.96, 0.95, KN_ZERO },
        { &g->smear, 0.2, 0.8, 0.95, KN_ZERO },
    };
    muon_state state = { .net = &g->base };
    double lr[GROUPS] = { 0.02 * batch };
    kn_optim *opt[GROUPS] = { kn_own_optim(&g->h, .name = "muon", .update = muon, .arg = &state,
                                           .state = { "momentum", "second" }, .lr = lr[0]) };
    for (int i = 1; i < GROUPS; i++) {
        lr[i] = adamw[i - 1].lr;
        opt[i] =
            kn_adamw(adamw[i - 1].module, .lr = lr[i], .beta1 = adamw[i - 1].beta1,
                     .beta2 = adamw[i - 1].beta2, .eps = 1e-10, .weight_decay = adamw[i - 1].decay);
    }
    kn_loader *data = kn_text_loader(text, world, .batch = s->batch, .ctx = s->ctx, .accum = micro);
    kn_loader *valid =
        kn_text_loader(text, NULL, .batch = s->batch, .ctx = s->ctx, .split = KN_VALIDATION);
    for (int64_t step = 0; step <= s->steps && kn_ok(); step++) {
        if (s->eval_every > 0 && (step % s->eval_every == 0 || step == s->steps)) {
            double bpb = bits_per_byte(g, valid, bytes, s);
            if (kn_ok() && kn_rank(world) == 0)
                printf("eval %4d  bits per byte %.5f\n", (int)step, bpb), fflush(stdout);
        }
        double loss = 0;
        for (int64_t i = 0; i < micro && step < s->steps && kn_ok(); i++) {
            kn_scope scope = kn_scope_begin();
            kn_batch b = kn_next(data);
            kn_tensor *mean = kn_cross_entropy(kn_call(g, b.x), b.y);
            kn_backward(mean);
            loss = i == 0 ? kn_item(mean) : loss;
            kn_scope_end(scope);
        }
        double factor = schedule(&state, s, step, decay);
        for (int i = 0; i < GROUPS && step < s->steps && kn_ok(); i++)
            kn_set_lr(opt[i], lr[i] * factor), kn_step(opt[i]);
        if (kn_ok() && kn_rank(world) == 0 && step < s->steps)
            printf("step %4d  loss %.4f\n", (int)step, loss), fflush(stdout);
    }
    for (int i = 0; i < GROUPS; i++)
        kn_optim_free(opt[i]);
    kn_loader_free(data), kn_loader_free(valid);
}

/* Of each id inside a text, as some tokenizers drop the first one's space: 0 of special tokens;
 * without a tokenizer 1, so that bits are those of a token. Owned by the caller. */
static int64_t *bytes_of(const kn_tokenizer *t, int64_t vocab)
{
    int64_t *bytes = kn_host_alloc((size_t)vocab * sizeof *bytes);
    for (int64_t id = 0; bytes && id < vocab; id++) {
        bytes[id] = 1;
        if (t)
            bytes[id] = kn_tokenizer_decode(t, (int64_t[]){ id, id }, 2, NULL, 0) -
                        kn_tokenizer_decode(t, &id, 1, NULL, 0);
        if (t && kn_tokenizer_is_special(t, id))
            bytes[id] = 0;
    }
    return bytes;
}

static bool good(const settings *s, const kn_comm *world)
{
    const int64_t tokens = s->batch * s->ctx;
    if (s->windows[strspn(s->windows, "SL")])
        return kn_fail("nanochat: --windows is '%s'; give a letter a layer, L or S", s->windows);
    if (s->head_dim % 2 != 0)
        return kn_fail("nanochat: --head-dim is %d; it must be even", (int)s->head_dim);
    if (s->total_batch % (tokens * kn_comm_size(world)) != 0)
        return kn_fail("nanochat: --total-batch is %d tokens; it must be a multiple of --batch %d "
                       "rows of --ctx %d on each of %d ranks",
                       (int)s->total_batch, (int)s->batch, (int)s->ctx, kn_comm_size(world));
    return s->eval_every == 0 || s->eval_tokens >= tokens ||
           kn_fail("nanochat: --eval-tokens is %d; a batch has %d", (int)s->eval_tokens,
                   (int)tokens);
}

int main(int argc, char **argv)
{
#define INT(name, field, value, help, ...)                                                         \
    {                                                                                              \
        name, KN_OPTION_INT, offsetof(settings, field), value, help, .min = 1, __VA_ARGS__         \
    }
    static const kn_option table[] = {
        INT("depth", depth, "6",
            "layers; the width is 64 times that, up to a multiple of --head-dim",
            .max = MOST_LAYERS),
        INT("head-dim", head_dim, "64", "channels of a head", .max = 1024),
        { "ctx", KN_OPTION_INT, offsetof(settings, ctx), "512", "tokens of a row", .min = 2,
          .max = 1 << 20 },
        INT("batch", batch, "32", "rows of a micro-batch", .max = 1 << 20),
        INT("total-batch", total_batch, "16384", "tokens of a step", .max = 1 << 30),
        INT("steps", steps, "5000", "to train; schedules end there", .max = 1e9),
        { "warmup", KN_OPTION_INT, offsetof(settings, warmup), "40", "steps", .max = 1e9 },
        { "eval-every", KN_OPTION_INT, offsetof(settings, eval_every), "100",
          "steps between evaluations; 0: none", .max = 1e9 },
        INT("eval-tokens", eval_tokens, "524288", "of an evaluation", .max = 1 << 30),
        { "windows", KN_OPTION_PATH, offsetof(settings, windows), "L",
          "of layers in turn: L all keys, S a quarter (SSSL)" },
        { "data", KN_OPTION_PATH, offsetof(settings, data), "shakespeare",
          "a text, or a file of knap-tokenize" },
        { 0 },
    };
    settings s = { 0 };
    static gpt net;
    kn_tokenizer *tokenizer = NULL;
    kn_comm *world = kn_init(&argc, &argv); /* takes --ranks and --threads */
    kn_options *options =
        kn_options_main(table, &s, argc, argv, "Trains a small GPT as nanochat does.");
    if (!options || !good(&s, world)) /* --help, or an error */
        return kn_options_free(options), kn_finish();
    char *path = kn_data_find(s.data);
    kn_text *text = path ? kn_text_open(path, "char", &tokenizer) : NULL;
    int64_t *bytes = text ? bytes_of(tokenizer, kn_text_vocab(text)) : NULL;
    if (bytes) {
        gpt_init(&net, &s, kn_text_vocab(text));
        /* Replicas: its Muon updates whole matrices. */
        kn_fsdp_wrap(&net, world, .strategy = KN_NO_SHARD, .seed = 42);
        train(&net, text, bytes, world, &s);
    }
    kn_text_free(text), kn_tokenizer_free(tokenizer), kn_options_free(options);
    kn_module_free(&net), kn_host_free(path), kn_host_free(bytes);
    return kn_finish();
}
