/* tests/fsdp/matrix_slow.c: some hundred random settings against the plain reference. The seed is printed;
 * KN_MATRIX_SEED=... repeats a run, KN_MATRIX_COUNT=... makes it longer. */
#include "tests/fsdp/matrix.h"
#include <time.h>

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *s = getenv(name);
    return s && *s ? strtoull(s, NULL, 0) : otherwise;
}

static uint64_t draw(uint64_t *state, uint64_t below)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (*state >> 33) % below;
}

/* What the pairs hold fixed: rounds, masks of rounds without reduction, units in units, turns, factors. */
static void vary(matrix_spec *s, uint64_t *state)
{
    static const char *const nested[MATRIX_MODELS] = { "gpt_block,attention,mlp,linear",
                                                       "odd_block,odd_head,linear",
                                                       "turn_block,linear" };
    static const int64_t whole_below[] = { 0, 8, 20, 60, 200 };
    s->rounds = 1 + (int)draw(state, 4);
    s->steps = 2 + (int)draw(state, 3);
    unsigned but_last = (1u << (s->rounds - 1)) - 1;
    if (s->skip_sync)
        s->skip_sync = (unsigned)draw(state, 8) & but_last;
    if (s->skip_all_reduce) {
        s->skip_all_reduce = (unsigned)draw(state, 8) & but_last;
        s->skip_sync = (unsigned)draw(state, 8) & but_last;
    }
    s->evaluate = draw(state, 3) == 0;
    s->spare = draw(state, 2);
    s->only_turn = draw(state, 2) ? 0 : (int)draw(state, 6);
    if (draw(state, 3) == 0)
        s->o.wrap_class = nested[s->model];
    else
        s->whole = draw(state, 6) == 0;
    /* a unit that holds nothing but the spare ones would be reduced by some ranks only: an error */
    s->by_data = s->spare && !s->o.wrap_class && draw(state, 2);
    if (s->o.keep_whole_below)
        s->o.keep_whole_below = whole_below[draw(state, 5)];
    if (draw(state, 5) == 0)
        s->o.divide_factor = 1 + (double)draw(state, 9);
    else if (draw(state, 5) == 0)
        s->o.reduce_op = KN_REDUCE_SUM;
    if (draw(state, 4) == 0)
        s->o.predivide_factor = 2;
}

static uint64_t begin_part(int part, int parts, uint64_t *count)
{
    uint64_t seed = from_environment("KN_MATRIX_SEED", (uint64_t)time(NULL));
    *count = from_environment("KN_MATRIX_COUNT", 800) / (uint64_t)parts;
    printf("KN_MATRIX_SEED=%llu, part %d of %d: %llu settings\n", (unsigned long long)seed, part,
           parts, (unsigned long long)*count);
    return seed * (uint64_t)parts + (uint64_t)part;
}

static void run_some(int part, int parts)
{
    uint64_t count, state = begin_part(part, parts, &count);
    for (uint64_t i = 0; i < count; i++) {
        matrix_spec s = matrix_random(&state);
        vary(&s, &state);
        matrix_check(&s);
    }
}

/* bf16 computes, f32 reduces: equal to plain FULL_SHARD of as many ranks. Hybrid meshes add in another
 * grouping; one rank has nothing to compare. */
KN_TEST(matrix, random_bf16_settings)
{
    uint64_t count, state = begin_part(7, 8, &count);
    for (uint64_t i = 0; i < count; i++) {
        matrix_spec s = matrix_random(&state);
        if (s.o.strategy >= KN_HYBRID_SHARD)
            s.o.strategy = KN_NO_SHARD, s.o.mesh.shards = 0;
        s.skip_all_reduce = 0;
        vary(&s, &state);
        s.o.param_dtype = KN_BF16;
        s.o.reduce_dtype = KN_F32;
        s.o.wrap_class = NULL; /* which units there are decides where inputs are cast */
        s.whole = false;
        if (!matrix_valid(&s))
            continue;
        matrix_spec base = { .model = s.model,
                             .ranks = s.ranks,
                             .rounds = s.rounds,
                             .steps = s.steps,
                             .skip_sync = s.skip_sync,
                             .evaluate = s.evaluate,
                             .spare = s.spare,
                             .by_data = s.by_data,
                             .recompute = matrix_recompute_regroups(&s),
                             .only_turn = s.only_turn };
        base.o.param_dtype = s.o.param_dtype;
        base.o.reduce_dtype = s.o.reduce_dtype;
        base.o.divide_factor = s.o.divide_factor;
        base.o.reduce_op = s.o.reduce_op;
        matrix_check_equal(&base, &s);
    }
}

KN_TEST(matrix, random_settings_1)
{
    run_some(0, 4);
}
KN_TEST(matrix, random_settings_2)
{
    run_some(1, 4);
}
KN_TEST(matrix, random_settings_3)
{
    run_some(2, 4);
}
KN_TEST(matrix, random_settings_4)
{
    run_some(3, 4);
}
