/* tests/fsdp/offload_units_test.c: offload of one unit of a tree alone: to files beside masters in
 * memory, which trains as a plain process does; from a device beside masters on it, which no
 * optimizer takes. Rank functions return a status and never assert. */
#include "tests/fsdp/stand_in.h"
#include "tests/fsdp/two.h"

RANK_TEST(offload_units, one_in_files, .threads = "124")
{
    const int ranks = kn_comm_size(world);
    TWO_WHOLE(plain);
    TWO(m);
    KN_CHECK(kn_fsdp_wrap(&m.a, world, .offload_dir = "/tmp", .seed = NET_SEED) &&
             kn_fsdp_wrap(&m, world, .seed = NET_SEED));
    KN_CHECK(kn_memory_is_store(kn_unit_of(m.a.base.impl)->bucket[0]->memory) &&
                 !kn_memory_is_store(kn_unit_of(m.base.impl)->bucket[0]->memory),
             "where the masters are");
    OWNED_OPTIM kn_optim *a = kn_adamw(&plain, .lr = 0.1), *b = kn_adamw(&m, .lr = 0.1);
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < ranks; i++)
            KN_CHECK(two_backward(&plain, step * ranks + i));
        KN_CHECK(two_backward(&m, step * ranks + kn_rank(world)) && kn_step(a) && kn_step(b));
        KN_CHECK(all_read_as(&m, &plain), "step %d", step);
    }
}

static void from_the_device(kn_comm *world, void *arg)
{
    TWO(m);
    KN_CHECK(kn_fsdp_wrap(&m.a, world, .device = STAND_IN, .offload_dir = "memory") &&
             kn_fsdp_wrap(&m, world, .device = STAND_IN));
    REFUSED(kn_sgd(&m, .lr = 0.1), "'a.weight' lies on cpu and 'b.weight' on stand-in",
            "offload all");
    OWNED_OPTIM kn_optim *a = kn_sgd(&m.a, .lr = 0.1);
    KN_CHECK(a != NULL);
}

KN_TEST(offload_units, one_beside_others_on_the_device_is_refused)
{
    if (THREADS_ONLY)
        KN_SKIP("the stand-in is a process's");
    for (int ranks = 1; ranks <= 2; ranks++)
        KN_CHECK(on_stand_in((stand_in){ .inline_streams = true }, ranks, from_the_device, NULL) ==
                     0,
                 "%d ranks", ranks);
}
