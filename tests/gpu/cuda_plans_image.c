/* tests/gpu/cuda_plans_image.c: cuDNN's plans for the layers of ResNet-50 and for odd ones, and
 * cases that must be declined. */
#include "kernels/device.h"
#include "tests/gpu/cuda_plans.h"

#include <stdio.h>
#include <string.h>

#define HAS(notes, n) (((notes) >> CUDNN_NUMERICAL_NOTE_##n) & 1)

typedef enum order { LAST, FIRST, GAPS } order; /* channels-last; the order of dims; not packed */

typedef struct conv {
    const char *name;
    int64_t n, c, h, o, r, stride, pad, dilation, groups;
    kn_dtype dtype, other; /* other: of bias or dw, KN_DTYPE_DEFAULT: none, or dtype */
    order image, weight;
    /* Of y, x, w: those that have a plan on every device, else Knap's kernel runs. */
    const char *takes;
} conv;

static const conv convs[] = {
    { "stem", 64, 3, 224, 64, 7, 2, 3, 1, 1, KN_BF16, 0, LAST, LAST, "yxw" },
    { "3x3", 64, 64, 56, 64, 3, 1, 1, 1, 1, KN_BF16, 0, LAST, LAST, "yxw" },
    { "3x3 down", 64, 128, 56, 128, 3, 2, 1, 1, 1, KN_BF16, 0, LAST, LAST, "yxw" },
    { "1x1 up", 64, 256, 14, 1024, 1, 1, 0, 1, 1, KN_BF16, 0, LAST, FIRST, "yxw" },
    { "1x1 down", 64, 1024, 14, 2048, 1, 2, 0, 1, 1, KN_F16, 0, LAST, LAST, "yxw" },
    { "3x3 deep", 64, 512, 7, 512, 3, 1, 1, 1, 1, KN_BF16, 0, LAST, FIRST, "yxw" },
    { "channels first", 64, 128, 28, 128, 3, 1, 1, 1, 1, KN_BF16, 0, FIRST, FIRST, "yxw" },
    { "bias", 64, 64, 56, 64, 3, 1, 1, 1, 1, KN_BF16, KN_BF16, LAST, LAST, "y" },
    { "stem, dw f32", 64, 3, 224, 64, 7, 2, 3, 1, 1, KN_BF16, KN_F32, LAST, FIRST, "w" },
    { "3x3, dw f32", 64, 64, 56, 64, 3, 1, 1, 1, 1, KN_BF16, KN_F32, LAST, FIRST, "w" },
    { "dw f32, first", 64, 128, 28, 128, 3, 1, 1, 1, 1, KN_F16, KN_F32, FIRST, FIRST, "w" },
    { "f32", 64, 64, 56, 64, 3, 1, 1, 1, 1, KN_F32, 0, FIRST, FIRST, "yxw" },
    { "f32 last", 8, 64, 28, 96, 3, 1, 1, 1, 1, KN_F32, 0, LAST, LAST, "yxw" },
    { "f32 stem", 8, 3, 64, 32, 7, 2, 3, 1, 1, KN_F32, 0, FIRST, FIRST, "yxw" },
    { "dilated", 8, 64, 28, 64, 3, 1, 2, 2, 1, KN_F16, 0, LAST, LAST, "yxw" },
    { "groups", 8, 256, 14, 256, 3, 1, 1, 1, 32, KN_BF16, 0, LAST, LAST, "yxw" },
    { "f64", 2, 8, 9, 8, 3, 1, 1, 1, 1, KN_F64, 0, FIRST, FIRST, "" },
    { "gaps", 2, 8, 9, 8, 3, 1, 1, 1, 1, KN_BF16, 0, GAPS, FIRST, "" },
};

/* An address that is never read. */
static kn_array image(kn_dtype t, order how, int64_t n, int64_t c, int64_t h, int64_t w)
{
    int64_t shape[4] = { n, c, h, w };
    kn_array a = kn_array_make((void *)((uintptr_t)1 << 20), t, 4, shape);
    if (how == LAST)
        a.stride[0] = h * w * c, a.stride[1] = 1, a.stride[2] = w * c, a.stride[3] = c;
    if (how == GAPS)
        a.stride[0] *= 2;
    return a;
}

static kn_array vector(kn_dtype t, int64_t n)
{
    return kn_array_make((void *)((uintptr_t)1 << 20), t, 1, &n);
}

static bool try_conv(const char *json, int arch, const conv *c, char which, kn_dnn_found *found)
{
    int64_t p = (c->h + 2 * c->pad - (c->r - 1) * c->dilation - 1) / c->stride + 1;
    kn_dtype dw = which == 'w' && c->other ? c->other : c->dtype;
    kn_array x = image(c->dtype, c->image, c->n, c->c, c->h, c->h),
             y = image(c->dtype, c->image, c->n, c->o, p, p),
             w = image(dw, c->weight, c->o, c->c / c->groups, c->r, c->r);
    kn_conv_args forward = { .y = y, .x = x, .w = w, .groups = c->groups };
    kn_conv_grad_x_args by_x = { .dx = x, .dy = y, .w = w, .groups = c->groups };
    kn_conv_grad_w_args by_w = { .dw = w, .dy = y, .x = x, .groups = c->groups };
    for (int d = 0; d < 2; d++) {
        forward.stride[d] = by_x.stride[d] = by_w.stride[d] = c->stride;
        forward.pad[d] = by_x.pad[d] = by_w.pad[d] = c->pad;
        forward.dilation[d] = by_x.dilation[d] = by_w.dilation[d] = c->dilation;
    }
    if (c->other)
        forward.bias = vector(c->other, c->o);
    if (which == 'y')
        return kn_cudnn_try(json, arch, KN_K_CONV, &forward, found);
    return which == 'x' ? kn_cudnn_try(json, arch, KN_K_CONV_GRAD_X, &by_x, found)
                        : kn_cudnn_try(json, arch, KN_K_CONV_GRAD_W, &by_w, found);
}

/* f32 is multiplied exactly unless TF32 is allowed. */
static bool notes_fit(const conv *c, bool tf32, bool deterministic, const kn_dnn_found *found)
{
    bool wide = c->dtype == KN_F32 && !tf32;
    return !(wide && HAS(found->notes, TENSOR_CORE)) && !HAS(found->notes, FFT) &&
           !HAS(found->notes, WINOGRAD) && !HAS(found->notes, DOWN_CONVERT_INPUTS) &&
           !(deterministic && HAS(found->notes, NONDETERMINISTIC));
}

/* Plans that the options exclude exist without them: else the checks of notes would be empty. */
static int cores, varying;

static void plan_convs(const char *json, int arch, bool tf32, bool deterministic)
{
    char what[160];
    kn_set_f32_products(tf32 ? KN_PRODUCTS_TF32 : KN_PRODUCTS_EXACT);
    kn_cuda_deterministic(deterministic);
    for (size_t i = 0; i < sizeof convs / sizeof *convs; i++)
        for (const char *which = "yxw"; *which; which++) {
            const conv *c = &convs[i];
            kn_dnn_found found = { 0 };
            bool taken = strchr(c->takes, *which);
            /* cases that depend on neither option run once; f32 dw, slow to compile, runs less
             * often */
            if ((tf32 || deterministic) && (c->dtype != KN_F32 || c->other))
                continue;
            if (!taken && c->takes[0]) /* not tested by this case */
                continue;
            if (!plan_mine(c->dtype == KN_F32))
                continue;
            bool made = try_conv(json, arch, c, *which, &found);
            cores += made && tf32 && HAS(found.notes, TENSOR_CORE);
            varying += made && c->dtype == KN_F32 && !tf32 && !deterministic &&
                       HAS(found.notes, NONDETERMINISTIC);
            snprintf(what, sizeof what, "sm_%d conv %c %s %s%s%s", arch, *which, c->name,
                     kn_dtype_name(c->dtype), tf32 ? " tf32" : "",
                     deterministic ? " deterministic" : "");
            plan_line(made == taken && (!made || notes_fit(c, tf32, deterministic, &found)), what,
                      made, &found);
        }
    kn_set_f32_products(KN_PRODUCTS_EXACT);
    kn_cuda_deterministic(false);
}

typedef struct norm {
    const char *name;
    int64_t n, c, h;
    kn_dtype dtype, vectors;
    order image;
    bool eval, running, backward, taken;
} norm;

static const norm norms[] = {
    { "56", 64, 256, 56, KN_BF16, KN_F32, LAST, false, true, false, true },
    { "7 backward", 64, 2048, 7, KN_F16, KN_F32, LAST, false, false, true, true },
    { "C 8", 8, 8, 28, KN_BF16, KN_F32, LAST, false, false, false, true },
    { "C 3", 8, 3, 28, KN_BF16, KN_F32, LAST, false, true, false, false },
    { "eval", 8, 64, 28, KN_BF16, KN_F32, LAST, true, true, false, false },
    { "eval backward", 8, 64, 28, KN_BF16, KN_F32, LAST, true, true, true, false },
    { "f32", 8, 64, 28, KN_F32, KN_F32, LAST, false, true, false, false },
    { "bf16 vectors", 8, 64, 28, KN_BF16, KN_BF16, LAST, false, false, false, false },
    { "one element", 1, 64, 1, KN_BF16, KN_F32, LAST, false, true, false, false },
};

static void plan_norms(const char *json, int arch)
{
    char what[160];
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++) {
        const norm *t = &norms[i];
        if (!plan_mine(false))
            continue;
        kn_dnn_found found = { 0 };
        kn_array x = image(t->dtype, t->image, t->n, t->c, t->h, t->h),
                 v = vector(t->vectors, t->c), stat = vector(KN_F32, t->c);
        kn_batch_norm_args f = {
            .y = x, .x = x, .w = v, .b = v, .mean = stat, .rstd = stat, .training = !t->eval
        };
        kn_batch_norm_grad_args b = { .dx = x,
                                      .dw = v,
                                      .db = v,
                                      .dy = x,
                                      .x = x,
                                      .w = v,
                                      .mean = stat,
                                      .rstd = stat,
                                      .training = !t->eval };
        if (t->running)
            f.running_mean = f.running_var = stat;
        bool made = t->backward ? kn_cudnn_try(json, arch, KN_K_BATCH_NORM_GRAD, &b, &found)
                                : kn_cudnn_try(json, arch, KN_K_BATCH_NORM, &f, &found);
        snprintf(what, sizeof what, "sm_%d batch norm %s %s", arch, t->name,
                 kn_dtype_name(t->dtype));
        plan_line(made == t->taken, what, made, &found);
    }
}

void plan_images(const char *json, int arch)
{
    plan_convs(json, arch, false, false);
    plan_convs(json, arch, true, false);
    plan_convs(json, arch, false, true);
    if (plan_mine(true)) {
        plan_line(cores > 0, "some f32 on tensor cores where TF32 is allowed", true, NULL);
        plan_line(varying > 0, "some gradient of varying bits where that is allowed", true, NULL);
    }
    plan_norms(json, arch);
}
