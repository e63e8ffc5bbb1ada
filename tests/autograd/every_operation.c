/* tests/autograd/every_operation.c: the cases of autograd/operations.h, of embedding, padding and
 * dropout (every.h). */
#include "tests/autograd/every.h"

/* Both halves of x's last dim, the second one first. */
static kn_tensor *parts(kn_tensor *x, bool chunk)
{
    kn_tensor *part[2];
    const bool ok =
        chunk ? kn_chunk(x, -1, 2, part) : kn_split(x, -1, 2, (int64_t[]){ 1, 3 }, part);
    return ok ? kn_cat((kn_tensor *[]){ part[1], part[0] }, 2, -1) : NULL;
}

/* ---- elementwise ----------------------------------------------------------------------------- */

EVERY(kn_add, "2 3; 3", kn_add(x, y));
EVERY(kn_sub, "2 3; 3", kn_sub(x, y));
EVERY(kn_mul, "2 3; 3", kn_mul(x, y));
EVERY(kn_maximum, "2 3; 3", kn_maximum(x, y));
EVERY(kn_minimum, "2 3; 3", kn_minimum(x, y));
EVERY(kn_div, "2 3; +3", kn_div(x, y));
EVERY(kn_add_scaled, "2 3; 3", kn_add_scaled(x, y, -0.7));
EVERY(kn_lerp, "2 3; 3", kn_lerp(x, y, 0.3));
EVERY(kn_pow_tensor, "+2 3; 3", kn_pow_tensor(x, y));
EVERY_FLAT(kn_eq, "2 3; 3", kn_eq(x, y));
EVERY_FLAT(kn_ne, "2 3; 3", kn_ne(x, y));
EVERY_FLAT(kn_lt, "2 3; 3", kn_lt(x, y));
EVERY_FLAT(kn_le, "2 3; 3", kn_le(x, y));
EVERY_FLAT(kn_gt, "2 3; 3", kn_gt(x, y));
EVERY_FLAT(kn_ge, "2 3; 3", kn_ge(x, y));
EVERY_FLAT(kn_logical_and, "2 3; 3", kn_logical_and(kn_gt(x, y), kn_isnan(x)));
EVERY_FLAT(kn_logical_or, "2 3; 3", kn_logical_or(kn_gt(x, y), kn_isnan(x)));
EVERY_FLAT(kn_logical_xor, "2 3; 3", kn_logical_xor(kn_gt(x, y), kn_isnan(x)));
EVERY_FLAT(kn_logical_not, "2 3", kn_logical_not(kn_isnan(x)));
EVERY_FLAT(kn_isnan, "2 3", kn_isnan(x));
EVERY_FLAT(kn_isinf, "2 3", kn_isinf(x));
EVERY_FLAT(kn_isfinite, "2 3", kn_isfinite(x));
EVERY(kn_scale, "2 3", kn_scale(x, -2.5));
EVERY(kn_add_scalar, "2 3", kn_add_scalar(x, 0.75));
EVERY(kn_clamp, "2 3", kn_clamp(x, -0.6, 0.7));
EVERY(kn_pow, "+2 3", kn_pow(x, 2.5));
EVERY(kn_neg, "2 3", kn_neg(x));
EVERY(kn_abs, "2 3", kn_abs(x));
EVERY(kn_square, "2 3", kn_square(x));
EVERY(kn_sign, "2 3", kn_sign(x));
EVERY(kn_floor, "2 3", kn_floor(x));
EVERY(kn_ceil, "2 3", kn_ceil(x));
EVERY(kn_round, "2 3", kn_round(x));
EVERY(kn_exp, "2 3", kn_exp(x));
EVERY(kn_expm1, "2 3", kn_expm1(x));
EVERY(kn_sin, "2 3", kn_sin(x));
EVERY(kn_cos, "2 3", kn_cos(x));
EVERY(kn_tan, "2 3", kn_tan(x));
EVERY(kn_atan, "2 3", kn_atan(x));
EVERY(kn_erf, "2 3", kn_erf(x));
EVERY(kn_tanh, "2 3", kn_tanh(x));
EVERY(kn_sigmoid, "2 3", kn_sigmoid(x));
EVERY(kn_logsigmoid, "2 3", kn_logsigmoid(x));
EVERY(kn_relu, "2 3", kn_relu(x));
EVERY(kn_relu6, "2 3", kn_relu6(x));
EVERY(kn_gelu_tanh, "2 3", kn_gelu_tanh(x));
EVERY(kn_gelu, "2 3", kn_gelu(x));
EVERY(kn_silu, "2 3", kn_silu(x));
EVERY(kn_mish, "2 3", kn_mish(x));
EVERY(kn_hardsigmoid, "2 3", kn_hardsigmoid(x));
EVERY(kn_hardswish, "2 3", kn_hardswish(x));
EVERY(kn_log, "+2 3", kn_log(x));
EVERY(kn_log1p, "+2 3", kn_log1p(x));
EVERY(kn_log2, "+2 3", kn_log2(x));
EVERY(kn_sqrt, "+2 3", kn_sqrt(x));
EVERY(kn_rsqrt, "+2 3", kn_rsqrt(x));
EVERY(kn_reciprocal, "+2 3", kn_reciprocal(x));
EVERY(kn_leaky_relu, "2 3", kn_leaky_relu(x, .slope = 0.3));
EVERY(kn_elu, "2 3", kn_elu(x, .alpha = 1.4));
EVERY(kn_softplus, "2 3", kn_softplus(x, .beta = 3, .threshold = 1.25));
EVERY(kn_hardtanh, "2 3", kn_hardtanh(x, .low = -0.6, .high = 0.7));
EVERY(kn_where, "2 3; 3", kn_where(kn_gt(kn_detach(x), kn_detach(y)), x, y));
EVERY(kn_masked_fill, "2 3", kn_masked_fill(x, kn_gt(kn_detach(x), kn_zeros_like(x)), 3));
EVERY(kn_cast, "2 3", kn_cast(x, KN_F64));
EVERY(kn_to_device, "2 3", kn_to_device(x, kn_device_of(x)));

/* ---- reductions ------------------------------------------------------------------------------ */

EVERY(kn_sum, "2 3 2", kn_sum(x, DIMS(-1, 0), true));
EVERY(kn_mean, "2 3 2", kn_mean(x, DIMS(-1, 0), true));
EVERY(kn_logsumexp, "2 3 2", kn_logsumexp(x, DIMS(-1, 0), true));
EVERY(kn_prod, "2 3 2", kn_prod(x, DIMS(-1, 0), true));
EVERY(kn_norm, "2 3 2", kn_norm(x, 3, DIMS(0, 2), false));
EVERY_FLAT(kn_any, "2 3", kn_any(x, DIMS(1), false));
EVERY_FLAT(kn_all, "2 3", kn_all(x, DIMS(1), false));
EVERY(kn_amax, "2 3", kn_amax(x, 1, false));
EVERY(kn_amin, "2 3", kn_amin(x, 1, false));
EVERY_FLAT(kn_argmax, "2 3", kn_argmax(x, 1));
EVERY_FLAT(kn_argmin, "2 3", kn_argmin(x, 1));
EVERY(kn_var, "2 3", kn_var(x, 1, (int64_t[]){ 1 }));
EVERY(kn_std, "2 3", kn_std(x, 1, (int64_t[]){ 1 }));

/* ---- indexing and order ---------------------------------------------------------------------- */

EVERY(kn_gather, "3 2", kn_gather(x, 0, WHOLE(x, (2, 2), 2, 0, 2, 1)));
EVERY(kn_take_along_dim, "3 2", kn_take_along_dim(x, WHOLE(x, (2, 1), 2, 0), 0));
EVERY(kn_scatter, "3 2; 2 2", kn_scatter(x, 0, WHOLE(x, (2, 2), 2, 0, 2, 1), y));
EVERY(kn_scatter_add, "3 2; 2 2", kn_scatter_add(x, 0, WHOLE(x, (2, 2), 2, 0, 2, 1), y));
EVERY(kn_index_add, "3 2; 3 3", kn_index_add(x, 1, WHOLE(x, (3), 1, 0, 1), y));
EVERY_FLAT(kn_one_hot, "3", kn_one_hot(WHOLE(x, (3), 1, 0, 1), 2));
EVERY(kn_sort, "3 2", kn_sort(x, 0, .descending = true));
EVERY_FLAT(kn_argsort, "3 2", kn_argsort(x, 0, false));
EVERY(kn_topk, "3 4", kn_topk(x, 2, 1));
EVERY_ROW(kn_nonzero, false, false, "2 3", kn_nonzero(x));
EVERY_ROW(kn_masked_select, true, false, "2 1; 3",
          kn_masked_select(x, kn_gt(kn_detach(y), kn_zeros_like(y))));
EVERY(kn_cumsum, "3 2", kn_cumsum(x, 0));
EVERY(kn_index_select, "3 2", kn_index_select(x, 1, WHOLE(x, (3), 1, 0, 1)));
EVERY(kn_embedding, "3 2", kn_embedding(x, WHOLE(x, (2, 2), 2, 0, 2, 1)));

/* ---- shape ----------------------------------------------------------------------------------- */

EVERY(kn_reshape, "2 3", kn_reshape(x, DIMS(3, -1)));
EVERY(kn_view, "2 3", kn_view(kn_contiguous(x), DIMS(6)));
EVERY(kn_transpose, "2 3", kn_transpose(x, 0, 1));
EVERY(kn_permute, "2 3 2", kn_permute(x, DIMS(2, 0, 1)));
EVERY(kn_slice, "2 3", kn_slice(x, 1, 1, 3));
EVERY(kn_expand, "2 1", kn_expand(x, DIMS(3, -1, 2)));
EVERY(kn_contiguous, "2 3", kn_contiguous(x));
EVERY(kn_channels_last, "1 2 2 3", kn_channels_last(x));
EVERY(kn_squeeze, "2 1 3", kn_squeeze(x, 0, NULL));
EVERY(kn_unsqueeze, "2 3", kn_unsqueeze(x, -1));
EVERY(kn_flatten, "2 3 2", kn_flatten(x, 0, 1));
EVERY(kn_unflatten, "4 3", kn_unflatten(x, 0, DIMS(2, -1)));
EVERY(kn_movedim, "2 3 2", kn_movedim(x, 0, 2));
EVERY(kn_diagonal, "3 3", kn_diagonal(x, 1, 0, 1));
EVERY(kn_unfold, "2 5", kn_unfold(x, 1, 3, 1));
EVERY(kn_chunk, "2 4", parts(x, true));
EVERY(kn_split, "2 4", parts(x, false));
EVERY(kn_cat, "2 3; 2 1", kn_cat((kn_tensor *[]){ x, y }, 2, 1));
EVERY(kn_stack, "2 3; 2 3", kn_stack((kn_tensor *[]){ x, y }, 2, 1));
EVERY(kn_flip, "2 3", kn_flip(x, DIMS(1)));
EVERY(kn_roll, "2 3", kn_roll(x, DIMS(1, -1), (int64_t[]){ 0, 1 }));
EVERY(kn_repeat, "2 3", kn_repeat(x, DIMS(2, 1, 2)));
EVERY(kn_tile, "2 3", kn_tile(x, DIMS(2)));
EVERY(kn_repeat_interleave, "2 3", kn_repeat_interleave(x, 1, DIMS(1, 0, 2)));
EVERY(kn_tril, "3 3", kn_tril(x, 0));
EVERY(kn_triu, "3 3", kn_triu(x, 1));
EVERY(kn_pad, "2 3", kn_pad(x, KN_PAD_REFLECT, 0, DIMS(1, 2)));

/* ---- products -------------------------------------------------------------------------------- */

EVERY(kn_matmul, "2 3; 3 2", kn_matmul(x, y));
EVERY(kn_einsum, "2 3; 3 2", kn_einsum("ij,jk->ki", 2, (kn_tensor *[]){ x, y }));
EVERY(kn_linear, "2 3; 2 3; 2", kn_linear(x, y, z, false));

/* ---- random ---------------------------------------------------------------------------------- */

EVERY_FLAT(kn_rand_like, "%2 3", kn_rand_like(x));
EVERY_FLAT(kn_randn_like, "%2 3", kn_randn_like(x));
EVERY_FLAT(kn_bernoulli, "%2 3", kn_bernoulli(x));
EVERY_FLAT(kn_randint, "2 3", kn_randint(KN_I64, kn_device_of(x), -3, 4, 1, 2, KN_SHAPE(2, 3)));
EVERY_FLAT(kn_randint_like, "2 3", kn_randint_like(x, -3, 4));
EVERY_FLAT(kn_randperm, "2 3", kn_randperm(kn_device_of(x), 5, 1, 2));
EVERY_FLAT(kn_multinomial, "%2 3", kn_multinomial(x, 2, false));
EVERY(kn_dropout, "2 3", kn_dropout(x, 0.4));
