/* tests/data/placement_test.c: where batches and threads go: batches on a device with memory of its
 * own, threads on cores that the rank has left over. */
#include "autograd/operations.h"
#include "kernels/stream.h"
#include "tests/data/owned.h"
#include "tests/data/samples.h"
#include "tests/fsdp/guarded.h"

KN_TEST(placement, batches_on_a_device)
{
    double here[4 * WIDTH], there[4 * WIDTH];
    guarded_begin();
    kn_loader *cpu = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                   .batch = 4, .shuffle = true);
    for (int workers = 0; workers < 3; workers += 2) {
        OWNED_LOADER kn_loader *l =
            kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13, NUMBERS, .batch = 4,
                          .shuffle = true, .workers = workers, .device = GUARDED);
        kn_loader_seek(cpu, 0);
        for (int k = 0; k < 5; k++) {
            kn_scope s = kn_scope_begin();
            kn_batch b = kn_next(l), c = kn_next(cpu);
            KN_CHECK(b.x && c.x);
            KN_CHECK(kn_device_of(b.x) == GUARDED && kn_device_of(b.y) == GUARDED);
            KN_CHECK(kn_to_host(b.x, there, sizeof there) && kn_to_host(c.x, here, sizeof here));
            KN_CHECK(memcmp(here, there, sizeof here) == 0);
            kn_scope_end(s);
        }
    }
    kn_loader_free(cpu);
    guarded_end();
}

/* Tensors on a device: rows in order are views of them, others are gathered there. Tensors on the
 * CPU are copied to it. */
KN_TEST(placement, tensors_on_a_device)
{
    float x[5][2];
    guarded_begin();
    kn_scope scope = kn_scope_begin();
    kn_tensor *here = kn_arange(KN_F32, KN_CPU, 20);
    here = kn_reshape(here, KN_SHAPE(10, 2));
    kn_tensor *there = kn_to_device(here, GUARDED);
    for (int from = 0; from < 2; from++)
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            OWNED_LOADER kn_loader *l =
                kn_tensor_loader(NULL, .field = { from ? there : here }, .batch = 5,
                                 .shuffle = shuffle, .device = GUARDED);
            int seen = 0;
            for (int k = 0; k < 2; k++) {
                kn_batch b = kn_next(l);
                KN_CHECK(b.x && kn_device_of(b.x) == GUARDED);
                KN_CHECK(kn_to_host(b.x, x, sizeof x));
                for (int i = 0; i < 5; i++) {
                    KN_CHECK(x[i][1] == x[i][0] + 1 && (shuffle || x[i][0] == 2 * (5 * k + i)));
                    seen |= 1 << (int)x[i][0] / 2;
                }
            }
            KN_CHECK(seen == 1023);
            KN_CHECK(kn_loader_read_stats(l).copied == (from && !shuffle ? 0 : 2));
        }
    kn_scope_end(scope);
    KN_CHECK_OK();
    guarded_end();
}

static bool core_is_free(void)
{
    kn_stream *s = kn_stream_create(KN_CPU, "probe", KN_STREAM_AUTO);
    bool is_free = s && !kn_stream_is_inline(s);
    kn_stream_destroy(s);
    return is_free;
}

/* Threads of a loader and of streams share the cores that are left over. */
KN_TEST(placement, workers_take_free_cores)
{
    double x[4 * WIDTH];
    kn_set_free_cores(1);
    KN_CHECK(core_is_free());
    kn_loader *l = kn_loader_new(fill_numbers, (void *)&plain, NULL, .samples = 13, NUMBERS,
                                 .batch = 4, .workers = 2);
    KN_CHECK(core_is_free()); /* its threads start with the first batch */
    KN_CHECK(take(l, x, NULL) == 4 && !core_is_free());
    kn_loader_free(l);
    KN_CHECK(core_is_free());
    kn_set_free_cores(0);
}
