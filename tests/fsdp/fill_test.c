/* tests/fsdp/fill_test.c: initial values by a function on whole modules (.fill_module): orthogonal
 * matrices, the same on any number of ranks; each module is whole only during its own call. Rank
 * functions return a status and never assert. */
#include "tests/failing.h"
#include "tests/fsdp/net.h"

typedef struct filling {
    int calls, whole; /* modules; the peak number of the root unit's matrices with bytes */
    net *m;
    char order[64];
} filling;

static bool is_whole(const kn_tensor *t)
{
    return kn_device_of(t) != KN_META && !t->storage->released;
}

static int whole_ones(net *m)
{
    kn_tensor *const all[] = { kn_module_param(&m->wte, "weight"),
                               kn_module_param(&m->fc1, "weight"),
                               kn_module_param(&m->fc2, "weight") };
    int n = 0;
    for (int i = 0; i < 3; i++)
        n += is_whole(all[i]);
    return n;
}

/* Makes the rows of w orthonormal, or the columns where there are fewer (Gram-Schmidt). */
static void orthogonalise(float *w, int64_t rows, int64_t cols)
{
    int64_t n = rows < cols ? rows : cols, len = rows < cols ? cols : rows;
    int64_t to = rows < cols ? cols : 1, by = rows < cols ? 1 : cols;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < i; k++) {
            double dot = 0;
            for (int64_t j = 0; j < len; j++)
                dot += (double)w[i * to + j * by] * w[k * to + j * by];
            for (int64_t j = 0; j < len; j++)
                w[i * to + j * by] -= (float)dot * w[k * to + j * by];
        }
        double square = 0;
        for (int64_t j = 0; j < len; j++)
            square += (double)w[i * to + j * by] * w[i * to + j * by];
        for (int64_t j = 0; j < len; j++)
            w[i * to + j * by] /= (float)sqrt(square);
    }
}

/* Fills linear modules only; the others keep their declared values. */
static bool orthogonal(kn_module *m, void *arg)
{
    filling *f = arg;
    f->calls++;
    f->whole = f->m && whole_ones(f->m) > f->whole ? whole_ones(f->m) : f->whole;
    size_t used = strlen(f->order);
    snprintf(f->order + used, sizeof f->order - used, "%s ", kn_module_path(m));
    if (strcmp(kn_module_class(m), "linear") != 0)
        return true;
    kn_tensor *w = kn_module_param(m, "weight"), *b = kn_module_param(m, "bias");
    float *x = kn_data(w), *y = kn_data(b);
    if (!x || !y)
        return false;
    orthogonalise(x, kn_shape(w)[0], kn_shape(w)[1]);
    y[0] = (float)kn_item(kn_randn(KN_F32, KN_CPU, 5, 1, KN_SCALAR));
    return true;
}

static bool wrap(net *m, kn_comm *world, const way *w, filling *f)
{
    return kn_fsdp_wrap(m, world, WAY_OPTIONS(w), .wrap_class = "layer_norm", .seed = NET_SEED,
                        .fill_module = orthogonal, .fill_module_arg = f);
}

RANK_TEST(fill, by_a_function_of_the_module, IN_ALL_WAYS)
{
    OWNED_MODULE net m, ref;
    filling f = { .m = &m }, plain = { 0 };
    KN_CHECK(net_init(&m, kn_rank(world) % 2 ? KN_CPU : KN_META) && net_reference(&ref));
    kn_scope scope = kn_scope_begin();
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(kn_apply_modules(&ref, orthogonal, &plain), "the reference");
    kn_set_grad_mode(mode);
    kn_scope_end(scope);
    KN_CHECK(wrap(&m, world, arg, &f));
    KN_CHECK(f.calls == 4 && strcmp(f.order, "ln wte fc1 fc2 ") == 0, "%d calls: %s", f.calls,
             f.order);
    KN_CHECK(f.whole == 1, "%d parameters were whole at once", f.whole);
    KN_CHECK(all_read_as(&m, &ref));
    KN_CHECK(net_backward(&m, 0));
}

/* Parameters with values keep them: the rank's own, or rank 0's. Others get values of rank 0's
 * function on all ranks. */
RANK_TEST(fill, modules_with_values_are_left_alone, .threads = "124")
{
    for (int sync = 0; sync < 2; sync++) {
        OWNED_MODULE net m, ref;
        filling f = { 0 };
        bool here = !sync || kn_rank(world) == 0;
        KN_CHECK(net_init(&m, here ? KN_CPU : KN_META) && net_reference(&ref));
        KN_CHECK(!here || kn_materialize(&m.fc1, KN_CPU, 3));
        KN_CHECK(kn_fsdp_wrap(&m, world, .seed = NET_SEED, .sync_from_rank0 = sync,
                              .fill_module = orthogonal, .fill_module_arg = &f));
        KN_CHECK(strcmp(f.order, "wte fc2 ln ") == 0, "called for %s", f.order);
        KN_CHECK(kn_materialize(&ref.fc1, KN_CPU, 3) &&
                     reads_as(&m, 1, kn_module_param(&ref.fc1, "weight")),
                 "values were lost");
    }
}

typedef struct beside {
    bool ignored, given, sync; /* fc1.weight is ignored, else tied; it has values; only on rank 0 */
} beside;

/* fc1.weight is not what fc1's own unit claims: its values are kept, and keep the function from
 * fc1; without values it gets those of the function. */
static void beside_unclaimed(kn_comm *world, void *arg)
{
    const beside *how = arg;
    OWNED_MODULE net m, ref;
    filling f = { 0 }, plain = { 0 };
    bool here = !how->sync || kn_rank(world) == 0;
    IN_SCOPE;
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(net_init(&m, here ? KN_CPU : KN_META) && net_reference(&ref));
    kn_tensor *w = kn_module_param(&m.fc1, "weight"), *want = kn_module_param(&ref.fc1, "weight");
    KN_CHECK(how->given ? kn_fill_(want, 7) : kn_apply_modules(&ref, orthogonal, &plain),
             "the reference");
    KN_CHECK(how->ignored || kn_share_parameter(&m.ln, "twin", w), "tied");
    KN_CHECK(!how->given || !here || kn_fill_(w, 7));
    kn_set_grad_mode(mode);
    KN_CHECK(kn_fsdp_wrap(&m, world, .seed = NET_SEED, .wrap_class = "linear",
                          .ignore = how->ignored ? "fc1.weight" : NULL, .fill_module = orthogonal,
                          .sync_from_rank0 = how->sync, .fill_module_arg = &f));
    KN_CHECK((strstr(f.order, "fc1 ") == NULL) == how->given && strstr(f.order, "fc2 "),
             "called for %s", f.order);
    KN_CHECK(reads_as(&m, 1, want), "values were lost (ignored %d, given %d)", how->ignored,
             how->given);
}

KN_TEST(fill, parameters_that_others_hold_keep_their_values)
{
    beside all[] = { { true, true, false },
                     { true, false, false },
                     { false, true, false },
                     { false, false, false },
                     { false, true, true } };
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int i = 0; i < 5; i++)
            KN_CHECK(spawn_threads(ranks, beside_unclaimed, &all[i]) == 0, "%d ranks, case %d",
                     ranks, i);
}

/* fc1.bias has values and is in fc1's unit; fc1.weight has none, and is tied, so the root holds it:
 * there, too, fc1 is a module with values. */
RANK_TEST(fill, a_module_with_values_in_another_unit_is_left_alone, .threads = "12")
{
    OWNED_MODULE net m, ref;
    filling f = { 0 };
    KN_CHECK(net_init(&m, KN_CPU) && net_reference(&ref));
    kn_tensor *w = kn_module_param(&m.fc1, "weight"), *b = kn_module_param(&m.fc1, "bias");
    KN_CHECK(kn_share_parameter(&m.ln, "twin", w) && kn_fill_(b, 7), "tied");
    KN_CHECK(kn_fsdp_wrap(&m, world, .seed = NET_SEED, .wrap_class = "linear",
                          .fill_module = orthogonal, .fill_module_arg = &f));
    KN_CHECK(!strstr(f.order, "fc1 ") && strstr(f.order, "fc2 "), "called for %s", f.order);
    KN_CHECK(reads_as(&m, 1, kn_module_param(&ref.fc1, "weight")), "not as declared");
}

static bool drawn(kn_module *m, void *arg)
{
    if (strcmp(kn_module_class(m), "linear") != 0)
        return true;
    kn_tensor *w = kn_module_param(m, "weight");
    kn_tensor *x = kn_dropout(kn_ones(KN_F32, KN_CPU, kn_ndim(w), kn_shape(w)), 0.5);
    return x && kn_to_host(x, kn_data(w), (size_t)kn_numel(w) * sizeof(float));
}

/* The matrices of fc1 and fc2, wrapped in one unit or in several. */
static bool draw_matrices(kn_comm *world, bool units, float matrix[2][NET_DIM * NET_HIDDEN])
{
    OWNED_MODULE net m;
    bool ok = net_init(&m, KN_META) &&
              kn_fsdp_wrap(&m, world, .seed = NET_SEED,
                           .wrap_class = units ? "linear,embedding" : NULL, .fill_module = drawn);
    const kn_param *p;
    for (int i = 0, n = kn_params(&m, &p), k = 0; ok && i < n; i++)
        if (strstr(p[i].name, "fc") && strstr(p[i].name, "weight"))
            ok = kn_param_read(&m, i, matrix[k++]);
    return ok && kn_ok();
}

/* They are the module's own: the same on all ranks and in all units, others in each module. */
RANK_TEST(fill, draws_are_the_module_s, .threads = "124")
{
    float alone[2][NET_DIM * NET_HIDDEN], shared[2][NET_DIM * NET_HIDDEN];
    kn_set_step(0); /* from here on a rank draws as its micro-batches want it */
    KN_CHECK(draw_matrices(kn_comm_self(), false, alone), "one rank's");
    kn_set_grad_mode(false);
    for (int i = 0; i < kn_rank(world); i++)
        kn_rand_like(kn_ones(KN_F32, KN_CPU, KN_SHAPE(5)));
    kn_set_grad_mode(true);
    KN_CHECK(draw_matrices(world, true, shared), "those of all");
    KN_CHECK(memcmp(alone, shared, sizeof alone) == 0, "not the same");
    KN_CHECK(memcmp(alone[0], alone[1], sizeof alone[0]) != 0, "two modules draw the same");
}

static bool fails(kn_module *m, void *arg)
{
    return arg ? kn_fail("no values for '%s'", kn_module_path(m)) : false;
}

KN_TEST(fill, a_function_that_fails_is_a_sentence)
{
    for (int said = 0; said < 2; said++) {
        NET(m);
        REFUSED(kn_fsdp_wrap(&m, NULL, .fill_module = fails, .fill_module_arg = said ? &m : NULL),
                said ? "no values for 'wte'" : ".fill_module failed for 'wte' (embedding)");
        KN_CHECK(kn_device_of(kn_module_param(&m.wte, "weight")) == KN_META, "it kept the bytes");
    }
}

static kn_dtype norms_in_f32(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return strncmp(name, "ln.", 3) == 0 ? KN_F32 : KN_DTYPE_DEFAULT;
}

/* Wrapping with all callbacks of the program: each failing allocation is an error and leaves the
 * module as it was before wrapping. */
KN_TEST(fill, every_allocation_failing_is_an_error)
{
    int64_t live = kn_live_tensors(), bytes = kn_ledger_read().live_total;
    bool ok = false;
    for (int64_t n = 1; !ok; n++) {
        net m;
        filling f = { 0 };
        KN_CHECK(net_init(&m, KN_META));
        kn_module *modules[] = { &m.fc1.base, NULL };
        kn_tensor *params[] = { kn_module_param(&m.fc2, "bias"), NULL };
        KN_CHECK(kn_materialize(&m.fc1, KN_CPU, 1) && kn_materialize(&m.fc2, KN_CPU, 1));
        ok = WITH_FAILING(n, kn_fsdp_wrap(&m, NULL, .wrap_class = "layer_norm",
                                          .ignored_modules = modules, .ignored_params = params,
                                          .param_dtype = KN_BF16, .param_dtype_of = norms_in_f32,
                                          .buffer_dtype = KN_BF16, .fill_module = orthogonal,
                                          .fill_module_arg = &f));
        KN_CHECK(ok || !kn_fsdp_is_unit(&m), "allocation %lld leaves a unit", (long long)n);
        kn_module_free(&m);
        KN_CHECK(kn_live_tensors() == live && kn_ledger_read().live_total == bytes,
                 "allocation %lld leaves %lld tensors, %lld bytes", (long long)n,
                 (long long)(kn_live_tensors() - live),
                 (long long)(kn_ledger_read().live_total - bytes));
        KN_CHECK(!ok || n > 100, "only %lld allocations were tried", (long long)n);
    }
}
