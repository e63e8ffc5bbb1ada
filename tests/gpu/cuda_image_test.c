/* tests/gpu/cuda_image_test.c: parts of the CUDA kernels for images that the overlay's cases don't
 * reach, on the host (tests/gpu/emulator/emulate.h): sums so long that they are split into parts,
 * in both layouts. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "tests/kernels/overlay.h"

#include <math.h>

/* [N,C,H,W], channels-last or not. */
static kn_array image(overlay_case *c, kn_dtype t, values v, bool last, int64_t N, int64_t C,
                      int64_t H, int64_t W)
{
    kn_array a =
        case_array(c, t, DENSE, v, 4, last ? (int64_t[]){ N, H, W, C } : (int64_t[]){ N, C, H, W });
    if (!last)
        return a;
    kn_array b = a;
    const int from[4] = { 0, 3, 1, 2 };
    for (int d = 0; d < 4; d++) {
        b.shape[d] = a.shape[from[d]];
        b.stride[d] = a.stride[from[d]];
    }
    return b;
}

/* Values around 50: a variance from squares would lose half of its digits. */
static void lift(const kn_array *x)
{
    for (int64_t i = 0; i < kn_array_numel(x); i++)
        case_set(x, i, case_get(x, i) + 50);
}

static const kn_dtype floats[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };

OVERLAY(cuda_image, batch_norm_of_many, BATCH_NORM, 1000, 16)
{
    bool last = i / 4 % 2, odd = i / 8;
    int64_t N = 5, C = last ? (odd ? 9 : 40) : 3, H = 31 + odd, W = 64 - odd;
    kn_dtype t = floats[i % 4], stat = t == KN_F64 ? KN_F64 : KN_F32;
    kn_batch_norm_args a = { .eps = 1e-5, .momentum = 0.1, .training = true };
    a.x = image(c, t, NORMAL, last, N, C, H, W);
    a.y = image(c, t, UNSET, last, N, C, H, W);
    lift(&a.x);
    a.w = case_vector(c, stat, NORMAL, C);
    a.b = case_vector(c, stat, NORMAL, C);
    a.mean = case_vector(c, stat, UNSET, C);
    a.rstd = case_vector(c, stat, UNSET, C);
    a.running_mean = case_vector(c, stat, NORMAL, C);
    a.running_var = case_vector(c, stat, POSITIVE, C);
    case_close(c, &a.y, 3e-5);
    case_close(c, &a.mean, 1e-6);
    case_close(c, &a.rstd, 1e-6);
    case_close(c, &a.running_mean, 1e-6);
    case_close(c, &a.running_var, 1e-6);
    case_run(c, &a);
}

OVERLAY(cuda_image, batch_norm_grad_of_many, BATCH_NORM_GRAD, 1000, 16)
{
    bool last = i / 4 % 2, odd = i / 8;
    int64_t N = 5, C = last ? (odd ? 9 : 40) : 3, H = 31 + odd, W = 64 - odd;
    kn_dtype t = floats[i % 4], stat = t == KN_F64 ? KN_F64 : KN_F32;
    kn_batch_norm_grad_args a = { .training = true };
    a.x = image(c, t, NORMAL, last, N, C, H, W);
    a.dy = image(c, t, NORMAL, last, N, C, H, W);
    a.dx = image(c, t, UNSET, last, N, C, H, W);
    a.w = case_vector(c, stat, NORMAL, C);
    a.dw = case_vector(c, stat, UNSET, C);
    a.db = case_vector(c, stat, UNSET, C);
    a.mean = case_vector(c, stat, SMALL, C);
    a.rstd = case_vector(c, stat, POSITIVE, C);
    case_close(c, &a.dx, 2e-4);
    case_close(c, &a.dw, 2e-6 * (double)(N * H * W));
    case_close(c, &a.db, 2e-6 * (double)(N * H * W));
    case_run(c, &a);
}

/* Tiles, and elements where groups are small, each of several parts. */
OVERLAY(cuda_image, conv_grad_w_of_many, CONV_GRAD_W, 1000, 16)
{
    bool last = i / 4 % 2, depthwise = i / 8;
    int64_t N = 3, H = 26, W = 33, C = depthwise ? 2 : 5, O = depthwise ? 2 : 9;
    kn_dtype t = floats[i % 4];
    kn_conv_grad_w_args a = { .groups = depthwise ? C : 1 };
    for (int d = 0; d < 2; d++)
        a.stride[d] = a.pad[d] = a.dilation[d] = 1;
    a.dy = image(c, t, NORMAL, last, N, O, H, W);
    a.x = image(c, t, NORMAL, last, N, C, H, W);
    a.dw = image(c, t == KN_F16 ? KN_F32 : t, UNSET, false, O, C / a.groups, 3, 3);
    case_close(c, &a.dw, 1.6e-6 * (double)(N * H * W));
    case_run(c, &a);
}

/* Sides that overflow a count are an error and don't wrap around. */
KN_TEST(cuda_image, conv_of_enormous_windows)
{
    float x[4] = { 1 }, w[4] = { 1 }, y[4] = { 0 };
    kn_conv_args a = { .y = kn_array_make(y, KN_F32, 4, (int64_t[]){ 1, 1, 2, 2 }),
                       .x = kn_array_make(x, KN_F32, 4, (int64_t[]){ 1, 1, 2, 2 }),
                       .w = kn_array_make(w, KN_F32, 4, (int64_t[]){ 1, 1, 2, 2 }),
                       .stride = { 1, 1 },
                       .dilation = { (int64_t)1 << 40, 1 },
                       .groups = 1 };
    KN_CHECK(kn_cuda_kernels.run[KN_K_CONV](&a) == KN_FAILED, "taken");
    KN_CHECK_ERROR("more than 10^9 positions");
}

static kn_status run_own(kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    KN_CHECK(overlay_providers(providers) == 1);
    return providers[0]->run[k](args);
}

/* Without y, relu's mask is made from x again: it must be the forward's also where rounding decides
 * whether a value is above 0. */
KN_TEST(cuda_image, relu_masks_what_the_forward_masked)
{
    enum { C = 37, S = 64 };
    int beside = 0;
    for (int last = 0; last < 2; last++) {
        overlay_case *c = case_begin(KN_K_BATCH_NORM, 9000 + (uint64_t)last);
        kn_batch_norm_args f = { .eps = 1e-5, .relu = true };
        f.x = image(c, KN_F32, NORMAL, last, 2, C, 8, S / 8);
        f.y = image(c, KN_F32, UNSET, last, 2, C, 8, S / 8);
        kn_array dy = image(c, KN_F32, NORMAL, last, 2, C, 8, S / 8);
        kn_array dadd = image(c, KN_F32, UNSET, last, 2, C, 8, S / 8);
        f.w = case_vector(c, KN_F32, NORMAL, C);
        f.b = case_vector(c, KN_F32, NORMAL, C);
        f.mean = case_vector(c, KN_F32, UNSET, C);
        f.rstd = case_vector(c, KN_F32, UNSET, C);
        f.running_mean = case_vector(c, KN_F32, NORMAL, C);
        f.running_var = case_vector(c, KN_F32, POSITIVE, C);
        for (int64_t i = 0; i < 2 * C * S; i++) { /* around where the result is 0 */
            const int64_t k = last ? i % C : i / S % C;
            const double sd = sqrt(case_get(&f.running_var, k) + f.eps);
            float x =
                (float)(case_get(&f.running_mean, k) - case_get(&f.b, k) * sd / case_get(&f.w, k));
            for (int64_t up = i / 7 % 9 - 4; up; up += up > 0 ? -1 : 1)
                x = nextafterf(x, up > 0 ? INFINITY : -INFINITY);
            ((float *)f.x.data)[i] = x, ((float *)dy.data)[i] = 1;
        }
        kn_batch_norm_grad_args g = { .dadd = dadd, .dy = dy, .x = f.x, .w = f.w, .b = f.b };
        g.mean = f.mean, g.rstd = f.rstd, g.relu = true;
        KN_CHECK(run_own(KN_K_BATCH_NORM, &f) == KN_DONE);
        KN_CHECK(run_own(KN_K_BATCH_NORM_GRAD, &g) == KN_DONE);
        for (int64_t i = 0; i < 2 * C * S; i++) {
            const float y = ((float *)f.y.data)[i], d = ((float *)dadd.data)[i];
            KN_CHECK((y > 0) == (d > 0), "element %lld: y %.9g, but a gradient of %g", (long long)i,
                     (double)y, (double)d);
            beside += y > 0;
        }
    }
    KN_CHECK(beside > C * S / 2 && beside < 4 * C * S - C * S / 2, "%d of %d", beside, 4 * C * S);
}
