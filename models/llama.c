/* models/llama.c: Llama (Touvron et al., "LLaMA: Open and Efficient Foundation Language Models",
 * arXiv:2302.13971), with the grouped queries and the rope of Llama 3 (arXiv:2407.21783):
 *
 *   x = embed_tokens[ids]                                     (B, T, C)
 *   x = x + self_attn(input_layernorm(x))                     once a block; rope turns q and k
 *   x = x + mlp(post_attention_layernorm(x))                  mlp: SwiGLU
 *   logits = lm_head(norm(x))                                 (B, T, V)
 *
 * Norms are RMS norms, no layer has a bias. As with models/gpt.c one call of the root is a whole
 * step's forward: it takes ids and gives logits, or takes ids and targets and gives the loss. */
#include "models/llama.h"
#include "models/text.h"

#include "kernels/error.h"

#include <math.h>
#include <stdio.h>

typedef struct llama_block {
    kn_module base;
    kn_rms_norm input_layernorm, post_attention_layernorm;
    kn_multi_head_attention self_attn;
    kn_swiglu mlp;
} llama_block;

typedef struct llama_state {
    kn_llama_config config; /* comes first; defaults filled in */
    kn_module model, layers;
    kn_embedding embed_tokens;
    kn_rms_norm norm;
    kn_linear lm_head;   /* .untied */
    llama_block block[]; /* [layers] */
} llama_state;

/* ---- forward --------------------------------------------------------------------------------- */

static kn_values llama_block_forward(kn_module *self, kn_values in, const void *arg)
{
    llama_block *b = (llama_block *)self;
    kn_tensor *x = in.v[0], *mask = in.n > 1 ? in.v[1] : NULL;
    (void)arg;
    kn_tensor *h = kn_call(&b->input_layernorm, x);
    h = mask ? kn_call_with(&b->self_attn, h, NULL, mask) : kn_call(&b->self_attn, h);
    h = kn_add_norm(&b->post_attention_layernorm, x, h, &x); /* x += h; its norm */
    return KN_VALUES(kn_add(x, kn_call(&b->mlp, h)));
}

/* The loss in place of lm_head's logits, which are never whole. */
static kn_values head_loss(kn_module *self, kn_values in, const void *arg)
{
    (void)arg;
    return KN_VALUES(kn_linear_cross_entropy(in.v[0], kn_module_param(self, "weight"), in.v[1]));
}

/* Logits of x, or the loss against targets unless they are NULL. */
static kn_tensor *head(kn_module *self, llama_state *s, kn_tensor *x, kn_tensor *targets)
{
    if (!s->config.untied) {
        kn_tensor *weight = kn_module_param(&s->embed_tokens, "weight");
        return targets ? kn_linear_cross_entropy(x, weight, targets)
                       : kn_linear(x, weight, NULL, false);
    }
    if (!targets)
        return kn_call(&s->lm_head, x);
    /* a module that took lm_head's place (kn_module_replace) has a forward of its own */
    if (kn_module_find(self, "lm_head") != &s->lm_head.base)
        return kn_cross_entropy(kn_call(&s->lm_head, x), targets);
    return kn_call_method_n(&s->lm_head, head_loss, KN_VALUES(x, targets), NULL, 0).v[0];
}

static kn_values llama_forward(kn_module *self, kn_values in, const void *arg)
{
    llama_state *s = kn_module_data(self);
    const bool *last = arg; /* logits of the last position only */
    if (!kn_text_inputs("llama", &in, &s->block[0].self_attn, s->config.ctx))
        return (kn_values){ 0 };
    /* rope sees differences of positions, so these needn't begin anew with a document */
    kn_tensor *mask = in.n == 3 ? kn_document_mask(in.v[2]) : NULL;
    kn_tensor *x = kn_call(&s->embed_tokens, in.v[0]); /* (B, T, C) */
    for (int i = 0; i < s->config.layers; i++)
        x = mask ? kn_call_with(&s->block[i], x, mask) : kn_call(&s->block[i], x);
    if (last && *last && x)
        x = kn_reshape(kn_slice(x, 1, kn_size(x, 1) - 1, kn_size(x, 1)),
                       KN_SHAPE(kn_size(x, 0), kn_size(x, 2)));
    x = kn_call(&s->norm, x);
    return KN_VALUES(head(self, s, x, in.n >= 2 ? in.v[1] : NULL));
}

/* ---- making ---------------------------------------------------------------------------------- */

static bool block_init(llama_block *b, kn_module *list, int index, const kn_llama_config *c)
{
    char name[16];
    snprintf(name, sizeof name, "%d", index);
    /* the layers that add to the residual stream start smaller with depth */
    kn_initializer normal = KN_NORMAL_INIT(0.02),
                   proj = KN_NORMAL_INIT(0.02 / sqrt(2.0 * c->layers));
    return kn_module_init_n((kn_module *)b, llama_block_forward) &&
           kn_module_add(list, name, &b->base) &&
           kn_rms_norm_init(&b->input_layernorm, &b->base, "input_layernorm", c->embd,
                            .eps = c->norm_eps) &&
           kn_multi_head_attention_init(
               &b->self_attn, &b->base, "self_attn", c->embd, c->heads, .kv_heads = c->kv_heads,
               .no_bias = true, .causal = true, .rope = true, .rope_base = c->rope_base,
               .rope_scaling = c->rope_scaling, .dropout = c->dropout, .head_dim = c->head_dim,
               .window = c->window, .qkv_bias = c->qkv_bias, .qk_norm = c->qk_norm,
               .qk_norm_eps = c->qk_norm ? c->norm_eps : 0, .weight = normal,
               .proj_weight = proj) &&
           kn_rms_norm_init(&b->post_attention_layernorm, &b->base, "post_attention_layernorm",
                            c->embd, .eps = c->norm_eps) &&
           kn_swiglu_init(&b->mlp, &b->base, "mlp", c->embd, c->hidden, .no_bias = true,
                          .weight = normal, .proj_weight = proj);
}

bool kn_llama_init(kn_llama *g, kn_llama_config config, kn_dtype dtype, kn_device device)
{
    const kn_llama_config *c = &config;
    if (!kn_ok() || !kn_llama_config_check(&config) ||
        !kn_module_init_n((kn_module *)g, llama_forward))
        return false;
    if (!kn_module_set_data(g, NULL,
                            sizeof(llama_state) + (size_t)c->layers * sizeof(llama_block))) {
        kn_module_free(g);
        return false;
    }
    llama_state *s = kn_module_data(g);
    s->config = config;
    kn_module *m = &s->model;
    kn_initializer normal = KN_NORMAL_INIT(0.02);
    bool ok = kn_module_defaults(g, .dtype = dtype, .device = device) &&
              kn_module_list_init(m, &g->base, "model") &&
              kn_embedding_init(&s->embed_tokens, m, "embed_tokens", c->vocab, c->embd,
                                .weight = normal) &&
              kn_module_list_init(&s->layers, m, "layers");
    for (int i = 0; ok && i < c->layers; i++)
        ok = block_init(&s->block[i], &s->layers, i, c);
    ok = ok && kn_rms_norm_init(&s->norm, m, "norm", c->embd, .eps = c->norm_eps);
    if (ok && c->untied)
        ok = kn_linear_init(&s->lm_head, &g->base, "lm_head", c->embd, c->vocab, .no_bias = true,
                            .weight = normal);
    else if (ok) /* llama_forward's use */
        ok = kn_share_parameter(g, "head", kn_module_param(&s->embed_tokens, "weight"));
    if (!ok)
        kn_module_free(g);
    return ok;
}
