/* tests/fsdp/branches_test.c: ranks whose backwards reach different units. Random programs: branches with and
 * without parameters of the units around them, chains of which a part counts, frozen units, recompute inside
 * and around units, rounds without sync; each rank uses other parts by its data. Parameters must be those of
 * one process that adds in the same grouping, bit for bit. */
#include "tests/fsdp/net.h"

enum { DIM = 4, BATCH = 2, PAIR = 2, CHAIN = 3, STEPS = 2, ROUNDS = 2, PARTS = PAIR + 1 + CHAIN };

typedef struct leafy { /* a unit */
    kn_module base;
    kn_linear fc;
} leafy;

typedef struct pair { /* of units; none itself, or one with a parameter of its own */
    kn_module base;
    leafy b[PAIR];
    kn_linear own;
} pair;

typedef struct forest {
    kn_module base;
    kn_linear stem; /* the root's own */
    pair pair;
    leafy lone, chain[CHAIN];
    unsigned uses; /* bits: pair's two, lone; then how far the chain counts */
} forest;

typedef struct setting {
    int ranks;
    kn_strategy strategy;
    kn_backward_prefetch prefetch;
    bool pair_is_unit, workers;
    unsigned frozen;    /* bit i: part i trains nothing */
    unsigned recompute; /* bit 0: pair, 1: each of its units, 2: the chain's units, 3: the root */
    unsigned unsynced;  /* bit r: round r of a step */
    bool twice;         /* both rounds' forwards come before their backwards */
    uint64_t data;
} setting;

static kn_tensor *leafy_forward(kn_module *self, kn_tensor *x)
{
    return kn_relu(kn_call(&((leafy *)self)->fc, x));
}

static kn_tensor *pair_forward(kn_module *self, kn_tensor *x)
{
    pair *m = (pair *)self;
    forest *f = (forest *)self->impl->parent->self;
    kn_tensor *sum = kn_call(&m->own, x);
    for (int i = 0; i < PAIR; i++) {
        kn_tensor *y = kn_call(&m->b[i], x);
        sum = f->uses >> i & 1 ? kn_add(sum, y) : sum;
    }
    return sum;
}

static kn_tensor *forest_forward(kn_module *self, kn_tensor *x)
{
    forest *m = (forest *)self;
    x = kn_call(&m->stem, x);
    kn_tensor *p = kn_call(&m->pair, x), *lone = kn_call(&m->lone, x), *c = x, *sum = x;
    unsigned length = m->uses >> (PAIR + 2) & 3;
    for (unsigned i = 0; i < CHAIN; i++) {
        c = kn_call(&m->chain[i], c);
        sum = i + 1 == length ? kn_add(sum, c) : sum;
    }
    sum = m->uses >> PAIR & 1 ? kn_add(sum, lone) : sum;
    return m->uses >> (PAIR + 1) & 1 ? kn_add(sum, p) : sum;
}

static bool leafy_init(leafy *m, kn_module *parent, const char *name)
{
    return kn_module_init(&m->base, leafy_forward) && kn_module_add(parent, name, &m->base) &&
           kn_linear_init(&m->fc, &m->base, "fc", DIM, DIM, .device = KN_META);
}

static leafy *part(forest *m, int i)
{
    return i < PAIR ? &m->pair.b[i] : i == PAIR ? &m->lone : &m->chain[i - PAIR - 1];
}

static bool forest_init(forest *m, const setting *s)
{
    memset(m, 0, sizeof *m);
    bool ok = kn_module_init(&m->base, forest_forward) &&
              kn_linear_init(&m->stem, &m->base, "stem", DIM, DIM, .device = KN_META) &&
              kn_module_init(&m->pair.base, pair_forward) &&
              kn_module_add(&m->base, "pair", &m->pair.base) &&
              leafy_init(&m->pair.b[0], &m->pair.base, "0") &&
              leafy_init(&m->pair.b[1], &m->pair.base, "1") &&
              kn_linear_init(&m->pair.own, &m->pair.base, "own", DIM, DIM, .device = KN_META) &&
              leafy_init(&m->lone, &m->base, "lone") && leafy_init(&m->chain[0], &m->base, "c0") &&
              leafy_init(&m->chain[1], &m->base, "c1") && leafy_init(&m->chain[2], &m->base, "c2");
    for (int i = 0; i < PARTS && ok; i++) {
        kn_freeze(part(m, i), s->frozen >> i & 1);
        unsigned bit = i < PAIR ? 1 : i == PAIR ? 31 : 2;
        ok = kn_recompute(part(m, i), s->recompute >> bit & 1);
    }
    return ok && kn_recompute(&m->pair, s->recompute & 1) && kn_recompute(m, s->recompute >> 3 & 1);
}

/* ---- training ----------------------------------------------------------------------------------- */

static kn_tensor *loss(forest *m, const setting *s, int step, int round, int rank)
{
    uint64_t seed = kn_hash64(s->data, (uint64_t)((step * ROUNDS + round) * 16 + rank));
    float v[BATCH * DIM];
    for (int i = 0; i < BATCH * DIM; i++)
        v[i] = (float)((seed >> 4 * (i % 8) & 15) + (uint64_t)i) / 8 - 1;
    m->uses = (unsigned)(kn_hash64(seed, 1) % 64);
    kn_tensor *x = kn_from(KN_F32, KN_CPU, v, KN_SHAPE(BATCH, DIM));
    kn_tensor *zero = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(BATCH, DIM));
    return kn_mse_loss(kn_call(m, x), zero);
}

/* The rounds of a step on one rank. */
static bool rounds(forest *m, const setting *s, int step, int rank, bool sharded)
{
    kn_scope scope = kn_scope_begin();
    bool ok = true;
    unsigned uses[ROUNDS];
    kn_tensor *l[ROUNDS];
    for (int r = 0; r < ROUNDS && ok && s->twice; r++) {
        ok = (l[r] = loss(m, s, step, r, rank)) != NULL;
        uses[r] = m->uses;
    }
    for (int i = 0; i < ROUNDS && ok; i++) {
        int r = s->twice ? ROUNDS - 1 - i : i;
        if (sharded)
            ok = kn_fsdp_set_gradient_sync(m, !(s->unsynced >> i & 1), true);
        if (s->twice)
            m->uses = uses[r]; /* for replays */
        ok = ok && kn_backward(s->twice ? l[r] : loss(m, s, step, r, rank));
    }
    kn_scope_end(scope);
    return ok;
}

static bool copy_params(forest *to, forest *from)
{
    const kn_param *a, *b;
    bool mode = kn_set_grad_mode(false), ok = true;
    int n = kn_params(to, &a);
    kn_params(from, &b);
    for (int i = 0; i < n && ok; i++)
        ok = kn_copy_(a[i].tensor, b[i].tensor);
    kn_set_grad_mode(mode);
    return ok;
}

static float *grad_of(const kn_param *p)
{
    kn_tensor *g = kn_grad(p->tensor);
    return g ? kn_array_of(g).data : NULL;
}

/* Gradients of `total` become the sum over ranks of what one rank's rounds bring: rounds that aren't synced add
 * on the rank first. */
static bool group_sums(forest *total, const setting *s, int step)
{
    static float sum[64][64], one[64][64];
    static bool any[64];
    memset(sum, 0, sizeof sum);
    memset(any, 0, sizeof any);
    const kn_param *p, *q;
    int n = kn_params(total, &p);
    for (int rank = 0; rank < s->ranks; rank++) {
        forest local;
        if (!forest_init(&local, s) || !kn_materialize(&local, KN_CPU, 1) ||
            !copy_params(&local, total) || !rounds(&local, s, step, rank, false))
            return false;
        kn_params(&local, &q);
        for (int i = 0; i < n; i++) {
            float *g = grad_of(&q[i]);
            any[i] |= g != NULL;
            memset(one[i], 0, sizeof one[i]);
            if (g)
                memcpy(one[i], g, (size_t)p[i].numel * sizeof *g);
            for (int k = 0; k < p[i].numel; k++)
                sum[i][k] += one[i][k];
        }
        kn_module_free(&local);
    }
    for (int i = 0; i < n; i++) {
        float *g = grad_of(&p[i]);
        if ((g != NULL) != any[i])
            return kn_fail("'%s': a gradient came only in one way", p[i].name);
        if (g)
            memcpy(g, sum[i], (size_t)p[i].numel * sizeof *g);
    }
    return true;
}

/* One process: micro-batches in the order of rounds and ranks. */
static bool plain_step(forest *m, const setting *s, int step)
{
    for (int i = 0; i < ROUNDS; i++)
        for (int rank = 0; rank < s->ranks; rank++) {
            int r = s->twice ? ROUNDS - 1 - i : i;
            kn_scope scope = kn_scope_begin();
            bool ok = kn_backward(loss(m, s, step, r, rank));
            kn_scope_end(scope);
            if (!ok)
                return false;
        }
    return !s->unsynced || group_sums(m, s, step);
}

static int train(kn_comm *world, void *arg)
{
    const setting *s = arg;
    forest m, plain;
    kn_set_threads(1);
    if (s->workers)
        kn_set_free_cores(2);
    EXPECT(forest_init(&plain, s) && kn_materialize(&plain, KN_CPU, NET_SEED));
    EXPECT(forest_init(&m, s) &&
           kn_fsdp_wrap(&m, world, .strategy = s->strategy, .seed = NET_SEED,
                        .backward_prefetch = s->prefetch,
                        .wrap_class = s->pair_is_unit ? "leafy,pair" : "leafy"));
    kn_optim *a = kn_adamw(&plain, .lr = 0.1), *b = kn_adamw(&m, .lr = 0.1);
    EXPECT(a && b);
    const kn_param *p;
    int n = kn_params(&plain, &p);
    for (int step = 0; step < STEPS; step++) {
        EXPECT(rounds(&m, s, step, kn_rank(world), true) && kn_step(b));
        EXPECT(plain_step(&plain, s, step) && kn_step(a));
        for (int i = 0; i < n; i++)
            EXPECT(reads_as(&m, i, p[i].tensor), "step %d: '%s' differs from one process", step,
                   p[i].name);
    }
    kn_optim_free(a);
    kn_optim_free(b);
    kn_module_free(&m);
    kn_module_free(&plain);
    return 0;
}

static setting random_setting(uint64_t seed)
{
    uint64_t h = kn_hash64(seed, 0xb7a4c4e5);
    setting s = { .ranks = 1 + (int)(h % 4),
                  .strategy = (kn_strategy)(KN_FULL_SHARD + (int)(h >> 4 & 255) % 3),
                  .prefetch = (kn_backward_prefetch)((h >> 8) % 3),
                  .pair_is_unit = h >> 12 & 1,
                  .workers = h >> 13 & 1,
                  .frozen = (h >> 14 & 1) ? (unsigned)(h >> 16 & 63) : 0,
                  .recompute = (h >> 24 & 1) ? (unsigned)(h >> 28 & 15) : 0,
                  .unsynced = (h >> 32 & 1),
                  .twice = (h >> 36) % 3 == 0,
                  .data = h };
    return s;
}

static void check(const setting *s)
{
    setting copy = *s;
    int failed =
        THREADS_ONLY ? kn_spawn_threads(s->ranks, train, &copy) : kn_spawn(s->ranks, train, &copy);
    KN_CHECK(
        failed == 0,
        "%d ranks, strategy %d, prefetch %d, pair is unit %d, workers %d, frozen %x, recompute "
        "%x, unsynced %x, twice %d, data %llx",
        s->ranks, s->strategy, s->prefetch, s->pair_is_unit, s->workers, s->frozen, s->recompute,
        s->unsynced, s->twice, (unsigned long long)s->data);
}

KN_TEST(branches, the_root_reduces_after_a_unit_that_only_some_ranks_reach)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
            for (uint64_t d = 0; d < 3; d++)
                check(
                    &(setting){ .ranks = ranks, .prefetch = p, .pair_is_unit = d & 1, .data = d });
}

KN_TEST(branches, recompute_around_several_units)
{
    for (unsigned r = 1; r < 16; r++)
        check(&(setting){ .ranks = 2, .recompute = r, .pair_is_unit = r & 1, .data = r });
}

KN_TEST(branches, frozen_units_that_only_some_ranks_pass)
{
    for (unsigned f = 1; f < 64; f += 3)
        check(&(setting){ .ranks = 2, .frozen = f, .prefetch = f % 3, .data = f });
}

KN_TEST(branches, forwards_that_wait_for_their_backwards)
{
    for (uint64_t d = 0; d < 6; d++)
        check(&(setting){ .ranks = 2, .twice = true, .recompute = (unsigned)d, .data = d });
}

KN_TEST(branches, what_was_held_back_on_some_ranks_is_reduced_on_all)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        for (uint64_t d = 0; d < 4; d++)
            check(&(setting){ .ranks = ranks, .unsynced = 1, .data = d });
}

KN_TEST(branches, random_programs)
{
    const char *more = getenv("KNAP_BRANCHES"), *first = getenv("KNAP_BRANCHES_FROM");
    uint64_t from = first ? (uint64_t)atoll(first) : 0, n = more ? (uint64_t)atoll(more) : 60;
    for (uint64_t i = from; i < from + n; i++) {
        setting s = random_setting(i);
        check(&s);
    }
}
