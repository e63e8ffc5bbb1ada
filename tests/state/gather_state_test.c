/* tests/state/gather_state_test.c: sharded states in memory go to other ranks than those that took
 * them: to fewer, to more, and from the replica that is left of a hybrid mesh. Rank functions
 * return a status. */
#include "tests/state/moving.h"

/* Ranks [0, n) of world, or NULL for the others. Collective. */
static kn_comm *first_ranks(kn_comm *world, int n)
{
    const bool in = kn_rank(world) < n;
    kn_comm *c = kn_comm_split(world, in ? 0 : 1, 0, "first ranks");
    return in ? c : NULL;
}

static bool wrap(net *m, kn_comm *comm, const way *w)
{
    return net_init(m, KN_META) && net_wrap(m, comm, w);
}

/* The ranks of `from` train two steps in way w and take parts; those of `to` go on from them, in
 * another way, as one process does. Either is NULL on ranks that aren't in it; world has all. */
static int moves(kn_comm *world, kn_comm *from, kn_comm *to, const way *w)
{
    net m, ref, other;
    kn_state *part = NULL, *part_o = NULL;
    EXPECT(net_reference(&ref));
    kn_optim *b = kn_adamw(&ref, .lr = 0.05);
    if (from) {
        EXPECT(wrap(&m, from, w));
        kn_optim *a = kn_adamw(&m, .lr = 0.05);
        EXPECT(net_step(&m, a, from, 0) && net_step(&m, a, from, 1));
        part = kn_state_dict(&m, .kind = KN_STATE_SHARDED);
        part_o = kn_optim_state_dict(a, .kind = KN_STATE_SHARDED);
        EXPECT(part && part_o);
        kn_optim_free(a);
        kn_module_free(&m);
    }
    EXPECT(net_step(&ref, b, NULL, 0) && net_step(&ref, b, NULL, 1));
    kn_state *whole = kn_state_gather(part, .comm = world, .rank0_only = true),
             *whole_o = kn_state_gather(part_o, .comm = world, .rank0_only = true),
             *all = kn_state_gather(part_o, .comm = world);
    EXPECT(whole && whole_o && all, "%s", kn_error());
    EXPECT((kn_state_count(whole) > 0) == (kn_rank(world) == 0) && kn_state_count(all) > 0);
    if (w->ranks && !kn_ok()) /* a hybrid mesh adds in another order than one process */
        return 1;
    kn_state *want = kn_optim_state_dict(b);
    EXPECT(w->ranks || same_states(all, want), "%s", kn_error());
    if (to) {
        const way next = { .layout = KN_LAYOUT_PER_PARAM };
        EXPECT(net_other(&other, to, &next));
        kn_optim *c = kn_adamw(&other, .lr = 1);
        EXPECT(kn_load_state_dict(&other, kn_rank(to) ? NULL : whole, .from_rank0 = true) &&
                   kn_load_optim_state_dict(c, kn_rank(to) ? NULL : whole_o, .from_rank0 = true),
               "%s", kn_error());
        EXPECT(kn_optim_steps(c) == 2 && kn_lr(c) == 0.05);
        EXPECT(w->ranks || all_read_as(&other, &ref));
        EXPECT(net_step(&other, c, to, 2) && net_step(&ref, b, NULL, 2));
        EXPECT(w->ranks || all_read_as(&other, &ref), "the next step");
        kn_optim_free(c);
        kn_module_free(&other);
    }
    kn_state_free(part), kn_state_free(part_o), kn_state_free(want);
    kn_state_free(whole), kn_state_free(whole_o), kn_state_free(all);
    kn_optim_free(b);
    kn_module_free(&ref);
    return 0;
}

static int to_other_numbers(kn_comm *world, void *arg)
{
    const int ranks = kn_comm_size(world);
    for (int n = 1; n <= ranks; n *= 2) {
        kn_comm *some = first_ranks(world, n);
        if (moves(world, world, some, arg) || (n < ranks && moves(world, some, world, &ways[0])))
            return 1;
    }
    return 0;
}

KN_TEST(gather_state, to_fewer_and_to_more_ranks)
{
    in_ways(to_other_numbers);
}

/* Of a mesh of two replicas either is enough, in any mixture; half of each is not. */
static int what_is_left(kn_comm *world, void *arg)
{
    const int rank = kn_rank(world), pair = *(int *)arg; /* ranks 0 and pair go on */
    net m;
    EXPECT(wrap(&m, world, &ways[8]));
    kn_state *part = kn_state_dict(&m, .kind = KN_STATE_SHARDED), *full = kn_state_dict(&m);
    const bool stays = rank == 0 || rank == pair;
    kn_comm *left = kn_comm_split(world, stays, 0, "left");
    kn_state *whole = stays ? kn_state_gather(part, .comm = left) : NULL;
    if (stays && pair == 2)
        EXPECT(!whole && strstr(kn_error(), "the ranks hold ") &&
                   strstr(kn_error(), "must take part (.comm)"),
               "%s", kn_error());
    else
        EXPECT(!stays || (whole && same_states(whole, full)), "%s", kn_error());
    kn_clear_error();
    kn_state_free(part), kn_state_free(full), kn_state_free(whole);
    kn_module_free(&m);
    return 0;
}

KN_TEST(gather_state, one_replica_is_enough)
{
    for (int pair = 1; pair < 4; pair++) {
        KN_CHECK(kn_spawn_threads(4, what_is_left, &pair) == 0, "ranks 0 and %d", pair);
        kn_clear_error();
    }
}

/* Parts of different states, flat ones, and none at all. */
static int wrong(kn_comm *world, void *arg)
{
    const int how = *(int *)arg, rank = kn_rank(world);
    net a, b;
    const char *want[] = { "is cut in one way on some ranks",
                           "which only its own sharding can place",
                           "no rank has a state with a name in it", "is another tensor here",
                           "has no 'more'" };
    EXPECT(wrap(&a, world, &ways[0]) && wrap(&b, world, &ways[1]));
    kn_state *s = how == 0   ? kn_state_dict(rank ? &a : &b, .kind = KN_STATE_SHARDED)
                  : how == 1 ? kn_state_dict(&a, .kind = KN_STATE_LOCAL)
                  : how == 2 ? kn_state_new()
                             : kn_state_dict(&a, .kind = KN_STATE_SHARDED,
                                             .dtype = how == 3 && rank ? KN_BF16 : KN_F32);
    if (how == 4 && rank == 1)
        EXPECT(kn_state_set_tensor(s, "more", kn_state_tensor(s, "ln.bias")));
    kn_state *whole = s ? kn_state_gather(s, .comm = world) : NULL;
    EXPECT(s && !whole && (strstr(kn_error(), want[how]) || (rank == 0 && how >= 3)), "%d: %s", how,
           kn_error());
    kn_clear_error();
    kn_state_free(s);
    kn_module_free(&a), kn_module_free(&b);
    kn_clear_error();
    return 0;
}

KN_TEST(gather_state, wrong_use_is_a_sentence)
{
    for (int how = 0; how < 5; how++) {
        KN_CHECK(kn_spawn_threads(2, wrong, &how) == 0, "%d", how);
        kn_clear_error();
    }
}
