/* tests/fsdp/same_bits_test.c: N ranks against one process without fsdp that accumulates the same
 * micro-batches: losses, gradient norms and final parameters are equal bit for bit for every N
 * (docs/architecture.md, idea 9). The matrix (matrix.h) trains both. */
#include "tests/fsdp/matrix.h"

enum { STEPS = 4, MICRO = 4 }; /* micro-batches of a step, dealt out to the ranks */

#define SAME_BITS(n, ...)                                                                          \
    MATRIX_CHECK(.natural = true, .ranks = (n), .rounds = MICRO / (n), .steps = STEPS, __VA_ARGS__)

KN_TEST(same_bits, over_ranks_and_strategies)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int strategy = KN_FULL_SHARD; strategy <= KN_NO_SHARD; strategy++)
            for (int prefetch = KN_PREFETCH_PRE; prefetch <= KN_PREFETCH_NONE; prefetch++)
                for (int model = 0; model < MATRIX_BUNDLED; model++)
                    SAME_BITS(ranks, .model = model, .only_turn = 1 + TURN_ALL,
                              .o = { .strategy = strategy, .backward_prefetch = prefetch });
}

KN_TEST(same_bits, recompute_and_keep)
{
    SAME_BITS(1, .recompute = true);
    SAME_BITS(2, .recompute = true);
    SAME_BITS(2, .o.reshard_after_forward = KN_RESHARD_NEVER);
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
