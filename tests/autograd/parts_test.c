/* tests/autograd/parts_test.c: gradients of parts of one tensor, which lie where the gradient of
 * the whole has them (autograd/parts.c): nothing is copied, and the values are those of a backward
 * that copies. A hook on a part has its gradient copied. */
#include "autograd/function.h"
#include "kernels/philox.h"
#include "kernels/trace.h"
#include "tests/failing.h"
#include "tests/owned.h"
#include <math.h>
#include <string.h>

enum { B = 2, T = 6, HEADS = 4, D = 8 };

static kn_tensor *see(kn_tensor *g, void *arg)
{
    (void)g, (void)arg;
    return NULL;
}

/* The kernels of a backward that only move values, and those that add two arrays. */
typedef struct moved {
    int copies, fills, adds;
} moved;

static moved backward(kn_tensor *y, bool retain)
{
    moved m = { 0 };
    OWNED_HOST kn_trace_event *e = NULL;
    kn_trace_start(4096);
    KN_CHECK(kn_backward(y, .retain_graph = retain));
    const size_t n = kn_trace_stop(&e);
    for (size_t i = 0; i < n; i++) {
        m.copies += strcmp(e[i].what, "copy") == 0;
        m.fills += strcmp(e[i].what, "fill") == 0;
        m.adds += strcmp(e[i].what, "binary") == 0;
    }
    return m;
}

static bool same(const kn_tensor *a, const kn_tensor *b)
{
    const int64_t n = kn_numel(a);
    const float *x = kn_data(a), *y = kn_data(b);
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] == y[i]))
            return false;
    return n == kn_numel(b);
}

/* ---- attention over parts of a projection ---------------------------------------------------- */

typedef enum cutting { CHUNK, SPLIT, SLICES, SWAPPED, VIEW_FIRST, TURN_FIRST, CUTTINGS } cutting;

static kn_tensor *heads_of(kn_tensor *x)
{
    return kn_transpose(kn_view(x, KN_SHAPE(B, T, kn_size(x, 2) / D, D)), 1, 2);
}

/* qkv [B, T, (H + 2 G) D] in parts [B, H or G, T, D]. */
static void cut(kn_tensor *qkv, cutting how, int64_t groups, kn_tensor **part)
{
    const int64_t q = HEADS * D, kv = groups * D, size[3] = { q, kv, kv };
    if (how == VIEW_FIRST || how == TURN_FIRST) {
        qkv = kn_view(qkv, KN_SHAPE(B, T, HEADS + 2 * groups, D));
        if (how == TURN_FIRST)
            qkv = kn_transpose(qkv, 1, 2);
        const int dim = how == TURN_FIRST ? 1 : 2;
        kn_split(qkv, dim, 3, (int64_t[]){ HEADS, groups, groups }, part);
        for (int i = 0; i < 3 && how == VIEW_FIRST; i++)
            part[i] = kn_transpose(part[i], 1, 2);
        return;
    }
    if (how == CHUNK && groups == HEADS)
        kn_chunk(qkv, 2, 3, part);
    else if (how == SLICES)
        for (int i = 0, at = 0; i < 3; at += (int)size[i++])
            part[i] = kn_slice(qkv, 2, at, at + size[i]);
    else if (how == SWAPPED)
        for (int i = 2, at = (int)(q + 2 * kv); i >= 0; at -= (int)size[i--])
            part[i] = kn_slice(qkv, -1, at - size[i], at);
    else
        kn_split(qkv, 2, 3, size, part);
    for (int i = 0; i < 3; i++)
        part[i] = heads_of(part[i]);
}

typedef struct net {
    kn_tensor *x, *w, *qkv, *part[3], *loss;
} net;

static net make(kn_dtype t, cutting how, int64_t groups, bool rope, bool hooked)
{
    net n = { .x = kn_randn(t, KN_CPU, 1, 1, KN_SHAPE(B, T, 16)),
              .w = kn_randn(t, KN_CPU, 1, 2, KN_SHAPE((HEADS + 2 * groups) * D, 16)) };
    kn_require_grad(n.x, true), kn_require_grad(n.w, true);
    n.qkv = kn_linear(n.x, n.w, NULL, false);
    cut(n.qkv, how, groups, n.part);
    for (int i = 0; i < 3 && hooked; i++)
        kn_on_grad(n.part[i], see, NULL);
    kn_tensor *q = rope ? kn_rope(n.part[0], 0, 0) : n.part[0];
    kn_tensor *k = rope ? kn_rope(n.part[1], 0, 0) : n.part[1];
    kn_tensor *y = kn_scaled_dot_product_attention(q, k, n.part[2], .causal = true);
    kn_tensor *to = kn_randn(t, KN_CPU, 1, 3, KN_SHAPE(B, HEADS, T, D));
    n.loss = sum_of(kn_mul(y, to));
    return n;
}

static void check_cutting(kn_dtype t, cutting how, int64_t groups, bool rope)
{
    IN_SCOPE;
    net a = make(t, how, groups, rope, false), b = make(t, how, groups, rope, true);
    const moved placed = backward(a.loss, false), copied = backward(b.loss, false);
    /* what is left is the gradient of the sum, stretched */
    KN_CHECK(placed.copies <= 1 && placed.fills <= 1 && placed.copies + 3 <= copied.copies &&
                 placed.adds <= copied.adds,
             "cut %d, %d groups, rope %d: %d copies, %d with hooks", how, (int)groups, rope,
             placed.copies, copied.copies);
    kn_tensor *one[] = { kn_grad(a.x), kn_grad(a.w) }, *two[] = { kn_grad(b.x), kn_grad(b.w) };
    for (int i = 0; i < 2; i++)
        KN_CHECK(same(kn_cast(one[i], KN_F32), kn_cast(two[i], KN_F32)),
                 "cut %d, %d groups, rope %d: gradient %d", how, (int)groups, rope, i);
}

KN_TEST(parts, of_a_projection_are_written_in_place)
{
    const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F64 };
    for (int t = 0; t < 3; t++)
        for (cutting how = 0; how < CUTTINGS; how++)
            for (int i = 0; i < 4; i++)
                check_cutting(dtypes[t], how, i & 1 ? 2 : HEADS, i & 2);
}

/* At most there is the gradient of attention's result, beside that of the projection. */
KN_TEST(parts, take_the_memory_of_one_gradient)
{
    const int64_t part = B * T * HEADS * D * (int64_t)sizeof(float), little = 256;
    for (int how = CHUNK; how <= SLICES; how++) {
        net n = make(KN_F32, (cutting)how, HEADS, false, false);
        const int64_t before = kn_ledger_read().live[KN_MEM_ACTIVATION];
        kn_ledger_reset_peaks();
        backward(n.loss, false);
        const int64_t most = kn_ledger_read().peak[KN_MEM_ACTIVATION] - before;
        KN_CHECK(most <= 4 * part + little, "%lld bytes of parts of %lld", (long long)most,
                 (long long)part);
    }
}

/* ---- parts without a gradient ---------------------------------------------------------------- */

/* y = x, of which no gradient comes back. */
static kn_values stop_forward(kn_function_run *run, kn_values in)
{
    (void)run;
    return in;
}

static kn_values stop_backward(kn_function_run *run, kn_values dout)
{
    (void)run, (void)dout;
    return KN_VALUES(NULL);
}

static kn_tensor *stopped(kn_tensor *x)
{
    const kn_function stop = { .name = "stop", .forward = stop_forward, .backward = stop_backward };
    return kn_function_call(&stop, x);
}

/* Memory taken from here on isn't zero by chance. */
static void soil(void)
{
    IN_SCOPE;
    for (int64_t n = 1; n <= 4096; n *= 2)
        for (int i = 0; i < 4; i++)
            kn_full(KN_F32, KN_CPU, NAN, KN_SHAPE(n));
}

KN_TEST(parts, without_a_gradient_are_zeros)
{
    const kn_tensor *want = kn_from(KN_F32, KN_CPU, (float[]){ 1, 1, 0, 0, 1, 1 }, KN_SHAPE(6));
    for (int how = 0; how < 2; how++) {
        kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(6)), true), *p[3];
        kn_tensor *y = kn_scale(x, 1);
        for (int i = 0; i < 3 && how; i++)
            p[i] = kn_slice(y, 0, 2 * i, 2 * i + 2);
        KN_CHECK(how || kn_chunk(y, 0, 3, p));
        kn_tensor *all = kn_add(kn_add(p[0], stopped(p[1])), p[2]);
        soil();
        KN_CHECK(kn_backward(sum_of(all)));
        KN_CHECK(same(kn_grad(x), want), "slices %d", how);
    }
}

/* ---- gradients that others hold -------------------------------------------------------------- */

static kn_tensor *keep(kn_tensor *g, void *arg)
{
    *(kn_tensor **)arg = kn_keep(g);
    return kn_scale(g, 2);
}

/* A kept gradient has the values that its hook saw, also where the hook replaced it. */
KN_TEST(parts, kept_gradients_stay)
{
    kn_tensor *kept = NULL, *g[5];
    net a = make(KN_F32, CHUNK, HEADS, false, false), b = make(KN_F32, CHUNK, HEADS, false, false);
    kn_on_grad(a.part[1], keep, &kept);
    backward(a.loss, false);
    kn_tensor *in[] = { b.part[0], b.part[1], b.part[2], b.qkv, b.w };
    KN_CHECK(kn_grad_of(b.loss, in, 5, g));
    KN_CHECK(same(kn_contiguous(kept), kn_contiguous(g[1])));
    for (int i = 0; i < 3; i++) {
        kn_tensor *part = heads_of(kn_slice(g[3], 2, i * HEADS * D, (i + 1) * HEADS * D));
        KN_CHECK(same(kn_contiguous(part), kn_contiguous(g[i])), "part %d", i);
    }
    kn_tensor_free(kept);
    /* the gradients of the hook's model: k's doubled */
    net c = make(KN_F32, CHUNK, HEADS, false, true);
    kn_tensor *dk = kn_scale(g[1], 2), *d[] = { g[0], dk, g[2] }, *rows[3];
    for (int i = 0; i < 3; i++)
        rows[i] = kn_reshape(kn_transpose(d[i], 1, 2), KN_SHAPE(B, T, HEADS * D));
    KN_CHECK(kn_backward(c.qkv, .grad = kn_cat(rows, 3, 2)));
    KN_CHECK(same(kn_grad(a.w), kn_grad(c.w)) && same(kn_grad(a.x), kn_grad(c.x)));
}

/* The graph runs twice, with the gradients of one run doubled. */
KN_TEST(parts, of_a_retained_graph)
{
    net a = make(KN_F32, SLICES, 2, true, false), b = make(KN_F32, SLICES, 2, true, true);
    for (int run = 0; run < 2; run++) {
        backward(a.loss, run == 0);
        backward(b.loss, run == 0);
    }
    KN_CHECK(same(kn_grad(a.w), kn_grad(b.w)) && same(kn_grad(a.x), kn_grad(b.x)));
}

/* A hook on the node of a slice sees the gradient that it makes: zeros but for the slice. */
static void see_slice(kn_tensor *const *grads, int n, void *arg)
{
    (void)n;
    *(kn_tensor **)arg = kn_keep(grads[0]);
}

KN_TEST(parts, hooks_on_nodes_see_gradients_of_slices)
{
    kn_tensor *seen = NULL;
    kn_tensor *x = kn_scale(kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(4)), true), 1);
    kn_tensor *a = kn_slice(x, 0, 0, 1), *b = kn_slice(x, 0, 1, 4);
    kn_on_node(a, NULL, see_slice, &seen);
    KN_CHECK(kn_backward(sum_of(kn_add(a, b))));
    KN_CHECK(seen && same(seen, kn_from(KN_F32, KN_CPU, (float[]){ 3, 0, 0, 0 }, KN_SHAPE(4))));
    kn_tensor_free(seen);
}

/* A whole for which a pass took memory goes with the pass. */
static kn_tensor *fail(kn_tensor *g, void *arg)
{
    (void)g, (void)arg;
    return kn_fail("broken on purpose"), NULL;
}

KN_TEST(parts, of_a_failed_backward_are_freed)
{
    const int64_t before = kn_ledger_read().live_total;
    kn_scope scope = kn_scope_begin();
    net n = make(KN_F32, SLICES, HEADS, false, false);
    kn_on_grad(n.qkv, fail, NULL);
    REFUSED(kn_backward(n.loss), "broken on purpose");
    kn_scope_end(scope);
    KN_CHECK(kn_ledger_read().live_total == before);
}

static bool whole_run(void *how)
{
    IN_SCOPE;
    net n = make(KN_F32, *(cutting *)how, 2, true, false);
    return n.loss && kn_backward(n.loss);
}

KN_TEST(parts, every_allocation_may_fail)
{
    for (cutting how = SPLIT; how <= SLICES; how++)
        each_allocation_fails(whole_run, NULL, &how, 30);
}

/* ---- graphs of views at random --------------------------------------------------------------- */

enum { MOST = 64 };

typedef struct draw {
    uint64_t seed, at;
} draw;

static int pick(draw *d, int n)
{
    return (int)(kn_philox_at(d->seed, 7, d->at++) % (uint32_t)n);
}

/* Adds to the list a view, or parts, of one of its tensors, all of 4 dims. */
static int grow(draw *d, kn_tensor **list, int n)
{
    kn_tensor *x = list[pick(d, n)], *part[3];
    const int dim = pick(d, 4);
    const int64_t size = kn_size(x, dim), at = pick(d, (int)size + 1);
    switch (pick(d, 6)) {
    case 0:
        list[n++] = kn_transpose(x, dim, pick(d, 4));
        return n;
    case 1:
        list[n++] =
            kn_reshape(x, KN_SHAPE(kn_size(x, 0), kn_size(x, 2), kn_size(x, 1), kn_size(x, 3)));
        return n;
    case 2:
        kn_split(x, dim, 3, (int64_t[]){ at, 0, size - at }, part);
        memcpy(list + n, part, sizeof part);
        return n + 3;
    case 3: /* a part alone */
        list[n++] = kn_slice(x, dim, at / 2, at);
        return n;
    case 4: /* overlapping ones */
        list[n++] = kn_slice(x, dim, 0, at);
        list[n++] = kn_slice(x, dim, at / 2, size);
        return n;
    default:
        list[n++] = kn_slice(x, dim, at, size);
        list[n++] = kn_slice(x, dim, 0, at);
        return n;
    }
}

static kn_tensor *use(draw *d, kn_tensor *x)
{
    const int how = pick(d, 8);
    if (how == 0)
        return stopped(x);
    return how > 1 && kn_size(x, 3) % 2 == 0 ? kn_rope(x, 0, pick(d, 9)) : kn_exp(x);
}

/* A leaf x, its views, and a loss of some of them; NULL where none was chosen. */
static bool random_graph(uint64_t seed, bool hooked, kn_tensor **list, kn_tensor **x,
                         kn_tensor **loss)
{
    draw d = { seed, 0 };
    int n = 1;
    *loss = NULL;
    *x = kn_require_grad(kn_randn(KN_F32, KN_CPU, seed, 1, KN_SHAPE(2, 4, 4, 6)), true);
    list[0] = pick(&d, 8) ? kn_scale(*x, 1.5) : *x;
    for (int i = pick(&d, 10) + 1; i > 0; i--)
        n = grow(&d, list, n);
    for (int i = 1; i < n && hooked; i++)
        kn_on_grad(list[i], see, NULL);
    for (int i = 0; i < n; i++) {
        for (int users = pick(&d, 5); users > 2; users--) {
            kn_tensor *y = use(&d, list[i]), *part = sum_of(kn_mul(y, y));
            *loss = *loss ? kn_add(*loss, part) : part;
        }
    }
    return kn_ok();
}

KN_TEST(parts, random_graphs_have_the_gradients_of_copies)
{
    int64_t fewer = 0;
    for (uint64_t seed = 0; seed < 400; seed++) {
        IN_SCOPE;
        kn_tensor *list[MOST], *x[2];
        moved m[2] = { { 0 } };
        for (int hooked = 0; hooked < 2; hooked++) {
            kn_tensor *loss;
            KN_CHECK(random_graph(seed, hooked, list, &x[hooked], &loss));
            soil();
            if (loss)
                m[hooked] = backward(loss, false);
        }
        kn_tensor *g[2] = { kn_grad(x[0]), kn_grad(x[1]) };
        KN_CHECK(!g[0] == !g[1] && (!g[0] || same(g[0], g[1])), "seed %llu",
                 (unsigned long long)seed);
        KN_CHECK(m[0].copies <= m[1].copies, "seed %llu: %d copies, %d with hooks",
                 (unsigned long long)seed, m[0].copies, m[1].copies);
        fewer += m[0].copies < m[1].copies;
    }
    KN_CHECK(fewer > 40, "%d graphs copied less", (int)fewer);
}

/* All made first, then all cut: a search for a tensor's slices among all nodes takes minutes. */
KN_TEST(parts, of_very_many_tensors)
{
    enum { MANY = 20000 };
    static kn_tensor *h[MANY];
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(4)), true), *sum = NULL;
    for (int i = 0; i < MANY; i++)
        h[i] = kn_scale(x, 1);
    for (int i = 0; i < MANY; i++) {
        kn_tensor *a = kn_slice(h[i], 0, 0, 2), *b = kn_slice(h[i], 0, 2, 4);
        kn_tensor *both = kn_add(a, i % 2 ? b : kn_detach(b));
        sum = sum ? kn_add(sum, both) : both;
    }
    KN_CHECK(kn_backward(sum_of(sum)));
    const float *g = kn_data(kn_grad(x));
    KN_CHECK(g[0] == MANY && g[1] == MANY && g[2] == MANY / 2 && g[3] == MANY / 2);
}
