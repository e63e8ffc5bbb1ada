/* tests/nn/layers_test.c: every layer's gradient by finite differences through kn_call, in f64: of
 * the input and of all parameters; and each allocation of a layer that fails. */
#include "nn/hooks.h"
#include "autograd/volumes.h"
#include "nn/layers.h"
#include "tests/failing.h"
#include "tests/owned.h"

/* sum(w * m(x)) for fixed weights; the same draws each time. */
static kn_tensor *functional(void *m, kn_tensor *x)
{
    kn_set_step(2);
    kn_tensor *y = kn_call(m, x);
    KN_CHECK(y != NULL, "%s", kn_error() ? kn_error() : "no result");
    kn_tensor *w = kn_randn(KN_F64, KN_CPU, 3, 3, kn_ndim(y), kn_shape(y));
    return sum_of(kn_mul(y, w));
}

static double value(void *m, kn_tensor *x)
{
    IN_SCOPE;
    double v =
        kn_item(functional(m, x)); /* with grad mode on, since evaluation draws other numbers */
    return v;
}

static void check_tensor(void *m, kn_tensor *x, kn_tensor *t, const char *what)
{
    const double h = 1e-5;
    KN_CHECK(kn_grad(t) != NULL, "%s got no gradient", what);
    double *p = kn_data(t), *g = kn_data(kn_grad(t));
    for (int64_t i = 0; i < kn_numel(t); i++) {
        double keep = p[i];
        p[i] = keep + h;
        double up = value(m, x);
        p[i] = keep - h;
        double down = value(m, x);
        p[i] = keep;
        double want = (up - down) / (2 * h);
        KN_CHECK(fabs(g[i] - want) <= 1e-6 * fmax(1, fabs(want)),
                 "%s[%lld]: gradient %.10g, by differences %.10g", what, (long long)i, g[i], want);
    }
}

/* Materialises m, checks all its gradients at x, frees it. */
static void check(void *m, kn_tensor *x)
{
    const kn_param *p;
    KN_CHECK(kn_materialize(m, KN_CPU, 11));
    int n = kn_params(m, &p);
    for (int i = 0; i < n; i++) { /* ones and zeros would hide mistakes */
        kn_scope s = kn_scope_begin();
        kn_set_grad_mode(false);
        kn_copy_(p[i].tensor, kn_randn(KN_F64, KN_CPU, 12, (uint64_t)i, kn_ndim(p[i].tensor),
                                       kn_shape(p[i].tensor)));
        kn_set_grad_mode(true);
        kn_scope_end(s);
    }
    if (kn_dtype_is_float(kn_dtype_of(x)))
        kn_require_grad(x, true);
    KN_CHECK(kn_backward(functional(m, x)));
    if (kn_requires_grad(x))
        check_tensor(m, x, x, "the input");
    for (int i = 0; i < n; i++)
        check_tensor(m, x, p[i].tensor, p[i].name);
    kn_module_free(m);
    KN_CHECK_OK();
}

static kn_tensor *input(int n, int64_t a, int64_t b, int64_t c)
{
    return kn_randn(KN_F64, KN_CPU, 1, 1, n, (int64_t[]){ a, b, c });
}

static kn_tensor *image(int64_t C)
{
    return kn_randn(KN_F64, KN_CPU, 1, 1, KN_SHAPE(2, C, 4, 3));
}

static bool freed(void *m, bool ok)
{
    kn_module_free(m);
    return ok;
}

/* A layer m of a type is made by a call, in which each allocation may fail. */
#define CHECK_INIT(type, call)                                                                     \
    do {                                                                                           \
        type layer = { 0 }, *m = &layer;                                                           \
        KN_CHECK(freed(m, call));                                                                  \
        EACH_ALLOCATION_FAILS(freed(m, call), 1);                                                  \
    } while (0)

/* The gradients of such a layer at x. */
#define CHECK_LAYER(type, x, call)                                                                 \
    do {                                                                                           \
        CHECK_INIT(type, call);                                                                    \
        type made, *m = &made;                                                                     \
        KN_CHECK(call);                                                                            \
        check(m, x);                                                                               \
    } while (0)
#define F64 .dtype = KN_F64

KN_TEST(layers, of_images_and_sequences)
{
    CHECK_LAYER(kn_conv2d, image(2), kn_conv2d_init(m, NULL, "", 2, 3, 3, F64, .pad = 1));
    CHECK_LAYER(kn_conv2d, image(2), kn_conv2d_init(m, NULL, "", 2, 3, 4, F64, .same = true));
    CHECK_LAYER(kn_conv1d, input(2, 2, 5, 0),
                kn_conv1d_init(m, NULL, "", 2, 3, 2, F64, .same = true));
    CHECK_LAYER(kn_conv2d, image(4),
                kn_conv2d_init(m, NULL, "", 4, 2, 0, F64, .kernels = { 1, 2 }, .stride = 2,
                               .groups = 2, .no_bias = true));
    CHECK_LAYER(kn_conv1d, input(3, 2, 2, 5),
                kn_conv1d_init(m, NULL, "", 2, 4, 3, F64, .pad = 1, .groups = 2));
    CHECK_LAYER(kn_conv3d, kn_unsqueeze(image(2), 2),
                kn_conv3d_init(m, NULL, "", 2, 3, 2, F64, .same = true));
    CHECK_LAYER(kn_conv3d, kn_unsqueeze(image(4), -1),
                kn_conv3d_init(m, NULL, "", 4, 2, 0, F64, .kernels = { 3, 2, 1 }, .groups = 2,
                               .no_bias = true));
    CHECK_LAYER(kn_conv_transpose2d, image(2),
                kn_conv_transpose2d_init(m, NULL, "", 2, 3, 3, F64, .stride = 2, .pad = 1,
                                         .output_pads = { 1, 0 }));
    CHECK_LAYER(kn_conv_transpose2d, image(4),
                kn_conv_transpose2d_init(m, NULL, "", 4, 2, 0, F64, .kernels = { 1, 2 },
                                         .dilation = 2, .groups = 2, .no_bias = true));
    CHECK_LAYER(kn_conv_transpose1d, input(3, 2, 2, 4),
                kn_conv_transpose1d_init(m, NULL, "", 2, 3, 2, F64, .stride = 3, .output_pad = 2));
    CHECK_LAYER(kn_group_norm, image(4), kn_group_norm_init(m, NULL, "", 2, 4, F64, .eps = 1e-3));
    CHECK_LAYER(kn_group_norm, image(3),
                kn_group_norm_init(m, NULL, "", 1, 3, F64, .no_affine = true) &&
                    kn_param_count(m) == 0);
    CHECK_LAYER(kn_instance_norm, image(3),
                kn_instance_norm_init(m, NULL, "", 3, F64) && kn_param_count(m) == 0);
    CHECK_LAYER(kn_instance_norm, image(3),
                kn_instance_norm_init(m, NULL, "", 3, F64, .affine = true));
    CHECK_LAYER(kn_instance_norm, image(3),
                kn_instance_norm_init(m, NULL, "", 3, F64, .track_running_stats = true));
    CHECK_LAYER(kn_batch_norm, image(3), kn_batch_norm_init(m, NULL, "", 3, F64));
}

/* A layer passes all its numbers to the operation, which a call makes of x, w and b. */
#define CHECK_NUMBERS(type, of, init, call)                                                        \
    do {                                                                                           \
        type layer, *m = &layer;                                                                   \
        KN_CHECK((init) && kn_materialize(m, KN_CPU, 1));                                          \
        kn_tensor *x = of, *w = kn_module_param(m, "weight"), *b = kn_module_param(m, "bias");     \
        kn_tensor *y = kn_call(m, x), *z = call;                                                   \
        KN_CHECK(y &&z &&kn_numel(y) == kn_numel(z) &&                                             \
                     memcmp(kn_data(y), kn_data(z), (size_t)kn_numel(y) * 8) == 0,                 \
                 "%s: %s", #call, kn_error());                                                     \
        kn_module_free(m);                                                                         \
    } while (0)
#define NUMBERS      .stride = 2, .pad = 1, .dilation = 2, .groups = 2
#define NUMBERS_EACH .strides = { 1, 2 }, .pads = { 1, 0 }, .dilations = { 2, 1 }

KN_TEST(layers, convolutions_pass_their_numbers_on)
{
    CHECK_NUMBERS(kn_conv2d, image(2), kn_conv2d_init(m, NULL, "", 2, 4, 2, F64, NUMBERS),
                  kn_conv2d(x, w, b, NUMBERS));
    CHECK_NUMBERS(kn_conv2d, image(2), kn_conv2d_init(m, NULL, "", 2, 4, 2, F64, NUMBERS_EACH),
                  kn_conv2d(x, w, b, NUMBERS_EACH));
    CHECK_NUMBERS(kn_conv1d, input(3, 2, 2, 7), kn_conv1d_init(m, NULL, "", 2, 4, 3, F64, NUMBERS),
                  kn_conv1d(x, w, b, NUMBERS));
    CHECK_NUMBERS(kn_conv3d, kn_unsqueeze(image(2), 2),
                  kn_conv3d_init(m, NULL, "", 2, 4, 2, F64, NUMBERS), kn_conv3d(x, w, b, NUMBERS));
#define NUMBERS_3D .strides = { 1, 2, 1 }, .pads = { 1, 0, 1 }, .dilations = { 2, 1, 1 }
    CHECK_NUMBERS(kn_conv3d, kn_unsqueeze(image(2), 2),
                  kn_conv3d_init(m, NULL, "", 2, 4, 2, F64, NUMBERS_3D),
                  kn_conv3d(x, w, b, NUMBERS_3D));
    CHECK_NUMBERS(kn_conv_transpose2d, image(2),
                  kn_conv_transpose2d_init(m, NULL, "", 2, 4, 2, F64, NUMBERS, .output_pad = 1),
                  kn_conv_transpose2d(x, w, b, NUMBERS, .output_pad = 1));
    CHECK_NUMBERS(
        kn_conv_transpose2d, image(2),
        kn_conv_transpose2d_init(m, NULL, "", 2, 4, 2, F64, NUMBERS_EACH, .output_pads = { 1, 0 }),
        kn_conv_transpose2d(x, w, b, NUMBERS_EACH, .output_pads = { 1, 0 }));
    CHECK_NUMBERS(kn_conv_transpose1d, input(3, 2, 2, 7),
                  kn_conv_transpose1d_init(m, NULL, "", 2, 4, 3, F64, NUMBERS, .output_pad = 1),
                  kn_conv_transpose1d(x, w, b, NUMBERS, .output_pad = 1));
}

KN_TEST(layers, of_features)
{
    const int64_t ids[6] = { 3, 1, 1, 0, 3, 3 };
    CHECK_LAYER(kn_linear, input(2, 5, 3, 0), kn_linear_init(m, NULL, "", 3, 4, F64));
    CHECK_LAYER(kn_linear, input(3, 2, 1, 3),
                kn_linear_init(m, NULL, "", 3, 4, F64, .no_bias = true));
    CHECK_LAYER(kn_linear, input(1, 3, 0, 0),
                kn_linear_init(m, NULL, "", 3, 1, F64, .in_out = true));
    CHECK_LAYER(kn_embedding, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(2, 3)),
                kn_embedding_init(m, NULL, "", 4, 3, F64));
    CHECK_LAYER(kn_layer_norm, input(3, 2, 3, 5), kn_layer_norm_init(m, NULL, "", 5, F64));
    CHECK_LAYER(kn_layer_norm, input(2, 3, 5, 0),
                kn_layer_norm_init(m, NULL, "", 5, F64, .no_bias = true, .eps = 0.1));
    CHECK_LAYER(kn_rms_norm, input(3, 2, 3, 5), kn_rms_norm_init(m, NULL, "", 5, F64));
    CHECK_LAYER(kn_rms_norm, input(3, 2, 3, 5),
                kn_rms_norm_init(m, NULL, "", 5, F64, .no_affine = true));
    CHECK_LAYER(kn_layer_norm, input(3, 2, 3, 5),
                kn_layer_norm_init(m, NULL, "", 5, F64, .no_affine = true));
    CHECK_LAYER(kn_dropout, input(2, 5, 7, 0), kn_dropout_init(m, NULL, "", 0.4));
    CHECK_LAYER(kn_mlp, input(3, 2, 2, 3), kn_mlp_init(m, NULL, "", 3, F64));
    CHECK_LAYER(kn_mlp, input(2, 4, 3, 0),
                kn_mlp_init(m, NULL, "", 3, F64, .hidden = 5, .in_out = true, .no_bias = true,
                            .dropout = 0.3));
    CHECK_LAYER(kn_swiglu, input(3, 2, 2, 3),
                kn_swiglu_init(m, NULL, "", 3, 5, F64, .no_bias = true) &&
                    kn_size(kn_module_param(m, "gate_proj.weight"), 0) == 5 &&
                    kn_size(kn_module_param(m, "up_proj.weight"), 0) == 5 &&
                    kn_size(kn_module_param(m, "down_proj.weight"), 0) == 3);
    CHECK_LAYER(kn_swiglu, input(2, 4, 3, 0),
                kn_swiglu_init(m, NULL, "", 3, 4, F64, .dropout = 0.3) &&
                    kn_param_count(m) == 3 * 12 + 2 * 4 + 3);
    CHECK_INIT(kn_gru, kn_gru_init(m, NULL, "", 4, 2, .bidirectional = true));
    CHECK_INIT(kn_embedding_bag, kn_embedding_bag_init(m, NULL, "", 3, 2, .sparse = true));
}

KN_TEST(layers, of_attention)
{
    CHECK_LAYER(kn_self_attention, input(3, 2, 3, 4),
                kn_self_attention_init(m, NULL, "", 4, 2, F64));
    CHECK_LAYER(kn_self_attention, input(3, 2, 4, 4),
                kn_self_attention_init(m, NULL, "", 4, 2, F64, .kv_heads = 1, .rope = true,
                                       .rope_base = 50, .in_out = true));
    CHECK_LAYER(kn_self_attention, input(3, 1, 3, 8),
                kn_self_attention_init(m, NULL, "", 8, 4, F64, .kv_heads = 2, .not_causal = true,
                                       .no_bias = true, .dropout = 0.2));
    CHECK_LAYER(kn_self_attention, input(3, 1, 1, 4),
                kn_self_attention_init(m, NULL, "", 4, 1, F64));
    CHECK_LAYER(kn_self_attention, input(3, 2, 3, 8),
                kn_self_attention_init(m, NULL, "", 8, 2, F64, .kv_heads = 1, .rope = true,
                                       .qk_norm = true, .qk_norm_eps = 1e-3) &&
                    kn_size(kn_module_param(m, "q_norm.weight"), 0) == 4 &&
                    kn_size(kn_module_param(m, "k_norm.weight"), 0) == 4);
    CHECK_LAYER(kn_multi_head_attention, input(3, 2, 3, 8),
                kn_multi_head_attention_init(m, NULL, "", 8, 2, F64, .kv_heads = 1, .rope = true,
                                             .qk_norm = true, .causal = true));
    CHECK_LAYER(
        kn_multi_head_attention, input(3, 1, 4, 4),
        kn_multi_head_attention_init(m, NULL, "", 4, 2, F64, .dropout = 0.2, .no_bias = true));
}

typedef struct norms {
    kn_module base;
    kn_layer_norm layer;
    kn_rms_norm rms, other;
    kn_linear linear;
    bool at_once;
} norms;

/* The norm and the sum, by each of the norms in turn. */
static kn_values norms_forward(kn_module *self, kn_values in, const void *arg)
{
    norms *m = (norms *)self;
    kn_tensor *x = in.v[0], *h = in.v[1];
    void *const norm[] = { &m->layer, &m->rms, &m->other };
    (void)arg;
    for (int i = 0; i < 3; i++) {
        if (m->at_once)
            h = kn_add_norm(norm[i], x, h, &x);
        else
            h = kn_call(norm[i], x = kn_add(x, h));
    }
    return KN_VALUES(x, h);
}

static void count_values(kn_module_event *e, void *arg)
{
    int *seen = arg;
    seen[0] += e->again ? 0 : e->in.n;
    seen[1] += e->again ? 0 : e->out.n;
}

/* kn_add_norm is kn_add and a call of the norm, recomputed or not, also where another module has
 * taken the norm's place; its hooks see two tensors come and two go. */
KN_TEST(layers, norms_of_sums)
{
    kn_tensor *y[2][2], *grad[2][3];
    for (int i = 0; i < 4; i++) {
        int seen[2] = { 0 };
        for (int at_once = 0; at_once < 2; at_once++) {
            OWNED_MODULE norms m = { .at_once = at_once };
            KN_CHECK(kn_module_init_n(&m.base, norms_forward) &&
                     kn_module_defaults(&m, .dtype = KN_F64) &&
                     kn_layer_norm_init(&m.layer, &m.base, "layer", 5) &&
                     kn_rms_norm_init(&m.rms, &m.base, "rms", 5, .eps = 0.1) &&
                     kn_rms_norm_init(&m.other, &m.base, "other", 5) && kn_recompute(&m, i & 1) &&
                     kn_recompute(&m.rms, i & 2) &&
                     kn_linear_init(&m.linear, NULL, "", 5, 5, .dtype = KN_F64) &&
                     kn_module_replace(&m.base, "other", &m.linear) &&
                     kn_materialize(&m, KN_CPU, 1));
            kn_module_hook(&m.layer,
                           (kn_module_hooks){ .post_forward = count_values, .arg = seen });
            kn_tensor *x = kn_require_grad(input(3, 2, 3, 5), true),
                      *h = kn_require_grad(kn_scale(input(3, 2, 3, 5), 0.5), true);
            kn_values out = kn_call_n(&m, KN_VALUES(x, h), NULL, 0);
            kn_tensor *weigh = input(3, 2, 3, 5);
            KN_CHECK(kn_backward(sum_of(kn_mul(kn_add(out.v[0], kn_square(out.v[1])), weigh))));
            memcpy(y[at_once], out.v, sizeof y[at_once]);
            grad[at_once][0] = kn_grad(x), grad[at_once][1] = kn_grad(h);
            grad[at_once][2] = kn_scale(kn_grad(kn_module_param(&m, "rms.weight")), 1);
        }
        KN_CHECK(seen[0] == 1 + 2 && seen[1] == 1 + 2, "hooks saw %d tensors come, %d go", seen[0],
                 seen[1]);
        for (int k = 0; k < 5; k++) {
            kn_tensor *a = k < 2 ? y[0][k] : grad[0][k - 2], *b = k < 2 ? y[1][k] : grad[1][k - 2];
            KN_CHECK(a && b && memcmp(kn_data(a), kn_data(b), (size_t)kn_numel(a) * 8) == 0,
                     "case %d: other bits of tensor %d", i, k);
        }
    }
}

KN_TEST(layers, norms_of_queries_and_keys)
{
    OWNED_MODULE kn_self_attention a;
    /* The length of x doesn't change who sees whom: only values grow. */
    KN_CHECK(kn_self_attention_init(&a, NULL, "", 4, 2, .dtype = KN_F64, .qk_norm = true,
                                    .qk_norm_eps = KN_ZERO, .no_bias = true) &&
             kn_materialize(&a, KN_CPU, 1));
    kn_tensor *x = input(3, 1, 4, 4), *y = kn_call(&a, x), *z = kn_call(&a, kn_scale(x, 8));
    kn_tensor *d = kn_abs(kn_sub(kn_scale(y, 8), z));
    KN_CHECK(d && kn_item(kn_amax(d, 0, NULL, false)) < 1e-12);
    kn_module_free(&a);
    REFUSED(kn_self_attention_init(&a, NULL, "attn", 8, 4, .qk_norm_eps = 1),
            ".qk_norm_eps 1 does nothing without .qk_norm");
    REFUSED(kn_self_attention_init(&a, NULL, "attn", 8, 4, .qk_norm = true, .qk_norm_eps = -1),
            "'q_norm' has eps -1");
}

KN_TEST(layers, causal_attention_sees_no_future)
{
    OWNED_MODULE kn_self_attention a;
    kn_self_attention_init(&a, NULL, "", 4, 2, .dtype = KN_F64, .rope = true, .rope_base = 50);
    kn_materialize(&a, KN_CPU, 1);
    kn_tensor *x = kn_require_grad(input(3, 1, 4, 4), true);
    kn_tensor *second = kn_slice(kn_call(&a, x), 1, 1, 2);
    KN_CHECK(kn_backward(sum_of(second)));
    const double *g = kn_data(kn_grad(x));
    for (int i = 0; i < 16; i++)
        KN_CHECK((g[i] != 0) == (i < 8), "gradient of position %d is %g", i / 4, g[i]);
}

KN_TEST(layers, losses)
{
    double a[2] = { 1, -2 }, b[2] = { 3, 1 };
    kn_tensor *x = kn_require_grad(kn_from(KN_F64, KN_CPU, a, KN_SHAPE(2)), true),
              *y = kn_from(KN_F64, KN_CPU, b, KN_SHAPE(2));
    kn_tensor *mse = kn_mse_loss(x, y), *l1 = kn_l1_loss(x, y);
    KN_CHECK(kn_item(mse) == 6.5 && kn_item(l1) == 2.5);
    KN_CHECK(kn_backward(mse) && kn_backward(l1));
    const double *g = kn_data(kn_grad(x));
    KN_CHECK(g[0] == -2.5 && g[1] == -3.5);
}

KN_TEST(layers, bad_sizes)
{
    OWNED_MODULE kn_linear l;
    kn_rms_norm n;
    kn_dropout d;
    kn_self_attention a;
    REFUSED(kn_linear_init(&l, NULL, "fc", 0, 4), "'fc' would be 0 -> 4");
    REFUSED(kn_rms_norm_init(&n, NULL, "ln", 0), "kn_rms_norm_init: 'ln' has 0 channels");
    REFUSED(kn_dropout_init(&d, NULL, "drop", 1.5), "p 1.5");
    REFUSED(kn_self_attention_init(&a, NULL, "attn", 10, 3),
            "10 channels don't divide into 3 heads");
    REFUSED(kn_self_attention_init(&a, NULL, "attn", 8, 4, .kv_heads = 3),
            "4 heads don't divide by 3");
    kn_swiglu s;
    REFUSED(kn_swiglu_init(&s, NULL, "", 3, 0), "'gate_proj' would be 3 -> 0");
    kn_module_free(&s);
    REFUSED(kn_swiglu_init(&s, NULL, "", 3, 4, .dropout = 1), "p 1");
    kn_module_free(&s);
    kn_linear_init(&l, NULL, "", 3, 4);
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 5));
    REFUSED(kn_call(&l, x), "linear: x is f32[2,5], its last dim should be 3");
}

KN_TEST(layers, errors_of_shapes_have_them)
{
    OWNED_MODULE kn_module root;
    kn_self_attention attn = { 0 };
    kn_linear fc = { 0 };
    kn_layer_norm ln = { 0 };
    kn_module_list_init(&root, NULL, "");
    kn_self_attention_init(&attn, &root, "attn", 8, 2);
    kn_linear_init(&fc, &root, "fc", 8, 4);
    kn_layer_norm_init(&ln, &root, "ln", 8);
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 7));
    REFUSED(kn_call(&attn, x), "f32[3,7], should be [B,T,C] in attn");
    REFUSED(kn_call(&fc, x), "f32[3,7]", "f32[4,8]");
    REFUSED(kn_call(&ln, x), "f32[3,7]", "f32[8]");
}
