/* tests/autograd/every_test.c: each public operation has a case (every.h); each that has a gradient
 * passes kn_gradcheck; each works on meta and says there what it gives on the CPU. The names come
 * from the headers (operation_names.inc), so none is missing. */
#include "tests/autograd/every.h"
#include <stdlib.h>

static const char *const names[] = {
#include "operation_names.inc"
};
enum { NAMES = sizeof names / sizeof *names };

/* Functions of those headers that have no case, and the reason. */
static const struct {
    const char *name, *why;
} others[] = {
    { "kn_is_channels_last", "tells about memory" },
    { "kn_kv_cache_new", "masked_attention_test.c" },
    { "kn_kv_cache_free", "masked_attention_test.c" },
    { "kn_kv_cache_append", "masked_attention_test.c" },
    { "kn_kv_cache_length", "masked_attention_test.c" },
    { "kn_kv_cache_truncate", "masked_attention_test.c" },
};
enum { OTHERS = sizeof others / sizeof *others };

KN_TEST(every, operation_has_a_case)
{
    KN_CHECK(NAMES > 120, "the headers declare %d operations only", NAMES);
    for (int i = 0; i < NAMES; i++) {
        int cases = 0;
        EACH_CASE(c)
        cases += strcmp(c->name, names[i]) == 0;
        for (int k = 0; k < OTHERS; k++)
            cases += strcmp(others[k].name, names[i]) == 0;
        KN_CHECK(cases == 1, "%s has %d cases (tests/autograd/every.h), should have 1", names[i],
                 cases);
    }
    EACH_CASE(c)
    {
        bool declared = false;
        for (int i = 0; i < NAMES; i++)
            declared = declared || strcmp(c->name, names[i]) == 0;
        KN_CHECK(declared, "%s has a case, but no header declares it", c->name);
    }
}

int every_inputs(const every_case *c, kn_dtype t, kn_device device, kn_tensor **in)
{
    int n = 0;
    for (const char *p = c->inputs; *p; n++) {
        int64_t shape[KN_MAX_DIMS];
        int ndim = 0;
        double low = -1.5, high = 1.5;
        while (*p == ' ')
            p++;
        if (*p == '+' || *p == '%') {
            low = *p == '+' ? 0.3 : 0.1;
            high = *p++ == '+' ? 1.8 : 0.9;
        }
        for (char *end; *p && *p != ';'; p = end)
            shape[ndim++] = strtoll(p, &end, 10);
        p += *p == ';';
        kn_tensor *u = kn_rand(KN_F64, device, 5, (uint64_t)n, ndim, shape);
        u = kn_cast(kn_add_scalar(kn_scale(u, high - low), low), t);
        in[n] = kn_require_grad(u, true);
        KN_CHECK(in[n], "%s: %s", c->name, kn_error());
    }
    return n;
}

static kn_values called(kn_values in, void *arg)
{
    kn_tensor *x[EVERY_MAX_IN] = { 0 };
    memcpy(x, in.v, (size_t)in.n * sizeof *x);
    return KN_VALUES(((const every_case *)arg)->call(x));
}

KN_TEST(every, operation_passes_gradcheck)
{
    EACH_CASE(c)
    {
        kn_scope s = kn_scope_begin();
        kn_tensor *x[EVERY_MAX_IN] = { 0 };
        kn_values in = { .n = every_inputs(c, KN_F64, KN_CPU, x) };
        memcpy(in.v, x, sizeof x);
        KN_CHECK(!c->differentiable || kn_gradcheck(called, in, .arg = (void *)c), "%s: %s",
                 c->name, kn_error());
        kn_scope_end(s);
    }
}

/* On meta: dtype and shape of the result, and backward gives the leaves their gradients. */
static void check_on_meta(const every_case *c, kn_dtype t)
{
    kn_tensor *x[EVERY_MAX_IN] = { 0 }, *m[EVERY_MAX_IN] = { 0 };
    const int n = every_inputs(c, t, KN_CPU, x);
    every_inputs(c, t, KN_META, m);
    kn_tensor *y = c->call(x), *z = c->call(m);
    if (!c->on_meta) {
        KN_CHECK(y && !z, "%s: %s", c->name, kn_error() ? kn_error() : "works on meta");
        KN_CHECK_ERROR("on meta");
        return;
    }
    KN_CHECK(y && z, "%s: %s", c->name, kn_error());
    char a[128], b[128];
    bool same = kn_dtype_of(y) == kn_dtype_of(z) && kn_ndim(y) == kn_ndim(z) &&
                kn_requires_grad(y) == kn_requires_grad(z) &&
                kn_requires_grad(y) == c->differentiable && kn_device_of(z) == KN_META;
    for (int d = 0; same && d < kn_ndim(y); d++)
        same = kn_size(y, d) == kn_size(z, d);
    KN_CHECK(same, "%s gives %s, on meta %s", c->name, kn_describe(y, a, sizeof a),
             kn_describe(z, b, sizeof b));
    if (!c->differentiable)
        return;
    KN_CHECK(kn_backward(y, .grad = kn_ones_like(y)), "%s: %s", c->name, kn_error());
    KN_CHECK(kn_backward(z, .grad = kn_ones_like(z)), "%s: %s", c->name, kn_error());
    for (int i = 0; i < n; i++)
        KN_CHECK(!kn_grad(x[i]) == !kn_grad(m[i]), "%s: gradient %d", c->name, i);
}

KN_TEST(every, operation_works_on_meta)
{
    for (int t = 0; t < 3; t++)
        EACH_CASE(c)
        {
            kn_scope s = kn_scope_begin();
            check_on_meta(c, (kn_dtype[]){ KN_F64, KN_F32, KN_BF16 }[t]);
            kn_scope_end(s);
        }
}
