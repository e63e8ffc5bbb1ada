/* fsdp/mesh.c: groups of ranks. Ranks are numbered rank = replica * shards + shard: the ranks of
 * one shard group follow each other (they gather and reduce together, on one machine if it has
 * room), and those that hold the same shard are `shards` apart. */
#include "comm/comm_internal.h"
#include "fsdp/kinds.h"
#include "fsdp/mesh.h"
#include "kernels/kernels.h"

const kn_strategy_row kn_strategies[KN_STRATEGY_COUNT] = {
#define ROW(id, ...) [KN_##id] = { __VA_ARGS__ },
    KN_STRATEGIES(ROW)
#undef ROW
};

static bool divides(int part, const char *what, int n)
{
    return !part || n % part == 0 ||
           kn_fail("fsdp: %d %s (.mesh, --%s) don't divide the %d ranks", part, what, what, n);
}

bool kn_fsdp_mesh(kn_mesh *mesh, kn_strategy strategy, kn_comm *comm)
{
    if (!kn_ok() || !kn_given(mesh, "kn_fsdp_mesh", "the mesh") ||
        (!comm && !kn_comm_default(&comm, "kn_fsdp_mesh")))
        return false;
    int n = kn_comm_size(comm), r = mesh->replicas, s = mesh->shards;
    if ((unsigned)strategy >= KN_STRATEGY_COUNT)
        return kn_fail("fsdp: .strategy = %u is none of its values; see fsdp/fsdp.h",
                       (unsigned)strategy);
    bool hybrid = kn_strategies[strategy].mesh == KN_MESH_OF_MACHINES;
    bool alone = kn_strategies[strategy].mesh == KN_MESH_OF_ONE;
    if (r < 0 || s < 0)
        return kn_fail("fsdp: a mesh of %d replicas of %d shards: neither may be negative", r, s);
    if (hybrid && !r && !s) /* machines are replicas */
        s = kn_comm_ranks_a_machine(comm);
    if (hybrid && !r && !s)
        return kn_ok() && kn_fail("fsdp: a hybrid strategy needs shards or replicas (.mesh, "
                                  "--shards, --replicas), two numbers whose product is the %d "
                                  "ranks",
                                  n);
    if (alone && (s > 1 || (r && r != n)))
        return kn_fail("fsdp: KN_NO_SHARD (--strategy no_shard) on %d ranks is %d replicas of 1 "
                       "shard, not %d replicas of %d shards; leave the mesh out (.mesh, "
                       "--replicas, --shards)",
                       n, n, r, s);
    if (!divides(r, "replicas", n) || !divides(s, "shards", n))
        return false;
    if (r && s && r != n / s)
        return kn_fail("fsdp: %d replicas of %d shards (.mesh, --replicas, --shards) on %d ranks: "
                       "their product must be %d; leave one of them out",
                       r, s, n, n);
    r = alone ? n : r ? r : s ? n / s : 1;
    *mesh = (kn_mesh){ .replicas = r, .shards = n / r };
    return true;
}

/* Ranks of equal color, in order of rank. *out is NULL where a group is one rank. A communicator
 * serves one tree at a time, since two trees' streams may run side by side; when the tree goes, the
 * next one of these ranks gets it. Collective. */
static bool group(kn_comm *c, int size, int color, const char *name, kn_comm **out)
{
    *out = size > 1 ? kn_comm_lend(c, size, color, name) : NULL;
    return size <= 1 || *out;
}

static void give_back(kn_ranks *r)
{
    kn_comm_give_back(r->gather);
    kn_comm_give_back(r->reduce);
    kn_comm_give_back(r->replicate);
    kn_host_free(r);
}

kn_ranks *kn_ranks_of(kn_rank_groups *g, int shards)
{
    for (kn_ranks *r = g->ranks; r; r = r->next)
        if (r->shards == shards)
            return r;
    int n = kn_comm_size(g->comm), rank = kn_rank(g->comm);
    kn_ranks *r = kn_host_calloc(1, sizeof *r);
    if (!r)
        return NULL;
    *r = (kn_ranks){
        .shards = shards, .replicas = n / shards, .shard = rank % shards, .replica = rank / shards
    };
    if (!group(g->comm, shards, r->replica, "gather", &r->gather) ||
        !group(g->comm, shards, r->replica, "reduce", &r->reduce) ||
        !group(g->comm, r->replicas, r->shard, "replicate", &r->replicate)) {
        give_back(r);
        return NULL;
    }
    r->next = g->ranks;
    g->ranks = r;
    return r;
}

bool kn_ranks_connect(kn_ranks *r, kn_device d, kn_dtype t, kn_dtype sums)
{
    enum { EACH = 16 }; /* elements that each rank gets from each */
    const unsigned bit = 1u << t;
    if (d != KN_CUDA || r->connected & bit || (!r->reduce && !r->replicate))
        return true;
    r->connected |= bit;
    kn_memory *m = kn_device_memory(d);
    kn_stream *s = kn_compute_stream(d);
    kn_dtype over = r->reduce ? sums : t; /* over replicas */
    int64_t most = EACH * (r->shards > r->replicas ? r->shards : r->replicas);
    int64_t bytes = most * (int64_t)kn_dtype_size(KN_F64), all = 2 * bytes;
    char *from = m && s ? kn_take(m, (size_t)all, KN_MEM_COMM) : NULL;
    if (!from)
        return false;
    bool ok = kn_fill_run(s, from, KN_U8, all, 0) &&
              (!r->reduce || kn_reduce_scatter(r->reduce, from + bytes, NULL, from, EACH, t, t, s,
                                               "connecting")) &&
              (!r->replicate || kn_all_reduce(r->replicate, from + bytes, NULL, from,
                                              EACH * r->replicas, over, over, s, "connecting"));
    kn_give(m, from, (size_t)all, KN_MEM_COMM);
    return ok;
}

kn_comm *kn_slice_comm(kn_rank_groups *g, int k)
{
    size_t places = (size_t)kn_comm_size(g->comm) + 1;
    if (k <= 1 || (!g->slice && !(g->slice = kn_host_calloc(places, sizeof *g->slice))))
        return NULL;
    if (!g->slice[k] && !group(g->comm, k, kn_rank(g->comm) / k, "slice", &g->slice[k]))
        return NULL;
    return g->slice[k];
}

void kn_ranks_free(kn_rank_groups *g)
{
    while (g->ranks) {
        kn_ranks *r = g->ranks;
        g->ranks = r->next;
        give_back(r);
    }
    for (int k = 0; g->slice && k <= kn_comm_size(g->comm); k++)
        kn_comm_give_back(g->slice[k]);
    kn_host_free(g->slice);
    g->slice = NULL;
}
