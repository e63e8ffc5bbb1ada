/* tests/autograd/op_cases.h: each operation as a function of its inputs, and the table of its cases
 * for ops_test.c: odd, size-1 and size-0 shapes; inputs that are transposed, sliced or stretched;
 * broadcasts. */
#ifndef KNAP_TESTS_OP_CASES_H
#define KNAP_TESTS_OP_CASES_H

#include "tests/autograd/op_cases_image.h"
#include "tests/autograd/op_cases_index.h"

#define UNARY(name)                                                                                \
    static kn_tensor *run_##name(kn_tensor *const *x)                                              \
    {                                                                                              \
        return kn_##name(x[0]);                                                                    \
    }
#define BINARY(name)                                                                               \
    static kn_tensor *run_##name(kn_tensor *const *x)                                              \
    {                                                                                              \
        return kn_##name(x[0], x[1]);                                                              \
    }
/* The kinds of kernels/kinds.h that have a derivative. */
#define IF_NOTHING(...) __VA_ARGS__
#define IF_X(...)       __VA_ARGS__
#define IF_Y(...)       __VA_ARGS__
#define IF_AB(...)      __VA_ARGS__
#define IF_B_OUT(...)   __VA_ARGS__
#define IF_AB_OUT(...)  __VA_ARGS__
#define IF_NO_GRAD(...)
#define RUN_PLAIN(MAKE, name)                        MAKE(name)
#define RUN_PARAMS(MAKE, name)                       /* below */
#define RUN_UNARY(kind, name, function, reads, ...)  IF_##reads(RUN_##function(UNARY, name))
#define RUN_BINARY(kind, name, function, reads, ...) IF_##reads(RUN_##function(BINARY, name))
KN_UNARY_KINDS(RUN_UNARY)
KN_BINARY_KINDS(RUN_BINARY)
UNARY(softmax)
UNARY(log_softmax)
BINARY(matmul)

/* An operation that no function of autograd.h applies by itself. */
static const kn_op *named(const char *name)
{
    for (int i = 0; kn_op_at(i); i++)
        if (strcmp(kn_op_at(i)->name, name) == 0)
            return kn_op_at(i);
    KN_CHECK(false, "no operation is named '%s'", name);
    return NULL;
}
static kn_tensor *run_affine(kn_tensor *const *x)
{
    return kn_add_scalar(kn_scale(x[0], -2.5), 0.75);
}
static kn_tensor *run_pow(kn_tensor *const *x)
{
    return kn_pow(x[0], 2.5);
}
static kn_tensor *run_cube(kn_tensor *const *x)
{
    return kn_pow(x[0], 3);
}
static kn_tensor *run_clamp(kn_tensor *const *x)
{
    return kn_clamp(x[0], -0.6, 0.7);
}
static kn_tensor *run_hardtanh(kn_tensor *const *x)
{
    return kn_hardtanh(x[0], .low = -0.6, .high = 0.7);
}
static kn_tensor *run_leaky_relu(kn_tensor *const *x)
{
    return kn_leaky_relu(x[0], .slope = 0.3);
}
static kn_tensor *run_elu(kn_tensor *const *x)
{
    return kn_elu(x[0], .alpha = 1.4);
}
static kn_tensor *run_softplus(kn_tensor *const *x) /* both sides of the threshold */
{
    return kn_softplus(x[0], .beta = 3, .threshold = 1.25);
}
static kn_tensor *run_add_scaled(kn_tensor *const *x)
{
    return kn_add_scaled(x[0], x[1], -1.5);
}
static kn_tensor *run_lerp(kn_tensor *const *x)
{
    return kn_lerp(x[0], x[1], 0.3);
}
static kn_tensor *run_mul_itself(kn_tensor *const *x) /* one leaf as both inputs */
{
    return kn_mul(x[0], x[0]);
}
static kn_tensor *run_twice(kn_tensor *const *x)
{
    return kn_add(x[0], x[0]);
}
static kn_tensor *run_gram(kn_tensor *const *x)
{
    return kn_matmul(x[0], kn_transpose(x[0], -1, -2));
}
static kn_tensor *run_where(kn_tensor *const *x)
{
    bool pick[3] = { true, false, true };
    return kn_where(kn_from(KN_BOOL, CHECKED_DEVICE, pick, KN_SHAPE(3)), x[0], x[1]);
}
static kn_tensor *run_copy(kn_tensor *const *x)
{
    return kn_contiguous(x[0]);
}
/* From the CPU to the CPU by the operation itself: kn_to_device would return x. */
static kn_tensor *run_to_device(kn_tensor *const *x)
{
    return kn_apply1(named("to_device"), 1, x, 0, &(kn_device){ KN_CPU });
}
static kn_tensor *run_sum_all(kn_tensor *const *x)
{
    return kn_sum(x[0], 0, NULL, false);
}
static kn_tensor *run_sum_rows(kn_tensor *const *x)
{
    return kn_sum(x[0], 1, (int64_t[]){ 0 }, false);
}
static kn_tensor *run_sum_keep(kn_tensor *const *x)
{
    return kn_sum(x[0], 2, (int64_t[]){ 0, -1 }, true);
}
static kn_tensor *run_mean_all(kn_tensor *const *x)
{
    return kn_mean(x[0], 0, NULL, true);
}
static kn_tensor *run_mean_last(kn_tensor *const *x)
{
    return kn_mean(x[0], 1, (int64_t[]){ -1 }, false);
}
static kn_tensor *run_max(kn_tensor *const *x)
{
    return kn_amax(x[0], 0, false);
}
static kn_tensor *run_max_keep(kn_tensor *const *x)
{
    return kn_amax(x[0], -1, true);
}
static kn_tensor *run_min(kn_tensor *const *x)
{
    return kn_amin(x[0], -1, false);
}
static kn_tensor *run_reshape(kn_tensor *const *x)
{
    return kn_reshape(x[0], KN_SHAPE(-1, 2));
}
static kn_tensor *run_flatten(kn_tensor *const *x)
{
    return kn_reshape(x[0], KN_SHAPE(kn_numel(x[0])));
}
static kn_tensor *run_permute(kn_tensor *const *x)
{
    return kn_permute(x[0], 3, (int64_t[]){ 2, 0, 1 });
}
static kn_tensor *run_slice(kn_tensor *const *x)
{
    return kn_slice(x[0], 1, 1, 3);
}
static kn_tensor *run_slice_none(kn_tensor *const *x)
{
    return kn_slice(x[0], 0, 1, 1);
}
static kn_tensor *run_expand(kn_tensor *const *x)
{
    return kn_expand(x[0], KN_SHAPE(2, 3, 4));
}
static kn_tensor *run_split(kn_tensor *const *x)
{
    kn_tensor *p[3];
    return kn_chunk(x[0], 1, 3, p) ? kn_cat((kn_tensor *[]){ p[2], p[0], p[1] }, 3, 1) : NULL;
}
static kn_tensor *run_split_one(kn_tensor *const *x) /* two parts never get a gradient */
{
    kn_tensor *p[3];
    return kn_chunk(x[0], 1, 3, p) ? p[1] : NULL;
}
static kn_tensor *run_split_sizes(kn_tensor *const *x)
{
    kn_tensor *p[3];
    int64_t sizes[3] = { 1, 0, kn_size(x[0], 1) - 1 };
    return kn_split(x[0], 1, 3, sizes, p) ? kn_cat((kn_tensor *[]){ p[2], p[0], p[1] }, 3, 1)
                                          : NULL;
}
static kn_tensor *run_diagonal(kn_tensor *const *x)
{
    return kn_diagonal(x[0], -1, 0, -1);
}
static kn_tensor *run_unfold(kn_tensor *const *x) /* windows overlap */
{
    return kn_unfold(x[0], 1, 3, 2);
}
static kn_tensor *run_unfold_apart(kn_tensor *const *x)
{
    return kn_unfold(x[0], 0, 2, 2);
}
static kn_tensor *run_flip(kn_tensor *const *x)
{
    return kn_flip(x[0], 1, (int64_t[]){ -1 });
}
static kn_tensor *run_roll(kn_tensor *const *x)
{
    return kn_roll(x[0], 1, (int64_t[]){ 2 }, (int64_t[]){ -1 });
}
static kn_tensor *run_pad(kn_tensor *const *x)
{
    return kn_pad(x[0], KN_PAD_CONSTANT, 0.5, KN_SHAPE(2, -1));
}
static kn_tensor *run_cat(kn_tensor *const *x)
{
    return kn_cat((kn_tensor *[]){ x[0], x[1], x[0] }, 3, 1);
}
static kn_tensor *run_linear(kn_tensor *const *x)
{
    return kn_linear(x[0], x[1], x[2], false);
}
static kn_tensor *run_linear_in_out(kn_tensor *const *x)
{
    return kn_linear(x[0], x[1], x[2], true);
}

/* 0, 2, -100 (ignored), 1, 0, 2, ... in the shape of x's rows. */
static kn_tensor *targets_for(const kn_tensor *x)
{
    int64_t pattern[4] = { 0, 2, -100, 1 }, t[64], n = kn_numel(x) / kn_size(x, -1);
    for (int64_t i = 0; i < n; i++)
        t[i] = pattern[i % 4];
    return kn_from(KN_I64, CHECKED_DEVICE, t, kn_ndim(x) - 1, kn_shape(x));
}
static kn_tensor *run_cross_entropy(kn_tensor *const *x)
{
    return kn_cross_entropy(x[0], targets_for(x[0]));
}
static kn_tensor *run_cross_entropy_smooth(kn_tensor *const *x)
{
    return kn_cross_entropy(x[0], targets_for(x[0]), .smoothing = 0.2);
}
static kn_tensor *run_layer_norm(kn_tensor *const *x)
{
    return kn_layer_norm(x[0], x[1], x[2], 0);
}
static kn_tensor *run_rms_norm(kn_tensor *const *x)
{
    return kn_rms_norm(x[0], x[1], 0);
}
/* The norm of x + add, and the sum. */
static kn_tensor *run_add_layer_norm(kn_tensor *const *x)
{
    kn_tensor *sum, *y = kn_add_layer_norm(x[0], x[1], x[2], x[3], 0, &sum);
    return kn_add_scaled(y, sum, 0.5);
}
static kn_tensor *run_add_rms_norm(kn_tensor *const *x)
{
    kn_tensor *sum, *y = kn_add_rms_norm(x[0], x[1], x[2], 0, &sum);
    return kn_add_scaled(y, sum, 0.5);
}
static kn_tensor *run_dropout(kn_tensor *const *x)
{
    return kn_dropout(x[0], 0.4);
}
static kn_tensor *run_embedding(kn_tensor *const *x)
{
    int32_t id[6] = { 1, 0, 1, 3, 1, 3 };
    return kn_embedding(x[0], kn_from(KN_I32, CHECKED_DEVICE, id, KN_SHAPE(2, 3)));
}
static kn_tensor *run_index(kn_tensor *const *x)
{
    int64_t id[4] = { 2, 0, 2, 1 };
    return kn_index_select(x[0], -1, kn_from(KN_I64, CHECKED_DEVICE, id, KN_SHAPE(4)));
}
static kn_tensor *run_attention(kn_tensor *const *x)
{
    return kn_scaled_dot_product_attention(x[0], x[1], x[2]);
}
static kn_tensor *run_attention_causal(kn_tensor *const *x)
{
    return kn_scaled_dot_product_attention(x[0], x[1], x[2], .causal = true, .scale = 0.7);
}
static kn_tensor *run_attention_dropout(kn_tensor *const *x)
{
    return kn_scaled_dot_product_attention(x[0], x[1], x[2], .causal = true, .dropout = 0.3);
}
static kn_tensor *run_scaled_rope(kn_tensor *const *x)
{
    return kn_rope(x[0], 100, 3, .scaling = { .factor = 8, .original_ctx = 40 });
}

static kn_tensor *run_rope(kn_tensor *const *x)
{
    return kn_rope(x[0], 100, 3);
}

#define ALL_LAYOUTS(name, run, ...)                                                                \
    { name, run, 1, { { 1, { 7 } } }, __VA_ARGS__ },                                               \
        { name, run, 1, { { 2, { 3, 5 }, TRANSPOSED } }, __VA_ARGS__ },                            \
        { name, run, 1, { { 3, { 2, 1, 3 }, SLICED } }, __VA_ARGS__ },                             \
        { name, run, 1, { { 2, { 3, 4 }, STRETCHED } }, __VA_ARGS__ },                             \
        { name, run, 1, { { 0 } }, __VA_ARGS__ },                                                  \
    {                                                                                              \
        name, run, 1, { { 2, { 0, 3 } } }, __VA_ARGS__                                             \
    }
#define BROADCASTS(name, run, ...)                                                                 \
    { name, run, 2, { { 2, { 3, 5 } }, { 2, { 3, 5 } } }, __VA_ARGS__ },                           \
        { name, run, 2, { { 3, { 2, 3, 1 } }, { 2, { 1, 4 } } }, __VA_ARGS__ },                    \
        { name, run, 2, { { 1, { 4 } }, { 3, { 2, 3, 4 }, TRANSPOSED } }, __VA_ARGS__ },           \
        { name, run, 2, { { 0 }, { 2, { 3, 3 }, SLICED } }, __VA_ARGS__ },                         \
        { name, run, 2, { { 2, { 2, 3 }, STRETCHED }, { 2, { 2, 1 } } }, __VA_ARGS__ },            \
    {                                                                                              \
        name, run, 2, { { 2, { 0, 3 } }, { 1, { 3 } } }, __VA_ARGS__                               \
    }

/* The range of a kind's inputs, by its row. */
#define RANGE_LINE     0, 0
#define RANGE_POSITIVE 0.3, 2
#define RANGE_NONZERO  0.4, 2
#define UNARY_CASES(kind, name, function, reads, dtypes, domain, work)                             \
    IF_##reads(ALL_LAYOUTS(#name, run_##name, RANGE_##domain), )
#define BINARY_CASES(kind, name, function, reads, dtypes, domain)                                  \
    IF_##reads(BROADCASTS(#name, run_##name, RANGE_##domain), )

static const op_case cases[] = {
    KN_UNARY_KINDS(UNARY_CASES) KN_BINARY_KINDS(BINARY_CASES) ALL_LAYOUTS("pow", run_cube, 0, 0),
    { "mul", run_mul_itself, 1, { { 2, { 3, 4 }, TRANSPOSED } }, 0, 0 },
    { "mul", run_mul_itself, 1, { { 1, { 5 } } }, 0, 0 },
    { "add", run_twice, 1, { { 1, { 5 } } }, 0, 0 },
    { "where", run_where, 2, { { 2, { 2, 3 } }, { 1, { 3 } } }, 0, 0 },
    { "where", run_where, 2, { { 0 }, { 2, { 4, 3 }, TRANSPOSED } }, 0, 0 },
    { "cast", run_copy, 1, { { 2, { 3, 4 }, TRANSPOSED } }, 0, 0 },
    { "cast", run_copy, 1, { { 2, { 3, 4 }, STRETCHED } }, 0, 0 },
    ALL_LAYOUTS("to_device", run_to_device, 0, 0),
    ALL_LAYOUTS("sum", run_sum_all, 0, 0),
    { "sum", run_sum_rows, 1, { { 3, { 3, 2, 5 }, TRANSPOSED } }, 0, 0 },
    { "sum", run_sum_keep, 1, { { 3, { 2, 3, 2 }, SLICED } }, 0, 0 },
    { "sum", run_sum_rows, 1, { { 2, { 0, 3 } } }, 0, 0 },
    { "mean", run_mean_all, 1, { { 3, { 2, 3, 5 } } }, 0, 0 },
    { "mean", run_mean_last, 1, { { 3, { 2, 1, 5 }, TRANSPOSED } }, 0, 0 },
    { "mean", run_mean_last, 1, { { 2, { 0, 4 } } }, 0, 0 },
    { "max", run_max, 1, { { 2, { 5, 3 }, TRANSPOSED } }, 0, 0 },
    { "max", run_max_keep, 1, { { 3, { 2, 3, 4 }, SLICED } }, 0, 0 },
    { "max", run_max, 1, { { 1, { 6 } } }, 0, 0 },
    { "min", run_min, 1, { { 3, { 2, 3, 4 } } }, 0, 0 },
    { "min", run_min, 1, { { 2, { 4, 1 } } }, 0, 0 },
    { "reshape", run_reshape, 1, { { 3, { 3, 2, 4 } } }, 0, 0 },
    { "reshape", run_flatten, 1, { { 2, { 3, 4 }, TRANSPOSED } }, 0, 0 },
    { "reshape", run_flatten, 1, { { 2, { 3, 4 }, STRETCHED } }, 0, 0 },
    { "reshape", run_flatten, 1, { { 2, { 0, 4 } } }, 0, 0 },
    { "permute", run_permute, 1, { { 3, { 3, 1, 4 } } }, 0, 0 },
    { "permute", run_permute, 1, { { 3, { 3, 2, 4 }, SLICED } }, 0, 0 },
    { "slice", run_slice, 1, { { 3, { 2, 4, 3 } } }, 0, 0 },
    { "slice", run_slice, 1, { { 2, { 3, 5 }, TRANSPOSED } }, 0, 0 },
    { "slice", run_slice_none, 1, { { 2, { 3, 5 } } }, 0, 0 },
    { "expand", run_expand, 1, { { 1, { 4 } } }, 0, 0 },
    { "expand", run_expand, 1, { { 2, { 3, 1 } } }, 0, 0 },
    { "expand", run_expand, 1, { { 0 } }, 0, 0 },
    { "split", run_split, 1, { { 2, { 2, 9 } } }, 0, 0 },
    { "split", run_split, 1, { { 3, { 2, 3, 4 }, TRANSPOSED } }, 0, 0 },
    { "split", run_split_one, 1, { { 2, { 2, 6 } } }, 0, 0 },
    { "split", run_split_sizes, 1, { { 3, { 2, 4, 3 }, TRANSPOSED } }, 0, 0 },
    { "diagonal", run_diagonal, 1, { { 3, { 3, 2, 4 } } }, 0, 0 },
    { "diagonal", run_diagonal, 1, { { 2, { 4, 3 }, TRANSPOSED } }, 0, 0 },
    { "diagonal", run_diagonal, 1, { { 2, { 0, 3 } } }, 0, 0 },
    { "unfold", run_unfold, 1, { { 2, { 2, 7 }, SLICED } }, 0, 0 },
    { "unfold", run_unfold, 1, { { 3, { 2, 6, 3 }, TRANSPOSED } }, 0, 0 },
    { "unfold", run_unfold, 1, { { 2, { 0, 4 } } }, 0, 0 },
    { "unfold", run_unfold_apart, 1, { { 2, { 5, 3 }, TRANSPOSED } }, 0, 0 },
    { "flip", run_flip, 1, { { 3, { 2, 2, 3 }, TRANSPOSED } }, 0, 0 },
    { "flip", run_flip, 1, { { 4, { 2, 3, 2, 2 } } }, 0, 0 },
    { "roll", run_roll, 1, { { 3, { 2, 2, 5 }, TRANSPOSED } }, 0, 0 },
    { "roll", run_roll, 1, { { 2, { 0, 5 } } }, 0, 0 },
    { "pad", run_pad, 1, { { 3, { 2, 2, 5 }, TRANSPOSED } }, 0, 0 },
    { "pad", run_pad, 1, { { 2, { 3, 4 }, SLICED } }, 0, 0 },
    { "cat", run_cat, 2, { { 2, { 2, 3 } }, { 2, { 2, 1 } } }, 0, 0 },
    { "cat", run_cat, 2, { { 3, { 2, 3, 2 }, TRANSPOSED }, { 3, { 2, 0, 2 } } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 2, { 3, 5 } }, { 2, { 5, 4 } } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 2, { 3, 5 }, TRANSPOSED }, { 2, { 5, 1 }, SLICED } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 3, { 2, 3, 4 } }, { 2, { 4, 5 }, TRANSPOSED } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 4, { 2, 1, 2, 3 } }, { 3, { 3, 3, 2 } } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 3, { 2, 2, 3 }, STRETCHED }, { 3, { 2, 3, 2 } } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 2, { 2, 0 } }, { 2, { 0, 3 } } }, 0, 0 },
    { "matmul", run_matmul, 2, { { 2, { 0, 3 } }, { 2, { 3, 2 } } }, 0, 0 },
    { "matmul", run_gram, 1, { { 2, { 3, 4 } } }, 0, 0 },
    { "linear", run_linear, 3, { { 2, { 3, 5 } }, { 2, { 4, 5 } }, { 1, { 4 } } }, 0, 0 },
    { "linear",
      run_linear,
      3,
      { { 3, { 2, 3, 5 }, TRANSPOSED }, { 2, { 4, 5 }, TRANSPOSED }, { 1, { 4 } } },
      0,
      0 },
    { "linear", run_linear, 2, { { 1, { 5 } }, { 2, { 1, 5 } } }, 0, 0 },
    { "linear", run_linear_in_out, 3, { { 3, { 2, 1, 5 } }, { 2, { 5, 3 } }, { 1, { 3 } } }, 0, 0 },
    { "linear", run_linear_in_out, 2, { { 2, { 0, 5 } }, { 2, { 5, 3 } } }, 0, 0 },
    { "softmax", run_softmax, 1, { { 2, { 3, 5 }, TRANSPOSED } }, 0, 0 },
    { "softmax", run_softmax, 1, { { 3, { 2, 2, 7 } } }, 0, 0 },
    { "softmax", run_softmax, 1, { { 2, { 4, 1 } } }, 0, 0 },
    { "softmax", run_softmax, 1, { { 2, { 0, 3 } } }, 0, 0 },
    { "log_softmax", run_log_softmax, 1, { { 2, { 3, 5 }, SLICED } }, 0, 0 },
    { "log_softmax", run_log_softmax, 1, { { 1, { 9 } } }, 0, 0 },
    { "cross_entropy", run_cross_entropy, 1, { { 2, { 5, 3 } } }, 0, 0 },
    { "cross_entropy", run_cross_entropy, 1, { { 3, { 2, 3, 4 }, TRANSPOSED } }, 0, 0 },
    { "cross_entropy", run_cross_entropy, 1, { { 1, { 4 } } }, 0, 0 },
    { "cross_entropy", run_cross_entropy_smooth, 1, { { 2, { 6, 5 }, SLICED } }, 0, 0 },
    { "layer_norm", run_layer_norm, 3, { { 3, { 2, 3, 5 } }, { 1, { 5 } }, { 1, { 5 } } }, 0, 0 },
    { "layer_norm", run_layer_norm, 2, { { 2, { 3, 4 }, TRANSPOSED }, { 1, { 4 } } }, 0, 0 },
    { "layer_norm", run_layer_norm, 1, { { 1, { 6 } } }, 0, 0 },
    { "layer_norm", run_layer_norm, 1, { { 2, { 0, 6 } } }, 0, 0 },
    { "rms_norm", run_rms_norm, 2, { { 2, { 3, 5 }, SLICED }, { 1, { 5 } } }, 0, 0 },
    { "rms_norm", run_rms_norm, 1, { { 3, { 2, 1, 7 } } }, 0, 0 },
    { "add_layer_norm",
      run_add_layer_norm,
      4,
      { { 3, { 2, 3, 5 }, TRANSPOSED }, { 3, { 2, 3, 5 } }, { 1, { 5 } }, { 1, { 5 } } },
      0,
      0 },
    { "add_layer_norm", run_add_layer_norm, 2, { { 1, { 6 } }, { 1, { 6 } } }, 0, 0 },
    { "add_layer_norm", run_add_layer_norm, 2, { { 2, { 0, 6 } }, { 2, { 0, 6 } } }, 0, 0 },
    { "add_rms_norm",
      run_add_rms_norm,
      3,
      { { 2, { 3, 5 }, SLICED }, { 2, { 3, 5 }, STRETCHED }, { 1, { 5 } } },
      0,
      0 },
    ALL_LAYOUTS("dropout", run_dropout, 0, 0),
    { "embedding", run_embedding, 1, { { 2, { 5, 3 } } }, 0, 0 },
    { "embedding", run_embedding, 1, { { 2, { 4, 1 }, TRANSPOSED } }, 0, 0 },
    { "index", run_index, 1, { { 2, { 2, 3 } } }, 0, 0 },
    { "index", run_index, 1, { { 3, { 2, 3, 3 }, TRANSPOSED } }, 0, 0 },
    { "attention",
      run_attention,
      3,
      { { 4, { 2, 2, 3, 4 } }, { 4, { 2, 2, 5, 4 } }, { 4, { 2, 2, 5, 4 } } },
      0,
      0 },
    { "attention",
      run_attention_causal,
      3,
      { { 4, { 1, 4, 5, 3 }, SLICED }, { 4, { 1, 2, 5, 3 } }, { 4, { 1, 2, 5, 3 } } },
      0,
      0 },
    { "attention",
      run_attention_causal,
      3,
      { { 4, { 1, 3, 4, 2 }, TRANSPOSED },
        { 4, { 1, 1, 4, 2 }, TRANSPOSED },
        { 4, { 1, 1, 4, 2 } } },
      0,
      0 },
    { "attention",
      run_attention_dropout,
      3,
      { { 4, { 1, 2, 4, 2 } }, { 4, { 1, 2, 4, 2 } }, { 4, { 1, 2, 4, 2 } } },
      0,
      0 },
    { "attention",
      run_attention,
      3,
      { { 4, { 0, 2, 3, 4 } }, { 4, { 0, 2, 3, 4 } }, { 4, { 0, 2, 3, 4 } } },
      0,
      0 },
    { "rope", run_rope, 1, { { 4, { 2, 2, 3, 4 } } }, 0, 0 },
    { "rope", run_rope, 1, { { 4, { 1, 2, 3, 2 }, TRANSPOSED } }, 0, 0 },
    { "rope", run_scaled_rope, 1, { { 4, { 2, 1, 3, 8 } } }, 0, 0 },
};

/* All cases, those of images and of indices too. */
#define COUNT_OF(table) (sizeof(table) / sizeof(table)[0])
#define CASES           (COUNT_OF(cases) + COUNT_OF(image_cases) + COUNT_OF(index_cases))
static inline const op_case *case_at(size_t i)
{
    const size_t images = COUNT_OF(cases), indices = images + COUNT_OF(image_cases);
    if (i >= indices)
        return &index_cases[i - indices];
    return i < images ? &cases[i] : &image_cases[i - images];
}

#endif
