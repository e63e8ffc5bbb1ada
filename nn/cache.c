/* nn/cache.c: the keys and values of the positions so far, in every attention below a module. */
#include "kernels/memory_internal.h"
#include "nn/cache.h"
#include "nn/nn_internal.h"
#include "nn/walk.h"

#include <string.h>

struct kn_cache {
    kn_module **attention; /* borrowed */
    int64_t count, room;
};

static kn_attention_cache *cache_in(const kn_module *m)
{
    const char *class = kn_module_class(m);
    return strcmp(class, "self_attention") == 0 || strcmp(class, "multi_head_attention") == 0
               ? kn_module_data((void *)(uintptr_t)m)
               : NULL;
}

bool kn_attention_extend(kn_attention_cache *c, const char *name, kn_tensor **k, kn_tensor **v)
{
    kn_tensor *all[2];
    if (!c->capacity || !*k || !*v)
        return *k && *v;
    const int64_t *s = kn_shape(*k);
    if (!c->kv)
        c->kv = kn_kv_cache_new(kn_dtype_of(*k), kn_device_of(*k), s[0], s[1], c->capacity, s[3]);
    if (!c->kv || !kn_kv_cache_append(c->kv, *k, *v, all))
        return kn_ok() && kn_fail("'%s': its cache failed", name);
    *k = all[0], *v = all[1];
    return true;
}

int64_t kn_cached_positions(const void *attention)
{
    const kn_attention_cache *c =
        kn_given(attention, "kn_cached_positions", "the attention") ? cache_in(attention) : NULL;
    return c && c->kv ? kn_kv_cache_length(c->kv) : 0;
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
    for (kn_walk w = kn_walk_begin(module); ok && kn_next_module(&w);) {
        kn_attention_cache *in = cache_in(w.module);
        if (!in)
            continue;
        if (in->capacity)
            ok = kn_fail("kn_cache_new: '%s' has a cache already; free it first", w.name);
        ok = ok && kn_host_grow(&c->attention, &c->room, c->count + 1, sizeof *c->attention);
        if (ok) {
            c->attention[c->count++] = w.module;
            in->capacity = capacity;
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
        kn_kv_cache_free(in->kv);
        *in = (kn_attention_cache){ 0 };
    }
    kn_host_free(c->attention);
    kn_host_free(c);
}

int64_t kn_cache_length(const kn_cache *c)
{
    return kn_given(c, "kn_cache_length", "the cache") ? kn_cached_positions(c->attention[0]) : 0;
}

bool kn_cache_truncate(kn_cache *c, int64_t length)
{
    bool ok = kn_given(c, "kn_cache_truncate", "the cache");
    for (int64_t i = 0; ok && i < c->count; i++) {
        kn_kv_cache *kv = cache_in(c->attention[i])->kv;
        ok = kv ? kn_kv_cache_truncate(kv, length)
                : length == 0 ||
                      kn_fail("kn_cache_truncate: to %lld positions; the cache holds none",
                              (long long)length);
    }
    return ok;
}
