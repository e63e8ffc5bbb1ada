/* tests/nn/cache_test.c: attention to kept keys and values: in pieces as at once; what has no
 * cache. */
#include "autograd/autograd.h"
#include "nn/layers.h"
#include "tests/failing.h"
#include "tests/owned.h"

enum { B = 2, T = 11, C = 16 };

/* Causal attention: number 0 of kn_self_attention, 1 of kn_multi_head_attention, by options. */
static void make(kn_module *m, int kind, bool rope, int kv_heads)
{
    memset(m, 0, sizeof *m);
    kn_seed(3);
    if (kind == 0)
        KN_CHECK(kn_self_attention_init((kn_self_attention *)m, NULL, "a", C, 4, .rope = rope,
                                        .kv_heads = kv_heads, .qk_norm = rope));
    else
        KN_CHECK(kn_multi_head_attention_init((kn_multi_head_attention *)m, NULL, "a", C, 4,
                                              .rope = rope, .kv_heads = kv_heads, .causal = true));
}

static double differ(kn_tensor *a, kn_tensor *b)
{
    kn_tensor *d = kn_abs(kn_sub(a, b));
    return kn_item(kn_amax(d, 0, NULL, false));
}

KN_TEST(cache, pieces_as_the_whole)
{
    static const int cuts[][4] = { { T }, { 1, 2, 3, T }, { 4, 5, T }, { 10, T } };
    kn_set_grad_mode(false);
    for (int i = 0; i < 8; i++) {
        OWNED_MODULE kn_module m;
        make(&m, i % 2, i / 2 % 2, i / 4 ? 2 : 0);
        IN_SCOPE;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 7, 1, KN_SHAPE(B, T, C)), *whole = kn_call(&m, x);
        KN_CHECK(whole);
        kn_cache *c = kn_cache_new(&m, T);
        KN_CHECK(c && kn_cache_length(c) == 0);
        for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
            KN_CHECK(kn_cache_truncate(c, 0));
            for (int j = 0, from = 0; from < T; from = cuts[k][j++]) {
                kn_tensor *y = kn_call(&m, kn_slice(x, 1, from, cuts[k][j]));
                KN_CHECK(y);
                KN_CHECK(differ(y, kn_slice(whole, 1, from, cuts[k][j])) < 1e-5, "%d %zu", i, k);
                KN_CHECK(kn_cache_length(c) == cuts[k][j] && kn_cached_positions(&m) == cuts[k][j]);
            }
        }
        KN_CHECK(kn_cache_truncate(c, 4)); /* the rest once more, otherwise */
        KN_CHECK(differ(kn_call(&m, kn_slice(x, 1, 4, T)), kn_slice(whole, 1, 4, T)) < 1e-5);
        REFUSED(kn_call(&m, kn_slice(x, 1, 0, 1)), "exceed the capacity of 11");
        kn_cache_free(c);
        KN_CHECK(kn_cached_positions(&m) == 0 && differ(kn_call(&m, x), whole) == 0);
    }
}

/* Texts of several lengths in one cache: the rows of a batch have the bits of each text alone. */
KN_TEST(cache, texts_of_several_lengths)
{
    enum { TEXTS = 3, STEPS = 3 };
    static const int64_t slot[TEXTS] = { 5, 0, 2 }, begun[TEXTS] = { 1, 4, 7 };
    kn_set_grad_mode(false);
    for (int i = 0; i < 8; i++) {
        OWNED_MODULE kn_module m;
        make(&m, i % 2, i / 2 % 2, i / 4 ? 2 : 0);
        IN_SCOPE;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 7, 1, KN_SHAPE(TEXTS, T, C)), *row[TEXTS];
        kn_tensor *alone[TEXTS][STEPS];
        for (int t = 0; t < TEXTS; t++) {
            kn_cache *c = kn_cache_new(&m, T);
            row[t] = kn_slice(x, 0, t, t + 1);
            kn_call(&m, kn_slice(row[t], 1, 0, begun[t]));
            for (int k = 0; k < STEPS; k++)
                alone[t][k] = kn_call(&m, kn_slice(row[t], 1, begun[t] + k, begun[t] + k + 1));
            kn_cache_free(c);
        }
        kn_cache *c = kn_cache_new(&m, T);
        for (int t = 0; t < TEXTS; t++) {
            KN_CHECK(kn_cache_select(c, &slot[t], 1));
            KN_CHECK(kn_call(&m, kn_slice(row[t], 1, 0, begun[t])));
        }
        KN_CHECK(kn_cache_select(c, slot, TEXTS) && kn_cache_length(c) == 7);
        for (int k = 0; k < STEPS; k++) {
            kn_tensor *token[TEXTS], *ids = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(TEXTS, 1));
            for (int t = 0; t < TEXTS; t++)
                token[t] = kn_slice(row[t], 1, begun[t] + k, begun[t] + k + 1);
            const int64_t *at = kn_data(kn_contiguous(kn_token_positions(&m, ids)));
            for (int t = 0; t < TEXTS; t++)
                KN_CHECK(at[t] == begun[t] + k);
            kn_tensor *y = kn_call(&m, kn_cat(token, TEXTS, 0));
            KN_CHECK(y);
            for (int t = 0; t < TEXTS; t++)
                KN_CHECK(differ(kn_slice(y, 0, t, t + 1), alone[t][k]) == 0,
                         "%d: text %d, token %d: by %g", i, t, k,
                         differ(kn_slice(y, 0, t, t + 1), alone[t][k]));
        }
        REFUSED(kn_call(&m, kn_slice(row[0], 1, 0, 1)), "1 rows for the 3 texts of its cache");
        KN_CHECK(kn_cache_select(c, &slot[2], 1) && kn_cache_truncate(c, 0));
        KN_CHECK(kn_cache_length(c) == 0 && kn_cache_select(c, &slot[0], 1));
        KN_CHECK(kn_cache_length(c) == begun[0] + STEPS);
        kn_cache_free(c);
    }
}

KN_TEST(cache, refused)
{
    kn_module m, other = { 0 };
    make(&m, 0, false, 0);
    IN_SCOPE;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 7, 1, KN_SHAPE(B, T, C));
    REFUSED(kn_cache_new(&m, 0), "a capacity of 0 positions");
    kn_cache *c = kn_cache_new(&m, T);
    KN_CHECK(c && !kn_cache_new(&m, T));
    KN_CHECK_ERROR("has a cache already");
    KN_CHECK(!kn_call(&m, x)); /* grad mode is on */
    KN_CHECK_ERROR("require a gradient");
    REFUSED(kn_cache_truncate(c, 1), "the cache holds 0");
    REFUSED(kn_cache_select(c, (int64_t[]){ 0 }, 0), "0 texts; 1 to 64 are possible");
    REFUSED(kn_cache_select(c, (int64_t[]){ 3, 1, 3 }, 3), "text 3 is there twice");
    REFUSED(kn_cache_select(c, (int64_t[]){ -1 }, 1), "text -1");
    kn_cache_free(c);
    kn_module_free(&m);
    kn_set_grad_mode(false);
    KN_CHECK(
        kn_self_attention_init((kn_self_attention *)&other, NULL, "a", C, 4, .not_causal = true));
    c = kn_cache_new(&other, T);
    KN_CHECK(c && !kn_call(&other, x));
    KN_CHECK_ERROR("with .not_causal it has no cache");
    kn_cache_free(c);
    kn_module_free(&other);
    OWNED_MODULE kn_linear l = { 0 };
    KN_CHECK(kn_linear_init(&l, NULL, "l", C, C) && !kn_cache_new(&l, T));
    KN_CHECK_ERROR("holds no attention");
}

/* Memory that runs out leaves the attention without a cache, or with the positions before. */
KN_TEST(cache, memory_runs_out)
{
    kn_set_grad_mode(false);
    for (int n = 1, done = 0; !done && n < 400; n++) {
        OWNED_MODULE kn_module m;
        make(&m, 1, true, 2);
        IN_SCOPE;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 7, 1, KN_SHAPE(1, 3, C));
        kn_cache *c = NULL;
        done = WITH_FAILING(n, (c = kn_cache_new(&m, 4)) && kn_call(&m, x));
        kn_cache_free(c);
        KN_CHECK(kn_call(&m, x) && kn_cached_positions(&m) == 0);
    }
}
