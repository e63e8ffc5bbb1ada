/* tests/fsdp/feature_test.c: one test named after each capability that must not change a bit:
 * strategies, layouts, prefetch, accumulation, factors. Against the plain reference (matrix.h). */
#include "tests/fsdp/matrix.h"

/* ---- strategies and layouts ------------------------------------------------------------------ */

KN_TEST(feature, strategies)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
            MATRIX_CHECK(.model = m, .ranks = 3, .o.strategy = s);
}

KN_TEST(feature, hybrid_shard)
{
    static const kn_mesh mesh[] = { { 2, 2 }, { 0, 2 }, { 2, 0 }, { 1, 4 }, { 4, 1 } };
    for (int i = 0; i < 5; i++)
        MATRIX_CHECK(.model = i % MATRIX_MODELS, .ranks = 4,
                     .o = { .strategy = KN_HYBRID_SHARD, .mesh = mesh[i] });
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 4, .rounds = 3,
                 .o = { .strategy = KN_HYBRID_SHARD_GRAD_OP, .mesh = { .shards = 2 } });
    MATRIX_CHECK(.ranks = 8, .steps = 2,
                 .o = { .strategy = KN_HYBRID_SHARD, .mesh = { .shards = 4 } });
}

KN_TEST(feature, hybrid_all_reduce_on_the_last_micro_batch)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .ranks = 4, .rounds = 3, .skip_all_reduce = 3,
                     .o = { .strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 } });
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 4, .rounds = 4, .skip_all_reduce = 5,
                 .skip_sync = 2, /* local, partial and total sums in one step */
                 .o = { .strategy = KN_HYBRID_SHARD_GRAD_OP, .mesh = { .replicas = 2 } });
}

KN_TEST(feature, per_param_layout)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int ranks = 2; ranks <= 4; ranks++)
            MATRIX_CHECK(.model = m, .ranks = ranks, .steps = 2, .o.layout = KN_LAYOUT_PER_PARAM);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 8, .steps = 2, .o.layout = KN_LAYOUT_PER_PARAM);
}

/* Matrices along their last dim where it divides. */
static int last_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    (void)name;
    return ndim > 1 && shape[ndim - 1] % *(int *)arg == 0 ? ndim - 1 : 0;
}

KN_TEST(feature, per_param_layout_of_another_dim)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        MATRIX_CHECK(.ranks = ranks, .o = { .layout = KN_LAYOUT_PER_PARAM,
                                            .placement = last_dim,
                                            .placement_arg = &ranks });
        MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks,
                     .o = { .layout = KN_LAYOUT_PER_PARAM,
                            .placement = last_dim,
                            .placement_arg = &ranks });
    }
}

KN_TEST(feature, ragged_layout)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int ranks = 2; ranks <= 4; ranks++)
            MATRIX_CHECK(.model = m, .ranks = ranks, .steps = 2, .o.layout = KN_LAYOUT_RAGGED);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 8, .steps = 2, .o.layout = KN_LAYOUT_RAGGED);
}

KN_TEST(feature, small_parameters_kept_whole)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .ranks = 3, .o.keep_whole_below = 20);
    MATRIX_CHECK(.model = MATRIX_ODD, .o.keep_whole_below = 1000000);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 4, .skip_sync = 1,
                 .o = { .strategy = KN_HYBRID_SHARD,
                        .mesh = { .shards = 2 },
                        .keep_whole_below = 20 });
}

KN_TEST(feature, reshard_to_group_size)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .ranks = 4, .o.reshard_after_forward = 2);
    MATRIX_CHECK(.ranks = 8, .steps = 2, .o.reshard_after_forward = 4);
    MATRIX_CHECK(.model = MATRIX_TURN, .ranks = 4,
                 .o = { .layout = KN_LAYOUT_PER_PARAM, .reshard_after_forward = 2 });
    MATRIX_CHECK(.ranks = 8, .steps = 2,
                 .o = { .strategy = KN_HYBRID_SHARD,
                        .mesh = { .shards = 4 },
                        .reshard_after_forward = 2 });
}

KN_TEST(feature, reshard_after_forward)
{
    for (int how = KN_RESHARD_NEVER; how <= KN_RESHARD_ALWAYS; how++)
        for (int m = 0; m < MATRIX_MODELS; m++)
            MATRIX_CHECK(.model = m, .o.reshard_after_forward = how);
    MATRIX_CHECK(.o = { .strategy = KN_SHARD_GRAD_OP, .reshard_after_forward = KN_RESHARD_ALWAYS });
}

static bool set_reshard(matrix_net *n, int step, int round)
{
    static const int value[] = { KN_RESHARD_NEVER, 2, KN_RESHARD_ALWAYS, 2, KN_RESHARD_NEVER };
    return kn_fsdp_set_reshard_after_forward(n->root, value[(step * 2 + round) % 5], true);
}

KN_TEST(feature, reshard_changes_between_forward_and_backward)
{
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (int m = 0; m < MATRIX_MODELS; m++)
            MATRIX_CHECK(.model = m, .ranks = ranks, .between = set_reshard,
                         .o.reshard_after_forward = 2);
}

/* ---- gathering ahead ------------------------------------------------------------------------- */

KN_TEST(feature, forward_prefetch)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int workers = 0; workers < 2; workers++)
            MATRIX_CHECK(.model = m, .workers = workers, .o.forward_prefetch = true);
}

KN_TEST(feature, limiter)
{
    for (int most = 1; most <= 4; most *= 2)
        for (int m = 0; m < MATRIX_MODELS; m++)
            MATRIX_CHECK(.model = m, .workers = m == MATRIX_TURN,
                         .o = { .max_gathers = most, .forward_prefetch = true });
}

static bool lists(matrix_net *n, const matrix_spec *s)
{
    int blocks = s->model == MATRIX_TURN ? 4 : 2;
    kn_module *b[4];
    for (int i = 0; i < blocks; i++)
        b[i] = matrix_block(n, i);
    bool ok = kn_fsdp_prefetch_forward(n->root, b, blocks) &&
              kn_fsdp_prefetch_forward(b[0], b + 1, blocks - 1) &&
              kn_fsdp_prefetch_backward(n->root, b + blocks - 1, 1);
    for (int i = 1; i < blocks && ok; i++) /* the last one's list is wrong on purpose */
        ok = kn_fsdp_prefetch_backward(b[i], i == blocks - 1 ? b : b + i - 1, 1);
    return ok;
}

KN_TEST(feature, explicit_prefetch_lists)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .prepare = lists, .o.max_gathers = 3);
    MATRIX_CHECK(.model = MATRIX_TURN, .prepare = lists, .workers = true);
}

static bool unshard_one(matrix_net *n, int step, int round)
{
    kn_unshard_handle h = kn_fsdp_unshard(matrix_block(n, (step + round) % 2));
    if (round == 1) /* the test waits; else the unit's forward waits */
        return kn_unshard_wait(h);
    return step != 1 || (kn_unshard_wait(h) && kn_fsdp_reshard(matrix_block(n, 1)));
}

KN_TEST(feature, manual_unshard)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int workers = 0; workers < 2; workers++)
            MATRIX_CHECK(.model = m, .before = unshard_one, .workers = workers);
}

/* Gradients of an embedding need only its indices, so backward gathers nothing for it. */
static bool leave_embedding(matrix_net *n, const matrix_spec *s)
{
    (void)s;
    return kn_fsdp_set_unshard_in_backward(&n->turn.embed, false, false);
}

KN_TEST(feature, units_that_backward_does_not_gather)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
            MATRIX_CHECK(.model = MATRIX_TURN, .ranks = ranks, .prepare = leave_embedding,
                         .workers = ranks == 2,
                         .o = { .wrap_class = "turn_block,embedding",
                                .backward_prefetch = p,
                                .layout = KN_LAYOUT_FLAT + ranks % 3 });
}

/* ---- accumulation ---------------------------------------------------------------------------- */

KN_TEST(feature, no_sync)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
            MATRIX_CHECK(.model = m, .o.strategy = s, .skip_sync = 3, .rounds = 3);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 4, .skip_sync = 5, .rounds = 4);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 3, .skip_sync = 1, .o.layout = KN_LAYOUT_PER_PARAM);
    MATRIX_CHECK(.model = MATRIX_ODD, .skip_sync = 3, .rounds = 3, .offload = true);
}

/* One unit adds up on its rank while the others reduce: two groupings in one step. */
KN_TEST(feature, no_sync_of_one_unit)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        for (int ranks = 1; ranks <= 4; ranks++)
            MATRIX_CHECK(.model = m, .ranks = ranks, .rounds = 3, .steps = 2,
                         .skip_sync = 1 + ranks % 3, .skip_unit = 1 + ranks % 2);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 4, .skip_sync = 1, .skip_unit = 2,
                 .o = { .strategy = KN_HYBRID_SHARD, .mesh = { .shards = 2 } });
    MATRIX_CHECK(.ranks = 2, .skip_sync = 1, .skip_unit = 1, .o.strategy = KN_SHARD_GRAD_OP);
}

KN_TEST(feature, keep_gathered_across_micro_batches)
{
    for (int m = 0; m < MATRIX_MODELS; m++) {
        MATRIX_CHECK(.model = m, .keep_gathered = true, .rounds = 3);
        MATRIX_CHECK(.model = m, .keep_gathered = true, .skip_sync = 1, .evaluate = true,
                     .o.strategy = KN_SHARD_GRAD_OP);
    }
}

static bool keep_but_last(matrix_net *n, int step, int round)
{
    (void)step;
    return kn_fsdp_set_reshard_after_backward(n->root, round == 2, true);
}

KN_TEST(feature, keep_gathered_until_the_last_micro_batch)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .before = keep_but_last, .rounds = 3);
}

KN_TEST(feature, evaluation_between_steps)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .evaluate = true, .o.forward_prefetch = true);
}

/* ---- factors --------------------------------------------------------------------------------- */

KN_TEST(feature, divide_factors)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .ranks = 4, .o.divide_factor = 8);
    MATRIX_CHECK(.ranks = 3, .o.divide_factor = 5);
    MATRIX_CHECK(.ranks = 4, .o.predivide_factor = 2); /* exact: a power of two */
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 2, .skip_sync = 1,
                 .o = { .divide_factor = 4, .predivide_factor = 4 });
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 1, .o.predivide_factor = 2);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 2, .o.predivide_factor = 0.5); /* it multiplies */
}

KN_TEST(feature, sum_reduction)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .ranks = 3, .o.reduce_op = KN_REDUCE_SUM);
}

/* ---- where ranks and bytes are --------------------------------------------------------------- */

KN_TEST(feature, offload_to_a_store)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .ranks = 2, .offload = true);
    MATRIX_CHECK(.ranks = 1, .offload = true);
}

/* Every micro-batch reduces into the shard on the store: each must add to the sum there. */
KN_TEST(feature, offload_accumulates_outside_no_sync)
{
    for (int s = KN_FULL_SHARD; s <= KN_NO_SHARD; s++)
        MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 2, .rounds = 4, .offload = true,
                     .o.strategy = s);
    MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 2, .rounds = 4, .offload = true, .skip_sync = 1);
}

KN_TEST(feature, thread_ranks)
{
    for (int m = 0; m < MATRIX_MODELS; m++)
        MATRIX_CHECK(.model = m, .threads = true, .o.forward_prefetch = true);
    MATRIX_CHECK(.ranks = 3, .threads = true, .workers = true, .offload = true,
                 .o = { .layout = KN_LAYOUT_PER_PARAM, .forward_prefetch = true });
}

/* bf16 with f32 reduction: no plain process rounds like it, but all strategies of N ranks agree. */
KN_TEST(feature, bf16_is_equal_among_strategies)
{
    for (int m = 0; m < MATRIX_BUNDLED; m++) {
        matrix_spec a = { .model = m, .ranks = 2 };
        a.o.param_dtype = KN_BF16;
        a.o.reduce_dtype = KN_F32;
        for (int s = KN_SHARD_GRAD_OP; s <= KN_NO_SHARD; s++) {
            matrix_spec b = a;
            b.o.strategy = s;
            b.o.layout = KN_LAYOUT_PER_PARAM + s % 2;
            b.o.forward_prefetch = true;
            b.offload = s == KN_NO_SHARD;
            matrix_check_equal(&a, &b);
        }
    }
}
