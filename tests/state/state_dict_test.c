/* tests/state/state_dict_test.c: state dicts of modules and optimizers: kinds; what is sent, and
 * what it takes; partitions, averages. any_state.h has the ways of sharding into each other. */
#include "tests/state/stored.h"

/* ---- nothing is sent ------------------------------------------------------------------------- */

/* A module that stays gathered computes with what is loaded: the state of ref. */
static bool gathered_has(net *m, net *ref, const kn_state *s)
{
    IN_SCOPE;
    bool ok = kn_unshard_wait(kn_fsdp_unshard(m)) && kn_load_state_dict(m, s);
    ok = ok && kn_item(net_loss(m, 1)) == kn_item(net_loss(ref, 1));
    return ok && kn_ok();
}

/* Parts go back where they were without a message. */
static int sharded(trial *t)
{
    net *m = &t->m;
    kn_comm *world = t->world;
    OWNED_MODULE net ref;
    EXPECT(net_reference(&ref), "init");
    kn_optim *a = kn_adamw(m, .lr = 0.05), *b = kn_adamw(&ref, .lr = 0.05);
    EXPECT(net_step(m, a, world, 0) && net_step(&ref, b, NULL, 0) &&
               net_follow(&ref, b, m, a, t->w),
           "step");
    const int64_t before = calls_of(world);
    kn_state *s = kn_state_dict(m, .kind = KN_STATE_SHARDED);
    kn_state *so = kn_optim_state_dict(a, .kind = KN_STATE_SHARDED);
    kn_state *local = kn_state_dict(m, .kind = KN_STATE_LOCAL);
    EXPECT(s && so && local && calls_of(world) == before, "something was sent");
    EXPECT(kn_state_has(s, "fc1.weight") && !kn_state_has(local, "fc1.weight") &&
               kn_state_has(local, "fc2._flat_param"),
           "names of a local state: units as they lie in memory");
    EXPECT(net_step(m, a, world, 1) && gathered_has(m, &ref, s) &&
               kn_load_optim_state_dict(a, so) && all_read_as(m, &ref),
           "back");
    EXPECT(net_step(m, a, world, 1) && gathered_has(m, &ref, local) && all_read_as(m, &ref),
           "local, back");
    kn_state_free(s), kn_state_free(so), kn_state_free(local);
    kn_optim_free(a), kn_optim_free(b);
    return 0;
}

KN_TEST(state_dict, sharded_and_local_send_nothing)
{
    TRY(sharded, .ways = 0);
}

/* ---- rank 0 alone ---------------------------------------------------------------------------- */

static int64_t state_bytes(void)
{
    return kn_ledger_read().peak[KN_MEM_STATE];
}

/* Rank 0 has whole tensors, the others nothing, and what they give is ignored. */
static int rank0(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    const bool first = kn_rank(world) == 0;
    kn_optim *a = kn_adamw(m, .lr = 0.05), *b = kn_adamw(other, .lr = 1);
    EXPECT(net_step(m, a, world, 0), "step");
    kn_ledger_reset_peaks();
    kn_state *s = kn_state_dict(m, .rank0_only = true),
             *so = kn_optim_state_dict(a, .rank0_only = true);
    EXPECT(s && so && (kn_state_count(s) > 0) == first && (kn_state_count(so) > 0) == first,
           "names");
    const int64_t most = 2 * 3 * 64 * NET_VOCAB * NET_DIM;
    EXPECT(first ? state_bytes() > 0 && state_bytes() < most : state_bytes() == 0, "%lld bytes",
           (long long)state_bytes());
    EXPECT(first || (kn_state_set_int(s, "wte.weight", 1) && kn_state_set_int(so, "more", 1)));
    EXPECT(kn_load_state_dict(other, s, .from_rank0 = true) &&
               kn_load_optim_state_dict(b, so, .from_rank0 = true) &&
               same_modules(m, other, a, b) && kn_optim_steps(b) == 1,
           "dealt out");
    kn_state_free(s), kn_state_free(so);
    EXPECT(kn_ledger_read().live[KN_MEM_STATE] == 0, "bytes stay");
    kn_optim_free(a), kn_optim_free(b);
    return 0;
}

KN_TEST(state_dict, rank0_takes_and_deals_out)
{
    TRY(rank0, .ways = 0);
}

/* ---- partitions of an optimizer -------------------------------------------------------------- */

/* Two optimizers over parts of the tree, and one over all of it. */
static int partitions(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    const kn_optim_group rest = { "fc*", .frozen = true }, own = { "[!f]*", .frozen = true };
    kn_optim *one = kn_lion(m, .lr = 0.05);
    kn_optim *two[2] = { kn_lion(other, .lr = 1, .groups = &rest, .group_count = 1),
                         kn_lion(other, .lr = 1, .groups = &own, .group_count = 1) };
    EXPECT(net_step(m, one, world, 0), "step");
    kn_state *s = kn_state_dict(m), *o = kn_optim_state_dict(one);
    EXPECT(s && o && kn_load_state_dict(other, s) && kn_load_optim_state_dict(two[0], o) &&
               kn_load_optim_state_dict(two[1], o),
           "one into two");
    kn_state *back = kn_optim_state_dict(two[0]), *second = kn_optim_state_dict(two[1]);
    EXPECT(back && second && kn_state_merge(back, second) &&
               kn_state_count(back) == kn_state_count(o),
           "merge");
    kn_optim *again = kn_lion(other, .lr = 1);
    EXPECT(kn_load_optim_state_dict(again, back), "two into one");
    kn_state *all = kn_optim_state_dict(again);
    EXPECT(all && same_states(all, o), "values");
    kn_state_free(s), kn_state_free(o), kn_state_free(back), kn_state_free(all);
    kn_optim_free(one), kn_optim_free(two[0]), kn_optim_free(two[1]), kn_optim_free(again);
    /* an optimizer of a part of the tree takes that part's names */
    kn_optim *part = kn_sgd(&m->fc1, .lr = 0.1, .momentum = 0.5),
             *whole = kn_sgd(m, .lr = 0.1, .momentum = 0.5);
    kn_state *w = kn_optim_state_dict(whole);
    EXPECT(w && kn_state_has(w, "fc1.weight.momentum") && kn_load_optim_state_dict(part, w),
           "part");
    kn_state_free(w);
    kn_optim_free(part), kn_optim_free(whole);
    return 0;
}

KN_TEST(state_dict, optimizer_partitions_exchange)
{
    TRY(partitions, .ranks = { 2, 4 }, .ways = 1 << 0 | 1 << 1);
}

/* ---- averages -------------------------------------------------------------------------------- */

static int averages(trial *t)
{
    net *m = &t->m, *other = &t->other;
    kn_comm *world = t->world;
    OWNED_OPTIM kn_optim *a = kn_sgd(m, .lr = 0.5);
    kn_ema *e = kn_ema_new(m, .decay = 0.75), *f = kn_ema_new(other, .decay = 0.75);
    EXPECT(net_step(m, a, world, 0) && kn_ema_update(e) && net_step(m, a, world, 1) &&
               kn_ema_update(e),
           "step");
    kn_state *own = kn_state_dict(m, .prefix = "model."),
             *mean = kn_state_dict(m, .ema = e, .prefix = "ema.");
    EXPECT(own && mean && kn_ema_swap(e), "take");
    kn_state *swapped = kn_state_dict(m, .ema = e, .prefix = "ema.");
    EXPECT(swapped && same_states(mean, swapped) && kn_ema_swap(e), "swapped");
    EXPECT(kn_state_merge(own, mean) && kn_state_put(own, .ema = e, .prefix = "average."), "put");
    EXPECT(kn_load_state_dict(other, own, .prefix = "model.") &&
               kn_load_state_dict(other, own, .prefix = "ema.", .ema = f) &&
               kn_state_get(own, .ema = f, .prefix = "average."),
           "load");
    kn_state *x = kn_state_dict(other, .ema = f, .prefix = "ema."),
             *y = kn_state_dict(other, .prefix = "model.");
    EXPECT(x && same_states(x, swapped) && kn_ema_updates(f) == 2 && y, "averages");
    kn_state *z = kn_state_dict(m, .prefix = "model.");
    EXPECT(z && same_states(y, z), "values");
    kn_state_free(own), kn_state_free(swapped), kn_state_free(x), kn_state_free(y);
    kn_state_free(z);
    kn_ema_free(e), kn_ema_free(f);
    return 0;
}

KN_TEST(state_dict, averages_beside_values)
{
    TRY(averages, .ranks = { 2, 4 }, .ways = 1 << 0 | 1 << 8);
}
