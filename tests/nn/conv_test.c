/* tests/nn/conv_test.c: convolution and batch norm as modules: names, initial values, statistics
 * that move once a call, training and evaluation, meta. */
#include "nn/nn_internal.h"
#include "tests/kn_test.h"

typedef struct block {
    kn_module base;
    kn_conv2d conv;
    kn_batch_norm bn;
} block;

static kn_tensor *block_forward(kn_module *self, kn_tensor *x)
{
    block *b = (block *)self;
    return kn_relu(kn_call(&b->bn, kn_call(&b->conv, x)));
}

static void block_init(block *b, kn_device device)
{
    *b = (block){ 0 };
    KN_CHECK(kn_module_init(&b->base, block_forward) &&
                 kn_conv2d_init(&b->conv, &b->base, "conv", 4, 6, 3, .pad = 1, .stride = 2,
                                .groups = 2, .device = device) &&
                 kn_batch_norm_init(&b->bn, &b->base, "bn", 6, .device = device),
             "%s", kn_error());
}

static kn_tensor *input(uint64_t stream)
{
    return kn_randn(KN_F32, KN_CPU, 8, stream, KN_SHAPE(3, 4, 6, 5));
}

static float buffer(void *m, const char *name, int i)
{
    const kn_tensor *t = kn_module_buffer(m, name);
    KN_CHECK(t && kn_device_of(t) == KN_CPU, "%s", kn_error());
    return ((const float *)kn_data(t))[i];
}

KN_TEST(conv, names_shapes_and_initial_values)
{
    block b;
    block_init(&b, KN_META);
    KN_CHECK(kn_materialize(&b, KN_CPU, 3), "%s", kn_error());
    static const char *const names[] = { "conv.weight", "conv.bias", "bn.weight", "bn.bias" };
    const kn_param *p;
    KN_CHECK(kn_params(&b, &p) == 4);
    for (int i = 0; i < 4; i++)
        KN_CHECK(strcmp(p[i].name, names[i]) == 0, "%s", p[i].name);
    const kn_tensor *w = kn_module_param(&b, "conv.weight");
    KN_CHECK(kn_ndim(w) == 4 && kn_size(w, 0) == 6 && kn_size(w, 1) == 2 && kn_size(w, 3) == 3);
    const float *v = kn_data(w), bound = 1 / sqrtf(2 * 9);
    float most = 0;
    for (int i = 0; i < 108; i++)
        most = fmaxf(most, fabsf(v[i]));
    KN_CHECK(most <= bound && most > 0.9f * bound, "%g of %g", (double)most, (double)bound);
    for (int i = 0; i < 6; i++)
        KN_CHECK(buffer(&b, "bn.running_mean", i) == 0 && buffer(&b, "bn.running_var", i) == 1);
    KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 0);
    KN_CHECK(strcmp(kn_module_class(&b.bn), "batchnorm") == 0);
    KN_CHECK(!kn_module_buffer(&b, "bn.mean"));
    KN_CHECK_ERROR("'bn' (batchnorm) has no buffer 'mean'");
    kn_module_free(&b);
}

/* A float buffer after one training call, with and without recompute and backward. */
KN_TEST(conv, statistics_move_once_a_call)
{
    float mean[2], var[2];
    for (int again = 0; again < 2; again++) {
        block b;
        kn_scope s = kn_scope_begin();
        block_init(&b, KN_META);
        KN_CHECK(kn_materialize(&b, KN_CPU, 3) && kn_recompute(&b, again), "%s", kn_error());
        kn_tensor *x = kn_require_grad(input(1), true), *y = kn_call(&b, x);
        KN_CHECK(kn_backward(kn_sum(kn_mul(y, y), 0, NULL, false)), "%s", kn_error());
        KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 1, "recompute %d",
                 again);
        mean[again] = buffer(&b, "bn.running_mean", 2);
        var[again] = buffer(&b, "bn.running_var", 2);
        KN_CHECK(mean[again] != 0 && var[again] != 1);
        kn_scope_end(s);
        kn_module_free(&b);
    }
    KN_CHECK(mean[0] == mean[1] && var[0] == var[1], "%g %g", (double)mean[0], (double)mean[1]);
}

/* Evaluation uses the running statistics, each sample by itself, and leaves them. */
KN_TEST(conv, evaluation)
{
    block b;
    block_init(&b, KN_CPU);
    KN_CHECK(kn_materialize(&b, KN_CPU, 3), "%s", kn_error());
    for (uint64_t i = 0; i < 3; i++)
        KN_CHECK(kn_call(&b, input(i)), "%s", kn_error());
    KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 3);
    kn_train(&b, false);
    const float mean = buffer(&b, "bn.running_mean", 1);
    kn_tensor *x = input(7), *all = kn_call(&b, x), *one = kn_call(&b, kn_slice(x, 0, 1, 2));
    KN_CHECK(all && one, "%s", kn_error());
    const float *a = (const float *)kn_data(all) + kn_numel(one), *o = kn_data(one);
    for (int64_t i = 0; i < kn_numel(one); i++)
        KN_CHECK(fabsf(a[i] - o[i]) < 1e-5f, "%g, alone %g", (double)a[i], (double)o[i]);
    KN_CHECK(buffer(&b, "bn.running_mean", 1) == mean);
    KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 3);
    kn_module_free(&b);
}

KN_TEST(conv, without_parameters_and_buffers)
{
    kn_batch_norm bn;
    KN_CHECK(kn_batch_norm_init(&bn, NULL, "", 4, .no_affine = true, .no_running = true));
    KN_CHECK(kn_module_children(&bn) == 0 && kn_param_count(&bn) == 0);
    kn_train(&bn, false); /* the batch's statistics all the same */
    kn_tensor *x = input(1), *y = kn_call(&bn, x);
    kn_tensor *m = kn_mean(y, 3, (int64_t[]){ 0, 2, 3 }, false);
    KN_CHECK(m && fabs(kn_item(kn_amax(kn_abs(m), 0, false))) < 1e-5, "%s", kn_error());
    kn_module_free(&bn);
}

KN_TEST(conv, whole_on_meta)
{
    block b;
    block_init(&b, KN_META);
    KN_CHECK(kn_materialize(&b, KN_META, 3), "%s", kn_error());
    kn_tensor *y = kn_call(&b, kn_empty(KN_F32, KN_META, KN_SHAPE(3, 4, 6, 5)));
    KN_CHECK(y && kn_size(y, 2) == 3 && kn_size(y, 3) == 3, "%s", kn_error());
    kn_module_free(&b);
}

KN_TEST(conv, bad_layers)
{
    kn_conv2d c;
    kn_batch_norm bn;
    KN_CHECK(!kn_conv2d_init(&c, NULL, "c", 3, 8, 0));
    KN_CHECK_ERROR("'c' would be 3 -> 8 with a kernel of 0 x 0");
    KN_CHECK(!kn_conv2d_init(&c, NULL, "c", 3, 8, 3, .groups = 2));
    KN_CHECK_ERROR("'c' is 3 -> 8, which 2 groups don't divide");
    KN_CHECK(!kn_batch_norm_init(&bn, NULL, "bn", 0));
    KN_CHECK_ERROR("'bn' has 0 channels");
    KN_CHECK(!kn_batch_norm_init(&bn, NULL, "bn", 3, .momentum = 1.5));
    KN_CHECK_ERROR("momentum 1.5");
}
