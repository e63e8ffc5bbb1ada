/* tests/kernels/overlay_image_test.c: the fast providers against the reference (overlay.h):
 * convolution, batch norm, pooling. */
#include "kernels/checks.h"
#include "tests/kernels/overlay_images.h"

/* ---- convolution --------------------------------------------------------------------------- */

typedef struct conv_case {
    kn_conv_args a;
    int64_t terms[3]; /* of each element of y, dx, dw */
} conv_case;

/* Sizes and numbers; the arrays come from the tests. Some cases are like a small model's layers. */
static conv_case conv_begin(overlay_case *c, int i, int64_t *xs, int64_t *ws, int64_t *ys)
{
    static const int64_t kernels[] = { 1, 3, 3, 2, 5, 7 };
    conv_case v = { .a = { .groups = case_pick(c, 3) ? 1 : 1 + case_pick(c, 4) } };
    const bool large = i % 10 == 3, deep = i % 5 == 1; /* deep: whole vectors of channels */
    xs[0] = case_pick(c, 9) ? 1 + case_pick(c, 3) : 0;
    int64_t each = large ? 24 : deep ? 16 : 1 + case_pick(c, 5);
    int64_t out = large ? 40 : deep ? 32 : 1 + case_pick(c, 6);
    if (i % 7 == 2)
        v.a.groups = each * 3, each = 1, out = 1 + case_pick(c, 2); /* depthwise */
    xs[1] = each * v.a.groups, ws[1] = each;
    ws[0] = ys[1] = out * v.a.groups;
    for (int d = 0; d < 2; d++) {
        v.a.stride[d] = 1 + case_pick(c, 2) * case_pick(c, 3);
        v.a.dilation[d] = case_pick(c, 3) ? 1 : 1 + case_pick(c, 2);
        ws[2 + d] = kernels[case_pick(c, large ? 3 : 6)];
        v.a.pad[d] = case_pick(c, 2) ? ws[2 + d] / 2 : case_pick(c, 3);
        xs[2 + d] = large ? 14 : case_pick(c, 12);
        ys[2 + d] = positions(xs[2 + d], ws[2 + d], v.a.pad[d], v.a.stride[d], v.a.dilation[d]);
    }
    ys[0] = xs[0];
    v.terms[0] = each * ws[2] * ws[3];
    v.terms[1] = out * ws[2] * ws[3];
    v.terms[2] = ys[0] * ys[2] * ys[3];
    case_note(c, " groups %d stride %d %d pad %d %d dilation %d %d", (int)v.a.groups,
              (int)v.a.stride[0], (int)v.a.stride[1], (int)v.a.pad[0], (int)v.a.pad[1],
              (int)v.a.dilation[0], (int)v.a.dilation[1]);
    return v;
}

OVERLAY(overlay_image, conv, CONV, 0, overlay_cases(200))
{
    int64_t xs[4], ws[4], ys[4];
    conv_case v = conv_begin(c, i, xs, ws, ys);
    kn_dtype t = case_float(c);
    v.a.x = image(c, t, NORMAL, xs);
    v.a.w = image(c, t, NORMAL, ws);
    v.a.y = image(c, t, UNSET, ys);
    if (case_pick(c, 2))
        v.a.bias = case_vector(c, case_pick(c, 2) ? t : KN_F32, NORMAL, ys[1]);
    case_close(c, &v.a.y, sum_error(v.terms[0]));
    case_run(c, &v.a);
}

OVERLAY(overlay_image, conv_grad_x, CONV_GRAD_X, 0, overlay_cases(160))
{
    int64_t xs[4], ws[4], ys[4];
    conv_case v = conv_begin(c, i, xs, ws, ys);
    kn_dtype t = case_float(c);
    kn_conv_grad_x_args a = { .groups = v.a.groups };
    memcpy(a.stride, v.a.stride, sizeof a.stride);
    memcpy(a.pad, v.a.pad, sizeof a.pad);
    memcpy(a.dilation, v.a.dilation, sizeof a.dilation);
    a.dy = image(c, t, NORMAL, ys);
    a.w = image(c, t, NORMAL, ws);
    a.dx = image(c, t, UNSET, xs);
    case_close(c, &a.dx, sum_error(v.terms[1]));
    case_run(c, &a);
}

OVERLAY(overlay_image, conv_grad_w, CONV_GRAD_W, 0, overlay_cases(160))
{
    int64_t xs[4], ws[4], ys[4];
    conv_case v = conv_begin(c, i, xs, ws, ys);
    kn_dtype t = case_float(c);
    kn_dtype to = (t == KN_BF16 || t == KN_F16) && case_pick(c, 2) ? KN_F32 : t;
    kn_conv_grad_w_args a = { .groups = v.a.groups };
    memcpy(a.stride, v.a.stride, sizeof a.stride);
    memcpy(a.pad, v.a.pad, sizeof a.pad);
    memcpy(a.dilation, v.a.dilation, sizeof a.dilation);
    a.dy = image(c, t, NORMAL, ys);
    a.x = image(c, t, NORMAL, xs);
    a.dw = image(c, to, UNSET, ws);
    case_close(c, &a.dw, sum_error(v.terms[2]));
    case_run(c, &a);
}

/* Weights that meet only the pad around a narrow image: their gradient is 0. */
OVERLAY(overlay_image, conv_grad_w_of_the_pad, CONV_GRAD_W, 5000, 16)
{
    static const int64_t sizes[4][4] = {
        { 1, 5, 2, 2 }, { 2, 3, 3, 1 }, { 1, 7, 1, 3 }, { 3, 4, 2, 1 }
    };
    /* columns, kernel, stride, pad */
    const int64_t *s = sizes[i % 4], Q = positions(s[0], s[1], s[3], s[2], 1);
    const kn_dtype t = i / 4 % 2 ? KN_BF16 : case_float(c);
    kn_conv_grad_w_args a = { .groups = 1, .stride = { 1, s[2] }, .pad = { 0, s[3] } };
    a.dilation[0] = a.dilation[1] = 1;
    a.dy = image(c, t, NORMAL, (int64_t[]){ 2, 8, 3, Q });
    a.x = image(c, t, NORMAL, (int64_t[]){ 2, 4, 3, s[0] });
    a.dw = image(c, i / 8 ? t : t == KN_BF16 ? KN_F32 : t, UNSET, (int64_t[]){ 8, 4, 1, s[1] });
    case_close(c, &a.dw, sum_error(6 * Q));
    case_run(c, &a);
}

/* 1 x 1 with a stride, of channels that fill no vector: libraries gather what they meet. */
OVERLAY(overlay_image, conv_grad_w_of_few_channels, CONV_GRAD_W, 5100, overlay_cases(48))
{
    const int64_t C = 2 + i % 6, O = 1 + case_pick(c, 16), N = 1 + case_pick(c, 2);
    const int64_t H = 8 + 2 * case_pick(c, 14), stride = 2 + case_pick(c, 2);
    const int64_t P = positions(H, 1, 0, stride, 1);
    const kn_dtype t = case_float(c);
    kn_conv_grad_w_args a = { .groups = 1, .stride = { stride, stride }, .dilation = { 1, 1 } };
    a.dy = image(c, t, NORMAL, (int64_t[]){ N, O, P, P });
    a.x = image(c, t, NORMAL, (int64_t[]){ N, C, H, H });
    a.dw = image(c, t, UNSET, (int64_t[]){ O, C, 1, 1 });
    case_close(c, &a.dw, sum_error(N * P * P));
    case_run(c, &a);
}

/* Weights of channels-last images whose channels fill no vector, with steps between their rows. */
OVERLAY(overlay_image, conv_grad_w_of_wide_steps, CONV_GRAD_W, 5200, overlay_cases(24))
{
    const int64_t C = 1 + case_pick(c, 40), O = 8 + case_pick(c, 60);
    const int64_t H = 5 + case_pick(c, 9), W = 26 + case_pick(c, 8);
    const kn_dtype t = i % 2 ? case_float(c) : KN_BF16;
    kn_conv_grad_w_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 2, 1 } };
    a.dy = image_last(c, t, NORMAL, (int64_t[]){ 2, O, H - 2, W - 1 });
    a.x = image_last(c, t, NORMAL, (int64_t[]){ 2, C, H, W });
    a.dw = image(c, t, UNSET, (int64_t[]){ O, C, 2, 2 });
    case_close(c, &a.dw, sum_error(2 * H * W));
    case_run(c, &a);
}

/* Weights of one column, with a stride that reaches beyond it. */
OVERLAY(overlay_image, conv_grad_w_of_one_column, CONV_GRAD_W, 5250, overlay_cases(24))
{
    const int64_t C = 1 + case_pick(c, 8), O = 16 * (1 + case_pick(c, 4)), K = 1 + case_pick(c, 3);
    const int64_t P = 1 + case_pick(c, 9), H = 2 * (P - 1) + K;
    const kn_dtype t = i % 2 ? case_float(c) : KN_BF16;
    kn_conv_grad_w_args a = { .groups = 1, .stride = { 2, 2 }, .dilation = { 1, 1 } };
    a.dy = case_array(c, t, DENSE, NORMAL, 4, (int64_t[]){ 2, O, P, 1 });
    a.x = case_array(c, t, DENSE, NORMAL, 4, (int64_t[]){ 2, C, H, 1 });
    a.dw = image(c, t, UNSET, (int64_t[]){ O, C, K, 1 });
    case_close(c, &a.dw, sum_error(2 * P));
    case_run(c, &a);
}

/* 1 x 1, of an odd number of channels. */
OVERLAY(overlay_image, conv_grad_x_of_odd_channels, CONV_GRAD_X, 5300, overlay_cases(24))
{
    const int64_t C = 1 + case_pick(c, 40), O = 3 + 2 * case_pick(c, 30), N = 1 + case_pick(c, 2);
    const int64_t H = 3 * (1 + case_pick(c, 3)), W = 10 * (1 + case_pick(c, 4));
    const kn_dtype t = i % 2 ? case_float(c) : KN_BF16;
    kn_conv_grad_x_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 } };
    a.dy = image_last(c, t, NORMAL, (int64_t[]){ N, O, H, W });
    a.w = image(c, t, NORMAL, (int64_t[]){ O, C, 1, 1 });
    a.dx = image_last(c, t, UNSET, (int64_t[]){ N, C, H, W });
    case_close(c, &a.dx, sum_error(O));
    case_run(c, &a);
}

/* Few positions and many channels: pieces of channels. 1 x 1: a product, also with a stride. */
OVERLAY(overlay_image, conv_grad_w_of_many_channels, CONV_GRAD_W, 6000, overlay_cases(40))
{
    const int64_t kernel = i % 2 ? 1 : 3, N = 1 + case_pick(c, 6), stride = 1 + case_pick(c, 2);
    const int64_t O = 128 + 36 * case_pick(c, 4), C = i % 4 == 1 ? 300 : 5 + 8 * case_pick(c, 2);
    const int64_t H = 2 + case_pick(c, 4), P = positions(H, kernel, kernel / 2, stride, 1);
    const kn_dtype t = case_pick(c, 2) ? KN_BF16 : case_float(c);
    kn_conv_grad_w_args a = { .groups = 1, .stride = { stride, stride } };
    a.pad[0] = a.pad[1] = kernel / 2, a.dilation[0] = a.dilation[1] = 1;
    a.dy = image(c, t, NORMAL, (int64_t[]){ N, O, P, P });
    a.x = image(c, t, NORMAL, (int64_t[]){ N, C, H, H });
    a.dw = image(c, i % 3 && t != KN_F64 ? KN_F32 : t, UNSET, (int64_t[]){ O, C, kernel, kernel });
    case_note(c, " kernel %d stride %d", (int)kernel, (int)stride);
    case_close(c, &a.dw, sum_error(N * P * P));
    case_run(c, &a);
}

/* 1 x 1, with fewer positions or more than the image has. */
OVERLAY(overlay_image, conv_grad_w_of_other_positions, CONV_GRAD_W, 6200, 16)
{
    const int64_t H = 3 + case_pick(c, 4), W = 3 + case_pick(c, 4);
    const int64_t P = H - 1 + case_pick(c, 3), Q = W - 1 + case_pick(c, 3);
    kn_conv_grad_w_args a = { .groups = 1, .stride = { 1, 1 }, .dilation = { 1, 1 } };
    a.dy = image_last(c, KN_F32, NORMAL, (int64_t[]){ 2, 65, P, Q });
    a.x = image_last(c, KN_F32, NORMAL, (int64_t[]){ 2, 66, H, W });
    a.dw = image(c, KN_F32, UNSET, (int64_t[]){ 65, 66, 1, 1 });
    case_close(c, &a.dw, sum_error(2 * P * Q));
    case_run(c, &a);
}

/* Many positions: sums of pieces, and of blocks of one, also with more rows than channels. Beside
 * oneDNN results of few rows or channels are left to it, but for one channel. */
OVERLAY(overlay_image, conv_grad_w_of_many_positions, CONV_GRAD_W, 6100, overlay_cases(32))
{
    static const int64_t sizes[4][2] = { { 7, 5 }, { 64, 17 }, { 81, 64 }, { 33, 1 } };
    const bool each = i % 8 == 2; /* position is a window */
    const int64_t O = sizes[i % 4][0], C = sizes[i % 4][1], N = each ? 3 : 1 + 2 * case_pick(c, 2);
    const int64_t kernel = i % 4 == 2 ? 1 : 3 + 4 * (i % 8 == 3);
    const kn_dtype t = each && i % 16 > 8 ? KN_BF16 : case_float(c);
    kn_conv_grad_w_args a = { .groups = 1 };
    int64_t x[4] = { N, C }, y[4] = { N, O };
    for (int d = 0; d < 2; d++) {
        a.stride[d] = each ? 1 : 1 + case_pick(c, 2), a.dilation[d] = 1 + case_pick(c, 2);
        a.pad[d] = case_pick(c, kernel);
        x[2 + d] = a.stride[d] * (23 + case_pick(c, 3)) + kernel;
        y[2 + d] = positions(x[2 + d], kernel, a.pad[d], a.stride[d], a.dilation[d]);
        case_note(c, " stride %d pad %d dilation %d", (int)a.stride[d], (int)a.pad[d],
                  (int)a.dilation[d]);
    }
    a.dy = image_last(c, t, NORMAL, y);
    a.x = image_last(c, t, NORMAL, x);
    a.dw = image(c, t, UNSET, (int64_t[]){ O, C, kernel, kernel });
    case_close(c, &a.dw, sum_error(N * y[2] * y[3]));
    case_run(c, &a);
}

KN_TEST(overlay_image, conv_of_other_shapes)
{
    float x[64] = { 0 }, w[36] = { 0 }, y[64];
    kn_conv_args a = { .y = kn_array_make(y, KN_F32, 4, (int64_t[]){ 1, 2, 4, 4 }),
                       .x = kn_array_make(x, KN_F32, 4, (int64_t[]){ 1, 4, 4, 4 }),
                       .w = kn_array_make(w, KN_F32, 4, (int64_t[]){ 2, 1, 1, 1 }),
                       .stride = { 1, 1 },
                       .dilation = { 1, 1 },
                       .groups = 2 }; /* w should have 2 channels */
    KN_CHECK(!kn_kernel_fits(KN_K_CONV, &a), "fits");
    KN_CHECK_ERROR("conv: x f32[1,4,4,4], w f32[2,1,1,1] and y f32[1,2,4,4] in 2 groups");
}

/* ---- batch norm ---------------------------------------------------------------------------- */

/* An image, or what else batch norm takes, of the case's shape. */
static kn_array of_shape(overlay_case *c, kn_dtype t, values v)
{
    return c->ndim == 4 ? image(c, t, v, c->shape) : case_output(c, t, v);
}

static kn_batch_norm_args batch_norm_case(overlay_case *c, int i)
{
    const int64_t shape[5] = { case_pick(c, 9) ? 1 + case_pick(c, 4) : 0,
                               1 + (i % 4 ? case_pick(c, 9) : case_size(c, 257)),
                               case_size(c, i % 6 ? 7 : 33), case_size(c, 17), 2 };
    memcpy(c->shape, shape, sizeof shape);
    c->ndim = i % 5 == 2 ? 2 + 3 * (int)case_pick(c, 2) : 4;
    kn_dtype t = case_float(c), stat = t == KN_F64 ? KN_F64 : KN_F32;
    kn_dtype wt = case_pick(c, 2) && t != KN_F64 ? KN_F32 : t;
    kn_batch_norm_args a = { .eps = 1e-5, .momentum = 0.1, .training = i % 3 > 0 };
    int64_t C = shape[1];
    a.x = of_shape(c, t, NORMAL);
    a.y = of_shape(c, t, UNSET);
    if (case_pick(c, 4))
        a.w = case_vector(c, wt, NORMAL, C);
    if (case_pick(c, 4))
        a.b = case_vector(c, wt, NORMAL, C);
    a.mean = case_vector(c, stat, UNSET, C);
    a.rstd = case_vector(c, stat, UNSET, C);
    if (!a.training || case_pick(c, 4)) {
        kn_dtype rt = case_pick(c, 5) ? stat : t;
        a.running_mean = case_vector(c, rt, NORMAL, C);
        a.running_var = case_vector(c, rt, POSITIVE, C);
    }
    case_note(c, "%s", a.training ? " training" : "");
    return a;
}

OVERLAY(overlay_image, batch_norm, BATCH_NORM, 0, overlay_cases(200))
{
    kn_batch_norm_args a = batch_norm_case(c, i);
    if (a.training && case_pick(c, 4) == 0)
        a.y.data = NULL; /* statistics alone */
    else
        case_close(c, &a.y, 3e-5);
    a.relu = case_pick(c, 2);
    if (a.y.data && case_pick(c, 2))
        a.add = of_shape(c, a.x.dtype, NORMAL);
    case_note(c, "%s%s", a.relu ? " relu" : "", a.add.data ? " add" : "");
    case_close(c, &a.mean, 1e-6);
    case_close(c, &a.rstd, 1e-6);
    if (a.training && a.running_mean.data) {
        case_close(c, &a.running_mean, 1e-6);
        case_close(c, &a.running_var, 1e-6);
    }
    case_run(c, &a);
}

OVERLAY(overlay_image, batch_norm_grad, BATCH_NORM_GRAD, 0, overlay_cases(200))
{
    kn_batch_norm_args f = batch_norm_case(c, i);
    case_prepare(KN_K_BATCH_NORM, &f);
    kn_batch_norm_grad_args a = {
        .x = f.x, .w = f.w, .mean = f.mean, .rstd = f.rstd, .training = f.training
    };
    kn_dtype t = f.x.dtype, wt = f.w.data ? f.w.dtype : t;
    const int64_t C = f.x.shape[1], M = C ? kn_array_numel(&f.x) / C : 0;
    a.dy = of_shape(c, f.x.dtype, NORMAL);
    if (i % 5)
        a.dx = of_shape(c, f.x.dtype, UNSET);
    a.relu = case_pick(c, 2);
    if (a.relu && case_pick(c, 2))
        a.y = of_shape(c, f.x.dtype, NORMAL);
    else
        a.b = f.b;
    if (case_pick(c, 3) == 0) {
        a.dadd = of_shape(c, f.x.dtype, UNSET);
        case_close(c, &a.dadd, 0);
    }
    case_note(c, "%s%s%s", a.relu ? " relu" : "", a.y.data ? " y" : "", a.dadd.data ? " dadd" : "");
    if (i % 7)
        a.dw = case_vector(c, wt, UNSET, C);
    if (i % 4)
        a.db = case_vector(c, case_pick(c, 2) ? wt : t, UNSET, C);
    if (a.training && case_pick(c, 3) == 0) {
        a.mean_dw = case_vector(c, t == KN_F64 ? KN_F64 : KN_F32, NORMAL, C);
        a.mean_db = case_vector(c, t == KN_F64 ? KN_F64 : KN_F32, NORMAL, C);
    }
    /* over few equal values rstd is large, and so are the results */
    double most = 1;
    for (int64_t k = 0; k < C; k++)
        most = fmax(most, case_get(&f.rstd, k));
    if (a.dx.data)
        case_close(c, &a.dx, 2e-5 * most * most);
    if (a.dw.data)
        case_close(c, &a.dw, 2e-6 * most * (double)(M + 1));
    if (a.db.data)
        case_close(c, &a.db, 2e-6 * (double)(M + 1));
    case_run(c, &a);
}

/* Rows of samples, or of ranks, which hold their counts too, side by side. */
OVERLAY(overlay_image, batch_norm_join, BATCH_NORM_JOIN, 0, overlay_cases(100))
{
    const int64_t n = case_pick(c, 9) ? 1 + case_pick(c, 20) : 0, C = case_size(c, 300);
    const kn_dtype t = case_float(c);
    const layout l = case_layout(c, OUTPUT_LAYOUTS);
    kn_batch_norm_join_args a = { .moments = i % 3 > 0,
                                  .finish = i % 2 > 0,
                                  .scale = 0.5 + case_pick(c, 4),
                                  .each = 1 + case_pick(c, 40),
                                  .momentum = 0.25 };
    a.from_a = case_array(c, t, l, NORMAL, 2, (int64_t[]){ n, C });
    a.from_b = case_array(c, t, l, POSITIVE, 2, (int64_t[]){ n, C });
    if ((a.moments && case_pick(c, 2)) || (!a.moments && a.finish))
        a.from_count = case_vector(c, KN_F64, POSITIVE, a.moments ? n : 1);
    a.a = case_vector(c, case_float(c), UNSET, C);
    a.b = case_vector(c, case_float(c), UNSET, C);
    case_close(c, &a.a, 1e-5);
    case_close(c, &a.b, 1e-5);
    if (a.moments) {
        a.count = case_vector(c, KN_F64, UNSET, 1);
        case_close(c, &a.count, 1e-5);
    }
    if (a.moments && a.finish && case_pick(c, 2)) {
        a.running_mean = case_vector(c, case_float(c), NORMAL, C);
        a.running_var = case_vector(c, case_float(c), POSITIVE, C);
        case_close(c, &a.running_mean, 1e-5);
        case_close(c, &a.running_var, 1e-5);
    }
    case_note(c, "%s%s", a.moments ? " moments" : " sums", a.finish ? " finished" : "");
    case_run(c, &a);
}

/* Where the statistics are given, x isn't in dx, whatever it is. */
KN_TEST(overlay_image, batch_norm_grad_of_infinities_with_given_statistics)
{
    float x[24], dy[24], dx[24], mean[2] = { 0.5f, 0 }, rstd[2] = { 2, 0.25f };
    for (int i = 0; i < 24; i++)
        x[i] = i % 5 ? 1 : i % 2 ? INFINITY : NAN, dy[i] = (float)i;
    kn_batch_norm_grad_args a = { .mean = kn_array_make(mean, KN_F32, 1, (int64_t[]){ 2 }) };
    a.rstd = kn_array_make(rstd, KN_F32, 1, (int64_t[]){ 2 });
    for (int last = 0; last < 2; last++) {
        a.dx = kn_array_make(dx, KN_F32, 4, (int64_t[]){ 1, 2, 3, 4 });
        if (last)
            memcpy(a.dx.stride, (int64_t[]){ 24, 1, 8, 2 }, 4 * sizeof(int64_t));
        a.x = a.dy = a.dx;
        a.x.data = x, a.dy.data = dy;
        KN_CHECK(KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_BATCH_NORM_GRAD, a));
        for (int i = 0; i < 24; i++)
            KN_CHECK(dx[i] == rstd[last ? i % 2 : i / 12] * dy[i], "layout %d: element %d is %g",
                     last, i, (double)dx[i]);
    }
}

/* ---- pooling ------------------------------------------------------------------------------- */

static kn_window window_case(overlay_case *c, int i, kn_pool kind, int64_t *xs, int64_t *ys)
{
    kn_window w = { .adaptive = i % 5 == 4, .count_include_pad = i % 2 };
    xs[0] = ys[0] = case_pick(c, 9) ? 1 + case_pick(c, 2) : 0;
    xs[1] = ys[1] = i % 6 == 1 ? 33 : 1 + case_pick(c, 4);
    for (int d = 0; d < 2; d++) {
        xs[2 + d] = case_pick(c, 12);
        ys[2 + d] = case_pick(c, 5);
        if (w.adaptive)
            continue;
        w.kernel[d] = 1 + case_pick(c, 4);
        w.stride[d] = 1 + case_pick(c, 3);
        w.dilation[d] = kind == KN_POOL_MAX ? 1 + case_pick(c, 2) : 1;
        w.pad[d] = case_pick(c, w.kernel[d] / 2 + 1);
        const bool ceil_mode = case_pick(c, 3) == 0; /* one more, beyond the edge */
        ys[2 + d] = positions(xs[2 + d], w.kernel[d], w.pad[d], w.stride[d], w.dilation[d]);
        if (ceil_mode && ys[2 + d] * w.stride[d] < xs[2 + d] + w.pad[d])
            ys[2 + d]++;
    }
    case_note(c, " %s kernel %d %d stride %d %d pad %d %d dilation %d %d%s%s",
              kind == KN_POOL_MAX ? "max" : "avg", (int)w.kernel[0], (int)w.kernel[1],
              (int)w.stride[0], (int)w.stride[1], (int)w.pad[0], (int)w.pad[1], (int)w.dilation[0],
              (int)w.dilation[1], w.adaptive ? " adaptive" : "",
              w.count_include_pad ? " with pad" : "");
    return w;
}

OVERLAY(overlay_image, pool, POOL, 0, overlay_cases(240))
{
    int64_t xs[4], ys[4];
    kn_dtype t = case_float(c);
    kn_pool_args a = { .kind = i % 3 ? KN_POOL_MAX : KN_POOL_AVG };
    a.window = window_case(c, i, a.kind, xs, ys);
    a.x = image(c, t, a.kind == KN_POOL_MAX && i % 4 ? SPECIAL : NORMAL, xs);
    a.y = image(c, t, UNSET, ys);
    if (a.kind == KN_POOL_MAX && i % 8) {
        a.index = image(c, KN_I32, UNSET, ys);
        case_exact(c, &a.index);
    }
    case_close(c, &a.y, a.kind == KN_POOL_MAX ? 0 : 1e-6);
    if (a.kind == KN_POOL_MAX)
        c->rel[c->outs - 1] = 0, c->abs[c->outs - 1] = 1e-300; /* exact but for NaN's bits */
    case_run(c, &a);
}

OVERLAY(overlay_image, pool_grad, POOL_GRAD, 0, overlay_cases(240))
{
    int64_t xs[4], ys[4];
    kn_dtype t = case_float(c);
    kn_pool_grad_args a = { .kind = i % 3 ? KN_POOL_MAX : KN_POOL_AVG };
    a.window = window_case(c, i, a.kind, xs, ys);
    if (a.kind == KN_POOL_MAX) {
        kn_pool_args f = { .kind = a.kind, .window = a.window };
        f.x = image(c, t, NORMAL, xs);
        f.y = image(c, t, UNSET, ys);
        a.index = f.index = image(c, KN_I32, UNSET, ys);
        case_prepare(KN_K_POOL, &f);
    }
    a.dy = image(c, t, NORMAL, ys);
    a.dx = image(c, t, UNSET, xs);
    case_close(c, &a.dx, 1e-6);
    case_run(c, &a);
}

/* ---- interpolation --------------------------------------------------------------------------- */

/* Grids of both kinds of scale, and of numbers that nobody asks for. */
static kn_grid grid_case(overlay_case *c, int i, int64_t *xs, int64_t *ys)
{
    kn_grid g = { { 0, 0 }, { 1, 1 }, i % 4 == 2 ? 0.5 : 0 };
    xs[0] = ys[0] = case_pick(c, 9) ? 1 + case_pick(c, 2) : 0;
    xs[1] = ys[1] = i % 6 == 1 ? 33 : 1 + case_pick(c, 4);
    for (int d = 0; d < 2; d++) {
        xs[2 + d] = 1 + case_pick(c, 9);
        ys[2 + d] = case_pick(c, 14);
        const double H = (double)xs[2 + d], P = (double)ys[2 + d];
        if (i % 4 == 0)
            g.mul[d] = (double)case_pick(c, 9), g.div[d] = 4, g.centre = (double)case_pick(c, 4);
        else if (i % 4 == 1)
            g.mul[d] = P > 1 ? H - 1 : 0, g.div[d] = P > 1 ? P - 1 : 1;
        else if (P > 0)
            g.mul[d] = H, g.div[d] = P;
    }
    case_note(c, " mul %g %g div %g %g centre %g", g.mul[0], g.mul[1], g.div[0], g.div[1],
              g.centre);
    return g;
}

OVERLAY(overlay_image, interpolate, INTERPOLATE, 0, overlay_cases(160))
{
    int64_t xs[4], ys[4];
    kn_dtype t = case_float(c);
    kn_interpolate_args a = { .grid = grid_case(c, i, xs, ys), .linear = i % 3 > 0 };
    a.x = image(c, t, NORMAL, xs);
    a.y = image(c, t, UNSET, ys);
    case_close(c, &a.y, 1e-6);
    case_run(c, &a);
}

OVERLAY(overlay_image, interpolate_grad, INTERPOLATE_GRAD, 0, overlay_cases(160))
{
    int64_t xs[4], ys[4];
    kn_dtype t = case_float(c);
    kn_interpolate_grad_args a = { .grid = grid_case(c, i, xs, ys), .linear = i % 3 > 0 };
    a.dy = image(c, t, NORMAL, ys);
    a.dx = image(c, t, UNSET, xs);
    case_close(c, &a.dx, 4e-6 * (double)(ys[2] * ys[3] + 1));
    case_run(c, &a);
}
