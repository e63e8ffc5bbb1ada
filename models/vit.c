/* models/vit.c: a vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words",
 * arXiv:2010.11929) with timm's modules:
 *
 *   x = patch_embed(image), one vector a patch                (B, P, C)
 *   x = [cls_token, x] + pos_embed                            (B, 1 + P, C)
 *   x = x + attn(norm1(x))                                    once a block
 *   x = x + mlp(norm2(x))                                     mlp: fc2(gelu(fc1))
 *   logits = head(norm(x)[:, 0])                              (B, classes) */
#include "models/vit.h"

#include "kernels/error.h"

#include <stdio.h>

typedef struct vit_attention {
    kn_module base;
    kn_linear qkv, proj;
    kn_dropout proj_drop;
    int heads;
} vit_attention;

typedef struct vit_mlp {
    kn_module base;
    kn_linear fc1, fc2;
    kn_dropout drop1, drop2;
} vit_mlp;

typedef struct vit_block {
    kn_module base;
    kn_layer_norm norm1, norm2;
    vit_attention attn;
    vit_mlp mlp;
} vit_block;

typedef struct vit_state {
    kn_vit_config config; /* comes first; defaults filled in */
    kn_module patch_embed, blocks;
    kn_conv2d proj; /* of patch_embed */
    kn_tensor *cls_token, *pos_embed;
    kn_dropout pos_drop;
    kn_layer_norm norm;
    kn_linear head;
    vit_block block[]; /* [layers] */
} vit_state;

/* ---- forward --------------------------------------------------------------------------------- */

/* qkv's columns are ordered [query, key or value; head; channel of the head]. */
static kn_tensor *vit_attention_forward(kn_module *self, kn_tensor *x)
{
    vit_attention *a = (vit_attention *)self;
    int64_t batch = kn_size(x, 0), len = kn_size(x, 1), dim = kn_size(x, 2);
    kn_tensor *all = kn_call(&a->qkv, x), *part[3];
    for (int i = 0; i < 3; i++) {
        kn_tensor *one = kn_slice(all, 2, i * dim, (i + 1) * dim);
        one = kn_reshape(one, KN_SHAPE(batch, len, a->heads, dim / a->heads));
        part[i] = kn_transpose(one, 1, 2); /* (B, heads, T, C / heads) */
    }
    kn_tensor *y = kn_scaled_dot_product_attention(part[0], part[1], part[2]);
    y = kn_reshape(kn_transpose(y, 1, 2), KN_SHAPE(batch, len, dim));
    return kn_call(&a->proj_drop, kn_call(&a->proj, y));
}

static kn_tensor *vit_mlp_forward(kn_module *self, kn_tensor *x)
{
    vit_mlp *m = (vit_mlp *)self;
    x = kn_call(&m->drop1, kn_gelu(kn_call(&m->fc1, x)));
    return kn_call(&m->drop2, kn_call(&m->fc2, x));
}

static kn_tensor *vit_block_forward(kn_module *self, kn_tensor *x)
{
    vit_block *b = (vit_block *)self;
    kn_tensor *h = kn_call(&b->attn, kn_call(&b->norm1, x));
    h = kn_add_norm(&b->norm2, x, h, &x); /* x += h; norm2(x) */
    return kn_add(x, kn_call(&b->mlp, h));
}

static kn_tensor *vit_forward(kn_module *self, kn_tensor *x)
{
    vit_state *s = kn_module_data(self);
    const kn_vit_config *c = &s->config;
    char buf[128];
    if (kn_ndim(x) != 4 || kn_size(x, 1) != c->channels || kn_size(x, 2) != c->image ||
        kn_size(x, 3) != c->image) {
        kn_fail("vit: images are %s; the model takes [N,%lld,%lld,%lld]",
                kn_describe(x, buf, sizeof buf), (long long)c->channels, (long long)c->image,
                (long long)c->image);
        return NULL;
    }
    x = kn_call(&s->proj, x);                     /* (B, C, rows, columns) of patches */
    x = kn_transpose(kn_flatten(x, 2, -1), 1, 2); /* (B, P, C) */
    kn_tensor *token = kn_cast(s->cls_token, kn_dtype_of(x));
    kn_tensor *all[] = { kn_expand(token, KN_SHAPE(kn_size(x, 0), 1, c->embd)), x };
    x = kn_add(kn_cat(all, 2, 1), kn_cast(s->pos_embed, kn_dtype_of(x)));
    x = kn_call(&s->pos_drop, x);
    for (int i = 0; i < c->layers; i++)
        x = kn_call(&s->block[i], x);
    x = kn_squeeze(kn_slice(x, 1, 0, 1), KN_SHAPE(1)); /* the token's vector */
    return kn_call(&s->head, kn_call(&s->norm, x));
}

/* ---- making ---------------------------------------------------------------------------------- */

static const double NORM_EPS = 1e-6;

static bool attention_init(vit_attention *a, kn_module *parent, const kn_vit_config *c)
{
    const kn_initializer w = KN_TRUNCATED_NORMAL_INIT(0.02), b = KN_ZEROS_INIT;
    a->heads = c->heads;
    return kn_module_init((kn_module *)a, vit_attention_forward) &&
           kn_module_add(parent, "attn", &a->base) &&
           kn_linear_init(&a->qkv, &a->base, "qkv", c->embd, 3 * c->embd, .weight = w, .bias = b) &&
           kn_linear_init(&a->proj, &a->base, "proj", c->embd, c->embd, .weight = w, .bias = b) &&
           kn_dropout_init(&a->proj_drop, &a->base, "proj_drop", c->dropout);
}

static bool mlp_init(vit_mlp *m, kn_module *parent, const kn_vit_config *c)
{
    const kn_initializer w = KN_TRUNCATED_NORMAL_INIT(0.02), b = KN_ZEROS_INIT;
    return kn_module_init((kn_module *)m, vit_mlp_forward) &&
           kn_module_add(parent, "mlp", &m->base) &&
           kn_linear_init(&m->fc1, &m->base, "fc1", c->embd, 4 * c->embd, .weight = w, .bias = b) &&
           kn_dropout_init(&m->drop1, &m->base, "drop1", c->dropout) &&
           kn_linear_init(&m->fc2, &m->base, "fc2", 4 * c->embd, c->embd, .weight = w, .bias = b) &&
           kn_dropout_init(&m->drop2, &m->base, "drop2", c->dropout);
}

static bool block_init(vit_block *b, kn_module *list, int index, const kn_vit_config *c)
{
    char name[16];
    snprintf(name, sizeof name, "%d", index);
    return kn_module_init((kn_module *)b, vit_block_forward) &&
           kn_module_add(list, name, &b->base) &&
           kn_layer_norm_init(&b->norm1, &b->base, "norm1", c->embd, .eps = NORM_EPS) &&
           attention_init(&b->attn, &b->base, c) &&
           kn_layer_norm_init(&b->norm2, &b->base, "norm2", c->embd, .eps = NORM_EPS) &&
           mlp_init(&b->mlp, &b->base, c);
}

static bool declare(vit_state *s, kn_module *root, kn_dtype dtype, kn_device device)
{
    const kn_vit_config *c = &s->config;
    const int64_t patches = c->image / c->patch * (c->image / c->patch);
    s->cls_token = kn_parameter(root, "cls_token", dtype, device, KN_NORMAL_INIT(1e-6),
                                KN_SHAPE(1, 1, c->embd));
    s->pos_embed = kn_parameter(root, "pos_embed", dtype, device, KN_TRUNCATED_NORMAL_INIT(0.02),
                                KN_SHAPE(1, 1 + patches, c->embd));
    bool ok = s->cls_token && s->pos_embed &&
              kn_module_list_init(&s->patch_embed, root, "patch_embed") &&
              kn_conv2d_init(&s->proj, &s->patch_embed, "proj", c->channels, c->embd, c->patch,
                             .stride = c->patch) &&
              kn_dropout_init(&s->pos_drop, root, "pos_drop", c->dropout) &&
              kn_module_list_init(&s->blocks, root, "blocks");
    for (int i = 0; ok && i < c->layers; i++)
        ok = block_init(&s->block[i], &s->blocks, i, c);
    return ok && kn_layer_norm_init(&s->norm, root, "norm", c->embd, .eps = NORM_EPS) &&
           kn_linear_init(&s->head, root, "head", c->embd, c->classes,
                          .weight = KN_TRUNCATED_NORMAL_INIT(0.02), .bias = KN_ZEROS_INIT);
}

bool kn_vit_init(kn_vit *v, kn_vit_config config, kn_dtype dtype, kn_device device)
{
    if (!kn_ok() || !kn_vit_config_check(&config))
        return false;
    if (!kn_module_init((kn_module *)v, vit_forward))
        return false;
    size_t size = sizeof(vit_state) + (size_t)config.layers * sizeof(vit_block);
    bool ok = kn_module_set_data(v, NULL, size);
    if (ok) {
        vit_state *s = kn_module_data(v);
        s->config = config;
        ok = kn_module_defaults(v, .dtype = dtype, .device = device) &&
             declare(s, &v->base, dtype, device);
    }
    if (!ok)
        kn_module_free(v);
    return ok;
}
