/* tests/autograd/composed_test.c: operations that are made of others, against PyTorch's results: of
 * each the sum over its elements i of y_i cos(0.7 i). Their gradients: every_functional.c. */
#include "tests/owned.h"

/* sin(1.3 k + start) */
static kn_tensor *sines(double start, int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= shape[d];
    kn_tensor *k = kn_scale(kn_arange(KN_F64, KN_CPU, n), 1.3);
    return kn_reshape(kn_sin(kn_add_scalar(k, start)), ndim, shape);
}

static kn_tensor *meshed(bool xy)
{
    kn_tensor *in[2] = { sines(1, KN_SHAPE(3)), sines(2, KN_SHAPE(4)) }, *out[2];
    return kn_meshgrid(in, 2, xy, out) ? out[1] : NULL;
}

static void check_sum(const char *what, kn_tensor *y, double want)
{
    KN_CHECK(y, "%s", what);
    const double *v = kn_data(kn_contiguous(y));
    double sum = 0;
    for (int64_t i = 0; i < kn_numel(y); i++)
        sum += v[i] * cos(0.7 * (double)i);
    KN_CHECK(fabs(sum - want) < 1e-10, "%s: %.15g, not %.15g", what, sum, want);
}
#define CHECK_SUM(call, want) check_sum(#call, call, want)

KN_TEST(composed, give_pytorchs_results)
{
    kn_tensor *image = sines(1, KN_SHAPE(1, 2, 5, 6)), *sequence = sines(1, KN_SHAPE(1, 2, 7));
    kn_tensor *volume = sines(1, KN_SHAPE(1, 2, 3, 4, 5)), *theta = sines(2, KN_SHAPE(2, 2, 3));
    kn_tensor *grid = kn_scale(sines(2, KN_SHAPE(1, 3, 3, 2)), 1.8);
    kn_tensor *a = sines(1, KN_SHAPE(3, 4)), *b = sines(2, KN_SHAPE(3, 4)),
              *c = sines(3, KN_SHAPE(3, 4)), *sign = kn_sign(a);
    CHECK_SUM(kn_interpolate(image, .sizes = { 7, 4 }, .mode = KN_BICUBIC), 0.03233220360493311);
    CHECK_SUM(kn_interpolate(image, .scale = 1.7, .mode = KN_BICUBIC, .align_corners = true),
              24.26025585118375);
    CHECK_SUM(kn_interpolate(image, .sizes = { 2, 3 }, .mode = KN_BICUBIC, .antialias = true),
              0.3982463942022618);
    CHECK_SUM(kn_interpolate(image, .sizes = { 2, 9 }, .mode = KN_BILINEAR, .antialias = true),
              0.7804037822525546);
    CHECK_SUM(kn_interpolate(image, .size = 4, .mode = KN_NEAREST_EXACT), -0.09260701007763106);
    CHECK_SUM(kn_interpolate(image, .size = 4, .mode = KN_AREA), 0.02825484225853614);
    CHECK_SUM(kn_interpolate(sequence, .size = 4, .mode = KN_BILINEAR), 0.1077812539342127);
    CHECK_SUM(kn_interpolate(volume, .sizes = { 5, 3, 8 }, .mode = KN_BILINEAR),
              0.7715076168812982);
    CHECK_SUM(kn_interpolate(volume, .size = 4), 1.833160506423475);
    CHECK_SUM(kn_interpolate(volume, .size = 2, .mode = KN_AREA), 0.08274783569129124);
    CHECK_SUM(kn_conv3d(volume, sines(2, KN_SHAPE(4, 1, 2, 3, 2)), sines(3, KN_SHAPE(4)),
                        .groups = 2, .strides = { 1, 2, 1 }, .pads = { 1, 0, 1 },
                        .dilations = { 2, 1, 3 }),
              5.974899097514311);
    CHECK_SUM(kn_conv3d(volume, sines(2, KN_SHAPE(3, 2, 2, 3, 4)), NULL, .dilations = { 1, 2, 1 },
                        .same = true),
              -0.14508823724631104);
    CHECK_SUM(kn_max_pool3d(volume, .kernels = { 2, 3, 2 }, .strides = { 1, 2, 2 },
                            .pads = { 1, 1, 0 }, .ceil_mode = true),
              -2.096859300498403);
    CHECK_SUM(kn_avg_pool3d(volume, .kernels = { 2, 3, 2 }, .strides = { 1, 2, 2 },
                            .pads = { 1, 1, 0 }, .exclude_pad = true),
              0.4478022209979219);
    CHECK_SUM(kn_avg_pool3d(volume, .kernel = 2, .pad = 1), 0.01130773342991964);
    CHECK_SUM(kn_adaptive_avg_pool3d(volume, 2, 3, 4), 1.356473192199632);
    CHECK_SUM(kn_adaptive_max_pool3d(volume, 2, 3, 4), 2.352980170797886);
    CHECK_SUM(kn_adaptive_max_pool2d(image, 2, 4), -1.127191137997254);
    CHECK_SUM(kn_adaptive_max_pool1d(sequence, 3), -0.4348145410032055);
    CHECK_SUM(kn_grid_sample(image, grid, .padding = KN_GRID_ZEROS), 0);
    CHECK_SUM(kn_grid_sample(image, grid, .padding = KN_GRID_ZEROS, .align_corners = true),
              -0.8084460332904783);
    CHECK_SUM(kn_grid_sample(image, grid, .padding = KN_GRID_BORDER), 1.09430050479561);
    CHECK_SUM(kn_grid_sample(image, grid, .padding = KN_GRID_BORDER, .align_corners = true),
              0.9495484194919812);
    CHECK_SUM(kn_grid_sample(image, grid, .padding = KN_GRID_REFLECTION), -2.823172723891966);
    CHECK_SUM(kn_grid_sample(image, grid, .padding = KN_GRID_REFLECTION, .align_corners = true),
              -3.280037680335524);
    CHECK_SUM(kn_grid_sample(image, grid, .nearest = true), 0);
    CHECK_SUM(kn_affine_grid(theta, 3, 4, false), -4.696428782900877);
    CHECK_SUM(kn_affine_grid(theta, 3, 4, true), -5.621706233003612);
    CHECK_SUM(kn_stft(kn_squeeze(sequence, 1, (int64_t[]){ 0 }), .n_fft = 4, .hop = 2,
                      .window = sines(2, KN_SHAPE(3))),
              0.9827191555694151);
    CHECK_SUM(kn_diag_embed(a, -1, 0, 2), -1.131759919623167);
    CHECK_SUM(kn_diag_embed(a, 2, -1, 1), 3.031037886816311);
    CHECK_SUM(meshed(true), 0.9534340589711953);
    CHECK_SUM(meshed(false), 0.2579068946354957);
    CHECK_SUM(kn_channel_shuffle(sines(1, KN_SHAPE(1, 6, 2)), 3), 2.335636680547966);
    CHECK_SUM(kn_cdist(a, b), -0.663290778733689);
    CHECK_SUM(kn_cdist(sines(1, KN_SHAPE(27, 4)), b), 3.453621303677361);
    CHECK_SUM(kn_cdist(a, b, .p = 3), -0.6314535917395923);
    CHECK_SUM(kn_pairwise_distance(a, b, .p = 3), 2.1408631179426);
    CHECK_SUM(kn_margin_ranking_loss(a, b, sign, .margin = 0.3), 0.2601407315337312);
    CHECK_SUM(kn_hinge_embedding_loss(b, sign), 0.7429838829583035);
    CHECK_SUM(kn_triplet_margin_loss(a, b, c, .swap = true), 0.9951268962398486);
    CHECK_SUM(kn_triplet_margin_loss(a, b, c, .p = 3, .margin = 2), 1.138584277141442);
    CHECK_SUM(kn_gaussian_nll_loss(sines(1, KN_SHAPE(3, 3)), sines(2, KN_SHAPE(3, 3)),
                                   kn_exp(sines(3, KN_SHAPE(3))), /* one a row */
                                   .reduction = KN_REDUCTION_NONE),
              0.23416565986852753);
    CHECK_SUM(kn_gaussian_nll_loss(a, b, kn_square(c), .full = true, .eps = 0.1),
              0.8237071556102483);
    CHECK_SUM(kn_poisson_nll_loss(a, kn_scale(kn_abs(b), 4), .full = true), 2.524933588593462);
    CHECK_SUM(kn_poisson_nll_loss(kn_abs(a), b, .no_log_input = true), 0.8034343274778947);
    CHECK_SUM(kn_prelu(a, sines(2, KN_SHAPE(4))), 0.5432913270855777);
    CHECK_SUM(kn_selu(a), 0.8560759991877438);
}

KN_TEST(composed, keep_the_shape_of_a_number)
{
    kn_tensor *x = kn_full(KN_F64, KN_CPU, -2, KN_SCALAR);
    kn_tensor *y = kn_prelu(x, kn_full(KN_F64, KN_CPU, 0.5, KN_SHAPE(1)));
    KN_CHECK(y && kn_ndim(y) == 0 && kn_item(y) == -1);
}

/* What one replacement puts in, no other takes out. */
KN_TEST(composed, nan_to_num_reads_what_was_there)
{
    const double all[] = { NAN, INFINITY, -INFINITY };
    kn_tensor *x = kn_from(KN_F64, KN_CPU, all, KN_SHAPE(3));
    const double *v = kn_data(kn_nan_to_num(x, .nan = INFINITY, .posinf = -INFINITY, .neginf = 5));
    KN_CHECK(v && v[0] == INFINITY && v[1] == -INFINITY && v[2] == 5);
}
