/* tests/fsdp/mesh_test.c: meshes of ranks: valid and invalid sizes, their groups, and
 * communicators, which several models use in turn. Rank functions return a status and never
 * assert. */
#include "tests/fsdp/two.h"

static void resolves(kn_strategy strategy, int n, kn_mesh given, kn_mesh expected)
{
    kn_comm *ranks = kn_comm_simulated(n, 0, 1e9);
    KN_CHECK(kn_fsdp_mesh(&given, strategy, ranks));
    kn_comm_simulated_free(ranks);
    KN_CHECK(given.replicas == expected.replicas && given.shards == expected.shards,
             "strategy %d on %d ranks: %d replicas of %d shards", strategy, n, given.replicas,
             given.shards);
}

KN_TEST(mesh, resolves)
{
    for (int n = 1; n <= 6; n++) {
        resolves(KN_FULL_SHARD, n, (kn_mesh){ 0 }, (kn_mesh){ 1, n });
        resolves(KN_STRATEGY_DEFAULT, n, (kn_mesh){ 0 }, (kn_mesh){ 1, n });
        resolves(KN_SHARD_GRAD_OP, n, (kn_mesh){ 0 }, (kn_mesh){ 1, n });
        resolves(KN_NO_SHARD, n, (kn_mesh){ 0 }, (kn_mesh){ n, 1 });
        resolves(KN_NO_SHARD, n, (kn_mesh){ n, 1 }, (kn_mesh){ n, 1 });
    }
    kn_mesh alone = { 0 };
    KN_CHECK(kn_fsdp_mesh(&alone, KN_HYBRID_SHARD, NULL) && alone.replicas == 1);
    resolves(KN_HYBRID_SHARD, 6, (kn_mesh){ .shards = 2 }, (kn_mesh){ 3, 2 });
    resolves(KN_HYBRID_SHARD_GRAD_OP, 6, (kn_mesh){ .replicas = 2 }, (kn_mesh){ 2, 3 });
    resolves(KN_HYBRID_SHARD, 6, (kn_mesh){ 6, 1 }, (kn_mesh){ 6, 1 });
    resolves(KN_FULL_SHARD, 6, (kn_mesh){ .replicas = 3 }, (kn_mesh){ 3, 2 });
    resolves(KN_SHARD_GRAD_OP, 4, (kn_mesh){ 2, 2 }, (kn_mesh){ 2, 2 });
}

static void refuses(kn_strategy strategy, int n, kn_mesh given, const char *part)
{
    OWNED_SIMULATED kn_comm *ranks = kn_comm_simulated(n, 0, 1e9);
    kn_mesh before = given;
    REFUSED(kn_fsdp_mesh(&given, strategy, ranks), part);
    KN_CHECK(memcmp(&given, &before, sizeof given) == 0, "what doesn't fit stays");
}

KN_TEST(mesh, refuses_with_numbers)
{
    refuses(KN_HYBRID_SHARD, 4, (kn_mesh){ 0 }, "the 4 ranks");
    refuses(KN_HYBRID_SHARD_GRAD_OP, 4, (kn_mesh){ .shards = 3 },
            "3 shards (.mesh, --shards) don't divide the 4 ranks");
    refuses(KN_FULL_SHARD, 4, (kn_mesh){ .replicas = 3 },
            "3 replicas (.mesh, --replicas) don't divide the 4 ranks");
    refuses(KN_FULL_SHARD, 8, (kn_mesh){ 2, 2 }, "product must be 8");
    refuses(KN_FULL_SHARD, 2, (kn_mesh){ .shards = 4 },
            "4 shards (.mesh, --shards) don't divide the 2 ranks");
    refuses(KN_FULL_SHARD, 2, (kn_mesh){ .shards = -1 }, "negative");
    refuses(KN_STRATEGY_COUNT, 2, (kn_mesh){ 0 }, " is none of its values");
    refuses(KN_NO_SHARD, 4, (kn_mesh){ .shards = 2 }, "on 4 ranks is 4 replicas of 1 shard");
    refuses(KN_NO_SHARD, 4, (kn_mesh){ .replicas = 2 }, "on 4 ranks is 4 replicas of 1 shard");
}

/* The default mesh of a hybrid strategy if each machine has `machine` ranks. */
static void on_machines(kn_comm *world, void *arg)
{
    int machine = *(int *)arg, n = kn_comm_size(world);
    double y = 0, z = 0;
    TWO(m);
    TWO(other);
    KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = KN_HYBRID_SHARD, .wrap_class = "linear") &&
             kn_fsdp_wrap(&other, world));
    kn_mesh mesh = kn_unit_of(m.base.impl)->options.mesh;
    KN_CHECK(mesh.shards == machine && mesh.replicas == n / machine, "%d x %d", mesh.replicas,
             mesh.shards);
    KN_CHECK(kn_unit_of(m.a.base.impl)->options.mesh.shards == machine);
    KN_CHECK(two_evaluate(&m, &y) && two_evaluate(&other, &z) && y == z, "%g, %g", y, z);
}

static void on_odd_machines(kn_comm *world, void *arg)
{
    if (arg)
        setenv("LOCAL_WORLD_SIZE", kn_rank(world) < 2 ? "2" : "1", 1);
    TWO(m);
    REFUSED(kn_fsdp_wrap(&m, world, .strategy = KN_HYBRID_SHARD_GRAD_OP), "(LOCAL_WORLD_SIZE)",
            "give the mesh");
}

/* Two machines; ranks are dealt to them in turn, or one after another. */
static void dealt(kn_comm *world, void *arg)
{
    bool in_turn = *(bool *)arg;
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    setenv("LOCAL_RANK", (in_turn ? kn_rank(world) / 2 : kn_rank(world) % 2) ? "1" : "0", 1);
    int ranks = kn_comm_ranks_a_machine(world);
    KN_CHECK(in_turn ? ranks == 0 && error_has("2 of the 4 ranks", "give the mesh") : ranks == 2);
}

KN_TEST(mesh, a_machine_s_ranks_follow_each_other)
{
    if (THREADS_ONLY)
        KN_SKIP("ranks are processes here");
    KN_CHECK(spawn_processes(4, dealt, &(bool){ false }) == 0);
    KN_CHECK(spawn_processes(4, dealt, &(bool){ true }) == 0);
}

KN_TEST(mesh, hybrid_shards_inside_a_machine)
{
    if (THREADS_ONLY)
        KN_SKIP("ranks are processes here");
    static const int ranks_machine[][2] = { { 1, 1 }, { 2, 1 }, { 2, 2 }, { 4, 2 }, { 4, 4 } };
    for (size_t i = 0; i < sizeof ranks_machine / sizeof *ranks_machine; i++) {
        char text[8];
        int machine = ranks_machine[i][1], n = ranks_machine[i][0];
        snprintf(text, sizeof text, "%d", machine);
        if (machine < n) /* else the default: they share memory */
            setenv("LOCAL_WORLD_SIZE", text, 1);
        KN_CHECK(spawn_processes(n, on_machines, &machine) == 0, "%d ranks on machines of %d", n,
                 machine);
        unsetenv("LOCAL_WORLD_SIZE");
    }
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    KN_CHECK(spawn_processes(3, on_odd_machines, NULL) == 0);
    KN_CHECK(spawn_processes(4, on_odd_machines, &(int){ 1 }) == 0);
    unsetenv("LOCAL_WORLD_SIZE");
}

/* .timeout_s goes to the communicator that was given, and stays there; none leaves it alone. */
RANK_TEST(mesh, a_timeout_is_the_communicator_s, .threads = "2")
{
    for (int own = 0; own < 2; own++) {
        two m[2];
        kn_comm *comm = own ? kn_comm_dup(world, "own") : NULL, *of = own ? comm : world;
        KN_CHECK(two_init(&m[0], KN_META, KN_F32) && two_init(&m[1], KN_META, KN_F32));
        KN_CHECK(kn_fsdp_wrap(&m[0], comm, .timeout_s = 7 + own) && kn_fsdp_wrap(&m[1], comm));
        KN_CHECK(kn_comm_get_timeout(of) == 7 + own && kn_comm_get_timeout(world) == 7);
        kn_module_free(&m[0]);
        kn_module_free(&m[1]);
        KN_CHECK(kn_comm_get_timeout(of) == 7 + own);
    }
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* True if c gathers exactly the ranks first, first + step, ... (count of them), in this order. */
static bool holds(kn_comm *c, kn_comm *world, int first, int step, int count)
{
    int32_t mine = kn_rank(world), all[8] = { 0 };
    if (count == 1)
        return c == NULL;
    if (!c || kn_comm_size(c) != count ||
        !kn_all_gather(c, all, &mine, 1, KN_I32, kn_compute_stream(KN_CPU), "ranks"))
        return false;
    for (int i = 0; i < count; i++)
        if (all[i] != first + i * step)
            return false;
    return true;
}

/* Lets a gather and a reduction overlap, on streams of their own. */
static bool apart(kn_comm *const c[5])
{
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < i; k++)
            if (c[i] && c[i] == c[k])
                return false;
    return true;
}

RANK_TEST(mesh, groups_of_ranks, .processes = "1234")
{
    kn_rank_groups s = { .comm = world };
    int n = kn_comm_size(world), rank = kn_rank(world);
    for (int shards = 1; shards <= n; shards++) {
        if (n % shards)
            continue;
        kn_ranks *r = kn_ranks_of(&s, shards);
        KN_CHECK(r && r->shards == shards && r->replicas == n / shards &&
                 r->shard == rank % shards && r->replica == rank / shards &&
                 kn_ranks_of(&s, shards) == r);
        int first = r->replica * shards;
        KN_CHECK(holds(r->gather, world, first, 1, shards));
        KN_CHECK(holds(r->reduce, world, first, 1, shards));
        KN_CHECK(holds(r->replicate, world, r->shard, shards, r->replicas));
        kn_comm *slice = kn_slice_comm(&s, shards);
        KN_CHECK(apart((kn_comm *[]){ r->gather, r->reduce, r->replicate, slice, world }));
        KN_CHECK(holds(slice, world, first, 1, shards) && kn_slice_comm(&s, shards) == slice);
    }
    kn_ranks_free(&s);
}

static int second_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return ndim > 1;
}

KN_TEST(mesh, what_does_not_divide)
{
    kn_linear l;
    OWNED_SIMULATED kn_comm *three = kn_comm_simulated(3, 0, 0);
    KN_CHECK(three && kn_linear_init(&l, NULL, "l", 4, 4, .device = KN_META));
    REFUSED(kn_fsdp_wrap(&l, three, .device = KN_META, .reshard_after_forward = 2),
            ".reshard_after_forward = 2 must divide the 3 shards");
    REFUSED(kn_fsdp_wrap(&l, three, .device = KN_META, .layout = KN_LAYOUT_PER_PARAM,
                         .placement = second_dim),
            "'weight' along dim 1, which must be one of its 2 dims and, other than 0, "
            "divide by the 3 shards");
    kn_module_free(&l);
}

/* ---- a part of the ranks --------------------------------------------------------------------- */

/* Every other rank trains one model and the rest another one, each sharded over its part: like two
 * programs. */
RANK_TEST(mesh, a_part_of_the_ranks_shards_a_model, .threads = "24")
{
    int color = kn_rank(world) % 2;
    kn_comm *part = kn_comm_split(world, color, kn_rank(world), "part");
    KN_CHECK(part && kn_comm_size(part) == kn_comm_size(world) / 2);
    TWO_WHOLE(whole);
    TWO_WRAPPED(m, part, .wrap_class = "linear", .seed = NET_SEED);
    OWNED_OPTIM kn_optim *a = kn_sgd(&whole, .lr = 0.5), *b = kn_sgd(&m, .lr = 0.5);
    for (int step = 0; step < 2; step++) {
        for (int r = 0; r < kn_comm_size(part); r++)
            KN_CHECK(two_backward(&whole, 10 * color + 4 * step + r));
        KN_CHECK(two_backward(&m, 10 * color + 4 * step + kn_rank(part)));
        KN_CHECK(kn_step(a) && kn_step(b));
    }
    KN_CHECK(all_read_as(&m, &whole));
}

/* ---- trees beside each other ----------------------------------------------------------------- */

/* Two units below a module that isn't a unit are two trees on the same streams and communicators.
 * When one is freed while a gather runs, the other keeps working. */
static void share_lanes(kn_comm *world, void *arg)
{
    two m, apart;
    double y = 0, z = 0;
    kn_set_free_cores(*(int *)arg);
    KN_CHECK(two_init(&m, KN_META, KN_F32) && kn_fsdp_wrap(&m.a, world, .seed = NET_SEED) &&
             kn_fsdp_wrap(&m.b, world, .seed = NET_SEED));
    KN_CHECK(two_init(&apart, KN_META, KN_F32) && kn_fsdp_wrap(&apart, world, .seed = NET_SEED));
    KN_CHECK(two_backward(&m, kn_rank(world)) && two_evaluate(&m, &y) && two_evaluate(&apart, &z));
    const kn_unit *a = kn_unit_of(m.a.base.impl), *b = kn_unit_of(m.b.base.impl);
    const kn_unit *other = kn_unit_of(apart.base.impl);
    KN_CHECK(y == z && a->schedule != b->schedule && a->schedule->lanes == b->schedule->lanes,
             "%g, %g", y, z);
    KN_CHECK(a->bucket[0]->ranks == b->bucket[0]->ranks &&
                 a->bucket[0]->ranks != other->bucket[0]->ranks &&
                 a->schedule->lanes != other->schedule->lanes,
             "communicators");
    KN_CHECK(kn_stream_is_inline(a->schedule->lanes->gather) ==
             (kn_comm_size(world) == 1 || !*(int *)arg));
    kn_comm_slow(world, 0.002, 0);
    KN_CHECK(kn_fsdp_unshard(&m.a).unit && kn_fsdp_unshard(&m.b).unit);
    kn_module_free(&m.a);
    KN_CHECK(kn_fsdp_reshard(&m.b) && kn_unshard_wait(kn_fsdp_unshard(&m.b)), "the other one");
    kn_comm_slow(world, 0, 0);
    kn_module_free(&m);
    KN_CHECK(two_evaluate(&apart, &y) && y == z, "another model");
    kn_module_free(&apart);
}

KN_TEST(mesh, trees_beside_each_other_share_streams_and_communicators)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int cores = 0; cores <= 4; cores += 4)
            KN_CHECK(spawn_threads(ranks, share_lanes, &cores) == 0, "%d ranks, %d cores free",
                     ranks, cores);
}

/* One of two trees is each rank's own: its gradients are those of the rank's data alone. */
RANK_TEST(mesh, trees_beside_each_other_of_other_ranks, .threads = "124", .cases = 2)
{
    bool first = *(int *)arg;
    const kn_param *want;
    TWO_WHOLE(alone);
    TWO(m);
    KN_CHECK(kn_fsdp_wrap(&m.a, first ? kn_comm_self() : world, .seed = NET_SEED) &&
             kn_fsdp_wrap(&m.b, first ? world : kn_comm_self(), .seed = NET_SEED));
    OWNED_OPTIM kn_optim *a = kn_sgd(&m, .lr = 0.5), *b = kn_sgd(&alone, .lr = 0.5);
    KN_CHECK(two_backward(&m, kn_rank(world)) && kn_step(a));
    KN_CHECK(two_backward(&alone, kn_rank(world)) && kn_step(b));
    int n = kn_params(first ? &alone.a : &alone.b, &want);
    for (int i = 0; i < n; i++)
        KN_CHECK(reads_as(first ? &m.a : &m.b, i, want[i].tensor), "'%s'", want[i].name);
}

/* ---- communicators --------------------------------------------------------------------------- */

enum { MODELS = 150 };

RANK_TEST(mesh, communicators_are_used_again, .threads = "2")
{
    for (int i = 0; i < MODELS; i++) {
        double y = 0, z = 0;
        bool hybrid = i % 3 == 1;
        TWO(m);
        TWO(other);
        KN_CHECK(kn_fsdp_wrap(&m, world, .strategy = hybrid ? KN_HYBRID_SHARD : KN_FULL_SHARD,
                              .mesh = { .shards = hybrid ? 1 : 0 }) &&
                     kn_fsdp_wrap(&other, world, .reshard_after_forward = kn_comm_size(world)),
                 "model %d", i);
        KN_CHECK(two_evaluate(&m, &y) && two_evaluate(&other, &z) && y == z, "model %d: %g, %g", i,
                 y, z);
        kn_ranks *a = kn_unit_of(m.base.impl)->bucket[0]->ranks,
                 *b = kn_unit_of(other.base.impl)->bucket[0]->ranks;
        KN_CHECK(a->gather == NULL || a->gather != b->gather, "two models at once share one");
    }
    KN_CHECK(kn_ok());
}
