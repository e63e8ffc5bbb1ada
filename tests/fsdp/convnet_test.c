/* tests/fsdp/convnet_test.c: a convolutional net, sharded: the same bits as one process that accumulates the
 * same micro-batches, and batch norm in full precision beside units of bf16. */
#include "tests/comm/comm_test.h"
#include "knap.h"
#include <sys/mman.h>

enum { STEPS = 3, MICRO = 4, BATCH = 3, SIDE = 9, MAX_ELEMENTS = 2000 };

typedef struct convnet {
    kn_module base;
    kn_conv2d conv1, conv2;
    kn_batch_norm bn1, bn2;
    kn_linear fc;
} convnet;

static kn_tensor *convnet_forward(kn_module *self, kn_tensor *x) /* (B, 2, SIDE, SIDE) -> (B, 5) */
{
    convnet *n = (convnet *)self;
    x = kn_relu(kn_call(&n->bn1, kn_call(&n->conv1, kn_channels_last(x))));
    x = kn_max_pool2d(x, .kernel = 3, .stride = 2, .pad = 1);
    x = kn_relu(kn_call(&n->bn2, kn_call(&n->conv2, x)));
    return kn_call(&n->fc, kn_flatten(kn_adaptive_avg_pool2d(x, 2, 2)));
}

static bool convnet_init(convnet *n)
{
    *n = (convnet){ 0 };
    return kn_module_init(&n->base, convnet_forward) &&
           kn_conv2d_init(&n->conv1, &n->base, "conv1", 2, 6, 3, .pad = 1, .no_bias = true,
                          .device = KN_META) &&
           kn_batch_norm_init(&n->bn1, &n->base, "bn1", 6, .device = KN_META) &&
           kn_conv2d_init(&n->conv2, &n->base, "conv2", 6, 8, 3, .groups = 2, .device = KN_META) &&
           kn_batch_norm_init(&n->bn2, &n->base, "bn2", 8, .device = KN_META) &&
           kn_linear_init(&n->fc, &n->base, "fc", 32, 5, .device = KN_META);
}

typedef struct outcome {
    float loss[STEPS][MICRO], param[MAX_ELEMENTS];
    int64_t elements;
} outcome;

static float backward(convnet *n, int step, int micro)
{
    kn_scope scope = kn_scope_begin();
    int64_t targets[BATCH];
    for (int i = 0; i < BATCH; i++)
        targets[i] = (i * 2 + micro + step) % 5;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, (uint64_t)(step * MICRO + micro),
                            KN_SHAPE(BATCH, 2, SIDE, SIDE));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(BATCH));
    kn_tensor *loss = kn_cross_entropy(kn_cast(kn_call(n, x), KN_F32), y);
    float value = (float)kn_item(loss);
    kn_backward(loss);
    kn_scope_end(scope);
    return value;
}

static bool train(convnet *n, kn_comm *world, outcome *o)
{
    int ranks = kn_comm_size(world), rank = kn_rank(world);
    kn_optim *opt = kn_sgd(n, .lr = 0.1, .momentum = 0.9);
    for (int step = 0; step < STEPS && opt && kn_ok(); step++) {
        float mine[MICRO], all[MICRO];
        for (int a = 0; a < MICRO / ranks; a++)
            mine[a] = backward(n, step, a * ranks + rank);
        memcpy(all, mine, sizeof all);
        if (world)
            kn_all_gather(world, all, mine, MICRO / ranks, KN_F32, kn_compute_stream(KN_CPU),
                          "losses");
        for (int r = 0; r < ranks; r++)
            for (int a = 0; a < MICRO / ranks; a++)
                o->loss[step][a * ranks + r] = all[r * (MICRO / ranks) + a];
        kn_step(opt);
    }
    const kn_param *p;
    int count = kn_params(n, &p);
    for (int i = 0; i < count && kn_ok() && o->elements + p[i].numel <= MAX_ELEMENTS; i++) {
        kn_param_read(n, i, o->param + o->elements);
        o->elements += p[i].numel;
    }
    kn_optim_free(opt);
    return kn_ok();
}

static int rank_main(kn_comm *world, void *arg)
{
    convnet n;
    outcome *mine = calloc(1, sizeof *mine);
    kn_set_threads(1);
    bool ok = convnet_init(&n) &&
              (world ? kn_fsdp_wrap(&n, world, .wrap_class = "conv2d,linear", .seed = 42)
                     : kn_materialize(&n, KN_CPU, 42)) &&
              train(&n, world, mine);
    ok = ok && kn_item(kn_module_buffer(&n, "bn2.num_batches_tracked")) ==
                   STEPS * MICRO / kn_comm_size(world);
    if (!kn_ok())
        fprintf(stderr, "rank %d: %s\n", kn_rank(world), kn_error());
    if (ok && kn_rank(world) == 0)
        *(outcome *)arg = *mine;
    kn_module_free(&n);
    free(mine);
    return ok ? 0 : 1;
}

KN_TEST(convnet, same_bits_over_ranks)
{
    static outcome plain;
    KN_CHECK(rank_main(NULL, &plain) == 0);
    KN_CHECK(plain.elements == 6 * 2 * 9 + 12 + 8 * 3 * 9 + 8 + 16 + 32 * 5 + 5);
    KN_CHECK(plain.loss[0][0] != plain.loss[STEPS - 1][0]);
    for (int ranks = 1; ranks <= 2; ranks++) {
        outcome *o =
            mmap(NULL, sizeof *o, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        int failed =
            THREADS_ONLY ? kn_spawn_threads(ranks, rank_main, o) : kn_spawn(ranks, rank_main, o);
        KN_CHECK(failed == 0, "%d of %d ranks failed", failed, ranks);
        for (int i = 0; i < STEPS * MICRO; i++)
            KN_CHECK(
                memcmp(&o->loss[i / MICRO][i % MICRO], &plain.loss[i / MICRO][i % MICRO], 4) == 0,
                "%d ranks: loss %d: %.9g, %.9g", ranks, i, (double)o->loss[i / MICRO][i % MICRO],
                (double)plain.loss[i / MICRO][i % MICRO]);
        for (int64_t i = 0; i < plain.elements; i++)
            KN_CHECK(memcmp(&o->param[i], &plain.param[i], 4) == 0,
                     "%d ranks: parameter element %lld: %.9g, %.9g", ranks, (long long)i,
                     (double)o->param[i], (double)plain.param[i]);
        munmap(o, sizeof *o);
    }
}

/* Units of bf16: batch norms are units of their own, in f32, buffers too. */
KN_TEST(convnet, batch_norm_beside_bf16)
{
    convnet n;
    outcome *o = calloc(1, sizeof *o);
    KN_CHECK(convnet_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "conv2d,linear", .seed = 42,
                                              .param_dtype = KN_BF16, .buffer_dtype = KN_BF16),
             "%s", kn_error());
    KN_CHECK(kn_fsdp_is_unit(&n.bn1) && kn_fsdp_is_unit(&n.bn2));
    KN_CHECK(train(&n, NULL, o), "%s", kn_error());
    KN_CHECK(kn_dtype_of(kn_module_buffer(&n, "bn1.running_var")) == KN_F32);
    KN_CHECK(kn_dtype_of(kn_module_param(&n, "conv1.weight")) == KN_BF16);
    KN_CHECK(isfinite(o->loss[STEPS - 1][0]) && o->loss[0][0] > 0.5f && o->loss[0][0] < 5);
    kn_module_free(&n);
    free(o);
}
