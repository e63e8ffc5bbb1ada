/* tests/fsdp/scaler_test.c: loss scaling agrees over ranks whose losses reach other parts (acts.h
 * has overflows, several optimizers and groups of ranks). Rank functions return a status. */
#include "tests/fsdp/net.h"
#include "tests/owned.h"

static kn_tensor *head_only(kn_module *self, kn_tensor *x)
{
    return kn_call(&((net *)self)->head, x);
}

/* Of even ranks, the loss of all; odd ranks' reaches the head alone. */
static kn_tensor *branch_loss(net *m, int rank, int micro)
{
    kn_tensor *x =
        kn_from(KN_F32, KN_CPU, (float[NET_DIM]){ 1, (float)micro }, KN_SHAPE(1, NET_DIM));
    kn_tensor *all = net_loss(m, micro), *head = kn_call_method(m, head_only, x);
    return rank % 2 == 0 ? all : mean_of(head);
}

typedef struct branches {
    bool scales, mixes;
    float w[NET_VOCAB * NET_DIM], bias[NET_DIM];
} branches;

static void train_branches(kn_comm *world, void *arg)
{
    branches *b = arg, mine = *b;
    OWNED_MODULE net m = { 0 };
    KN_CHECK(net_init(&m, KN_META) && kn_fsdp_wrap(&m.fc2, world, .seed = NET_SEED) &&
             kn_fsdp_wrap(&m, world, .seed = NET_SEED));
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.01);
    OWNED_SCALER kn_scaler *s = kn_scaler_new(&m, .init_scale = 1024, .interval = 2);
    bool refused = false;
    for (int step = 0; step < 3; step++) {
        for (int micro = 0; micro < 3; micro++) {
            IN_SCOPE;
            kn_fsdp_set_gradient_sync(&m, micro > 0, true);
            kn_tensor *loss = branch_loss(&m, kn_rank(world) + micro, 3 * step + micro);
            bool scaled = b->scales && !(b->mixes && micro == 1);
            KN_CHECK(kn_backward(scaled ? kn_scale_loss(s, loss) : loss));
        }
        if (b->mixes) {
            refused = !kn_scaler_step(s, o) && strstr(kn_error(), "some that didn't");
            break;
        }
        KN_CHECK(b->scales ? kn_scaler_step(s, o) : kn_step(o));
    }
    if (b->mixes)
        kn_clear_error();
    KN_CHECK(refused == b->mixes, "%s", b->mixes ? "not refused" : "refused");
    KN_CHECK(b->mixes || (kn_param_read(&m, 0, mine.w) && kn_param_read(&m, 4, mine.bias)));
    if (kn_rank(world) == 0)
        *b = mine;
}

/* Their gradients carry the scale of the others' losses, as the plain steps' bits show; sums of
 * scaled and other losses are refused on all ranks. */
KN_TEST(scaler, gradients_of_other_ranks_carry_their_scale)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        branches plain = { .scales = false }, scaled = { .scales = true },
                 mixed = { .scales = true, .mixes = true };
        KN_CHECK(spawn_threads(ranks, train_branches, &plain) == 0 &&
                     spawn_threads(ranks, train_branches, &scaled) == 0,
                 "%d ranks", ranks);
        KN_CHECK(memcmp(plain.w, scaled.w, sizeof plain.w) == 0 &&
                     memcmp(plain.bias, scaled.bias, sizeof plain.bias) == 0,
                 "%d ranks: other bits", ranks);
        KN_CHECK(spawn_threads(ranks, train_branches, &mixed) == 0, "%d ranks, mixed", ranks);
    }
}
