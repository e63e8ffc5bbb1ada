/* tests/models/vision_golden_test.c: logits, losses, running statistics and gradients of residual
 * nets and a vision transformer against those of torchvision and timm (bench/peers/vision.py). */
#include "models/resnet.h"
#include "models/vit.h"
#include "tests/owned.h"

#include "tests/models/vision_golden.h"

enum { CASES = sizeof golden / sizeof *golden };

typedef union any_net {
    kn_module base;
    kn_resnet resnet;
    kn_vit vit;
} any_net;

/* Element i of a tensor is a function of its name and i: bench/peers/vision.py has the same. */
static double *values(const char *name, int ndim, const int64_t *shape, int64_t n)
{
    double *w = malloc((size_t)n * sizeof *w);
    double width = ndim < 2 ? 0.4 : sqrt(24 * (double)shape[0] / (double)n);
    bool shifted = ndim == 1 && (strstr(name, "weight") || strstr(name, "running_var"));
    uint32_t hash = 2166136261u;
    for (const char *c = name; *c; c++)
        hash = (hash ^ (uint32_t)*c) * 16777619u;
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = (uint32_t)i * 2654435761u + hash;
        u = (u ^ u >> 16) * 0x85ebca6bu;
        u ^= u >> 13;
        w[i] = ((double)u / 4294967296.0 - 0.5) * width + shifted;
        if (strstr(name, "bn3."))
            w[i] /= 4;
    }
    return w;
}

static void fill(const char *name, kn_tensor *t)
{
    int64_t n = kn_numel(t);
    OWNED_BYTES double *w = values(name, kn_ndim(t), kn_shape(t), n);
    for (int64_t i = 0; i < n; i++) {
        if (kn_dtype_of(t) == KN_F64)
            ((double *)kn_data(t))[i] = w[i];
        else
            ((float *)kn_data(t))[i] = (float)w[i];
    }
}

static bool fill_buffers(kn_module *m, void *arg)
{
    (void)arg;
    for (int i = 0; i < kn_module_buffers(m); i++) {
        const char *own;
        char name[128];
        kn_tensor *t = kn_module_buffer_at(m, i, &own);
        snprintf(name, sizeof name, "%s.%s", kn_module_path(m), own);
        if (kn_dtype_of(t) != KN_I64)
            fill(name, t);
    }
    return true;
}

static bool add_squares(kn_module *m, void *arg)
{
    double *sum = arg;
    for (int i = 0; i < kn_module_buffers(m); i++) {
        kn_tensor *t = kn_module_buffer_at(m, i, NULL);
        if (kn_dtype_of(t) != KN_I64)
            *sum += pow(kn_item(kn_norm(kn_cast(t, KN_F64), 2, 0, NULL, false)), 2);
    }
    return true;
}

static void begin(any_net *net, int which, kn_dtype dtype)
{
    const char *preset = golden[which].preset;
    const kn_param *p;
    if (strncmp(preset, "vit", 3) == 0) {
        kn_vit_config c;
        KN_CHECK(kn_vit_preset(preset, &c));
        c.image = golden[which].rows, c.patch = 8, c.classes = CLASSES;
        KN_CHECK(kn_vit_init(&net->vit, c, dtype, KN_META));
    } else {
        kn_resnet_config c;
        KN_CHECK(kn_resnet_preset(preset, &c));
        c.small_images = golden[which].small_images, c.classes = CLASSES;
        KN_CHECK(kn_resnet_init(&net->resnet, c, dtype, KN_META));
    }
    KN_CHECK(kn_materialize(net, KN_CPU, 1));
    int n = kn_params(net, &p);
    for (int i = 0; i < n; i++)
        fill(p[i].name, p[i].tensor);
    kn_apply_modules(net, fill_buffers, NULL);
}

/* The largest distance of x's elements from want[n], as a part of the larger of 1 and want. */
static double far_from(kn_tensor *x, const double *want, int64_t n)
{
    double worst = 0, got[BATCH * CLASSES];
    KN_CHECK(x && kn_to_host(kn_cast(x, KN_F64), got, (size_t)n * sizeof *got));
    for (int64_t i = 0; i < n; i++)
        worst = fmax(worst, fabs(got[i] - want[i]) / fmax(1, fabs(want[i])));
    return worst;
}

static kn_tensor *images(int which, kn_dtype dtype)
{
    const int64_t shape[] = { BATCH, 3, golden[which].rows, golden[which].columns };
    int64_t n = shape[0] * shape[1] * shape[2] * shape[3];
    OWNED_BYTES double *w = values("images", 4, shape, n);
    for (int64_t i = 0; i < n; i++)
        w[i] *= 10;
    kn_tensor *x = kn_cast(kn_from(KN_F64, KN_CPU, w, 4, shape), dtype);
    return x;
}

static void check_case(int which, kn_dtype dtype, double bound)
{
    OWNED_MODULE any_net net = { 0 };
    const char *preset = golden[which].preset;
    begin(&net, which, dtype);
    IN_SCOPE;
    kn_tensor *x = images(which, dtype);
    int64_t label[BATCH];
    for (int i = 0; i < BATCH; i++)
        label[i] = (5 * i + 2) % CLASSES;
    kn_train(&net, false);
    double off = far_from(kn_call(&net, x), golden[which].logits, (int64_t)BATCH * CLASSES);
    KN_CHECK(off < bound, "%s: logits are off by %g", preset, off);
    kn_train(&net, true);
    kn_tensor *y = kn_from(KN_I64, KN_CPU, label, KN_SHAPE(BATCH));
    kn_tensor *loss = kn_cross_entropy(kn_call(&net, x), y);
    off = far_from(loss, &golden[which].loss, 1);
    KN_CHECK(off < bound && kn_backward(loss), "%s: the loss is off by %g", preset, off);
    double moved = 0;
    kn_apply_modules(&net, add_squares, &moved);
    off = fabs(sqrt(moved) - golden[which].moved) / fmax(1, golden[which].moved);
    KN_CHECK(off < bound, "%s: running statistics are off by %g", preset, off);
    for (int i = 0; i < GRADS; i++) {
        kn_tensor *grad = kn_grad(kn_module_param(&net, golden[which].name[i]));
        kn_tensor *norm = kn_norm(kn_cast(grad, KN_F64), 2, 0, NULL, false);
        off = far_from(norm, &golden[which].grad[i], 1);
        KN_CHECK(off < bound, "%s: the gradient of %s is off by %g", preset, golden[which].name[i],
                 off);
    }
}

/* The large nets take minutes in f64 on the reference kernels. */
KN_TEST(vision_golden, f64)
{
    for (int i = 0; i < CASES; i++)
        if (strcmp(golden[i].preset, "resnet20") == 0)
            check_case(i, KN_F64, 1e-9);
}

/* Nets of 11 million parameters take AddressSanitizer ten seconds each; small ones have the same
 * layers. */
KN_TEST(vision_golden, f32)
{
    for (int i = 0; i < CASES; i++)
        if (kn_one_in(2) == 1 || (strcmp(golden[i].preset, "resnet18") != 0 &&
                                  strcmp(golden[i].preset, "resnet50") != 0))
            check_case(i, KN_F32, 1e-4);
}
