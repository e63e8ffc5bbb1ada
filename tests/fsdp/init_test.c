/* tests/fsdp/init_test.c: initial values of a sharded model: declared on meta and filled shard by
 * shard, by the declared initialiser or the user's function; under a memory limit that the whole
 * model exceeds. */
#include "tests/fsdp/net.h"
#include "tests/fsdp/two.h"

/* ---- each rank fills its shard --------------------------------------------------------------- */

/* This rank's masters are the elements of its layout, with the values that one process draws. */
RANK_TEST(init, each_rank_fills_its_shard, IN_ALL_WAYS)
{
    const kn_param *p, *r;
    NET(m);
    NET_WHOLE(ref);
    kn_ledger_reset_peaks();
    kn_ledger before = kn_ledger_read();
    KN_CHECK(net_wrap(&m, world, arg));
    kn_ledger after = kn_ledger_read();
    KN_CHECK(after.peak_total == after.live_total, "wrapping needed %lld bytes more for a while",
             (long long)(after.peak_total - after.live_total));
    KN_CHECK(after.live[KN_MEM_GATHERED] == before.live[KN_MEM_GATHERED], "gathered bytes");
    int n = kn_params(&m, &p);
    int64_t here = 0, all = 0;
    KN_CHECK(kn_params(&ref, &r) == n, "parameters");
    for (int i = 0; i < n; i++) {
        const kn_bucket *b = kn_bucket_of(&p[i]);
        KN_CHECK(b, "%s is in no bucket", p[i].name);
        kn_interval part = b->param[p[i].index].part;
        int64_t count = kn_interval_numel(part);
        OWNED_BYTES float *want = malloc((size_t)count * sizeof *want + 1);
        kn_interval_cut(part, want, kn_data(r[i].tensor), sizeof *want);
        KN_CHECK(kn_numel(p[i].master) == count, "%s: size of the part", p[i].name);
        KN_CHECK(count == 0 ||
                     memcmp(kn_data(p[i].master), want, (size_t)count * sizeof *want) == 0,
                 "%s: values", p[i].name);
        KN_CHECK(p[i].start == part.start || count == 0, "%s: start", p[i].name);
        KN_CHECK(reads_as(&m, i, r[i].tensor), "%s read whole", p[i].name);
        here += count;
        all += p[i].numel * b->replicas;
    }
    KN_CHECK(kn_all_reduce_i64(world, &here, 1, kn_compute_stream(KN_CPU), "elements"));
    KN_CHECK(here == all, "the ranks hold %lld elements, expected %lld", (long long)here,
             (long long)all);
}

/* ---- orthogonal matrices --------------------------------------------------------------------- */

static bool orthogonal_net(two *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, two_forward) &&
           kn_linear_init(&m->a, &m->base, "a", 4, 8, .device = KN_META,
                          .weight = KN_ORTHOGONAL_INIT(2)) &&
           kn_linear_init(&m->b, &m->base, "b", 8, 4, .device = KN_META,
                          .weight = KN_ORTHOGONAL_INIT(1));
}

static int last_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return shape[ndim - 1] == 8 || shape[ndim - 1] == 4 ? ndim - 1 : 0;
}

/* Each part has the bits of the whole, in every way of sharding, and cut along another dim. */
RANK_TEST(init, orthogonal_matrices, IN_ALL_WAYS)
{
    const way *w = arg;
    OWNED_MODULE two m, ref;
    bool turned = w->layout == KN_LAYOUT_PER_PARAM && kn_comm_size(world) != 3;
    KN_CHECK(orthogonal_net(&m) && orthogonal_net(&ref) && kn_materialize(&ref, KN_CPU, NET_SEED));
    KN_CHECK(kn_fsdp_wrap(&m, world, WAY_OPTIONS(w), .placement = turned ? last_dim : NULL,
                          .seed = NET_SEED));
    KN_CHECK(all_read_as(&m, &ref));
}

/* ---- .fill ----------------------------------------------------------------------------------- */

typedef struct filler {
    int64_t elements;
    bool bad;
} filler;

static float filled(const char *name, int64_t i)
{
    return (float)(i % 1000) + 1000 * (float)strlen(name);
}

static bool fill_by_index(const char *name, kn_tensor *part, int64_t start, int ndim,
                          const int64_t *shape, void *arg)
{
    filler *f = arg;
    int64_t n = kn_numel(part), whole = 1;
    for (int d = 0; d < ndim; d++)
        whole *= shape[d];
    f->bad |= kn_ndim(part) != 1 || n == 0 || start < 0 || start + n > whole;
    float *x = kn_data(part);
    for (int64_t i = 0; x && i < n; i++)
        x[i] = filled(name, start + i);
    f->elements += n;
    return x != NULL;
}

RANK_TEST(init, user_fills, IN_ALL_WAYS)
{
    const way *w = arg;
    filler f = { 0 };
    const kn_param *p;
    NET_WRAPPED(m, world, WAY_OPTIONS(w), .wrap_class = "linear", .fill = fill_by_index,
                .fill_arg = &f);
    int n = kn_params(&m, &p);
    int64_t here = 0;
    for (int i = 0; i < n; i++) {
        OWNED_BYTES float *host = malloc((size_t)p[i].numel * sizeof *host + 1);
        KN_CHECK(kn_param_read(&m, i, host));
        for (int64_t k = 0; k < p[i].numel; k++)
            KN_CHECK(host[k] == filled(p[i].name, k), "%s element %lld is %g", p[i].name,
                     (long long)k, (double)host[k]);
        here += kn_numel(p[i].master);
    }
    KN_CHECK(!f.bad && f.elements == here, "%lld of %lld elements filled", (long long)f.elements,
             (long long)here);
}

static int second_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return ndim - 1;
}

/* ---- where the layout cuts ------------------------------------------------------------------- */

typedef struct cut {
    kn_layout_kind layout;
    kn_placement placement;
} cut;

/* The values identify the elements of a 5 x 12 weight that a rank holds. */
static void holds_its_part(kn_comm *world, void *arg)
{
    enum { ROWS = 5, COLS = 12 };
    const cut *c = arg;
    OWNED_MODULE kn_linear m;
    filler f = { 0 };
    const kn_param *p;
    int n = kn_comm_size(world), rank = kn_rank(world), split = 0;
    KN_CHECK(kn_linear_init(&m, NULL, "m", COLS, ROWS, .device = KN_META, .no_bias = true) &&
             kn_fsdp_wrap(&m, world, .layout = c->layout, .placement = c->placement,
                          .fill = fill_by_index, .fill_arg = &f) &&
             kn_params(&m, &p) == 1);
    const float *v = kn_data(p[0].master);
    int count = (int)kn_numel(p[0].master), chunk = (64 / n + 15) / 16 * 16;
    for (int k = 0; k < count; k++) {
        int at = (int)v[k] % 1000, row = at / COLS, col = at % COLS;
        int owner = c->layout == KN_LAYOUT_FLAT ? at / chunk
                    : c->placement              ? col / (COLS / n)
                                                : row / ((ROWS + n - 1) / n);
        KN_CHECK(c->layout == KN_LAYOUT_RAGGED || owner == rank, "element %d", at);
        split += k == 0 && col != 0;
    }
    split += count % COLS != 0;
    if (c->layout == KN_LAYOUT_FLAT)
        KN_CHECK(split || n < 4 || rank != 1, "flat cuts through rows, or this test sees nothing");
    else
        KN_CHECK(!split || (c->placement && n > 1), "a row is split");
}

KN_TEST(init, each_rank_holds_what_the_layout_says)
{
    const cut cuts[] = { { KN_LAYOUT_FLAT, NULL },
                         { KN_LAYOUT_PER_PARAM, NULL },
                         { KN_LAYOUT_PER_PARAM, second_dim },
                         { KN_LAYOUT_RAGGED, NULL } };
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < 4; i++)
            KN_CHECK(spawn_threads(ranks, holds_its_part, (void *)&cuts[i]) == 0,
                     "%d ranks, case %d", ranks, i);
}

static bool fill_not(const char *name, kn_tensor *part, int64_t start, int ndim,
                     const int64_t *shape, void *arg)
{
    return arg ? kn_fail("no values for '%s'", name) : false;
}

KN_TEST(init, a_fill_that_fails_is_a_sentence)
{
    for (int said = 0; said < 2; said++) {
        NET(m);
        REFUSED(kn_fsdp_wrap(&m, NULL, .fill = fill_not, .fill_arg = said ? &m : NULL),
                said ? "no values for 'wte.weight'" : "wte.weight");
    }
}

/* ---- under a memory limit -------------------------------------------------------------------- */

enum { LAYERS = 16, WIDE = 128, LIMIT = 900 << 10 }; /* 16 x 64 KiB + biases = 1032 KiB whole */

typedef struct tower {
    kn_module base;
    kn_linear layer[LAYERS];
} tower;

static kn_tensor *tower_forward(kn_module *self, kn_tensor *x)
{
    tower *m = (tower *)self;
    for (int i = 0; i < LAYERS; i++)
        x = kn_relu(kn_call(&m->layer[i], x));
    return x;
}

static bool tower_init(tower *m)
{
    char name[8];
    bool ok = kn_module_init(&m->base, tower_forward);
    for (int i = 0; i < LAYERS && ok; i++) {
        snprintf(name, sizeof name, "l%d", i);
        ok = kn_linear_init(&m->layer[i], &m->base, name, WIDE, WIDE, .device = KN_META);
    }
    return ok;
}

KN_TEST(init, the_whole_model_exceeds_the_limit)
{
    OWNED_MODULE tower m = { 0 };
    KN_CHECK(tower_init(&m));
    kn_context_get()->memory_limit = kn_ledger_read().live_total + LIMIT;
    REFUSED(kn_materialize(&m, KN_CPU, 1), "out of memory");
    kn_context_get()->memory_limit = 0;
}

static void within_the_limit(kn_comm *world, void *arg)
{
    const way *w = arg;
    OWNED_MODULE tower m = { 0 };
    KN_CHECK(tower_init(&m));
    kn_context_get()->memory_limit = kn_ledger_read().live_total + LIMIT;
    KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout,
                          .wrap_class = "linear", .seed = 1));
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, WIDE));
    KN_CHECK(kn_backward(sum_of(kn_call(&m, x))));
    kn_scope_end(scope);
    kn_ledger l = kn_ledger_read();
    int64_t whole = kn_param_count(&m) * (int64_t)sizeof(float);
    KN_CHECK(whole > LIMIT && l.live[KN_MEM_PARAM] < LIMIT, "the model is too small for this test");
    kn_context_get()->memory_limit = 0; /* reading uses a buffer of 2 MiB */
    float *host = malloc(WIDE * WIDE * sizeof *host), *want = malloc(WIDE * WIDE * sizeof *want);
    KN_CHECK(kn_param_read(&m, 0, host));
    kn_array a = kn_array_make(want, KN_F32, 1, (int64_t[]){ WIDE * WIDE });
    double bound = 1 / sqrt(WIDE);
    kn_random_args fill = { .dst = a,
                            .kind = KN_UNIFORM,
                            .seed = 1,
                            .stream = kn_hash_string("l0.weight"),
                            .p0 = -bound,
                            .p1 = bound };
    KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_RANDOM, fill));
    KN_CHECK(memcmp(host, want, WIDE * WIDE * sizeof *host) == 0);
    free(host);
    free(want);
}

KN_TEST(init, four_ranks_initialise_it_under_the_limit)
{
    way flat = { 0 }, per_param = { .layout = KN_LAYOUT_PER_PARAM };
    if (THREADS_ONLY)
        KN_SKIP("a limit is of a process");
    KN_CHECK(spawn_processes(4, within_the_limit, &flat) == 0);
    KN_CHECK(spawn_processes(4, within_the_limit, &per_param) == 0);
}

/* ---- declared where the bytes are ------------------------------------------------------------ */

/* A tree that was never filled: every kind of first use gives the values that the same tree on meta
 * gets. */
RANK_TEST(init, a_tree_that_is_not_on_meta_gets_the_same_values, IN_ALL_WAYS)
{
    OWNED_MODULE net m, ref;
    KN_CHECK(net_init(&m, KN_CPU) && net_reference(&ref) && net_wrap(&m, world, arg));
    KN_CHECK(all_read_as(&m, &ref));
}

KN_TEST(init, the_first_read_or_call_fills)
{
    OWNED_MODULE net m, called, ref;
    const kn_param *p, *r;
    KN_CHECK(net_init(&m, KN_CPU) && net_init(&called, KN_CPU) && net_init(&ref, KN_META));
    KN_CHECK(kn_ledger_read().live[KN_MEM_PARAM] == 0, "declaring takes no bytes");
    KN_CHECK(kn_materialize(&ref, KN_CPU, 1337));
    double loss = kn_item(net_loss(&ref, 0));
    KN_CHECK(kn_item(net_loss(&called, 0)) == loss && loss > 0);
    int n = kn_params(&m, &p);
    KN_CHECK(kn_params(&ref, &r) == n);
    for (int i = 0; i < n; i++)
        KN_CHECK(same_bytes(p[i].tensor, r[i].tensor) && same_bytes(p[i].master, r[i].master));
    KN_CHECK(kn_params(&called, &p) == n);
    for (int i = 0; i < n; i++)
        KN_CHECK(same_bytes(p[i].tensor, r[i].tensor));
}

KN_TEST(init, what_was_written_first_stays)
{
    kn_linear a, b;
    KN_CHECK(kn_linear_init(&a, NULL, NULL, 2, 2) && kn_linear_init(&b, NULL, NULL, 2, 2));
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_fill_(kn_module_param(&a, "weight"), 3));
    kn_set_grad_mode(mode);
    kn_tensor *kept = kn_keep(kn_module_param(&b, "weight")), *y;
    kn_module_free(&b); /* the tensor is still referenced */
    KN_CHECK(kn_item(kn_amax(kn_abs(kept), 0, NULL, false)) > 0);
    KN_CHECK(kn_fsdp_wrap(&a, NULL) && (y = kn_call(&a, kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 2)))));
    kn_tensor *bias = kn_slice(kn_sub(y, kn_full(KN_F32, KN_CPU, 6, KN_SHAPE(1, 2))), 1, 0, 1);
    KN_CHECK(fabs(kn_item(bias)) < 1 && kn_item(bias) != 0, "the weight is 3, the bias drawn");
    kn_tensor_free(kept);
    kn_module_free(&a);
}

KN_TEST(init, ignored_parameters_are_filled_with_the_seed_of_wrap)
{
    OWNED_MODULE net m, ref;
    KN_CHECK(net_init(&m, KN_CPU) && net_reference(&ref));
    KN_CHECK(kn_fsdp_wrap(&m, NULL, .seed = NET_SEED, .ignore = "fc1.*"));
    KN_CHECK(same_bytes(kn_module_param(&m, "fc1.weight"), kn_module_param(&ref, "fc1.weight")));
}

/* ---- defaults of a tree ---------------------------------------------------------------------- */

KN_TEST(init, a_tree_has_defaults)
{
    kn_module root = { 0 }, list = { 0 };
    kn_linear a = { 0 }, b = { 0 };
    kn_batch_norm bn = { 0 };
    kn_self_attention att = { 0 };
    KN_CHECK(kn_module_list_init(&root, NULL, NULL));
    KN_CHECK(kn_module_defaults(&root, .device = KN_META, .dtype = KN_F64));
    KN_CHECK(kn_module_list_init(&list, &root, "list"));
    KN_CHECK(kn_linear_init(&a, &root, "a", 2, 3) && kn_batch_norm_init(&bn, &root, "bn", 3));
    KN_CHECK(kn_module_defaults(&list, .dtype = KN_BF16));
    KN_CHECK(kn_linear_init(&b, &list, "b", 2, 3, .device = KN_CPU));
    KN_CHECK(kn_self_attention_init(&att, &list, "att", 4, 2));
    static const struct {
        const char *name;
        kn_dtype dtype;
        kn_device device;
    } want[] = { { "a.weight", KN_F64, KN_META },
                 { "a.bias", KN_F64, KN_META },
                 { "bn.weight", KN_F64, KN_META },
                 { "list.b.weight", KN_BF16, KN_CPU },
                 { "list.att.c_attn.bias", KN_BF16, KN_META } };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        kn_tensor *t = kn_module_param(&root, want[i].name);
        KN_CHECK(kn_dtype_of(t) == want[i].dtype && kn_device_of(t) == want[i].device, "'%s'",
                 want[i].name);
    }
    kn_tensor *mean = kn_module_buffer(&root, "bn.running_mean");
    KN_CHECK(kn_dtype_of(mean) == KN_F64 && kn_device_of(mean) == KN_META);
    REFUSED(kn_module_defaults(&root, .dtype = KN_I64), "parameters are floats");
    kn_module_free(&root);
}
