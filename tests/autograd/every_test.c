/* tests/autograd/every_test.c: each public operation has a row (every.h), works on meta, and says
 * there what it gives on the CPU. The names come from the headers (operation_names.inc), so none is
 * missing. ops_test.c checks gradients and dtypes. */
#include "tests/autograd/every.h"
#include "tests/owned.h"

static const char *const names[] = {
#include "operation_names.inc"
};
enum { NAMES = sizeof names / sizeof *names };

/* Functions of those headers that have no row, and the reason. */
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

KN_TEST(every, operation_has_a_row)
{
    KN_CHECK(NAMES > 120, "the headers declare %d operations only", NAMES);
    for (int i = 0; i < NAMES; i++) {
        bool has = false;
        EACH_CASE(c)
        has = has || strcmp(c->name, names[i]) == 0;
        for (int k = 0; k < OTHERS; k++)
            has = has || strcmp(others[k].name, names[i]) == 0;
        KN_CHECK(has, "%s has no row (tests/autograd/every.h)", names[i]);
    }
    EACH_CASE(c)
    {
        bool declared = false;
        for (int i = 0; i < NAMES; i++)
            declared = declared || strcmp(c->name, names[i]) == 0;
        KN_CHECK(declared, "%s has a row, but no header declares it", c->name);
    }
}

/* On meta: dtype and shape of the result, and backward gives the leaves their gradients. */
static void check_on_meta(const every_case *c, const every_set *s, kn_dtype t)
{
    kn_tensor *leaf[EVERY_MAX_IN], *there[EVERY_MAX_IN], *x[EVERY_MAX_IN], *m[EVERY_MAX_IN];
    every_leaves(s, t, KN_CPU, leaf);
    every_leaves(s, t, KN_META, there);
    every_inputs(s, leaf, x);
    every_inputs(s, there, m);
    kn_tensor *y = c->call(x), *z = c->call(m);
    if (!c->on_meta) {
        KN_CHECK(y && !z, "%s: %s", c->name, kn_error() ? kn_error() : "works on meta");
        KN_CHECK_ERROR("on meta");
        return;
    }
    KN_CHECK(y && z, "%s", c->name);
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
    KN_CHECK(kn_backward(y, .grad = kn_ones_like(y)), "%s", c->name);
    KN_CHECK(kn_backward(z, .grad = kn_ones_like(z)), "%s", c->name);
    for (int i = 0; i < s->n; i++)
        KN_CHECK(!kn_grad(leaf[i]) == !kn_grad(there[i]), "%s: gradient %d", c->name, i);
}

KN_TEST(every, operation_works_on_meta)
{
    for (int t = 0; t < 3; t++)
        EACH_CASE(c)
    EACH_SET(c, s)
    {
        IN_SCOPE;
        check_on_meta(c, &s, (kn_dtype[]){ KN_F64, KN_F32, KN_BF16 }[t]);
    }
}
