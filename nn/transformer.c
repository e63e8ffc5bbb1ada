/* nn/transformer.c: the two halves of a transformer block: attention and MLP, as in GPT-2. The
 * children live in memory of the layer, so that a user's struct holds one pointer. */
#include "autograd/ops.h"
#include "nn/cache.h"
#include "nn/nn_internal.h"
#include <math.h>

/* The first options of a layer's parts are those of the layer. */
#define AS(o) .dtype = (o).dtype, .device = (o).device, .no_bias = (o).no_bias

/* ---- what both attentions have --------------------------------------------------------------- */

typedef struct head_state {
    kn_attention_cache cache;   /* comes first */
    kn_rms_norm q_norm, k_norm; /* with .qk_norm */
    int count, kv_count;
    int64_t size; /* of a head */
    double dropout;
    kn_attend_options o; /* of each call, but for mask and dropout */
} head_state;

/* x[B,T,C] -> [B,n,T,size], a view. */
static kn_tensor *split(kn_tensor *x, int64_t n, int64_t size)
{
    return x ? kn_transpose(kn_view(x, KN_SHAPE(x->shape[0], x->shape[1], n, size)), 1, 2) : NULL;
}

/* Attention of q[B,T,count size] to k and v [B,S,kv_count size]: [B,T,count size]. */
static kn_tensor *attend(kn_module *self, head_state *h, const char *name, kn_tensor *q,
                         kn_tensor *k, kn_tensor *v, kn_tensor *mask)
{
    kn_attend_options o = h->o;
    o.mask = mask;
    o.dropout = kn_training(self) ? h->dropout : 0;
    kn_tensor *y = kn_attend(&h->cache, name, split(q, h->count, h->size),
                             split(k, h->kv_count, h->size), split(v, h->kv_count, h->size), &o);
    y = kn_transpose(y, 1, 2); /* so its elements lie row by row */
    return y ? kn_reshape(y, KN_SHAPE(y->shape[0], y->shape[1], h->count * h->size)) : NULL;
}

static bool check_rope(const char *who, const char *name, bool rope, double base,
                       kn_rope_scaling *scaling, bool qk_norm, double eps)
{
    char text[96];
    snprintf(text, sizeof text, "%s '%s'", who, name ? name : "");
    if (!kn_rope_check(text, rope, base, scaling))
        return false;
    return eps == 0 || qk_norm ||
           kn_fail("%s: .qk_norm_eps %g does nothing without .qk_norm", text, eps);
}

/* The norms of queries and keys, over the channels of a head. */
static bool add_norms(head_state *h, kn_module *m, kn_dtype dtype, kn_device device, double eps)
{
    h->o.q_norm = &h->q_norm;
    h->o.k_norm = &h->k_norm;
    return kn_rms_norm_init(&h->q_norm, m, "q_norm", h->size, .dtype = dtype, .device = device,
                            .eps = eps) &&
           kn_rms_norm_init(&h->k_norm, m, "k_norm", h->size, .dtype = dtype, .device = device,
                            .eps = eps);
}

/* ---- self-attention -------------------------------------------------------------------------- */

typedef struct attention_state {
    head_state h; /* comes first */
    kn_linear c_attn, c_proj;
    kn_dropout resid;
} attention_state;

static kn_values self_attention_forward(kn_module *self, kn_values in, const void *arg)
{
    attention_state *s = kn_module_data(self);
    kn_tensor *x = in.n > 0 ? in.v[0] : NULL, *mask = in.n > 1 ? in.v[1] : NULL;
    (void)arg;
    if (in.n > 2 || !x)
        kn_fail("attention: takes x[B,T,C], or x and a mask; %d tensors were passed%s", in.n,
                x ? "" : ", x is NULL");
    else if (kn_ndim(x) != 3)
        kn_fail("attention: x is %s, should be [B,T,C]", KN_SHOWN(x));
    if (!kn_ok())
        return (kn_values){ 0 };
    const int64_t size = s->h.size, q_dim = s->h.count * size, kv_dim = s->h.kv_count * size;
    kn_tensor *qkv = kn_call(&s->c_attn, x), *part[3]; /* (B, T, (H + 2G) D) */
    if (s->h.kv_count == s->h.count) {
        kn_chunk(qkv, 2, 3, part);
    } else {
        part[0] = kn_slice(qkv, 2, 0, q_dim);
        part[1] = kn_slice(qkv, 2, q_dim, q_dim + kv_dim);
        part[2] = kn_slice(qkv, 2, q_dim + kv_dim, q_dim + 2 * kv_dim);
    }
    if (s->h.cache.of && (!s->h.o.causal || mask)) {
        kn_fail("attention: with %s it has no cache (kn_cache_new)",
                mask ? "a mask" : ".not_causal");
        return (kn_values){ 0 };
    }
    kn_tensor *y = attend(self, &s->h, "attention", part[0], part[1], part[2], mask);
    return y ? KN_VALUES(kn_call(&s->resid, kn_call(&s->c_proj, y))) : (kn_values){ 0 };
}

bool kn_self_attention_init_(kn_self_attention *a, kn_module *parent, const char *name, int64_t dim,
                             int heads, kn_self_attention_init_options o)
{
    if (heads < 1 || dim < 1 || dim % heads)
        return kn_fail("attention '%s': %lld channels don't divide into %d heads; choose heads "
                       "that divide the channels",
                       name, (long long)dim, heads);
    int kv = o.kv_heads ? o.kv_heads : heads;
    if (kv < 1 || heads % kv)
        return kn_fail("attention '%s': %d heads don't divide by %d key-value heads", name, heads,
                       kv);
    if (!check_rope("attention", name, o.rope, o.rope_base, &o.rope_scaling, o.qk_norm,
                    o.qk_norm_eps))
        return false;
    const attention_state init = { .h = { .count = heads,
                                          .kv_count = kv,
                                          .size = dim / heads,
                                          .dropout = o.dropout,
                                          .o = { .rope = o.rope,
                                                 .rope_base = o.rope_base,
                                                 .rope_scaling = o.rope_scaling,
                                                 .causal = !o.not_causal } } };
    if (!kn_module_init_n((kn_module *)a, self_attention_forward) ||
        !kn_layer_place(a, parent, name, &init, sizeof init))
        return false;
    attention_state *s = kn_module_data(a);
    int64_t out = dim + 2 * kv * init.h.size;
    return kn_linear_init(&s->c_attn, &a->base, "c_attn", dim, out, AS(o), .in_out = o.in_out,
                          .weight = o.weight, .bias = KN_ZEROS_INIT) &&
           kn_linear_init(&s->c_proj, &a->base, "c_proj", dim, dim, AS(o), .in_out = o.in_out,
                          .weight = o.proj_weight, .bias = KN_ZEROS_INIT) &&
           kn_dropout_init(&s->resid, &a->base, "resid_dropout", o.dropout) &&
           (!o.qk_norm || add_norms(&s->h, &a->base, o.dtype, o.device, o.qk_norm_eps));
}

/* ---- attention to a context ------------------------------------------------------------------ */

typedef struct context_state {
    head_state h; /* comes first */
    kn_linear q_proj, k_proj, v_proj, o_proj;
    int64_t dim, kv_dim;
} context_state;

/* Shapes of x and context; false with an error. */
static bool check_inputs(const kn_module *self, kn_values in)
{
    const context_state *s = kn_module_data(self);
    const kn_tensor *x = in.v[0], *c = in.n > 1 && in.v[1] ? in.v[1] : x;
    if (in.n < 1 || in.n > 3 || !x)
        return kn_fail("'%s' (multi_head_attention) takes x, or x and a context, or x, a context "
                       "and a mask; %d tensors were passed%s",
                       kn_module_shown(self->impl), in.n, x ? "" : ", x is NULL");
    if (x->ndim == 3 && c->ndim == 3 && x->shape[0] == c->shape[0] && x->shape[2] == s->dim &&
        c->shape[2] == s->kv_dim)
        return true;
    return kn_fail("'%s' (multi_head_attention): needs x[B,T,%lld] and a context[B,S,%lld], got %s "
                   "and %s",
                   kn_module_shown(self->impl), (long long)s->dim, (long long)s->kv_dim,
                   KN_SHOWN(x), c == x ? "none" : KN_SHOWN(c));
}

static kn_values multi_head_attention_forward(kn_module *self, kn_values in, const void *arg)
{
    context_state *s = kn_module_data(self);
    (void)arg;
    if (!check_inputs(self, in))
        return (kn_values){ 0 };
    kn_tensor *x = in.v[0], *context = in.n > 1 && in.v[1] ? in.v[1] : x;
    kn_tensor *mask = in.n > 2 ? in.v[2] : NULL;
    if (s->h.cache.of && (!s->h.o.causal || context != x || mask)) {
        kn_fail(
            "'%s' (multi_head_attention): with a cache (kn_cache_new) it is causal, to x itself, "
            "without a mask",
            kn_module_shown(self->impl));
        return (kn_values){ 0 };
    }
    kn_tensor *q = kn_call(&s->q_proj, x), *k = kn_call(&s->k_proj, context),
              *v = kn_call(&s->v_proj, context);
    kn_tensor *y = attend(self, &s->h, kn_module_shown(self->impl), q, k, v, mask);
    return y ? KN_VALUES(kn_call(&s->o_proj, y)) : (kn_values){ 0 };
}

static bool check_context_options(const char *name, int64_t dim, int heads,
                                  kn_multi_head_attention_init_options *o)
{
    if (heads < 1 || dim < 1 || o->head_dim < 0 || (o->head_dim == 0 && dim % heads))
        return kn_fail("kn_multi_head_attention_init: '%s' has %lld channels, which %d heads don't "
                       "divide",
                       name, (long long)dim, heads);
    if (o->head_dim > 1 << 24)
        return kn_fail("kn_multi_head_attention_init: '%s': .head_dim is %lld; at most %d", name,
                       (long long)o->head_dim, 1 << 24);
    if (o->window < 0 || (o->window && !o->causal) || (o->qkv_bias && !o->no_bias))
        return kn_fail("kn_multi_head_attention_init: '%s': .window, %lld, goes with .causal, and "
                       ".qkv_bias with .no_bias",
                       name, (long long)o->window);
    if (o->kv_heads < 0 || (o->kv_heads && heads % o->kv_heads))
        return kn_fail("kn_multi_head_attention_init: '%s' has %d heads, which %d key-value heads "
                       "don't divide",
                       name, heads, o->kv_heads);
    if (!check_rope("kn_multi_head_attention_init:", name, o->rope, o->rope_base, &o->rope_scaling,
                    o->qk_norm, o->qk_norm_eps))
        return false;
    return (o->kv_dim >= 0 && o->dropout >= 0 && o->dropout < 1) ||
           kn_fail("kn_multi_head_attention_init: '%s' has .kv_dim %lld, .dropout %g; at least 0 "
                   "and in [0, 1) are needed",
                   name, (long long)o->kv_dim, o->dropout);
}

bool kn_multi_head_attention_init_(kn_multi_head_attention *a, kn_module *parent, const char *name,
                                   int64_t dim, int heads, kn_multi_head_attention_init_options o)
{
    if (!check_context_options(name, dim, heads, &o))
        return false;
    const int kv = o.kv_heads ? o.kv_heads : heads;
    const int64_t kv_dim = o.kv_dim ? o.kv_dim : dim, head = o.head_dim ? o.head_dim : dim / heads;
    const context_state init = { .h = { .count = heads,
                                        .kv_count = kv,
                                        .size = head,
                                        .dropout = o.dropout,
                                        .o = { .rope = o.rope,
                                               .rope_base = o.rope_base,
                                               .rope_scaling = o.rope_scaling,
                                               .causal = o.causal,
                                               .window = o.window } },
                                 .dim = dim,
                                 .kv_dim = kv_dim };
    if (!kn_module_init_n((kn_module *)a, multi_head_attention_forward) ||
        !kn_layer_place(a, parent, name, &init, sizeof init))
        return false;
    context_state *s = kn_module_data(a);
    kn_multi_head_attention_init_options in = o; /* of queries, keys and values */
    in.no_bias = o.no_bias && !o.qkv_bias;
    return kn_linear_init(&s->q_proj, &a->base, "q_proj", dim, heads * head, AS(in),
                          .weight = o.weight) &&
           kn_linear_init(&s->k_proj, &a->base, "k_proj", kv_dim, kv * head, AS(in),
                          .weight = o.weight) &&
           kn_linear_init(&s->v_proj, &a->base, "v_proj", kv_dim, kv * head, AS(in),
                          .weight = o.weight) &&
           kn_linear_init(&s->o_proj, &a->base, "o_proj", heads * head, dim, AS(o),
                          .weight = o.proj_weight) &&
           (!o.qk_norm || add_norms(&s->h, &a->base, o.dtype, o.device, o.qk_norm_eps));
}

/* ---- MLP ------------------------------------------------------------------------------------- */

typedef struct mlp_state {
    kn_linear c_fc, c_proj;
    kn_dropout drop;
} mlp_state;

static kn_tensor *mlp_forward(kn_module *self, kn_tensor *x)
{
    mlp_state *s = kn_module_data(self);
    return kn_call(&s->drop, kn_call(&s->c_proj, kn_gelu_tanh(kn_call(&s->c_fc, x))));
}

bool kn_mlp_init_(kn_mlp *m, kn_module *parent, const char *name, int64_t dim,
                  kn_mlp_init_options o)
{
    int64_t hidden = o.hidden ? o.hidden : 4 * dim;
    const mlp_state init = { 0 };
    if (!kn_layer_begin(m, parent, name, mlp_forward, "mlp", &init, sizeof init))
        return false;
    mlp_state *s = kn_module_data(m);
    return kn_linear_init(&s->c_fc, &m->base, "c_fc", dim, hidden, AS(o), .in_out = o.in_out,
                          .weight = o.weight, .bias = KN_ZEROS_INIT) &&
           kn_linear_init(&s->c_proj, &m->base, "c_proj", hidden, dim, AS(o), .in_out = o.in_out,
                          .weight = o.proj_weight, .bias = KN_ZEROS_INIT) &&
           kn_dropout_init(&s->drop, &m->base, "dropout", o.dropout);
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

typedef struct swiglu_state {
    kn_linear gate_proj, up_proj, down_proj;
    kn_dropout drop;
} swiglu_state;

static kn_tensor *swiglu_forward(kn_module *self, kn_tensor *x)
{
    swiglu_state *s = kn_module_data(self);
    kn_tensor *gate = kn_silu(kn_call(&s->gate_proj, x));
    return kn_call(&s->drop, kn_call(&s->down_proj, kn_mul(gate, kn_call(&s->up_proj, x))));
}

bool kn_swiglu_init_(kn_swiglu *m, kn_module *parent, const char *name, int64_t dim, int64_t hidden,
                     kn_swiglu_init_options o)
{
    const swiglu_state init = { 0 };
    if (!kn_layer_begin(m, parent, name, swiglu_forward, "swiglu", &init, sizeof init))
        return false;
    swiglu_state *s = kn_module_data(m);
    return kn_linear_init(&s->gate_proj, &m->base, "gate_proj", dim, hidden, AS(o),
                          .weight = o.weight) &&
           kn_linear_init(&s->up_proj, &m->base, "up_proj", dim, hidden, AS(o),
                          .weight = o.weight) &&
           kn_linear_init(&s->down_proj, &m->base, "down_proj", hidden, dim, AS(o),
                          .weight = o.proj_weight) &&
           kn_dropout_init(&s->drop, &m->base, "dropout", o.dropout);
}
