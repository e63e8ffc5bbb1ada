/* tests/fsdp/convnet_test.c: a convolutional net, sharded: the same bits as one process that
 * accumulates the same micro-batches (matrix.h), and batch norm in full precision beside units of
 * bf16. */
#include "tests/fsdp/matrix.h"
#include "tests/owned.h"

enum { STEPS = 3, MICRO = 4, BATCH = 3, SIDE = 9 };

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
    return kn_call(&n->fc, kn_flatten(kn_adaptive_avg_pool2d(x, 2, 2), 1, -1));
}

static bool convnet_init(void *own)
{
    convnet *n = own;
    *n = (convnet){ 0 };
    return kn_module_init(&n->base, convnet_forward) &&
           kn_conv2d_init(&n->conv1, &n->base, "conv1", 2, 6, 3, .pad = 1, .no_bias = true,
                          .device = KN_META) &&
           kn_batch_norm_init(&n->bn1, &n->base, "bn1", 6, .device = KN_META) &&
           kn_conv2d_init(&n->conv2, &n->base, "conv2", 6, 8, 3, .groups = 2, .device = KN_META) &&
           kn_batch_norm_init(&n->bn2, &n->base, "bn2", 8, .device = KN_META) &&
           kn_linear_init(&n->fc, &n->base, "fc", 32, 5, .device = KN_META);
}

static kn_tensor *convnet_loss(void *n, int step, int micro)
{
    int64_t targets[BATCH];
    for (int i = 0; i < BATCH; i++)
        targets[i] = (i * 2 + micro + step) % 5;
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 4, (uint64_t)(step * MICRO + micro),
                            KN_SHAPE(BATCH, 2, SIDE, SIDE));
    kn_tensor *y = kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(BATCH));
    return kn_cross_entropy(kn_cast(kn_call(n, x), KN_F32), y);
}

/* ---- over ranks ------------------------------------------------------------------------------ */

/* Each rank's batch norms have statistics of its own batches. */
static bool counted(matrix_net *n, int step, int round, int rounds)
{
    double seen = kn_item(kn_module_buffer(n->root, "bn2.num_batches_tracked"));
    return seen == step * rounds + round + 1 || kn_fail("%g batches were counted", seen);
}

static bool counted_of_2(matrix_net *n, int step, int round)
{
    return counted(n, step, round, 2);
}

static bool counted_of_4(matrix_net *n, int step, int round)
{
    return counted(n, step, round, 4);
}

KN_TEST(convnet, same_bits_over_ranks)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        MATRIX_CHECK(.model = MATRIX_OWN, .bytes = sizeof(convnet), .declare = convnet_init,
                     .loss = convnet_loss, .ranks = ranks, .rounds = MICRO / ranks, .steps = STEPS,
                     .between = ranks == 1 ? counted_of_4 : counted_of_2,
                     .o.wrap_class = "conv2d,linear");
}

/* ---- precision ------------------------------------------------------------------------------- */

/* Units of bf16: batch norms are units of their own, in f32, buffers too. */
KN_TEST(convnet, batch_norm_beside_bf16)
{
    OWNED_MODULE convnet n;
    KN_CHECK(convnet_init(&n) && kn_fsdp_wrap(&n, NULL, .wrap_class = "conv2d,linear", .seed = 42,
                                              .param_dtype = KN_BF16, .buffer_dtype = KN_BF16));
    KN_CHECK(kn_fsdp_is_unit(&n.bn1) && kn_fsdp_is_unit(&n.bn2));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&n, .lr = 0.1, .momentum = 0.9);
    double first = 0, last = 0;
    for (int i = 0; i < STEPS * MICRO; i++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *l = convnet_loss(&n, i / MICRO, i % MICRO);
        KN_CHECK(l && kn_backward(l));
        first = i == 0 ? kn_item(l) : first;
        last = i == (STEPS - 1) * MICRO ? kn_item(l) : last;
        kn_scope_end(scope);
        KN_CHECK(i % MICRO < MICRO - 1 || kn_step(opt));
    }
    KN_CHECK(kn_dtype_of(kn_module_buffer(&n, "bn1.running_var")) == KN_F32);
    KN_CHECK(kn_dtype_of(kn_module_param(&n, "conv1.weight")) == KN_BF16);
    KN_CHECK(isfinite(last) && first > 0.5 && first < 5, "losses %g to %g", first, last);
}

/* y and x's gradient under batch norm, unit of a tree that computes in t, or by hand with casts
 * around it. */
static void norm_of(kn_dtype t, bool last, bool by_hand, float *y_bits, float *dx_bits)
{
    enum { C = 6 };
    OWNED_MODULE kn_sequential net = { 0 };
    kn_batch_norm bn = { 0 };
    IN_SCOPE;
    KN_CHECK(kn_sequential_init(&net, NULL, "") && kn_batch_norm_init(&bn, NULL, "", C) &&
             kn_sequential_append(&net, &bn) && kn_fsdp_wrap(&net, NULL, .param_dtype = t));
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(3, C, 5, 4));
    kn_tensor *dy = kn_cast(kn_randn(KN_F32, KN_CPU, 1, 2, KN_SHAPE(3, C, 5, 4)), t);
    x = kn_require_grad(kn_cast(last ? kn_channels_last(x) : x, t), true);
    OWNED_HOST kn_trace_event *events = NULL;
    kn_trace_start(1000);
    kn_tensor *wide = by_hand ? kn_cast(x, KN_F32) : x;
    kn_tensor *y = by_hand ? kn_cast(kn_batch_norm(wide, kn_ones(KN_F32, KN_CPU, KN_SHAPE(C)),
                                                   kn_zeros(KN_F32, KN_CPU, KN_SHAPE(C)), NULL,
                                                   NULL, .training = true),
                                     t)
                           : kn_call(&net, x);
    KN_CHECK(y && kn_dtype_of(y) == t && kn_is_channels_last(y) == last);
    KN_CHECK(kn_backward(sum_of(kn_mul(y, dy))));
    const size_t count = kn_trace_stop(&events);
    for (size_t i = 0; i < count && !by_hand; i++)
        KN_CHECK(strcmp(events[i].what, "copy") != 0 || events[i].bytes < 6.0 * 3 * C * 20,
                 "a cast of activations");
    KN_CHECK(kn_to_host(kn_cast(y, KN_F32), y_bits, 3 * C * 20 * sizeof *y_bits) &&
             kn_to_host(kn_cast(kn_grad(x), KN_F32), dx_bits, 3 * C * 20 * sizeof *dx_bits));
}

/* It computes narrow inputs in f32 and rounds once, so it needs no casts around it. */
KN_TEST(convnet, batch_norm_takes_narrow_inputs_as_they_are)
{
    enum { N = 3 * 6 * 20 };
    static const kn_dtype dtypes[] = { KN_BF16, KN_F16 };
    for (int i = 0; i < 4; i++) {
        float y[2][N], dx[2][N];
        for (int by_hand = 0; by_hand < 2; by_hand++)
            norm_of(dtypes[i / 2], i % 2, by_hand, y[by_hand], dx[by_hand]);
        KN_CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0, "case %d: y", i);
        KN_CHECK(memcmp(dx[0], dx[1], sizeof dx[0]) == 0, "case %d: dx", i);
    }
}
