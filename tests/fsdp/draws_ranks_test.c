/* tests/fsdp/draws_ranks_test.c: draws with grad mode off over ranks: N ranks draw in a micro-batch
 * what one draws in it, evaluations that draw leave training's bits alone, and ranks draw alike at
 * places of the same number. Rank functions return a status and never assert. */
#include "tests/fsdp/net.h"
#include "tests/owned.h"

enum { STEPS = 3, MICRO = 4, WIDTH = 6 };

typedef struct noisy {
    kn_module base;
    kn_linear fc;
    kn_dropout drop;
} noisy;

/* A draw of each kind, by its number. */
static kn_tensor *draw_of(int i, kn_tensor *x)
{
    kn_tensor *wide = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4096)), *one = kn_ones_like(x);
    kn_tensor *at = kn_cast(kn_arange(KN_I64, KN_CPU, 4096), KN_F32);
    return i == 0   ? kn_rand_like(x)
           : i == 1 ? kn_normal_sample(x, one)
           : i == 2 ? kn_normal_rsample(x, one)
           : i == 3 ? kn_cast(kn_categorical_sample(wide), KN_F32)
                    : mean_of(kn_mul(kn_bernoulli_sample(wide), at));
}

/* y = fc(drop(x)) + noise that is drawn with grad mode off, as a frozen teacher's is; of it a draw
 * that passes gradients on */
static kn_tensor *noisy_forward(kn_module *self, kn_tensor *x)
{
    noisy *m = (noisy *)self;
    kn_tensor *y = kn_call(&m->fc, kn_call(&m->drop, x));
    const bool mode = kn_set_grad_mode(false);
    kn_tensor *noise = kn_randn_like(x);
    for (int i = 0; i < 5 && noise; i++)
        noise = kn_add(noise, draw_of(i, x));
    kn_set_grad_mode(mode);
    return y && noise ? kn_normal_rsample(kn_add(y, noise), kn_ones_like(y)) : NULL;
}

typedef struct trained {
    bool evaluates, at_places, recomputes;
    float loss[STEPS][MICRO], noise[STEPS][MICRO];
} trained;

/* A number of draws that differs over ranks. */
static bool evaluate(noisy *m, kn_comm *world, int step, bool at_place)
{
    WITHOUT_GRAD;
    kn_draws place = { 0 };
    if (at_place)
        place = kn_draws_begin(step);
    for (int i = 0; i <= kn_rank(world); i++)
        kn_rand_like(kn_ones(KN_F32, KN_CPU, KN_SHAPE(9)));
    bool ok = kn_call(m, kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, WIDTH))) != NULL;
    kn_draws_end(place);
    return ok;
}

static bool learn(noisy *m, trained *t, int step, int micro)
{
    IN_SCOPE;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, (uint64_t)micro, KN_SHAPE(3, WIDTH));
    const bool mode = kn_set_grad_mode(false);
    t->noise[step][micro] = (float)kn_item(mean_of(kn_randn_like(x)));
    kn_set_grad_mode(mode);
    kn_tensor *y = kn_call(m, x);
    kn_tensor *loss = y ? mean_of(kn_square(y)) : NULL;
    bool ok = loss && kn_backward(loss);
    t->loss[step][micro] = ok ? (float)kn_item(loss) : 0;
    return ok;
}

static void train(kn_comm *world, void *arg)
{
    trained *t = arg;
    OWNED_MODULE noisy m = { 0 };
    kn_seed(4);
    kn_set_step(0);
    KN_CHECK(kn_module_init(&m.base, noisy_forward) &&
             kn_linear_init(&m.fc, &m.base, "fc", WIDTH, WIDTH, .device = KN_META) &&
             kn_dropout_init(&m.drop, &m.base, "drop", 0.5));
    KN_CHECK(!t->recomputes || kn_recompute(&m, true));
    KN_CHECK(kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = 5));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&m, .lr = 0.1);
    for (int step = 0; step < STEPS; step++) {
        KN_CHECK(!t->evaluates || evaluate(&m, world, step, t->at_places));
        for (int k = kn_rank(world); k < MICRO; k += kn_comm_size(world))
            KN_CHECK(learn(&m, t, step, k));
        KN_CHECK(kn_step(opt));
    }
}

/* Every draw of a micro-batch, with grad mode on or off, is its own on whichever rank; and an
 * evaluation changes none with grad mode on, nor any other where it draws at a place of its own. */
KN_TEST(draws_ranks, of_a_micro_batch)
{
    static trained plain;
    KN_CHECK(spawn_threads(1, train, &plain) == 0);
    for (int step = 0; step < STEPS; step++)
        for (int k = 0; k < MICRO; k++)
            for (int i = 0; i < step * MICRO + k; i++)
                KN_CHECK(plain.noise[i / MICRO][i % MICRO] != plain.noise[step][k], "draws repeat");
    for (int kind = 0; kind < 6; kind++)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            static trained t;
            t = (trained){ kind % 3 > 0, kind % 3 == 2, kind >= 3 };
            KN_CHECK(spawn_threads(ranks, train, &t) == 0, "%d ranks", ranks);
            KN_CHECK(memcmp(t.loss, plain.loss, sizeof t.loss) == 0, "kind %d, %d ranks: losses",
                     kind, ranks);
            KN_CHECK(kind % 3 == 1 || memcmp(t.noise, plain.noise, sizeof t.noise) == 0,
                     "kind %d, %d ranks: draws with grad mode off", kind, ranks);
        }
}

/* ---- the same on all ranks, or not ----------------------------------------------------------- */

enum { RANKS = 4, DRAWS = 5 };

static float drawn[2][RANKS][DRAWS];

static void draw(kn_comm *world, void *arg)
{
    const int me = kn_rank(world);
    kn_set_step(9);
    kn_set_grad_mode(false);
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1));
    for (int i = 0; i < me; i++)
        kn_rand_like(x);
    for (int alike = 0; alike < 2; alike++) {
        kn_draws place = { 0 };
        if (alike)
            place = kn_draws_begin(arg ? me : 3);
        for (int i = 0; i < DRAWS; i++)
            drawn[alike][me][i] = (float)kn_item(draw_of(i, x));
        kn_draws_end(place);
    }
}

KN_TEST(draws_ranks, alike_at_places_of_one_number)
{
    for (int numbers = 0; numbers < 2; numbers++) {
        KN_CHECK(spawn_threads(RANKS, draw, numbers ? drawn : NULL) == 0);
        for (int r = 1; r < RANKS; r++) {
            const bool alike = memcmp(drawn[1][r], drawn[1][0], sizeof drawn[1][0]) == 0;
            KN_CHECK(alike == !numbers, "rank %d draws %s", r, alike ? "alike" : "apart");
            for (int i = 0; i < DRAWS; i++)
                KN_CHECK(drawn[0][r][i] != drawn[0][0][i], "rank %d draws rank 0's", r);
        }
    }
}

/* A program that never calls kn_set_step draws as one that begins with step 0. */
RANK_TEST(draws_ranks, the_first_step_draws_by_rank, .threads = "4")
{
    KN_CHECK(kn_comm_size(world) == 4);
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(8));
    kn_tensor *first = kn_rand_like(x);
    kn_set_step(0);
    kn_tensor *again = kn_rand_like(x);
    KN_CHECK(first && again && memcmp(kn_data(first), kn_data(again), 8 * sizeof(float)) == 0);
}
