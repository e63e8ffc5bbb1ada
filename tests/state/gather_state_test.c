/* tests/state/gather_state_test.c: sharded states in memory made whole: from the replica that is
 * left of a hybrid mesh; what can't be. any_state.h moves them to fewer and to more ranks. Rank
 * functions return a status. */
#include "tests/state/moving.h"

static bool wrap(net *m, kn_comm *comm, const way *w)
{
    return net_init(m, KN_META) && net_wrap(m, comm, w);
}

/* Of a mesh of two replicas either is enough, in any mixture; half of each is not. */
static int what_is_left(kn_comm *world, void *arg)
{
    const int rank = kn_rank(world), pair = *(int *)arg; /* ranks 0 and pair go on */
    OWNED_MODULE net m;
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
