/* tests/nn/conv_test.c: convolution and batch norm as modules: names, initial values, statistics
 * that move once a call, training and evaluation, meta. */
#include "nn/layers.h"
#include "tests/owned.h"

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
             kn_conv2d_init(&b->conv, &b->base, "conv", 4, 6, 3, .pad = 1, .stride = 2, .groups = 2,
                            .device = device) &&
             kn_batch_norm_init(&b->bn, &b->base, "bn", 6, .device = device));
}

static kn_tensor *input(uint64_t stream)
{
    return kn_randn(KN_F32, KN_CPU, 8, stream, KN_SHAPE(3, 4, 6, 5));
}

static float buffer(void *m, const char *name, int i)
{
    const kn_tensor *t = kn_module_buffer(m, name);
    KN_CHECK(t && kn_device_of(t) == KN_CPU);
    return ((const float *)kn_data(t))[i];
}

KN_TEST(conv, names_shapes_and_initial_values)
{
    OWNED_MODULE block b;
    block_init(&b, KN_META);
    KN_CHECK(kn_materialize(&b, KN_CPU, 3));
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
    KN_CHECK(strcmp(kn_module_class(&b.bn), "batch_norm") == 0);
    REFUSED(kn_module_buffer(&b, "bn.mean"), "'bn' (batch_norm) has no buffer 'mean'");
}

/* A float buffer after one training call, with and without recompute and backward. */
KN_TEST(conv, statistics_move_once_a_call)
{
    float mean[2], var[2];
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE block b;
        IN_SCOPE;
        block_init(&b, KN_META);
        KN_CHECK(kn_materialize(&b, KN_CPU, 3) && kn_recompute(&b, again));
        kn_tensor *x = kn_require_grad(input(1), true), *y = kn_call(&b, x);
        KN_CHECK(kn_backward(sum_of(kn_mul(y, y))));
        KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 1, "recompute %d",
                 again);
        mean[again] = buffer(&b, "bn.running_mean", 2);
        var[again] = buffer(&b, "bn.running_var", 2);
        KN_CHECK(mean[again] != 0 && var[again] != 1);
    }
    KN_CHECK(mean[0] == mean[1] && var[0] == var[1], "%g %g", (double)mean[0], (double)mean[1]);
}

/* Evaluation uses the running statistics, each sample by itself, and leaves them. */
KN_TEST(conv, evaluation)
{
    OWNED_MODULE block b;
    block_init(&b, KN_CPU);
    KN_CHECK(kn_materialize(&b, KN_CPU, 3));
    for (uint64_t i = 0; i < 3; i++)
        KN_CHECK(kn_call(&b, input(i)));
    KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 3);
    kn_train(&b, false);
    const float mean = buffer(&b, "bn.running_mean", 1);
    kn_tensor *x = input(7), *all = kn_call(&b, x), *one = kn_call(&b, kn_slice(x, 0, 1, 2));
    KN_CHECK(all && one);
    const float *a = (const float *)kn_data(all) + kn_numel(one), *o = kn_data(one);
    for (int64_t i = 0; i < kn_numel(one); i++)
        KN_CHECK(fabsf(a[i] - o[i]) < 1e-5f, "%g, alone %g", (double)a[i], (double)o[i]);
    KN_CHECK(buffer(&b, "bn.running_mean", 1) == mean);
    KN_CHECK(kn_item(kn_module_buffer(&b, "bn.num_batches_tracked")) == 3);
}

/* kn_batch_norm_relu is relu of the layer's result plus the residual, recomputed or not, also where
 * another module has taken the layer's place. */
KN_TEST(conv, norm_and_relu)
{
    for (int i = 0; i < 8; i++) {
        const bool residual = i & 1, again = i & 2, replaced = i & 4;
        kn_tensor *y[2], *grad[2];
        IN_SCOPE;
        for (int at_once = 0; at_once < 2; at_once++) {
            kn_module root;
            kn_batch_norm bn;
            kn_group_norm other;
            KN_CHECK(kn_module_init(&root, NULL) && kn_batch_norm_init(&bn, &root, "bn", 4) &&
                     kn_group_norm_init(&other, NULL, "", 2, 4) && kn_recompute(&bn, again));
            if (replaced)
                KN_CHECK(kn_module_replace(&root, "bn", &other));
            kn_tensor *x = kn_require_grad(input(1), true), *r = residual ? input(2) : NULL;
            if (at_once)
                y[1] = kn_batch_norm_relu(&bn, x, r);
            else
                y[0] = kn_relu(r ? kn_add(kn_call(&bn, x), r) : kn_call(&bn, x));
            KN_CHECK(kn_backward(sum_of(kn_mul(y[at_once], input(3)))));
            grad[at_once] = kn_grad(x);
            kn_module_free(&root);
            if (!replaced)
                kn_module_free(&other);
        }
        const size_t size = (size_t)kn_numel(y[0]) * sizeof(float);
        KN_CHECK(memcmp(kn_data(y[0]), kn_data(y[1]), size) == 0, "case %d", i);
        KN_CHECK(memcmp(kn_data(grad[0]), kn_data(grad[1]), size) == 0, "case %d", i);
    }
}

KN_TEST(conv, without_parameters_and_buffers)
{
    OWNED_MODULE kn_batch_norm bn;
    KN_CHECK(kn_batch_norm_init(&bn, NULL, "", 4, .no_affine = true, .no_running = true));
    KN_CHECK(kn_module_children(&bn) == 0 && kn_param_count(&bn) == 0);
    kn_train(&bn, false); /* the batch's statistics all the same */
    kn_tensor *x = input(1), *y = kn_call(&bn, x);
    kn_tensor *m = kn_mean(y, 3, (int64_t[]){ 0, 2, 3 }, false);
    KN_CHECK(m && fabs(kn_item(kn_amax(kn_abs(m), 0, NULL, false))) < 1e-5);
}

KN_TEST(conv, whole_on_meta)
{
    OWNED_MODULE block b;
    block_init(&b, KN_META);
    KN_CHECK(kn_materialize(&b, KN_META, 3));
    kn_tensor *y = kn_call(&b, kn_empty(KN_F32, KN_META, KN_SHAPE(3, 4, 6, 5)));
    KN_CHECK(y && kn_size(y, 2) == 3 && kn_size(y, 3) == 3);
}

/* Names, shapes and initial values of the other convolutions and norms: PyTorch's. */
KN_TEST(conv, parameters_of_its_relatives)
{
    kn_conv1d one;
    kn_conv_transpose2d up;
    kn_conv_transpose1d up1;
    OWNED_MODULE kn_group_norm gn;
    KN_CHECK(kn_conv1d_init(&one, NULL, "", 6, 4, 5, .groups = 2) &&
             kn_conv_transpose2d_init(&up, NULL, "", 6, 4, 3, .groups = 2) &&
             kn_conv_transpose1d_init(&up1, NULL, "", 4, 6, 5) &&
             kn_group_norm_init(&gn, NULL, "", 2, 4));
    static const int64_t shapes[3][4] = { { 4, 3, 5, 0 }, { 6, 2, 3, 3 }, { 4, 6, 5, 0 } };
    static const int terms[3] = { 15, 18, 30 }, out[3] = { 4, 4, 6 };
    void *layers[3] = { &one, &up, &up1 };
    for (int i = 0; i < 3; i++) {
        KN_CHECK(kn_materialize(layers[i], KN_CPU, 3));
        const kn_tensor *w = kn_module_param(layers[i], "weight"),
                        *b = kn_module_param(layers[i], "bias");
        KN_CHECK(w && b && kn_numel(b) == out[i] && kn_ndim(w) == (shapes[i][3] ? 4 : 3));
        for (int d = 0; d < kn_ndim(w); d++)
            KN_CHECK(kn_size(w, d) == shapes[i][d]);
        float most = 0, bound = 1 / sqrtf((float)terms[i]);
        for (int64_t k = 0; k < kn_numel(w); k++)
            most = fmaxf(most, fabsf(((const float *)kn_data(w))[k]));
        KN_CHECK(most <= bound && most > 0.9f * bound, "%d: %g of %g", i, (double)most,
                 (double)bound);
        kn_module_free(layers[i]);
    }
    KN_CHECK(kn_materialize(&gn, KN_CPU, 3));
    for (int i = 0; i < 4; i++)
        KN_CHECK(((float *)kn_data(kn_module_param(&gn, "weight")))[i] == 1 &&
                 ((float *)kn_data(kn_module_param(&gn, "bias")))[i] == 0);
    KN_CHECK(strcmp(kn_module_class(&gn), "group_norm") == 0);
}

KN_TEST(conv, bad_relatives)
{
    kn_conv1d one;
    kn_conv_transpose2d up;
    kn_conv_transpose1d up1;
    kn_group_norm gn;
    kn_instance_norm in;
    kn_conv3d three;
    REFUSED(kn_conv3d_init(&three, NULL, "c", 3, 8, 0, .kernels = { 3, 1 }),
            "kn_conv3d_init: 'c' would be 3 -> 8 with a kernel of 3 x 1 x 0; all");
    REFUSED(kn_conv3d_init(&three, NULL, "c", 3, 8, 1, .pads = { 0, 0, -1 }), "'c' has .pads -1");
    REFUSED(kn_conv1d_init(&one, NULL, "c", 3, 8, 0),
            "kn_conv1d_init: 'c' would be 3 -> 8 with a kernel of 0; all");
    REFUSED(kn_conv_transpose2d_init(&up, NULL, "c", 4, 6, 3, .groups = 4),
            "kn_conv_transpose2d_init: 'c' is 4 -> 6, which 4 groups don't divide");
    REFUSED(kn_conv_transpose2d_init(&up, NULL, "c", 4, 6, 0, .kernels = { 3, 0 }),
            "with a kernel of 3 x 0");
    REFUSED(kn_conv_transpose1d_init(&up1, NULL, "c", 0, 6, 3),
            "kn_conv_transpose1d_init: 'c' would be 0 -> 6");
    REFUSED(kn_conv_transpose1d_init(&up1, NULL, "c", 4, 6, 3, .groups = -1),
            "which -1 groups don't divide");
    REFUSED(kn_group_norm_init(&gn, NULL, "gn", 4, 6),
            "kn_group_norm_init: 'gn' has 6 channels, which 4 groups don't divide");
    REFUSED(kn_group_norm_init(&gn, NULL, "gn", 0, 6), "0 groups");
    REFUSED(kn_group_norm_init(&gn, NULL, "gn", 2, 0), "kn_group_norm_init: 'gn' has 0 channels");
    REFUSED(kn_group_norm_init(&gn, NULL, "gn", 2, 4, .eps = -1), "'gn' has eps -1");
    REFUSED(kn_instance_norm_init(&in, NULL, "in", -1),
            "kn_instance_norm_init: 'in' has -1 channels");
    REFUSED(kn_instance_norm_init(&in, NULL, "in", 3, .eps = NAN), "'in' has eps nan");
    REFUSED(kn_instance_norm_init(&in, NULL, "in", 3, .momentum = 0.5),
            "'in' has momentum 0.5, should lie in [0, 1] (KN_ZERO for 0), and goes with");
    REFUSED(kn_instance_norm_init(&in, NULL, "in", 3, .momentum = 2, .track_running_stats = true),
            "'in' has momentum 2");
}

/* Beside sums by hand: of each channel of each sample, averaged over samples. */
KN_TEST(conv, running_statistics_of_instance_norm)
{
    for (int i = 0; i < 3; i++) { /* plain, recomputed, bf16 */
        IN_SCOPE;
        OWNED_MODULE kn_instance_norm in;
        KN_CHECK(kn_instance_norm_init(&in, NULL, "", 4, .track_running_stats = true,
                                       .momentum = 0.25) &&
                 kn_recompute(&in, i == 1) && kn_module_buffer(&in, "num_batches_tracked"));
        kn_tensor *x = kn_require_grad(kn_cast(input(1), i == 2 ? KN_BF16 : KN_F32), true);
        kn_tensor *wide = kn_cast(kn_detach(x), KN_F32), *y = kn_call(&in, x);
        KN_CHECK(y && kn_dtype_of(y) == kn_dtype_of(x) && kn_backward(sum_of(kn_square(y))));
        const float *v = kn_data(wide);
        double mean[4] = { 0 }, var[4] = { 0 };
        for (int c = 0; c < 4; c++)
            for (int n = 0; n < 3; n++) {
                const float *of = v + (n * 4 + c) * 30;
                double sum = 0, squares = 0;
                for (int k = 0; k < 30; k++)
                    sum += of[k] / 30;
                for (int k = 0; k < 30; k++)
                    squares += (of[k] - sum) * (of[k] - sum) / 29;
                mean[c] += sum / 3, var[c] += squares / 3;
            }
        for (int c = 0; c < 4; c++) {
            mean[c] *= 0.25, var[c] = 0.75 + 0.25 * var[c];
            KN_CHECK(fabs(buffer(&in, "running_mean", c) - mean[c]) < 1e-6, "%d", i);
            KN_CHECK(fabs(buffer(&in, "running_var", c) - var[c]) < 1e-6, "%d", i);
        }
        kn_train(&in, false);
        kn_tensor *z = kn_cast(kn_call(&in, x), KN_F32);
        KN_CHECK(z && buffer(&in, "running_mean", 0) == (float)buffer(&in, "running_mean", 0));
        for (int c = 0; c < 4; c++)
            KN_CHECK(fabs(((const float *)kn_data(z))[c * 30] -
                          (v[c * 30] - mean[c]) / sqrt(var[c] + 1e-5)) < (i == 2 ? 2e-2 : 1e-5));
        KN_CHECK(fabs(buffer(&in, "running_mean", 0) - mean[0]) < 1e-6);
    }
}

/* Without weights no operation sees the layer's number of channels. */
KN_TEST(conv, norms_take_their_channels)
{
    kn_group_norm gn;
    kn_instance_norm in;
    KN_CHECK(kn_group_norm_init(&gn, NULL, "", 2, 4, .no_affine = true) &&
             kn_instance_norm_init(&in, NULL, "", 4));
    kn_module *const layer[2] = { &gn.base, &in.base };
    for (int i = 0; i < 2; i++) {
        KN_CHECK(kn_call(layer[i], kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 4, 3))));
        REFUSED(kn_call(layer[i], kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 6, 3))),
                "the layer is for 4 channels, x is f32[2,6,3]");
        REFUSED(kn_call(layer[i], kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4))),
                "needs a float x[N,C,...]");
        kn_module_free(layer[i]);
    }
}

KN_TEST(conv, bad_layers)
{
    kn_conv2d c;
    kn_batch_norm bn;
    REFUSED(kn_conv2d_init(&c, NULL, "c", 3, 8, 0), "'c' would be 3 -> 8 with a kernel of 0 x 0");
    REFUSED(kn_conv2d_init(&c, NULL, "c", 3, 8, 3, .groups = 2),
            "'c' is 3 -> 8, which 2 groups don't divide");
    REFUSED(kn_batch_norm_init(&bn, NULL, "bn", 0), "'bn' has 0 channels");
    REFUSED(kn_batch_norm_init(&bn, NULL, "bn", 3, .momentum = 1.5), "momentum 1.5");
}
