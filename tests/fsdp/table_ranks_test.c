/* tests/fsdp/table_ranks_test.c: tables whose gradients stay rows, cut over ranks: the same bits
 * as one process, from files of any number of ranks, and what can't be. */
#include "tests/fsdp/matrix.h"
#include "fsdp/bucket.h"
#include "tests/fsdp/ranks.h"
#include "tests/fsdp/stand_in.h"
#include "tests/kn_test.h"
#include "tests/models/temp.h"

#include <string.h>

enum { STEPS = 3, BATCH = 3, PER_BAG = 4, WORDS = 21, ITEMS = 3, DIM = 7 };

typedef struct part {
    kn_module base;
    kn_linear fc;
} part;

typedef struct net {
    kn_module base;
    kn_embedding word;
    kn_embedding_bag bag;
    part a, b;
} net;

static kn_tensor *part_forward(kn_module *self, kn_tensor *x)
{
    return kn_tanh(kn_call(&((part *)self)->fc, x));
}

static bool part_init(part *p, kn_module *parent, const char *name)
{
    return kn_module_init(&p->base, part_forward) && kn_module_add(parent, name, &p->base) &&
           kn_linear_init(&p->fc, &p->base, "fc", DIM, DIM);
}

/* ids [B, L]; words are used twice */
static kn_tensor *net_forward(kn_module *self, kn_tensor *ids)
{
    net *n = (net *)self;
    kn_tensor *items = kn_slice(ids, 1, 0, 2);
    items = kn_minimum(items, kn_full_like(items, ITEMS - 1));
    kn_tensor *x = kn_sum(kn_call(&n->word, ids), 1, (int64_t[]){ 1 }, false);
    x = kn_add(kn_call(&n->a, x), kn_call(&n->bag, items));
    kn_tensor *first = kn_reshape(kn_slice(ids, 1, 0, 1), KN_SHAPE(-1));
    return kn_mul(kn_call(&n->b, x), kn_call(&n->word, first));
}

static bool net_init(void *own)
{
    net *n = own;
    *n = (net){ 0 };
    return kn_module_init(&n->base, net_forward) && kn_module_defaults(n, .device = KN_META) &&
           kn_embedding_init(&n->word, &n->base, "word", WORDS, DIM, .sparse = true,
                             .padding_idx = 2) &&
           kn_embedding_bag_init(&n->bag, &n->base, "bag", ITEMS, DIM, .sparse = true) &&
           part_init(&n->a, &n->base, "a") && part_init(&n->b, &n->base, "b");
}

static kn_tensor *loss(void *n, int step, int micro)
{
    int64_t ids[BATCH * PER_BAG];
    for (int i = 0; i < BATCH * PER_BAG; i++)
        ids[i] = (i * (micro + 2) + step * 5 + i * i) % (WORDS - 1);
    kn_tensor *y = kn_call(n, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH, PER_BAG)));
    return mean_of(kn_mul(y, y));
}

KN_TEST(table_ranks, same_bits_over_ranks)
{
    for (int kind = 0; kind < OPTIMIZER_KINDS; kind++)
        MATRIX_CHECK_OWN(.bytes = sizeof(net), .declare = net_init, .loss = loss, .steps = STEPS,
                         .optimizer = kind, .o.wrap_class = "part");
}

/* Whatever units, strategies, layouts and dtypes the rest has, and however ranks speak. */
KN_TEST(table_ranks, same_bits_in_every_setting)
{
    const kn_fsdp_wrap_options o[] = {
        { .wrap_class = "part, embedding, embedding_bag" },
        { .wrap_class = "part", .strategy = KN_NO_SHARD },
        { .wrap_class = "part", .reshard_after_forward = 2 },
        { .wrap_class = "part", .layout = KN_LAYOUT_RAGGED, .forward_prefetch = true },
        { .wrap_class = "part", .keep_whole_below = 1000 },
        { .wrap_class = "part", .predivide_factor = 2 },
    };
    for (size_t i = 0; i < sizeof o / sizeof *o; i++)
        MATRIX_CHECK(.model = MATRIX_OWN, .bytes = sizeof(net), .declare = net_init, .loss = loss,
                     .steps = STEPS, .ranks = 4, .rounds = 1, .threads = i % 3 == 0,
                     .hosts = i % 3 == 1, .workers = i % 2, .o = o[i]);
}

/* ---- files ----------------------------------------------------------------------------------- */

enum { OPTIMS = 4, MICRO = 12, BYTES = 4096 };

typedef struct run {
    char dir[256];
    int optim;
    float after[BYTES / sizeof(float)]; /* whole parameters */
} run;

static kn_optim *make(int kind, void *m)
{
    switch (kind) {
    case 0:
        return kn_adamw(m, .lr = 0.05, .weight_decay = 0.1);
    case 1:
        return kn_sgd(m, .lr = 0.1, .momentum = 0.9);
    case 2:
        return kn_adagrad(m, .lr = 0.1);
    default:
        return kn_adagrad(m, .lr = 0.1, .row_wise = true);
    }
}

static bool train(kn_comm *world, net *n, kn_optim *o, int from, int to)
{
    for (int step = from; step < to; step++) {
        IN_SCOPE;
        for (int k = kn_rank(world); k < MICRO; k += kn_comm_size(world)) {
            if (!kn_backward(loss(n, step, k)))
                return false;
        }
        if (!kn_clip_grad_norm(n, 0.5) || !kn_step(o))
            return false;
    }
    return true;
}

static bool begin(kn_comm *world, net *n, uint64_t seed)
{
    return net_init(n) && kn_fsdp_wrap(n, world, .wrap_class = "part", .seed = seed);
}

static bool whole(net *n, float *to)
{
    const kn_param *p;
    int64_t at = 0;
    bool ok = true;
    int count = kn_params(n, &p);
    for (int i = 0; ok && i < count; at += p[i++].numel)
        ok = at + p[i].numel <= (int64_t)(BYTES / sizeof(float)) && kn_param_read(n, i, to + at);
    return ok;
}

static void saves(kn_comm *world, void *arg)
{
    run *r = arg;
    float after[BYTES / sizeof(float)] = { 0 };
    OWNED_MODULE net n;
    KN_CHECK(begin(world, &n, 3));
    OWNED_OPTIM kn_optim *o = make(r->optim, &n);
    KN_CHECK(train(world, &n, o, 0, 2) &&
             kn_checkpoint_save(r->dir, &n, .optim = o, .step = 2, .comm = world));
    KN_CHECK(train(world, &n, o, 2, 4) && whole(&n, after));
    if (kn_rank(world) == 0)
        memcpy(r->after, after, sizeof after);
}

static void loads(kn_comm *world, void *arg)
{
    run *r = arg;
    float after[BYTES / sizeof(float)] = { 0 };
    OWNED_MODULE net n;
    KN_CHECK(begin(world, &n, 4));
    OWNED_OPTIM kn_optim *o = make(r->optim, &n);
    kn_checkpoint *c = kn_checkpoint_open(r->dir, world);
    KN_CHECK(c && kn_checkpoint_load(c, &n, .optim = o));
    kn_checkpoint_free(c);
    kn_state *full = kn_optim_state_dict(o, .kind = KN_STATE_FULL);
    KN_CHECK(full != NULL);
    if (r->optim == 3)
        KN_CHECK(kn_numel(kn_state_tensor(full, "word.weight.sum")) == WORDS);
    KN_CHECK(kn_load_optim_state_dict(o, full));
    kn_state_free(full);
    KN_CHECK(train(world, &n, o, 2, 4) && whole(&n, after));
    KN_CHECK(memcmp(after, r->after, sizeof after) == 0, "optimizer %d", r->optim);
}

/* A hybrid strategy adds the rest in another order; tables lie on all of its ranks. */
RANK_TEST(table_ranks, with_replicas, .threads = "4")
{
    static _Thread_local float one[BYTES / sizeof(float)], two[BYTES / sizeof(float)];
    OWNED_MODULE net a, b;
    KN_CHECK(begin(world, &a, 3) && net_init(&b) &&
             kn_fsdp_wrap(&b, world, .wrap_class = "part", .seed = 3, .strategy = KN_HYBRID_SHARD,
                          .mesh.shards = 2));
    OWNED_OPTIM kn_optim *x = make(1, &a), *y = make(1, &b);
    KN_CHECK(train(world, &a, x, 0, 3) && train(world, &b, y, 0, 3) && whole(&a, one) &&
             whole(&b, two));
    for (size_t i = 0; i < BYTES / sizeof(float); i++)
        KN_CHECK(fabsf(one[i] - two[i]) < 1e-5, "element %zu: %g, %g", i, one[i], two[i]);
    const kn_param *p;
    KN_CHECK(kn_params(&b, &p) > 1 && kn_numel(p[0].master) <= (WORDS + 3) / 4 * DIM);
}

/* Predicted are the shards and states, one number a row where the optimizer says so. */
RANK_TEST(table_ranks, memory_is_predicted, .threads = "2")
{
    OWNED_MODULE net n;
    KN_CHECK(begin(world, &n, 3));
    const int64_t rows = (WORDS + 1) / 2 * DIM, items = (ITEMS + 1) / 2 * DIM;
    const int64_t tables = kn_bucket_bytes((rows + 15) / 16 * 16, KN_F32) +
                           kn_bucket_bytes((items + 15) / 16 * 16, KN_F32);
    const kn_fsdp_memory m = kn_fsdp_predict(&n);
    KN_CHECK(m.param - m.grad == tables, "%lld, %lld", (long long)(m.param - m.grad),
             (long long)tables);
    OWNED_OPTIM kn_optim *o = kn_adagrad(&n, .lr = 1, .row_wise = true),
                         *p = kn_adagrad(&n, .lr = 1);
    KN_CHECK(kn_fsdp_predict_optim(o).optim < kn_fsdp_predict_optim(p).optim);
    KN_CHECK(train(world, &n, o, 0, 1));
}

/* On a device with memory of its own: what the host reads is there by then. */
static void on_a_device(kn_comm *world, void *arg)
{
    run *r = arg;
    float after[BYTES / sizeof(float)] = { 0 };
    OWNED_MODULE net n;
    KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, world, .wrap_class = "part", .seed = 3,
                                          .device = r->dir[0] ? STAND_IN : KN_CPU));
    OWNED_OPTIM kn_optim *o = make(r->optim, &n);
    KN_CHECK(train(world, &n, o, 0, 3) && whole(&n, after));
    if (r->dir[0])
        KN_CHECK(memcmp(after, r->after, sizeof after) == 0, "optimizer %d", r->optim);
    else if (kn_rank(world) == 0)
        memcpy(r->after, after, sizeof after);
}

KN_TEST(table_ranks, same_bits_on_a_device)
{
    if (THREADS_ONLY)
        KN_SKIP("the stand-in is a process's");
    for (int kind = 0; kind < OPTIMS; kind++)
        for (int ranks = 1; ranks <= 2; ranks++) {
            run *r = shared_bytes(sizeof *r);
            r->optim = kind;
            KN_CHECK(on_stand_in((stand_in){ 0 }, ranks, on_a_device, r) == 0);
            r->dir[0] = 1;
            KN_CHECK(on_stand_in((stand_in){ 0 }, ranks, on_a_device, r) == 0, "optimizer %d",
                     kind);
        }
}

/* Where the other ranks say what this one says, on the host as on meta. */
KN_TEST(table_ranks, among_simulated_ranks)
{
    for (int meta = 0; meta < 2; meta++) {
        IN_SCOPE;
        const kn_device d = meta ? KN_META : KN_CPU;
        OWNED_SIMULATED kn_comm *world = kn_comm_simulated(4, 0, 0);
        net n;
        KN_CHECK(net_init(&n) && kn_fsdp_wrap(&n, world, .wrap_class = "part", .device = d));
        kn_optim *o = make(3, &n);
        kn_tensor *y = kn_call(&n, kn_zeros(KN_I64, d, KN_SHAPE(BATCH, PER_BAG)));
        KN_CHECK(y && kn_backward(sum_of(y)) && kn_clip_grad_norm(&n, 1) && kn_step(o));
        kn_optim_free(o);
        kn_module_free(&n);
    }
}

/* ---- units that a rank's loss leaves out ----------------------------------------------------- */

typedef struct fork {
    kn_module base;
    kn_embedding word;
    part a, b;
    bool twice; /* words are used before a and behind it, else behind it alone */
    bool leaves_out;
} fork_net;

static kn_tensor *fork_forward(kn_module *self, kn_tensor *ids)
{
    fork_net *n = (fork_net *)self;
    kn_tensor *before = n->twice ? kn_call(&n->word, ids) : NULL;
    kn_tensor *y = kn_call(&n->a, kn_ones(KN_F32, KN_CPU, KN_SHAPE(BATCH, DIM)));
    kn_tensor *x = kn_call(&n->word, ids);
    x = kn_call(&n->b, before ? kn_mul(x, before) : x);
    return n->leaves_out ? x : kn_add(x, y);
}

static kn_tensor *fork_loss(fork_net *n, kn_comm *world)
{
    const int64_t ids[BATCH] = { 1, 1 + kn_rank(world), WORDS - 1 };
    return sum_of(kn_call(n, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(BATCH))));
}

/* Rows go their way at the same place among the reductions of units on all ranks. */
RANK_TEST(table_ranks, beside_units_left_out, .threads = "23", .processes = "2", .hosts = "2",
          .cases = 4)
{
    IN_SCOPE;
    const int how = *(const int *)arg;
    OWNED_MODULE fork_net n = { .twice = how % 2 };
    KN_CHECK(kn_module_init(&n.base, fork_forward) &&
             kn_embedding_init(&n.word, &n.base, "word", WORDS, DIM, .sparse = true) &&
             part_init(&n.a, &n.base, "a") && part_init(&n.b, &n.base, "b") &&
             kn_recompute(&n.word, how / 2) &&
             kn_fsdp_wrap(&n, world, .wrap_class = "part", .seed = 3));
    kn_tensor *w = kn_module_param(&n.word, "weight");
    float want[WORDS * DIM];
    KN_CHECK(kn_backward(fork_loss(&n, world)));
    const size_t bytes = (size_t)kn_numel(kn_grad_values(w)) * sizeof *want;
    KN_CHECK(kn_to_host(kn_grad_values(w), want, bytes));
    kn_zero_grad(&n);
    n.leaves_out = kn_rank(world) > 0;
    KN_CHECK(kn_backward(fork_loss(&n, world)));
    KN_CHECK(memcmp(kn_data(kn_grad_values(w)), want, bytes) == 0);
}

/* ---- what can't be --------------------------------------------------------------------------- */

RANK_TEST(table_ranks, wrong_use, .threads = "2")
{
    OWNED_MODULE net n;
    KN_CHECK(begin(world, &n, 3));
    kn_tensor *w = kn_module_param(&n.word, "weight");
    KN_CHECK(kn_backward(loss(&n, 0, 0)) && kn_grad_rows(w));
    kn_zero_grad(&n);
    KN_CHECK(!kn_grad_rows(w) && kn_ok());
    REFUSED(kn_keep_rows(w), "is sharded");
}

RANK_TEST(table_ranks, outside_of_a_forward, .threads = "2")
{
    OWNED_MODULE net n;
    KN_CHECK(begin(world, &n, 3));
    kn_tensor *w = kn_module_param(&n.word, "weight"), *ids = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2));
    REFUSED(kn_embedding(w, ids), "lies on 2 ranks; use it in a forward of its module");
}

RANK_TEST(table_ranks, offload_is_refused, .threads = "2")
{
    OWNED_MODULE net n;
    KN_CHECK(net_init(&n));
    REFUSED(kn_fsdp_wrap(&n, world, .wrap_class = "part", .offload_dir = "/tmp"),
            "has a table whose gradient stays rows");
}

/* A number that no row has is an error that ends all ranks. */
RANK_TEST(table_ranks, numbers_out_of_range, .threads = "2", .processes = "2", .hosts = "2")
{
    OWNED_MODULE net n;
    KN_CHECK(begin(world, &n, 3));
    int64_t ids[PER_BAG] = { 0, 1, 2, kn_rank(world) ? WORDS : 3 };
    REFUSED(kn_call(&n, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(1, PER_BAG))),
            "index 21 is out of range: the table has 21 rows");
}

/* Rows of before would be those of the whole table. */
RANK_TEST(table_ranks, a_gradient_of_before_is_refused, .threads = "2")
{
    OWNED_MODULE net n;
    const int64_t id = WORDS - 1;
    KN_CHECK(net_init(&n) && kn_materialize(&n, KN_CPU, 3));
    KN_CHECK(
        kn_backward(sum_of(kn_call(&n.word, kn_from(KN_I64, KN_CPU, &id, 1, (int64_t[]){ 1 })))));
    REFUSED(kn_fsdp_wrap(&n, world, .wrap_class = "part"),
            "'word.weight' holds a gradient of before it is sharded");
}

/* Two tables alike, in the order of the rank. */
typedef struct pair {
    kn_module base;
    kn_embedding table[2];
    int first;
} pair;

static kn_tensor *pair_forward(kn_module *self, kn_tensor *ids)
{
    pair *p = (pair *)self;
    kn_tensor *y = kn_call(&p->table[p->first], ids);
    return kn_add(y, kn_call(&p->table[1 - p->first], ids));
}

static bool pair_init(pair *p, kn_comm *world)
{
    *p = (pair){ 0 };
    return kn_module_init(&p->base, pair_forward) &&
           kn_embedding_init(&p->table[0], &p->base, "one", WORDS, DIM, .sparse = true) &&
           kn_embedding_init(&p->table[1], &p->base, "two", WORDS, DIM, .sparse = true) &&
           kn_fsdp_wrap(p, world, .seed = 3);
}

RANK_TEST(table_ranks, another_order_of_tables, .threads = "2", .processes = "2", .hosts = "2")
{
    OWNED_MODULE pair p;
    KN_CHECK(pair_init(&p, world));
    p.first = kn_rank(world);
    REFUSED(kn_call(&p, kn_zeros(KN_I64, KN_CPU, KN_SHAPE(4))), "collectives don't match");
}

/* A rank looks at rows while the other brings gradients of as many. */
RANK_TEST(table_ranks, a_forward_beside_a_backward, .threads = "2", .processes = "2", .hosts = "2")
{
    OWNED_MODULE pair p;
    KN_CHECK(pair_init(&p, world));
    kn_tensor *ids = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(4)), *y = kn_call(&p, ids);
    KN_CHECK(y);
    REFUSED(kn_rank(world) ? kn_call(&p.table[1], ids) != NULL : kn_backward(sum_of(y)),
            "collectives don't match");
}

/* What 3 ranks saved goes on with the same bits on any number. */
KN_TEST(table_ranks, saved_and_loaded_on_other_ranks)
{
    for (int kind = 0; kind < OPTIMS; kind++) {
        run *r = shared_bytes(sizeof *r);
        snprintf(r->dir, sizeof r->dir, "%s", temp_path("run"));
        r->optim = kind;
        KN_CHECK(spawn_threads(3, saves, r) == 0);
        for (int ranks = 1; ranks <= 4; ranks++)
            KN_CHECK(spawn_threads(ranks, loads, r) == 0, "optimizer %d on %d ranks", kind, ranks);
    }
}
