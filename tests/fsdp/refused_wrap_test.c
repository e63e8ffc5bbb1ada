/* tests/fsdp/refused_wrap_test.c: a kn_fsdp_wrap that fails, wherever it does, leaves the tree as
 * it was, and one with better options goes on to the bits of one that never failed. */
#include "tests/failing.h"
#include "tests/fsdp/two.h"

/* ---- the ways to fail ------------------------------------------------------------------------ */

/* The last parameters that are claimed: the root's own. */
static int bad_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return strcmp(name, "wte.weight") == 0 ? 7 : 0;
}

static kn_dtype bad_dtype(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return strcmp(name, "wte.weight") == 0 ? KN_I64 : KN_DTYPE_DEFAULT;
}

static bool bad_fill(const char *name, kn_tensor *part, int64_t start, int ndim,
                     const int64_t *shape, void *arg)
{
    return kn_fill_(part, 3) && (strcmp(name, "wte.weight") != 0 || kn_fail("a fill that fails"));
}

static bool bad_module(kn_module *m, void *arg)
{
    return strcmp(kn_module_path(m), "wte") != 0 || kn_fail("a fill that fails");
}

/* Chooses linear layers until it comes to the norm. */
static bool bad_policy(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                       void *arg)
{
    if (strcmp(kn_module_path(m), "ln") == 0)
        kn_fail("a policy that fails");
    return recurse || strcmp(kn_module_class(m), "linear") == 0;
}

static bool bad_recompute(const kn_module *m, void *arg)
{
    return strcmp(kn_module_path(m), "fc2") != 0 || kn_fail("a policy that fails");
}

static const kn_fsdp_wrap_options refused[] = {
    { .layout = KN_LAYOUT_PER_PARAM, .placement = bad_dim },
    { .param_dtype = KN_BF16, .param_dtype_of = bad_dtype, .buffer_dtype = KN_BF16 },
    { .fill = bad_fill },
    { .fill_module = bad_module },
    { .policy = bad_policy },
    { .recompute_policy = bad_recompute, .offload_dir = "/tmp", .buffer_dtype = KN_BF16 },
    { .ignore = "*bias,ln.*,scale", .recompute_policy = bad_recompute, .seed = 5 },
};
enum { REFUSED = sizeof refused / sizeof *refused };

/* ---- the tree -------------------------------------------------------------------------------- */

enum { META, DECLARED, FILLED, PLACES };

static bool tree(net *m, int where)
{
    return net_init(m, where == META ? KN_META : KN_CPU) &&
           (where != FILLED || kn_materialize(m, KN_CPU, 7));
}

/* The properties of parameters and buffers that a wrap may change. */
typedef struct look {
    kn_storage *storage[32];
    kn_tensor was[32];
    float values[512];
    int tensors, units;
} look;

static bool look_at(kn_module *m, void *arg)
{
    look *l = arg;
    l->units += m->impl->unit != NULL;
    for (int i = 0; i < m->impl->params + m->impl->buffers; i++) {
        const kn_param_entry *e = i < m->impl->params ? &m->impl->param[i] : NULL;
        const kn_tensor *t = e ? e->tensor : m->impl->buffer[i - m->impl->params].tensor;
        l->was[l->tensors] = *t;
        l->was[l->tensors].name = NULL;
        l->was[l->tensors].refs = 0;
        l->was[l->tensors].leaf = NULL;
#ifdef KN_DEBUG
        l->was[l->tensors].live_prev = l->was[l->tensors].live_next = NULL;
#endif
        l->storage[l->tensors++] = t->storage;
        l->units += e && (e->source || e->ignored || e->unit) ? 100 : 0;
    }
    l->units += m->impl->recompute ? 1000 : 0;
    return true;
}

static bool same_look(void *m, look *before)
{
    look now = { 0 };
    kn_apply_modules(m, look_at, &now);
    bool same = now.tensors == before->tensors && now.units == before->units;
    for (int i = 0; i < now.tensors && same; i++)
        same = memcmp(&now.was[i], &before->was[i], sizeof now.was[i]) == 0 &&
               now.storage[i]->released == before->storage[i]->released &&
               now.storage[i]->first == before->storage[i]->first;
    return same;
}

static bool wrap(net *m, kn_comm *comm, kn_fsdp_wrap_options o)
{
    o._size = sizeof o;
    if (!o.policy)
        o.wrap_class = "linear,layer_norm";
    return kn_fsdp_wrap_(&m->base, comm, o);
}

/* Trains, and compares with one that was wrapped at the first try. */
static void goes_on(net *m, int where, bool by_hand, kn_comm *comm)
{
    static const kn_fsdp_wrap_options good = { .seed = NET_SEED, .layout = KN_LAYOUT_RAGGED };
    net ref;
    KN_CHECK(tree(&ref, where) && (!by_hand || kn_fsdp_wrap(&ref.fc1, comm, .seed = NET_SEED)));
    KN_CHECK(wrap(m, comm, good) && wrap(&ref, comm, good));
    kn_optim *o = kn_adamw(m, .lr = 0.1), *of_ref = kn_adamw(&ref, .lr = 0.1);
    for (int i = 0; i < 2; i++) {
        KN_CHECK(net_backward(m, i) && net_backward(&ref, i));
        KN_CHECK(kn_clip_grad_norm(m, 0.1) && kn_clip_grad_norm(&ref, 0.1));
        KN_CHECK(kn_step(o) && kn_step(of_ref));
    }
    kn_summon_scope s = kn_summon(&ref);
    KN_CHECK(s.s && all_read_as(m, &ref) && kn_summon_end(s));
    kn_optim_free(o);
    kn_optim_free(of_ref);
    kn_module_free(&ref);
    KN_CHECK_OK();
}

/* ---- refused --------------------------------------------------------------------------------- */

typedef struct job {
    int at, where;
    bool by_hand; /* fc1 is a unit already */
} job;

static void one_refused(kn_comm *world, void *arg)
{
    const job *j = arg;
    OWNED_MODULE net m = { 0 };
    look before = { 0 };
    kn_fsdp_wrap_options o = refused[j->at];
    if ((o.fill || o.fill_module) && j->where == FILLED)
        return;
    o.timeout_s = 17;
    KN_CHECK(tree(&m, j->where) && (!j->by_hand || kn_fsdp_wrap(&m.fc1, world, .seed = NET_SEED)));
    kn_apply_modules(&m, look_at, &before);
    const double timeout = kn_comm_get_timeout(world);
    KN_CHECK(!wrap(&m, world, o) && !kn_ok() && kn_comm_get_timeout(world) == timeout);
    kn_clear_error();
    KN_CHECK(same_look(&m, &before), "%d", j->at);
    if (kn_comm_size(world) == 1) /* else the error has ended the ranks */
        goes_on(&m, j->where, j->by_hand, world);
}

KN_TEST(refused_wrap, leaves_the_tree)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int i = 0; i < REFUSED * PLACES * 2; i++) {
            job j = { i % REFUSED, i / REFUSED % PLACES, i / REFUSED / PLACES };
            KN_CHECK(spawn_threads(ranks, one_refused, &j) == 0, "%d ranks, %d, %d, by hand %d",
                     ranks, j.at, j.where, j.by_hand);
        }
}

KN_TEST(refused_wrap, of_a_group_leaves_the_tree)
{
    for (int where = 0; where < PLACES; where++) {
        OWNED_MODULE net m;
        look before = { 0 };
        KN_CHECK(tree(&m, where));
        kn_apply_modules(&m, look_at, &before);
        kn_module *pair[] = { &m.fc1.base, &m.fc2.base };
        REFUSED(kn_fsdp_wrap_group(pair, 2, kn_comm_self(), .ignore = "*bias", .seed = 5,
                                   .recompute_policy = bad_recompute),
                "a policy that fails");
        KN_CHECK(same_look(&m, &before));
        goes_on(&m, where, false, kn_comm_self());
    }
}

/* Rank 0 alone chooses linear layers. */
static bool odd_policy(kn_module *m, bool recurse, int64_t unclaimed, kn_fsdp_wrap_options *o,
                       void *world)
{
    return recurse || (kn_rank(world) == 0 && strcmp(kn_module_class(m), "linear") == 0) ||
           strcmp(kn_module_class(m), "layer_norm") == 0;
}

RANK_TEST(refused_wrap, where_ranks_disagree_leaves_the_tree, .threads = "2")
{
    OWNED_MODULE net m;
    look before = { 0 };
    KN_CHECK(tree(&m, FILLED));
    kn_apply_modules(&m, look_at, &before);
    KN_CHECK(!wrap(&m, world,
                   (kn_fsdp_wrap_options){ .policy = odd_policy, .policy_arg = world, .seed = 5 }));
    kn_clear_error();
    KN_CHECK(same_look(&m, &before));
}

/* ---- out of memory --------------------------------------------------------------------------- */

KN_TEST(refused_wrap, leaves_the_tree_where_memory_runs_out)
{
    for (int where = 0; where < PLACES; where++) {
        bool ok = false;
        for (int64_t n = 1; !ok; n++) {
            OWNED_MODULE net m;
            look before = { 0 };
            KN_CHECK(tree(&m, where));
            kn_apply_modules(&m, look_at, &before);
            ok = WITH_FAILING(n, wrap(&m, kn_comm_self(),
                                      (kn_fsdp_wrap_options){ .buffer_dtype = KN_BF16,
                                                              .param_dtype = KN_BF16,
                                                              .ignore = "ln.*",
                                                              .seed = 5 }));
            KN_CHECK(ok || same_look(&m, &before), "%d, allocation %lld", where, (long long)n);
            if (!ok && n % 10 == 0)
                goes_on(&m, where, false, kn_comm_self());
        }
    }
}
