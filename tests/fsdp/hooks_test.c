/* tests/fsdp/hooks_test.c: hooks in the place of a unit's reduction, after its all-reduce, in the
 * place of its gather. */
#include "tests/fsdp/net.h"

/* ---- in the place of a unit's reduction ------------------------------------------------------ */

enum { STEPS = 3, MICRO = 4, ELEMENTS = 400 };

typedef struct run {
    way way;
    kn_comm_hook hook;
    void *arg;
    bool below; /* only fc1 */
    float *out; /* shared: rank 0 writes parameters */
} run;

static void train(kn_comm *world, void *arg)
{
    run *j = arg;
    const kn_param *p;
    int n = kn_comm_size(world), rank = kn_rank(world);
    kn_seed(3);
    kn_set_step(0);
    NET_IN_WAY(m, world, &j->way);
    if (j->hook)
        KN_CHECK(kn_fsdp_set_comm_hook(j->below ? (void *)&m.fc1 : &m, j->hook, j->arg, !j->below));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&m, .lr = 0.5);
    for (int s = 0; s < STEPS; s++) {
        for (int a = 0; a < MICRO / n; a++)
            KN_CHECK(net_backward(&m, s * MICRO + a * n + rank));
        KN_CHECK(kn_step(opt));
    }
    int params = kn_params(&m, &p);
    float room[ELEMENTS];
    int64_t at = 0;
    for (int i = 0; i < params; at += p[i++].numel) {
        KN_CHECK(at + p[i].numel <= ELEMENTS && kn_param_read(&m, i, room + at));
        if (rank == 0)
            memcpy(j->out + at, room + at, (size_t)p[i].numel * sizeof *room);
    }
}

static float *trained(int ranks, run j)
{
    j.out = shared_bytes(ELEMENTS * sizeof *j.out);
    int failed = spawn_processes(ranks, train, &j);
    KN_CHECK(failed == 0, "%d of %d ranks failed", failed, ranks);
    return j.out;
}

/* The values sent depend on the micro-batch and the element only: ranks and layouts change no
 * bit. */
KN_TEST(hooks, compressed_training_is_the_same_on_any_ranks)
{
    const kn_comm_hook hook[] = { kn_hook_bf16, kn_hook_f16, kn_hook_bf16_stochastic };
    float *plain = trained(1, (run){ 0 });
    for (int k = 0; k < 3; k++) {
        float *one = trained(1, (run){ .hook = hook[k] });
        double far = 0;
        for (int i = 0; i < ELEMENTS; i++)
            far = fmax(far, fabs((double)(one[i] - plain[i])));
        KN_CHECK(far > 0 && far < 0.02, "hook %d moves parameters by %g", k, far);
        for (int ranks = 2; ranks <= 4; ranks *= 2)
            for (int i = 0; i < WAYS; i++) { /* the layouts as well */
                if (ways[i].ranks)           /* hybrid meshes add in an order of their own */
                    continue;
                float *more = trained(ranks, (run){ .hook = hook[k], .way = ways[i] });
                KN_CHECK(memcmp(one, more, ELEMENTS * sizeof *one) == 0,
                         "hook %d, %d ranks, way %d", k, ranks, i);
            }
        float *hybrid = NULL;
        for (int i = 0; i < WAYS; i++) {
            if (!ways[i].ranks)
                continue;
            float *more = trained(ways[i].ranks, (run){ .hook = hook[k], .way = ways[i] });
            hybrid = hybrid ? hybrid : more;
            KN_CHECK(memcmp(hybrid, more, ELEMENTS * sizeof *one) == 0, "hook %d, way %d", k, i);
            for (int e = 0; e < ELEMENTS; e++)
                KN_CHECK(fabs((double)(hybrid[e] - plain[e])) < 0.02, "hook %d, way %d", k, i);
        }
    }
}

typedef struct counter {
    _Atomic int calls, named;
} counter;

static bool count_calls(const kn_grad_reduction *r, void *arg)
{
    counter *c = arg;
    c->calls++;
    c->named += strcmp(r->unit, "fc1") == 0;
    return kn_reduce_default(r, NULL);
}

KN_TEST(hooks, a_users_hook_replaces_the_reduction)
{
    float *plain = trained(2, (run){ 0 });
    counter *c = shared_bytes(sizeof *c);
    float *hooked = trained(2, (run){ .hook = count_calls, .arg = c, .below = true });
    KN_CHECK(c->calls == 2 * STEPS * MICRO / 2 && c->named == c->calls, "%d calls, %d of fc1",
             c->calls, c->named);
    KN_CHECK(memcmp(plain, hooked, ELEMENTS * sizeof *plain) == 0, "other parameters");
}

static bool refuse(const kn_grad_reduction *r, void *arg)
{
    return arg ? kn_fail("no bytes for '%s'", r->unit) : false;
}

KN_TEST(hooks, a_hook_that_fails_is_a_sentence)
{
    for (int said = 0; said < 2; said++) {
        NET_IN_WAY(m, NULL, &ways[0]);
        KN_CHECK(kn_fsdp_set_comm_hook(&m, refuse, said ? &m : NULL, true));
        REFUSED(net_backward(&m, 0), said ? "no bytes for" : "hook of unit");
    }
}

/* ---- after the all-reduce -------------------------------------------------------------------- */

typedef struct shown {
    bool doubles;
    bool hybrid;
    _Atomic int calls, wrong;
} shown;

/* Sees sums; with doubles, changes them. */
static bool see_the_sum(const kn_grad_reduction *r, void *arg)
{
    shown *s = arg;
    s->calls++;
    s->wrong += !r->dst || r->src || r->acc || r->shards || r->replicas || r->partial;
    kn_array a = kn_array_make(r->dst, r->dst_dtype, 1, &r->count);
    kn_unary_args twice = { .dst = a, .src = a, .kind = KN_AFFINE, .p0 = 2, .p1 = 0 };
    return !s->doubles || KN_LAUNCH(r->stream, KN_K_UNARY, twice);
}

static bool train_shown(net *m, kn_comm *world, shown *s, bool hook, bool accumulates)
{
    int n = kn_comm_size(world), rank = kn_rank(world);
    way w = { .strategy = s->hybrid ? KN_HYBRID_SHARD : KN_FULL_SHARD,
              .mesh = { .shards = s->hybrid ? 2 : 0 } };
    bool ok = net_init(m, KN_META) && net_wrap(m, world, &w) &&
              (!hook || kn_fsdp_set_all_reduce_hook(m, see_the_sum, s, true)) &&
              (!hook || !s->doubles || kn_fsdp_set_divide_factor(m, 2 * n, true));
    OWNED_OPTIM kn_optim *opt = ok ? kn_sgd(m, .lr = 0.5) : NULL;
    for (int i = 0; ok && i < 2 * STEPS; i++) {
        if (s->hybrid && accumulates)
            ok = kn_fsdp_set_all_reduce(m, i % 2, true);
        ok = ok && net_backward(m, i * n + rank) && ((accumulates && i % 2 == 0) || kn_step(opt));
    }
    return ok;
}

static bool same_params(net *a, net *b)
{
    const kn_param *p;
    int params = kn_params(a, &p);
    for (int i = 0; i < params; i++) {
        float x[ELEMENTS], y[ELEMENTS];
        if (!kn_param_read(a, i, x) || !kn_param_read(b, i, y) ||
            memcmp(x, y, (size_t)p[i].numel * sizeof *x) != 0)
            return false;
    }
    return true;
}

/* Where nothing was accumulated the hook changes no bit; where something was, what it changes in a
 * sum is all that changes. */
static void see_sums(kn_comm *world, void *arg)
{
    OWNED_MODULE net plain, seen, doubled;
    shown see = { .hybrid = *(bool *)arg }, twice = { .hybrid = *(bool *)arg, .doubles = true };
    KN_CHECK(train_shown(&plain, world, &see, false, false) && see.calls == 0);
    KN_CHECK(train_shown(&seen, world, &see, true, false) && same_params(&plain, &seen));
    int calls = see.calls; /* each step's reductions */
    KN_CHECK(calls > 0 && calls % (2 * STEPS) == 0 && see.wrong == 0, "%d calls, %d wrong", calls,
             see.wrong);
    kn_module_free(&seen);
    KN_CHECK(train_shown(&seen, world, &see, true, true));
    KN_CHECK(see.calls - calls == (see.hybrid ? calls / 2 : calls),
             "%d calls: none while all-reduce is off", see.calls - calls);
    KN_CHECK(train_shown(&doubled, world, &twice, true, true) && same_params(&seen, &doubled));
}

KN_TEST(hooks, a_hook_after_the_all_reduce_sees_the_sum_over_ranks)
{
    bool no = false, hybrid = true;
    by_threads("124", see_sums, &no);
    KN_CHECK(spawn_threads(4, see_sums, &hybrid) == 0, "2 x 2 ranks");
}

/* ---- in the place of gathers ----------------------------------------------------------------- */

typedef struct gathers {
    int calls, wrong;
    bool fails, says; /* why */
} gathers;

/* Each rank in turn sends its part to the others. */
static bool broadcast_parts(const kn_param_gather *g, void *arg)
{
    gathers *h = arg;
    int n = kn_comm_size(g->shards), rank = kn_rank(g->shards);
    int64_t bytes = g->count * (int64_t)kn_dtype_size(g->dtype);
    char *dst = g->dst;
    if (h->fails)
        return h->says ? kn_fail("no way to the bytes of '%s'", g->unit) : false;
    h->calls++;
    h->wrong += n < 2 || !g->unit;
    kn_copy_args own = { kn_array_make(dst + rank * bytes, g->dtype, 1, &g->count),
                         kn_array_make((void *)(uintptr_t)g->src, g->dtype, 1, &g->count) };
    if (g->src != own.dst.data && !KN_LAUNCH(g->stream, KN_K_COPY, own))
        return false;
    for (int r = 0; r < n; r++)
        if (!kn_broadcast(g->shards, dst + r * bytes, bytes, r, g->stream, g->unit))
            return false;
    return true;
}

static void gather_by_broadcasts(kn_comm *world, void *arg)
{
    const way *w = arg;
    gathers h = { 0 };
    int n = kn_comm_size(world), rank = kn_rank(world);
    NET_IN_WAY(plain, world, w);
    NET_IN_WAY(other, world, w);
    KN_CHECK(kn_fsdp_set_gather_hook(&other, broadcast_parts, &h, true));
    OWNED_OPTIM kn_optim *a = kn_sgd(&plain, .lr = 0.5), *b = kn_sgd(&other, .lr = 0.5);
    for (int i = 0; i < STEPS; i++)
        KN_CHECK(net_backward(&plain, i * n + rank) && net_backward(&other, i * n + rank) &&
                 kn_step(a) && kn_step(b));
    KN_CHECK(same_params(&plain, &other));
    bool cut = n > 1 && w->strategy != KN_NO_SHARD;
    KN_CHECK((h.calls > 2 * STEPS) == cut && h.wrong == 0, "%d gathers, %d wrong", h.calls,
             h.wrong);
    KN_CHECK(kn_fsdp_set_gather_hook(&other, NULL, NULL, true));
    int calls = h.calls;
    KN_CHECK(net_backward(&other, 0) && h.calls == calls && kn_agree(world, true),
             "the default again");
    if (cut) { /* last, because it ends the ranks */
        h = (gathers){ .fails = true, .says = w->layout == KN_LAYOUT_FLAT };
        KN_CHECK(kn_fsdp_set_gather_hook(&other, broadcast_parts, &h, true) &&
                 !net_backward(&other, 0));
        KN_CHECK(strstr(kn_error(), h.says ? "no way to the bytes of '" : "gather hook of unit"));
        kn_clear_error();
    }
}

KN_TEST(hooks, a_users_hook_replaces_the_gather)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < WAYS; i++)
            if (!ways[i].ranks || ways[i].ranks == ranks)
                KN_CHECK(spawn_threads(ranks, gather_by_broadcasts, (void *)&ways[i]) == 0,
                         "%d ranks, way %d", ranks, i);
}
