/* models/gpt.c: GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners",
 * 2019):
 *
 *   x = wte[ids] + wpe[0 .. T-1]                      (B, T, C)
 *   x = x + attn(ln_1(x));  x = x + mlp(ln_2(x))      once a block
 *   logits = ln_f(x) wte^T                            (B, T, V): the head is tied to wte
 *
 * The root's forward takes ids and gives logits, or takes ids and targets and gives the loss, so
 * that one call of the root is a whole step's forward, as a sharded root needs it. */
#include "models/gpt.h"
#include "models/text.h"

#include "kernels/error.h"

#include <math.h>
#include <stdio.h>

typedef struct gpt_block {
    kn_module base;
    kn_layer_norm ln_1, ln_2;
    kn_self_attention attn;
    kn_mlp mlp;
} gpt_block;

typedef struct gpt_state {
    kn_gpt_config config; /* comes first */
    kn_module transformer, h;
    kn_embedding wte, wpe;
    kn_dropout drop;
    kn_layer_norm ln_f;
    gpt_block block[]; /* [layers] */
} gpt_state;

/* ---- forward --------------------------------------------------------------------------------- */

/* With a mask, where there is one. */
static kn_tensor *call_masked(void *m, kn_tensor *x, kn_tensor *mask)
{
    return mask ? kn_call_with(m, x, mask) : kn_call(m, x);
}

static kn_values gpt_block_forward(kn_module *self, kn_values in, const void *arg)
{
    gpt_block *b = (gpt_block *)self;
    kn_tensor *x = in.v[0], *mask = in.n > 1 ? in.v[1] : NULL;
    (void)arg;
    kn_tensor *h = call_masked(&b->attn, kn_call(&b->ln_1, x), mask);
    h = kn_add_norm(&b->ln_2, x, h, &x); /* x += h; ln_2(x) */
    return KN_VALUES(kn_add(x, kn_call(&b->mlp, h)));
}

static kn_values gpt_forward(kn_module *self, kn_values in, const void *arg)
{
    gpt_state *s = kn_module_data(self);
    const bool *last = arg; /* logits of the last position only */
    if (!kn_text_inputs("gpt", &in, &s->block[0].attn, s->config.ctx))
        return (kn_values){ 0 };
    kn_tensor *ids = in.v[0], *begin = in.n == 3 ? in.v[2] : NULL;
    kn_tensor *mask = begin ? kn_document_mask(begin) : NULL;
    kn_tensor *position = kn_token_positions(&s->block[0].attn, ids);
    if (begin) /* a document's positions count from 0 */
        position = kn_sub(position, begin);
    kn_tensor *x = kn_add(kn_call(&s->wte, ids), kn_call(&s->wpe, position)); /* (B, T, C) */
    x = kn_call(&s->drop, x);
    for (int i = 0; i < s->config.layers; i++)
        x = call_masked(&s->block[i], x, mask);
    if (last && *last && x)
        x = kn_reshape(kn_slice(x, 1, kn_size(x, 1) - 1, kn_size(x, 1)),
                       KN_SHAPE(kn_size(x, 0), kn_size(x, 2)));
    x = kn_call(&s->ln_f, x);
    kn_tensor *head = kn_module_param(&s->wte, "weight");
    x = in.n >= 2 ? kn_linear_cross_entropy(x, head, in.v[1]) /* logits are never whole */
                  : kn_linear(x, head, NULL, false);          /* (B, T, V) */
    return KN_VALUES(x);
}

/* ---- making ---------------------------------------------------------------------------------- */

static bool block_init(gpt_block *b, kn_module *list, int index, const kn_gpt_config *c)
{
    char name[16];
    snprintf(name, sizeof name, "%d", index);
    /* the layers that add to the residual stream start smaller with depth */
    kn_initializer normal = KN_NORMAL_INIT(0.02),
                   proj = KN_NORMAL_INIT(0.02 / sqrt(2.0 * c->layers));
    return kn_module_init_n((kn_module *)b, gpt_block_forward) &&
           kn_module_add(list, name, &b->base) &&
           kn_layer_norm_init(&b->ln_1, &b->base, "ln_1", c->embd, .no_bias = c->no_bias) &&
           kn_self_attention_init(&b->attn, &b->base, "attn", c->embd, c->heads,
                                  .no_bias = c->no_bias, .in_out = true, .dropout = c->dropout,
                                  .weight = normal, .proj_weight = proj) &&
           kn_layer_norm_init(&b->ln_2, &b->base, "ln_2", c->embd, .no_bias = c->no_bias) &&
           kn_mlp_init(&b->mlp, &b->base, "mlp", c->embd, .no_bias = c->no_bias, .in_out = true,
                       .dropout = c->dropout, .weight = normal, .proj_weight = proj);
}

bool kn_gpt_init(kn_gpt *g, kn_gpt_config config, kn_dtype dtype, kn_device device)
{
    const kn_gpt_config *c = &config;
    if (!kn_ok() || !kn_gpt_config_check(&config) || !kn_module_init_n((kn_module *)g, gpt_forward))
        return false;
    if (!kn_module_set_data(g, NULL, sizeof(gpt_state) + (size_t)c->layers * sizeof(gpt_block))) {
        kn_module_free(g);
        return false;
    }
    gpt_state *s = kn_module_data(g);
    s->config = config;
    kn_module *t = &s->transformer;
    kn_initializer normal = KN_NORMAL_INIT(0.02);
    bool ok = kn_module_defaults(g, .dtype = dtype, .device = device) &&
              kn_module_list_init(t, &g->base, "transformer") &&
              kn_embedding_init(&s->wte, t, "wte", c->vocab, c->embd, .weight = normal) &&
              kn_embedding_init(&s->wpe, t, "wpe", c->ctx, c->embd, .weight = normal) &&
              kn_dropout_init(&s->drop, t, "drop", c->dropout) &&
              kn_module_list_init(&s->h, t, "h");
    for (int i = 0; ok && i < c->layers; i++)
        ok = block_init(&s->block[i], &s->h, i, c);
    ok = ok && kn_layer_norm_init(&s->ln_f, t, "ln_f", c->embd, .no_bias = c->no_bias) &&
         kn_share_parameter(g, "head", kn_module_param(&s->wte, "weight")); /* gpt_forward's use */
    if (!ok)
        kn_module_free(g);
    return ok;
}
