/* tests/fsdp/matrix_pairs.c: settings from option values. A setting is a list of choices, one an
 * option; the full product has millions. Most faults depend on one value or on a pair, so a greedy
 * list in which every pair of values occurs finds them with some dozens of settings. */
#include "tests/fsdp/matrix.h"

enum {
    MODEL,
    RANKS,
    STRATEGY,
    MESH,
    LAYOUT,
    BACKWARD,
    FORWARD,
    GATHERS,
    RESHARD,
    OFFLOAD,
    ACCUMULATE,
    RECOMPUTE,
    WHOLE_BELOW,
    THREADS,
    OPTIMIZER,
    OPTIONS
};
enum { EVERY, NO_SYNC, KEEP_GATHERED, NO_ALL_REDUCE }; /* ACCUMULATE */
enum { VALUES = OPTIMIZER_KINDS };

static const int values[OPTIONS] = {
    [MODEL] = MATRIX_BUNDLED,
    [RANKS] = 5,
    [STRATEGY] = KN_STRATEGY_COUNT - KN_FULL_SHARD,
    [MESH] = 2,
    [LAYOUT] = KN_LAYOUT_COUNT - KN_LAYOUT_FLAT,
    [BACKWARD] = 3,
    [FORWARD] = 2,
    [GATHERS] = 3,
    [RESHARD] = 4,
    [OFFLOAD] = 2,
    [ACCUMULATE] = 4,
    [RECOMPUTE] = 2,
    [WHOLE_BELOW] = 2,
    [THREADS] = 3,
    [OPTIMIZER] = OPTIMIZER_KINDS,
};

typedef struct choice {
    int v[OPTIONS];
} choice;

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* ---- from choices to settings ---------------------------------------------------------------- */

/* Shards of a hybrid mesh: the smallest or the largest proper divisor, if there is one. */
static int mesh_shards(int ranks, int which)
{
    int smallest = 0, largest = 0;
    for (int d = 2; d < ranks; d++)
        if (ranks % d == 0) {
            smallest = smallest ? smallest : d;
            largest = d;
        }
    if (!smallest) /* a prime: one replica, or one shard */
        return which ? 1 : ranks;
    return which ? largest : smallest;
}

static matrix_spec to_spec(const choice *c)
{
    static const int ranks[] = { 1, 2, 3, 4, 8 }, gathers[] = { 1, 2, 4 };
    static const int reshard[] = { KN_RESHARD_DEFAULT, KN_RESHARD_NEVER, KN_RESHARD_ALWAYS, 2 };
    matrix_spec s;
    memset(&s, 0, sizeof s);
    s.model = (matrix_model)c->v[MODEL];
    s.ranks = ranks[c->v[RANKS]];
    s.rounds = 2;
    s.steps = 3;
    s.o.strategy = (kn_strategy)(KN_FULL_SHARD + c->v[STRATEGY]);
    if (s.o.strategy >= KN_HYBRID_SHARD)
        s.o.mesh.shards = mesh_shards(s.ranks, c->v[MESH]);
    s.o.layout = (kn_layout_kind)(KN_LAYOUT_FLAT + c->v[LAYOUT]);
    s.o.backward_prefetch = (kn_backward_prefetch)(KN_PREFETCH_PRE + c->v[BACKWARD]);
    s.o.forward_prefetch = c->v[FORWARD];
    s.o.max_gathers = gathers[c->v[GATHERS]];
    s.o.reshard_after_forward = reshard[c->v[RESHARD]];
    s.offload = c->v[OFFLOAD];
    s.skip_sync = c->v[ACCUMULATE] == NO_SYNC ? 1 : 0;
    s.keep_gathered = c->v[ACCUMULATE] == KEEP_GATHERED;
    s.skip_all_reduce = c->v[ACCUMULATE] == NO_ALL_REDUCE ? 1 : 0;
    s.recompute = c->v[RECOMPUTE];
    s.o.keep_whole_below = c->v[WHOLE_BELOW] ? 20 : 0;
    s.threads = c->v[THREADS] == 1;
    s.workers = c->v[THREADS] == 2;
    s.optimizer = c->v[OPTIMIZER];
    return s;
}

bool matrix_valid(const matrix_spec *s)
{
    const kn_fsdp_wrap_options *o = &s->o;
    bool hybrid = o->strategy >= KN_HYBRID_SHARD;
    int shards = hybrid ? o->mesh.shards : o->strategy == KN_NO_SHARD ? 1 : s->ranks;
    if (o->reshard_after_forward > 1 &&
        (shards % o->reshard_after_forward || shards == o->reshard_after_forward))
        return false;
    return !s->skip_all_reduce || (hybrid && shards < s->ranks);
}

static bool valid(const choice *c)
{
    matrix_spec s = to_spec(c);
    bool hybrid = s.o.strategy >= KN_HYBRID_SHARD;
    return matrix_valid(&s) && (hybrid || c->v[MESH] == 0); /* one name for one setting */
}

/* A valid choice; two of its values may be fixed beforehand (negative: not). */
static bool draw_choice(choice *c, uint64_t *state, int a, int va, int b, int vb)
{
    for (int tries = 0; tries < 400; tries++) {
        for (int i = 0; i < OPTIONS; i++)
            c->v[i] = (int)(draw(state) % (uint64_t)values[i]);
        if (a >= 0)
            c->v[a] = va;
        if (b >= 0)
            c->v[b] = vb;
        if (valid(c))
            return true;
    }
    return false;
}

/* ---- every pair of values -------------------------------------------------------------------- */

typedef unsigned char seen_table[OPTIONS][VALUES][OPTIONS][VALUES];

static int fresh_pairs(seen_table seen, const choice *c, bool mark)
{
    int n = 0;
    for (int a = 0; a < OPTIONS; a++)
        for (int b = a + 1; b < OPTIONS; b++) {
            unsigned char *p = &seen[a][c->v[a]][b][c->v[b]];
            n += !*p;
            *p |= mark;
        }
    return n;
}

/* Many ranks cost the most: among equals the smaller setting wins. */
static int worth(seen_table seen, const choice *c)
{
    return 8 * fresh_pairs(seen, c, false) - c->v[RANKS];
}

int matrix_all_pairs(matrix_spec *list, int max, int *pairs, int *impossible)
{
    static seen_table seen;
    uint64_t state = 20240229;
    int n = 0;
    memset(seen, 0, sizeof seen);
    *pairs = *impossible = 0;
    for (int a = 0; a < OPTIONS; a++)
        for (int va = 0; va < values[a]; va++)
            for (int b = a + 1; b < OPTIONS; b++)
                for (int vb = 0; vb < values[b]; vb++) {
                    choice best, c;
                    ++*pairs;
                    if (seen[a][va][b][vb])
                        continue;
                    if (!draw_choice(&best, &state, a, va, b, vb)) {
                        ++*impossible;
                        continue;
                    }
                    for (int k = 0; k < 50; k++)
                        if (draw_choice(&c, &state, a, va, b, vb) &&
                            worth(seen, &c) > worth(seen, &best))
                            best = c;
                    fresh_pairs(seen, &best, true);
                    if (n < max)
                        list[n] = to_spec(&best);
                    n++;
                }
    return n;
}
