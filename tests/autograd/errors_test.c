/* tests/autograd/errors_test.c: the errors that a user reads. Compiled as user code, so that the
 * public macros note file and line. */
#undef KN_BUILDING
#include "knap.h"
#include "tests/kn_test.h"

#define NUMBER_(x) #x
#define NUMBER(x)  NUMBER_(x)
#define HERE       "errors_test.c:" NUMBER(__LINE__)

static kn_tensor *zeros(int rows, int cols)
{
    return kn_zeros(KN_F32, KN_CPU, KN_SHAPE(rows, cols));
}

KN_TEST(errors, name_shapes_and_the_place)
{
    kn_tensor *a = zeros(32, 784), *b = zeros(768, 128);
    REFUSED(kn_matmul(a, b), HERE,
            "inner dims differ: a is f32[32,784], b is f32[768,128] (784 != 768)");
    REFUSED(kn_add(a, b), HERE, "add: shapes don't broadcast: a is f32[32,784], b is f32[768,128]");
    REFUSED(kn_reshape(a, KN_SHAPE(3, -1)), HERE, "f32[32,784] has 25088 elements");
    REFUSED(kn_slice(a, 0, 5, 99), HERE, "[5, 99) doesn't lie in dim 0 of size 32");
    REFUSED(kn_backward(a), HERE, "no graph");
}

KN_TEST(errors, of_dtypes_and_ranges)
{
    kn_tensor *a = zeros(2, 4), *i = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 4));
    kn_tensor *h = kn_cast(a, KN_BF16), *p[9];
    REFUSED(kn_add(a, h), "dtypes differ");
    REFUSED(kn_exp(i), "needs a float tensor, got i64");
    kn_tensor *yes = kn_eq(a, a);
    REFUSED(kn_neg(yes), "neg: bool[2,4] holds bools, no numbers");
    REFUSED(kn_sub(yes, yes), "sub: bool[2,4] holds bools");
    REFUSED(kn_div(yes, yes), "div: bool[2,4] holds bools");
    REFUSED(kn_scale(yes, 2), "scale: bool[2,4] holds bools");
    REFUSED(kn_add_scalar(yes, 1), "add_scalar: bool[2,4] holds bools");
    REFUSED(kn_softmax(kn_zeros(KN_F32, KN_CPU, KN_SCALAR), 1), "dim 1 is out of range");
    REFUSED(kn_transpose(a, 0, 2), "dim 2 is out of range");
    REFUSED(kn_chunk(a, 1, 3, p), "doesn't divide by 3");
    REFUSED(kn_view(kn_transpose(a, 0, 1), KN_SHAPE(8)), "use kn_reshape");
    REFUSED(kn_permute(a, 2, (int64_t[]){ 0, 0 }),
            "permute: the order [0, 0] must name each of the 2 dims of f32[2,4] once");
    REFUSED(kn_expand(a, KN_SHAPE(2, 5)), "only 1 stretches");
    REFUSED(kn_cat((kn_tensor *[]){ a, zeros(2, 3) }, 2, 0), "cat: argument 2 is f32[2,3]");
    REFUSED(kn_dropout(a, 1.1), "should lie in [0, 1]");
    REFUSED(kn_amax(zeros(0, 3), 0, NULL, false), "no extremum");
    REFUSED(kn_where(a, a, a), "bool condition");
    REFUSED(kn_cross_entropy(a, i), "cross_entropy: logits f32[2,4]");
    REFUSED(kn_linear_cross_entropy(a, a, i), "linear_cross_entropy: x f32[2,4] needs i64 or i32");
    REFUSED(kn_linear_cross_entropy(a, zeros(3, 5), i), "its last dim should be 5");
    REFUSED(kn_linear_cross_entropy(a, a, i, .bias = a),
            "linear_cross_entropy: x is f32[2,4], bias is f32[2,4]");
    REFUSED(kn_linear_cross_entropy(a, a, i, .smoothing = 1), "should lie in [0, 1)");
    REFUSED(kn_linear_cross_entropy(a, zeros(3, 5), i, .reduction = KN_REDUCTION_NONE),
            "its last dim should be 5");
    REFUSED(kn_linear_cross_entropy(a, a, i, .weight = a), "cross_entropy: ");
    REFUSED(kn_linear_cross_entropy(a, a, i, .reduction = 9), "reduction 9 is none of");
    REFUSED(kn_embedding(a, a), "indices must be i64 or i32");
    REFUSED(kn_scaled_dot_product_attention(a, a, a), "needs q[B,H,T,D]");
    REFUSED(kn_linear(a, zeros(3, 5), NULL, false), "its last dim should be 5");
    REFUSED(kn_layer_norm(a, zeros(1, 4), NULL, 0), "weight is f32[1,4]");
    REFUSED(kn_rope(a, 0, 0), "even D");
    REFUSED(kn_rope(a, 0, 0, .scaling = { .factor = 8, .high_freq_factor = 0.5 }),
            "the high factor above the low one");
    REFUSED(kn_rope(a, 0, 0, .scaling = { .low_freq_factor = 2 }), "no .factor");
}

KN_TEST(errors, indices_out_of_range)
{
    int64_t id[1] = { 4 }, target[1] = { 7 };
    kn_tensor *w = zeros(4, 2), *one = kn_from(KN_I64, KN_CPU, id, KN_SHAPE(1));
    KN_CHECK(!kn_embedding(w, one));
    KN_CHECK(!kn_ok(), "an index beyond the table must be an error");
    kn_clear_error();
    kn_cross_entropy(zeros(1, 4), kn_from(KN_I64, KN_CPU, target, KN_SHAPE(1)));
    KN_CHECK(!kn_ok(), "a target beyond the classes must be an error");
    kn_clear_error();
}

KN_TEST(errors, null_flows_quietly_while_an_error_stands)
{
    kn_tensor *a = zeros(2, 3), *bad = kn_matmul(a, a);
    char first[512];
    snprintf(first, sizeof first, "%s", kn_error());
    kn_tensor *y = kn_softmax(kn_add(kn_relu(bad), a));
    KN_CHECK(!y && !kn_backward(y));
    KN_CHECK(strcmp(first, kn_error()) == 0, "the first error stands");
    kn_clear_error();
    REFUSED(kn_relu(NULL), "relu: argument 1 is NULL although no error stands");
}
