/* tests/fsdp/matrix_test.c: settings in which every pair of option values occurs, each against the
 * plain reference, bit for bit; and the reference against the engine's own sums. */
#include "tests/fsdp/matrix.h"

enum { MAX = 128 };

KN_TEST(matrix, pairs)
{
    static matrix_spec list[MAX];
    int pairs, impossible, n = matrix_all_pairs(list, MAX, &pairs, &impossible);
    for (int i = 0; i < n && i < MAX; i += kn_one_in(3))
        matrix_check(&list[i]);
}

KN_TEST(matrix, reference_is_plain_accumulation)
{
    for (int m = 0; m < MATRIX_BUNDLED; m++)
        matrix_check_reference(m);
}

KN_TEST(matrix, pairs_are_covered)
{
    static matrix_spec list[MAX];
    int pairs, impossible, n = matrix_all_pairs(list, MAX, &pairs, &impossible);
    KN_CHECK(n > 20 && n <= MAX, "%d settings", n);
    KN_CHECK(pairs > 800 && impossible < pairs / 12, "%d of %d pairs don't fit", impossible, pairs);
    for (int i = 0; i < n; i++)
        KN_CHECK(matrix_valid(&list[i]), "setting %d is invalid", i);
    for (int ranks = 1; ranks <= MATRIX_RANKS; ranks++) { /* required by the names */
        int seen = 0;
        for (int i = 0; i < n; i++)
            seen += list[i].ranks == ranks;
        KN_CHECK((seen > 0) == (ranks <= 4 || ranks == 8), "%d settings of %d ranks", seen, ranks);
    }
}

/* Each optimizer over 1, 2 and 4 ranks in every layout, with and without offload. */
KN_TEST(matrix, every_optimizer)
{
    for (int kind = 0; kind < OPTIMIZER_KINDS; kind++)
        for (int i = kind % kn_one_in(7); i < 18; i += kn_one_in(7))
            MATRIX_CHECK(.model = MATRIX_ODD, .ranks = 1 << i % 3, .steps = 2, .rounds = 1,
                         .threads = true, .optimizer = kind, .offload = i / 9,
                         .o.layout = (kn_layout_kind)(KN_LAYOUT_FLAT + i / 3 % 3));
}

/* Ranks and their streams as threads of one process, for ThreadSanitizer. */
KN_TEST(matrix, pairs_as_threads)
{
    static matrix_spec list[MAX];
    int pairs, impossible, n = matrix_all_pairs(list, MAX, &pairs, &impossible);
    for (int i = 0; i < n; i += 3 * kn_one_in(2)) {
        list[i].threads = true;
        list[i].workers = i % 2;
        list[i].steps = 2;
        matrix_check(&list[i]);
    }
}
