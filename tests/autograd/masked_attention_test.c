/* tests/autograd/masked_attention_test.c: masks and windows of attention against a composition of
 * products and softmax (gradients: every_functional.c); caches of keys and values. */
#include "autograd/ops.h"
#include "tests/owned.h"
#include <math.h>

enum { B = 2, H = 4, G = 2, T = 5, S = 7, D = 4 };

static kn_tensor *random_of(kn_dtype t, uint64_t stream, int64_t heads, int64_t rows)
{
    return kn_cast(kn_randn(KN_F64, KN_CPU, 21, stream, KN_SHAPE(B, heads, rows, D)), t);
}

static kn_tensor *groups_to_heads(kn_tensor *x)
{
    int64_t n = kn_size(x, 2);
    x = kn_expand(kn_reshape(x, KN_SHAPE(B, G, 1, n, D)), KN_SHAPE(B, G, H / G, n, D));
    return kn_reshape(x, KN_SHAPE(B, H, n, D));
}

/* softmax(q k^T / sqrt(D) + bias) v, whose rows without a key are NaN. */
static kn_tensor *composed(kn_tensor *q, kn_tensor *k, kn_tensor *v, kn_tensor *bias)
{
    kn_tensor *z = kn_matmul(q, kn_transpose(groups_to_heads(k), -1, -2));
    z = kn_add(kn_scale(z, 1 / sqrt(D)), bias);
    return kn_matmul(kn_softmax(z), groups_to_heads(v));
}

static kn_tensor *bias_of(kn_tensor *mask)
{
    return kn_where(mask, kn_zeros(KN_F64, KN_CPU, 0, NULL),
                    kn_full(KN_F64, KN_CPU, -INFINITY, 0, NULL));
}

/* Rows that see nothing are zeros where the composition has NaN. */
static void check_same(kn_tensor *y, kn_tensor *want, int64_t blind)
{
    KN_CHECK(y && want && kn_numel(y) == kn_numel(want));
    const double *a = kn_read_data(kn_cast(y, KN_F64), KN_F64), *b = kn_read_data(want, KN_F64);
    const double room = kn_dtype_of(y) == KN_F64 ? 1e-13 : kn_dtype_of(y) == KN_F32 ? 1e-5 : 0.03;
    int64_t zeros = 0;
    for (int64_t i = 0; i < kn_numel(y); i++) {
        KN_CHECK(isnan(b[i]) ? a[i] == 0 : fabs(a[i] - b[i]) < room, "[%d] is %g, not %g", (int)i,
                 a[i], b[i]);
        zeros += isnan(b[i]);
    }
    KN_CHECK(zeros == blind * D, "%d elements of rows without a key, not %d", (int)zeros,
             (int)blind * D);
}

/* true but where i % step == 0; row 1 of [.., T, S] hides all where blind. */
static kn_tensor *bool_mask(int ndim, const int64_t *shape, int step, bool blind)
{
    bool v[B * H * T * S];
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    for (int64_t i = 0; i < n; i++)
        v[i] = i % step != 0 && !(blind && i / S % T == 1);
    return kn_from(KN_BOOL, KN_CPU, v, ndim, shape);
}

KN_TEST(masked_attention, masks_of_every_shape)
{
    static const kn_dtype types[] = { KN_F64, KN_F32, KN_BF16 };
    static const struct {
        int ndim;
        int64_t shape[4], blind;
    } masks[] = { { 4, { B, H, T, S }, B * H }, { 4, { B, 1, T, S }, B * H },
                  { 2, { T, S }, B * H },       { 3, { H, T, S }, B * H },
                  { 4, { B, 1, 1, S }, 0 },     { 1, { S }, 0 },
                  { 4, { 1, H, T, 1 }, 0 } };
    for (int i = 0; i < 21; i++) {
        kn_tensor *q = random_of(types[i % 3], 1, H, T), *k = random_of(types[i % 3], 2, G, S);
        kn_tensor *v = random_of(types[i % 3], 3, G, S);
        kn_tensor *q8 = kn_cast(q, KN_F64), *k8 = kn_cast(k, KN_F64), *v8 = kn_cast(v, KN_F64);
        int m = i / 3, ndim = masks[m].ndim;
        kn_tensor *seen = bool_mask(ndim, masks[m].shape, m == 6 ? 1000 : 3, masks[m].blind > 0);
        if (m == 6)
            seen = kn_ones(KN_BOOL, KN_CPU, ndim, masks[m].shape);
        check_same(kn_scaled_dot_product_attention(q, k, v, .mask = seen),
                   composed(q8, k8, v8, bias_of(seen)), masks[m].blind);
        kn_tensor *bias = kn_randn(KN_F64, KN_CPU, 4, 4, ndim, masks[m].shape);
        bias = kn_cast(kn_add(bias, bias_of(seen)), types[i % 3]);
        check_same(kn_scaled_dot_product_attention(q, k, v, .mask = bias),
                   composed(q8, k8, v8, kn_cast(bias, KN_F64)), masks[m].blind);
    }
}

KN_TEST(masked_attention, windows)
{
    const int64_t sizes[] = { 1, 2, 3, 5, S, S + 1, INT64_MAX };
    for (int w = 0; w < 7; w++) {
        for (int more = -2; more <= 2; more += 2) { /* keys beyond queries */
            int64_t n = T + more, window = sizes[w];
            kn_tensor *q = random_of(KN_F64, 5, H, T), *k = random_of(KN_F64, 6, G, n);
            kn_tensor *v = random_of(KN_F64, 7, G, n);
            bool seen[T * S];
            for (int64_t i = 0; i < T * n; i++) {
                int64_t last = i / n + more, s = i % n;
                seen[i] = s <= last && s > last - window;
            }
            kn_tensor *m = kn_from(KN_BOOL, KN_CPU, seen, KN_SHAPE(T, n));
            kn_tensor *want = composed(q, k, v, bias_of(m));
            int64_t blind = more < 0 ? -more * B * H : 0;
            check_same(kn_scaled_dot_product_attention(q, k, v, .causal = true, .window = window,
                                                       .align = KN_CAUSAL_LAST),
                       want, blind);
            check_same(kn_scaled_dot_product_attention(q, k, v, .causal = true, .window = window,
                                                       .align = KN_CAUSAL_LAST, .mask = m),
                       want, blind);
        }
    }
}

/* Query 0 and key 0 together, as torch's is_causal; where keys end, queries see all. */
KN_TEST(masked_attention, causal_from_the_first)
{
    for (int64_t n = T - 2; n <= T + 2; n++) {
        kn_tensor *q = random_of(KN_F64, 5, H, T), *k = random_of(KN_F64, 6, G, n);
        kn_tensor *v = random_of(KN_F64, 7, G, n), *some = bool_mask(KN_SHAPE(T, n), 3, true);
        some = kn_logical_or(some, kn_eq_scalar(kn_arange(KN_F64, KN_CPU, (double)n), 0));
        kn_tensor *below = kn_cast(kn_tril(kn_ones(KN_F64, KN_CPU, KN_SHAPE(T, n)), 0), KN_BOOL);
        for (int masked = 0; masked < 2; masked++) {
            kn_tensor *seen = masked ? kn_logical_and(below, some) : below;
            check_same(kn_contiguous(kn_scaled_dot_product_attention(q, k, v, .causal = true,
                                                                     .align = KN_CAUSAL_FIRST,
                                                                     .mask = masked ? some : NULL)),
                       composed(q, k, v, bias_of(seen)), 0);
        }
    }
}

KN_TEST(masked_attention, errors)
{
    kn_tensor *q = random_of(KN_F32, 1, H, T), *k = random_of(KN_F32, 2, G, S);
    kn_tensor *wide = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(T, S)),
              *turned = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(S, T));
    REFUSED(kn_scaled_dot_product_attention(q, k, k, .mask = wide),
            "attention: the mask is f64[5,7]; for q f32[2,4,5,4] and k f32[2,2,7,4] it should "
            "broadcast to [2,4,5,7] and be bool");
    REFUSED(kn_scaled_dot_product_attention(q, k, k, .mask = turned), "the mask is f32[7,5]");
    REFUSED(kn_scaled_dot_product_attention(q, k, k, .window = 3),
            ".window is 3; it counts the keys that a query sees");
    REFUSED(kn_scaled_dot_product_attention(q, k, k, .causal = true, .window = -1),
            ".window is -1");
    REFUSED(
        kn_scaled_dot_product_attention(q, k, k, .causal = true),
        "attention: .causal of q f32[2,4,5,4] and k f32[2,2,7,4]: which keys does a query see?");
    kn_tensor *few = kn_slice(k, 2, 0, 3);
    REFUSED(kn_scaled_dot_product_attention(q, few, few, .causal = true, .window = 2,
                                            .align = KN_CAUSAL_FIRST),
            "attention: .window with more queries, 5, than keys, 3");
    REFUSED(
        kn_scaled_dot_product_attention(q, k, k, .mask = kn_empty(KN_F32, KN_META, KN_SHAPE(T, S))),
        "argument 4 is on meta");
}

/* ---- caches ---------------------------------------------------------------------------------- */

static kn_tensor *rows_of(kn_tensor *x, int64_t from, int64_t to)
{
    return kn_slice(x, 2, from, to);
}

/* Positions in pieces of 3, 1 and 1 give the rows of all at once; so does one taken back. */
KN_TEST(masked_attention, cache_steps)
{
    const int64_t end[] = { 3, 4, 5, 5 };
    kn_tensor *q = random_of(KN_F64, 1, H, T), *k = random_of(KN_F64, 2, G, T), *all[2];
    kn_tensor *v = random_of(KN_F64, 3, G, T);
    kn_tensor *want = kn_scaled_dot_product_attention(q, k, v, .causal = true, .window = 3);
    kn_kv_cache *c = kn_kv_cache_new(KN_F64, KN_CPU, B, G, T, D);
    KN_CHECK(c && kn_kv_cache_length(c) == 0);
    void *bytes = NULL;
    for (int i = 0; i < 4; i++) {
        int64_t from = i == 3 ? 2 : kn_kv_cache_length(c);
        KN_CHECK(kn_kv_cache_truncate(c, from));
        KN_CHECK(kn_kv_cache_append(c, rows_of(k, from, end[i]), rows_of(v, from, end[i]), all));
        KN_CHECK(kn_kv_cache_length(c) == end[i] && kn_size(all[0], 2) == end[i]);
        KN_CHECK(i == 0 || kn_array_of(all[0]).data == bytes, "keys were copied");
        bytes = kn_array_of(all[0]).data;
        kn_tensor *y =
            kn_scaled_dot_product_attention(rows_of(q, from, end[i]), all[0], all[1],
                                            .causal = true, .window = 3, .align = KN_CAUSAL_LAST);
        check_same(kn_contiguous(y), kn_contiguous(rows_of(want, from, end[i])), 0);
    }
    kn_kv_cache_free(c);
}

KN_TEST(masked_attention, cache_errors)
{
    kn_tensor *x = random_of(KN_F32, 1, G, 2), *all[2] = { x, x };
    kn_kv_cache *c = kn_kv_cache_new(KN_F32, KN_CPU, B, G, 3, D);
    KN_CHECK(c && kn_kv_cache_append(c, x, x, all));
    KN_CHECK(!kn_kv_cache_append(c, x, x, all) && !all[0] && !all[1]);
    KN_CHECK_ERROR("2 positions after 2 exceed the capacity of 3");
    REFUSED(kn_kv_cache_append(c, x, rows_of(x, 0, 1), all), "values is f32[2,2,1,4]");
    REFUSED(kn_kv_cache_append(c, random_of(KN_F64, 1, G, 1), x, all),
            "keys is f64[2,2,1,4]; the cache f32[2,2,3,4] takes keys and values [2,2,t,4]");
    kn_tensor *w = kn_require_grad(kn_contiguous(rows_of(x, 0, 1)), true);
    REFUSED(kn_kv_cache_append(c, w, w, all), "keys require a gradient, which a cache cuts off");
    kn_set_grad_mode(false);
    KN_CHECK(kn_kv_cache_append(c, w, w, all) && kn_kv_cache_length(c) == 3);
    kn_set_grad_mode(true);
    REFUSED(kn_kv_cache_truncate(c, 4), "to 4 positions; the cache holds 3");
    kn_kv_cache_free(c);
    kn_kv_cache *by_default = kn_kv_cache_new(0, 0, 1, 1, 1, 1); /* f32 on the CPU */
    KN_CHECK(by_default);
    kn_kv_cache_free(by_default);
    REFUSED(kn_kv_cache_new(KN_I64, KN_CPU, 1, 1, 1, 1), "kn_kv_cache_new: i64 [1,1,1,1]");
    REFUSED(kn_kv_cache_new(KN_F32, KN_CPU, 1, 1, 0, 1), "[1,1,0,1]");
    KN_CHECK(!kn_kv_cache_new(KN_F32, KN_CPU, INT64_MAX / 2, 1, 4, 1));
    kn_clear_error();
    kn_kv_cache_free(NULL);
}
