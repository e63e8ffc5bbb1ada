/* tests/gpu/cuda_image_test.c: parts of the CUDA kernels for images that the overlay's cases don't
 * reach, on the host (tests/gpu/emulator/emulate.h): sums so long that they are split into parts,
 * in both layouts. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "tests/kernels/overlay.h"

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

KN_TEST(cuda_image, batch_norm_of_many)
{
    for (int i = 0; i < 16; i++) {
        overlay_case *c = case_begin(KN_K_BATCH_NORM, 1000 + (uint64_t)i);
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
}

KN_TEST(cuda_image, batch_norm_grad_of_many)
{
    for (int i = 0; i < 16; i++) {
        overlay_case *c = case_begin(KN_K_BATCH_NORM_GRAD, 1000 + (uint64_t)i);
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
}

/* Tiles, and elements where groups are small, each of several parts. */
KN_TEST(cuda_image, conv_grad_w_of_many)
{
    for (int i = 0; i < 16; i++) {
        overlay_case *c = case_begin(KN_K_CONV_GRAD_W, 1000 + (uint64_t)i);
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
