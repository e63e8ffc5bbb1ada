/* tests/nn/multi_head_attention_test.c: attention to x itself against kn_self_attention with the
 * same weights, to a context, masks, gradients through a recomputed call, errors. */
#include "nn/layers.h"
#include "tests/owned.h"

static kn_tensor *noise(uint64_t stream, int64_t B, int64_t T, int64_t C)
{
    return kn_randn(KN_F64, KN_CPU, 3, stream, KN_SHAPE(B, T, C));
}

static double difference(kn_tensor *a, kn_tensor *b)
{
    KN_CHECK(a && b, "%s", kn_error() ? kn_error() : "no result");
    return kn_item(kn_amax(kn_abs(kn_sub(a, b)), 0, NULL, false));
}

static kn_tensor *attend(kn_multi_head_attention *a, kn_tensor *x, kn_tensor *context,
                         kn_tensor *mask)
{
    return kn_call_n(a, KN_VALUES(x, context, mask), NULL, 0).v[0];
}

/* Rows of c_attn's weight are those of q_proj, k_proj and v_proj. */
KN_TEST(multi_head_attention, to_itself)
{
    OWNED_MODULE kn_self_attention one;
    OWNED_MODULE kn_multi_head_attention a;
    KN_CHECK(kn_self_attention_init(&one, NULL, "", 8, 4, .dtype = KN_F64, .kv_heads = 2,
                                    .rope = true, .qk_norm = true) &&
             kn_multi_head_attention_init(&a, NULL, "", 8, 4, .dtype = KN_F64, .kv_heads = 2,
                                          .rope = true, .qk_norm = true, .causal = true) &&
             kn_materialize(&one, KN_CPU, 1) && kn_materialize(&a, KN_CPU, 2));
    kn_set_grad_mode(false);
    kn_tensor *w = kn_module_param(&one, "c_attn.weight");
    KN_CHECK(
        kn_copy_(kn_module_param(&a, "q_proj.weight"), kn_slice(w, 0, 0, 8)) &&
        kn_copy_(kn_module_param(&a, "k_proj.weight"), kn_slice(w, 0, 8, 12)) &&
        kn_copy_(kn_module_param(&a, "v_proj.weight"), kn_slice(w, 0, 12, 16)) &&
        kn_copy_(kn_module_param(&a, "o_proj.weight"), kn_module_param(&one, "c_proj.weight")));
    static const char *const biases[] = { "q_proj.bias", "k_proj.bias", "v_proj.bias",
                                          "o_proj.bias" };
    for (int i = 0; i < 4; i++)
        KN_CHECK(kn_fill_(kn_module_param(&a, biases[i]), 0));
    kn_set_grad_mode(true);
    kn_tensor *x = noise(1, 2, 5, 8), *y = kn_call(&one, x);
    KN_CHECK(difference(kn_call(&a, x), y) < 1e-12);
    KN_CHECK(difference(attend(&a, x, NULL, NULL), y) < 1e-12);
    KN_CHECK(difference(attend(&a, x, x, NULL), y) < 1e-12);
}

/* A hidden position of the context changes nothing; gradients reach it unless it is hidden. */
KN_TEST(multi_head_attention, to_a_context_with_a_mask)
{
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE kn_multi_head_attention a;
        IN_SCOPE;
        KN_CHECK(kn_multi_head_attention_init(&a, NULL, "", 8, 2, .dtype = KN_F64, .kv_dim = 6,
                                              .no_bias = true) &&
                 kn_materialize(&a, KN_CPU, 2) && kn_recompute(&a, again));
        KN_CHECK(kn_size(kn_module_param(&a, "k_proj.weight"), 1) == 6);
        const bool seen[4] = { true, true, true, false };
        kn_tensor *mask = kn_from(KN_BOOL, KN_CPU, seen, KN_SHAPE(4));
        kn_tensor *x = noise(1, 2, 5, 8), *c = kn_require_grad(noise(2, 2, 4, 6), true);
        kn_tensor *y = attend(&a, x, c, mask);
        KN_CHECK(difference(y, attend(&a, x, kn_slice(c, 1, 0, 3), NULL)) < 1e-12);
        KN_CHECK(difference(y, attend(&a, x, c, NULL)) > 1e-3);
        kn_clear_grad(c);
        KN_CHECK(kn_backward(sum_of(kn_mul(y, y))));
        const double *g = kn_data(kn_grad(c));
        for (int i = 0; i < 48; i++)
            KN_CHECK((g[i] != 0) == (i / 6 % 4 < 3), "[%d]: %g", i, g[i]);
    }
}

KN_TEST(multi_head_attention, errors)
{
    OWNED_MODULE kn_multi_head_attention a;
    REFUSED(kn_multi_head_attention_init(&a, NULL, "attn", 10, 3),
            "'attn' has 10 channels, which 3 heads don't divide");
    REFUSED(kn_multi_head_attention_init(&a, NULL, "attn", 8, 4, .kv_heads = 3),
            "'attn' has 4 heads, which 3 key-value heads don't divide");
    REFUSED(kn_multi_head_attention_init(&a, NULL, "attn", 8, 4, .rope_base = 3),
            ".rope_base without .rope");
    REFUSED(kn_multi_head_attention_init(&a, NULL, "attn", 8, 4, .rope_scaling.factor = 8),
            ".rope_scaling without .rope");
    REFUSED(kn_self_attention_init(&(kn_self_attention){ 0 }, NULL, "attn", 8, 4, .rope = true,
                                   .rope_scaling.factor = NAN),
            "attention 'attn': the scaling of rope has .factor nan");
    REFUSED(kn_multi_head_attention_init(&a, NULL, "attn", 8, 4, .dropout = 1), ".dropout 1");
    REFUSED(kn_multi_head_attention_init(&a, NULL, "attn", 8, 4, .kv_dim = -2), ".kv_dim -2");
    KN_CHECK(kn_multi_head_attention_init(&a, NULL, "", 8, 4, .dtype = KN_F64, .kv_dim = 6));
    kn_tensor *x = noise(1, 2, 5, 8);
    REFUSED(kn_call(&a, x), "needs x[B,T,8] and a context[B,S,6], got f64[2,5,8] and none");
    REFUSED(attend(&a, x, noise(1, 3, 4, 6), NULL), "got f64[2,5,8] and f64[3,4,6]");
    REFUSED(attend(&a, NULL, x, NULL), "3 tensors were passed, x is NULL");
    REFUSED(kn_call_n(&a, (kn_values){ 0 }, NULL, 0).n, "0 tensors were passed");
}
