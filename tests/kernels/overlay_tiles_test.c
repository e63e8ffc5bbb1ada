/* tests/kernels/overlay_tiles_test.c: the fast providers against the reference (overlay.h):
 * convolutions that they cut into tiles (kernels/cpu/vec/winograd.h). */
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
