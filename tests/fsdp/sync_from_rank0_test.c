/* tests/fsdp/sync_from_rank0_test.c: .sync_from_rank0: wrapping copies rank 0's parameters and
 * buffers to all ranks. */
#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"

static bool set_buffers(net *m, float x)
{
    float *b = kn_data(m->base.impl->buffer[0].tensor);
    for (int i = 0; b && i < 3; i++)
        b[i] = x * (float)(i + 1);
    return b != NULL;
}

/* Every rank starts with other values; after wrapping all have rank 0's. */
RANK_TEST(sync_from_rank0, of_any_values, IN_ALL_WAYS)
{
    const way *w = arg;
    int rank = kn_rank(world);
    NET(m);
    KN_CHECK(kn_materialize(&m, KN_CPU, 500 + (uint64_t)rank) && set_buffers(&m, (float)rank + 3));
    NET(ref);
    KN_CHECK(kn_materialize(&ref, KN_CPU, 500));
    KN_CHECK(
        kn_fsdp_wrap(&m, world, WAY_OPTIONS(w), .wrap_class = "linear", .sync_from_rank0 = true));
    KN_CHECK(all_read_as(&m, &ref));
    const float *b = kn_data(m.base.impl->buffer[0].tensor);
    KN_CHECK(b && b[0] == 3 && b[1] == 6 && b[2] == 9, "buffer %g", b ? (double)b[0] : 0);
}

/* The main use: only rank 0 has values; the others declare on meta, buffers too. A rank never holds
 * more than its shards and the chunk being sent. */
RANK_TEST(sync_from_rank0, of_the_only_values, IN_ALL_WAYS)
{
    const way *w = arg;
    bool has = kn_rank(world) == 0;
    NET(m);
    kn_scope scope = kn_scope_begin();
    KN_CHECK(kn_declare_buffer(&m.fc2, "mean", KN_F32, KN_META, KN_ONES_INIT, KN_SHAPE(2)) &&
                 kn_buffer(&m.fc1, "given",
                           has ? kn_full(KN_F32, KN_CPU, 2.5, KN_SHAPE(7))
                               : kn_zeros(KN_F32, KN_META, KN_SHAPE(7))),
             "buffers");
    kn_scope_end(scope);
    if (has) {
        KN_CHECK(kn_materialize(&m, KN_CPU, 500) && set_buffers(&m, 3));
        ((float *)kn_data(kn_module_buffer(&m, "fc2.mean")))[1] = 8;
    }
    NET(ref);
    KN_CHECK(kn_materialize(&ref, KN_CPU, 500));
    kn_ledger_reset_peaks();
    kn_ledger before = kn_ledger_read();
    KN_CHECK(
        kn_fsdp_wrap(&m, world, WAY_OPTIONS(w), .wrap_class = "linear", .sync_from_rank0 = true));
    kn_ledger after = kn_ledger_read();
    KN_CHECK(after.peak[KN_MEM_PARAM] == after.live[KN_MEM_PARAM] || has, "more than the shards");
    KN_CHECK(after.peak[KN_MEM_COMM] - before.live[KN_MEM_COMM] <= 1 << 20, "more than a chunk");
    KN_CHECK(all_read_as(&m, &ref));
    const float *scale = kn_data(m.base.impl->buffer[0].tensor);
    const float *mean = kn_data(kn_module_buffer(&m, "fc2.mean"));
    const float *given = kn_data(kn_module_buffer(&m, "fc1.given"));
    KN_CHECK(scale && mean && given, "buffers");
    KN_CHECK(scale[0] == 3 && scale[2] == 9 && mean[0] == 1 && mean[1] == 8 && given[6] == 2.5f,
             "buffers %g %g %g %g", (double)scale[0], (double)mean[0], (double)mean[1],
             (double)given[6]);
    KN_CHECK(net_backward(&m, kn_rank(world)));
}

static int second_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return ndim - 1;
}

/* Parameters that take several chunks, cut along another dim, and on a device of its own. */
typedef struct wide {
    kn_device device;
    kn_layout_kind layout;
    bool on_device; /* rank 0's values are there; no option names the device */
} wide;

static void chunks_from_rank0(kn_comm *world, void *arg)
{
    enum { ROWS = 260, COLS = 1026 }; /* more than 1 MiB */
    const wide *w = arg;
    OWNED_MODULE kn_linear m = { 0 };
    OWNED_BYTES float *whole = malloc(ROWS * COLS * sizeof *whole);
    KN_CHECK(kn_linear_init(&m, NULL, "m", COLS, ROWS, .device = KN_META, .no_bias = true));
    if (kn_rank(world) == 0) {
        KN_CHECK(kn_materialize(&m, w->on_device ? w->device : KN_CPU, 1));
        for (int i = 0; i < ROWS * COLS; i++)
            whole[i] = (float)i;
        IN_SCOPE;
        kn_tensor *v = kn_from(KN_F32, KN_CPU, whole, KN_SHAPE(ROWS, COLS));
        WITHOUT_GRAD;
        KN_CHECK(kn_copy_(kn_module_param(&m, "weight"), v));
    }
    KN_CHECK(kn_fsdp_wrap(&m, world, .layout = w->layout,
                          .device = w->on_device ? KN_DEVICE_DEFAULT : w->device,
                          .sync_from_rank0 = true,
                          .placement = w->layout == KN_LAYOUT_PER_PARAM ? second_dim : NULL));
    memset(whole, 0, ROWS * COLS * sizeof *whole);
    KN_CHECK(kn_unit_of(m.base.impl)->options.device == w->device, "device");
    KN_CHECK(kn_param_read(&m, 0, whole));
    for (int i = 0; i < ROWS * COLS; i++)
        KN_CHECK(whole[i] == (float)i, "element %d is %g", i, (double)whole[i]);
}

KN_TEST(sync_from_rank0, in_chunks)
{
    for (int i = 0; i < 6; i++) {
        wide w = { i < 2 ? KN_CPU : STAND_IN, i % 2 ? KN_LAYOUT_PER_PARAM : KN_LAYOUT_FLAT, i > 3 };
        if (THREADS_ONLY && i > 1)
            break;
        if (i > 1)
            stand_in_begin((stand_in){ 0 });
        int failed = spawn_processes(2, chunks_from_rank0, &w);
        if (i > 1)
            stand_in_end();
        KN_CHECK(failed == 0, "case %d: %d ranks failed", i, failed);
    }
}

/* If rank 0 only declares, the declared values apply, for any values of other ranks. */
RANK_TEST(sync_from_rank0, of_declared_values, .processes = "3", .threads = "3")
{
    NET(m);
    NET_WHOLE(ref);
    KN_CHECK(kn_rank(world) == 0 || kn_materialize(&m, KN_CPU, 5));
    KN_CHECK(kn_fsdp_wrap(&m, world, .sync_from_rank0 = true, .seed = NET_SEED));
    KN_CHECK(all_read_as(&m, &ref));
}
