/* nn/cache.c: the keys and values of the positions so far, in every attention below a module. */
#include "autograd/ops.h"
#include "kernels/memory_internal.h"
#include "nn/cache.h"
#include "nn/walk.h"

#include <string.h>

struct kn_cache {
    kn_module **attention; /* borrowed */
    int64_t count, room, capacity;
    int64_t text[KN_CACHE_TEXTS]; /* the selected ones */
    int texts;
};

static kn_attention_cache *cache_in(const kn_module *m)
{
    const char *class = kn_module_class(m);
    return strcmp(class, "self_attention") == 0 || strcmp(class, "multi_head_attention") == 0
               ? kn_module_data((void *)(uintptr_t)m)
               : NULL;
}

static int64_t length_of(const kn_attention_cache *c, int64_t text)
{
    return text < c->slots && c->kv[text] ? kn_kv_cache_length(c->kv[text]) : 0;
}

/* Puts keys and values behind those of a text, and gives all. */
static bool extend(kn_attention_cache *c, int64_t text, const char *name, kn_tensor **k,
                   kn_tensor **v)
{
    kn_tensor *all[2];
    const int64_t had = c->slots;
    if (!*k || !*v || !kn_host_grow(&c->kv, &c->slots, text + 1, sizeof *c->kv))
        return false;
    for (int64_t i = had; i < c->slots; i++)
        c->kv[i] = NULL;
    const int64_t *s = kn_shape(*k);
    if (!c->kv[text])
        c->kv[text] =
            kn_kv_cache_new(kn_dtype_of(*k), kn_device_of(*k), s[0], s[1], c->of->capacity, s[3]);
    if (!c->kv[text] || !kn_kv_cache_append(c->kv[text], *k, *v, all))
        return kn_ok() && kn_fail("'%s': its cache failed", name);
    *k = all[0], *v = all[1];
    return true;
}

static kn_tensor *attend(kn_attention_cache *c, int64_t text, const char *name, kn_tensor *q,
                         kn_tensor *k, kn_tensor *v, const kn_attend_options *o)
{
    if (o->q_norm) {
        q = kn_call(o->q_norm, q);
        k = kn_call(o->k_norm, k);
    }
    if (o->rope) {
        const int64_t start = c->of ? length_of(c, text) : 0;
        q = kn_rope(q, o->rope_base, start, .scaling = o->rope_scaling);
        k = kn_rope(k, o->rope_base, start, .scaling = o->rope_scaling);
    }
    if (c->of && !extend(c, text, name, &k, &v))
        return NULL;
    return kn_scaled_dot_product_attention(q, k, v, .causal = o->causal, .window = o->window,
                                           .align = KN_CAUSAL_LAST, .mask = o->mask,
                                           .dropout = o->dropout);
}

/* Texts differ in length, so each is attended to alone; what a batch saves is to read the weights
 * of the products once for all. */
kn_tensor *kn_attend(kn_attention_cache *c, const char *name, kn_tensor *q, kn_tensor *k,
                     kn_tensor *v, const kn_attend_options *o)
{
    kn_tensor *y[KN_CACHE_TEXTS];
    const int n = c->of ? c->of->texts : 1;
    if (n == 1)
        return attend(c, c->of ? c->of->text[0] : 0, name, q, k, v, o);
    if (!q || !k || !v)
        return NULL;
    if (kn_size(q, 0) != n)
        return kn_fail_null("'%s': %lld rows for the %d texts of its cache (kn_cache_select)", name,
                            (long long)kn_size(q, 0), n);
    for (int i = 0; i < n; i++) {
        y[i] = attend(c, c->of->text[i], name, kn_slice(q, 0, i, i + 1), kn_slice(k, 0, i, i + 1),
                      kn_slice(v, 0, i, i + 1), o);
        if (!y[i])
            return NULL;
    }
    return kn_cat(y, n, 0);
}

int64_t kn_cached_positions(const void *attention)
{
    const kn_attention_cache *c =
        kn_given(attention, "kn_cached_positions", "the attention") ? cache_in(attention) : NULL;
    int64_t most = 0;
    for (int i = 0; c && c->of && i < c->of->texts; i++) {
        const int64_t n = length_of(c, c->of->text[i]);
        most = n > most ? n : most;
    }
    return most;
}

kn_tensor *kn_token_positions(const void *attention, kn_tensor *ids)
{
    if (!kn_given(attention, "kn_token_positions", "the attention") ||
        !kn_check(ids, "kn_token_positions"))
        return NULL;
    const kn_attention_cache *c = cache_in(attention);
    const int64_t len = kn_ndim(ids) > 0 ? kn_size(ids, kn_ndim(ids) - 1) : 0;
    const int n = c && c->of ? c->of->texts : 1;
    kn_tensor *row[KN_CACHE_TEXTS];
    for (int i = 0; i < n; i++) {
        const int64_t start = c && c->of ? length_of(c, c->of->text[i]) : 0;
        row[i] = kn_slice(kn_arange(KN_I64, kn_device_of(ids), start + len), 0, start, start + len);
        if (n > 1)
            row[i] = kn_unsqueeze(row[i], 0);
    }
    return n > 1 ? kn_cat(row, n, 0) : row[0];
}

kn_cache *kn_cache_new(void *module, int64_t capacity)
{
    if (!kn_given(module, "kn_cache_new", "the module"))
        return NULL;
    if (capacity < 1)
        return kn_fail_null("kn_cache_new: a capacity of %lld positions; it must be at least 1",
                            (long long)capacity);
    kn_cache *c = kn_host_calloc(1, sizeof *c);
    bool ok = c != NULL;
    if (ok)
        c->capacity = capacity, c->texts = 1;
    for (kn_walk w = kn_walk_begin(module); ok && kn_next_module(&w);) {
        kn_attention_cache *in = cache_in(w.module);
        if (!in)
            continue;
        if (in->of)
            ok = kn_fail("kn_cache_new: '%s' has a cache already; free it first", w.name);
        ok = ok && kn_host_grow(&c->attention, &c->room, c->count + 1, sizeof *c->attention);
        if (ok) {
            c->attention[c->count++] = w.module;
            in->of = c;
        }
    }
    if (ok && c->count == 0)
        ok = kn_fail("kn_cache_new: the module holds no attention, of which keys and values could "
                     "be kept");
    if (ok)
        return c;
    kn_cache_free(c);
    return NULL;
}

void kn_cache_free(kn_cache *c)
{
    if (!c)
        return;
    for (int64_t i = 0; i < c->count; i++) {
        kn_attention_cache *in = cache_in(c->attention[i]);
        for (int64_t k = 0; k < in->slots; k++)
            kn_kv_cache_free(in->kv[k]);
        kn_host_free(in->kv);
        *in = (kn_attention_cache){ 0 };
    }
    kn_host_free(c->attention);
    kn_host_free(c);
}

int64_t kn_cache_length(const kn_cache *c)
{
    return kn_given(c, "kn_cache_length", "the cache") ? kn_cached_positions(c->attention[0]) : 0;
}

bool kn_cache_select(kn_cache *c, const int64_t *texts, int n)
{
    if (!kn_given(c, "kn_cache_select", "the cache") ||
        !kn_given(texts, "kn_cache_select", "the list of texts"))
        return false;
    if (n < 1 || n > KN_CACHE_TEXTS)
        return kn_fail("kn_cache_select: %d texts; 1 to %d are possible at once", n,
                       KN_CACHE_TEXTS);
    for (int i = 0; i < n; i++) {
        if (texts[i] < 0 || texts[i] >= 1 << 20)
            return kn_fail("kn_cache_select: text %lld; texts have numbers from 0 to %d",
                           (long long)texts[i], (1 << 20) - 1);
        for (int j = 0; j < i; j++)
            if (texts[j] == texts[i])
                return kn_fail("kn_cache_select: text %lld is there twice", (long long)texts[i]);
    }
    memcpy(c->text, texts, (size_t)n * sizeof *texts);
    c->texts = n;
    return true;
}

/* Of one attention. */
static bool truncate_text(kn_attention_cache *a, int64_t text, int64_t length)
{
    if (text < a->slots && a->kv[text])
        return kn_kv_cache_truncate(a->kv[text], length);
    return length == 0 ||
           kn_fail("kn_cache_truncate: to %lld positions; the cache holds none", (long long)length);
}

bool kn_cache_truncate(kn_cache *c, int64_t length)
{
    bool ok = kn_given(c, "kn_cache_truncate", "the cache");
    for (int64_t i = 0; ok && i < c->count; i++)
        for (int k = 0; ok && k < c->texts; k++)
            ok = truncate_text(cache_in(c->attention[i]), c->text[k], length);
    return ok;
}
