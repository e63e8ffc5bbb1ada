/* tests/kernels/overlay_tiles_test.c: the fast providers against the reference (overlay.h):
 * convolutions that they cut into tiles (kernels/cpu/vec/winograd.h), or multiply in pairs of bf16
 * (gemm_windows.h), and weights of many results. */
#include "tests/kernels/overlay_images.h"

/* Channels-last images with windows of 3 x 3 and stride 1, of sizes for which the vector provider
 * cuts them into tiles: odd and even images, several blocks and chunks of tiles, and groups of
 * channels. */
static kn_conv_args tiles_begin(overlay_case *c, int i, int64_t *xs, int64_t *ws, int64_t *ys)
{
    static const int64_t sizes[4][3] = {
        { 32, 32, 9 }, { 35, 130, 6 }, { 65, 70, 17 }, { 261, 64, 8 }
    };
    const int64_t *s = sizes[i % 4];
    kn_conv_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 } };
    xs[0] = i % 8 == 2 ? 10 : 1 + i % 8 / 2, xs[1] = ws[1] = s[0], ws[0] = ys[1] = s[1];
    ys[0] = xs[0], ws[2] = ws[3] = 3;
    for (int d = 0; d < 2; d++) {
        a.pad[d] = case_pick(c, 4);
        xs[2 + d] = s[2] + case_pick(c, 4);
        ys[2 + d] = positions(xs[2 + d], 3, a.pad[d], 1, 1);
    }
    case_note(c, " pad %d %d", (int)a.pad[0], (int)a.pad[1]);
    return a;
}

OVERLAY(overlay_tiles, conv_of_tiles, CONV, 7000, overlay_cases(32))
{
    int64_t xs[4], ws[4], ys[4];
    kn_conv_args a = tiles_begin(c, i, xs, ws, ys);
    const kn_dtype t = case_float(c);
    a.x = image_last(c, t, NORMAL, xs);
    a.w = image(c, t, NORMAL, ws);
    a.y = image_last(c, t, UNSET, ys);
    if (case_pick(c, 2))
        a.bias = case_vector(c, case_pick(c, 2) ? t : KN_F32, NORMAL, ys[1]);
    case_close(c, &a.y, sum_error(9 * xs[1]));
    case_run(c, &a);
}

OVERLAY(overlay_tiles, conv_grad_x_of_tiles, CONV_GRAD_X, 7100, overlay_cases(32))
{
    int64_t xs[4], ws[4], ys[4];
    const kn_conv_args v = tiles_begin(c, i, xs, ws, ys);
    const kn_dtype t = case_float(c);
    kn_conv_grad_x_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 } };
    memcpy(a.pad, v.pad, sizeof a.pad);
    a.dy = image_last(c, t, NORMAL, ys);
    a.w = image(c, t, NORMAL, ws);
    a.dx = image_last(c, t, UNSET, xs);
    case_close(c, &a.dx, sum_error(9 * ys[1]));
    case_run(c, &a);
}

OVERLAY(overlay_tiles, conv_grad_w_of_tiles, CONV_GRAD_W, 7200, overlay_cases(32))
{
    int64_t xs[4], ws[4], ys[4];
    const kn_conv_args v = tiles_begin(c, i, xs, ws, ys);
    const kn_dtype t = case_float(c);
    kn_conv_grad_w_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 } };
    memcpy(a.pad, v.pad, sizeof a.pad);
    a.dy = image_last(c, t, NORMAL, ys);
    a.x = image_last(c, t, NORMAL, xs);
    a.dw = image(c, t != KN_F64 && case_pick(c, 2) ? KN_F32 : t, UNSET, ws);
    case_close(c, &a.dw, sum_error(ys[0] * ys[2] * ys[3]));
    case_run(c, &a);
}

/* Windows of bf16 in pairs: odd numbers of positions, pads, and panels that aren't full. */
OVERLAY(overlay_tiles, conv_grad_w_of_windows, CONV_GRAD_W, 6300, overlay_cases(64))
{
    const int64_t C = 32 + case_pick(c, 40), O = 32 + case_pick(c, 20), N = 1 + case_pick(c, 3);
    const kn_dtype t = i % 8 ? KN_BF16 : case_float(c);
    kn_conv_grad_w_args a = { .groups = 1 };
    int64_t x[4] = { N, C }, y[4] = { N, O }, w[4] = { O, C };
    for (int d = 0; d < 2; d++) {
        w[2 + d] = 1 + case_pick(c, 4);
        a.stride[d] = 1 + d + case_pick(c, 2), a.dilation[d] = 1 + case_pick(c, 3) / 2;
        a.pad[d] = case_pick(c, w[2 + d] + 1);
        x[2 + d] = a.dilation[d] * (w[2 + d] - 1) + 1 + case_pick(c, 30 >> 3 * d);
        y[2 + d] = positions(x[2 + d], w[2 + d], a.pad[d], a.stride[d], a.dilation[d]);
        case_note(c, " stride %d pad %d dilation %d", (int)a.stride[d], (int)a.pad[d],
                  (int)a.dilation[d]);
    }
    a.dy = image_last(c, t, NORMAL, y);
    a.x = image_last(c, t, NORMAL, x);
    a.dw = image(c, i % 2 && t != KN_F64 ? KN_F32 : t, UNSET, w);
    case_close(c, &a.dw, sum_error(N * y[2] * y[3]));
    case_run(c, &a);
}

/* Weights that oneDNN is given channels-last, of many results. */
OVERLAY(overlay_tiles, conv_of_many_results, CONV, 6400, overlay_cases(24))
{
    const int64_t C = 16 + case_pick(c, 32), O = 65 + case_pick(c, 300), kernel = 1 + i % 2 * 2;
    const int64_t H = 2 + case_pick(c, 6), stride = 1 + case_pick(c, 2);
    const int64_t P = positions(H, kernel, kernel / 2, stride, 1);
    const kn_dtype t = i % 3 ? KN_BF16 : case_float(c);
    kn_conv_args a = { .groups = 1, .stride = { stride, stride }, .dilation = { 1, 1 } };
    a.pad[0] = a.pad[1] = kernel / 2;
    a.x = image_last(c, t, NORMAL, (int64_t[]){ 2, C, H, H });
    a.w = image(c, t, NORMAL, (int64_t[]){ O, C, kernel, kernel });
    a.y = image_last(c, t, UNSET, (int64_t[]){ 2, O, P, P });
    case_close(c, &a.y, sum_error(C * kernel * kernel));
    case_run(c, &a);
}

/* Bytes of an image alone, which lies at a; all are dense. */
static size_t image_bytes(const kn_array *a)
{
    return (size_t)kn_array_numel(a) * kn_dtype_size(a->dtype) / (size_t)a->shape[0];
}

static kn_array image_alone(const kn_array *a, int64_t i)
{
    kn_array b = *a;
    b.shape[0] = 1;
    b.data = (char *)a->data + (size_t)i * image_bytes(a);
    return b;
}

static kn_array dense_last(overlay_case *c, kn_dtype t, values v, const int64_t *n)
{
    kn_array a = case_array(c, t, DENSE, v, 4, n);
    a.stride[0] = n[1] * n[2] * n[3], a.stride[1] = 1;
    a.stride[2] = n[1] * n[3], a.stride[3] = n[1];
    return a;
}

/* Whichever provider takes a batch: its choice must not depend on the number of images. */
KN_TEST(overlay_tiles, images_have_the_same_bits_in_every_batch)
{
    static const int64_t sizes[][4] = { /* channels of x and y, then an image */
                                        { 64, 48, 7, 7 }, { 32, 65, 4, 5 }, { 40, 32, 3, 3 },
                                        { 64, 64, 2, 2 }, { 33, 64, 1, 9 }, { 96, 33, 12, 2 }
    };
    kn_stream *s = kn_compute_stream(KN_CPU);
    for (int i = 0; i < 6 * 3 * 2; i++) {
        const int64_t *n = sizes[i / 6], N = 7;
        const kn_dtype t = (kn_dtype[]){ KN_F32, KN_BF16, KN_F16 }[i / 2 % 3];
        overlay_case *c = case_begin(KN_K_CONV, (uint64_t)i);
        kn_conv_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 }, .pad = { 1, 1 } };
        a.x = dense_last(c, t, NORMAL, (int64_t[]){ N, n[0], n[2], n[3] });
        a.y = dense_last(c, t, NORMAL, (int64_t[]){ N, n[1], n[2], n[3] });
        a.w = case_array(c, t, DENSE, NORMAL, 4, (int64_t[]){ n[1], n[0], 3, 3 });
        kn_conv_grad_x_args g = { .dx = a.x, .dy = a.y, .w = a.w, .groups = 1 };
        memcpy(g.stride, a.stride, sizeof g.stride);
        memcpy(g.dilation, a.dilation, sizeof g.dilation);
        memcpy(g.pad, a.pad, sizeof g.pad);
        const bool forward = i % 2 == 0;
        const kn_array *to = forward ? &a.y : &g.dx;
        const size_t bytes = image_bytes(to);
        OWNED_BYTES char *whole = malloc((size_t)N * bytes);
        KN_CHECK(whole &&
                 (forward ? KN_LAUNCH(s, KN_K_CONV, a) : KN_LAUNCH(s, KN_K_CONV_GRAD_X, g)));
        memcpy(whole, to->data, (size_t)N * bytes);
        for (int64_t k = 0; k < N; k++) {
            kn_conv_args one = a;
            kn_conv_grad_x_args back = g;
            one.x = back.dx = image_alone(&a.x, k), one.y = back.dy = image_alone(&a.y, k);
            KN_CHECK(forward ? KN_LAUNCH(s, KN_K_CONV, one) : KN_LAUNCH(s, KN_K_CONV_GRAD_X, back));
            KN_CHECK(
                memcmp((char *)to->data + (size_t)k * bytes, whole + (size_t)k * bytes, bytes) == 0,
                "%s%s: image %d has other bits alone", forward ? "conv" : "conv_grad_x", c->what,
                (int)k);
        }
    }
}

/* A tile's elements are summed before they are multiplied: none may come into sums of windows that
 * don't see it. */
KN_TEST(overlay_tiles, an_element_reaches_only_the_windows_that_see_it)
{
    const int64_t xs[4] = { 2, 33, 7, 8 }, ws[4] = { 36, 33, 3, 3 }, ys[4] = { 2, 36, 7, 8 };
    overlay_case *c = case_begin(KN_K_CONV, 1);
    kn_conv_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 }, .pad = { 1, 1 } };
    a.x = dense_last(c, KN_F32, NORMAL, xs);
    a.w = case_array(c, KN_F32, DENSE, NORMAL, 4, ws);
    a.y = dense_last(c, KN_F32, UNSET, ys);
    float *x = a.x.data, *y = a.y.data;
    float before[2 * 7 * 8 * 36];
    KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_CONV, a));
    memcpy(before, y, sizeof before);
    for (int at = 0; at < 7 * 8; at++) { /* of the second image */
        float *one = x + (7 * 8 + at) * 33 + at % 33;
        const float kept = *one;
        *one = at % 2 ? NAN : INFINITY;
        KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_CONV, a));
        *one = kept;
        for (int i = 0; i < 2 * 7 * 8 * 36; i++) {
            const int p = i / 36 - 7 * 8;
            const bool sees = p >= 0 && abs(p / 8 - at / 8) < 2 && abs(p % 8 - at % 8) < 2;
            KN_CHECK(sees ? !isfinite(y[i]) : y[i] == before[i], "element %d, sum %d: %g", at, i,
                     (double)y[i]);
        }
    }
}
