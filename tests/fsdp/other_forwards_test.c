/* tests/fsdp/other_forwards_test.c: ranks whose forwards ran other units, with whole parameters, so
 * that no gather tells. Rank functions return a status. */
#include "tests/fsdp/two.h"

typedef struct chooser {
    two t;
    int only; /* 1: a alone, 2: b alone */
} chooser;

static kn_tensor *choose(kn_module *self, kn_tensor *x)
{
    chooser *m = (chooser *)self;
    x = m->only == 2 ? x : kn_call(&m->t.a, x);
    return m->only == 1 ? x : kn_call(&m->t.b, x);
}

static bool chooser_init(chooser *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->t.base, choose) &&
           kn_linear_init(&m->t.a, &m->t.base, "a", 4, 4, .device = KN_META) &&
           kn_linear_init(&m->t.b, &m->t.base, "b", 4, 4, .device = KN_META);
}

/* A backward whose gradients are held back, of a forward that ran another unit on each rank: with
 * whole parameters it makes no collective. The next backward finds out. */
static void held_back(kn_comm *world, void *arg)
{
    OWNED_MODULE chooser m;
    KN_CHECK(chooser_init(&m) &&
             kn_fsdp_wrap(&m, world, .strategy = KN_NO_SHARD, .wrap_class = "linear"));
    m.only = 1 + kn_rank(world) % 2;
    KN_CHECK(kn_fsdp_set_gradient_sync(&m, false, true) && two_backward(&m, kn_rank(world)));
    m.only = 0;
    KN_CHECK(kn_fsdp_set_gradient_sync(&m, true, true) && !two_backward(&m, kn_rank(world)) &&
             error_has("which backwards brought gradients", "the same calls in the same order"));
}

/* A forward that waits for its backward beside one that ran another unit on each rank. */
static void forward_held(kn_comm *world, void *arg)
{
    OWNED_MODULE chooser m;
    bool frozen = *(bool *)arg;
    KN_CHECK(chooser_init(&m) &&
             (!frozen || kn_require_grad(kn_module_param(&m.t.b, "weight"), 0)) &&
             kn_fsdp_wrap(&m, world, .strategy = KN_NO_SHARD, .wrap_class = "linear"));
    IN_SCOPE;
    kn_tensor *first = two_loss(&m, kn_rank(world));
    m.only = 1 + kn_rank(world) % 2;
    kn_tensor *second = two_loss(&m, kn_rank(world));
    KN_CHECK(first && second && !kn_backward(first) &&
             error_has("which units backward reaches", "the same calls in the same order"));
}

KN_TEST(other_forwards, no_collective_tells)
{
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        KN_CHECK(spawn_threads(ranks, held_back, NULL) == 0, "%d ranks", ranks);
        for (int i = 0; i < 2; i++)
            KN_CHECK(spawn_threads(ranks, forward_held, &(bool){ i }) == 0, "%d ranks", ranks);
    }
}
