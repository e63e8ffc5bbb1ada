/* tests/fsdp/summon_test.c: whole parameters through their handles (kn_summon), changes that reach
 * the shards and copies gathered by the user, kn_fsdp_apply, and names that wrapping leaves
 * alone. */
#include "tests/fsdp/two.h"

/* Every handle of m, whole, equals the reference's. */
static bool all_equal(net *m, net *ref)
{
    const kn_param *p, *r;
    int n = kn_params(m, &p), k = kn_params(ref, &r);
    bool same = n == k && n > 0;
    for (int i = 0; i < n && same; i++)
        same = same_bytes(p[i].tensor, r[i].tensor);
    return same;
}

/* Each parameter of m becomes 2 x + its number: applied by its ranks or by one process. */
static bool change(void *m)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    bool grad = kn_set_grad_mode(false); /* needed for writing in place */
    for (int i = 0; i < n; i++) {
        if (p[i].tensor->storage->released)
            continue;
        float *x = kn_data(p[i].tensor);
        for (int64_t k = 0; x && k < p[i].numel; k++)
            x[k] = 2 * x[k] + (float)i;
        kn_bump_version(p[i].tensor);
    }
    kn_set_grad_mode(grad);
    return kn_ok();
}

/* ---- reading and writing --------------------------------------------------------------------- */

RANK_TEST(summon, parameters_are_whole, IN_ALL_WAYS)
{
    NET_IN_WAY(m, world, arg);
    NET_WHOLE(ref);
    int64_t before = kn_ledger_read().live[KN_MEM_GATHERED];
    kn_summon_scope s = kn_summon(&m, .read_only = true);
    KN_CHECK(s.s != NULL);
    KN_CHECK(all_equal(&m, &ref), "whole parameters differ from one process");
    KN_CHECK(same_bytes(kn_module_param(&m.head, "weight"), kn_module_param(&ref.wte, "weight")),
             "the tied weight");
    KN_CHECK(change(&m));
    KN_CHECK(kn_summon_end(s));
    KN_CHECK(kn_ledger_read().live[KN_MEM_GATHERED] == before, "gathered bytes stay");
    KN_CHECK(all_read_as(&m, &ref), "a change in a read-only scope came back");
}

RANK_TEST(summon, changes_come_back, IN_ALL_WAYS)
{
    NET_IN_WAY(m, world, arg);
    NET_WHOLE(ref);
    kn_summon_scope s = kn_summon(&m);
    KN_CHECK(s.s && change(&m) && kn_summon_end(s));
    KN_CHECK(change(&ref) && all_read_as(&m, &ref), "changes did not come back");
    /* the next forward computes with them */
    kn_scope scope = kn_scope_begin();
    float a = (float)kn_item(net_loss(&m, 1)), b = (float)kn_item(net_loss(&ref, 1));
    kn_scope_end(scope);
    KN_CHECK(memcmp(&a, &b, 4) == 0, "loss %g, expected %g", (double)a, (double)b);
}

RANK_TEST(summon, rank0_only, IN_ALL_WAYS)
{
    NET_IN_WAY(m, world, arg);
    NET_WHOLE(ref);
    int64_t live = kn_ledger_read().live[KN_MEM_GATHERED];
    kn_summon_scope s = kn_summon(&m, .rank0_only = true);
    KN_CHECK(s.s != NULL);
    bool first = kn_rank(world) == 0;
    KN_CHECK(!first || all_equal(&m, &ref), "rank 0 sees other values");
    KN_CHECK(first || kn_module_param(&m.wte, "weight")->storage->released, "others have bytes");
    KN_CHECK(first || kn_ledger_read().live[KN_MEM_GATHERED] == live, "others hold gathered bytes");
    KN_CHECK(!first || change(&m));
    KN_CHECK(kn_summon_end(s) && change(&ref));
    KN_CHECK(all_read_as(&m, &ref), "rank 0's changes did not reach the shards");
}

/* ---- gradients ------------------------------------------------------------------------------- */

RANK_TEST(summon, with_grads, IN_ALL_WAYS)
{
    OWNED_MODULE net m = { 0 }, ref = { 0 };
    const kn_param *p, *r;
    int ranks = kn_comm_size(world), n;
    bool hybrid = ((const way *)arg)->ranks != 0; /* adds in another order */
    KN_CHECK(net_init(&m, KN_META) && net_wrap(&m, world, arg) && net_reference(&ref));
    KN_CHECK(net_backward(&m, kn_rank(world)));
    for (int i = 0; i < ranks; i++)
        KN_CHECK(net_backward(&ref, i));
    kn_summon_scope s = kn_summon(&m, .with_grads = true, .read_only = true);
    KN_CHECK(s.s != NULL);
    n = kn_params(&m, &p);
    KN_CHECK(kn_params(&ref, &r) == n, "parameters");
    for (int i = 0; i < n; i++) {
        kn_tensor *have = kn_grad(p[i].tensor), *want = kn_grad(r[i].tensor);
        KN_CHECK(!have == !want, "%s has%s a gradient", p[i].name, have ? "" : " not");
        if (!want)
            continue;
        KN_CHECK(kn_numel(have) == kn_numel(want), "%s: size", p[i].name);
        const float *x = kn_data(have), *y = kn_data(want);
        for (int64_t k = 0; k < kn_numel(want); k++)
            KN_CHECK(hybrid ? fabsf(x[k] - y[k]) < 1e-5f : memcmp(&x[k], &y[k], 4) == 0,
                     "%s: gradient element %lld is %.9g, expected %.9g", p[i].name, (long long)k,
                     (double)x[k], (double)y[k]);
    }
    KN_CHECK(kn_summon_end(s));
    for (int i = 0; i < n; i++)
        KN_CHECK(!kn_grad(p[i].tensor), "%s keeps its whole gradient", p[i].name);
}

/* The ways in which a scope changes gradients. */
typedef enum edit { EDIT_ALL, EDIT_SOME, EDIT_RANK0, EDIT_AND_DROP, EDIT_READ_ONLY, EDITS } edit;

/* Gradients of m become others, by its ranks in a scope or by one process. */
static bool edit_grads(void *m, edit how)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++) {
        kn_tensor *g = kn_grad(p[i].tensor);
        if (how == EDIT_AND_DROP && i % 3 == 0) {
            kn_clear_grad(p[i].tensor);
            continue;
        }
        if (!g || g->storage->released || (how == EDIT_SOME && i % 2))
            continue;
        float *x = kn_data(g);
        for (int64_t k = 0; x && k < kn_numel(g); k += 1 + (how == EDIT_SOME))
            x[k] = (float)(k % 5) - 2 * x[k];
    }
    return kn_ok();
}

static bool close_to(net *m, net *ref, float most)
{
    const kn_param *r;
    int n = kn_params(ref, &r);
    OWNED_BYTES float *x = malloc(NET_HIDDEN * NET_VOCAB * sizeof *x);
    bool close = true;
    for (int i = 0; i < n && close; i++) {
        const float *y = kn_data(r[i].tensor);
        close = kn_param_read(m, i, x);
        for (int64_t k = 0; close && k < r[i].numel; k++)
            close = fabsf(x[k] - y[k]) <= most;
    }
    return close;
}

static bool all_backward(net *m, int from, int to)
{
    bool ok = true;
    for (int i = from; i < to && ok; i++)
        ok = net_backward(m, i);
    return ok;
}

/* Two steps, and changes of the gradients before the first. */
RANK_TEST(summon, changes_of_gradients_come_back, IN_ALL_WAYS)
{
    const int ranks = kn_comm_size(world), rank = kn_rank(world);
    const float most = ((const way *)arg)->ranks != 0 ? 1e-4f : 0; /* hybrid: in another order */
    for (int how = 0; how < EDITS; how++) {
        NET_IN_WAY(m, world, arg);
        NET_WHOLE(ref);
        OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1), *of_ref = kn_sgd(&ref, .lr = 0.1);
        KN_CHECK(net_backward(&m, rank) && all_backward(&ref, 0, ranks));
        kn_summon_scope s = kn_summon(&m, .with_grads = true, .rank0_only = how == EDIT_RANK0,
                                      .read_only = how == EDIT_READ_ONLY);
        KN_CHECK(s.s && edit_grads(&m, (edit)how) && kn_summon_end(s));
        KN_CHECK(how == EDIT_READ_ONLY || edit_grads(&ref, (edit)how));
        KN_CHECK(kn_step(o) && kn_step(of_ref) && close_to(&m, &ref, most), "edit %d", how);
        KN_CHECK(net_backward(&m, ranks + rank) && all_backward(&ref, ranks, 2 * ranks));
        KN_CHECK(kn_step(o) && kn_step(of_ref) && close_to(&m, &ref, most), "then, edit %d", how);
    }
}

/* A parameter that took gradients only after its unit was wrapped. */
KN_TEST(summon, with_grads_of_an_unfrozen_parameter)
{
    NET_WRAPPED(m, NULL, .wrap_class = "linear");
    kn_tensor *bias = kn_module_param(&m.fc1, "bias");
    kn_freeze(&m.fc1, false);
    KN_CHECK(net_backward(&m, 0));
    kn_summon_scope s = kn_summon(&m, .with_grads = true);
    KN_CHECK(s.s && kn_grad(bias) && kn_numel(kn_grad(bias)) == NET_HIDDEN);
    KN_CHECK(kn_summon_end(s) && !kn_grad(bias));
}

/* Reading the parameters between forward and backward changes nothing. */
RANK_TEST(summon, between_forward_and_backward, IN_ALL_WAYS)
{
    NET_IN_WAY(m, world, arg);
    NET_WHOLE(ref);
    kn_scope scope = kn_scope_begin();
    kn_tensor *loss = net_loss(&m, 0);
    kn_summon_scope s = kn_summon(&m);
    KN_CHECK(s.s && all_equal(&m, &ref) && kn_summon_end(s));
    KN_CHECK(kn_backward(loss));
    kn_scope_end(scope);
    KN_CHECK(kn_grad_scale(&m) == 1.0 / kn_comm_size(world), "rounds");
}

/* ---- parts of a tree ------------------------------------------------------------------------- */

RANK_TEST(summon, one_unit_or_a_subtree, IN_ALL_WAYS)
{
    NET_IN_WAY(m, world, arg);
    kn_storage *fc1 = kn_module_param(&m.fc1, "weight")->storage,
               *wte = kn_module_param(&m.wte, "weight")->storage;
    kn_summon_scope s = kn_summon(&m, .not_recursive = true, .read_only = true);
    KN_CHECK(s.s && kn_module_param(&m.wte, "weight")->storage != wte, "the root's own are whole");
    KN_CHECK(kn_module_param(&m.fc1, "weight")->storage == fc1, "a unit below is left alone");
    KN_CHECK(kn_summon_end(s));
    s = kn_summon(&m.fc1, .read_only = true);
    KN_CHECK(s.s && kn_module_param(&m.fc1, "weight")->storage != fc1, "the unit is whole");
    KN_CHECK(kn_module_param(&m.wte, "weight")->storage == wte, "the root is left alone");
    KN_CHECK(kn_summon_end(s));
    s = kn_summon(&m.head, .read_only = true); /* not a unit: the root's unit holds its weight */
    KN_CHECK(s.s && kn_module_param(&m.head, "weight")->storage != wte, "held by another unit");
    KN_CHECK(kn_summon_end(s));
    KN_CHECK(kn_module_param(&m.wte, "weight")->storage == wte, "handles are back");
}

/* ---- apply ----------------------------------------------------------------------------------- */

typedef struct visits {
    char order[256];
} visits;

static bool visit(kn_module *m, void *arg)
{
    visits *v = arg;
    size_t used = strlen(v->order);
    snprintf(v->order + used, sizeof v->order - used, "%s;", kn_module_path(m));
    kn_module_impl *i = m->impl;
    for (int k = 0; k < i->params; k++) { /* the tied weight occurs twice */
        kn_tensor *t = i->param[k].tensor;
        float *x = kn_data(t);
        for (int64_t e = 0; x && e < kn_numel(t); e++)
            x[e] = x[e] * 0.5f + (float)(e % 7);
        kn_bump_version(t);
    }
    return kn_ok();
}

RANK_TEST(summon, apply_sees_whole_parameters, IN_ALL_WAYS)
{
    visits a = { "" }, b = { "" };
    NET_IN_WAY(m, world, arg);
    NET_WHOLE(ref);
    KN_CHECK(kn_fsdp_apply(&m, visit, &a));
    kn_set_grad_mode(false); /* kn_fsdp_apply does that by itself */
    KN_CHECK(kn_apply_modules(&ref, visit, &b));
    KN_CHECK(strcmp(a.order, b.order) == 0, "order '%s', expected '%s'", a.order, b.order);
    KN_CHECK(all_read_as(&m, &ref), "applied values");
}

/* ---- parameters in host memory --------------------------------------------------------------- */

RANK_TEST(summon, host_memory_reads_and_writes, IN_ALL_WAYS)
{
    const kn_param *r;
    NET_IN_WAY(m, world, arg);
    NET_WHOLE(ref);
    KN_CHECK(all_read_as(&m, &ref) && change(&ref));
    int n = kn_params(&ref, &r);
    for (int i = 0; i < n; i++)
        KN_CHECK(kn_param_write(&m, i, kn_data(r[i].tensor)));
    KN_CHECK(all_read_as(&m, &ref), "written values");
    for (int i = 0; i < n; i++) {
        OWNED_BYTES float *host = calloc((size_t)r[i].numel + 1, sizeof *host);
        KN_CHECK(kn_param_read(&ref, i, host) && same_bytes(r[i].tensor, r[i].tensor), "plain");
        KN_CHECK(memcmp(host, kn_data(r[i].tensor), (size_t)r[i].numel * 4) == 0, "plain read");
    }
}

/* ---- names ----------------------------------------------------------------------------------- */

static bool buffer_of_a_unit(net *m)
{
    IN_SCOPE;
    return kn_buffer(&m->fc2, "mean", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2)));
}

/* By the module and in state dicts names are those that the modules were given, as before it was
 * wrapped. */
RANK_TEST(summon, names_are_clean, IN_ALL_WAYS)
{
    static const char *const name[] = { "wte.weight", "fc1.weight", "fc1.bias",
                                        "fc2.weight", "fc2.bias",   "ln.weight",
                                        "ln.bias",    "scale",      "fc2.mean" };
    enum { PARAMS = 7, NAMES = sizeof name / sizeof *name };
    const kn_param *p, *r;
    NET(m);
    KN_CHECK(buffer_of_a_unit(&m));
    NET_WHOLE(ref);
    KN_CHECK(buffer_of_a_unit(&ref));
    KN_CHECK(net_wrap(&m, world, arg));
    KN_CHECK(kn_fsdp_is_unit(&m.fc2) && kn_fsdp_is_unit(&m), "the units");
    int n = kn_params(&m, &p);
    KN_CHECK(kn_params(&ref, &r) == n && n == 7, "%d parameters", n);
    for (int i = 0; i < n; i++) {
        KN_CHECK(strcmp(p[i].name, r[i].name) == 0, "'%s', unwrapped '%s'", p[i].name, r[i].name);
        KN_CHECK(p[i].numel == r[i].numel && p[i].trainable == r[i].trainable, "%s", p[i].name);
        KN_CHECK(kn_ndim(p[i].tensor) == kn_ndim(r[i].tensor), "%s: the handle's shape", p[i].name);
    }
    kn_state *s = kn_state_dict(&m);
    KN_CHECK(kn_state_count(s) == NAMES, "%d names of a state", kn_state_count(s));
    for (int i = 0; i < NAMES; i++) {
        KN_CHECK(i >= PARAMS || strcmp(p[i].name, name[i]) == 0, "%s", p[i].name);
        KN_CHECK(i >= PARAMS || kn_module_param(&m, name[i]) == p[i].tensor, "%s by name", name[i]);
        KN_CHECK(i < PARAMS || kn_module_buffer(&m, name[i]), "%s by name", name[i]);
        KN_CHECK(kn_state_has(s, name[i]), "%s of the state", name[i]);
    }
    kn_state_free(s);
    const char *scale = NULL, *mean = NULL;
    KN_CHECK(kn_module_buffers(&m) == 1 && kn_module_buffer_at(&m, 0, &scale) &&
                 kn_module_buffers(&m.fc2) == 1 && kn_module_buffer_at(&m.fc2, 0, &mean) &&
                 strcmp(scale, "scale") == 0 && strcmp(mean, "mean") == 0,
             "names of buffers");
}

/* ---- the end of a scope ---------------------------------------------------------------------- */

KN_TEST(summon, a_scope_outlives_its_modules)
{
    for (int end_late = 0; end_late < 2; end_late++) {
        net m[2];
        kn_summon_scope s[2];
        for (int i = 0; i < 2; i++) {
            KN_CHECK(net_init(&m[i], KN_META) && kn_fsdp_wrap(&m[i], NULL, .wrap_class = "linear"));
            KN_CHECK((s[i] = kn_summon(&m[i], .read_only = end_late)).s);
        }
        kn_module_free(&m[0]);
        KN_CHECK(kn_summon_end(s[1]));
        KN_CHECK(kn_summon_end(s[0]));
        KN_CHECK(net_backward(&m[1], 0));
        kn_module_free(&m[1]);
    }
}

/* ---- gathered copies that are out of date ---------------------------------------------------- */

static double loss_now(void *m)
{
    double loss;
    return two_evaluate(m, &loss) ? loss : NAN;
}

RANK_TEST(summon, changed_parameters_are_gathered_anew, .threads = "12")
{
    TWO(m);
    KN_CHECK(kn_fsdp_wrap(&m.a, world) && kn_fsdp_wrap(&m.b, world));
    KN_CHECK(kn_unshard_wait(kn_fsdp_unshard(&m.a)) && kn_fsdp_wrap(&m, world));
    kn_summon_scope s = kn_summon(&m);
    bool mode = kn_set_grad_mode(false);
    KN_CHECK(s.s && kn_fill_(kn_module_param(&m.a, "weight"), 5));
    kn_set_grad_mode(mode);
    KN_CHECK(kn_summon_end(s));
    double first = loss_now(&m);
    KN_CHECK(first == loss_now(&m), "a summoned change reaches a unit that was gathered by hand");
    KN_CHECK(kn_unshard_wait(kn_fsdp_unshard(&m.a)));
    const kn_param *p;
    kn_params(&m, &p);
    float host[20];
    for (int i = 0; i < 20; i++)
        host[i] = (float)i;
    KN_CHECK(kn_shard_write(&m, 0, p[0].master, host));
    double second = loss_now(&m);
    KN_CHECK(second != first && second == loss_now(&m), "a shard that is written reaches it, too");
    s = kn_summon(&m, .read_only = true);
    REFUSED(kn_shard_write(&m, 0, p[0].master, host), "'a.weight' is summoned");
    KN_CHECK(kn_summon_end(s));
}
