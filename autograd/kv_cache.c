/* autograd/kv_cache.c: keys and values of the positions so far, for generation. */
#include "autograd/ops.h"
#include "kernels/error_internal.h"

struct kn_kv_cache {
    kn_tensor *k, *v; /* [B, G, capacity, D]; references */
    int64_t length;
};

kn_kv_cache *kn_kv_cache_new(kn_dtype dtype, kn_device device, int64_t B, int64_t G,
                             int64_t capacity, int64_t D)
{
    if (!kn_ok())
        return NULL;
    dtype = dtype == KN_DTYPE_DEFAULT ? KN_F32 : dtype;
    if (!kn_dtype_is_float(dtype) || B < 1 || G < 1 || capacity < 1 || D < 1)
        return kn_fail_null(
            "kn_kv_cache_new: %s [%lld,%lld,%lld,%lld]; it takes a float dtype and sizes of at "
            "least 1",
            kn_dtype_name(dtype), (long long)B, (long long)G, (long long)capacity, (long long)D);
    kn_kv_cache *c = kn_host_calloc(1, sizeof *c);
    if (!c)
        return NULL;
    kn_scope scope = kn_scope_begin();
    c->k = kn_keep(kn_empty(dtype, device, KN_SHAPE(B, G, capacity, D)));
    c->v = kn_keep(kn_empty(dtype, device, KN_SHAPE(B, G, capacity, D)));
    kn_scope_end(scope);
    if (c->k && c->v)
        return c;
    kn_kv_cache_free(c);
    return NULL;
}

void kn_kv_cache_free(kn_kv_cache *c)
{
    if (!c)
        return;
    kn_tensor_free(c->k);
    kn_tensor_free(c->v);
    kn_host_free(c);
}

int64_t kn_kv_cache_length(const kn_kv_cache *c)
{
    return kn_given(c, "kn_kv_cache_length", "the cache") ? c->length : 0;
}

bool kn_kv_cache_truncate(kn_kv_cache *c, int64_t length)
{
    if (!kn_given(c, "kn_kv_cache_truncate", "the cache"))
        return false;
    if (length < 0 || length > c->length)
        return kn_fail("kn_kv_cache_truncate: to %lld positions; the cache holds %lld",
                       (long long)length, (long long)c->length);
    c->length = length;
    return true;
}

/* k or v: [B, G, t, D] as the cache. */
static bool fits(const kn_kv_cache *c, const char *what, const kn_tensor *x, int64_t t)
{
    const int64_t *s = c->k->shape;
    bool like = x->ndim == 4 && x->dtype == c->k->dtype && x->shape[0] == s[0] &&
                x->shape[1] == s[1] && x->shape[2] == t && x->shape[3] == s[3];
    if (!like)
        return kn_fail("kn_kv_cache_append: %s is %s; the cache %s takes keys and values [%lld,"
                       "%lld,t,%lld] of its dtype, of as many positions t",
                       what, KN_SHOWN(x), KN_SHOWN(c->k), (long long)s[0], (long long)s[1],
                       (long long)s[3]);
    if (kn_device_of(x) != kn_device_of(c->k))
        return kn_fail("kn_kv_cache_append: %s is on %s, the cache on %s; move one of them", what,
                       kn_device_name(kn_device_of(x)), kn_device_name(kn_device_of(c->k)));
    if (x->requires_grad && kn_grad_mode())
        return kn_fail("kn_kv_cache_append: %s require a gradient, which a cache cuts off; turn "
                       "grad mode off (kn_set_grad_mode) or pass kn_detach of them",
                       what);
    return true;
}

static bool append(const kn_kv_cache *c, kn_tensor *to, kn_tensor *x)
{
    kn_scope scope = kn_scope_begin();
    bool ok = kn_copy_(kn_slice(to, 2, c->length, c->length + x->shape[2]), x);
    kn_scope_end(scope);
    return ok;
}

bool kn_kv_cache_append(kn_kv_cache *c, kn_tensor *k, kn_tensor *v, kn_tensor **all)
{
    const char *name = "kn_kv_cache_append";
    if (!kn_given(c, name, "the cache") || !kn_given(all, name, "the place of the results"))
        return false;
    all[0] = all[1] = NULL;
    if (!kn_ok() || !kn_check(k, name) || !kn_check(v, name))
        return false;
    int64_t t = k->ndim == 4 ? k->shape[2] : 0;
    if (!fits(c, "keys", k, t) || !fits(c, "values", v, t))
        return false;
    int64_t capacity = c->k->shape[2];
    if (t > capacity - c->length)
        return kn_fail("%s: %lld positions after %lld exceed the capacity of %lld; make a larger "
                       "cache or truncate it",
                       name, (long long)t, (long long)c->length, (long long)capacity);
    if (!append(c, c->k, k) || !append(c, c->v, v))
        return false;
    all[0] = kn_slice(c->k, 2, 0, c->length + t);
    all[1] = kn_slice(c->v, 2, 0, c->length + t);
    if (!all[0] || !all[1])
        return false;
    c->length += t;
    return true;
}
