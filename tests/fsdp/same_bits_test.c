/* tests/fsdp/same_bits_test.c: N ranks against one process without fsdp that accumulates the same
 * micro-batches: losses, gradient norms and final parameters are equal bit for bit for every N
 * (docs/architecture.md, idea 9). The matrix (matrix.h) trains both. */
#include "tests/fsdp/matrix.h"

enum { STEPS = 4, MICRO = 4 }; /* micro-batches of a step, dealt out to the ranks */

#define SAME_BITS(n, ...)                                                                          \
    MATRIX_CHECK(.ranks = (n), .rounds = MICRO / (n), .steps = STEPS, __VA_ARGS__)

KN_TEST(same_bits, over_ranks_and_strategies)
{
    for (int i = 0; i < 3 * 3 * 3 * MATRIX_BUNDLED; i += kn_one_in(7))
        SAME_BITS(1 << i % 3, .model = i / 27,
                  .o = { .strategy = KN_FULL_SHARD + i / 3 % 3,
                         .backward_prefetch = KN_PREFETCH_PRE + i / 9 % 3 });
}

KN_TEST(same_bits, recompute_and_keep)
{
    SAME_BITS(1, .recompute = true);
    SAME_BITS(2, .recompute = true);
    SAME_BITS(2, .o.reshard_after_forward = KN_RESHARD_NEVER);
}

/* Each optimizer over 1, 2 and 4 ranks in every layout, with and without offload. */
KN_TEST(same_bits, every_optimizer)
{
    for (int kind = 0; kind < OPTIMIZER_KINDS; kind++)
        for (int i = kind % kn_one_in(7); i < 18; i += kn_one_in(7))
            MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 1 << i % 3, .steps = 2, .rounds = 1,
                         .threads = true, .optimizer = kind, .offload = i / 9,
                         .o.layout = (kn_layout_kind)(KN_LAYOUT_FLAT + i / 3 % 3));
}

KN_TEST(same_bits, side_streams)
{
    SAME_BITS(2, .workers = true);
    SAME_BITS(2, .workers = true, .o.backward_prefetch = KN_PREFETCH_POST);
}

/* The same with ranks as threads of one process: for ThreadSanitizer. */
KN_TEST(same_bits, thread_ranks)
{
    for (int side = 0; side < 2; side++)
        SAME_BITS(2, .threads = true, .workers = side);
}
