/* nn/transformer.c: the two halves of a transformer block: attention and MLP, as in GPT-2. The
 * children live in memory of the layer, so that a user's struct holds one pointer. */
#include "autograd/ops.h"
#include "nn/cache.h"
#include "nn/nn_internal.h"
#include <math.h>

/* ---- attention ------------------------------------------------------------------------------- */

typedef struct attention_state {
    kn_attention_cache cache; /* comes first */
    kn_linear c_attn, c_proj;
    kn_dropout resid;
    kn_rms_norm q_norm, k_norm; /* with .qk_norm */
    int heads, kv_heads;
    int64_t head_dim;
    kn_self_attention_init_options o;
} attention_state;

/* x[B,T,C] -> q[B,H,T,D], k and v [B,G,T,D] as views of one product. */
static kn_tensor *heads_of(kn_tensor *x, int64_t heads, int64_t dim)
{
    if (!x)
        return NULL;
    return kn_transpose(kn_view(x, KN_SHAPE(kn_size(x, 0), kn_size(x, 1), heads, dim)), 1, 2);
}

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
    int64_t batch = kn_size(x, 0), len = kn_size(x, 1), q_dim = s->heads * s->head_dim,
            kv_dim = s->kv_heads * s->head_dim;
    kn_tensor *qkv = kn_call(&s->c_attn, x), *part[3]; /* (B, T, (H + 2G) D) */
    if (s->kv_heads == s->heads) {
        kn_chunk(qkv, 2, 3, part);
    } else {
        part[0] = kn_slice(qkv, 2, 0, q_dim);
        part[1] = kn_slice(qkv, 2, q_dim, q_dim + kv_dim);
        part[2] = kn_slice(qkv, 2, q_dim + kv_dim, q_dim + 2 * kv_dim);
    }
    kn_tensor *q = heads_of(part[0], s->heads, s->head_dim),
              *k = heads_of(part[1], s->kv_heads, s->head_dim),
              *v = heads_of(part[2], s->kv_heads, s->head_dim);
    if (s->cache.of && (s->o.not_causal || mask)) {
        kn_fail("attention: with %s it has no cache (kn_cache_new)",
                mask ? "a mask" : ".not_causal");
        return (kn_values){ 0 };
    }
    kn_tensor *y =
        kn_attend(&s->cache, "attention", q, k, v,
                  &(kn_attend_options){ .q_norm = s->o.qk_norm ? &s->q_norm : NULL,
                                        .k_norm = &s->k_norm,
                                        .rope = s->o.rope,
                                        .rope_base = s->o.rope_base,
                                        .rope_scaling = s->o.rope_scaling,
                                        .causal = !s->o.not_causal,
                                        .mask = mask,
                                        .dropout = kn_training(self) ? s->o.dropout : 0 });
    if (!y)
        return (kn_values){ 0 };
    y = kn_reshape(kn_transpose(y, 1, 2),
                   KN_SHAPE(batch, len, q_dim)); /* a view: y's memory order is [B,T,H,D] */
    return KN_VALUES(kn_call(&s->resid, kn_call(&s->c_proj, y)));
}

static bool check_rope(const char *kind, const char *name, bool rope, double base,
                       kn_rope_scaling *scaling)
{
    char who[96];
    snprintf(who, sizeof who, "%s '%s'", kind, name ? name : "");
    return kn_rope_check(who, rope, base, scaling);
}

/* Of queries or keys: over the channels of a head. */
static bool head_norm(kn_rms_norm *norm, kn_self_attention *a, const char *name)
{
    const attention_state *s = kn_module_data(a);
    return kn_rms_norm_init(norm, &a->base, name, s->head_dim, .dtype = s->o.dtype,
                            .device = s->o.device, .eps = s->o.qk_norm_eps);
}

bool kn_self_attention_init_(kn_self_attention *a, kn_module *parent, const char *name, int64_t dim,
                             int heads, kn_self_attention_init_options o)
{
    if (heads < 1 || dim < 1 || dim % heads)
        return kn_fail("attention '%s': %lld channels don't divide into %d heads; choose heads "
                       "that divide the "
                       "channels",
                       name, (long long)dim, heads);
    int kv = o.kv_heads ? o.kv_heads : heads;
    if (kv < 1 || heads % kv)
        return kn_fail("attention '%s': %d heads don't divide by %d key-value heads", name, heads,
                       kv);
    if (!check_rope("attention", name, o.rope, o.rope_base, &o.rope_scaling))
        return false;
    if (o.qk_norm_eps != 0 && !o.qk_norm)
        return kn_fail("attention '%s': .qk_norm_eps %g does nothing without .qk_norm", name,
                       o.qk_norm_eps);
    attention_state init = { .heads = heads, .kv_heads = kv, .head_dim = dim / heads, .o = o };
    if (!kn_module_init_n((kn_module *)a, self_attention_forward) ||
        !kn_layer_place(a, parent, name, &init, sizeof init))
        return false;
    attention_state *s = kn_module_data(a);
    int64_t out = dim + 2 * kv * init.head_dim;
    return kn_linear_init(&s->c_attn, &a->base, "c_attn", dim, out, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .in_out = o.in_out,
                          .weight = o.weight, .bias = KN_ZEROS_INIT) &&
           kn_linear_init(&s->c_proj, &a->base, "c_proj", dim, dim, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .in_out = o.in_out,
                          .weight = o.proj_weight, .bias = KN_ZEROS_INIT) &&
           kn_dropout_init(&s->resid, &a->base, "resid_dropout", o.dropout) &&
           (!o.qk_norm ||
            (head_norm(&s->q_norm, a, "q_norm") && head_norm(&s->k_norm, a, "k_norm")));
}

/* ---- attention to a context ------------------------------------------------------------------ */

typedef struct context_state {
    kn_attention_cache cache; /* comes first */
    kn_linear q_proj, k_proj, v_proj, o_proj;
    kn_rms_norm q_norm, k_norm; /* with .qk_norm */
    int heads, kv_heads;
    int64_t dim, kv_dim, head_dim;
    kn_multi_head_attention_init_options o;
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
    const int64_t head = s->head_dim;
    kn_tensor *q = heads_of(kn_call(&s->q_proj, x), s->heads, head),
              *k = heads_of(kn_call(&s->k_proj, context), s->kv_heads, head),
              *v = heads_of(kn_call(&s->v_proj, context), s->kv_heads, head);
    if (s->cache.of && (!s->o.causal || context != x || (in.n > 2 && in.v[2]))) {
        kn_fail(
            "'%s' (multi_head_attention): with a cache (kn_cache_new) it is causal, to x itself, "
            "without a mask",
            kn_module_shown(self->impl));
        return (kn_values){ 0 };
    }
    kn_tensor *y =
        kn_attend(&s->cache, kn_module_shown(self->impl), q, k, v,
                  &(kn_attend_options){ .q_norm = s->o.qk_norm ? &s->q_norm : NULL,
                                        .k_norm = &s->k_norm,
                                        .rope = s->o.rope,
                                        .rope_base = s->o.rope_base,
                                        .rope_scaling = s->o.rope_scaling,
                                        .causal = s->o.causal,
                                        .window = s->o.window,
                                        .mask = in.n > 2 ? in.v[2] : NULL,
                                        .dropout = kn_training(self) ? s->o.dropout : 0 });
    if (!y)
        return (kn_values){ 0 };
    y = kn_reshape(kn_transpose(y, 1, 2), KN_SHAPE(x->shape[0], x->shape[1], s->heads * head));
    return KN_VALUES(kn_call(&s->o_proj, y));
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
    if (!check_rope("kn_multi_head_attention_init:", name, o->rope, o->rope_base, &o->rope_scaling))
        return false;
    if (o->qk_norm_eps != 0 && !o->qk_norm)
        return kn_fail("kn_multi_head_attention_init: '%s' has .qk_norm_eps without .qk_norm, "
                       "which does nothing",
                       name);
    return (o->kv_dim >= 0 && o->dropout >= 0 && o->dropout < 1) ||
           kn_fail("kn_multi_head_attention_init: '%s' has .kv_dim %lld, .dropout %g; at least 0 "
                   "and in [0, 1) are needed",
                   name, (long long)o->kv_dim, o->dropout);
}

static bool project(kn_linear *l, kn_multi_head_attention *a, const char *name, int64_t in,
                    int64_t out, bool no_bias, kn_initializer weight)
{
    const context_state *s = kn_module_data(a);
    return kn_linear_init(l, &a->base, name, in, out, .dtype = s->o.dtype, .device = s->o.device,
                          .no_bias = no_bias, .weight = weight);
}

bool kn_multi_head_attention_init_(kn_multi_head_attention *a, kn_module *parent, const char *name,
                                   int64_t dim, int heads, kn_multi_head_attention_init_options o)
{
    if (!check_context_options(name, dim, heads, &o))
        return false;
    const int kv = o.kv_heads ? o.kv_heads : heads;
    const int64_t kv_dim = o.kv_dim ? o.kv_dim : dim, head = o.head_dim ? o.head_dim : dim / heads;
    const context_state init = {
        .heads = heads, .kv_heads = kv, .dim = dim, .kv_dim = kv_dim, .head_dim = head, .o = o
    };
    if (!kn_module_init_n((kn_module *)a, multi_head_attention_forward) ||
        !kn_layer_place(a, parent, name, &init, sizeof init))
        return false;
    context_state *s = kn_module_data(a);
    const bool bare = o.no_bias && !o.qkv_bias;
    return project(&s->q_proj, a, "q_proj", dim, heads * head, bare, o.weight) &&
           project(&s->k_proj, a, "k_proj", kv_dim, kv * head, bare, o.weight) &&
           project(&s->v_proj, a, "v_proj", kv_dim, kv * head, bare, o.weight) &&
           project(&s->o_proj, a, "o_proj", heads * head, dim, o.no_bias, o.proj_weight) &&
           (!o.qk_norm || (kn_rms_norm_init(&s->q_norm, &a->base, "q_norm", head, .dtype = o.dtype,
                                            .device = o.device, .eps = o.qk_norm_eps) &&
                           kn_rms_norm_init(&s->k_norm, &a->base, "k_norm", head, .dtype = o.dtype,
                                            .device = o.device, .eps = o.qk_norm_eps)));
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
    return kn_linear_init(&s->c_fc, &m->base, "c_fc", dim, hidden, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .in_out = o.in_out,
                          .weight = o.weight, .bias = KN_ZEROS_INIT) &&
           kn_linear_init(&s->c_proj, &m->base, "c_proj", hidden, dim, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .in_out = o.in_out,
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
    return kn_linear_init(&s->gate_proj, &m->base, "gate_proj", dim, hidden, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .weight = o.weight) &&
           kn_linear_init(&s->up_proj, &m->base, "up_proj", dim, hidden, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .weight = o.weight) &&
           kn_linear_init(&s->down_proj, &m->base, "down_proj", hidden, dim, .dtype = o.dtype,
                          .device = o.device, .no_bias = o.no_bias, .weight = o.proj_weight) &&
           kn_dropout_init(&s->drop, &m->base, "dropout", o.dropout);
}
